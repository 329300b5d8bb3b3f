/* File: a descriptor of one file of a log, with pins.
 *
 * close() only marks the file closed; the release of the last pin closes the descriptor.  So the
 * descriptor of a thread in a system call without the GIL is never closed or reused.
 */
#include "module.h"

#include <errno.h>
#include <fcntl.h>

bool ls_file_is_verified(const FileObject *file, int64_t position)
{
    uint32_t mark = (uint32_t)position + 1;
    return file->verified != NULL && file->verified[mark * 2654435761u >> 20] == mark;
}

void ls_file_set_verified(FileObject *file, int64_t position)
{
    _Static_assert(LS_VERIFIED == 1 << (32 - 20), "the hash above gives 12 bits");
    if (file->verified == NULL) {
        file->verified = PyMem_Calloc(LS_VERIFIED, sizeof *file->verified);
    }
    if (file->verified != NULL) {      /* no memory: the checksum is computed again */
        uint32_t mark = (uint32_t)position + 1;
        file->verified[mark * 2654435761u >> 20] = mark;
    }
}

/* Drops all bytes and positions that were read before a cut.  A thread that uses the window drops it
 * itself: see read_close(). */
static void forget(FileObject *file)
{
    file->cuts++;
    if (!file->busy) {
        file->window.filled = 0;
    }
    PyMem_Free(file->verified);
    file->verified = NULL;
}

static void really_close(FileObject *file)
{
    ls_window_free(&file->window);
    PyMem_Free(file->verified);
    file->verified = NULL;
    if (file->fd >= 0) {
        /* The result can be ignored: bytes that must be durable were synced before, and there is no
         * guarantee for bytes that were not. */
        (void)file->io->close(file->io, file->fd);
        file->fd = -1;
    }
}

bool ls_file_pin(FileObject *file)
{
    if (!ls_check_fork(file->module, file->generation)) {
        return false;
    }
    if (file->closed) {
        PyErr_Format(file->module->closed_error, "%U is closed", file->path);
        return false;
    }
    file->pins++;
    return true;
}

void ls_file_unpin(FileObject *file)
{
    if (--file->pins == 0 && file->closed) {
        really_close(file);
    }
}

/* File(directory_fd, name, path, *, write=False, create=False, exclusive=False) */
static PyObject *file_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"directory", "name", "path", "write", "create", "exclusive", NULL};
    int directory, write = 0, create = 0, exclusive = 0;
    const char *name;
    PyObject *path;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "isU|$ppp:File", names, &directory, &name, &path,
                                     &write, &create, &exclusive)) {
        return NULL;
    }
    ls_module *module = ls_module_of_type(type);
    FileObject *self = module == NULL ? NULL : (FileObject *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->module = module;
    self->io = &ls_io_process;
    self->path = Py_NewRef(path);
    self->fd = -1;
    self->closed = true;
    self->generation = module->fork_generation;
    int flags = write ? O_RDWR : O_RDONLY;
    flags |= create ? O_CREAT : 0;
    flags |= exclusive ? O_EXCL : 0;
    int fd;
    int64_t size = 0;
    Py_BEGIN_ALLOW_THREADS             /* no other thread has this object yet */
    fd = self->io->open(self->io, directory, name, flags, 0600);
    if (fd >= 0) {
        size = self->io->size(self->io, fd);
    }
    Py_END_ALLOW_THREADS
    if (fd >= 0) {
        self->fd = fd;
        self->closed = false;
        ls_window_init(&self->window, self->io, fd, 8192);
    }
    if (fd < 0 || size < 0) {
        ls_raise(module, ls_fail_os((int)-(fd < 0 ? fd : size), 0, "open"), path, -1, -1);
        Py_DECREF(self);
        return NULL;
    }
    atomic_store_explicit(&self->end, size, memory_order_release);
    return (PyObject *)self;
}

static void file_dealloc(FileObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    really_close(self);
    Py_XDECREF(self->path);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *file_close(FileObject *self, PyObject *Py_UNUSED(unused))
{
    if (!self->closed) {
        self->closed = true;
        if (self->pins == 0) {
            really_close(self);
        }
    }
    Py_RETURN_NONE;
}

static PyObject *file_pread(FileObject *self, PyObject *args)
{
    Py_ssize_t size;
    long long position;
    if (!PyArg_ParseTuple(args, "nL:pread", &size, &position)) {
        return NULL;
    }
    if (size < 0 || position < 0) {
        return PyErr_Format(PyExc_ValueError, "cannot read %zd bytes at %lld", size, position);
    }
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, size);
    if (bytes == NULL || !ls_file_pin(self)) {
        Py_XDECREF(bytes);
        return NULL;
    }
    size_t got;
    ls_status status;
    Py_BEGIN_ALLOW_THREADS             /* pinned; no other thread has `bytes` */
    status = ls_read_at(self->io, self->fd, PyBytes_AS_STRING(bytes), (size_t)size, position, &got);
    Py_END_ALLOW_THREADS
    ls_file_unpin(self);
    if (status.code != LS_OK) {
        Py_DECREF(bytes);
        return ls_raise(self->module, status, self->path, -1, -1);
    }
    if ((Py_ssize_t)got < size) {
        _PyBytes_Resize(&bytes, (Py_ssize_t)got);
    }
    return bytes;
}

