/* A stored value's bytes.  The first byte says what is set right first, so that what lies behind
 * checksum and sizes is reached: bit 0 the record's size, bit 1 the checksum, bit 2 the widths. */
#include "fuzz.h"
#include "layout/record.h"

/* A record stands RST_VALUE_OFFSET bytes behind a boundary, and ends where its bytes do. */
static unsigned char *place_bytes(const uint8_t *data, size_t size, void **block)
{
    must(posix_memalign(block, RST_ALIGNMENT, RST_VALUE_OFFSET + size) == 0);
    unsigned char *value = (unsigned char *)*block + RST_VALUE_OFFSET;
    if (size) {
        memcpy(value, data, size);
    }
    return value;
}

static void set_right(unsigned char *value, size_t size, uint8_t what)
{
    rst_record_header h;
    if (size < sizeof h) {
        return;
    }
    memcpy(&h, value, sizeof h);
    rst_offsets o;
    bool fits = rst_offsets_of(&h, &o) && o.end <= size;
    if (what & 1 && fits) {
        h.record_size = o.end;
    }
    memcpy(value, &h, sizeof h);
    if (what & 4 && fits && h.flags & RST_RECORD_RAGGED) {
        rst_turn turn = {.token_count = h.token_count,
                         .topk = h.topk,
                         .token_ids = (const int32_t *)(const void *)(value + o.token_ids),
                         .token_logprobs = (const float *)(const void *)(value + o.token_logprobs),
                         .topk_ids = (const int32_t *)(const void *)(value + o.topk_ids),
                         .topk_logprobs = (const float *)(const void *)(value + o.topk_logprobs)};
        bool ragged;
        rst_bad_value bad;
        rst_check_values(&turn, (int32_t *)(void *)(value + o.widths), &ragged, &bad);
    }
    size_t from = offsetof(rst_record_header, record_size);
    if (what & 2 && h.record_size >= from && h.record_size <= size) {
        h.checksum = rst_hash(value + from, h.record_size - from);
        memcpy(value, &h, sizeof h);
    }
}

static uint64_t sum_bytes(const void *bytes, size_t size)
{
    const unsigned char *at = bytes;
    uint64_t sum = 0;
    for (size_t i = 0; i < size; i++) {
        sum += at[i];
    }
    return sum;
}

/* Every byte that a turn's pointers promise is there. */
static uint64_t read_all(const rst_turn *t)
{
    size_t n = t->token_count;
    return sum_bytes(t->token_ids, 4 * n) + sum_bytes(t->token_logprobs, 4 * n) +
           sum_bytes(t->topk_ids, 4 * n * t->topk) + sum_bytes(t->topk_logprobs, 4 * n * t->topk) +
           sum_bytes(t->widths, t->widths ? 4 * n : 0) +
           sum_bytes(t->prompt_ids, 4 * (size_t)t->prompt_count) +
           sum_bytes(t->weight_version, t->weight_version_size) +
           sum_bytes(t->finish_reason, t->finish_reason_size);
}

/* What the check of stored bytes lets through, the check of a caller's arrays does too. */
static void must_be_accepted(const rst_turn *turn)
{
    rst_record *record = rst_record_new();
    must(record != NULL);
    rst_error error;
    rst_turn view;
    must(rst_record_set(record, turn, &error) == RST_OK);
    rst_record_view(record, &view);
    must_be_same_turn(turn, &view);
    rst_record_free(record);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0) {
        return 0;
    }
    void *block;
    unsigned char *value = place_bytes(data + 1, size - 1, &block);
    set_right(value, size - 1, data[0]);
    rst_error error;
    rst_turn turn;
    int opened = rst_record_open(value, size - 1, &turn, &error);
    if (opened) {
        must_be_told(opened, &error, size);
    } else {
        must(read_all(&turn) != UINT64_MAX); /* whatever it is */
    }
    int checked = rst_record_check(value, size - 1, NULL, 0, &error);
    if (checked) {
        must_be_told(checked, &error, size);
    } else {
        must(opened == RST_OK);
        must_be_accepted(&turn);
    }
    free(block);
    return 0;
}
