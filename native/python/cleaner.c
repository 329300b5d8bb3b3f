/* OffsetMap, Transactions, Cleaner: compaction's loops over the batches of a segment.
 *
 * Plain batches are read, judged and written without the GIL; only what is compressed comes back to
 * Python for its codec.  A call works through a bounded stretch of a file, so that its caller can
 * show progress and be interrupted between two calls.  Memory is the map, one read window, one write
 * buffer and the largest batch.
 *
 * One thread at a time may use an object: a second one is told so.
 */
#include "module.h"

#include <stdlib.h>
#include <string.h>

#include "cleaner.h"
#include "crc32c.h"
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

typedef struct {
    PyObject_HEAD
    ls_module *module;
    ls_cleaner cleaner;
    FileObject *target;                /* strong or NULL: only count */
    OffsetMapObject *map;              /* strong or NULL */
    TransactionsObject *transactions;  /* strong or NULL */
    PyObject *key;                     /* bytes; strong or NULL */
    PyObject *decompress;              /* strong */
    PyObject *compress;                /* strong */
    ls_producer_end *producers;
    int64_t payload_max;
    size_t io_bytes;
    uint32_t crc;                      /* of what was written */
    bool busy;
} CleanerObject;

/* ---- what both loops need ---- */

/* A stretch of a segment file that is being read. */
typedef struct {
    FileObject *file;                  /* pinned */
    ls_window window;
    int64_t position;
    int64_t stop;                      /* no batch is begun here or behind */
    int64_t limit;                     /* whole batches end here */
    int64_t expected;                  /* least offset of the next batch */
    int64_t offset_max;
    ls_batch batch;
    const uint8_t *data;
} file_stretch;

static bool stretch_open(file_stretch *stretch, FileObject *file, int64_t position, int64_t limit,
                         int64_t expected, int64_t offset_max, int64_t budget, size_t io_bytes)
{
    if (position < 0 || limit < position || budget <= 0) {
        PyErr_Format(PyExc_ValueError, "cannot read from %lld to %lld", (long long)position,
                     (long long)limit);
        return false;
    }
    if (!ls_file_pin(file)) {
        return false;
    }
    memset(stretch, 0, sizeof *stretch);
    stretch->file = file;
    stretch->position = position;
    stretch->limit = limit;
    stretch->stop = budget < limit - position ? position + budget : limit;
    stretch->expected = expected;
    stretch->offset_max = offset_max;
    ls_window_init(&stretch->window, file->io, file->fd, io_bytes);
    return true;
}

static void stretch_close(file_stretch *stretch)
{
    ls_window_free(&stretch->window);
    ls_file_unpin(stretch->file);
}

/* The next batch, whole, verified and in order.  LS_END at the end of the stretch. */
static ls_status stretch_next(file_stretch *stretch)
{
    if (stretch->position >= stretch->stop) {
        return ls_fail(LS_END, stretch->position, "");
    }
    ls_status status = ls_window_batch(&stretch->window, stretch->position, stretch->limit,
                                       &stretch->batch, &stretch->data);
    if (status.code == LS_OK && (stretch->batch.base_offset < stretch->expected ||
                                 stretch->batch.last_offset > stretch->offset_max)) {
        status = ls_fail(LS_E_CORRUPT, stretch->position, "offsets do not follow one another");
    }
    if (status.code == LS_OK && ls_batch_codec(&stretch->batch) > LS_CODEC_MAX) {
        status = ls_fail(LS_E_CODEC, stretch->position, "unknown compression");
    }
    return status;
}

static void stretch_pass(file_stretch *stretch)
{
    stretch->position += stretch->batch.size;
    stretch->expected = stretch->batch.last_offset + 1;
}

static bool stretch_raise(file_stretch *stretch, ls_module *module, ls_status status)
{
    ls_raise(module, status, stretch->file->path, stretch->expected, stretch->offset_max + 1);
    return false;
}

