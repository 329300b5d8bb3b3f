/* Lookup of an offset in a segment, and the read of one record.
 *
 * A read of one record uses the window of its File, so that most reads are one system call and no
 * allocation; while a thread uses that window, a second thread allocates its own.  The checksum of a
 * batch is computed once: the File keeps the positions of verified batches, and of those only a part
 * is read.
 */
#include "module.h"

#include "codec_call.h"
#include "scan.h"

/* The offset entries of an index: bytes, a SegmentWriter or None.  Borrowed; valid while the GIL is
 * held.  False: raised. */
static bool index_entries(ls_module *module, PyObject *index, const uint8_t **entries, size_t *size)
{
    *entries = NULL;
    *size = 0;
    if (Py_TYPE(index) == module->segment_writer_type) {
        const ls_index_tracker *tracker = ls_segment_writer_index(index);
        *entries = tracker->offsets.data;
        *size = tracker->offsets.size;
    } else if (PyBytes_Check(index)) {
        *entries = (const uint8_t *)PyBytes_AS_STRING(index);
        *size = (size_t)PyBytes_GET_SIZE(index);
    } else if (index != Py_None) {
        PyErr_SetString(PyExc_TypeError, "index must be bytes, a SegmentWriter or None");
        return false;
    }
    return true;
}

bool ls_index_lookup(ls_module *module, PyObject *index, int64_t base_offset, int64_t offset,
                     int64_t *landing, int64_t *position, int64_t *next_position)
{
    const uint8_t *entries;
    size_t size;
    if (!index_entries(module, index, &entries, &size)) {
        return false;
    }
    if (base_offset < 0 || offset < 0) {
        PyErr_Format(PyExc_ValueError, "no offset %lld in a segment from %lld",
                     (long long)offset, (long long)base_offset);
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
        /* An entry with a negative field is damaged and is ignored.  A reader compares the last
         * offset of the batch at `*position` with `*landing`. */
        if (where > 0 && ls_load_i32(at) >= 0) {
            *landing = base_offset + ls_load_i32(at);
            *position = where;
        }
    }
    return true;
}

/* Returns how many bytes of a verified batch to read for one of its records: as many as are needed if
 * all records have the same size, and 4 KiB more.  If that is too little, get() raises, and its
 * caller reads the whole batch with a SegmentScan. */
static int64_t part_of(const ls_batch *batch, int64_t offset)
{
    int64_t records = batch->last_offset - batch->base_offset + 1;
    int64_t before = offset - batch->base_offset + 1;
    int64_t part = (int64_t)((double)batch->size * ((double)before / (double)records)) + 4096;
    return part < batch->size ? part : batch->size;
}

/* One read of one record.  `file` is pinned, and `window` belongs to this thread.
 *
 * Another thread may cut the file while the GIL is released, and append other batches below `limit`.
 * The window may then hold old bytes and new ones.  A checksum finds that; a part of a batch, which
 * is read without one, is used only if there was no cut since read_open().
 */
typedef struct {
    ls_module *module;
    FileObject *file;
    ls_window *window;
    ls_window fresh;                   /* `window` while another thread uses the file's */
    int64_t base_offset;               /* of the segment */
    int64_t offset;                    /* of the record */
    int64_t limit;                     /* whole batches end here */
    unsigned cuts;                     /* of the file, when the limit was loaded */
    int64_t position;                  /* of the batch */
    int64_t known;                     /* bytes to read of a batch that was verified before; or -1 */
    ls_batch batch;
    const uint8_t *data;               /* of the batch, in the window */
} record_read;

static void read_open(record_read *read)
{
    if (read->file->busy) {
        ls_window_init(&read->fresh, read->file->io, read->file->fd, 8192);
        read->window = &read->fresh;
    } else {
        read->file->busy = true;
        read->window = &read->file->window;
    }
    read->limit = atomic_load_explicit(&read->file->end, memory_order_acquire);
    read->cuts = read->file->cuts;
}

