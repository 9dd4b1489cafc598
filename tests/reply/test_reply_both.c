/* A reply decoded and stripped in one reading: as by the two apart, whatever it holds. */
#include <stdlib.h>
#include <string.h>

#include <rollstore/proxy.h>

#include "layout/record.h"
#include "reply_support.h"

enum { KEEP_ALL = 16 }; /* every combination of RST_KEEP_* and RST_SPLIT_LOGPROBS is below it */

static bool same_bytes(const void *a, size_t a_size, const void *b, size_t b_size)
{
    return a_size == b_size && (a_size == 0 || memcmp(a, b, a_size) == 0);
}

static void assert_same_answer(const rst_answer *a, const rst_answer *b)
{
    assert_true(same_bytes(a->text, a->text_size, b->text, b->text_size));
    assert_true(!a->logprobs == !b->logprobs);
    assert_true(same_bytes(a->logprobs, a->logprobs_size, b->logprobs, b->logprobs_size));
    assert_true(!a->prompt_ids == !b->prompt_ids);
    assert_true(same_bytes(a->prompt_ids, 4 * a->prompt_count, b->prompt_ids, 4 * b->prompt_count));
}

static void assert_same_error(const rst_error *a, const rst_error *b)
{
    assert_int_equal(a->code, b->code);
    assert_string_equal(a->message, b->message);
    assert_string_equal(a->field, b->field);
    assert_int_equal(a->offset, b->offset);
}

/* Returns the code of both. */
static int check(const char *text, size_t size, const rst_decode_options *options, unsigned keep)
{
    rst_record *apart = rst_record_new();
    rst_record *together = rst_record_new();
    rst_answer answer;
    rst_answer both;
    rst_error error;
    rst_error other;
    rst_turn turn;
    rst_turn got;
    const char *reply = at_the_edge(text, size);
    int code = rst_record_decode(apart, reply, size, options, &error);
    int stripped = rst_reply_strip(reply, size, keep, &answer, code ? NULL : &error);
    code = code ? code : stripped;
    assert_int_equal(
        rst_reply_decode_and_strip(together, reply, size, options, keep, &both, &other), code);
    if (code) {
        assert_same_error(&error, &other);
        assert_empty(together);
        assert_null(both.text);
        assert_null(both.logprobs);
        assert_null(both.prompt_ids);
    } else {
        rst_record_view(apart, &turn);
        rst_record_view(together, &got);
        assert_same_turn(&turn, &got);
        assert_same_answer(&answer, &both);
        assert_sound_record(together);
    }
    rst_answer_clear(&answer);
    rst_answer_clear(&both);
    rst_record_free(apart);
    rst_record_free(together);
    return code;
}

static void good(const char *text, const rst_decode_options *options)
{
    for (unsigned keep = 0; keep < KEEP_ALL; keep++) {
        assert_int_equal(check(text, strlen(text), options, keep), RST_OK);
    }
}

/* ---------------------------------------------------------------- the fixtures */

static rst_decode_options options_of(const fixture_line *line)
{
    char *name = fixture_text(line, 0, "name", NULL);
    char *mode = fixture_text(line, 0, "mode", NULL);
    char *request = fixture_text(line, 0, "request", NULL);
    bool nested = request ? !strcmp(request, "nested") : strstr(name, "nested") != NULL;
    const rst_decode_options options = {
        .mode = mode && !strcmp(mode, "support") ? RST_MODE_SUPPORT : RST_MODE_SELECTED,
        .request = nested ? RST_REQUEST_NESTED : RST_REQUEST_FLAT,
        .topk = (uint32_t)fixture_integer(line, 0, "k", 0),
        .choice = (uint32_t)fixture_integer(line, 0, "choice", 0),
    };
    free(name);
    free(mode);
    free(request);
    return options;
}

static unsigned fine;
static unsigned refused;

static void check_fixture(const fixture_line *line)
{
    const rst_decode_options options = options_of(line);
    size_t size;
    char *raw = fixture_text(line, 0, "raw", &size);
    const char *reply = raw ? raw : fixture_bytes(line, fixture_member(line, 0, "reply"), &size);
    for (unsigned keep = 0; keep < KEEP_ALL; keep++) {
        *(check(reply, size, &options, keep) ? &refused : &fine) += 1;
    }
    free(raw);
}

static void every_fixture(void **state)
{
    (void)state;
    assert_int_equal(fixture_each("golden.jsonl", check_fixture), 45);
    assert_int_equal(fine, 45 * KEEP_ALL);
    assert_int_equal(fixture_each("malformed.jsonl", check_fixture), 44);
    assert_true(refused > 40 * KEEP_ALL);
}

/* ---------------------------------------------------------------- long replies */

enum { N = 400, K = 32 };

static const rst_decode_options flat = {.topk = K};

/* A long reply with more members in its choice. */
static char *with(const char *members)
{
    const rst_turn turn = made_turn(N, K, 7);
    char *reply = written_reply(&turn);
    char *more = text_of("%s,\"meta_info\"", members);
    char *text = replaced(reply, "\"meta_info\"", more);
    free(reply);
    free(more);
    return text;
}

