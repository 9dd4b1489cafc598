/* Consumers: leases, places, checkpoints.  Methods of the store that rollstore.Consumer builds on;
 * a lease travels as the tuple (sequence, lease_id, key, given_count, expires_ns). */
#include "native.h"

#include <stdlib.h>
#include <string.h>

/* ---------------------------------------------------------------- what all have in common */

/* A call about one consumer. */
typedef struct consumer_call {
    StoreObject *store;
    rst_store *handle;
    native_bytes name;
} consumer_call;

static bool call_begin(consumer_call *call, PyObject *self, PyObject *name)
{
    *call = (consumer_call){.store = (StoreObject *)self};
    if (!native_bytes_from(name, "name", &call->name)) {
        return false;
    }
    call->handle = native_store_enter(call->store);
    if (!call->handle) {
        native_bytes_clear(&call->name);
    }
    return call->handle != NULL;
}

static void call_end(consumer_call *call)
{
    native_store_leave(call->store);
    native_bytes_clear(&call->name);
}

/* ---------------------------------------------------------------- leases as tuples */

static PyObject *lease_tuple(const rst_lease *lease)
{
    return Py_BuildValue("(KKy#IL)", lease->sequence, lease->lease_id, (const char *)lease->key,
                         (Py_ssize_t)RST_KEY_SIZE, lease->given_count, lease->expires_ns);
}

static PyObject *lease_list(const rst_lease *leases, size_t count)
{
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list && i < count; i++) {
        PyObject *item = lease_tuple(&leases[i]);
        if (!item) {
            Py_CLEAR(list);
        } else {
            PyList_SET_ITEM(list, (Py_ssize_t)i, item);
        }
    }
    return list;
}

static bool lease_from(PyObject *tuple, rst_lease *lease)
{
    const char *key;
    Py_ssize_t key_size;
    unsigned long long sequence;
    unsigned long long lease_id;
    long long expires_ns;
    unsigned given_count;
    if (!PyTuple_Check(tuple) || !PyArg_ParseTuple(tuple, "KKy#IL", &sequence, &lease_id, &key,
                                                   &key_size, &given_count, &expires_ns)) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_TypeError, "leases: leases as take() gives them are needed");
        }
        return false;
    }
    if (key_size != RST_KEY_SIZE) {
        PyErr_SetString(PyExc_ValueError, "leases: a key has 16 bytes");
        return false;
    }
    *lease = (rst_lease){.sequence = sequence,
                         .lease_id = lease_id,
                         .given_count = given_count,
                         .expires_ns = expires_ns};
    memcpy(lease->key, key, RST_KEY_SIZE);
    return true;
}

static bool leases_from(PyObject *tuple, rst_lease **leases, size_t *count)
{
    *count = (size_t)PyTuple_GET_SIZE(tuple);
    *leases = calloc(*count + 1, sizeof **leases);
    if (!*leases) {
        PyErr_NoMemory();
        return false;
    }
    for (size_t i = 0; i < *count; i++) {
        if (!lease_from(PyTuple_GET_ITEM(tuple, (Py_ssize_t)i), &(*leases)[i])) {
            free(*leases);
            return false;
        }
    }
    return true;
}

/* ---------------------------------------------------------------- create and drop */

PyDoc_STRVAR(create_doc, "_consumer_create($self, name, newest, /)\n--\n\n"
                         "True when it was created, False when it was there.");

static PyObject *consumer_create(PyObject *self, PyObject *args)
{
    PyObject *name;
    int newest;
    consumer_call call;
    if (!PyArg_ParseTuple(args, "Op:_consumer_create", &name, &newest) ||
        !call_begin(&call, self, name)) {
        return NULL;
    }
    int created = 0;
    rst_error error;
    int code;
    Py_BEGIN_ALLOW_THREADS code =
        rst_consumer_create(call.handle, call.name.data, call.name.size,
                            newest ? RST_START_NEWEST : RST_START_OLDEST, &created, &error);
    Py_END_ALLOW_THREADS call_end(&call);
    return code ? native_raise(&error) : PyBool_FromLong(created);
}

PyDoc_STRVAR(drop_doc, "_consumer_drop($self, name, /)\n--\n\nForget it and its leases.");

static PyObject *consumer_drop(PyObject *self, PyObject *name)
{
    consumer_call call;
    if (!call_begin(&call, self, name)) {
        return NULL;
    }
    rst_error error;
    int code;
    Py_BEGIN_ALLOW_THREADS code =
        rst_consumer_drop(call.handle, call.name.data, call.name.size, &error);
    Py_END_ALLOW_THREADS call_end(&call);
    return code ? native_raise(&error) : Py_NewRef(Py_None);
}

/* ---------------------------------------------------------------- take */

/* Most leases of one call: their array is allocated before anything is known. */
#define TAKE_MAX 65536

