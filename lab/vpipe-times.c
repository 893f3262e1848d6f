/* SPDX-License-Identifier: Apache-2.0 */
/* Sends files by vpipe_file and reports the times: times FOLDER PORT
   A client requests a file by its size. It gets the file fSIZE of the folder, then two times: of the call of vpipe_file and of
   its return. For size 0 it gets the present time only, to compare clocks. Numbers are 8 bytes, big-endian; times are
   nanoseconds of this host's CLOCK_MONOTONIC. */
#define _GNU_SOURCE
#include <endian.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <vpipe.h>

static uint64_t now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return htobe64((uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec);
}

static int answer(int connection, int folder, uint64_t size)
{
    char name[32];
    uint64_t times[2];
    off_t at = 0;

    if (!size) {
        times[0] = now();
        return write(connection, times, 8) == 8 ? 0 : -1;
    }
    snprintf(name, sizeof name, "f%llu", (unsigned long long)size);
    int file = openat(folder, name, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return perror(name), -1;
    times[0] = now();
    while ((uint64_t)at < size)
        if (vpipe_file(file, connection, &at, size - (uint64_t)at) <= 0) {
            perror("vpipe_file");
            close(file);
            return -1;
        }
    times[1] = now();
    close(file);
    return write(connection, times, sizeof times) == sizeof times ? 0 : -1;
}

int main(int argc, char **argv)
{
    struct sockaddr_in at = {.sin_family = AF_INET};
    uint64_t size;
    int one = 1;

    if (argc != 3) {
        fputs("times FOLDER PORT\n", stderr);
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);
    at.sin_port = htons((unsigned short)atoi(argv[2]));
    int folder = open(argv[1], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (folder < 0 || bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, 16)) {
        perror("times");
        return 1;
    }
    for (;;) {
        int connection = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (connection < 0)
            continue;
        setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        /* serves one client after the other */
        while (recv(connection, &size, sizeof size, MSG_WAITALL) == sizeof size)
            if (answer(connection, folder, be64toh(size)))
                break;
        close(connection);
    }
}
