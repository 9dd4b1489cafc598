/* From an engine's reply to a record: what all forms of candidates have in common. */
#include "reply.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "value.h"

/* ---------------------------------------------------------------- errors */

int rst_reply_missing(const reading *r, reply_field field)
{
    return rst_fail(r->error, RST_ERR_MISSING, rst_reply_fields[field], "the reply has no %s",
                    rst_reply_fields[field]);
}

int rst_reply_wrong_type(const reading *r, const char *field, rst_json_node node,
                         const char *wanted)
{
    return rst_fail_at(r->error, RST_ERR_TYPE, field, (int64_t)rst_json_offset(r->json, node),
                       "%s is %s, not %s", field, rst_json_kind(r->json, node), wanted);
}

int rst_reply_need_array(const reading *r, reply_field field)
{
    rst_json_node node = r->fields[field];
    return rst_json_first(r->json, node) == '['
               ? RST_OK
               : rst_reply_wrong_type(r, rst_reply_fields[field], node, "an array");
}

/* About the value of a token, or of a slot of a token. */
static int bad_at(const reading *r, int code, reply_field field, size_t offset, uint32_t row,
                  int64_t slot, const char *what)
{
    const char *name = rst_reply_fields[field];
    if (slot < 0) {
        return rst_fail_at(r->error, code, name, (int64_t)offset, "%s, token %u: %s", name, row,
                           what);
    }
    return rst_fail_at(r->error, code, name, (int64_t)offset, "%s, token %u, candidate %lld: %s",
                       name, row, (long long)slot, what);
}

/* ---------------------------------------------------------------- single values */

int rst_reply_read_id(const reading *r, reply_field field, rst_json_node node, uint32_t row,
                      int64_t slot, int32_t *id)
{
    int64_t value = 0;
    size_t offset = rst_json_offset(r->json, node);
    switch (rst_json_int64(r->json, node, &value)) {
    case RST_JSON_NOT_NUMBER:
        return bad_at(r, RST_ERR_TYPE, field, offset, row, slot, "a token id is not a number");
    case RST_JSON_NOT_INTEGER:
        return bad_at(r, RST_ERR_TYPE, field, offset, row, slot, "a token id is not an integer");
    case RST_JSON_OUT_OF_RANGE:
        value = rst_json_first(r->json, node) == '-' ? INT64_MIN : INT64_MAX;
        break;
    case RST_JSON_NUMBER_FINE:
        break;
    }
    if (value > INT32_MAX) {
        return bad_at(r, RST_ERR_VALUE, field, offset, row, slot, "a token id over 2^31-1");
    }
    if (value < INT32_MIN) {
        return bad_at(r, RST_ERR_VALUE, field, offset, row, slot, "a token id below 0");
    }
    *id = (int32_t)value;
    return RST_OK;
}

int rst_reply_read_logprob(const reading *r, reply_field field, rst_json_node node, uint32_t row,
                           int64_t slot, float *logprob)
{
    switch (rst_json_float(r->json, node, logprob)) {
    case RST_JSON_NUMBER_FINE:
        return RST_OK;
    case RST_JSON_NOT_NUMBER:
    case RST_JSON_NOT_INTEGER:
    case RST_JSON_OUT_OF_RANGE:
        break;
    }
    if (rst_json_first(r->json, node) == 'n') {
        return bad_at(r, RST_ERR_VALUE, field, rst_json_offset(r->json, node), row, slot,
                      "the logprob is null, which is what engines write for NaN and infinity");
    }
    return bad_at(r, RST_ERR_TYPE, field, rst_json_offset(r->json, node), row, slot,
                  "a logprob is not a number");
}

int rst_reply_read_entry(const reading *r, reply_field field, rst_json_node node, uint32_t row,
                         int64_t slot, int32_t *id, float *logprob)
{
    /* [ logprob , id , text ] is seven nodes, and so is [ [ x ] , y ], whose first is no number. */
    const rst_json_node to_logprob = 1, to_id = 3, to_text = 5, to_end = 6;
    if (rst_json_first(r->json, node) != '[' || r->json->ends[node] != node + to_end) {
        return bad_at(r, RST_ERR_TYPE, field, rst_json_offset(r->json, node), row, slot,
                      "an entry is not [logprob, token_id, text]");
    }
    int code = rst_reply_read_logprob(r, field, node + to_logprob, row, slot, logprob);
    if (!code) {
        code = rst_reply_read_id(r, field, node + to_id, row, slot, id);
    }
    if (code) {
        return code;
    }
    char text = rst_json_first(r->json, node + to_text);
    if (text != '"' && text != 'n') {
        return bad_at(r, RST_ERR_TYPE, field, rst_json_offset(r->json, node + to_text), row, slot,
                      "an entry's text is neither a string nor null");
    }
    return RST_OK;
}

