/* rst_apply: many changes in one transaction, with as little as possible under the write lock.
 *
 * What a PUT stores depends on the turns before it (only what the prompt adds is kept), so it is
 * worked out before the lock from a snapshot, checksum included; under the lock it is enough to see
 * that the session has not changed since, and to copy.  When it has, or when one call changes a
 * session in ways the plan does not follow, the PUT is worked out again under the lock. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sequence.h"
#include "write.h"

static int complete(const rst_sequence *sequence, const rst_change *change, rst_planned *planned,
                    rst_error *error)
{
    const rst_record *record = change->record;
    uint32_t prefix = rst_sequence_common(sequence, record->prompt, record->prompt_count);
    rst_place place = {
        .session_key = planned->key,
        .turn = change->turn,
        .prefix_count = prefix,
        .trimmed_count = (uint32_t)(sequence->count - prefix),
        .prefix_hash = rst_hash(record->prompt, sizeof(int32_t) * prefix),
    };
    return rst_record_complete(change->record, &place, &planned->bytes, &planned->size, error);
}

/* ---------------------------------------------------------------- before the lock */

/* A session that this call has put turns into: its sequence so far. */
typedef struct followed {
    uint8_t key[RST_KEY_SIZE];
    rst_sequence sequence;
    uint32_t turn;     /* the sequence is the one before this turn */
    uint64_t revision; /* 0: the session was not there */
    bool lost;         /* changed in a way that is not followed: work it out under the lock */
} followed;

typedef struct plan {
    rst_planned *puts; /* [count], one for each change */
    followed *sessions;
    size_t session_count;
} plan;

static void plan_free(plan *p, size_t kept)
{
    for (size_t i = 0; i < p->session_count; i++) {
        rst_sequence_free(&p->sessions[i].sequence);
    }
    p->session_count = 0;
    if (!kept) {
        free(p->sessions);
        free(p->puts);
    }
}

static int plan_make(plan *p, size_t count, rst_error *error)
{
    p->session_count = 0;
    p->puts = calloc(count, sizeof *p->puts);
    p->sessions = calloc(count, sizeof *p->sessions);
    if (!p->puts || !p->sessions) {
        plan_free(p, 0);
        return rst_fail(error, RST_ERR_MEMORY, NULL, "no memory for %zu changes", count);
    }
    return RST_OK;
}

static followed *find_followed(plan *p, const uint8_t key[RST_KEY_SIZE])
{
    for (size_t i = p->session_count; i > 0; i--) { /* the newest is the likeliest */
        if (memcmp(p->sessions[i - 1].key, key, RST_KEY_SIZE) == 0) {
            return &p->sessions[i - 1];
        }
    }
    return NULL;
}

/* Begin to follow a session at the state that the snapshot shows. */
static int follow(plan *p, MDB_txn *txn, const rst_env *env, const rst_change *change,
                  const uint8_t key[RST_KEY_SIZE], followed **out, rst_error *error)
{
    followed *f = &p->sessions[p->session_count++];
    memset(f, 0, sizeof *f);
    memcpy(f->key, key, RST_KEY_SIZE);
    rst_session_entry entry;
    const char *id;
    int code = rst_find_session(txn, env, change, key, &entry, &id, error);
    uint32_t stored = code ? 0 : entry.turn_count;
    if (code == RST_ERR_NOT_FOUND) {
        rst_error_clear(error);
    } else if (code) {
        return code;
    }
    f->revision = code ? 0 : entry.revision;
    f->turn = change->turn;
    f->lost = change->turn > stored; /* the write will say what is wrong */
    *out = f;
    return f->lost ? RST_OK : rst_sequence_load(&f->sequence, txn, env, key, change->turn, error);
}

