/* Functions over one Fetch request in a connection's buffer: see core/fetch_frame.h. */
#include "module.h"

#include "fetch_frame.h"

/* Parses the frame of `size` bytes from `at` on.  1: it has the common shape; 0: it has not; -1: raised.
 * The caller releases `buffer` unless -1. */
static int parse_at(PyObject *const *args, Py_buffer *buffer, ls_fetch_frame *frame)
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
    return ls_fetch_frame_parse((const uint8_t *)buffer->buf + at, (size_t)size, frame);
}

/* read_fetch(buffer, at, size) -> (client id, topic, partition, offset, leader epoch, last fetched epoch,
 *                                  longest wait, least bytes, most bytes, committed only)
 *
 * None if the request does not have the common shape.  The topic is a str; bytes if it is an id. */
static PyObject *native_read_fetch(PyObject *Py_UNUSED(self), PyObject *const *args,
                                   Py_ssize_t count)
{
    if (count != 3) {
        return PyErr_Format(PyExc_TypeError, "read_fetch takes 3 arguments, not %zd", count);
    }
    Py_buffer buffer;
    ls_fetch_frame frame;
    int shape = parse_at(args, &buffer, &frame);
    if (shape < 0) {
        return NULL;
    }
    PyObject *result = NULL;
    if (shape == 0) {
        result = Py_NewRef(Py_None);
        goto done;
    }
    const char *name = (const char *)frame.topic;
    Py_ssize_t size = (Py_ssize_t)frame.topic_size;
    PyObject *topic = frame.version >= LS_FETCH_VERSION_BY_ID ? PyBytes_FromStringAndSize(name, size)
                                                              : PyUnicode_DecodeUTF8(name, size, NULL);
    PyObject *client_id = NULL;
    if (topic != NULL) {
        client_id = PyUnicode_DecodeUTF8((const char *)frame.client_id,
                                         (Py_ssize_t)frame.client_id_size, NULL);
    }
    if (client_id != NULL) {
        int32_t bytes_max = frame.bytes_max < frame.partition_bytes_max ? frame.bytes_max
                                                                        : frame.partition_bytes_max;
        result = Py_BuildValue("(NNiLiiiiiO)", client_id, topic, (int)frame.partition,
                               (long long)frame.offset, (int)frame.leader_epoch,
                               (int)frame.fetched_epoch, (int)frame.wait_ms, (int)frame.bytes_min,
                               (int)bytes_max, frame.isolation == 1 ? Py_True : Py_False);
    } else {
        Py_XDECREF(topic);
        if (PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) {  /* the general decoder refuses it */
            PyErr_Clear();
            result = Py_NewRef(Py_None);
        }
    }
done:
    PyBuffer_Release(&buffer);
    return result;
}

/* fetch_answer(buffer, at, size, high_watermark, last_stable_offset, start_offset, records_size)
 *   -> (bytes before the records, bytes after them) */
static PyObject *native_fetch_answer(PyObject *Py_UNUSED(self), PyObject *const *args,
                                     Py_ssize_t count)
{
    if (count != 7) {
        return PyErr_Format(PyExc_TypeError, "fetch_answer takes 7 arguments, not %zd", count);
    }
    ls_fetch_offsets offsets = {
        .high_watermark = PyLong_AsLongLong(args[3]),
        .last_stable_offset = PyLong_AsLongLong(args[4]),
        .start_offset = PyLong_AsLongLong(args[5]),
    };
    size_t records_size = PyLong_AsSize_t(args[6]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    Py_buffer buffer;
    ls_fetch_frame frame;
    int shape = parse_at(args, &buffer, &frame);
    if (shape < 0) {
        return NULL;
    }
    PyObject *result = NULL;
    uint8_t head[LS_FETCH_HEAD_BYTES + LS_FETCH_TOPIC_BYTES_MAX];
    size_t size = shape == 0 ? 0 : ls_fetch_frame_head(&frame, &offsets, records_size, head);
    if (size == 0) {
        PyErr_SetString(PyExc_ValueError, "no request of the common shape, or too many records");
    } else {
        static const char zeros[LS_FETCH_TAIL_BYTES] = {0};
        result = Py_BuildValue("(y#y#)", (const char *)head, (Py_ssize_t)size, zeros,
                               (Py_ssize_t)ls_fetch_frame_tail(&frame));
    }
    PyBuffer_Release(&buffer);
    return result;
}

PyMethodDef ls_fetch_frame_functions[] = {
    {"read_fetch", (PyCFunction)(void (*)(void))native_read_fetch, METH_FASTCALL,
     PyDoc_STR("read_fetch(buffer, at, size) -> (client id, topic, partition, offset, leader epoch, "
               "last fetched epoch, longest wait, least bytes, most bytes, committed only), or None if "
               "it is not a Fetch of one partition without a session")},
    {"fetch_answer", (PyCFunction)(void (*)(void))native_fetch_answer, METH_FASTCALL,
     PyDoc_STR("fetch_answer(buffer, at, size, high_watermark, last_stable_offset, start_offset, "
               "records_size) -> (bytes before the records, bytes after them) of its answer")},
    {NULL, NULL, 0, NULL},
};