static ls_status batch_status(const file_stretch *stretch, ls_code code, const char *reason)
{
    if (code == LS_E_TOO_LARGE) {
        reason = "a segment or batch would be larger than 2 GiB";
    }
    return ls_fail(code, stretch->position, code == LS_E_NO_MEMORY ? "no memory" : reason);
}

/* Calls a codec on the bytes at `data`; a new reference to bytes, or NULL with what it raised. */
static PyObject *call_codec(PyObject *callable, unsigned codec, const uint8_t *data, size_t size,
                            int64_t limit)
{
    PyObject *view =
        PyMemoryView_FromMemory((char *)(uintptr_t)data, (Py_ssize_t)size, PyBUF_READ);
    if (view == NULL) {
        return NULL;
    }
    PyObject *bytes = limit < 0 ? PyObject_CallFunction(callable, "IO", codec, view)
                                : PyObject_CallFunction(callable, "IOL", codec, view,
                                                        (long long)limit);
    Py_DECREF(view);
    if (bytes != NULL && !PyBytes_Check(bytes)) {
        Py_DECREF(bytes);
        PyErr_SetString(PyExc_TypeError, "a codec must return bytes");
        return NULL;
    }
    return bytes;
}

/* The unpacked records of the batch at hand.  A codec's complaint is damage, told with its place. */
static PyObject *unpack(file_stretch *stretch, ls_module *module, PyObject *decompress, int64_t most)
{
    PyObject *bytes = call_codec(decompress, ls_batch_codec(&stretch->batch),
                                 stretch->data + LS_BATCH_HEADER_BYTES,
                                 (size_t)stretch->batch.size - LS_BATCH_HEADER_BYTES, most);
    if (bytes != NULL || !PyErr_ExceptionMatches(PyExc_ValueError) ||
        PyErr_ExceptionMatches(module->unsupported_error)) {
        return bytes;
    }
    PyObject *type, *cause, *traceback;
    PyErr_Fetch(&type, &cause, &traceback);
    PyErr_NormalizeException(&type, &cause, &traceback);
    stretch_raise(stretch, module,
                  ls_fail(LS_E_CORRUPT, stretch->position, "its records cannot be unpacked"));
    PyObject *type_now, *error, *traceback_now;
    PyErr_Fetch(&type_now, &error, &traceback_now);
    PyErr_NormalizeException(&type_now, &error, &traceback_now);
    if (error != NULL) {
        PyException_SetCause(error, Py_XNewRef(cause));
    }
    PyErr_Restore(type_now, error, traceback_now);
    Py_XDECREF(type);
    Py_XDECREF(cause);
    Py_XDECREF(traceback);
    return NULL;
}

static bool take(bool *busy)
{
    if (*busy) {
        PyErr_SetString(PyExc_ValueError, "in use by another thread");
        return false;
    }
    *busy = true;
    return true;
}

/* ---- OffsetMap ---- */

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
    } else if (take(&self->busy)) {
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
    if (take(&self->busy)) {
        ls_key_hash hash = ls_offset_map_hash(&self->map, key.buf, (size_t)key.len);
        result = PyLong_FromLongLong(ls_offset_map_get(&self->map, hash));
        self->busy = false;
    }
    PyBuffer_Release(&key);
    return result;
}

static PyObject *offset_map_clear(OffsetMapObject *self, PyObject *Py_UNUSED(unused))
{
    if (!take(&self->busy)) {
        return NULL;
    }
    ls_offset_map_clear(&self->map);
    self->busy = false;
    Py_RETURN_NONE;
}

/* Without the GIL: the map, the transactions and the file are this thread's.  LS_OK with *packed: the
 * batch at hand has to be unpacked.  LS_END with *full, or at the end of the stretch. */
