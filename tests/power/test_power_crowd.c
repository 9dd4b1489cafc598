/* Power cuts while several processes write, sync at short intervals and are killed, also in the
 * middle of a sync.
 *
 * Each writer goes through one fixed sequence of steps, so that how far it had come can be read
 * from any store it has written to. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "power_disk.h"
#include "store/durability/guard.h"
#include "support.h"

enum {
    WRITERS = 3,
    TURNS = 4,          /* of a session */
    STEPS = TURNS + 2,  /* a session's puts, its seal, and the release of the one before it */
    STEPS_MAX = 200000, /* of a writer */
    IMAGES_MAX = 5000,
    INTERVAL_MS = 3,
};

static uint8_t the_boot = 1;

void __wrap_rst_boot_id(uint8_t out[RST_BOOT_ID_SIZE]);
void __wrap_rst_boot_id(uint8_t out[RST_BOOT_ID_SIZE])
{
    memset(out, the_boot, RST_BOOT_ID_SIZE);
}

/* In memory that outlives a killed writer. */
typedef struct shared {
    struct {
        _Atomic(uint64_t) count; /* steps acknowledged */
        uint64_t by[STEPS_MAX];  /* the newest transaction after each: it is that one or an older */
    } writers[WRITERS];
    _Atomic(uint32_t) image_count;
    struct {
        atomic_bool ready;
        uint64_t promised;
    } images[IMAGES_MAX];
} shared;

static shared *the_shared;
static const unsigned char *the_guard;
static char the_folder[200];
static char the_path[256];
static uint64_t the_seed;
static unsigned the_odds; /* of an image at an event */
static unsigned deadly;   /* of being killed there; 0: never */

static uint64_t promised_now(void)
{
    const rst_guard_shared *s = (const void *)(the_guard + 8192);
    return atomic_load(&s->transaction);
}

static void image_path(char out[300], uint32_t number)
{
    snprintf(out, 300, "%s/image-%u", the_folder, number);
}

static void cut(void)
{
    uint32_t number = atomic_fetch_add(&the_shared->image_count, 1);
    if (number >= IMAGES_MAX) {
        return;
    }
    char path[300];
    image_path(path, number);
    the_shared->images[number].promised = promised_now();
    disk_make_image(path, &the_seed);
    atomic_store(&the_shared->images[number].ready, true);
}

/* In a writer, in its thread that syncs or in the one that writes; they may share the numbers. */
static void on_event(disk_event what)
{
    if (what != DISK_AFTER_SYNC) { /* disks take their time, and others go on writing */
        struct timespec pause = {.tv_nsec = (long)(support_random(&the_seed) % 1000000)};
        nanosleep(&pause, NULL);
    }
    if (support_random(&the_seed) % the_odds == 0) {
        cut();
    }
    if (deadly && support_random(&the_seed) % deadly == 0) {
        disk_die();
    }
}

/* ---------------------------------------------------------------- a writer */

static int name_of(char name[32], int writer, uint64_t session)
{
    return snprintf(name, 32, "%d-%llu", writer, (unsigned long long)session);
}

static int make_step(rst_store *store, rst_record *record, int writer, uint64_t step,
                     rst_error *error)
{
    char name[32];
    uint64_t session = step / STEPS;
    uint32_t part = (uint32_t)(step % STEPS);
    size_t size = (size_t)name_of(name, writer, session);
    if (part < TURNS) {
        support_fill(record, 20 + (uint32_t)(step * 7 % 50), 16, step, NULL, 0, NULL);
        return rst_put(store, name, size, part, record, 0, 60000, error);
    }
    if (part == TURNS) {
        rst_outcome outcome = {RST_STATUS_COMPLETED, 1.0, RST_NO_INDEX, RST_NO_INDEX};
        return rst_seal(store, name, size, &outcome, 0, error);
    }
    if (session == 0) {
        return RST_OK;
    }
    size = (size_t)name_of(name, writer, session - 1);
    return rst_release(store, name, size, 0, error);
}

