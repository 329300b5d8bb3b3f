/* Fuzz target: the input is a batch's payload, and what compaction knows when it meets it.
 *
 *     byte 0      attributes, without a codec
 *     bytes 1-2   record count
 *     bytes 3-6   last offset delta
 *     byte 7      bit 0: purge; bit 1: the horizon is in the past; bit 2: the batch ends the round;
 *                 bit 3: half of the keys are superseded; bit 4: its transaction was aborted
 *     byte 8 ...  records
 *
 * Promise: what is left is nothing, or one sound batch with the same offsets, producer and epoch,
 * and its records are some of the old ones, in order and unchanged.
 */
#include "check.h"
#include "cleaner.h"
#include "crc32c.h"

enum { PREFIX_BYTES = 8, BASE_OFFSET = 100, NOW_MS = 5000 };

static const uint8_t SECRET[16] = "a fixed secret!!";

static bool same_bytes(const uint8_t *a, int32_t a_size, const uint8_t *b, int32_t b_size)
{
    return a_size == b_size && (a_size <= 0 || memcmp(a, b, (size_t)a_size) == 0);
}

static bool same_record(const ls_record *a, const ls_record *b)
{
    return a->offset == b->offset && a->timestamp == b->timestamp &&
           same_bytes(a->key, a->key_size, b->key, b->key_size) &&
           same_bytes(a->value, a->value_size, b->value, b->value_size) &&
           a->header_count == b->header_count &&
           same_bytes(a->headers, a->headers_size, b->headers, b->headers_size);
}

/* The batch that was left, beside the one it was made from. */
static void check_left(const ls_bytes *out, const ls_batch *old, const uint8_t *payload, size_t size)
{
    ls_batch left;
    CHECK(out->size >= LS_BATCH_HEADER_BYTES);
    CHECK(ls_batch_parse(out->data, out->size, &left).code == LS_OK);
    CHECK(left.size == (int64_t)out->size && ls_batch_verify(out->data, &left));
    CHECK(left.base_offset == old->base_offset && left.last_offset == old->last_offset);
    CHECK(left.producer_id == old->producer_id && left.producer_epoch == old->producer_epoch);
    CHECK(left.base_sequence == old->base_sequence && left.leader_epoch == old->leader_epoch);
    CHECK(((left.attributes ^ old->attributes) & (LS_ATTR_TRANSACTIONAL | LS_ATTR_CONTROL |
                                                  LS_ATTR_LOG_APPEND_TIME)) == 0);
    ls_records before, after;
    ls_record a, b;
    ls_records_open(&before, old, payload, size);
    ls_records_open(&after, &left, out->data + LS_BATCH_HEADER_BYTES,
                    out->size - LS_BATCH_HEADER_BYTES);
    if (left.record_count == 0) {
        return;
    }
    while (ls_records_next(&after, &b) == LS_OK) {
        do {
            CHECK(ls_records_next(&before, &a) == LS_OK);
        } while (a.offset < b.offset);
        CHECK(same_record(&a, &b));
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < PREFIX_BYTES) {
        return 0;
    }
    const unsigned flags = data[7];
    const size_t payload_size = size - PREFIX_BYTES;
    uint8_t *raw = malloc(LS_BATCH_HEADER_BYTES + payload_size);
    CHECK(raw != NULL);
    memset(raw, 0, LS_BATCH_HEADER_BYTES);
    memcpy(raw + LS_BATCH_HEADER_BYTES, data + PREFIX_BYTES, payload_size);
    ls_store_i64(raw + LS_AT_BASE_OFFSET, BASE_OFFSET);
    ls_store_i32(raw + LS_AT_LENGTH, (int32_t)(payload_size + LS_LENGTH_MIN));
    ls_store_i32(raw + LS_AT_LEADER_EPOCH, 3);
    raw[LS_AT_MAGIC] = 2;
    ls_store_i16(raw + LS_AT_ATTRIBUTES, (int16_t)(data[0] & 0x78));
    ls_store_i32(raw + LS_AT_LAST_OFFSET_DELTA, ls_load_i32(data + 3) & INT32_MAX);
    ls_store_i64(raw + LS_AT_BASE_TIMESTAMP, flags & 2 ? NOW_MS - 1 : NOW_MS + 1);
    ls_store_i64(raw + LS_AT_MAX_TIMESTAMP, 2000);
    ls_store_i64(raw + LS_AT_PRODUCER_ID, 7);
    ls_store_i32(raw + LS_AT_RECORD_COUNT, (data[1] << 8) | data[2]);
    ls_store_u32(raw + LS_AT_CRC, ls_crc32c(0, raw + LS_AT_ATTRIBUTES,
                                            LS_BATCH_HEADER_BYTES + payload_size - LS_AT_ATTRIBUTES));
    ls_batch batch;
    ls_offset_map map = {0};
    ls_transactions transactions = {0};
    ls_cleaner cleaner = {0};
    if (ls_batch_parse(raw, LS_BATCH_HEADER_BYTES + payload_size, &batch).code != LS_OK) {
        goto done;
    }
    const uint8_t *payload = raw + LS_BATCH_HEADER_BYTES;
    CHECK(ls_offset_map_init(&map, 64 * sizeof(ls_offset_slot), SECRET) == LS_OK);
    const char *reason = "";
    if (!(batch.attributes & LS_ATTR_CONTROL)) {
        ls_code code = ls_offset_map_read(&map, &batch, payload, payload_size, 0, &reason);
        CHECK(code == LS_OK || code == LS_END || code == LS_E_CORRUPT);
    }
    if (flags & 8) {                   /* a key that many seeds have has a newer record */
        (void)ls_offset_map_put(&map, ls_offset_map_hash(&map, (const uint8_t *)"k", 1), INT32_MAX);
    }
    uint8_t entry[LS_ABORTED_BYTES] = {0};
    ls_store_i64(entry + 2, 7);
    ls_store_i64(entry + 10, BASE_OFFSET);
    ls_store_i64(entry + 18, batch.last_offset + (flags & 32 ? 0 : 1));
    CHECK(ls_transactions_init(&transactions, entry, flags & 16 ? sizeof entry : 0) == LS_OK);
    ls_producer_end producer = {7, flags & 64 ? batch.last_offset : -1, 0};
    ls_clean_rules rules = {
        .map = flags & 1 ? NULL : &map,
        .key = (const uint8_t *)"k",
        .key_size = 1,
        .end_offset = flags & 4 ? batch.last_offset + 1 : -1,
        .now_ms = NOW_MS,
        .delete_retention_ms = 100,
        .producers = &producer,
        .producer_count = flags & 128 ? 1 : 0,
        .transactions = flags & 1 ? NULL : &transactions,
    };
    ls_cleaner_init(&cleaner, &rules, BASE_OFFSET, 0);
    bool pack = true;
    size_t at = 0;
    ls_code code = ls_cleaner_batch(&cleaner, raw, &batch, payload, payload_size, &pack, &at, &reason);
    CHECK(code == LS_OK || code == LS_E_CORRUPT);
    if (code == LS_OK) {
        CHECK(!pack);
        CHECK(cleaner.counts.records_kept <= cleaner.counts.records_read);
        if (cleaner.out.size > 0) {
            check_left(&cleaner.out, &batch, payload, payload_size);
        }
    }
done:
    ls_cleaner_free(&cleaner);
    ls_transactions_free(&transactions);
    ls_offset_map_free(&map);
    free(raw);
    return 0;
}
