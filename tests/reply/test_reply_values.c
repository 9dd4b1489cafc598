/* Numbers and strings of JSON texts are read exactly. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "reply_support.h"

static rst_json_reader reader;

/* ---------------------------------------------------------------- numbers */

static int read_float(void *context, const rst_json *json, rst_json_node root, rst_error *error)
{
    (void)error;
    return (int)rst_json_float(json, root + 1, context);
}

/* The number in the middle of a document, and at its very end. */
static void assert_float(const char *text)
{
    static const char *const tails[] = {"]", ",\"and enough text behind it\"]", " ]",
                                        " ,\"and enough text behind it\"]"};
    float want = (float)strtod(text, NULL);
    for (size_t i = 0; i < 4; i++) {
        char document[512];
        float got = 1;
        int size = snprintf(document, sizeof document, "[%s%s", text, tails[i]);
        rst_error error = {0};
        const char *edge = at_the_edge(document, (size_t)size);
        int code = rst_json_with(&reader, edge, (size_t)size, read_float, &got, &error);
        assert_int_equal(code, RST_JSON_NUMBER_FINE);
        if (memcmp(&got, &want, 4)) {
            fail_msg("%s is read as %a, not %a", text, (double)got, (double)want);
        }
    }
}

static float random_float(uint64_t *random)
{
    uint32_t bits;
    do {
        bits = (uint32_t)support_random(random);
    } while ((bits >> 23 & 0xFF) == 0xFF);
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static void assert_float_spelled(unsigned spelling, double value)
{
    char text[400];
    switch (spelling % 7) {
    case 0:
        snprintf(text, sizeof text, "%.17g", value);
        break;
    case 1:
        snprintf(text, sizeof text, "%.9g", value);
        break;
    case 2:
        snprintf(text, sizeof text, "%.16e", value);
        break;
    case 3:
        snprintf(text, sizeof text, "%.25f", value);
        break;
    case 4:
        snprintf(text, sizeof text, "%.20f", value);
        break;
    case 5:
        snprintf(text, sizeof text, "%.3f", value);
        break;
    default:
        snprintf(text, sizeof text, "%.12E", value);
    }
    assert_float(text);
}

static void floats_are_those_nearest_to_the_nearest_double(void **state)
{
    (void)state;
    uint64_t random = 7;
    for (unsigned i = 0; i < 60000; i++) {
        double logprob = -exp2((double)(support_random(&random) % 60000) / 1000.0 - 50.0);
        assert_float_spelled(i, logprob);
        assert_float_spelled(i, (double)(float)logprob);
        assert_float_spelled(i % 3, (double)random_float(&random));
    }
}

/* Texts at, just under and just over the middle between two floats, where one wrong digit shows. */
static void floats_at_the_middle_of_two_are_right(void **state)
{
    (void)state;
    uint64_t random = 8;
    for (int i = 0; i < 40000; i++) {
        char text[400];
        float low = -(float)exp2((double)(support_random(&random) % 40000) / 1000.0 - 33.0);
        double middle = ((double)low + (double)nextafterf(low, 0)) / 2;
        for (int step = -2; step <= 2; step++) {
            double value = middle;
            for (int s = 0; s < abs(step); s++) {
                value = nextafter(value, step < 0 ? -HUGE_VAL : HUGE_VAL);
            }
            snprintf(text, sizeof text, "%.17g", value);
            assert_float(text);
            snprintf(text, sizeof text, "%.40f", value);
            assert_float(text);
        }
    }
}

static void numbers_of_every_spelling_are_read(void **state)
{
    (void)state;
    static const char *const texts[] = {
        "0",
        "-0",
        "0.0",
        "-0.0",
        "1",
        "-1",
        "0e0",
        "-0.0e5",
        "1e0",
        "1E0",
        "1e+0",
        "10.5",
        "-12.25",
        "123.5",
        "0.5e-5",
        "0.5e-05",
        "0.5E-5",
        "0.000000000000000000001",
        "0.0000000000000000000000",
        "0.5e-1",
        "0.5e-2",
        "0.25e-09",
        "-0.125e-9",
        "0.5e5",
        "0.5e+5",
        "0.5e15",
        "0.5e105",
        "0.5e-105",
        "1e400",
        "-1e400",
        "1e-400",
        "-1e-400",
        "1e38",
        "3.4e38",
        "3.5e38",
        "-3.5e38",
        "1e-45",
        "1e-46",
        "1.5e-0",
        "1.5e-00",
        "1.5e-000002",
        "9.99999999999999999999",
        "0.00000000000000000000000000001",
        "123456789012345678901234567890",
        "-0.000000000000000000000000000000000000000000001",
        "3.4028235677973366e38",
        "3.4028235677973365e38",
        "0.1234567890123456e-0005",
        "-1.1920928955078125e-07",
        "1e99999999999999999999",
        "-1e-99999999999999999999",
        "0.000e99999999999999999999",
        "0.3333333432674408",
        "-23.025850296020508",
        "0.1e-30",
        "0.1e-31",
    };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        assert_float(texts[i]);
    }
    /* Too small and too large, against what the exponent's sign suggests. */
    char *text = text_of("0.%0400d1e50", 0);
    assert_float(text);
    free(text);
    text = text_of("1%0400de-50", 0);
    assert_float(text);
    free(text);
}