/* The number of steps that a store shows: at most two sessions of a writer are in it. */
static uint64_t steps_in(rst_snapshot *now, int writer, uint64_t near)
{
    char name[32];
    rst_session s;
    uint64_t newest = near / STEPS + 1;
    for (uint64_t back = 0; back < 400 && back <= newest; back++) {
        uint64_t session = newest - back;
        if (rst_session_get(now, name, (size_t)name_of(name, writer, session), &s, NULL)) {
            continue;
        }
        uint64_t steps = session * STEPS + s.turn_count;
        if (s.state == RST_STATE_SEALED) {
            size_t size = (size_t)(session ? name_of(name, writer, session - 1) : 0);
            bool released = session > 0 && rst_session_get(now, name, size, &s, NULL) != RST_OK;
            steps += 1 + released;
        }
        return steps;
    }
    return 0;
}

static void must(int code, const rst_error *error)
{
    if (code) {
        fprintf(stderr, "%s: %s\n", rst_code_name(code), error->message);
        _exit(100);
    }
}

static rst_store *open_store(const char *path)
{
    rst_store *store;
    rst_error error;
    must(rst_store_open(path, 0, NULL, &store, &error), &error);
    return store;
}

static void write_until_killed(int writer, uint64_t seed)
{
    the_seed = seed;
    deadly = 100;
    rst_store *store = open_store(the_path);
    rst_record *record = rst_record_new();
    rst_error error;
    rst_snapshot *now;
    rst_stat stat;
    must(rst_snapshot_open(store, &now, &error), &error);
    uint64_t step = atomic_load(&the_shared->writers[writer].count);
    uint64_t found = steps_in(now, writer, step);
    /* It may have been killed between its commit and its note of it. The first session has nothing
     * to release, so that step shows in no store. */
    if (found != step && found != step + 1 && step != STEPS) {
        fprintf(stderr, "writer %d: %llu steps, %llu acknowledged\n", writer,
                (unsigned long long)found, (unsigned long long)step);
        _exit(101);
    }
    step = found > step ? found : step;
    rst_snapshot_close(now);
    must(rst_store_stat(store, &stat, &error), &error);
    if (step > 0) {
        the_shared->writers[writer].by[step - 1] = stat.last_transaction;
        atomic_store(&the_shared->writers[writer].count, step);
    }
    for (; step < STEPS_MAX; step++) {
        must(make_step(store, record, writer, step, &error), &error);
        must(rst_store_stat(store, &stat, &error), &error);
        the_shared->writers[writer].by[step] = stat.last_transaction;
        atomic_store(&the_shared->writers[writer].count, step + 1);
    }
    _exit(102);
}

static pid_t start_writer(int writer, uint64_t *seed)
{
    uint64_t own = support_random(seed);
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        alarm(120);
        write_until_killed(writer, own);
    }
    return pid;
}

/* ---------------------------------------------------------------- images */

static void check_writer(rst_snapshot *now, int writer, uint64_t promised)
{
    uint64_t count = atomic_load(&the_shared->writers[writer].count);
    uint64_t least = 0;
    while (least < count && the_shared->writers[writer].by[least] <= promised) {
        least++;
    }
    uint64_t steps = steps_in(now, writer, count);
    if (least % STEPS == 0 && least == STEPS) {
        least--; /* the first session's release, which is none */
    }
    if (steps < least) {
        fail_msg("writer %d: %llu steps, promised %llu", writer, (unsigned long long)steps,
                 (unsigned long long)least);
    }
}

static bool check_image(uint32_t number)
{
    if (!atomic_load(&the_shared->images[number].ready)) {
        return false; /* its maker was killed */
    }
    char path[300];
    image_path(path, number);
    rst_error error;
    rst_store *store;
    rst_snapshot *now;
    the_boot = 2;
    assert_ok(rst_store_open(path, 0, NULL, &store, &error), error);
    support_assert_sound(store);
    assert_ok(rst_snapshot_open(store, &now, &error), error);
    assert_true(rst_snapshot_id(now) >= the_shared->images[number].promised);
    for (int writer = 0; writer < WRITERS; writer++) {
        check_writer(now, writer, the_shared->images[number].promised);
    }
    rst_snapshot_close(now);
    assert_ok(rst_store_close(store, &error), error);
    the_boot = 1;
    char command[320];
    snprintf(command, sizeof command, "rm -r '%s'", path);
    assert_int_equal(system(command), 0);
    return true;
}

