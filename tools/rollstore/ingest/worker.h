/* A worker's process. */
#ifndef TOOL_INGEST_WORKER_H
#define TOOL_INGEST_WORKER_H

#include <stdatomic.h>

#include "ingest.h"

/* Take tasks from the socket until the parent says that there are no more; returns the process's
 * exit status.  *stop: shared with the parent; when set, what is decoded is stored and no more. */
int worker_main(const ingest_settings *settings, int socket, const atomic_int *stop);

#endif
