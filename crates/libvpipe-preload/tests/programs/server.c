/* SPDX-License-Identifier: Apache-2.0 */
/* A small web server with a usual event loop: server level|edge|poll|block|threads PORT FILE PIECE. After each response it
   prints how often it was woken, and if sendfile fails, the error. After the first part of the body it runs the trick that the
   first letter of the path selects. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MAX_CONNECTIONS = 64 };
static enum { LEVEL, EDGE, POLL, BLOCK, THREADS } mode;
static int file, set;
static off_t size, piece;
static unsigned wakes;

static struct conn {
    int fd, open, sending;
    char trick;
    size_t have;
    off_t at;
    char in[4096];
} conns[MAX_CONNECTIONS];

static void want(struct conn *c, int op, unsigned events)
{
    struct epoll_event event = {.events = events, .data.ptr = c};
    if ((mode == LEVEL || op == EPOLL_CTL_ADD) && epoll_ctl(set, op, c->fd, &event))
        perror("epoll_ctl");
}

static int end(struct conn *c, const char *why)
{
    printf("%s: %s\n", why, strerror(errno));
    c->open = 0;
    close(c->fd);
    return -1;
}

static int request(struct conn *c)
{
    char *stop = strstr(c->in, "\r\n\r\n");
    if (!stop) {
        ssize_t n = recv(c->fd, c->in + c->have, sizeof c->in - 1 - c->have, 0);
        if (n < 0 && errno == EAGAIN)
            return 0;
        if (n <= 0)
            return end(c, n ? "recv" : "end");
        c->have += (size_t)n;
        c->in[c->have] = 0;
        return 1;
    }
    c->trick = c->in[5];
    c->have -= (size_t)(stop + 4 - c->in);
    memmove(c->in, stop + 4, c->have + 1);
    char head[256];
    int length = snprintf(head, sizeof head, "HTTP/1.1 200 OK\r\nContent-Length: %lld\r\n\r\n", (long long)size);
    if (write(c->fd, head, (size_t)length) != length)
        return end(c, "write");
    c->sending = 1;
    c->at = 0;
    wakes = 0;
    return 1;
}

/* Starts children, which close their copies of the descriptors. */
static void children(struct conn *c)
{
    pid_t child = fork();
    if (!child) {
        close(c->fd);
        close(set);
        _exit(0);
    }
    waitpid(child, NULL, 0);
    child = vfork();
    if (!child) {
        close(c->fd);
        close(set);
        _exit(0);
    }
    waitpid(child, NULL, 0);
}

static int body(struct conn *c)
{
    off_t left = size - c->at;
    ssize_t n = sendfile(c->fd, file, &c->at, (size_t)(left < piece ? left : piece));
    if (n < 0 && errno == EAGAIN)
        return 0;
    if (n <= 0)
        return end(c, "sendfile");
    char trick = c->trick;
    c->trick = 0;
    if (trick == 'b') /* continues at another position of the file */
        c->at += 1;
    if (trick == 'c')
        return end(c, "closed");
    if (trick == 's') {
        shutdown(c->fd, SHUT_RDWR);
        return end(c, "shut");
    }
    if (trick == 'r') {
        close_range((unsigned)c->fd, (unsigned)c->fd, 0);
        return end(c, "ranged");
    }
    if (trick == 'd') {
        dup2(file, c->fd);
        return end(c, "replaced");
    }
    if (trick == 'v') { /* closes without the library's knowledge */
        syscall(SYS_close, c->fd);
        return c->open = 0, -1;
    }
    if (trick == 'f')
        children(c);
    if (c->at == size) {
        c->sending = 0;
        printf("sent, wakes %u\n", wakes);
    }
    return 1;
}

static void drive(struct conn *c)
{
    int was = c->sending, more;
    do
        more = c->sending ? body(c) : request(c);
    while (more > 0);
    if (c->open && c->sending != was && mode == LEVEL)
        want(c, EPOLL_CTL_MOD, c->sending ? EPOLLOUT : EPOLLIN);
}

static void drive_to_end(struct conn *c)
{
    while (c->open)
        drive(c);
}

/* The thread has its own struct: a slot of `conns` could be reused before the thread has seen the connection's end. */
static void *thread(void *fd)
{
    struct conn own = {.fd = (int)(intptr_t)fd, .open = 1};
    drive_to_end(&own);
    return NULL;
}

static void new(int listener)
{
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | (mode >= BLOCK ? 0 : SOCK_NONBLOCK));
    pthread_t id;
    if (fd >= 0 && mode == THREADS && !pthread_create(&id, NULL, thread, (void *)(intptr_t)fd)) {
        pthread_detach(id);
        return;
    }
    for (struct conn *c = conns; fd >= 0 && c < conns + MAX_CONNECTIONS; c++)
        if (!c->open) {
            memset(c, 0, sizeof *c);
            c->fd = fd;
            c->open = 1;
            if (mode == LEVEL)
                want(c, EPOLL_CTL_ADD, EPOLLIN);
            if (mode == EDGE)
                want(c, EPOLL_CTL_ADD, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET);
            if (mode == BLOCK)
                drive_to_end(c);
            return;
        }
    close(fd);
}

static void poll_once(int listener)
{
    struct pollfd polls[MAX_CONNECTIONS + 1] = {{.fd = listener, .events = POLLIN}};
    for (int i = 0; i < MAX_CONNECTIONS; i++) {
        polls[i + 1].fd = conns[i].open ? conns[i].fd : -1;
        polls[i + 1].events = conns[i].sending ? POLLOUT : POLLIN;
    }
    poll(polls, MAX_CONNECTIONS + 1, -1);
    wakes++;
    for (int i = 0; i < MAX_CONNECTIONS; i++)
        if (conns[i].open && polls[i + 1].revents)
            drive(&conns[i]);
    if (polls[0].revents)
        new(listener);
}

static void epoll_once(int listener)
{
    struct epoll_event events[16];
    int n = epoll_wait(set, events, 16, -1);
    wakes++;
    for (int i = 0; i < n; i++) {
        struct conn *c = events[i].data.ptr;
        if (!c)
            new(listener);
        else if (c->open)
            drive(c);
    }
}

int main(int argc, char **argv)
{
    const char *modes[] = {"level", "edge", "poll", "block", "threads"};
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    struct stat stat;
    int one = 1, listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    if (argc != 5)
        return 2;
    while (strcmp(argv[1], modes[mode]))
        mode++;
    at.sin_port = htons((unsigned short)atoi(argv[2]));
    file = open(argv[3], O_RDONLY | O_CLOEXEC);
    piece = atoll(argv[4]);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (file < 0 || fstat(file, &stat) || bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, 16)) {
        perror("server");
        return 1;
    }
    size = stat.st_size;
    set = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event event = {.events = EPOLLIN};
    epoll_ctl(set, EPOLL_CTL_ADD, listener, &event);
    setvbuf(stdout, NULL, _IOLBF, 0);
    puts("ready");
    for (;;) {
        if (mode >= BLOCK)
            new(listener);
        else if (mode == POLL)
            poll_once(listener);
        else
            epoll_once(listener);
    }
}
