/* OffsetMap: the newest offset of each key, read from the batches of a segment.
 *
 * Uncompressed batches are read without the GIL; a compressed batch needs the GIL for its codec.
 */
#include "compaction.h"
#include "stretch.h"

/* OffsetMap(memory_bytes, secret) */
static PyObject *offset_map_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"memory_bytes", "secret", NULL};
    Py_ssize_t memory_bytes;
    const char *secret;
    Py_ssize_t secret_size;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "ny#:OffsetMap", names, &memory_bytes, &secret,
                                     &secret_size)) {
        return NULL;
    }
    if (secret_size != 16) {
        return PyErr_Format(PyExc_ValueError, "the secret must be 16 bytes, not %zd", secret_size);
    }
    ls_module *module = ls_module_of_type(type);
    OffsetMapObject *self = module == NULL ? NULL : (OffsetMapObject *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->module = module;
    ls_code code = memory_bytes < 0 ? LS_E_INVALID
                                    : ls_offset_map_init(&self->map, (size_t)memory_bytes,
                                                         (const uint8_t *)secret);
    if (code != LS_OK) {
        Py_DECREF(self);
        return code == LS_E_NO_MEMORY
                   ? PyErr_NoMemory()
                   : PyErr_Format(PyExc_ValueError, "%zd bytes hold no key: give at least 48",
                                  memory_bytes);
    }
    return (PyObject *)self;
}

