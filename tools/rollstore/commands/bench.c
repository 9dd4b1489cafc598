#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../bench/bench.h"

static const char help[] =
    "usage: rollstore bench [OPTION...]\n"
    "\n"
    "Measure this machine: replies of 500, 2000 and 8000 tokens from their bytes to\n"
    "the committed record beside memcpy of the same bytes, several writers, looking\n"
    "at turns, training batches, and more data than the store holds.  Medians of many\n"
    "repetitions.  Says which figures fell short of the targets; a target that is\n"
    "missed is no failure.\n"
    "\n"
    "  --quick              a second or two, for a look: the figures are rough\n"
    "  --folder DIR         where the stores are made and deleted (/dev/shm)\n"
    "  --sessions N         how many sessions to look among (20000): 1000000 takes 5\n"
    "                       GB\n"
    "  --scale SIZE         bytes written through a store (2G), of --capacity SIZE\n"
    "                       (128M)\n"
    "  --json               print the figures and targets as one JSON object\n"
    "  --reply N            print a made reply of N tokens and measure nothing; with\n"
    "  --nested             its candidates nested, not flat\n"
    "\n"
    "example: rollstore bench --sessions 1000000 --scale 32G --capacity 2G\n";

#define TOKENS_MAX 1000000

/* The largest cache as the kernel tells it; the C library knows of caches that a guest does not
 * have. */
static size_t largest_cache(void)
{
    size_t largest = 0;
    for (int i = 0; i < 8; i++) {
        char path[80];
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/size", i);
        FILE *file = fopen(path, "r");
        unsigned long kilobytes = 0;
        if (file && fscanf(file, "%luK", &kilobytes) == 1 && kilobytes * 1024 > largest) {
            largest = (size_t)kilobytes * 1024;
        }
        if (file) {
            fclose(file);
        }
    }
    return largest;
}

static void prepare(bench *b)
{
    const size_t mebibyte = (size_t)1 << 20;
    b->cache_size = largest_cache();
    b->cold_size = 2 * b->cache_size;
    b->cold_size = b->cold_size < 64 * mebibyte ? 64 * mebibyte : b->cold_size;
    /* Twice an enormous cache would be mostly the making of it. */
    b->cold_size = b->cold_size > 512 * mebibyte ? 512 * mebibyte : b->cold_size;
    b->budget_ns = 400000000;
    if (b->quick) {
        b->cold_size = 8 * mebibyte;
        b->budget_ns = 10000000;
    }
}

static int measure(bench *b, bool json)
{
    static bool (*const parts[])(bench *) = {bench_put, bench_writers, bench_view, bench_batch,
                                             bench_scale};
    prepare(b);
    bench_catch_signals();
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        if (!parts[i](b)) {
            return bench_stopped() ? fail("stopped", "by a signal") : STATUS_FAILED;
        }
    }
    output out = {0};
    if (json) {
        bench_print_json(b, &out);
    } else {
        bench_print_table(b, &out);
    }
    return output_finish(&out);
}

static int print_reply(uint32_t token_count, bool nested)
{
    output out = {0};
    if (!bench_make_reply(&out, token_count, nested, 1)) {
        output_free(&out);
        return STATUS_FAILED;
    }
    return output_finish(&out);
}

static int run(int argc, char **argv)
{
    bench b = {.folder = "/dev/shm"};
    bool json = false;
    bool nested = false;
    uint64_t reply = 0;
    const arg_option options[] = {
        {.name = "quick", .kind = OPTION_FLAG, .value = &b.quick},
        {.name = "folder", .kind = OPTION_TEXT, .value = &b.folder},
        {.name = "sessions",
         .kind = OPTION_COUNT,
         .value = &b.session_count,
         .min = 1,
         .max = 100000000},
        {.name = "scale", .kind = OPTION_SIZE, .value = &b.scale_size},
        {.name = "capacity", .kind = OPTION_SIZE, .value = &b.scale_capacity_size},
        {.name = "json", .kind = OPTION_FLAG, .value = &json},
        {.name = "reply", .kind = OPTION_COUNT, .value = &reply, .min = 1, .max = TOKENS_MAX},
        {.name = "nested", .kind = OPTION_FLAG, .value = &nested},
        {.name = NULL},
    };
    arg_operands operands;
    if (!args_parse(argc, argv, options, 0, 0, &operands)) {
        return STATUS_USAGE;
    }
    if (nested && !reply) {
        return fail_usage(argv[0], "--nested goes with --reply");
    }
    if (reply) {
        return print_reply((uint32_t)reply, nested);
    }
    b.session_count = b.session_count ? b.session_count : b.quick ? 1000 : 20000;
    b.scale_capacity_size =
        b.scale_capacity_size ? b.scale_capacity_size : UINT64_C(1) << (b.quick ? 24 : 27);
    b.scale_size = b.scale_size ? b.scale_size : b.scale_capacity_size * (b.quick ? 4 : 16);
    if (b.scale_capacity_size < UINT64_C(1) << 24 || b.scale_size < 4 * b.scale_capacity_size) {
        return fail_usage(argv[0], "--capacity is at least 16M, and --scale four times as much");
    }
    return measure(&b, json);
}

const tool_command command_bench = {"bench", "measure this machine against the targets", help, run};
