// SPDX-License-Identifier: Apache-2.0
package org.viola.hdfs;

import java.util.Queue;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.TimeUnit;

/**
 * A clock that is read without a system call, and the deadlines of waiting threads.
 *
 * <p>One thread advances the clock and checks the deadlines some twenty times per second. It runs while there
 * is work and some time longer. So a small read needs neither the kernel's time nor a timer, each of which
 * costs as much as the read where system calls are slow.
 */
final class DeadlineClock {
  private static final long MIN_STEP_MS = 2;
  private static final long MAX_STEP_MS = 50;

  /** Something with a deadline. */
  interface Watched {
    /** Checks the deadline; true when it is to be dropped. */
    boolean over(long nowNanos);
  }

  private final long stepMillis;
  private final long idleNanos;
  private final Runnable idle;
  private final Queue<Watched> watched = new ConcurrentLinkedQueue<>();
  private volatile long now = System.nanoTime();
  private volatile boolean ticking;
  private volatile boolean used;

  /** {@code idle} runs each time after {@code idleNanos} without work. */
  DeadlineClock(long deadlineNanos, long idleNanos, Runnable idle) {
    this.idleNanos = idleNanos;
    stepMillis = Math.max(MIN_STEP_MS, Math.min(MAX_STEP_MS, TimeUnit.NANOSECONDS.toMillis(deadlineNanos / 16)));
    this.idle = idle;
  }

  /** Like {@link System#nanoTime}, at most about a step behind it if {@link #use} was called before. */
  long now() {
    return now;
  }

  /** Whether the clock's thread runs. */
  boolean isTicking() {
    return ticking;
  }

  /** Starts the clock if necessary; false when no thread can start. */
  boolean use() {
    if (!used) {
      used = true;
    }
    // The order matters: the ending thread checks `used` once more.
    return ticking || start();
  }

  /** Checks a deadline until it is over; false when no thread can start. */
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
        Counters.LOG.debug("the clock thread ignores an interrupt", e);
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

  /** Ends the clock; false when it is still needed. */
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
