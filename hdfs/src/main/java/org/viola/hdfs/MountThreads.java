// SPDX-License-Identifier: Apache-2.0
package org.viola.hdfs;

import java.io.IOException;
import java.io.InterruptedIOException;
import java.util.concurrent.Callable;
import java.util.concurrent.ConcurrentLinkedDeque;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.locks.LockSupport;
import java.util.function.Consumer;

/**
 * Threads that access the mount on behalf of the client's threads.
 *
 * <p>A thread in a hung mount cannot be interrupted, so each wait for one has a deadline, and a thread that
 * misses it is abandoned. While there are abandoned threads the mount is tried rarely, and with {@link
 * #MAX_STUCK} of them not at all.
 *
 * <p>Passing work between threads dominates the cost of a small read, so it takes one wake-up each way: idle
 * threads and waiting clients wait without a timer; see {@link DeadlineClock}.
 */
final class MountThreads {
  static final int MAX_STUCK = 8;
  static final long RETRY_INTERVAL_NANOS = TimeUnit.SECONDS.toNanos(5);

  /** Time after which idle threads end. */
  private static final long IDLE_TIMEOUT_NANOS = TimeUnit.SECONDS.toNanos(10);
  private static final Runnable END = () -> { };

  private final int maxThreads;
  private final long deadlineNanos;
  private final DeadlineClock clock;
  private final AtomicInteger count = new AtomicInteger();
  private final AtomicInteger number = new AtomicInteger();
  /** Idle threads, the most recent first. */
  private final ConcurrentLinkedDeque<Worker> idle = new ConcurrentLinkedDeque<>();
  private final AtomicInteger stuck = new AtomicInteger();
  private final AtomicLong retryAt = new AtomicLong();

  MountThreads(int threads, long deadlineNanos) {
    this(threads, deadlineNanos, IDLE_TIMEOUT_NANOS);
  }

  MountThreads(int threads, long deadlineNanos, long idleNanos) {
    maxThreads = threads;
    this.deadlineNanos = deadlineNanos;
    clock = new DeadlineClock(deadlineNanos, idleNanos, this::dismiss);
  }

  /** Time in nanoseconds, without a system call; advances while work is begun, and some seconds longer. */
  long now() {
    return clock.now();
  }

  /** Number of threads that hang in the mount. */
  int stuck() {
    return stuck.get();
  }

  /** Number of threads. */
  int threads() {
    return count.get();
  }

  /** Whether the mount may be tried now. */
  boolean mayTryMount() {
    int now = stuck.get();
    if (now == 0) {
      return true;
    }
    long at = retryAt.get();
    long nanos = System.nanoTime();
    return now < MAX_STUCK && nanos - at >= 0 && retryAt.compareAndSet(at, nanos + RETRY_INTERVAL_NANOS);
  }

  /**
   * Starts work on a thread.
   *
   * @param spare disposes of the result of an abandoned job
   * @param after runs when the work has ended, whatever came of it
   */
  <T> Job<T> begin(Callable<T> work, Consumer<T> spare, Runnable after) throws FallbackException {
    Job<T> job = new Job<>(work, spare, after);
    if (!give(job)) {
      after.run();
      throw new FallbackException(FallbackReason.BUSY, "all " + maxThreads + " threads are busy");
    }
    return job;
  }

  /** Starts work without a result; false when no thread is free. */
  boolean submit(Runnable work) {
    return give(work);
  }

  private boolean give(Runnable work) {
    if (!clock.use()) {
      return false;
    }
    Worker worker = idle.pollFirst();
    if (worker != null) {
      worker.give(work);
      return true;
    }
    if (count.incrementAndGet() > maxThreads) {
      count.decrementAndGet();
      return false;
    }
    try {
      new Worker(work).start();
      return true;
    } catch (OutOfMemoryError e) {
      count.decrementAndGet();
      return false;
    }
  }

  /** Ends the idle threads. */
  private void dismiss() {
    for (Worker one = idle.pollFirst(); one != null; one = idle.pollFirst()) {
      one.give(END);
    }
  }

  private final class Worker extends Thread {
    private volatile Runnable work;

    Worker(Runnable first) {
      super("viola-vread-" + number.incrementAndGet());
      setDaemon(true);
      work = first;
    }

    void give(Runnable next) {
      work = next;
      LockSupport.unpark(this);
    }

