/* Long replies, whose base64 strings are left out of the first look at the text: nothing about the
 * outcome may depend on it. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "layout/record.h"
#include "reply/cut.h"
#include "reply_support.h"

enum { N = 300, K = 32 }; /* two strings of 51200 characters */

static const rst_decode_options flat = {.topk = K};

static char *long_reply(rst_turn *turn)
{
    *turn = made_turn(N, K, 21);
    return written_reply(turn);
}

static uint32_t cut_count(const char *text)
{
    rst_json_cut cuts[RST_JSON_CUT_MAX];
    return rst_json_find_cuts(text, strlen(text), cuts, NULL);
}

/* The place of the base64 text of a field. */
static char *text_in(char *reply, const char *field)
{
    char *found = strstr(reply, field);
    assert_non_null(found);
    return found + strlen(field) + 2; /* behind :" */
}

#define IDS "output_top_logprobs_idx_flat_b64\""
#define VALS "output_top_logprobs_val_flat_b64\""

static void assert_decodes_to(const char *text, const rst_turn *turn)
{
    rst_record *record = rst_record_new();
    rst_turn got = decode_text(record, text, &flat);
    assert_same_turn(turn, &got);
    rst_record_free(record);
}

static void long_strings_are_found_and_decoded(void **state)
{
    (void)state;
    rst_turn turn;
    char *reply = long_reply(&turn);
    assert_int_equal(cut_count(reply), 2);
    assert_decodes_to(reply, &turn);
    free(reply);
}

static char *long_base64(char *out, size_t size)
{
    for (size_t i = 0; i < size; i++) {
        out[i] = "ABCDwxyz0189+/"[i * 7 % 14];
    }
    out[size] = '\0';
    return out;
}

typedef struct attempts {
    unsigned count;
    unsigned decoded; /* long strings to ask for */
    uint32_t cuts[2]; /* left out in each attempt */
    int codes[2];     /* what each attempt returns */
} attempts;

static int attempt(void *context, const rst_json *json, rst_json_node root, rst_error *error)
{
    attempts *a = context;
    rst_json_buffer buffer = {0};
    rst_json_node node = rst_json_begin(json, root);
    (void)error;
    assert_true(a->count < 2);
    a->cuts[a->count] = json->cut_count;
    for (unsigned i = 0; i < a->decoded; i++) {
        const char *text;
        size_t size;
        assert_int_equal(rst_json_long_string(json, node, &buffer, &text, &size), RST_OK);
        assert_int_equal(size, 20000);
        node = rst_json_next(json, node);
    }
    return a->codes[a->count++];
}

static void the_first_attempt_counts_when_all_was_decoded(void **state)
{
    (void)state;
    static const struct {
        attempts a;
        unsigned count;
        int code;
    } cases[] = {
        {{.decoded = 2}, 1, RST_OK},
        {{.decoded = 1}, 2, RST_OK},
        {{.decoded = 2, .codes = {RST_ERR_VALUE, RST_OK}}, 2, RST_OK},
        {{.decoded = 2, .codes = {RST_ERR_VALUE, RST_ERR_SHAPE}}, 2, RST_ERR_SHAPE},
    };
    static char base64[20001];
    long_base64(base64, 20000);
    char *text = text_of("[\"%s\",\"%s\"]", base64, base64);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        rst_json_reader reader = {0};
        attempts a = cases[i].a;
        assert_int_equal(rst_json_with(&reader, text, strlen(text), attempt, &a, NULL),
                         cases[i].code);
        assert_int_equal(a.count, cases[i].count);
        assert_int_equal(a.cuts[0], 2);
        assert_int_equal(a.cuts[1], 0);
        rst_json_reader_free(&reader);
    }
    free(text);
}

/* A record is used again for replies of every size. */
static void a_record_can_be_filled_with_longer_and_shorter_turns(void **state)
{
    (void)state;
    rst_record *record = rst_record_new();
    for (uint32_t n = 0; n < 40; n++) {
        rst_turn turn = made_turn(n * 37 % 401, 1 + n * 13 % 64, n);
        char *reply = written_reply(&turn);
        rst_decode_options options = {.topk = turn.topk};
        rst_turn got = decode_text(record, reply, &options);
        assert_same_turn(&turn, &got);
        assert_sound_record(record);
        free(reply);
    }
    rst_record_free(record);
}

