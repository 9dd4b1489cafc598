/* JSON texts are accepted exactly when they are JSON, and passed over correctly. */
#include <string.h>

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
        {"\xEF\xBB\xBF{}", 0, "byte order mark"},
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
    };
    return cmocka_run_group_tests(tests, NULL, free_reader);
}
