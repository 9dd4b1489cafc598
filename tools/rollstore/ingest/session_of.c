#include <string.h>

#include "ingest.h"

/* Where the value of the first "session_id" begins, behind its quote; NULL when there is none. */
static const char *find_value(const char *line, size_t size)
{
    static const char name[] = "\"session_id\"";
    const char *end = line + size;
    const char *at = memmem(line, size, name, sizeof name - 1);
    if (!at) {
        return NULL;
    }
    at += sizeof name - 1;
    while (at < end && memchr(" \t\r:", *at, 4)) {
        at++;
    }
    return at < end && *at == '"' ? at + 1 : NULL;
}

bool ingest_line_session(const char *line, size_t size, char *id, size_t *id_size, rst_error *error)
{
    if (rst_line_session(line, size, id, id_size, error) == RST_OK) {
        return true;
    }
    /* A line that is broken before its session_id can be read in order.  It will be refused, but
     * its session must be known as damaged, so look for the id as it is usually written. */
    const char *begin = find_value(line, size);
    const char *quote = begin ? memchr(begin, '"', size - (size_t)(begin - line)) : NULL;
    if (!quote || quote == begin || quote - begin > RST_SESSION_ID_SIZE_MAX ||
        memchr(begin, '\\', (size_t)(quote - begin))) {
        return false;
    }
    *id_size = (size_t)(quote - begin);
    memcpy(id, begin, *id_size);
    return true;
}
