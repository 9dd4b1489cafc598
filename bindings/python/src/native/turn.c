/* Turns: of a snapshot, or decoded and not stored. */
#include "native.h"

#include <math.h>
#include <stdlib.h>

PyTypeObject *native_turn_type;

/* ---------------------------------------------------------------- what it points to */

PyObject *native_turn_new(PyObject *owner, const rst_turn *turn)
{
    TurnObject *self = PyObject_New(TurnObject, native_turn_type);
    if (self) {
        self->owner = Py_NewRef(owner);
        self->turn = *turn;
    }
    return (PyObject *)self;
}

static bool of_memory(const TurnObject *self)
{
    return Py_TYPE(self->owner) == native_memory_type;
}

bool native_turn_look(TurnObject *self, rst_turn *turn)
{
    if (!of_memory(self)) {
        *turn = self->turn;
        return native_snapshot_usable((SnapshotObject *)self->owner);
    }
    MemoryObject *memory = (MemoryObject *)self->owner;
    if (memory->busy) {
        native_raise_new(RST_ERR_BUSY, NULL, "the decoded turn is being stored by another thread");
        return false;
    }
    rst_record_view(memory->record, turn); /* storing it may have moved it */
    return true;
}

void native_turn_pin(TurnObject *self)
{
    if (of_memory(self)) {
        ((MemoryObject *)self->owner)->arrays++;
    } else {
        ((SnapshotObject *)self->owner)->arrays++;
    }
}

void native_turn_unpin(TurnObject *self)
{
    if (of_memory(self)) {
        ((MemoryObject *)self->owner)->arrays--;
    } else {
        native_snapshot_array_gone((SnapshotObject *)self->owner);
    }
}

static void turn_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    Py_DECREF(((TurnObject *)object)->owner);
    PyObject_Free(object);
    Py_DECREF(type);
}

/* ---------------------------------------------------------------- arrays */

typedef enum which { TOKEN_IDS, TOKEN_LOGPROBS, TOPK_IDS, TOPK_LOGPROBS, WIDTHS, PROMPT_IDS } which;

static PyObject *get_array(PyObject *object, void *closure)
{
    TurnObject *self = (TurnObject *)object;
    rst_turn t;
    if (!native_turn_look(self, &t)) {
        return NULL;
    }
    npy_intp shape[2] = {(npy_intp)t.token_count, (npy_intp)t.topk};
    switch ((which)(uintptr_t)closure) {
    case TOKEN_IDS:
        return native_view_array(self->owner, t.token_ids, NPY_INT32, 1, shape);
    case TOKEN_LOGPROBS:
        return native_view_array(self->owner, t.token_logprobs, NPY_FLOAT32, 1, shape);
    case TOPK_IDS:
        return native_view_array(self->owner, t.topk_ids, NPY_INT32, 2, shape);
    case TOPK_LOGPROBS:
        return native_view_array(self->owner, t.topk_logprobs, NPY_FLOAT32, 2, shape);
    case WIDTHS:
        return t.widths ? native_view_array(self->owner, t.widths, NPY_INT32, 1, shape)
                        : Py_NewRef(Py_None);
    case PROMPT_IDS:
        shape[0] = (npy_intp)t.prompt_count;
        return native_view_array(self->owner, t.prompt_ids, NPY_INT32, 1, shape);
    }
    return Py_NewRef(Py_None);
}

/* ---------------------------------------------------------------- single values */

typedef enum number { TURN, TOKEN_COUNT, TOPK, NULL_PREFIX, PREFIX_COUNT, TRIMMED_COUNT } number;

static PyObject *get_number(PyObject *object, void *closure)
{
    const rst_turn *t = &((TurnObject *)object)->turn;
    uint32_t value = 0;
    switch ((number)(uintptr_t)closure) {
    case TURN:
        value = t->turn;
        break;
    case TOKEN_COUNT:
        value = t->token_count;
        break;
    case TOPK:
        value = t->topk;
        break;
    case NULL_PREFIX:
        value = t->null_prefix;
        break;
    case PREFIX_COUNT:
        value = t->prefix_count;
        break;
    case TRIMMED_COUNT:
        value = t->trimmed_count;
        break;
    }
    return PyLong_FromUnsignedLong(value);
}

