// SPDX-License-Identifier: Apache-2.0
package org.viola.hdfs;

import java.io.IOException;
import java.nio.ByteBuffer;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.atomic.AtomicReferenceArray;
import java.util.zip.CRC32;
import java.util.zip.CRC32C;
import java.util.zip.Checksum;

/**
 * The checksums of a block. Reads only the needed parts of its {@code .meta} file, each once.
 *
 * <p>The file consists of a header of 7 bytes (version, kind, bytes per chunk; big-endian) and four bytes for
 * each chunk of the data, the last of which may be short.
 */
final class Checksums {
  private static final int HEADER = 7;
  private static final int VERSION = 1;
  private static final int KIND_NONE = 0;
  private static final int KIND_CRC32 = 1;
  private static final int KIND_CRC32C = 2;
  static final int MAX_CHUNK_BYTES = 64 << 10;
  /** Checksums in a segment, the unit of reading. */
  private static final int CHECKSUMS_PER_SEGMENT = 8192;

  private final BlockFile meta;
  private final Buffers buffers;
  private final int kind;
  private final int chunk;
  private final int count;
  private final AtomicReferenceArray<byte[]> segments;
  private final AtomicLong held = new AtomicLong();

  /**
   * Reads the header.
   *
   * @throws FallbackException when this is no meta file of a block of that size
   */
  Checksums(BlockFile meta, long dataSize, Buffers buffers) throws IOException {
    this.meta = meta;
    this.buffers = buffers;
    if (meta.size < HEADER) {
      throw new FallbackException(FallbackReason.SHAPE, "meta file of " + meta.size + " bytes");
    }
    ByteBuffer head = meta.read(0, HEADER, buffers);
    short version = head.getShort();
    kind = head.get();
    int bytes = head.getInt();
    buffers.give(head);
    if (version != VERSION || kind < KIND_NONE || kind > KIND_CRC32C) {
      throw new FallbackException(FallbackReason.SHAPE, "meta file of version " + version + ", checksums of kind " + kind);
    }
    if (kind == KIND_NONE) {
      chunk = 1;
      count = 0;
    } else {
      if (bytes < 1 || bytes > MAX_CHUNK_BYTES || Integer.bitCount(bytes) != 1) {
        throw new FallbackException(FallbackReason.SHAPE, "chunks of " + bytes + " bytes");
      }
      chunk = bytes;
      long chunks = (dataSize + chunk - 1) / chunk;
      if (meta.size != HEADER + 4 * chunks || chunks > Integer.MAX_VALUE) {
        throw new FallbackException(FallbackReason.SHAPE, "meta file of " + meta.size + " bytes for " + dataSize + " bytes of data");
      }
      count = (int) chunks;
    }
    segments = new AtomicReferenceArray<>((count + CHECKSUMS_PER_SEGMENT - 1) / CHECKSUMS_PER_SEGMENT);
  }

  /** Bytes that one checksum covers, a power of two. */
  int chunk() {
    return chunk;
  }

  /** Bytes of checksums kept in memory. */
  long held() {
    return held.get();
  }

  /**
   * Verifies the buffer from 0 to its limit. The data begin at a chunk and end with a chunk or with the
   * block.
   *
   * @throws FallbackException naming the first byte of a chunk that differs
   */
  void verify(ByteBuffer data, long start) throws IOException {
    if (kind == KIND_NONE) {
      return;
    }
    Checksum sum = kind == KIND_CRC32C ? new CRC32C() : new CRC32();
    ByteBuffer part = data.duplicate();
    int end = data.limit();
    int number = (int) (start / chunk);
    byte[] segment = null;
    for (int at = 0; at < end; at += chunk, number++) {
      int inside = number % CHECKSUMS_PER_SEGMENT;
      if (segment == null || inside == 0) {
        segment = segment(number / CHECKSUMS_PER_SEGMENT);
      }
      part.limit(Math.min(end, at + chunk)).position(at);
      sum.reset();
      sum.update(part);
      if ((int) sum.getValue() != stored(segment, inside * 4)) {
        throw new FallbackException(FallbackReason.CHECKSUM, "at byte " + (start + at));
      }
    }
  }

  private static int stored(byte[] segment, int at) {
    return segment[at] << 24 | (segment[at + 1] & 0xff) << 16 | (segment[at + 2] & 0xff) << 8 | segment[at + 3] & 0xff;
  }

  private byte[] segment(int index) throws IOException {
    byte[] kept = segments.get(index);
    if (kept != null) {
      return kept;
    }
    int first = index * CHECKSUMS_PER_SEGMENT;
    int length = 4 * Math.min(CHECKSUMS_PER_SEGMENT, count - first);
    long from = HEADER + 4L * first;
    long start = from & -Buffers.ALIGN;
    ByteBuffer read = meta.read(start, from + length, buffers);
    byte[] segment = new byte[length];
    read.position((int) (from - start));
    read.get(segment);
    buffers.give(read);
    if (segments.compareAndSet(index, null, segment)) {
      held.addAndGet(length);
    }
    return segment;
  }
}
