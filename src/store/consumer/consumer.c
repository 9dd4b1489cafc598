/*
 * Consumers: their entries, and the life of a session in the eyes of one consumer.
 *
 *   waiting ──take──> HELD ──acknowledge──> TRAINED ──commit──> COMMITTED ──> settled
 *                     ^  │ return, expiry, death of the holder
 *                     │  v
 *                     FREE                         resume: everything not in the place is FREE
 *
 * What lies below `settled` is committed or released, what lies from `next` on was never given;
 * neither has an entry.  Between them each stored session has one entry; a sequence number there
 * that is not in the ready order any more was released by force and counts as committed, with or
 * without an entry.  `settled` follows behind by itself (rst_advance_settled), so a consumer costs
 * space only for what it was given and has not settled.
 *
 * A HELD lease that has ended stays HELD until it is given to somebody else: its holder may still
 * acknowledge it, since nobody else has the session.  TRAINED and COMMITTED never go back, except
 * by resume, which raises `epoch`: leases and places of an older epoch belong to training that was
 * abandoned.  The upper half of a lease_id is its epoch's lower half, the lower half counts.
 *
 * Nothing is computed under the write lock that can be computed before: take and release look for
 * their sessions in a snapshot and only check under the lock that what they found still holds.
 */
#include <string.h>
#include <sys/random.h>

#include "consumer.h"

/* ---------------------------------------------------------------- entries */

int rst_consumer_name_of(const void *bytes, size_t size, rst_consumer_name *name, rst_error *error)
{
    if (!bytes || size == 0 || size > RST_CONSUMER_NAME_SIZE_MAX) {
        return rst_fail(error, RST_ERR_ARGUMENT, "name",
                        "a consumer's name of %zu bytes: it must have 1 to %d", size,
                        RST_CONSUMER_NAME_SIZE_MAX);
    }
    name->bytes = bytes;
    name->size = size;
    rst_session_key(bytes, size, name->key);
    return RST_OK;
}

int rst_parse_consumer(const MDB_val *value, rst_consumer_entry *consumer, const char **name,
                       rst_error *error)
{
    if (value->mv_size < sizeof *consumer) {
        return rst_fail(error, RST_ERR_CORRUPT, "consumers", "a consumer's entry: too short");
    }
    memcpy(consumer, value->mv_data, sizeof *consumer);
    if (consumer->magic != RST_CONSUMER_MAGIC) {
        return rst_fail(error, RST_ERR_CORRUPT, "consumers", "a consumer's entry: magic");
    }
    if (consumer->version == 0 || consumer->version > RST_FORMAT_VERSION) {
        return rst_fail(error, RST_ERR_VERSION, "consumers",
                        "a consumer's entry has version %u, this library knows up to %d",
                        consumer->version, RST_FORMAT_VERSION);
    }
    if (consumer->name_size == 0 || consumer->name_size > RST_CONSUMER_NAME_SIZE_MAX ||
        value->mv_size != sizeof *consumer + consumer->name_size) {
        return rst_fail(error, RST_ERR_CORRUPT, "consumers", "a consumer's entry: name_size");
    }
    if (consumer->settled > consumer->next || consumer->next == RST_SEQUENCE_END) {
        return rst_fail(error, RST_ERR_CORRUPT, "consumers", "a consumer's entry: settled, next");
    }
    *name = (const char *)value->mv_data + sizeof *consumer;
    return RST_OK;
}

int rst_read_consumer(MDB_txn *txn, const rst_env *env, const rst_consumer_name *name,
                      rst_consumer_entry *consumer, rst_error *error)
{
    MDB_val key = {RST_KEY_SIZE, (void *)(uintptr_t)name->key};
    MDB_val value;
    int result = mdb_get(txn, env->consumers, &key, &value);
    if (result == MDB_NOTFOUND) {
        char shown[RST_SHOWN_ID_SIZE];
        return rst_fail(error, RST_ERR_NOT_FOUND, "name", "there is no consumer \"%s\"",
                        rst_shown_id(name->bytes, name->size, shown));
    }
    if (result) {
        return rst_fail_lmdb(error, result, "reading a consumer");
    }
    const char *stored = NULL;
    int code = rst_parse_consumer(&value, consumer, &stored, error);
    if (code == RST_OK &&
        (consumer->name_size != name->size || memcmp(stored, name->bytes, name->size) != 0)) {
        return rst_fail(error, RST_ERR_CONFLICT, "name",
                        "another consumer's name has the same key: choose another name");
    }
    return code;
}

