/*
 * soak: a store at work for a long time, with processes killed now and then.
 *
 *   soak [--seconds N | --test] [--seed N] [--dir FOLDER] [--durability memory|interval|full]
 *
 * Writers record sessions and seal them.  Trainers, ranks of one consumer, take them, compare every
 * turn with what was written, acknowledge, commit and release.  Readers look at everything.  One of
 * each is never killed, and what it uses is measured.  At the end the trainers drain the store, and
 * all counts must agree: every session was trained on, with every turn, and none twice.
 *
 * A line is printed for each thirtieth of the time: memory and the file must stay what they are
 * after the first ten (under a sanitizer, no process may leak instead); how long calls take is
 * printed, and judged by whoever reads it.
 */
#include "common.h"

#include <getopt.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
    WRITERS = 3,
    READERS = 2,
    TRAINERS = 2,
    PROCESSES = WRITERS + READERS + TRAINERS,
    TURNS_MAX = 6,
    SIZE_MAX_BYTES = 100000,
    CAPACITY = 64 << 20,
    TRAINER_MAX = 4, /* sessions taken at once */
    LINES = 30,
    TIMES = 4096, /* of calls, the latest */
    PATIENCE_MS = 60000
};

static const char consumer[] = "trainer";

typedef struct common {
    /* Sessions 0, 1, ... of a writer are written one after the other. */
    struct {
        _Atomic(uint64_t) sealed;  /* acknowledged */
        _Atomic(uint64_t) sealing; /* one more than the session whose seal was asked for last */
    } writers[WRITERS];
    _Atomic(uint64_t) trained[TRAINERS]; /* sessions acknowledged; a killed one may miss its last */
    _Atomic(uint64_t) turns[TRAINERS];
    _Atomic(uint64_t) snapshots[READERS];
    _Atomic(bool) stop;             /* writers: seal what is open, and leave */
    _Atomic(bool) drain;            /* trainers: leave when nothing comes any more */
    _Atomic(uint32_t) times[TIMES]; /* microseconds of a put that did not wait for space */
    _Atomic(uint64_t) time_count;
} common;

static common *shared;

static char path[300];
static uint64_t seed = 1;

/* ---------------------------------------------------------------- what is written */

static size_t name_of(char name[32], int w, uint64_t session)
{
    return (size_t)snprintf(name, 32, "%d-%llu", w, (unsigned long long)session);
}

static uint32_t turns_of(int w, uint64_t session)
{
    uint64_t own = session * WRITERS + (uint64_t)w;
    return 1 + (uint32_t)(soak_random(&own) % TURNS_MAX);
}

static uint64_t number_of(int w, uint64_t session, uint32_t turn)
{
    return (session * WRITERS + (uint64_t)w) * TURNS_MAX + turn;
}

static size_t size_of(uint64_t number)
{
    return (size_t)(number * 2654435761u % SIZE_MAX_BYTES);
}

static void note_time(int64_t us)
{
    uint64_t at = atomic_fetch_add(&shared->time_count, 1) % TIMES;
    atomic_store(&shared->times[at], (uint32_t)(us > UINT32_MAX ? UINT32_MAX : us));
}

static int64_t now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

/* Where a killed writer had come to: the first turn that is missing, of the first session that is
 * not known to be sealed.  It may be sealed all the same, and by now trained on and released. */
static uint32_t find_turn(rst_store *store, int w, uint64_t *session)
{
    char name[32];
    rst_snapshot *now;
    rst_session s;
    rst_error error;
    uint32_t turn = 0;
    bool asked = atomic_load(&shared->writers[w].sealing) == *session + 1;
    /* Whether a commit that was under way counts is settled by the next write. */
    must(rst_restart(store, "nobody", 6, 0, &error), error);
    must(rst_snapshot_open(store, &now, &error), error);
    int code = rst_session_get(now, name, name_of(name, w, *session), &s, &error);
    if (code == RST_OK && s.state == RST_STATE_OPEN) {
        turn = s.turn_count;
    } else if (code == RST_OK || asked) {
        ++*session;
    }
    rst_snapshot_close(now);
    return turn;
}

