/* A turn as an engine would have replied it. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <rollstore/record.h>

#include "../base64/base64.h"
#include "../error.h"
#include "../layout/record.h"
#include "json.h"

/* ---------------------------------------------------------------- writing */

/* A growing text.  Once it cannot grow, writing does nothing. */
typedef struct writer {
    char *text;
    size_t size;
    size_t capacity;
    bool failed;
} writer;

/* Room for `size` more bytes, or NULL. */
static char *room(writer *w, size_t size)
{
    if (w->failed) {
        return NULL;
    }
    if (w->capacity - w->size < size) {
        size_t capacity = w->size + size + w->size / 2 + 256;
        char *text = realloc(w->text, capacity);
        if (!text) {
            w->failed = true;
            return NULL;
        }
        w->text = text;
        w->capacity = capacity;
    }
    return w->text + w->size;
}

static void put(writer *w, const char *text)
{
    size_t size = strlen(text);
    char *out = room(w, size);
    if (out) {
        memcpy(out, text, size);
        w->size += size;
    }
}

static void put_integer(writer *w, int64_t value)
{
    char text[24];
    snprintf(text, sizeof text, "%lld", (long long)value);
    put(w, text);
}

/* JSON has no infinity, but numbers too large for a double, which readers take as one. */
static void put_logprob(writer *w, float value)
{
    if (isinf(value)) {
        put(w, value < 0 ? "-1e999" : "1e999");
        return;
    }
    char *out = room(w, RST_JSON_DOUBLE_SIZE);
    if (out) {
        w->size += rst_json_write_double((double)value, out);
    }
}

/* The text is valid UTF-8. */
static void put_string(writer *w, const char *text, size_t size)
{
    put(w, "\"");
    for (size_t i = 0; i < size; i++) {
        unsigned char c = (unsigned char)text[i];
        char escape[8] = {text[i], '\0'};
        if (c < 0x20) {
            snprintf(escape, sizeof escape, "\\u%04x", c);
        } else if (c == '"' || c == '\\') {
            snprintf(escape, sizeof escape, "\\%c", c);
        }
        char *out = room(w, sizeof escape);
        if (out) {
            size_t length = strlen(escape);
            memcpy(out, escape, length);
            w->size += length;
        }
    }
    put(w, "\"");
}

static void put_base64(writer *w, const void *bytes, size_t size)
{
    size_t text_size = rst_base64_encoded_size(size);
    put(w, "\"");
    char *out = room(w, text_size);
    if (out && size > 0) {
        rst_base64_encode(bytes, size, out);
        w->size += text_size;
    }
    put(w, "\"");
}

/* ---------------------------------------------------------------- candidates */

static bool is_unused(const rst_turn *turn, size_t slot)
{
    return turn->topk_ids[slot] == -1 && isinf(turn->topk_logprobs[slot]);
}

/* Slots of the row up to the last used one. */
static uint32_t width_of(const rst_turn *turn, uint32_t row)
{
    uint32_t width = turn->topk;
    while (width > 0 && is_unused(turn, (size_t)row * turn->topk + width - 1)) {
        width--;
    }
    return width;
}

static void put_flat(writer *w, const rst_turn *turn)
{
    uint32_t prefix = 0;
    while (turn->topk > 0 && prefix < turn->token_count && width_of(turn, prefix) == 0) {
        prefix++;
    }
    size_t first = (size_t)prefix * turn->topk;
    size_t size = 4 * ((size_t)turn->token_count * turn->topk - first);
    put(w, ",\"output_top_logprobs_val_flat_b64\":");
    put_base64(w, size ? turn->topk_logprobs + first : NULL, size);
    put(w, ",\"output_top_logprobs_idx_flat_b64\":");
    put_base64(w, size ? turn->topk_ids + first : NULL, size);
    put(w, ",\"output_top_logprobs_val_flat_b64_dtype\":\"float32\"");
    put(w, ",\"output_top_logprobs_idx_flat_b64_dtype\":\"int32\"");
    put(w, ",\"output_top_logprobs_shape\":[");
    put_integer(w, turn->token_count - prefix);
    put(w, ",");
    put_integer(w, turn->topk);
    put(w, "],\"output_top_logprobs_null_prefix\":");
    put_integer(w, prefix);
}

static void put_rows(writer *w, const rst_turn *turn, bool ids)
{
    for (uint32_t row = 0; row < turn->token_count; row++) {
        uint32_t width = width_of(turn, row);
        put(w, row ? ",[" : "[");
        for (uint32_t j = 0; j < width; j++) {
            size_t slot = (size_t)row * turn->topk + j;
            put(w, j ? "," : "");
            if (ids) {
                put_integer(w, turn->topk_ids[slot]);
            } else {
                put_logprob(w, turn->topk_logprobs[slot]);
            }
        }
        put(w, "]");
    }
}

static void put_support(writer *w, const rst_turn *turn)
{
    put(w, ",\"output_token_sampling_mask\":[");
    put_rows(w, turn, true);
    put(w, "],\"output_token_sampling_logprobs\":[");
    put_rows(w, turn, false);
    put(w, "]");
}

