/*
 * rollstore/ingest.h: replies and recorded sessions straight into a store.
 */
#ifndef ROLLSTORE_INGEST_H
#define ROLLSTORE_INGEST_H

#include <rollstore/store.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What a reply does not say about its turn. */
typedef struct rst_put_options {
    rst_decode_options decode;
    const int32_t *prompt_ids; /* [prompt_count] the request's whole prompt */
    size_t prompt_count;
    float temperature;  /* NaN when not known */
    unsigned flags;     /* RST_CHANGE_REPLACE */
    int64_t timeout_ms; /* how long to wait at capacity */
} rst_put_options;

/*
 * Decode a reply and store it as the session's turn: rst_record_decode, rst_record_set_prompt and
 * rst_put in one call, with their errors.
 * record: memory to decode into, kept between calls; NULL for a record of the call's own.
 */
RST_API int rst_put_reply(rst_store *store, const void *session, size_t session_size, uint32_t turn,
                          const void *reply, size_t reply_size, const rst_put_options *options,
                          rst_record *record, rst_error *error);

/* ---------------------------------------------------------------- recorded sessions */

typedef enum rst_line_kind { RST_LINE_TURN = 1, RST_LINE_END = 2 } rst_line_kind;

/* One line of a recorded session:
 *   {"session_id", "turn", "request", "response"}     or
 *   {"session_id", "end": {"status", "reward", "group_index", "index"}} */
typedef struct rst_line {
    rst_line_kind kind;
    const char *session; /* UTF-8; lives until the record is filled again or freed */
    size_t session_size;
    uint32_t turn;       /* RST_LINE_TURN */
    rst_outcome outcome; /* RST_LINE_END; absent or null members: NaN, RST_NO_INDEX */
} rst_line;

/*
 * Decode one line.  For a turn the record gets reply, prompt (request.input_ids) and temperature;
 * request says how the reply is read: return_sampling_mask true: support mode, capacity topk;
 * return_flat_raw_output_top_logprobs true: flat; else nested; k is top_logprobs, at /generate
 * top_logprobs_num (support: topk or from the reply).
 * topk: 0, or what k must be.
 * Errors as rst_record_decode, with fields named from the line's top ("response...." omitted).
 */
RST_API int rst_line_decode(rst_record *record, const void *line, size_t size, uint32_t topk,
                            rst_line *out, rst_error *error);

/* Only the line's session id, without looking at the rest more than is needed to find it: for
 * handing lines to workers.  id[RST_SESSION_ID_SIZE_MAX] and *id_size are written. */
RST_API int rst_line_session(const void *line, size_t size, char *id, size_t *id_size,
                             rst_error *error);

/* The change that stores the line: rst_apply takes it. */
RST_API void rst_line_change(const rst_line *line, rst_record *record, unsigned flags,
                             rst_change *change);

#ifdef __cplusplus
}
#endif
#endif
