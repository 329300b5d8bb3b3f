/* logstore._native: module state, the status translator, and the list of what the module holds. */
#include "memory.h"
#include "module.h"

#include <string.h>

#include <errno.h>
#include <time.h>

#include "crc32c.h"
#include "murmur2.h"

static struct PyModuleDef native_module;

ls_module *ls_module_of_type(PyTypeObject *type)
{
    PyObject *module = PyType_GetModuleByDef(type, &native_module);
    return module == NULL ? NULL : PyModule_GetState(module);
}

int64_t ls_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

int64_t ls_now_ms(void)
{
    return ls_now_ns() / 1000000;
}

static PyObject *raise_os(ls_module *module, ls_status status, PyObject *path)
{
    bool full = status.os_errno == ENOSPC || status.os_errno == EDQUOT;
    errno = status.os_errno;
    return PyErr_SetFromErrnoWithFilenameObject(full ? module->disk_full_error : PyExc_OSError,
                                                path);
}

static PyObject *raise_corrupt(ls_module *module, ls_status status, PyObject *path, int64_t start,
                               int64_t end)
{
    PyObject *args = Py_BuildValue("(s)", status.reason);
    PyObject *keywords = Py_BuildValue("{s:O,s:L,s:L,s:L}", "path", path == NULL ? Py_None : path,
                                       "position", (long long)status.position, "start_offset",
                                       (long long)start, "end_offset", (long long)end);
    if (args != NULL && keywords != NULL) {
        PyObject *error = PyObject_Call(module->corrupt_error, args, keywords);
        if (error != NULL) {
            PyErr_SetObject(module->corrupt_error, error);
            Py_DECREF(error);
        }
    }
    Py_XDECREF(args);
    Py_XDECREF(keywords);
    return NULL;
}

PyObject *ls_raise(ls_module *module, ls_status status, PyObject *path, int64_t start, int64_t end)
{
    switch (status.code) {
    case LS_E_IO:
    case LS_E_UNDONE:
        return raise_os(module, status, path);
    case LS_E_CORRUPT:
        return raise_corrupt(module, status, path, start, end);
    case LS_E_LEGACY:
        return PyErr_Format(module->unsupported_error,
                            "%S at byte %lld: message format 0 or 1, written by Kafka 0.10 or "
                            "older; let a Kafka 3.x broker compact or mirror the topic to format 2",
                            path == NULL ? Py_None : path, (long long)status.position);
    case LS_E_CODEC:
        return PyErr_Format(module->unsupported_error,
                            "%S at byte %lld: unknown compression; a newer Kafka wrote this",
                            path == NULL ? Py_None : path, (long long)status.position);
    case LS_E_NO_MEMORY:
        return PyErr_NoMemory();
    case LS_E_TOO_LARGE:
        PyErr_SetString(module->invalid_record_error, status.reason);
        return NULL;
    case LS_OK:
    case LS_END:
    case LS_E_INVALID:
        break;
    }
    PyErr_Format(PyExc_SystemError, "unexpected status %d: %s", (int)status.code, status.reason);
    return NULL;
}

bool ls_check_fork(ls_module *module, unsigned generation)
{
    if (generation == module->fork_generation) {
        return true;
    }
    PyErr_SetString(module->forked_error,
                    "this handle was opened before a fork: open the log again in this process "
                    "(one process may write, any number may use readonly=True)");
    return false;
}

static PyObject *after_fork_in_child(PyObject *self, PyObject *Py_UNUSED(unused))
{
    ls_module *module = PyModule_GetState(self);
    module->fork_generation++;
    Py_RETURN_NONE;
}

static PyObject *fork_generation(PyObject *self, PyObject *Py_UNUSED(unused))
{
    ls_module *module = PyModule_GetState(self);
    return PyLong_FromUnsignedLong(module->fork_generation);
}

/* lend_lz4(decode, encode): addresses of LZ4_decompress_safe and LZ4_compress_default in a library
 * that stays loaded; 0 takes one back. */
