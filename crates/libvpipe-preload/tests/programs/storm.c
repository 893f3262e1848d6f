/* SPDX-License-Identifier: Apache-2.0 */
/* Calls that the library must survive or refuse: storm signals|duplicate|sent|held|ring FILE. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { WORKERS = 3, STORM_MS = 1500, STACK = 64 << 10, SKIPPED = 77 };
static const char head[] = "HTTP/1.1 200 OK\r\nContent-Length: 4194304\r\n\r\n";
static int file, null, spare;
static off_t size;
static volatile int stop;
static volatile int servers[WORKERS] = {-1, -1, -1};
static unsigned whole, closed, children, handled;
static _Thread_local volatile int mine = -1;
static _Thread_local unsigned turn;

static void die(const char *what)
{
    perror(what);
    _exit(3);
}

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
    /* A worker may send by a number that its handler has just closed. That must not be the other end of another worker. */
    int high = fcntl(ends[1], F_DUPFD_CLOEXEC, 500);
    if (high < 0)
        die("fcntl");
    close(ends[1]);
    ends[1] = high;
    close(listener);
    fcntl(ends[0], F_SETFL, O_NONBLOCK);
}

static void handler(int number)
{
    int before = errno, fd = mine, other;
    char byte;
    struct iovec parts[2] = {{(void *)head, 10}, {(void *)(head + 10), sizeof head - 11}};
    struct mmsghdr message = {.msg_hdr = {.msg_iov = parts, .msg_iovlen = 1}};
    (void)number;
    __atomic_fetch_add(&handled, 1, __ATOMIC_RELAXED);
    turn++;
    if (writev(null, parts, 2) < 0 || write(null, head, 20) < 0)
        die("write");
    dup2(null, spare);
    if ((other = dup(null)) >= 0)
        close(other);
    if (fd >= 0) {
        /* the other end never writes */
        if (recv(fd, &byte, 1, MSG_DONTWAIT) > 0 || read(fd, &byte, 1) > 0)
            die("recv");
        send(fd, "", 0, MSG_DONTWAIT | MSG_NOSIGNAL);
        sendmmsg(fd, &message, 0, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (turn % 64 == 1) {
            other = fcntl(fd, F_DUPFD_CLOEXEC, 100);
            recv(other, &byte, 1, MSG_DONTWAIT);
            close(other);
        }
        if (turn % 128 == 2)
            shutdown(fd, SHUT_RDWR);
        if (turn % 32 == 3) {
            mine = -1;
            close(fd);
            __atomic_fetch_add(&closed, 1, __ATOMIC_RELAXED);
        }
    }
    errno = before;
}

static void *worker(void *arg)
{
    stack_t stack = {.ss_sp = malloc(STACK), .ss_size = STACK};
    char bytes[65536];
    sigset_t usr1;
    sigaltstack(&stack, NULL);
    sigemptyset(&usr1);
    sigaddset(&usr1, SIGUSR1);
    while (!stop) {
        int ends[2], set = epoll_create1(EPOLL_CLOEXEC), fd;
        struct epoll_event event = {.events = EPOLLOUT | EPOLLIN};
        off_t at = 0;
        connected(ends);
        epoll_ctl(set, EPOLL_CTL_ADD, ends[0], &event);
        send(ends[0], head, sizeof head - 1, MSG_NOSIGNAL);
        *(volatile int *)arg = mine = ends[0];
        while (at < size && !stop && (fd = mine) >= 0) {
            void *memory = malloc((size_t)(at % 5000) + 1);
            ssize_t n = sendfile(fd, file, &at, (size_t)(size - at));
            free(memory);
            if (n < 0 && errno != EAGAIN)
                break;
            while (recv(ends[1], bytes, sizeof bytes, MSG_DONTWAIT) > 0)
                ;
            epoll_ctl(set, EPOLL_CTL_MOD, fd, &event);
            if (n <= 0)
                epoll_wait(set, &event, 1, 1);
            event.events = EPOLLOUT | EPOLLIN;
        }
        if (at == size)
            __atomic_fetch_add(&whole, 1, __ATOMIC_RELAXED);
        pthread_sigmask(SIG_BLOCK, &usr1, NULL);
        fd = mine;
        mine = -1;
        if (fd >= 0)
            close(fd);
        pthread_sigmask(SIG_UNBLOCK, &usr1, NULL);
        close(ends[1]);
        close(set);
    }
    /* the stack of the handlers stays */
    return NULL;
}

static void *forker(void *arg)
{
    (void)arg;
    while (!stop) {
        pid_t child = fork();
        if (!child) {
            char byte;
            free(malloc(1000));
            for (int i = 0; i < WORKERS; i++) {
                recv(servers[i], &byte, 1, MSG_DONTWAIT);
                send(servers[i], "", 0, MSG_DONTWAIT | MSG_NOSIGNAL);
                dup2(null, servers[i]);
            }
            for (int fd = 3; fd < 64; fd++)
                close(fd);
            _exit(0);
        }
        if (child < 0 || waitpid(child, NULL, 0) != child)
            die("fork");
        children++;
        usleep(20000);
    }
    return NULL;
}

static long now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static int signals(void)
{
    struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART | SA_ONSTACK};
    pthread_t threads[WORKERS], forks;
    long until = now_ms() + STORM_MS;
    sigset_t usr1;
    signal(SIGPIPE, SIG_IGN);
    sigaction(SIGUSR1, &action, NULL);
    for (int i = 0; i < WORKERS; i++)
        pthread_create(&threads[i], NULL, worker, (void *)&servers[i]);
    sigemptyset(&usr1);
    sigaddset(&usr1, SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &usr1, NULL);
    pthread_create(&forks, NULL, forker, NULL);
    for (int i = 0; now_ms() < until; i++) {
        pthread_kill(threads[i % WORKERS], SIGUSR1);
        usleep(250);
    }
    stop = 1;
    for (int i = 0; i < WORKERS; i++)
        pthread_join(threads[i], NULL);
    pthread_join(forks, NULL);
    printf("%u whole, %u closed by handlers, %u children, %u handlers\n", whole, closed, children, handled);
    return whole && closed && children ? 0 : 1;
}