int rst_write_consumer(rst_write *write, const rst_consumer_name *name,
                       const rst_consumer_entry *consumer, rst_error *error)
{
    unsigned char bytes[sizeof *consumer + RST_CONSUMER_NAME_SIZE_MAX];
    memcpy(bytes, consumer, sizeof *consumer);
    memcpy(bytes + sizeof *consumer, name->bytes, name->size);
    MDB_val key = {RST_KEY_SIZE, (void *)(uintptr_t)name->key};
    MDB_val value = {sizeof *consumer + name->size, bytes};
    int result = mdb_put(write->txn, write->store->env->consumers, &key, &value, 0);
    if (result) {
        return rst_fail_lmdb(error, result, "writing a consumer");
    }
    write->changed = true;
    return RST_OK;
}

int rst_random_epoch(uint64_t *epoch, rst_error *error)
{
    if (getrandom(epoch, sizeof *epoch, 0) != (ssize_t)sizeof *epoch) {
        return rst_fail(error, RST_ERR_IO, NULL, "the operating system gives no random number");
    }
    *epoch >>= 1; /* room to be raised */
    return RST_OK;
}

/* ---------------------------------------------------------------- settled */

/* One step; *stop when an unsettled session stands there. */
static int settle_next(rst_consumer_entry *consumer, rst_lease_cursor *leases,
                       rst_ready_cursor *ready, bool *stop, rst_error *error)
{
    int code = rst_lease_seek(leases, consumer->settled, error);
    if (code == RST_OK) {
        code = rst_ready_seek(ready, consumer->settled, error);
    }
    if (code) {
        return code;
    }
    uint64_t first = leases->sequence < ready->sequence ? leases->sequence : ready->sequence;
    if (first >= consumer->next) {
        consumer->settled = consumer->next;
        *stop = true;
        return RST_OK;
    }
    consumer->settled = first;
    bool stored = ready->sequence == first;
    bool entry = leases->sequence == first;
    *stop = stored && !(entry && leases->entry.state == RST_LEASE_COMMITTED);
    if (*stop) {
        return RST_OK;
    }
    consumer->settled = first + 1;
    return rst_lease_remove(leases, error);
}

int rst_advance_settled(rst_write *write, const rst_consumer_name *name,
                        rst_consumer_entry *consumer, size_t limit, bool *done, rst_error *error)
{
    rst_lease_cursor leases;
    rst_ready_cursor ready;
    *done = false;
    int code =
        rst_lease_open(write->txn, write->store->env, name->key, consumer->settled, &leases, error);
    if (code) {
        return code;
    }
    code = rst_ready_open(write->txn, write->store->env, consumer->settled, &ready, error);
    if (code == RST_OK) {
        for (size_t i = 0; i < limit && !*done && code == RST_OK; i++) {
            code = settle_next(consumer, &leases, &ready, done, error);
        }
        rst_ready_close(&ready);
    }
    rst_lease_close(&leases);
    return code;
}

/* ---------------------------------------------------------------- create and drop */

static int first_sequence(const rst_write *write, rst_consumer_start start, uint64_t *sequence,
                          rst_error *error)
{
    *sequence = write->totals.next_sequence;
    if (start == RST_START_NEWEST) {
        return RST_OK;
    }
    rst_ready_cursor ready;
    int code = rst_ready_open(write->txn, write->store->env, 0, &ready, error);
    if (code == RST_OK) {
        if (ready.sequence < *sequence) {
            *sequence = ready.sequence;
        }
        rst_ready_close(&ready);
    }
    return code;
}

static int create_in(rst_write *write, const rst_consumer_name *name, rst_consumer_start start,
                     uint64_t epoch, int *created, rst_error *error)
{
    rst_consumer_entry consumer;
    int code = rst_read_consumer(write->txn, write->store->env, name, &consumer, error);
    if (code != RST_ERR_NOT_FOUND) {
        return code;
    }
    rst_error_clear(error);
    int64_t now = rst_clock_ns(CLOCK_REALTIME);
    consumer = (rst_consumer_entry){
        .magic = RST_CONSUMER_MAGIC,
        .version = RST_FORMAT_VERSION,
        .name_size = (uint16_t)name->size,
        .epoch = epoch,
        .created_ns = now,
        .changed_ns = now,
    };
    code = first_sequence(write, start, &consumer.next, error);
    if (code) {
        return code;
    }
    consumer.settled = consumer.next;
    consumer.first_open = consumer.next;
    *created = 1;
    return rst_write_consumer(write, name, &consumer, error);
}

