/* What the first opening after a restart of the machine does, by durability and by who opens; and
 * guard.bin, which tells it. */
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "store/durability/guard.h"
#include "support.h"

enum { NOBODY = 65534, INTERVAL_NEVER_MS = 1 << 30 };

static uint8_t the_boot = 1;

void __wrap_rst_boot_id(uint8_t out[RST_BOOT_ID_SIZE]);
void __wrap_rst_boot_id(uint8_t out[RST_BOOT_ID_SIZE])
{
    memset(out, the_boot, RST_BOOT_ID_SIZE);
}

/* What a store that is made does to folders, in order: "sync NAME", "rename NAME". */
static char steps[512];

int __real_rst_sync_folder(const char *folder, rst_error *error);
int __wrap_rst_sync_folder(const char *folder, rst_error *error);
int __wrap_rst_sync_folder(const char *folder, rst_error *error)
{
    const char *name = strrchr(folder, '/') ? strrchr(folder, '/') + 1 : folder;
    strcat(strcat(steps, strstr(name, ".new-") ? "sync new" : "sync parent"), ", ");
    return __real_rst_sync_folder(folder, error);
}

int __real_rename(const char *from, const char *to);
int __wrap_rename(const char *from, const char *to);
int __wrap_rename(const char *from, const char *to)
{
    strcat(steps, "rename, ");
    return __real_rename(from, to);
}

typedef struct fixture {
    char *folder;
    char path[256];
    rst_store *store;
    rst_record *record;
    rst_error error;
} fixture;

static int setup(void **state)
{
    fixture *f = calloc(1, sizeof *f);
    the_boot = 1;
    f->folder = support_make_folder();
    snprintf(f->path, sizeof f->path, "%s/store", f->folder);
    f->record = rst_record_new();
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    fixture *f = *state;
    if (f->store) {
        rst_store_close(f->store, &f->error);
    }
    rst_record_free(f->record);
    support_remove_folder(f->folder);
    free(f);
    return 0;
}

static void create(fixture *f, rst_durability durability, uint32_t interval_ms)
{
    rst_create_options options = {
        .capacity_size = RST_CAPACITY_MIN, .durability = durability, .interval_ms = interval_ms};
    assert_ok(rst_store_open(f->path, RST_OPEN_CREATE, &options, &f->store, &f->error), f->error);
}

static void close_store(fixture *f)
{
    assert_ok(rst_store_close(f->store, &f->error), f->error);
    f->store = NULL;
}

static int open_store(fixture *f, unsigned flags)
{
    return rst_store_open(f->path, flags, NULL, &f->store, &f->error);
}

static void put(fixture *f, uint32_t turn)
{
    support_fill(f->record, 30, 8, turn, NULL, 0, NULL);
    assert_ok(rst_put(f->store, "a", 1, turn, f->record, 0, 0, &f->error), f->error);
}

static uint32_t turns(fixture *f)
{
    rst_snapshot *now;
    rst_session s = {.turn_count = 0};
    assert_ok(rst_snapshot_open(f->store, &now, &f->error), f->error);
    rst_session_get(now, "a", 1, &s, NULL);
    rst_snapshot_close(now);
    return s.turn_count;
}

