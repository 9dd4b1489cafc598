/* Lines of recorded sessions. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <rollstore/ingest.h>

#include "line.h"
#include "reply.h"
#include "value.h"

/* One line while it is decoded. */
typedef struct line_reading {
    const rst_json *json;
    rst_json_reader *reader;
    rst_record *record;
    rst_error *error;
    uint32_t topk; /* what k must be, or 0 */
    rst_line *out;
} line_reading;

/* ---------------------------------------------------------------- values */

static int fail_at_node(const line_reading *l, int code, const char *field, rst_json_node node,
                        const char *what)
{
    return rst_fail_at(l->error, code, field, (int64_t)rst_json_offset(l->json, node), "%s %s",
                       field, what);
}

static int missing(const line_reading *l, const char *field)
{
    return rst_fail(l->error, RST_ERR_MISSING, field, "the line has no %s", field);
}

static int wrong_type(const line_reading *l, const char *field, rst_json_node node,
                      const char *wanted)
{
    return rst_fail_at(l->error, RST_ERR_TYPE, field, (int64_t)rst_json_offset(l->json, node),
                       "%s is %s, not %s", field, rst_json_kind(l->json, node), wanted);
}

static int need_object(const line_reading *l, const char *field, rst_json_node node)
{
    if (node == RST_JSON_NONE) {
        return missing(l, field);
    }
    return rst_json_first(l->json, node) == '{' ? RST_OK : wrong_type(l, field, node, "an object");
}

static int read_integer(const line_reading *l, const char *field, rst_json_node node,
                        int64_t *value)
{
    switch (rst_json_int64(l->json, node, value)) {
    case RST_JSON_NUMBER_FINE:
        return RST_OK;
    case RST_JSON_OUT_OF_RANGE:
        return fail_at_node(l, RST_ERR_VALUE, field, node, "does not fit 64 bits");
    case RST_JSON_NOT_INTEGER:
        return fail_at_node(l, RST_ERR_TYPE, field, node, "is not an integer");
    case RST_JSON_NOT_NUMBER:
        break;
    }
    return wrong_type(l, field, node, "a number");
}

static int read_flag(const line_reading *l, const char *field, rst_json_node node, bool *flag)
{
    *flag = false;
    if (node == RST_JSON_NONE) {
        return RST_OK;
    }
    char first = rst_json_first(l->json, node);
    *flag = first == 't';
    return first == 't' || first == 'f' ? RST_OK : wrong_type(l, field, node, "a boolean");
}

/* ---------------------------------------------------------------- session_id */

/* rst_line_session takes the first session_id, other readers the last: there must be one. */
static int need_one_id(const line_reading *l, rst_json_node root)
{
    uint32_t count = 0;
    for (rst_json_node key = rst_json_begin(l->json, root); key != RST_JSON_NONE;
         key = rst_json_next(l->json, rst_json_value(key))) {
        count += rst_json_string_is(l->json, key, "session_id");
        if (count > 1) {
            return fail_at_node(l, RST_ERR_VALUE, "session_id", key, "stands twice in the line");
        }
        /* Of several such ids session_id may be the same. */
        if (rst_json_string_is(l->json, key, "session_id_hex")) {
            return fail_at_node(l, RST_ERR_VALUE, "session_id_hex", key,
                                "stands for an id that is not UTF-8, which no line can hold");
        }
    }
    return RST_OK;
}

static int read_session(const line_reading *l, rst_json_node node)
{
    if (node == RST_JSON_NONE) {
        return missing(l, "session_id");
    }
    if (rst_json_first(l->json, node) != '"') {
        return wrong_type(l, "session_id", node, "a string");
    }
    const char *text;
    size_t size;
    int code = rst_json_string(l->json, node, &l->reader->unescaped[0], &text, &size);
    if (code == RST_ERR_VALUE) {
        return fail_at_node(l, code, "session_id", node, "holds half a surrogate pair");
    }
    if (!code) {
        code = rst_line_check_id_size(rst_json_offset(l->json, node), size, l->error);
        if (code) {
            return code;
        }
    }
    rst_record *record = l->record;
    if (!code && record->session_capacity < size) {
        char *session = malloc(RST_SESSION_ID_SIZE_MAX);
        if (session) {
            free(record->session);
            record->session = session;
            record->session_capacity = RST_SESSION_ID_SIZE_MAX;
        }
    }
    if (code || record->session_capacity < size) {
        return rst_fail(l->error, RST_ERR_MEMORY, NULL, "no memory for a session id");
    }
    memcpy(record->session, text, size);
    l->out->session = record->session;
    l->out->session_size = size;
    return RST_OK;
}

