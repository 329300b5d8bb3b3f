#include "columns.h"

#include "memory.h"
#include "uniform_run.h"

#include <string.h>

static ls_code bytes_init(ls_bytes_column *column, size_t rows, size_t bytes_max,
                          size_t bytes_hint)
{
    column->rows_capacity = rows;
    column->bytes_max = bytes_max;
    column->capacity = bytes_hint;
    column->ends = ls_memory_take((rows + 1) * sizeof *column->ends);
    column->data = ls_memory_take(bytes_hint);
    column->valid = ls_memory_take((rows + 7) / 8 + 1);
    if (column->ends == NULL || column->data == NULL || column->valid == NULL) {
        return LS_E_NO_MEMORY;
    }
    column->ends[0] = 0;
    memset(column->valid, 0xff, (rows + 7) / 8 + 1);
    return LS_OK;
}

static void bytes_free(ls_bytes_column *column)
{
    ls_memory_give(column->ends);
    ls_memory_give(column->data);
    ls_memory_give(column->valid);
    memset(column, 0, sizeof *column);
}

ls_code ls_columns_init(ls_columns *columns, unsigned fields, size_t rows_max, size_t bytes_max,
                        size_t bytes_hint)
{
    memset(columns, 0, sizeof *columns);
    columns->fields = fields;
    columns->rows_max = rows_max;
    columns->bytes_max = bytes_max < INT32_MAX / 2 ? bytes_max : INT32_MAX / 2;
    if (rows_max == 0 || rows_max > INT32_MAX) {
        return LS_E_INVALID;
    }
    ls_code code = LS_OK;
    if (fields & LS_COLUMN_OFFSET) {
        columns->offsets = ls_memory_take(rows_max * sizeof *columns->offsets);
        code = columns->offsets == NULL ? LS_E_NO_MEMORY : code;
    }
    if (fields & LS_COLUMN_TIMESTAMP) {
        columns->timestamps = ls_memory_take(rows_max * sizeof *columns->timestamps);
        code = columns->timestamps == NULL ? LS_E_NO_MEMORY : code;
    }
    if (fields & LS_COLUMN_TOMBSTONE) {
        columns->tombstones = ls_memory_take(rows_max);
        code = columns->tombstones == NULL ? LS_E_NO_MEMORY : code;
    }
    if (code == LS_OK && (fields & LS_COLUMN_KEY)) {
        code = bytes_init(&columns->keys, rows_max, columns->bytes_max, 4096);
    }
    if (code == LS_OK && (fields & LS_COLUMN_VALUE)) {
        code = bytes_init(&columns->values, rows_max, columns->bytes_max,
                          bytes_hint < 4096 ? 4096 : bytes_hint);
    }
    if (code == LS_OK && (fields & LS_COLUMN_HEADERS)) {
        columns->header_ends = ls_memory_take((rows_max + 1) * sizeof *columns->header_ends);
        code = columns->header_ends == NULL ? LS_E_NO_MEMORY : LS_OK;
        if (code == LS_OK) {
            columns->header_ends[0] = 0;
            code = bytes_init(&columns->header_names, 64, columns->bytes_max, 1024);
        }
        if (code == LS_OK) {
            code = bytes_init(&columns->header_values, 64, columns->bytes_max, 1024);
        }
    }
    if (code != LS_OK) {
        ls_columns_free(columns);
    }
    return code;
}

void ls_columns_free(ls_columns *columns)
{
    ls_memory_give(columns->offsets);
    ls_memory_give(columns->timestamps);
    ls_memory_give(columns->tombstones);
    ls_memory_give(columns->header_ends);
    bytes_free(&columns->keys);
    bytes_free(&columns->values);
    bytes_free(&columns->header_names);
    bytes_free(&columns->header_values);
    memset(columns, 0, sizeof *columns);
}

/* After this many rows a column grows at once to the size that all rows need if they are like the
 * rows so far.  Pages that are never touched cost nothing; copying a large column repeatedly does. */
enum { JUDGED_ROWS = 128 };

