// SPDX-License-Identifier: Apache-2.0
package org.viola.hdfs;

import java.nio.file.Path;
import java.util.Objects;

/** The name of a block's content: under one generation stamp a finished block never changes. */
final class BlockKey {
  private static final int MAX_POOL_LENGTH = 128;

  final String pool;
  final long id;
  final long stamp;

  BlockKey(String pool, long id, long stamp) {
    this.pool = pool;
    this.id = id;
    this.stamp = stamp;
  }

  /** Whether the pool's name is safe as part of a path. */
  boolean isPlain() {
    if (pool == null || pool.isEmpty() || pool.length() > MAX_POOL_LENGTH || pool.startsWith(".")) {
      return false;
    }
    return pool.chars().allMatch(c -> c == '-' || c == '.'
        || (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z'));
  }

  Path data(Path mount) {
    return mount.resolve(pool).resolve("blk_" + id + "_" + stamp);
  }

  Path meta(Path mount) {
    return mount.resolve(pool).resolve("blk_" + id + "_" + stamp + ".meta");
  }

  @Override
  public boolean equals(Object other) {
    if (!(other instanceof BlockKey)) {
      return false;
    }
    BlockKey key = (BlockKey) other;
    return id == key.id && stamp == key.stamp && pool.equals(key.pool);
  }

  @Override
  public int hashCode() {
    return Objects.hash(id, stamp, pool);
  }

  @Override
  public String toString() {
    return pool + ":blk_" + id + "_" + stamp;
  }
}
