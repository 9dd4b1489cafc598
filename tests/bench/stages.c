/* What the stages between a reply and its record cost, one by one, as one JSON object of
 * microseconds.  Standard input: a reply, as `rollstore bench --reply 2000` prints it.  The
 * argument is a folder for a store.
 *
 * How long a put holds the write lock is seen at LMDB's own calls: the linker leads the store's to
 * the __wrap ones here. */
#include <lmdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <b64/cdecode.h>
#include <rollstore/store.h>

#include "base64/base64.h"
#include "layout/record.h"
#include "reply/json.h"

#define REPLY_SIZE_MAX (64u << 20)
#define ROUNDS 401
#define STANDING 160 /* turns in the store: more than any cache holds */

typedef struct stages {
    char *reply;
    size_t size;
    const char *base64; /* the longest string of the reply */
    size_t base64_size;
    char *decoded; /* base64_size bytes */
    rst_json_reader reader;
    rst_turn turn;
    int32_t *widths;
    rst_record *record;
    rst_store *store;
    unsigned char *cold; /* memory of as many records */
    size_t record_size;
    unsigned round;
} stages;

static void stage_json(stages *s);
static void stage_base64(stages *s);
static void stage_libb64(stages *s);
static void stage_check(stages *s);
static void stage_hash(stages *s);
static void stage_memcpy(stages *s);

static const struct {
    const char *name;
    void (*run)(stages *s);
} all[] = {{"json", stage_json},   {"base64", stage_base64}, {"libb64", stage_libb64},
           {"check", stage_check}, {"hash", stage_hash},     {"memcpy_base64", stage_memcpy}};

static void stop(const char *what)
{
    fprintf(stderr, "bench-stages: %s\n", what);
    exit(1);
}

/* ---------------------------------------------------------------- the stages */

/* Strings that were left out count as used: only the text's validity is asked for.  Lists of tokens
 * are read where they are left out. */
static int use_nothing(void *context, const rst_json *json, rst_json_node root, rst_error *error)
{
    (void)context;
    (void)root;
    (void)error;
    for (uint32_t i = 0; i < json->cut_count; i++) {
        json->cuts[i].used = true;
    }
    return RST_OK;
}

static void stage_json(stages *s)
{
    s->reader.lists_too = true;
    if (rst_json_with(&s->reader, s->reply, s->size, use_nothing, NULL, NULL)) {
        stop("the reply is no JSON");
    }
}

static void stage_base64(stages *s)
{
    size_t size;
    if (rst_base64_decoded_size(s->base64, s->base64_size, &size, NULL) ||
        rst_base64_decode(s->base64, s->base64_size, s->decoded, size, NULL)) {
        stop("the longest string is no base64");
    }
}

static void stage_libb64(stages *s)
{
    base64_decodestate state;
    base64_init_decodestate(&state);
    if (base64_decode_block(s->base64, (int)s->base64_size, s->decoded, &state) <= 0) {
        stop("libb64 decodes nothing");
    }
}

static void stage_check(stages *s)
{
    bool ragged;
    rst_bad_value bad;
    if (!rst_check_values(&s->turn, s->widths, &ragged, &bad)) {
        stop("the reply's values are bad");
    }
}

static volatile uint64_t seen_hash;

static void stage_hash(stages *s)
{
    size_t slots = (size_t)s->turn.token_count * s->turn.topk;
    seen_hash = rst_hash(s->turn.topk_ids, slots * sizeof(int32_t)) ^
                rst_hash(s->turn.topk_logprobs, slots * sizeof(float));
}

static void stage_memcpy(stages *s)
{
    memcpy(s->decoded, s->base64, s->base64_size);
    seen_hash = (unsigned char)s->decoded[s->base64_size / 2];
}

/* ---------------------------------------------------------------- times */

static double now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a;
    double y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median_us(stages *s, void (*run)(stages *s))
{
    static double times[ROUNDS];
    run(s);
    for (size_t i = 0; i < ROUNDS; i++) {
        double begun = now_us();
        run(s);
        times[i] = now_us() - begun;
    }
    qsort(times, ROUNDS, sizeof *times, compare);
    return times[ROUNDS / 2];
}

/* ---------------------------------------------------------------- the write lock */

static double locked_at;
static double locked_us;

int __real_mdb_txn_begin(MDB_env *env, MDB_txn *parent, unsigned flags, MDB_txn **txn);
int __real_mdb_txn_commit(MDB_txn *txn);
int __wrap_mdb_txn_begin(MDB_env *env, MDB_txn *parent, unsigned flags, MDB_txn **txn);
int __wrap_mdb_txn_commit(MDB_txn *txn);

