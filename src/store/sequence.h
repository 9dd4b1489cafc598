/* The tokens that a session's prompts and outputs have made so far.  Internal. */
#ifndef RST_SRC_STORE_SEQUENCE_H
#define RST_SRC_STORE_SEQUENCE_H

#include "internal.h"

typedef struct rst_sequence {
    int32_t *tokens;
    uint64_t count;
    uint64_t capacity;
} rst_sequence;

void rst_sequence_free(rst_sequence *sequence);

/* Add one turn: the prompt goes on after prefix_count tokens, then comes the output. */
int rst_sequence_add(rst_sequence *sequence, uint32_t prefix_count, const int32_t *prompt_ids,
                     uint64_t prompt_count, const int32_t *token_ids, uint64_t token_count,
                     rst_error *error);

/* Make it the sequence of a stored session before turn `turn`. */
int rst_sequence_load(rst_sequence *sequence, MDB_txn *txn, const rst_env *env,
                      const uint8_t key[RST_KEY_SIZE], uint32_t turn, rst_error *error);

/* How many tokens the prompt begins with. */
uint32_t rst_sequence_common(const rst_sequence *sequence, const int32_t *prompt,
                             uint64_t prompt_count);

#endif
