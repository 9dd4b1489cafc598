/* Replies and recorded lines as they come from Python. */
#include "native.h"

#include <string.h>

bool native_reply_from(PyObject *object, bool line, native_json *json, native_reply *out)
{
    *out = (native_reply){.line = line};
    if (PyDict_Check(object)) {
        json->no_gaps = false;
        if (line ? !native_json_line(json, object) : !native_json_reply(json, object)) {
            return false;
        }
        out->dict = Py_NewRef(object);
        return true;
    }
    if (PyUnicode_Check(object)) {
        Py_ssize_t size;
        out->data = PyUnicode_AsUTF8AndSize(object, &size);
        if (!out->data) {
            return false;
        }
        out->size = (size_t)size;
        out->buffer.obj = NULL;
        out->dict = NULL;
        return true;
    }
    if (!PyObject_CheckBuffer(object)) {
        PyErr_Format(PyExc_TypeError, "%s: bytes-like, str or dict is needed, got %.100s",
                     line ? "line" : "reply", Py_TYPE(object)->tp_name);
        return false;
    }
    if (PyObject_GetBuffer(object, &out->buffer, PyBUF_SIMPLE) < 0) {
        return false;
    }
    out->data = out->buffer.buf;
    out->size = (size_t)out->buffer.len;
    return true;
}

void native_reply_clear(native_reply *reply, native_json *json)
{
    if (reply->buffer.obj) {
        PyBuffer_Release(&reply->buffer);
    }
    Py_CLEAR(reply->dict);
    native_json_drop_gaps(json);
}

/* One of the two decoders, on a text. */
typedef struct decoding {
    rst_record *record;
    const rst_decode_options *options; /* of a reply */
    uint32_t topk;                     /* of a line */
    rst_line *line;                    /* NULL for a reply */
} decoding;

static int decode_text(const decoding *d, const char *text, size_t size, rst_error *error)
{
    return d->line ? rst_line_decode(d->record, text, size, d->topk, d->line, error)
                   : rst_record_decode(d->record, text, size, d->options, error);
}

static bool write_out(native_reply *reply, native_json *json)
{
    json->no_gaps = true;
    return reply->line ? native_json_line(json, reply->dict) : native_json_reply(json, reply->dict);
}

static int decode(native_reply *reply, native_json *json, const decoding *d, rst_error *error)
{
    int code = 0;
    bool plain = true;
    Py_BEGIN_ALLOW_THREADS if (reply->dict)
    {
        plain = native_json_fill_gaps(json);
    }
    if (plain) {
        code = decode_text(d, reply->dict ? json->text : reply->data,
                           reply->dict ? json->size : reply->size, error);
    }
    Py_END_ALLOW_THREADS if (plain)
    {
        return code;
    }
    if (!write_out(reply, json)) {
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS code = decode_text(d, json->text, json->size, error);
    Py_END_ALLOW_THREADS return code;
}

int native_reply_decode(native_reply *reply, native_json *json, rst_record *record,
                        const rst_decode_options *options, rst_error *error)
{
    decoding d = {.record = record, .options = options};
    return decode(reply, json, &d, error);
}

int native_line_decode(native_reply *reply, native_json *json, rst_record *record, uint32_t topk,
                       rst_line *line, rst_error *error)
{
    decoding d = {.record = record, .topk = topk, .line = line};
    return decode(reply, json, &d, error);
}

PyObject *native_reply_raise(const native_reply *reply, rst_error *error)
{
    return reply->dict ? native_raise_no_offset(error) : native_raise(error);
}
