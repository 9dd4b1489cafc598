/* Taking sessions. */
#include <string.h>

#include "consumer.h"

/* Entries removed by one take: enough to keep up with releases by force, too few to be felt. */
#define TAKE_SETTLE_LIMIT 256

/* ---------------------------------------------------------------- looking, without the lock */

/* What a snapshot had for a take. */
typedef struct look {
    uint64_t transaction; /* the last one it saw */
    uint64_t epoch;
    uint64_t first_open;
    size_t back_count; /* sessions that came back: the first ones of the caller's leases */
    bool fresh;        /* there is one that was never given */
    int64_t wake_ns;   /* CLOCK_BOOTTIME: the first of the held leases runs out */
} look;

/* Who takes, and for whom. */
typedef struct taker {
    rst_store *store;
    rst_consumer_name name;
    rst_holder self;
    rst_holder_cache cache;
    int64_t lease_ms;
    rst_lease *leases;
    size_t max;
} taker;

/* Note in leases what came back: sequence, and lease_id and expires_ns as they stand in its entry,
 * so that a renewal before the lock is held is noticed.  What was released by force is passed over;
 * its entry goes when settled passes it. */
static int look_back(taker *by, rst_lease_cursor *cursor, rst_ready_cursor *ready, look *out,
                     rst_error *error)
{
    int code = RST_OK;
    int64_t now = rst_clock_ns(CLOCK_BOOTTIME);
    bool open_seen = false;
    while (code == RST_OK && cursor->sequence != RST_SEQUENCE_END && out->back_count < by->max) {
        const rst_lease_entry *entry = &cursor->entry;
        bool held = entry->state == RST_LEASE_HELD;
        bool open = held || entry->state == RST_LEASE_FREE;
        if (open) {
            code = rst_ready_reach(ready, cursor->sequence, error);
            open = ready->sequence == cursor->sequence;
        }
        if (open && !open_seen) {
            out->first_open = cursor->sequence;
            open_seen = true;
        }
        if (open && held && !rst_lease_ended(entry, &by->self, &by->cache, now)) {
            out->wake_ns = entry->expires_ns < out->wake_ns ? entry->expires_ns : out->wake_ns;
        } else if (open) {
            by->leases[out->back_count++] = (rst_lease){
                .sequence = cursor->sequence,
                .lease_id = entry->lease_id,
                .expires_ns = entry->expires_ns,
            };
        }
        if (code == RST_OK) {
            code = rst_lease_step(cursor, error);
        }
    }
    return code;
}

/* What came back, and whether there is something new. */
static int look_at_sessions(taker *by, rst_snapshot *snapshot, const rst_consumer_entry *consumer,
                            look *out, rst_error *error)
{
    const rst_env *env = by->store->env;
    uint64_t from =
        consumer->first_open > consumer->settled ? consumer->first_open : consumer->settled;
    rst_lease_cursor leases;
    rst_ready_cursor ready;
    int code = rst_lease_open(snapshot->txn, env, by->name.key, from, &leases, error);
    if (code) {
        return code;
    }
    code = rst_ready_open(snapshot->txn, env, from, &ready, error);
    if (code == RST_OK) {
        code = look_back(by, &leases, &ready, out, error);
        if (code == RST_OK) {
            code = rst_ready_seek(&ready, consumer->next, error);
            out->fresh = ready.sequence != RST_SEQUENCE_END;
        }
        rst_ready_close(&ready);
    }
    rst_lease_close(&leases);
    return code;
}

static int look_in(taker *by, rst_snapshot *snapshot, look *out, rst_error *error)
{
    const rst_env *env = by->store->env;
    rst_consumer_entry consumer;
    int code = rst_read_consumer(snapshot->txn, env, &by->name, &consumer, error);
    if (code) {
        return code;
    }
    *out = (look){
        .transaction = rst_snapshot_id(snapshot),
        .epoch = consumer.epoch,
        .first_open = consumer.next,
        .wake_ns = INT64_MAX,
    };
    return look_at_sessions(by, snapshot, &consumer, out, error);
}

static int look_around(taker *by, look *out, rst_error *error)
{
    rst_snapshot *snapshot;
    int code = rst_snapshot_open(by->store, &snapshot, error);
    if (code) {
        return code;
    }
    code = look_in(by, snapshot, out, error);
    rst_snapshot_close(snapshot);
    return code;
}

/* ---------------------------------------------------------------- giving, under the lock */

/* What one write transaction gives. */
typedef struct giving {
    rst_write *write;
    const taker *by;
    rst_consumer_entry consumer;
    int64_t expires_ns;
    size_t count; /* leases given */
} giving;

