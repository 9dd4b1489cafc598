/* The values of numbers.  Internal; quick ways in a header, like number.h, and the others behind
 * them.  The document is valid, so that every number is well spelled. */
#ifndef RST_SRC_REPLY_VALUE_H
#define RST_SRC_REPLY_VALUE_H

#include "number.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "eight characters are loaded as one number");

/* The text of a number, up to the next node, and how much of the document follows. */
typedef struct rst_json_number_text {
    const char *text;
    size_t size; /* with blanks that may follow */
    size_t room;
} rst_json_number_text;

static inline rst_json_number_text rst_json_number_text_of(const rst_json *json, rst_json_node node)
{
    size_t begin = rst_json_offset(json, node);
    return (rst_json_number_text){.text = json->text + begin,
                                  .size = rst_json_offset(json, node + 1) - begin,
                                  .room = json->size - begin};
}

/* The number that eight digits write. */
static inline uint64_t rst_json_eight_digits(uint64_t eight)
{
    eight -= UINT64_C(0x3030303030303030);
    eight = eight * 10 + (eight >> 8); /* pairs, in every other byte */
    uint64_t low = (eight & UINT64_C(0x000000FF000000FF)) * UINT64_C(0x000F424000000064);
    uint64_t high = ((eight >> 16) & UINT64_C(0x000000FF000000FF)) * UINT64_C(0x0000271000000001);
    return (low + high) >> 32;
}

/* ---------------------------------------------------------------- integers */

rst_json_number rst_json_unusual_int64(rst_json_number_text n, int64_t *value);

static inline rst_json_number rst_json_int64(const rst_json *json, rst_json_node node,
                                             int64_t *value)
{
    rst_json_number_text n = rst_json_number_text_of(json, node);
    if (!rst_json_small_integer(n.text, n.size, n.room)) {
        return rst_json_unusual_int64(n, value);
    }
    /* The digits to the top, and leading zeros below them. */
    uint64_t eight = rst_json_load8(n.text) << (64 - 8 * n.size);
    if (n.size < 8) {
        eight |= UINT64_C(0x3030303030303030) >> 8 * n.size;
    }
    *value = (int64_t)rst_json_eight_digits(eight);
    return RST_JSON_NUMBER_FINE;
}

/* ---------------------------------------------------------------- floats */

/* Powers of ten from 10^-46 to 10^-16, each rounded to the nearest double. */
extern const double rst_json_powers_of_ten[31];
#define RST_JSON_EXPONENT_MIN (-30) /* of a number, whose digits are counted in 10^-16 */

/* Entry 16 - d keeps the first d bytes of eight, 8 at most; entry 24 - d those of the eight behind
 * them. */
extern const uint64_t rst_json_keep_first[25];

static inline uint64_t rst_json_first_digits(const char *text, uint64_t keep)
{
    uint64_t eight = rst_json_load8(text);
    return rst_json_eight_digits((eight & keep) | (UINT64_C(0x3030303030303030) & ~keep));
}

/* Take "e-5" or "e-05" off the end of a number.  False for other spellings. */
static inline bool rst_json_take_exponent(rst_json_number_text *n, int *exponent)
{
    const char *end = n->text + n->size;
    size_t length = end[-4] == 'e' ? 4 : 3;
    if (end[-(ptrdiff_t)length] != 'e' || end[1 - (ptrdiff_t)length] != '-' ||
        !rst_json_is_digit(end[-1])) { /* blanks may stand behind a number */
        return false;
    }
    n->size -= length;
    *exponent = -(10 * (length == 4 ? end[-2] - '0' : 0) + (end[-1] - '0'));
    return true;
}

/* Digits that are read of a number: as many as a fraction of 16 digits and what stands before it.
 */
#define RST_JSON_FRACTION_UNIT UINT64_C(10000000000000000)

/*
 * The float nearest to digits / RST_JSON_FRACTION_UNIT * 10^exponent, where `count` digits stood
 * behind the point; those over 16 are left out.
 *
 * What is wanted is the double nearest to the text, rounded to float.  The product below is off the
 * exact value by the digits that are left out, less than 10^-12 of it, and by three roundings.  A
 * double has 29 bits more than a float: as long as these are not near one half, every double that
 * close by rounds to the same float, and the nearest one is among them: the product is over 10^-35,
 * where floats have all their bits.  Near one half (once in ten thousand) the answer is
 * false, and the exact way must be taken.
 */
static inline bool rst_json_round(uint64_t digits, int exponent, bool negative, size_t count,
                                  float *value)
{
    const uint64_t half = UINT64_C(1) << 28;
    const uint64_t near = UINT64_C(1) << 14; /* 10^-12 is below 2^13.2 of a double's last places */
    double product =
        (double)(int64_t)digits * rst_json_powers_of_ten[exponent - RST_JSON_EXPONENT_MIN];
    uint64_t bits;
    memcpy(&bits, &product, sizeof bits);
    bool near_half = (bits & (2 * half - 1)) - (half - near) <= 2 * near;
    if (near_half || digits < RST_JSON_FRACTION_UNIT / 10000) {
        *value = negative ? -0.0f : 0.0f;
        return digits == 0 && count <= 16;
    }
    *value = (float)(negative ? -product : product);
    return true;
}

/* The float of a number; false for spellings that are rare, and near one half. */
static inline bool rst_json_quick_float(rst_json_number_text n, float *value)
{
    bool negative = n.text[0] == '-';
    if (n.size < 4 || n.size > RST_JSON_USUAL_SIZE || n.room <= RST_JSON_USUAL_SIZE) {
        return false;
    }
    const char *point = n.text + negative + 1;
    uint64_t integer = (uint64_t)(point[-1] - '0');
    if (*point != '.') { /* two digits before it, or another spelling */
        integer = 10 * integer + (uint64_t)(*point++ - '0');
    }
    uint32_t others = rst_json_non_digit_bits(n.text);
    uint32_t expected = (uint32_t)negative | UINT32_C(1) << (point - n.text);
    int exponent = 0;
    if ((others & ((UINT32_C(1) << n.size) - 1)) != expected) {
        if (!rst_json_take_exponent(&n, &exponent) || exponent < RST_JSON_EXPONENT_MIN ||
            (others & ((UINT32_C(1) << n.size) - 1)) != expected) {
            return false;
        }
    }
    if (*point != '.') {
        return false;
    }
    const char *first = point + 1;
    size_t count = (size_t)(n.text + n.size - first); /* digits of the fraction */
    uint64_t high = rst_json_first_digits(first, rst_json_keep_first[count < 16 ? 16 - count : 0]);
    uint64_t low = rst_json_first_digits(first + 8, rst_json_keep_first[24 - count]);
    uint64_t digits = integer * RST_JSON_FRACTION_UNIT + high * 100000000 + low;
    return rst_json_round(digits, exponent, negative, count, value);
}

rst_json_number rst_json_unusual_float(const rst_json *json, rst_json_node node, float *value);

/* The same of a number's text, without the quick way. */
rst_json_number rst_json_exact_float(rst_json_number_text n, float *value);

/* The number's double, rounded to float.  One over the range of either is an infinity, which is how
 * minus infinity is written in JSON. */
static inline rst_json_number rst_json_float(const rst_json *json, rst_json_node node, float *value)
{
    return rst_json_quick_float(rst_json_number_text_of(json, node), value)
               ? RST_JSON_NUMBER_FINE
               : rst_json_unusual_float(json, node, value);
}

rst_json_number rst_json_double(const rst_json *json, rst_json_node node, double *value);

#endif
