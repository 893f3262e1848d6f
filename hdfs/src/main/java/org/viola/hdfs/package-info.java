// SPDX-License-Identifier: Apache-2.0
/**
 * Reads HDFS blocks through the host.
 *
 * <p>The HDFS client asks {@link org.viola.hdfs.ViolaReplicaAccessorBuilder} for every block before it contacts a
 * DataNode. If viola's mount contains the block, the plug-in reads it from there and verifies it against the block's
 * meta file. In every other case the client continues with the DataNode.
 */
package org.viola.hdfs;
