/* Nowhere to write to: a store at its capacity, a full file system, limits of the process.  Always
 * an ordinary error or a wait; never a signal, never a damaged store; and it goes on when there is
 * room. */
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support.h"

enum { NOT_PERMITTED = 77, INTERVAL_NEVER_MS = 1 << 30 };

/* Most of this is done in children, which die of what they should not: they assert nothing, but say
 * what is wrong and leave. */
#define MUST(holds)                                                                                \
    do {                                                                                           \
        if (!(holds)) {                                                                            \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #holds, last_error.message);    \
            _exit(1);                                                                              \
        }                                                                                          \
    } while (0)

static rst_error last_error;

/* True when it was permitted to do what it does. */
static bool in_child(void (*body)(const char *folder), const char *folder)
{
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        alarm(120);
        /* cmocka would catch them. */
        const int fatal[] = {SIGBUS, SIGSEGV, SIGILL, SIGFPE, SIGSYS};
        for (size_t i = 0; i < sizeof fatal / sizeof *fatal; i++) {
            signal(fatal[i], SIG_DFL);
        }
        body(folder);
        _exit(0);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    if (WIFSIGNALED(status)) {
        fail_msg("the child died of signal %d", WTERMSIG(status));
    }
    if (WEXITSTATUS(status) != NOT_PERMITTED) {
        assert_int_equal(WEXITSTATUS(status), 0);
        return true;
    }
    print_message("this user may not mount: nothing was tested\n");
    return false;
}

static rst_store *make(const char *path, uint64_t capacity, rst_durability durability)
{
    rst_create_options options = {
        .capacity_size = capacity,
        .durability = durability,
        .interval_ms = durability == RST_DURABILITY_INTERVAL ? INTERVAL_NEVER_MS : 0};
    rst_store *store = NULL;
    rst_store_open(path, RST_OPEN_CREATE, &options, &store, &last_error);
    return store;
}

/* About 50 KB: twenty fit into a megabyte. */
static int put(rst_store *store, unsigned number, int64_t timeout_ms)
{
    static rst_record *record;
    record = record ? record : rst_record_new();
    char id[16];
    int size = snprintf(id, sizeof id, "%u", number);
    support_fill(record, 200, 32, number, NULL, 0, NULL);
    return rst_put(store, id, (size_t)size, 0, record, 0, timeout_ms, &last_error);
}

static int release(rst_store *store, unsigned number)
{
    char id[16];
    int size = snprintf(id, sizeof id, "%u", number);
    return rst_release(store, id, (size_t)size, 0, &last_error);
}

static unsigned fill_up(rst_store *store)
{
    unsigned number = 0;
    int code;
    while ((code = put(store, number, 0)) == RST_OK) {
        number++;
    }
    MUST(code == RST_ERR_FULL);
    return number;
}

static bool sound(rst_store *store)
{
    rst_verify_result result;
    return rst_store_verify(store, NULL, &result, &last_error) == RST_OK && result.fault_count == 0;
}

/* ---------------------------------------------------------------- at capacity */

static void room_comes_with_the_last_release(const char *folder)
{
    for (int d = RST_DURABILITY_MEMORY; d <= RST_DURABILITY_FULL; d++) {
        char path[300];
        snprintf(path, sizeof path, "%s/%d", folder, d);
        rst_store *store = make(path, RST_CAPACITY_MIN, (rst_durability)d);
        MUST(store);
        unsigned count = fill_up(store);
        MUST(count >= 10);
        for (unsigned round = 0; round < 200; round++) {
            MUST(release(store, round) == RST_OK);
            /* Nobody commits or syncs any more, and it must not even wait. */
            MUST(put(store, round + count, 0) == RST_OK);
        }
        MUST(sound(store));
        MUST(rst_store_close(store, &last_error) == RST_OK);
    }
}

static void a_put_at_capacity_needs_but_one_release(void **state)
{
    (void)state;
    char *folder = support_make_folder();
    in_child(room_comes_with_the_last_release, folder);
    support_remove_folder(folder);
}

