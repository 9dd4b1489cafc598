/*
 * A consumer's place: what a checkpoint keeps, and what becomes of it.
 *
 * The bytes are a place_header, then run_count runs of sequence numbers, little-endian.  In the
 * place are all numbers below `settled` and those of the runs: trained, committed, or released
 * before the place was taken.  Everything else up to `limit` was stored and not trained on.
 *
 * A place of an older epoch was taken before a resume.  The training it tells of may have been
 * abandoned, so committing it could release what no living checkpoint holds: it is only accepted
 * when it says nothing new.
 */
#include <stdlib.h>
#include <string.h>

#include "consumer_internal.h"

#define PLACE_MAGIC UINT32_C(0x50545352) /* "RSTP" */
#define PLACE_VERSION 1

typedef struct place_header {
    uint32_t magic;
    uint16_t version;
    uint16_t header_size; /* bytes: 88 */
    uint64_t checksum;    /* XXH3-64, seed 0, of the bytes from 16 on */
    uint8_t store_id[16];
    uint8_t consumer_key[RST_KEY_SIZE];
    uint64_t epoch;
    uint64_t settled;
    uint64_t next;
    uint64_t limit; /* the sequence number that the next sealed session would get */
    uint64_t run_count;
} place_header;

RST_STATIC_ASSERT(sizeof(place_header) == 88, "layout");
RST_STATIC_ASSERT(offsetof(place_header, store_id) == 16, "layout");

typedef struct place_run {
    uint64_t begin;
    uint64_t end; /* the first number that is not in it */
} place_run;

/* Entries that one write transaction of a commit looks at: other processes wait for the lock. */
#define COMMIT_BATCH 4096

/* ---------------------------------------------------------------- taking one */

typedef struct run_list {
    place_run *runs;
    size_t count;
    size_t capacity;
} run_list;

static int add_run(run_list *list, uint64_t begin, uint64_t end, rst_error *error)
{
    if (begin == end) {
        return RST_OK;
    }
    if (list->count == list->capacity) {
        size_t capacity = list->capacity ? list->capacity * 2 : 64;
        place_run *runs = realloc(list->runs, capacity * sizeof *runs);
        if (!runs) {
            return rst_fail(error, RST_ERR_MEMORY, NULL, "no memory for a place of %zu runs",
                            capacity);
        }
        list->runs = runs;
        list->capacity = capacity;
    }
    list->runs[list->count++] = (place_run){begin, end};
    return RST_OK;
}

/* The runs are what lies between stored sessions that are not trained on. */
static int gather_runs(rst_lease_cursor *leases, rst_ready_cursor *ready, uint64_t limit,
                       run_list *list, uint64_t position, rst_error *error)
{
    int code = RST_OK;
    while (code == RST_OK && ready->sequence < limit) {
        code = rst_lease_reach(leases, ready->sequence, error);
        bool trained =
            leases->sequence == ready->sequence && (leases->entry.state == RST_LEASE_TRAINED ||
                                                    leases->entry.state == RST_LEASE_COMMITTED);
        if (code == RST_OK && !trained) {
            code = add_run(list, position, ready->sequence, error);
            position = ready->sequence + 1;
        }
        if (code == RST_OK) {
            code = rst_ready_step(ready, error);
        }
    }
    return code ? code : add_run(list, position, limit, error);
}

static int read_place(rst_snapshot *snapshot, const rst_consumer_name *name, place_header *header,
                      run_list *list, rst_error *error)
{
    const rst_env *env = snapshot->store->env;
    rst_consumer_entry consumer;
    rst_totals_entry totals;
    int code = rst_read_consumer(snapshot->txn, env, name, &consumer, error);
    if (code == RST_OK) {
        code = rst_read_totals(snapshot->txn, env, &totals, error);
    }
    if (code) {
        return code;
    }
    *header = (place_header){
        .magic = PLACE_MAGIC,
        .version = PLACE_VERSION,
        .header_size = sizeof *header,
        .epoch = consumer.epoch,
        .settled = consumer.settled,
        .next = consumer.next,
        .limit = totals.next_sequence,
    };
    memcpy(header->store_id, env->format.store_id, sizeof header->store_id);
    memcpy(header->consumer_key, name->key, RST_KEY_SIZE);
    rst_lease_cursor leases;
    rst_ready_cursor ready;
    code = rst_lease_open(snapshot->txn, env, name->key, consumer.settled, &leases, error);
    if (code) {
        return code;
    }
    code = rst_ready_open(snapshot->txn, env, consumer.settled, &ready, error);
    if (code == RST_OK) {
        code = gather_runs(&leases, &ready, header->limit, list, header->settled, error);
        rst_ready_close(&ready);
    }
    rst_lease_close(&leases);
    return code;
}

