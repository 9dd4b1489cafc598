#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "../base/terminal.h"
#include "../command.h"
#include "../ingest/ingest.h"

static const char help[] =
    "usage: rollstore ingest STORE [FILE...] [OPTION...]\n"
    "\n"
    "Store recorded sessions, one JSON object a line, from files or standard input\n"
    "(-):\n"
    "  {\"session_id\", \"turn\", \"request\", \"response\"}\n"
    "  {\"session_id\", \"end\": {\"status\", \"reward\", \"group_index\", \"index\"}}\n"
    "Each refused line is named with its number and the reason; the others are\n"
    "stored.  A session with a refused line is left open: its later lines are refused\n"
    "too.  The same input again changes nothing.\n"
    "\n"
    "  -j, --jobs N         processes that decode and store (the processors, at most\n"
    "                       8)\n"
    "  -k, --top-k K        k that every turn must have; of support turns, most\n"
    "                       candidates of a row\n"
    "  --replace            lines take the place of other turns and outcomes\n"
    "  --timeout TIME       how long to wait for space when the store is full: 10\n"
    "                       (seconds, the default), 500ms, 5m, forever\n"
    "  --create             create the store when there is none, with:\n" CREATE_HELP
    "  --json               print the counts as a JSON object\n"
    "\n"
    "Also exits with 1 when a line was refused or a worker was lost.  Ctrl-C stores\n"
    "what is decoded, prints the counts and ends.\n"
    "\n"
    "example: rollstore ingest /dev/shm/run1 sessions.jsonl --jobs 8 --create \\\n"
    "             --capacity 8G\n";

#define JOBS_DEFAULT_MAX 8

typedef struct ingest_arguments {
    uint64_t jobs;
    uint64_t topk;
    bool replace;
    bool create_store;
    bool json;
    int64_t timeout_ms;
    create_arguments create;
} ingest_arguments;

typedef struct ingest_command {
    progress_bar bar;
    int64_t begun_ns;
} ingest_command;

/* ---------------------------------------------------------------- events */

static void print_refused(void *context, const char *source, uint64_t line, int code,
                          const char *message)
{
    ingest_command *command = context;
    progress_clear(&command->bar);
    fail(rst_code_name(code), "line %llu of %s: %s", (unsigned long long)line, source, message);
}

static void print_failed(void *context, const char *kind, const char *message)
{
    ingest_command *command = context;
    progress_clear(&command->bar);
    fail(kind, "%s", message);
}

static void draw_progress(void *context, uint64_t bytes)
{
    ingest_command *command = context;
    progress_draw(&command->bar, bytes, true);
}

/* ---------------------------------------------------------------- counts */

static void print_refusals(output *out, const ingest_result *result)
{
    const char *separator = "";
    if (result->counts.refused == 0) {
        return;
    }
    output_text(out, " (");
    for (int code = 0; code < INGEST_CODE_COUNT; code++) {
        if (result->refused_by_code[code]) {
            output_format(out, "%s%s %llu", separator, rst_code_name(code),
                          (unsigned long long)result->refused_by_code[code]);
            separator = ", ";
        }
    }
    output_text(out, ")");
}

static void print_count(output *out, const char *label, uint64_t count)
{
    char text[TEXT_SIZE];
    output_format(out, "%-16s %12s", label, count_text(count, text));
}

static void print_counts(output *out, const ingest_result *result, double seconds)
{
    const ingest_counts *counts = &result->counts;
    char size[TEXT_SIZE];
    print_count(out, "sessions sealed", counts->sessions_sealed);
    output_text(out, "\n");
    print_count(out, "turns stored", counts->turns_stored);
    output_text(out, "\n");
    print_count(out, "unchanged", counts->unchanged);
    output_text(out, "\n");
    print_count(out, "refused", counts->refused);
    print_refusals(out, result);
    output_text(out, "\n");
    if (result->lost) {
        print_count(out, "not stored", result->lost);
        output_text(out, "\n");
    }
    output_format(out, "%-16s %12s in %.2f s, %.1f MB/s\n", "read", size_text(counts->bytes, size),
                  seconds, (double)counts->bytes / 1e6 / seconds);
}

static void json_counts(output *out, const ingest_result *result, double seconds)
{
    const ingest_counts *counts = &result->counts;
    const struct {
        const char *key;
        uint64_t value;
    } members[] = {{"sessions_sealed", counts->sessions_sealed},
                   {"turns_stored", counts->turns_stored},
                   {"unchanged", counts->unchanged},
                   {"refused", counts->refused},
                   {"not_stored", result->lost},
                   {"bytes", counts->bytes}};
    json_open(out, '{');
    for (size_t i = 0; i < sizeof members / sizeof *members; i++) {
        json_key(out, members[i].key);
        json_u64(out, members[i].value);
    }
    json_open_key(out, "refused_by_kind", '{');
    for (int code = 0; code < INGEST_CODE_COUNT; code++) {
        if (result->refused_by_code[code]) {
            json_key(out, rst_code_name(code));
            json_u64(out, result->refused_by_code[code]);
        }
    }
    json_close(out, '}');
    json_key(out, "seconds");
    json_double(out, seconds);
    json_key(out, "mb_per_second");
    json_double(out, (double)counts->bytes / 1e6 / seconds);
    json_key(out, "interrupted");
    json_bool(out, result->interrupted != 0);
    json_close(out, '}');
    output_text(out, "\n");
}

/* ---------------------------------------------------------------- inputs */

