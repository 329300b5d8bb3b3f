/* Record batch version 2 in memory: parse, verify, walk, build.  Knows no files.
 *
 * No length that was read from outside is trusted: each is compared with the rest of the buffer
 * before it is used.  No function keeps state between calls except in its arguments, so different
 * threads may use different objects concurrently.
 */
#ifndef LS_BATCH_H
#define LS_BATCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "format.h"
#include "status.h"

/* ---- one batch header ---- */

typedef struct {
    int64_t base_offset;
    int64_t last_offset;               /* base offset + last offset delta */
    int64_t base_timestamp;
    int64_t max_timestamp;
    int64_t producer_id;
    int64_t size;                      /* whole batch, header included */
    int32_t leader_epoch;
    int32_t base_sequence;
    int32_t record_count;
    uint32_t crc;
    int16_t producer_epoch;
    uint8_t attributes;
} ls_batch;

/* Reads a header.  `available` must be at least LS_BATCH_HEADER_BYTES; the batch itself may be
 * longer.  Only the rules that hold for every valid header are checked: a caller that uses the
 * records verifies the checksum first. */
ls_status ls_batch_parse(const uint8_t *data, size_t available, ls_batch *batch);

/* Returns whether `data` is a whole message of format 0 or 1, by its own checksum. */
bool ls_legacy_verify(const uint8_t *data, size_t size);

/* Whether the checksum of the whole batch at `data` (batch->size bytes) is right. */
bool ls_batch_verify(const uint8_t *data, const ls_batch *batch);

static inline unsigned ls_batch_codec(const ls_batch *batch)
{
    return batch->attributes & LS_ATTR_CODEC;
}

/* Returns whether the batch has a producer id or is a control batch. */
static inline bool ls_batch_has_producer(const ls_batch *batch)
{
    return batch->producer_id >= 0 || (batch->attributes & LS_ATTR_CONTROL) != 0;
}

/* ---- walking its records ---- */

typedef struct {
    int64_t offset;
    int64_t timestamp;
    const uint8_t *key;                /* all pointers point into the walked buffer */
    const uint8_t *value;
    const uint8_t *headers;            /* encoded; walk with ls_header_next */
    int32_t key_size;                  /* -1: null */
    int32_t value_size;                /* -1: null */
    int32_t header_count;
    int32_t headers_size;
} ls_record;

typedef struct {
    const uint8_t *at;
    const uint8_t *end;
    int64_t base_offset;
    int64_t base_timestamp;
    int64_t append_time;               /* every record's time when `log_append_time` */
    bool log_append_time;
    int32_t remaining;
    int32_t last_offset_delta;         /* of the batch: no record may have a greater one */
    int32_t previous_delta;
    const char *reason;                /* why the walk stopped, when it is corrupt */
} ls_records;

/* Returns whether `size` bytes of decompressed payload can hold the record count of the header.
 * Check it before allocating memory per record: the count is read from the disk. */
static inline bool ls_batch_count_fits(const ls_batch *batch, size_t size)
{
    return (size_t)batch->record_count <= size / LS_RECORD_BYTES_MIN;
}

extern const char ls_too_many_records[];

/* Starts a walk.  `payload`, the decompressed bytes after the header, must outlive the walk. */
void ls_records_open(ls_records *records, const ls_batch *batch, const uint8_t *payload,
                     size_t size);

/* Decodes the common record without a branch per byte: no headers, small numbers, and so many bytes
 * after it that no load passes the end of the buffer.  Returns false, and consumes nothing, for any
 * other record, at the end and at any damage: the caller then calls ls_records_next.  Every record
 * that is accepted here is accepted by ls_records_next with the same result. */
static inline bool ls_records_quick(ls_records *records, ls_record *record)
{
    enum { SLACK = 32 };
    const uint8_t *at = records->at;
    const uint8_t *end = records->end;
    uint32_t length, delta, size;
    if (end - at < SLACK || records->remaining == 0) {
        return false;
    }
    at = ls_varint_quick(at, &length);
    if (at == NULL || (length & 1) != 0 || (int64_t)(length >> 1) + SLACK > end - at ||
        length == 0) {
        return false;
    }
    const uint8_t *record_end = at + (length >> 1);
    uint32_t time;
    at = ls_varint_quick(at + 1, &time);
    if (at == NULL) {
        return false;
    }
    at = ls_varint_quick(at, &delta);
    if (at == NULL || (delta & 1) != 0) {
        return false;
    }
    int32_t offset_delta = (int32_t)(delta >> 1);
    if (offset_delta <= records->previous_delta || offset_delta > records->last_offset_delta ||
        at > record_end) {
        return false;
    }
    at = ls_varint_quick(at, &size);
    if (at == NULL || (size != 1 && ((size & 1) != 0 || (int64_t)(size >> 1) > record_end - at))) {
        return false;
    }
    record->key = at;
    record->key_size = size == 1 ? -1 : (int32_t)(size >> 1);
    at += size >> 1;                   /* 1, the null, adds nothing */
    at = ls_varint_quick(at, &size);
    if (at == NULL || (size != 1 && ((size & 1) != 0 || (int64_t)(size >> 1) > record_end - at))) {
        return false;
    }
    record->value = at;
    record->value_size = size == 1 ? -1 : (int32_t)(size >> 1);
    at += size >> 1;
    if (*at != 0 || at + 1 != record_end) {
        return false;
    }
    record->headers = record_end;
    record->headers_size = 0;
    record->header_count = 0;
    record->offset = records->base_offset + offset_delta;
    record->timestamp =
        records->log_append_time
            ? records->append_time
            : (int64_t)((uint64_t)records->base_timestamp + (uint64_t)ls_unzigzag64(time));
    records->previous_delta = offset_delta;
    records->remaining--;
    records->at = record_end;
    return true;
}

