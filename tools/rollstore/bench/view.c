/* Looking at one turn in the map, among few and many sessions. */
#include <stdio.h>
#include <stdlib.h>

#include "bench.h"

#define VIEWS 1000 /* in one repetition: one is too short for the clock */

typedef struct views {
    bench_store made;
    uint64_t session_count;
    uint64_t seed;
    bool each_snapshot; /* a new snapshot for every view */
    rst_record *record; /* for one more turn */
    volatile int32_t seen;
} views;

/* Small turns: what is measured is finding them. */
static const int32_t small_ids[2] = {7, 8};
static const float small_logprobs[2] = {-0.5f, -1.5f};
static const rst_turn small_turn = {.token_count = 1,
                                    .topk = 2,
                                    .token_ids = small_ids,
                                    .token_logprobs = small_logprobs,
                                    .topk_ids = small_ids,
                                    .topk_logprobs = small_logprobs,
                                    .mode = RST_MODE_SELECTED};

static size_t name_of(uint64_t index, char name[32])
{
    return (size_t)snprintf(name, 32, "task-%llu", (unsigned long long)index);
}

static int put_sessions(views *v, rst_record **records, size_t count, uint64_t first,
                        rst_error *error)
{
    rst_change changes[64];
    char names[64][32];
    for (size_t i = 0; i < count; i++) {
        changes[i] = (rst_change){.kind = RST_CHANGE_PUT,
                                  .session = names[i],
                                  .session_size = name_of(first + i, names[i]),
                                  .record = records[i]};
    }
    return rst_apply(v->made.store, changes, count, 0, error);
}

static bool fill(views *v)
{
    rst_record *records[64] = {0};
    rst_error error;
    int code = RST_OK;
    for (size_t i = 0; i < 64 && !code; i++) {
        records[i] = rst_record_new();
        if (!records[i]) {
            fail("memory", "no memory for a record");
            code = RST_ERR_MEMORY;
        } else if ((code = rst_record_set(records[i], &small_turn, &error))) {
            fail_error(&error);
        }
    }
    for (uint64_t at = 0; at < v->session_count && !code; at += 64) {
        uint64_t left = v->session_count - at;
        code = put_sessions(v, records, left < 64 ? (size_t)left : 64, at, &error);
        if (code) {
            fail_error(&error);
        } else if (bench_stopped()) {
            code = RST_ERR_TIMEOUT;
        }
    }
    for (size_t i = 0; i < 64; i++) {
        rst_record_free(records[i]);
    }
    return !code;
}

static bool view_step(void *context, size_t round, int64_t *ns)
{
    views *v = context;
    char names[VIEWS][32];
    size_t sizes[VIEWS];
    (void)round;
    for (size_t i = 0; i < VIEWS; i++) {
        v->seed = v->seed * UINT64_C(6364136223846793005) + 1442695040888963407;
        sizes[i] = name_of((v->seed >> 24) % v->session_count, names[i]);
    }
    rst_error error;
    rst_snapshot *snapshot = NULL;
    int32_t seen = 0;
    int code = v->each_snapshot ? RST_OK : rst_snapshot_open(v->made.store, &snapshot, &error);
    int64_t begun = bench_now();
    for (size_t i = 0; i < VIEWS && !code; i++) {
        rst_turn turn = {0};
        if (v->each_snapshot) {
            code = rst_snapshot_open(v->made.store, &snapshot, &error);
        }
        code = code ? code : rst_turn_get(snapshot, names[i], sizes[i], 0, &turn, &error);
        seen += code ? 0 : turn.topk_ids[1];
        if (v->each_snapshot) {
            rst_snapshot_close(snapshot);
            snapshot = NULL;
        }
    }
    *ns = (bench_now() - begun) / VIEWS;
    v->seen = seen;
    rst_snapshot_close(snapshot);
    return code ? fail_error(&error) == STATUS_OK : true;
}

/* One more small turn, of a session that is new. */
static bool put_step(void *context, size_t round, int64_t *ns)
{
    views *v = context;
    char name[32];
    size_t size = (size_t)snprintf(name, sizeof name, "more-%zu", round);
    rst_error error;
    int code = rst_record_set(v->record, &small_turn, &error);
    int64_t begun = bench_now();
    code = code ? code : rst_put(v->made.store, name, size, 0, v->record, 0, 0, &error);
    *ns = bench_now() - begun;
    return code ? fail_error(&error) == STATUS_OK : true;
}

/* What one read of the store's memory costs where it is needed to find the next: a view among many
 * sessions is a chain of such reads, down two trees. */
static bool read_step(void *context, size_t round, int64_t *ns)
{
    views *v = context;
    const void *map;
    size_t size;
    rst_error error;
    rst_stat stat;
    if (rst_store_map(v->made.store, &map, &size, &error) ||
        rst_store_stat(v->made.store, &stat, &error)) {
        return fail_error(&error) == STATUS_OK;
    }
    size = (size_t)stat.used_size;
    uint64_t at = round;
    int64_t begun = bench_now();
    for (size_t i = 0; i < VIEWS; i++) {
        at = (at + ((const unsigned char *)map)[at % size]) * UINT64_C(6364136223846793005) + 1;
        at ^= at >> 32;
    }
    *ns = (bench_now() - begun) / VIEWS;
    v->seen = (int32_t)at;
    return true;
}

/* Nanoseconds are lost in the division above, so of the median too: a view takes hundreds. */
static bool measure(bench *b, uint64_t count)
{
    /* A small turn takes a page, and the two trees' entries for it; some more turns come later. */
    uint64_t capacity = (UINT64_C(32) << 20) + count * 5120;
    views v = {.session_count = count, .seed = 1};
    bench_times one;
    bench_times with_snapshot;
    bench_times put;
    bench_times read;
    bool good = bench_store_make(b, &v.made, capacity);
    v.record = rst_record_new();
    if (!v.record) {
        fail("memory", "no memory for a record");
        good = false;
    }
    good = good && fill(&v) && bench_measure(b, view_step, &v, 4, &one);
    v.each_snapshot = true;
    good = good && bench_measure(b, view_step, &v, 4, &with_snapshot) &&
           bench_measure(b, read_step, &v, 4, &read) && bench_measure(b, put_step, &v, 4, &put);
    if (good) {
        bench_add(b, "us", one.median_us, "view.%llu_sessions", (unsigned long long)count);
        bench_add(b, "us", with_snapshot.median_us, "view_and_snapshot.%llu_sessions",
                  (unsigned long long)count);
        bench_add(b, "us", read.median_us, "one_read.%llu_sessions", (unsigned long long)count);
        bench_add(b, "us", put.median_us, "put_small.%llu_sessions", (unsigned long long)count);
        bench_at_most(b, one.median_us, 1.0, "view, microseconds, %llu sessions",
                      (unsigned long long)count);
    }
    rst_record_free(v.record);
    bench_store_delete(&v.made);
    return good;
}

bool bench_view(bench *b)
{
    return measure(b, 10) && measure(b, b->session_count);
}
