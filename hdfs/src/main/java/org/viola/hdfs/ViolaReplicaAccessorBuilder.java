// SPDX-License-Identifier: Apache-2.0
package org.viola.hdfs;

import java.io.ByteArrayInputStream;
import java.io.DataInputStream;
import java.io.IOException;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.hdfs.ReplicaAccessor;
import org.apache.hadoop.hdfs.ReplicaAccessorBuilder;
import org.apache.hadoop.security.token.Token;
import org.apache.hadoop.security.token.TokenIdentifier;

/**
 * The class for {@code dfs.client.replica.accessor.builder.classes}. It never throws: a block that cannot be
 * read through the host is read from its DataNode.
 */
public final class ViolaReplicaAccessorBuilder extends ReplicaAccessorBuilder {
  private Configuration conf;
  private String pool;
  private long id;
  private long stamp;
  private long visibleLength;
  private boolean verify = true;
  private byte[] token = new byte[0];

  @Override
  public ReplicaAccessorBuilder setFileName(String fileName) {
    return this;
  }

  @Override
  public ReplicaAccessorBuilder setBlock(long blockId, String blockPoolId) {
    id = blockId;
    pool = blockPoolId;
    return this;
  }

  @Override
  public ReplicaAccessorBuilder setGenerationStamp(long generationStamp) {
    stamp = generationStamp;
    return this;
  }

  @Override
  public ReplicaAccessorBuilder setVerifyChecksum(boolean verifyChecksum) {
    verify = verifyChecksum;
    return this;
  }

  @Override
  public ReplicaAccessorBuilder setClientName(String clientName) {
    return this;
  }

  @Override
  public ReplicaAccessorBuilder setAllowShortCircuitReads(boolean allow) {
    return this;
  }

  @Override
  public ReplicaAccessorBuilder setVisibleLength(long length) {
    visibleLength = length;
    return this;
  }

  @Override
  public ReplicaAccessorBuilder setConfiguration(Configuration configuration) {
    conf = configuration;
    return this;
  }

  @Override
  public ReplicaAccessorBuilder setBlockAccessToken(byte[] blockAccessToken) {
    token = blockAccessToken;
    return this;
  }

  @Override
  public ReplicaAccessor build() {
    try {
      Vread vread = Vread.of(conf);
      BlockKey key = new BlockKey(pool, id, stamp);
      if (vread.settings.mounts.isEmpty() || !key.isPlain()) {
        return null;
      }
      if (requiresToken(token)) {
        Counters.get().fallback(FallbackReason.TOKEN, key, null);
        return null;
      }
      return vread.reader(key, visibleLength, verify);
    } catch (Throwable e) {
      // The client would only log the error; returning null makes it ask the DataNode.
      Counters.LOG.debug("no reader for blk_{}", id, e);
      return null;
    }
  }

  /** A cluster without access tokens sends an empty token. */
  private static boolean requiresToken(byte[] bytes) throws IOException {
    if (bytes == null || bytes.length == 0) {
      return false;
    }
    Token<TokenIdentifier> token = new Token<>();
    token.readFields(new DataInputStream(new ByteArrayInputStream(bytes)));
    return token.getIdentifier().length > 0 || token.getPassword().length > 0;
  }
}
