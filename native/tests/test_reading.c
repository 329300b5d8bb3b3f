/* The core's quick ways of reading: runs of like records, reading ahead, lz4 frames. */
#define _GNU_SOURCE
#include <unistd.h>

#include "read_ahead.h"
#include "check.h"
#include "columns.h"
#include "lz4_frame.h"
#include "memory_io.h"
#include "uniform_run.h"
#include "sample.h"

enum { FD = 3 };                       /* memory_io looks at no descriptor */

/* ---- runs ---- */

/* A batch of records whose sizes, times and offsets change where `change` says. */
static void varied_batch(ls_builder *builder, int32_t count, int32_t change, uint64_t seed)
{
    static uint8_t bytes[4096];
    sample_fill(bytes, sizeof bytes, seed);
    ls_builder_init(builder, 1 << 22, 1 << 22);
    int64_t time = 1000;
    int32_t key_size = -1, value_size = 100;
    for (int32_t i = 0; i < count; i++) {
        if (change != 0 && i % change == change - 1) {
            key_size = (int32_t)(sample_random(&seed) % 40) - 1;
            value_size = (int32_t)(sample_random(&seed) % 400) - 1;
            time += (int64_t)(sample_random(&seed) % 100000) - 50000;
        }
        time += (int64_t)(sample_random(&seed) % 3);
        ls_new_record record = {
            .timestamp = time,
            .key = bytes + i % 100,
            .key_size = value_size < 0 && key_size < 0 ? 3 : key_size,
            .value = bytes + i % 1000,
            .value_size = value_size,
        };
        CHECK(ls_builder_add(builder, &record) == LS_OK);
    }
    ls_builder_seal(builder, LS_CODEC_NONE);
    ls_batches_finish(builder->data, builder->size, 500, 0, seed % 5 == 0 ? 77777 : -1);
}

static void open_walk(const ls_builder *builder, ls_batch *batch, ls_records *records)
{
    CHECK(ls_batch_parse(builder->data, builder->size, batch).code == LS_OK);
    ls_records_open(records, batch, builder->data + LS_BATCH_HEADER_BYTES,
                    builder->size - LS_BATCH_HEADER_BYTES);
}

static size_t compare_walks(const ls_builder *builder, size_t rows_max)
{
    ls_batch batch;
    ls_records quick, careful;
    open_walk(builder, &batch, &quick);
    open_walk(builder, &batch, &careful);
    size_t by_runs = 0;
    for (;;) {
        ls_uniform_run run;
        ls_record record;
        int64_t timestamps[LS_UNIFORM_RUN_ROWS];
        size_t rows = ls_uniform_run_take(&quick, &run, timestamps, rows_max);
        CHECK(rows <= rows_max && rows <= LS_UNIFORM_RUN_ROWS);
        for (size_t i = 0; i < rows; i++) {
            CHECK(ls_records_next(&careful, &record) == LS_OK);
            CHECK(record.offset == run.offset + (int64_t)i && record.timestamp == timestamps[i]);
            CHECK(record.key == run.key + i * run.stride && record.key_size == run.key_size);
            CHECK(record.value == run.value + i * run.stride);
            CHECK(record.value_size == run.value_size);
        }
        by_runs += rows > 1 ? rows : 0;
        if (rows == 0) {
            ls_code code = ls_records_next(&careful, &record);
            CHECK(ls_records_next(&quick, &record) == code);
            if (code == LS_END) {
                return by_runs;
            }
            CHECK(code == LS_OK);
        }
    }
}

static void runs_are_what_the_careful_walk_sees(void)
{
    for (uint64_t seed = 1; seed <= 40; seed++) {
        int32_t change = (int32_t)(seed % 8) * 9;      /* 0: never */
        ls_builder builder;
        varied_batch(&builder, 1500, change, seed);
        size_t taken = compare_walks(&builder, seed % 2 ? LS_UNIFORM_RUN_ROWS : 1 + seed % 60);
        CHECK(change != 0 || seed % 2 == 0 || taken > 1400);
        ls_builder_free(&builder);
    }
}

/* Any byte of a record changed: a run must not swallow what the careful walk refuses or reads
 * otherwise. */
