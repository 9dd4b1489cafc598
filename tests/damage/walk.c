#include "walk.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define must(condition) must_be((condition), #condition, __LINE__)

static void must_be(bool condition, const char *text, int line)
{
    if (!condition) {
        fprintf(stderr, "walk.c:%d: not so: %s\n", line, text);
        abort();
    }
}

typedef struct walker {
    rst_store *store;
    rst_snapshot *snapshot;
    const unsigned char *map;
    size_t map_size;
    walk_result *result;
} walker;

/* An error of the kinds that a damaged store may give, with words in it. */
static void must_be_ordinary(int code, const rst_error *error)
{
    must(code == error->code);
    must(error->message[0] != '\0' && strlen(error->message) < sizeof error->message);
    switch (code) {
    case RST_ERR_NOT_FOUND:
    case RST_ERR_ALIGNMENT:
    case RST_ERR_LIMIT:
    case RST_ERR_MEMORY:
    case RST_ERR_NOT_STORE:
    case RST_ERR_VERSION:
    case RST_ERR_CORRUPT:
    case RST_ERR_NO_SPACE:
        return;
    default:
        fprintf(stderr, "%s: %s\n", rst_code_name(code), error->message);
        abort();
    }
}

static void failed(walker *w, int code, const rst_error *error)
{
    must_be_ordinary(code, error);
    w->result->failed_count++;
}

/* ---------------------------------------------------------------- bytes */

/* FNV-1a: every byte counts, and none may be outside the map. */
static uint64_t mix(uint64_t digest, const void *bytes, size_t size)
{
    const unsigned char *at = bytes;
    for (size_t i = 0; i < size; i++) {
        digest = (digest ^ at[i]) * UINT64_C(0x100000001B3);
    }
    return digest;
}

static uint64_t mix_mapped(const walker *w, uint64_t digest, const void *bytes, uint64_t size)
{
    if (size == 0) {
        return digest;
    }
    const unsigned char *at = bytes;
    must(at >= w->map && size <= w->map_size && (size_t)(at - w->map) <= w->map_size - size);
    return mix(digest, bytes, size);
}

static void digest_turn(walker *w, const rst_session *s, const rst_turn *t)
{
    uint64_t d = UINT64_C(0xCBF29CE484222325);
    uint64_t n = t->token_count;
    const uint32_t counts[] = {
        t->turn,         t->token_count, t->topk,   t->null_prefix,        t->prompt_count,
        t->prefix_count, t->mode,        t->finish, t->temperature_scaled, t->trimmed_count};
    d = mix_mapped(w, d, s->id, s->id_size);
    d = mix(d, counts, sizeof counts);
    d = mix(d, &t->temperature, sizeof t->temperature);
    d = mix_mapped(w, d, t->token_ids, 4 * n);
    d = mix_mapped(w, d, t->token_logprobs, 4 * n);
    d = mix_mapped(w, d, t->topk_ids, 4 * n * t->topk);
    d = mix_mapped(w, d, t->topk_logprobs, 4 * n * t->topk);
    d = mix_mapped(w, d, t->widths, t->widths ? 4 * n : 0);
    d = mix_mapped(w, d, t->prompt_ids, UINT64_C(4) * t->prompt_count);
    d = mix_mapped(w, d, t->weight_version, t->weight_version_size);
    d = mix_mapped(w, d, t->finish_reason, t->finish_reason_size);
    must(n == 0 || (uintptr_t)t->token_ids % RST_ALIGNMENT == 0);
    w->result->digest += d; /* in any order */
    w->result->turn_count++;
}

/* ---------------------------------------------------------------- sessions */

static void walk_sample(walker *w, const rst_session *s)
{
    rst_error error;
    rst_sample sample;
    int code = rst_sample_measure(w->snapshot, s->id, s->id_size, NULL, &sample, &error);
    if (code) {
        failed(w, code, &error);
        return;
    }
    uint64_t slots = sample.response_count * sample.topk;
    if (sample.token_count > 1 << 22 || slots > 1 << 22) {
        return; /* a caller's own decision: much memory for little data */
    }
    rst_sample_arrays arrays = {
        .tokens = malloc(4 * sample.token_count + 1),
        .loss_mask = malloc(sample.response_count + 1),
        .rollout_logprobs = malloc(4 * sample.response_count + 1),
        .topk_ids = malloc(4 * slots + 1),
        .topk_logprobs = malloc(4 * slots + 1),
    };
    code = rst_sample_fill(w->snapshot, &sample, NULL, &arrays, &error);
    if (code) {
        failed(w, code, &error);
    }
    free(arrays.tokens);
    free(arrays.loss_mask);
    free(arrays.rollout_logprobs);
    free(arrays.topk_ids);
    free(arrays.topk_logprobs);
}