static bool grow_data(ls_bytes_column *column, size_t more)
{
    size_t capacity = column->capacity;
    if (column->rows >= JUDGED_ROWS) {
        size_t projected = column->size / column->rows * column->rows_capacity;
        projected += projected / 8;
        capacity = projected > capacity ? projected : capacity;
    }
    if (column->size <= column->bytes_max) {
        /* The chunk is full beyond the bound, so little more than that is ever needed. */
        size_t most = column->bytes_max + column->bytes_max / 16;
        capacity = capacity > most ? most : capacity;
    }
    while (capacity - column->size < more) {
        if (__builtin_mul_overflow(capacity, (size_t)2, &capacity) || capacity > INT32_MAX) {
            return false;
        }
    }
    uint8_t *data = ls_memory_grow(column->data, column->size, capacity);
    if (data == NULL) {
        return false;
    }
    column->data = data;
    column->capacity = capacity;
    return true;
}

static bool grow_rows(ls_bytes_column *column)
{
    size_t rows = column->rows_capacity * 2;
    int32_t *ends = ls_memory_grow(column->ends, (column->rows + 1) * sizeof *ends,
                                   (rows + 1) * sizeof *ends);
    if (ends == NULL) {
        return false;
    }
    column->ends = ends;
    size_t had = (column->rows_capacity + 7) / 8 + 1;
    uint8_t *valid = ls_memory_grow(column->valid, had, (rows + 7) / 8 + 1);
    if (valid == NULL) {
        return false;
    }
    memset(valid + had, 0xff, (rows + 7) / 8 + 1 - had);
    column->valid = valid;
    column->rows_capacity = rows;
    return true;
}

/* Copies short data by whole vectors: the target has slack after its end, and the source may be read
 * up to `readable`.  Only the last records of a payload are copied by their exact size. */
static inline void copy(uint8_t *target, const uint8_t *source, size_t size,
                        const uint8_t *readable)
{
    if (size <= 512 && readable - source >= (ptrdiff_t)size + 32) {
        for (size_t i = 0; i < size; i += 32) {
            memcpy(target + i, source + i, 32);
        }
    } else {
        memcpy(target, source, size);
    }
}

/* Appends a row; the memory for the row itself is allocated already. */
static inline bool put(ls_bytes_column *column, const uint8_t *bytes, int32_t size,
                       const uint8_t *readable)
{
    size_t row = column->rows++;
    if (size > 0) {
        if (column->capacity - column->size < (size_t)size && !grow_data(column, (size_t)size)) {
            return false;
        }
        copy(column->data + column->size, bytes, (size_t)size, readable);
        column->size += (size_t)size;
    } else if (size < 0) {
        column->valid[row / 8] &= (uint8_t)~(1u << (row % 8));
        column->nulls++;
    }
    column->ends[row + 1] = (int32_t)column->size;
    return true;
}

static bool put_headers(ls_columns *columns, const ls_record *record)
{
    const uint8_t *at = record->headers, *end = at + record->headers_size;
    for (int32_t i = 0; i < record->header_count; i++) {
        ls_header header;
        ls_header_next(&at, end, &header);
        if ((columns->header_names.rows == columns->header_names.rows_capacity &&
             !grow_rows(&columns->header_names)) ||
            (columns->header_values.rows == columns->header_values.rows_capacity &&
             !grow_rows(&columns->header_values)) ||
            !put(&columns->header_names, header.name, header.name_size, end) ||
            !put(&columns->header_values, header.value, header.value_size, end)) {
            return false;
        }
    }
    return true;
}

/* Whether any data buffer has passed its bound: a chunk may exceed it by one record. */
static inline bool full(const ls_columns *columns)
{
    return columns->rows == columns->rows_max || columns->values.size > columns->bytes_max ||
           columns->keys.size > columns->bytes_max ||
           columns->header_values.size > columns->bytes_max ||
           columns->header_names.rows > columns->bytes_max / 16 ||
           columns->header_names.size > columns->bytes_max;
}

