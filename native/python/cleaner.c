/* Cleaner: copies segments without some of their records.
 *
 * Uncompressed batches are read, judged and written without the GIL; a compressed batch needs the GIL
 * for its codec.  A call cleans a bounded stretch of a file, so that its caller can show progress and
 * be interrupted between two calls.  Memory: the map, one read window, one write buffer and the
 * largest batch.
 */
#include "codec_call.h"
#include "compaction.h"
#include "crc32c.h"
#include "stretch.h"

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
    uint32_t crc;                      /* of the bytes written to the target */
    bool busy;
} CleanerObject;

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
        base_offset < 0 || retention_ms < 0 || io_bytes <= 0) {
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
    if (!ls_mark_busy(&self->busy)) {
        return false;
    }
    if (self->map != NULL && !ls_mark_busy(&self->map->busy)) {
        goto no_map;
    }
    if (self->transactions != NULL && !ls_mark_busy(&self->transactions->busy)) {
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

/* Writes the batches of `out` to the target.  Needs no GIL: the target is pinned. */
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

/* Cleans plain batches.  Needs no GIL.  LS_OK with *packed: the current batch has to be decompressed.
 * LS_END: the stretch is done.  *of_target: the error is one of the new file. */
static ls_status clean_plain(CleanerObject *self, ls_stretch *stretch, bool *packed, bool *of_target)
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
        ls_status status = ls_stretch_next(stretch);
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
            return ls_stretch_status(stretch, code, reason);
        }
        ls_stretch_pass(stretch);
    }
}

/* One compressed batch, with the GIL.  False: raised. */
static bool clean_packed(CleanerObject *self, ls_stretch *stretch)
{
    PyObject *payload =
        ls_stretch_unpack(stretch, self->module, self->decompress, self->payload_max);
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
        PyObject *packed = ls_codec_call(self->compress, ls_batch_codec(&stretch->batch),
                                         cleaner->out.data + records, cleaner->out.size - records,
                                         -1);
        if (packed == NULL) {
            return false;
        }
        code = ls_cleaner_finish_batch(cleaner, at, (const uint8_t *)PyBytes_AS_STRING(packed),
                                       (size_t)PyBytes_GET_SIZE(packed));
        Py_DECREF(packed);
    }
    if (code != LS_OK) {
        return ls_stretch_raise(stretch, self->module, ls_stretch_status(stretch, code, reason));
    }
    ls_stretch_pass(stretch);
    return true;
}

/* feed(file, position, limit, expected, offset_max, budget) -> (position, expected) */
static PyObject *cleaner_feed(CleanerObject *self, PyObject *args)
{
    PyObject *file;
    long long position, limit, expected, offset_max, budget;
    if (!PyArg_ParseTuple(args, "O!LLLLL:feed", self->module->file_type, &file, &position, &limit,
                          &expected, &offset_max, &budget)) {
        return NULL;
    }
    if (expected < self->cleaner.index.base_offset) {
        return PyErr_Format(PyExc_ValueError, "cannot clean offsets %lld to %lld", expected,
                            offset_max);
    }
    if (!cleaner_enter(self)) {
        return NULL;
    }
    PyObject *result = NULL;
    ls_stretch stretch;
    if (!ls_stretch_open(&stretch, (FileObject *)file, position, limit, expected, offset_max, budget,
                         self->io_bytes)) {
        goto released;
    }
    for (;;) {
        bool packed, of_target;
        ls_status status;
        Py_BEGIN_ALLOW_THREADS         /* pinned by ls_stretch_open and cleaner_enter; all is busy */
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
                ls_stretch_raise(&stretch, self->module, status);
            }
            break;
        }
        if (!clean_packed(self, &stretch)) {
            break;
        }
    }
    ls_stretch_close(&stretch);
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
