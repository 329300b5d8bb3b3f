/* Rewriting a log without some of its records, for compaction and for purging.
 *
 * The rules are Kafka's.  A batch that loses records keeps its base offset, last offset, leader epoch,
 * producer fields and kind; the records that stay keep offset, time, key, value and headers.  A batch
 * that loses no record is copied byte for byte.
 *
 * The cleaner does not compress or decompress: the caller does.
 */
#ifndef LS_CLEANER_H
#define LS_CLEANER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "aborted.h"
#include "batch.h"
#include "bytes.h"
#include "index.h"
#include "offset_map.h"
#include "status.h"

/* The last batch of a producer, whose header must stay. */
typedef struct {
    int64_t producer_id;
    int64_t last_offset;               /* of its last data; -1: only markers are known */
    int16_t epoch;
} ls_producer_end;

typedef struct {
    /* The newest offset of each key, for compaction.  NULL: purge the records that have `key`. */
    const ls_offset_map *map;
    const uint8_t *key;
    size_t key_size;
    int64_t start_offset;              /* a purge keeps records below this offset */
    int64_t end_offset;                /* the batch that ends here stays, if only its header */
    int64_t now_ms;
    int64_t delete_retention_ms;
    const ls_producer_end *producers;  /* by id */
    size_t producer_count;
    ls_transactions *transactions;     /* NULL for a purge */
} ls_clean_rules;

typedef struct {
    int64_t records_read, records_kept;
    int64_t bytes_read, bytes_kept;
    int64_t batches_read, batches_kept, batches_rewritten;
    int64_t superseded;                /* records deleted because a newer one has the key */
    int64_t tombstones;                /* tombstones deleted after their delete horizon */
    int64_t keyless;
    int64_t aborted;
    int64_t markers;
    int64_t purged;
    int64_t last_purged_offset;        /* -1: none */
} ls_clean_counts;

typedef struct {
    ls_clean_rules rules;
    ls_clean_counts counts;
    ls_bytes out;                      /* the caller writes it and sets out.size to 0 */
    int64_t out_position;              /* of out.data[0] in the new file */
    ls_index_tracker index;            /* of the new file */
    ls_bytes aborted;                  /* entries of the new file's .txnindex */
    ls_bytes keep;                     /* a verdict for each record of the batch at hand */
} ls_cleaner;

void ls_cleaner_init(ls_cleaner *cleaner, const ls_clean_rules *rules, int64_t base_offset,
                     int64_t interval_bytes);
void ls_cleaner_free(ls_cleaner *cleaner);

/* Whether a batch's records must be unpacked before ls_cleaner_batch can judge it. */
bool ls_cleaner_needs_payload(const ls_cleaner *cleaner, const ls_batch *batch);

/* Judges a verified batch and adds what is left of it to `out`.  `payload` holds its records,
 * unpacked.  With *pack set, out.data + *at is a batch whose records the caller has to pack before
 * ls_cleaner_finish_batch; otherwise the batch is done.
 * LS_OK, LS_E_CORRUPT with *reason, LS_E_TOO_LARGE, LS_E_NO_MEMORY. */
ls_code ls_cleaner_batch(ls_cleaner *cleaner, const uint8_t *data, const ls_batch *batch,
                         const uint8_t *payload, size_t size, bool *pack, size_t *at,
                         const char **reason);

/* The payload of the batch at `at`, the last of `out`, becomes `packed`. */
ls_code ls_cleaner_finish_batch(ls_cleaner *cleaner, size_t at, const uint8_t *packed, size_t size);

#endif
