/* Fuzz target: many records that are nearly alike, as the run walker likes them.
 *
 *     byte 0      how often the record is repeated
 *     byte 1      how many changes are made
 *     byte 2      bit 0: LogAppendTime; bit 1: offsets skip one half-way; bits 2-7: rows a run takes
 *     bytes 3-6   last offset delta
 *     3 bytes     for each change: where (16 bits), and what is there then
 *     the rest    one record behind its length; its offset delta is made to grow
 *
 * Promise: what a run takes, the careful walk takes with the same result, record for record; where
 * one record differs by a byte, the run ends before it.
 */
#include "batch.h"
#include "check.h"
#include "uniform_run.h"

enum { PREFIX_BYTES = 7, CHANGE_BYTES = 3, RECORD_BYTES_MAX = 400, PAYLOAD_BYTES_MAX = 1 << 16 };

/* The record with another offset delta; 0 when the template has no place for one. */
static size_t repeat(uint8_t *target, const uint8_t *body, size_t size, uint32_t delta)
{
    uint8_t inner[RECORD_BYTES_MAX + 16];
    int64_t time;
    size_t time_bytes = size > 1 ? ls_varint64_load(body + 1, body + size, &time) : 0;
    if (time_bytes == 0) {
        return 0;
    }
    memcpy(inner, body, 1 + time_bytes);
    uint8_t *at = ls_varint_store(inner + 1 + time_bytes, (uint64_t)delta << 1);
    memcpy(at, body + 1 + time_bytes, size - 1 - time_bytes);
    size_t made = (size_t)(at - inner) + size - 1 - time_bytes;
    uint8_t *record = ls_varint_store(target, (uint64_t)made << 1);
    memcpy(record, inner, made);
    return (size_t)(record - target) + made;
}

static void compare(const ls_batch *batch, const uint8_t *payload, size_t size, size_t rows_max)
{
    ls_records quick, careful;
    ls_record record;
    ls_records_open(&quick, batch, payload, size);
    ls_records_open(&careful, batch, payload, size);
    for (;;) {
        ls_uniform_run run;
        int64_t timestamps[LS_UNIFORM_RUN_ROWS];
        size_t rows = ls_uniform_run_take(&quick, &run, timestamps, rows_max);
        CHECK(rows <= rows_max && rows <= LS_UNIFORM_RUN_ROWS);
        for (size_t i = 0; i < rows; i++) {
            CHECK(run.first + i * run.stride == careful.at);
            CHECK(ls_records_next(&careful, &record) == LS_OK);
            CHECK(record.offset == run.offset + (int64_t)i && record.timestamp == timestamps[i]);
            CHECK(record.key_size == run.key_size && record.value_size == run.value_size);
            CHECK(record.key == run.key + i * run.stride);
            CHECK(record.value == run.value + i * run.stride);
            CHECK(record.header_count == 0);
        }
        CHECK(quick.at == careful.at && quick.remaining == careful.remaining);
        CHECK(quick.previous_delta == careful.previous_delta);
        CHECK(rows == 0 || quick.end - quick.at >= 32);    /* as promised to whoever copies */
        if (rows == 0) {
            ls_code code = ls_records_next(&careful, &record);
            CHECK(ls_records_next(&quick, &record) == code);
            if (code != LS_OK) {
                return;
            }
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    size_t changes = size < PREFIX_BYTES ? 0 : data[1] % 8;
    size_t head = PREFIX_BYTES + changes * CHANGE_BYTES;
    if (size < head || size - head > RECORD_BYTES_MAX) {
        return 0;
    }
    static uint8_t payload[PAYLOAD_BYTES_MAX];
    size_t used = 0;
    int32_t count = 0;
    for (uint32_t i = 0; i < data[0]; i++) {
        if (PAYLOAD_BYTES_MAX - used < RECORD_BYTES_MAX + 32) {
            break;
        }
        uint32_t delta = i + (data[2] & 2 && i * 2 > data[0]);
        size_t made = repeat(payload + used, data + head, size - head, delta);
        if (made == 0) {
            return 0;
        }
        used += made;
        count++;
    }
    for (size_t i = 0; i < changes && used > 0; i++) {
        const uint8_t *change = data + PREFIX_BYTES + i * CHANGE_BYTES;
        payload[ls_load_u16(change) % used] = change[2];
    }
    /* Exact, so that ASan sees a read of one byte too many. */
    uint8_t *exact = malloc(used + 1);
    CHECK(exact != NULL);
    memcpy(exact, payload, used);
    uint8_t *placed = realloc(exact, used > 0 ? used : 1);
    CHECK(placed != NULL);
    ls_batch batch = {
        .base_offset = 100,
        .base_timestamp = 1000,
        .max_timestamp = 2000,
        .attributes = data[2] & 1 ? LS_ATTR_LOG_APPEND_TIME : 0,
        .record_count = count,
    };
    batch.last_offset = batch.base_offset + (ls_load_i32(data + 3) & INT32_MAX);
    compare(&batch, placed, used, (size_t)(data[2] >> 2) + 1);
    free(placed);
    return 0;
}
