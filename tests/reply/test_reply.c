/* The fixed samples of replies: the good ones give the right arrays, the bad ones their error; cut
 * and damaged ones are refused or decoded, never half. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "layout/record.h"
#include "reply_support.h"
#include "sha256.h"

/* ---------------------------------------------------------------- good replies */

typedef struct golden {
    char *name;
    char *reply;
    size_t size;
    rst_decode_options options;
} golden;

static golden goldens[100];
static size_t golden_count;

static void keep_golden(const fixture_line *line)
{
    golden *g = &goldens[golden_count++];
    assert_true(golden_count <= sizeof goldens / sizeof *goldens);
    char *mode = fixture_text(line, 0, "mode", NULL);
    size_t size;
    const char *reply = fixture_bytes(line, fixture_member(line, 0, "reply"), &size);
    g->name = fixture_text(line, 0, "name", NULL);
    g->size = size;
    g->reply = malloc(size);
    assert_non_null(g->reply);
    memcpy(g->reply, reply, size);
    g->options = (rst_decode_options){
        .mode = strcmp(mode, "support") ? RST_MODE_SELECTED : RST_MODE_SUPPORT,
        .request = strstr(g->name, "nested") ? RST_REQUEST_NESTED : RST_REQUEST_FLAT,
        .topk = (uint32_t)fixture_integer(line, 0, "k", 0),
        .choice = (uint32_t)fixture_integer(line, 0, "choice", 0),
    };
    free(mode);
}

static const golden *golden_named(const char *name)
{
    for (size_t i = 0; i < golden_count; i++) {
        if (!strcmp(goldens[i].name, name)) {
            return &goldens[i];
        }
    }
    fail_msg("no golden reply %s", name);
    return NULL;
}

static int read_goldens(void **state)
{
    (void)state;
    return fixture_each("golden.jsonl", keep_golden) == 45 ? 0 : -1;
}

static int free_goldens(void **state)
{
    (void)state;
    for (size_t i = 0; i < golden_count; i++) {
        free(goldens[i].name);
        free(goldens[i].reply);
    }
    return 0;
}

static void decode_golden(const golden *g, rst_record *record)
{
    rst_error error;
    assert_ok(decode_at_the_edge(record, g->reply, g->size, &g->options, &error), error);
}

static void assert_hash(const fixture_line *line, rst_json_node hashes, const char *name,
                        const void *array, size_t count)
{
    char *want = fixture_text(line, hashes, name, NULL);
    char got[65];
    sha256_hex(array, 4 * count, got);
    assert_string_equal(got, want);
    free(want);
}

static void check_golden(const fixture_line *line)
{
    char *name = fixture_text(line, 0, "name", NULL);
    rst_record *record = rst_record_new();
    decode_golden(golden_named(name), record);
    rst_turn turn;
    rst_record_view(record, &turn);
    size_t n = (size_t)fixture_integer(line, 0, "n", -1);
    size_t k = (size_t)fixture_integer(line, 0, "k", -1);
    assert_int_equal(turn.token_count, n);
    assert_int_equal(turn.topk, k);
    rst_json_node hashes = fixture_member(line, 0, "sha256");
    assert_hash(line, hashes, "token_ids_i32", turn.token_ids, n);
    assert_hash(line, hashes, "token_logprobs_f32", turn.token_logprobs, n);
    assert_hash(line, hashes, "topk_ids_i32", turn.topk_ids, n * k);
    assert_hash(line, hashes, "topk_logprobs_f32", turn.topk_logprobs, n * k);
    rst_json_node widths = fixture_member(line, 0, "width");
    assert_int_equal(rst_json_count(&line->json, widths), n);
    for (size_t i = 0; i < n; i++) {
        int64_t width;
        assert_int_equal(
            rst_json_int64(&line->json, rst_json_element(&line->json, widths, i), &width), 0);
        assert_int_equal(turn.widths ? turn.widths[i] : (int64_t)k, width);
    }
    assert_sound_record(record);
    rst_record_free(record);
    free(name);
}

static void golden_replies_give_the_expected_arrays(void **state)
{
    (void)state;
    assert_int_equal(fixture_each("golden_expected.jsonl", check_golden), golden_count);
}

