/* Places: what a checkpoint keeps, committing it, releasing, and going back to it. */
#include "consumer_support.h"

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

static void a_place_can_be_taken_whatever_the_durability(void **state)
{
    fixture *f = *state;
    const rst_durability durabilities[] = {RST_DURABILITY_MEMORY, RST_DURABILITY_INTERVAL,
                                           RST_DURABILITY_FULL};
    for (int i = 0; i < 3; i++) {
        const char *path = support_path(f->folder, "durable");
        rst_create_options options = {.capacity_size = RST_CAPACITY_MIN,
                                      .durability = durabilities[i],
                                      .interval_ms = 3600000};
        rst_store *stores[2];
        assert_ok(rst_store_open(path, RST_OPEN_CREATE, &options, &stores[0], &f->error), f->error);
        assert_ok(rst_store_open(path, RST_OPEN_READ_ONLY, NULL, &stores[1], &f->error), f->error);
        assert_ok(rst_consumer_create(stores[0], NAME, SIZE, RST_START_OLDEST, NULL, &f->error),
                  f->error);
        for (int j = 0; j < 2; j++) { /* a handle that may sync, and one that may not */
            bytes place;
            assert_ok(
                rst_consumer_place(stores[j], NAME, SIZE, &place.data, &place.size, &f->error),
                f->error);
            assert_ok(rst_consumer_commit(stores[0], NAME, SIZE, place.data, place.size, &f->error),
                      f->error);
            free(place.data);
        }
        assert_ok(rst_store_close(stores[1], &f->error), f->error);
        assert_ok(rst_store_close(stores[0], &f->error), f->error);
        support_remove_folder(strdup(path));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(only_what_is_committed_can_be_released),
        TEST(every_consumer_must_have_committed),
        TEST(an_open_session_is_no_consumers_business),
        TEST(a_place_holds_what_is_trained_and_nothing_later),
        TEST(a_settled_session_costs_nothing),
        TEST(a_place_belongs_to_its_consumer_and_store),
        TEST(a_place_can_be_taken_whatever_the_durability),
        TEST(a_damaged_place_is_refused),
        TEST(a_made_up_place_is_refused),
        TEST(resume_gives_again_what_the_checkpoint_has_not),
        TEST(resume_goes_behind_what_was_committed_since),
        TEST(lost_counts_only_what_was_released_since_the_place),
        TEST(resume_creates_a_consumer_that_is_not_there),
        TEST(an_abandoned_place_is_not_committed),
        TEST(a_place_newer_than_the_store_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
