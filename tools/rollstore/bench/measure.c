#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "bench.h"

#define ROUNDS_MIN 9
#define ROUNDS_MAX 4000

const rst_put_options bench_options = {.decode = {.topk = BENCH_TOPK}, .temperature = NAN};

/* ---------------------------------------------------------------- times */

int64_t bench_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a;
    double y = *(const double *)b;
    return (x > y) - (x < y);
}

double bench_quantile(double *values, size_t count, double part)
{
    qsort(values, count, sizeof *values, compare);
    return values[(size_t)((double)(count - 1) * part)];
}

bool bench_measure(const bench *b, bench_step *step, void *context, size_t warm, bench_times *times)
{
    double *values = malloc(ROUNDS_MAX * sizeof *values);
    if (!values) {
        fail("memory", "no memory for times");
        return false;
    }
    bool good = true;
    size_t count = 0;
    int64_t begun = bench_now();
    for (size_t round = 0; good && count < ROUNDS_MAX; round++) {
        if (count >= ROUNDS_MIN && bench_now() - begun > b->budget_ns) {
            break;
        }
        int64_t ns = 0;
        good = step(context, round, &ns) && !bench_stopped();
        if (round >= warm) {
            values[count++] = (double)ns / 1000.0;
        } else {
            begun = bench_now();
        }
    }
    if (good) {
        *times = (bench_times){.median_us = bench_quantile(values, count, 0.5),
                               .p99_us = bench_quantile(values, count, 0.99),
                               .count = count};
    }
    free(values);
    return good;
}

/* ---------------------------------------------------------------- signals */

static volatile sig_atomic_t stopped;

static void stop(int number)
{
    stopped = number;
}

void bench_catch_signals(void)
{
    struct sigaction action = {.sa_handler = stop};
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

bool bench_stopped(void)
{
    return stopped != 0;
}

/* ---------------------------------------------------------------- stores and memory */

bool bench_store_make(const bench *b, bench_store *made, uint64_t capacity_size)
{
    made->store = NULL;
    snprintf(made->folder, sizeof made->folder, "%s/rollstore-bench-XXXXXX", b->folder);
    if (!mkdtemp(made->folder)) {
        fail_system(errno, made->folder);
        made->folder[0] = '\0';
        return false;
    }
    snprintf(made->path, sizeof made->path, "%s/store", made->folder);
    rst_create_options create = {.capacity_size = capacity_size};
    made->store = open_store(made->path, RST_OPEN_CREATE | RST_OPEN_EXCLUSIVE, &create);
    if (!made->store) {
        bench_store_delete(made);
        return false;
    }
    return true;
}

/* The folder is ours and has one level. */
static void delete_folder(const char *path)
{
    DIR *folder = opendir(path);
    if (folder) {
        const struct dirent *entry;
        while ((entry = readdir(folder))) {
            unlinkat(dirfd(folder), entry->d_name, 0);
        }
        closedir(folder);
    }
    rmdir(path);
}

void bench_store_delete(bench_store *made)
{
    rst_store_close(made->store, NULL);
    if (made->folder[0]) {
        delete_folder(made->path);
        delete_folder(made->folder);
    }
}

void *bench_map(size_t size)
{
    void *memory =
        mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (memory == MAP_FAILED) {
        fail_system(errno, "memory to measure with");
        return NULL;
    }
    memset(memory, 1, size);
    return memory;
}

void bench_unmap(void *memory, size_t size)
{
    if (memory) {
        munmap(memory, size);
    }
}
