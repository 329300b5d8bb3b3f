#include "cleaner.h"

#include <assert.h>
#include <string.h>

#include "batch_keep.h"

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

/* Returns whether the header of a batch must stay even if no record of the batch does. */
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
        looked_at ahead[LS_OFFSET_MAP_AHEAD];
        size_t count = 0;
        ls_code code = LS_OK;
        ls_record record;
        while (count < LS_OFFSET_MAP_AHEAD && (code = ls_records_step(records, &record)) == LS_OK) {
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
    while ((code = ls_records_step(records, &record)) == LS_OK) {
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
    if (position + written.size > INT32_MAX ||
        written.last_offset - cleaner->index.base_offset > INT32_MAX) {
        return LS_E_TOO_LARGE;         /* an index entry has 32 bits for each */
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
    return ls_bytes_put(&cleaner->out, data, (size_t)batch->size) ? note_written(cleaner, at)
                                                         : LS_E_NO_MEMORY;
}

/* Allocates memory for a verdict per record of the batch. */
static ls_code reserve_verdicts(ls_cleaner *cleaner, const ls_batch *batch, size_t size,
                                const char **reason)
{
    if (!ls_batch_count_fits(batch, size)) {
        *reason = ls_too_many_records;
        return LS_E_CORRUPT;
    }
    cleaner->keep.size = 0;
    return ls_bytes_reserve(&cleaner->keep, (size_t)batch->record_count) ? LS_OK : LS_E_NO_MEMORY;
}

/* Decides by the transaction of a batch.  *discard: the whole batch is deleted.  *useless_marker: the
 * marker is deleted once its delete horizon has passed. */
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
            code = ls_aborted_put(&cleaner->aborted, kept);
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
    if (!ls_bytes_put(&cleaner->out, packed, size)) {
        return LS_E_NO_MEMORY;
    }
    ls_code code = ls_batch_seal(&cleaner->out, at);
    return code == LS_OK ? note_written(cleaner, at) : code;
}