/* Small changes at capacity take pages beyond it, until those they free come back with a sync. */
static void small_changes_go_on(const char *folder)
{
    rst_store *store = make(support_path(folder, "s"), RST_CAPACITY_MIN, RST_DURABILITY_INTERVAL);
    MUST(store);
    unsigned count = fill_up(store);
    rst_outcome outcome = {RST_STATUS_COMPLETED, 0, RST_NO_INDEX, RST_NO_INDEX};
    for (unsigned i = 0; i < 2000; i++) {
        outcome.reward = i;
        MUST(rst_seal(store, "0", 1, &outcome, RST_CHANGE_REPLACE, &last_error) == RST_OK);
    }
    rst_lease leases[4];
    size_t leased;
    MUST(rst_consumer_create(store, "c", 1, RST_START_OLDEST, NULL, &last_error) == RST_OK);
    for (unsigned i = 0; i < 500; i++) {
        MUST(rst_consumer_take(store, "c", 1, 4, 0, 0, leases, &leased, &last_error) == RST_OK);
        MUST(rst_consumer_return(store, "c", 1, leases, leased, &last_error) == RST_OK);
    }
    for (unsigned i = 1; i < count; i++) {
        MUST(release(store, i) == RST_OK);
    }
    MUST(sound(store));
}

static void small_changes_at_capacity_go_on_between_syncs(void **state)
{
    (void)state;
    char *folder = support_make_folder();
    in_child(small_changes_go_on, folder);
    support_remove_folder(folder);
}

static void read_slowly(const char *path)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    rst_store *store;
    MUST(rst_store_open(path, RST_OPEN_READ_ONLY, NULL, &store, &last_error) == RST_OK);
    for (;;) {
        rst_snapshot *now;
        MUST(rst_snapshot_open(store, &now, &last_error) == RST_OK);
        usleep(50000);
        rst_snapshot_close(now);
    }
}

/* The same beside somebody whose snapshots hold what is freed. */
static void small_changes_beside_readers(const char *folder)
{
    const char *path = support_path(folder, "s");
    rst_store *store = make(path, RST_CAPACITY_MIN, RST_DURABILITY_MEMORY);
    MUST(store);
    unsigned count = fill_up(store);
    pid_t reader = fork();
    if (reader == 0) {
        read_slowly(path);
    }
    rst_outcome outcome = {RST_STATUS_COMPLETED, 0, RST_NO_INDEX, RST_NO_INDEX};
    rst_lease leases[4];
    size_t leased;
    MUST(rst_consumer_create(store, "c", 1, RST_START_OLDEST, NULL, &last_error) == RST_OK);
    for (unsigned i = 0; i < 300; i++) {
        outcome.reward = i;
        MUST(rst_seal(store, "0", 1, &outcome, RST_CHANGE_REPLACE, &last_error) == RST_OK);
        MUST(rst_consumer_take(store, "c", 1, 4, 0, 0, leases, &leased, &last_error) == RST_OK);
        MUST(rst_consumer_return(store, "c", 1, leases, leased, &last_error) == RST_OK);
    }
    for (unsigned i = 1; i < count; i++) {
        MUST(release(store, i) == RST_OK);
    }
    kill(reader, SIGKILL);
    waitpid(reader, NULL, 0);
    MUST(sound(store));
}

static void small_changes_at_capacity_wait_for_readers(void **state)
{
    (void)state;
    char *folder = support_make_folder();
    in_child(small_changes_beside_readers, folder);
    support_remove_folder(folder);
}

