/* Functions that scan.c, columns.c, lookup.c and segment_writer.c share: the columns to fill, the live
 * index of a writer, the lookup of an offset. */
#ifndef LS_SCAN_H
#define LS_SCAN_H

#include "columns.h"
#include "module.h"

/* The columns under construction; NULL with an exception when they are in use by another thread. */
ls_columns *ls_column_builder_of(PyObject *builder);
void ls_column_builder_busy(PyObject *builder, bool busy);

/* Borrowed; valid while the GIL is held. */
const ls_index_tracker *ls_segment_writer_index(PyObject *writer);

/* Where to start looking for `offset`: by a segment's index (bytes), by the live index of a
 * SegmentWriter, or from the start (None).  *landing is -1 without an entry.  False: raised. */
bool ls_index_lookup(ls_module *module, PyObject *index, int64_t base_offset, int64_t offset,
                     int64_t *landing, int64_t *position, int64_t *next_position);

/* get(file, index, base_offset, offset, topic, partition, decompress, payload_max)
 * -> Record, or None if the segment holds no record of that offset.  Raises at any error; the caller
 * then reads with a SegmentScan, which can pass over damage. */
PyObject *ls_scan_get(PyObject *type, PyObject *const *args, Py_ssize_t count);

/* span(file, index, base_offset, offset, stop, max_bytes, whole_first) -> (position, size, next)
 * of the whole batches from the one that holds `offset` on: those below offset `stop` that fit into
 * max_bytes; with whole_first the first one in any case.  The size is 0 if there is none, and None is
 * returned if no batch of the segment reaches `offset`.  Reads headers, never a record. */
PyObject *ls_scan_span(PyObject *type, PyObject *const *args, Py_ssize_t count);

#endif
