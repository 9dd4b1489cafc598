#include "../base/terminal.h"
#include "../command.h"

static const char help[] =
    "usage: rollstore create STORE [OPTION...]\n"
    "\n"
    "Create a store.  Its whole capacity is taken from the file system at once, so\n"
    "that it cannot run out later.\n"
    "\n" CREATE_HELP "  --if-missing         a store that is there already is a success, and keeps "
    "its\n"
    "                       settings\n"
    "\n"
    "example: rollstore create /dev/shm/run1 --capacity 8G\n";

static int run(int argc, char **argv)
{
    create_arguments create = {.durability = RST_DURABILITY_MEMORY};
    bool if_missing = false;
    const arg_option options[] = {
        CREATE_OPTIONS(create),
        {.name = "if-missing", .kind = OPTION_FLAG, .value = &if_missing},
        {.name = NULL},
    };
    arg_operands operands;
    if (!args_parse(argc, argv, options, 1, 1, &operands)) {
        return STATUS_USAGE;
    }
    rst_create_options settings = create_options_of(&create);
    unsigned flags = RST_OPEN_CREATE | (if_missing ? 0 : RST_OPEN_EXCLUSIVE) |
                     (create.group ? RST_OPEN_GROUP : 0);
    rst_store *store = open_store(operands.items[0], flags, &settings);
    if (!store) {
        return STATUS_FAILED;
    }
    rst_error error;
    if (rst_store_close(store, &error)) {
        return fail_error(&error);
    }
    return STATUS_OK;
}

const tool_command command_create = {"create", "make a new store", help, run};
