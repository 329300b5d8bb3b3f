/* Checks of a batch that came from outside, before it is written. */
#ifndef LS_BATCH_CHECK_H
#define LS_BATCH_CHECK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "batch.h"
#include "lz4_frame.h"

/* What a walk over the records of a batch finds. */
typedef struct {
    ls_code code;                      /* LS_END: every length fits */
    bool ordered;                      /* offsets run from the base offset without a gap */
    bool timed;                        /* no timestamp is below -1 */
    int64_t least;                     /* timestamps of -1 (none) do not count; -1 without any */
    int64_t greatest;
    int64_t oldest;                    /* the least timestamp; -1 does count */
    int64_t keyless;
} ls_record_walk;

/* Walks to the end, or to the first record that does not fit.  The times are the records' own. */
void ls_records_walk(ls_records *records, ls_record_walk *walk);

/* Whether `data` is one uncompressed batch with a right checksum and right records.  Fills in both
 * structs if it is. */
bool ls_batch_check(const uint8_t *data, size_t size, ls_batch *batch, ls_record_walk *walk);

/* The same for a batch that is compressed with lz4, in the frame that Kafka writes.  False also if its
 * records may take more than `content_max` bytes, and without memory for them. */
bool ls_batch_check_lz4(const uint8_t *data, size_t size, ls_lz4_decode decode, int64_t content_max,
                        ls_batch *batch, ls_record_walk *walk);

/* The rules of a topic for a batch that is written as it is.  Times are milliseconds. */
typedef struct {
    int64_t size_max;                  /* bytes of the batch */
    int64_t before_max;                /* how far a record's time may be in the past */
    int64_t after_max;                 /* and in the future */
    bool keyed;                        /* every record needs a key */
} ls_batch_rules;

/* Whether a client's batch keeps the rules at the time `now`, with attributes that need no other look:
 * none is set, and it has no producer.  False is no error: the caller finds the reason, or writes the
 * batch by another way.  `data` holds what was checked. */
bool ls_batch_is_plain(const uint8_t *data, const ls_batch *batch, const ls_record_walk *walk,
                       const ls_batch_rules *rules, int64_t now);

#endif
