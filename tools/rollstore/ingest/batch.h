/* A worker's lines: decoded one by one, applied many at a time. */
#ifndef TOOL_INGEST_BATCH_H
#define TOOL_INGEST_BATCH_H

#include <stdbool.h>

#include "damaged.h"
#include "protocol.h"

#define BATCH_LINES 32
#define BATCH_BYTES                                                                                \
    ((uint64_t)8 << 20) /* of lines: few enough that other writers get their turn                  \
                         */

typedef struct batch_line {
    rst_record *record; /* kept between lines for its memory */
    rst_line line;
    task task;
} batch_line;

typedef struct batch {
    const ingest_settings *settings;
    rst_store *store;
    int reports; /* socket */
    batch_line lines[BATCH_LINES];
    size_t count;
    uint64_t bytes;
    uint64_t bytes_max; /* BATCH_BYTES, less in a small store */
    damaged_set damaged;
    bool stalled; /* a whole timeout passed without room: the next lines do not wait again */
} batch;

/* Each returns false when the worker has to end; the parent was told why. */
bool batch_begin(batch *batch, const ingest_settings *settings, int reports);
bool batch_add(batch *batch, const task *added, const char *bytes);
bool batch_flush(batch *batch);

/* Refuse a line, here one that could not even be read. */
bool batch_refuse(batch *batch, const task *refused, const rst_error *error);

void batch_end(batch *batch);

#endif
