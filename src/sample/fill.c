/* Samples and batches, written into the caller's arrays. */
#include "internal.h"

#include "../error.h"

/* ---------------------------------------------------------------- one sample */

/* Where one sample goes: the sample's own first elements; NULL leaves an array out. */
typedef struct filling {
    rst_plan *plan;
    const rst_sample *sample;
    rst_sample_arrays to;
    uint32_t topk;        /* of the arrays */
    uint64_t token_at;    /* tokens planned so far */
    uint64_t response_at; /* positions of the response planned so far */
} filling;

/* Element `index` of an array that may be left out. */
static void *element(void *array, uint64_t index, size_t size)
{
    return array ? (unsigned char *)array + index * size : NULL;
}

/* The response's next `count` positions were not generated: an observation, or padding. */
static void fill_response(const filling *f, uint64_t count)
{
    uint64_t at = f->response_at;
    uint64_t slots = count * f->topk;
    rst_plan_fill(f->plan, element(f->to.loss_mask, at, 1), RST_PATTERN_ZERO, count);
    rst_plan_fill(f->plan, element(f->to.rollout_logprobs, at, 4), RST_PATTERN_ZERO, 4 * count);
    rst_plan_fill(f->plan, element(f->to.topk_ids, at * f->topk, 4), RST_PATTERN_NO_ID, 4 * slots);
    rst_plan_fill(f->plan, element(f->to.topk_logprobs, at * f->topk, 4), RST_PATTERN_NO_PROB,
                  4 * slots);
}

static void add_prompt(filling *f, const rst_turn *turn)
{
    uint64_t count = turn->prompt_count;
    rst_plan_copy(f->plan, element(f->to.tokens, f->token_at, 4), turn->prompt_ids, 4 * count);
    f->token_at += count;
}

static void add_observation(filling *f, const rst_turn *turn)
{
    fill_response(f, turn->prompt_count);
    f->response_at += turn->prompt_count;
    add_prompt(f, turn);
}

static void add_output(filling *f, const rst_turn *turn, uint64_t kept)
{
    uint64_t at = f->response_at;
    rst_plan *plan = f->plan;
    rst_plan_copy(plan, element(f->to.tokens, f->token_at, 4), turn->token_ids, 4 * kept);
    rst_plan_fill(plan, element(f->to.loss_mask, at, 1), RST_PATTERN_MASK, kept);
    rst_plan_copy(plan, element(f->to.rollout_logprobs, at, 4), turn->token_logprobs, 4 * kept);
    rst_plan_rows(plan, element(f->to.topk_ids, at * f->topk, 4), f->topk, turn->topk_ids,
                  turn->topk, kept, RST_PATTERN_NO_ID);
    rst_plan_rows(plan, element(f->to.topk_logprobs, at * f->topk, 4), f->topk, turn->topk_logprobs,
                  turn->topk, kept, RST_PATTERN_NO_PROB);
    f->token_at += kept;
    f->response_at += kept;
}

static int not_as_measured(const rst_sample *sample, rst_error *error)
{
    char id[RST_SHOWN_ID_SIZE];
    return rst_fail(error, RST_ERR_CORRUPT, "sample",
                    "session \"%s\" is not what was measured: either the store is damaged, or "
                    "sizes and arrays were not asked for in one snapshot",
                    rst_shown_id(sample->session.id, sample->session.id_size, id));
}

/* Does the turn have room in what the sample measured?  What was read from the map twice can have
 * changed in between. */
static bool has_room(const filling *f, const rst_turn *turn, bool first, uint64_t kept)
{
    uint64_t token_left = f->sample->token_count - f->token_at;
    uint64_t response_left = f->sample->response_count - f->response_at;
    uint64_t response = kept + (first ? 0 : turn->prompt_count);
    return turn->topk <= f->topk && kept + turn->prompt_count <= token_left &&
           response <= response_left;
}

/* Plan the sample's turns.  A turn is planned when the one after it is known: that one says how
 * many of its tokens are trimmed. */
static int plan_sample(rst_snapshot *snapshot, filling *f, rst_error *error)
{
    const rst_sample *sample = f->sample;
    rst_walk walk = {.snapshot = snapshot, .session = &sample->session};
    rst_turn turn;
    int code = rst_walk_next(&walk, &turn, error);
    for (uint32_t i = 0; !code && i < sample->turn_count; i++) {
        rst_turn next = {.trimmed_count = 0};
        if (i + 1 < sample->turn_count) {
            code = rst_walk_next(&walk, &next, error);
            if (code) {
                break;
            }
        }
        uint64_t kept = turn.token_count - next.trimmed_count;
        if (!has_room(f, &turn, i == 0, kept)) {
            return not_as_measured(sample, error);
        }
        if (i == 0) {
            add_prompt(f, &turn);
        } else {
            add_observation(f, &turn);
        }
        add_output(f, &turn, kept);
        turn = next;
    }
    if (!code && (f->token_at != sample->token_count || f->response_at != sample->response_count)) {
        return not_as_measured(sample, error);
    }
    return code;
}

