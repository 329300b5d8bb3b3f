/* Transactions: which batches of a log belong to aborted transactions. */
#include "compaction.h"

/* Transactions(entries) */
static PyObject *transactions_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"entries", NULL};
    Py_buffer entries;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "y*:Transactions", names, &entries)) {
        return NULL;
    }
    ls_module *module = ls_module_of_type(type);
    TransactionsObject *self =
        module == NULL ? NULL : (TransactionsObject *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->module = module;
        if (ls_transactions_init(&self->transactions, entries.buf, (size_t)entries.len) != LS_OK) {
            Py_CLEAR(self);
            PyErr_NoMemory();
        }
    }
    PyBuffer_Release(&entries);
    return (PyObject *)self;
}

static void transactions_dealloc(TransactionsObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    ls_transactions_free(&self->transactions);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyType_Slot transactions_slots[] = {
    {Py_tp_doc, (void *)PyDoc_STR("Which batches belong to aborted transactions; see cleaner.h.")},
    {Py_tp_new, transactions_new},
    {Py_tp_dealloc, transactions_dealloc},
    {0, NULL},
};

PyType_Spec ls_transactions_spec = {
    .name = "logstore._native.Transactions",
    .basicsize = sizeof(TransactionsObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = transactions_slots,
};
