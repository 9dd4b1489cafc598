/* A chat reply without its candidates: copied span by span, only changed members written anew. */
#include <stdlib.h>
#include <string.h>

#include <rollstore/proxy.h>

#include "../error.h"
#include "json.h"
#include "reply.h"
#include "span.h"

/* Where a reply may say its prompt's ids; the first of these counts. */
enum { IDS_OF_CHOICE, IDS_OF_META, IDS_OF_REPLY, IDS_COUNT };

/* One reply while it is copied. */
typedef struct stripping {
    const rst_json *json;
    rst_json_buffer *unescaped;
    unsigned keep;
    rst_answer *answer;
    rst_error *error;
    int code; /* of a failure; RST_OK with one that only asks for the attempt on the whole text */

    char *out;
    size_t used;
    rst_json_node first_choice;
    int32_t *ids[IDS_COUNT];
    size_t id_counts[IDS_COUNT];
} stripping;

/* ---------------------------------------------------------------- writing */

static void emit(stripping *s, const char *text, size_t size)
{
    memcpy(s->out + s->used, text, size);
    s->used += size;
}

static void emit_value(stripping *s, rst_json_node node)
{
    rst_json_span span = rst_json_span_of(s->json, node);
    emit(s, s->json->text + span.begin, span.end - span.begin);
}

/* An answer is longer than its document only by "null" in place of "{}", in a member of 13 bytes.
 */
static size_t room_for(size_t document_size)
{
    return document_size + document_size / 4 + 16;
}

/* ---------------------------------------------------------------- what is left out */

/*
 * Nothing in these bytes means anything to JSON inside a string, and all are ASCII.  Blocks without
 * a branch inside are what compilers make vectors of.
 */
static bool is_plain(const char *text, size_t size)
{
    enum { BLOCK = 1024 };
    const signed char *bytes = (const signed char *)text;
    for (size_t from = 0; from < size; from += BLOCK) {
        size_t count = size - from < BLOCK ? size - from : BLOCK;
        unsigned char unusual = 0;
        for (size_t i = 0; i < count; i++) {
            signed char c = bytes[from + i];
            unusual |=
                (unsigned char)((c < ' ') | (c == '\\') | (c == '"')); /* not ASCII: below 0 */
        }
        if (unusual) {
            return false;
        }
    }
    return true;
}

/*
 * Pass over a value.  Strings that were cut out of it (cut.c) and not decoded are looked at here,
 * so that the shortened text may stand for the whole one; false when it may not.
 */
static bool leave_out(stripping *s, rst_json_node value)
{
    rst_json_span span = rst_json_span_of(s->json, value);
    for (uint32_t i = 0; i < s->json->cut_count; i++) {
        rst_json_cut *cut = &s->json->cuts[i];
        if (cut->place >= span.begin && cut->place < span.end) {
            if (!cut->used && !cut->is_list && !is_plain(cut->text, cut->size)) {
                return false;
            }
            cut->used = cut->used || !cut->is_list;
            cut->left_out = true;
        }
    }
    return true;
}

/* Nothing was copied from where something had been cut out. */
static bool copied_whole(const rst_json *json)
{
    for (uint32_t i = 0; i < json->cut_count; i++) {
        if (!json->cuts[i].left_out) {
            return false;
        }
    }
    return true;
}

/* ---------------------------------------------------------------- objects */

/* What becomes of a member's value. */
typedef enum fate { COPIED, WRITTEN, DROPPED, FAILED } fate;
typedef fate write_member(stripping *s, rst_json_node key, rst_json_node value);

static fate written(bool fine)
{
    return fine ? WRITTEN : FAILED;
}

/* Write an object, asking `write` about each member. */
static bool write_object(stripping *s, rst_json_node object, write_member *write)
{
    bool any = false;
    emit(s, "{", 1);
    rst_json_node key = rst_json_begin(s->json, object);
    while (key != RST_JSON_NONE) {
        rst_json_node value = rst_json_value(key);
        size_t before = s->used;
        if (any) {
            emit(s, ",", 1);
        }
        emit_value(s, key);
        emit(s, ":", 1);
        fate found = write(s, key, value);
        if (found == FAILED || (found == DROPPED && !leave_out(s, value))) {
            return false;
        }
        if (found == COPIED) {
            emit_value(s, value);
        }
        if (found == DROPPED) {
            s->used = before;
        } else {
            any = true;
        }
        key = rst_json_next(s->json, value);
    }
    emit(s, "}", 1);
    return true;
}

/* Write an array of objects; an element that is none is copied. */
static bool write_array(stripping *s, rst_json_node array, write_member *write)
{
    emit(s, "[", 1);
    rst_json_node node = rst_json_begin(s->json, array);
    while (node != RST_JSON_NONE) {
        if (rst_json_first(s->json, node) != '{') {
            emit_value(s, node);
        } else if (!write_object(s, node, write)) {
            return false;
        }
        node = rst_json_next(s->json, node);
        if (node != RST_JSON_NONE) {
            emit(s, ",", 1);
        }
    }
    emit(s, "]", 1);
    return true;
}

