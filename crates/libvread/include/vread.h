/* SPDX-License-Identifier: Apache-2.0 */
/* Reads HDFS blocks through viola's mount. See vread(3). */
#ifndef VREAD_H
#define VREAD_H

#include <stddef.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* All calls return -1 and set errno on failure. ENOENT: the block is not in the mount, read it from its DataNode.
   ESTALE: the block was withdrawn since it was opened. Several threads may call them at once. */

/* Sets the mount for one DataNode, or with NULL the default mount. */
int vread_mount(const char *path, const char *datanode);

/* Opens "POOL/blk_ID_STAMP", or the same with ".meta"; datanode may be NULL. Returns a descriptor above 0. */
int vread_open(const char *name, const char *datanode);

/* Like read(2), pread(2), lseek(2), close(2), but fewer bytes than requested mean the end of the block. */
ssize_t vread_read(int vd, void *bytes, size_t count);
ssize_t vread_pread(int vd, void *bytes, size_t count, off_t offset);
off_t vread_seek(int vd, off_t offset, int whence);
int vread_close(int vd);

/* Returns the length of the block in bytes. */
off_t vread_size(int vd);

/* Opens the block again after ESTALE: the agent may have named it anew. The position does not change. */
int vread_update(int vd);

#ifdef __cplusplus
}
#endif

#endif
