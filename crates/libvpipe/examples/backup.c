/* SPDX-License-Identifier: Apache-2.0 */
/* Copies a file: backup FROM TO */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include <vpipe.h>

int main(int argc, char **argv)
{
    if (argc != 3) {
        fputs("backup FROM TO\n", stderr);
        return 2;
    }
    int from = open(argv[1], O_RDONLY | O_CLOEXEC);
    int to = open(argv[2], O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (from < 0 || to < 0) {
        perror(from < 0 ? argv[1] : argv[2]);
        return 1;
    }
    /* at most 1 GiB at a time, so there is something to show */
    long long done = 0;
    for (;;) {
        ssize_t n = vpipe_file(from, to, NULL, (size_t)1 << 40);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0) {
            perror("vpipe_file");
            return 1;
        }
        if (!n)
            break;
        done += n;
        fprintf(stderr, "%lld\n", done);
    }
    return fsync(to) || close(to);
}
