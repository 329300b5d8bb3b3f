/* Builder: Python objects in, sealed batches out.  The C half of Writer and of append/extend.
 *
 * Records are encoded with the GIL held, from the caller's objects into the arena.  Checksums are
 * computed from the arena, so a bytearray that another thread changes cannot make a checksum wrong.
 * Checksums and the write need no Python object: SegmentWriter does them later, without the GIL.
 *
 * If the arena is full, the subclass's _hand_over() is called; it takes the arena away with take(),
 * which is atomic under the GIL, so other threads may append concurrently.
 */
#include "codec_call.h"
#include "memory.h"
#include "module.h"

#include <string.h>

static PyObject *builder_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"batch_bytes",   "batch_bytes_max", "arena_bytes", "codec",
                            "before_max_ms", "after_max_ms",    "clock",       "compress",
                            "lent_lz4",      NULL};
    Py_ssize_t batch_bytes, batch_bytes_max, arena_bytes;
    long long before_max_ms = INT64_MAX, after_max_ms = INT64_MAX;
    int codec = 0, lent_lz4 = 0;
    PyObject *clock = Py_None, *compress = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$nnniLLOOp:Builder", names, &batch_bytes,
                                     &batch_bytes_max, &arena_bytes, &codec, &before_max_ms,
                                     &after_max_ms, &clock, &compress, &lent_lz4)) {
        return NULL;
    }
    if (batch_bytes <= 0 || batch_bytes_max < LS_BATCH_HEADER_BYTES || arena_bytes <= 0 ||
        codec < 0 || codec > LS_CODEC_MAX || batch_bytes_max > INT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "a builder's sizes must be positive");
        return NULL;
    }
    ls_module *module = ls_module_of_type(type);
    BuilderObject *self = module == NULL ? NULL : (BuilderObject *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->module = module;
    ls_builder_init(&self->arena, (size_t)batch_bytes, (size_t)batch_bytes_max);
    self->clock = clock == Py_None ? NULL : Py_NewRef(clock);
    self->compress = compress == Py_None ? NULL : Py_NewRef(compress);
    self->arena_bytes = (size_t)arena_bytes;
    self->before_max_ms = before_max_ms;
    self->after_max_ms = after_max_ms;
    self->generation = module->fork_generation;
    self->codec = (uint8_t)codec;
    self->lent_lz4 = lent_lz4 != 0;
    return (PyObject *)self;
}

static int builder_traverse(BuilderObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->clock);
    Py_VISIT(self->compress);
    Py_VISIT(self->pack);
    return 0;
}

static int builder_clear(BuilderObject *self)
{
    Py_CLEAR(self->clock);
    Py_CLEAR(self->compress);
    Py_CLEAR(self->pack);
    return 0;
}

static void builder_dealloc(BuilderObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    builder_clear(self);
    ls_builder_free(&self->arena);
    PyMem_Free(self->headers.data);
    type->tp_free(self);
    Py_DECREF(type);
}

/* ---- one record ---- */

/* Returns the time in milliseconds, exact, mostly without reading the clock.  One reading of the clock
 * holds until the end of its millisecond, which is at least as many cycles away as nanoseconds if the
 * cycle counter runs at 1 GHz or more.  A faster counter only makes us read the clock earlier. */
static int64_t system_now(BuilderObject *self)
{
#if defined(__x86_64__)
    uint64_t cycles = __builtin_ia32_rdtsc();
    if (cycles >= self->now_since && cycles < self->now_until) {
        return self->now_ms;
    }
    int64_t ns = ls_now_ns();
    self->now_ms = ns / 1000000;
    self->now_since = cycles;
    self->now_until = cycles + (uint64_t)(1000000 - ns % 1000000);
    return self->now_ms;
#else
    (void)self;
    return ls_now_ms();
#endif
}

static bool now(BuilderObject *self, int64_t *out)
{
    if (self->clock == NULL) {
        *out = system_now(self);
        return true;
    }
    PyObject *result = PyObject_CallNoArgs(self->clock);
    if (result == NULL) {
        return false;
    }
    *out = PyLong_AsLongLong(result);
    Py_DECREF(result);
    if (*out == -1 && PyErr_Occurred()) {
        return false;
    }
    if (*out < 0) {
        PyErr_Format(PyExc_ValueError, "the clock returned %lld, which is before 1970", (long long)*out);
        return false;
    }
    return true;
}

