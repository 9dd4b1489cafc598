#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../base/npz.h"
#include "../command.h"
#include "../formats.h"

static const char help[] =
    "usage: rollstore dump STORE [SESSION[:TURN]] [OPTION...]\n"
    "\n"
    "Write out one turn, a session, or, without SESSION, all of them: sealed sessions\n"
    "in ready order, then open ones.\n"
    "\n"
    "  (no form)            JSON Lines: one object a turn, and one with a session's\n"
    "                       outcome\n"
    "  --sample             one object a session: the assembled training sample\n"
    "  --replies            recorded sessions with flat base64 replies, as ingest\n"
    "                       reads them\n"
    "  --reply              of one turn: only the engine's reply, as decode and put\n"
    "                       read it\n"
    "  --npz FILE           NumPy arrays: a turn's, or a session's sample\n"
    "  --turn N             the turn; SESSION is then taken as it stands\n"
    "  --key                SESSION is a session key, as ls --json shows it\n"
    "  --top-k K, --trim-max N, --token-max N\n"
    "                       of samples: K slots a token; at most N tokens trimmed\n"
    "                       between turns (1); leave out the last turns over N tokens\n"
    "  --json               JSON, which is what all forms but --npz are\n"
    "\n"
    "Null among the logprobs is minus infinity.  The store's space is not used again\n"
    "while a dump runs: write it to a file, not into a pager.  A support turn's\n"
    "--replies need ingest --top-k K to get the same capacity of a row again.\n"
    "\n"
    "example: rollstore dump /dev/shm/run1 swe-17/rollout-3 --sample --npz sample.npz\n";

typedef enum dump_form { FORM_TURNS, FORM_SAMPLE, FORM_REPLIES, FORM_REPLY } dump_form;

typedef struct dump_arguments {
    bool sample;
    bool replies;
    bool reply;
    bool json;
    const char *npz;
    uint64_t turn;
    bool by_key;
    uint64_t topk;
    uint64_t trim_max;
    uint64_t token_max;
    dump_form form;
    rst_sample_options options; /* of the above three */
} dump_arguments;

/* Each line is written when it is whole: a fault in the middle of a session ends the dump, and
 * what was printed can be read. */
typedef struct dump_run {
    const dump_arguments *arguments;
    rst_snapshot *snapshot;
    output out;
} dump_run;

/* ---------------------------------------------------------------- turns */

static void print_turn(output *out, const rst_session *session, const rst_turn *turn)
{
    json_open(out, '{');
    json_session_id(out, session->id, session->id_size);
    json_key(out, "turn");
    json_u64(out, turn->turn);
    json_turn_arrays(out, turn);
    json_key(out, "temperature");
    json_float(out, turn->temperature);
    json_key(out, "prefix_count");
    json_u64(out, turn->prefix_count);
    json_key(out, "trimmed_count");
    json_u64(out, turn->trimmed_count);
    json_key(out, "prompt_ids");
    json_i32_list(out, turn->prompt_ids, turn->prompt_count);
    json_close(out, '}');
    output_text(out, "\n");
}

static void print_end(output *out, const rst_session *session)
{
    json_open(out, '{');
    json_session_id(out, session->id, session->id_size);
    json_open_key(out, "end", '{');
    json_outcome(out, &session->outcome);
    json_close(out, '}');
    json_close(out, '}');
    output_text(out, "\n");
}

/* ---------------------------------------------------------------- replies */

/* The tokens of a session up to a turn's prompt: what the stored prompts leave out. */
typedef struct token_list {
    int32_t *ids;
    size_t count;
    size_t capacity;
} token_list;

static bool append_tokens(token_list *list, const int32_t *ids, size_t count)
{
    if (list->capacity - list->count < count) {
        size_t wanted = (list->count + count) * 2;
        int32_t *grown = realloc(list->ids, wanted * sizeof *grown);
        if (!grown) {
            return false;
        }
        list->ids = grown;
        list->capacity = wanted;
    }
    if (count) {
        memcpy(list->ids + list->count, ids, count * sizeof *ids);
        list->count += count;
    }
    return true;
}

/* After it the list is the turn's whole prompt. */
static bool append_prompt(token_list *list, const rst_turn *turn)
{
    list->count = turn->prefix_count < list->count ? turn->prefix_count : list->count;
    return append_tokens(list, turn->prompt_ids, turn->prompt_count);
}

static void print_request(output *out, const rst_turn *turn, const token_list *prompt)
{
    json_open_key(out, "request", '{');
    json_key(out, "input_ids");
    json_i32_list(out, prompt->ids, prompt->count);
    if (!isnan(turn->temperature)) {
        json_key(out, "temperature");
        json_float(out, turn->temperature);
    }
    json_key(out, "logprobs");
    json_bool(out, true);
    json_key(out, "return_meta_info");
    json_bool(out, true);
    if (turn->mode == RST_MODE_SUPPORT) {
        json_key(out, "return_sampling_mask");
        json_bool(out, true);
        json_key(out, "sampling_logprobs_mode");
        json_text(out, "support");
    } else {
        json_key(out, "top_logprobs");
        json_u64(out, turn->topk);
        json_key(out, "return_flat_raw_output_top_logprobs");
        json_bool(out, true);
        json_key(out, "return_flat_raw_top_logprobs_b64");
        json_bool(out, true);
    }
    json_close(out, '}');
}

