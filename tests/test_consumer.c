/* Consumers, as one process sees them; what several do to one another is in
 * test_consumer_processes.c, long random histories are in test_consumer_model.c. */
#include "consumer_support.h"

#include "store/consumer_internal.h"

#define NAME "trainer"
#define SIZE (sizeof NAME - 1)

static int setup(void **state)
{
    fixture *f = calloc(1, sizeof *f);
    fixture_open(f, UINT64_C(8) << 20);
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    fixture_close(*state);
    free(*state);
    return 0;
}

static void create(fixture *f, const char *name, rst_consumer_start start)
{
    int created;
    assert_ok(rst_consumer_create(f->store, name, strlen(name), start, &created, &f->error),
              f->error);
    assert_int_equal(created, 1);
}

/* Take exactly what the caller expects: `count` sessions from sequence number `first` on. */
static void take_expecting(fixture *f, const char *name, uint64_t first, size_t count,
                           rst_lease *leases)
{
    size_t got;
    assert_ok(rst_consumer_take(f->store, name, strlen(name), count, 0, 0, leases, &got, &f->error),
              f->error);
    assert_int_equal(got, count);
    for (size_t i = 0; i < count; i++) {
        assert_int_equal(leases[i].sequence, first + i);
    }
}

static void take_nothing(fixture *f, const char *name)
{
    rst_lease lease;
    size_t got = 7;
    assert_code(RST_ERR_TIMEOUT,
                rst_consumer_take(f->store, name, strlen(name), 1, 0, 0, &lease, &got, &f->error),
                f->error);
    assert_int_equal(got, 0);
}

static void acknowledge(fixture *f, const char *name, const rst_lease *leases, size_t count)
{
    assert_ok(rst_consumer_acknowledge(f->store, name, strlen(name), leases, count, &f->error),
              f->error);
}

typedef struct bytes {
    void *data;
    size_t size;
} bytes;

static bytes place_of(fixture *f, const char *name)
{
    bytes place;
    assert_ok(rst_consumer_place(f->store, name, strlen(name), &place.data, &place.size, &f->error),
              f->error);
    assert_non_null(place.data);
    return place;
}

static void commit(fixture *f, const char *name, bytes place)
{
    assert_ok(rst_consumer_commit(f->store, name, strlen(name), place.data, place.size, &f->error),
              f->error);
}

static uint64_t resume(fixture *f, const char *name, bytes place)
{
    uint64_t lost = 99;
    assert_ok(
        rst_consumer_resume(f->store, name, strlen(name), place.data, place.size, &lost, &f->error),
        f->error);
    return lost;
}

/* Acknowledge and commit everything that is leased here. */
static void settle(fixture *f, const char *name, const rst_lease *leases, size_t count)
{
    acknowledge(f, name, leases, count);
    bytes place = place_of(f, name);
    commit(f, name, place);
    free(place.data);
}

static size_t lease_entries(fixture *f)
{
    rst_snapshot *snapshot;
    MDB_stat stat;
    assert_ok(rst_snapshot_open(f->store, &snapshot, &f->error), f->error);
    assert_int_equal(mdb_stat(snapshot->txn, f->store->env->leases, &stat), 0);
    rst_snapshot_close(snapshot);
    return stat.ms_entries;
}

/* Change one lease entry as no function does. */
static void edit_lease(fixture *f, const char *name, uint64_t sequence,
                       void (*edit)(rst_lease_entry *))
{
    rst_write write;
    rst_consumer_name of;
    rst_lease_cursor cursor;
    rst_consumer_entry consumer;
    assert_ok(rst_consumer_name_of(name, strlen(name), &of, &f->error), f->error);
    assert_ok(rst_write_begin(f->store, &write, &f->error), f->error);
    assert_ok(rst_read_consumer(write.txn, f->store->env, &of, &consumer, &f->error), f->error);
    assert_ok(rst_lease_open(write.txn, f->store->env, of.key, sequence, &cursor, &f->error),
              f->error);
    assert_int_equal(cursor.sequence, sequence);
    edit(&cursor.entry);
    assert_ok(rst_lease_store(&cursor, &f->error), f->error);
    rst_lease_close(&cursor);
    assert_ok(rst_write_consumer(&write, &of, &consumer, &f->error), f->error);
    assert_ok(rst_write_commit(&write, &f->error), f->error);
}

/* ---------------------------------------------------------------- create, drop, look */

static void a_consumer_is_created_once(void **state)
{
    fixture *f = *state;
    int created;
    create(f, NAME, RST_START_OLDEST);
    seal_range(f, 1, 3);
    rst_lease lease;
    take_expecting(f, NAME, 1, 1, &lease);
    rst_consumer before = look_at(f->store, NAME);
    assert_ok(rst_consumer_create(f->store, NAME, SIZE, RST_START_NEWEST, &created, &f->error),
              f->error);
    assert_int_equal(created, 0);
    rst_consumer after = look_at(f->store, NAME);
    assert_memory_equal(&before, &after, sizeof before);
    assert_ok(rst_consumer_create(f->store, NAME, SIZE, RST_START_NEWEST, NULL, &f->error),
              f->error);
}

static void names_and_arguments_are_checked(void **state)
{
    fixture *f = *state;
    char name[RST_CONSUMER_NAME_SIZE_MAX + 1];
    memset(name, 'x', sizeof name);
    rst_store *s = f->store;
    rst_error *e = &f->error;
    rst_lease lease = {0};
    size_t got;
    assert_code(RST_ERR_ARGUMENT, rst_consumer_create(s, name, 0, 0, NULL, e), f->error);
    assert_code(RST_ERR_ARGUMENT, rst_consumer_create(s, NULL, 3, 0, NULL, e), f->error);
    assert_code(RST_ERR_ARGUMENT, rst_consumer_create(s, name, sizeof name, 0, NULL, e), f->error);
    assert_string_equal(f->error.field, "name");
    assert_code(RST_ERR_ARGUMENT, rst_consumer_create(s, name, 5, (rst_consumer_start)2, NULL, e),
                f->error);
    assert_ok(rst_consumer_create(s, name, sizeof name - 1, 0, NULL, e), f->error);
    assert_ok(rst_consumer_create(s, "\0\xff", 2, 0, NULL, e), f->error);
    assert_code(RST_ERR_ARGUMENT, rst_consumer_take(s, name, 256, 0, 0, 0, &lease, &got, e),
                f->error);
    assert_code(RST_ERR_ARGUMENT, rst_consumer_take(s, name, 256, 1, 0, 0, NULL, &got, e),
                f->error);
    assert_code(RST_ERR_ARGUMENT, rst_consumer_take(s, name, 256, 1, -1, 0, &lease, &got, e),
                f->error);
    assert_string_equal(f->error.field, "lease_ms");
    assert_code(RST_ERR_ARGUMENT, rst_consumer_renew(s, name, 256, &lease, 1, -1, e), f->error);
    assert_code(RST_ERR_ARGUMENT, rst_consumer_acknowledge(s, name, 256, NULL, 1, e), f->error);
    assert_ok(rst_consumer_acknowledge(s, name, 256, NULL, 0, e), f->error);
    assert_ok(rst_consumer_drop(s, name, 256, e), f->error);
    assert_ok(rst_consumer_drop(s, "\0\xff", 2, e), f->error);
}

