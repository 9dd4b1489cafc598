/* Many processes and threads at one consumer: everything is given, and nothing twice. */
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

/* ---------------------------------------------------------------- many at once */

enum { WORKERS = 4, MANY = 1000 };

typedef struct crowd {
    const char *path;
    const char *name;
    uint64_t seed;
    atomic_int *taken; /* [MANY + 1] acknowledged, by sequence number */
    atomic_int *all;   /* their sum */
    int sum;           /* at which the work is done */
    bool clumsy;       /* hands back, forgets and dies */
} crowd;

/* What one worker does until everything is acknowledged; dies in the middle when it is clumsy. */
static int work(void *context)
{
    crowd *c = context;
    rst_store *store;
    rst_error error;
    rst_lease leases[16];
    size_t size = strlen(c->name);
    if (rst_store_open(c->path, 0, NULL, &store, &error)) {
        return 1;
    }
    while (atomic_load(c->all) < c->sum) {
        size_t got;
        int code = rst_consumer_take(store, c->name, size, 1 + support_random(&c->seed) % 16, 0, 10,
                                     leases, &got, &error);
        if (code == RST_ERR_TIMEOUT) {
            continue;
        }
        if (code) {
            return 2;
        }
        uint64_t die = c->clumsy ? support_random(&c->seed) % 100 : 99;
        if (die < 4) {
            kill(getpid(), SIGKILL);
        }
        if (die < 20) {
            if (rst_consumer_return(store, c->name, size, leases, got, &error)) {
                return 3;
            }
            continue;
        }
        if (rst_consumer_acknowledge(store, c->name, size, leases, got, &error)) {
            return 4;
        }
        for (size_t i = 0; i < got; i++) {
            atomic_fetch_add(&c->taken[leases[i].sequence], 1);
        }
        atomic_fetch_add(c->all, (int)got);
    }
    return rst_store_close(store, &error) ? 5 : 0;
}

static void expect_each_once(const crowd *c)
{
    for (int i = 1; i <= MANY; i++) {
        assert_int_equal(atomic_load(&c->taken[i]), 1);
    }
}

static crowd make_crowd(fixture *f, const char *name, bool clumsy)
{
    atomic_int *memory = shared_memory((MANY + 2) * sizeof(atomic_int));
    return (crowd){.path = f->path,
                   .name = name,
                   .seed = 1,
                   .taken = memory,
                   .all = memory + MANY + 1,
                   .sum = MANY,
                   .clumsy = clumsy};
}

static void end_crowd(crowd *c)
{
    munmap((void *)c->taken, (MANY + 2) * sizeof(atomic_int));
}

static void four_processes_share_a_thousand_sessions(void **state)
{
    fixture *f = *state;
    crowd c = make_crowd(f, NAME, false);
    pid_t pids[WORKERS];
    for (int i = 0; i < WORKERS; i++) {
        c.seed++;
        pids[i] = start_child(work, &c);
    }
    seal_range(f, 1, MANY); /* while they take */
    for (int i = 0; i < WORKERS; i++) {
        expect_child(pids[i]);
    }
    expect_each_once(&c);
    rst_consumer now = look_at(f->store, NAME);
    assert_int_equal(now.trained_total, MANY);
    assert_int_equal(now.trained_count, MANY);
    assert_int_equal(now.given_total, MANY);
    assert_int_equal(now.again_total, 0);
    end_crowd(&c);
}

static void two_consumers_do_not_disturb_each_other(void **state)
{
    fixture *f = *state;
    assert_ok(rst_consumer_create(f->store, "critic", 6, RST_START_OLDEST, NULL, &f->error),
              f->error);
    crowd crowds[] = {make_crowd(f, NAME, false), make_crowd(f, "critic", false)};
    pid_t pids[WORKERS];
    for (int i = 0; i < WORKERS; i++) {
        crowds[i % 2].seed += (uint64_t)i;
        pids[i] = start_child(work, &crowds[i % 2]);
    }
    seal_range(f, 1, MANY);
    for (int i = 0; i < WORKERS; i++) {
        expect_child(pids[i]);
    }
    for (int i = 0; i < 2; i++) {
        expect_each_once(&crowds[i]);
        assert_int_equal(look_at(f->store, crowds[i].name).again_total, 0);
        end_crowd(&crowds[i]);
    }
}

/* Wait for any of the workers; true when it was killed by itself. */
static int await_worker(pid_t *pids, bool *died)
{
    for (;;) {
        int status;
        pid_t pid = waitpid(-1, &status, 0);
        assert_true(pid > 0);
        for (int i = 0; i < WORKERS; i++) {
            if (pids[i] == pid) {
                *died = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
                if (!*died) {
                    assert_true(WIFEXITED(status));
                    assert_int_equal(WEXITSTATUS(status), 0);
                }
                return i;
            }
        }
    }
}

