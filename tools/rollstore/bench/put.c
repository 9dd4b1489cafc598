/* From a reply's bytes to a committed record, whole and in parts, beside memcpy of the same bytes.
 *
 * Hot: the same reply again and again, and few pages of the store: all of it is in a cache.
 * Received: the reply is in a cache, as it is where a worker has just received it; the store's
 * pages rotate over more bytes than the caches hold.  Cold: replies rotate, too. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"

enum heat { HOT, RECEIVED, COLD };

static const char *const heat_names[] = {"hot", "received", "cold"};

typedef enum flow_kind { FLOW_DECODE, FLOW_PUT, FLOW_PUT_REPLY, FLOW_CHECK } flow_kind;

typedef struct flow {
    const bench *b;
    bench_store made;
    rst_record *record;
    rst_decode_options decode;
    output *replies; /* [reply_count] */
    size_t reply_count;
    size_t record_size;
    size_t keep; /* sessions that stand; the oldest goes when a new one comes */
    flow_kind kind;
    size_t begun; /* the first session that stands */
    size_t next;
} flow;

static size_t name_of(size_t index, char name[32])
{
    return (size_t)snprintf(name, 32, "bench-%zu", index);
}

static bool release_oldest(flow *f)
{
    char name[32];
    size_t size = name_of(f->begun++, name);
    rst_error error;
    if (rst_release(f->made.store, name, size, 0, &error)) {
        fail_error(&error);
        return false;
    }
    return true;
}

static int store_one(flow *f, const output *reply, int64_t *ns, rst_error *error)
{
    char name[32];
    size_t size = name_of(f->next++, name);
    rst_put_options options = {.decode = f->decode};
    int64_t begun = bench_now();
    int code;
    if (f->kind == FLOW_PUT_REPLY) {
        code = rst_put_reply(f->made.store, name, size, 0, reply->text, reply->size, &options,
                             f->record, error);
    } else {
        code = rst_record_decode(f->record, reply->text, reply->size, &f->decode, error);
        begun = bench_now();
        code = code ? code : rst_put(f->made.store, name, size, 0, f->record, 0, 0, error);
    }
    *ns = bench_now() - begun;
    return code;
}

static int check_one(flow *f, size_t round, int64_t *ns, rst_error *error)
{
    char name[32];
    size_t size = name_of(f->begun + round % (f->next - f->begun), name);
    uint8_t key[RST_KEY_SIZE];
    rst_session_key(name, size, key);
    rst_snapshot *snapshot;
    int code = rst_snapshot_open(f->made.store, &snapshot, error);
    if (code) {
        return code;
    }
    const void *value;
    size_t value_size;
    code = rst_turn_value(snapshot, key, 0, &value, &value_size, error);
    int64_t begun = bench_now();
    code = code ? code : rst_record_check(value, value_size, key, 0, error);
    *ns = bench_now() - begun;
    rst_snapshot_close(snapshot);
    return code;
}

static bool flow_step(void *context, size_t round, int64_t *ns)
{
    flow *f = context;
    const output *reply = &f->replies[round % f->reply_count];
    rst_error error;
    int code;
    if (f->kind == FLOW_DECODE) {
        int64_t begun = bench_now();
        code = rst_record_decode(f->record, reply->text, reply->size, &f->decode, &error);
        *ns = bench_now() - begun;
    } else if (f->kind == FLOW_CHECK) {
        code = check_one(f, round, ns, &error);
    } else {
        code = store_one(f, reply, ns, &error);
        if (!code && f->next - f->begun > f->keep && !release_oldest(f)) {
            return false;
        }
    }
    if (code) {
        fail_error(&error);
        return false;
    }
    return true;
}

/* ---------------------------------------------------------------- memcpy */

typedef struct copies {
    unsigned char *from;
    unsigned char *to;
    size_t size;
    size_t from_count;
    size_t to_count;
} copies;