/* LS_OK with the next record; LS_END after the last when the payload is used up exactly;
 * LS_E_CORRUPT with records->reason otherwise. */
ls_code ls_records_next(ls_records *records, ls_record *record);

/* The same as ls_records_next, and quicker for common records. */
static inline ls_code ls_records_step(ls_records *records, ls_record *record)
{
    return ls_records_quick(records, record) ? LS_OK : ls_records_next(records, record);
}

typedef struct {
    const uint8_t *name;
    const uint8_t *value;
    int32_t name_size;
    int32_t value_size;                /* -1: null */
} ls_header;

/* Walks headers that ls_records_next has already checked.  Advances *at. */
void ls_header_next(const uint8_t **at, const uint8_t *end, ls_header *header);

/* ---- building batches ---- */

typedef struct {
    int64_t timestamp;
    const uint8_t *key;
    const uint8_t *value;
    const uint8_t *headers;            /* encoded by ls_header_store, one after the other */
    size_t headers_size;
    int32_t key_size;                  /* -1: null */
    int32_t value_size;                /* -1: null */
    int32_t header_count;
} ls_new_record;

size_t ls_header_size(int32_t name_size, int32_t value_size);
uint8_t *ls_header_store(uint8_t *at, const uint8_t *name, int32_t name_size,
                         const uint8_t *value, int32_t value_size);

/* An arena: sealed batches without gaps between them, then at most one open batch.  Base offsets
 * count from 0 until the log assigns them. */
typedef struct {
    uint8_t *data;
    size_t size;                       /* bytes used, the open batch included */
    size_t capacity;
    size_t open_at;                    /* where the open batch starts; == size when none is open */
    size_t batch_bytes;                /* an open batch is full beyond this */
    size_t batch_bytes_max;            /* a batch of one record beyond this is refused */
    int64_t base_timestamp;            /* of the open batch */
    int64_t max_timestamp;
    int64_t records;                   /* all records in the arena */
    int64_t arena_max_timestamp;       /* over all records in the arena, -1 if none */
    int64_t arena_min_timestamp;       /* the same; INT64_MAX if none */
    int32_t open_count;
    bool packed;                       /* the sealed batches are compressed already */
} ls_builder;

void ls_builder_init(ls_builder *builder, size_t batch_bytes, size_t batch_bytes_max);
void ls_builder_free(ls_builder *builder);
void ls_builder_clear(ls_builder *builder);

/* Allocates memory for `bytes` more bytes at once.  Returns false if there is none. */
bool ls_builder_reserve(ls_builder *builder, size_t bytes);

/* LS_OK; LS_END when the open batch is full and must be sealed first; LS_E_TOO_LARGE;
 * LS_E_NO_MEMORY.  On anything but LS_OK the arena is as it was. */
ls_code ls_builder_add(ls_builder *builder, const ls_new_record *record);

/* Bytes a batch of just this record would take. */
size_t ls_builder_batch_size(const ls_new_record *record);

/* Adds a sealed batch: the header at `header` with another payload (the compressed records). */
ls_code ls_builder_put_batch(ls_builder *builder, const uint8_t *header, const uint8_t *payload,
                             size_t size);

/* Writes the header of the open batch, but for what ls_batches_finish adds.  No-op without one. */
void ls_builder_seal(ls_builder *builder, uint8_t codec);

/* Sets the producer and the sequences from `base_sequence` on in the sealed batches of a builder.
 * Returns the sequence after the last record.  ls_batches_finish sets the checksums afterwards. */
int32_t ls_batches_stamp(uint8_t *data, size_t size, int64_t producer_id, int16_t producer_epoch,
                         int32_t base_sequence, bool transactional);

/* Gives sealed batches their place in the log and their checksums.  With `append_time` >= 0 they
 * become LogAppendTime batches of that time.  Returns the offset after the last record. */
int64_t ls_batches_finish(uint8_t *data, size_t size, int64_t base_offset, int32_t leader_epoch,
                          int64_t append_time);

#endif
