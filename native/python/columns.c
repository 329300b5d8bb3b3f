/* ColumnBuilder: a chunk of records in columns; Buffer: one finished column's memory.
 *
 * A chunk's arrays are returned to Python as Buffers that own their memory.  numpy and Arrow use them
 * without a copy; the memory is freed with the last reference to the Buffer.
 */
#include "memory.h"
#include "scan.h"

#include <string.h>

/* ---- Buffer ---- */

typedef struct {
    PyObject_HEAD
    void *data;                        /* from ls_memory_take; given back with the object */
    Py_ssize_t size;
} BufferObject;

/* Takes over `data`. */
static PyObject *buffer_from(ls_module *module, void *data, size_t size)
{
    BufferObject *self = PyObject_New(BufferObject, module->buffer_type);
    if (self == NULL) {
        ls_memory_give(data);
        return NULL;
    }
    self->data = data;
    self->size = (Py_ssize_t)size;
    return (PyObject *)self;
}

static void buffer_dealloc(BufferObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    ls_memory_give(self->data);
    PyObject_Free(self);
    Py_DECREF(type);
}

static int buffer_get(BufferObject *self, Py_buffer *view, int flags)
{
    return PyBuffer_FillInfo(view, (PyObject *)self, self->data, self->size, 1, flags);
}

static Py_ssize_t buffer_length(BufferObject *self)
{
    return self->size;
}

static PyType_Slot buffer_slots[] = {
    {Py_tp_doc, (void *)PyDoc_STR("The memory of one column, read-only.")},
    {Py_tp_dealloc, buffer_dealloc},
    {Py_bf_getbuffer, buffer_get},
    {Py_sq_length, buffer_length},
    {0, NULL},
};

