/* A store that was damaged, or that changed between measuring and filling: an error, and not one
 * byte written. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sample_model.h"
#include "support.h"

typedef struct fixture {
    rst_store *store;
    rst_snapshot *snapshot;
    uint64_t random;
    model_session session;
    rst_sample sample;
} fixture;

/* A session of three turns, the last but one of which loses a token, measured. */
static int setup(void **state)
{
    fixture *f = calloc(1, sizeof *f);
    assert_non_null(f);
    f->store = model_store_open();
    f->random = 1;
    snprintf(f->session.id, sizeof f->session.id, "damaged");
    for (uint32_t t = 0; t < 3; t++) {
        rst_turn turn = model_turn(&f->random, 20 + t, 3, 1000000);
        model_add(&f->session, turn, &f->random, t == 2, 10, 1000000);
    }
    rst_record *record = rst_record_new();
    rst_error error;
    for (uint32_t t = 0; t < 3; t++) {
        assert_ok(rst_record_set(record, &f->session.turns[t], &error), error);
        assert_ok(rst_put(f->store, f->session.id, 7, t, record, 0, 0, &error), error);
    }
    rst_record_free(record);
    assert_ok(rst_snapshot_open(f->store, &f->snapshot, &error), error);
    assert_ok(rst_sample_measure(f->snapshot, "damaged", 7, NULL, &f->sample, &error), error);
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    fixture *f = *state;
    rst_snapshot_close(f->snapshot);
    model_store_close(f->store);
    model_session_free(&f->session);
    free(f);
    return 0;
}

/* Fill alone, packed and padded: each must be refused and leave the arrays as they were. */
static void check_not_filled(fixture *f, rst_snapshot *snapshot, int code)
{
    const rst_sample *s = &f->sample;
    uint64_t t = s->token_count;
    uint64_t r = s->response_count;
    rst_sample_arrays a = guarded_arrays_new(t, r, s->topk, 0);
    int32_t *counts = guarded_new(8);
    rst_error error;
    assert_code(code, rst_sample_fill(snapshot, s, NULL, &a, &error), error);
    assert_non_null(strstr(error.message, "damaged"));
    rst_packed_arrays packed = {a.tokens,   counts,          a.loss_mask, a.rollout_logprobs,
                                a.topk_ids, a.topk_logprobs, NULL};
    assert_code(code, rst_batch_pack(snapshot, s, 1, NULL, &packed, 2, &error), error);
    assert_int_equal(error.index, 0);
    rst_padded_arrays padded = {
        t,   r, 0, a.tokens, counts, a.loss_mask, a.rollout_logprobs, a.topk_ids, a.topk_logprobs,
        NULL};
    assert_code(code, rst_batch_pad(snapshot, s, 1, NULL, &padded, 2, &error), error);
    assert_int_equal(error.index, 0);
    guarded_arrays_check_untouched(&a, t, r, s->topk);
    guarded_check_untouched(counts, 8);
    guarded_free(counts, 8);
    guarded_arrays_free(&a, t, r, s->topk);
}

/* ---------------------------------------------------------------- another snapshot */

static void check_replaced(fixture *f, uint32_t n, uint32_t k)
{
    rst_turn turn = model_turn(&f->random, n, k, 1000);
    turn.prompt_ids = f->session.turns[2].prompt_ids;
    turn.prompt_count = f->session.turns[2].prompt_count;
    rst_record *record = rst_record_new();
    rst_error error;
    rst_snapshot *later;
    assert_ok(rst_record_set(record, &turn, &error), error);
    assert_ok(rst_put(f->store, "damaged", 7, 2, record, RST_CHANGE_REPLACE, 0, &error), error);
    assert_ok(rst_snapshot_open(f->store, &later, &error), error);
    check_not_filled(f, later, RST_ERR_CORRUPT);
    rst_snapshot_close(later);
    rst_record_free(record);
    turn.prompt_ids = NULL;
    model_session one = {.turn_count = 1, .turns = {turn}};
    model_session_free(&one);
}

static void a_turn_replaced_since_is_noticed(void **state)
{
    fixture *f = *state;
    check_replaced(f, 23, 3); /* longer */
    check_replaced(f, 21, 3); /* shorter */
    check_replaced(f, 22, 4); /* wider */
    check_replaced(f, 0, 0);
}

static void turns_dropped_since_are_noticed(void **state)
{
    fixture *f = *state;
    rst_error error;
    rst_snapshot *later;
    for (uint32_t turn = 3; turn-- > 0;) {
        assert_ok(rst_restart(f->store, "damaged", 7, turn, &error), error);
        assert_ok(rst_snapshot_open(f->store, &later, &error), error);
        check_not_filled(f, later, RST_ERR_CORRUPT);
        rst_snapshot_close(later);
    }
}

/* ---------------------------------------------------------------- damage in the map */

/* The header of a turn in the map, which a handle that writes has mapped for writing. */
static rst_record_header *header_of(fixture *f, uint32_t turn)
{
    rst_turn t;
    rst_error error;
    assert_ok(rst_turn_get(f->snapshot, "damaged", 7, turn, &t, &error), error);
    unsigned char *bytes = (unsigned char *)(uintptr_t)t.token_ids;
    return (rst_record_header *)(void *)(bytes - sizeof(rst_record_header));
}

static void check_damaged(fixture *f)
{
    rst_sample s;
    rst_error error;
    assert_code(RST_ERR_CORRUPT, rst_sample_measure(f->snapshot, "damaged", 7, NULL, &s, &error),
                error);
    assert_non_null(strstr(error.message, "\"damaged\""));
    check_not_filled(f, f->snapshot, RST_ERR_CORRUPT);
}

