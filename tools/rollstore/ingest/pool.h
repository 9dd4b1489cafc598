/* The worker processes as the parent sees them. */
#ifndef TOOL_INGEST_POOL_H
#define TOOL_INGEST_POOL_H

#include <stdatomic.h>
#include <sys/types.h>

#include "protocol.h"

#define POOL_INBOX_SIZE 8192 /* several reports with their texts */

typedef struct pool_worker {
    pid_t pid;
    int fd;      /* -1 when it has ended */
    char *queue; /* tasks, and lines of streams, that the socket had no room for */
    size_t queue_begin;
    size_t queue_end;
    size_t queue_capacity;
    uint64_t lines; /* given to it and not yet reported as done */
    uint64_t bytes; /* of these lines */
    bool finished;  /* said that it had done everything */
    char inbox[POOL_INBOX_SIZE];
    size_t inbox_size;
} pool_worker;

typedef struct pool {
    pool_worker *workers;
    size_t count;
    size_t alive;
    atomic_int *stop; /* shared with the workers */
    const ingest_settings *settings;
    const ingest_events *events;
    ingest_result *result;
} pool;

/* Start the workers; false when that failed, which was reported. */
bool pool_begin(pool *pool, const ingest_settings *settings, const ingest_events *events,
                ingest_result *result);

/* Give a task, with its line's bytes where it is TASK_LINE, to the worker of its session. */
void pool_give(pool *pool, const task *task, const char *bytes);

/* Tell every worker that there is no more. */
void pool_finish(pool *pool);

/* Tell every worker to store what is decoded, and no more. */
void pool_stop(pool *pool);

/* Bytes of lines that were given and are not done. */
uint64_t pool_pending(const pool *pool);

/* Send and receive what can be, waiting up to timeout_ms for it, or until `input` (-1: none) can be
 * read.  True when it can. */
bool pool_poll(pool *pool, int input, int timeout_ms);

/* Send a signal to the workers that are left. */
void pool_kill(pool *pool, int signal_number);

void pool_end(pool *pool); /* every worker has ended */

#endif
