/* Each thing that may be wrong with a reply, one at a time. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "reply_texts.h"

static void wrong_types_and_values_are_refused_where_they_stand(void **state)
{
    (void)state;
    static const struct {
        const char *good; /* in one of the forms */
        const char *bad;
        int code;
        const char *field;
        const char *at; /* the error's offset is where this stands in the text */
    } cases[] = {
        {"[-0.5,11,null]", "[-0.5,11]", RST_ERR_TYPE, "output_token_logprobs", "[-0.5,11]"},
        {"[-0.5,11,null]", "[-0.5,11,null,1]", RST_ERR_TYPE, "output_token_logprobs", "[-0.5"},
        {"[-0.5,11,null]", "[[1],11]", RST_ERR_TYPE, "output_token_logprobs", "[1],11"},
        {"[-0.5,11,null]", "[-0.5,[1]]", RST_ERR_TYPE, "output_token_logprobs", "[1]]"},
        {"[-0.5,11,null]", "[-0.5,11,7]", RST_ERR_TYPE, "output_token_logprobs", "7],"},
        {"[-0.5,11,null]", "null", RST_ERR_TYPE, "output_token_logprobs", "null,[-0.25"},
        {"[-0.5,11,null]", "{\"a\":1,\"b\":2}", RST_ERR_TYPE, "output_token_logprobs", "{\"a\""},
        {"[-0.5,11,null]", "[true,11,null]", RST_ERR_TYPE, "output_token_logprobs", "true"},
        {"[-0.5,11,null]", "[\"-0.5\",11,null]", RST_ERR_TYPE, "output_token_logprobs", "\"-0.5\""},
        {"[-0.5,11,null]", "[-0.5,11.0,null]", RST_ERR_TYPE, "output_token_logprobs", "11.0"},
        {"[-0.5,11,null]", "[-0.5,1e1,null]", RST_ERR_TYPE, "output_token_logprobs", "1e1"},
        {"[-0.5,11,null]", "[-0.5,null,null]", RST_ERR_TYPE, "output_token_logprobs", "null,null"},
        {"[-0.5,11,null]", "[-0.5,2147483648,null]", RST_ERR_VALUE, "output_token_logprobs",
         "2147"},
        {"[-0.5,11,null]", "[-0.5,99999999999999999999,null]", RST_ERR_VALUE,
         "output_token_logprobs", "9999"},
        {"[-0.5,11,null]", "[-0.5,-99999999999999999999,null]", RST_ERR_VALUE,
         "output_token_logprobs", "-9999"},
        {"[-0.5,11,null]", "[-0.5,-1,null]", RST_ERR_VALUE, "output_token_logprobs", "[-0.5,-1"},
        {"[-0.5,11,null]", "[0.5,11,null]", RST_ERR_VALUE, "output_token_logprobs", "[0.5,11"},
        {"[-0.5,11,null]", "[1e999,11,null]", RST_ERR_VALUE, "output_token_logprobs", "[1e999"},
        {"[-0.5,11,null]", "[1e300,11,null]", RST_ERR_VALUE, "output_token_logprobs", "[1e300"},
        {"[-0.5,11,null]", "[1e999,11,null]", RST_ERR_VALUE, "output_token_logprobs", "[1e999"},
        {TOKENS, "\"output_token_logprobs\":{}", RST_ERR_TYPE, "output_token_logprobs", "{},"},

        {"\"AQAAAAIAAAADAAAABAAAAA==\"", "[1,2,3,4]", RST_ERR_TYPE,
         "output_top_logprobs_idx_flat_b64", "[1,2"},
        {"\"int32\"", "32", RST_ERR_DTYPE, "output_top_logprobs_idx_flat_b64_dtype", "32,"},
        {"\"int32\"", "\"int32 \"", RST_ERR_DTYPE, "output_top_logprobs_idx_flat_b64_dtype",
         "\"int32 \""},
        {"\"float32\"", "\"float\"", RST_ERR_DTYPE, "output_top_logprobs_val_flat_b64_dtype",
         "\"float\""},
        {"AQAAAAIAAAADAAAABAAAAA==", "AQAAAAIAAAADAAAABAAAAB==", RST_ERR_BASE64,
         "output_top_logprobs_idx_flat_b64", "B==\""},
        {"AQAAAAIAAAADAAAABAAAAA==", "AQAAAAIAAAADAAAABAAAAA=", RST_ERR_BASE64,
         "output_top_logprobs_idx_flat_b64", NULL},
        {"AQAAAAIAAAADAAAABAAAAA==", "AQAA AAIAAAADAAAABAAAAA==", RST_ERR_BASE64,
         "output_top_logprobs_idx_flat_b64", " AAIA"},
        {"AQAAAAIAAAADAAAABAAAAA==", "AQAA    AAIAAAADAAAABAAAAA==", RST_ERR_BASE64,
         "output_top_logprobs_idx_flat_b64", "    AAIA"},
        {"AQAAAAIAAAADAAAABAAAAA==", "\\u0041QAA\\nAAAIAAAADAAAABAAAAA==", RST_ERR_BASE64,
         "output_top_logprobs_idx_flat_b64", "\\nAAAI"},
        {"AQAAAAIAAAADAAAABAAAAA==", "AQAAAAIAAAADAAAABAAAAA\\ud800", RST_ERR_BASE64,
         "output_top_logprobs_idx_flat_b64", NULL},
        {"AQAAAAIAAAADAAAABAAAAA==", "", RST_ERR_SHAPE, "output_top_logprobs_idx_flat_b64",
         "\"\",\"output_top_logprobs_val"},
        {"AQAAAAIAAAADAAAABAAAAA==", "AQAAAAIA", RST_ERR_SHAPE, "output_top_logprobs_idx_flat_b64",
         "\"AQAAAAIA\""},
        {"AACAvwAAAMAAAEDAAACAwA==", "AACAvwAAAMAAAEDA", RST_ERR_SHAPE,
         "output_top_logprobs_val_flat_b64", "\"AACAvwAAAMAAAEDA\""},
        /* -1 stands as the third candidate's id, then NaN as its logprob. */
        {"AQAAAAIAAAADAAAABAAAAA==", "AQAAAAIAAAD/////BAAAAA==", RST_ERR_VALUE,
         "output_top_logprobs_idx_flat_b64", "D/////B"},
        {"AACAvwAAAMAAAEDAAACAwA==", "AACAvwAAAMAAAMB/AACAwA==", RST_ERR_VALUE,
         "output_top_logprobs_val_flat_b64", "AAAMB/"},
        {"[2,2]", "[2,\"2\"]", RST_ERR_TYPE, "output_top_logprobs_shape", "\"2\"]"},
        {"[2,2]", "\"2x2\"", RST_ERR_TYPE, "output_top_logprobs_shape", "\"2x2\""},
        {"[2,2]", "[2]", RST_ERR_SHAPE, "output_top_logprobs_shape", "[2],"},
        {"[2,2]", "[]", RST_ERR_SHAPE, "output_top_logprobs_shape", "[],"},
        {"[2,2]", "[2,2.0]", RST_ERR_SHAPE, "output_top_logprobs_shape", "2.0]"},
        {"[2,2]", "[2,-2]", RST_ERR_SHAPE, "output_top_logprobs_shape", "-2]"},
        {"[2,2]", "[0,0]", RST_ERR_SHAPE, "output_top_logprobs_shape", "[0,0]"},
        {"[2,2]", "[18446744073709551618,2]", RST_ERR_SHAPE, "output_top_logprobs_shape", "18446"},
        {"[2,2]", "[2,4294967298]", RST_ERR_SHAPE, "output_top_logprobs_shape", "[2,4294967298]"},
        {"null_prefix\":0", "null_prefix\":0.0", RST_ERR_SHAPE, "output_top_logprobs_null_prefix",
         "0.0"},
        {"null_prefix\":0", "null_prefix\":[0]", RST_ERR_TYPE, "output_top_logprobs_null_prefix",
         "[0]"},
        {"null_prefix\":0", "null_prefix\":3", RST_ERR_SHAPE, "output_top_logprobs_null_prefix",
         "3}"},
        {"null_prefix\":0", "null_prefix\":1", RST_ERR_SHAPE, "output_top_logprobs_idx_flat_b64",
         "\"AQAA"},
        {"," PREFIX, "", RST_ERR_MISSING, "output_top_logprobs_null_prefix", NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        rst_error error;
        char *meta = replaced(BASE64, cases[i].good, cases[i].bad);
        char *text = chat(meta);
        refuse_text(text, &flat, cases[i].code, cases[i].field, &error);
        if (cases[i].at) {
            const char *at = strstr(text, cases[i].at);
            assert_non_null(at);
            assert_int_equal(error.offset, at - text);
        }
        free(text);
        free(meta);
    }
}

