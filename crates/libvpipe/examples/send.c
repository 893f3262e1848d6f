/* SPDX-License-Identifier: Apache-2.0 */
/* Sends a file to a server: send FILE ADDRESS PORT */
#include <arpa/inet.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <vpipe.h>

int main(int argc, char **argv)
{
    struct sockaddr_in to = {.sin_family = AF_INET};
    struct stat stat;
    off_t at = 0;

    if (argc != 4 || inet_pton(AF_INET, argv[2], &to.sin_addr) != 1)
        return 2;
    to.sin_port = htons((unsigned short)atoi(argv[3]));
    int file = open(argv[1], O_RDONLY | O_CLOEXEC);
    int connection = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (file < 0 || fstat(file, &stat) || connect(connection, (struct sockaddr *)&to, sizeof to)) {
        perror("send");
        return 1;
    }
    while (at < stat.st_size) {
        ssize_t n = vpipe_file(file, connection, &at, (size_t)(stat.st_size - at));
        if (n <= 0) {
            perror("vpipe_file");
            return 1;
        }
    }
    return close(connection);
}
