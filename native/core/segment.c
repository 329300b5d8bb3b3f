#include "segment.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "crc32c.h"
#include "memory.h"

/* Cuts a file back to `position` if the write there failed. */
static ls_status undo_failed(const ls_io *io, int fd, int64_t position, ls_status status)
{
    if (status.code != LS_OK) {
        int cut;
        do {
            cut = io->truncate(io, fd, position);
        } while (cut == -EINTR);
        if (cut < 0) {
            status.code = LS_E_UNDONE;
        }
    }
    return status;
}

ls_status ls_append(const ls_io *io, int fd, const void *data, size_t size, int64_t position)
{
    return undo_failed(io, fd, position, ls_write_at(io, fd, data, size, position));
}

ls_status ls_append_parts(const ls_io *io, int fd, const void *head, size_t head_size,
                          const void *rest, size_t rest_size, int64_t position)
{
    return undo_failed(io, fd, position,
                       ls_write_parts_at(io, fd, head, head_size, rest, rest_size, position));
}

/* ---- window ---- */

void ls_window_init(ls_window *window, const ls_io *io, int fd, size_t ahead)
{
    memset(window, 0, sizeof *window);
    window->io = io;
    window->fd = fd;
    window->ahead = ahead;
}

void ls_window_free(ls_window *window)
{
    ls_memory_give_pages(window->data);
    window->data = NULL;
    window->capacity = 0;
    window->filled = 0;
}

/* Slack after the data: decoders load whole vectors without a check of the end. */
enum { SLACK_BYTES = 64 };

static ls_status grow(ls_window *window, size_t need)
{
    if (need <= window->capacity) {
        return ls_ok();
    }
    uint8_t *data = ls_memory_pages(need + SLACK_BYTES);
    if (data == NULL) {
        return ls_fail(LS_E_NO_MEMORY, -1, "no memory for a batch");
    }
    if (window->filled > 0) {
        memcpy(data, window->data, window->filled);
    }
    memset(data + need, 0, SLACK_BYTES);
    ls_memory_give_pages(window->data);
    window->data = data;
    window->capacity = need;
    return ls_ok();
}

/* Makes [position, position + need) available; reads ahead up to the capacity or `limit`. */
static ls_status load(ls_window *window, int64_t position, size_t need, int64_t limit,
                      size_t ahead, const uint8_t **data)
{
    assert(position >= 0 && need > 0 && (int64_t)need <= limit - position);
    int64_t into = position - window->start;
    if (ls_window_holds(window, position, need)) {
        *data = window->data + into;
        return ls_ok();
    }
    size_t want = ahead > need ? ahead : need;
    if ((int64_t)want > limit - position) {
        want = (size_t)(limit - position);
    }
    ls_status status = grow(window, want > need ? want : need);
    if (status.code != LS_OK) {
        return status;
    }
    size_t kept = 0;
    if (into >= 0 && into < (int64_t)window->filled) {
        kept = window->filled - (size_t)into;
        memmove(window->data, window->data + into, kept);
    }
    window->start = position;
    window->filled = kept;
    size_t got = 0;
    if (want > kept) {
        status = ls_read_at(window->io, window->fd, window->data + kept, want - kept,
                            position + (int64_t)kept, &got);
        window->filled = kept + got;
        if (status.code != LS_OK) {
            return status;
        }
    }
    if (window->filled < need) {
        return ls_fail(LS_E_CORRUPT, position, "the file ends before its batches do");
    }
    *data = window->data;
    return ls_ok();
}

/* Returns LS_E_LEGACY if the checksum of a message of format 0 or 1 is right, and LS_E_CORRUPT if it
 * is wrong: then the magic byte is damaged. */
static ls_status tell_legacy(ls_window *window, int64_t position, int64_t limit)
{
    const uint8_t *data;
    ls_status damaged = ls_fail(LS_E_CORRUPT, position, "the magic byte is not 2");
    ls_status status = load(window, position, LS_MAGIC_BYTES, limit, window->ahead, &data);
    if (status.code != LS_OK) {
        return status;
    }
    int64_t size = (int64_t)ls_load_i32(data + LS_AT_LENGTH) + LS_LOG_OVERHEAD_BYTES;
    if (size < LS_MAGIC_BYTES || size > limit - position || size > LS_LEGACY_BYTES_MAX) {
        return damaged;
    }
    status = load(window, position, (size_t)size, limit, (size_t)size, &data);
    if (status.code != LS_OK) {
        return status;
    }
    return ls_legacy_verify(data, (size_t)size)
               ? ls_fail(LS_E_LEGACY, position, "message format 0 or 1")
               : damaged;
}

