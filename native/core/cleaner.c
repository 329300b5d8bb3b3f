#include "cleaner.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "crc32c.h"

/* ---- bytes ---- */

void ls_bytes_free(ls_bytes *bytes)
{
    free(bytes->data);
    memset(bytes, 0, sizeof *bytes);
}

static bool reserve(ls_bytes *bytes, size_t more)
{
    size_t need;
    if (__builtin_add_overflow(bytes->size, more, &need)) {
        return false;
    }
    if (need <= bytes->capacity) {
        return true;
    }
    size_t capacity = bytes->capacity < 4096 ? 4096 : bytes->capacity;
    while (capacity < need) {
        if (__builtin_mul_overflow(capacity, (size_t)2, &capacity)) {
            return false;
        }
    }
    uint8_t *data = realloc(bytes->data, capacity);
    if (data == NULL) {
        return false;
    }
    bytes->data = data;
    bytes->capacity = capacity;
    return true;
}

static bool put(ls_bytes *bytes, const void *data, size_t size)
{
    if (!reserve(bytes, size)) {
        return false;
    }
    memcpy(bytes->data + bytes->size, data, size);
    bytes->size += size;
    return true;
}

/* ---- one batch, fewer records ---- */

static inline ls_code next_record(ls_records *records, ls_record *record)
{
    return ls_records_quick(records, record) ? LS_OK : ls_records_next(records, record);
}

/* A record as it stands from `start` to `end`, with another time delta.  It was walked before, so
 * its lengths are right. */
static uint8_t *store_record(uint8_t *at, const uint8_t *start, const uint8_t *end,
                             int64_t timestamp_delta)
{
    int32_t length = 0;
    int64_t old_delta;
    const uint8_t *rest = start + ls_varint32_load(start, end, &length);
    rest++;                            /* attributes: written 0 */
    rest += ls_varint64_load(rest, end, &old_delta);
    uint64_t zigzag = ls_zigzag64(timestamp_delta);
    size_t body = 1 + ls_varint_size(zigzag) + (size_t)(end - rest);
    at = ls_varint_store(at, (uint64_t)body << 1);
    *at++ = 0;
    at = ls_varint_store(at, zigzag);
    memcpy(at, rest, (size_t)(end - rest));
    return at + (end - rest);
}

/* A time delta and with it a length may become longer by this much. */
enum { RECORD_GROWTH = 10 + 5 };

ls_code ls_batch_keep(ls_bytes *out, const uint8_t *header, const ls_batch *batch,
                      const uint8_t *payload, size_t size, const uint8_t *keep,
                      int64_t last_offset, int64_t horizon)
{
    assert(last_offset >= batch->base_offset && last_offset <= batch->last_offset);
    size_t room;
    if (__builtin_mul_overflow((size_t)batch->record_count, (size_t)RECORD_GROWTH, &room) ||
        __builtin_add_overflow(room, size + LS_BATCH_HEADER_BYTES, &room) || !reserve(out, room)) {
        return LS_E_NO_MEMORY;
    }
    uint8_t *start = out->data + out->size;
    uint8_t *at = start + LS_BATCH_HEADER_BYTES;
    int64_t base_timestamp = horizon;
    int64_t max_timestamp = -1;
    int32_t kept = 0;
    ls_records records;
    ls_record record;
    ls_code code;
    ls_records_open(&records, batch, payload, size);
    const uint8_t *from = records.at;
    for (int32_t i = 0; (code = next_record(&records, &record)) == LS_OK; i++) {
        if (keep[i] != 0) {
            if (kept == 0 && horizon == LS_NO_HORIZON) {
                base_timestamp = record.timestamp;
            }
            if (base_timestamp == batch->base_timestamp && !records.log_append_time) {
                memcpy(at, from, (size_t)(records.at - from));
                at += records.at - from;
            } else {
                at = store_record(at, from, records.at,
                                  (int64_t)((uint64_t)record.timestamp - (uint64_t)base_timestamp));
            }
            if (kept == 0 || record.timestamp > max_timestamp) {
                max_timestamp = record.timestamp;
            }
            kept++;
        }
        from = records.at;
    }
    if (code != LS_END) {
        return code;
    }
    assert(kept > 0 && (size_t)(at - start) <= room);
    unsigned attributes = batch->attributes & ~(unsigned)LS_ATTR_DELETE_HORIZON & 0x7f;
    if (horizon != LS_NO_HORIZON) {
        attributes |= LS_ATTR_DELETE_HORIZON;
    }
    memcpy(start, header, LS_BATCH_HEADER_BYTES);
    ls_store_i16(start + LS_AT_ATTRIBUTES, (int16_t)attributes);
    ls_store_i32(start + LS_AT_LAST_OFFSET_DELTA, (int32_t)(last_offset - batch->base_offset));
    ls_store_i64(start + LS_AT_BASE_TIMESTAMP, base_timestamp);
    ls_store_i64(start + LS_AT_MAX_TIMESTAMP,
                 records.log_append_time ? batch->max_timestamp : max_timestamp);
    ls_store_i32(start + LS_AT_RECORD_COUNT, kept);
    out->size += (size_t)(at - start);
    return LS_OK;
}

