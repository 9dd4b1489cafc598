/* What every command of the tool has, and the helpers that most of them use. */
#ifndef TOOL_COMMAND_H
#define TOOL_COMMAND_H

#include <stdbool.h>

#include <rollstore/rollstore.h>

#include "base/args.h"
#include "base/fail.h"
#include "base/output.h"

/* One command.  To add one: a file in commands/, and a line in main.c's table. */
typedef struct tool_command {
    const char *name;
    const char *summary;               /* for the list of commands */
    const char *help;                  /* the whole text of `rollstore NAME --help` */
    int (*run)(int argc, char **argv); /* argv[0] is the command's name; returns a STATUS_ */
} tool_command;

extern const tool_command command_bench, command_consumers, command_copy, command_create,
    command_decode, command_dump, command_ingest, command_ls, command_put, command_release,
    command_show, command_stat, command_verify;

/* ---------------------------------------------------------------- the store on the command line */

/* Open and report; NULL after an error message. */
rst_store *open_store(const char *path, unsigned flags, const rst_create_options *create);

/* A store and a snapshot of it, for the commands that only read. */
typedef struct store_reading {
    rst_store *store;
    rst_snapshot *snapshot;
} store_reading;
bool reading_begin(store_reading *reading, const char *path); /* false after an error message */
void reading_end(store_reading *reading);

/* SESSION[:TURN], with what can be said unambiguously by options. */
typedef struct session_target {
    rst_session session;
    bool has_turn;
    uint32_t turn;
} session_target;
#define NO_TURN UINT64_MAX
/* text: the argument.  turn: --turn, or NO_TURN to look for ":TURN" at the text's end.  by_key: the
 * text is a session key in hexadecimal.  False after an error message. */
bool find_target(rst_snapshot *snapshot, const char *text, uint64_t turn, bool by_key,
                 session_target *found);

/* Call `each` for the sealed sessions after a place in the ready order, in that order, then for the
 * open ones; it returns false when it wants no more.  An rst_code. */
typedef bool session_function(void *context, const rst_session *session);
int each_session(rst_snapshot *snapshot, bool sealed, bool open, uint64_t after,
                 session_function *each, void *context, rst_error *error);

/* ---------------------------------------------------------------- options that commands share */

/* What a store is created with. */
typedef struct create_arguments {
    uint64_t capacity_size;
    int durability;
    uint64_t interval_ms;
    uint64_t reader_count;
    bool group;
} create_arguments;
/* clang-format off */
#define CREATE_OPTIONS(a)                                                                          \
    {.name = "capacity", .kind = OPTION_SIZE, .value = &(a).capacity_size, .min = 1},              \
    {.name = "durability", .kind = OPTION_CHOICE, .value = &(a).durability,                        \
     .choices = durability_choices},                                                               \
    {.name = "interval", .kind = OPTION_COUNT, .value = &(a).interval_ms, .max = UINT32_MAX},      \
    {.name = "readers", .kind = OPTION_COUNT, .value = &(a).reader_count, .max = UINT32_MAX},      \
    {.name = "group", .kind = OPTION_FLAG, .value = &(a).group}
/* clang-format on */
#define CREATE_HELP                                                                                \
    "  --capacity SIZE      bytes of turns, allocated at once: 64M, 2G, 1GiB (1G)\n"               \
    "  --durability D       memory: survives the process, not the machine (default);\n"            \
    "                       interval: synced every --interval MS; full: each commit\n"             \
    "  --interval MS        milliseconds of --durability interval (100)\n"                         \
    "  --readers N          most snapshots open at once, all processes together\n"                 \
    "                       (1024)\n"                                                              \
    "  --group              files for the owner's group too (0660), not only the\n"                \
    "                       owner\n"
extern const arg_choice durability_choices[];
rst_create_options create_options_of(const create_arguments *arguments);

/* How a reply is read. */
typedef struct decode_arguments {
    int mode;
    int request;
    uint64_t topk;
    uint64_t choice;
} decode_arguments;
/* clang-format off */
#define DECODE_OPTIONS(a)                                                                          \
    {.name = "mode", .kind = OPTION_CHOICE, .value = &(a).mode, .choices = mode_choices},          \
    {.name = "request", .kind = OPTION_CHOICE, .value = &(a).request,                              \
     .choices = request_choices},                                                                  \
    {.name = "top-k", .letter = 'k', .kind = OPTION_COUNT, .value = &(a).topk,                     \
     .max = RST_TOPK_MAX},                                                                         \
    {.name = "choice", .kind = OPTION_COUNT, .value = &(a).choice, .max = UINT32_MAX}
/* clang-format on */
#define DECODE_HELP                                                                                \
    "  --mode MODE          selected: the engine's top-k (default); support: the\n"                \
    "                       support of filtered sampling\n"                                        \
    "  --request FORM       flat: flat candidates were asked for (default); nested\n"              \
    "  -k, --top-k K        k that was asked for; support: most candidates of a row\n"             \
    "                       (taken from the reply)\n"                                              \
    "  --choice C           which of a chat reply's choices (0)\n"
extern const arg_choice mode_choices[];
extern const arg_choice request_choices[];
extern const arg_choice status_choices[]; /* of an outcome */
rst_decode_options decode_options_of(const decode_arguments *arguments);

#define TIMEOUT_DEFAULT_MS 10000

/* ---------------------------------------------------------------- words */

const char *status_name(rst_outcome_status status); /* "open" for none */
const char *durability_name(uint32_t durability);
const char *mode_name(rst_mode mode);

#endif
