#include "batch.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "../base/fail.h"

/* Above it a record's memory is given back after its batch: else each of the batch's records would
 * in time hold one of the largest turns. */
#define KEPT_BYTES_MAX ((uint64_t)4 << 20)

#define SHOWN_ID_SIZE 200 /* bytes of a session id in a message */

/* ---------------------------------------------------------------- reports */

static bool send_fully(int fd, const void *bytes, size_t size)
{
    const char *at = bytes;
    while (size) {
        ssize_t sent = send(fd, at, size, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR) {
            continue;
        }
        if (sent <= 0) {
            return false; /* the parent is gone: there is nobody to tell */
        }
        at += sent;
        size -= (size_t)sent;
    }
    return true;
}

static bool send_report(batch *b, report *sent, const char *text)
{
    char message[sizeof *sent + ERROR_TEXT_SIZE];
    size_t size = text ? strnlen(text, ERROR_TEXT_SIZE) : 0;
    sent->text_size = (uint32_t)size;
    memcpy(message, sent, sizeof *sent);
    if (size) {
        memcpy(message + sizeof *sent, text, size);
    }
    return send_fully(b->reports, message, sizeof *sent + size);
}

static bool report_fatal(batch *b, const rst_error *error)
{
    char text[ERROR_TEXT_SIZE];
    report fatal = {.kind = REPORT_FATAL, .code = error->code};
    send_report(b, &fatal, error_text(error, text));
    return false;
}

static bool refuse(batch *b, const task *refused, const rst_error *error)
{
    char text[ERROR_TEXT_SIZE];
    if (!damaged_add(&b->damaged, refused->key)) {
        rst_error memory = {.code = RST_ERR_MEMORY, .offset = -1, .index = -1};
        snprintf(memory.message, sizeof memory.message,
                 "no memory to keep in mind which sessions have refused lines");
        return report_fatal(b, &memory);
    }
    report refusal = {.kind = REPORT_REFUSED,
                      .code = error->code,
                      .source = refused->source,
                      .line = refused->line,
                      .counts = {.refused = 1, .bytes = refused->size},
                      .line_count = 1};
    return send_report(b, &refusal, error_text(error, text));
}

/* At most `size` bytes of the id, and no half character. */
static int shown_size(const char *id, size_t size)
{
    size_t shown = size < SHOWN_ID_SIZE ? size : SHOWN_ID_SIZE;
    while (shown < size && shown > 0 && ((unsigned char)id[shown] & 0xC0) == 0x80) {
        shown--;
    }
    return (int)shown;
}

/* A line that is whole, of a session that is not. */
static bool refuse_damaged(batch *b, const batch_line *entry)
{
    const rst_line *line = &entry->line;
    rst_error error = {.code = RST_ERR_ORDER, .offset = -1, .index = -1};
    snprintf(error.message, sizeof error.message,
             line->kind == RST_LINE_END ? "session %.*s has refused lines, left open"
                                        : "session %.*s has a refused line before this turn",
             shown_size(line->session, line->session_size), line->session);
    return refuse(b, &entry->task, &error);
}

/* ---------------------------------------------------------------- applying */

/* The store itself is unusable: every other line would fail the same way. */
static bool is_fatal(int code)
{
    return code == RST_ERR_FORKED || code == RST_ERR_READ_ONLY ||
           (code >= RST_ERR_EXISTS && code != RST_ERR_CORRUPT);
}

static bool report_applied(batch *b, batch_line *const *lines, const rst_change *changes,
                           size_t count)
{
    report done = {.kind = REPORT_DONE, .line_count = count};
    for (size_t i = 0; i < count; i++) {
        done.counts.bytes += lines[i]->task.size;
        if (changes[i].unchanged) {
            done.counts.unchanged++;
        } else if (changes[i].kind == RST_CHANGE_SEAL) {
            done.counts.sessions_sealed++;
        } else {
            done.counts.turns_stored++;
        }
    }
    return send_report(b, &done, NULL);
}

