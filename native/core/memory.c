#define _POSIX_C_SOURCE 200112L
#include "memory.h"

#include <pthread.h>
#include <stdalign.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum {
    KEPT_BLOCKS = 48,
    KEPT_BYTES = 48 << 20,             /* in all */
    KEPT_BYTES_MIN = 64 << 10,         /* smaller blocks are left to malloc */
    PAGE_BYTES = 4096,
};

typedef struct {
    alignas(64) size_t capacity;       /* of the block after this head, without the slack */
    bool pages;                        /* the block starts at the next page */
} block_head;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static block_head *kept[KEPT_BLOCKS];
static size_t kept_count;
static size_t kept_bytes;

/* A fork while another thread holds the lock would leave it held for ever in the child. */
static void lock_for_fork(void) { pthread_mutex_lock(&lock); }
static void unlock_after_fork(void) { pthread_mutex_unlock(&lock); }

__attribute__((constructor)) static void survive_forks(void)
{
    (void)pthread_atfork(lock_for_fork, unlock_after_fork, unlock_after_fork);
}

/* Takes the smallest kept block that is large enough, if it is at most twice as large as needed. */
static block_head *take_kept(size_t size, bool pages)
{
    block_head *found = NULL;
    pthread_mutex_lock(&lock);
    size_t best = SIZE_MAX, place = 0;
    for (size_t i = 0; i < kept_count; i++) {
        size_t capacity = kept[i]->capacity;
        if (kept[i]->pages == pages && capacity >= size && capacity / 2 <= size &&
            capacity < best) {
            best = capacity;
            place = i;
            found = kept[i];
        }
    }
    if (found != NULL) {
        kept[place] = kept[--kept_count];
        kept_bytes -= found->capacity;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

void *ls_memory_take(size_t size)
{
    block_head *head = size >= KEPT_BYTES_MIN ? take_kept(size, false) : NULL;
    if (head == NULL) {
        size_t bytes;
        if (__builtin_add_overflow(size, sizeof *head + LS_MEMORY_SLACK, &bytes)) {
            return NULL;
        }
        void *fresh = NULL;
        if (posix_memalign(&fresh, sizeof *head, bytes) != 0) {
            return NULL;
        }
        head = fresh;
        head->capacity = size;
        head->pages = false;
    }
    return head + 1;
}

void *ls_memory_grow(void *block, size_t used, size_t size)
{
    void *larger = ls_memory_take(size);
    if (larger != NULL) {
        memcpy(larger, block, used);
        ls_memory_give(block);
    }
    return larger;
}

void *ls_memory_pages(size_t size)
{
    block_head *head = size >= KEPT_BYTES_MIN ? take_kept(size, true) : NULL;
    if (head == NULL) {
        size_t bytes;
        void *fresh = NULL;
        if (__builtin_add_overflow(size, (size_t)PAGE_BYTES, &bytes) ||
            posix_memalign(&fresh, PAGE_BYTES, bytes) != 0) {
            return NULL;
        }
        head = fresh;
        head->capacity = size;
        head->pages = true;
    }
    return (char *)head + PAGE_BYTES;
}

static void give(block_head *head)
{
    pthread_mutex_lock(&lock);
    if (head->capacity >= KEPT_BYTES_MIN && kept_count < KEPT_BLOCKS &&
        head->capacity <= KEPT_BYTES - kept_bytes) {
        kept[kept_count++] = head;
        kept_bytes += head->capacity;
        head = NULL;
    }
    pthread_mutex_unlock(&lock);
    free(head);
}

void ls_memory_give(void *block)
{
    if (block != NULL) {
        give((block_head *)block - 1);
    }
}

void ls_memory_give_pages(void *pages)
{
    if (pages != NULL) {
        give((void *)((char *)pages - PAGE_BYTES));
    }
}