static void a_changed_byte_is_not_run_over(void)
{
    ls_builder builder;
    varied_batch(&builder, 20, 0, 6);
    size_t from = LS_BATCH_HEADER_BYTES, stride = (builder.size - from) / 20;
    for (size_t at = from + 9 * stride; at < from + 12 * stride; at++) {
        for (int bit = 0; bit < 8; bit++) {
            builder.data[at] ^= (uint8_t)(1 << bit);
            ls_batch batch;
            ls_records quick, careful;
            open_walk(&builder, &batch, &quick);
            open_walk(&builder, &batch, &careful);
            ls_uniform_run run;
            int64_t timestamps[LS_UNIFORM_RUN_ROWS];
            size_t rows;
            while ((rows = ls_uniform_run_take(&quick, &run, timestamps, LS_UNIFORM_RUN_ROWS)) > 0) {
                for (size_t i = 0; i < rows; i++) {
                    ls_record record;
                    CHECK(ls_records_next(&careful, &record) == LS_OK);
                    CHECK(record.timestamp == timestamps[i]);
                    CHECK(record.value == run.value + i * run.stride);
                    CHECK(record.value_size == run.value_size && record.key_size == run.key_size);
                }
            }
            builder.data[at] ^= (uint8_t)(1 << bit);
        }
    }
    ls_builder_free(&builder);
}

static void columns_are_the_same_however_they_are_filled(void)
{
    for (uint64_t seed = 1; seed <= 24; seed++) {
        ls_builder builder;
        varied_batch(&builder, 1000, (int32_t)(seed % 6) * 5, seed);
        ls_batch batch;
        ls_records records, careful;
        open_walk(&builder, &batch, &records);
        open_walk(&builder, &batch, &careful);
        ls_columns columns;
        unsigned fields = seed % 3 == 0 ? LS_COLUMN_VALUE | LS_COLUMN_OFFSET : LS_COLUMN_ALL;
        CHECK(ls_columns_init(&columns, fields, 1000, 16 << 20, 0) == LS_OK);
        bool stopped;
        CHECK(ls_columns_fill(&columns, &records, 0, INT64_MAX, &stopped) == LS_OK);
        CHECK(columns.rows == 1000 && !stopped);
        for (size_t row = 0; row < 1000; row++) {
            ls_record record;
            CHECK(ls_records_next(&careful, &record) == LS_OK);
            CHECK(columns.offsets[row] == record.offset);
            CHECK(fields != LS_COLUMN_ALL || columns.timestamps[row] == record.timestamp);
            int32_t from = columns.values.ends[row], end = columns.values.ends[row + 1];
            bool valid = columns.values.valid[row / 8] >> (row % 8) & 1;
            CHECK(valid == (record.value_size >= 0));
            CHECK(end - from == (record.value_size < 0 ? 0 : record.value_size));
            CHECK(end == from ||
                  memcmp(columns.values.data + from, record.value, (size_t)(end - from)) == 0);
        }
        ls_columns_free(&columns);
        ls_builder_free(&builder);
    }
}

/* ---- reading ahead ---- */

enum { AHEAD_BATCHES = 400, AHEAD_RECORDS = 30 };

static void long_log(memory_file *file)
{
    ls_builder builder;
    ls_builder_init(&builder, 1 << 24, 1 << 24);
    for (int32_t i = 0; i < AHEAD_BATCHES; i++) {
        sample_batch(&builder, AHEAD_RECORDS, 100 + (size_t)(i * 37 % 700), 1000 + i);
    }
    ls_batches_finish(builder.data, builder.size, 0, 0, -1);
    memory_open(file, builder.data, builder.size);
    ls_builder_free(&builder);
}

/* Batches from `position` to where the reader stops; the position there. */
static int64_t read_ahead(ls_read_ahead *ahead, const memory_file *file, int64_t position,
                          int batches)
{
    const uint8_t *data;
    while (batches-- > 0 && (data = ls_read_ahead_batch(ahead, position)) != NULL) {
        ls_batch batch;
        CHECK(ls_batch_parse(data, LS_BATCH_HEADER_BYTES, &batch).code == LS_OK);
        CHECK(memcmp(data, file->data + position, (size_t)batch.size) == 0);
        position += batch.size;
    }
    return position;
}

