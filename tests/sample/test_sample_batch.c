/* Random sessions against the slow assembler, alone and in batches, by one and by several threads.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sample_model.h"
#include "support.h"

#define SESSION_COUNT 300

typedef struct fixture {
    rst_store *store;
    rst_snapshot *snapshot;
    uint64_t random;
    model_session sessions[SESSION_COUNT];
} fixture;

/* With few different tokens prompts often agree further than they were meant to; some contradict.
 */
static void make_session(fixture *f, model_session *session, uint32_t number)
{
    uint64_t *r = &f->random;
    uint32_t vocabulary = model_random(r, 2) ? 3 : 50000;
    *session = (model_session){.turn_count = 0};
    snprintf(session->id, sizeof session->id, "random-%u", number);
    uint32_t turns = 1 + model_random(r, MODEL_TURNS_MAX);
    for (uint32_t t = 0; t < turns; t++) {
        uint32_t n = model_random(r, 5) ? model_random(r, 30) : 0;
        uint32_t before;
        free(model_sequence(session, t, &before));
        uint32_t trimmed = model_random(r, 3) ? 0 : model_random(r, 3);
        trimmed = trimmed < before ? trimmed : 0;
        rst_turn turn = model_turn(r, n, model_random(r, 9), vocabulary);
        model_add(session, turn, r, trimmed, model_random(r, 12), vocabulary);
        rst_turn *added = &session->turns[t];
        if (added->prompt_count && model_random(r, 30) == 0) {
            ((int32_t *)(uintptr_t)added->prompt_ids)[model_random(r, added->prompt_count)] = 7;
        }
    }
    model_store_session(f->store, session);
}

static int setup(void **state)
{
    fixture *f = calloc(1, sizeof *f);
    assert_non_null(f);
    f->store = model_store_open();
    f->random = 42;
    for (uint32_t i = 0; i < SESSION_COUNT; i++) {
        make_session(f, &f->sessions[i], i);
    }
    assert_int_equal(rst_snapshot_open(f->store, &f->snapshot, NULL), RST_OK);
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    fixture *f = *state;
    rst_snapshot_close(f->snapshot);
    model_store_close(f->store);
    for (uint32_t i = 0; i < SESSION_COUNT; i++) {
        model_session_free(&f->sessions[i]);
    }
    free(f);
    return 0;
}

static rst_sample_options random_options(uint64_t *random)
{
    return (rst_sample_options){
        .topk = model_random(random, 2) ? 0 : 4 + model_random(random, 8),
        .trim_max = model_random(random, 4),
        .token_max = model_random(random, 2) ? 0 : 1 + model_random(random, 150),
    };
}

/* ---------------------------------------------------------------- alone */

static int check_one(fixture *f, const model_session *session, const rst_sample_options *options)
{
    model_sample want = model_assemble(session, options, 0);
    rst_sample s;
    rst_error error;
    int code =
        rst_sample_measure(f->snapshot, session->id, strlen(session->id), options, &s, &error);
    assert_int_equal(code, want.code);
    if (code) {
        char where[32];
        snprintf(where, sizeof where, "turn %u:", want.bad);
        assert_non_null(strstr(error.message, session->id));
        assert_true(code == RST_ERR_LIMIT || strstr(error.message, where));
        return code;
    }
    model_compare_sizes(&s, &want);
    assert_int_equal(s.topk, want.sizes.topk);
    rst_sample_arrays a =
        guarded_arrays_new(s.token_count, s.response_count, s.topk, model_random(&f->random, 64));
    assert_ok(rst_sample_fill(f->snapshot, &s, options, &a, &error), error);
    model_compare_arrays(&a, &want);
    guarded_arrays_free(&a, s.token_count, s.response_count, s.topk);
    model_sample_free(&want);
    return code;
}

