#include "aborted.h"

#include <stdlib.h>
#include <string.h>

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

/* Grows an array of elements of `size` bytes by one element.  Returns false if there is no memory. */
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
        *useless = true;               /* an earlier compaction deleted its marker */
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

ls_code ls_aborted_put(ls_bytes *out, const ls_aborted *aborted)
{
    uint8_t entry[LS_ABORTED_BYTES] = {0};
    ls_store_i64(entry + 2, aborted->producer_id);
    ls_store_i64(entry + 10, aborted->first_offset);
    ls_store_i64(entry + 18, aborted->last_offset);
    ls_store_i64(entry + 26, aborted->last_stable_offset);
    return ls_bytes_put(out, entry, sizeof entry) ? LS_OK : LS_E_NO_MEMORY;
}
