/* Containers: processes of other PID namespaces, and read-only mounts.  Needs to be root, or user
 * namespaces that anybody may make; says so where neither is there. */
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support.h"

enum { NOT_PERMITTED = 77 };

typedef struct fixture {
    char *folder;
    char path[256];
    rst_store *store;
    rst_record *record;
    rst_error error;
} fixture;

static int setup(void **state)
{
    signal(SIGPIPE, SIG_IGN);
    fixture *f = calloc(1, sizeof *f);
    f->folder = support_make_folder();
    snprintf(f->path, sizeof f->path, "%s/store", f->folder);
    f->record = rst_record_new();
    support_fill(f->record, 20, 4, 1, NULL, 0, NULL);
    rst_create_options options = {.capacity_size = RST_CAPACITY_MIN};
    assert_ok(rst_store_open(f->path, RST_OPEN_CREATE, &options, &f->store, &f->error), f->error);
    assert_ok(rst_put(f->store, "a", 1, 0, f->record, 0, 0, &f->error), f->error);
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    fixture *f = *state;
    rst_store_close(f->store, &f->error);
    rst_record_free(f->record);
    support_remove_folder(f->folder);
    free(f);
    return 0;
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

static bool leave(int namespaces)
{
    return unshare(namespaces) == 0 || unshare(CLONE_NEWUSER | namespaces) == 0;
}

/* ---------------------------------------------------------------- PID namespaces */

typedef struct container {
    pid_t pid;  /* its parent, which is not inside */
    int ask[2]; /* a byte: do it; the end: leave */
    int say[2]; /* a byte: the code */
} container;

static void live_inside(const container *c, int (*work)(fixture *f, char what), fixture *f)
{
    char what;
    alarm(60);
    close(c->ask[1]);
    while (read(c->ask[0], &what, 1) == 1 && what != 'q') {
        char code = (char)work(f, what);
        if (write(c->say[1], &code, 1) != 1) {
            _exit(1);
        }
    }
    _exit(0);
}

/* A process with number 1 in a PID namespace of its own, which does what it is asked. */
static void start(container *c, int (*work)(fixture *f, char what), fixture *f)
{
    assert_int_equal(pipe(c->ask), 0);
    assert_int_equal(pipe(c->say), 0);
    fflush(NULL);
    c->pid = fork();
    assert_true(c->pid >= 0);
    if (c->pid == 0) {
        alarm(60);
        f->store = NULL;
        if (!leave(CLONE_NEWPID)) {
            _exit(NOT_PERMITTED);
        }
        pid_t inside = fork();
        if (inside == 0) {
            live_inside(c, work, f);
        }
        close(c->ask[0]);
        close(c->ask[1]);
        int status;
        waitpid(inside, &status, 0);
        _exit(WIFEXITED(status) ? WEXITSTATUS(status) : 1);
    }
    close(c->ask[0]);
    close(c->say[1]);
}

/* The code of what is asked; -1 when nobody is there to ask. */
static int ask(const container *c, char what)
{
    char code;
    return write(c->ask[1], &what, 1) == 1 && read(c->say[0], &code, 1) == 1 ? code : -1;
}

static int end(const container *c)
{
    /* Said, since another container may have inherited the pipe. */
    if (write(c->ask[1], "q", 1) != 1) {
        assert_int_equal(errno, EPIPE);
    }
    close(c->ask[1]);
    close(c->say[0]);
    int status;
    assert_int_equal(waitpid(c->pid, &status, 0), c->pid);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static int work_inside(fixture *f, char what)
{
    switch (what) {
    case 'p':
        return getpid();
    case 'o':
        return open_store(f, 0);
    case 'r':
        return open_store(f, RST_OPEN_READ_ONLY);
    case 'w':
        return rst_put(f->store, "a", 1, 1, f->record, 0, 0, &f->error);
    case 'm':
        return strstr(f->error.message, "PID namespace") != NULL;
    default:
        return rst_store_close(f->store, &f->error);
    }
}

static bool started(container *c, fixture *f)
{
    start(c, work_inside, f);
    if (ask(c, 'p') != -1) {
        return true;
    }
    assert_int_equal(end(c), NOT_PERMITTED);
    print_message("this user may not make PID namespaces: nothing was tested\n");
    return false;
}

static void one_pid_namespace_at_a_time(void **state)
{
    fixture *f = *state;
    container one;
    container two;
    if (!started(&one, f)) {
        skip();
    }
    assert_true(started(&two, f));
    assert_int_equal(ask(&one, 'p'), 1); /* both have the same number */
    assert_int_equal(ask(&two, 'p'), 1);
    const char open_or_read[] = {'o', 'r'};
    for (int i = 0; i < 2; i++) {
        assert_int_equal(ask(&one, open_or_read[i]), RST_ERR_BUSY);
        assert_int_equal(ask(&one, 'm'), 1);
    }
    close_store(f);
    assert_int_equal(ask(&one, 'o'), RST_OK);
    assert_int_equal(ask(&one, 'w'), RST_OK);
    assert_int_equal(ask(&two, 'o'), RST_ERR_BUSY);
    assert_code(RST_ERR_BUSY, open_store(f, 0), f->error);
    assert_non_null(strstr(f->error.message, "PID namespace"));
    assert_int_equal(ask(&one, 'c'), RST_OK);
    assert_int_equal(ask(&two, 'r'), RST_OK);
    assert_int_equal(ask(&two, 'c'), RST_OK);
    assert_int_equal(end(&one), 0);
    assert_int_equal(end(&two), 0);
    assert_ok(open_store(f, 0), f->error);
    support_assert_sound(f->store);
}

/* One that is killed leaves nothing behind that keeps the others out. */
static int open_and_die(fixture *f, char what)
{
    if (what == 'p') {
        return 1;
    }
    int code = open_store(f, 0);
    code = code ? code : rst_put(f->store, "a", 1, 1, f->record, 0, 0, &f->error);
    if (!code) {
        _exit(0); /* the first process of a namespace cannot kill itself */
    }
    return code;
}

static void a_container_that_is_gone_keeps_nobody_out(void **state)
{
    fixture *f = *state;
    close_store(f);
    container one;
    start(&one, open_and_die, f);
    if (ask(&one, 'p') == -1) {
        assert_int_equal(end(&one), NOT_PERMITTED);
        print_message("this user may not make PID namespaces: nothing was tested\n");
        skip();
    }
    assert_int_equal(ask(&one, 'o'), -1);
    assert_int_equal(end(&one), 0);
    assert_ok(open_store(f, 0), f->error);
    support_assert_sound(f->store);
}

/* ---------------------------------------------------------------- read-only mounts */

/* 0, or what went wrong, as a line. */
static const char *read_through_a_read_only_mount(fixture *f, const int go[2], const int done[2])
{
    char byte;
    f->store = NULL;
    if (!leave(CLONE_NEWNS)) {
        return "not permitted";
    }
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
        mount(f->folder, f->folder, NULL, MS_BIND, NULL) != 0 ||
        mount(NULL, f->folder, NULL, MS_REMOUNT | MS_BIND | MS_RDONLY, NULL) != 0) {
        return "not permitted";
    }
    if (open_store(f, 0) != RST_ERR_PERMISSION) {
        return "opened for writing";
    }
    if (open_store(f, RST_OPEN_READ_ONLY) != RST_ERR_BUSY ||
        !strstr(f->error.message, "read-only mount")) {
        return "opened while a writer has it open";
    }
    if (write(done[1], "", 1) != 1 || read(go[0], &byte, 1) != 1) { /* the writer closes */
        return "lost";
    }
    rst_snapshot *now;
    rst_turn turn;
    if (open_store(f, RST_OPEN_READ_ONLY) != RST_OK ||
        rst_snapshot_open(f->store, &now, &f->error) != RST_OK ||
        rst_turn_get(now, "a", 1, 0, &turn, &f->error) != RST_OK) {
        return f->error.message;
    }
    if (write(done[1], "", 1) != 1 || read(go[0], &byte, 1) != 1) { /* the writer tries */
        return "lost";
    }
    rst_snapshot_close(now);
    return rst_store_close(f->store, &f->error) == RST_OK ? NULL : f->error.message;
}

static void a_read_only_mount_and_a_writer_do_not_mix(void **state)
{
    fixture *f = *state;
    int go[2];
    int done[2];
    assert_int_equal(pipe(go), 0);
    assert_int_equal(pipe(done), 0);
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        alarm(60);
        const char *wrong = read_through_a_read_only_mount(f, go, done);
        if (wrong && strcmp(wrong, "not permitted") != 0) {
            fprintf(stderr, "%s\n", wrong);
        }
        _exit(!wrong ? 0 : strcmp(wrong, "not permitted") == 0 ? NOT_PERMITTED : 1);
    }
    close(done[1]);
    char byte;
    if (read(done[0], &byte, 1) == 1) {
        close_store(f);
        assert_int_equal(write(go[1], "", 1), 1);
        if (read(done[0], &byte, 1) == 1) {
            assert_code(RST_ERR_BUSY, open_store(f, 0), f->error);
            assert_code(RST_ERR_BUSY, open_store(f, RST_OPEN_READ_ONLY), f->error);
            assert_int_equal(write(go[1], "", 1), 1);
        }
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    if (WEXITSTATUS(status) == NOT_PERMITTED) {
        print_message("this user may not mount: nothing was tested\n");
        skip();
    }
    assert_int_equal(WEXITSTATUS(status), 0);
    assert_ok(open_store(f, 0), f->error);
    assert_ok(rst_put(f->store, "a", 1, 1, f->record, 0, 0, &f->error), f->error);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(one_pid_namespace_at_a_time),
        TEST(a_container_that_is_gone_keeps_nobody_out),
        TEST(a_read_only_mount_and_a_writer_do_not_mix),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