static void an_unknown_consumer_is_not_found(void **state)
{
    fixture *f = *state;
    rst_store *s = f->store;
    rst_error *e = &f->error;
    rst_lease lease = {.sequence = 1};
    size_t got;
    void *place;
    rst_snapshot *snapshot;
    rst_consumer consumer;
    uint8_t key[RST_KEY_SIZE];
    assert_code(RST_ERR_NOT_FOUND, rst_consumer_take(s, NAME, SIZE, 1, 0, 0, &lease, &got, e),
                f->error);
    assert_non_null(strstr(f->error.message, NAME));
    assert_code(RST_ERR_NOT_FOUND, rst_consumer_acknowledge(s, NAME, SIZE, &lease, 1, e), f->error);
    assert_code(RST_ERR_NOT_FOUND, rst_consumer_return(s, NAME, SIZE, &lease, 1, e), f->error);
    assert_code(RST_ERR_NOT_FOUND, rst_consumer_renew(s, NAME, SIZE, &lease, 1, 0, e), f->error);
    assert_code(RST_ERR_NOT_FOUND, rst_consumer_place(s, NAME, SIZE, &place, &got, e), f->error);
    assert_null(place);
    assert_code(RST_ERR_NOT_FOUND, rst_consumer_drop(s, NAME, SIZE, e), f->error);
    assert_ok(rst_snapshot_open(s, &snapshot, e), f->error);
    assert_code(RST_ERR_NOT_FOUND, rst_consumer_get(snapshot, NAME, SIZE, &consumer, e), f->error);
    assert_code(RST_ERR_NOT_FOUND, rst_consumer_next(snapshot, NULL, &consumer, key, e), f->error);
    rst_snapshot_close(snapshot);
}

static void a_start_is_oldest_or_newest(void **state)
{
    fixture *f = *state;
    create(f, "empty-oldest", RST_START_OLDEST);
    create(f, "empty-newest", RST_START_NEWEST);
    seal_range(f, 1, 5);
    assert_ok(rst_consumer_drop(f->store, "empty-newest", 12, &f->error), f->error);
    assert_ok(release_one_session(f, 1, RST_CHANGE_FORCE), f->error);
    create(f, "oldest", RST_START_OLDEST);
    create(f, "newest", RST_START_NEWEST);
    rst_consumer c = look_at(f->store, "oldest");
    assert_int_equal(c.next, 2);
    assert_int_equal(c.settled, 2);
    assert_int_equal(c.waiting_count, 4);
    c = look_at(f->store, "newest");
    assert_int_equal(c.next, 6);
    assert_int_equal(c.waiting_count, 0);
    assert_int_equal(look_at(f->store, "empty-oldest").waiting_count, 4);
    take_nothing(f, "newest");
    seal_range(f, 6, 6);
    rst_lease leases[5];
    take_expecting(f, "newest", 6, 1, leases);
    take_expecting(f, "oldest", 2, 5, leases);
}

static void dropping_forgets_the_leases_too(void **state)
{
    fixture *f = *state;
    rst_lease leases[4];
    create(f, NAME, RST_START_OLDEST);
    create(f, "other", RST_START_OLDEST);
    seal_range(f, 1, 4);
    take_expecting(f, NAME, 1, 3, leases);
    acknowledge(f, NAME, leases, 1);
    rst_lease other[2];
    take_expecting(f, "other", 1, 2, other);
    assert_int_equal(lease_entries(f), 5);
    assert_ok(rst_consumer_drop(f->store, NAME, SIZE, &f->error), f->error);
    assert_int_equal(lease_entries(f), 2);
    acknowledge(f, "other", other, 2);
    create(f, NAME, RST_START_OLDEST);
    rst_lease again[4];
    take_expecting(f, NAME, 1, 4, again);
    assert_int_equal(again[0].given_count, 1);
    /* What the first one gave is void, although the second one gave the same sessions. */
    assert_code(RST_ERR_LEASE, rst_consumer_acknowledge(f->store, NAME, SIZE, leases, 1, &f->error),
                f->error);
}

static void consumers_are_listed_once_each(void **state)
{
    fixture *f = *state;
    const char *names[] = {"a", "b", "c", "d", "e"};
    for (int i = 0; i < 5; i++) {
        create(f, names[i], RST_START_OLDEST);
    }
    rst_snapshot *snapshot;
    assert_ok(rst_snapshot_open(f->store, &snapshot, &f->error), f->error);
    assert_ok(rst_consumer_drop(f->store, "c", 1, &f->error), f->error);
    unsigned seen = 0;
    uint8_t key[RST_KEY_SIZE];
    uint8_t *after = NULL;
    rst_consumer consumer;
    int code;
    while ((code = rst_consumer_next(snapshot, after, &consumer, key, &f->error)) == RST_OK) {
        assert_int_equal(consumer.name_size, 1);
        unsigned bit = 1u << (consumer.name[0] - 'a');
        assert_false(seen & bit);
        seen |= bit;
        after = key;
    }
    assert_code(RST_ERR_NOT_FOUND, code, f->error);
    assert_int_equal(seen, 31); /* the snapshot still has the dropped one */
    rst_snapshot_close(snapshot);
}

static void counts_tell_where_each_session_stands(void **state)
{
    fixture *f = *state;
    rst_lease leases[6];
    create(f, NAME, RST_START_OLDEST);
    seal_range(f, 1, 10);
    take_expecting(f, NAME, 1, 6, leases);
    acknowledge(f, NAME, leases, 2);
    bytes place = place_of(f, NAME);
    acknowledge(f, NAME, leases + 3, 1);
    assert_ok(rst_consumer_return(f->store, NAME, SIZE, leases + 4, 1, &f->error), f->error);
    commit(f, NAME, place);
    free(place.data);
    rst_consumer c = look_at(f->store, NAME);
    assert_int_equal(c.next, 7);
    assert_int_equal(c.settled, 3);
    assert_int_equal(c.waiting_count, 4);
    assert_int_equal(c.free_count, 1);
    assert_int_equal(c.held_count, 2);
    assert_int_equal(c.trained_count, 1);
    assert_int_equal(c.committed_count, 2);
    assert_int_equal(c.given_total, 6);
    assert_int_equal(c.again_total, 0);
    assert_int_equal(c.trained_total, 3);
    rst_lease again;
    take_expecting(f, NAME, 5, 1, &again);
    c = look_at(f->store, NAME);
    assert_int_equal(c.given_total, 7);
    assert_int_equal(c.again_total, 1);
    /* Committed, then released: still settled, but not counted as stored. */
    assert_ok(release_one_session(f, 1, 0), f->error);
    assert_int_equal(look_at(f->store, NAME).committed_count, 1);
}

static void a_stalled_consumer_shows(void **state)
{
    fixture *f = *state;
    create(f, NAME, RST_START_OLDEST);
    seal_range(f, 1, 2);
    rst_lease lease;
    take_expecting(f, NAME, 1, 1, &lease);
    rst_consumer before = look_at(f->store, NAME);
    assert_true(before.changed_ns >= before.created_ns);
    seal_range(f, 3, 20);
    rst_consumer c = look_at(f->store, NAME);
    assert_int_equal(c.changed_ns, before.changed_ns);
    assert_int_equal(c.waiting_count, 19);
    assert_int_equal(c.held_count, 1);
    acknowledge(f, NAME, &lease, 1);
    assert_true(look_at(f->store, NAME).changed_ns > before.changed_ns);
}

/* ---------------------------------------------------------------- taking */

