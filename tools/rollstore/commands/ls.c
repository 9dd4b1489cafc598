#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "../base/terminal.h"
#include "../command.h"
#include "../formats.h"

static const char help[] =
    "usage: rollstore ls STORE [OPTION...]\n"
    "\n"
    "List the sessions: sealed ones in ready order, then open ones.\n"
    "\n"
    "  --open               only open sessions\n"
    "  --sealed             only sealed sessions\n"
    "  --status STATUS      only sealed sessions that ended so: completed, truncated,\n"
    "                       aborted, failed\n"
    "  --group G            only sealed sessions of this group index\n"
    "  --after SEQUENCE     only sealed sessions after this place in the ready order\n"
    "  -n, --limit N        at most N sessions\n"
    "  --json               one JSON object a line, with everything that is known\n"
    "\n"
    "example: rollstore ls /dev/shm/run1 --sealed --json | jq .reward\n";

typedef struct ls_arguments {
    bool open;
    bool sealed;
    int status;
    int64_t group;
    uint64_t after;
    uint64_t limit;
    bool json;
} ls_arguments;

/* Names are cut to the terminal's width, and nowhere else. */
#define COLUMNS_BEFORE_NAME 51

typedef struct ls_listing {
    const ls_arguments *arguments;
    output out;
    uint64_t count;
    size_t name_columns; /* 0: no limit */
} ls_listing;

static bool is_wanted(const ls_arguments *arguments, const rst_session *session)
{
    const rst_outcome *outcome = &session->outcome;
    if (arguments->status != RST_STATUS_NONE && (int)outcome->status != arguments->status) {
        return false;
    }
    return arguments->group == RST_NO_INDEX ||
           (session->state == RST_STATE_SEALED && outcome->group_index == arguments->group);
}

static void print_row(ls_listing *listing, const rst_session *session)
{
    output *out = &listing->out;
    char sequence[TEXT_SIZE] = "-";
    char size[TEXT_SIZE];
    char reward[TEXT_SIZE];
    char age[TEXT_SIZE];
    bool open = session->state == RST_STATE_OPEN;
    if (!open) {
        snprintf(sequence, sizeof sequence, "%llu", (unsigned long long)session->sequence);
    }
    output_format(out, "%6s %-9s %5u %7llu %5s %7s %4s  ", sequence,
                  status_name(session->outcome.status), session->turn_count,
                  (unsigned long long)session->generated_count,
                  short_size(session->value_size, size),
                  open ? "-" : number_text(session->outcome.reward, reward),
                  age_text(session->changed_ns, age));
    output_shown(out, session->id, session->id_size, listing->name_columns);
    output_text(out, "\n");
}

/* False when the limit is reached. */
static bool list_session(void *context, const rst_session *session)
{
    ls_listing *listing = context;
    if (!is_wanted(listing->arguments, session)) {
        return true;
    }
    if (listing->count == listing->arguments->limit) {
        return false;
    }
    listing->count++;
    if (!listing->arguments->json) {
        print_row(listing, session);
        return true;
    }
    json_open(&listing->out, '{');
    json_session(&listing->out, session);
    json_close(&listing->out, '}');
    output_text(&listing->out, "\n");
    return true;
}

/* Everything is gathered before anything is printed: a pager that stands still must not keep the
 * snapshot open. */
static int gather(ls_listing *listing, const char *path)
{
    store_reading reading;
    if (!reading_begin(&reading, path)) {
        return STATUS_FAILED;
    }
    const ls_arguments *arguments = listing->arguments;
    rst_error error;
    bool both = arguments->open == arguments->sealed;
    int code = each_session(reading.snapshot, both || arguments->sealed, both || arguments->open,
                            arguments->after, list_session, listing, &error);
    int status = code == RST_OK ? STATUS_OK : fail_error(&error);
    reading_end(&reading);
    return status;
}

static int run(int argc, char **argv)
{
    ls_arguments a = {.group = RST_NO_INDEX, .limit = UINT64_MAX};
    const arg_option options[] = {
        {.name = "open", .kind = OPTION_FLAG, .value = &a.open},
        {.name = "sealed", .kind = OPTION_FLAG, .value = &a.sealed},
        {.name = "status", .kind = OPTION_CHOICE, .value = &a.status, .choices = status_choices},
        {.name = "group", .kind = OPTION_INT, .value = &a.group},
        {.name = "after", .kind = OPTION_COUNT, .value = &a.after},
        {.name = "limit", .letter = 'n', .kind = OPTION_COUNT, .value = &a.limit},
        {.name = "json", .kind = OPTION_FLAG, .value = &a.json},
        {.name = NULL},
    };
    arg_operands operands;
    if (!args_parse(argc, argv, options, 1, 1, &operands)) {
        return STATUS_USAGE;
    }
    ls_listing listing = {.arguments = &a};
    size_t columns = terminal_columns();
    if (isatty(STDOUT_FILENO) && columns > COLUMNS_BEFORE_NAME + 8) {
        listing.name_columns = columns - COLUMNS_BEFORE_NAME;
    }
    if (!a.json) {
        output_colour(&listing.out, COLOUR_BOLD);
        output_format(&listing.out, "%6s %-9s %5s %7s %5s %7s %4s  %s", "SEQ", "STATUS", "TURNS",
                      "TOKENS", "SIZE", "REWARD", "AGE", "SESSION");
        output_colour(&listing.out, COLOUR_NONE);
        output_text(&listing.out, "\n");
    }
    int status = gather(&listing, operands.items[0]);
    if (status) {
        output_free(&listing.out);
        return status;
    }
    return output_finish(&listing.out);
}

const tool_command command_ls = {"ls", "list the sessions", help, run};
