/* SegmentWriter: the active segment's appending half: file, next offset, index state, roll rule.
 *
 * Callers serialise append() with the partition's lock.  Any thread may look up the live index: its
 * memory changes only with the GIL held, after the write.
 */
#include "scan.h"

#include <string.h>

#include "batch_check.h"

typedef struct {
    PyObject_HEAD
    ls_module *module;
    FileObject *file;                  /* strong */
    ls_index_tracker index;
    int64_t next_offset;
    int64_t first_timestamp;           /* max timestamp of the first batch; -1: none yet */
    int64_t min_timestamp;             /* no record is older; INT64_MAX: none yet, MIN: not known */
    int64_t created_ms;                /* roll base when records carry no times */
    int64_t segment_bytes;
    int64_t segment_ms;                /* jitter already taken off */
    int64_t index_bytes;               /* capacity of either index */
} SegmentWriterObject;

static PyObject *segment_writer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"file",          "base_offset", "next_offset",     "interval_bytes",
                            "segment_bytes", "segment_ms",  "index_bytes",     "created_ms",
                            "offsets",       "times",       "first_timestamp", "max_timestamp",
                            "max_timestamp_offset", "last_indexed_position",
                            "min_timestamp", NULL};
    PyObject *file;
    long long base_offset, next_offset, interval, segment_bytes, segment_ms, index_bytes, created;
    Py_buffer offsets, times;
    long long first_timestamp, max_timestamp, max_timestamp_offset, last_indexed_position;
    long long min_timestamp;
    ls_module *module = ls_module_of_type(type);
    if (module == NULL ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "O!$LLLLLLLy*y*LLLLL:SegmentWriter", names,
                                     module->file_type, &file, &base_offset, &next_offset,
                                     &interval, &segment_bytes, &segment_ms, &index_bytes, &created,
                                     &offsets, &times, &first_timestamp, &max_timestamp,
                                     &max_timestamp_offset, &last_indexed_position,
                                     &min_timestamp)) {
        return NULL;
    }
    SegmentWriterObject *self = NULL;
    /* Later sums and differences of these numbers stay within int64_t. */
    if (base_offset < 0 || next_offset < base_offset || segment_bytes < 0 || segment_ms < 0 ||
        index_bytes < 0 || created < 0 || last_indexed_position < 0 || max_timestamp_offset < -1) {
        PyErr_SetString(PyExc_ValueError, "a segment writer's numbers must not be negative");
    } else {
        self = (SegmentWriterObject *)type->tp_alloc(type, 0);
    }
    if (self != NULL) {
        self->module = module;
        self->file = (FileObject *)Py_NewRef(file);
        ls_index_tracker_init(&self->index, base_offset, interval);
        self->next_offset = next_offset;
        self->first_timestamp = first_timestamp;
        self->created_ms = created;
        self->min_timestamp = min_timestamp;
        self->segment_bytes = segment_bytes;
        self->segment_ms = segment_ms;
        self->index_bytes = index_bytes;
        self->index.max_timestamp = max_timestamp;
        self->index.max_timestamp_offset = max_timestamp_offset;
        self->index.last_indexed_position = last_indexed_position;
        bool ok = ls_entries_copy(&self->index.offsets, offsets.buf, (size_t)offsets.len) &&
                  ls_entries_copy(&self->index.times, times.buf, (size_t)times.len);
        if (!ok) {
            PyErr_NoMemory();
            Py_CLEAR(self);
        } else if (times.len >= LS_TIME_ENTRY_BYTES) {
            const uint8_t *last = (const uint8_t *)times.buf + times.len - LS_TIME_ENTRY_BYTES;
            self->index.last_time_entry = ls_load_i64(last);
        }
    }
    PyBuffer_Release(&offsets);
    PyBuffer_Release(&times);
    return (PyObject *)self;
}

static void segment_writer_dealloc(SegmentWriterObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    ls_index_tracker_free(&self->index);
    Py_XDECREF(self->file);
    type->tp_free(self);
    Py_DECREF(type);
}

