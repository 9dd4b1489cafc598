/*
 * The decoder's AVX2 path: 128 characters to 96 bytes a turn of the loop.
 *
 * Tables in this instruction set have 16 entries, so a character is looked up by its two halves.
 * The alphabet, by high half (rows) and low half:
 *
 *     2_   + (B)  / (F)      value = character + 19 for "+", + 16 for "/"
 *     3_   0..9              character + 4
 *     4_   1..F  (A-O)       character - 65
 *     5_   0..A  (P-Z)       character - 65
 *     6_   1..F  (a-o)       character - 71
 *     7_   0..A  (p-z)       character - 71
 *
 * Faults: each kind of row has a bit (below).  `row_kind` gives a high half's bit, `bad_kinds` the
 * kinds of row in which a low half is outside the alphabet; a character is bad when they meet.
 * Rows 4 and 6 allow the same low halves, as do 5 and 7, so five kinds do.
 */
#include "base64/base64_kernel.h"

#ifdef RST_BASE64_HAVE_X86

#include <immintrin.h>

#define AVX2 __attribute__((target("avx2")))

#define ROW_2 0x01
#define ROW_3 0x02
#define ROW_46 0x04
#define ROW_57 0x08
#define ROW_OTHER 0x10

/* One table of 16 entries in each half of the register, which is how VPSHUFB looks up. */
AVX2 static inline __m256i table(int e0, int e1, int e2, int e3, int e4, int e5, int e6, int e7,
                                 int e8, int e9, int ea, int eb, int ec, int ed, int ee, int ef)
{
    return _mm256_broadcastsi128_si256(_mm_setr_epi8(
        (char)e0, (char)e1, (char)e2, (char)e3, (char)e4, (char)e5, (char)e6, (char)e7, (char)e8,
        (char)e9, (char)ea, (char)eb, (char)ec, (char)ed, (char)ee, (char)ef));
}

/* 32 characters to 32 values of six bits.  *bad gets a non-zero byte for each bad character. */
AVX2 static inline __m256i translate(__m256i text, __m256i *bad)
{
    const int o = ROW_OTHER;
    const __m256i row_kind = table(o, o, ROW_2, ROW_3, ROW_46, ROW_57, ROW_46, ROW_57, /* ASCII */
                                   o, o, o, o, o, o, o, o);
    const int l1_9 = ROW_OTHER | ROW_2;         /* 1..9: bad with 2_ only */
    const int l0 = l1_9 | ROW_46;               /* 0: and with 4_ and 6_ */
    const int lA = l1_9 | ROW_3;                /* A: bad with 2_ and 3_ */
    const int lCDE = lA | ROW_57;               /* C, D, E: and with 5_ and 7_ */
    const int lBF = ROW_OTHER | ROW_3 | ROW_57; /* B, F: "+" and "/" make 2_ good */
    const __m256i bad_kinds = table(l0, l1_9, l1_9, l1_9, l1_9, l1_9, l1_9, l1_9, l1_9, l1_9, lA,
                                    lBF, lCDE, lCDE, lCDE, lBF);
    /* By high half, but "/" is sent to the unused entry 1. */
    const __m256i to_value = table(0, 16, 19, 4, -65, -65, -71, -71, 0, 0, 0, 0, 0, 0, 0, 0);

    /* VPSHUFB uses the low four bits, and gives 0 where the top bit is set: masking with 0x2F
     * clears that bit, leaves the low four, and is the "/" to compare with, so one constant does.
     * The shift is of 32 bits: what it lets in from the next character is masked too. */
    const __m256i slash = _mm256_set1_epi8('/');
    __m256i high = _mm256_and_si256(_mm256_srli_epi32(text, 4), slash);
    __m256i low = _mm256_and_si256(text, slash);
    __m256i is_slash = _mm256_cmpeq_epi8(text, slash);

    *bad = _mm256_or_si256(*bad, _mm256_and_si256(_mm256_shuffle_epi8(row_kind, high),
                                                  _mm256_shuffle_epi8(bad_kinds, low)));
    return _mm256_add_epi8(text, _mm256_shuffle_epi8(to_value, _mm256_add_epi8(high, is_slash)));
}

