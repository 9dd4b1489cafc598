/* The store object: opening, closing, forks, and the calls that are about the store as a whole. */
#include "native.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

PyTypeObject *native_store_type;

/* ---------------------------------------------------------------- workers */

/* More idle ones than this are given back to the system: a store that 64 threads once used at a
 * time would otherwise hold 64 decoded replies for ever. */
#define IDLE_MAX 16

static void worker_free(native_worker *worker)
{
    if (worker) {
        rst_record_free(worker->record);
        native_json_free(&worker->json);
        free(worker);
    }
}

native_worker *native_worker_take(StoreObject *self)
{
    native_worker *worker = self->idle;
    if (worker) {
        self->idle = worker->next;
        self->idle_count--;
        return worker;
    }
    worker = calloc(1, sizeof *worker);
    if (worker) {
        worker->record = rst_record_new();
    }
    if (!worker || !worker->record) {
        worker_free(worker);
        PyErr_NoMemory();
        return NULL;
    }
    return worker;
}

void native_worker_return(StoreObject *self, native_worker *worker)
{
    if (self->idle_count >= IDLE_MAX || !self->handle) {
        worker_free(worker);
        return;
    }
    worker->next = self->idle;
    self->idle = worker;
    self->idle_count++;
}

static void drop_workers(StoreObject *self)
{
    while (self->idle) {
        native_worker *worker = self->idle;
        self->idle = worker->next;
        worker_free(worker);
    }
    self->idle_count = 0;
}

/* ---------------------------------------------------------------- calls */

static PyObject *closed_store(const StoreObject *self)
{
    char what[512];
    PyOS_snprintf(what, sizeof what, "the store %.400s", self->path ? self->path : "");
    return native_raise_closed(what);
}

/*
 * After a fork.  The parent's handle is left as it is: snapshots that came along still point to it,
 * and its memory goes with this process.  Calls of the parent's other threads do not exist here.
 */
static bool open_again(StoreObject *self)
{
    rst_store *handle = NULL;
    rst_error error;
    if (rst_store_open(self->path, self->flags, NULL, &handle, &error)) {
        native_raise(&error);
        return false;
    }
    self->handle = handle;
    self->generation = native_fork_generation;
    self->closing = false;
    self->running = 0;
    return true;
}

rst_store *native_store_enter(StoreObject *self)
{
    if (!self->handle) {
        closed_store(self);
        return NULL;
    }
    if (self->generation != native_fork_generation && !open_again(self)) {
        return NULL;
    }
    if (self->closing) {
        closed_store(self);
        return NULL;
    }
    self->running++;
    return self->handle;
}

void native_store_leave(StoreObject *self)
{
    self->running--;
}

bool native_store_may_wait_on(StoreObject *self)
{
    if (PyErr_CheckSignals() < 0) {
        return false;
    }
    if (self->closing) {
        closed_store(self);
        return false;
    }
    return true;
}

/* ---------------------------------------------------------------- opening and closing */

static PyObject *store_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"path", "flags", "capacity", "durability", "interval", "readers", NULL};
    PyObject *path_bytes = NULL;
    unsigned flags = 0;
    rst_create_options create = {0};
    unsigned long long capacity = 0;
    unsigned durability = 0;
    unsigned interval_ms = 0;
    unsigned readers = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&|IKIII:Store", names, PyUnicode_FSConverter,
                                     &path_bytes, &flags, &capacity, &durability, &interval_ms,
                                     &readers)) {
        return NULL;
    }
    create.capacity_size = capacity;
    create.durability = (rst_durability)durability;
    create.interval_ms = interval_ms;
    create.reader_count = readers;
    StoreObject *self = (StoreObject *)type->tp_alloc(type, 0);
    char *path = self ? strdup(PyBytes_AS_STRING(path_bytes)) : NULL;
    Py_DECREF(path_bytes);
    if (!path) {
        Py_XDECREF(self);
        return self ? PyErr_NoMemory() : NULL;
    }
    self->path = path;
    self->flags = flags & ~(RST_OPEN_CREATE | RST_OPEN_EXCLUSIVE | RST_OPEN_GROUP);
    self->generation = native_fork_generation;
    rst_store *handle;
    rst_error error;
    int code;
    Py_BEGIN_ALLOW_THREADS code = rst_store_open(path, flags, &create, &handle, &error);
    Py_END_ALLOW_THREADS if (code)
    {
        Py_DECREF(self);
        return native_raise(&error);
    }
    self->handle = handle;
    return (PyObject *)self;
}