/* Another process that may write pins the last sync too, and must move for this one. */
static void others_give_way(const char *folder)
{
    const char *path = support_path(folder, "s");
    rst_store *store = make(path, RST_CAPACITY_MIN, RST_DURABILITY_INTERVAL);
    MUST(store && rst_store_close(store, &last_error) == RST_OK);
    pid_t idle = fork(); /* beside no thread, which may hold a lock of the sanitizers' malloc */
    if (idle == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        rst_store *own;
        MUST(rst_store_open(path, 0, NULL, &own, &last_error) == RST_OK);
        MUST(put(own, 9000, 0) == RST_OK);
        for (;;) {
            pause();
        }
    }
    MUST(rst_store_open(path, 0, NULL, &store, &last_error) == RST_OK);
    rst_session session;
    for (int code = RST_ERR_NOT_FOUND; code == RST_ERR_NOT_FOUND;) {
        rst_snapshot *now;
        MUST(rst_snapshot_open(store, &now, &last_error) == RST_OK);
        code = rst_session_get(now, "9000", 4, &session, &last_error);
        rst_snapshot_close(now);
        usleep(1000);
    }
    unsigned count = fill_up(store);
    for (unsigned round = 0; round < 100; round++) {
        MUST(release(store, round) == RST_OK);
        MUST(put(store, round + count, 60000) == RST_OK);
    }
    kill(idle, SIGKILL);
    waitpid(idle, NULL, 0);
    /* Dead, it keeps nothing either. */
    for (unsigned round = 100; round < 200; round++) {
        MUST(release(store, round) == RST_OK);
        MUST(put(store, round + count, 60000) == RST_OK);
    }
    MUST(sound(store));
}

static void an_idle_writer_does_not_keep_released_pages(void **state)
{
    (void)state;
    char *folder = support_make_folder();
    in_child(others_give_way, folder);
    support_remove_folder(folder);
}

/* ---------------------------------------------------------------- full file systems */

static void own_mounts(void)
{
    if ((unshare(CLONE_NEWNS) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) ||
        mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0) {
        _exit(NOT_PERMITTED);
    }
}

static void mount_tmpfs(const char *at, unsigned megabytes)
{
    char options[32];
    snprintf(options, sizeof options, "size=%um", megabytes);
    if (mkdir(at, 0700) != 0 || mount("none", at, "tmpfs", 0, options) != 0) {
        _exit(NOT_PERMITTED);
    }
}

static void mount_ext4(const char *folder, const char *at, unsigned megabytes)
{
    char command[1200];
    snprintf(command, sizeof command,
             "truncate -s %uM '%s/image' && mkfs.ext4 -q -m 0 '%s/image' && mkdir '%s' && "
             "mount -o loop '%s/image' '%s'",
             megabytes, folder, folder, at, folder, at);
    if (system(command) != 0) {
        _exit(NOT_PERMITTED);
    }
}

/* Up to the last byte. */
static void fill_file_system(const char *at)
{
    char path[320];
    snprintf(path, sizeof path, "%s/filler", at);
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    static const char block[65536];
    for (size_t size = sizeof block; size > 0;) {
        ssize_t written = write(fd, block, size);
        if (written < 0 && size > 1) {
            size /= 2;
        } else if (written < 0) {
            break;
        }
    }
    MUST(fsync(fd) == 0);
    close(fd);
}

static void remove_filler(const char *at)
{
    char path[320];
    snprintf(path, sizeof path, "%s/filler", at);
    MUST(unlink(path) == 0);
}

static bool is_empty(const char *at)
{
    char command[400];
    snprintf(command, sizeof command, "test -z \"$(ls -A '%s' | grep -v lost+found)\"", at);
    return system(command) == 0;
}

/* A container's usual /dev/shm, and the default capacity of 1 GiB. */
static void small_shared_memory(const char *folder)
{
    char at[300];
    snprintf(at, sizeof at, "%s/shm", folder);
    own_mounts();
    mount_tmpfs(at, 64);
    char path[320];
    snprintf(path, sizeof path, "%s/s", at);
    MUST(!make(path, 0, 0));
    MUST(last_error.code == RST_ERR_NO_SPACE && strstr(last_error.message, "64 MB"));
    MUST(is_empty(at));
    rst_store *store = make(path, 48 << 20, 0);
    MUST(store);
    fill_file_system(at);
    unsigned count = fill_up(store);
    MUST(count > 900);
    for (unsigned i = 0; i < count; i++) {
        MUST(release(store, i) == RST_OK);
    }
    MUST(fill_up(store) > 700);
    MUST(sound(store));
    snprintf(path, sizeof path, "%s/copy", at);
    MUST(rst_store_copy(store, path, 0, &last_error) == RST_ERR_NO_SPACE);
    MUST(access(path, F_OK) != 0);
    snprintf(path, sizeof path, "%s/second", at);
    MUST(!make(path, RST_CAPACITY_MIN, 0) && last_error.code == RST_ERR_NO_SPACE);
    MUST(rst_store_close(store, &last_error) == RST_OK);
}