/* Gets the timestamp of a record: the given one if it is within the configured bounds, or now. */
static bool record_time(BuilderObject *self, int64_t given, int64_t *out)
{
    if (given == LS_NO_TIMESTAMP) {
        return now(self, out);
    }
    *out = given;
    if (self->before_max_ms == INT64_MAX && self->after_max_ms == INT64_MAX) {
        return true;
    }
    int64_t current;
    if (!now(self, &current)) {
        return false;
    }
    if (given < current ? current - given > self->before_max_ms
                        : given - current > self->after_max_ms) {
        PyErr_Format(self->module->invalid_record_error,
                     "timestamp %lld is %lld ms %s now; message.timestamp.%s.max.ms allows %lld",
                     (long long)given,
                     (long long)(given < current ? current - given : given - current),
                     given < current ? "before" : "after", given < current ? "before" : "after",
                     (long long)(given < current ? self->before_max_ms : self->after_max_ms));
        return false;
    }
    return true;
}

static void raise_too_large(BuilderObject *self, Py_ssize_t size)
{
    PyObject *error = PyObject_CallFunction(self->module->too_large_error, "nn", size,
                                            (Py_ssize_t)self->arena.batch_bytes_max);
    if (error != NULL) {
        PyErr_SetObject(self->module->too_large_error, error);
        Py_DECREF(error);
    }
}

/* Gets a view of a value or key.  If the object is not bytes, `view` is filled and the caller must
 * release it. */
static bool view_bytes(BuilderObject *self, PyObject *object, const char *what, Py_buffer *view,
                       const uint8_t **data, int32_t *size)
{
    Py_ssize_t length;
    if (PyBytes_Check(object)) {
        *data = (const uint8_t *)PyBytes_AS_STRING(object);
        length = PyBytes_GET_SIZE(object);
    } else if (object == Py_None) {
        *data = NULL;
        *size = -1;
        return true;
    } else {
        bool record = Py_TYPE(object) == self->module->record_type;
        if (!ls_is_bytes_like(object, what, record ? ": use extend([record])" : "") ||
            PyObject_GetBuffer(object, view, PyBUF_SIMPLE) < 0) {
            return false;
        }
        *data = view->buf;
        length = view->len;
    }
    if (length > INT32_MAX / 2) {      /* larger than any batch may be: sums stay in range */
        raise_too_large(self, length);
        return false;
    }
    *size = (int32_t)length;
    return true;
}

static bool hand_over(BuilderObject *self)
{
    PyObject *done = PyObject_CallMethodNoArgs((PyObject *)self, self->module->name_hand_over);
    if (done == NULL) {
        return false;
    }
    Py_DECREF(done);
    if (self->closed) {                /* another thread closed it during a call into Python */
        PyErr_SetString(self->module->closed_error, "the writer is closed");
        return false;
    }
    return true;
}

/* Adds to the arena, sealing and handing over when full.  False: raised, and not added. */
static bool add(BuilderObject *self, const ls_new_record *record)
{
    for (;;) {
        if (self->arena.open_count == 0 && self->arena.size >= self->arena_bytes &&
            !hand_over(self)) {
            return false;              /* the arena stays full until _hand_over() succeeds */
        }
        ls_code code = ls_builder_add(&self->arena, record);
        if (code == LS_OK) {
            return true;
        }
        if (code == LS_E_TOO_LARGE) {
            raise_too_large(self, (Py_ssize_t)ls_builder_batch_size(record));
            return false;
        }
        if (code == LS_E_NO_MEMORY) {
            PyErr_NoMemory();
            return false;
        }
        ls_builder_seal(&self->arena, self->codec);
    }
}

