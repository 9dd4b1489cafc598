/*
 * From a reply that was parsed already (a dict) back to a text that the library's decoder reads.
 *
 * Why a text: the rules by which a reply is refused stand in one place, the decoder.  Only what it
 * looks at is written, some 60 KB of a reply of 1 MB; the two base64 strings are copied, without
 * being looked at as Python objects and without the GIL.
 */
#include "native.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---------------------------------------------------------------- the buffer */

void native_json_free(native_json *json)
{
    native_json_drop_gaps(json);
    free(json->text);
    free(json->gaps);
    *json = (native_json){0};
}

/* Room for `more` bytes behind what is there. */
static bool reserve(native_json *json, size_t more)
{
    if (json->capacity - json->size >= more) {
        return true;
    }
    size_t capacity = json->size + more;
    capacity += capacity / 2 + 4096;
    char *text = capacity > more ? realloc(json->text, capacity) : NULL;
    if (!text) {
        PyErr_NoMemory();
        return false;
    }
    json->text = text;
    json->capacity = capacity;
    return true;
}

static bool put(native_json *json, const char *text, size_t size)
{
    if (!reserve(json, size)) {
        return false;
    }
    memcpy(json->text + json->size, text, size);
    json->size += size;
    return true;
}

static bool put_char(native_json *json, char c)
{
    return put(json, &c, 1);
}

/* ---------------------------------------------------------------- strings */

/* From this length on a string is copied without the GIL. */
#define LONG_STRING 4096

static bool put_gap(native_json *json, PyObject *string)
{
    if (json->gap_count == json->gap_capacity) {
        size_t capacity = json->gap_capacity * 2 + 4;
        native_gap *gaps = realloc(json->gaps, capacity * sizeof *gaps);
        if (!gaps) {
            PyErr_NoMemory();
            return false;
        }
        json->gaps = gaps;
        json->gap_capacity = capacity;
    }
    size_t size = (size_t)PyUnicode_GET_LENGTH(string);
    if (!put_char(json, '"') || !reserve(json, size + 1)) {
        return false;
    }
    json->gaps[json->gap_count++] = (native_gap){
        .place = json->size,
        .string = Py_NewRef(string),
        .data = (const char *)PyUnicode_1BYTE_DATA(string),
        .size = size,
    };
    json->size += size;
    return put_char(json, '"');
}

static bool put_escaped(native_json *json, PyObject *string)
{
    static const char hex[] = "0123456789abcdef";
    const int kind = (int)PyUnicode_KIND(string);
    const void *data = PyUnicode_DATA(string);
    Py_ssize_t length = PyUnicode_GET_LENGTH(string);
    if (!reserve(json, 6 * (size_t)length + 2)) {
        return false;
    }
    char *out = json->text + json->size;
    *out++ = '"';
    for (Py_ssize_t i = 0; i < length; i++) {
        uint32_t c = PyUnicode_READ(kind, data, i);
        if (c >= 0x20 && c < 0x80 && c != '"' && c != '\\') {
            *out++ = (char)c;
        } else if (c < 0x20 || c == '"' || c == '\\' || (c >= 0xD800 && c <= 0xDFFF)) {
            /* Half a surrogate pair has no UTF-8; spelled so, the decoder says what it is. */
            *out++ = '\\';
            *out++ = 'u';
            for (int shift = 12; shift >= 0; shift -= 4) {
                *out++ = hex[c >> shift & 0xF];
            }
        } else if (c < 0x800) {
            *out++ = (char)(0xC0 | c >> 6);
            *out++ = (char)(0x80 | (c & 0x3F));
        } else if (c < 0x10000) {
            *out++ = (char)(0xE0 | c >> 12);
            *out++ = (char)(0x80 | (c >> 6 & 0x3F));
            *out++ = (char)(0x80 | (c & 0x3F));
        } else {
            *out++ = (char)(0xF0 | c >> 18);
            *out++ = (char)(0x80 | (c >> 12 & 0x3F));
            *out++ = (char)(0x80 | (c >> 6 & 0x3F));
            *out++ = (char)(0x80 | (c & 0x3F));
        }
    }
    *out++ = '"';
    json->size = (size_t)(out - json->text);
    return true;
}

