// SPDX-License-Identifier: Apache-2.0
/**
 * Reads HDFS blocks through the host.
 *
 * <p>The HDFS client asks {@link org.viola.hdfs.ViolaReplicaAccessorBuilder} for every block before it
 * talks to a DataNode. Where the host shows that block in a mounted folder, its bytes are read from
 * there and checked against the checksums of the block's meta file; on any doubt the client goes on
 * to the DataNode as if nothing had been asked.
 */
package org.viola.hdfs;