int rst_consumer_create(rst_store *store, const void *name, size_t name_size,
                        rst_consumer_start start, int *created, rst_error *error)
{
    rst_error_clear(error);
    int made = 0;
    if (created) {
        *created = 0;
    }
    if (start != RST_START_OLDEST && start != RST_START_NEWEST) {
        return rst_fail(error, RST_ERR_ARGUMENT, "start", "no such start: %d", (int)start);
    }
    rst_consumer_name of;
    uint64_t epoch;
    rst_write write;
    int code = rst_consumer_name_of(name, name_size, &of, error);
    if (code == RST_OK) {
        code = rst_random_epoch(&epoch, error);
    }
    if (code == RST_OK) {
        code = rst_write_begin(store, &write, error);
    }
    if (code) {
        return code;
    }
    code = create_in(&write, &of, start, epoch, &made, error);
    if (code) {
        rst_write_abort(&write);
        return code;
    }
    code = rst_write_commit(&write, error);
    if (code == RST_OK && created) {
        *created = made;
    }
    return code;
}

static int drop_in(rst_write *write, const rst_consumer_name *name, rst_error *error)
{
    const rst_env *env = write->store->env;
    rst_consumer_entry consumer;
    rst_lease_cursor leases;
    int code = rst_read_consumer(write->txn, env, name, &consumer, error);
    if (code == RST_OK) {
        code = rst_lease_open(write->txn, env, name->key, 0, &leases, error);
    }
    if (code) {
        return code;
    }
    while (code == RST_OK && leases.sequence != RST_SEQUENCE_END) {
        code = rst_lease_remove(&leases, error);
        if (code == RST_OK) {
            code = rst_lease_seek(&leases, 0, error);
        }
    }
    rst_lease_close(&leases);
    if (code) {
        return code;
    }
    MDB_val key = {RST_KEY_SIZE, (void *)(uintptr_t)name->key};
    int result = mdb_del(write->txn, env->consumers, &key, NULL);
    if (result) {
        return rst_fail_lmdb(error, result, "dropping a consumer");
    }
    write->changed = true;
    return RST_OK;
}

int rst_consumer_drop(rst_store *store, const void *name, size_t name_size, rst_error *error)
{
    rst_error_clear(error);
    rst_consumer_name of;
    rst_write write;
    int code = rst_consumer_name_of(name, name_size, &of, error);
    if (code == RST_OK) {
        code = rst_write_begin(store, &write, error);
    }
    if (code) {
        return code;
    }
    code = drop_in(&write, &of, error);
    if (code) {
        rst_write_abort(&write);
        return code;
    }
    return rst_write_commit(&write, error);
}

/* ---------------------------------------------------------------- looking */

/* What the entries between settled and next stand for. */
static int count_leases(rst_lease_cursor *leases, rst_ready_cursor *ready, rst_consumer *out,
                        rst_error *error)
{
    int code = RST_OK;
    while (code == RST_OK && leases->sequence < out->next) {
        code = rst_ready_reach(ready, leases->sequence, error);
        bool stored = ready->sequence == leases->sequence;
        if (leases->entry.state == RST_LEASE_HELD) {
            out->held_count++;
        } else if (leases->entry.state == RST_LEASE_TRAINED) {
            out->trained_count++;
        } else if (leases->entry.state == RST_LEASE_FREE && stored) {
            out->free_count++;
        } else if (leases->entry.state == RST_LEASE_COMMITTED && stored) {
            out->committed_count++;
        }
        if (code == RST_OK) {
            code = rst_lease_step(leases, error);
        }
    }
    return code;
}

/* Step over the sealed sessions below `end`, counting them. */
static int count_ready(rst_ready_cursor *ready, uint64_t end, uint64_t *count, rst_error *error)
{
    int code = RST_OK;
    while (code == RST_OK && ready->sequence < end) {
        *count += 1;
        code = rst_ready_step(ready, error);
    }
    return code;
}