/* Like pread, for bytes in the page cache; None if fewer than `size` are there. */
static PyObject *file_pread_cached(FileObject *self, PyObject *args)
{
    Py_ssize_t size;
    long long position;
    if (!PyArg_ParseTuple(args, "nL:pread_cached", &size, &position)) {
        return NULL;
    }
    if (size < 0 || position < 0) {
        return PyErr_Format(PyExc_ValueError, "cannot read %zd bytes at %lld", size, position);
    }
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, size);
    if (bytes == NULL || !ls_file_pin(self)) {
        Py_XDECREF(bytes);
        return NULL;
    }
    int64_t got;
    if (size <= LS_GIL_BYTES) {
        got = self->io->pread_cached(self->io, self->fd, PyBytes_AS_STRING(bytes), (size_t)size,
                                     position);
    } else {
        Py_BEGIN_ALLOW_THREADS         /* pinned; `bytes` is ours alone */
        got = self->io->pread_cached(self->io, self->fd, PyBytes_AS_STRING(bytes), (size_t)size,
                                     position);
        Py_END_ALLOW_THREADS
    }
    ls_file_unpin(self);
    if (got == size) {
        return bytes;
    }
    Py_DECREF(bytes);
    if (got < 0 && got != -EAGAIN && got != -EINTR) {
        return ls_raise(self->module, ls_fail_os((int)-got, position, "read failed"), self->path,
                        -1, -1);
    }
    Py_RETURN_NONE;
}

/* pwrite(data, position) and append_at(data, position): the same shape of call. */
static PyObject *file_put(FileObject *self, PyObject *args,
                          ls_status (*call)(const ls_io *, int, const void *, size_t, int64_t))
{
    Py_buffer data;
    long long position;
    if (!PyArg_ParseTuple(args, "y*L", &data, &position)) {
        return NULL;
    }
    if (!ls_file_pin(self)) {
        PyBuffer_Release(&data);
        return NULL;
    }
    ls_status status;
    Py_BEGIN_ALLOW_THREADS             /* pinned; the exported buffer cannot be resized */
    status = call(self->io, self->fd, data.buf, (size_t)data.len, position);
    Py_END_ALLOW_THREADS
    ls_file_unpin(self);
    PyBuffer_Release(&data);
    if (status.code != LS_OK) {
        return ls_raise(self->module, status, self->path, -1, -1);
    }
    Py_RETURN_NONE;
}

static PyObject *file_pwrite(FileObject *self, PyObject *args)
{
    return file_put(self, args, ls_write_at);
}

static PyObject *file_append_at(FileObject *self, PyObject *args)
{
    return file_put(self, args, ls_append);
}

/* Runs `call` on the pinned descriptor without the GIL. */
static PyObject *file_call(FileObject *self, int (*call)(const ls_io *, int))
{
    if (!ls_file_pin(self)) {
        return NULL;
    }
    int result;
    Py_BEGIN_ALLOW_THREADS             /* pinned */
    result = call(self->io, self->fd);
    Py_END_ALLOW_THREADS
    ls_file_unpin(self);
    if (result < 0) {
        return ls_raise(self->module, ls_fail_os(-result, 0, "sync"), self->path, -1, -1);
    }
    Py_RETURN_NONE;
}

static PyObject *file_datasync(FileObject *self, PyObject *Py_UNUSED(unused))
{
    return file_call(self, self->io->datasync);
}

static PyObject *file_sync(FileObject *self, PyObject *Py_UNUSED(unused))
{
    return file_call(self, self->io->sync);
}

static PyObject *file_truncate(FileObject *self, PyObject *arg)
{
    long long size = PyLong_AsLongLong(arg);
    if (size < 0) {                    /* `end` must never be negative */
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "cannot cut to %lld", size);
    }
    if (!ls_file_pin(self)) {
        return NULL;
    }
    atomic_store_explicit(&self->end, size, memory_order_release);
    forget(self);
    int result;
    Py_BEGIN_ALLOW_THREADS             /* pinned */
    result = self->io->truncate(self->io, self->fd, size);
    Py_END_ALLOW_THREADS
    ls_file_unpin(self);
    if (result < 0) {
        return ls_raise(self->module, ls_fail_os(-result, size, "truncate"), self->path, -1, -1);
    }
    Py_RETURN_NONE;
}

static PyObject *file_size(FileObject *self, PyObject *Py_UNUSED(unused))
{
    if (!ls_file_pin(self)) {
        return NULL;
    }
    int64_t size = self->io->size(self->io, self->fd);
    ls_file_unpin(self);
    if (size < 0) {
        return ls_raise(self->module, ls_fail_os((int)-size, 0, "stat"), self->path, -1, -1);
    }
    return PyLong_FromLongLong(size);
}

