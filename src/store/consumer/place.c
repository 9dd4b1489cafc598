/*
 * A consumer's place: what a checkpoint keeps, and what becomes of it.
 *
 * The bytes are an rst_place_header, then run_count runs of sequence numbers, little-endian.  In
 * the place are all numbers below `settled` and those of the runs: trained, committed, or released
 * before the place was taken.  Everything else up to `limit` was stored and not trained on.
 *
 * A place of an older epoch was taken before a resume.  The training it tells of may have been
 * abandoned, so committing it could release what no living checkpoint holds: it is only accepted
 * when it says nothing new.
 */
#include <stdlib.h>
#include <string.h>

#include "consumer.h"

#define PLACE_MAGIC UINT32_C(0x50545352) /* "RSTP" */
#define PLACE_VERSION 1

/* ---------------------------------------------------------------- taking one */

typedef struct run_list {
    rst_place_run *runs;
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
        rst_place_run *runs = realloc(list->runs, capacity * sizeof *runs);
        if (!runs) {
            return rst_fail(error, RST_ERR_MEMORY, NULL, "no memory for a place of %zu runs",
                            capacity);
        }
        list->runs = runs;
        list->capacity = capacity;
    }
    list->runs[list->count++] = (rst_place_run){begin, end};
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

static int read_place(rst_snapshot *snapshot, const rst_consumer_name *name,
                      rst_place_header *header, run_list *list, rst_error *error)
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
    *header = (rst_place_header){
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

static int write_place(rst_place_header *header, const run_list *list, void **place, size_t *size,
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
    rst_place_header header;
    run_list list = {0};
    code = read_place(snapshot, &of, &header, &list, error);
    rst_snapshot_close(snapshot);
    /* A checkpoint must not outlive what it tells of: after a crash of the machine its place would
     * name sessions that the store on disk has not yet. */
    if (code == RST_OK && store->env->format.durability == RST_DURABILITY_INTERVAL &&
        !(store->flags & RST_OPEN_READ_ONLY)) {
        code = rst_store_sync(store, error);
    }
    if (code == RST_OK) {
        code = write_place(&header, &list, place, size, error);
    }
    free(list.runs);
    return code;
}

/* ---------------------------------------------------------------- reading one */

int rst_bad_place(rst_error *error, const char *why)
{
    return rst_fail(error, RST_ERR_ARGUMENT, "place", "%s", why);
}

rst_place_run rst_place_run_at(const rst_taken_place *of, uint64_t index)
{
    rst_place_run run;
    memcpy(&run, of->runs + index * sizeof run, sizeof run);
    return run;
}

static int check_bytes(const void *bytes, size_t size, rst_taken_place *out, rst_error *error)
{
    rst_place_header *header = &out->header;
    if (!bytes || size < sizeof *header) {
        return rst_bad_place(error, "too few bytes for a place");
    }
    memcpy(header, bytes, sizeof *header);
    out->runs = (const unsigned char *)bytes + sizeof *header;
    if (header->magic != PLACE_MAGIC) {
        return rst_bad_place(error, "the bytes are no consumer's place");
    }
    if (header->version != PLACE_VERSION || header->header_size != sizeof *header) {
        return rst_fail(error, RST_ERR_ARGUMENT, "place",
                        "the place has version %u, this library knows %d", header->version,
                        PLACE_VERSION);
    }
    size_t runs_size = size - sizeof *header;
    if (runs_size % sizeof(rst_place_run) != 0 ||
        header->run_count != runs_size / sizeof(rst_place_run)) {
        return rst_bad_place(error, "the place is cut, or has bytes after its end");
    }
    if (header->checksum != rst_hash((const unsigned char *)bytes + 16, size - 16)) {
        return rst_bad_place(error, "the place is damaged: its checksum differs");
    }
    return RST_OK;
}

/* The checksum is no secret: what follows relies on these, whoever made the bytes. */
static int check_order(const rst_taken_place *of, rst_error *error)
{
    const rst_place_header *header = &of->header;
    bool sound = header->settled <= header->next && header->next <= header->limit;
    uint64_t position = header->settled;
    for (uint64_t i = 0; i < header->run_count && sound; i++) {
        rst_place_run run = rst_place_run_at(of, i);
        sound = run.begin >= position && run.begin < run.end && run.end <= header->limit;
        position = run.end;
    }
    return sound ? RST_OK
                 : rst_bad_place(error, "the place is damaged: its numbers are out of order");
}

int rst_check_place(const void *bytes, size_t size, const rst_consumer_name *name,
                    rst_taken_place *out, rst_error *error)
{
    int code = check_bytes(bytes, size, out, error);
    if (code == RST_OK) {
        code = check_order(out, error);
    }
    if (code == RST_OK && memcmp(out->header.consumer_key, name->key, RST_KEY_SIZE) != 0) {
        code = rst_bad_place(error, "the place is another consumer's");
    }
    return code;
}

int rst_check_place_store(const rst_taken_place *of, const rst_write *write, rst_error *error)
{
    const rst_place_header *header = &of->header;
    if (memcmp(header->store_id, write->store->env->format.store_id, sizeof header->store_id) !=
        0) {
        return rst_bad_place(error, "the place was taken in another store");
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

bool rst_in_place(rst_place_walk *walk, uint64_t sequence)
{
    const rst_taken_place *of = walk->of;
    if (sequence < of->header.settled) {
        return true;
    }
    while (walk->index < of->header.run_count) {
        rst_place_run run = rst_place_run_at(of, walk->index);
        if (sequence < run.end) {
            return sequence >= run.begin;
        }
        walk->index++;
    }
    return false;
}

uint64_t rst_place_end(const rst_taken_place *of)
{
    return of->header.run_count ? rst_place_run_at(of, of->header.run_count - 1).end
                                : of->header.settled;
}