static void walk_session(walker *w, const rst_session *s)
{
    rst_error error;
    rst_turn turn;
    mix_mapped(w, 0, s->id, s->id_size);
    /* A damaged count may say a million. */
    uint32_t failures = 0;
    for (uint32_t i = 0; i < s->turn_count && failures < 3; i++) {
        int code = rst_turn_get_by_key(w->snapshot, s->key, i, &turn, &error);
        if (code) {
            failed(w, code, &error);
            failures++;
        } else {
            digest_turn(w, s, &turn);
        }
    }
    int code = rst_turn_get(w->snapshot, s->id, s->id_size, 0, &turn, &error);
    if (code) {
        failed(w, code, &error);
    }
    walk_sample(w, s);
}

static void walk_sessions(walker *w)
{
    rst_error error;
    rst_session s;
    uint8_t key[RST_KEY_SIZE];
    const uint8_t *after = NULL;
    int code;
    while ((code = rst_session_next(w->snapshot, after, &s, &error)) == RST_OK) {
        must(!after || memcmp(s.key, key, sizeof key) > 0);
        walk_session(w, &s);
        memcpy(key, s.key, sizeof key);
        after = key;
    }
    if (code != RST_ERR_NOT_FOUND) {
        failed(w, code, &error);
    }
}

static void walk_ready(walker *w)
{
    rst_error error;
    rst_session s;
    uint64_t sequence = 0;
    int code;
    while ((code = rst_ready_next(w->snapshot, sequence, &s, &error)) == RST_OK) {
        must(s.sequence > sequence);
        sequence = s.sequence;
        mix_mapped(w, 0, s.id, s.id_size);
    }
    if (code != RST_ERR_NOT_FOUND) {
        failed(w, code, &error);
    }
}

static void walk_consumers(walker *w)
{
    rst_error error;
    rst_consumer c;
    uint8_t key[RST_KEY_SIZE];
    const uint8_t *after = NULL;
    int code;
    while ((code = rst_consumer_next(w->snapshot, after, &c, key, &error)) == RST_OK) {
        mix_mapped(w, 0, c.name, c.name_size);
        after = key;
    }
    if (code != RST_ERR_NOT_FOUND) {
        failed(w, code, &error);
    }
}

/* ---------------------------------------------------------------- the store */

static void count_fault(void *context, const rst_error *fault)
{
    must_be_ordinary(fault->code, fault);
    *(uint64_t *)context += 1;
}

static void walk_verify(walker *w)
{
    rst_error error;
    rst_verify_result verified;
    uint64_t faults = 0;
    rst_verify_options options = {.fault = count_fault, .context = &faults};
    int code = rst_store_verify(w->store, &options, &verified, &error);
    if (code) {
        failed(w, code, &error);
        return;
    }
    must(verified.fault_count == faults);
    w->result->fault_count = faults;
}

walk_result walk_store(const char *path, unsigned flags)
{
    rst_error error;
    walk_result result = {0};
    walker w = {.result = &result};
    result.code = rst_store_open(path, flags | RST_OPEN_READ_ONLY, NULL, &w.store, &error);
    if (result.code) {
        must_be_ordinary(result.code, &error);
        return result;
    }
    const void *map;
    must(rst_store_map(w.store, &map, &w.map_size, &error) == RST_OK);
    w.map = map;
    rst_stat stat;
    int code = rst_store_stat(w.store, &stat, &error);
    if (code) {
        failed(&w, code, &error);
    }
    code = rst_snapshot_open(w.store, &w.snapshot, &error);
    if (code) {
        failed(&w, code, &error);
    } else {
        walk_sessions(&w);
        walk_ready(&w);
        walk_consumers(&w);
        rst_snapshot_close(w.snapshot);
    }
    walk_verify(&w);
    must(rst_store_close(w.store, &error) == RST_OK);
    return result;
}

/* ---------------------------------------------------------------- writing */

static void must_be_allowed(int code, const rst_error *error)
{
    if (code != RST_ERR_FULL && code != RST_ERR_ORDER && code != RST_ERR_CONFLICT &&
        code != RST_ERR_SEALED && code != RST_ERR_HELD && code != RST_ERR_LEASE &&
        code != RST_ERR_TIMEOUT && code != RST_OK) {
        must_be_ordinary(code, error);
    }
}

