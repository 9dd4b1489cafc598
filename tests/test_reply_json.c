/* JSON texts: accepted exactly when they are JSON, passed over and read correctly. */
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "reply/number.h"
#include "reply_support.h"

/* ---------------------------------------------------------------- what JSON is
 *
 * A second opinion: RFC 8259 written down as plainly as possible. */

typedef struct plain {
    const unsigned char *text;
    size_t size;
    size_t at;
} plain;

static int look(const plain *p)
{
    return p->at < p->size ? p->text[p->at] : -1;
}

static void blanks(plain *p)
{
    while (look(p) == ' ' || look(p) == '\t' || look(p) == '\n' || look(p) == '\r') {
        p->at++;
    }
}

static bool digits(plain *p)
{
    size_t from = p->at;
    while (look(p) >= '0' && look(p) <= '9') {
        p->at++;
    }
    return p->at > from;
}

static bool is_hex(int c)
{
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
}

static bool plain_string(plain *p)
{
    p->at++;
    while (look(p) != '"') {
        int c = look(p);
        if (c < 0x20) {
            return false;
        }
        if (c == '\\') {
            p->at++;
            c = look(p);
            if (c < 0 || !strchr("\"\\/bfnrtu", c) || c == 0) {
                return false;
            }
            for (int i = 0; c == 'u' && i < 4; i++) {
                p->at++;
                if (!is_hex(look(p))) {
                    return false;
                }
            }
        }
        p->at++;
    }
    p->at++;
    return true;
}

static bool plain_number(plain *p)
{
    p->at += look(p) == '-';
    bool zero = look(p) == '0';
    size_t from = p->at;
    if (!digits(p) || (zero && p->at > from + 1)) {
        return false;
    }
    if (look(p) == '.') {
        p->at++;
        if (!digits(p)) {
            return false;
        }
    }
    if (look(p) == 'e' || look(p) == 'E') {
        p->at++;
        p->at += look(p) == '+' || look(p) == '-';
        return digits(p);
    }
    return true;
}

static bool plain_value(plain *p, int depth);

static bool plain_container(plain *p, int depth)
{
    bool object = look(p) == '{';
    int close = object ? '}' : ']';
    p->at++;
    blanks(p);
    if (look(p) == close) {
        p->at++;
        return true;
    }
    for (;;) {
        blanks(p);
        if (object) {
            if (look(p) != '"' || !plain_string(p)) {
                return false;
            }
            blanks(p);
            if (look(p) != ':') {
                return false;
            }
            p->at++;
        }
        if (!plain_value(p, depth + 1)) {
            return false;
        }
        if (look(p) == close) {
            p->at++;
            return true;
        }
        if (look(p) != ',') {
            return false;
        }
        p->at++;
    }
}

/* A value and the blanks around it. */
static bool plain_value(plain *p, int depth)
{
    static const char *const literals[] = {"true", "false", "null"};
    blanks(p);
    int c = look(p);
    bool fine = false;
    if (c == '{' || c == '[') {
        fine = depth < RST_JSON_DEPTH_MAX && plain_container(p, depth);
    } else if (c == '"') {
        fine = plain_string(p);
    } else if (c == '-' || (c >= '0' && c <= '9')) {
        fine = plain_number(p);
    } else {
        for (size_t i = 0; i < 3; i++) {
            size_t length = strlen(literals[i]);
            if (p->size - p->at >= length && !memcmp(p->text + p->at, literals[i], length)) {
                p->at += length;
                fine = true;
                break;
            }
        }
    }
    blanks(p);
    return fine;
}

static bool is_utf8(const char *text, size_t size)
{
    for (size_t at = 0; at < size;) {
        size_t length = rst_json_utf8_length(text + at, size - at);
        if (length == 0) {
            return false;
        }
        at += length;
    }
    return true;
}

static bool is_json(const char *text, size_t size)
{
    plain p = {.text = (const unsigned char *)text, .size = size};
    return is_utf8(text, size) && plain_value(&p, 0) && p.at == size;
}

/* ---------------------------------------------------------------- the grammar */

static rst_json_reader reader;

/* Every jump over a value ends behind it. */
static void check_jumps(const rst_json *json, rst_json_node node)
{
    char first = rst_json_first(json, node);
    if (first != '{' && first != '[') {
        return;
    }
    rst_json_node child = rst_json_begin(json, node);
    rst_json_node end = node + 1;
    while (child != RST_JSON_NONE) {
        rst_json_node value = first == '{' ? rst_json_value(child) : child;
        if (first == '{') {
            assert_int_equal(rst_json_first(json, child), '"');
            assert_int_equal(rst_json_first(json, child + 1), ':');
        }
        check_jumps(json, value);
        end = rst_json_after(json, value);
        child = rst_json_next(json, value);
    }
    assert_int_equal(rst_json_first(json, end), first == '{' ? '}' : ']');
    assert_int_equal(json->ends[node], end);
}

