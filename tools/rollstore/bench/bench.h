/* Measuring: medians of many repetitions, the figures found, and the targets they are held to. */
#ifndef TOOL_BENCH_H
#define TOOL_BENCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../command.h"
#include "reply.h"

#define BENCH_FIGURES_MAX 192
#define BENCH_TARGETS_MAX 48
#define BENCH_NAME_SIZE 48

typedef struct bench_figure {
    char name[BENCH_NAME_SIZE];
    double value;
    const char *unit; /* "us", "ratio", "MB/s", "1/s", "bytes" */
} bench_figure;

typedef struct bench_target {
    char name[BENCH_NAME_SIZE];
    double value;
    double limit;
    bool at_most; /* else at least */
} bench_target;

typedef struct bench {
    /* options */
    bool quick;
    const char *folder; /* where the stores are made */
    uint64_t session_count;
    uint64_t scale_size;
    uint64_t scale_capacity_size;
    /* what is worked out from them */
    int64_t budget_ns; /* of one figure */
    size_t cache_size; /* the largest cache */
    size_t cold_size;  /* rotating over so many bytes finds nothing in a cache */
    /* results */
    bench_figure figures[BENCH_FIGURES_MAX];
    size_t figure_count;
    bench_target targets[BENCH_TARGETS_MAX];
    size_t target_count;
} bench;

/* ---------------------------------------------------------------- figures */

void bench_add(bench *b, const char *unit, double value, const char *name_format, ...)
    __attribute__((format(printf, 4, 5)));
double bench_get(const bench *b, const char *name_format, ...)
    __attribute__((format(printf, 2, 3))); /* NaN when there is none */
void bench_at_most(bench *b, double value, double limit, const char *name_format, ...)
    __attribute__((format(printf, 4, 5)));
void bench_at_least(bench *b, double value, double limit, const char *name_format, ...)
    __attribute__((format(printf, 4, 5)));
bool bench_met(const bench_target *target);

void bench_print_table(const bench *b, output *out);
void bench_print_json(const bench *b, output *out);

/* ---------------------------------------------------------------- times */

typedef struct bench_times {
    double median_us;
    double p99_us;
    size_t count;
} bench_times;

/* One repetition, which times what counts of it (*ns).  False after an error message. */
typedef bool bench_step(void *context, size_t round, int64_t *ns);

/* Repeat, first unmeasured `warm` times and then as long as the budget lasts, at least 9 times. */
bool bench_measure(const bench *b, bench_step *step, void *context, size_t warm,
                   bench_times *times);

int64_t bench_now(void);
double bench_quantile(double *values, size_t count, double part); /* sorts them */

/* Somebody pressed Ctrl-C: stop between two steps, so that the stores are deleted. */
void bench_catch_signals(void);
bool bench_stopped(void);

/* ---------------------------------------------------------------- stores and memory */

/* A store in a new folder of its own, and deleting both.  NULL after an error message. */
typedef struct bench_store {
    char folder[256];
    char path[272];
    rst_store *store;
} bench_store;
bool bench_store_make(const bench *b, bench_store *made, uint64_t capacity_size);
void bench_store_delete(bench_store *made);

/* Memory that is there already, not at its first touch; bench_unmap. */
void *bench_map(size_t size);
void bench_unmap(void *memory, size_t size);

/* How the flat replies are read. */
extern const rst_put_options bench_options;

/* ---------------------------------------------------------------- what is measured */

bool bench_put(bench *b);     /* replies to committed records, and the parts of it */
bool bench_writers(bench *b); /* several processes writing */
bool bench_view(bench *b);    /* looking at a turn among few and many sessions */
bool bench_batch(bench *b);   /* training batches */
bool bench_scale(bench *b);   /* more data than the store holds */

#endif