/* Takes one record with every check. */
static ls_code fill_one(ls_columns *columns, ls_records *records, int64_t start, int64_t stop,
                        bool *stopped)
{
    unsigned fields = columns->fields;
    const uint8_t *at = records->at;
    int32_t previous_delta = records->previous_delta;
    ls_record record;
    ls_code code = ls_records_next(records, &record);
    if (code != LS_OK || record.offset < start) {
        return code;
    }
    if (record.offset >= stop) {
        records->at = at;              /* not consumed */
        records->previous_delta = previous_delta;
        records->remaining++;
        *stopped = true;
        return LS_OK;
    }
    size_t row = columns->rows;
    if (fields & LS_COLUMN_OFFSET) {
        columns->offsets[row] = record.offset;
    }
    if (fields & LS_COLUMN_TIMESTAMP) {
        columns->timestamps[row] = record.timestamp;
    }
    if (fields & LS_COLUMN_TOMBSTONE) {
        columns->tombstones[row] = record.value_size < 0;
    }
    if ((fields & LS_COLUMN_KEY) &&
        !put(&columns->keys, record.key, record.key_size, records->end)) {
        return LS_E_NO_MEMORY;
    }
    if ((fields & LS_COLUMN_VALUE) &&
        !put(&columns->values, record.value, record.value_size, records->end)) {
        return LS_E_NO_MEMORY;
    }
    if (fields & LS_COLUMN_HEADERS) {
        if (record.header_count != 0 && !put_headers(columns, &record)) {
            return LS_E_NO_MEMORY;
        }
        columns->header_ends[row + 1] = (int32_t)columns->header_names.rows;
    }
    columns->rows++;
    return LS_OK;
}

/* The fast path works in blocks: it finds the fields of all records of a block, then copies each
 * column in its own loop.  Small loops keep everything in registers, and a property that all records
 * of a block share (no keys, no headers) is handled once. */
enum { BLOCK_ROWS = 128 };

typedef struct {
    const uint8_t *keys[BLOCK_ROWS];
    const uint8_t *values[BLOCK_ROWS];
    int32_t key_sizes[BLOCK_ROWS];     /* -1: null */
    int32_t value_sizes[BLOCK_ROWS];
    int64_t offsets[BLOCK_ROWS];
    int64_t timestamps[BLOCK_ROWS];
    size_t key_bytes;
    size_t value_bytes;
    size_t keys_null;
    size_t values_null;
} row_block;

static size_t parse_block(row_block *block, ls_records *shared, size_t rows_max)
{
    ls_records records = *shared;      /* a local copy: no store below can alias it */
    size_t rows = 0;
    size_t key_bytes = 0, value_bytes = 0, keys_null = 0, values_null = 0;
    ls_record record;
    while (rows < rows_max && ls_records_quick(&records, &record)) {
        block->offsets[rows] = record.offset;
        block->timestamps[rows] = record.timestamp;
        block->keys[rows] = record.key;
        block->values[rows] = record.value;
        block->key_sizes[rows] = record.key_size;
        block->value_sizes[rows] = record.value_size;
        key_bytes += (size_t)(record.key_size < 0 ? 0 : record.key_size);
        value_bytes += (size_t)(record.value_size < 0 ? 0 : record.value_size);
        keys_null += record.key_size < 0;
        values_null += record.value_size < 0;
        rows++;
    }
    *shared = records;
    block->key_bytes = key_bytes;
    block->value_bytes = value_bytes;
    block->keys_null = keys_null;
    block->values_null = values_null;
    return rows;
}

static void clear_bits(uint8_t *bits, size_t from, size_t count)
{
    size_t end = from + count;
    while (from < end && from % 8 != 0) {
        bits[from / 8] &= (uint8_t)~(1u << (from % 8));
        from++;
    }
    size_t whole = (end - from) / 8;
    memset(bits + from / 8, 0, whole);
    for (from += whole * 8; from < end; from++) {
        bits[from / 8] &= (uint8_t)~(1u << (from % 8));
    }
}

static void put_block(ls_bytes_column *column, const uint8_t *const *bytes, const int32_t *sizes,
                      size_t rows, size_t nulls, const uint8_t *readable)
{
    size_t row = column->rows;
    int32_t *ends = column->ends + row + 1;
    uint8_t *data = column->data;
    size_t at = column->size;
    if (nulls == rows) {
        for (size_t i = 0; i < rows; i++) {
            ends[i] = (int32_t)at;
        }
        clear_bits(column->valid, row, rows);
    } else {
        for (size_t i = 0; i < rows; i++) {
            int32_t size = sizes[i];
            if (size > 0) {
                copy(data + at, bytes[i], (size_t)size, readable);
                at += (size_t)size;
            } else if (size < 0) {
                clear_bits(column->valid, row + i, 1);
            }
            ends[i] = (int32_t)at;
        }
    }
    column->size = at;
    column->rows = row + rows;
    column->nulls += (int64_t)nulls;
}