typedef struct integer {
    rst_json_number verdict;
    int64_t value;
} integer;

static int read_integer(void *context, const rst_json *json, rst_json_node root, rst_error *error)
{
    integer *i = context;
    (void)error;
    i->verdict = rst_json_int64(json, root + 1, &i->value);
    return RST_OK;
}

static void integers_are_exact_or_refused(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        rst_json_number verdict;
        int64_t value;
    } cases[] = {
        {"0", RST_JSON_NUMBER_FINE, 0},
        {"-0", RST_JSON_NUMBER_FINE, 0},
        {"7", RST_JSON_NUMBER_FINE, 7},
        {"-7", RST_JSON_NUMBER_FINE, -7},
        {"12345678", RST_JSON_NUMBER_FINE, 12345678},
        {"123456789", RST_JSON_NUMBER_FINE, 123456789},
        {"9223372036854775807", RST_JSON_NUMBER_FINE, INT64_MAX},
        {"9223372036854775808", RST_JSON_OUT_OF_RANGE, 0},
        {"-9223372036854775807", RST_JSON_NUMBER_FINE, -INT64_MAX},
        {"18446744073709551616", RST_JSON_OUT_OF_RANGE, 0},
        {"184467440737095516160", RST_JSON_OUT_OF_RANGE, 0},
        {"99999999999999999999999999999999999999999", RST_JSON_OUT_OF_RANGE, 0},
        {"1.0", RST_JSON_NOT_INTEGER, 0},
        {"1e3", RST_JSON_NOT_INTEGER, 0},
        {"99999999999999999999.5", RST_JSON_NOT_INTEGER, 0},
        {"\"1\"", RST_JSON_NOT_NUMBER, 0},
        {"true", RST_JSON_NOT_NUMBER, 0},
        {"null", RST_JSON_NOT_NUMBER, 0},
    };
    static const char *const tails[] = {"]", ",\"and enough text behind it\"]", " ]"};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        for (size_t t = 0; t < 3; t++) {
            char document[256];
            integer i = {.value = 0};
            rst_error error;
            int size = snprintf(document, sizeof document, "[%s%s", cases[c].text, tails[t]);
            assert_ok(rst_json_with(&reader, at_the_edge(document, (size_t)size), (size_t)size,
                                    read_integer, &i, &error),
                      error);
            assert_int_equal(i.verdict, cases[c].verdict);
            if (i.verdict == RST_JSON_NUMBER_FINE) {
                assert_int_equal(i.value, cases[c].value);
            }
        }
    }
}

static int read_all(void *context, const rst_json *json, rst_json_node root, rst_error *error)
{
    int64_t whole;
    float single;
    double number;
    (void)context;
    (void)error;
    assert_int_equal(rst_json_int64(json, root + 1, &whole), RST_JSON_NOT_NUMBER);
    assert_int_equal(rst_json_float(json, root + 1, &single), RST_JSON_NOT_NUMBER);
    assert_int_equal(rst_json_double(json, root + 1, &number), RST_JSON_NOT_NUMBER);
    return RST_OK;
}

static void what_looks_like_a_number_is_none(void **state)
{
    (void)state;
    static const char *const texts[] = {
        "\"0.5\"", "\"-0.5\"", "\".5e-1\"", "\".5e-2\"",   "\"12345678\"",
        "\"1\"",   "\"\"",     "[0.25]",    "[-0.25,1]",   "{\"a\":0.5}",
        "null",    "true",     "false",     "\"-.25e-1\"", "\"-0.25e-01\"",
    };
    static const char *const tails[] = {"]", " ]", ",\"and enough text behind it\"]"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        for (size_t t = 0; t < 3; t++) {
            char document[128];
            rst_error error;
            int size = snprintf(document, sizeof document, "[%s%s", texts[i], tails[t]);
            assert_ok(rst_json_with(&reader, at_the_edge(document, (size_t)size), (size_t)size,
                                    read_all, NULL, &error),
                      error);
        }
    }
}

