/* What becomes of a place: its checkpoint is safe, or training goes back to it. */
#include <string.h>

#include "consumer.h"

/* Entries that one write transaction of a commit looks at: other processes wait for the lock. */
#define COMMIT_BATCH 4096

/* ---------------------------------------------------------------- commit */

typedef struct committing {
    const rst_taken_place *place;
    const rst_consumer_name *name;
    rst_write *write;
    rst_consumer_entry consumer;
    rst_place_walk walk;
    uint64_t from; /* entries below it are done */
    bool marked;   /* every entry of the place is COMMITTED */
    bool settled;  /* nothing more can be settled */
} committing;

/* RST_ERR_ARGUMENT when a place of an older epoch holds something that is not committed. */
static int check_says_nothing_new(const committing *c, rst_error *error)
{
    const rst_env *env = c->write->store->env;
    rst_place_walk walk = {c->place, 0};
    rst_lease_cursor leases;
    rst_ready_cursor ready;
    uint64_t end = rst_place_end(c->place);
    int code =
        rst_lease_open(c->write->txn, env, c->name->key, c->consumer.settled, &leases, error);
    if (code) {
        return code;
    }
    code = rst_ready_open(c->write->txn, env, c->consumer.settled, &ready, error);
    if (code) {
        rst_lease_close(&leases);
        return code;
    }
    while (code == RST_OK && ready.sequence < end) {
        code = rst_lease_reach(&leases, ready.sequence, error);
        bool committed =
            leases.sequence == ready.sequence && leases.entry.state == RST_LEASE_COMMITTED;
        if (code == RST_OK && !committed && rst_in_place(&walk, ready.sequence)) {
            code = rst_bad_place(error,
                                 "the place was taken before the consumer was resumed or created "
                                 "anew, and holds sessions that were not trained on since");
        }
        if (code == RST_OK) {
            code = rst_ready_step(&ready, error);
        }
    }
    rst_ready_close(&ready);
    rst_lease_close(&leases);
    return code;
}

/* TRAINED becomes COMMITTED, for at most COMMIT_BATCH entries. */
static int mark_batch(committing *c, rst_error *error)
{
    rst_lease_cursor leases;
    uint64_t end = rst_place_end(c->place);
    uint64_t from = c->from > c->consumer.settled ? c->from : c->consumer.settled;
    int code =
        rst_lease_open(c->write->txn, c->write->store->env, c->name->key, from, &leases, error);
    if (code) {
        return code;
    }
    for (int i = 0; i < COMMIT_BATCH && code == RST_OK && leases.sequence < end; i++) {
        if (leases.entry.state == RST_LEASE_TRAINED && rst_in_place(&c->walk, leases.sequence)) {
            leases.entry.state = RST_LEASE_COMMITTED;
            code = rst_lease_store(&leases, error);
        }
        c->from = leases.sequence + 1;
        if (code == RST_OK) {
            code = rst_lease_step(&leases, error);
        }
    }
    c->marked = leases.sequence >= end;
    rst_lease_close(&leases);
    return code;
}

static int commit_batch_in(committing *c, rst_error *error)
{
    int code = rst_check_place_store(c->place, c->write, error);
    if (code == RST_OK) {
        code = rst_read_consumer(c->write->txn, c->write->store->env, c->name, &c->consumer, error);
    }
    if (code) {
        return code;
    }
    if (c->consumer.epoch != c->place->header.epoch) {
        c->marked = true;
        c->settled = true;
        return check_says_nothing_new(c, error);
    }
    if (!c->marked) {
        code = mark_batch(c, error);
    }
    if (code == RST_OK) {
        code =
            rst_advance_settled(c->write, c->name, &c->consumer, COMMIT_BATCH, &c->settled, error);
    }
    if (code) {
        return code;
    }
    c->consumer.changed_ns = rst_clock_ns(CLOCK_REALTIME);
    return rst_write_consumer(c->write, c->name, &c->consumer, error);
}

/* Several short transactions: each leaves a valid state, and doing it again does no harm. */
static int commit_batch(rst_store *store, committing *c, rst_error *error)
{
    rst_write write;
    int code = rst_write_begin(store, &write, error);
    if (code) {
        return code;
    }
    c->write = &write;
    code = commit_batch_in(c, error);
    if (code) {
        rst_write_abort(&write);
        return code;
    }
    return rst_write_commit(&write, error);
}

int rst_consumer_commit(rst_store *store, const void *name, size_t name_size, const void *bytes,
                        size_t size, rst_error *error)
{
    rst_error_clear(error);
    rst_consumer_name of;
    rst_taken_place taken;
    int code = rst_consumer_name_of(name, name_size, &of, error);
    if (code == RST_OK) {
        code = rst_check_place(bytes, size, &of, &taken, error);
    }
    committing c = {.place = &taken, .name = &of, .walk = {&taken, 0}};
    while (code == RST_OK && !(c.marked && c.settled)) {
        code = commit_batch(store, &c, error);
    }
    return code;
}

/* ---------------------------------------------------------------- resume */

typedef struct resuming {
    const rst_taken_place *place;
    const rst_consumer_name *name;
    rst_write *write;
    rst_consumer_entry consumer;
    uint64_t lost;
} resuming;