static void sessions_are_given_in_ready_order_once(void **state)
{
    fixture *f = *state;
    create(f, NAME, RST_START_OLDEST);
    seal_range(f, 1, 7);
    rst_lease leases[7];
    take_expecting(f, NAME, 1, 3, leases);
    take_expecting(f, NAME, 4, 4, leases + 3);
    take_nothing(f, NAME);
    for (int i = 0; i < 7; i++) {
        uint8_t key[RST_KEY_SIZE];
        const char *name = session_name((uint64_t)i + 1);
        rst_session_key(name, strlen(name), key);
        assert_memory_equal(leases[i].key, key, RST_KEY_SIZE);
        assert_int_equal(leases[i].given_count, 1);
        assert_true(leases[i].expires_ns > rst_clock_ns(CLOCK_BOOTTIME));
        for (int j = 0; j < i; j++) {
            assert_int_not_equal(leases[i].lease_id, leases[j].lease_id);
        }
    }
}

static void a_take_gives_what_there_is(void **state)
{
    fixture *f = *state;
    create(f, NAME, RST_START_OLDEST);
    seal_range(f, 1, 2);
    rst_lease leases[10];
    size_t got;
    assert_ok(rst_consumer_take(f->store, NAME, SIZE, 10, 0, RST_FOREVER, leases, &got, &f->error),
              f->error);
    assert_int_equal(got, 2);
}

static uint64_t last_transaction(fixture *f)
{
    rst_stat stat;
    assert_ok(rst_store_stat(f->store, &stat, &f->error), f->error);
    return stat.last_transaction;
}

static void nothing_is_written_when_nothing_is_there(void **state)
{
    fixture *f = *state;
    create(f, NAME, RST_START_OLDEST);
    seal_range(f, 1, 2);
    rst_lease leases[2];
    take_expecting(f, NAME, 1, 2, leases);
    uint64_t before = last_transaction(f);
    take_nothing(f, NAME);
    acknowledge(f, NAME, leases, 0);
    assert_int_equal(last_transaction(f), before);
    acknowledge(f, NAME, leases, 2);
    acknowledge(f, NAME, leases, 2);
    uint64_t released;
    assert_ok(rst_release_consumed(f->store, 0, &released, &f->error), f->error);
    assert_int_equal(released, 0);
    assert_int_equal(last_transaction(f), before + 1);
}

static void what_came_back_is_given_first_and_in_order(void **state)
{
    fixture *f = *state;
    create(f, NAME, RST_START_OLDEST);
    seal_range(f, 1, 8);
    rst_lease leases[6];
    take_expecting(f, NAME, 1, 6, leases);
    rst_lease back[] = {leases[4], leases[1]};
    assert_ok(rst_consumer_return(f->store, NAME, SIZE, back, 2, &f->error), f->error);
    assert_ok(rst_consumer_return(f->store, NAME, SIZE, back, 2, &f->error), f->error);
    assert_int_equal(look_at(f->store, NAME).free_count, 2);
    rst_lease again[4];
    size_t got;
    assert_ok(rst_consumer_take(f->store, NAME, SIZE, 4, 0, 0, again, &got, &f->error), f->error);
    assert_int_equal(got, 4);
    const uint64_t want[] = {2, 5, 7, 8};
    for (int i = 0; i < 4; i++) {
        assert_int_equal(again[i].sequence, want[i]);
        assert_int_equal(again[i].given_count, i < 2 ? 2 : 1);
    }
    assert_int_not_equal(again[0].lease_id, leases[1].lease_id);
    assert_int_equal(look_at(f->store, NAME).again_total, 2);
}

static void a_read_only_handle_only_looks(void **state)
{
    fixture *f = *state;
    create(f, NAME, RST_START_OLDEST);
    rst_store *reader;
    rst_error *e = &f->error;
    assert_ok(rst_store_open(f->path, RST_OPEN_READ_ONLY, NULL, &reader, e), f->error);
    rst_lease lease = {0};
    size_t got;
    void *place;
    assert_code(RST_ERR_READ_ONLY, rst_consumer_take(reader, NAME, SIZE, 1, 0, 0, &lease, &got, e),
                f->error);
    assert_code(RST_ERR_READ_ONLY, rst_consumer_create(reader, "b", 1, 0, NULL, e), f->error);
    assert_code(RST_ERR_READ_ONLY, rst_consumer_acknowledge(reader, NAME, SIZE, &lease, 1, e),
                f->error);
    assert_code(RST_ERR_READ_ONLY, rst_consumer_drop(reader, NAME, SIZE, e), f->error);
    assert_code(RST_ERR_READ_ONLY, rst_release_consumed(reader, 0, NULL, e), f->error);
    assert_ok(rst_consumer_place(reader, NAME, SIZE, &place, &got, e), f->error);
    assert_code(RST_ERR_READ_ONLY, rst_consumer_commit(reader, NAME, SIZE, place, got, e),
                f->error);
    assert_code(RST_ERR_READ_ONLY, rst_consumer_resume(reader, NAME, SIZE, place, got, NULL, e),
                f->error);
    free(place);
    assert_int_equal(look_at(reader, NAME).next, 1);
    assert_ok(rst_store_close(reader, e), f->error);
}

/* ---------------------------------------------------------------- leases */

static void acknowledging_twice_is_a_success(void **state)
{
    fixture *f = *state;
    create(f, NAME, RST_START_OLDEST);
    seal_range(f, 1, 3);
    rst_lease leases[3];
    take_expecting(f, NAME, 1, 3, leases);
    acknowledge(f, NAME, leases, 2);
    acknowledge(f, NAME, leases, 3);
    rst_lease doubled[] = {leases[2], leases[2]};
    acknowledge(f, NAME, doubled, 2);
    assert_int_equal(look_at(f->store, NAME).trained_total, 3);
    bytes place = place_of(f, NAME);
    commit(f, NAME, place);
    free(place.data);
    acknowledge(f, NAME, leases, 3); /* also when it is committed and forgotten */
    assert_int_equal(lease_entries(f), 0);
    assert_int_equal(look_at(f->store, NAME).trained_total, 3);
}

static void leases_are_acknowledged_all_or_none(void **state)
{
    fixture *f = *state;
    create(f, NAME, RST_START_OLDEST);
    seal_range(f, 1, 4);
    rst_lease leases[4];
    take_expecting(f, NAME, 1, 4, leases);
    rst_lease wrong[3] = {leases[0], leases[1], leases[2]};
    wrong[1].lease_id ^= 1;
    assert_code(RST_ERR_LEASE, rst_consumer_acknowledge(f->store, NAME, SIZE, wrong, 3, &f->error),
                f->error);
    assert_int_equal(f->error.index, 1);
    assert_int_equal(look_at(f->store, NAME).trained_count, 0);
    assert_code(RST_ERR_LEASE, rst_consumer_return(f->store, NAME, SIZE, wrong, 3, &f->error),
                f->error);
    assert_int_equal(look_at(f->store, NAME).held_count, 4);
    wrong[1] = leases[1];
    wrong[2].sequence = 5; /* never given */
    assert_code(RST_ERR_LEASE, rst_consumer_acknowledge(f->store, NAME, SIZE, wrong, 3, &f->error),
                f->error);
    assert_int_equal(f->error.index, 2);
    int64_t expires = wrong[0].expires_ns;
    assert_code(RST_ERR_LEASE, rst_consumer_renew(f->store, NAME, SIZE, wrong, 3, 5, &f->error),
                f->error);
    assert_int_equal(wrong[0].expires_ns, expires);
}

