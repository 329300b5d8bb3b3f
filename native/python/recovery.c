/* Functions over whole files: the valid prefix of a log, the next valid batch, index look-ups. */
#include "module.h"

/* ---- scan_prefix ---- */

static PyObject *prefix_result(const ls_prefix *prefix, ls_status status)
{
    /* An empty index has no memory; "y#" would make None of that. */
    const char *offsets = (const char *)prefix->index.offsets.data;
    const char *times = (const char *)prefix->index.times.data;
    const char *epochs = (const char *)prefix->epochs.data;
    const char *kind = status.code == LS_END ? "end" : status.code == LS_E_LEGACY ? "legacy" : "bad";
    return Py_BuildValue(
        "{s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:y#,s:y#,s:y#,s:s,s:s}", "position",
        (long long)prefix->position, "next_offset", (long long)prefix->next_offset, "batches",
        (long long)prefix->batches, "producers", (long long)prefix->producers,
        "first_timestamp", (long long)prefix->first_timestamp, "max_timestamp",
        (long long)prefix->index.max_timestamp, "max_timestamp_offset",
        (long long)prefix->index.max_timestamp_offset, "last_indexed_position",
        (long long)prefix->index.last_indexed_position, "offsets",
        offsets == NULL ? "" : offsets, (Py_ssize_t)prefix->index.offsets.size, "times",
        times == NULL ? "" : times, (Py_ssize_t)prefix->index.times.size, "epochs",
        epochs == NULL ? "" : epochs, (Py_ssize_t)prefix->epochs.size, "stopped", kind,
        "reason", status.reason);
}

/* scan_prefix(file, base_offset, position, limit, next_offset, interval_bytes, dense, progress) */
static PyObject *native_scan_prefix(PyObject *self, PyObject *args)
{
    ls_module *module = PyModule_GetState(self);
    PyObject *object, *progress;
    long long base_offset, position, limit, next_offset, interval;
    int dense;
    if (!PyArg_ParseTuple(args, "O!LLLLLpO:scan_prefix", module->file_type, &object, &base_offset,
                          &position, &limit, &next_offset, &interval, &dense, &progress)) {
        return NULL;
    }
    if (base_offset < 0 || position < 0 || limit < position || next_offset < 0) {
        return PyErr_Format(PyExc_ValueError, "no prefix from %lld to %lld", position, limit);
    }
    FileObject *file = (FileObject *)object;
    if (!ls_file_pin(file)) {
        return NULL;
    }
    ls_prefix prefix;
    ls_prefix_init(&prefix, file->io, file->fd, base_offset, position, limit, next_offset, interval);
    prefix.dense = dense != 0;
    PyObject *result = NULL;
    for (;;) {
        ls_status status;
        Py_BEGIN_ALLOW_THREADS         /* pinned; `prefix` is local */
        status = ls_prefix_step(&prefix, 32 << 20);
        Py_END_ALLOW_THREADS
        if (progress != Py_None) {
            PyObject *done = PyObject_CallFunction(progress, "L", (long long)prefix.position);
            if (done == NULL) {
                break;
            }
            Py_DECREF(done);
        }
        if (status.code == LS_OK) {
            if (PyErr_CheckSignals() < 0) {
                break;
            }
            continue;
        }
        if (status.code == LS_END || status.code == LS_E_CORRUPT || status.code == LS_E_LEGACY) {
            result = prefix_result(&prefix, status);
        } else {
            ls_raise(module, status, file->path, -1, -1);
        }
        break;
    }
    ls_prefix_free(&prefix);
    ls_file_unpin(file);
    return result;
}

