/* SPDX-License-Identifier: Apache-2.0 */
/* Files that the host sends down this machine's connections. See vpipe_file(3). */
#ifndef VPIPE_H
#define VPIPE_H

#include <stddef.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* All calls return -1 and set errno when they fail. What cannot be piped is copied by ordinary system calls. While a
   call is under way nobody else may read, write or close out_fd. All may be called by several threads at once. */

/* Copies up to length bytes: from *offset on, which is moved, or with NULL from the position of in_fd, which is moved then.
   The order of the descriptors is that of splice(2), not that of sendfile(2). */
ssize_t vpipe_file(int in_fd, int out_fd, off_t *offset, size_t length);

/* The same without waiting. The descriptor that it returns becomes readable when it is over; only vpipe_end closes it. */
int vpipe_begin(int in_fd, int out_fd, off_t offset, size_t length);
ssize_t vpipe_end(int completion);

#ifdef __cplusplus
}
#endif

#endif