static void what_was_said_of_a_session_stands(void **state)
{
    fixture *f = *state;
    create(f, NAME, RST_START_OLDEST);
    seal_range(f, 1, 2);
    rst_lease leases[2];
    take_expecting(f, NAME, 1, 2, leases);
    acknowledge(f, NAME, leases, 1);
    assert_code(RST_ERR_LEASE, rst_consumer_return(f->store, NAME, SIZE, leases, 1, &f->error),
                f->error);
    assert_ok(rst_consumer_renew(f->store, NAME, SIZE, leases, 1, 0, &f->error), f->error);
    assert_int_equal(look_at(f->store, NAME).trained_count, 1);
    assert_ok(rst_consumer_return(f->store, NAME, SIZE, leases + 1, 1, &f->error), f->error);
    assert_code(RST_ERR_LEASE,
                rst_consumer_acknowledge(f->store, NAME, SIZE, leases + 1, 1, &f->error), f->error);
    assert_code(RST_ERR_LEASE,
                rst_consumer_renew(f->store, NAME, SIZE, leases + 1, 1, 0, &f->error), f->error);
    rst_lease again;
    take_expecting(f, NAME, 2, 1, &again);
}

/* Take one session for a millisecond and let that pass. */
static rst_lease take_and_lose(fixture *f, const char *name)
{
    rst_lease lease;
    size_t got;
    assert_ok(rst_consumer_take(f->store, name, strlen(name), 1, 1, 0, &lease, &got, &f->error),
              f->error);
    while (rst_clock_ns(CLOCK_BOOTTIME) <= lease.expires_ns) {
        sleep_ms(1);
    }
    return lease;
}

static void a_lease_that_ran_out_is_given_again(void **state)
{
    fixture *f = *state;
    create(f, NAME, RST_START_OLDEST);
    seal_range(f, 1, 2);
    rst_lease first = take_and_lose(f, NAME);
    assert_int_equal(look_at(f->store, NAME).held_count, 1);
    rst_lease second[2];
    take_expecting(f, NAME, 1, 2, second);
    assert_int_equal(second[0].given_count, 2);
    assert_code(RST_ERR_LEASE, rst_consumer_acknowledge(f->store, NAME, SIZE, &first, 1, &f->error),
                f->error);
    assert_code(RST_ERR_LEASE, rst_consumer_return(f->store, NAME, SIZE, &first, 1, &f->error),
                f->error);
    assert_code(RST_ERR_LEASE, rst_consumer_renew(f->store, NAME, SIZE, &first, 1, 0, &f->error),
                f->error);
    settle(f, NAME, second, 2);
    /* Also when the entry that would tell is gone. */
    assert_int_equal(lease_entries(f), 0);
    assert_code(RST_ERR_LEASE, rst_consumer_acknowledge(f->store, NAME, SIZE, &first, 1, &f->error),
                f->error);
}

static void a_lease_that_ran_out_may_be_acknowledged_while_nobody_else_has_it(void **state)
{
    fixture *f = *state;
    create(f, NAME, RST_START_OLDEST);
    seal_range(f, 1, 3);
    rst_lease first = take_and_lose(f, NAME);
    acknowledge(f, NAME, &first, 1);
    rst_lease second = take_and_lose(f, NAME);
    assert_int_equal(second.sequence, 2);
    assert_ok(rst_consumer_renew(f->store, NAME, SIZE, &second, 1, 0, &f->error), f->error);
    assert_true(second.expires_ns > rst_clock_ns(CLOCK_BOOTTIME));
    rst_lease third;
    take_expecting(f, NAME, 3, 1, &third);
    acknowledge(f, NAME, &second, 1);
}

static void a_very_long_lease_does_not_overflow(void **state)
{
    fixture *f = *state;
    create(f, NAME, RST_START_OLDEST);
    seal_range(f, 1, 2);
    rst_lease lease;
    size_t got;
    assert_ok(rst_consumer_take(f->store, NAME, SIZE, 1, INT64_MAX, 0, &lease, &got, &f->error),
              f->error);
    assert_true(lease.expires_ns == INT64_MAX);
    take_expecting(f, NAME, 2, 1, &lease);
    take_nothing(f, NAME);
}

static void as_after_a_reboot(rst_lease_entry *entry)
{
    entry->boot ^= 1;
    entry->expires_ns = INT64_MAX;
}

static void a_lease_from_before_a_reboot_has_ended(void **state)
{
    fixture *f = *state;
    create(f, NAME, RST_START_OLDEST);
    seal_range(f, 1, 1);
    rst_lease lease;
    take_expecting(f, NAME, 1, 1, &lease);
    take_nothing(f, NAME);
    edit_lease(f, NAME, 1, as_after_a_reboot);
    take_expecting(f, NAME, 1, 1, &lease);
    assert_int_equal(lease.given_count, 2);
}

static void as_of_a_former_process(rst_lease_entry *entry)
{
    entry->pid_start--;
}

static void as_of_another_namespace(rst_lease_entry *entry)
{
    entry->pid = 0x7FFFFFFF;
    entry->pid_namespace ^= 1;
}

static void as_of_no_known_process(rst_lease_entry *entry)
{
    entry->pid = 0x7FFFFFFF;
    entry->pid_namespace = 0;
}

static void a_process_number_used_again_is_another_process(void **state)
{
    fixture *f = *state;
    create(f, NAME, RST_START_OLDEST);
    seal_range(f, 1, 1);
    rst_lease lease;
    take_expecting(f, NAME, 1, 1, &lease);
    edit_lease(f, NAME, 1, as_of_a_former_process);
    take_expecting(f, NAME, 1, 1, &lease);
}

static void where_nobody_can_look_only_expiry_ends_a_lease(void **state)
{
    fixture *f = *state;
    create(f, NAME, RST_START_OLDEST);
    seal_range(f, 1, 3);
    rst_lease leases[3];
    take_expecting(f, NAME, 1, 2, leases);
    edit_lease(f, NAME, 1, as_of_another_namespace);
    edit_lease(f, NAME, 2, as_of_no_known_process);
    take_expecting(f, NAME, 3, 1, leases + 2);
    take_nothing(f, NAME);
    assert_ok(rst_consumer_renew(f->store, NAME, SIZE, leases, 2, 1, &f->error), f->error);
    edit_lease(f, NAME, 1, as_of_another_namespace);
    edit_lease(f, NAME, 2, as_of_no_known_process);
    size_t got;
    assert_ok(rst_consumer_take(f->store, NAME, SIZE, 2, 0, PATIENCE_MS, leases, &got, &f->error),
              f->error);
    assert_int_equal(leases[0].sequence, 1);
}

/* ---------------------------------------------------------------- commit and release */

static void only_what_is_committed_can_be_released(void **state)
{
    fixture *f = *state;
    create(f, NAME, RST_START_OLDEST);
    seal_range(f, 1, 4);
    rst_lease leases[3];
    uint64_t released;
    take_expecting(f, NAME, 1, 3, leases);
    assert_ok(rst_consumer_return(f->store, NAME, SIZE, leases + 1, 1, &f->error), f->error);
    acknowledge(f, NAME, leases + 2, 1);
    const char *why[] = {"leased", "came back", "not committed", "waits"};
    for (uint64_t i = 1; i <= 4; i++) {
        assert_code(RST_ERR_HELD, release_one_session(f, i, 0), f->error);
        assert_non_null(strstr(f->error.message, NAME));
        assert_non_null(strstr(f->error.message, why[i - 1]));
    }
    assert_ok(rst_release_consumed(f->store, 0, &released, &f->error), f->error);
    assert_int_equal(released, 0);
    settle(f, NAME, leases, 1);
    assert_code(RST_ERR_HELD, release_one_session(f, 2, 0), f->error);
    /* 3 is committed before 2, which stands between it and settled. */
    assert_int_equal(look_at(f->store, NAME).settled, 2);
    assert_ok(release_one_session(f, 3, 0), f->error);
    assert_ok(rst_release_consumed(f->store, 0, &released, &f->error), f->error);
    assert_int_equal(released, 1);
    assert_code(RST_ERR_NOT_FOUND, release_one_session(f, 1, 0), f->error);
}