void rst_reply_fill_unused(reading *r, size_t from, size_t to)
{
    for (size_t i = from; i < to; i++) {
        r->slots.topk_ids[i] = -1;
        r->slots.topk_logprobs[i] = -INFINITY;
    }
}

/* ---------------------------------------------------------------- sampled tokens */

static int count_tokens(reading *r)
{
    if (!rst_reply_has(r, FIELD_TOKENS)) {
        return rst_reply_missing(r, FIELD_TOKENS);
    }
    int code = rst_reply_need_array(r, FIELD_TOKENS);
    if (code) {
        return code;
    }
    r->entries = rst_json_entry_list(r->json, r->fields[FIELD_TOKENS], &r->n);
    if (!r->entries) {
        r->n = rst_json_count(r->json, r->fields[FIELD_TOKENS]);
    }
    return r->n <= RST_TOKEN_COUNT_MAX
               ? RST_OK
               : rst_fail(r->error, RST_ERR_LIMIT, rst_reply_fields[FIELD_TOKENS],
                          "%u tokens, a turn has at most %u", r->n, RST_TOKEN_COUNT_MAX);
}

static int fill_tokens(reading *r)
{
    uint32_t i = 0;
    for (; r->entries && i < r->n; i++) {
        r->slots.token_ids[i] = r->entries[i].id;
        r->slots.token_logprobs[i] = r->entries[i].logprob;
    }
    if (r->entries) {
        return RST_OK;
    }
    for (rst_json_node node = rst_json_begin(r->json, r->fields[FIELD_TOKENS]);
         node != RST_JSON_NONE; node = rst_json_next(r->json, node), i++) {
        int code = rst_reply_read_entry(r, FIELD_TOKENS, node, i, -1, &r->slots.token_ids[i],
                                        &r->slots.token_logprobs[i]);
        if (code) {
            return code;
        }
    }
    return RST_OK;
}

/* ---------------------------------------------------------------- candidates */

static int measure_none(reading *r)
{
    r->k = 0;
    return RST_OK;
}

static int fill_none(reading *r)
{
    (void)r;
    return RST_OK;
}

/* Without slots there is no bad value to find again. */
static const reply_form form_none = {measure_none, fill_none, NULL};

static int choose_form(const reading *r, const reply_form **form)
{
    if (r->options->mode == RST_MODE_SUPPORT) {
        *form = &rst_form_support;
        return RST_OK;
    }
    if (r->options->request == RST_REQUEST_NONE) {
        *form = &form_none;
        return RST_OK;
    }
    if (r->options->request == RST_REQUEST_NESTED) {
        *form = &rst_form_nested;
        return RST_OK;
    }
    bool base64 = rst_reply_has(r, FIELD_IDX_B64) || rst_reply_has(r, FIELD_VAL_B64);
    bool plain = rst_reply_has(r, FIELD_IDX_PLAIN) || rst_reply_has(r, FIELD_VAL_PLAIN);
    if (base64 || plain || r->n == 0) {
        *form = base64 ? &rst_form_base64 : &rst_form_plain;
        return RST_OK;
    }
    return rst_fail(r->error, RST_ERR_MISSING, rst_reply_fields[FIELD_IDX_B64],
                    "Requested flat output top logprobs but the response has none%s",
                    rst_reply_has(r, FIELD_NESTED) ? ": it has the nested form" : "");
}

static int bad_value(const reading *r, const reply_form *form, const rst_bad_value *bad)
{
    if (r->entries) { /* the whole text is read next, and says where it is */
        return RST_ERR_VALUE;
    }
    if (bad->array == RST_BAD_TOKEN_ID || bad->array == RST_BAD_TOKEN_LOGPROB) {
        rst_json_node node = rst_json_element(r->json, r->fields[FIELD_TOKENS], bad->index);
        return bad_at(r, RST_ERR_VALUE, FIELD_TOKENS, rst_json_offset(r->json, node),
                      (uint32_t)bad->index, -1, bad->reason);
    }
    uint32_t row = (uint32_t)(bad->index / r->k);
    uint32_t slot = (uint32_t)(bad->index % r->k);
    reply_spot spot = form->find(r, row, slot, bad->array == RST_BAD_TOPK_ID);
    return bad_at(r, RST_ERR_VALUE, spot.field, spot.offset, row, slot, bad->reason);
}

