/* What the consumers' tests share: a store, sessions to take, and processes that can be trusted to
 * end.  Everything is static inline, so that a test may use a part of it. */
#ifndef RST_TESTS_CONSUMER_SUPPORT_H
#define RST_TESTS_CONSUMER_SUPPORT_H

#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "support.h"

#include "store/consumer/consumer.h"

#define NAME "trainer"
#define SIZE (sizeof NAME - 1)

/* No wait of these tests is longer; reaching it is a failure. */
#define PATIENCE_MS 60000

typedef struct fixture {
    char *folder;
    const char *path;
    rst_store *store;
    rst_record *record;
    rst_error error;
} fixture;

static inline void fixture_open(fixture *f, uint64_t capacity_size)
{
    f->folder = support_make_folder();
    f->path = strdup(support_path(f->folder, "store"));
    rst_create_options options = {.capacity_size = capacity_size};
    assert_ok(rst_store_open(f->path, RST_OPEN_CREATE, &options, &f->store, &f->error), f->error);
    f->record = rst_record_new();
    assert_non_null(f->record);
    support_fill(f->record, 1, 1, 1, NULL, 0, NULL);
}

static inline void fixture_close(fixture *f)
{
    support_assert_sound(f->store);
    assert_ok(rst_store_close(f->store, &f->error), f->error);
    rst_record_free(f->record);
    free((void *)(uintptr_t)f->path);
    support_remove_folder(f->folder);
}

static inline const char *session_name(uint64_t number)
{
    static char names[4][32];
    static unsigned next;
    char *name = names[next++ % 4];
    snprintf(name, sizeof names[0], "session-%06llu", (unsigned long long)number);
    return name;
}

/* Store and seal a session: its sequence number is `number` when the numbers count from 1.  For
 * children too: it asserts nothing.  timeout_ms: an open snapshot may keep space for a while. */
static inline int seal_one(rst_store *store, rst_record *record, uint64_t number,
                           int64_t timeout_ms, rst_error *error)
{
    const char *name = session_name(number);
    rst_outcome outcome = {.status = RST_STATUS_COMPLETED,
                           .reward = 1.0,
                           .group_index = RST_NO_INDEX,
                           .index = RST_NO_INDEX};
    int code = rst_put(store, name, strlen(name), 0, record, 0, timeout_ms, error);
    return code ? code : rst_seal(store, name, strlen(name), &outcome, 0, error);
}

static inline void seal_range(fixture *f, uint64_t from, uint64_t to)
{
    for (uint64_t i = from; i <= to; i++) {
        assert_ok(seal_one(f->store, f->record, i, PATIENCE_MS, &f->error), f->error);
    }
}

static inline int release_one_session(fixture *f, uint64_t number, unsigned flags)
{
    const char *name = session_name(number);
    return rst_release(f->store, name, strlen(name), flags, &f->error);
}

static inline rst_consumer look_at(rst_store *store, const char *name)
{
    rst_error error;
    rst_snapshot *snapshot;
    rst_consumer consumer;
    assert_ok(rst_snapshot_open(store, &snapshot, &error), error);
    assert_ok(rst_consumer_get(snapshot, name, strlen(name), &consumer, &error), error);
    assert_int_equal(consumer.name_size, strlen(name));
    assert_memory_equal(consumer.name, name, consumer.name_size);
    rst_snapshot_close(snapshot);
    consumer.name = NULL;
    return consumer;
}

static inline void sleep_ms(long ms)
{
    struct timespec pause = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
    while (nanosleep(&pause, &pause) != 0) {
    }
}

/* Run body in a child, which is killed when it takes too long.  Children assert nothing: they
 * return what went wrong as an exit status. */
static inline pid_t start_child(int (*body)(void *), void *context)
{
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        alarm(PATIENCE_MS / 1000);
        _exit(body(context));
    }
    return pid;
}