static void write_sessions(int w)
{
    rst_store *store = soak_open(path, 0);
    rst_record *record = rst_record_new();
    rst_error error;
    uint64_t session = atomic_load(&shared->writers[w].sealed);
    uint32_t turn = find_turn(store, w, &session);
    atomic_store(&shared->writers[w].sealed, session);
    while (!atomic_load(&shared->stop) || turn > 0) {
        char name[32];
        size_t size = name_of(name, w, session);
        uint32_t turns = turns_of(w, session);
        for (; turn < turns; turn++) {
            uint64_t number = number_of(w, session, turn);
            soak_fill(record, number, size_of(number));
            int64_t began = now_us();
            int code = rst_put(store, name, size, turn, record, 0, 0, &error);
            if (code == RST_OK) {
                note_time(now_us() - began);
            } else if (code == RST_ERR_FULL) {
                code = rst_put(store, name, size, turn, record, 0, PATIENCE_MS, &error);
            }
            must(code, error);
        }
        rst_outcome outcome = {RST_STATUS_COMPLETED, (double)session, w, (int64_t)session};
        atomic_store(&shared->writers[w].sealing, session + 1);
        must(rst_seal(store, name, size, &outcome, 0, &error), error);
        atomic_store(&shared->writers[w].sealed, ++session);
        turn = 0;
    }
    must(rst_store_close(store, &error), error);
    rst_record_free(record);
}

/* ---------------------------------------------------------------- readers */

