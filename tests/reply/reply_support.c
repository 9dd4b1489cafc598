#include "reply_support.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "layout/record.h"

/* ---------------------------------------------------------------- fixtures */

static int keep_document(void *context, const rst_json *json, rst_json_node root, rst_error *error)
{
    (void)root;
    (void)error;
    *(rst_json *)context = *json;
    return RST_OK;
}

static char *read_fixture(const char *name, size_t *size)
{
    FILE *file = fopen(support_path(RST_TEST_DATA, name), "rb");
    assert_non_null(file);
    assert_int_equal(fseek(file, 0, SEEK_END), 0);
    *size = (size_t)ftell(file);
    rewind(file);
    char *bytes = malloc(*size);
    assert_non_null(bytes);
    assert_int_equal(fread(bytes, 1, *size, file), *size);
    fclose(file);
    return bytes;
}

size_t fixture_each(const char *name, void (*check)(const fixture_line *line))
{
    size_t size;
    size_t count = 0;
    char *bytes = read_fixture(name, &size);
    rst_json_reader reader = {0};
    for (size_t at = 0; at < size; count++) {
        const char *end = memchr(bytes + at, '\n', size - at);
        assert_non_null(end);
        fixture_line line = {.text = bytes + at, .size = (size_t)(end - bytes) - at};
        rst_error error;
        assert_ok(rst_json_with(&reader, line.text, line.size, keep_document, &line.json, &error),
                  error);
        check(&line);
        at += line.size + 1;
    }
    rst_json_reader_free(&reader);
    free(bytes);
    return count;
}

rst_json_node fixture_member(const fixture_line *line, rst_json_node object, const char *name)
{
    rst_json_node value;
    rst_json_members(&line->json, object, &name, 1, &value);
    return value;
}

char *fixture_text(const fixture_line *line, rst_json_node object, const char *name, size_t *size)
{
    rst_json_node value = fixture_member(line, object, name);
    if (value == RST_JSON_NONE) {
        return NULL;
    }
    rst_json_buffer buffer = {0};
    const char *text;
    size_t length;
    assert_int_equal(rst_json_string(&line->json, value, &buffer, &text, &length), RST_OK);
    char *copy = malloc(length + 1);
    assert_non_null(copy);
    memcpy(copy, text, length);
    copy[length] = '\0';
    free(buffer.bytes);
    if (size) {
        *size = length;
    }
    return copy;
}

int64_t fixture_integer(const fixture_line *line, rst_json_node object, const char *name,
                        int64_t otherwise)
{
    rst_json_node value = fixture_member(line, object, name);
    int64_t number = otherwise;
    if (value != RST_JSON_NONE) {
        assert_int_equal(rst_json_int64(&line->json, value, &number), RST_JSON_NUMBER_FINE);
    }
    return number;
}

const char *fixture_bytes(const fixture_line *line, rst_json_node value, size_t *size)
{
    size_t begin = rst_json_offset(&line->json, value);
    size_t end = rst_json_offset(&line->json, rst_json_after(&line->json, value));
    *size = end - begin; /* with blanks behind it, which are JSON too */
    return line->json.text + begin;
}

/* ---------------------------------------------------------------- decoding */

