/* Consumers whose processes wait, fork and die. */
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>

#include "consumer_support.h"

static int setup(void **state)
{
    consumer_setup(state);
    create(*state, NAME, RST_START_OLDEST);
    return 0;
}

#define TRAINER_TEST(name) cmocka_unit_test_setup_teardown(name, setup, consumer_teardown)

typedef struct job {
    const char *path;
    const char *name;
    size_t max;
    int64_t lease_ms;
    rst_lease *leases; /* shared memory */
    atomic_size_t *got;
    bool wait; /* until killed */
} job;

/* Take once, and keep what was taken. */
static int take_once(void *context)
{
    job *j = context;
    rst_store *store;
    rst_error error;
    size_t got;
    if (rst_store_open(j->path, 0, NULL, &store, &error) ||
        rst_consumer_take(store, j->name, strlen(j->name), j->max, j->lease_ms, PATIENCE_MS,
                          j->leases, &got, &error)) {
        return 1;
    }
    atomic_store(j->got, got);
    while (j->wait) {
        pause();
    }
    return rst_store_close(store, &error) ? 2 : 0;
}

static job make_job(fixture *f, size_t max, int64_t lease_ms, bool wait)
{
    char *memory = shared_memory(4096);
    return (job){.path = f->path,
                 .name = NAME,
                 .max = max,
                 .lease_ms = lease_ms,
                 .got = (atomic_size_t *)(void *)memory,
                 .leases = (rst_lease *)(void *)(memory + 64),
                 .wait = wait};
}

static void end_job(job *j)
{
    munmap((void *)j->got, 4096);
}

static void await_leases(const job *j, size_t count)
{
    for (int i = 0; i < PATIENCE_MS && atomic_load(j->got) == 0; i++) {
        sleep_ms(1);
    }
    assert_int_equal(atomic_load(j->got), count);
}

