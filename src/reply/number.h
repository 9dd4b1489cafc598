/* How a JSON number is spelled.  Internal; in a header of its own because every number of a text
 * goes through here, and a call would take longer than most of them do. */
#ifndef RST_SRC_REPLY_NUMBER_H
#define RST_SRC_REPLY_NUMBER_H

#include <stdint.h>
#include <string.h>

#include "json.h"

/* Eight characters as one number, the first in its lowest byte. */
static inline uint64_t rst_json_load8(const char *text)
{
    uint64_t eight;
    memcpy(&eight, text, 8);
    return eight;
}

/* Sets the top bit of each byte that is no digit, and nothing else. */
static inline uint64_t rst_json_non_digits(uint64_t eight)
{
    const uint64_t top = UINT64_C(0x8080808080808080);
    uint64_t low = eight & ~top; /* so that no sum below carries into the next byte */
    uint64_t from_0 = low + UINT64_C(0x5050505050505050);  /* '0' + 0x50 is 0x80 */
    uint64_t after_9 = low + UINT64_C(0x4646464646464646); /* '9' + 0x46 is 0x7F */
    return (~from_0 | after_9 | eight) & top;
}

/* ---------------------------------------------------------------- any number */

/* The first place from `at` on that holds no digit. */
static inline size_t rst_json_digits_end(const char *text, size_t at, size_t size)
{
    while (size - at >= 8) {
        uint64_t others = rst_json_non_digits(rst_json_load8(text + at));
        if (others) {
            return at + (size_t)__builtin_ctzll(others) / 8;
        }
        at += 8;
    }
    while (at < size && text[at] >= '0' && text[at] <= '9') {
        at++;
    }
    return at;
}

/* The end of the JSON number that begins at text[begin]; 0 when there is none.  Reads nothing at or
 * after text[size]. */
static inline size_t rst_json_number_end(const char *text, size_t begin, size_t size)
{
    size_t at = begin + (text[begin] == '-');
    size_t end = rst_json_digits_end(text, at, size);
    if (end == at || (text[at] == '0' && end > at + 1)) {
        return 0;
    }
    if (end < size && text[end] == '.') {
        at = end + 1;
        end = rst_json_digits_end(text, at, size);
        if (end == at) {
            return 0;
        }
    }
    if (end < size && (text[end] == 'e' || text[end] == 'E')) {
        at = end + 1;
        at += at < size && (text[at] == '+' || text[at] == '-');
        end = rst_json_digits_end(text, at, size);
        if (end == at) {
            return 0;
        }
    }
    return end;
}

/* ---------------------------------------------------------------- the usual ones
 *
 * A reply has tens of thousands of numbers, of which hardly two have the same length, and a loop
 * over digits would be mispredicted at the end of each.  But the index knows where a number ends:
 * it can be looked at as a whole.  For the same reason there is & and not && below. */

/* Bytes of the numbers that are looked at so: "-2.3841855067985307e-07" has 23. */
#define RST_JSON_USUAL_SIZE 24

#if defined(__SSE2__) && !defined(RST_JSON_PORTABLE)
#include <emmintrin.h>

static inline uint32_t rst_json_non_digit_bits16(const char *text)
{
    __m128i bytes = _mm_loadu_si128((const __m128i *)(const void *)text);
    __m128i from_0 = _mm_sub_epi8(bytes, _mm_set1_epi8('0'));
    __m128i digits = _mm_cmpeq_epi8(_mm_min_epu8(from_0, _mm_set1_epi8(9)), from_0);
    return (uint32_t)_mm_movemask_epi8(digits) ^ 0xFFFF;
}

/* Bit i is set when byte i of RST_JSON_USUAL_SIZE is no digit. */
static inline uint32_t rst_json_non_digit_bits(const char *text)
{
    return rst_json_non_digit_bits16(text) | rst_json_non_digit_bits16(text + 8) << 8;
}

/* Bit i is set when byte i of 32 is c. */
static inline uint32_t rst_json_bits_of(const char *text, char c)
{
    const __m128i *bytes = (const __m128i *)(const void *)text;
    __m128i wanted = _mm_set1_epi8(c);
    uint32_t low = (uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(_mm_loadu_si128(bytes), wanted));
    uint32_t high = (uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(_mm_loadu_si128(bytes + 1), wanted));
    return low | high << 16;
}

/*
 * Does the text continue as a short list of integers, "32,105,110]"?  Returns the place of the
 * ']'; 0 says nothing about other lists, or with less than 32 bytes to read (`room`).  A chat reply
 * spells each token's bytes so: these lists are half of its parts.
 */
