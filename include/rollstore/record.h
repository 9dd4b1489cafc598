/*
 * rollstore/record.h: one turn, before it is stored: from an engine's reply, or from arrays.
 *
 * An rst_record is a growing buffer that holds one turn in the layout of layout.h.  Fill it with
 * rst_record_decode (a reply's bytes) or rst_record_set (arrays), add the prompt, hand it to
 * rst_put.  Use it again for the next turn: its memory is kept, so that a worker allocates once.
 * A record is used by one thread at a time; different records are independent.  Nothing here needs
 * a store.
 */
#ifndef ROLLSTORE_RECORD_H
#define ROLLSTORE_RECORD_H

#include <stddef.h>
#include <stdint.h>

#include <rollstore/error.h>
#include <rollstore/layout.h>

#ifdef __cplusplus
extern "C" {
#endif

/* One turn as arrays.  Read from a record or a snapshot, the pointers live as long as that says;
 * given to rst_record_set, they are copied.  n = token_count, k = topk. */
typedef struct rst_turn {
    uint32_t turn;               /* index in its session; not read by rst_record_set */
    uint32_t token_count;        /* n */
    uint32_t topk;               /* k */
    uint32_t null_prefix;        /* leading tokens without candidates; not read by rst_record_set */
    const int32_t *token_ids;    /* [n] */
    const float *token_logprobs; /* [n] natural log */
    const int32_t *topk_ids;     /* [n, k] row-major; -1 where a slot is unused */
    const float *topk_logprobs;  /* [n, k]; -inf where a slot is unused */
    const int32_t
        *widths; /* [n] used slots of each row; NULL: all k.  Not read by rst_record_set */
    const int32_t *prompt_ids; /* [prompt_count] */
    uint32_t
        prompt_count; /* stored turn: ids after the prefix; unstored record: the whole prompt */
    uint32_t prefix_count;  /* stored turn: tokens before that the prompt begins with */
    uint32_t trimmed_count; /* stored turn: tokens before that the prompt leaves out */
    float temperature;      /* NaN when not known */
    rst_mode mode;
    rst_finish finish;
    rst_scaled temperature_scaled;
    uint32_t weight_version_size;  /* bytes */
    uint32_t finish_reason_size;   /* bytes */
    const char *weight_version;    /* text without a NUL; NULL when size is 0 */
    const char *finish_reason;     /* text without a NUL; only with RST_FINISH_OTHER */
    int64_t weight_version_number; /* decimal value of weight_version, or RST_NO_VERSION; not read
                                      by rst_record_set */
} rst_turn;

typedef struct rst_record rst_record;

/* A new empty record; NULL when there is no memory.  rst_record_free takes NULL. */
RST_API rst_record *rst_record_new(void);
RST_API void rst_record_free(rst_record *record);

/* ---------------------------------------------------------------- from a reply */

typedef enum rst_request {
    RST_REQUEST_FLAT = 0,   /* flat candidates were asked for, base64 or plain */
    RST_REQUEST_NESTED = 1, /* output_top_logprobs is read, flat fields are not looked at */
    RST_REQUEST_NONE = 2    /* no candidates were asked for: none are looked at, k is 0 */
} rst_request;

#define RST_TOPK_FROM_REPLY 0   /* take k from the reply's shape or its widest row */
#define RST_JSON_DEPTH_MAX 1024 /* nesting of a reply */
#define RST_REPLY_SIZE_MAX UINT32_C(0xF0000000) /* bytes: 3.75 GiB */

typedef struct rst_decode_options {
    rst_mode mode;       /* which candidate fields are read */
    rst_request request; /* selected mode only */
    uint32_t topk;   /* k that was asked for, 1 to RST_TOPK_MAX; in support mode a row's capacity */
    uint32_t choice; /* which of a chat reply's choices */
} rst_decode_options;

/*
 * Decode one engine reply (chat completion or native /generate; the shapes are told apart by their
 * fields) into the record: tokens, candidates, weight version, finish reason.  The prompt is
 * emptied and the temperature becomes NaN.
 *
 * reply: size bytes of UTF-8 JSON, need not end with NUL or padding, not changed, not kept.
 * options: NULL means selected, flat, k from the reply, choice 0.
 * Errors: RST_ERR_SYNTAX to RST_ERR_TYPE with field and, where known, byte offset; RST_ERR_MEMORY,
 * RST_ERR_ARGUMENT, RST_ERR_LIMIT.  After an error the record is empty.  Memory use is bounded by
 * the reply's size and options.topk, whatever counts the reply claims.  With topk 0 the widest row
 * of a nested or support reply is k for every token, so that a small reply can ask for
 * RST_RECORD_SIZE_MAX bytes: name k where replies come from somebody who is not trusted.
 */
RST_API int rst_record_decode(rst_record *record, const void *reply, size_t size,
                              const rst_decode_options *options, rst_error *error);

/* ---------------------------------------------------------------- from arrays */

/* Copy and check a turn given as arrays, with the same rules of value as a reply's (RST_ERR_VALUE,
 * RST_ERR_SHAPE, RST_ERR_LIMIT name array and element).  Widths and null_prefix are worked out from
 * the arrays, the weight version's number from its text. */
RST_API int rst_record_set(rst_record *record, const rst_turn *turn, rst_error *error);

/* ---------------------------------------------------------------- what a reply does not say */

/* The request's whole prompt (count ids, copied); what earlier turns hold already is left out when
 * the record is stored.  RST_ERR_VALUE for an id below 0, RST_ERR_LIMIT over RST_TOKEN_COUNT_MAX.
 */
RST_API int rst_record_set_prompt(rst_record *record, const int32_t *ids, size_t count,
                                  rst_error *error);

/* The request's sampling temperature; NaN when not known.  One below 0 or without end is refused
 * when the record is stored (RST_ERR_VALUE). */
RST_API void rst_record_set_temperature(rst_record *record, float temperature);

/* Look at the record.  The pointers live until the record is filled again, stored or freed. */
RST_API void rst_record_view(const rst_record *record, rst_turn *turn);

/* ---------------------------------------------------------------- back to a reply */

/*
 * Write a turn as an engine's flat base64 chat reply (the shape of rst_record_decode's input),
 * which decodes to the same arrays.  Support turns are written as support replies. *reply: malloc'd
 * text, *size bytes and a NUL; the caller frees it with free().
 */
RST_API int rst_turn_to_reply(const rst_turn *turn, char **reply, size_t *size, rst_error *error);

/* ---------------------------------------------------------------- checking stored bytes */

/* Check one record of `size` bytes as verify does: structure, checksum, values, and against key and
 * turn (key NULL: not compared).  Reads nothing outside the bytes.  RST_ERR_CORRUPT names the
 * field. */
RST_API int rst_record_check(const void *value, size_t size, const uint8_t *key, uint32_t turn,
                             rst_error *error);

/* Which code decodes base64 here: "avx512", "avx2", "neon" or "portable".  ROLLSTORE_SIMD in the
 * environment names another one that the processor has, read at first use.  Static. */
RST_API const char *rst_base64_path(void);

#ifdef __cplusplus
}
#endif
#endif
