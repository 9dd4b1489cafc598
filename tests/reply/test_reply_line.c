/* Lines of recorded sessions. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "layout/record.h"
#include "reply_texts.h"
#include "sha256.h"

#define RESPONSE "{\"choices\":[{\"index\":0,\"meta_info\":{" BASE64 "}}]}"
#define REQUEST                                                                                    \
    "{\"input_ids\":[5,6,7],\"temperature\":0.75,\"top_logprobs\":2,"                              \
    "\"return_flat_raw_output_top_logprobs\":true}"
#define TURN "{\"session_id\":\"s-1\",\"turn\":3,\"request\":" REQUEST ",\"response\":" RESPONSE "}"
#define END                                                                                        \
    "{\"session_id\":\"s-1\",\"end\":{\"status\":\"completed\",\"reward\":0.125,"                  \
    "\"group_index\":4,\"index\":17}}"

static rst_record *record;

static int make_record(void **state)
{
    (void)state;
    record = rst_record_new();
    return record ? 0 : -1;
}

static int free_record(void **state)
{
    (void)state;
    rst_record_free(record);
    return 0;
}

static rst_line decode(const char *text, uint32_t topk)
{
    rst_line line;
    rst_error error;
    size_t size = strlen(text);
    assert_ok(rst_line_decode(record, at_the_edge(text, size), size, topk, &line, &error), error);
    return line;
}

static void refuse(const char *text, uint32_t topk, int code, const char *field, const char *at)
{
    rst_line line;
    rst_error error;
    size_t size = strlen(text);
    assert_code(code, rst_line_decode(record, at_the_edge(text, size), size, topk, &line, &error),
                error);
    assert_string_equal(error.field, field);
    assert_empty(record);
    if (at) {
        const char *place = strstr(text, at);
        assert_non_null(place);
        assert_int_equal(error.offset, place - text);
    }
}

/* ---------------------------------------------------------------- the fixture */

static char *last_tokens[64]; /* of each session: its sequence after the last turn */
static char *last_names[64];
static size_t last_sizes[64];
static uint32_t turn_counts[64];
static size_t session_count;

static size_t session_at(const char *name, size_t size)
{
    for (size_t i = 0; i < session_count; i++) {
        if (strlen(last_names[i]) == size && !memcmp(last_names[i], name, size)) {
            return i;
        }
    }
    assert_true(session_count < 64);
    last_names[session_count] = strndup(name, size);
    return session_count++;
}

static void keep_line(const fixture_line *text)
{
    rst_line line;
    rst_error error;
    char id[RST_SESSION_ID_SIZE_MAX];
    size_t id_size;
    const char *edge = at_the_edge(text->text, text->size);
    assert_ok(rst_line_decode(record, edge, text->size, 0, &line, &error), error);
    assert_ok(rst_line_session(edge, text->size, id, &id_size, &error), error);
    assert_int_equal(id_size, line.session_size);
    assert_memory_equal(id, line.session, id_size);
    size_t session = session_at(id, id_size);
    rst_change change;
    rst_line_change(&line, record, RST_CHANGE_REPLACE, &change);
    assert_ptr_equal(change.session, line.session);
    assert_int_equal(change.session_size, id_size);
    assert_int_equal(change.flags, RST_CHANGE_REPLACE);
    if (line.kind == RST_LINE_END) {
        assert_int_equal(change.kind, RST_CHANGE_SEAL);
        assert_null(change.record);
        assert_int_equal(change.outcome.status, line.outcome.status);
        assert_false(record->filled);
        return;
    }
    assert_int_equal(change.kind, RST_CHANGE_PUT);
    assert_ptr_equal(change.record, record);
    assert_int_equal(change.turn, line.turn);
    assert_int_equal(line.turn, turn_counts[session]++);
    rst_turn turn;
    rst_record_view(record, &turn);
    assert_true(turn.temperature == 0.8f);
    size_t prompt = 4 * (size_t)turn.prompt_count;
    last_sizes[session] = prompt + 4 * (size_t)turn.token_count;
    last_tokens[session] = realloc(last_tokens[session], last_sizes[session]);
    memcpy(last_tokens[session], turn.prompt_ids, prompt);
    memcpy(last_tokens[session] + prompt, turn.token_ids, last_sizes[session] - prompt);
}

