/* Power cuts: whatever of the unsynced writes has reached the disk, in whatever order, the store
 * opens, is sound, and holds what its durability promises. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "power_disk.h"
#include "power_work.h"
#include "store/guard.h"
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
    uint64_t seed;
    unsigned odds; /* of an image at an event: one in so many */
    image images[IMAGES_MAX];
    unsigned image_count;
    uint64_t digests[HISTORY]; /* of transactions; 0 where it is not known */
    uint64_t newest;
    unsigned tried;  /* images */
    unsigned broken; /* of these: LMDB alone would have been led astray */
    unsigned refused;
} bench;

static bench *the_bench;

/* What the store's processes take for safely on the disk. */
static uint64_t promised(const bench *b)
{
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

static void maybe_cut(void)
{
    if (pthread_mutex_trylock(&images_lock) == 0) {
        if (support_random(&the_bench->seed) % the_bench->odds == 0) {
            cut_with_lock(the_bench);
        }
        pthread_mutex_unlock(&images_lock);
    }
}

/* What the store holds now is what its newest transaction holds. */
static void note_state(bench *b)
{
    rst_error error;
    uint64_t digest;
    assert_ok(power_digest(b->store, &digest, &b->newest, &error), error);
    assert_true(b->newest < HISTORY);
    b->digests[b->newest] = digest;
    b->acknowledged = b->newest;
}

static void bench_open(bench *b, rst_durability durability, uint64_t seed)
{
    memset(b, 0, sizeof *b);
    pthread_mutex_init(&images_lock, NULL); /* a test that failed may have left it locked */
    the_boot = 1;
    the_bench = b;
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
        maybe_cut();
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
    work_and_cut(RST_DURABILITY_INTERVAL, cuts_wanted(2000), 1);
}

static void full_keeps_everything_acknowledged(void **state)
{
    (void)state;
    work_and_cut(RST_DURABILITY_FULL, cuts_wanted(1000), 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(interval_keeps_everything_up_to_its_last_sync),
        cmocka_unit_test(full_keeps_everything_acknowledged),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
