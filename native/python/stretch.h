/* A stretch of a segment file, read batch by batch: what OffsetMap.read and Cleaner.feed share.
 *
 * A stretch is bounded, so that the caller can show progress and be interrupted between two calls.
 */
#ifndef LS_STRETCH_H
#define LS_STRETCH_H

#include "module.h"

typedef struct {
    FileObject *file;                  /* pinned */
    ls_window window;
    int64_t position;
    int64_t stop;                      /* no batch at or after this position is begun */
    int64_t limit;                     /* whole batches end here */
    int64_t expected;                  /* least offset of the next batch */
    int64_t offset_max;
    ls_batch batch;
    const uint8_t *data;
} ls_stretch;

/* Pins the file until ls_stretch_close.  False: raised. */
bool ls_stretch_open(ls_stretch *stretch, FileObject *file, int64_t position, int64_t limit,
                     int64_t expected, int64_t offset_max, int64_t budget, size_t io_bytes);
void ls_stretch_close(ls_stretch *stretch);

/* Reads the next batch and checks its checksum and that offsets increase.  Needs no GIL.  LS_END at
 * the end. */
ls_status ls_stretch_next(ls_stretch *stretch);

/* Moves to the end of the current batch. */
void ls_stretch_pass(ls_stretch *stretch);

/* Returns the status of the current batch for a code of the core. */
ls_status ls_stretch_status(const ls_stretch *stretch, ls_code code, const char *reason);

/* Raises for a status, with the offsets that the rest of the stretch has.  Returns false. */
bool ls_stretch_raise(ls_stretch *stretch, ls_module *module, ls_status status);

/* Returns the decompressed records of the current batch: a new reference to bytes, or NULL: raised.
 * A ValueError of the codec becomes damage at the position of the batch. */
PyObject *ls_stretch_unpack(ls_stretch *stretch, ls_module *module, PyObject *decompress,
                            int64_t most);

#endif
