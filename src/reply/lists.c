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

#include "lists_look.h"

/* ---------------------------------------------------------------- elements
 *
 * The elements of a list are the same but for some values.  The first one shows what stands between
 * these. */

typedef enum value_kind {
    VALUE_STRING,
    VALUE_NUMBER,
    VALUE_INTEGERS,
    VALUE_ID,
    VALUE_NONE
} value_kind;

/* Fixed characters and then a value; the last part of an element has no value. */
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

/* Where an entry's values stand.  They are worked out later, many together: the processor then need
 * not wait for one to find the next. */
typedef struct note {
    number_text logprob;
    const char *id;
} note;

/* The place behind a value; note: NULL, or where to note it. */
static inline __attribute__((always_inline)) const char *value_end(value_kind kind, const char *at,
                                                                   const char *end, note *n)
{
    const char *begin = at;
    bool plain;
    switch (kind) {
    case VALUE_STRING:
        return string_end(at, end);
    case VALUE_NUMBER:
        at = number_end(at, end, &plain);
        if (n) {
            n->logprob = (number_text){begin, (uint32_t)(at - begin), plain};
        }
        return at;
    case VALUE_INTEGERS:
        return integers_end(at, end);
    case VALUE_ID:
        if (n) {
            n->id = at;
        }
        return id_end(at);
    case VALUE_NONE:
        break;
    }
    return at;
}

/* The place behind a part at `at`, NULL when it does not stand there. */
static inline __attribute__((always_inline)) const char *
part_end(const part *p, value_kind kind, const char *at, const char *end, note *n)
{
    return end - at < ROOM || !fits(p, at) ? NULL : value_end(kind, at + p->size, end, n);
}

/* The place behind the element at `at`, NULL when it has not that shape. */
static const char *element_end(const shape *s, const char *at, const char *end, note *n)
{
    for (uint32_t i = 0; at && i < s->count; i++) {
        at = part_end(&s->parts[i], s->parts[i].kind, at, end, n);
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
static const char *learn_object(shape *s, const char *at, const char *end)
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
        at = value_end(kind, at, end, NULL);
        if (!at || end - at < ROOM) {
            return NULL;
        }
        fixed = at;
    } while (*at == ',');
    return *at == '}' && add_part(s, fixed, at + 1, VALUE_NONE) ? at + 1 : NULL;
}

/* The same for [logprob, id, text] with a text that is null, or a string. */
static const char *learn_entry(shape *s, const char *at, const char *end, note *n)
{
    static const char begin[] = "[", comma[] = ",", no_text[] = ",null]", close[] = "]";
    const char *entry = at;
    s->count = 0;
    add_part(s, begin, begin + 1, VALUE_NUMBER);
    add_part(s, comma, comma + 1, VALUE_ID);
    at = element_end(s, at, end, n);
    if (!at || end - at < ROOM) {
        return NULL;
    }
    if (at[1] == 'n') {
        add_part(s, no_text, no_text + 6, VALUE_NONE);
    } else {
        add_part(s, comma, comma + 1, VALUE_STRING);
        add_part(s, close, close + 1, VALUE_NONE);
    }
    return element_end(s, entry, end, n);
}

/* ---------------------------------------------------------------- several places at once
 *
 * Where a part begins is known only when the one before it was read, and for most of that time the
 * processor waits.  So a piece of a list is begun at several places: where something looks like the
 * begin of an element, which is proved right when the reading from before arrives there. */

#define LANES 4
#define LANE_SIZE 2048  /* bytes from one to the next, at least; */
#define LANE_SEARCH 256 /* and as many more until an element begins */

#define LANE_NOTES ((LANE_SIZE + LANE_SEARCH) / RST_JSON_ENTRY_SIZE_MIN + 1)

/* A list's elements; entries: NULL, or where to put their values. */
typedef struct list {
    shape shape;
    const char *end; /* of the text */
    rst_json_entries *entries;
} list;

typedef struct lanes {
    const char *at[LANES]; /* of the ',' before the next element */
    const char *until[LANES];
    size_t counts[LANES];
    note notes[LANES][LANE_NOTES];
} lanes;

