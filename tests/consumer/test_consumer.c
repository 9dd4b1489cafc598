/* Consumers, as one process sees them: creating, taking, and what is said of a lease. */
#include "consumer_support.h"

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
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
