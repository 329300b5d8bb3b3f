#if defined(__linux__)
#define _GNU_SOURCE
#endif
#include "io_recorder.h"

#include "io_path.h"

#include <errno.h>
#include <fnmatch.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

const char *const ls_call_names[LS_CALL_KINDS] = {
    "pread", "pwrite", "datasync", "sync", "truncate", "size", "open", "close", "rename",
    "unlink", "mkdir", "rmdir", "list", "stat", "set_times", "allocate", "forget", "mark",
};

static struct {
    pthread_mutex_t lock;
    bool on;
    bool keep_calls;
    bool keep_data;
    bool ordered;
    bool lost;                         /* no memory for a call */
    char *root;
    size_t root_length;
    ls_call *calls;
    size_t count, capacity;
    int64_t total;                     /* calls, marks not counted */
    ls_fault *faults;
    size_t fault_count;
} recorder = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* What a call is about, with all that is needed to do it. */
typedef struct {
    ls_call call;
    const char *name, *target;
    void *in;
    const void *out;
    unsigned mode;
    ls_visit visit;
    void *context;
    ls_file_status *status;
    int64_t accessed_ns, modified_ns;
} request;

/* ---- paths ---- */

/* Returns the part of a path below the root; NULL if the path is not below it. */
static const char *below_root(const char *path)
{
    if (path == NULL || strncmp(path, recorder.root, recorder.root_length) != 0) {
        return NULL;
    }
    const char *rest = path + recorder.root_length;
    if (recorder.root_length == 1) {
        return rest;                   /* the root of everything ends in its slash */
    }
    return rest[0] == '/' ? rest + 1 : rest[0] == '\0' ? rest : NULL;
}

/* ---- the list ---- */

static void free_call(ls_call *call)
{
    free(call->path);
    free(call->target);
    free(call->data);
}

static void clear_locked(void)
{
    for (size_t i = 0; i < recorder.count; i++) {
        free_call(&recorder.calls[i]);
    }
    for (size_t i = 0; i < recorder.fault_count; i++) {
        free(recorder.faults[i].pattern);
    }
    free(recorder.calls);
    free(recorder.faults);
    free(recorder.root);
    recorder.calls = NULL;
    recorder.faults = NULL;
    recorder.root = NULL;
    recorder.count = recorder.capacity = recorder.fault_count = 0;
    recorder.total = 0;
    recorder.lost = false;
}

/* Takes what `call` owns. */
static void keep_locked(ls_call call)
{
    if (recorder.count == recorder.capacity) {
        size_t capacity = recorder.capacity == 0 ? 256 : recorder.capacity * 2;
        ls_call *calls = realloc(recorder.calls, capacity * sizeof *calls);
        if (calls == NULL) {
            recorder.lost = true;
            free_call(&call);
            return;
        }
        recorder.calls = calls;
        recorder.capacity = capacity;
    }
    recorder.calls[recorder.count++] = call;
}

/* ---- faults ---- */

static bool matches(const ls_fault *fault, const ls_call *call)
{
    if ((fault->kinds >> call->kind & 1) == 0) {
        return false;
    }
    return fault->pattern == NULL || fnmatch(fault->pattern, call->path + call->below, 0) == 0 ||
           (call->target != NULL && fnmatch(fault->pattern, call->target + call->below, 0) == 0);
}

/* The first fault whose turn this call is, or NULL; counts the call for all that it matches. */
static ls_fault *fault_of_locked(const ls_call *call)
{
    ls_fault *found = NULL;
    for (size_t i = 0; i < recorder.fault_count; i++) {
        ls_fault *fault = &recorder.faults[i];
        if (!matches(fault, call)) {
            continue;
        }
        int64_t number = ++fault->matched;
        if (found == NULL && number >= fault->first &&
            (fault->times < 0 || number - fault->first < fault->times)) {
            found = fault;
        }
    }
    if (found != NULL) {
        found->fired++;
    }
    return found;
}

/* ---- doing it ---- */

