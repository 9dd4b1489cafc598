/* The lists of tokens of a flat reply, which are read without a parser: nothing about the outcome
 * may depend on it, so that every text here is decoded once with it and once without. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "layout/record.h"
#include "layout/simd.h"
#include "reply/cut.h"
#include "reply_support.h"

static const char *wide; /* a set that reads lists */

static int find_wide_set(void **state)
{
    (void)state;
    wide = rst_simd_force("avx512") ? "avx512" : rst_simd_force("avx2") ? "avx2" : NULL;
    rst_simd_force("portable");
    return 0;
}

static void need_wide_set(void)
{
    if (!wide) {
        skip();
    }
}

/* ---------------------------------------------------------------- texts */

typedef struct reply_text {
    char text[1 << 17];
    size_t size;
} reply_text;

__attribute__((format(printf, 2, 3))) static void add(reply_text *t, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    int size = vsnprintf(t->text + t->size, sizeof t->text - t->size, format, list);
    va_end(list);
    assert_true(size >= 0 && (size_t)size < sizeof t->text - t->size);
    t->size += (size_t)size;
}

static uint64_t next_number(uint64_t *seed)
{
    *seed = *seed * UINT64_C(6364136223846793005) + 1442695040888963407;
    return *seed >> 33;
}

static const char *const strings[] = {"",
                                      " the",
                                      "a",
                                      "\\n\\n",
                                      "\\\"",
                                      "\\u0041",
                                      "\\ud83d",
                                      "é",
                                      "日本語のトークン",
                                      "\\/",
                                      "an unusually long token that takes more than one look",
                                      "},{",
                                      "],[",
                                      "[{",
                                      "\\\\",
                                      "31 characters and then an escape\\t",
                                      "0123456789012345678901234567890"};
static const char *const integers[] = {
    "32",
    "0",
    "32,105,110",
    "10,0,9",
    "255,254,253,252,251,250,249,248",
    "240,159,146,169,240,159,146,169,240,159,146,169,240,159,146,169"};
static const char *const floats[] = {"-1.5",
                                     "-0.0",
                                     "0.0",
                                     "-12.25",
                                     "-1.1920928244535389e-07",
                                     "-2.5E+0",
                                     "-3",
                                     "-1e-05",
                                     "-0.10000000149011612",
                                     "-9.9999999e-5",
                                     "-4.0e-1",
                                     "-123456789.12345678901234567890",
                                     "-0.00000000000000000001",
                                     "-1.00000005960464477539062500001",
                                     "-1.0000000596046448",
                                     "-7.5e0",
                                     "-1e400"};
static const char *const ids[] = {"0", "7", "151643", "99999999", "12345"};

#define PICK(of) of[next_number(seed) % (sizeof of / sizeof *of)]

static void add_lists(reply_text *t, uint32_t count, uint64_t *seed, bool unusual)
{
    add(t, "\"logprobs\":{\"content\":[");
    for (uint32_t i = 0; i < count; i++) {
        add(t, "%s{\"token\":\"%s\",\"bytes\":[%s],\"logprob\":%s,\"top_logprobs\":[]}",
            i ? "," : "", unusual ? PICK(strings) : " tok", unusual ? PICK(integers) : "32,116",
            unusual ? PICK(floats) : "-0.31004142761230469");
    }
    bool has_texts = unusual && next_number(seed) % 2 == 0;
    add(t, "]},\"meta_info\":{\"output_token_logprobs\":[");
    for (uint32_t i = 0; i < count; i++) {
        add(t, "%s[%s,%s,%s%s%s]", i ? "," : "", unusual ? PICK(floats) : "-1.8744543790817261",
            unusual ? PICK(ids) : "129857", has_texts ? "\"" : "",
            has_texts ? PICK(strings) : "null", has_texts ? "\"" : "");
    }
    add(t, "]");
}

