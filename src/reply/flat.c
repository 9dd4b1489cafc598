/* The flat forms of candidates: two arrays and their shape, as base64 or as JSON numbers. */
#include <stdlib.h>

#include "../base64/base64.h"
#include "reply.h"
#include "value.h"

/* ---------------------------------------------------------------- shape */

static int bad_shape(const reading *r, reply_field field, rst_json_node node, const char *what)
{
    const char *name = rst_reply_fields[field];
    return rst_fail_at(r->error, RST_ERR_SHAPE, name, (int64_t)rst_json_offset(r->json, node),
                       "%s %s", name, what);
}

/* A count: an integer from 0 on. */
static int read_count(const reading *r, reply_field field, rst_json_node node, uint64_t *count)
{
    int64_t value = 0;
    switch (rst_json_int64(r->json, node, &value)) {
    case RST_JSON_NOT_NUMBER:
        return rst_fail_at(r->error, RST_ERR_TYPE, rst_reply_fields[field],
                           (int64_t)rst_json_offset(r->json, node), "%s: %s, not a number",
                           rst_reply_fields[field], rst_json_kind(r->json, node));
    case RST_JSON_NOT_INTEGER:
        return bad_shape(r, field, node, "holds a number that is no integer");
    case RST_JSON_OUT_OF_RANGE:
        return bad_shape(r, field, node, "holds a number beyond 64 bits");
    case RST_JSON_NUMBER_FINE:
        break;
    }
    if (value < 0) {
        return bad_shape(r, field, node, "holds a negative number");
    }
    *count = (uint64_t)value;
    return RST_OK;
}

static int read_shape(const reading *r, uint64_t *rows, uint64_t *k)
{
    if (!rst_reply_has(r, FIELD_SHAPE)) {
        return rst_reply_missing(r, FIELD_SHAPE);
    }
    int code = rst_reply_need_array(r, FIELD_SHAPE);
    if (code) {
        return code;
    }
    rst_json_node shape = r->fields[FIELD_SHAPE];
    if (rst_json_count(r->json, shape) != 2) {
        return bad_shape(r, FIELD_SHAPE, shape, "is not [rows, k]");
    }
    code = read_count(r, FIELD_SHAPE, rst_json_element(r->json, shape, 0), rows);
    return code ? code : read_count(r, FIELD_SHAPE, rst_json_element(r->json, shape, 1), k);
}

static int read_null_prefix(reading *r)
{
    if (!rst_reply_has(r, FIELD_NULL_PREFIX)) {
        return rst_reply_missing(r, FIELD_NULL_PREFIX);
    }
    rst_json_node node = r->fields[FIELD_NULL_PREFIX];
    uint64_t count;
    int code = read_count(r, FIELD_NULL_PREFIX, node, &count);
    if (!code && count > r->n) {
        return rst_fail_at(r->error, RST_ERR_SHAPE, rst_reply_fields[FIELD_NULL_PREFIX],
                           (int64_t)rst_json_offset(r->json, node), "%s is %llu, of %u tokens",
                           rst_reply_fields[FIELD_NULL_PREFIX], (unsigned long long)count, r->n);
    }
    r->null_prefix = code ? 0 : (uint32_t)count;
    return code;
}

/* Find null_prefix and k, and check the shape against tokens and request. */
static int measure_shape(reading *r)
{
    uint64_t rows = 0;
    uint64_t k = 0;
    if (r->n == 0 && !rst_reply_has(r, FIELD_SHAPE)) {
        r->k = r->options->topk;
        return RST_OK;
    }
    int code = read_shape(r, &rows, &k);
    if (!code && (r->n > 0 || rst_reply_has(r, FIELD_NULL_PREFIX))) {
        code = read_null_prefix(r);
    }
    if (code) {
        return code;
    }
    /* Some engines count the rows that are null, and not in the arrays, too. */
    uint32_t there = r->n - r->null_prefix;
    bool rows_fit = rows == there || rows == r->n;
    bool k_fits = k == (r->options->topk ? r->options->topk : k);
    bool nothing = there == 0 && k == 0;
    if (!rows_fit || (!k_fits && !nothing)) {
        return rst_fail_at(
            r->error, RST_ERR_SHAPE, rst_reply_fields[FIELD_SHAPE],
            (int64_t)rst_json_offset(r->json, r->fields[FIELD_SHAPE]),
            "%s is [%llu, %llu] but %u tokens - %u null positions x %llu candidates were expected",
            rst_reply_fields[FIELD_SHAPE], (unsigned long long)rows, (unsigned long long)k, r->n,
            r->null_prefix, r->options->topk ? r->options->topk : (unsigned long long)k);
    }
    if (k > RST_TOPK_MAX) {
        return bad_shape(r, FIELD_SHAPE, r->fields[FIELD_SHAPE],
                         "has more candidates a token than a record holds");
    }
    /* Where no row is there to show it, a k that the reply only claims must not cost memory. */
    bool shown = there > 0 || r->n == 0;
    r->k = r->options->topk ? r->options->topk : shown ? (uint32_t)k : 0;
    return RST_OK;
}