ls_code ls_batch_keep_header(ls_bytes *out, const uint8_t *header)
{
    if (!put(out, header, LS_BATCH_HEADER_BYTES)) {
        return LS_E_NO_MEMORY;
    }
    uint8_t *batch = out->data + out->size - LS_BATCH_HEADER_BYTES;
    const unsigned kept = LS_ATTR_LOG_APPEND_TIME | LS_ATTR_TRANSACTIONAL | LS_ATTR_CONTROL;
    ls_store_i16(batch + LS_AT_ATTRIBUTES, (int16_t)(batch[LS_AT_ATTRIBUTES + 1] & kept));
    ls_store_i64(batch + LS_AT_BASE_TIMESTAMP, -1);
    ls_store_i32(batch + LS_AT_RECORD_COUNT, 0);
    return LS_OK;
}

ls_code ls_batch_seal(ls_bytes *out, size_t at)
{
    uint8_t *batch = out->data + at;
    size_t size = out->size - at;
    if (size - LS_LOG_OVERHEAD_BYTES > INT32_MAX) {
        return LS_E_TOO_LARGE;
    }
    ls_store_i32(batch + LS_AT_LENGTH, (int32_t)(size - LS_LOG_OVERHEAD_BYTES));
    ls_store_u32(batch + LS_AT_CRC,
                 ls_crc32c(0, batch + LS_AT_ATTRIBUTES, size - LS_AT_ATTRIBUTES));
    return LS_OK;
}

/* ---- transactions ---- */

static int by_first_offset(const void *a, const void *b)
{
    const ls_aborted *x = a, *y = b;
    return x->first_offset < y->first_offset ? -1 : x->first_offset > y->first_offset;
}

ls_code ls_transactions_init(ls_transactions *transactions, const uint8_t *entries, size_t size)
{
    memset(transactions, 0, sizeof *transactions);
    size_t count = size / LS_ABORTED_BYTES;
    if (count == 0) {
        return LS_OK;
    }
    transactions->aborted = calloc(count, sizeof *transactions->aborted);
    if (transactions->aborted == NULL) {
        return LS_E_NO_MEMORY;
    }
    for (size_t i = 0; i < count; i++) {
        const uint8_t *entry = entries + i * LS_ABORTED_BYTES;
        transactions->aborted[i] = (ls_aborted){
            .producer_id = ls_load_i64(entry + 2),
            .first_offset = ls_load_i64(entry + 10),
            .last_offset = ls_load_i64(entry + 18),
            .last_stable_offset = ls_load_i64(entry + 26),
        };
    }
    qsort(transactions->aborted, count, sizeof *transactions->aborted, by_first_offset);
    transactions->count = count;
    return LS_OK;
}

void ls_transactions_free(ls_transactions *transactions)
{
    free(transactions->aborted);
    free(transactions->open);
    free(transactions->committed);
    memset(transactions, 0, sizeof *transactions);
}

/* Room for one more element of an array of `size` bytes each. */
static bool grow(void **array, size_t count, size_t *capacity, size_t size)
{
    if (count < *capacity) {
        return true;
    }
    size_t more = *capacity == 0 ? 16 : *capacity * 2;
    void *larger = realloc(*array, more * size);
    if (larger == NULL) {
        return false;
    }
    *array = larger;
    *capacity = more;
    return true;
}

/* Aborted transactions that begin before this batch ends are open from now on; those that ended
 * before it begins are forgotten. */
