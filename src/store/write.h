/* Changes to one session inside a write transaction.  Internal; write.c and apply.c. */
#ifndef RST_SRC_STORE_WRITE_H
#define RST_SRC_STORE_WRITE_H

#include "internal.h"

/* A PUT, worked out: the record's bytes, and the state of the session that they were worked out
 * for. */
typedef struct rst_planned {
    uint8_t key[RST_KEY_SIZE];
    const void *bytes; /* NULL: not worked out yet */
    size_t size;
    uint64_t revision; /* the session's, 0 when it was not there */
    bool follows;      /* builds on an earlier change of the same rst_apply */
} rst_planned;

/* Entry of the change's session, its id compared. */
int rst_find_session(MDB_txn *txn, const rst_env *env, const rst_change *change,
                     const uint8_t key[RST_KEY_SIZE], rst_session_entry *entry, const char **id,
                     rst_error *error);

/* Work the PUT out inside the write transaction, unless the plan made before it still holds.
 * entry NULL: there is no such session. */
int rst_plan_in(rst_write *write, const rst_change *change, rst_planned *planned,
                const rst_session_entry *entry, rst_error *error);

int rst_write_put(rst_write *write, rst_change *change, rst_planned *planned, rst_error *error);
int rst_write_seal(rst_write *write, rst_change *change, const uint8_t key[RST_KEY_SIZE],
                   rst_error *error);
int rst_write_restart(rst_write *write, rst_change *change, const uint8_t key[RST_KEY_SIZE],
                      rst_error *error);
int rst_write_release_checked(rst_write *write, rst_change *change, const uint8_t key[RST_KEY_SIZE],
                              rst_error *error);

#endif