/* No candidates are asked for, so that a text is nothing but its lists. */
static const rst_decode_options none = {.request = RST_REQUEST_NONE};

static void make_text(reply_text *t, uint32_t count, uint64_t seed, bool unusual)
{
    t->size = 0;
    add(t, "{\"choices\":[{\"index\":0,\"message\":{\"content\":\"x\"},");
    add_lists(t, count, &seed, unusual);
    add(t, ",\"weight_version\":\"17\"},\"finish_reason\":\"stop\"}],\"padding\":\"");
    add(t, "%0200d\"}", 0);
}

/* ---------------------------------------------------------------- both ways */

static uint32_t lists_in(const char *text, size_t size)
{
    static rst_json_entry items[1 << 16];
    rst_json_entries entries = {.items = items, .room = 1 << 16};
    rst_json_cut cuts[RST_JSON_CUT_MAX];
    rst_simd_force(wide);
    uint32_t count = rst_json_find_cuts(text, size, cuts, &entries);
    rst_simd_force("portable");
    assert_true(rst_json_find_cuts(text, size, cuts, &entries) < count);
    return count;
}

static int decode_with(const char *set, rst_record *record, const char *text, size_t size,
                       rst_error *error)
{
    assert_true(rst_simd_force(set));
    int code = decode_at_the_edge(record, text, size, &none, error);
    rst_simd_force("portable");
    return code;
}

static int assert_same_both_ways(const char *text, size_t size)
{
    static rst_record *records[2];
    rst_error errors[2];
    int codes[2];
    for (int i = 0; i < 2; i++) {
        records[i] = records[i] ? records[i] : rst_record_new();
        codes[i] = decode_with(i ? wide : "portable", records[i], text, size, &errors[i]);
    }
    assert_int_equal(codes[0], codes[1]);
    if (codes[0]) {
        assert_string_equal(errors[0].message, errors[1].message);
        assert_int_equal(errors[0].offset, errors[1].offset);
        assert_int_equal(errors[0].field != NULL, errors[1].field != NULL);
        return codes[0];
    }
    rst_turn turns[2];
    rst_record_view(records[0], &turns[0]);
    rst_record_view(records[1], &turns[1]);
    assert_same_turn(&turns[0], &turns[1]);
    return RST_OK;
}

/* ---------------------------------------------------------------- tests */

static reply_text made;

static void lists_of_every_length_are_read(void **state)
{
    (void)state;
    need_wide_set();
    for (uint32_t count = 1; count < 200; count += count < 80 ? 1 : 17) {
        make_text(&made, count, count, false);
        assert_int_equal(lists_in(made.text, made.size), 2);
        assert_int_equal(assert_same_both_ways(made.text, made.size), RST_OK);
    }
}

static void values_of_every_spelling_are_read(void **state)
{
    (void)state;
    need_wide_set();
    unsigned read = 0;
    for (uint64_t seed = 0; seed < 400; seed++) {
        make_text(&made, (uint32_t)(1 + seed % 100), seed, true);
        read += lists_in(made.text, made.size) == 2;
        assert_same_both_ways(made.text, made.size);
    }
    assert_true(read > 50);
}

/* As many to a piece as there can be. */
static void the_shortest_entries_are_read(void **state)
{
    (void)state;
    need_wide_set();
    static const char *const entries[] = {"[0,7,\"\"]", "[0,7,null]", "[0,7,\"a\"]"};
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
        for (uint32_t count = 1000; count <= 6000; count += 500) {
            made.size = 0;
            add(&made, "{\"choices\":[{\"index\":0,\"message\":{},\"finish_reason\":\"stop\","
                       "\"meta_info\":{\"output_token_logprobs\":[");
            for (uint32_t e = 0; e < count; e++) {
                add(&made, "%s%s", e ? "," : "", entries[i]);
            }
            add(&made, "]}}],\"padding\":\"%0200d\"}", 0);
            assert_int_equal(lists_in(made.text, made.size), 1);
            assert_int_equal(assert_same_both_ways(made.text, made.size), RST_OK);
        }
    }
}

