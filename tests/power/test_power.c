/* Power cuts: whatever of the unsynced writes has reached the disk, in whatever order, the store
 * opens, is sound, and holds what its durability promises. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "power_disk.h"
#include "power_work.h"
#include "store/durability/guard.h"
#include "support.h"

/* ---------------------------------------------------------------- boots */

static uint8_t the_boot = 1;

void __wrap_rst_boot_id(uint8_t out[RST_BOOT_ID_SIZE]);
void __wrap_rst_boot_id(uint8_t out[RST_BOOT_ID_SIZE])
{
    memset(out, the_boot, RST_BOOT_ID_SIZE);
}

/* ---------------------------------------------------------------- a store on the disk */

enum { IMAGES_MAX = 64, HISTORY = 100000, INTERVAL_NEVER_MS = 1 << 30 };

typedef struct image {
    char folder[300];
    uint64_t promised; /* the transaction that must at least be there */
} image;

typedef struct bench {
    char *folder;
    char path[256];
    rst_durability durability;
    rst_store *store;
    power_worker worker;
    const unsigned char *guard; /* guard.bin, mapped */
    uint64_t acknowledged;
    uint64_t of_image; /* what the image promises that is worked with; 0 when it is the store */
    uint64_t seed;
    unsigned odds; /* of an image at an event: one in so many */
    image images[IMAGES_MAX];
    unsigned image_count;
    uint64_t *digests; /* [HISTORY] of transactions; 0 where it is not known; children share it */
    uint64_t newest;
    unsigned tried;  /* images */
    unsigned broken; /* of these: LMDB alone would have been led astray */
    unsigned refused;
} bench;

static bench *the_bench;

/* What the store's processes take for safely on the disk. */
static uint64_t promised(const bench *b)
{
    if (b->of_image) {
        return b->of_image;
    }
    switch (b->durability) {
    case RST_DURABILITY_FULL:
        return b->acknowledged;
    case RST_DURABILITY_INTERVAL: {
        const rst_guard_shared *shared = (const void *)(b->guard + 8192);
        return atomic_load(&shared->transaction);
    }
    default:
        return 0;
    }
}

/* The thread that syncs comes here too. */
static pthread_mutex_t images_lock = PTHREAD_MUTEX_INITIALIZER;

static void cut_with_lock(bench *b)
{
    if (b->image_count == IMAGES_MAX) {
        return;
    }
    image *i = &b->images[b->image_count];
    snprintf(i->folder, sizeof i->folder, "%s/image-%u", b->folder, b->image_count);
    i->promised = promised(b);
    disk_make_image(i->folder, &b->seed);
    b->image_count++;
}

static void maybe_cut(disk_event what)
{
    (void)what;
    if (pthread_mutex_trylock(&images_lock) == 0) {
        if (support_random(&the_bench->seed) % the_bench->odds == 0) {
            cut_with_lock(the_bench);
        }
        pthread_mutex_unlock(&images_lock);
    }
}

/* What the store holds now is what its newest transaction holds. */
static int note(bench *b, rst_store *store, rst_error *error)
{
    uint64_t digest;
    int code = power_digest(store, &digest, &b->newest, error);
    if (!code && b->newest < HISTORY) {
        b->digests[b->newest] = digest;
    }
    b->acknowledged = b->newest;
    return code;
}

static void note_state(bench *b)
{
    rst_error error;
    assert_ok(note(b, b->store, &error), error);
    assert_true(b->newest < HISTORY);
}

