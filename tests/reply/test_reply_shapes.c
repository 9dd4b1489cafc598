/* What a reply may look like, and what is kept of it. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "layout/record.h"
#include "reply_texts.h"

/* The turn that all of these describe. */
static void assert_the_turn(const rst_turn *turn)
{
    static const int32_t ids[] = {1, 2, 3, 4};
    static const float logprobs[] = {-1, -2, -3, -4};
    assert_int_equal(turn->token_count, 2);
    assert_int_equal(turn->topk, 2);
    assert_int_equal(turn->token_ids[0], 11);
    assert_int_equal(turn->token_ids[1], 12);
    assert_true(turn->token_logprobs[0] == -0.5f && turn->token_logprobs[1] == -0.25f);
    assert_memory_equal(turn->topk_ids, ids, sizeof ids);
    assert_memory_equal(turn->topk_logprobs, logprobs, sizeof logprobs);
    assert_null(turn->widths);
}

static void good(const char *text, const rst_decode_options *options)
{
    rst_record *record = rst_record_new();
    rst_turn turn = decode_text(record, text, options);
    assert_the_turn(&turn);
    rst_record_free(record);
}

static void good_meta(const char *meta, const rst_decode_options *options)
{
    char *text = chat(meta);
    good(text, options);
    free(text);
}

/* ---------------------------------------------------------------- what is accepted */

static void each_form_is_read(void **state)
{
    (void)state;
    good_meta(BASE64, &flat);
    good_meta(PLAIN, &flat);
    good_meta(TOKENS "," NESTED, &nested);
    good_meta(TOKENS "," MASK "," MASK_LOGPROBS, &support);
    good_meta(BASE64, NULL);
    good("{\"text\":\"\",\"meta_info\":{" BASE64 "}}", &flat);
    good("{\"choices\":null,\"meta_info\":{" BASE64 "}}", &flat);
}

static void keys_come_in_any_order_and_spelling(void **state)
{
    (void)state;
    good_meta(PREFIX "," SHAPE "," DTYPES "," VALS_B64 "," IDS_B64 "," TOKENS, &flat);
    good(" {\n\"usage\" : { } , \"choices\"\t:\r\n[ { \"meta_info\" : { " BASE64
         " } , \"index\" : 0 } ] } \n",
         &flat);
    good("{\"\\u0063hoices\":[{\"meta\\u005finfo\":{" BASE64 "}}]}", &flat);
    char *escaped = replaced(BASE64, "idx_flat_b64\"", "idx_flat\\u005Fb64\"");
    good_meta(escaped, &flat);
    free(escaped);
    escaped = replaced(BASE64, "\"int32\"", "\"\\u0069nt32\"");
    good_meta(escaped, &flat);
    free(escaped);
    escaped = replaced(BASE64, "AQAAAAIA", "\\u0041Q\\u0041AAAIA");
    good_meta(escaped, &flat);
    free(escaped);
}

static void unknown_keys_are_ignored_wherever_they_stand(void **state)
{
    (void)state;
    good("{\"zz\":[{\"meta_info\":1}],\"choices\":[{\"x\":{\"meta_info\":[]},\"index\":0,"
         "\"meta_info\":{\"new\":{\"deep\":[[[1e999]]]}," BASE64 ",\"later\":\"\\ud800\"}}],"
         "\"object\":17}",
         &flat);
}

static void strings_that_look_like_fields_are_not_taken_for_them(void **state)
{
    (void)state;
    good("{\"a\":\"\\\"choices\\\":[{\\\"meta_info\\\":{}}]\",\"choices\":[{\"message\":{"
         "\"content\":"
         "\"\\\"output_token_logprobs\\\":[]}}}}\"},\"meta_info\":{" BASE64 "}}]}",
         &flat);
}

/* As Python's json has it. */
static void the_last_of_two_equal_keys_counts(void **state)
{
    (void)state;
    good_meta("\"output_top_logprobs_shape\":[9,9]," BASE64, &flat);
    good("{\"choices\":[],\"choices\":[{\"meta_info\":{},\"meta_info\":{" BASE64 "}}]}", &flat);
    char *text = chat(BASE64 ",\"output_top_logprobs_shape\":[9,9]");
    refuse_text(text, &flat, RST_ERR_SHAPE, "output_top_logprobs_shape", NULL);
    free(text);
}