/* Make the entry that of a new lease, and tell the caller. */
static void lease_out(giving *to, uint64_t sequence, const uint8_t session_key[RST_KEY_SIZE],
                      rst_lease_entry *entry)
{
    const rst_holder *self = &to->by->self;
    to->consumer.given_count++;
    *entry = (rst_lease_entry){
        .state = RST_LEASE_HELD,
        .given_count = entry->given_count == UINT32_MAX ? UINT32_MAX : entry->given_count + 1,
        .expires_ns = to->expires_ns,
        .lease_id = to->consumer.epoch << 32 | (uint32_t)to->consumer.given_count,
        .pid = self->pid,
        .pid_start = self->pid_start,
        .pid_namespace = self->pid_namespace,
        .boot = self->boot,
    };
    rst_lease *lease = &to->by->leases[to->count++];
    *lease = (rst_lease){
        .sequence = sequence,
        .lease_id = entry->lease_id,
        .given_count = entry->given_count,
        .expires_ns = entry->expires_ns,
    };
    memcpy(lease->key, session_key, RST_KEY_SIZE);
}

/* Whether the entry still is what the look found. */
static bool still_back(const rst_lease_cursor *cursor, const rst_lease *found)
{
    const rst_lease_entry *entry = &cursor->entry;
    return cursor->sequence == found->sequence &&
           (entry->state == RST_LEASE_FREE ||
            (entry->state == RST_LEASE_HELD && entry->lease_id == found->lease_id &&
             entry->expires_ns == found->expires_ns));
}

static int give_one_again(giving *to, const rst_lease *found, rst_lease_cursor *leases,
                          rst_ready_cursor *ready, rst_error *error)
{
    int code = rst_lease_seek(leases, found->sequence, error);
    if (code || !still_back(leases, found)) {
        return code;
    }
    code = rst_ready_seek(ready, leases->sequence, error);
    if (code) {
        return code;
    }
    if (ready->sequence != leases->sequence) {
        return RST_OK; /* released by force in between */
    }
    to->consumer.again_count++;
    lease_out(to, leases->sequence, ready->session_key, &leases->entry);
    return rst_lease_store(leases, error);
}

static int give_again(giving *to, size_t back_count, rst_ready_cursor *ready, rst_error *error)
{
    rst_lease_cursor leases;
    int code =
        rst_lease_open(to->write->txn, to->write->store->env, to->by->name.key, 0, &leases, error);
    if (code) {
        return code;
    }
    for (size_t i = 0; i < back_count && code == RST_OK; i++) {
        rst_lease found = to->by->leases[i]; /* what is given takes its place */
        code = give_one_again(to, &found, &leases, ready, error);
    }
    rst_lease_close(&leases);
    return code;
}

/* Pages of LMDB's trees as this transaction sees them. */
static uint64_t used_pages(MDB_txn *txn, const rst_env *env)
{
    /* 0 and 1 are LMDB's own: free pages, and the names of the databases. */
    const MDB_dbi dbis[] = {
        0, 1, env->meta, env->sessions, env->turns, env->ready, env->consumers, env->leases,
    };
    uint64_t pages = 2; /* the meta pages */
    for (size_t i = 0; i < sizeof dbis / sizeof *dbis; i++) {
        MDB_stat stat;
        if (mdb_stat(txn, dbis[i], &stat) == 0) {
            pages += stat.ms_branch_pages + stat.ms_leaf_pages + stat.ms_overflow_pages;
        }
    }
    return pages;
}

/* New leases take pages.  At capacity they may have half of those that are kept for releases; the
 * other half is for committing and releasing, without which a full store stays full. */
static bool room_for_leases(const rst_write *write)
{
    const rst_format_entry *format = &write->store->env->format;
    uint64_t kept = (format->map_size - format->capacity_size) / 2;
    return used_pages(write->txn, write->store->env) * format->page_size <= format->map_size - kept;
}

static int give_new(giving *to, rst_ready_cursor *ready, rst_error *error)
{
    int code = rst_ready_seek(ready, to->consumer.next, error);
    if (code || ready->sequence == RST_SEQUENCE_END || to->count == to->by->max) {
        return code;
    }
    if (!room_for_leases(to->write)) {
        return to->count > 0
                   ? RST_OK
                   : rst_fail(error, RST_ERR_FULL, NULL,
                              "the store is at capacity and has no room to lease new sessions: "
                              "commit what is trained, and release");
    }
    while (code == RST_OK && ready->sequence != RST_SEQUENCE_END && to->count < to->by->max) {
        rst_lease_entry entry = {0};
        uint64_t sequence = ready->sequence;
        lease_out(to, sequence, ready->session_key, &entry);
        code = rst_lease_insert(to->write, to->by->name.key, sequence, &entry, error);
        to->consumer.next = sequence + 1;
        if (code == RST_OK) {
            code = rst_ready_step(ready, error);
        }
    }
    return code;
}