static bool was_cut(const record_read *read)
{
    return read->file->cuts != read->cuts;
}

static void read_close(record_read *read)
{
    if (read->window == &read->fresh) {
        ls_window_free(&read->fresh);
    } else {
        if (read->window->capacity > LS_WINDOW_BYTES) {
            ls_window_free(read->window);   /* a large batch must not pin its memory */
        } else if (was_cut(read)) {
            read->window->filled = 0;
        }
        read->file->busy = false;
    }
    ls_file_unpin(read->file);
}

/* Reads the header of the batch that holds the offset, by an index entry (see ls_index_lookup).
 * LS_END: no batch reaches it. */
static ls_status find_batch(record_read *read, int64_t landing, int64_t position,
                            int64_t next_position)
{
    /* If batches are small, one read gets all up to the next index entry.  If they are large, several
     * reads get one header each. */
    int64_t ahead = next_position - position + LS_BATCH_HEADER_BYTES;
    read->window->ahead = ahead >= 2048 && ahead < 8192 ? (size_t)ahead : 8192;
    ls_status status;
    Py_BEGIN_ALLOW_THREADS             /* pinned; the window is this thread's: see record_read */
    status = ls_window_find(read->window, position, read->limit, read->offset, landing,
                            read->base_offset, &read->position);
    if (status.code == LS_OK) {
        status = ls_window_header(read->window, read->position, read->limit, &read->batch);
    }
    Py_END_ALLOW_THREADS
    return status;
}

/* Needs no GIL. */
static ls_status load_bytes(record_read *read)
{
    return read->known >= 0
               ? ls_window_part(read->window, read->position, read->known, read->limit, &read->data)
               : ls_window_batch(read->window, read->position, read->limit, &read->batch,
                                 &read->data);
}

/* Reads the batch and verifies its checksum.  Of a batch that was verified before, reads a part. */
static ls_status load_batch(record_read *read)
{
    read->known = -1;
    if (ls_batch_codec(&read->batch) == LS_CODEC_NONE && read->offset >= read->batch.base_offset &&
        !was_cut(read) && ls_file_is_verified(read->file, read->position)) {
        read->known = part_of(&read->batch, read->offset);
    }
    int64_t need = read->known >= 0 ? read->known : read->batch.size;
    if (need <= LS_GIL_BYTES && ls_window_holds(read->window, read->position, (size_t)need)) {
        return load_bytes(read);
    }
    ls_status status;
    Py_BEGIN_ALLOW_THREADS             /* pinned; the window is this thread's: see record_read */
    status = load_bytes(read);
    Py_END_ALLOW_THREADS
    if (status.code == LS_OK && read->known >= 0 && was_cut(read)) {
        return ls_fail(LS_E_CORRUPT, read->position, "the file was cut during the read");
    }
    return status;
}

/* Return the record among the records of a batch, None if it is not there, or NULL: raised. */
static PyObject *walk_to_record(const record_read *read, const uint8_t *payload, size_t size,
                                PyObject *topic, int32_t partition)
{
    ls_records records;
    ls_record record;
    ls_code code;
    ls_records_open(&records, &read->batch, payload, size);
    do {
        code = ls_records_step(&records, &record);
    } while (code == LS_OK && record.offset < read->offset);
    if (code == LS_OK && record.offset == read->offset) {
        return ls_record_from(read->module, &record, topic, partition);
    }
    if (code == LS_E_CORRUPT) {
        return ls_raise(read->module, ls_fail(LS_E_CORRUPT, read->position, records.reason),
                        read->file->path, read->batch.base_offset, read->batch.last_offset + 1);
    }
    Py_RETURN_NONE;
}