static PyObject *lend_lz4(PyObject *self, PyObject *args)
{
    PyObject *numbers[2];
    if (!PyArg_ParseTuple(args, "OO:lend_lz4", &numbers[0], &numbers[1])) {
        return NULL;
    }
    void *decode = PyLong_AsVoidPtr(numbers[0]);
    void *encode = PyLong_AsVoidPtr(numbers[1]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    ls_module *module = PyModule_GetState(self);
    memcpy(&module->lz4_decode, &decode, sizeof decode);
    memcpy(&module->lz4_encode, &encode, sizeof encode);
    Py_RETURN_NONE;
}

/* lz4_frame(data) -> bytes: Kafka's frame around it by the lent function; None when there is none. */
static PyObject *lz4_frame(PyObject *self, PyObject *arg)
{
    ls_module *module = PyModule_GetState(self);
    ls_lz4_encode encode = module->lz4_encode;
    Py_buffer data;
    if (encode == NULL) {
        Py_RETURN_NONE;
    }
    if (PyObject_GetBuffer(arg, &data, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    PyObject *result = NULL;
    uint8_t *frame = ls_memory_take(ls_lz4_frame_room((size_t)data.len));
    if (frame == NULL) {
        PyErr_NoMemory();
    } else {
        size_t made;
        Py_BEGIN_ALLOW_THREADS         /* the exported buffer pins the bytes */
        made = ls_lz4_frame_make(data.buf, (size_t)data.len, encode, frame);
        Py_END_ALLOW_THREADS
        result = PyBytes_FromStringAndSize((const char *)frame, (Py_ssize_t)made);
        ls_memory_give(frame);
    }
    PyBuffer_Release(&data);
    return result;
}

static PyObject *crc32c(PyObject *Py_UNUSED(self), PyObject *args)
{
    Py_buffer data;
    unsigned int crc = 0;
    if (!PyArg_ParseTuple(args, "y*|I:crc32c", &data, &crc)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS             /* the exported buffer pins the bytes */
    crc = ls_crc32c(crc, data.buf, (size_t)data.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(crc);
}

static PyObject *murmur2(PyObject *Py_UNUSED(self), PyObject *key)
{
    Py_buffer data;                    /* the GIL is kept: keys are short */
    if (PyObject_GetBuffer(key, &data, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    uint32_t hash = ls_murmur2(data.buf, (size_t)data.len);
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(hash);
}

/* Kafka's choice of a partition for each key of a column in Arrow's layout. */
static PyObject *partitions_of_keys(PyObject *Py_UNUSED(self), PyObject *args)
{
    Py_buffer ends, data, valid;
    int partitions;
    if (!PyArg_ParseTuple(args, "y*y*z*i:partitions_of_keys", &ends, &data, &valid, &partitions)) {
        return NULL;
    }
    PyObject *result = NULL;
    Py_ssize_t rows = ends.len / 4 - 1;
    bool has_nulls = valid.buf != NULL;
    if (rows < 0 || partitions < 1 || (has_nulls && valid.len < (rows + 7) / 8)) {
        PyErr_SetString(PyExc_ValueError, "no partition, or columns of impossible lengths");
        goto done;
    }
    result = PyBytes_FromStringAndSize(NULL, rows * 4);
    if (result == NULL) {
        goto done;
    }
    uint8_t *out = (uint8_t *)PyBytes_AS_STRING(result);
    for (Py_ssize_t row = 0; row < rows; row++) {
        int32_t span[2], chosen = -1;
        memcpy(span, (const uint8_t *)ends.buf + row * 4, sizeof span);
        if (!has_nulls || (((const uint8_t *)valid.buf)[row / 8] >> (row % 8) & 1) != 0) {
            if (span[0] < 0 || span[1] < span[0] || span[1] > data.len) {
                Py_CLEAR(result);
                PyErr_Format(PyExc_ValueError, "row %zd is outside its column's data", row);
                goto done;
            }
            uint32_t hash = ls_murmur2((const uint8_t *)data.buf + span[0],
                                       (size_t)(span[1] - span[0]));
            chosen = (int32_t)((hash & 0x7fffffff) % (uint32_t)partitions);
        }
        memcpy(out + row * 4, &chosen, sizeof chosen);
    }
done:
    PyBuffer_Release(&ends);
    PyBuffer_Release(&data);
    if (valid.buf != NULL) {
        PyBuffer_Release(&valid);
    }
    return result;
}

static PyMethodDef module_functions[] = {
    {"partitions_of_keys", partitions_of_keys, METH_VARARGS,
     PyDoc_STR("partitions_of_keys(ends, data, valid, partitions): int32 each, -1 for a null key.")},
    {"murmur2", murmur2, METH_O, PyDoc_STR("murmur2(key): Kafka's hash of a key, 32 bits.")},
    {"crc32c", crc32c, METH_VARARGS, PyDoc_STR("crc32c(data, crc=0): CRC-32C, continued from crc.")},
    {"after_fork_in_child", after_fork_in_child, METH_NOARGS,
     PyDoc_STR("Declares all handles of the parent process dead.")},
    {"lz4_frame", lz4_frame, METH_O,
     PyDoc_STR("lz4_frame(data): Kafka's lz4 frame by the lent function, or None without one.")},
    {"lend_lz4", lend_lz4, METH_VARARGS,
     PyDoc_STR("lend_lz4(decode, encode): lz4's own functions, to be called without Python.")},
    {"fork_generation", fork_generation, METH_NOARGS,
     PyDoc_STR("A number that differs between a process and its forked children.")},
    {NULL, NULL, 0, NULL},
};

static int add_type(PyObject *self, PyType_Spec *spec, PyTypeObject **slot)
{
    *slot = (PyTypeObject *)PyType_FromModuleAndSpec(self, spec, NULL);
    return *slot == NULL ? -1 : PyModule_AddType(self, *slot);
}

static int import_errors(ls_module *module)
{
    PyObject *errors = PyImport_ImportModule("logstore.errors");
    if (errors == NULL) {
        return -1;
    }
    struct {
        const char *name;
        PyObject **slot;
    } wanted[] = {
        {"ClosedError", &module->closed_error},
        {"ForkedHandleError", &module->forked_error},
        {"CorruptLogError", &module->corrupt_error},
        {"RecordTooLargeError", &module->too_large_error},
        {"InvalidRecordError", &module->invalid_record_error},
        {"UnsupportedFormatError", &module->unsupported_error},
        {"DiskFullError", &module->disk_full_error},
        {"IndeterminateAppendError", &module->indeterminate_error},
    };
    int result = 0;
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0] && result == 0; i++) {
        *wanted[i].slot = PyObject_GetAttrString(errors, wanted[i].name);
        result = *wanted[i].slot == NULL ? -1 : 0;
    }
    Py_DECREF(errors);
    return result;
}

static int module_exec(PyObject *self)
{
    ls_module *module = PyModule_GetState(self);
    if (import_errors(module) < 0) {
        return -1;
    }
    module->empty_tuple = PyTuple_New(0);
    module->name_hand_over = PyUnicode_InternFromString("_hand_over");
    module->keywords[0] = PyUnicode_InternFromString("value");
    module->keywords[1] = PyUnicode_InternFromString("key");
    module->keywords[2] = PyUnicode_InternFromString("headers");
    module->keywords[3] = PyUnicode_InternFromString("timestamp");
    module->keywords[4] = PyUnicode_InternFromString("partition");
    module->name_send = PyUnicode_InternFromString("_send");
    if (module->empty_tuple == NULL || module->name_hand_over == NULL ||
        module->keywords[0] == NULL || module->keywords[1] == NULL ||
        module->keywords[2] == NULL || module->keywords[3] == NULL ||
        module->keywords[4] == NULL || module->name_send == NULL) {
        return -1;
    }
    if (add_type(self, &ls_record_spec, &module->record_type) < 0 ||
        add_type(self, &ls_directory_spec, &module->directory_type) < 0 ||
        add_type(self, &ls_file_spec, &module->file_type) < 0 ||
        add_type(self, &ls_builder_spec, &module->builder_type) < 0 ||
        add_type(self, &ls_segment_writer_spec, &module->segment_writer_type) < 0 ||
        add_type(self, &ls_segment_scan_spec, &module->segment_scan_type) < 0 ||
        add_type(self, &ls_buffer_spec, &module->buffer_type) < 0 ||
        add_type(self, &ls_column_builder_spec, &module->column_builder_type) < 0 ||
        add_type(self, &ls_offset_map_spec, &module->offset_map_type) < 0 ||
        add_type(self, &ls_transactions_spec, &module->transactions_type) < 0 ||
        add_type(self, &ls_cleaner_spec, &module->cleaner_type) < 0 ||
        add_type(self, &ls_delivery_spec, &module->delivery_type) < 0 ||
        add_type(self, &ls_route_spec, &module->route_type) < 0 ||
        add_type(self, &ls_sender_spec, &module->sender_type) < 0) {
        return -1;
    }
    if (PyModule_AddFunctions(self, ls_directory_functions) < 0 ||
        PyModule_AddFunctions(self, ls_recovery_functions) < 0 ||
        PyModule_AddFunctions(self, ls_batch_functions) < 0 ||
        PyModule_AddFunctions(self, ls_produce_frame_functions) < 0 ||
        PyModule_AddFunctions(self, ls_fetch_frame_functions) < 0 ||
        PyModule_AddFunctions(self, ls_index_functions) < 0 ||
        PyModule_AddFunctions(self, ls_filesystem_functions) < 0 ||
        PyModule_AddFunctions(self, ls_io_recorder_functions) < 0) {
        return -1;
    }
    return PyModule_AddStringConstant(self, "CRC32C_IMPLEMENTATION", ls_crc32c_implementation());
}

static int module_traverse(PyObject *self, visitproc visit, void *arg)
{
    ls_module *module = PyModule_GetState(self);
    Py_VISIT(module->record_type);
    Py_VISIT(module->directory_type);
    Py_VISIT(module->file_type);
    Py_VISIT(module->builder_type);
    Py_VISIT(module->segment_writer_type);
    Py_VISIT(module->segment_scan_type);
    Py_VISIT(module->buffer_type);
    Py_VISIT(module->column_builder_type);
    Py_VISIT(module->offset_map_type);
    Py_VISIT(module->transactions_type);
    Py_VISIT(module->cleaner_type);
    Py_VISIT(module->delivery_type);
    Py_VISIT(module->route_type);
    Py_VISIT(module->sender_type);
    Py_VISIT(module->closed_error);
    Py_VISIT(module->forked_error);
    Py_VISIT(module->corrupt_error);
    Py_VISIT(module->too_large_error);
    Py_VISIT(module->invalid_record_error);
    Py_VISIT(module->unsupported_error);
    Py_VISIT(module->disk_full_error);
    Py_VISIT(module->indeterminate_error);
    return 0;
}

static int module_clear(PyObject *self)
{
    ls_module *module = PyModule_GetState(self);
    Py_CLEAR(module->record_type);
    Py_CLEAR(module->directory_type);
    Py_CLEAR(module->file_type);
    Py_CLEAR(module->builder_type);
    Py_CLEAR(module->segment_writer_type);
    Py_CLEAR(module->segment_scan_type);
    Py_CLEAR(module->buffer_type);
    Py_CLEAR(module->column_builder_type);
    Py_CLEAR(module->offset_map_type);
    Py_CLEAR(module->transactions_type);
    Py_CLEAR(module->cleaner_type);
    Py_CLEAR(module->delivery_type);
    Py_CLEAR(module->route_type);
    Py_CLEAR(module->sender_type);
    Py_CLEAR(module->closed_error);
    Py_CLEAR(module->forked_error);
    Py_CLEAR(module->corrupt_error);
    Py_CLEAR(module->too_large_error);
    Py_CLEAR(module->invalid_record_error);
    Py_CLEAR(module->unsupported_error);
    Py_CLEAR(module->disk_full_error);
    Py_CLEAR(module->indeterminate_error);
    Py_CLEAR(module->empty_tuple);
    Py_CLEAR(module->name_hand_over);
    Py_CLEAR(module->name_send);
    for (size_t i = 0; i < 5; i++) {
        Py_CLEAR(module->keywords[i]);
    }
    return 0;
}

static void module_free(void *self)
{
    module_clear(self);
    ls_deliveries_free(PyModule_GetState(self));
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    /* No Py_mod_gil: without the GIL, SegmentScan must not reuse a Record because Py_REFCNT is 1 (see
     * hand_out() in scan.c), and busy flags and pin counts need atomics. */
    {0, NULL},
};

static struct PyModuleDef native_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "logstore._native",
    .m_doc = PyDoc_STR("The engine of logstore in C.  Private: use the logstore package."),
    .m_size = sizeof(ls_module),
    .m_methods = module_functions,
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModuleDef_Init(&native_module);
}