static bool put_string(native_json *json, PyObject *string)
{
#if PY_VERSION_HEX < 0x030C0000 /* later ones are always ready */
    if (PyUnicode_READY(string) < 0) {
        return false;
    }
#endif
    bool gap = PyUnicode_GET_LENGTH(string) >= LONG_STRING && PyUnicode_IS_ASCII(string);
    return gap && !json->no_gaps ? put_gap(json, string) : put_escaped(json, string);
}

/* Copy, and tell whether each byte may stand in a JSON string as it is. */
static bool copy_plain(char *restrict out, const char *restrict in, size_t size)
{
    unsigned char bad = 0;
    for (size_t i = 0; i < size; i++) {
        unsigned char c = (unsigned char)in[i];
        out[i] = in[i];
        bad |= (unsigned char)((c < 0x20) | (c == '"') | (c == '\\'));
    }
    return bad == 0;
}

bool native_json_fill_gaps(native_json *json)
{
    bool plain = true;
    for (size_t i = 0; i < json->gap_count; i++) {
        const native_gap *gap = &json->gaps[i];
        plain &= copy_plain(json->text + gap->place, gap->data, gap->size);
    }
    return plain;
}

void native_json_drop_gaps(native_json *json)
{
    for (size_t i = 0; i < json->gap_count; i++) {
        Py_DECREF(json->gaps[i].string);
    }
    json->gap_count = 0;
}

/* ---------------------------------------------------------------- numbers */

static bool put_integer(native_json *json, PyObject *number)
{
    int overflow;
    long long value = PyLong_AsLongLongAndOverflow(number, &overflow);
    if (overflow) {
        PyObject *text = PyNumber_ToBase(number, 10);
        Py_ssize_t size;
        const char *digits = text ? PyUnicode_AsUTF8AndSize(text, &size) : NULL;
        bool fine = digits && put(json, digits, (size_t)size);
        Py_XDECREF(text);
        return fine;
    }
    char digits[24];
    char *at = digits + sizeof digits;
    unsigned long long rest = value < 0 ? 0 - (unsigned long long)value : (unsigned long long)value;
    do {
        *--at = (char)('0' + rest % 10);
        rest /= 10;
    } while (rest);
    if (value < 0) {
        *--at = '-';
    }
    return put(json, at, (size_t)(digits + sizeof digits - at));
}

/* Two digits at a time: each division waits for the one before it. */
static const char pairs[] = "0001020304050607080910111213141516171819"
                            "2021222324252627282930313233343536373839"
                            "4041424344454647484950515253545556575859"
                            "6061626364656667686970717273747576777879"
                            "8081828384858687888990919293949596979899";

static char *put_digits(char *out, uint64_t value, int count)
{
    int left = count;
    for (; left >= 2; left -= 2, value /= 100) {
        memcpy(out + left - 2, pairs + 2 * (value % 100), 2);
    }
    if (left) {
        *out = (char)('0' + value);
    }
    return out + count;
}

/*
 * A text that reads back as this float32, quickly; NULL where it needs the exact way.  A float32 is
 * known by any text less than 2.9e-8 of it away.  13 digits after the point are closer than that
 * from 1e-4 on; below, 10 digits and an exponent.
 */
