/*
 * kills: writers are killed at random moments, again and again, and nothing acknowledged is lost.
 *
 *   kills [--kills N] [--seed N] [--dir FOLDER] [--durability memory|interval|full]
 *
 * One to eight writers put, ingest, replace, seal, restart, release and copy.  Before each call a
 * writer notes in memory that outlives it what it is about to do, and after it that it was done.
 * When it was killed, each of its sessions must be as it was noted, or as the call it was in would
 * leave it, to the last logprob.  The writers that were not killed must go on meanwhile, and a
 * reader, which is killed too, must never see anything but whole records.
 */
#include "common.h"

#include <errno.h>
#include <getopt.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    WRITERS_MAX = 8,
    SESSIONS = 5, /* of a writer */
    TURNS_MAX = 8,
    SIZE_MAX_BYTES = 60000,
    CAPACITY = 96 << 20,
    PATIENCE_MS = 30000
};

typedef enum action {
    NONE,
    PUT,
    INGEST,
    PUT_SEVERAL,
    REPLACE,
    SEAL,
    RESTART,
    RELEASE,
    COPY,
    ACTIONS
} action;

static const char *const action_names[ACTIONS] = {
    "nothing", "put", "ingest", "put several", "replace", "seal", "restart", "release", "copy"};

/* A session as its writer knows it: the turn's number makes its contents. */
typedef struct known {
    uint32_t turn_count;
    bool sealed;
    uint64_t numbers[TURNS_MAX];
} known;

typedef struct writer {
    known sessions[SESSIONS];
    known after[SESSIONS];   /* what the call that is being made leaves */
    _Atomic(uint32_t) doing; /* action; NONE between calls */
    _Atomic(uint64_t) done;  /* calls that have returned */
    uint64_t next;           /* number for the next turn */
} writer;

typedef struct common {
    writer writers[WRITERS_MAX];
    _Atomic(uint64_t) scans; /* of the reader */
} common;

static common *shared;

static char folder[256];
static char path[300];
static uint64_t seed = 1;
static unsigned killed_in[ACTIONS];

static size_t size_of(uint64_t number)
{
    return (size_t)(number * 2654435761u % SIZE_MAX_BYTES);
}

static size_t name_of(char name[32], int w, int s)
{
    return (size_t)snprintf(name, 32, "writer-%d-%d", w, s);
}

/* ---------------------------------------------------------------- a writer's calls */

static void begin(writer *me)
{
    memcpy(me->after, me->sessions, sizeof me->after);
}

/* From here on the call may take effect. */
static void go(writer *me, action what)
{
    atomic_store(&me->doing, what);
}

static void done(writer *me)
{
    memcpy(me->sessions, me->after, sizeof me->sessions);
    atomic_store(&me->doing, NONE);
    atomic_fetch_add(&me->done, 1);
}

static void put(writer *me, rst_store *store, rst_record *record, int w, int s, bool replace)
{
    char name[32];
    size_t size = name_of(name, w, s);
    rst_error error;
    begin(me);
    known *after = &me->after[s];
    uint32_t turn = replace ? after->turn_count - 1 : after->turn_count++;
    uint64_t number = me->next++;
    after->numbers[turn] = number;
    soak_fill(record, number, size_of(number));
    go(me, replace ? REPLACE : PUT);
    must(rst_put(store, name, size, turn, record, replace ? RST_CHANGE_REPLACE : 0, PATIENCE_MS,
                 &error),
         error);
    done(me);
}

/* The same from an engine's reply. */
static void ingest(writer *me, rst_store *store, rst_record *record, int w, int s)
{
    char name[32];
    size_t size = name_of(name, w, s);
    const rst_put_options options = {.temperature = 1.0f, .timeout_ms = PATIENCE_MS};
    rst_error error;
    rst_turn turn;
    char *reply;
    size_t reply_size;
    begin(me);
    known *after = &me->after[s];
    uint64_t number = me->next++;
    soak_fill(record, number, size_of(number));
    rst_record_view(record, &turn);
    must(rst_turn_to_reply(&turn, &reply, &reply_size, &error), error);
    uint32_t turn_number = after->turn_count++;
    after->numbers[turn_number] = number;
    go(me, INGEST);
    must(rst_put_reply(store, name, size, turn_number, reply, reply_size, &options, record, &error),
         error);
    done(me);
    free(reply);
}

