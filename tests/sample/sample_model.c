#include "sample_model.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "support.h"

static void *new_array(size_t count, size_t size)
{
    void *array = calloc(count ? count : 1, size);
    assert_non_null(array);
    return array;
}

/* ---------------------------------------------------------------- a store */

rst_store *model_store_open(void)
{
    char *folder = support_make_folder();
    rst_create_options create = {.capacity_size = UINT64_C(64) << 20};
    rst_store *store = NULL;
    rst_error error;
    assert_ok(rst_store_open(folder, RST_OPEN_CREATE, &create, &store, &error), error);
    free(folder);
    return store;
}

void model_store_close(rst_store *store)
{
    char *folder = strdup(rst_store_path(store));
    rst_error error;
    assert_ok(rst_store_close(store, &error), error);
    support_remove_folder(folder);
}

/* ---------------------------------------------------------------- sessions */

uint32_t model_random(uint64_t *state, uint32_t limit)
{
    return (uint32_t)(support_random(state) % limit);
}

static float random_logprob(uint64_t *state)
{
    return -(float)(1 + model_random(state, 1u << 20)) / 65536.0f;
}

/* Distinct ids, and sometimes unused slots: at the row's end, or a whole row. */
static void fill_row(uint64_t *state, int32_t *ids, float *logprobs, uint32_t k)
{
    uint32_t used = k;
    if (k && model_random(state, 4) == 0) {
        used = model_random(state, k + 1);
    }
    int32_t id = (int32_t)model_random(state, 1000);
    for (uint32_t j = 0; j < k; j++) {
        ids[j] = j < used ? id : -1;
        logprobs[j] = j < used ? random_logprob(state) : -INFINITY;
        id += 1 + (int32_t)model_random(state, 100);
    }
}

rst_turn model_turn(uint64_t *state, uint32_t n, uint32_t k, uint32_t vocabulary)
{
    int32_t *token_ids = new_array(n, 4);
    float *token_logprobs = new_array(n, 4);
    int32_t *topk_ids = new_array((size_t)n * k, 4);
    float *topk_logprobs = new_array((size_t)n * k, 4);
    for (uint32_t i = 0; i < n; i++) {
        token_ids[i] = (int32_t)model_random(state, vocabulary);
        token_logprobs[i] = random_logprob(state);
        fill_row(state, topk_ids + (size_t)i * k, topk_logprobs + (size_t)i * k, k);
    }
    return (rst_turn){.token_count = n,
                      .topk = k,
                      .token_ids = token_ids,
                      .token_logprobs = token_logprobs,
                      .topk_ids = topk_ids,
                      .topk_logprobs = topk_logprobs,
                      .temperature = NAN,
                      .finish = RST_FINISH_STOP};
}

int32_t *model_sequence(const model_session *session, uint32_t turn, uint32_t *count)
{
    if (turn == 0) {
        *count = 0;
        return new_array(0, 4);
    }
    const rst_turn *last = &session->turns[turn - 1];
    *count = last->prompt_count + last->token_count;
    int32_t *tokens = new_array(*count, 4);
    if (last->prompt_count) {
        memcpy(tokens, last->prompt_ids, 4 * (size_t)last->prompt_count);
    }
    memcpy(tokens + last->prompt_count, last->token_ids, 4 * (size_t)last->token_count);
    return tokens;
}

void model_add(model_session *session, rst_turn turn, uint64_t *state, uint32_t trimmed,
               uint32_t added, uint32_t vocabulary)
{
    assert_true(session->turn_count < MODEL_TURNS_MAX);
    uint32_t before;
    int32_t *tokens = model_sequence(session, session->turn_count, &before);
    assert_true(trimmed <= before);
    turn.prompt_count = before - trimmed + added;
    int32_t *prompt = new_array(turn.prompt_count, 4);
    memcpy(prompt, tokens, 4 * (size_t)(before - trimmed));
    for (uint32_t i = before - trimmed; i < turn.prompt_count; i++) {
        prompt[i] = (int32_t)model_random(state, vocabulary);
    }
    free(tokens);
    turn.prompt_ids = prompt;
    session->turns[session->turn_count++] = turn;
}