static bool copy_step(void *context, size_t round, int64_t *ns)
{
    copies *c = context;
    unsigned char *to = c->to + round % c->to_count * c->size;
    const unsigned char *from = c->from + round % c->from_count * c->size;
    int64_t begun = bench_now();
    memcpy(to, from, c->size);
    *ns = bench_now() - begun;
    return true;
}

static bool measure_copy(const flow *f, size_t size, bool cold_from, bool cold_to,
                         bench_times *times)
{
    size_t many = f->b->cold_size / size + 1;
    copies c = {.size = size, .from_count = cold_from ? many : 1, .to_count = cold_to ? many : 1};
    c.from = bench_map(size * c.from_count);
    c.to = bench_map(size * c.to_count);
    bool good = c.from && c.to && bench_measure(f->b, copy_step, &c, 2, times);
    bench_unmap(c.from, size * c.from_count);
    bench_unmap(c.to, size * c.to_count);
    return good;
}

/* ---------------------------------------------------------------- one size */

static void flow_end(flow *f)
{
    for (size_t i = 0; f->replies && i < f->reply_count; i++) {
        output_free(&f->replies[i]);
    }
    free(f->replies);
    rst_record_free(f->record);
    bench_store_delete(&f->made);
}

static bool make_replies(flow *f, uint32_t token_count, bool nested, bool cold)
{
    output first = {0};
    if (!bench_make_reply(&first, token_count, nested, 1)) {
        return false;
    }
    f->reply_count = cold ? f->b->cold_size / first.size + 1 : 1;
    f->replies = calloc(f->reply_count, sizeof *f->replies);
    if (!f->replies) {
        output_free(&first);
        fail("memory", "no memory for replies");
        return false;
    }
    f->replies[0] = first;
    for (size_t i = 1; i < f->reply_count; i++) {
        /* Their bytes are the same but lie elsewhere: making each anew would take long. */
        output_bytes(&f->replies[i], first.text, first.size);
        if (f->replies[i].out_of_memory) {
            fail("memory", "no memory for replies");
            return false;
        }
    }
    return true;
}

/* The record's stored size, from a first put. */
static bool learn_record_size(flow *f)
{
    int64_t ns;
    rst_error error;
    rst_session session;
    rst_snapshot *snapshot;
    f->kind = FLOW_PUT;
    if (store_one(f, &f->replies[0], &ns, &error) ||
        rst_snapshot_open(f->made.store, &snapshot, &error)) {
        fail_error(&error);
        return false;
    }
    int code = rst_session_get(snapshot, "bench-0", 7, &session, &error);
    f->record_size = code ? 0 : session.value_size;
    rst_snapshot_close(snapshot);
    return code ? fail_error(&error) == STATUS_OK : true;
}

static bool flow_begin(flow *f, const bench *b, uint32_t token_count, bool nested, enum heat heat)
{
    *f = (flow){.b = b,
                .decode = {.mode = RST_MODE_SELECTED,
                           .request = nested ? RST_REQUEST_NESTED : RST_REQUEST_FLAT,
                           .topk = BENCH_TOPK}};
    /* Room for what stands, and for what the last releases have not given back yet. */
    uint64_t capacity = (heat == HOT ? 0 : b->cold_size) + (UINT64_C(96) << 20);
    if (!bench_store_make(b, &f->made, capacity)) {
        return false;
    }
    f->record = rst_record_new();
    if (!f->record) {
        fail("memory", "no memory for a record");
        return false;
    }
    if (!make_replies(f, token_count, nested, heat == COLD) || !learn_record_size(f)) {
        return false;
    }
    f->keep = heat == HOT ? 1 : b->cold_size / f->record_size + 1;
    return true;
}

static bool measure_kind(flow *f, flow_kind kind, bench_times *times)
{
    f->kind = kind;
    bool writes = kind == FLOW_PUT || kind == FLOW_PUT_REPLY;
    size_t warm = writes ? f->keep + 8 : f->reply_count > 4 ? 4 : 2;
    return bench_measure(f->b, flow_step, f, warm, times);
}

