#include "lists.h"

#include <string.h>

#include "../layout/simd.h"
#include "value.h"

#if defined(__x86_64__)

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,bmi,bmi2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,bmi,bmi2")
#endif

#include <immintrin.h>

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

/* *plain: the number is one digit, a '.' and more digits. */
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

/* ---------------------------------------------------------------- objects
 *
 * The elements of a list are the same but for some values.  The first one shows what stands between
 * these. */

typedef enum value_kind { VALUE_STRING, VALUE_NUMBER, VALUE_INTEGERS, VALUE_NONE } value_kind;

/* Fixed characters and then a value; the last part of an object has no value. */
typedef struct part {
    char fixed[WINDOW_SIZE];
    uint32_t mask; /* of the bytes of `fixed` that count */
    value_kind kind;
    size_t size; /* WINDOW_SIZE at most */
} part;

#define PARTS_MAX 8
typedef struct shape {
    part parts[PARTS_MAX];
    uint32_t count;
} shape;

static inline bool fits(const part *p, const char *at)
{
    __m256i same = _mm256_cmpeq_epi8(look_at(at), look_at(p->fixed));
    return (~(uint32_t)_mm256_movemask_epi8(same) & p->mask) == 0;
}

static inline const char *value_end(value_kind kind, const char *at, const char *end)
{
    bool plain;
    switch (kind) {
    case VALUE_STRING:
        return string_end(at, end);
    case VALUE_NUMBER:
        return number_end(at, end, &plain);
    case VALUE_INTEGERS:
        return integers_end(at, end);
    case VALUE_NONE:
        break;
    }
    return at;
}

/* The place behind a part at `at`, NULL when it does not stand there. */
static inline __attribute__((always_inline)) const char *part_end(const part *p, value_kind kind,
                                                                  const char *at, const char *end)
{
    return end - at < ROOM || !fits(p, at) ? NULL : value_end(kind, at + p->size, end);
}

/* The place behind the object at `at`, NULL when it has not that shape. */
static inline const char *object_end(const shape *s, const char *at, const char *end)
{
    for (uint32_t i = 0; at && i < s->count; i++) {
        at = part_end(&s->parts[i], s->parts[i].kind, at, end);
    }
    return at;
}

/* A value that is the same in every element counts to what is fixed. */
static size_t constant_size(const char *at)
{
    static const char *const constants[] = {"[]", "{}", "null", "true", "false"};
    for (size_t i = 0; i < sizeof constants / sizeof *constants; i++) {
        if (!strncmp(at, constants[i], strlen(constants[i]))) {
            return strlen(constants[i]);
        }
    }
    return 0;
}

static value_kind kind_of(char first)
{
    return first == '"'                    ? VALUE_STRING
           : rst_json_begins_number(first) ? VALUE_NUMBER
           : first == '['                  ? VALUE_INTEGERS
                                           : VALUE_NONE;
}

static bool add_part(shape *s, const char *fixed, const char *to, value_kind kind)
{
    size_t size = (size_t)(to - fixed);
    if (size > WINDOW_SIZE || s->count == PARTS_MAX) {
        return false;
    }
    part *p = &s->parts[s->count++];
    memset(p->fixed, 0, sizeof p->fixed);
    memcpy(p->fixed, fixed, size);
    p->size = size;
    p->mask = (uint32_t)((UINT64_C(1) << size) - 1);
    p->kind = kind;
    return true;
}

/* From a member's key to its value; NULL when there is no key. */
static const char *key_end(const char *at, const char *end)
{
    at = end - at >= ROOM ? string_end(at, end) : NULL;
    return at && end - at >= ROOM && *at == ':' ? at + 1 : NULL;
}

/* Learn the shape of the object at `at`.  Returns the place behind it, or NULL. */
static const char *learn(shape *s, const char *at, const char *end)
{
    const char *fixed = at;
    s->count = 0;
    do {
        at = key_end(at + 1, end);
        if (!at) {
            return NULL;
        }
        size_t constant = constant_size(at);
        if (constant) {
            at += constant;
            continue;
        }
        value_kind kind = kind_of(*at);
        if (kind == VALUE_NONE || !add_part(s, fixed, at, kind)) {
            return NULL;
        }
        at = value_end(kind, at, end);
        if (!at || end - at < ROOM) {
            return NULL;
        }
        fixed = at;
    } while (*at == ',');
    return *at == '}' && add_part(s, fixed, at + 1, VALUE_NONE) ? at + 1 : NULL;
}

/* ---------------------------------------------------------------- several places at once
 *
 * Where a part begins is known only when the one before it was read, and for most of that time the
 * processor waits.  So a piece of a list is begun at several places: where something looks like the
 * begin of an object, which is proved right when the reading from before arrives there. */

#define LANES 4
#define LANE_SIZE 2048  /* bytes from one to the next, at least; */
#define LANE_SEARCH 256 /* and as many more until an object begins */

typedef struct lanes {
    const char *at[LANES]; /* of the ',' before the next object */
    const char *until[LANES];
} lanes;