static int64_t perform(request *asked, size_t size)
{
    const ls_io *io = &ls_io_posix;
    const ls_call *call = &asked->call;
    switch (call->kind) {
    case LS_CALL_PREAD: return io->pread(io, call->fd, asked->in, size, call->position);
    case LS_CALL_PWRITE: return io->pwrite(io, call->fd, asked->out, size, call->position);
    case LS_CALL_DATASYNC: return io->datasync(io, call->fd);
    case LS_CALL_SYNC: return io->sync(io, call->fd);
    case LS_CALL_TRUNCATE: return io->truncate(io, call->fd, call->size);
    case LS_CALL_SIZE: return io->size(io, call->fd);
    case LS_CALL_OPEN: return io->open(io, call->fd, asked->name, call->flags, asked->mode);
    case LS_CALL_CLOSE: return io->close(io, call->fd);
    case LS_CALL_RENAME: return io->rename(io, call->fd, asked->name, asked->target);
    case LS_CALL_UNLINK: return io->unlink(io, call->fd, asked->name);
    case LS_CALL_MKDIR: return io->mkdir(io, call->fd, asked->name, asked->mode);
    case LS_CALL_RMDIR: return io->rmdir(io, call->fd, asked->name);
    case LS_CALL_LIST: return io->list(io, call->fd, asked->visit, asked->context);
    case LS_CALL_STAT: return io->stat(io, call->fd, asked->name, asked->status);
    case LS_CALL_SET_TIMES:
        return io->set_times(io, call->fd, asked->name, asked->accessed_ns, asked->modified_ns);
    case LS_CALL_ALLOCATE: return io->allocate(io, call->fd, call->position, call->size);
    case LS_CALL_FORGET: return io->forget(io, call->fd, call->position, call->size);
    case LS_CALL_MARK:
    case LS_CALL_KINDS: break;
    }
    return -EINVAL;
}

static bool moves_bytes(ls_call_kind kind)
{
    return kind == LS_CALL_PREAD || kind == LS_CALL_PWRITE;
}

static void wait_ns(int64_t ns)
{
    struct timespec left = {.tv_sec = (time_t)(ns / 1000000000), .tv_nsec = (long)(ns % 1000000000)};
    while (nanosleep(&left, &left) < 0 && errno == EINTR) {
    }
}

/* Performs a call with its fault, if there is one.  Returns the result for the caller. */
static int64_t perform_spoiled(request *asked, int64_t value)
{
    ls_call *call = &asked->call;
    size_t size = moves_bytes(call->kind) ? (size_t)call->size : 0;
    size_t part = size;
    if (value >= 0 && (uint64_t)value < part) {
        part = (size_t)value;
    }
    int64_t result;
    switch (call->spoiled) {
    case LS_FAULT_ERROR:
        return -value;
    case LS_FAULT_LATE_ERROR:
        result = perform(asked, size);
        if (call->kind == LS_CALL_OPEN && result >= 0) {
            (void)ls_io_posix.close(&ls_io_posix, (int)result);
        }
        call->done = call->kind == LS_CALL_PWRITE && result > 0 ? result : 0;
        return -value;
    case LS_FAULT_SHORT:
        result = perform(asked, part);
        break;
    case LS_FAULT_KILL:
        if (call->kind == LS_CALL_PWRITE && value > 0) {
            (void)perform(asked, part);
        }
        (void)kill(getpid(), SIGKILL);
        for (;;) {
            (void)pause();
        }
    case LS_FAULT_PRETEND:
        return call->kind == LS_CALL_PWRITE ? call->size : 0;
    case LS_FAULT_NONE:
    case LS_FAULT_DELAY:
    default:
        result = perform(asked, size);
        break;
    }
    call->done = call->kind == LS_CALL_PWRITE && result > 0 ? result : 0;
    return result;
}

static int64_t run(request *asked)
{
    ls_call *call = &asked->call;
    int saved = errno;
    call->path = ls_io_path(call->fd, asked->name);
    call->target = asked->target == NULL ? NULL : ls_io_path(call->fd, asked->target);
    pthread_mutex_lock(&recorder.lock);
    const char *below = recorder.on ? below_root(call->path) : NULL;
    if (below == NULL) {
        pthread_mutex_unlock(&recorder.lock);
        free_call(call);
        errno = saved;
        return perform(asked, (size_t)call->size);
    }
    recorder.total++;
    call->below = (size_t)(below - call->path);
    const ls_fault *fault = fault_of_locked(call);
    int64_t value = -1;
    if (fault != NULL) {
        call->spoiled = fault->action;
        value = fault->value;
    }
    bool ordered = recorder.ordered;
    if (call->spoiled == LS_FAULT_DELAY) {
        pthread_mutex_unlock(&recorder.lock);
        wait_ns(value);
        pthread_mutex_lock(&recorder.lock);
    }
    if (!ordered) {
        pthread_mutex_unlock(&recorder.lock);
    }
    call->result = perform_spoiled(asked, value);
    if (!ordered) {
        pthread_mutex_lock(&recorder.lock);
    }
    if (recorder.on && recorder.keep_calls) {
        if (recorder.keep_data && call->done > 0) {
            call->data = malloc((size_t)call->done);
            if (call->data == NULL) {
                recorder.lost = true;
            } else {
                memcpy(call->data, asked->out, (size_t)call->done);
            }
        }
        keep_locked(*call);
    } else {
        free_call(call);
    }
    pthread_mutex_unlock(&recorder.lock);
    errno = saved;
    return call->result;
}

