/*
 * What the parts of the reply decoder share.  Internal.
 *
 * Where a reply leaves room, it is read so:
 *   - of a key that stands twice in one object the last counts, as in Python's json;
 *   - a field that is null counts as absent;
 *   - base64 is read before numbers, and both arrays of a form must be there: forms are not mixed;
 *   - null_prefix is needed, like shape;
 *   - a logprob's text is rounded to double, then to float; beyond double it is an infinity, as in
 *     Python, and then refused unless it is a candidate's -inf; beyond float it is refused;
 *   - a token id is an integer in spelling too: 12.0 is none;
 *   - null rows may stand anywhere in the nested form, and nowhere in support mode;
 *   - without tokens, k of a shape may be 0, whatever was asked for;
 *   - the weight version may be a number, and may stand in the chat reply's metadata instead;
 *   - a choice's own finish_reason is preferred to that of its meta_info.
 */
#ifndef RST_SRC_REPLY_REPLY_H
#define RST_SRC_REPLY_REPLY_H

#include <rollstore/record.h>

#include "../error.h"
#include "../layout/record.h"
#include "json.h"

/* Members of meta_info that are looked at; names in meta.c. */
typedef enum reply_field {
    FIELD_TOKENS,
    FIELD_IDX_B64,
    FIELD_VAL_B64,
    FIELD_IDX_B64_DTYPE,
    FIELD_VAL_B64_DTYPE,
    FIELD_IDX_PLAIN,
    FIELD_VAL_PLAIN,
    FIELD_SHAPE,
    FIELD_NULL_PREFIX,
    FIELD_NESTED,
    FIELD_MASK,
    FIELD_MASK_LOGPROBS,
    FIELD_SCALED,
    FIELD_WEIGHT_VERSION,
    FIELD_FINISH_REASON,
    FIELD_COUNT
} reply_field;

extern const char *const rst_reply_fields[FIELD_COUNT];

/* One reply while it is decoded. */
typedef struct reading {
    const rst_json *json;
    rst_json_reader *reader;
    rst_record *record;
    const rst_decode_options *options;
    rst_error *error;

    rst_json_node top;    /* the reply */
    rst_json_node choice; /* of a chat reply, or RST_JSON_NONE */
    rst_json_node fields[FIELD_COUNT];

    uint32_t n;                    /* tokens */
    const rst_json_entry *entries; /* [n], where the list of tokens was read as a whole; or NULL */
    uint32_t k;                    /* slots of a token, known after measuring */
    rst_slots slots;

    /* Of the flat forms: the arrays begin at token null_prefix. */
    uint32_t null_prefix;
    const char *ids_text; /* base64 */
    size_t ids_text_size;
    const char *logprobs_text;
    size_t logprobs_text_size;
} reading;

/* Where a value stands in the reply. */
typedef struct reply_spot {
    reply_field field;
    size_t offset;
} reply_spot;

/* One of the ways in which candidates are written. */
typedef struct reply_form {
    /* Check every count and set k; nothing is allocated before. */
    int (*measure)(reading *r);
    /* Fill topk_ids and topk_logprobs. */
    int (*fill)(reading *r);
    /* Find an id or a logprob again, to name it in an error. */
    reply_spot (*find)(const reading *r, uint32_t row, uint32_t slot, bool is_id);
} reply_form;

extern const reply_form rst_form_base64;
extern const reply_form rst_form_plain;
extern const reply_form rst_form_nested;
extern const reply_form rst_form_support;

/* The record's memory for reading JSON; NULL when there is none left. */
rst_json_reader *rst_reply_reader(rst_record *record);

/* rst_record_decode; then (NULL allowed) is called with the document when that went well. lists_too
 * is the reader's. */
int rst_reply_decode_then(rst_record *record, const void *reply, size_t size,
                          const rst_decode_options *options, bool lists_too, rst_json_use *then,
                          void *context, rst_error *error);

/* Decode the reply at node `top` of the document; the reader is the record's. */
int rst_reply_decode(rst_record *record, const rst_json *json, rst_json_node top,
                     const rst_decode_options *options, rst_error *error);

/* RST_ERR_ARGUMENT for options that are none. */
int rst_reply_check_options(const rst_decode_options *options, rst_error *error);

/* Find choice and fields; in meta.c. */
int rst_reply_find_fields(reading *r);

/* RST_ERR_TYPE: "FIELD is a string, not WANTED". */
int rst_reply_wrong_type(const reading *r, const char *field, rst_json_node node,
                         const char *wanted);

/* ---------------------------------------------------------------- for the forms */

static inline bool rst_reply_has(const reading *r, reply_field field)
{
    return r->fields[field] != RST_JSON_NONE;
}

/* RST_ERR_TYPE unless the field, which is there, is an array. */
int rst_reply_need_array(const reading *r, reply_field field);

/* RST_ERR_MISSING. */
int rst_reply_missing(const reading *r, reply_field field);

/* Read one id or logprob of a field.  slot -1: the field has one a token. */
int rst_reply_read_id(const reading *r, reply_field field, rst_json_node node, uint32_t row,
                      int64_t slot, int32_t *id);
int rst_reply_read_logprob(const reading *r, reply_field field, rst_json_node node, uint32_t row,
                           int64_t slot, float *logprob);

/* Read [logprob, token_id, text-or-null]. */
int rst_reply_read_entry(const reading *r, reply_field field, rst_json_node node, uint32_t row,
                         int64_t slot, int32_t *id, float *logprob);

/* Make the slots [from, to) of the record unused. */
void rst_reply_fill_unused(reading *r, size_t from, size_t to);

#endif
