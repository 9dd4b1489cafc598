/* Which values a record may hold. */
#include <math.h>
#include <string.h>

#include "record.h"
#include "simd.h"

/* A row is first looked at as a whole, with the processor's wide registers; only a row that may
 * hold something wrong is then looked at slot by slot. */

static const char *logprob_fault(float logprob)
{
    if (isnan(logprob)) {
        return "NaN";
    }
    if (isinf(logprob) && logprob > 0) {
        return "+inf";
    }
    return logprob <= RST_LOGPROB_MAX ? NULL : "a logprob over 1e-4";
}

/* ---------------------------------------------------------------- an id twice in one row */

/* Which ids a row has met: a table of row stamps, small enough for the first-level cache.  Two ids
 * can share a place, so a met stamp only asks for an exact look: with 32 candidates in 6 % of the
 * rows. */
#define STAMP_BITS 13
typedef struct stamps {
    uint16_t row[1u << STAMP_BITS];
    uint16_t now; /* 0 is never used by a row */
} stamps;

static bool may_repeat(stamps *met, const int32_t *ids, uint32_t count)
{
    if (++met->now == 0) {
        memset(met->row, 0, sizeof met->row);
        met->now = 1;
    }
    uint16_t now = met->now;
    unsigned hits = 0;
    for (uint32_t i = 0; i < count; i++) {
        /* Multiplying by 2^32 / golden ratio spreads neighbours; the top bits are the good ones. */
        uint32_t at = (uint32_t)ids[i] * UINT32_C(2654435769) >> (32 - STAMP_BITS);
        hits |= met->row[at] == now;
        met->row[at] = now;
    }
    return hits;
}

/* Index of the first id that stands earlier in the row too; count when there is none. */
static uint32_t first_repeat_of_few(const int32_t *ids, uint32_t count)
{
    for (uint32_t i = 1; i < count; i++) {
        unsigned equal = 0;
        for (uint32_t j = 0; j < i; j++) {
            equal |= ids[j] == ids[i];
        }
        if (equal && ids[i] >= 0) {
            return i;
        }
    }
    return count;
}

/* The same for wide rows, where comparing all pairs would cost too much: an exact set, at most half
 * full. */
static uint32_t first_repeat_of_many(const int32_t *ids, uint32_t count)
{
    enum { SET_SIZE = 2 * RST_TOPK_MAX };
    int32_t set[SET_SIZE];
    memset(set, 0xFF, sizeof set); /* -1: free */
    for (uint32_t i = 0; i < count; i++) {
        if (ids[i] < 0) {
            continue;
        }
        uint32_t at = ((uint32_t)ids[i] * UINT32_C(2654435769) >> 8) % SET_SIZE;
        while (set[at] != -1 && set[at] != ids[i]) {
            at = (at + 1) % SET_SIZE;
        }
        if (set[at] == ids[i]) {
            return i;
        }
        set[at] = ids[i];
    }
    return count;
}

static uint32_t first_repeat(const int32_t *ids, uint32_t count)
{
    return count <= 256 ? first_repeat_of_few(ids, count) : first_repeat_of_many(ids, count);
}

/* ---------------------------------------------------------------- rows */

static bool bad_value(rst_bad_value *bad, rst_bad_array array, uint64_t index, const char *reason)
{
    bad->array = array;
    bad->index = index;
    bad->reason = reason;
    return false;
}

/* Slot by slot: false and *bad at the first fault; else the width. */
static bool check_row(const int32_t *ids, const float *logprobs, uint32_t topk, uint64_t first,
                      uint32_t *width, rst_bad_value *bad)
{
    *width = 0;
    for (uint32_t j = 0; j < topk; j++) {
        const char *fault = logprob_fault(logprobs[j]);
        if (fault) {
            return bad_value(bad, RST_BAD_TOPK_LOGPROB, first + j, fault);
        }
        bool unused = ids[j] == -1 && isinf(logprobs[j]);
        if (ids[j] < 0 && !unused) {
            return bad_value(bad, RST_BAD_TOPK_ID, first + j,
                             ids[j] == -1 ? "id -1 with a logprob other than -inf"
                                          : "an id below 0");
        }
        if (!unused) {
            *width = j + 1;
        }
    }
    uint32_t repeat = first_repeat(ids, topk);
    if (repeat < topk) {
        return bad_value(bad, RST_BAD_TOPK_ID, first + repeat, "an id twice in one row");
    }
    return true;
}

static bool check_tokens(const rst_turn *t, rst_bad_value *bad)
{
    if (!rst_simd_active()->suspicious(t->token_ids, t->token_logprobs, t->token_count)) {
        return true;
    }
    for (uint32_t i = 0; i < t->token_count; i++) {
        if (t->token_ids[i] < 0) {
            return bad_value(bad, RST_BAD_TOKEN_ID, i, "an id below 0");
        }
        const char *fault = logprob_fault(t->token_logprobs[i]);
        if (fault) {
            return bad_value(bad, RST_BAD_TOKEN_LOGPROB, i, fault);
        }
    }
    return true;
}

bool rst_check_values(const rst_turn *t, int32_t *widths, bool *ragged, rst_bad_value *bad)
{
    bad_value(bad, RST_BAD_NONE, 0, NULL);
    if (!check_tokens(t, bad)) {
        return false;
    }
    const rst_simd *simd = rst_simd_active();
    bool compared = simd->repeats && t->topk > 0 && t->topk <= RST_ROW_COMPARED_MAX;
    stamps met;
    if (!compared) {
        memset(&met, 0, sizeof met);
    }
    bool some_short = false;
    for (uint64_t row = 0; row < t->token_count; row++) {
        uint64_t first = row * t->topk;
        const int32_t *ids = t->topk_ids + first;
        const float *logprobs = t->topk_logprobs + first;
        uint32_t width = t->topk;
        bool look = simd->suspicious(ids, logprobs, t->topk) ||
                    (compared ? simd->repeats(ids, t->topk) : may_repeat(&met, ids, t->topk));
        if (look && !check_row(ids, logprobs, t->topk, first, &width, bad)) {
            return false;
        }
        if (widths) {
            widths[row] = (int32_t)width;
        }
        some_short |= width != t->topk;
    }
    if (ragged) {
        *ragged = some_short;
    }
    return true;
}

const char *rst_bad_array_name(const rst_bad_value *bad)
{
    switch (bad->array) {
    case RST_BAD_TOKEN_ID:
        return "token_ids";
    case RST_BAD_TOKEN_LOGPROB:
        return "token_logprobs";
    case RST_BAD_TOPK_ID:
        return "topk_ids";
    case RST_BAD_TOPK_LOGPROB:
        return "topk_logprobs";
    case RST_BAD_NONE:
        break;
    }
    return "";
}