static PyObject *take(consumer_call *call, size_t max, int64_t lease_ms,
                      const native_patience *patience)
{
    rst_lease *leases = calloc(max, sizeof *leases);
    if (!leases) {
        return PyErr_NoMemory();
    }
    size_t count = 0;
    rst_error error;
    int code;
    bool on = true;
    do {
        int64_t slice = native_patience_slice(patience);
        Py_BEGIN_ALLOW_THREADS code =
            rst_consumer_take(call->handle, call->name.data, call->name.size, max, lease_ms, slice,
                              leases, &count, &error);
        Py_END_ALLOW_THREADS on = code != RST_ERR_TIMEOUT || native_store_may_wait_on(call->store);
    } while (on && code == RST_ERR_TIMEOUT && !native_patience_over(patience));
    PyObject *list = on && code == 0 ? lease_list(leases, count) : NULL;
    free(leases);
    if (on && code) {
        native_raise_waited(&error, native_patience_waited_ms(patience));
    }
    return list;
}

PyDoc_STRVAR(take_doc, "_consumer_take($self, name, max, lease, timeout, /)\n--\n\n"
                       "A list of lease tuples.");

static PyObject *consumer_take(PyObject *self, PyObject *args)
{
    PyObject *name;
    PyObject *lease;
    Py_ssize_t max;
    native_patience patience;
    if (!PyArg_ParseTuple(args, "OnOO&:_consumer_take", &name, &max, &lease, native_patience_from,
                          &patience)) {
        return NULL;
    }
    if (max < 1 || max > TAKE_MAX) {
        PyErr_Format(PyExc_ValueError, "max: 1 to %d sessions, got %zd", TAKE_MAX, max);
        return NULL;
    }
    int64_t lease_ms = native_milliseconds(lease, "lease");
    consumer_call call;
    if (lease_ms < 0 || !call_begin(&call, self, name)) {
        return NULL;
    }
    PyObject *list = take(&call, (size_t)max, lease_ms, &patience);
    call_end(&call);
    return list;
}

/* ---------------------------------------------------------------- what is done with leases */

typedef int lease_function(rst_store *store, const void *name, size_t name_size,
                           const rst_lease *leases, size_t count, rst_error *error);

static PyObject *with_leases(PyObject *self, PyObject *args, const char *format,
                             lease_function *function)
{
    PyObject *name;
    PyObject *tuple;
    rst_lease *leases;
    size_t count;
    if (!PyArg_ParseTuple(args, format, &name, &PyTuple_Type, &tuple) ||
        !leases_from(tuple, &leases, &count)) {
        return NULL;
    }
    PyObject *result = NULL;
    consumer_call call;
    if (call_begin(&call, self, name)) {
        rst_error error;
        int code;
        Py_BEGIN_ALLOW_THREADS code =
            function(call.handle, call.name.data, call.name.size, leases, count, &error);
        Py_END_ALLOW_THREADS call_end(&call);
        result = code ? native_raise(&error) : Py_NewRef(Py_None);
    }
    free(leases);
    return result;
}

PyDoc_STRVAR(acknowledge_doc, "_consumer_acknowledge($self, name, leases, /)\n--\n\n"
                              "The sessions were trained on.");

static PyObject *consumer_acknowledge(PyObject *self, PyObject *args)
{
    return with_leases(self, args, "OO!:_consumer_acknowledge", rst_consumer_acknowledge);
}

PyDoc_STRVAR(return_doc, "_consumer_return($self, name, leases, /)\n--\n\n"
                         "Hand sessions back untrained.");

static PyObject *consumer_return(PyObject *self, PyObject *args)
{
    return with_leases(self, args, "OO!:_consumer_return", rst_consumer_return);
}

PyDoc_STRVAR(renew_doc, "_consumer_renew($self, name, leases, lease, /)\n--\n\n"
                        "The same leases with their new end.");

static PyObject *consumer_renew(PyObject *self, PyObject *args)
{
    PyObject *name;
    PyObject *tuple;
    PyObject *lease;
    rst_lease *leases;
    size_t count;
    if (!PyArg_ParseTuple(args, "OO!O:_consumer_renew", &name, &PyTuple_Type, &tuple, &lease)) {
        return NULL;
    }
    int64_t lease_ms = native_milliseconds(lease, "lease");
    if (lease_ms < 0 || !leases_from(tuple, &leases, &count)) {
        return NULL;
    }
    PyObject *result = NULL;
    consumer_call call;
    if (call_begin(&call, self, name)) {
        rst_error error;
        int code;
        Py_BEGIN_ALLOW_THREADS code = rst_consumer_renew(
            call.handle, call.name.data, call.name.size, leases, count, lease_ms, &error);
        Py_END_ALLOW_THREADS call_end(&call);
        result = code ? native_raise(&error) : lease_list(leases, count);
    }
    free(leases);
    return result;
}