static void doubles_are_written_so_that_they_come_back(void **state)
{
    (void)state;
    uint64_t random = 9;
    for (int i = 0; i < 100000; i++) {
        double value = (double)random_float(&random);
        char text[RST_JSON_DOUBLE_SIZE + 1];
        size_t size = rst_json_write_double(value, text);
        text[size] = '\0';
        double back = strtod(text, NULL);
        assert_memory_equal(&back, &value, sizeof value);
        assert_true(strpbrk(text, ".e") != NULL);
        assert_int_equal(rst_json_number_end(text, 0, size), size);
    }
}

/* ---------------------------------------------------------------- strings */

static int read_string(void *context, const rst_json *json, rst_json_node root, rst_error *error)
{
    rst_json_buffer *out = context;
    rst_json_buffer buffer = {0};
    const char *text;
    size_t size;
    (void)error;
    int code = rst_json_string(json, root + 1, &buffer, &text, &size);
    if (code == RST_OK) {
        assert_true(rst_json_reserve(out, size + 1));
        memcpy(out->bytes, text, size);
        out->bytes[size] = '\0';
        out->capacity = size;
    }
    free(buffer.bytes);
    return code;
}

static void assert_string(const char *spelled, const char *want, size_t want_size)
{
    char document[512];
    rst_json_buffer got = {0};
    rst_error error;
    int size = snprintf(document, sizeof document, "[\"%s\" ]", spelled);
    int code = rst_json_with(&reader, at_the_edge(document, (size_t)size), (size_t)size,
                             read_string, &got, &error);
    assert_int_equal(code, want ? RST_OK : RST_ERR_VALUE);
    if (want) {
        assert_int_equal(got.capacity, want_size);
        assert_memory_equal(got.bytes, want, want_size);
    }
    free(got.bytes);
}

static void strings_are_unescaped(void **state)
{
    (void)state;
    assert_string("", "", 0);
    assert_string("plain", "plain", 5);
    assert_string("\\\"\\\\\\/\\b\\f\\n\\r\\t", "\"\\/\b\f\n\r\t", 8);
    assert_string("\\u0041\\u00e9\\u20AC", "A\xC3\xA9\xE2\x82\xAC", 6);
    assert_string("\\u0000x", "\0x", 2);
    assert_string("\\ud83d\\ude00!", "\xF0\x9F\x98\x80!", 5);
    assert_string("\\uDBFF\\uDFFF", "\xF4\x8F\xBF\xBF", 4);
    assert_string("a\\\\u0041", "a\\u0041", 7);
    assert_string("\xE2\x80\xA8", "\xE2\x80\xA8", 3);
    assert_string("\\ud83d", NULL, 0);
    assert_string("\\ud83dx", NULL, 0);
    assert_string("\\ude00\\ud83d", NULL, 0);
    assert_string("\\ud83d\\u0041", NULL, 0);
}

static int compare_strings(void *context, const rst_json *json, rst_json_node root,
                           rst_error *error)
{
    (void)error;
    *(bool *)context = rst_json_string_is(json, root + 1, "choices");
    return RST_OK;
}

static void keys_are_known_in_any_spelling(void **state)
{
    (void)state;
    static const struct {
        const char *spelled;
        bool same;
    } cases[] = {
        {"choices", true},         {"\\u0063hoices", true},
        {"choice\\u0073", true},   {"\\u0063\\u0068\\u006f\\u0069\\u0063\\u0065\\u0073", true},
        {"choice", false},         {"choicess", false},
        {"Choices", false},        {"\\u0043hoices", false},
        {"choices\\u0000", false}, {"choice\\ud800", false},
        {"\\\\choices", false},    {"", false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char document[128];
        bool same;
        rst_error error;
        int size = snprintf(document, sizeof document, "[\"%s\"]", cases[i].spelled);
        assert_ok(rst_json_with(&reader, at_the_edge(document, (size_t)size), (size_t)size,
                                compare_strings, &same, &error),
                  error);
        assert_true(same == cases[i].same);
    }
}

static int free_reader(void **state)
{
    (void)state;
    rst_json_reader_free(&reader);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(floats_are_those_nearest_to_the_nearest_double),
        cmocka_unit_test(floats_at_the_middle_of_two_are_right),
        cmocka_unit_test(numbers_of_every_spelling_are_read),
        cmocka_unit_test(integers_are_exact_or_refused),
        cmocka_unit_test(what_looks_like_a_number_is_none),
        cmocka_unit_test(doubles_are_written_so_that_they_come_back),
        cmocka_unit_test(strings_are_unescaped),
        cmocka_unit_test(keys_are_known_in_any_spelling),
    };
    return cmocka_run_group_tests(tests, NULL, free_reader);
}