static void random_sessions_give_what_the_definition_says(void **state)
{
    fixture *f = *state;
    unsigned sound = 0;
    unsigned contradicted = 0;
    unsigned over = 0;
    for (unsigned round = 0; round < 5; round++) {
        for (uint32_t i = 0; i < SESSION_COUNT; i++) {
            rst_sample_options options = random_options(&f->random);
            int code = check_one(f, &f->sessions[i], &options);
            sound += code == RST_OK;
            contradicted += code == RST_ERR_ALIGNMENT;
            over += code == RST_ERR_LIMIT;
        }
    }
    /* The draw is fixed: all outcomes occur often enough to mean something. */
    assert_true(sound > 300 && contradicted > 100 && over > 100);
}

/* ---------------------------------------------------------------- batches */

#define BATCH_MAX 40

typedef struct batch {
    size_t count;
    rst_sample_options options;
    rst_id ids[BATCH_MAX];
    rst_sample samples[BATCH_MAX];
    model_sample want[BATCH_MAX];
    rst_batch_size size;
} batch;

/* Random sessions, some more than once, of which each gives a sample. */
static void make_batch(fixture *f, batch *b)
{
    const model_session *chosen[BATCH_MAX];
    *b = (batch){.options = random_options(&f->random)};
    size_t wanted = model_random(&f->random, BATCH_MAX + 1);
    uint32_t topk = b->options.topk;
    while (b->count < wanted) {
        const model_session *s = &f->sessions[model_random(&f->random, SESSION_COUNT)];
        model_sample want = model_assemble(s, &b->options, 0);
        if (want.code == RST_OK) {
            topk = want.sizes.topk > topk ? want.sizes.topk : topk;
            chosen[b->count] = s;
            b->ids[b->count++] = (rst_id){s->id, strlen(s->id)};
            model_sample_free(&want);
        }
    }
    rst_batch_size *size = &b->size;
    size->topk = topk;
    for (size_t i = 0; i < b->count; i++) {
        b->want[i] = model_assemble(chosen[i], &b->options, topk);
        const rst_sample *s = &b->want[i].sizes;
        size->token_count += s->token_count;
        size->response_count += s->response_count;
        size->token_max = s->token_count > size->token_max ? s->token_count : size->token_max;
        size->response_max =
            s->response_count > size->response_max ? s->response_count : size->response_max;
    }
}

static void free_batch(batch *b)
{
    for (size_t i = 0; i < b->count; i++) {
        model_sample_free(&b->want[i]);
    }
}

static void measure_batch(fixture *f, batch *b)
{
    rst_batch_size size;
    rst_error error;
    assert_ok(
        rst_batch_measure(f->snapshot, b->ids, b->count, &b->options, b->samples, &size, &error),
        error);
    assert_int_equal(size.token_count, b->size.token_count);
    assert_int_equal(size.response_count, b->size.response_count);
    assert_int_equal(size.token_max, b->size.token_max);
    assert_int_equal(size.response_max, b->size.response_max);
    assert_int_equal(size.topk, b->size.topk);
    for (size_t i = 0; i < b->count; i++) {
        model_compare_sizes(&b->samples[i], &b->want[i]);
    }
}

/* Element `index` of an array that may be left out. */
static void *element(void *array, size_t index, size_t size)
{
    return array ? (char *)array + index * size : NULL;
}

static rst_sample_arrays arrays_at(const rst_sample_arrays *a, size_t token, size_t response,
                                   size_t topk)
{
    return (rst_sample_arrays){element(a->tokens, token, 4), element(a->loss_mask, response, 1),
                               element(a->rollout_logprobs, response, 4),
                               element(a->topk_ids, response * topk, 4),
                               element(a->topk_logprobs, response * topk, 4)};
}

