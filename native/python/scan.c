/* SegmentScan: the valid batches of one segment file, as records, columns or raw bytes.
 *
 * A scan has its own position and window; the file is pinned while the GIL is released.  One thread
 * at a time may use it: like a generator, it raises ValueError in a second thread.
 *
 * Before a record is returned, the scan checks the checksum of its batch, that offsets increase (and,
 * in a dense log, that none is missing), and the inner lengths of the record.  On damage it raises;
 * with skip=True it adds the damaged range to `skipped` and continues at the next valid batch.
 */
#include "module.h"

#include "read_ahead.h"
#include "codec_call.h"
#include "memory.h"
#include "uniform_run.h"
#include "scan.h"

#include <string.h>

typedef struct {
    PyObject_HEAD
    ls_module *module;
    FileObject *file;                  /* strong */
    PyObject *topic;                   /* strong or NULL */
    PyObject *decompress;              /* callable (codec, payload, limit) -> bytes; strong */
    PyObject *payload;                 /* decompressed records of the current batch; strong or NULL */
    uint8_t *content;                  /* the same, where no Python was needed; or NULL */
    size_t content_capacity;
    RecordObject *recent[2];           /* the last two handed out; strong: see hand_out() */
    PyObject *skipped;                 /* list; strong: see note_skipped() */
    PyObject *aborted;                 /* bytes: transactions not to be shown; strong or NULL */
    PyObject *moved;                   /* callable () -> bool, called at damage; or NULL */
    ls_window window;
    ls_read_ahead *ahead;              /* of a long scan to columns; or NULL */
    ls_records records;                /* the current batch; remaining == 0: none */
    ls_batch batch;
    ls_uniform_run run;                /* taken off `records` but for run_at rows not handed out */
    size_t run_at;                     /* rows handed out; == run.rows: none left */
    size_t singly;                     /* records to take one by one before looking for a run */
    int64_t run_timestamps[LS_UNIFORM_RUN_ROWS];
    int64_t position;                  /* of the next batch */
    int64_t start;                     /* offsets below are not handed out */
    int64_t stop;                      /* nor these and above */
    int64_t expected;                  /* least offset of the next batch; -1: not known yet */
    int64_t landing;                   /* last offset of the first batch by the index; or -1 */
    int64_t base_offset;               /* of the segment */
    int64_t next_offset;               /* after the last record or batch handed out */
    int64_t offset_max;                /* no valid batch of this segment is above */
    int64_t required_end;              /* a file that ends below has lost records; -1: not known */
    int64_t payload_max;               /* bound for decompression */
    int32_t partition;
    bool dense;
    bool skip;
    bool busy;
    bool has_batch;
    bool reading_ahead;                /* a thread of `ahead` runs, and has a pin of its own */
    bool alone;                        /* reading ahead has not paid: no more of it */
    int64_t began;                     /* where it began to read, or to read alone */
    bool ended;                        /* end() was called: no more records, see scan_end() */
    bool stale;                        /* the log was cut or replaced under this scan: it ends */
} SegmentScanObject;