typedef struct refusal {
    const char *meta;
    int code;
    const char *field;
} refusal;

static void refuse_each(const refusal *cases, size_t count, const rst_decode_options *options)
{
    for (size_t i = 0; i < count; i++) {
        char *text = chat(cases[i].meta);
        refuse_text(text, options, cases[i].code, cases[i].field, NULL);
        free(text);
    }
}

#define PLAIN_OF(ids, vals)                                                                        \
    TOKENS ",\"output_top_logprobs_idx_flat\":" ids ",\"output_top_logprobs_val_flat\":" vals      \
           "," SHAPE "," PREFIX

static void plain_arrays_are_checked(void **state)
{
    (void)state;
    static const refusal cases[] = {
        {PLAIN_OF("[1,2,3]", "[-1,-2,-3,-4]"), RST_ERR_SHAPE, "output_top_logprobs_idx_flat"},
        {PLAIN_OF("[1,2,3,4]", "[-1,-2,-3,-4,-5]"), RST_ERR_SHAPE, "output_top_logprobs_val_flat"},
        {PLAIN_OF("[1,2,3,\"4\"]", "[-1,-2,-3,-4]"), RST_ERR_TYPE, "output_top_logprobs_idx_flat"},
        {PLAIN_OF("[1,2,3,4.0]", "[-1,-2,-3,-4]"), RST_ERR_TYPE, "output_top_logprobs_idx_flat"},
        {PLAIN_OF("[1,2,3,[4]]", "[-1,-2,-3,-4]"), RST_ERR_TYPE, "output_top_logprobs_idx_flat"},
        {PLAIN_OF("[1,2,3,-4]", "[-1,-2,-3,-4]"), RST_ERR_VALUE, "output_top_logprobs_idx_flat"},
        {PLAIN_OF("[1,2,3,3]", "[-1,-2,-3,-4]"), RST_ERR_VALUE, "output_top_logprobs_idx_flat"},
        {PLAIN_OF("[1,2,3,4]", "[-1,-2,-3,null]"), RST_ERR_VALUE, "output_top_logprobs_val_flat"},
        {PLAIN_OF("[1,2,3,4]", "[-1,-2,-3,true]"), RST_ERR_TYPE, "output_top_logprobs_val_flat"},
        {PLAIN_OF("[1,2,3,4]", "[-1,-2,-3,0.1]"), RST_ERR_VALUE, "output_top_logprobs_val_flat"},
        {PLAIN_OF("[1,2,3,4]", "[-1,-2,-3,1e999]"), RST_ERR_VALUE, "output_top_logprobs_val_flat"},
        {PLAIN_OF("{}", "[-1,-2,-3,-4]"), RST_ERR_TYPE, "output_top_logprobs_idx_flat"},
        {TOKENS "," IDS_PLAIN "," SHAPE "," PREFIX, RST_ERR_MISSING,
         "output_top_logprobs_val_flat"},
        {TOKENS "," IDS_PLAIN "," VALS_B64 "," DTYPES "," SHAPE "," PREFIX, RST_ERR_MISSING,
         "output_top_logprobs_idx_flat_b64"},
    };
    refuse_each(cases, sizeof cases / sizeof *cases, &flat);
}

