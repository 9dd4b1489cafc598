/* Methods of the store that write. */
#include "native.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---------------------------------------------------------------- applying */

/* Apply, waiting at capacity in slices between which signals are looked at.  A library error is
 * returned in *error; -1 with an exception. */
static int apply(StoreObject *self, rst_store *handle, rst_change *changes, size_t count,
                 const native_patience *patience, rst_error *error)
{
    int code;
    do {
        int64_t slice = native_patience_slice(patience);
        Py_BEGIN_ALLOW_THREADS code = rst_apply(handle, changes, count, slice, error);
        Py_END_ALLOW_THREADS if (code == RST_ERR_FULL && !native_store_may_wait_on(self))
        {
            return -1;
        }
    } while (code == RST_ERR_FULL && !native_patience_over(patience));
    return code;
}

/* One change, which nobody would look for in a list.  True when the store changed, else False. */
static PyObject *apply_one(StoreObject *self, rst_store *handle, rst_change *change,
                           const native_patience *patience)
{
    rst_error error;
    int code = apply(self, handle, change, 1, patience, &error);
    if (code < 0) {
        return NULL;
    }
    error.index = -1;
    return code ? native_raise_waited(&error, native_patience_waited_ms(patience))
                : PyBool_FromLong(!change->unchanged);
}

/* ---------------------------------------------------------------- put */

const char native_store_put_reply_doc[] =
    "put_reply($self, session, turn, reply, *, top_k=0, mode='selected', request='flat',\n"
    "          choice=0, prompt=None, temperature=None, replace=False, timeout=60.0)\n--\n\n"
    "Store an engine's reply as turn number `turn` (0, 1, ...) of a session.\n\n"
    "session: str or bytes of 1 to 4096 bytes; turn 0 of an unknown session opens it.\n"
    "reply: bytes, bytearray, memoryview or mmap of the JSON text as it came (no copy is made; it\n"
    "    must not be written to meanwhile), str, a dict as response.json() gave it, or a Turn.\n"
    "top_k: candidates a token that were asked for, 0 takes what the reply has; in mode\n"
    "    \"support\" the capacity of a row.\n"
    "mode: \"selected\" (top-k of the full distribution) or \"support\" (what filtered sampling\n"
    "    could choose from).\n"
    "request: \"flat\" or \"nested\", how candidates were asked for in mode \"selected\".\n"
    "choice: which of a chat reply's choices.\n"
    "prompt: the request's whole prompt, int32 array or list of int; samples are made of it.\n"
    "temperature: the request's sampling temperature.\n"
    "replace: let other contents take the place of the session's last turn.\n"
    "timeout: seconds to wait at capacity, None without end.\n\n"
    "Returns True when it was stored, False when the same turn stood there already.\n"
    "ReplyError (nothing is stored), OrderError, ConflictError, SealedError, FullError.\n"
    "The GIL is free while decoding, waiting and committing.";

/* Store what `fill` puts into a record as a turn. */
static PyObject *put(StoreObject *self, PyObject *session_object, rst_change *change, int replace,
                     const native_patience *patience,
                     bool (*fill)(void *context, native_worker *worker), void *context)
{
    native_bytes session;
    if (!native_bytes_from(session_object, "session", &session)) {
        return NULL;
    }
    PyObject *result = NULL;
    rst_store *handle = native_store_enter(self);
    native_worker *worker = handle ? native_worker_take(self) : NULL;
    if (worker && fill(context, worker)) {
        change->session = session.data;
        change->session_size = session.size;
        change->record = worker->record;
        change->flags = replace ? RST_CHANGE_REPLACE : 0;
        result = apply_one(self, handle, change, patience);
    }
    if (handle) {
        native_store_leave(self);
    }
    if (worker) {
        native_worker_return(self, worker);
    }
    native_bytes_clear(&session);
    return result;
}

typedef struct reply_call {
    PyObject *reply;
    native_fill fill;
} reply_call;

static bool fill_from_reply(void *context, native_worker *worker)
{
    const reply_call *call = context;
    return native_fill_record(call->reply, &call->fill, &worker->json, worker->record);
}

