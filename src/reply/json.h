/*
 * JSON texts, read in place.  Internal; knows nothing of replies.
 *
 * simdjson's first stage (json.cpp, the only C++ here) finds where each part of a text begins, at
 * the speed of memory.  Our own walk over these places (document.c) then checks the whole grammar,
 * also of what nobody asks for, and notes where each bracket closes: after rst_json_with has called
 * its function, the text is one valid JSON document, and any value is passed over in one step.
 * simdjson's own ways on from there either build a tree of everything (dom) or do not check what
 * they pass over (on-demand), and read beyond the text's end, which would make us copy it.
 */
#ifndef RST_SRC_REPLY_JSON_H
#define RST_SRC_REPLY_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <rollstore/error.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---------------------------------------------------------------- json.cpp */

/* simdjson's index of a text, kept to be filled again. */
typedef struct rst_json_index rst_json_index;

rst_json_index *rst_json_index_new(void);
void rst_json_index_free(rst_json_index *index);

typedef enum rst_json_fault {
    RST_JSON_FINE,
    RST_JSON_NO_MEMORY,
    RST_JSON_INVALID /* UTF-8, a control character in a string, an open string, nothing at all */
} rst_json_fault;

/* Find the places: the offset of each bracket, ',' and ':' and of the first byte of each string,
 * number and literal.  There is room for one more place behind the last one.  Reads nothing outside
 * the text. */
rst_json_fault rst_json_index_fill(rst_json_index *index, const char *text, size_t size,
                                   uint32_t **places, uint32_t *count);

/* The double nearest to a number in JSON's spelling; ±infinity when that is too large for one. */
double rst_json_exact_double(const char *text, size_t size);

/* The shortest text that reads back as this finite double, with a '.' or an exponent.  Returns its
 * length. */
#define RST_JSON_DOUBLE_SIZE 32
size_t rst_json_write_double(double value, char out[RST_JSON_DOUBLE_SIZE]);

/* ---------------------------------------------------------------- document.c */

/* A growing piece of memory. */
typedef struct rst_json_buffer {
    char *bytes;
    size_t capacity;
} rst_json_buffer;

/* Make room for `size` bytes; what was there is lost. */
bool rst_json_reserve(rst_json_buffer *buffer, size_t size);

/* What stands between the quotes of a long string or the brackets of a list and was left out of the
 * text, see cut.c. */
typedef struct rst_json_cut {
    size_t place; /* of the opening quote or bracket in the shortened text */
    const char *text;
    size_t size;
    bool used;
    bool left_out; /* for who copies the document: it is in nothing that was copied */
    bool is_list;
    uint32_t first; /* its entries, see rst_json_entry_list */
    uint32_t count;
} rst_json_cut;

#define RST_JSON_CUT_MAX 32

/* [logprob, id, text]; the text is passed over. */
typedef struct rst_json_entry {
    float logprob;
    int32_t id;
} rst_json_entry;

typedef struct rst_json_entries {
    rst_json_entry *items;
    uint32_t count;
    uint32_t room;
} rst_json_entries;

/* A valid document.  A value is named by its node: the number of its place. */
typedef struct rst_json {
    const char *text;
    size_t size;
    const uint32_t *places;
    const uint32_t *ends; /* of a node that opens a bracket: the node that closes it */
    rst_json_cut *cuts;
    uint32_t cut_count;
    const rst_json_entry *entries; /* of the lists that were cut */
} rst_json;

typedef uint32_t rst_json_node;
#define RST_JSON_NONE UINT32_MAX /* no node */

/* Memory to read documents with, kept between them. */
typedef struct rst_json_reader {
    rst_json_index *index;
    rst_json_buffer ends;
    rst_json_buffer shortened;
    rst_json_buffer unescaped[2]; /* for rst_json_string's caller */
    rst_json_buffer entries;
    rst_json_cut cuts[RST_JSON_CUT_MAX];
    bool lists_too; /* leave out lists of tokens, too: "content" and "output_token_logprobs", of
                       which only the latter is read, by rst_json_entry_list */
} rst_json_reader;

void rst_json_reader_free(rst_json_reader *reader); /* what it holds, not the struct itself */

/* What is done with a document; root is its node.  Returns an rst_code. */
typedef int rst_json_use(void *context, const rst_json *json, rst_json_node root, rst_error *error);

/*
 * Check the text and call `use` with the document.  RST_ERR_SYNTAX, RST_ERR_MEMORY, or what `use`
 * returns.
 *
 * `use` may be called twice, and must be able to start over: first with a text from which long
 * base64 strings are left out, so that they are not looked through twice, and with
 * reader->lists_too lists of tokens.  That attempt counts only when it succeeds and each of these
 * strings was decoded (rst_json_long_string); what went wrong in it is not reported.
 */