static void every_consumer_must_have_committed(void **state)
{
    fixture *f = *state;
    seal_range(f, 1, 5);
    uint64_t released;
    assert_ok(rst_release_consumed(f->store, 0, &released, &f->error), f->error);
    assert_int_equal(released, 0); /* without a consumer */
    create(f, "a", RST_START_OLDEST);
    create(f, "b", RST_START_OLDEST);
    create(f, "late", RST_START_NEWEST); /* holds nothing that is older */
    rst_lease a[5];
    rst_lease b[3];
    take_expecting(f, "a", 1, 5, a);
    take_expecting(f, "b", 1, 3, b);
    settle(f, "a", a, 5);
    assert_ok(rst_release_consumed(f->store, 0, &released, &f->error), f->error);
    assert_int_equal(released, 0);
    assert_code(RST_ERR_HELD, release_one_session(f, 2, 0), f->error);
    assert_non_null(strstr(f->error.message, "\"b\""));
    settle(f, "b", b + 1, 2);
    assert_ok(rst_release_consumed(f->store, 1, &released, &f->error), f->error);
    assert_int_equal(released, 1);
    assert_code(RST_ERR_NOT_FOUND, release_one_session(f, 2, 0), f->error); /* the oldest first */
    assert_ok(rst_release_consumed(f->store, 10, NULL, &f->error), f->error);
    assert_code(RST_ERR_NOT_FOUND, release_one_session(f, 3, 0), f->error);
    assert_ok(rst_consumer_drop(f->store, "b", 1, &f->error), f->error);
    assert_ok(rst_release_consumed(f->store, 0, &released, &f->error), f->error);
    assert_int_equal(released, 3);
}

static void an_open_session_is_no_consumers_business(void **state)
{
    fixture *f = *state;
    create(f, NAME, RST_START_OLDEST);
    assert_ok(rst_put(f->store, "open", 4, 0, f->record, 0, 0, &f->error), f->error);
    take_nothing(f, NAME);
    assert_ok(rst_release(f->store, "open", 4, 0, &f->error), f->error);
}

static void a_place_holds_what_is_trained_and_nothing_later(void **state)
{
    fixture *f = *state;
    create(f, NAME, RST_START_OLDEST);
    seal_range(f, 1, 6);
    rst_lease leases[6];
    take_expecting(f, NAME, 1, 6, leases);
    acknowledge(f, NAME, leases, 1);
    acknowledge(f, NAME, leases + 3, 1);
    uint64_t before = last_transaction(f);
    bytes place = place_of(f, NAME);
    assert_int_equal(last_transaction(f), before);
    acknowledge(f, NAME, leases + 1, 1);
    acknowledge(f, NAME, leases + 4, 1);
    commit(f, NAME, place);
    rst_consumer c = look_at(f->store, NAME);
    assert_int_equal(c.settled, 2);
    assert_int_equal(c.committed_count, 2); /* 1 and 4 */
    assert_int_equal(c.trained_count, 2);   /* 2 and 5: trained after the place was taken */
    assert_int_equal(c.held_count, 2);
    bytes later = place_of(f, NAME);
    commit(f, NAME, later);
    assert_int_equal(look_at(f->store, NAME).settled, 3);
    commit(f, NAME, place); /* an older one does no harm */
    commit(f, NAME, later);
    c = look_at(f->store, NAME);
    assert_int_equal(c.settled, 3);
    assert_int_equal(c.committed_count, 4);
    free(place.data);
    free(later.data);
}

static void a_settled_session_costs_nothing(void **state)
{
    fixture *f = *state;
    enum { COUNT = 600 };
    create(f, NAME, RST_START_OLDEST);
    seal_range(f, 1, COUNT);
    static rst_lease leases[COUNT];
    take_expecting(f, NAME, 1, COUNT, leases);
    assert_int_equal(lease_entries(f), COUNT);
    settle(f, NAME, leases + 1, COUNT - 1);
    assert_int_equal(lease_entries(f), COUNT);
    settle(f, NAME, leases, 1);
    assert_int_equal(lease_entries(f), 0);
    uint64_t released;
    assert_ok(rst_release_consumed(f->store, 0, &released, &f->error), f->error);
    assert_int_equal(released, COUNT);
}

/* ---------------------------------------------------------------- places that are none */

static void a_place_belongs_to_its_consumer_and_store(void **state)
{
    fixture *f = *state;
    fixture other;
    fixture_open(&other, UINT64_C(2) << 20);
    create(f, "a", RST_START_OLDEST);
    create(f, "b", RST_START_OLDEST);
    create(&other, "a", RST_START_OLDEST);
    bytes place = place_of(f, "a");
    assert_code(RST_ERR_ARGUMENT,
                rst_consumer_commit(f->store, "b", 1, place.data, place.size, &f->error), f->error);
    assert_non_null(strstr(f->error.message, "another consumer"));
    assert_code(RST_ERR_ARGUMENT,
                rst_consumer_resume(f->store, "b", 1, place.data, place.size, NULL, &f->error),
                f->error);
    assert_code(RST_ERR_ARGUMENT,
                rst_consumer_commit(other.store, "a", 1, place.data, place.size, &f->error),
                f->error);
    assert_non_null(strstr(f->error.message, "another store"));
    assert_code(RST_ERR_ARGUMENT,
                rst_consumer_resume(other.store, "a", 1, place.data, place.size, NULL, &f->error),
                f->error);
    free(place.data);
    fixture_close(&other);
}

static void refuse_place(fixture *f, const void *data, size_t size)
{
    assert_code(RST_ERR_ARGUMENT, rst_consumer_commit(f->store, NAME, SIZE, data, size, &f->error),
                f->error);
    assert_code(RST_ERR_ARGUMENT,
                rst_consumer_resume(f->store, NAME, SIZE, data, size, NULL, &f->error), f->error);
}

/* A place with several runs. */
static bytes place_with_runs(fixture *f)
{
    create(f, NAME, RST_START_OLDEST);
    seal_range(f, 1, 9);
    static rst_lease leases[8];
    take_expecting(f, NAME, 1, 8, leases);
    acknowledge(f, NAME, leases + 1, 1);
    acknowledge(f, NAME, leases + 3, 2);
    acknowledge(f, NAME, leases + 6, 1);
    bytes place = place_of(f, NAME);
    assert_int_equal(place.size, sizeof(rst_place_header) + 3 * sizeof(rst_place_run));
    return place;
}

static void a_damaged_place_is_refused(void **state)
{
    fixture *f = *state;
    bytes place = place_with_runs(f);
    rst_consumer before = look_at(f->store, NAME);
    for (size_t size = 0; size < place.size; size++) {
        void *cut = malloc(size ? size : 1); /* exact, for the address sanitizer */
        memcpy(cut, place.data, size);
        refuse_place(f, cut, size);
        free(cut);
    }
    refuse_place(f, NULL, 0);
    unsigned char *longer = calloc(1, place.size + 16);
    memcpy(longer, place.data, place.size);
    refuse_place(f, longer, place.size + 1);
    refuse_place(f, longer, place.size + 16);
    free(longer);
    for (size_t i = 0; i < place.size; i++) {
        ((unsigned char *)place.data)[i] ^= 0x40;
        refuse_place(f, place.data, place.size);
        ((unsigned char *)place.data)[i] ^= 0x40;
    }
    rst_consumer after = look_at(f->store, NAME);
    assert_memory_equal(&before, &after, sizeof before);
    commit(f, NAME, place); /* undamaged */
    free(place.data);
}