/* ---------------------------------------------------------------- a turn */

enum {
    REQUEST_INPUT_IDS,
    REQUEST_TEMPERATURE,
    REQUEST_SAMPLING_PARAMS,
    REQUEST_TOP_LOGPROBS,
    REQUEST_TOP_LOGPROBS_NUM,
    REQUEST_FLAT,
    REQUEST_SUPPORT,
    REQUEST_COUNT
};
static const char *const request_names[REQUEST_COUNT] = {
    "input_ids",
    "temperature",
    "sampling_params",
    "top_logprobs",
    "top_logprobs_num",
    "return_flat_raw_output_top_logprobs",
    "return_sampling_mask",
};

/* Set topk to what the request asked for, and compare it with what the caller demands. */
static int read_topk(const line_reading *l, const rst_json_node *request, uint32_t *topk)
{
    bool native = request[REQUEST_TOP_LOGPROBS_NUM] != RST_JSON_NONE;
    const char *field = native ? "request.top_logprobs_num" : "request.top_logprobs";
    rst_json_node node = request[native ? REQUEST_TOP_LOGPROBS_NUM : REQUEST_TOP_LOGPROBS];
    int64_t value = 0;
    int code = node == RST_JSON_NONE ? RST_OK : read_integer(l, field, node, &value);
    if (code) {
        return code;
    }
    if (value < 0 || value > RST_TOPK_MAX) {
        return fail_at_node(l, RST_ERR_VALUE, field, node, "is outside of what a record can hold");
    }
    if (l->topk && value && value != l->topk) {
        return rst_fail_at(l->error, RST_ERR_SHAPE, field, (int64_t)rst_json_offset(l->json, node),
                           "%s is %lld, but %u candidates were asked for", field, (long long)value,
                           l->topk);
    }
    *topk = value ? (uint32_t)value : l->topk;
    return RST_OK;
}

static int read_options(const line_reading *l, const rst_json_node *request,
                        rst_decode_options *options)
{
    bool support;
    bool flat;
    int code = read_flag(l, "request.return_sampling_mask", request[REQUEST_SUPPORT], &support);
    if (!code) {
        code = read_flag(l, "request.return_flat_raw_output_top_logprobs", request[REQUEST_FLAT],
                         &flat);
    }
    if (code) {
        return code;
    }
    *options = (rst_decode_options){
        .mode = support ? RST_MODE_SUPPORT : RST_MODE_SELECTED,
        .request = flat ? RST_REQUEST_FLAT : RST_REQUEST_NESTED,
        .topk = l->topk,
    };
    return support ? RST_OK : read_topk(l, request, &options->topk);
}

static int bad_prompt_id(const line_reading *l, int code, rst_json_node node, uint32_t index,
                         const char *what)
{
    return rst_fail_at(l->error, code, "request.input_ids", (int64_t)rst_json_offset(l->json, node),
                       "request.input_ids, token %u: %s", index, what);
}

static int read_prompt_id(const line_reading *l, rst_json_node node, uint32_t index, int32_t *id)
{
    int64_t value = INT64_MAX;
    switch (rst_json_int64(l->json, node, &value)) {
    case RST_JSON_NOT_NUMBER:
    case RST_JSON_NOT_INTEGER:
        return bad_prompt_id(l, RST_ERR_TYPE, node, index, "a token id is not an integer");
    case RST_JSON_OUT_OF_RANGE:
    case RST_JSON_NUMBER_FINE:
        break;
    }
    if (rst_json_first(l->json, node) == '-' && value != 0) {
        return bad_prompt_id(l, RST_ERR_VALUE, node, index, "a token id below 0");
    }
    if (value > INT32_MAX) {
        return bad_prompt_id(l, RST_ERR_VALUE, node, index, "a token id over 2^31-1");
    }
    *id = (int32_t)value;
    return RST_OK;
}

