// SPDX-License-Identifier: Apache-2.0
package org.viola.hdfs;

import java.util.Queue;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.TimeUnit;

/**
 * A clock that is read without a system call, and the deadlines of whoever waits.
 *
 * <p>One thread moves the clock on and looks at the deadlines, some twenty times a second. It is there as
 * long as there is something to do and some time longer. So a small read needs neither the time
 * nor a timer of the kernel, each of which costs as much as the read where system calls are slow.
 */
final class Ticker {
  private static final long SHORTEST_MS = 2;
  private static final long LONGEST_MS = 50;

  /** What has a deadline. */
  interface Watched {
    /** Looks at the deadline; true when it is to be forgotten. */
    boolean over(long nowNanos);
  }

  private final long stepMillis;
  private final long idleNanos;
  private final Runnable idle;
  private final Queue<Watched> watched = new ConcurrentLinkedQueue<>();
  private volatile long now = System.nanoTime();
  private volatile boolean ticking;
  private volatile boolean used;

  /** {@code idle} runs each time when nothing has happened for so long. */
  Ticker(long deadlineNanos, long idleNanos, Runnable idle) {
    this.idleNanos = idleNanos;
    stepMillis = Math.max(SHORTEST_MS, Math.min(LONGEST_MS, TimeUnit.NANOSECONDS.toMillis(deadlineNanos / 16)));
    this.idle = idle;
  }

  /** As {@link System#nanoTime}, and at most about a step behind it as long as {@link #use} is called before. */
  long now() {
    return now;
  }

  /** Whether it is on its way. */
  boolean isTicking() {
    return ticking;
  }

  /** It is needed now. False: no thread can be made. */
  boolean use() {
    if (!used) {
      used = true;
    }
    // in this order: who ends it looks at `used` once more afterwards
    return ticking || start();
  }

  /** Looks at it until it is over. False: no thread can be made. */
  boolean watch(Watched one) {
    watched.add(one);
    return use();
  }

  private synchronized boolean start() {
    if (!ticking) {
      now = System.nanoTime();
      Thread thread = new Thread(this::run, "viola-vread-clock");
      thread.setDaemon(true);
      try {
        ticking = true;
        thread.start();
      } catch (OutOfMemoryError e) {
        ticking = false;
      }
    }
    return ticking;
  }

  private void run() {
    long usedAt = now;
    while (true) {
      try {
        Thread.sleep(stepMillis);
      } catch (InterruptedException e) {
        Counters.LOG.debug("nobody ends the clock by an interrupt", e);
      }
      long time = System.nanoTime();
      now = time;
      watched.removeIf(one -> one.over(time));
      if (used || !watched.isEmpty()) {
        used = false;
        usedAt = time;
      } else if (time - usedAt > idleNanos && end()) {
        return;
      }
    }
  }

  /** False: somebody needs it still. */
  private synchronized boolean end() {
    ticking = false;
    if (used || !watched.isEmpty()) {
      ticking = true;
      return false;
    }
    idle.run();
    return true;
  }
}
