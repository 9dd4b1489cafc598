/* What the tests of replies share: the fixtures' lines, decoding at the edge of readable memory,
 * and comparing turns. */
#ifndef RST_TESTS_REPLY_SUPPORT_H
#define RST_TESTS_REPLY_SUPPORT_H

#include "support.h"

#include "reply/value.h"

/* ---------------------------------------------------------------- fixtures */

/* A line of a fixture as a document.  Lives until the next line is read. */
typedef struct fixture_line {
    const char *text;
    size_t size;
    rst_json json;
} fixture_line;

/* Call `check` with each line of tests/data/NAME.  Returns their number. */
size_t fixture_each(const char *name, void (*check)(const fixture_line *line));

/* A member of the line's object; RST_JSON_NONE when it is absent or null. */
rst_json_node fixture_member(const fixture_line *line, rst_json_node object, const char *name);

/* The member's text, malloc'd, with a NUL; *size may be NULL.  NULL when there is none. */
char *fixture_text(const fixture_line *line, rst_json_node object, const char *name, size_t *size);

int64_t fixture_integer(const fixture_line *line, rst_json_node object, const char *name,
                        int64_t otherwise);

/* The bytes that a value is spelled with. */
const char *fixture_bytes(const fixture_line *line, rst_json_node value, size_t *size);

/* ---------------------------------------------------------------- decoding */

/* A copy of the text whose end is the end of readable memory: reading one byte more kills the test.
 * Lives until the next call. */
const char *at_the_edge(const void *text, size_t size);

/* rst_record_decode from at_the_edge. */
int decode_at_the_edge(rst_record *record, const void *text, size_t size,
                       const rst_decode_options *options, rst_error *error);

/* Decode this text, which must succeed, and look at the turn. */
rst_turn decode_text(rst_record *record, const char *text, const rst_decode_options *options);

/* Decode this text, which must be refused with this code and field; *error has the rest.  The
 * record must be empty then. */
void refuse_text(const char *text, const rst_decode_options *options, int code, const char *field,
                 rst_error *error);

/* The record holds nothing. */
void assert_empty(const rst_record *record);

/* Everything but the prompt is the same, bit by bit. */
void assert_same_turn(const rst_turn *a, const rst_turn *b);

/* The record passes the check of a stored value. */
void assert_sound_record(rst_record *record);

/* A turn with `n` tokens of `k` candidates from `seed`, in memory that lives until the next call.
 */
rst_turn made_turn(uint32_t n, uint32_t k, uint64_t seed);

/* ---------------------------------------------------------------- writing texts */

/* The turn as a reply; free() it. */
char *written_reply(const rst_turn *turn);

/* printf into memory that the caller frees. */
char *text_of(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* `text` with the first `from` in it, which must be there, replaced.  malloc'd. */
char *replaced(const char *text, const char *from, const char *to);

#endif
