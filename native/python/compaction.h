/* What offset_map.c, aborted.c and cleaner.c need of each other: the objects that one call of
 * compaction uses together.
 *
 * One thread at a time may use an object: a second one gets ValueError.
 */
#ifndef LS_COMPACTION_H
#define LS_COMPACTION_H

#include "cleaner.h"
#include "module.h"
#include "offset_map.h"

typedef struct {
    PyObject_HEAD
    ls_module *module;
    ls_offset_map map;
    bool busy;
} OffsetMapObject;

typedef struct {
    PyObject_HEAD
    ls_module *module;
    ls_transactions transactions;
    bool busy;
} TransactionsObject;

/* False: raised, another thread has marked it. */
static inline bool ls_mark_busy(bool *busy)
{
    if (*busy) {
        PyErr_SetString(PyExc_ValueError, "in use by another thread");
        return false;
    }
    *busy = true;
    return true;
}

#endif