static ls_status map_plain(OffsetMapObject *self, file_stretch *stretch, ls_transactions *transactions,
                           int64_t start, bool *packed, bool *full)
{
    *packed = false;
    for (;;) {
        ls_status status = stretch_next(stretch);
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
            return batch_status(stretch, code, reason);
        }
        if (batch->last_offset > self->map.latest_offset) {
            self->map.latest_offset = batch->last_offset;
        }
        stretch_pass(stretch);
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
    file_stretch stretch;
    if (!take(&self->busy)) {
        return NULL;
    }
    if (!take(&transactions->busy)) {
        self->busy = false;
        return NULL;
    }
    PyObject *result = NULL;
    if (!stretch_open(&stretch, (FileObject *)file, position, limit, expected, offset_max, budget,
                      io_bytes < 4096 ? 4096 : (size_t)io_bytes)) {
        goto released;
    }
    bool full = false;
    for (;;) {
        bool packed;
        ls_status status;
        Py_BEGIN_ALLOW_THREADS         /* pinned by stretch_open; map and transactions are busy */
        status = map_plain(self, &stretch, &transactions->transactions, start, &packed, &full);
        Py_END_ALLOW_THREADS
        if (status.code == LS_END) {
            result = Py_BuildValue("(LLO)", (long long)stretch.position, (long long)stretch.expected,
                                   full ? Py_True : Py_False);
            break;
        }
        if (status.code != LS_OK) {
            stretch_raise(&stretch, self->module, status);
            break;
        }
        PyObject *payload = unpack(&stretch, self->module, decompress, payload_max);
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
            stretch.stop = stretch.position;   /* go no further */
            continue;
        }
        if (code != LS_OK) {
            stretch_raise(&stretch, self->module, batch_status(&stretch, code, reason));
            break;
        }
        if (stretch.batch.last_offset > self->map.latest_offset) {
            self->map.latest_offset = stretch.batch.last_offset;
        }
        stretch_pass(&stretch);
    }
    stretch_close(&stretch);
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

/* ---- Transactions ---- */

/* Transactions(entries) */
static PyObject *transactions_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"entries", NULL};
    Py_buffer entries;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "y*:Transactions", names, &entries)) {
        return NULL;
    }
    ls_module *module = ls_module_of_type(type);
    TransactionsObject *self =
        module == NULL ? NULL : (TransactionsObject *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->module = module;
        if (ls_transactions_init(&self->transactions, entries.buf, (size_t)entries.len) != LS_OK) {
            Py_CLEAR(self);
            PyErr_NoMemory();
        }
    }
    PyBuffer_Release(&entries);
    return (PyObject *)self;
}