/* Return the record of a loaded batch, None if the batch does not have it, or NULL: raised. */
static PyObject *decode_record(record_read *read, PyObject *topic, int32_t partition,
                               PyObject *decompress, int64_t payload_max)
{
    const ls_batch *batch = &read->batch;
    if (batch->base_offset > read->offset || (batch->attributes & LS_ATTR_CONTROL) ||
        batch->record_count == 0) {
        Py_RETURN_NONE;
    }
    if (read->known < 0 && !was_cut(read)) {
        ls_file_set_verified(read->file, read->position);
    }
    const uint8_t *payload = read->data + LS_BATCH_HEADER_BYTES;
    size_t size = (size_t)(read->known >= 0 ? read->known : batch->size) - LS_BATCH_HEADER_BYTES;
    unsigned codec = ls_batch_codec(batch);
    if (codec == LS_CODEC_NONE) {
        return walk_to_record(read, payload, size, topic, partition);
    }
    if (codec > LS_CODEC_MAX) {
        return ls_raise(read->module, ls_fail(LS_E_CODEC, read->position, ""), read->file->path, -1,
                        -1);
    }
    PyObject *bytes = ls_codec_call(decompress, codec, payload, size, payload_max);
    if (bytes == NULL) {
        return NULL;
    }
    PyObject *result = walk_to_record(read, (const uint8_t *)PyBytes_AS_STRING(bytes),
                                      (size_t)PyBytes_GET_SIZE(bytes), topic, partition);
    Py_DECREF(bytes);
    return result;
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
    record_read read = {
        .module = module,
        .file = (FileObject *)args[0],
        .base_offset = PyLong_AsLongLong(args[2]),
        .offset = PyLong_AsLongLong(args[3]),
    };
    PyObject *topic = args[4] == Py_None ? NULL : args[4];
    int32_t partition = (int32_t)PyLong_AsLong(args[5]);
    int64_t payload_max = PyLong_AsLongLong(args[7]);
    int64_t landing, position, next_position;
    if (PyErr_Occurred() ||
        !ls_index_lookup(module, args[1], read.base_offset, read.offset, &landing, &position,
                         &next_position) ||
        !ls_file_pin(read.file)) {
        return NULL;
    }
    read_open(&read);
    ls_status status = find_batch(&read, landing, position, next_position);
    if (status.code == LS_OK) {
        status = load_batch(&read);
    }
    PyObject *result;
    if (status.code == LS_OK) {
        result = decode_record(&read, topic, partition, args[6], payload_max);
    } else if (status.code == LS_END) {
        result = Py_NewRef(Py_None);
    } else {
        result = ls_raise(module, status, read.file->path, read.offset, read.offset + 1);
    }
    read_close(&read);
    return result;
}

/* The whole batches from one that holds an offset on: positions in the file, no bytes. */
typedef struct {
    int64_t stop;                      /* every batch ends below this offset */
    int64_t end;                       /* no batch ends beyond this position */
    int64_t reached;                   /* where the last batch ends; the start if there is none */
    int64_t next_offset;               /* the offset after it */
} batch_span;

/* The last index entry from which the end of the span can be reached.  False: there is none after
 * the first batch.  Requires the GIL. */
static bool entry_near_end(const record_read *read, const batch_span *span, const uint8_t *entries,
                           size_t count, int64_t *landing, int64_t *position)
{
    int64_t below = span->stop - 1 - read->base_offset;
    int32_t relative = below > INT32_MAX ? INT32_MAX : below < 0 ? -1 : (int32_t)below;
    int64_t entry = ls_offset_index_search(entries, count, relative);
    int64_t by_position = ls_position_search(entries, count, span->end - LS_BATCH_HEADER_BYTES);
    entry = by_position < entry ? by_position : entry;
    if (entry < 0) {
        return false;
    }
    *landing = read->base_offset + ls_load_i32(entries + entry * LS_OFFSET_ENTRY_BYTES);
    *position = ls_load_i32(entries + entry * LS_OFFSET_ENTRY_BYTES + 4);
    return *position > read->position + read->batch.size && *landing > read->batch.last_offset;
}

