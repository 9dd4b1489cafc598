#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../base/terminal.h"
#include "../command.h"
#include "../formats.h"

static const char help[] =
    "usage: rollstore show STORE SESSION[:TURN] [OPTION...]\n"
    "\n"
    "Show a session, or one of its turns: the sampled tokens, each with its logprob,\n"
    "probability, rank among its candidates, and the best candidates.\n"
    "\n"
    "  --turn N             the turn; SESSION is then taken as it stands\n"
    "  --key                SESSION is a session key, as ls --json shows it\n"
    "  --from N             begin at this token of the turn (0)\n"
    "  -n, --limit N        at most N tokens of each turn, 0: all (10; of one turn\n"
    "                       100)\n"
    "  --json               one JSON object; dump has everything\n"
    "\n"
    "The rank is that of the sampled token: 1 is the likeliest; >32 means that it is\n"
    "not among 32 candidates; - that the engine gave none.\n"
    "\n"
    "example: rollstore show /dev/shm/run1 swe-17/rollout-3:0\n";

typedef struct show_arguments {
    uint64_t turn;
    bool by_key;
    uint64_t from;
    uint64_t limit;
    bool json;
} show_arguments;

#define LIMIT_OF_SESSION 10
#define LIMIT_OF_TURN 100
#define LIMIT_UNSET UINT64_MAX
#define COLUMNS_BEFORE_CANDIDATES 38
#define CANDIDATE_COLUMNS 14 /* "151645  98.8% ", the last one without its space */

/* ---------------------------------------------------------------- a token's candidates */

typedef struct candidate {
    int32_t id;
    float logprob;
} candidate;

/* Best first; the engine's order among equals. */
static int compare_candidates(const void *left, const void *right)
{
    const candidate *a = left;
    const candidate *b = right;
    return a->logprob > b->logprob ? -1 : a->logprob < b->logprob ? 1 : 0;
}

static size_t gather_candidates(const rst_turn *turn, uint32_t position, candidate *row)
{
    size_t count = 0;
    size_t begin = (size_t)position * turn->topk;
    for (size_t j = 0; j < turn->topk; j++) {
        if (turn->topk_ids[begin + j] >= 0) {
            row[count].id = turn->topk_ids[begin + j];
            row[count++].logprob = turn->topk_logprobs[begin + j];
        }
    }
    qsort(row, count, sizeof *row, compare_candidates);
    return count;
}

/* From 1; 0 when the sampled token is not among them. */
static size_t rank_of(const candidate *row, size_t count, int32_t id)
{
    for (size_t i = 0; i < count; i++) {
        if (row[i].id == id) {
            return i + 1;
        }
    }
    return 0;
}

static void rank_text(size_t rank, size_t count, char *text, size_t size)
{
    if (count == 0) {
        snprintf(text, size, "-");
    } else if (rank == 0) {
        snprintf(text, size, ">%zu", count);
    } else {
        snprintf(text, size, "%zu", rank);
    }
}

/* ---------------------------------------------------------------- for people */

static void print_candidates(output *out, const candidate *row, size_t count, int32_t sampled)
{
    size_t columns = terminal_columns();
    size_t room = columns > COLUMNS_BEFORE_CANDIDATES + CANDIDATE_COLUMNS
                      ? (columns - COLUMNS_BEFORE_CANDIDATES + 1) / CANDIDATE_COLUMNS
                      : 1;
    for (size_t i = 0; i < count && i < room; i++) {
        output_colour(out, row[i].id == sampled ? COLOUR_GOOD : COLOUR_NONE);
        output_format(out, "%6d %5.1f%%", row[i].id, 100 * exp((double)row[i].logprob));
        output_colour(out, COLOUR_NONE);
        if (i + 1 < count && i + 1 < room) {
            output_text(out, " ");
        }
    }
}

static void print_token(output *out, const rst_turn *turn, uint32_t position, candidate *row)
{
    size_t count = gather_candidates(turn, position, row);
    size_t rank = rank_of(row, count, turn->token_ids[position]);
    double logprob = (double)turn->token_logprobs[position];
    char rank_shown[24];
    rank_text(rank, count, rank_shown, sizeof rank_shown);
    output_format(out, "%6u %6d %8.4f %7.2f%% ", position, turn->token_ids[position], logprob,
                  100 * exp(logprob));
    output_colour(out, count && rank != 1 ? COLOUR_BAD : COLOUR_NONE);
    output_format(out, "%5s", rank_shown);
    output_colour(out, COLOUR_NONE);
    output_text(out, " ");
    print_candidates(out, row, count, turn->token_ids[position]);
    output_text(out, "\n");
}

