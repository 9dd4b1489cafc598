/* What the holder of a lease says of it: trained on, handed back, still at work. */
#include <string.h>

#include "consumer.h"

#define NS_PER_MS INT64_C(1000000)

int64_t rst_lease_expiry(int64_t now_ns, int64_t lease_ms)
{
    return lease_ms > (INT64_MAX - now_ns) / NS_PER_MS ? INT64_MAX : now_ns + lease_ms * NS_PER_MS;
}

int rst_check_lease_ms(int64_t *lease_ms, rst_error *error)
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
    int code = rst_check_lease_ms(&lease_ms, error);
    if (code) {
        return code;
    }
    rst_holder self;
    rst_holder_self(&self);
    saying s = {
        .verb = RENEW,
        .self = &self,
        .expires_ns = rst_lease_expiry(rst_clock_ns(CLOCK_BOOTTIME), lease_ms),
    };
    code = say(store, name, name_size, &s, leases, count, error);
    for (size_t i = 0; code == RST_OK && i < count; i++) {
        leases[i].expires_ns = s.expires_ns;
    }
    return code;
}