static char *quick_float(float value, char *out)
{
    const uint64_t unit = 10000000000000; /* 10^13 */
    double size = fabs((double)value);
    if (signbit(value)) {
        *out++ = '-';
    }
    if (size == 0) {
        memcpy(out, "0.0", 3);
        return out + 3;
    }
    if (size >= 1e-4 && size < 10) {
        uint64_t scaled = (uint64_t)(int64_t)(size * (double)unit + 0.5);
        *out++ = (char)('0' + scaled / unit);
        *out++ = '.';
        uint64_t fraction = scaled % unit; /* in two parts, which wait for nothing of each other */
        put_digits(out, fraction / 100000000, 5);
        return put_digits(out + 5, fraction % 100000000, 8);
    }
    if (size >= 10 && size < 1e5) {
        uint64_t scaled = (uint64_t)(int64_t)(size * 1e9 + 0.5);
        uint64_t whole = scaled / 1000000000;
        out = put_digits(out, whole, whole < 100 ? 2 : whole < 1000 ? 3 : whole < 10000 ? 4 : 5);
        *out++ = '.';
        return put_digits(out, scaled % 1000000000, 9);
    }
    if (size < 1e-30 || size >= 1e5) {
        return NULL;
    }
    int exponent = 0;
    while (size < 1) {
        size *= 10;
        exponent++;
    }
    uint64_t scaled = (uint64_t)(int64_t)(size * 1e9 + 0.5);
    if (scaled >= 10000000000) {
        scaled = 9999999999; /* 1e-10 away */
    }
    *out++ = (char)('0' + scaled / 1000000000);
    *out++ = '.';
    out = put_digits(out, scaled % 1000000000, 9);
    *out++ = 'e';
    *out++ = '-';
    return put_digits(out, (uint64_t)exponent, 2);
}

static bool put_float(native_json *json, double value)
{
    char text[40];
    if (isnan(value)) {
        native_raise_new(RST_ERR_VALUE, json->member, "%s holds a NaN, which is no JSON number",
                         json->member ? json->member : "the reply");
        return false;
    }
    if (isinf(value)) { /* read back as infinity, and refused where it is out of place */
        return value > 0 ? put(json, "1e999", 5) : put(json, "-1e999", 6);
    }
    if (json->floats && (double)(float)value == value) {
        char *end = quick_float((float)value, text);
        if (end) {
            return put(json, text, (size_t)(end - text));
        }
    }
    char *exact = PyOS_double_to_string(value, 'r', 0, Py_DTSF_ADD_DOT_0, NULL);
    bool fine = exact && put(json, exact, strlen(exact));
    PyMem_Free(exact);
    return fine;
}

/* ---------------------------------------------------------------- entries */

/* Room for one: two brackets, two commas, a float32, an id below 10^10, null. */
#define ENTRY_SIZE 64

/*
 * A reply is mostly lists of [logprob, id, null]: such a one is written at once.  False says
 * nothing about others.  Nothing here runs other code, so borrowed references hold.
 */
static bool put_entry(native_json *json, PyObject *list)
{
    if (!json->floats || !PyList_CheckExact(list) || PyList_GET_SIZE(list) != 3 ||
        PyList_GET_ITEM(list, 2) != Py_None || json->capacity - json->size < ENTRY_SIZE) {
        return false;
    }
    PyObject *logprob = PyList_GET_ITEM(list, 0);
    PyObject *id = PyList_GET_ITEM(list, 1);
    if (!PyFloat_CheckExact(logprob) || !PyLong_CheckExact(id)) {
        return false;
    }
    int overflow;
    long long number = PyLong_AsLongLongAndOverflow(id, &overflow);
    double value = PyFloat_AS_DOUBLE(logprob);
    if (overflow || number < 0 || number > INT32_MAX || (double)(float)value != value) {
        return false;
    }
    char *out = json->text + json->size;
    *out++ = '[';
    out = quick_float((float)value, out);
    if (!out) {
        return false;
    }
    *out++ = ',';
    int digits = 1;
    for (long long limit = 10; digits < 10 && number >= limit; limit *= 10) {
        digits++;
    }
    out = put_digits(out, (uint64_t)number, digits);
    memcpy(out, ",null]", 6);
    json->size = (size_t)(out + 6 - json->text);
    return true;
}

/* ---------------------------------------------------------------- any value */

static bool put_value(native_json *json, PyObject *value, int depth);

