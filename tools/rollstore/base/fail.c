#include "fail.h"

#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "output.h"
#include "terminal.h"

/* In one write, so that lines of several processes do not mix; and without control characters,
 * since messages quote names that somebody chose. */
static void print_error(const char *kind, const char *message)
{
    output line = {0};
    output_format(&line, "rollstore: %s: ", kind);
    output_shown(&line, message, strlen(message), 0);
    output_text(&line, "\n");
    if (!line.out_of_memory) {
        /* Where standard error cannot be written either, there is nowhere left to say so. */
        (void)write_fully(STDERR_FILENO, line.text, line.size);
    }
    output_free(&line);
}

static void print_error_list(const char *kind, const char *format, va_list arguments)
{
    char *message = NULL;
    if (vasprintf(&message, format, arguments) < 0) {
        print_error(kind, "no memory for the message");
        return;
    }
    print_error(kind, message);
    free(message);
}

int fail(const char *kind, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    print_error_list(kind, format, arguments);
    va_end(arguments);
    return STATUS_FAILED;
}

int fail_usage(const char *command_name, const char *format, ...)
{
    char message[512];
    va_list arguments;
    va_start(arguments, format);
    int size = vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    const char *cut = size >= (int)sizeof message ? "..." : "";
    fail("usage", "%s: %s%s (rollstore %s --help)", command_name, message, cut, command_name);
    return STATUS_USAGE;
}

int fail_system(int number, const char *what)
{
    const char *kind = number == EACCES || number == EPERM ? "permission"
                       : number == ENOENT                  ? "not_found"
                       : number == ENOSPC                  ? "no_space"
                       : number == ENOMEM                  ? "memory"
                                                           : "io";
    return fail(kind, "%s: %s", what, strerror(number));
}

const char *error_text(const rst_error *error, char buffer[ERROR_TEXT_SIZE])
{
    /* Fields of replies; those of calls are names of arguments that a user never wrote. */
    bool of_reply = error->code < RST_ERR_ARGUMENT;
    bool named = !of_reply || !*error->field || strstr(error->message, error->field);
    char place[32] = "";
    if (error->offset >= 0) {
        snprintf(place, sizeof place, "byte %lld", (long long)error->offset);
    }
    const char *field = named ? "" : error->field;
    if (!*field && !*place) {
        snprintf(buffer, ERROR_TEXT_SIZE, "%s", error->message);
    } else {
        snprintf(buffer, ERROR_TEXT_SIZE, "%s (%s%s%s)", error->message, field,
                 *field && *place ? ", " : "", place);
    }
    return buffer;
}

int fail_error(const rst_error *error)
{
    char text[ERROR_TEXT_SIZE];
    return fail(rst_code_name(error->code), "%s", error_text(error, text));
}
