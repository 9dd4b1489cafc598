/* The buffer a turn is built in. */
#include "record.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../error.h"

rst_record *rst_record_new(void)
{
    return calloc(1, sizeof(rst_record));
}

void rst_record_free(rst_record *record)
{
    if (!record) {
        return;
    }
    if (record->scratch_free) {
        record->scratch_free(record->scratch);
    }
    free(record->session);
    free(record->prompt);
    free(record->memory);
    free(record);
}

rst_record_header *rst_record_header_of(const rst_record *record)
{
    return (rst_record_header *)(void *)(record->memory + RST_VALUE_OFFSET);
}

/* Make the first `capacity` bytes from the header on writable; keeps `kept` of them. */
static int reserve(rst_record *record, uint64_t capacity, size_t kept, rst_error *error)
{
    if (record->memory && record->capacity >= capacity) {
        return RST_OK;
    }
    /* Half as much again, so that growing turns do not allocate each time. */
    size_t wanted = (size_t)rst_align(capacity + capacity / 2) + RST_VALUE_OFFSET;
    unsigned char *memory = aligned_alloc(RST_ALIGNMENT, wanted);
    if (!memory) {
        return rst_fail(error, RST_ERR_MEMORY, NULL, "no memory for a record of %llu bytes",
                        (unsigned long long)capacity);
    }
    if (kept) {
        memcpy(memory + RST_VALUE_OFFSET, record->memory + RST_VALUE_OFFSET, kept);
    }
    free(record->memory);
    record->memory = memory;
    record->capacity = wanted - RST_VALUE_OFFSET;
    return RST_OK;
}

static void init_header(rst_record_header *h, uint32_t token_count, uint32_t topk)
{
    *h = (rst_record_header){
        .magic = RST_RECORD_MAGIC,
        .version = RST_FORMAT_VERSION,
        .header_size = sizeof *h,
        .token_count = token_count,
        .topk = topk,
        .temperature = NAN,
        .weight_version_number = RST_NO_VERSION,
    };
}

int rst_record_begin(rst_record *record, uint32_t token_count, uint32_t topk, rst_slots *slots,
                     rst_error *error)
{
    record->filled = false;
    record->prompt_count = 0;
    rst_record_header wanted;
    init_header(&wanted, token_count, topk);
    wanted.flags = RST_RECORD_RAGGED; /* room for the widths, should they be needed */
    rst_offsets o;
    if (token_count > RST_TOKEN_COUNT_MAX || topk > RST_TOPK_MAX || !rst_offsets_of(&wanted, &o)) {
        return rst_fail(error, RST_ERR_LIMIT, NULL,
                        "%u tokens of %u candidates: a record holds %u tokens, %u candidates and "
                        "%llu bytes",
                        token_count, topk, RST_TOKEN_COUNT_MAX, RST_TOPK_MAX,
                        (unsigned long long)RST_RECORD_SIZE_MAX);
    }
    int code = reserve(record, o.end, 0, error);
    if (code) {
        return code;
    }
    wanted.flags = 0;
    *rst_record_header_of(record) = wanted;
    record->offsets = o;
    unsigned char *bytes = record->memory + RST_VALUE_OFFSET;
    *slots = (rst_slots){
        .token_ids = (int32_t *)(void *)(bytes + o.token_ids),
        .token_logprobs = (float *)(void *)(bytes + o.token_logprobs),
        .topk_ids = (int32_t *)(void *)(bytes + o.topk_ids),
        .topk_logprobs = (float *)(void *)(bytes + o.topk_logprobs),
        .widths = (int32_t *)(void *)(bytes + o.widths),
    };
    return RST_OK;
}

static void zero_between(unsigned char *bytes, uint64_t end, uint64_t next)
{
    memset(bytes + end, 0, (size_t)(next - end));
}

void rst_record_filled(rst_record *record, bool ragged)
{
    rst_record_header *h = rst_record_header_of(record);
    unsigned char *bytes = record->memory + RST_VALUE_OFFSET;
    const rst_offsets *o = &record->offsets;
    uint64_t token_size = UINT64_C(4) * h->token_count;
    uint64_t topk_size = token_size * h->topk;
    zero_between(bytes, o->token_ids + token_size, o->token_logprobs);
    zero_between(bytes, o->token_logprobs + token_size, o->topk_ids);
    zero_between(bytes, o->topk_ids + topk_size, o->topk_logprobs);
    zero_between(bytes, o->topk_logprobs + topk_size, o->widths);
    h->flags = ragged ? RST_RECORD_RAGGED : 0;
    h->null_prefix = 0;
    const int32_t *widths = (const int32_t *)(const void *)(bytes + o->widths);
    bool rows_can_be_empty = ragged || h->topk == 0;
    while (rows_can_be_empty && h->null_prefix < h->token_count &&
           (h->topk == 0 || widths[h->null_prefix] == 0)) {
        h->null_prefix++;
    }
    record->filled = true;
}