static bool put_list(native_json *json, PyObject *list, int depth)
{
    if (!put_char(json, '[')) {
        return false;
    }
    /* The size is asked for each time: another thread may change a list between two items. */
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(list); i++) {
        PyObject *item = Py_NewRef(PySequence_Fast_GET_ITEM(list, i));
        bool fine = (i == 0 || put_char(json, ',')) &&
                    (put_entry(json, item) || put_value(json, item, depth));
        Py_DECREF(item);
        if (!fine) {
            return false;
        }
    }
    return put_char(json, ']');
}

static bool put_member(native_json *json, PyObject *key, bool first)
{
    return (first || put_char(json, ',')) && put_string(json, key) && put_char(json, ':');
}

static bool put_dict(native_json *json, PyObject *dict, int depth)
{
    Py_ssize_t at = 0;
    PyObject *key;
    PyObject *value;
    bool first = true;
    bool fine = put_char(json, '{');
    while (fine && PyDict_Next(dict, &at, &key, &value)) {
        if (!PyUnicode_Check(key)) {
            PyErr_Format(PyExc_TypeError, "the reply has a key that is no str: %R", key);
            return false;
        }
        Py_INCREF(key);
        Py_INCREF(value);
        fine = put_member(json, key, first) && put_value(json, value, depth);
        Py_DECREF(key);
        Py_DECREF(value);
        first = false;
    }
    return fine && put_char(json, '}');
}

static bool put_value(native_json *json, PyObject *value, int depth)
{
    if (value == Py_None) {
        return put(json, "null", 4);
    }
    if (PyFloat_Check(value)) {
        return put_float(json, PyFloat_AS_DOUBLE(value));
    }
    if (PyBool_Check(value)) {
        return value == Py_True ? put(json, "true", 4) : put(json, "false", 5);
    }
    if (PyLong_Check(value)) {
        return put_integer(json, value);
    }
    if (PyUnicode_Check(value)) {
        return put_string(json, value);
    }
    if (depth >= RST_JSON_DEPTH_MAX) {
        native_raise_new(RST_ERR_SYNTAX, NULL, "the reply is nested deeper than %d",
                         RST_JSON_DEPTH_MAX);
        return false;
    }
    if (PyList_Check(value) || PyTuple_Check(value)) {
        return put_list(json, value, depth + 1);
    }
    if (PyDict_Check(value)) {
        return put_dict(json, value, depth + 1);
    }
    PyErr_Format(PyExc_TypeError, "the reply holds a %.100s, which no JSON parser makes",
                 Py_TYPE(value)->tp_name);
    return false;
}

/* ---------------------------------------------------------------- what the decoder looks at */

typedef struct shape shape;

/* A member that is written; inside NULL: as it is. */
typedef struct member {
    const char *name;
    const shape *inside;
    PyObject *key;
} member;

/* An object of which only these members are written, or with `list` a list of such objects. */
struct shape {
    member *members;
    bool list;
    bool floats; /* its fractions are read as float32 */
};

static member meta_info_members[] = {
    {"output_token_logprobs", NULL, NULL},
    {"output_top_logprobs_idx_flat_b64", NULL, NULL},
    {"output_top_logprobs_val_flat_b64", NULL, NULL},
    {"output_top_logprobs_idx_flat_b64_dtype", NULL, NULL},
    {"output_top_logprobs_val_flat_b64_dtype", NULL, NULL},
    {"output_top_logprobs_idx_flat", NULL, NULL},
    {"output_top_logprobs_val_flat", NULL, NULL},
    {"output_top_logprobs_shape", NULL, NULL},
    {"output_top_logprobs_null_prefix", NULL, NULL},
    {"output_top_logprobs", NULL, NULL},
    {"output_token_sampling_mask", NULL, NULL},
    {"output_token_sampling_logprobs", NULL, NULL},
    {"output_top_logprobs_temperature_scaled", NULL, NULL},
    {"weight_version", NULL, NULL},
    {"finish_reason", NULL, NULL},
    {NULL, NULL, NULL},
};
static const shape meta_info = {meta_info_members, false, true};

