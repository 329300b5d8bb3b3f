/* Functions over one record batch in memory. */
#include "module.h"

#include <stdlib.h>
#include <string.h>

#include "batch_keep.h"
#include "codec_call.h"

/* What a walk over the records of a batch from outside finds. */
typedef struct {
    ls_code code;                      /* LS_END: every length fits */
    bool ordered;                      /* offsets run from the base offset without a gap */
    bool timed;                        /* no timestamp is below -1 */
    int64_t least;                     /* timestamps of -1 (none) do not count; -1 without any */
    int64_t greatest;
    int64_t oldest;                    /* the least timestamp; -1 does count */
    int64_t keyless;
} record_walk;

/* Needs no GIL. */
static void walk_records(ls_records *records, record_walk *walk)
{
    *walk = (record_walk){
        .ordered = true, .timed = true, .least = INT64_MAX, .greatest = -1, .oldest = INT64_MAX,
    };
    int64_t expected = records->base_offset;
    records->log_append_time = false;  /* the records' own times */
    ls_record record;
    while ((walk->code = ls_records_step(records, &record)) == LS_OK) {
        walk->ordered = walk->ordered && record.offset == expected++;
        walk->timed = walk->timed && record.timestamp >= -1;
        walk->keyless += record.key_size < 0;
        walk->oldest = record.timestamp < walk->oldest ? record.timestamp : walk->oldest;
        if (record.timestamp != -1) {
            walk->least = record.timestamp < walk->least ? record.timestamp : walk->least;
            walk->greatest = record.timestamp > walk->greatest ? record.timestamp : walk->greatest;
        }
    }
    if (walk->greatest < 0) {
        walk->least = -1;
    }
}

/* check_records(batch, payload) -> (least timestamp, greatest timestamp, records without a key)
 *
 * Walks the records of a batch that came from outside: `batch` is its bytes, `payload` what follows
 * the header, decompressed.  Every length must fit, and offsets must run from 0 without a gap to the
 * last one that the header names.  Timestamps of -1 (none) do not count; without any both are -1. */
static PyObject *native_check_records(PyObject *self, PyObject *args)
{
    ls_module *module = PyModule_GetState(self);
    Py_buffer raw, payload;
    if (!PyArg_ParseTuple(args, "y*y*:check_records", &raw, &payload)) {
        return NULL;
    }
    PyObject *result = NULL;
    ls_batch batch;
    ls_status status = ls_fail(LS_E_CORRUPT, -1, "the batch is shorter than a header");
    if (raw.len >= LS_BATCH_HEADER_BYTES) {
        status = ls_batch_parse(raw.buf, (size_t)raw.len, &batch);
    }
    if (status.code != LS_OK) {
        PyErr_SetString(module->invalid_record_error, status.reason);
        goto done;
    }
    if ((int64_t)batch.record_count != batch.last_offset - batch.base_offset + 1) {
        PyErr_Format(module->invalid_record_error, "%d records for %lld offsets",
                     (int)batch.record_count,
                     (long long)(batch.last_offset - batch.base_offset + 1));
        goto done;
    }
    record_walk walk;
    ls_records records;
    ls_records_open(&records, &batch, payload.buf, (size_t)payload.len);
    Py_BEGIN_ALLOW_THREADS             /* both buffers are held */
    walk_records(&records, &walk);
    Py_END_ALLOW_THREADS
    if (walk.code != LS_END) {
        PyErr_SetString(module->invalid_record_error, records.reason);
    } else if (!walk.ordered) {
        PyErr_SetString(module->invalid_record_error,
                        "the records' offsets do not run from 0 without a gap");
    } else if (!walk.timed) {
        PyErr_SetString(module->invalid_record_error, "a record has a time before 1970");
    } else {
        result = Py_BuildValue("(LLL)", (long long)walk.least, (long long)walk.greatest,
                               (long long)walk.keyless);
    }
done:
    PyBuffer_Release(&raw);
    PyBuffer_Release(&payload);
    return result;
}