static void transactions_dealloc(TransactionsObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    ls_transactions_free(&self->transactions);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyType_Slot transactions_slots[] = {
    {Py_tp_doc, (void *)PyDoc_STR("Which batches belong to aborted transactions; see cleaner.h.")},
    {Py_tp_new, transactions_new},
    {Py_tp_dealloc, transactions_dealloc},
    {0, NULL},
};

PyType_Spec ls_transactions_spec = {
    .name = "logstore._native.Transactions",
    .basicsize = sizeof(TransactionsObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = transactions_slots,
};

/* ---- Cleaner ---- */

/* A list of (producer id, epoch, last offset), ascending by id.  False: raised. */
static bool producers_from(PyObject *list, ls_producer_end **out, size_t *count)
{
    PyObject *items = PySequence_Fast(list, "producers must be a sequence");
    if (items == NULL) {
        return false;
    }
    Py_ssize_t size = PySequence_Fast_GET_SIZE(items);
    *out = size == 0 ? NULL : PyMem_Calloc((size_t)size, sizeof **out);
    bool ok = size == 0 || *out != NULL;
    if (!ok) {
        PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; ok && i < size; i++) {
        long long id, last;
        int epoch;
        PyObject *item = PySequence_Fast_GET_ITEM(items, i);
        ok = PyTuple_Check(item) && PyArg_ParseTuple(item, "LiL:producer", &id, &epoch, &last);
        if (!ok && !PyErr_Occurred()) {
            PyErr_SetString(PyExc_TypeError, "a producer is (id, epoch, last offset)");
        }
        if (ok && i > 0 && (*out)[i - 1].producer_id >= id) {
            PyErr_SetString(PyExc_ValueError, "producers must ascend by id");
            ok = false;
        }
        if (ok) {
            (*out)[i] = (ls_producer_end){id, last, (int16_t)epoch};
        }
    }
    *count = (size_t)size;
    Py_DECREF(items);
    return ok;
}

static PyObject *cleaner_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"target",       "base_offset", "interval_bytes",
                            "offset_map",   "key",         "transactions",
                            "producers",    "start_offset", "end_offset",
                            "now_ms",       "delete_retention_ms", "decompress",
                            "compress",     "payload_max", "io_bytes", NULL};
    PyObject *target, *map, *key, *transactions, *producers, *decompress, *compress;
    long long base_offset, interval_bytes, start_offset, end_offset, now_ms, retention_ms;
    long long payload_max;
    Py_ssize_t io_bytes;
    ls_module *module = ls_module_of_type(type);
    if (module == NULL ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "O$LLOOOOLLLLOOLn:Cleaner", names, &target,
                                     &base_offset, &interval_bytes, &map, &key, &transactions,
                                     &producers, &start_offset, &end_offset, &now_ms,
                                     &retention_ms, &decompress, &compress, &payload_max,
                                     &io_bytes)) {
        return NULL;
    }
    if ((target != Py_None && Py_TYPE(target) != module->file_type) ||
        (map != Py_None && Py_TYPE(map) != module->offset_map_type) ||
        (transactions != Py_None && Py_TYPE(transactions) != module->transactions_type) ||
        (key != Py_None && !PyBytes_CheckExact(key)) || (key == Py_None) == (map == Py_None) ||
        retention_ms < 0 || io_bytes <= 0) {
        PyErr_SetString(PyExc_TypeError,
                        "Cleaner(File or None, ..., an OffsetMap or a key, Transactions or None)");
        return NULL;
    }
    CleanerObject *self = (CleanerObject *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->module = module;
    self->target = target == Py_None ? NULL : (FileObject *)Py_NewRef(target);
    self->map = map == Py_None ? NULL : (OffsetMapObject *)Py_NewRef(map);
    self->transactions =
        transactions == Py_None ? NULL : (TransactionsObject *)Py_NewRef(transactions);
    self->key = key == Py_None ? NULL : Py_NewRef(key);
    self->decompress = Py_NewRef(decompress);
    self->compress = Py_NewRef(compress);
    self->payload_max = payload_max;
    self->io_bytes = (size_t)io_bytes;
    size_t count = 0;
    if (!producers_from(producers, &self->producers, &count)) {
        Py_DECREF(self);
        return NULL;
    }
    ls_clean_rules rules = {
        .map = self->map == NULL ? NULL : &self->map->map,
        .key = self->key == NULL ? NULL : (const uint8_t *)PyBytes_AS_STRING(self->key),
        .key_size = self->key == NULL ? 0 : (size_t)PyBytes_GET_SIZE(self->key),
        .start_offset = start_offset,
        .end_offset = end_offset,
        .now_ms = now_ms,
        .delete_retention_ms = retention_ms,
        .producers = self->producers,
        .producer_count = count,
        .transactions = self->transactions == NULL ? NULL : &self->transactions->transactions,
    };
    ls_cleaner_init(&self->cleaner, &rules, base_offset, interval_bytes);
    return (PyObject *)self;
}

static int cleaner_traverse(CleanerObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->decompress);
    Py_VISIT(self->compress);
    return 0;
}

static int cleaner_clear(CleanerObject *self)
{
    Py_CLEAR(self->decompress);
    Py_CLEAR(self->compress);
    return 0;
}