ls_status ls_window_header(ls_window *window, int64_t position, int64_t limit, ls_batch *batch)
{
    if (position >= limit) {
        return ls_fail(LS_END, position, "");
    }
    if (limit - position < LS_BATCH_HEADER_BYTES) {
        return ls_fail(LS_E_CORRUPT, position, "an incomplete batch header");
    }
    const uint8_t *data;
    ls_status status = load(window, position, LS_BATCH_HEADER_BYTES, limit, window->ahead, &data);
    if (status.code != LS_OK) {
        return status;
    }
    status = ls_batch_parse(data, LS_BATCH_HEADER_BYTES, batch);
    status.position = position;
    if (status.code == LS_E_LEGACY) {
        return tell_legacy(window, position, limit);
    }
    if (status.code == LS_OK && batch->size > limit - position) {
        return ls_fail(LS_E_CORRUPT, position, "a batch reaches beyond the end of the file");
    }
    return status;
}

/* Verifies the checksum of a batch whose unverified length is too large to allocate. */
static ls_status verify_piecemeal(ls_window *window, int64_t position, const ls_batch *batch)
{
    int64_t at = position + LS_AT_ATTRIBUTES, end = position + batch->size;
    uint32_t crc = 0;
    while (at < end) {
        int64_t part = end - at < LS_WINDOW_BYTES ? end - at : LS_WINDOW_BYTES;
        const uint8_t *data;
        ls_status status = load(window, at, (size_t)part, end, (size_t)part, &data);
        if (status.code != LS_OK) {
            return status;
        }
        crc = ls_crc32c(crc, data, (size_t)part);
        at += part;
    }
    if (crc != batch->crc) {
        return ls_fail(LS_E_CORRUPT, position, "the checksum does not match");
    }
    return ls_ok();
}

ls_status ls_window_batch(ls_window *window, int64_t position, int64_t limit, ls_batch *batch,
                          const uint8_t **data)
{
    ls_status status = ls_window_header(window, position, limit, batch);
    if (status.code != LS_OK) {
        return status;
    }
    bool large = batch->size > LS_TRUSTED_BYTES;
    if (large) {
        status = verify_piecemeal(window, position, batch);
        if (status.code != LS_OK) {
            return status;
        }
    }
    status = load(window, position, (size_t)batch->size, limit,
                  large ? (size_t)batch->size : window->ahead, data);
    if (status.code != LS_OK) {
        return status;
    }
    if (!large && !ls_batch_verify(*data, batch)) {
        return ls_fail(LS_E_CORRUPT, position, "the checksum does not match");
    }
    return ls_ok();
}

ls_status ls_window_part(ls_window *window, int64_t position, int64_t part, int64_t limit,
                         const uint8_t **data)
{
    return load(window, position, (size_t)part, limit, (size_t)part, data);
}

ls_status ls_window_find(ls_window *window, int64_t position, int64_t limit, int64_t offset,
                         int64_t landing, int64_t expected, int64_t *found)
{
    for (;;) {
        ls_batch batch;
        ls_status status = ls_window_header(window, position, limit, &batch);
        if (status.code != LS_OK) {
            return status;
        }
        if (batch.base_offset < expected || (landing >= 0 && batch.last_offset != landing)) {
            return ls_fail(LS_E_CORRUPT, position, "an offset contradicts the index or the log");
        }
        landing = -1;
        if (batch.last_offset >= offset) {
            *found = position;
            return ls_ok();
        }
        expected = batch.last_offset + 1;
        position += batch.size;
    }
}

ls_status ls_window_span(ls_window *window, int64_t position, int64_t limit, int64_t end,
                         int64_t stop, int64_t *reached, int64_t *next_offset)
{
    int64_t first = position, expected = 0;
    while (position < end) {
        ls_batch batch;
        ls_status status = ls_window_header(window, position, limit, &batch);
        if (status.code == LS_END) {
            break;
        }
        if (status.code == LS_OK && batch.base_offset < expected) {
            status = ls_fail(LS_E_CORRUPT, position, "offsets do not follow one another");
        }
        if (status.code != LS_OK) {
            bool damaged = status.code == LS_E_CORRUPT || status.code == LS_E_LEGACY;
            return damaged && position > first ? ls_ok() : status;
        }
        if (batch.size > end - position || batch.last_offset >= stop) {
            break;
        }
        expected = batch.last_offset + 1;
        position += batch.size;
        *reached = position;
        *next_offset = expected;
    }
    return ls_ok();
}

