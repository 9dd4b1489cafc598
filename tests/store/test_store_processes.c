/* Several processes at once: writing, reading, dying, forking. */
#include <linux/futex.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "store/durability/guard.h"
#include "store/internal.h"
#include "support.h"

enum { WRITERS = 8, READERS = 3, SESSIONS = 12, TURNS = 5 };

static const char *new_store(char **folder, uint64_t capacity, uint32_t readers)
{
    *folder = support_make_folder();
    const char *path = support_path(*folder, "store");
    rst_create_options options = {.capacity_size = capacity, .reader_count = readers};
    rst_store *store;
    rst_error error;
    assert_ok(rst_store_open(path, RST_OPEN_CREATE, &options, &store, &error), error);
    assert_ok(rst_store_close(store, &error), error);
    return path;
}

static rst_store *open_or_exit(const char *path, unsigned flags)
{
    const rst_create_options options = {.capacity_size = 4 << 20};
    rst_store *store;
    rst_error error;
    if (rst_store_open(path, flags, &options, &store, &error) != RST_OK) {
        fprintf(stderr, "open: %s\n", error.message);
        _exit(100);
    }
    return store;
}

static void check_or_exit(int code, const rst_error *error)
{
    if (code) {
        fprintf(stderr, "%s: %s\n", rst_code_name(code), error->message);
        _exit(101);
    }
}