static bool in_first_choice(const stripping *s, rst_json_node node)
{
    rst_json_node first = s->first_choice;
    return first != RST_JSON_NONE && rst_json_first(s->json, first) == '{' && node > first &&
           node < s->json->ends[first];
}

static bool is_named(const stripping *s, rst_json_node key, const char *name)
{
    return rst_json_string_is(s->json, key, name);
}

/* ---------------------------------------------------------------- logprobs */

static fate write_token(stripping *s, rst_json_node key, rst_json_node value)
{
    if (!is_named(s, key, "top_logprobs") || rst_json_first(s->json, value) != '[') {
        return COPIED;
    }
    emit(s, "[]", 2);
    return written(leave_out(s, value));
}

static fate write_logprobs_member(stripping *s, rst_json_node key, rst_json_node value)
{
    bool tokens = is_named(s, key, "content") || is_named(s, key, "refusal");
    return tokens && rst_json_first(s->json, value) == '['
               ? written(write_array(s, value, write_token))
               : COPIED;
}

/* Move what was written from `from` on out of the answer. */
static bool move_logprobs(stripping *s, size_t from)
{
    size_t size = s->used - from;
    free(s->answer->logprobs);
    s->answer->logprobs = malloc(size + 1);
    if (!s->answer->logprobs) {
        s->code = rst_fail(s->error, RST_ERR_MEMORY, NULL, "no memory for %zu bytes", size);
        return false;
    }
    memcpy(s->answer->logprobs, s->out + from, size);
    s->answer->logprobs[size] = '\0';
    s->answer->logprobs_size = size;
    s->used = from;
    emit(s, "null", 4);
    return true;
}

static fate write_logprobs(stripping *s, rst_json_node value)
{
    if (rst_json_first(s->json, value) != '{') {
        return COPIED;
    }
    if (!(s->keep & RST_KEEP_LOGPROBS)) {
        emit(s, "null", 4);
        return written(leave_out(s, value));
    }
    size_t from = s->used;
    bool apart = in_first_choice(s, value) && (s->keep & RST_SPLIT_LOGPROBS);
    return written(write_object(s, value, write_logprobs_member) &&
                   (!apart || move_logprobs(s, from)));
}

/* ---------------------------------------------------------------- the prompt's ids */

static fate take_ids(stripping *s, int place, rst_json_node value)
{
    bool counts = place == IDS_OF_REPLY || in_first_choice(s, value);
    if (counts && rst_json_first(s->json, value) != 'n') {
        free(s->ids[place]); /* a key that stands twice: the last one counts */
        s->ids[place] = NULL;
        s->code = rst_json_read_ids(s->json, value, "prompt_token_ids", &s->ids[place],
                                    &s->id_counts[place], s->error);
        if (s->code) {
            return FAILED;
        }
    }
    return s->keep & RST_KEEP_TOKEN_IDS ? COPIED : DROPPED;
}

static void give_ids(stripping *s)
{
    for (int i = 0; i < IDS_COUNT && !s->answer->prompt_ids; i++) {
        s->answer->prompt_ids = s->ids[i];
        s->answer->prompt_count = s->id_counts[i];
        s->ids[i] = NULL;
    }
}

/* ---------------------------------------------------------------- the reply */

static fate write_meta_member(stripping *s, rst_json_node key, rst_json_node value)
{
    static const char *const candidates[] = {"output_top_logprobs", "output_token_sampling_mask",
                                             "output_token_sampling_logprobs"};
    static const char sampled[] = "output_token_logprobs";
    if (is_named(s, key, "prompt_token_ids")) {
        return take_ids(s, IDS_OF_META, value);
    }
    const char *name;
    size_t size;
    if (rst_json_string(s->json, key, s->unescaped, &name, &size)) {
        return COPIED; /* half a surrogate pair is in no name of ours */
    }
    for (size_t i = 0; i < sizeof candidates / sizeof *candidates; i++) {
        if (size >= strlen(candidates[i]) && !memcmp(name, candidates[i], strlen(candidates[i]))) {
            return DROPPED;
        }
    }
    bool is_sampled = size >= strlen(sampled) && !memcmp(name, sampled, strlen(sampled));
    return is_sampled && !(s->keep & RST_KEEP_LOGPROBS) ? DROPPED : COPIED;
}

/* meta_info is looked through for the prompt's ids even where it is not kept. */
static fate write_meta_info(stripping *s, rst_json_node value)
{
    if (rst_json_first(s->json, value) != '{') {
        return s->keep & RST_KEEP_META_INFO ? COPIED : DROPPED;
    }
    bool fine = write_object(s, value, write_meta_member);
    return !fine ? FAILED : s->keep & RST_KEEP_META_INFO ? WRITTEN : DROPPED;
}