static void null_fields_count_as_absent(void **state)
{
    (void)state;
    good_meta(PLAIN ",\"output_top_logprobs_idx_flat_b64\":null,"
                    "\"output_top_logprobs_val_flat_b64\":null,\"weight_version\":null,"
                    "\"output_top_logprobs_temperature_scaled\":null,\"finish_reason\":null",
              &flat);
    char *text = chat(TOKENS ",\"output_top_logprobs_idx_flat_b64\":null");
    refuse_text(text, &flat, RST_ERR_MISSING, "output_top_logprobs_idx_flat_b64", NULL);
    free(text);
}

static void fields_of_another_request_are_not_looked_at(void **state)
{
    (void)state;
    good_meta(BASE64 ",\"output_top_logprobs\":7,\"output_token_sampling_mask\":7", &flat);
    good_meta(TOKENS "," NESTED ",\"output_top_logprobs_shape\":7", &nested);
    good_meta(TOKENS "," MASK "," MASK_LOGPROBS
                     ",\"output_top_logprobs\":7,\"output_top_logprobs_shape\":[-1],"
                     "\"output_top_logprobs_temperature_scaled\":\"?\"",
              &support);
}

/* ---------------------------------------------------------------- rows */

static void null_rows_at_the_start_are_counted_either_way(void **state)
{
    (void)state;
    static const int32_t ids[] = {-1, -1, 1, 2};
    static const char *const metas[] = {
        TOKENS ",\"output_top_logprobs_idx_flat\":[1,2],\"output_top_logprobs_val_flat\":[-1,-2],"
               "\"output_top_logprobs_shape\":[1,2],\"output_top_logprobs_null_prefix\":1",
        TOKENS ",\"output_top_logprobs_idx_flat\":[1,2],\"output_top_logprobs_val_flat\":[-1,-2],"
               "\"output_top_logprobs_shape\":[2,2],\"output_top_logprobs_null_prefix\":1",
        TOKENS ",\"output_top_logprobs_idx_flat_b64\":\"AQAAAAIAAAA=\","
               "\"output_top_logprobs_val_flat_b64\":\"AACAvwAAAMA=\"," DTYPES
               ",\"output_top_logprobs_shape\":[2,2],\"output_top_logprobs_null_prefix\":1",
    };
    rst_record *record = rst_record_new();
    for (size_t i = 0; i < 3; i++) {
        char *text = chat(metas[i]);
        rst_turn turn = decode_text(record, text, &flat);
        assert_int_equal(turn.null_prefix, 1);
        assert_memory_equal(turn.topk_ids, ids, sizeof ids);
        assert_true(isinf(turn.topk_logprobs[0]) && isinf(turn.topk_logprobs[1]));
        assert_int_equal(turn.widths[0], 0);
        assert_int_equal(turn.widths[1], 2);
        free(text);
    }
    char *text = chat(TOKENS ",\"output_top_logprobs\":[null,[[-1.0,1,null]]]");
    rst_turn turn = decode_text(record, text, &nested);
    assert_int_equal(turn.null_prefix, 1);
    assert_int_equal(turn.widths[1], 1);
    assert_int_equal(turn.topk_ids[3], -1);
    free(text);
    rst_record_free(record);
}

static void all_rows_can_be_null(void **state)
{
    (void)state;
    static const char *const shapes[] = {"[0,2]", "[2,2]", "[0,0]"};
    rst_record *record = rst_record_new();
    for (size_t i = 0; i < 3; i++) {
        char *meta = text_of(TOKENS ",\"output_top_logprobs_idx_flat_b64\":\"\","
                                    "\"output_top_logprobs_val_flat_b64\":\"\"," DTYPES
                                    ",\"output_top_logprobs_shape\":%s,"
                                    "\"output_top_logprobs_null_prefix\":2",
                             shapes[i]);
        char *text = chat(meta);
        rst_turn turn = decode_text(record, text, &flat);
        assert_int_equal(turn.token_count, 2);
        assert_int_equal(turn.topk, 2);
        assert_int_equal(turn.null_prefix, 2);
        assert_int_equal(turn.topk_ids[3], -1);
        free(text);
        free(meta);
    }
    rst_record_free(record);
}