PyObject *native_store_put_reply(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"session", "turn",   "reply",       "top_k",   "mode",    "request",
                            "choice",  "prompt", "temperature", "replace", "timeout", NULL};
    PyObject *session;
    reply_call call = {.fill = {.prompt = Py_None, .temperature = NAN}};
    native_fill *fill = &call.fill;
    rst_change change = {.kind = RST_CHANGE_PUT};
    int replace = 0;
    native_patience patience = native_patience_default();
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "OO&O|$O&O&O&O&OO&pO&:put_reply", names, &session, native_uint32,
            &change.turn, &call.reply, native_uint32, &fill->decode.topk, native_mode,
            &fill->decode.mode, native_request, &fill->decode.request, native_uint32,
            &fill->decode.choice, &fill->prompt, native_optional_temperature, &fill->temperature,
            &replace, native_patience_from, &patience)) {
        return NULL;
    }
    return put((StoreObject *)self, session, &change, replace, &patience, fill_from_reply, &call);
}

const char native_store_put_doc[] =
    "put($self, session, turn, *, token_ids, token_logprobs, topk_ids=None, topk_logprobs=None,\n"
    "    prompt=None, temperature=None, mode='selected', finish_reason=None,\n"
    "    weight_version=None, temperature_scaled=None, replace=False, timeout=60.0)\n--\n\n"
    "Store a turn that is decoded already.\n\n"
    "token_ids: int32 [n] the sampled tokens (other integer types are checked and narrowed).\n"
    "token_logprobs: float32 [n] natural log, of the distribution sampled from.\n"
    "topk_ids, topk_logprobs: int32 and float32 [n, k]; an unused slot is -1 with -inf. None: no\n"
    "    candidates.\n"
    "finish_reason: \"stop\", \"length\", \"abort\", \"tool_calls\" or any other text.\n"
    "weight_version: text or number of the weights that sampled.\n"
    "temperature_scaled: were the log-probabilities taken after dividing by the temperature?\n"
    "The other arguments and what is returned: as with put_reply. Values are checked by the same\n"
    "rules as a reply's (ReplyError). Arrays that are not contiguous are copied first; a float64\n"
    "array of log-probabilities is a TypeError: narrow it yourself, so that it is seen.";

static bool fill_from_arrays(void *context, native_worker *worker)
{
    return native_fill_arrays(context, worker->record);
}

PyObject *native_store_put(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"session",        "turn",           "token_ids",
                            "token_logprobs", "topk_ids",       "topk_logprobs",
                            "prompt",         "temperature",    "mode",
                            "finish_reason",  "weight_version", "temperature_scaled",
                            "replace",        "timeout",        NULL};
    PyObject *session;
    native_arrays a = {.topk_ids = Py_None,
                       .topk_logprobs = Py_None,
                       .prompt = Py_None,
                       .finish_reason = Py_None,
                       .weight_version = Py_None,
                       .temperature_scaled = Py_None,
                       .temperature = NAN};
    rst_change change = {.kind = RST_CHANGE_PUT};
    int replace = 0;
    native_patience patience = native_patience_default();
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "OO&|$OOOOOO&O&OOOpO&:put", names, &session, native_uint32, &change.turn,
            &a.token_ids, &a.token_logprobs, &a.topk_ids, &a.topk_logprobs, &a.prompt,
            native_optional_temperature, &a.temperature, native_mode, &a.mode, &a.finish_reason,
            &a.weight_version, &a.temperature_scaled, &replace, native_patience_from, &patience)) {
        return NULL;
    }
    if (!a.token_ids || !a.token_logprobs) {
        PyErr_SetString(PyExc_TypeError, "put() needs token_ids and token_logprobs");
        return NULL;
    }
    return put((StoreObject *)self, session, &change, replace, &patience, fill_from_arrays, &a);
}

/* ---------------------------------------------------------------- seal, restart, release */

/* A change without a record, which never waits for space. */
static PyObject *change_session(StoreObject *self, PyObject *session_object, rst_change *change)
{
    native_bytes session;
    if (!native_bytes_from(session_object, "session", &session)) {
        return NULL;
    }
    PyObject *result = NULL;
    rst_store *handle = native_store_enter(self);
    if (handle) {
        change->session = session.data;
        change->session_size = session.size;
        native_patience none = {0};
        result = apply_one(self, handle, change, &none);
        native_store_leave(self);
    }
    native_bytes_clear(&session);
    return result;
}

const char native_store_seal_doc[] =
    "seal($self, session, status='completed', *, reward=None, group_index=None, index=None,\n"
    "     replace=False)\n--\n\n"
    "Give a session its outcome and its place in the ready order; it takes no more turns.\n\n"
    "status: \"completed\", \"truncated\", \"aborted\" or \"failed\".\n"
    "reward: a number, None for none. group_index, index: 64-bit numbers, or None.\n"
    "replace: let this outcome take the place of another one.\n\n"
    "Returns True when it changed the store, False when the same outcome stood there already.\n"
    "NotFoundError, ConflictError.";

