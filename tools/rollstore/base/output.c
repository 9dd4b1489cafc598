#include "output.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fail.h"

/* Room for `size` more bytes; false when there is no memory. */
static bool reserve(output *out, size_t size)
{
    if (out->out_of_memory) {
        return false;
    }
    if (out->capacity - out->size >= size) {
        return true;
    }
    size_t wanted = out->capacity ? out->capacity : 4096;
    while (wanted - out->size < size) {
        if (wanted > SIZE_MAX / 2) {
            out->out_of_memory = true;
            return false;
        }
        wanted *= 2;
    }
    char *grown = realloc(out->text, wanted);
    if (!grown) {
        out->out_of_memory = true;
        return false;
    }
    out->text = grown;
    out->capacity = wanted;
    return true;
}

void output_bytes(output *out, const void *bytes, size_t size)
{
    if (size && reserve(out, size)) {
        memcpy(out->text + out->size, bytes, size);
        out->size += size;
    }
}

void output_text(output *out, const char *text)
{
    output_bytes(out, text, strlen(text));
}

void output_format(output *out, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    va_list again;
    va_copy(again, arguments);
    int size = vsnprintf(NULL, 0, format, arguments);
    if (size >= 0 && reserve(out, (size_t)size + 1)) {
        vsnprintf(out->text + out->size, (size_t)size + 1, format, again);
        out->size += (size_t)size;
    }
    va_end(again);
    va_end(arguments);
}

void output_spaces(output *out, size_t count)
{
    if (reserve(out, count)) {
        memset(out->text + out->size, ' ', count);
        out->size += count;
    }
}

bool write_fully(int fd, const void *bytes, size_t size)
{
    const char *at = bytes;
    while (size) {
        ssize_t written = write(fd, at, size);
        if (written < 0 && errno == EINTR) {
            continue;
        }
        if (written <= 0) {
            errno = written < 0 ? errno : EIO;
            return false;
        }
        at += written;
        size -= (size_t)written;
    }
    return true;
}

bool output_write(output *out)
{
    if (out->failed) {
        return false; /* said already */
    }
    if (out->out_of_memory) {
        fail("memory", "no memory for the output");
        out->failed = true;
    } else if (!write_fully(STDOUT_FILENO, out->text, out->size)) {
        fail_system(errno, "writing standard output");
        out->failed = true;
    }
    out->size = 0;
    return !out->failed;
}

void output_free(output *out)
{
    free(out->text);
    memset(out, 0, sizeof *out);
}

int output_finish(output *out)
{
    bool written = output_write(out);
    output_free(out);
    return written ? STATUS_OK : STATUS_FAILED;
}

/* ---------------------------------------------------------------- JSON */

/* A value follows a bracket, a colon or nothing; after anything else a comma is due. */
static void separate(output *out)
{
    char last = out->size ? out->text[out->size - 1] : '\n';
    if (last != '{' && last != '[' && last != ':' && last != '\n') {
        output_bytes(out, ",", 1);
    }
}

void json_open(output *out, char bracket)
{
    separate(out);
    output_bytes(out, &bracket, 1);
}

void json_close(output *out, char bracket)
{
    output_bytes(out, &bracket, 1);
}

void json_key(output *out, const char *key)
{
    separate(out);
    output_bytes(out, "\"", 1);
    output_text(out, key);
    output_bytes(out, "\":", 2);
}

void json_open_key(output *out, const char *key, char bracket)
{
    json_key(out, key);
    json_open(out, bracket);
}

size_t utf8_decode(const unsigned char *in, size_t size, uint32_t *code)
{
    if (size == 0) {
        return 0;
    }
    if (in[0] < 0x80) {
        *code = in[0];
        return 1;
    }
    size_t length = in[0] >= 0xF0 ? 4 : in[0] >= 0xE0 ? 3 : 2;
    if (in[0] < 0xC2 || in[0] > 0xF4 || length > size) {
        return 0;
    }
    uint32_t value = in[0] & (0x7Fu >> length);
    for (size_t i = 1; i < length; i++) {
        if ((in[i] & 0xC0) != 0x80) {
            return 0;
        }
        value = value << 6 | (in[i] & 0x3F);
    }
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    if (value < least[length] || value > 0x10FFFF || (value >= 0xD800 && value < 0xE000)) {
        return 0;
    }
    *code = value;
    return length;
}

