/* A run: neighbouring records of one shape.
 *
 * Most logs hold long stretches of records that differ only in their time, their next offset and
 * the bytes of key and value: every length is the same.  Then nothing needs to be decoded to find
 * the next record, so the processor can work on several at once instead of waiting for each length,
 * and the fields are at a fixed distance from each other.
 */
#ifndef LS_UNIFORM_RUN_H
#define LS_UNIFORM_RUN_H

#include <stddef.h>
#include <stdint.h>

#include "batch.h"

enum {
    LS_UNIFORM_RUN_ROWS = 64,                  /* at most */
    LS_UNIFORM_RUN_STRIDE_MAX = 8192,
};

typedef struct {
    const uint8_t *first;              /* where the first record starts */
    const uint8_t *key;                /* of the first record */
    const uint8_t *value;
    int64_t offset;                    /* of the first record; the others' follow without a gap */
    size_t rows;
    size_t stride;                     /* bytes from one record to the next */
    int32_t key_size;                  /* -1: null */
    int32_t value_size;                /* -1: null */
} ls_uniform_run;

/* Takes up to `rows_max` records off the walk and fills in `timestamps`.  Returns their number; 0, and
 * nothing consumed, if ls_records_quick does not accept the next record or the record is too large.
 * Every record that is accepted here is accepted by ls_records_next with the same result; 32 bytes
 * after it can be read. */
size_t ls_uniform_run_take(ls_records *records, ls_uniform_run *run,
                           int64_t timestamps[LS_UNIFORM_RUN_ROWS], size_t rows_max);

/* Shorter runs than this cost more than they bring: the caller then takes some records one by one
 * before it looks for a run again. */
enum { LS_UNIFORM_RUN_SHORT = 4 };

#endif
