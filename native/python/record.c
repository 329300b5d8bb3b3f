/* Record: one record, immutable.  Also the conversion of keys, values, headers and times from Python.
 *
 * Holds only exact bytes, str, None and tuples of these, so it can be part of no reference cycle
 * and is not tracked by the collector: a scan makes tens of millions of these a second.
 */
#include "module.h"

#include <structmember.h>

/* ---- times ---- */

static bool timestamp_of_datetime(PyObject *object, int64_t *out)
{
    PyObject *zone = PyObject_GetAttrString(object, "tzinfo");
    if (zone == NULL) {
        return false;
    }
    bool naive = zone == Py_None;
    Py_DECREF(zone);
    if (naive) {
        PyErr_SetString(PyExc_ValueError,
                        "a datetime without a time zone is ambiguous: use "
                        "datetime.now(timezone.utc) or pass milliseconds as an int");
        return false;
    }
    PyObject *seconds = PyObject_CallMethod(object, "timestamp", NULL);
    if (seconds == NULL) {
        return false;
    }
    double value = PyFloat_AsDouble(seconds);
    Py_DECREF(seconds);
    if (value == -1.0 && PyErr_Occurred()) {
        return false;
    }
    double ms = value * 1000.0;
    *out = (int64_t)(ms + (ms >= 0 ? 0.5 : -0.5));
    return true;
}

bool ls_timestamp_from(PyObject *object, int64_t *out)
{
    if (object == Py_None) {
        *out = LS_NO_TIMESTAMP;
        return true;
    }
    if (PyLong_Check(object)) {
        *out = PyLong_AsLongLong(object);
        if (*out == -1 && PyErr_Occurred()) {
            return false;
        }
    } else if (PyObject_HasAttrString(object, "tzinfo") &&
               PyObject_HasAttrString(object, "timestamp")) {
        if (!timestamp_of_datetime(object, out)) {
            return false;
        }
    } else {
        PyErr_Format(PyExc_TypeError,
                     "timestamp must be int milliseconds, a datetime with a time zone, or None, "
                     "not %.100s",
                     Py_TYPE(object)->tp_name);
        return false;
    }
    if (*out < 0) {
        PyErr_Format(PyExc_ValueError, "timestamp %lld is negative: it counts milliseconds since 1970",
                     (long long)*out);
        return false;
    }
    return true;
}

/* ---- keys, values, headers ---- */

bool ls_is_bytes_like(PyObject *object, const char *what, const char *hint)
{
    if (PyUnicode_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s must be bytes, not str: encode it, as in text.encode()",
                     what);
        return false;
    }
    if (!PyObject_CheckBuffer(object)) {
        PyErr_Format(PyExc_TypeError, "%s must be bytes or None, not %.100s%s", what,
                     Py_TYPE(object)->tp_name, hint);
        return false;
    }
    return true;
}

/* Exact bytes for a bytes-like object; None passes.  New reference, or NULL with an exception. */
static PyObject *bytes_from(PyObject *object, const char *what)
{
    if (object == Py_None || PyBytes_CheckExact(object)) {
        return Py_NewRef(object);
    }
    return ls_is_bytes_like(object, what, "") ? PyBytes_FromObject(object) : NULL;
}

/* A pair from the user's headers.  Borrowed references; false: raised. */
static bool header_pair(PyObject *pair, PyObject **name, PyObject **value)
{
    if (!PyTuple_Check(pair) && !PyList_Check(pair)) {
        PyErr_Format(PyExc_TypeError,
                     "each header must be a (str, bytes or None) pair, not %.100s; for a dict pass "
                     "list(headers.items())",
                     Py_TYPE(pair)->tp_name);
        return false;
    }
    if (PySequence_Fast_GET_SIZE(pair) != 2) {
        PyErr_Format(PyExc_ValueError, "each header must be a (name, value) pair, not %zd items",
                     PySequence_Fast_GET_SIZE(pair));
        return false;
    }
    *name = PySequence_Fast_GET_ITEM(pair, 0);
    *value = PySequence_Fast_GET_ITEM(pair, 1);
    if (!PyUnicode_Check(*name)) {
        PyErr_Format(PyExc_TypeError, "a header's name must be str, not %.100s",
                     Py_TYPE(*name)->tp_name);
        return false;
    }
    return true;
}

