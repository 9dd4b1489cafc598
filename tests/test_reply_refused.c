/* Each thing that may be wrong with a reply, one at a time. */
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
        {"[-0.5,11,null]", "[-1e300,11,null]", RST_ERR_VALUE, "output_token_logprobs", "-1e300"},
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
        cmocka_unit_test(options_out_of_range_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
