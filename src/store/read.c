/* Snapshots, and what is read from them. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"
#include "pages/pages.h"

int rst_snapshot_open(rst_store *store, rst_snapshot **out, rst_error *error)
{
    rst_error_clear(error);
    *out = NULL;
    int code = rst_store_usable(store, false, error);
    if (code) {
        return code;
    }
    rst_snapshot *snapshot = malloc(sizeof *snapshot);
    if (!snapshot) {
        return rst_fail(error, RST_ERR_MEMORY, NULL, "no memory");
    }
    int result = rst_begin_reading(store->env, &snapshot->txn);
    if (result) {
        free(snapshot);
        return rst_fail_lmdb(error, result, "opening a snapshot");
    }
    snapshot->store = store;
    atomic_fetch_add(&store->snapshots, 1);
    *out = snapshot;
    return RST_OK;
}

void rst_snapshot_close(rst_snapshot *snapshot)
{
    if (!snapshot) {
        return;
    }
    /* In the child of a fork the reader slot is still the parent's. */
    if (rst_store_usable(snapshot->store, false, NULL) == RST_OK) {
        mdb_txn_abort(snapshot->txn);
    }
    atomic_fetch_sub(&snapshot->store->snapshots, 1);
    free(snapshot);
}

uint64_t rst_snapshot_id(const rst_snapshot *snapshot)
{
    return mdb_txn_id(snapshot->txn);
}

/* ---------------------------------------------------------------- sessions */

static void fill_session(const uint8_t *key, const rst_session_entry *e, const char *id,
                         rst_session *out)
{
    *out = (rst_session){
        .id = id,
        .id_size = e->id_size,
        .state = (rst_state)e->state,
        .sequence = e->sequence,
        .turn_count = e->turn_count,
        .topk = e->topk,
        .outcome = {.status = (rst_outcome_status)e->status,
                    .reward = e->reward,
                    .group_index = e->group_index,
                    .index = e->index},
        .generated_count = e->generated_count,
        .sequence_count = e->sequence_count,
        .value_size = e->value_size,
        .weight_version_min = e->weight_version_min,
        .weight_version_max = e->weight_version_max,
        .created_ns = e->created_ns,
        .changed_ns = e->changed_ns,
    };
    memcpy(out->key, key, RST_KEY_SIZE);
}

static int not_found(rst_error *error, const void *session, size_t session_size)
{
    char shown[RST_SHOWN_ID_SIZE];
    return rst_fail(error, RST_ERR_NOT_FOUND, "session", "there is no session \"%s\"",
                    rst_shown_id(session, session_size, shown));
}

static int find_session(rst_snapshot *snapshot, const void *session, size_t session_size,
                        uint8_t key[RST_KEY_SIZE], rst_session_entry *entry, const char **id,
                        rst_error *error)
{
    int code = rst_store_usable(snapshot->store, false, error);
    if (!code) {
        code = rst_check_session_id(session, session_size, error);
    }
    if (code) {
        return code;
    }
    rst_session_key(session, session_size, key);
    code = rst_read_session(snapshot->txn, snapshot->store->env, key, entry, id, error);
    if (code == RST_ERR_NOT_FOUND ||
        (!code && (entry->id_size != session_size || memcmp(*id, session, session_size) != 0))) {
        return not_found(error, session, session_size);
    }
    return code;
}

int rst_session_get(rst_snapshot *snapshot, const void *session, size_t session_size,
                    rst_session *out, rst_error *error)
{
    rst_error_clear(error);
    uint8_t key[RST_KEY_SIZE];
    rst_session_entry entry;
    const char *id;
    int code = find_session(snapshot, session, session_size, key, &entry, &id, error);
    if (!code) {
        fill_session(key, &entry, id, out);
    }
    return code;
}

