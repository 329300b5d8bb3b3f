/* Records as columns, in Arrow's memory layout: one array per field, variable-size fields as one
 * data buffer with n + 1 end positions and a validity bitmap.  No object per record.
 */
#ifndef LS_COLUMNS_H
#define LS_COLUMNS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "batch.h"
#include "status.h"

enum {
    LS_COLUMN_OFFSET = 1,
    LS_COLUMN_TIMESTAMP = 2,
    LS_COLUMN_KEY = 4,
    LS_COLUMN_VALUE = 8,
    LS_COLUMN_HEADERS = 16,
    LS_COLUMN_ALL = 31,
    LS_COLUMN_TOMBSTONE = 32,          /* only when asked for: values have it as their nulls */
};

typedef struct {
    int32_t *ends;                     /* rows + 1 entries, ends[0] == 0 */
    uint8_t *data;
    uint8_t *valid;                    /* a bit per row, least significant first */
    size_t rows;
    size_t rows_capacity;
    size_t size;
    size_t capacity;
    size_t bytes_max;                  /* bound of the estimate when `data` grows */
    int64_t nulls;
} ls_bytes_column;

typedef struct {
    unsigned fields;                   /* LS_COLUMN_* to decode; the rest is skipped over */
    size_t rows;
    size_t rows_max;
    size_t bytes_max;                  /* of any data buffer: the chunk is full beyond this */
    bool log_append_time;              /* the timestamp type of all rows */
    int64_t *offsets;
    int64_t *timestamps;
    uint8_t *tombstones;               /* a byte per row: 1 if the value is null */
    ls_bytes_column keys;
    ls_bytes_column values;
    int32_t *header_ends;              /* rows + 1: header numbers */
    ls_bytes_column header_names;
    ls_bytes_column header_values;
} ls_columns;

/* Allocates all arrays by ls_memory_take, for `rows_max` rows; `bytes_hint` is an estimate of the
 * value bytes. */
ls_code ls_columns_init(ls_columns *columns, unsigned fields, size_t rows_max, size_t bytes_max,
                        size_t bytes_hint);
void ls_columns_free(ls_columns *columns);

/* Takes records with offsets in [start, stop) from the walk until it ends (LS_END), the chunk is
 * full (LS_OK), or an offset >= stop appears (LS_OK with *stopped set).  The record that did not
 * fit is not consumed.  A chunk is also full before timestamps of the other kind. */
ls_code ls_columns_fill(ls_columns *columns, ls_records *records, int64_t start, int64_t stop,
                        bool *stopped);

#endif