/* Wait until the calls of other threads have left; their waits end because closing is set. */
static bool wait_for_calls(StoreObject *self)
{
    const struct timespec pause = {.tv_nsec = 1000000};
    while (self->running > 0) {
        Py_BEGIN_ALLOW_THREADS nanosleep(&pause, NULL);
        Py_END_ALLOW_THREADS if (PyErr_CheckSignals() < 0)
        {
            return false;
        }
    }
    return true;
}

static bool close_handle(StoreObject *self)
{
    if (self->generation != native_fork_generation) {
        self->handle = NULL; /* the parent's, see open_again */
        return true;
    }
    self->closing = true;
    bool fine = wait_for_calls(self);
    if (fine && self->handle) {
        rst_error error;
        int code;
        rst_store *handle = self->handle;
        self->running++; /* keeps a second close out */
        Py_BEGIN_ALLOW_THREADS code = rst_store_close(handle, &error);
        Py_END_ALLOW_THREADS self->running--;
        if (code) {
            native_raise(&error);
            fine = false;
        } else {
            self->handle = NULL;
        }
    }
    self->closing = false;
    return fine;
}

PyDoc_STRVAR(
    close_doc,
    "close($self, /)\n--\n\n"
    "Close the store; closing twice is fine.\n\n"
    "Waits for calls that other threads are in; of those, waits (for space, for sessions)\n"
    "end with ClosedError. BusyError while snapshots are open; nothing is closed then.");

static PyObject *store_close(PyObject *object, PyObject *unused)
{
    (void)unused;
    StoreObject *self = (StoreObject *)object;
    if (self->handle && !close_handle(self)) {
        return NULL;
    }
    drop_workers(self);
    Py_RETURN_NONE;
}