/* Ends the span: from an index entry near its end if the entry is right, else from its start.
 * Needs no GIL. */
static ls_status span_batches(record_read *read, batch_span *span, int64_t landing,
                              int64_t position)
{
    ls_batch batch;
    if (landing >= 0 &&
        ls_window_header(read->window, position, read->limit, &batch).code == LS_OK &&
        batch.last_offset == landing && batch.base_offset > read->batch.last_offset) {
        span->reached = position;
        span->next_offset = batch.base_offset;
        return ls_window_span(read->window, position, read->limit, span->end, span->stop,
                              &span->reached, &span->next_offset);
    }
    return ls_window_span(read->window, read->position, read->limit, span->end, span->stop,
                          &span->reached, &span->next_offset);
}

/* Finds the first batch: by the index, and if that is wrong from the start of the segment. */
static ls_status find_first(record_read *read, PyObject *index, bool *raised)
{
    int64_t landing, position, next_position;
    *raised = !ls_index_lookup(read->module, index, read->base_offset, read->offset, &landing,
                               &position, &next_position);
    if (*raised) {
        return ls_ok();
    }
    ls_status status = find_batch(read, landing, position, next_position);
    if (status.code == LS_E_CORRUPT && position > 0) {
        status = find_batch(read, -1, 0, -1);
    }
    return status;
}

PyObject *ls_scan_span(PyObject *type_object, PyObject *const *args, Py_ssize_t count)
{
    ls_module *module = ls_module_of_type((PyTypeObject *)type_object);
    if (module == NULL) {
        return NULL;
    }
    if (count != 7 || Py_TYPE(args[0]) != module->file_type) {
        PyErr_SetString(PyExc_TypeError,
                        "span(file, index, base_offset, offset, stop, max_bytes, whole_first)");
        return NULL;
    }
    record_read read = {
        .module = module,
        .file = (FileObject *)args[0],
        .base_offset = PyLong_AsLongLong(args[2]),
        .offset = PyLong_AsLongLong(args[3]),
    };
    batch_span span = {.stop = PyLong_AsLongLong(args[4])};
    int64_t max_bytes = PyLong_AsLongLong(args[5]);
    int whole_first = PyObject_IsTrue(args[6]);
    span.stop = span.stop < 0 ? 0 : span.stop;
    if (PyErr_Occurred() || !ls_file_pin(read.file)) {
        return NULL;
    }
    read_open(&read);
    PyObject *result = NULL;
    bool raised;
    ls_status status = find_first(&read, args[1], &raised);
    if (raised) {
        goto done;
    }
    if (status.code == LS_END) {
        result = Py_NewRef(Py_None);
        goto done;
    }
    if (status.code != LS_OK) {
        ls_raise(module, status, read.file->path, read.offset, read.offset + 1);
        goto done;
    }
    int64_t size = max_bytes < 0 ? 0 : max_bytes;
    size = whole_first && size < read.batch.size ? read.batch.size : size;
    span.end = size < read.limit - read.position ? read.position + size : read.limit;
    span.reached = read.position;
    span.next_offset = read.offset;
    const uint8_t *entries;
    size_t entries_size;
    int64_t landing = -1, position = -1;
    if (!index_entries(module, args[1], &entries, &entries_size)) {
        goto done;
    }
    if (!entry_near_end(&read, &span, entries, entries_size / LS_OFFSET_ENTRY_BYTES, &landing,
                        &position)) {
        landing = -1;
    }
    Py_BEGIN_ALLOW_THREADS             /* pinned; the window is this thread's: see record_read */
    status = span_batches(&read, &span, landing, position);
    Py_END_ALLOW_THREADS
    if (status.code != LS_OK) {
        ls_raise(module, status, read.file->path, read.offset, read.offset + 1);
        goto done;
    }
    result = Py_BuildValue("(LLL)", (long long)read.position,
                           (long long)(span.reached - read.position), (long long)span.next_offset);
done:
    read_close(&read);
    return result;
}
