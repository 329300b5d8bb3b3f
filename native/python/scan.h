/* What scan.c needs of its neighbours: columns to fill, and the live index of a writer. */
#ifndef LS_SCAN_H
#define LS_SCAN_H

#include "columns.h"
#include "module.h"

/* The columns under construction; NULL with an exception when they are in use by another thread. */
ls_columns *ls_column_builder_of(PyObject *builder);
void ls_column_builder_busy(PyObject *builder, bool busy);

/* Borrowed; valid while the GIL is held. */
const ls_index_tracker *ls_segment_writer_index(PyObject *writer);

#endif
