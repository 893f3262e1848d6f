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
  /** Folders in which the host shows blocks, separated by commas; without it viola stays out. */
  static final String MOUNT = "viola.vread.mount";
  /** {@code false} leaves the checksums out. */
  static final String VERIFY = "viola.verify";
  /** Longest wait for an open or a read (750 ms). */
  static final String DEADLINE = "viola.vread.deadline";
  /**
   * {@code auto} (single small reads through the page cache, all others past it where the mount can),
   * {@code direct} (all past it) or {@code buffered} (none).
   */
  static final String IO = "viola.vread.io";
  /** Bytes read at once in sequential use; twice this much is read ahead (1 MiB). */
  static final String WINDOW = "viola.vread.window";
  /** Blocks kept open (64). */
  static final String HANDLES = "viola.vread.handles";
  /** Most threads that read (32). */
  static final String THREADS = "viola.vread.threads";

  static final int SMALLEST_WINDOW = 64 << 10;
  private static final int LARGEST_WINDOW = 16 << 20;

  final List<Path> mounts;
  final boolean verify;
  final boolean direct;
  final boolean singlesCached;
  final long deadlineNanos;
  final int window;
  final int handles;
  final int threads;

  Settings(Configuration conf) {
    mounts = new ArrayList<>();
    for (String mount : conf.getTrimmedStrings(MOUNT)) {
      mounts.add(Paths.get(mount));
    }
    verify = conf.getBoolean(VERIFY, true);
    String io = conf.getTrimmed(IO, "auto");
    direct = !"buffered".equals(io);
    singlesCached = !"direct".equals(io);
    deadlineNanos = within(conf.getTimeDuration(DEADLINE, 750, TimeUnit.MILLISECONDS), 1, 60_000) * 1_000_000L;
    window = Integer.highestOneBit(
        (int) within(conf.getLongBytes(WINDOW, 1 << 20), SMALLEST_WINDOW, LARGEST_WINDOW));
    handles = (int) within(conf.getInt(HANDLES, 64), 1, 4096);
    threads = (int) within(conf.getInt(THREADS, 32), 2, 1024);
  }

  private static long within(long value, long least, long most) {
    return Math.max(least, Math.min(most, value));
  }

  @Override
  public boolean equals(Object other) {
    if (!(other instanceof Settings)) {
      return false;
    }
    Settings s = (Settings) other;
    return mounts.equals(s.mounts) && verify == s.verify && direct == s.direct
        && singlesCached == s.singlesCached
        && deadlineNanos == s.deadlineNanos && window == s.window && handles == s.handles
        && threads == s.threads;
  }

  @Override
  public int hashCode() {
    return Objects.hash(mounts, verify, direct, singlesCached, deadlineNanos, window, handles, threads);
  }
}
