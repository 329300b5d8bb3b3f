/* What the binding's files share: module state, the error translator, the object layouts that
 * cross file borders.  The only folder that includes Python.h.
 *
 * Thread rule: every object is guarded by the GIL.  Where the GIL is released, the object is marked
 * busy or its File is pinned first, so that no other thread can change or free its memory.
 */
#ifndef LS_MODULE_H
#define LS_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "batch.h"
#include "index.h"
#include "io.h"
#include "lz4_frame.h"
#include "segment.h"
#include "status.h"

typedef struct {
    PyTypeObject *record_type;
    PyTypeObject *directory_type;
    PyTypeObject *file_type;
    PyTypeObject *builder_type;
    PyTypeObject *segment_writer_type;
    PyTypeObject *segment_scan_type;
    PyTypeObject *buffer_type;
    PyTypeObject *column_builder_type;
    PyTypeObject *offset_map_type;
    PyTypeObject *transactions_type;
    PyTypeObject *cleaner_type;
    PyTypeObject *delivery_type;
    PyTypeObject *route_type;
    PyTypeObject *sender_type;
    /* Exceptions of logstore.errors; strong. */
    PyObject *closed_error;
    PyObject *forked_error;
    PyObject *corrupt_error;
    PyObject *too_large_error;
    PyObject *invalid_record_error;
    PyObject *unsupported_error;
    PyObject *disk_full_error;
    PyObject *indeterminate_error;
    PyObject *empty_tuple;
    PyObject *name_hand_over;          /* "_hand_over" */
    PyObject *name_send;               /* "_send" */
    PyObject *keywords[5];             /* interned: value, key, headers, timestamp, partition */
    /* Bumped in a child process: handles of the parent are dead there. */
    unsigned fork_generation;
    ls_lz4_decode lz4_decode;          /* the lz4 package's own functions, or NULL */
    ls_lz4_encode lz4_encode;
    void *spare_deliveries[64];        /* memory of Deliveries that are gone; see sender.c */
    int spare_count;
} ls_module;

/* The GIL is kept for work on fewer bytes than this, in memory or the page cache: releasing it takes
 * longer.  hashlib has the same limit. */
enum { LS_GIL_BYTES = 2048 };

/* Gives back the memory that is kept for Deliveries. */
void ls_deliveries_free(ls_module *module);

ls_module *ls_module_of_type(PyTypeObject *type);

/* Sets the exception for a status; always returns NULL.  `path` may be NULL.  `start` and `end` are
 * the offsets that damage hides, or -1. */
PyObject *ls_raise(ls_module *module, ls_status status, PyObject *path, int64_t start, int64_t end);

/* Raises and returns false when the handle belongs to a parent process. */
bool ls_check_fork(ls_module *module, unsigned generation);

/* ---- Record (record.c) ---- */

#define LS_NO_TIMESTAMP INT64_MIN      /* a record made by the user without a time */

typedef struct {
    PyObject_HEAD
    PyObject *value;                   /* exact bytes or None; strong */
    PyObject *key;                     /* exact bytes or None; strong */
    PyObject *headers;                 /* exact tuple of (str, bytes | None); strong */
    PyObject *topic;                   /* str or NULL; strong */
    int64_t timestamp;
    int64_t offset;                    /* -1: not in a log */
    int32_t partition;                 /* -1: not in a log */
} RecordObject;

extern PyType_Spec ls_record_spec;

/* A record read from a log.  Steals nothing; `topic` may be NULL. */
PyObject *ls_record_from(ls_module *module, const ls_record *record, PyObject *topic,
                         int32_t partition);

/* Makes `self` another record of the same topic and partition.  The caller has the only reference to
 * `self`. */
bool ls_record_renew(ls_module *module, RecordObject *self, const ls_record *record);

/* A time given by the user: int, datetime with a zone, or None (LS_NO_TIMESTAMP).  False: raised. */
bool ls_timestamp_from(PyObject *object, int64_t *out);

/* Returns whether `object` is bytes-like; raises if it is not, and the message ends with `hint`.  The
 * caller handles None before. */
bool ls_is_bytes_like(PyObject *object, const char *what, const char *hint);