/* Every count of every turn, a little and wildly wrong.  It does not fit record_size any more, or
 * the turns around it, or the session's entry. */
static void each_count_that_is_wrong_is_noticed(void **state)
{
    fixture *f = *state;
    const uint32_t wrong[] = {0, 1, 2, 19, 20, 1000, 1u << 24, (1u << 24) + 1, UINT32_MAX};
    for (uint32_t turn = 0; turn < 3; turn++) {
        rst_record_header *h = header_of(f, turn);
        uint32_t *counts[] = {&h->token_count, &h->topk, &h->prompt_count, &h->prefix_count,
                              &h->trimmed_count};
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
            uint32_t right = *counts[i];
            for (size_t j = 0; j < sizeof wrong / sizeof *wrong; j++) {
                *counts[i] = wrong[j];
                if (wrong[j] != right) {
                    check_damaged(f);
                }
            }
            *counts[i] = right;
        }
    }
}

/* Counts that fit one another, but say that a prompt reaches back further than an output. */
static void counts_shifted_between_prefix_and_trimmed_are_noticed(void **state)
{
    fixture *f = *state;
    rst_record_header *h = header_of(f, 2);
    for (uint32_t shift = 2; shift <= h->prefix_count; shift += 7) {
        h->prefix_count -= shift;
        h->trimmed_count += shift;
        rst_sample s;
        rst_error error;
        assert_code(RST_ERR_ALIGNMENT,
                    rst_sample_measure(f->snapshot, "damaged", 7, NULL, &s, &error), error);
        assert_non_null(strstr(error.message, "turn 2"));
        bool past_output = h->trimmed_count > 21;
        check_not_filled(f, f->snapshot, past_output ? RST_ERR_ALIGNMENT : RST_ERR_CORRUPT);
        h->prefix_count += shift;
        h->trimmed_count -= shift;
    }
}

/* As a map could change under a reader whose machine fails: the sample was measured with other
 * counts than those it is filled from, while each turn fits the one before. */
static void a_sample_of_other_sizes_is_not_filled(void **state)
{
    fixture *f = *state;
    rst_sample right = f->sample;
    rst_sample *s = &f->sample;
    s->token_count -= 1;
    s->response_count -= 1;
    check_not_filled(f, f->snapshot, RST_ERR_CORRUPT);
    *s = right;
    s->token_count += 1;
    check_not_filled(f, f->snapshot, RST_ERR_CORRUPT);
    *s = right;
    s->response_count -= 1;
    check_not_filled(f, f->snapshot, RST_ERR_CORRUPT);
    *s = right;
    s->response_count += 1;
    check_not_filled(f, f->snapshot, RST_ERR_CORRUPT);
    *s = right;
    s->turn_count = 2;
    check_not_filled(f, f->snapshot, RST_ERR_CORRUPT);
    *s = right;
    s->topk = 2;
    check_not_filled(f, f->snapshot, RST_ERR_CORRUPT);
    *s = right;
    s->token_count = 0;
    s->response_count = 0;
    check_not_filled(f, f->snapshot, RST_ERR_CORRUPT);
}

/* ---------------------------------------------------------------- no memory */

/* The library's call lands here; every other allocation is the C library's own. */
static long allowed = -1; /* calls that succeed; -1: all */

void *reallocarray(void *memory, size_t count, size_t size)
{
    if (allowed == 0 || (size && count > SIZE_MAX / size)) {
        errno = ENOMEM;
        return NULL;
    }
    allowed -= allowed > 0;
    return realloc(memory, count * size);
}

static void without_memory_nothing_is_written(void **state)
{
    fixture *f = *state;
    allowed = 0;
    const rst_sample *s = &f->sample;
    rst_sample_arrays a = guarded_arrays_new(s->token_count, s->response_count, s->topk, 0);
    rst_error error;
    int code = rst_sample_fill(f->snapshot, s, NULL, &a, &error);
    /* Twenty of them need a second, larger list. */
    rst_sample samples[20];
    rst_packed_arrays packed = {.loss_mask = guarded_new(20 * s->response_count),
                                .rollout_logprobs = guarded_new(20 * 4 * s->response_count)};
    for (size_t i = 0; i < 20; i++) {
        samples[i] = *s;
    }
    allowed = 1;
    rst_error pack_error;
    int pack_code = rst_batch_pack(f->snapshot, samples, 20, NULL, &packed, 2, &pack_error);
    allowed = -1;
    assert_code(RST_ERR_MEMORY, code, error);
    assert_code(RST_ERR_MEMORY, pack_code, pack_error);
    guarded_arrays_check_untouched(&a, s->token_count, s->response_count, s->topk);
    guarded_check_untouched(packed.loss_mask, 20 * s->response_count);
    guarded_check_untouched(packed.rollout_logprobs, 20 * 4 * s->response_count);
    guarded_arrays_free(&a, s->token_count, s->response_count, s->topk);
    guarded_free(packed.loss_mask, 20 * s->response_count);
    guarded_free(packed.rollout_logprobs, 20 * 4 * s->response_count);
}

#define WITH_STORE(test) cmocka_unit_test_setup_teardown(test, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        WITH_STORE(a_turn_replaced_since_is_noticed),
        WITH_STORE(turns_dropped_since_are_noticed),
        WITH_STORE(each_count_that_is_wrong_is_noticed),
        WITH_STORE(counts_shifted_between_prefix_and_trimmed_are_noticed),
        WITH_STORE(a_sample_of_other_sizes_is_not_filled),
        WITH_STORE(without_memory_nothing_is_written),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
