/* Filling a record: from a reply in any of its forms, from another turn, from arrays. */
#include "native.h"

#include <math.h>
#include <string.h>

/* ---------------------------------------------------------------- prompt */

/* None leaves the record without a prompt. */
static bool set_prompt(PyObject *ids, rst_record *record)
{
    if (!ids || ids == Py_None) {
        return true;
    }
    native_array prompt;
    if (!native_ids_from(ids, "prompt", 1, &prompt)) {
        return false;
    }
    rst_error error;
    int code;
    Py_BEGIN_ALLOW_THREADS code = rst_record_set_prompt(record, prompt.data, prompt.count, &error);
    Py_END_ALLOW_THREADS native_array_clear(&prompt);
    if (code) {
        native_raise(&error);
    }
    return code == 0;
}

/* ---------------------------------------------------------------- another turn */

/* A stored turn knows only what its prompt adds to the turns before. */
static bool knows_prompt(const rst_turn *turn, PyObject *prompt)
{
    if (turn->prefix_count == 0 || (prompt && prompt != Py_None)) {
        return true;
    }
    native_raise_new(RST_ERR_ARGUMENT, "prompt",
                     "the turn's prompt builds on the turns before it: give the whole prompt, as "
                     "session.prompt(turn) returns it");
    return false;
}

static bool fill_from_turn(TurnObject *source, const native_fill *fill, rst_record *record)
{
    rst_turn turn;
    if (!native_turn_look(source, &turn) || !knows_prompt(&turn, fill->prompt)) {
        return false;
    }
    if (!isnan(fill->temperature)) {
        turn.temperature = (float)fill->temperature;
    }
    rst_error error;
    int code;
    native_turn_pin(source);
    Py_BEGIN_ALLOW_THREADS code = rst_record_set(record, &turn, &error);
    Py_END_ALLOW_THREADS native_turn_unpin(source);
    if (code) {
        native_raise(&error);
        return false;
    }
    return set_prompt(fill->prompt, record);
}

/* ---------------------------------------------------------------- a reply */

bool native_fill_record(PyObject *reply, const native_fill *fill, native_json *json,
                        rst_record *record)
{
    if (Py_TYPE(reply) == native_turn_type) {
        return fill_from_turn((TurnObject *)reply, fill, record);
    }
    native_reply text;
    if (!native_reply_from(reply, false, json, &text)) {
        return false;
    }
    rst_error error;
    int code = native_reply_decode(&text, json, record, &fill->decode, &error);
    if (code > 0) {
        native_reply_raise(&text, &error);
    }
    native_reply_clear(&text, json);
    if (code || !set_prompt(fill->prompt, record)) {
        return false;
    }
    rst_record_set_temperature(record, (float)fill->temperature);
    return true;
}

/* ---------------------------------------------------------------- arrays */

typedef struct given {
    native_array token_ids, token_logprobs, topk_ids, topk_logprobs, prompt_ids;
    native_bytes weight_version, finish_reason;
} given;

static void given_clear(given *g)
{
    native_array_clear(&g->token_ids);
    native_array_clear(&g->token_logprobs);
    native_array_clear(&g->topk_ids);
    native_array_clear(&g->topk_logprobs);
    native_array_clear(&g->prompt_ids);
    native_bytes_clear(&g->weight_version);
    native_bytes_clear(&g->finish_reason);
}

static bool bad_shape(const char *name, const char *wanted, npy_intp rows, npy_intp width)
{
    native_raise_new(RST_ERR_SHAPE, name, "%s: shape %s is needed, got [%zd, %zd]", name, wanted,
                     (Py_ssize_t)rows, (Py_ssize_t)width);
    return false;
}