/* ---------------------------------------------------------------- checkpoints */

PyDoc_STRVAR(place_doc, "_consumer_place($self, name, /)\n--\n\nIts place, as bytes.");

static PyObject *consumer_place(PyObject *self, PyObject *name)
{
    consumer_call call;
    if (!call_begin(&call, self, name)) {
        return NULL;
    }
    void *place = NULL;
    size_t size = 0;
    rst_error error;
    int code;
    Py_BEGIN_ALLOW_THREADS code =
        rst_consumer_place(call.handle, call.name.data, call.name.size, &place, &size, &error);
    Py_END_ALLOW_THREADS call_end(&call);
    if (code) {
        return native_raise(&error);
    }
    PyObject *bytes = PyBytes_FromStringAndSize(place, (Py_ssize_t)size);
    free(place);
    return bytes;
}

PyDoc_STRVAR(commit_doc, "_consumer_commit($self, name, place, /)\n--\n\n"
                         "What the place holds is in a checkpoint that is safe.");

static PyObject *consumer_commit(PyObject *self, PyObject *args)
{
    PyObject *name;
    Py_buffer place;
    if (!PyArg_ParseTuple(args, "Oy*:_consumer_commit", &name, &place)) {
        return NULL;
    }
    PyObject *result = NULL;
    consumer_call call;
    if (call_begin(&call, self, name)) {
        rst_error error;
        int code;
        Py_BEGIN_ALLOW_THREADS code = rst_consumer_commit(
            call.handle, call.name.data, call.name.size, place.buf, (size_t)place.len, &error);
        Py_END_ALLOW_THREADS call_end(&call);
        result = code ? native_raise(&error) : Py_NewRef(Py_None);
    }
    PyBuffer_Release(&place);
    return result;
}

PyDoc_STRVAR(resume_doc, "_consumer_resume($self, name, place, /)\n--\n\n"
                         "Go back to a place; the number of sessions that are lost.");

static PyObject *consumer_resume(PyObject *self, PyObject *args)
{
    PyObject *name;
    Py_buffer place;
    if (!PyArg_ParseTuple(args, "Oy*:_consumer_resume", &name, &place)) {
        return NULL;
    }
    PyObject *result = NULL;
    consumer_call call;
    if (call_begin(&call, self, name)) {
        uint64_t lost = 0;
        rst_error error;
        int code;
        Py_BEGIN_ALLOW_THREADS code =
            rst_consumer_resume(call.handle, call.name.data, call.name.size, place.buf,
                                (size_t)place.len, &lost, &error);
        Py_END_ALLOW_THREADS call_end(&call);
        result = code ? native_raise(&error) : PyLong_FromUnsignedLongLong(lost);
    }
    PyBuffer_Release(&place);
    return result;
}

PyDoc_STRVAR(release_consumed_doc,
             "release_consumed($self, /, limit=0)\n--\n\n"
             "Release up to `limit` sealed sessions (0: all) that every consumer has committed.\n\n"
             "Oldest first. With no consumer in the store nothing is released. Returns their\n"
             "number.");

static PyObject *release_consumed(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"limit", NULL};
    StoreObject *self = (StoreObject *)object;
    unsigned long long max = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|K:release_consumed", names, &max)) {
        return NULL;
    }
    rst_store *handle = native_store_enter(self);
    if (!handle) {
        return NULL;
    }
    uint64_t released = 0;
    rst_error error;
    int code;
    Py_BEGIN_ALLOW_THREADS code = rst_release_consumed(handle, max, &released, &error);
    Py_END_ALLOW_THREADS native_store_leave(self);
    return code ? native_raise(&error) : PyLong_FromUnsignedLongLong(released);
}

PyMethodDef native_consumer_methods[] = {
    {"_consumer_create", consumer_create, METH_VARARGS, create_doc},
    {"_consumer_drop", consumer_drop, METH_O, drop_doc},
    {"_consumer_take", consumer_take, METH_VARARGS, take_doc},
    {"_consumer_acknowledge", consumer_acknowledge, METH_VARARGS, acknowledge_doc},
    {"_consumer_return", consumer_return, METH_VARARGS, return_doc},
    {"_consumer_renew", consumer_renew, METH_VARARGS, renew_doc},
    {"_consumer_place", consumer_place, METH_O, place_doc},
    {"_consumer_commit", consumer_commit, METH_VARARGS, commit_doc},
    {"_consumer_resume", consumer_resume, METH_VARARGS, resume_doc},
    {"release_consumed", (PyCFunction)(void (*)(void))release_consumed,
     METH_VARARGS | METH_KEYWORDS, release_consumed_doc},
    {0},
};