/* The slot that counts, as the next boot would find it. */
static rst_guard_slot read_slot(const fixture *f)
{
    rst_guard_slot slots[2];
    int fd = open(support_path(f->path, "guard.bin"), O_RDONLY | O_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(pread(fd, &slots[0], sizeof slots[0], 0), sizeof slots[0]);
    assert_int_equal(pread(fd, &slots[1], sizeof slots[1], 4096), sizeof slots[1]);
    close(fd);
    return slots[slots[1].serial > slots[0].serial];
}

static uint64_t last_transaction(fixture *f)
{
    rst_stat stat;
    assert_ok(rst_store_stat(f->store, &stat, &f->error), f->error);
    return stat.last_transaction;
}

/* Change a byte in the middle of every large value. */
static void damage_values(const fixture *f)
{
    int fd = open(support_path(f->path, "data.mdb"), O_RDWR | O_CLOEXEC);
    unsigned char page[4096];
    for (off_t at = 2 * 4096; pread(fd, page, sizeof page, at) == (ssize_t)sizeof page;
         at += 4096) {
        if (page[10] == 4 && memcmp(page + 16, "RSTT", 4) == 0) {
            page[200] ^= 1;
            assert_int_equal(pwrite(fd, page, sizeof page, at), sizeof page);
        }
    }
    close(fd);
}

/* ---------------------------------------------------------------- by durability */

static void memory_is_read_through_once(void **state)
{
    fixture *f = *state;
    create(f, RST_DURABILITY_MEMORY, 0);
    put(f, 0);
    close_store(f);
    the_boot = 2;
    assert_ok(open_store(f, 0), f->error); /* all is there, as after an orderly shutdown */
    assert_int_equal(turns(f), 1);
    put(f, 1);
    close_store(f);
    damage_values(f);
    assert_ok(open_store(f, 0), f->error); /* the same boot: nobody looks */
    close_store(f);
    the_boot = 3;
    for (unsigned flags = 0; flags < 2; flags++) {
        assert_code(RST_ERR_CORRUPT, open_store(f, flags), f->error);
        assert_non_null(strstr(f->error.message, "memory promises nothing"));
        assert_non_null(strstr(f->error.message, "turn"));
    }
}

static void interval_goes_back_to_the_last_sync_only_after_a_restart(void **state)
{
    fixture *f = *state;
    create(f, RST_DURABILITY_INTERVAL, INTERVAL_NEVER_MS);
    put(f, 0);
    assert_ok(rst_store_sync(f->store, &f->error), f->error);
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) { /* opens, commits, and is gone before any sync */
        rst_store *own;
        support_fill(f->record, 30, 8, 1, NULL, 0, NULL);
        int code = rst_store_open(f->path, 0, NULL, &own, &f->error);
        code = code ? code : rst_put(own, "a", 1, 1, f->record, 0, 0, &f->error);
        _exit(code);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    assert_int_equal(turns(f), 2);
    /* As if this process, too, had ended there: a copy of the files. */
    char command[700];
    snprintf(command, sizeof command, "cp -a '%s' '%s-cut'", f->path, f->path);
    assert_int_equal(system(command), 0);
    close_store(f);
    strcat(f->path, "-cut");
    the_boot = 2;
    assert_ok(open_store(f, RST_OPEN_READ_ONLY), f->error); /* a reader may do it, too */
    assert_int_equal(turns(f), 1);
    close_store(f);
    assert_ok(open_store(f, 0), f->error);
    assert_int_equal(turns(f), 1);
    put(f, 1);
    support_assert_sound(f->store);
}

static void closing_syncs(void **state)
{
    fixture *f = *state;
    create(f, RST_DURABILITY_INTERVAL, INTERVAL_NEVER_MS);
    put(f, 0);
    uint64_t newest = last_transaction(f);
    assert_true(read_slot(f).transaction < newest);
    close_store(f);
    assert_int_equal(read_slot(f).transaction, newest);
    the_boot = 2;
    assert_ok(open_store(f, 0), f->error);
    assert_int_equal(turns(f), 1);
}

static void the_interval_passes_by_itself(void **state)
{
    fixture *f = *state;
    create(f, RST_DURABILITY_INTERVAL, 5);
    for (uint32_t turn = 0; turn < 3; turn++) {
        put(f, turn);
        uint64_t newest = last_transaction(f);
        struct timespec pause = {.tv_nsec = 1000000};
        int waited = 0;
        while (read_slot(f).transaction < newest && waited++ < 30000) {
            nanosleep(&pause, NULL);
        }
        assert_true(read_slot(f).transaction >= newest);
    }
}

static void a_durable_store_appears_when_it_is_on_the_disk(void **state)
{
    fixture *f = *state;
    for (int d = RST_DURABILITY_MEMORY; d <= RST_DURABILITY_FULL; d++) {
        steps[0] = '\0';
        snprintf(f->path, sizeof f->path, "%s/store-%d", f->folder, d);
        create(f, (rst_durability)d, 0);
        assert_string_equal(steps, d == RST_DURABILITY_MEMORY ? "rename, "
                                                              : "sync new, rename, sync parent, ");
        steps[0] = '\0';
        char copy[300];
        snprintf(copy, sizeof copy, "%s-copy", f->path);
        assert_ok(rst_store_copy(f->store, copy, 0, &f->error), f->error);
        assert_string_equal(steps, d == RST_DURABILITY_MEMORY ? "rename, "
                                                              : "sync new, rename, sync parent, ");
        close_store(f);
    }
}

/* ---------------------------------------------------------------- guard.bin */

static void write_guard(const fixture *f, unsigned char byte)
{
    unsigned char bytes[12288];
    memset(bytes, byte, sizeof bytes);
    int fd = open(support_path(f->path, "guard.bin"), O_WRONLY | O_CLOEXEC);
    assert_int_equal(write(fd, bytes, sizeof bytes), sizeof bytes);
    close(fd);
}

static void without_its_guard_a_store_is_read_through(void **state)
{
    fixture *f = *state;
    for (int d = RST_DURABILITY_MEMORY; d <= RST_DURABILITY_FULL; d++) {
        snprintf(f->path, sizeof f->path, "%s/store-%d", f->folder, d);
        create(f, (rst_durability)d, 0);
        put(f, 0);
        close_store(f);
        for (unsigned flags = 0; flags < 2; flags++) {
            assert_int_equal(unlink(support_path(f->path, "guard.bin")), 0);
            assert_ok(open_store(f, flags), f->error);
            assert_int_equal(turns(f), 1);
            close_store(f);
            write_guard(f, 0xFF);
            assert_ok(open_store(f, flags), f->error);
            close_store(f);
        }
        damage_values(f);
        assert_ok(open_store(f, 0), f->error);
        close_store(f);
        assert_int_equal(unlink(support_path(f->path, "guard.bin")), 0);
        assert_code(RST_ERR_CORRUPT, open_store(f, 0), f->error);
        write_guard(f, 0);
        assert_code(RST_ERR_CORRUPT, open_store(f, 0), f->error);
    }
}

static void the_guard_of_another_store_is_refused(void **state)
{
    fixture *f = *state;
    create(f, RST_DURABILITY_INTERVAL, 0);
    put(f, 0);
    close_store(f);
    char first[256];
    memcpy(first, f->path, sizeof first);
    snprintf(f->path, sizeof f->path, "%s/other", f->folder);
    create(f, RST_DURABILITY_INTERVAL, 0);
    put(f, 0);
    put(f, 1);
    close_store(f);
    char command[700];
    snprintf(command, sizeof command, "cp '%s/guard.bin' '%s/guard.bin'", first, f->path);
    assert_int_equal(system(command), 0);
    assert_code(RST_ERR_CORRUPT, open_store(f, 0), f->error);
    assert_non_null(strstr(f->error.message, "another store"));
    struct stat info;
    assert_int_equal(truncate(support_path(f->path, "guard.bin"), 100), 0);
    assert_code(RST_ERR_CORRUPT, open_store(f, 0), f->error);
    assert_int_equal(stat(support_path(f->path, "guard.bin"), &info), 0);
    assert_int_equal(info.st_size, 100);
}

/* ---------------------------------------------------------------- by who opens */

/* Open read-only as a user who may read the files and write only LMDB's lock file. */
static int open_as_nobody(fixture *f)
{
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        rst_store *store;
        if (setgroups(0, NULL) != 0 || setgid(NOBODY) != 0 || setuid(NOBODY) != 0) {
            _exit(200);
        }
        _exit(rst_store_open(f->path, RST_OPEN_READ_ONLY, NULL, &store, NULL));
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static void who_may_only_read_waits_for_an_owner_after_a_restart(void **state)
{
    fixture *f = *state;
    if (geteuid() != 0) {
        print_message("only root can become another user: nothing was tested\n");
        skip();
    }
    create(f, RST_DURABILITY_INTERVAL, INTERVAL_NEVER_MS);
    put(f, 0);
    close_store(f);
    assert_int_equal(chmod(f->folder, 0755), 0);
    assert_int_equal(chmod(f->path, 0755), 0);
    assert_int_equal(chmod(support_path(f->path, "data.mdb"), 0644), 0);
    assert_int_equal(chmod(support_path(f->path, "guard.bin"), 0644), 0);
    assert_int_equal(chmod(support_path(f->path, "lock.mdb"), 0666), 0);
    assert_int_equal(open_as_nobody(f), RST_OK);
    the_boot = 2;
    assert_int_equal(open_as_nobody(f), RST_ERR_PERMISSION);
    assert_ok(open_store(f, 0), f->error);
    assert_int_equal(open_as_nobody(f), RST_OK);
    close_store(f);
    assert_int_equal(open_as_nobody(f), RST_OK);
    assert_int_equal(chmod(support_path(f->path, "guard.bin"), 0600), 0);
    assert_int_equal(open_as_nobody(f), RST_ERR_PERMISSION);
}

static void another_kernel_is_told_apart_while_the_store_is_open(void **state)
{
    fixture *f = *state;
    create(f, RST_DURABILITY_MEMORY, 0);
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        the_boot = 2;
        rst_store *own;
        int code = rst_store_open(f->path, 0, NULL, &own, &f->error);
        _exit(code == RST_ERR_BUSY && strstr(f->error.message, "kernel") ? 0 : 1);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(memory_is_read_through_once),
        TEST(interval_goes_back_to_the_last_sync_only_after_a_restart),
        TEST(closing_syncs),
        TEST(the_interval_passes_by_itself),
        TEST(a_durable_store_appears_when_it_is_on_the_disk),
        TEST(without_its_guard_a_store_is_read_through),
        TEST(the_guard_of_another_store_is_refused),
        TEST(who_may_only_read_waits_for_an_owner_after_a_restart),
        TEST(another_kernel_is_told_apart_while_the_store_is_open),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