static int look_around(void *context, const rst_json *json, rst_json_node root, rst_error *error)
{
    (void)context;
    (void)error;
    check_jumps(json, root);
    return RST_OK;
}

static void assert_verdict(const char *text, size_t size)
{
    rst_error error;
    const char *edge = at_the_edge(text, size);
    int code = rst_json_with(&reader, edge, size, look_around, NULL, &error);
    bool want = is_json(text, size);
    if (want != (code == RST_OK)) {
        fail_msg("%s, but it is %s: %.*s", want ? error.message : "accepted",
                 want ? "JSON" : "not JSON", (int)size, text);
    }
    if (code) {
        assert_code(RST_ERR_SYNTAX, code, error);
        assert_in_range(error.offset, 0, size);
    }
}

static const char *const parts[] = {"{",
                                    "}",
                                    "[",
                                    "]",
                                    ":",
                                    ",",
                                    "\"",
                                    "\"a\"",
                                    "\"b\":",
                                    "1",
                                    "0",
                                    "-",
                                    ".",
                                    "e",
                                    "E+",
                                    "true",
                                    "false",
                                    "null",
                                    " ",
                                    "\n",
                                    "\\",
                                    "\\n",
                                    "\\u00e9",
                                    "\\u12",
                                    "\xC3\xA9",
                                    "\xC3",
                                    "\xED\xA0\x80",
                                    "12.5",
                                    "-0.25",
                                    "01",
                                    "1e5",
                                    "[]",
                                    "{}",
                                    "[1,2,300]",
                                    "[1]",
                                    "\x01",
                                    "\x7F",
                                    "tru",
                                    "nulll",
                                    "\"\"",
                                    "\"\\\"\"",
                                    "\"a\":1",
                                    "\xEF\xBB\xBF",
                                    "\t",
                                    "1,1"};
#define PART_COUNT (sizeof parts / sizeof *parts)

static void random_texts_are_accepted_exactly_when_they_are_json(void **state)
{
    (void)state;
    uint64_t random = 5;
    for (int i = 0; i < 400000; i++) {
        char text[256];
        size_t size = 0;
        size_t count = 1 + support_random(&random) % 12;
        text[0] = '\0';
        for (size_t j = 0; j < count; j++) {
            const char *part = parts[support_random(&random) % PART_COUNT];
            memcpy(text + size, part, strlen(part));
            size += strlen(part);
        }
        assert_verdict(text, size);
    }
}

/* A random document, written to out; returns its end. */
static char *grow(char *out, char *end, uint64_t *random, int depth)
{
    static const char *const scalars[] = {
        "0",
        "-1.5",
        "\"x\"",
        "null",
        "[]",
        "{}",
        "true",
        "1.25e3",
        "\"\\u0041\"",
        "255",
        "-7.0e-05",
        "[32,116,104]",
        "[0]",
        "[7,0,10]",
        "-0.01234567890123",
        "123456789.25",
        "-12.5",
        "[1,-2]",
    };
    uint64_t kind = support_random(random) % 8;
    if (kind < 4 || depth == 0 || end - out < 200) {
        const char *text = scalars[support_random(random) % (sizeof scalars / sizeof *scalars)];
        return stpcpy(out, text);
    }
    bool object = kind < 6;
    size_t count = support_random(random) % 5;
    *out++ = object ? '{' : '[';
    for (size_t i = 0; i < count; i++) {
        out = stpcpy(out, i ? "," : "");
        out = stpcpy(out, support_random(random) % 4 ? "" : " ");
        out = stpcpy(out, object ? "\"key\":" : "");
        out = grow(out, end - 100, random, depth - 1);
    }
    *out++ = object ? '}' : ']';
    return out;
}

/* Good documents with one byte changed, taken out or put in: the near misses. */
static void near_misses_are_accepted_exactly_when_they_are_json(void **state)
{
    (void)state;
    static const char bytes[] = "{}[]:,\"\\019.-+eEtfn aé\n\x01";
    uint64_t random = 6;
    for (int i = 0; i < 150000; i++) {
        char text[4096];
        char *end = grow(text, text + 2048, &random, 5);
        size_t size = (size_t)(end - text);
        assert_true(is_json(text, size));
        assert_verdict(text, size);
        size_t at = support_random(&random) % size;
        char byte = bytes[support_random(&random) % (sizeof bytes - 1)];
        switch (support_random(&random) % 3) {
        case 0:
            text[at] = byte;
            break;
        case 1:
            memmove(text + at, text + at + 1, size - at - 1);
            size--;
            break;
        default:
            memmove(text + at + 1, text + at, size - at);
            text[at] = byte;
            size++;
        }
        assert_verdict(text, size);
    }
}

