/* The one seam between the core and the operating system.
 *
 * Every system call on a file is made by an ls_io, so that a test can fail, shorten or record any
 * call.  Each function returns a non-negative result or a negated errno; none keeps state.
 * Names are resolved relative to an open directory and never through a symbolic link.  A path without
 * a directory (LS_NO_DIRECTORY) is from the user and may contain links.
 */
#ifndef LS_IO_H
#define LS_IO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "status.h"

enum { LS_NO_DIRECTORY = -1 };

typedef struct {
    bool regular;
    bool directory;                    /* neither: a link, a socket, ... */
    int64_t size;
    int64_t accessed_ns;
    int64_t modified_ns;
} ls_file_status;

/* Called with each name of a directory.  A negative result ends the listing, which returns it. */
typedef int (*ls_visit)(void *context, const char *name, bool is_directory);

typedef struct ls_io ls_io;
struct ls_io {
    int64_t (*pread)(const ls_io *io, int fd, void *data, size_t size, int64_t position);
    /* Reads only bytes that are in the page cache: -EAGAIN if the device would have to be read, and
     * fewer bytes if only the first of them are cached. */
    int64_t (*pread_cached)(const ls_io *io, int fd, void *data, size_t size, int64_t position);
    int64_t (*pwrite)(const ls_io *io, int fd, const void *data, size_t size, int64_t position);
    /* One write of `head` and, after it, `rest`. */
    int64_t (*pwritev)(const ls_io *io, int fd, const void *head, size_t head_size,
                       const void *rest, size_t rest_size, int64_t position);
    int (*datasync)(const ls_io *io, int fd);          /* data and what is needed to find it */
    int (*sync)(const ls_io *io, int fd);              /* also for directories */
    int (*truncate)(const ls_io *io, int fd, int64_t size);
    int64_t (*size)(const ls_io *io, int fd);
    /* Opens a regular file, or with O_DIRECTORY a directory; never waits.  Anything else is refused:
     * ELOOP for a symbolic link, EISDIR for a directory, ENXIO for a FIFO, a socket or a device. */
    int (*open)(const ls_io *io, int directory, const char *name, int flags, unsigned mode);
    int (*close)(const ls_io *io, int fd);
    int (*rename)(const ls_io *io, int directory, const char *source, const char *target);
    int (*unlink)(const ls_io *io, int directory, const char *name);
    int (*mkdir)(const ls_io *io, int directory, const char *name, unsigned mode);
    int (*rmdir)(const ls_io *io, int directory, const char *name);
    int (*list)(const ls_io *io, int directory, ls_visit visit, void *context);
    /* An empty name means the directory itself. */
    int (*stat)(const ls_io *io, int directory, const char *name, ls_file_status *status);
    int (*set_times)(const ls_io *io, int directory, const char *name, int64_t accessed_ns,
                     int64_t modified_ns);
    int (*allocate)(const ls_io *io, int fd, int64_t position, int64_t size);
    int (*forget)(const ls_io *io, int fd, int64_t position, int64_t size);  /* cached pages */
};

extern const ls_io ls_io_posix;

/* Hands every call to the backend that this process has chosen: ls_io_posix, unless a test put
 * another one in its place.  Files that are open already follow the choice. */
extern const ls_io ls_io_process;
void ls_io_choose(const ls_io *io);

/* Reads until `size` bytes or the end of the file; short counts and EINTR are handled. */
ls_status ls_read_at(const ls_io *io, int fd, void *data, size_t size, int64_t position,
                     size_t *read);

/* Writes all of it or fails; short counts and EINTR are handled.  After a failure bytes may have
 * reached the file: the caller must take them back before anything else is appended. */
ls_status ls_write_at(const ls_io *io, int fd, const void *data, size_t size, int64_t position);

/* The same for two parts, one after the other: one call unless it is cut short. */
ls_status ls_write_parts_at(const ls_io *io, int fd, const void *head, size_t head_size,
                            const void *rest, size_t rest_size, int64_t position);

#endif