/* Write a place's checksum anew, as somebody would who makes one up. */
static void sign(bytes place)
{
    uint64_t checksum = rst_hash((unsigned char *)place.data + 16, place.size - 16);
    memcpy((unsigned char *)place.data + offsetof(rst_place_header, checksum), &checksum,
           sizeof checksum);
}

static void a_made_up_place_is_refused(void **state)
{
    fixture *f = *state;
    bytes place = place_with_runs(f);
    size_t fields[] = {offsetof(rst_place_header, settled), offsetof(rst_place_header, next),
                       offsetof(rst_place_header, limit),   offsetof(rst_place_header, run_count),
                       sizeof(rst_place_header) + 0,        sizeof(rst_place_header) + 8,
                       sizeof(rst_place_header) + 16,       sizeof(rst_place_header) + 24,
                       sizeof(rst_place_header) + 40};
    const uint64_t values[] = {UINT64_MAX, UINT64_MAX - 1, UINT64_C(1) << 63, 1000};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        for (size_t j = 0; j < sizeof values / sizeof *values; j++) {
            uint64_t kept;
            unsigned char *at = (unsigned char *)place.data + fields[i];
            memcpy(&kept, at, 8);
            memcpy(at, &values[j], 8);
            sign(place);
            refuse_place(f, place.data, place.size);
            memcpy(at, &kept, 8);
        }
    }
    /* Runs that are empty, or out of order. */
    rst_place_run *runs = (rst_place_run *)((unsigned char *)place.data + sizeof(rst_place_header));
    rst_place_run kept = runs[1];
    runs[1].end = runs[1].begin;
    sign(place);
    refuse_place(f, place.data, place.size);
    runs[1] = kept;
    runs[0] = kept;
    sign(place);
    refuse_place(f, place.data, place.size);
    free(place.data);
}

/* ---------------------------------------------------------------- resume */

static void resume_gives_again_what_the_checkpoint_has_not(void **state)
{
    fixture *f = *state;
    create(f, NAME, RST_START_OLDEST);
    seal_range(f, 1, 8);
    rst_lease leases[6];
    take_expecting(f, NAME, 1, 6, leases);
    acknowledge(f, NAME, leases, 1);
    acknowledge(f, NAME, leases + 2, 1);
    bytes place = place_of(f, NAME);
    acknowledge(f, NAME, leases + 1, 1); /* trained after the checkpoint, lost with the crash */
    assert_int_equal(resume(f, NAME, place), 0);
    rst_consumer c = look_at(f->store, NAME);
    assert_int_equal(c.settled, 2);
    assert_int_equal(c.committed_count, 2); /* 1 and 3 */
    assert_int_equal(c.free_count, 4);
    assert_int_equal(c.waiting_count, 2);
    assert_int_equal(c.trained_count + c.held_count, 0);
    /* Leases of before are void, whatever became of their sessions. */
    for (int i = 0; i < 6; i++) {
        assert_code(RST_ERR_LEASE,
                    rst_consumer_acknowledge(f->store, NAME, SIZE, leases + i, 1, &f->error),
                    f->error);
        assert_code(RST_ERR_LEASE,
                    rst_consumer_return(f->store, NAME, SIZE, leases + i, 1, &f->error), f->error);
        assert_code(RST_ERR_LEASE,
                    rst_consumer_renew(f->store, NAME, SIZE, leases + i, 1, 0, &f->error),
                    f->error);
    }
    const uint64_t want[] = {2, 4, 5, 6, 7, 8};
    rst_lease again[6];
    size_t got;
    assert_ok(rst_consumer_take(f->store, NAME, SIZE, 6, 0, 0, again, &got, &f->error), f->error);
    assert_int_equal(got, 6);
    for (int i = 0; i < 6; i++) {
        assert_int_equal(again[i].sequence, want[i]);
        assert_int_equal(again[i].given_count, i < 4 ? 2 : 1);
    }
    free(place.data);
}

static void resume_goes_behind_what_was_committed_since(void **state)
{
    fixture *f = *state;
    create(f, NAME, RST_START_OLDEST);
    seal_range(f, 1, 6);
    rst_lease leases[6];
    take_expecting(f, NAME, 1, 6, leases);
    acknowledge(f, NAME, leases, 1);
    bytes early = place_of(f, NAME);
    settle(f, NAME, leases, 4);
    assert_ok(release_one_session(f, 3, 0), f->error);
    assert_int_equal(look_at(f->store, NAME).settled, 5);
    /* The later checkpoint was lost: 3 is gone for good, 2 and 4 are not. */
    assert_int_equal(resume(f, NAME, early), 1);
    assert_code(RST_ERR_HELD, release_one_session(f, 2, 0), f->error);
    assert_ok(release_one_session(f, 1, 0), f->error);
    rst_lease again[4];
    size_t got;
    assert_ok(rst_consumer_take(f->store, NAME, SIZE, 4, 0, 0, again, &got, &f->error), f->error);
    assert_int_equal(got, 4);
    assert_int_equal(again[0].sequence, 2);
    assert_int_equal(again[1].sequence, 4);
    assert_int_equal(again[1].given_count, 2);
    assert_int_equal(again[3].sequence, 6);
    free(early.data);
}

static void lost_counts_only_what_was_released_since_the_place(void **state)
{
    fixture *f = *state;
    create(f, NAME, RST_START_OLDEST);
    seal_range(f, 1, 8);
    rst_lease leases[3];
    take_expecting(f, NAME, 1, 3, leases);
    assert_ok(release_one_session(f, 2, RST_CHANGE_FORCE), f->error);
    assert_ok(release_one_session(f, 5, RST_CHANGE_FORCE), f->error);
    bytes place = place_of(f, NAME);
    assert_int_equal(resume(f, NAME, place), 0);
    assert_ok(release_one_session(f, 1, RST_CHANGE_FORCE), f->error);
    assert_ok(release_one_session(f, 6, RST_CHANGE_FORCE), f->error);
    seal_range(f, 9, 10);
    assert_ok(release_one_session(f, 9, RST_CHANGE_FORCE), f->error);
    assert_int_equal(resume(f, NAME, place), 3);
    rst_consumer c = look_at(f->store, NAME);
    assert_int_equal(c.settled, 3);
    assert_int_equal(c.free_count + c.waiting_count, 5); /* 3 4 7 8 10 */
    free(place.data);
}

static void resume_creates_a_consumer_that_is_not_there(void **state)
{
    fixture *f = *state;
    create(f, NAME, RST_START_OLDEST);
    seal_range(f, 1, 6);
    rst_lease leases[4];
    take_expecting(f, NAME, 1, 4, leases);
    acknowledge(f, NAME, leases, 1);
    acknowledge(f, NAME, leases + 2, 1);
    bytes place = place_of(f, NAME);
    assert_ok(rst_consumer_drop(f->store, NAME, SIZE, &f->error), f->error);
    assert_int_equal(resume(f, NAME, place), 0);
    rst_consumer c = look_at(f->store, NAME);
    assert_int_equal(c.settled, 2);
    assert_int_equal(c.next, 5);
    assert_int_equal(c.free_count, 2);
    assert_int_equal(c.committed_count, 2);
    assert_int_equal(c.waiting_count, 2);
    assert_int_equal(c.given_total, 0);
    rst_lease again[2];
    size_t got;
    assert_ok(rst_consumer_take(f->store, NAME, SIZE, 2, 0, 0, again, &got, &f->error), f->error);
    assert_int_equal(again[0].sequence, 2);
    assert_int_equal(again[1].sequence, 4);
    free(place.data);
}