static fate write_choice_member(stripping *s, rst_json_node key, rst_json_node value)
{
    if (is_named(s, key, "logprobs")) {
        return write_logprobs(s, value);
    }
    if (is_named(s, key, "meta_info")) {
        return write_meta_info(s, value);
    }
    if (is_named(s, key, "prompt_token_ids")) {
        return take_ids(s, IDS_OF_CHOICE, value);
    }
    return is_named(s, key, "token_ids") && !(s->keep & RST_KEEP_TOKEN_IDS) ? DROPPED : COPIED;
}

static fate write_reply_member(stripping *s, rst_json_node key, rst_json_node value)
{
    if (is_named(s, key, "choices") && rst_json_first(s->json, value) == '[') {
        s->first_choice = rst_json_begin(s->json, value);
        return written(write_array(s, value, write_choice_member));
    }
    return is_named(s, key, "prompt_token_ids") ? take_ids(s, IDS_OF_REPLY, value) : COPIED;
}

static int strip_document(void *context, const rst_json *json, rst_json_node root, rst_error *error)
{
    stripping *s = context;
    s->json = json;
    s->error = error;
    s->used = 0;
    s->first_choice = RST_JSON_NONE;
    s->code = RST_OK;
    rst_answer_clear(s->answer);
    free(s->out);
    s->out = malloc(room_for(json->size));
    if (!s->out) {
        return rst_fail(error, RST_ERR_MEMORY, NULL, "no memory for an answer");
    }
    if (rst_json_first(json, root) != '{') {
        return rst_fail_at(error, RST_ERR_TYPE, NULL, (int64_t)rst_json_offset(json, root),
                           "the reply is %s, not an object", rst_json_kind(json, root));
    }
    bool fine = write_object(s, root, write_reply_member) && copied_whole(json);
    if (fine) {
        give_ids(s);
    }
    for (int i = 0; i < IDS_COUNT; i++) {
        free(s->ids[i]);
        s->ids[i] = NULL;
    }
    /* Without a code it was the attempt without long strings, and is made again with them. */
    return fine ? RST_OK : s->code ? s->code : RST_ERR_ARGUMENT;
}

/* Hand the text over, and give back what it does not need. */
static void finish(stripping *s)
{
    s->out[s->used] = '\0';
    s->answer->text = s->out;
    char *fitting = realloc(s->out, s->used + 1);
    if (fitting) {
        s->answer->text = fitting;
    }
    s->answer->text_size = s->used;
    s->out = NULL;
}

static stripping begin(unsigned keep, rst_json_reader *reader, rst_answer *answer)
{
    *answer = (rst_answer){0};
    return (stripping){.keep = keep, .unescaped = &reader->unescaped[0], .answer = answer};
}

static int end(stripping *s, int code)
{
    if (code) {
        rst_answer_clear(s->answer);
    } else {
        finish(s);
    }
    free(s->out);
    return code;
}

/* Lists of tokens are in what nobody asked for, and need not be looked through. */
static bool no_lists_wanted(unsigned keep)
{
    return !(keep & RST_KEEP_LOGPROBS);
}

int rst_reply_strip(const void *reply, size_t size, unsigned keep, rst_answer *answer,
                    rst_error *error)
{
    rst_error_clear(error);
    rst_json_reader reader = {.lists_too = no_lists_wanted(keep)};
    stripping s = begin(keep, &reader, answer);
    int code = size > RST_REPLY_SIZE_MAX
                   ? rst_fail(error, RST_ERR_LIMIT, "reply", "a reply of %zu bytes, at most %u",
                              size, RST_REPLY_SIZE_MAX)
                   : rst_json_with(&reader, reply, size, strip_document, &s, error);
    rst_json_reader_free(&reader);
    return end(&s, code);
}

int rst_reply_decode_and_strip(rst_record *record, const void *reply, size_t size,
                               const rst_decode_options *options, unsigned keep, rst_answer *answer,
                               rst_error *error)
{
    rst_error_clear(error);
    record->filled = false;
    rst_json_reader *reader = rst_reply_reader(record);
    if (!reader) {
        *answer = (rst_answer){0};
        return rst_fail(error, RST_ERR_MEMORY, NULL, "no memory to read a reply");
    }
    stripping s = begin(keep, reader, answer);
    return end(&s, rst_reply_decode_then(record, reply, size, options, no_lists_wanted(keep),
                                         strip_document, &s, error));
}

void rst_answer_clear(rst_answer *answer)
{
    free(answer->text);
    free(answer->logprobs);
    free(answer->prompt_ids);
    *answer = (rst_answer){0};
}
