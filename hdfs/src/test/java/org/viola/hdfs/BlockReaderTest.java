// SPDX-License-Identifier: Apache-2.0
package org.viola.hdfs;

import static org.junit.Assert.assertArrayEquals;
import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertNotNull;
import static org.junit.Assert.assertNull;
import static org.junit.Assert.assertThrows;
import static org.junit.Assert.assertTrue;

import java.io.File;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.ByteBuffer;
import java.nio.file.DirectoryStream;
import java.nio.file.Files;
import java.nio.file.NoSuchFileException;
import java.nio.file.Path;
import java.nio.file.Paths;
import java.util.Arrays;
import java.util.Random;
import java.util.concurrent.TimeUnit;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.hdfs.ReplicaAccessor;
import org.apache.hadoop.hdfs.ReplicaAccessorBuilder;
import org.apache.hadoop.security.token.SecretManager.InvalidToken;
import org.junit.Before;
import org.junit.Rule;
import org.junit.Test;
import org.junit.rules.TemporaryFolder;

public class BlockReaderTest {
  /** On a disk: some kernels do not support O_DIRECT in tmpfs. */
  @Rule
  public TemporaryFolder folder = new TemporaryFolder(new File("../build/hdfs"));
  private Mount mount;
  private final Counters counters = Counters.get();

  @Before
  public void makeMount() throws IOException {
    mount = new Mount(folder.getRoot().toPath().toRealPath());
  }

  @Test
  public void anyRangeOfAnyBlockIsWhatWasWritten() throws IOException {
    Random random = new Random(7);
    int[][] shapes = {{2, 512}, {1, 512}, {2, 4096}, {2, 65536}, {1, 1}, {0, 512}};
    int[] sizes = {0, 1, 511, 512, 513, 4095, 4096, 4097, 65_536, 1 << 20, (1 << 20) + 77, 5_000_001};
    long id = 1;
    for (int[] shape : shapes) {
      for (int size : sizes) {
        if (shape[1] == 1 && size > 70_000) {
          continue;
        }
        byte[] data = Mount.noise(size, id);
        mount.put(id, data, Mount.meta(data, shape[0], shape[1]));
        for (int round = 0; round < 12; round++) {
          int from = random.nextInt(size + 1);
          int count = random.nextInt(random.nextBoolean() ? 9000 : size + 1);
          int visible = Math.min(size, from + count);
          ReplicaAccessor reader = mount.build(id, visible);
          assertNotNull(reader);
          assertArrayEquals(Arrays.copyOfRange(data, from, visible), Mount.read(reader, from, count));
          assertEquals(-1, reader.read(visible, new byte[1], 0, 1));
          assertEquals(0, reader.read(visible, ByteBuffer.allocate(0)));
          reader.close();
        }
        id++;
      }
    }
  }

  @Test
  public void sequentialReadsOfAnySizeSeeEveryByteOnce() throws IOException {
    byte[] data = Mount.noise((9 << 20) + 1234, 3);
    mount.put(1, data);
    for (int step : new int[] {1000, 4096, 65_536, 1 << 20, 3_000_000}) {
      ReplicaAccessor reader = mount.build(1, data.length);
      byte[] got = new byte[data.length];
      int at = 0;
      for (int n; (n = reader.read(at, got, at, Math.min(step, got.length - at))) > 0;) {
        at += n;
      }
      reader.close();
      assertEquals(data.length, at);
      assertArrayEquals(data, got);
    }
  }

  @Test
  public void onlySmallSingleReadsGoThroughThePageCache() throws Exception {
    mount.conf.set(Settings.HANDLES, "1");
    int[][] reads = {{0, 1 << 20}, {1 << 20, 1 << 20}, {4096, 200_000}, {4096, 200_000}, {2_500_000, 4096},
        {3_500_000, 4096}, {2_500_000, 4096}};
    int[] open = {1, 1, 1, 1, 2, 2, 2};
    for (String io : new String[] {"auto", "direct"}) {
      // A client's configuration is read once.
      mount.conf = new Configuration(mount.conf);
      mount.conf.set(Settings.IO, io);
      mount.put(1, Mount.noise(4 << 20, 5));
      ReplicaAccessor reader = mount.build(1, 4 << 20);
      for (int i = 0; i < reads.length; i++) {
        Mount.read(reader, reads[i][0], reads[i][1]);
        assertEquals(io + ", read " + i, io.equals("auto") ? open[i] : 1, opened(mount.data(1)));
      }
      reader.close();
      // Another block evicts it from the open ones.
      mount.put(2, new byte[10]);
      mount.build(2, 10).close();
      Waiting.until("the files of block 1 are closed", () -> opened(mount.data(1)) == 0);
    }
  }