static void an_abandoned_place_is_not_committed(void **state)
{
    fixture *f = *state;
    create(f, NAME, RST_START_OLDEST);
    seal_range(f, 1, 4);
    rst_lease leases[4];
    take_expecting(f, NAME, 1, 4, leases);
    acknowledge(f, NAME, leases, 1);
    bytes first = place_of(f, NAME);
    acknowledge(f, NAME, leases + 1, 1);
    bytes second = place_of(f, NAME);
    assert_int_equal(resume(f, NAME, first), 0);
    commit(f, NAME, first); /* says nothing new */
    /* The model that trained on 2 is gone; the one that trains on it now is in no checkpoint. */
    rst_lease again;
    take_expecting(f, NAME, 2, 1, &again);
    acknowledge(f, NAME, &again, 1);
    assert_code(RST_ERR_ARGUMENT,
                rst_consumer_commit(f->store, NAME, SIZE, second.data, second.size, &f->error),
                f->error);
    assert_non_null(strstr(f->error.message, "resumed"));
    assert_code(RST_ERR_HELD, release_one_session(f, 2, 0), f->error);
    bytes third = place_of(f, NAME);
    commit(f, NAME, third);
    commit(f, NAME, second); /* now it is nothing new */
    assert_ok(release_one_session(f, 2, 0), f->error);
    /* It may be resumed from at any time. */
    assert_int_equal(resume(f, NAME, second), 0);
    free(first.data);
    free(second.data);
    free(third.data);
}

static void a_place_newer_than_the_store_is_refused(void **state)
{
    fixture *f = *state;
    create(f, NAME, RST_START_OLDEST);
    seal_range(f, 1, 2);
    rst_lease leases[3];
    take_expecting(f, NAME, 1, 2, leases);
    acknowledge(f, NAME, leases, 1);
    const char *copy_path = support_path(f->folder, "copy");
    bytes place = place_of(f, NAME);
    assert_ok(rst_store_copy(f->store, copy_path, 0, &f->error), f->error);
    seal_range(f, 3, 3);
    take_expecting(f, NAME, 3, 1, leases + 2);
    acknowledge(f, NAME, leases + 1, 2);
    bytes newer = place_of(f, NAME);
    rst_store *copy;
    assert_ok(rst_store_open(copy_path, 0, NULL, &copy, &f->error), f->error);
    assert_code(RST_ERR_ARGUMENT,
                rst_consumer_resume(copy, NAME, SIZE, newer.data, newer.size, NULL, &f->error),
                f->error);
    assert_non_null(strstr(f->error.message, "newer than the store"));
    assert_code(RST_ERR_ARGUMENT,
                rst_consumer_commit(copy, NAME, SIZE, newer.data, newer.size, &f->error), f->error);
    /* One from before the copy was made fits the copy. */
    uint64_t lost;
    assert_ok(rst_consumer_resume(copy, NAME, SIZE, place.data, place.size, &lost, &f->error),
              f->error);
    assert_int_equal(lost, 0);
    assert_int_equal(look_at(copy, NAME).free_count, 1);
    assert_ok(rst_store_close(copy, &f->error), f->error);
    free(place.data);
    free(newer.data);
}

/* ---------------------------------------------------------------- releases by force */

static void force_takes_sessions_from_a_consumer(void **state)
{
    fixture *f = *state;
    create(f, NAME, RST_START_OLDEST);
    seal_range(f, 1, 8);
    rst_lease leases[5];
    take_expecting(f, NAME, 1, 5, leases);
    acknowledge(f, NAME, leases + 1, 1);
    assert_ok(rst_consumer_return(f->store, NAME, SIZE, leases + 2, 2, &f->error), f->error);
    /* Held, trained, free, never given. */
    const uint64_t gone[] = {1, 2, 3, 6};
    for (int i = 0; i < 4; i++) {
        assert_code(RST_ERR_HELD, release_one_session(f, gone[i], 0), f->error);
        assert_ok(release_one_session(f, gone[i], RST_CHANGE_FORCE), f->error);
    }
    rst_consumer c = look_at(f->store, NAME);
    assert_int_equal(c.free_count, 1);
    assert_int_equal(c.waiting_count, 2);
    acknowledge(f, NAME, leases, 1); /* its holder had read it */
    rst_lease again[3];
    size_t got;
    assert_ok(rst_consumer_take(f->store, NAME, SIZE, 3, 0, 0, again, &got, &f->error), f->error);
    assert_int_equal(got, 3);
    assert_int_equal(again[0].sequence, 4);
    assert_int_equal(again[1].sequence, 7);
    assert_int_equal(again[2].sequence, 8);
    c = look_at(f->store, NAME);
    assert_int_equal(c.settled, 4);
    acknowledge(f, NAME, leases, 1);
    settle(f, NAME, again, 3);
    acknowledge(f, NAME, leases + 4, 1);
    settle(f, NAME, leases + 4, 1);
    assert_int_equal(look_at(f->store, NAME).settled, 9);
    assert_int_equal(lease_entries(f), 0);
}

static void a_take_that_finds_only_released_sessions_goes_on(void **state)
{
    fixture *f = *state;
    create(f, NAME, RST_START_OLDEST);
    seal_range(f, 1, 6);
    rst_lease leases[5];
    take_expecting(f, NAME, 1, 5, leases);
    assert_ok(rst_consumer_return(f->store, NAME, SIZE, leases, 5, &f->error), f->error);
    for (uint64_t i = 1; i <= 4; i++) {
        assert_ok(release_one_session(f, i, RST_CHANGE_FORCE), f->error);
    }
    take_expecting(f, NAME, 5, 1, leases);
    take_expecting(f, NAME, 6, 1, leases + 1);
    assert_ok(rst_consumer_return(f->store, NAME, SIZE, leases + 1, 1, &f->error), f->error);
    assert_ok(release_one_session(f, 6, RST_CHANGE_FORCE), f->error);
    take_nothing(f, NAME);
}

/* ---------------------------------------------------------------- at capacity */

static void a_full_store_can_be_taken_and_emptied(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, RST_CAPACITY_MIN);
    uint64_t stored = 0;
    int code;
    while ((code = seal_one(f.store, f.record, stored + 1, &f.error)) == RST_OK) {
        stored++;
    }
    assert_code(RST_ERR_FULL, code, f.error);
    assert_true(stored > 100);
    /* More consumers than the kept pages have room for: each leases all it can, and stops in time
     * for commits and releases still to find room. */
    enum { CONSUMERS = 64 };
    static rst_lease leases[4096];
    bool stopped = false;
    for (int i = 0; i < CONSUMERS; i++) {
        char name[16];
        size_t got;
        snprintf(name, sizeof name, "consumer-%d", i);
        create(&f, name, RST_START_OLDEST);
        do {
            code = rst_consumer_take(f.store, name, strlen(name), 50, 0, 0, leases, &got, &f.error);
            if (code == RST_OK) {
                acknowledge(&f, name, leases, got);
            }
        } while (code == RST_OK);
        assert_true(code == RST_ERR_TIMEOUT || code == RST_ERR_FULL);
        stopped |= code == RST_ERR_FULL;
    }
    assert_true(stopped);
    uint64_t released;
    uint64_t all = 0;
    for (int i = 0; i < CONSUMERS; i++) {
        char name[16];
        size_t got = 0;
        snprintf(name, sizeof name, "consumer-%d", i);
        do {
            settle(&f, name, leases, got);
            code = rst_consumer_take(f.store, name, strlen(name), 50, 0, 0, leases, &got, &f.error);
        } while (code == RST_OK);
        assert_code(RST_ERR_TIMEOUT, code, f.error);
        assert_ok(rst_release_consumed(f.store, 0, &released, &f.error), f.error);
        all += released;
    }
    assert_int_equal(all, stored);
    assert_int_equal(lease_entries(&f), 0);
    /* And it holds as much as before. */
    uint64_t second = 0;
    while ((code = seal_one(f.store, f.record, stored + 2 + second, &f.error)) == RST_OK) {
        second++;
    }
    assert_code(RST_ERR_FULL, code, f.error);
    assert_true(second >= stored * 9 / 10);
    fixture_close(&f);
}

