/* From a text to a valid document, and around in it. */
#include <stdlib.h>
#include <string.h>

#include <rollstore/record.h>

#include "../error.h"
#include "cut.h"
#include "json.h"
#include "lists.h"
#include "number.h"

bool rst_json_reserve(rst_json_buffer *buffer, size_t size)
{
    if (buffer->bytes && buffer->capacity >= size) {
        return true;
    }
    size_t capacity = size + size / 2 + 64;
    char *bytes = capacity > size ? malloc(capacity) : NULL;
    if (!bytes) {
        return false;
    }
    free(buffer->bytes);
    buffer->bytes = bytes;
    buffer->capacity = capacity;
    return true;
}

void rst_json_reader_free(rst_json_reader *reader)
{
    rst_json_index_free(reader->index);
    free(reader->ends.bytes);
    free(reader->shortened.bytes);
    free(reader->unescaped[0].bytes);
    free(reader->unescaped[1].bytes);
    free(reader->entries.bytes);
}

/* ---------------------------------------------------------------- the grammar */

typedef struct walk {
    const char *text;
    size_t size;
    const uint32_t *places;
    uint32_t *ends;
    uint64_t open[RST_JSON_DEPTH_MAX]; /* of the open brackets, twice the node, and 1 for a '[' */
    rst_json_cut *list;                /* the next list that was left out, NULL for none */
    const rst_json_cut *cuts_end;
    const char *fault;
    uint32_t fault_node;
} walk;

static bool fault_at(walk *w, uint32_t node, const char *fault)
{
    w->fault = fault;
    w->fault_node = node;
    return false;
}

