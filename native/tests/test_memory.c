/* The pool of large blocks, and a fork in the middle of its use. */
#define _DEFAULT_SOURCE
#include "check.h"
#include "memory.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { LARGE = 1 << 20 };

static void a_released_block_is_used_again(void)
{
    char *block = ls_memory_take(LARGE);
    CHECK(block != NULL && (uintptr_t)block % 64 == 0);
    memset(block, 1, LARGE + LS_MEMORY_SLACK);
    ls_memory_give(block);
    char *again = ls_memory_take(LARGE - 1000);
    CHECK(again == block);
    char *larger = ls_memory_grow(again, 100, 3 * LARGE);
    CHECK(larger != NULL && larger[99] == 1);
    ls_memory_give(larger);
    ls_memory_give(NULL);
    CHECK(ls_memory_take(SIZE_MAX) == NULL);
}

static void released_pages_are_used_again_and_stay_pages(void)
{
    char *pages = ls_memory_pages(LARGE);
    CHECK(pages != NULL && (uintptr_t)pages % 4096 == 0);
    memset(pages, 1, LARGE);
    ls_memory_give_pages(pages);
    char *block = ls_memory_take(LARGE);
    CHECK(block != NULL && block != pages);
    CHECK(ls_memory_pages(LARGE - 10) == pages);
    ls_memory_give(block);
    ls_memory_give_pages(pages);
    ls_memory_give_pages(NULL);
    CHECK(ls_memory_pages(SIZE_MAX) == NULL);
    char *small = ls_memory_pages(100);
    CHECK(small != NULL && (uintptr_t)small % 4096 == 0);
    ls_memory_give_pages(small);
}

static atomic_bool stop;

static void *use_without_pause(void *unused)
{
    while (!atomic_load(&stop)) {
        ls_memory_give(ls_memory_take(LARGE));
    }
    return unused;
}

static void a_child_can_use_the_pool_that_a_thread_of_its_parent_was_using(void)
{
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) {
        CHECK(pthread_create(&threads[i], NULL, use_without_pause, NULL) == 0);
    }
    for (int round = 0; round < 300; round++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            alarm(20);                 /* a lock that nobody holds any more is waited for in vain */
            ls_memory_give(ls_memory_take(LARGE));
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    atomic_store(&stop, true);
    for (int i = 0; i < 2; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
}

int main(void)
{
    a_released_block_is_used_again();
    released_pages_are_used_again_and_stay_pages();
    a_child_can_use_the_pool_that_a_thread_of_its_parent_was_using();
    printf("        test_memory: 3 tests passed\n");
    return 0;
}
