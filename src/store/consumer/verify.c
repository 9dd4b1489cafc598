/* Verifying a store: each consumer's entry and leases against the ready order. */
#include <string.h>

#include "consumer.h"

typedef struct checker {
    rst_snapshot *snapshot;
    uint64_t next_sequence;
    uint64_t lease_count; /* of all consumers */
    void (*report)(void *context, const rst_error *fault);
    void *context;
    char shown[RST_SHOWN_ID_SIZE]; /* the consumer's name */
} checker;

static void fault(checker *c, const char *what, uint64_t number)
{
    rst_error error;
    rst_error_clear(&error);
    rst_fail(&error, RST_ERR_CORRUPT, "consumers", "consumer \"%s\": %s %llu", c->shown, what,
             (unsigned long long)number);
    c->report(c->context, &error);
}

/* One lease; `ready` stands at its sequence number or after it. */
static void check_lease(checker *c, const rst_consumer_entry *consumer,
                        const rst_lease_cursor *lease, const rst_ready_cursor *ready)
{
    bool open = lease->entry.state == RST_LEASE_FREE || lease->entry.state == RST_LEASE_HELD;
    c->lease_count++;
    if (lease->sequence < consumer->settled || lease->sequence >= consumer->next) {
        fault(c, "a lease, but neither settled nor waiting: number", lease->sequence);
    } else if (open && ready->sequence == lease->sequence &&
               lease->sequence < consumer->first_open) {
        fault(c, "first_open passes over a session that is to be given: number", lease->sequence);
    }
}

static int check_leases(checker *c, const rst_consumer_entry *consumer, rst_lease_cursor *leases,
                        rst_ready_cursor *ready, rst_error *error)
{
    int code = RST_OK;
    while (code == RST_OK &&
           (leases->sequence != RST_SEQUENCE_END || ready->sequence < consumer->next)) {
        bool lease = leases->sequence <= ready->sequence;
        bool stored = ready->sequence <= leases->sequence;
        if (lease) {
            check_lease(c, consumer, leases, ready);
            code = rst_lease_step(leases, error);
        } else if (ready->sequence >= consumer->settled && ready->sequence < consumer->next) {
            fault(c, "neither settled nor waiting, but no lease: number", ready->sequence);
        }
        if (code == RST_OK && stored) {
            code = rst_ready_step(ready, error);
        }
    }
    return code;
}

static int check_consumer(checker *c, const MDB_val *key, const rst_consumer_entry *consumer,
                          const char *name, rst_error *error)
{
    uint8_t own[RST_KEY_SIZE];
    rst_session_key(name, consumer->name_size, own);
    if (key->mv_size != RST_KEY_SIZE || memcmp(key->mv_data, own, RST_KEY_SIZE) != 0) {
        fault(c, "stored under another name's key; next is", consumer->next);
        return RST_OK;
    }
    if (consumer->next > c->next_sequence) {
        fault(c, "was given a number that no session has: before", consumer->next);
    }
    rst_lease_cursor leases;
    rst_ready_cursor ready;
    const rst_env *env = c->snapshot->store->env;
    int code = rst_lease_open(c->snapshot->txn, env, own, 0, &leases, error);
    if (code) {
        return code;
    }
    code = rst_ready_open(c->snapshot->txn, env, 0, &ready, error);
    if (code == RST_OK) {
        code = check_leases(c, consumer, &leases, &ready, error);
        rst_ready_close(&ready);
    }
    rst_lease_close(&leases);
    return code;
}

/* What cannot be read is a fault of the store, not of the call. */
static int check_entry(checker *c, const MDB_val *key, const MDB_val *value, rst_error *error)
{
    rst_consumer_entry consumer;
    const char *name;
    int code = rst_parse_consumer(value, &consumer, &name, error);
    if (code == RST_OK) {
        rst_shown_id(name, consumer.name_size, c->shown);
        code = check_consumer(c, key, &consumer, name, error);
    }
    if (code == RST_ERR_CORRUPT || code == RST_ERR_VERSION) {
        c->report(c->context, error);
        rst_error_clear(error);
        return RST_OK;
    }
    return code;
}

static int check_all(checker *c, rst_error *error)
{
    MDB_cursor *cursor;
    MDB_stat stat;
    const rst_env *env = c->snapshot->store->env;
    int result = mdb_cursor_open(c->snapshot->txn, env->consumers, &cursor);
    if (result) {
        return rst_fail_lmdb(error, result, "reading consumers");
    }
    MDB_val key;
    MDB_val value;
    int code = RST_OK;
    while (code == RST_OK && (result = mdb_cursor_get(cursor, &key, &value, MDB_NEXT)) == 0) {
        code = check_entry(c, &key, &value, error);
    }
    mdb_cursor_close(cursor);
    if (code == RST_OK && result != MDB_NOTFOUND) {
        code = rst_fail_lmdb(error, result, "reading consumers");
    }
    if (code == RST_OK) {
        result = mdb_stat(c->snapshot->txn, env->leases, &stat);
        code = result ? rst_fail_lmdb(error, result, "counting leases") : RST_OK;
    }
    if (code == RST_OK && stat.ms_entries != c->lease_count) {
        rst_error found;
        rst_error_clear(&found);
        rst_fail(&found, RST_ERR_CORRUPT, "leases",
                 "%llu leases are stored, %llu of them belong to a consumer",
                 (unsigned long long)stat.ms_entries, (unsigned long long)c->lease_count);
        c->report(c->context, &found);
    }
    return code;
}

int rst_verify_consumers(rst_snapshot *snapshot, uint64_t next_sequence,
                         void (*report)(void *context, const rst_error *fault), void *context,
                         rst_error *error)
{
    rst_error own; /* faults need their text, also when the caller wants none */
    rst_error_clear(&own);
    checker c = {
        .snapshot = snapshot,
        .next_sequence = next_sequence,
        .report = report,
        .context = context,
    };
    int code = check_all(&c, &own);
    if (code && error) {
        *error = own;
    }
    return code;
}