static uint64_t value_count(const reading *r)
{
    return (uint64_t)(r->n - r->null_prefix) * r->k;
}

static int bad_value_count(const reading *r, reply_field field, uint64_t count)
{
    return rst_fail_at(r->error, RST_ERR_SHAPE, rst_reply_fields[field],
                       (int64_t)rst_json_offset(r->json, r->fields[field]),
                       "%s holds %llu values but %u tokens - %u null positions x %u candidates "
                       "were expected",
                       rst_reply_fields[field], (unsigned long long)count, r->n, r->null_prefix,
                       r->k);
}

/* ---------------------------------------------------------------- base64 */

const char *rst_base64_path(void)
{
    return rst_base64_path_name(rst_base64_active_path());
}

static int check_dtype(const reading *r, reply_field field, const char *dtype)
{
    const char *name = rst_reply_fields[field];
    if (!rst_reply_has(r, field)) {
        return rst_fail(r->error, RST_ERR_DTYPE, name, "the reply has no %s: it must say \"%s\"",
                        name, dtype);
    }
    rst_json_node node = r->fields[field];
    bool known = rst_json_first(r->json, node) == '"' && rst_json_string_is(r->json, node, dtype);
    return known
               ? RST_OK
               : rst_fail_at(r->error, RST_ERR_DTYPE, name, (int64_t)rst_json_offset(r->json, node),
                             "%s is not \"%s\"", name, dtype);
}

static int bad_base64(const reading *r, reply_field field, int status, size_t at)
{
    return rst_fail_at(r->error, RST_ERR_BASE64, rst_reply_fields[field],
                       (int64_t)rst_json_string_offset(r->json, r->fields[field], at),
                       "%s, character %zu: %s", rst_reply_fields[field], at,
                       rst_base64_status_text(status));
}

/* A text of the wrong length: say what is wrong with its characters rather, if something is. */
static int wrong_length(const reading *r, reply_field field, const char *text, size_t size,
                        size_t decoded_size)
{
    void *decoded = malloc(decoded_size + 1);
    if (!decoded) {
        return rst_fail(r->error, RST_ERR_MEMORY, NULL, "no memory to check %s",
                        rst_reply_fields[field]);
    }
    size_t at;
    int status = rst_base64_decode(text, size, decoded, decoded_size, &at);
    free(decoded);
    if (status) {
        return bad_base64(r, field, status, at);
    }
    if (decoded_size % 4) {
        return bad_shape(r, field, r->fields[field], "does not hold whole values of four bytes");
    }
    return bad_value_count(r, field, decoded_size / 4);
}

static int measure_text(const reading *r, reply_field field, rst_json_buffer *buffer,
                        const char **text, size_t *size)
{
    rst_json_node node = r->fields[field];
    *text = NULL;
    *size = 0;
    if (node == RST_JSON_NONE) { /* of a reply without tokens */
        return RST_OK;
    }
    int code = rst_json_long_string(r->json, node, buffer, text, size);
    if (code == RST_ERR_VALUE) {
        return rst_fail_at(r->error, RST_ERR_BASE64, rst_reply_fields[field],
                           (int64_t)rst_json_offset(r->json, node),
                           "%s holds half a surrogate pair", rst_reply_fields[field]);
    }
    if (code) {
        return rst_fail(r->error, code, NULL, "no memory to read %s", rst_reply_fields[field]);
    }
    size_t decoded_size;
    size_t at;
    int status = rst_base64_decoded_size(*text, *size, &decoded_size, &at);
    if (status) {
        return bad_base64(r, field, status, at);
    }
    return decoded_size == 4 * value_count(r) ? RST_OK
                                              : wrong_length(r, field, *text, *size, decoded_size);
}

/* Both arrays are there, as the types that they should be. */
static int need_text(const reading *r, reply_field field, reply_field dtype_field,
                     const char *dtype)
{
    if (!rst_reply_has(r, field)) {
        return r->n == 0 ? RST_OK : rst_reply_missing(r, field);
    }
    rst_json_node node = r->fields[field];
    if (rst_json_first(r->json, node) != '"') {
        return rst_fail_at(r->error, RST_ERR_TYPE, rst_reply_fields[field],
                           (int64_t)rst_json_offset(r->json, node), "%s is %s, not a string",
                           rst_reply_fields[field], rst_json_kind(r->json, node));
    }
    return check_dtype(r, dtype_field, dtype);
}