static int print_recorded(output *out, const rst_session *session, const rst_turn *turn,
                          const token_list *prompt, rst_error *error)
{
    char *reply;
    size_t size;
    int code = rst_turn_to_reply(turn, &reply, &size, error);
    if (code) {
        return code;
    }
    json_open(out, '{');
    json_session_id(out, session->id, session->id_size);
    json_key(out, "turn");
    json_u64(out, turn->turn);
    print_request(out, turn, prompt);
    json_key(out, "response");
    output_bytes(out, reply, size);
    json_close(out, '}');
    output_text(out, "\n");
    free(reply);
    return RST_OK;
}

/* ---------------------------------------------------------------- a session in each form */

/* A turn that is not printed is read for its tokens, which later prompts begin with. */
static int dump_turn(dump_run *run, const rst_session *session, uint32_t index, bool print,
                     token_list *tokens)
{
    rst_turn turn;
    rst_error error;
    if (rst_turn_get_by_key(run->snapshot, session->key, index, &turn, &error)) {
        return fail_error(&error);
    }
    if (!append_prompt(tokens, &turn)) {
        return fail("memory", "no memory for the prompt");
    }
    if (print && run->arguments->form == FORM_TURNS) {
        print_turn(&run->out, session, &turn);
    } else if (print && print_recorded(&run->out, session, &turn, tokens, &error)) {
        return fail_error(&error);
    }
    if (!append_tokens(tokens, turn.token_ids, turn.token_count)) {
        return fail("memory", "no memory for the prompt");
    }
    return STATUS_OK;
}

static int dump_turns(dump_run *run, const rst_session *session)
{
    token_list tokens = {0};
    int status = STATUS_OK;
    for (uint32_t i = 0; i < session->turn_count && status == STATUS_OK; i++) {
        status = dump_turn(run, session, i, true, &tokens);
        if (status == STATUS_OK && !output_write(&run->out)) {
            status = STATUS_FAILED;
        }
    }
    free(tokens.ids);
    if (status == STATUS_OK && session->state == RST_STATE_SEALED) {
        print_end(&run->out, session);
        status = output_write(&run->out) ? STATUS_OK : STATUS_FAILED;
    }
    return status;
}

static int dump_sample(dump_run *run, const rst_session *session)
{
    loaded_sample sample;
    rst_error error;
    int code = sample_load(run->snapshot, session, &run->arguments->options, &sample, &error);
    if (code == RST_OK) {
        code = json_sample(&run->out, run->snapshot, &sample, &error);
    }
    sample_free(&sample);
    if (code) {
        run->out.size = 0;
        return fail_error(&error);
    }
    return output_write(&run->out) ? STATUS_OK : STATUS_FAILED;
}

static int dump_session(dump_run *run, const rst_session *session)
{
    return run->arguments->form == FORM_SAMPLE ? dump_sample(run, session)
                                               : dump_turns(run, session);
}

/* The line that the whole session's dump has for it. */
static int dump_one_turn(dump_run *run, const session_target *target)
{
    token_list tokens = {0};
    int status = STATUS_OK;
    uint32_t first = run->arguments->form == FORM_REPLIES ? 0 : target->turn;
    for (uint32_t i = first; i <= target->turn && status == STATUS_OK; i++) {
        status = dump_turn(run, &target->session, i, i == target->turn, &tokens);
    }
    free(tokens.ids);
    if (status) {
        run->out.size = 0;
    }
    return status;
}

static int dump_reply(dump_run *run, const session_target *target)
{
    rst_turn turn;
    rst_error error;
    char *reply;
    size_t size;
    if (rst_turn_get_by_key(run->snapshot, target->session.key, target->turn, &turn, &error) ||
        rst_turn_to_reply(&turn, &reply, &size, &error)) {
        return fail_error(&error);
    }
    output_bytes(&run->out, reply, size);
    output_text(&run->out, "\n");
    free(reply);
    return STATUS_OK;
}

/* ---------------------------------------------------------------- every session */

typedef struct dump_all_run {
    dump_run *run;
    int status;
} dump_all_run;

/* A session that cannot be dumped is reported, and the others are dumped all the same; output that
 * cannot be written ends it. */
static bool dump_listed(void *context, const rst_session *session)
{
    dump_all_run *all = context;
    int status = dump_session(all->run, session);
    all->status = status ? status : all->status;
    return !all->run->out.failed;
}

static int dump_all(dump_run *run)
{
    dump_all_run all = {.run = run, .status = STATUS_OK};
    rst_error error;
    if (each_session(run->snapshot, true, true, 0, dump_listed, &all, &error)) {
        return fail_error(&error);
    }
    return all.status;
}

