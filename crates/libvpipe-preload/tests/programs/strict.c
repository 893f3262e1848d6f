/* SPDX-License-Identifier: Apache-2.0 */
/* Transfers below the pipe minimum, under a seccomp filter that kills the program at any system call other than its own:
   strict answers|tunnel|counted|beside|after|broken|copies FILE. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { SMALL = 4096, PIECE = 65536, LARGE = 8 << 20 };
static char bytes[PIECE];

static void die(const char *what)
{
    perror(what);
    exit(3);
}

static void allow(const int *calls, size_t count)
{
    struct sock_filter filter[64] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr))};
    size_t at = 1;
    for (size_t i = 0; i < count; i++) {
        filter[at++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)calls[i], 0, 1);
        filter[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    }
    filter[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
    struct sock_fprog program = {.len = (unsigned short)at, .filter = filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
        die("seccomp");
}
#define ALLOW(...) allow((const int[]){__VA_ARGS__}, sizeof((const int[]){__VA_ARGS__}) / sizeof(int))

/* Opens a connection and returns both ends. */
static void connected(int ends[2])
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof at;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(listener, (struct sockaddr *)&at, length) || listen(listener, 1) ||
        getsockname(listener, (struct sockaddr *)&at, &length))
        die("listen");
    ends[0] = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(ends[0], (struct sockaddr *)&at, length))
        die("connect");
    ends[1] = accept(listener, NULL, NULL);
    if (ends[1] < 0)
        die("accept");
}

static void take(int from, size_t count)
{
    for (size_t got = 0; got < count;) {
        ssize_t n = recv(from, bytes, count - got, 0);
        if (n <= 0)
            die("recv");
        got += (size_t)n;
    }
}

static void answer(int file, int to[2], int set)
{
    char head[] = "HTTP/1.1 200 OK\r\nServer: x\r\nContent-Length: 4096\r\n\r\n";
    struct iovec part = {.iov_base = head, .iov_len = sizeof head - 1};
    struct epoll_event event = {.events = EPOLLIN};
    off_t at = 0;
    if (writev(to[0], &part, 1) != (ssize_t)part.iov_len || sendfile(to[0], file, &at, SMALL) != SMALL ||
        epoll_ctl(set, EPOLL_CTL_MOD, to[0], &event))
        die("answer");
    take(to[1], part.iov_len + SMALL);
}

/* Forwards as haproxy does: it asks for `asked` bytes, and for less as bytes arrive. Returns the rest. */
static size_t forward(int source[2], int pipes[2], int sink[2], size_t asked, size_t size)
{
    if (send(source[0], bytes, size, 0) != (ssize_t)size)
        die("send");
    for (size_t done = 0; done < size;) {
        ssize_t n = splice(source[1], NULL, pipes[1], NULL, asked, SPLICE_F_MOVE | SPLICE_F_NONBLOCK);
        if (n < 0 && errno == EAGAIN)
            continue;
        if (n <= 0)
            die("splice");
        done += (size_t)n;
        asked -= (size_t)n;
        for (ssize_t given = 0; given < n;) {
            ssize_t m = splice(pipes[0], NULL, sink[0], NULL, (size_t)(n - given), SPLICE_F_MOVE | SPLICE_F_NONBLOCK);
            if (m < 0 && errno == EAGAIN)
                continue;
            if (m <= 0)
                die("splice");
            given += m;
        }
    }
    take(sink[1], size);
    return asked;
}

static void *sender(void *to)
{
    char zeros[SMALL] = {0};
    for (size_t sent = 0; sent < LARGE; sent += SMALL)
        if (send(*(int *)to, zeros, SMALL, 0) != SMALL)
            die("send");
    return NULL;
}

static void *receiver(void *from)
{
    char some[SMALL];
    for (ssize_t n, got = 0; got < LARGE; got += n)
        if ((n = recv(*(int *)from, some, SMALL, 0)) <= 0)
            die("recv");
    return NULL;
}

/* Relays a response above the pipe minimum, by the agent or by itself. Returns when the sink has received all of it. */
static void relayed(int source[2], int pipes[2], int sink[2])
{
    pthread_t threads[2];
    pthread_create(&threads[0], NULL, sender, &source[0]);
    pthread_create(&threads[1], NULL, receiver, &sink[1]);
    size_t asked = LARGE, inside = 0;
    while (asked || inside) {
        ssize_t n = asked ? splice(source[1], NULL, pipes[1], NULL, asked, SPLICE_F_NONBLOCK) : 0;
        asked -= n > 0 ? (size_t)n : 0;
        inside += n > 0 ? (size_t)n : 0;
        ssize_t m = inside ? splice(pipes[0], NULL, sink[0], NULL, inside, SPLICE_F_NONBLOCK) : 0;
        inside -= m > 0 ? (size_t)m : 0;
        if (n < 0 && m < 0)
            usleep(1000);
    }
    pthread_join(threads[0], NULL);
    pthread_join(threads[1], NULL);
}

