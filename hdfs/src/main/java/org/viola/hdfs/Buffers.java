// SPDX-License-Identifier: Apache-2.0
package org.viola.hdfs;

import java.nio.ByteBuffer;
import java.util.concurrent.ArrayBlockingQueue;

/** Direct buffers aligned for reads past the page cache; a few of each size are kept. */
final class Buffers {
  /** No device asks for a larger alignment than a page. */
  static final int ALIGN = 4096;
  /** Size that serves random reads, checksum segments included. */
  static final int SMALL = (64 << 10) + 2 * ALIGN;

  private final int large;
  private final ArrayBlockingQueue<ByteBuffer> smallOnes = new ArrayBlockingQueue<>(64);
  private final ArrayBlockingQueue<ByteBuffer> largeOnes = new ArrayBlockingQueue<>(16);

  Buffers(int window) {
    large = window + 2 * Checksums.LARGEST_CHUNK;
  }

  /** An empty buffer of at least this size, which is at most the window and two checksum chunks. */
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

  /** Must only be called when nobody can write to the buffer any more. */
  void give(ByteBuffer buffer) {
    // what does not fit is left to the garbage collector
    boolean kept = buffer.capacity() < large ? smallOnes.offer(buffer) : largeOnes.offer(buffer);
    assert kept || buffer.isDirect();
  }
}
