/*
 * What the decoder's paths have in common.  Internal to src/base64 and its test.
 *
 * A kernel decodes whole groups of four characters, without padding: text holds `size` characters
 * (a multiple of four), out has room for size / 4 * 3 bytes.  It returns how many characters it has
 * decoded, a multiple of four.  A vector kernel may leave a rest undone, and stops before the block
 * that has a bad byte; the portable kernel then takes over, leaves nothing undone, and stops only
 * at the very group with the bad byte.  So the fault is found by the same code on every path.
 *
 * No kernel reads past text + size or writes past out + size / 4 * 3.  Within that, what stands
 * after the decoded part of out is undefined.
 */
#ifndef RST_SRC_BASE64_KERNEL_H
#define RST_SRC_BASE64_KERNEL_H

#include <stddef.h>
#include <stdint.h>

#include "base64/base64.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define RST_BASE64_HAVE_X86 1
#endif
#if defined(__aarch64__) && defined(__ARM_NEON)
#define RST_BASE64_HAVE_NEON 1
#endif

#pragma GCC visibility push(hidden)

typedef size_t (*rst_base64_kernel)(const uint8_t *text, size_t size, uint8_t *out);

size_t rst_base64_kernel_portable(const uint8_t *text, size_t size, uint8_t *out);
#ifdef RST_BASE64_HAVE_X86
size_t rst_base64_kernel_avx2(const uint8_t *text, size_t size, uint8_t *out);
size_t rst_base64_kernel_avx512(const uint8_t *text, size_t size, uint8_t *out);
#endif
#ifdef RST_BASE64_HAVE_NEON
size_t rst_base64_kernel_neon(const uint8_t *text, size_t size, uint8_t *out);
#endif

struct rst_base64_path_entry {
    enum rst_base64_path id;
    const char *name;
    rst_base64_kernel kernel;
};

/* What decoding goes by now; and another to go by (it must outlive its use), with which a test can
 * see that its kernel, and no other, is what runs. */
const struct rst_base64_path_entry *rst_base64_active_entry(void);
void rst_base64_use_entry(const struct rst_base64_path_entry *entry);

/* The six bits that a character stands for, or RST_BASE64_NO_VALUE. */
uint8_t rst_base64_value(uint8_t character);

#pragma GCC visibility pop

#define RST_BASE64_NO_VALUE 0x80

/* The same as a constant expression, from which the compiler makes every lookup table. */
#define RST_BASE64_VALUE(c)                                                                        \
    ((uint8_t)((c) >= 'A' && (c) <= 'Z'   ? (c) - 'A'                                              \
               : (c) >= 'a' && (c) <= 'z' ? (c) - 'a' + 26                                         \
               : (c) >= '0' && (c) <= '9' ? (c) - '0' + 52                                         \
               : (c) == '+'               ? 62                                                     \
               : (c) == '/'               ? 63                                                     \
                                          : RST_BASE64_NO_VALUE))

/* entry(c) for 16, 64 or 128 characters from c on. */
#define RST_BASE64_4(entry, c) entry(c), entry((c) + 1), entry((c) + 2), entry((c) + 3)
#define RST_BASE64_16(entry, c)                                                                    \
    RST_BASE64_4(entry, c), RST_BASE64_4(entry, (c) + 4), RST_BASE64_4(entry, (c) + 8),            \
        RST_BASE64_4(entry, (c) + 12)
#define RST_BASE64_64(entry, c)                                                                    \
    RST_BASE64_16(entry, c), RST_BASE64_16(entry, (c) + 16), RST_BASE64_16(entry, (c) + 32),       \
        RST_BASE64_16(entry, (c) + 48)
#define RST_BASE64_128(entry, c) RST_BASE64_64(entry, c), RST_BASE64_64(entry, (c) + 64)

#endif
