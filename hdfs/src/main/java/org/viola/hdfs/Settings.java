// SPDX-License-Identifier: Apache-2.0
package org.viola.hdfs;

import java.nio.file.Path;
import java.nio.file.Paths;
import java.util.ArrayList;
import java.util.List;
import java.util.Objects;
import java.util.concurrent.TimeUnit;
import org.apache.hadoop.conf.Configuration;

/** The {@code viola.*} keys of a configuration. Equal settings share their open files and threads. */
final class Settings {
  /** Directories of viola's mounts, separated by commas ({@value #DEFAULT_MOUNT}); with none the plug-in does nothing. */
  static final String MOUNT = "viola.vread.mount";
  private static final String DEFAULT_MOUNT = "/mnt/viola";
  /** {@code false} skips the verification of checksums. */
  static final String VERIFY = "viola.verify";
  /** Time limit for an open or a read (750 ms). */
  static final String DEADLINE = "viola.vread.deadline";
  /**
   * {@code auto}: single small reads use the page cache, others O_DIRECT where the mount supports it; {@code
   * direct}: all use O_DIRECT; {@code buffered}: none does.
   */
  static final String IO = "viola.vread.io";
  /** Bytes read at once in sequential use; twice as much is read ahead (1 MiB). */
  static final String WINDOW = "viola.vread.window";
  /** Maximum number of blocks kept open (64). */
  static final String HANDLES = "viola.vread.handles";
  /** Maximum number of reading threads (32). */
  static final String THREADS = "viola.vread.threads";

  static final int MIN_WINDOW_BYTES = 64 << 10;
  private static final int MAX_WINDOW_BYTES = 16 << 20;

  final List<Path> mounts;
  final boolean verify;
  final boolean direct;
  final boolean cacheSingleReads;
  final long deadlineNanos;
  final int window;
  final int handles;
  final int threads;

  Settings(Configuration conf) {
    mounts = new ArrayList<>();
    for (String mount : conf.getTrimmedStrings(MOUNT, DEFAULT_MOUNT)) {
      mounts.add(Paths.get(mount));
    }
    verify = conf.getBoolean(VERIFY, true);
    String io = conf.getTrimmed(IO, "auto");
    direct = !"buffered".equals(io);
    cacheSingleReads = !"direct".equals(io);
    deadlineNanos = within(conf.getTimeDuration(DEADLINE, 750, TimeUnit.MILLISECONDS), 1, 60_000) * 1_000_000L;
    window = Integer.highestOneBit(
        (int) within(conf.getLongBytes(WINDOW, 1 << 20), MIN_WINDOW_BYTES, MAX_WINDOW_BYTES));
    handles = (int) within(conf.getInt(HANDLES, 64), 1, 4096);
    threads = (int) within(conf.getInt(THREADS, 32), 2, 1024);
  }

  private static long within(long value, long min, long max) {
    return Math.max(min, Math.min(max, value));
  }

  @Override
  public boolean equals(Object other) {
    if (!(other instanceof Settings)) {
      return false;
    }
    Settings s = (Settings) other;
    return mounts.equals(s.mounts) && verify == s.verify && direct == s.direct
        && cacheSingleReads == s.cacheSingleReads
        && deadlineNanos == s.deadlineNanos && window == s.window && handles == s.handles
        && threads == s.threads;
  }

  @Override
  public int hashCode() {
    return Objects.hash(mounts, verify, direct, cacheSingleReads, deadlineNanos, window, handles, threads);
  }
}