static int give_in(giving *to, const look *found, rst_error *error)
{
    const rst_env *env = to->write->store->env;
    rst_ready_cursor ready;
    int code = rst_read_consumer(to->write->txn, env, &to->by->name, &to->consumer, error);
    if (code == RST_OK) {
        code = rst_ready_open(to->write->txn, env, to->consumer.next, &ready, error);
    }
    if (code) {
        return code;
    }
    code = give_again(to, found->back_count, &ready, error);
    if (code == RST_OK) {
        code = give_new(to, &ready, error);
    }
    rst_ready_close(&ready);
    if (code || to->count == 0) {
        return code;
    }
    /* Entries change from open to not open only, but for a resume. */
    if (found->epoch == to->consumer.epoch && found->first_open > to->consumer.first_open) {
        to->consumer.first_open = found->first_open;
    }
    bool done;
    code = rst_advance_settled(to->write, &to->by->name, &to->consumer, TAKE_SETTLE_LIMIT, &done,
                               error);
    if (code) {
        return code;
    }
    to->consumer.changed_ns = rst_clock_ns(CLOCK_REALTIME);
    return rst_write_consumer(to->write, &to->by->name, &to->consumer, error);
}

/* Give what the look found, as far as nobody else was faster; *count may become 0. */
static int give(taker *by, const look *found, size_t *count, rst_error *error)
{
    rst_write write;
    int code = rst_write_begin(by->store, &write, error);
    if (code) {
        return code;
    }
    giving to = {
        .write = &write,
        .by = by,
        .expires_ns = rst_lease_expiry(rst_clock_ns(CLOCK_BOOTTIME), by->lease_ms),
    };
    code = give_in(&to, found, error);
    if (code) {
        rst_write_abort(&write);
        return code;
    }
    code = rst_write_commit(&write, error);
    if (code == RST_OK) {
        *count = to.count;
    }
    return code;
}

/* ---------------------------------------------------------------- take */

/* Sleep until something may have changed.  Another process's death makes no commit, so each sleep
 * is short enough to look for it. */
static void wait_for_change(taker *by, const look *found, const rst_deadline *deadline)
{
    int64_t sleep_ns = RST_LIVENESS_NS;
    int64_t left_ns = found->wake_ns - rst_clock_ns(CLOCK_BOOTTIME);
    if (left_ns < sleep_ns) {
        sleep_ns = left_ns > 0 ? left_ns : 0;
    }
    rst_deadline until = {.at_ns = rst_clock_ns(CLOCK_MONOTONIC) + sleep_ns};
    if (!deadline->forever && deadline->at_ns < until.at_ns) {
        until.at_ns = deadline->at_ns;
    }
    rst_wait_for_commit(by->store->env, found->transaction, &until);
}

static int take(taker *by, int64_t timeout_ms, size_t *count, rst_error *error)
{
    rst_deadline deadline = rst_deadline_in(timeout_ms);
    for (;;) {
        look found;
        int code = look_around(by, &found, error);
        bool something = code == RST_OK && (found.back_count > 0 || found.fresh);
        if (something) {
            code = give(by, &found, count, error);
        }
        if (code || *count > 0) {
            return code;
        }
        if (something) {
            continue; /* others were faster; there may be more */
        }
        if (rst_deadline_passed(&deadline)) {
            char shown[RST_SHOWN_ID_SIZE];
            return rst_fail(
                error, RST_ERR_TIMEOUT, NULL, "no session for consumer \"%s\" within %lld ms",
                rst_shown_id(by->name.bytes, by->name.size, shown), (long long)timeout_ms);
        }
        code = rst_check_not_deleted(by->store, error);
        if (code) {
            return code;
        }
        wait_for_change(by, &found, &deadline);
    }
}

int rst_consumer_take(rst_store *store, const void *name, size_t name_size, size_t max,
                      int64_t lease_ms, int64_t timeout_ms, rst_lease *leases, size_t *count,
                      rst_error *error)
{
    rst_error_clear(error);
    *count = 0;
    if (max == 0 || !leases) {
        return rst_fail(error, RST_ERR_ARGUMENT, "max", "room for at least one lease is needed");
    }
    taker by = {.store = store, .lease_ms = lease_ms, .leases = leases, .max = max};
    int code = rst_store_usable(store, true, error);
    if (code == RST_OK) {
        code = rst_consumer_name_of(name, name_size, &by.name, error);
    }
    if (code == RST_OK) {
        code = rst_check_lease_ms(&by.lease_ms, error);
    }
    if (code) {
        return code;
    }
    rst_holder_self(&by.self);
    return take(&by, timeout_ms, count, error);
}