/* Encoded headers of one record, in memory that is reused from record to record. */
typedef struct {
    uint8_t *data;
    size_t size;
    size_t capacity;
    int32_t count;
} ls_header_buffer;

bool ls_headers_encode(ls_header_buffer *buffer, PyObject *headers);

/* ---- File (file.c) ---- */

typedef struct {
    PyObject_HEAD
    ls_module *module;
    const ls_io *io;
    PyObject *path;                    /* str, for messages; strong */
    int fd;                            /* -1 once really closed */
    int pins;                          /* users outside the GIL */
    bool closed;                       /* no new users; the last unpin closes fd */
    bool busy;                         /* `window` is in use */
    unsigned generation;
    ls_window window;                  /* for single reads; reused */
    uint32_t *verified;                /* LS_VERIFIED positions + 1 of verified batches; or NULL */
    unsigned cuts;                     /* grows with each cut: see record_read in lookup.c */
    /* Bytes below `end` are whole batches; only truncation changes them.  `end` is stored with release
     * after the bytes are written, and loaded with acquire before they are read. */
    _Atomic int64_t end;
} FileObject;

enum { LS_VERIFIED = 4096 };           /* batches whose checksum need not be computed again */

extern PyType_Spec ls_file_spec;

bool ls_file_pin(FileObject *file);    /* false: raised, the file is closed or forked */
void ls_file_unpin(FileObject *file);

/* The positions of batches with a verified checksum.  The GIL guards them; truncation clears them. */
bool ls_file_is_verified(const FileObject *file, int64_t position);
void ls_file_set_verified(FileObject *file, int64_t position);

/* ---- Builder (builder.c) ---- */

typedef struct {
    PyObject_HEAD
    ls_module *module;
    ls_builder arena;
    ls_header_buffer headers;
    PyObject *clock;                   /* callable -> ms, or NULL for the system's; strong */
    PyObject *compress;                /* callable (codec, bytes) -> bytes, or NULL; strong */
    PyObject *pack;                    /* what a producer calls these records, or NULL; strong */
    size_t arena_bytes;                /* hand over when the arena has this much */
    int64_t before_max_ms;             /* how far a timestamp may be from now */
    int64_t after_max_ms;
    unsigned generation;
    int64_t now_ms;                    /* the system's clock, see system_now() */
    uint64_t now_until;                /* cycle count up to which now_ms holds */
    uint64_t now_since;
    uint8_t codec;
    bool lent_lz4;                     /* lz4 at Kafka's default level: compressed in C */
    bool closed;
} BuilderObject;

extern PyType_Spec ls_builder_spec;

/* Whether records may be added; false: raised. */
bool ls_builder_usable(BuilderObject *self);

/* Adds one record; key and headers may be NULL.  False: raised, and not added.  Until the next call
 * into Python, the record is the last of the arena. */
bool ls_builder_append(BuilderObject *self, PyObject *value, PyObject *key, PyObject *headers,
                       int64_t timestamp);

/* ---- the rest: one spec a file ---- */

extern PyType_Spec ls_directory_spec;
extern PyType_Spec ls_segment_writer_spec;
extern PyType_Spec ls_segment_scan_spec;
extern PyType_Spec ls_buffer_spec;
extern PyType_Spec ls_column_builder_spec;
extern PyType_Spec ls_offset_map_spec;
extern PyType_Spec ls_transactions_spec;
extern PyType_Spec ls_cleaner_spec;
extern PyType_Spec ls_delivery_spec;
extern PyType_Spec ls_route_spec;
extern PyType_Spec ls_sender_spec;
extern PyMethodDef ls_directory_functions[];
extern PyMethodDef ls_recovery_functions[];
extern PyMethodDef ls_batch_functions[];
extern PyMethodDef ls_produce_frame_functions[];
extern PyMethodDef ls_fetch_frame_functions[];
extern PyMethodDef ls_index_functions[];
extern PyMethodDef ls_filesystem_functions[];
extern PyMethodDef ls_io_recorder_functions[];

int64_t ls_now_ms(void);
int64_t ls_now_ns(void);

#endif
