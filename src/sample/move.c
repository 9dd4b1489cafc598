/* Copying and filling runs of memory. */
#include <string.h>

#include "../layout/stream.h"
#include "internal.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

/* Below this a run is written the plain way also when the plan streams: its first and last line,
 * which are written in part, would cost more than streaming the others saves. */
#define STREAM_RUN_SIZE 2048

/* Short runs are done in blocks, which compilers keep in a register: rows are too short for calls
 * of memcpy and memset with sizes that only show at run time. */
#define BLOCK_SIZE 16

typedef struct block {
    unsigned char bytes[BLOCK_SIZE];
} block;

static block block_of(uint32_t pattern)
{
    block b;
    for (size_t i = 0; i < BLOCK_SIZE; i += 4) {
        memcpy(b.bytes + i, &pattern, 4);
    }
    return b;
}

/* size: whole elements of 4 bytes. */
static void copy_row(unsigned char *to, const unsigned char *from, size_t size)
{
    size_t at = 0;
    for (; at + BLOCK_SIZE <= size; at += BLOCK_SIZE) {
        memcpy(to + at, from + at, BLOCK_SIZE);
    }
    for (; at < size; at += 4) {
        memcpy(to + at, from + at, 4);
    }
}

static void fill_row(unsigned char *to, const block *with, size_t size)
{
    size_t at = 0;
    for (; at + BLOCK_SIZE <= size; at += BLOCK_SIZE) {
        memcpy(to + at, with->bytes, BLOCK_SIZE);
    }
    for (; at < size; at += 4) {
        memcpy(to + at, with->bytes, 4);
    }
}

static void widen_rows(const rst_move *move, uint64_t begin, uint64_t end)
{
    size_t used = move->from_row_size;
    size_t unused = move->to_row_size - used;
    block with = block_of(move->pattern);
    unsigned char *to = move->to + begin;
    unsigned char *last = move->to + end;
    const unsigned char *from = move->from + begin / move->to_row_size * used;
    for (; to < last; to += move->to_row_size, from += used) {
        copy_row(to, from, used);
        fill_row(to + used, &with, unused);
    }
}

/* Only the loss mask, whose bytes are alike, has runs of any number of bytes. */
static void fill(unsigned char *to, uint32_t pattern, size_t size)
{
    if (pattern == (pattern & 0xFF) * UINT32_C(0x01010101)) {
        memset(to, (int)(pattern & 0xFF), size);
    } else {
        block with = block_of(pattern);
        fill_row(to, &with, size);
    }
}

/* ---------------------------------------------------------------- around the caches */

#if defined(__SSE2__)

#define LINE_SIZE 64 /* bytes of a cache line: a whole one is written without being read */

static size_t to_line(const unsigned char *at)
{
    return (size_t)(-(uintptr_t)at % LINE_SIZE);
}

/* Lines begin at whole elements: arrays of int32 and float are aligned to 4 bytes. */
static void stream_fill(unsigned char *to, uint32_t pattern, size_t size)
{
    __m128i with = _mm_set1_epi32((int)pattern);
    size_t at = to_line(to);
    fill(to, pattern, at);
    for (; size - at >= LINE_SIZE; at += LINE_SIZE) {
        for (size_t part = 0; part < LINE_SIZE; part += sizeof with) {
            _mm_stream_si128((__m128i *)(void *)(to + at + part), with);
        }
    }
    fill(to + at, pattern, size - at);
}

#else

static void stream_fill(unsigned char *to, uint32_t pattern, size_t size)
{
    fill(to, pattern, size);
}

#endif

void rst_moves_done(void)
{
    rst_stream_done();
}

/* ---------------------------------------------------------------- moves */

uint64_t rst_move_unit(const rst_move *move)
{
    return move->kind == RST_MOVE_ROWS ? move->to_row_size : 64;
}

void rst_move_run(const rst_move *move, uint64_t begin, uint64_t end, bool stream)
{
    size_t size = (size_t)(end - begin);
    stream = stream && size >= STREAM_RUN_SIZE;
    switch (move->kind) {
    case RST_MOVE_COPY:
        if (stream) {
            rst_stream_copy(move->to + begin, move->from + begin, size);
        } else {
            memcpy(move->to + begin, move->from + begin, size);
        }
        break;
    case RST_MOVE_FILL:
        if (stream) {
            stream_fill(move->to + begin, move->pattern, size);
        } else {
            fill(move->to + begin, move->pattern, size);
        }
        break;
    case RST_MOVE_ROWS:
        widen_rows(move, begin, end);
        break;
    }
}