static void a_small_shared_memory_is_an_ordinary_error(void **state)
{
    (void)state;
    char *folder = support_make_folder();
    bool done = in_child(small_shared_memory, folder);
    support_remove_folder(folder);
    if (!done) {
        skip();
    }
}

static void work_on_full_disk(rst_store *store)
{
    unsigned count = fill_up(store);
    for (unsigned i = 0; i < count; i++) {
        MUST(release(store, i) == RST_OK);
        if (i % 3 == 0) {
            MUST(rst_store_sync(store, &last_error) == RST_OK);
        }
    }
    MUST(fill_up(store) > 0);
    MUST(sound(store));
}

static void full_disk(const char *folder)
{
    char at[300];
    snprintf(at, sizeof at, "%s/disk", folder);
    own_mounts();
    mount_ext4(folder, at, 64);
    char path[320];
    rst_store *stores[3];
    for (int d = 0; d < 3; d++) {
        snprintf(path, sizeof path, "%s/%d", at, d);
        stores[d] = make(path, RST_CAPACITY_MIN, (rst_durability)(RST_DURABILITY_MEMORY + d));
        MUST(stores[d]);
    }
    fill_file_system(at);
    for (int d = 0; d < 3; d++) {
        work_on_full_disk(stores[d]);
    }
    snprintf(path, sizeof path, "%s/new", at);
    for (int d = 0; d < 3; d++) {
        MUST(!make(path, RST_CAPACITY_MIN, (rst_durability)(RST_DURABILITY_MEMORY + d)));
        MUST(last_error.code == RST_ERR_NO_SPACE);
        MUST(access(path, F_OK) != 0);
    }
    MUST(rst_store_copy(stores[0], path, 0, &last_error) == RST_ERR_NO_SPACE);
    MUST(access(path, F_OK) != 0);
    for (int d = 0; d < 3; d++) { /* closed and opened on a full disk */
        snprintf(path, sizeof path, "%s/%d", at, d);
        MUST(rst_store_close(stores[d], &last_error) == RST_OK);
        MUST(rst_store_open(path, 0, NULL, &stores[d], &last_error) == RST_OK);
        MUST(sound(stores[d]));
    }
    remove_filler(at);
    snprintf(path, sizeof path, "%s/new", at);
    MUST(make(path, RST_CAPACITY_MIN, 0));
}

static void a_store_goes_on_while_its_disk_is_full(void **state)
{
    (void)state;
    char *folder = support_make_folder();
    bool done = in_child(full_disk, folder);
    support_remove_folder(folder);
    if (!done) {
        skip();
    }
}

int __real_fallocate(int fd, int mode, off_t offset, off_t length);