/* The stored bytes are the same, whichever way the generation was replied. */
static void every_form_of_a_generation_gives_the_same_bytes(void **state)
{
    (void)state;
    static const char *const sizes[] = {"1x1", "2x3", "7x32", "40x32", "16x128", "5x20"};
    static const char *const forms[] = {"flat_plain", "nested", "generate_flat_b64",
                                        "generate_nested"};
    uint8_t key[RST_KEY_SIZE] = {0};
    rst_place place = {.session_key = key};
    rst_error error;
    rst_record *first = rst_record_new();
    rst_record *other = rst_record_new();
    for (size_t i = 0; i < 6; i++) {
        char name[64];
        const void *want;
        size_t want_size;
        snprintf(name, sizeof name, "flat_b64_%s", sizes[i]);
        decode_golden(golden_named(name), first);
        assert_ok(rst_record_complete(first, &place, &want, &want_size, &error), error);
        for (size_t f = 0; f < 4; f++) {
            const void *got;
            size_t got_size;
            snprintf(name, sizeof name, "%s_%s", forms[f], sizes[i]);
            decode_golden(golden_named(name), other);
            assert_ok(rst_record_complete(other, &place, &got, &got_size, &error), error);
            assert_int_equal(got_size, want_size);
            assert_memory_equal(got, want, want_size);
        }
    }
    rst_record_free(first);
    rst_record_free(other);
}

static void k_can_be_taken_from_the_reply(void **state)
{
    (void)state;
    rst_record *asked = rst_record_new();
    rst_record *found = rst_record_new();
    rst_error error;
    for (size_t i = 0; i < golden_count; i++) {
        golden g = goldens[i];
        if (!strcmp(g.name, "nested_rows_shorter_than_k") ||
            !strcmp(g.name, "zero_tokens_no_fields") || !strcmp(g.name, "support_capacity_32")) {
            continue; /* the reply does not say k */
        }
        decode_golden(&g, asked);
        g.options.topk = RST_TOPK_FROM_REPLY;
        decode_golden(&g, found);
        rst_turn a;
        rst_turn b;
        rst_record_view(asked, &a);
        rst_record_view(found, &b);
        assert_same_turn(&a, &b);
    }
    golden g = *golden_named("nested_rows_shorter_than_k");
    g.options.topk = RST_TOPK_FROM_REPLY;
    assert_ok(rst_record_decode(found, g.reply, g.size, &g.options, &error), error);
    rst_turn turn;
    rst_record_view(found, &turn);
    assert_int_equal(turn.topk, 3);
    assert_null(turn.widths);
    rst_record_free(asked);
    rst_record_free(found);
}

static void turns_written_as_replies_come_back(void **state)
{
    (void)state;
    rst_record *record = rst_record_new();
    rst_record *again = rst_record_new();
    rst_error error;
    for (size_t i = 0; i < golden_count; i++) {
        const golden *g = &goldens[i];
        decode_golden(g, record);
        rst_turn turn;
        rst_record_view(record, &turn);
        char *reply;
        size_t size;
        assert_ok(rst_turn_to_reply(&turn, &reply, &size, &error), error);
        assert_int_equal(reply[size], '\0');
        rst_decode_options options = {.mode = g->options.mode, .topk = g->options.topk};
        assert_ok(decode_at_the_edge(again, reply, size, &options, &error), error);
        rst_turn back;
        rst_record_view(again, &back);
        assert_same_turn(&turn, &back);
        free(reply);
    }
    rst_record_free(record);
    rst_record_free(again);
}

/* ---------------------------------------------------------------- bad replies */

static int code_named(const char *name)
{
    for (int code = RST_ERR_SYNTAX; code <= RST_ERR_TYPE; code++) {
        if (!strcmp(rst_code_name(code), name)) {
            return code;
        }
    }
    fail_msg("no error is called %s", name);
    return 0;
}

static char *bad_reply(const fixture_line *line, size_t *size)
{
    char *raw = fixture_text(line, 0, "raw", size);
    if (!raw) {
        const char *reply = fixture_bytes(line, fixture_member(line, 0, "reply"), size);
        raw = malloc(*size);
        assert_non_null(raw);
        memcpy(raw, reply, *size);
    }
    return raw;
}

