/* What an agent gets of a reply, and how requests are taken apart. */
#include <stdlib.h>
#include <string.h>

#include <rollstore/proxy.h>

#include "reply_support.h"

#define REPLY(choice) "{\"id\":\"a\",\"choices\":[{" choice "}],\"usage\":{\"n\":[1, 2]}}"
#define LOGPROBS(top)                                                                              \
    "\"logprobs\":{\"content\":[{\"token\":\"x\",\"top_logprobs\":" top ",\"logprob\":-1}]}"
#define TOKENS "\"output_token_logprobs\":[[-1,5,null]]"
#define CANDIDATES                                                                                 \
    "\"output_top_logprobs\":[[[-1,5,null]]],\"output_top_logprobs_shape\":[1,1],"                 \
    "\"output_token_sampling_mask\":[[5]],\"output_token_sampling_logprobs\":[[0]]"

static rst_answer answer_of(const char *text, unsigned keep)
{
    rst_answer answer;
    rst_error error;
    size_t size = strlen(text);
    int code = rst_reply_strip(at_the_edge(text, size), size, keep, &answer, &error);
    if (code) {
        fail_msg("%s: %s", text, error.message);
    }
    assert_int_equal(strlen(answer.text), answer.text_size);
    return answer;
}

static void becomes(const char *text, unsigned keep, const char *wanted)
{
    rst_answer answer = answer_of(text, keep);
    assert_string_equal(answer.text, wanted);
    assert_null(answer.logprobs);
    rst_answer_clear(&answer);
    assert_null(answer.text);
}

static void what_nobody_asked_for_is_taken_out(void **state)
{
    (void)state;
    becomes(REPLY("\"index\":0," LOGPROBS("[{\"token\":\"y\"}]") ",\"token_ids\":[5],"
                                                                 "\"meta_info\":{" TOKENS
                                                                 "," CANDIDATES
                                                                 "},\"prompt_token_ids\":[1]"),
            0, REPLY("\"index\":0,\"logprobs\":null"));
}

static void what_was_asked_for_stays_without_candidates(void **state)
{
    (void)state;
    becomes(REPLY(LOGPROBS("[{\"token\":\"y\"}]")), RST_KEEP_LOGPROBS, REPLY(LOGPROBS("[]")));
    becomes(REPLY("\"meta_info\":{\"id\":1," CANDIDATES "," TOKENS ",\"e\":{ }}"),
            RST_KEEP_META_INFO, REPLY("\"meta_info\":{\"id\":1,\"e\":{ }}"));
    becomes(REPLY("\"meta_info\":{" CANDIDATES "," TOKENS "}"),
            RST_KEEP_META_INFO | RST_KEEP_LOGPROBS, REPLY("\"meta_info\":{" TOKENS "}"));
    becomes(REPLY("\"meta_info\":{" CANDIDATES "}"), RST_KEEP_META_INFO, REPLY("\"meta_info\":{}"));
    becomes(REPLY("\"token_ids\":[5],\"prompt_token_ids\":[1]"), RST_KEEP_TOKEN_IDS,
            REPLY("\"token_ids\":[5],\"prompt_token_ids\":[1]"));
}

static void members_are_known_however_they_are_spelled(void **state)
{
    (void)state;
    becomes(
        REPLY("\"meta_inf\\u006f\":{\"output_top\\u005flogprobs_new\":{\"a\":[]}, \"id\" : 7 }"),
        RST_KEEP_META_INFO, REPLY("\"meta_inf\\u006f\":{\"id\":7}"));
    becomes(" { \"choices\" : [ { \"logprobs\" : { } , \"x\" : -1e3 } ] } ", 0,
            "{\"choices\":[{\"logprobs\":null,\"x\":-1e3}]}");
}

static void strings_that_look_like_fields_stay(void **state)
{
    (void)state;
    const char *text = "{\"message\":\"{\\\"meta_info\\\": [1, 2}\",\"meta_info\":{\"logprobs\":1},"
                       "\"choices\":[{\"message\":{\"meta_info\":[3],\"logprobs\":[4]}},5,null]}";
    becomes(text, 0, text);
    becomes("{\"choices\":7,\"logprobs\":{}}", 0, "{\"choices\":7,\"logprobs\":{}}");
    becomes("{\"choices\":[]}", 0, "{\"choices\":[]}");
}

