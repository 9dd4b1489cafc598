/* The values of numbers.  The document is valid, so that every number is well spelled. */
#include "number.h"

#include <math.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "eight characters are loaded as one number");

/* The text of a number, up to the next node, and how much of the document follows. */
typedef struct number_text {
    const char *text;
    size_t size; /* with blanks that may follow */
    size_t room;
} number_text;

static number_text text_of(const rst_json *json, rst_json_node node)
{
    size_t begin = rst_json_offset(json, node);
    return (number_text){.text = json->text + begin,
                         .size = rst_json_offset(json, node + 1) - begin,
                         .room = json->size - begin};
}

/* The number that eight digits write. */
static inline uint64_t eight_digits(uint64_t eight)
{
    eight -= UINT64_C(0x3030303030303030);
    eight = eight * 10 + (eight >> 8); /* pairs, in every other byte */
    uint64_t low = (eight & UINT64_C(0x000000FF000000FF)) * UINT64_C(0x000F424000000064);
    uint64_t high = ((eight >> 16) & UINT64_C(0x000000FF000000FF)) * UINT64_C(0x0000271000000001);
    return (low + high) >> 32;
}

/* ---------------------------------------------------------------- integers */

static rst_json_number unusual_int64(number_text n, int64_t *value)
{
    bool negative = n.text[0] == '-';
    size_t at = negative;
    uint64_t digits = 0;
    for (; at < n.room && n.text[at] >= '0' && n.text[at] <= '9'; at++) {
        if (__builtin_mul_overflow(digits, 10, &digits) ||
            __builtin_add_overflow(digits, (uint64_t)(n.text[at] - '0'), &digits)) {
            digits = UINT64_MAX;
        }
    }
    if (at < n.room && (n.text[at] == '.' || n.text[at] == 'e' || n.text[at] == 'E')) {
        return RST_JSON_NOT_INTEGER;
    }
    if (digits > (uint64_t)INT64_MAX) {
        return RST_JSON_OUT_OF_RANGE;
    }
    *value = negative ? -(int64_t)digits : (int64_t)digits;
    return RST_JSON_NUMBER_FINE;
}

rst_json_number rst_json_int64(const rst_json *json, rst_json_node node, int64_t *value)
{
    if (!rst_json_is_number(json, node)) {
        return RST_JSON_NOT_NUMBER;
    }
    number_text n = text_of(json, node);
    if (!rst_json_small_integer(n.text, n.size, n.room)) {
        return unusual_int64(n, value);
    }
    /* The digits to the top, and leading zeros below them. */
    uint64_t eight = rst_json_load8(n.text) << (64 - 8 * n.size);
    if (n.size < 8) {
        eight |= UINT64_C(0x3030303030303030) >> 8 * n.size;
    }
    *value = (int64_t)eight_digits(eight);
    return RST_JSON_NUMBER_FINE;
}

/* ---------------------------------------------------------------- floats */

/* Powers of ten from 10^-46 on, each rounded to the nearest double. */
static const double powers_of_ten[] = {1e-46, 1e-45, 1e-44, 1e-43, 1e-42, 1e-41, 1e-40, 1e-39,
                                       1e-38, 1e-37, 1e-36, 1e-35, 1e-34, 1e-33, 1e-32, 1e-31,
                                       1e-30, 1e-29, 1e-28, 1e-27, 1e-26, 1e-25, 1e-24, 1e-23,
                                       1e-22, 1e-21, 1e-20, 1e-19, 1e-18, 1e-17, 1e-16};
#define EXPONENT_MIN (-30) /* of a number, whose digits are counted in 10^-16 */

/* Entry 16 - d keeps the first d bytes of eight, 8 at most; entry 24 - d those of the eight before
 * which eight others stand. */
static const uint64_t keep_first[25] = {
    [0] = UINT64_MAX,
    [1] = UINT64_MAX,
    [2] = UINT64_MAX,
    [3] = UINT64_MAX,
    [4] = UINT64_MAX,
    [5] = UINT64_MAX,
    [6] = UINT64_MAX,
    [7] = UINT64_MAX,
    [8] = UINT64_MAX,
    [9] = UINT64_C(0x00FFFFFFFFFFFFFF),
    [10] = UINT64_C(0x0000FFFFFFFFFFFF),
    [11] = UINT64_C(0x000000FFFFFFFFFF),
    [12] = UINT64_C(0x00000000FFFFFFFF),
    [13] = UINT64_C(0x0000000000FFFFFF),
    [14] = UINT64_C(0x000000000000FFFF),
    [15] = UINT64_C(0x00000000000000FF),
};