static int set_text(const char *what, char out[RST_TEXT_SIZE_MAX], uint16_t *out_size,
                    const char *text, size_t size, rst_error *error)
{
    if (size > RST_TEXT_SIZE_MAX) {
        return rst_fail(error, RST_ERR_LIMIT, what, "%s has %zu bytes, at most %d are kept", what,
                        size, RST_TEXT_SIZE_MAX);
    }
    if (size) {
        memcpy(out, text, size);
    }
    *out_size = (uint16_t)size;
    return RST_OK;
}

int rst_record_set_weight_version(rst_record *record, const char *text, size_t size,
                                  rst_error *error)
{
    rst_record_header *h = rst_record_header_of(record);
    h->weight_version_number = rst_decimal_version(text, size);
    return set_text("weight_version", record->weight_version, &h->weight_version_size, text, size,
                    error);
}

int rst_record_set_finish_reason(rst_record *record, rst_finish finish, const char *text,
                                 size_t size, rst_error *error)
{
    rst_record_header *h = rst_record_header_of(record);
    h->finish = (uint8_t)finish;
    return set_text("finish_reason", record->finish_reason, &h->finish_reason_size, text,
                    finish == RST_FINISH_OTHER ? size : 0, error);
}

static int check_arrays(const rst_turn *turn, rst_error *error)
{
    if (turn->mode != RST_MODE_SELECTED && turn->mode != RST_MODE_SUPPORT) {
        return rst_fail(error, RST_ERR_ARGUMENT, "mode", "mode %d is none", (int)turn->mode);
    }
    if ((int)turn->finish < RST_FINISH_NONE || turn->finish > RST_FINISH_OTHER) {
        return rst_fail(error, RST_ERR_ARGUMENT, "finish", "finish %d is none", (int)turn->finish);
    }
    if ((int)turn->temperature_scaled < RST_SCALED_NOT_SAID ||
        turn->temperature_scaled > RST_SCALED_YES) {
        return rst_fail(error, RST_ERR_ARGUMENT, "temperature_scaled",
                        "temperature_scaled %d is none", (int)turn->temperature_scaled);
    }
    bool tokens = turn->token_ids && turn->token_logprobs;
    bool candidates = turn->topk == 0 || (turn->topk_ids && turn->topk_logprobs);
    if (turn->token_count && !(tokens && candidates)) {
        return rst_fail(error, RST_ERR_ARGUMENT, tokens ? "topk_ids" : "token_ids",
                        "%u tokens, but an array of them is NULL", turn->token_count);
    }
    return RST_OK;
}

static int check_temperature(float temperature, rst_error *error)
{
    return rst_temperature_possible(temperature)
               ? RST_OK
               : rst_fail(error, RST_ERR_VALUE, "temperature",
                          "temperature: a finite number from 0 on is needed, got %g",
                          (double)temperature);
}

int rst_record_set(rst_record *record, const rst_turn *turn, rst_error *error)
{
    rst_error_clear(error);
    record->filled = false;
    int code = check_arrays(turn, error);
    rst_slots slots;
    if (!code) {
        code = check_temperature(turn->temperature, error);
    }
    if (!code) {
        code = rst_record_begin(record, turn->token_count, turn->topk, &slots, error);
    }
    if (code) {
        return code;
    }
    size_t n = turn->token_count;
    if (n) {
        memcpy(slots.token_ids, turn->token_ids, 4 * n);
        memcpy(slots.token_logprobs, turn->token_logprobs, 4 * n);
    }
    if (n && turn->topk) {
        memcpy(slots.topk_ids, turn->topk_ids, 4 * n * turn->topk);
        memcpy(slots.topk_logprobs, turn->topk_logprobs, 4 * n * turn->topk);
    }
    /* The copy is what is checked: the caller's arrays may change under another thread. */
    rst_turn copy = {.token_count = turn->token_count,
                     .topk = turn->topk,
                     .token_ids = slots.token_ids,
                     .token_logprobs = slots.token_logprobs,
                     .topk_ids = slots.topk_ids,
                     .topk_logprobs = slots.topk_logprobs};
    bool ragged;
    rst_bad_value bad;
    if (!rst_check_values(&copy, slots.widths, &ragged, &bad)) {
        return rst_fail(error, RST_ERR_VALUE, rst_bad_array_name(&bad), "%s[%llu]: %s",
                        rst_bad_array_name(&bad), (unsigned long long)bad.index, bad.reason);
    }
    rst_record_header *h = rst_record_header_of(record);
    h->mode = (uint8_t)turn->mode;
    h->temperature_scaled = (uint8_t)turn->temperature_scaled;
    h->temperature = turn->temperature;
    code = rst_record_set_weight_version(record, turn->weight_version, turn->weight_version_size,
                                         error);
    if (!code) {
        code = rst_record_set_finish_reason(record, turn->finish, turn->finish_reason,
                                            turn->finish_reason_size, error);
    }
    if (!code) {
        code = rst_record_set_prompt(record, turn->prompt_ids, turn->prompt_count, error);
    }
    if (!code) {
        rst_record_filled(record, ragged);
    }
    return code;
}

