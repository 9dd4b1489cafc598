/* What the store's files share.  Internal; knows LMDB and the layout, no JSON. */
#ifndef RST_SRC_STORE_INTERNAL_H
#define RST_SRC_STORE_INTERNAL_H

#include <lmdb.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include <rollstore/store.h>

#include "../error.h"
#include "../layout/record.h"

#define RST_TURN_KEY_SIZE 24 /* session or consumer key, then a big-endian u64 */
#define RST_READY_KEY_SIZE 8 /* a big-endian u64 */
#define RST_READER_COUNT_MAX 65536u

/* One LMDB environment of this process: LMDB forbids a second one of the same files. */
typedef struct rst_env {
    struct rst_env *next; /* in the process's list */
    dev_t device;
    ino_t inode;
    unsigned handles; /* rst_store that use it */
    bool read_only;
    uint64_t generation; /* rst_fork_generation when it was opened */
    MDB_env *lmdb;
    MDB_dbi meta, sessions, turns, ready, consumers, leases;
    rst_format_entry format;
    const unsigned char *map;
    size_t map_size;
    uint64_t capacity_pages;    /* pages that values may lie in */
    _Atomic(uint64_t) *checked; /* records checked before, see read.c; NULL until the first */
    struct rst_guard *guard;    /* guard.bin */
    struct rst_syncer *syncer;  /* RST_DURABILITY_INTERVAL, open for writing; NULL else */
} rst_env;

struct rst_store {
    rst_env *env;
    char *path;
    unsigned flags;
    atomic_uint snapshots; /* open ones */
};

struct rst_snapshot {
    rst_store *store;
    MDB_txn *txn;
};

/* Raised in the child of each fork; handles of another generation are refused. */
extern atomic_uint_fast64_t rst_fork_generation;

/* RST_ERR_FORKED, RST_ERR_READ_ONLY. */
int rst_store_usable(const rst_store *store, bool to_write, rst_error *error);

/* Turn an LMDB result into an rst_code; `what` says what was being done. */
int rst_fail_lmdb(rst_error *error, int result, const char *what);

/* ---------------------------------------------------------------- a write transaction
 * Holds the one write lock of all processes: no parsing, no waiting, no system call that blocks. */

typedef struct rst_write {
    rst_store *store;
    MDB_txn *txn;
    rst_totals_entry totals; /* written back by rst_write_commit when changed */
    bool changed;            /* something was written: without it commit becomes abort */
    bool freed;              /* a turn was deleted or replaced */
} rst_write;

/* The transaction alone, with the lock of rst_guard_lock_writing, which its end must give back.
 * 0 or LMDB's result. */
int rst_begin_writing(rst_env *env, MDB_txn **txn);

/* A snapshot's; a full table is tried once more without the dead.  0 or LMDB's result. */
int rst_begin_reading(rst_env *env, MDB_txn **txn);
int rst_clear_dead_readers(rst_env *env, int *dead);

/* For changes that need little room: at capacity, where open snapshots and syncs hold the pages
 * kept for them, it waits for those up to RST_ROOM_PATIENCE_MS.  Not for who has a snapshot open.
 */
int rst_write_begin(rst_store *store, rst_write *write, rst_error *error);
#define RST_ROOM_PATIENCE_MS 5000
int rst_write_begin_now(rst_store *store, rst_write *write, rst_error *error); /* without that */
int rst_write_commit(rst_write *write, rst_error *error); /* aborts on any error */
void rst_write_abort(rst_write *write);                   /* also after a commit: does nothing */

/* After RST_ERR_FULL, without a transaction: make released pages usable that only LMDB's order of
 * things or a sync holds back.  *made: something was done, so that trying again may succeed. */
int rst_write_make_room(rst_store *store, bool *made, rst_error *error);

/* Delete one session, its turns and its place in the ready order.  RST_ERR_NOT_FOUND. */
int rst_write_release(rst_write *write, const uint8_t key[RST_KEY_SIZE], rst_error *error);

/* RST_ERR_HELD when a consumer has not committed the sealed session of that sequence number; in
 * consumer_release.c. */
