// SPDX-License-Identifier: Apache-2.0
package org.viola.hdfs;

import java.util.EnumMap;
import java.util.EnumSet;
import java.util.Map;
import java.util.Set;
import org.apache.hadoop.metrics2.MetricsCollector;
import org.apache.hadoop.metrics2.MetricsSource;
import org.apache.hadoop.metrics2.lib.DefaultMetricsSystem;
import org.apache.hadoop.metrics2.lib.MetricsRegistry;
import org.apache.hadoop.metrics2.lib.MutableCounterLong;
import org.apache.hadoop.metrics2.lib.MutableGaugeInt;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/** This process's counts in Hadoop's metrics (source {@code ViolaVread}, context {@code dfs}). */
final class Counters implements MetricsSource {
  static final Logger LOG = LoggerFactory.getLogger("org.viola.hdfs");
  private static final String NAME = "ViolaVread";
  private static final Counters ONLY = make();

  private final MetricsRegistry registry = new MetricsRegistry(NAME).setContext("dfs");
  final MutableCounterLong blocks = registry.newCounter("BlocksOpened", "blocks whose files were opened", 0L);
  final MutableCounterLong accessors = registry.newCounter("Accessors", "block readers handed to the client", 0L);
  final MutableCounterLong bytes = registry.newCounter("BytesRead", "bytes given to the client", 0L);
  final MutableCounterLong bytesAhead = registry.newCounter("BytesFetched", "bytes read from the mount", 0L);
  final MutableGaugeInt stuck = registry.newGauge("ThreadsStuck", "threads that a hung mount holds", 0);
  private final Map<FallbackReason, MutableCounterLong> fallbacks = new EnumMap<>(FallbackReason.class);
  private final Set<FallbackReason> told = EnumSet.noneOf(FallbackReason.class);

  private Counters() {
    for (FallbackReason reason : FallbackReason.values()) {
      fallbacks.put(reason,
          registry.newCounter("Fallback" + reason.label, "left to the DataNode: " + reason.sentence, 0L));
    }
  }

  static Counters get() {
    return ONLY;
  }

  private static Counters make() {
    Counters counters = new Counters();
    try {
      DefaultMetricsSystem.instance().register(NAME, "HDFS blocks read through the host", counters);
    } catch (RuntimeException taken) {
      // Another class loader of this process has registered the name: the counts exist, but Hadoop does not show
      // them.
      LOG.debug("metrics of {} are not shown", NAME, taken);
    }
    return counters;
  }

  /** Counts a block that is read from its DataNode; logs the first one of each kind. */
  void fallback(FallbackReason reason, Object block, Throwable cause) {
    fallbacks.get(reason).incr();
    if (reason == FallbackReason.ABSENT) {
      return;
    }
    boolean first;
    synchronized (told) {
      first = told.add(reason);
    }
    String what = cause == null ? reason.sentence : cause.getMessage();
    if (reason == FallbackReason.TOKEN) {
      if (first) {
        LOG.info("viola: {}", what);
      }
    } else if (first || reason == FallbackReason.CHECKSUM) {
      LOG.warn("viola: {} is read from its DataNode: {}", block, what);
    } else {
      LOG.debug("viola: {} is read from its DataNode: {}", block, what);
    }
  }

  long fallbacks(FallbackReason reason) {
    return fallbacks.get(reason).value();
  }

  @Override
  public void getMetrics(MetricsCollector collector, boolean all) {
    registry.snapshot(collector.addRecord(registry.info()), all);
  }
}
