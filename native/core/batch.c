#include "batch.h"

#include <assert.h>
#include <stdlib.h>

#include "crc32c.h"
#include "memory.h"

const char ls_too_many_records[] = "more records than its bytes can hold";

ls_status ls_batch_parse(const uint8_t *data, size_t available, ls_batch *batch)
{
    assert(available >= LS_BATCH_HEADER_BYTES);
    (void)available;
    uint8_t magic = data[LS_AT_MAGIC];
    int32_t length = ls_load_i32(data + LS_AT_LENGTH);
    if (magic < 2 && length >= 14) {
        return ls_fail(LS_E_LEGACY, -1, "message format 0 or 1");
    }
    if (magic != 2) {
        return ls_fail(LS_E_CORRUPT, -1, "the magic byte is not 2");
    }
    if (length < LS_LENGTH_MIN) {
        return ls_fail(LS_E_CORRUPT, -1, "the batch length is smaller than a header");
    }
    batch->base_offset = ls_load_i64(data + LS_AT_BASE_OFFSET);
    batch->size = (int64_t)length + LS_LOG_OVERHEAD_BYTES;
    batch->leader_epoch = ls_load_i32(data + LS_AT_LEADER_EPOCH);
    batch->crc = ls_load_u32(data + LS_AT_CRC);
    batch->attributes = data[LS_AT_ATTRIBUTES + 1];
    batch->base_timestamp = ls_load_i64(data + LS_AT_BASE_TIMESTAMP);
    batch->max_timestamp = ls_load_i64(data + LS_AT_MAX_TIMESTAMP);
    batch->producer_id = ls_load_i64(data + LS_AT_PRODUCER_ID);
    batch->producer_epoch = ls_load_i16(data + LS_AT_PRODUCER_EPOCH);
    batch->base_sequence = ls_load_i32(data + LS_AT_BASE_SEQUENCE);
    batch->record_count = ls_load_i32(data + LS_AT_RECORD_COUNT);
    int32_t delta = ls_load_i32(data + LS_AT_LAST_OFFSET_DELTA);
    if (batch->base_offset < 0 || batch->base_offset > LS_BASE_OFFSET_MAX) {
        return ls_fail(LS_E_CORRUPT, -1, "the base offset is out of range");
    }
    if (delta < 0 || batch->record_count < 0 || (int64_t)batch->record_count > (int64_t)delta + 1) {
        return ls_fail(LS_E_CORRUPT, -1, "the record count does not fit the offset range");
    }
    if (ls_batch_codec(batch) == LS_CODEC_NONE &&
        !ls_batch_count_fits(batch, (size_t)batch->size - LS_BATCH_HEADER_BYTES)) {
        return ls_fail(LS_E_CORRUPT, -1, ls_too_many_records);
    }
    batch->last_offset = batch->base_offset + delta;
    return ls_ok();
}

bool ls_legacy_verify(const uint8_t *data, size_t size)
{
    /* CRC-32 (not CRC-32C), bit by bit: it runs once, before LS_E_LEGACY is returned. */
    uint32_t crc = 0xffffffffu;
    for (size_t i = LS_MAGIC_BYTES - 1; i < size; i++) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; bit++) {
            crc = (crc & 1) ? (crc >> 1) ^ 0xedb88320u : crc >> 1;
        }
    }
    return size >= LS_MAGIC_BYTES && ~crc == ls_load_u32(data + LS_LOG_OVERHEAD_BYTES);
}

bool ls_batch_verify(const uint8_t *data, const ls_batch *batch)
{
    size_t covered = (size_t)batch->size - LS_AT_ATTRIBUTES;
    return ls_crc32c(0, data + LS_AT_ATTRIBUTES, covered) == batch->crc;
}

/* ---- walking ---- */

void ls_records_open(ls_records *records, const ls_batch *batch, const uint8_t *payload,
                     size_t size)
{
    records->at = payload;
    records->end = payload + size;
    records->base_offset = batch->base_offset;
    records->base_timestamp = batch->base_timestamp;
    records->append_time = batch->max_timestamp;
    records->log_append_time = (batch->attributes & LS_ATTR_LOG_APPEND_TIME) != 0;
    records->remaining = batch->record_count;
    records->last_offset_delta = (int32_t)(batch->last_offset - batch->base_offset);
    records->previous_delta = -1;
    records->reason = "";
}

static ls_code bad_record(ls_records *records, const char *reason)
{
    records->reason = reason;
    return LS_E_CORRUPT;
}

