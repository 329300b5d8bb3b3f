/* One .log file: append, read by window, find the valid prefix, find the next valid batch.
 *
 * A batch is valid if its header is and its checksum is right.  The caller serialises appends to a
 * file.  Reading needs no lock: a reader stops at a `limit` that was published after the bytes below
 * it were written.
 */
#ifndef LS_SEGMENT_H
#define LS_SEGMENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "batch.h"
#include "index.h"
#include "io.h"
#include "status.h"

/* Writes `size` bytes at `position`, the current end of the file.  On failure the file is truncated to
 * `position`, so that no batch is ever appended after a half-written one.  If the truncation fails,
 * the code is LS_E_UNDONE and the file must not be appended to any more. */
ls_status ls_append(const ls_io *io, int fd, const void *data, size_t size, int64_t position);

/* The same for two parts, one after the other, with one call. */
ls_status ls_append_parts(const ls_io *io, int fd, const void *head, size_t head_size,
                          const void *rest, size_t rest_size, int64_t position);

/* A reused buffer over a stretch of a file. */
typedef struct {
    const ls_io *io;
    int fd;
    uint8_t *data;
    size_t capacity;
    int64_t start;                     /* file position of data[0] */
    size_t filled;
    size_t ahead;                      /* how much to read at a time, at most */
} ls_window;

enum { LS_LEGACY_BYTES_MAX = 16 << 20 };
enum { LS_TRUSTED_BYTES = 4 << 20 };   /* memory that an unverified length may cost */
enum { LS_WINDOW_BYTES = 256 * 1024 }; /* stays in the second-level cache */

void ls_window_init(ls_window *window, const ls_io *io, int fd, size_t ahead);
void ls_window_free(ls_window *window);

/* The batch at `position`, whole and with its checksum verified.  `*data` stays valid until the
 * next call on this window.  LS_END when position == limit.  A batch that claims to be larger than
 * LS_TRUSTED_BYTES is checked piecemeal before memory is taken for it. */
ls_status ls_window_batch(ls_window *window, int64_t position, int64_t limit, ls_batch *batch,
                          const uint8_t **data);

/* Reads the first `part` bytes, header included, of a batch whose checksum was verified before.  The
 * batch ends at or below `limit`. */
ls_status ls_window_part(ls_window *window, int64_t position, int64_t part, int64_t limit,
                         const uint8_t **data);

/* Whether the next `size` bytes from `position` are in memory already. */
static inline bool ls_window_holds(const ls_window *window, int64_t position, size_t size)
{
    int64_t into = position - window->start;
    return into >= 0 && into <= (int64_t)window->filled &&
           (size_t)((int64_t)window->filled - into) >= size;
}

/* Like ls_window_batch, but the header alone and no checksum: for walking to a place that is
 * verified on landing.  The batch is known to end at or before `limit`. */
ls_status ls_window_header(ls_window *window, int64_t position, int64_t limit, ls_batch *batch);

/* Walks headers from `position` to the first batch whose last offset is >= `offset`.  LS_END if there
 * is none.  `landing`, if not -1, is the last offset that the first batch must have (from the index
 * entry); `expected` is the least offset it may have. */
ls_status ls_window_find(ls_window *window, int64_t position, int64_t limit, int64_t offset,
                         int64_t landing, int64_t expected, int64_t *found);

/* Walks headers from the batch at `position`, and stops before the first batch that ends beyond
 * position `end` or whose last offset is >= `stop`.  *reached is the position there and *next_offset
 * the offset after the last batch before it; both are left alone if there is no batch.  Damage after
 * the first batch ends the walk too.  No checksum is computed. */
ls_status ls_window_span(ls_window *window, int64_t position, int64_t limit, int64_t end,
                         int64_t stop, int64_t *reached, int64_t *next_offset);

/* Finds the first position > `position` where a valid batch with a base offset in
 * [offset_min, offset_max] starts.  Returns LS_END if there is none before `limit`.  A call examines
 * at most `budget` bytes: after LS_OK with *found == -1 the caller calls again from *reached. */
ls_status ls_window_resync(ls_window *window, int64_t position, int64_t limit, int64_t offset_min,
                           int64_t offset_max, int64_t budget, int64_t *found, int64_t *reached);

enum { LS_EPOCH_ENTRY_BYTES = 12 };    /* i32 leader epoch, i64 offset; in memory only */

/* The longest prefix of valid batches, and its indexes.  Resumable, so that the caller can show
 * progress and be interrupted. */
typedef struct {
    ls_window window;
    ls_index_tracker index;
    int64_t position;                  /* all batches below are valid */
    int64_t limit;
    int64_t next_offset;               /* least offset the next batch may have */
    int64_t first_timestamp;           /* max timestamp of the first batch, -1 if none */
    int64_t batches;
    ls_entries epochs;                 /* where the leader epoch changes */
    int32_t last_epoch;
    int64_t producers;                 /* batches with a producer id, and control batches */
    bool dense;                        /* a gap between batches is damage */
} ls_prefix;

void ls_prefix_init(ls_prefix *prefix, const ls_io *io, int fd, int64_t base_offset,
                    int64_t position, int64_t limit, int64_t next_offset, int64_t interval_bytes);
void ls_prefix_free(ls_prefix *prefix);

/* LS_OK: more to do.  LS_END: valid up to the limit.  LS_E_CORRUPT, LS_E_LEGACY: valid up to
 * prefix->position, where the damage or the old format starts.  After LS_E_IO it is not known whether
 * the data is valid. */
ls_status ls_prefix_step(ls_prefix *prefix, int64_t budget);

#endif