/* ---------------------------------------------------------------- the reply */

static void put_tokens(writer *w, const rst_turn *turn)
{
    put(w, "\"output_token_logprobs\":[");
    for (uint32_t i = 0; i < turn->token_count; i++) {
        put(w, i ? ",[" : "[");
        put_logprob(w, turn->token_logprobs[i]);
        put(w, ",");
        put_integer(w, turn->token_ids[i]);
        put(w, ",null]");
    }
    put(w, "]");
}

static void put_finish_reason(writer *w, const rst_turn *turn)
{
    static const char *const texts[] = {
        [RST_FINISH_NONE] = "null",
        [RST_FINISH_STOP] = "\"stop\"",
        [RST_FINISH_LENGTH] = "\"length\"",
        [RST_FINISH_ABORT] = "\"abort\"",
        [RST_FINISH_TOOL_CALLS] = "\"tool_calls\"",
    };
    if (turn->finish == RST_FINISH_OTHER) {
        put_string(w, turn->finish_reason, turn->finish_reason_size);
    } else {
        put(w, texts[turn->finish]);
    }
}

static void put_meta_info(writer *w, const rst_turn *turn)
{
    put(w, "\"meta_info\":{\"completion_tokens\":");
    put_integer(w, turn->token_count);
    if (turn->weight_version_size) {
        put(w, ",\"weight_version\":");
        put_string(w, turn->weight_version, turn->weight_version_size);
    }
    put(w, ",");
    put_tokens(w, turn);
    if (turn->mode == RST_MODE_SUPPORT) {
        put_support(w, turn);
    } else {
        put_flat(w, turn);
    }
    if (turn->temperature_scaled != RST_SCALED_NOT_SAID) {
        put(w, ",\"output_top_logprobs_temperature_scaled\":");
        put(w, turn->temperature_scaled == RST_SCALED_YES ? "true" : "false");
    }
    put(w, "}");
}

static bool is_utf8(const char *text, size_t size)
{
    for (size_t at = 0; at < size;) {
        size_t length = rst_json_utf8_length(text + at, size - at);
        if (length == 0) {
            return false;
        }
        at += length;
    }
    return true;
}

/* Only what a reply may hold can be written as one. */
static int check_turn(const rst_turn *turn, rst_error *error)
{
    bool tokens = turn->token_count == 0 || (turn->token_ids && turn->token_logprobs);
    bool candidates =
        turn->token_count == 0 || turn->topk == 0 || (turn->topk_ids && turn->topk_logprobs);
    if (!tokens || !candidates) {
        return rst_fail(error, RST_ERR_ARGUMENT, tokens ? "topk_ids" : "token_ids",
                        "%u tokens, but an array of them is NULL", turn->token_count);
    }
    if (turn->token_count > RST_TOKEN_COUNT_MAX || turn->topk > RST_TOPK_MAX) {
        return rst_fail(error, RST_ERR_LIMIT, NULL, "%u tokens of %u candidates, at most %u and %u",
                        turn->token_count, turn->topk, RST_TOKEN_COUNT_MAX, RST_TOPK_MAX);
    }
    if ((int)turn->finish < RST_FINISH_NONE || turn->finish > RST_FINISH_OTHER) {
        return rst_fail(error, RST_ERR_ARGUMENT, "finish", "finish %d is none", (int)turn->finish);
    }
    if (!is_utf8(turn->weight_version, turn->weight_version_size) ||
        !is_utf8(turn->finish_reason, turn->finish_reason_size)) {
        return rst_fail(error, RST_ERR_VALUE, "weight_version",
                        "weight_version or finish_reason is not UTF-8");
    }
    rst_bad_value bad;
    if (!rst_check_values(turn, NULL, NULL, &bad)) {
        return rst_fail(error, RST_ERR_VALUE, rst_bad_array_name(&bad), "%s[%llu]: %s",
                        rst_bad_array_name(&bad), (unsigned long long)bad.index, bad.reason);
    }
    return RST_OK;
}

int rst_turn_to_reply(const rst_turn *turn, char **reply, size_t *size, rst_error *error)
{
    rst_error_clear(error);
    *reply = NULL;
    *size = 0;
    int code = check_turn(turn, error);
    if (code) {
        return code;
    }
    writer w = {0};
    put(&w, "{\"object\":\"chat.completion\",\"choices\":[{\"index\":0,"
            "\"message\":{\"role\":\"assistant\",\"content\":null},\"finish_reason\":");
    put_finish_reason(&w, turn);
    put(&w, ",");
    put_meta_info(&w, turn);
    put(&w, "}]}");
    char *end = room(&w, 1);
    if (!end) {
        free(w.text);
        return rst_fail(error, RST_ERR_MEMORY, NULL, "no memory to write a reply of %u tokens",
                        turn->token_count);
    }
    *end = '\0';
    *reply = w.text;
    *size = w.size;
    return RST_OK;
}
