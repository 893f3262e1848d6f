/* SPDX-License-Identifier: Apache-2.0 */
/* Writes a block to the standard output: cat POOL/blk_ID_STAMP [MOUNT]
   cc cat.c $(pkg-config --cflags --libs vread) */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "vread.h"

int main(int argc, char **argv)
{
    static char bytes[1 << 20];
    ssize_t n;
    int vd;

    if (argc < 2) {
        fprintf(stderr, "usage: cat POOL/blk_ID_STAMP [MOUNT]\n");
        return 2;
    }
    if (argc > 2)
        vread_mount(argv[2], NULL);
    vd = vread_open(argv[1], NULL);
    if (vd < 0) {
        fprintf(stderr, "cat: %s: %s\n", argv[1], strerror(errno));
        return errno == ENOENT ? 3 : 1;
    }
    while ((n = vread_read(vd, bytes, sizeof bytes)) > 0)
        fwrite(bytes, 1, n, stdout);
    if (n < 0) {
        fprintf(stderr, "cat: %s: %s\n", argv[1], strerror(errno));
        return 1;
    }
    if (vread_seek(vd, 0, SEEK_END) != vread_size(vd)) {
        fprintf(stderr, "cat: %s: its size changed during the read\n", argv[1]);
        return 1;
    }
    return vread_close(vd) == 0 ? 0 : 1;
}