/* One byte is by far the most common size: take it without a call. */
static inline bool take32(const uint8_t **at, const uint8_t *end, int32_t *out)
{
    const uint8_t *p = *at;
    if (p < end && *p < 0x80) {
        *out = (int32_t)((uint32_t)(*p >> 1) ^ (0u - (uint32_t)(*p & 1)));
        *at = p + 1;
        return true;
    }
    size_t n = ls_varint32_load(p, end, out);
    *at = p + n;
    return n != 0;
}

static bool check_headers(const uint8_t *at, const uint8_t *end, int32_t count)
{
    for (int32_t i = 0; i < count; i++) {
        int32_t size;
        if (!take32(&at, end, &size) || size < 0 || size > end - at) {
            return false;
        }
        at += size;
        if (!take32(&at, end, &size) || (size > 0 && size > end - at)) {
            return false;
        }
        at += size > 0 ? size : 0;
    }
    return at == end;
}

ls_code ls_records_next(ls_records *records, ls_record *record)
{
    const uint8_t *at = records->at;
    if (records->remaining == 0) {
        return at == records->end ? LS_END : bad_record(records, "bytes left after the last record");
    }
    int32_t length;
    if (!take32(&at, records->end, &length) || length < 0 || length > records->end - at) {
        return bad_record(records, "a record's length reaches beyond its batch");
    }
    const uint8_t *end = at + length;
    if (length == 0) {
        return bad_record(records, "an empty record");
    }
    at++;                              /* record attributes: unused, written 0, ignored */
    int64_t timestamp_delta;
    if (at < end && *at < 0x80) {
        timestamp_delta = (int64_t)((uint64_t)(*at >> 1) ^ (0u - (uint64_t)(*at & 1)));
        at++;
    } else {
        size_t n = ls_varint64_load(at, end, &timestamp_delta);
        if (n == 0) {
            return bad_record(records, "a record's timestamp cannot be read");
        }
        at += n;
    }
    int32_t delta, size;
    if (!take32(&at, end, &delta) || delta <= records->previous_delta ||
        delta > records->last_offset_delta) {
        return bad_record(records, "record offsets do not increase within their batch");
    }
    if (!take32(&at, end, &size) || (size > 0 && size > end - at)) {
        return bad_record(records, "a key reaches beyond its record");
    }
    record->key = at;
    record->key_size = size < 0 ? -1 : size;
    at += size < 0 ? 0 : size;
    if (!take32(&at, end, &size) || (size > 0 && size > end - at)) {
        return bad_record(records, "a value reaches beyond its record");
    }
    record->value = at;
    record->value_size = size < 0 ? -1 : size;
    at += size < 0 ? 0 : size;
    int32_t header_count;
    if (!take32(&at, end, &header_count) || header_count < 0 || header_count > end - at) {
        return bad_record(records, "the header count cannot be right");
    }
    if (header_count != 0) {
        if (!check_headers(at, end, header_count)) {
            return bad_record(records, "headers do not fill their record exactly");
        }
    } else if (at != end) {
        return bad_record(records, "a record is longer than what it holds");
    }
    record->headers = at;
    record->headers_size = (int32_t)(end - at);
    record->header_count = header_count;
    record->offset = records->base_offset + delta;
    /* Unsigned: a hostile delta may wrap, which is wrong but defined. */
    record->timestamp = records->log_append_time
                            ? records->append_time
                            : (int64_t)((uint64_t)records->base_timestamp + (uint64_t)timestamp_delta);
    records->previous_delta = delta;
    records->remaining--;
    records->at = end;
    return LS_OK;
}

void ls_header_next(const uint8_t **at, const uint8_t *end, ls_header *header)
{
    bool ok = take32(at, end, &header->name_size);
    header->name = *at;
    *at += header->name_size;
    ok = ok && take32(at, end, &header->value_size);
    assert(ok && "headers were checked by ls_records_next");
    (void)ok;
    header->value = *at;
    if (header->value_size < 0) {
        header->value_size = -1;
    } else {
        *at += header->value_size;
    }
}

/* ---- building ---- */

size_t ls_header_size(int32_t name_size, int32_t value_size)
{
    return ls_varint_size(ls_zigzag32(name_size)) + (size_t)name_size +
           ls_varint_size(ls_zigzag32(value_size)) + (value_size < 0 ? 0 : (size_t)value_size);
}

