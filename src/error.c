#include "error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

typedef struct code_entry {
    int code;
    const char *name;
    const char *text;
} code_entry;

static const code_entry codes[] = {
    {RST_OK, "ok", "it succeeded"},
    {RST_ERR_SYNTAX, "syntax", "the reply is not one whole JSON document"},
    {RST_ERR_MISSING, "missing", "the reply lacks a field that its mode needs"},
    {RST_ERR_DTYPE, "dtype", "a dtype marker is absent or unknown"},
    {RST_ERR_SHAPE, "shape", "counts in the reply do not fit one another"},
    {RST_ERR_BASE64, "base64", "text is not strict, padded base64"},
    {RST_ERR_VALUE, "value", "a token id or logprob is outside what a record may hold"},
    {RST_ERR_TYPE, "type", "a JSON value has another type than its field"},
    {RST_ERR_ARGUMENT, "argument", "an argument is outside its documented range"},
    {RST_ERR_LIMIT, "limit", "a documented limit is exceeded"},
    {RST_ERR_MEMORY, "memory", "an allocation failed"},
    {RST_ERR_FORKED, "forked", "the handle was opened before a fork"},
    {RST_ERR_BUSY, "busy", "the handle is in use in a way that forbids the call"},
    {RST_ERR_READ_ONLY, "read_only", "the store was opened read-only"},
    {RST_ERR_NOT_FOUND, "not_found", "there is no such session, turn or consumer"},
    {RST_ERR_CONFLICT, "conflict", "other contents are stored there already"},
    {RST_ERR_ORDER, "order", "the turns before this one are not stored"},
    {RST_ERR_SEALED, "sealed", "the session has its outcome and takes no more changes"},
    {RST_ERR_ALIGNMENT, "alignment", "a prompt contradicts the tokens before it"},
    {RST_ERR_HELD, "held", "a consumer has not finished with the session"},
    {RST_ERR_LEASE, "lease", "the lease has ended"},
    {RST_ERR_FULL, "full", "the store is at capacity"},
    {RST_ERR_TIMEOUT, "timeout", "nothing came within the timeout"},
    {RST_ERR_READERS, "readers", "every reader slot is taken"},
    {RST_ERR_NO_SPACE, "no_space", "the file system has no room for the store"},
    {RST_ERR_EXISTS, "exists", "there is something at the path already"},
    {RST_ERR_NOT_STORE, "not_store", "there is no store at the path"},
    {RST_ERR_VERSION, "version", "the store's format is unknown to this library"},
    {RST_ERR_CORRUPT, "corrupt", "the store holds bytes that no writer leaves"},
    {RST_ERR_GONE, "gone", "the store was deleted while it was open"},
    {RST_ERR_PERMISSION, "permission", "the operating system refuses access"},
    {RST_ERR_FILESYSTEM, "filesystem", "the file system cannot hold a store"},
    {RST_ERR_IO, "io", "the operating system or LMDB refused"},
};

static const code_entry *find_code(int code)
{
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++) {
        if (codes[i].code == code) {
            return &codes[i];
        }
    }
    return NULL;
}

const char *rst_code_name(int code)
{
    const code_entry *entry = find_code(code);
    return entry ? entry->name : "unknown";
}

const char *rst_code_text(int code)
{
    const code_entry *entry = find_code(code);
    return entry ? entry->text : "no code of this library";
}

#define TEXT_OF(x) #x
#define VERSION_TEXT(major, minor, patch) TEXT_OF(major) "." TEXT_OF(minor) "." TEXT_OF(patch)

const char *rst_version(void)
{
    return VERSION_TEXT(RST_VERSION_MAJOR, RST_VERSION_MINOR, RST_VERSION_PATCH);
}

void rst_error_clear(rst_error *error)
{
    if (error) {
        memset(error, 0, sizeof *error);
        error->offset = -1;
        error->index = -1;
    }
}

/* A message cut in the middle of a character must not become invalid UTF-8: language bindings turn
 * it into text. */
static void drop_cut_character(char *text)
{
    size_t end = strlen(text);
    size_t begin = end;
    while (begin > 0 && ((unsigned char)text[begin - 1] & 0xC0) == 0x80) {
        begin--;
    }
    if (begin == 0) {
        return;
    }
    unsigned char lead = (unsigned char)text[begin - 1];
    size_t want = lead >= 0xF0 ? 3 : lead >= 0xE0 ? 2 : lead >= 0xC0 ? 1 : 0;
    if (end - begin < want) {
        text[begin - 1] = '\0';
    }
}

static int fail(rst_error *error, int code, int system, const char *field, int64_t offset,
                const char *format, va_list arguments)
{
    if (!error) {
        return code;
    }
    int64_t index = error->index;
    rst_error_clear(error);
    error->index = index;
    error->code = code;
    error->system = system;
    error->offset = offset;
    if (field) {
        snprintf(error->field, sizeof error->field, "%s", field);
        drop_cut_character(error->field);
    }
    vsnprintf(error->message, sizeof error->message, format, arguments);
    drop_cut_character(error->message);
    return code;
}

int rst_fail(rst_error *error, int code, const char *field, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fail(error, code, 0, field, -1, format, arguments);
    va_end(arguments);
    return code;
}

int rst_fail_at(rst_error *error, int code, const char *field, int64_t offset, const char *format,
                ...)
{
    va_list arguments;
    va_start(arguments, format);
    fail(error, code, 0, field, offset, format, arguments);
    va_end(arguments);
    return code;
}

int rst_fail_system(rst_error *error, int code, int system, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fail(error, code, system, NULL, -1, format, arguments);
    va_end(arguments);
    if (error) {
        size_t used = strlen(error->message);
        char text[128];
        snprintf(error->message + used, sizeof error->message - used, ": %s",
                 strerror_r(system, text, sizeof text));
        drop_cut_character(error->message);
    }
    return code;
}

/* Length of the well-formed UTF-8 sequence at `in`, 0 when there is none. */
static size_t utf8_length(const unsigned char *in, size_t size)
{
    if (in[0] < 0x80) {
        return 1;
    }
    size_t length = in[0] >= 0xF0 ? 4 : in[0] >= 0xE0 ? 3 : 2;
    if (in[0] < 0xC2 || in[0] > 0xF4 || length > size) {
        return 0;
    }
    for (size_t i = 1; i < length; i++) {
        if ((in[i] & 0xC0) != 0x80) {
            return 0;
        }
    }
    if ((in[0] == 0xE0 && in[1] < 0xA0) || (in[0] == 0xED && in[1] > 0x9F) ||
        (in[0] == 0xF0 && in[1] < 0x90) || (in[0] == 0xF4 && in[1] > 0x8F)) {
        return 0;
    }
    return length;
}

const char *rst_shown_id(const void *id, size_t size, char buffer[RST_SHOWN_ID_SIZE])
{
    const unsigned char *in = id;
    size_t out = 0;
    size_t at = 0;
    while (at < size && out + 8 < RST_SHOWN_ID_SIZE) {
        size_t length = utf8_length(in + at, size - at);
        if (length == 0 || in[at] < 0x20 || in[at] == 0x7F) {
            buffer[out++] = '?';
            at++;
            continue;
        }
        memcpy(buffer + out, in + at, length);
        out += length;
        at += length;
    }
    if (at < size) {
        memcpy(buffer + out, "...", 3);
        out += 3;
    }
    buffer[out] = '\0';
    return buffer;
}
