// SPDX-License-Identifier: Apache-2.0
package org.viola.hdfs;

import static org.junit.Assert.assertArrayEquals;
import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertTrue;

import java.io.ByteArrayOutputStream;
import java.io.File;
import java.io.IOException;
import java.io.OutputStream;
import java.io.PrintStream;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Random;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.stream.Collectors;
import java.util.stream.Stream;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FSDataInputStream;
import org.apache.hadoop.fs.FSDataOutputStream;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.FsShell;
import org.apache.hadoop.hdfs.DistributedFileSystem;
import org.apache.hadoop.hdfs.HdfsConfiguration;
import org.apache.hadoop.hdfs.MiniDFSCluster;
import org.apache.hadoop.hdfs.client.HdfsDataInputStream;
import org.junit.After;
import org.junit.Before;
import org.junit.ClassRule;
import org.junit.BeforeClass;
import org.junit.AfterClass;
import org.junit.Test;
import org.junit.rules.TemporaryFolder;

/**
 * Tests with a NameNode and a DataNode on the loopback; the mount contains hard links to the DataNode's
 * files.
 */
public class HdfsTest {
  private static final int BLOCK = 1 << 20;
  private static final org.apache.hadoop.fs.Path FILE = new org.apache.hadoop.fs.Path("/file");
  @ClassRule
  public static final TemporaryFolder FOLDER = new TemporaryFolder(new File(System.getProperty("java.io.tmpdir")));
  private static MiniDFSCluster cluster;
  private static Path data;

  private final Counters counters = Counters.get();
  private Path mount;
  private DistributedFileSystem fs;
  private long bytes;
  private final byte[] content = Mount.noise(5 * BLOCK + 12_345, 42);

  @BeforeClass
  public static void startHdfs() throws IOException {
    Configuration conf = new HdfsConfiguration();
    conf.setLong("dfs.blocksize", BLOCK);
    conf.setLong("dfs.namenode.fs-limits.min-block-size", 1024);
    conf.setInt("dfs.heartbeat.interval", 1);
    conf.set("dfs.datanode.data.dir.perm", "700");
    File base = FOLDER.newFolder("hdfs");
    cluster = new MiniDFSCluster.Builder(conf, base).numDataNodes(1).build();
    cluster.waitActive();
    data = base.toPath().resolve("data");
  }

  @AfterClass
  public static void stopHdfs() {
    cluster.shutdown();
  }

  @Before
  public void openFileSystem() throws IOException {
    mount = FOLDER.newFolder().toPath();
    Configuration conf = new Configuration(cluster.getConfiguration(0));
    conf.set("dfs.client.replica.accessor.builder.classes", ViolaReplicaAccessorBuilder.class.getName());
    conf.set(Settings.MOUNT, mount.toString());
    conf.set(Settings.DEADLINE, "10s"); // the machine may be busy
    // A DataNode that the client takes for dead fails the read, instead of delaying it by up to 3 s.
    conf.setInt("dfs.client.max.block.acquire.failures", 0);
    fs = (DistributedFileSystem) FileSystem.newInstance(cluster.getURI(), conf);
    fs.delete(FILE, false);
    write(FILE, content);
    name();
    bytes = counters.bytes.value();
  }

  @After
  public void closeFileSystem() throws IOException {
    fs.close();
  }

  private void write(org.apache.hadoop.fs.Path path, byte[] bytes) throws IOException {
    try (FSDataOutputStream out = fs.create(path, true)) {
      out.write(bytes);
    }
  }

  /** The data files of finished blocks on the DataNode's disks. */
  private static List<Path> finished() throws IOException {
    try (Stream<Path> all = Files.walk(data)) {
      return all.filter(p -> p.toString().contains("/finalized/") && p.getFileName().toString().matches("blk_-?\\d+"))
          .collect(Collectors.toList());
    }
  }

  /** Adds each new finished block to the mount. */
  private void name() throws IOException {
    for (Path block : finished()) {
      for (File meta : block.getParent().toFile().listFiles((d, n) -> n.startsWith(block.getFileName() + "_"))) {
        String pool = data.relativize(block).getName(2).toString();
        Path folder = Files.createDirectories(mount.resolve(pool));
        Path named = folder.resolve(meta.getName());
        if (!Files.exists(named)) {
          Files.createLink(folder.resolve(meta.getName().replace(".meta", "")), block);
          Files.createLink(named, meta.toPath());
        }
      }
    }
  }

  private byte[] readAll() throws IOException {
    try (FSDataInputStream in = fs.open(FILE)) {
      return in.readAllBytes();
    }
  }

  /** Bytes read through the mount since the last call or the start. */
  private long local() {
    long now = counters.bytes.value();
    long since = now - bytes;
    bytes = now;
    return since;
  }

  @Test
  public void theShellsCatGoesThroughTheMount() throws Exception {
    Configuration conf = fs.getConf();
    PrintStream stdout = System.out;
    ByteArrayOutputStream caught = new ByteArrayOutputStream();
    System.setOut(new PrintStream(caught, true));
    int status;
    try {
      status = new FsShell(conf).run(new String[] {"-cat", fs.getUri() + "/file"});
    } finally {
      System.out.flush();
      System.setOut(stdout);
    }
    assertEquals(0, status);
    assertArrayEquals(content, caught.toByteArray());
    assertEquals(content.length, local());
  }

  @Test
  public void hadoopsOwnStatisticsCallItShortCircuit() throws Exception {
    try (FSDataInputStream in = fs.open(FILE)) {
      assertArrayEquals(content, in.readAllBytes());
      assertEquals(content.length, ((HdfsDataInputStream) in).getReadStatistics().getTotalShortCircuitBytesRead());
    }
  }

