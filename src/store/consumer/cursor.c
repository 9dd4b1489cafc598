/* Walking a consumer's leases, and the ready order. */
#include <string.h>

#include "consumer.h"

/* ---------------------------------------------------------------- leases */

/* Take over what LMDB's cursor found; another consumer's entry is past the end. */
static int take_lease(rst_lease_cursor *cursor, int result, const MDB_val *key,
                      const MDB_val *value, rst_error *error)
{
    cursor->sequence = RST_SEQUENCE_END;
    if (result == MDB_NOTFOUND) {
        return RST_OK;
    }
    if (result) {
        return rst_fail_lmdb(error, result, "reading leases");
    }
    if (key->mv_size != RST_TURN_KEY_SIZE) {
        return rst_fail(error, RST_ERR_CORRUPT, "leases", "a lease's key of %zu bytes",
                        key->mv_size);
    }
    if (memcmp(key->mv_data, cursor->consumer_key, RST_KEY_SIZE) != 0) {
        return RST_OK;
    }
    if (value->mv_size != sizeof cursor->entry) {
        return rst_fail(error, RST_ERR_CORRUPT, "leases", "a lease's entry of %zu bytes",
                        value->mv_size);
    }
    memcpy(&cursor->entry, value->mv_data, sizeof cursor->entry);
    if (cursor->entry.state < RST_LEASE_FREE || cursor->entry.state > RST_LEASE_COMMITTED) {
        return rst_fail(error, RST_ERR_CORRUPT, "leases", "a lease's entry: state %u",
                        cursor->entry.state);
    }
    cursor->sequence = rst_get_be64((const unsigned char *)key->mv_data + RST_KEY_SIZE);
    return RST_OK;
}

int rst_lease_seek(rst_lease_cursor *cursor, uint64_t from, rst_error *error)
{
    unsigned char bytes[RST_TURN_KEY_SIZE];
    rst_turn_key(bytes, cursor->consumer_key, from);
    MDB_val key = {sizeof bytes, bytes};
    MDB_val value;
    int result = mdb_cursor_get(cursor->cursor, &key, &value, MDB_SET_RANGE);
    return take_lease(cursor, result, &key, &value, error);
}

int rst_lease_open(MDB_txn *txn, const rst_env *env, const uint8_t consumer_key[RST_KEY_SIZE],
                   uint64_t from, rst_lease_cursor *cursor, rst_error *error)
{
    int result = mdb_cursor_open(txn, env->leases, &cursor->cursor);
    if (result) {
        return rst_fail_lmdb(error, result, "reading leases");
    }
    memcpy(cursor->consumer_key, consumer_key, RST_KEY_SIZE);
    int code = rst_lease_seek(cursor, from, error);
    if (code) {
        rst_lease_close(cursor);
    }
    return code;
}

int rst_lease_step(rst_lease_cursor *cursor, rst_error *error)
{
    MDB_val key;
    MDB_val value;
    int result = mdb_cursor_get(cursor->cursor, &key, &value, MDB_NEXT);
    return take_lease(cursor, result, &key, &value, error);
}

int rst_lease_reach(rst_lease_cursor *cursor, uint64_t to, rst_error *error)
{
    int code = RST_OK;
    while (code == RST_OK && cursor->sequence < to) {
        code = rst_lease_step(cursor, error);
    }
    return code;
}

int rst_lease_store(rst_lease_cursor *cursor, rst_error *error)
{
    unsigned char bytes[RST_TURN_KEY_SIZE];
    rst_turn_key(bytes, cursor->consumer_key, cursor->sequence);
    MDB_val key = {sizeof bytes, bytes};
    MDB_val value = {sizeof cursor->entry, &cursor->entry};
    int result = mdb_cursor_put(cursor->cursor, &key, &value, MDB_CURRENT);
    return result ? rst_fail_lmdb(error, result, "writing a lease") : RST_OK;
}

int rst_lease_remove(rst_lease_cursor *cursor, rst_error *error)
{
    int result = mdb_cursor_del(cursor->cursor, 0);
    return result ? rst_fail_lmdb(error, result, "removing a lease") : RST_OK;
}

void rst_lease_close(rst_lease_cursor *cursor)
{
    mdb_cursor_close(cursor->cursor);
}

int rst_lease_insert(rst_write *write, const uint8_t consumer_key[RST_KEY_SIZE], uint64_t sequence,
                     const rst_lease_entry *entry, rst_error *error)
{
    unsigned char bytes[RST_TURN_KEY_SIZE];
    rst_turn_key(bytes, consumer_key, sequence);
    MDB_val key = {sizeof bytes, bytes};
    MDB_val value = {sizeof *entry, (void *)(uintptr_t)entry};
    int result = mdb_put(write->txn, write->store->env->leases, &key, &value, 0);
    return result ? rst_fail_lmdb(error, result, "writing a lease") : RST_OK;
}

/* ---------------------------------------------------------------- the ready order */

static int take_ready(rst_ready_cursor *cursor, int result, const MDB_val *key,
                      const MDB_val *value, rst_error *error)
{
    cursor->sequence = RST_SEQUENCE_END;
    if (result == MDB_NOTFOUND) {
        return RST_OK;
    }
    if (result) {
        return rst_fail_lmdb(error, result, "reading the ready order");
    }
    if (key->mv_size != RST_READY_KEY_SIZE || value->mv_size != RST_KEY_SIZE) {
        return rst_fail(error, RST_ERR_CORRUPT, "ready", "an entry of the ready order: sizes");
    }
    cursor->sequence = rst_get_be64(key->mv_data);
    memcpy(cursor->session_key, value->mv_data, RST_KEY_SIZE);
    return RST_OK;
}

int rst_ready_seek(rst_ready_cursor *cursor, uint64_t from, rst_error *error)
{
    unsigned char bytes[RST_READY_KEY_SIZE];
    rst_put_be64(bytes, from);
    MDB_val key = {sizeof bytes, bytes};
    MDB_val value;
    int result = mdb_cursor_get(cursor->cursor, &key, &value, MDB_SET_RANGE);
    return take_ready(cursor, result, &key, &value, error);
}

int rst_ready_open(MDB_txn *txn, const rst_env *env, uint64_t from, rst_ready_cursor *cursor,
                   rst_error *error)
{
    int result = mdb_cursor_open(txn, env->ready, &cursor->cursor);
    if (result) {
        return rst_fail_lmdb(error, result, "reading the ready order");
    }
    int code = rst_ready_seek(cursor, from, error);
    if (code) {
        rst_ready_close(cursor);
    }
    return code;
}

int rst_ready_step(rst_ready_cursor *cursor, rst_error *error)
{
    MDB_val key;
    MDB_val value;
    int result = mdb_cursor_get(cursor->cursor, &key, &value, MDB_NEXT);
    return take_ready(cursor, result, &key, &value, error);
}

int rst_ready_reach(rst_ready_cursor *cursor, uint64_t to, rst_error *error)
{
    int code = RST_OK;
    while (code == RST_OK && cursor->sequence < to) {
        code = rst_ready_step(cursor, error);
    }
    return code;
}

void rst_ready_close(rst_ready_cursor *cursor)
{
    mdb_cursor_close(cursor->cursor);
}