static void cleaner_dealloc(CleanerObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    cleaner_clear(self);
    ls_cleaner_free(&self->cleaner);
    PyMem_Free(self->producers);
    Py_XDECREF(self->target);
    Py_XDECREF(self->map);
    Py_XDECREF(self->transactions);
    Py_XDECREF(self->key);
    type->tp_free(self);
    Py_DECREF(type);
}

static bool cleaner_enter(CleanerObject *self)
{
    if (!take(&self->busy)) {
        return false;
    }
    if (self->map != NULL && !take(&self->map->busy)) {
        goto no_map;
    }
    if (self->transactions != NULL && !take(&self->transactions->busy)) {
        goto no_transactions;
    }
    if (self->target == NULL || ls_file_pin(self->target)) {
        return true;
    }
    if (self->transactions != NULL) {
        self->transactions->busy = false;
    }
no_transactions:
    if (self->map != NULL) {
        self->map->busy = false;
    }
no_map:
    self->busy = false;
    return false;
}

static void cleaner_leave(CleanerObject *self)
{
    if (self->target != NULL) {
        ls_file_unpin(self->target);
    }
    if (self->transactions != NULL) {
        self->transactions->busy = false;
    }
    if (self->map != NULL) {
        self->map->busy = false;
    }
    self->busy = false;
}

/* Writes away what has gathered.  Without the GIL: the target is pinned. */
static ls_status write_out(CleanerObject *self)
{
    ls_cleaner *cleaner = &self->cleaner;
    ls_status status = ls_ok();
    if (self->target != NULL && cleaner->out.size > 0) {
        status = ls_append(self->target->io, self->target->fd, cleaner->out.data,
                           cleaner->out.size, cleaner->out_position);
        if (status.code != LS_OK) {
            return status;
        }
        self->crc = ls_crc32c(self->crc, cleaner->out.data, cleaner->out.size);
    }
    cleaner->out_position += (int64_t)cleaner->out.size;
    cleaner->out.size = 0;
    return status;
}

/* Without the GIL.  LS_OK with *packed: the batch at hand has to be unpacked; LS_END: the stretch is
 * done.  *of_target: the trouble is the new file's. */
static ls_status clean_plain(CleanerObject *self, file_stretch *stretch, bool *packed, bool *of_target)
{
    *packed = *of_target = false;
    for (;;) {
        if (self->cleaner.out.size >= self->io_bytes) {
            ls_status status = write_out(self);
            if (status.code != LS_OK) {
                *of_target = true;
                return status;
            }
        }
        ls_status status = stretch_next(stretch);
        if (status.code != LS_OK) {
            return status;
        }
        if (ls_cleaner_needs_payload(&self->cleaner, &stretch->batch)) {
            *packed = true;
            return status;
        }
        bool pack;
        size_t at;
        const char *reason = "";
        ls_code code = ls_cleaner_batch(&self->cleaner, stretch->data, &stretch->batch,
                                        stretch->data + LS_BATCH_HEADER_BYTES,
                                        (size_t)stretch->batch.size - LS_BATCH_HEADER_BYTES, &pack,
                                        &at, &reason);
        if (code != LS_OK) {
            return batch_status(stretch, code, reason);
        }
        stretch_pass(stretch);
    }
}

