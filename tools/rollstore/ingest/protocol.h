/* What parent and worker say to each other over a socket: fixed structures of one program, and
 * bytes after them. */
#ifndef TOOL_INGEST_PROTOCOL_H
#define TOOL_INGEST_PROTOCOL_H

#include <stdint.h>

#include "ingest.h"

/* Parent to worker. */
typedef enum task_kind {
    TASK_LINE_OF_FILE = 1, /* read it from the source at offset */
    TASK_LINE = 2,         /* `size` bytes follow */
    TASK_FINISH = 3        /* there is no more: an end without it means that the parent is dead */
} task_kind;

typedef struct task {
    uint32_t kind;
    uint32_t source;
    uint64_t line; /* its number in the source, from 1 */
    uint64_t offset;
    uint64_t size;
    uint8_t key[RST_KEY_SIZE]; /* of the line's session */
} task;

/* Worker to parent. */
typedef enum report_kind {
    REPORT_DONE = 1,    /* counts of lines that are done */
    REPORT_REFUSED = 2, /* one line; text_size bytes of message follow */
    REPORT_FATAL = 3,   /* the store cannot be used; message follows; the worker ends */
    REPORT_FINISHED = 4 /* every line that came is done */
} report_kind;

typedef struct report {
    uint32_t kind;
    int32_t code;
    uint32_t source;
    uint32_t text_size;
    uint64_t line;
    ingest_counts counts;
    uint64_t line_count; /* lines that the report accounts for */
} report;

#endif
