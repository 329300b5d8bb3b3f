/* Where an offset lies in a segment, and the one record there.
 *
 * A single read uses the window that its File keeps, so that most of them are one system call and no
 * allocation; a second thread that comes meanwhile brings a window of its own.  The checksum of a
 * batch is computed once: the File remembers which ones were sound, and of those only a part is read.
 */
#include "module.h"

#include "codec_call.h"
#include "scan.h"

bool ls_index_lookup(ls_module *module, PyObject *index, int64_t base_offset, int64_t offset,
                     int64_t *landing, int64_t *position, int64_t *next_position)
{
    const uint8_t *entries = NULL;
    size_t size = 0;
    if (Py_TYPE(index) == module->segment_writer_type) {
        const ls_index_tracker *tracker = ls_segment_writer_index(index);
        entries = tracker->offsets.data;
        size = tracker->offsets.size;
    } else if (PyBytes_Check(index)) {
        entries = (const uint8_t *)PyBytes_AS_STRING(index);
        size = (size_t)PyBytes_GET_SIZE(index);
    } else if (index != Py_None) {
        PyErr_SetString(PyExc_TypeError, "index must be bytes, a SegmentWriter or None");
        return false;
    }
    int64_t relative = offset - base_offset;
    int32_t target = relative < 0 ? -1 : relative > INT32_MAX ? INT32_MAX : (int32_t)relative;
    int64_t entry = ls_offset_index_search(entries, size / LS_OFFSET_ENTRY_BYTES, target);
    *landing = -1;
    *position = 0;
    *next_position = -1;
    if ((size_t)(entry + 1) < size / LS_OFFSET_ENTRY_BYTES) {
        *next_position = ls_load_i32(entries + (entry + 1) * LS_OFFSET_ENTRY_BYTES + 4);
    }
    if (entry >= 0) {
        const uint8_t *at = entries + entry * LS_OFFSET_ENTRY_BYTES;
        int32_t where = ls_load_i32(at + 4);
        /* Only what can be a promise is one: the landing is checked against it. */
        if (where > 0 && ls_load_i32(at) >= 0) {
            *landing = base_offset + ls_load_i32(at);
            *position = where;
        }
    }
    return true;
}

/* The batch at `found`, verified; or as much of it as is `known` to be needed of a sound one. */
static ls_status load(ls_window *window, int64_t found, int64_t known, int64_t limit,
                      ls_batch *batch, const uint8_t **data)
{
    return known >= 0 ? ls_window_part(window, found, known, limit, data)
                      : ls_window_batch(window, found, limit, batch, data);
}

/* How much of a sound batch to read for one of its records: as far as it should be if all are of
 * the same size, and some more.  When that was not enough the caller takes the longer way. */
static int64_t part_of(const ls_batch *batch, int64_t offset)
{
    int64_t records = batch->last_offset - batch->base_offset + 1;
    int64_t before = offset - batch->base_offset + 1;
    int64_t part = (int64_t)((double)batch->size * ((double)before / (double)records)) + 4096;
    return part < batch->size ? part : batch->size;
}