static int write_place(place_header *header, const run_list *list, void **place, size_t *size,
                       rst_error *error)
{
    size_t runs_size = list->count * sizeof *list->runs; /* fits: the list is in memory */
    unsigned char *bytes = malloc(sizeof *header + runs_size);
    if (!bytes) {
        return rst_fail(error, RST_ERR_MEMORY, NULL, "no memory for a place of %zu runs",
                        list->count);
    }
    header->run_count = list->count;
    memcpy(bytes, header, sizeof *header);
    if (runs_size > 0) {
        memcpy(bytes + sizeof *header, list->runs, runs_size);
    }
    header->checksum = rst_hash(bytes + 16, sizeof *header + runs_size - 16);
    memcpy(bytes, header, sizeof *header);
    *place = bytes;
    *size = sizeof *header + runs_size;
    return RST_OK;
}

int rst_consumer_place(rst_store *store, const void *name, size_t name_size, void **place,
                       size_t *size, rst_error *error)
{
    rst_error_clear(error);
    *place = NULL;
    *size = 0;
    rst_consumer_name of;
    rst_snapshot *snapshot;
    int code = rst_consumer_name_of(name, name_size, &of, error);
    if (code == RST_OK) {
        code = rst_snapshot_open(store, &snapshot, error);
    }
    if (code) {
        return code;
    }
    place_header header;
    run_list list = {0};
    code = read_place(snapshot, &of, &header, &list, error);
    rst_snapshot_close(snapshot);
    /* A checkpoint must not outlive what it tells of: after a crash of the machine its place would
     * name sessions that the store on disk has not yet. */
    if (code == RST_OK && store->env->format.durability == RST_DURABILITY_INTERVAL &&
        !store->env->read_only) {
        code = rst_store_sync(store, error);
    }
    if (code == RST_OK) {
        code = write_place(&header, &list, place, size, error);
    }
    free(list.runs);
    return code;
}

/* ---------------------------------------------------------------- reading one */

typedef struct place {
    place_header header;
    const unsigned char *runs; /* not aligned */
} place;

static int bad_place(rst_error *error, const char *why)
{
    return rst_fail(error, RST_ERR_ARGUMENT, "place", "%s", why);
}

static place_run run_at(const place *of, uint64_t index)
{
    place_run run;
    memcpy(&run, of->runs + index * sizeof run, sizeof run);
    return run;
}

static int check_bytes(const void *bytes, size_t size, place *out, rst_error *error)
{
    place_header *header = &out->header;
    if (!bytes || size < sizeof *header) {
        return bad_place(error, "too few bytes for a place");
    }
    memcpy(header, bytes, sizeof *header);
    out->runs = (const unsigned char *)bytes + sizeof *header;
    if (header->magic != PLACE_MAGIC) {
        return bad_place(error, "the bytes are no consumer's place");
    }
    if (header->version != PLACE_VERSION || header->header_size != sizeof *header) {
        return rst_fail(error, RST_ERR_ARGUMENT, "place",
                        "the place has version %u, this library knows %d", header->version,
                        PLACE_VERSION);
    }
    size_t runs_size = size - sizeof *header;
    if (runs_size % sizeof(place_run) != 0 || header->run_count != runs_size / sizeof(place_run)) {
        return bad_place(error, "the place is cut, or has bytes after its end");
    }
    if (header->checksum != rst_hash((const unsigned char *)bytes + 16, size - 16)) {
        return bad_place(error, "the place is damaged: its checksum differs");
    }
    return RST_OK;
}

/* The checksum is no secret: what follows relies on these, whoever made the bytes. */
static int check_order(const place *of, rst_error *error)
{
    const place_header *header = &of->header;
    bool sound = header->settled <= header->next && header->next <= header->limit;
    uint64_t position = header->settled;
    for (uint64_t i = 0; i < header->run_count && sound; i++) {
        place_run run = run_at(of, i);
        sound = run.begin >= position && run.begin < run.end && run.end <= header->limit;
        position = run.end;
    }
    return sound ? RST_OK : bad_place(error, "the place is damaged: its numbers are out of order");
}

static int check_place(const void *bytes, size_t size, const rst_consumer_name *name, place *out,
                       rst_error *error)
{
    int code = check_bytes(bytes, size, out, error);
    if (code == RST_OK) {
        code = check_order(out, error);
    }
    if (code == RST_OK && memcmp(out->header.consumer_key, name->key, RST_KEY_SIZE) != 0) {
        code = bad_place(error, "the place is another consumer's");
    }
    return code;
}

