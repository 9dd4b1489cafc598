#include <string.h>

#include "../base/terminal.h"
#include "../command.h"
#include "../formats.h"

static const char help[] =
    "usage: rollstore consumers STORE [--json]\n"
    "       rollstore consumers STORE --create NAME [--newest]\n"
    "       rollstore consumers STORE --drop NAME\n"
    "\n"
    "List the consumers with the sessions that wait for each, that it holds, has\n"
    "trained on and has committed; or create or drop one.\n"
    "\n"
    "  --create NAME        one that is there already stays as it is\n"
    "  --newest             it begins at the next session to be sealed, not at the\n"
    "                       oldest\n"
    "  --drop NAME          forget it and its leases: what only it had not committed\n"
    "                       can then be released\n"
    "  --json               one JSON object a line\n"
    "\n"
    "example: rollstore consumers /dev/shm/run1 --drop trainer-of-last-week\n";

typedef struct consumers_arguments {
    const char *create;
    const char *drop;
    bool newest;
    bool json;
} consumers_arguments;

static void print_row(output *out, const rst_consumer *consumer)
{
    char age[TEXT_SIZE];
    uint64_t waiting = consumer->waiting_count + consumer->free_count;
    output_format(out, "%8llu %8llu %8llu %9llu %8llu %6s  ", (unsigned long long)waiting,
                  (unsigned long long)consumer->held_count,
                  (unsigned long long)consumer->trained_count,
                  (unsigned long long)consumer->committed_count,
                  (unsigned long long)consumer->again_total, age_text(consumer->changed_ns, age));
    output_shown(out, consumer->name, consumer->name_size, 0);
    output_text(out, "\n");
}

static int list(output *out, rst_snapshot *snapshot, bool json)
{
    uint8_t key[RST_KEY_SIZE];
    const uint8_t *after = NULL;
    rst_consumer consumer;
    rst_error error;
    int code;
    if (!json) {
        output_colour(out, COLOUR_BOLD);
        output_format(out, "%8s %8s %8s %9s %8s %6s  %s", "WAITING", "HELD", "TRAINED", "COMMITTED",
                      "AGAIN", "ACTIVE", "CONSUMER");
        output_colour(out, COLOUR_NONE);
        output_text(out, "\n");
    }
    while ((code = rst_consumer_next(snapshot, after, &consumer, key, &error)) == RST_OK) {
        if (json) {
            json_open(out, '{');
            json_consumer(out, &consumer);
            json_close(out, '}');
            output_text(out, "\n");
        } else {
            print_row(out, &consumer);
        }
        after = key;
    }
    return code == RST_ERR_NOT_FOUND ? STATUS_OK : fail_error(&error);
}

static int list_store(const char *path, bool json)
{
    store_reading reading;
    if (!reading_begin(&reading, path)) {
        return STATUS_FAILED;
    }
    output out = {0};
    int status = list(&out, reading.snapshot, json);
    reading_end(&reading);
    if (status) {
        output_free(&out);
        return status;
    }
    return output_finish(&out);
}

static int change_store(const char *path, const consumers_arguments *arguments)
{
    rst_store *store = open_store(path, 0, NULL);
    if (!store) {
        return STATUS_FAILED;
    }
    rst_error error;
    int code = arguments->create
                   ? rst_consumer_create(store, arguments->create, strlen(arguments->create),
                                         arguments->newest ? RST_START_NEWEST : RST_START_OLDEST,
                                         NULL, &error)
                   : rst_consumer_drop(store, arguments->drop, strlen(arguments->drop), &error);
    int status = code ? fail_error(&error) : STATUS_OK;
    if (rst_store_close(store, &error) && status == STATUS_OK) {
        status = fail_error(&error);
    }
    return status;
}

static int run(int argc, char **argv)
{
    consumers_arguments a = {.json = false};
    const arg_option options[] = {
        {.name = "create", .kind = OPTION_TEXT, .value = &a.create},
        {.name = "drop", .kind = OPTION_TEXT, .value = &a.drop},
        {.name = "newest", .kind = OPTION_FLAG, .value = &a.newest},
        {.name = "json", .kind = OPTION_FLAG, .value = &a.json},
        {.name = NULL},
    };
    arg_operands operands;
    if (!args_parse(argc, argv, options, 1, 1, &operands)) {
        return STATUS_USAGE;
    }
    if (a.create && a.drop) {
        return fail_usage(argv[0], "--create and --drop exclude each other");
    }
    if (a.newest && !a.create) {
        return fail_usage(argv[0], "--newest is for --create");
    }
    return a.create || a.drop ? change_store(operands.items[0], &a)
                              : list_store(operands.items[0], a.json);
}

const tool_command command_consumers = {"consumers", "list, create and drop consumers", help, run};