int rst_write_releasable(rst_write *write, uint64_t sequence, rst_error *error);

/* Hand each fault of the consumers' entries and leases to report; in consumer_verify.c. */
int rst_verify_consumers(rst_snapshot *snapshot, uint64_t next_sequence,
                         void (*report)(void *context, const rst_error *fault), void *context,
                         rst_error *error);

/* ---------------------------------------------------------------- keys and entries */

void rst_put_be64(unsigned char *out, uint64_t value);
uint64_t rst_get_be64(const unsigned char *in);
void rst_turn_key(unsigned char out[RST_TURN_KEY_SIZE], const uint8_t key[RST_KEY_SIZE],
                  uint64_t number);

/* RST_ERR_ARGUMENT for an id that is empty or over RST_SESSION_ID_SIZE_MAX. */
int rst_check_session_id(const void *session, size_t session_size, rst_error *error);

/* Check the stored bytes of an entry.  RST_ERR_CORRUPT, RST_ERR_VERSION. */
int rst_parse_session(const MDB_val *value, rst_session_entry *entry, const char **id,
                      rst_error *error);
int rst_read_totals(MDB_txn *txn, const rst_env *env, rst_totals_entry *totals, rst_error *error);
int rst_read_format(MDB_txn *txn, MDB_dbi meta, rst_format_entry *format, rst_error *error);

/* Read and check an entry; *id points into the map.  RST_ERR_NOT_FOUND, RST_ERR_CORRUPT. */
int rst_read_session(MDB_txn *txn, const rst_env *env, const uint8_t key[RST_KEY_SIZE],
                     rst_session_entry *entry, const char **id, rst_error *error);

/* Read a turn and check its structure and key; *value (NULL allowed) gets the stored bytes.
 * RST_ERR_NOT_FOUND, RST_ERR_CORRUPT. */
int rst_read_turn(MDB_txn *txn, const rst_env *env, const uint8_t key[RST_KEY_SIZE], uint32_t turn,
                  rst_turn *out, MDB_val *value, rst_error *error);

/* ---------------------------------------------------------------- waiting */

/* Milliseconds-deadline helper: timeout_ms as in store.h. */
typedef struct rst_deadline {
    bool forever;
    int64_t at_ns; /* CLOCK_MONOTONIC */
} rst_deadline;
rst_deadline rst_deadline_in(int64_t timeout_ms);
bool rst_deadline_passed(const rst_deadline *deadline);

/* Sleep until another transaction than `seen` is the last one, or the deadline.  False at the
 * deadline.  Looks at LMDB's number in shared memory, in growing pauses. */
bool rst_wait_for_commit(rst_env *env, uint64_t seen, const rst_deadline *deadline);
uint64_t rst_last_transaction(rst_env *env);

int64_t rst_clock_ns(clockid_t clock);

/* RST_ERR_GONE when the store's files were deleted: what is written then, nobody will find. */
int rst_check_not_deleted(const rst_store *store, rst_error *error);

/* ---------------------------------------------------------------- creating */

int rst_lmdb_open(const char *path, unsigned flags, unsigned reader_count, mode_t mode,
                  uint64_t map_size, MDB_env **out, rst_error *error);
void rst_lmdb_close(MDB_env *lmdb);
int rst_open_databases(rst_env *env, MDB_txn *txn, unsigned flags, rst_error *error);
int rst_allocate_data(MDB_env *lmdb, uint64_t size, const char *path, rst_error *error);

/* The format entry of a store with these settings; NULL for defaults. */
int rst_make_format(const rst_create_options *options, rst_format_entry *format, rst_error *error);

/* A new store at `path`; success too when another process creates it at this moment, unless
 * RST_OPEN_EXCLUSIVE. */
int rst_create(const char *path, unsigned flags, const rst_create_options *options,
               rst_error *error);

/* Make a folder with a store in it at `path`: `fill` writes the files into a folder of another
 * name, which then takes its name. */
int rst_create_folder(const char *path, unsigned flags, const rst_format_entry *format,
                      int (*fill)(const char *folder, mode_t mode, const rst_format_entry *format,
                                  rst_error *error, void *context),
                      void *context, rst_error *error);

#endif