static void wait_for(pid_t child)
{
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

static void write_sessions(const char *path, int writer)
{
    rst_store *store = open_or_exit(path, 0);
    rst_record *record = rst_record_new();
    rst_error error;
    for (int s = 0; s < SESSIONS; s++) {
        char id[32];
        int size = snprintf(id, sizeof id, "w%d/%d", writer, s);
        for (uint32_t turn = 0; turn < TURNS; turn++) {
            support_fill(record, 20 + turn, 8, (uint64_t)(writer * 1000 + s * 10) + turn, NULL, 0,
                         "1");
            check_or_exit(rst_put(store, id, (size_t)size, turn, record, 0, 10000, &error), &error);
        }
        rst_outcome outcome = {RST_STATUS_COMPLETED, 1.0, s, writer};
        check_or_exit(rst_seal(store, id, (size_t)size, &outcome, 0, &error), &error);
    }
    rst_record_free(record);
    check_or_exit(rst_store_close(store, &error), &error);
}

/* Follows the ready order; every session met must be whole. */
static void read_sessions(const char *path)
{
    rst_store *store = open_or_exit(path, RST_OPEN_READ_ONLY);
    rst_error error;
    uint64_t sequence = 0;
    int met = 0;
    while (met < WRITERS * SESSIONS) {
        check_or_exit(rst_ready_wait(store, sequence, 60000, NULL, &error), &error);
        rst_snapshot *now;
        check_or_exit(rst_snapshot_open(store, &now, &error), &error);
        rst_session session;
        while (rst_ready_next(now, sequence, &session, &error) == RST_OK) {
            if (session.sequence != sequence + 1 || session.turn_count != TURNS) {
                fprintf(stderr, "session %llu after %llu, %u turns\n",
                        (unsigned long long)session.sequence, (unsigned long long)sequence,
                        session.turn_count);
                _exit(102);
            }
            for (uint32_t turn = 0; turn < TURNS; turn++) {
                const void *value;
                size_t size;
                check_or_exit(rst_turn_value(now, session.key, turn, &value, &size, &error),
                              &error);
                check_or_exit(rst_record_check(value, size, session.key, turn, &error), &error);
            }
            sequence = session.sequence;
            met++;
        }
        rst_snapshot_close(now);
    }
    check_or_exit(rst_store_close(store, &error), &error);
}

static void eight_write_while_three_read(void **state)
{
    (void)state;
    char *folder;
    const char *path = new_store(&folder, 32 << 20, 0);
    pid_t children[WRITERS + READERS];
    for (int i = 0; i < WRITERS + READERS; i++) {
        children[i] = fork();
        if (children[i] == 0) {
            if (i < WRITERS) {
                write_sessions(path, i);
            } else {
                read_sessions(path);
            }
            _exit(0);
        }
    }
    for (int i = 0; i < WRITERS + READERS; i++) {
        wait_for(children[i]);
    }
    rst_store *store = open_or_exit(path, 0);
    support_assert_sound(store);
    rst_stat stat;
    rst_error error;
    assert_ok(rst_store_stat(store, &stat, &error), error);
    assert_int_equal(stat.totals.sealed_count, WRITERS * SESSIONS);
    assert_int_equal(stat.totals.turn_count, WRITERS * SESSIONS * TURNS);
    assert_ok(rst_store_close(store, &error), error);
    support_remove_folder(folder);
}

/* What a writer had been told is stored stands in memory that outlives it. */
typedef struct acknowledged {
    volatile uint32_t turns;
} acknowledged;

static void write_until_killed(const char *path, int writer, acknowledged *told)
{
    rst_store *store = open_or_exit(path, 0);
    rst_record *record = rst_record_new();
    rst_error error;
    char id[32];
    int size = snprintf(id, sizeof id, "writer-%d", writer);
    for (uint32_t turn = told->turns;; turn++) {
        support_fill(record, 50 + turn % 500, 16, turn, NULL, 0, "1");
        check_or_exit(rst_put(store, id, (size_t)size, turn, record, 0, 10000, &error), &error);
        told->turns = turn + 1;
    }
}

static void a_killed_writer_loses_no_acknowledged_turn(void **state)
{
    (void)state;
    char *folder;
    const char *path = new_store(&folder, 256 << 20, 0);
    acknowledged *told =
        mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(told, MAP_FAILED);
    uint64_t seed = (uint64_t)getpid();
    for (int round = 0; round < 40; round++) {
        pid_t children[2];
        for (int i = 0; i < 2; i++) {
            children[i] = fork();
            if (children[i] == 0) {
                /* A turn may have been committed just before its writer could note it. */
                rst_store *store = open_or_exit(path, 0);
                rst_snapshot *now;
                rst_session s;
                rst_error error;
                char id[32];
                int size = snprintf(id, sizeof id, "writer-%d", i);
                check_or_exit(rst_snapshot_open(store, &now, &error), &error);
                if (rst_session_get(now, id, (size_t)size, &s, &error) == RST_OK) {
                    if (s.turn_count != told[i].turns && s.turn_count != told[i].turns + 1) {
                        fprintf(stderr, "%u turns, %u acknowledged\n", s.turn_count, told[i].turns);
                        _exit(103);
                    }
                    told[i].turns = s.turn_count;
                }
                rst_snapshot_close(now);
                check_or_exit(rst_store_close(store, &error), &error);
                write_until_killed(path, i, &told[i]);
            }
        }
        struct timespec pause = {.tv_nsec = (long)(support_random(&seed) % 30000000)};
        nanosleep(&pause, NULL);
        for (int i = 0; i < 2; i++) {
            kill(children[i], SIGKILL);
            int status;
            waitpid(children[i], &status, 0);
            assert_true(WIFSIGNALED(status));
            assert_int_equal(WTERMSIG(status), SIGKILL);
        }
    }
    rst_store *store = open_or_exit(path, 0);
    support_assert_sound(store);
    rst_snapshot *now;
    rst_error error;
    assert_ok(rst_snapshot_open(store, &now, &error), error);
    for (int i = 0; i < 2; i++) {
        char id[32];
        int size = snprintf(id, sizeof id, "writer-%d", i);
        rst_session s;
        assert_ok(rst_session_get(now, id, (size_t)size, &s, &error), error);
        assert_in_range(s.turn_count, told[i].turns, told[i].turns + 1);
        assert_true(s.turn_count > 0);
    }
    rst_snapshot_close(now);
    assert_ok(rst_store_close(store, &error), error);
    munmap(told, 4096);
    support_remove_folder(folder);
}

/* Hold one of the locks until somebody sleeps on it, tell, and leave it free without a word: as it
 * is when the one who was woken has been killed, and a third one had the lock meanwhile. */
static void leave_a_sleeper(const char *path, bool readers, int told)
{
    rst_store *store = open_or_exit(path, 0);
    rst_guard *guard = store->env->guard;
    pthread_mutex_t *mutex = readers ? &guard->shared->slots : &guard->shared->writing;
    int result = readers ? rst_guard_lock_slots(guard) : rst_guard_lock_writing(guard);
    if (result != 0 || write(told, "", 1) != 1) {
        _exit(1);
    }
    int *word = &mutex->__data.__lock;
    while (!((unsigned)__atomic_load_n(word, __ATOMIC_ACQUIRE) & FUTEX_WAITERS)) {
        usleep(1000);
    }
    usleep(5000); /* it is about to sleep */
    if (write(told, "", 1) != 1) {
        _exit(1);
    }
    __atomic_store_n(word, 0, __ATOMIC_RELEASE);
    pause();
}

static void put_and_look(const char *path)
{
    rst_store *store = open_or_exit(path, 0);
    rst_record *record = rst_record_new();
    rst_snapshot *now;
    rst_error error;
    support_fill(record, 3, 2, 1, NULL, 0, NULL);
    check_or_exit(rst_put(store, "a", 1, 0, record, 0, 0, &error), &error);
    check_or_exit(rst_snapshot_open(store, &now, &error), &error);
    rst_snapshot_close(now);
    _exit(0);
}

/* 0, or -1 when the child still runs after half a minute, and is killed. */
static int end_of(pid_t child, int *status)
{
    for (int i = 0; i < 30000; i++) {
        if (waitpid(child, status, WNOHANG) == child) {
            return 0;
        }
        usleep(1000);
    }
    kill(child, SIGKILL);
    waitpid(child, status, 0);
    return -1;
}

static void make_up_for_a_lost_wake_up(bool readers)
{
    char *folder;
    const char *path = new_store(&folder, 8 << 20, 0);
    int told[2];
    char bytes[2];
    assert_int_equal(pipe(told), 0);
    pid_t holder = fork();
    if (holder == 0) {
        leave_a_sleeper(path, readers, told[1]);
        _exit(1);
    }
    assert_int_equal(read(told[0], bytes, 1), 1);
    pid_t sleeper = fork();
    if (sleeper == 0) {
        put_and_look(path);
    }
    int status;
    int ended = end_of(sleeper, &status);
    kill(holder, SIGKILL);
    waitpid(holder, NULL, 0);
    close(told[1]);
    if (ended != 0) {
        fail_msg("it sleeps on a lock that is free");
    }
    assert_int_equal(status, 0);
    assert_int_equal(read(told[0], bytes, 2), 1); /* it did sleep */
    close(told[0]);
    support_remove_folder(folder);
}

static void a_wake_up_that_got_lost_is_made_up_for(void **state)
{
    (void)state;
    make_up_for_a_lost_wake_up(false);
}

static void a_readers_wake_up_that_got_lost_is_made_up_for(void **state)
{
    (void)state;
    make_up_for_a_lost_wake_up(true);
}

static void a_handle_does_not_survive_fork_but_a_new_one_works(void **state)
{
    (void)state;
    char *folder;
    const char *path = new_store(&folder, 8 << 20, 0);
    rst_store *store = open_or_exit(path, 0);
    rst_snapshot *snapshot;
    rst_error error;
    assert_ok(rst_snapshot_open(store, &snapshot, &error), error);
    pid_t child = fork();
    if (child == 0) {
        rst_snapshot *none;
        rst_session s;
        rst_error e;
        rst_record *record = rst_record_new();
        support_fill(record, 3, 2, 1, NULL, 0, NULL);
        int wrong = rst_snapshot_open(store, &none, &e) != RST_ERR_FORKED ||
                    rst_session_get(snapshot, "a", 1, &s, &e) != RST_ERR_FORKED ||
                    rst_put(store, "a", 1, 0, record, 0, 0, &e) != RST_ERR_FORKED;
        rst_snapshot_close(snapshot);
        wrong |= rst_store_close(store, &e) != RST_OK;
        rst_store *own = open_or_exit(path, 0);
        wrong |= rst_put(own, "a", 1, 0, record, 0, 0, &e) != RST_OK;
        wrong |= rst_store_close(own, &e) != RST_OK;
        rst_record_free(record);
        _exit(wrong);
    }
    wait_for(child);
    rst_stat stat;
    assert_ok(rst_store_stat(store, &stat, &error), error);
    assert_int_equal(stat.reader_pid, getpid()); /* the child did not take it away */
    rst_session s;
    assert_code(RST_ERR_NOT_FOUND, rst_session_get(snapshot, "a", 1, &s, &error), error);
    rst_snapshot_close(snapshot);
    support_assert_sound(store);
    assert_ok(rst_store_close(store, &error), error);
    support_remove_folder(folder);
}

/* It has the store's files open as long as it lives, and their locks with them. */
static void a_child_from_before_keeps_nothing_locked(void **state)
{
    (void)state;
    char *folder;
    const char *path = new_store(&folder, 8 << 20, 0);
    rst_store *store = open_or_exit(path, 0);
    pid_t bystander = fork();
    if (bystander == 0) {
        pause();
        _exit(0);
    }
    rst_error error;
    assert_ok(rst_store_close(store, &error), error);
    pid_t child = fork();
    if (child == 0) {
        alarm(30);
        store = open_or_exit(path, 0);
        _exit(rst_store_close(store, &error));
    }
    wait_for(child);
    kill(bystander, SIGKILL);
    waitpid(bystander, NULL, 0);
    support_remove_folder(folder);
}

/* A reader that is killed with a snapshot open. */
static void kill_a_reader(const char *path)
{
    pid_t child = fork();
    if (child == 0) {
        rst_store *store = open_or_exit(path, RST_OPEN_READ_ONLY);
        rst_snapshot *snapshot;
        rst_error error;
        check_or_exit(rst_snapshot_open(store, &snapshot, &error), &error);
        raise(SIGKILL);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status));
}