#define NO_PLAIN                                                                                   \
    ",\"output_top_logprobs_idx_flat\":[],\"output_top_logprobs_val_flat\":[],"                    \
    "\"output_top_logprobs_shape\":[0,0],\"output_top_logprobs_null_prefix\":0"

static void a_reply_without_tokens_is_valid_in_every_form(void **state)
{
    (void)state;
    static const char *const metas[] = {
        "",
        ",\"output_top_logprobs\":[]",
        ",\"output_top_logprobs\":null",
        ",\"output_top_logprobs_shape\":[0,0],\"output_top_logprobs_null_prefix\":0",
        ",\"output_top_logprobs_idx_flat_b64\":\"\",\"output_top_logprobs_val_flat_b64\":"
        "\"\"," DTYPES ",\"output_top_logprobs_shape\":[0,2],\"output_top_logprobs_null_prefix\":0",
        NO_PLAIN,
        ",\"output_token_sampling_mask\":[],\"output_token_sampling_logprobs\":[]",
    };
    const rst_decode_options *const all[] = {&flat, &nested, &support};
    rst_record *record = rst_record_new();
    for (size_t i = 0; i < sizeof metas / sizeof *metas; i++) {
        for (size_t o = 0; o < 3; o++) {
            char *meta = text_of("\"output_token_logprobs\":[]%s", metas[i]);
            char *text = chat(meta);
            rst_turn turn = decode_text(record, text, all[o]);
            assert_true(record->filled);
            assert_int_equal(turn.token_count, 0);
            assert_int_equal(turn.topk, 2);
            free(text);
            free(meta);
        }
    }
    rst_record_free(record);
}

static void support_rows_differ_in_length(void **state)
{
    (void)state;
    char *text = chat(TOKENS ",\"output_token_sampling_mask\":[[5],[6,7]],"
                             "\"output_token_sampling_logprobs\":[[0],[-0.5,-1.5]]");
    static const uint32_t capacities[] = {RST_TOPK_FROM_REPLY, 2, 5};
    rst_record *record = rst_record_new();
    for (size_t i = 0; i < 3; i++) {
        rst_decode_options options = {.mode = RST_MODE_SUPPORT, .topk = capacities[i]};
        rst_turn turn = decode_text(record, text, &options);
        assert_int_equal(turn.mode, RST_MODE_SUPPORT);
        assert_int_equal(turn.topk, capacities[i] ? capacities[i] : 2);
        assert_int_equal(turn.widths[0], 1);
        assert_int_equal(turn.widths[1], 2);
        assert_int_equal(turn.topk_ids[0], 5);
        assert_int_equal(turn.topk_ids[1], -1);
        assert_int_equal(turn.topk_ids[turn.topk + 1], 7);
        assert_sound_record(record);
    }
    rst_record_free(record);
    free(text);
}

/* ---------------------------------------------------------------- the other members */

static void the_finish_reason_is_kept(void **state)
{
    (void)state;
    static const struct {
        const char *choice;
        const char *meta;
        rst_finish finish;
        const char *text;
    } cases[] = {
        {"\"stop\"", "{\"type\":\"length\"}", RST_FINISH_STOP, ""},
        {"\"tool_calls\"", "{\"type\":\"stop\",\"matched\":1}", RST_FINISH_TOOL_CALLS, ""},
        {"null", "{\"type\":\"length\",\"length\":2}", RST_FINISH_LENGTH, ""},
        {"null", "\"abort\"", RST_FINISH_ABORT, ""},
        {"null", "{\"matched\":1}", RST_FINISH_NONE, ""},
        {"null", "null", RST_FINISH_NONE, ""},
        {"\"\"", "null", RST_FINISH_NONE, ""},
        {"\"content_f\\u0069lter\"", "null", RST_FINISH_OTHER, "content_filter"},
    };
    rst_record *record = rst_record_new();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *text = text_of("{\"choices\":[{\"finish_reason\":%s,\"meta_info\":{" BASE64
                             ",\"finish_reason\":%s}}]}",
                             cases[i].choice, cases[i].meta);
        rst_turn turn = decode_text(record, text, &flat);
        assert_int_equal(turn.finish, cases[i].finish);
        assert_int_equal(turn.finish_reason_size, strlen(cases[i].text));
        if (turn.finish_reason_size) {
            assert_memory_equal(turn.finish_reason, cases[i].text, turn.finish_reason_size);
        }
        free(text);
    }
    rst_record_free(record);
    char *text = chat(BASE64 ",\"finish_reason\":7");
    good(text, &flat); /* the choice said it */
    free(text);
    refuse_text("{\"meta_info\":{" BASE64 ",\"finish_reason\":7}}", &flat, RST_ERR_TYPE,
                "finish_reason", NULL);
    refuse_text("{\"meta_info\":{" BASE64 ",\"finish_reason\":{\"type\":[]}}}", &flat, RST_ERR_TYPE,
                "finish_reason", NULL);
}

