/* Filling an rst_error.  Internal. */
#ifndef RST_SRC_ERROR_H
#define RST_SRC_ERROR_H

#include <stddef.h>

#include <rollstore/error.h>

/* Each returns the code it was given, so that a function can end with `return rst_fail(...)`.
 * error may be NULL; field may be NULL for none. */
int rst_fail(rst_error *error, int code, const char *field, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* The same with the byte offset in the input at which it went wrong. */
int rst_fail_at(rst_error *error, int code, const char *field, int64_t offset, const char *format,
                ...) __attribute__((format(printf, 5, 6)));

/* With errno `system`, whose text is appended to the message. */
int rst_fail_system(rst_error *error, int code, int system, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* Make an error empty; every public function begins with it. */
void rst_error_clear(rst_error *error);

/* A session id for a message: at most 64 bytes, control characters replaced, always valid UTF-8.
 * Returns buffer. */
#define RST_SHOWN_ID_SIZE 80
const char *rst_shown_id(const void *id, size_t size, char buffer[RST_SHOWN_ID_SIZE]);

#endif