uint8_t *ls_header_store(uint8_t *at, const uint8_t *name, int32_t name_size,
                         const uint8_t *value, int32_t value_size)
{
    at = ls_varint_store(at, ls_zigzag32(name_size));
    memcpy(at, name, (size_t)name_size);
    at = ls_varint_store(at + name_size, ls_zigzag32(value_size));
    if (value_size > 0) {
        memcpy(at, value, (size_t)value_size);
        at += value_size;
    }
    return at;
}

void ls_builder_init(ls_builder *builder, size_t batch_bytes, size_t batch_bytes_max)
{
    memset(builder, 0, sizeof *builder);
    builder->batch_bytes = batch_bytes;
    builder->batch_bytes_max = batch_bytes_max;
    builder->arena_max_timestamp = -1;
    builder->arena_min_timestamp = INT64_MAX;
}

void ls_builder_free(ls_builder *builder)
{
    ls_memory_give_pages(builder->data);
    builder->data = NULL;
    builder->capacity = 0;
    ls_builder_clear(builder);
}

void ls_builder_clear(ls_builder *builder)
{
    builder->size = 0;
    builder->open_at = 0;
    builder->open_count = 0;
    builder->records = 0;
    builder->arena_max_timestamp = -1;
    builder->arena_min_timestamp = INT64_MAX;
    builder->packed = false;
}

/* Makes sure that `bytes` more fit, plus slack so that copies may overshoot by a vector. */
static bool reserve(ls_builder *builder, size_t bytes)
{
    size_t need;
    if (__builtin_add_overflow(builder->size, bytes, &need) ||
        __builtin_add_overflow(need, (size_t)64, &need)) {
        return false;
    }
    if (need <= builder->capacity) {
        return true;
    }
    size_t capacity = builder->capacity < 4096 ? 4096 : builder->capacity;
    while (capacity < need) {
        if (__builtin_add_overflow(capacity, capacity / 2, &capacity)) {
            return false;
        }
    }
    uint8_t *data = ls_memory_pages(capacity);
    if (data == NULL) {
        return false;
    }
    if (builder->size > 0) {
        memcpy(data, builder->data, builder->size);
    }
    ls_memory_give_pages(builder->data);
    builder->data = data;
    builder->capacity = capacity;
    return true;
}

bool ls_builder_reserve(ls_builder *builder, size_t bytes)
{
    return reserve(builder, bytes);
}

static size_t body_size(const ls_new_record *record, int64_t timestamp_delta, int32_t offset_delta)
{
    return 1 + ls_varint_size(ls_zigzag64(timestamp_delta)) +
           ls_varint_size(ls_zigzag32(offset_delta)) +
           ls_varint_size(ls_zigzag32(record->key_size)) +
           (record->key_size < 0 ? 0 : (size_t)record->key_size) +
           ls_varint_size(ls_zigzag32(record->value_size)) +
           (record->value_size < 0 ? 0 : (size_t)record->value_size) +
           ls_varint_size(ls_zigzag32(record->header_count)) + record->headers_size;
}

size_t ls_builder_batch_size(const ls_new_record *record)
{
    size_t body = body_size(record, 0, 0);
    return LS_BATCH_HEADER_BYTES + ls_varint_size((uint64_t)body << 1) + body;
}

/* Short values by whole vectors, the last one overlapping: nothing beyond either end is touched. */
static inline uint8_t *put_bytes(uint8_t *at, const uint8_t *source, size_t size)
{
    if (size >= 32 && size <= 256) {
        for (size_t i = 0; i + 32 < size; i += 32) {
            memcpy(at + i, source + i, 32);
        }
        memcpy(at + size - 32, source + size - 32, 32);
    } else if (size != 0) {
        memcpy(at, source, size);
    }
    return at + size;
}

/* Adds a varint of at most two bytes to a little-endian word whose first `used` bytes are in use. */
static inline unsigned pack_short(uint64_t *word, unsigned used, uint32_t zigzag)
{
    if (zigzag < 0x80) {
        *word |= (uint64_t)zigzag << (8 * used);
        return used + 1;
    }
    uint64_t both = (zigzag & 0x7f) | 0x80 | zigzag >> 7 << 8;
    *word |= both << (8 * used);
    return used + 2;
}

/* Adds the record of most logs: a value of moderate size, no key, no headers, a timestamp shortly
 * after the batch's first.  All fields before the value fit one word.  Returns false, and does
 * nothing, for any other record. */