static void json_character(output *out, uint32_t code, const void *bytes, size_t size)
{
    switch (code) {
    case '"':
        output_text(out, "\\\"");
        return;
    case '\\':
        output_text(out, "\\\\");
        return;
    case '\n':
        output_text(out, "\\n");
        return;
    case '\t':
        output_text(out, "\\t");
        return;
    default:
        break;
    }
    /* Legal in JSON as they are, but some readers take U+0085, U+2028 and U+2029 for a line's end,
     * and a terminal takes C1 characters for commands. */
    if (code < 0x20 || (code >= 0x7F && code < 0xA0) || code == 0x2028 || code == 0x2029) {
        output_format(out, "\\u%04x", code);
        return;
    }
    output_bytes(out, bytes, size);
}

void json_string(output *out, const void *bytes, size_t size)
{
    const unsigned char *in = bytes;
    separate(out);
    output_bytes(out, "\"", 1);
    for (size_t at = 0; at < size;) {
        uint32_t code;
        size_t length = utf8_decode(in + at, size - at, &code);
        if (length == 0) {
            output_text(out, "\xEF\xBF\xBD");
            at++;
            continue;
        }
        json_character(out, code, in + at, length);
        at += length;
    }
    output_bytes(out, "\"", 1);
}

void json_text(output *out, const char *text)
{
    if (text) {
        json_string(out, text, strlen(text));
    } else {
        json_null(out);
    }
}

void json_u64(output *out, uint64_t value)
{
    separate(out);
    output_format(out, "%llu", (unsigned long long)value);
}

void json_i64(output *out, int64_t value)
{
    separate(out);
    output_format(out, "%lld", (long long)value);
}

void json_bool(output *out, bool value)
{
    separate(out);
    output_text(out, value ? "true" : "false");
}

void json_null(output *out)
{
    separate(out);
    output_text(out, "null");
}

void json_double(output *out, double value)
{
    if (isnan(value)) {
        json_null(out);
        return;
    }
    separate(out);
    if (isinf(value)) {
        output_text(out,
                    value > 0 ? "1e999" : "-1e999"); /* JSON has no infinity; this reads as one */
        return;
    }
    char text[40];
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, value);
        if (strtod(text, NULL) == value) {
            break;
        }
    }
    output_text(out, text);
}

void json_float(output *out, float value)
{
    if (!isfinite(value)) {
        json_null(out);
        return;
    }
    separate(out);
    char text[40];
    for (int digits = 6; digits <= 9; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, (double)value);
        if (strtof(text, NULL) == value) {
            break;
        }
    }
    output_text(out, text);
}

/* The lists hold millions of numbers: written in place, without a call for each comma. */
#define NUMBER_SIZE_MAX 24

static char *put_i32(char *at, int32_t value)
{
    char digits[12];
    size_t count = 0;
    uint32_t rest = value < 0 ? 0u - (uint32_t)value : (uint32_t)value;
    do {
        digits[count++] = (char)('0' + rest % 10);
        rest /= 10;
    } while (rest);
    if (value < 0) {
        *at++ = '-';
    }
    while (count) {
        *at++ = digits[--count];
    }
    return at;
}

void json_i32_list(output *out, const int32_t *values, size_t count)
{
    json_open(out, '[');
    if (!reserve(out, count * 12 + 1)) {
        return;
    }
    char *at = out->text + out->size;
    for (size_t i = 0; i < count; i++) {
        at = put_i32(at, values[i]);
        *at++ = ',';
    }
    out->size = (size_t)(at - out->text) - (count ? 1 : 0);
    json_close(out, ']');
}

void json_f32_list(output *out, const float *values, size_t count)
{
    json_open(out, '[');
    for (size_t i = 0; i < count; i++) {
        if (!reserve(out, NUMBER_SIZE_MAX)) {
            return;
        }
        char *at = out->text + out->size;
        /* Nine digits always read back to the same float. */
        int size = isfinite(values[i]) ? snprintf(at, NUMBER_SIZE_MAX, "%.9g", (double)values[i])
                                       : snprintf(at, NUMBER_SIZE_MAX, "null");
        at[size] = ',';
        out->size += (size_t)size + (i + 1 < count ? 1 : 0);
    }
    json_close(out, ']');
}

void output_hex(output *out, const void *bytes, size_t size)
{
    for (size_t i = 0; i < size; i++) {
        output_format(out, "%02x", ((const unsigned char *)bytes)[i]);
    }
}

static bool is_utf8(const char *text, size_t size)
{
    uint32_t code;
    for (size_t at = 0; at < size;) {
        size_t length = utf8_decode((const unsigned char *)text + at, size - at, &code);
        if (length == 0) {
            return false;
        }
        at += length;
    }
    return true;
}

void json_session_id(output *out, const char *id, size_t size)
{
    json_key(out, "session_id");
    json_string(out, id, size);
    if (!is_utf8(id, size)) {
        json_key(out, "session_id_hex");
        output_bytes(out, "\"", 1);
        output_hex(out, id, size);
        output_bytes(out, "\"", 1);
    }
}