/* A copy with holes instead of zeros: filling one through the map of a full disk is a SIGBUS. */
static void sparse_copy(const char *folder)
{
    char at[300];
    snprintf(at, sizeof at, "%s/disk", folder);
    own_mounts();
    if (strstr(folder, "tmpfs")) {
        mount_tmpfs(at, 40);
    } else {
        mount_ext4(folder, at, 40);
    }
    char source[320];
    char path[320];
    snprintf(source, sizeof source, "%s/source", folder);
    snprintf(path, sizeof path, "%s/copy", at);
    rst_store *store = make(source, 8 << 20, RST_DURABILITY_MEMORY);
    MUST(store);
    for (unsigned i = 0; i < 10; i++) {
        MUST(put(store, i, 0) == RST_OK);
    }
    MUST(rst_store_close(store, &last_error) == RST_OK);
    char command[800];
    snprintf(command, sizeof command, "cp -r --sparse=always '%s' '%s'", source, path);
    MUST(system(command) == 0);
    fill_file_system(at);
    MUST(rst_store_open(path, 0, NULL, &store, &last_error) == RST_ERR_NO_SPACE);
    /* Readers write, too: to LMDB's lock file. */
    MUST(rst_store_open(path, RST_OPEN_READ_ONLY, NULL, &store, &last_error) == RST_ERR_NO_SPACE);
    remove_filler(at);
    MUST(rst_store_open(path, 0, NULL, &store, &last_error) == RST_OK);
    fill_file_system(at); /* every hole is filled now, so this harms nobody */
    for (unsigned i = 0; i < 10; i++) {
        MUST(release(store, i) == RST_OK);
    }
    MUST(fill_up(store) > 100);
    MUST(sound(store));
    MUST(rst_store_close(store, &last_error) == RST_OK);
    char guard[330];
    snprintf(guard, sizeof guard, "%s/guard.bin", path);
    remove_filler(at);
    int fd = open(guard, O_RDWR | O_CLOEXEC);
    MUST(__real_fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 8192, 4096) == 0);
    close(fd);
    fill_file_system(at);
    MUST(rst_store_open(path, 0, NULL, &store, &last_error) == RST_ERR_NO_SPACE);
    remove_filler(at);
    MUST(rst_store_open(path, 0, NULL, &store, &last_error) == RST_OK);
}

static void a_sparse_copy_on_a_full_disk_is_refused_for_writing(void **state)
{
    (void)state;
    char *folder = support_make_folder();
    assert_int_equal(mkdir(support_path(folder, "tmpfs"), 0700), 0);
    bool done =
        in_child(sparse_copy, folder) && in_child(sparse_copy, support_path(folder, "tmpfs"));
    support_remove_folder(folder);
    if (!done) {
        skip();
    }
}

/* ---------------------------------------------------------------- limits of the process */

static void limit(unsigned what, rlim_t size)
{
    struct rlimit now;
    MUST(getrlimit(what, &now) == 0);
    now.rlim_cur = size;
    MUST(setrlimit(what, &now) == 0);
}

static void small_limits(const char *folder)
{
    const char *path = support_path(folder, "s");
    rst_store *store = make(path, 8 << 20, RST_DURABILITY_INTERVAL);
    MUST(store);
    limit(RLIMIT_FSIZE, 65536); /* an open store needs no more file */
    unsigned count = fill_up(store);
    for (unsigned i = 0; i < count; i++) {
        MUST(release(store, i) == RST_OK);
    }
    MUST(rst_store_close(store, &last_error) == RST_OK);
    for (unsigned flags = 0; flags < 2; flags++) {
        int code = rst_store_open(path, flags, NULL, &store, &last_error);
        MUST(code == (flags ? RST_OK : RST_ERR_NO_SPACE));
        MUST(!flags || rst_store_close(store, &last_error) == RST_OK);
    }
    MUST(!make(support_path(folder, "t"), 8 << 20, 0) && last_error.code == RST_ERR_NO_SPACE);
    MUST(access(support_path(folder, "t"), F_OK) != 0);
    limit(RLIMIT_FSIZE, RLIM_INFINITY);
    limit(RLIMIT_NOFILE, 3);
    MUST(rst_store_open(path, 0, NULL, &store, &last_error) == RST_ERR_IO);
    MUST(rst_store_open(path, RST_OPEN_READ_ONLY, NULL, &store, &last_error) == RST_ERR_IO);
    limit(RLIMIT_NOFILE, 1024);
    MUST(rst_store_open(path, 0, NULL, &store, &last_error) == RST_OK);
    MUST(sound(store));
    MUST(rst_store_close(store, &last_error) == RST_OK);
}

static void limits_of_files_are_ordinary_errors(void **state)
{
    (void)state;
    char *folder = support_make_folder();
    in_child(small_limits, folder);
    support_remove_folder(folder);
}

