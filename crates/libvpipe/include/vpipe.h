/* SPDX-License-Identifier: Apache-2.0 */
/* Bytes that the host moves for this VM, between files and TCP connections. See vpipe_file(3). */
#ifndef VPIPE_H
#define VPIPE_H

#include <stddef.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* All calls return -1 and set errno when they fail. What cannot be piped is copied by ordinary system calls. While a
   call is under way nobody else may read, write or close a socket of it, nor a file that is written to. All may be called by
   several threads at once. */

/* Copies up to length bytes of in_fd, a file or a socket, into out_fd, a file or a socket. From *offset on, which is moved, or with
   NULL, which a socket needs, from the position of in_fd, which is moved then. A file is written at its position, which is moved.
   The order of the descriptors is that of splice(2), not that of sendfile(2). */
ssize_t vpipe_file(int in_fd, int out_fd, off_t *offset, size_t length);

/* The same without waiting; offset is 0 of a socket. The descriptor that it returns becomes readable when it is over; only
   vpipe_end closes it. */
int vpipe_begin(int in_fd, int out_fd, off_t offset, size_t length);
ssize_t vpipe_end(int completion);

#ifdef __cplusplus
}
#endif

#endif