static void check_packed(fixture *f, const batch *b, unsigned threads, unsigned left_out)
{
    const rst_batch_size *z = &b->size;
    rst_sample_arrays a = guarded_arrays_new(z->token_count, z->response_count, z->topk, left_out);
    size_t offsets_size = 4 * (b->count + 1);
    int32_t *offsets = left_out & 32 ? NULL : guarded_new(offsets_size);
    int32_t *response_offsets = left_out & 64 ? NULL : guarded_new(offsets_size);
    rst_packed_arrays packed = {a.tokens,   offsets,         a.loss_mask,     a.rollout_logprobs,
                                a.topk_ids, a.topk_logprobs, response_offsets};
    rst_error error;
    assert_ok(
        rst_batch_pack(f->snapshot, b->samples, b->count, &b->options, &packed, threads, &error),
        error);
    int32_t token = 0;
    int32_t response = 0;
    for (size_t i = 0; i < b->count; i++) {
        rst_sample_arrays one = arrays_at(&a, (size_t)token, (size_t)response, z->topk);
        model_compare_arrays(&one, &b->want[i]);
        assert_true(!offsets || offsets[i] == token);
        assert_true(!response_offsets || response_offsets[i] == response);
        token += (int32_t)b->want[i].sizes.token_count;
        response += (int32_t)b->want[i].sizes.response_count;
    }
    assert_true(!offsets || offsets[b->count] == token);
    assert_true(!response_offsets || response_offsets[b->count] == response);
    guarded_free(offsets, offsets_size);
    guarded_free(response_offsets, offsets_size);
    guarded_arrays_free(&a, z->token_count, z->response_count, z->topk);
}

/* What padding has to leave behind one sample's last element. */
static void check_padding(const rst_sample_arrays *row, const rst_sample *sizes,
                          const rst_padded_arrays *padded, size_t topk)
{
    const uint32_t minus_infinity = 0xFF800000u;
    for (size_t j = sizes->token_count; row->tokens && j < padded->length; j++) {
        assert_int_equal(row->tokens[j], padded->pad_id);
    }
    for (size_t j = sizes->response_count; j < padded->response_length; j++) {
        const float zero = 0.0f;
        assert_true(!row->loss_mask || row->loss_mask[j] == 0);
        model_compare_bytes(element(row->rollout_logprobs, j, 4), &zero, 4);
        for (size_t c = j * topk; c < (j + 1) * topk; c++) {
            assert_true(!row->topk_ids || row->topk_ids[c] == -1);
            model_compare_bytes(element(row->topk_logprobs, c, 4), &minus_infinity, 4);
        }
    }
}

static void check_padded(fixture *f, const batch *b, unsigned threads, unsigned left_out)
{
    size_t topk = b->size.topk;
    uint64_t length = b->size.token_max + model_random(&f->random, 5);
    uint64_t response = b->size.response_max + model_random(&f->random, 5);
    rst_sample_arrays a =
        guarded_arrays_new(b->count * length, b->count * response, b->size.topk, left_out);
    int32_t *counts = left_out & 32 ? NULL : guarded_new(4 * b->count);
    int32_t *response_counts = left_out & 64 ? NULL : guarded_new(4 * b->count);
    rst_padded_arrays padded = {length,
                                response,
                                (int32_t)model_random(&f->random, 9) - 1,
                                a.tokens,
                                counts,
                                a.loss_mask,
                                a.rollout_logprobs,
                                a.topk_ids,
                                a.topk_logprobs,
                                response_counts};
    rst_error error;
    assert_ok(
        rst_batch_pad(f->snapshot, b->samples, b->count, &b->options, &padded, threads, &error),
        error);
    for (size_t i = 0; i < b->count; i++) {
        const rst_sample *sizes = &b->want[i].sizes;
        rst_sample_arrays row = arrays_at(&a, i * length, i * response, topk);
        model_compare_arrays(&row, &b->want[i]);
        check_padding(&row, sizes, &padded, topk);
        assert_true(!counts || counts[i] == (int32_t)sizes->token_count);
        assert_true(!response_counts || response_counts[i] == (int32_t)sizes->response_count);
    }
    guarded_free(counts, 4 * b->count);
    guarded_free(response_counts, 4 * b->count);
    guarded_arrays_free(&a, b->count * length, b->count * response, b->size.topk);
}

