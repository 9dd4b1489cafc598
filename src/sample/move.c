/* Copying and filling runs of memory. */
#include <string.h>

#include "internal.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

/* The caller's arrays are int32 or float; here they are just patterns. */
typedef uint32_t __attribute__((may_alias)) pattern32;

/* Below this a run is written the plain way also when the plan streams: aligning and fencing would
 * cost more than the lines' reading. */
#define STREAM_RUN_SIZE 4096

#if defined(__SSE2__)

#define LINE_SIZE 64 /* bytes of a cache line: a whole one is written without being read */

static size_t to_line(const unsigned char *at)
{
    return (size_t)(-(uintptr_t)at % LINE_SIZE);
}

static void stream_copy(unsigned char *to, const unsigned char *from, size_t size)
{
    size_t head = to_line(to);
    memcpy(to, from, head);
    size_t at = head;
    for (; size - at >= LINE_SIZE; at += LINE_SIZE) {
        const __m128i *in = (const __m128i *)(const void *)(from + at);
        __m128i *out = (__m128i *)(void *)(to + at);
        __m128i a = _mm_loadu_si128(in);
        __m128i b = _mm_loadu_si128(in + 1);
        __m128i c = _mm_loadu_si128(in + 2);
        __m128i d = _mm_loadu_si128(in + 3);
        _mm_stream_si128(out, a);
        _mm_stream_si128(out + 1, b);
        _mm_stream_si128(out + 2, c);
        _mm_stream_si128(out + 3, d);
    }
    memcpy(to + at, from + at, size - at);
    /* Streamed stores are not ordered by the thread's end as others are. */
    _mm_sfence();
}

#else

static void stream_copy(unsigned char *to, const unsigned char *from, size_t size)
{
    memcpy(to, from, size);
}

#endif

static bool same_bytes(uint32_t pattern)
{
    return pattern == (pattern & 0xFF) * UINT32_C(0x01010101);
}

/* A pattern of four different bytes is only asked for on int32 and float arrays, in whole elements.
 */
static void fill(unsigned char *to, uint32_t pattern, size_t size)
{
    if (same_bytes(pattern)) {
        memset(to, (int)(pattern & 0xFF), size);
        return;
    }
    pattern32 *out = (pattern32 *)(void *)to;
    for (size_t i = 0; i < size / 4; i++) {
        out[i] = pattern;
    }
}

static void widen_rows(const rst_move *move, uint64_t begin, uint64_t end)
{
    size_t used = move->from_row_size;
    size_t unused = move->to_row_size - used;
    unsigned char *to = move->to + begin;
    unsigned char *last = move->to + end;
    const unsigned char *from = move->from + begin / move->to_row_size * used;
    for (; to < last; to += move->to_row_size, from += used) {
        memcpy(to, from, used);
        fill(to + used, move->pattern, unused);
    }
}

uint64_t rst_move_unit(const rst_move *move)
{
    return move->kind == RST_MOVE_ROWS ? move->to_row_size : 64;
}

void rst_move_run(const rst_move *move, uint64_t begin, uint64_t end, bool stream)
{
    size_t size = (size_t)(end - begin);
    switch (move->kind) {
    case RST_MOVE_COPY:
        if (stream && size >= STREAM_RUN_SIZE) {
            stream_copy(move->to + begin, move->from + begin, size);
        } else {
            memcpy(move->to + begin, move->from + begin, size);
        }
        break;
    case RST_MOVE_FILL:
        fill(move->to + begin, move->pattern, size);
        break;
    case RST_MOVE_ROWS:
        widen_rows(move, begin, end);
        break;
    }
}
