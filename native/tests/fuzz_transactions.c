/* Fuzz target: the input is a .txnindex file, and the batches that a cleaner meets beside it.
 *
 *     byte 0      entries
 *     34 bytes    each of them, as they lie in the file
 *     3 bytes     for each batch: its producer; offsets it takes, and whether it is data or a
 *                 marker; the gap before it, and the type of the marker
 *
 * Promise: entries may say anything and lie in any order.  A data batch counts as aborted only if an
 * entry of its producer overlaps it, and always where no marker has been seen yet; an entry is kept
 * for a marker only when data of it was met.
 */
#include "check.h"
#include "aborted.h"

enum { BATCH_BYTES = 3 };

static bool overlaps(const uint8_t *entries, size_t count, const ls_batch *batch)
{
    for (size_t i = 0; i < count; i++) {
        const uint8_t *entry = entries + i * LS_ABORTED_BYTES;
        if (ls_load_i64(entry + 2) == batch->producer_id &&
            ls_load_i64(entry + 10) <= batch->last_offset &&
            ls_load_i64(entry + 18) >= batch->base_offset) {
            return true;
        }
    }
    return false;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 1 || size > 1 << 13) {
        return 0;
    }
    size_t bytes = (size_t)data[0] * LS_ABORTED_BYTES;
    bytes = bytes < size - 1 ? bytes : size - 1;       /* the last one may be cut */
    const uint8_t *entries = data + 1;
    size_t count = bytes / LS_ABORTED_BYTES;
    ls_transactions transactions;
    CHECK(ls_transactions_init(&transactions, entries, bytes) == LS_OK);
    int64_t offset = 0;
    bool marked = false;
    for (size_t at = 1 + bytes; at + BATCH_BYTES <= size; at += BATCH_BYTES) {
        ls_batch batch = {
            .base_offset = offset + (data[at + 2] >> 3),
            .producer_id = data[at],
            .record_count = 1,
            .attributes = LS_ATTR_TRANSACTIONAL,
        };
        batch.last_offset = batch.base_offset + (data[at + 1] >> 1);
        offset = batch.last_offset + 1;
        bool expected = overlaps(entries, count, &batch);
        if (data[at + 1] & 1) {
            /* length, attributes, times, key: version and type, value: empty, no headers */
            uint8_t payload[] = {20, 0, 0, 0, 8, 0, 0, 0, data[at + 2] & 7, 0, 0};
            bool useless;
            const ls_aborted *kept;
            batch.attributes |= LS_ATTR_CONTROL;
            batch.last_offset = batch.base_offset;
            CHECK(ls_transactions_marker(&transactions, &batch, payload, sizeof payload, &useless,
                                         &kept) == LS_OK);
            CHECK(kept == NULL || (!useless && kept->producer_id == batch.producer_id));
            CHECK(kept == NULL || overlaps(entries, count, &batch));
            marked = true;
        } else {
            bool aborted;
            CHECK(ls_transactions_data(&transactions, &batch, &aborted) == LS_OK);
            CHECK(!aborted || expected);
            CHECK(marked || aborted == expected);
        }
    }
    ls_transactions_free(&transactions);
    return 0;
}