static void the_weight_version_is_kept_as_text(void **state)
{
    (void)state;
    static const struct {
        const char *member;
        const char *outer;
        const char *text;
        int64_t number;
    } cases[] = {
        {"\"7\"", "{}", "7", 7},
        {"7", "{}", "7", 7},
        {"12.50", "{}", "12.50", RST_NO_VERSION},
        {"\"step-\\u00e9\"", "{}", "step-\xC3\xA9", RST_NO_VERSION},
        {"\"7\"", "{\"weight_version\":\"8\"}", "7", 7},
        {"null", "{\"weight_version\":\"8\"}", "8", 8},
        {"null", "{\"weight_version\":9 }", "9", 9},
        {"null", "7", "", RST_NO_VERSION},
        {"\"\"", "{}", "", RST_NO_VERSION},
    };
    rst_record *record = rst_record_new();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *text = text_of("{\"choices\":[{\"meta_info\":{" BASE64
                             ",\"weight_version\":%s}}],\"metadata\":%s}",
                             cases[i].member, cases[i].outer);
        rst_turn turn = decode_text(record, text, &flat);
        assert_int_equal(turn.weight_version_size, strlen(cases[i].text));
        if (turn.weight_version_size) {
            assert_memory_equal(turn.weight_version, cases[i].text, turn.weight_version_size);
        }
        assert_int_equal(turn.weight_version_number, cases[i].number);
        free(text);
    }
    rst_record_free(record);
    char *text = chat(BASE64 ",\"weight_version\":true");
    refuse_text(text, &flat, RST_ERR_TYPE, "weight_version", NULL);
    free(text);
    text = chat(BASE64 ",\"weight_version\":\"\\ud800\"");
    refuse_text(text, &flat, RST_ERR_VALUE, "weight_version", NULL);
    free(text);
    char long_text[RST_TEXT_SIZE_MAX + 2];
    memset(long_text, 'v', sizeof long_text - 1);
    long_text[sizeof long_text - 1] = '\0';
    char *meta = text_of(BASE64 ",\"weight_version\":\"%s\"", long_text);
    text = chat(meta);
    refuse_text(text, &flat, RST_ERR_LIMIT, "weight_version", NULL);
    free(text);
    free(meta);
}

static void what_is_said_about_the_temperature_is_kept(void **state)
{
    (void)state;
    static const struct {
        const char *meta;
        const rst_decode_options *options;
        rst_scaled scaled;
    } cases[] = {
        {BASE64, &flat, RST_SCALED_NOT_SAID},
        {BASE64 ",\"output_top_logprobs_temperature_scaled\":true", &flat, RST_SCALED_YES},
        {BASE64 ",\"output_top_logprobs_temperature_scaled\":false", &flat, RST_SCALED_NO},
        {TOKENS "," NESTED ",\"output_top_logprobs_temperature_scaled\":true", &nested,
         RST_SCALED_YES},
        {TOKENS "," MASK "," MASK_LOGPROBS ",\"output_top_logprobs_temperature_scaled\":true",
         &support, RST_SCALED_YES},
    };
    rst_record *record = rst_record_new();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *text = chat(cases[i].meta);
        rst_turn turn = decode_text(record, text, cases[i].options);
        assert_int_equal(turn.temperature_scaled, cases[i].scaled);
        assert_true(isnan(turn.temperature));
        free(text);
    }
    rst_record_free(record);
    char *text = chat(BASE64 ",\"output_top_logprobs_temperature_scaled\":1");
    refuse_text(text, &flat, RST_ERR_TYPE, "output_top_logprobs_temperature_scaled", NULL);
    free(text);
}

