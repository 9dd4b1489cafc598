/* A text: every path says the same of it, and so does libb64 where it is valid.  And bytes, which
 * every path reads back from their text. */
#include <b64/cdecode.h>

#include "base64/base64.h"
#include "fuzz.h"

typedef struct outcome {
    int status;
    size_t offset;
    size_t size;
    unsigned char *bytes; /* exactly `size` */
} outcome;

static outcome decode(const char *text, size_t size)
{
    outcome o = {.offset = 0};
    o.status = rst_base64_decoded_size(text, size, &o.size, &o.offset);
    if (o.status) {
        return o;
    }
    o.bytes = malloc(o.size ? o.size : 1);
    must(o.bytes != NULL);
    o.status = rst_base64_decode(text, size, o.bytes, o.size, &o.offset);
    return o;
}

static void must_agree_with_libb64(const char *text, size_t size, const outcome *o)
{
    base64_decodestate state;
    base64_init_decodestate(&state);
    char *out = malloc(size + 1);
    must(out != NULL);
    int length = base64_decode_block(text, (int)size, out, &state);
    must(length >= 0 && (size_t)length == o->size && same_bytes(out, o->bytes, o->size));
    free(out);
}

static void try_text(const char *text, size_t size, const unsigned char *wanted)
{
    must(rst_base64_force(RST_BASE64_PORTABLE) == 0);
    outcome portable = decode(text, size);
    must(!wanted || portable.status == RST_BASE64_OK);
    if (portable.status == RST_BASE64_OK) {
        must(!wanted || same_bytes(portable.bytes, wanted, portable.size));
        must_agree_with_libb64(text, size, &portable);
    } else {
        must(portable.offset <= size && rst_base64_status_text(portable.status)[0] != '\0');
    }
    for (int path = RST_BASE64_AVX2; path <= RST_BASE64_NEON; path++) {
        if (rst_base64_force((enum rst_base64_path)path) != 0) {
            continue; /* not of this processor */
        }
        outcome other = decode(text, size);
        must(other.status == portable.status && other.size == portable.size);
        must(other.status == RST_BASE64_OK ? same_bytes(other.bytes, portable.bytes, other.size)
                                           : other.offset == portable.offset);
        free(other.bytes);
    }
    free(portable.bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0) {
        return 0;
    }
    char *text = exact_copy(data + 1, size - 1);
    if (data[0] & 1) {
        try_text(text, size - 1, NULL);
    } else {
        size_t encoded_size = rst_base64_encoded_size(size - 1);
        char *encoded = malloc(encoded_size ? encoded_size : 1);
        must(encoded != NULL);
        rst_base64_encode(text, size - 1, encoded);
        try_text(encoded, encoded_size, (const unsigned char *)text);
        if (encoded_size > 0) { /* one byte of it is another one */
            encoded[(data[0] >> 1) * 7919u % encoded_size] = (char)data[size - 1];
            try_text(encoded, encoded_size, NULL);
        }
        free(encoded);
    }
    free(text);
    return 0;
}