/* Apply them in one transaction; when it is refused, each half by itself, so that in the end only
 * the line at fault is refused.  A session that a line of the first half damages is known before
 * the second half is looked at. */
static bool apply_lines(batch *b, batch_line **lines, size_t count)
{
    rst_change changes[BATCH_LINES];
    size_t kept = 0;
    for (size_t i = 0; i < count; i++) {
        if (!damaged_has(&b->damaged, lines[i]->task.key)) {
            lines[kept] = lines[i];
            rst_line_change(&lines[kept]->line, lines[kept]->record, b->settings->change_flags,
                            &changes[kept]);
            kept++;
        } else if (!refuse_damaged(b, lines[i])) {
            return false;
        }
    }
    if (kept == 0) {
        return true;
    }
    rst_error error;
    int code = rst_apply(b->store, changes, kept, b->stalled ? 0 : b->settings->timeout_ms, &error);
    if (code == RST_OK) {
        b->stalled = false;
        return report_applied(b, lines, changes, kept);
    }
    b->stalled |= code == RST_ERR_FULL;
    if (is_fatal(code)) {
        return report_fatal(b, &error);
    }
    if (kept == 1) {
        return refuse(b, &lines[0]->task, &error);
    }
    return apply_lines(b, lines, kept / 2) && apply_lines(b, lines + kept / 2, kept - kept / 2);
}

bool batch_flush(batch *b)
{
    batch_line *lines[BATCH_LINES];
    for (size_t i = 0; i < b->count; i++) {
        lines[i] = &b->lines[i];
    }
    bool good = apply_lines(b, lines, b->count);
    for (size_t i = 0; i < b->count; i++) {
        if (b->lines[i].task.size > KEPT_BYTES_MAX) {
            rst_record_free(b->lines[i].record);
            b->lines[i].record = NULL;
        }
    }
    b->count = 0;
    b->bytes = 0;
    return good;
}

/* The lines before it come first: it is only what follows that it makes unusable. */
bool batch_refuse(batch *b, const task *refused, const rst_error *error)
{
    return batch_flush(b) && refuse(b, refused, error);
}

/* ---------------------------------------------------------------- decoding */

bool batch_add(batch *b, const task *added, const char *bytes)
{
    batch_line *entry = &b->lines[b->count];
    if (!entry->record && !(entry->record = rst_record_new())) {
        rst_error memory = {.code = RST_ERR_MEMORY, .offset = -1, .index = -1};
        snprintf(memory.message, sizeof memory.message, "no memory for a record");
        return report_fatal(b, &memory);
    }
    rst_error error;
    entry->task = *added;
    if (rst_line_decode(entry->record, bytes, (size_t)added->size, b->settings->topk, &entry->line,
                        &error)) {
        return batch_refuse(b, added, &error);
    }
    b->count++;
    b->bytes += added->size;
    bool full = b->count == BATCH_LINES || b->bytes >= b->bytes_max;
    return full ? batch_flush(b) : true;
}

/* ---------------------------------------------------------------- begin and end */

bool batch_begin(batch *b, const ingest_settings *settings, int reports)
{
    memset(b, 0, sizeof *b);
    b->settings = settings;
    b->reports = reports;
    rst_error error;
    rst_stat stat;
    if (rst_store_open(settings->store_path, 0, NULL, &b->store, &error) ||
        rst_store_stat(b->store, &stat, &error)) {
        return report_fatal(b, &error);
    }
    /* A transaction needs room for all of its turns at once. */
    uint64_t share = stat.format.capacity_size / 8 / settings->jobs;
    b->bytes_max = share < BATCH_BYTES ? share : BATCH_BYTES;
    return true;
}

void batch_end(batch *b)
{
    for (size_t i = 0; i < BATCH_LINES; i++) {
        rst_record_free(b->lines[i].record);
    }
    damaged_free(&b->damaged);
    rst_store_close(b->store, NULL);
}