/* Each byte in turn becomes each of some others: the two ways find the same fault, or none. */
static void a_damaged_byte_makes_no_difference(void **state)
{
    (void)state;
    need_wide_set();
    static const char others[] = "0e.,-\"\\[]{}: n\x01\xC3";
    for (unsigned unusual = 0; unusual < 2; unusual++) {
        make_text(&made, 12, 5, unusual);
        for (size_t at = 0; at < made.size - 200; at++) {
            char kept = made.text[at];
            for (size_t i = 0; i < sizeof others; i++) {
                made.text[at] = others[i];
                assert_same_both_ways(made.text, made.size);
            }
            made.text[at] = kept;
        }
    }
}

/* The same inside of what is read at several places at once. */
static void a_damaged_byte_far_in_makes_no_difference(void **state)
{
    (void)state;
    need_wide_set();
    uint64_t seed = 7;
    make_text(&made, 300, 3, false);
    for (unsigned i = 0; i < 3000; i++) {
        size_t at = next_number(&seed) % made.size;
        char kept = made.text[at];
        made.text[at] = "0e.,-\"\\[]{}: n"[next_number(&seed) % 14];
        assert_same_both_ways(made.text, made.size);
        made.text[at] = kept;
    }
}

static void a_cut_text_makes_no_difference(void **state)
{
    (void)state;
    need_wide_set();
    make_text(&made, 40, 9, true);
    for (size_t size = 1; size < made.size; size++) {
        assert_int_not_equal(assert_same_both_ways(made.text, size), RST_OK);
    }
}

/* first, 200 times next, last; malloc'd. */
static char *repeated(const char *first, const char *next, const char *last)
{
    char *text = text_of("%s", first);
    for (unsigned i = 0; i < 200; i++) {
        char *longer = text_of("%s%s", text, next);
        free(text);
        text = longer;
    }
    char *whole = text_of("%s%s", text, last);
    free(text);
    return whole;
}

/* Texts where a list stands in a place that is none, or is none although it looks like one. */
static void what_stands_around_a_list_counts(void **state)
{
    (void)state;
    need_wide_set();
    char *entries = repeated("\"output_token_logprobs\":[[-0.5,11,null]", ",[-0.25,12,null]", "]");
    static const char *const frames[] = {
        "{\"meta_info\":{%s},\"p\":\"%s\"}",
        "{\"meta_info\":{\"a\":1%s},\"p\":\"%s\"}",
        "{\"meta_info\":{\"a\":\"%s\"},\"p\":\"%s\"}",
        "{\"meta_info\":{\"a\":%s},\"p\":\"%s\"}",
        "{\"meta_info\":[%s],\"p\":\"%s\"}",
        "{\"meta_info\":{%s,\"output_token_logprobs\":[]},\"p\":\"%s\"}",
        "{\"meta_info\":{%s,\"output_token_logprobs\":null},\"p\":\"%s\"}",
        "{\"meta_info\":{\"output_token_logprobs\":[],%s},\"p\":\"%s\"}",
        "{\"meta_info\":{%s},\"content\":[{\"content\":[{\"a\":1}]}],\"p\":\"%s\"}",
        "{\"meta_info\":{%s},\"x\\\"content\":[{\"a\":1}],\"p\":\"%s\"}",
        "{\"meta_info\":{%s},\"content\":[{\"a\":1},{\"a\":2},{\"b\":2}],\"p\":\"%s\"}",
        "{\"meta_info\":{%s},\"content\":[{\"a\":1},{\"a\":2},],\"p\":\"%s\"}",
        "{\"meta_info\":{%s},\"content\":[{\"a\":1}{\"a\":2}],\"p\":\"%s\"}",
        "{\"meta_info\":{%s},\"content\":[{\"a\":truely},{\"a\":truely}],\"p\":\"%s\"}",
        "{\"meta_info\":{%s},\"content\":[{}],\"p\":\"%s\"}",
        "{\"meta_info\":{%s},\"content\":[{\"a\":[]},{\"a\":[1]}],\"p\":\"%s\"}"};
    char padding[301];
    memset(padding, 'p', 300);
    padding[300] = '\0';
    for (size_t i = 0; i < sizeof frames / sizeof *frames; i++) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
        char *text = text_of(frames[i], entries, padding);
#pragma GCC diagnostic pop
        assert_same_both_ways(text, strlen(text));
        free(text);
    }
    free(entries);
}