/* Carry the plan out when all went well, and free it. */
static int finish(rst_plan *plan, int code, unsigned threads, rst_error *error)
{
    if (!code && plan->out_of_memory) {
        code = rst_fail(error, RST_ERR_MEMORY, NULL, "no memory for %zu moves", plan->count);
    }
    if (!code) {
        rst_plan_run(plan, threads);
    }
    rst_plan_free(plan);
    return code;
}

int rst_sample_fill(rst_snapshot *snapshot, const rst_sample *sample,
                    const rst_sample_options *options, const rst_sample_arrays *arrays,
                    rst_error *error)
{
    rst_error_clear(error);
    rst_sample_options wanted;
    int code = rst_sample_options_of(options, &wanted, error);
    if (code) {
        return code;
    }
    if (wanted.topk && wanted.topk != sample->topk) {
        return rst_fail(error, RST_ERR_ARGUMENT, "topk",
                        "topk %u, but the sample was measured for %u", wanted.topk, sample->topk);
    }
    rst_plan plan = {.moves = NULL};
    filling f = {.plan = &plan, .sample = sample, .to = *arrays, .topk = sample->topk};
    code = plan_sample(snapshot, &f, error);
    return finish(&plan, code, 1, error);
}

/* ---------------------------------------------------------------- batches */

#define COUNT_MAX INT32_MAX /* what cu_seqlens and counts can say */

/* What packing and padding check alike, and K. */
static int check_batch(const rst_sample *samples, size_t count, const rst_sample_options *options,
                       unsigned threads, uint32_t *topk, rst_error *error)
{
    rst_sample_options wanted;
    int code = rst_sample_options_of(options, &wanted, error);
    if (code) {
        return code;
    }
    if (threads < 1 || threads > RST_THREADS_MAX) {
        return rst_fail(error, RST_ERR_ARGUMENT, "threads", "%u threads: 1 to %d", threads,
                        RST_THREADS_MAX);
    }
    *topk = wanted.topk;
    for (size_t i = 0; i < count; i++) {
        if (wanted.topk && samples[i].topk != wanted.topk) {
            rst_fail(error, RST_ERR_ARGUMENT, "topk", "topk %u, but sample %zu was measured for %u",
                     wanted.topk, i, samples[i].topk);
            if (error) {
                error->index = (int64_t)i;
            }
            return RST_ERR_ARGUMENT;
        }
        *topk = samples[i].topk > *topk ? samples[i].topk : *topk;
    }
    return RST_OK;
}

static int check_sum(const char *what, const rst_sample *samples, size_t count, bool response,
                     rst_error *error)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < count; i++) {
        uint64_t added = response ? samples[i].response_count : samples[i].token_count;
        /* Refused at the first one over, so that the sum cannot overflow. */
        if (added > COUNT_MAX || sum + added > COUNT_MAX) {
            return rst_fail(error, RST_ERR_LIMIT, what,
                            "the batch has over %d %s: take fewer sessions", COUNT_MAX,
                            response ? "positions of responses" : "tokens");
        }
        sum += added;
    }
    return RST_OK;
}

/* Plan sample i of a batch at these places. */
static int plan_place(rst_snapshot *snapshot, rst_plan *plan, const rst_sample *samples, size_t i,
                      const rst_sample_arrays *to, uint32_t topk, filling *f, rst_error *error)
{
    *f = (filling){.plan = plan, .sample = &samples[i], .to = *to, .topk = topk};
    int code = plan_sample(snapshot, f, error);
    if (code && error) {
        error->index = (int64_t)i;
    }
    return code;
}

static void write_offsets(int32_t *offsets, const rst_sample *samples, size_t count, bool response)
{
    if (!offsets) {
        return;
    }
    uint64_t sum = 0;
    offsets[0] = 0;
    for (size_t i = 0; i < count; i++) {
        sum += response ? samples[i].response_count : samples[i].token_count;
        offsets[i + 1] = (int32_t)sum; /* check_sum */
    }
}

