/* Fuzz target: a batch from outside, before it is written.
 *
 *     byte 0      the batch is what follows; its length and checksum are made right
 *     byte 1 ...  the batch
 *
 * Promise: a batch that is taken can be read record by record with the same result: as many records as
 * the header names, with offsets without a gap and times between the two that were found.
 */
#include <string.h>

#include "batch_check.h"
#include "check.h"
#include "crc32c.h"

/* Blocks are what they decode to: every frame of stored and packed blocks is walked. */
static int copy(const char *source, char *target, int size, int capacity)
{
    if (size > capacity) {
        return -1;
    }
    memcpy(target, source, (size_t)size);
    return size;
}

static void check_taken(const uint8_t *data, const ls_batch *batch, const ls_record_walk *walk)
{
    CHECK(walk->code == LS_END && walk->ordered && walk->timed);
    CHECK(batch->last_offset - batch->base_offset + 1 == batch->record_count);
    CHECK(walk->keyless >= 0 && walk->keyless <= batch->record_count);
    CHECK(walk->least <= walk->greatest && walk->oldest >= -1);
    const ls_batch_rules any = {INT64_MAX, INT64_MAX, INT64_MAX, false};
    const ls_batch_rules none = {0, INT64_MAX, INT64_MAX, false};
    CHECK(!ls_batch_is_plain(data, batch, walk, &none, 0));
    if (ls_batch_is_plain(data, batch, walk, &any, 0)) {
        CHECK(batch->attributes == 0 && batch->record_count > 0);
        CHECK(walk->greatest == batch->max_timestamp);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 1 || size > 1 << 13) {
        return 0;
    }
    size_t length = size - 1;
    uint8_t *raw = malloc(length > 0 ? length : 1);
    CHECK(raw != NULL);
    memcpy(raw, data + 1, length);
    if (length >= LS_BATCH_HEADER_BYTES) {
        ls_store_i32(raw + LS_AT_LENGTH, (int32_t)(length - LS_LOG_OVERHEAD_BYTES));
        ls_store_u32(raw + LS_AT_CRC,
                     ls_crc32c(0, raw + LS_AT_ATTRIBUTES, length - LS_AT_ATTRIBUTES));
    }
    ls_batch batch;
    ls_record_walk walk;
    if (ls_batch_check(raw, length, &batch, &walk)) {
        check_taken(raw, &batch, &walk);
        ls_records records;
        ls_record record;
        int64_t expected = batch.base_offset;
        ls_records_open(&records, &batch, raw + LS_BATCH_HEADER_BYTES,
                        length - LS_BATCH_HEADER_BYTES);
        while (ls_records_next(&records, &record) == LS_OK) {
            CHECK(record.offset == expected++);
        }
        CHECK(expected == batch.last_offset + 1);
    }
    if (ls_batch_check_lz4(raw, length, copy, 1 << 16, &batch, &walk)) {
        check_taken(raw, &batch, &walk);
        CHECK(ls_batch_codec(&batch) == LS_CODEC_LZ4);
    }
    free(raw);
    return 0;
}