static void look_at_all(rst_store *store)
{
    rst_snapshot *now;
    rst_session s = {.sequence = 0};
    rst_error error;
    must(rst_snapshot_open(store, &now, &error), error);
    while (rst_ready_next(now, s.sequence, &s, &error) == RST_OK) {
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
}

static void read_sessions(int r)
{
    rst_store *store = soak_open(path, RST_OPEN_READ_ONLY);
    rst_error error;
    while (!atomic_load(&shared->stop)) {
        look_at_all(store);
        atomic_fetch_add(&shared->snapshots[r], 1);
        soak_sleep_us(20000);
    }
    must(rst_store_close(store, &error), error);
}

/* ---------------------------------------------------------------- trainers */

static uint32_t train_on(rst_store *store, const rst_lease *lease)
{
    rst_snapshot *now;
    rst_session s;
    rst_turn turn;
    rst_error error;
    must(rst_snapshot_open(store, &now, &error), error);
    must(rst_ready_next(now, lease->sequence - 1, &s, &error), error);
    if (s.sequence != lease->sequence) {
        fail("session %llu was released while it was leased", (unsigned long long)lease->sequence);
    }
    int w = (int)s.outcome.group_index;
    uint64_t session = (uint64_t)s.outcome.index;
    if (s.turn_count != turns_of(w, session)) {
        fail("session %d-%llu has %u turns", w, (unsigned long long)session, s.turn_count);
    }
    for (uint32_t i = 0; i < s.turn_count; i++) {
        must(rst_turn_get_by_key(now, s.key, i, &turn, &error), error);
        uint64_t number = number_of(w, session, i);
        if (!soak_is(&turn, number, size_of(number))) {
            fail("session %d-%llu turn %u has other contents", w, (unsigned long long)session, i);
        }
    }
    uint32_t turns = s.turn_count;
    rst_snapshot_close(now);
    return turns;
}

static void commit_and_release(rst_store *store)
{
    void *place;
    size_t size;
    rst_error error;
    must(rst_consumer_place(store, consumer, sizeof consumer - 1, &place, &size, &error), error);
    must(rst_consumer_commit(store, consumer, sizeof consumer - 1, place, size, &error), error);
    free(place);
    uint64_t released;
    must(rst_release_consumed(store, 0, &released, &error), error);
}

static void train(int t)
{
    rst_store *store = soak_open(path, 0);
    rst_error error;
    for (;;) {
        rst_lease leases[TRAINER_MAX];
        size_t count;
        bool drain = atomic_load(&shared->drain);
        int code = rst_consumer_take(store, consumer, sizeof consumer - 1, TRAINER_MAX, 0, 200,
                                     leases, &count, &error);
        if (code == RST_ERR_TIMEOUT && drain) {
            break;
        }
        if (code == RST_ERR_TIMEOUT || code == RST_ERR_FULL) {
            commit_and_release(store);
            continue;
        }
        must(code, error);
        uint64_t turns = 0;
        for (size_t i = 0; i < count; i++) {
            turns += train_on(store, &leases[i]);
        }
        must(rst_consumer_acknowledge(store, consumer, sizeof consumer - 1, leases, count, &error),
             error);
        atomic_fetch_add(&shared->trained[t], count);
        atomic_fetch_add(&shared->turns[t], turns);
        commit_and_release(store);
    }
    must(rst_store_close(store, &error), error);
}

/* ---------------------------------------------------------------- processes */

static pid_t pids[PROCESSES];

static pid_t start(int process)
{
    if (process < WRITERS) {
        return soak_start(write_sessions, process);
    }
    return process < WRITERS + READERS ? soak_start(read_sessions, process - WRITERS)
                                       : soak_start(train, process - WRITERS - READERS);
}

/* The first of each kind is measured. */
static bool spared(int process)
{
    return process == 0 || process == WRITERS || process == WRITERS + READERS;
}

static unsigned kill_one(void)
{
    int process = (int)(soak_random(&seed) % PROCESSES);
    if (spared(process)) {
        return 0;
    }
    soak_kill(pids[process]);
    pids[process] = start(process);
    return 1;
}

/* ---------------------------------------------------------------- measuring */

typedef struct sample {
    uint64_t private_size[PROCESSES]; /* bytes of memory of its own */
    uint64_t file_size;               /* bytes allocated for the data file */
    uint64_t used_size;
    uint32_t median_us, late_us; /* of puts: half, and 99 of 100, are faster */
} sample;

static uint64_t private_size_of(pid_t pid)
{
    char name[64];
    char line[256];
    snprintf(name, sizeof name, "/proc/%ld/status", (long)pid);
    FILE *file = fopen(name, "re");
    unsigned long long kilobytes = 0;
    while (file && fgets(line, sizeof line, file)) {
        if (sscanf(line, "RssAnon: %llu", &kilobytes) == 1) {
            break;
        }
    }
    if (file) {
        fclose(file);
    }
    return kilobytes * 1024;
}

static int compare_times(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a;
    uint32_t y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

static void measure_times(sample *out)
{
    static uint32_t times[TIMES];
    uint64_t count = atomic_load(&shared->time_count);
    count = count < TIMES ? count : TIMES;
    for (uint64_t i = 0; i < count; i++) {
        times[i] = atomic_load(&shared->times[i]);
    }
    qsort(times, count, sizeof *times, compare_times);
    out->median_us = count ? times[count / 2] : 0;
    out->late_us = count ? times[count * 99 / 100] : 0;
}

static sample measure(rst_store *store)
{
    sample out = {.file_size = 0};
    char data[320];
    struct stat info;
    rst_stat stat_of_store;
    rst_error error;
    snprintf(data, sizeof data, "%s/data.mdb", path);
    if (stat(data, &info) != 0) {
        fail("%s is gone", data);
    }
    must(rst_store_stat(store, &stat_of_store, &error), error);
    out.file_size = (uint64_t)info.st_blocks * 512;
    out.used_size = stat_of_store.used_size;
    for (int i = 0; i < PROCESSES; i++) {
        out.private_size[i] = spared(i) ? private_size_of(pids[i]) : 0;
    }
    measure_times(&out);
    return out;
}

static void print_line(int64_t ms, unsigned kills, const sample *now)
{
    uint64_t sealed = 0;
    uint64_t trained = 0;
    for (int i = 0; i < WRITERS; i++) {
        sealed += atomic_load(&shared->writers[i].sealed);
    }
    for (int i = 0; i < TRAINERS; i++) {
        trained += atomic_load(&shared->trained[i]);
    }
    printf("%6.0f s  sealed %8llu  trained %8llu  kills %4u  memory KiB: writer %5llu reader %5llu "
           "trainer %5llu  file MiB: %llu, used %llu  put us: %u, late %u\n",
           (double)ms / 1000, (unsigned long long)sealed, (unsigned long long)trained, kills,
           (unsigned long long)now->private_size[0] / 1024,
           (unsigned long long)now->private_size[WRITERS] / 1024,
           (unsigned long long)now->private_size[WRITERS + READERS] / 1024,
           (unsigned long long)now->file_size >> 20, (unsigned long long)now->used_size >> 20,
           now->median_us, now->late_us);
    fflush(stdout);
}

/* Memory does not grow after the first third. */
static void check_memory(const sample *samples)
{
    for (int p = 0; p < PROCESSES; p++) {
        uint64_t early = 0;
        uint64_t late = 0;
        for (int i = 0; i < LINES / 3; i++) {
            uint64_t size = samples[i].private_size[p];
            early = size > early ? size : early;
            late += samples[LINES - 1 - i].private_size[p] / (LINES / 3);
        }
        if (late > early + early / 4 + (1 << 20)) {
            fail("process %d: %llu bytes of memory, %llu at first", p, (unsigned long long)late,
                 (unsigned long long)early);
        }
    }
}

static void check_file(const sample *samples)
{
    for (int i = 1; i < LINES; i++) {
        if (samples[i].file_size != samples[0].file_size) {
            fail("the data file has %llu bytes, %llu at first",
                 (unsigned long long)samples[i].file_size,
                 (unsigned long long)samples[0].file_size);
        }
    }
}

/* ---------------------------------------------------------------- the end */

static void wait_for(int process)
{
    soak_join(pids[process], PATIENCE_MS);
    pids[process] = 0;
}

static void check_counts(rst_store *store, uint64_t *sealed)
{
    rst_error error;
    rst_stat stat_of_store;
    rst_snapshot *now;
    rst_consumer c;
    *sealed = 0;
    uint64_t turns = 0;
    for (int w = 0; w < WRITERS; w++) {
        uint64_t count = atomic_load(&shared->writers[w].sealed);
        *sealed += count;
        for (uint64_t s = 0; s < count; s++) {
            turns += turns_of(w, s);
        }
    }
    must(rst_store_stat(store, &stat_of_store, &error), error);
    must(rst_snapshot_open(store, &now, &error), error);
    must(rst_consumer_get(now, consumer, sizeof consumer - 1, &c, &error), error);
    rst_snapshot_close(now);
    const rst_totals_entry *t = &stat_of_store.totals;
    if (t->next_sequence - 1 != *sealed || t->released_count != *sealed || t->sealed_count != 0 ||
        t->open_count != 0 || t->turn_count != 0 || t->value_size != 0 ||
        c.trained_total != *sealed) {
        fail("%llu sessions were sealed: the store says %llu sealed, %llu trained on, %llu "
             "released, %llu left, %llu open, with %llu turns",
             (unsigned long long)*sealed, (unsigned long long)t->next_sequence - 1,
             (unsigned long long)c.trained_total, (unsigned long long)t->released_count,
             (unsigned long long)t->sealed_count, (unsigned long long)t->open_count,
             (unsigned long long)t->turn_count);
    }
    printf("%llu sessions with %llu turns were sealed, trained on once and released\n",
           (unsigned long long)*sealed, (unsigned long long)turns);
}

static void end_all(rst_store *store)
{
    atomic_store(&shared->stop, true);
    for (int i = 0; i < WRITERS + READERS; i++) {
        wait_for(i);
    }
    atomic_store(&shared->drain, true);
    for (int i = WRITERS + READERS; i < PROCESSES; i++) {
        wait_for(i);
    }
    commit_and_release(store);
    uint64_t sealed;
    check_counts(store, &sealed);
    soak_verify(store);
}

static void run(rst_store *store, int64_t seconds)
{
    sample samples[LINES];
    unsigned kills = 0;
    int64_t began = soak_now_ms();
    for (int line = 0; line < LINES; line++) {
        while (soak_now_ms() < began + (line + 1) * seconds * 1000 / LINES) {
            soak_sleep_us((int64_t)(soak_random(&seed) % 200000));
            kills += kill_one();
            for (int i = 0; i < PROCESSES; i++) {
                soak_check_running(pids[i]);
            }
        }
        samples[line] = measure(store);
        print_line(soak_now_ms() - began, kills, &samples[line]);
    }
    check_file(samples);
    if (!SOAK_OTHER_ALLOCATOR) {
        check_memory(samples);
    }
}

/* As one of many tests it is short, unless the environment wants more. */
static int64_t seconds_of_test(void)
{
    const char *given = getenv("ROLLSTORE_SOAK_SECONDS");
    return given ? strtoll(given, NULL, 10) : 20;
}

int main(int argc, char **argv)
{
    static const struct option options[] = {
        {"seconds", required_argument, NULL, 't'}, {"seed", required_argument, NULL, 's'},
        {"dir", required_argument, NULL, 'd'},     {"durability", required_argument, NULL, 'y'},
        {"test", no_argument, NULL, 'q'},          {0}};
    int64_t seconds = 3600;
    const char *dir = getenv("ROLLSTORE_TEST_DIR") ? getenv("ROLLSTORE_TEST_DIR") : "/dev/shm";
    rst_create_options create = {.capacity_size = CAPACITY, .durability = RST_DURABILITY_MEMORY};
    for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        if (c == 't') {
            seconds = strtoll(optarg, NULL, 10);
        } else if (c == 'q') {
            seconds = seconds_of_test();
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
    char folder[256];
    shared = soak_shared(sizeof *shared);
    soak_make_folder(dir, folder);
    snprintf(path, sizeof path, "%s/store", folder);
    rst_store *store;
    rst_error error;
    must(rst_store_open(path, RST_OPEN_CREATE, &create, &store, &error), error);
    must(rst_consumer_create(store, consumer, sizeof consumer - 1, RST_START_OLDEST, NULL, &error),
         error);
    must(rst_store_close(store, &error), error);
    for (int i = 0; i < PROCESSES; i++) {
        pids[i] = start(i);
    }
    store = soak_open(path, 0);
    run(store, seconds);
    end_all(store);
    must(rst_store_close(store, &error), error);
    soak_remove(folder);
    return 0;
}
