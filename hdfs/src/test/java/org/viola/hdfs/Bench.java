// SPDX-License-Identifier: Apache-2.0
package org.viola.hdfs;

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.OutputStream;
import java.lang.management.ManagementFactory;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.ServerSocket;
import java.net.Socket;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Paths;
import java.util.Arrays;
import java.util.HashMap;
import java.util.Map;
import java.util.Random;
import java.util.zip.CRC32C;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.BlockLocation;
import org.apache.hadoop.fs.FSDataInputStream;
import org.apache.hadoop.fs.FSDataOutputStream;
import org.apache.hadoop.fs.FileStatus;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.permission.FsPermission;
import org.apache.hadoop.hdfs.DistributedFileSystem;
import org.apache.hadoop.hdfs.HdfsConfiguration;
import org.apache.hadoop.hdfs.client.HdfsDataInputStream;
import org.apache.hadoop.util.Tool;
import org.apache.hadoop.util.ToolRunner;

/**
 * An HDFS client that executes requests from a socket, so that both sides of a comparison run in one warm
 * process. Requests are lines of words, answers are lines of JSON:
 *
 * <pre>
 * open SIDE [KEY=VALUE...]          a file system with these keys over hdfs-site.xml; resource=NAME reads one more file
 * SIDE write PATH BYTES BLOCK SEED  writes noise
 * SIDE append PATH BYTES SEED
 * SIDE read PATH BUFFER             the whole file, with the checksum of what was read
 * SIDE skim PATH BUFFER             the whole file, without
 * SIDE pread PATH COUNT SIZE SEED   reads at random places, aligned to their size
 * SIDE warm PATH SECONDS            reads of all kinds, so that what is measured later is compiled code
 * SIDE place PATH BYTES BLOCK SEED HOST:PORT  writes noise to that DataNode
 * SIDE litter FOLDER COUNT BYTES SEED         writes small files
 * SIDE delete PATH
 * SIDE clear FOLDER                 deletes the folder's files, one after the other
 * SIDE tool CLASS [ARGUMENT...]     runs a Hadoop tool, such as TestDFSIO, in this process
 * SIDE export PATH FOLDER NAME...   writes the file's blocks into local files of these names
 * stats                             what the plug-in has counted since the last time
 * </pre>
 *
 * {@link FileRequests} has further requests.
 */
public final class Bench {
  private final Map<String, FileSystem> sides = new HashMap<>();
  private final Map<String, Configuration> configurations = new HashMap<>();
  private final FileRequests fileRequests = new FileRequests();
  private long bytesSeen;
  private long fallbacksSeen;

  private Bench() {
  }

  /** Serves one connection after the other on the given port. */
  public static void main(String[] args) throws IOException {
    Bench bench = new Bench();
    try (ServerSocket server = new ServerSocket(Integer.parseInt(args[0]), 4, InetAddress.getByName("0.0.0.0"))) {
      while (true) {
        try (Socket client = server.accept()) {
          client.setTcpNoDelay(true);
          bench.serve(client);
        } catch (IOException e) {
          System.err.println("bench: " + e);
        }
      }
    }
  }

  private void serve(Socket client) throws IOException {
    BufferedReader in = new BufferedReader(new InputStreamReader(client.getInputStream(), StandardCharsets.UTF_8));
    OutputStream out = client.getOutputStream();
    for (String line; (line = in.readLine()) != null;) {
      String answer;
      try {
        answer = run(line.trim().split(" +"));
      } catch (IOException | RuntimeException e) {
        answer = "{\"error\": \"" + e.toString().replaceAll("[\\p{Cntrl}\"\\\\]", " ") + "\"}";
      }
      out.write((answer + "\n").getBytes(StandardCharsets.UTF_8));
    }
  }

