/* What the files of the compiled module share.
 *
 * Everything here runs with the GIL, except between Py_BEGIN_ALLOW_THREADS and its end.  State that
 * calls share (a store's handle, its idle workers, its count of running calls) is only touched with
 * the GIL, which is its lock. */
#ifndef RST_PYTHON_NATIVE_H
#define RST_PYTHON_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

/* One table of NumPy's functions for all files; module.c fills it. */
#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL rollstore_numpy
#ifndef NATIVE_FILLS_NUMPY_TABLE
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

#include <rollstore/rollstore.h>

/* ---------------------------------------------------------------- errors.c */

/* Find the exception classes in rollstore._errors.  -1 with an exception. */
int native_errors_init(void);

/* Raise the exception of a library error.  Returns NULL, so that a function can end with it. */
PyObject *native_raise(const rst_error *error);

/* The same, for a call that waited in slices: the message's time becomes that of the whole call. */
PyObject *native_raise_waited(rst_error *error, int64_t waited_ms);

/* The same, for a reply that was given as a dict: an offset in a text that nobody has is left out.
 */
PyObject *native_raise_no_offset(rst_error *error);

/* ClosedError: `what` ("the store /dev/shm/a", "the snapshot") is closed. */
PyObject *native_raise_closed(const char *what);

