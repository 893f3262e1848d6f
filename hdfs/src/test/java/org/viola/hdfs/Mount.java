// SPDX-License-Identifier: Apache-2.0
package org.viola.hdfs;

import java.io.ByteArrayOutputStream;
import java.io.DataOutputStream;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Random;
import java.util.zip.CRC32;
import java.util.zip.CRC32C;
import java.util.zip.Checksum;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.hdfs.ReplicaAccessor;

/** A directory that stands for viola's mount. */
final class Mount {
  static final String POOL = "BP-1-127.0.0.1-1";

  final Path path;
  Configuration conf = new Configuration(false);

  Mount(Path path) {
    this.path = path;
    conf.set(Settings.MOUNT, path.toString());
  }

  static byte[] noise(int size, long seed) {
    byte[] bytes = new byte[size];
    new Random(seed).nextBytes(bytes);
    return bytes;
  }

  /** A meta file as a DataNode writes it; {@code kind} 0 none, 1 CRC32, 2 CRC32C. */
  static byte[] meta(byte[] data, int kind, int chunk) throws IOException {
    ByteArrayOutputStream bytes = new ByteArrayOutputStream();
    DataOutputStream out = new DataOutputStream(bytes);
    out.writeShort(1);
    out.writeByte(kind);
    out.writeInt(chunk);
    Checksum sum = kind == 2 ? new CRC32C() : new CRC32();
    for (int at = 0; kind != 0 && at < data.length; at += chunk) {
      sum.reset();
      sum.update(data, at, Math.min(chunk, data.length - at));
      out.writeInt((int) sum.getValue());
    }
    return bytes.toByteArray();
  }

  Path data(long id) {
    return new BlockKey(POOL, id, 1001).data(path);
  }

  Path meta(long id) {
    return new BlockKey(POOL, id, 1001).meta(path);
  }

  void put(long id, byte[] data, byte[] meta) throws IOException {
    Files.createDirectories(path.resolve(POOL));
    Files.write(data(id), data);
    Files.write(meta(id), meta);
  }

  void put(long id, byte[] data) throws IOException {
    put(id, data, meta(data, 2, 512));
  }

  /** Opens a reader as the HDFS client does. */
  ReplicaAccessor build(long id, long visibleLength) {
    return new ViolaReplicaAccessorBuilder().setAllowShortCircuitReads(false).setBlock(id, POOL)
        .setGenerationStamp(1001).setBlockAccessToken(new byte[4]).setClientName("c").setConfiguration(conf)
        .setFileName("/f").setVerifyChecksum(true).setVisibleLength(visibleLength).build();
  }

  /** Reads until the count or the end is reached. */
  static byte[] read(ReplicaAccessor reader, long position, int count) throws IOException {
    byte[] bytes = new byte[count];
    int done = 0;
    while (done < count) {
      int got = reader.read(position + done, bytes, done, count - done);
      if (got < 0) {
        break;
      }
      done += got;
    }
    return java.util.Arrays.copyOf(bytes, done);
  }
}
