/*
 * What the files of sample/ share.  Internal; knows the store's public functions and nothing of
 * LMDB.
 *
 * A sample is written in two steps.  First the turns' headers are walked and every array is turned
 * into moves: "copy these bytes there", "fill that run with this value".  All counts are checked
 * there, so that a damaged store is refused before the first byte is written.  Then the moves are
 * carried out, by several threads when asked: they know nothing of samples, and every byte counts
 * the same.
 */
#ifndef RST_SRC_SAMPLE_INTERNAL_H
#define RST_SRC_SAMPLE_INTERNAL_H

#include <stdbool.h>

#include <rollstore/sample.h>

/* ---------------------------------------------------------------- walking a session's turns */

typedef struct rst_walk {
    rst_snapshot *snapshot;
    const rst_session *session;
    uint32_t turn;           /* the next one */
    uint32_t output_count;   /* generated tokens of the turn before */
    uint64_t sequence_count; /* tokens of the sequence after the turn before */
} rst_walk;

/* The walk's next turn, which must be one of the session's.  On RST_OK its counts continue the
 * turns before it: prefix_count + trimmed_count is the sequence so far, trimmed_count at most the
 * turn before's output.  RST_ERR_ALIGNMENT, RST_ERR_CORRUPT; both name session and turn. */
int rst_walk_next(rst_walk *walk, rst_turn *turn, rst_error *error);

/* options, or the defaults for NULL.  RST_ERR_ARGUMENT. */
int rst_sample_options_of(const rst_sample_options *options, rst_sample_options *out,
                          rst_error *error);

/* ---------------------------------------------------------------- moves */

typedef enum rst_move_kind {
    RST_MOVE_COPY, /* size bytes */
    RST_MOVE_FILL, /* with a pattern of 4 bytes, from the first byte on */
    RST_MOVE_ROWS  /* rows that get wider: each is copied, then filled up with the pattern */
} rst_move_kind;

typedef struct rst_move {
    rst_move_kind kind;
    uint32_t pattern;
    unsigned char *to;
    const unsigned char *from;
    uint64_t begin;         /* bytes that the moves before it write */
    uint64_t size;          /* bytes it writes */
    uint32_t from_row_size; /* bytes; RST_MOVE_ROWS */
    uint32_t to_row_size;
} rst_move;

#define RST_PATTERN_ZERO UINT32_C(0)
#define RST_PATTERN_MASK UINT32_C(0x01010101)    /* four loss mask bytes of 1 */
#define RST_PATTERN_NO_ID UINT32_C(0xFFFFFFFF)   /* -1 */
#define RST_PATTERN_NO_PROB UINT32_C(0xFF800000) /* -inf */

typedef struct rst_plan {
    rst_move *moves;
    size_t count;
    size_t capacity;
    uint64_t size;      /* bytes all moves write */
    bool out_of_memory; /* set by an add; looked at once, at the end */
} rst_plan;

/* A move of 0 bytes or to NULL (an array left out) is not added. */
void rst_plan_copy(rst_plan *plan, void *to, const void *from, uint64_t size);
void rst_plan_fill(rst_plan *plan, void *to, uint32_t pattern, uint64_t size);

/* count rows of `from_width` elements of 4 bytes, to rows of `to_width`. */
void rst_plan_rows(rst_plan *plan, void *to, uint32_t to_width, const void *from,
                   uint32_t from_width, uint64_t count, uint32_t pattern);

void rst_plan_free(rst_plan *plan);

/* Carry out every move; threads: 1 to RST_THREADS_MAX, the calling one included.  Cannot fail: with
 * fewer threads than asked for it takes longer. */
#define RST_THREADS_MAX 64
void rst_plan_run(const rst_plan *plan, unsigned threads);

/* Bytes `begin` to `end` of what one move writes, both multiples of its unit (or its end).  stream:
 * write around the caches. */
uint64_t rst_move_unit(const rst_move *move);
void rst_move_run(const rst_move *move, uint64_t begin, uint64_t end, bool stream);

/* A thread calls it after its last move: what went around the caches is not ordered by the thread's
 * end, as other writes are. */
void rst_moves_done(void);

#endif
