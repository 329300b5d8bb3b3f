#include "batch_keep.h"

#include <assert.h>
#include <string.h>

#include "crc32c.h"

/* Stores the record in [start, end) with another timestamp delta.  The record was walked before, so
 * its lengths are valid. */
static uint8_t *store_record(uint8_t *at, const uint8_t *start, const uint8_t *end,
                             int64_t timestamp_delta)
{
    int32_t length = 0;
    int64_t old_delta;
    const uint8_t *rest = start + ls_varint32_load(start, end, &length);
    rest++;                            /* attributes: written 0 */
    rest += ls_varint64_load(rest, end, &old_delta);
    uint64_t zigzag = ls_zigzag64(timestamp_delta);
    size_t body = 1 + ls_varint_size(zigzag) + (size_t)(end - rest);
    at = ls_varint_store(at, (uint64_t)body << 1);
    *at++ = 0;
    at = ls_varint_store(at, zigzag);
    memcpy(at, rest, (size_t)(end - rest));
    return at + (end - rest);
}

/* By how many bytes the timestamp delta and the length of a record may grow together. */
enum { RECORD_GROWTH = 10 + 5 };

ls_code ls_batch_keep(ls_bytes *out, const uint8_t *header, const ls_batch *batch,
                      const uint8_t *payload, size_t size, const uint8_t *keep,
                      int64_t last_offset, int64_t horizon)
{
    assert(last_offset >= batch->base_offset && last_offset <= batch->last_offset);
    size_t room;
    if (__builtin_mul_overflow((size_t)batch->record_count, (size_t)RECORD_GROWTH, &room) ||
        __builtin_add_overflow(room, size + LS_BATCH_HEADER_BYTES, &room) || !ls_bytes_reserve(out, room)) {
        return LS_E_NO_MEMORY;
    }
    uint8_t *start = out->data + out->size;
    uint8_t *at = start + LS_BATCH_HEADER_BYTES;
    int64_t base_timestamp = horizon;
    int64_t max_timestamp = -1;
    int32_t kept = 0;
    ls_records records;
    ls_record record;
    ls_code code;
    ls_records_open(&records, batch, payload, size);
    const uint8_t *from = records.at;
    for (int32_t i = 0; (code = ls_records_step(&records, &record)) == LS_OK; i++) {
        if (keep[i] != 0) {
            if (kept == 0 && horizon == LS_NO_HORIZON) {
                base_timestamp = record.timestamp;
            }
            if (base_timestamp == batch->base_timestamp && !records.log_append_time) {
                memcpy(at, from, (size_t)(records.at - from));
                at += records.at - from;
            } else {
                at = store_record(at, from, records.at,
                                  (int64_t)((uint64_t)record.timestamp - (uint64_t)base_timestamp));
            }
            if (kept == 0 || record.timestamp > max_timestamp) {
                max_timestamp = record.timestamp;
            }
            kept++;
        }
        from = records.at;
    }
    if (code != LS_END) {
        return code;
    }
    assert(kept > 0 && (size_t)(at - start) <= room);
    unsigned attributes = batch->attributes & ~(unsigned)LS_ATTR_DELETE_HORIZON & 0x7f;
    if (horizon != LS_NO_HORIZON) {
        attributes |= LS_ATTR_DELETE_HORIZON;
    }
    memcpy(start, header, LS_BATCH_HEADER_BYTES);
    ls_store_i16(start + LS_AT_ATTRIBUTES, (int16_t)attributes);
    ls_store_i32(start + LS_AT_LAST_OFFSET_DELTA, (int32_t)(last_offset - batch->base_offset));
    ls_store_i64(start + LS_AT_BASE_TIMESTAMP, base_timestamp);
    ls_store_i64(start + LS_AT_MAX_TIMESTAMP,
                 records.log_append_time ? batch->max_timestamp : max_timestamp);
    ls_store_i32(start + LS_AT_RECORD_COUNT, kept);
    out->size += (size_t)(at - start);
    return LS_OK;
}

ls_code ls_batch_keep_header(ls_bytes *out, const uint8_t *header)
{
    if (!ls_bytes_put(out, header, LS_BATCH_HEADER_BYTES)) {
        return LS_E_NO_MEMORY;
    }
    uint8_t *batch = out->data + out->size - LS_BATCH_HEADER_BYTES;
    const unsigned kept = LS_ATTR_LOG_APPEND_TIME | LS_ATTR_TRANSACTIONAL | LS_ATTR_CONTROL;
    ls_store_i16(batch + LS_AT_ATTRIBUTES, (int16_t)(batch[LS_AT_ATTRIBUTES + 1] & kept));
    ls_store_i64(batch + LS_AT_BASE_TIMESTAMP, -1);
    ls_store_i32(batch + LS_AT_RECORD_COUNT, 0);
    return LS_OK;
}

ls_code ls_batch_seal(ls_bytes *out, size_t at)
{
    uint8_t *batch = out->data + at;
    size_t size = out->size - at;
    if (size - LS_LOG_OVERHEAD_BYTES > INT32_MAX) {
        return LS_E_TOO_LARGE;
    }
    ls_store_i32(batch + LS_AT_LENGTH, (int32_t)(size - LS_LOG_OVERHEAD_BYTES));
    ls_store_u32(batch + LS_AT_CRC,
                 ls_crc32c(0, batch + LS_AT_ATTRIBUTES, size - LS_AT_ATTRIBUTES));
    return LS_OK;
}