static void store_dealloc(PyObject *object)
{
    StoreObject *self = (StoreObject *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (self->handle && self->generation == native_fork_generation) {
        rst_store *handle = self->handle;
        Py_BEGIN_ALLOW_THREADS rst_store_close(handle,
                                               NULL); /* nothing is left that could keep it open */
        Py_END_ALLOW_THREADS
    }
    self->handle = NULL;
    drop_workers(self);
    free(self->path);
    type->tp_free(object);
    Py_DECREF(type);
}

/* ---------------------------------------------------------------- looking at it */

static PyObject *store_path(PyObject *object, void *unused)
{
    (void)unused;
    return PyUnicode_DecodeFSDefault(((StoreObject *)object)->path);
}

static PyObject *store_closed(PyObject *object, void *unused)
{
    (void)unused;
    return PyBool_FromLong(((StoreObject *)object)->handle == NULL);
}

static PyObject *store_read_only(PyObject *object, void *unused)
{
    (void)unused;
    return PyBool_FromLong(((StoreObject *)object)->flags & RST_OPEN_READ_ONLY);
}

static PyObject *store_flags(PyObject *object, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLong(((StoreObject *)object)->flags);
}

static bool find_map(StoreObject *self, const void **map, size_t *size)
{
    rst_store *handle = native_store_enter(self);
    if (!handle) {
        return false;
    }
    rst_error error;
    int code = rst_store_map(handle, map, size, &error);
    native_store_leave(self);
    if (code) {
        native_raise(&error);
    }
    return code == 0;
}

static PyObject *store_map_address(PyObject *object, void *unused)
{
    (void)unused;
    const void *map;
    size_t size;
    return find_map((StoreObject *)object, &map, &size) ? PyLong_FromVoidPtr((void *)(uintptr_t)map)
                                                        : NULL;
}

static PyObject *store_map_size(PyObject *object, void *unused)
{
    (void)unused;
    const void *map;
    size_t size;
    return find_map((StoreObject *)object, &map, &size) ? PyLong_FromSize_t(size) : NULL;
}

PyDoc_STRVAR(stat_doc, "_stat($self, /)\n--\n\n"
                       "The fields of rollstore.Stat, in their order.");

static PyObject *store_stat(PyObject *object, PyObject *unused)
{
    (void)unused;
    StoreObject *self = (StoreObject *)object;
    rst_store *handle = native_store_enter(self);
    if (!handle) {
        return NULL;
    }
    rst_stat s;
    rst_error error;
    int code;
    Py_BEGIN_ALLOW_THREADS code = rst_store_stat(handle, &s, &error);
    Py_END_ALLOW_THREADS native_store_leave(self);
    if (code) {
        return native_raise(&error);
    }
    return Py_BuildValue("(KKsdILKKKKKKKKKKKKIIKO)", s.format.capacity_size, s.format.map_size,
                         native_durability_name(s.format.durability), s.format.interval_ms / 1e3,
                         s.format.reader_count, s.format.created_ns, s.session_count,
                         s.totals.open_count, s.totals.sealed_count, s.totals.released_count,
                         s.totals.turn_count, s.totals.generated_count, s.totals.value_size,
                         s.totals.next_sequence - 1, s.used_size, s.free_size, s.pinned_size,
                         s.last_transaction, s.readers_used, s.reader_pid, s.reader_age,
                         s.read_only_files ? Py_True : Py_False);
}

PyDoc_STRVAR(wait_doc, "wait($self, /, after=0, timeout=None)\n--\n\n"
                       "Wait until a session is sealed with a sequence number over `after`.\n\n"
                       "after: 0 waits for any sealed session, also one that is released already.\n"
                       "timeout: seconds, None without end.\n"
                       "Returns the newest sequence number. WaitTimeoutError when nothing came.\n"
                       "The GIL is free, and a signal (Ctrl-C) is noticed within 0.1 s.");

static PyObject *store_wait(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"after", "timeout", NULL};
    StoreObject *self = (StoreObject *)object;
    unsigned long long after = 0;
    native_patience patience;
    native_patience_from(Py_None, &patience);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|KO&:wait", names, &after, native_patience_from,
                                     &patience)) {
        return NULL;
    }
    rst_store *handle = native_store_enter(self);
    if (!handle) {
        return NULL;
    }
    uint64_t newest = 0;
    rst_error error;
    int code;
    bool on = true;
    do {
        int64_t slice = native_patience_slice(&patience);
        Py_BEGIN_ALLOW_THREADS code = rst_ready_wait(handle, after, slice, &newest, &error);
        Py_END_ALLOW_THREADS on = code != RST_ERR_TIMEOUT || native_store_may_wait_on(self);
    } while (on && code == RST_ERR_TIMEOUT && !native_patience_over(&patience));
    native_store_leave(self);
    if (!on) {
        return NULL;
    }
    return code ? native_raise_waited(&error, native_patience_waited_ms(&patience))
                : PyLong_FromUnsignedLongLong(newest);
}

/* ---------------------------------------------------------------- looking after it */

PyDoc_STRVAR(sync_doc, "sync($self, /)\n--\n\n"
                       "Write everything committed so far to the disk, whatever the durability.");

static PyObject *store_sync(PyObject *object, PyObject *unused)
{
    (void)unused;
    StoreObject *self = (StoreObject *)object;
    rst_store *handle = native_store_enter(self);
    if (!handle) {
        return NULL;
    }
    rst_error error;
    int code;
    Py_BEGIN_ALLOW_THREADS code = rst_store_sync(handle, &error);
    Py_END_ALLOW_THREADS native_store_leave(self);
    return code ? native_raise(&error) : Py_NewRef(Py_None);
}