/* Kafka's rule: roll before appending a set of this size, greatest time and last offset? */
static bool should_roll(const SegmentWriterObject *self, int64_t size, int64_t max_timestamp,
                        int64_t last_offset, int64_t now_ms)   /* now_ms -1: the system's clock */
{
    int64_t end = atomic_load_explicit(&self->file->end, memory_order_relaxed);
    if (end == 0) {
        /* An empty segment takes anything that its base offset can address. */
        return last_offset - self->index.base_offset > INT32_MAX;
    }
    int64_t waited = self->first_timestamp >= 0 && max_timestamp >= 0
                         ? max_timestamp - self->first_timestamp
                         : (now_ms < 0 ? ls_now_ms() : now_ms) - self->created_ms;
    return size > self->segment_bytes - end || waited > self->segment_ms ||
           (int64_t)self->index.offsets.size / LS_OFFSET_ENTRY_BYTES >=
               self->index_bytes / LS_OFFSET_ENTRY_BYTES ||
           (int64_t)self->index.times.size / LS_TIME_ENTRY_BYTES >=
               self->index_bytes / LS_TIME_ENTRY_BYTES - 1 ||
           last_offset - self->index.base_offset > INT32_MAX;
}

/* Adds index entries for the batches in `data`.  A failed allocation only makes the index sparser. */
static void track(SegmentWriterObject *self, const uint8_t *data, size_t size, int64_t position)
{
    for (size_t at = 0; at < size;) {
        ls_batch batch;
        ls_status status = ls_batch_parse(data + at, size - at, &batch);
        if (status.code != LS_OK) {
            return;                    /* cannot happen: the builder wrote these headers */
        }
        if (position == 0 && at == 0) {
            self->first_timestamp = batch.max_timestamp;
        }
        (void)ls_index_track(&self->index, &batch, position + (int64_t)at);
        at += (size_t)batch.size;
    }
}

static PyObject *raise_failed_write(SegmentWriterObject *self, ls_status status, int64_t end_offset)
{
    if (status.code != LS_E_UNDONE) {
        return ls_raise(self->module, status, self->file->path, -1, -1);
    }
    PyObject *offsets = PyObject_CallFunction((PyObject *)&PyRange_Type, "LL",
                                              (long long)self->next_offset, (long long)end_offset);
    PyObject *args = Py_BuildValue("(s)", "a write failed half-way and could not be taken back");
    PyObject *keywords = offsets == NULL ? NULL : Py_BuildValue("{s:O}", "offsets", offsets);
    if (args != NULL && keywords != NULL) {
        PyObject *error = PyObject_Call(self->module->indeterminate_error, args, keywords);
        if (error != NULL) {
            PyErr_SetObject(self->module->indeterminate_error, error);
            Py_DECREF(error);
        }
    }
    Py_XDECREF(offsets);
    Py_XDECREF(args);
    Py_XDECREF(keywords);
    return NULL;
}

static ls_status write_arena(SegmentWriterObject *self, ls_builder *arena, long epoch,
                             int64_t append_time, int64_t position)
{
    ls_batches_finish(arena->data, arena->size, self->next_offset, (int32_t)epoch, append_time);
    return ls_append(self->file->io, self->file->fd, arena->data, arena->size, position);
}

/* append(builder, leader_epoch, append_time, now_ms) -> first offset, or -1 if the caller must roll
 * the segment before.  On success the records have offsets from there on, and readers see them. */
