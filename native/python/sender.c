/* Sender: the quick way from a producer's send() into the batch of the right partition.
 *
 * It is used for a topic that was used before, bytes, and Kafka's choice of the partition.  In every
 * other case the subclass's _send() is called with the same arguments: the first record of a topic or
 * partition, serializers, callbacks, a full buffer, and wrong arguments, for which it raises.
 *
 * A record is added and its Delivery is made without releasing the GIL, so that the index in the
 * Delivery is that of the record if several threads send.
 */
#include "module.h"
#include "murmur2.h"

#include <structmember.h>

/* ---- Delivery: one record of a pack ---- */

/* Not tracked by the garbage collector: a program may hold a million of them.  No reference cycle is
 * possible: a finished pack drops its callbacks, and its error has no frames. */
typedef struct {
    PyObject_HEAD
    ls_module *module;
    PyObject *pack;                    /* strong */
    Py_ssize_t index;                  /* of the record in its pack */
} DeliveryObject;

/* Most Deliveries are dropped at once: the module keeps the memory of this many for the next ones. */
enum { SPARE_DELIVERIES = 64 };

static PyObject *make_delivery(ls_module *module, PyTypeObject *type, PyObject *pack,
                               Py_ssize_t index)
{
    DeliveryObject *self;
    if (module->spare_count > 0 && type->tp_basicsize == (Py_ssize_t)sizeof *self) {
        void *memory = module->spare_deliveries[--module->spare_count];
        self = (DeliveryObject *)PyObject_Init(memory, type);
    } else {
        self = (DeliveryObject *)type->tp_alloc(type, 0);
    }
    if (self == NULL) {
        return NULL;
    }
    self->module = module;
    self->pack = Py_NewRef(pack);
    self->index = index;
    return (PyObject *)self;
}

void ls_deliveries_free(ls_module *module)
{
    while (module->spare_count > 0) {
        PyObject_Free(module->spare_deliveries[--module->spare_count]);
    }
}

static PyObject *delivery_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *pack;
    Py_ssize_t index;
    if (kwargs != NULL && PyDict_GET_SIZE(kwargs) != 0) {
        PyErr_SetString(PyExc_TypeError, "Delivery(pack, index)");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "On:Delivery", &pack, &index)) {
        return NULL;
    }
    ls_module *module = ls_module_of_type(type);
    return module == NULL ? NULL : make_delivery(module, type, pack, index);
}

static void delivery_dealloc(DeliveryObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    ls_module *module = self->module;
    Py_XDECREF(self->pack);
    bool plain = type->tp_basicsize == (Py_ssize_t)sizeof *self && type->tp_free == PyObject_Free;
    if (plain && module != NULL && module->spare_count < SPARE_DELIVERIES) {
        module->spare_deliveries[module->spare_count++] = self;
    } else {
        type->tp_free(self);
    }
    Py_DECREF(type);
}

static PyMemberDef delivery_members[] = {
    {"_pack", T_OBJECT_EX, offsetof(DeliveryObject, pack), READONLY, NULL},
    {"_index", T_PYSSIZET, offsetof(DeliveryObject, index), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot delivery_slots[] = {
    {Py_tp_doc, (void *)PyDoc_STR("One record of a pack; see sender.c.")},
    {Py_tp_new, delivery_new},
    {Py_tp_dealloc, delivery_dealloc},
    {Py_tp_members, delivery_members},
    {0, NULL},
};

PyType_Spec ls_delivery_spec = {
    .name = "logstore._native.Delivery",
    .basicsize = sizeof(DeliveryObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = delivery_slots,
};

/* ---- Route: the lanes of a topic ---- */

typedef struct {
    PyObject_HEAD
    PyObject *lanes;                   /* list: a Builder for each partition, or None; strong */
    long long left;                    /* bytes until records without a key get another partition */
    int current;                       /* their partition until then */
    char hashed;                       /* the partitioner is Kafka's, and may be done here */
} RouteObject;

static PyObject *route_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"lanes", "hashed", NULL};
    PyObject *lanes;
    int hashed;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!p:Route", names, &PyList_Type, &lanes,
                                     &hashed)) {
        return NULL;
    }
    RouteObject *self = (RouteObject *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->lanes = Py_NewRef(lanes);
        self->hashed = (char)hashed;
    }
    return (PyObject *)self;
}

