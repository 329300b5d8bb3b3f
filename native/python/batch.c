/* Functions over one record batch in memory. */
#include "module.h"

#include <stdlib.h>
#include <string.h>

#include "batch_check.h"
#include "batch_keep.h"
#include "codec_call.h"

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
    ls_record_walk walk;
    ls_records records;
    ls_records_open(&records, &batch, payload.buf, (size_t)payload.len);
    Py_BEGIN_ALLOW_THREADS             /* both buffers are held */
    ls_records_walk(&records, &walk);
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

/* check_batch(batch, content_max=0)
 *   -> (least timestamp, greatest timestamp, records without a key, oldest) or None
 *
 * Checks one batch in place: header, checksum, and what check_records checks.  `oldest` is the least
 * timestamp if those of -1 (none) count.  A batch that is compressed with lz4, as Kafka does it, is
 * unpacked if its records take at most `content_max` bytes.  None: it is another batch, or it is wrong;
 * the caller finds the reason. */
static PyObject *native_check_batch(PyObject *self, PyObject *args)
{
    ls_lz4_decode decode = ((ls_module *)PyModule_GetState(self))->lz4_decode;
    Py_buffer raw;
    long long content_max = 0;
    if (!PyArg_ParseTuple(args, "y*|L:check_batch", &raw, &content_max)) {
        return NULL;
    }
    ls_record_walk walk = {0};
    ls_batch batch;
    bool right;
    if (raw.len <= LS_GIL_BYTES) {
        right = ls_batch_check(raw.buf, (size_t)raw.len, &batch, &walk);
    } else {
        Py_BEGIN_ALLOW_THREADS         /* the buffer is held */
        right = ls_batch_check(raw.buf, (size_t)raw.len, &batch, &walk);
        Py_END_ALLOW_THREADS
    }
    if (!right && decode != NULL && content_max > 0) {
        Py_BEGIN_ALLOW_THREADS         /* the buffer is held */
        right = ls_batch_check_lz4(raw.buf, (size_t)raw.len, decode, content_max, &batch, &walk);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&raw);
    if (!right) {
        Py_RETURN_NONE;
    }
    return Py_BuildValue("(LLLL)", (long long)walk.least, (long long)walk.greatest,
                         (long long)walk.keyless, (long long)walk.oldest);
}

/* What a walk over the batches of a leader's log finds. */
typedef struct {
    int64_t first_offset;
    int64_t next_offset;
    bool dense;                        /* no offset is missing between two batches */
    size_t reached;                    /* the size of the batches that are right */
} copied_walk;

/* Checks that whole batches follow one another: checksums, offsets, leader epochs.  Needs no GIL. */
static void walk_copied(const uint8_t *data, size_t size, copied_walk *walk)
{
    *walk = (copied_walk){.dense = true};
    while (size - walk->reached >= LS_BATCH_HEADER_BYTES) {
        ls_batch batch;
        size_t left = size - walk->reached;
        const uint8_t *here = data + walk->reached;
        bool first = walk->reached == 0;
        if (ls_batch_parse(here, left, &batch).code != LS_OK || batch.size > (int64_t)left ||
            batch.leader_epoch < 0 || (!first && batch.base_offset < walk->next_offset) ||
            !ls_batch_verify(here, &batch)) {
            return;
        }
        if (first) {
            walk->first_offset = batch.base_offset;
        } else if (batch.base_offset != walk->next_offset) {
            walk->dense = false;
        }
        walk->next_offset = batch.last_offset + 1;
        walk->reached += (size_t)batch.size;
    }
}

/* Adds (leader epoch, base offset) of each batch whose epoch is not that of the batch before, and
 * (position, producer id or -1) of each batch with a producer; -1: of a transaction, or a control
 * batch.  The batches were walked before.  False: raised. */
static bool list_copied(const uint8_t *data, size_t size, PyObject *epochs, PyObject *producers)
{
    int32_t epoch = -1;
    for (size_t at = 0; at < size;) {
        ls_batch batch;
        (void)ls_batch_parse(data + at, size - at, &batch);  /* it was parsed before */
        PyObject *pair = NULL;
        if (batch.leader_epoch != epoch) {
            epoch = batch.leader_epoch;
            pair = Py_BuildValue("(iL)", (int)epoch, (long long)batch.base_offset);
            if (pair == NULL || PyList_Append(epochs, pair) < 0) {
                Py_XDECREF(pair);
                return false;
            }
            Py_DECREF(pair);
        }
        if (ls_batch_has_producer(&batch)) {
            bool plain = (batch.attributes & (LS_ATTR_CONTROL | LS_ATTR_TRANSACTIONAL)) == 0;
            pair = Py_BuildValue("(nL)", (Py_ssize_t)at, plain ? (long long)batch.producer_id : -1);
            if (pair == NULL || PyList_Append(producers, pair) < 0) {
                Py_XDECREF(pair);
                return false;
            }
            Py_DECREF(pair);
        }
        at += (size_t)batch.size;
    }
    return true;
}

/* check_copied(batches) -> (first offset, next offset, dense, epochs, producers) or None
 *
 * Checks the whole batches that a follower copies from a leader's log.  `dense`: no offset is missing
 * between two of them.  list_copied has the two lists.  None: there is no batch, or one is wrong; the
 * caller finds the reason. */
static PyObject *native_check_copied(PyObject *Py_UNUSED(self), PyObject *arg)
{
    Py_buffer raw;
    if (PyObject_GetBuffer(arg, &raw, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    copied_walk walk;
    Py_BEGIN_ALLOW_THREADS             /* the buffer is held */
    walk_copied(raw.buf, (size_t)raw.len, &walk);
    Py_END_ALLOW_THREADS
    PyObject *result = NULL, *epochs = NULL, *producers = NULL;
    if (raw.len == 0 || walk.reached != (size_t)raw.len) {
        result = Py_NewRef(Py_None);
        goto done;
    }
    epochs = PyList_New(0);
    producers = PyList_New(0);
    if (epochs != NULL && producers != NULL &&
        list_copied(raw.buf, (size_t)raw.len, epochs, producers)) {
        result = Py_BuildValue("(LLOOO)", (long long)walk.first_offset, (long long)walk.next_offset,
                               walk.dense ? Py_True : Py_False, epochs, producers);
    }
done:
    Py_XDECREF(epochs);
    Py_XDECREF(producers);
    PyBuffer_Release(&raw);
    return result;
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
    {"check_batch", native_check_batch, METH_VARARGS,
     PyDoc_STR("check_batch(batch, content_max=0) -> (least time, greatest time, records without key, "
               "oldest time) of one batch that is right, uncompressed or lz4; else None")},
    {"check_copied", native_check_copied, METH_O,
     PyDoc_STR("check_copied(batches) -> (first offset, next offset, dense, [(leader epoch, offset)], "
               "[(position, producer id)]) of a leader's batches that are right; else None")},
    {"batch_below", native_batch_below, METH_VARARGS,
     PyDoc_STR("batch_below(batch, end_offset, decompress, compress, payload_max) -> bytes: the "
               "batch without its records at and above end_offset")},
    {NULL, NULL, 0, NULL},
};