static void nested_lists_are_checked(void **state)
{
    (void)state;
    static const refusal cases[] = {
        {TOKENS, RST_ERR_MISSING, "output_top_logprobs"},
        {BASE64, RST_ERR_MISSING, "output_top_logprobs"},
        {TOKENS ",\"output_top_logprobs\":{}", RST_ERR_TYPE, "output_top_logprobs"},
        {TOKENS ",\"output_top_logprobs\":[[]]", RST_ERR_SHAPE, "output_top_logprobs"},
        {TOKENS ",\"output_top_logprobs\":[[],[],[]]", RST_ERR_SHAPE, "output_top_logprobs"},
        {TOKENS ",\"output_top_logprobs\":[[],7]", RST_ERR_TYPE, "output_top_logprobs"},
        {TOKENS ",\"output_top_logprobs\":[[],{}]", RST_ERR_TYPE, "output_top_logprobs"},
        {TOKENS ",\"output_top_logprobs\":[[],[null]]", RST_ERR_TYPE, "output_top_logprobs"},
        {TOKENS ",\"output_top_logprobs\":[[],[[null,1,null]]]", RST_ERR_VALUE,
         "output_top_logprobs"},
        {TOKENS ",\"output_top_logprobs\":[[],[[-1,1,null],[-1,1,null]]]", RST_ERR_VALUE,
         "output_top_logprobs"},
        {TOKENS ",\"output_top_logprobs\":[[],[[-1,-1,null]]]", RST_ERR_VALUE,
         "output_top_logprobs"},
        {TOKENS ",\"output_top_logprobs\":[[],[[-1,1,null],[-1,2,null],[-1,3,null]]]",
         RST_ERR_SHAPE, "output_top_logprobs"},
    };
    refuse_each(cases, sizeof cases / sizeof *cases, &nested);
    rst_error error;
    char *text = chat(TOKENS ",\"output_top_logprobs\":[[],[[-1,7,null],[-1,7,null]]]");
    refuse_text(text, &nested, RST_ERR_VALUE, "output_top_logprobs", &error);
    assert_int_equal(error.offset, strstr(text, "7,null]]]") - text);
    free(text);
}