bool ls_builder_append(BuilderObject *self, PyObject *value, PyObject *key, PyObject *headers,
                       int64_t timestamp)
{
    ls_new_record record;
    Py_buffer value_view = {0}, key_view = {0};
    bool ok = false;
    record.key_size = -1;
    record.key = NULL;
    /* This call owns the buffer: clocks, iterators and _hand_over() may let another thread append,
     * which then allocates its own buffer. */
    ls_header_buffer scratch = self->headers;
    memset(&self->headers, 0, sizeof self->headers);
    if (!view_bytes(self, value, "value", &value_view, &record.value, &record.value_size)) {
        goto done;
    }
    if (key != NULL && !view_bytes(self, key, "key", &key_view, &record.key, &record.key_size)) {
        goto done;
    }
    if (record.value_size < 0 && record.key_size < 0) {
        PyErr_SetString(self->module->invalid_record_error,
                        "a record without a value (a tombstone) needs a key");
        goto done;
    }
    record.headers_size = 0;
    record.header_count = 0;
    record.headers = NULL;
    if (headers != NULL && headers != self->module->empty_tuple) {
        if (!ls_headers_encode(&scratch, headers)) {
            goto done;
        }
        record.headers = scratch.data;
        record.headers_size = scratch.size;
        record.header_count = scratch.count;
    }
    if (!record_time(self, timestamp, &record.timestamp)) {
        goto done;
    }
    ok = add(self, &record);
done:
    PyMem_Free(self->headers.data);    /* the buffer of a concurrent append, or NULL */
    self->headers = scratch;
    if (value_view.obj != NULL) {
        PyBuffer_Release(&value_view);
    }
    if (key_view.obj != NULL) {
        PyBuffer_Release(&key_view);
    }
    return ok;
}

bool ls_builder_usable(BuilderObject *self)
{
    if (self->closed) {
        PyErr_SetString(self->module->closed_error, "the writer is closed");
        return false;
    }
    return ls_check_fork(self->module, self->generation);
}

/* append(value, *, key=None, headers=(), timestamp=None) */
static PyObject *builder_append(BuilderObject *self, PyObject *const *args, Py_ssize_t count,
                                PyObject *names)
{
    PyObject *fields[4] = {NULL, NULL, NULL, NULL};   /* value, key, headers, timestamp; borrowed */
    ls_module *module = self->module;
    if (count > 1) {
        return PyErr_Format(PyExc_TypeError,
                            "append() takes one positional argument, the value (%zd given); pass "
                            "key=, headers= and timestamp= by name",
                            count);
    }
    if (count == 1) {
        fields[0] = args[0];
    }
    Py_ssize_t named = names == NULL ? 0 : PyTuple_GET_SIZE(names);
    for (Py_ssize_t i = 0; i < named; i++) {
        PyObject *name = PyTuple_GET_ITEM(names, i);
        int slot = -1;
        for (int k = 0; k < 4 && slot < 0; k++) {
            slot = name == module->keywords[k] ? k : -1;
        }
        for (int k = 0; k < 4 && slot < 0; k++) {   /* a name that is not interned */
            slot = PyUnicode_Compare(name, module->keywords[k]) == 0 ? k : -1;
        }
        if (slot < 0) {
            return PyErr_Format(PyExc_TypeError, "append() has no argument %R", name);
        }
        if (fields[slot] != NULL) {
            return PyErr_Format(PyExc_TypeError, "append() got %R twice", name);
        }
        fields[slot] = args[count + i];
    }
    if (fields[0] == NULL) {
        PyErr_SetString(PyExc_TypeError, "append() needs a value");
        return NULL;
    }
    int64_t timestamp = LS_NO_TIMESTAMP;
    if (fields[3] != NULL && !ls_timestamp_from(fields[3], &timestamp)) {
        return NULL;
    }
    if (!ls_builder_usable(self) || !ls_builder_append(self, fields[0], fields[1], fields[2], timestamp)) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* ---- many records ---- */

static bool append_item(BuilderObject *self, PyObject *item)
{
    if (Py_TYPE(item) == self->module->record_type) {
        RecordObject *record = (RecordObject *)item;
        int64_t timestamp = record->timestamp;
        if (timestamp == -1) {
            timestamp = LS_NO_TIMESTAMP;   /* read from a log that kept no times */
        }
        return ls_builder_append(self, record->value, record->key, record->headers, timestamp);
    }
    if (item == Py_None) {
        PyErr_SetString(self->module->invalid_record_error,
                        "a record without a value (a tombstone) needs a key: use "
                        "Record(None, key=...)");
        return false;
    }
    if (PyUnicode_Check(item) || !PyObject_CheckBuffer(item)) {
        PyErr_Format(PyExc_TypeError,
                     PyUnicode_Check(item) ? "a record must be bytes or a Record, not %.100s: encode "
                                             "it, as in text.encode()"
                                           : "a record must be bytes or a Record, not %.100s",
                     Py_TYPE(item)->tp_name);
        return false;
    }
    return ls_builder_append(self, item, NULL, NULL, LS_NO_TIMESTAMP);
}

/* All records of one extend() without a timestamp get the same one: the clock is read once. */
static bool append_all(BuilderObject *self, PyObject *records)
{
    if (PyUnicode_Check(records) || PyBytes_Check(records) || PyByteArray_Check(records)) {
        PyErr_Format(PyExc_TypeError,
                     "extend() takes many records: an iterable of bytes or Record, not one %.100s",
                     Py_TYPE(records)->tp_name);
        return false;
    }
    int64_t time = 0;
    bool plain_times = self->before_max_ms == INT64_MAX && self->after_max_ms == INT64_MAX;
    if (plain_times && !now(self, &time)) {
        return false;
    }
    if (PyList_CheckExact(records) || PyTuple_CheckExact(records)) {
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(records); i++) {
            PyObject *item = PySequence_Fast_GET_ITEM(records, i);
            if (plain_times && PyBytes_CheckExact(item) &&
                PyBytes_GET_SIZE(item) < INT32_MAX / 2) {
                ls_new_record record = {
                    .timestamp = time,
                    .value = (const uint8_t *)PyBytes_AS_STRING(item),
                    .value_size = (int32_t)PyBytes_GET_SIZE(item),
                    .key_size = -1,
                };
                ls_code code = ls_builder_add(&self->arena, &record);
                if (code == LS_OK) {
                    continue;
                }
            }
            Py_INCREF(item);           /* the list may change in _hand_over */
            bool ok = append_item(self, item);
            Py_DECREF(item);
            if (!ok) {
                return false;
            }
        }
        return true;
    }
    PyObject *iterator = PyObject_GetIter(records);
    if (iterator == NULL) {
        return false;
    }
    bool ok = true;
    PyObject *item;
    while (ok && (item = PyIter_Next(iterator)) != NULL) {
        ok = append_item(self, item);
        Py_DECREF(item);
    }
    Py_DECREF(iterator);
    return ok && !PyErr_Occurred();
}