/* One compressed batch, with the GIL.  False: raised. */
static bool clean_packed(CleanerObject *self, file_stretch *stretch)
{
    PyObject *payload = unpack(stretch, self->module, self->decompress, self->payload_max);
    if (payload == NULL) {
        return false;
    }
    bool pack;
    size_t at = 0;
    const char *reason = "";
    ls_cleaner *cleaner = &self->cleaner;
    ls_code code = ls_cleaner_batch(cleaner, stretch->data, &stretch->batch,
                                    (const uint8_t *)PyBytes_AS_STRING(payload),
                                    (size_t)PyBytes_GET_SIZE(payload), &pack, &at, &reason);
    Py_DECREF(payload);
    if (code == LS_OK && pack) {
        size_t records = at + LS_BATCH_HEADER_BYTES;
        PyObject *packed = call_codec(self->compress, ls_batch_codec(&stretch->batch),
                                      cleaner->out.data + records, cleaner->out.size - records, -1);
        if (packed == NULL) {
            return false;
        }
        code = ls_cleaner_finish_batch(cleaner, at, (const uint8_t *)PyBytes_AS_STRING(packed),
                                       (size_t)PyBytes_GET_SIZE(packed));
        Py_DECREF(packed);
    }
    if (code != LS_OK) {
        return stretch_raise(stretch, self->module, batch_status(stretch, code, reason));
    }
    stretch_pass(stretch);
    return true;
}

/* feed(file, position, limit, expected, offset_max, budget) -> (position, expected) */
static PyObject *cleaner_feed(CleanerObject *self, PyObject *args)
{
    PyObject *file;
    long long position, limit, expected, offset_max, budget;
    if (!PyArg_ParseTuple(args, "O!LLLLL:feed", self->module->file_type, &file, &position, &limit,
                          &expected, &offset_max, &budget) ||
        !cleaner_enter(self)) {
        return NULL;
    }
    PyObject *result = NULL;
    file_stretch stretch;
    if (!stretch_open(&stretch, (FileObject *)file, position, limit, expected, offset_max, budget,
                      self->io_bytes)) {
        goto released;
    }
    for (;;) {
        bool packed, of_target;
        ls_status status;
        Py_BEGIN_ALLOW_THREADS         /* pinned by stretch_open and cleaner_enter; all is busy */
        status = clean_plain(self, &stretch, &packed, &of_target);
        Py_END_ALLOW_THREADS
        if (status.code == LS_END) {
            result = Py_BuildValue("(LL)", (long long)stretch.position,
                                   (long long)stretch.expected);
            break;
        }
        if (status.code != LS_OK) {
            if (of_target) {
                ls_raise(self->module, status, self->target->path, -1, -1);
            } else {
                stretch_raise(&stretch, self->module, status);
            }
            break;
        }
        if (!clean_packed(self, &stretch)) {
            break;
        }
    }
    stretch_close(&stretch);
released:
    cleaner_leave(self);
    return result;
}

static PyObject *cleaner_counts(CleanerObject *self, PyObject *Py_UNUSED(unused))
{
    const ls_clean_counts *counts = &self->cleaner.counts;
    struct {
        const char *name;
        int64_t value;
    } entries[] = {
        {"records_read", counts->records_read},
        {"records_kept", counts->records_kept},
        {"bytes_read", counts->bytes_read},
        {"bytes_kept", counts->bytes_kept},
        {"batches_read", counts->batches_read},
        {"batches_kept", counts->batches_kept},
        {"batches_rewritten", counts->batches_rewritten},
        {"superseded", counts->superseded},
        {"tombstones", counts->tombstones},
        {"keyless", counts->keyless},
        {"aborted", counts->aborted},
        {"markers", counts->markers},
        {"purged", counts->purged},
        {"last_purged_offset", counts->last_purged_offset},
    };
    PyObject *result = PyDict_New();
    for (size_t i = 0; result != NULL && i < sizeof entries / sizeof *entries; i++) {
        PyObject *value = PyLong_FromLongLong(entries[i].value);
        if (value == NULL || PyDict_SetItemString(result, entries[i].name, value) < 0) {
            Py_CLEAR(result);
        }
        Py_XDECREF(value);
    }
    return result;
}

