/* Replies of a size that engines send, made here: nothing has to be recorded first. */
#ifndef TOOL_BENCH_REPLY_H
#define TOOL_BENCH_REPLY_H

#include <stdbool.h>
#include <stdint.h>

#include "../base/output.h"

#define BENCH_TOPK 32

/* Write a chat reply of `token_count` tokens with BENCH_TOPK candidates each, flat as base64 or
 * nested, with the list logprobs.content that chat replies carry.  The same arguments give the same
 * bytes.  False, after an error message, when there is no memory. */
bool bench_make_reply(output *out, uint32_t token_count, bool nested, uint64_t seed);

#endif