/* ---- the vtable ---- */

static int64_t record_pread(const ls_io *io, int fd, void *data, size_t size, int64_t position)
{
    (void)io;
    request asked = {
        .call = {.kind = LS_CALL_PREAD, .fd = fd, .position = position, .size = (int64_t)size},
        .in = data,
    };
    return run(&asked);
}

static int64_t record_pwrite(const ls_io *io, int fd, const void *data, size_t size,
                             int64_t position)
{
    (void)io;
    request asked = {
        .call = {.kind = LS_CALL_PWRITE, .fd = fd, .position = position, .size = (int64_t)size},
        .out = data,
    };
    return run(&asked);
}

/* Recorded, and spoiled, as one pwrite of the whole range: a crash state or a fault cannot tell the
 * two calls apart. */
static int64_t record_pwritev(const ls_io *io, int fd, const void *head, size_t head_size,
                              const void *rest, size_t rest_size, int64_t position)
{
    uint8_t *whole = malloc(head_size + rest_size);
    if (whole == NULL) {
        return -ENOMEM;
    }
    memcpy(whole, head, head_size);
    memcpy(whole + head_size, rest, rest_size);
    int64_t result = record_pwrite(io, fd, whole, head_size + rest_size, position);
    free(whole);
    return result;
}

static int record_datasync(const ls_io *io, int fd)
{
    (void)io;
    return (int)run(&(request){.call = {.kind = LS_CALL_DATASYNC, .fd = fd}});
}

static int record_sync(const ls_io *io, int fd)
{
    (void)io;
    return (int)run(&(request){.call = {.kind = LS_CALL_SYNC, .fd = fd}});
}

static int record_truncate(const ls_io *io, int fd, int64_t size)
{
    (void)io;
    return (int)run(&(request){.call = {.kind = LS_CALL_TRUNCATE, .fd = fd, .size = size}});
}

static int64_t record_size(const ls_io *io, int fd)
{
    (void)io;
    return run(&(request){.call = {.kind = LS_CALL_SIZE, .fd = fd}});
}

static int record_open(const ls_io *io, int directory, const char *name, int flags, unsigned mode)
{
    (void)io;
    request asked = {.call = {.kind = LS_CALL_OPEN, .fd = directory, .flags = flags},
                     .name = name, .mode = mode};
    return (int)run(&asked);
}

static int record_close(const ls_io *io, int fd)
{
    (void)io;
    return (int)run(&(request){.call = {.kind = LS_CALL_CLOSE, .fd = fd}});
}

static int record_rename(const ls_io *io, int directory, const char *source, const char *target)
{
    (void)io;
    request asked = {.call = {.kind = LS_CALL_RENAME, .fd = directory},
                     .name = source, .target = target};
    return (int)run(&asked);
}

static int record_unlink(const ls_io *io, int directory, const char *name)
{
    (void)io;
    request asked = {.call = {.kind = LS_CALL_UNLINK, .fd = directory}, .name = name};
    return (int)run(&asked);
}

static int record_mkdir(const ls_io *io, int directory, const char *name, unsigned mode)
{
    (void)io;
    request asked = {.call = {.kind = LS_CALL_MKDIR, .fd = directory}, .name = name, .mode = mode};
    return (int)run(&asked);
}

static int record_rmdir(const ls_io *io, int directory, const char *name)
{
    (void)io;
    request asked = {.call = {.kind = LS_CALL_RMDIR, .fd = directory}, .name = name};
    return (int)run(&asked);
}

static int record_list(const ls_io *io, int directory, ls_visit visit, void *context)
{
    (void)io;
    request asked = {.call = {.kind = LS_CALL_LIST, .fd = directory},
                     .visit = visit, .context = context};
    return (int)run(&asked);
}

static int record_stat(const ls_io *io, int directory, const char *name, ls_file_status *status)
{
    (void)io;
    request asked = {.call = {.kind = LS_CALL_STAT, .fd = directory},
                     .name = name, .status = status};
    return (int)run(&asked);
}

static int record_set_times(const ls_io *io, int directory, const char *name, int64_t accessed_ns,
                            int64_t modified_ns)
{
    (void)io;
    request asked = {.call = {.kind = LS_CALL_SET_TIMES, .fd = directory},
                     .name = name, .accessed_ns = accessed_ns, .modified_ns = modified_ns};
    return (int)run(&asked);
}

