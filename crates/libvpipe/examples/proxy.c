/* SPDX-License-Identifier: Apache-2.0 */
/* Forwards connections: proxy PORT ADDRESS PORT
   For small requests and large responses; the client sends first. The host relays the part of each response that
   Content-Length announces; the program copies everything else. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <vpipe.h>

static struct sockaddr_in to = {.sin_family = AF_INET};

static int write_all(int fd, const char *bytes, size_t length)
{
    while (length) {
        ssize_t n = write(fd, bytes, length);
        if (n < 0)
            return -1;
        bytes += n;
        length -= (size_t)n;
    }
    return 0;
}

/* Bytes of a response that follow its first `have` bytes; 0 if unknown. */
static size_t bytes_to_come(char *bytes, size_t have)
{
    bytes[have] = 0;
    char *end = strstr(bytes, "\r\n\r\n"), *line = strcasestr(bytes, "\r\nContent-Length:");
    if (strncmp(bytes, "HTTP/1.", 7) || !end || !line || line > end)
        return 0;
    unsigned long long length = strtoull(line + 17, NULL, 10), here = (unsigned long long)(bytes + have - end - 4);
    return length > here && length - here < SIZE_MAX / 2 ? (size_t)(length - here) : 0;
}

/* Forwards the bytes that have arrived; 0 at the end of the connection. */
static int forward(int from, int into, int is_response)
{
    char bytes[16385];
    ssize_t n = read(from, bytes, sizeof bytes - 1);
    if (n <= 0 || write_all(into, bytes, (size_t)n))
        return 0;
    size_t rest = is_response ? bytes_to_come(bytes, (size_t)n) : 0;
    while (rest) {
        int transfer = vpipe_begin(from, into, 0, rest);
        struct pollfd ended = {.fd = transfer, .events = POLLIN};
        if (transfer < 0)
            return 0;
        /* an event-driven program would add the descriptor to its set and serve others meanwhile */
        while (poll(&ended, 1, -1) < 0 && errno == EINTR)
            ;
        ssize_t moved = vpipe_end(transfer);
        if (moved <= 0)
            return 0;
        rest -= (size_t)moved;
    }
    return 1;
}

static void *serve(void *argument)
{
    int client = (int)(intptr_t)argument, server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct pollfd sockets[] = {{.fd = client, .events = POLLIN}, {.fd = server, .events = POLLIN}};
    if (!connect(server, (struct sockaddr *)&to, sizeof to))
        while (poll(sockets, 2, -1) > 0 || errno == EINTR) {
            if (sockets[0].revents && !forward(client, server, 0)) {
                shutdown(server, SHUT_WR);
                sockets[0].fd = -1;
                sockets[0].revents = 0;
            }
            if (sockets[1].revents && !forward(server, client, 1))
                break;
        }
    close(server);
    close(client);
    return NULL;
}

int main(int argc, char **argv)
{
    struct sockaddr_in at = {.sin_family = AF_INET};
    int one = 1;
    pthread_t thread;

    if (argc != 4 || inet_pton(AF_INET, argv[2], &to.sin_addr) != 1) {
        fputs("proxy PORT ADDRESS PORT\n", stderr);
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);
    at.sin_port = htons((unsigned short)atoi(argv[1]));
    to.sin_port = htons((unsigned short)atoi(argv[3]));
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, 16)) {
        perror("proxy");
        return 1;
    }
    for (;;) {
        int client = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (client < 0)
            continue;
        if (pthread_create(&thread, NULL, serve, (void *)(intptr_t)client))
            close(client);
        else
            pthread_detach(thread);
    }
}