static void logprobs_are_given_apart(void **state)
{
    (void)state;
    rst_answer answer = answer_of("{\"choices\":[{" LOGPROBS("[1]") "},{" LOGPROBS("[2]") "}]}",
                                  RST_KEEP_LOGPROBS | RST_SPLIT_LOGPROBS);
    assert_string_equal(answer.text, "{\"choices\":[{\"logprobs\":null},{" LOGPROBS("[]") "}]}");
    assert_string_equal(answer.logprobs,
                        "{\"content\":[{\"token\":\"x\",\"top_logprobs\":[],\"logprob\":-1}]}");
    assert_int_equal(strlen(answer.logprobs), answer.logprobs_size);
    rst_answer_clear(&answer);
}

/* ---------------------------------------------------------------- long strings */

/* A reply with a long string that looks like base64 but for the byte at `odd`, as a candidate field
 * and, when `kept`, in the message. */
static char *long_reply(size_t size, size_t odd, const char *instead, bool kept)
{
    char *base64 = malloc(size + 1);
    memset(base64, 'A', size);
    base64[size] = '\0';
    base64[odd] = '\0';
    char *text = text_of("{\"choices\":[{\"message\":\"%s\",\"meta_info\":{"
                         "\"output_top_logprobs_idx_flat_b64\":\"%s%s%s\"}}],\"end\":1}",
                         kept ? base64 : "m", base64, instead, base64 + odd + 1);
    free(base64);
    return text;
}

static void long_strings_are_left_out_or_kept_whole(void **state)
{
    (void)state;
    const size_t size = 20000;
    for (int kept = 0; kept < 2; kept++) {
        char *text = long_reply(size, size - 1, "A", kept);
        rst_answer answer = answer_of(text, RST_KEEP_META_INFO);
        char *end = strstr(answer.text, "\"meta_info\":{}");
        assert_non_null(end);
        assert_string_equal(end, "\"meta_info\":{}}],\"end\":1}");
        size_t message = kept ? size - 1 : 1;
        assert_int_equal(end - answer.text, strlen("{\"choices\":[{\"message\":\"\",") + message);
        rst_answer_clear(&answer);
        answer = answer_of(text, 0);
        assert_string_equal(strstr(answer.text, "}]"), "}],\"end\":1}");
        rst_answer_clear(&answer);
        free(text);
    }
}

static int code_of(const char *text, rst_error *error)
{
    rst_answer answer;
    size_t size = strlen(text);
    int code = rst_reply_strip(at_the_edge(text, size), size, 0, &answer, error);
    rst_answer_clear(&answer);
    return code;
}

/* What is left out is checked like the rest: each of these makes the text no JSON. */
static void a_bad_byte_in_a_long_string_is_found(void **state)
{
    (void)state;
    static const char *const bad[] = {"\\x", "\n", "\x01", "\x1f", "\xff", "\\"};
    const size_t size = 20000;
    rst_error error;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        for (size_t odd = 9000; odd < 9016; odd++) {
            char *text = long_reply(size, odd, bad[i], false);
            assert_int_equal(code_of(text, &error), RST_ERR_SYNTAX);
            free(text);
        }
        char *text = long_reply(size, size - 1, bad[i], false); /* the last byte */
        assert_int_equal(code_of(text, &error), RST_ERR_SYNTAX);
        free(text);
    }
    static const char *const good[] = {"\\n", "\xC3\xA9", "\x7f", " ", "~"};
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        char *text = long_reply(size, 9001, good[i], false);
        assert_int_equal(code_of(text, &error), RST_OK);
        free(text);
    }
}

/* ---------------------------------------------------------------- the prompt's ids */