static char *repeated(const char *begin, const char *part, size_t count, const char *end)
{
    size_t part_size = strlen(part);
    char *text = malloc(strlen(begin) + count * part_size + strlen(end) + 1);
    assert_non_null(text);
    strcpy(text, begin);
    char *at = text + strlen(begin);
    for (size_t i = 0; i < count; i++, at += part_size) {
        memcpy(at, part, part_size);
    }
    strcpy(at, end);
    return text;
}

#define TOKEN "{\"token\":\"ab\",\"logprob\":-1.5,\"bytes\":[97,98],\"top_logprobs\":[]},"
#define LAST "{\"token\":\"ab\",\"logprob\":-1.5,\"bytes\":[97,98],\"top_logprobs\":[]}]"
#define ENTRY "[-0.5,17,null],"

static void assert_kept(const char *text, const char *member, unsigned keep)
{
    rst_answer answer;
    rst_record *record = rst_record_new();
    rst_error error;
    assert_ok(rst_reply_decode_and_strip(record, text, strlen(text), &flat, keep, &answer, &error),
              error);
    assert_non_null(strstr(answer.text, member));
    rst_answer_clear(&answer);
    rst_record_free(record);
}

/* What is left out of the first look is missing from nothing that is kept. */
static void long_parts_that_are_kept_are_whole(void **state)
{
    (void)state;
    static const struct {
        const char *begin;
        const char *part;
        const char *end;
        unsigned asked_for;
    } kept[] = {
        {"\"logprobs\":{\"content\":[", TOKEN, LAST "}", RST_KEEP_LOGPROBS},
        {"\"message\":{\"content\":[", TOKEN, LAST "}", 0},
        {"\"message\":{\"content\":\"", "AbCdEfGh01234567", "\"}", 0},
        {"\"other\":{\"output_token_logprobs\":[", ENTRY, "[-1,2,null]]}", 0},
        {"\"logprobs\":{\"content\":[", TOKEN, LAST ",\"x\":{\"content\":[" TOKEN LAST "}}",
         RST_KEEP_LOGPROBS},
    };
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++) {
        char *member = repeated(kept[i].begin, kept[i].part, 600, kept[i].end);
        char *text = with(member);
        good(text, &flat);
        for (unsigned keep = kept[i].asked_for; keep <= RST_KEEP_LOGPROBS; keep++) {
            assert_kept(text, member, keep);
        }
        free(text);
        free(member);
    }
}

/* Long texts that look like base64, and are none: one fits a record, the other is refused. Shifted,
 * so that some are left out of the first look and some are not. */
static void a_weight_version_is_not_taken_for_base64(void **state)
{
    (void)state;
    char *text = with("\"x\":0");
    for (size_t count = 64; count <= 600; count += 536) {
        char *version = repeated("\"weight_version\":\"", "AbCdEfGh01234567", count, "\"");
        char *more = replaced(text, "\"weight_version\":\"17\"", version);
        for (int shift = 0; shift < 4096; shift += 512) {
            char *shifted = text_of("{%*s%s", shift, "", more + 1);
            int code = check(shifted, strlen(shifted), &flat, 0);
            assert_int_equal(code, count == 64 ? RST_OK : RST_ERR_LIMIT);
            free(shifted);
        }
        free(more);
        free(version);
    }
    free(text);
}

static void a_fault_anywhere_is_found(void **state)
{
    (void)state;
    char *member = repeated("\"logprobs\":{\"content\":[", TOKEN, 600, LAST "}");
    char *text = with(member);
    size_t size = strlen(text);
    good(text, &flat);
    for (size_t at = 3; at < size; at += 997) {
        char was = text[at];
        static const char instead[] = {'"', '\\', 'x', '\x01', ']'};
        for (size_t i = 0; i < sizeof instead; i++) {
            text[at] = instead[i];
            check(text, size, &flat, 0);
            check(text, size, &flat, RST_KEEP_LOGPROBS | RST_KEEP_META_INFO);
        }
        text[at] = was;
        check(text, at, &flat, 0);
    }
    free(text);
    free(member);
}

static void a_record_is_used_again(void **state)
{
    (void)state;
    rst_record *record = rst_record_new();
    rst_error error;
    rst_answer answer;
    char *text = with("\"prompt_token_ids\":[1,2,3]");
    for (int i = 0; i < 3; i++) {
        assert_ok(rst_reply_decode_and_strip(record, text, strlen(text), &flat, 0, &answer, &error),
                  error);
        assert_int_equal(answer.prompt_count, 3);
        rst_answer_clear(&answer);
        assert_code(
            RST_ERR_SYNTAX,
            rst_reply_decode_and_strip(record, text, strlen(text) - 1, &flat, 0, &answer, &error),
            error);
        assert_empty(record);
        rst_answer_clear(&answer);
    }
    free(text);
    rst_record_free(record);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_fixture),
        cmocka_unit_test(long_parts_that_are_kept_are_whole),
        cmocka_unit_test(a_weight_version_is_not_taken_for_base64),
        cmocka_unit_test(a_fault_anywhere_is_found),
        cmocka_unit_test(a_record_is_used_again),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
