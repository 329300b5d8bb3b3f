/* Fuzz target: the input is one batch as it might lie on a disk.
 *
 * Promise: a header that parses and a batch that verifies can be walked, and turned into columns,
 * without touching a byte outside of it; all ways see the same records.  The checksum is mended
 * first, or no input would ever get past it.
 */
#include "batch.h"
#include "check.h"
#include "columns.h"
#include "crc32c.h"

static void walk_headers(const ls_record *record)
{
    const uint8_t *at = record->headers, *end = at + record->headers_size;
    for (int32_t i = 0; i < record->header_count; i++) {
        ls_header header;
        ls_header_next(&at, end, &header);
        CHECK(header.name_size >= 0 && header.name + header.name_size <= end);
        CHECK(header.value_size >= -1);
        CHECK(header.value_size < 0 || header.value + header.value_size <= end);
    }
    CHECK(at == end);
}

/* The number of records before the end or the damage. */
static int64_t walk(const ls_batch *batch, const uint8_t *payload, size_t size, ls_code *code)
{
    ls_records records;
    ls_records_open(&records, batch, payload, size);
    int64_t count = 0, previous = batch->base_offset - 1;
    ls_record record;
    while ((*code = ls_records_next(&records, &record)) == LS_OK) {
        CHECK(record.offset > previous && record.offset <= batch->last_offset);
        CHECK(record.key_size >= -1 && record.value_size >= -1);
        walk_headers(&record);
        previous = record.offset;
        count++;
    }
    CHECK(*code == LS_END || *code == LS_E_CORRUPT);
    CHECK(*code != LS_E_CORRUPT || records.reason[0] != '\0');
    CHECK(*code != LS_END || count == batch->record_count);
    return count;
}

/* The quick way takes what it likes; what it takes, the careful way must take alike. */
static void compare_quick(const ls_batch *batch, const uint8_t *payload, size_t size)
{
    ls_records quick, careful;
    ls_records_open(&quick, batch, payload, size);
    ls_records_open(&careful, batch, payload, size);
    ls_record a, b;
    for (;;) {
        bool taken = ls_records_quick(&quick, &a);
        if (ls_records_next(&careful, &b) != LS_OK) {
            CHECK(!taken);
            return;
        }
        if (taken) {
            CHECK(a.offset == b.offset && a.timestamp == b.timestamp);
            CHECK(a.key_size == b.key_size && a.value_size == b.value_size);
            CHECK(a.key == b.key && a.value == b.value);
            CHECK(a.header_count == 0 && b.header_count == 0);
        } else {
            CHECK(quick.remaining == careful.remaining + 1);   /* nothing was consumed */
        }
        CHECK(!taken || (quick.at == careful.at && quick.remaining == careful.remaining));
        quick = careful;
    }
}

static void check_bytes(const ls_bytes_column *column, size_t row, const uint8_t *data, int32_t size)
{
    int32_t at = column->ends[row], end = column->ends[row + 1];
    bool valid = column->valid[row / 8] & (1u << (row % 8));
    CHECK(valid == (size >= 0));
    CHECK(end - at == (size < 0 ? 0 : size));
    CHECK(end == at || memcmp(column->data + at, data, (size_t)(end - at)) == 0);
}

static void compare_columns(const ls_batch *batch, const uint8_t *payload, size_t size)
{
    ls_columns columns;
    CHECK(ls_columns_init(&columns, LS_COLUMN_ALL, 1000, 1 << 20, 0) == LS_OK);
    ls_records records, again;
    ls_records_open(&records, batch, payload, size);
    ls_records_open(&again, batch, payload, size);
    bool stopped;
    ls_code code = ls_columns_fill(&columns, &records, 0, INT64_MAX, &stopped);
    CHECK(!stopped);
    for (size_t row = 0; row < columns.rows; row++) {
        ls_record record;
        CHECK(ls_records_next(&again, &record) == LS_OK);
        CHECK(columns.offsets[row] == record.offset);
        CHECK(columns.timestamps[row] == record.timestamp);
        check_bytes(&columns.keys, row, record.key, record.key_size);
        check_bytes(&columns.values, row, record.value, record.value_size);
        CHECK(columns.header_ends[row + 1] - columns.header_ends[row] == record.header_count);
    }
    CHECK(code == LS_OK || code == LS_END || code == LS_E_CORRUPT);
    ls_columns_free(&columns);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < LS_BATCH_HEADER_BYTES) {
        return 0;
    }
    ls_batch batch;
    if (ls_batch_parse(data, size, &batch).code != LS_OK || batch.size > (int64_t)size) {
        return 0;
    }
    uint8_t *mended = malloc((size_t)batch.size);
    CHECK(mended != NULL);
    memcpy(mended, data, (size_t)batch.size);
    ls_store_u32(mended + LS_AT_CRC, ls_crc32c(0, mended + LS_AT_ATTRIBUTES,
                                               (size_t)batch.size - LS_AT_ATTRIBUTES));
    CHECK(ls_batch_parse(mended, (size_t)batch.size, &batch).code == LS_OK);
    CHECK(ls_batch_verify(mended, &batch));
    CHECK(batch.last_offset >= batch.base_offset && batch.record_count >= 0);

    const uint8_t *payload = mended + LS_BATCH_HEADER_BYTES;
    size_t payload_size = (size_t)batch.size - LS_BATCH_HEADER_BYTES;
    ls_code code;
    int64_t count = walk(&batch, payload, payload_size, &code);
    CHECK(count <= batch.record_count);
    compare_quick(&batch, payload, payload_size);
    compare_columns(&batch, payload, payload_size);
    free(mended);
    return 0;
}
