/* Consumers in trouble: sessions released under their hands, a full store, damaged entries. */
#include "consumer_support.h"

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
    while ((code = seal_one(f.store, f.record, stored + 1, 0, &f.error)) == RST_OK) {
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
    while ((code = seal_one(f.store, f.record, stored + 2 + second, 0, &f.error)) == RST_OK) {
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

/* ---------------------------------------------------------------- verify */

static void keep_fault(void *context, const rst_error *fault)
{
    assert_int_equal(fault->code, RST_ERR_CORRUPT);
    snprintf(context, RST_ERROR_MESSAGE_SIZE, "%s", fault->message);
}

/* Verify finds exactly one fault, whose message has `word` in it. */
static void expect_fault(fixture *f, const char *word)
{
    char message[RST_ERROR_MESSAGE_SIZE] = "";
    rst_verify_options options = {.fault = keep_fault, .context = message};
    rst_verify_result result;
    assert_ok(rst_store_verify(f->store, &options, &result, &f->error), f->error);
    assert_int_equal(result.fault_count, 1);
    if (!strstr(message, word)) {
        fail_msg("wanted \"%s\", found \"%s\"", word, message);
    }
    assert_ok(rst_store_verify(f->store, NULL, &result, NULL), f->error);
    assert_int_equal(result.fault_count, 1);
}

static void edit_consumer(fixture *f, void (*edit)(rst_consumer_entry *))
{
    rst_write write;
    rst_consumer_name of;
    rst_consumer_entry consumer;
    assert_ok(rst_consumer_name_of(NAME, SIZE, &of, &f->error), f->error);
    assert_ok(rst_write_begin(f->store, &write, &f->error), f->error);
    assert_ok(rst_read_consumer(write.txn, f->store->env, &of, &consumer, &f->error), f->error);
    edit(&consumer);
    assert_ok(rst_write_consumer(&write, &of, &consumer, &f->error), f->error);
    assert_ok(rst_write_commit(&write, &f->error), f->error);
}

static void raise_next(rst_consumer_entry *consumer)
{
    consumer->next++;
}

static void lower_next(rst_consumer_entry *consumer)
{
    consumer->next--;
}

static void raise_settled(rst_consumer_entry *consumer)
{
    consumer->settled++;
}

static void lower_settled(rst_consumer_entry *consumer)
{
    consumer->settled--;
}

static void raise_first_open(rst_consumer_entry *consumer)
{
    consumer->first_open++;
}

static void lower_first_open(rst_consumer_entry *consumer)
{
    consumer->first_open--;
}

static void spoil_state(rst_lease_entry *entry)
{
    entry->state = 9;
}

static void verify_finds_consumers_that_do_not_fit(void **state)
{
    fixture *f = *state;
    const struct {
        void (*damage)(rst_consumer_entry *);
        void (*repair)(rst_consumer_entry *);
        const char *word;
    } damages[] = {{raise_next, lower_next, "before 7"},
                   {lower_next, raise_next, "a lease, but neither"},
                   {raise_settled, lower_settled, "a lease, but neither"},
                   {raise_first_open, lower_first_open, "first_open"}};
    seal_range(f, 1, 5);
    create(f, NAME, RST_START_OLDEST);
    rst_lease leases[4];
    take_expecting(f, NAME, 1, 4, leases);
    acknowledge(f, NAME, leases, 1);
    take_expecting(f, NAME, 5, 1, leases);
    assert_ok(rst_consumer_return(f->store, NAME, SIZE, leases, 1, &f->error), f->error);
    take_expecting(f, NAME, 5, 1, leases); /* moves first_open to 2 */
    support_assert_sound(f->store);
    for (size_t i = 0; i < sizeof damages / sizeof *damages; i++) {
        edit_consumer(f, damages[i].damage);
        expect_fault(f, damages[i].word);
        edit_consumer(f, damages[i].repair);
        support_assert_sound(f->store);
    }
    MDB_txn *txn;
    assert_int_equal(mdb_txn_begin(f->store->env->lmdb, NULL, 0, &txn), 0);
    assert_int_equal(mdb_drop(txn, f->store->env->leases, 0), 0);
    assert_int_equal(mdb_txn_commit(txn), 0);
    rst_verify_result result;
    assert_ok(rst_store_verify(f->store, NULL, &result, &f->error), f->error);
    assert_int_equal(result.fault_count, 5); /* five sessions that nobody would get */
    assert_ok(rst_consumer_drop(f->store, NAME, SIZE, &f->error), f->error);
    create(f, NAME, RST_START_OLDEST);
    take_expecting(f, NAME, 1, 4, leases);
    edit_lease(f, NAME, 3, spoil_state);
    rst_verify_options options = {0};
    assert_ok(rst_store_verify(f->store, &options, &result, &f->error), f->error);
    assert_int_equal(result.fault_count, 2); /* it, and what stands behind it cannot be counted */
    assert_int_equal(mdb_txn_begin(f->store->env->lmdb, NULL, 0, &txn), 0);
    assert_int_equal(mdb_drop(txn, f->store->env->consumers, 0), 0);
    assert_int_equal(mdb_txn_commit(txn), 0);
    expect_fault(f, "4 leases are stored, 0 of them");
    assert_int_equal(mdb_txn_begin(f->store->env->lmdb, NULL, 0, &txn), 0);
    assert_int_equal(mdb_drop(txn, f->store->env->leases, 0), 0);
    assert_int_equal(mdb_txn_commit(txn), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(force_takes_sessions_from_a_consumer),
        TEST(a_take_that_finds_only_released_sessions_goes_on),
        cmocka_unit_test(a_full_store_can_be_taken_and_emptied),
        TEST(damaged_entries_are_errors),
        TEST(verify_finds_consumers_that_do_not_fit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