static void bench_open(bench *b, rst_durability durability, uint64_t seed)
{
    memset(b, 0, sizeof *b);
    pthread_mutex_init(&images_lock, NULL); /* a test that failed may have left it locked */
    the_boot = 1;
    the_bench = b;
    b->digests = mmap(NULL, HISTORY * sizeof *b->digests, PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(b->digests, MAP_FAILED);
    b->folder = support_make_folder();
    snprintf(b->path, sizeof b->path, "%s/store", b->folder);
    b->durability = durability;
    b->seed = seed;
    power_worker_init(&b->worker, seed);
    rst_create_options options = {.capacity_size = RST_CAPACITY_MIN,
                                  .durability = durability,
                                  .interval_ms = INTERVAL_NEVER_MS};
    rst_error error;
    assert_ok(rst_store_open(b->path, RST_OPEN_CREATE, &options, &b->store, &error), error);
    int fd = open(support_path(b->path, "guard.bin"), O_RDONLY);
    b->guard = mmap(NULL, 12288, PROT_READ, MAP_SHARED, fd, 0);
    assert_ptr_not_equal(b->guard, MAP_FAILED);
    close(fd);
    disk_begin(b->path);
    note_state(b);
}

static void bench_close(bench *b)
{
    rst_error error;
    disk_end();
    assert_ok(rst_store_close(b->store, &error), error);
    munmap((void *)(uintptr_t)b->guard, 12288);
    munmap(b->digests, HISTORY * sizeof *b->digests);
    power_worker_free(&b->worker);
    support_remove_folder(b->folder);
}

/* ---------------------------------------------------------------- an image */

/* Whether LMDB, opening the file as it is, would follow pages that are not what they should be. */
static bool leads_astray(const char *folder)
{
    unsigned char meta[RST_PAGES_META_SIZE];
    int fd = open(support_path(folder, "data.mdb"), O_RDONLY | O_CLOEXEC);
    bool sound = fd >= 0 && rst_pages_newest(fd, meta, NULL) == RST_OK &&
                 rst_pages_check_saved(fd, meta, NULL) == RST_OK;
    close(fd);
    return !sound;
}

/* The transaction is one of the store's history, with its contents.  Between two that are known lie
 * those that change nothing, or the parts of one piece of work. */
static bool is_of_history(const bench *b, uint64_t transaction, uint64_t digest)
{
    if (transaction == 0 || transaction > b->newest) {
        return false;
    }
    if (b->digests[transaction]) {
        return b->digests[transaction] == digest;
    }
    uint64_t below = transaction;
    uint64_t above = transaction;
    while (below > 0 && !b->digests[below]) {
        below--;
    }
    while (above < b->newest && !b->digests[above]) {
        above++;
    }
    return b->digests[below] == digest || b->digests[above] == digest;
}

/* A recovered store is one to work with. */
static void go_on_with(bench *b, rst_store *store)
{
    rst_error error;
    power_worker worker;
    power_worker_init(&worker, b->seed);
    for (int i = 0; i < 3; i++) {
        assert_ok(power_work(&worker, store, &error), error);
    }
    power_worker_free(&worker);
    support_assert_sound(store);
}

static void remove_image(const char *folder)
{
    const char *files[] = {"data.mdb", "lock.mdb", "guard.bin"};
    for (int i = 0; i < 3; i++) {
        unlink(support_path(folder, files[i]));
    }
    assert_int_equal(rmdir(folder), 0);
}

static void check_image(bench *b, const image *i)
{
    const char *folder = i->folder;
    rst_error error;
    rst_store *store;
    b->tried++;
    b->broken += leads_astray(folder);
    the_boot = 2;
    assert_ok(rst_store_open(folder, 0, NULL, &store, &error), error);
    uint64_t digest;
    uint64_t transaction;
    assert_ok(power_digest(store, &digest, &transaction, &error), error);
    if (transaction < i->promised || !is_of_history(b, transaction, digest)) {
        fail_msg("transaction %llu, promised %llu, newest %llu: %s",
                 (unsigned long long)transaction, (unsigned long long)i->promised,
                 (unsigned long long)b->newest,
                 transaction < i->promised ? "too old" : "other contents");
    }
    go_on_with(b, store);
    assert_ok(rst_store_close(store, &error), error);
    the_boot = 1;
    remove_image(folder);
}

static void check_images(bench *b)
{
    pthread_mutex_lock(&images_lock);
    for (unsigned i = 0; i < b->image_count; i++) {
        check_image(b, &b->images[i]);
    }
    b->image_count = 0;
    pthread_mutex_unlock(&images_lock);
}

/* ---------------------------------------------------------------- the promise */

static unsigned cuts_wanted(unsigned usual)
{
    const char *factor = getenv("ROLLSTORE_TEST_CUTS"); /* per cent */
    return factor ? usual * (unsigned)strtoul(factor, NULL, 10) / 100 : usual;
}

static void work_and_cut(rst_durability durability, unsigned cuts, uint64_t seed)
{
    bench b;
    rst_error error;
    bench_open(&b, durability, seed);
    b.odds = durability == RST_DURABILITY_FULL ? 12 : 3;
    disk_on_event(maybe_cut);
    while (b.tried < cuts) {
        assert_ok(power_work(&b.worker, b.store, &error), error);
        note_state(&b);
        disk_look();
        maybe_cut(DISK_AFTER_WRITE);
        if (support_random(&b.seed) % 12 == 0) {
            assert_ok(rst_store_sync(b.store, &error), error);
            note_state(&b);
            assert_true(durability == RST_DURABILITY_FULL || promised(&b) == b.newest);
        }
        check_images(&b);
    }
    print_message("%u cuts, %u of which LMDB alone would have opened as a damaged file\n", b.tried,
                  b.broken);
    bench_close(&b);
}

static void interval_keeps_everything_up_to_its_last_sync(void **state)
{
    (void)state;
    work_and_cut(RST_DURABILITY_INTERVAL, cuts_wanted(1500), 1);
}

static void full_keeps_everything_acknowledged(void **state)
{
    (void)state;
    work_and_cut(RST_DURABILITY_FULL, cuts_wanted(700), 2);
}

/* ---------------------------------------------------------------- several processes */

static void work_in_child(bench *b, int steps, void (*event)(disk_event), bool sync)
{
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        alarm(60);
        disk_on_event(event);
        rst_store *store;
        rst_error error;
        int code = rst_store_open(b->path, 0, NULL, &store, &error);
        for (int i = 0; i < steps && !code; i++) {
            code = power_work(&b->worker, store, &error);
            code = code ? code : note(b, store, &error);
        }
        code = code || !sync ? code : rst_store_sync(store, &error);
        if (code) {
            fprintf(stderr, "child: %s\n", error.message);
            _exit(1);
        }
        disk_die();
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSIGNALED(status));
    assert_int_equal(WTERMSIG(status), SIGKILL);
}