PyType_Spec ls_buffer_spec = {
    .name = "logstore._native.Buffer",
    .basicsize = sizeof(BufferObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = buffer_slots,
};

/* ---- ColumnBuilder ---- */

typedef struct {
    PyObject_HEAD
    ls_module *module;
    ls_columns columns;
    bool busy;
} ColumnBuilderObject;

ls_columns *ls_column_builder_of(PyObject *builder)
{
    ColumnBuilderObject *self = (ColumnBuilderObject *)builder;
    if (self->busy) {
        PyErr_SetString(PyExc_ValueError, "these columns are being filled by another thread");
        return NULL;
    }
    return &self->columns;
}

void ls_column_builder_busy(PyObject *builder, bool busy)
{
    ((ColumnBuilderObject *)builder)->busy = busy;
}

/* ColumnBuilder(fields, rows, bytes_max, bytes_hint) */
static PyObject *column_builder_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"fields", "rows", "bytes_max", "bytes_hint", NULL};
    unsigned int fields;
    Py_ssize_t rows, bytes_max, bytes_hint;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Innn:ColumnBuilder", names, &fields, &rows,
                                     &bytes_max, &bytes_hint)) {
        return NULL;
    }
    if (rows <= 0 || rows > 1 << 28 || bytes_max <= 0 || bytes_hint < 0) {
        return PyErr_Format(PyExc_ValueError, "rows must be from 1 to %d, not %zd", 1 << 28, rows);
    }
    ls_module *module = ls_module_of_type(type);
    ColumnBuilderObject *self =
        module == NULL ? NULL : (ColumnBuilderObject *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->module = module;
    if (bytes_hint > bytes_max) {
        bytes_hint = bytes_max + bytes_max / 16;
    }
    if (ls_columns_init(&self->columns, fields, (size_t)rows, (size_t)bytes_max,
                        (size_t)bytes_hint) != LS_OK) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static void column_builder_dealloc(ColumnBuilderObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    ls_columns_free(&self->columns);
    type->tp_free(self);
    Py_DECREF(type);
}

/* (ends, data, validity or None, nulls); takes the memory over. */
static PyObject *finish_bytes(ls_module *module, ls_bytes_column *column)
{
    if (column->ends == NULL) {
        Py_RETURN_NONE;
    }
    size_t rows = column->rows;
    PyObject *ends = buffer_from(module, column->ends, (rows + 1) * sizeof *column->ends);
    column->ends = NULL;
    PyObject *data = buffer_from(module, column->data, column->size);
    column->data = NULL;
    PyObject *valid;
    if (column->nulls != 0) {
        valid = buffer_from(module, column->valid, (rows + 7) / 8);
        column->valid = NULL;
    } else {
        valid = Py_NewRef(Py_None);
    }
    PyObject *result = NULL;
    if (ends != NULL && data != NULL && valid != NULL) {
        result = Py_BuildValue("(OOOL)", ends, data, valid, (long long)column->nulls);
    }
    Py_XDECREF(ends);
    Py_XDECREF(data);
    Py_XDECREF(valid);
    return result;
}

static PyObject *finish_array(ls_module *module, void *slot, size_t bytes)
{
    void **array = slot;
    if (*array == NULL) {
        Py_RETURN_NONE;
    }
    PyObject *buffer = buffer_from(module, *array, bytes);
    *array = NULL;
    return buffer;
}

/* finish() -> (rows, timestamp_type, offsets, timestamps, keys, values, header_ends, header_names,
 * header_values, tombstones); the builder is empty and useless afterwards. */
static PyObject *column_builder_finish(ColumnBuilderObject *self, PyObject *Py_UNUSED(unused))
{
    if (self->busy) {
        PyErr_SetString(PyExc_ValueError, "these columns are being filled by another thread");
        return NULL;
    }
    ls_columns *columns = &self->columns;
    size_t rows = columns->rows;
    PyObject *parts[8] = {
        finish_array(self->module, &columns->offsets, rows * sizeof(int64_t)),
        finish_array(self->module, &columns->timestamps, rows * sizeof(int64_t)),
        finish_bytes(self->module, &columns->keys),
        finish_bytes(self->module, &columns->values),
        finish_array(self->module, &columns->header_ends, (rows + 1) * sizeof(int32_t)),
        finish_bytes(self->module, &columns->header_names),
        finish_bytes(self->module, &columns->header_values),
        finish_array(self->module, &columns->tombstones, rows),
    };
    PyObject *result = NULL;
    bool ok = true;
    for (size_t i = 0; i < 8; i++) {
        ok = ok && parts[i] != NULL;
    }
    if (ok) {
        result = Py_BuildValue("(niOOOOOOOO)", (Py_ssize_t)rows,
                               columns->log_append_time ? 1 : 0, parts[0], parts[1], parts[2],
                               parts[3], parts[4], parts[5], parts[6], parts[7]);
    }
    for (size_t i = 0; i < 8; i++) {
        Py_XDECREF(parts[i]);
    }
    columns->rows = columns->rows_max; /* full: nothing can be filled in any more */
    return result;
}

static PyObject *column_builder_get_rows(ColumnBuilderObject *self, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(self->columns.rows);
}

static PyObject *column_builder_get_value_bytes(ColumnBuilderObject *self,
                                                void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(self->columns.values.size);
}

static PyMethodDef column_builder_methods[] = {
    {"finish", (PyCFunction)column_builder_finish, METH_NOARGS,
     PyDoc_STR("finish() -> the chunk's buffers")},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef column_builder_getset[] = {
    {"rows", (getter)column_builder_get_rows, NULL, NULL, NULL},
    {"value_bytes", (getter)column_builder_get_value_bytes, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot column_builder_slots[] = {
    {Py_tp_doc, (void *)PyDoc_STR("A chunk of records in columns; see columns.c.")},
    {Py_tp_new, column_builder_new},
    {Py_tp_dealloc, column_builder_dealloc},
    {Py_tp_methods, column_builder_methods},
    {Py_tp_getset, column_builder_getset},
    {0, NULL},
};

PyType_Spec ls_column_builder_spec = {
    .name = "logstore._native.ColumnBuilder",
    .basicsize = sizeof(ColumnBuilderObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = column_builder_slots,
};