static ls_code open_aborted(ls_transactions *t, const ls_batch *batch)
{
    size_t kept = 0;
    for (size_t i = 0; i < t->open_count; i++) {
        if (t->aborted[t->open[i].entry].last_offset >= batch->base_offset) {
            t->open[kept++] = t->open[i];
        }
    }
    t->open_count = kept;
    while (t->next < t->count && t->aborted[t->next].first_offset <= batch->last_offset) {
        if (t->aborted[t->next].last_offset >= batch->base_offset) {
            if (!grow((void **)&t->open, t->open_count, &t->open_capacity, sizeof *t->open)) {
                return LS_E_NO_MEMORY;
            }
            t->open[t->open_count].entry = t->next;
            t->open[t->open_count++].observed = false;
        }
        t->next++;
    }
    return LS_OK;
}

/* The number of the producer's open aborted transaction, or -1. */
static ptrdiff_t find_open(const ls_transactions *t, int64_t producer_id)
{
    for (size_t i = 0; i < t->open_count; i++) {
        if (t->aborted[t->open[i].entry].producer_id == producer_id) {
            return (ptrdiff_t)i;
        }
    }
    return -1;
}

ls_code ls_transactions_data(ls_transactions *t, const ls_batch *batch, bool *aborted)
{
    *aborted = false;
    if (!(batch->attributes & LS_ATTR_TRANSACTIONAL)) {
        return LS_OK;
    }
    ls_code code = open_aborted(t, batch);
    if (code != LS_OK) {
        return code;
    }
    ptrdiff_t open = find_open(t, batch->producer_id);
    if (open >= 0) {
        t->open[open].observed = true;
        *aborted = true;
        return LS_OK;
    }
    for (size_t i = 0; i < t->committed_count; i++) {
        if (t->committed[i] == batch->producer_id) {
            return LS_OK;
        }
    }
    if (!grow((void **)&t->committed, t->committed_count, &t->committed_capacity,
              sizeof *t->committed)) {
        return LS_E_NO_MEMORY;
    }
    t->committed[t->committed_count++] = batch->producer_id;
    return LS_OK;
}

enum { MARKER_ABORT = 0, MARKER_COMMIT = 1, MARKER_OTHER = 2 };

/* The type in a control record's key; anything that cannot be read is of no known type. */
static int marker_type(const ls_batch *batch, const uint8_t *payload, size_t size)
{
    ls_records records;
    ls_record record;
    ls_records_open(&records, batch, payload, size);
    if (ls_records_next(&records, &record) != LS_OK || record.key_size < 4 ||
        ls_load_i16(record.key) < 0) {
        return MARKER_OTHER;
    }
    int16_t type = ls_load_i16(record.key + 2);
    return type == MARKER_ABORT || type == MARKER_COMMIT ? type : MARKER_OTHER;
}

ls_code ls_transactions_marker(ls_transactions *t, const ls_batch *batch, const uint8_t *payload,
                               size_t size, bool *useless, const ls_aborted **kept)
{
    *useless = false;
    *kept = NULL;
    if (batch->record_count == 0) {
        *useless = true;               /* its marker went before */
        return LS_OK;
    }
    ls_code code = open_aborted(t, batch);
    if (code != LS_OK) {
        return code;
    }
    int type = marker_type(batch, payload, size);
    if (type == MARKER_ABORT) {
        ptrdiff_t open = find_open(t, batch->producer_id);
        *useless = open < 0 || !t->open[open].observed;
        if (open >= 0) {
            if (t->open[open].observed) {
                *kept = &t->aborted[t->open[open].entry];
            }
            t->open[open] = t->open[--t->open_count];
        }
    } else if (type == MARKER_COMMIT) {
        *useless = true;
        for (size_t i = 0; i < t->committed_count; i++) {
            if (t->committed[i] == batch->producer_id) {
                t->committed[i] = t->committed[--t->committed_count];
                *useless = false;
                break;
            }
        }
    }
    return LS_OK;
}

static ls_code put_aborted(ls_bytes *out, const ls_aborted *aborted)
{
    uint8_t entry[LS_ABORTED_BYTES] = {0};
    ls_store_i64(entry + 2, aborted->producer_id);
    ls_store_i64(entry + 10, aborted->first_offset);
    ls_store_i64(entry + 18, aborted->last_offset);
    ls_store_i64(entry + 26, aborted->last_stable_offset);
    return put(out, entry, sizeof entry) ? LS_OK : LS_E_NO_MEMORY;
}

/* ---- what goes ---- */

void ls_cleaner_init(ls_cleaner *cleaner, const ls_clean_rules *rules, int64_t base_offset,
                     int64_t interval_bytes)
{
    memset(cleaner, 0, sizeof *cleaner);
    cleaner->rules = *rules;
    cleaner->counts.last_purged_offset = -1;
    ls_index_tracker_init(&cleaner->index, base_offset, interval_bytes);
}