    @Override
    public void run() {
      try {
        for (Runnable now = work; now != END; now = work) {
          if (now == null) {
            LockSupport.park(this);
            continue;
          }
          work = null;
          try {
            now.run();
          } catch (RuntimeException | Error e) {
            Counters.LOG.warn("a background task failed", e);
          }
          idle.addFirst(this);
          if (!clock.isTicking() && idle.remove(this)) {
            return; // those without work have been ended already
          }
        }
      } finally {
        count.decrementAndGet();
      }
    }
  }

  private enum State { RUNNING, DONE, ABANDONED, LATE }

  /** Work in progress. */
  final class Job<T> implements Runnable, DeadlineClock.Watched {
    private final Callable<T> work;
    private final Consumer<T> spare;
    private final Runnable after;
    private State state = State.RUNNING;
    private Thread waiter;
    private long since;
    private T result;
    private Throwable failure;

    private Job(Callable<T> work, Consumer<T> spare, Runnable after) {
      this.work = work;
      this.spare = spare;
      this.after = after;
    }

    @Override
    public void run() {
      T got = null;
      Throwable thrown = null;
      try {
        got = work.call();
      } catch (Exception | Error e) {
        thrown = e;
      }
      Thread wake = null;
      boolean unwanted = false;
      synchronized (this) {
        if (state == State.RUNNING) {
          state = State.DONE;
          result = got;
          failure = thrown;
          wake = waiter;
        } else {
          unwanted = true;
          if (state == State.LATE) {
            stuck.decrementAndGet();
            Counters.get().stuck.decr();
          }
        }
      }
      if (unwanted) {
        dispose(got, thrown);
      }
      try {
        after.run();
      } finally {
        LockSupport.unpark(wake);
      }
    }

    /** Waits for the result; call it once. */
    T await() throws IOException {
      if (registerWaiter()) {
        if (!clock.watch(this) && abandonIfRunning()) {
          throw new FallbackException(FallbackReason.BUSY, "no thread can start");
        }
        while (!isOver()) {
          LockSupport.park(this);
          if (Thread.currentThread().isInterrupted() && abandonIfRunning()) {
            throw new InterruptedIOException("interrupted while reading a block");
          }
        }
      }
      synchronized (this) {
        if (state != State.DONE) {
          throw new FallbackException(FallbackReason.DEADLINE, TimeUnit.NANOSECONDS.toMillis(deadlineNanos) + " ms");
        }
        state = State.ABANDONED;
        T mine = result;
        result = null;
        if (failure != null) {
          throw failure instanceof FallbackException ? (FallbackException) failure : new FallbackException(FallbackReason.ERROR, failure);
        }
        return mine;
      }
    }

    /** Whether the job is still running; if so, its end wakes the caller. */
    private synchronized boolean registerWaiter() {
      waiter = Thread.currentThread();
      return state == State.RUNNING;
    }

    /** Abandons the job unless it has ended. */
    private synchronized boolean abandonIfRunning() {
      if (state != State.RUNNING) {
        return false;
      }
      state = State.ABANDONED;
      return true;
    }

    private synchronized boolean isOver() {
      return state != State.RUNNING;
    }

    /** Whether the job has ended. */
    synchronized boolean isDone() {
      return state == State.DONE;
    }

    /** Abandons the job; its result is disposed of. */
    void abandon() {
      T mine;
      synchronized (this) {
        boolean done = state == State.DONE;
        if (done || state == State.RUNNING) {
          state = State.ABANDONED;
        }
        if (!done) {
          return;
        }
        mine = result;
        result = null;
      }
      dispose(mine, failure);
    }

    /** Checks the deadline, which counts from the first check, so never too early. */
    @Override
    public synchronized boolean over(long nowNanos) {
      if (state != State.RUNNING) {
        return true;
      }
      if (since == 0) {
        since = nowNanos;
      } else if (nowNanos - since >= deadlineNanos) {
        state = State.LATE;
        retryAt.set(nowNanos + RETRY_INTERVAL_NANOS);
        stuck.incrementAndGet();
        Counters.get().stuck.incr();
        LockSupport.unpark(waiter);
        return true;
      }
      return false;
    }

    private void dispose(T mine, Throwable thrown) {
      if (thrown == null) {
        spare.accept(mine);
      } else {
        Counters.LOG.debug("an abandoned read failed", thrown);
      }
    }
  }
}
