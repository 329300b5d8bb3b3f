/* Index entries: sorted, fixed-width, big-endian, byte for byte as in the .index and .timeindex files.
 * An entry is a hint: a reader checks the batch at the position of the entry.
 *
 * ls_index_track is the only function that adds entries, for live appends and for recovery, so that
 * a rebuilt index equals the index that it replaces.
 */
#ifndef LS_INDEX_H
#define LS_INDEX_H

#include <stddef.h>
#include <stdint.h>

#include "batch.h"
#include "status.h"

/* Greatest entry whose first field is <= target.  Returns its number, or -1 when all are greater.
 * `entries` holds `count` entries of the given kind; order is not trusted, only bounds are. */
int64_t ls_offset_index_search(const uint8_t *entries, size_t count, int32_t relative_offset);
/* The same by the second field, the position. */
int64_t ls_position_search(const uint8_t *entries, size_t count, int64_t position);
int64_t ls_time_index_search(const uint8_t *entries, size_t count, int64_t timestamp);

typedef struct {
    uint8_t *data;
    size_t size;
    size_t capacity;
} ls_entries;

/* Replaces the entries by a copy of `size` bytes.  Returns false if there is no memory. */
bool ls_entries_copy(ls_entries *entries, const void *data, size_t size);
/* Returns the memory of one more entry; NULL, and nothing changed, if there is no memory. */
uint8_t *ls_entries_add(ls_entries *entries, size_t bytes);
void ls_entries_free(ls_entries *entries);

typedef struct {
    int64_t base_offset;
    int64_t interval_bytes;
    int64_t last_indexed_position;     /* the byte counter of Kafka's rule, as a position */
    int64_t max_timestamp;             /* -1 before the first batch */
    int64_t max_timestamp_offset;      /* last offset of the earliest batch that has it */
    int64_t last_time_entry;           /* timestamp of the newest time entry, -1 if none */
    ls_entries offsets;
    ls_entries times;
} ls_index_tracker;

void ls_index_tracker_init(ls_index_tracker *tracker, int64_t base_offset, int64_t interval_bytes);
void ls_index_tracker_free(ls_index_tracker *tracker);

/* Takes note of a batch at `position`; adds entries when the interval is passed. */
ls_code ls_index_track(ls_index_tracker *tracker, const ls_batch *batch, int64_t position);

/* The final time entry of a segment, written when it is sealed or closed. */
ls_code ls_index_finish(ls_index_tracker *tracker);

#endif
