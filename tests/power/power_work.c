#include "power_work.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#include "support.h"

enum { NAMES = 12 };

static const char consumer[] = "trainer";

static size_t pick_name(uint64_t *seed, char name[32])
{
    return (size_t)snprintf(name, 32, "session-%u", (unsigned)(support_random(seed) % NAMES));
}

static uint32_t turns_of(rst_store *store, const char *name, size_t size)
{
    rst_snapshot *now;
    rst_session session = {.turn_count = 0};
    if (rst_snapshot_open(store, &now, NULL) == RST_OK) {
        rst_session_get(now, name, size, &session, NULL);
        rst_snapshot_close(now);
    }
    return session.turn_count;
}

static void fill(rst_record *record, uint64_t *seed)
{
    uint32_t n = 1 + (uint32_t)(support_random(seed) % 60);
    uint32_t k = support_random(seed) % 4 == 0 ? 64 : 8; /* 1 to 8 pages */
    support_fill(record, n, k, support_random(seed), NULL, 0, "7");
}

static int put(rst_store *store, rst_record *record, uint64_t *seed, rst_error *error)
{
    char name[32];
    size_t size = pick_name(seed, name);
    uint32_t turns = turns_of(store, name, size);
    bool again = turns > 0 && support_random(seed) % 4 == 0;
    fill(record, seed);
    return rst_put(store, name, size, again ? turns - 1 : turns, record,
                   again ? RST_CHANGE_REPLACE : 0, 0, error);
}

static int put_several(rst_store *store, uint64_t *seed, rst_error *error)
{
    enum { COUNT = 3 };
    rst_change changes[COUNT];
    char names[COUNT][32];
    memset(changes, 0, sizeof changes);
    for (int i = 0; i < COUNT; i++) {
        changes[i].kind = RST_CHANGE_PUT;
        changes[i].session = names[i];
        changes[i].session_size =
            (size_t)snprintf(names[i], 32, "batch-%u-%d", (unsigned)(support_random(seed) % 4), i);
        changes[i].turn = turns_of(store, names[i], changes[i].session_size);
        changes[i].record = rst_record_new();
        fill(changes[i].record, seed);
    }
    int code = rst_apply(store, changes, COUNT, 0, error);
    for (int i = 0; i < COUNT; i++) {
        rst_record_free(changes[i].record);
    }
    return code;
}

static int seal(rst_store *store, uint64_t *seed, rst_error *error)
{
    char name[32];
    size_t size = pick_name(seed, name);
    rst_outcome outcome = {RST_STATUS_COMPLETED, 0.5, RST_NO_INDEX, RST_NO_INDEX};
    return rst_seal(store, name, size, &outcome, 0, error);
}

/* The oldest sealed session goes, or an open one, or a batch of them. */
static int release(rst_store *store, uint64_t *seed, rst_error *error)
{
    char name[RST_SESSION_ID_SIZE_MAX];
    size_t size = pick_name(seed, name);
    if (support_random(seed) % 4 == 0) {
        size = (size_t)snprintf(name, 32, "batch-%u-%u", (unsigned)(support_random(seed) % 4),
                                (unsigned)(support_random(seed) % 3));
    } else if (support_random(seed) % 2 == 0) {
        rst_snapshot *now;
        rst_session oldest;
        int code = rst_snapshot_open(store, &now, error);
        if (code) {
            return code;
        }
        if (rst_ready_next(now, 0, &oldest, NULL) == RST_OK) {
            memcpy(name, oldest.id, oldest.id_size);
            size = oldest.id_size;
        }
        rst_snapshot_close(now);
    }
    return rst_release(store, name, size, RST_CHANGE_FORCE, error);
}

static int restart(rst_store *store, uint64_t *seed, rst_error *error)
{
    char name[32];
    size_t size = pick_name(seed, name);
    uint32_t turns = turns_of(store, name, size);
    return rst_restart(store, name, size, turns ? (uint32_t)(support_random(seed) % turns) : 0,
                       error);
}

static int consume(power_worker *w, rst_store *store, rst_error *error)
{
    size_t size = sizeof consumer - 1;
    uint64_t kind = support_random(&w->seed) % 4;
    if (kind == 0) {
        void *place = NULL;
        size_t place_size;
        int code = rst_consumer_place(store, consumer, size, &place, &place_size, error);
        if (code == RST_ERR_NOT_FOUND) {
            return rst_consumer_create(store, consumer, size, RST_START_OLDEST, NULL, error);
        }
        code = code ? code : rst_consumer_commit(store, consumer, size, place, place_size, error);
        free(place);
        return code;
    }
    size_t count = w->lease_count;
    w->lease_count = 0;
    if (count == 0) {
        return rst_consumer_take(store, consumer, size, 4, 0, 0, w->leases, &w->lease_count, error);
    }
    return kind == 1 ? rst_consumer_return(store, consumer, size, w->leases, count, error)
                     : rst_consumer_acknowledge(store, consumer, size, w->leases, count, error);
}

