/* Memory: what a reply claims costs nothing, and every allocation that fails is an error that
 * leaves the record empty and usable. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <rollstore/proxy.h>

#include "layout/record.h"
#include "reply_texts.h"

/* ---------------------------------------------------------------- an allocator that fails
 *
 * These take glibc's place for the whole program, also for simdjson and libstdc++.  A sanitizer has
 * an allocator of its own, and this test is not built with it. */

#define EVERYWHERE __attribute__((visibility("default")))

void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *memory, size_t size);
void *__libc_memalign(size_t alignment, size_t size);

static volatile bool watched;
static volatile long calls;   /* while watched */
static volatile long failing; /* the call that fails; -1: none */

static volatile size_t together; /* bytes asked for in all */

static bool fails(size_t size)
{
    if (!watched) {
        return false;
    }
    together += size;
    return calls++ == failing;
}

EVERYWHERE void *malloc(size_t size)
{
    return fails(size) ? NULL : __libc_malloc(size);
}

EVERYWHERE void *calloc(size_t count, size_t size)
{
    return fails(count * size) ? NULL : __libc_calloc(count, size);
}

EVERYWHERE void *realloc(void *memory, size_t size)
{
    return fails(size) ? NULL : __libc_realloc(memory, size);
}

EVERYWHERE void *aligned_alloc(size_t alignment, size_t size)
{
    return fails(size) ? NULL : __libc_memalign(alignment, size);
}

static void watch(long fail_at)
{
    calls = 0;
    together = 0;
    failing = fail_at;
    watched = true;
}

static void unwatch(void)
{
    watched = false;
}

/* ---------------------------------------------------------------- claims */

static void claims_cost_nothing(void **state)
{
    (void)state;
    static const char *const shapes[] = {
        "[4294967296,4294967296]",
        "[9223372036854775807,32768]",
        "[16777216,32768]",
        "[2,32768]",
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        for (uint32_t topk = 0; topk < 3; topk += 2) {
            char *meta = replaced(BASE64, "[2,2]", shapes[i]);
            char *text = chat(meta);
            size_t size = strlen(text);
            rst_decode_options options = {.topk = topk};
            rst_record *record = rst_record_new();
            rst_error error;
            watch(-1);
            int code = rst_record_decode(record, text, size, &options, &error);
            unwatch();
            assert_code(RST_ERR_SHAPE, code, error);
            assert_true(together < 40 * size);
            rst_record_free(record);
            free(text);
            free(meta);
        }
    }
}

static void a_k_that_is_only_claimed_costs_nothing(void **state)
{
    (void)state;
    enum { N = 10000 };
    char *tokens = malloc(N * 16);
    char *out = tokens;
    for (int i = 0; i < N; i++) {
        out = stpcpy(out, i ? ",[-1,7,null]" : "[-1,7,null]");
    }
    char *text = text_of("{\"meta_info\":{\"output_token_logprobs\":[%s],"
                         "\"output_top_logprobs_idx_flat\":[],\"output_top_logprobs_val_flat\":[],"
                         "\"output_top_logprobs_shape\":[0,%u],"
                         "\"output_top_logprobs_null_prefix\":%d}}",
                         tokens, RST_TOPK_MAX, N);
    size_t size = strlen(text);
    rst_record *record = rst_record_new();
    rst_error error;
    watch(-1);
    int code = rst_record_decode(record, text, size, NULL, &error);
    unwatch();
    assert_ok(code, error);
    assert_true(together < 40 * size);
    rst_turn turn;
    rst_record_view(record, &turn);
    assert_int_equal(turn.token_count, N);
    assert_int_equal(turn.topk, 0);
    assert_int_equal(turn.null_prefix, N);
    assert_sound_record(record);
    rst_record_free(record);
    free(text);
    free(tokens);
}

/* A few bytes for each one of the reply, and the record itself, however the bytes are meant. */
static void memory_is_bounded_by_the_reply(void **state)
{
    (void)state;
    enum { SIZE = 1 << 20 };
    static const char *const fills[] = {"[", "{\"a\":", ",", "[],", "\"\\u0041\",", "0,", " ", "a"};
    char *text = malloc(SIZE + 16);
    for (size_t i = 0; i < sizeof fills / sizeof *fills; i++) {
        size_t size = 0;
        text[size++] = '[';
        while (size < SIZE) {
            size += (size_t)snprintf(text + size, 16, "%s", fills[i]);
        }
        text[size++] = ']';
        rst_record *record = rst_record_new();
        watch(-1);
        int code = rst_record_decode(record, text, size, NULL, NULL);
        unwatch();
        assert_true(code == RST_ERR_SYNTAX || code == RST_ERR_TYPE);
        assert_true(together < 16 * size);
        rst_record_free(record);
    }
    free(text);
}

/* ---------------------------------------------------------------- failures */

typedef int work(rst_record *record, const char *text, rst_error *error);

static int decode_flat(rst_record *record, const char *text, rst_error *error)
{
    return rst_record_decode(record, text, strlen(text), NULL, error);
}

static int decode_support(rst_record *record, const char *text, rst_error *error)
{
    return rst_record_decode(record, text, strlen(text), &support, error);
}

static int decode_line(rst_record *record, const char *text, rst_error *error)
{
    rst_line line;
    return rst_line_decode(record, text, strlen(text), 0, &line, error);
}

