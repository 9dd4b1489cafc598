/* Which sessions may go: those that every consumer has committed. */
#include <string.h>

#include "consumer.h"

/* Sessions found by one look; each look is a snapshot of its own, since an open one would keep what
 * is released from being used again. */
#define RELEASE_BATCH 256

/* A write transaction ends after the release that passes this: others wait for the lock. */
#define RELEASE_LOCK_NS INT64_C(2000000)

/* ---------------------------------------------------------------- one session */

static int read_lease(MDB_txn *txn, const rst_env *env, const uint8_t key[RST_KEY_SIZE],
                      uint64_t sequence, rst_lease_state *state, rst_error *error)
{
    rst_lease_cursor leases;
    *state = RST_LEASE_FREE;
    int code = rst_lease_open(txn, env, key, sequence, &leases, error);
    if (code) {
        return code;
    }
    if (leases.sequence == sequence) {
        *state = (rst_lease_state)leases.entry.state;
    }
    rst_lease_close(&leases);
    return RST_OK;
}

/* RST_ERR_HELD when this one consumer has not committed the session. */
static int check_consumer(MDB_txn *txn, const rst_env *env, const MDB_val *key,
                          const MDB_val *value, uint64_t sequence, rst_error *error)
{
    static const char *const words[] = {"waits for", "came back to", "is leased by",
                                        "is trained, but not committed, by"};
    rst_consumer_entry consumer;
    const char *name;
    rst_lease_state state = 0;
    int code = rst_parse_consumer(value, &consumer, &name, error);
    if (code || sequence < consumer.settled) {
        return code;
    }
    if (sequence < consumer.next) {
        code = read_lease(txn, env, key->mv_data, sequence, &state, error);
    }
    if (code || state == RST_LEASE_COMMITTED) {
        return code;
    }
    char shown[RST_SHOWN_ID_SIZE];
    return rst_fail(error, RST_ERR_HELD, "session", "session number %llu %s consumer \"%s\"",
                    (unsigned long long)sequence, words[state],
                    error ? rst_shown_id(name, consumer.name_size, shown) : "");
}

static int next_consumer(MDB_cursor *cursor, MDB_cursor_op op, MDB_val *key, MDB_val *value,
                         bool *found, rst_error *error)
{
    int result = mdb_cursor_get(cursor, key, value, op);
    *found = result == 0;
    if (result && result != MDB_NOTFOUND) {
        return rst_fail_lmdb(error, result, "reading consumers");
    }
    if (*found && key->mv_size != RST_KEY_SIZE) {
        return rst_fail(error, RST_ERR_CORRUPT, "consumers", "a consumer's key of %zu bytes",
                        key->mv_size);
    }
    return RST_OK;
}

static int check_releasable(MDB_txn *txn, const rst_env *env, uint64_t sequence, rst_error *error)
{
    MDB_cursor *cursor;
    int result = mdb_cursor_open(txn, env->consumers, &cursor);
    if (result) {
        return rst_fail_lmdb(error, result, "reading consumers");
    }
    MDB_val key;
    MDB_val value;
    bool found;
    int code = next_consumer(cursor, MDB_FIRST, &key, &value, &found, error);
    while (code == RST_OK && found) {
        code = check_consumer(txn, env, &key, &value, sequence, error);
        if (code == RST_OK) {
            code = next_consumer(cursor, MDB_NEXT, &key, &value, &found, error);
        }
    }
    mdb_cursor_close(cursor);
    return code;
}

int rst_write_releasable(rst_write *write, uint64_t sequence, rst_error *error)
{
    return check_releasable(write->txn, write->store->env, sequence, error);
}

/* ---------------------------------------------------------------- all that may go */

typedef struct batch {
    uint64_t after; /* where the next look begins */
    size_t count;
    uint64_t sequences[RELEASE_BATCH];
} batch;

