/* One session's sample: what is in it, what is refused, and what a reply put into the store gives.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sample_model.h"
#include "support.h"

/* ---------------------------------------------------------------- sessions made by hand */

typedef struct fixture {
    rst_store *store;
    rst_snapshot *snapshot;
    uint64_t random;
} fixture;

static int setup(void **state)
{
    fixture *f = calloc(1, sizeof *f);
    assert_non_null(f);
    f->store = model_store_open();
    f->random = 1;
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    fixture *f = *state;
    rst_snapshot_close(f->snapshot);
    model_store_close(f->store);
    free(f);
    return 0;
}

/* Turns of the session are described by numbers, so that a test shows what matters to it. */
typedef struct shape {
    uint32_t generated;
    uint32_t topk;
    uint32_t trimmed; /* tokens of the turns before that the prompt leaves out */
    uint32_t added;   /* new tokens in the prompt */
} shape;

/* Large, so that a new token is never by chance the one that was trimmed. */
#define VOCABULARY 1000000000u

static void make(fixture *f, model_session *session, const char *id, const shape *shapes,
                 uint32_t count)
{
    *session = (model_session){.turn_count = 0};
    snprintf(session->id, sizeof session->id, "%s", id);
    for (uint32_t i = 0; i < count; i++) {
        rst_turn turn = model_turn(&f->random, shapes[i].generated, shapes[i].topk, VOCABULARY);
        model_add(session, turn, &f->random, shapes[i].trimmed, shapes[i].added, VOCABULARY);
    }
    model_store_session(f->store, session);
    rst_error error;
    rst_snapshot_close(f->snapshot);
    assert_ok(rst_snapshot_open(f->store, &f->snapshot, &error), error);
}

static int measure(fixture *f, const model_session *session, const rst_sample_options *options,
                   rst_sample *sample, rst_error *error)
{
    return rst_sample_measure(f->snapshot, session->id, strlen(session->id), options, sample,
                              error);
}

/* Measure and fill, with every array and with each one left out, and compare with the model. */
static void check_sample(fixture *f, const model_session *session,
                         const rst_sample_options *options)
{
    rst_sample_options used = RST_SAMPLE_OPTIONS_DEFAULT;
    used = options ? *options : used;
    model_sample want = model_assemble(session, &used, 0);
    assert_int_equal(want.code, RST_OK);
    rst_error error;
    rst_sample s;
    if (measure(f, session, options, &s, &error)) {
        fail_msg("%s", error.message);
    }
    model_compare_sizes(&s, &want);
    assert_int_equal(s.topk, want.sizes.topk);
    for (unsigned left_out = 0; left_out < 32; left_out++) {
        rst_sample_arrays a = guarded_arrays_new(s.token_count, s.response_count, s.topk, left_out);
        assert_ok(rst_sample_fill(f->snapshot, &s, options, &a, &error), error);
        model_compare_arrays(&a, &want);
        guarded_arrays_free(&a, s.token_count, s.response_count, s.topk);
    }
    model_sample_free(&want);
}

static void check_refused(fixture *f, const model_session *session,
                          const rst_sample_options *options, int code, const char *where)
{
    rst_sample_options used = RST_SAMPLE_OPTIONS_DEFAULT;
    used = options ? *options : used;
    model_sample want = model_assemble(session, &used, 0);
    assert_int_equal(want.code, code);
    rst_error error;
    rst_sample s;
    rst_sample before;
    memset(&s, 0x5A, sizeof s);
    memset(&before, 0x5A, sizeof before);
    assert_code(code, measure(f, session, options, &s, &error), error);
    assert_int_equal(error.code, code);
    assert_memory_equal(&s, &before, sizeof s);
    assert_non_null(strstr(error.message, session->id));
    if (!strstr(error.message, where)) {
        fail_msg("\"%s\" does not say \"%s\"", error.message, where);
    }
    assert_int_equal(measure(f, session, options, &s, NULL), code);
}

static void prompts_and_observations_lie_around_the_outputs(void **state)
{
    fixture *f = *state;
    model_session s;
    make(f, &s, "three turns", (shape[]){{5, 3, 0, 7}, {4, 3, 0, 2}, {6, 3, 0, 9}}, 3);
    check_sample(f, &s, NULL);
    model_session_free(&s);
}

