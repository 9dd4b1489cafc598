/* Where in a reply the fields are: the shapes of replies are told apart by their members. */
#include <string.h>

#include "reply.h"
#include "value.h"

const char *const rst_reply_fields[FIELD_COUNT] = {
    [FIELD_TOKENS] = "output_token_logprobs",
    [FIELD_IDX_B64] = "output_top_logprobs_idx_flat_b64",
    [FIELD_VAL_B64] = "output_top_logprobs_val_flat_b64",
    [FIELD_IDX_B64_DTYPE] = "output_top_logprobs_idx_flat_b64_dtype",
    [FIELD_VAL_B64_DTYPE] = "output_top_logprobs_val_flat_b64_dtype",
    [FIELD_IDX_PLAIN] = "output_top_logprobs_idx_flat",
    [FIELD_VAL_PLAIN] = "output_top_logprobs_val_flat",
    [FIELD_SHAPE] = "output_top_logprobs_shape",
    [FIELD_NULL_PREFIX] = "output_top_logprobs_null_prefix",
    [FIELD_NESTED] = "output_top_logprobs",
    [FIELD_MASK] = "output_token_sampling_mask",
    [FIELD_MASK_LOGPROBS] = "output_token_sampling_logprobs",
    [FIELD_SCALED] = "output_top_logprobs_temperature_scaled",
    [FIELD_WEIGHT_VERSION] = "weight_version",
    [FIELD_FINISH_REASON] = "finish_reason",
};

/* What the engine says about why there is no reply; NONE when it says nothing. */
static rst_json_node engine_message(const reading *r)
{
    static const char *const names[] = {"message", "error", "detail"};
    rst_json_node found[3];
    rst_json_members(r->json, r->top, names, 3, found);
    if (found[1] != RST_JSON_NONE && rst_json_first(r->json, found[1]) == '{') {
        rst_json_members(r->json, found[1], names, 1, &found[1]);
    }
    for (size_t i = 0; i < 3; i++) {
        if (found[i] != RST_JSON_NONE && rst_json_first(r->json, found[i]) == '"') {
            return found[i];
        }
    }
    return RST_JSON_NONE;
}

/* Some of a text for a message: one line, and valid UTF-8. */
static void shorten(const char *text, size_t size, char *out, size_t out_size)
{
    static const char more[] = "...";
    size_t used = 0;
    size_t at = 0;
    while (at < size) {
        size_t length = rst_json_utf8_length(text + at, size - at);
        bool shown = length > 0 && (unsigned char)text[at] >= 0x20 && text[at] != 0x7F;
        length = length ? length : 1;
        if (used + length + sizeof more > out_size) {
            memcpy(out + used, more, sizeof more);
            return;
        }
        memcpy(out + used, shown ? text + at : " ", shown ? length : 1);
        used += shown ? length : 1;
        at += length;
    }
    out[used] = '\0';
}

static int no_meta_info(const reading *r)
{
    rst_json_node node = engine_message(r);
    const char *text;
    size_t size;
    if (node == RST_JSON_NONE ||
        rst_json_string(r->json, node, &r->reader->unescaped[0], &text, &size)) {
        return rst_fail(r->error, RST_ERR_MISSING, "meta_info",
                        "the reply has neither choices nor meta_info");
    }
    char shown[256];
    shorten(text, size, shown, sizeof shown);
    return rst_fail_at(r->error, RST_ERR_MISSING, "meta_info",
                       (int64_t)rst_json_offset(r->json, node),
                       "the engine answered with an error: %s", shown);
}

enum { CHOICE_INDEX, CHOICE_META_INFO, CHOICE_FINISH_REASON, CHOICE_COUNT };
static const char *const choice_names[CHOICE_COUNT] = {"index", "meta_info", "finish_reason"};

/* The choice whose index is the one asked for; of choices without an index, by their order. */
static int find_choice(reading *r, rst_json_node choices, rst_json_node *meta)
{
    rst_json_node by_index = RST_JSON_NONE;
    rst_json_node by_order = RST_JSON_NONE;
    bool indexed = false;
    uint32_t order = 0;
    for (rst_json_node node = rst_json_begin(r->json, choices); node != RST_JSON_NONE;
         node = rst_json_next(r->json, node), order++) {
        if (rst_json_first(r->json, node) != '{') {
            return rst_reply_wrong_type(r, "choices", node, "an object");
        }
        rst_json_node index;
        rst_json_members(r->json, node, choice_names, 1, &index);
        int64_t value = -1;
        if (index != RST_JSON_NONE && rst_json_int64(r->json, index, &value)) {
            return rst_reply_wrong_type(r, "choices", index, "an index");
        }
        indexed = indexed || index != RST_JSON_NONE;
        if (value == r->options->choice && by_index == RST_JSON_NONE) {
            by_index = node;
        }
        if (order == r->options->choice) {
            by_order = node;
        }
    }
    r->choice = indexed ? by_index : by_order;
    if (r->choice == RST_JSON_NONE) {
        return rst_fail_at(
            r->error, RST_ERR_MISSING, "choices", (int64_t)rst_json_offset(r->json, choices),
            "the reply has %u choices, and choice %u is not among them", order, r->options->choice);
    }
    rst_json_node found[CHOICE_COUNT];
    rst_json_members(r->json, r->choice, choice_names, CHOICE_COUNT, found);
    *meta = found[CHOICE_META_INFO];
    return *meta != RST_JSON_NONE
               ? RST_OK
               : rst_fail_at(r->error, RST_ERR_MISSING, "meta_info",
                             (int64_t)rst_json_offset(r->json, r->choice),
                             "choice %u has no meta_info: the request must ask for it with "
                             "return_meta_info",
                             r->options->choice);
}

static int find_meta_info(reading *r, rst_json_node *meta)
{
    static const char *const names[] = {"choices", "meta_info"};
    rst_json_node found[2];
    if (rst_json_first(r->json, r->top) != '{') {
        return rst_fail_at(r->error, RST_ERR_TYPE, NULL, (int64_t)rst_json_offset(r->json, r->top),
                           "the reply is %s, not an object", rst_json_kind(r->json, r->top));
    }
    rst_json_members(r->json, r->top, names, 2, found);
    if (found[0] != RST_JSON_NONE) {
        return rst_json_first(r->json, found[0]) == '['
                   ? find_choice(r, found[0], meta)
                   : rst_reply_wrong_type(r, "choices", found[0], "an array");
    }
    if (found[1] == RST_JSON_NONE) {
        return no_meta_info(r);
    }
    *meta = found[1];
    return r->options->choice == 0
               ? RST_OK
               : rst_fail(r->error, RST_ERR_MISSING, "choices",
                          "the reply has one choice, and choice %u is not among them",
                          r->options->choice);
}

int rst_reply_find_fields(reading *r)
{
    rst_json_node meta = RST_JSON_NONE;
    int code = find_meta_info(r, &meta);
    if (code) {
        return code;
    }
    if (rst_json_first(r->json, meta) != '{') {
        return rst_reply_wrong_type(r, "meta_info", meta, "an object");
    }
    rst_json_members(r->json, meta, rst_reply_fields, FIELD_COUNT, r->fields);
    return RST_OK;
}
