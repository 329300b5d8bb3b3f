/* A backend for tests: it passes calls on to the operating system, records them, and injects faults
 * into the calls that match a fault.
 *
 * There is one recording in a process, since a process has one backend.  Only calls on paths at or
 * below its root are counted, recorded or spoiled.  Any thread may call any function.
 * With `ordered` a call and its entry in the list are one step under one lock: the list has the
 * order in which the disk received the calls.  Without it calls run concurrently, as they do without
 * a recording, and the list has the order in which they ended.  The child of a fork continues with
 * its own copy of the recording.
 */
#ifndef LS_IO_RECORDER_H
#define LS_IO_RECORDER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "io.h"

typedef enum {
    LS_CALL_PREAD,
    LS_CALL_PWRITE,
    LS_CALL_DATASYNC,
    LS_CALL_SYNC,
    LS_CALL_TRUNCATE,
    LS_CALL_SIZE,
    LS_CALL_OPEN,
    LS_CALL_CLOSE,
    LS_CALL_RENAME,
    LS_CALL_UNLINK,
    LS_CALL_MKDIR,
    LS_CALL_RMDIR,
    LS_CALL_LIST,
    LS_CALL_STAT,
    LS_CALL_SET_TIMES,
    LS_CALL_ALLOCATE,
    LS_CALL_FORGET,
    LS_CALL_MARK,                      /* none: put into the list by the test */
    LS_CALL_KINDS
} ls_call_kind;

extern const char *const ls_call_names[LS_CALL_KINDS];

typedef enum {
    LS_FAULT_NONE,
    LS_FAULT_ERROR,                    /* not done; the result is -value */
    LS_FAULT_LATE_ERROR,               /* done, and yet the result is -value */
    LS_FAULT_SHORT,                    /* reads and writes: `value` bytes at most */
    LS_FAULT_KILL,                     /* SIGKILL before it; a write reaches `value` bytes first */
    LS_FAULT_DELAY,                    /* done `value` nanoseconds later */
    LS_FAULT_PRETEND                   /* not done; the result is that of a call that succeeded */
} ls_fault_action;

typedef struct {
    ls_call_kind kind;
    ls_fault_action spoiled;
    int fd;                            /* the file; of a call by name: the directory */
    int flags;                         /* of open */
    int64_t position;                  /* pread, pwrite, allocate, forget; a mark's number */
    int64_t size;                      /* asked for; truncate: the new size */
    int64_t result;                    /* as the caller got it */
    int64_t done;                      /* a write: bytes that reached the file */
    char *path;                        /* absolute; NULL for a mark */
    char *target;                      /* rename: the new path, else NULL */
    size_t below;                      /* where the part of both below the root begins */
    uint8_t *data;                     /* pwrite: `done` bytes when asked for, else NULL */
} ls_call;

typedef struct {
    uint32_t kinds;                    /* one bit each, 1 << LS_CALL_PREAD ... */
    char *pattern;                     /* fnmatch of a path below the root; NULL: any */
    int64_t first;                     /* the matching call it begins with, from 1 */
    int64_t times;                     /* how many from there; -1: for ever */
    ls_fault_action action;
    int64_t value;
    int64_t matched;                   /* out: matching calls so far */
    int64_t fired;                     /* out: calls that were spoiled */
} ls_fault;

/* Takes copies.  -EALREADY: one is on.  `root` is absolute and without links. */
int ls_io_recorder_start(const char *root, const ls_fault *faults, size_t fault_count,
                         bool keep_calls, bool keep_data, bool ordered);
/* Makes ls_io_posix the backend again; the recorded calls stay until the next start. */
void ls_io_recorder_stop(void);
void ls_io_recorder_mark(int64_t number);
int64_t ls_io_recorder_count(void);    /* calls, also those that were not kept; no marks */

/* Visits the recorded calls from `start` on, with the lock held: new calls wait.  A negative result of
 * `visit` ends the visits and is returned.  -ENOMEM: the list has a hole. */
typedef int (*ls_visit_call)(void *context, const ls_call *call);
int ls_io_recorder_each(size_t start, ls_visit_call visit, void *context);
/* Copies out `matched` and `fired`. */
size_t ls_io_recorder_faults(ls_fault *faults, size_t capacity);

#endif
