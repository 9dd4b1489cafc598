/* Consumers whose processes run, wait, fork and die. */
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>

#include "consumer_support.h"

#include "store/internal.h"

#define NAME "trainer"
#define SIZE (sizeof NAME - 1)

static int setup(void **state)
{
    fixture *f = calloc(1, sizeof *f);
    fixture_open(f, UINT64_C(8) << 20);
    assert_ok(rst_consumer_create(f->store, NAME, SIZE, RST_START_OLDEST, NULL, &f->error),
              f->error);
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    fixture_close(*state);
    free(*state);
    return 0;
}

/* Memory that children write and the parent reads. */
static void *shared_memory(size_t size)
{
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(memory != MAP_FAILED);
    return memory;
}

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
    pthread_t thread;
    if (pthread_create(&thread, NULL, go_on_without_the_first_thread, context)) {
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
           rst_store_open(path, 0, NULL, &store, &error) || seal_one(store, record, 1, &error);
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

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(what_a_killed_process_held_is_given_again_at_once),
        TEST(a_zombie_is_dead),
        TEST(a_process_lives_as_long_as_any_of_its_threads),
        TEST(a_waiting_process_learns_of_a_death),
        TEST(leases_are_kept_by_whoever_renews_them),
        TEST(a_take_waits_for_a_session_to_be_sealed),
        TEST(a_take_waits_for_a_lease_to_run_out),
        TEST(a_take_waits_for_a_session_to_be_handed_back),
        cmocka_unit_test(a_take_in_a_deleted_store_does_not_wait),
        TEST(a_handle_from_before_a_fork_is_refused),
        TEST(four_processes_share_a_thousand_sessions),
        TEST(two_consumers_do_not_disturb_each_other),
        TEST(workers_that_die_and_hand_back_lose_and_repeat_nothing),
        cmocka_unit_test(more_goes_through_a_store_than_it_holds),
        TEST(threads_are_ranks_too),
        TEST(a_renewed_lease_is_kept),
        TEST(a_resume_among_takes_skips_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