static inline size_t rst_json_integer_list(const char *text, size_t room)
{
    if (room < 32) {
        return 0;
    }
    uint32_t end = rst_json_bits_of(text, ']');
    uint32_t commas = rst_json_bits_of(text, ',');
    uint32_t zeros = rst_json_bits_of(text, '0');
    uint32_t others = rst_json_non_digit_bits16(text) | rst_json_non_digit_bits16(text + 16) << 16;
    uint32_t inside = (end - 1) & ~end; /* what is before the first ']'; all where there is none */
    uint32_t digits = ~others & inside;
    commas &= inside;
    uint32_t begins = commas << 1 | 1;
    bool only_these = (digits | commas) == inside;
    bool each_begins = (begins & ~digits) == 0;
    bool leading_zero = (begins & zeros & digits >> 1) != 0;
    bool fine = (end != 0) & only_these & each_begins & !leading_zero;
    return fine ? (size_t)__builtin_ctz(end) : 0;
}
#else
static inline size_t rst_json_integer_list(const char *text, size_t room)
{
    (void)text;
    (void)room;
    return 0;
}

static inline uint32_t rst_json_non_digit_bits8(const char *text)
{
    /* Byte i's top bit becomes bit 8i; the product moves it to bit 56 + i. */
    uint64_t flags = rst_json_non_digits(rst_json_load8(text)) >> 7;
    return (uint32_t)(flags * UINT64_C(0x0102040810204080) >> 56);
}

/* Bit i is set when byte i of RST_JSON_USUAL_SIZE is no digit. */
static inline uint32_t rst_json_non_digit_bits(const char *text)
{
    return rst_json_non_digit_bits8(text) | rst_json_non_digit_bits8(text + 8) << 8 |
           rst_json_non_digit_bits8(text + 16) << 16;
}
#endif

/* Is the text of `size` bytes an integer from 0 to 99999999?  False says nothing about others, or
 * with less than 8 bytes to read (`room`). */
static inline bool rst_json_small_integer(const char *text, size_t size, size_t room)
{
    if (size > 8 || room < 8) {
        return false;
    }
    uint64_t others = rst_json_non_digits(rst_json_load8(text)) << (64 - 8 * size);
    return (others | (uint64_t)((text[0] == '0') & (size > 1))) == 0;
}

/* The exponent of a number: others are the bits of what is no digit, from its 'e' on, with one bit
 * more behind the last byte. */
static inline bool rst_json_usual_exponent(const char *text, uint32_t others, uint32_t behind)
{
    size_t at = (size_t)__builtin_ctz(others);
    bool letter = (text[at] == 'e') | (text[at] == 'E');
    bool sign = (text[at + 1] == '-') | (text[at + 1] == '+');
    uint32_t rest = others & (others - 1);
    rest &= ~((uint32_t)sign << (at + 1));
    size_t digits_from = at + 1 + sign;
    return letter & (rest == behind) & (UINT32_C(1) << digits_from < behind);
}

/* Is the text of `size` bytes a number with one digit, a '.' and more digits, as most logprobs are?
 * False says nothing about others, or with less than RST_JSON_USUAL_SIZE bytes to read (`room`). */
static inline bool rst_json_small_fraction(const char *text, size_t size, size_t room)
{
    if (size > RST_JSON_USUAL_SIZE || room < RST_JSON_USUAL_SIZE) {
        return false;
    }
    uint32_t negative = text[0] == '-';
    uint32_t others = rst_json_non_digit_bits(text) & ((UINT32_C(1) << size) - 1);
    return ((others ^ negative) == UINT32_C(2) << negative) & (text[1 + negative] == '.') &
           (size > 2 + negative);
}

/*
 * Is the text of `size` bytes, at least one, a number?  False says nothing about longer ones, some
 * spellings, or with less than RST_JSON_USUAL_SIZE bytes to read (`room`).
 */
static inline bool rst_json_usual_number(const char *text, size_t size, size_t room)
{
    if (size > RST_JSON_USUAL_SIZE || room <= RST_JSON_USUAL_SIZE) {
        return false;
    }
    uint32_t behind = UINT32_C(1) << size;
    uint32_t negative = text[0] == '-';
    uint32_t others = rst_json_non_digit_bits(text);
    others = (others & (behind - 1) & ~negative) | behind;
    size_t point = (size_t)__builtin_ctz(others); /* or the end of an integer */
    uint32_t rest = others & (others - 1);
    bool integer = rest == 0;
    bool begins = (point > negative) & ((text[negative] != '0') | (point == negative + 1));
    bool fraction = (text[point] == '.') & !(others >> (point + 1) & 1);
    if (!(begins & (integer | fraction))) {
        return false;
    }
    return (rest & (rest - 1)) == 0 || rst_json_usual_exponent(text, rest, behind);
}

#endif
