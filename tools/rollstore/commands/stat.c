#include <stdio.h>
#include <string.h>
#include <time.h>

#include "../base/terminal.h"
#include "../command.h"
#include "../formats.h"

static const char help[] =
    "usage: rollstore stat STORE [OPTION...]\n"
    "\n"
    "Show a store's capacity and use, its readers, sessions and consumers.  Costs no\n"
    "reading of the data.\n"
    "\n"
    "  --stalled-after TIME a consumer that leaves sessions waiting and did nothing\n"
    "                       for so long counts as stalled (10m)\n"
    "  --json               one JSON object\n"
    "\n"
    "example: watch rollstore stat /dev/shm/run1\n";

#define STALLED_AFTER_MS 600000

typedef struct stat_run {
    rst_store *store;
    rst_snapshot *snapshot;
    rst_stat stat;
    int64_t stalled_after_ms;
    output out;
} stat_run;

/* ---------------------------------------------------------------- consumers */

static bool is_stalled(const stat_run *run, const rst_consumer *consumer)
{
    if (run->stalled_after_ms < 0 || consumer->waiting_count + consumer->free_count == 0) {
        return false;
    }
    return clock_ns(CLOCK_REALTIME) - consumer->changed_ns > run->stalled_after_ms * 1000000;
}

static void print_consumer(stat_run *run, const rst_consumer *consumer)
{
    output *out = &run->out;
    char text[TEXT_SIZE];
    uint64_t waiting = consumer->waiting_count + consumer->free_count;
    output_format(out, "%-12s ", "consumer");
    output_shown(out, consumer->name, consumer->name_size, 40);
    output_format(out, ": %llu waiting, ", (unsigned long long)waiting);
    output_format(
        out, "%llu held, %llu trained, %llu committed", (unsigned long long)consumer->held_count,
        (unsigned long long)consumer->trained_count, (unsigned long long)consumer->committed_count);
    if (is_stalled(run, consumer)) {
        output_colour(out, COLOUR_BAD);
        output_format(out, "\n%-12s stalled: it did nothing for %s", "",
                      age_text(consumer->changed_ns, text));
        output_colour(out, COLOUR_NONE);
    }
    output_text(out, "\n");
}

static void json_one_consumer(stat_run *run, const rst_consumer *consumer)
{
    output *out = &run->out;
    json_open(out, '{');
    json_consumer(out, consumer);
    json_key(out, "stalled");
    json_bool(out, is_stalled(run, consumer));
    json_close(out, '}');
}

static int each_consumer(stat_run *run, void (*print)(stat_run *, const rst_consumer *))
{
    uint8_t key[RST_KEY_SIZE];
    const uint8_t *after = NULL;
    rst_consumer consumer;
    rst_error error;
    int code;
    while ((code = rst_consumer_next(run->snapshot, after, &consumer, key, &error)) == RST_OK) {
        print(run, &consumer);
        after = key;
    }
    return code == RST_ERR_NOT_FOUND ? STATUS_OK : fail_error(&error);
}

/* ---------------------------------------------------------------- for people */

/* A process's name, for people who do not know their process ids by heart. */
static void print_process(output *out, uint32_t pid)
{
    char path[64];
    char name[64] = "";
    snprintf(path, sizeof path, "/proc/%u/comm", pid);
    FILE *file = fopen(path, "re");
    if (file) {
        if (!fgets(name, sizeof name, file)) {
            name[0] = '\0';
        }
        fclose(file);
    }
    name[strcspn(name, "\n")] = '\0';
    output_format(out, "process %u", pid);
    if (*name) {
        output_text(out, " (");
        output_shown(out, name, strlen(name), 0);
        output_text(out, ")");
    }
}

static void print_label(output *out, const char *label)
{
    output_colour(out, COLOUR_DIM);
    output_format(out, "%-12s ", label);
    output_colour(out, COLOUR_NONE);
}

static void print_space(stat_run *run)
{
    output *out = &run->out;
    const rst_stat *stat = &run->stat;
    char text[TEXT_SIZE];
    uint64_t capacity = stat->format.capacity_size;
    uint64_t used =
        stat->used_size < capacity ? stat->used_size : capacity; /* a release has more */
    uint64_t unused = stat->free_size < capacity - used ? stat->free_size : capacity - used;
    print_label(out, "capacity");
    output_format(out, "%s, ", size_text(capacity, text));
    output_format(out, "%s in use (%.0f%%), ", size_text(used, text),
                  capacity ? 100 * (double)used / (double)capacity : 0.0);
    output_format(out, "%s free", size_text(unused, text));
    if (stat->pinned_size) {
        output_format(out, ", %s held by readers", size_text(stat->pinned_size, text));
    }
    output_text(out, "\n");
    print_label(out, "durability");
    if (stat->format.durability == RST_DURABILITY_INTERVAL) {
        output_format(out, "interval: synced every %u ms\n", stat->format.interval_ms);
    } else {
        output_text(out, stat->format.durability == RST_DURABILITY_FULL
                             ? "full: synced at each commit\n"
                             : "memory: survives processes, not the machine\n");
    }
}

static void print_readers(stat_run *run)
{
    output *out = &run->out;
    const rst_stat *stat = &run->stat;
    print_label(out, "readers");
    output_format(out, "%u of %u slots", stat->readers_used, stat->format.reader_count);
    if (stat->reader_pid) {
        output_text(out, "; the oldest snapshot: ");
        print_process(out, stat->reader_pid);
        output_format(out, ", %llu commits old", (unsigned long long)stat->reader_age);
    }
    output_text(out, "\n");
}