static PyObject *builder_extend(BuilderObject *self, PyObject *records)
{
    if (!ls_builder_usable(self) || !append_all(self, records)) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* ---- columns ---- */

typedef struct {                       /* one variable-size field in Arrow's layout; buffers held */
    Py_buffer ends, data, valid;       /* int32 ends, rows + 1 of them; valid.obj NULL: no nulls */
    bool given;
} bytes_column;

static void release_column(bytes_column *column)
{
    if (column->given) {
        PyBuffer_Release(&column->ends);
        PyBuffer_Release(&column->data);
        if (column->valid.obj != NULL) {
            PyBuffer_Release(&column->valid);
        }
        column->given = false;
    }
}

/* Takes (ends, data, valid or None) apart; `rows` becomes the number of rows, or must be it. */
static bool view_column(PyObject *parts, bytes_column *column, Py_ssize_t *rows)
{
    PyObject *ends, *data, *valid;
    if (!PyArg_ParseTuple(parts, "OOO:column", &ends, &data, &valid)) {
        return false;
    }
    if (PyObject_GetBuffer(ends, &column->ends, PyBUF_SIMPLE) < 0) {
        return false;
    }
    if (PyObject_GetBuffer(data, &column->data, PyBUF_SIMPLE) < 0) {
        PyBuffer_Release(&column->ends);
        return false;
    }
    column->valid.obj = NULL;
    if (valid != Py_None && PyObject_GetBuffer(valid, &column->valid, PyBUF_SIMPLE) < 0) {
        PyBuffer_Release(&column->ends);
        PyBuffer_Release(&column->data);
        return false;
    }
    column->given = true;
    Py_ssize_t found = column->ends.len / 4 - 1;
    if (found < 0 || column->ends.len % 4 != 0 || (*rows >= 0 && *rows != found) ||
        (column->valid.obj != NULL && column->valid.len < (found + 7) / 8)) {
        release_column(column);
        PyErr_SetString(PyExc_ValueError, "columns of different or impossible lengths");
        return false;
    }
    *rows = found;
    return true;
}

/* Gets one row of a column.  Returns false if its ends are outside the data. */
static bool row_of(const bytes_column *column, Py_ssize_t row, const uint8_t **data, int32_t *size)
{
    int32_t ends[2];
    memcpy(ends, (const uint8_t *)column->ends.buf + row * 4, sizeof ends);
    *data = NULL;
    *size = -1;
    if (column->valid.obj != NULL &&
        (((const uint8_t *)column->valid.buf)[row / 8] >> (row % 8) & 1) == 0) {
        return true;
    }
    if (ends[0] < 0 || ends[1] < ends[0] || ends[1] > column->data.len) {
        return false;
    }
    *data = (const uint8_t *)column->data.buf + ends[0];
    *size = ends[1] - ends[0];
    return true;
}

/* The numbers of an int64 buffer of `count` or, when count is -1, of any length. */
static bool view_numbers(PyObject *object, Py_buffer *view, Py_ssize_t *count)
{
    if (PyObject_GetBuffer(object, view, PyBUF_SIMPLE) < 0) {
        return false;
    }
    if (view->len % 8 != 0 || (*count >= 0 && view->len / 8 != *count)) {
        PyBuffer_Release(view);
        view->obj = NULL;
        PyErr_SetString(PyExc_ValueError, "columns of different or impossible lengths");
        return false;
    }
    *count = view->len / 8;
    return true;
}

/* _append_columns(values, keys, timestamps, rows): as append() for every row, or for those named.
 * A timestamp of LS_NO_TIMESTAMP means now. */
static PyObject *builder_append_columns(BuilderObject *self, PyObject *args)
{
    PyObject *values, *keys, *timestamps, *rows;
    if (!PyArg_ParseTuple(args, "OOOO:_append_columns", &values, &keys, &timestamps, &rows) ||
        !ls_builder_usable(self)) {
        return NULL;
    }
    PyObject *result = NULL;
    bytes_column value = {0}, key = {0};
    Py_buffer times = {0}, chosen = {0};
    Py_ssize_t total = -1, count = -1;
    if (!view_column(values, &value, &total) ||
        (keys != Py_None && !view_column(keys, &key, &total)) ||
        (timestamps != Py_None && !view_numbers(timestamps, &times, &total)) ||
        (rows != Py_None && !view_numbers(rows, &chosen, &count))) {
        goto done;
    }
    count = chosen.obj == NULL ? total : count;
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t row = i;
        if (chosen.obj != NULL) {
            memcpy(&row, (const uint8_t *)chosen.buf + i * 8, sizeof row);
            if (row < 0 || row >= total) {
                PyErr_Format(PyExc_IndexError, "row %lld of %zd", (long long)row, total);
                goto done;
            }
        }
        ls_new_record record = {.key_size = -1};
        if (!row_of(&value, (Py_ssize_t)row, &record.value, &record.value_size) ||
            (key.given && !row_of(&key, (Py_ssize_t)row, &record.key, &record.key_size))) {
            PyErr_Format(PyExc_ValueError, "row %lld is outside its column's data",
                         (long long)row);
            goto done;
        }
        if (record.value_size < 0 && record.key_size < 0) {
            PyErr_Format(self->module->invalid_record_error,
                         "row %lld has neither value nor key: a record without a value (a "
                         "tombstone) needs a key", (long long)row);
            goto done;
        }
        if (record.value_size > INT32_MAX / 2 || record.key_size > INT32_MAX / 2) {
            raise_too_large(self, record.value_size > record.key_size ? record.value_size
                                                                      : record.key_size);
            goto done;
        }
        int64_t given = LS_NO_TIMESTAMP;
        if (times.obj != NULL) {
            memcpy(&given, (const uint8_t *)times.buf + row * 8, sizeof given);
            if (given < 0 && given != LS_NO_TIMESTAMP) {
                PyErr_Format(self->module->invalid_record_error,
                             "row %lld has the time %lld: milliseconds since 1970 are not negative",
                             (long long)row, (long long)given);
                goto done;
            }
        }
        if (!record_time(self, given, &record.timestamp) || !add(self, &record)) {
            goto done;
        }
    }
    result = Py_NewRef(Py_None);
done:
    release_column(&value);
    release_column(&key);
    if (times.obj != NULL) {
        PyBuffer_Release(&times);
    }
    if (chosen.obj != NULL) {
        PyBuffer_Release(&chosen);
    }
    return result;
}

