/* Stores of released formats open for ever.  tests/data/format-1 was written by version 0.1.0 and
 * is never written again: its data file ends with the last page in use. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "reply_support.h"
#include "sha256.h"

static char *folder;

static int setup(void **state)
{
    (void)state;
    folder = support_make_folder();
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    support_remove_folder(folder);
    return 0;
}

/* ---------------------------------------------------------------- a copy of the fixture */

static void copy_file(const char *from, const char *to)
{
    char command[1200];
    snprintf(command, sizeof command, "cp '%s' '%s' && chmod 600 '%s'", from, to, to);
    assert_int_equal(system(command), 0);
}

static const char *new_copy(const char *name, bool with_guard)
{
    const char *path = support_path(folder, name);
    assert_int_equal(mkdir(path, 0700), 0);
    copy_file(RST_TEST_DATA "/format-1/data.mdb", support_path(path, "data.mdb"));
    if (with_guard) {
        copy_file(RST_TEST_DATA "/format-1/guard.bin", support_path(path, "guard.bin"));
    }
    return path;
}

/* ---------------------------------------------------------------- what it must hold */

static rst_snapshot *snapshot; /* of the copy that is looked at */

static void assert_hash(const fixture_line *line, const char *name, const void *bytes, size_t size)
{
    char *want = fixture_text(line, fixture_member(line, 0, "sha256"), name, NULL);
    char got[65];
    sha256_hex(bytes, size, got);
    assert_string_equal(got, want);
    free(want);
}

static unsigned found;

/* The samples of recorded sessions, as sessions_expected.jsonl has them. */
static void check_sample(const fixture_line *line)
{
    rst_error error;
    rst_sample s;
    size_t size;
    char *id = fixture_text(line, 0, "session_id", &size);
    int code = rst_sample_measure(snapshot, id, size, NULL, &s, &error);
    free(id);
    if (code == RST_ERR_NOT_FOUND) {
        return;
    }
    assert_ok(code, error);
    size_t r = s.response_count;
    rst_sample_arrays a = {.tokens = malloc(4 * s.token_count),
                           .loss_mask = malloc(r),
                           .rollout_logprobs = malloc(4 * r),
                           .topk_ids = malloc(4 * r * s.topk),
                           .topk_logprobs = malloc(4 * r * s.topk)};
    assert_ok(rst_sample_fill(snapshot, &s, NULL, &a, &error), error);
    assert_int_equal(s.token_count, fixture_integer(line, 0, "tokens", -1));
    assert_int_equal(s.turn_count, fixture_integer(line, 0, "turns", -1));
    assert_hash(line, "tokens_i32", a.tokens, 4 * s.token_count);
    assert_hash(line, "loss_mask_u8", a.loss_mask, r);
    assert_hash(line, "rollout_logprobs_f32", a.rollout_logprobs, 4 * r);
    assert_hash(line, "topk_ids_i32", a.topk_ids, 4 * r * s.topk);
    assert_hash(line, "topk_logprobs_f32", a.topk_logprobs, 4 * r * s.topk);
    free(a.tokens);
    free(a.loss_mask);
    free(a.rollout_logprobs);
    free(a.topk_ids);
    free(a.topk_logprobs);
    found++;
}

/* The turns of single replies, as golden_expected.jsonl has them. */
static void check_turn(const fixture_line *line)
{
    char id[128];
    char *name = fixture_text(line, 0, "name", NULL);
    int size = snprintf(id, sizeof id, "golden/%s", name);
    free(name);
    rst_error error;
    rst_turn t;
    int code = rst_turn_get(snapshot, id, (size_t)size, 0, &t, &error);
    if (code == RST_ERR_NOT_FOUND) {
        return;
    }
    assert_ok(code, error);
    size_t n = t.token_count;
    assert_int_equal(n, fixture_integer(line, 0, "n", -1));
    assert_int_equal(t.topk, fixture_integer(line, 0, "k", -1));
    assert_hash(line, "token_ids_i32", t.token_ids, 4 * n);
    assert_hash(line, "token_logprobs_f32", t.token_logprobs, 4 * n);
    assert_hash(line, "topk_ids_i32", t.topk_ids, 4 * n * t.topk);
    assert_hash(line, "topk_logprobs_f32", t.topk_logprobs, 4 * n * t.topk);
    rst_json_node widths = fixture_member(line, 0, "width");
    for (size_t i = 0; i < n; i++) {
        int64_t width;
        rst_json_node node = rst_json_element(&line->json, widths, i);
        assert_int_equal(rst_json_int64(&line->json, node, &width), RST_JSON_NUMBER_FINE);
        assert_int_equal(t.widths ? t.widths[i] : (int64_t)t.topk, width);
    }
    assert_true(t.temperature == 0.75f);
    found++;
}

static void check_long_id(void)
{
    char id[2600];
    memcpy(id, "long/", 5);
    memset(id + 5, 'x', sizeof id - 5);
    rst_session s;
    rst_error error;
    assert_ok(rst_session_get(snapshot, id, sizeof id, &s, &error), error);
    assert_int_equal(s.state, RST_STATE_SEALED);
    assert_int_equal(s.sequence, 5);
    assert_int_equal(s.outcome.status, RST_STATUS_FAILED);
    assert_true(s.outcome.reward == -0.5);
    assert_int_equal(s.outcome.group_index, 7);
    assert_int_equal(s.outcome.index, 3);
}