static int record_allocate(const ls_io *io, int fd, int64_t position, int64_t size)
{
    (void)io;
    return (int)run(&(request){
        .call = {.kind = LS_CALL_ALLOCATE, .fd = fd, .position = position, .size = size},
    });
}

static int record_forget(const ls_io *io, int fd, int64_t position, int64_t size)
{
    (void)io;
    return (int)run(&(request){
        .call = {.kind = LS_CALL_FORGET, .fd = fd, .position = position, .size = size},
    });
}

static const ls_io recording = {
    .pread = record_pread,
    .pread_cached = record_pread,      /* the same call: a recorded read may wait for the device */
    .pwrite = record_pwrite,
    .pwritev = record_pwritev,
    .datasync = record_datasync,
    .sync = record_sync,
    .truncate = record_truncate,
    .size = record_size,
    .open = record_open,
    .close = record_close,
    .rename = record_rename,
    .unlink = record_unlink,
    .mkdir = record_mkdir,
    .rmdir = record_rmdir,
    .list = record_list,
    .stat = record_stat,
    .set_times = record_set_times,
    .allocate = record_allocate,
    .forget = record_forget,
};

/* ---- on and off ---- */

static void lock_for_fork(void) { pthread_mutex_lock(&recorder.lock); }
static void unlock_after_fork(void) { pthread_mutex_unlock(&recorder.lock); }

static void prepare_for_forks(void)
{
    (void)pthread_atfork(lock_for_fork, unlock_after_fork, unlock_after_fork);
}

int ls_io_recorder_start(const char *root, const ls_fault *faults, size_t fault_count,
                         bool keep_calls, bool keep_data, bool ordered)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, prepare_for_forks);
    pthread_mutex_lock(&recorder.lock);
    if (recorder.on) {
        pthread_mutex_unlock(&recorder.lock);
        return -EALREADY;
    }
    clear_locked();
    recorder.root = strdup(root);
    recorder.faults = calloc(fault_count + 1, sizeof *recorder.faults);
    int result = recorder.root == NULL || recorder.faults == NULL ? -ENOMEM : 0;
    for (size_t i = 0; result == 0 && i < fault_count; i++) {
        recorder.faults[i] = faults[i];
        recorder.faults[i].matched = recorder.faults[i].fired = 0;
        recorder.fault_count++;
        if (faults[i].pattern != NULL) {
            recorder.faults[i].pattern = strdup(faults[i].pattern);
            result = recorder.faults[i].pattern == NULL ? -ENOMEM : 0;
        }
    }
    if (result == 0) {
        recorder.root_length = strlen(recorder.root);
        recorder.keep_calls = keep_calls;
        recorder.keep_data = keep_data;
        recorder.ordered = ordered;
        recorder.on = true;
        ls_io_choose(&recording);
    }
    pthread_mutex_unlock(&recorder.lock);
    return result;
}

void ls_io_recorder_stop(void)
{
    pthread_mutex_lock(&recorder.lock);
    /* A call that is in progress takes the lock once more, and then finds `on` false. */
    recorder.on = false;
    ls_io_choose(&ls_io_posix);
    pthread_mutex_unlock(&recorder.lock);
}

void ls_io_recorder_mark(int64_t number)
{
    pthread_mutex_lock(&recorder.lock);
    if (recorder.on && recorder.keep_calls) {
        keep_locked((ls_call){.kind = LS_CALL_MARK, .fd = -1, .position = number});
    }
    pthread_mutex_unlock(&recorder.lock);
}

int64_t ls_io_recorder_count(void)
{
    pthread_mutex_lock(&recorder.lock);
    int64_t total = recorder.total;
    pthread_mutex_unlock(&recorder.lock);
    return total;
}

int ls_io_recorder_each(size_t start, ls_visit_call visit, void *context)
{
    pthread_mutex_lock(&recorder.lock);
    int result = recorder.lost ? -ENOMEM : 0;
    for (size_t i = start; result >= 0 && i < recorder.count; i++) {
        result = visit(context, &recorder.calls[i]);
    }
    pthread_mutex_unlock(&recorder.lock);
    return result;
}

size_t ls_io_recorder_faults(ls_fault *faults, size_t capacity)
{
    pthread_mutex_lock(&recorder.lock);
    size_t count = recorder.fault_count < capacity ? recorder.fault_count : capacity;
    for (size_t i = 0; i < count; i++) {
        faults[i] = recorder.faults[i];
        faults[i].pattern = NULL;      /* the recorder owns the pattern */
    }
    pthread_mutex_unlock(&recorder.lock);
    return count;
}
