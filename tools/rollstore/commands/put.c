#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../base/input.h"
#include "../base/terminal.h"
#include "../command.h"

static const char help[] =
    "usage: rollstore put STORE SESSION TURN [FILE] [OPTION...]\n"
    "\n"
    "Store one engine reply, from FILE or standard input, as the session's turn TURN\n"
    "(0, 1, ...).  The same reply again changes nothing; another one is refused\n"
    "(conflict).\n"
    "\n" DECODE_HELP "  --prompt IDS         the request's whole prompt: 11,12,13\n"
    "  --prompt-file FILE   the same from a file: numbers between commas or spaces,\n"
    "                       also in brackets\n"
    "  --temperature T      the request's sampling temperature\n"
    "  --replace            take the place of another reply\n"
    "  --end STATUS         seal the session after this turn, in the same\n"
    "                       transaction: completed, truncated, aborted or failed\n"
    "  --reward R, --group-index G, --index I\n"
    "                       of --end\n"
    "  --timeout TIME       how long to wait for space when the store is full: 10\n"
    "                       (seconds, the default), 500ms, 5m, forever\n"
    "  --json               print what was done as a JSON object\n"
    "\n"
    "example: rollstore put /dev/shm/run1 swe-17/rollout-3 0 reply.json --top-k 32 \\\n"
    "             --prompt-file prompt.json --temperature 0.8\n";

typedef struct put_arguments {
    decode_arguments decode;
    const char *prompt;
    const char *prompt_file;
    double temperature;
    bool replace;
    int end;
    double reward;
    int64_t group_index;
    int64_t index;
    int64_t timeout_ms;
    bool json;
} put_arguments;

typedef struct prompt_list {
    int32_t *ids;
    size_t count;
} prompt_list;

static bool no_id(const prompt_list *prompt)
{
    fail("value", "prompt: id %zu is not a whole number from 0 to %d", prompt->count, INT32_MAX);
    return false;
}

/* Numbers with "[]", white space and at most one comma between them. */
static bool parse_ids(const char *text, size_t size, prompt_list *prompt)
{
    bool comma = false; /* an id must follow */
    prompt->ids = malloc((size / 2 + 1) * sizeof *prompt->ids);
    if (!prompt->ids) {
        fail("memory", "no memory for the prompt");
        return false;
    }
    for (size_t at = 0; at < size;) {
        if (text[at] == ',' && (comma || prompt->count == 0)) {
            return no_id(prompt);
        }
        if (memchr(",[] \t\r\n", text[at], 7)) {
            comma = comma || text[at] == ',';
            at++;
            continue;
        }
        int64_t id = 0;
        size_t begin = at;
        while (at < size && text[at] >= '0' && text[at] <= '9' && id <= INT32_MAX) {
            id = id * 10 + (text[at++] - '0');
        }
        bool ends = at == size || memchr(",[] \t\r\n", text[at], 7);
        if (at == begin || !ends || id > INT32_MAX) {
            return no_id(prompt);
        }
        prompt->ids[prompt->count++] = (int32_t)id;
        comma = false;
    }
    return comma ? no_id(prompt) : true;
}

static bool read_prompt(const put_arguments *arguments, prompt_list *prompt)
{
    if (arguments->prompt) {
        return parse_ids(arguments->prompt, strlen(arguments->prompt), prompt);
    }
    if (!arguments->prompt_file) {
        return true;
    }
    input_bytes file;
    bool good = input_read(&file, arguments->prompt_file, (size_t)RST_TOKEN_COUNT_MAX * 12) &&
                parse_ids(file.bytes, file.size, prompt);
    input_free(&file);
    return good;
}

static int print_done(const put_arguments *arguments, const rst_change *changes, size_t count)
{
    if (!arguments->json) {
        return STATUS_OK;
    }
    rst_turn turn;
    rst_record_view(changes[0].record, &turn);
    output out = {0};
    json_open(&out, '{');
    json_session_id(&out, changes[0].session, changes[0].session_size);
    json_key(&out, "turn");
    json_u64(&out, changes[0].turn);
    json_key(&out, "n");
    json_u64(&out, turn.token_count);
    json_key(&out, "k");
    json_u64(&out, turn.topk);
    json_key(&out, "unchanged");
    json_bool(&out, changes[0].unchanged != 0);
    json_key(&out, "sealed");
    json_bool(&out, count == 2);
    json_close(&out, '}');
    output_text(&out, "\n");
    return output_finish(&out);
}

