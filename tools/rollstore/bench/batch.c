/* Training batches of 64 sessions, against memcpy of as many bytes from elsewhere. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"

#define SESSIONS 64
#define TOKENS 2000

typedef struct batch {
    bench_store made;
    rst_id ids[SESSIONS];
    char names[SESSIONS][16];
    unsigned threads;
    rst_packed_arrays arrays;
    unsigned char *memory;
    unsigned char *source;
    size_t size;
} batch;

static bool fill(batch *t)
{
    output reply = {0};
    rst_record *record = rst_record_new();
    rst_error error;
    int code = record ? RST_OK : RST_ERR_MEMORY;
    if (code) {
        fail("memory", "no memory for a record");
    } else if (!bench_make_reply(&reply, TOKENS, false, 5)) {
        code = RST_ERR_MEMORY;
    }
    for (size_t i = 0; i < SESSIONS && !code; i++) {
        t->ids[i].session = t->names[i];
        t->ids[i].session_size = (size_t)snprintf(t->names[i], sizeof t->names[i], "batch-%zu", i);
        code = rst_put_reply(t->made.store, t->ids[i].session, t->ids[i].session_size, 0,
                             reply.text, reply.size, &bench_options, record, &error);
        if (code) {
            fail_error(&error);
        }
    }
    rst_record_free(record);
    output_free(&reply);
    return !code;
}

/* The arrays lie one after another, each on a cache line, in memory that is there already. */
static void *part_of(batch *t, size_t *at, size_t size)
{
    void *part = t->memory ? t->memory + *at : NULL;
    *at += (size + 63) / 64 * 64;
    return part;
}

static void place_arrays(batch *t)
{
    size_t rows = (size_t)SESSIONS * TOKENS;
    t->size = 0;
    t->arrays.tokens = part_of(t, &t->size, rows * sizeof(int32_t));
    t->arrays.loss_mask = part_of(t, &t->size, rows);
    t->arrays.rollout_logprobs = part_of(t, &t->size, rows * sizeof(float));
    t->arrays.topk_ids = part_of(t, &t->size, rows * BENCH_TOPK * sizeof(int32_t));
    t->arrays.topk_logprobs = part_of(t, &t->size, rows * BENCH_TOPK * sizeof(float));
    t->arrays.cu_seqlens = part_of(t, &t->size, (SESSIONS + 1) * sizeof(int32_t));
    t->arrays.cu_response_seqlens = part_of(t, &t->size, (SESSIONS + 1) * sizeof(int32_t));
}

static bool batch_step(void *context, size_t round, int64_t *ns)
{
    batch *t = context;
    rst_sample samples[SESSIONS];
    rst_batch_size size;
    rst_snapshot *snapshot = NULL;
    rst_error error;
    (void)round;
    int64_t begun = bench_now();
    int code = rst_snapshot_open(t->made.store, &snapshot, &error);
    code =
        code ? code : rst_batch_measure(snapshot, t->ids, SESSIONS, NULL, samples, &size, &error);
    code = code ? code
                : rst_batch_pack(snapshot, samples, SESSIONS, NULL, &t->arrays, t->threads, &error);
    rst_snapshot_close(snapshot);
    *ns = bench_now() - begun;
    return code ? fail_error(&error) == STATUS_OK : true;
}

static bool copy_step(void *context, size_t round, int64_t *ns)
{
    batch *t = context;
    (void)round;
    int64_t begun = bench_now();
    memcpy(t->memory, t->source, t->size);
    *ns = bench_now() - begun;
    return true;
}

bool bench_batch(bench *b)
{
    batch t = {.threads = 1};
    bench_times one;
    bench_times two;
    bench_times copy;
    place_arrays(&t);
    bool good = bench_store_make(b, &t.made, UINT64_C(96) << 20);
    t.memory = bench_map(t.size);
    t.source = bench_map(t.size);
    place_arrays(&t);
    good = good && t.memory && t.source && fill(&t) && bench_measure(b, copy_step, &t, 2, &copy) &&
           bench_measure(b, batch_step, &t, 2, &one);
    t.threads = 2;
    good = good && bench_measure(b, batch_step, &t, 2, &two);
    if (good) {
        bench_add(b, "us", one.median_us, "batch.64x%d", TOKENS);
        bench_add(b, "us", two.median_us, "batch.64x%d.two_threads", TOKENS);
        bench_add(b, "us", copy.median_us, "batch.memcpy");
        bench_add(b, "MB/s", (double)t.size / one.median_us, "batch.speed");
        bench_add(b, "MB/s", (double)t.size / copy.median_us, "batch.memcpy_speed");
        bench_at_least(b, copy.median_us / one.median_us, 0.7, "batch speed / memcpy speed");
        bench_at_least(b, one.median_us / two.median_us, 1.0, "batch speed, two threads / one");
    }
    bench_unmap(t.memory, t.size);
    bench_unmap(t.source, t.size);
    bench_store_delete(&t.made);
    return good;
}
