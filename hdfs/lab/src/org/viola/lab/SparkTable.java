// SPDX-License-Identifier: Apache-2.0
package org.viola.lab;

import java.io.IOException;
import java.util.Map;
import org.apache.hadoop.conf.Configured;
import org.apache.hadoop.util.Tool;
import org.apache.spark.sql.SparkSession;

/**
 * A table of users in HDFS, as text, and the paper's query for a range of it, by Spark SQL in this process:
 * {@code make PATH ROWS}, {@code select PATH FROM TO ROWS}. ROWS is the expected number of rows.
 */
public final class SparkTable extends Configured implements Tool {
  private static SparkSession session;

  @Override
  public int run(String[] args) throws IOException {
    SparkSession spark = session();
    String path = args[1];
    switch (args[0]) {
      case "make":
        spark.sql("SELECT id, concat('user', md5(cast(id AS string))) AS name,"
            + " date_add(DATE'1950-01-01', cast(id % 20000 AS int)) AS birthday,"
            + " sha2(cast(id AS string), 256) AS address FROM range(0, " + args[2] + ", 1, 2)")
            .write().mode("overwrite").csv(path);
        return 0;
      case "select":
        spark.read().schema("id BIGINT, name STRING, birthday DATE, address STRING").csv(path)
            .createOrReplaceTempView("test");
        // All columns are parsed, as in a query that shows rows.
        long found = spark.sql("SELECT count(name), count(birthday), count(address) FROM test WHERE id >= " + args[2]
            + " AND id <= " + args[3]).first().getLong(0);
        if (found != Long.parseLong(args[4])) {
          throw new IOException(found + " rows found, not " + args[4]);
        }
        return 0;
      default:
        throw new IOException("unknown request " + args[0]);
    }
  }

  /** One session for the process, with the configuration of its first request. */
  private synchronized SparkSession session() {
    if (session == null) {
      SparkSession.Builder builder = SparkSession.builder().master("local[1]").appName("viola")
          .config("spark.ui.enabled", "false")
          .config("spark.driver.host", "127.0.0.1")
          .config("spark.driver.bindAddress", "127.0.0.1")
          .config("spark.sql.codegen.wholeStage", "true")
          .config("spark.sql.warehouse.dir", "/tmp/warehouse");
      for (Map.Entry<String, String> entry : getConf()) {
        if (entry.getKey().startsWith("dfs.") || entry.getKey().startsWith("viola.")) {
          builder.config("spark.hadoop." + entry.getKey(), getConf().get(entry.getKey()));
        }
      }
      session = builder.getOrCreate();
    }
    return session;
  }
}
