/* Aborted transactions: which batches of a log belong to one, and which markers compaction may
 * delete.  The input is the entries of .txnindex files, whose layout is here and nowhere else. */
#ifndef LS_ABORTED_H
#define LS_ABORTED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "batch.h"
#include "bytes.h"
#include "status.h"

typedef struct {
    int64_t producer_id;
    int64_t first_offset;
    int64_t last_offset;               /* of its marker */
    int64_t last_stable_offset;
} ls_aborted;

enum { LS_ABORTED_BYTES = 34 };        /* an entry of a .txnindex file */

/* State of a walk through the batches of a log in offset order.  It finds the batches of aborted
 * transactions, and the markers of transactions that have no batch left. */
typedef struct {
    ls_aborted *aborted;               /* by first offset */
    size_t count;
    size_t next;                       /* transactions before this one have begun */
    struct ls_open_aborted {
        size_t entry;
        bool observed;                 /* a batch of it is still there */
    } *open;
    size_t open_count, open_capacity;
    int64_t *committed;                /* producers with data in a transaction without a marker yet */
    size_t committed_count, committed_capacity;
} ls_transactions;

/* `entries` are the bytes of .txnindex files, in any order; a partial entry at the end is ignored. */
ls_code ls_transactions_init(ls_transactions *transactions, const uint8_t *entries, size_t size);
void ls_transactions_free(ls_transactions *transactions);

/* A data batch: whether its transaction was aborted. */
ls_code ls_transactions_data(ls_transactions *transactions, const ls_batch *batch, bool *aborted);

/* A control batch.  *useless: nothing of its transaction is left.  *kept is the index entry that its
 * marker still needs, or NULL; valid until the next call. */
ls_code ls_transactions_marker(ls_transactions *transactions, const ls_batch *batch,
                               const uint8_t *payload, size_t size, bool *useless,
                               const ls_aborted **kept);

/* Appends `aborted` to `out` as an entry of a .txnindex file.  LS_OK, LS_E_NO_MEMORY. */
ls_code ls_aborted_put(ls_bytes *out, const ls_aborted *aborted);

#endif
