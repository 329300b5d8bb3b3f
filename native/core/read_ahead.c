#define _GNU_SOURCE
#include "read_ahead.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>


enum { BATCH_BYTES_MAX = 1 << 20 };    /* the windows must not grow with the data */
enum { SPINS = 1000 };                 /* some 30 microseconds */

static inline void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

typedef struct {
    ls_window window;
    int64_t start;                     /* [start, end) holds whole batches with valid checksums */
    int64_t end;
} ahead_window;

struct ls_read_ahead {
    ahead_window windows[LS_READ_AHEAD_WINDOWS];
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t loaded;             /* one window more, or the thread has ended */
    pthread_cond_t room;               /* windows to fill, or the order to stop */
    /* The lock guards these while the thread runs.  Windows [first, first + count) of the ring are
     * loaded and belong to the caller; the thread fills the window after them. */
    size_t first;
    size_t count;
    bool caller_waits;
    bool thread_waits;
    bool stopping;
    bool ended;                        /* the thread will load no more */
    atomic_uint steps;                 /* moves with every window, and at the end */
    bool running;                      /* the caller's: there is a thread to join */
    const ahead_window *current;       /* the caller's: the window in use, not written by the thread */
    pid_t process;                     /* the process that has the thread */
    int64_t next;                      /* where the next window starts; the thread's */
    int64_t limit;
    int64_t stop_offset;
};

static bool second_processor(void)
{
#if defined(__linux__)
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) {
        return CPU_COUNT(&allowed) > 1;
    }
#endif
    return sysconf(_SC_NPROCESSORS_ONLN) > 1;
}

ls_read_ahead *ls_read_ahead_new(const ls_io *io, int fd)
{
    ls_read_ahead *ahead = second_processor() ? calloc(1, sizeof *ahead) : NULL;
    if (ahead == NULL) {
        return NULL;
    }
    if (pthread_mutex_init(&ahead->lock, NULL) != 0) {
        free(ahead);
        return NULL;
    }
    if (pthread_cond_init(&ahead->loaded, NULL) != 0) {
        pthread_mutex_destroy(&ahead->lock);
        free(ahead);
        return NULL;
    }
    if (pthread_cond_init(&ahead->room, NULL) != 0) {
        pthread_cond_destroy(&ahead->loaded);
        pthread_mutex_destroy(&ahead->lock);
        free(ahead);
        return NULL;
    }
    for (size_t i = 0; i < LS_READ_AHEAD_WINDOWS; i++) {
        ls_window_init(&ahead->windows[i].window, io, fd, LS_WINDOW_BYTES);
    }
    return ahead;
}

void ls_read_ahead_free(ls_read_ahead *ahead)
{
    if (ahead == NULL) {
        return;
    }
    ls_read_ahead_stop(ahead);
    if (ahead->process != 0 && ahead->process != getpid()) {
        return;    /* the fork may have copied a held lock, which must not be destroyed */
    }
    for (size_t i = 0; i < LS_READ_AHEAD_WINDOWS; i++) {
        ls_window_free(&ahead->windows[i].window);
    }
    pthread_cond_destroy(&ahead->room);
    pthread_cond_destroy(&ahead->loaded);
    pthread_mutex_destroy(&ahead->lock);
    free(ahead);
}

/* Returns whether the window holds the whole batch at `position`, so that no read is needed. */
static bool holds_batch(const ls_window *window, int64_t position)
{
    if (!ls_window_holds(window, position, LS_BATCH_HEADER_BYTES)) {
        return false;
    }
    const uint8_t *data = window->data + (position - window->start);
    int64_t size = (int64_t)ls_load_i32(data + LS_AT_LENGTH) + LS_LOG_OVERHEAD_BYTES;
    return size >= LS_BATCH_HEADER_BYTES && ls_window_holds(window, position, (size_t)size);
}

/* Loads and verifies one window of batches from `position` on; slot->end is the end of the last valid
 * one.  Returns false if the next batch is not for this thread: the end, damage, or too large. */
static bool fill(ahead_window *slot, int64_t position, int64_t limit, int64_t stop_offset)
{
    slot->start = slot->end = position;
    do {
        ls_batch batch;
        const uint8_t *data;
        if (slot->end >= limit ||
            ls_window_header(&slot->window, slot->end, limit, &batch).code != LS_OK ||
            batch.size > BATCH_BYTES_MAX || batch.base_offset >= stop_offset ||
            ls_window_batch(&slot->window, slot->end, limit, &batch, &data).code != LS_OK) {
            return false;
        }
        slot->end += batch.size;
    } while (holds_batch(&slot->window, slot->end));
    return true;
}