int rst_record_set_prompt(rst_record *record, const int32_t *ids, size_t count, rst_error *error)
{
    rst_error_clear(error);
    if (count > RST_TOKEN_COUNT_MAX) {
        return rst_fail(error, RST_ERR_LIMIT, "prompt_ids", "a prompt of %zu ids, at most %u",
                        count, RST_TOKEN_COUNT_MAX);
    }
    for (size_t i = 0; i < count; i++) {
        if (ids[i] < 0) {
            return rst_fail(error, RST_ERR_VALUE, "prompt_ids", "prompt_ids[%zu]: an id below 0",
                            i);
        }
    }
    if (count > record->prompt_capacity) {
        size_t capacity = count + count / 2;
        int32_t *prompt = malloc(4 * capacity);
        if (!prompt) {
            return rst_fail(error, RST_ERR_MEMORY, NULL, "no memory for a prompt of %zu ids",
                            count);
        }
        free(record->prompt);
        record->prompt = prompt;
        record->prompt_capacity = capacity;
    }
    if (count) {
        memcpy(record->prompt, ids, 4 * count);
    }
    record->prompt_count = count;
    return RST_OK;
}

void rst_record_set_temperature(rst_record *record, float temperature)
{
    if (record->filled) {
        rst_record_header_of(record)->temperature = temperature;
    }
}

void rst_record_view(const rst_record *record, rst_turn *turn)
{
    *turn = (rst_turn){.temperature = NAN, .weight_version_number = RST_NO_VERSION};
    if (!record->filled) {
        return;
    }
    const rst_record_header *h = rst_record_header_of(record);
    const unsigned char *bytes = record->memory + RST_VALUE_OFFSET;
    const rst_offsets *o = &record->offsets;
    *turn = (rst_turn){
        .token_count = h->token_count,
        .topk = h->topk,
        .null_prefix = h->null_prefix,
        .token_ids = (const int32_t *)(const void *)(bytes + o->token_ids),
        .token_logprobs = (const float *)(const void *)(bytes + o->token_logprobs),
        .topk_ids = (const int32_t *)(const void *)(bytes + o->topk_ids),
        .topk_logprobs = (const float *)(const void *)(bytes + o->topk_logprobs),
        .widths = h->flags & RST_RECORD_RAGGED ? (const int32_t *)(const void *)(bytes + o->widths)
                                               : NULL,
        .prompt_ids = record->prompt,
        .prompt_count = (uint32_t)record->prompt_count,
        .temperature = h->temperature,
        .mode = (rst_mode)h->mode,
        .finish = (rst_finish)h->finish,
        .temperature_scaled = (rst_scaled)h->temperature_scaled,
        .weight_version_size = h->weight_version_size,
        .finish_reason_size = h->finish_reason_size,
        .weight_version = h->weight_version_size ? record->weight_version : NULL,
        .finish_reason = h->finish_reason_size ? record->finish_reason : NULL,
        .weight_version_number = h->weight_version_number,
    };
}

int rst_record_complete(rst_record *record, const rst_place *place, const void **out, size_t *size,
                        rst_error *error)
{
    if (!record->filled) {
        return rst_fail(error, RST_ERR_ARGUMENT, "record", "the record holds no turn");
    }
    rst_record_header *h = rst_record_header_of(record);
    int code = check_temperature(h->temperature, error);
    if (code) {
        return code;
    }
    h->turn = place->turn;
    h->prefix_count = place->prefix_count;
    h->trimmed_count = place->trimmed_count;
    h->prefix_hash = place->prefix_hash;
    h->prompt_count = (uint32_t)record->prompt_count - place->prefix_count;
    memcpy(h->session_key, place->session_key, RST_KEY_SIZE);
    rst_offsets o;
    if (!rst_offsets_of(h, &o)) {
        return rst_fail(error, RST_ERR_LIMIT, NULL, "turn and prompt are over %llu bytes",
                        (unsigned long long)RST_RECORD_SIZE_MAX);
    }
    h->record_size = o.end;
    uint64_t token_size = UINT64_C(4) * h->token_count;
    bool ragged = h->flags & RST_RECORD_RAGGED;
    uint64_t arrays_end = ragged ? o.widths + token_size : o.topk_logprobs + token_size * h->topk;
    code = reserve(record, o.end, (size_t)arrays_end, error);
    if (code) {
        return code;
    }
    h = rst_record_header_of(record);
    unsigned char *bytes = record->memory + RST_VALUE_OFFSET;
    uint64_t prompt_size = UINT64_C(4) * h->prompt_count;
    zero_between(bytes, arrays_end, o.prompt_ids);
    if (prompt_size) {
        memcpy(bytes + o.prompt_ids, record->prompt + place->prefix_count, prompt_size);
    }
    zero_between(bytes, o.prompt_ids + prompt_size, o.text);
    memcpy(bytes + o.text, record->weight_version, h->weight_version_size);
    memcpy(bytes + o.text + h->weight_version_size, record->finish_reason, h->finish_reason_size);
    size_t from = offsetof(rst_record_header, record_size);
    h->checksum = rst_hash(bytes + from, h->record_size - from);
    *out = bytes;
    *size = h->record_size;
    return RST_OK;
}