static void workers_that_die_and_hand_back_lose_and_repeat_nothing(void **state)
{
    fixture *f = *state;
    seal_range(f, 1, MANY);
    crowd c = make_crowd(f, NAME, true);
    pid_t pids[WORKERS];
    int running = WORKERS;
    int deaths = 0;
    for (int i = 0; i < WORKERS; i++) {
        c.seed++;
        pids[i] = start_child(work, &c);
    }
    while (running > 0) {
        bool died;
        int i = await_worker(pids, &died);
        if (died) {
            deaths++;
            c.seed += 100;
            pids[i] = start_child(work, &c);
        } else {
            pids[i] = -1;
            running--;
        }
    }
    assert_true(deaths > 0);
    expect_each_once(&c);
    rst_consumer now = look_at(f->store, NAME);
    assert_int_equal(now.trained_total, MANY);
    assert_int_equal(now.held_count + now.free_count + now.waiting_count, 0);
    assert_int_equal(now.given_total, MANY + now.again_total);
    end_crowd(&c);
}

/* ---------------------------------------------------------------- one store, everybody at work */

/* A trainer that takes, acknowledges, checkpoints and releases while others write. */
static int train_and_release(void *context)
{
    crowd *c = context;
    rst_store *store;
    rst_error error;
    rst_lease leases[16];
    uint64_t released_all = 0;
    if (rst_store_open(c->path, 0, NULL, &store, &error)) {
        return 1;
    }
    while (released_all < MANY) {
        size_t got;
        void *place;
        size_t size;
        uint64_t released;
        if (rst_consumer_take(store, NAME, SIZE, 16, 0, PATIENCE_MS, leases, &got, &error) ||
            rst_consumer_acknowledge(store, NAME, SIZE, leases, got, &error) ||
            rst_consumer_place(store, NAME, SIZE, &place, &size, &error)) {
            return 2;
        }
        int code = rst_consumer_commit(store, NAME, SIZE, place, size, &error);
        free(place);
        if (code || rst_release_consumed(store, 0, &released, &error)) {
            return 3;
        }
        released_all += released;
    }
    return released_all == MANY && rst_store_close(store, &error) == RST_OK ? 0 : 4;
}

static void more_goes_through_a_store_than_it_holds(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, RST_CAPACITY_MIN); /* holds about a quarter of them */
    assert_ok(rst_consumer_create(f.store, NAME, SIZE, RST_START_OLDEST, NULL, &f.error), f.error);
    crowd c = {.path = f.path};
    pid_t pid = start_child(train_and_release, &c);
    for (uint64_t i = 1; i <= MANY; i++) {
        const char *name = session_name(i);
        rst_outcome outcome = {.status = RST_STATUS_COMPLETED, .group_index = 1, .index = 1};
        assert_ok(rst_put(f.store, name, strlen(name), 0, f.record, 0, PATIENCE_MS, &f.error),
                  f.error);
        assert_ok(rst_seal(f.store, name, strlen(name), &outcome, 0, &f.error), f.error);
    }
    expect_child(pid);
    rst_consumer now = look_at(f.store, NAME);
    assert_int_equal(now.settled, MANY + 1);
    assert_int_equal(now.given_total, MANY);
    fixture_close(&f);
}

/* ---------------------------------------------------------------- threads */

static void *work_in_a_thread(void *context)
{
    crowd *c = context;
    rst_store *store;
    rst_error error;
    rst_lease leases[8];
    if (rst_store_open(c->path, 0, NULL, &store, &error)) {
        return "open";
    }
    while (atomic_load(c->all) < c->sum) {
        size_t got;
        int code = rst_consumer_take(store, NAME, SIZE, 8, 0, 10, leases, &got, &error);
        if (code == RST_ERR_TIMEOUT) {
            continue;
        }
        if (code || rst_consumer_acknowledge(store, NAME, SIZE, leases, got, &error)) {
            return "take";
        }
        for (size_t i = 0; i < got; i++) {
            atomic_fetch_add(&c->taken[leases[i].sequence], 1);
        }
        atomic_fetch_add(c->all, (int)got);
    }
    return rst_store_close(store, &error) ? "close" : NULL;
}

static void threads_are_ranks_too(void **state)
{
    fixture *f = *state;
    crowd c = make_crowd(f, NAME, false);
    pthread_t threads[WORKERS];
    for (int i = 0; i < WORKERS; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, work_in_a_thread, &c), 0);
    }
    seal_range(f, 1, MANY);
    for (int i = 0; i < WORKERS; i++) {
        void *failed;
        assert_int_equal(pthread_join(threads[i], &failed), 0);
        assert_null(failed);
    }
    expect_each_once(&c);
    end_crowd(&c);
}

