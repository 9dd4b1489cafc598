/* How the tool ends and what it says when something is wrong. */
#ifndef TOOL_FAIL_H
#define TOOL_FAIL_H

#include <rollstore/error.h>

/* Exit statuses, as --help documents them. */
#define STATUS_OK 0
#define STATUS_FAILED 1 /* something failed, was refused or is faulty */
#define STATUS_USAGE 2  /* the command line makes no sense */

/* One line on standard error: "rollstore: KIND: message".  Each returns the status to exit with. */

int fail(const char *kind, const char *format, ...) __attribute__((format(printf, 2, 3)));
int fail_error(const rst_error *error);
int fail_system(int number, const char *what); /* errno `number` while doing `what` */
int fail_usage(const char *command_name, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* The message with the field and the place that it does not name itself. */
#define ERROR_TEXT_SIZE (RST_ERROR_MESSAGE_SIZE + RST_ERROR_FIELD_SIZE + 64)
const char *error_text(const rst_error *error, char buffer[ERROR_TEXT_SIZE]);

#endif
