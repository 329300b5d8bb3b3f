/* What a test of the core needs: CHECK, which stops at the first lie with its place. */
#ifndef LS_TESTS_CHECK_H
#define LS_TESTS_CHECK_H

#include <stdio.h>
#include <stdlib.h>

/* Not assert(): it must stand with NDEBUG too, and fuzzers need abort() to see the failure. */
#define CHECK(condition)                                                                     \
    do {                                                                                     \
        if (!(condition)) {                                                                  \
            fprintf(stderr, "%s:%d: %s: CHECK failed: %s\n", __FILE__, __LINE__, __func__,   \
                    #condition);                                                             \
            abort();                                                                         \
        }                                                                                    \
    } while (0)

#endif
