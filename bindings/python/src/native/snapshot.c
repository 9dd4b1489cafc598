/* Snapshots: what the store held at one moment. */
#include "native.h"

#include <pthread.h>
#include <string.h>

PyTypeObject *native_snapshot_type;

/* ---------------------------------------------------------------- use */

bool native_snapshot_usable(const SnapshotObject *self)
{
    if (!self->handle) {
        native_raise_closed("the snapshot");
        return false;
    }
    if (self->generation != native_fork_generation) {
        native_raise_new(RST_ERR_FORKED, NULL,
                         "the snapshot was opened before this process was forked: open a new one "
                         "here");
        return false;
    }
    return true;
}

rst_snapshot *native_snapshot_enter(SnapshotObject *self)
{
    if (!native_snapshot_usable(self)) {
        return NULL;
    }
    if (pthread_mutex_trylock(&self->lock) != 0) {
        Py_BEGIN_ALLOW_THREADS pthread_mutex_lock(&self->lock);
        Py_END_ALLOW_THREADS if (!native_snapshot_usable(self))
        { /* it was closed meanwhile */
            pthread_mutex_unlock(&self->lock);
            return NULL;
        }
    }
    return self->handle;
}

void native_snapshot_leave(SnapshotObject *self)
{
    pthread_mutex_unlock(&self->lock);
}

/* With nobody in it and no arrays out. */
static void close_now(SnapshotObject *self)
{
    rst_snapshot *handle = self->handle;
    self->handle = NULL;
    rst_snapshot_close(handle);
}

void native_snapshot_array_gone(SnapshotObject *self)
{
    self->arrays--;
    if (self->abandoned && self->arrays == 0 && self->handle &&
        pthread_mutex_trylock(&self->lock) == 0) { /* else its last reference closes it */
        close_now(self);
        pthread_mutex_unlock(&self->lock);
    }
}

/* ---------------------------------------------------------------- open and close */

static PyObject *snapshot_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"store", NULL};
    StoreObject *store;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!:Snapshot", names, native_store_type,
                                     &store)) {
        return NULL;
    }
    SnapshotObject *self = (SnapshotObject *)type->tp_alloc(type, 0);
    if (!self) {
        return NULL;
    }
    pthread_mutex_init(&self->lock, NULL);
    rst_store *handle = native_store_enter(store);
    rst_error error;
    int code = handle ? rst_snapshot_open(handle, &self->handle, &error) : 0;
    if (handle) {
        native_store_leave(store);
    }
    if (!handle || code) {
        Py_DECREF(self);
        return handle ? native_raise(&error) : NULL;
    }
    self->store = (StoreObject *)Py_NewRef(store);
    self->generation = store->generation;
    self->id = rst_snapshot_id(self->handle);
    return (PyObject *)self;
}