static void check_consumer(void)
{
    rst_consumer c;
    rst_error error;
    assert_ok(rst_consumer_get(snapshot, "trainer", 7, &c, &error), error);
    assert_int_equal(c.given_total, 3);
    assert_int_equal(c.trained_count, 2);
    assert_int_equal(c.held_count, 1);
    assert_int_equal(c.waiting_count, 2);
}

static void check_all(rst_store *store)
{
    rst_error error;
    rst_stat stat;
    assert_ok(rst_store_stat(store, &stat, &error), error);
    assert_int_equal(stat.format.version, 1);
    assert_int_equal(stat.totals.sealed_count, 5);
    assert_int_equal(stat.totals.open_count, 6);
    assert_int_equal(stat.totals.turn_count, 14);
    support_assert_sound(store);
    assert_ok(rst_snapshot_open(store, &snapshot, &error), error);
    found = 0;
    fixture_each("sessions_expected.jsonl", check_sample);
    assert_int_equal(found, 4);
    fixture_each("golden_expected.jsonl", check_turn);
    assert_int_equal(found, 10);
    check_long_id();
    check_consumer();
    rst_snapshot_close(snapshot);
}

/* ---------------------------------------------------------------- the tests */

static void a_store_of_format_1_is_read(void **state)
{
    (void)state;
    for (int guard = 0; guard < 2; guard++) {
        const char *path = new_copy(guard ? "read-1" : "read-0", guard);
        rst_store *store;
        rst_error error;
        assert_ok(rst_store_open(path, RST_OPEN_READ_ONLY, NULL, &store, &error), error);
        check_all(store);
        assert_ok(rst_store_close(store, &error), error);
    }
}

static void a_store_of_format_1_is_written(void **state)
{
    (void)state;
    const char *path = new_copy("written", true);
    rst_store *store;
    rst_error error;
    assert_ok(rst_store_open(path, 0, NULL, &store, &error), error);
    check_all(store);
    rst_record *record = rst_record_new();
    support_fill(record, 30, 8, 1, NULL, 0, "2");
    assert_ok(rst_put(store, "new", 3, 0, record, 0, 0, &error), error);
    assert_ok(rst_release(store, "new", 3, 0, &error), error);
    rst_record_free(record);
    support_assert_sound(store);
    const char *copy = support_path(folder, "copy");
    assert_ok(rst_store_copy(store, copy, 0, &error), error);
    rst_lease lease;
    size_t count;
    /* The process that held the third is gone. */
    assert_ok(rst_consumer_take(store, "trainer", 7, 1, 0, 0, &lease, &count, &error), error);
    assert_int_equal(lease.sequence, 3);
    assert_int_equal(lease.given_count, 2);
    assert_ok(rst_store_close(store, &error), error);
    assert_ok(rst_store_open(copy, RST_OPEN_READ_ONLY, NULL, &store, &error), error);
    check_all(store);
    assert_ok(rst_store_close(store, &error), error);
}

/* Set the version in the format entry, also in the one that a page which is free now still has. */
static void set_version(const char *path, uint16_t version)
{
    static unsigned char bytes[1 << 18];
    FILE *file = fopen(path, "r+be");
    assert_non_null(file);
    size_t size = fread(bytes, 1, sizeof bytes, file);
    unsigned entries = 0;
    for (size_t at = 0; at + sizeof(rst_format_entry) <= size; at += 2) {
        rst_format_entry entry;
        memcpy(&entry, bytes + at, sizeof entry);
        if (entry.magic == RST_FORMAT_MAGIC && entry.page_size == 4096) {
            memcpy(bytes + at + offsetof(rst_format_entry, version), &version, sizeof version);
            entries++;
        }
    }
    assert_true(entries > 0);
    rewind(file);
    assert_int_equal(fwrite(bytes, 1, size, file), size);
    assert_int_equal(fclose(file), 0);
}

static void a_newer_format_is_refused_and_says_so(void **state)
{
    (void)state;
    const char *path = new_copy("newer", true);
    static const uint16_t versions[] = {2, 3, UINT16_MAX, 0};
    for (size_t i = 0; i < sizeof versions / sizeof *versions; i++) {
        set_version(support_path(path, "data.mdb"), versions[i]);
        rst_store *store;
        rst_error error;
        char says[64];
        snprintf(says, sizeof says, "format version %u", versions[i]);
        for (unsigned flags = 0; flags < 2; flags++) {
            int code = rst_store_open(path, flags ? RST_OPEN_READ_ONLY : 0, NULL, &store, &error);
            assert_code(RST_ERR_VERSION, code, error);
            assert_non_null(strstr(error.message, says));
            assert_non_null(strstr(error.message, "newer rollstore"));
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_store_of_format_1_is_read, setup, teardown),
        cmocka_unit_test_setup_teardown(a_store_of_format_1_is_written, setup, teardown),
        cmocka_unit_test_setup_teardown(a_newer_format_is_refused_and_says_so, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
