/* SPDX-License-Identifier: Apache-2.0 */
/* Bytes that the host moves for this VM, between files and TCP connections. See vpipe_file(3). */
#ifndef VPIPE_H
#define VPIPE_H

#include <stddef.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* All calls return -1 and set errno when they fail. When the host cannot move the bytes, the
   library copies them by ordinary system calls. During a call no other thread or process may read,
   write or close its sockets, nor write or close the file that it writes. Several threads may make
   calls at once. */

/* Copies up to length bytes from in_fd, a file or a TCP socket, to out_fd, a file or a TCP socket.
   Returns their number. The copy starts at *offset, which the call advances. With offset NULL it
   starts at the position of in_fd, which the call then advances; a socket needs NULL. The call
   writes a file at the position of out_fd, which it advances. The source comes first, as in
   splice(2); in sendfile(2) it comes second. */
ssize_t vpipe_file(int in_fd, int out_fd, off_t *offset, size_t length);

/* vpipe_begin starts the same copy and does not wait; the offset of a socket is 0. It returns a
   descriptor that becomes readable at the end of the copy. vpipe_end waits for the end, closes that
   descriptor and returns the number of bytes. The program must not read or close it. */
int vpipe_begin(int in_fd, int out_fd, off_t offset, size_t length);
ssize_t vpipe_end(int completion);

#ifdef __cplusplus
}
#endif

#endif
