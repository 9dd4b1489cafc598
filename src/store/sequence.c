#include "sequence.h"

#include <stdlib.h>
#include <string.h>

void rst_sequence_free(rst_sequence *sequence)
{
    free(sequence->tokens);
    *sequence = (rst_sequence){0};
}

static int grow(rst_sequence *sequence, uint64_t count, rst_error *error)
{
    if (count <= sequence->capacity) {
        return RST_OK;
    }
    uint64_t capacity = count + count / 2;
    int32_t *tokens = realloc(sequence->tokens, capacity * sizeof *tokens);
    if (!tokens) {
        return rst_fail(error, RST_ERR_MEMORY, NULL, "no memory for a session's %llu tokens",
                        (unsigned long long)count);
    }
    sequence->tokens = tokens;
    sequence->capacity = capacity;
    return RST_OK;
}

static void append(rst_sequence *sequence, const int32_t *ids, uint64_t count)
{
    if (count) {
        memcpy(sequence->tokens + sequence->count, ids, count * sizeof *ids);
        sequence->count += count;
    }
}

int rst_sequence_add(rst_sequence *sequence, uint32_t prefix_count, const int32_t *prompt_ids,
                     uint64_t prompt_count, const int32_t *token_ids, uint64_t token_count,
                     rst_error *error)
{
    if (prefix_count > sequence->count) {
        return rst_fail(error, RST_ERR_CORRUPT, "prefix_count",
                        "record: prefix_count: more tokens than the turns before have");
    }
    sequence->count = prefix_count;
    int code = grow(sequence, sequence->count + prompt_count + token_count, error);
    if (!code) {
        append(sequence, prompt_ids, prompt_count);
        append(sequence, token_ids, token_count);
    }
    return code;
}

int rst_sequence_load(rst_sequence *sequence, MDB_txn *txn, const rst_env *env,
                      const uint8_t key[RST_KEY_SIZE], uint32_t turn, rst_error *error)
{
    sequence->count = 0;
    for (uint32_t i = 0; i < turn; i++) {
        rst_turn stored;
        int code = rst_read_turn(txn, env, key, i, &stored, NULL, error);
        if (!code) {
            code =
                rst_sequence_add(sequence, stored.prefix_count, stored.prompt_ids,
                                 stored.prompt_count, stored.token_ids, stored.token_count, error);
        }
        if (code) {
            return code;
        }
    }
    return RST_OK;
}

uint32_t rst_sequence_common(const rst_sequence *sequence, const int32_t *prompt,
                             uint64_t prompt_count)
{
    uint64_t most = sequence->count < prompt_count ? sequence->count : prompt_count;
    uint64_t at = 0;
    /* memcmp over blocks finds the place quickly, since nearly all of a prompt is the same. */
    const uint64_t block = 1024;
    while (at + block <= most &&
           memcmp(sequence->tokens + at, prompt + at, block * sizeof *prompt) == 0) {
        at += block;
    }
    while (at < most && sequence->tokens[at] == prompt[at]) {
        at++;
    }
    return (uint32_t)at;
}