static void print_contents(stat_run *run)
{
    output *out = &run->out;
    const rst_totals_entry *totals = &run->stat.totals;
    char text[TEXT_SIZE];
    print_label(out, "sessions");
    output_format(out, "%s sealed, ", count_text(totals->sealed_count, text));
    output_format(out, "%s open; ", count_text(totals->open_count, text));
    output_format(out, "%s released before\n", count_text(totals->released_count, text));
    print_label(out, "turns");
    output_format(out, "%s with ", count_text(totals->turn_count, text));
    output_count(out, totals->generated_count, "token");
    output_text(out, ", ");
    output_format(out, "%s\n", size_text(totals->value_size, text));
    print_label(out, "sequence");
    output_format(out, "next is %llu\n", (unsigned long long)totals->next_sequence);
}

static int print_stat(stat_run *run)
{
    output *out = &run->out;
    char text[TEXT_SIZE];
    print_label(out, "store");
    const char *path = rst_store_path(run->store);
    output_shown(out, path, strlen(path), 0);
    output_format(out, "\n");
    print_label(out, "created");
    output_format(out, "%s, format %u, %u-byte pages\n",
                  time_text(run->stat.format.created_ns, text), run->stat.format.version,
                  run->stat.format.page_size);
    print_space(run);
    print_readers(run);
    print_contents(run);
    return each_consumer(run, print_consumer);
}

/* ---------------------------------------------------------------- for programs */

static void json_u64_key(output *out, const char *key, uint64_t value)
{
    json_key(out, key);
    json_u64(out, value);
}

static void json_counts(output *out, const rst_stat *stat)
{
    json_u64_key(out, "capacity_size", stat->format.capacity_size);
    json_u64_key(out, "map_size", stat->format.map_size);
    json_u64_key(out, "used_size", stat->used_size);
    json_u64_key(out, "free_size", stat->free_size);
    json_u64_key(out, "pinned_size", stat->pinned_size);
    json_u64_key(out, "reader_count", stat->format.reader_count);
    json_u64_key(out, "readers_used", stat->readers_used);
    json_key(out, "reader_pid");
    if (stat->reader_pid) {
        json_u64(out, stat->reader_pid);
    } else {
        json_null(out);
    }
    json_u64_key(out, "reader_age", stat->reader_age);
    json_u64_key(out, "session_count", stat->session_count);
    json_u64_key(out, "open_count", stat->totals.open_count);
    json_u64_key(out, "sealed_count", stat->totals.sealed_count);
    json_u64_key(out, "released_count", stat->totals.released_count);
    json_u64_key(out, "turn_count", stat->totals.turn_count);
    json_u64_key(out, "generated_count", stat->totals.generated_count);
    json_u64_key(out, "value_size", stat->totals.value_size);
    json_u64_key(out, "next_sequence", stat->totals.next_sequence);
    json_u64_key(out, "last_transaction", stat->last_transaction);
}

static int json_stat(stat_run *run)
{
    output *out = &run->out;
    const rst_format_entry *format = &run->stat.format;
    json_open(out, '{');
    json_key(out, "path");
    json_text(out, rst_store_path(run->store));
    json_u64_key(out, "format_version", format->version);
    json_key(out, "store_id");
    json_open(out, '"');
    output_hex(out, format->store_id, sizeof format->store_id);
    json_close(out, '"');
    json_key(out, "created_ns");
    json_i64(out, format->created_ns);
    json_u64_key(out, "page_size", format->page_size);
    json_key(out, "durability");
    json_text(out, durability_name(format->durability));
    json_u64_key(out, "interval_ms", format->interval_ms);
    json_counts(out, &run->stat);
    json_open_key(out, "consumers", '[');
    int status = each_consumer(run, json_one_consumer);
    json_close(out, ']');
    json_close(out, '}');
    output_text(out, "\n");
    return status;
}

static int run(int argc, char **argv)
{
    bool json = false;
    stat_run stat = {.stalled_after_ms = STALLED_AFTER_MS};
    const arg_option options[] = {
        {.name = "stalled-after", .kind = OPTION_TIME, .value = &stat.stalled_after_ms},
        {.name = "json", .kind = OPTION_FLAG, .value = &json},
        {.name = NULL},
    };
    arg_operands operands;
    if (!args_parse(argc, argv, options, 1, 1, &operands)) {
        return STATUS_USAGE;
    }
    rst_error error;
    stat.store = open_store(operands.items[0], RST_OPEN_READ_ONLY, NULL);
    if (!stat.store) {
        return STATUS_FAILED;
    }
    /* Before our own snapshot, which would be the oldest one where there is no other. */
    int status = STATUS_OK;
    if (rst_store_stat(stat.store, &stat.stat, &error) ||
        rst_snapshot_open(stat.store, &stat.snapshot, &error)) {
        status = fail_error(&error);
    } else {
        status = json ? json_stat(&stat) : print_stat(&stat);
    }
    int written = status ? STATUS_OK : output_finish(&stat.out);
    output_free(&stat.out);
    rst_snapshot_close(stat.snapshot);
    rst_store_close(stat.store, NULL);
    return status ? status : written;
}

const tool_command command_stat = {"stat", "show capacity, use, readers and consumers", help, run};