/* A string in a list that is left out itself. */
static void a_list_with_a_long_string_is_left_to_the_parser(void **state)
{
    (void)state;
    need_wide_set();
    made.size = 0;
    add(&made, "{\"meta_info\":{\"output_token_logprobs\":[[-0.5,11,null]]},\"content\":[");
    for (unsigned i = 0; i < 20; i++) {
        add(&made, "{\"a\":\"%0*d\"},", i == 10 ? 20000 : 9, 0);
    }
    add(&made, "{\"a\":\"\"}],\"p\":\"%0300d\"}", 0);
    assert_int_equal(lists_in(made.text, made.size), 2); /* the first list, and the string */
    assert_int_equal(assert_same_both_ways(made.text, made.size), RST_OK);
}

/* Brackets in a list count to the depth of nesting. */
static void a_list_may_be_too_deep(void **state)
{
    (void)state;
    need_wide_set();
    for (size_t depth = RST_JSON_DEPTH_MAX - 6; depth <= RST_JSON_DEPTH_MAX; depth++) {
        made.size = 0;
        add(&made, "{\"meta_info\":{\"output_token_logprobs\":[]},\"a\":");
        for (size_t i = 0; i < depth - 2; i++) {
            add(&made, "[");
        }
        char *list = repeated("[{\"a\":[1,2]}", ",{\"a\":[1,2]}", "]");
        add(&made, "{\"content\":%s,\"p\":\"%0300d\"}", list, 0);
        free(list);
        for (size_t i = 0; i < depth - 2; i++) {
            add(&made, "]");
        }
        add(&made, "}");
        assert_int_equal(lists_in(made.text, made.size), 1);
        bool fits = depth + 3 <= RST_JSON_DEPTH_MAX;
        assert_int_equal(assert_same_both_ways(made.text, made.size),
                         fits ? RST_OK : RST_ERR_SYNTAX);
    }
}

/* Refusals of what is well spelled have their place in the whole text. */
static void a_bad_value_is_found_at_its_place(void **state)
{
    (void)state;
    need_wide_set();
    static const char *const bad[] = {"[0.25,129857,null]", "[-1.5,2147483648,null]",
                                      "[-1.5,-1,null]", "[1e39,5,null]"};
    make_text(&made, 60, 1, false);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char *text = replaced(made.text, "[-1.8744543790817261,129857,null]", bad[i]);
        assert_int_equal(assert_same_both_ways(text, strlen(text)), RST_ERR_VALUE);
        free(text);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lists_of_every_length_are_read),
        cmocka_unit_test(values_of_every_spelling_are_read),
        cmocka_unit_test(the_shortest_entries_are_read),
        cmocka_unit_test(a_damaged_byte_makes_no_difference),
        cmocka_unit_test(a_damaged_byte_far_in_makes_no_difference),
        cmocka_unit_test(a_cut_text_makes_no_difference),
        cmocka_unit_test(what_stands_around_a_list_counts),
        cmocka_unit_test(a_list_with_a_long_string_is_left_to_the_parser),
        cmocka_unit_test(a_list_may_be_too_deep),
        cmocka_unit_test(a_bad_value_is_found_at_its_place),
    };
    return cmocka_run_group_tests(tests, find_wide_set, NULL);
}