static rst_record *new_record(uint32_t token_count)
{
    rst_error error;
    rst_record *record = rst_record_new();
    must(record != NULL);
    int32_t *ids = calloc(token_count + 1, sizeof *ids);
    float *logprobs = calloc(token_count + 1, sizeof *logprobs);
    rst_turn turn = {.token_count = token_count,
                     .token_ids = ids,
                     .token_logprobs = logprobs,
                     .temperature = NAN};
    must(rst_record_set(record, &turn, &error) == RST_OK);
    free(ids);
    free(logprobs);
    return record;
}

/* Three things to one session: one of them, by seed, first. */
static void change_session(rst_store *store, rst_record *record, const rst_session *s,
                           const char *id, uint64_t seed)
{
    rst_error error;
    const rst_outcome outcome = {.status = RST_STATUS_FAILED,
                                 .reward = NAN,
                                 .group_index = RST_NO_INDEX,
                                 .index = RST_NO_INDEX};
    for (uint64_t i = 0; i < 3; i++) {
        int code = RST_OK;
        switch ((seed + i) % 6) {
        case 0:
            code = rst_put(store, id, s->id_size, s->turn_count, record, 0, 0, &error);
            break;
        case 1:
            code = rst_seal(store, id, s->id_size, &outcome, RST_CHANGE_REPLACE, &error);
            break;
        case 2:
            code = rst_release(store, id, s->id_size, RST_CHANGE_FORCE, &error);
            break;
        case 3:
            code = rst_put(store, id, s->id_size, s->turn_count - 1, record, RST_CHANGE_REPLACE, 0,
                           &error);
            break;
        case 4:
            code = rst_restart(store, id, s->id_size, s->turn_count / 2, &error);
            break;
        default:
            code = rst_release(store, id, s->id_size, 0, &error);
            break;
        }
        must_be_allowed(code, &error);
    }
}

static void change_sessions(rst_store *store, uint64_t seed)
{
    rst_error error;
    rst_record *small = new_record(1);
    rst_record *large = new_record(5000); /* many pages */
    uint8_t key[RST_KEY_SIZE];
    const uint8_t *after = NULL;
    for (uint64_t i = 0; i < 64; i++) {
        rst_snapshot *snapshot;
        rst_session s;
        char id[RST_SESSION_ID_SIZE_MAX];
        int code = rst_snapshot_open(store, &snapshot, &error);
        must_be_allowed(code, &error);
        if (code) {
            break;
        }
        code = rst_session_next(snapshot, after, &s, &error);
        if (!code) {
            memcpy(id, s.id, s.id_size);
            memcpy(key, s.key, sizeof key);
            after = key;
        }
        rst_snapshot_close(snapshot);
        must_be_allowed(code, &error);
        if (code) {
            break;
        }
        change_session(store, (seed + i) % 3 ? small : large, &s, id, seed + i);
    }
    rst_record_free(small);
    rst_record_free(large);
}

static void use_consumer(rst_store *store)
{
    rst_error error;
    rst_lease leases[4];
    size_t count;
    uint64_t released;
    int code = rst_consumer_create(store, "walk", 4, RST_START_OLDEST, NULL, &error);
    must_be_allowed(code, &error);
    for (int i = 0; i < 4 && !code; i++) {
        code = rst_consumer_take(store, "walk", 4, 4, 0, 0, leases, &count, &error);
        must_be_allowed(code, &error);
        if (!code) {
            code = rst_consumer_acknowledge(store, "walk", 4, leases, count, &error);
            must_be_allowed(code, &error);
        }
    }
    void *place;
    size_t size;
    code = rst_consumer_place(store, "walk", 4, &place, &size, &error);
    must_be_allowed(code, &error);
    if (!code) {
        code = rst_consumer_commit(store, "walk", 4, place, size, &error);
        must_be_allowed(code, &error);
        free(place);
    }
    must_be_allowed(rst_release_consumed(store, 0, &released, &error), &error);
}

int walk_and_write(const char *path, uint64_t seed)
{
    rst_error error;
    rst_store *store;
    int code = rst_store_open(path, 0, NULL, &store, &error);
    if (code) {
        must_be_ordinary(code, &error);
        return code;
    }
    use_consumer(store);
    change_sessions(store, seed);
    must(rst_store_close(store, &error) == RST_OK);
    return RST_OK;
}