static void reading_ahead_yields_every_batch(void)
{
    memory_file file;
    long_log(&file);
    ls_read_ahead *ahead = ls_read_ahead_new(&file.io, FD);
    if (ahead == NULL) {
        memory_close(&file);
        return;                        /* one processor */
    }
    int64_t size = (int64_t)file.size;
    CHECK(ls_read_ahead_start(ahead, 0, size, INT64_MAX));
    CHECK(read_ahead(ahead, &file, 0, INT32_MAX) == size);
    ls_read_ahead_stop(ahead);
    /* In pieces: what was loaded before a stop is used after it. */
    int64_t position = 0;
    while (position < size) {
        CHECK(ls_read_ahead_start(ahead, position, size, INT64_MAX));
        position = read_ahead(ahead, &file, position, 13);
        ls_read_ahead_stop(ahead);
    }
    CHECK(position == size);
    /* Back to the start, and stopped while it still has much to do. */
    CHECK(ls_read_ahead_start(ahead, 0, size, INT64_MAX));
    CHECK(read_ahead(ahead, &file, 0, 1) > 0);
    ls_read_ahead_free(ahead);
    memory_close(&file);
}

static void reading_ahead_stops_at_trouble(void)
{
    memory_file file;
    long_log(&file);
    ls_read_ahead *ahead = ls_read_ahead_new(&file.io, FD);
    if (ahead == NULL) {
        memory_close(&file);
        return;
    }
    int64_t size = (int64_t)file.size;
    /* Before the batch that starts at or above an offset. */
    CHECK(ls_read_ahead_start(ahead, 0, size, 100 * AHEAD_RECORDS));
    int64_t hundred = read_ahead(ahead, &file, 0, INT32_MAX);
    ls_read_ahead_stop(ahead);
    CHECK(ls_load_i64(file.data + hundred) == 100 * AHEAD_RECORDS);
    /* At damage. */
    file.data[hundred + 70] ^= 1;
    CHECK(ls_read_ahead_start(ahead, 0, size, INT64_MAX));
    CHECK(read_ahead(ahead, &file, 0, INT32_MAX) == hundred);
    ls_read_ahead_stop(ahead);
    file.data[hundred + 70] ^= 1;
    /* At a failed read, and on from there when it works again. */
    ls_read_ahead_free(ahead);
    ahead = ls_read_ahead_new(&file.io, FD);
    file.fail_at[CALL_READ] = file.calls[CALL_READ] + 3;
    file.fail_errno[CALL_READ] = EIO;
    CHECK(ls_read_ahead_start(ahead, 0, size, INT64_MAX));
    int64_t reached = read_ahead(ahead, &file, 0, INT32_MAX);
    CHECK(reached > 0 && reached < size);
    ls_read_ahead_stop(ahead);
    CHECK(ls_read_ahead_start(ahead, reached, size, INT64_MAX));
    CHECK(read_ahead(ahead, &file, reached, INT32_MAX) == size);
    ls_read_ahead_stop(ahead);
    /* At the limit, which may lie inside a batch. */
    CHECK(ls_read_ahead_start(ahead, 0, hundred + 100, INT64_MAX));
    CHECK(read_ahead(ahead, &file, 0, INT32_MAX) == hundred);
    ls_read_ahead_free(ahead);
    memory_close(&file);
}

/* ---- lz4 frames ---- */

/* Stands in for the library: a "compressed" block is its content, each byte turned over. */
static int turn_over(const char *source, char *target, int size, int capacity)
{
    if (size > capacity || (size > 0 && (uint8_t)source[0] == 0xee)) {
        return -1;
    }
    for (int i = 0; i < size; i++) {
        target[i] = (char)~source[i];
    }
    return size;
}

static size_t put_frame(uint8_t *frame, const uint32_t *words, size_t count)
{
    static const uint8_t head[7] = {0x04, 0x22, 0x4d, 0x18, 0x60, 0x40, 0x82};
    memcpy(frame, head, 7);
    size_t at = 7;
    for (size_t i = 0; i < count; i++) {
        for (int k = 0; k < 4; k++) {
            frame[at++] = (uint8_t)(words[i] >> (8 * k));
        }
        memset(frame + at, (int)i + 1, words[i] & 0x7fffffff);
        at += words[i] & 0x7fffffff;
    }
    return at;
}