static int read_prompt(const line_reading *l, rst_json_node list)
{
    if (list == RST_JSON_NONE) {
        return missing(l, "request.input_ids");
    }
    if (rst_json_first(l->json, list) != '[') {
        return wrong_type(l, "request.input_ids", list, "an array");
    }
    uint32_t count = rst_json_count(l->json, list);
    if (count > RST_TOKEN_COUNT_MAX) {
        return rst_fail_at(
            l->error, RST_ERR_LIMIT, "request.input_ids", (int64_t)rst_json_offset(l->json, list),
            "request.input_ids has %u ids, at most %u are allowed", count, RST_TOKEN_COUNT_MAX);
    }
    rst_json_buffer *buffer = &l->reader->unescaped[0]; /* the session id was copied out of it */
    if (!rst_json_reserve(buffer, 4 * (size_t)count)) {
        return rst_fail(l->error, RST_ERR_MEMORY, NULL, "no memory for a prompt of %u ids", count);
    }
    int32_t *ids = (int32_t *)(void *)buffer->bytes;
    rst_json_node node = rst_json_begin(l->json, list);
    for (uint32_t i = 0; i < count; i++, node = rst_json_next(l->json, node)) {
        int code = read_prompt_id(l, node, i, &ids[i]);
        if (code) {
            return code;
        }
    }
    return rst_record_set_prompt(l->record, ids, count, l->error);
}

/* /generate keeps it under sampling_params. */
static int read_temperature(const line_reading *l, const rst_json_node *request)
{
    const char *field = "request.temperature";
    rst_json_node node = request[REQUEST_TEMPERATURE];
    rst_json_node sampling = request[REQUEST_SAMPLING_PARAMS];
    if (sampling != RST_JSON_NONE && rst_json_first(l->json, sampling) == '{') {
        rst_json_node inner;
        rst_json_members(l->json, sampling, &request_names[REQUEST_TEMPERATURE], 1, &inner);
        if (inner != RST_JSON_NONE) {
            field = "request.sampling_params.temperature";
            node = inner;
        }
    }
    if (node == RST_JSON_NONE) {
        return RST_OK;
    }
    float temperature = 0;
    rst_json_number number = rst_json_float(l->json, node, &temperature);
    if (number == RST_JSON_NOT_NUMBER) {
        return wrong_type(l, field, node, "a number");
    }
    if (number != RST_JSON_NUMBER_FINE || !isfinite(temperature)) {
        return fail_at_node(l, RST_ERR_VALUE, field, node, "does not fit a float32");
    }
    if (temperature < 0) {
        return fail_at_node(l, RST_ERR_VALUE, field, node, "is below 0");
    }
    rst_record_set_temperature(l->record, temperature);
    return RST_OK;
}

static int read_turn(const line_reading *l, rst_json_node turn, rst_json_node request,
                     rst_json_node response)
{
    int64_t index = 0;
    int code = turn == RST_JSON_NONE ? missing(l, "turn") : read_integer(l, "turn", turn, &index);
    if (!code && index < 0) {
        code = fail_at_node(l, RST_ERR_VALUE, "turn", turn, "is below 0");
    }
    if (!code && index >= RST_TURN_COUNT_MAX) {
        code = fail_at_node(l, RST_ERR_LIMIT, "turn", turn, "is beyond the turns of a session");
    }
    l->out->kind = RST_LINE_TURN;
    l->out->turn = (uint32_t)index;
    if (!code) {
        code = need_object(l, "request", request);
    }
    if (!code && response == RST_JSON_NONE) {
        code = missing(l, "response");
    }
    if (code) {
        return code;
    }
    rst_json_node asked[REQUEST_COUNT];
    rst_decode_options options;
    rst_json_members(l->json, request, request_names, REQUEST_COUNT, asked);
    code = read_options(l, asked, &options);
    if (!code) {
        code = rst_reply_decode(l->record, l->json, response, &options, l->error);
    }
    if (!code) {
        code = read_prompt(l, asked[REQUEST_INPUT_IDS]);
    }
    return code ? code : read_temperature(l, asked);
}

/* ---------------------------------------------------------------- an end */

static int read_status(const line_reading *l, rst_json_node node, rst_outcome_status *status)
{
    static const struct {
        const char *text;
        rst_outcome_status status;
    } known[] = {{"completed", RST_STATUS_COMPLETED},
                 {"truncated", RST_STATUS_TRUNCATED},
                 {"aborted", RST_STATUS_ABORTED},
                 {"failed", RST_STATUS_FAILED}};
    if (node == RST_JSON_NONE) {
        return missing(l, "end.status");
    }
    if (rst_json_first(l->json, node) != '"') {
        return wrong_type(l, "end.status", node, "a string");
    }
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (rst_json_string_is(l->json, node, known[i].text)) {
            *status = known[i].status;
            return RST_OK;
        }
    }
    return fail_at_node(l, RST_ERR_VALUE, "end.status", node,
                        "is none of completed, truncated, aborted, failed");
}

