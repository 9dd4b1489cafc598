/* The forms of candidates with a list for each token: nested, and the support of a filtered
 * distribution. */
#include "reply.h"

/* ---------------------------------------------------------------- rows */

/* The field has one row a token. */
static int need_rows(const reading *r, reply_field field)
{
    if (!rst_reply_has(r, field)) {
        return r->n == 0 ? RST_OK : rst_reply_missing(r, field);
    }
    int code = rst_reply_need_array(r, field);
    if (code) {
        return code;
    }
    uint32_t count = rst_json_count(r->json, r->fields[field]);
    return count == r->n
               ? RST_OK
               : rst_fail_at(r->error, RST_ERR_SHAPE, rst_reply_fields[field],
                             (int64_t)rst_json_offset(r->json, r->fields[field]),
                             "%s has %u rows, for %u tokens", rst_reply_fields[field], count, r->n);
}

static int bad_row(const reading *r, int code, reply_field field, rst_json_node node, uint32_t row,
                   const char *what)
{
    return rst_fail_at(r->error, code, rst_reply_fields[field],
                       (int64_t)rst_json_offset(r->json, node), "%s, token %u: %s",
                       rst_reply_fields[field], row, what);
}

static int too_wide(const reading *r, reply_field field, rst_json_node node, uint32_t row,
                    uint32_t width)
{
    return rst_fail_at(
        r->error, RST_ERR_SHAPE, rst_reply_fields[field], (int64_t)rst_json_offset(r->json, node),
        "%s, token %u: a row of %u candidates, a token has room for %u", rst_reply_fields[field],
        row, width, r->options->topk ? r->options->topk : RST_TOPK_MAX);
}

/* Check the rows of a field and find k: what was asked for, or the widest row.  Where the field may
 * have null rows, these count as empty. */
static int measure_rows(reading *r, reply_field field, bool null_allowed)
{
    uint32_t room = r->options->topk ? r->options->topk : RST_TOPK_MAX;
    uint32_t widest = 0;
    int code = need_rows(r, field);
    rst_json_node node =
        code || r->n == 0 ? RST_JSON_NONE : rst_json_begin(r->json, r->fields[field]);
    for (uint32_t row = 0; node != RST_JSON_NONE; row++, node = rst_json_next(r->json, node)) {
        char first = rst_json_first(r->json, node);
        if (first == 'n' && null_allowed) {
            continue;
        }
        if (first != '[') {
            return bad_row(r, RST_ERR_TYPE, field, node, row, "a row is not a list");
        }
        uint32_t width = rst_json_count(r->json, node);
        if (width > room) {
            return too_wide(r, field, node, row, width);
        }
        widest = width > widest ? width : widest;
    }
    r->k = r->options->topk ? r->options->topk : widest;
    return code;
}

/* ---------------------------------------------------------------- nested */

static int measure_nested(reading *r)
{
    return measure_rows(r, FIELD_NESTED, true);
}

static int fill_nested_row(reading *r, rst_json_node list, uint32_t row)
{
    size_t slot = (size_t)row * r->k;
    size_t end = slot + r->k;
    rst_json_node node =
        rst_json_first(r->json, list) == 'n' ? RST_JSON_NONE : rst_json_begin(r->json, list);
    for (uint32_t j = 0; node != RST_JSON_NONE; j++, slot++, node = rst_json_next(r->json, node)) {
        int code = rst_reply_read_entry(r, FIELD_NESTED, node, row, j, &r->slots.topk_ids[slot],
                                        &r->slots.topk_logprobs[slot]);
        if (code) {
            return code;
        }
    }
    rst_reply_fill_unused(r, slot, end);
    return RST_OK;
}

static int fill_nested(reading *r)
{
    if (r->n == 0) {
        return RST_OK;
    }
    rst_json_node list = rst_json_begin(r->json, r->fields[FIELD_NESTED]);
    int code = RST_OK;
    for (uint32_t row = 0; row < r->n && !code; row++) {
        code = fill_nested_row(r, list, row);
        list = rst_json_next(r->json, list);
    }
    return code;
}

static reply_spot find_nested(const reading *r, uint32_t row, uint32_t slot, bool is_id)
{
    rst_json_node list = rst_json_element(r->json, r->fields[FIELD_NESTED], row);
    rst_json_node entry = rst_json_element(r->json, list, slot);
    rst_json_node node = rst_json_element(r->json, entry, is_id ? 1 : 0);
    return (reply_spot){.field = FIELD_NESTED, .offset = rst_json_offset(r->json, node)};
}

const reply_form rst_form_nested = {measure_nested, fill_nested, find_nested};

/* ---------------------------------------------------------------- support */

static int measure_support(reading *r)
{
    int code = measure_rows(r, FIELD_MASK, false);
    return code ? code : measure_rows(r, FIELD_MASK_LOGPROBS, false);
}

static int fill_support_row(reading *r, rst_json_node ids, rst_json_node logprobs, uint32_t row)
{
    size_t slot = (size_t)row * r->k;
    size_t end = slot + r->k;
    rst_json_node id = rst_json_begin(r->json, ids);
    rst_json_node logprob = rst_json_begin(r->json, logprobs);
    for (uint32_t j = 0; id != RST_JSON_NONE && logprob != RST_JSON_NONE; j++, slot++) {
        int code = rst_reply_read_id(r, FIELD_MASK, id, row, j, &r->slots.topk_ids[slot]);
        if (!code) {
            code = rst_reply_read_logprob(r, FIELD_MASK_LOGPROBS, logprob, row, j,
                                          &r->slots.topk_logprobs[slot]);
        }
        if (code) {
            return code;
        }
        id = rst_json_next(r->json, id);
        logprob = rst_json_next(r->json, logprob);
    }
    if (id != logprob) { /* not both at the end */
        return bad_row(r, RST_ERR_SHAPE, FIELD_MASK_LOGPROBS, logprobs, row,
                       "not as many logprobs as output_token_sampling_mask has ids");
    }
    rst_reply_fill_unused(r, slot, end);
    return RST_OK;
}

static int fill_support(reading *r)
{
    if (r->n == 0) {
        return RST_OK;
    }
    rst_json_node ids = rst_json_begin(r->json, r->fields[FIELD_MASK]);
    rst_json_node logprobs = rst_json_begin(r->json, r->fields[FIELD_MASK_LOGPROBS]);
    int code = RST_OK;
    for (uint32_t row = 0; row < r->n && !code; row++) {
        code = fill_support_row(r, ids, logprobs, row);
        ids = rst_json_next(r->json, ids);
        logprobs = rst_json_next(r->json, logprobs);
    }
    return code;
}

static reply_spot find_support(const reading *r, uint32_t row, uint32_t slot, bool is_id)
{
    reply_field field = is_id ? FIELD_MASK : FIELD_MASK_LOGPROBS;
    rst_json_node list = rst_json_element(r->json, r->fields[field], row);
    rst_json_node node = rst_json_element(r->json, list, slot);
    return (reply_spot){.field = field, .offset = rst_json_offset(r->json, node)};
}

const reply_form rst_form_support = {measure_support, fill_support, find_support};