  @Test
  public void positionedReadsGoThroughTheMount() throws Exception {
    Random random = new Random(4);
    try (FSDataInputStream in = fs.open(FILE)) {
      for (int round = 0; round < 400; round++) {
        byte[] got = new byte[1 + random.nextInt(round % 10 == 0 ? 2 * BLOCK : 10_000)];
        int at = random.nextInt(content.length - got.length);
        in.readFully(at, got);
        assertArrayEquals(Arrays.copyOfRange(content, at, at + got.length), got);
      }
    }
    assertTrue(local() > 0);
  }

  @Test
  public void manyReadersAtOnceEachSeeTheirBytes() throws Exception {
    ExecutorService threads = Executors.newFixedThreadPool(8);
    List<Future<Void>> readers = new ArrayList<>();
    for (int i = 0; i < 8; i++) {
      int seed = i;
      readers.add(threads.submit(() -> {
        Random random = new Random(seed);
        try (FSDataInputStream in = fs.open(FILE)) {
          for (int round = 0; round < 60; round++) {
            byte[] got = new byte[1 + random.nextInt(100_000)];
            int at = random.nextInt(content.length - got.length);
            if (random.nextBoolean()) {
              in.readFully(at, got);
            } else {
              in.seek(at);
              in.readFully(got);
            }
            assertArrayEquals(Arrays.copyOfRange(content, at, at + got.length), got);
          }
        }
        assertArrayEquals(content, readAll());
        return null;
      }));
    }
    for (Future<Void> reader : readers) {
      reader.get();
    }
    threads.shutdown();
    assertTrue("" + local(), bytes > 0);
    assertEquals(0, Vread.of(fs.getConf()).threads.stuck());
  }

  @Test
  public void anAppendIsSeenAndTheOldNameIsNotUsed() throws Exception {
    readAll();
    byte[] more = Mount.noise(300_000, 77);
    try (OutputStream out = fs.append(FILE)) {
      out.write(more);
    }
    byte[] all = Arrays.copyOf(content, content.length + more.length);
    System.arraycopy(more, 0, all, content.length, more.length);
    local();
    assertArrayEquals(all, readAll());
    assertEquals("only the untouched blocks", 5L * BLOCK, local());
    name();
    Thread.sleep(1100); // an absent block is asked for again after a second
    assertArrayEquals(all, readAll());
    assertEquals(all.length, local());
  }

  @Test
  public void aTruncatedFileEndsWhereHdfsSays() throws Exception {
    readAll();
    int cut = 5 * BLOCK + 1000;
    if (!fs.truncate(FILE, cut)) {
      Waiting.until("truncated", () -> {
        try {
          return fs.isFileClosed(FILE);
        } catch (IOException e) {
          throw new AssertionError(e);
        }
      });
    }
    assertArrayEquals(Arrays.copyOf(content, cut), readAll());
  }

  @Test
  public void readersOfADeletedFileGoOnOrFailAsWithoutViola() throws Exception {
    try (FSDataInputStream in = fs.open(FILE)) {
      byte[] first = new byte[BLOCK / 2];
      in.readFully(first);
      fs.delete(FILE, false);
      Waiting.until("the DataNode has removed its blocks", () -> {
        try {
          cluster.triggerHeartbeats();
          return finished().isEmpty();
        } catch (IOException e) {
          throw new AssertionError(e);
        }
      });
      // The links are still in the mount, so reads through it are correct.
      byte[] rest = in.readAllBytes();
      assertArrayEquals(content, concat(first, rest));
    }
    write(FILE, content);
    assertArrayEquals("a new file of the same name has new blocks", content, readAll());
  }

  private static byte[] concat(byte[] a, byte[] b) {
    byte[] both = Arrays.copyOf(a, a.length + b.length);
    System.arraycopy(b, 0, both, a.length, b.length);
    return both;
  }

  @Test
  public void aCorruptCopyIsFoundAndTheDataNodeIsNotTakenForDead() throws Exception {
    for (boolean positioned : new boolean[] {false, true}) {
      for (Path named : files(mount)) {
        if (!named.toString().endsWith(".meta")) {
          byte[] wrong = Files.readAllBytes(named);
          wrong[wrong.length / 2] ^= 0x10;
          Files.delete(named); // the DataNode's own file stays as it is
          Files.write(named, wrong);
        }
      }
      long before = counters.fallbacks(FallbackReason.CHECKSUM);
      if (positioned) {
        byte[] got = new byte[content.length];
        try (FSDataInputStream in = fs.open(FILE)) {
          in.readFully(0, got);
        }
        assertArrayEquals(content, got);
      } else {
        assertArrayEquals(content, readAll());
      }
      assertEquals(6, counters.fallbacks(FallbackReason.CHECKSUM) - before);
      assertEquals("nobody reported a corrupt replica", 0, cluster.getNamesystem().getCorruptReplicaBlocks());
      fs.delete(FILE, false);
      write(FILE, content);
      name();
      Thread.sleep(1100);
    }
  }

  @Test
  public void aMountThatVanishesOnlyCostsTime() throws Exception {
    try (FSDataInputStream in = fs.open(FILE)) {
      byte[] first = new byte[100_000];
      in.readFully(first);
      for (Path named : files(mount)) {
        Files.delete(named);
      }
      assertArrayEquals(content, concat(first, in.readAllBytes()));
    }
    assertTrue(local() < content.length);
  }

  private static List<Path> files(Path folder) throws IOException {
    try (Stream<Path> all = Files.walk(folder)) {
      return all.filter(Files::isRegularFile).collect(Collectors.toList());
    }
  }
}
