#include "lines.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <rollstore/record.h>

void line_reader_begin(line_reader *reader, int fd)
{
    char *buffer = reader->buffer;
    size_t capacity = reader->capacity;
    memset(reader, 0, sizeof *reader);
    reader->buffer = buffer;
    reader->capacity = capacity;
    reader->fd = fd;
    /* Standard input may be a file that somebody else read the beginning of. */
    off_t offset = lseek(fd, 0, SEEK_CUR);
    reader->offset = offset > 0 ? (uint64_t)offset : 0;
}

void line_reader_free(line_reader *reader)
{
    free(reader->buffer);
    memset(reader, 0, sizeof *reader);
}

/* Room for another read behind what is there. */
static bool make_room(line_reader *reader)
{
    if (reader->begin) {
        memmove(reader->buffer, reader->buffer + reader->begin, reader->end - reader->begin);
        reader->end -= reader->begin;
        reader->scanned -= reader->begin;
        reader->begin = 0;
    }
    if (reader->capacity - reader->end >= LINE_READ_SIZE / 2) {
        return true;
    }
    size_t wanted = reader->capacity ? reader->capacity * 2 : LINE_READ_SIZE;
    char *grown = realloc(reader->buffer, wanted);
    if (!grown) {
        errno = ENOMEM;
        return false;
    }
    reader->buffer = grown;
    reader->capacity = wanted;
    return true;
}

static void drop(line_reader *reader, size_t size)
{
    reader->begin += size;
    reader->offset += size;
    if (reader->scanned < reader->begin) {
        reader->scanned = reader->begin;
    }
}

bool line_reader_fill(line_reader *reader)
{
    if (!make_room(reader)) {
        return false;
    }
    size_t room = reader->capacity - reader->end;
    size_t size = room < LINE_READ_SIZE_MAX ? room : LINE_READ_SIZE_MAX;
    ssize_t got;
    do {
        got = read(reader->fd, reader->buffer + reader->end, size);
    } while (got < 0 && errno == EINTR);
    if (got < 0) {
        return false;
    }
    reader->ended = got == 0;
    reader->end += (size_t)got;
    return true;
}

bool line_reader_next(line_reader *reader, text_line *line)
{
    size_t left = reader->end - reader->begin;
    /* A new reader has no buffer yet, and nothing to look at. */
    const char *found = reader->end > reader->scanned ? memchr(reader->buffer + reader->scanned,
                                                               '\n', reader->end - reader->scanned)
                                                      : NULL;
    reader->scanned = found ? reader->scanned : reader->end;
    bool whole = found || (reader->ended && (left || reader->skipping));
    size_t size = found ? (size_t)(found - (reader->buffer + reader->begin)) : left;
    bool too_long = reader->skipping || size > RST_REPLY_SIZE_MAX;
    if (!whole) {
        if (too_long) {
            reader->skipping = true;
            drop(reader, left);
        }
        return false;
    }
    line->bytes = too_long ? NULL : reader->buffer + reader->begin;
    line->size = too_long ? 0 : size;
    line->offset = reader->offset;
    line->number = ++reader->line;
    line->too_long = too_long;
    reader->skipping = false;
    drop(reader, size + (found ? 1 : 0));
    return true;
}