static void check_session(const fixture_line *line)
{
    char *name = fixture_text(line, 0, "session_id", NULL);
    size_t session = session_at(name, strlen(name));
    char *want = fixture_text(line, fixture_member(line, 0, "sha256"), "tokens_i32", NULL);
    char got[65];
    sha256_hex(last_tokens[session], last_sizes[session], got);
    assert_string_equal(got, want);
    assert_int_equal(turn_counts[session], fixture_integer(line, 0, "turns", -1));
    free(want);
    free(name);
}

static void recorded_sessions_are_read(void **state)
{
    (void)state;
    assert_int_equal(fixture_each("sessions.jsonl", keep_line), 108);
    assert_int_equal(fixture_each("sessions_expected.jsonl", check_session), session_count);
    assert_int_equal(session_count, 24);
    for (size_t i = 0; i < session_count; i++) {
        free(last_tokens[i]);
        free(last_names[i]);
    }
}

/* ---------------------------------------------------------------- turns */

static void a_turn_has_reply_prompt_and_temperature(void **state)
{
    (void)state;
    rst_line line = decode(TURN, 2);
    assert_int_equal(line.kind, RST_LINE_TURN);
    assert_int_equal(line.turn, 3);
    assert_int_equal(line.session_size, 3);
    assert_memory_equal(line.session, "s-1", 3);
    rst_turn turn;
    rst_record_view(record, &turn);
    static const int32_t prompt[] = {5, 6, 7};
    assert_int_equal(turn.token_count, 2);
    assert_int_equal(turn.prompt_count, 3);
    assert_memory_equal(turn.prompt_ids, prompt, sizeof prompt);
    assert_true(turn.temperature == 0.75f);
    assert_sound_record(record);
}

static void keys_of_a_line_come_in_any_order(void **state)
{
    (void)state;
    decode("{\"response\":" RESPONSE ",\"new\":[{\"session_id\":7}],\"request\":" REQUEST
           ",\"turn\":3,\"session_\\u0069d\":\"s-1\",\"end\":null} \n",
           0);
}

static void the_request_says_how_the_reply_is_read(void **state)
{
    (void)state;
    static const struct {
        const char *request;
        const char *meta;
        rst_mode mode;
        uint32_t topk;
        uint32_t got;
    } cases[] = {
        {"\"top_logprobs\":2", TOKENS "," NESTED, RST_MODE_SELECTED, 0, 2},
        {"\"top_logprobs\":null", TOKENS "," NESTED, RST_MODE_SELECTED, 3, 3},
        {"\"top_logprobs\":3", TOKENS "," NESTED, RST_MODE_SELECTED, 3, 3},
        {"\"return_flat_raw_output_top_logprobs\":false,\"top_logprobs\":2", TOKENS "," NESTED,
         RST_MODE_SELECTED, 0, 2},
        {"\"top_logprobs_num\":2,\"return_logprob\":true", TOKENS "," NESTED, RST_MODE_SELECTED, 0,
         2},
        {"\"top_logprobs\":null,\"top_logprobs_num\":4", TOKENS "," NESTED, RST_MODE_SELECTED, 0,
         4},
        {"\"return_flat_raw_output_top_logprobs\":true", BASE64, RST_MODE_SELECTED, 0, 2},
        {"\"return_flat_raw_output_top_logprobs\":true,\"top_logprobs\":0", PLAIN,
         RST_MODE_SELECTED, 2, 2},
        {"\"return_sampling_mask\":true,\"top_k\":16", TOKENS "," MASK "," MASK_LOGPROBS,
         RST_MODE_SUPPORT, 0, 2},
        {"\"return_sampling_mask\":true,\"top_logprobs\":1", TOKENS "," MASK "," MASK_LOGPROBS,
         RST_MODE_SUPPORT, 5, 5},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *text = text_of("{\"session_id\":\"s\",\"turn\":0,\"request\":{\"input_ids\":[],%s},"
                             "\"response\":{\"meta_info\":{%s}}}",
                             cases[i].request, cases[i].meta);
        decode(text, cases[i].topk);
        rst_turn turn;
        rst_record_view(record, &turn);
        assert_int_equal(turn.mode, cases[i].mode);
        assert_int_equal(turn.topk, cases[i].got);
        assert_int_equal(turn.prompt_count, 0);
        assert_true(isnan(turn.temperature));
        free(text);
    }
}

