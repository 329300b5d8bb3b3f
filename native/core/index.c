#include "index.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

int64_t ls_offset_index_search(const uint8_t *entries, size_t count, int32_t relative_offset)
{
    size_t low = 0, high = count;      /* the answer is in [low - 1, high) */
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (ls_load_i32(entries + middle * LS_OFFSET_ENTRY_BYTES) <= relative_offset) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return (int64_t)low - 1;
}

int64_t ls_position_search(const uint8_t *entries, size_t count, int64_t position)
{
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (ls_load_i32(entries + middle * LS_OFFSET_ENTRY_BYTES + 4) <= position) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return (int64_t)low - 1;
}

int64_t ls_time_index_search(const uint8_t *entries, size_t count, int64_t timestamp)
{
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (ls_load_i64(entries + middle * LS_TIME_ENTRY_BYTES) <= timestamp) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return (int64_t)low - 1;
}

void ls_entries_free(ls_entries *entries)
{
    free(entries->data);
    memset(entries, 0, sizeof *entries);
}

bool ls_entries_copy(ls_entries *entries, const void *data, size_t size)
{
    size_t capacity = size < 1024 ? 1024 : size;
    uint8_t *copy = malloc(capacity);
    if (copy == NULL) {
        return false;
    }
    if (size > 0) {
        memcpy(copy, data, size);
    }
    free(entries->data);
    *entries = (ls_entries){copy, size, capacity};
    return true;
}

uint8_t *ls_entries_add(ls_entries *entries, size_t bytes)
{
    if (entries->capacity - entries->size < bytes) {
        size_t capacity = entries->capacity == 0 ? 1024 : entries->capacity;
        if (__builtin_mul_overflow(capacity, (size_t)2, &capacity)) {
            return NULL;
        }
        uint8_t *data = realloc(entries->data, capacity);
        if (data == NULL) {
            return NULL;
        }
        entries->data = data;
        entries->capacity = capacity;
    }
    uint8_t *entry = entries->data + entries->size;
    entries->size += bytes;
    return entry;
}

void ls_index_tracker_init(ls_index_tracker *tracker, int64_t base_offset, int64_t interval_bytes)
{
    memset(tracker, 0, sizeof *tracker);
    tracker->base_offset = base_offset;
    tracker->interval_bytes = interval_bytes;
    tracker->max_timestamp = -1;
    tracker->max_timestamp_offset = base_offset;
    tracker->last_time_entry = -1;
}

void ls_index_tracker_free(ls_index_tracker *tracker)
{
    ls_entries_free(&tracker->offsets);
    ls_entries_free(&tracker->times);
}

static ls_code add_time_entry(ls_index_tracker *tracker)
{
    if (tracker->max_timestamp <= tracker->last_time_entry) {
        return LS_OK;                  /* timestamps in the file strictly increase */
    }
    uint8_t *entry = ls_entries_add(&tracker->times, LS_TIME_ENTRY_BYTES);
    if (entry == NULL) {
        return LS_E_NO_MEMORY;
    }
    ls_store_i64(entry, tracker->max_timestamp);
    ls_store_i32(entry + 8, (int32_t)(tracker->max_timestamp_offset - tracker->base_offset));
    tracker->last_time_entry = tracker->max_timestamp;
    return LS_OK;
}

ls_code ls_index_track(ls_index_tracker *tracker, const ls_batch *batch, int64_t position)
{
    assert(batch->last_offset >= tracker->base_offset);
    assert(batch->last_offset - tracker->base_offset <= INT32_MAX);
    if (batch->max_timestamp > tracker->max_timestamp) {
        tracker->max_timestamp = batch->max_timestamp;
        tracker->max_timestamp_offset = batch->last_offset;
    }
    if (position - tracker->last_indexed_position <= tracker->interval_bytes) {
        return LS_OK;
    }
    uint8_t *entry = ls_entries_add(&tracker->offsets, LS_OFFSET_ENTRY_BYTES);
    if (entry == NULL) {
        return LS_E_NO_MEMORY;
    }
    ls_store_i32(entry, (int32_t)(batch->last_offset - tracker->base_offset));
    ls_store_i32(entry + 4, (int32_t)position);
    tracker->last_indexed_position = position;
    return add_time_entry(tracker);
}

ls_code ls_index_finish(ls_index_tracker *tracker)
{
    return add_time_entry(tracker);
}