static int plan_put(plan *p, size_t index, MDB_txn *txn, const rst_env *env,
                    const rst_change *change, rst_error *error)
{
    rst_planned *put = &p->puts[index];
    followed *f = find_followed(p, put->key);
    put->follows = f != NULL;
    if (!f) {
        int code = follow(p, txn, env, change, put->key, &f, error);
        if (code) {
            return code;
        }
    }
    f->lost |= f->turn != change->turn;
    if (f->lost) {
        return RST_OK;
    }
    put->revision = f->revision;
    int code = complete(&f->sequence, change, put, error);
    rst_turn turn;
    if (!code) {
        code = rst_record_open(put->bytes, put->size, &turn, error);
    }
    if (!code) {
        code = rst_sequence_add(&f->sequence, turn.prefix_count, turn.prompt_ids, turn.prompt_count,
                                turn.token_ids, turn.token_count, error);
    }
    f->turn++;
    return code;
}

static int plan_all(plan *p, rst_store *store, rst_change *changes, size_t count, rst_error *error)
{
    plan_free(p, 1);
    rst_snapshot *snapshot;
    int code = rst_snapshot_open(store, &snapshot, error);
    if (code) {
        return code;
    }
    for (size_t i = 0; i < count && !code; i++) {
        p->puts[i].bytes = NULL;
        if (changes[i].kind == RST_CHANGE_PUT) {
            code = plan_put(p, i, snapshot->txn, store->env, &changes[i], error);
        } else if (changes[i].kind != RST_CHANGE_SEAL) {
            followed *f = find_followed(p, p->puts[i].key);
            if (!f) {
                f = &p->sessions[p->session_count++];
                memset(f, 0, sizeof *f);
                memcpy(f->key, p->puts[i].key, RST_KEY_SIZE);
            }
            f->lost = true;
        }
        if (code && error) {
            error->index = (int64_t)i;
        }
    }
    rst_snapshot_close(snapshot);
    return code;
}

/* ---------------------------------------------------------------- under the lock */

int rst_plan_in(rst_write *write, const rst_change *change, rst_planned *planned,
                const rst_session_entry *entry, rst_error *error)
{
    uint64_t revision = entry ? entry->revision : 0;
    bool holds = planned->bytes && (revision == planned->revision ||
                                    (planned->follows && revision == mdb_txn_id(write->txn)));
    if (holds) {
        return RST_OK;
    }
    rst_sequence sequence = {0};
    int code = rst_sequence_load(&sequence, write->txn, write->store->env, planned->key,
                                 change->turn, error);
    if (!code) {
        code = complete(&sequence, change, planned, error);
    }
    rst_sequence_free(&sequence);
    return code;
}

static int write_one(rst_write *write, rst_change *change, rst_planned *planned, rst_error *error)
{
    switch (change->kind) {
    case RST_CHANGE_PUT:
        return rst_write_put(write, change, planned, error);
    case RST_CHANGE_SEAL:
        return rst_write_seal(write, change, planned->key, error);
    case RST_CHANGE_RESTART:
        return rst_write_restart(write, change, planned->key, error);
    case RST_CHANGE_RELEASE:
        return rst_write_release_checked(write, change, planned->key, error);
    }
    return rst_fail(error, RST_ERR_ARGUMENT, "kind", "change kind %d is none", (int)change->kind);
}

/* The plan of a session holds as a whole or not at all: later turns build on earlier ones. */
static int drop_stale_plans(rst_write *write, plan *p, const rst_change *changes, size_t count,
                            rst_error *error)
{
    for (size_t i = 0; i < p->session_count; i++) {
        followed *f = &p->sessions[i];
        rst_session_entry entry;
        const char *id;
        int code = rst_read_session(write->txn, write->store->env, f->key, &entry, &id, error);
        if (code && code != RST_ERR_NOT_FOUND) {
            return code;
        }
        f->lost |= (code ? 0 : entry.revision) != f->revision;
    }
    rst_error_clear(error);
    for (size_t i = 0; i < count; i++) {
        followed *f = changes[i].kind == RST_CHANGE_PUT ? find_followed(p, p->puts[i].key) : NULL;
        if (f && f->lost) {
            p->puts[i].bytes = NULL;
        }
    }
    return RST_OK;
}

