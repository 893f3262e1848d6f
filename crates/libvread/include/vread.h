/* SPDX-License-Identifier: Apache-2.0 */
/* Reading HDFS blocks through viola's mount. See vread(3). */
#ifndef VREAD_H
#define VREAD_H

#include <stddef.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* All calls return -1 and set errno when they fail. ENOENT: the block is not here, read it from its DataNode.
   ESTALE: it was withdrawn since it was opened. All may be called by several threads at once. */

/* Where the mount is; for one DataNode, or with NULL for all that have none of their own. */
int vread_mount(const char *path, const char *datanode);

/* Opens "POOL/blk_ID_STAMP", or the same with ".meta"; datanode may be NULL. Returns a descriptor above 0. */
int vread_open(const char *name, const char *datanode);

/* As read(2), pread(2), lseek(2), close(2). Fewer bytes than asked for come only at the block's end. */
ssize_t vread_read(int vd, void *bytes, size_t count);
ssize_t vread_pread(int vd, void *bytes, size_t count, off_t offset);
off_t vread_seek(int vd, off_t offset, int whence);
int vread_close(int vd);

/* Length of the block in bytes. */
off_t vread_size(int vd);

/* Opens the block anew, after ESTALE: it may have been named again. The position stays. */
int vread_update(int vd);

#ifdef __cplusplus
}
#endif

#endif
