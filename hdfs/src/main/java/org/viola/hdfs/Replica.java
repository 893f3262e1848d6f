// SPDX-License-Identifier: Apache-2.0
package org.viola.hdfs;

import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.file.AccessDeniedException;
import java.nio.file.NoSuchFileException;
import java.nio.file.Path;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.function.LongSupplier;

/**
 * The open files of a block. Counted: they are closed, on a helper thread, when nobody uses them.
 *
 * <p>Single small reads go through the page cache, so that those which come again cost no request to the
 * host. The host cannot take back what lies there: a read that asks it at least once a second finds out
 * that a block is gone.
 */
final class Replica {
  /** Longest time for which the page cache is believed without asking the host. */
  static final long BELIEF_NANOS = TimeUnit.SECONDS.toNanos(1);

  final BlockKey key;
  final long size;
  private final BlockFile data;
  /** Where the same can be opened through the page cache; null when {@code data} is, or none is wanted. */
  private final Path cachedPath;
  private BlockFile cached;
  private boolean closed;
  private volatile long askedNanos;
  private final BlockFile meta;
  private final Checksums sums;
  private final Buffers buffers;
  /** Users, the cache of open blocks being one; 0 for ever when closed. */
  private final AtomicInteger users = new AtomicInteger(1);
  private final LongSupplier clock;
  private volatile long usedNanos;

  private Replica(
      BlockKey key, BlockFile data, Path cachedPath, BlockFile meta, Buffers buffers, LongSupplier clock)
      throws IOException {
    this.key = key;
    this.data = data;
    this.cachedPath = cachedPath;
    this.clock = clock;
    this.usedNanos = clock.getAsLong();
    this.askedNanos = usedNanos - BELIEF_NANOS;
    this.meta = meta;
    this.buffers = buffers;
    this.size = data.size;
    this.sums = meta == null ? null : new Checksums(meta, data.size, buffers);
  }

  /** Opens the block in the first mount that has it. */
  static Replica open(BlockKey key, Settings settings, Buffers buffers, LongSupplier clock) throws IOException {
    NoSuchFileException absent = null;
    for (Path mount : settings.mounts) {
      try {
        return openIn(mount, key, settings, buffers, clock);
      } catch (NoSuchFileException e) {
        absent = e;
      } catch (AccessDeniedException e) {
        throw new Refused(Reason.ERROR, e);
      }
    }
    throw new Refused(Reason.ABSENT, absent);
  }

  private static Replica openIn(Path mount, BlockKey key, Settings settings, Buffers buffers, LongSupplier clock) throws IOException {
    if (settings.direct) {
      try {
        return openAs(mount, key, settings, buffers, clock, true);
      } catch (IOException e) {
        if (BlockFile.isFinal(e)) {
          throw e;
        }
        // this file system may not do it: the same through the page cache
      } catch (UnsupportedOperationException e) {
        // nor may this Java
      }
    }
    return openAs(mount, key, settings, buffers, clock, false);
  }

  private static Replica openAs(Path mount, BlockKey key, Settings settings, Buffers buffers, LongSupplier clock, boolean direct)
      throws IOException {
    BlockFile data = BlockFile.open(key.data(mount), direct);
    BlockFile meta = null;
    try {
      meta = settings.verify ? BlockFile.open(key.meta(mount), direct) : null;
      return new Replica(key, data, direct && settings.singlesCached ? key.data(mount) : null, meta, buffers, clock);
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
   * chunks, so that the piece may begin earlier and end later. {@code single}: it is not part of a
   * sequence of reads.
   */
  Piece read(long from, long to, boolean verify, boolean single) throws IOException {
    boolean check = verify && sums != null;
    int unit = check ? Math.max(Buffers.ALIGN, sums.chunk()) : Buffers.ALIGN;
    long start = from & -unit;
    long end = Math.min(size, (to + unit - 1) & -unit);
    ByteBuffer buffer = readFrom(single && end - start <= Buffers.SMALL, start, end);
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

  private ByteBuffer readFrom(boolean single, long start, long end) throws IOException {
    long now = clock.getAsLong();
    if (single && cachedPath != null && now - askedNanos < BELIEF_NANOS) {
      return cached().read(start, end, buffers);
    }
    ByteBuffer buffer = data.read(start, end, buffers);
    askedNanos = now;
    return buffer;
  }

  private synchronized BlockFile cached() throws IOException {
    if (closed) {
      throw new Refused(Reason.ERROR, "its files are closed");
    }
    if (cached == null) {
      BlockFile file = BlockFile.open(cachedPath, false);
      if (file.size != size) {
        file.close();
        throw new Refused(Reason.SHAPE, "its file has " + file.size + " bytes now, not " + size);
      }
      cached = file;
    }
    return cached;
  }

  long held() {
    return sums == null ? 0 : sums.held();
  }

  long usedNanos() {
    return usedNanos;
  }

  /** One more user; false when it is closed already. */
  boolean use() {
    usedNanos = clock.getAsLong();
    return users.getAndUpdate(n -> n == 0 ? 0 : n + 1) > 0;
  }

  /** One user less; true for the last one, who has to have it closed. */
  boolean unuse() {
    return users.decrementAndGet() == 0;
  }

  void close() {
    BlockFile second;
    synchronized (this) {
      closed = true;
      second = cached;
    }
    try {
      data.close();
      if (second != null) {
        second.close();
      }
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