/* Take whatever has ended, again and again, until told to stop. */
static void *grab(void *context)
{
    crowd *c = context;
    rst_store *store;
    rst_error error;
    if (rst_store_open(c->path, 0, NULL, &store, &error)) {
        return "open";
    }
    while (atomic_load(c->all) < c->sum) {
        rst_lease lease;
        size_t got;
        int code = rst_consumer_take(store, NAME, SIZE, 1, 1, 0, &lease, &got, &error);
        if (code && code != RST_ERR_TIMEOUT) {
            return "take";
        }
    }
    return rst_store_close(store, &error) ? "close" : NULL;
}

/* Renewing at the moment at which the lease runs out: once it is renewed, nobody else gets it. */
static void a_renewed_lease_is_kept(void **state)
{
    fixture *f = *state;
    enum { ROUNDS = 200 };
    seal_range(f, 1, 1);
    crowd c = make_crowd(f, NAME, false);
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, grab, &c), 0);
    int renewed = 0;
    for (int i = 0; i < ROUNDS; i++) {
        rst_lease lease;
        size_t got;
        assert_ok(
            rst_consumer_take(f->store, NAME, SIZE, 1, 1, PATIENCE_MS, &lease, &got, &f->error),
            f->error);
        while (rst_clock_ns(CLOCK_BOOTTIME) < lease.expires_ns - 5000) {
        }
        int code = rst_consumer_renew(f->store, NAME, SIZE, &lease, 1, 0, &f->error);
        if (code == RST_OK) {
            renewed++;
            assert_ok(rst_consumer_return(f->store, NAME, SIZE, &lease, 1, &f->error), f->error);
        } else {
            assert_code(RST_ERR_LEASE, code, f->error);
        }
    }
    atomic_store(c.all, c.sum);
    void *failed;
    assert_int_equal(pthread_join(thread, &failed), 0);
    assert_null(failed);
    assert_true(renewed > 0);
    end_crowd(&c);
}

/* Going back while others take: whatever they had found is given again. */
static void a_resume_among_takes_skips_nothing(void **state)
{
    fixture *f = *state;
    enum { COUNT = 40, ROUNDS = 400 };
    seal_range(f, 1, COUNT);
    void *place;
    size_t size;
    assert_ok(rst_consumer_place(f->store, NAME, SIZE, &place, &size, &f->error), f->error);
    crowd c = make_crowd(f, NAME, false);
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, grab, &c), 0);
    }
    for (int i = 0; i < ROUNDS; i++) {
        /* The first session is given in each round, whoever had it for a moment. */
        for (bool first = false; !first;) {
            rst_lease leases[4];
            size_t got;
            assert_ok(
                rst_consumer_take(f->store, NAME, SIZE, 4, 0, PATIENCE_MS, leases, &got, &f->error),
                f->error);
            assert_ok(rst_consumer_acknowledge(f->store, NAME, SIZE, leases, got, &f->error),
                      f->error);
            first = leases[0].sequence == 1;
        }
        assert_ok(rst_consumer_resume(f->store, NAME, SIZE, place, size, NULL, &f->error),
                  f->error);
    }
    atomic_store(c.all, c.sum);
    for (int i = 0; i < 2; i++) {
        void *failed;
        assert_int_equal(pthread_join(threads[i], &failed), 0);
        assert_null(failed);
    }
    bool seen[COUNT + 1] = {false};
    for (int missing = COUNT; missing > 0;) {
        rst_lease leases[COUNT];
        size_t got;
        assert_ok(
            rst_consumer_take(f->store, NAME, SIZE, COUNT, 0, PATIENCE_MS, leases, &got, &f->error),
            f->error);
        for (size_t i = 0; i < got; i++) {
            assert_false(seen[leases[i].sequence]);
            seen[leases[i].sequence] = true;
            missing--;
        }
    }
    free(place);
    end_crowd(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TRAINER_TEST(four_processes_share_a_thousand_sessions),
        TRAINER_TEST(two_consumers_do_not_disturb_each_other),
        TRAINER_TEST(workers_that_die_and_hand_back_lose_and_repeat_nothing),
        cmocka_unit_test(more_goes_through_a_store_than_it_holds),
        TRAINER_TEST(threads_are_ranks_too),
        TRAINER_TEST(a_renewed_lease_is_kept),
        TRAINER_TEST(a_resume_among_takes_skips_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