static int work(power_worker *w, rst_store *store, rst_error *error)
{
    uint64_t *seed = &w->seed;
    switch (support_random(seed) % 12) {
    default:
        return put(store, w->record, seed, error);
    case 6:
        return put_several(store, seed, error);
    case 7:
        return seal(store, seed, error);
    case 8:
    case 9:
        return release(store, seed, error);
    case 10:
        return restart(store, seed, error);
    case 11:
        return consume(w, store, error);
    }
}

void power_worker_init(power_worker *worker, uint64_t seed)
{
    *worker = (power_worker){.seed = seed, .record = rst_record_new()};
    assert_non_null(worker->record);
}

void power_worker_free(power_worker *worker)
{
    rst_record_free(worker->record);
}

int power_work(power_worker *worker, rst_store *store, rst_error *error)
{
    int code = work(worker, store, error);
    switch (code) {
    case RST_ERR_FULL:
    case RST_ERR_SEALED:
    case RST_ERR_NOT_FOUND:
    case RST_ERR_ORDER:
    case RST_ERR_CONFLICT:
    case RST_ERR_LEASE:
    case RST_ERR_TIMEOUT:
        return RST_OK;
    default:
        return code;
    }
}

/* ---------------------------------------------------------------- digest */

static int add_session(XXH3_state_t *state, rst_snapshot *now, const rst_session *s,
                       rst_error *error)
{
    uint64_t figures[] = {
        s->id_size,         (uint64_t)s->state, s->sequence, s->turn_count,          s->value_size,
        s->generated_count, s->sequence_count,  s->topk,     (uint64_t)s->changed_ns};
    XXH3_64bits_update(state, s->id, s->id_size);
    XXH3_64bits_update(state, figures, sizeof figures);
    for (uint32_t turn = 0; turn < s->turn_count; turn++) {
        const void *value;
        size_t size;
        int code = rst_turn_value(now, s->key, turn, &value, &size, error);
        if (code) {
            return code;
        }
        XXH3_64bits_update(state, value, size);
    }
    return RST_OK;
}

static int add_sessions(XXH3_state_t *state, rst_snapshot *now, rst_error *error)
{
    rst_session s;
    uint8_t key[RST_KEY_SIZE];
    const uint8_t *after = NULL;
    int code;
    while ((code = rst_session_next(now, after, &s, error)) == RST_OK) {
        memcpy(key, s.key, sizeof key);
        after = key;
        code = add_session(state, now, &s, error);
        if (code) {
            return code;
        }
    }
    return code == RST_ERR_NOT_FOUND ? RST_OK : code;
}

static int add_ready(XXH3_state_t *state, rst_snapshot *now, rst_error *error)
{
    rst_session s = {.sequence = 0};
    int code;
    while ((code = rst_ready_next(now, s.sequence, &s, error)) == RST_OK) {
        XXH3_64bits_update(state, &s.sequence, sizeof s.sequence);
        XXH3_64bits_update(state, s.key, sizeof s.key);
    }
    return code == RST_ERR_NOT_FOUND ? RST_OK : code;
}

static int add_consumer(XXH3_state_t *state, rst_snapshot *now, rst_error *error)
{
    rst_consumer c;
    int code = rst_consumer_get(now, consumer, sizeof consumer - 1, &c, error);
    if (code == RST_OK) {
        c.name = NULL;
        uint64_t figures[] = {c.next,        c.settled,         c.waiting_count,
                              c.free_count,  c.held_count,      c.trained_count,
                              c.given_total, c.committed_count, (uint64_t)c.changed_ns};
        XXH3_64bits_update(state, figures, sizeof figures);
    }
    return code == RST_ERR_NOT_FOUND ? RST_OK : code;
}

int power_digest(rst_store *store, uint64_t *digest, uint64_t *transaction, rst_error *error)
{
    rst_snapshot *now;
    int code = rst_snapshot_open(store, &now, error);
    if (code) {
        return code;
    }
    XXH3_state_t *state = XXH3_createState();
    XXH3_64bits_reset(state);
    code = add_sessions(state, now, error);
    code = code ? code : add_ready(state, now, error);
    code = code ? code : add_consumer(state, now, error);
    *digest = XXH3_64bits_digest(state);
    *transaction = rst_snapshot_id(now);
    XXH3_freeState(state);
    rst_snapshot_close(now);
    return code;
}