PyObject *native_store_seal(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"session", "status", "reward", "group_index", "index", "replace", NULL};
    PyObject *session;
    rst_change change = {.kind = RST_CHANGE_SEAL,
                         .outcome = {.status = RST_STATUS_COMPLETED,
                                     .reward = NAN,
                                     .group_index = RST_NO_INDEX,
                                     .index = RST_NO_INDEX}};
    int replace = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|O&$O&O&O&p:seal", names, &session,
                                     native_status, &change.outcome.status, native_optional_reward,
                                     &change.outcome.reward, native_optional_int64,
                                     &change.outcome.group_index, native_optional_int64,
                                     &change.outcome.index, &replace)) {
        return NULL;
    }
    change.flags = replace ? RST_CHANGE_REPLACE : 0;
    return change_session((StoreObject *)object, session, &change);
}

const char native_store_restart_doc[] =
    "restart($self, session, from_turn=0)\n--\n\n"
    "Drop an open session's turns from `from_turn` on, for a retry; 0 drops the session.\n\n"
    "Returns True when it changed the store, False when there was nothing to drop.\n"
    "SealedError.";

PyObject *native_store_restart(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"session", "from_turn", NULL};
    PyObject *session;
    rst_change change = {.kind = RST_CHANGE_RESTART};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|O&:restart", names, &session, native_uint32,
                                     &change.turn)) {
        return NULL;
    }
    return change_session((StoreObject *)object, session, &change);
}

const char native_store_release_doc[] =
    "release($self, session, *, force=False)\n--\n\n"
    "Delete a session, open or sealed; its space is used again.\n\n"
    "force: also when a consumer has not finished with it.\n"
    "NotFoundError, HeldError.";

PyObject *native_store_release(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"session", "force", NULL};
    PyObject *session;
    int force = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$p:release", names, &session, &force)) {
        return NULL;
    }
    rst_change change = {.kind = RST_CHANGE_RELEASE, .flags = force ? RST_CHANGE_FORCE : 0};
    return change_session((StoreObject *)object, session, &change);
}

/* ---------------------------------------------------------------- many changes */

/* A list of changes while it is applied. */
typedef struct change_list {
    size_t count;
    rst_change *changes;
    native_bytes *sessions;
    MemoryObject **memories; /* NULL where there is no record */
} change_list;

static void change_list_free(change_list *list)
{
    for (size_t i = 0; i < list->count; i++) {
        native_bytes_clear(&list->sessions[i]);
        if (list->memories[i]) {
            list->memories[i]->busy = false;
            Py_DECREF(list->memories[i]);
        }
    }
    free(list->changes);
    free(list->sessions);
    free(list->memories);
}

static bool claim_memory(PyObject *turn, MemoryObject **memory)
{
    PyObject *owner = Py_TYPE(turn) == native_turn_type ? ((TurnObject *)turn)->owner : NULL;
    if (!owner || Py_TYPE(owner) != native_memory_type) {
        PyErr_SetString(PyExc_TypeError, "a turn made by rollstore.decode is needed");
        return false;
    }
    MemoryObject *found = (MemoryObject *)owner;
    if (found->busy || found->arrays > 0) {
        native_raise_new(RST_ERR_BUSY, NULL,
                         "a decoded turn is in use: its arrays are out, or it is being stored");
        return false;
    }
    found->busy = true;
    *memory = (MemoryObject *)Py_NewRef(owner);
    return true;
}

static bool parse_put(PyObject *tuple, rst_change *change, PyObject **session,
                      MemoryObject **memory)
{
    PyObject *turn;
    int replace;
    if (!PyArg_ParseTuple(tuple, "OOO&Op", &(PyObject *){NULL}, session, native_uint32,
                          &change->turn, &turn, &replace) ||
        !claim_memory(turn, memory)) {
        return false;
    }
    change->kind = RST_CHANGE_PUT;
    change->record = (*memory)->record;
    change->flags = replace ? RST_CHANGE_REPLACE : 0;
    return true;
}