/* Decoded before the store is opened: a reply that is refused costs no lock. */
static int put(const put_arguments *arguments, char **operands, uint32_t turn, rst_record *record)
{
    unsigned flags = arguments->replace ? RST_CHANGE_REPLACE : 0;
    rst_change changes[2] = {{.kind = RST_CHANGE_PUT,
                              .flags = flags,
                              .session = operands[1],
                              .session_size = strlen(operands[1]),
                              .turn = turn,
                              .record = record},
                             {.kind = RST_CHANGE_SEAL,
                              .flags = flags,
                              .session = operands[1],
                              .session_size = strlen(operands[1]),
                              .outcome = {.status = (rst_outcome_status)arguments->end,
                                          .reward = arguments->reward,
                                          .group_index = arguments->group_index,
                                          .index = arguments->index}}};
    size_t count = arguments->end == RST_STATUS_NONE ? 1 : 2;
    rst_store *store = open_store(operands[0], 0, NULL);
    if (!store) {
        return STATUS_FAILED;
    }
    rst_error error;
    int status = rst_apply(store, changes, count, arguments->timeout_ms, &error)
                     ? fail_error(&error)
                     : STATUS_OK;
    if (rst_store_close(store, &error) && status == STATUS_OK) {
        status = fail_error(&error);
    }
    return status ? status : print_done(arguments, changes, count);
}

static bool fill_record(const put_arguments *arguments, const char *path, rst_record *record)
{
    rst_decode_options how = decode_options_of(&arguments->decode);
    rst_error error;
    prompt_list prompt = {0};
    input_bytes reply = {0};
    bool good = read_prompt(arguments, &prompt) && input_read(&reply, path, RST_REPLY_SIZE_MAX);
    if (good && (rst_record_decode(record, reply.bytes, reply.size, &how, &error) ||
                 rst_record_set_prompt(record, prompt.ids, prompt.count, &error))) {
        fail_error(&error);
        good = false;
    }
    rst_record_set_temperature(record, (float)arguments->temperature);
    input_free(&reply);
    free(prompt.ids);
    return good;
}

static int run(int argc, char **argv)
{
    put_arguments a = {.temperature = NAN,
                       .reward = NAN,
                       .group_index = RST_NO_INDEX,
                       .index = RST_NO_INDEX,
                       .timeout_ms = TIMEOUT_DEFAULT_MS};
    const arg_option options[] = {
        DECODE_OPTIONS(a.decode),
        {.name = "prompt", .kind = OPTION_TEXT, .value = &a.prompt},
        {.name = "prompt-file", .kind = OPTION_TEXT, .value = &a.prompt_file},
        {.name = "temperature", .kind = OPTION_NUMBER, .value = &a.temperature},
        {.name = "replace", .kind = OPTION_FLAG, .value = &a.replace},
        {.name = "end", .kind = OPTION_CHOICE, .value = &a.end, .choices = status_choices},
        {.name = "reward", .kind = OPTION_NUMBER, .value = &a.reward},
        {.name = "group-index", .kind = OPTION_INT, .value = &a.group_index},
        {.name = "index", .kind = OPTION_INT, .value = &a.index},
        {.name = "timeout", .kind = OPTION_TIME, .value = &a.timeout_ms},
        {.name = "json", .kind = OPTION_FLAG, .value = &a.json},
        {.name = NULL},
    };
    arg_operands operands;
    if (!args_parse(argc, argv, options, 3, 4, &operands)) {
        return STATUS_USAGE;
    }
    uint64_t turn;
    if (!parse_count(operands.items[2], &turn) || turn >= RST_TURN_COUNT_MAX) {
        return fail_usage(argv[0], "\"%s\" is no turn: 0, 1, ...", operands.items[2]);
    }
    if (a.prompt && a.prompt_file) {
        return fail_usage(argv[0], "--prompt and --prompt-file exclude each other");
    }
    if (!a.end && (!isnan(a.reward) || a.group_index != RST_NO_INDEX || a.index != RST_NO_INDEX)) {
        return fail_usage(argv[0], "--reward, --group-index and --index need --end");
    }
    if (a.temperature < 0 || a.temperature > (double)FLT_MAX) {
        return fail_usage(argv[0], "--temperature %g: it takes a number from 0 on", a.temperature);
    }
    rst_record *record = rst_record_new();
    if (!record) {
        return fail("memory", "no memory for the record");
    }
    int status = fill_record(&a, operands.count > 3 ? operands.items[3] : NULL, record)
                     ? put(&a, operands.items, (uint32_t)turn, record)
                     : STATUS_FAILED;
    rst_record_free(record);
    return status;
}

const tool_command command_put = {"put", "store one reply", help, run};