static bool is_blank(char c)
{
    return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

/* Is a number or literal valid?  It must end where the next node begins, blanks aside: the index
 * has no place of its own for a '"' that follows it directly. */
static bool scalar_ends(const walk *w, size_t end, uint32_t next)
{
    size_t limit = w->places[next];
    while (end < limit && is_blank(w->text[end])) {
        end++;
    }
    return end == limit;
}

static bool literal(const walk *w, uint32_t node)
{
    size_t begin = w->places[node];
    size_t room = w->places[node + 1] - begin;
    const char *text = w->text + begin;
    if (room >= 4 && (!memcmp(text, "null", 4) || !memcmp(text, "true", 4))) {
        return scalar_ends(w, begin + 4, node + 1);
    }
    return room >= 5 && !memcmp(text, "false", 5) && scalar_ends(w, begin + 5, node + 1);
}

static bool unusual_number(const walk *w, uint32_t node)
{
    size_t end = rst_json_number_end(w->text, w->places[node], w->size);
    return end && scalar_ends(w, end, node + 1);
}

static inline __attribute__((always_inline)) bool number(const walk *w, uint32_t node)
{
    size_t begin = w->places[node];
    size_t size = w->places[node + 1] - begin;
    size_t room = w->size - begin;
    return rst_json_small_integer(w->text + begin, size, room) ||
           rst_json_small_fraction(w->text + begin, size, room) ||
           rst_json_usual_number(w->text + begin, size, room) || unusual_number(w, node);
}

static inline bool is_open(char c)
{
    return (c | 0x20) == '{'; /* '[' has that bit clear */
}

/* A value that begins with neither a bracket nor a '"'.  Where it begins like one, it is not the
 * last node, so that there is a next one. */
static inline __attribute__((always_inline)) bool scalar(const walk *w, uint32_t node, char first)
{
    bool named = first == 't' || first == 'f' || first == 'n';
    return rst_json_begins_number(first) ? number(w, node) : named && literal(w, node);
}

static rst_json_cut *next_list(rst_json_cut *cut, const rst_json_cut *end)
{
    while (cut != end && !cut->is_list) {
        cut++;
    }
    return cut == end ? NULL : cut;
}

/* An empty array stands at that place: it may be all that was left of a list. */
static void meet_list(walk *w, size_t place, uint32_t depth)
{
    if (w->list && w->list->place == place) {
        w->list->used = depth + RST_JSON_LIST_DEPTH <= RST_JSON_DEPTH_MAX;
        w->list = next_list(w->list + 1, w->cuts_end);
    }
}

/*
 * Check the whole grammar and note where brackets close.  The first node must open a bracket, the
 * last one (at count - 1) must close one, and one more place behind it must lead to the first node:
 * then a look one node ahead stays inside the text, and running past the last node meets a bracket
 * that cannot stand there.
 *
 * The states are labels: each has its own branches, which the processor learns one by one, and that
 * is most of this function's speed.
 */
static bool check_grammar(walk *w, uint32_t count)
{
    const char *text = w->text;
    const uint32_t *places = w->places;
    uint32_t depth = 0;
    uint32_t node = 0;
    char first = text[places[0]];

open:
    if (depth == RST_JSON_DEPTH_MAX) {
        return fault_at(w, node, "brackets are nested too deep");
    }
    w->open[depth++] = 2 * (uint64_t)node++ + (first == '[');
    if (first == '[') {
        goto first_element;
    }
    if (text[places[node]] == '}') {
        goto close;
    }

key:
    if (text[places[node]] != '"' || text[places[node + 1]] != ':') {
        return fault_at(w, node, "an object's key and ':' should stand here");
    }
    node += 2;
    first = text[places[node]];
    if (first != '"') {
        if (is_open(first)) {
            goto open;
        }
        if (!scalar(w, node, first)) {
            return fault_at(w, node, "no JSON value");
        }
    }
    node++;

member_end:
    if (text[places[node]] == ',') {
        node++;
        goto key;
    }
    if (text[places[node]] != '}') {
        return fault_at(w, node, "',' or '}' should stand here");
    }
    goto close;

first_element:
    first = text[places[node]];
    if (first == ']') {
        meet_list(w, places[node - 1], depth);
        goto close;
    }
    if (rst_json_is_digit(first)) {
        size_t begin = places[node];
        size_t end = rst_json_integer_list(text + begin, w->size - begin);
        if (end > 0) {
            for (node++; places[node] != begin + end; node += 2) {
            }
            goto close;
        }
    }

element:
    first = text[places[node]];
    if (first != '"') {
        if (is_open(first)) {
            goto open;
        }
        if (!scalar(w, node, first)) {
            return fault_at(w, node, "no JSON value");
        }
    }
    node++;

element_end:
    if (text[places[node]] == ',') {
        node++;
        goto element;
    }
    if (text[places[node]] != ']') {
        return fault_at(w, node, "',' or ']' should stand here");
    }

close:
    w->ends[w->open[--depth] / 2] = node++;
    if (depth == 0) {
        return node == count || fault_at(w, node, "bytes after the document's end");
    }
    if (w->open[depth - 1] % 2) {
        goto element_end;
    }
    goto member_end;
}

/* A whole text of one node: a string, whose end the index has found, a number or a literal. */
static bool is_scalar(const walk *w, uint32_t *places)
{
    places[1] = (uint32_t)w->size; /* where the next node would begin */
    char first = w->text[places[0]];
    return first == '"' || literal(w, 0) || number(w, 0);
}

/* ---------------------------------------------------------------- what is wrong */

static int syntax(rst_error *error, size_t offset, const char *what)
{
    return rst_fail_at(error, RST_ERR_SYNTAX, NULL, (int64_t)offset, "not JSON: %s", what);
}

/* simdjson's index says that there is a fault inside a string or in the UTF-8, not where. */
static int explain(const char *text, size_t size, rst_error *error)
{
    bool inside = false;
    size_t opened = 0;
    size_t at = 0;
    while (at < size) {
        size_t length = rst_json_utf8_length(text + at, size - at);
        if (length == 0) {
            return syntax(error, at, "invalid UTF-8");
        }
        unsigned char c = (unsigned char)text[at];
        if (inside && c < 0x20) {
            return syntax(error, at, "a control character in a string");
        }
        if (c == '"') {
            inside = !inside;
            opened = at;
        }
        bool escape = inside && c == '\\' && at + 1 < size && (unsigned char)text[at + 1] >= 0x20 &&
                      (unsigned char)text[at + 1] < 0x80;
        at += escape ? 2 : length;
    }
    if (inside) {
        return syntax(error, opened, "a string that does not end");
    }
    return syntax(error, 0, "no value at all");
}

static int explain_fault(const walk *w, uint32_t count, rst_error *error)
{
    if (w->fault_node >= count) {
        return syntax(error, w->size, "it ends with open brackets");
    }
    return syntax(error, w->places[w->fault_node], w->fault);
}

/* A text that is no object or array, or does not end like one. */
static int explain_frame(const char *text, const uint32_t *places, uint32_t count, rst_error *error)
{
    char first = text[places[0]];
    if (first == '{' || first == '[') {
        return syntax(error, places[count - 1],
                      "cut, or followed by other bytes: what stands last closes no bracket");
    }
    if (memcmp(text + places[0], RST_JSON_BYTE_ORDER_MARK, 1) == 0 &&
        memcmp(text + places[0], RST_JSON_BYTE_ORDER_MARK, 3) == 0) { /* valid UTF-8 */
        return syntax(error, places[0], "a byte order mark stands before it");
    }
    return syntax(error, places[0], "no JSON value");
}

/* ---------------------------------------------------------------- opening */

static int no_memory(rst_error *error, size_t size)
{
    return rst_fail(error, RST_ERR_MEMORY, NULL, "no memory to read a JSON text of %zu bytes",
                    size);
}

static int open_text(rst_json_reader *reader, rst_json *json, rst_error *error)
{
    uint32_t *places;
    uint32_t count;
    if (!reader->index && !(reader->index = rst_json_index_new())) {
        return no_memory(error, json->size);
    }
    switch (rst_json_index_fill(reader->index, json->text, json->size, &places, &count)) {
    case RST_JSON_FINE:
        break;
    case RST_JSON_NO_MEMORY:
        return no_memory(error, json->size);
    case RST_JSON_INVALID:
        return explain(json->text, json->size, error);
    }
    size_t bad = rst_json_bad_escape(json->text, json->size);
    if (bad < json->size) {
        return syntax(error, bad, "a '\\' that begins no escape");
    }
    if (!rst_json_reserve(&reader->ends, (size_t)count * sizeof(uint32_t))) {
        return no_memory(error, json->size);
    }
    walk w;
    w.text = json->text;
    w.size = json->size;
    w.places = places;
    w.ends = (uint32_t *)(void *)reader->ends.bytes;
    w.list = NULL;
    if (json->cut_count > 0) {
        w.cuts_end = json->cuts + json->cut_count;
        w.list = next_list(json->cuts, w.cuts_end);
    }
    char first = json->text[places[0]];
    char last = json->text[places[count - 1]];
    if (count == 1 && is_scalar(&w, places)) {
        json->places = places;
        return RST_OK;
    }
    if ((first != '{' && first != '[') || (last != '}' && last != ']')) {
        return explain_frame(json->text, places, count, error);
    }
    places[count] = places[0];
    if (!check_grammar(&w, count)) {
        return explain_fault(&w, count, error);
    }
    json->places = places;
    json->ends = w.ends;
    return RST_OK;
}

static bool all_used(const rst_json_cut *cuts, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        if (!cuts[i].used) {
            return false;
        }
    }
    return true;
}