/* Whether `data` is one uncompressed batch with a right checksum and right records.  Needs no GIL. */
static bool check_whole(const uint8_t *data, size_t size, record_walk *walk)
{
    ls_batch batch;
    if (size < LS_BATCH_HEADER_BYTES || ls_batch_parse(data, size, &batch).code != LS_OK ||
        batch.size != (int64_t)size || ls_batch_codec(&batch) != LS_CODEC_NONE ||
        (int64_t)batch.record_count != batch.last_offset - batch.base_offset + 1 ||
        !ls_batch_verify(data, &batch)) {
        return false;
    }
    ls_records records;
    ls_records_open(&records, &batch, data + LS_BATCH_HEADER_BYTES, size - LS_BATCH_HEADER_BYTES);
    walk_records(&records, walk);
    return walk->code == LS_END && walk->ordered && walk->timed;
}

/* check_batch(batch) -> (least timestamp, greatest timestamp, records without a key, oldest) or None
 *
 * Checks one uncompressed batch in place: header, checksum, and what check_records checks.  `oldest`
 * is the least timestamp if those of -1 (none) count.  None: it is not such a batch, or it is wrong;
 * the caller finds the reason. */
static PyObject *native_check_batch(PyObject *Py_UNUSED(self), PyObject *arg)
{
    Py_buffer raw;
    if (PyObject_GetBuffer(arg, &raw, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    record_walk walk = {0};
    bool right;
    if (raw.len <= LS_GIL_BYTES) {
        right = check_whole(raw.buf, (size_t)raw.len, &walk);
    } else {
        Py_BEGIN_ALLOW_THREADS         /* the buffer is held */
        right = check_whole(raw.buf, (size_t)raw.len, &walk);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&raw);
    if (!right) {
        Py_RETURN_NONE;
    }
    return Py_BuildValue("(LLLL)", (long long)walk.least, (long long)walk.greatest,
                         (long long)walk.keyless, (long long)walk.oldest);
}

static void cannot_cut(ls_module *module, ls_status status)
{
    if (status.code == LS_E_CORRUPT) { /* of bytes in memory: there is no place to name */
        PyErr_Format(PyExc_ValueError, "the batch cannot be cut: %s", status.reason);
    } else {
        ls_raise(module, status, NULL, -1, -1);
    }
}

/* Parses a batch that is to be cut below `end_offset`.  False: raised. */
static bool parse_to_cut(ls_module *module, const Py_buffer *raw, int64_t end_offset,
                         ls_batch *batch)
{
    ls_status status = ls_fail(LS_E_CORRUPT, 0, "an incomplete batch header");
    if (raw->len >= LS_BATCH_HEADER_BYTES) {
        status = ls_batch_parse(raw->buf, (size_t)raw->len, batch);
    }
    if (status.code == LS_OK && (batch->size != raw->len || end_offset <= batch->base_offset)) {
        status = ls_fail(LS_E_CORRUPT, 0, "not a batch that holds this offset");
    }
    if (status.code == LS_OK && ls_batch_codec(batch) > LS_CODEC_MAX) {
        status = ls_fail(LS_E_CODEC, 0, "unknown compression");
    }
    if (status.code != LS_OK) {
        cannot_cut(module, status);
    }
    return status.code == LS_OK;
}

/* Adds to `out` the batch of the records below `end_offset`, not packed and not sealed; nothing if
 * there are none.  `payload` holds the records, unpacked.  False: raised. */
static bool keep_below(ls_module *module, ls_bytes *out, const uint8_t *header,
                       const ls_batch *batch, const uint8_t *payload, size_t size,
                       int64_t end_offset)
{
    if (!ls_batch_count_fits(batch, size)) {
        cannot_cut(module, ls_fail(LS_E_CORRUPT, 0, ls_too_many_records));
        return false;
    }
    uint8_t *keep = calloc((size_t)batch->record_count + 1, 1);
    if (keep == NULL) {
        PyErr_NoMemory();
        return false;
    }
    ls_records records;
    ls_record record;
    ls_code code;
    int32_t kept = 0;
    ls_records_open(&records, batch, payload, size);
    for (int32_t i = 0; (code = ls_records_next(&records, &record)) == LS_OK; i++) {
        keep[i] = record.offset < end_offset;
        kept += keep[i];
    }
    const char *reason = records.reason;
    if (code == LS_END) {
        code = LS_OK;
        reason = "it would be too large";
        if (kept > 0) {
            int64_t horizon = batch->attributes & LS_ATTR_DELETE_HORIZON ? batch->base_timestamp
                                                                         : LS_NO_HORIZON;
            code = ls_batch_keep(out, header, batch, payload, size, keep, end_offset - 1, horizon);
        }
    }
    free(keep);
    if (code != LS_OK) {
        cannot_cut(module, ls_fail(code, 0, reason));
    }
    return code == LS_OK;
}

/* Packs the records of the batch in `out`.  False: raised. */
static bool pack_records(ls_bytes *out, PyObject *compress, unsigned codec)
{
    PyObject *packed = ls_codec_call(compress, codec, out->data + LS_BATCH_HEADER_BYTES,
                                     out->size - LS_BATCH_HEADER_BYTES, -1);
    if (packed == NULL) {
        return false;
    }
    size_t whole = LS_BATCH_HEADER_BYTES + (size_t)PyBytes_GET_SIZE(packed);
    uint8_t *larger = whole > out->capacity ? realloc(out->data, whole) : out->data;
    if (larger != NULL) {
        out->data = larger;
        out->capacity = whole > out->capacity ? whole : out->capacity;
        memcpy(out->data + LS_BATCH_HEADER_BYTES, PyBytes_AS_STRING(packed),
               whole - LS_BATCH_HEADER_BYTES);
        out->size = whole;
    } else {
        PyErr_NoMemory();
    }
    Py_DECREF(packed);
    return larger != NULL;
}

/* batch_below(batch, end_offset, decompress, compress, payload_max) -> bytes
 *
 * The batch without its records at and above `end_offset`, which is where it ends then; empty when
 * no record is left.  The caller has verified the batch. */
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
    ls_bytes out = {0};
    if (!parse_to_cut(module, &raw, end_offset, &batch)) {
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
        unpacked = ls_codec_call(decompress, codec, payload, size, payload_max);
        if (unpacked == NULL) {
            goto done;
        }
        payload = (const uint8_t *)PyBytes_AS_STRING(unpacked);
        size = (size_t)PyBytes_GET_SIZE(unpacked);
    }
    if (!keep_below(module, &out, data, &batch, payload, size, end_offset) ||
        (out.size > 0 && codec != LS_CODEC_NONE && !pack_records(&out, compress, codec))) {
        goto done;
    }
    ls_code code = out.size > 0 ? ls_batch_seal(&out, 0) : LS_OK;
    if (code != LS_OK) {
        cannot_cut(module, ls_fail(code, 0, "it would be too large"));
        goto done;
    }
    result = PyBytes_FromStringAndSize((const char *)out.data, (Py_ssize_t)out.size);
done:
    Py_XDECREF(unpacked);
    ls_bytes_free(&out);
    PyBuffer_Release(&raw);
    return result;
}

PyMethodDef ls_batch_functions[] = {
    {"check_records", native_check_records, METH_VARARGS,
     PyDoc_STR("check_records(batch, payload) -> (least time, greatest time, records without key)")},
    {"check_batch", native_check_batch, METH_O,
     PyDoc_STR("check_batch(batch) -> (least time, greatest time, records without key, oldest time) "
               "of one uncompressed batch that is right; else None")},
    {"batch_below", native_batch_below, METH_VARARGS,
     PyDoc_STR("batch_below(batch, end_offset, decompress, compress, payload_max) -> bytes: the "
               "batch without its records at and above end_offset")},
    {NULL, NULL, 0, NULL},
};
