/* An input cut into lines. */
#ifndef TOOL_INGEST_LINES_H
#define TOOL_INGEST_LINES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define LINE_READ_SIZE ((size_t)1 << 20)
#define LINE_READ_SIZE_MAX ((size_t)1 << 23) /* so that a signal is seen between two reads */

typedef struct line_reader {
    int fd;
    char *buffer;
    size_t capacity;
    size_t begin;    /* of what is not yet taken */
    size_t end;      /* of what was read */
    size_t scanned;  /* no line ends between begin and here */
    uint64_t offset; /* of buffer[begin] in the input */
    uint64_t line;   /* number of the last line taken */
    bool ended;      /* the input has ended */
    bool skipping;   /* the rest of a line that was too long */
} line_reader;

typedef struct text_line {
    const char *bytes; /* without its end; until the next call of line_reader_fill */
    size_t size;
    uint64_t offset;
    uint64_t number; /* from 1 */
    bool too_long;   /* over the limit of a reply; it has no bytes */
} text_line;

/* Take up another input; the memory is kept. */
void line_reader_begin(line_reader *reader, int fd);
void line_reader_free(line_reader *reader);

/* Read once.  False with errno. */
bool line_reader_fill(line_reader *reader);

/* The next line that is there in full, and the last one without its end once the input has ended.
 * False when there is none. */
bool line_reader_next(line_reader *reader, text_line *line);

#endif