static void one_turn_is_a_sample(void **state)
{
    fixture *f = *state;
    model_session s;
    make(f, &s, "single", (shape[]){{1, 1, 0, 1}}, 1);
    check_sample(f, &s, NULL);
    model_session_free(&s);
    make(f, &s, "no prompt", (shape[]){{3, 2, 0, 0}}, 1);
    check_sample(f, &s, NULL);
    model_session_free(&s);
}

static void a_prompt_may_add_nothing(void **state)
{
    fixture *f = *state;
    model_session s;
    make(f, &s, "goes on", (shape[]){{5, 3, 0, 7}, {4, 3, 0, 0}, {2, 3, 1, 0}}, 3);
    check_sample(f, &s, NULL);
    model_session_free(&s);
}

static void an_aborted_turn_adds_only_its_prompt(void **state)
{
    fixture *f = *state;
    model_session s;
    make(f, &s, "aborted first", (shape[]){{0, 0, 0, 7}, {4, 3, 0, 0}}, 2);
    check_sample(f, &s, NULL);
    model_session_free(&s);
    make(f, &s, "aborted between", (shape[]){{3, 2, 0, 7}, {0, 2, 1, 3}, {4, 2, 0, 0}}, 3);
    check_sample(f, &s, NULL);
    model_session_free(&s);
    make(f, &s, "aborted last", (shape[]){{3, 2, 0, 7}, {0, 0, 0, 3}}, 2);
    check_sample(f, &s, NULL);
    model_session_free(&s);
    make(f, &s, "aborted alone", (shape[]){{0, 0, 0, 7}}, 1);
    check_sample(f, &s, NULL);
    model_session_free(&s);
    make(f, &s, "empty", (shape[]){{0, 0, 0, 0}, {0, 0, 0, 0}}, 2);
    check_sample(f, &s, NULL);
    model_session_free(&s);
}

static void turns_without_candidates_are_samples(void **state)
{
    fixture *f = *state;
    model_session s;
    make(f, &s, "no candidates", (shape[]){{5, 0, 0, 7}, {4, 0, 0, 2}}, 2);
    check_sample(f, &s, NULL);
    check_sample(f, &s, &(rst_sample_options){.topk = 4});
    model_session_free(&s);
}

/* ---------------------------------------------------------------- trimming */

static void up_to_trim_max_tokens_are_trimmed(void **state)
{
    fixture *f = *state;
    model_session s;
    make(f, &s, "stop token", (shape[]){{5, 3, 0, 7}, {4, 3, 1, 2}, {6, 3, 1, 9}}, 3);
    check_sample(f, &s, NULL);
    rst_sample_options none = {.trim_max = 0};
    check_refused(f, &s, &none, RST_ERR_ALIGNMENT, "turn 1:");
    model_session_free(&s);

    make(f, &s, "two tokens", (shape[]){{5, 3, 0, 7}, {4, 3, 1, 2}, {6, 3, 2, 9}}, 3);
    check_refused(f, &s, NULL, RST_ERR_ALIGNMENT, "turn 2:");
    rst_sample_options two = {.trim_max = 2};
    check_sample(f, &s, &two);
    model_session_free(&s);
}

static void a_whole_output_may_be_trimmed_and_no_more(void **state)
{
    fixture *f = *state;
    model_session s;
    rst_sample_options any = {.trim_max = UINT32_MAX};
    make(f, &s, "whole", (shape[]){{5, 3, 0, 7}, {4, 3, 0, 2}, {6, 3, 4, 9}}, 3);
    check_sample(f, &s, &any);
    model_session_free(&s);
    make(f, &s, "and one", (shape[]){{5, 3, 0, 7}, {4, 3, 0, 2}, {6, 3, 5, 9}}, 3);
    check_refused(f, &s, &any, RST_ERR_ALIGNMENT, "turn 2:");
    model_session_free(&s);
    make(f, &s, "first prompt", (shape[]){{5, 3, 0, 7}, {4, 3, 6, 2}}, 2);
    check_refused(f, &s, &any, RST_ERR_ALIGNMENT, "turn 1:");
    model_session_free(&s);
}

