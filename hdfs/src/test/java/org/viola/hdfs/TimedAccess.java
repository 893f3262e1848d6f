// SPDX-License-Identifier: Apache-2.0
package org.viola.hdfs;

import java.io.IOException;
import java.nio.ByteBuffer;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.hdfs.ReplicaAccessor;
import org.apache.hadoop.hdfs.ReplicaAccessorBuilder;

/** The plug-in with a measurement of its longest call. */
public final class TimedAccess extends ReplicaAccessorBuilder {
  private static final AtomicLong LONGEST = new AtomicLong();

  private final ReplicaAccessorBuilder builder = new ViolaReplicaAccessorBuilder();

  /** Duration of the longest call since the last request for it, milliseconds. */
  static long longestMillis() {
    return LONGEST.getAndSet(0) / 1_000_000;
  }

  private static void recordDuration(long begun) {
    LONGEST.accumulateAndGet(System.nanoTime() - begun, Math::max);
  }

  @Override
  public ReplicaAccessorBuilder setFileName(String fileName) {
    builder.setFileName(fileName);
    return this;
  }

  @Override
  public ReplicaAccessorBuilder setBlock(long blockId, String blockPoolId) {
    builder.setBlock(blockId, blockPoolId);
    return this;
  }

  @Override
  public ReplicaAccessorBuilder setGenerationStamp(long generationStamp) {
    builder.setGenerationStamp(generationStamp);
    return this;
  }

  @Override
  public ReplicaAccessorBuilder setVerifyChecksum(boolean verifyChecksum) {
    builder.setVerifyChecksum(verifyChecksum);
    return this;
  }

  @Override
  public ReplicaAccessorBuilder setClientName(String clientName) {
    builder.setClientName(clientName);
    return this;
  }

  @Override
  public ReplicaAccessorBuilder setAllowShortCircuitReads(boolean allow) {
    builder.setAllowShortCircuitReads(allow);
    return this;
  }

  @Override
  public ReplicaAccessorBuilder setVisibleLength(long length) {
    builder.setVisibleLength(length);
    return this;
  }

  @Override
  public ReplicaAccessorBuilder setConfiguration(Configuration configuration) {
    builder.setConfiguration(configuration);
    return this;
  }

  @Override
  public ReplicaAccessorBuilder setBlockAccessToken(byte[] blockAccessToken) {
    builder.setBlockAccessToken(blockAccessToken);
    return this;
  }

  @Override
  public ReplicaAccessor build() {
    long begun = System.nanoTime();
    ReplicaAccessor inner = builder.build();
    recordDuration(begun);
    return inner == null ? null : new Clocked(inner);
  }

  private static final class Clocked extends ReplicaAccessor {
    private final ReplicaAccessor inner;

    Clocked(ReplicaAccessor inner) {
      this.inner = inner;
    }

    @Override
    public int read(long position, byte[] bytes, int offset, int count) throws IOException {
      long begun = System.nanoTime();
      try {
        return inner.read(position, bytes, offset, count);
      } finally {
        recordDuration(begun);
      }
    }

    @Override
    public int read(long position, ByteBuffer to) throws IOException {
      long begun = System.nanoTime();
      try {
        return inner.read(position, to);
      } finally {
        recordDuration(begun);
      }
    }

    @Override
    public void close() throws IOException {
      long begun = System.nanoTime();
      try {
        inner.close();
      } finally {
        recordDuration(begun);
      }
    }

    @Override
    public boolean isLocal() {
      return inner.isLocal();
    }

    @Override
    public boolean isShortCircuit() {
      return inner.isShortCircuit();
    }

    @Override
    public int getNetworkDistance() {
      return inner.getNetworkDistance();
    }
  }
}