static void reap(pid_t *pids, int writer, uint64_t *seed)
{
    int status;
    if (waitpid(pids[writer], &status, WNOHANG) == pids[writer]) {
        assert_true(WIFSIGNALED(status));
        assert_int_equal(WTERMSIG(status), SIGKILL);
        pids[writer] = start_writer(writer, seed);
    }
}

static void begin(void)
{
    char *folder = support_make_folder();
    snprintf(the_folder, sizeof the_folder, "%s", folder);
    snprintf(the_path, sizeof the_path, "%s/store", folder);
    free(folder);
    the_boot = 1;
    rst_create_options options = {.capacity_size = RST_CAPACITY_MIN,
                                  .durability = RST_DURABILITY_INTERVAL,
                                  .interval_ms = INTERVAL_MS};
    rst_store *store;
    rst_error error;
    assert_ok(rst_store_open(the_path, RST_OPEN_CREATE, &options, &store, &error), error);
    assert_ok(rst_store_close(store, &error), error);
    the_shared = mmap(NULL, sizeof *the_shared, PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    assert_ptr_not_equal(the_shared, MAP_FAILED);
    int fd = open(support_path(the_path, "guard.bin"), O_RDONLY | O_CLOEXEC);
    the_guard = mmap(NULL, 12288, PROT_READ, MAP_SHARED, fd, 0);
    assert_ptr_not_equal(the_guard, MAP_FAILED);
    close(fd);
    disk_begin(the_path);
}

static void kill_all(pid_t *pids)
{
    for (int i = 0; i < WRITERS; i++) {
        disk_lock();
        kill(pids[i], SIGKILL);
        disk_unlock();
        waitpid(pids[i], NULL, 0);
    }
}

static void killed_writers_and_a_cut_lose_nothing_that_was_promised(void **state)
{
    (void)state;
    const char *factor = getenv("ROLLSTORE_TEST_CUTS"); /* per cent */
    unsigned wanted = factor ? 6 * (unsigned)strtoul(factor, NULL, 10) : 600;
    begin();
    the_odds = 8;
    disk_on_event(on_event);
    uint64_t seed = 7;
    pid_t pids[WRITERS];
    for (int i = 0; i < WRITERS; i++) {
        pids[i] = start_writer(i, &seed);
    }
    unsigned tried = 0;
    unsigned kills = 0;
    for (uint32_t next = 0; tried < wanted && next < IMAGES_MAX;) {
        struct timespec pause = {.tv_nsec = 2000000};
        nanosleep(&pause, NULL);
        disk_look();
        while (next < atomic_load(&the_shared->image_count) && next < IMAGES_MAX &&
               (atomic_load(&the_shared->images[next].ready) ||
                next + 20 < atomic_load(&the_shared->image_count))) {
            tried += check_image(next++);
        }
        if (support_random(&seed) % 20 == 0) {
            disk_lock(); /* nobody is inside */
            kill(pids[support_random(&seed) % WRITERS], SIGKILL);
            disk_unlock();
        }
        for (int i = 0; i < WRITERS; i++) {
            pid_t before = pids[i];
            reap(pids, i, &seed);
            kills += pids[i] != before;
        }
    }
    kill_all(pids);
    uint64_t steps = 0;
    for (int i = 0; i < WRITERS; i++) {
        steps += atomic_load(&the_shared->writers[i].count);
        assert_true(atomic_load(&the_shared->writers[i].count) > 2 * STEPS);
    }
    print_message("%u cuts, %u kills, %llu steps, %llu syncs\n", tried, kills,
                  (unsigned long long)steps, (unsigned long long)disk_syncs());
    assert_true(tried >= wanted);
    disk_end();
    support_remove_folder(strdup(the_folder));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(killed_writers_and_a_cut_lose_nothing_that_was_promised),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