static void batches_are_their_samples_side_by_side(void **state)
{
    fixture *f = *state;
    for (unsigned round = 0; round < 60; round++) {
        batch b;
        make_batch(f, &b);
        measure_batch(f, &b);
        unsigned left_out = round % 2 ? model_random(&f->random, 128) : 0;
        check_packed(f, &b, 1 + round % 3, left_out);
        check_padded(f, &b, 1 + round % 3, left_out);
        free_batch(&b);
    }
}

/* ---------------------------------------------------------------- large ones */

/* A batch of over 32 MiB, which is written around the caches and in many pieces, some of whose cuts
 * fall into rows that are widened. */
static void every_number_of_threads_writes_the_same(void **state)
{
    fixture *f = *state;
    model_session large = {.id = "large"};
    const uint32_t shapes[][2] = {{900, 32}, {700, 5}, {0, 0}, {1100, 32}, {333, 31}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        rst_turn turn = model_turn(&f->random, shapes[i][0], shapes[i][1], 50000);
        model_add(&large, turn, &f->random, i == 1, 200, 50000);
    }
    model_store_session(f->store, &large);
    rst_snapshot_close(f->snapshot);
    assert_int_equal(rst_snapshot_open(f->store, &f->snapshot, NULL), RST_OK);
    batch b = {.count = BATCH_MAX, .options = RST_SAMPLE_OPTIONS_DEFAULT};
    for (size_t i = 0; i < b.count; i++) {
        b.ids[i] = (rst_id){large.id, strlen(large.id)};
        b.want[i] = model_assemble(&large, &b.options, 0);
        assert_int_equal(b.want[i].code, RST_OK);
    }
    const rst_sample *one = &b.want[0].sizes;
    b.size = (rst_batch_size){BATCH_MAX * one->token_count, BATCH_MAX * one->response_count,
                              one->token_count, one->response_count, one->topk};
    assert_true(b.size.response_count * b.size.topk * 8 > UINT64_C(33) << 20);
    measure_batch(f, &b);
    const unsigned threads[] = {1, 2, 8, 64};
    for (size_t i = 0; i < sizeof threads / sizeof *threads; i++) {
        check_packed(f, &b, threads[i], 0);
        check_padded(f, &b, threads[i], 0);
    }
    free_batch(&b);
    model_session_free(&large);
}

/* ---------------------------------------------------------------- refusals */

static void a_batch_names_the_session_at_fault(void **state)
{
    fixture *f = *state;
    batch b;
    do {
        make_batch(f, &b);
        if (b.count < 3) {
            free_batch(&b);
        }
    } while (b.count < 3);
    size_t bad = b.count / 2;
    rst_id right = b.ids[bad];
    b.ids[bad] = (rst_id){"nobody", 6};
    rst_error error;
    rst_batch_size size;
    assert_code(
        RST_ERR_NOT_FOUND,
        rst_batch_measure(f->snapshot, b.ids, b.count, &b.options, b.samples, &size, &error),
        error);
    assert_int_equal(error.index, bad);
    assert_non_null(strstr(error.message, "nobody"));
    b.ids[bad] = right;
    measure_batch(f, &b);
    rst_padded_arrays padded = {.length = b.size.token_max, .response_length = b.size.response_max};
    b.samples[bad].token_count = padded.length + 1;
    assert_code(RST_ERR_ARGUMENT,
                rst_batch_pad(f->snapshot, b.samples, b.count, &b.options, &padded, 1, &error),
                error);
    assert_string_equal(error.field, "length");
    assert_int_equal(error.index, bad);
    b.samples[bad].token_count = b.want[bad].sizes.token_count;
    b.samples[bad].response_count = padded.response_length + 1;
    assert_code(RST_ERR_ARGUMENT,
                rst_batch_pad(f->snapshot, b.samples, b.count, &b.options, &padded, 1, &error),
                error);
    assert_string_equal(error.field, "response_length");
    b.options.topk = b.samples[bad].topk + 1;
    assert_code(RST_ERR_ARGUMENT,
                rst_batch_pad(f->snapshot, b.samples, b.count, &b.options, &padded, 1, &error),
                error);
    assert_string_equal(error.field, "topk");
    free_batch(&b);
}