/* ---- handing over ---- */

/* The records of one sealed batch by the codec's Python function.  False: raised. */
static bool put_compressed(BuilderObject *self, ls_builder *packed, const uint8_t *batch, size_t size)
{
    PyObject *bytes = ls_codec_call(self->compress, self->codec, batch + LS_BATCH_HEADER_BYTES,
                                    size - LS_BATCH_HEADER_BYTES, -1);
    if (bytes == NULL) {
        return false;
    }
    bool ok = ls_builder_put_batch(packed, batch, (const uint8_t *)PyBytes_AS_STRING(bytes),
                                   (size_t)PyBytes_GET_SIZE(bytes)) == LS_OK;
    if (!ok) {
        PyErr_NoMemory();
    }
    Py_DECREF(bytes);
    return ok;
}

/* The same for lz4 by the library's own function.  False: raised. */
static bool put_lz4(BuilderObject *self, ls_builder *packed, const uint8_t *batch, size_t size)
{
    size_t plain = size - LS_BATCH_HEADER_BYTES;
    ls_lz4_encode encode = self->module->lz4_encode;
    uint8_t *frame = ls_memory_take(ls_lz4_frame_room(plain));
    ls_code code = frame == NULL ? LS_E_NO_MEMORY : LS_OK;
    if (code == LS_OK) {
        Py_BEGIN_ALLOW_THREADS         /* the arena is private, and so are frame and packed */
        size_t made = ls_lz4_frame_make(batch + LS_BATCH_HEADER_BYTES, plain, encode, frame);
        code = ls_builder_put_batch(packed, batch, frame, made);
        Py_END_ALLOW_THREADS
    }
    ls_memory_give(frame);
    if (code != LS_OK) {
        PyErr_NoMemory();
    }
    return code == LS_OK;
}