/* The first number that some consumer was never given: nothing from there on may go. */
static int first_waiting(MDB_txn *txn, const rst_env *env, uint64_t *sequence, rst_error *error)
{
    MDB_cursor *cursor;
    int result = mdb_cursor_open(txn, env->consumers, &cursor);
    if (result) {
        return rst_fail_lmdb(error, result, "reading consumers");
    }
    MDB_val key;
    MDB_val value;
    bool found;
    bool any = false;
    int code = next_consumer(cursor, MDB_FIRST, &key, &value, &found, error);
    *sequence = 0;
    while (code == RST_OK && found) {
        rst_consumer_entry consumer;
        const char *name;
        code = rst_parse_consumer(&value, &consumer, &name, error);
        if (code == RST_OK && (!any || consumer.next < *sequence)) {
            *sequence = consumer.next;
            any = true;
        }
        if (code == RST_OK) {
            code = next_consumer(cursor, MDB_NEXT, &key, &value, &found, error);
        }
    }
    mdb_cursor_close(cursor);
    return code;
}

static int find_batch_in(rst_snapshot *snapshot, batch *out, size_t max, rst_error *error)
{
    const rst_env *env = snapshot->store->env;
    uint64_t end = 0;
    rst_ready_cursor ready;
    int code = first_waiting(snapshot->txn, env, &end, error);
    if (code == RST_OK) {
        code = rst_ready_open(snapshot->txn, env, out->after, &ready, error);
    }
    if (code) {
        return code;
    }
    while (code == RST_OK && ready.sequence < end && out->count < max) {
        /* Without the error's text: most of the time it is RST_ERR_HELD, and no error here. */
        code = check_releasable(snapshot->txn, env, ready.sequence, NULL);
        if (code == RST_OK) {
            out->sequences[out->count++] = ready.sequence;
        } else if (code != RST_ERR_HELD) {
            code = check_releasable(snapshot->txn, env, ready.sequence, error);
            break;
        }
        out->after = ready.sequence + 1;
        code = rst_ready_step(&ready, error);
    }
    rst_ready_close(&ready);
    return code;
}

static int find_batch(rst_store *store, batch *out, uint64_t left, rst_error *error)
{
    out->count = 0;
    rst_snapshot *snapshot;
    int code = rst_snapshot_open(store, &snapshot, error);
    if (code) {
        return code;
    }
    size_t max = left < RELEASE_BATCH ? (size_t)left : RELEASE_BATCH;
    code = find_batch_in(snapshot, out, max, error);
    rst_snapshot_close(snapshot);
    return code;
}

/* Release one session if nothing changed since the look: a resume may have asked for it again, or
 * somebody else released it. */
static int release_one(rst_write *write, uint64_t sequence, size_t *released, rst_error *error)
{
    rst_ready_cursor ready;
    int code = rst_ready_open(write->txn, write->store->env, sequence, &ready, error);
    if (code) {
        return code;
    }
    bool stored = ready.sequence == sequence;
    rst_ready_close(&ready);
    if (!stored) {
        return RST_OK;
    }
    code = check_releasable(write->txn, write->store->env, sequence, error);
    if (code == RST_OK) {
        code = rst_write_release(write, ready.session_key, error);
        *released += code == RST_OK;
    } else if (code == RST_ERR_HELD) {
        rst_error_clear(error);
        code = RST_OK;
    }
    return code;
}

/* One write transaction from sequences[*at] on. */
static int release_some(rst_store *store, const batch *of, size_t *at, uint64_t *released,
                        rst_error *error)
{
    rst_write write;
    int code = rst_write_begin(store, &write, error);
    if (code) {
        return code;
    }
    int64_t end_ns = rst_clock_ns(CLOCK_MONOTONIC) + RELEASE_LOCK_NS;
    size_t count = 0;
    do {
        code = release_one(&write, of->sequences[*at], &count, error);
        *at += 1;
    } while (code == RST_OK && *at < of->count && rst_clock_ns(CLOCK_MONOTONIC) < end_ns);
    if (code) {
        rst_write_abort(&write);
        return code;
    }
    code = rst_write_commit(&write, error);
    if (code == RST_OK) {
        *released += count;
    }
    return code;
}

int rst_release_consumed(rst_store *store, uint64_t max, uint64_t *released, rst_error *error)
{
    rst_error_clear(error);
    uint64_t count = 0;
    uint64_t wanted = max ? max : UINT64_MAX;
    batch found = {0};
    int code = rst_store_usable(store, true, error);
    while (code == RST_OK && count < wanted) {
        code = find_batch(store, &found, wanted - count, error);
        if (code || found.count == 0) {
            break;
        }
        for (size_t at = 0; at < found.count && code == RST_OK;) {
            code = release_some(store, &found, &at, &count, error);
        }
    }
    if (released) {
        *released = count;
    }
    return code;
}