/* Entries below the place and of released sessions go. */
static int remove_stale(resuming *r, rst_lease_cursor *leases, rst_ready_cursor *ready,
                        rst_error *error)
{
    int code = rst_lease_seek(leases, 0, error);
    while (code == RST_OK && leases->sequence != RST_SEQUENCE_END) {
        uint64_t sequence = leases->sequence;
        code = rst_ready_seek(ready, sequence, error);
        if (code == RST_OK &&
            (ready->sequence != sequence || sequence < r->place->header.settled)) {
            code = rst_lease_remove(leases, error);
        }
        if (code == RST_OK) {
            code = rst_lease_seek(leases, sequence + 1, error);
        }
    }
    return code;
}

/* Give the stored session its entry.  Leases of before are void: nobody's lease_id is 0. */
static int rebuild_one(resuming *r, rst_lease_cursor *leases, uint64_t sequence, bool trained,
                       rst_error *error)
{
    rst_lease_entry entry = {
        .state = trained ? RST_LEASE_COMMITTED : RST_LEASE_FREE,
        .given_count = 1,
    };
    int code = rst_lease_seek(leases, sequence, error);
    if (code) {
        return code;
    }
    if (leases->sequence != sequence) {
        return rst_lease_insert(r->write, r->name->key, sequence, &entry, error);
    }
    entry.given_count = leases->entry.given_count;
    leases->entry = entry;
    return rst_lease_store(leases, error);
}

/* One entry for each stored session below next; counts what is lost on the way. */
static int rebuild(resuming *r, rst_lease_cursor *leases, rst_ready_cursor *ready, rst_error *error)
{
    const rst_place_header *header = &r->place->header;
    rst_place_walk walk = {r->place, 0};
    uint64_t absent = r->write->totals.next_sequence - header->settled;
    for (uint64_t i = 0; i < header->run_count; i++) {
        rst_place_run run = rst_place_run_at(r->place, i);
        absent -= run.end - run.begin;
    }
    int code = rst_ready_seek(ready, header->settled, error);
    while (code == RST_OK && ready->sequence != RST_SEQUENCE_END) {
        bool trained = rst_in_place(&walk, ready->sequence);
        absent -= !trained;
        if (ready->sequence < r->consumer.next) {
            code = rebuild_one(r, leases, ready->sequence, trained, error);
        }
        if (code == RST_OK) {
            code = rst_ready_step(ready, error);
        }
    }
    r->lost = absent;
    return code;
}

static int rebuild_leases(resuming *r, rst_error *error)
{
    const rst_env *env = r->write->store->env;
    rst_lease_cursor leases;
    rst_ready_cursor ready;
    int code = rst_lease_open(r->write->txn, env, r->name->key, 0, &leases, error);
    if (code) {
        return code;
    }
    code = rst_ready_open(r->write->txn, env, 0, &ready, error);
    if (code == RST_OK) {
        code = remove_stale(r, &leases, &ready, error);
        if (code == RST_OK) {
            code = rebuild(r, &leases, &ready, error);
        }
        rst_ready_close(&ready);
    }
    rst_lease_close(&leases);
    return code;
}

/* The stored entry with a new epoch, or a new one. */
static int begin_again(resuming *r, uint64_t epoch, rst_error *error)
{
    const rst_place_header *header = &r->place->header;
    int64_t now = rst_clock_ns(CLOCK_REALTIME);
    int code = rst_read_consumer(r->write->txn, r->write->store->env, r->name, &r->consumer, error);
    if (code == RST_ERR_NOT_FOUND) {
        rst_error_clear(error);
        r->consumer = (rst_consumer_entry){
            .magic = RST_CONSUMER_MAGIC,
            .version = RST_FORMAT_VERSION,
            .name_size = (uint16_t)r->name->size,
            .epoch = epoch,
            .created_ns = now,
        };
        code = RST_OK;
    }
    if (code) {
        return code;
    }
    r->consumer.epoch++;
    r->consumer.changed_ns = now;
    r->consumer.settled = header->settled;
    if (r->consumer.next < header->next) {
        r->consumer.next = header->next;
    }
    return RST_OK;
}

static int resume_in(resuming *r, uint64_t epoch, rst_error *error)
{
    int code = rst_check_place_store(r->place, r->write, error);
    if (code == RST_OK) {
        code = begin_again(r, epoch, error);
    }
    if (code == RST_OK) {
        code = rebuild_leases(r, error);
    }
    bool done;
    if (code == RST_OK) {
        code = rst_advance_settled(r->write, r->name, &r->consumer, SIZE_MAX, &done, error);
    }
    if (code) {
        return code;
    }
    r->consumer.first_open = r->consumer.settled;
    return rst_write_consumer(r->write, r->name, &r->consumer, error);
}

int rst_consumer_resume(rst_store *store, const void *name, size_t name_size, const void *bytes,
                        size_t size, uint64_t *lost, rst_error *error)
{
    rst_error_clear(error);
    if (lost) {
        *lost = 0;
    }
    rst_consumer_name of;
    rst_taken_place taken;
    uint64_t epoch;
    rst_write write;
    int code = rst_consumer_name_of(name, name_size, &of, error);
    if (code == RST_OK) {
        code = rst_check_place(bytes, size, &of, &taken, error);
    }
    if (code == RST_OK) {
        code = rst_random_epoch(&epoch, error);
    }
    if (code == RST_OK) {
        code = rst_write_begin(store, &write, error);
    }
    if (code) {
        return code;
    }
    resuming r = {.place = &taken, .name = &of, .write = &write};
    code = resume_in(&r, epoch, error);
    if (code) {
        rst_write_abort(&write);
        return code;
    }
    code = rst_write_commit(&write, error);
    if (code == RST_OK && lost) {
        *lost = r.lost;
    }
    return code;
}