static void a_bad_character_is_found_at_its_place(void **state)
{
    (void)state;
    rst_turn turn;
    char *reply = long_reply(&turn);
    static const char *const fields[] = {IDS, VALS};
    static const char bad[] = "*-_ =\x7F";
    for (size_t f = 0; f < 2; f++) {
        char *text = text_in(reply, fields[f]);
        for (size_t at = 0; at < 51200; at += 1703) {
            for (size_t b = 0; b + 1 < sizeof bad; b++) {
                char was = text[at];
                text[at] = bad[b];
                rst_error error;
                char field[64];
                snprintf(field, sizeof field, "%.*s", (int)strlen(fields[f]) - 1, fields[f]);
                refuse_text(reply, &flat, RST_ERR_BASE64, field, &error);
                assert_int_equal(error.offset, text + at - reply);
                text[at] = was;
            }
        }
    }
    assert_decodes_to(reply, &turn);
    free(reply);
}

/* The second string may end before the place where the first one's length puts its end, and another
 * '"' may stand there. */
static void a_second_string_that_is_shorter_is_refused_at_its_place(void **state)
{
    (void)state;
    rst_turn turn;
    char *reply = long_reply(&turn);
    bool vals_first = strstr(reply, VALS) < strstr(reply, IDS);
    char *text = text_in(reply, vals_first ? IDS : VALS);
    for (size_t shorter = 1; shorter < 200; shorter++) {
        char *with = text_of("%.*s%s", (int)(text - reply), reply, text + shorter);
        rst_error error;
        rst_record *record = rst_record_new();
        int code = decode_at_the_edge(record, with, strlen(with), &flat, &error);
        assert_true(code == RST_ERR_SHAPE || code == RST_ERR_BASE64);
        assert_non_null(strstr(error.message, vals_first ? "_idx_flat_b64" : "_val_flat_b64"));
        rst_record_free(record);
        free(with);
    }
    free(reply);
}

/* What is no JSON inside of a string that was left out is no JSON. */
static void a_bad_byte_in_a_long_string_is_bad_syntax(void **state)
{
    (void)state;
    static const char *const bad[] = {"\x01", "\n", "\xFF", "\xC3\x28"};
    rst_turn turn;
    char *reply = long_reply(&turn);
    char *text = text_in(reply, IDS);
    for (size_t b = 0; b < 4; b++) {
        char was[2];
        rst_error error;
        memcpy(was, text + 20000, 2);
        memcpy(text + 20000, bad[b], strlen(bad[b]));
        refuse_text(reply, &flat, RST_ERR_SYNTAX, "", &error);
        assert_int_equal(error.offset, text + 20000 - reply);
        memcpy(text + 20000, was, 2);
    }
    char was = text[20000];
    text[20000] = '"';
    refuse_text(reply, &flat, RST_ERR_SYNTAX, "", NULL);
    text[20000] = '\\';
    text[20001] = 'q';
    refuse_text(reply, &flat, RST_ERR_SYNTAX, "", NULL);
    text[20000] = was;
    free(reply);
}

/* JSON allows "\/" for "/". */
static void escapes_in_a_long_string_are_read(void **state)
{
    (void)state;
    rst_turn turn;
    char *reply = long_reply(&turn);
    char *escaped = malloc(2 * strlen(reply) + 1);
    char *out = escaped;
    size_t count = 0;
    for (const char *in = reply; *in; in++) {
        if (*in == '/') {
            *out++ = '\\';
            count++;
        }
        *out++ = *in;
    }
    *out = '\0';
    assert_true(count > 100);
    assert_decodes_to(escaped, &turn);
    /* The place of a fault is counted in what stands in the reply. */
    char *text = text_in(escaped, VALS);
    text[51000] = '*';
    rst_error error;
    refuse_text(escaped, &flat, RST_ERR_BASE64, "output_top_logprobs_val_flat_b64", &error);
    assert_int_equal(error.offset, text + 51000 - escaped);
    free(escaped);
    free(reply);
}

static char *with_front(const char *reply, const char *front)
{
    return text_of("{%s,%s", front, reply + 1);
}

static void long_strings_elsewhere_change_nothing(void **state)
{
    (void)state;
    static char base64[20001];
    long_base64(base64, 20000);
    rst_turn turn;
    char *reply = long_reply(&turn);
    static const char *const fronts[] = {
        "\"image\":\"%s\"",
        "\"a\":\"%s\",\"b\":\"%s\",\"c\":\"%s\"",
        "\"text\":\"\\\"%s\\\" and \\\"%s\\\"\"",
        "\"text\":\"\\\\\\\"%s\"",
        "\"%s\":[\"%s\"]",
        "\"text\":\"%s \\u00e9 %s\"",
        "\"text\":\"%s\xC3\xA9\"",
    };
    for (size_t i = 0; i < sizeof fronts / sizeof *fronts; i++) {
        char front[70000];
        char *put = front;
        for (const char *in = fronts[i]; *in; in++) {
            if (in[0] == '%' && in[1] == 's') {
                put = stpcpy(put, base64);
                in++;
            } else {
                *put++ = *in;
            }
        }
        *put = '\0';
        char *text = with_front(reply, front);
        assert_decodes_to(text, &turn);
        free(text);
    }
    free(reply);
}