void ls_cleaner_free(ls_cleaner *cleaner)
{
    ls_bytes_free(&cleaner->out);
    ls_bytes_free(&cleaner->aborted);
    ls_bytes_free(&cleaner->keep);
    ls_index_tracker_free(&cleaner->index);
}

bool ls_cleaner_needs_payload(const ls_cleaner *cleaner, const ls_batch *batch)
{
    (void)cleaner;
    return batch->record_count > 0 && ls_batch_codec(batch) != LS_CODEC_NONE;
}

/* Whether a batch must be told of by its header even when it holds nothing. */
static bool must_stay(const ls_clean_rules *rules, const ls_batch *batch)
{
    if (batch->last_offset + 1 == rules->end_offset) {
        return true;
    }
    if (rules->map == NULL && batch->producer_id >= 0) {
        return true;                   /* a purge changes nothing about producers */
    }
    size_t low = 0, high = rules->producer_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (rules->producers[middle].producer_id < batch->producer_id) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    if (batch->producer_id < 0 || low == rules->producer_count ||
        rules->producers[low].producer_id != batch->producer_id) {
        return false;
    }
    const ls_producer_end *producer = &rules->producers[low];
    if (producer->last_offset >= 0) {
        return producer->last_offset == batch->last_offset;
    }
    return (batch->attributes & LS_ATTR_CONTROL) && producer->epoch == batch->producer_epoch;
}

static inline int64_t horizon_of(const ls_batch *batch)
{
    return batch->attributes & LS_ATTR_DELETE_HORIZON ? batch->base_timestamp : LS_NO_HORIZON;
}

/* Records whose slots of the map are asked for together: the memory answers while we go on. */
enum { LOOK_AHEAD = 16 };

typedef struct {
    ls_key_hash hash;
    int64_t offset;
    bool keyed;
    bool tombstone;
} looked_at;

typedef struct {
    int32_t kept;
    bool tombstones;                   /* among those that stay */
} verdicts;

static void judge_newest(ls_cleaner *cleaner, const looked_at *records, size_t count,
                         bool horizon_passed, uint8_t *keep, verdicts *result)
{
    const ls_offset_map *map = cleaner->rules.map;
    for (size_t i = 0; i < count; i++) {
        const looked_at *record = &records[i];
        keep[i] = 1;
        if (record->offset > map->latest_offset) {
            /* Not looked at in this round. */
        } else if (!record->keyed) {
            cleaner->counts.keyless++;
            keep[i] = 0;
        } else if (record->offset < ls_offset_map_get(map, record->hash)) {
            cleaner->counts.superseded++;
            keep[i] = 0;
        } else if (record->tombstone && horizon_passed) {
            cleaner->counts.tombstones++;
            keep[i] = 0;
        }
        result->kept += keep[i];
        result->tombstones |= keep[i] && record->tombstone;
    }
}

/* Compaction's verdict for each record of a data batch. */
static ls_code judge_compaction(ls_cleaner *cleaner, ls_records *records, bool horizon_passed,
                                verdicts *result)
{
    const ls_offset_map *map = cleaner->rules.map;
    uint8_t *keep = cleaner->keep.data;
    for (;;) {
        looked_at ahead[LOOK_AHEAD];
        size_t count = 0;
        ls_code code = LS_OK;
        ls_record record;
        while (count < LOOK_AHEAD && (code = next_record(records, &record)) == LS_OK) {
            looked_at *look = &ahead[count++];
            look->offset = record.offset;
            look->keyed = record.key_size >= 0;
            look->tombstone = record.value_size < 0;
            if (look->keyed && record.offset <= map->latest_offset) {
                look->hash = ls_offset_map_hash(map, record.key, (size_t)record.key_size);
                ls_offset_map_prefetch(map, look->hash);
            }
        }
        judge_newest(cleaner, ahead, count, horizon_passed, keep, result);
        keep += count;
        if (code != LS_OK) {
            return code == LS_END ? LS_OK : code;
        }
    }
}