static int check_values(reading *r, const reply_form *form, bool *ragged)
{
    rst_turn arrays = {
        .token_count = r->n,
        .topk = r->k,
        .token_ids = r->slots.token_ids,
        .token_logprobs = r->slots.token_logprobs,
        .topk_ids = r->slots.topk_ids,
        .topk_logprobs = r->slots.topk_logprobs,
    };
    rst_bad_value bad;
    return rst_check_values(&arrays, r->slots.widths, ragged, &bad) ? RST_OK
                                                                    : bad_value(r, form, &bad);
}

/* ---------------------------------------------------------------- what else is kept */

static int read_scaled(const reading *r, rst_scaled *scaled)
{
    *scaled = RST_SCALED_NOT_SAID;
    rst_json_node node = r->fields[FIELD_SCALED];
    if (node == RST_JSON_NONE) {
        return RST_OK;
    }
    char first = rst_json_first(r->json, node);
    if (first == 't' || first == 'f') {
        *scaled = first == 't' ? RST_SCALED_YES : RST_SCALED_NO;
        return RST_OK;
    }
    /* Support mode refuses none of these fields for what stands in them. */
    return r->options->mode == RST_MODE_SUPPORT
               ? RST_OK
               : rst_reply_wrong_type(r, rst_reply_fields[FIELD_SCALED], node, "a boolean");
}

static int read_text(const reading *r, const char *field, rst_json_node node, const char **text,
                     size_t *size)
{
    if (rst_json_first(r->json, node) != '"') {
        return rst_reply_wrong_type(r, field, node, "a string");
    }
    int code = rst_json_string(r->json, node, &r->reader->unescaped[0], text, size);
    if (code == RST_ERR_VALUE) {
        return rst_fail_at(r->error, code, field, (int64_t)rst_json_offset(r->json, node),
                           "%s holds half a surrogate pair", field);
    }
    return code ? rst_fail(r->error, code, field, "no memory for %s", field) : RST_OK;
}

static int read_weight_version(const reading *r)
{
    static const char *const outer[] = {"metadata"};
    const char *const *name = &rst_reply_fields[FIELD_WEIGHT_VERSION];
    rst_json_node node = r->fields[FIELD_WEIGHT_VERSION];
    if (node == RST_JSON_NONE) { /* chat replies say it once more outside */
        rst_json_members(r->json, r->top, outer, 1, &node);
        if (node != RST_JSON_NONE && rst_json_first(r->json, node) == '{') {
            rst_json_members(r->json, node, name, 1, &node);
        } else {
            node = RST_JSON_NONE;
        }
    }
    const char *text = NULL;
    size_t size = 0;
    if (node != RST_JSON_NONE && rst_json_is_number(r->json, node)) {
        size_t begin = rst_json_offset(r->json, node);
        text = r->json->text + begin;
        size = rst_json_number_end(r->json->text, begin, r->json->size) - begin;
    } else if (node != RST_JSON_NONE) {
        int code = read_text(r, *name, node, &text, &size);
        if (code) {
            return code;
        }
    }
    return rst_record_set_weight_version(r->record, text, size, r->error);
}

static rst_finish finish_of(const char *text, size_t size)
{
    static const struct {
        const char *text;
        rst_finish finish;
    } known[] = {{"", RST_FINISH_NONE},
                 {"stop", RST_FINISH_STOP},
                 {"length", RST_FINISH_LENGTH},
                 {"abort", RST_FINISH_ABORT},
                 {"tool_calls", RST_FINISH_TOOL_CALLS}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (size == strlen(known[i].text) && !memcmp(text, known[i].text, size)) {
            return known[i].finish;
        }
    }
    return RST_FINISH_OTHER;
}

/* The choice's own word is preferred: only there stands tool_calls. */
static int read_finish_reason(const reading *r)
{
    static const char *const type[] = {"type"};
    const char *field = rst_reply_fields[FIELD_FINISH_REASON];
    rst_json_node node = RST_JSON_NONE;
    if (r->choice != RST_JSON_NONE) {
        rst_json_members(r->json, r->choice, &field, 1, &node);
    }
    if (node == RST_JSON_NONE) {
        node = r->fields[FIELD_FINISH_REASON];
    }
    if (node != RST_JSON_NONE && rst_json_first(r->json, node) == '{') {
        rst_json_members(r->json, node, type, 1, &node);
    }
    const char *text = "";
    size_t size = 0;
    if (node != RST_JSON_NONE) {
        int code = read_text(r, field, node, &text, &size);
        if (code) {
            return code;
        }
    }
    return rst_record_set_finish_reason(r->record, finish_of(text, size), text, size, r->error);
}

/* ---------------------------------------------------------------- the whole */