/* Sends the file over a connection and reads it at the other end. */
static void transfer(int ends[2])
{
    char bytes[65536];
    off_t at = 0;
    if (send(ends[0], head, sizeof head - 1, 0) < 0)
        die("send");
    while (at < size) {
        ssize_t n = sendfile(ends[0], file, &at, (size_t)(size - at));
        if (n < 0 && errno != EAGAIN)
            die("sendfile");
        while (recv(ends[1], bytes, sizeof bytes, MSG_DONTWAIT) > 0)
            ;
        if (n <= 0)
            usleep(1000);
    }
}

static void send_descriptor(int fd)
{
    int pair[2];
    union {
        char room[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control;
    struct iovec part = {"x", 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    memset(&control, 0, sizeof control);
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair))
        die("socketpair");
    struct cmsghdr *rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(rights), &fd, sizeof fd);
    if (sendmsg(pair[0], &message, 0) != 1)
        die("sendmsg");
}

/* The host has the connection: no call may read the byte that the other end has sent, or write. */
static void held(int ends[2])
{
    char byte;
    struct iovec part = {&byte, 1};
    struct mmsghdr message = {.msg_hdr = {.msg_iov = &part, .msg_iovlen = 1}};
    off_t at = 0;
    if (send(ends[1], "x", 1, 0) != 1 || send(ends[0], head, sizeof head - 1, 0) < 0)
        die("send");
    while (sendfile(ends[0], file, &at, (size_t)(size - at)) > 0)
        ;
    usleep(20000);
    if (recvmmsg(ends[0], &message, 1, 0, NULL) != -1 || errno != EAGAIN)
        die("recvmmsg");
    if (sendmmsg(ends[0], &message, 1, 0) != -1 || errno != EAGAIN)
        die("sendmmsg");
    if (preadv2(ends[0], &part, 1, -1, 0) != -1 || errno != EAGAIN)
        die("preadv2");
    if (pwritev2(ends[0], &part, 1, -1, 0) != -1 || errno != EAGAIN)
        die("pwritev2");
    int fd = dup(ends[0]);
    if (fd < 0 || close(fd))
        die("dup");
    if (close(ends[0]) || close(ends[0]) != -1 || errno != EBADF)
        die("close");
}

static void ring(void)
{
    struct io_uring_params params;
    memset(&params, 0, sizeof params);
    int fd = (int)syscall(__NR_io_uring_setup, 4, &params);
    if (fd < 0 || mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, IORING_OFF_SQ_RING) == MAP_FAILED)
        _exit(SKIPPED);
}

int main(int count, char **arguments)
{
    int ends[2];
    if (count != 3)
        return 2;
    file = open(arguments[2], O_RDONLY | O_CLOEXEC);
    null = open("/dev/null", O_RDWR | O_CLOEXEC);
    spare = open("/dev/null", O_RDWR | O_CLOEXEC);
    size = lseek(file, 0, SEEK_END);
    if (file < 0 || null < 0 || spare < 0 || size <= 0)
        die("open");
    if (!strcmp(arguments[1], "signals"))
        return signals();
    connected(ends);
    if (!strcmp(arguments[1], "held")) {
        held(ends);
        return 0;
    }
    if (!strcmp(arguments[1], "duplicate") && fcntl(ends[0], F_DUPFD_CLOEXEC, 50) < 0)
        die("fcntl");
    if (!strcmp(arguments[1], "sent"))
        send_descriptor(ends[0]);
    if (!strcmp(arguments[1], "ring"))
        ring();
    transfer(ends);
    return 0;
}