/* Any limit of the address space, from what this program has to what the store needs. */
static void small_address_space(const char *folder)
{
    const char *path = support_path(folder, "s");
    rst_store *store = make(path, 64 << 20, RST_DURABILITY_INTERVAL);
    MUST(store);
    MUST(put(store, 0, 0) == RST_OK);
    MUST(rst_store_close(store, &last_error) == RST_OK);
    unsigned refused = 0;
    unsigned opened = 0;
    for (rlim_t size = 1 << 20; size < 400 << 20; size += size / 16) {
        for (unsigned flags = 0; flags < 2; flags++) {
            limit(RLIMIT_AS, size);
            int code = rst_store_open(path, flags, NULL, &store, &last_error);
            if (!code) {
                code = flags ? RST_OK : put(store, 1, 0);
                limit(RLIMIT_AS, RLIM_INFINITY);
                MUST(rst_store_close(store, &last_error) == RST_OK);
                opened++;
            }
            limit(RLIMIT_AS, RLIM_INFINITY);
            MUST(code == RST_OK || code == RST_ERR_MEMORY);
            refused += code != RST_OK;
        }
    }
    MUST(opened > 5 && refused > 5);
    const rst_create_options large = {.capacity_size = UINT64_C(1) << 30};
    limit(RLIMIT_AS, 512 << 20);
    MUST(rst_store_open(support_path(folder, "large"), RST_OPEN_CREATE, &large, &store,
                        &last_error) == RST_ERR_MEMORY);
    limit(RLIMIT_AS, RLIM_INFINITY);
    MUST(strstr(last_error.message, "ulimit -v"));
    MUST(rst_store_open(path, 0, NULL, &store, &last_error) == RST_OK);
    MUST(sound(store));
}

static void a_limit_of_the_address_space_is_an_ordinary_error(void **state)
{
    (void)state;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    print_message("a sanitizer needs an address space without limit: nothing was tested\n");
    skip();
#endif
    char *folder = support_make_folder();
    in_child(small_address_space, folder);
    support_remove_folder(folder);
}

/* ---------------------------------------------------------------- quota */

static int refuse_with;

int __wrap_fallocate(int fd, int mode, off_t offset, off_t length);
int __wrap_fallocate(int fd, int mode, off_t offset, off_t length)
{
    if (refuse_with && offset > 0) {
        errno = refuse_with;
        return -1;
    }
    return __real_fallocate(fd, mode, offset, refuse_with ? 4096 : length);
}

/* Kernels without quotas are common, so it is the call that refuses here. */
static void a_refused_allocation_leaves_nothing(void **state)
{
    (void)state;
    char *folder = support_make_folder();
    const struct {
        int system;
        int code;
    } cases[] = {{EDQUOT, RST_ERR_NO_SPACE},
                 {ENOSPC, RST_ERR_NO_SPACE},
                 {EFBIG, RST_ERR_NO_SPACE},
                 {EOPNOTSUPP, RST_ERR_IO},
                 {EIO, RST_ERR_IO}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        rst_store *store;
        rst_error error;
        rst_create_options options = {.capacity_size = UINT64_C(300) << 20}; /* several pieces */
        const char *path = support_path(folder, "s");
        refuse_with = cases[i].system;
        int code = rst_store_open(path, RST_OPEN_CREATE, &options, &store, &error);
        refuse_with = 0;
        assert_code(cases[i].code, code, error);
        assert_int_equal(error.system, cases[i].system);
        assert_true(is_empty(folder));
    }
    support_remove_folder(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_put_at_capacity_needs_but_one_release),
        cmocka_unit_test(small_changes_at_capacity_go_on_between_syncs),
        cmocka_unit_test(small_changes_at_capacity_wait_for_readers),
        cmocka_unit_test(an_idle_writer_does_not_keep_released_pages),
        cmocka_unit_test(a_small_shared_memory_is_an_ordinary_error),
        cmocka_unit_test(a_store_goes_on_while_its_disk_is_full),
        cmocka_unit_test(a_sparse_copy_on_a_full_disk_is_refused_for_writing),
        cmocka_unit_test(limits_of_files_are_ordinary_errors),
        cmocka_unit_test(a_limit_of_the_address_space_is_an_ordinary_error),
        cmocka_unit_test(a_refused_allocation_leaves_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
