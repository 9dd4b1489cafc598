#include <signal.h>
#include <string.h>

#include "../base/terminal.h"
#include "../command.h"

static const char help[] =
    "usage: rollstore verify STORE [--json]\n"
    "\n"
    "Read the whole store once: every checksum and value, every index against the\n"
    "others, the totals, and each session's sample.  Prints one line for each fault.\n"
    "Exit status 1 when there is one.  The store may be in use.\n"
    "\n"
    "  --json               one JSON object with the counts and the faults\n"
    "\n"
    "example: rollstore verify /dev/shm/run1\n";

typedef struct verify_run {
    bool json;
    output out;
    progress_bar bar;
} verify_run;

static volatile sig_atomic_t interrupted;

static void note_signal(int number)
{
    interrupted = number;
}

static int draw_progress(void *context, uint64_t done, uint64_t total)
{
    verify_run *run = context;
    run->bar.total = total;
    progress_draw(&run->bar, done, false);
    return interrupted;
}

static void print_fault(void *context, const rst_error *fault)
{
    verify_run *run = context;
    output *out = &run->out;
    char text[ERROR_TEXT_SIZE];
    error_text(fault, text);
    progress_clear(&run->bar);
    if (run->json) {
        json_open(out, '{');
        json_key(out, "kind");
        json_text(out, rst_code_name(fault->code));
        json_key(out, "message");
        json_text(out, text);
        json_close(out, '}');
        return;
    }
    output_format(out, "fault: %s: ", rst_code_name(fault->code));
    output_shown(out, text, strlen(text), 0);
    output_text(out, "\n");
    output_write(out); /* as they are found; a failure is seen at the end */
}

static void print_result(verify_run *run, const rst_verify_result *result)
{
    output *out = &run->out;
    char text[TEXT_SIZE];
    if (!run->json) {
        output_count(out, result->session_count, "session");
        output_text(out, ", ");
        output_count(out, result->turn_count, "turn");
        output_format(out, ", %s read: ", size_text(result->value_size, text));
        output_count(out, result->fault_count, "fault");
        output_text(out, "\n");
        return;
    }
    json_close(out, ']');
    json_key(out, "session_count");
    json_u64(out, result->session_count);
    json_key(out, "turn_count");
    json_u64(out, result->turn_count);
    json_key(out, "value_size");
    json_u64(out, result->value_size);
    json_key(out, "fault_count");
    json_u64(out, result->fault_count);
    json_close(out, '}');
    output_text(out, "\n");
}

static int verify(verify_run *run, rst_store *store)
{
    rst_verify_options options = {.progress = draw_progress, .fault = print_fault, .context = run};
    rst_verify_result result;
    rst_error error;
    if (run->json) {
        json_open(&run->out, '{');
        json_open_key(&run->out, "faults", '[');
    }
    progress_begin(&run->bar, "verify", 0);
    int code = rst_store_verify(store, &options, &result, &error);
    progress_clear(&run->bar);
    if (code) {
        run->out.size = 0; /* half an object */
        return interrupted ? fail("timeout", "interrupted, not all was read") : fail_error(&error);
    }
    print_result(run, &result);
    return result.fault_count ? STATUS_FAILED : STATUS_OK;
}

static int run(int argc, char **argv)
{
    verify_run verification = {.json = false};
    const arg_option options[] = {
        {.name = "json", .kind = OPTION_FLAG, .value = &verification.json},
        {.name = NULL},
    };
    arg_operands operands;
    if (!args_parse(argc, argv, options, 1, 1, &operands)) {
        return STATUS_USAGE;
    }
    rst_store *store = open_store(operands.items[0], RST_OPEN_READ_ONLY, NULL);
    if (!store) {
        return STATUS_FAILED;
    }
    struct sigaction action = {.sa_handler = note_signal};
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    int status = verify(&verification, store);
    int written = output_finish(&verification.out);
    rst_store_close(store, NULL);
    if (interrupted) {
        signal(interrupted, SIG_DFL);
        raise(interrupted); /* so that a shell's loop ends too */
    }
    return status ? status : written;
}

const tool_command command_verify = {"verify", "check everything that is stored", help, run};