/* A column of a run: all of one size, all at one distance. */
static inline void copy_vectors(uint8_t *data, const uint8_t *bytes, size_t size, size_t stride,
                                size_t rows, size_t vectors)
{
    for (size_t i = 0; i < rows; i++) {
#pragma GCC unroll 6
        for (size_t k = 0; k < vectors; k++) {
            memcpy(data + 32 * k, bytes + 32 * k, 32);
        }
        data += size;
        bytes += stride;
    }
}

static void copy_run(uint8_t *data, const uint8_t *bytes, size_t size, size_t stride, size_t rows)
{
    switch ((size + 31) / 32) {        /* constants, so that the inner loop is none */
    case 0: break;
    case 1: copy_vectors(data, bytes, size, stride, rows, 1); break;
    case 2: copy_vectors(data, bytes, size, stride, rows, 2); break;
    case 3: copy_vectors(data, bytes, size, stride, rows, 3); break;
    case 4: copy_vectors(data, bytes, size, stride, rows, 4); break;
    case 5: copy_vectors(data, bytes, size, stride, rows, 5); break;
    case 6: copy_vectors(data, bytes, size, stride, rows, 6); break;
    default:
        for (size_t i = 0; i < rows; i++) {
            memcpy(data + i * size, bytes + i * stride, size);
        }
    }
}

static void put_run(ls_bytes_column *column, const uint8_t *bytes, int32_t size, size_t stride,
                    size_t rows)
{
    int32_t *ends = column->ends + column->rows + 1;
    int32_t at = (int32_t)column->size;
    if (size < 0) {
        for (size_t i = 0; i < rows; i++) {
            ends[i] = at;
        }
        clear_bits(column->valid, column->rows, rows);
        column->nulls += (int64_t)rows;
    } else {
        for (size_t i = 0; i < rows; i++) {
            ends[i] = at + size * (int32_t)(i + 1);
        }
        copy_run(column->data + at, bytes, (size_t)size, stride, rows);
        column->size += (size_t)size * rows;
    }
    column->rows += rows;
}

static bool ensure(ls_bytes_column *column, size_t bytes)
{
    return column->capacity - column->size >= bytes || grow_data(column, bytes);
}

static inline bool room_for_run(const ls_columns *columns)
{
    enum { RUN_BYTES = LS_UNIFORM_RUN_ROWS * LS_UNIFORM_RUN_STRIDE_MAX };
    return columns->values.size + RUN_BYTES <= columns->bytes_max &&
           columns->keys.size + RUN_BYTES <= columns->bytes_max;
}

/* Takes the next run, whose offsets are all in the wanted range.  *rows is 0 if there is no run. */
static ls_code fill_run(ls_columns *columns, ls_records *records, size_t *rows)
{
    unsigned fields = columns->fields;
    size_t row = columns->rows;
    int64_t unwanted[LS_UNIFORM_RUN_ROWS];
    int64_t *timestamps =
        (fields & LS_COLUMN_TIMESTAMP) ? columns->timestamps + row : unwanted;
    ls_records before = *records;
    ls_uniform_run run;
    size_t taken = ls_uniform_run_take(records, &run, timestamps, columns->rows_max - row);
    *rows = taken;
    if (taken == 0) {
        return LS_OK;
    }
    size_t key_bytes = run.key_size < 0 ? 0 : (size_t)run.key_size * taken;
    size_t value_bytes = run.value_size < 0 ? 0 : (size_t)run.value_size * taken;
    if (((fields & LS_COLUMN_KEY) && !ensure(&columns->keys, key_bytes)) ||
        ((fields & LS_COLUMN_VALUE) && !ensure(&columns->values, value_bytes))) {
        *records = before;
        return LS_E_NO_MEMORY;
    }
    if (fields & LS_COLUMN_OFFSET) {
        for (size_t i = 0; i < taken; i++) {
            columns->offsets[row + i] = run.offset + (int64_t)i;
        }
    }
    if (fields & LS_COLUMN_TOMBSTONE) {
        memset(columns->tombstones + row, run.value_size < 0, taken);
    }
    if (fields & LS_COLUMN_KEY) {
        put_run(&columns->keys, run.key, run.key_size, run.stride, taken);
    }
    if (fields & LS_COLUMN_VALUE) {
        put_run(&columns->values, run.value, run.value_size, run.stride, taken);
    }
    if (fields & LS_COLUMN_HEADERS) {
        for (size_t i = 0; i < taken; i++) {
            columns->header_ends[row + i + 1] = (int32_t)columns->header_names.rows;
        }
    }
    columns->rows = row + taken;
    return LS_OK;
}

