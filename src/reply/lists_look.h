/* Values in a list of tokens: where they end, and what they are.  Internal to lists.c, which
 * includes this where the compiler may use AVX2. */
#ifndef RST_SRC_REPLY_LISTS_LOOK_H
#define RST_SRC_REPLY_LISTS_LOOK_H

#include <immintrin.h>

#include "value.h"

/* ---------------------------------------------------------------- 32 bytes at once
 *
 * Bit i of each answer speaks of byte i. */

#define WINDOW_SIZE 32

/* Nothing is looked at with less of the text left: a window may begin behind another. */
#define ROOM ((ptrdiff_t)(4 * WINDOW_SIZE))

static inline __m256i look_at(const char *text)
{
    return _mm256_loadu_si256((const __m256i *)(const void *)text);
}

static inline uint32_t bytes_that_are(__m256i window, char c)
{
    return (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(window, _mm256_set1_epi8(c)));
}

static inline uint32_t bytes_no_digits(__m256i window)
{
    __m256i from_0 = _mm256_sub_epi8(window, _mm256_set1_epi8('0'));
    __m256i digits = _mm256_cmpeq_epi8(_mm256_min_epu8(from_0, _mm256_set1_epi8(9)), from_0);
    return ~(uint32_t)_mm256_movemask_epi8(digits);
}

/* Signed: control characters, and all of what is not ASCII. */
static inline uint32_t bytes_below_blank(__m256i window)
{
    return (uint32_t)_mm256_movemask_epi8(_mm256_cmpgt_epi8(_mm256_set1_epi8(' '), window));
}

/* 32 where none is set. */
static inline uint32_t lowest(uint32_t bits)
{
    return _tzcnt_u32(bits);
}

/* ---------------------------------------------------------------- values
 *
 * Each takes the place where a value begins, with ROOM to look at, and returns the place behind it;
 * NULL when it is not valid or not of that kind.  What follows is not looked at: the next part of
 * the list has to stand there.  The usual ones are looked at as a whole, without branches on where
 * they end. */

static const char *unusual_string_end(const char *at, const char *end)
{
    while (at < end && *at != '"') {
        size_t room = (size_t)(end - at);
        size_t length =
            *at == '\\' ? rst_json_escape_length(at, room) : rst_json_utf8_length(at, room);
        if (length == 0 || (unsigned char)*at < 0x20) {
            return NULL;
        }
        at += length;
    }
    return at < end ? at + 1 : NULL;
}

static inline const char *string_end(const char *at, const char *end)
{
    __m256i inside = look_at(at + 1);
    uint32_t quotes = bytes_that_are(inside, '"');
    uint32_t others = bytes_that_are(inside, '\\') | bytes_below_blank(inside);
    if (*at != '"') {
        return NULL;
    }
    bool plain = lowest(quotes) < lowest(others);
    return plain ? at + lowest(quotes) + 2 : unusual_string_end(at + 1, end);
}

static const char *unusual_number_end(const char *at, const char *end)
{
    size_t length = rst_json_number_end(at, 0, (size_t)(end - at));
    return length ? at + length : NULL;
}

typedef struct number_text {
    const char *text;
    uint32_t size;
    bool plain; /* one digit, a '.' and more digits */
} number_text;

static inline const char *number_end(const char *at, const char *end, bool *plain)
{
    uint32_t others = bytes_no_digits(look_at(at));
    uint32_t negative = *at == '-';
    others &= ~negative;
    uint32_t point = lowest(others);
    others &= others - 1;
    uint32_t stop = lowest(others);
    bool fine = (at[point] == '.') & (point > negative) & (stop > point + 1) &
                ((at[negative] != '0') | (point == negative + 1));
    *plain = fine & (point == negative + 1);
    if ((at[stop] | 0x20) == 'e') {
        *plain = false;
        uint32_t sign = (at[stop + 1] == '-') | (at[stop + 1] == '+');
        uint32_t digits = stop + 1 + sign;
        others &= others - 1;
        others &= others - sign; /* the sign is the next one, if there is one */
        stop = lowest(others);
        fine &= stop > digits;
    }
    if (fine & (stop < WINDOW_SIZE)) {
        return at + stop;
    }
    *plain = false;
    return unusual_number_end(at, end);
}

