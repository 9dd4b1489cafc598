#include "reply.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../base/fail.h"

#define VOCABULARY_SIZE 151936u
/* Odd and no multiple of 1187, so without a factor of the vocabulary's size: the candidates
 * `first + j * step` of a row are all different. */
#define CANDIDATE_STEP 3779u

static uint64_t next_random(uint64_t *state)
{
    uint64_t x = *state += UINT64_C(0x9E3779B97F4A7C15);
    x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
    return x ^ (x >> 31);
}

static double next_unit(uint64_t *state)
{
    return (double)(next_random(state) >> 11) * 0x1p-53;
}

typedef struct made_turn {
    uint32_t count;
    int32_t *tokens;      /* [count] */
    float *logprobs;      /* [count] */
    int32_t *topk_ids;    /* [count, BENCH_TOPK] */
    float *topk_logprobs; /* the same */
} made_turn;

static void turn_free(made_turn *turn)
{
    free(turn->tokens);
    free(turn->logprobs);
    free(turn->topk_ids);
    free(turn->topk_logprobs);
}

static bool turn_make(made_turn *turn, uint32_t count, uint64_t seed)
{
    size_t slots = (size_t)count * BENCH_TOPK;
    *turn = (made_turn){.count = count,
                        .tokens = malloc(count * sizeof(int32_t) + 1),
                        .logprobs = malloc(count * sizeof(float) + 1),
                        .topk_ids = malloc(slots * sizeof(int32_t) + 1),
                        .topk_logprobs = malloc(slots * sizeof(float) + 1)};
    if (!turn->tokens || !turn->logprobs || !turn->topk_ids || !turn->topk_logprobs) {
        return false;
    }
    for (uint32_t i = 0; i < count; i++) {
        uint32_t first = (uint32_t)(next_random(&seed) % VOCABULARY_SIZE);
        double logprob = -0.01 - 2.5 * next_unit(&seed);
        turn->tokens[i] = (int32_t)first;
        turn->logprobs[i] = (float)logprob;
        for (uint32_t j = 0; j < BENCH_TOPK; j++) {
            size_t at = (size_t)i * BENCH_TOPK + j;
            turn->topk_ids[at] = (int32_t)((first + j * CANDIDATE_STEP) % VOCABULARY_SIZE);
            turn->topk_logprobs[at] = (float)logprob;
            logprob -= 0.6 * next_unit(&seed);
        }
    }
    return true;
}

/* ---------------------------------------------------------------- its text */

/* A token's text and its bytes as numbers. */
static void write_token(output *out, int32_t id, double logprob)
{
    char text[8];
    size_t size = 0;
    text[size++] = ' ';
    for (uint32_t rest = (uint32_t)id; size < 2 + (uint32_t)id % 5; rest /= 26) {
        text[size++] = (char)('a' + rest % 26);
    }
    output_text(out, "{\"token\":\"");
    output_bytes(out, text, size);
    output_text(out, "\",\"bytes\":[");
    for (size_t i = 0; i < size; i++) {
        output_format(out, i ? ",%d" : "%d", text[i]);
    }
    /* Engines print the float as the double that it is: with all its digits. */
    output_format(out, "],\"logprob\":%.17g", logprob);
}

static void write_content(output *out, const made_turn *turn, bool nested)
{
    for (uint32_t i = 0; i < turn->count; i++) {
        output_text(out, i ? "," : "");
        write_token(out, turn->tokens[i], (double)turn->logprobs[i]);
        output_text(out, ",\"top_logprobs\":[");
        for (size_t j = 0; j < (nested ? BENCH_TOPK : 0); j++) {
            size_t at = (size_t)i * BENCH_TOPK + j;
            output_text(out, j ? "," : "");
            write_token(out, turn->topk_ids[at], (double)turn->topk_logprobs[at]);
            output_text(out, "}");
        }
        output_text(out, "]}");
    }
}

