#include "../command.h"

static const char help[] =
    "usage: rollstore copy STORE NEW [--capacity SIZE]\n"
    "\n"
    "Copy a store, also one in use, to a new store at NEW: as it is at one moment,\n"
    "without the space that releases left behind.\n"
    "\n"
    "  --capacity SIZE      of the copy: 64M, 2G, 1GiB (the same as the store's)\n"
    "\n"
    "example: rollstore copy /dev/shm/run1 /data/run1-monday\n";

static int run(int argc, char **argv)
{
    uint64_t capacity_size = 0;
    const arg_option options[] = {
        {.name = "capacity", .kind = OPTION_SIZE, .value = &capacity_size, .min = 1},
        {.name = NULL},
    };
    arg_operands operands;
    if (!args_parse(argc, argv, options, 2, 2, &operands)) {
        return STATUS_USAGE;
    }
    rst_store *store = open_store(operands.items[0], RST_OPEN_READ_ONLY, NULL);
    if (!store) {
        return STATUS_FAILED;
    }
    rst_error error;
    int status = STATUS_OK;
    if (rst_store_copy(store, operands.items[1], capacity_size, &error)) {
        status = fail_error(&error);
    }
    rst_store_close(store, NULL);
    return status;
}

const tool_command command_copy = {"copy", "copy a store in use to a new, compact one", help, run};