static PyObject *fast_headers(PyObject *headers)
{
    if (PyDict_Check(headers) || PyUnicode_Check(headers) || PyBytes_Check(headers)) {
        return PyErr_Format(PyExc_TypeError,
                            "headers must be a sequence of (str, bytes or None) pairs, not %.100s",
                            Py_TYPE(headers)->tp_name);
    }
    return PySequence_Fast(headers, "headers must be a sequence of (str, bytes or None) pairs");
}

static PyObject *headers_from(PyObject *headers)
{
    PyObject *fast = fast_headers(headers);
    if (fast == NULL) {
        return NULL;
    }
    Py_ssize_t count = PySequence_Fast_GET_SIZE(fast);
    PyObject *result = PyTuple_New(count);
    for (Py_ssize_t i = 0; result != NULL && i < count; i++) {
        PyObject *name, *value, *bytes = NULL, *pair = NULL, *text = NULL;
        if (header_pair(PySequence_Fast_GET_ITEM(fast, i), &name, &value)) {
            text = PyUnicode_FromObject(name);
            bytes = bytes_from(value, "a header's value");
        }
        if (text != NULL && bytes != NULL) {
            pair = PyTuple_Pack(2, text, bytes);
        }
        Py_XDECREF(text);
        Py_XDECREF(bytes);
        if (pair == NULL) {
            Py_CLEAR(result);
            break;
        }
        PyTuple_SET_ITEM(result, i, pair);
    }
    Py_DECREF(fast);
    return result;
}

static bool buffer_reserve(ls_header_buffer *buffer, size_t more)
{
    if (buffer->capacity - buffer->size >= more) {
        return true;
    }
    size_t capacity = (buffer->size + more) * 2;
    uint8_t *data = PyMem_Realloc(buffer->data, capacity);
    if (data == NULL) {
        PyErr_NoMemory();
        return false;
    }
    buffer->data = data;
    buffer->capacity = capacity;
    return true;
}

static bool encode_header(ls_header_buffer *buffer, PyObject *name, PyObject *value)
{
    /* surrogateescape: a name that was read from disk and is not UTF-8 is written with its bytes. */
    PyObject *text = PyUnicode_AsEncodedString(name, "utf-8", "surrogateescape");
    PyObject *bytes = text == NULL ? NULL : bytes_from(value, "a header's value");
    bool ok = false;
    if (bytes != NULL) {
        Py_ssize_t name_size = PyBytes_GET_SIZE(text);
        Py_ssize_t value_size = bytes == Py_None ? -1 : PyBytes_GET_SIZE(bytes);
        if (name_size > INT32_MAX / 2 || value_size > INT32_MAX / 2) {
            PyErr_SetString(PyExc_ValueError, "a header may not exceed 1 GiB");
        } else if (buffer_reserve(buffer,
                                  ls_header_size((int32_t)name_size, (int32_t)value_size))) {
            uint8_t *at = buffer->data + buffer->size;
            const uint8_t *value_data =
                bytes == Py_None ? NULL : (const uint8_t *)PyBytes_AS_STRING(bytes);
            at = ls_header_store(at, (const uint8_t *)PyBytes_AS_STRING(text), (int32_t)name_size,
                                 value_data, (int32_t)value_size);
            buffer->size = (size_t)(at - buffer->data);
            ok = true;
        }
    }
    Py_XDECREF(text);
    Py_XDECREF(bytes);
    return ok;
}

bool ls_headers_encode(ls_header_buffer *buffer, PyObject *headers)
{
    buffer->size = 0;
    buffer->count = 0;
    PyObject *fast = fast_headers(headers);
    if (fast == NULL) {
        return false;
    }
    bool ok = true;
    /* Reads the size in each round: Python code that the conversion calls could change a list. */
    for (Py_ssize_t i = 0; ok && i < PySequence_Fast_GET_SIZE(fast); i++) {
        PyObject *pair = Py_NewRef(PySequence_Fast_GET_ITEM(fast, i));
        PyObject *name, *value;
        ok = header_pair(pair, &name, &value) && encode_header(buffer, name, value);
        Py_DECREF(pair);
        buffer->count++;
    }
    Py_DECREF(fast);
    return ok;
}

