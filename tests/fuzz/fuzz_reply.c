/* A reply's bytes: decoded in the mode that the first byte chooses; what decodes is a sound record,
 * and written as a reply it decodes to the same again.  Without the processor's wide registers the
 * outcome is the same, and so it is when the reply is stripped in the same reading. */
#include <rollstore/proxy.h>

#include "fuzz.h"
#include "layout/record.h"
#include "layout/simd.h"

static rst_record *record;
static rst_record *again;

static rst_decode_options options_of(uint8_t byte)
{
    static const uint32_t topks[] = {RST_TOPK_FROM_REPLY, 1, 2, 8};
    return (rst_decode_options){
        .mode = byte & 1 ? RST_MODE_SUPPORT : RST_MODE_SELECTED,
        .request = byte & 2 ? RST_REQUEST_NESTED : RST_REQUEST_FLAT,
        .topk = topks[byte >> 2 & 3],
        .choice = byte >> 4 & 1,
    };
}

/* The record as it would be stored passes the check of stored bytes. */
static void must_be_sound(void)
{
    static const uint8_t key[RST_KEY_SIZE] = {1, 2, 3};
    const rst_place place = {.session_key = key, .turn = 3};
    const void *bytes;
    size_t size;
    rst_error error;
    must(rst_record_complete(record, &place, &bytes, &size, &error) == RST_OK);
    must(rst_record_check(bytes, size, key, 3, &error) == RST_OK);
}

static void must_read_back(const rst_turn *turn)
{
    char *reply;
    size_t size;
    rst_error error;
    rst_turn other;
    must(rst_turn_to_reply(turn, &reply, &size, &error) == RST_OK);
    const rst_decode_options options = {.mode = turn->mode, .topk = turn->topk};
    char *exact = exact_copy(reply, size);
    free(reply);
    must(rst_record_decode(again, exact, size, &options, &error) == RST_OK);
    free(exact);
    rst_record_view(again, &other);
    must_be_same_turn(turn, &other);
}

/* The lists of tokens and the rows are read in other ways then. */
static void must_be_same_without_wide_registers(const char *reply, size_t size,
                                                const rst_decode_options *options, int code,
                                                const rst_error *error)
{
    const char *wide = rst_simd_active()->name;
    rst_error other;
    rst_turn turn;
    rst_turn other_turn;
    must(rst_simd_force("portable"));
    must(rst_record_decode(again, reply, size, options, &other) == code);
    must(rst_simd_force(wide));
    if (code) {
        must(other.offset == error->offset && !strcmp(other.message, error->message));
    } else {
        rst_record_view(record, &turn);
        rst_record_view(again, &other_turn);
        must_be_same_turn(&turn, &other_turn);
    }
}

/* Read once for both, as twice. */
static void must_be_same_together(const char *reply, size_t size, const rst_decode_options *options,
                                  unsigned keep, int code, const rst_error *error)
{
    rst_answer answer;
    rst_answer both;
    rst_error other;
    rst_turn turn;
    rst_turn other_turn;
    int stripped = rst_reply_strip(reply, size, keep, &answer, NULL);
    int together = rst_reply_decode_and_strip(again, reply, size, options, keep, &both, &other);
    must(together == (code ? code : stripped));
    if (code) {
        must(other.offset == error->offset && !strcmp(other.message, error->message));
    } else if (!together) {
        rst_record_view(record, &turn);
        rst_record_view(again, &other_turn);
        must_be_same_turn(&turn, &other_turn);
        must(both.text_size == answer.text_size && both.prompt_count == answer.prompt_count &&
             both.logprobs_size == answer.logprobs_size);
        must(!memcmp(both.text, answer.text, both.text_size));
    }
    rst_answer_clear(&answer);
    rst_answer_clear(&both);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0) {
        return 0;
    }
    if (!record) {
        record = rst_record_new();
        again = rst_record_new();
    }
    const rst_decode_options options = options_of(data[0]);
    char *reply = exact_copy(data + 1, size - 1);
    rst_error error;
    rst_turn turn;
    int code = rst_record_decode(record, reply, size - 1, &options, &error);
    must_be_same_without_wide_registers(reply, size - 1, &options, code, &error);
    must_be_same_together(reply, size - 1, &options, data[0] >> 4, code, &error);
    free(reply);
    rst_record_view(record, &turn);
    if (code) {
        must_be_told(code, &error, size - 1);
        must(turn.token_count == 0 && turn.topk == 0 && turn.weight_version_size == 0);
        return 0;
    }
    must(options.topk == 0 || turn.topk <= options.topk);
    must(turn.mode == options.mode && turn.prompt_count == 0);
    must_be_sound();
    rst_record_view(record, &turn);
    must_read_back(&turn);
    return 0;
}
