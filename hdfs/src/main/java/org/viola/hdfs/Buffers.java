// SPDX-License-Identifier: Apache-2.0
package org.viola.hdfs;

import java.nio.ByteBuffer;
import java.util.concurrent.ArrayBlockingQueue;

/** Direct buffers aligned for O_DIRECT; a few of each size are kept. */
final class Buffers {
  /** Alignment in bytes; no device needs more than a page. */
  static final int ALIGN = 4096;
  /** Size for random reads, including checksum segments. */
  static final int SMALL = (64 << 10) + 2 * ALIGN;

  private final int large;
  private final ArrayBlockingQueue<ByteBuffer> smallOnes = new ArrayBlockingQueue<>(64);
  private final ArrayBlockingQueue<ByteBuffer> largeOnes = new ArrayBlockingQueue<>(16);

  Buffers(int window) {
    large = window + 2 * Checksums.MAX_CHUNK_BYTES;
  }

  /** Returns an empty buffer of at least this size, which is at most the window and two checksum chunks. */
  ByteBuffer take(int size) {
    boolean small = size <= SMALL;
    ByteBuffer kept = (small ? smallOnes : largeOnes).poll();
    if (kept != null) {
      kept.clear();
      return kept;
    }
    int capacity = small ? SMALL : large;
    return ByteBuffer.allocateDirect(capacity + ALIGN).alignedSlice(ALIGN);
  }

  /** Returns a buffer. No thread may write to it any more. */
  void give(ByteBuffer buffer) {
    // The garbage collector frees surplus buffers.
    boolean kept = buffer.capacity() < large ? smallOnes.offer(buffer) : largeOnes.offer(buffer);
    assert kept || buffer.isDirect();
  }
}
