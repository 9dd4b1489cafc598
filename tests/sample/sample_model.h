/*
 * What the tests of samples share: sessions made by hand or at random, a slow assembler that
 * follows the definition word by word, arrays with guards around them, and a store in a folder of
 * its own.
 */
#ifndef SAMPLE_MODEL_H
#define SAMPLE_MODEL_H

#include <stdbool.h>

#include <rollstore/rollstore.h>

/* ---------------------------------------------------------------- a store */

rst_store *model_store_open(void); /* 64 MiB, empty */
void model_store_close(rst_store *store);

/* ---------------------------------------------------------------- sessions */

#define MODEL_TURNS_MAX 8

typedef struct model_session {
    char id[48];
    uint32_t turn_count;
    rst_turn turns[MODEL_TURNS_MAX]; /* prompt_ids: whole prompts */
} model_session;

/* Pseudo-random numbers below `limit`, the same in every run. */
uint32_t model_random(uint64_t *state, uint32_t limit);

/* A turn of n tokens with k candidates; some rows leave slots unused.  Its arrays are allocated;
 * token ids are below `vocabulary`. */
rst_turn model_turn(uint64_t *state, uint32_t n, uint32_t k, uint32_t vocabulary);

/* Set a turn's prompt: the session's tokens so far without the last `trimmed`, then `added` new
 * ones.  turn is the session's next one. */
void model_add(model_session *session, rst_turn turn, uint64_t *state, uint32_t trimmed,
               uint32_t added, uint32_t vocabulary);

/* The tokens that the turns before `turn` have made; to be freed.  */
int32_t *model_sequence(const model_session *session, uint32_t turn, uint32_t *count);

void model_session_free(model_session *session);

/* Put all turns into the store and seal the session. */
void model_store_session(rst_store *store, const model_session *session);

/* ---------------------------------------------------------------- samples */

typedef struct model_sample {
    int code;     /* RST_OK, RST_ERR_ALIGNMENT, RST_ERR_LIMIT */
    uint32_t bad; /* the turn at fault */
    rst_sample sizes;
    rst_sample_arrays arrays;
} model_sample;

/* topk: of the arrays; 0: the widest turn's. */
model_sample model_assemble(const model_session *session, const rst_sample_options *options,
                            uint32_t topk);
void model_sample_free(model_sample *sample);

/* Assert that the sizes are the model's. */
void model_compare_sizes(const rst_sample *got, const model_sample *want);

/* Assert that an array that may be left out has these bytes. */
void model_compare_bytes(const void *got, const void *want, size_t size);

/* Assert that arrays (NULL ones are passed over) hold the model's first R and T elements. */
void model_compare_arrays(const rst_sample_arrays *got, const model_sample *want);

/* ---------------------------------------------------------------- guarded arrays */

/* `size` bytes at an odd multiple of 4 bytes, with guards before and after, filled with a value
 * that no sample holds. */
void *guarded_new(size_t size);
/* Assert that the guards are whole. */
void guarded_check(const void *array, size_t size);
/* Assert that nothing was written at all. */
void guarded_check_untouched(const void *array, size_t size);
void guarded_free(void *array, size_t size); /* checks, then frees; takes NULL */

/* Arrays for a sample of these sizes; bit i of `left_out` leaves array i out. */
rst_sample_arrays guarded_arrays_new(uint64_t token_count, uint64_t response_count, uint32_t topk,
                                     unsigned left_out);
void guarded_arrays_check_untouched(const rst_sample_arrays *arrays, uint64_t token_count,
                                    uint64_t response_count, uint32_t topk);
void guarded_arrays_free(rst_sample_arrays *arrays, uint64_t token_count, uint64_t response_count,
                         uint32_t topk);

#endif