/* ---- from disk ---- */

static PyObject *headers_from_disk(const ls_record *record)
{
    PyObject *headers = PyTuple_New(record->header_count);
    const uint8_t *at = record->headers, *end = at + record->headers_size;
    for (int32_t i = 0; headers != NULL && i < record->header_count; i++) {
        ls_header header;
        ls_header_next(&at, end, &header);
        PyObject *name =
            PyUnicode_DecodeUTF8((const char *)header.name, header.name_size, "surrogateescape");
        PyObject *value = header.value_size < 0
                              ? Py_NewRef(Py_None)
                              : PyBytes_FromStringAndSize((const char *)header.value,
                                                          header.value_size);
        PyObject *pair = NULL;
        if (name != NULL && value != NULL) {
            pair = PyTuple_Pack(2, name, value);
        }
        Py_XDECREF(name);
        Py_XDECREF(value);
        if (pair == NULL) {
            Py_CLEAR(headers);
        } else {
            PyTuple_SET_ITEM(headers, i, pair);
        }
    }
    return headers;
}

static inline PyObject *field_from_disk(const uint8_t *data, int32_t size)
{
    return size < 0 ? Py_NewRef(Py_None)
                    : PyBytes_FromStringAndSize((const char *)data, size);
}

PyObject *ls_record_from(ls_module *module, const ls_record *record, PyObject *topic,
                         int32_t partition)
{
    PyObject *value = field_from_disk(record->value, record->value_size);
    PyObject *key = field_from_disk(record->key, record->key_size);
    PyObject *headers =
        record->header_count == 0 ? Py_NewRef(module->empty_tuple) : headers_from_disk(record);
    RecordObject *self = NULL;
    if (value != NULL && key != NULL && headers != NULL) {
        self = PyObject_New(RecordObject, module->record_type);
    }
    if (self == NULL) {
        Py_XDECREF(value);
        Py_XDECREF(key);
        Py_XDECREF(headers);
        return NULL;
    }
    self->value = value;
    self->key = key;
    self->headers = headers;
    self->topic = Py_XNewRef(topic);
    self->timestamp = record->timestamp;
    self->offset = record->offset;
    self->partition = partition;
    return (PyObject *)self;
}

/* Whether a field's bytes object is this record's alone and of the size that is needed.  One byte and
 * none are shared by the whole interpreter. */
static inline bool reusable(PyObject *field, int32_t size)
{
#ifdef Py_GIL_DISABLED
    (void)field;
    (void)size;
    return false;
#else
    return size > 1 && Py_REFCNT(field) == 1 && PyBytes_CheckExact(field) &&
           PyBytes_GET_SIZE(field) == size;
#endif
}

/* Clears the cached hash, which is that of the former bytes.  CPython marks the member deprecated
 * because other code must not write it; here the caller has the only reference to the object. */
static inline void forget_hash(PyObject *bytes)
{
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
    ((PyBytesObject *)bytes)->ob_shash = -1;
#pragma GCC diagnostic pop
}

/* False: raised, and the field is as it was. */
static inline bool renew_field(PyObject **field, const uint8_t *data, int32_t size)
{
    if (reusable(*field, size)) {
        memcpy(PyBytes_AS_STRING(*field), data, (size_t)size);
        forget_hash(*field);
        return true;
    }
    if (size < 0 && *field == Py_None) {
        return true;
    }
    PyObject *fresh = field_from_disk(data, size);
    if (fresh == NULL) {
        return false;
    }
    Py_SETREF(*field, fresh);
    return true;
}

