// SPDX-License-Identifier: Apache-2.0
package org.viola.lab;

import java.io.IOException;
import java.util.concurrent.TimeUnit;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.conf.Configured;
import org.apache.hadoop.hbase.TableName;
import org.apache.hadoop.hbase.client.Admin;
import org.apache.hadoop.hbase.client.CompactionState;
import org.apache.hadoop.hbase.client.Connection;
import org.apache.hadoop.hbase.client.ConnectionFactory;
import org.apache.hadoop.util.Tool;

/**
 * The requests that a benchmark sends to HBase: {@code ready}, and {@code compact TABLE}, which leaves one
 * file per region.
 */
public final class HBaseTable extends Configured implements Tool {
  private static final long PATIENCE_S = 180;

  @Override
  public int run(String[] args) throws IOException, InterruptedException {
    Configuration conf = new Configuration(getConf());
    if (args[0].equals("ready")) {
      conf.setInt("hbase.client.retries.number", 2); // the caller repeats the request
    }
    try (Connection connection = ConnectionFactory.createConnection(conf); Admin admin = connection.getAdmin()) {
      switch (args[0]) {
        case "ready":
          // Check the servers first: a starting master cannot list a namespace.
          boolean served = !admin.getClusterMetrics().getLiveServerMetrics().isEmpty();
          return served && admin.getNamespaceDescriptor("default") != null ? 0 : 1;
        case "compact":
          compact(admin, TableName.valueOf(args[1]));
          return 0;
        default:
          throw new IOException("unknown request " + args[0]);
      }
    }
  }

  private static void compact(Admin admin, TableName table) throws IOException, InterruptedException {
    admin.flush(table);
    long before = admin.getLastMajorCompactionTimestamp(table);
    admin.majorCompact(table);
    long end = System.nanoTime() + TimeUnit.SECONDS.toNanos(PATIENCE_S);
    // The compaction is queued first, so "none" alone may mean that it has not begun.
    boolean seen = false;
    long idle = 0;
    while (idle < 10) {
      boolean busy = admin.getCompactionState(table) != CompactionState.NONE;
      seen |= busy || admin.getLastMajorCompactionTimestamp(table) != before;
      idle = busy ? 0 : idle + 1;
      if (System.nanoTime() > end) {
        throw new IOException(table + " was not compacted within " + PATIENCE_S + " s");
      }
      Thread.sleep(200);
    }
    if (!seen) {
      System.err.println("bench: " + table + " was one file already");
    }
  }
}