static member choice_members[] = {
    {"index", NULL, NULL},
    {"meta_info", &meta_info, NULL},
    {"finish_reason", NULL, NULL},
    {NULL, NULL, NULL},
};
static const shape choices = {choice_members, true, false};

static member reply_members[] = {
    {"choices", &choices, NULL}, {"meta_info", &meta_info, NULL}, {"metadata", NULL, NULL},
    {"message", NULL, NULL},     {"error", NULL, NULL},           {"detail", NULL, NULL},
    {NULL, NULL, NULL},
};
static const shape reply_shape = {reply_members, false, false};

static member request_members[] = {
    {"input_ids", NULL, NULL},
    {"temperature", NULL, NULL},
    {"sampling_params", NULL, NULL},
    {"top_logprobs", NULL, NULL},
    {"top_logprobs_num", NULL, NULL},
    {"return_flat_raw_output_top_logprobs", NULL, NULL},
    {"return_sampling_mask", NULL, NULL},
    {NULL, NULL, NULL},
};
static const shape request_shape = {request_members, false, false};

static member line_members[] = {
    {"session_id", NULL, NULL},       {"turn", NULL, NULL}, {"request", &request_shape, NULL},
    {"response", &reply_shape, NULL}, {"end", NULL, NULL},  {NULL, NULL, NULL},
};
static const shape line_shape = {line_members, false, false};

static bool intern(member *members)
{
    for (member *m = members; m->name; m++) {
        m->key = m->key ? m->key : PyUnicode_InternFromString(m->name);
        if (!m->key) {
            return false;
        }
    }
    return true;
}

int native_text_init(void)
{
    bool fine = intern(meta_info_members) && intern(choice_members) && intern(reply_members) &&
                intern(request_members) && intern(line_members);
    return fine ? 0 : -1;
}

static bool put_shaped(native_json *json, PyObject *value, const shape *inside);

static bool put_members(native_json *json, PyObject *dict, const shape *inside)
{
    bool first = true;
    bool floats = json->floats;
    json->floats = inside->floats;
    bool fine = put_char(json, '{');
    for (const member *m = inside->members; fine && m->name; m++) {
        PyObject *value = PyDict_GetItemWithError(dict, m->key);
        if (!value) {
            fine = !PyErr_Occurred();
            continue;
        }
        Py_INCREF(value);
        json->member = m->name;
        fine = put_member(json, m->key, first) && put_shaped(json, value, m->inside);
        Py_DECREF(value);
        first = false;
    }
    json->floats = floats;
    return fine && put_char(json, '}');
}

static bool put_shaped_list(native_json *json, PyObject *list, const shape *inside)
{
    bool fine = put_char(json, '[');
    for (Py_ssize_t i = 0; fine && i < PyList_GET_SIZE(list); i++) {
        PyObject *item = Py_NewRef(PyList_GET_ITEM(list, i));
        fine = (i == 0 || put_char(json, ',')) &&
               (PyDict_Check(item) ? put_members(json, item, inside) : put_value(json, item, 2));
        Py_DECREF(item);
    }
    return fine && put_char(json, ']');
}

/* Values of another type than expected are written as they are, for the decoder to refuse. */
static bool put_shaped(native_json *json, PyObject *value, const shape *inside)
{
    if (inside && inside->list && PyList_Check(value)) {
        return put_shaped_list(json, value, inside);
    }
    if (inside && !inside->list && PyDict_Check(value)) {
        return put_members(json, value, inside);
    }
    return put_value(json, value, 1);
}

static bool begin(native_json *json, PyObject *value, const shape *inside)
{
    json->size = 0;
    json->floats = false;
    json->member = NULL;
    native_json_drop_gaps(json);
    return put_shaped(json, value, inside);
}

bool native_json_reply(native_json *json, PyObject *reply)
{
    return begin(json, reply, &reply_shape);
}

bool native_json_line(native_json *json, PyObject *line)
{
    return begin(json, line, &line_shape);
}
