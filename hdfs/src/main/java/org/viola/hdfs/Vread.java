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
 * What all readers of a process share for equal settings: open blocks, helper threads, and the blocks that
 * are not to be asked for.
 */
final class Vread {
  private static final long IDLE_NANOS = TimeUnit.SECONDS.toNanos(60);
  /** Checksums kept in memory over all open blocks. */
  private static final long MOST_HELD = 32 << 20;
  private static final int MOST_PAUSED = 16384;

  private static final Map<Configuration, Vread> OF_CLIENT = new WeakHashMap<>();
  private static final Map<Settings, Vread> OF_SETTINGS = new ConcurrentHashMap<>();

  final Settings settings;
  final Helpers helpers;
  final Buffers buffers;
  private final LinkedHashMap<BlockKey, Replica> open = new LinkedHashMap<>(64, 0.75f, true);
  private final ConcurrentHashMap<BlockKey, Long> paused = new ConcurrentHashMap<>();
  private final ConcurrentLinkedQueue<Replica> closing = new ConcurrentLinkedQueue<>();

  Vread(Settings settings) {
    this.settings = settings;
    helpers = new Helpers(settings.threads, settings.deadlineNanos);
    buffers = new Buffers(settings.window);
  }

  /** For a client, whose configuration is read once. */
  static Vread of(Configuration conf) {
    synchronized (OF_CLIENT) {
      return OF_CLIENT.computeIfAbsent(conf, c -> OF_SETTINGS.computeIfAbsent(new Settings(c), Vread::new));
    }
  }

  /** A reader of the block, or null when its DataNode has to be asked. */
  BlockReader reader(BlockKey key, long visibleLength, boolean verify) {
    if (isPaused(key)) {
      return null;
    }
    try {
      Replica replica = replica(key);
      if (replica.size < visibleLength) {
        release(replica);
        throw new Refused(Reason.SHAPE, replica.size + " bytes where HDFS has " + visibleLength);
      }
      Counters.get().accessors.incr();
      return new BlockReader(this, replica, visibleLength, verify);
    } catch (Refused e) {
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
    if (!helpers.mayTry()) {
      throw new Refused(Reason.DEADLINE, helpers.stuck() + " threads wait for it");
    }
    Replica replica =
        helpers.begin(() -> Replica.open(key, settings, buffers, helpers::now), Replica::close, () -> { }).await();
    Counters.get().blocks.incr();
    replica.use();
    keep(replica);
    return replica;
  }

  /** Keeps it open for the next reader, and lets go of others. */
  private void keep(Replica replica) {
    List<Replica> out = new ArrayList<>();
    synchronized (open) {
      // where two opened the same block at once, the first one goes
      Replica other = open.put(replica.key, replica);
      if (other != null) {
        out.add(other);
      }
      long now = helpers.now();
      long held = 0;
      for (Replica one : open.values()) {
        held += one.held();
      }
      var oldest = open.values().iterator();
      while (oldest.hasNext()) {
        Replica one = oldest.next();
        boolean tooMany = open.size() > settings.handles || held > MOST_HELD;
        if (one == replica || !(tooMany || now - one.usedNanos() > IDLE_NANOS)) {
          break;
        }
        held -= one.held();
        oldest.remove();
        out.add(one);
      }
    }
    out.forEach(this::release);
  }

  /** One user of it less. */
  void release(Replica replica) {
    if (replica.unuse()) {
      closing.add(replica);
      if (!helpers.beginUnwaited(this::close)) {
        Counters.LOG.debug("{} is closed with the next one", replica.key);
      }
    }
  }

  private void close() {
    for (Replica one = closing.poll(); one != null; one = closing.poll()) {
      one.close();
    }
  }

  /** Notes why a block is left to its DataNode, and does not ask for it for a while. */
  void refuse(BlockKey key, Refused why) {
    Counters.get().fallback(why.reason, key, why);
    if (paused.size() >= MOST_PAUSED) {
      long now = System.nanoTime();
      paused.values().removeIf(until -> until - now <= 0);
      if (paused.size() >= MOST_PAUSED) {
        paused.clear();
      }
    }
    paused.put(key, System.nanoTime() + why.reason.pauseNanos);
    if (why.reason != Reason.ABSENT && why.reason != Reason.BUSY) {
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

  /** Blocks kept open. */
  int openBlocks() {
    synchronized (open) {
      return open.size();
    }
  }
}