static void kill_child(pid_t pid)
{
    int status;
    assert_int_equal(kill(pid, SIGKILL), 0);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

/* A take in this process that must come at once to exactly the sequence number. */
static void take_now(fixture *f, uint64_t sequence, rst_lease *lease)
{
    size_t got;
    assert_ok(rst_consumer_take(f->store, NAME, SIZE, 1, 0, 0, lease, &got, &f->error), f->error);
    assert_int_equal(got, 1);
    assert_int_equal(lease->sequence, sequence);
}

/* ---------------------------------------------------------------- death */

static void what_a_killed_process_held_is_given_again_at_once(void **state)
{
    fixture *f = *state;
    seal_range(f, 1, 3);
    job j = make_job(f, 2, 0, true);
    pid_t pid = start_child(take_once, &j);
    await_leases(&j, 2);
    rst_lease mine;
    take_now(f, 3, &mine);
    size_t got;
    assert_code(RST_ERR_TIMEOUT,
                rst_consumer_take(f->store, NAME, SIZE, 1, 0, 0, &mine, &got, &f->error), f->error);
    kill_child(pid);
    take_now(f, 1, &mine);
    assert_int_equal(mine.given_count, 2);
    /* Somebody may speak for the dead, as long as nobody else has the session. */
    assert_code(RST_ERR_LEASE,
                rst_consumer_acknowledge(f->store, NAME, SIZE, j.leases, 1, &f->error), f->error);
    assert_ok(rst_consumer_acknowledge(f->store, NAME, SIZE, j.leases + 1, 1, &f->error), f->error);
    end_job(&j);
}

static void a_zombie_is_dead(void **state)
{
    fixture *f = *state;
    seal_range(f, 1, 1);
    job j = make_job(f, 1, 0, true);
    pid_t pid = start_child(take_once, &j);
    await_leases(&j, 1);
    siginfo_t info;
    assert_int_equal(kill(pid, SIGKILL), 0);
    assert_int_equal(waitid(P_PID, (id_t)pid, &info, WEXITED | WNOWAIT), 0);
    rst_lease mine;
    take_now(f, 1, &mine);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    end_job(&j);
}

static void *go_on_without_the_first_thread(void *context)
{
    job *j = context;
    _exit(take_once(j));
}

/* The first thread ends; the process goes on, and /proc shows it as a zombie. */
static int take_in_a_thread(void *context)
{
    static job kept; /* what is on the first thread's stack ends with it */
    pthread_t thread;
    kept = *(const job *)context;
    if (pthread_create(&thread, NULL, go_on_without_the_first_thread, &kept)) {
        return 3;
    }
    pthread_exit(NULL);
}

static void a_process_lives_as_long_as_any_of_its_threads(void **state)
{
    fixture *f = *state;
    seal_range(f, 1, 1);
    job j = make_job(f, 1, 0, true);
    pid_t pid = start_child(take_in_a_thread, &j);
    await_leases(&j, 1);
    char path[64];
    char text[512] = "";
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    for (int i = 0; i < PATIENCE_MS && !strstr(text, ") Z "); i++) {
        int fd = open(path, O_RDONLY);
        assert_true(fd >= 0 && read(fd, text, sizeof text - 1) > 0);
        close(fd);
        sleep_ms(1);
    }
    assert_non_null(strstr(text, ") Z "));
    rst_lease mine;
    size_t got;
    assert_code(RST_ERR_TIMEOUT,
                rst_consumer_take(f->store, NAME, SIZE, 1, 0, 0, &mine, &got, &f->error), f->error);
    kill_child(pid);
    take_now(f, 1, &mine);
    end_job(&j);
}

static void a_waiting_process_learns_of_a_death(void **state)
{
    fixture *f = *state;
    seal_range(f, 1, 1);
    job first = make_job(f, 1, 0, true);
    pid_t holder = start_child(take_once, &first);
    await_leases(&first, 1);
    job second = make_job(f, 1, 0, false);
    pid_t waiting = start_child(take_once, &second);
    sleep_ms(20); /* most likely it waits by now; if not, it finds what it would have waited for */
    kill_child(holder);
    expect_child(waiting);
    assert_int_equal(second.leases[0].sequence, 1);
    assert_int_equal(second.leases[0].given_count, 2);
    end_job(&first);
    end_job(&second);
}

static void leases_are_kept_by_whoever_renews_them(void **state)
{
    fixture *f = *state;
    seal_range(f, 1, 2);
    job j = make_job(f, 2, 0, false);
    expect_child(start_child(take_once, &j));
    assert_int_equal(atomic_load(j.got), 2);
    assert_ok(rst_consumer_renew(f->store, NAME, SIZE, j.leases, 1, 0, &f->error), f->error);
    rst_lease mine;
    take_now(f, 2, &mine);
    size_t got;
    assert_code(RST_ERR_TIMEOUT,
                rst_consumer_take(f->store, NAME, SIZE, 1, 0, 0, &mine, &got, &f->error), f->error);
    assert_ok(rst_consumer_acknowledge(f->store, NAME, SIZE, j.leases, 1, &f->error), f->error);
    end_job(&j);
}

/* ---------------------------------------------------------------- waiting */

static int seal_later(void *context)
{
    const char *path = context;
    rst_store *store;
    rst_error error;
    rst_record *record = rst_record_new();
    const int32_t id = 1;
    const float logprob = 0;
    rst_turn turn = {.token_count = 1,
                     .topk = 1,
                     .token_ids = &id,
                     .token_logprobs = &logprob,
                     .topk_ids = &id,
                     .topk_logprobs = &logprob,
                     .temperature = 1};
    sleep_ms(30);
    return !record || rst_record_set(record, &turn, &error) ||
           rst_store_open(path, 0, NULL, &store, &error) ||
           seal_one(store, record, 1, PATIENCE_MS, &error);
}

static void a_take_waits_for_a_session_to_be_sealed(void **state)
{
    fixture *f = *state;
    rst_lease lease;
    size_t got;
    assert_code(RST_ERR_TIMEOUT,
                rst_consumer_take(f->store, NAME, SIZE, 1, 0, 20, &lease, &got, &f->error),
                f->error);
    pid_t pid = start_child(seal_later, (void *)(uintptr_t)f->path);
    assert_ok(rst_consumer_take(f->store, NAME, SIZE, 1, 0, PATIENCE_MS, &lease, &got, &f->error),
              f->error);
    assert_int_equal(lease.sequence, 1);
    expect_child(pid);
}

static void a_take_waits_for_a_lease_to_run_out(void **state)
{
    fixture *f = *state;
    seal_range(f, 1, 1);
    rst_lease first;
    rst_lease second;
    size_t got;
    assert_ok(rst_consumer_take(f->store, NAME, SIZE, 1, 50, 0, &first, &got, &f->error), f->error);
    assert_ok(rst_consumer_take(f->store, NAME, SIZE, 1, 0, PATIENCE_MS, &second, &got, &f->error),
              f->error);
    assert_int_equal(second.given_count, 2);
    assert_true(rst_clock_ns(CLOCK_BOOTTIME) >= first.expires_ns);
}

static int take_and_return(void *context)
{
    job *j = context;
    rst_store *store;
    rst_error error;
    size_t got;
    if (rst_store_open(j->path, 0, NULL, &store, &error) ||
        rst_consumer_take(store, NAME, SIZE, 1, 0, 0, j->leases, &got, &error)) {
        return 1;
    }
    atomic_store(j->got, got);
    sleep_ms(30);
    return rst_consumer_return(store, NAME, SIZE, j->leases, got, &error) ||
           rst_store_close(store, &error);
}

static void a_take_waits_for_a_session_to_be_handed_back(void **state)
{
    fixture *f = *state;
    seal_range(f, 1, 1);
    job j = make_job(f, 1, 0, false);
    pid_t pid = start_child(take_and_return, &j);
    await_leases(&j, 1);
    rst_lease lease;
    size_t got;
    assert_ok(rst_consumer_take(f->store, NAME, SIZE, 1, 0, RST_FOREVER, &lease, &got, &f->error),
              f->error);
    assert_int_equal(lease.given_count, 2);
    expect_child(pid);
    end_job(&j);
}

static void a_take_in_a_deleted_store_does_not_wait(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, RST_CAPACITY_MIN);
    assert_ok(rst_consumer_create(f.store, NAME, SIZE, RST_START_OLDEST, NULL, &f.error), f.error);
    support_remove_folder(strdup(f.path));
    rst_lease lease;
    size_t got;
    assert_code(RST_ERR_GONE,
                rst_consumer_take(f.store, NAME, SIZE, 1, 0, RST_FOREVER, &lease, &got, &f.error),
                f.error);
    assert_ok(rst_store_close(f.store, &f.error), f.error);
    rst_record_free(f.record);
    free((void *)(uintptr_t)f.path);
    support_remove_folder(f.folder);
}