  /** Number of descriptors of this process for the file. */
  private static long opened(Path path) {
    long count = 0;
    try (DirectoryStream<Path> all = Files.newDirectoryStream(Paths.get("/proc/self/fd"))) {
      for (Path one : all) {
        try {
          count += Files.readSymbolicLink(one).equals(path) ? 1 : 0;
        } catch (NoSuchFileException e) {
          // The descriptor was closed meanwhile.
        }
      }
    } catch (IOException e) {
      throw new UncheckedIOException(e);
    }
    return count;
  }

  @Test
  public void aSingleReadAsksTheHostOnceASecond() throws Exception {
    mount.put(1, Mount.noise(1 << 20, 5));
    ReplicaAccessor reader = mount.build(1, 1 << 20);
    Mount.read(reader, 4096, 4096);
    Files.delete(mount.data(1));
    // From here on reads use the page cache, which no longer holds the bytes.
    assertThrows(InvalidToken.class, () -> Mount.read(reader, 100_000, 4096));
    reader.close();

    mount.put(2, Mount.noise(1 << 20, 6));
    ReplicaAccessor late = mount.build(2, 1 << 20);
    Mount.read(late, 4096, 4096);
    Files.delete(mount.data(2));
    Thread.sleep(TimeUnit.NANOSECONDS.toMillis(Replica.CACHE_TRUST_NANOS) + 50);
    // This read uses O_DIRECT on the open file.
    assertEquals(4096, Mount.read(late, 100_000, 4096).length);
    late.close();
  }

  @Test
  public void jumpsAndDirectBuffersWork() throws IOException {
    byte[] data = Mount.noise(4 << 20, 5);
    mount.put(1, data);
    ReplicaAccessor reader = mount.build(1, data.length);
    Random random = new Random(1);
    int at = 0;
    for (int round = 0; round < 300; round++) {
      if (random.nextInt(3) == 0) {
        at = random.nextInt(data.length);
      }
      ByteBuffer to = ByteBuffer.allocateDirect(1 + random.nextInt(200_000));
      int got = reader.read(at, to);
      assertTrue(got > 0);
      to.flip();
      assertEquals(ByteBuffer.wrap(data, at, got), to);
      at = (at + got) % data.length;
    }
    reader.close();
  }

  @Test
  public void aSingleReadFetchesLittleMoreThanItAsksFor() throws IOException {
    mount.put(1, Mount.noise(8 << 20, 5));
    long before = counters.bytesAhead.value();
    ReplicaAccessor reader = mount.build(1, 4_000_000 + 4096);
    Mount.read(reader, 4_000_000, 4096);
    reader.close();
    long fetched = counters.bytesAhead.value() - before;
    assertTrue("fetched " + fetched, fetched >= 4096 && fetched <= 3 * 4096);
  }

  @Test
  public void wrongBytesAreNeverReturnedAndTheBlockIsPaused() throws IOException {
    byte[] data = Mount.noise(3 << 20, 9);
    byte[] wrong = data.clone();
    int where = (2 << 20) + 700;
    wrong[where] ^= 1;
    mount.put(1, wrong, Mount.meta(data, 2, 512));
    long before = counters.fallbacks(FallbackReason.CHECKSUM);
    ReplicaAccessor reader = mount.build(1, data.length);
    assertArrayEquals(Arrays.copyOf(data, 2 << 20), Mount.read(reader, 0, 2 << 20));
    byte[] to = new byte[4096];
    assertThrows(InvalidToken.class, () -> reader.read(where, to, 0, 1));
    assertArrayEquals(new byte[4096], to);
    reader.close();
    assertEquals(before + 1, counters.fallbacks(FallbackReason.CHECKSUM));
    assertNull(mount.build(1, data.length));
  }

  @Test
  public void checksumsAreIgnoredWithoutVerification() throws IOException {
    byte[] data = Mount.noise(100_000, 9);
    mount.put(1, data, new byte[3]);
    mount.conf.setBoolean(Settings.VERIFY, false);
    ReplicaAccessor reader = mount.build(1, data.length);
    assertArrayEquals(data, Mount.read(reader, 0, data.length));
    reader.close();
  }

  @Test
  public void mismatchedFilesAreRefused() throws IOException {
    byte[] data = Mount.noise(10_000, 9);
    byte[] meta = Mount.meta(data, 2, 512);
    byte[] version = meta.clone();
    version[1] = 2;
    byte[] kind = meta.clone();
    kind[2] = 9;
    byte[] chunk = meta.clone();
    chunk[6] = 3;
    byte[] negative = meta.clone();
    negative[3] = (byte) 0x80;
    byte[][] bad = {
      new byte[0], Arrays.copyOf(meta, 6), Arrays.copyOf(meta, meta.length - 4), Arrays.copyOf(meta, meta.length + 4),
      version, kind, chunk, negative};
    long before = counters.fallbacks(FallbackReason.SHAPE);
    for (int i = 0; i < bad.length; i++) {
      mount.put(i, data, bad[i]);
      assertNull("meta " + i, mount.build(i, data.length));
    }
    mount.put(100, data);
    assertNull("shorter than HDFS says", mount.build(100, data.length + 1));
    assertEquals(before + bad.length + 1, counters.fallbacks(FallbackReason.SHAPE));
  }

