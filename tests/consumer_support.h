/* What the consumers' tests share: a store, sessions to take, and processes that can be trusted to
 * end.  Everything is static inline, so that a test may use a part of it. */
#ifndef RST_TESTS_CONSUMER_SUPPORT_H
#define RST_TESTS_CONSUMER_SUPPORT_H

#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "support.h"

/* No wait of these tests is longer; reaching it is a failure. */
#define PATIENCE_MS 60000

typedef struct fixture {
    char *folder;
    const char *path;
    rst_store *store;
    rst_record *record;
    rst_error error;
} fixture;

static inline void fixture_open(fixture *f, uint64_t capacity_size)
{
    f->folder = support_make_folder();
    f->path = strdup(support_path(f->folder, "store"));
    rst_create_options options = {.capacity_size = capacity_size};
    assert_ok(rst_store_open(f->path, RST_OPEN_CREATE, &options, &f->store, &f->error), f->error);
    f->record = rst_record_new();
    assert_non_null(f->record);
    support_fill(f->record, 1, 1, 1, NULL, 0, NULL);
}

static inline void fixture_close(fixture *f)
{
    support_assert_sound(f->store);
    assert_ok(rst_store_close(f->store, &f->error), f->error);
    rst_record_free(f->record);
    free((void *)(uintptr_t)f->path);
    support_remove_folder(f->folder);
}

static inline const char *session_name(uint64_t number)
{
    static char names[4][32];
    static unsigned next;
    char *name = names[next++ % 4];
    snprintf(name, sizeof names[0], "session-%06llu", (unsigned long long)number);
    return name;
}

/* Store and seal a session: in a store without open ones its sequence number is `number` when the
 * numbers count from 1.  For children too: it asserts nothing. */
static inline int seal_one(rst_store *store, rst_record *record, uint64_t number, rst_error *error)
{
    const char *name = session_name(number);
    rst_outcome outcome = {.status = RST_STATUS_COMPLETED,
                           .reward = 1.0,
                           .group_index = RST_NO_INDEX,
                           .index = RST_NO_INDEX};
    int code = rst_put(store, name, strlen(name), 0, record, 0, 0, error);
    return code ? code : rst_seal(store, name, strlen(name), &outcome, 0, error);
}

static inline void seal_range(fixture *f, uint64_t from, uint64_t to)
{
    for (uint64_t i = from; i <= to; i++) {
        assert_ok(seal_one(f->store, f->record, i, &f->error), f->error);
    }
}

static inline int release_one_session(fixture *f, uint64_t number, unsigned flags)
{
    const char *name = session_name(number);
    return rst_release(f->store, name, strlen(name), flags, &f->error);
}

static inline rst_consumer look_at(rst_store *store, const char *name)
{
    rst_error error;
    rst_snapshot *snapshot;
    rst_consumer consumer;
    assert_ok(rst_snapshot_open(store, &snapshot, &error), error);
    assert_ok(rst_consumer_get(snapshot, name, strlen(name), &consumer, &error), error);
    assert_int_equal(consumer.name_size, strlen(name));
    assert_memory_equal(consumer.name, name, consumer.name_size);
    rst_snapshot_close(snapshot);
    consumer.name = NULL;
    return consumer;
}

static inline void sleep_ms(long ms)
{
    struct timespec pause = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
    while (nanosleep(&pause, &pause) != 0) {
    }
}

/* Run body in a child, which is killed when it takes too long.  Children assert nothing: they
 * return what went wrong as an exit status. */
static inline pid_t start_child(int (*body)(void *), void *context)
{
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        alarm(PATIENCE_MS / 1000);
        _exit(body(context));
    }
    return pid;
}

static inline void expect_child(pid_t pid)
{
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
        fail_msg("child: %s %d", WIFEXITED(status) ? "exit status" : "signal",
                 WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status));
    }
}

/* Bytes through a pipe, all or failure. */
static inline bool read_all(int fd, void *out, size_t size)
{
    char *at = out;
    while (size > 0) {
        ssize_t got = read(fd, at, size);
        if (got <= 0) {
            return false;
        }
        at += got;
        size -= (size_t)got;
    }
    return true;
}

#endif
