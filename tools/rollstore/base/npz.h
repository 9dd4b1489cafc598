/* Writing NumPy's .npz: a zip archive of .npy files, uncompressed, so that numpy.load reads it. */
#ifndef TOOL_NPZ_H
#define TOOL_NPZ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define NPZ_ARRAY_COUNT_MAX 16

typedef struct npz_file npz_file;

/* Begin the archive beside `path`; it takes the path's place when it is whole.  NULL after an error
 * message. */
npz_file *npz_begin(const char *path);

/* Add an array: dtype as in .npy ("<i4", "<f4", "|u1", "<U12"); dimension_count 0 is a scalar.  The
 * bytes are not kept.  The first failure is remembered for npz_end. */
void npz_add(npz_file *npz, const char *name, const char *dtype, const uint64_t *shape,
             size_t dimension_count, const void *bytes, uint64_t size);

void npz_add_i64(npz_file *npz, const char *name, int64_t value);
void npz_add_f64(npz_file *npz, const char *name, double value);
void npz_add_text(npz_file *npz, const char *name, const char *text, size_t size); /* UTF-8 */

/* Write the directory and give the file its name.  False after an error message, and then the path
 * is as it was before. */
bool npz_end(npz_file *npz);

/* Give up: nothing is left behind. */
void npz_abandon(npz_file *npz);

#endif