static void print_label(output *out, const char *label)
{
    output_colour(out, COLOUR_DIM);
    output_format(out, "%-9s", label);
    output_colour(out, COLOUR_NONE);
}

static void print_turn_head(output *out, const rst_turn *turn)
{
    const char *finish;
    size_t finish_size;
    size_t columns = terminal_columns();
    output_text(out, "\n");
    output_colour(out, COLOUR_BOLD);
    output_format(out, "turn %u", turn->turn);
    output_colour(out, COLOUR_NONE);
    output_text(out, ": ");
    output_count(out, turn->token_count, "token");
    output_format(out, ", top %u", turn->topk);
    if (turn->null_prefix) {
        output_format(out, ", %u without candidates", turn->null_prefix);
    }
    output_format(out, "; prompt %u + %u", turn->prefix_count, turn->prompt_count);
    if (turn->trimmed_count) {
        output_format(out, ", %u trimmed", turn->trimmed_count);
    }
    output_text(out, "\n        ");
    if (turn->weight_version) {
        output_text(out, "weight version ");
        output_shown(out, turn->weight_version, turn->weight_version_size, columns / 4);
        output_text(out, ", ");
    }
    if (finish_text(turn, &finish, &finish_size)) {
        output_text(out, "finish ");
        output_shown(out, finish, finish_size, columns / 4);
        output_text(out, ", ");
    }
    if (!isnan(turn->temperature)) {
        output_format(out, "temperature %g, ", (double)turn->temperature);
    }
    output_format(out, "%s mode\n", mode_name(turn->mode));
}

/* Where a turn's tokens are shown from and to. */
static void token_range(const rst_turn *turn, const show_arguments *arguments, uint64_t limit,
                        uint32_t *begin, uint32_t *end)
{
    uint64_t from = arguments->from < turn->token_count ? arguments->from : turn->token_count;
    uint64_t left = turn->token_count - from;
    *begin = (uint32_t)from;
    *end = (uint32_t)(from + (limit && limit < left ? limit : left));
}

static bool print_turn(output *out, const rst_turn *turn, const show_arguments *arguments,
                       uint64_t limit)
{
    uint32_t begin;
    uint32_t end;
    token_range(turn, arguments, limit, &begin, &end);
    print_turn_head(out, turn);
    candidate *row = malloc((turn->topk + (size_t)1) * sizeof *row);
    if (!row) {
        return false;
    }
    if (begin < end) {
        output_colour(out, COLOUR_DIM);
        output_format(out, "%6s %6s %8s %8s %5s %s", "pos", "token", "logprob", "prob", "rank",
                      "best candidates");
        output_colour(out, COLOUR_NONE);
        output_text(out, "\n");
    }
    for (uint32_t i = begin; i < end; i++) {
        print_token(out, turn, i, row);
    }
    free(row);
    if (end < turn->token_count) {
        output_text(out, "   ... ");
        output_count(out, turn->token_count - end, "more token");
        output_text(out, " (--limit 0 shows all)\n");
    }
    return true;
}

static void print_versions(output *out, const rst_session *session)
{
    if (session->weight_version_min == RST_NO_VERSION) {
        return;
    }
    print_label(out, "versions");
    output_format(out, "%lld", (long long)session->weight_version_min);
    if (session->weight_version_max != session->weight_version_min) {
        output_format(out, " to %lld", (long long)session->weight_version_max);
    }
    output_text(out, "\n");
}

static void print_session_head(output *out, const rst_session *session)
{
    char text[TEXT_SIZE];
    const rst_outcome *outcome = &session->outcome;
    print_label(out, "session");
    output_colour(out, COLOUR_BOLD);
    output_shown(out, session->id, session->id_size, 0);
    output_colour(out, COLOUR_NONE);
    output_text(out, "\n");
    print_label(out, "status");
    output_text(out, status_name(outcome->status));
    if (session->state == RST_STATE_SEALED) {
        output_format(out, ", reward %s, sequence %llu", number_text(outcome->reward, text),
                      (unsigned long long)session->sequence);
        if (outcome->group_index != RST_NO_INDEX) {
            output_format(out, ", group %lld", (long long)outcome->group_index);
        }
        if (outcome->index != RST_NO_INDEX) {
            output_format(out, ", index %lld", (long long)outcome->index);
        }
    }
    output_text(out, "\n");
    print_label(out, "size");
    output_count(out, session->turn_count, "turn");
    output_text(out, ", ");
    output_count(out, session->generated_count, "generated token");
    output_format(out, " of %s, ", count_text(session->sequence_count, text));
    output_format(out, "%s\n", size_text(session->value_size, text));
    print_versions(out, session);
    print_label(out, "changed");
    output_format(out, "%s\n", time_text(session->changed_ns, text));
}

