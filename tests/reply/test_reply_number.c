/* The quick looks at numbers say yes only to what the slow one says yes to, and to all that they
 * promise to know. */
#include <string.h>

#include "reply/number.h"
#include "support.h"

static void non_digit_bits_tell_each_byte(void **state)
{
    (void)state;
    for (int byte = 0; byte < 256; byte++) {
        for (size_t at = 0; at < RST_JSON_USUAL_SIZE; at++) {
            char text[RST_JSON_USUAL_SIZE];
            memset(text, at % 2 ? '9' : '0', sizeof text);
            text[at] = (char)byte;
            bool digit = byte >= '0' && byte <= '9';
            assert_int_equal(rst_json_non_digit_bits(text), digit ? 0u : UINT32_C(1) << at);
        }
    }
}

/* Anything that could be taken for a number, with something behind it. */
static size_t random_number(char *text, uint64_t *random)
{
    static const char bytes[] = "0123456789000111--..eE+ ,";
    size_t size = 1 + support_random(random) % 26;
    bool likely = support_random(random) % 2;
    for (size_t i = 0; i < 64; i++) {
        text[i] = bytes[support_random(random) % (likely && i < size ? 16 : sizeof bytes - 1)];
    }
    if (likely) { /* digits with a few other things */
        text[0] = support_random(random) % 2 ? '-' : text[0];
        text[1 + support_random(random) % 3] = '.';
        if (support_random(random) % 2 && size > 4) {
            text[size - 3] = 'e';
            text[size - 2] = '-';
        }
    }
    return size;
}

static void quick_looks_agree_with_the_slow_one(void **state)
{
    (void)state;
    uint64_t random = 3;
    size_t usual = 0, fractions = 0, small = 0;
    for (int i = 0; i < 3000000; i++) {
        char text[64];
        size_t size = random_number(text, &random);
        char behind = text[size];
        text[size] = ','; /* the slow look stops there at the latest */
        bool is_number = rst_json_number_end(text, 0, sizeof text) == size;
        text[size] = behind;
        bool exponent = memchr(text, 'e', size) || memchr(text, 'E', size);
        bool is_usual = rst_json_usual_number(text, size, sizeof text);
        bool is_fraction = rst_json_small_fraction(text, size, sizeof text);
        bool is_small = rst_json_small_integer(text, size, sizeof text);
        assert_true(is_number || !(is_usual | is_fraction | is_small));
        if (is_number && !exponent && size <= RST_JSON_USUAL_SIZE) {
            assert_true(is_usual);
        }
        if (is_number && size <= 8 && text[0] != '-' && !memchr(text, '.', size) && !exponent) {
            assert_true(is_small);
        }
        if (is_fraction) {
            assert_true(memchr(text, '.', size) && !exponent);
        }
        usual += is_usual;
        fractions += is_fraction;
        small += is_small;
    }
    assert_true(usual > 100000 && fractions > 50000 && small > 50000);
}

/* With less to read than the look needs, it says nothing. */
static void quick_looks_keep_to_the_room_they_have(void **state)
{
    (void)state;
    static const char text[64] = "-0.1234567890123456,";
    assert_true(rst_json_usual_number(text, 19, RST_JSON_USUAL_SIZE + 1));
    assert_false(rst_json_usual_number(text, 19, RST_JSON_USUAL_SIZE));
    assert_true(rst_json_small_fraction(text, 19, RST_JSON_USUAL_SIZE));
    assert_false(rst_json_small_fraction(text, 19, RST_JSON_USUAL_SIZE - 1));
    assert_true(rst_json_small_integer("12345678", 8, 8));
    assert_false(rst_json_small_integer("1234567,", 7, 7));
    assert_int_equal(rst_json_integer_list("1]                             ", 31), 0);
}

static size_t plain_list(const char *text)
{
    for (size_t at = 0; at < 32;) {
        size_t end = rst_json_digits_end(text, at, 32);
        if (end == at || end == 32 || (text[at] == '0' && end > at + 1)) {
            return 0;
        }
        if (text[end] == ']') {
            return end;
        }
        if (text[end] != ',') {
            return 0;
        }
        at = end + 1;
    }
    return 0;
}

static void lists_of_integers_are_known(void **state)
{
    (void)state;
    static const char bytes[] = "0123456789,,,,,]";
    uint64_t random = 4;
    size_t lists = 0;
    for (int i = 0; i < 3000000; i++) {
        char text[33];
        bool noise = support_random(&random) % 8 == 0;
        for (size_t j = 0; j < 32; j++) {
            bool comma = j % 4 == 3 && !noise;
            text[j] = comma ? ',' : bytes[support_random(&random) % (noise ? 16 : 10)];
        }
        text[support_random(&random) % 33] = ']';
        text[support_random(&random) % 33] = bytes[support_random(&random) % 16];
        size_t end = rst_json_integer_list(text, 32);
#ifdef RST_JSON_PORTABLE
        assert_int_equal(end, 0);
#else
        assert_int_equal(end, plain_list(text));
#endif
        lists += plain_list(text) > 0;
    }
    assert_true(lists > 100000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(non_digit_bits_tell_each_byte),
        cmocka_unit_test(quick_looks_agree_with_the_slow_one),
        cmocka_unit_test(quick_looks_keep_to_the_room_they_have),
        cmocka_unit_test(lists_of_integers_are_known),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