static ls_code judge_purge(ls_cleaner *cleaner, ls_records *records, verdicts *result)
{
    const ls_clean_rules *rules = &cleaner->rules;
    uint8_t *keep = cleaner->keep.data;
    ls_record record;
    ls_code code;
    while ((code = next_record(records, &record)) == LS_OK) {
        bool hit = record.key_size >= 0 && (size_t)record.key_size == rules->key_size &&
                   memcmp(record.key, rules->key, rules->key_size) == 0 &&
                   record.offset >= rules->start_offset;
        if (hit) {
            cleaner->counts.purged++;
            cleaner->counts.last_purged_offset = record.offset;
        }
        *keep++ = !hit;
        result->kept += !hit;
    }
    return code == LS_END ? LS_OK : code;
}

/* The batch from `at` to the end of `out` is done. */
static ls_code note_written(ls_cleaner *cleaner, size_t at)
{
    ls_batch written;
    ls_status status = ls_batch_parse(cleaner->out.data + at, LS_BATCH_HEADER_BYTES, &written);
    assert(status.code == LS_OK);
    (void)status;
    int64_t position = cleaner->out_position + (int64_t)at;
    if (position + written.size > INT32_MAX) {
        return LS_E_TOO_LARGE;
    }
    cleaner->counts.bytes_kept += written.size;
    cleaner->counts.batches_kept++;
    cleaner->counts.records_kept += written.record_count;
    return ls_index_track(&cleaner->index, &written, position);
}

static ls_code put_header(ls_cleaner *cleaner, const uint8_t *data, const ls_batch *batch)
{
    size_t at = cleaner->out.size;
    ls_code code = ls_batch_keep_header(&cleaner->out, data);
    if (code == LS_OK) {
        code = ls_batch_seal(&cleaner->out, at);
    }
    cleaner->counts.batches_rewritten += batch->record_count > 0;
    return code == LS_OK ? note_written(cleaner, at) : code;
}

static ls_code put_copy(ls_cleaner *cleaner, const uint8_t *data, const ls_batch *batch)
{
    size_t at = cleaner->out.size;
    return put(&cleaner->out, data, (size_t)batch->size) ? note_written(cleaner, at)
                                                         : LS_E_NO_MEMORY;
}

/* Makes room for a verdict per record of the batch. */
static ls_code reserve_verdicts(ls_cleaner *cleaner, const ls_batch *batch, size_t size,
                                const char **reason)
{
    if (!ls_batch_count_fits(batch, size)) {
        *reason = ls_too_many_records;
        return LS_E_CORRUPT;
    }
    cleaner->keep.size = 0;
    return reserve(&cleaner->keep, (size_t)batch->record_count) ? LS_OK : LS_E_NO_MEMORY;
}

/* What its transaction means for a batch: *discard, all of it goes; *useless_marker, its marker
 * goes when its horizon has passed. */
static ls_code judge_transaction(ls_cleaner *cleaner, const ls_batch *batch, const uint8_t *payload,
                                 size_t size, bool horizon_passed, bool *discard,
                                 bool *useless_marker)
{
    ls_transactions *transactions = cleaner->rules.transactions;
    ls_code code = LS_OK;
    *discard = *useless_marker = false;
    if (transactions != NULL && (batch->attributes & LS_ATTR_CONTROL)) {
        const ls_aborted *kept;
        code = ls_transactions_marker(transactions, batch, payload, size, useless_marker, &kept);
        if (code == LS_OK && kept != NULL) {
            code = put_aborted(&cleaner->aborted, kept);
        }
        *discard = *useless_marker && horizon_passed;
        cleaner->counts.markers += *discard ? batch->record_count : 0;
    } else if (transactions != NULL) {
        code = ls_transactions_data(transactions, batch, discard);
        cleaner->counts.aborted += *discard ? batch->record_count : 0;
    }
    return code;
}

/* A verdict for each record of a data batch, in cleaner->keep. */
static ls_code judge_records(ls_cleaner *cleaner, const ls_batch *batch, const uint8_t *payload,
                             size_t size, bool horizon_passed, verdicts *result,
                             const char **reason)
{
    ls_code code = reserve_verdicts(cleaner, batch, size, reason);
    if (code != LS_OK) {
        return code;
    }
    ls_records records;
    ls_records_open(&records, batch, payload, size);
    code = cleaner->rules.map != NULL
               ? judge_compaction(cleaner, &records, horizon_passed, result)
               : judge_purge(cleaner, &records, result);
    if (code != LS_OK) {
        *reason = records.reason;
    }
    return code;
}

