// SPDX-License-Identifier: Apache-2.0
package org.viola.hdfs;

import static org.junit.Assert.assertArrayEquals;
import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertFalse;
import static org.junit.Assert.assertNull;
import static org.junit.Assert.assertSame;
import static org.junit.Assert.assertThrows;
import static org.junit.Assert.assertTrue;

import java.io.IOException;
import java.io.InterruptedIOException;
import java.io.OutputStream;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.hadoop.hdfs.ReplicaAccessor;
import org.junit.Rule;
import org.junit.Test;
import org.junit.rules.TemporaryFolder;

/** A mount that hangs, as one does whose host side has died. */
public class DeadlineTest {
  private static final long MS = 1_000_000L;
  @Rule
  public TemporaryFolder folder = new TemporaryFolder();

  private static void fifo(Path path) throws IOException, InterruptedException {
    Files.createDirectories(path.getParent());
    assertEquals(0, new ProcessBuilder("mkfifo", path.toString()).start().waitFor());
  }

  @Test
  public void anOpenThatHangsIsGivenUpAndTheThreadComesBack() throws Exception {
    Mount mount = new Mount(folder.getRoot().toPath());
    mount.conf.set(Settings.DEADLINE, "150ms");
    byte[] data = Mount.noise(5000, 1);
    mount.put(2, data);
    mount.build(2, 5000).close();
    fifo(mount.data(1)); // opening it waits for a writer
    Files.write(mount.meta(1), new byte[7]);
    Vread vread = Vread.of(mount.conf);

    long start = System.nanoTime();
    assertNull(mount.build(1, 10));
    long took = System.nanoTime() - start;
    assertTrue("took " + took, took >= 150 * MS && took < 1000 * MS);
    assertEquals(1, vread.helpers.stuck());
    start = System.nanoTime();
    assertNull("known to hang", mount.build(1, 10));
    assertNull("another block of the same mount", mount.build(3, 10));
    assertTrue("these must not wait", System.nanoTime() - start < 100 * MS);

    try (OutputStream writer = Files.newOutputStream(mount.data(1))) {
      Waiting.until("the thread is back", () -> vread.helpers.stuck() == 0);
    }
    ReplicaAccessor reader = mount.build(2, 5000);
    assertArrayEquals(data, Mount.read(reader, 0, 5000));
    reader.close();
  }

  @Test
  public void aMetaFileThatHangsIsGivenUpToo() throws Exception {
    Mount mount = new Mount(folder.getRoot().toPath());
    mount.conf.set(Settings.DEADLINE, "120ms");
    Files.createDirectories(mount.path.resolve(Mount.POOL));
    Files.write(mount.data(1), new byte[10]);
    fifo(mount.meta(1));
    assertNull(mount.build(1, 10));
    assertEquals(1, Vread.of(mount.conf).helpers.stuck());
    try (OutputStream writer = Files.newOutputStream(mount.meta(1))) {
      Waiting.until("the thread is back", () -> Vread.of(mount.conf).helpers.stuck() == 0);
    }
  }

  @Test
  public void aLateResultIsDisposedOfAndNotLost() throws Exception {
    Helpers helpers = new Helpers(4, 50 * MS);
    CountDownLatch gate = new CountDownLatch(1);
    ConcurrentLinkedQueue<String> spare = new ConcurrentLinkedQueue<>();
    AtomicInteger ended = new AtomicInteger();
    Helpers.Job<String> job = helpers.begin(() -> {
      gate.await();
      return "late";
    }, spare::add, ended::incrementAndGet);
    Refused why = assertThrows(Refused.class, job::await);
    assertSame(Reason.DEADLINE, why.reason);
    assertFalse("as long as a thread hangs nobody else tries", helpers.mayTry());
    gate.countDown();
    Waiting.until("disposed of", () -> spare.contains("late") && ended.get() == 1);
    assertTrue(helpers.mayTry());
  }

  @Test
  public void aResultInTimeIsHandedOverOnce() throws Exception {
    Helpers helpers = new Helpers(4, 5000 * MS);
    ConcurrentLinkedQueue<String> spare = new ConcurrentLinkedQueue<>();
    Helpers.Job<String> job = helpers.begin(() -> "x", spare::add, () -> { });
    assertEquals("x", job.await());
    job.leave();
    assertTrue(spare.isEmpty());
    Helpers.Job<String> unwanted = helpers.begin(() -> "y", spare::add, () -> { });
    Waiting.until("done", unwanted::isDone);
    unwanted.leave();
    Waiting.until("disposed of", () -> spare.size() == 1);
  }