/* Begins the relay of a response above the pipe minimum and then closes both connections. */
static void broken(void)
{
    int source[2], sink[2], pipes[2];
    size_t asked = LARGE;
    ssize_t n, m;
    connected(source);
    connected(sink);
    if (pipe(pipes))
        die("pipe");
    fcntl(source[1], F_SETFL, O_NONBLOCK);
    fcntl(sink[0], F_SETFL, O_NONBLOCK);
    do {
        if (asked < LARGE / 2 || send(source[0], bytes, SMALL, 0) != SMALL)
            die("no relay");
        while ((n = splice(source[1], NULL, pipes[1], NULL, asked, SPLICE_F_NONBLOCK)) < 0)
            usleep(100);
        asked -= (size_t)n;
        m = splice(pipes[0], NULL, sink[0], NULL, (size_t)n, SPLICE_F_NONBLOCK);
    } while (m == n);
    for (int i = 0; i < 2; i++) {
        close(source[i]);
        close(sink[i]);
        close(pipes[i]);
    }
}

static void splices(const char *mode)
{
    int source[2], sink[2], other[2], pipes[2], second[2];
    int has_broken = !strcmp(mode, "broken");
    if (has_broken)
        broken();
    connected(source);
    connected(sink);
    connected(other);
    if (pipe(pipes) || pipe(second))
        die("pipe");
    for (int i = 0; i < 2; i++) {
        fcntl(source[i], F_SETFL, i ? O_NONBLOCK : 0);
        fcntl(sink[i], F_SETFL, i ? 0 : O_NONBLOCK);
    }
    int endless = !strcmp(mode, "tunnel"), beside = !strcmp(mode, "beside");
    int after = !strcmp(mode, "after") || has_broken;
    size_t asked = 60 << 20;
    /* another connection's large response has begun */
    if (beside)
        forward(other, second, sink, 60 << 20, SMALL);
    if (after && !has_broken)
        relayed(source, pipes, sink);
    /* the library detects the closed connections after some calls */
    for (int i = 0; i < 100 && has_broken; i++)
        forward(source, pipes, sink, PIECE, SMALL);
    for (int i = 0; i < 8 && !beside && !after; i++)
        asked = forward(source, pipes, sink, endless ? 1 << 30 : asked, SMALL);
    if (beside)
        ALLOW(__NR_splice, __NR_sendto, __NR_recvfrom, __NR_exit_group, __NR_newfstatat, __NR_fstat);
    else
        ALLOW(__NR_splice, __NR_sendto, __NR_recvfrom, __NR_exit_group);
    for (int i = 0; i < 100; i++)
        asked = forward(source, pipes, sink, endless ? 1 << 30 : beside || after ? PIECE : asked, PIECE);
}

static void copies(int file)
{
    char name[] = "/tmp/strict-XXXXXX";
    int to = mkstemp(name);
    unlink(name);
    for (int i = 0; i < 20; i++) {
        if (i == 1)
            ALLOW(__NR_copy_file_range, __NR_newfstatat, __NR_fstat, __NR_exit_group);
        off_t at = 0, into = 0;
        while (copy_file_range(file, &at, to, &into, 0x7fffffffc0000000, 0) > 0)
            ;
        if (at != into || at < SMALL)
            die("copy");
    }
}

int main(int count, char **arguments)
{
    if (count != 3)
        return 2;
    int file = open(arguments[2], O_RDONLY);
    if (file < 0)
        die("open");
    if (!strcmp(arguments[1], "answers")) {
        int to[2], set = epoll_create1(0);
        struct epoll_event event = {.events = EPOLLIN};
        connected(to);
        if (epoll_ctl(set, EPOLL_CTL_ADD, to[0], &event))
            die("epoll_ctl");
        answer(file, to, set);
        ALLOW(__NR_writev, __NR_sendfile, __NR_epoll_ctl, __NR_recvfrom, __NR_exit_group);
        for (int i = 0; i < 100; i++)
            answer(file, to, set);
    } else if (!strcmp(arguments[1], "copies"))
        copies(file);
    else
        splices(arguments[1]);
    /* skips the C library's exit, which may inspect streams */
    syscall(SYS_exit_group, 0);
}