static bool reserve_entries(rst_json_reader *reader, size_t size)
{
    size_t room = size / RST_JSON_ENTRY_SIZE_MIN + 1;
    return !reader->lists_too || rst_json_reserve(&reader->entries, room * sizeof(rst_json_entry));
}

/* The attempt with long strings and lists left out.  RST_OK when it holds; of its errors only
 * RST_ERR_MEMORY means something. */
static int without_long_parts(rst_json_reader *reader, const char *text, size_t size,
                              rst_json_use *use, void *context)
{
    rst_json_entries entries = {.items = (rst_json_entry *)(void *)reader->entries.bytes,
                                .room = (uint32_t)(size / RST_JSON_ENTRY_SIZE_MIN + 1)};
    uint32_t count =
        rst_json_find_cuts(text, size, reader->cuts, reader->lists_too ? &entries : NULL);
    size_t shortened_size = rst_json_shortened_size(size, reader->cuts, count);
    if (size - shortened_size <=
        size / 4) { /* writing the rest anew would cost more than it saves */
        return RST_ERR_SYNTAX;
    }
    if (!rst_json_reserve(&reader->shortened, shortened_size)) {
        return RST_ERR_MEMORY;
    }
    rst_json_shorten(text, size, reader->cuts, count, reader->shortened.bytes);
    rst_json json = {.text = reader->shortened.bytes,
                     .size = shortened_size,
                     .cuts = reader->cuts,
                     .cut_count = count,
                     .entries = entries.items};
    int code = open_text(reader, &json, NULL);
    if (!code) {
        code = use(context, &json, 0, NULL);
    }
    return code || all_used(reader->cuts, count) ? code : RST_ERR_SYNTAX;
}

