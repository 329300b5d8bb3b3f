/* The core under ThreadSanitizer: one writer, many readers, reading ahead, shared memory.
 *
 *     threads [rounds]
 *
 * The rule that is tested is the one written on the types: appends are serialised by their caller; a
 * reader goes no further than an end that was published, with release, after the bytes below it were
 * written, and loaded with acquire.  Each thread does a fixed amount of work and then ends.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "read_ahead.h"
#include "check.h"
#include "memory.h"
#include "sample.h"
#include "segment.h"

enum { READERS = 6, BATCHES = 400, RECORDS = 20, VALUE_BYTES = 200, BLOCKS = 2000 };

typedef struct {
    int fd;
    _Atomic int64_t end;               /* bytes below are whole batches */
    _Atomic bool done;
} shared_log;

static void *write_batches(void *argument)
{
    shared_log *log = argument;
    int64_t position = 0;
    ls_builder builder;
    ls_builder_init(&builder, 1 << 20, 1 << 20);
    for (int64_t i = 0; i < BATCHES; i++) {
        sample_batch(&builder, RECORDS, VALUE_BYTES, 1000 + i);
        ls_batches_finish(builder.data, builder.size, i * RECORDS, 0, -1);
        CHECK(ls_append(&ls_io_process, log->fd, builder.data, builder.size, position).code == LS_OK);
        position += (int64_t)builder.size;
        atomic_store_explicit(&log->end, position, memory_order_release);
        ls_builder_clear(&builder);
    }
    ls_builder_free(&builder);
    atomic_store_explicit(&log->done, true, memory_order_release);
    return NULL;
}

/* Reads everything behind the writer; whether all of it was seen is known by the last offset. */
static void *read_batches(void *argument)
{
    shared_log *log = argument;
    ls_window window;
    ls_window_init(&window, &ls_io_process, log->fd, 64 << 10);
    int64_t position = 0, next_offset = 0;
    for (;;) {
        bool done = atomic_load_explicit(&log->done, memory_order_acquire);
        int64_t end = atomic_load_explicit(&log->end, memory_order_acquire);
        while (position < end) {
            ls_batch batch;
            const uint8_t *data;
            CHECK(ls_window_batch(&window, position, end, &batch, &data).code == LS_OK);
            CHECK(batch.base_offset == next_offset);
            next_offset = batch.base_offset + RECORDS;
            position += batch.size;
        }
        if (done && position == atomic_load_explicit(&log->end, memory_order_acquire)) {
            break;
        }
    }
    CHECK(next_offset == (int64_t)BATCHES * RECORDS);
    ls_window_free(&window);
    return NULL;
}

/* The same with a thread of its own that reads ahead. */
static void *read_ahead(void *argument)
{
    shared_log *log = argument;
    ls_read_ahead *ahead = ls_read_ahead_new(&ls_io_process, log->fd);
    int64_t position = 0, next_offset = 0;
    while (ahead != NULL && next_offset < (int64_t)BATCHES * RECORDS) {
        int64_t end = atomic_load_explicit(&log->end, memory_order_acquire);
        if (position == end || !ls_read_ahead_start(ahead, position, end, INT64_MAX)) {
            continue;
        }
        const uint8_t *data;
        while (position < end && (data = ls_read_ahead_batch(ahead, position)) != NULL) {
            ls_batch batch;
            CHECK(ls_batch_parse(data, (size_t)(end - position), &batch).code == LS_OK);
            CHECK(batch.base_offset == next_offset);
            next_offset = batch.base_offset + RECORDS;
            position += batch.size;
        }
        ls_read_ahead_stop(ahead);
    }
    if (ahead != NULL) {
        ls_read_ahead_free(ahead);
    }
    return NULL;
}

/* Blocks that are used again by other threads: nobody may see another's bytes change. */
static void *use_memory(void *argument)
{
    uint64_t seed = (uint64_t)(uintptr_t)argument;
    for (int i = 0; i < BLOCKS; i++) {
        size_t size = (1 << 20) + sample_random(&seed) % (1 << 20);
        uint8_t *block = ls_memory_take(size);
        CHECK(block != NULL);
        memset(block, i & 0xff, 4096);
        block[size - 1] = (uint8_t)i;
        for (size_t k = 0; k < 4096; k += 512) {
            CHECK(block[k] == (uint8_t)i);
        }
        ls_memory_give(block);
        uint8_t *pages = ls_memory_pages(1 << 20);
        CHECK(pages != NULL);
        pages[i % 4096] = (uint8_t)i;
        CHECK(pages[i % 4096] == (uint8_t)i);
        ls_memory_give_pages(pages);
    }
    return NULL;
}

static void run_once(void)
{
    char path[] = "/tmp/logstore-threads-XXXXXX";
    shared_log log = {.fd = mkstemp(path)};
    CHECK(log.fd >= 0);
    CHECK(unlink(path) == 0);
    pthread_t threads[READERS + 4];
    size_t count = 0;
    CHECK(pthread_create(&threads[count++], NULL, write_batches, &log) == 0);
    for (int i = 0; i < READERS; i++) {
        CHECK(pthread_create(&threads[count++], NULL, read_batches, &log) == 0);
    }
    CHECK(pthread_create(&threads[count++], NULL, read_ahead, &log) == 0);
    for (uintptr_t i = 1; i <= 2; i++) {
        CHECK(pthread_create(&threads[count++], NULL, use_memory, (void *)i) == 0);
    }
    for (size_t i = 0; i < count; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
    CHECK(close(log.fd) == 0);
}

int main(int argc, char **argv)
{
    int rounds = argc > 1 ? atoi(argv[1]) : 1;
    for (int i = 0; i < rounds; i++) {
        run_once();
    }
    printf("threads: %d rounds of %d batches, %d readers\n", rounds, BATCHES, READERS);
    return 0;
}