static inline bool add_plain(ls_builder *builder, const ls_new_record *record)
{
    enum { SHORT_MAX = 8191, TIME_MAX = 63, WORD = 8 };
    uint64_t later = (uint64_t)record->timestamp - (uint64_t)builder->base_timestamp;
    if (record->key_size >= 0 || record->header_count != 0 || builder->open_count == 0 ||
        builder->open_count > SHORT_MAX || later > TIME_MAX || record->value_size < 0 ||
        record->value_size > SHORT_MAX - 16) {
        return false;
    }
    uint32_t size = (uint32_t)record->value_size;
    uint32_t delta = (uint32_t)builder->open_count << 1;
    uint32_t body = 4u + (delta < 0x80 ? 1u : 2u) + (size < 0x40 ? 1u : 2u) + size;
    size_t need = body + (body < 0x40 ? 1 : 2);
    if (builder->size - builder->open_at + need > builder->batch_bytes ||
        !reserve(builder, need + WORD)) {
        return false;
    }
    uint64_t word = 0;
    unsigned used = pack_short(&word, 0, body << 1) + 1;   /* attributes: 0 */
    word |= later << 1 << (8 * used++);
    used = pack_short(&word, used, delta);
    word |= 1ull << (8 * used++);                          /* no key */
    uint8_t *at = builder->data + builder->size;
    memcpy(at, &word, WORD);                               /* at most seven count */
    at = ls_varint_store(at + used, size << 1);
    at = put_bytes(at, record->value, size);
    *at++ = 0;                                             /* no headers */
    assert(at == builder->data + builder->size + need);
    if (record->timestamp > builder->max_timestamp) {
        builder->max_timestamp = record->timestamp;
    }
    builder->size += need;
    builder->open_count++;
    builder->records++;
    return true;
}

ls_code ls_builder_add(ls_builder *builder, const ls_new_record *record)
{
    if (add_plain(builder, record)) {
        return LS_OK;
    }
    bool first = builder->open_count == 0;
    /* Unsigned: -1 and the greatest time may meet; the walker wraps back the same way. */
    int64_t timestamp_delta =
        first ? 0 : (int64_t)((uint64_t)record->timestamp - (uint64_t)builder->base_timestamp);
    size_t body = body_size(record, timestamp_delta, builder->open_count);
    size_t need = ls_varint_size((uint64_t)body << 1) + body;
    if (first) {
        if (need > builder->batch_bytes_max ||
            need + LS_BATCH_HEADER_BYTES > builder->batch_bytes_max) {
            return LS_E_TOO_LARGE;
        }
        need += LS_BATCH_HEADER_BYTES;
    } else if (builder->size - builder->open_at + need > builder->batch_bytes ||
               builder->open_count == INT32_MAX) {
        return LS_END;
    }
    if (!reserve(builder, need)) {
        return LS_E_NO_MEMORY;
    }
    uint8_t *at = builder->data + builder->size;
    if (first) {
        at += LS_BATCH_HEADER_BYTES;
        builder->base_timestamp = record->timestamp;
        builder->max_timestamp = record->timestamp;
    } else if (record->timestamp > builder->max_timestamp) {
        builder->max_timestamp = record->timestamp;
    }
    if (record->timestamp < builder->arena_min_timestamp) {
        builder->arena_min_timestamp = record->timestamp;   /* the first of a batch, too */
    }
    at = ls_varint_store(at, (uint64_t)body << 1);
    *at++ = 0;
    at = ls_varint_store(at, ls_zigzag64(timestamp_delta));
    at = ls_varint_store(at, ls_zigzag32(builder->open_count));
    at = ls_varint_store(at, ls_zigzag32(record->key_size));
    if (record->key_size > 0) {
        at = put_bytes(at, record->key, (size_t)record->key_size);
    }
    at = ls_varint_store(at, ls_zigzag32(record->value_size));
    if (record->value_size > 0) {
        at = put_bytes(at, record->value, (size_t)record->value_size);
    }
    at = ls_varint_store(at, ls_zigzag32(record->header_count));
    if (record->headers_size > 0) {
        memcpy(at, record->headers, record->headers_size);
        at += record->headers_size;
    }
    assert(at == builder->data + builder->size + need);
    builder->size += need;
    builder->open_count++;
    builder->records++;
    return LS_OK;
}

ls_code ls_builder_put_batch(ls_builder *builder, const uint8_t *header, const uint8_t *payload,
                             size_t size)
{
    assert(builder->open_count == 0);
    if (size > (size_t)INT32_MAX - LS_BATCH_HEADER_BYTES) {
        return LS_E_TOO_LARGE;
    }
    if (!reserve(builder, LS_BATCH_HEADER_BYTES + size)) {
        return LS_E_NO_MEMORY;
    }
    uint8_t *batch = builder->data + builder->size;
    memcpy(batch, header, LS_BATCH_HEADER_BYTES);
    memcpy(batch + LS_BATCH_HEADER_BYTES, payload, size);
    ls_store_i32(batch + LS_AT_LENGTH, (int32_t)(size + LS_LENGTH_MIN));
    builder->size += LS_BATCH_HEADER_BYTES + size;
    builder->open_at = builder->size;
    return LS_OK;
}

