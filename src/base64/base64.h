/*
 * Base64 as RFC 4648 section 4 has it: the standard alphabet, padding required, no white space, and
 * canonical (the bits that padding leaves over must be zero).  Internal.
 *
 * Every text has one decoding or one fault, the same on every path.  The fault is, in this order:
 *   1. the first byte that is neither in the alphabet nor rightful padding.  Padding is rightful in
 *      a text whose length is a multiple of four, as its last byte or its last two bytes;
 *   2. the end of the text, where its length is not a multiple of four;
 *   3. the last byte before the padding, where it has bits that belong to no byte.
 *
 * All functions may be called from any thread at any time.
 */
#ifndef RST_SRC_BASE64_H
#define RST_SRC_BASE64_H

#include <stddef.h>

#pragma GCC visibility push(hidden)

enum rst_base64_status {
    RST_BASE64_OK = 0,
    RST_BASE64_BAD_BYTE = 1,    /* a byte outside the alphabet */
    RST_BASE64_BAD_PADDING = 2, /* a "=" where none may stand, or none where the text ends */
    RST_BASE64_BAD_BITS = 3,    /* bits that belong to no byte are not zero */
    RST_BASE64_OUT_SIZE = 4     /* the call's own mistake: out_size is not the decoded size */
};

enum rst_base64_path {
    RST_BASE64_AUTO = 0, /* the fastest that this processor has */
    RST_BASE64_PORTABLE = 1,
    RST_BASE64_AVX2 = 2,
    RST_BASE64_AVX512 = 3, /* needs BW and VBMI */
    RST_BASE64_NEON = 4
};

/* Names the path to take: portable, avx2, avx512 or neon.  It is read once, at the first decoding.
 * A name that is unknown, or that this processor cannot run, counts as not set. */
#define RST_BASE64_SETTING "ROLLSTORE_SIMD"

/* How many bytes a text decodes to, from its length and its padding alone: the text may still be
 * refused.  A text whose length is not a multiple of four is refused here, and is read through for
 * that, so that *bad_offset is what rst_base64_decode would say.  bad_offset may be NULL. */
int rst_base64_decoded_size(const char *text, size_t size, size_t *decoded_size,
                            size_t *bad_offset);

/* Decode all of a text.  out_size must be its decoded size.  Nothing is read outside the text or
 * written outside out; neither needs alignment; they must not overlap.  On a fault the contents of
 * out are undefined and *bad_offset is the byte at fault (`size` where the text ends too early, and
 * for RST_BASE64_OUT_SIZE).  bad_offset may be NULL. */
int rst_base64_decode(const char *text, size_t size, void *out, size_t out_size,
                      size_t *bad_offset);

/* The length of the text that `size` bytes encode to: no line breaks, no NUL at the end.  Returns 0
 * for a size whose text would not fit a size_t (and for 0). */
size_t rst_base64_encoded_size(size_t size);

/* Write that text to out, which has room for rst_base64_encoded_size(size) bytes. */
void rst_base64_encode(const void *in, size_t size, char *out);

/* What a status means, for a message ("" for RST_BASE64_OK).  Static. */
const char *rst_base64_status_text(int status);

/* A set of the paths that this processor can run: bit 1 << path for each, and for AUTO. */
unsigned rst_base64_paths_available(void);

/* Take this path from now on, in all threads; RST_BASE64_AUTO goes back to the first choice.
 * Returns 0, or -1 (and changes nothing) where the processor cannot run it. */
int rst_base64_force(enum rst_base64_path path);

/* The path that decoding takes; never RST_BASE64_AUTO. */
enum rst_base64_path rst_base64_active_path(void);

/* "auto", "portable", "avx2", "avx512" or "neon"; NULL for no path.  Static. */
const char *rst_base64_path_name(enum rst_base64_path path);

#pragma GCC visibility pop

#endif
