/* Encoding, by libb64. */
#include "base64/base64.h"

#include <stdint.h>
#include <string.h>

#include <b64/cencode.h>

/* libb64 breaks lines after 72 characters and ends a text with a line break (2.x with a NUL as
 * well).  48 bytes make 64 characters: with a fresh state for each 48, no line is ever full, and
 * what is added at the end falls beyond the characters that are taken.  It also takes lengths as
 * int, which 48 always fits. */
#define CHUNK_SIZE 48

size_t rst_base64_encoded_size(size_t size)
{
    if (size > SIZE_MAX / 4 * 3)
        return 0;
    return size / 3 * 4 + (size % 3 != 0 ? 4 : 0);
}

void rst_base64_encode(const void *in, size_t size, char *out)
{
    const char *bytes = in;
    while (size > 0) {
        uint8_t n = size < CHUNK_SIZE ? (uint8_t)size : CHUNK_SIZE;
        char line[2 * CHUNK_SIZE];
        base64_encodestate state;
        base64_init_encodestate(&state);
        char *end = line + base64_encode_block(bytes, n, line, &state);
        if (n % 3 != 0)
            base64_encode_blockend(end, &state);
        size_t encoded_size = rst_base64_encoded_size(n);
        memcpy(out, line, encoded_size);
        out += encoded_size;
        bytes += n;
        size -= n;
    }
}
