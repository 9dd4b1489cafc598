/* Finding a line's session id without reading the line. */
#include <string.h>

#include <rollstore/ingest.h>

#include "../error.h"
#include "json.h"
#include "line.h"

int rst_line_check_id_size(size_t offset, size_t size, rst_error *error)
{
    if (size == 0) {
        return rst_fail_at(error, RST_ERR_VALUE, "session_id", (int64_t)offset,
                           "session_id is empty");
    }
    if (size > RST_SESSION_ID_SIZE_MAX) {
        return rst_fail_at(error, RST_ERR_LIMIT, "session_id", (int64_t)offset,
                           "session_id has %zu bytes, at most %d are allowed", size,
                           RST_SESSION_ID_SIZE_MAX);
    }
    return RST_OK;
}

/* ---------------------------------------------------------------- passing over
 *
 * Each of these takes a place in the line and returns the place behind what it passes over; the
 * line's size means that the line ends too early.  What is passed over is checked later, by
 * rst_line_decode. */

typedef struct line_text {
    const char *text;
    size_t size;
} line_text;

static size_t skip_blanks(line_text l, size_t at)
{
    while (at < l.size &&
           (l.text[at] == ' ' || l.text[at] == '\t' || l.text[at] == '\n' || l.text[at] == '\r')) {
        at++;
    }
    return at;
}

/* From the byte after the opening quote to the closing one. */
static size_t string_end(line_text l, size_t at)
{
    while (at < l.size) {
        const char *quote = memchr(l.text + at, '"', l.size - at);
        if (!quote) {
            return l.size;
        }
        size_t end = (size_t)(quote - l.text);
        size_t from = end;
        while (from > at && l.text[from - 1] == '\\') {
            from--;
        }
        if ((end - from) % 2 == 0) {
            return end;
        }
        at = end + 1; /* an odd number of '\': the quote is escaped */
    }
    return l.size;
}

static size_t skip_container(line_text l, size_t at)
{
    size_t depth = 0;
    while (at < l.size) {
        char c = l.text[at++];
        if (c == '"') {
            at = string_end(l, at);
            at += at < l.size;
        } else if (c == '{' || c == '[') {
            depth++;
        } else if ((c == '}' || c == ']') && --depth == 0) {
            break;
        }
    }
    return at;
}

static size_t skip_value(line_text l, size_t at)
{
    if (at < l.size && l.text[at] == '"') {
        at = string_end(l, at + 1);
        return at + (at < l.size);
    }
    if (at < l.size && (l.text[at] == '{' || l.text[at] == '[')) {
        return skip_container(l, at);
    }
    while (at < l.size && l.text[at] != ',' && l.text[at] != '}') {
        at++;
    }
    return at;
}

/* ---------------------------------------------------------------- the id */

static int syntax(rst_error *error, size_t offset, const char *what)
{
    return rst_fail_at(error, RST_ERR_SYNTAX, NULL, (int64_t)offset, "not JSON: %s", what);
}

/* The longest spelling of one byte is \u0041. */
#define SPELLED_ID_SIZE_MAX (6 * RST_SESSION_ID_SIZE_MAX)

static bool is_session_id(const char *key, size_t size)
{
    static const char name[] = "session_id";
    enum { NAME_SIZE = sizeof name - 1 };
    char plain[6 * NAME_SIZE];
    if (size > sizeof plain || rst_json_bad_escape(key, size) < size) {
        return false;
    }
    return rst_json_unescape(key, size, plain) == NAME_SIZE && !memcmp(plain, name, NAME_SIZE);
}

/* Copy the string between two quotes. */
static int take_id(line_text l, size_t begin, size_t end, char *id, size_t *id_size,
                   rst_error *error)
{
    const char *text = l.text + begin;
    size_t size = end - begin;
    for (size_t at = 0; at < size;) {
        size_t length = rst_json_utf8_length(text + at, size - at);
        if (length == 0 || (unsigned char)text[at] < 0x20) {
            return syntax(error, begin + at, "invalid UTF-8 or a control character in a string");
        }
        at += length;
    }
    size_t bad = rst_json_bad_escape(text, size);
    if (bad < size) {
        return syntax(error, begin + bad, "a '\\' that begins no escape");
    }
    char plain[SPELLED_ID_SIZE_MAX];
    size_t plain_size =
        size > sizeof plain ? RST_SESSION_ID_SIZE_MAX + 1 : rst_json_unescape(text, size, plain);
    if (plain_size == SIZE_MAX) {
        return rst_fail_at(error, RST_ERR_VALUE, "session_id", (int64_t)begin - 1,
                           "session_id holds half a surrogate pair");
    }
    int code = rst_line_check_id_size(begin - 1, plain_size, error);
    if (!code) {
        memcpy(id, plain, plain_size);
        *id_size = plain_size;
    }
    return code;
}

static int cut(line_text l, rst_error *error)
{
    return syntax(error, l.size, "the line is cut");
}

static int no_id(rst_error *error)
{
    return rst_fail(error, RST_ERR_MISSING, "session_id", "the line has no session_id");
}

/* The value of session_id begins at `at`; null counts as none. */
static int read_id(line_text l, size_t at, char *id, size_t *id_size, rst_error *error)
{
    if (l.text[at] == 'n') {
        return no_id(error);
    }
    if (l.text[at] != '"') {
        return rst_fail_at(error, RST_ERR_TYPE, "session_id", (int64_t)at,
                           "session_id is not a string");
    }
    size_t end = string_end(l, at + 1);
    return end == l.size ? cut(l, error) : take_id(l, at + 1, end, id, id_size, error);
}

int rst_line_session(const void *line, size_t size, char *id, size_t *id_size, rst_error *error)
{
    line_text l = {.text = line, .size = size};
    rst_error_clear(error);
    *id_size = 0;
    size_t at = skip_blanks(l, 0);
    if (size - at >= 3 && memcmp(l.text + at, RST_JSON_BYTE_ORDER_MARK, 3) == 0) {
        return syntax(error, at, "a byte order mark stands before it");
    }
    if (at < size && l.text[at] != '{') {
        return syntax(error, at, "the line is not an object");
    }
    while (at < size) {
        /* Here stands the object's '{', or a ','. */
        size_t key = skip_blanks(l, at + 1);
        if (key < size && l.text[key] == '}' && l.text[at] == '{') {
            break;
        }
        if (key < size && l.text[key] != '"') {
            return syntax(error, key, "an object's key should stand here");
        }
        size_t key_end = key < size ? string_end(l, key + 1) : size;
        at = key_end < size ? skip_blanks(l, key_end + 1) : size;
        if (at < size && l.text[at] != ':') {
            return syntax(error, at, "a ':' should stand here");
        }
        at = at < size ? skip_blanks(l, at + 1) : size;
        if (at < size && is_session_id(l.text + key + 1, key_end - key - 1)) {
            return read_id(l, at, id, id_size, error);
        }
        at = skip_blanks(l, skip_value(l, at));
        if (at < size && l.text[at] == '}') {
            break;
        }
        if (at < size && l.text[at] != ',') {
            return syntax(error, at, "a ',' should stand here");
        }
    }
    return at < size ? no_id(error) : cut(l, error);
}