/* Any other error that the binding itself finds; as the library would say it. */
PyObject *native_raise_new(int code, const char *field, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* ---------------------------------------------------------------- arguments.c */

/* A session id, consumer name or other text as bytes. */
typedef struct native_bytes {
    const char *data;
    size_t size;
    PyObject *owner;
} native_bytes;

/* From str (as UTF-8) or bytes.  False with an exception.  Undone by native_bytes_clear. */
bool native_bytes_from(PyObject *object, const char *name, native_bytes *out);
void native_bytes_clear(native_bytes *bytes);

/* Text as the store keeps it; bytes that are no UTF-8 become surrogates, and back. */
PyObject *native_text(const char *data, size_t size);

/* None for NaN. */
PyObject *native_float_or_none(double value);
/* None where value is `none`. */
PyObject *native_int_or_none(int64_t value, int64_t none);

/* Converters for PyArg_Parse*: None stands for the default that the variable holds already. */
int native_optional_int64(PyObject *object, void *out);
int native_optional_reward(PyObject *object, void *out);      /* a finite double */
int native_optional_temperature(PyObject *object, void *out); /* a double that fits a float */
int native_uint32(PyObject *object, void *out);
int native_mode(PyObject *object, void *out);
int native_request(PyObject *object, void *out);
int native_status(PyObject *object, void *out);

const char *native_mode_name(rst_mode mode);
const char *native_status_name(rst_outcome_status status); /* NULL while open */
const char *native_durability_name(uint32_t durability);

/* How long a call may wait: seconds, or None without end. */
typedef struct native_patience {
    bool forever;
    int64_t begin_ns; /* CLOCK_MONOTONIC */
    int64_t until_ns;
} native_patience;

int native_patience_from(PyObject *object, void *out); /* a converter */
/* The default of calls that wait for space, in seconds: long enough for a trainer's step, and not
 * for ever, so that a trainer that died is noticed. */
#define NATIVE_TIMEOUT 60
native_patience native_patience_default(void);
/* Milliseconds to wait in the library before signals are looked at again. */
int64_t native_patience_slice(const native_patience *patience);
bool native_patience_over(const native_patience *patience);
int64_t native_patience_waited_ms(const native_patience *patience);

/* Seconds as milliseconds, rounded up.  -1 with an exception. */
int64_t native_milliseconds(PyObject *object, const char *name);

/* An array that was given as an argument, as the library wants it. */
typedef struct native_array {
    const void *data;
    size_t count;    /* elements */
    npy_intp rows;   /* first dimension */
    npy_intp width;  /* second dimension, 1 where there is none */
    PyObject *owner; /* keeps data alive */
    void *memory;    /* malloc'd, or NULL */
} native_array;

/* Token ids: a list or tuple of int, an integer array of any width (checked), anything that NumPy
 * makes one of.  dimensions: 1 or 2. */
bool native_ids_from(PyObject *object, const char *name, int dimensions, native_array *out);
/* Log-probabilities: float32, or float16 which widens without loss. */
bool native_floats_from(PyObject *object, const char *name, int dimensions, native_array *out);
void native_array_clear(native_array *array);

/* The memory of an array to be filled: C-contiguous, writable, of at least `count` elements of that
 * NumPy type.  None gives NULL.  False with an exception. */
bool native_target(PyObject *object, const char *name, int type, uint64_t count, void **data);

/* ---------------------------------------------------------------- text.c */

/* A growing text; long strings stand in it as gaps to be filled without the GIL. */
typedef struct native_gap {
    size_t place;
    PyObject *string;
    const char *data;
    size_t size;
} native_gap;

typedef struct native_json {
    char *text;
    size_t size;
    size_t capacity;
    native_gap *gaps;
    size_t gap_count;
    size_t gap_capacity;
    bool no_gaps;       /* write every string out, escapes and all */
    bool floats;        /* numbers that will be read as float32 may be written as such */
    const char *member; /* which one is being written, for errors */
} native_json;

void native_json_free(native_json *json);

/* Write the part of a reply, or of a line of a recorded session, that the library's decoder looks
 * at.  False with an exception. */
bool native_json_reply(native_json *json, PyObject *reply);
bool native_json_line(native_json *json, PyObject *line);

/* Copy the long strings to their places; needs no GIL.  False when one of them has a byte that JSON
 * would escape: then write again with no_gaps. */
bool native_json_fill_gaps(native_json *json);
void native_json_drop_gaps(native_json *json);

int native_text_init(void);

/* ---------------------------------------------------------------- store.c */

/* What one call decodes with; kept for the next one. */
typedef struct native_worker {
    struct native_worker *next;
    rst_record *record;
    native_json json;
} native_worker;

typedef struct StoreObject {
    PyObject_HEAD rst_store *handle; /* NULL when closed */
    char *path;                      /* as the operating system spells it */
    unsigned flags;                  /* to open it again with */
    uint64_t generation;             /* native_fork_generation when the handle was opened */
    bool closing;
    Py_ssize_t running; /* calls in the library */
    native_worker *idle;
    unsigned idle_count;
} StoreObject;

extern PyTypeObject *native_store_type;
extern uint64_t native_fork_generation;

/* Begin a call.  After a fork the store is opened again here first.  NULL with an exception. */
rst_store *native_store_enter(StoreObject *self);
void native_store_leave(StoreObject *self);

/* Signals, and a close by another thread, between two slices of waiting.  False with an exception.
 */
bool native_store_may_wait_on(StoreObject *self);

native_worker *native_worker_take(StoreObject *self);
void native_worker_return(StoreObject *self, native_worker *worker);

PyTypeObject *native_store_type_new(PyObject *module);

/* Methods of the store in other files. */
PyObject *native_store_put_reply(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *native_store_put(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *native_store_apply(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *native_store_seal(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *native_store_restart(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *native_store_release(PyObject *self, PyObject *args, PyObject *kwargs);
extern const char native_store_put_reply_doc[];
extern const char native_store_put_doc[];
extern const char native_store_apply_doc[];
extern const char native_store_seal_doc[];
extern const char native_store_restart_doc[];
extern const char native_store_release_doc[];

extern PyMethodDef native_consumer_methods[]; /* of the store; consumer.c */

/* ---------------------------------------------------------------- snapshot.c */

typedef struct SnapshotObject {
    PyObject_HEAD StoreObject *store;
    rst_snapshot *handle; /* NULL when closed */
    uint64_t generation;
    uint64_t id;
    Py_ssize_t arrays;    /* views of the map that are alive */
    bool abandoned;       /* close when the last array goes */
    pthread_mutex_t lock; /* a snapshot is used by one thread at a time */
} SnapshotObject;

extern PyTypeObject *native_snapshot_type;
PyTypeObject *native_snapshot_type_new(PyObject *module);

/* Begin and end using the handle; waits for another thread that does.  NULL with an exception. */
rst_snapshot *native_snapshot_enter(SnapshotObject *self);
void native_snapshot_leave(SnapshotObject *self);

/* Is it open, and of this process?  False with an exception. */
bool native_snapshot_usable(const SnapshotObject *self);

/* One array fewer; closes an abandoned snapshot after the last one. */
void native_snapshot_array_gone(SnapshotObject *self);

PyObject *native_session_tuple(const rst_session *session);

/* ---------------------------------------------------------------- view.c */

/* One decoded reply in memory of its own. */
typedef struct MemoryObject {
    PyObject_HEAD rst_record *record;
    Py_ssize_t arrays; /* views that are alive */
    bool busy;         /* a thread without the GIL works on the record */
} MemoryObject;

extern PyTypeObject *native_memory_type;
extern PyTypeObject *native_view_type;
PyTypeObject *native_memory_type_new(PyObject *module);
PyTypeObject *native_view_type_new(PyObject *module);

MemoryObject *native_memory_new(void);

/* A read-only NumPy array over `data`, which `owner` (a snapshot or a memory) keeps. */
PyObject *native_view_array(PyObject *owner, const void *data, int type, int dimensions,
                            const npy_intp *shape);

/* ---------------------------------------------------------------- dlpack.c */

/* A DLPack capsule over memory that `holder` keeps alive.  strides in bytes. */
PyObject *native_dlpack_capsule(PyObject *holder, void *data, int type, int dimensions,
                                const npy_intp *shape, const npy_intp *strides);
PyObject *native_dlpack(PyObject *module, PyObject *array);
extern const char native_dlpack_doc[];

/* ---------------------------------------------------------------- turn.c */

typedef struct TurnObject {
    PyObject_HEAD PyObject *owner; /* a SnapshotObject or a MemoryObject */
    rst_turn turn;                 /* of a snapshot; a memory is asked each time */
} TurnObject;

extern PyTypeObject *native_turn_type;
PyTypeObject *native_turn_type_new(PyObject *module);
PyObject *native_turn_new(PyObject *owner, const rst_turn *turn);
PyObject *native_turn_of_memory(MemoryObject *memory); /* of its record, which is filled */

/* The turn's pointers as they are now.  False with an exception. */
bool native_turn_look(TurnObject *self, rst_turn *turn);

/* Keep what the turn points to in place, while its record is read without the GIL. */
void native_turn_pin(TurnObject *self);
void native_turn_unpin(TurnObject *self);

PyObject *native_decode(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *native_decode_line(PyObject *module, PyObject *args, PyObject *kwargs);
extern const char native_decode_doc[];
extern const char native_decode_line_doc[];

/* ---------------------------------------------------------------- fill.c */

/* What is put beside a reply's bytes. */
typedef struct native_fill {
    rst_decode_options decode;
    PyObject *prompt;   /* or NULL, None */
    double temperature; /* NaN for none */
} native_fill;

/* Fill the record from a reply: bytes-like, str, dict, or a turn.  json: memory for a dict's text.
 * False with an exception. */
bool native_fill_record(PyObject *reply, const native_fill *fill, native_json *json,
                        rst_record *record);

/* A turn given as arrays. */
typedef struct native_arrays {
    PyObject *token_ids, *token_logprobs, *topk_ids, *topk_logprobs, *prompt;
    PyObject *finish_reason, *weight_version, *temperature_scaled;
    rst_mode mode;
    double temperature;
} native_arrays;

bool native_fill_arrays(const native_arrays *arrays, rst_record *record);

/* ---------------------------------------------------------------- reply.c */

/* A reply, or a line of a recorded session, to decode: bytes-like, str, or dict. */
typedef struct native_reply {
    Py_buffer buffer; /* obj is NULL when unused */
    const char *data; /* NULL for a dict, until its text is written */
    size_t size;
    PyObject *dict;
    bool line;
} native_reply;

/* json: where a dict's text is written.  False with an exception. */
bool native_reply_from(PyObject *object, bool line, native_json *json, native_reply *out);
void native_reply_clear(native_reply *reply, native_json *json);

/* Decode without the GIL.  A library error is returned in *error; -1 with an exception. */
int native_reply_decode(native_reply *reply, native_json *json, rst_record *record,
                        const rst_decode_options *options, rst_error *error);
int native_line_decode(native_reply *reply, native_json *json, rst_record *record, uint32_t topk,
                       rst_line *line, rst_error *error);

/* Raise what a decoder found. */
PyObject *native_reply_raise(const native_reply *reply, rst_error *error);

/* ---------------------------------------------------------------- proxy.c */

PyObject *native_json_object(PyObject *module, PyObject *text);
PyObject *native_json_token_ids(PyObject *module, PyObject *text);
PyObject *native_decode_and_strip(PyObject *module, PyObject *args, PyObject *kwargs);
extern const char native_json_object_doc[];
extern const char native_json_token_ids_doc[];
extern const char native_decode_and_strip_doc[];

/* ---------------------------------------------------------------- batch.c */

extern PyTypeObject *native_plan_type;
PyTypeObject *native_plan_type_new(PyObject *module);
PyObject *native_snapshot_measure(PyObject *self, PyObject *args, PyObject *kwargs);
extern const char native_snapshot_measure_doc[];

#endif
