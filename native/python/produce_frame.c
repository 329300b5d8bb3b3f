/* Functions over one Produce request in a connection's buffer: see core/produce_frame.h. */
#include "module.h"

#include "produce_frame.h"

/* Parses the frame of `size` bytes from `at` on.  1: it has the common shape; 0: it has not; -1: raised.
 * The caller releases `buffer` unless -1. */
static int parse_at(PyObject *const *args, Py_buffer *buffer, ls_produce_frame *frame)
{
    Py_ssize_t at = PyLong_AsSsize_t(args[1]), size = PyLong_AsSsize_t(args[2]);
    if (PyErr_Occurred() || PyObject_GetBuffer(args[0], buffer, PyBUF_SIMPLE) < 0) {
        return -1;
    }
    if (at < 0 || size < 0 || at > buffer->len || size > buffer->len - at) {
        PyBuffer_Release(buffer);
        PyErr_SetString(PyExc_ValueError, "the frame is not in the buffer");
        return -1;
    }
    return ls_produce_frame_parse((const uint8_t *)buffer->buf + at, (size_t)size, frame);
}

static PyObject *wrong_count(const char *name, Py_ssize_t expected, Py_ssize_t got)
{
    return PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, not %zd", name, expected, got);
}

/* read_produce(buffer, at, size) -> (client id, topic, partition, position and size of the records)
 *
 * None if the request does not have the common shape.  The topic is a str; bytes if it is an id. */
static PyObject *native_read_produce(PyObject *Py_UNUSED(self), PyObject *const *args,
                                     Py_ssize_t count)
{
    if (count != 3) {
        return wrong_count("read_produce", 3, count);
    }
    Py_buffer buffer;
    ls_produce_frame frame;
    int shape = parse_at(args, &buffer, &frame);
    if (shape < 0) {
        return NULL;
    }
    PyObject *result = NULL;
    if (shape == 0) {
        result = Py_NewRef(Py_None);
        goto done;
    }
    bool by_id = frame.version >= LS_PRODUCE_VERSION_BY_ID;
    PyObject *client_id = PyUnicode_DecodeUTF8((const char *)frame.client_id,
                                               (Py_ssize_t)frame.client_id_size, NULL);
    PyObject *topic = NULL;
    if (client_id != NULL) {
        const char *name = (const char *)frame.topic;
        Py_ssize_t size = (Py_ssize_t)frame.topic_size;
        topic = by_id ? PyBytes_FromStringAndSize(name, size)
                      : PyUnicode_DecodeUTF8(name, size, NULL);
    }
    if (topic != NULL) {
        Py_ssize_t position = (Py_ssize_t)(frame.records - (const uint8_t *)buffer.buf);
        result = Py_BuildValue("(NNinn)", client_id, topic, (int)frame.partition, position,
                               (Py_ssize_t)frame.records_size);
    } else {
        Py_XDECREF(client_id);
        if (PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) {  /* the general decoder refuses it */
            PyErr_Clear();
            result = Py_NewRef(Py_None);
        }
    }
done:
    PyBuffer_Release(&buffer);
    return result;
}

/* produce_answer(buffer, at, size, base_offset, append_time, start_offset) -> the answer, as sent */
static PyObject *native_produce_answer(PyObject *Py_UNUSED(self), PyObject *const *args,
                                       Py_ssize_t count)
{
    if (count != 6) {
        return wrong_count("produce_answer", 6, count);
    }
    long long numbers[3];
    for (int i = 0; i < 3; i++) {
        numbers[i] = PyLong_AsLongLong(args[3 + i]);
    }
    if (PyErr_Occurred()) {
        return NULL;
    }
    Py_buffer buffer;
    ls_produce_frame frame;
    int shape = parse_at(args, &buffer, &frame);
    if (shape < 0) {
        return NULL;
    }
    PyObject *result = NULL;
    if (shape == 0) {
        PyErr_SetString(PyExc_ValueError, "the request does not have the common shape");
    } else {
        uint8_t answer[LS_PRODUCE_ANSWER_BYTES + LS_TOPIC_NAME_BYTES_MAX];
        size_t size = ls_produce_frame_answer(&frame, numbers[0], numbers[1], numbers[2], answer);
        result = PyBytes_FromStringAndSize((const char *)answer, (Py_ssize_t)size);
    }
    PyBuffer_Release(&buffer);
    return result;
}

PyMethodDef ls_produce_frame_functions[] = {
    {"read_produce", (PyCFunction)(void (*)(void))native_read_produce, METH_FASTCALL,
     PyDoc_STR("read_produce(buffer, at, size) -> (client id, topic, partition, position and size "
               "of the records), or None if it is not a Produce of one plain batch")},
    {"produce_answer", (PyCFunction)(void (*)(void))native_produce_answer, METH_FASTCALL,
     PyDoc_STR("produce_answer(buffer, at, size, base_offset, append_time, start_offset) -> bytes: "
               "the answer of such a request")},
    {NULL, NULL, 0, NULL},
};