bool ls_record_renew(ls_module *module, RecordObject *self, const ls_record *record)
{
    if (!renew_field(&self->value, record->value, record->value_size) ||
        !renew_field(&self->key, record->key, record->key_size)) {
        return false;
    }
    if (record->header_count != 0 || self->headers != module->empty_tuple) {
        PyObject *headers = record->header_count == 0 ? Py_NewRef(module->empty_tuple)
                                                      : headers_from_disk(record);
        if (headers == NULL) {
            return false;
        }
        Py_SETREF(self->headers, headers);
    }
    self->timestamp = record->timestamp;
    self->offset = record->offset;
    return true;
}

/* ---- the type ---- */

static PyObject *record_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"value", "key", "headers", "timestamp", NULL};
    PyObject *value, *key = Py_None, *headers = NULL, *timestamp = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$OOO:Record", names, &value, &key, &headers,
                                     &timestamp)) {
        return NULL;
    }
    ls_module *module = ls_module_of_type(type);
    if (module == NULL) {
        return NULL;
    }
    int64_t time;
    if (!ls_timestamp_from(timestamp, &time)) {
        return NULL;
    }
    PyObject *value_bytes = bytes_from(value, "value");
    PyObject *key_bytes = value_bytes == NULL ? NULL : bytes_from(key, "key");
    PyObject *pairs = NULL;
    if (key_bytes != NULL) {
        if (value_bytes == Py_None && key_bytes == Py_None) {
            PyErr_SetString(module->invalid_record_error,
                            "a record without a value (a tombstone) needs a key");
        } else {
            pairs = headers == NULL ? Py_NewRef(module->empty_tuple) : headers_from(headers);
        }
    }
    RecordObject *self = pairs == NULL ? NULL : (RecordObject *)type->tp_alloc(type, 0);
    if (self == NULL) {
        Py_XDECREF(value_bytes);
        Py_XDECREF(key_bytes);
        Py_XDECREF(pairs);
        return NULL;
    }
    self->value = value_bytes;
    self->key = key_bytes;
    self->headers = pairs;
    self->topic = NULL;
    self->timestamp = time;
    self->offset = -1;
    self->partition = -1;
    return (PyObject *)self;
}