int __wrap_mdb_txn_begin(MDB_env *env, MDB_txn *parent, unsigned flags, MDB_txn **txn)
{
    int result = __real_mdb_txn_begin(env, parent, flags, txn);
    if (!(flags & MDB_RDONLY)) {
        locked_at = now_us();
    }
    return result;
}

int __wrap_mdb_txn_commit(MDB_txn *txn)
{
    int result = __real_mdb_txn_commit(txn);
    locked_us = now_us() - locked_at;
    return result;
}

/* Another turn in the place of the oldest: its pages are in no cache. */
static void put_turn(stages *s)
{
    char name[32];
    rst_error error;
    if (s->round >= STANDING) {
        int size = snprintf(name, sizeof name, "%u", s->round - STANDING);
        if (rst_release(s->store, name, (size_t)size, 0, &error)) {
            stop(error.message);
        }
    }
    int size = snprintf(name, sizeof name, "%u", s->round++);
    if (rst_put(s->store, name, (size_t)size, 0, s->record, 0, 0, &error)) {
        stop(error.message);
    }
}

/* memcpy of a record that was just made to memory that is in no cache. */
static double copy_us(stages *s)
{
    unsigned char *to = s->cold + s->round % STANDING * s->record_size;
    double begun = now_us();
    memcpy(to, s->turn.token_ids, s->record_size);
    return now_us() - begun;
}

static double median_of(double *times)
{
    qsort(times, ROUNDS, sizeof *times, compare);
    return times[ROUNDS / 2];
}

static void measure_lock(stages *s, const char *folder)
{
    static double locked[ROUNDS];
    static double copies[ROUNDS];
    char path[256];
    rst_error error;
    rst_create_options create = {.capacity_size = (STANDING + 40) * s->record_size};
    snprintf(path, sizeof path, "%s/lock", folder);
    s->cold = calloc(STANDING, s->record_size);
    if (!s->cold) {
        stop("no memory");
    }
    memset(s->cold, 1, STANDING * s->record_size);
    if (rst_store_open(path, RST_OPEN_CREATE | RST_OPEN_EXCLUSIVE, &create, &s->store, &error)) {
        stop(error.message);
    }
    for (unsigned i = 0; i < 2 * STANDING; i++) { /* each page was touched before */
        put_turn(s);
    }
    for (size_t i = 0; i < ROUNDS; i++) {
        if (rst_record_decode(s->record, s->reply, s->size, NULL, &error)) {
            stop(error.message);
        }
        put_turn(s);
        locked[i] = locked_us;
        copies[i] = copy_us(s);
    }
    rst_store_close(s->store, NULL);
    free(s->cold);
    printf(",\"lock\":%.2f,\"lock_memcpy\":%.2f", median_of(locked), median_of(copies));
}

/* ---------------------------------------------------------------- the reply */

static void read_reply(stages *s)
{
    s->reply = malloc(REPLY_SIZE_MAX);
    if (!s->reply) {
        stop("no memory");
    }
    s->size = fread(s->reply, 1, REPLY_SIZE_MAX, stdin);
    const char *end = s->reply + s->size;
    for (const char *at = s->reply; at < end;) {
        const char *quote = memchr(at, '"', (size_t)(end - at));
        size_t size = (size_t)((quote ? quote : end) - at);
        if (size > s->base64_size) {
            s->base64 = at;
            s->base64_size = size;
        }
        at += size + 1;
    }
    s->decoded = malloc(s->base64_size + 1);
}

int main(int count, char **arguments)
{
    static stages s;
    if (count != 2) {
        stop("which folder?");
    }
    read_reply(&s);
    rst_record *record = rst_record_new();
    rst_error error;
    if (!record || !s.decoded) {
        stop("no memory");
    }
    if (rst_record_decode(record, s.reply, s.size, NULL, &error)) {
        stop(error.message);
    }
    rst_record_view(record, &s.turn);
    s.widths = malloc((s.turn.token_count + 1) * sizeof(int32_t));
    if (!s.widths) {
        stop("no memory");
    }
    printf("{\"base64_size\":%zu", s.base64_size);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        printf(",\"%s\":%.2f", all[i].name, median_us(&s, all[i].run));
    }
    s.record = record;
    s.record_size = sizeof(float) * s.turn.token_count * (2 + 2 * (size_t)s.turn.topk);
    measure_lock(&s, arguments[1]);
    printf("}\n");
    free(s.widths);
    free(s.decoded);
    free(s.reply);
    rst_json_reader_free(&s.reader);
    rst_record_free(record);
    return 0;
}
