/* Lists of tokens, read straight from the text of a reply.  Internal. */
#ifndef RST_SRC_REPLY_LISTS_H
#define RST_SRC_REPLY_LISTS_H

#include "json.h"

/* Brackets that are open at most in a list that is left out, its own included. */
#define RST_JSON_LIST_DEPTH 3

/* Bytes of the shortest entry of "output_token_logprobs" and its ',': a text has no more of them
 * than that gives. */
#define RST_JSON_ENTRY_SIZE_MIN (sizeof ",[0,0,\"\"]" - 1)

/* Where to look for lists, and where to note them. */
typedef struct rst_json_list_search {
    const char *text;
    size_t size;
    size_t from; /* lists between text[from] and text[to] */
    size_t to;
    rst_json_cut *cuts; /* room of them */
    uint32_t room;
    rst_json_entries *entries;
} rst_json_list_search;

/*
 * What of a flat reply is no base64 is nearly all in two lists with one element a token: "content",
 * of objects, and "output_token_logprobs", of [logprob, id, text].  Their elements all have one
 * shape, so that they can be checked and read at a known place after one another, faster than a
 * parser finds its way through them.
 *
 * Find such lists and note them as cuts; returns their number.  A list that is noted is a valid
 * JSON array, whatever stands around it; one that is not in the engine's own spelling (blanks
 * between the parts, other members in one element) is left to the parser.  So are all of them where
 * the processor has no AVX2.
 */
uint32_t rst_json_find_lists(const rst_json_list_search *search);

#endif
