/* One batch with fewer records: the batch that compaction, a purge or a truncation writes in place of
 * an old one.
 *
 * The new batch keeps base offset, leader epoch, producer fields and kind of the old one; the records
 * that stay keep offset, time, key, value and headers.
 */
#ifndef LS_BATCH_KEEP_H
#define LS_BATCH_KEEP_H

#include <stddef.h>
#include <stdint.h>

#include "batch.h"
#include "bytes.h"
#include "status.h"

#define LS_NO_HORIZON INT64_MIN        /* no time is set at which tombstones may be deleted */

/* Adds to `out` a batch of the records i with keep[i] != 0, at least one; its last offset becomes
 * `last_offset`.  The payload is not packed, and the batch has no length and no checksum: that is
 * ls_batch_seal's.  `payload` holds the records, unpacked; `header` is the old batch's.
 * LS_OK, LS_E_CORRUPT, LS_E_NO_MEMORY. */
ls_code ls_batch_keep(ls_bytes *out, const uint8_t *header, const ls_batch *batch,
                      const uint8_t *payload, size_t size, const uint8_t *keep,
                      int64_t last_offset, int64_t horizon);

/* Adds the header without records.  It keeps the last sequence of a producer, or the end offset of
 * the log. */
ls_code ls_batch_keep_header(ls_bytes *out, const uint8_t *header);

/* Length and checksum of the batch from `at` to the end of `out`.  LS_E_TOO_LARGE. */
ls_code ls_batch_seal(ls_bytes *out, size_t at);

#endif