/* The next ',' from `at` on that may stand before an element; NULL when there is none near. */
static const char *next_element(const shape *s, const char *at)
{
    for (const char *stop = at + LANE_SEARCH; at < stop; at += WINDOW_SIZE) {
        uint32_t found =
            bytes_that_are(look_at(at), ',') & bytes_that_are(look_at(at + 1), s->parts->fixed[0]);
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
static bool place_lanes(const list *l, lanes *x, const char *at)
{
    if (l->end - at < (LANES + 1) * (LANE_SIZE + LANE_SEARCH)) {
        return false;
    }
    for (size_t i = 0; i < LANES; i++) {
        x->at[i] = at;
        x->counts[i] = 0;
        at = next_element(&l->shape, at + LANE_SIZE);
        x->until[i] = at;
        if (!at) {
            return false;
        }
    }
    return true;
}

static inline __attribute__((always_inline)) bool step_part(const list *l, const part *p,
                                                            value_kind kind, bool noted, lanes *x)
{
#pragma GCC unroll 4
    for (size_t i = 0; i < LANES; i++) {
        note *n = noted ? &x->notes[i][x->counts[i]] : NULL;
        x->at[i] = part_end(p, kind, x->at[i], l->end, n);
        if (!x->at[i]) {
            return false;
        }
    }
    return true;
}

/* The kind is a constant where it is used: one branch for all lanes, and none in their way. */
static inline bool step_known_part(const list *l, const part *p, lanes *x)
{
    switch (p->kind) {
    case VALUE_STRING:
        return step_part(l, p, VALUE_STRING, false, x);
    case VALUE_NUMBER:
        return step_part(l, p, VALUE_NUMBER, true, x);
    case VALUE_INTEGERS:
        return step_part(l, p, VALUE_INTEGERS, false, x);
    case VALUE_ID:
        return step_part(l, p, VALUE_ID, true, x);
    case VALUE_NONE:
        break;
    }
    return step_part(l, p, VALUE_NONE, false, x);
}

/* One element further in each lane, part by part: the processor sees only so far ahead. */
static bool step_lanes(const list *l, lanes *x)
{
    for (size_t i = 0; i < LANES; i++) {
        if (*x->at[i] != ',' || x->counts[i] == LANE_NOTES) {
            return false;
        }
        x->at[i]++;
    }
    for (uint32_t p = 0; p < l->shape.count; p++) {
        if (!step_known_part(l, &l->shape.parts[p], x)) {
            return false;
        }
    }
    for (size_t i = 0; i < LANES; i++) {
        x->counts[i] += l->entries != NULL; /* an object's note is written over */
    }
    return true;
}

static bool run_lane(const list *l, lanes *x, size_t i)
{
    while (x->at[i] && x->at[i] < x->until[i] && *x->at[i] == ',' && x->counts[i] < LANE_NOTES) {
        note *n = &x->notes[i][x->counts[i]];
        x->at[i] = element_end(&l->shape, x->at[i] + 1, l->end, n);
        x->counts[i] += l->entries != NULL;
    }
    return x->at[i] == x->until[i];
}

/* Read each lane to where the next one has begun; false when one does not arrive there. */
static bool run_lanes(const list *l, lanes *x)
{
    bool all_on_the_way = true;
    while (all_on_the_way) {
        if (!step_lanes(l, x)) {
            return false;
        }
        for (size_t i = 0; i < LANES; i++) {
            all_on_the_way &= x->at[i] < x->until[i];
        }
    }
    for (size_t i = 0; i < LANES; i++) {
        if (!run_lane(l, x, i)) {
            return false;
        }
    }
    return true;
}

/* Work out what was noted. */
static bool keep(rst_json_entries *entries, const note *notes, size_t count)
{
    if (entries->room - entries->count < count) {
        return false;
    }
    for (size_t i = 0; i < count; i++) {
        rst_json_entry *entry = &entries->items[entries->count++];
        entry->id = read_id(notes[i].id);
        if (!read_logprob(notes[i].logprob, &entry->logprob)) {
            return false;
        }
    }
    return true;
}

/* Read several pieces of a list from the ',' at `at` on.  Returns the ',' behind them; NULL when
 * one does not end where the next begins, as near the list's end, or holds what no entry may. */
static const char *pieces_end(const list *l, const char *at)
{
    lanes x;
    if (!place_lanes(l, &x, at) || !run_lanes(l, &x)) {
        return NULL;
    }
    for (size_t i = 0; l->entries && i < LANES; i++) {
        if (!keep(l->entries, x.notes[i], x.counts[i])) {
            return NULL;
        }
    }
    return x.until[LANES - 1];
}

/* The place of the ']' of a list whose first element ends at `at`; NULL for other lists. */
static const char *list_end(const list *l, const char *at)
{
    const char *alone_until = at; /* near the list's end several lead nowhere */
    while (at && *at == ',') {
        uint32_t before = l->entries ? l->entries->count : 0;
        const char *pieces = at < alone_until ? NULL : pieces_end(l, at);
        if (pieces) {
            at = pieces;
            continue;
        }
        if (at >= alone_until) {
            alone_until = at + LANES * LANE_SIZE;
        }
        if (l->entries) {
            l->entries->count = before;
        }
        note n;
        at = element_end(&l->shape, at + 1, l->end, &n);
        if (at && l->entries && !keep(l->entries, &n, 1)) {
            return NULL;
        }
    }
    return at && *at == ']' ? at : NULL;
}

static const char *objects_end(const char *at, const char *end)
{
    list l = {.end = end};
    at = learn_object(&l.shape, at, end);
    return at ? list_end(&l, at) : NULL;
}

static const char *entries_end(const char *at, const char *end, rst_json_entries *entries)
{
    list l = {.end = end, .entries = entries};
    note first;
    at = learn_entry(&l.shape, at, end, &first);
    return at && keep(entries, &first, 1) ? list_end(&l, at) : NULL;
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