static void record_dealloc(RecordObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(self->value);
    Py_XDECREF(self->key);
    Py_XDECREF(self->headers);
    Py_XDECREF(self->topic);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *record_get_timestamp(RecordObject *self, void *Py_UNUSED(closure))
{
    if (self->timestamp == LS_NO_TIMESTAMP) {
        Py_RETURN_NONE;
    }
    return PyLong_FromLongLong(self->timestamp);
}

static PyObject *record_get_offset(RecordObject *self, void *Py_UNUSED(closure))
{
    if (self->offset < 0) {
        Py_RETURN_NONE;
    }
    return PyLong_FromLongLong(self->offset);
}

static PyObject *record_get_partition(RecordObject *self, void *Py_UNUSED(closure))
{
    if (self->partition < 0) {
        Py_RETURN_NONE;
    }
    return PyLong_FromLong(self->partition);
}

static PyObject *record_get_topic(RecordObject *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(self->topic == NULL ? Py_None : self->topic);
}

static PyObject *record_repr(RecordObject *self)
{
    PyObject *parts = PyList_New(0);
    PyObject *text = NULL;
    if (parts == NULL) {
        return NULL;
    }
#define ADD(...)                                                                                   \
    do {                                                                                           \
        PyObject *part = PyUnicode_FromFormat(__VA_ARGS__);                                        \
        if (part == NULL || PyList_Append(parts, part) < 0) {                                      \
            Py_XDECREF(part);                                                                      \
            goto done;                                                                             \
        }                                                                                          \
        Py_DECREF(part);                                                                           \
    } while (0)
    ADD("%R", self->value);
    if (self->key != Py_None) {
        ADD("key=%R", self->key);
    }
    if (PyTuple_GET_SIZE(self->headers) != 0) {
        ADD("headers=%R", self->headers);
    }
    if (self->timestamp != LS_NO_TIMESTAMP) {
        ADD("timestamp=%lld", (long long)self->timestamp);
    }
    if (self->offset >= 0) {
        ADD("offset=%lld", (long long)self->offset);
    }
    if (self->topic != NULL) {
        ADD("topic=%R, partition=%d", self->topic, (int)self->partition);
    }
#undef ADD
    PyObject *comma = PyUnicode_FromString(", ");
    PyObject *joined = comma == NULL ? NULL : PyUnicode_Join(comma, parts);
    if (joined != NULL) {
        text = PyUnicode_FromFormat("Record(%U)", joined);
    }
    Py_XDECREF(comma);
    Py_XDECREF(joined);
done:
    Py_DECREF(parts);
    return text;
}

static PyObject *record_as_tuple(RecordObject *self)
{
    return Py_BuildValue("(OOOLLOi)", self->value, self->key, self->headers,
                         (long long)self->timestamp, (long long)self->offset,
                         self->topic == NULL ? Py_None : self->topic, (int)self->partition);
}

static PyObject *record_richcompare(PyObject *left, PyObject *right, int operation)
{
    if (Py_TYPE(left) != Py_TYPE(right) || (operation != Py_EQ && operation != Py_NE)) {
        Py_RETURN_NOTIMPLEMENTED;
    }
    PyObject *a = record_as_tuple((RecordObject *)left);
    PyObject *b = a == NULL ? NULL : record_as_tuple((RecordObject *)right);
    PyObject *result = b == NULL ? NULL : PyObject_RichCompare(a, b, operation);
    Py_XDECREF(a);
    Py_XDECREF(b);
    return result;
}

static Py_hash_t record_hash(RecordObject *self)
{
    PyObject *tuple = record_as_tuple(self);
    if (tuple == NULL) {
        return -1;
    }
    Py_hash_t hash = PyObject_Hash(tuple);
    Py_DECREF(tuple);
    return hash;
}

static PyObject *record_reduce(RecordObject *self, PyObject *Py_UNUSED(unused))
{
    return PyErr_Format(PyExc_TypeError,
                        "records are not pickled: pass their bytes, or (log, offset) = (%R, %lld)",
                        self->topic == NULL ? Py_None : self->topic, (long long)self->offset);
}

static PyMemberDef record_members[] = {
    {"value", T_OBJECT_EX, offsetof(RecordObject, value), READONLY,
     PyDoc_STR("bytes, or None for a tombstone")},
    {"key", T_OBJECT_EX, offsetof(RecordObject, key), READONLY, PyDoc_STR("bytes or None")},
    {"headers", T_OBJECT_EX, offsetof(RecordObject, headers), READONLY,
     PyDoc_STR("tuple of (name, bytes or None) pairs, in order, duplicates kept")},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef record_getset[] = {
    {"timestamp", (getter)record_get_timestamp, NULL,
     PyDoc_STR("milliseconds since 1970, or None before it is appended"), NULL},
    {"offset", (getter)record_get_offset, NULL,
     PyDoc_STR("its place in the partition, or None before it is appended"), NULL},
    {"partition", (getter)record_get_partition, NULL, PyDoc_STR("partition number, or None"), NULL},
    {"topic", (getter)record_get_topic, NULL, PyDoc_STR("topic name, or None"), NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef record_methods[] = {
    {"__reduce__", (PyCFunction)record_reduce, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

PyDoc_STRVAR(record_doc,
"Record(value, *, key=None, headers=(), timestamp=None)\n--\n\n"
"One record: bytes with an optional key, ordered headers and a time.\n\n"
"Immutable.  A record read from a log also has its offset, topic and partition; one made by hand\n"
"has None there until it is appended, and gets the time of the append if it has no timestamp.\n"
"value=None is a tombstone and needs a key.");

static PyType_Slot record_slots[] = {
    {Py_tp_doc, (void *)record_doc},
    {Py_tp_new, record_new},
    {Py_tp_dealloc, record_dealloc},
    {Py_tp_repr, record_repr},
    {Py_tp_richcompare, record_richcompare},
    {Py_tp_hash, record_hash},
    {Py_tp_members, record_members},
    {Py_tp_getset, record_getset},
    {Py_tp_methods, record_methods},
    {0, NULL},
};

PyType_Spec ls_record_spec = {
    .name = "logstore.Record",
    .basicsize = sizeof(RecordObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = record_slots,
};