static int count_sessions(rst_snapshot *snapshot, const uint8_t key[RST_KEY_SIZE],
                          rst_consumer *out, rst_error *error)
{
    rst_lease_cursor leases;
    rst_ready_cursor ready;
    const rst_env *env = snapshot->store->env;
    int code = rst_lease_open(snapshot->txn, env, key, out->settled, &leases, error);
    if (code) {
        return code;
    }
    code = rst_ready_open(snapshot->txn, env, 0, &ready, error);
    if (code == RST_OK) {
        code = count_ready(&ready, out->settled, &out->committed_count, error);
        if (code == RST_OK) {
            code = count_leases(&leases, &ready, out, error);
        }
        if (code == RST_OK) {
            code = rst_ready_reach(&ready, out->next, error);
        }
        if (code == RST_OK) {
            code = count_ready(&ready, RST_SEQUENCE_END, &out->waiting_count, error);
        }
        rst_ready_close(&ready);
    }
    rst_lease_close(&leases);
    return code;
}

static int describe(rst_snapshot *snapshot, const MDB_val *key, const MDB_val *value,
                    rst_consumer *out, rst_error *error)
{
    rst_consumer_entry consumer;
    const char *name;
    int code = rst_parse_consumer(value, &consumer, &name, error);
    if (code) {
        return code;
    }
    *out = (rst_consumer){
        .name = name,
        .name_size = consumer.name_size,
        .next = consumer.next,
        .settled = consumer.settled,
        .given_total = consumer.given_count,
        .again_total = consumer.again_count,
        .trained_total = consumer.trained_count,
        .created_ns = consumer.created_ns,
        .changed_ns = consumer.changed_ns,
    };
    return count_sessions(snapshot, key->mv_data, out, error);
}

int rst_consumer_get(rst_snapshot *snapshot, const void *name, size_t name_size, rst_consumer *out,
                     rst_error *error)
{
    rst_error_clear(error);
    rst_consumer_name of;
    rst_consumer_entry consumer;
    const rst_store *store = snapshot->store;
    int code = rst_store_usable(store, false, error);
    if (code == RST_OK) {
        code = rst_consumer_name_of(name, name_size, &of, error);
    }
    if (code == RST_OK) {
        code = rst_read_consumer(snapshot->txn, store->env, &of, &consumer, error);
    }
    if (code) {
        return code;
    }
    MDB_val key = {RST_KEY_SIZE, of.key};
    MDB_val value;
    int result = mdb_get(snapshot->txn, store->env->consumers, &key, &value);
    if (result) {
        return rst_fail_lmdb(error, result, "reading a consumer");
    }
    return describe(snapshot, &key, &value, out, error);
}

/* The first entry after `after` (NULL: the first), as LMDB's result. */
static int cursor_after(MDB_cursor *cursor, const uint8_t *after, MDB_val *key, MDB_val *value)
{
    if (!after) {
        return mdb_cursor_get(cursor, key, value, MDB_FIRST);
    }
    key->mv_size = RST_KEY_SIZE;
    key->mv_data = (void *)(uintptr_t)after;
    int result = mdb_cursor_get(cursor, key, value, MDB_SET_RANGE);
    if (result == 0 && key->mv_size == RST_KEY_SIZE &&
        memcmp(key->mv_data, after, RST_KEY_SIZE) == 0) {
        result = mdb_cursor_get(cursor, key, value, MDB_NEXT);
    }
    return result;
}

int rst_consumer_next(rst_snapshot *snapshot, const uint8_t *key, rst_consumer *out,
                      uint8_t found_key[RST_KEY_SIZE], rst_error *error)
{
    rst_error_clear(error);
    const rst_store *store = snapshot->store;
    int code = rst_store_usable(store, false, error);
    if (code) {
        return code;
    }
    MDB_cursor *cursor;
    int result = mdb_cursor_open(snapshot->txn, store->env->consumers, &cursor);
    if (result) {
        return rst_fail_lmdb(error, result, "reading consumers");
    }
    MDB_val found;
    MDB_val value;
    result = cursor_after(cursor, key, &found, &value);
    mdb_cursor_close(cursor);
    if (result == MDB_NOTFOUND) {
        return rst_fail(error, RST_ERR_NOT_FOUND, "key", "there are no more consumers");
    }
    if (result) {
        return rst_fail_lmdb(error, result, "reading consumers");
    }
    if (found.mv_size != RST_KEY_SIZE) {
        return rst_fail(error, RST_ERR_CORRUPT, "consumers", "a consumer's key of %zu bytes",
                        found.mv_size);
    }
    code = describe(snapshot, &found, &value, out, error);
    if (code == RST_OK) {
        memcpy(found_key, found.mv_data, RST_KEY_SIZE);
    }
    return code;
}