/* The first entry of `dbi` whose key is over `after` (NULL: the first of all). */
static int next_entry(rst_snapshot *snapshot, MDB_dbi dbi, const void *after, size_t key_size,
                      MDB_val *key, MDB_val *value, rst_error *error)
{
    int code = rst_store_usable(snapshot->store, false, error);
    if (code) {
        return code;
    }
    MDB_cursor *cursor;
    int result = mdb_cursor_open(snapshot->txn, dbi, &cursor);
    if (result) {
        return rst_fail_lmdb(error, result, "reading");
    }
    if (!after) {
        result = mdb_cursor_get(cursor, key, value, MDB_FIRST);
    } else {
        *key = (MDB_val){key_size, (void *)(uintptr_t)after};
        result = mdb_cursor_get(cursor, key, value, MDB_SET_RANGE);
        if (!result && key->mv_size == key_size && memcmp(key->mv_data, after, key_size) == 0) {
            result = mdb_cursor_get(cursor, key, value, MDB_NEXT);
        }
    }
    mdb_cursor_close(cursor);
    if (result == MDB_NOTFOUND) {
        return rst_fail(error, RST_ERR_NOT_FOUND, NULL, "there are no more");
    }
    if (result) {
        return rst_fail_lmdb(error, result, "reading");
    }
    if (key->mv_size != key_size) {
        return rst_fail(error, RST_ERR_CORRUPT, NULL, "a key of %zu bytes, not %zu", key->mv_size,
                        key_size);
    }
    return RST_OK;
}

int rst_session_next(rst_snapshot *snapshot, const uint8_t *after, rst_session *out,
                     rst_error *error)
{
    rst_error_clear(error);
    MDB_val key;
    MDB_val value;
    int code = next_entry(snapshot, snapshot->store->env->sessions, after, RST_KEY_SIZE, &key,
                          &value, error);
    rst_session_entry entry;
    const char *id;
    if (!code) {
        code = rst_parse_session(&value, &entry, &id, error);
    }
    if (!code) {
        fill_session(key.mv_data, &entry, id, out);
    }
    return code;
}

int rst_ready_next(rst_snapshot *snapshot, uint64_t sequence, rst_session *out, rst_error *error)
{
    rst_error_clear(error);
    unsigned char after[RST_READY_KEY_SIZE];
    rst_put_be64(after, sequence);
    MDB_val key;
    MDB_val value;
    const rst_env *env = snapshot->store->env;
    int code = next_entry(snapshot, env->ready, after, RST_READY_KEY_SIZE, &key, &value, error);
    if (code) {
        return code;
    }
    rst_session_entry entry;
    const char *id;
    if (value.mv_size != RST_KEY_SIZE) {
        return rst_fail(error, RST_ERR_CORRUPT, "ready", "an entry of the ready order is damaged");
    }
    code = rst_read_session(snapshot->txn, env, value.mv_data, &entry, &id, error);
    if (code == RST_ERR_NOT_FOUND || (!code && entry.sequence != rst_get_be64(key.mv_data))) {
        return rst_fail(error, RST_ERR_CORRUPT, "ready",
                        "the ready order names a session that is not there");
    }
    if (!code) {
        fill_session(value.mv_data, &entry, id, out);
    }
    return code;
}

/* ---------------------------------------------------------------- turns */

int rst_read_turn(MDB_txn *txn, const rst_env *env, const uint8_t key[RST_KEY_SIZE], uint32_t turn,
                  rst_turn *out, MDB_val *value, rst_error *error)
{
    unsigned char turn_key[RST_TURN_KEY_SIZE];
    rst_turn_key(turn_key, key, turn);
    MDB_val k = {sizeof turn_key, turn_key};
    MDB_val v;
    int result = mdb_get(txn, env->turns, &k, &v);
    if (result == MDB_NOTFOUND) {
        return rst_fail(error, RST_ERR_NOT_FOUND, "turn", "there is no turn %u", turn);
    }
    if (result) {
        return rst_fail_lmdb(error, result, "reading a turn");
    }
    if (!rst_pages_value_sound(env, &v, true)) {
        return rst_fail(error, RST_ERR_CORRUPT, "pages", "a turn's value has not its own pages");
    }
    int code = rst_record_open(v.mv_data, v.mv_size, out, error);
    const rst_record_header *header = v.mv_data;
    if (!code && (out->turn != turn || memcmp(header->session_key, key, RST_KEY_SIZE) != 0)) {
        code = rst_fail(error, RST_ERR_CORRUPT, "turn", "a turn is stored under another's key");
    }
    if (value) {
        *value = v;
    }
    return code;
}