/* The next ',' from `at` on that may stand before an object; NULL when there is none near. */
static const char *next_object(const shape *s, const char *at)
{
    for (const char *stop = at + LANE_SEARCH; at < stop; at += WINDOW_SIZE - 1) {
        uint32_t found = bytes_that_are(look_at(at), ',') & bytes_that_are(look_at(at + 1), '{');
        for (; found; found &= found - 1) {
            const char *comma = at + lowest(found);
            if (fits(s->parts, comma + 1)) {
                return comma;
            }
        }
    }
    return NULL;
}

/* Place the lanes from `at` on.  False where the text may end before them. */
static bool place_lanes(const shape *s, lanes *x, const char *at, const char *end)
{
    if (end - at < (LANES + 1) * (LANE_SIZE + LANE_SEARCH)) {
        return false;
    }
    for (size_t i = 0; i < LANES; i++) {
        x->at[i] = at;
        at = next_object(s, at + LANE_SIZE);
        x->until[i] = at;
        if (!at) {
            return false;
        }
    }
    return true;
}

static inline __attribute__((always_inline)) bool step_part(const part *p, value_kind kind,
                                                            lanes *x, const char *end)
{
#pragma GCC unroll 4
    for (size_t i = 0; i < LANES; i++) {
        x->at[i] = part_end(p, kind, x->at[i], end);
        if (!x->at[i]) {
            return false;
        }
    }
    return true;
}

/* The kind is a constant where it is used: one branch for all lanes, and none in their way. */
static inline bool step_known_part(const part *p, lanes *x, const char *end)
{
    switch (p->kind) {
    case VALUE_STRING:
        return step_part(p, VALUE_STRING, x, end);
    case VALUE_NUMBER:
        return step_part(p, VALUE_NUMBER, x, end);
    case VALUE_INTEGERS:
        return step_part(p, VALUE_INTEGERS, x, end);
    case VALUE_NONE:
        break;
    }
    return step_part(p, VALUE_NONE, x, end);
}

/* One object further in each lane, part by part: the processor sees only so far ahead. */
static inline bool step_lanes(const shape *s, lanes *x, const char *end)
{
    for (size_t i = 0; i < LANES; i++) {
        if (*x->at[i] != ',') {
            return false;
        }
        x->at[i]++;
    }
    for (uint32_t p = 0; p < s->count; p++) {
        if (!step_known_part(&s->parts[p], x, end)) {
            return false;
        }
    }
    return true;
}

/* Read several pieces of a list from the ',' at `at` on.  Returns the ',' behind them; NULL when
 * one does not end where the next begins, as near the list's end. */
static const char *pieces_end(const shape *s, const char *at, const char *end)
{
    lanes x;
    if (!place_lanes(s, &x, at, end)) {
        return NULL;
    }
    bool all_on_the_way = true;
    while (all_on_the_way) {
        if (!step_lanes(s, &x, end)) {
            return NULL;
        }
        for (size_t i = 0; i < LANES; i++) {
            all_on_the_way &= x.at[i] < x.until[i];
        }
    }
    for (size_t i = 0; i < LANES; i++) {
        while (x.at[i] && x.at[i] < x.until[i] && *x.at[i] == ',') {
            x.at[i] = object_end(s, x.at[i] + 1, end);
        }
        if (x.at[i] != x.until[i]) {
            return NULL;
        }
    }
    return x.until[LANES - 1];
}

/* The place of the ']' of a list whose first object begins at `at`; NULL for other lists. */
static const char *objects_end(const char *at, const char *end)
{
    shape s;
    at = learn(&s, at, end);
    const char *alone_until = at; /* near the list's end several lead nowhere */
    while (at && *at == ',') {
        const char *pieces = at < alone_until ? NULL : pieces_end(&s, at, end);
        if (!pieces && at >= alone_until) {
            alone_until = at + LANES * LANE_SIZE;
        }
        at = pieces ? pieces : object_end(&s, at + 1, end);
    }
    return at && *at == ']' ? at : NULL;
}

/* ---------------------------------------------------------------- entries */

/* Where an entry's logprob stands; its value is worked out later, many together: the processor then
 * need not wait for one to find the next. */
typedef struct logprob_text {
    const char *text;
    uint32_t size;
    bool plain; /* see number_end */
} logprob_text;

#define TOGETHER 64

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
static inline bool read_logprob(logprob_text n, float *logprob)
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

/* An id of at most eight digits.  Returns the place behind it. */
static inline const char *read_id(const char *at, int32_t *id)
{
    uint64_t eight = rst_json_load8(at);
    size_t count = _tzcnt_u64(rst_json_non_digits(eight)) / 8;
    if (count == 0 || ((*at == '0') & (count > 1))) {
        return NULL;
    }
    eight = eight << (64 - 8 * count);
    eight |= count < 8 ? UINT64_C(0x3030303030303030) >> 8 * count : 0;
    *id = (int32_t)rst_json_eight_digits(eight);
    return at + count;
}

