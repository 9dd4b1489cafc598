/* The record: where its arrays stand, which values it may hold, and that damage is told. */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "layout/record.h"
#include "layout/simd.h"
#include "support.h"

static void complete(rst_record *record, const void **bytes, size_t *size)
{
    static const uint8_t key[RST_KEY_SIZE] = {1, 2, 3};
    rst_place place = {.session_key = key, .turn = 5};
    rst_error error;
    assert_ok(rst_record_complete(record, &place, bytes, size, &error), error);
}

/* A record as it lies in the map: 16 bytes after a page's begin, in a block of its exact size. */
static unsigned char *in_page(const void *bytes, size_t size, unsigned char **block)
{
    size_t whole = (size + RST_VALUE_OFFSET + 63) / 64 * 64;
    *block = aligned_alloc(64, whole);
    memset(*block, 0, whole);
    memcpy(*block + RST_VALUE_OFFSET, bytes, size);
    return *block + RST_VALUE_OFFSET;
}

static void offsets_are_aligned_for_every_size(void **state)
{
    (void)state;
    static const uint32_t counts[] = {0, 1, 2, 3, 7, 15, 16, 17, 63, 64, 65, 1000, 4095, 40000};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        for (uint32_t k = 1; k <= 128; k++) {
            rst_record_header h = {.token_count = counts[i],
                                   .topk = k,
                                   .prompt_count = counts[i] % 13,
                                   .flags = k % 2 ? RST_RECORD_RAGGED : 0,
                                   .weight_version_size = 3};
            rst_offsets o;
            assert_true(rst_offsets_of(&h, &o));
            const uint64_t begins[] = {o.token_ids, o.token_logprobs, o.topk_ids, o.topk_logprobs,
                                       o.widths,    o.prompt_ids,     o.text};
            uint64_t end = sizeof h;
            const uint64_t sizes[] = {4ull * counts[i],
                                      4ull * counts[i],
                                      4ull * counts[i] * k,
                                      4ull * counts[i] * k,
                                      k % 2 ? 4ull * counts[i] : 0,
                                      4ull * h.prompt_count,
                                      3};
            for (int a = 0; a < 7; a++) {
                assert_int_equal((begins[a] + RST_VALUE_OFFSET) % RST_ALIGNMENT, 0);
                assert_true(begins[a] >= end && begins[a] - end < RST_ALIGNMENT);
                end = begins[a] + sizes[a];
            }
            assert_int_equal(o.end, end);
        }
    }
}

static void counts_over_the_limits_are_refused(void **state)
{
    (void)state;
    rst_offsets o;
    rst_record_header tokens = {.token_count = RST_TOKEN_COUNT_MAX + 1};
    rst_record_header topk = {.topk = RST_TOPK_MAX + 1};
    rst_record_header product = {.token_count = RST_TOKEN_COUNT_MAX, .topk = RST_TOPK_MAX};
    rst_record_header largest = {
        .token_count = UINT32_MAX, .topk = UINT32_MAX, .prompt_count = UINT32_MAX};
    assert_false(rst_offsets_of(&tokens, &o));
    assert_false(rst_offsets_of(&topk, &o));
    assert_false(rst_offsets_of(&product, &o));
    assert_false(rst_offsets_of(&largest, &o));
    rst_record *record = rst_record_new();
    rst_slots slots;
    rst_error error;
    assert_code(RST_ERR_LIMIT, rst_record_begin(record, 1u << 24, 4096, &slots, &error), error);
    rst_record_free(record);
}

static void a_record_gives_back_what_was_put_in(void **state)
{
    (void)state;
    const int32_t prompt[] = {5, 6, 7};
    rst_record *record = rst_record_new();
    support_fill(record, 10, 4, 1, prompt, 3, "12");
    rst_turn given;
    rst_record_view(record, &given);
    const void *bytes;
    size_t size;
    complete(record, &bytes, &size);
    rst_turn turn;
    rst_error error;
    unsigned char *block;
    unsigned char *value = in_page(bytes, size, &block);
    assert_ok(rst_record_open(value, size, &turn, &error), error);
    assert_ok(rst_record_check(value, size, NULL, 0, &error), error);
    assert_int_equal(turn.turn, 5);
    assert_int_equal(turn.token_count, 10);
    assert_int_equal(turn.topk, 4);
    assert_memory_equal(turn.token_ids, given.token_ids, 40);
    assert_memory_equal(turn.token_logprobs, given.token_logprobs, 40);
    assert_memory_equal(turn.topk_ids, given.topk_ids, 160);
    assert_memory_equal(turn.topk_logprobs, given.topk_logprobs, 160);
    assert_memory_equal(turn.prompt_ids, prompt, sizeof prompt);
    assert_null(turn.widths);
    assert_int_equal(turn.weight_version_number, 12);
    assert_memory_equal(turn.weight_version, "12", 2);
    assert_int_equal((uintptr_t)turn.topk_logprobs % 64, 0);
    free(block);
    rst_record_free(record);
}