static void dead_readers_make_room_and_living_ones_are_told(void **state)
{
    (void)state;
    char *folder;
    const char *path = new_store(&folder, 8 << 20, 4);
    for (int i = 0; i < 10; i++) {
        kill_a_reader(path);
    }
    rst_store *store = open_or_exit(path, 0);
    rst_snapshot *snapshots[5];
    rst_error error;
    for (int i = 0; i < 4; i++) {
        assert_ok(rst_snapshot_open(store, &snapshots[i], &error), error);
    }
    assert_code(RST_ERR_READERS, rst_snapshot_open(store, &snapshots[4], &error), error);
    assert_non_null(strstr(error.message, "--readers"));
    for (int i = 0; i < 4; i++) {
        rst_snapshot_close(snapshots[i]);
    }
    assert_ok(rst_store_close(store, &error), error);
    support_remove_folder(folder);
}

/* Every slot is a dead reader's, and nobody opens the store anew meanwhile. */
static void a_store_that_is_open_clears_dead_readers_slots(void **state)
{
    (void)state;
    char *folder;
    const char *path = new_store(&folder, 8 << 20, 4);
    rst_store *store = open_or_exit(path, 0);
    rst_error error;
    for (int i = 0; i < 4; i++) {
        kill_a_reader(path);
    }
    rst_snapshot *snapshots[4];
    for (int i = 0; i < 4; i++) {
        assert_ok(rst_snapshot_open(store, &snapshots[i], &error), error);
    }
    for (int i = 0; i < 4; i++) {
        rst_snapshot_close(snapshots[i]);
    }
    assert_ok(rst_store_close(store, &error), error);
    support_remove_folder(folder);
}

