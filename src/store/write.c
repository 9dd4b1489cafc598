/* The write transaction, and what it can do to one session. */
#include "write.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "../layout/stream.h"
#include "durability/guard.h"
#include "durability/sync.h"
#include "pages/pages.h"
#include "sequence.h"

int rst_check_not_deleted(const rst_store *store, rst_error *error)
{
    int fd;
    struct stat info;
    if (mdb_env_get_fd(store->env->lmdb, &fd) != 0 || fstat(fd, &info) != 0 || info.st_nlink == 0) {
        return rst_fail(error, RST_ERR_GONE, NULL,
                        "%s was deleted while it was open: nobody would find what is written now",
                        store->path);
    }
    return RST_OK;
}

int rst_write_begin_now(rst_store *store, rst_write *write, rst_error *error)
{
    *write = (rst_write){.store = store};
    int code = rst_store_usable(store, true, error);
    if (!code) {
        code = rst_check_not_deleted(store, error);
    }
    if (!code) {
        code = rst_syncer_check(store->env, error);
    }
    if (code) {
        return code;
    }
    int result = rst_begin_writing(store->env, &write->txn);
    if (result) {
        return rst_fail_lmdb(error, result, "beginning to write");
    }
    code = rst_read_totals(write->txn, store->env, &write->totals, error);
    if (code) {
        rst_write_abort(write);
    }
    return code;
}

void rst_write_abort(rst_write *write)
{
    if (write->txn) {
        mdb_txn_abort(write->txn);
        write->txn = NULL;
        rst_guard_unlock_writing(write->store->env->guard);
    }
}

int rst_write_commit(rst_write *write, rst_error *error)
{
    if (!write->changed) {
        rst_write_abort(write);
        return RST_OK;
    }
    if (write->freed) {
        write->totals.freed_transaction = mdb_txn_id(write->txn);
    }
    MDB_val key = {sizeof RST_META_KEY_TOTALS - 1, (void *)(uintptr_t)RST_META_KEY_TOTALS};
    MDB_val value = {sizeof write->totals, &write->totals};
    int result = mdb_put(write->txn, write->store->env->meta, &key, &value, 0);
    if (result) {
        rst_write_abort(write);
        return rst_fail_lmdb(error, result, "writing the totals");
    }
    result = mdb_txn_commit(write->txn); /* frees the transaction also when it fails */
    write->txn = NULL;
    rst_guard_unlock_writing(write->store->env->guard);
    return result ? rst_fail_lmdb(error, result, "committing") : RST_OK;
}

/* ---------------------------------------------------------------- entries */

static int put_session(rst_write *write, const uint8_t key[RST_KEY_SIZE], rst_session_entry *entry,
                       const char *id, rst_error *error)
{
    /* The id may point into the page that is rewritten. */
    char copy[RST_SESSION_ID_SIZE_MAX];
    memcpy(copy, id, entry->id_size);
    entry->changed_ns = rst_clock_ns(CLOCK_REALTIME);
    entry->revision = mdb_txn_id(write->txn);
    MDB_val k = {RST_KEY_SIZE, (void *)(uintptr_t)key};
    MDB_val v = {sizeof *entry + entry->id_size, NULL};
    int result = mdb_put(write->txn, write->store->env->sessions, &k, &v, MDB_RESERVE);
    if (result) {
        return rst_fail_lmdb(error, result, "writing a session");
    }
    memcpy(v.mv_data, entry, sizeof *entry);
    memcpy((char *)v.mv_data + sizeof *entry, copy, entry->id_size);
    write->changed = true;
    return RST_OK;
}

static void note_version(rst_session_entry *entry, int64_t version)
{
    if (version == RST_NO_VERSION) {
        return;
    }
    if (entry->weight_version_min == RST_NO_VERSION || version < entry->weight_version_min) {
        entry->weight_version_min = version;
    }
    if (entry->weight_version_max == RST_NO_VERSION || version > entry->weight_version_max) {
        entry->weight_version_max = version;
    }
}

