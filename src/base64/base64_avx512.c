/*
 * The decoder's AVX-512 path: 256 characters to 192 bytes a turn of the loop.
 *
 * VPERMI2B looks up 64 characters at once in a table of 128 entries, all of ASCII.  It takes no
 * notice of a character's top bit, so that bit is a fault of its own: entries outside the alphabet
 * have their top bit set, and what is tested is the top bit of entry | character.
 */
#include "base64/base64_kernel.h"

#ifdef RST_BASE64_HAVE_X86

#include <immintrin.h>

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vbmi")))

static const uint8_t values[128]
    __attribute__((aligned(64))) = {RST_BASE64_128(RST_BASE64_VALUE, 0)};

/* Byte i of three in a group is byte 2 - i of the 32 bits that pack() makes of it; 16 groups, then
 * 16 bytes that do not matter. */
#define GROUP(g) 4 * (g) + 2, 4 * (g) + 1, 4 * (g)
#define GROUPS_4(g) GROUP(g), GROUP((g) + 1), GROUP((g) + 2), GROUP((g) + 3)
static const uint8_t order[64]
    __attribute__((aligned(64))) = {GROUPS_4(0), GROUPS_4(4), GROUPS_4(8), GROUPS_4(12)};

/* 64 characters to 64 values of six bits.  *bad gets the top bit for each bad character. */
AVX512 static inline __m512i translate(__m512i text, __m512i *bad)
{
    __m512i v =
        _mm512_permutex2var_epi8(_mm512_load_si512(values), text, _mm512_load_si512(values + 64));
    *bad = _mm512_ternarylogic_epi32(*bad, v, text, 0xFE); /* a | b | c */
    return v;
}

/* Four values a, b, c, d to 24 bits in each 32. */
AVX512 static inline __m512i pack(__m512i v)
{
    __m512i pairs = _mm512_maddubs_epi16(v, _mm512_set1_epi32(0x01400140)); /* a << 6 | b */
    return _mm512_madd_epi16(pairs, _mm512_set1_epi32(0x00011000));         /* ab << 12 | cd */
}

/* The first `size` bytes, or characters; fewer than 64. */
static inline __mmask64 first(size_t size)
{
    return (1ULL << size) - 1;
}

/* Up to 64 characters to `size` bytes.  Returns 0, and writes nothing, where one is bad. */
AVX512 static inline int decode_block(__m512i text, uint8_t *out, size_t size)
{
    __m512i bad = _mm512_setzero_si512();
    __m512i v = translate(text, &bad);
    if (_mm512_movepi8_mask(bad))
        return 0;
    v = _mm512_permutexvar_epi8(_mm512_load_si512(order), pack(v));
    _mm512_mask_storeu_epi8(out, first(size), v);
    return 1;
}

/* What is left after the last 256 characters, or before a fault.  Masks keep loads and stores
 * within the bounds, with "A" (zero bits) for the characters that are not there. */
AVX512 static inline size_t decode_rest(const uint8_t *text, size_t size, uint8_t *out)
{
    size_t done = 0;
    for (; size - done >= 64; done += 64, out += 48) {
        if (!decode_block(_mm512_loadu_si512(text + done), out, 48))
            return done;
    }
    size_t n = size - done;
    __m512i text_end = _mm512_mask_loadu_epi8(_mm512_set1_epi8('A'), first(n), text + done);
    return decode_block(text_end, out, n / 4 * 3) ? size : done;
}

AVX512 size_t rst_base64_kernel_avx512(const uint8_t *text, size_t size, uint8_t *out)
{
    /* The same order, turned by 0, 16, 32 and 48 bytes, so that the 48-byte pieces of four
     * registers fall into place in three, and whole registers are stored: aligned ones where out is
     * aligned, as a record's arrays are, and never a byte ahead. */
    const __m512i turn_0 = _mm512_load_si512(order);
    const __m512i turn_1 = _mm512_shuffle_i64x2(turn_0, turn_0, 0x39);
    const __m512i turn_2 = _mm512_shuffle_i64x2(turn_0, turn_0, 0x4E);
    const __m512i turn_3 = _mm512_shuffle_i64x2(turn_0, turn_0, 0x93);

    size_t done = 0;
    for (; size - done >= 256; done += 256, out += 192) {
        __m512i bad = _mm512_setzero_si512();
        __m512i v0 = translate(_mm512_loadu_si512(text + done), &bad);
        __m512i v1 = translate(_mm512_loadu_si512(text + done + 64), &bad);
        __m512i v2 = translate(_mm512_loadu_si512(text + done + 128), &bad);
        __m512i v3 = translate(_mm512_loadu_si512(text + done + 192), &bad);
        if (_mm512_movepi8_mask(bad))
            break;
        v0 = _mm512_permutexvar_epi8(turn_0, pack(v0));
        v1 = _mm512_permutexvar_epi8(turn_1, pack(v1));
        v2 = _mm512_permutexvar_epi8(turn_2, pack(v2));
        v3 = _mm512_permutexvar_epi8(turn_3, pack(v3));
        _mm512_storeu_si512(out, _mm512_mask_blend_epi32(0xF000, v0, v1));
        _mm512_storeu_si512(out + 64, _mm512_mask_blend_epi32(0xFF00, v1, v2));
        _mm512_storeu_si512(out + 128, _mm512_mask_blend_epi32(0xFFF0, v2, v3));
    }
    return done + decode_rest(text + done, size - done, out);
}

#else
typedef int rst_base64_avx512_is_empty_here; /* ISO C has no empty source files */
#endif