static const char *unusual_integers_end(const char *at, const char *end)
{
    do {
        at++;
        size_t digits = rst_json_digits_end(at, 0, (size_t)(end - at));
        if (digits == 0 || (*at == '0' && digits > 1)) {
            return NULL;
        }
        at += digits;
    } while (at < end && *at == ',');
    return at < end && *at == ']' ? at + 1 : NULL;
}

/* "[32,105]"; not an empty list. */
static inline const char *integers_end(const char *at, const char *end)
{
    __m256i window = look_at(at + 1);
    uint32_t close = bytes_that_are(window, ']');
    uint32_t inside = (close - 1) & ~close; /* what is before the first ']' */
    uint32_t commas = bytes_that_are(window, ',') & inside;
    uint32_t others = bytes_no_digits(window) & inside;
    uint32_t zeros = bytes_that_are(window, '0');
    uint32_t begins = commas << 1 | 1;
    /* Nothing but digits and ',', a digit after each ',', and none after a '0' that is first. */
    bool fine = (close != 0) & (others == commas) & ((begins & (others | close)) == 0) &
                ((begins & zeros & (inside & ~others) >> 1) == 0);
    if (*at != '[') {
        return NULL;
    }
    return fine ? at + lowest(close) + 2 : unusual_integers_end(at, end);
}

/* An id of one to eight digits. */
static inline const char *id_end(const char *at)
{
    size_t count = _tzcnt_u64(rst_json_non_digits(rst_json_load8(at))) / 8;
    return (count == 0) | ((*at == '0') & (count > 1)) ? NULL : at + count;
}

/* ---------------------------------------------------------------- what they are */

/* The digits of a fraction, in units of 10^-16: `count` of them, and no more than 16. */
static inline uint64_t fraction_of(const char *first, size_t count)
{
    const __m128i places = _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m128i kept = _mm_cmpgt_epi8(_mm_set1_epi8((char)count), places);
    __m128i digits =
        _mm_sub_epi8(_mm_loadu_si128((const __m128i *)(const void *)first), _mm_set1_epi8('0'));
    __m128i pairs = _mm_maddubs_epi16(_mm_and_si128(digits, kept), _mm_set1_epi16(10 | 1 << 8));
    __m128i fours = _mm_madd_epi16(pairs, _mm_set1_epi32(100 | 1 << 16));
    __m128i eights =
        _mm_madd_epi16(_mm_packus_epi32(fours, fours), _mm_set1_epi32(10000 | 1 << 16));
    uint64_t both = (uint64_t)_mm_cvtsi128_si64(eights);
    return (both & UINT32_MAX) * 100000000 + (both >> 32);
}

/* The float of a number with ROOM from its begin on. */
static inline bool read_logprob(number_text n, float *logprob)
{
    rst_json_number_text text = {n.text, n.size, n.size + WINDOW_SIZE};
    bool negative = *n.text == '-';
    const char *point = n.text + negative + 1;
    if (n.plain && n.size >= 4 && n.size <= RST_JSON_USUAL_SIZE) {
        size_t count = n.size - negative - 2;
        uint64_t digits =
            (uint64_t)(point[-1] - '0') * RST_JSON_FRACTION_UNIT + fraction_of(point + 1, count);
        if (rst_json_round(digits, 0, negative, count, logprob)) {
            return true;
        }
    } else if (rst_json_quick_float(text, logprob)) {
        return true;
    }
    return rst_json_exact_float(text, logprob) == RST_JSON_NUMBER_FINE;
}

/* The id at `at`, of which id_end has found the end. */
static inline int32_t read_id(const char *at)
{
    uint64_t eight = rst_json_load8(at);
    size_t count = _tzcnt_u64(rst_json_non_digits(eight)) / 8;
    eight = eight << (64 - 8 * count);
    eight |= count < 8 ? UINT64_C(0x3030303030303030) >> 8 * count : 0;
    return (int32_t)rst_json_eight_digits(eight);
}

#endif
