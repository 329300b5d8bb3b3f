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
    /* `data` is valid only for this call: a reference that the codec kept must not read it later.
     * A release that fails leaves such a reference, and the call fails with it. */
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyObject *released = PyObject_CallMethod(view, "release", NULL);
    Py_DECREF(view);
    if (released == NULL) {
        Py_CLEAR(bytes);
    }
    Py_XDECREF(released);
    if (type != NULL) {
        PyErr_Restore(type, error, traceback);
    }
    if (bytes != NULL && !PyBytes_Check(bytes)) {
        Py_DECREF(bytes);
        PyErr_SetString(PyExc_TypeError,
                        limit < 0 ? "compress must return bytes" : "decompress must return bytes");
        return NULL;
    }
    return bytes;
}

/* Sets `cause`, which may be NULL, on the exception that is set. */
static void set_cause(PyObject *cause)
{
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (error != NULL) {
        PyException_SetCause(error, Py_XNewRef(cause));
    }
    PyErr_Restore(type, error, traceback);
}

void ls_codec_raise_corrupt(ls_module *module, const char *reason, PyObject *path, int64_t position,
                            int64_t start, int64_t end)
{
    if (!PyErr_ExceptionMatches(PyExc_ValueError) ||
        PyErr_ExceptionMatches(module->unsupported_error)) {
        return;                        /* a codec that is not installed is no damage */
    }
    PyObject *type, *cause, *traceback, *text = NULL;
    PyErr_Fetch(&type, &cause, &traceback);
    PyErr_NormalizeException(&type, &cause, &traceback);
    if (reason == NULL) {
        text = PyObject_Str(cause);
        reason = text == NULL ? NULL : PyUnicode_AsUTF8(text);
    }
    if (reason != NULL) {
        ls_raise(module, ls_fail(LS_E_CORRUPT, position, reason), path, start, end);
        set_cause(cause);
    }
    Py_XDECREF(text);
    Py_XDECREF(type);
    Py_XDECREF(cause);
    Py_XDECREF(traceback);
}