static void every_flipped_byte_is_told(void **state)
{
    (void)state;
    const int32_t prompt[] = {5, 6, 7};
    rst_record *record = rst_record_new();
    support_fill(record, 3, 2, 1, prompt, 3, "v7");
    const void *bytes;
    size_t size;
    complete(record, &bytes, &size);
    static const uint8_t key[RST_KEY_SIZE] = {1, 2, 3};
    for (size_t at = 0; at < size; at++) {
        unsigned char *block;
        unsigned char *value = in_page(bytes, size, &block);
        rst_error error;
        assert_ok(rst_record_check(value, size, key, 5, &error), error);
        value[at] ^= 0x41;
        int code = rst_record_check(value, size, key, 5, &error);
        if (code != RST_ERR_CORRUPT && code != RST_ERR_VERSION) {
            fail_msg("byte %zu flipped: %s", at, rst_code_name(code));
        }
        free(block);
    }
    for (size_t cut = 0; cut < size; cut++) {
        unsigned char *block;
        unsigned char *value = in_page(bytes, cut, &block);
        rst_error error;
        assert_code(RST_ERR_CORRUPT, rst_record_check(value, cut, key, 5, &error), error);
        free(block);
    }
    rst_record_free(record);
}

/* Each damaged field, with the checksum made good again, gives an error with its own name. */
static void each_damaged_field_is_named(void **state)
{
    (void)state;
    const struct {
        const char *field;
        size_t offset;
        uint32_t value;
        size_t size;
    } damages[] = {
        {"magic", offsetof(rst_record_header, magic), 1, 4},
        {"version", offsetof(rst_record_header, version), 2, 2},
        {"header_size", offsetof(rst_record_header, header_size), 128, 2},
        {"record_size", offsetof(rst_record_header, record_size), 64, 4},
        {"token_count", offsetof(rst_record_header, token_count), UINT32_MAX, 4},
        {"token_count", offsetof(rst_record_header, topk), UINT32_MAX, 4},
        {"null_prefix", offsetof(rst_record_header, null_prefix), 4, 4},
        {"flags", offsetof(rst_record_header, flags), 0x80, 1},
        {"reserved", offsetof(rst_record_header, reserved), 1, 1},
        {"mode", offsetof(rst_record_header, mode), 7, 1},
        {"finish", offsetof(rst_record_header, finish), 9, 1},
        {"finish_reason_size", offsetof(rst_record_header, finish_reason_size), 1, 2},
        {"temperature_scaled", offsetof(rst_record_header, temperature_scaled), 3, 1},
        {"temperature", offsetof(rst_record_header, temperature), 0xBF800000, 4}, /* -1.0f */
        {"weight_version_number", offsetof(rst_record_header, weight_version_number), 5, 4},
        {"session_key", offsetof(rst_record_header, session_key), 77, 1},
        {"turn", offsetof(rst_record_header, turn), 6, 4},
        {"widths", offsetof(rst_record_header, null_prefix), 1, 4},
        {"token_ids", sizeof(rst_record_header), 0xFFFFFFFF, 4},
    };
    static const uint8_t key[RST_KEY_SIZE] = {1, 2, 3};
    rst_record *record = rst_record_new();
    for (size_t i = 0; i < sizeof damages / sizeof *damages; i++) {
        support_fill(record, 3, 2, 1, NULL, 0, "7");
        const void *bytes;
        size_t size;
        complete(record, &bytes, &size);
        unsigned char *block;
        unsigned char *value = in_page(bytes, size, &block);
        memcpy(value + damages[i].offset, &damages[i].value, damages[i].size);
        uint64_t checksum = rst_hash(value + 16, size - 16);
        memcpy(value + offsetof(rst_record_header, checksum), &checksum, 8);
        rst_error error;
        int code = rst_record_check(value, size, key, 5, &error);
        if (code == RST_OK || strcmp(error.field, damages[i].field) != 0) {
            fail_msg("%s damaged: %s %s", damages[i].field, rst_code_name(code), error.field);
        }
        free(block);
    }
    rst_record_free(record);
}

/* ---------------------------------------------------------------- values */

static int set_row(uint32_t k, const int32_t *ids, const float *logprobs, rst_error *error,
                   int32_t *width)
{
    const int32_t token = 1;
    const float logprob = -1;
    rst_turn turn = {.token_count = 1,
                     .topk = k,
                     .token_ids = &token,
                     .token_logprobs = &logprob,
                     .topk_ids = ids,
                     .topk_logprobs = logprobs};
    rst_record *record = rst_record_new();
    int code = rst_record_set(record, &turn, error);
    rst_turn view;
    rst_record_view(record, &view);
    *width = view.widths ? view.widths[0] : (int32_t)view.topk;
    rst_record_free(record);
    return code;
}