/* Put turns of a session until the store is full; returns their number. */
static uint32_t fill_store(rst_store *store, rst_record *record, const char *id, int64_t timeout_ms,
                           uint32_t most)
{
    rst_error error;
    uint32_t turn = 0;
    int code = RST_OK;
    while (turn < most && code == RST_OK) {
        code = rst_put(store, id, 1, turn, record, 0, timeout_ms, &error);
        turn += code == RST_OK;
    }
    if (code) {
        assert_code(RST_ERR_FULL, code, error);
    }
    return turn;
}

static void what_a_dead_reader_held_is_used_again(void **state)
{
    (void)state;
    char *folder;
    const char *path = new_store(&folder, 2 << 20, 0);
    rst_store *store = open_or_exit(path, 0);
    rst_record *record = rst_record_new();
    rst_error error;
    support_fill(record, 300, 8, 1, NULL, 0, "1");
    uint32_t turns = fill_store(store, record, "a", 0, UINT32_MAX);
    assert_true(turns > 50);
    kill_a_reader(path);
    assert_ok(rst_release(store, "a", 1, 0, &error), error);
    /* Not all: the trees' own pages come to lie between. */
    assert_int_equal(fill_store(store, record, "b", 3000, turns / 2), turns / 2);
    support_assert_sound(store);
    rst_record_free(record);
    assert_ok(rst_store_close(store, &error), error);
    support_remove_folder(folder);
}