static int write_all(rst_store *store, plan *p, rst_change *changes, size_t count, rst_error *error)
{
    rst_write write;
    int code = rst_write_begin_now(store, &write, error);
    if (code) {
        return code;
    }
    code = drop_stale_plans(&write, p, changes, count, error);
    for (size_t i = 0; i < count && !code; i++) {
        changes[i].unchanged = 0;
        code = write_one(&write, &changes[i], &p->puts[i], error);
        if (code && error) {
            error->index = (int64_t)i;
        }
    }
    if (code) {
        rst_write_abort(&write);
        return code;
    }
    return rst_write_commit(&write, error);
}

/* ---------------------------------------------------------------- the call */

static int check_change(const rst_change *change, rst_error *error)
{
    int code = rst_check_session_id(change->session, change->session_size, error);
    if (code) {
        return code;
    }
    if (change->kind < RST_CHANGE_PUT || change->kind > RST_CHANGE_RELEASE) {
        return rst_fail(error, RST_ERR_ARGUMENT, "kind", "change kind %d is none",
                        (int)change->kind);
    }
    if (change->kind == RST_CHANGE_PUT && (!change->record || !change->record->filled)) {
        return rst_fail(error, RST_ERR_ARGUMENT, "record", "the record holds no turn");
    }
    const rst_outcome *o = &change->outcome;
    if (change->kind == RST_CHANGE_SEAL &&
        (o->status <= RST_STATUS_NONE || o->status > RST_STATUS_FAILED)) {
        return rst_fail(error, RST_ERR_ARGUMENT, "status", "status %d is none of an outcome",
                        (int)o->status);
    }
    if (change->flags & ~(RST_CHANGE_REPLACE | RST_CHANGE_FORCE)) {
        return rst_fail(error, RST_ERR_ARGUMENT, "flags", "flags 0x%x", change->flags);
    }
    return RST_OK;
}

/* The bytes of a PUT lie in its record until the commit, so each needs one of its own. */
static int check_all(rst_change *changes, size_t count, plan *p, rst_error *error)
{
    for (size_t i = 0; i < count; i++) {
        int code = check_change(&changes[i], error);
        if (!code && changes[i].kind == RST_CHANGE_PUT) {
            if (changes[i].record->claimed == changes) {
                code = rst_fail(error, RST_ERR_ARGUMENT, "record",
                                "one record stands in two changes of a call");
            }
            changes[i].record->claimed = changes;
        }
        if (code) {
            if (error) {
                error->index = (int64_t)i;
            }
            return code;
        }
        rst_session_key(changes[i].session, changes[i].session_size, p->puts[i].key);
    }
    return RST_OK;
}

static void unclaim(rst_change *changes, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (changes[i].kind == RST_CHANGE_PUT && changes[i].record) {
            changes[i].record->claimed = NULL;
        }
    }
}

static int say_full(rst_store *store, int64_t timeout_ms, rst_error *error)
{
    int64_t index = error ? error->index : -1;
    char holder[96] = "";
    rst_stat stat;
    if (rst_store_stat(store, &stat, NULL) == RST_OK && stat.pinned_size > 0 && stat.reader_pid) {
        snprintf(holder, sizeof holder,
                 "; process %u keeps %llu released bytes with an open snapshot", stat.reader_pid,
                 (unsigned long long)stat.pinned_size);
    }
    int code = rst_fail(error, RST_ERR_FULL, NULL,
                        "%s is at its capacity of %llu bytes and no room was made within %lld ms: "
                        "release sessions, or create a larger store%s",
                        store->path, (unsigned long long)store->env->format.capacity_size,
                        (long long)timeout_ms, holder);
    if (error) {
        error->index = index;
    }
    return code;
}

