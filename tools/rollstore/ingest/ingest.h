/*
 * Storing recorded sessions with several processes.
 *
 * The parent reads the inputs, finds where each line ends and which session it belongs to, and
 * hands it to the worker that owns the session: all lines of a session go to one worker, in order.
 * Of a regular file the worker gets offset and size and reads the line itself; of a stream it gets
 * the bytes.  Each worker opens the store after the fork, decodes, and applies many lines in one
 * transaction.
 *
 *   lines.c    an input cut into lines                 feed.c    the parent
 *   batch.c    decoding and applying, in a worker      worker.c  a worker's loop
 *   damaged.c  sessions that have refused lines      pool.c    the workers as the parent sees them
 *   session_of.c  which session a line belongs to
 */
#ifndef TOOL_INGEST_H
#define TOOL_INGEST_H

#include <stdbool.h>

#include <rollstore/rollstore.h>

#define INGEST_JOBS_MAX 256

/* One input, open. */
typedef struct ingest_source {
    const char *name; /* for messages */
    int fd;
    bool regular; /* workers read it by offset */
} ingest_source;

typedef struct ingest_settings {
    const char *store_path;
    const ingest_source *sources;
    size_t source_count;
    unsigned jobs;
    uint32_t topk;         /* as rst_line_decode */
    unsigned change_flags; /* RST_CHANGE_REPLACE */
    int64_t timeout_ms;    /* how long to wait for space */
} ingest_settings;

/* What became of lines.  Each line is counted once. */
typedef struct ingest_counts {
    uint64_t turns_stored;
    uint64_t sessions_sealed;
    uint64_t unchanged; /* turns and ends that stood there already */
    uint64_t refused;
    uint64_t bytes; /* of all these lines */
} ingest_counts;

#define INGEST_CODE_COUNT 128 /* over every rst_code */

typedef struct ingest_result {
    ingest_counts counts;
    uint64_t refused_by_code[INGEST_CODE_COUNT];
    uint64_t lost;   /* read, but not known to be stored: a worker ended, or the run was stopped */
    int interrupted; /* the signal that stopped it, or 0 */
    bool failed;     /* something that was reported went wrong beside refused lines */
} ingest_result;

/* Called as it happens. */
typedef struct ingest_events {
    void *context;
    void (*refused)(void *context, const char *source, uint64_t line, int code,
                    const char *message);
    void (*failed)(void *context, const char *kind, const char *message);
    void (*progress)(void *context, uint64_t bytes); /* several times a second */
} ingest_events;

/* Run until every input is read and every line is stored or refused, or SIGINT, SIGTERM or SIGHUP
 * comes. */
void ingest_run(const ingest_settings *settings, const ingest_events *events,
                ingest_result *result);

/* Which session a line belongs to, also where the line is broken.  False, with what is wrong with
 * the line, when nobody can tell.  id[RST_SESSION_ID_SIZE_MAX]. */
bool ingest_line_session(const char *line, size_t size, char *id, size_t *id_size,
                         rst_error *error);

#endif