int rst_json_with(rst_json_reader *reader, const char *text, size_t size, rst_json_use *use,
                  void *context, rst_error *error);

/* ---------------------------------------------------------------- walking a document */

static inline size_t rst_json_offset(const rst_json *json, rst_json_node node)
{
    return json->places[node];
}

/* The value's first byte: { [ " t f n - or a digit. */
static inline char rst_json_first(const rst_json *json, rst_json_node node)
{
    return json->text[json->places[node]];
}

static inline bool rst_json_is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static inline bool rst_json_begins_number(char first)
{
    return first == '-' || rst_json_is_digit(first);
}

static inline bool rst_json_is_number(const rst_json *json, rst_json_node node)
{
    return rst_json_begins_number(rst_json_first(json, node));
}

/* The node after a value: a ',' or the bracket that closes what the value is in. */
static inline rst_json_node rst_json_after(const rst_json *json, rst_json_node node)
{
    char first = rst_json_first(json, node);
    return (first == '{' || first == '[' ? json->ends[node] : node) + 1;
}

/* The first element of an array or key of an object; RST_JSON_NONE when it is empty. */
static inline rst_json_node rst_json_begin(const rst_json *json, rst_json_node container)
{
    return json->ends[container] == container + 1 ? RST_JSON_NONE : container + 1;
}

/* The element or key after a value of a container; RST_JSON_NONE at the end. */
static inline rst_json_node rst_json_next(const rst_json *json, rst_json_node value)
{
    rst_json_node after = rst_json_after(json, value);
    return rst_json_first(json, after) == ',' ? after + 1 : RST_JSON_NONE;
}

/* The value of a key. */
static inline rst_json_node rst_json_value(rst_json_node key)
{
    return key + 2;
}

/* "an object", "a number", ... */
const char *rst_json_kind(const rst_json *json, rst_json_node node);

/* The entries of an array that was left out, *count of them; NULL when it was not. */
const rst_json_entry *rst_json_entry_list(const rst_json *json, rst_json_node array,
                                          uint32_t *count);

/* Number of an array's elements. */
uint32_t rst_json_count(const rst_json *json, rst_json_node array);

/* The array's element of that index, which must be there. */
rst_json_node rst_json_element(const rst_json *json, rst_json_node array, uint64_t index);

/*
 * The values of an object's members by name: values[i] becomes the node of the member names[i], the
 * last one where a key stands twice (as Python's json has it), RST_JSON_NONE where there is none.
 * A member that is null counts as absent.
 */
void rst_json_members(const rst_json *json, rst_json_node object, const char *const *names,
                      size_t count, rst_json_node *values);

/* ---------------------------------------------------------------- text.c */

/* The text of a string.  It points into the document when there are no escapes, else into buffer.
 * RST_ERR_MEMORY, or RST_ERR_VALUE for half a surrogate pair, which is no text, and for one that
 * was left out, which takes the whole text to be read. */
int rst_json_string(const rst_json *json, rst_json_node node, rst_json_buffer *buffer,
                    const char **text, size_t *size);

/* The same for a string that may have been left out.  The caller promises to refuse, before it
 * reports success, a string with any byte that is not base64. */
int rst_json_long_string(const rst_json *json, rst_json_node node, rst_json_buffer *buffer,
                         const char **text, size_t *size);

/* The string equals `expected`. */
bool rst_json_string_is(const rst_json *json, rst_json_node node, const char *expected);

/* Where in the document the byte `index` of a string's text stands. */
size_t rst_json_string_offset(const rst_json *json, rst_json_node node, size_t index);

/* Unescape `size` bytes of a string's inside, which must be valid; out has room for as many.
 * Returns the length, SIZE_MAX for half a surrogate pair. */
size_t rst_json_unescape(const char *in, size_t size, char *out);

/* Bytes of the escape at `in`, which begins with '\'; 0 when it is none. */
size_t rst_json_escape_length(const char *in, size_t size);

/* Offset of the first '\' that begins no escape; `size` when there is none. */
size_t rst_json_bad_escape(const char *text, size_t size);

/* Length of the well-formed UTF-8 sequence at `in`, 0 when there is none. */
size_t rst_json_utf8_length(const char *in, size_t size);

/* What some editors put before a text in UTF-8; JSON has no place for it. */
#define RST_JSON_BYTE_ORDER_MARK "\xEF\xBB\xBF"

/* ---------------------------------------------------------------- value.h */

typedef enum rst_json_number {
    RST_JSON_NUMBER_FINE,
    RST_JSON_NOT_NUMBER,
    RST_JSON_NOT_INTEGER, /* has a fraction or an exponent */
    RST_JSON_OUT_OF_RANGE /* does not fit an int64_t */
} rst_json_number;

#ifdef __cplusplus
}
#endif
#endif