/* What only the store can tell. */
static int check_store(const place *of, const rst_write *write, rst_error *error)
{
    const place_header *header = &of->header;
    if (memcmp(header->store_id, write->store->env->format.store_id, sizeof header->store_id)) {
        return bad_place(error, "the place was taken in another store");
    }
    if (header->limit > write->totals.next_sequence) {
        return rst_fail(error, RST_ERR_ARGUMENT, "place",
                        "the place is newer than the store: it knows %llu sealed sessions, the "
                        "store %llu; was the store restored from an older copy?",
                        (unsigned long long)header->limit - 1,
                        (unsigned long long)write->totals.next_sequence - 1);
    }
    return RST_OK;
}

/* Whether numbers, asked for in ascending order, are in the place. */
typedef struct place_walk {
    const place *of;
    uint64_t index;
} place_walk;

static bool in_place(place_walk *walk, uint64_t sequence)
{
    const place *of = walk->of;
    if (sequence < of->header.settled) {
        return true;
    }
    while (walk->index < of->header.run_count) {
        place_run run = run_at(of, walk->index);
        if (sequence < run.end) {
            return sequence >= run.begin;
        }
        walk->index++;
    }
    return false;
}

static uint64_t place_end(const place *of)
{
    return of->header.run_count ? run_at(of, of->header.run_count - 1).end : of->header.settled;
}

/* ---------------------------------------------------------------- commit */

typedef struct committing {
    const place *place;
    const rst_consumer_name *name;
    rst_write *write;
    rst_consumer_entry consumer;
    place_walk walk;
    uint64_t from; /* entries below it are done */
    bool marked;   /* every entry of the place is COMMITTED */
    bool settled;  /* nothing more can be settled */
} committing;

/* RST_ERR_ARGUMENT when a place of an older epoch holds something that is not committed. */
static int check_says_nothing_new(const committing *c, rst_error *error)
{
    const rst_env *env = c->write->store->env;
    place_walk walk = {c->place, 0};
    rst_lease_cursor leases;
    rst_ready_cursor ready;
    uint64_t end = place_end(c->place);
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
        if (code == RST_OK && !committed && in_place(&walk, ready.sequence)) {
            code =
                bad_place(error, "the place was taken before the consumer was resumed or created "
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
    uint64_t end = place_end(c->place);
    uint64_t from = c->from > c->consumer.settled ? c->from : c->consumer.settled;
    int code =
        rst_lease_open(c->write->txn, c->write->store->env, c->name->key, from, &leases, error);
    if (code) {
        return code;
    }
    for (int i = 0; i < COMMIT_BATCH && code == RST_OK && leases.sequence < end; i++) {
        if (leases.entry.state == RST_LEASE_TRAINED && in_place(&c->walk, leases.sequence)) {
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
    int code = check_store(c->place, c->write, error);
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

int rst_consumer_commit(rst_store *store, const void *name, size_t name_size, const void *place_,
                        size_t size, rst_error *error)
{
    rst_error_clear(error);
    rst_consumer_name of;
    place taken;
    int code = rst_consumer_name_of(name, name_size, &of, error);
    if (code == RST_OK) {
        code = check_place(place_, size, &of, &taken, error);
    }
    committing c = {.place = &taken, .name = &of, .walk = {&taken, 0}};
    while (code == RST_OK && !(c.marked && c.settled)) {
        code = commit_batch(store, &c, error);
    }
    return code;
}

/* ---------------------------------------------------------------- resume */

typedef struct resuming {
    const place *place;
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
    const place_header *header = &r->place->header;
    place_walk walk = {r->place, 0};
    uint64_t absent = r->write->totals.next_sequence - header->settled;
    for (uint64_t i = 0; i < header->run_count; i++) {
        place_run run = run_at(r->place, i);
        absent -= run.end - run.begin;
    }
    int code = rst_ready_seek(ready, header->settled, error);
    while (code == RST_OK && ready->sequence != RST_SEQUENCE_END) {
        bool trained = in_place(&walk, ready->sequence);
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
    const place_header *header = &r->place->header;
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
    int code = check_store(r->place, r->write, error);
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

int rst_consumer_resume(rst_store *store, const void *name, size_t name_size, const void *place_,
                        size_t size, uint64_t *lost, rst_error *error)
{
    rst_error_clear(error);
    if (lost) {
        *lost = 0;
    }
    rst_consumer_name of;
    place taken;
    uint64_t epoch;
    rst_write write;
    int code = rst_consumer_name_of(name, name_size, &of, error);
    if (code == RST_OK) {
        code = check_place(place_, size, &of, &taken, error);
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
