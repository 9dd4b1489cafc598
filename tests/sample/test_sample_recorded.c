/* Recorded sessions give the samples that are expected of them, to the byte. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sample_model.h"
#include "sha256.h"
#include "support.h"

/* Read a whole file of lines; *lines is to be freed with *text. */
static size_t read_lines(const char *name, char **text, char ***lines)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", RST_TEST_DATA, name);
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    assert_int_equal(fseek(file, 0, SEEK_END), 0);
    size_t size = (size_t)ftell(file);
    rewind(file);
    *text = calloc(size + 1, 1);
    assert_non_null(*text);
    assert_int_equal(fread(*text, 1, size, file), size);
    fclose(file);
    size_t count = 0;
    *lines = NULL;
    for (char *line = strtok(*text, "\n"); line; line = strtok(NULL, "\n")) {
        *lines = realloc(*lines, (count + 1) * sizeof **lines);
        assert_non_null(*lines);
        (*lines)[count++] = line;
    }
    return count;
}

/* Where the value of the only member `"name":` begins. */
static const char *member(const char *line, const char *name)
{
    char key[64];
    snprintf(key, sizeof key, "\"%s\":", name);
    const char *at = strstr(line, key);
    if (!at) {
        fail_msg("no %s in %s", key, line);
    }
    assert_null(strstr(at + 1, key));
    return at + strlen(key);
}

static uint64_t number_member(const char *line, const char *name)
{
    char *end;
    uint64_t value = strtoull(member(line, name), &end, 10);
    assert_true(*end == ',' || *end == '}');
    return value;
}

static void text_member(const char *line, const char *name, char *out, size_t size)
{
    const char *at = member(line, name);
    assert_int_equal(*at, '"');
    size_t length = strcspn(at + 1, "\"");
    assert_true(length > 0 && length < size);
    memcpy(out, at + 1, length);
    out[length] = '\0';
}

static void put_lines(rst_store *store)
{
    char *text;
    char **lines;
    size_t count = read_lines("sessions.jsonl", &text, &lines);
    rst_record *record = rst_record_new();
    assert_non_null(record);
    for (size_t i = 0; i < count; i++) {
        rst_error error;
        rst_line line;
        rst_change change;
        int code = rst_line_decode(record, lines[i], strlen(lines[i]), 0, &line, &error);
        if (!code) {
            rst_line_change(&line, record, 0, &change);
            code = rst_apply(store, &change, 1, 0, &error);
        }
        if (code) {
            fail_msg("line %zu: %s", i + 1, error.message);
        }
    }
    rst_record_free(record);
    free(lines);
    free(text);
}

static void check_hash(const char *line, const char *name, const void *data, size_t size)
{
    char want[65];
    char got[65];
    text_member(line, name, want, sizeof want);
    sha256_hex(data, size, got);
    assert_string_equal(got, want);
}

static void check_hashes(const char *line, const rst_sample_arrays *a, const rst_sample *s)
{
    size_t r = s->response_count;
    check_hash(line, "tokens_i32", a->tokens, 4 * s->token_count);
    check_hash(line, "loss_mask_u8", a->loss_mask, r);
    check_hash(line, "rollout_logprobs_f32", a->rollout_logprobs, 4 * r);
    check_hash(line, "topk_ids_i32", a->topk_ids, 4 * r * s->topk);
    check_hash(line, "topk_logprobs_f32", a->topk_logprobs, 4 * r * s->topk);
}

static const char *status_name(rst_outcome_status status)
{
    const char *names[] = {"open", "completed", "truncated", "aborted", "failed"};
    return names[status];
}

static void check_line(rst_snapshot *snapshot, const char *line)
{
    char id[128];
    char status[32];
    char versions[64];
    text_member(line, "session_id", id, sizeof id);
    text_member(line, "status", status, sizeof status);
    rst_error error;
    rst_sample s;
    if (rst_sample_measure(snapshot, id, strlen(id), NULL, &s, &error)) {
        fail_msg("%s: %s", id, error.message);
    }
    assert_int_equal(s.token_count, number_member(line, "tokens"));
    assert_int_equal(s.response_count, number_member(line, "response_length"));
    assert_int_equal(s.prompt_count, number_member(line, "prompt_length"));
    assert_int_equal(s.topk, number_member(line, "k"));
    assert_int_equal(s.turn_count, number_member(line, "turns"));
    assert_int_equal(s.turns_left_out, 0);
    assert_string_equal(status_name(s.session.outcome.status), status);
    snprintf(versions, sizeof versions, "[\"%lld\"", (long long)s.weight_version_min);
    assert_memory_equal(member(line, "weight_versions"), versions, strlen(versions));
    assert_int_equal(s.weight_version_max, s.weight_version_min);
    rst_sample_arrays a = guarded_arrays_new(s.token_count, s.response_count, s.topk, 0);
    assert_ok(rst_sample_fill(snapshot, &s, NULL, &a, &error), error);
    check_hashes(line, &a, &s);
    guarded_arrays_free(&a, s.token_count, s.response_count, s.topk);
}

