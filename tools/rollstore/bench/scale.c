/* More data than the store holds: written, sealed and released in order, like a training run. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "bench.h"

#define TOKENS 2000
#define PARTS 8 /* the run's latency is told for each: of 32 GB, every 4 GB */

typedef struct run {
    bench_store made;
    output reply;
    rst_record *record;
    uint64_t puts;     /* of the whole run */
    uint64_t standing; /* sessions */
    double *times;     /* [puts] */
    uint64_t used_early;
    uint64_t used_late;
} run;

static size_t name_of(uint64_t index, char name[32])
{
    return (size_t)snprintf(name, 32, "run-%llu", (unsigned long long)index);
}

static int turn_over(run *r, uint64_t round, rst_error *error)
{
    static const rst_outcome outcome = {RST_STATUS_COMPLETED, 1.0, RST_NO_INDEX, RST_NO_INDEX};
    char name[32];
    size_t size = name_of(round, name);
    int64_t begun = bench_now();
    int code = rst_put_reply(r->made.store, name, size, 0, r->reply.text, r->reply.size,
                             &bench_options, r->record, error);
    r->times[round] = (double)(bench_now() - begun) / 1000.0;
    code = code ? code : rst_seal(r->made.store, name, size, &outcome, 0, error);
    if (!code && round >= r->standing) {
        size = name_of(round - r->standing, name);
        code = rst_release(r->made.store, name, size, 0, error);
    }
    rst_stat stat;
    if (!code && (round == r->puts / 2 || round == r->puts - 1)) {
        code = rst_store_stat(r->made.store, &stat, error);
        *(round == r->puts / 2 ? &r->used_early : &r->used_late) = stat.used_size;
    }
    return code;
}

static bool run_all(run *r)
{
    rst_error error;
    for (uint64_t round = 0; round < r->puts; round++) {
        if (bench_stopped()) {
            return false;
        }
        if (turn_over(r, round, &error)) {
            fail_error(&error);
            return false;
        }
    }
    return true;
}

static double file_size(const run *r)
{
    char path[sizeof r->made.path + 16];
    snprintf(path, sizeof path, "%s/data.mdb", r->made.path);
    struct stat info;
    return stat(path, &info) ? 0.0 : (double)info.st_blocks * 512.0;
}

static void report(bench *b, run *r)
{
    /* The first filling of the store touches its pages: steady is what comes after it. */
    size_t skip = (size_t)r->standing * 5 / 4;
    size_t part = ((size_t)r->puts - skip) / 2;
    bench_add(b, "bytes", (double)b->scale_size, "scale.written");
    bench_add(b, "bytes", (double)b->scale_capacity_size, "scale.capacity");
    for (size_t i = 0; i < PARTS; i++) {
        size_t from = (size_t)r->puts / PARTS * i;
        from = from < skip ? skip : from;
        size_t to = (size_t)r->puts / PARTS * (i + 1);
        if (from + 8 < to) {
            bench_add(b, "us", bench_quantile(r->times + from, to - from, 0.5),
                      "scale.put_reply.part_%zu_of_%d", i + 1, PARTS);
        }
    }
    double early = bench_quantile(r->times + skip, part, 0.5);
    double late = bench_quantile(r->times + skip + part, part, 0.5);
    bench_add(b, "us", early, "scale.put_reply.first_half");
    bench_add(b, "us", late, "scale.put_reply.second_half");
    bench_add(b, "us", bench_quantile(r->times + skip + part, part, 0.99), "scale.put_reply.p99");
    bench_add(b, "bytes", (double)r->used_late, "scale.used");
    bench_add(b, "bytes", file_size(r), "scale.file");
    bench_at_most(b, late / early, 1.25, "scale: latency, second half / first");
    bench_at_most(b, (double)r->used_late / (double)r->used_early, 1.05,
                  "scale: pages used, end / middle");
}

bool bench_scale(bench *b)
{
    run r = {0};
    uint64_t record_size = (uint64_t)bench_get(b, "record_size.2000");
    r.puts = b->scale_size / record_size;
    r.standing = b->scale_capacity_size * 3 / 4 / record_size;
    bool good = bench_store_make(b, &r.made, b->scale_capacity_size);
    r.record = rst_record_new();
    r.times = malloc((size_t)r.puts * sizeof *r.times + 1);
    if (good && (!r.record || !r.times)) {
        fail("memory", "no memory for a run of %llu puts", (unsigned long long)r.puts);
        good = false;
    }
    good = good && bench_make_reply(&r.reply, TOKENS, false, 9) && run_all(&r);
    if (good) {
        report(b, &r);
    }
    output_free(&r.reply);
    free(r.times);
    rst_record_free(r.record);
    bench_store_delete(&r.made);
    return good;
}
