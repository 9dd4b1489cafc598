/*
 * What the processor's wide registers do for a record: looking at a row, and the checksum.
 * Internal.
 *
 * Each set of functions has its own file, whose code alone uses those instructions (function target
 * attributes).  The portable ones work everywhere and are the meaning; tests compare the others
 * with them.  Chosen at first use; ROLLSTORE_SIMD names another one ("portable", "avx2", "avx512")
 * that the processor has.
 */
#ifndef RST_SRC_LAYOUT_SIMD_H
#define RST_SRC_LAYOUT_SIMD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Rows up to this width are compared whole, each id with each; wider ones need the stamps of
 * check.c. */
#define RST_ROW_COMPARED_MAX 64

typedef struct rst_simd {
    const char *name;
    /* May a row hold a value that check.c must look at: an id below 0, a logprob that is NaN or
     * over RST_LOGPROB_MAX?  Never false when it does. */
    bool (*suspicious)(const int32_t *ids, const float *logprobs, uint32_t count);
    /* Does an id stand twice among `count` (1 to RST_ROW_COMPARED_MAX) ids?  Exact.  NULL: use
     * stamps. */
    bool (*repeats)(const int32_t *ids, uint32_t count);
    uint64_t (*hash)(const void *bytes, size_t size); /* XXH3-64, seed 0 */
} rst_simd;

extern const rst_simd rst_simd_portable;
#if defined(__x86_64__)
extern const rst_simd rst_simd_avx2;
extern const rst_simd rst_simd_avx512;
#endif

/* The set in use. */
const rst_simd *rst_simd_active(void);

/* Use the set of that name from now on, in all threads; false where there is none or the processor
 * cannot run it. */
bool rst_simd_force(const char *name);

#endif
