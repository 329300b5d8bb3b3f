/* Fuzz target: the input is the payload of a batch, decompressed from who knows where.
 *
 *     byte 0      bit 0: LogAppendTime
 *     bytes 1-2   record count
 *     bytes 3-6   last offset delta
 *     byte 7 ...  records
 *
 * Promises: what can be walked can be built again, and is then read back as the same records; and a
 * walk by runs sees what the careful walk sees.
 */
#include "batch.h"
#include "check.h"
#include "uniform_run.h"

enum { PREFIX_BYTES = 7, BASE_TIMESTAMP = 1000, BATCH_BYTES = 1 << 20 };

static bool same_bytes(const uint8_t *a, int32_t a_size, const uint8_t *b, int32_t b_size)
{
    return a_size == b_size && (a_size <= 0 || memcmp(a, b, (size_t)a_size) == 0);
}

/* Timestamps whose differences do not fit 64 bits cannot be written as deltas; leave those alone. */
static bool sane_time(int64_t timestamp)
{
    return timestamp > -(INT64_C(1) << 60) && timestamp < INT64_C(1) << 60;
}

/* Walks by runs wherever there is one, beside the careful walk. */
static void walk_by_runs(const ls_batch *batch, const uint8_t *payload, size_t size)
{
    ls_records quick, careful;
    ls_record record;
    ls_records_open(&quick, batch, payload, size);
    ls_records_open(&careful, batch, payload, size);
    for (;;) {
        ls_uniform_run run;
        int64_t timestamps[LS_UNIFORM_RUN_ROWS];
        size_t rows = ls_uniform_run_take(&quick, &run, timestamps, LS_UNIFORM_RUN_ROWS);
        for (size_t i = 0; i < rows; i++) {
            CHECK(ls_records_next(&careful, &record) == LS_OK);
            CHECK(record.offset == run.offset + (int64_t)i && record.timestamp == timestamps[i]);
            CHECK(record.header_count == 0);
            CHECK(record.key_size == run.key_size && record.value_size == run.value_size);
            CHECK(record.key == run.key + i * run.stride);
            CHECK(record.value == run.value + i * run.stride);
        }
        CHECK(quick.at == careful.at && quick.remaining == careful.remaining);
        CHECK(quick.previous_delta == careful.previous_delta);
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
    if (size < PREFIX_BYTES) {
        return 0;
    }
    ls_batch batch = {
        .base_offset = 100,
        .base_timestamp = BASE_TIMESTAMP,
        .max_timestamp = 2000,
        .attributes = data[0] & 1 ? LS_ATTR_LOG_APPEND_TIME : 0,
        .record_count = (data[1] << 8) | data[2],
    };
    batch.last_offset = batch.base_offset + (ls_load_i32(data + 3) & INT32_MAX);

    walk_by_runs(&batch, data + PREFIX_BYTES, size - PREFIX_BYTES);

    ls_builder builder;
    ls_builder_init(&builder, BATCH_BYTES, BATCH_BYTES);
    ls_records records;
    ls_record record;
    ls_records_open(&records, &batch, data + PREFIX_BYTES, size - PREFIX_BYTES);
    int64_t built = 0, previous = batch.base_offset - 1;
    while (ls_records_next(&records, &record) == LS_OK) {
        CHECK(record.offset > previous && record.offset <= batch.last_offset);
        previous = record.offset;
        CHECK(!(data[0] & 1) || record.timestamp == 2000);
        if (!sane_time(record.timestamp)) {
            break;
        }
        ls_new_record copy = {
            .timestamp = record.timestamp,
            .key = record.key,
            .key_size = record.key_size,
            .value = record.value,
            .value_size = record.value_size,
            .headers = record.headers,
            .headers_size = (size_t)record.headers_size,
            .header_count = record.header_count,
        };
        ls_code code = ls_builder_add(&builder, &copy);
        if (code != LS_OK) {
            CHECK(code == LS_END || code == LS_E_TOO_LARGE);
            break;
        }
        built++;
    }
    CHECK(builder.records == built);
    ls_builder_seal(&builder, LS_CODEC_NONE);
    if (built > 0) {
        CHECK(ls_batches_finish(builder.data, builder.size, 100, 7, -1) == 100 + built);
        ls_batch again;
        CHECK(ls_batch_parse(builder.data, builder.size, &again).code == LS_OK);
        CHECK(again.size == (int64_t)builder.size && again.record_count == built);
        CHECK(again.leader_epoch == 7 && ls_batch_verify(builder.data, &again));
        ls_records source, target;
        ls_record a, b;
        ls_records_open(&source, &batch, data + PREFIX_BYTES, size - PREFIX_BYTES);
        ls_records_open(&target, &again, builder.data + LS_BATCH_HEADER_BYTES,
                        builder.size - LS_BATCH_HEADER_BYTES);
        for (int64_t i = 0; i < built; i++) {
            CHECK(ls_records_next(&source, &a) == LS_OK);
            CHECK(ls_records_next(&target, &b) == LS_OK);
            CHECK(b.offset == 100 + i && a.timestamp == b.timestamp);
            CHECK(same_bytes(a.key, a.key_size, b.key, b.key_size));
            CHECK(same_bytes(a.value, a.value_size, b.value, b.value_size));
            CHECK(a.header_count == b.header_count);
            CHECK(same_bytes(a.headers, a.headers_size, b.headers, b.headers_size));
        }
        CHECK(ls_records_next(&target, &b) == LS_END);
    }
    ls_builder_free(&builder);
    return 0;
}