static int measure_base64(reading *r)
{
    int code = need_text(r, FIELD_IDX_B64, FIELD_IDX_B64_DTYPE, "int32");
    if (!code) {
        code = need_text(r, FIELD_VAL_B64, FIELD_VAL_B64_DTYPE, "float32");
    }
    if (!code) {
        code = measure_shape(r);
    }
    if (!code) {
        code = measure_text(r, FIELD_IDX_B64, &r->reader->unescaped[0], &r->ids_text,
                            &r->ids_text_size);
    }
    if (!code) {
        code = measure_text(r, FIELD_VAL_B64, &r->reader->unescaped[1], &r->logprobs_text,
                            &r->logprobs_text_size);
    }
    return code;
}

static int fill_base64(reading *r)
{
    size_t first = (size_t)r->null_prefix * r->k;
    size_t size = 4 * (size_t)value_count(r);
    size_t at;
    rst_reply_fill_unused(r, 0, first);
    if (size == 0) {
        return RST_OK;
    }
    int status =
        rst_base64_decode(r->ids_text, r->ids_text_size, r->slots.topk_ids + first, size, &at);
    if (status) {
        return bad_base64(r, FIELD_IDX_B64, status, at);
    }
    status = rst_base64_decode(r->logprobs_text, r->logprobs_text_size,
                               r->slots.topk_logprobs + first, size, &at);
    return status ? bad_base64(r, FIELD_VAL_B64, status, at) : RST_OK;
}

static reply_spot find_base64(const reading *r, uint32_t row, uint32_t slot, bool is_id)
{
    reply_field field = is_id ? FIELD_IDX_B64 : FIELD_VAL_B64;
    size_t byte = 4 * ((size_t)(row - r->null_prefix) * r->k + slot);
    size_t character = byte / 3 * 4 + byte % 3;
    return (reply_spot){
        .field = field,
        .offset = rst_json_string_offset(r->json, r->fields[field], character),
    };
}

const reply_form rst_form_base64 = {measure_base64, fill_base64, find_base64};

/* ---------------------------------------------------------------- numbers */

static int measure_array(const reading *r, reply_field field)
{
    if (!rst_reply_has(r, field)) { /* of a reply without tokens */
        return RST_OK;
    }
    uint32_t count = rst_json_count(r->json, r->fields[field]);
    return count == value_count(r) ? RST_OK : bad_value_count(r, field, count);
}

static int need_array(const reading *r, reply_field field)
{
    if (!rst_reply_has(r, field)) {
        return r->n == 0 ? RST_OK : rst_reply_missing(r, field);
    }
    return rst_reply_need_array(r, field);
}

static int measure_plain(reading *r)
{
    int code = need_array(r, FIELD_IDX_PLAIN);
    if (!code) {
        code = need_array(r, FIELD_VAL_PLAIN);
    }
    if (!code) {
        code = measure_shape(r);
    }
    if (!code) {
        code = measure_array(r, FIELD_IDX_PLAIN);
    }
    if (!code) {
        code = measure_array(r, FIELD_VAL_PLAIN);
    }
    return code;
}

static int fill_plain(reading *r)
{
    size_t at = (size_t)r->null_prefix * r->k;
    rst_reply_fill_unused(r, 0, at);
    if (value_count(r) == 0) {
        return RST_OK;
    }
    rst_json_node id = rst_json_begin(r->json, r->fields[FIELD_IDX_PLAIN]);
    rst_json_node logprob = rst_json_begin(r->json, r->fields[FIELD_VAL_PLAIN]);
    for (uint32_t row = r->null_prefix; row < r->n; row++) {
        for (uint32_t slot = 0; slot < r->k; slot++, at++) {
            int code = rst_reply_read_id(r, FIELD_IDX_PLAIN, id, row, slot, &r->slots.topk_ids[at]);
            if (!code) {
                code = rst_reply_read_logprob(r, FIELD_VAL_PLAIN, logprob, row, slot,
                                              &r->slots.topk_logprobs[at]);
            }
            if (code) {
                return code;
            }
            id = rst_json_next(r->json, id);
            logprob = rst_json_next(r->json, logprob);
        }
    }
    return RST_OK;
}

static reply_spot find_plain(const reading *r, uint32_t row, uint32_t slot, bool is_id)
{
    reply_field field = is_id ? FIELD_IDX_PLAIN : FIELD_VAL_PLAIN;
    uint64_t index = (uint64_t)(row - r->null_prefix) * r->k + slot;
    rst_json_node node = rst_json_element(r->json, r->fields[field], index);
    return (reply_spot){.field = field, .offset = rst_json_offset(r->json, node)};
}

const reply_form rst_form_plain = {measure_plain, fill_plain, find_plain};
