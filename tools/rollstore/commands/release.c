#include <string.h>

#include "../command.h"

static const char help[] =
    "usage: rollstore release STORE SESSION... [--force]\n"
    "       rollstore release STORE --consumed [--limit N]\n"
    "\n"
    "Delete sessions, open or sealed; their space is used again.\n"
    "\n"
    "  --consumed           the sealed sessions that every consumer has committed,\n"
    "                       oldest first; none where there is no consumer\n"
    "  -n, --limit N        at most N of them\n"
    "  --force              also sessions that a consumer has not finished with\n"
    "  --key                SESSION is a session key, as ls --json shows it\n"
    "  --json               print the number of released sessions as a JSON object\n"
    "\n"
    "Each SESSION is released by itself; one that cannot be is reported, and the\n"
    "others are released all the same.\n"
    "\n"
    "example: rollstore release /dev/shm/run1 swe-17/rollout-3\n";

typedef struct release_arguments {
    bool consumed;
    bool force;
    bool by_key;
    bool json;
    uint64_t limit;
} release_arguments;

static int release_by_key(rst_store *store, const char *text, unsigned flags)
{
    rst_snapshot *snapshot;
    rst_error error;
    if (rst_snapshot_open(store, &snapshot, &error)) {
        return fail_error(&error);
    }
    session_target target;
    char id[RST_SESSION_ID_SIZE_MAX];
    bool found = find_target(snapshot, text, NO_TURN, true, &target);
    if (found) {
        memcpy(id, target.session.id, target.session.id_size); /* outlives the snapshot */
    }
    rst_snapshot_close(snapshot);
    if (!found) {
        return STATUS_FAILED;
    }
    return rst_release(store, id, target.session.id_size, flags, &error) ? fail_error(&error)
                                                                         : STATUS_OK;
}

static int release_named(rst_store *store, const release_arguments *arguments, char **names,
                         int count, uint64_t *released)
{
    unsigned flags = arguments->force ? RST_CHANGE_FORCE : 0;
    int status = STATUS_OK;
    for (int i = 0; i < count; i++) {
        rst_error error;
        int failed;
        if (arguments->by_key) {
            failed = release_by_key(store, names[i], flags);
        } else if (rst_release(store, names[i], strlen(names[i]), flags, &error)) {
            failed = fail_error(&error);
        } else {
            failed = STATUS_OK;
        }
        status = failed ? failed : status;
        *released += failed ? 0 : 1;
    }
    return status;
}

static int print_released(bool json, uint64_t released)
{
    output out = {0};
    output_format(&out, json ? "{\"released\":%llu}\n" : "released %llu\n",
                  (unsigned long long)released);
    return output_finish(&out);
}

static int release(const release_arguments *arguments, const arg_operands *operands)
{
    rst_store *store = open_store(operands->items[0], 0, NULL);
    if (!store) {
        return STATUS_FAILED;
    }
    uint64_t released = 0;
    rst_error error;
    int status = STATUS_OK;
    if (!arguments->consumed) {
        status =
            release_named(store, arguments, operands->items + 1, operands->count - 1, &released);
    } else if (rst_release_consumed(store, arguments->limit, &released, &error)) {
        status = fail_error(&error);
    }
    if (rst_store_close(store, &error) && status == STATUS_OK) {
        status = fail_error(&error);
    }
    int written = print_released(arguments->json, released);
    return status ? status : written;
}

static int run(int argc, char **argv)
{
    release_arguments a = {.limit = 0};
    const arg_option options[] = {
        {.name = "consumed", .kind = OPTION_FLAG, .value = &a.consumed},
        {.name = "limit", .letter = 'n', .kind = OPTION_COUNT, .value = &a.limit, .min = 1},
        {.name = "force", .kind = OPTION_FLAG, .value = &a.force},
        {.name = "key", .kind = OPTION_FLAG, .value = &a.by_key},
        {.name = "json", .kind = OPTION_FLAG, .value = &a.json},
        {.name = NULL},
    };
    arg_operands operands;
    if (!args_parse(argc, argv, options, 1, -1, &operands)) {
        return STATUS_USAGE;
    }
    if (a.consumed == (operands.count > 1)) {
        return fail_usage(argv[0], "it takes either SESSION... or --consumed");
    }
    if (a.consumed && (a.force || a.by_key)) {
        return fail_usage(argv[0], "--force and --key are for SESSION...");
    }
    if (!a.consumed && a.limit) {
        return fail_usage(argv[0], "--limit is for --consumed");
    }
    return release(&a, &operands);
}

const tool_command command_release = {"release", "delete sessions and free their space", help, run};