/* A trainer that writes where it should read must not change the store: its map of the data is not
 * writable. */
static void a_reader_cannot_write_through_its_map(void **state)
{
    (void)state;
    char *folder;
    const char *path = new_store(&folder, 8 << 20, 0);
    rst_store *store = open_or_exit(path, RST_OPEN_READ_ONLY);
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[1024];
    unsigned found = 0;
    while (fgets(line, sizeof line, maps)) {
        if (strstr(line, "/data.mdb")) {
            assert_non_null(strstr(line, " r--s "));
            found++;
        }
    }
    fclose(maps);
    assert_true(found > 0);
    rst_error error;
    assert_ok(rst_store_close(store, &error), error);
    support_remove_folder(folder);
}

static void a_waiting_reader_is_woken_or_times_out(void **state)
{
    (void)state;
    char *folder;
    const char *path = new_store(&folder, 8 << 20, 0);
    rst_store *store = open_or_exit(path, 0);
    rst_error error;
    uint64_t newest = 99;
    assert_code(RST_ERR_TIMEOUT, rst_ready_wait(store, 0, 0, &newest, &error), error);
    assert_int_equal(newest, 0);
    assert_code(RST_ERR_TIMEOUT, rst_ready_wait(store, 0, 30, NULL, &error), error);
    pid_t child = fork();
    if (child == 0) {
        rst_store *own = open_or_exit(path, 0);
        rst_record *record = rst_record_new();
        rst_outcome outcome = {RST_STATUS_FAILED, 0, 0, 0};
        rst_error e;
        usleep(50000);
        support_fill(record, 1, 1, 1, NULL, 0, NULL);
        check_or_exit(rst_put(own, "a", 1, 0, record, 0, 0, &e), &e);
        check_or_exit(rst_seal(own, "a", 1, &outcome, 0, &e), &e);
        _exit(0);
    }
    assert_ok(rst_ready_wait(store, 0, RST_FOREVER, &newest, &error), error);
    assert_int_equal(newest, 1);
    wait_for(child);
    assert_ok(rst_store_close(store, &error), error);
    support_remove_folder(folder);
}

static void six_processes_may_create_at_once(void **state)
{
    (void)state;
    char *folder = support_make_folder();
    const char *path = support_path(folder, "store");
    for (int round = 0; round < 20; round++) {
        pid_t children[6];
        for (int i = 0; i < 6; i++) {
            children[i] = fork();
            if (children[i] == 0) {
                rst_store *store = open_or_exit(path, RST_OPEN_CREATE);
                rst_record *record = rst_record_new();
                rst_error error;
                char id = (char)('a' + i);
                support_fill(record, 3, 2, (uint64_t)i, NULL, 0, NULL);
                check_or_exit(rst_put(store, &id, 1, 0, record, 0, 1000, &error), &error);
                _exit(0);
            }
        }
        for (int i = 0; i < 6; i++) {
            wait_for(children[i]);
        }
        rst_store *store = open_or_exit(path, 0);
        rst_stat stat;
        rst_error error;
        assert_ok(rst_store_stat(store, &stat, &error), error);
        assert_int_equal(stat.session_count, 6);
        assert_ok(rst_store_close(store, &error), error);
        char command[600];
        snprintf(command, sizeof command, "ls -d '%s'.new-* 2>/dev/null", path);
        assert_int_not_equal(system(command), 0); /* nothing half made is left */
        snprintf(command, sizeof command, "rm -r '%s'", path);
        assert_int_equal(system(command), 0);
    }
    support_remove_folder(folder);
}