/* ---------------------------------------------------------------- .npz */

static int dump_npz_turn(const dump_run *run, const session_target *target)
{
    rst_error error;
    rst_turn turn;
    if (rst_turn_get_by_key(run->snapshot, target->session.key, target->turn, &turn, &error)) {
        return fail_error(&error);
    }
    npz_file *npz = npz_begin(run->arguments->npz);
    if (!npz) {
        return STATUS_FAILED;
    }
    npz_turn(npz, &turn);
    return npz_end(npz) ? STATUS_OK : STATUS_FAILED;
}

static int dump_npz_sample(const dump_run *run, const session_target *target)
{
    rst_error error;
    loaded_sample sample;
    int status = STATUS_FAILED;
    if (sample_load(run->snapshot, &target->session, &run->arguments->options, &sample, &error)) {
        fail_error(&error);
    } else {
        npz_file *npz = npz_begin(run->arguments->npz);
        if (npz) {
            npz_sample(npz, &sample);
            status = npz_end(npz) ? STATUS_OK : STATUS_FAILED;
        }
    }
    sample_free(&sample);
    return status;
}

/* ---------------------------------------------------------------- the command */

static int dump_target(dump_run *run, const char *name)
{
    const dump_arguments *arguments = run->arguments;
    session_target target;
    if (!find_target(run->snapshot, name, arguments->turn, arguments->by_key, &target)) {
        return STATUS_FAILED;
    }
    if (arguments->form == FORM_SAMPLE && target.has_turn) {
        return fail_usage("dump", "--sample is of a session, not of a turn");
    }
    if (arguments->npz) {
        return target.has_turn ? dump_npz_turn(run, &target) : dump_npz_sample(run, &target);
    }
    if (arguments->form == FORM_REPLY) {
        return target.has_turn ? dump_reply(run, &target)
                               : fail_usage("dump", "--reply is of a turn: SESSION:TURN");
    }
    return target.has_turn ? dump_one_turn(run, &target) : dump_session(run, &target.session);
}

static int check_arguments(dump_arguments *a, const arg_operands *operands)
{
    if (a->sample + a->replies + a->reply > 1 || (a->npz && (a->replies || a->reply))) {
        return fail_usage("dump", "--sample, --replies, --reply and --npz exclude each other");
    }
    if (operands->count < 2 && (a->npz || a->reply || a->turn != NO_TURN || a->by_key)) {
        return fail_usage("dump", "that needs a SESSION");
    }
    if (a->npz && a->sample && a->turn != NO_TURN) {
        return fail_usage("dump", "--sample is of a session, not of a turn");
    }
    a->form = a->sample    ? FORM_SAMPLE
              : a->replies ? FORM_REPLIES
              : a->reply   ? FORM_REPLY
                           : FORM_TURNS;
    a->options.topk = (uint32_t)a->topk;
    a->options.trim_max = (uint32_t)a->trim_max;
    a->options.token_max = a->token_max;
    return STATUS_OK;
}

static int run(int argc, char **argv)
{
    dump_arguments a = {.turn = NO_TURN, .trim_max = RST_TRIM_MAX_DEFAULT};
    const arg_option options[] = {
        {.name = "sample", .kind = OPTION_FLAG, .value = &a.sample},
        {.name = "replies", .kind = OPTION_FLAG, .value = &a.replies},
        {.name = "reply", .kind = OPTION_FLAG, .value = &a.reply},
        {.name = "json", .kind = OPTION_FLAG, .value = &a.json},
        {.name = "npz", .kind = OPTION_TEXT, .value = &a.npz},
        {.name = "turn", .kind = OPTION_COUNT, .value = &a.turn, .max = RST_TURN_COUNT_MAX},
        {.name = "key", .kind = OPTION_FLAG, .value = &a.by_key},
        {.name = "top-k",
         .letter = 'k',
         .kind = OPTION_COUNT,
         .value = &a.topk,
         .max = RST_TOPK_MAX},
        {.name = "trim-max", .kind = OPTION_COUNT, .value = &a.trim_max, .max = UINT32_MAX},
        {.name = "token-max", .kind = OPTION_COUNT, .value = &a.token_max},
        {.name = NULL},
    };
    arg_operands operands;
    if (!args_parse(argc, argv, options, 1, 2, &operands) || check_arguments(&a, &operands)) {
        return STATUS_USAGE;
    }
    store_reading reading;
    if (!reading_begin(&reading, operands.items[0])) {
        return STATUS_FAILED;
    }
    dump_run dump = {.arguments = &a, .snapshot = reading.snapshot};
    int status = operands.count > 1 ? dump_target(&dump, operands.items[1]) : dump_all(&dump);
    int written = output_finish(&dump.out);
    reading_end(&reading);
    return status ? status : written;
}

const tool_command command_dump = {"dump", "write out turns, samples or replies", help, run};