static void an_empty_batch_is_one(void **state)
{
    fixture *f = *state;
    rst_batch_size size;
    rst_error error;
    assert_ok(rst_batch_measure(f->snapshot, NULL, 0, NULL, NULL, &size, &error), error);
    assert_int_equal(size.token_count, 0);
    assert_int_equal(size.topk, 0);
    int32_t offsets[2] = {7, 7};
    rst_packed_arrays packed = {.cu_seqlens = offsets};
    assert_ok(rst_batch_pack(f->snapshot, NULL, 0, NULL, &packed, 1, &error), error);
    assert_int_equal(offsets[0], 0);
    assert_int_equal(offsets[1], 7);
    rst_padded_arrays padded = {.length = 3};
    assert_ok(rst_batch_pad(f->snapshot, NULL, 0, NULL, &padded, 1, &error), error);
}

static void sums_over_31_bits_are_refused(void **state)
{
    fixture *f = *state;
    rst_sample samples[2] = {{.token_count = INT32_MAX, .response_count = 5}, {.token_count = 1}};
    int32_t offsets[3] = {7, 7, 7};
    rst_packed_arrays packed = {.cu_seqlens = offsets};
    rst_error error;
    assert_code(RST_ERR_LIMIT, rst_batch_pack(f->snapshot, samples, 2, NULL, &packed, 1, &error),
                error);
    assert_string_equal(error.field, "cu_seqlens");
    samples[0].token_count = 0;
    samples[1].response_count = UINT64_MAX;
    assert_code(RST_ERR_LIMIT, rst_batch_pack(f->snapshot, samples, 2, NULL, &packed, 1, &error),
                error);
    assert_string_equal(error.field, "cu_response_seqlens");
    assert_int_equal(offsets[0], 7);
    rst_padded_arrays padded = {.length = UINT64_MAX, .response_length = UINT64_MAX};
    assert_code(RST_ERR_LIMIT, rst_batch_pad(f->snapshot, samples, 2, NULL, &padded, 1, &error),
                error);
}

static void threads_are_1_to_64(void **state)
{
    fixture *f = *state;
    rst_packed_arrays packed = {.tokens = NULL};
    rst_padded_arrays padded = {.length = 0};
    const unsigned threads[] = {0, 65, UINT32_MAX};
    for (size_t i = 0; i < 3; i++) {
        rst_error error;
        assert_code(RST_ERR_ARGUMENT,
                    rst_batch_pack(f->snapshot, NULL, 0, NULL, &packed, threads[i], &error), error);
        assert_string_equal(error.field, "threads");
        assert_code(RST_ERR_ARGUMENT,
                    rst_batch_pad(f->snapshot, NULL, 0, NULL, &padded, threads[i], &error), error);
    }
    assert_int_equal(rst_batch_pack(f->snapshot, NULL, 0, NULL, &packed, 64, NULL), RST_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_sessions_give_what_the_definition_says),
        cmocka_unit_test(batches_are_their_samples_side_by_side),
        cmocka_unit_test(every_number_of_threads_writes_the_same),
        cmocka_unit_test(a_batch_names_the_session_at_fault),
        cmocka_unit_test(an_empty_batch_is_one),
        cmocka_unit_test(sums_over_31_bits_are_refused),
        cmocka_unit_test(threads_are_1_to_64),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
