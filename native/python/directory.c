/* OpenDirectory: the descriptor of a directory, with users; and the functions on the entries of one.
 *
 * ``with directory as fd`` counts one more user.  close() only marks it closed; the last user closes
 * the descriptor.  Users are counted in C, where no signal handler runs: KeyboardInterrupt is raised
 * before a user is counted, or inside of the ``with`` block that uncounts it.  In Python it could be
 * raised between the two.
 *
 * Meant to be a base class.  Thread rule: the GIL guards the counts.
 */
#include "module.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>

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
     PyDoc_STR("close(): allow no new use; the last user closes the descriptor.")},
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

/* ---- the entries of a directory ---- */

static PyObject *os_result(PyObject *self, int result, const char *name)
{
    if (result >= 0) {
        Py_RETURN_NONE;
    }
    PyObject *path = PyUnicode_DecodeFSDefault(name);
    if (path != NULL) {
        ls_raise(PyModule_GetState(self), ls_fail_os(-result, 0, "directory"), path, -1, -1);
        Py_DECREF(path);
    }
    return NULL;
}

static PyObject *native_rename(PyObject *self, PyObject *args)
{
    int directory, result;
    const char *source, *target;
    if (!PyArg_ParseTuple(args, "iss:rename", &directory, &source, &target)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS             /* the arguments are held by `args` */
    result = ls_io_process.rename(&ls_io_process, directory, source, target);
    Py_END_ALLOW_THREADS
    return os_result(self, result, source);
}

static PyObject *native_unlink(PyObject *self, PyObject *args)
{
    int directory, result;
    const char *name;
    if (!PyArg_ParseTuple(args, "is:unlink", &directory, &name)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS             /* the arguments are held by `args` */
    result = ls_io_process.unlink(&ls_io_process, directory, name);
    Py_END_ALLOW_THREADS
    return os_result(self, result, name);
}

static PyObject *native_make_directory(PyObject *self, PyObject *args)
{
    int directory, result;
    const char *name;
    if (!PyArg_ParseTuple(args, "is:make_directory", &directory, &name)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS             /* the arguments are held by `args` */
    result = ls_io_process.mkdir(&ls_io_process, directory, name, 0700);
    Py_END_ALLOW_THREADS
    return os_result(self, result, name);
}

static PyObject *native_remove_directory(PyObject *self, PyObject *args)
{
    int directory, result;
    const char *name;
    if (!PyArg_ParseTuple(args, "is:remove_directory", &directory, &name)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS             /* the arguments are held by `args` */
    result = ls_io_process.rmdir(&ls_io_process, directory, name);
    Py_END_ALLOW_THREADS
    return os_result(self, result, name);
}

static PyObject *native_sync_directory(PyObject *self, PyObject *arg)
{
    int directory = (int)PyLong_AsLong(arg);
    if (directory == -1 && PyErr_Occurred()) {
        return NULL;
    }
    int result;
    Py_BEGIN_ALLOW_THREADS             /* the caller keeps the directory open */
    result = ls_io_process.sync(&ls_io_process, directory);
    Py_END_ALLOW_THREADS
    return os_result(self, result, "directory");
}

/* Names one after another, each with its end, gathered without the GIL. */
typedef struct {
    char *text;
    size_t size, capacity;
    bool directories_only;
} name_list;

static int add_name(void *context, const char *name, bool is_directory)
{
    name_list *names = context;
    if (names->directories_only && !is_directory) {
        return 0;
    }
    size_t size = strlen(name) + 1;
    if (names->capacity - names->size < size) {
        size_t capacity = names->capacity * 2 + size + 1024;
        char *text = PyMem_RawRealloc(names->text, capacity);
        if (text == NULL) {
            return -ENOMEM;
        }
        names->text = text;
        names->capacity = capacity;
    }
    memcpy(names->text + names->size, name, size);
    names->size += size;
    return 0;
}

static PyObject *native_list_directory(PyObject *self, PyObject *args)
{
    int directory, directories_only = 0, result;
    if (!PyArg_ParseTuple(args, "i|p:list_directory", &directory, &directories_only)) {
        return NULL;
    }
    name_list names = {.directories_only = directories_only != 0};
    Py_BEGIN_ALLOW_THREADS             /* the caller keeps the directory open; `names` is local */
    result = ls_io_process.list(&ls_io_process, directory, add_name, &names);
    Py_END_ALLOW_THREADS
    PyObject *list = result < 0 ? os_result(self, result, "directory") : PyList_New(0);
    for (size_t at = 0; list != NULL && at < names.size; at += strlen(names.text + at) + 1) {
        PyObject *name = PyUnicode_DecodeFSDefault(names.text + at);
        if (name == NULL || PyList_Append(list, name) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(name);
    }
    PyMem_RawFree(names.text);
    return list;
}

/* stat(directory, name) -> (regular, directory, size, accessed_ns, modified_ns) */
static PyObject *native_stat(PyObject *self, PyObject *args)
{
    int directory, result;
    const char *name;
    if (!PyArg_ParseTuple(args, "is:stat", &directory, &name)) {
        return NULL;
    }
    ls_file_status status;
    Py_BEGIN_ALLOW_THREADS             /* the arguments are held by `args` */
    result = ls_io_process.stat(&ls_io_process, directory, name, &status);
    Py_END_ALLOW_THREADS
    if (result < 0) {
        return os_result(self, result, name);
    }
    return Py_BuildValue("(NNLLL)", PyBool_FromLong(status.regular),
                         PyBool_FromLong(status.directory), (long long)status.size,
                         (long long)status.accessed_ns, (long long)status.modified_ns);
}

static PyObject *native_set_times(PyObject *self, PyObject *args)
{
    int directory, result;
    const char *name;
    long long accessed_ns, modified_ns;
    if (!PyArg_ParseTuple(args, "isLL:set_times", &directory, &name, &accessed_ns, &modified_ns)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS             /* the arguments are held by `args` */
    result = ls_io_process.set_times(&ls_io_process, directory, name, accessed_ns, modified_ns);
    Py_END_ALLOW_THREADS
    return os_result(self, result, name);
}

/* read_file(directory, name, path, max_bytes) -> at most the first max_bytes bytes.  Reads without the
 * window of a File.  A longer file is cut without an error. */
static PyObject *native_read_file(PyObject *self, PyObject *args)
{
    int directory;
    const char *name;
    PyObject *path;
    long long size_max;
    if (!PyArg_ParseTuple(args, "isUL:read_file", &directory, &name, &path, &size_max)) {
        return NULL;
    }
    if (size_max < 0) {
        return PyErr_Format(PyExc_ValueError, "cannot read %lld bytes", size_max);
    }
    const ls_io *io = &ls_io_process;
    int fd;
    int64_t size = 0;
    Py_BEGIN_ALLOW_THREADS             /* the arguments are held by `args` */
    fd = io->open(io, directory, name, O_RDONLY, 0);
    if (fd >= 0) {
        size = io->size(io, fd);
    }
    Py_END_ALLOW_THREADS
    if (fd < 0) {
        return ls_raise(PyModule_GetState(self), ls_fail_os(-fd, 0, "open"), path, -1, -1);
    }
    ls_status status = size < 0 ? ls_fail_os((int)-size, 0, "stat") : ls_ok();
    size = size < size_max ? size : size_max;
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, size < 0 ? 0 : (Py_ssize_t)size);
    size_t got = 0;
    Py_BEGIN_ALLOW_THREADS             /* no other thread has `fd` or `bytes` */
    if (bytes != NULL && status.code == LS_OK) {
        status = ls_read_at(io, fd, PyBytes_AS_STRING(bytes), (size_t)size, 0, &got);
    }
    (void)io->close(io, fd);
    Py_END_ALLOW_THREADS
    if (bytes != NULL && status.code != LS_OK) {
        Py_CLEAR(bytes);
        ls_raise(PyModule_GetState(self), status, path, -1, -1);
    } else if (bytes != NULL && (int64_t)got < size) {
        _PyBytes_Resize(&bytes, (Py_ssize_t)got);
    }
    return bytes;
}

PyMethodDef ls_directory_functions[] = {
    {"rename", native_rename, METH_VARARGS, PyDoc_STR("rename(directory, source, target)")},
    {"unlink", native_unlink, METH_VARARGS, PyDoc_STR("unlink(directory, name)")},
    {"make_directory", native_make_directory, METH_VARARGS,
     PyDoc_STR("make_directory(directory, name); directory -1: name is a path")},
    {"remove_directory", native_remove_directory, METH_VARARGS,
     PyDoc_STR("remove_directory(directory, name)")},
    {"sync_directory", native_sync_directory, METH_O, PyDoc_STR("sync_directory(directory)")},
    {"list_directory", native_list_directory, METH_VARARGS,
     PyDoc_STR("list_directory(directory, directories_only=False) -> names")},
    {"stat", native_stat, METH_VARARGS,
     PyDoc_STR("stat(directory, name) -> (regular, directory, size, accessed_ns, modified_ns);\n"
               "name '' is the directory itself; directory -1: name is a path")},
    {"set_times", native_set_times, METH_VARARGS,
     PyDoc_STR("set_times(directory, name, accessed_ns, modified_ns)")},
    {"read_file", native_read_file, METH_VARARGS,
     PyDoc_STR("read_file(directory, name, path, max_bytes) -> bytes, the first max_bytes at most")},
    {NULL, NULL, 0, NULL},
};