static void nothing_is_trimmed_through_an_empty_output(void **state)
{
    fixture *f = *state;
    model_session s;
    make(f, &s, "through", (shape[]){{5, 3, 0, 7}, {0, 3, 0, 0}, {6, 3, 1, 9}}, 3);
    check_refused(f, &s, NULL, RST_ERR_ALIGNMENT, "turn 2:");
    model_session_free(&s);
}

static void a_contradiction_names_session_and_turn(void **state)
{
    fixture *f = *state;
    rst_sample_options any = {.trim_max = UINT32_MAX};
    /* Position 3 is in the first prompt, 9 in turn 0's output, 13 in the observation. */
    uint32_t places[] = {3, 9, 13};
    for (size_t i = 0; i < 3; i++) {
        model_session s = {.turn_count = 0};
        snprintf(s.id, sizeof s.id, "contradicted at %u", places[i]);
        uint32_t generated[] = {5, 4, 6};
        for (uint32_t t = 0; t < 3; t++) {
            rst_turn turn = model_turn(&f->random, generated[t], 2, VOCABULARY);
            model_add(&s, turn, &f->random, 0, t ? 3 : 7, VOCABULARY);
        }
        int32_t *prompt = (int32_t *)(uintptr_t)s.turns[2].prompt_ids;
        prompt[places[i]]++;
        model_store_session(f->store, &s);
        rst_snapshot_close(f->snapshot);
        assert_int_equal(rst_snapshot_open(f->store, &f->snapshot, NULL), RST_OK);
        check_refused(f, &s, &any, RST_ERR_ALIGNMENT, "turn 2:");
        /* Also when the turn would be left out: the session is no less wrong. */
        any.token_max = 12;
        check_refused(f, &s, &any, RST_ERR_ALIGNMENT, "turn 2:");
        any.token_max = 0;
        model_session_free(&s);
    }
}

/* ---------------------------------------------------------------- token_max */

static void token_max_leaves_whole_turns_out(void **state)
{
    fixture *f = *state;
    model_session s;
    make(f, &s, "long", (shape[]){{5, 3, 0, 7}, {4, 6, 1, 2}, {6, 3, 1, 9}, {0, 0, 1, 0}}, 4);
    /* 12, then 12 - 1 + 2 + 4, then 17 - 1 + 9 + 6, then one less: an empty turn that trims. */
    uint32_t ends[] = {12, 17, 31, 30};
    check_refused(f, &s, &(rst_sample_options){.trim_max = 1, .token_max = 11}, RST_ERR_LIMIT,
                  "at most 11 tokens");
    for (uint32_t most = 12; most < 40; most++) {
        rst_sample_options options = {.trim_max = 1, .token_max = most};
        check_sample(f, &s, &options);
        rst_sample sample;
        assert_int_equal(measure(f, &s, &options, &sample, NULL), RST_OK);
        uint32_t turns = most < ends[1] ? 1 : most < ends[3] ? 2 : 4;
        assert_int_equal(sample.turn_count, turns);
        assert_int_equal(sample.turns_left_out, 4 - turns);
        assert_int_equal(sample.token_count, ends[turns - 1]);
        /* The turn that comes last keeps the token which the one after it left out. */
        assert_int_equal(sample.trimmed_count, turns == 1 ? 0 : turns == 2 ? 1 : 3);
        assert_int_equal(sample.topk, turns == 1 ? 3 : 6);
    }
    model_session_free(&s);
}

/* ---------------------------------------------------------------- topk */

static void narrow_rows_are_filled_up_and_wide_ones_refused(void **state)
{
    fixture *f = *state;
    model_session s;
    make(f, &s, "mixed", (shape[]){{5, 3, 0, 7}, {4, 8, 1, 2}, {6, 0, 1, 9}, {2, 1, 0, 1}}, 4);
    check_sample(f, &s, NULL);
    for (uint32_t topk = 8; topk < 20; topk++) {
        check_sample(f, &s, &(rst_sample_options){.topk = topk, .trim_max = 1});
    }
    check_refused(f, &s, &(rst_sample_options){.topk = 7, .trim_max = 1}, RST_ERR_LIMIT, "turn 1:");
    /* A wide turn that is left out asks for no room. */
    check_sample(f, &s, &(rst_sample_options){.topk = 3, .trim_max = 1, .token_max = 12});
    model_session_free(&s);
}