/* finish() -> (size, crc32c, offset entries, time entries, aborted entries) */
static PyObject *cleaner_finish(CleanerObject *self, PyObject *Py_UNUSED(unused))
{
    if (!cleaner_enter(self)) {
        return NULL;
    }
    ls_status status;
    Py_BEGIN_ALLOW_THREADS             /* pinned by cleaner_enter */
    status = write_out(self);
    Py_END_ALLOW_THREADS
    PyObject *result = NULL;
    ls_cleaner *cleaner = &self->cleaner;
    if (status.code != LS_OK) {
        ls_raise(self->module, status, self->target == NULL ? NULL : self->target->path, -1, -1);
    } else if (ls_index_finish(&cleaner->index) != LS_OK) {
        PyErr_NoMemory();
    } else {
        result = Py_BuildValue(
            "(LIy#y#y#)", (long long)cleaner->out_position, (unsigned)self->crc,
            cleaner->index.offsets.size ? (char *)cleaner->index.offsets.data : "",
            (Py_ssize_t)cleaner->index.offsets.size,
            cleaner->index.times.size ? (char *)cleaner->index.times.data : "",
            (Py_ssize_t)cleaner->index.times.size,
            cleaner->aborted.size ? (char *)cleaner->aborted.data : "",
            (Py_ssize_t)cleaner->aborted.size);
    }
    cleaner_leave(self);
    return result;
}