static void long_runs_outside_of_strings_are_no_json(void **state)
{
    (void)state;
    static char base64[20001];
    long_base64(base64, 20000);
    rst_turn turn;
    char *reply = long_reply(&turn);
    static const char *const fronts[] = {
        "\"a\":\"x\"%s\"y\"",
        "\"a\":[\"x\"%s\"y\"]",
        "\"a\"%s:1",
        "\"a\":%s",
        "\"a\":\"\\\"%s\",\"b\":\"%s\\\"%s\"",
    };
    for (size_t i = 0; i < sizeof fronts / sizeof *fronts; i++) {
        /* The last is JSON, and looks as if its quotes were the other way round. */
        char *front = text_of(fronts[i], base64, base64, base64);
        char *text = with_front(reply, front);
        if (i + 1 < sizeof fronts / sizeof *fronts) {
            refuse_text(text, &flat, RST_ERR_SYNTAX, "", NULL);
        } else {
            assert_decodes_to(text, &turn);
        }
        free(text);
        free(front);
    }
    free(reply);
}

/* Fields that are read as other things than base64 are whole. */
static void long_strings_in_other_fields_are_read_whole(void **state)
{
    (void)state;
    static char base64[20001];
    long_base64(base64, 20000);
    rst_turn turn;
    char *reply = long_reply(&turn);
    char *version = text_of("\"weight_version\":\"%s\"", base64);
    char *text = replaced(reply, "\"weight_version\":\"17\"", version);
    refuse_text(text, &flat, RST_ERR_LIMIT, "weight_version", NULL);
    free(text);
    free(version);
    char *dtype = text_of("\"%s\"", base64);
    text = replaced(reply, "\"int32\"", dtype);
    refuse_text(text, &flat, RST_ERR_DTYPE, "output_top_logprobs_idx_flat_b64_dtype", NULL);
    free(text);
    free(dtype);
    free(reply);
}

static void two_choices_with_long_strings_are_told_apart(void **state)
{
    (void)state;
    rst_turn turn;
    char *reply = long_reply(&turn);
    char *choice = strstr(reply, "{\"index\":0");
    assert_non_null(choice);
    char *text = text_of("{\"choices\":[{\"index\":1,%.*s,%s", (int)(strlen(choice) - 2 - 11),
                         choice + 11, choice);
    assert_true(cut_count(text) == 4);
    rst_record *record = rst_record_new();
    for (uint32_t c = 0; c < 2; c++) {
        rst_decode_options options = {.topk = K, .choice = c};
        rst_turn got = decode_text(record, text, &options);
        assert_same_turn(&turn, &got);
    }
    rst_record_free(record);
    free(text);
    free(reply);
}

/* More long strings than are ever left out. */
static void many_long_strings_are_read(void **state)
{
    (void)state;
    static char base64[8001];
    long_base64(base64, 8000);
    rst_turn turn;
    char *reply = long_reply(&turn);
    size_t count = 3 * RST_JSON_CUT_MAX;
    char *front = malloc(count * 8100);
    char *out = stpcpy(front, "\"many\":[");
    for (size_t i = 0; i < count; i++) {
        out = stpcpy(stpcpy(stpcpy(out, i ? ",\"" : "\""), base64), "\"");
    }
    stpcpy(out, "]");
    char *text = with_front(reply, front);
    assert_int_equal(cut_count(text), RST_JSON_CUT_MAX);
    assert_decodes_to(text, &turn);
    free(text);
    free(front);
    free(reply);
}

static void a_long_reply_cut_anywhere_is_refused(void **state)
{
    (void)state;
    rst_turn turn;
    char *reply = long_reply(&turn);
    size_t whole = strlen(reply);
    rst_record *record = rst_record_new();
    for (size_t size = 0; size < whole; size += 1 + size % 7 * 31) {
        rst_error error;
        assert_code(RST_ERR_SYNTAX, decode_at_the_edge(record, reply, size, &flat, &error), error);
    }
    rst_record_free(record);
    free(reply);
}

/* ---------------------------------------------------------------- turns of every kind */

static void assert_round_trip(const rst_turn *turn)
{
    rst_record *given = rst_record_new();
    rst_record *back = rst_record_new();
    rst_error error;
    assert_ok(rst_record_set(given, turn, &error), error);
    rst_turn want;
    rst_record_view(given, &want);
    char *reply = written_reply(&want);
    rst_decode_options options = {.mode = turn->mode, .topk = turn->topk};
    rst_turn got = decode_text(back, reply, &options);
    assert_same_turn(&want, &got);
    free(reply);
    rst_record_free(given);
    rst_record_free(back);
}