static PyObject *get_temperature(PyObject *object, void *unused)
{
    (void)unused;
    return native_float_or_none((double)((TurnObject *)object)->turn.temperature);
}

static PyObject *get_mode(PyObject *object, void *unused)
{
    (void)unused;
    return PyUnicode_FromString(native_mode_name(((TurnObject *)object)->turn.mode));
}

static PyObject *get_finish_reason(PyObject *object, void *unused)
{
    (void)unused;
    rst_turn t;
    if (!native_turn_look((TurnObject *)object, &t)) {
        return NULL;
    }
    switch (t.finish) {
    case RST_FINISH_NONE:
        Py_RETURN_NONE;
    case RST_FINISH_STOP:
        return PyUnicode_FromString("stop");
    case RST_FINISH_LENGTH:
        return PyUnicode_FromString("length");
    case RST_FINISH_ABORT:
        return PyUnicode_FromString("abort");
    case RST_FINISH_TOOL_CALLS:
        return PyUnicode_FromString("tool_calls");
    case RST_FINISH_OTHER:
        break;
    }
    return native_text(t.finish_reason, t.finish_reason_size);
}

static PyObject *get_scaled(PyObject *object, void *unused)
{
    (void)unused;
    rst_scaled scaled = ((TurnObject *)object)->turn.temperature_scaled;
    return scaled == RST_SCALED_NOT_SAID ? Py_NewRef(Py_None)
                                         : PyBool_FromLong(scaled == RST_SCALED_YES);
}

static PyObject *get_weight_version(PyObject *object, void *unused)
{
    (void)unused;
    rst_turn t;
    if (!native_turn_look((TurnObject *)object, &t)) {
        return NULL;
    }
    return t.weight_version_size ? native_text(t.weight_version, t.weight_version_size)
                                 : Py_NewRef(Py_None);
}

static PyObject *get_weight_version_number(PyObject *object, void *unused)
{
    (void)unused;
    return native_int_or_none(((TurnObject *)object)->turn.weight_version_number, RST_NO_VERSION);
}

static Py_ssize_t turn_length(PyObject *object)
{
    return (Py_ssize_t)((TurnObject *)object)->turn.token_count;
}

static PyObject *turn_repr(PyObject *object)
{
    const rst_turn *t = &((TurnObject *)object)->turn;
    return PyUnicode_FromFormat("<rollstore.Turn %u: %u tokens, k = %u>", t->turn, t->token_count,
                                t->topk);
}

/* ---------------------------------------------------------------- other forms */

PyDoc_STRVAR(
    tensor_doc,
    "tensor($self, name, /)\n--\n\n"
    "One of the arrays as a torch tensor over the same memory, which it keeps alive.\n\n"
    "name: \"token_ids\", \"token_logprobs\", \"topk_ids\", \"topk_logprobs\", \"widths\" or\n"
    "    \"prompt_ids\".\n"
    "PyTorch has no read-only tensors: nothing stops a write to it, which would damage\n"
    "the store (or end the process where the store is open with mode \"r\"). Clone first.");

static PyObject *turn_tensor(PyObject *object, PyObject *name)
{
    PyObject *array = PyObject_GetAttr(object, name);
    if (!array) {
        return NULL;
    }
    PyObject *capsule = native_dlpack(NULL, array);
    Py_DECREF(array);
    PyObject *module = capsule ? PyImport_ImportModule("torch.utils.dlpack") : NULL;
    PyObject *tensor = module ? PyObject_CallMethod(module, "from_dlpack", "O", capsule) : NULL;
    Py_XDECREF(module);
    Py_XDECREF(capsule);
    return tensor;
}

PyDoc_STRVAR(
    to_reply_doc,
    "to_reply($self, /)\n--\n\n"
    "The turn as an engine's flat base64 chat reply: bytes that decode to the same arrays.");