static void generate_keeps_the_temperature_under_sampling_params(void **state)
{
    (void)state;
    static const struct {
        const char *members;
        float temperature;
    } cases[] = {
        {"\"sampling_params\":{\"temperature\":0.5}", 0.5f},
        {"\"sampling_params\":{\"temperature\":1},\"temperature\":0.25", 1.0f},
        {"\"sampling_params\":{},\"temperature\":0.25", 0.25f},
        {"\"sampling_params\":null,\"temperature\":2", 2.0f},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *text = replaced(TURN, "\"temperature\":0.75", cases[i].members);
        decode(text, 0);
        rst_turn turn;
        rst_record_view(record, &turn);
        assert_true(turn.temperature == cases[i].temperature);
        free(text);
    }
}

static void wrong_turns_are_refused(void **state)
{
    (void)state;
    static const struct {
        const char *good;
        const char *bad;
        uint32_t topk;
        int code;
        const char *field;
        const char *at;
    } cases[] = {
        {"\"session_id\":\"s-1\"", "\"a\":1", 0, RST_ERR_MISSING, "session_id", NULL},
        {"\"s-1\"", "null", 0, RST_ERR_MISSING, "session_id", NULL},
        {"\"s-1\"", "17", 0, RST_ERR_TYPE, "session_id", "17"},
        {"\"s-1\"", "\"\"", 0, RST_ERR_VALUE, "session_id", "\"\""},
        {"\"s-1\"", "\"\\ud800\"", 0, RST_ERR_VALUE, "session_id", "\"\\ud800\""},
        {"\"s-1\"", "\"a\",\"session_id_hex\":\"ff\"", 0, RST_ERR_VALUE, "session_id_hex",
         "\"session_id_hex\""},
        {"\"s-1\"", "\"a\",\"session_id\":\"b\"", 0, RST_ERR_VALUE, "session_id",
         "\"session_id\":\"b\""},
        {"\"turn\":3", "\"turns\":3", 0, RST_ERR_MISSING, "turn", NULL},
        {"\"turn\":3", "\"turn\":-1", 0, RST_ERR_VALUE, "turn", "-1,"},
        {"\"turn\":3", "\"turn\":3.0", 0, RST_ERR_TYPE, "turn", "3.0"},
        {"\"turn\":3", "\"turn\":\"3\"", 0, RST_ERR_TYPE, "turn", "\"3\""},
        {"\"turn\":3", "\"turn\":1048576", 0, RST_ERR_LIMIT, "turn", "1048576"},
        {"\"turn\":3", "\"turn\":99999999999999999999", 0, RST_ERR_VALUE, "turn", "9999"},
        {"\"request\":{", "\"requests\":{", 0, RST_ERR_MISSING, "request", NULL},
        {REQUEST, "[]", 0, RST_ERR_TYPE, "request", "[],"},
        {"\"response\":{", "\"responses\":{", 0, RST_ERR_MISSING, "response", NULL},
        {RESPONSE, "[]", 0, RST_ERR_TYPE, "", "[]}"},
        {"\"response\":{", "\"end\":{},\"response\":{", 0, RST_ERR_VALUE, "end", "{},"},
        {"\"input_ids\"", "\"input\"", 0, RST_ERR_MISSING, "request.input_ids", NULL},
        {"[5,6,7]", "\"567\"", 0, RST_ERR_TYPE, "request.input_ids", "\"567\""},
        {"[5,6,7]", "[5,[6]]", 0, RST_ERR_TYPE, "request.input_ids", "[6]"},
        {"[5,6,7]", "[5,6.0]", 0, RST_ERR_TYPE, "request.input_ids", "6.0"},
        {"[5,6,7]", "[5,-6]", 0, RST_ERR_VALUE, "request.input_ids", "-6"},
        {"[5,6,7]", "[5,2147483648]", 0, RST_ERR_VALUE, "request.input_ids", "2147483648"},
        {"[5,6,7]", "[5,-99999999999999999999]", 0, RST_ERR_VALUE, "request.input_ids", "-9999"},
        {"0.75", "\"0.75\"", 0, RST_ERR_TYPE, "request.temperature", "\"0.75\""},
        {"0.75", "1e39", 0, RST_ERR_VALUE, "request.temperature", "1e39"},
        {"0.75", "-0.5", 0, RST_ERR_VALUE, "request.temperature", "-0.5"},
        {"0.75", "1e999", 0, RST_ERR_VALUE, "request.temperature", "1e999"},
        {"\"temperature\":0.75", "\"sampling_params\":{\"temperature\":[]}", 0, RST_ERR_TYPE,
         "request.sampling_params.temperature", "[]}"},
        {"\"top_logprobs\":2", "\"top_logprobs\":2.5", 0, RST_ERR_TYPE, "request.top_logprobs",
         "2.5"},
        {"\"top_logprobs\":2", "\"top_logprobs\":-2", 0, RST_ERR_VALUE, "request.top_logprobs",
         "-2,"},
        {"\"top_logprobs\":2", "\"top_logprobs_num\":40000", 0, RST_ERR_VALUE,
         "request.top_logprobs_num", "40000"},
        {"\"top_logprobs\":2", "\"top_logprobs\":2", 3, RST_ERR_SHAPE, "request.top_logprobs",
         "2,\"return"},
        {"\"top_logprobs\":2", "\"top_logprobs\":3", 0, RST_ERR_SHAPE, "output_top_logprobs_shape",
         "[2,2]"},
        {"logprobs\":true", "logprobs\":1", 0, RST_ERR_TYPE,
         "request.return_flat_raw_output_top_logprobs", "1}"},
        {"\"top_logprobs\":2", "\"return_sampling_mask\":\"yes\"", 0, RST_ERR_TYPE,
         "request.return_sampling_mask", "\"yes\""},
        {"logprobs\":true", "logprobs\":false", 0, RST_ERR_MISSING, "output_top_logprobs", NULL},
        {"\"int32\"", "\"int64\"", 0, RST_ERR_DTYPE, "output_top_logprobs_idx_flat_b64_dtype",
         "\"int64\""},
        {"AQAAAAIA", "AQAA*AIA", 0, RST_ERR_BASE64, "output_top_logprobs_idx_flat_b64", "*AIA"},
        {"}}]}}", "}}]}", 0, RST_ERR_SYNTAX, "", NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *text = replaced(TURN, cases[i].good, cases[i].bad);
        refuse(text, cases[i].topk, cases[i].code, cases[i].field, cases[i].at);
        free(text);
    }
    refuse("[]", 0, RST_ERR_TYPE, "", "[]");
    refuse("", 0, RST_ERR_SYNTAX, "", NULL);
    refuse("{}", RST_TOPK_MAX + 1, RST_ERR_ARGUMENT, "topk", NULL);
}

/* ---------------------------------------------------------------- ends */

static void an_end_has_its_outcome(void **state)
{
    (void)state;
    rst_line line = decode(END, 0);
    assert_int_equal(line.kind, RST_LINE_END);
    assert_int_equal(line.outcome.status, RST_STATUS_COMPLETED);
    assert_true(line.outcome.reward == 0.125);
    assert_int_equal(line.outcome.group_index, 4);
    assert_int_equal(line.outcome.index, 17);
    assert_empty(record);
    static const struct {
        const char *name;
        rst_outcome_status status;
    } statuses[] = {{"truncated", RST_STATUS_TRUNCATED},
                    {"aborted", RST_STATUS_ABORTED},
                    {"f\\u0061iled", RST_STATUS_FAILED}};
    for (size_t i = 0; i < 3; i++) {
        char *text = text_of("{\"end\":{\"reward\":null,\"status\":\"%s\",\"index\":null},"
                             "\"session_id\":\"s\"}",
                             statuses[i].name);
        line = decode(text, 0);
        assert_int_equal(line.outcome.status, statuses[i].status);
        assert_true(isnan(line.outcome.reward));
        assert_true(line.outcome.index == RST_NO_INDEX);
        assert_true(line.outcome.group_index == RST_NO_INDEX);
        free(text);
    }
    line = decode("{\"session_id\":\"s\",\"end\":{\"status\":\"failed\",\"reward\":"
                  "-0.1000000000000000055511151231257827}}",
                  0);
    assert_true(line.outcome.reward == -0.1);
}

static void wrong_ends_are_refused(void **state)
{
    (void)state;
    static const struct {
        const char *good;
        const char *bad;
        int code;
        const char *field;
        const char *at;
    } cases[] = {
        {"\"status\":\"completed\"", "\"state\":1", RST_ERR_MISSING, "end.status", NULL},
        {"\"completed\"", "1", RST_ERR_TYPE, "end.status", "1,\"rew"},
        {"\"completed\"", "\"done\"", RST_ERR_VALUE, "end.status", "\"done\""},
        {"0.125", "\"0.125\"", RST_ERR_TYPE, "end.reward", "\"0.125\""},
        {"0.125", "true", RST_ERR_TYPE, "end.reward", "true"},
        {"0.125", "1e999", RST_ERR_VALUE, "end.reward", "1e999"},
        {"\"group_index\":4", "\"group_index\":4.5", RST_ERR_TYPE, "end.group_index", "4.5"},
        {"\"group_index\":4", "\"group_index\":\"4\"", RST_ERR_TYPE, "end.group_index", "\"4\""},
        {"\"index\":17", "\"index\":9223372036854775808", RST_ERR_VALUE, "end.index", "9223"},
        {"\"index\":17", "\"index\":-9223372036854775808", RST_ERR_VALUE, "end.index", "-9223"},
        {"{\"status\"", "[],\"x\":{\"status\"", RST_ERR_TYPE, "end", "[],"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *text = replaced(END, cases[i].good, cases[i].bad);
        refuse(text, 0, cases[i].code, cases[i].field, cases[i].at);
        free(text);
    }
}

/* ---------------------------------------------------------------- the session alone */

static int session_of(const char *text, char *id, size_t *size, rst_error *error)
{
    size_t text_size = strlen(text);
    return rst_line_session(at_the_edge(text, text_size), text_size, id, size, error);
}

static void the_session_is_found_wherever_it_stands(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        const char *id;
        size_t size;
    } cases[] = {
        {TURN, "s-1", 3},
        {END, "s-1", 3},
        {" \t{ \"session_id\" : \"a b\" , \"turn\" : 1}", "a b", 3},
        {"{\"turn\":1,\"request\":{\"session_id\":\"no\",\"x\":[\"]}\",{}]},\"a\":\"\\\"\\\\\","
         "\"b\":-1.5e3,\"c\":null,\"session_id\":\"yes\"}",
         "yes", 3},
        {"{\"s\\u0065ssion_id\":\"\\u0061\\n\\u00e9\\ud83d\\ude00\"}",
         "a\n\xC3\xA9\xF0\x9F\x98\x80", 8},
        {"{\"session_id\":\"\\u0000\"}", "\0", 1},
        /* What follows is not looked at. */
        {"{\"session_id\":\"first\",\"turn\"", "first", 5},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char id[RST_SESSION_ID_SIZE_MAX];
        size_t size;
        rst_error error;
        assert_ok(session_of(cases[i].text, id, &size, &error), error);
        assert_int_equal(size, cases[i].size);
        assert_memory_equal(id, cases[i].id, size);
    }
}

static void lines_without_a_session_are_refused(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        int code;
        int64_t offset;
    } cases[] = {
        {"", RST_ERR_SYNTAX, 0},
        {"   ", RST_ERR_SYNTAX, 3},
        {"[]", RST_ERR_SYNTAX, 0},
        {"{}", RST_ERR_MISSING, -1},
        {"{\"a\":{\"session_id\":\"x\"}}", RST_ERR_MISSING, -1},
        {"{\"session_id\":null}", RST_ERR_MISSING, -1},
        {"{\"session_id\":7}", RST_ERR_TYPE, 14},
        {"{\"session_id\":\"\"}", RST_ERR_VALUE, 14},
        {"{\"session_id\":\"\\udc00\"}", RST_ERR_VALUE, 14},
        {"{\"session_id\":\"\\q\"}", RST_ERR_SYNTAX, 15},
        {"{\"session_id\":\"a\x01\"}", RST_ERR_SYNTAX, 16},
        {"{\"session_id\":\"a\xFF\"}", RST_ERR_SYNTAX, 16},
        {"{\"session_id\":\"a\\\"}", RST_ERR_SYNTAX, 19},
        {"{\"session_id\" \"a\"}", RST_ERR_SYNTAX, 14},
        {"{session_id:1}", RST_ERR_SYNTAX, 1},
        {"{\"a\":1 \"session_id\":\"x\"}", RST_ERR_MISSING, -1},
        {"{\"a\":\"1\" \"session_id\":\"x\"}", RST_ERR_SYNTAX, 9},
        {"{\"a\":1,}", RST_ERR_SYNTAX, 7},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char id[RST_SESSION_ID_SIZE_MAX];
        size_t size = 1;
        rst_error error;
        assert_code(cases[i].code, session_of(cases[i].text, id, &size, &error), error);
        assert_int_equal(error.offset, cases[i].offset);
        assert_int_equal(size, 0);
    }
    /* Cut before the id has ended, wherever. */
    static const char text[] = "{\"a\":[{\"b\":\"]\\\"\"}, 1 ],\"session_id\" : \"s\\u0041\"}";
    for (size_t size = 0; size < strlen(text) - 1; size++) {
        char id[RST_SESSION_ID_SIZE_MAX];
        size_t id_size;
        rst_error error;
        assert_code(RST_ERR_SYNTAX,
                    rst_line_session(at_the_edge(text, size), size, id, &id_size, &error), error);
    }
}