  @Test
  public void threadsThatHangAreBounded() throws Exception {
    Helpers helpers = new Helpers(16, 20 * MS);
    CountDownLatch gate = new CountDownLatch(1);
    for (int i = 0; i < Helpers.MOST_STUCK; i++) {
      Helpers.Job<Boolean> job = helpers.begin(() -> gate.await(60, TimeUnit.SECONDS), b -> { }, () -> { });
      assertThrows(Refused.class, job::await);
    }
    assertEquals(Helpers.MOST_STUCK, helpers.stuck());
    assertFalse(helpers.mayTry());
    gate.countDown();
    Waiting.until("all are back", () -> helpers.stuck() == 0);
  }

  @Test
  public void moreReadsThanThreadsAreRefusedAtOnce() throws Exception {
    Helpers helpers = new Helpers(2, 5000 * MS);
    CountDownLatch gate = new CountDownLatch(1);
    List<Helpers.Job<Boolean>> jobs = new ArrayList<>();
    for (int i = 0; i < 2; i++) {
      jobs.add(helpers.begin(() -> gate.await(60, TimeUnit.SECONDS), b -> { }, () -> { }));
    }
    AtomicInteger ended = new AtomicInteger();
    Refused why = assertThrows(Refused.class,
        () -> helpers.begin(() -> true, b -> { }, ended::incrementAndGet));
    assertSame(Reason.BUSY, why.reason);
    assertEquals("what was taken for it is given back", 1, ended.get());
    gate.countDown();
    for (Helpers.Job<Boolean> job : jobs) {
      assertTrue(job.await());
    }
  }

  @Test
  public void anInterruptedReaderStopsWaitingAndStaysInterrupted() throws Exception {
    Helpers helpers = new Helpers(2, 60_000 * MS);
    CountDownLatch gate = new CountDownLatch(1);
    Helpers.Job<Boolean> job = helpers.begin(() -> gate.await(60, TimeUnit.SECONDS), b -> { }, () -> { });
    Thread.currentThread().interrupt();
    assertThrows(InterruptedIOException.class, job::await);
    assertTrue(Thread.interrupted());
    assertEquals("an interrupt says nothing about the mount", 0, helpers.stuck());
    gate.countDown();
  }

  @Test
  public void threadsEndWhenThereIsNothingToReadAndComeBack() throws Exception {
    Helpers helpers = new Helpers(4, 100 * MS, 50 * MS);
    for (int round = 0; round < 3; round++) {
      assertEquals("x", helpers.begin(() -> "x", s -> { }, () -> { }).await());
      assertTrue(helpers.threads() > 0);
      Waiting.until("all are gone", () -> helpers.threads() == 0);
    }
  }

  @Test
  public void eachResultIsTakenOrDisposedOfOnce() throws Exception {
    // threads end in the middle of it, too
    Helpers helpers = new Helpers(32, 10_000 * MS, 1);
    AtomicInteger made = new AtomicInteger();
    AtomicInteger spared = new AtomicInteger();
    AtomicInteger ended = new AtomicInteger();
    AtomicInteger taken = new AtomicInteger();
    ConcurrentLinkedQueue<Throwable> wrong = new ConcurrentLinkedQueue<>();
    List<Thread> clients = new ArrayList<>();
    for (int client = 0; client < 6; client++) {
      int number = client;
      clients.add(new Thread(() -> {
        try {
          for (int i = 0; i < 3000; i++) {
            int wanted = number << 20 | i;
            Helpers.Job<Integer> job = helpers.begin(() -> {
              made.incrementAndGet();
              return wanted;
            }, late -> spared.incrementAndGet(), ended::incrementAndGet);
            if (i % 3 == number % 3) {
              job.leave();
            } else {
              assertEquals(wanted, (int) job.await());
              taken.incrementAndGet();
            }
            if (i % 500 == 0) {
              Thread.sleep(5);
            }
          }
        } catch (Throwable e) {
          wrong.add(e);
        }
      }));
    }
    clients.forEach(Thread::start);
    for (Thread client : clients) {
      client.join();
    }
    assertTrue(wrong.toString(), wrong.isEmpty());
    assertEquals(12_000, taken.get());
    Waiting.until("all have ended", () -> ended.get() == 18_000);
    assertEquals(18_000, made.get());
    assertEquals(6_000, spared.get());
    assertEquals(0, helpers.stuck());
    Waiting.until("all are gone", () -> helpers.threads() == 0);
  }
}