static void options_are_checked(void **state)
{
    fixture *f = *state;
    model_session m;
    make(f, &m, "options", (shape[]){{5, 3, 0, 7}}, 1);
    rst_error error;
    rst_sample s;
    rst_sample_options options = {.topk = RST_TOPK_MAX + 1};
    assert_code(RST_ERR_ARGUMENT, measure(f, &m, &options, &s, &error), error);
    assert_string_equal(error.field, "topk");
    options.topk = RST_TOPK_MAX;
    assert_int_equal(measure(f, &m, &options, &s, &error), RST_OK);
    assert_int_equal(s.topk, RST_TOPK_MAX);
    options.topk = 4;
    rst_sample_arrays a = guarded_arrays_new(s.token_count, s.response_count, 4, 0);
    assert_code(RST_ERR_ARGUMENT, rst_sample_fill(f->snapshot, &s, &options, &a, &error), error);
    assert_string_equal(error.field, "topk");
    guarded_arrays_check_untouched(&a, s.token_count, s.response_count, 4);
    guarded_arrays_free(&a, s.token_count, s.response_count, 4);
    assert_code(RST_ERR_NOT_FOUND, rst_sample_measure(f->snapshot, "nobody", 6, NULL, &s, &error),
                error);
    assert_non_null(strstr(error.message, "nobody"));
    assert_code(RST_ERR_ARGUMENT, rst_sample_measure(f->snapshot, "", 0, NULL, &s, &error), error);
    model_session_free(&m);
}

static void weight_versions_are_those_of_the_turns_in_the_sample(void **state)
{
    fixture *f = *state;
    const char *versions[] = {"12", "3", "", "40", "main-7"};
    model_session m = {.id = "versions"};
    for (uint32_t t = 0; t < 5; t++) {
        rst_turn turn = model_turn(&f->random, 2, 1, VOCABULARY);
        turn.weight_version = versions[t];
        turn.weight_version_size = (uint32_t)strlen(versions[t]);
        model_add(&m, turn, &f->random, 0, 1, VOCABULARY);
    }
    model_store_session(f->store, &m);
    assert_int_equal(rst_snapshot_open(f->store, &f->snapshot, NULL), RST_OK);
    const int64_t min[] = {12, 3, 3, 3, 3};
    const int64_t max[] = {12, 12, 12, 40, 40};
    for (uint32_t t = 0; t < 5; t++) {
        rst_sample s;
        rst_sample_options options = {.token_max = 3 * (t + 1)};
        assert_int_equal(measure(f, &m, &options, &s, NULL), RST_OK);
        assert_int_equal(s.weight_version_min, min[t]);
        assert_int_equal(s.weight_version_max, max[t]);
    }
    model_session_free(&m);
    make(f, &m, "without", (shape[]){{5, 3, 0, 7}}, 1);
    rst_sample s;
    assert_int_equal(measure(f, &m, NULL, &s, NULL), RST_OK);
    assert_int_equal(s.weight_version_min, RST_NO_VERSION);
    assert_int_equal(s.weight_version_max, RST_NO_VERSION);
    model_session_free(&m);
}

#define WITH_STORE(test) cmocka_unit_test_setup_teardown(test, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        WITH_STORE(prompts_and_observations_lie_around_the_outputs),
        WITH_STORE(one_turn_is_a_sample),
        WITH_STORE(a_prompt_may_add_nothing),
        WITH_STORE(an_aborted_turn_adds_only_its_prompt),
        WITH_STORE(turns_without_candidates_are_samples),
        WITH_STORE(up_to_trim_max_tokens_are_trimmed),
        WITH_STORE(a_whole_output_may_be_trimmed_and_no_more),
        WITH_STORE(nothing_is_trimmed_through_an_empty_output),
        WITH_STORE(a_contradiction_names_session_and_turn),
        WITH_STORE(token_max_leaves_whole_turns_out),
        WITH_STORE(narrow_rows_are_filled_up_and_wide_ones_refused),
        WITH_STORE(options_are_checked),
        WITH_STORE(weight_versions_are_those_of_the_turns_in_the_sample),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
