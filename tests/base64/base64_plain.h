/* A second opinion on base64, as plain as can be, and inputs for the tests of it.  cmocka.h comes
 * before it, and what that needs. */
#ifndef RST_TESTS_BASE64_PLAIN_H
#define RST_TESTS_BASE64_PLAIN_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <b64/cdecode.h>

#include "base64/base64.h"

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

static const char alphabet[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

static inline int plain_value(char c)
{
    static int values[256];
    static int known;
    if (!known) {
        memset(values, -1, sizeof values);
        for (int i = 0; i < 64; i++)
            values[(uint8_t)alphabet[i]] = i;
        known = 1;
    }
    return values[(uint8_t)c];
}

static inline void plain_encode(const uint8_t *in, size_t size, char *out)
{
    for (size_t i = 0; i < size; i += 3) {
        size_t n = size - i < 3 ? size - i : 3;
        unsigned bits = (unsigned)in[i] << 16;
        bits |= n > 1 ? (unsigned)in[i + 1] << 8 : 0;
        bits |= n > 2 ? in[i + 2] : 0;
        *out++ = alphabet[bits >> 18];
        *out++ = alphabet[bits >> 12 & 63];
        *out++ = '=';
        *out++ = '=';
        if (n > 1)
            out[-2] = alphabet[bits >> 6 & 63];
        if (n > 2)
            out[-1] = alphabet[bits & 63];
    }
}

/* What base64.h says of a text: status, offset of the fault. */
static inline int plain_check(const char *text, size_t size, size_t *bad_offset)
{
    size_t padding = 0;
    if (size >= 4 && size % 4 == 0 && text[size - 1] == '=')
        padding = text[size - 2] == '=' ? 2 : 1;
    for (size_t i = 0; i < size - padding; i++) {
        if (plain_value(text[i]) < 0) {
            *bad_offset = i;
            return text[i] == '=' ? RST_BASE64_BAD_PADDING : RST_BASE64_BAD_BYTE;
        }
    }
    *bad_offset = size;
    if (size % 4 != 0)
        return RST_BASE64_BAD_PADDING;
    if (padding != 0 && plain_value(text[size - padding - 1]) % (padding == 2 ? 16 : 4) != 0) {
        *bad_offset = size - padding - 1;
        return RST_BASE64_BAD_BITS;
    }
    return RST_BASE64_OK;
}

/* libb64's decoding; it writes one byte more than it returns. */
static inline size_t libb64_decode(const char *text, size_t size, char *out)
{
    base64_decodestate state;
    base64_init_decodestate(&state);
    size_t done = 0;
    while (size > 0) {
        uint16_t n = size < 32768 ? (uint16_t)size : 32768; /* fits its int and its size_t */
        done += (size_t)base64_decode_block(text, n, out + done, &state);
        text += n;
        size -= n;
    }
    return done;
}

static uint64_t random_state = 1;

static inline uint32_t random_32(void)
{
    random_state = random_state * 6364136223846793005ULL + 1442695040888963407ULL;
    return (uint32_t)(random_state >> 32);
}

/* A block of exactly `size` bytes, so that the address sanitizer sees one byte too many. */
static inline void *exact(size_t size)
{
    void *block = malloc(size ? size : 1);
    assert_non_null(block);
    return block;
}

static inline uint8_t *random_bytes(size_t size)
{
    uint8_t *bytes = exact(size);
    for (size_t i = 0; i < size; i++)
        bytes[i] = (uint8_t)random_32();
    return bytes;
}

static inline char *encoded(const uint8_t *bytes, size_t size, size_t *text_size)
{
    *text_size = (size + 2) / 3 * 4;
    char *text = exact(*text_size);
    plain_encode(bytes, size, text);
    return text;
}

#endif
