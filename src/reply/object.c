/* JSON texts that are no replies: a request's members, a list of token ids. */
#include <stdlib.h>

#include <rollstore/proxy.h>

#include "../error.h"
#include "json.h"
#include "span.h"
#include "value.h"

/* A text read once, with memory of its own. */
static int read_once(const void *text, size_t size, rst_json_use *use, void *context,
                     rst_error *error)
{
    rst_error_clear(error);
    if (size > RST_REPLY_SIZE_MAX) {
        return rst_fail(error, RST_ERR_LIMIT, NULL, "a text of %zu bytes, at most %u", size,
                        RST_REPLY_SIZE_MAX);
    }
    rst_json_reader reader = {0};
    int code = rst_json_with(&reader, text, size, use, context, error);
    rst_json_reader_free(&reader);
    return code;
}

/* ---------------------------------------------------------------- members */

typedef struct object_call {
    const char *text;
    rst_member *members;
    size_t count;
} object_call;

static int list_members(void *context, const rst_json *json, rst_json_node root, rst_error *error)
{
    object_call *call = context;
    call->count = 0;
    if (json->text != call->text) {
        /* An attempt without long strings, whose places are not the text's own. */
        return RST_ERR_ARGUMENT;
    }
    if (rst_json_first(json, root) != '{') {
        return rst_fail_at(error, RST_ERR_TYPE, NULL, (int64_t)rst_json_offset(json, root),
                           "the text is %s, not an object", rst_json_kind(json, root));
    }
    rst_json_node key = rst_json_begin(json, root);
    while (key != RST_JSON_NONE) {
        if (call->count == RST_MEMBER_COUNT_MAX) {
            return rst_fail(error, RST_ERR_LIMIT, NULL, "an object of over %d members",
                            RST_MEMBER_COUNT_MAX);
        }
        rst_json_node value = rst_json_value(key);
        rst_json_span name = rst_json_span_of(json, key);
        rst_json_span content = rst_json_span_of(json, value);
        call->members[call->count++] = (rst_member){.name = json->text + name.begin,
                                                    .name_size = name.end - name.begin,
                                                    .value = json->text + content.begin,
                                                    .value_size = content.end - content.begin};
        key = rst_json_next(json, value);
    }
    return RST_OK;
}

int rst_json_object(const void *text, size_t size, rst_member *members, size_t *count,
                    rst_error *error)
{
    object_call call = {.text = text, .members = members};
    int code = read_once(text, size, list_members, &call, error);
    *count = code ? 0 : call.count;
    return code;
}

/* ---------------------------------------------------------------- token ids */

int rst_json_read_ids(const rst_json *json, rst_json_node node, const char *field, int32_t **ids,
                      size_t *count, rst_error *error)
{
    if (rst_json_first(json, node) != '[') {
        return rst_fail_at(error, RST_ERR_TYPE, field, (int64_t)rst_json_offset(json, node),
                           "%s is %s, not an array", field, rst_json_kind(json, node));
    }
    uint32_t wanted = rst_json_count(json, node);
    if (wanted > RST_TOKEN_COUNT_MAX) {
        return rst_fail(error, RST_ERR_LIMIT, field, "%u token ids, at most %u", wanted,
                        RST_TOKEN_COUNT_MAX);
    }
    int32_t *found = malloc((wanted ? wanted : 1) * sizeof *found);
    if (!found) {
        return rst_fail(error, RST_ERR_MEMORY, field, "no memory for %u token ids", wanted);
    }
    size_t at = 0;
    for (rst_json_node item = rst_json_begin(json, node); item != RST_JSON_NONE;
         item = rst_json_next(json, item), at++) {
        int64_t value = 0;
        rst_json_number kind = rst_json_int64(json, item, &value);
        bool integer = kind == RST_JSON_NUMBER_FINE || kind == RST_JSON_OUT_OF_RANGE;
        if (kind != RST_JSON_NUMBER_FINE || value < 0 || value > INT32_MAX) {
            free(found);
            return rst_fail_at(error, integer ? RST_ERR_VALUE : RST_ERR_TYPE, field,
                               (int64_t)rst_json_offset(json, item), "%s, token %zu: %s", field, at,
                               integer ? "a token id below 0 or over 2^31-1"
                                       : "a token id is not an integer");
        }
        found[at] = (int32_t)value;
    }
    *ids = found;
    *count = wanted;
    return RST_OK;
}

typedef struct ids_call {
    int32_t *ids;
    size_t count;
} ids_call;

static int read_ids(void *context, const rst_json *json, rst_json_node root, rst_error *error)
{
    ids_call *call = context;
    free(call->ids);
    call->ids = NULL;
    return rst_json_read_ids(json, root, "input_ids", &call->ids, &call->count, error);
}

int rst_json_token_ids(const void *text, size_t size, int32_t **ids, size_t *count,
                       rst_error *error)
{
    ids_call call = {0};
    int code = read_once(text, size, read_ids, &call, error);
    if (code) {
        free(call.ids);
        call = (ids_call){0};
    }
    *ids = call.ids;
    *count = call.count;
    return code;
}