void model_session_free(model_session *session)
{
    for (uint32_t i = 0; i < session->turn_count; i++) {
        const rst_turn *t = &session->turns[i];
        const void *arrays[] = {t->token_ids, t->token_logprobs, t->topk_ids, t->topk_logprobs,
                                t->prompt_ids};
        for (size_t j = 0; j < sizeof arrays / sizeof *arrays; j++) {
            free((void *)(uintptr_t)arrays[j]);
        }
    }
    session->turn_count = 0;
}

void model_store_session(rst_store *store, const model_session *session)
{
    rst_record *record = rst_record_new();
    assert_non_null(record);
    rst_error error;
    size_t id_size = strlen(session->id);
    for (uint32_t i = 0; i < session->turn_count; i++) {
        assert_ok(rst_record_set(record, &session->turns[i], &error), error);
        assert_ok(rst_put(store, session->id, id_size, i, record, 0, 0, &error), error);
    }
    rst_outcome outcome = {RST_STATUS_COMPLETED, NAN, RST_NO_INDEX, RST_NO_INDEX};
    assert_ok(rst_seal(store, session->id, id_size, &outcome, 0, &error), error);
    rst_record_free(record);
}

/* ---------------------------------------------------------------- samples */

/* One token of the sequence, with all that is known about it. */
typedef struct position {
    int32_t token;
    bool generated;
    float logprob;
    uint32_t k;
    const int32_t *ids;
    const float *logprobs;
} position;

typedef struct sequence {
    position *positions;
    uint32_t count;
    uint32_t trimmed;
} sequence;

static void append_prompt(sequence *s, const rst_turn *turn, uint32_t from)
{
    for (uint32_t i = from; i < turn->prompt_count; i++) {
        s->positions[s->count++] = (position){.token = turn->prompt_ids[i]};
    }
}

static void append_output(sequence *s, const rst_turn *turn)
{
    for (uint32_t i = 0; i < turn->token_count; i++) {
        s->positions[s->count++] = (position){
            .token = turn->token_ids[i],
            .generated = true,
            .logprob = turn->token_logprobs[i],
            .k = turn->topk,
            .ids = turn->topk_ids + (size_t)i * turn->topk,
            .logprobs = turn->topk_logprobs + (size_t)i * turn->topk,
        };
    }
}

/* The first `turns` turns, one after another; false when a prompt does not fit, with *bad. */
static bool join(const model_session *session, uint32_t turns, uint32_t trim_max, sequence *s,
                 uint32_t *bad)
{
    uint64_t most = 0;
    for (uint32_t t = 0; t < session->turn_count; t++) {
        most += session->turns[t].prompt_count + session->turns[t].token_count;
    }
    *s = (sequence){.positions = new_array(most, sizeof(position))};
    uint32_t output = 0;
    for (uint32_t t = 0; t < turns; t++) {
        const rst_turn *turn = &session->turns[t];
        uint32_t common = 0;
        while (common < s->count && common < turn->prompt_count &&
               s->positions[common].token == turn->prompt_ids[common]) {
            common++;
        }
        uint32_t trimmed = s->count - common;
        if (trimmed > output || trimmed > trim_max) {
            *bad = t;
            return false;
        }
        s->count = common;
        s->trimmed += trimmed;
        append_prompt(s, turn, common);
        append_output(s, turn);
        output = turn->token_count;
    }
    return true;
}

/* How many of its first turns the sample has; 0 when not even one fits. */
static uint32_t turns_that_fit(const model_session *session, const rst_sample_options *options)
{
    for (uint32_t turns = session->turn_count; turns > 0; turns--) {
        sequence s;
        uint32_t bad;
        join(session, turns, options->trim_max, &s, &bad);
        free(s.positions);
        if (options->token_max == 0 || s.count <= options->token_max) {
            return turns;
        }
    }
    return 0;
}