static void write_base64(output *out, const char *name, const void *bytes, size_t size,
                         const char *dtype)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const unsigned char *in = bytes;
    output_format(out, ",\"%s\":\"", name);
    for (size_t i = 0; i < size; i += 3) {
        size_t left = size - i < 3 ? size - i : 3;
        uint32_t group = (uint32_t)in[i] << 16;
        group |= left > 1 ? (uint32_t)in[i + 1] << 8 : 0;
        group |= left > 2 ? in[i + 2] : 0;
        char four[4] = {digits[group >> 18], digits[group >> 12 & 63],
                        left > 1 ? digits[group >> 6 & 63] : '=',
                        left > 2 ? digits[group & 63] : '='};
        output_bytes(out, four, sizeof four);
    }
    output_format(out, "\",\"%s_dtype\":\"%s\"", name, dtype);
}

static void write_flat(output *out, const made_turn *turn)
{
    size_t slots = (size_t)turn->count * BENCH_TOPK;
    write_base64(out, "output_top_logprobs_idx_flat_b64", turn->topk_ids, slots * sizeof(int32_t),
                 "int32");
    write_base64(out, "output_top_logprobs_val_flat_b64", turn->topk_logprobs,
                 slots * sizeof(float), "float32");
    output_format(out,
                  ",\"output_top_logprobs_shape\":[%u,%d],\"output_top_logprobs_null_prefix\":0",
                  turn->count, BENCH_TOPK);
}

static void write_nested(output *out, const made_turn *turn)
{
    output_text(out, ",\"output_top_logprobs\":[");
    for (uint32_t i = 0; i < turn->count; i++) {
        for (size_t j = 0; j < BENCH_TOPK; j++) {
            size_t at = (size_t)i * BENCH_TOPK + j;
            output_text(out, j ? "," : i ? ",[" : "[");
            output_format(out, "[%.17g,%d,null]", (double)turn->topk_logprobs[at],
                          turn->topk_ids[at]);
        }
        output_text(out, "]");
    }
    output_text(out, "]");
}

static void write_reply(output *out, const made_turn *turn, bool nested)
{
    output_text(out, "{\"id\":\"5f1c7a3e9b0d4c62\",\"object\":\"chat.completion\",\"created\":"
                     "1764400000,\"model\":\"default\",\"choices\":[{\"index\":0,\"message\":{"
                     "\"role\":\"assistant\",\"content\":\"");
    for (uint32_t i = 0; i < turn->count; i++) {
        output_format(out, i % 40 == 39 ? "%c\\n" : " w%c", 'a' + turn->tokens[i] % 26);
    }
    output_text(out, "\",\"reasoning_content\":null,\"tool_calls\":null},\"logprobs\":{"
                     "\"content\":[");
    write_content(out, turn, nested);
    output_format(out,
                  "]},\"finish_reason\":\"stop\",\"matched_stop\":151645,\"meta_info\":{\"id\":"
                  "\"5f1c7a3e9b0d4c62\",\"finish_reason\":{\"type\":\"stop\",\"matched\":151645},"
                  "\"prompt_tokens\":900,\"weight_version\":\"17\",\"completion_tokens\":%u,"
                  "\"cached_tokens\":0,\"e2e_latency\":21.25,\"output_token_logprobs\":[",
                  turn->count);
    for (uint32_t i = 0; i < turn->count; i++) {
        output_format(out, i ? ",[%.17g,%d,null]" : "[%.17g,%d,null]", (double)turn->logprobs[i],
                      turn->tokens[i]);
    }
    output_text(out, "]");
    if (nested) {
        write_nested(out, turn);
    } else {
        write_flat(out, turn);
    }
    output_format(out,
                  "}}],\"usage\":{\"prompt_tokens\":900,\"total_tokens\":%u,"
                  "\"completion_tokens\":%u,\"prompt_tokens_details\":null}}",
                  turn->count + 900, turn->count);
}

bool bench_make_reply(output *out, uint32_t token_count, bool nested, uint64_t seed)
{
    made_turn turn;
    bool good = turn_make(&turn, token_count, seed);
    if (good) {
        write_reply(out, &turn, nested);
    }
    turn_free(&turn);
    if (!good || out->out_of_memory) {
        fail("memory", "no memory for a reply of %u tokens", token_count);
        return false;
    }
    return true;
}