static inline void expect_child(pid_t pid)
{
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
        fail_msg("child: %s %d", WIFEXITED(status) ? "exit status" : "signal",
                 WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status));
    }
}

/* Memory that children write and the parent reads. */
static inline void *shared_memory(size_t size)
{
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(memory != MAP_FAILED);
    return memory;
}

/* Bytes through a pipe, all or failure. */
static inline bool read_all(int fd, void *out, size_t size)
{
    char *at = out;
    while (size > 0) {
        ssize_t got = read(fd, at, size);
        if (got <= 0) {
            return false;
        }
        at += got;
        size -= (size_t)got;
    }
    return true;
}

/* ---------------------------------------------------------------- what one call does, asserted */

static inline int consumer_setup(void **state)
{
    fixture *f = calloc(1, sizeof *f);
    /* Roomy: a thread that is kept waiting with a snapshot open pins the pages of every commit
     * since. */
    fixture_open(f, UINT64_C(64) << 20);
    *state = f;
    return 0;
}

static inline int consumer_teardown(void **state)
{
    fixture_close(*state);
    free(*state);
    return 0;
}

static inline void create(fixture *f, const char *name, rst_consumer_start start)
{
    int created;
    assert_ok(rst_consumer_create(f->store, name, strlen(name), start, &created, &f->error),
              f->error);
    assert_int_equal(created, 1);
}

/* Take exactly what the caller expects: `count` sessions from sequence number `first` on. */
static inline void take_expecting(fixture *f, const char *name, uint64_t first, size_t count,
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

static inline void take_nothing(fixture *f, const char *name)
{
    rst_lease lease;
    size_t got = 7;
    assert_code(RST_ERR_TIMEOUT,
                rst_consumer_take(f->store, name, strlen(name), 1, 0, 0, &lease, &got, &f->error),
                f->error);
    assert_int_equal(got, 0);
}

static inline void acknowledge(fixture *f, const char *name, const rst_lease *leases, size_t count)
{
    assert_ok(rst_consumer_acknowledge(f->store, name, strlen(name), leases, count, &f->error),
              f->error);
}

typedef struct bytes {
    void *data;
    size_t size;
} bytes;

static inline bytes place_of(fixture *f, const char *name)
{
    bytes place;
    assert_ok(rst_consumer_place(f->store, name, strlen(name), &place.data, &place.size, &f->error),
              f->error);
    assert_non_null(place.data);
    return place;
}

static inline void commit(fixture *f, const char *name, bytes place)
{
    assert_ok(rst_consumer_commit(f->store, name, strlen(name), place.data, place.size, &f->error),
              f->error);
}

static inline uint64_t resume(fixture *f, const char *name, bytes place)
{
    uint64_t lost = 99;
    assert_ok(
        rst_consumer_resume(f->store, name, strlen(name), place.data, place.size, &lost, &f->error),
        f->error);
    return lost;
}

/* Acknowledge and commit everything that is leased here. */
static inline void settle(fixture *f, const char *name, const rst_lease *leases, size_t count)
{
    acknowledge(f, name, leases, count);
    bytes place = place_of(f, name);
    commit(f, name, place);
    free(place.data);
}

static inline size_t lease_entries(fixture *f)
{
    rst_snapshot *snapshot;
    MDB_stat stat;
    assert_ok(rst_snapshot_open(f->store, &snapshot, &f->error), f->error);
    assert_int_equal(mdb_stat(snapshot->txn, f->store->env->leases, &stat), 0);
    rst_snapshot_close(snapshot);
    return stat.ms_entries;
}

/* Change one lease entry as no function does. */
static inline void edit_lease(fixture *f, const char *name, uint64_t sequence,
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

static inline uint64_t last_transaction(fixture *f)
{
    rst_stat stat;
    assert_ok(rst_store_stat(f->store, &stat, &f->error), f->error);
    return stat.last_transaction;
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, consumer_setup, consumer_teardown)

#endif
