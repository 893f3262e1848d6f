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
 * The open files of a block, with a reference count. When it reaches 0, a mount thread closes them.
 *
 * <p>Single small reads use the page cache, so that repeated ones need no request to the host. The host
 * cannot revoke cached pages, so at least one read per second goes to the host and notices a withdrawn block.
 */
final class Replica {
  /** Maximum time for which the page cache is trusted. */
  static final long CACHE_TRUST_NANOS = TimeUnit.SECONDS.toNanos(1);

  final BlockKey key;
  final long size;
  private final BlockFile data;
  /**
   * Path for opening the file through the page cache; null if {@code data} uses it or if it must not be
   * used.
   */
  private final Path cachedPath;
  private BlockFile cached;
  private boolean closed;
  private volatile long askedNanos;
  private final BlockFile meta;
  private final Checksums sums;
  private final Buffers buffers;
  /** Number of users, the cache of open blocks being one; stays 0 when closed. */
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
    this.askedNanos = usedNanos - CACHE_TRUST_NANOS;
    this.meta = meta;
    this.buffers = buffers;
    this.size = data.size;
    this.sums = meta == null ? null : new Checksums(meta, data.size, buffers);
  }

  /** Opens the block in the first mount that contains it. */
  static Replica open(BlockKey key, Settings settings, Buffers buffers, LongSupplier clock) throws IOException {
    NoSuchFileException absent = null;
    for (Path mount : settings.mounts) {
      try {
        return openIn(mount, key, settings, buffers, clock);
      } catch (NoSuchFileException e) {
        absent = e;
      } catch (AccessDeniedException e) {
        throw new FallbackException(FallbackReason.ERROR, e);
      }
    }
    throw new FallbackException(FallbackReason.ABSENT, absent);
  }

  private static Replica openIn(Path mount, BlockKey key, Settings settings, Buffers buffers, LongSupplier clock) throws IOException {
    if (settings.direct) {
      try {
        return openAs(mount, key, settings, buffers, clock, true);
      } catch (IOException e) {
        if (BlockFile.isFinal(e)) {
          throw e;
        }
        // The file system may not support O_DIRECT: use the page cache.
      } catch (UnsupportedOperationException e) {
        // This Java may not support O_DIRECT.
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
      return new Replica(key, data, direct && settings.cacheSingleReads ? key.data(mount) : null, meta, buffers, clock);
    } catch (IOException | RuntimeException e) {
      data.close();
      if (meta != null) {
        meta.close();
      }
      throw e;
    }
  }

  /**
   * Reads and verifies at least {@code from} to {@code to}, which is at most the size. Reads whole pages and
   * chunks, so the piece may begin earlier and end later. {@code single}: the read is not part of a sequence.
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
    if (single && cachedPath != null && now - askedNanos < CACHE_TRUST_NANOS) {
      return cached().read(start, end, buffers);
    }
    ByteBuffer buffer = data.read(start, end, buffers);
    askedNanos = now;
    return buffer;
  }

  private synchronized BlockFile cached() throws IOException {
    if (closed) {
      throw new FallbackException(FallbackReason.ERROR, "its files are closed");
    }
    if (cached == null) {
      BlockFile file = BlockFile.open(cachedPath, false);
      if (file.size != size) {
        file.close();
        throw new FallbackException(FallbackReason.SHAPE, "its file has " + file.size + " bytes now, not " + size);
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

  /** Adds a user; false when the files are closed. */
  boolean use() {
    usedNanos = clock.getAsLong();
    return users.getAndUpdate(n -> n == 0 ? 0 : n + 1) > 0;
  }

  /** Removes a user; true for the last one, who must have the files closed. */
  boolean release() {
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