static void prompt_is(const char *text, size_t count, int32_t first)
{
    rst_answer answer = answer_of(text, 0);
    assert_int_equal(answer.prompt_count, count);
    assert_non_null(answer.prompt_ids);
    if (count) {
        assert_int_equal(answer.prompt_ids[0], first);
        assert_int_equal(answer.prompt_ids[count - 1], first + (int32_t)(count - 1));
    }
    rst_answer_clear(&answer);
}

static void the_prompt_is_found_where_engines_put_it(void **state)
{
    (void)state;
    prompt_is("{\"prompt_token_ids\":[7,8],\"choices\":[]}", 2, 7);
    prompt_is(REPLY("\"meta_info\":{\"prompt_token_ids\":[0 , 1]}"), 2, 0);
    prompt_is(REPLY("\"prompt_token_ids\":[2147483647],\"meta_info\":{\"prompt_token_ids\":[1]}"),
              1, 2147483647);
    prompt_is("{\"prompt_token_ids\":[7],\"choices\":[{\"prompt_token_ids\":null,\"meta_info\":{"
              "\"prompt_token_ids\":[3,4,5]}},{\"prompt_token_ids\":[9]}]}",
              3, 3);
    prompt_is(REPLY("\"prompt_token_ids\":[1],\"prompt_token_ids\":[]"), 0, 0);
    rst_answer answer = answer_of("{\"choices\":[{},{\"prompt_token_ids\":[9]}]}", 0);
    assert_null(answer.prompt_ids);
    rst_answer_clear(&answer);
}

static void what_is_no_reply_is_refused(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        int code;
    } bad[] = {
        {"", RST_ERR_SYNTAX},
        {"[]", RST_ERR_TYPE},
        {"7", RST_ERR_TYPE},
        {"{\"choices\":[{}]", RST_ERR_SYNTAX},
        {"{\"choices\":[{\"meta_info\":{\"output_top_logprobs\":[01]}}]}", RST_ERR_SYNTAX},
        {REPLY("\"prompt_token_ids\":7"), RST_ERR_TYPE},
        {REPLY("\"prompt_token_ids\":[1,\"2\"]"), RST_ERR_TYPE},
        {REPLY("\"prompt_token_ids\":[1.5]"), RST_ERR_TYPE},
        {REPLY("\"prompt_token_ids\":[-1]"), RST_ERR_VALUE},
        {REPLY("\"prompt_token_ids\":[2147483648]"), RST_ERR_VALUE},
        {REPLY("\"prompt_token_ids\":[99999999999999999999]"), RST_ERR_VALUE},
    };
    rst_error error;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(code_of(bad[i].text, &error), bad[i].code);
        assert_int_equal(error.code, bad[i].code);
    }
}

/* ---------------------------------------------------------------- requests */

static void is_text(const char *text, size_t size, const char *wanted)
{
    assert_int_equal(size, strlen(wanted));
    assert_memory_equal(text, wanted, size);
}

static void a_request_is_taken_apart(void **state)
{
    (void)state;
    rst_member members[RST_MEMBER_COUNT_MAX];
    size_t count;
    const char *text = " {\"a\" : 1.5e3 ,\"b\\n\":{\"a\":[1 , 2]},\"a\":\"x\\\"\", \"c\":null }\n";
    rst_error error;
    assert_int_equal(rst_json_object(text, strlen(text), members, &count, &error), RST_OK);
    assert_int_equal(count, 4);
    is_text(members[0].name, members[0].name_size, "\"a\"");
    is_text(members[0].value, members[0].value_size, "1.5e3");
    is_text(members[1].name, members[1].name_size, "\"b\\n\"");
    is_text(members[1].value, members[1].value_size, "{\"a\":[1 , 2]}");
    is_text(members[2].value, members[2].value_size, "\"x\\\"\"");
    is_text(members[3].value, members[3].value_size, "null");
    assert_int_equal(rst_json_object("{}", 2, members, &count, &error), RST_OK);
    assert_int_equal(count, 0);
    assert_int_equal(rst_json_object("[1]", 3, members, &count, &error), RST_ERR_TYPE);
    assert_int_equal(rst_json_object("{\"a\":1", 6, members, &count, &error), RST_ERR_SYNTAX);
}