static void offset_map_dealloc(OffsetMapObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    ls_offset_map_free(&self->map);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *offset_map_put(OffsetMapObject *self, PyObject *args)
{
    Py_buffer key;
    long long offset;
    if (!PyArg_ParseTuple(args, "y*L:put", &key, &offset)) {
        return NULL;
    }
    PyObject *result = NULL;
    if (offset < 0 || offset == INT64_MAX) {
        PyErr_Format(PyExc_ValueError, "%lld is not an offset", offset);
    } else if (ls_mark_busy(&self->busy)) {
        ls_key_hash hash = ls_offset_map_hash(&self->map, key.buf, (size_t)key.len);
        result = PyBool_FromLong(ls_offset_map_put(&self->map, hash, offset) == LS_OK);
        self->busy = false;
    }
    PyBuffer_Release(&key);
    return result;
}

static PyObject *offset_map_get(OffsetMapObject *self, PyObject *args)
{
    Py_buffer key;
    if (!PyArg_ParseTuple(args, "y*:get", &key)) {
        return NULL;
    }
    PyObject *result = NULL;
    if (ls_mark_busy(&self->busy)) {
        ls_key_hash hash = ls_offset_map_hash(&self->map, key.buf, (size_t)key.len);
        result = PyLong_FromLongLong(ls_offset_map_get(&self->map, hash));
        self->busy = false;
    }
    PyBuffer_Release(&key);
    return result;
}

static PyObject *offset_map_clear(OffsetMapObject *self, PyObject *Py_UNUSED(unused))
{
    if (!ls_mark_busy(&self->busy)) {
        return NULL;
    }
    ls_offset_map_clear(&self->map);
    self->busy = false;
    Py_RETURN_NONE;
}

/* Reads plain batches.  Needs no GIL: the map and the transactions are busy, and the file is pinned.
 * LS_OK with *packed: the current batch has to be decompressed.  LS_END with *full, or at the end of
 * the stretch. */
static ls_status map_plain(OffsetMapObject *self, ls_stretch *stretch, ls_transactions *transactions,
                           int64_t start, bool *packed, bool *full)
{
    *packed = false;
    for (;;) {
        ls_status status = ls_stretch_next(stretch);
        if (status.code != LS_OK) {
            return status;
        }
        const ls_batch *batch = &stretch->batch;
        const uint8_t *payload = stretch->data + LS_BATCH_HEADER_BYTES;
        size_t size = (size_t)batch->size - LS_BATCH_HEADER_BYTES;
        const char *reason = "";
        ls_code code = LS_OK;
        bool aborted = false;
        if (batch->attributes & LS_ATTR_CONTROL) {
            const ls_aborted *kept;
            bool useless;
            code = ls_transactions_marker(transactions, batch, payload, size, &useless, &kept);
        } else {
            code = ls_transactions_data(transactions, batch, &aborted);
            if (code == LS_OK && !aborted && batch->record_count > 0 &&
                batch->last_offset >= start) {
                if (ls_batch_codec(batch) != LS_CODEC_NONE) {
                    *packed = true;
                    return status;
                }
                code = ls_offset_map_read(&self->map, batch, payload, size, start, &reason);
            }
        }
        if (code == LS_END) {
            *full = true;
            return ls_fail(LS_END, stretch->position, "");
        }
        if (code != LS_OK) {
            return ls_stretch_status(stretch, code, reason);
        }
        if (batch->last_offset > self->map.latest_offset) {
            self->map.latest_offset = batch->last_offset;
        }
        ls_stretch_pass(stretch);
    }
}

/* read(file, position, limit, expected, offset_max, budget, start, transactions, decompress,
 *      payload_max, io_bytes) -> (position, expected, full) */
static PyObject *offset_map_read(OffsetMapObject *self, PyObject *args)
{
    PyObject *file, *transactions_object, *decompress;
    long long position, limit, expected, offset_max, budget, start, payload_max;
    Py_ssize_t io_bytes;
    if (!PyArg_ParseTuple(args, "O!LLLLLLO!OLn:read", self->module->file_type, &file, &position,
                          &limit, &expected, &offset_max, &budget, &start,
                          self->module->transactions_type, &transactions_object, &decompress,
                          &payload_max, &io_bytes)) {
        return NULL;
    }
    TransactionsObject *transactions = (TransactionsObject *)transactions_object;
    ls_stretch stretch;
    if (!ls_mark_busy(&self->busy)) {
        return NULL;
    }
    if (!ls_mark_busy(&transactions->busy)) {
        self->busy = false;
        return NULL;
    }
    PyObject *result = NULL;
    if (!ls_stretch_open(&stretch, (FileObject *)file, position, limit, expected, offset_max, budget,
                         io_bytes < 4096 ? 4096 : (size_t)io_bytes)) {
        goto released;
    }
    bool full = false;
    for (;;) {
        bool packed;
        ls_status status;
        Py_BEGIN_ALLOW_THREADS         /* pinned by ls_stretch_open; map and transactions are busy */
        status = map_plain(self, &stretch, &transactions->transactions, start, &packed, &full);
        Py_END_ALLOW_THREADS
        if (status.code == LS_END) {
            result = Py_BuildValue("(LLO)", (long long)stretch.position, (long long)stretch.expected,
                                   full ? Py_True : Py_False);
            break;
        }
        if (status.code != LS_OK) {
            ls_stretch_raise(&stretch, self->module, status);
            break;
        }
        PyObject *payload = ls_stretch_unpack(&stretch, self->module, decompress, payload_max);
        if (payload == NULL) {
            break;
        }
        const char *reason = "";
        ls_code code = ls_offset_map_read(&self->map, &stretch.batch,
                                          (const uint8_t *)PyBytes_AS_STRING(payload),
                                          (size_t)PyBytes_GET_SIZE(payload), start, &reason);
        Py_DECREF(payload);
        if (code == LS_END) {
            full = true;
            stretch.stop = stretch.position;   /* the map is full: end the stretch */
            continue;
        }
        if (code != LS_OK) {
            ls_stretch_raise(&stretch, self->module, ls_stretch_status(&stretch, code, reason));
            break;
        }
        if (stretch.batch.last_offset > self->map.latest_offset) {
            self->map.latest_offset = stretch.batch.last_offset;
        }
        ls_stretch_pass(&stretch);
    }
    ls_stretch_close(&stretch);
released:
    transactions->busy = false;
    self->busy = false;
    return result;
}

static Py_ssize_t offset_map_length(OffsetMapObject *self)
{
    return (Py_ssize_t)self->map.count;
}

static PyObject *offset_map_get_limit(OffsetMapObject *self, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(self->map.limit);
}

static PyObject *offset_map_get_latest(OffsetMapObject *self, void *Py_UNUSED(closure))
{
    return PyLong_FromLongLong(self->map.latest_offset);
}

static int offset_map_set_latest(OffsetMapObject *self, PyObject *value, void *Py_UNUSED(closure))
{
    long long offset = value == NULL ? -1 : PyLong_AsLongLong(value);
    if (PyErr_Occurred()) {
        return -1;
    }
    self->map.latest_offset = offset;
    return 0;
}

static PyMethodDef offset_map_methods[] = {
    {"put", (PyCFunction)offset_map_put, METH_VARARGS,
     PyDoc_STR("put(key, offset) -> bool: False when the map is full")},
    {"get", (PyCFunction)offset_map_get, METH_VARARGS,
     PyDoc_STR("get(key) -> the greatest offset, or -1")},
    {"clear", (PyCFunction)offset_map_clear, METH_NOARGS, PyDoc_STR("clear(): forget all keys")},
    {"read", (PyCFunction)offset_map_read, METH_VARARGS,
     PyDoc_STR("read(file, position, limit, ...) -> (position, expected, full)")},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef offset_map_getset[] = {
    {"limit", (getter)offset_map_get_limit, NULL, PyDoc_STR("how many keys it can hold"), NULL},
    {"latest_offset", (getter)offset_map_get_latest, (setter)offset_map_set_latest,
     PyDoc_STR("everything up to here was looked at"), NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot offset_map_slots[] = {
    {Py_tp_doc, (void *)PyDoc_STR("Key to newest offset in fixed memory; see offset_map.h.")},
    {Py_tp_new, offset_map_new},
    {Py_tp_dealloc, offset_map_dealloc},
    {Py_tp_methods, offset_map_methods},
    {Py_tp_getset, offset_map_getset},
    {Py_sq_length, offset_map_length},
    {0, NULL},
};

PyType_Spec ls_offset_map_spec = {
    .name = "logstore._native.OffsetMap",
    .basicsize = sizeof(OffsetMapObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = offset_map_slots,
};