void ls_builder_seal(ls_builder *builder, uint8_t codec)
{
    if (builder->open_count == 0) {
        return;
    }
    uint8_t *batch = builder->data + builder->open_at;
    size_t size = builder->size - builder->open_at;
    ls_store_i64(batch + LS_AT_BASE_OFFSET, 0);
    ls_store_i32(batch + LS_AT_LENGTH, (int32_t)(size - LS_LOG_OVERHEAD_BYTES));
    ls_store_i32(batch + LS_AT_LEADER_EPOCH, -1);
    batch[LS_AT_MAGIC] = 2;
    ls_store_u32(batch + LS_AT_CRC, 0);
    ls_store_i16(batch + LS_AT_ATTRIBUTES, codec);
    ls_store_i32(batch + LS_AT_LAST_OFFSET_DELTA, builder->open_count - 1);
    ls_store_i64(batch + LS_AT_BASE_TIMESTAMP, builder->base_timestamp);
    ls_store_i64(batch + LS_AT_MAX_TIMESTAMP, builder->max_timestamp);
    ls_store_i64(batch + LS_AT_PRODUCER_ID, -1);
    ls_store_i16(batch + LS_AT_PRODUCER_EPOCH, -1);
    ls_store_i32(batch + LS_AT_BASE_SEQUENCE, -1);
    ls_store_i32(batch + LS_AT_RECORD_COUNT, builder->open_count);
    if (builder->max_timestamp > builder->arena_max_timestamp) {
        builder->arena_max_timestamp = builder->max_timestamp;
    }
    builder->open_at = builder->size;
    builder->open_count = 0;
}

int32_t ls_batches_stamp(uint8_t *data, size_t size, int64_t producer_id, int16_t producer_epoch,
                         int32_t base_sequence, bool transactional)
{
    uint32_t sequence = (uint32_t)base_sequence;
    for (size_t at = 0; at < size;) {
        uint8_t *batch = data + at;
        ls_store_i64(batch + LS_AT_PRODUCER_ID, producer_id);
        ls_store_i16(batch + LS_AT_PRODUCER_EPOCH, producer_epoch);
        ls_store_i32(batch + LS_AT_BASE_SEQUENCE, (int32_t)sequence);
        uint8_t attributes = (uint8_t)(batch[LS_AT_ATTRIBUTES + 1] & ~LS_ATTR_TRANSACTIONAL);
        batch[LS_AT_ATTRIBUTES + 1] =
            (uint8_t)(attributes | (transactional ? LS_ATTR_TRANSACTIONAL : 0));
        uint32_t records = (uint32_t)ls_load_i32(batch + LS_AT_LAST_OFFSET_DELTA) + 1;
        sequence = (sequence + records) & INT32_MAX;   /* from 2**31 - 1 on to 0 */
        at += (size_t)ls_load_i32(batch + LS_AT_LENGTH) + LS_LOG_OVERHEAD_BYTES;
    }
    return (int32_t)sequence;
}

int64_t ls_batches_finish(uint8_t *data, size_t size, int64_t base_offset, int32_t leader_epoch,
                          int64_t append_time)
{
    size_t at = 0;
    while (at < size) {
        uint8_t *batch = data + at;
        size_t bytes = (size_t)ls_load_i32(batch + LS_AT_LENGTH) + LS_LOG_OVERHEAD_BYTES;
        ls_store_i64(batch + LS_AT_BASE_OFFSET, base_offset);
        ls_store_i32(batch + LS_AT_LEADER_EPOCH, leader_epoch);
        if (append_time >= 0) {
            batch[LS_AT_ATTRIBUTES + 1] |= LS_ATTR_LOG_APPEND_TIME;
            ls_store_i64(batch + LS_AT_MAX_TIMESTAMP, append_time);
        }
        ls_store_u32(batch + LS_AT_CRC,
                     ls_crc32c(0, batch + LS_AT_ATTRIBUTES, bytes - LS_AT_ATTRIBUTES));
        base_offset += (int64_t)ls_load_i32(batch + LS_AT_LAST_OFFSET_DELTA) + 1;
        at += bytes;
    }
    assert(at == size);
    return base_offset;
}