/* Add one turn's figures to its session's entry and the totals. */
static void count_turn(rst_write *write, rst_session_entry *entry, const rst_turn *turn,
                       size_t value_size)
{
    entry->turn_count++;
    entry->generated_count += turn->token_count;
    entry->sequence_count = (uint64_t)turn->prefix_count + turn->prompt_count + turn->token_count;
    entry->value_size += value_size;
    entry->topk = turn->topk > entry->topk ? turn->topk : entry->topk;
    note_version(entry, turn->weight_version_number);
    write->totals.turn_count++;
    write->totals.generated_count += turn->token_count;
    write->totals.value_size += value_size;
}

static void uncount_session(rst_write *write, const rst_session_entry *entry)
{
    write->totals.turn_count -= entry->turn_count;
    write->totals.generated_count -= entry->generated_count;
    write->totals.value_size -= entry->value_size;
}

/* Work the entry's figures out again from its first `turn_count` turns. */
static int recount(rst_write *write, const uint8_t key[RST_KEY_SIZE], rst_session_entry *entry,
                   uint32_t turn_count, rst_error *error)
{
    uncount_session(write, entry);
    entry->turn_count = 0;
    entry->generated_count = entry->sequence_count = entry->value_size = 0;
    entry->topk = 0;
    entry->weight_version_min = entry->weight_version_max = RST_NO_VERSION;
    for (uint32_t i = 0; i < turn_count; i++) {
        rst_turn turn;
        MDB_val value;
        int code = rst_read_turn(write->txn, write->store->env, key, i, &turn, &value, error);
        if (code) {
            return code;
        }
        count_turn(write, entry, &turn, value.mv_size);
    }
    return RST_OK;
}

/* LMDB frees the pages that the value's first page speaks of.  Only a session that this transaction
 * has changed can have pages that it has written. */
static bool may_be_freed(const rst_write *write, const MDB_val *value,
                         const rst_session_entry *entry)
{
    return rst_pages_value_sound(write->store->env, value,
                                 entry->revision == mdb_txn_id(write->txn));
}

/* Drop the session's turns from `from` on. */
static int delete_turns(rst_write *write, const uint8_t key[RST_KEY_SIZE], uint32_t from,
                        const rst_session_entry *entry, rst_error *error)
{
    MDB_dbi turns = write->store->env->turns;
    for (uint32_t turn = from; turn < entry->turn_count; turn++) {
        unsigned char turn_key[RST_TURN_KEY_SIZE];
        rst_turn_key(turn_key, key, turn);
        MDB_val k = {sizeof turn_key, turn_key};
        MDB_val value;
        int result = mdb_get(write->txn, turns, &k, &value);
        if (result == MDB_NOTFOUND) {
            return rst_fail(error, RST_ERR_CORRUPT, "turns", "turn %u of a session is missing",
                            turn);
        }
        if (!result && !may_be_freed(write, &value, entry)) {
            return rst_fail(error, RST_ERR_CORRUPT, "pages",
                            "the pages of turn %u of a session are damaged", turn);
        }
        if (!result) {
            result = mdb_del(write->txn, turns, &k, NULL);
        }
        if (result) {
            return rst_fail_lmdb(error, result, "deleting a turn");
        }
        write->changed = write->freed = true;
    }
    return RST_OK;
}

static int delete_session(rst_write *write, const uint8_t key[RST_KEY_SIZE],
                          const rst_session_entry *entry, rst_error *error)
{
    const rst_env *env = write->store->env;
    int code = delete_turns(write, key, 0, entry, error);
    if (code) {
        return code;
    }
    MDB_val k = {RST_KEY_SIZE, (void *)(uintptr_t)key};
    int result = mdb_del(write->txn, env->sessions, &k, NULL);
    if (!result && entry->state == RST_STATE_SEALED) {
        unsigned char ready_key[RST_READY_KEY_SIZE];
        rst_put_be64(ready_key, entry->sequence);
        MDB_val r = {sizeof ready_key, ready_key};
        result = mdb_del(write->txn, env->ready, &r, NULL);
    }
    if (result) {
        return rst_fail_lmdb(error, result, "deleting a session");
    }
    uncount_session(write, entry);
    if (entry->state == RST_STATE_SEALED) {
        write->totals.sealed_count--;
    } else {
        write->totals.open_count--;
    }
    write->changed = true;
    return RST_OK;
}