static int fill_record(reading *r, const reply_form *form)
{
    bool ragged = false;
    rst_scaled scaled = RST_SCALED_NOT_SAID;
    int code = rst_record_begin(r->record, r->n, r->k, &r->slots, r->error);
    if (!code) {
        code = fill_tokens(r);
    }
    if (!code) {
        code = form->fill(r);
    }
    if (!code) {
        code = check_values(r, form, &ragged);
    }
    if (!code) {
        code = read_scaled(r, &scaled);
    }
    if (!code) {
        code = read_weight_version(r);
    }
    if (!code) {
        code = read_finish_reason(r);
    }
    if (!code) {
        rst_record_header *header = rst_record_header_of(r->record);
        header->mode = (uint8_t)r->options->mode;
        header->temperature_scaled = (uint8_t)scaled;
        rst_record_filled(r->record, ragged);
    }
    return code;
}

int rst_reply_decode(rst_record *record, const rst_json *json, rst_json_node top,
                     const rst_decode_options *options, rst_error *error)
{
    reading r = {.json = json,
                 .reader = record->scratch,
                 .record = record,
                 .options = options,
                 .error = error,
                 .top = top,
                 .choice = RST_JSON_NONE};
    const reply_form *form = NULL;
    int code = rst_reply_find_fields(&r);
    if (!code) {
        code = count_tokens(&r);
    }
    if (!code) {
        code = choose_form(&r, &form);
    }
    if (!code) {
        code = form->measure(&r);
    }
    return code ? code : fill_record(&r, form);
}

static void free_reader(void *reader)
{
    rst_json_reader_free(reader);
    free(reader);
}

rst_json_reader *rst_reply_reader(rst_record *record)
{
    if (!record->scratch) {
        record->scratch = calloc(1, sizeof(rst_json_reader));
        record->scratch_free = record->scratch ? free_reader : NULL;
    }
    rst_json_reader *reader = record->scratch;
    if (reader) {
        reader->lists_too = true;
    }
    return reader;
}

int rst_reply_check_options(const rst_decode_options *options, rst_error *error)
{
    if (options->mode != RST_MODE_SELECTED && options->mode != RST_MODE_SUPPORT) {
        return rst_fail(error, RST_ERR_ARGUMENT, "mode", "mode %d is none", (int)options->mode);
    }
    if (options->request != RST_REQUEST_FLAT && options->request != RST_REQUEST_NESTED &&
        options->request != RST_REQUEST_NONE) {
        return rst_fail(error, RST_ERR_ARGUMENT, "request", "request %d is none",
                        (int)options->request);
    }
    if (options->topk > RST_TOPK_MAX) {
        return rst_fail(error, RST_ERR_ARGUMENT, "topk", "topk is %u, at most %u", options->topk,
                        RST_TOPK_MAX);
    }
    return RST_OK;
}

typedef struct decode_call {
    rst_record *record;
    const rst_decode_options *options;
    rst_json_use *then;
    void *context;
} decode_call;

static int decode_document(void *context, const rst_json *json, rst_json_node root,
                           rst_error *error)
{
    const decode_call *call = context;
    int code = rst_reply_decode(call->record, json, root, call->options, error);
    return code || !call->then ? code : call->then(call->context, json, root, error);
}

int rst_reply_decode_then(rst_record *record, const void *reply, size_t size,
                          const rst_decode_options *options, bool lists_too, rst_json_use *then,
                          void *context, rst_error *error)
{
    static const rst_decode_options defaults = {
        .mode = RST_MODE_SELECTED, .request = RST_REQUEST_FLAT, .topk = RST_TOPK_FROM_REPLY};
    rst_error_clear(error);
    record->filled = false;
    record->prompt_count = 0;
    decode_call call = {.record = record,
                        .options = options ? options : &defaults,
                        .then = then,
                        .context = context};
    int code = rst_reply_check_options(call.options, error);
    if (!code && size > RST_REPLY_SIZE_MAX) {
        code = rst_fail(error, RST_ERR_LIMIT, "reply", "a reply of %zu bytes, at most %u", size,
                        RST_REPLY_SIZE_MAX);
    }
    if (code) {
        return code;
    }
    rst_json_reader *reader = rst_reply_reader(record);
    if (!reader) {
        return rst_fail(error, RST_ERR_MEMORY, NULL, "no memory to read a reply");
    }
    reader->lists_too = lists_too;
    code = rst_json_with(reader, reply, size, decode_document, &call, error);
    record->filled = !code;
    return code;
}

int rst_record_decode(rst_record *record, const void *reply, size_t size,
                      const rst_decode_options *options, rst_error *error)
{
    return rst_reply_decode_then(record, reply, size, options, true, NULL, NULL, error);
}
