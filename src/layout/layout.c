/* Where a record's arrays stand, and how one is looked at. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "../error.h"
#include "record.h"
#include "simd.h"

uint64_t rst_align(uint64_t offset)
{
    return (offset + RST_VALUE_OFFSET + RST_ALIGNMENT - 1) / RST_ALIGNMENT * RST_ALIGNMENT -
           RST_VALUE_OFFSET;
}

uint64_t rst_hash(const void *bytes, size_t size)
{
    return rst_simd_active()->hash(bytes, size);
}

bool rst_offsets_of(const rst_record_header *header, rst_offsets *offsets)
{
    if (header->token_count > RST_TOKEN_COUNT_MAX || header->topk > RST_TOPK_MAX ||
        header->prompt_count > RST_TOKEN_COUNT_MAX ||
        header->weight_version_size > RST_TEXT_SIZE_MAX ||
        header->finish_reason_size > RST_TEXT_SIZE_MAX) {
        return false;
    }
    /* The limits keep every product below under 2^44: nothing can overflow. */
    uint64_t token_size = UINT64_C(4) * header->token_count;
    uint64_t topk_size = token_size * header->topk;
    offsets->token_ids = sizeof *header;
    offsets->token_logprobs = rst_align(offsets->token_ids + token_size);
    offsets->topk_ids = rst_align(offsets->token_logprobs + token_size);
    offsets->topk_logprobs = rst_align(offsets->topk_ids + topk_size);
    offsets->widths = rst_align(offsets->topk_logprobs + topk_size);
    bool ragged = header->flags & RST_RECORD_RAGGED;
    offsets->prompt_ids = ragged ? rst_align(offsets->widths + token_size) : offsets->widths;
    offsets->text = rst_align(offsets->prompt_ids + UINT64_C(4) * header->prompt_count);
    offsets->end = offsets->text + header->weight_version_size + header->finish_reason_size;
    return offsets->end <= RST_RECORD_SIZE_MAX;
}

static int corrupt(rst_error *error, const char *field, const char *what)
{
    return rst_fail(error, RST_ERR_CORRUPT, field, "record: %s: %s", field, what);
}

static int check_header(const rst_record_header *h, size_t size, rst_error *error)
{
    static const uint8_t zero[sizeof h->reserved];
    if (h->magic != RST_RECORD_MAGIC) {
        return corrupt(error, "magic", "not a record of a turn");
    }
    if (h->version == 0 || h->version > RST_FORMAT_VERSION) {
        return rst_fail(error, RST_ERR_VERSION, "version",
                        "record: version %u, this library knows up to %d", h->version,
                        RST_FORMAT_VERSION);
    }
    if (h->header_size != sizeof *h) {
        return corrupt(error, "header_size", "not 112");
    }
    if (h->flags & ~RST_RECORD_FLAGS) {
        return corrupt(error, "flags", "unknown bits");
    }
    if (memcmp(h->reserved, zero, sizeof zero) != 0) {
        return corrupt(error, "reserved", "not zero");
    }
    if (h->mode > RST_MODE_SUPPORT) {
        return corrupt(error, "mode", "no value of its list");
    }
    if (h->finish > RST_FINISH_OTHER) {
        return corrupt(error, "finish", "no value of its list");
    }
    if (h->finish_reason_size > 0 && h->finish != RST_FINISH_OTHER) {
        return corrupt(error, "finish_reason_size", "a text where finish says it all");
    }
    if (h->temperature_scaled > RST_SCALED_YES) {
        return corrupt(error, "temperature_scaled", "no value of its list");
    }
    if (h->null_prefix > h->token_count) {
        return corrupt(error, "null_prefix", "more than there are tokens");
    }
    rst_offsets offsets;
    if (!rst_offsets_of(h, &offsets)) {
        return corrupt(error, "token_count", "counts are over the limits of the format");
    }
    if (h->record_size != offsets.end) {
        return corrupt(error, "record_size", "not what the counts give");
    }
    if (h->record_size > size) {
        return corrupt(error, "record_size", "more than the value holds");
    }
    return RST_OK;
}

int rst_record_open(const void *value, size_t size, rst_turn *turn, rst_error *error)
{
    const unsigned char *bytes = value;
    const rst_record_header *h = value;
    if (size < sizeof *h) {
        return corrupt(error, "record_size", "the value is shorter than a header");
    }
    int code = check_header(h, size, error);
    if (code) {
        return code;
    }
    rst_offsets o;
    rst_offsets_of(h, &o);
    *turn = (rst_turn){
        .turn = h->turn,
        .token_count = h->token_count,
        .topk = h->topk,
        .null_prefix = h->null_prefix,
        .token_ids = (const int32_t *)(bytes + o.token_ids),
        .token_logprobs = (const float *)(bytes + o.token_logprobs),
        .topk_ids = (const int32_t *)(bytes + o.topk_ids),
        .topk_logprobs = (const float *)(bytes + o.topk_logprobs),
        .widths = h->flags & RST_RECORD_RAGGED ? (const int32_t *)(bytes + o.widths) : NULL,
        .prompt_ids = (const int32_t *)(bytes + o.prompt_ids),
        .prompt_count = h->prompt_count,
        .prefix_count = h->prefix_count,
        .trimmed_count = h->trimmed_count,
        .temperature = h->temperature,
        .mode = (rst_mode)h->mode,
        .finish = (rst_finish)h->finish,
        .temperature_scaled = (rst_scaled)h->temperature_scaled,
        .weight_version_size = h->weight_version_size,
        .finish_reason_size = h->finish_reason_size,
        .weight_version = h->weight_version_size ? (const char *)bytes + o.text : NULL,
        .finish_reason =
            h->finish_reason_size ? (const char *)bytes + o.text + h->weight_version_size : NULL,
        .weight_version_number = h->weight_version_number,
    };
    return RST_OK;
}