static void the_session_has_a_length(void **state)
{
    (void)state;
    static const char *const units[] = {"x", "\\u0041", "\\n"};
    static const size_t counts[] = {RST_SESSION_ID_SIZE_MAX, RST_SESSION_ID_SIZE_MAX + 1,
                                    7 * RST_SESSION_ID_SIZE_MAX};
    for (size_t u = 0; u < 3; u++) {
        for (size_t c = 0; c < 3; c++) {
            char *spelled = malloc(counts[c] * 6 + 1);
            char *out = spelled;
            for (size_t i = 0; i < counts[c]; i++) {
                out = stpcpy(out, units[u]);
            }
            char *line =
                text_of("{\"session_id\":\"%s\",\"end\":{\"status\":\"failed\"}}", spelled);
            char id[RST_SESSION_ID_SIZE_MAX];
            size_t size;
            rst_error error;
            int want = counts[c] > RST_SESSION_ID_SIZE_MAX ? RST_ERR_LIMIT : RST_OK;
            assert_int_equal(session_of(line, id, &size, &error), want);
            if (want) {
                refuse(line, 0, want, "session_id", NULL);
            } else {
                rst_line decoded = decode(line, 0);
                assert_int_equal(decoded.session_size, size);
                assert_memory_equal(decoded.session, id, size);
            }
            free(line);
            free(spelled);
        }
    }
}