/* Compresses the batches of a private arena one by one; `self` is not known to other threads. */
static bool compress_arena(BuilderObject *self)
{
    ls_builder *arena = &self->arena;
    ls_builder packed;
    ls_builder_init(&packed, arena->batch_bytes, arena->batch_bytes_max);
    /* Allocates as much as the arena that it replaces, so that it does not grow in steps. */
    bool ok = ls_builder_reserve(&packed, arena->size);
    if (!ok) {
        PyErr_NoMemory();
    }
    for (size_t at = 0; ok && at < arena->size;) {
        const uint8_t *batch = arena->data + at;
        size_t size = (size_t)ls_load_i32(batch + LS_AT_LENGTH) + LS_LOG_OVERHEAD_BYTES;
        bool lent = self->lent_lz4 && self->codec == LS_CODEC_LZ4 && self->module->lz4_encode != NULL;
        ok = lent ? put_lz4(self, &packed, batch, size) : put_compressed(self, &packed, batch, size);
        at += size;
    }
    if (ok) {
        packed.packed = true;
        packed.records = arena->records;
        packed.arena_max_timestamp = arena->arena_max_timestamp;
        packed.arena_min_timestamp = arena->arena_min_timestamp;
        ls_builder_free(arena);
        *arena = packed;
    } else {
        ls_builder_free(&packed);
    }
    return ok;
}

/* take(list): appends to the list a new builder with all records so far, sealed; this builder is empty
 * afterwards.  No signal handler runs in between, so the records are always in exactly one of the two.
 * The records keep their pack; records that are added later belong to `pack`. */
static PyObject *take_all(BuilderObject *self, PyObject *list, PyObject *pack)
{
    if (!PyList_Check(list)) {
        PyErr_SetString(PyExc_TypeError, "take() needs a list");
        return NULL;
    }
    PyTypeObject *type = self->module->builder_type;
    BuilderObject *taken = (BuilderObject *)type->tp_alloc(type, 0);
    if (taken == NULL) {
        return NULL;
    }
    taken->module = self->module;
    taken->compress = Py_XNewRef(self->compress);
    taken->codec = self->codec;
    taken->lent_lz4 = self->lent_lz4;
    taken->generation = self->generation;
    taken->arena_bytes = self->arena_bytes;
    ls_builder_init(&taken->arena, self->arena.batch_bytes, self->arena.batch_bytes_max);
    if (PyList_Append(list, (PyObject *)taken) < 0) {
        Py_DECREF(taken);
        return NULL;
    }
    ls_builder_seal(&self->arena, self->codec);
    ls_builder empty = taken->arena;
    taken->arena = self->arena;
    self->arena = empty;
    taken->pack = self->pack;          /* the reference moves with it */
    self->pack = Py_XNewRef(pack);
    Py_DECREF(taken);
    Py_RETURN_NONE;
}