#define SUPPORT_OF(mask, logprobs)                                                                 \
    TOKENS ",\"output_token_sampling_mask\":" mask ",\"output_token_sampling_logprobs\":" logprobs

static void support_lists_are_checked(void **state)
{
    (void)state;
    static const refusal cases[] = {
        {BASE64, RST_ERR_MISSING, "output_token_sampling_mask"},
        {TOKENS "," MASK, RST_ERR_MISSING, "output_token_sampling_logprobs"},
        {SUPPORT_OF("[[1]]", "[[0],[0]]"), RST_ERR_SHAPE, "output_token_sampling_mask"},
        {SUPPORT_OF("[[1],[2]]", "[[0]]"), RST_ERR_SHAPE, "output_token_sampling_logprobs"},
        {SUPPORT_OF("[[1],[2,3]]", "[[0],[0]]"), RST_ERR_SHAPE, "output_token_sampling_logprobs"},
        {SUPPORT_OF("[[1],[]]", "[[0],[0]]"), RST_ERR_SHAPE, "output_token_sampling_logprobs"},
        {SUPPORT_OF("[[1],[2,3,4]]", "[[0],[-1,-1,-1]]"), RST_ERR_SHAPE,
         "output_token_sampling_mask"},
        {SUPPORT_OF("[[1],null]", "[[0],null]"), RST_ERR_TYPE, "output_token_sampling_mask"},
        {SUPPORT_OF("[[1],[2]]", "[[0],0]"), RST_ERR_TYPE, "output_token_sampling_logprobs"},
        {SUPPORT_OF("[[1],[\"2\"]]", "[[0],[0]]"), RST_ERR_TYPE, "output_token_sampling_mask"},
        {SUPPORT_OF("[[1],[2]]", "[[0],[\"0\"]]"), RST_ERR_TYPE, "output_token_sampling_logprobs"},
        {SUPPORT_OF("[[1],[2]]", "[[0],[null]]"), RST_ERR_VALUE, "output_token_sampling_logprobs"},
        {SUPPORT_OF("[[1],[2]]", "[[0],[0.5]]"), RST_ERR_VALUE, "output_token_sampling_logprobs"},
        {SUPPORT_OF("[[1],[2,2]]", "[[0],[-1,-1]]"), RST_ERR_VALUE, "output_token_sampling_mask"},
        {SUPPORT_OF("[[1],[-2]]", "[[0],[-1]]"), RST_ERR_VALUE, "output_token_sampling_mask"},
        {SUPPORT_OF("[[1],[4294967298]]", "[[0],[-1]]"), RST_ERR_VALUE,
         "output_token_sampling_mask"},
    };
    refuse_each(cases, sizeof cases / sizeof *cases, &support);
}

