#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "bench.h"

void bench_add(bench *b, const char *unit, double value, const char *name_format, ...)
{
    if (b->figure_count == BENCH_FIGURES_MAX) {
        return;
    }
    bench_figure *figure = &b->figures[b->figure_count++];
    va_list list;
    va_start(list, name_format);
    vsnprintf(figure->name, sizeof figure->name, name_format, list);
    va_end(list);
    figure->value = value;
    figure->unit = unit;
}

double bench_get(const bench *b, const char *name_format, ...)
{
    char name[BENCH_NAME_SIZE];
    va_list list;
    va_start(list, name_format);
    vsnprintf(name, sizeof name, name_format, list);
    va_end(list);
    for (size_t i = 0; i < b->figure_count; i++) {
        if (strcmp(b->figures[i].name, name) == 0) {
            return b->figures[i].value;
        }
    }
    return NAN;
}

static void add_target(bench *b, double value, double limit, bool at_most, const char *format,
                       va_list list)
{
    if (b->target_count < BENCH_TARGETS_MAX) {
        bench_target *target = &b->targets[b->target_count++];
        vsnprintf(target->name, sizeof target->name, format, list);
        target->value = value;
        target->limit = limit;
        target->at_most = at_most;
    }
}

void bench_at_most(bench *b, double value, double limit, const char *name_format, ...)
{
    va_list list;
    va_start(list, name_format);
    add_target(b, value, limit, true, name_format, list);
    va_end(list);
}

void bench_at_least(bench *b, double value, double limit, const char *name_format, ...)
{
    va_list list;
    va_start(list, name_format);
    add_target(b, value, limit, false, name_format, list);
    va_end(list);
}

bool bench_met(const bench_target *target)
{
    return target->at_most ? target->value <= target->limit : target->value >= target->limit;
}

/* ---------------------------------------------------------------- the machine */

static void cpu_name(char name[128])
{
    strcpy(name, "unknown processor");
    FILE *file = fopen("/proc/cpuinfo", "r");
    char line[256];
    while (file && fgets(line, sizeof line, file)) {
        const char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) == 0 && colon) {
            snprintf(name, 128, "%.*s", (int)strcspn(colon + 2, "\n"), colon + 2);
            break;
        }
    }
    if (file) {
        fclose(file);
    }
}

#if defined(__clang__)
#define COMPILER "clang " __clang_version__
#else
#define COMPILER "gcc " __VERSION__
#endif

/* ---------------------------------------------------------------- for people */

static const char *const stages[][2] = {
    {"memcpy_reply", "memcpy of the reply"}, {"memcpy_record", "memcpy of the record"},
    {"decode", "decode: reply to record"},   {"put", "put: record to committed"},
    {"put_reply", "both, in one call"},      {"check", "check a stored record (verify)"},
    {"memcpys", "both, of the two memcpys"},
};
static const unsigned sizes[] = {500, 2000, 8000};

static bool is_stage(const char *name)
{
    for (size_t i = 0; i < sizeof stages / sizeof *stages; i++) {
        size_t length = strlen(stages[i][0]);
        if (strncmp(name, stages[i][0], length) == 0 && name[length] == '.' &&
            (strstr(name, ".hot") || strstr(name, ".received") || strstr(name, ".cold"))) {
            return true;
        }
    }
    return false;
}

static void print_value(output *out, int width, double value)
{
    if (isnan(value)) {
        output_format(out, "%*s", width, "-");
    } else {
        output_format(out, "%*.*f", width, value < 9.995 ? 2 : value < 99.95 ? 1 : 0, value);
    }
}

static void print_stages(const bench *b, output *out)
{
    output_format(out, "%-32s%21s%21s%21s\n", "flat base64 reply, k = 32", "hot: all cached",
                  "received: reply is", "cold: nothing is");
    output_format(out, "%-32s", "median microseconds, of tokens:");
    for (size_t i = 0; i < 9; i++) {
        output_format(out, "%7u", sizes[i % 3]);
    }
    output_text(out, "\n");
    for (size_t i = 0; i < sizeof stages / sizeof *stages; i++) {
        output_format(out, "  %-30s", stages[i][1]);
        for (size_t j = 0; j < 9; j++) {
            static const char *const heats[] = {"hot", "received", "cold"};
            print_value(out, 7, bench_get(b, "%s.%u.%s", stages[i][0], sizes[j % 3], heats[j / 3]));
        }
        output_text(out, "\n");
    }
}

static void print_targets(const bench *b, output *out)
{
    size_t missed = 0;
    output_text(out, "\ntargets\n");
    for (size_t i = 0; i < b->target_count; i++) {
        const bench_target *t = &b->targets[i];
        bool met = bench_met(t);
        missed += !met;
        output_format(out, "  %-44s", t->name);
        print_value(out, 9, t->value);
        output_format(out, "  %s %-8g", t->at_most ? "at most " : "at least", t->limit);
        output_text(out, met ? "met\n" : "FELL SHORT\n");
    }
    output_format(out, "%zu of %zu targets met\n", b->target_count - missed, b->target_count);
}

void bench_print_table(const bench *b, output *out)
{
    char name[128];
    cpu_name(name);
    output_format(out, "rollstore %s, base64 %s; %s, %ld cores, largest cache %zu MiB; %s\n\n",
                  rst_version(), rst_base64_path(), name, sysconf(_SC_NPROCESSORS_ONLN),
                  b->cache_size >> 20, COMPILER);
    print_stages(b, out);
    output_text(out, "\nothers\n");
    for (size_t i = 0; i < b->figure_count; i++) {
        if (!is_stage(b->figures[i].name)) {
            output_format(out, "  %-44s", b->figures[i].name);
            print_value(out, 9, b->figures[i].value);
            output_format(out, " %s\n", b->figures[i].unit);
        }
    }
    print_targets(b, out);
}

/* ---------------------------------------------------------------- for programs */

static void json_figures(const bench *b, output *out)
{
    json_open_key(out, "figures", '{');
    for (size_t i = 0; i < b->figure_count; i++) {
        json_open_key(out, b->figures[i].name, '{');
        json_key(out, "value");
        json_double(out, b->figures[i].value);
        json_key(out, "unit");
        json_text(out, b->figures[i].unit);
        json_close(out, '}');
    }
    json_close(out, '}');
}

static void json_targets(const bench *b, output *out)
{
    json_open_key(out, "targets", '[');
    for (size_t i = 0; i < b->target_count; i++) {
        const bench_target *t = &b->targets[i];
        json_open(out, '{');
        json_key(out, "name");
        json_text(out, t->name);
        json_key(out, "value");
        json_double(out, t->value);
        json_key(out, t->at_most ? "at_most" : "at_least");
        json_double(out, t->limit);
        json_key(out, "met");
        json_bool(out, bench_met(t));
        json_close(out, '}');
    }
    json_close(out, ']');
}

void bench_print_json(const bench *b, output *out)
{
    char name[128];
    cpu_name(name);
    json_open(out, '{');
    json_key(out, "version");
    json_text(out, rst_version());
    json_key(out, "base64");
    json_text(out, rst_base64_path());
    json_key(out, "cpu");
    json_text(out, name);
    json_key(out, "cores");
    json_i64(out, sysconf(_SC_NPROCESSORS_ONLN));
    json_key(out, "cache_size");
    json_u64(out, b->cache_size);
    json_key(out, "compiler");
    json_text(out, COMPILER);
    json_key(out, "quick");
    json_bool(out, b->quick);
    json_figures(b, out);
    json_targets(b, out);
    json_close(out, '}');
    output_text(out, "\n");
}
