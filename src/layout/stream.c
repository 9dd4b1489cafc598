#include "stream.h"

#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)

#include <emmintrin.h>

#define LINE_SIZE 64 /* bytes of a cache line: a whole one is written without being read */

void rst_stream_copy(void *to, const void *from, size_t size)
{
    unsigned char *out = to;
    const unsigned char *in = from;
    size_t at = (size_t)(-(uintptr_t)out % LINE_SIZE);
    at = at < size ? at : size;
    memcpy(out, in, at);
    for (; size - at >= LINE_SIZE; at += LINE_SIZE) {
        const __m128i *line = (const __m128i *)(const void *)(in + at);
        __m128i *target = (__m128i *)(void *)(out + at);
        /* All four are read first: a line is written in one go. */
        __m128i a = _mm_loadu_si128(line);
        __m128i b = _mm_loadu_si128(line + 1);
        __m128i c = _mm_loadu_si128(line + 2);
        __m128i d = _mm_loadu_si128(line + 3);
        _mm_stream_si128(target, a);
        _mm_stream_si128(target + 1, b);
        _mm_stream_si128(target + 2, c);
        _mm_stream_si128(target + 3, d);
    }
    memcpy(out + at, in + at, size - at);
}

void rst_stream_done(void)
{
    _mm_sfence();
}

#else

void rst_stream_copy(void *to, const void *from, size_t size)
{
    memcpy(to, from, size);
}

void rst_stream_done(void)
{
}

#endif
