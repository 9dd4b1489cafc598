/* One process writing, and four that share the write lock. */
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench.h"

#define WRITERS_MAX 4
#define TIMES_MAX 16384 /* of one writer; later ones are counted and not kept */
#define TOKENS 2000
#define STANDING 8 /* sessions of one writer */
#define PUTS_MIN 2 /* of each writer, also where the processors are busy with something else */

/* Memory that the writers share. */
typedef struct shared {
    atomic_int ready;
    atomic_int go;
    atomic_int stop;
    uint64_t counts[WRITERS_MAX];
    double times[WRITERS_MAX][TIMES_MAX];
} shared;

typedef struct writer {
    shared *common;
    int number;
    const char *path;
    const output *reply;
} writer;

static int write_one(const writer *w, rst_store *store, rst_record *record, uint64_t round,
                     rst_error *error)
{
    char name[48];
    int size = snprintf(name, sizeof name, "writer-%d-%llu", w->number, (unsigned long long)round);
    int64_t begun = bench_now();
    int code = rst_put_reply(store, name, (size_t)size, 0, w->reply->text, w->reply->size,
                             &bench_options, record, error);
    if (round < TIMES_MAX) {
        w->common->times[w->number][round] = (double)(bench_now() - begun) / 1000.0;
    }
    if (!code && round >= STANDING) {
        size = snprintf(name, sizeof name, "writer-%d-%llu", w->number,
                        (unsigned long long)(round - STANDING));
        code = rst_release(store, name, (size_t)size, 0, error);
    }
    return code;
}

static int run_writer(const writer *w)
{
    rst_error error;
    rst_store *store = open_store(w->path, 0, NULL);
    rst_record *record = rst_record_new();
    if (!store || !record) {
        return STATUS_FAILED;
    }
    atomic_fetch_add(&w->common->ready, 1);
    while (!atomic_load(&w->common->go)) {
        usleep(100);
    }
    int code = RST_OK;
    uint64_t round = 0;
    while (!code && !bench_stopped() && (round < PUTS_MIN || !atomic_load(&w->common->stop))) {
        code = write_one(w, store, record, round++, &error);
    }
    w->common->counts[w->number] = round;
    if (code) {
        fail_error(&error);
    }
    rst_record_free(record);
    rst_store_close(store, NULL);
    return code ? STATUS_FAILED : STATUS_OK;
}

/* False when one of them has failed. */
static bool wait_for(const pid_t *children, int count)
{
    bool good = true;
    for (int i = 0; i < count; i++) {
        int status = 0;
        while (waitpid(children[i], &status, 0) < 0 && errno == EINTR) {
        }
        good = good && WIFEXITED(status) && WEXITSTATUS(status) == STATUS_OK;
    }
    return good;
}

/* False before all are ready: one of them has ended. */
static bool wait_until_ready(shared *common, int count)
{
    for (int i = 0; i < 50000 && !bench_stopped(); i++) {
        if (atomic_load(&common->ready) == count) {
            return true;
        }
        usleep(100);
    }
    return false;
}

static bool run_writers(const bench *b, shared *common, const bench_store *made,
                        const output *reply, int count, double *seconds)
{
    pid_t children[WRITERS_MAX] = {0};
    int begun = 0;
    for (; begun < count; begun++) {
        writer w = {common, begun, made->path, reply};
        children[begun] = fork();
        if (children[begun] == 0) {
            _exit(run_writer(&w));
        }
        if (children[begun] < 0) {
            fail_system(errno, "starting a writer");
            break;
        }
    }
    bool good = begun == count && wait_until_ready(common, count);
    int64_t from = bench_now();
    atomic_store(&common->go, 1);
    int64_t until = from + b->budget_ns * 4;
    while (good && bench_now() < until && !bench_stopped()) {
        usleep(1000);
    }
    atomic_store(&common->stop, 1);
    good = wait_for(children, begun) && good && !bench_stopped();
    *seconds = (double)(bench_now() - from) * 1e-9;
    return good;
}

/* The p99 of all writers' puts, the first ones, which touch their pages, left out. */
static double p99_of(shared *common, int count)
{
    double *all = malloc(sizeof(double) * TIMES_MAX * (size_t)count);
    size_t found = 0;
    for (int i = 0; all && i < count; i++) {
        uint64_t first = common->counts[i] > 8 * STANDING ? 4 * STANDING : 0;
        for (uint64_t at = first; at < common->counts[i] && at < TIMES_MAX; at++) {
            all[found++] = common->times[i][at];
        }
    }
    double value = found ? bench_quantile(all, found, 0.99) : 0.0;
    free(all);
    return value;
}

static bool measure(bench *b, const output *reply, int count)
{
    bench_store made;
    if (!bench_store_make(b, &made, UINT64_C(128) << 20)) {
        return false;
    }
    shared *common =
        mmap(NULL, sizeof *common, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (common == MAP_FAILED) {
        fail_system(errno, "memory of the writers");
        bench_store_delete(&made);
        return false;
    }
    double seconds;
    bool good = run_writers(b, common, &made, reply, count, &seconds);
    uint64_t puts = 0;
    for (int i = 0; i < count; i++) {
        puts += common->counts[i];
    }
    if (good) {
        bench_add(b, "1/s", (double)puts / seconds, "writers.%d.puts", count);
        bench_add(b, "us", p99_of(common, count), "writers.%d.p99", count);
    }
    munmap(common, sizeof *common);
    bench_store_delete(&made);
    return good;
}

bool bench_writers(bench *b)
{
    output reply = {0};
    bool good = bench_make_reply(&reply, TOKENS, false, 3) && measure(b, &reply, 1) &&
                measure(b, &reply, WRITERS_MAX);
    output_free(&reply);
    if (good && sysconf(_SC_NPROCESSORS_ONLN) >= 2) {
        bench_at_least(b, bench_get(b, "writers.4.puts") / bench_get(b, "writers.1.puts"), 1.5,
                       "puts, four processes / one");
    }
    return good;
}