PyDoc_STRVAR(clear_readers_doc,
             "clear_readers($self, /)\n--\n\n"
             "Clear the reader slots of dead processes; returns their number.\n\n"
             "Happens by itself when a writer is short of space or a reader of slots.");

static PyObject *store_clear_readers(PyObject *object, PyObject *unused)
{
    (void)unused;
    StoreObject *self = (StoreObject *)object;
    rst_store *handle = native_store_enter(self);
    if (!handle) {
        return NULL;
    }
    uint32_t cleared = 0;
    rst_error error;
    int code;
    Py_BEGIN_ALLOW_THREADS code = rst_store_clear_readers(handle, &cleared, &error);
    Py_END_ALLOW_THREADS native_store_leave(self);
    return code ? native_raise(&error) : PyLong_FromUnsignedLong(cleared);
}

PyDoc_STRVAR(copy_doc,
             "copy($self, /, path, *, capacity=0)\n--\n\n"
             "Copy the live store, consistent and compacted, to a new one at `path`.\n\n"
             "capacity: bytes, 0 keeps this store's. ExistsError when something is there.");

static PyObject *store_copy(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"path", "capacity", NULL};
    StoreObject *self = (StoreObject *)object;
    PyObject *path = NULL;
    unsigned long long capacity = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&|$K:copy", names, PyUnicode_FSConverter,
                                     &path, &capacity)) {
        return NULL;
    }
    rst_store *handle = native_store_enter(self);
    if (!handle) {
        Py_DECREF(path);
        return NULL;
    }
    rst_error error;
    int code;
    Py_BEGIN_ALLOW_THREADS code = rst_store_copy(handle, PyBytes_AS_STRING(path), capacity, &error);
    Py_END_ALLOW_THREADS native_store_leave(self);
    Py_DECREF(path);
    return code ? native_raise(&error) : Py_NewRef(Py_None);
}

/* ---------------------------------------------------------------- verify */

/* Verifying calls back after each turn; signals are looked at after as many. */
#define VERIFY_TURNS 64

typedef struct verifying {
    StoreObject *store;
    PyObject *faults; /* list of str */
    unsigned calls;
    bool stopped; /* a signal, a close or an allocation that failed */
} verifying;

static int verify_progress(void *context, uint64_t done, uint64_t total)
{
    (void)done;
    (void)total;
    verifying *v = context;
    if (++v->calls % VERIFY_TURNS != 0 && !v->stopped) {
        return 0;
    }
    PyGILState_STATE gil = PyGILState_Ensure();
    v->stopped = v->stopped || !native_store_may_wait_on(v->store);
    PyGILState_Release(gil);
    return v->stopped;
}

static void verify_fault(void *context, const rst_error *fault)
{
    verifying *v = context;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *text =
        v->stopped
            ? NULL
            : PyUnicode_DecodeUTF8(fault->message, (Py_ssize_t)strlen(fault->message), "replace");
    v->stopped = v->stopped || !text || PyList_Append(v->faults, text) < 0;
    Py_XDECREF(text);
    PyGILState_Release(gil);
}

PyDoc_STRVAR(verify_doc,
             "_verify($self, /)\n--\n\n"
             "(sessions, turns, bytes read, faults as a list of str) of reading everything once.");

static PyObject *store_verify(PyObject *object, PyObject *unused)
{
    (void)unused;
    StoreObject *self = (StoreObject *)object;
    rst_store *handle = native_store_enter(self);
    if (!handle) {
        return NULL;
    }
    verifying context = {.store = self, .faults = PyList_New(0)};
    if (!context.faults) {
        native_store_leave(self);
        return NULL;
    }
    rst_verify_options options = {verify_progress, verify_fault, &context};
    rst_verify_result result;
    rst_error error;
    int code;
    Py_BEGIN_ALLOW_THREADS code = rst_store_verify(handle, &options, &result, &error);
    Py_END_ALLOW_THREADS native_store_leave(self);
    if (context.stopped || code) {
        Py_DECREF(context.faults);
        return context.stopped ? NULL : native_raise(&error);
    }
    return Py_BuildValue("(KKKN)", result.session_count, result.turn_count, result.value_size,
                         context.faults);
}