int rst_write_release(rst_write *write, const uint8_t key[RST_KEY_SIZE], rst_error *error)
{
    rst_session_entry entry;
    const char *id;
    int code = rst_read_session(write->txn, write->store->env, key, &entry, &id, error);
    if (!code) {
        code = delete_session(write, key, &entry, error);
    }
    if (!code) {
        write->totals.released_count++;
    }
    return code;
}

/* ---------------------------------------------------------------- turns */

/* A value under half a page would share a page with others, where nothing is aligned. */
static size_t value_size_of(const rst_env *env, size_t record_size)
{
    size_t least = env->format.page_size / 2;
    return record_size < least ? least : record_size;
}

static uint64_t pages_of(const rst_env *env, size_t value_size)
{
    return rst_pages_of_value(env->format.page_size, value_size);
}

/* Put a value without its bytes; *page gets the first page it lies in.  flags: 0 where one stands
 * there already, else MDB_NOOVERWRITE: what no session knows of was not looked at. */
static int reserve_pages(rst_write *write, const uint8_t key[RST_KEY_SIZE], uint64_t number,
                         size_t size, unsigned flags, unsigned char **out, uint64_t *page,
                         rst_error *error)
{
    const rst_env *env = write->store->env;
    unsigned char turn_key[RST_TURN_KEY_SIZE];
    rst_turn_key(turn_key, key, number);
    MDB_val k = {sizeof turn_key, turn_key};
    MDB_val v = {size, NULL};
    int result = mdb_put(write->txn, env->turns, &k, &v, MDB_RESERVE | flags);
    if (result == MDB_KEYEXIST) {
        return rst_fail(error, RST_ERR_CORRUPT, "turns",
                        "a turn is stored that its session does not know of");
    }
    if (result) {
        return rst_fail_lmdb(error, result, "storing a turn");
    }
    *out = v.mv_data;
    *page = (uint64_t)(*out - env->map) / env->format.page_size;
    return RST_OK;
}

static int unreserve(rst_write *write, const uint8_t key[RST_KEY_SIZE], uint64_t number,
                     rst_error *error)
{
    unsigned char turn_key[RST_TURN_KEY_SIZE];
    rst_turn_key(turn_key, key, number);
    MDB_val k = {sizeof turn_key, turn_key};
    int result = mdb_del(write->txn, write->store->env->turns, &k, NULL);
    return result ? rst_fail_lmdb(error, result, "storing a turn") : RST_OK;
}

/* Room for a turn below the capacity: the pages over it are kept for releases.  A release may have
 * used some of those and freed them, and LMDB hands such pages out before it looks at what others
 * freed.  They are filled meanwhile, under keys that no turn can have, until a page below the
 * capacity comes or the file would grow. */
static int reserve_value(rst_write *write, const uint8_t key[RST_KEY_SIZE], uint32_t turn,
                         size_t size, unsigned flags, unsigned char **out, rst_error *error)
{
    const rst_env *env = write->store->env;
    MDB_envinfo info;
    mdb_env_info(env->lmdb, &info);
    uint64_t pages = pages_of(env, size);
    uint64_t filled = 0;
    uint64_t page = 0;
    int code = reserve_pages(write, key, turn, size, flags, out, &page, error);
    while (!code && page + pages > env->capacity_pages) {
        if (page > info.me_last_pgno) {
            return rst_fail(error, RST_ERR_FULL, NULL, "the store is at capacity");
        }
        unsigned char *unused;
        code = unreserve(write, key, turn, error);
        if (!code) {
            code = reserve_pages(write, key, UINT64_MAX - filled, size, MDB_NOOVERWRITE, &unused,
                                 &page, error);
            filled++;
        }
        if (!code) {
            code = reserve_pages(write, key, turn, size, flags, out, &page, error);
        }
    }
    for (uint64_t i = 0; i < filled && !code; i++) {
        code = unreserve(write, key, UINT64_MAX - i, error);
    }
    return code;
}