static void flatten(const sequence *s, uint32_t prompt_count, uint32_t topk, rst_sample_arrays *to)
{
    size_t r = s->count - prompt_count;
    to->tokens = new_array(s->count, 4);
    to->loss_mask = new_array(r, 1);
    to->rollout_logprobs = new_array(r, 4);
    to->topk_ids = new_array(r * topk, 4);
    to->topk_logprobs = new_array(r * topk, 4);
    for (size_t i = 0; i < s->count; i++) {
        to->tokens[i] = s->positions[i].token;
    }
    for (size_t i = 0; i < r; i++) {
        const position *p = &s->positions[prompt_count + i];
        to->loss_mask[i] = p->generated;
        to->rollout_logprobs[i] = p->logprob;
        for (uint32_t j = 0; j < topk; j++) {
            to->topk_ids[i * topk + j] = j < p->k ? p->ids[j] : -1;
            to->topk_logprobs[i * topk + j] = j < p->k ? p->logprobs[j] : -INFINITY;
        }
    }
}

model_sample model_assemble(const model_session *session, const rst_sample_options *options,
                            uint32_t topk)
{
    model_sample out = {.code = RST_OK};
    sequence s;
    if (!join(session, session->turn_count, options->trim_max, &s, &out.bad)) {
        free(s.positions);
        out.code = RST_ERR_ALIGNMENT;
        return out;
    }
    free(s.positions);
    rst_sample *sizes = &out.sizes;
    sizes->turn_count = turns_that_fit(session, options);
    for (uint32_t t = 0; t < sizes->turn_count; t++) {
        if (session->turns[t].topk > sizes->topk) {
            sizes->topk = session->turns[t].topk;
            out.bad = t;
        }
    }
    if (sizes->turn_count == 0 || (options->topk && sizes->topk > options->topk)) {
        out.code = RST_ERR_LIMIT;
        return out;
    }
    join(session, sizes->turn_count, options->trim_max, &s, &out.bad);
    sizes->topk = topk ? topk : options->topk ? options->topk : sizes->topk;
    sizes->prompt_count = session->turns[0].prompt_count;
    sizes->token_count = s.count;
    sizes->response_count = s.count - sizes->prompt_count;
    for (uint32_t i = 0; i < s.count; i++) {
        sizes->generated_count += s.positions[i].generated;
    }
    sizes->turns_left_out = session->turn_count - sizes->turn_count;
    sizes->trimmed_count = s.trimmed;
    flatten(&s, session->turns[0].prompt_count, sizes->topk, &out.arrays);
    free(s.positions);
    return out;
}

void model_sample_free(model_sample *sample)
{
    free(sample->arrays.tokens);
    free(sample->arrays.loss_mask);
    free(sample->arrays.rollout_logprobs);
    free(sample->arrays.topk_ids);
    free(sample->arrays.topk_logprobs);
}

void model_compare_sizes(const rst_sample *got, const model_sample *want)
{
    const rst_sample *w = &want->sizes;
    assert_int_equal(got->token_count, w->token_count);
    assert_int_equal(got->prompt_count, w->prompt_count);
    assert_int_equal(got->response_count, w->response_count);
    assert_int_equal(got->generated_count, w->generated_count);
    assert_int_equal(got->turn_count, w->turn_count);
    assert_int_equal(got->turns_left_out, w->turns_left_out);
    assert_int_equal(got->trimmed_count, w->trimmed_count);
}

void model_compare_bytes(const void *got, const void *want, size_t size)
{
    if (got && size) {
        assert_memory_equal(got, want, size);
    }
}

void model_compare_arrays(const rst_sample_arrays *got, const model_sample *want)
{
    size_t t = want->sizes.token_count;
    size_t r = want->sizes.response_count;
    size_t k = want->sizes.topk;
    model_compare_bytes(got->tokens, want->arrays.tokens, 4 * t);
    model_compare_bytes(got->loss_mask, want->arrays.loss_mask, r);
    model_compare_bytes(got->rollout_logprobs, want->arrays.rollout_logprobs, 4 * r);
    model_compare_bytes(got->topk_ids, want->arrays.topk_ids, 4 * r * k);
    model_compare_bytes(got->topk_logprobs, want->arrays.topk_logprobs, 4 * r * k);
}