/* find_batch(file, position, limit, offset_min, offset_max) -> (position, base, last) or None */
static PyObject *native_find_batch(PyObject *self, PyObject *args)
{
    ls_module *module = PyModule_GetState(self);
    PyObject *object;
    long long position, limit, offset_min, offset_max;
    if (!PyArg_ParseTuple(args, "O!LLLL:find_batch", module->file_type, &object, &position, &limit,
                          &offset_min, &offset_max)) {
        return NULL;
    }
    if (position < -1 || position == INT64_MAX || limit < 0) {
        return PyErr_Format(PyExc_ValueError, "no batch after %lld below %lld", position, limit);
    }
    FileObject *file = (FileObject *)object;
    if (!ls_file_pin(file)) {
        return NULL;
    }
    ls_window window;
    ls_window_init(&window, file->io, file->fd, LS_WINDOW_BYTES);
    PyObject *result = NULL;
    for (int64_t from = position;;) {
        ls_status status;
        int64_t found = -1, reached = from;
        Py_BEGIN_ALLOW_THREADS         /* pinned; `window` is local */
        status = ls_window_resync(&window, from, limit, offset_min, offset_max, 8 << 20, &found,
                                  &reached);
        Py_END_ALLOW_THREADS
        if (found >= 0) {
            ls_batch batch;
            status = ls_window_header(&window, found, limit, &batch);
            if (status.code == LS_OK) {
                result = Py_BuildValue("(LLL)", (long long)found, (long long)batch.base_offset,
                                       (long long)batch.last_offset);
                break;
            }
        }
        if (status.code == LS_END) {
            result = Py_NewRef(Py_None);
            break;
        }
        if (status.code != LS_OK) {
            ls_raise(module, status, file->path, -1, -1);
            break;
        }
        if (PyErr_CheckSignals() < 0) {
            break;
        }
        from = reached;
    }
    ls_window_free(&window);
    ls_file_unpin(file);
    return result;
}

PyMethodDef ls_recovery_functions[] = {
    {"scan_prefix", native_scan_prefix, METH_VARARGS,
     PyDoc_STR("scan_prefix(file, base_offset, position, limit, next_offset, interval_bytes, dense, "
               "progress) -> dict")},
    {"find_batch", native_find_batch, METH_VARARGS,
     PyDoc_STR("find_batch(file, position, limit, offset_min, offset_max): the next valid batch "
               "after position, as (position, base offset, last offset), or None")},
    {NULL, NULL, 0, NULL},
};

/* ---- index look-ups ---- */

/* offset_index_lookup(entries, relative_offset) -> number of the greatest entry <= it, or -1 */
static PyObject *native_offset_lookup(PyObject *Py_UNUSED(self), PyObject *args)
{
    Py_buffer entries;
    long long relative;
    if (!PyArg_ParseTuple(args, "y*L:offset_index_lookup", &entries, &relative)) {
        return NULL;
    }
    int32_t target = relative < 0 ? -1 : relative > INT32_MAX ? INT32_MAX : (int32_t)relative;
    int64_t entry = ls_offset_index_search(entries.buf,
                                           (size_t)entries.len / LS_OFFSET_ENTRY_BYTES, target);
    PyBuffer_Release(&entries);
    return PyLong_FromLongLong(entry);
}

static PyObject *native_time_lookup(PyObject *Py_UNUSED(self), PyObject *args)
{
    Py_buffer entries;
    long long timestamp;
    if (!PyArg_ParseTuple(args, "y*L:time_index_lookup", &entries, &timestamp)) {
        return NULL;
    }
    int64_t entry =
        ls_time_index_search(entries.buf, (size_t)entries.len / LS_TIME_ENTRY_BYTES, timestamp);
    PyBuffer_Release(&entries);
    return PyLong_FromLongLong(entry);
}

PyMethodDef ls_index_functions[] = {
    {"offset_index_lookup", native_offset_lookup, METH_VARARGS,
     PyDoc_STR("offset_index_lookup(entries, relative_offset) -> entry number or -1")},
    {"time_index_lookup", native_time_lookup, METH_VARARGS,
     PyDoc_STR("time_index_lookup(entries, timestamp) -> entry number or -1")},
    {NULL, NULL, 0, NULL},
};