int64_t rst_decimal_version(const char *text, size_t size)
{
    int64_t number = 0;
    /* 18 digits cannot overflow 63 bits; "007" is no number of ours, since it would not read back.
     */
    if (size == 0 || size > 18 || (text[0] == '0' && size > 1)) {
        return RST_NO_VERSION;
    }
    for (size_t i = 0; i < size; i++) {
        if (text[i] < '0' || text[i] > '9') {
            return RST_NO_VERSION;
        }
        number = number * 10 + (text[i] - '0');
    }
    return number;
}

/* The gaps between the arrays, which the format wants zero. */
static bool gaps_are_zero(const unsigned char *bytes, const rst_record_header *h,
                          const rst_offsets *o)
{
    uint64_t token_size = UINT64_C(4) * h->token_count;
    uint64_t topk_size = token_size * h->topk;
    bool ragged = h->flags & RST_RECORD_RAGGED;
    const uint64_t ends[][2] = {
        {o->token_ids + token_size, o->token_logprobs},
        {o->token_logprobs + token_size, o->topk_ids},
        {o->topk_ids + topk_size, o->topk_logprobs},
        {o->topk_logprobs + topk_size, o->widths},
        {o->widths + (ragged ? token_size : 0), o->prompt_ids},
        {o->prompt_ids + UINT64_C(4) * h->prompt_count, o->text},
    };
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        for (uint64_t at = ends[i][0]; at < ends[i][1]; at++) {
            if (bytes[at]) {
                return false;
            }
        }
    }
    return true;
}

static bool widths_agree(const rst_turn *turn, const rst_record_header *h, uint64_t *bad_row)
{
    uint32_t leading = 0;
    bool ragged = false;
    for (uint64_t row = 0; row < turn->token_count; row++) {
        const int32_t *ids = turn->topk_ids + row * turn->topk;
        uint32_t width = turn->topk;
        while (width > 0 && ids[width - 1] == -1) {
            width--;
        }
        int32_t said = turn->widths ? turn->widths[row] : (int32_t)turn->topk;
        if (said != (int32_t)width) {
            *bad_row = row;
            return false;
        }
        leading += width == 0 && leading == row;
        ragged |= width != turn->topk;
    }
    *bad_row = leading;
    return ragged == (turn->widths != NULL) && leading == h->null_prefix;
}

bool rst_temperature_possible(float temperature)
{
    return isnan(temperature) || (temperature >= 0 && temperature <= FLT_MAX);
}

int rst_check_turn(const rst_turn *turn, const rst_record_header *h, rst_error *error)
{
    rst_bad_value bad;
    if (!rst_check_values(turn, NULL, NULL, &bad)) {
        return rst_fail(error, RST_ERR_CORRUPT, rst_bad_array_name(&bad), "record: %s[%llu]: %s",
                        rst_bad_array_name(&bad), (unsigned long long)bad.index, bad.reason);
    }
    uint64_t row;
    if (!widths_agree(turn, h, &row)) {
        return rst_fail(error, RST_ERR_CORRUPT, "widths",
                        "record: widths or null_prefix do not fit topk_ids at row %llu",
                        (unsigned long long)row);
    }
    for (uint32_t i = 0; i < turn->prompt_count; i++) {
        if (turn->prompt_ids[i] < 0) {
            return rst_fail(error, RST_ERR_CORRUPT, "prompt_ids",
                            "record: prompt_ids[%u]: an id below 0", i);
        }
    }
    if (!rst_temperature_possible(turn->temperature)) {
        return corrupt(error, "temperature", "neither NaN nor finite and at least 0");
    }
    if (h->weight_version_number !=
        rst_decimal_version(turn->weight_version, turn->weight_version_size)) {
        return corrupt(error, "weight_version_number", "not the number that weight_version says");
    }
    return RST_OK;
}

int rst_record_check(const void *value, size_t size, const uint8_t *key, uint32_t turn_number,
                     rst_error *error)
{
    rst_error_clear(error);
    rst_turn turn;
    int code = rst_record_open(value, size, &turn, error);
    if (code) {
        return code;
    }
    const unsigned char *bytes = value;
    const rst_record_header *h = value;
    if (key && memcmp(h->session_key, key, RST_KEY_SIZE) != 0) {
        return corrupt(error, "session_key", "not the session it is stored under");
    }
    if (key && h->turn != turn_number) {
        return corrupt(error, "turn", "not the turn it is stored under");
    }
    size_t from = offsetof(rst_record_header, record_size);
    if (rst_hash(bytes + from, h->record_size - from) != h->checksum) {
        return corrupt(error, "checksum", "the bytes have changed since they were written");
    }
    for (size_t at = h->record_size; at < size; at++) {
        if (bytes[at]) {
            return corrupt(error, "record_size", "bytes after the record are not zero");
        }
    }
    rst_offsets o;
    rst_offsets_of(h, &o);
    if (!gaps_are_zero(bytes, h, &o)) {
        return corrupt(error, "reserved", "a gap between arrays is not zero");
    }
    return rst_check_turn(&turn, h, error);
}