static int route_traverse(RouteObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->lanes);
    return 0;
}

static int route_clear(RouteObject *self)
{
    Py_CLEAR(self->lanes);
    return 0;
}

static void route_dealloc(RouteObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    route_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMemberDef route_members[] = {
    {"lanes", T_OBJECT_EX, offsetof(RouteObject, lanes), READONLY, NULL},
    {"left", T_LONGLONG, offsetof(RouteObject, left), 0, NULL},
    {"current", T_INT, offsetof(RouteObject, current), 0, NULL},
    {"hashed", T_BOOL, offsetof(RouteObject, hashed), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot route_slots[] = {
    {Py_tp_doc, (void *)PyDoc_STR("Where the records of a topic go; see sender.c.")},
    {Py_tp_new, route_new},
    {Py_tp_dealloc, route_dealloc},
    {Py_tp_traverse, route_traverse},
    {Py_tp_clear, route_clear},
    {Py_tp_members, route_members},
    {0, NULL},
};

PyType_Spec ls_route_spec = {
    .name = "logstore._native.Route",
    .basicsize = sizeof(RouteObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = route_slots,
};

/* ---- Sender ---- */

typedef struct {
    PyObject_HEAD
    ls_module *module;
    PyObject *routes;                  /* dict: topic -> Route; strong */
    PyTypeObject *delivery;            /* what send() returns; strong */
    PyObject *last_topic;              /* of the last send(), and where it led to; strong, or NULL */
    RouteObject *last_route;
    PyTypeObject *lane_type;           /* a type whose objects are builders; only compared with */
    long long held;                    /* bytes sent since _send() computed the bytes in memory */
    long long held_max;                /* from this on, _send() is called and computes them again */
    char quick;                        /* nothing stands between the user's bytes and the batch */
    char idle;                         /* no thread sends lingering records: _send() starts one */
} SenderObject;

static PyObject *sender_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    ls_module *module = ls_module_of_type(type);
    SenderObject *self = module == NULL ? NULL : (SenderObject *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->module = module;
    self->delivery = (PyTypeObject *)Py_NewRef((PyObject *)module->delivery_type);
    self->idle = 1;
    self->routes = PyDict_New();
    if (self->routes == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int sender_traverse(SenderObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->routes);
    Py_VISIT(self->delivery);
    Py_VISIT(self->last_route);
    return 0;
}

static void forget_last(SenderObject *self)
{
    Py_CLEAR(self->last_topic);
    Py_CLEAR(self->last_route);
}

static int sender_clear(SenderObject *self)
{
    Py_CLEAR(self->routes);
    Py_CLEAR(self->delivery);
    forget_last(self);
    return 0;
}

static void sender_dealloc(SenderObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    sender_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *send_slowly(SenderObject *self, PyObject *const *args, Py_ssize_t count,
                             PyObject *names)
{
    PyObject *method = PyObject_GetAttr((PyObject *)self, self->module->name_send);
    if (method == NULL) {
        return NULL;
    }
    PyObject *result = PyObject_Vectorcall(method, args, (size_t)count, names);
    Py_DECREF(method);
    return result;
}

/* Returns the lane of a record by Kafka's rules, borrowed; NULL if _send() has to choose it. */
static BuilderObject *lane_for(SenderObject *self, RouteObject *route, PyObject *value, PyObject *key,
                               PyObject *partition)
{
    Py_ssize_t lanes = PyList_GET_SIZE(route->lanes);
    Py_ssize_t number;
    if (partition != NULL && partition != Py_None) {
        if (!PyLong_CheckExact(partition)) {
            return NULL;
        }
        number = PyLong_AsSsize_t(partition);
        if (number < 0 || number >= lanes) {
            PyErr_Clear();
            return NULL;
        }
    } else if (!route->hashed || lanes == 0) {
        return NULL;
    } else if (key != NULL && key != Py_None) {
        uint32_t hash = ls_murmur2(PyBytes_AS_STRING(key), (size_t)PyBytes_GET_SIZE(key));
        number = (Py_ssize_t)((hash & 0x7fffffff) % (uint32_t)lanes);
    } else {
        number = route->current;
        if (route->left <= 0 || number < 0 || number >= lanes) {
            return NULL;
        }
        Py_ssize_t size = PyBytes_GET_SIZE(value);
        route->left -= size > 0 ? size : 1;
    }
    PyObject *lane = PyList_GET_ITEM(route->lanes, number);
    if (Py_TYPE(lane) != self->lane_type) {
        if (!PyObject_TypeCheck(lane, self->module->builder_type)) {
            return NULL;
        }
        self->lane_type = Py_TYPE(lane);
    }
    return (BuilderObject *)lane;
}

/* The route of a topic, borrowed; NULL without an exception when there is none yet. */
static RouteObject *route_of(SenderObject *self, PyObject *topic)
{
    if (topic == self->last_topic) {
        return self->last_route;
    }
    PyObject *route = PyDict_GetItemWithError(self->routes, topic);
    if (route == NULL || !PyObject_TypeCheck(route, self->module->route_type)) {
        return NULL;
    }
    Py_XSETREF(self->last_topic, Py_NewRef(topic));
    Py_XSETREF(self->last_route, (RouteObject *)Py_NewRef(route));
    return (RouteObject *)route;
}

/* send(topic, value, *, key=None, headers=(), timestamp=None, partition=None, ...) -> Delivery */
static PyObject *sender_send(SenderObject *self, PyObject *const *args, Py_ssize_t count,
                             PyObject *names)
{
    PyObject *fields[5] = {NULL, NULL, NULL, NULL, NULL};   /* as module->keywords; borrowed */
    ls_module *module = self->module;
    if (!self->quick || self->idle || count != 2 || self->held >= self->held_max ||
        !PyUnicode_CheckExact(args[0]) || !PyBytes_CheckExact(args[1])) {
        return send_slowly(self, args, count, names);
    }
    Py_ssize_t named = names == NULL ? 0 : PyTuple_GET_SIZE(names);
    for (Py_ssize_t i = 0; i < named; i++) {
        PyObject *name = PyTuple_GET_ITEM(names, i);
        int slot = 4;
        while (slot > 0 && name != module->keywords[slot]) {
            slot--;
        }
        if (slot == 0) {
            return send_slowly(self, args, count, names);
        }
        fields[slot] = args[count + i];
    }
    PyObject *value = args[1], *key = fields[1];
    if (key != NULL && key != Py_None && !PyBytes_CheckExact(key)) {
        return send_slowly(self, args, count, names);
    }
    RouteObject *route = route_of(self, args[0]);
    if (route == NULL && PyErr_Occurred()) {
        return NULL;
    }
    BuilderObject *lane = route == NULL ? NULL : lane_for(self, route, value, key, fields[4]);
    if (lane == NULL || lane->pack == NULL) {
        return send_slowly(self, args, count, names);
    }
    Py_INCREF(lane);                   /* a hand-over lets other threads in */
    PyObject *delivery = NULL;
    int64_t timestamp = LS_NO_TIMESTAMP;
    if (ls_builder_usable(lane) &&
        (fields[3] == NULL || ls_timestamp_from(fields[3], &timestamp)) &&
        ls_builder_append(lane, value, key, fields[2], timestamp)) {
        self->held += (long long)PyBytes_GET_SIZE(value) + 32;
        delivery = make_delivery(module, self->delivery, lane->pack,
                                 (Py_ssize_t)lane->arena.records - 1);
    }
    Py_DECREF(lane);
    return delivery;
}

/* put(lane, value, key, headers, timestamp) -> Delivery: the last step of send(), for _send(). */
static PyObject *sender_put(SenderObject *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 5 || !PyObject_TypeCheck(args[0], self->module->builder_type)) {
        PyErr_SetString(PyExc_TypeError, "_put(lane, value, key, headers, timestamp)");
        return NULL;
    }
    BuilderObject *lane = (BuilderObject *)args[0];
    int64_t timestamp = LS_NO_TIMESTAMP;
    if (!ls_builder_usable(lane) || !ls_timestamp_from(args[4], &timestamp) ||
        !ls_builder_append(lane, args[1], args[2], args[3], timestamp)) {
        return NULL;
    }
    if (lane->pack == NULL) {
        PyErr_SetString(PyExc_SystemError, "a lane without a pack");
        return NULL;
    }
    return make_delivery(self->module, self->delivery, lane->pack,
                         (Py_ssize_t)lane->arena.records - 1);
}

/* set_route(topic, route): sets the route of a topic. */
static PyObject *sender_set_route(SenderObject *self, PyObject *args)
{
    PyObject *topic, *route;
    if (!PyArg_ParseTuple(args, "UO!:_set_route", &topic, self->module->route_type, &route) ||
        PyDict_SetItem(self->routes, topic, route) < 0) {
        return NULL;
    }
    forget_last(self);
    Py_RETURN_NONE;
}

static PyMethodDef sender_methods[] = {
    {"send", (PyCFunction)(void (*)(void))sender_send, METH_FASTCALL | METH_KEYWORDS,
     PyDoc_STR("send($self, topic, value, *, key=None, headers=(), timestamp=None, partition=None,"
               " callback=None, dedupe_id=None)\n--\n\n"
               "Send a record; return a Delivery, which has the offset once the record is written.\n\n"
               "Returns at once, unless the buffer has to be written first.  `callback` is called "
               "with the\nDelivery when it is done.  `dedupe_id`: see Producer.")},
    {"_set_route", (PyCFunction)sender_set_route, METH_VARARGS,
     PyDoc_STR("Set the Route of the records of a topic.")},
    {"_put", (PyCFunction)(void (*)(void))sender_put, METH_FASTCALL,
     PyDoc_STR("Add a record to a lane.")},
    {NULL, NULL, 0, NULL},
};

static PyObject *sender_get_delivery(SenderObject *self, void *Py_UNUSED(closure))
{
    return Py_NewRef((PyObject *)self->delivery);
}

static int sender_set_delivery(SenderObject *self, PyObject *type, void *Py_UNUSED(closure))
{
    if (type == NULL || !PyType_Check(type) ||
        !PyType_IsSubtype((PyTypeObject *)type, self->module->delivery_type) ||
        ((PyTypeObject *)type)->tp_basicsize != (Py_ssize_t)sizeof(DeliveryObject)) {
        PyErr_SetString(PyExc_TypeError, "a subclass of Delivery without fields of its own");
        return -1;
    }
    Py_INCREF(type);
    Py_SETREF(self->delivery, (PyTypeObject *)type);
    return 0;
}

static PyGetSetDef sender_getset[] = {
    {"_delivery", (getter)sender_get_delivery, (setter)sender_set_delivery,
     PyDoc_STR("the type of what send() returns"), NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef sender_members[] = {
    {"_routes", T_OBJECT_EX, offsetof(SenderObject, routes), READONLY, NULL},
    {"_held", T_LONGLONG, offsetof(SenderObject, held), 0, NULL},
    {"_held_max", T_LONGLONG, offsetof(SenderObject, held_max), 0, NULL},
    {"_quick", T_BOOL, offsetof(SenderObject, quick), 0, NULL},
    {"_idle", T_BOOL, offsetof(SenderObject, idle), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot sender_slots[] = {
    {Py_tp_doc, (void *)PyDoc_STR("The quick way into a batch; see sender.c.")},
    {Py_tp_new, sender_new},
    {Py_tp_dealloc, sender_dealloc},
    {Py_tp_traverse, sender_traverse},
    {Py_tp_clear, sender_clear},
    {Py_tp_methods, sender_methods},
    {Py_tp_members, sender_members},
    {Py_tp_getset, sender_getset},
    {0, NULL},
};

PyType_Spec ls_sender_spec = {
    .name = "logstore._native.Sender",
    .basicsize = sizeof(SenderObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = sender_slots,
};