static void put_several(writer *me, rst_store *store, int w)
{
    enum { COUNT = 3 };
    char names[COUNT][32];
    rst_change changes[COUNT];
    rst_error error;
    memset(changes, 0, sizeof changes);
    begin(me);
    int count = 0;
    for (int s = 0; s < SESSIONS && count < COUNT; s++) {
        known *after = &me->after[s];
        if (after->sealed || after->turn_count == TURNS_MAX) {
            continue;
        }
        uint64_t number = me->next++;
        rst_change *change = &changes[count];
        change->kind = RST_CHANGE_PUT;
        change->session = names[count];
        change->session_size = name_of(names[count], w, s);
        change->turn = after->turn_count;
        change->record = rst_record_new();
        soak_fill(change->record, number, size_of(number));
        after->numbers[after->turn_count++] = number;
        count++;
    }
    go(me, PUT_SEVERAL);
    must(rst_apply(store, changes, (size_t)count, PATIENCE_MS, &error), error);
    done(me);
    for (int i = 0; i < count; i++) {
        rst_record_free(changes[i].record);
    }
}

static void seal(writer *me, rst_store *store, int w, int s)
{
    char name[32];
    size_t size = name_of(name, w, s);
    rst_outcome outcome = {RST_STATUS_COMPLETED, 1.0, RST_NO_INDEX, RST_NO_INDEX};
    rst_error error;
    begin(me);
    me->after[s].sealed = true;
    go(me, SEAL);
    must(rst_seal(store, name, size, &outcome, 0, &error), error);
    done(me);
}

static void restart(writer *me, rst_store *store, int w, int s, uint32_t turn)
{
    char name[32];
    size_t size = name_of(name, w, s);
    rst_error error;
    begin(me);
    me->after[s].turn_count = turn;
    go(me, RESTART);
    must(rst_restart(store, name, size, turn, &error), error);
    done(me);
}

static void release(writer *me, rst_store *store, int w, int s)
{
    char name[32];
    size_t size = name_of(name, w, s);
    rst_error error;
    begin(me);
    memset(&me->after[s], 0, sizeof me->after[s]);
    go(me, RELEASE);
    must(rst_release(store, name, size, 0, &error), error);
    done(me);
}

static void copy_path(char out[300], int w)
{
    snprintf(out, 300, "%s/copy-%d", folder, w);
}

static void copy(writer *me, rst_store *store, int w)
{
    char to[300];
    rst_error error;
    copy_path(to, w);
    begin(me);
    go(me, COPY);
    must(rst_store_copy(store, to, 0, &error), error);
    done(me);
    rst_store *made = soak_open(to, RST_OPEN_READ_ONLY);
    soak_verify(made);
    must(rst_store_close(made, &error), error);
    char old[340];
    snprintf(old, sizeof old, "%s.old", to);
    if (rename(to, old) != 0) { /* in one piece, in case it is killed while it removes */
        fail("%s: %s", to, strerror(errno));
    }
    soak_remove(old);
}

static void act(writer *me, rst_store *store, rst_record *record, int w, uint64_t *own)
{
    int s = (int)(soak_random(own) % SESSIONS);
    const known *session = &me->sessions[s];
    uint64_t dice = soak_random(own) % 100;
    if (dice < 1) {
        copy(me, store, w);
    } else if (dice < 11) {
        put_several(me, store, w);
    } else if (session->sealed) {
        release(me, store, w, s);
    } else if (session->turn_count == 0 || (dice < 65 && session->turn_count < TURNS_MAX)) {
        if (dice < 40) {
            put(me, store, record, w, s, false);
        } else {
            ingest(me, store, record, w, s);
        }
    } else if (dice < 75) {
        put(me, store, record, w, s, true);
    } else if (dice < 80) {
        restart(me, store, w, s, (uint32_t)(soak_random(own) % session->turn_count));
    } else if (dice < 83) {
        release(me, store, w, s);
    } else if (dice < 90 || session->turn_count == TURNS_MAX) {
        seal(me, store, w, s);
    } else {
        ingest(me, store, record, w, s);
    }
}

static void write_until_killed(int w)
{
    uint64_t own = seed ^ (uint64_t)getpid() << 20;
    rst_record *record = rst_record_new();
    rst_store *store = soak_open(path, 0);
    rst_error error;
    for (int i = 0;; i++) {
        act(&shared->writers[w], store, record, w, &own);
        if (i % 100 == 99) { /* opening and closing may be met, too */
            must(rst_store_close(store, &error), error);
            store = soak_open(path, 0);
        }
    }
}

/* ---------------------------------------------------------------- a reader */

static void scan_until_killed(int unused)
{
    (void)unused;
    rst_store *store = soak_open(path, RST_OPEN_READ_ONLY);
    for (;;) {
        rst_snapshot *now;
        rst_session s;
        rst_error error;
        uint8_t key[RST_KEY_SIZE];
        const uint8_t *after = NULL;
        must(rst_snapshot_open(store, &now, &error), error);
        while (rst_session_next(now, after, &s, &error) == RST_OK) {
            memcpy(key, s.key, sizeof key);
            after = key;
            for (uint32_t turn = 0; turn < s.turn_count; turn++) {
                const void *value;
                size_t size;
                must(rst_turn_value(now, s.key, turn, &value, &size, &error), error);
                must(rst_record_check(value, size, s.key, turn, &error), error);
            }
        }
        if (error.code != RST_ERR_NOT_FOUND) {
            must(error.code, error);
        }
        rst_snapshot_close(now);
        atomic_fetch_add(&shared->scans, 1);
    }
}

