/* Requests and replies taken apart for rollstore.server.  Everything is read without the GIL. */
#include "native.h"

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

const char native_strip_reply_doc[] =
    "strip_reply(reply, *, logprobs=False, meta_info=False, token_ids=False, split=False)\n--\n\n"
    "A chat reply without its candidates and without what the agent did not ask for.\n\n"
    "logprobs, meta_info, token_ids: what it asked for.\n"
    "split: give the first choice's logprobs apart, with null in their place.\n\n"
    "Returns (answer, logprobs, prompt): bytes of JSON; bytes of JSON or None; the bytes of the\n"
    "prompt's int32 ids or None. ReplyError.";

static PyObject *answer_tuple(const rst_answer *answer)
{
    PyObject *prompt = answer->prompt_ids ? id_bytes(answer->prompt_ids, answer->prompt_count)
                                          : Py_NewRef(Py_None);
    /* "y#" makes None of NULL. */
    return prompt ? Py_BuildValue("(y#y#N)", answer->text, (Py_ssize_t)answer->text_size,
                                  answer->logprobs, (Py_ssize_t)answer->logprobs_size, prompt)
                  : NULL;
}

PyObject *native_strip_reply(PyObject *module, PyObject *args, PyObject *kwargs)
{
    (void)module;
    static char *names[] = {"reply", "logprobs", "meta_info", "token_ids", "split", NULL};
    PyObject *reply;
    int logprobs = 0, meta_info = 0, token_ids = 0, split = 0;
    Py_buffer buffer;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$pppp:strip_reply", names, &reply, &logprobs,
                                     &meta_info, &token_ids, &split) ||
        !text_from(reply, &buffer)) {
        return NULL;
    }
    unsigned keep = (logprobs ? RST_KEEP_LOGPROBS : 0) | (meta_info ? RST_KEEP_META_INFO : 0) |
                    (token_ids ? RST_KEEP_TOKEN_IDS : 0) | (split ? RST_SPLIT_LOGPROBS : 0);
    rst_answer answer;
    rst_error error;
    int code;
    Py_BEGIN_ALLOW_THREADS code =
        rst_reply_strip(buffer.buf, (size_t)buffer.len, keep, &answer, &error);
    Py_END_ALLOW_THREADS PyBuffer_Release(&buffer);
    PyObject *result = code ? native_raise(&error) : answer_tuple(&answer);
    rst_answer_clear(&answer);
    return result;
}
