/* Functions over one record batch in memory. */
#include "module.h"

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
    int64_t least = INT64_MAX, greatest = -1, keyless = 0, expected = batch.base_offset;
    bool ordered = true, timed = true;
    ls_records records;
    ls_code code;
    ls_records_open(&records, &batch, payload.buf, (size_t)payload.len);
    records.log_append_time = false;   /* the records' own times */
    Py_BEGIN_ALLOW_THREADS             /* both buffers are held */
    ls_record record;
    while ((code = ls_records_next(&records, &record)) == LS_OK) {
        ordered = ordered && record.offset == expected++;
        timed = timed && record.timestamp >= -1;
        keyless += record.key_size < 0;
        if (record.timestamp != -1) {
            least = record.timestamp < least ? record.timestamp : least;
            greatest = record.timestamp > greatest ? record.timestamp : greatest;
        }
    }
    Py_END_ALLOW_THREADS
    if (code != LS_END) {
        PyErr_SetString(module->invalid_record_error, records.reason);
    } else if (!ordered) {
        PyErr_SetString(module->invalid_record_error,
                        "the records' offsets do not run from 0 without a gap");
    } else if (!timed) {
        PyErr_SetString(module->invalid_record_error, "a record has a time before 1970");
    } else {
        result = Py_BuildValue("(LLL)", (long long)(greatest < 0 ? -1 : least),
                               (long long)greatest, (long long)keyless);
    }
done:
    PyBuffer_Release(&raw);
    PyBuffer_Release(&payload);
    return result;
}

PyMethodDef ls_batch_functions[] = {
    {"check_records", native_check_records, METH_VARARGS,
     PyDoc_STR("check_records(batch, payload) -> (least time, greatest time, records without key)")},
    {NULL, NULL, 0, NULL},
};