static PyMethodDef cleaner_methods[] = {
    {"feed", (PyCFunction)cleaner_feed, METH_VARARGS,
     PyDoc_STR("feed(file, position, limit, expected, offset_max, budget) -> (position, expected)")},
    {"finish", (PyCFunction)cleaner_finish, METH_NOARGS,
     PyDoc_STR("finish() -> (size, crc32c, offset entries, time entries, aborted entries)")},
    {"counts", (PyCFunction)cleaner_counts, METH_NOARGS, PyDoc_STR("counts() -> dict")},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot cleaner_slots[] = {
    {Py_tp_doc, (void *)PyDoc_STR("Copies segments without some of their records; see cleaner.h.")},
    {Py_tp_new, cleaner_new},
    {Py_tp_dealloc, cleaner_dealloc},
    {Py_tp_traverse, cleaner_traverse},
    {Py_tp_clear, cleaner_clear},
    {Py_tp_methods, cleaner_methods},
    {0, NULL},
};

PyType_Spec ls_cleaner_spec = {
    .name = "logstore._native.Cleaner",
    .basicsize = sizeof(CleanerObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = cleaner_slots,
};

/* ---- one batch, cut ---- */

static void cannot_cut(ls_module *module, ls_status status)
{
    if (status.code == LS_E_CORRUPT) { /* of bytes in memory: there is no place to name */
        PyErr_Format(PyExc_ValueError, "the batch cannot be cut: %s", status.reason);
    } else {
        ls_raise(module, status, NULL, -1, -1);
    }
}

/* batch_below(batch, end_offset, decompress, compress, payload_max) -> bytes
 *
 * The batch without its records at and above `end_offset`, which is where it ends then; empty when
 * no record is left.  The batch was verified by whoever read it. */
static PyObject *native_batch_below(PyObject *self, PyObject *args)
{
    Py_buffer raw;
    long long end_offset, payload_max;
    PyObject *decompress, *compress;
    if (!PyArg_ParseTuple(args, "y*LOOL:batch_below", &raw, &end_offset, &decompress, &compress,
                          &payload_max)) {
        return NULL;
    }
    ls_module *module = PyModule_GetState(self);
    const uint8_t *data = raw.buf;
    ls_batch batch = {0};
    PyObject *result = NULL, *unpacked = NULL;
    ls_bytes out = {0}, keep = {0};
    ls_status status = ls_fail(LS_E_CORRUPT, 0, "an incomplete batch header");
    if (raw.len >= LS_BATCH_HEADER_BYTES) {
        status = ls_batch_parse(data, (size_t)raw.len, &batch);
    }
    if (status.code == LS_OK && (batch.size != raw.len || end_offset <= batch.base_offset)) {
        status = ls_fail(LS_E_CORRUPT, 0, "not a batch that holds this offset");
    }
    if (status.code == LS_OK && ls_batch_codec(&batch) > LS_CODEC_MAX) {
        status = ls_fail(LS_E_CODEC, 0, "unknown compression");
    }
    if (status.code != LS_OK) {
        cannot_cut(module, status);
        goto done;
    }
    if (end_offset > batch.last_offset) {
        result = PyBytes_FromStringAndSize((const char *)data, raw.len);
        goto done;
    }
    const uint8_t *payload = data + LS_BATCH_HEADER_BYTES;
    size_t size = (size_t)raw.len - LS_BATCH_HEADER_BYTES;
    unsigned codec = ls_batch_codec(&batch);
    if (codec != LS_CODEC_NONE && batch.record_count > 0) {
        unpacked = call_codec(decompress, codec, payload, size, payload_max);
        if (unpacked == NULL) {
            goto done;
        }
        payload = (const uint8_t *)PyBytes_AS_STRING(unpacked);
        size = (size_t)PyBytes_GET_SIZE(unpacked);
    }
    ls_records records;
    ls_record record;
    ls_code code;
    int32_t kept = 0;
    if (!ls_batch_count_fits(&batch, size)) {
        cannot_cut(module, ls_fail(LS_E_CORRUPT, 0, ls_too_many_records));
        goto done;
    }
    keep.data = calloc((size_t)batch.record_count + 1, 1);
    if (keep.data == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    ls_records_open(&records, &batch, payload, size);
    for (int32_t i = 0; (code = ls_records_next(&records, &record)) == LS_OK; i++) {
        keep.data[i] = record.offset < end_offset;
        kept += keep.data[i];
    }
    if (code != LS_END) {
        cannot_cut(module, ls_fail(code, 0, records.reason));
        goto done;
    }
    if (kept > 0) {
        code = ls_batch_keep(&out, data, &batch, payload, size, keep.data, end_offset - 1,
                             batch.attributes & LS_ATTR_DELETE_HORIZON ? batch.base_timestamp
                                                                       : LS_NO_HORIZON);
        if (code == LS_OK && codec != LS_CODEC_NONE) {
            PyObject *packed = call_codec(compress, codec, out.data + LS_BATCH_HEADER_BYTES,
                                          out.size - LS_BATCH_HEADER_BYTES, -1);
            if (packed == NULL) {
                goto done;
            }
            size_t whole = LS_BATCH_HEADER_BYTES + (size_t)PyBytes_GET_SIZE(packed);
            uint8_t *larger = whole > out.capacity ? realloc(out.data, whole) : out.data;
            if (larger != NULL) {
                out.data = larger;
                out.capacity = whole > out.capacity ? whole : out.capacity;
                memcpy(out.data + LS_BATCH_HEADER_BYTES, PyBytes_AS_STRING(packed),
                       whole - LS_BATCH_HEADER_BYTES);
                out.size = whole;
            } else {
                code = LS_E_NO_MEMORY;
            }
            Py_DECREF(packed);
        }
        if (code == LS_OK) {
            code = ls_batch_seal(&out, 0);
        }
        if (code != LS_OK) {
            cannot_cut(module, ls_fail(code, 0, "it would be too large"));
            goto done;
        }
    }
    result = PyBytes_FromStringAndSize((const char *)out.data, (Py_ssize_t)out.size);
done:
    Py_XDECREF(unpacked);
    ls_bytes_free(&out);
    ls_bytes_free(&keep);
    PyBuffer_Release(&raw);
    return result;
}

PyMethodDef ls_cleaner_functions[] = {
    {"batch_below", native_batch_below, METH_VARARGS,
     PyDoc_STR("batch_below(batch, end_offset, decompress, compress, payload_max) -> bytes: the "
               "batch without its records at and above end_offset")},
    {NULL, NULL, 0, NULL},
};
