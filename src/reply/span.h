/* Where a value's text begins and ends; ids of a list.  Internal. */
#ifndef RST_SRC_REPLY_SPAN_H
#define RST_SRC_REPLY_SPAN_H

#include "json.h"

typedef struct rst_json_span {
    size_t begin;
    size_t end;
} rst_json_span;

/* The text of a value or key, without blanks around it.  Not for a root that is no object or array:
 * nothing follows it. */
static inline rst_json_span rst_json_span_of(const rst_json *json, rst_json_node node)
{
    char first = rst_json_first(json, node);
    size_t begin = rst_json_offset(json, node);
    if (first == '{' || first == '[') {
        return (rst_json_span){begin, rst_json_offset(json, json->ends[node]) + 1};
    }
    size_t end = rst_json_offset(json, node + 1);
    while ((unsigned char)json->text[end - 1] <= ' ') { /* blanks: a value ends with none */
        end--;
    }
    return (rst_json_span){begin, end};
}

/* An array of token ids, malloc'd. */
int rst_json_read_ids(const rst_json *json, rst_json_node node, const char *field, int32_t **ids,
                      size_t *count, rst_error *error);

#endif