/* ---------------------------------------------------------------- guarded arrays */

#define GUARD_SIZE 60
#define GUARD_BYTE 0xA5
#define UNTOUCHED_BYTE 0x5A

void *guarded_new(size_t size)
{
    unsigned char *memory = malloc(size + 2 * GUARD_SIZE);
    assert_non_null(memory);
    memset(memory, GUARD_BYTE, size + 2 * GUARD_SIZE);
    memset(memory + GUARD_SIZE, UNTOUCHED_BYTE, size);
    return memory + GUARD_SIZE;
}

static void check_bytes(const unsigned char *bytes, size_t size, unsigned char value)
{
    for (size_t i = 0; i < size; i++) {
        if (bytes[i] != value) {
            fail_msg("byte %zu of %zu is 0x%02x, not 0x%02x", i, size, bytes[i], value);
        }
    }
}

void guarded_check(const void *array, size_t size)
{
    const unsigned char *bytes = array;
    check_bytes(bytes - GUARD_SIZE, GUARD_SIZE, GUARD_BYTE);
    check_bytes(bytes + size, GUARD_SIZE, GUARD_BYTE);
}

void guarded_check_untouched(const void *array, size_t size)
{
    guarded_check(array, size);
    check_bytes(array, size, UNTOUCHED_BYTE);
}

void guarded_free(void *array, size_t size)
{
    if (array) {
        guarded_check(array, size);
        free((unsigned char *)array - GUARD_SIZE);
    }
}

/* The five arrays as a list, so that each is looked after alike. */
enum { ARRAY_COUNT = 5 };

static void array_sizes(uint64_t token_count, uint64_t response_count, uint32_t topk,
                        size_t sizes[ARRAY_COUNT])
{
    sizes[0] = 4 * token_count;
    sizes[1] = response_count;
    sizes[2] = 4 * response_count;
    sizes[3] = 4 * response_count * topk;
    sizes[4] = 4 * response_count * topk;
}

rst_sample_arrays guarded_arrays_new(uint64_t token_count, uint64_t response_count, uint32_t topk,
                                     unsigned left_out)
{
    size_t sizes[ARRAY_COUNT];
    array_sizes(token_count, response_count, topk, sizes);
    void *a[ARRAY_COUNT];
    for (unsigned i = 0; i < ARRAY_COUNT; i++) {
        a[i] = left_out >> i & 1 ? NULL : guarded_new(sizes[i]);
    }
    return (rst_sample_arrays){a[0], a[1], a[2], a[3], a[4]};
}

void guarded_arrays_check_untouched(const rst_sample_arrays *arrays, uint64_t token_count,
                                    uint64_t response_count, uint32_t topk)
{
    size_t sizes[ARRAY_COUNT];
    array_sizes(token_count, response_count, topk, sizes);
    const void *a[ARRAY_COUNT] = {arrays->tokens, arrays->loss_mask, arrays->rollout_logprobs,
                                  arrays->topk_ids, arrays->topk_logprobs};
    for (unsigned i = 0; i < ARRAY_COUNT; i++) {
        if (a[i]) {
            guarded_check_untouched(a[i], sizes[i]);
        }
    }
}

void guarded_arrays_free(rst_sample_arrays *arrays, uint64_t token_count, uint64_t response_count,
                         uint32_t topk)
{
    size_t sizes[ARRAY_COUNT];
    array_sizes(token_count, response_count, topk, sizes);
    guarded_free(arrays->tokens, sizes[0]);
    guarded_free(arrays->loss_mask, sizes[1]);
    guarded_free(arrays->rollout_logprobs, sizes[2]);
    guarded_free(arrays->topk_ids, sizes[3]);
    guarded_free(arrays->topk_logprobs, sizes[4]);
    *arrays = (rst_sample_arrays){NULL, NULL, NULL, NULL, NULL};
}