/* ",null]" or ',', a string and ']'. */
static inline const char *text_end(const char *at, const char *end)
{
    static const char null[8] = ",null]";
    const uint64_t six = UINT64_C(0x0000FFFFFFFFFFFF);
    if (((rst_json_load8(at) ^ rst_json_load8(null)) & six) == 0) {
        return at + 6;
    }
    at = *at == ',' ? string_end(at + 1, end) : NULL;
    return at && end - at >= ROOM && *at == ']' ? at + 1 : NULL;
}

/* Read [logprob, id, text] at `at`, without the logprob's value.  Returns the place behind it, NULL
 * when it is none. */
static inline const char *read_entry(const char *at, const char *end, logprob_text *logprob,
                                     int32_t *id)
{
    if (end - at < ROOM || *at != '[') {
        return NULL;
    }
    logprob->text = at + 1;
    at = number_end(at + 1, end, &logprob->plain);
    if (!at || end - at < ROOM || *at != ',') {
        return NULL;
    }
    logprob->size = (uint32_t)(at - logprob->text);
    at = read_id(at + 1, id);
    return at ? text_end(at, end) : NULL;
}

/* Up to TOGETHER entries from `at` on.  Returns the place behind the last one, NULL when something
 * else stands there. */
static const char *some_entries_end(const char *at, const char *end, rst_json_entries *entries)
{
    logprob_text logprobs[TOGETHER];
    uint32_t count = 0;
    rst_json_entry *items = entries->items + entries->count;
    uint32_t room = entries->room - entries->count;
    room = room < TOGETHER ? room : TOGETHER;
    do {
        if (count == room) {
            return NULL;
        }
        at = read_entry(at + (count > 0), end, &logprobs[count], &items[count].id);
        count++;
    } while (at && *at == ',' && count < TOGETHER);
    for (uint32_t i = 0; at && i < count; i++) {
        if (!read_logprob(logprobs[i], &items[i].logprob)) {
            return NULL;
        }
    }
    entries->count += count;
    return at;
}

/* The same of a whole list whose first element begins at `at`: the place of its ']'. */
static const char *entries_end(const char *at, const char *end, rst_json_entries *entries)
{
    at = some_entries_end(at, end, entries);
    while (at && *at == ',') {
        at = some_entries_end(at + 1, end, entries);
    }
    return at && *at == ']' ? at : NULL;
}

/* ---------------------------------------------------------------- finding them */

#define OBJECTS_NAME "\"content\":"
#define ENTRIES_NAME "\"output_token_logprobs\":"
#define FAILURES_MAX 4 /* a text of other lists is not searched to its end */

static bool stands_before(const char *name, const char *text, size_t at)
{
    size_t size = strlen(name);
    return at >= size && !memcmp(text + at - size, name, size);
}

/* The next ":[" from `at` on: the place of its '['; `to` when there is none. */
static size_t next_list(const char *text, size_t at, size_t to)
{
    for (; at + WINDOW_SIZE + 1 < to; at += WINDOW_SIZE) {
        uint32_t both =
            bytes_that_are(look_at(text + at), ':') & bytes_that_are(look_at(text + at + 1), '[');
        if (both) {
            return at + 1 + lowest(both);
        }
    }
    return to; /* no list fits into the last few bytes */
}

/* The place of the ']' of the list at the '[' at `at`, where it is one of ours; else NULL. */
static const char *known_list_end(const rst_json_list_search *search, size_t at, bool *is_ours)
{
    const char *end = search->text + search->size;
    const char *first = search->text + at + 1;
    *is_ours = true;
    if (*first == '{' && stands_before(OBJECTS_NAME, search->text, at)) {
        return objects_end(first, end);
    }
    if (*first == '[' && stands_before(ENTRIES_NAME, search->text, at)) {
        return entries_end(first, end, search->entries);
    }
    *is_ours = false;
    return NULL;
}

static uint32_t find_lists(const rst_json_list_search *search)
{
    const char *text = search->text;
    rst_json_entries *entries = search->entries;
    uint32_t count = 0;
    uint32_t failures = 0;
    size_t at = next_list(text, search->from, search->to);
    while (at < search->to && count < search->room && failures < FAILURES_MAX) {
        uint32_t before = entries->count;
        bool is_ours;
        const char *close = known_list_end(search, at, &is_ours);
        if (close && close < text + search->to) {
            search->cuts[count++] = (rst_json_cut){.text = text + at + 1,
                                                   .size = (size_t)(close - text) - at - 1,
                                                   .is_list = true,
                                                   .first = before,
                                                   .count = entries->count - before};
            at = (size_t)(close - text);
        } else {
            entries->count = before;
            failures += is_ours;
        }
        at = next_list(text, at, search->to);
    }
    return count;
}

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif

uint32_t rst_json_find_lists(const rst_json_list_search *search)
{
#if defined(__x86_64__)
    bool wide = rst_simd_active() != &rst_simd_portable && __builtin_cpu_supports("bmi") &&
                __builtin_cpu_supports("bmi2");
    if (wide) {
        return find_lists(search);
    }
#endif
    (void)search;
    return 0;
}