/* The rule for numbers over the range of float or double is one: they are infinities. */
static void a_logprob_over_a_floats_range_is_infinite(void **state)
{
    (void)state;
    static const char *const low[] = {"-1e39", "-3.5e38", "-1e300", "-1e400", "-1e999"};
    static const char *const high[] = {"1e39", "1e300", "1e400"};
    rst_record *record = rst_record_new();
    rst_error error;
    rst_turn turn;
    for (size_t i = 0; i < sizeof low / sizeof *low; i++) {
        char entry[64];
        snprintf(entry, sizeof entry, "[%s,11,null]", low[i]);
        char *meta = replaced(BASE64, "[-0.5,11,null]", entry);
        char *text = chat(meta);
        assert_ok(rst_record_decode(record, text, strlen(text), &flat, &error), error);
        rst_record_view(record, &turn);
        assert_true(isinf(turn.token_logprobs[0]) && turn.token_logprobs[0] < 0);
        free(text);
        free(meta);
    }
    for (size_t i = 0; i < sizeof high / sizeof *high; i++) {
        char entry[64];
        snprintf(entry, sizeof entry, "[%s,11,null]", high[i]);
        char *meta = replaced(BASE64, "[-0.5,11,null]", entry);
        char *text = chat(meta);
        refuse_text(text, &flat, RST_ERR_VALUE, "output_token_logprobs", &error);
        assert_non_null(strstr(error.message, "+inf"));
        free(text);
        free(meta);
    }
    rst_record_free(record);
}

static void a_byte_order_mark_is_told(void **state)
{
    (void)state;
    static const char *const texts[] = {"\xEF\xBB\xBF{}", " \xEF\xBB\xBF{}", "\xEF\xBB\xBF"};
    rst_record *record = rst_record_new();
    rst_error error;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        char id[RST_SESSION_ID_SIZE_MAX];
        size_t id_size;
        rst_line line;
        size_t size = strlen(texts[i]);
        assert_code(RST_ERR_SYNTAX, rst_record_decode(record, texts[i], size, NULL, &error), error);
        assert_non_null(strstr(error.message, "byte order mark"));
        assert_code(RST_ERR_SYNTAX, rst_line_decode(record, texts[i], size, 0, &line, &error),
                    error);
        assert_non_null(strstr(error.message, "byte order mark"));
        assert_code(RST_ERR_SYNTAX, rst_line_session(texts[i], size, id, &id_size, &error), error);
        assert_non_null(strstr(error.message, "byte order mark"));
    }
    rst_record_free(record);
}

/* A native reply has one choice. */
static void a_choice_that_is_not_there_is_refused(void **state)
{
    (void)state;
    rst_decode_options seventh = flat;
    seventh.choice = 7;
    refuse_text("{\"meta_info\":{" BASE64 "}}", &seventh, RST_ERR_MISSING, "choices", NULL);
    char *text = chat(BASE64);
    refuse_text(text, &seventh, RST_ERR_MISSING, "choices", NULL);
    free(text);
}

static void options_out_of_range_are_refused(void **state)
{
    (void)state;
    static const struct {
        rst_decode_options options;
        const char *field;
    } cases[] = {
        {{.mode = (rst_mode)7}, "mode"},
        {{.request = (rst_request)7}, "request"},
        {{.topk = RST_TOPK_MAX + 1}, "topk"},
    };
    for (size_t i = 0; i < 3; i++) {
        refuse_text("{}", &cases[i].options, RST_ERR_ARGUMENT, cases[i].field, NULL);
    }
    rst_record *record = rst_record_new();
    rst_error error;
    assert_code(RST_ERR_SYNTAX, rst_record_decode(record, NULL, 0, NULL, &error), error);
    assert_code(RST_ERR_LIMIT,
                rst_record_decode(record, "{}", (size_t)RST_REPLY_SIZE_MAX + 1, NULL, &error),
                error);
    rst_record_free(record);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(wrong_types_and_values_are_refused_where_they_stand),
        cmocka_unit_test(plain_arrays_are_checked),
        cmocka_unit_test(nested_lists_are_checked),
        cmocka_unit_test(support_lists_are_checked),
        cmocka_unit_test(a_logprob_over_a_floats_range_is_infinite),
        cmocka_unit_test(a_byte_order_mark_is_told),
        cmocka_unit_test(a_choice_that_is_not_there_is_refused),
        cmocka_unit_test(options_out_of_range_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