static PyObject *builder_take(BuilderObject *self, PyObject *list)
{
    return take_all(self, list, NULL);
}

/* take_pack(list, pack): the same for a producer, whose next records belong to another pack. */
static PyObject *builder_take_pack(BuilderObject *self, PyObject *args)
{
    PyObject *list, *pack;
    if (!PyArg_ParseTuple(args, "OO:_take_pack", &list, &pack)) {
        return NULL;
    }
    return take_all(self, list, pack);
}

/* stamp(producer_id, epoch, sequence, transactional, offset, leader_epoch) -> (next sequence,
 * headers): sets the producer and the offsets of the batches; `headers` holds the 61 bytes of each.
 * For a sealed builder that only one thread uses. */
static PyObject *builder_stamp(BuilderObject *self, PyObject *args)
{
    long long producer_id, offset;
    short epoch;
    int sequence, transactional, leader_epoch;
    if (!PyArg_ParseTuple(args, "LhipLi:_stamp", &producer_id, &epoch, &sequence, &transactional,
                          &offset, &leader_epoch)) {
        return NULL;
    }
    ls_builder *arena = &self->arena;
    if (arena->open_count != 0 || sequence < 0 ||
        (self->codec != LS_CODEC_NONE && arena->size != 0 && !arena->packed)) {
        PyErr_SetString(PyExc_SystemError, "batches must be sealed before they are stamped");
        return NULL;
    }
    int32_t next = ls_batches_stamp(arena->data, arena->size, producer_id, epoch, sequence,
                                    transactional != 0);
    Py_ssize_t count = 0;
    for (size_t at = 0; at < arena->size; count++) {
        at += (size_t)ls_load_i32(arena->data + at + LS_AT_LENGTH) + LS_LOG_OVERHEAD_BYTES;
    }
    PyObject *headers = PyBytes_FromStringAndSize(NULL, count * LS_BATCH_HEADER_BYTES);
    if (headers == NULL) {
        return NULL;
    }
    uint8_t *out = (uint8_t *)PyBytes_AS_STRING(headers);
    for (size_t at = 0; at < arena->size; out += LS_BATCH_HEADER_BYTES) {
        memcpy(out, arena->data + at, LS_BATCH_HEADER_BYTES);
        ls_store_i64(out + LS_AT_BASE_OFFSET, offset);
        ls_store_i32(out + LS_AT_LEADER_EPOCH, leader_epoch);
        offset += (int64_t)ls_load_i32(out + LS_AT_LAST_OFFSET_DELTA) + 1;
        at += (size_t)ls_load_i32(out + LS_AT_LENGTH) + LS_LOG_OVERHEAD_BYTES;
    }
    return Py_BuildValue("(iN)", (int)next, headers);
}

/* clear(): discards the records. */
static PyObject *builder_drop(BuilderObject *self, PyObject *Py_UNUSED(unused))
{
    ls_builder_clear(&self->arena);
    Py_RETURN_NONE;
}

/* put_back(taken): reuses the memory of a builder whose records are written. */
static PyObject *builder_put_back(BuilderObject *self, PyObject *other)
{
    if (!PyObject_TypeCheck(other, self->module->builder_type)) {
        PyErr_SetString(PyExc_TypeError, "put_back() takes what take() gave");
        return NULL;
    }
    BuilderObject *taken = (BuilderObject *)other;
    if (self->arena.data == NULL && taken->arena.data != NULL && taken->codec == 0) {
        self->arena.data = taken->arena.data;
        self->arena.capacity = taken->arena.capacity;
        taken->arena.data = NULL;
        taken->arena.capacity = 0;
        ls_builder_clear(&taken->arena);
    }
    Py_RETURN_NONE;
}

/* seal(): closes the open batch and compresses; for a builder that only one thread uses.  May be
 * repeated: a batch is compressed only once. */