static bool measure_size(bench *b, uint32_t count, enum heat heat)
{
    static const char *const kinds[] = {"decode", "put", "put_reply", "check"};
    const char *name = heat_names[heat];
    flow f;
    bench_times times;
    bool good = flow_begin(&f, b, count, false, heat);
    if (good && heat == HOT) {
        bench_add(b, "bytes", (double)f.replies[0].size, "reply_size.%u", count);
        bench_add(b, "bytes", (double)f.record_size, "record_size.%u", count);
    }
    for (size_t kind = 0; good && kind < 4; kind++) {
        good = measure_kind(&f, (flow_kind)kind, &times);
        if (good) {
            bench_add(b, "us", times.median_us, "%s.%u.%s", kinds[kind], count, name);
        }
    }
    good = good && measure_copy(&f, f.replies[0].size, heat == COLD, heat == COLD, &times);
    if (good) {
        bench_add(b, "us", times.median_us, "memcpy_reply.%u.%s", count, name);
        good = measure_copy(&f, f.record_size, heat == COLD, heat != HOT, &times);
    }
    if (good) {
        bench_add(b, "us", times.median_us, "memcpy_record.%u.%s", count, name);
        double copies_us = times.median_us + bench_get(b, "memcpy_reply.%u.%s", count, name);
        bench_add(b, "ratio", bench_get(b, "put_reply.%u.%s", count, name) / copies_us,
                  "memcpys.%u.%s", count, name);
    }
    flow_end(&f);
    return good;
}

static bool measure_nested(bench *b)
{
    flow f;
    bench_times decode;
    bench_times put;
    bool good = flow_begin(&f, b, 2000, true, HOT) && measure_kind(&f, FLOW_DECODE, &decode) &&
                measure_kind(&f, FLOW_PUT_REPLY, &put);
    if (good) {
        bench_add(b, "bytes", (double)f.replies[0].size, "nested.reply_size.2000");
        bench_add(b, "us", decode.median_us, "nested.decode.2000");
        bench_add(b, "us", put.median_us, "nested.put_reply.2000");
    }
    flow_end(&f);
    return good;
}

/* A process's first writes meet pages of the map that it has never touched. */
static bool measure_first_touch(bench *b)
{
    enum { PUTS = 48 };
    double values[PUTS];
    flow f;
    bool good = flow_begin(&f, b, 2000, false, HOT);
    f.keep = PUTS + 1;
    f.kind = FLOW_PUT_REPLY;
    for (size_t i = 0; good && i < PUTS; i++) {
        int64_t ns = 0;
        good = flow_step(&f, 0, &ns);
        values[i] = (double)ns / 1000.0;
    }
    if (good) {
        bench_add(b, "us", bench_quantile(values, PUTS, 0.5), "put_reply.2000.first_touch");
    }
    flow_end(&f);
    return good;
}

bool bench_put(bench *b)
{
    static const uint32_t counts[] = {500, 2000, 8000};
    for (size_t i = 0; i < 9; i++) {
        if (!measure_size(b, counts[i % 3], (enum heat)(i / 3))) {
            return false;
        }
    }
    for (size_t i = 0; i < 3; i++) {
        const char *heat = heat_names[i];
        for (size_t j = 0; j < 3; j++) {
            bench_at_most(b, bench_get(b, "memcpys.%u.%s", counts[j], heat), 2.5,
                          "put_reply / memcpys, %u tokens, %s", counts[j], heat);
        }
        bench_at_most(
            b, bench_get(b, "put_reply.8000.%s", heat) / bench_get(b, "put_reply.2000.%s", heat),
            4.4, "8000 tokens / 2000 tokens, %s", heat);
    }
    return measure_nested(b) && measure_first_touch(b);
}