static PyObject *segment_writer_append(SegmentWriterObject *self, PyObject *const *args,
                                       Py_ssize_t count)
{
    if (count != 4 || !PyObject_TypeCheck(args[0], self->module->builder_type)) {
        PyErr_SetString(PyExc_TypeError, "append(builder, leader_epoch, append_time, now_ms)");
        return NULL;
    }
    BuilderObject *builder = (BuilderObject *)args[0];
    long epoch = PyLong_AsLong(args[1]);
    int64_t append_time = PyLong_AsLongLong(args[2]);
    int64_t now_ms = PyLong_AsLongLong(args[3]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    ls_builder *arena = &builder->arena;
    int64_t first_offset = self->next_offset;
    if (arena->size == 0) {
        return PyLong_FromLongLong(first_offset);
    }
    if (builder->codec != LS_CODEC_NONE && !arena->packed) {
        PyErr_SetString(PyExc_SystemError, "batches must be sealed before they are appended");
        return NULL;
    }
    ls_builder_seal(arena, LS_CODEC_NONE);
    int64_t max_timestamp = append_time >= 0 ? append_time : arena->arena_max_timestamp;
    int64_t end_offset;
    if (__builtin_add_overflow(self->next_offset, arena->records, &end_offset) ||
        end_offset > LS_BASE_OFFSET_MAX) {
        return PyErr_Format(self->module->invalid_record_error,
                            "no offsets are left for %lld records from offset %lld on",
                            (long long)arena->records, (long long)self->next_offset);
    }
    if (should_roll(self, (int64_t)arena->size, max_timestamp, end_offset - 1, now_ms)) {
        return PyLong_FromLong(-1);
    }
    if (!ls_file_pin(self->file)) {
        return NULL;
    }
    int64_t position = atomic_load_explicit(&self->file->end, memory_order_relaxed);
    ls_status status;
    if (arena->size < LS_GIL_BYTES) {  /* a small write is a copy into the page cache */
        status = write_arena(self, arena, epoch, append_time, position);
    } else {
        Py_BEGIN_ALLOW_THREADS         /* pinned; the caller's lock guards builder and writer */
        status = write_arena(self, arena, epoch, append_time, position);
        Py_END_ALLOW_THREADS
    }
    ls_file_unpin(self->file);
    if (status.code != LS_OK) {
        return raise_failed_write(self, status, end_offset);
    }
    atomic_store_explicit(&self->file->end, position + (int64_t)arena->size, memory_order_release);
    self->next_offset = end_offset;
    int64_t oldest = append_time >= 0 ? append_time : arena->arena_min_timestamp;
    self->min_timestamp = oldest < self->min_timestamp ? oldest : self->min_timestamp;
    track(self, arena->data, arena->size, position);
    /* The builder is empty once its records are in the log.  A caller that was interrupted can append
     * it again: that writes nothing. */
    if (arena->capacity > 2 * builder->arena_bytes + (2 << 20)) {
        ls_builder_free(arena);        /* one huge record must not pin its memory for ever */
    }
    ls_builder_clear(arena);
    return PyLong_FromLongLong(first_offset);
}

/* The least time in a batch that is all there; INT64_MIN when it would have to be decompressed. */
static int64_t oldest_in(const uint8_t *data, const ls_batch *batch)
{
    if (batch->attributes & LS_ATTR_LOG_APPEND_TIME) {
        return batch->max_timestamp;
    }
    if (ls_batch_codec(batch) != LS_CODEC_NONE) {
        return INT64_MIN;
    }
    ls_records records;
    ls_record record;
    ls_records_open(&records, batch, data + LS_BATCH_HEADER_BYTES,
                    (size_t)batch->size - LS_BATCH_HEADER_BYTES);
    int64_t oldest = INT64_MAX;
    ls_code code;
    while ((code = ls_records_next(&records, &record)) == LS_OK) {
        oldest = record.timestamp < oldest ? record.timestamp : oldest;
    }
    return code == LS_END ? oldest : INT64_MIN;
}

/* append_raw(batches, now_ms) -> True, or False if the caller must roll the segment before.  Whole
 * batches with their offsets and checksums, after the last offset; the caller has checked them. */
static PyObject *segment_writer_append_raw(SegmentWriterObject *self, PyObject *args)
{
    PyObject *batches;
    long long now_ms;
    if (!PyArg_ParseTuple(args, "SL:append_raw", &batches, &now_ms)) {
        return NULL;
    }
    const uint8_t *data = (const uint8_t *)PyBytes_AS_STRING(batches);
    size_t size = (size_t)PyBytes_GET_SIZE(batches);
    int64_t next_offset = self->next_offset, max_timestamp = -1, min_timestamp = INT64_MAX;
    for (size_t at = 0; at < size;) {
        ls_batch batch;
        if (size - at < LS_BATCH_HEADER_BYTES ||
            ls_batch_parse(data + at, size - at, &batch).code != LS_OK ||
            batch.size > (int64_t)(size - at) || batch.base_offset < next_offset) {
            return PyErr_Format(PyExc_ValueError, "no batch at or above offset %lld at byte %zu",
                                (long long)next_offset, at);
        }
        next_offset = batch.last_offset + 1;
        max_timestamp = batch.max_timestamp > max_timestamp ? batch.max_timestamp : max_timestamp;
        int64_t oldest = oldest_in(data + at, &batch);
        min_timestamp = oldest < min_timestamp ? oldest : min_timestamp;
        at += (size_t)batch.size;
    }
    if (should_roll(self, (int64_t)size, max_timestamp, next_offset - 1, now_ms)) {
        Py_RETURN_FALSE;
    }
    if (!ls_file_pin(self->file)) {
        return NULL;
    }
    int64_t position = atomic_load_explicit(&self->file->end, memory_order_relaxed);
    ls_status status;
    Py_BEGIN_ALLOW_THREADS             /* pinned; `batches` is held by the arguments */
    status = ls_append(self->file->io, self->file->fd, data, size, position);
    Py_END_ALLOW_THREADS
    ls_file_unpin(self->file);
    if (status.code != LS_OK) {
        return raise_failed_write(self, status, next_offset);
    }
    atomic_store_explicit(&self->file->end, position + (int64_t)size, memory_order_release);
    self->next_offset = next_offset;
    self->min_timestamp =
        min_timestamp < self->min_timestamp ? min_timestamp : self->min_timestamp;
    track(self, data, size, position);
    Py_RETURN_TRUE;
}

enum { PLACE_BYTES = LS_AT_MAGIC };    /* base offset, length, leader epoch */

/* Writes one batch that was checked: `header` has its place, `raw` the bytes after that.  Returns false,
 * and has raised, if the write failed. */
static bool write_placed(SegmentWriterObject *self, const uint8_t *header, const Py_buffer *raw,
                         const ls_batch *batch, int64_t oldest)
{
    if (!ls_file_pin(self->file)) {
        return false;
    }
    int64_t position = atomic_load_explicit(&self->file->end, memory_order_relaxed);
    const uint8_t *rest = (const uint8_t *)raw->buf + PLACE_BYTES;
    size_t rest_size = (size_t)raw->len - PLACE_BYTES;
    ls_status status;
    if (raw->len <= LS_GIL_BYTES) {
        status = ls_append_parts(self->file->io, self->file->fd, header, PLACE_BYTES, rest,
                                 rest_size, position);
    } else {
        Py_BEGIN_ALLOW_THREADS         /* pinned; the buffer is held; the caller's lock is held */
        status = ls_append_parts(self->file->io, self->file->fd, header, PLACE_BYTES, rest,
                                 rest_size, position);
        Py_END_ALLOW_THREADS
    }
    ls_file_unpin(self->file);
    if (status.code != LS_OK) {
        raise_failed_write(self, status, batch->last_offset + 1);
        return false;
    }
    atomic_store_explicit(&self->file->end, position + batch->size, memory_order_release);
    self->next_offset = batch->last_offset + 1;
    self->min_timestamp = oldest < self->min_timestamp ? oldest : self->min_timestamp;
    if (position == 0) {
        self->first_timestamp = batch->max_timestamp;
    }
    (void)ls_index_track(&self->index, batch, position);  /* without memory the index is sparser */
    return true;
}

/* Parses the header of a batch at another place.  False if that is not one batch of its own size. */
static bool place(const Py_buffer *raw, int64_t base_offset, int32_t leader_epoch,
                  uint8_t header[LS_BATCH_HEADER_BYTES], ls_batch *batch)
{
    if (raw->len < LS_BATCH_HEADER_BYTES) {
        return false;
    }
    memcpy(header, raw->buf, LS_BATCH_HEADER_BYTES);
    ls_store_i64(header, base_offset);
    ls_store_i32(header + LS_AT_LEADER_EPOCH, leader_epoch);
    return ls_batch_parse(header, LS_BATCH_HEADER_BYTES, batch).code == LS_OK &&
           batch->size == raw->len;
}

/* append_placed(batch, base_offset, leader_epoch, oldest, now_ms) -> as append_raw.  One batch that the
 * caller has checked, from any buffer, which is not changed: base offset and leader epoch are written
 * in front of its other bytes.  The checksum covers neither.  `oldest` is its least timestamp. */
static PyObject *segment_writer_append_placed(SegmentWriterObject *self, PyObject *args)
{
    Py_buffer raw;
    long long base_offset, oldest, now_ms;
    int leader_epoch;
    if (!PyArg_ParseTuple(args, "y*LiLL:append_placed", &raw, &base_offset, &leader_epoch, &oldest,
                          &now_ms)) {
        return NULL;
    }
    PyObject *result = NULL;
    uint8_t header[LS_BATCH_HEADER_BYTES];
    ls_batch batch;
    if (base_offset < self->next_offset ||
        !place(&raw, base_offset, leader_epoch, header, &batch)) {
        PyErr_Format(PyExc_ValueError, "no batch for an offset at or above %lld",
                     (long long)self->next_offset);
    } else if (should_roll(self, batch.size, batch.max_timestamp, batch.last_offset, now_ms)) {
        result = Py_NewRef(Py_False);
    } else if (write_placed(self, header, &raw, &batch, oldest)) {
        result = Py_NewRef(Py_True);
    }
    PyBuffer_Release(&raw);
    return result;
}

/* append_plain(batch, leader_epoch, rules, now_ms) -> the first offset, or None
 *
 * Checks and writes one batch of a client, as append_placed writes it, if it is right, keeps the rules
 * (size_max, before_max, after_max, keyed), has no producer and fits the segment.  None: it does not,
 * and nothing is written; the caller finds the reason.  `now_ms` -1: the system's clock. */
static PyObject *segment_writer_append_plain(SegmentWriterObject *self, PyObject *const *args,
                                             Py_ssize_t count)
{
    if (count != 4 || !PyTuple_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "append_plain(batch, leader_epoch, rules, now_ms)");
        return NULL;
    }
    long long size_max, before_max, after_max;
    int keyed;
    long epoch = PyLong_AsLong(args[1]);
    int64_t now = PyLong_AsLongLong(args[3]);
    if (PyErr_Occurred() || !PyArg_ParseTuple(args[2], "LLLp:append_plain", &size_max, &before_max,
                                              &after_max, &keyed)) {
        return NULL;
    }
    Py_buffer raw;
    if (PyObject_GetBuffer(args[0], &raw, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    now = now < 0 ? ls_now_ms() : now;
    const ls_batch_rules rules = {size_max, before_max, after_max, keyed != 0};
    ls_batch batch;
    ls_record_walk walk;
    /* The caller checks the batch of a producer itself: do not read all of it twice. */
    bool right = raw.len >= LS_BATCH_HEADER_BYTES &&
                 ls_load_i64((const uint8_t *)raw.buf + LS_AT_PRODUCER_ID) < 0;
    if (right && raw.len <= LS_GIL_BYTES) {
        right = ls_batch_check(raw.buf, (size_t)raw.len, &batch, &walk);
    } else if (right) {
        Py_BEGIN_ALLOW_THREADS         /* the buffer is held */
        right = ls_batch_check(raw.buf, (size_t)raw.len, &batch, &walk);
        Py_END_ALLOW_THREADS
    }
    PyObject *result = NULL;
    uint8_t header[LS_BATCH_HEADER_BYTES];
    int64_t first_offset = self->next_offset;
    if (!right || !ls_batch_is_plain(raw.buf, &batch, &walk, &rules, now) ||
        !place(&raw, first_offset, (int32_t)epoch, header, &batch) ||
        should_roll(self, batch.size, batch.max_timestamp, batch.last_offset, now)) {
        result = Py_NewRef(Py_None);
    } else if (write_placed(self, header, &raw, &batch, walk.oldest)) {
        result = PyLong_FromLongLong(first_offset);
    }
    PyBuffer_Release(&raw);
    return result;
}

/* finish(): the final time entry, before the segment is sealed or closed. */
static PyObject *segment_writer_finish(SegmentWriterObject *self, PyObject *Py_UNUSED(unused))
{
    if (ls_index_finish(&self->index) != LS_OK) {
        return PyErr_NoMemory();
    }
    Py_RETURN_NONE;
}

static PyObject *segment_writer_offsets(SegmentWriterObject *self, PyObject *args)
{
    Py_ssize_t from = 0;
    if (!PyArg_ParseTuple(args, "|n:offset_entries", &from)) {
        return NULL;
    }
    Py_ssize_t size = (Py_ssize_t)self->index.offsets.size;
    from = from < 0 || from > size ? size : from;
    return PyBytes_FromStringAndSize((const char *)self->index.offsets.data + from, size - from);
}

static PyObject *segment_writer_times(SegmentWriterObject *self, PyObject *args)
{
    Py_ssize_t from = 0;
    if (!PyArg_ParseTuple(args, "|n:time_entries", &from)) {
        return NULL;
    }
    Py_ssize_t size = (Py_ssize_t)self->index.times.size;
    from = from < 0 || from > size ? size : from;
    return PyBytes_FromStringAndSize((const char *)self->index.times.data + from, size - from);
}

const ls_index_tracker *ls_segment_writer_index(PyObject *writer)
{
    return &((SegmentWriterObject *)writer)->index;
}

#define GETTER(name, expression)                                                                   \
    static PyObject *segment_writer_get_##name(SegmentWriterObject *self,                          \
                                               void *Py_UNUSED(closure))                           \
    {                                                                                              \
        return PyLong_FromLongLong((long long)(expression));                                       \
    }
GETTER(next_offset, self->next_offset)
GETTER(first_timestamp, self->first_timestamp)
GETTER(min_timestamp, self->min_timestamp)
GETTER(max_timestamp, self->index.max_timestamp)
GETTER(max_timestamp_offset, self->index.max_timestamp_offset)
GETTER(last_indexed_position, self->index.last_indexed_position)
GETTER(offset_bytes, self->index.offsets.size)
GETTER(time_bytes, self->index.times.size)

static PyObject *segment_writer_get_file(SegmentWriterObject *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(self->file);
}

static PyMethodDef segment_writer_methods[] = {
    {"append", (PyCFunction)(void (*)(void))segment_writer_append, METH_FASTCALL,
     PyDoc_STR("append(builder, leader_epoch, append_time, now_ms) -> first offset or -1")},
    {"append_raw", (PyCFunction)segment_writer_append_raw, METH_VARARGS,
     PyDoc_STR("append_raw(batches, now_ms) -> whether it fitted")},
    {"append_placed", (PyCFunction)segment_writer_append_placed, METH_VARARGS,
     PyDoc_STR("append_placed(batch, base_offset, leader_epoch, oldest, now_ms) -> whether it "
               "fitted")},
    {"append_plain", (PyCFunction)(void (*)(void))segment_writer_append_plain, METH_FASTCALL,
     PyDoc_STR("append_plain(batch, leader_epoch, rules, now_ms) -> first offset, or None if nothing "
               "was written")},
    {"finish", (PyCFunction)segment_writer_finish, METH_NOARGS, PyDoc_STR("final time entry")},
    {"offset_entries", (PyCFunction)segment_writer_offsets, METH_VARARGS,
     PyDoc_STR("offset_entries(from_byte=0) -> bytes")},
    {"time_entries", (PyCFunction)segment_writer_times, METH_VARARGS,
     PyDoc_STR("time_entries(from_byte=0) -> bytes")},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef segment_writer_getset[] = {
    {"next_offset", (getter)segment_writer_get_next_offset, NULL, NULL, NULL},
    {"first_timestamp", (getter)segment_writer_get_first_timestamp, NULL, NULL, NULL},
    {"min_timestamp", (getter)segment_writer_get_min_timestamp, NULL, NULL, NULL},
    {"max_timestamp", (getter)segment_writer_get_max_timestamp, NULL, NULL, NULL},
    {"max_timestamp_offset", (getter)segment_writer_get_max_timestamp_offset, NULL, NULL, NULL},
    {"last_indexed_position", (getter)segment_writer_get_last_indexed_position, NULL, NULL, NULL},
    {"offset_bytes", (getter)segment_writer_get_offset_bytes, NULL, NULL, NULL},
    {"time_bytes", (getter)segment_writer_get_time_bytes, NULL, NULL, NULL},
    {"file", (getter)segment_writer_get_file, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot segment_writer_slots[] = {
    {Py_tp_doc, (void *)PyDoc_STR("Appends to the active segment; see segment_writer.c.")},
    {Py_tp_new, segment_writer_new},
    {Py_tp_dealloc, segment_writer_dealloc},
    {Py_tp_methods, segment_writer_methods},
    {Py_tp_getset, segment_writer_getset},
    {0, NULL},
};

PyType_Spec ls_segment_writer_spec = {
    .name = "logstore._native.SegmentWriter",
    .basicsize = sizeof(SegmentWriterObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = segment_writer_slots,
};