/* ---------------------------------------------------------------- after a kill */

/* "" when the session in the store is the known one, else what differs. */
static const char *compare(rst_snapshot *now, int w, int s, const known *want)
{
    char name[32];
    size_t size = name_of(name, w, s);
    rst_session session;
    rst_error error;
    int code = rst_session_get(now, name, size, &session, &error);
    if (want->turn_count == 0) {
        return code == RST_ERR_NOT_FOUND ? "" : "there, but released or never written";
    }
    if (code) {
        return "missing";
    }
    if (session.turn_count != want->turn_count) {
        return "of another number of turns";
    }
    if ((session.state == RST_STATE_SEALED) != want->sealed) {
        return "of another state";
    }
    for (uint32_t turn = 0; turn < want->turn_count; turn++) {
        rst_turn found;
        must(rst_turn_get(now, name, size, turn, &found, &error), error);
        if (!soak_is(&found, want->numbers[turn], size_of(want->numbers[turn]))) {
            return "with a turn of other contents";
        }
    }
    return "";
}

/* All sessions as before the call or all as after it; the writer's notes are brought up to date. */
static void check_killed(rst_store *store, int w)
{
    writer *me = &shared->writers[w];
    action what = (action)atomic_load(&me->doing);
    rst_snapshot *now;
    rst_error error;
    /* Whether a commit that was under way counts is settled by the next write. */
    must(rst_restart(store, "nobody", 6, 0, &error), error);
    must(rst_snapshot_open(store, &now, &error), error);
    bool before = true;
    bool after = what != NONE;
    const char *why = "";
    int which = 0;
    for (int s = 0; s < SESSIONS; s++) {
        const char *differs = compare(now, w, s, &me->sessions[s]);
        if (before && *differs) {
            why = differs;
            which = s;
        }
        before = before && !*differs;
        after = after && !*compare(now, w, s, &me->after[s]);
    }
    rst_snapshot_close(now);
    if (!before && !after) {
        fail("writer %d, killed in %s: session %d is %s", w, action_names[what], which, why);
    }
    if (!before) {
        memcpy(me->sessions, me->after, sizeof me->sessions);
    }
    atomic_store(&me->doing, NONE);
    killed_in[what]++;
}

/* A killed copy leaves nothing under the name it was to have, or all of it. */
static void check_copy(int w)
{
    char to[300];
    copy_path(to, w);
    struct stat info;
    if (stat(to, &info) == 0) {
        rst_error error;
        rst_store *made = soak_open(to, RST_OPEN_READ_ONLY);
        soak_verify(made);
        must(rst_store_close(made, &error), error);
    }
    char command[1000];
    snprintf(command, sizeof command, "rm -rf -- '%s' '%s'.old '%s'.new-*", to, to, to);
    if (system(command) != 0) {
        fail("what a killed copy left cannot be removed");
    }
}

/* Each has finished a call since, so none waits for a lock that nobody holds. */
static void check_going_on(const pid_t *pids, int count)
{
    uint64_t seen[WRITERS_MAX];
    for (int w = 0; w < count; w++) {
        seen[w] = atomic_load(&shared->writers[w].done);
    }
    int64_t until = soak_now_ms() + PATIENCE_MS;
    for (int w = 0; w < count; w++) {
        while (pids[w] && atomic_load(&shared->writers[w].done) == seen[w]) {
            soak_check_running(pids[w]);
            if (soak_now_ms() > until) {
                fail("writer %d does not go on after others were killed", w);
            }
            soak_sleep_us(200);
        }
    }
}

/* This process has the store open only while it looks: it forks with no thread of a sync beside it,
 * which may just hold a lock of the sanitizers' malloc. */
static unsigned kill_some(pid_t *pids, int count, unsigned most)
{
    unsigned killed = 0;
    bool dead[WRITERS_MAX] = {false};
    for (int w = 0; w < count && killed < most; w++) {
        if (soak_random(&seed) % 2 == 0) {
            soak_kill(pids[w]);
            pids[w] = 0;
            dead[w] = true;
            killed++;
            soak_sleep_us((int64_t)(soak_random(&seed) % 2000));
        }
    }
    rst_store *store = soak_open(path, 0);
    for (int w = 0; w < count; w++) {
        if (dead[w]) {
            check_killed(store, w);
            check_copy(w);
        }
    }
    check_going_on(pids, count);
    rst_error error;
    must(rst_store_close(store, &error), error);
    for (int w = 0; w < count; w++) {
        if (dead[w]) {
            pids[w] = soak_start(write_until_killed, w);
        }
    }
    return killed;
}

