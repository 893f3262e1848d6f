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

/** Tests with a mount that hangs, as after the death of its worker. */
public class DeadlineTest {
  private static final long MS = 1_000_000L;
  @Rule
  public TemporaryFolder folder = new TemporaryFolder();

  private static void fifo(Path path) throws IOException, InterruptedException {
    Files.createDirectories(path.getParent());
    assertEquals(0, new ProcessBuilder("mkfifo", path.toString()).start().waitFor());
  }

  @Test
  public void aHungOpenTimesOutAndItsThreadIsReusedLater() throws Exception {
    Mount mount = new Mount(folder.getRoot().toPath());
    mount.conf.set(Settings.DEADLINE, "3s"); // the machine may be busy
    byte[] data = Mount.noise(5000, 1);
    mount.put(2, data);
    mount.build(2, 5000).close();
    fifo(mount.data(1)); // opening it waits for a writer
    Files.write(mount.meta(1), new byte[7]);
    Vread vread = Vread.of(mount.conf);

    long start = System.nanoTime();
    assertNull(mount.build(1, 10));
    long took = System.nanoTime() - start;
    assertTrue("took " + took, took >= 3000 * MS && took < 30_000 * MS);
    assertEquals(1, vread.threads.stuck());
    assertNull("known to hang", mount.build(1, 10));
    assertNull("another block of the same mount", mount.build(3, 10));
    assertEquals("these must not ask the mount", 1, vread.threads.stuck());

    try (OutputStream writer = Files.newOutputStream(mount.data(1))) {
      Waiting.until("the thread is back", () -> vread.threads.stuck() == 0);
    }
    ReplicaAccessor reader = mount.build(2, 5000);
    assertArrayEquals(data, Mount.read(reader, 0, 5000));
    reader.close();
  }

  @Test
  public void aHungMetaFileTimesOut() throws Exception {
    Mount mount = new Mount(folder.getRoot().toPath());
    mount.conf.set(Settings.DEADLINE, "120ms");
    Files.createDirectories(mount.path.resolve(Mount.POOL));
    Files.write(mount.data(1), new byte[10]);
    fifo(mount.meta(1));
    assertNull(mount.build(1, 10));
    assertEquals(1, Vread.of(mount.conf).threads.stuck());
    try (OutputStream writer = Files.newOutputStream(mount.meta(1))) {
      Waiting.until("the thread is back", () -> Vread.of(mount.conf).threads.stuck() == 0);
    }
  }

  @Test
  public void aLateResultIsDisposedOf() throws Exception {
    MountThreads threads = new MountThreads(4, 50 * MS);
    CountDownLatch gate = new CountDownLatch(1);
    ConcurrentLinkedQueue<String> spare = new ConcurrentLinkedQueue<>();
    AtomicInteger ended = new AtomicInteger();
    MountThreads.Job<String> job = threads.begin(() -> {
      gate.await();
      return "late";
    }, spare::add, ended::incrementAndGet);
    FallbackException why = assertThrows(FallbackException.class, job::await);
    assertSame(FallbackReason.DEADLINE, why.reason);
    assertFalse("as long as a thread hangs nobody else tries", threads.mayTryMount());
    gate.countDown();
    Waiting.until("disposed of", () -> spare.contains("late") && ended.get() == 1);
    assertTrue(threads.mayTryMount());
  }

  @Test
  public void aResultInTimeIsHandedOverOnce() throws Exception {
    MountThreads threads = new MountThreads(4, 5000 * MS);
    ConcurrentLinkedQueue<String> spare = new ConcurrentLinkedQueue<>();
    MountThreads.Job<String> job = threads.begin(() -> "x", spare::add, () -> { });
    assertEquals("x", job.await());
    job.abandon();
    assertTrue(spare.isEmpty());
    MountThreads.Job<String> unwanted = threads.begin(() -> "y", spare::add, () -> { });
    Waiting.until("done", unwanted::isDone);
    unwanted.abandon();
    Waiting.until("disposed of", () -> spare.size() == 1);
  }

  @Test
  public void theNumberOfHungThreadsIsBounded() throws Exception {
    MountThreads threads = new MountThreads(16, 20 * MS);
    CountDownLatch gate = new CountDownLatch(1);
    for (int i = 0; i < MountThreads.MAX_STUCK; i++) {
      MountThreads.Job<Boolean> job = threads.begin(() -> gate.await(60, TimeUnit.SECONDS), b -> { }, () -> { });
      assertThrows(FallbackException.class, job::await);
    }
    assertEquals(MountThreads.MAX_STUCK, threads.stuck());
    assertFalse(threads.mayTryMount());
    gate.countDown();
    Waiting.until("all are back", () -> threads.stuck() == 0);
  }

  @Test
  public void moreReadsThanThreadsAreRefusedAtOnce() throws Exception {
    MountThreads threads = new MountThreads(2, 5000 * MS);
    CountDownLatch gate = new CountDownLatch(1);
    List<MountThreads.Job<Boolean>> jobs = new ArrayList<>();
    for (int i = 0; i < 2; i++) {
      jobs.add(threads.begin(() -> gate.await(60, TimeUnit.SECONDS), b -> { }, () -> { }));
    }
    AtomicInteger ended = new AtomicInteger();
    FallbackException why = assertThrows(FallbackException.class,
        () -> threads.begin(() -> true, b -> { }, ended::incrementAndGet));
    assertSame(FallbackReason.BUSY, why.reason);
    assertEquals("what was taken for it is given back", 1, ended.get());
    gate.countDown();
    for (MountThreads.Job<Boolean> job : jobs) {
      assertTrue(job.await());
    }
  }

  @Test
  public void anInterruptedReaderStopsWaitingAndStaysInterrupted() throws Exception {
    MountThreads threads = new MountThreads(2, 60_000 * MS);
    CountDownLatch gate = new CountDownLatch(1);
    MountThreads.Job<Boolean> job = threads.begin(() -> gate.await(60, TimeUnit.SECONDS), b -> { }, () -> { });
    Thread.currentThread().interrupt();
    assertThrows(InterruptedIOException.class, job::await);
    assertTrue(Thread.interrupted());
    assertEquals("an interrupt says nothing about the mount", 0, threads.stuck());
    gate.countDown();
  }

  @Test
  public void threadsEndWhenThereIsNothingToReadAndComeBack() throws Exception {
    MountThreads threads = new MountThreads(4, 20_000 * MS, 1000 * MS);
    for (int round = 0; round < 2; round++) {
      assertEquals("x", threads.begin(() -> "x", s -> { }, () -> { }).await());
      assertTrue(threads.threads() > 0);
      Waiting.until("all are gone", () -> threads.threads() == 0);
    }
  }

  @Test
  public void eachResultIsTakenOrDisposedOfOnce() throws Exception {
    // Threads also end meanwhile.
    MountThreads threads = new MountThreads(32, 10_000 * MS, 1);
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
            MountThreads.Job<Integer> job = threads.begin(() -> {
              made.incrementAndGet();
              return wanted;
            }, late -> spared.incrementAndGet(), ended::incrementAndGet);
            if (i % 3 == number % 3) {
              job.abandon();
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
    assertEquals(0, threads.stuck());
    Waiting.until("all are gone", () -> threads.threads() == 0);
  }
}
