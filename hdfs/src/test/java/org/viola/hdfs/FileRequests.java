// SPDX-License-Identifier: Apache-2.0
package org.viola.hdfs;

import java.io.IOException;
import java.util.HashMap;
import java.util.Map;
import org.apache.hadoop.fs.FSDataOutputStream;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.hdfs.DistributedFileSystem;

/**
 * Requests of {@link Bench} for files whose content follows from their name, so that every byte read can be
 * verified. See {@link Pattern}.
 *
 * <pre>
 * SIDE fill PATH BYTES BLOCK [REPLICAS]  writes what the name says
 * SIDE extend PATH TO [PAUSE_MS]    appends up to a length, with a pause after each MiB
 * SIDE truncate PATH TO
 * SIDE rename PATH TO
 * SIDE replicas PATH COUNT
 * SIDE check PATH SIZE              reads all once
 * SIDE watch PATH SIZE NAME COUNT   begins to read by threads, see {@link VerifyingReaders}
 * watched NAME                      what they have seen since the last time
 * ended NAME                        the same, and ends them
 * counts                            all that the plug-in has counted, and its longest call since the last time
 * </pre>
 */
final class FileRequests {
  private final Map<String, VerifyingReaders> watches = new HashMap<>();

  /** Executes a request; returns null when it is not one of these. */
  String run(Map<String, FileSystem> sides, String[] words) throws IOException {
    switch (words[0]) {
      case "counts":
        return counts();
      case "watched":
        return watches.get(words[1]).json();
      case "ended":
        return end(watches.remove(words[1]));
      default:
        FileSystem fs = sides.get(words[0]);
        return fs == null || words.length < 4 ? null : run(fs, words[1], new Path(words[2]), words);
    }
  }

  private String run(FileSystem fs, String what, Path path, String[] words) throws IOException {
    switch (what) {
      case "fill":
        short replicas = words.length > 5 ? Short.parseShort(words[5]) : fs.getDefaultReplication(path);
        try (FSDataOutputStream out = fs.create(path, true, 1 << 16, replicas, Long.parseLong(words[4]))) {
          fill(out, path, 0, Long.parseLong(words[3]), 0);
        }
        break;
      case "extend":
        long from = fs.getFileStatus(path).getLen();
        try (FSDataOutputStream out = fs.append(path)) {
          fill(out, path, from, Long.parseLong(words[3]), words.length > 4 ? Long.parseLong(words[4]) : 0);
        }
        break;
      case "truncate":
        truncate(fs, path, Long.parseLong(words[3]));
        break;
      case "rename":
        if (!fs.rename(path, new Path(words[3]))) {
          throw new IOException(path + " cannot be renamed to " + words[3]);
        }
        break;
      case "replicas":
        fs.setReplication(path, Short.parseShort(words[3]));
        break;
      case "check":
        VerifyingReaders watch = new VerifyingReaders(fs, path, Integer.parseInt(words[3]), 0);
        watch.whole();
        return watch.json();
      case "watch":
        watches.put(words[4], new VerifyingReaders(fs, path, Integer.parseInt(words[3]), Integer.parseInt(words[5])));
        break;
      default:
        return null;
    }
    return "{}";
  }

  private static void fill(FSDataOutputStream out, Path path, long from, long to, long pause)
      throws IOException {
    Pattern pattern = Pattern.of(path.getName());
    byte[] chunk = new byte[1 << 20];
    for (long at = from; at < to;) {
      int some = (int) Math.min(to - at, chunk.length);
      pattern.fill(at, chunk, some);
      out.write(chunk, 0, some);
      at += some;
      if (pause > 0) {
        out.hflush();
        try {
          Thread.sleep(pause);
        } catch (InterruptedException e) {
          throw new IOException(e);
        }
      }
    }
  }

  private static void truncate(FileSystem fs, Path path, long to) throws IOException {
    boolean done = fs.truncate(path, to);
    for (int i = 0; !done && i < 600; i++) {
      try {
        Thread.sleep(50);
      } catch (InterruptedException e) {
        throw new IOException(e);
      }
      done = ((DistributedFileSystem) fs).isFileClosed(path);
    }
    if (!done) {
      throw new IOException(path + " is not truncated in time");
    }
  }

  private static String end(VerifyingReaders watch) throws IOException {
    try {
      watch.end();
    } catch (InterruptedException e) {
      throw new IOException(e);
    }
    return watch.json();
  }

  private static String counts() {
    Counters counters = Counters.get();
    StringBuilder text = new StringBuilder(String.format("{\"bytes\": %d, \"longest_ms\": %d, \"fallbacks\": {",
        counters.bytes.value(), TimedAccess.longestMillis()));
    String comma = "";
    for (FallbackReason reason : FallbackReason.values()) {
      text.append(String.format("%s\"%s\": %d", comma, reason.label, counters.fallbacks(reason)));
      comma = ", ";
    }
    return text.append("}}").toString();
  }
}
