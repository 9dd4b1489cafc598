/* The layout of a record, and the buffer one is built in.  Internal; knows nothing of JSON or LMDB.
 */
#ifndef RST_SRC_LAYOUT_RECORD_H
#define RST_SRC_LAYOUT_RECORD_H

#include <stdbool.h>

#include <rollstore/record.h>

/* Offsets from the header's first byte; `end` is record_size. */
typedef struct rst_offsets {
    uint64_t token_ids;
    uint64_t token_logprobs;
    uint64_t topk_ids;
    uint64_t topk_logprobs;
    uint64_t widths; /* where it would be, also without RST_RECORD_RAGGED */
    uint64_t prompt_ids;
    uint64_t text;
    uint64_t end;
} rst_offsets;

/* Work out the offsets from the header's counts and flags.  False when a count is over its limit or
 * the sizes do not fit RST_RECORD_SIZE_MAX. */
bool rst_offsets_of(const rst_record_header *header, rst_offsets *offsets);

/* The first offset at or after `offset` at which an array may begin. */
uint64_t rst_align(uint64_t offset);

struct rst_record {
    unsigned char *memory; /* 64-byte aligned; the header begins RST_VALUE_OFFSET bytes into it */
    size_t capacity;       /* bytes from the header on */
    rst_offsets offsets;
    bool filled;     /* holds a turn */
    int32_t *prompt; /* the whole prompt */
    size_t prompt_count;
    size_t prompt_capacity;
    char weight_version[RST_TEXT_SIZE_MAX];
    char finish_reason[RST_TEXT_SIZE_MAX];
    char *session; /* of a recorded line; owned by the record */
    size_t session_capacity;
    const void *claimed; /* the call that is storing it, NULL else */
    void *scratch;       /* the decoder's own memory, freed with scratch_free */
    void (*scratch_free)(void *scratch);
};

/* A temperature is NaN where it is not known, else at least 0 and finite. */
bool rst_temperature_possible(float temperature);

/* The arrays of a record that is being filled. */
typedef struct rst_slots {
    int32_t *token_ids;    /* [n] */
    float *token_logprobs; /* [n] */
    int32_t *topk_ids;     /* [n, k] */
    float *topk_logprobs;  /* [n, k] */
    int32_t *widths;       /* [n] */
} rst_slots;

rst_record_header *rst_record_header_of(const rst_record *record);

/* Empty the record and make room for n tokens of k slots; the header gets defaults, the arrays are
 * not initialised.  RST_ERR_LIMIT, RST_ERR_MEMORY. */
int rst_record_begin(rst_record *record, uint32_t token_count, uint32_t topk, rst_slots *slots,
                     rst_error *error);

/* A value that a record may not hold, and where. */
typedef enum rst_bad_array {
    RST_BAD_NONE,
    RST_BAD_TOKEN_ID,
    RST_BAD_TOKEN_LOGPROB,
    RST_BAD_TOPK_ID,
    RST_BAD_TOPK_LOGPROB
} rst_bad_array;

typedef struct rst_bad_value {
    rst_bad_array array;
    uint64_t index;     /* element of that array */
    const char *reason; /* static: "NaN", "an id twice in one row", ... */
} rst_bad_value;

/* Check every value of the filled arrays and work out the widths: 1 + the last used slot of each
 * row. False at the first bad value, which *bad describes.  *ragged: some width is not k. */
bool rst_check_values(const rst_turn *arrays, int32_t *widths, bool *ragged, rst_bad_value *bad);

/* Name of the rst_bad_value's array: "token_ids", ... */
const char *rst_bad_array_name(const rst_bad_value *bad);

/* The arrays are filled and checked, header fields mode .. temperature_scaled are set: set flags
 * and null_prefix, zero the gaps, mark the record as filled. */
void rst_record_filled(rst_record *record, bool ragged);

/* Text members; RST_ERR_LIMIT over RST_TEXT_SIZE_MAX.  The weight version's number is worked out.
 */
int rst_record_set_weight_version(rst_record *record, const char *text, size_t size,
                                  rst_error *error);
int rst_record_set_finish_reason(rst_record *record, rst_finish finish, const char *text,
                                 size_t size, rst_error *error);

/* Where the record goes. */
typedef struct rst_place {
    const uint8_t *session_key;
    uint32_t turn;
    uint32_t prefix_count;
    uint32_t trimmed_count;
    uint64_t prefix_hash;
} rst_place;

/* Complete header, prompt_ids, text and checksum.  *bytes points into the record; *size is
 * record_size.  May be called again with another place. */
int rst_record_complete(rst_record *record, const rst_place *place, const void **bytes,
                        size_t *size, rst_error *error);

/* Structure of a stored value: counts, flags, sizes; costs no reading of the arrays.  On success
 * the turn's pointers are set. */
int rst_record_open(const void *value, size_t size, rst_turn *turn, rst_error *error);

uint64_t rst_hash(const void *bytes, size_t size);

/* Every value of an opened record, its widths, prompt and weight version.  RST_ERR_CORRUPT. */
int rst_check_turn(const rst_turn *turn, const rst_record_header *header, rst_error *error);

/* A weight version as a number; RST_NO_VERSION unless it is plain decimal, as str(int) writes it.
 */
int64_t rst_decimal_version(const char *text, size_t size);

#endif