/* SegmentScan(file, index, base_offset, start, stop, ...) */
static PyObject *scan_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"file",       "index",  "base_offset", "start", "stop",
                            "offset_max", "required_end", "dense", "skip",  "topic",
                            "partition",  "decompress",   "payload_max", "aborted", "ahead", NULL};
    PyObject *file, *index, *topic, *decompress, *aborted = NULL;
    long long base_offset, start, stop, offset_max, required_end, payload_max;
    int dense, skip, partition;
    Py_ssize_t ahead = LS_WINDOW_BYTES;
    ls_module *module = ls_module_of_type(type);
    if (module == NULL ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "O!OLLLLLppOiOL|Sn:SegmentScan", names,
                                     module->file_type, &file, &index, &base_offset, &start, &stop,
                                     &offset_max, &required_end, &dense, &skip, &topic, &partition, &decompress,
                                     &payload_max, &aborted, &ahead)) {
        return NULL;
    }
    if (offset_max == INT64_MAX) {
        PyErr_SetString(PyExc_ValueError, "offset_max + 1 must be an offset");
        return NULL;
    }
    int64_t landing, position, next_position;
    if (!ls_index_lookup(module, index, base_offset, start, &landing, &position, &next_position)) {
        return NULL;
    }
    SegmentScanObject *self = (SegmentScanObject *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->module = module;
    self->file = (FileObject *)Py_NewRef(file);
    self->landing = landing;
    self->base_offset = base_offset;
    self->topic = topic == Py_None ? NULL : Py_NewRef(topic);
    self->decompress = Py_NewRef(decompress);
    self->aborted = aborted == NULL || PyBytes_GET_SIZE(aborted) == 0 ? NULL : Py_NewRef(aborted);
    self->position = position;
    self->began = position;
    self->start = start;
    self->stop = stop;
    self->expected = landing >= 0 ? -1 : base_offset;
    self->next_offset = start;
    self->offset_max = offset_max;
    self->required_end = required_end;
    self->payload_max = payload_max;
    self->partition = partition;
    self->dense = dense != 0;
    self->skip = skip != 0;
    ls_window_init(&self->window, self->file->io, self->file->fd,
                   ahead < 4096 ? 4096 : (size_t)ahead);
    self->skipped = PyList_New(0);
    if (self->skipped == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int scan_traverse(SegmentScanObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->decompress);
    Py_VISIT(self->skipped);
    Py_VISIT(self->moved);
    return 0;
}

static int scan_clear(SegmentScanObject *self)
{
    Py_CLEAR(self->decompress);
    Py_CLEAR(self->skipped);
    Py_CLEAR(self->moved);
    return 0;
}

/* ---- reading ahead ---- */

/* Starts a thread that reads ahead, if the scan has read enough bytes and has enough bytes left.  The
 * thread has its own pin of the file.  The batch in use may be in one of its windows; that window does
 * not change until the next batch is asked for. */
static void start_ahead(SegmentScanObject *self)
{
    int64_t limit = atomic_load_explicit(&self->file->end, memory_order_acquire);
    if (self->alone || self->position - self->began < LS_READ_AHEAD_AFTER_BYTES ||
        limit - self->position < LS_READ_AHEAD_MIN_BYTES) {
        return;
    }
    if (self->ahead == NULL) {
        self->ahead = ls_read_ahead_new(self->file->io, self->file->fd);
    }
    if (self->ahead == NULL || !ls_file_pin(self->file)) {
        PyErr_Clear();
        self->alone = true;
        return;
    }
    self->reading_ahead = ls_read_ahead_start(self->ahead, self->position, limit, self->stop);
    if (!self->reading_ahead) {
        ls_file_unpin(self->file);
    }
    self->began = self->position;
}

/* Stops the thread.  The scan itself reads the batch at which the thread stopped (damage, a large
 * batch, the end), and may start the thread again after it. */
static void stop_ahead(SegmentScanObject *self)
{
    if (self->reading_ahead) {
        ls_read_ahead_stop(self->ahead);
        self->reading_ahead = false;
        ls_file_unpin(self->file);
        self->began = self->position;
    }
}

static void scan_dealloc(SegmentScanObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    scan_clear(self);
    stop_ahead(self);
    ls_memory_give(self->content);
    ls_read_ahead_free(self->ahead);
    ls_window_free(&self->window);
    Py_XDECREF(self->file);
    Py_XDECREF(self->topic);
    Py_XDECREF(self->payload);
    Py_XDECREF(self->aborted);
    Py_XDECREF(self->recent[0]);
    Py_XDECREF(self->recent[1]);
    type->tp_free(self);
    Py_DECREF(type);
}

/* Returns false, with an exception set, if another thread or a callback uses the scan. */
static bool check_idle(const SegmentScanObject *self)
{
    if (self->busy) {
        PyErr_SetString(PyExc_ValueError, "this scan is in use by another thread: give each its own");
    }
    return !self->busy;
}

/* Marks the scan and its file as in use; false: raised. */
static bool enter(SegmentScanObject *self)
{
    if (!check_idle(self) || !ls_file_pin(self->file)) {
        return false;
    }
    self->busy = true;
    return true;
}

static void leave(SegmentScanObject *self)
{
    self->busy = false;
    ls_file_unpin(self->file);
}

/* ---- damage ---- */

/* Finds the next valid batch after `position`, or -1.  Interruptible: examines a few MiB at a time.
 * Returns false if it raised. */
static bool resync(SegmentScanObject *self, int64_t position, int64_t limit, int64_t *found)
{
    int64_t least = self->expected < 0 ? 0 : self->expected;
    *found = -1;
    for (int64_t from = position;;) {
        ls_status status;
        int64_t reached = from;
        Py_BEGIN_ALLOW_THREADS         /* pinned and busy: see enter() */
        status = ls_window_resync(&self->window, from, limit, least, self->offset_max, 8 << 20,
                                  found, &reached);
        Py_END_ALLOW_THREADS
        if (status.code == LS_END || *found >= 0) {
            return true;
        }
        if (status.code != LS_OK) {
            ls_raise(self->module, status, self->file->path, -1, -1);
            return false;
        }
        if (PyErr_CheckSignals() < 0) {
            return false;
        }
        from = reached;
    }
}

/* Returns true if the bytes are damaged.  Returns false and sets `stale` if the log was truncated or
 * replaced during the scan.  Returns false with an exception if moved() raised. */
static bool is_damage(SegmentScanObject *self)
{
    if (self->moved == NULL) {
        return true;
    }
    PyObject *answer = PyObject_CallNoArgs(self->moved);
    int moved = answer == NULL ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    self->stale = moved > 0;
    return moved == 0;
}

/* Adds to `skipped` the bytes and the offsets that the scan passes over.  False: raised. */
static bool note_skipped(SegmentScanObject *self, int64_t position, int64_t next, int64_t start,
                         int64_t end, const char *reason)
{
    PyObject *entry = Py_BuildValue("(LLLLs)", (long long)position, (long long)next,
                                    (long long)start, (long long)end, reason);
    bool ok = entry != NULL && PyList_Append(self->skipped, entry) == 0;
    Py_XDECREF(entry);
    return ok;
}

/* Handles a damaged batch at self->position.  Returns true if it was skipped, false if it raised. */
static bool damaged(SegmentScanObject *self, ls_status status, int64_t limit)
{
    int64_t position = self->position, found;
    if (!is_damage(self)) {
        return false;
    }
    if (!resync(self, position, limit, &found)) {
        return false;
    }
    int64_t start = self->expected < 0 ? self->start : self->expected;
    int64_t end = self->offset_max + 1 < self->stop ? self->offset_max + 1 : self->stop;
    if (found >= 0) {
        ls_batch batch;
        ls_status again = ls_window_header(&self->window, found, limit, &batch);
        if (again.code == LS_OK) {
            end = batch.base_offset;
        }
    }
    if (end <= self->start) {
        /* All damaged offsets are below `start`: the caller did not ask for them. */
        self->position = found >= 0 ? found : limit;
        self->expected = end;
        return true;
    }
    if (!self->skip) {
        status.position = position;
        ls_raise(self->module, status, self->file->path, start, end);
        return false;
    }
    int64_t next = found >= 0 ? found : limit;
    if (!note_skipped(self, position, next, start, end, status.reason)) {
        return false;
    }
    self->position = next;
    self->expected = end;
    return true;
}

/* Checks the end of the file.  Returns true if no record is missing, or if skip is set: it then adds
 * the missing ones to `skipped`.  Returns false if it raised. */
static bool at_end(SegmentScanObject *self)
{
    int64_t end = self->required_end < self->stop ? self->required_end : self->stop;
    if (self->expected < 0 || self->expected >= end || end <= self->start) {
        return true;
    }
    if (!is_damage(self)) {
        return false;
    }
    int64_t first = self->expected;
    ls_status status = ls_fail(LS_E_CORRUPT, self->position, "the file ends before its records do");
    self->expected = end;
    if (!self->skip) {
        self->expected = first;        /* the next call raises again */
        ls_raise(self->module, status, self->file->path, first, self->required_end);
        return false;
    }
    self->next_offset = end;
    return note_skipped(self, self->position, self->position, first, end, status.reason);
}

/* ---- batches ---- */

/* Decodes Kafka's usual lz4 frame with the library's function, without the GIL.  Returns the size of
 * the content; -1 for any other frame and for damage: the codec in Python then decodes or raises. */
static int64_t unpack_lz4(SegmentScanObject *self, const uint8_t *frame, size_t size)
{
    ls_lz4_decode decode = self->module->lz4_decode;
    int64_t bound = decode == NULL ? -1 : ls_lz4_frame_bound(frame, size);
    if (bound < 0 || bound > self->payload_max) {
        return -1;
    }
    if (self->content_capacity < (size_t)bound) {
        ls_memory_give(self->content);
        self->content_capacity = 0;
        self->content = ls_memory_take((size_t)bound);
        if (self->content == NULL) {
            return -1;
        }
        self->content_capacity = (size_t)bound;
    }
    int64_t made;
    Py_BEGIN_ALLOW_THREADS             /* `busy` keeps window and content this thread's alone */
    made = ls_lz4_frame_content(frame, size, decode, self->content, self->content_capacity);
    Py_END_ALLOW_THREADS
    return made;
}

static bool unpack(SegmentScanObject *self, const uint8_t *data)
{
    size_t size = (size_t)self->batch.size - LS_BATCH_HEADER_BYTES;
    unsigned codec = ls_batch_codec(&self->batch);
    const uint8_t *payload = data + LS_BATCH_HEADER_BYTES;
    Py_CLEAR(self->payload);
    int64_t made = codec == LS_CODEC_LZ4 ? unpack_lz4(self, payload, size) : -1;
    if (made >= 0) {
        payload = self->content;
        size = (size_t)made;
    } else if (codec != LS_CODEC_NONE && self->batch.record_count > 0) {
        /* `busy` keeps the window still while Python code runs. */
        PyObject *bytes = ls_codec_call(self->decompress, codec, payload, size, self->payload_max);
        if (bytes == NULL) {
            ls_codec_raise_corrupt(self->module, NULL, self->file->path, self->position,
                                   self->batch.base_offset, self->batch.last_offset + 1);
            return false;
        }
        self->payload = bytes;
        payload = (const uint8_t *)PyBytes_AS_STRING(bytes);
        size = (size_t)PyBytes_GET_SIZE(bytes);
    }
    ls_records_open(&self->records, &self->batch, payload, size);
    self->run_at = self->run.rows = 0;
    self->has_batch = true;
    return true;
}

/* With skip, a batch that cannot be decoded is passed over whole. */
static bool pass_over(SegmentScanObject *self)
{
    if (!self->skip || !PyErr_ExceptionMatches(self->module->corrupt_error)) {
        return false;
    }
    PyErr_Clear();
    bool ok = note_skipped(self, self->position, self->position + self->batch.size,
                           self->batch.base_offset, self->batch.last_offset + 1,
                           "the records cannot be decoded");
    self->position += self->batch.size;
    self->expected = self->batch.last_offset + 1;
    return ok;
}

/* A small batch that is in the window is verified with the GIL held: see LS_GIL_BYTES. */
static ls_status load_batch(SegmentScanObject *self, int64_t limit, const uint8_t **data)
{
    ls_status status;
    if (self->reading_ahead) {
        if (ls_read_ahead_ready(self->ahead, self->position)) {
            *data = ls_read_ahead_batch(self->ahead, self->position);
        } else {
            Py_BEGIN_ALLOW_THREADS     /* pinned and busy: see enter() */
            *data = ls_read_ahead_batch(self->ahead, self->position);
            Py_END_ALLOW_THREADS
        }
        if (*data != NULL) {
            return ls_batch_parse(*data, LS_BATCH_HEADER_BYTES, &self->batch);
        }
        stop_ahead(self);
    }
    if (ls_window_holds(&self->window, self->position, LS_GIL_BYTES) && limit - self->position > 61) {
        status = ls_window_header(&self->window, self->position, limit, &self->batch);
        if (status.code != LS_OK) {
            return status;
        }
        if (self->batch.size <= LS_GIL_BYTES) {
            return ls_window_batch(&self->window, self->position, limit, &self->batch, data);
        }
    }
    Py_BEGIN_ALLOW_THREADS             /* pinned and busy: see enter() */
    status = ls_window_batch(&self->window, self->position, limit, &self->batch, data);
    Py_END_ALLOW_THREADS
    return status;
}

static ls_status check_order(const SegmentScanObject *self)
{
    const ls_batch *batch = &self->batch;
    if (batch->last_offset > self->offset_max) {
        return ls_fail(LS_E_CORRUPT, self->position, "an offset beyond the end of the segment");
    }
    if (self->expected >= 0) {
        if (batch->base_offset < self->expected) {
            return ls_fail(LS_E_CORRUPT, self->position, "offsets do not increase");
        }
        if (self->dense && batch->base_offset != self->expected) {
            return ls_fail(LS_E_CORRUPT, self->position, "offsets are missing before this batch");
        }
    } else if (batch->base_offset > self->start && self->dense) {
        return ls_fail(LS_E_CORRUPT, self->position, "offsets are missing before this batch");
    }
    if (ls_batch_codec(batch) > LS_CODEC_MAX) {
        return ls_fail(LS_E_CODEC, self->position, "unknown compression");
    }
    return ls_ok();
}

/* Whether the current batch is data of an aborted transaction.  Needs no GIL: bytes do not change.
 * An entry is (producer id, first offset, last offset), sorted; one producer's do not overlap. */
static bool is_aborted(const SegmentScanObject *self)
{
    enum { ENTRY = 24 };
    const unsigned both = LS_ATTR_TRANSACTIONAL | LS_ATTR_CONTROL;
    if (self->aborted == NULL || (self->batch.attributes & both) != LS_ATTR_TRANSACTIONAL) {
        return false;
    }
    const uint8_t *entries = (const uint8_t *)PyBytes_AS_STRING(self->aborted);
    size_t low = 0, high = (size_t)PyBytes_GET_SIZE(self->aborted) / ENTRY;
    while (low < high) {               /* the first entry after (producer id, base offset) */
        size_t middle = low + (high - low) / 2;
        int64_t id = ls_load_i64(entries + middle * ENTRY);
        bool behind = id != self->batch.producer_id
                          ? id > self->batch.producer_id
                          : ls_load_i64(entries + middle * ENTRY + 8) > self->batch.base_offset;
        if (behind) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    if (low == 0) {
        return false;
    }
    const uint8_t *entry = entries + (low - 1) * ENTRY;
    return ls_load_i64(entry) == self->batch.producer_id &&
           self->batch.base_offset <= ls_load_i64(entry + 16);
}

typedef enum { BATCH_READY, BATCH_NONE, BATCH_RAISED } batch_state;

static bool bad_record(SegmentScanObject *self)
{
    ls_status status = ls_fail(LS_E_CORRUPT, self->position, self->records.reason);
    self->has_batch = false;
    ls_raise(self->module, status, self->file->path, self->batch.base_offset,
             self->batch.last_offset + 1);
    return pass_over(self);
}

/* Readers do not see control records, but compaction reads them: damage is found by both. */
static bool control_is_readable(SegmentScanObject *self)
{
    ls_record record;
    ls_code code;
    do {
        code = ls_records_next(&self->records, &record);
    } while (code == LS_OK);
    return code == LS_END;
}

/* Moves to the next batch with an offset in [start, stop).  `raw`: stops at control batches too, and
 * does not decompress. */
static batch_state next_batch(SegmentScanObject *self, bool raw, const uint8_t **data)
{
    self->has_batch = false;
    for (;;) {
        if (self->stale) {
            return BATCH_NONE;
        }
        int64_t limit = atomic_load_explicit(&self->file->end, memory_order_acquire);
        if (self->expected >= 0 && self->expected >= self->stop) {
            return BATCH_NONE;
        }
        if (self->position >= limit) {
            if (self->landing >= 0) {  /* an index that reaches beyond the file */
                self->landing = -1;
                self->position = 0;
                self->expected = self->base_offset;
                continue;
            }
            return at_end(self) || self->stale ? BATCH_NONE : BATCH_RAISED;
        }
        ls_status status = load_batch(self, limit, data);
        if (self->landing >= 0) {
            bool landed = status.code == LS_OK && self->batch.last_offset == self->landing;
            self->landing = -1;
            if (!landed && status.code != LS_E_IO && status.code != LS_E_NO_MEMORY) {
                self->position = 0;    /* the index is damaged: scan the log from its start */
                self->expected = self->base_offset;
                continue;
            }
        }
        if (status.code == LS_OK) {
            status = check_order(self);
        }
        if (status.code == LS_E_CORRUPT) {
            if (!damaged(self, status, limit) && !self->stale) {
                return BATCH_RAISED;
            }
            continue;
        }
        if (status.code != LS_OK) {
            ls_raise(self->module, status, self->file->path, -1, -1);
            return BATCH_RAISED;
        }
        if (self->batch.base_offset >= self->stop) {
            return BATCH_NONE;
        }
        bool wanted = self->batch.last_offset >= self->start && !is_aborted(self) &&
                      (raw || self->batch.record_count > 0);
        if (wanted && !raw && !unpack(self, *data)) {
            if (!pass_over(self)) {
                return BATCH_RAISED;
            }
            continue;
        }
        if (wanted && !raw && (self->batch.attributes & LS_ATTR_CONTROL)) {
            if (!control_is_readable(self)) {
                if (!bad_record(self)) {
                    return BATCH_RAISED;
                }
                continue;
            }
            self->has_batch = wanted = false;
        }
        self->expected = self->batch.last_offset + 1;
        if (wanted) {
            return BATCH_READY;
        }
        self->position += self->batch.size;
        if (self->expected > self->next_offset) {
            self->next_offset = self->expected;
        }
    }
}

/* The current batch is used up. */
static void finish_batch(SegmentScanObject *self)
{
    self->has_batch = false;
    self->position += self->batch.size;
    int64_t next = self->batch.last_offset + 1;
    if (next > self->next_offset) {
        self->next_offset = next < self->stop ? next : self->stop;
    }
}

/* ---- as records ---- */

/* Returns a record.  A loop drops its reference to a record when it takes the next one, so the record
 * before the last often has no reference but ours; its object is then used again, as zip() does with
 * its tuples.  A record with another reference is never changed. */
static PyObject *hand_out(SegmentScanObject *self, const ls_record *record)
{
    RecordObject *oldest = self->recent[0];
    self->recent[0] = self->recent[1];
    self->recent[1] = NULL;
    if (oldest != NULL && Py_REFCNT(oldest) == 1) {
        if (!ls_record_renew(self->module, oldest, record)) {
            Py_DECREF(oldest);
            return NULL;
        }
    } else {
        Py_XDECREF(oldest);
        oldest = (RecordObject *)ls_record_from(self->module, record, self->topic,
                                                self->partition);
        if (oldest == NULL) {
            return NULL;
        }
    }
    self->recent[1] = oldest;
    return Py_NewRef(oldest);
}

/* The next record of the current batch, by runs where records are alike. */
static inline ls_code next_record(SegmentScanObject *self, ls_record *record)
{
    if (self->run_at == self->run.rows) {
        if (self->singly == 0) {
            self->run_at = 0;
            self->run.rows = 0;
            if (ls_uniform_run_take(&self->records, &self->run, self->run_timestamps,
                                    LS_UNIFORM_RUN_ROWS) < LS_UNIFORM_RUN_SHORT) {
                self->singly = LS_UNIFORM_RUN_ROWS;
            }
        } else {
            self->singly--;
        }
        if (self->run_at == self->run.rows) {
            return ls_records_step(&self->records, record);
        }
    }
    size_t row = self->run_at++;
    size_t away = row * self->run.stride;
    record->offset = self->run.offset + (int64_t)row;
    record->timestamp = self->run_timestamps[row];
    record->key = self->run.key + away;
    record->value = self->run.value + away;
    record->key_size = self->run.key_size;
    record->value_size = self->run.value_size;
    record->header_count = 0;
    record->headers_size = 0;
    record->headers = record->value;
    return LS_OK;
}

/* Returns to the walk the records of the run that the scan has not returned to its caller. */
static void return_run(SegmentScanObject *self)
{
    size_t left = self->run.rows - self->run_at;
    if (left != 0) {
        self->records.at = self->run.first + self->run_at * self->run.stride;
        self->records.remaining += (int32_t)left;
        self->records.previous_delta -= (int32_t)left;
        self->run_at = self->run.rows = 0;
    }
}

/* The next record, a new reference, or NULL.  The caller has set `busy`. */
static PyObject *next_object(SegmentScanObject *self)
{
    for (;;) {
        if (self->ended) {
            return NULL;
        }
        if (!self->has_batch) {
            const uint8_t *data;
            if (!ls_file_pin(self->file)) {
                return NULL;
            }
            if (!self->reading_ahead) {
                start_ahead(self);
            }
            batch_state state = next_batch(self, false, &data);
            ls_file_unpin(self->file);
            if (state != BATCH_READY) {
                return NULL;           /* no exception set: the end */
            }
        }
        ls_record record;
        ls_code code = next_record(self, &record);
        if (code == LS_OK) {
            if (record.offset < self->start) {
                continue;
            }
            if (record.offset >= self->stop) {
                self->next_offset = self->stop;
                self->position = INT64_MAX;   /* no wanted record is after this one */
                self->has_batch = false;
                return NULL;
            }
            self->next_offset = record.offset + 1;
            return hand_out(self, &record);
        }
        if (code == LS_END) {
            finish_batch(self);
        } else if (!bad_record(self)) {
            return NULL;
        }
    }
}

/* Sets `busy` until the record is made: allocating it may run the garbage collector, and so any
 * Python code and any thread, while `record` points into the window. */
static PyObject *scan_next(SegmentScanObject *self)
{
    if (!check_idle(self)) {
        return NULL;
    }
    self->busy = true;
    PyObject *record = next_object(self);
    self->busy = false;
    return record;
}

/* ---- as columns ---- */

static bool is_plain(const ls_batch *batch)
{
    return (batch->attributes & (LS_ATTR_CODEC | LS_ATTR_CONTROL)) == 0;
}

/* Gets the verified batch at the scan's position.  Returns false if it is not plain or not valid. */
static bool plain_batch(SegmentScanObject *self, int64_t limit, const uint8_t **data)
{
    if (self->reading_ahead) {
        *data = ls_read_ahead_batch(self->ahead, self->position);
        return *data != NULL &&
               ls_batch_parse(*data, LS_BATCH_HEADER_BYTES, &self->batch).code == LS_OK;
    }
    /* Reads the header first: the caller verifies a batch that is not plain, and verifies it once. */
    return ls_window_header(&self->window, self->position, limit, &self->batch).code == LS_OK &&
           is_plain(&self->batch) &&
           ls_window_batch(&self->window, self->position, limit, &self->batch, data).code == LS_OK;
}

/* Fills the columns from plain batches.  Needs no GIL and uses no Python object: the file is pinned,
 * and the scan is busy, so no other thread uses it.  LS_OK: full, or stopped.  LS_E_INVALID: the next
 * step (the end, compression, a control batch, damage) needs the GIL. */
static ls_code fill_plain(SegmentScanObject *self, ls_columns *columns, bool *stopped)
{
    *stopped = false;
    for (;;) {
        if (!self->has_batch) {
            int64_t limit = atomic_load_explicit(&self->file->end, memory_order_acquire);
            const uint8_t *data;
            if (self->landing >= 0 || self->position >= limit ||
                !plain_batch(self, limit, &data) || check_order(self).code != LS_OK ||
                self->batch.base_offset >= self->stop || self->batch.last_offset < self->start ||
                !is_plain(&self->batch) || is_aborted(self)) {
                return LS_E_INVALID;
            }
            ls_records_open(&self->records, &self->batch, data + LS_BATCH_HEADER_BYTES,
                            (size_t)self->batch.size - LS_BATCH_HEADER_BYTES);
            self->has_batch = true;
            self->expected = self->batch.last_offset + 1;
        }
        ls_code code = ls_columns_fill(columns, &self->records, self->start, self->stop, stopped);
        if (code != LS_END) {
            return code;
        }
        finish_batch(self);
    }
}

/* fill(columns) -> bool: True when the chunk is full, False when the segment has no more. */
static PyObject *scan_fill(SegmentScanObject *self, PyObject *arg)
{
    if (!PyObject_TypeCheck(arg, self->module->column_builder_type)) {
        PyErr_SetString(PyExc_TypeError, "fill() takes a ColumnBuilder");
        return NULL;
    }
    ls_columns *columns = ls_column_builder_of(arg);
    if (columns == NULL || !enter(self)) {
        if (!self->busy) {
            stop_ahead(self);          /* the file is closed: release the thread's pin */
        }
        return NULL;
    }
    PyObject *result = NULL;
    return_run(self);
    ls_column_builder_busy(arg, true);
    for (;;) {
        bool stopped;
        ls_code code;
        if (!self->reading_ahead) {
            start_ahead(self);
        }
        Py_BEGIN_ALLOW_THREADS         /* pinned and busy, as is the builder */
        code = fill_plain(self, columns, &stopped);
        Py_END_ALLOW_THREADS
        if (code == LS_E_INVALID) {
            const uint8_t *data;
            batch_state state = next_batch(self, false, &data);
            if (state == BATCH_READY) {
                continue;
            }
            result = state == BATCH_NONE ? Py_NewRef(Py_False) : NULL;
            break;
        }
        if (code == LS_OK && stopped) {
            self->next_offset = self->stop;
            self->position = INT64_MAX;
            self->has_batch = false;
            result = Py_NewRef(Py_False);
            break;
        }
        if (code == LS_OK) {
            int64_t taken = self->records.base_offset + self->records.previous_delta + 1;
            self->next_offset = taken > self->next_offset ? taken : self->next_offset;
            result = Py_NewRef(Py_True);
            break;
        }
        if (code == LS_E_NO_MEMORY) {
            PyErr_NoMemory();
            break;
        }
        if (!bad_record(self)) {
            break;
        }
    }
    ls_column_builder_busy(arg, false);
    leave(self);
    return result;
}

/* ---- as raw batches ---- */

/* next_raw() -> bytes or None: the bytes of the next batch in the file, also of a control batch. */
static PyObject *scan_next_raw(SegmentScanObject *self, PyObject *Py_UNUSED(unused))
{
    const uint8_t *data;
    if (!enter(self)) {
        return NULL;
    }
    PyObject *result = NULL;
    batch_state state = next_batch(self, true, &data);
    if (state == BATCH_READY) {
        result = PyBytes_FromStringAndSize((const char *)data, (Py_ssize_t)self->batch.size);
        if (result != NULL) {
            finish_batch(self);
        }
    } else if (state == BATCH_NONE) {
        result = Py_NewRef(Py_None);
    }
    leave(self);
    return result;
}

/* next_producer() -> bytes or None: the header of the next batch with a producer id.  Of a control
 * batch all bytes: its record is the marker, commit or abort. */
static PyObject *scan_next_producer(SegmentScanObject *self, PyObject *Py_UNUSED(unused))
{
    const uint8_t *data;
    if (!enter(self)) {
        return NULL;
    }
    PyObject *result = NULL;
    batch_state state = BATCH_READY;
    while (result == NULL && (state = next_batch(self, true, &data)) == BATCH_READY) {
        if (ls_batch_has_producer(&self->batch)) {
            bool whole = (self->batch.attributes & LS_ATTR_CONTROL) != 0;
            result = PyBytes_FromStringAndSize(
                (const char *)data, whole ? (Py_ssize_t)self->batch.size : LS_BATCH_HEADER_BYTES);
            if (result == NULL) {
                break;
            }
        }
        finish_batch(self);
    }
    if (state == BATCH_NONE) {
        result = Py_NewRef(Py_None);
    }
    leave(self);
    return result;
}

/* Returns the offset of the first record at or after `timestamp`, or None.  The caller has called
 * enter().  The records of a batch are not walked if its greatest timestamp is less. */
static PyObject *find_time(SegmentScanObject *self, int64_t timestamp)
{
    for (;;) {
        const uint8_t *data;
        batch_state state = next_batch(self, false, &data);
        if (state == BATCH_RAISED) {
            return NULL;
        }
        if (state == BATCH_NONE) {
            Py_RETURN_NONE;
        }
        if (self->batch.max_timestamp >= timestamp) {
            ls_record record;
            ls_code code;
            while ((code = ls_records_next(&self->records, &record)) == LS_OK) {
                if (record.timestamp >= timestamp && record.offset >= self->start &&
                    record.offset < self->stop) {
                    return PyLong_FromLongLong(record.offset);
                }
            }
            if (code != LS_END) {
                if (!bad_record(self)) {
                    return NULL;
                }
                continue;
            }
        }
        finish_batch(self);
    }
}

/* find_time(timestamp) -> offset or None, from the position of the scan on. */
static PyObject *scan_find_time(SegmentScanObject *self, PyObject *arg)
{
    long long timestamp = PyLong_AsLongLong(arg);
    if ((timestamp == -1 && PyErr_Occurred()) || !enter(self)) {
        return NULL;
    }
    PyObject *offset = find_time(self, timestamp);
    leave(self);
    return offset;
}

/* ---- the type ---- */

static PyObject *scan_get_next_offset(SegmentScanObject *self, void *Py_UNUSED(closure))
{
    return PyLong_FromLongLong(self->next_offset);
}

static PyObject *scan_get_position(SegmentScanObject *self, void *Py_UNUSED(closure))
{
    return PyLong_FromLongLong(self->position);
}

static PyObject *scan_get_skipped(SegmentScanObject *self, void *Py_UNUSED(closure))
{
    return PyList_AsTuple(self->skipped);
}

static PyObject *scan_get_path(SegmentScanObject *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(self->file->path);
}

static PyObject *scan_get_stale(SegmentScanObject *self, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(self->stale);
}

static int scan_set_moved(SegmentScanObject *self, PyObject *moved, void *Py_UNUSED(closure))
{
    if (moved == NULL || !PyCallable_Check(moved)) {
        PyErr_SetString(PyExc_TypeError, "moved must be callable");
        return -1;
    }
    Py_XSETREF(self->moved, Py_NewRef(moved));
    return 0;
}

/* end(): iterating ends before the next record, and next_offset stays where it is.  May be called by
   another thread: the flag is read and written with the GIL held. */
static PyObject *scan_end(SegmentScanObject *self, PyObject *unused)
{
    (void)unused;
    self->ended = true;
    Py_RETURN_NONE;
}

static PyMethodDef scan_methods[] = {
    {"end", (PyCFunction)scan_end, METH_NOARGS, PyDoc_STR("end(): no more records")},
    {"fill", (PyCFunction)scan_fill, METH_O, PyDoc_STR("fill(columns) -> bool: whether full")},
    {"next_raw", (PyCFunction)scan_next_raw, METH_NOARGS,
     PyDoc_STR("next_raw() -> bytes or None: the next whole batch")},
    {"next_producer", (PyCFunction)scan_next_producer, METH_NOARGS,
     PyDoc_STR("next_producer() -> bytes or None: the next header with a producer id")},
    {"find_time", (PyCFunction)scan_find_time, METH_O,
     PyDoc_STR("find_time(timestamp) -> offset or None")},
    {"get", (PyCFunction)(void (*)(void))ls_scan_get, METH_FASTCALL | METH_CLASS,
     PyDoc_STR("get(file, index, base_offset, offset, ...) -> Record or None")},
    {"span", (PyCFunction)(void (*)(void))ls_scan_span, METH_FASTCALL | METH_CLASS,
     PyDoc_STR("span(file, index, base_offset, offset, stop, max_bytes, whole_first) -> (position, "
               "size, next offset) or None")},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef scan_getset[] = {
    {"next_offset", (getter)scan_get_next_offset, NULL, NULL, NULL},
    {"position", (getter)scan_get_position, NULL, NULL, NULL},
    {"skipped", (getter)scan_get_skipped, NULL, NULL, NULL},
    {"path", (getter)scan_get_path, NULL, NULL, NULL},
    {"stale", (getter)scan_get_stale, NULL, NULL, NULL},
    {"moved", NULL, (setter)scan_set_moved, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot scan_slots[] = {
    {Py_tp_doc, (void *)PyDoc_STR("Reads one segment file; see scan.c.")},
    {Py_tp_new, scan_new},
    {Py_tp_dealloc, scan_dealloc},
    {Py_tp_traverse, scan_traverse},
    {Py_tp_clear, scan_clear},
    {Py_tp_iter, PyObject_SelfIter},
    {Py_tp_iternext, scan_next},
    {Py_tp_methods, scan_methods},
    {Py_tp_getset, scan_getset},
    {0, NULL},
};

PyType_Spec ls_segment_scan_spec = {
    .name = "logstore._native.SegmentScan",
    .basicsize = sizeof(SegmentScanObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = scan_slots,
};