ls_status ls_window_resync(ls_window *window, int64_t position, int64_t limit, int64_t offset_min,
                           int64_t offset_max, int64_t budget, int64_t *found, int64_t *reached)
{
    int64_t at = position + 1;
    int64_t stop = budget < limit - at ? at + budget : limit;
    *found = -1;
    while (at < stop && limit - at >= LS_BATCH_HEADER_BYTES) {
        const uint8_t *data;
        ls_status status = load(window, at, LS_BATCH_HEADER_BYTES, limit, LS_WINDOW_BYTES, &data);
        if (status.code != LS_OK) {
            return status;
        }
        size_t here = window->filled - (size_t)(data - window->data);
        size_t tries = here - LS_BATCH_HEADER_BYTES + 1;
        for (size_t i = 0; i < tries; i++, at++) {
            /* Cheap tests first: almost every position fails on the magic byte or the offset. */
            if (data[i + LS_AT_MAGIC] != 2) {
                continue;
            }
            int64_t base = ls_load_i64(data + i);
            if (base < offset_min || base > offset_max) {
                continue;
            }
            ls_batch batch;
            if (ls_batch_parse(data + i, LS_BATCH_HEADER_BYTES, &batch).code != LS_OK ||
                batch.size > limit - at || batch.last_offset > offset_max) {
                continue;
            }
            const uint8_t *whole;
            status = ls_window_batch(window, at, limit, &batch, &whole);
            if (status.code == LS_OK) {
                *found = at;
                *reached = at;
                return status;
            }
            if (status.code != LS_E_CORRUPT) {
                return status;
            }
            stop -= batch.size;        /* verifying it was work, too */
            at++;                      /* the window may have moved: load again */
            break;
        }
    }
    *reached = at - 1;
    if (limit - at < LS_BATCH_HEADER_BYTES) {
        return ls_fail(LS_END, limit, "");
    }
    return ls_ok();
}

/* ---- valid prefix ---- */

void ls_prefix_init(ls_prefix *prefix, const ls_io *io, int fd, int64_t base_offset,
                    int64_t position, int64_t limit, int64_t next_offset, int64_t interval_bytes)
{
    memset(prefix, 0, sizeof *prefix);
    ls_window_init(&prefix->window, io, fd, LS_WINDOW_BYTES);
    ls_index_tracker_init(&prefix->index, base_offset, interval_bytes);
    prefix->position = position;
    prefix->limit = limit;
    prefix->next_offset = next_offset;
    prefix->first_timestamp = -1;
}

void ls_prefix_free(ls_prefix *prefix)
{
    ls_window_free(&prefix->window);
    ls_index_tracker_free(&prefix->index);
    ls_entries_free(&prefix->epochs);
}

/* Adds an entry where the leader epoch changes.  Epochs normally only grow; if they do not, the caller
 * decides which entries to use. */
static ls_code track_epoch(ls_prefix *prefix, const ls_batch *batch)
{
    if (prefix->batches > 0 && batch->leader_epoch == prefix->last_epoch) {
        return LS_OK;
    }
    uint8_t *entry = ls_entries_add(&prefix->epochs, LS_EPOCH_ENTRY_BYTES);
    if (entry == NULL) {
        return LS_E_NO_MEMORY;
    }
    ls_store_i32(entry, batch->leader_epoch);
    ls_store_i64(entry + 4, batch->base_offset);
    prefix->last_epoch = batch->leader_epoch;
    return LS_OK;
}

ls_status ls_prefix_step(ls_prefix *prefix, int64_t budget)
{
    int64_t left = prefix->limit - prefix->position;
    int64_t stop = budget < left ? prefix->position + budget : prefix->limit;
    while (prefix->position < stop || stop == prefix->limit) {   /* LS_END ends it at the limit */
        ls_batch batch;
        ls_status status =
            ls_window_header(&prefix->window, prefix->position, prefix->limit, &batch);
        if (status.code != LS_OK) {
            return status;
        }
        if (batch.size > LS_WINDOW_BYTES) {
            status = verify_piecemeal(&prefix->window, prefix->position, &batch);
        } else {
            const uint8_t *data;
            status = ls_window_batch(&prefix->window, prefix->position, prefix->limit, &batch,
                                     &data);
        }
        if (status.code != LS_OK) {
            return status;
        }
        if (batch.base_offset < prefix->next_offset ||
            (prefix->dense && batch.base_offset != prefix->next_offset)) {
            return ls_fail(LS_E_CORRUPT, prefix->position, "offsets do not follow one another");
        }
        if (batch.last_offset - prefix->index.base_offset > INT32_MAX) {
            return ls_fail(LS_E_CORRUPT, prefix->position, "an offset too far from the segment's base");
        }
        ls_code code = ls_index_track(&prefix->index, &batch, prefix->position);
        if (code != LS_OK) {
            return ls_fail(code, prefix->position, "no memory for an index entry");
        }
        if (track_epoch(prefix, &batch) != LS_OK) {
            return ls_fail(LS_E_NO_MEMORY, prefix->position, "no memory for a leader epoch");
        }
        if (prefix->batches++ == 0) {
            prefix->first_timestamp = batch.max_timestamp;
        }
        prefix->producers += ls_batch_has_producer(&batch);
        prefix->next_offset = batch.last_offset + 1;
        prefix->position += batch.size;
    }
    return ls_ok();
}
