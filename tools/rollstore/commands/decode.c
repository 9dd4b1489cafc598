#include "../base/input.h"
#include "../command.h"
#include "../formats.h"

static const char help[] =
    "usage: rollstore decode [OPTION...] [FILE]\n"
    "\n"
    "Decode one engine reply, a chat completion or a native /generate reply, from\n"
    "FILE or standard input, and print the record as one JSON object.  No store is\n"
    "needed.  A reply that is refused prints nothing but the reason.\n"
    "\n" DECODE_HELP "\n"
    "The object: n tokens, k candidates each, width (candidates of each row),\n"
    "token_ids, token_logprobs, topk_ids, topk_logprobs (row by row; null is minus\n"
    "infinity), weight_version, finish_reason, mode, null_prefix, temperature_scaled.\n"
    "\n"
    "example: curl -s localhost:30000/generate -d @request.json |\n"
    "             rollstore decode --request nested --top-k 32\n";

static int decode(rst_record *record, const input_bytes *reply, const rst_decode_options *options)
{
    rst_error error;
    if (rst_record_decode(record, reply->bytes, reply->size, options, &error)) {
        return fail_error(&error);
    }
    rst_turn turn;
    rst_record_view(record, &turn);
    output out = {0};
    json_open(&out, '{');
    json_turn_arrays(&out, &turn);
    json_close(&out, '}');
    output_text(&out, "\n");
    return output_finish(&out);
}

static int run(int argc, char **argv)
{
    decode_arguments arguments = {.mode = RST_MODE_SELECTED};
    const arg_option options[] = {DECODE_OPTIONS(arguments), {.name = NULL}};
    arg_operands operands;
    if (!args_parse(argc, argv, options, 0, 1, &operands)) {
        return STATUS_USAGE;
    }
    rst_decode_options how = decode_options_of(&arguments);
    input_bytes reply;
    int status = STATUS_FAILED;
    if (input_read(&reply, operands.count ? operands.items[0] : NULL, RST_REPLY_SIZE_MAX)) {
        rst_record *record = rst_record_new();
        status = record ? decode(record, &reply, &how) : fail("memory", "no memory for the record");
        rst_record_free(record);
    }
    input_free(&reply);
    return status;
}

const tool_command command_decode = {"decode", "print what a reply holds, without a store", help,
                                     run};