static void check_malformed(const fixture_line *line)
{
    static rst_record *record;
    record = record ? record : rst_record_new();
    char *name = fixture_text(line, 0, "name", NULL);
    char *kind = fixture_text(line, 0, "error", NULL);
    char *mode = fixture_text(line, 0, "mode", NULL);
    char *request = fixture_text(line, 0, "request", NULL);
    size_t size;
    char *reply = bad_reply(line, &size);
    rst_decode_options options = {
        .mode = mode && !strcmp(mode, "support") ? RST_MODE_SUPPORT : RST_MODE_SELECTED,
        .request = request && !strcmp(request, "nested") ? RST_REQUEST_NESTED : RST_REQUEST_FLAT,
        .topk = (uint32_t)fixture_integer(line, 0, "k", 0),
    };
    decode_golden(golden_named("flat_b64_7x32"), record); /* something that must not remain */
    rst_error error;
    int code = code_named(kind);
    assert_code(code, decode_at_the_edge(record, reply, size, &options, &error), error);
    assert_empty(record);
    if (code != RST_ERR_SYNTAX) {
        assert_true(strlen(error.field) > 0);
    }
    if (code != RST_ERR_MISSING && strcmp(name, "dtype_absent")) {
        assert_in_range(error.offset, 0, size);
    }
    if (!strcmp(name, "no_flat_fields") || !strcmp(name, "nested_reply_to_flat_request")) {
        static const char begins[] = "Requested flat output top logprobs but the response has none";
        assert_memory_equal(error.message, begins, sizeof begins - 1);
    }
    if (!strcmp(name, "engine_error_object")) {
        assert_non_null(strstr(error.message, "The request queue is full."));
    }
    if (!strcmp(name, "b64_bad_character")) {
        assert_int_equal(reply[error.offset], '*');
    }
    if (!strcmp(name, "b64_url_alphabet")) {
        assert_int_equal(reply[error.offset], '-');
    }
    if (!strcmp(name, "shape_rows_off_by_one")) {
        assert_string_equal(error.message,
                            "output_top_logprobs_shape is [5, 8] but 6 tokens - 0 null positions x "
                            "8 candidates were expected");
    }
    free(reply);
    free(request);
    free(mode);
    free(kind);
    free(name);
}

static void malformed_replies_are_refused_with_their_error(void **state)
{
    (void)state;
    assert_int_equal(fixture_each("malformed.jsonl", check_malformed), 44);
}

/* ---------------------------------------------------------------- damage */

static const char *const small_ones[] = {"flat_b64_2x3",  "flat_plain_2x3",
                                         "nested_2x3",    "generate_flat_b64_2x3",
                                         "decoy_strings", "support_ragged_12x16"};

static void a_reply_cut_anywhere_is_refused(void **state)
{
    (void)state;
    rst_record *record = rst_record_new();
    for (size_t i = 0; i < sizeof small_ones / sizeof *small_ones; i++) {
        const golden *g = golden_named(small_ones[i]);
        size_t whole = g->size;
        while (g->reply[whole - 1] != '}') { /* blanks behind it */
            whole--;
        }
        for (size_t size = 0; size < whole; size++) {
            rst_error error;
            assert_code(RST_ERR_SYNTAX,
                        decode_at_the_edge(record, g->reply, size, &g->options, &error), error);
            assert_in_range(error.offset, 0, size);
            assert_empty(record);
        }
    }
    rst_record_free(record);
}

/* A damaged byte can leave a good reply, but nothing in between. */
static void a_damaged_byte_leaves_a_sound_record_or_none(void **state)
{
    (void)state;
    static const unsigned char damages[] = {0x01, 0x02, 0x04, 0x08, 0x10, 0x20, 0x40, 0x80, 0xFF};
    rst_record *record = rst_record_new();
    size_t good = 0;
    size_t bad = 0;
    for (size_t i = 0; i < sizeof small_ones / sizeof *small_ones; i++) {
        const golden *g = golden_named(small_ones[i]);
        char *copy = malloc(g->size);
        memcpy(copy, g->reply, g->size);
        for (size_t at = 0; at < g->size; at++) {
            for (size_t d = 0; d < sizeof damages; d++) {
                copy[at] = (char)((unsigned char)g->reply[at] ^ damages[d]);
                rst_error error;
                int code = decode_at_the_edge(record, copy, g->size, &g->options, &error);
                if (code == RST_OK) {
                    assert_sound_record(record);
                    good++;
                } else {
                    assert_in_range(code, RST_ERR_SYNTAX, RST_ERR_TYPE);
                    assert_code(code, code, error);
                    assert_empty(record);
                    bad++;
                }
            }
            copy[at] = g->reply[at];
        }
        free(copy);
    }
    assert_true(good > 1000);
    assert_true(bad > 10000);
    rst_record_free(record);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(golden_replies_give_the_expected_arrays),
        cmocka_unit_test(every_form_of_a_generation_gives_the_same_bytes),
        cmocka_unit_test(k_can_be_taken_from_the_reply),
        cmocka_unit_test(turns_written_as_replies_come_back),
        cmocka_unit_test(malformed_replies_are_refused_with_their_error),
        cmocka_unit_test(a_reply_cut_anywhere_is_refused),
        cmocka_unit_test(a_damaged_byte_leaves_a_sound_record_or_none),
    };
    return cmocka_run_group_tests(tests, read_goldens, free_goldens);
}
