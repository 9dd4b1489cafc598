/* What people see: sizes, ages, names without control characters, colours, a progress bar. */
#ifndef TOOL_TERMINAL_H
#define TOOL_TERMINAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "output.h"

#define TERMINAL_COLUMNS 80 /* where the width is not known */

void terminal_init(void); /* once, at the start */

/* Columns of the terminal on standard output, TERMINAL_COLUMNS when it is none. */
size_t terminal_columns(void);

/* ---------------------------------------------------------------- colours
 * Empty where standard output is no terminal, or NO_COLOR is set. */
typedef enum text_colour {
    COLOUR_NONE,
    COLOUR_BOLD,
    COLOUR_DIM,
    COLOUR_GOOD,
    COLOUR_BAD
} text_colour;
void output_colour(output *out, text_colour colour); /* COLOUR_NONE ends one */

/* ---------------------------------------------------------------- names
 * Bytes that somebody chose: control characters, bidirectional marks, invalid UTF-8 and backslashes
 * are written as \n, \u{2028}, \xff, so that none of them reaches the terminal. */

/* At most `columns` columns, the last one "…" when it was cut; 0: no limit.  Returns the columns.
 */
size_t output_shown(output *out, const void *bytes, size_t size, size_t columns);

/* ---------------------------------------------------------------- numbers */

#define TEXT_SIZE 32
/* "1 turn", "12,345 turns" */
void output_count(output *out, uint64_t count, const char *thing);
const char *size_text(uint64_t bytes, char buffer[TEXT_SIZE]);  /* "1.5 GiB" */
const char *short_size(uint64_t bytes, char buffer[TEXT_SIZE]); /* "1.5G", 5 columns at most */
const char *count_text(uint64_t count, char buffer[TEXT_SIZE]); /* "12,345" */
const char *age_text(int64_t unix_ns, char buffer[TEXT_SIZE]);  /* "3h", 4 columns at most */
const char *time_text(int64_t unix_ns, char buffer[TEXT_SIZE]); /* "2026-11-29 14:57:03 UTC" */
const char *number_text(double value, char buffer[TEXT_SIZE]);  /* NaN: "-" */

int64_t clock_ns(int clock); /* CLOCK_REALTIME, ... */

/* ---------------------------------------------------------------- progress
 * On standard error, and only where that is a terminal. */
typedef struct progress_bar {
    const char *what;
    uint64_t total; /* 0: not known */
    bool shown;
    bool drawn;
    int64_t begun_ns;
    int64_t drawn_ns;
} progress_bar;

void progress_begin(progress_bar *progress, const char *what, uint64_t total);
/* bytes: the counts are bytes, and a rate is shown. */
void progress_draw(progress_bar *progress, uint64_t done, bool bytes);
void progress_clear(progress_bar *progress); /* before other lines, and at the end */

#endif