const char *at_the_edge(const void *text, size_t size)
{
    static char *pages;
    static size_t room;
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    if (room < size) {
        if (pages) {
            munmap(pages, room + page);
        }
        room = (size / page + 1) * page;
        pages = mmap(NULL, room + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        assert_ptr_not_equal(pages, MAP_FAILED);
        assert_int_equal(mprotect(pages + room, page, PROT_NONE), 0);
    }
    memcpy(pages + room - size, text, size);
    return pages + room - size;
}

int decode_at_the_edge(rst_record *record, const void *text, size_t size,
                       const rst_decode_options *options, rst_error *error)
{
    return rst_record_decode(record, at_the_edge(text, size), size, options, error);
}

rst_turn decode_text(rst_record *record, const char *text, const rst_decode_options *options)
{
    rst_error error;
    assert_ok(decode_at_the_edge(record, text, strlen(text), options, &error), error);
    rst_turn turn;
    rst_record_view(record, &turn);
    return turn;
}

void assert_empty(const rst_record *record)
{
    rst_turn turn;
    rst_record_view(record, &turn);
    assert_false(record->filled);
    assert_null(turn.token_ids);
    assert_int_equal(turn.token_count, 0);
    assert_int_equal(turn.prompt_count, 0);
}

void refuse_text(const char *text, const rst_decode_options *options, int code, const char *field,
                 rst_error *error)
{
    static rst_record *record; /* also sees what an error before left behind */
    rst_error own;
    error = error ? error : &own;
    if (!record) {
        record = rst_record_new();
        assert_non_null(record);
    }
    assert_code(code, decode_at_the_edge(record, text, strlen(text), options, error), *error);
    assert_string_equal(error->field, field);
    assert_empty(record);
    assert_int_equal(decode_at_the_edge(record, text, strlen(text), options, NULL), code);
}

static void assert_same_array(const void *a, const void *b, size_t count)
{
    if (count > 0) {
        assert_non_null(a);
        assert_non_null(b);
        assert_memory_equal(a, b, 4 * count);
    }
}

void assert_same_turn(const rst_turn *a, const rst_turn *b)
{
    assert_int_equal(a->token_count, b->token_count);
    assert_int_equal(a->topk, b->topk);
    assert_int_equal(a->null_prefix, b->null_prefix);
    size_t n = a->token_count;
    assert_same_array(a->token_ids, b->token_ids, n);
    assert_same_array(a->token_logprobs, b->token_logprobs, n);
    assert_same_array(a->topk_ids, b->topk_ids, n * a->topk);
    assert_same_array(a->topk_logprobs, b->topk_logprobs, n * a->topk);
    assert_int_equal(!a->widths, !b->widths);
    if (a->widths) {
        assert_same_array(a->widths, b->widths, n);
    }
    assert_int_equal(a->mode, b->mode);
    assert_int_equal(a->finish, b->finish);
    assert_int_equal(a->temperature_scaled, b->temperature_scaled);
    assert_int_equal(a->weight_version_number, b->weight_version_number);
    assert_int_equal(a->weight_version_size, b->weight_version_size);
    assert_int_equal(a->finish_reason_size, b->finish_reason_size);
    if (a->weight_version_size) {
        assert_memory_equal(a->weight_version, b->weight_version, a->weight_version_size);
    }
    if (a->finish_reason_size) {
        assert_memory_equal(a->finish_reason, b->finish_reason, a->finish_reason_size);
    }
}

void assert_sound_record(rst_record *record)
{
    uint8_t key[RST_KEY_SIZE] = {1, 2, 3};
    rst_place place = {.session_key = key, .turn = 5};
    const void *bytes;
    size_t size;
    rst_error error;
    assert_ok(rst_record_complete(record, &place, &bytes, &size, &error), error);
    assert_ok(rst_record_check(bytes, size, key, 5, &error), error);
}

rst_turn made_turn(uint32_t n, uint32_t k, uint64_t seed)
{
    static int32_t *integers;
    static float *floats;
    size_t slots = (size_t)n * k;
    free(integers);
    free(floats);
    integers = malloc(4 * (n + slots + 1));
    floats = malloc(4 * (n + slots + 1));
    assert_non_null(integers);
    assert_non_null(floats);
    for (size_t i = 0; i < n + slots; i++) {
        integers[i] = (int32_t)(support_random(&seed) % 1000000 * 2048 + i % 2048);
        /* From tiny to large, as logprobs are. */
        floats[i] = -(float)exp2((double)(support_random(&seed) % 40000) / 1000.0 - 33.0);
    }
    return (rst_turn){.token_count = n,
                      .topk = k,
                      .token_ids = integers + slots,
                      .token_logprobs = floats + slots,
                      .topk_ids = integers,
                      .topk_logprobs = floats,
                      .temperature = NAN,
                      .finish = RST_FINISH_STOP,
                      .weight_version_number = 17,
                      .weight_version = "17",
                      .weight_version_size = 2};
}

/* ---------------------------------------------------------------- writing texts */

char *written_reply(const rst_turn *turn)
{
    char *reply;
    size_t size;
    rst_error error;
    assert_ok(rst_turn_to_reply(turn, &reply, &size, &error), error);
    assert_int_equal(strlen(reply), size);
    return reply;
}

char *text_of(const char *format, ...)
{
    char *text = NULL;
    va_list arguments;
    va_start(arguments, format);
    assert_true(vasprintf(&text, format, arguments) >= 0);
    va_end(arguments);
    return text;
}

char *replaced(const char *text, const char *from, const char *to)
{
    const char *found = strstr(text, from);
    assert_non_null(found);
    return text_of("%.*s%s%s", (int)(found - text), text, to, found + strlen(from));
}