int rst_json_with(rst_json_reader *reader, const char *text, size_t size, rst_json_use *use,
                  void *context, rst_error *error)
{
    int code = reserve_entries(reader, size) ? without_long_parts(reader, text, size, use, context)
                                             : RST_ERR_MEMORY;
    if (code == RST_ERR_MEMORY) {
        return no_memory(error, size);
    }
    if (code) {
        rst_json json = {.text = text, .size = size};
        code = open_text(reader, &json, error);
        code = code ? code : use(context, &json, 0, error);
    }
    return code;
}

/* ---------------------------------------------------------------- walking */

const char *rst_json_kind(const rst_json *json, rst_json_node node)
{
    switch (rst_json_first(json, node)) {
    case '{':
        return "an object";
    case '[':
        return "an array";
    case '"':
        return "a string";
    case 't':
    case 'f':
        return "a boolean";
    case 'n':
        return "null";
    default:
        return "a number";
    }
}

const rst_json_entry *rst_json_entry_list(const rst_json *json, rst_json_node array,
                                          uint32_t *count)
{
    for (uint32_t i = 0; i < json->cut_count; i++) {
        const rst_json_cut *cut = &json->cuts[i];
        if (cut->is_list && cut->place == rst_json_offset(json, array)) {
            *count = cut->count;
            return json->entries + cut->first;
        }
    }
    return NULL;
}

uint32_t rst_json_count(const rst_json *json, rst_json_node array)
{
    uint32_t count = 0;
    for (rst_json_node node = rst_json_begin(json, array); node != RST_JSON_NONE;
         node = rst_json_next(json, node)) {
        count++;
    }
    return count;
}

rst_json_node rst_json_element(const rst_json *json, rst_json_node array, uint64_t index)
{
    rst_json_node node = rst_json_begin(json, array);
    while (index-- > 0) {
        node = rst_json_next(json, node);
    }
    return node;
}

void rst_json_members(const rst_json *json, rst_json_node object, const char *const *names,
                      size_t count, rst_json_node *values)
{
    for (size_t i = 0; i < count; i++) {
        values[i] = RST_JSON_NONE;
    }
    rst_json_node key = rst_json_begin(json, object);
    while (key != RST_JSON_NONE) {
        rst_json_node value = rst_json_value(key);
        for (size_t i = 0; i < count; i++) {
            if (rst_json_string_is(json, key, names[i])) {
                values[i] = rst_json_first(json, value) == 'n' ? RST_JSON_NONE : value;
                break;
            }
        }
        key = rst_json_next(json, value);
    }
}
