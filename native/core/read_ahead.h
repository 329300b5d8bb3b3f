/* Reading ahead: a second thread loads and verifies what the caller will decode next.
 *
 * Copying from the page cache and checksumming take about as long as decoding; on a second processor
 * they run concurrently with it.  The thread lives between ls_read_ahead_start and
 * ls_read_ahead_stop; the file must stay open that long.  Loaded windows stay for the next start.
 *
 * All functions are for one caller at a time.  In the child of a fork there is no thread any more,
 * and nothing waits for it.
 */
#ifndef LS_READ_AHEAD_H
#define LS_READ_AHEAD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "segment.h"

typedef struct ls_read_ahead ls_read_ahead;

enum {
    LS_READ_AHEAD_WINDOWS = 8,              /* of LS_WINDOW_BYTES each: what it may hold */
    LS_READ_AHEAD_AFTER_BYTES = 512 << 10,  /* read alone first: most scans are short */
    LS_READ_AHEAD_MIN_BYTES = 4 << 20,      /* to be left: a thread must be worth its start */
};

/* NULL: no memory, or no second processor for this process. */
ls_read_ahead *ls_read_ahead_new(const ls_io *io, int fd);
void ls_read_ahead_free(ls_read_ahead *ahead);

/* Starts the thread at `position`, which is the start of a batch.  The thread stops at `limit`, before
 * a batch at or above `stop_offset`, and at bytes that are not a valid batch of moderate size.
 * Returns false if no thread could be started. */
bool ls_read_ahead_start(ls_read_ahead *ahead, int64_t position, int64_t limit, int64_t stop_offset);

/* Returns the verified batch at `position`; waits for it.  NULL: the thread stopped before it, and the
 * caller must read it itself.  The memory is valid until a batch after its window is asked for. */
const uint8_t *ls_read_ahead_batch(ls_read_ahead *ahead, int64_t position);

/* Whether ls_read_ahead_batch would answer without waiting. */
bool ls_read_ahead_ready(const ls_read_ahead *ahead, int64_t position);

/* Ends the thread; waits for the window it is at. */
void ls_read_ahead_stop(ls_read_ahead *ahead);

#endif
