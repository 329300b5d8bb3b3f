/* A file in memory behind an ls_io, which fails where it is told to.
 *
 * Every descriptor is the one file.  Calls are counted by kind, from 1; the n-th call of a kind can
 * fail with an errno, and a failing write can leave some of its bytes behind first, as a full disk
 * or a dying one does.  `call_bytes_max` shortens every transfer; `interrupt_every` makes every
 * n-th transfer return EINTR.
 */
#ifndef LS_TESTS_MEMORY_IO_H
#define LS_TESTS_MEMORY_IO_H

#include <errno.h>
#include <stdbool.h>
#include <string.h>

#include "check.h"
#include "io.h"

typedef enum { CALL_READ, CALL_WRITE, CALL_SYNC, CALL_TRUNCATE, CALL_KINDS } call_kind;

typedef struct {
    ls_io io;                          /* first: the callbacks cast back */
    uint8_t *data;
    size_t size;
    int calls[CALL_KINDS];
    int fail_at[CALL_KINDS];           /* number of the call that fails; 0: none */
    int fail_errno[CALL_KINDS];
    bool fail_on;                      /* the calls after the failing one fail as well */
    size_t torn_bytes;                 /* what a failing write leaves behind */
    size_t call_bytes_max;             /* 0: no bound */
    int interrupt_every;               /* 0: never */
    int transfers;
} memory_file;

static inline memory_file *memory_of(const ls_io *io)
{
    return (memory_file *)(uintptr_t)io;
}

static inline int memory_fault(memory_file *file, call_kind kind)
{
    int call = ++file->calls[kind];
    int at = file->fail_at[kind];
    return at != 0 && (call == at || (file->fail_on && call > at)) ? file->fail_errno[kind] : 0;
}

static inline bool memory_interrupted(memory_file *file)
{
    return file->interrupt_every != 0 && ++file->transfers % file->interrupt_every == 0;
}

static inline size_t memory_part(const memory_file *file, size_t size)
{
    return file->call_bytes_max != 0 && size > file->call_bytes_max ? file->call_bytes_max : size;
}

static inline void memory_resize(memory_file *file, size_t size)
{
    /* A fresh, exact block each time: ASan then sees every read past the end. */
    uint8_t *data = malloc(size + 1);
    CHECK(data != NULL);
    size_t kept = size < file->size ? size : file->size;
    if (kept > 0) {
        memcpy(data, file->data, kept);
    }
    memset(data + kept, 0, size + 1 - kept);
    free(file->data);
    file->data = data;
    file->size = size;
}

static inline void memory_put(memory_file *file, const void *data, size_t size, int64_t position)
{
    size_t at = (size_t)position;
    if (at + size > file->size) {
        memory_resize(file, at + size);
    }
    if (size > 0) {
        memcpy(file->data + at, data, size);
    }
}

static inline int64_t memory_pread(const ls_io *io, int fd, void *data, size_t size,
                                   int64_t position)
{
    (void)fd;
    memory_file *file = memory_of(io);
    CHECK(position >= 0);
    int fault = memory_fault(file, CALL_READ);
    if (fault != 0) {
        return -fault;
    }
    if (memory_interrupted(file)) {
        return -EINTR;
    }
    if ((uint64_t)position >= file->size) {
        return 0;
    }
    size_t left = file->size - (size_t)position;
    size_t part = memory_part(file, size < left ? size : left);
    memcpy(data, file->data + position, part);
    return (int64_t)part;
}

static inline int64_t memory_pwrite(const ls_io *io, int fd, const void *data, size_t size,
                                    int64_t position)
{
    (void)fd;
    memory_file *file = memory_of(io);
    CHECK(position >= 0);
    int fault = memory_fault(file, CALL_WRITE);
    if (fault != 0) {
        memory_put(file, data, file->torn_bytes < size ? file->torn_bytes : size, position);
        return -fault;
    }
    if (memory_interrupted(file)) {
        return -EINTR;
    }
    size_t part = memory_part(file, size);
    memory_put(file, data, part, position);
    return (int64_t)part;
}

static inline int64_t memory_pwritev(const ls_io *io, int fd, const void *head, size_t head_size,
                                     const void *rest, size_t rest_size, int64_t position)
{
    uint8_t *whole = malloc(head_size + rest_size);
    CHECK(whole != NULL);
    memcpy(whole, head, head_size);
    memcpy(whole + head_size, rest, rest_size);
    int64_t result = memory_pwrite(io, fd, whole, head_size + rest_size, position);
    free(whole);
    return result;
}

static inline int memory_sync(const ls_io *io, int fd)
{
    (void)fd;
    return -memory_fault(memory_of(io), CALL_SYNC);
}

static inline int memory_truncate(const ls_io *io, int fd, int64_t size)
{
    (void)fd;
    memory_file *file = memory_of(io);
    int fault = memory_fault(file, CALL_TRUNCATE);
    if (fault == 0) {
        memory_resize(file, (size_t)size);
    }
    return -fault;
}

static inline int64_t memory_size(const ls_io *io, int fd)
{
    (void)fd;
    return (int64_t)memory_of(io)->size;
}

static inline void memory_open(memory_file *file, const void *data, size_t size)
{
    memset(file, 0, sizeof *file);
    file->io = (ls_io){
        .pread = memory_pread,
        .pread_cached = memory_pread,
        .pwrite = memory_pwrite,
        .pwritev = memory_pwritev,
        .datasync = memory_sync,
        .sync = memory_sync,
        .truncate = memory_truncate,
        .size = memory_size,
    };
    memory_resize(file, 0);
    memory_put(file, data, size, 0);
}

static inline void memory_close(memory_file *file)
{
    free(file->data);
    file->data = NULL;
}

#endif
