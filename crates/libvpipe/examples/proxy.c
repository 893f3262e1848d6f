/* SPDX-License-Identifier: Apache-2.0 */
/* Forwards connections: proxy PORT ADDRESS PORT
   For requests that are small and answers that are large: the client is to speak before the server does. Of each answer
   the host relays the part that is announced by Content-Length; whatever else comes is copied. */
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

static int all(int fd, const char *bytes, size_t length)
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

/* How many bytes are still to come after these, which begin an answer; 0 when that is not known. */
static size_t announced(char *bytes, size_t have)
{
    bytes[have] = 0;
    char *end = strstr(bytes, "\r\n\r\n"), *line = strcasestr(bytes, "\r\nContent-Length:");
    if (strncmp(bytes, "HTTP/1.", 7) || !end || !line || line > end)
        return 0;
    unsigned long long length = strtoull(line + 17, NULL, 10), here = (unsigned long long)(bytes + have - end - 4);
    return length > here && length - here < SIZE_MAX / 2 ? (size_t)(length - here) : 0;
}

/* Moves what has come; 0 at the end. */
static int some(int from, int into, int is_answer)
{
    char bytes[16385];
    ssize_t n = read(from, bytes, sizeof bytes - 1);
    if (n <= 0 || all(into, bytes, (size_t)n))
        return 0;
    size_t rest = is_answer ? announced(bytes, (size_t)n) : 0;
    while (rest) {
        int begun = vpipe_begin(from, into, 0, rest);
        struct pollfd over = {.fd = begun, .events = POLLIN};
        if (begun < 0)
            return 0;
        /* a program of events has the descriptor in its set, and goes on with others */
        while (poll(&over, 1, -1) < 0 && errno == EINTR)
            ;
        ssize_t moved = vpipe_end(begun);
        if (moved <= 0)
            return 0;
        rest -= (size_t)moved;
    }
    return 1;
}

static void *serve(void *argument)
{
    int client = (int)(intptr_t)argument, server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct pollfd both[] = {{.fd = client, .events = POLLIN}, {.fd = server, .events = POLLIN}};
    if (!connect(server, (struct sockaddr *)&to, sizeof to))
        while (poll(both, 2, -1) > 0 || errno == EINTR) {
            if (both[0].revents && !some(client, server, 0)) {
                shutdown(server, SHUT_WR);
                both[0].fd = -1;
                both[0].revents = 0;
            }
            if (both[1].revents && !some(server, client, 1))
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