static void snapshot_dealloc(PyObject *object)
{
    SnapshotObject *self = (SnapshotObject *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (self->handle) { /* arrays hold a reference, so there are none */
        close_now(self);
    }
    pthread_mutex_destroy(&self->lock);
    Py_XDECREF(self->store);
    type->tp_free(object);
    Py_DECREF(type);
}

/* An array that a loop variable still holds is the usual reason: say so. */
static bool no_arrays_out(const SnapshotObject *self)
{
    if (self->arrays == 0) {
        return true;
    }
    native_raise_new(RST_ERR_BUSY, NULL,
                     "%zd array%s of the snapshot %s still in use: delete %s (a loop's variable "
                     "also holds one), or copy what is to stay",
                     self->arrays, self->arrays == 1 ? "" : "s", self->arrays == 1 ? "is" : "are",
                     self->arrays == 1 ? "it" : "them");
    return false;
}

PyDoc_STRVAR(close_doc, "close($self, /)\n--\n\n"
                        "End the snapshot; closing twice is fine.\n\n"
                        "BusyError (a BufferError) while arrays or tensors of it are alive.");

static PyObject *snapshot_close(PyObject *object, PyObject *unused)
{
    (void)unused;
    SnapshotObject *self = (SnapshotObject *)object;
    if (!self->handle) {
        Py_RETURN_NONE;
    }
    if (self->generation != native_fork_generation) {
        close_now(self); /* only its memory: what it read is the parent's */
        Py_RETURN_NONE;
    }
    if (!native_snapshot_enter(self)) {
        return NULL;
    }
    bool fine = no_arrays_out(self);
    if (fine) {
        close_now(self);
    }
    native_snapshot_leave(self);
    return fine ? Py_NewRef(Py_None) : NULL;
}

static PyObject *snapshot_enter(PyObject *object, PyObject *unused)
{
    (void)unused;
    return native_snapshot_usable((SnapshotObject *)object) ? Py_NewRef(object) : NULL;
}

/* An exception's traceback may hold arrays: then it is what the caller should see, and the snapshot
 * closes when they go. */
static PyObject *snapshot_exit(PyObject *object, PyObject *args)
{
    SnapshotObject *self = (SnapshotObject *)object;
    bool failed = PyTuple_GET_SIZE(args) > 0 && PyTuple_GET_ITEM(args, 0) != Py_None;
    if (failed && self->arrays > 0) {
        self->abandoned = true;
        Py_RETURN_NONE;
    }
    return snapshot_close(object, NULL);
}

/* ---------------------------------------------------------------- sessions */

PyObject *native_session_tuple(const rst_session *s)
{
    const char *status = native_status_name(s->outcome.status);
    return Py_BuildValue(
        "(Ny#sKIIzNNNKKKNNLL)", native_text(s->id, s->id_size), (const char *)s->key,
        (Py_ssize_t)RST_KEY_SIZE, s->state == RST_STATE_SEALED ? "sealed" : "open", s->sequence,
        s->turn_count, s->topk, status, native_float_or_none(s->outcome.reward),
        native_int_or_none(s->outcome.group_index, RST_NO_INDEX),
        native_int_or_none(s->outcome.index, RST_NO_INDEX), s->generated_count, s->sequence_count,
        s->value_size, native_int_or_none(s->weight_version_min, RST_NO_VERSION),
        native_int_or_none(s->weight_version_max, RST_NO_VERSION), s->created_ns, s->changed_ns);
}

/* The session, None at an end, or an exception. */
static PyObject *session_or_none(int code, const rst_session *session, const rst_error *error)
{
    if (code == RST_ERR_NOT_FOUND) {
        Py_RETURN_NONE;
    }
    return code ? native_raise(error) : native_session_tuple(session);
}

PyDoc_STRVAR(get_doc, "_get($self, session, /)\n--\n\n"
                      "The fields of rollstore.SessionInfo, in their order. NotFoundError.");

static PyObject *snapshot_get(PyObject *object, PyObject *argument)
{
    SnapshotObject *self = (SnapshotObject *)object;
    native_bytes id;
    if (!native_bytes_from(argument, "session", &id)) {
        return NULL;
    }
    PyObject *result = NULL;
    rst_snapshot *handle = native_snapshot_enter(self);
    if (handle) {
        rst_session session;
        rst_error error;
        int code = rst_session_get(handle, id.data, id.size, &session, &error);
        result = code ? native_raise(&error) : native_session_tuple(&session);
        native_snapshot_leave(self);
    }
    native_bytes_clear(&id);
    return result;
}

PyDoc_STRVAR(next_doc, "_next($self, key, /)\n--\n\n"
                       "The first session after a key (None: the first of all), or None.");

static PyObject *snapshot_next(PyObject *object, PyObject *argument)
{
    SnapshotObject *self = (SnapshotObject *)object;
    const uint8_t *key = NULL;
    if (argument != Py_None) {
        if (!PyBytes_Check(argument) || PyBytes_GET_SIZE(argument) != RST_KEY_SIZE) {
            PyErr_SetString(PyExc_TypeError, "key: 16 bytes are needed, or None");
            return NULL;
        }
        key = (const uint8_t *)PyBytes_AS_STRING(argument);
    }
    rst_snapshot *handle = native_snapshot_enter(self);
    if (!handle) {
        return NULL;
    }
    rst_session session;
    rst_error error;
    int code = rst_session_next(handle, key, &session, &error);
    PyObject *result = session_or_none(code, &session, &error);
    native_snapshot_leave(self);
    return result;
}

PyDoc_STRVAR(next_ready_doc, "_next_ready($self, after, /)\n--\n\n"
                             "The first sealed session with a sequence number over `after`, or "
                             "None.");

static PyObject *snapshot_next_ready(PyObject *object, PyObject *argument)
{
    SnapshotObject *self = (SnapshotObject *)object;
    unsigned long long after = PyLong_AsUnsignedLongLong(argument);
    if (after == (unsigned long long)-1 && PyErr_Occurred()) {
        return NULL;
    }
    rst_snapshot *handle = native_snapshot_enter(self);
    if (!handle) {
        return NULL;
    }
    rst_session session;
    rst_error error;
    int code = rst_ready_next(handle, after, &session, &error);
    PyObject *result = session_or_none(code, &session, &error);
    native_snapshot_leave(self);
    return result;
}

PyDoc_STRVAR(turn_doc, "_turn($self, key, turn, /)\n--\n\n"
                       "A turn by session key. NotFoundError, CorruptError.");

static PyObject *snapshot_turn(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    SnapshotObject *self = (SnapshotObject *)object;
    uint32_t number;
    if (count != 2 || !PyBytes_Check(args[0]) || PyBytes_GET_SIZE(args[0]) != RST_KEY_SIZE) {
        PyErr_SetString(PyExc_TypeError, "a key of 16 bytes and a turn are needed");
        return NULL;
    }
    if (!native_uint32(args[1], &number)) {
        return NULL;
    }
    rst_snapshot *handle = native_snapshot_enter(self);
    if (!handle) {
        return NULL;
    }
    rst_turn turn;
    rst_error error;
    const uint8_t *key = (const uint8_t *)PyBytes_AS_STRING(args[0]);
    int code = rst_turn_get_by_key(handle, key, number, &turn, &error);
    native_snapshot_leave(self);
    return code ? native_raise(&error) : native_turn_new(object, &turn);
}

/* ---------------------------------------------------------------- consumers */

static PyObject *consumer_tuple(const rst_consumer *c)
{
    return Py_BuildValue("(NKKKKKKKKKKLL)", native_text(c->name, c->name_size), c->next, c->settled,
                         c->waiting_count, c->free_count, c->held_count, c->trained_count,
                         c->committed_count, c->given_total, c->again_total, c->trained_total,
                         c->created_ns, c->changed_ns);
}

PyDoc_STRVAR(consumer_doc, "_consumer($self, name, /)\n--\n\n"
                           "The fields of rollstore.ConsumerInfo, in their order. NotFoundError.");

static PyObject *snapshot_consumer(PyObject *object, PyObject *argument)
{
    SnapshotObject *self = (SnapshotObject *)object;
    native_bytes name;
    if (!native_bytes_from(argument, "name", &name)) {
        return NULL;
    }
    PyObject *result = NULL;
    rst_snapshot *handle = native_snapshot_enter(self);
    if (handle) {
        rst_consumer consumer;
        rst_error error;
        int code = rst_consumer_get(handle, name.data, name.size, &consumer, &error);
        result = code ? native_raise(&error) : consumer_tuple(&consumer);
        native_snapshot_leave(self);
    }
    native_bytes_clear(&name);
    return result;
}

PyDoc_STRVAR(consumers_doc, "_consumers($self, /)\n--\n\n"
                            "A list of what _consumer returns, of each consumer.");

static PyObject *snapshot_consumers(PyObject *object, PyObject *unused)
{
    (void)unused;
    SnapshotObject *self = (SnapshotObject *)object;
    PyObject *list = PyList_New(0);
    rst_snapshot *handle = list ? native_snapshot_enter(self) : NULL;
    if (!handle) {
        Py_XDECREF(list);
        return NULL;
    }
    uint8_t key[RST_KEY_SIZE];
    rst_consumer consumer;
    rst_error error;
    bool fine = true;
    int code = rst_consumer_next(handle, NULL, &consumer, key, &error);
    while (code == 0 && fine) {
        PyObject *item = consumer_tuple(&consumer);
        fine = item && PyList_Append(list, item) == 0;
        Py_XDECREF(item);
        uint8_t after[RST_KEY_SIZE];
        memcpy(after, key, sizeof after);
        code = rst_consumer_next(handle, after, &consumer, key, &error);
    }
    native_snapshot_leave(self);
    if (fine && code == RST_ERR_NOT_FOUND) {
        return list;
    }
    Py_DECREF(list);
    return fine ? native_raise(&error) : NULL;
}

/* ---------------------------------------------------------------- the type */

static PyObject *snapshot_get_store(PyObject *object, void *unused)
{
    (void)unused;
    return Py_NewRef(((SnapshotObject *)object)->store);
}

static PyObject *snapshot_get_closed(PyObject *object, void *unused)
{
    (void)unused;
    return PyBool_FromLong(((SnapshotObject *)object)->handle == NULL);
}

static PyObject *snapshot_get_id(PyObject *object, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLongLong(((SnapshotObject *)object)->id);
}

static PyObject *snapshot_get_arrays(PyObject *object, void *unused)
{
    (void)unused;
    return PyLong_FromSsize_t(((SnapshotObject *)object)->arrays);
}

static PyGetSetDef attributes[] = {
    {"store", snapshot_get_store, NULL, "The store it is of.", NULL},
    {"closed", snapshot_get_closed, NULL, "True after close().", NULL},
    {"id", snapshot_get_id, NULL, "Number of the last transaction that it sees.", NULL},
    {"arrays", snapshot_get_arrays, NULL, "Arrays and tensors of it that are alive.", NULL},
    {0},
};

static PyMethodDef methods[] = {
    {"close", snapshot_close, METH_NOARGS, close_doc},
    {"__enter__", snapshot_enter, METH_NOARGS, "__enter__($self, /)\n--\n\n"},
    {"__exit__", snapshot_exit, METH_VARARGS, "__exit__($self, /, *exc)\n--\n\nclose()."},
    {"_get", snapshot_get, METH_O, get_doc},
    {"_next", snapshot_next, METH_O, next_doc},
    {"_next_ready", snapshot_next_ready, METH_O, next_ready_doc},
    {"_turn", (PyCFunction)(void (*)(void))snapshot_turn, METH_FASTCALL, turn_doc},
    {"_consumer", snapshot_consumer, METH_O, consumer_doc},
    {"_consumers", snapshot_consumers, METH_NOARGS, consumers_doc},
    {"_measure", (PyCFunction)(void (*)(void))native_snapshot_measure, METH_VARARGS | METH_KEYWORDS,
     native_snapshot_measure_doc},
    {0},
};

PyDoc_STRVAR(snapshot_doc, "Snapshot(store)\n--\n\n"
                           "The snapshot as rollstore.Snapshot builds on it.");

PyTypeObject *native_snapshot_type_new(PyObject *module)
{
    PyType_Slot slots[] = {
        {Py_tp_doc, (void *)(uintptr_t)snapshot_doc},
        {Py_tp_new, snapshot_new},
        {Py_tp_dealloc, snapshot_dealloc},
        {Py_tp_methods, methods},
        {Py_tp_getset, attributes},
        {0, NULL},
    };
    PyType_Spec spec = {
        .name = "rollstore._rollstore.Snapshot",
        .basicsize = sizeof(SnapshotObject),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
        .slots = slots,
    };
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &spec, NULL);
}
