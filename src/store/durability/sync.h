/* Making commits durable, see sync.c.  Internal. */
#ifndef RST_SRC_STORE_SYNC_H
#define RST_SRC_STORE_SYNC_H

#include "../internal.h"

/* Pin what is synced, syncing first where something is not, and start the thread.  To be done
 * before this process writes the first time. */
int rst_syncer_start(rst_env *env, rst_error *error);

/* Sync what is left and end the thread.  The error is of that last sync; all is freed. */
int rst_syncer_stop(rst_env *env, rst_error *error);

/* RST_ERR_IO when a sync has failed, in any process: what is written now would not be safe. */
int rst_syncer_check(const rst_env *env, rst_error *error);

/* Sync everything that is committed. */
int rst_syncer_now(rst_env *env, rst_error *error);

/* Sync, and let go of the pages that were freed before; the other processes are asked to.
 * *made becomes true when this process held some. */
int rst_syncer_give_back(rst_env *env, bool *made, rst_error *error);

#endif
