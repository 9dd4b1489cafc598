/* Strings and their escapes. */
#include <string.h>

#include "json.h"

/* ---------------------------------------------------------------- UTF-8 */

size_t rst_json_utf8_length(const char *text, size_t size)
{
    const unsigned char *in = (const unsigned char *)text;
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
    /* Spelled longer than needed, a surrogate, or beyond the last character. */
    if ((in[0] == 0xE0 && in[1] < 0xA0) || (in[0] == 0xED && in[1] > 0x9F) ||
        (in[0] == 0xF0 && in[1] < 0x90) || (in[0] == 0xF4 && in[1] > 0x8F)) {
        return 0;
    }
    return length;
}

static size_t put_utf8(uint32_t character, char *out)
{
    if (character < 0x80) {
        out[0] = (char)character;
        return 1;
    }
    size_t length = character < 0x800 ? 2 : character < 0x10000 ? 3 : 4;
    for (size_t i = length; i-- > 1; character >>= 6) {
        out[i] = (char)(0x80 | (character & 0x3F));
    }
    out[0] = (char)((0xF00u >> length & 0xF0) | character);
    return length;
}

/* ---------------------------------------------------------------- escapes */

static bool hex4(const char *in, uint32_t *unit)
{
    *unit = 0;
    for (size_t i = 0; i < 4; i++) {
        char c = in[i];
        uint32_t digit;
        if (c >= '0' && c <= '9') {
            digit = (uint32_t)(c - '0');
        } else if (c >= 'a' && c <= 'f') {
            digit = (uint32_t)(c - 'a' + 10);
        } else if (c >= 'A' && c <= 'F') {
            digit = (uint32_t)(c - 'A' + 10);
        } else {
            return false;
        }
        *unit = *unit << 4 | digit;
    }
    return true;
}

/* What a one-letter escape stands for; 0 when it is none. */
static char plain_escape(char letter)
{
    static const char letters[] = "\"\\/bfnrt";
    static const char meanings[] = "\"\\/\b\f\n\r\t";
    const char *found = letter ? strchr(letters, letter) : NULL;
    return found ? meanings[found - letters] : '\0';
}

size_t rst_json_escape_length(const char *in, size_t size)
{
    uint32_t unit;
    if (size >= 2 && plain_escape(in[1])) {
        return 2;
    }
    return size >= 6 && in[1] == 'u' && hex4(in + 2, &unit) ? 6 : 0;
}

/* Write the character of the escape at `in`.  Returns the bytes read, 0 for half a pair. */
static size_t unescape_one(const char *in, size_t size, char *out, size_t *out_size)
{
    if (in[1] != 'u') {
        out[(*out_size)++] = plain_escape(in[1]);
        return 2;
    }
    uint32_t unit;
    hex4(in + 2, &unit);
    if (unit < 0xD800 || unit > 0xDFFF) {
        *out_size += put_utf8(unit, out + *out_size);
        return 6;
    }
    uint32_t second;
    bool paired = unit < 0xDC00 && size >= 12 && in[6] == '\\' && in[7] == 'u' &&
                  hex4(in + 8, &second) && second >= 0xDC00 && second <= 0xDFFF;
    if (!paired) {
        return 0;
    }
    *out_size += put_utf8(0x10000 + ((unit - 0xD800) << 10) + (second - 0xDC00), out + *out_size);
    return 12;
}

size_t rst_json_bad_escape(const char *text, size_t size)
{
    size_t at = 0;
    while (at < size) {
        const char *found = memchr(text + at, '\\', size - at);
        if (!found) {
            return size;
        }
        at = (size_t)(found - text);
        size_t length = rst_json_escape_length(found, size - at);
        if (length == 0) {
            return at;
        }
        at += length;
    }
    return size;
}

size_t rst_json_unescape(const char *in, size_t size, char *out)
{
    size_t out_size = 0;
    size_t at = 0;
    while (at < size) {
        const char *found = memchr(in + at, '\\', size - at);
        size_t plain = (found ? (size_t)(found - in) : size) - at;
        memcpy(out + out_size, in + at, plain);
        out_size += plain;
        at += plain;
        if (found) {
            size_t length = unescape_one(found, size - at, out, &out_size);
            if (length == 0) {
                return SIZE_MAX;
            }
            at += length;
        }
    }
    return out_size;
}

/* ---------------------------------------------------------------- strings */

/* What stands between the quotes. */
static const char *inside(const rst_json *json, rst_json_node node, size_t *size)
{
    size_t begin = rst_json_offset(json, node) + 1;
    size_t end = rst_json_offset(json, node + 1) - 1;
    while (json->text[end] != '"') { /* blanks */
        end--;
    }
    *size = end - begin;
    return json->text + begin;
}

/* What was left out of the text where this node begins; NULL for nothing. */
static rst_json_cut *cut_at(const rst_json *json, rst_json_node node)
{
    for (uint32_t i = 0; i < json->cut_count; i++) {
        if (json->cuts[i].place == rst_json_offset(json, node)) {
            return &json->cuts[i];
        }
    }
    return NULL;
}

int rst_json_string(const rst_json *json, rst_json_node node, rst_json_buffer *buffer,
                    const char **text, size_t *size)
{
    *text = inside(json, node, size);
    if (*size == 0 && cut_at(json, node)) {
        return RST_ERR_VALUE;
    }
    if (!memchr(*text, '\\', *size)) {
        return RST_OK;
    }
    if (!rst_json_reserve(buffer, *size)) {
        return RST_ERR_MEMORY;
    }
    *size = rst_json_unescape(*text, *size, buffer->bytes);
    *text = buffer->bytes;
    return *size == SIZE_MAX ? RST_ERR_VALUE : RST_OK;
}

int rst_json_long_string(const rst_json *json, rst_json_node node, rst_json_buffer *buffer,
                         const char **text, size_t *size)
{
    rst_json_cut *cut = cut_at(json, node);
    if (cut) {
        cut->used = true;
        *text = cut->text;
        *size = cut->size;
        return RST_OK;
    }
    return rst_json_string(json, node, buffer, text, size);
}

bool rst_json_string_is(const rst_json *json, rst_json_node node, const char *expected)
{
    enum { EXPECTED_MAX = 63 };
    size_t expected_size = strlen(expected);
    size_t size;
    const char *text = inside(json, node, &size);
    if (size == expected_size) {
        return !memcmp(text, expected, size); /* an escape would make it shorter than expected */
    }
    if (size < expected_size || size > 6 * expected_size || expected_size > EXPECTED_MAX ||
        !memchr(text, '\\', size)) {
        return false;
    }
    char plain[6 * EXPECTED_MAX];
    return rst_json_unescape(text, size, plain) == expected_size &&
           !memcmp(plain, expected, expected_size);
}

size_t rst_json_string_offset(const rst_json *json, rst_json_node node, size_t index)
{
    size_t size;
    const char *text = inside(json, node, &size);
    size_t at = 0;
    size_t passed = 0;
    while (at < size && passed < index) {
        char character[4];
        size_t length = 0;
        size_t read = text[at] == '\\' ? unescape_one(text + at, size - at, character, &length) : 1;
        if (read == 0) {
            break;
        }
        at += read;
        passed += text[at - read] == '\\' ? length : 1;
    }
    return (size_t)(text - json->text) + at;
}