static int read_reward(const line_reading *l, rst_json_node node, double *reward)
{
    *reward = NAN;
    if (node == RST_JSON_NONE) {
        return RST_OK;
    }
    if (rst_json_double(l->json, node, reward) != RST_JSON_NUMBER_FINE) {
        return wrong_type(l, "end.reward", node, "a number");
    }
    return isfinite(*reward)
               ? RST_OK
               : fail_at_node(l, RST_ERR_VALUE, "end.reward", node, "does not fit a double");
}

static int read_index(const line_reading *l, const char *field, rst_json_node node, int64_t *index)
{
    *index = RST_NO_INDEX;
    if (node == RST_JSON_NONE) {
        return RST_OK;
    }
    return read_integer(l, field, node, index);
}

static int read_end(const line_reading *l, rst_json_node end)
{
    static const char *const names[] = {"status", "reward", "group_index", "index"};
    rst_json_node found[4];
    rst_outcome *outcome = &l->out->outcome;
    l->out->kind = RST_LINE_END;
    int code = need_object(l, "end", end);
    if (code) {
        return code;
    }
    rst_json_members(l->json, end, names, 4, found);
    code = read_status(l, found[0], &outcome->status);
    if (!code) {
        code = read_reward(l, found[1], &outcome->reward);
    }
    if (!code) {
        code = read_index(l, "end.group_index", found[2], &outcome->group_index);
    }
    if (!code) {
        code = read_index(l, "end.index", found[3], &outcome->index);
    }
    return code;
}

/* ---------------------------------------------------------------- a line */

static int decode_line(void *context, const rst_json *json, rst_json_node root, rst_error *error)
{
    static const char *const names[] = {"session_id", "turn", "request", "response", "end"};
    rst_json_node found[5];
    line_reading l = *(const line_reading *)context;
    l.json = json;
    l.error = error;
    if (rst_json_first(json, root) != '{') {
        return rst_fail_at(error, RST_ERR_TYPE, NULL, (int64_t)rst_json_offset(json, root),
                           "the line is %s, not an object", rst_json_kind(json, root));
    }
    int code = need_one_id(&l, root);
    if (!code) {
        rst_json_members(json, root, names, 5, found);
        code = read_session(&l, found[0]);
    }
    if (code) {
        return code;
    }
    rst_json_node response = found[3];
    rst_json_node end = found[4];
    if (end == RST_JSON_NONE) {
        return read_turn(&l, found[1], found[2], response);
    }
    return response == RST_JSON_NONE
               ? read_end(&l, end)
               : fail_at_node(&l, RST_ERR_VALUE, "end", end, "stands beside a response");
}

int rst_line_decode(rst_record *record, const void *line, size_t size, uint32_t topk, rst_line *out,
                    rst_error *error)
{
    rst_error_clear(error);
    record->filled = false;
    record->prompt_count = 0;
    *out =
        (rst_line){.outcome = {.reward = NAN, .group_index = RST_NO_INDEX, .index = RST_NO_INDEX}};
    if (topk > RST_TOPK_MAX) {
        return rst_fail(error, RST_ERR_ARGUMENT, "topk", "topk is %u, at most %u", topk,
                        RST_TOPK_MAX);
    }
    if (size > RST_REPLY_SIZE_MAX) {
        return rst_fail(error, RST_ERR_LIMIT, "line", "a line of %zu bytes, at most %u", size,
                        RST_REPLY_SIZE_MAX);
    }
    line_reading l = {
        .reader = rst_reply_reader(record), .record = record, .topk = topk, .out = out};
    if (!l.reader) {
        return rst_fail(error, RST_ERR_MEMORY, NULL, "no memory to read a line");
    }
    int code = rst_json_with(l.reader, line, size, decode_line, &l, error);
    record->filled = !code && out->kind == RST_LINE_TURN;
    return code;
}

void rst_line_change(const rst_line *line, rst_record *record, unsigned flags, rst_change *change)
{
    bool turn = line->kind == RST_LINE_TURN;
    *change = (rst_change){
        .kind = turn ? RST_CHANGE_PUT : RST_CHANGE_SEAL,
        .flags = flags,
        .session = line->session,
        .session_size = line->session_size,
        .turn = line->turn,
        .record = turn ? record : NULL,
        .outcome = line->outcome,
    };
}