/* The fixtures in a store, and their expected samples. */
typedef struct fixture {
    rst_store *store;
    rst_snapshot *snapshot;
    char *text;
    char **lines;
    size_t count;
    rst_id *ids;
    rst_sample *samples;
    rst_batch_size size;
} fixture;

static int setup(void **state)
{
    fixture *f = calloc(1, sizeof *f);
    assert_non_null(f);
    f->store = model_store_open();
    put_lines(f->store);
    f->count = read_lines("sessions_expected.jsonl", &f->text, &f->lines);
    assert_int_equal(f->count, 24);
    f->ids = calloc(f->count, sizeof *f->ids);
    f->samples = calloc(f->count, sizeof *f->samples);
    assert_true(f->ids && f->samples);
    for (size_t i = 0; i < f->count; i++) {
        const char *id = member(f->lines[i], "session_id") + 1;
        f->ids[i] = (rst_id){id, strcspn(id, "\"")};
    }
    rst_error error;
    assert_ok(rst_snapshot_open(f->store, &f->snapshot, &error), error);
    assert_ok(rst_batch_measure(f->snapshot, f->ids, f->count, NULL, f->samples, &f->size, &error),
              error);
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    fixture *f = *state;
    rst_snapshot_close(f->snapshot);
    model_store_close(f->store);
    free(f->ids);
    free(f->samples);
    free(f->lines);
    free(f->text);
    free(f);
    return 0;
}

static void each_session_gives_the_expected_sample(void **state)
{
    fixture *f = *state;
    for (size_t i = 0; i < f->count; i++) {
        check_line(f->snapshot, f->lines[i]);
    }
}

static void packed_they_are_the_expected_samples_one_after_another(void **state)
{
    fixture *f = *state;
    uint64_t t = f->size.token_count;
    uint64_t r = f->size.response_count;
    size_t k = f->size.topk;
    rst_sample_arrays a = guarded_arrays_new(t, r, f->size.topk, 0);
    int32_t *offsets = guarded_new(4 * (f->count + 1));
    int32_t *response_offsets = guarded_new(4 * (f->count + 1));
    rst_packed_arrays packed = {a.tokens,   offsets,         a.loss_mask,     a.rollout_logprobs,
                                a.topk_ids, a.topk_logprobs, response_offsets};
    rst_error error;
    assert_ok(rst_batch_pack(f->snapshot, f->samples, f->count, NULL, &packed, 2, &error), error);
    assert_int_equal(offsets[f->count], t);
    assert_int_equal(response_offsets[f->count], r);
    for (size_t i = 0; i < f->count; i++) {
        size_t at = (size_t)response_offsets[i];
        rst_sample_arrays one = {a.tokens + offsets[i], a.loss_mask + at, a.rollout_logprobs + at,
                                 a.topk_ids + at * k, a.topk_logprobs + at * k};
        check_hashes(f->lines[i], &one, &f->samples[i]);
    }
    guarded_free(offsets, 4 * (f->count + 1));
    guarded_free(response_offsets, 4 * (f->count + 1));
    guarded_arrays_free(&a, t, r, f->size.topk);
}

static void padded_each_row_begins_with_the_expected_sample(void **state)
{
    fixture *f = *state;
    uint64_t length = f->size.token_max;
    uint64_t response = f->size.response_max;
    size_t k = f->size.topk;
    rst_sample_arrays a =
        guarded_arrays_new(f->count * length, f->count * response, f->size.topk, 0);
    rst_padded_arrays padded = {.length = length,
                                .response_length = response,
                                .tokens = a.tokens,
                                .loss_mask = a.loss_mask,
                                .rollout_logprobs = a.rollout_logprobs,
                                .topk_ids = a.topk_ids,
                                .topk_logprobs = a.topk_logprobs};
    rst_error error;
    assert_ok(rst_batch_pad(f->snapshot, f->samples, f->count, NULL, &padded, 2, &error), error);
    for (size_t i = 0; i < f->count; i++) {
        size_t at = i * response;
        rst_sample_arrays one = {a.tokens + i * length, a.loss_mask + at, a.rollout_logprobs + at,
                                 a.topk_ids + at * k, a.topk_logprobs + at * k};
        check_hashes(f->lines[i], &one, &f->samples[i]);
    }
    guarded_arrays_free(&a, f->count * length, f->count * response, f->size.topk);
}

#define WITH_STORE(test) cmocka_unit_test_setup_teardown(test, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        WITH_STORE(each_session_gives_the_expected_sample),
        WITH_STORE(packed_they_are_the_expected_samples_one_after_another),
        WITH_STORE(padded_each_row_begins_with_the_expected_sample),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