/* allocate(position, size) and forget(position, size): the same shape of call. */
static PyObject *file_range(FileObject *self, PyObject *args,
                            int (*call)(const ls_io *, int, int64_t, int64_t), const char *what)
{
    long long position, size;
    if (!PyArg_ParseTuple(args, "LL", &position, &size)) {
        return NULL;
    }
    if (position < 0 || size < 0) {
        return PyErr_Format(PyExc_ValueError, "no range: %lld bytes at %lld", size, position);
    }
    if (!ls_file_pin(self)) {
        return NULL;
    }
    int result;
    Py_BEGIN_ALLOW_THREADS             /* pinned */
    result = call(self->io, self->fd, position, size);
    Py_END_ALLOW_THREADS
    ls_file_unpin(self);
    if (result < 0) {
        return ls_raise(self->module, ls_fail_os(-result, position, what), self->path, -1, -1);
    }
    Py_RETURN_NONE;
}

static PyObject *file_allocate(FileObject *self, PyObject *args)
{
    return file_range(self, args, self->io->allocate, "allocate");
}

static PyObject *file_forget(FileObject *self, PyObject *args)
{
    return file_range(self, args, self->io->forget, "forget");
}

static PyObject *file_fileno(FileObject *self, PyObject *Py_UNUSED(unused))
{
    if (!ls_file_pin(self)) {
        return NULL;
    }
    int fd = self->fd;
    ls_file_unpin(self);
    return PyLong_FromLong(fd);
}

static PyObject *file_get_end(FileObject *self, void *Py_UNUSED(closure))
{
    return PyLong_FromLongLong(atomic_load_explicit(&self->end, memory_order_acquire));
}

static int file_set_end(FileObject *self, PyObject *value, void *Py_UNUSED(closure))
{
    long long end = value == NULL ? -1 : PyLong_AsLongLong(value);
    if (end < 0) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_ValueError, "end must not be negative");
        }
        return -1;
    }
    if (end < atomic_load_explicit(&self->end, memory_order_relaxed)) {
        forget(self);
    }
    atomic_store_explicit(&self->end, end, memory_order_release);
    return 0;
}

static PyObject *file_get_closed(FileObject *self, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(self->closed);
}

static PyObject *file_get_path(FileObject *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(self->path);
}

static PyObject *file_repr(FileObject *self)
{
    return PyUnicode_FromFormat("<File %R%s>", self->path, self->closed ? " closed" : "");
}

static PyMethodDef file_methods[] = {
    {"close", (PyCFunction)file_close, METH_NOARGS,
     PyDoc_STR("close(): allow no new use; the last user closes the descriptor.")},
    {"pread", (PyCFunction)file_pread, METH_VARARGS,
     PyDoc_STR("pread(size, position) -> bytes, fewer only at the end of the file")},
    {"pread_cached", (PyCFunction)file_pread_cached, METH_VARARGS,
     PyDoc_STR("pread_cached(size, position) -> bytes, or None unless all are in the page cache")},
    {"pwrite", (PyCFunction)file_pwrite, METH_VARARGS,
     PyDoc_STR("pwrite(data, position): write in place; after a failure the bytes from position on "
               "are the old ones, the new ones or some of both")},
    {"append_at", (PyCFunction)file_append_at, METH_VARARGS,
     PyDoc_STR("append_at(data, position): write all of it, or truncate the file to position")},
    {"datasync", (PyCFunction)file_datasync, METH_NOARGS, PyDoc_STR("fdatasync")},
    {"sync", (PyCFunction)file_sync, METH_NOARGS, PyDoc_STR("fsync")},
    {"truncate", (PyCFunction)file_truncate, METH_O, PyDoc_STR("truncate(size)")},
    {"size", (PyCFunction)file_size, METH_NOARGS, PyDoc_STR("size() of the file now")},
    {"allocate", (PyCFunction)file_allocate, METH_VARARGS,
     PyDoc_STR("allocate(position, size): room on the device, and a file at least that long")},
    {"forget", (PyCFunction)file_forget, METH_VARARGS,
     PyDoc_STR("forget(position, size): the next read of clean pages is from the device")},
    {"fileno", (PyCFunction)file_fileno, METH_NOARGS,
     PyDoc_STR("fileno(): good until close; for locks")},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef file_getset[] = {
    {"end", (getter)file_get_end, (setter)file_set_end,
     PyDoc_STR("how far readers may go: whole batches below"), NULL},
    {"closed", (getter)file_get_closed, NULL, NULL, NULL},
    {"path", (getter)file_get_path, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot file_slots[] = {
    {Py_tp_doc, (void *)PyDoc_STR("A descriptor of one file of a log; see file.c.")},
    {Py_tp_new, file_new},
    {Py_tp_dealloc, file_dealloc},
    {Py_tp_repr, file_repr},
    {Py_tp_methods, file_methods},
    {Py_tp_getset, file_getset},
    {0, NULL},
};

PyType_Spec ls_file_spec = {
    .name = "logstore._native.File",
    .basicsize = sizeof(FileObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = file_slots,
};