/* Let each allocation fail, one after the other.  Returns how many were an error. */
static long fail_each(work *decode, const char *text)
{
    long refused = 0;
    bool failed = true;
    for (long i = 0; failed; i++) {
        rst_error error;
        rst_record *record = rst_record_new();
        watch(i);
        int code = decode(record, text, &error);
        unwatch();
        failed = calls > i;
        /* Without memory for the quick way, the other one is taken. */
        assert_true(code == RST_OK || code == RST_ERR_MEMORY);
        if (code) {
            assert_code(RST_ERR_MEMORY, code, error);
            assert_empty(record);
            refused++;
        }
        assert_ok(decode(record, text, &error), error);
        assert_sound_record(record);
        rst_record_free(record);
    }
    return refused;
}

static void every_allocation_of_decoding_can_fail(void **state)
{
    (void)state;
    char *text = chat(BASE64);
    assert_true(fail_each(decode_flat, text) > 5);
    free(text);
    char *escaped = replaced(BASE64, "AQAAAAIA", "\\u0041QAAAAIA");
    text = chat(escaped);
    assert_true(fail_each(decode_flat, text) > 5);
    free(text);
    free(escaped);
    text = chat(TOKENS "," MASK "," MASK_LOGPROBS);
    assert_true(fail_each(decode_support, text) > 5);
    free(text);
    rst_turn turn = made_turn(300, 32, 5);
    text = written_reply(&turn);
    assert_true(fail_each(decode_flat, text) > 5);
    free(text);
    text =
        text_of("{\"session_id\":\"\\u0061\",\"turn\":0,\"request\":{\"input_ids\":[1,2],"
                "\"return_flat_raw_output_top_logprobs\":true},\"response\":{\"meta_info\":{%s}}}",
                BASE64);
    assert_true(fail_each(decode_line, text) > 7);
    free(text);
}

static void every_allocation_of_a_refusal_can_fail(void **state)
{
    (void)state;
    char *meta = replaced(BASE64, "AQAAAAIA", "AQAA");
    char *text = chat(meta);
    for (long i = 0; i < 20; i++) {
        rst_error error;
        rst_record *record = rst_record_new();
        watch(i);
        int code = decode_flat(record, text, &error);
        unwatch();
        assert_code(calls > i ? RST_ERR_MEMORY : RST_ERR_SHAPE, code, error);
        rst_record_free(record);
    }
    free(text);
    free(meta);
}

static void every_allocation_of_writing_a_reply_can_fail(void **state)
{
    (void)state;
    rst_turn turn = made_turn(40, 8, 5);
    long refused = 0;
    for (bool failed = true; failed; refused += failed) {
        char *reply;
        size_t size;
        rst_error error;
        watch(refused);
        int code = rst_turn_to_reply(&turn, &reply, &size, &error);
        unwatch();
        failed = calls > refused;
        assert_int_equal(code, failed ? RST_ERR_MEMORY : RST_OK);
        assert_int_equal(error.code, code);
        assert_true(failed == (reply == NULL));
        assert_true(failed == (size == 0));
        free(reply);
    }
    assert_true(refused > 3);
}

/* With everything that is copied, given apart and read: text, logprobs, the prompt's ids. */
static void every_allocation_of_stripping_can_fail(void **state)
{
    (void)state;
    rst_turn turn = made_turn(300, 32, 5);
    char *reply = written_reply(&turn); /* its long strings are cut out first */
    const char *meta = strchr(reply, '{') + 1;
    char *text = text_of("{\"choices\":[{\"logprobs\":{\"content\":[{\"top_logprobs\":[1]}]},"
                         "\"prompt_token_ids\":[1,2],\"prompt_token\\u005fids\":[3,4,5],%s",
                         strstr(meta, "\"meta_info\""));
    long refused = 0;
    bool failed = true;
    for (long i = 0; failed; i++) {
        rst_answer answer;
        rst_error error;
        watch(i);
        int code = rst_reply_strip(text, strlen(text),
                                   RST_KEEP_LOGPROBS | RST_SPLIT_LOGPROBS | RST_KEEP_META_INFO,
                                   &answer, &error);
        unwatch();
        failed = calls > i;
        if (code) {
            assert_code(RST_ERR_MEMORY, code, error);
            assert_null(answer.text);
            assert_null(answer.logprobs);
            assert_null(answer.prompt_ids);
            refused++;
        } else {
            assert_string_equal(answer.logprobs, "{\"content\":[{\"top_logprobs\":[]}]}");
            assert_int_equal(answer.prompt_count, 3);
        }
        rst_answer_clear(&answer);
    }
    assert_true(refused > 5);
    free(text);
    free(reply);
}

/* A worker allocates once. */
static void a_record_that_was_used_allocates_nothing(void **state)
{
    (void)state;
    rst_turn turn = made_turn(300, 32, 5);
    char *text = written_reply(&turn);
    rst_record *record = rst_record_new();
    rst_error error;
    assert_ok(decode_flat(record, text, &error), error);
    watch(-1);
    int code = decode_flat(record, text, &error);
    unwatch();
    assert_ok(code, error);
    assert_int_equal(calls, 0);
    rst_record_free(record);
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(claims_cost_nothing),
        cmocka_unit_test(a_k_that_is_only_claimed_costs_nothing),
        cmocka_unit_test(memory_is_bounded_by_the_reply),
        cmocka_unit_test(every_allocation_of_decoding_can_fail),
        cmocka_unit_test(every_allocation_of_a_refusal_can_fail),
        cmocka_unit_test(every_allocation_of_writing_a_reply_can_fail),
        cmocka_unit_test(every_allocation_of_stripping_can_fail),
        cmocka_unit_test(a_record_that_was_used_allocates_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