static bool parse_seal(PyObject *tuple, rst_change *change, PyObject **session)
{
    int replace;
    rst_outcome *outcome = &change->outcome;
    *outcome = (rst_outcome){.reward = NAN, .group_index = RST_NO_INDEX, .index = RST_NO_INDEX};
    change->kind = RST_CHANGE_SEAL;
    bool fine = PyArg_ParseTuple(tuple, "OOO&O&O&O&p", &(PyObject *){NULL}, session, native_status,
                                 &outcome->status, native_optional_reward, &outcome->reward,
                                 native_optional_int64, &outcome->group_index,
                                 native_optional_int64, &outcome->index, &replace);
    change->flags = fine && replace ? RST_CHANGE_REPLACE : 0;
    return fine;
}

static bool parse_change(PyObject *tuple, rst_change *change, PyObject **session,
                         MemoryObject **memory)
{
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) < 2 ||
        !PyUnicode_Check(PyTuple_GET_ITEM(tuple, 0))) {
        PyErr_SetString(PyExc_TypeError, "a change is a tuple that begins with its kind");
        return false;
    }
    PyObject *kind = PyTuple_GET_ITEM(tuple, 0);
    if (PyUnicode_CompareWithASCIIString(kind, "put") == 0) {
        return parse_put(tuple, change, session, memory);
    }
    if (PyUnicode_CompareWithASCIIString(kind, "seal") == 0) {
        return parse_seal(tuple, change, session);
    }
    if (PyUnicode_CompareWithASCIIString(kind, "restart") == 0) {
        change->kind = RST_CHANGE_RESTART;
        return PyArg_ParseTuple(tuple, "OOO&", &(PyObject *){NULL}, session, native_uint32,
                                &change->turn);
    }
    if (PyUnicode_CompareWithASCIIString(kind, "release") == 0) {
        int force = 0;
        bool fine = PyArg_ParseTuple(tuple, "OOp", &(PyObject *){NULL}, session, &force);
        change->kind = RST_CHANGE_RELEASE;
        change->flags = force ? RST_CHANGE_FORCE : 0;
        return fine;
    }
    PyErr_Format(PyExc_ValueError, "%R is no kind of change", kind);
    return false;
}

static bool change_list_fill(change_list *list, PyObject *sequence)
{
    size_t count = (size_t)PyTuple_GET_SIZE(sequence);
    list->changes = calloc(count + 1, sizeof *list->changes);
    list->sessions = calloc(count + 1, sizeof *list->sessions);
    list->memories = calloc(count + 1, sizeof *list->memories);
    if (!list->changes || !list->sessions || !list->memories) {
        PyErr_NoMemory();
        return false;
    }
    list->count = count;
    for (size_t i = 0; i < count; i++) {
        rst_change *change = &list->changes[i];
        PyObject *session;
        if (!parse_change(PyTuple_GET_ITEM(sequence, (Py_ssize_t)i), change, &session,
                          &list->memories[i]) ||
            !native_bytes_from(session, "session", &list->sessions[i])) {
            return false;
        }
        change->session = list->sessions[i].data;
        change->session_size = list->sessions[i].size;
    }
    return true;
}

static PyObject *changed_flags(const change_list *list)
{
    PyObject *flags = PyList_New((Py_ssize_t)list->count);
    for (size_t i = 0; flags && i < list->count; i++) {
        PyList_SET_ITEM(flags, (Py_ssize_t)i, PyBool_FromLong(!list->changes[i].unchanged));
    }
    return flags;
}

const char native_store_apply_doc[] =
    "_apply($self, changes, timeout=60.0)\n--\n\n"
    "Apply a tuple of changes in one transaction, all or none; returns a list of bool.\n\n"
    "(\"put\", session, turn, Turn, replace), (\"seal\", session, status, reward, group_index,\n"
    "index, replace), (\"restart\", session, from_turn), (\"release\", session, force).";

PyObject *native_store_apply(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"changes", "timeout", NULL};
    StoreObject *self = (StoreObject *)object;
    PyObject *sequence;
    native_patience patience = native_patience_default();
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!|O&:_apply", names, &PyTuple_Type, &sequence,
                                     native_patience_from, &patience)) {
        return NULL;
    }
    PyObject *result = NULL;
    change_list list = {0};
    rst_store *handle = native_store_enter(self);
    if (handle && change_list_fill(&list, sequence)) {
        rst_error error;
        int code = apply(self, handle, list.changes, list.count, &patience, &error);
        if (code == 0) {
            result = changed_flags(&list);
        } else if (code > 0) {
            native_raise_waited(&error, native_patience_waited_ms(&patience));
        }
    }
    if (handle) {
        native_store_leave(self);
    }
    change_list_free(&list);
    return result;
}