static void a_member_with_a_long_string_lies_in_the_text(void **state)
{
    (void)state;
    rst_member members[RST_MEMBER_COUNT_MAX];
    size_t count;
    rst_error error;
    char *text = long_reply(20000, 19999, "A", true);
    assert_int_equal(rst_json_object(text, strlen(text), members, &count, &error), RST_OK);
    assert_int_equal(count, 2);
    assert_ptr_equal(members[0].name, text + 1);
    assert_ptr_equal(members[1].value + members[1].value_size, text + strlen(text) - 1);
    free(text);
}

static void a_request_has_limits(void **state)
{
    (void)state;
    rst_member members[RST_MEMBER_COUNT_MAX];
    char text[8 * (RST_MEMBER_COUNT_MAX + 1) + 3] = "{";
    rst_error error;
    size_t count;
    for (int i = 0; i <= RST_MEMBER_COUNT_MAX; i++) {
        strcat(text, i ? ",\"a\":1" : "\"a\":1");
        if (i >= RST_MEMBER_COUNT_MAX - 1) {
            size_t size = strlen(text);
            text[size] = '}';
            bool fits = i < RST_MEMBER_COUNT_MAX;
            assert_int_equal(rst_json_object(text, size + 1, members, &count, &error),
                             fits ? RST_OK : RST_ERR_LIMIT);
            assert_int_equal(count, fits ? RST_MEMBER_COUNT_MAX : 0);
            text[size] = '\0';
        }
    }
}

static void token_ids_are_read(void **state)
{
    (void)state;
    int32_t *ids;
    size_t count;
    rst_error error;
    assert_int_equal(rst_json_token_ids("[ 3,2147483647 ]", 16, &ids, &count, &error), RST_OK);
    assert_int_equal(count, 2);
    assert_int_equal(ids[0], 3);
    assert_int_equal(ids[1], 2147483647);
    free(ids);
    assert_int_equal(rst_json_token_ids("[]", 2, &ids, &count, &error), RST_OK);
    assert_int_equal(count, 0);
    free(ids);
    assert_int_equal(rst_json_token_ids("[[1]]", 5, &ids, &count, &error), RST_ERR_TYPE);
    assert_null(ids);
    assert_int_equal(rst_json_token_ids("[-1]", 4, &ids, &count, &error), RST_ERR_VALUE);
    assert_string_equal(error.field, "input_ids");
    assert_int_equal(rst_json_token_ids("7", 1, &ids, &count, &error), RST_ERR_TYPE);
}

/* ---------------------------------------------------------------- no candidates */

static void a_reply_that_was_asked_for_no_candidates_has_none(void **state)
{
    (void)state;
    rst_decode_options none = {.request = RST_REQUEST_NONE};
    rst_record *record = rst_record_new();
    rst_turn turn = decode_text(record, REPLY("\"meta_info\":{" TOKENS "," CANDIDATES "}"), &none);
    assert_int_equal(turn.token_count, 1);
    assert_int_equal(turn.topk, 0);
    assert_int_equal(turn.token_ids[0], 5);
    assert_sound_record(record);
    rst_record_free(record);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_nobody_asked_for_is_taken_out),
        cmocka_unit_test(what_was_asked_for_stays_without_candidates),
        cmocka_unit_test(members_are_known_however_they_are_spelled),
        cmocka_unit_test(strings_that_look_like_fields_stay),
        cmocka_unit_test(logprobs_are_given_apart),
        cmocka_unit_test(long_strings_are_left_out_or_kept_whole),
        cmocka_unit_test(a_bad_byte_in_a_long_string_is_found),
        cmocka_unit_test(the_prompt_is_found_where_engines_put_it),
        cmocka_unit_test(what_is_no_reply_is_refused),
        cmocka_unit_test(a_request_is_taken_apart),
        cmocka_unit_test(a_member_with_a_long_string_lies_in_the_text),
        cmocka_unit_test(a_request_has_limits),
        cmocka_unit_test(token_ids_are_read),
        cmocka_unit_test(a_reply_that_was_asked_for_no_candidates_has_none),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