static void *run(void *argument)
{
    ls_read_ahead *ahead = argument;
    pthread_mutex_lock(&ahead->lock);
    while (!ahead->stopping) {
        if (ahead->count == LS_READ_AHEAD_WINDOWS) {
            ahead->thread_waits = true;
            pthread_cond_wait(&ahead->room, &ahead->lock);
            ahead->thread_waits = false;
            continue;
        }
        ahead_window *slot = &ahead->windows[(ahead->first + ahead->count) % LS_READ_AHEAD_WINDOWS];
        int64_t position = ahead->next;
        pthread_mutex_unlock(&ahead->lock);
        bool more = fill(slot, position, ahead->limit, ahead->stop_offset);
        pthread_mutex_lock(&ahead->lock);
        if (slot->end > slot->start) {
            ahead->next = slot->end;
            ahead->count++;
        }
        atomic_fetch_add_explicit(&ahead->steps, 1, memory_order_release);
        if (ahead->caller_waits) {
            pthread_cond_signal(&ahead->loaded);
        }
        if (!more) {
            break;
        }
    }
    ahead->ended = true;
    atomic_fetch_add_explicit(&ahead->steps, 1, memory_order_release);
    pthread_cond_signal(&ahead->loaded);
    pthread_mutex_unlock(&ahead->lock);
    return NULL;
}

/* Drops windows below `position`; all of them when none holds it.  With the lock, or without a
 * thread. */
static void drop_below(ls_read_ahead *ahead, int64_t position)
{
    while (ahead->count > 0) {
        const ahead_window *slot = &ahead->windows[ahead->first];
        if (position >= slot->start && position < slot->end) {
            return;
        }
        ahead->first = (ahead->first + 1) % LS_READ_AHEAD_WINDOWS;
        ahead->count--;
    }
}

bool ls_read_ahead_start(ls_read_ahead *ahead, int64_t position, int64_t limit, int64_t stop_offset)
{
    drop_below(ahead, position);
    ahead->current = NULL;
    if (ahead->count == 0) {
        ahead->next = position;
    }
    ahead->limit = limit;
    ahead->stop_offset = stop_offset;
    ahead->stopping = ahead->ended = false;
    ahead->process = getpid();
    ahead->running = pthread_create(&ahead->thread, NULL, run, ahead) == 0;
    return ahead->running;
}

bool ls_read_ahead_ready(const ls_read_ahead *ahead, int64_t position)
{
    const ahead_window *slot = ahead->current;
    return slot != NULL && position >= slot->start && position < slot->end;
}

const uint8_t *ls_read_ahead_batch(ls_read_ahead *ahead, int64_t position)
{
    const ahead_window *slot = ahead->current;
    if (!ls_read_ahead_ready(ahead, position)) {
        pthread_mutex_lock(&ahead->lock);
        drop_below(ahead, position);
        /* Waking costs a system call: not for every window. */
        if (ahead->thread_waits && ahead->count <= LS_READ_AHEAD_WINDOWS / 2) {
            pthread_cond_signal(&ahead->room);
        }
        if (ahead->count == 0 && !ahead->ended) {
            /* The next window is a few microseconds away: sleeping and waking takes longer. */
            unsigned seen = atomic_load_explicit(&ahead->steps, memory_order_relaxed);
            pthread_mutex_unlock(&ahead->lock);
            for (int i = 0; i < SPINS; i++) {
                if (atomic_load_explicit(&ahead->steps, memory_order_acquire) != seen) {
                    break;
                }
                relax();
            }
            pthread_mutex_lock(&ahead->lock);
            drop_below(ahead, position);
        }
        while (ahead->count == 0 && !ahead->ended) {
            ahead->caller_waits = true;
            pthread_cond_wait(&ahead->loaded, &ahead->lock);
            ahead->caller_waits = false;
            drop_below(ahead, position);
        }
        slot = ahead->count > 0 ? &ahead->windows[ahead->first] : NULL;
        ahead->current = slot;
        pthread_mutex_unlock(&ahead->lock);
        if (slot == NULL) {
            return NULL;
        }
    }
    return slot->window.data + (position - slot->window.start);
}

void ls_read_ahead_stop(ls_read_ahead *ahead)
{
    if (!ahead->running) {
        return;
    }
    ahead->running = false;
    if (ahead->process != getpid()) {
        return;                        /* a fork copies neither the thread nor the lock's owner */
    }
    pthread_mutex_lock(&ahead->lock);
    ahead->stopping = true;
    pthread_cond_signal(&ahead->room);
    pthread_mutex_unlock(&ahead->lock);
    pthread_join(ahead->thread, NULL);
}
