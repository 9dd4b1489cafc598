/*
 * What a command prints: text gathered in memory, then written to standard output at once, so that
 * an error on the way leaves nothing half printed.
 */
#ifndef TOOL_OUTPUT_H
#define TOOL_OUTPUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct output {
    char *text;
    size_t size;
    size_t capacity;
    bool out_of_memory; /* seen at the next output_write */
    bool failed;        /* an output_write has failed and said so: nothing more is written */
} output;

void output_bytes(output *out, const void *bytes, size_t size);
void output_text(output *out, const char *text);
void output_format(output *out, const char *format, ...) __attribute__((format(printf, 2, 3)));
void output_spaces(output *out, size_t count);

/* Write everything gathered to standard output and empty the buffer.  False after an error message:
 * a full disk, a closed pipe. */
bool output_write(output *out);

/* output_write, and free the memory; returns the status to exit with. */
int output_finish(output *out);

void output_free(output *out);

/* Write all of it to a descriptor.  False with errno. */
bool write_fully(int fd, const void *bytes, size_t size);

/* ---------------------------------------------------------------- JSON
 * Commas are put where they belong by looking at the last byte written. */

void json_open(output *out, char bracket); /* '{' or '['; as an array's element */
void json_close(output *out, char bracket);
void json_key(output *out, const char *key);
void json_open_key(output *out, const char *key, char bracket);

/* Elements of an array, or the value of the key just written. */
void json_string(output *out, const void *bytes, size_t size); /* invalid UTF-8 as U+FFFD */
void json_text(output *out, const char *text);                 /* NULL: null */
void json_u64(output *out, uint64_t value);
void json_i64(output *out, int64_t value);
void json_bool(output *out, bool value);
void json_null(output *out);
void json_double(output *out, double value); /* reads back to the same; NaN: null */
void json_float(output *out, float value);   /* the same; -inf: null too */

void json_i32_list(output *out, const int32_t *values, size_t count);
void json_f32_list(output *out, const float *values, size_t count);

/* Session ids: "session_id", and where they are no UTF-8 their bytes as "session_id_hex". */
void json_session_id(output *out, const char *id, size_t size);

void output_hex(output *out, const void *bytes, size_t size);

/* Length of the well-formed UTF-8 sequence at `in`, 0 when there is none; *code gets its character.
 */
size_t utf8_decode(const unsigned char *in, size_t size, uint32_t *code);

#endif