/* Four values a, b, c, d to three bytes, in each 32 bits; in each half of the register the twelve
 * bytes end up in front. */
AVX2 static inline __m256i pack(__m256i values)
{
    const __m256i order = table(2, 1, 0, 6, 5, 4, 10, 9, 8, 14, 13, 12, -1, -1, -1, -1);
    __m256i pairs = _mm256_maddubs_epi16(values, _mm256_set1_epi32(0x01400140)); /* a << 6 | b */
    __m256i groups = _mm256_madd_epi16(pairs, _mm256_set1_epi32(0x00011000));    /* ab << 12 | cd */
    return _mm256_shuffle_epi8(groups, order);
}

AVX2 static inline __m256i load(const uint8_t *from)
{
    return _mm256_loadu_si256((const __m256i *)(const void *)from);
}

AVX2 static inline void store(uint8_t *to, __m256i bytes)
{
    _mm256_storeu_si256((__m256i *)(void *)to, bytes);
}

AVX2 size_t rst_base64_kernel_avx2(const uint8_t *text, size_t size, uint8_t *out)
{
    /* Closes the gap between the halves: 24 bytes, then 8 that do not matter.  The others are the
     * same turned by 8, 16 and 24 bytes, so that the pieces of four registers fall into place in
     * three, and whole registers are stored: aligned ones where out is aligned, and never a byte
     * ahead. */
    const __m256i turn_0 = _mm256_setr_epi32(0, 1, 2, 4, 5, 6, 3, 7);
    const __m256i turn_1 = _mm256_setr_epi32(2, 4, 5, 6, 3, 7, 0, 1);
    const __m256i turn_2 = _mm256_setr_epi32(5, 6, 3, 7, 0, 1, 2, 4);
    const __m256i turn_3 = _mm256_setr_epi32(3, 7, 0, 1, 2, 4, 5, 6);

    size_t done = 0;
    for (; size - done >= 128; done += 128, out += 96) {
        __m256i bad = _mm256_setzero_si256();
        __m256i v0 = translate(load(text + done), &bad);
        __m256i v1 = translate(load(text + done + 32), &bad);
        __m256i v2 = translate(load(text + done + 64), &bad);
        __m256i v3 = translate(load(text + done + 96), &bad);
        if (!_mm256_testz_si256(bad, bad))
            return done;
        v0 = _mm256_permutevar8x32_epi32(pack(v0), turn_0);
        v1 = _mm256_permutevar8x32_epi32(pack(v1), turn_1);
        v2 = _mm256_permutevar8x32_epi32(pack(v2), turn_2);
        v3 = _mm256_permutevar8x32_epi32(pack(v3), turn_3);
        store(out, _mm256_blend_epi32(v0, v1, 0xC0));
        store(out + 32, _mm256_blend_epi32(v1, v2, 0xF0));
        store(out + 64, _mm256_blend_epi32(v2, v3, 0xFC));
    }
    /* At most three more: 16 and 8 bytes are stored, so nothing is written ahead here either. */
    for (; size - done >= 32; done += 32, out += 24) {
        __m256i bad = _mm256_setzero_si256();
        __m256i v = translate(load(text + done), &bad);
        if (!_mm256_testz_si256(bad, bad))
            return done;
        v = _mm256_permutevar8x32_epi32(pack(v), turn_0);
        _mm_storeu_si128((__m128i *)(void *)out, _mm256_castsi256_si128(v));
        _mm_storel_epi64((__m128i *)(void *)(out + 16), _mm256_extracti128_si256(v, 1));
    }
    return done;
}

#else
typedef int rst_base64_avx2_is_empty_here; /* ISO C has no empty source files */
#endif
