/* Taking sessions, and what their holder says of them afterwards. */
#include <string.h>

#include "consumer_internal.h"

#define NS_PER_MS INT64_C(1000000)

/* Entries removed by one take: enough to keep up with releases by force, too few to be felt. */
#define TAKE_SETTLE_LIMIT 256

static int64_t expiry(int64_t now_ns, int64_t lease_ms)
{
    return lease_ms > (INT64_MAX - now_ns) / NS_PER_MS ? INT64_MAX : now_ns + lease_ms * NS_PER_MS;
}

static int check_lease_ms(int64_t *lease_ms, rst_error *error)
{
    if (*lease_ms < 0) {
        return rst_fail(error, RST_ERR_ARGUMENT, "lease_ms", "a lease of %lld ms",
                        (long long)*lease_ms);
    }
    if (*lease_ms == 0) {
        *lease_ms = RST_LEASE_DEFAULT_MS;
    }
    return RST_OK;
}

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
 * so that a renewal before the lock is held is noticed. */
static int look_back(taker *by, rst_lease_cursor *cursor, look *out, rst_error *error)
{
    int code = RST_OK;
    int64_t now = rst_clock_ns(CLOCK_BOOTTIME);
    bool open_seen = false;
    while (code == RST_OK && cursor->sequence != RST_SEQUENCE_END && out->back_count < by->max) {
        const rst_lease_entry *entry = &cursor->entry;
        bool held = entry->state == RST_LEASE_HELD;
        if ((held || entry->state == RST_LEASE_FREE) && !open_seen) {
            out->first_open = cursor->sequence;
            open_seen = true;
        }
        if (held && !rst_lease_ended(entry, &by->self, &by->cache, now)) {
            out->wake_ns = entry->expires_ns < out->wake_ns ? entry->expires_ns : out->wake_ns;
        } else if (held || entry->state == RST_LEASE_FREE) {
            by->leases[out->back_count++] = (rst_lease){
                .sequence = cursor->sequence,
                .lease_id = entry->lease_id,
                .expires_ns = entry->expires_ns,
            };
        }
        code = rst_lease_step(cursor, error);
    }
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
    uint64_t from = consumer.first_open > consumer.settled ? consumer.first_open : consumer.settled;
    rst_lease_cursor leases;
    code = rst_lease_open(snapshot->txn, env, by->name.key, from, &leases, error);
    if (code == RST_OK) {
        code = look_back(by, &leases, out, error);
        rst_lease_close(&leases);
    }
    if (code || out->back_count == by->max) {
        return code;
    }
    rst_ready_cursor ready;
    code = rst_ready_open(snapshot->txn, env, consumer.next, &ready, error);
    if (code == RST_OK) {
        out->fresh = ready.sequence != RST_SEQUENCE_END;
        rst_ready_close(&ready);
    }
    return code;
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
    bool removed; /* an entry of a released session */
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
    if (ready->sequence != leases->sequence) { /* released by force */
        to->removed = true;
        return rst_lease_remove(leases, error);
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

static int give_new(giving *to, rst_ready_cursor *ready, rst_error *error)
{
    int code = rst_ready_seek(ready, to->consumer.next, error);
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
    if (code || (to->count == 0 && !to->removed)) {
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
        .expires_ns = expiry(rst_clock_ns(CLOCK_BOOTTIME), by->lease_ms),
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
                error, RST_ERR_TIMEOUT, NULL, "no session for consumer %s within %lld ms",
                rst_shown_id(by->name.bytes, by->name.size, shown), (long long)timeout_ms);
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
        code = check_lease_ms(&by.lease_ms, error);
    }
    if (code) {
        return code;
    }
    rst_holder_self(&by.self);
    return take(&by, timeout_ms, count, error);
}

/* ---------------------------------------------------------------- what the holder says */

typedef enum verb { ACKNOWLEDGE, RETURN, RENEW } verb;

typedef struct saying {
    rst_write *write;
    const rst_consumer_name *name;
    verb verb;
    rst_consumer_entry consumer;
    rst_lease_cursor leases;
    const rst_holder *self; /* RENEW */
    int64_t now_ns;         /* CLOCK_BOOTTIME */
    int64_t expires_ns;     /* RENEW */
    bool changed;
} saying;

static int fail_lease(const rst_lease *lease, const char *why, rst_error *error)
{
    return rst_fail(error, RST_ERR_LEASE, "leases", "session number %llu %s",
                    (unsigned long long)lease->sequence, why);
}

/* Stand on the lease's entry.  *settled: it has none any more, and that is well: its session was
 * settled while this lease lasted.  What was settled after the lease ran out may have been given to
 * somebody else in between; nothing tells, so it is refused. */
static int find_lease(saying *s, const rst_lease *lease, bool *settled, rst_error *error)
{
    *settled = false;
    if (lease->lease_id >> 32 != (s->consumer.epoch & UINT32_MAX)) {
        return fail_lease(lease, "was leased before the consumer was resumed or created anew",
                          error);
    }
    if (lease->sequence >= s->consumer.next) {
        return fail_lease(lease, "was never given to this consumer", error);
    }
    int code = rst_lease_seek(&s->leases, lease->sequence, error);
    if (code) {
        return code;
    }
    if (s->leases.sequence != lease->sequence) {
        *settled = lease->expires_ns > s->now_ns;
        return *settled ? RST_OK
                        : fail_lease(lease, "is settled, and its lease ran out before that is said",
                                     error);
    }
    return s->leases.entry.lease_id == lease->lease_id
               ? RST_OK
               : fail_lease(lease, "was given to somebody else after its lease ended", error);
}

/* The entry's next state; the same one when there is nothing to do. */
static int next_state(const saying *s, const rst_lease *lease, rst_lease_state *state,
                      rst_error *error)
{
    *state = (rst_lease_state)s->leases.entry.state;
    bool trained = *state == RST_LEASE_TRAINED || *state == RST_LEASE_COMMITTED;
    if (s->verb == RETURN) {
        if (trained) {
            return fail_lease(lease, "was acknowledged and cannot be handed back", error);
        }
        *state = RST_LEASE_FREE;
    } else {
        if (*state == RST_LEASE_FREE) {
            return fail_lease(lease, "was handed back", error);
        }
        if (s->verb == ACKNOWLEDGE && !trained) {
            *state = RST_LEASE_TRAINED;
        }
    }
    return RST_OK;
}

/* Whoever renews a lease holds it from then on: a process may take for others and end. */
static void renew_entry(const saying *s, rst_lease_entry *entry)
{
    entry->expires_ns = s->expires_ns;
    entry->pid = s->self->pid;
    entry->pid_start = s->self->pid_start;
    entry->pid_namespace = s->self->pid_namespace;
    entry->boot = s->self->boot;
}

static int say_one(saying *s, const rst_lease *lease, rst_error *error)
{
    bool settled;
    int code = find_lease(s, lease, &settled, error);
    if (code) {
        return code;
    }
    if (settled) {
        return RST_OK;
    }
    rst_lease_entry *entry = &s->leases.entry;
    rst_lease_state state;
    code = next_state(s, lease, &state, error);
    bool renew = s->verb == RENEW && state == RST_LEASE_HELD;
    if (code || (state == entry->state && !renew)) {
        return code;
    }
    if (renew) {
        renew_entry(s, entry);
    } else {
        entry->state = state;
        s->consumer.trained_count += state == RST_LEASE_TRAINED;
    }
    s->changed = true;
    return rst_lease_store(&s->leases, error);
}

static int say_in(saying *s, const rst_lease *leases, size_t count, rst_error *error)
{
    const rst_env *env = s->write->store->env;
    int code = rst_read_consumer(s->write->txn, env, s->name, &s->consumer, error);
    if (code == RST_OK) {
        code = rst_lease_open(s->write->txn, env, s->name->key, 0, &s->leases, error);
    }
    if (code) {
        return code;
    }
    for (size_t i = 0; i < count && code == RST_OK; i++) {
        code = say_one(s, &leases[i], error);
        if (code && error) {
            error->index = (int64_t)i;
        }
    }
    rst_lease_close(&s->leases);
    if (code || !s->changed) {
        return code;
    }
    if (s->verb == ACKNOWLEDGE) {
        s->consumer.changed_ns = rst_clock_ns(CLOCK_REALTIME);
    }
    return rst_write_consumer(s->write, s->name, &s->consumer, error);
}

static int say(rst_store *store, const void *name, size_t name_size, saying *s,
               const rst_lease *leases, size_t count, rst_error *error)
{
    rst_consumer_name of;
    rst_write write;
    int code = rst_consumer_name_of(name, name_size, &of, error);
    if (code == RST_OK && count > 0 && !leases) {
        code = rst_fail(error, RST_ERR_ARGUMENT, "leases", "no leases");
    }
    if (code == RST_OK) {
        code = rst_write_begin(store, &write, error);
    }
    if (code) {
        return code;
    }
    s->write = &write;
    s->name = &of;
    s->now_ns = rst_clock_ns(CLOCK_BOOTTIME); /* only now nobody can be given anything */
    code = say_in(s, leases, count, error);
    if (code) {
        rst_write_abort(&write);
        return code;
    }
    return rst_write_commit(&write, error);
}

int rst_consumer_acknowledge(rst_store *store, const void *name, size_t name_size,
                             const rst_lease *leases, size_t count, rst_error *error)
{
    rst_error_clear(error);
    saying s = {.verb = ACKNOWLEDGE};
    return say(store, name, name_size, &s, leases, count, error);
}

int rst_consumer_return(rst_store *store, const void *name, size_t name_size,
                        const rst_lease *leases, size_t count, rst_error *error)
{
    rst_error_clear(error);
    saying s = {.verb = RETURN};
    return say(store, name, name_size, &s, leases, count, error);
}

int rst_consumer_renew(rst_store *store, const void *name, size_t name_size, rst_lease *leases,
                       size_t count, int64_t lease_ms, rst_error *error)
{
    rst_error_clear(error);
    int code = check_lease_ms(&lease_ms, error);
    if (code) {
        return code;
    }
    rst_holder self;
    rst_holder_self(&self);
    saying s = {
        .verb = RENEW,
        .self = &self,
        .expires_ns = expiry(rst_clock_ns(CLOCK_BOOTTIME), lease_ms),
    };
    code = say(store, name, name_size, &s, leases, count, error);
    for (size_t i = 0; code == RST_OK && i < count; i++) {
        leases[i].expires_ns = s.expires_ns;
    }
    return code;
}