static PyObject *turn_to_reply(PyObject *object, PyObject *unused)
{
    (void)unused;
    TurnObject *self = (TurnObject *)object;
    rst_turn turn;
    if (!native_turn_look(self, &turn)) {
        return NULL;
    }
    char *text = NULL;
    size_t size = 0;
    rst_error error;
    int code;
    native_turn_pin(self);
    Py_BEGIN_ALLOW_THREADS code = rst_turn_to_reply(&turn, &text, &size, &error);
    Py_END_ALLOW_THREADS native_turn_unpin(self);
    if (code) {
        return native_raise(&error);
    }
    PyObject *reply = PyBytes_FromStringAndSize(text, (Py_ssize_t)size);
    free(text);
    return reply;
}

/* ---------------------------------------------------------------- the type */

/* clang-format off */
#define ARRAY(name, which, doc)                                                                    \
    {#name, get_array, NULL, doc, (void *)(uintptr_t)(which)}
#define NUMBER(name, which, doc)                                                                   \
    {#name, get_number, NULL, doc, (void *)(uintptr_t)(which)}
/* clang-format on */

static PyGetSetDef attributes[] = {
    ARRAY(token_ids, TOKEN_IDS, "int32 [n], read-only: the sampled tokens."),
    ARRAY(token_logprobs, TOKEN_LOGPROBS,
          "float32 [n], read-only: natural log, of the distribution sampled from."),
    ARRAY(topk_ids, TOPK_IDS,
          "int32 [n, k], read-only: each token's candidates in the engine's order, -1 in unused "
          "slots."),
    ARRAY(topk_logprobs, TOPK_LOGPROBS, "float32 [n, k], read-only: -inf in unused slots."),
    ARRAY(widths, WIDTHS,
          "int32 [n], read-only: used slots of each row; None when every row uses all k."),
    ARRAY(prompt_ids, PROMPT_IDS,
          "int32, read-only. Of a stored turn what its prompt adds after prefix_count tokens of\n"
          "the session before it; of a decoded one the whole prompt."),
    NUMBER(index, TURN, "Its number in the session, from 0."),
    NUMBER(n, TOKEN_COUNT, "Generated tokens."),
    NUMBER(top_k, TOPK, "Slots a token."),
    NUMBER(null_prefix, NULL_PREFIX, "Leading tokens without candidates."),
    NUMBER(prefix_count, PREFIX_COUNT, "Tokens of the session before that the prompt begins with."),
    NUMBER(trimmed_count, TRIMMED_COUNT,
           "Tokens of the session before that the prompt leaves out."),
    {"temperature", get_temperature, NULL, "The request's, None when not known.", NULL},
    {"mode", get_mode, NULL, "\"selected\" or \"support\".", NULL},
    {"finish_reason", get_finish_reason, NULL,
     "\"stop\", \"length\", \"abort\", \"tool_calls\", other text, or None.", NULL},
    {"temperature_scaled", get_scaled, NULL,
     "Are the log-probabilities of softmax(logits / temperature)? None when the engine did not "
     "say.",
     NULL},
    {"weight_version", get_weight_version, NULL, "Text as the engine gave it, or None.", NULL},
    {"weight_version_number", get_weight_version_number, NULL,
     "weight_version where it is a decimal number, else None.", NULL},
    {0},
};

static PyMethodDef methods[] = {
    {"tensor", turn_tensor, METH_O, tensor_doc},
    {"to_reply", turn_to_reply, METH_NOARGS, to_reply_doc},
    {0},
};

PyDoc_STRVAR(turn_doc,
             "One engine call: generated tokens and their candidates.\n\n"
             "Of a stored turn the arrays are the store's memory itself, without a copy. Each\n"
             "attribute makes a new read-only array that keeps the snapshot alive; a closed\n"
             "snapshot's turns raise ClosedError. len(turn) is the number of tokens.");

PyTypeObject *native_turn_type_new(PyObject *module)
{
    PyType_Slot slots[] = {
        {Py_tp_doc, (void *)(uintptr_t)turn_doc},
        {Py_tp_dealloc, turn_dealloc},
        {Py_tp_repr, turn_repr},
        {Py_tp_methods, methods},
        {Py_tp_getset, attributes},
        {Py_sq_length, turn_length},
        {0, NULL},
    };
    PyType_Spec spec = {
        .name = "rollstore._rollstore.Turn",
        .basicsize = sizeof(TurnObject),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
        .slots = slots,
    };
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &spec, NULL);
}

/* ---------------------------------------------------------------- decoding without a store */

PyObject *native_turn_of_memory(MemoryObject *memory)
{
    rst_turn turn;
    rst_record_view(memory->record, &turn);
    return native_turn_new((PyObject *)memory, &turn);
}

const char native_decode_doc[] =
    "decode(reply, *, top_k=0, mode='selected', request='flat', choice=0, prompt=None,\n"
    "       temperature=None)\n--\n\n"
    "Decode an engine's reply without storing it; arguments and errors as with Store.put_reply.\n\n"
    "The Turn has memory of its own. Store.put_reply takes it later.";

PyObject *native_decode(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"reply",  "top_k",  "mode",        "request",
                            "choice", "prompt", "temperature", NULL};
    (void)module;
    PyObject *reply;
    native_fill fill = {.prompt = Py_None, .temperature = NAN};
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O|$O&O&O&O&OO&:decode", names, &reply, native_uint32, &fill.decode.topk,
            native_mode, &fill.decode.mode, native_request, &fill.decode.request, native_uint32,
            &fill.decode.choice, &fill.prompt, native_optional_temperature, &fill.temperature)) {
        return NULL;
    }
    MemoryObject *memory = native_memory_new();
    if (!memory) {
        return NULL;
    }
    native_json json = {0};
    bool fine = native_fill_record(reply, &fill, &json, memory->record);
    native_json_free(&json);
    PyObject *turn = fine ? native_turn_of_memory(memory) : NULL;
    Py_DECREF(memory);
    return turn;
}

