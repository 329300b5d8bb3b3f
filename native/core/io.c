#if defined(__linux__)
#define _GNU_SOURCE
#endif
#include "io.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

/* One call moves at most this much: Linux stops at 2^31 - 4096, and a bound keeps signals prompt. */
enum { CALL_BYTES_MAX = 1 << 30 };

static int64_t posix_pread(const ls_io *io, int fd, void *data, size_t size, int64_t position)
{
    (void)io;
    ssize_t n = pread(fd, data, size, (off_t)position);
    return n < 0 ? -errno : n;
}

static int64_t posix_pread_cached(const ls_io *io, int fd, void *data, size_t size,
                                  int64_t position)
{
    enum { SHORT_BYTES = 64 << 10 };   /* a read of so few bytes may wait if there is no RWF_NOWAIT */
#if defined(RWF_NOWAIT)
    struct iovec part = {.iov_base = data, .iov_len = size};
    ssize_t n = preadv2(fd, &part, 1, (off_t)position, RWF_NOWAIT);
    if (n >= 0) {
        return n;
    }
    if (errno != EOPNOTSUPP && errno != ENOSYS) {
        return -errno;
    }
#endif
    return size <= SHORT_BYTES ? posix_pread(io, fd, data, size, position) : -EAGAIN;
}

static int64_t posix_pwrite(const ls_io *io, int fd, const void *data, size_t size,
                            int64_t position)
{
    (void)io;
    ssize_t n = pwrite(fd, data, size, (off_t)position);
    return n < 0 ? -errno : n;
}