/* Adds a batch of the records that stay; all of them do in a control batch. */
static ls_code put_rewritten(ls_cleaner *cleaner, const uint8_t *data, const ls_batch *batch,
                             const uint8_t *payload, size_t size, int64_t horizon, bool *pack,
                             size_t *at, const char **reason)
{
    if (batch->attributes & LS_ATTR_CONTROL) {
        ls_code code = reserve_verdicts(cleaner, batch, size, reason);
        if (code != LS_OK) {
            return code;
        }
        memset(cleaner->keep.data, 1, (size_t)batch->record_count);
    }
    *at = cleaner->out.size;
    ls_code code = ls_batch_keep(&cleaner->out, data, batch, payload, size, cleaner->keep.data,
                                 batch->last_offset, horizon);
    if (code != LS_OK) {
        *reason = "a control record cannot be read";
        return code;
    }
    cleaner->counts.batches_rewritten++;
    if (ls_batch_codec(batch) != LS_CODEC_NONE) {
        *pack = true;
        return LS_OK;
    }
    code = ls_batch_seal(&cleaner->out, *at);
    return code == LS_OK ? note_written(cleaner, *at) : code;
}

ls_code ls_cleaner_batch(ls_cleaner *cleaner, const uint8_t *data, const ls_batch *batch,
                         const uint8_t *payload, size_t size, bool *pack, size_t *at,
                         const char **reason)
{
    const ls_clean_rules *rules = &cleaner->rules;
    int64_t horizon = horizon_of(batch);
    const bool horizon_passed = horizon != LS_NO_HORIZON && horizon <= rules->now_ms;
    *pack = false;
    cleaner->counts.records_read += batch->record_count;
    cleaner->counts.bytes_read += batch->size;
    cleaner->counts.batches_read++;
    bool discard, useless_marker;
    verdicts result = {0, false};
    ls_code code = judge_transaction(cleaner, batch, payload, size, horizon_passed, &discard,
                                     &useless_marker);
    if (code == LS_OK && !discard && (batch->attributes & LS_ATTR_CONTROL)) {
        result.kept = batch->record_count;
    } else if (code == LS_OK && !discard && batch->record_count > 0) {
        code = judge_records(cleaner, batch, payload, size, horizon_passed, &result, reason);
    }
    if (code != LS_OK) {
        return code;
    }
    if (result.kept == 0) {
        return must_stay(rules, batch) ? put_header(cleaner, data, batch) : LS_OK;
    }
    bool set_horizon = rules->map != NULL && horizon == LS_NO_HORIZON &&
                       (result.tombstones || useless_marker);
    if (result.kept == batch->record_count && !set_horizon) {
        return put_copy(cleaner, data, batch);
    }
    if (set_horizon && __builtin_add_overflow(rules->now_ms, rules->delete_retention_ms, &horizon)) {
        horizon = INT64_MAX;           /* never */
    }
    return put_rewritten(cleaner, data, batch, payload, size, horizon, pack, at, reason);
}

ls_code ls_cleaner_finish_batch(ls_cleaner *cleaner, size_t at, const uint8_t *packed, size_t size)
{
    cleaner->out.size = at + LS_BATCH_HEADER_BYTES;
    if (!put(&cleaner->out, packed, size)) {
        return LS_E_NO_MEMORY;
    }
    ls_code code = ls_batch_seal(&cleaner->out, at);
    return code == LS_OK ? note_written(cleaner, at) : code;
}

/* ---- reading keys into a map ---- */

ls_code ls_offset_map_read(ls_offset_map *map, const ls_batch *batch, const uint8_t *payload,
                           size_t size, int64_t start_offset, const char **reason)
{
    ls_records records;
    ls_records_open(&records, batch, payload, size);
    for (;;) {
        struct {
            ls_key_hash hash;
            int64_t offset;
        } ahead[LOOK_AHEAD];
        size_t count = 0;
        ls_code code = LS_OK;
        ls_record record;
        while (count < LOOK_AHEAD && (code = next_record(&records, &record)) == LS_OK) {
            if (record.key_size >= 0 && record.offset >= start_offset) {
                ahead[count].hash = ls_offset_map_hash(map, record.key, (size_t)record.key_size);
                ahead[count].offset = record.offset;
                ls_offset_map_prefetch(map, ahead[count].hash);
                count++;
            }
        }
        for (size_t i = 0; i < count; i++) {
            if (ls_offset_map_put(map, ahead[i].hash, ahead[i].offset) != LS_OK) {
                return LS_END;
            }
        }
        if (code != LS_OK) {
            *reason = records.reason;
            return code == LS_END ? LS_OK : code;
        }
    }
}
