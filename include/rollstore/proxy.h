/*
 * rollstore/proxy.h: what a proxy between agents and inference engines needs.
 *
 * A training reply is a megabyte, of which the agent wants a hundredth.  These functions take
 * requests and replies apart in one pass over the text, without a tree, so that a proxy can change
 * a few members of each and leave the rest as it came.  Nothing here needs a store, and any number
 * of threads may call.
 */
#ifndef ROLLSTORE_PROXY_H
#define ROLLSTORE_PROXY_H

#include <stddef.h>
#include <stdint.h>

#include <rollstore/error.h>
#include <rollstore/record.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---------------------------------------------------------------- requests */

#define RST_MEMBER_COUNT_MAX 256 /* members of a request's object */

/* One member of an object.  The pointers lead into the text. */
typedef struct rst_member {
    const char *name; /* name_size bytes as they are spelled, with the quotes */
    size_t name_size;
    const char *value; /* value_size bytes of valid JSON */
    size_t value_size;
} rst_member;

/*
 * The members of the JSON object `text`, in its order, the first level only; all of the text is
 * checked.  members has room for RST_MEMBER_COUNT_MAX; *count is written.  A name may stand twice.
 * RST_ERR_SYNTAX, RST_ERR_TYPE (no object), RST_ERR_LIMIT (more members), RST_ERR_MEMORY.
 */
RST_API int rst_json_object(const void *text, size_t size, rst_member *members, size_t *count,
                            rst_error *error);

/*
 * The token ids of the JSON array `text`.  *ids: malloc'd, *count of them; the caller frees it with
 * free().  RST_ERR_SYNTAX, RST_ERR_TYPE (no array, or of other things than integers), RST_ERR_VALUE
 * (below 0 or over 2^31-1), RST_ERR_LIMIT (over RST_TOKEN_COUNT_MAX), RST_ERR_MEMORY.
 */
RST_API int rst_json_token_ids(const void *text, size_t size, int32_t **ids, size_t *count,
                               rst_error *error);

/* ---------------------------------------------------------------- replies */

/* What an agent asked for of what only some ask for; the rest is taken out. */
#define RST_KEEP_LOGPROBS 0x1u  /* each choice's logprobs, and the sampled tokens in meta_info */
#define RST_KEEP_META_INFO 0x2u /* each choice's meta_info */
#define RST_KEEP_TOKEN_IDS 0x4u /* prompt_token_ids and token_ids, of the reply and its choices */
/* The first choice's logprobs are given apart, and null in their place. */
#define RST_SPLIT_LOGPROBS 0x8u

/* A chat reply as the agent gets it. */
typedef struct rst_answer {
    char *text; /* malloc'd, text_size bytes and a NUL */
    size_t text_size;
    char *logprobs; /* malloc'd, with RST_SPLIT_LOGPROBS when there are some; else NULL */
    size_t logprobs_size;
    int32_t *prompt_ids; /* malloc'd; NULL when the reply does not say them */
    size_t prompt_count;
} rst_answer;

/*
 * Take the candidates out of a chat reply, and what the agent did not ask for.
 *
 * keep: RST_KEEP_*.  In every choice, top_logprobs lists become empty and candidate fields leave
 * meta_info; everything else stays as it is spelled.  The prompt's ids are looked for in the first
 * choice, in its meta_info, then in the reply, under prompt_token_ids.
 * RST_ERR_SYNTAX, RST_ERR_TYPE, RST_ERR_VALUE and RST_ERR_LIMIT (of the prompt's ids),
 * RST_ERR_MEMORY.  answer is always written: rst_answer_clear frees what it holds, and empties it.
 */
RST_API int rst_reply_strip(const void *reply, size_t size, unsigned keep, rst_answer *answer,
                            rst_error *error);
RST_API void rst_answer_clear(rst_answer *answer);

/*
 * rst_record_decode and rst_reply_strip in one reading of the reply: some two thirds of the time.
 *
 * The prompt's ids are the answer's, and not the record's yet (rst_record_set_prompt).  The errors
 * of both; then the record is unfilled and the answer empty.
 */
RST_API int rst_reply_decode_and_strip(rst_record *record, const void *reply, size_t size,
                                       const rst_decode_options *options, unsigned keep,
                                       rst_answer *answer, rst_error *error);

#ifdef __cplusplus
}
#endif
#endif
