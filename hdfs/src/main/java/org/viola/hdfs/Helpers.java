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
 * Threads that touch the mount in the place of the client's.
 *
 * <p>Nothing gets a thread out of a mount that hangs, so each wait for one has a deadline; a thread that
 * missed it is left behind. As long as there are such threads the mount is tried only now and then, and
 * when there are {@link #MOST_STUCK} not at all.
 *
 * <p>Handing work over and back is most of what a small read costs, so it is no more than one wake-up each
 * way: threads without work wait without a timer, and so does who waits for a result; see {@link Ticker}.
 */
final class Helpers {
  static final int MOST_STUCK = 8;
  static final long RETRY_NANOS = TimeUnit.SECONDS.toNanos(5);

  /** How long threads stay when there is nothing to read. */
  private static final long IDLE_NANOS = TimeUnit.SECONDS.toNanos(10);
  private static final Runnable END = () -> { };

  private final int most;
  private final long deadlineNanos;
  private final Ticker ticker;
  private final AtomicInteger count = new AtomicInteger();
  private final AtomicInteger number = new AtomicInteger();
  /** Those without work, the last one first. */
  private final ConcurrentLinkedDeque<Worker> idle = new ConcurrentLinkedDeque<>();
  private final AtomicInteger stuck = new AtomicInteger();
  private final AtomicLong retryAt = new AtomicLong();

  Helpers(int threads, long deadlineNanos) {
    this(threads, deadlineNanos, IDLE_NANOS);
  }

  Helpers(int threads, long deadlineNanos, long idleNanos) {
    this.most = threads;
    this.deadlineNanos = deadlineNanos;
    ticker = new Ticker(deadlineNanos, idleNanos, this::dismiss);
  }

  /** Nanoseconds, without a system call; moves on as long as work is begun, and some seconds longer. */
  long now() {
    return ticker.now();
  }

  /** Threads that the mount holds now. */
  int stuck() {
    return stuck.get();
  }

  /** Threads that are there. */
  int threads() {
    return count.get();
  }

  /** Whether the mount may be tried. */
  boolean mayTry() {
    int now = stuck.get();
    if (now == 0) {
      return true;
    }
    long at = retryAt.get();
    long nanos = System.nanoTime();
    return now < MOST_STUCK && nanos - at >= 0 && retryAt.compareAndSet(at, nanos + RETRY_NANOS);
  }

  /**
   * Begins work.
   *
   * @param spare takes a result that nobody waits for any more
   * @param after runs when the work has ended, whatever came of it
   */
  <T> Job<T> begin(Callable<T> work, Consumer<T> spare, Runnable after) throws Refused {
    Job<T> job = new Job<>(work, spare, after);
    if (!give(job)) {
      after.run();
      throw new Refused(Reason.BUSY, most + " threads read");
    }
    return job;
  }

  /** Work that nobody waits for. */
  boolean beginUnwaited(Runnable work) {
    return give(work);
  }

  private boolean give(Runnable work) {
    if (!ticker.use()) {
      return false;
    }
    Worker worker = idle.pollFirst();
    if (worker != null) {
      worker.give(work);
      return true;
    }
    if (count.incrementAndGet() > most) {
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

  /** Ends those without work. */
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
            Counters.LOG.warn("work that nobody waits for failed", e);
          }
          idle.addFirst(this);
          if (!ticker.isTicking() && idle.remove(this)) {
            return; // those without work have been ended already
          }
        }
      } finally {
        count.decrementAndGet();
      }
    }
  }

  private enum State { RUNNING, DONE, LEFT, LATE }

  /** Work under way. */
  final class Job<T> implements Runnable, Ticker.Watched {
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

    /** The result; after this the job is over. */
    T await() throws IOException {
      if (mustWait()) {
        if (!ticker.watch(this) && quit()) {
          throw new Refused(Reason.BUSY, "no thread can be made");
        }
        while (!isOver()) {
          LockSupport.park(this);
          if (Thread.currentThread().isInterrupted() && quit()) {
            throw new InterruptedIOException("interrupted while reading a block");
          }
        }
      }
      synchronized (this) {
        if (state != State.DONE) {
          throw new Refused(Reason.DEADLINE, TimeUnit.NANOSECONDS.toMillis(deadlineNanos) + " ms");
        }
        state = State.LEFT;
        T mine = result;
        result = null;
        if (failure != null) {
          throw failure instanceof Refused ? (Refused) failure : new Refused(Reason.ERROR, failure);
        }
        return mine;
      }
    }

    /** Whether it runs still; the caller is woken when it is over. */
    private synchronized boolean mustWait() {
      waiter = Thread.currentThread();
      return state == State.RUNNING;
    }

    /** Leaves it unless it is over. */
    private synchronized boolean quit() {
      if (state != State.RUNNING) {
        return false;
      }
      state = State.LEFT;
      return true;
    }

    private synchronized boolean isOver() {
      return state != State.RUNNING;
    }

    /** Whether it has ended. */
    synchronized boolean isDone() {
      return state == State.DONE;
    }

    /** Nobody will wait for it; a result is disposed of. */
    void leave() {
      T mine;
      synchronized (this) {
        boolean done = state == State.DONE;
        if (done || state == State.RUNNING) {
          state = State.LEFT;
        }
        if (!done) {
          return;
        }
        mine = result;
        result = null;
      }
      dispose(mine, failure);
    }

    /** Its deadline: counted from the first look, so never too early. */
    @Override
    public synchronized boolean over(long nowNanos) {
      if (state != State.RUNNING) {
        return true;
      }
      if (since == 0) {
        since = nowNanos;
      } else if (nowNanos - since >= deadlineNanos) {
        state = State.LATE;
        retryAt.set(nowNanos + RETRY_NANOS);
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
        Counters.LOG.debug("work that nobody waited for", thrown);
      }
    }
  }
}