PyObject *ls_scan_get(PyObject *type_object, PyObject *const *args, Py_ssize_t count)
{
    PyTypeObject *type = (PyTypeObject *)type_object;
    ls_module *module = ls_module_of_type(type);
    if (module == NULL) {
        return NULL;
    }
    if (count != 8 || Py_TYPE(args[0]) != module->file_type) {
        PyErr_SetString(PyExc_TypeError, "get(file, index, base_offset, offset, topic, partition, "
                                         "decompress, payload_max)");
        return NULL;
    }
    FileObject *file = (FileObject *)args[0];
    int64_t expected = PyLong_AsLongLong(args[2]);
    int64_t offset = PyLong_AsLongLong(args[3]);
    int32_t partition = (int32_t)PyLong_AsLong(args[5]);
    long long payload_max = PyLong_AsLongLong(args[7]);
    int64_t landing, position, next_position;
    if (PyErr_Occurred() ||
        !ls_index_lookup(module, args[1], expected, offset, &landing, &position, &next_position) ||
        !ls_file_pin(file)) {
        return NULL;
    }
    bool own = file->busy;             /* another thread has the file's window: bring our own */
    ls_window fresh;
    ls_window *window = &file->window;
    if (own) {
        ls_window_init(&fresh, file->io, file->fd, 8192);
        window = &fresh;
    } else {
        file->busy = true;
    }
    /* Small batches: all up to the next entry's at once.  Large ones: headers, until it is found. */
    int64_t ahead = next_position - position + LS_BATCH_HEADER_BYTES;
    window->ahead = ahead >= 2048 && ahead < 8192 ? (size_t)ahead : 8192;
    int64_t limit = atomic_load_explicit(&file->end, memory_order_acquire);
    int64_t found = -1;
    ls_batch batch = {0};
    const uint8_t *data = NULL;
    ls_status status;
    int64_t known = -1;                /* bytes to read of a batch that was sound before */
    Py_BEGIN_ALLOW_THREADS             /* pinned; the window is ours by `busy` or by itself */
    status = ls_window_find(window, position, limit, offset, landing, expected, &found);
    if (status.code == LS_OK) {
        status = ls_window_header(window, found, limit, &batch);
    }
    Py_END_ALLOW_THREADS
    if (status.code == LS_OK && ls_batch_codec(&batch) == LS_CODEC_NONE &&
        offset >= batch.base_offset && ls_file_is_verified(file, found)) {
        known = part_of(&batch, offset);
    }
    int64_t need = known >= 0 ? known : batch.size;
    if (status.code == LS_OK && need <= LS_GIL_BYTES && ls_window_holds(window, found, (size_t)need)) {
        status = load(window, found, known, limit, &batch, &data);
    } else if (status.code == LS_OK) {
        Py_BEGIN_ALLOW_THREADS         /* as above */
        status = load(window, found, known, limit, &batch, &data);
        Py_END_ALLOW_THREADS
    }
    PyObject *result = NULL;
    PyObject *bytes = NULL;
    if (status.code == LS_END) {
        result = Py_NewRef(Py_None);
        goto done;
    }
    if (status.code != LS_OK) {
        ls_raise(module, status, file->path, offset, offset + 1);
        goto done;
    }
    if (batch.base_offset > offset || (batch.attributes & LS_ATTR_CONTROL) ||
        batch.record_count == 0) {
        result = Py_NewRef(Py_None);
        goto done;
    }
    const uint8_t *payload = data + LS_BATCH_HEADER_BYTES;
    size_t size = (size_t)(known >= 0 ? known : batch.size) - LS_BATCH_HEADER_BYTES;
    if (known < 0) {
        ls_file_set_verified(file, found);
    }
    unsigned codec = ls_batch_codec(&batch);
    if (codec > LS_CODEC_MAX) {
        ls_raise(module, ls_fail(LS_E_CODEC, found, ""), file->path, -1, -1);
        goto done;
    }
    if (codec != LS_CODEC_NONE) {
        bytes = ls_codec_call(args[6], codec, payload, size, payload_max);
        if (bytes == NULL) {
            goto done;
        }
        payload = (const uint8_t *)PyBytes_AS_STRING(bytes);
        size = (size_t)PyBytes_GET_SIZE(bytes);
    }
    ls_records records;
    ls_record record;
    ls_code code;
    ls_records_open(&records, &batch, payload, size);
    do {
        code = LS_OK;
        if (!ls_records_quick(&records, &record)) {
            code = ls_records_next(&records, &record);
        }
    } while (code == LS_OK && record.offset < offset);
    if (code == LS_OK && record.offset == offset) {
        result = ls_record_from(module, &record, args[4] == Py_None ? NULL : args[4], partition);
    } else if (code == LS_E_CORRUPT) {
        ls_raise(module, ls_fail(LS_E_CORRUPT, found, records.reason), file->path,
                 batch.base_offset, batch.last_offset + 1);
    } else {
        result = Py_NewRef(Py_None);
    }
done:
    Py_XDECREF(bytes);
    if (own) {
        ls_window_free(&fresh);
    } else {
        if (window->capacity > LS_WINDOW_BYTES) {
            ls_window_free(window);    /* a large batch must not pin its memory */
        }
        file->busy = false;
    }
    ls_file_unpin(file);
    return result;
}