  @Test
  public void aBlockTruncatedDuringAReadMakesTheClientUseItsDataNode() throws IOException {
    byte[] data = Mount.noise(1 << 20, 9);
    mount.put(1, data);
    ReplicaAccessor reader = mount.build(1, data.length);
    Mount.read(reader, 0, 10);
    Files.write(mount.data(1), new byte[100]);
    assertThrows(InvalidToken.class, () -> reader.read(500_000, new byte[10], 0, 10));
    reader.close();
    assertNull(mount.build(1, data.length));
  }

  @Test
  public void aMissingBlockIsLeftToItsDataNode() throws IOException, InterruptedException {
    long before = counters.fallbacks(FallbackReason.ABSENT);
    assertNull(mount.build(1, 10));
    assertNull("asked again too soon", mount.build(1, 10));
    assertEquals(before + 1, counters.fallbacks(FallbackReason.ABSENT));
    mount.put(1, Mount.noise(10, 1));
    Thread.sleep(1100);
    mount.build(1, 10).close();
  }

  @Test
  public void theSecondMountIsUsedForBlocksThatTheFirstLacks() throws IOException {
    Mount second = new Mount(folder.newFolder().toPath());
    byte[] data = Mount.noise(5000, 1);
    second.put(1, data);
    mount.conf.set(Settings.MOUNT, "/nonexistent , " + mount.path + "," + second.path);
    ReplicaAccessor reader = mount.build(1, data.length);
    assertArrayEquals(data, Mount.read(reader, 0, data.length));
    reader.close();
  }

  @Test
  public void namesThatLeaveTheMountAndEmptyConfigurationsGiveNothing() throws IOException {
    mount.put(1, Mount.noise(10, 1));
    for (String pool : new String[] {"..", ".", "", "a/b", "../x", "a\u0000", "x".repeat(129)}) {
      assertNull(new ViolaReplicaAccessorBuilder().setBlock(1, pool).setGenerationStamp(1001)
          .setConfiguration(mount.conf).setVisibleLength(10).build());
    }
    assertNull(new ViolaReplicaAccessorBuilder().setBlock(1, null).setConfiguration(mount.conf).build());
    assertNull("nothing set at all", new ViolaReplicaAccessorBuilder().build());
    assertNull(new ViolaReplicaAccessorBuilder().setBlock(1, Mount.POOL).setGenerationStamp(1001)
        .setConfiguration(new Configuration(false)).setVisibleLength(10).build());
  }

  @Test
  public void aClusterThatRequiresTokensIsLeftToItsDataNodes() throws IOException {
    mount.put(1, Mount.noise(10, 1));
    long before = counters.fallbacks(FallbackReason.TOKEN);
    byte[] token = {3, 1, 2, 3, 0, 0, 0}; // an identifier of three bytes
    ReplicaAccessorBuilder builder = new ViolaReplicaAccessorBuilder().setBlock(1, Mount.POOL).setGenerationStamp(1001)
        .setConfiguration(mount.conf).setVisibleLength(10);
    assertNull(builder.setBlockAccessToken(token).build());
    assertEquals(before + 1, counters.fallbacks(FallbackReason.TOKEN));
    assertNull("a token that cannot be read", builder.setBlockAccessToken(new byte[] {9}).build());
    builder.setBlockAccessToken(new byte[4]).build().close();
  }

  @Test
  public void openBlocksAreBoundedAndFilesAreClosed() throws Exception {
    mount.conf.setInt(Settings.HANDLES, 4);
    for (int id = 0; id < 40; id++) {
      mount.put(id, Mount.noise(1000, id));
      mount.build(id, 1000).close();
    }
    assertEquals(4, Vread.of(mount.conf).openBlocks());
    Waiting.until("all but four blocks are closed", () -> descriptors() == 8);
  }

  private long descriptors() {
    try (var links = Files.newDirectoryStream(java.nio.file.Path.of("/proc/self/fd"))) {
      long count = 0;
      for (var link : links) {
        try {
          if (Files.readSymbolicLink(link).startsWith(mount.path)) {
            count++;
          }
        } catch (IOException gone) {
          // The descriptor was closed meanwhile.
        }
      }
      return count;
    } catch (IOException e) {
      throw new AssertionError(e);
    }
  }
}