static bool take_arrays(const native_arrays *a, given *g, rst_turn *turn)
{
    bool candidates = a->topk_ids != Py_None || a->topk_logprobs != Py_None;
    if (!native_ids_from(a->token_ids, "token_ids", 1, &g->token_ids) ||
        !native_floats_from(a->token_logprobs, "token_logprobs", 1, &g->token_logprobs)) {
        return false;
    }
    if (candidates &&
        (!native_ids_from(a->topk_ids, "topk_ids", 2, &g->topk_ids) ||
         !native_floats_from(a->topk_logprobs, "topk_logprobs", 2, &g->topk_logprobs))) {
        return false;
    }
    if (a->prompt != Py_None && !native_ids_from(a->prompt, "prompt", 1, &g->prompt_ids)) {
        return false;
    }
    size_t n = g->token_ids.count;
    if (g->token_logprobs.count != n) {
        return bad_shape("token_logprobs", "[n] as of token_ids", g->token_logprobs.rows, 1);
    }
    if (candidates && (size_t)g->topk_ids.rows != n) {
        return bad_shape("topk_ids", "[n, k]", g->topk_ids.rows, g->topk_ids.width);
    }
    if (g->topk_logprobs.rows != g->topk_ids.rows || g->topk_logprobs.width != g->topk_ids.width) {
        return bad_shape("topk_logprobs", "[n, k] as of topk_ids", g->topk_logprobs.rows,
                         g->topk_logprobs.width);
    }
    if (n > RST_TOKEN_COUNT_MAX || g->topk_ids.width > (npy_intp)RST_TOPK_MAX ||
        g->prompt_ids.count > RST_TOKEN_COUNT_MAX) {
        native_raise_new(RST_ERR_LIMIT, NULL,
                         "a turn has at most %u tokens of %u candidates, a prompt at most %u ids",
                         RST_TOKEN_COUNT_MAX, RST_TOPK_MAX, RST_TOKEN_COUNT_MAX);
        return false;
    }
    turn->token_count = (uint32_t)n;
    turn->topk = candidates ? (uint32_t)g->topk_ids.width : 0;
    turn->token_ids = g->token_ids.data;
    turn->token_logprobs = g->token_logprobs.data;
    turn->topk_ids = g->topk_ids.data;
    turn->topk_logprobs = g->topk_logprobs.data;
    turn->prompt_ids = g->prompt_ids.data;
    turn->prompt_count = (uint32_t)g->prompt_ids.count;
    return true;
}

static bool text_size_fits(const char *name, size_t size)
{
    if (size > RST_TEXT_SIZE_MAX) {
        native_raise_new(RST_ERR_LIMIT, name, "%s has %zu bytes, at most %d are kept", name, size,
                         RST_TEXT_SIZE_MAX);
        return false;
    }
    return true;
}

static bool take_weight_version(PyObject *object, given *g, rst_turn *turn)
{
    if (object == Py_None) {
        return true;
    }
    PyObject *text = PyLong_Check(object) ? PyNumber_ToBase(object, 10) : Py_NewRef(object);
    bool fine = text && native_bytes_from(text, "weight_version", &g->weight_version) &&
                text_size_fits("weight_version", g->weight_version.size);
    Py_XDECREF(text);
    turn->weight_version = g->weight_version.data;
    turn->weight_version_size = fine ? (uint32_t)g->weight_version.size : 0;
    return fine;
}

static rst_finish finish_of(const char *text, size_t size)
{
    static const char *const known[] = {[RST_FINISH_NONE] = "",
                                        [RST_FINISH_STOP] = "stop",
                                        [RST_FINISH_LENGTH] = "length",
                                        [RST_FINISH_ABORT] = "abort",
                                        [RST_FINISH_TOOL_CALLS] = "tool_calls"};
    for (int i = RST_FINISH_NONE; i < RST_FINISH_OTHER; i++) {
        if (size == strlen(known[i]) && memcmp(text, known[i], size) == 0) {
            return (rst_finish)i;
        }
    }
    return RST_FINISH_OTHER;
}

static bool take_finish(PyObject *object, given *g, rst_turn *turn)
{
    if (object == Py_None) {
        return true;
    }
    if (!native_bytes_from(object, "finish_reason", &g->finish_reason) ||
        !text_size_fits("finish_reason", g->finish_reason.size)) {
        return false;
    }
    turn->finish = finish_of(g->finish_reason.data, g->finish_reason.size);
    turn->finish_reason = g->finish_reason.data;
    turn->finish_reason_size = (uint32_t)g->finish_reason.size;
    return true;
}

static bool take_scaled(PyObject *object, rst_turn *turn)
{
    int scaled = object == Py_None ? 0 : PyObject_IsTrue(object);
    turn->temperature_scaled = object == Py_None ? RST_SCALED_NOT_SAID
                               : scaled          ? RST_SCALED_YES
                                                 : RST_SCALED_NO;
    return scaled >= 0;
}

bool native_fill_arrays(const native_arrays *arrays, rst_record *record)
{
    given g = {0};
    rst_turn turn = {.mode = arrays->mode, .temperature = (float)arrays->temperature};
    bool fine = take_arrays(arrays, &g, &turn) &&
                take_weight_version(arrays->weight_version, &g, &turn) &&
                take_finish(arrays->finish_reason, &g, &turn) &&
                take_scaled(arrays->temperature_scaled, &turn);
    rst_error error;
    int code = 0;
    if (fine) {
        Py_BEGIN_ALLOW_THREADS code = rst_record_set(record, &turn, &error);
        Py_END_ALLOW_THREADS
    }
    given_clear(&g);
    if (code) {
        native_raise(&error);
    }
    return fine && code == 0;
}
