#include "batch_check.h"

#include "memory.h"

void ls_records_walk(ls_records *records, ls_record_walk *walk)
{
    *walk = (ls_record_walk){
        .ordered = true, .timed = true, .least = INT64_MAX, .greatest = -1, .oldest = INT64_MAX,
    };
    int64_t expected = records->base_offset;
    records->log_append_time = false;  /* the records' own times */
    ls_record record;
    while ((walk->code = ls_records_step(records, &record)) == LS_OK) {
        walk->ordered = walk->ordered && record.offset == expected++;
        walk->timed = walk->timed && record.timestamp >= -1;
        walk->keyless += record.key_size < 0;
        walk->oldest = record.timestamp < walk->oldest ? record.timestamp : walk->oldest;
        if (record.timestamp != -1) {
            walk->least = record.timestamp < walk->least ? record.timestamp : walk->least;
            walk->greatest = record.timestamp > walk->greatest ? record.timestamp : walk->greatest;
        }
    }
    if (walk->greatest < 0) {
        walk->least = -1;
    }
}

/* Whether `data` is one batch with this codec, a right checksum, and as many records as offsets. */
static bool is_whole(const uint8_t *data, size_t size, unsigned codec, ls_batch *batch)
{
    return size >= LS_BATCH_HEADER_BYTES && ls_batch_parse(data, size, batch).code == LS_OK &&
           batch->size == (int64_t)size && ls_batch_codec(batch) == codec &&
           (int64_t)batch->record_count == batch->last_offset - batch->base_offset + 1 &&
           ls_batch_verify(data, batch);
}

static bool has_right_records(const ls_batch *batch, const uint8_t *content, size_t size,
                              ls_record_walk *walk)
{
    ls_records records;
    ls_records_open(&records, batch, content, size);
    ls_records_walk(&records, walk);
    return walk->code == LS_END && walk->ordered && walk->timed;
}

bool ls_batch_check(const uint8_t *data, size_t size, ls_batch *batch, ls_record_walk *walk)
{
    return is_whole(data, size, LS_CODEC_NONE, batch) &&
           has_right_records(batch, data + LS_BATCH_HEADER_BYTES, size - LS_BATCH_HEADER_BYTES,
                             walk);
}

bool ls_batch_check_lz4(const uint8_t *data, size_t size, ls_lz4_decode decode, int64_t content_max,
                        ls_batch *batch, ls_record_walk *walk)
{
    if (!is_whole(data, size, LS_CODEC_LZ4, batch)) {
        return false;
    }
    const uint8_t *frame = data + LS_BATCH_HEADER_BYTES;
    size_t frame_size = size - LS_BATCH_HEADER_BYTES;
    int64_t bound = ls_lz4_frame_bound(frame, frame_size);
    if (bound < 0 || bound > content_max) {
        return false;
    }
    uint8_t *content = ls_memory_take((size_t)bound);
    if (content == NULL) {
        return false;
    }
    int64_t made = ls_lz4_frame_content(frame, frame_size, decode, content, (size_t)bound);
    bool right = made >= 0 && has_right_records(batch, content, (size_t)made, walk);
    ls_memory_give(content);
    return right;
}

bool ls_batch_is_plain(const uint8_t *data, const ls_batch *batch, const ls_record_walk *walk,
                       const ls_batch_rules *rules, int64_t now)
{
    /* Times are -1 or more here, and `now` is not negative: the differences do not overflow. */
    return batch->attributes == 0 && batch->record_count > 0 &&
           ls_load_i64(data + LS_AT_PRODUCER_ID) < 0 && batch->size <= rules->size_max &&
           walk->greatest == batch->max_timestamp && !(rules->keyed && walk->keyless > 0) &&
           (walk->least < 0 || now - walk->least <= rules->before_max) &&
           walk->greatest - now <= rules->after_max;
}