/* A record of this size or more is copied past the caches.  The map's pages come round rarely, so
 * that they are in none, and who reads the record does so later or elsewhere: the write lock is
 * held for less time than with memcpy.  Smaller ones gain nothing. */
#define STREAM_SIZE ((size_t)1 << 18)

static int put_value(rst_write *write, const uint8_t key[RST_KEY_SIZE], uint32_t turn,
                     const rst_planned *planned, bool is_stored, size_t *stored_size,
                     rst_error *error)
{
    const rst_env *env = write->store->env;
    size_t size = value_size_of(env, planned->size);
    if (pages_of(env, size) >= env->capacity_pages) {
        return rst_fail(error, RST_ERR_LIMIT, NULL,
                        "the turn has %zu bytes, more than the store's whole capacity of %llu",
                        planned->size, (unsigned long long)env->format.capacity_size);
    }
    unsigned char *out = NULL;
    int code = reserve_value(write, key, turn, size, is_stored ? 0 : MDB_NOOVERWRITE, &out, error);
    if (code) {
        return code;
    }
    if (planned->size >= STREAM_SIZE) {
        rst_stream_copy(out, planned->bytes, planned->size);
        rst_stream_done();
    } else {
        memcpy(out, planned->bytes, planned->size);
    }
    memset(out + planned->size, 0, size - planned->size);
    *stored_size = size;
    write->changed = true;
    return RST_OK;
}

static bool same_tokens(const rst_turn *a, const rst_turn *b)
{
    return a->token_count == b->token_count && a->prompt_count == b->prompt_count &&
           a->prefix_count == b->prefix_count && a->trimmed_count == b->trimmed_count &&
           memcmp(a->token_ids, b->token_ids, sizeof(int32_t) * a->token_count) == 0 &&
           memcmp(a->prompt_ids, b->prompt_ids, sizeof(int32_t) * a->prompt_count) == 0;
}

/* What is stored as this turn, against what is to be: unchanged, or may it be replaced? */
static int compare_stored(rst_write *write, const rst_change *change, const rst_planned *planned,
                          const rst_session_entry *entry, const char *shown, bool *same,
                          rst_error *error)
{
    rst_turn old;
    MDB_val value;
    int code = rst_read_turn(write->txn, write->store->env, planned->key, change->turn, &old,
                             &value, error);
    if (code) {
        return code;
    }
    const rst_record_header *header = value.mv_data;
    *same = header->record_size == planned->size &&
            memcmp(value.mv_data, planned->bytes, planned->size) == 0;
    if (*same) {
        return RST_OK;
    }
    if (!(change->flags & RST_CHANGE_REPLACE)) {
        return rst_fail(error, RST_ERR_CONFLICT, "turn",
                        "turn %u of session \"%s\" is stored with other contents: ask to replace "
                        "it, or restart the session",
                        change->turn, shown);
    }
    if (entry->state == RST_STATE_SEALED) {
        return rst_fail(error, RST_ERR_SEALED, "turn", "session \"%s\" is sealed", shown);
    }
    if (!may_be_freed(write, &value, entry)) {
        return rst_fail(error, RST_ERR_CORRUPT, "pages",
                        "the pages of turn %u of session \"%s\" are damaged", change->turn, shown);
    }
    rst_turn new;
    code = rst_record_open(planned->bytes, planned->size, &new, error);
    if (!code && change->turn + 1 < entry->turn_count && !same_tokens(&old, &new)) {
        return rst_fail(error, RST_ERR_CONFLICT, "turn",
                        "turn %u of session \"%s\" has other tokens than the stored one, and %u "
                        "later turns build on those: restart the session from turn %u",
                        change->turn, shown, entry->turn_count - change->turn - 1, change->turn);
    }
    return code;
}