static int64_t posix_pwritev(const ls_io *io, int fd, const void *head, size_t head_size,
                             const void *rest, size_t rest_size, int64_t position)
{
    (void)io;
    struct iovec parts[2] = {
        {.iov_base = (void *)(uintptr_t)head, .iov_len = head_size},
        {.iov_base = (void *)(uintptr_t)rest, .iov_len = rest_size},
    };
    ssize_t n = pwritev(fd, parts, 2, (off_t)position);
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

static int at(int directory)
{
    return directory == LS_NO_DIRECTORY ? AT_FDCWD : directory;
}

/* Opens with `flags`, without waiting for the other end of a FIFO or for a device. */
static int open_now(int directory, const char *name, int flags, mode_t mode)
{
    int fd = openat(directory, name, flags | O_NONBLOCK, mode);
    struct stat found;
    if (fd < 0 && errno == EWOULDBLOCK && !(flags & O_EXCL) &&
        fstatat(directory, name, &found, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(found.st_mode)) {
        /* A file server has a lease on the file and gives it up while openat waits. */
        fd = openat(directory, name, flags, mode);
    }
    return fd < 0 ? -errno : fd;
}

/* Returns 0, or a negated errno if `fd` is not what `flags` asks for: a regular file or a directory.
 * openat itself returns ELOOP for a link, ENXIO for a socket and ENOTDIR for O_DIRECTORY. */
static int check_type(int fd, int flags)
{
    struct stat found;
    if ((flags & O_DIRECTORY) != 0) {
        return 0;
    }
    if (fstat(fd, &found) < 0) {
        return -errno;
    }
    return S_ISREG(found.st_mode) ? 0 : S_ISDIR(found.st_mode) ? -EISDIR : -ENXIO;
}

static int posix_open(const ls_io *io, int directory, const char *name, int flags, unsigned mode)
{
    (void)io;
    flags |= O_CLOEXEC | O_NOCTTY | (directory == LS_NO_DIRECTORY ? 0 : O_NOFOLLOW);
    int fd = open_now(at(directory), name, flags, (mode_t)mode);
    if (fd < 0) {
        return fd;
    }
    int result = check_type(fd, flags);
    if (result == 0 && fd > STDERR_FILENO) {
        return fd;
    }
    if (result == 0) {
        /* A log on descriptor 1 or 2 would be at the mercy of every stray print. */
        int higher = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
        result = higher < 0 ? -errno : higher;
    }
    close(fd);
    return result;
}

static int posix_close(const ls_io *io, int fd)
{
    (void)io;
    /* On Linux close() with EINTR has closed the descriptor; a retry could close one that another
     * thread has just opened. */
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

static int posix_mkdir(const ls_io *io, int directory, const char *name, unsigned mode)
{
    (void)io;
    return mkdirat(at(directory), name, (mode_t)mode) < 0 ? -errno : 0;
}

static int posix_rmdir(const ls_io *io, int directory, const char *name)
{
    (void)io;
    return unlinkat(directory, name, AT_REMOVEDIR) < 0 ? -errno : 0;
}

static int64_t nanoseconds(struct timespec time)
{
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static int posix_stat(const ls_io *io, int directory, const char *name, ls_file_status *status)
{
    (void)io;
    struct stat found;
    int result = name[0] == '\0'
        ? fstat(directory, &found)
        : fstatat(at(directory), name, &found,
                  directory == LS_NO_DIRECTORY ? 0 : AT_SYMLINK_NOFOLLOW);
    if (result < 0) {
        return -errno;
    }
#if defined(__APPLE__)
    struct timespec accessed = found.st_atimespec, modified = found.st_mtimespec;
#else
    struct timespec accessed = found.st_atim, modified = found.st_mtim;
#endif
    *status = (ls_file_status){
        .regular = S_ISREG(found.st_mode),
        .directory = S_ISDIR(found.st_mode),
        .size = (int64_t)found.st_size,
        .accessed_ns = nanoseconds(accessed),
        .modified_ns = nanoseconds(modified),
    };
    return 0;
}

static bool is_directory(int directory, const struct dirent *entry)
{
    if (entry->d_type != DT_UNKNOWN) {
        return entry->d_type == DT_DIR;
    }
    struct stat found;
    return fstatat(directory, entry->d_name, &found, AT_SYMLINK_NOFOLLOW) == 0 &&
           S_ISDIR(found.st_mode);
}

static int posix_list(const ls_io *io, int directory, ls_visit visit, void *context)
{
    (void)io;
    /* Opens the directory again: a duplicate would share the read position with another listing. */
    int fd = openat(directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) {
        return -errno;
    }
    DIR *stream = fdopendir(fd);
    if (stream == NULL) {
        int result = -errno;
        close(fd);
        return result;
    }
    int result = 0;
    while (result >= 0) {
        errno = 0;
        const struct dirent *entry = readdir(stream);
        if (entry == NULL) {
            result = -errno;
            break;
        }
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0) {
            result = visit(context, entry->d_name, is_directory(fd, entry));
        }
    }
    closedir(stream);
    return result;
}

static int posix_set_times(const ls_io *io, int directory, const char *name, int64_t accessed_ns,
                           int64_t modified_ns)
{
    (void)io;
    struct timespec times[2] = {
        {.tv_sec = (time_t)(accessed_ns / 1000000000), .tv_nsec = (long)(accessed_ns % 1000000000)},
        {.tv_sec = (time_t)(modified_ns / 1000000000), .tv_nsec = (long)(modified_ns % 1000000000)},
    };
    return utimensat(directory, name, times, AT_SYMLINK_NOFOLLOW) < 0 ? -errno : 0;
}

static int posix_allocate(const ls_io *io, int fd, int64_t position, int64_t size)
{
    (void)io;
#if defined(__APPLE__)
    (void)fd, (void)position, (void)size;
    return -ENOTSUP;
#else
    return -posix_fallocate(fd, (off_t)position, (off_t)size);
#endif
}

static int posix_forget(const ls_io *io, int fd, int64_t position, int64_t size)
{
    (void)io;
#if defined(__APPLE__)
    (void)fd, (void)position, (void)size;
    return 0;
#else
    return -posix_fadvise(fd, (off_t)position, (off_t)size, POSIX_FADV_DONTNEED);
#endif
}

const ls_io ls_io_posix = {
    .pread = posix_pread,
    .pread_cached = posix_pread_cached,
    .pwrite = posix_pwrite,
    .pwritev = posix_pwritev,
    .datasync = posix_datasync,
    .sync = posix_sync,
    .truncate = posix_truncate,
    .size = posix_size,
    .open = posix_open,
    .close = posix_close,
    .rename = posix_rename,
    .unlink = posix_unlink,
    .mkdir = posix_mkdir,
    .rmdir = posix_rmdir,
    .list = posix_list,
    .stat = posix_stat,
    .set_times = posix_set_times,
    .allocate = posix_allocate,
    .forget = posix_forget,
};

/* ---- the choice of this process ---- */

static _Atomic(const ls_io *) chosen = &ls_io_posix;

void ls_io_choose(const ls_io *io)
{
    atomic_store_explicit(&chosen, io, memory_order_release);
}

static const ls_io *backend(void)
{
    return atomic_load_explicit(&chosen, memory_order_acquire);
}

static int64_t process_pread(const ls_io *io, int fd, void *data, size_t size, int64_t position)
{
    (void)io;
    const ls_io *to = backend();
    return to->pread(to, fd, data, size, position);
}

static int64_t process_pread_cached(const ls_io *io, int fd, void *data, size_t size,
                                    int64_t position)
{
    (void)io;
    const ls_io *to = backend();
    return to->pread_cached(to, fd, data, size, position);
}

static int64_t process_pwrite(const ls_io *io, int fd, const void *data, size_t size,
                              int64_t position)
{
    (void)io;
    const ls_io *to = backend();
    return to->pwrite(to, fd, data, size, position);
}

static int64_t process_pwritev(const ls_io *io, int fd, const void *head, size_t head_size,
                               const void *rest, size_t rest_size, int64_t position)
{
    (void)io;
    const ls_io *to = backend();
    return to->pwritev(to, fd, head, head_size, rest, rest_size, position);
}

static int process_datasync(const ls_io *io, int fd)
{
    (void)io;
    const ls_io *to = backend();
    return to->datasync(to, fd);
}

static int process_sync(const ls_io *io, int fd)
{
    (void)io;
    const ls_io *to = backend();
    return to->sync(to, fd);
}

static int process_truncate(const ls_io *io, int fd, int64_t size)
{
    (void)io;
    const ls_io *to = backend();
    return to->truncate(to, fd, size);
}

static int64_t process_size(const ls_io *io, int fd)
{
    (void)io;
    const ls_io *to = backend();
    return to->size(to, fd);
}

static int process_open(const ls_io *io, int directory, const char *name, int flags, unsigned mode)
{
    (void)io;
    const ls_io *to = backend();
    return to->open(to, directory, name, flags, mode);
}

static int process_close(const ls_io *io, int fd)
{
    (void)io;
    const ls_io *to = backend();
    return to->close(to, fd);
}

static int process_rename(const ls_io *io, int directory, const char *source, const char *target)
{
    (void)io;
    const ls_io *to = backend();
    return to->rename(to, directory, source, target);
}

static int process_unlink(const ls_io *io, int directory, const char *name)
{
    (void)io;
    const ls_io *to = backend();
    return to->unlink(to, directory, name);
}

static int process_mkdir(const ls_io *io, int directory, const char *name, unsigned mode)
{
    (void)io;
    const ls_io *to = backend();
    return to->mkdir(to, directory, name, mode);
}

static int process_rmdir(const ls_io *io, int directory, const char *name)
{
    (void)io;
    const ls_io *to = backend();
    return to->rmdir(to, directory, name);
}

static int process_list(const ls_io *io, int directory, ls_visit visit, void *context)
{
    (void)io;
    const ls_io *to = backend();
    return to->list(to, directory, visit, context);
}

static int process_stat(const ls_io *io, int directory, const char *name, ls_file_status *status)
{
    (void)io;
    const ls_io *to = backend();
    return to->stat(to, directory, name, status);
}

static int process_set_times(const ls_io *io, int directory, const char *name,
                             int64_t accessed_ns, int64_t modified_ns)
{
    (void)io;
    const ls_io *to = backend();
    return to->set_times(to, directory, name, accessed_ns, modified_ns);
}

static int process_allocate(const ls_io *io, int fd, int64_t position, int64_t size)
{
    (void)io;
    const ls_io *to = backend();
    return to->allocate(to, fd, position, size);
}

static int process_forget(const ls_io *io, int fd, int64_t position, int64_t size)
{
    (void)io;
    const ls_io *to = backend();
    return to->forget(to, fd, position, size);
}

const ls_io ls_io_process = {
    .pread = process_pread,
    .pread_cached = process_pread_cached,
    .pwrite = process_pwrite,
    .pwritev = process_pwritev,
    .datasync = process_datasync,
    .sync = process_sync,
    .truncate = process_truncate,
    .size = process_size,
    .open = process_open,
    .close = process_close,
    .rename = process_rename,
    .unlink = process_unlink,
    .mkdir = process_mkdir,
    .rmdir = process_rmdir,
    .list = process_list,
    .stat = process_stat,
    .set_times = process_set_times,
    .allocate = process_allocate,
    .forget = process_forget,
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

ls_status ls_write_parts_at(const ls_io *io, int fd, const void *head, size_t head_size,
                            const void *rest, size_t rest_size, int64_t position)
{
    int64_t n;
    do {
        n = io->pwritev(io, fd, head, head_size, rest, rest_size, position);
    } while (n == -EINTR);
    if (n <= 0) {
        return ls_fail_os(n < 0 ? (int)-n : ENOSPC, position, "write failed");
    }
    size_t done = (size_t)n;
    if (done < head_size) {
        ls_status status = ls_write_at(io, fd, (const uint8_t *)head + done, head_size - done,
                                       position + (int64_t)done);
        if (status.code != LS_OK) {
            return status;
        }
        done = head_size;
    }
    return ls_write_at(io, fd, (const uint8_t *)rest + (done - head_size),
                       rest_size - (done - head_size), position + (int64_t)done);
}
