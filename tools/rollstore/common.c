#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "command.h"

/* ---------------------------------------------------------------- the store */

rst_store *open_store(const char *path, unsigned flags, const rst_create_options *create)
{
    rst_store *store;
    rst_error error;
    if (rst_store_open(path, flags, create, &store, &error)) {
        fail_error(&error);
        return NULL;
    }
    return store;
}

bool reading_begin(store_reading *reading, const char *path)
{
    rst_error error;
    reading->snapshot = NULL;
    reading->store = open_store(path, RST_OPEN_READ_ONLY, NULL);
    if (!reading->store) {
        return false;
    }
    if (rst_snapshot_open(reading->store, &reading->snapshot, &error)) {
        fail_error(&error);
        reading_end(reading);
        return false;
    }
    return true;
}

void reading_end(store_reading *reading)
{
    rst_snapshot_close(reading->snapshot);
    rst_store_close(reading->store, NULL);
}

/* ---------------------------------------------------------------- SESSION[:TURN] */

static int hex_value(char digit)
{
    if (digit >= '0' && digit <= '9') {
        return digit - '0';
    }
    if (digit >= 'a' && digit <= 'f') {
        return digit - 'a' + 10;
    }
    return -1;
}

static bool parse_key(const char *text, uint8_t key[RST_KEY_SIZE])
{
    if (strlen(text) != 2 * RST_KEY_SIZE) {
        return false;
    }
    for (size_t i = 0; i < RST_KEY_SIZE; i++) {
        int high = hex_value(text[2 * i]);
        int low = hex_value(text[2 * i + 1]);
        if (high < 0 || low < 0) {
            return false;
        }
        key[i] = (uint8_t)(high * 16 + low);
    }
    return true;
}

/* The session of exactly that key: the first one after the key before it. */
static int session_by_key(rst_snapshot *snapshot, const uint8_t key[RST_KEY_SIZE],
                          rst_session *session, rst_error *error)
{
    uint8_t before[RST_KEY_SIZE];
    memcpy(before, key, RST_KEY_SIZE);
    size_t at = RST_KEY_SIZE;
    while (at && before[--at]-- == 0) {
    }
    bool is_first = at == 0 && before[0] == 0xFF && key[0] == 0;
    int code = rst_session_next(snapshot, is_first ? NULL : before, session, error);
    if (code == RST_OK && memcmp(session->key, key, RST_KEY_SIZE) != 0) {
        snprintf(error->message, sizeof error->message, "no session has that key");
        error->code = RST_ERR_NOT_FOUND;
        return RST_ERR_NOT_FOUND;
    }
    return code;
}

/* Where ":TURN" begins at the end of the text, NULL when there is none. */
static const char *turn_suffix(const char *text, uint64_t *turn)
{
    const char *colon = strrchr(text, ':');
    return colon && colon != text && parse_count(colon + 1, turn) && *turn <= UINT32_MAX ? colon
                                                                                         : NULL;
}

/* A session of the whole name comes first: a name may end in ":7" itself. */
static int find_by_name(rst_snapshot *snapshot, const char *text, uint64_t turn,
                        session_target *found, rst_error *error)
{
    int code = rst_session_get(snapshot, text, strlen(text), &found->session, error);
    uint64_t suffix = NO_TURN;
    const char *colon = turn == NO_TURN ? turn_suffix(text, &suffix) : NULL;
    bool none = code == RST_ERR_NOT_FOUND || strlen(text) > RST_SESSION_ID_SIZE_MAX;
    if (!none || !colon) {
        return code;
    }
    code = rst_session_get(snapshot, text, (size_t)(colon - text), &found->session, error);
    found->has_turn = code == RST_OK;
    found->turn = (uint32_t)suffix;
    return code;
}

bool find_target(rst_snapshot *snapshot, const char *text, uint64_t turn, bool by_key,
                 session_target *found)
{
    rst_error error;
    int code;
    memset(found, 0, sizeof *found);
    uint8_t key[RST_KEY_SIZE];
    if (by_key && !parse_key(text, key)) {
        fail("argument", "--key: \"%s\" is not 32 hexadecimal digits", text);
        return false;
    }
    code = by_key ? session_by_key(snapshot, key, &found->session, &error)
                  : find_by_name(snapshot, text, turn, found, &error);
    if (code) {
        fail_error(&error);
        return false;
    }
    if (turn != NO_TURN) {
        found->has_turn = true;
        found->turn = (uint32_t)turn;
    }
    return true;
}

/* ---------------------------------------------------------------- every session */

/* *more: false when `each` wanted no more. */
static int each_sealed(rst_snapshot *snapshot, uint64_t after, session_function *each,
                       void *context, bool *more, rst_error *error)
{
    rst_session session;
    int code = RST_OK;
    while (*more && (code = rst_ready_next(snapshot, after, &session, error)) == RST_OK) {
        *more = each(context, &session);
        after = session.sequence;
    }
    return code == RST_ERR_NOT_FOUND ? RST_OK : code;
}

static int each_open(rst_snapshot *snapshot, session_function *each, void *context, bool *more,
                     rst_error *error)
{
    rst_session session;
    uint8_t key[RST_KEY_SIZE];
    const uint8_t *after = NULL;
    int code = RST_OK;
    while (*more && (code = rst_session_next(snapshot, after, &session, error)) == RST_OK) {
        if (session.state == RST_STATE_OPEN) {
            *more = each(context, &session);
        }
        memcpy(key, session.key, sizeof key);
        after = key;
    }
    return code == RST_ERR_NOT_FOUND ? RST_OK : code;
}

int each_session(rst_snapshot *snapshot, bool sealed, bool open, uint64_t after,
                 session_function *each, void *context, rst_error *error)
{
    bool more = true;
    int code = sealed ? each_sealed(snapshot, after, each, context, &more, error) : RST_OK;
    if (code == RST_OK && open) {
        code = each_open(snapshot, each, context, &more, error);
    }
    return code;
}

/* ---------------------------------------------------------------- shared options */

const arg_choice durability_choices[] = {{"memory", RST_DURABILITY_MEMORY},
                                         {"interval", RST_DURABILITY_INTERVAL},
                                         {"full", RST_DURABILITY_FULL},
                                         {NULL, 0}};
const arg_choice mode_choices[] = {
    {"selected", RST_MODE_SELECTED}, {"support", RST_MODE_SUPPORT}, {NULL, 0}};
const arg_choice request_choices[] = {
    {"flat", RST_REQUEST_FLAT}, {"nested", RST_REQUEST_NESTED}, {NULL, 0}};
const arg_choice status_choices[] = {{"completed", RST_STATUS_COMPLETED},
                                     {"truncated", RST_STATUS_TRUNCATED},
                                     {"aborted", RST_STATUS_ABORTED},
                                     {"failed", RST_STATUS_FAILED},
                                     {NULL, 0}};

rst_create_options create_options_of(const create_arguments *arguments)
{
    rst_create_options options = {.capacity_size = arguments->capacity_size,
                                  .durability = (rst_durability)arguments->durability,
                                  .interval_ms = (uint32_t)arguments->interval_ms,
                                  .reader_count = (uint32_t)arguments->reader_count};
    return options;
}

rst_decode_options decode_options_of(const decode_arguments *arguments)
{
    rst_decode_options options = {.mode = (rst_mode)arguments->mode,
                                  .request = (rst_request)arguments->request,
                                  .topk = (uint32_t)arguments->topk,
                                  .choice = (uint32_t)arguments->choice};
    return options;
}