/* ---------------------------------------------------------------- fork */

typedef struct inherited {
    rst_store *store;
    rst_snapshot *snapshot;
    void *place;
    size_t place_size;
} inherited;

static int use_inherited(void *context)
{
    inherited *i = context;
    rst_error e;
    rst_lease lease = {.sequence = 1};
    rst_consumer consumer;
    uint8_t key[RST_KEY_SIZE];
    size_t got;
    void *place;
    const int codes[] = {
        rst_consumer_create(i->store, "b", 1, RST_START_OLDEST, NULL, &e),
        rst_consumer_drop(i->store, NAME, SIZE, &e),
        rst_consumer_take(i->store, NAME, SIZE, 1, 0, RST_FOREVER, &lease, &got, &e),
        rst_consumer_acknowledge(i->store, NAME, SIZE, &lease, 1, &e),
        rst_consumer_return(i->store, NAME, SIZE, &lease, 1, &e),
        rst_consumer_renew(i->store, NAME, SIZE, &lease, 1, 0, &e),
        rst_consumer_place(i->store, NAME, SIZE, &place, &got, &e),
        rst_consumer_commit(i->store, NAME, SIZE, i->place, i->place_size, &e),
        rst_consumer_resume(i->store, NAME, SIZE, i->place, i->place_size, NULL, &e),
        rst_release_consumed(i->store, 0, NULL, &e),
        rst_consumer_get(i->snapshot, NAME, SIZE, &consumer, &e),
        rst_consumer_next(i->snapshot, NULL, &consumer, key, &e),
    };
    for (size_t n = 0; n < sizeof codes / sizeof *codes; n++) {
        if (codes[n] != RST_ERR_FORKED) {
            return (int)n + 1;
        }
    }
    return 0;
}

static void a_handle_from_before_a_fork_is_refused(void **state)
{
    fixture *f = *state;
    inherited i = {.store = f->store};
    assert_ok(rst_consumer_place(f->store, NAME, SIZE, &i.place, &i.place_size, &f->error),
              f->error);
    assert_ok(rst_snapshot_open(f->store, &i.snapshot, &f->error), f->error);
    expect_child(start_child(use_inherited, &i));
    rst_snapshot_close(i.snapshot);
    free(i.place);
    assert_int_equal(look_at(f->store, NAME).next, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TRAINER_TEST(what_a_killed_process_held_is_given_again_at_once),
        TRAINER_TEST(a_zombie_is_dead),
        TRAINER_TEST(a_process_lives_as_long_as_any_of_its_threads),
        TRAINER_TEST(a_waiting_process_learns_of_a_death),
        TRAINER_TEST(leases_are_kept_by_whoever_renews_them),
        TRAINER_TEST(a_take_waits_for_a_session_to_be_sealed),
        TRAINER_TEST(a_take_waits_for_a_lease_to_run_out),
        TRAINER_TEST(a_take_waits_for_a_session_to_be_handed_back),
        cmocka_unit_test(a_take_in_a_deleted_store_does_not_wait),
        TRAINER_TEST(a_handle_from_before_a_fork_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
