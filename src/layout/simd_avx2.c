/* Rows and checksums with AVX2. */
#if defined(__x86_64__)

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif

#include <immintrin.h>

/* The hash is compiled into this file, with this file's registers. */
#define XXH_INLINE_ALL
#define XXH_VECTOR 2 /* XXH_AVX2; the name is not defined before the header */
#include <xxhash.h>

#include "simd.h"

#include <rollstore/layout.h>

static bool suspicious(const int32_t *ids, const float *logprobs, uint32_t count)
{
    const __m256 most = _mm256_set1_ps(RST_LOGPROB_MAX);
    __m256i bits = _mm256_setzero_si256();
    __m256 bad = _mm256_setzero_ps();
    uint32_t at = 0;
    for (; at + 8 <= count; at += 8) {
        bits = _mm256_or_si256(bits, _mm256_loadu_si256((const __m256i *)(const void *)(ids + at)));
        /* Not less or equal, unordered: true for NaN too. */
        bad = _mm256_or_ps(bad, _mm256_cmp_ps(_mm256_loadu_ps(logprobs + at), most, _CMP_NLE_UQ));
    }
    int found = _mm256_movemask_ps(bad) | _mm256_movemask_ps(_mm256_castsi256_ps(bits));
    return found ||
           (at < count && rst_simd_portable.suspicious(ids + at, logprobs + at, count - at));
}

/* Each block of eight with itself in the rotations 1 to 4 (5 to 7 are the same pairs again) and
 * with each earlier one in all eight.  Lanes past the end hold numbers that no id has and that
 * differ from one another.  block_count is a constant where it is called, so that everything stays
 * in registers. */
static inline __attribute__((always_inline)) bool repeats_in(const int32_t *ids, uint32_t count,
                                                             uint32_t block_count)
{
    const __m256i turn_by_one = _mm256_setr_epi32(1, 2, 3, 4, 5, 6, 7, 0);
    const __m256i place = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i past = _mm256_setr_epi32(-8, -7, -6, -5, -4, -3, -2, -1);
    __m256i blocks[RST_ROW_COMPARED_MAX / 8];
    __m256i met = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (uint32_t b = 0; b < block_count; b++) {
        __m256i block;
        if (b + 1 < block_count) {
            block = _mm256_loadu_si256((const __m256i *)(const void *)(ids + 8 * b));
        } else {
            __m256i some = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)(count - 8 * b)), place);
            block = _mm256_blendv_epi8(past, _mm256_maskload_epi32(ids + 8 * b, some), some);
        }
        __m256i turned = block;
#pragma GCC unroll 8
        for (int turn = 0; turn < 8; turn++) {
#pragma GCC unroll 8
            for (uint32_t i = 0; i < b; i++) {
                met = _mm256_or_si256(met, _mm256_cmpeq_epi32(blocks[i], turned));
            }
            turned = _mm256_permutevar8x32_epi32(turned, turn_by_one);
            if (turn < 4) {
                met = _mm256_or_si256(met, _mm256_cmpeq_epi32(block, turned));
            }
        }
        blocks[b] = block;
    }
    return !_mm256_testz_si256(met, met);
}

static bool repeats(const int32_t *ids, uint32_t count)
{
    switch ((count + 7) / 8) {
    case 1:
        return repeats_in(ids, count, 1);
    case 2:
        return repeats_in(ids, count, 2);
    case 3:
        return repeats_in(ids, count, 3);
    case 4:
        return repeats_in(ids, count, 4);
    default:
        return repeats_in(ids, count, (count + 7) / 8);
    }
}

static uint64_t hash(const void *bytes, size_t size)
{
    return XXH3_64bits(bytes, size);
}

const rst_simd rst_simd_avx2 = {"avx2", suspicious, repeats, hash};

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif
