/* SHA-256 of fixtures. */
#ifndef RST_TESTS_SHA256_H
#define RST_TESTS_SHA256_H

#include <stddef.h>

/* In lower-case hexadecimal, with a NUL. */
void sha256_hex(const void *data, size_t size, char out[65]);

#endif