/* ---------------------------------------------------------------- the type */

PyDoc_STRVAR(store_doc,
             "Store(path, flags=0, capacity=0, durability=0, interval=0, readers=0)\n--\n\n"
             "The store as rollstore.Store builds on it.");

static PyGetSetDef store_attributes[] = {
    {"path", store_path, NULL, "The folder it was opened by.", NULL},
    {"closed", store_closed, NULL, "True after close().", NULL},
    {"read_only", store_read_only, NULL, "True when opened with mode \"r\".", NULL},
    {"_flags", store_flags, NULL, "What it is opened again with.", NULL},
    {"map_address", store_map_address, NULL,
     "Where the store's memory map begins in this process: every array of a snapshot is inside.",
     NULL},
    {"map_size", store_map_size, NULL, "Bytes of the memory map.", NULL},
    {0},
};

static PyMethodDef store_own_methods[] = {
    {"close", store_close, METH_NOARGS, close_doc},
    {"_stat", store_stat, METH_NOARGS, stat_doc},
    {"wait", (PyCFunction)(void (*)(void))store_wait, METH_VARARGS | METH_KEYWORDS, wait_doc},
    {"sync", store_sync, METH_NOARGS, sync_doc},
    {"clear_readers", store_clear_readers, METH_NOARGS, clear_readers_doc},
    {"copy", (PyCFunction)(void (*)(void))store_copy, METH_VARARGS | METH_KEYWORDS, copy_doc},
    {"_verify", store_verify, METH_NOARGS, verify_doc},
    {"put_reply", (PyCFunction)(void (*)(void))native_store_put_reply, METH_VARARGS | METH_KEYWORDS,
     native_store_put_reply_doc},
    {"put", (PyCFunction)(void (*)(void))native_store_put, METH_VARARGS | METH_KEYWORDS,
     native_store_put_doc},
    {"_apply", (PyCFunction)(void (*)(void))native_store_apply, METH_VARARGS | METH_KEYWORDS,
     native_store_apply_doc},
    {"seal", (PyCFunction)(void (*)(void))native_store_seal, METH_VARARGS | METH_KEYWORDS,
     native_store_seal_doc},
    {"restart", (PyCFunction)(void (*)(void))native_store_restart, METH_VARARGS | METH_KEYWORDS,
     native_store_restart_doc},
    {"release", (PyCFunction)(void (*)(void))native_store_release, METH_VARARGS | METH_KEYWORDS,
     native_store_release_doc},
    {0},
};

/* Both tables one after another: a type takes one. */
static PyMethodDef *all_methods(void)
{
    static PyMethodDef methods[32];
    size_t count = 0;
    for (PyMethodDef *m = store_own_methods; m->ml_name; m++) {
        methods[count++] = *m;
    }
    for (PyMethodDef *m = native_consumer_methods; m->ml_name; m++) {
        methods[count++] = *m;
    }
    return methods;
}

PyTypeObject *native_store_type_new(PyObject *module)
{
    PyType_Slot slots[] = {
        {Py_tp_doc, (void *)(uintptr_t)store_doc},
        {Py_tp_new, store_new},
        {Py_tp_dealloc, store_dealloc},
        {Py_tp_methods, all_methods()},
        {Py_tp_getset, store_attributes},
        {0, NULL},
    };
    PyType_Spec spec = {
        .name = "rollstore._rollstore.Store",
        .basicsize = sizeof(StoreObject),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
        .slots = slots,
    };
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &spec, NULL);
}
