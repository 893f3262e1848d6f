// SPDX-License-Identifier: Apache-2.0
package org.viola.hdfs;

import java.util.concurrent.TimeUnit;

/** Why a block is read from its DataNode, and for how long the mount is not asked for it. */
enum FallbackReason {
  /** The mount does not contain the block: it is on another host, or too new. */
  ABSENT("Absent", 1, "the mount has no such block"),
  /** The cluster requires access tokens, which viola does not check. */
  TOKEN("Token", 0, "the cluster requires block access tokens (dfs.block.access.token.enable), which viola does not check: "
      + "blocks are read from their DataNodes"),
  /** The mount does not answer in time. */
  DEADLINE("Deadline", 5, "the mount did not answer in time"),
  /** The bytes do not match the checksums. */
  CHECKSUM("Checksum", 600, "the bytes do not match the block's checksums"),
  /** Data or meta file are not as HDFS writes them. */
  SHAPE("Shape", 30, "its data and meta files do not match"),
  /** Read error, for example because the block was withdrawn. */
  ERROR("Error", 5, "it cannot be read"),
  /** Too many reads at once. */
  BUSY("Busy", 5, "too many reads at once");

  final String label;
  final long pauseNanos;
  final String sentence;

  FallbackReason(String label, long pauseSeconds, String sentence) {
    this.label = label;
    this.pauseNanos = TimeUnit.SECONDS.toNanos(pauseSeconds);
    this.sentence = sentence;
  }
}