/* The last one to close takes the lock file's locks with it, while another one is opening. */
static void opening_and_closing_do_not_disturb_each_other(void **state)
{
    (void)state;
    char *folder;
    const char *path = new_store(&folder, 4 << 20, 0);
    pid_t children[4];
    for (int i = 0; i < 4; i++) {
        children[i] = fork();
        if (children[i] == 0) {
            for (int round = 0; round < 150; round++) {
                rst_store *store = open_or_exit(path, i % 2 ? RST_OPEN_READ_ONLY : 0);
                rst_snapshot *snapshot;
                rst_error error;
                check_or_exit(rst_snapshot_open(store, &snapshot, &error), &error);
                rst_snapshot_close(snapshot);
                check_or_exit(rst_store_close(store, &error), &error);
            }
            _exit(0);
        }
    }
    for (int i = 0; i < 4; i++) {
        wait_for(children[i]);
    }
    support_remove_folder(folder);
}

static void every_durability_keeps_what_was_written(void **state)
{
    (void)state;
    char *folder = support_make_folder();
    for (int d = RST_DURABILITY_MEMORY; d <= RST_DURABILITY_FULL; d++) {
        char name[16];
        snprintf(name, sizeof name, "d%d", d);
        const char *path = support_path(folder, name);
        rst_create_options options = {
            .capacity_size = 4 << 20, .durability = (rst_durability)d, .interval_ms = 5};
        rst_store *store;
        rst_error error;
        rst_record *record = rst_record_new();
        assert_ok(rst_store_open(path, RST_OPEN_CREATE, &options, &store, &error), error);
        for (uint32_t turn = 0; turn < 20; turn++) {
            support_fill(record, 10, 4, turn, NULL, 0, NULL);
            assert_ok(rst_put(store, "a", 1, turn, record, 0, 0, &error), error);
            usleep(1000);
        }
        assert_ok(rst_store_sync(store, &error), error);
        assert_ok(rst_store_close(store, &error), error);
        store = open_or_exit(path, 0);
        rst_stat stat;
        assert_ok(rst_store_stat(store, &stat, &error), error);
        assert_int_equal(stat.format.durability, d);
        assert_int_equal(stat.totals.turn_count, 20);
        support_assert_sound(store);
        assert_ok(rst_store_close(store, &error), error);
        rst_record_free(record);
    }
    support_remove_folder(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(eight_write_while_three_read),
        cmocka_unit_test(a_killed_writer_loses_no_acknowledged_turn),
        cmocka_unit_test(a_wake_up_that_got_lost_is_made_up_for),
        cmocka_unit_test(a_readers_wake_up_that_got_lost_is_made_up_for),
        cmocka_unit_test(a_handle_does_not_survive_fork_but_a_new_one_works),
        cmocka_unit_test(a_child_from_before_keeps_nothing_locked),
        cmocka_unit_test(dead_readers_make_room_and_living_ones_are_told),
        cmocka_unit_test(a_store_that_is_open_clears_dead_readers_slots),
        cmocka_unit_test(what_a_dead_reader_held_is_used_again),
        cmocka_unit_test(a_reader_cannot_write_through_its_map),
        cmocka_unit_test(a_waiting_reader_is_woken_or_times_out),
        cmocka_unit_test(six_processes_may_create_at_once),
        cmocka_unit_test(opening_and_closing_do_not_disturb_each_other),
        cmocka_unit_test(every_durability_keeps_what_was_written),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
