/* Rows and checksums with AVX-512 (F, BW, CD, DQ). */
#if defined(__x86_64__)

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512cd,avx512dq"))),        \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512cd,avx512dq")
#endif

#include <immintrin.h>

/* The hash is compiled into this file, with this file's registers. */
#define XXH_INLINE_ALL
#define XXH_VECTOR 3 /* XXH_AVX512; the name is not defined before the header */
#include <xxhash.h>

#include "simd.h"

#include <rollstore/layout.h>

/* The lanes of the block that begins at `at`: 16, or what is left of `count`. */
static inline __mmask16 lanes(uint32_t at, uint32_t count)
{
    return (__mmask16)(count - at >= 16 ? 0xFFFFu : (1u << (count - at)) - 1);
}

static bool suspicious(const int32_t *ids, const float *logprobs, uint32_t count)
{
    const __m512 most = _mm512_set1_ps(RST_LOGPROB_MAX);
    __m512i bits = _mm512_setzero_si512();
    __mmask16 bad = 0;
    for (uint32_t at = 0; at < count; at += 16) {
        __mmask16 some = lanes(at, count);
        bits = _mm512_or_si512(bits, _mm512_maskz_loadu_epi32(some, ids + at));
        /* Not less or equal, unordered: true for NaN too. */
        bad |= _mm512_mask_cmp_ps_mask(some, _mm512_maskz_loadu_ps(some, logprobs + at), most,
                                       _CMP_NLE_UQ);
    }
    return bad || _mm512_movepi32_mask(bits);
}

/* Lanes past the end hold numbers that no id has and that differ from one another. */
static inline __m512i load_ids(const int32_t *ids, __mmask16 some)
{
    const __m512i past =
        _mm512_setr_epi32(-16, -15, -14, -13, -12, -11, -10, -9, -8, -7, -6, -5, -4, -3, -2, -1);
    return _mm512_mask_loadu_epi32(past, some, ids);
}

/* May an id stand twice among 17 to 32?  The low halves of all are compared, each with each: pairs
 * of them turn against themselves, as they stand and swapped.  Never false when one does. */
static inline bool low_halves_repeat(const int32_t *ids, uint32_t count)
{
    __m512i high = _mm512_slli_epi32(load_ids(ids + 16, lanes(16, count)), 16);
    __m512i pairs = _mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_loadu_si512(ids), high);
    __m512i swapped = _mm512_rol_epi32(pairs, 16);
    __m512i turned = pairs;
    __mmask32 differ = _mm512_cmpneq_epi16_mask(pairs, swapped);
    __mmask32 differ_swapped = 0xFFFFFFFF;
#pragma GCC unroll 8
    for (int turn = 0; turn < 8; turn++) { /* 9 to 15 are the same pairs again */
        turned = _mm512_alignr_epi32(turned, turned, 1);
        differ = _mm512_mask_cmpneq_epi16_mask(differ, pairs, turned);
        differ_swapped = _mm512_mask_cmpneq_epi16_mask(differ_swapped, swapped, turned);
    }
    return (differ & differ_swapped) != 0xFFFFFFFF;
}

/* Each block against itself by the conflict instruction, and against each earlier block in all 16
 * rotations.  block_count is a constant where it is called, so that everything stays in registers.
 */
static inline __attribute__((always_inline)) bool repeats_in(const int32_t *ids, uint32_t count,
                                                             uint32_t block_count)
{
    __m512i blocks[RST_ROW_COMPARED_MAX / 16];
    __m512i conflicts = _mm512_setzero_si512();
    __mmask16 met = 0;
#pragma GCC unroll 4
    for (uint32_t b = 0; b < block_count; b++) {
        __m512i block = b + 1 < block_count ? _mm512_loadu_si512(ids + 16 * b)
                                            : load_ids(ids + 16 * b, lanes(16 * b, count));
        conflicts = _mm512_or_si512(conflicts, _mm512_conflict_epi32(block));
#pragma GCC unroll 4
        for (uint32_t i = 0; i < b; i++) {
            __m512i turned = block;
#pragma GCC unroll 16
            for (int turn = 0; turn < 16; turn++) {
                met |= _mm512_cmpeq_epi32_mask(blocks[i], turned);
                turned = _mm512_alignr_epi32(turned, turned, 1);
            }
        }
        blocks[b] = block;
    }
    return met || _mm512_test_epi32_mask(conflicts, conflicts);
}

static bool repeats(const int32_t *ids, uint32_t count)
{
    switch ((count + 15) / 16) {
    case 1:
        return repeats_in(ids, count, 1);
    case 2:
        return low_halves_repeat(ids, count) && repeats_in(ids, count, 2);
    case 3:
        return repeats_in(ids, count, 3);
    default:
        return repeats_in(ids, count, 4);
    }
}

static uint64_t hash(const void *bytes, size_t size)
{
    return XXH3_64bits(bytes, size);
}

const rst_simd rst_simd_avx512 = {"avx512", suspicious, repeats, hash};

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif
