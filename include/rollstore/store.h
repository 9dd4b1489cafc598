/*
 * rollstore/store.h: the store: sessions and turns in one LMDB environment in shared memory or on
 * disk.
 *
 * Sessions are named by any bytes of 1 to RST_SESSION_ID_SIZE_MAX, meant as UTF-8.  Timeouts are in
 * milliseconds; 0 does not wait, RST_FOREVER waits without end.
 */
#ifndef ROLLSTORE_STORE_H
#define ROLLSTORE_STORE_H

#include <stddef.h>
#include <stdint.h>

#include <rollstore/error.h>
#include <rollstore/layout.h>
#include <rollstore/record.h>

#ifdef __cplusplus
extern "C" {
#endif

#define RST_FOREVER (-1)

/* ---------------------------------------------------------------- open */

typedef struct rst_store rst_store;

#define RST_CAPACITY_DEFAULT (UINT64_C(1) << 30) /* bytes */
#define RST_CAPACITY_MIN (UINT64_C(1) << 20)     /* bytes */
#define RST_READER_COUNT_DEFAULT 1024            /* slots */
#define RST_INTERVAL_DEFAULT_MS 100

#define RST_OPEN_READ_ONLY 0x1u /* map read-only; the data file needs no write permission */
#define RST_OPEN_CREATE 0x2u    /* create the store when there is none at the path */
#define RST_OPEN_EXCLUSIVE 0x4u /* with RST_OPEN_CREATE: RST_ERR_EXISTS when there is one */
#define RST_OPEN_GROUP 0x8u  /* with RST_OPEN_CREATE: files 0660 and folder 0770, not 0600, 0700 */
#define RST_OPEN_TRUST 0x10u /* skip the check of each record's contents at its first reading */

/* Settings of creation; an existing store keeps its own.  Zero means the default. */
typedef struct rst_create_options {
    uint64_t capacity_size;    /* bytes of turns; RST_CAPACITY_DEFAULT.  All of it is allocated from
                                  the    file system at creation, so that it cannot run out later. */
    rst_durability durability; /* RST_DURABILITY_MEMORY */
    uint32_t interval_ms;      /* of RST_DURABILITY_INTERVAL; RST_INTERVAL_DEFAULT_MS */
    uint32_t reader_count;     /* RST_READER_COUNT_DEFAULT: open snapshots of all processes */
} rst_create_options;

/*
 * Open the store at `path` (a folder).
 *
 * flags: RST_OPEN_*.  create: NULL for defaults; looked at only when a store is created.
 * The handle may be used by several threads.  Opening one store several times in a process, also by
 * different paths, shares one LMDB environment; a process that has it open read-only must open it
 * for writing before or close it first (RST_ERR_BUSY).  After fork, calls on an inherited handle
 * return RST_ERR_FORKED: open again in the child, and close the inherited one to free its memory.
 * The first opening after a restart of the machine brings back what the durability promises, see
 * rst_durability; RST_ERR_CORRUPT when that is not there.  All processes of a store must be in one
 * PID namespace: RST_ERR_BUSY for one that comes from another (a container's own, usually).
 *
 * A damaged or foreign data file is refused: RST_ERR_NOT_STORE for what is no store,
 * RST_ERR_VERSION for a format of a later one, else RST_ERR_CORRUPT.  For that every opening looks
 * at the pages of LMDB's trees, which LMDB takes on trust; not at the turns, and for reading not at
 * the lists of free pages.  It costs about 40 ns for each turn stored, and ten times that where the
 * trees must come from a disk.  A record is checked when this process first reads it (see
 * RST_OPEN_TRUST), its checksum by rst_store_verify.
 */
RST_API int rst_store_open(const char *path, unsigned flags, const rst_create_options *create,
                           rst_store **store, rst_error *error);

/* Close the handle.  RST_ERR_BUSY, and nothing closed, while its snapshots are open.  Takes NULL.
 * RST_ERR_IO when the last sync of RST_DURABILITY_INTERVAL fails: the handle is closed then. */
RST_API int rst_store_close(rst_store *store, rst_error *error);

/* The path the store was opened by; lives as long as the handle. */
RST_API const char *rst_store_path(const rst_store *store);

/* ---------------------------------------------------------------- writing */

typedef struct rst_outcome {
    rst_outcome_status status; /* not RST_STATUS_NONE */
    double reward;             /* NaN for none */
    int64_t group_index;       /* or RST_NO_INDEX */
    int64_t index;             /* or RST_NO_INDEX */
} rst_outcome;

typedef enum rst_change_kind {
    RST_CHANGE_PUT = 1,     /* store record as session's turn `turn` */
    RST_CHANGE_SEAL = 2,    /* give the session its outcome and its place in the ready order */
    RST_CHANGE_RESTART = 3, /* drop an open session's turns from `turn` on, for a retry */
    RST_CHANGE_RELEASE = 4  /* delete the session, open or sealed */
} rst_change_kind;

#define RST_CHANGE_REPLACE                                                                         \
    0x1u /* PUT, SEAL: other bytes or another outcome take the old one's place */
#define RST_CHANGE_FORCE 0x2u /* RELEASE: also when a consumer has not finished with it */

typedef struct rst_change {
    rst_change_kind kind;
    unsigned flags; /* RST_CHANGE_* */
    const void *session;
    size_t session_size; /* bytes */
    uint32_t turn;       /* PUT, RESTART */
    rst_record *record;  /* PUT; its header and prompt are completed in place */
    rst_outcome outcome; /* SEAL */
    int unchanged;       /* set by rst_apply: what was asked for stood there already */
} rst_change;

/*
 * Apply `count` changes in one transaction, all or none, in their order.  On RST_OK they are
 * committed, with what the store's durability promises; on any error nothing has changed and
 * error->index tells the change at fault.
 *
 * PUT: turns come in order: turn must be at most the session's turn count (RST_ERR_ORDER).  Turn 0
 * of an unknown session opens it.  The same bytes again are a success and change nothing, also in a
 * sealed session; other bytes are RST_ERR_CONFLICT, or with RST_CHANGE_REPLACE take the old ones'
 * place, when the session is open and either the turn is its last or prompt and tokens stay the
 * same (later prompts build on them).  A prompt is stored as what it adds to the session's
 * sequence; a prompt that contradicts it is stored too, and makes assembling the sample
 * RST_ERR_ALIGNMENT. SEAL: RST_ERR_NOT_FOUND for an unknown session; the same outcome again changes
 * nothing. RESTART: RST_ERR_SEALED for a sealed session; from turn 0 on it drops the session as a
 * whole. RELEASE: RST_ERR_NOT_FOUND; RST_ERR_HELD when a consumer has not committed it.
 *
 * At capacity, PUT waits up to timeout_ms for space (RST_ERR_FULL).  A release never waits for
 * space; with RST_DURABILITY_INTERVAL, what was released is there after the next sync, which this
 * call makes where it needs to, and for which it may have to wait for other processes. No timeout
 * is counted while another process writes, nor while it is stopped (SIGSTOP, a debugger) in the
 * middle of that; a killed one holds up nobody. Other errors: RST_ERR_READ_ONLY, _FORKED, _GONE,
 * _LIMIT, _IO; for PUT _READERS, as it looks at a snapshot first.
 *
 * When the process is killed in this call, the changes are made as a whole or not at all; which,
 * is settled by the next write of any process.
 */
RST_API int rst_apply(rst_store *store, rst_change *changes, size_t count, int64_t timeout_ms,
                      rst_error *error);

/* rst_apply with one change each. */
RST_API int rst_put(rst_store *store, const void *session, size_t session_size, uint32_t turn,
                    rst_record *record, unsigned flags, int64_t timeout_ms, rst_error *error);
RST_API int rst_seal(rst_store *store, const void *session, size_t session_size,
                     const rst_outcome *outcome, unsigned flags, rst_error *error);
RST_API int rst_restart(rst_store *store, const void *session, size_t session_size,
                        uint32_t from_turn, rst_error *error);
RST_API int rst_release(rst_store *store, const void *session, size_t session_size, unsigned flags,
                        rst_error *error);

/* Write everything committed so far to the disk, whatever the durability. */
RST_API int rst_store_sync(rst_store *store, rst_error *error);

/* ---------------------------------------------------------------- reading */

typedef struct rst_snapshot rst_snapshot;

/*
 * The store as of the last commit: one LMDB read transaction.  Everything read from it points into
 * the map, stays valid and does not change until the snapshot is closed.  A snapshot may move
 * between threads but is used by one at a time.  An open snapshot keeps released pages from being
 * used again: close it soon.  RST_ERR_READERS when every reader slot is taken by a living process.
 */
RST_API int rst_snapshot_open(rst_store *store, rst_snapshot **snapshot, rst_error *error);
RST_API void rst_snapshot_close(rst_snapshot *snapshot); /* takes NULL */

/* LMDB's number of the last transaction the snapshot sees. */
RST_API uint64_t rst_snapshot_id(const rst_snapshot *snapshot);

/* A session's entry.  Pointers live as long as the snapshot. */
typedef struct rst_session {
    const char *id; /* id_size bytes, no NUL at the end */
    size_t id_size;
    uint8_t key[RST_KEY_SIZE];
    rst_state state;
    uint64_t sequence; /* 0 while open */
    uint32_t turn_count;
    uint32_t topk;
    rst_outcome outcome; /* status RST_STATUS_NONE while open */
    uint64_t generated_count;
    uint64_t sequence_count;
    uint64_t value_size;
    int64_t weight_version_min;
    int64_t weight_version_max;
    int64_t created_ns;
    int64_t changed_ns;
} rst_session;

/* RST_ERR_NOT_FOUND when there is none. */
RST_API int rst_session_get(rst_snapshot *snapshot, const void *session, size_t session_size,
                            rst_session *out, rst_error *error);

/* The first session after `key` in key order (NULL: the first of all); every session is met once.
 * RST_ERR_NOT_FOUND at the end. */
RST_API int rst_session_next(rst_snapshot *snapshot, const uint8_t *key, rst_session *out,
                             rst_error *error);

/* The first sealed session whose sequence number is over `sequence` (0: the oldest).
 * RST_ERR_NOT_FOUND at the end. */
RST_API int rst_ready_next(rst_snapshot *snapshot, uint64_t sequence, rst_session *out,
                           rst_error *error);

/* One turn's arrays, in the map.  RST_ERR_NOT_FOUND, RST_ERR_CORRUPT. */
RST_API int rst_turn_get(rst_snapshot *snapshot, const void *session, size_t session_size,
                         uint32_t turn, rst_turn *out, rst_error *error);

/* The same by session key, as rst_session.key gives it: no id to compare. */
RST_API int rst_turn_get_by_key(rst_snapshot *snapshot, const uint8_t *key, uint32_t turn,
                                rst_turn *out, rst_error *error);

/* The stored value itself, for tools: *value points at its header in the map. */
RST_API int rst_turn_value(rst_snapshot *snapshot, const uint8_t *key, uint32_t turn,
                           const void **value, size_t *value_size, rst_error *error);

/*
 * Wait until a session is sealed with a sequence number over `after`, without spinning and without
 * holding a snapshot.  *newest gets the newest sequence number given out (NULL allowed).
 * RST_ERR_TIMEOUT.
 */
RST_API int rst_ready_wait(rst_store *store, uint64_t after, int64_t timeout_ms, uint64_t *newest,
                           rst_error *error);

/* Where the map lies in this process, and its size in bytes: every array of a snapshot is inside.
 */
RST_API int rst_store_map(rst_store *store, const void **map, size_t *map_size, rst_error *error);

/* ---------------------------------------------------------------- looking after a store */

typedef struct rst_stat {
    rst_format_entry format;
    rst_totals_entry totals;
    uint64_t session_count;
    uint64_t used_size;        /* bytes of pages in use, at most map_size */
    uint64_t free_size;        /* bytes of pages that the next writes can take */
    uint64_t pinned_size;      /* bytes of freed pages that an open snapshot still holds */
    uint64_t last_transaction; /* LMDB's number of the last commit */
    uint32_t readers_used;     /* open snapshots and idle slots of living processes */
    uint32_t reader_pid;       /* process with the oldest open snapshot, 0 when none; with
                                  RST_DURABILITY_INTERVAL each process that may write has one, of
                                  the last sync */
    uint64_t reader_age;       /* transactions committed since that snapshot */
    int read_only_files;       /* this process may not write the data file */
} rst_stat;

/* Costs no reading of the data. */
RST_API int rst_store_stat(rst_store *store, rst_stat *out, rst_error *error);

/* Clear the reader slots of dead processes; *cleared gets their number (NULL allowed).  Happens by
 * itself when a writer is short of space or a reader of slots. */
RST_API int rst_store_clear_readers(rst_store *store, uint32_t *cleared, rst_error *error);

typedef struct rst_verify_options {
    /* Called between turns with what is done and to do; non-zero stops with RST_ERR_TIMEOUT. */
    int (*progress)(void *context, uint64_t done, uint64_t total);
    /* Called for each fault: what is wrong, in words, with session id and turn where known. */
    void (*fault)(void *context, const rst_error *fault);
    void *context;
} rst_verify_options;

typedef struct rst_verify_result {
    uint64_t session_count;
    uint64_t turn_count;
    uint64_t value_size; /* bytes read */
    uint64_t fault_count;
} rst_verify_result;

/* Read everything once: each checksum, each value, every index against the others, the totals, each
 * sample's assembly.  RST_OK when it ran to the end, whatever it found: look at fault_count. */
RST_API int rst_store_verify(rst_store *store, const rst_verify_options *options,
                             rst_verify_result *result, rst_error *error);

/* A consistent, compacted copy of the live store as a new store at `path` (RST_ERR_EXISTS).
 * capacity_size: bytes, 0 keeps the source's. */
RST_API int rst_store_copy(rst_store *store, const char *path, uint64_t capacity_size,
                           rst_error *error);

/* A session id's key, see layout.h. */
RST_API void rst_session_key(const void *session, size_t session_size, uint8_t key[RST_KEY_SIZE]);

#ifdef __cplusplus
}
#endif
#endif