static void values_that_a_record_may_not_hold(void **state)
{
    (void)state;
    const struct {
        int code;
        int32_t ids[4];
        float logprobs[4];
        int32_t width;
    } rows[] = {
        {RST_OK, {1, 2, 3, 4}, {-1, -2, -3, -4}, 4},
        {RST_OK, {1, 2, 3, -1}, {-1, -2, -3, -INFINITY}, 3},
        {RST_OK, {-1, -1, -1, -1}, {-INFINITY, -INFINITY, -INFINITY, -INFINITY}, 0},
        {RST_OK, {1, 2, 3, 4}, {0, 1e-4f, -INFINITY, -4}, 4},
        {RST_OK, {1, -1, 3, -1}, {-1, -INFINITY, -3, -INFINITY}, 3},
        {RST_OK, {INT32_MAX, 0, 3, 4}, {-1, -2, -3, -4}, 4},
        {RST_ERR_VALUE, {1, 2, 3, 1}, {-1, -2, -3, -4}, 0},
        {RST_ERR_VALUE, {1, 2, 3, -1}, {-1, -2, -3, -4}, 0},
        {RST_ERR_VALUE, {1, 2, 3, -2}, {-1, -2, -3, -INFINITY}, 0},
        {RST_ERR_VALUE, {1, 2, 3, INT32_MIN}, {-1, -2, -3, -4}, 0},
        {RST_ERR_VALUE, {1, 2, 3, 4}, {-1, -2, -3, NAN}, 0},
        {RST_ERR_VALUE, {1, 2, 3, 4}, {INFINITY, -2, -3, -4}, 0},
        {RST_ERR_VALUE, {1, 2, 3, 4}, {-1, 2e-4f, -3, -4}, 0},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        rst_error error;
        int32_t width;
        int code = set_row(4, rows[i].ids, rows[i].logprobs, &error, &width);
        if (code != rows[i].code || (code == RST_OK && width != rows[i].width)) {
            fail_msg("row %zu: %s, width %d", i, rst_code_name(code), width);
        }
    }
}

static void an_id_twice_is_found_in_every_pair_of_places(void **state)
{
    (void)state;
    static const uint32_t widths[] = {2, 3, 8, 31, 32, 33, 128, 256, 257, 1000};
    static int32_t ids[1000];
    static float logprobs[1000];
    for (size_t w = 0; w < sizeof widths / sizeof *widths; w++) {
        uint32_t k = widths[w];
        uint32_t step = k > 128 ? 97 : 1;
        for (uint32_t a = 0; a < k; a += step) {
            for (uint32_t b = a + 1; b < k; b += step) {
                for (uint32_t i = 0; i < k; i++) {
                    ids[i] = (int32_t)(i * 7919 % 151936);
                    logprobs[i] = -1;
                }
                int32_t width;
                rst_error error;
                if (k > 3 && a == 0) {
                    assert_ok(set_row(k, ids, logprobs, &error, &width), error);
                }
                ids[b] = ids[a];
                assert_code(RST_ERR_VALUE, set_row(k, ids, logprobs, &error, &width), error);
                assert_non_null(strstr(error.message, "twice"));
            }
        }
    }
}

