/* The recorder of the I/O seam, for logstore.testing: read the calls, choose the faults.
 *
 * io_recorder_calls builds Python objects while it holds the recorder's lock.  The garbage collector
 * is disabled there: a collection could close a file, and close waits for that lock.
 */
#include "module.h"

#include <errno.h>

#include "io_recorder.h"

static PyObject *raise_errno(int result)
{
    errno = -result;
    return result == -ENOMEM ? PyErr_NoMemory() : PyErr_SetFromErrno(PyExc_OSError);
}

/* (kinds, pattern, first, times, action, value); borrows the pattern from `object`. */
static bool fault_from(PyObject *object, ls_fault *fault)
{
    unsigned long kinds;
    const char *pattern;
    long long first, times, value;
    int action;
    if (!PyTuple_Check(object) || !PyArg_ParseTuple(object, "kzLLiL", &kinds, &pattern, &first,
                                                    &times, &action, &value)) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_TypeError, "a fault must be a tuple");
        }
        return false;
    }
    *fault = (ls_fault){
        .kinds = (uint32_t)kinds,
        .pattern = (char *)(uintptr_t)pattern,
        .first = first,
        .times = times,
        .action = (ls_fault_action)action,
        .value = value,
    };
    return true;
}

static PyObject *io_recorder_start(PyObject *Py_UNUSED(self), PyObject *args)
{
    const char *root;
    PyObject *given;
    int keep_calls, keep_data, ordered;
    if (!PyArg_ParseTuple(args, "sO!ppp:io_recorder_start", &root, &PyTuple_Type, &given,
                          &keep_calls, &keep_data, &ordered)) {
        return NULL;
    }
    Py_ssize_t count = PyTuple_GET_SIZE(given);
    ls_fault *faults = PyMem_Calloc((size_t)count + 1, sizeof *faults);
    if (faults == NULL) {
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!fault_from(PyTuple_GET_ITEM(given, i), &faults[i])) {
            PyMem_Free(faults);
            return NULL;
        }
    }
    int result = ls_io_recorder_start(root, faults, (size_t)count, keep_calls != 0, keep_data != 0,
                                      ordered != 0);
    PyMem_Free(faults);
    if (result < 0) {
        return raise_errno(result);
    }
    Py_RETURN_NONE;
}

static PyObject *io_recorder_stop(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(unused))
{
    Py_BEGIN_ALLOW_THREADS             /* waits for a recorded call in progress */
    ls_io_recorder_stop();
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *io_recorder_mark(PyObject *Py_UNUSED(self), PyObject *arg)
{
    long long number = PyLong_AsLongLong(arg);
    if (number == -1 && PyErr_Occurred()) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    ls_io_recorder_mark(number);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *io_recorder_count(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(unused))
{
    int64_t count;
    Py_BEGIN_ALLOW_THREADS
    count = ls_io_recorder_count();
    Py_END_ALLOW_THREADS
    return PyLong_FromLongLong(count);
}

static PyObject *below(const ls_call *call, const char *path)
{
    return path == NULL ? Py_NewRef(Py_None) : PyUnicode_DecodeFSDefault(path + call->below);
}

static int add_call(void *context, const ls_call *call)
{
    PyObject *data = call->data == NULL
        ? Py_NewRef(Py_None)
        : PyBytes_FromStringAndSize((const char *)call->data, (Py_ssize_t)call->done);
    /* N takes the references, also when it fails. */
    PyObject *item = Py_BuildValue(
        "(iNNiiLLLiLN)", (int)call->kind, below(call, call->path), below(call, call->target),
        call->fd, call->flags, (long long)call->position, (long long)call->size,
        (long long)call->result, (int)call->spoiled, (long long)call->done, data);
    int result = item == NULL ? -1 : PyList_Append(context, item);
    Py_XDECREF(item);
    return result < 0 ? -EINVAL : 0;
}

static PyObject *io_recorder_calls(PyObject *Py_UNUSED(self), PyObject *arg)
{
    Py_ssize_t start = PyLong_AsSsize_t(arg);
    if (start < 0) {
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "start is %zd", start);
    }
    PyObject *list = PyList_New(0);
    if (list == NULL) {
        return NULL;
    }
    int collecting = PyGC_Disable();
    int result = ls_io_recorder_each((size_t)start, add_call, list);
    if (collecting) {
        PyGC_Enable();
    }
    if (result < 0) {
        Py_DECREF(list);
        return PyErr_Occurred() ? NULL : raise_errno(result);
    }
    return list;
}

static PyObject *io_recorder_faults(PyObject *Py_UNUSED(self), PyObject *arg)
{
    Py_ssize_t capacity = PyLong_AsSsize_t(arg);
    if (capacity < 0) {
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "count is %zd", capacity);
    }
    ls_fault *faults = PyMem_Calloc((size_t)capacity + 1, sizeof *faults);
    if (faults == NULL) {
        return PyErr_NoMemory();
    }
    size_t count = ls_io_recorder_faults(faults, (size_t)capacity);
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < count; i++) {
        PyObject *pair = Py_BuildValue("(LL)", (long long)faults[i].matched,
                                       (long long)faults[i].fired);
        if (pair == NULL || PyList_Append(list, pair) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(pair);
    }
    PyMem_Free(faults);
    return list;
}

static PyObject *io_recorder_kinds(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(unused))
{
    PyObject *names = PyTuple_New(LS_CALL_KINDS);
    for (int i = 0; names != NULL && i < LS_CALL_KINDS; i++) {
        PyObject *name = PyUnicode_InternFromString(ls_call_names[i]);
        if (name == NULL) {
            Py_CLEAR(names);
        } else {
            PyTuple_SET_ITEM(names, i, name);
        }
    }
    return names;
}

PyMethodDef ls_io_recorder_functions[] = {
    {"io_recorder_start", io_recorder_start, METH_VARARGS,
     PyDoc_STR("io_recorder_start(root, faults, keep_calls, keep_data, ordered)")},
    {"io_recorder_stop", io_recorder_stop, METH_NOARGS, PyDoc_STR("io_recorder_stop()")},
    {"io_recorder_mark", io_recorder_mark, METH_O, PyDoc_STR("io_recorder_mark(number)")},
    {"io_recorder_count", io_recorder_count, METH_NOARGS,
     PyDoc_STR("io_recorder_count() -> calls so far")},
    {"io_recorder_calls", io_recorder_calls, METH_O,
     PyDoc_STR("io_recorder_calls(start) -> [(kind, path, target, fd, flags, position, size,\n"
               "result, spoiled, done, data)]")},
    {"io_recorder_faults", io_recorder_faults, METH_O,
     PyDoc_STR("io_recorder_faults(count) -> [(matched, fired)]")},
    {"io_recorder_kinds", io_recorder_kinds, METH_NOARGS,
     PyDoc_STR("io_recorder_kinds() -> names of the kinds")},
    {NULL, NULL, 0, NULL},
};
