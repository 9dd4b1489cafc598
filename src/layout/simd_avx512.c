/* Rows and checksums with AVX-512 (F, CD, DQ). */
#if defined(__x86_64__)

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512cd,avx512dq"))),                 \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512cd,avx512dq")
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

/* Each block against itself by the conflict instruction, and against each earlier block in all 16
 * rotations.  Lanes past the end hold numbers that no id has and that differ from one another.
 * block_count is a constant where it is called, so that everything stays in registers. */
static inline __attribute__((always_inline)) bool repeats_in(const int32_t *ids, uint32_t count,
                                                             uint32_t block_count)
{
    const __m512i past =
        _mm512_setr_epi32(-16, -15, -14, -13, -12, -11, -10, -9, -8, -7, -6, -5, -4, -3, -2, -1);
    __m512i blocks[RST_ROW_COMPARED_MAX / 16];
    __m512i conflicts = _mm512_setzero_si512();
    __mmask16 met = 0;
#pragma GCC unroll 4
    for (uint32_t b = 0; b < block_count; b++) {
        __m512i block = b + 1 < block_count
                            ? _mm512_loadu_si512(ids + 16 * b)
                            : _mm512_mask_loadu_epi32(past, lanes(16 * b, count), ids + 16 * b);
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
        return repeats_in(ids, count, 2);
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