/* Something was released, or may be: wait for it.  False at the deadline. */
static bool wait_for_room(rst_store *store, uint64_t seen, const rst_deadline *deadline)
{
    if (rst_deadline_passed(deadline)) {
        return false;
    }
    /* A release commits; a snapshot that closes does not, so look again now and then. */
    rst_deadline look = rst_deadline_in(20);
    if (!deadline->forever && deadline->at_ns < look.at_ns) {
        look = *deadline;
    }
    rst_wait_for_commit(store->env, seen, &look);
    return true;
}

static int apply_until(rst_store *store, plan *p, rst_change *changes, size_t count,
                       int64_t timeout_ms, rst_error *error)
{
    bool puts = false;
    for (size_t i = 0; i < count; i++) {
        puts |= changes[i].kind == RST_CHANGE_PUT;
    }
    rst_deadline deadline = rst_deadline_in(puts ? timeout_ms : RST_ROOM_PATIENCE_MS);
    bool last_chance = false;
    int code = puts ? plan_all(p, store, changes, count, error) : RST_OK;
    while (!code) {
        uint64_t seen = rst_last_transaction(store->env);
        code = write_all(store, p, changes, count, error);
        if (code != RST_ERR_FULL) {
            return code;
        }
        bool late = last_chance;
        last_chance = rst_deadline_passed(&deadline);
        bool made;
        code = rst_write_make_room(store, &made, error);
        if (!code && (late || (!made && !wait_for_room(store, seen, &deadline)))) {
            return say_full(store, timeout_ms, error);
        }
        if (!code && puts) {
            code = plan_all(p, store, changes, count, error);
        }
    }
    return code;
}

int rst_apply(rst_store *store, rst_change *changes, size_t count, int64_t timeout_ms,
              rst_error *error)
{
    rst_error_clear(error);
    int code = rst_store_usable(store, true, error);
    if (code || count == 0) {
        return code;
    }
    plan p;
    code = plan_make(&p, count, error);
    if (code) {
        return code;
    }
    code = check_all(changes, count, &p, error);
    if (!code) {
        code = apply_until(store, &p, changes, count, timeout_ms, error);
    }
    unclaim(changes, count);
    plan_free(&p, 0);
    return code;
}

static int apply_one(rst_store *store, rst_change change, int64_t timeout_ms, rst_error *error)
{
    int code = rst_apply(store, &change, 1, timeout_ms, error);
    if (error) {
        error->index = -1;
    }
    return code;
}

int rst_put(rst_store *store, const void *session, size_t session_size, uint32_t turn,
            rst_record *record, unsigned flags, int64_t timeout_ms, rst_error *error)
{
    rst_change change = {.kind = RST_CHANGE_PUT,
                         .flags = flags,
                         .session = session,
                         .session_size = session_size,
                         .turn = turn,
                         .record = record};
    return apply_one(store, change, timeout_ms, error);
}

int rst_seal(rst_store *store, const void *session, size_t session_size, const rst_outcome *outcome,
             unsigned flags, rst_error *error)
{
    rst_change change = {.kind = RST_CHANGE_SEAL,
                         .flags = flags,
                         .session = session,
                         .session_size = session_size,
                         .outcome = *outcome};
    return apply_one(store, change, 0, error);
}

int rst_restart(rst_store *store, const void *session, size_t session_size, uint32_t from_turn,
                rst_error *error)
{
    rst_change change = {.kind = RST_CHANGE_RESTART,
                         .session = session,
                         .session_size = session_size,
                         .turn = from_turn};
    return apply_one(store, change, 0, error);
}

int rst_release(rst_store *store, const void *session, size_t session_size, unsigned flags,
                rst_error *error)
{
    rst_change change = {.kind = RST_CHANGE_RELEASE,
                         .flags = flags,
                         .session = session,
                         .session_size = session_size};
    return apply_one(store, change, 0, error);
}