static inline uint64_t first_digits(const char *text, uint64_t keep)
{
    uint64_t eight = rst_json_load8(text);
    return eight_digits((eight & keep) | (UINT64_C(0x3030303030303030) & ~keep));
}

/* Take "e-5" or "e-05" off the end of a number. */
static inline int take_exponent(number_text *n)
{
    const char *end = n->text + n->size;
    size_t length = end[-4] == 'e' ? 4 : 3;
    if (end[-(ptrdiff_t)length] != 'e' || end[1 - (ptrdiff_t)length] != '-') {
        return 0;
    }
    n->size -= length;
    return -(10 * (length == 4 ? end[-2] - '0' : 0) + (end[-1] - '0'));
}

/*
 * What is wanted is the double nearest to the text, rounded to float.  The product below is off the
 * exact value by the digits that are left out, less than 10^-12 of it, and by three roundings.  A
 * double has 29 bits more than a float: as long as these are not near one half, every double that
 * close by rounds to the same float, and the nearest one is among them.  Near one half (once in ten
 * thousand), outside the range where floats have all their bits, and for spellings that are rare,
 * the answer is false, and the exact way must be taken.
 */
static inline bool quick_float(number_text n, float *value)
{
    const uint64_t half = UINT64_C(1) << 28;
    const uint64_t near = UINT64_C(1) << 14; /* 10^-12 is below 2^13.2 of a double's last places */
    const uint64_t unit = UINT64_C(10000000000000000);
    bool negative = n.text[0] == '-';
    if (n.size < 4 || n.size > RST_JSON_USUAL_SIZE || n.room <= RST_JSON_USUAL_SIZE) {
        return false;
    }
    const char *point = n.text + negative + 1;
    uint64_t integer = (uint64_t)(point[-1] - '0');
    if (*point != '.') { /* two digits before it, or another spelling */
        integer = 10 * integer + (uint64_t)(*point++ - '0');
    }
    int exponent = take_exponent(&n);
    const char *first = point + 1;
    size_t count = (size_t)(n.text + n.size - first); /* digits of the fraction */
    uint32_t others = rst_json_non_digit_bits(n.text) & ((UINT32_C(1) << n.size) - 1);
    if (*point != '.' || others >> (first - n.text) || exponent < EXPONENT_MIN) {
        return false;
    }
    uint64_t high = first_digits(first, keep_first[count < 16 ? 16 - count : 0]);
    uint64_t low = first_digits(first + 8, keep_first[24 - count]);
    uint64_t digits = integer * unit + high * 100000000 + low;
    double product = (double)digits * powers_of_ten[exponent - EXPONENT_MIN];
    uint64_t bits;
    memcpy(&bits, &product, sizeof bits);
    bool near_half = (bits & (2 * half - 1)) - (half - near) <= 2 * near;
    if (near_half || digits < unit / 10000 || product < 1e-37) {
        *value = negative ? -0.0f : 0.0f;
        return digits == 0 && count <= 16;
    }
    *value = (float)(negative ? -product : product);
    return true;
}

/* Every double from here on rounds to a float's infinity: FLT_MAX and half of its last place. */
#define FLOAT_OVERFLOW 0x1.ffffffp127

static double exact_double(number_text n)
{
    return rst_json_exact_double(n.text, rst_json_number_end(n.text, 0, n.room));
}

rst_json_number rst_json_float(const rst_json *json, rst_json_node node, float *value)
{
    if (!rst_json_is_number(json, node)) {
        return RST_JSON_NOT_NUMBER;
    }
    number_text n = text_of(json, node);
    if (quick_float(n, value)) {
        return RST_JSON_NUMBER_FINE;
    }
    double exact = exact_double(n);
    if (fabs(exact) >= FLOAT_OVERFLOW && !isinf(exact)) {
        return RST_JSON_OUT_OF_RANGE;
    }
    *value = (float)exact;
    return RST_JSON_NUMBER_FINE;
}

rst_json_number rst_json_double(const rst_json *json, rst_json_node node, double *value)
{
    if (!rst_json_is_number(json, node)) {
        return RST_JSON_NOT_NUMBER;
    }
    *value = exact_double(text_of(json, node));
    return RST_JSON_NUMBER_FINE;
}