static rst_session_entry new_entry(const rst_change *change)
{
    return (rst_session_entry){
        .magic = RST_SESSION_MAGIC,
        .version = RST_FORMAT_VERSION,
        .state = RST_STATE_OPEN,
        .id_size = (uint32_t)change->session_size,
        .reward = __builtin_nan(""),
        .group_index = RST_NO_INDEX,
        .index = RST_NO_INDEX,
        .weight_version_min = RST_NO_VERSION,
        .weight_version_max = RST_NO_VERSION,
        .created_ns = rst_clock_ns(CLOCK_REALTIME),
    };
}

int rst_find_session(MDB_txn *txn, const rst_env *env, const rst_change *change,
                     const uint8_t key[RST_KEY_SIZE], rst_session_entry *entry, const char **id,
                     rst_error *error)
{
    int code = rst_read_session(txn, env, key, entry, id, error);
    char shown[RST_SHOWN_ID_SIZE];
    rst_shown_id(change->session, change->session_size, shown);
    if (code == RST_ERR_NOT_FOUND) {
        return rst_fail(error, code, "session", "there is no session \"%s\"", shown);
    }
    if (!code && (entry->id_size != change->session_size ||
                  memcmp(*id, change->session, change->session_size) != 0)) {
        return rst_fail(error, RST_ERR_CONFLICT, "session",
                        "session \"%s\" has the same key as another session", shown);
    }
    return code;
}

int rst_write_put(rst_write *write, rst_change *change, rst_planned *planned, rst_error *error)
{
    const rst_env *env = write->store->env;
    char shown[RST_SHOWN_ID_SIZE];
    rst_shown_id(change->session, change->session_size, shown);
    rst_session_entry entry;
    const char *id = change->session;
    int code = rst_find_session(write->txn, env, change, planned->key, &entry, &id, error);
    bool is_new = code == RST_ERR_NOT_FOUND;
    if (is_new) {
        rst_error_clear(error);
        entry = new_entry(change);
        id = change->session;
    } else if (code) {
        return code;
    }
    if (change->turn > entry.turn_count) {
        return rst_fail(error, RST_ERR_ORDER, "turn",
                        "turn %u of session \"%s\": %u turns are stored, the next one is turn %u",
                        change->turn, shown, entry.turn_count, entry.turn_count);
    }
    code = rst_plan_in(write, change, planned, is_new ? NULL : &entry, error);
    if (code) {
        return code;
    }
    bool is_stored = change->turn < entry.turn_count;
    if (is_stored) {
        bool same;
        code = compare_stored(write, change, planned, &entry, shown, &same, error);
        if (code || same) {
            change->unchanged = !code;
            return code;
        }
    } else if (entry.state == RST_STATE_SEALED) {
        return rst_fail(error, RST_ERR_SEALED, "turn",
                        "session \"%s\" is sealed with %u turns and takes no more", shown,
                        entry.turn_count);
    } else if (entry.turn_count >= RST_TURN_COUNT_MAX) {
        return rst_fail(error, RST_ERR_LIMIT, "turn", "session \"%s\" has %u turns already", shown,
                        entry.turn_count);
    }
    /* LMDB would keep the pages of a longer value that was written in this same transaction. */
    code = is_stored ? unreserve(write, planned->key, change->turn, error) : RST_OK;
    if (code) {
        return code;
    }
    size_t stored_size = 0;
    code = put_value(write, planned->key, change->turn, planned, is_stored, &stored_size, error);
    if (code) {
        return code;
    }
    if (is_stored) {
        write->freed = true;
        code = recount(write, planned->key, &entry, entry.turn_count, error);
    } else {
        rst_turn turn;
        code = rst_record_open(planned->bytes, planned->size, &turn, error);
        if (!code) {
            count_turn(write, &entry, &turn, stored_size);
        }
    }
    write->totals.open_count += is_new;
    return code ? code : put_session(write, planned->key, &entry, id, error);
}