/* Each set of wide-register functions that this processor has says what the portable one says. */
static void every_set_agrees_with_the_portable_one(void **state)
{
    (void)state;
    const char *names[] = {"portable", "avx2", "avx512"};
    uint64_t seed = 5;
    for (int n = 0; n < 3; n++) {
        if (!rst_simd_force(names[n])) {
            print_message("not run: this processor has no %s\n", names[n]);
            continue;
        }
        const rst_simd *set = rst_simd_active();
        assert_string_equal(set->name, names[n]);
        for (uint32_t count = 1; count <= 80; count++) {
            /* Blocks of the exact size, so that reading past them is found. */
            int32_t *ids = malloc(4 * count);
            float *logprobs = malloc(4 * count);
            for (uint32_t i = 0; i < count; i++) {
                ids[i] = (int32_t)(support_random(&seed) % 1000 * 100 + i);
                logprobs[i] = i % 3 ? -1.0f : -INFINITY;
            }
            assert_false(set->suspicious(ids, logprobs, count));
            bool compared = set->repeats && count <= RST_ROW_COMPARED_MAX;
            assert_false(compared && set->repeats(ids, count));
            for (uint32_t a = 0; a < count; a++) {
                const float bad[] = {NAN, INFINITY, 1.1e-4f};
                for (int b = 0; b < 3; b++) {
                    logprobs[a] = bad[b];
                    assert_true(set->suspicious(ids, logprobs, count));
                }
                logprobs[a] = RST_LOGPROB_MAX;
                int32_t id = ids[a];
                ids[a] = -1;
                assert_true(set->suspicious(ids, logprobs, count));
                for (uint32_t b = 0; compared && b < count; b++) {
                    ids[a] = ids[b];
                    assert_true(a == b || set->repeats(ids, count));
                    ids[a] ^= 0x40000000; /* half of it is the same */
                    assert_true(a == b || !set->repeats(ids, count));
                }
                ids[a] = id;
            }
            assert_false(set->suspicious(ids, logprobs, count));
            free(ids);
            free(logprobs);
        }
        for (size_t size = 0; size < 3000; size += 1 + size / 16) {
            unsigned char *bytes = malloc(size + 1);
            for (size_t i = 0; i < size; i++) {
                bytes[i] = (unsigned char)support_random(&seed);
            }
            assert_true(set->hash(bytes, size) == rst_simd_portable.hash(bytes, size));
            free(bytes);
        }
    }
    rst_simd_force("portable");
}

/* A temperature by which nothing can have been sampled is refused, from wherever it comes. */
static void temperatures_that_a_record_may_not_hold(void **state)
{
    (void)state;
    static const float bad[] = {-1.0f, -1e-30f, INFINITY, -INFINITY};
    static const float good[] = {0.0f, -0.0f, 0.7f, FLT_MAX, NAN};
    const rst_place place = {.session_key = (const uint8_t *)"0123456789abcdef"};
    rst_record *record = rst_record_new();
    const void *bytes;
    size_t size;
    rst_error error;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const rst_turn turn = {.temperature = bad[i]};
        assert_code(RST_ERR_VALUE, rst_record_set(record, &turn, &error), error);
        assert_string_equal(error.field, "temperature");
        support_fill(record, 3, 2, 1, NULL, 0, "1");
        rst_record_set_temperature(record, bad[i]);
        assert_code(RST_ERR_VALUE, rst_record_complete(record, &place, &bytes, &size, &error),
                    error);
        assert_string_equal(error.field, "temperature");
    }
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        support_fill(record, 3, 2, 1, NULL, 0, "1");
        rst_record_set_temperature(record, good[i]);
        assert_ok(rst_record_complete(record, &place, &bytes, &size, &error), error);
        assert_ok(rst_record_check(bytes, size, place.session_key, 0, &error), error);
    }
    rst_record_free(record);
}

static void weight_versions_are_numbers_only_when_plain(void **state)
{
    (void)state;
    assert_int_equal(rst_decimal_version("0", 1), 0);
    assert_int_equal(rst_decimal_version("42", 2), 42);
    assert_int_equal(rst_decimal_version("999999999999999999", 18), 999999999999999999);
    assert_int_equal(rst_decimal_version("9999999999999999999", 19), RST_NO_VERSION);
    assert_int_equal(rst_decimal_version("007", 3), RST_NO_VERSION);
    assert_int_equal(rst_decimal_version("-1", 2), RST_NO_VERSION);
    assert_int_equal(rst_decimal_version("1a", 2), RST_NO_VERSION);
    assert_int_equal(rst_decimal_version("", 0), RST_NO_VERSION);
}

static void every_code_has_a_name_and_a_text(void **state)
{
    (void)state;
    unsigned named = 0;
    for (int code = 0; code < 128; code++) {
        const char *name = rst_code_name(code);
        if (strcmp(name, "unknown") != 0) {
            named++;
            assert_true(strlen(rst_code_text(code)) > 5);
            for (int other = 0; other < code; other++) {
                assert_string_not_equal(name, rst_code_name(other));
            }
        }
    }
    assert_int_equal(named, 33);
    assert_string_equal(rst_code_name(-1), "unknown");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(offsets_are_aligned_for_every_size),
        cmocka_unit_test(counts_over_the_limits_are_refused),
        cmocka_unit_test(a_record_gives_back_what_was_put_in),
        cmocka_unit_test(every_flipped_byte_is_told),
        cmocka_unit_test(each_damaged_field_is_named),
        cmocka_unit_test(values_that_a_record_may_not_hold),
        cmocka_unit_test(an_id_twice_is_found_in_every_pair_of_places),
        cmocka_unit_test(every_set_agrees_with_the_portable_one),
        cmocka_unit_test(temperatures_that_a_record_may_not_hold),
        cmocka_unit_test(weight_versions_are_numbers_only_when_plain),
        cmocka_unit_test(every_code_has_a_name_and_a_text),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
