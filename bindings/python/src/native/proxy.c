/* Requests and replies taken apart for rollstore.server.  Everything is read without the GIL. */
#include "native.h"

#include <math.h>
#include <stdlib.h>

/* The bytes of a text.  False with an exception. */
static bool text_from(PyObject *object, Py_buffer *buffer)
{
    return PyObject_GetBuffer(object, buffer, PyBUF_SIMPLE) == 0;
}

/* ---------------------------------------------------------------- requests */

const char native_json_object_doc[] =
    "json_object(text, /)\n--\n\n"
    "The members of a JSON object as a list of (name, value), each as it is spelled, in bytes.\n\n"
    "Only the first level is taken apart; all of it is checked. ReplyError.";

static PyObject *member_list(const rst_member *members, size_t count)
{
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list && i < count; i++) {
        const rst_member *m = &members[i];
        PyObject *pair = Py_BuildValue("(y#y#)", m->name, (Py_ssize_t)m->name_size, m->value,
                                       (Py_ssize_t)m->value_size);
        if (!pair) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, (Py_ssize_t)i, pair);
    }
    return list;
}

PyObject *native_json_object(PyObject *module, PyObject *text)
{
    (void)module;
    Py_buffer buffer;
    if (!text_from(text, &buffer)) {
        return NULL;
    }
    rst_member members[RST_MEMBER_COUNT_MAX];
    size_t count;
    rst_error error;
    int code;
    Py_BEGIN_ALLOW_THREADS code =
        rst_json_object(buffer.buf, (size_t)buffer.len, members, &count, &error);
    Py_END_ALLOW_THREADS PyObject *result =
        code ? native_raise(&error) : member_list(members, count);
    PyBuffer_Release(&buffer);
    return result;
}

const char native_json_token_ids_doc[] =
    "json_token_ids(text, /)\n--\n\n"
    "The token ids of a JSON array, as the bytes of an int32 array. ReplyError.";

static PyObject *id_bytes(const int32_t *ids, size_t count)
{
    return PyBytes_FromStringAndSize((const char *)ids, (Py_ssize_t)(count * sizeof *ids));
}

PyObject *native_json_token_ids(PyObject *module, PyObject *text)
{
    (void)module;
    Py_buffer buffer;
    if (!text_from(text, &buffer)) {
        return NULL;
    }
    int32_t *ids;
    size_t count;
    rst_error error;
    int code;
    Py_BEGIN_ALLOW_THREADS code =
        rst_json_token_ids(buffer.buf, (size_t)buffer.len, &ids, &count, &error);
    Py_END_ALLOW_THREADS PyBuffer_Release(&buffer);
    PyObject *result = code ? native_raise(&error) : id_bytes(ids, count);
    free(ids);
    return result;
}

/* ---------------------------------------------------------------- replies */

const char native_decode_and_strip_doc[] =
    "decode_and_strip(reply, *, top_k=0, mode='selected', request='flat', prompt=None,\n"
    "                 temperature=None, logprobs=False, meta_info=False, token_ids=False,\n"
    "                 split=False)\n--\n\n"
    "A chat reply read once: its turn, and what the agent gets of it.\n\n"
    "top_k to temperature: as with decode, of the first choice. prompt: the bytes of int32 ids;\n"
    "None takes those that the reply says.\n"
    "logprobs, meta_info, token_ids: what the agent asked for.\n"
    "split: give the first choice's logprobs apart, with null in their place.\n\n"
    "Returns (turn, answer, logprobs, prompt): a Turn in memory of its own; bytes of JSON; bytes "
    "of\n"
    "JSON or None; the bytes of the prompt's int32 ids or None. ReplyError.";

/* What one call reads, and makes of it without the GIL. */
typedef struct taking {
    const char *reply;
    size_t size;
    const int32_t *prompt; /* NULL: the reply's */
    size_t prompt_count;
    rst_decode_options decode;
    unsigned keep;
    float temperature;
    rst_record *record;
    rst_answer answer;
} taking;

static int take_apart(taking *t, rst_error *error)
{
    int code = rst_reply_decode_and_strip(t->record, t->reply, t->size, &t->decode, t->keep,
                                          &t->answer, error);
    if (!t->prompt) {
        t->prompt = t->answer.prompt_ids;
        t->prompt_count = t->answer.prompt_count;
    }
    if (!code && t->prompt) {
        code = rst_record_set_prompt(t->record, t->prompt, t->prompt_count, error);
    }
    if (!code) {
        rst_record_set_temperature(t->record, t->temperature);
    }
    return code;
}

static PyObject *taken(const taking *t, MemoryObject *memory)
{
    PyObject *turn = native_turn_of_memory(memory);
    PyObject *prompt = t->prompt ? id_bytes(t->prompt, t->prompt_count) : Py_NewRef(Py_None);
    if (!turn || !prompt) {
        Py_XDECREF(turn);
        Py_XDECREF(prompt);
        return NULL;
    }
    /* "y#" makes None of NULL. */
    return Py_BuildValue("(Ny#y#N)", turn, t->answer.text, (Py_ssize_t)t->answer.text_size,
                         t->answer.logprobs, (Py_ssize_t)t->answer.logprobs_size, prompt);
}

static PyObject *take(taking *t)
{
    MemoryObject *memory = native_memory_new();
    if (!memory) {
        return NULL;
    }
    t->record = memory->record;
    rst_error error;
    int code;
    Py_BEGIN_ALLOW_THREADS code = take_apart(t, &error);
    Py_END_ALLOW_THREADS PyObject *result = code ? native_raise(&error) : taken(t, memory);
    rst_answer_clear(&t->answer);
    Py_DECREF(memory);
    return result;
}

PyObject *native_decode_and_strip(PyObject *module, PyObject *args, PyObject *kwargs)
{
    (void)module;
    static char *names[] = {"reply",     "top_k",       "mode",     "request",
                            "prompt",    "temperature", "logprobs", "meta_info",
                            "token_ids", "split",       NULL};
    Py_buffer reply, prompt = {0};
    int logprobs = 0, meta_info = 0, token_ids = 0, split = 0;
    double temperature = NAN;
    taking t = {0};
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "y*|$O&O&O&z*O&pppp:decode_and_strip", names, &reply, native_uint32,
            &t.decode.topk, native_mode, &t.decode.mode, native_request, &t.decode.request, &prompt,
            native_optional_temperature, &temperature, &logprobs, &meta_info, &token_ids, &split)) {
        return NULL;
    }
    if (prompt.obj && (PyUnicode_Check(prompt.obj) || prompt.len % (Py_ssize_t)sizeof *t.prompt)) {
        PyErr_SetString(PyExc_TypeError, "prompt: the bytes of int32 ids are needed");
        PyBuffer_Release(&reply);
        PyBuffer_Release(&prompt);
        return NULL;
    }
    t.reply = reply.buf;
    t.size = (size_t)reply.len;
    t.prompt = prompt.buf;
    t.prompt_count = (size_t)prompt.len / sizeof *t.prompt;
    t.temperature = (float)temperature;
    t.keep = (logprobs ? RST_KEEP_LOGPROBS : 0) | (meta_info ? RST_KEEP_META_INFO : 0) |
             (token_ids ? RST_KEEP_TOKEN_IDS : 0) | (split ? RST_SPLIT_LOGPROBS : 0);
    PyObject *result = take(&t);
    PyBuffer_Release(&reply);
    PyBuffer_Release(&prompt);
    return result;
}