/* ---------------------------------------------------------------- outcomes and ends */

static bool same_outcome(const rst_session_entry *entry, const rst_outcome *outcome)
{
    bool same_reward = entry->reward == outcome->reward ||
                       (entry->reward != entry->reward && outcome->reward != outcome->reward);
    return entry->status == outcome->status && same_reward &&
           entry->group_index == outcome->group_index && entry->index == outcome->index;
}

int rst_write_seal(rst_write *write, rst_change *change, const uint8_t key[RST_KEY_SIZE],
                   rst_error *error)
{
    const rst_env *env = write->store->env;
    rst_session_entry entry;
    const char *id;
    int code = rst_find_session(write->txn, env, change, key, &entry, &id, error);
    if (code) {
        return code;
    }
    bool was_sealed = entry.state == RST_STATE_SEALED;
    if (was_sealed && same_outcome(&entry, &change->outcome)) {
        change->unchanged = 1;
        return RST_OK;
    }
    if (was_sealed && !(change->flags & RST_CHANGE_REPLACE)) {
        char shown[RST_SHOWN_ID_SIZE];
        return rst_fail(error, RST_ERR_CONFLICT, "outcome",
                        "session \"%s\" is sealed with another outcome",
                        rst_shown_id(id, entry.id_size, shown));
    }
    entry.status = (uint8_t)change->outcome.status;
    entry.reward = change->outcome.reward;
    entry.group_index = change->outcome.group_index;
    entry.index = change->outcome.index;
    if (!was_sealed) {
        entry.state = RST_STATE_SEALED;
        entry.sequence = write->totals.next_sequence++;
        unsigned char ready_key[RST_READY_KEY_SIZE];
        rst_put_be64(ready_key, entry.sequence);
        MDB_val k = {sizeof ready_key, ready_key};
        MDB_val v = {RST_KEY_SIZE, (void *)(uintptr_t)key};
        /* Numbers only grow, so the newest goes to the last page without a search. */
        int result = mdb_put(write->txn, env->ready, &k, &v, MDB_APPEND);
        if (result) {
            return rst_fail_lmdb(error, result, "sealing a session");
        }
        write->totals.open_count--;
        write->totals.sealed_count++;
    }
    return put_session(write, key, &entry, id, error);
}

int rst_write_restart(rst_write *write, rst_change *change, const uint8_t key[RST_KEY_SIZE],
                      rst_error *error)
{
    rst_session_entry entry;
    const char *id;
    int code = rst_find_session(write->txn, write->store->env, change, key, &entry, &id, error);
    if (code == RST_ERR_NOT_FOUND ||
        (!code && change->turn >= entry.turn_count && entry.state == RST_STATE_OPEN)) {
        rst_error_clear(error);
        change->unchanged = 1;
        return RST_OK;
    }
    if (code) {
        return code;
    }
    if (entry.state == RST_STATE_SEALED) {
        char shown[RST_SHOWN_ID_SIZE];
        return rst_fail(error, RST_ERR_SEALED, "session",
                        "session \"%s\" is sealed: release it to write it anew",
                        rst_shown_id(id, entry.id_size, shown));
    }
    if (change->turn == 0) {
        return delete_session(write, key, &entry, error);
    }
    code = delete_turns(write, key, change->turn, &entry, error);
    if (!code) {
        code = recount(write, key, &entry, change->turn, error);
    }
    return code ? code : put_session(write, key, &entry, id, error);
}

int rst_write_release_checked(rst_write *write, rst_change *change, const uint8_t key[RST_KEY_SIZE],
                              rst_error *error)
{
    rst_session_entry entry;
    const char *id;
    int code = rst_find_session(write->txn, write->store->env, change, key, &entry, &id, error);
    if (!code && entry.state == RST_STATE_SEALED && !(change->flags & RST_CHANGE_FORCE)) {
        code = rst_write_releasable(write, entry.sequence, error);
    }
    return code ? code : rst_write_release(write, key, error);
}