/* "Compresses" what starts with a zero byte to half; all else grows by as much as it may. */
static int halve(const char *source, char *target, int size, int capacity)
{
    int made = source[0] == 0 ? size / 2 : size + size / 255 + 16;
    CHECK(made <= capacity);
    memset(target, 0x5a, (size_t)made);
    return made;
}

static void lz4_frames_are_made_within_their_room(void)
{
    enum { BLOCK = 64 << 10 };
    for (size_t size = 0; size < 3 * BLOCK; size += size % 7 == 3 ? 20011 : 1 + size / 3) {
        uint8_t *source = malloc(size + 1), *frame = malloc(ls_lz4_frame_room(size));
        CHECK(source != NULL && frame != NULL);
        memset(source, 7, size + 1);
        if (size > BLOCK) {
            source[BLOCK] = 0;         /* the second block gets smaller, the others are stored */
        }
        size_t made = ls_lz4_frame_make(source, size, halve, frame);
        CHECK(made <= ls_lz4_frame_room(size));
        int64_t bound = ls_lz4_frame_bound(frame, made);
        CHECK(bound >= (int64_t)size && bound <= (int64_t)size + BLOCK);
        free(source);
        free(frame);
    }
}

static void lz4_frames_are_walked_with_every_length_checked(void)
{
    enum { BLOCK = 64 << 10 };
    uint32_t words[] = {1000, BLOCK | 0x80000000u, 5, 0};
    uint8_t *frame = malloc(200000), *target = malloc(3 * BLOCK);
    CHECK(frame != NULL && target != NULL);
    size_t size = put_frame(frame, words, 4);
    int64_t bound = ls_lz4_frame_bound(frame, size);
    CHECK(bound == 3 * BLOCK);
    CHECK(ls_lz4_frame_content(frame, size, turn_over, target, (size_t)bound) == 1005 + BLOCK);
    CHECK(target[0] == 0xfe && target[1000] == 2 && target[1000 + BLOCK] == 0xfc);
    CHECK(ls_lz4_frame_bound(frame, size + 10) == bound);      /* what follows does not matter */
    for (size_t cut = 0; cut < size; cut++) {
        if (cut < 2000 || cut > size - 100 || cut % 997 == 0) {
            uint8_t *exact = malloc(cut + 1);          /* ASan sees every byte beyond */
            CHECK(exact != NULL);
            memcpy(exact, frame, cut);
            CHECK(ls_lz4_frame_bound(exact, cut) == -1);
            free(exact);
        }
    }
    for (size_t at = 0; at < 7; at++) {
        frame[at] ^= 4;                                /* another kind of frame */
        CHECK(ls_lz4_frame_bound(frame, size) == -1);
        frame[at] ^= 4;
    }
    uint32_t large[] = {BLOCK + 1, 0}, nothing[] = {0x80000000u, 0};
    CHECK(ls_lz4_frame_bound(frame, put_frame(frame, large, 2)) == -1);
    CHECK(ls_lz4_frame_bound(frame, put_frame(frame, nothing, 2)) == -1);
    size = put_frame(frame, words, 4);
    frame[11] = 0xee;                                  /* the decoder's complaint */
    CHECK(ls_lz4_frame_content(frame, size, turn_over, target, (size_t)bound) == -1);
    free(frame);
    free(target);
}

int main(void)
{
    void (*tests[])(void) = {
        runs_are_what_the_careful_walk_sees,
        a_changed_byte_is_not_run_over,
        columns_are_the_same_however_they_are_filled,
        reading_ahead_yields_every_batch,
        reading_ahead_stops_at_trouble,
        lz4_frames_are_made_within_their_room,
        lz4_frames_are_walked_with_every_length_checked,
    };
    size_t count = sizeof tests / sizeof *tests;
    for (size_t i = 0; i < count; i++) {
        tests[i]();
    }
    printf("        test_reading: %zu tests passed\n", count);
    return 0;
}
