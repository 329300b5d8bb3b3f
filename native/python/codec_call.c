#include "codec_call.h"

PyObject *ls_codec_call(PyObject *callable, unsigned codec, const uint8_t *data, size_t size,
                        int64_t limit)
{
    PyObject *view =
        PyMemoryView_FromMemory((char *)(uintptr_t)data, (Py_ssize_t)size, PyBUF_READ);
    if (view == NULL) {
        return NULL;
    }
    PyObject *bytes = limit < 0 ? PyObject_CallFunction(callable, "IO", codec, view)
                                : PyObject_CallFunction(callable, "IOL", codec, view,
                                                        (long long)limit);
    Py_DECREF(view);
    if (bytes != NULL && !PyBytes_Check(bytes)) {
        Py_DECREF(bytes);
        PyErr_SetString(PyExc_TypeError, "a codec must return bytes");
        return NULL;
    }
    return bytes;
}