static void step(bench *b)
{
    rst_error error;
    assert_ok(power_work(&b->worker, b->store, &error), error);
    note_state(b);
    disk_look();
}

/* The killed one had committed what was not synced; nobody is left to pin what was. */
static void a_new_writer_keeps_what_a_killed_one_had_synced(void **state)
{
    (void)state;
    bench b;
    rst_error error;
    bench_open(&b, RST_DURABILITY_INTERVAL, 3);
    b.odds = 1;
    for (int round = 0; round < 10; round++) {
        assert_ok(rst_store_close(b.store, &error), error);
        uint64_t synced = promised(&b);
        work_in_child(&b, 30, NULL, false);
        disk_on_event(maybe_cut);
        assert_ok(rst_store_open(b.path, 0, NULL, &b.store, &error), error);
        note_state(&b);
        assert_true(b.newest > synced); /* within a boot nothing is taken back */
        for (int i = 0; i < 15; i++) {
            step(&b);
            maybe_cut(DISK_AFTER_WRITE);
        }
        disk_on_event(NULL);
        for (unsigned i = 0; i < b.image_count; i++) {
            assert_true(b.images[i].promised >= synced);
        }
        check_images(&b);
    }
    print_message("%u cuts, %u of them led astray\n", b.tried, b.broken);
    bench_close(&b);
}

static void die_after_writing(disk_event what)
{
    if (what == DISK_AFTER_WRITE) {
        disk_die();
    }
}

static void cut_often(disk_event what)
{
    for (int i = 0; i < 8; i++) {
        maybe_cut(what);
    }
}

/* It has written a slot of guard.bin that may not be on the disk; the other one is, and counts. */
static void a_killed_saver_does_not_cost_the_slot_that_counts(void **state)
{
    (void)state;
    bench b;
    rst_error error;
    bench_open(&b, RST_DURABILITY_INTERVAL, 4);
    b.odds = 1;
    for (int round = 0; round < 20; round++) {
        work_in_child(&b, 3, die_after_writing, true);
        note_state(&b);
        for (int i = 0; i < 4; i++) {
            step(&b);
        }
        disk_on_event(cut_often);
        assert_ok(rst_store_sync(b.store, &error), error);
        disk_on_event(NULL);
        check_images(&b);
    }
    print_message("%u cuts, %u of them led astray\n", b.tried, b.broken);
    bench_close(&b);
}

/* ---------------------------------------------------------------- further cuts */

/* The power goes again while the first opening brings the store back. */
static void recovering_may_be_cut_too(void **state)
{
    (void)state;
    bench b;
    bench_open(&b, RST_DURABILITY_INTERVAL, 5);
    b.odds = 1;
    unsigned again = 0;
    for (int round = 0; round < 25; round++) {
        rst_error error;
        for (int i = 0; i < 10; i++) {
            step(&b);
        }
        maybe_cut(DISK_AFTER_WRITE);
        assert_int_equal(b.image_count, 1);
        disk_end();
        char first[300];
        snprintf(first, sizeof first, "%s/first", b.folder);
        assert_int_equal(rename(b.images[0].folder, first), 0);
        b.image_count = 0;
        b.of_image = b.images[0].promised;
        disk_begin(first);
        disk_on_event(maybe_cut);
        the_boot = 3;
        rst_store *store;
        assert_ok(rst_store_open(first, 0, NULL, &store, &error), error);
        again += b.image_count;
        disk_end();
        check_images(&b);
        the_boot = 3;
        assert_ok(rst_store_close(store, &error), error);
        the_boot = 1;
        remove_image(first);
        b.of_image = 0;
        assert_ok(rst_store_sync(b.store, &error), error);
        disk_begin(b.path);
    }
    print_message("%u cuts while going back\n", again);
    assert_true(again > 100);
    bench_close(&b);
}