int rst_batch_pack(rst_snapshot *snapshot, const rst_sample *samples, size_t count,
                   const rst_sample_options *options, const rst_packed_arrays *arrays,
                   unsigned threads, rst_error *error)
{
    rst_error_clear(error);
    uint32_t topk = 0;
    int code = check_batch(samples, count, options, threads, &topk, error);
    if (!code) {
        code = check_sum("cu_seqlens", samples, count, false, error);
    }
    if (!code) {
        code = check_sum("cu_response_seqlens", samples, count, true, error);
    }
    rst_plan plan = {.moves = NULL};
    uint64_t token_at = 0;
    uint64_t response_at = 0;
    for (size_t i = 0; !code && i < count; i++) {
        rst_sample_arrays to = {
            .tokens = element(arrays->tokens, token_at, 4),
            .loss_mask = element(arrays->loss_mask, response_at, 1),
            .rollout_logprobs = element(arrays->rollout_logprobs, response_at, 4),
            .topk_ids = element(arrays->topk_ids, response_at * topk, 4),
            .topk_logprobs = element(arrays->topk_logprobs, response_at * topk, 4),
        };
        filling f;
        code = plan_place(snapshot, &plan, samples, i, &to, topk, &f, error);
        token_at += samples[i].token_count;
        response_at += samples[i].response_count;
    }
    code = finish(&plan, code, threads, error);
    if (!code) {
        write_offsets(arrays->cu_seqlens, samples, count, false);
        write_offsets(arrays->cu_response_seqlens, samples, count, true);
    }
    return code;
}

/* Do the padded arrays hold every sample, and can their sizes be counted? */
static int check_padded(const rst_sample *samples, size_t count, const rst_padded_arrays *arrays,
                        uint32_t topk, rst_error *error)
{
    for (size_t i = 0; i < count; i++) {
        bool tokens = samples[i].token_count > arrays->length;
        if (tokens || samples[i].response_count > arrays->response_length) {
            rst_fail(error, RST_ERR_ARGUMENT, tokens ? "length" : "response_length",
                     "sample %zu has %llu tokens and a response of %llu: rows of %llu and %llu "
                     "do not hold it",
                     i, (unsigned long long)samples[i].token_count,
                     (unsigned long long)samples[i].response_count,
                     (unsigned long long)arrays->length,
                     (unsigned long long)arrays->response_length);
            if (error) {
                error->index = (int64_t)i;
            }
            return RST_ERR_ARGUMENT;
        }
    }
    uint64_t size;
    bool over =
        arrays->length > COUNT_MAX || arrays->response_length > COUNT_MAX ||
        __builtin_mul_overflow(arrays->length * 4, count, &size) ||
        __builtin_mul_overflow(arrays->response_length * 4 * (topk ? topk : 1), count, &size) ||
        size > PTRDIFF_MAX;
    return over ? rst_fail(error, RST_ERR_LIMIT, "length",
                           "%zu rows of %llu tokens and %llu positions are over the limit", count,
                           (unsigned long long)arrays->length,
                           (unsigned long long)arrays->response_length)
                : RST_OK;
}

/* The rest of a padded row. */
static void pad_rest(filling *f, const rst_padded_arrays *arrays)
{
    uint32_t pad = (uint32_t)arrays->pad_id;
    rst_plan_fill(f->plan, element(f->to.tokens, f->token_at, 4), pad,
                  4 * (arrays->length - f->token_at));
    fill_response(f, arrays->response_length - f->response_at);
}

static void write_counts(int32_t *counts, const rst_sample *samples, size_t count, bool response)
{
    for (size_t i = 0; counts && i < count; i++) {
        /* check_padded: at most the row's length */
        counts[i] = (int32_t)(response ? samples[i].response_count : samples[i].token_count);
    }
}

int rst_batch_pad(rst_snapshot *snapshot, const rst_sample *samples, size_t count,
                  const rst_sample_options *options, const rst_padded_arrays *arrays,
                  unsigned threads, rst_error *error)
{
    rst_error_clear(error);
    uint32_t topk = 0;
    int code = check_batch(samples, count, options, threads, &topk, error);
    if (!code) {
        code = check_padded(samples, count, arrays, topk, error);
    }
    rst_plan plan = {.moves = NULL};
    for (size_t i = 0; !code && i < count; i++) {
        uint64_t row = i * arrays->response_length;
        rst_sample_arrays to = {
            .tokens = element(arrays->tokens, i * arrays->length, 4),
            .loss_mask = element(arrays->loss_mask, row, 1),
            .rollout_logprobs = element(arrays->rollout_logprobs, row, 4),
            .topk_ids = element(arrays->topk_ids, row * topk, 4),
            .topk_logprobs = element(arrays->topk_logprobs, row * topk, 4),
        };
        filling f;
        code = plan_place(snapshot, &plan, samples, i, &to, topk, &f, error);
        if (!code) {
            pad_rest(&f, arrays);
        }
    }
    code = finish(&plan, code, threads, error);
    if (!code) {
        write_counts(arrays->token_counts, samples, count, false);
        write_counts(arrays->response_counts, samples, count, true);
    }
    return code;
}