/* ---------------------------------------------------------------- choices */

static void a_choice_is_found_by_its_index_or_its_place(void **state)
{
    (void)state;
    static const char other[] = "{\"output_token_logprobs\":[]}";
    rst_decode_options second = flat;
    second.choice = 1;
    char *text = text_of("{\"choices\":[{\"meta_info\":%s},{\"meta_info\":{" BASE64 "}}]}", other);
    good(text, &second);
    free(text);
    text = text_of("{\"choices\":[{\"index\":1,\"meta_info\":{" BASE64
                   "}},{\"index\":0,\"meta_info\":%s}]}",
                   other);
    good(text, &second);
    refuse_text("{\"choices\":[{\"index\":5,\"meta_info\":{}}]}", &flat, RST_ERR_MISSING, "choices",
                NULL);
    second.choice = 7;
    refuse_text(text, &second, RST_ERR_MISSING, "choices", NULL);
    free(text);
    refuse_text("{\"meta_info\":{" BASE64 "}}", &second, RST_ERR_MISSING, "choices", NULL);
    refuse_text("{\"choices\":[{\"index\":\"0\"}]}", &flat, RST_ERR_TYPE, "choices", NULL);
    refuse_text("{\"choices\":[[]]}", &flat, RST_ERR_TYPE, "choices", NULL);
    refuse_text("{\"choices\":{}}", &flat, RST_ERR_TYPE, "choices", NULL);
    refuse_text("{\"choices\":[{\"meta_info\":[]}]}", &flat, RST_ERR_TYPE, "meta_info", NULL);
    refuse_text("{\"meta_info\":\"\"}", &flat, RST_ERR_TYPE, "meta_info", NULL);
    refuse_text("[]", &flat, RST_ERR_TYPE, "", NULL);
    refuse_text("null", &flat, RST_ERR_TYPE, "", NULL);
    refuse_text(" 17 ", &flat, RST_ERR_TYPE, "", NULL);
    refuse_text("\"text\"", &flat, RST_ERR_TYPE, "", NULL);
}

static void the_engine_s_own_error_is_passed_on(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        const char *says;
    } cases[] = {
        {"{\"object\":\"error\",\"message\":\"queue \\\"full\\\"\"}", "queue \"full\""},
        {"{\"error\":{\"message\":\"too long\",\"code\":400}}", "too long"},
        {"{\"error\":\"bad request\"}", "bad request"},
        {"{\"detail\":\"Not Found\"}", "Not Found"},
        {"{\"message\":\"two\\nlines\\u0000\\t\"}", "two lines  "},
        {"{\"message\":17}", "neither choices nor meta_info"},
        {"{}", "neither choices nor meta_info"},
    };
    rst_error error;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        refuse_text(cases[i].text, &flat, RST_ERR_MISSING, "meta_info", &error);
        assert_non_null(strstr(error.message, cases[i].says));
    }
    char *text = text_of("{\"message\":\"%0*d\\u00e9\"}", 1000, 7);
    refuse_text(text, &flat, RST_ERR_MISSING, "meta_info", &error);
    assert_non_null(strstr(error.message, "000..."));
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_form_is_read),
        cmocka_unit_test(keys_come_in_any_order_and_spelling),
        cmocka_unit_test(unknown_keys_are_ignored_wherever_they_stand),
        cmocka_unit_test(strings_that_look_like_fields_are_not_taken_for_them),
        cmocka_unit_test(the_last_of_two_equal_keys_counts),
        cmocka_unit_test(null_fields_count_as_absent),
        cmocka_unit_test(fields_of_another_request_are_not_looked_at),
        cmocka_unit_test(null_rows_at_the_start_are_counted_either_way),
        cmocka_unit_test(all_rows_can_be_null),
        cmocka_unit_test(a_reply_without_tokens_is_valid_in_every_form),
        cmocka_unit_test(support_rows_differ_in_length),
        cmocka_unit_test(the_finish_reason_is_kept),
        cmocka_unit_test(the_weight_version_is_kept_as_text),
        cmocka_unit_test(what_is_said_about_the_temperature_is_kept),
        cmocka_unit_test(a_choice_is_found_by_its_index_or_its_place),
        cmocka_unit_test(the_engine_s_own_error_is_passed_on),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