/* What memory leaves after a cut is refused, or sound; it never takes the process with it. */
static void memory_is_sound_or_refused(void **state)
{
    (void)state;
    bench b;
    bench_open(&b, RST_DURABILITY_MEMORY, 6);
    b.odds = 1;
    unsigned opened = 0;
    for (int round = 0; round < 150; round++) {
        step(&b);
        maybe_cut(DISK_AFTER_WRITE);
        fflush(NULL);
        pid_t pid = fork();
        if (pid == 0) {
            the_boot = 2;
            rst_store *store;
            rst_error error;
            int code = rst_store_open(b.images[0].folder, 0, NULL, &store, &error);
            rst_verify_result result = {.fault_count = 1};
            if (code == RST_OK && rst_store_verify(store, NULL, &result, &error) == RST_OK) {
                _exit(result.fault_count == 0 ? 0 : 2);
            }
            _exit(code == RST_ERR_CORRUPT ? 1 : 3);
        }
        int status;
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_true(WIFEXITED(status));
        assert_in_range(WEXITSTATUS(status), 0, 1);
        opened += WEXITSTATUS(status) == 0;
        remove_image(b.images[0].folder);
        b.image_count = 0;
        if (round % 10 == 9) { /* or nothing of the beginning would be on the disk */
            rst_error error;
            assert_ok(rst_store_sync(b.store, &error), error);
        }
    }
    print_message("%u of 150 were sound\n", opened);
    assert_in_range(opened, 5, 145);
    bench_close(&b);
}

/* ---------------------------------------------------------------- a disk that fails */

static void after_a_failed_sync_the_store_goes_back_to_the_last_good_one(void **state)
{
    (void)state;
    bench b;
    rst_error error;
    bench_open(&b, RST_DURABILITY_INTERVAL, 7);
    step(&b);
    assert_ok(rst_store_sync(b.store, &error), error);
    uint64_t good = b.newest;
    while (b.newest < good + 5) {
        step(&b);
    }
    disk_fail(EIO);
    assert_code(RST_ERR_IO, rst_store_sync(b.store, &error), error);
    assert_int_equal(error.system, EIO);
    disk_fail(0);
    /* Another sync may succeed without having written anything, so none is tried. */
    assert_code(RST_ERR_IO, rst_store_sync(b.store, &error), error);
    assert_code(RST_ERR_IO, rst_restart(b.store, "x", 1, 0, &error), error);
    fflush(NULL);
    pid_t pid = fork(); /* other processes are told, too */
    if (pid == 0) {
        rst_store *store;
        _exit(rst_store_open(b.path, 0, NULL, &store, &error) == RST_ERR_IO ? 0 : 1);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    assert_code(RST_ERR_IO, rst_store_close(b.store, &error), error);
    assert_ok(rst_store_open(b.path, 0, NULL, &b.store, &error), error);
    uint64_t digest = b.digests[good];
    note_state(&b);
    assert_int_equal(b.newest, good);
    assert_int_equal(b.digests[good], digest);
    support_assert_sound(b.store);
    step(&b);
    assert_ok(rst_store_sync(b.store, &error), error);
    bench_close(&b);
}

static void a_full_commit_that_cannot_be_synced_is_none(void **state)
{
    (void)state;
    bench b;
    rst_error error;
    bench_open(&b, RST_DURABILITY_FULL, 8);
    rst_record *record = b.worker.record;
    support_fill(record, 5, 2, 1, NULL, 0, NULL);
    assert_ok(rst_put(b.store, "a", 1, 0, record, 0, 0, &error), error);
    note_state(&b);
    uint64_t before = b.newest;
    disk_fail(EIO);
    support_fill(record, 5, 2, 2, NULL, 0, NULL);
    assert_code(RST_ERR_IO, rst_put(b.store, "a", 1, 1, record, 0, 0, &error), error);
    disk_fail(0);
    note_state(&b);
    assert_int_equal(b.newest, before);
    assert_ok(rst_put(b.store, "a", 1, 1, record, 0, 0, &error), error);
    support_assert_sound(b.store);
    bench_close(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(interval_keeps_everything_up_to_its_last_sync),
        cmocka_unit_test(full_keeps_everything_acknowledged),
        cmocka_unit_test(a_new_writer_keeps_what_a_killed_one_had_synced),
        cmocka_unit_test(a_killed_saver_does_not_cost_the_slot_that_counts),
        cmocka_unit_test(recovering_may_be_cut_too),
        cmocka_unit_test(memory_is_sound_or_refused),
        cmocka_unit_test(after_a_failed_sync_the_store_goes_back_to_the_last_good_one),
        cmocka_unit_test(a_full_commit_that_cannot_be_synced_is_none),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
