/* What the fuzz targets share.  A target is a file with LLVMFuzzerTestOneInput: libFuzzer and AFL++
 * take the same ones. */
#ifndef RST_TESTS_FUZZ_H
#define RST_TESTS_FUZZ_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <rollstore/rollstore.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define must(condition) must_be((condition), #condition, __FILE__, __LINE__)

static inline void must_be(bool condition, const char *text, const char *file, int line)
{
    if (!condition) {
        fprintf(stderr, "%s:%d: not so: %s\n", file, line, text);
        abort();
    }
}

/* The code's error says so, in words, and points into the input. */
static inline void must_be_told(int code, const rst_error *error, size_t size)
{
    must(code == error->code);
    must(strcmp(rst_code_name(code), "unknown") != 0);
    must(error->message[0] != '\0' && strlen(error->message) < sizeof error->message);
    must(strlen(error->field) < sizeof error->field);
    must(error->offset >= -1 && error->offset <= (int64_t)size);
}

/* A block of exactly these bytes, so that a sanitizer sees what is read beside it. */
static inline void *exact_copy(const void *bytes, size_t size)
{
    void *copy = malloc(size ? size : 1);
    must(copy != NULL);
    if (size) {
        memcpy(copy, bytes, size);
    }
    return copy;
}

static inline bool same_bytes(const void *a, const void *b, size_t size)
{
    return size == 0 || memcmp(a, b, size) == 0;
}

/* Everything but prompt and temperature is the same, bit by bit. */
static inline void must_be_same_turn(const rst_turn *a, const rst_turn *b)
{
    size_t n = a->token_count;
    must(a->token_count == b->token_count && a->topk == b->topk);
    must(a->null_prefix == b->null_prefix && !a->widths == !b->widths);
    must(same_bytes(a->token_ids, b->token_ids, 4 * n));
    must(same_bytes(a->token_logprobs, b->token_logprobs, 4 * n));
    must(same_bytes(a->topk_ids, b->topk_ids, 4 * n * a->topk));
    must(same_bytes(a->topk_logprobs, b->topk_logprobs, 4 * n * a->topk));
    must(!a->widths || same_bytes(a->widths, b->widths, 4 * n));
    must(a->mode == b->mode && a->finish == b->finish);
    must(a->temperature_scaled == b->temperature_scaled);
    must(a->weight_version_size == b->weight_version_size);
    must(same_bytes(a->weight_version, b->weight_version, a->weight_version_size));
    must(a->weight_version_number == b->weight_version_number);
    must(a->finish_reason_size == b->finish_reason_size);
    must(same_bytes(a->finish_reason, b->finish_reason, a->finish_reason_size));
}

#endif
