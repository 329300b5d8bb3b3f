#if defined(__linux__)
#define _GNU_SOURCE
#endif
#include "io.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

/* One call moves at most this much: Linux stops at 2^31 - 4096, and a bound keeps signals prompt. */
enum { CALL_BYTES_MAX = 1 << 30 };

static int64_t posix_pread(const ls_io *io, int fd, void *data, size_t size, int64_t position)
{
    (void)io;
    ssize_t n = pread(fd, data, size, (off_t)position);
    return n < 0 ? -errno : n;
}

static int64_t posix_pwrite(const ls_io *io, int fd, const void *data, size_t size,
                            int64_t position)
{
    (void)io;
    ssize_t n = pwrite(fd, data, size, (off_t)position);
    return n < 0 ? -errno : n;
}

static int posix_datasync(const ls_io *io, int fd)
{
    (void)io;
#if defined(__APPLE__)
    /* fsync on macOS stops at the drive's cache. */
    return fcntl(fd, F_FULLFSYNC) < 0 ? -errno : 0;
#else
    return fdatasync(fd) < 0 ? -errno : 0;
#endif
}

static int posix_sync(const ls_io *io, int fd)
{
    (void)io;
#if defined(__APPLE__)
    if (fcntl(fd, F_FULLFSYNC) == 0) {
        return 0;                      /* directories refuse it: fall through */
    }
#endif
    return fsync(fd) < 0 ? -errno : 0;
}

static int posix_truncate(const ls_io *io, int fd, int64_t size)
{
    (void)io;
    return ftruncate(fd, (off_t)size) < 0 ? -errno : 0;
}

static int64_t posix_size(const ls_io *io, int fd)
{
    (void)io;
    struct stat status;
    return fstat(fd, &status) < 0 ? -errno : (int64_t)status.st_size;
}

static int posix_open(const ls_io *io, int directory, const char *name, int flags, unsigned mode)
{
    (void)io;
    int fd = openat(directory, name, flags | O_CLOEXEC | O_NOFOLLOW, (mode_t)mode);
    if (fd < 0) {
        return -errno;
    }
    if (fd > STDERR_FILENO) {
        return fd;
    }
    /* A log on descriptor 1 or 2 would be at the mercy of every stray print. */
    int higher = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
    int result = higher < 0 ? -errno : higher;
    close(fd);
    return result;
}

static int posix_close(const ls_io *io, int fd)
{
    (void)io;
    /* EINTR from close still closes on Linux; a retry could hit someone else's descriptor. */
    return close(fd) < 0 && errno != EINTR ? -errno : 0;
}

static int posix_rename(const ls_io *io, int directory, const char *source, const char *target)
{
    (void)io;
    return renameat(directory, source, directory, target) < 0 ? -errno : 0;
}

static int posix_unlink(const ls_io *io, int directory, const char *name)
{
    (void)io;
    return unlinkat(directory, name, 0) < 0 ? -errno : 0;
}

const ls_io ls_io_posix = {
    .pread = posix_pread,
    .pwrite = posix_pwrite,
    .datasync = posix_datasync,
    .sync = posix_sync,
    .truncate = posix_truncate,
    .size = posix_size,
    .open = posix_open,
    .close = posix_close,
    .rename = posix_rename,
    .unlink = posix_unlink,
};

ls_status ls_read_at(const ls_io *io, int fd, void *data, size_t size, int64_t position,
                     size_t *read_bytes)
{
    size_t done = 0;
    while (done < size) {
        size_t part = size - done < CALL_BYTES_MAX ? size - done : CALL_BYTES_MAX;
        int64_t n = io->pread(io, fd, (uint8_t *)data + done, part, position + (int64_t)done);
        if (n == -EINTR) {
            continue;
        }
        if (n < 0) {
            *read_bytes = done;
            return ls_fail_os((int)-n, position + (int64_t)done, "read failed");
        }
        if (n == 0) {
            break;
        }
        done += (size_t)n;
    }
    *read_bytes = done;
    return ls_ok();
}

ls_status ls_write_at(const ls_io *io, int fd, const void *data, size_t size, int64_t position)
{
    size_t done = 0;
    while (done < size) {
        size_t part = size - done < CALL_BYTES_MAX ? size - done : CALL_BYTES_MAX;
        int64_t n = io->pwrite(io, fd, (const uint8_t *)data + done, part, position + (int64_t)done);
        if (n == -EINTR) {
            continue;
        }
        if (n <= 0) {
            /* A zero count for a positive size makes no progress: treat it as a full device. */
            int os_errno = n < 0 ? (int)-n : ENOSPC;
            return ls_fail_os(os_errno, position + (int64_t)done, "write failed");
        }
        done += (size_t)n;
    }
    return ls_ok();
}
