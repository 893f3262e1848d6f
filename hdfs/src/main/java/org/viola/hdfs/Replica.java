// SPDX-License-Identifier: Apache-2.0
package org.viola.hdfs;

import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.file.AccessDeniedException;
import java.nio.file.NoSuchFileException;
import java.nio.file.Path;
import java.util.concurrent.atomic.AtomicInteger;

/** The open files of a block. Counted: they are closed, on a helper thread, when nobody uses them. */
final class Replica {
  final BlockKey key;
  final long size;
  private final BlockFile data;
  private final BlockFile meta;
  private final Checksums sums;
  private final Buffers buffers;
  /** Users, the cache of open blocks being one; 0 for ever when closed. */
  private final AtomicInteger users = new AtomicInteger(1);
  private volatile long usedNanos = System.nanoTime();

  private Replica(BlockKey key, BlockFile data, BlockFile meta, Buffers buffers) throws IOException {
    this.key = key;
    this.data = data;
    this.meta = meta;
    this.buffers = buffers;
    this.size = data.size;
    this.sums = meta == null ? null : new Checksums(meta, data.size, buffers);
  }

  /** Opens the block in the first mount that has it. */
  static Replica open(BlockKey key, Settings settings, Buffers buffers) throws IOException {
    NoSuchFileException absent = null;
    for (Path mount : settings.mounts) {
      try {
        return openIn(mount, key, settings, buffers);
      } catch (NoSuchFileException e) {
        absent = e;
      } catch (AccessDeniedException e) {
        throw new Refused(Reason.ERROR, e);
      }
    }
    throw new Refused(Reason.ABSENT, absent);
  }

  private static Replica openIn(Path mount, BlockKey key, Settings settings, Buffers buffers) throws IOException {
    if (settings.direct) {
      try {
        return openAs(mount, key, settings, buffers, true);
      } catch (IOException e) {
        if (BlockFile.isFinal(e)) {
          throw e;
        }
        // this file system may not do it: the same through the page cache
      } catch (UnsupportedOperationException e) {
        // nor may this Java
      }
    }
    return openAs(mount, key, settings, buffers, false);
  }

  private static Replica openAs(Path mount, BlockKey key, Settings settings, Buffers buffers, boolean direct)
      throws IOException {
    BlockFile data = BlockFile.open(key.data(mount), direct);
    BlockFile meta = null;
    try {
      meta = settings.verify ? BlockFile.open(key.meta(mount), direct) : null;
      return new Replica(key, data, meta, buffers);
    } catch (IOException | RuntimeException e) {
      data.close();
      if (meta != null) {
        meta.close();
      }
      throw e;
    }
  }

  /**
   * Reads and verifies at least {@code from} to {@code to}, which is at most the size: whole pages and
   * chunks, so that the piece may begin earlier and end later.
   */
  Piece read(long from, long to, boolean verify) throws IOException {
    boolean check = verify && sums != null;
    int unit = check ? Math.max(Buffers.ALIGN, sums.chunk()) : Buffers.ALIGN;
    long start = from & -unit;
    long end = Math.min(size, (to + unit - 1) & -unit);
    ByteBuffer buffer = data.read(start, end, buffers);
    Counters.get().bytesAhead.incr(end - start);
    if (check) {
      boolean good = false;
      try {
        sums.verify(buffer, start);
        good = true;
      } finally {
        if (!good) {
          buffers.give(buffer);
        }
      }
    }
    return new Piece(start, buffer);
  }

  long held() {
    return sums == null ? 0 : sums.held();
  }

  long usedNanos() {
    return usedNanos;
  }

  /** One more user; false when it is closed already. */
  boolean use() {
    usedNanos = System.nanoTime();
    return users.getAndUpdate(n -> n == 0 ? 0 : n + 1) > 0;
  }

  /** One user less; true for the last one, who has to have it closed. */
  boolean unuse() {
    return users.decrementAndGet() == 0;
  }

  void close() {
    try {
      data.close();
      if (meta != null) {
        meta.close();
      }
    } catch (IOException e) {
      Counters.LOG.debug("closing {}", key, e);
    }
  }

  /** Verified bytes of a block. */
  static final class Piece {
    final long start;
    final ByteBuffer buffer;

    Piece(long start, ByteBuffer buffer) {
      this.start = start;
      this.buffer = buffer;
    }

    boolean has(long position) {
      return position >= start && position < end();
    }

    long end() {
      return start + buffer.limit();
    }
  }
}