/* ---------------------------------------------------------------- the check at first reading
 *
 * Ids and logprobs go into a trainer's indexing and arithmetic, so the first time this process is
 * given a record its values are checked; later times cost one look at a table.  The table may
 * forget (two records can share a place), which only costs another check. */

enum { CHECKED_BITS = 16 };

static _Atomic(uint64_t) *checked_place(rst_env *env, uint64_t mark)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    _Atomic(uint64_t) *table = __atomic_load_n(&env->checked, __ATOMIC_ACQUIRE);
    if (!table) {
        pthread_mutex_lock(&lock);
        table = env->checked;
        if (!table) {
            table = calloc((size_t)1 << CHECKED_BITS, sizeof *table);
            __atomic_store_n(&env->checked, table, __ATOMIC_RELEASE);
        }
        pthread_mutex_unlock(&lock);
    }
    return table ? &table[mark >> (64 - CHECKED_BITS)] : NULL;
}

static int check_first_reading(rst_snapshot *snapshot, const rst_turn *turn, const MDB_val *value,
                               rst_error *error)
{
    if (snapshot->store->flags & RST_OPEN_TRUST) {
        return RST_OK;
    }
    /* The same place can hold another record later: the checksum tells them apart. */
    const rst_record_header *header = value->mv_data;
    uint64_t mark = (header->checksum ^ (uintptr_t)value->mv_data) * UINT64_C(0x9E3779B97F4A7C15);
    mark |= 1; /* 0 is an empty place */
    _Atomic(uint64_t) *place = checked_place(snapshot->store->env, mark);
    if (place && atomic_load_explicit(place, memory_order_relaxed) == mark) {
        return RST_OK;
    }
    int code = rst_check_turn(turn, header, error);
    if (!code && place) {
        atomic_store_explicit(place, mark, memory_order_relaxed);
    }
    return code;
}

int rst_turn_get(rst_snapshot *snapshot, const void *session, size_t session_size, uint32_t turn,
                 rst_turn *out, rst_error *error)
{
    rst_error_clear(error);
    uint8_t key[RST_KEY_SIZE];
    rst_session_entry entry;
    const char *id;
    int code = find_session(snapshot, session, session_size, key, &entry, &id, error);
    if (code) {
        return code;
    }
    code = rst_turn_get_by_key(snapshot, key, turn, out, error);
    if (code == RST_ERR_NOT_FOUND && turn >= entry.turn_count) {
        char shown[RST_SHOWN_ID_SIZE];
        return rst_fail(error, RST_ERR_NOT_FOUND, "turn",
                        "session \"%s\" has %u turns: there is no turn %u",
                        rst_shown_id(session, session_size, shown), entry.turn_count, turn);
    }
    return code;
}

int rst_turn_get_by_key(rst_snapshot *snapshot, const uint8_t *key, uint32_t turn, rst_turn *out,
                        rst_error *error)
{
    rst_error_clear(error);
    int code = rst_store_usable(snapshot->store, false, error);
    MDB_val value;
    if (!code) {
        code = rst_read_turn(snapshot->txn, snapshot->store->env, key, turn, out, &value, error);
    }
    return code ? code : check_first_reading(snapshot, out, &value, error);
}

int rst_turn_value(rst_snapshot *snapshot, const uint8_t *key, uint32_t turn, const void **value,
                   size_t *value_size, rst_error *error)
{
    rst_error_clear(error);
    int code = rst_store_usable(snapshot->store, false, error);
    rst_turn ignored;
    MDB_val found;
    if (!code) {
        code =
            rst_read_turn(snapshot->txn, snapshot->store->env, key, turn, &ignored, &found, error);
    }
    if (!code) {
        *value = found.mv_data;
        *value_size = found.mv_size;
    }
    return code;
}