/* Finding the session and decoding the line agree on every damaged line. */
static void both_ways_to_the_session_agree(void **state)
{
    (void)state;
    static const char text[] =
        "{\"turn\":1,\"x\":{\"session_id\":\"n\"},\"session_id\":\"a\\u0062\\n\","
        "\"end\":{\"status\":\"failed\"}}";
    static const char bytes[] = "{}[]:,\"\\0u\x01\xC3x";
    for (size_t at = 0; at < sizeof text - 1; at++) {
        for (size_t b = 0; b < sizeof bytes - 1; b++) {
            char copy[sizeof text];
            char id[RST_SESSION_ID_SIZE_MAX];
            size_t size;
            rst_line line;
            memcpy(copy, text, sizeof text);
            copy[at] = bytes[b];
            const char *edge = at_the_edge(copy, sizeof text - 1);
            int found = rst_line_session(edge, sizeof text - 1, id, &size, NULL);
            if (rst_line_decode(record, edge, sizeof text - 1, 0, &line, NULL) == RST_OK) {
                assert_int_equal(found, RST_OK);
                assert_int_equal(size, line.session_size);
                assert_memory_equal(id, line.session, size);
            }
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(recorded_sessions_are_read),
        cmocka_unit_test(a_turn_has_reply_prompt_and_temperature),
        cmocka_unit_test(keys_of_a_line_come_in_any_order),
        cmocka_unit_test(the_request_says_how_the_reply_is_read),
        cmocka_unit_test(generate_keeps_the_temperature_under_sampling_params),
        cmocka_unit_test(wrong_turns_are_refused),
        cmocka_unit_test(an_end_has_its_outcome),
        cmocka_unit_test(wrong_ends_are_refused),
        cmocka_unit_test(the_session_is_found_wherever_it_stands),
        cmocka_unit_test(lines_without_a_session_are_refused),
        cmocka_unit_test(the_session_has_a_length),
        cmocka_unit_test(both_ways_to_the_session_agree),
    };
    return cmocka_run_group_tests(tests, make_record, free_record);
}