/* ---------------------------------------------------------------- for programs */

static void json_token(output *out, const rst_turn *turn, uint32_t position, candidate *row)
{
    size_t count = gather_candidates(turn, position, row);
    size_t rank = rank_of(row, count, turn->token_ids[position]);
    json_open(out, '{');
    json_key(out, "position");
    json_u64(out, position);
    json_key(out, "id");
    json_i64(out, turn->token_ids[position]);
    json_key(out, "logprob");
    json_float(out, turn->token_logprobs[position]);
    json_key(out, "rank");
    if (rank) {
        json_u64(out, rank);
    } else {
        json_null(out);
    }
    json_open_key(out, "candidates", '[');
    for (size_t i = 0; i < count; i++) {
        json_open(out, '[');
        json_i64(out, row[i].id);
        json_float(out, row[i].logprob);
        json_close(out, ']');
    }
    json_close(out, ']');
    json_close(out, '}');
}

static bool json_turn(output *out, const rst_turn *turn, const show_arguments *arguments,
                      uint64_t limit)
{
    uint32_t begin;
    uint32_t end;
    token_range(turn, arguments, limit, &begin, &end);
    candidate *row = malloc((turn->topk + (size_t)1) * sizeof *row);
    if (!row) {
        return false;
    }
    json_open(out, '{');
    json_turn_head(out, turn);
    json_open_key(out, "tokens", '[');
    for (uint32_t i = begin; i < end; i++) {
        json_token(out, turn, i, row);
    }
    json_close(out, ']');
    json_close(out, '}');
    free(row);
    return true;
}

/* ---------------------------------------------------------------- the command */

typedef bool print_turn_function(output *out, const rst_turn *turn, const show_arguments *arguments,
                                 uint64_t limit);

/* One turn, or all of them. */
static int show_turns(output *out, rst_snapshot *snapshot, const session_target *target,
                      const show_arguments *arguments, print_turn_function *print)
{
    uint64_t limit = arguments->limit;
    if (limit == LIMIT_UNSET) {
        limit = target->has_turn ? LIMIT_OF_TURN : LIMIT_OF_SESSION;
    }
    uint32_t first = target->has_turn ? target->turn : 0;
    uint32_t end = target->has_turn ? target->turn + 1 : target->session.turn_count;
    for (uint32_t i = first; i < end; i++) {
        rst_turn turn;
        rst_error error;
        if (rst_turn_get_by_key(snapshot, target->session.key, i, &turn, &error)) {
            return fail_error(&error);
        }
        if (!print(out, &turn, arguments, limit)) {
            return fail("memory", "no memory for a row");
        }
    }
    return STATUS_OK;
}

static int show(output *out, rst_snapshot *snapshot, const session_target *target,
                const show_arguments *arguments)
{
    if (!arguments->json) {
        print_session_head(out, &target->session);
        return show_turns(out, snapshot, target, arguments, print_turn);
    }
    json_open(out, '{');
    json_session(out, &target->session);
    json_open_key(out, "turns", '[');
    int status = show_turns(out, snapshot, target, arguments, json_turn);
    json_close(out, ']');
    json_close(out, '}');
    output_text(out, "\n");
    return status;
}

static int run(int argc, char **argv)
{
    show_arguments a = {.turn = NO_TURN, .limit = LIMIT_UNSET};
    const arg_option options[] = {
        {.name = "turn", .kind = OPTION_COUNT, .value = &a.turn, .max = RST_TURN_COUNT_MAX},
        {.name = "key", .kind = OPTION_FLAG, .value = &a.by_key},
        {.name = "from", .kind = OPTION_COUNT, .value = &a.from},
        {.name = "limit", .letter = 'n', .kind = OPTION_COUNT, .value = &a.limit},
        {.name = "json", .kind = OPTION_FLAG, .value = &a.json},
        {.name = NULL},
    };
    arg_operands operands;
    if (!args_parse(argc, argv, options, 2, 2, &operands)) {
        return STATUS_USAGE;
    }
    store_reading reading;
    if (!reading_begin(&reading, operands.items[0])) {
        return STATUS_FAILED;
    }
    output out = {0};
    session_target target;
    int status = STATUS_FAILED;
    if (find_target(reading.snapshot, operands.items[1], a.turn, a.by_key, &target)) {
        status = show(&out, reading.snapshot, &target, &a);
    }
    reading_end(&reading); /* before printing: a pager that stands still must not hold it */
    if (status) {
        output_free(&out);
        return status;
    }
    return output_finish(&out);
}

const tool_command command_show = {"show", "show a session's tokens and their candidates", help,
                                   run};
