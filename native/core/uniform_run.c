#include "uniform_run.h"

#include <string.h>

enum { SLACK = 32 };                   /* bytes after a record, as in ls_records_quick */

static uint64_t load64(const uint8_t *p)
{
    uint64_t word;
    memcpy(&word, p, sizeof word);
    return word;
}

static uint32_t load32(const uint8_t *p)
{
    uint32_t word;
    memcpy(&word, p, sizeof word);
    return word;
}

/* Of a varint that ls_varint_quick has taken: at most three. */
static size_t varint_bytes(const uint8_t *p)
{
    return p[0] < 0x80 ? 1 : p[1] < 0x80 ? 2 : 3;
}

/* The first 16 bytes of a record of the run, up to its key, under a mask. */
typedef struct {
    uint8_t mask[16];
    uint8_t bytes[16];
} run_shape;

static void require(run_shape *shape, const uint8_t *record, size_t at, size_t size, uint8_t mask)
{
    for (size_t i = at; i < at + size; i++) {
        shape->mask[i] = mask;
        shape->bytes[i] = record[i] & mask;
    }
}

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* Returns how many records after the first, which ends at `records->at`, can belong to its run: at
 * most as many as there are bytes and records left, and only while the next offset delta differs from
 * the one before in one byte. */
static size_t followers(const ls_records *records, size_t stride, size_t rows_max)
{
    ptrdiff_t left = records->end - records->at - SLACK;
    size_t rows = left < 0 ? 0 : (size_t)left / stride;
    rows = least(rows, (size_t)records->remaining);
    rows = least(rows, (size_t)(records->last_offset_delta - records->previous_delta));
    rows = least(rows, 63 - ((size_t)records->previous_delta & 63));
    return least(rows, rows_max - 1);
}

/* A run of one row: the record of `stride` bytes at `first`. */
static inline void start_run(ls_uniform_run *run, const uint8_t *first, size_t stride,
                             const ls_record *record)
{
    run->first = first;
    run->rows = 1;
    run->key = record->key;
    run->value = record->value;
    run->offset = record->offset;
    run->stride = stride;
    run->key_size = record->key_size;
    run->value_size = record->value_size;
}

size_t ls_uniform_run_take(ls_records *records, ls_uniform_run *run,
                           int64_t timestamps[LS_UNIFORM_RUN_ROWS], size_t rows_max)
{
    const uint8_t *first = records->at;
    ls_records before = *records;
    ls_record record;
    if (rows_max == 0 || !ls_records_quick(records, &record)) {
        return 0;
    }
    size_t stride = (size_t)(records->at - first);
    if (stride > LS_UNIFORM_RUN_STRIDE_MAX) {
        *records = before;
        return 0;
    }
    start_run(run, first, stride, &record);
    timestamps[0] = record.timestamp;
    size_t more = followers(records, stride, least(rows_max, LS_UNIFORM_RUN_ROWS));
    if (more == 0) {
        return 1;
    }

    size_t length_bytes = varint_bytes(first);
    size_t time_at = length_bytes + 1; /* the record attributes between them are ignored */
    size_t time_bytes = varint_bytes(first + time_at);
    size_t delta_at = time_at + time_bytes;
    size_t delta_bytes = varint_bytes(first + delta_at);
    size_t key_length_at = delta_at + delta_bytes;
    size_t key_at = (size_t)(record.key - first);
    size_t value_at = (size_t)(record.value - first);
    size_t value_length_at = key_at + (record.key_size < 0 ? 0 : (size_t)record.key_size);
    run_shape wanted = {{0}, {0}};
    require(&wanted, first, 0, length_bytes, 0xff);
    require(&wanted, first, time_at, time_bytes, 0x80);
    require(&wanted, first, delta_at, delta_bytes, 0xff);
    require(&wanted, first, key_length_at, key_at - key_length_at, 0xff);
    uint64_t low = load64(wanted.bytes), low_mask = load64(wanted.mask);
    uint64_t high = load64(wanted.bytes + 8), high_mask = load64(wanted.mask + 8);
    uint64_t low_step = delta_at < 8 ? 2ull << (8 * delta_at) : 0;
    uint64_t high_step = delta_at < 8 ? 0 : 2ull << (8 * (delta_at - 8));
    /* The value's length, in the last bytes of the word that ends where the value starts. */
    uint32_t value_mask = ~0u << (8 * (4 - (value_at - value_length_at)));
    uint32_t value_word = load32(first + value_at - 4) & value_mask;
    uint32_t time_mask = ~0u >> (8 * (4 - time_bytes));
    uint64_t base_timestamp = (uint64_t)records->base_timestamp;

    const uint8_t *at = first;
    size_t rows = 1;
    for (; rows <= more; rows++) {
        const uint8_t *next = at + stride;
        low += low_step;
        high += high_step;
        uint64_t unlike = ((load64(next) ^ low) & low_mask) | ((load64(next + 8) ^ high) & high_mask) |
                          ((load32(next + value_at - 4) & value_mask) ^ value_word) |
                          next[stride - 1];    /* no headers */
        if (unlike != 0) {
            break;
        }
        uint32_t word = load32(next + time_at) & time_mask;
        uint32_t zigzag =
            (word & 0x7f) | (word >> 1 & 0x3f80) | (word >> 2 & 0x1fc000);
        timestamps[rows] = (int64_t)(base_timestamp + (uint64_t)ls_unzigzag64(zigzag));
        at = next;
    }
    if (records->log_append_time) {
        for (size_t i = 1; i < rows; i++) {
            timestamps[i] = records->append_time;
        }
    }
    records->at = at + stride;
    records->remaining -= (int32_t)(rows - 1);
    records->previous_delta += (int32_t)(rows - 1);
    run->rows = rows;
    return rows;
}
