// SPDX-License-Identifier: Apache-2.0
package org.viola.hdfs;

import java.io.IOException;
import java.io.InterruptedIOException;
import java.util.concurrent.Callable;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.FutureTask;
import java.util.concurrent.RejectedExecutionException;
import java.util.concurrent.SynchronousQueue;
import java.util.concurrent.ThreadPoolExecutor;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;
import java.util.function.Consumer;

/**
 * Threads that touch the mount in the place of the client's.
 *
 * <p>Nothing gets a thread out of a mount that hangs, so each wait for one has a deadline; a thread that
 * missed it is left behind. As long as there are such threads the mount is tried only now and then, and
 * when there are {@link #MOST_STUCK} not at all.
 */
final class Helpers {
  static final int MOST_STUCK = 8;
  static final long RETRY_NANOS = TimeUnit.SECONDS.toNanos(5);
  private static final long IDLE_SECONDS = 10;

  private final ThreadPoolExecutor pool;
  private final long deadlineNanos;
  private final AtomicInteger stuck = new AtomicInteger();
  private final AtomicLong retryAt = new AtomicLong();

  Helpers(int threads, long deadlineNanos) {
    this.deadlineNanos = deadlineNanos;
    AtomicInteger number = new AtomicInteger();
    pool = new ThreadPoolExecutor(0, threads, IDLE_SECONDS, TimeUnit.SECONDS, new SynchronousQueue<>(), work -> {
      Thread thread = new Thread(work, "viola-vread-" + number.incrementAndGet());
      thread.setDaemon(true);
      return thread;
    });
  }

  /** Threads that the mount holds now. */
  int stuck() {
    return stuck.get();
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
    try {
      pool.execute(job);
    } catch (RejectedExecutionException | OutOfMemoryError e) {
      after.run();
      throw new Refused(Reason.BUSY, e);
    }
    return job;
  }

  /** Work that nobody waits for. */
  boolean beginUnwaited(Runnable work) {
    try {
      pool.execute(work);
      return true;
    } catch (RejectedExecutionException | OutOfMemoryError e) {
      return false;
    }
  }

  private enum State { RUNNING, DONE, LEFT, LEFT_STUCK }

  /** Work under way. */
  final class Job<T> extends FutureTask<T> {
    private final Consumer<T> spare;
    private final Runnable after;
    private State state = State.RUNNING;
    private boolean taken;

    private Job(Callable<T> work, Consumer<T> spare, Runnable after) {
      super(work);
      this.spare = spare;
      this.after = after;
    }

    /** The result; after this the job is over. */
    T await() throws IOException {
      try {
        T result = get(deadlineNanos, TimeUnit.NANOSECONDS);
        taken = true;
        return result;
      } catch (TimeoutException e) {
        leave(true);
        throw new Refused(Reason.DEADLINE, TimeUnit.NANOSECONDS.toMillis(deadlineNanos) + " ms");
      } catch (InterruptedException e) {
        leave(false);
        Thread.currentThread().interrupt();
        throw (IOException) new InterruptedIOException("interrupted while reading a block").initCause(e);
      } catch (ExecutionException e) {
        Throwable cause = e.getCause();
        throw cause instanceof Refused ? (Refused) cause : new Refused(Reason.ERROR, cause);
      }
    }

    /** Nobody will wait for it. */
    void leave() {
      leave(false);
    }

    private synchronized void leave(boolean late) {
      if (state == State.DONE) {
        dispose();
      } else if (state == State.RUNNING) {
        state = late ? State.LEFT_STUCK : State.LEFT;
        if (late) {
          retryAt.set(System.nanoTime() + RETRY_NANOS);
          stuck.incrementAndGet();
          Counters.get().stuck.incr();
        }
      }
    }

    @Override
    protected synchronized void done() {
      if (state == State.RUNNING) {
        state = State.DONE;
      } else {
        if (state == State.LEFT_STUCK) {
          stuck.decrementAndGet();
          Counters.get().stuck.decr();
        }
        dispose();
      }
      after.run();
    }

    private void dispose() {
      if (taken) {
        return;
      }
      taken = true;
      try {
        spare.accept(get());
      } catch (ExecutionException | InterruptedException e) {
        Counters.LOG.debug("work that nobody waited for", e);
      }
    }
  }
}
