#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "../base/fail.h"
#include "../base/terminal.h"
#include "lines.h"
#include "pool.h"

/* Lines that workers have and are not done with: enough that none waits for the next read, little
 * enough that a file's pages are still in memory when its worker reads them. */
#define PENDING_BYTES_A_JOB ((uint64_t)16 << 20)

#define TICK_MS 100

/* After a stop, workers have so long before they are told less kindly: one may wait for space. */
#define GRACE_NS INT64_C(1000000000)

static volatile sig_atomic_t signal_seen;

static void note_signal(int number)
{
    signal_seen = number;
}

typedef struct feed {
    pool pool;
    line_reader reader;
    size_t source; /* which is being read */
    bool at_end;   /* every source is read */
    bool stopped;
    int64_t stopped_ns;
} feed;

/* ---------------------------------------------------------------- lines */

static bool is_blank(const text_line *line)
{
    size_t at = 0;
    while (at < line->size && memchr(" \t\r", line->bytes[at], 3)) {
        at++;
    }
    return at == line->size;
}

static void refuse_here(feed *f, const text_line *line, int code, const char *message)
{
    ingest_result *result = f->pool.result;
    result->counts.refused++;
    result->counts.bytes += line->size;
    result->refused_by_code[code]++;
    f->pool.events->refused(f->pool.events->context, f->pool.settings->sources[f->source].name,
                            line->number, code, message);
}

static void give_line(feed *f, const text_line *line)
{
    char id[RST_SESSION_ID_SIZE_MAX];
    size_t id_size;
    rst_error error;
    if (line->too_long) {
        char message[80];
        snprintf(message, sizeof message, "the line is longer than %lu bytes",
                 (unsigned long)RST_REPLY_SIZE_MAX);
        refuse_here(f, line, RST_ERR_LIMIT, message);
        return;
    }
    if (!ingest_line_session(line->bytes, line->size, id, &id_size, &error)) {
        char text[ERROR_TEXT_SIZE];
        refuse_here(f, line, error.code, error_text(&error, text));
        return;
    }
    task given = {.kind =
                      f->pool.settings->sources[f->source].regular ? TASK_LINE_OF_FILE : TASK_LINE,
                  .source = (uint32_t)f->source,
                  .line = line->number,
                  .offset = line->offset,
                  .size = line->size};
    rst_session_key(id, id_size, given.key);
    pool_give(&f->pool, &given, line->bytes);
}

/* ---------------------------------------------------------------- sources */

static void next_source(feed *f)
{
    if (++f->source < f->pool.settings->source_count) {
        line_reader_begin(&f->reader, f->pool.settings->sources[f->source].fd);
    } else {
        f->at_end = true;
        pool_finish(&f->pool);
    }
}

static void read_source(feed *f)
{
    const char *name = f->pool.settings->sources[f->source].name;
    if (!line_reader_fill(&f->reader)) {
        char message[320];
        snprintf(message, sizeof message, "%.200s: %s", name, strerror(errno));
        f->pool.result->failed = true;
        f->pool.events->failed(f->pool.events->context, "io", message);
        f->reader.ended = true; /* what is there of it is still handed out */
    }
    text_line line;
    while (!f->stopped && line_reader_next(&f->reader, &line)) {
        if (line.too_long || !is_blank(&line)) {
            give_line(f, &line);
        }
    }
    if (f->reader.ended) {
        next_source(f);
    }
}

/* ---------------------------------------------------------------- the loop */

static void stop(feed *f)
{
    f->stopped = true;
    f->at_end = true;
    f->stopped_ns = clock_ns(CLOCK_MONOTONIC);
    pool_stop(&f->pool);
}

static void look_at_stop(feed *f)
{
    if (!f->stopped && (signal_seen || atomic_load(f->pool.stop))) {
        stop(f);
    }
    if (!f->stopped) {
        return;
    }
    int64_t waited = clock_ns(CLOCK_MONOTONIC) - f->stopped_ns;
    if (waited > 2 * GRACE_NS) {
        pool_kill(&f->pool, SIGKILL);
    } else if (waited > GRACE_NS) {
        pool_kill(&f->pool, SIGTERM);
    }
}

static void feed_all(feed *f)
{
    const ingest_settings *settings = f->pool.settings;
    uint64_t pending_max = PENDING_BYTES_A_JOB * settings->jobs;
    while (f->pool.alive) {
        look_at_stop(f);
        bool wants = !f->at_end && pool_pending(&f->pool) < pending_max;
        bool regular = wants && settings->sources[f->source].regular;
        int input = wants && !regular ? settings->sources[f->source].fd : -1;
        bool readable = pool_poll(&f->pool, input, regular ? 0 : TICK_MS);
        if (wants && (regular || readable)) {
            read_source(f);
        }
        f->pool.events->progress(f->pool.events->context, f->pool.result->counts.bytes);
    }
}

static const int stop_signals[] = {SIGINT, SIGTERM, SIGHUP};
#define STOP_SIGNAL_COUNT (sizeof stop_signals / sizeof *stop_signals)

static void catch_signals(struct sigaction before[STOP_SIGNAL_COUNT])
{
    struct sigaction action = {.sa_handler = note_signal};
    for (size_t i = 0; i < STOP_SIGNAL_COUNT; i++) {
        sigaction(stop_signals[i], &action, &before[i]);
        if (before[i].sa_handler == SIG_IGN) { /* nohup, a script's background job */
            sigaction(stop_signals[i], &before[i], NULL);
        }
    }
}

static void restore_signals(const struct sigaction before[STOP_SIGNAL_COUNT])
{
    for (size_t i = 0; i < STOP_SIGNAL_COUNT; i++) {
        sigaction(stop_signals[i], &before[i], NULL);
    }
}

void ingest_run(const ingest_settings *settings, const ingest_events *events, ingest_result *result)
{
    feed f = {.source = 0};
    struct sigaction before[STOP_SIGNAL_COUNT];
    memset(result, 0, sizeof *result);
    catch_signals(before);
    line_reader_begin(&f.reader, settings->sources[0].fd);
    if (!pool_begin(&f.pool, settings, events, result)) {
        stop(&f);
    }
    feed_all(&f);
    result->interrupted = signal_seen;
    pool_end(&f.pool);
    line_reader_free(&f.reader);
    restore_signals(before);
}