static void turns_come_back_from_their_replies(void **state)
{
    (void)state;
    static const rst_mode modes[] = {RST_MODE_SELECTED, RST_MODE_SUPPORT};
    static const rst_finish finishes[] = {RST_FINISH_NONE,       RST_FINISH_STOP,
                                          RST_FINISH_LENGTH,     RST_FINISH_ABORT,
                                          RST_FINISH_TOOL_CALLS, RST_FINISH_OTHER};
    for (uint32_t i = 0; i < 60; i++) {
        rst_turn turn = made_turn(i * 7 % 23, 1 + i % 5, i);
        int32_t *ids = (int32_t *)turn.topk_ids;
        float *logprobs = (float *)turn.topk_logprobs;
        float *sampled = (float *)turn.token_logprobs;
        size_t slots = (size_t)turn.token_count * turn.topk;
        for (size_t s = 0; s < slots; s++) { /* leading rows, ends of rows, whole rows unused */
            if (s / turn.topk < i % 4 || (s * 2654435761u >> 5) % 7 == 0) {
                ids[s] = -1;
                logprobs[s] = -INFINITY;
            } else if (s % 11 == 5) {
                logprobs[s] = -INFINITY; /* an id that cannot be sampled */
            }
        }
        if (turn.token_count > 3) {
            sampled[0] = -INFINITY;
            sampled[1] = 0.0f;
            sampled[2] = -0.0f;
            sampled[3] = 5e-5f;
        }
        turn.mode = modes[i % 2];
        turn.finish = finishes[i % 6];
        turn.finish_reason = "content \"filter\"\n\\ \xC3\xA9 \x01";
        turn.finish_reason_size = 24;
        turn.temperature_scaled = (rst_scaled)(i % 3);
        turn.weight_version = i % 2 ? "step \xF0\x9F\x98\x80 \"1\"\t" : NULL;
        turn.weight_version_size = i % 2 ? 14 : 0;
        assert_round_trip(&turn);
    }
}

static void turns_that_no_reply_may_hold_are_refused(void **state)
{
    (void)state;
    rst_error error;
    char *reply;
    size_t size;
    rst_turn turn = made_turn(3, 2, 1);
    float *sampled = (float *)turn.token_logprobs;
    sampled[1] = NAN;
    assert_code(RST_ERR_VALUE, rst_turn_to_reply(&turn, &reply, &size, &error), error);
    assert_null(reply);
    sampled[1] = -1;
    turn.weight_version = "\xFF";
    turn.weight_version_size = 1;
    assert_code(RST_ERR_VALUE, rst_turn_to_reply(&turn, &reply, &size, &error), error);
    turn.weight_version_size = 0;
    turn.finish = (rst_finish)9;
    assert_code(RST_ERR_ARGUMENT, rst_turn_to_reply(&turn, &reply, &size, &error), error);
    turn.finish = RST_FINISH_STOP;
    turn.topk_ids = NULL;
    assert_code(RST_ERR_ARGUMENT, rst_turn_to_reply(&turn, &reply, &size, &error), error);
    assert_string_equal(error.field, "topk_ids");
    turn.token_ids = NULL;
    assert_code(RST_ERR_ARGUMENT, rst_turn_to_reply(&turn, &reply, &size, &error), error);
    assert_string_equal(error.field, "token_ids");
    turn.token_count = RST_TOKEN_COUNT_MAX + 1;
    turn.token_ids = turn.topk_ids = (const int32_t *)(const void *)sampled;
    assert_code(RST_ERR_LIMIT, rst_turn_to_reply(&turn, &reply, &size, &error), error);
    assert_int_equal(size, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(long_strings_are_found_and_decoded),
        cmocka_unit_test(the_first_attempt_counts_when_all_was_decoded),
        cmocka_unit_test(a_record_can_be_filled_with_longer_and_shorter_turns),
        cmocka_unit_test(a_bad_character_is_found_at_its_place),
        cmocka_unit_test(a_second_string_that_is_shorter_is_refused_at_its_place),
        cmocka_unit_test(a_bad_byte_in_a_long_string_is_bad_syntax),
        cmocka_unit_test(escapes_in_a_long_string_are_read),
        cmocka_unit_test(long_strings_elsewhere_change_nothing),
        cmocka_unit_test(long_runs_outside_of_strings_are_no_json),
        cmocka_unit_test(long_strings_in_other_fields_are_read_whole),
        cmocka_unit_test(two_choices_with_long_strings_are_told_apart),
        cmocka_unit_test(many_long_strings_are_read),
        cmocka_unit_test(a_long_reply_cut_anywhere_is_refused),
        cmocka_unit_test(turns_come_back_from_their_replies),
        cmocka_unit_test(turns_that_no_reply_may_hold_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
