#if defined(__linux__)
#define _GNU_SOURCE
#endif
#include "io_path.h"

#include "io.h"

#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Gets the current path of an open descriptor from the kernel.  Returns false if it has none. */
static bool path_of_fd(int fd, char path[PATH_MAX])
{
#if defined(__APPLE__)
    return fcntl(fd, F_GETPATH, path) == 0;
#else
    static const char gone[] = " (deleted)";
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    if (length < 0) {
        return false;
    }
    path[length] = '\0';
    size_t tail = sizeof gone - 1;
    if ((size_t)length > tail && strcmp(path + (size_t)length - tail, gone) == 0) {
        path[(size_t)length - tail] = '\0';
    }
    return true;
#endif
}

/* Resolves the links of a path from the user; its last component need not exist. */
static bool path_of_user(const char *name, char path[PATH_MAX])
{
    if (realpath(name, path) != NULL) {
        return true;
    }
    char above[PATH_MAX];
    size_t length = strlen(name);
    while (length > 1 && name[length - 1] == '/') {
        length--;
    }
    if (length >= sizeof above) {
        return false;
    }
    memcpy(above, name, length);
    above[length] = '\0';
    char *slash = strrchr(above, '/');
    const char *last = slash == NULL ? above : slash + 1;
    char resolved[PATH_MAX];
    if (slash == above) {
        strcpy(resolved, "/");
    } else {
        if (slash != NULL) {
            *slash = '\0';
        }
        if (realpath(slash == NULL ? "." : above, resolved) == NULL) {
            return false;
        }
    }
    int n = snprintf(path, PATH_MAX, "%s/%s", strcmp(resolved, "/") == 0 ? "" : resolved, last);
    return n > 0 && n < PATH_MAX;
}

char *ls_io_path(int fd, const char *name)
{
    char path[PATH_MAX];
    if (name != NULL && name[0] != '\0' && (fd == LS_NO_DIRECTORY || name[0] == '/')) {
        return path_of_user(name, path) ? strdup(path) : NULL;
    }
    if (!path_of_fd(fd, path)) {
        return NULL;
    }
    if (name == NULL || name[0] == '\0') {
        return strdup(path);
    }
    char *joined = malloc(strlen(path) + strlen(name) + 2);
    if (joined != NULL) {
        sprintf(joined, "%s/%s", path, name);
    }
    return joined;
}
