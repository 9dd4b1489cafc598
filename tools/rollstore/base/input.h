/* Reading a whole file or standard input. */
#ifndef TOOL_INPUT_H
#define TOOL_INPUT_H

#include <stdbool.h>
#include <stddef.h>

typedef struct input_bytes {
    char *bytes;
    size_t size;
} input_bytes;

/* path: NULL or "-" is standard input.  More than `max` bytes are refused ("limit").  False after
 * an error message; input_free afterwards in any case. */
bool input_read(input_bytes *input, const char *path, size_t max);
void input_free(input_bytes *input);

#endif