const char native_decode_line_doc[] =
    "decode_line(line, /, *, top_k=0, replace=False)\n--\n\n"
    "One line of a recorded session (bytes-like, str or dict) as a change for Store._apply.";

/* The tuple of Store._apply; see its documentation. */
static PyObject *change_of_line(const rst_line *line, MemoryObject *memory, int replace)
{
    PyObject *flag = replace ? Py_True : Py_False;
    PyObject *session = PyBytes_FromStringAndSize(line->session, (Py_ssize_t)line->session_size);
    if (line->kind == RST_LINE_TURN) {
        return Py_BuildValue("(sNINO)", "put", session, line->turn, native_turn_of_memory(memory),
                             flag);
    }
    const rst_outcome *o = &line->outcome;
    return Py_BuildValue("(sNsNNNO)", "seal", session, native_status_name(o->status),
                         native_float_or_none(o->reward),
                         native_int_or_none(o->group_index, RST_NO_INDEX),
                         native_int_or_none(o->index, RST_NO_INDEX), flag);
}

PyObject *native_decode_line(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"", "top_k", "replace", NULL};
    (void)module;
    PyObject *object;
    uint32_t topk = 0;
    int replace = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$O&p:decode_line", names, &object,
                                     native_uint32, &topk, &replace)) {
        return NULL;
    }
    MemoryObject *memory = native_memory_new();
    if (!memory) {
        return NULL;
    }
    PyObject *change = NULL;
    native_json json = {0};
    native_reply text;
    if (native_reply_from(object, true, &json, &text)) {
        rst_line line;
        rst_error error;
        int code = native_line_decode(&text, &json, memory->record, topk, &line, &error);
        if (code == 0) {
            change = change_of_line(&line, memory, replace);
        } else if (code > 0) {
            native_reply_raise(&text, &error);
        }
        native_reply_clear(&text, &json);
    }
    native_json_free(&json);
    Py_DECREF(memory);
    return change;
}
