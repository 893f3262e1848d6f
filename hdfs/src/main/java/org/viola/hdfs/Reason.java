// SPDX-License-Identifier: Apache-2.0
package org.viola.hdfs;

import java.util.concurrent.TimeUnit;

/** Why a block is read from its DataNode instead, and for how long nobody asks the mount for it again. */
enum Reason {
  /** The mount has no such block: it lies on another host, or is still too young. */
  ABSENT("Absent", 1, "the mount has no such block"),
  /** The cluster demands access tokens, which nobody checks on this way. */
  TOKEN("Token", 0, "the cluster demands block access tokens (dfs.block.access.token.enable), which viola does not check: "
      + "blocks are read from their DataNodes"),
  /** The mount does not answer in time. */
  DEADLINE("Deadline", 5, "the mount did not answer in time"),
  /** Bytes and checksums differ. */
  CHECKSUM("Checksum", 600, "the bytes do not match the block's checksums"),
  /** Data or meta file are not what HDFS writes. */
  SHAPE("Shape", 30, "its files do not fit together"),
  /** Read error; also what a withdrawn block gives. */
  ERROR("Error", 5, "it cannot be read"),
  /** Too many reads at once. */
  BUSY("Busy", 5, "too many reads at once");

  final String label;
  final long pauseNanos;
  final String sentence;

  Reason(String label, long pauseSeconds, String sentence) {
    this.label = label;
    this.pauseNanos = TimeUnit.SECONDS.toNanos(pauseSeconds);
    this.sentence = sentence;
  }
}