static void depth_is_limited_everywhere(void **state)
{
    (void)state;
    for (int depth = RST_JSON_DEPTH_MAX - 1; depth <= RST_JSON_DEPTH_MAX + 1; depth++) {
        char text[4 * RST_JSON_DEPTH_MAX];
        char *out = text;
        for (int i = 0; i < depth; i++) {
            out = stpcpy(out, i % 2 ? "[" : i + 1 < depth ? "{\"\":" : "{");
        }
        for (int i = depth; i-- > 0;) {
            *out++ = i % 2 ? ']' : '}';
        }
        size_t size = (size_t)(out - text);
        assert_true(is_json(text, size) == (depth <= RST_JSON_DEPTH_MAX));
        assert_verdict(text, size);
    }
}

static void faults_are_told_with_their_place(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        int64_t offset;
        const char *says;
    } cases[] = {
        {"{\"a\":tru}", 5, "no JSON value"},
        {"{\"a\":1 2}", 7, "',' or '}'"},
        {"{\"a\":\"\x01\"}", 6, "control character"},
        {"{\"a\":\"\xFF\"}", 6, "UTF-8"},
        {"{\"a\":\"x}", 5, "does not end"},
        {"{\"a\":\"\\x\"}", 6, "begins no escape"},
        {"{\"a\":[1,2}", 9, "',' or ']'"},
        {"{\"a\" 1}", 1, "key and ':'"},
        {"[[1]", 4, "open brackets"},
        {"{}{}", 2, "after the document's end"},
        {"{} x", 3, "closes no bracket"},
        {"   ", 0, "no value"},
        {"\xEF\xBB\xBF{}", 0, "no JSON value"},
        {"[\"a\"b]", 4, "',' or ']'"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        rst_error error;
        size_t size = strlen(cases[i].text);
        int code = rst_json_with(&reader, at_the_edge(cases[i].text, size), size, look_around, NULL,
                                 &error);
        assert_code(RST_ERR_SYNTAX, code, error);
        assert_non_null(strstr(error.message, cases[i].says));
        assert_int_equal(error.offset, cases[i].offset);
        assert_string_equal(error.field, "");
    }
}

/* ---------------------------------------------------------------- numbers */

static int read_float(void *context, const rst_json *json, rst_json_node root, rst_error *error)
{
    (void)error;
    return (int)rst_json_float(json, root + 1, context);
}

/* The number in the middle of a document, and at its very end. */
static void assert_float(const char *text)
{
    static const char *const tails[] = {"]", ",\"and enough text behind it\"]", " ]"};
    double exact = strtod(text, NULL);
    float want = (float)exact;
    bool fits = isinf(exact) || !isinf(want);
    for (size_t i = 0; i < 3; i++) {
        char document[512];
        float got = 1;
        int size = snprintf(document, sizeof document, "[%s%s", text, tails[i]);
        rst_error error = {0};
        const char *edge = at_the_edge(document, (size_t)size);
        int code = rst_json_with(&reader, edge, (size_t)size, read_float, &got, &error);
        assert_int_equal(code, fits ? RST_JSON_NUMBER_FINE : RST_JSON_OUT_OF_RANGE);
        if (fits && memcmp(&got, &want, 4)) {
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

static void floats_are_those_nearest_to_the_nearest_double(void **state)
{
    (void)state;
    static const char *const formats[] = {"%.17g", "%.9g", "%.16e", "%.25f",
                                          "%.20f", "%.3f", "%.12E"};
    uint64_t random = 7;
    for (int i = 0; i < 60000; i++) {
        char text[400];
        double logprob = -exp2((double)(support_random(&random) % 60000) / 1000.0 - 50.0);
        snprintf(text, sizeof text, formats[i % 7], logprob);
        assert_float(text);
        snprintf(text, sizeof text, formats[i % 7], (double)(float)logprob);
        assert_float(text);
        snprintf(text, sizeof text, formats[i % 3], (double)random_float(&random));
        assert_float(text);
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
        assert_true(is_json(text, size));
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
        cmocka_unit_test(random_texts_are_accepted_exactly_when_they_are_json),
        cmocka_unit_test(near_misses_are_accepted_exactly_when_they_are_json),
        cmocka_unit_test(depth_is_limited_everywhere),
        cmocka_unit_test(faults_are_told_with_their_place),
        cmocka_unit_test(floats_are_those_nearest_to_the_nearest_double),
        cmocka_unit_test(floats_at_the_middle_of_two_are_right),
        cmocka_unit_test(numbers_of_every_spelling_are_read),
        cmocka_unit_test(integers_are_exact_or_refused),
        cmocka_unit_test(doubles_are_written_so_that_they_come_back),
        cmocka_unit_test(strings_are_unescaped),
        cmocka_unit_test(keys_are_known_in_any_spelling),
    };
    return cmocka_run_group_tests(tests, NULL, free_reader);
}
