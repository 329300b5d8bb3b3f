/* Fuzz target: two payloads become columns, by chunks of any size and within any bounds.
 *
 *     byte 0      fields to decode
 *     byte 1      rows of a chunk, less one
 *     byte 2      bytes of a chunk, in sixteens; 255: a mebibyte, where whole runs are copied
 *     byte 3      bit 0, 1: LogAppendTime of the first and of the second payload; bits 2-7: start
 *     byte 4      stop; 255: none
 *     bytes 5-6   record count of either
 *     bytes 7-8   the size of the first payload
 *     byte 9 ...  the payloads
 *
 * Promise: the rows are the records in [start, stop), in order and unchanged, in the fields that
 * were asked for; a chunk exceeds its bound by no more than one record; timestamps of two kinds are
 * never mixed; and damage ends it where the careful walk sees it.
 */
#include "check.h"
#include "columns.h"

enum { PREFIX_BYTES = 9, BASE_OFFSET = 100 };

static void check_bytes(const ls_bytes_column *column, size_t row, const uint8_t *data, int32_t size)
{
    int32_t at = column->ends[row], end = column->ends[row + 1];
    bool valid = column->valid[row / 8] & (1u << (row % 8));
    CHECK(valid == (size >= 0));
    CHECK(end - at == (size < 0 ? 0 : size));
    CHECK(end == at || memcmp(column->data + at, data, (size_t)(end - at)) == 0);
}

static void check_headers(const ls_columns *columns, size_t row, const ls_record *record)
{
    int32_t first = columns->header_ends[row];
    CHECK(columns->header_ends[row + 1] - first == record->header_count);
    const uint8_t *at = record->headers, *end = at + record->headers_size;
    for (int32_t i = 0; i < record->header_count; i++) {
        ls_header header;
        ls_header_next(&at, end, &header);
        check_bytes(&columns->header_names, (size_t)(first + i), header.name, header.name_size);
        check_bytes(&columns->header_values, (size_t)(first + i), header.value, header.value_size);
    }
}

static void check_row(const ls_columns *columns, size_t row, const ls_record *record)
{
    if (columns->fields & LS_COLUMN_OFFSET) {
        CHECK(columns->offsets[row] == record->offset);
    }
    if (columns->fields & LS_COLUMN_TIMESTAMP) {
        CHECK(columns->timestamps[row] == record->timestamp);
    }
    if (columns->fields & LS_COLUMN_TOMBSTONE) {
        CHECK(columns->tombstones[row] == (record->value_size < 0));
    }
    if (columns->fields & LS_COLUMN_KEY) {
        check_bytes(&columns->keys, row, record->key, record->key_size);
    }
    if (columns->fields & LS_COLUMN_VALUE) {
        check_bytes(&columns->values, row, record->value, record->value_size);
    }
    if (columns->fields & LS_COLUMN_HEADERS) {
        check_headers(columns, row, record);
    }
}

/* Rows from `from` on are the next wanted records of the careful walk. */
static void check_rows(const ls_columns *columns, size_t from, ls_records *careful, int64_t start)
{
    for (size_t row = from; row < columns->rows; row++) {
        ls_record record;
        do {
            CHECK(ls_records_next(careful, &record) == LS_OK);
        } while (record.offset < start);
        check_row(columns, row, &record);
    }
}

static bool full(const ls_columns *columns)
{
    return columns->rows == columns->rows_max || columns->keys.size > columns->bytes_max ||
           columns->values.size > columns->bytes_max ||
           columns->header_names.size > columns->bytes_max ||
           columns->header_values.size > columns->bytes_max ||
           columns->header_names.rows > columns->bytes_max / 16;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < PREFIX_BYTES || size > 1 << 13) {
        return 0;
    }
    size_t rest = size - PREFIX_BYTES, first = (size_t)(data[7] << 8 | data[8]);
    first = first < rest ? first : rest;
    size_t rows_max = (size_t)data[1] + 1;
    size_t bytes_max = data[2] == 255 ? 1 << 20 : (size_t)data[2] * 16;
    int64_t start = BASE_OFFSET + (data[3] >> 2);
    int64_t stop = data[4] == 255 ? INT64_MAX : BASE_OFFSET + data[4];
    unsigned fields = data[0] & (LS_COLUMN_ALL | LS_COLUMN_TOMBSTONE);
    ls_columns columns;
    CHECK(ls_columns_init(&columns, fields, rows_max, bytes_max, 0) == LS_OK);
    int64_t base = BASE_OFFSET;
    for (int part = 0; part < 2; part++) {
        const uint8_t *payload = data + PREFIX_BYTES + (part == 0 ? 0 : first);
        size_t payload_size = part == 0 ? first : rest - first;
        ls_batch batch = {
            .base_offset = base,
            .last_offset = base + 300,
            .base_timestamp = 1000,
            .max_timestamp = 2000,
            .attributes = data[3] >> part & 1 ? LS_ATTR_LOG_APPEND_TIME : 0,
            .record_count = data[5 + part],
        };
        base = batch.last_offset + 1;
        ls_records records, careful;
        ls_records_open(&records, &batch, payload, payload_size);
        ls_records_open(&careful, &batch, payload, payload_size);
        for (;;) {
            size_t from = columns.rows;
            bool stopped;
            ls_code code = ls_columns_fill(&columns, &records, start, stop, &stopped);
            CHECK(columns.rows <= columns.rows_max);
            check_rows(&columns, from, &careful, start);
            if (code == LS_E_CORRUPT || code == LS_END) {
                ls_record record;
                ls_code end;
                while ((end = ls_records_next(&careful, &record)) == LS_OK) {
                    CHECK(record.offset < start);
                }
                CHECK(end == code);
                break;
            }
            CHECK(code == LS_OK);
            if (stopped) {
                ls_record record;
                do {
                    CHECK(ls_records_next(&careful, &record) == LS_OK);
                } while (record.offset < start);
                CHECK(record.offset >= stop);
                break;
            }
            bool other = columns.rows > 0 && columns.log_append_time != records.log_append_time;
            CHECK(full(&columns) || other);
            ls_columns_free(&columns);
            CHECK(ls_columns_init(&columns, fields, rows_max, bytes_max, 0) == LS_OK);
        }
    }
    ls_columns_free(&columns);
    return 0;
}
