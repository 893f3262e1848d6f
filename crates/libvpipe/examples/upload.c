/* SPDX-License-Identifier: Apache-2.0 */
/* Receives files: upload FOLDER ADDRESS PORT
   A client sends a file's length (8 bytes, big endian) and its bytes. It gets the number of received bytes (8 bytes, big
   endian), and may send the next file. Files are named 1, 2, ... in the folder. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include <vpipe.h>

static int receive(int connection, int folder, unsigned number, uint64_t length)
{
    char name[16];
    uint64_t left = length, answer;

    snprintf(name, sizeof name, "%u", number);
    int file = openat(folder, name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (file < 0)
        return perror(name), -1;
    while (left) {
        ssize_t n = vpipe_file(connection, file, NULL, left < SIZE_MAX / 2 ? (size_t)left : SIZE_MAX / 2);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            perror("vpipe_file");
        if (n <= 0)
            break; /* the client is gone; the received bytes stay */
        left -= (uint64_t)n;
    }
    if (close(file))
        return perror(name), -1;
    answer = htobe64(length - left);
    return write(connection, &answer, sizeof answer) != sizeof answer || left ? -1 : 0;
}

int main(int argc, char **argv)
{
    struct sockaddr_in at = {.sin_family = AF_INET};
    uint64_t length;
    int one = 1;

    if (argc != 4 || inet_pton(AF_INET, argv[2], &at.sin_addr) != 1) {
        fputs("upload FOLDER ADDRESS PORT\n", stderr);
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);
    at.sin_port = htons((unsigned short)atoi(argv[3]));
    int folder = open(argv[1], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (folder < 0 || bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, 16)) {
        perror("upload");
        return 1;
    }
    for (unsigned number = 1;;) {
        int connection = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (connection < 0)
            continue;
        /* one client after the other */
        while (recv(connection, &length, sizeof length, MSG_WAITALL) == sizeof length)
            if (receive(connection, folder, number++, be64toh(length)))
                break;
        close(connection);
    }
}