static PyObject *builder_seal(BuilderObject *self, PyObject *Py_UNUSED(unused))
{
    ls_builder_seal(&self->arena, self->codec);
    if (self->arena.packed) {
        Py_RETURN_NONE;
    }
    if (self->codec != LS_CODEC_NONE && self->arena.size != 0 && !compress_arena(self)) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* encoded(): all batches so far, sealed, with offsets from 0 and checksums; the builder is empty
 * afterwards.  For a builder that only one thread uses. */
static PyObject *builder_encoded(BuilderObject *self, PyObject *Py_UNUSED(unused))
{
    ls_builder *arena = &self->arena;
    PyObject *sealed = builder_seal(self, NULL);
    if (sealed == NULL) {
        return NULL;
    }
    Py_DECREF(sealed);
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)arena->size);
    if (bytes == NULL) {
        return NULL;
    }
    if (arena->size != 0) {
        memcpy(PyBytes_AS_STRING(bytes), arena->data, arena->size);
        ls_batches_finish((uint8_t *)PyBytes_AS_STRING(bytes), arena->size, 0, -1, -1);
    }
    ls_builder_clear(arena);
    return bytes;
}

static PyObject *builder_close(BuilderObject *self, PyObject *Py_UNUSED(unused))
{
    self->closed = true;
    Py_RETURN_NONE;
}

static PyObject *builder_get_records(BuilderObject *self, void *Py_UNUSED(closure))
{
    return PyLong_FromLongLong(self->arena.records);
}

static PyObject *builder_get_size_bytes(BuilderObject *self, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(self->arena.size);
}

static PyMethodDef builder_methods[] = {
    {"append", (PyCFunction)(void (*)(void))builder_append, METH_FASTCALL | METH_KEYWORDS,
     PyDoc_STR("append($self, value, *, key=None, headers=(), timestamp=None)\n--\n\n"
               "Add one record to the open batch.")},
    {"extend", (PyCFunction)builder_extend, METH_O,
     PyDoc_STR("extend($self, records, /)\n--\n\nAdd many: bytes or Record.")},
    {"_take", (PyCFunction)builder_take, METH_O,
     PyDoc_STR("Take all records away, into a builder of their own in a list.")},
    {"_take_pack", (PyCFunction)builder_take_pack, METH_VARARGS,
     PyDoc_STR("Take all records away with their pack; the next belong to another.")},
    {"_stamp", (PyCFunction)builder_stamp, METH_VARARGS,
     PyDoc_STR("Give the batches a producer; the next sequence, and their headers.")},
    {"_drop", (PyCFunction)builder_drop, METH_NOARGS, PyDoc_STR("Forget all records.")},
    {"_put_back", (PyCFunction)builder_put_back, METH_O,
     PyDoc_STR("Reuse the memory of a builder that take() gave.")},
    {"_seal", (PyCFunction)builder_seal, METH_NOARGS,
     PyDoc_STR("Close the open batch, and compress.")},
    {"_append_columns", (PyCFunction)builder_append_columns, METH_VARARGS,
     PyDoc_STR("Add rows of columns in Arrow's layout.")},
    {"_encoded", (PyCFunction)builder_encoded, METH_NOARGS,
     PyDoc_STR("Take all batches away, as bytes.")},
    {"_close", (PyCFunction)builder_close, METH_NOARGS, PyDoc_STR("Refuse further records.")},
    {NULL, NULL, 0, NULL},
};

static PyObject *builder_get_pack(BuilderObject *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(self->pack == NULL ? Py_None : self->pack);
}

static int builder_set_pack(BuilderObject *self, PyObject *pack, void *Py_UNUSED(closure))
{
    Py_XSETREF(self->pack, Py_XNewRef(pack));
    return 0;
}

static PyGetSetDef builder_getset[] = {
    {"_pack", (getter)builder_get_pack, (setter)builder_set_pack,
     PyDoc_STR("what a producer calls the records held"), NULL},
    {"_records", (getter)builder_get_records, NULL, PyDoc_STR("records held"), NULL},
    {"_size_bytes", (getter)builder_get_size_bytes, NULL, PyDoc_STR("bytes held"), NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot builder_slots[] = {
    {Py_tp_doc, (void *)PyDoc_STR("Encodes records into batches; see builder.c.")},
    {Py_tp_new, builder_new},
    {Py_tp_dealloc, builder_dealloc},
    {Py_tp_traverse, builder_traverse},
    {Py_tp_clear, builder_clear},
    {Py_tp_methods, builder_methods},
    {Py_tp_getset, builder_getset},
    {0, NULL},
};

PyType_Spec ls_builder_spec = {
    .name = "logstore._native.Builder",
    .basicsize = sizeof(BuilderObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = builder_slots,
};