/* Takes as many records as the fast paths accept; their offsets are all in the wanted range.  If
 * records differ in shape, a block of them is taken before a run is tried again. */
static ls_code fill_quick(ls_columns *columns, ls_records *records)
{
    unsigned fields = columns->fields;
    row_block block;
    while (!full(columns)) {
        size_t run_rows = LS_UNIFORM_RUN_SHORT;
        while (run_rows >= LS_UNIFORM_RUN_SHORT && columns->rows < columns->rows_max &&
               room_for_run(columns)) {
            ls_code code = fill_run(columns, records, &run_rows);
            if (code != LS_OK) {
                return code;
            }
        }
        if (full(columns)) {
            return LS_OK;
        }
        size_t room = columns->rows_max - columns->rows;
        ls_records before = *records;
        size_t rows = parse_block(&block, records, room < BLOCK_ROWS ? room : BLOCK_ROWS);
        if (rows == 0) {
            return LS_OK;
        }
        if (block.value_bytes > columns->bytes_max || block.key_bytes > columns->bytes_max) {
            *records = before;         /* huge records: one by one, so that the bound holds */
            return LS_OK;
        }
        size_t row = columns->rows;
        if (fields & LS_COLUMN_OFFSET) {
            memcpy(columns->offsets + row, block.offsets, rows * sizeof(int64_t));
        }
        if (fields & LS_COLUMN_TIMESTAMP) {
            memcpy(columns->timestamps + row, block.timestamps, rows * sizeof(int64_t));
        }
        if (fields & LS_COLUMN_TOMBSTONE) {
            for (size_t i = 0; i < rows; i++) {
                columns->tombstones[row + i] = block.value_sizes[i] < 0;
            }
        }
        if (fields & LS_COLUMN_KEY) {
            if (!ensure(&columns->keys, block.key_bytes)) {
                return LS_E_NO_MEMORY;
            }
            put_block(&columns->keys, block.keys, block.key_sizes, rows, block.keys_null,
                      records->end);
        }
        if (fields & LS_COLUMN_VALUE) {
            if (!ensure(&columns->values, block.value_bytes)) {
                return LS_E_NO_MEMORY;
            }
            put_block(&columns->values, block.values, block.value_sizes, rows, block.values_null,
                      records->end);
        }
        if (fields & LS_COLUMN_HEADERS) {
            for (size_t i = 0; i < rows; i++) {
                columns->header_ends[row + i + 1] = (int32_t)columns->header_names.rows;
            }
        }
        columns->rows = row + rows;
    }
    return LS_OK;
}

ls_code ls_columns_fill(ls_columns *columns, ls_records *records, int64_t start, int64_t stop,
                        bool *stopped)
{
    *stopped = false;
    if (columns->rows == 0) {
        columns->log_append_time = records->log_append_time;
    } else if (columns->log_append_time != records->log_append_time) {
        return LS_OK;
    }
    bool inside = records->base_offset >= start &&
                  records->base_offset + records->last_offset_delta < stop;
    while (!full(columns)) {
        if (inside) {
            ls_code code = fill_quick(columns, records);
            if (code != LS_OK || full(columns)) {
                return code;
            }
        }
        ls_code code = fill_one(columns, records, start, stop, stopped);
        if (code != LS_OK || *stopped) {
            return code;
        }
    }
    return LS_OK;
}