  private String run(String[] words) throws IOException {
    if (words[0].equals("open")) {
      Configuration conf = new HdfsConfiguration();
      for (String pair : Arrays.copyOfRange(words, 2, words.length)) {
        int at = pair.indexOf('=');
        if (pair.startsWith("resource=")) {
          conf.addResource(pair.substring(at + 1));
        } else {
          conf.set(pair.substring(0, at), pair.substring(at + 1));
        }
      }
      configurations.put(words[1], conf);
      FileSystem old = sides.put(words[1], FileSystem.newInstance(conf));
      if (old != null) {
        old.close();
      }
      return "{}";
    }
    if (words[0].equals("stats")) {
      return stats();
    }
    String reply = fileRequests.run(sides, words);
    if (reply != null) {
      return reply;
    }
    FileSystem fs = sides.get(words[0]);
    if (fs == null) {
      throw new IOException("there is no side " + words[0]);
    }
    if (words[1].equals("tool")) {
      return tool(configurations.get(words[0]), words[2], Arrays.copyOfRange(words, 3, words.length));
    }
    Path path = new Path(words[2]);
    System.gc(); // nobody begins with what another left
    Meter meter = new Meter();
    switch (words[1]) {
      case "write":
        try (FSDataOutputStream out = fs.create(path, true, 1 << 16, fs.getDefaultReplication(path),
            Long.parseLong(words[4]))) {
          noise(out, Long.parseLong(words[3]), Long.parseLong(words[5]), meter);
        }
        break;
      case "append":
        try (FSDataOutputStream out = fs.append(path)) {
          noise(out, Long.parseLong(words[3]), Long.parseLong(words[4]), meter);
        }
        break;
      case "place":
        place((DistributedFileSystem) fs, path, words, meter);
        break;
      case "litter":
        for (int i = 0; i < Integer.parseInt(words[3]); i++) {
          try (FSDataOutputStream out = fs.create(new Path(path, Integer.toString(i)), true)) {
            noise(out, Long.parseLong(words[4]), Long.parseLong(words[5]) + i, meter);
          }
        }
        break;
      case "clear":
        for (FileStatus file : fs.listStatus(path)) {
          fs.delete(file.getPath(), false);
          meter.reads++;
        }
        break;
      case "warm":
        warm(fs, path, Double.parseDouble(words[3]), meter);
        break;
      case "read":
        read(fs, path, Integer.parseInt(words[3]), true, meter);
        break;
      case "skim":
        read(fs, path, Integer.parseInt(words[3]), false, meter);
        break;
      case "pread":
        pread(fs, path, Integer.parseInt(words[3]), Integer.parseInt(words[4]), Long.parseLong(words[5]), meter);
        break;
      case "delete":
        if (!fs.delete(path, false)) {
          throw new IOException("there is no " + path);
        }
        break;
      case "export":
        export(fs, path, Paths.get(words[3]), Arrays.copyOfRange(words, 4, words.length), meter);
        break;
      default:
        throw new IOException("unknown request " + words[1]);
    }
    return meter.json();
  }

  /** Runs a tool of Hadoop or of a program built on it, with the side's configuration. */
  private static String tool(Configuration side, String name, String[] arguments) throws IOException {
    Configuration conf = new Configuration(side);
    // Otherwise the cache returns the first side's file system.
    conf.setBoolean("fs.hdfs.impl.disable.cache", true);
    System.gc();
    Meter meter = new Meter();
    int status;
    try {
      status = ToolRunner.run(conf, make(Class.forName(name), conf), arguments);
    } catch (IOException e) {
      throw e;
    } catch (Exception e) {
      throw new IOException(name + ": " + e, e);
    }
    if (status != 0) {
      throw new IOException(name + " ended with " + status);
    }
    return meter.json();
  }

  private static Tool make(Class<?> type, Configuration conf) throws ReflectiveOperationException {
    try {
      return (Tool) type.getConstructor(Configuration.class).newInstance(conf);
    } catch (NoSuchMethodException e) {
      return (Tool) type.getConstructor().newInstance();
    }
  }

  private static void place(DistributedFileSystem fs, Path path, String[] words, Meter meter) throws IOException {
    int colon = words[6].lastIndexOf(':');
    InetSocketAddress node =
        new InetSocketAddress(words[6].substring(0, colon), Integer.parseInt(words[6].substring(colon + 1)));
    try (FSDataOutputStream out = fs.create(path, FsPermission.getFileDefault(), true, 1 << 16, (short) 1,
        Long.parseLong(words[4]), null, new InetSocketAddress[] {node})) {
      noise(out, Long.parseLong(words[3]), Long.parseLong(words[5]), meter);
    }
    for (BlockLocation block : fs.getFileBlockLocations(path, 0, Long.MAX_VALUE)) {
      if (!block.getNames()[0].equals(words[6])) {
        throw new IOException("a block of " + path + " is at " + block.getNames()[0]);
      }
    }
  }

  private static void warm(FileSystem fs, Path path, double seconds, Meter meter) throws IOException {
    long end = System.nanoTime() + (long) (seconds * 1e9);
    for (long seed = 1; System.nanoTime() < end; seed++) {
      for (int size : new int[] {4 << 10, 64 << 10, 1 << 20}) {
        pread(fs, path, 64, size, seed, new Meter());
      }
      byte[] buffer = new byte[1 << 20];
      try (FSDataInputStream in = fs.open(path)) {
        for (int i = 0; i < 64 && fill(in, buffer) > 0 && System.nanoTime() < end; i++) {
          meter.bytes += buffer.length;
        }
      }
    }
  }