/* ---------------------------------------------------------------- damage */

static void damage_entry(fixture *f, MDB_dbi dbi, size_t offset, unsigned char value)
{
    rst_write write;
    MDB_cursor *cursor;
    MDB_val key;
    MDB_val found;
    assert_ok(rst_write_begin(f->store, &write, &f->error), f->error);
    assert_int_equal(mdb_cursor_open(write.txn, dbi, &cursor), 0);
    assert_int_equal(mdb_cursor_get(cursor, &key, &found, MDB_FIRST), 0);
    unsigned char copy[512];
    size_t size = found.mv_size;
    memcpy(copy, found.mv_data, size);
    if (offset < size) {
        copy[offset] = value;
    } else {
        size--; /* cut it instead */
    }
    unsigned char key_copy[64];
    memcpy(key_copy, key.mv_data, key.mv_size);
    mdb_cursor_close(cursor);
    MDB_val same_key = {key.mv_size, key_copy};
    MDB_val changed = {size, copy};
    assert_int_equal(mdb_put(write.txn, dbi, &same_key, &changed, 0), 0);
    write.changed = true;
    assert_ok(rst_write_commit(&write, &f->error), f->error);
}

static void damaged_entries_are_errors(void **state)
{
    fixture *f = *state;
    rst_lease lease;
    rst_consumer consumer;
    rst_snapshot *snapshot;
    size_t got;
    seal_range(f, 1, 2);
    const struct {
        size_t offset;
        unsigned char value;
        int code;
    } consumers[] = {{offsetof(rst_consumer_entry, magic), 0, RST_ERR_CORRUPT},
                     {offsetof(rst_consumer_entry, version), 9, RST_ERR_VERSION},
                     {offsetof(rst_consumer_entry, name_size), 9, RST_ERR_CORRUPT},
                     {offsetof(rst_consumer_entry, settled) + 7, 1, RST_ERR_CORRUPT},
                     {1000, 0, RST_ERR_CORRUPT}};
    for (size_t i = 0; i < sizeof consumers / sizeof *consumers; i++) {
        create(f, NAME, RST_START_OLDEST);
        damage_entry(f, f->store->env->consumers, consumers[i].offset, consumers[i].value);
        assert_code(consumers[i].code,
                    rst_consumer_take(f->store, NAME, SIZE, 1, 0, 0, &lease, &got, &f->error),
                    f->error);
        assert_ok(rst_snapshot_open(f->store, &snapshot, &f->error), f->error);
        assert_code(consumers[i].code, rst_consumer_get(snapshot, NAME, SIZE, &consumer, &f->error),
                    f->error);
        rst_snapshot_close(snapshot);
        /* In doubt nothing is released. */
        assert_code(consumers[i].code, release_one_session(f, 1, 0), f->error);
        assert_code(consumers[i].code, rst_release_consumed(f->store, 0, NULL, &f->error),
                    f->error);
        MDB_txn *txn;
        assert_int_equal(mdb_txn_begin(f->store->env->lmdb, NULL, 0, &txn), 0);
        assert_int_equal(mdb_drop(txn, f->store->env->consumers, 0), 0);
        assert_int_equal(mdb_txn_commit(txn), 0);
    }
    create(f, NAME, RST_START_OLDEST);
    rst_lease leases[2];
    take_expecting(f, NAME, 1, 2, leases);
    damage_entry(f, f->store->env->leases, 0, 77);
    assert_code(RST_ERR_CORRUPT,
                rst_consumer_acknowledge(f->store, NAME, SIZE, leases, 2, &f->error), f->error);
    damage_entry(f, f->store->env->leases, 1000, 0);
    assert_code(RST_ERR_CORRUPT,
                rst_consumer_acknowledge(f->store, NAME, SIZE, leases, 2, &f->error), f->error);
    assert_code(RST_ERR_CORRUPT,
                rst_consumer_take(f->store, NAME, SIZE, 1, 0, 0, &lease, &got, &f->error),
                f->error);
    MDB_txn *txn;
    assert_int_equal(mdb_txn_begin(f->store->env->lmdb, NULL, 0, &txn), 0);
    assert_int_equal(mdb_drop(txn, f->store->env->leases, 0), 0);
    assert_int_equal(mdb_drop(txn, f->store->env->consumers, 0), 0);
    assert_int_equal(mdb_txn_commit(txn), 0);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_consumer_is_created_once),
        TEST(names_and_arguments_are_checked),
        TEST(an_unknown_consumer_is_not_found),
        TEST(a_start_is_oldest_or_newest),
        TEST(dropping_forgets_the_leases_too),
        TEST(consumers_are_listed_once_each),
        TEST(counts_tell_where_each_session_stands),
        TEST(a_stalled_consumer_shows),
        TEST(sessions_are_given_in_ready_order_once),
        TEST(a_take_gives_what_there_is),
        TEST(nothing_is_written_when_nothing_is_there),
        TEST(what_came_back_is_given_first_and_in_order),
        TEST(a_read_only_handle_only_looks),
        TEST(acknowledging_twice_is_a_success),
        TEST(leases_are_acknowledged_all_or_none),
        TEST(what_was_said_of_a_session_stands),
        TEST(a_lease_that_ran_out_is_given_again),
        TEST(a_lease_that_ran_out_may_be_acknowledged_while_nobody_else_has_it),
        TEST(a_very_long_lease_does_not_overflow),
        TEST(a_lease_from_before_a_reboot_has_ended),
        TEST(a_process_number_used_again_is_another_process),
        TEST(where_nobody_can_look_only_expiry_ends_a_lease),
        TEST(only_what_is_committed_can_be_released),
        TEST(every_consumer_must_have_committed),
        TEST(an_open_session_is_no_consumers_business),
        TEST(a_place_holds_what_is_trained_and_nothing_later),
        TEST(a_settled_session_costs_nothing),
        TEST(a_place_belongs_to_its_consumer_and_store),
        TEST(a_damaged_place_is_refused),
        TEST(a_made_up_place_is_refused),
        TEST(resume_gives_again_what_the_checkpoint_has_not),
        TEST(resume_goes_behind_what_was_committed_since),
        TEST(lost_counts_only_what_was_released_since_the_place),
        TEST(resume_creates_a_consumer_that_is_not_there),
        TEST(an_abandoned_place_is_not_committed),
        TEST(a_place_newer_than_the_store_is_refused),
        TEST(force_takes_sessions_from_a_consumer),
        TEST(a_take_that_finds_only_released_sessions_goes_on),
        cmocka_unit_test(a_full_store_can_be_taken_and_emptied),
        TEST(damaged_entries_are_errors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
