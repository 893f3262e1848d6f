// SPDX-License-Identifier: Apache-2.0
package org.viola.hdfs;

import java.io.IOException;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.TreeMap;
import org.apache.hadoop.fs.FSDataInputStream;
import org.apache.hadoop.fs.FileStatus;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.hdfs.client.HdfsDataInputStream;

/** Threads that read files repeatedly and verify every byte. */
final class VerifyingReaders {
  private final FileSystem fs;
  private final Path path;
  private final int size;
  private final List<Thread> threads = new ArrayList<>();
  private volatile boolean ends;

  private long bytes;
  private long reads;
  private long local;
  private long wrong;
  private String firstWrong = "";
  private final Map<String, Long> failures = new TreeMap<>();
  private String firstFailure = "";
  private long longest;

  /** Starts the threads; {@code path} is a file or a directory of files, {@code size} the bytes of a read. */
  VerifyingReaders(FileSystem fs, Path path, int size, int count) {
    this.fs = fs;
    this.path = path;
    this.size = size;
    for (int i = 0; i < count; i++) {
      Random random = new Random(i);
      Thread thread = new Thread(() -> run(random), "watch-" + i);
      thread.setDaemon(true);
      threads.add(thread);
      thread.start();
    }
  }

  /** Reads the whole file once from its beginning, in this thread. */
  void whole() throws IOException {
    round(path, null, new byte[size], new long[] {System.nanoTime()});
  }

  private void run(Random random) {
    long[] last = {System.nanoTime()};
    byte[] buffer = new byte[size];
    while (!ends) {
      try {
        Path file = choose(random);
        if (file == null) {
          Thread.sleep(20);
          continue;
        }
        round(file, random, buffer, last);
      } catch (IOException | RuntimeException e) {
        failed(e);
        last[0] = System.nanoTime();
      } catch (InterruptedException e) {
        return;
      }
    }
  }

  private Path choose(Random random) throws IOException {
    FileStatus status = fs.getFileStatus(path);
    if (!status.isDirectory()) {
      return path;
    }
    FileStatus[] all = fs.listStatus(path);
    return all.length == 0 ? null : all[random.nextInt(all.length)].getPath();
  }

  /** Reads the whole file from its beginning or, at random, single ranges of it. */
  private void round(Path file, Random random, byte[] buffer, long[] last) throws IOException {
    Pattern pattern = Pattern.of(file.getName());
    try (FSDataInputStream in = fs.open(file)) {
      long length = ((HdfsDataInputStream) in).getVisibleLength();
      try {
        if (random == null || random.nextBoolean()) {
          long at = 0;
          for (int n; !ends && (n = in.read(buffer, 0, buffer.length)) > 0; at += n) {
            verify(file, pattern, at, buffer, n, last);
          }
          if (!ends && at < length) {
            throw new IOException(file + " ended at " + at + " of " + length);
          }
        } else {
          for (int i = 0; i < 32 && !ends && length > 0; i++) {
            long at = Math.floorMod(random.nextLong(), length);
            int n = (int) Math.min(length - at, 1 + random.nextInt(buffer.length));
            in.readFully(at, buffer, 0, n);
            verify(file, pattern, at, buffer, n, last);
          }
        }
      } finally {
        long past = ((HdfsDataInputStream) in).getReadStatistics().getTotalShortCircuitBytesRead();
        synchronized (this) {
          local += past;
        }
      }
    }
  }

  private void verify(Path file, Pattern pattern, long at, byte[] buffer, int count, long[] last) {
    long now = System.nanoTime();
    int differs = pattern.differs(at, buffer, count);
    synchronized (this) {
      longest = Math.max(longest, now - last[0]);
      bytes += count;
      reads++;
      if (differs >= 0) {
        wrong++;
        if (firstWrong.isEmpty()) {
          firstWrong = file + " at " + (at + differs) + " in a read of " + count + " bytes from " + at;
        }
      }
    }
    last[0] = System.nanoTime();
  }

  private synchronized void failed(Exception e) {
    failures.merge(e.getClass().getSimpleName(), 1L, Long::sum);
    if (firstFailure.isEmpty()) {
      firstFailure = e.toString();
    }
  }

  /** Ends the threads. */
  void end() throws InterruptedException {
    ends = true;
    for (Thread thread : threads) {
      thread.join();
    }
  }

  /** The results since the last call. */
  synchronized String json() {
    StringBuilder kinds = new StringBuilder();
    failures.forEach((kind, count) ->
        kinds.append(kinds.length() == 0 ? "" : ", ").append(String.format("\"%s\": %d", kind, count)));
    String text = String.format(
        "{\"bytes\": %d, \"reads\": %d, \"local\": %d, \"wrong\": %d, \"longest_ms\": %d, "
            + "\"failures\": {%s}, \"said\": \"%s\"}",
        bytes, reads, local, wrong, longest / 1_000_000, kinds,
        (firstWrong + " " + firstFailure).trim().replaceAll("[\\p{Cntrl}\"\\\\]", " "));
    bytes = reads = local = wrong = longest = 0;
    failures.clear();
    firstWrong = firstFailure = "";
    return text;
  }
}