  private static void noise(OutputStream out, long count, long seed, Meter meter) throws IOException {
    byte[] chunk = new byte[1 << 20];
    new Random(seed).nextBytes(chunk);
    long[] latencies = new long[(int) ((count + chunk.length - 1) / chunk.length)];
    int at = 0;
    for (long left = count; left > 0; left -= chunk.length) {
      int some = (int) Math.min(left, chunk.length);
      chunk[0]++; // blocks must differ
      meter.sum.update(chunk, 0, some);
      meter.summed = true;
      long before = System.nanoTime();
      out.write(chunk, 0, some);
      latencies[at++] = System.nanoTime() - before;
      meter.bytes += some;
    }
    meter.latencies = latencies;
  }

  private static void read(FileSystem fs, Path path, int size, boolean sum, Meter meter) throws IOException {
    byte[] buffer = new byte[size];
    meter.summed = sum;
    try (FSDataInputStream in = fs.open(path)) {
      for (int n; (n = fill(in, buffer)) > 0;) {
        meter.bytes += n;
        meter.reads++;
        if (sum) {
          meter.sum.update(buffer, 0, n);
        }
      }
      meter.local = local(in);
    }
  }

  /** Fills the buffer, except at the end of the file. */
  private static int fill(FSDataInputStream in, byte[] buffer) throws IOException {
    int done = 0;
    for (int n; done < buffer.length && (n = in.read(buffer, done, buffer.length - done)) > 0;) {
      done += n;
    }
    return done;
  }

  private static void pread(FileSystem fs, Path path, int count, int size, long seed, Meter meter) throws IOException {
    byte[] buffer = new byte[size];
    long places = fs.getFileStatus(path).getLen() / size;
    Random random = new Random(seed);
    meter.latencies = new long[count];
    meter.summed = true;
    try (FSDataInputStream in = fs.open(path)) {
      meter.start();
      for (int i = 0; i < count; i++) {
        long at = Math.floorMod(random.nextLong(), places) * size;
        long before = System.nanoTime();
        in.readFully(at, buffer);
        meter.latencies[i] = System.nanoTime() - before;
        meter.bytes += size;
        meter.reads++;
        meter.sum.update(buffer, 0, size);
      }
      meter.stop();
      meter.local = local(in);
    }
  }

  private static void export(FileSystem fs, Path path, java.nio.file.Path folder, String[] names, Meter meter)
      throws IOException {
    long block = fs.getFileStatus(path).getBlockSize();
    byte[] buffer = new byte[1 << 20];
    Files.createDirectories(folder);
    try (FSDataInputStream in = fs.open(path)) {
      for (String name : names) {
        try (OutputStream out = Files.newOutputStream(folder.resolve(name))) {
          for (long left = block; left > 0;) {
            int n = in.read(buffer, 0, (int) Math.min(left, buffer.length));
            if (n < 0) {
              break;
            }
            out.write(buffer, 0, n);
            left -= n;
            meter.bytes += n;
          }
        }
      }
    }
  }

  private String stats() {
    Counters counters = Counters.get();
    long bytes = counters.bytes.value();
    long fallbacks = 0;
    for (FallbackReason reason : FallbackReason.values()) {
      fallbacks += counters.fallbacks(reason);
    }
    String text = String.format("{\"bytes\": %d, \"reads\": %d}", bytes - bytesSeen, fallbacks - fallbacksSeen);
    bytesSeen = bytes;
    fallbacksSeen = fallbacks;
    return text;
  }

  private static long local(FSDataInputStream in) {
    return ((HdfsDataInputStream) in).getReadStatistics().getTotalShortCircuitBytesRead();
  }

  /** Wall and CPU time of one request. */
  private static final class Meter {
    private final com.sun.management.OperatingSystemMXBean system =
        ManagementFactory.getPlatformMXBean(com.sun.management.OperatingSystemMXBean.class);
    private final CRC32C sum = new CRC32C();
    private boolean summed;
    private long bytes;
    private long reads;
    private long local;
    private long[] latencies;
    private long wall;
    private long cpu;
    private boolean stopped;

    Meter() {
      start();
    }

    void start() {
      cpu = system.getProcessCpuTime();
      wall = System.nanoTime();
    }

    void stop() {
      wall = System.nanoTime() - wall;
      cpu = system.getProcessCpuTime() - cpu;
      stopped = true;
    }

    String json() {
      if (!stopped) {
        stop();
      }
      StringBuilder text = new StringBuilder(String.format(
          "{\"bytes\": %d, \"reads\": %d, \"local\": %d, \"wall_s\": %.6f, \"cpu_s\": %.6f",
          bytes, reads, local, wall / 1e9, cpu / 1e9));
      if (summed) {
        text.append(String.format(", \"crc32c\": %d", sum.getValue()));
      }
      if (latencies != null) {
        Arrays.sort(latencies);
        text.append(String.format(", \"p50_us\": %.1f, \"p99_us\": %.1f",
            latencies[latencies.length / 2] / 1e3, latencies[latencies.length * 99 / 100] / 1e3));
      }
      return text.append("}").toString();
    }
  }
}
