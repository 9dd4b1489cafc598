/* A reply put into the store in one call. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "sample_model.h"
#include "support.h"

typedef struct fixture {
    rst_store *store;
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
    model_store_close(f->store);
    free(f);
    return 0;
}

static void check_absent(fixture *f, const char *id)
{
    rst_error error;
    rst_snapshot *snapshot;
    rst_session session;
    assert_ok(rst_snapshot_open(f->store, &snapshot, &error), error);
    assert_code(RST_ERR_NOT_FOUND, rst_session_get(snapshot, id, strlen(id), &session, &error),
                error);
    rst_snapshot_close(snapshot);
}

static void check_stored(fixture *f, const char *id, const rst_turn *want, float temperature)
{
    rst_snapshot *snapshot;
    rst_turn got;
    rst_error error;
    assert_ok(rst_snapshot_open(f->store, &snapshot, &error), error);
    assert_ok(rst_turn_get(snapshot, id, strlen(id), 0, &got, &error), error);
    assert_int_equal(got.token_count, want->token_count);
    assert_int_equal(got.topk, want->topk);
    assert_int_equal(got.prompt_count, want->prompt_count);
    size_t n = want->token_count;
    assert_memory_equal(got.token_ids, want->token_ids, 4 * n);
    assert_memory_equal(got.token_logprobs, want->token_logprobs, 4 * n);
    assert_memory_equal(got.topk_ids, want->topk_ids, 4 * n * want->topk);
    assert_memory_equal(got.topk_logprobs, want->topk_logprobs, 4 * n * want->topk);
    assert_memory_equal(got.prompt_ids, want->prompt_ids, 4 * (size_t)want->prompt_count);
    assert_memory_equal(&got.temperature, &temperature, sizeof temperature);
    rst_snapshot_close(snapshot);
}

static void a_reply_is_decoded_and_stored_with_its_prompt(void **state)
{
    fixture *f = *state;
    model_session m = {.turn_count = 0};
    rst_turn turn = model_turn(&f->random, 6, 3, 1000);
    model_add(&m, turn, &f->random, 0, 9, 1000);
    char *reply;
    size_t size;
    rst_error error;
    assert_ok(rst_turn_to_reply(&m.turns[0], &reply, &size, &error), error);
    rst_put_options options = {.decode = {.topk = 3},
                               .prompt_ids = m.turns[0].prompt_ids,
                               .prompt_count = m.turns[0].prompt_count,
                               .temperature = 0.75f};
    assert_ok(rst_put_reply(f->store, "own", 3, 0, reply, size, &options, NULL, &error), error);
    check_stored(f, "own", &m.turns[0], 0.75f);
    /* A record that held another turn before, with another prompt. */
    rst_record *record = rst_record_new();
    rst_turn other = model_turn(&f->random, 40, 8, 1000);
    model_session filler = {.turn_count = 0};
    model_add(&filler, other, &f->random, 0, 50, 1000);
    assert_ok(rst_record_set(record, &filler.turns[0], &error), error);
    options.temperature = NAN;
    assert_ok(rst_put_reply(f->store, "lent", 4, 0, reply, size, &options, record, &error), error);
    check_stored(f, "lent", &m.turns[0], NAN);
    /* The same again changes nothing; other bytes are a conflict unless they are to replace. */
    assert_ok(rst_put_reply(f->store, "lent", 4, 0, reply, size, &options, record, &error), error);
    options.temperature = 1.0f;
    assert_code(RST_ERR_CONFLICT,
                rst_put_reply(f->store, "lent", 4, 0, reply, size, &options, record, &error),
                error);
    options.flags = RST_CHANGE_REPLACE;
    assert_ok(rst_put_reply(f->store, "lent", 4, 0, reply, size, &options, record, &error), error);
    check_stored(f, "lent", &m.turns[0], 1.0f);
    rst_record_free(record);
    free(reply);
    model_session_free(&filler);
    model_session_free(&m);
}

static void a_refused_reply_stores_nothing(void **state)
{
    fixture *f = *state;
    const char *reply = "{\"meta_info\":{}}";
    rst_put_options options = {.decode = {.topk = 3}};
    rst_error error;
    assert_code(RST_ERR_MISSING,
                rst_put_reply(f->store, "bad", 3, 0, reply, strlen(reply), &options, NULL, &error),
                error);
    assert_string_not_equal(error.field, "");
    options.prompt_count = 1;
    assert_code(RST_ERR_ARGUMENT,
                rst_put_reply(f->store, "bad", 3, 0, reply, strlen(reply), &options, NULL, &error),
                error);
    assert_string_equal(error.field, "prompt_ids");
    assert_code(RST_ERR_ARGUMENT,
                rst_put_reply(f->store, "bad", 3, 0, reply, strlen(reply), NULL, NULL, &error),
                error);
    check_absent(f, "bad");
}

static void a_bad_prompt_stores_nothing(void **state)
{
    fixture *f = *state;
    rst_turn turn = model_turn(&f->random, 6, 3, 1000);
    char *reply;
    size_t size;
    rst_error error;
    assert_ok(rst_turn_to_reply(&turn, &reply, &size, &error), error);
    int32_t prompt[] = {4, -1, 7};
    rst_put_options options = {.decode = {.topk = 3}, .prompt_ids = prompt, .prompt_count = 3};
    assert_code(RST_ERR_VALUE,
                rst_put_reply(f->store, "bad", 3, 0, reply, size, &options, NULL, &error), error);
    assert_string_equal(error.field, "prompt_ids");
    check_absent(f, "bad");
    free(reply);
    model_session one = {.turn_count = 1, .turns = {turn}};
    model_session_free(&one);
}

#define WITH_STORE(test) cmocka_unit_test_setup_teardown(test, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        WITH_STORE(a_reply_is_decoded_and_stored_with_its_prompt),
        WITH_STORE(a_refused_reply_stores_nothing),
        WITH_STORE(a_bad_prompt_stores_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