/* The store as a whole, with nobody else there. */
static void check_all(int count)
{
    rst_store *store = soak_open(path, 0);
    rst_error error;
    rst_stat stat;
    soak_verify(store);
    must(rst_store_stat(store, &stat, &error), error);
    uint64_t turns = 0;
    for (int w = 0; w < WRITERS_MAX; w++) {
        for (int s = 0; s < SESSIONS; s++) {
            turns += shared->writers[w].sessions[s].turn_count;
        }
        if (w < count) {
            check_copy(w);
        }
    }
    if (stat.totals.turn_count != turns) {
        fail("%llu turns are stored, %llu were acknowledged",
             (unsigned long long)stat.totals.turn_count, (unsigned long long)turns);
    }
    uint32_t cleared;
    must(rst_store_clear_readers(store, &cleared, &error), error);
    must(rst_store_stat(store, &stat, &error), error);
    if (stat.reader_pid != 0 && stat.reader_pid != (uint32_t)getpid()) {
        fail("process %u is dead and still reads", stat.reader_pid);
    }
    must(rst_store_close(store, &error), error);
}

/* Some batches with one number of writers, then all are killed. */
static unsigned run_crew(int count, unsigned most)
{
    pid_t pids[WRITERS_MAX];
    for (int w = 0; w < count; w++) {
        pids[w] = soak_start(write_until_killed, w);
    }
    pid_t reader = soak_start(scan_until_killed, 0);
    check_going_on(pids, count);
    unsigned killed = 0;
    for (int batch = 0; batch < 8 && killed + (unsigned)count < most; batch++) {
        soak_sleep_us((int64_t)(soak_random(&seed) % 30000));
        killed += kill_some(pids, count, most - killed - (unsigned)count);
        soak_check_running(reader);
        if (batch % 3 == 2) {
            soak_kill(reader);
            reader = soak_start(scan_until_killed, 0);
        }
    }
    for (int w = 0; w < count; w++) {
        soak_kill(pids[w]);
        killed++;
    }
    soak_kill(reader);
    rst_store *store = soak_open(path, 0);
    for (int w = 0; w < count; w++) {
        check_killed(store, w);
    }
    rst_error error;
    must(rst_store_close(store, &error), error);
    check_all(count);
    return killed;
}

int main(int argc, char **argv)
{
    static const struct option options[] = {{"kills", required_argument, NULL, 'k'},
                                            {"seed", required_argument, NULL, 's'},
                                            {"dir", required_argument, NULL, 'd'},
                                            {"durability", required_argument, NULL, 'y'},
                                            {0}};
    unsigned long wanted = 1000;
    const char *dir = getenv("ROLLSTORE_TEST_DIR") ? getenv("ROLLSTORE_TEST_DIR") : "/dev/shm";
    rst_create_options create = {.capacity_size = CAPACITY, .durability = RST_DURABILITY_MEMORY};
    for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        if (c == 'k') {
            wanted = strtoul(optarg, NULL, 10);
        } else if (c == 's') {
            seed = strtoull(optarg, NULL, 10);
        } else if (c == 'd') {
            dir = optarg;
        } else if (c == 'y') {
            create.durability = soak_durability(optarg);
        } else {
            return 2;
        }
    }
    create.interval_ms = create.durability == RST_DURABILITY_INTERVAL ? 5 : 0;
    shared = soak_shared(sizeof *shared);
    for (int w = 0; w < WRITERS_MAX; w++) {
        shared->writers[w].next = (uint64_t)w << 32;
    }
    soak_make_folder(dir, folder);
    snprintf(path, sizeof path, "%s/store", folder);
    rst_store *store;
    rst_error error;
    must(rst_store_open(path, RST_OPEN_CREATE, &create, &store, &error), error);
    must(rst_store_close(store, &error), error);
    int64_t began = soak_now_ms();
    unsigned killed = 0;
    for (unsigned crew = 0; killed < wanted; crew++) {
        killed += run_crew(1 + (int)(crew % WRITERS_MAX), 100);
    }
    uint64_t calls = 0;
    for (int w = 0; w < WRITERS_MAX; w++) {
        calls += atomic_load(&shared->writers[w].done);
    }
    printf("%u kills in %.1f s; %llu calls acknowledged, %llu scans by readers\nkilled in:", killed,
           (double)(soak_now_ms() - began) / 1000, (unsigned long long)calls,
           (unsigned long long)atomic_load(&shared->scans));
    for (int a = 0; a < ACTIONS; a++) {
        printf(" %s %u%s", action_names[a], killed_in[a], a + 1 < ACTIONS ? "," : "\n");
    }
    soak_remove(folder);
    return 0;
}
