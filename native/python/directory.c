/* OpenDirectory: the descriptor of a directory, with users.
 *
 * ``with directory as fd`` counts one more user; close() only marks it closed, and the descriptor goes
 * with the last user.  Counting happens in C, where no signal handler runs: an interrupt comes before
 * a user is counted, or inside of the block that gives it back.  In Python it could come between.
 *
 * Meant to be a base class.  Thread rule: the GIL guards the counts.
 */
#include "module.h"

#include <fcntl.h>

typedef struct {
    PyObject_HEAD
    ls_module *module;
    int fd;                            /* -1: not open yet, or really closed */
    int users;
    bool closed;                       /* no new users */
} DirectoryObject;

static PyObject *directory_new(PyTypeObject *type, PyObject *Py_UNUSED(args),
                               PyObject *Py_UNUSED(kwargs))
{
    /* `type` may be a subclass made in Python, which has no module of its own. */
    ls_module *module = ls_module_of_type(type);
    DirectoryObject *self = module == NULL ? NULL : (DirectoryObject *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->module = module;
        self->fd = -1;
    }
    return (PyObject *)self;
}

static void really_close(DirectoryObject *self)
{
    int fd = self->fd;
    self->fd = -1;
    if (fd >= 0) {
        (void)ls_io_process.close(&ls_io_process, fd);
    }
}

static void directory_dealloc(DirectoryObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    really_close(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *directory_open(DirectoryObject *self, PyObject *args)
{
    int above;
    const char *name;
    if (!PyArg_ParseTuple(args, "is:_open", &above, &name)) {
        return NULL;
    }
    if (self->fd >= 0 || self->closed) {
        PyErr_SetString(PyExc_ValueError, "a directory is opened once");
        return NULL;
    }
    int fd;
    Py_BEGIN_ALLOW_THREADS             /* the name is held by `args` */
    fd = ls_io_process.open(&ls_io_process, above, name, O_RDONLY | O_DIRECTORY, 0);
    Py_END_ALLOW_THREADS
    if (fd < 0) {
        PyObject *path = PyUnicode_DecodeFSDefault(name);
        if (path != NULL) {
            ls_raise(self->module, ls_fail_os(-fd, 0, "open"), path, -1, -1);
            Py_DECREF(path);
        }
        return NULL;
    }
    self->fd = fd;
    Py_RETURN_NONE;
}

static PyObject *directory_enter(DirectoryObject *self, PyObject *Py_UNUSED(unused))
{
    if (self->closed) {
        PyObject *path = PyObject_GetAttrString((PyObject *)self, "path");
        if (path != NULL) {
            PyErr_Format(self->module->closed_error, "%S is closed", path);
            Py_DECREF(path);
        }
        return NULL;
    }
    PyObject *fd = PyLong_FromLong(self->fd);
    if (fd != NULL) {
        self->users++;
    }
    return fd;
}

static PyObject *directory_exit(DirectoryObject *self, PyObject *Py_UNUSED(args))
{
    if (--self->users == 0 && self->closed) {
        really_close(self);
    }
    Py_RETURN_NONE;
}

static PyObject *directory_close(DirectoryObject *self, PyObject *Py_UNUSED(unused))
{
    self->closed = true;
    if (self->users == 0) {
        really_close(self);
    }
    Py_RETURN_NONE;
}

static PyObject *directory_get_fd(DirectoryObject *self, void *Py_UNUSED(closure))
{
    return PyLong_FromLong(self->fd);
}

static PyMethodDef directory_methods[] = {
    {"_open", (PyCFunction)directory_open, METH_VARARGS,
     PyDoc_STR("_open(directory, name); directory -1: name is a path")},
    {"__enter__", (PyCFunction)directory_enter, METH_NOARGS, PyDoc_STR("the descriptor")},
    {"__exit__", (PyCFunction)directory_exit, METH_VARARGS, NULL},
    {"close", (PyCFunction)directory_close, METH_NOARGS,
     PyDoc_STR("close(): no new use; the descriptor goes with the last user.")},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef directory_getset[] = {
    {"fd", (getter)directory_get_fd, NULL, PyDoc_STR("-1 once it is closed"), NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot directory_slots[] = {
    {Py_tp_doc, (void *)PyDoc_STR("The descriptor of a directory, with users; see directory.c.")},
    {Py_tp_new, directory_new},
    {Py_tp_dealloc, directory_dealloc},
    {Py_tp_methods, directory_methods},
    {Py_tp_getset, directory_getset},
    {0, NULL},
};

PyType_Spec ls_directory_spec = {
    .name = "logstore._native.OpenDirectory",
    .basicsize = sizeof(DirectoryObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = directory_slots,
};