static bool open_source(const char *path, ingest_source *source, uint64_t *total, bool *known)
{
    bool standard = strcmp(path, "-") == 0;
    struct stat status;
    source->name = standard ? "standard input" : path;
    source->fd = standard ? STDIN_FILENO : open(path, O_RDONLY | O_CLOEXEC);
    if (source->fd < 0 || fstat(source->fd, &status) != 0) {
        fail_system(errno, source->name);
        return false;
    }
    if (S_ISDIR(status.st_mode)) {
        fail_system(EISDIR, source->name);
        return false;
    }
    source->regular = S_ISREG(status.st_mode);
    *known = *known && source->regular;
    *total += source->regular ? (uint64_t)status.st_size : 0;
    return true;
}

/* All of them before anything is stored, so that a misspelt name costs nothing.  *total: their
 * bytes, 0 when that is not known. */
static bool open_sources(char **paths, size_t count, ingest_source *sources, uint64_t *total)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit); /* else opening a file will say what is wrong */
    }
    bool known = true;
    *total = 0;
    for (size_t i = 0; i < count; i++) {
        if (!open_source(paths[i], &sources[i], total, &known)) {
            return false;
        }
    }
    *total = known ? *total : 0;
    return true;
}

/* ---------------------------------------------------------------- the command */

/* A store that cannot be opened is reported once, before any worker starts; and no handle is left
 * open over the fork. */
static bool prepare_store(const ingest_arguments *arguments, const char *path)
{
    rst_create_options create = create_options_of(&arguments->create);
    unsigned flags = (arguments->create_store ? RST_OPEN_CREATE : 0) |
                     (arguments->create.group ? RST_OPEN_GROUP : 0);
    rst_store *store = open_store(path, flags, &create);
    rst_error error;
    if (store && rst_store_close(store, &error)) {
        fail_error(&error);
        return false;
    }
    return store != NULL;
}

static int print_result(const ingest_arguments *arguments, const ingest_command *command,
                        const ingest_result *result)
{
    output out = {0};
    double seconds = (double)(clock_ns(CLOCK_MONOTONIC) - command->begun_ns) / 1e9;
    if (arguments->json) {
        json_counts(&out, result, seconds);
    } else {
        print_counts(&out, result, seconds);
    }
    int written = output_finish(&out);
    return result->counts.refused || result->lost || result->failed ? STATUS_FAILED : written;
}

static int ingest(const ingest_arguments *arguments, const char *path, char **inputs, size_t count)
{
    static char standard_input[] = "-";
    char *only_standard_input[] = {standard_input};
    inputs = count ? inputs : only_standard_input;
    count = count ? count : 1;
    ingest_source *sources = calloc(count, sizeof *sources);
    uint64_t total;
    if (!sources) {
        return fail("memory", "no memory for the inputs");
    }
    if (!open_sources(inputs, count, sources, &total) || !prepare_store(arguments, path)) {
        free(sources);
        return STATUS_FAILED;
    }
    ingest_settings settings = {.store_path = path,
                                .sources = sources,
                                .source_count = count,
                                .jobs = (unsigned)arguments->jobs,
                                .topk = (uint32_t)arguments->topk,
                                .change_flags = arguments->replace ? RST_CHANGE_REPLACE : 0,
                                .timeout_ms = arguments->timeout_ms};
    ingest_command command = {.begun_ns = clock_ns(CLOCK_MONOTONIC)};
    ingest_events events = {.context = &command,
                            .refused = print_refused,
                            .failed = print_failed,
                            .progress = draw_progress};
    ingest_result result;
    progress_begin(&command.bar, "ingest", total);
    ingest_run(&settings, &events, &result);
    progress_clear(&command.bar);
    free(sources);
    int status = print_result(arguments, &command, &result);
    if (result.interrupted) {
        signal(result.interrupted, SIG_DFL);
        raise(result.interrupted); /* so that a shell's loop ends too */
    }
    return status;
}

static uint64_t default_jobs(void)
{
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    return processors < 1                  ? 1
           : processors > JOBS_DEFAULT_MAX ? JOBS_DEFAULT_MAX
                                           : (uint64_t)processors;
}

static int run(int argc, char **argv)
{
    ingest_arguments a = {.jobs = default_jobs(),
                          .timeout_ms = TIMEOUT_DEFAULT_MS,
                          .create = {.durability = RST_DURABILITY_MEMORY}};
    const arg_option options[] = {
        {.name = "jobs",
         .letter = 'j',
         .kind = OPTION_COUNT,
         .value = &a.jobs,
         .min = 1,
         .max = INGEST_JOBS_MAX},
        {.name = "top-k",
         .letter = 'k',
         .kind = OPTION_COUNT,
         .value = &a.topk,
         .max = RST_TOPK_MAX},
        {.name = "replace", .kind = OPTION_FLAG, .value = &a.replace},
        {.name = "timeout", .kind = OPTION_TIME, .value = &a.timeout_ms},
        {.name = "create", .kind = OPTION_FLAG, .value = &a.create_store},
        CREATE_OPTIONS(a.create),
        {.name = "json", .kind = OPTION_FLAG, .value = &a.json},
        {.name = NULL},
    };
    arg_operands operands;
    if (!args_parse(argc, argv, options, 1, -1, &operands)) {
        return STATUS_USAGE;
    }
    int standard_inputs = 0;
    for (int i = 1; i < operands.count; i++) {
        standard_inputs += strcmp(operands.items[i], "-") == 0;
    }
    if (standard_inputs > 1) {
        return fail_usage(argv[0], "standard input is named twice");
    }
    return ingest(&a, operands.items[0], operands.items + 1, (size_t)operands.count - 1);
}

const tool_command command_ingest = {"ingest", "store recorded sessions, with several processes",
                                     help, run};
