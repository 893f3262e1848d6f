// SPDX-License-Identifier: Apache-2.0
package org.viola.hdfs;

import java.io.IOException;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.WeakHashMap;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.TimeUnit;
import org.apache.hadoop.conf.Configuration;

/**
 * State that all readers of a process share for equal settings: open blocks, mount threads, and the blocks
 * that are not asked for at present.
 */
final class Vread {
  private static final long IDLE_TIMEOUT_NANOS = TimeUnit.SECONDS.toNanos(60);
  /** Maximum bytes of checksums in memory over all open blocks. */
  private static final long MAX_CHECKSUM_BYTES = 32 << 20;
  private static final int MAX_PAUSED_BLOCKS = 16384;

  private static final Map<Configuration, Vread> BY_CLIENT = new WeakHashMap<>();
  private static final Map<Settings, Vread> BY_SETTINGS = new ConcurrentHashMap<>();

  final Settings settings;
  final MountThreads threads;
  final Buffers buffers;
  private final LinkedHashMap<BlockKey, Replica> open = new LinkedHashMap<>(64, 0.75f, true);
  private final ConcurrentHashMap<BlockKey, Long> paused = new ConcurrentHashMap<>();
  private final ConcurrentLinkedQueue<Replica> closing = new ConcurrentLinkedQueue<>();

  Vread(Settings settings) {
    this.settings = settings;
    threads = new MountThreads(settings.threads, settings.deadlineNanos);
    buffers = new Buffers(settings.window);
  }

  /** Returns the state for a client, whose configuration is read once. */
  static Vread of(Configuration conf) {
    synchronized (BY_CLIENT) {
      return BY_CLIENT.computeIfAbsent(conf, c -> BY_SETTINGS.computeIfAbsent(new Settings(c), Vread::new));
    }
  }

  /** Returns a reader of the block, or null when the client has to ask the DataNode. */
  BlockReader reader(BlockKey key, long visibleLength, boolean verify) {
    if (isPaused(key)) {
      return null;
    }
    try {
      Replica replica = replica(key);
      if (replica.size < visibleLength) {
        release(replica);
        throw new FallbackException(FallbackReason.SHAPE, replica.size + " bytes where HDFS has " + visibleLength);
      }
      Counters.get().accessors.incr();
      return new BlockReader(this, replica, visibleLength, verify);
    } catch (FallbackException e) {
      refuse(key, e);
    } catch (IOException e) {
      Counters.LOG.debug("opening {}", key, e);
    }
    return null;
  }

  private Replica replica(BlockKey key) throws IOException {
    synchronized (open) {
      Replica known = open.get(key);
      if (known != null && known.use()) {
        return known;
      }
    }
    if (!threads.mayTryMount()) {
      throw new FallbackException(FallbackReason.DEADLINE, threads.stuck() + " threads hang in the mount");
    }
    Replica replica =
        threads.begin(() -> Replica.open(key, settings, buffers, threads::now), Replica::close, () -> { }).await();
    Counters.get().blocks.incr();
    replica.use();
    keep(replica);
    return replica;
  }

  /** Keeps a block open for the next reader and releases others. */
  private void keep(Replica replica) {
    List<Replica> out = new ArrayList<>();
    synchronized (open) {
      // If two threads opened the block at once, the first one is released.
      Replica other = open.put(replica.key, replica);
      if (other != null) {
        out.add(other);
      }
      long now = threads.now();
      long held = 0;
      for (Replica one : open.values()) {
        held += one.held();
      }
      var oldest = open.values().iterator();
      while (oldest.hasNext()) {
        Replica one = oldest.next();
        boolean tooMany = open.size() > settings.handles || held > MAX_CHECKSUM_BYTES;
        if (one == replica || !(tooMany || now - one.usedNanos() > IDLE_TIMEOUT_NANOS)) {
          break;
        }
        held -= one.held();
        oldest.remove();
        out.add(one);
      }
    }
    out.forEach(this::release);
  }

  /** Removes a user of a block and closes it after the last. */
  void release(Replica replica) {
    if (replica.release()) {
      closing.add(replica);
      if (!threads.submit(this::close)) {
        Counters.LOG.debug("{} is closed with the next one", replica.key);
      }
    }
  }

  private void close() {
    for (Replica one = closing.poll(); one != null; one = closing.poll()) {
      one.close();
    }
  }

  /** Counts the fallback of a block and pauses requests for it. */
  void refuse(BlockKey key, FallbackException why) {
    Counters.get().fallback(why.reason, key, why);
    if (paused.size() >= MAX_PAUSED_BLOCKS) {
      long now = System.nanoTime();
      paused.values().removeIf(until -> until - now <= 0);
      if (paused.size() >= MAX_PAUSED_BLOCKS) {
        paused.clear();
      }
    }
    paused.put(key, System.nanoTime() + why.reason.pauseNanos);
    if (why.reason != FallbackReason.ABSENT && why.reason != FallbackReason.BUSY) {
      Replica stale;
      synchronized (open) {
        stale = open.remove(key);
      }
      if (stale != null) {
        release(stale);
      }
    }
  }

  private boolean isPaused(BlockKey key) {
    Long until = paused.get(key);
    if (until == null) {
      return false;
    }
    if (until - System.nanoTime() > 0) {
      return true;
    }
    paused.remove(key, until);
    return false;
  }

  /** Number of blocks kept open. */
  int openBlocks() {
    synchronized (open) {
      return open.size();
    }
  }
}
