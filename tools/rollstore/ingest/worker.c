#include "worker.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../base/fail.h"
#include "batch.h"

#define INBOX_SIZE 65536

/* What came from the parent and is not yet looked at. */
typedef struct inbox {
    int fd;
    char bytes[INBOX_SIZE];
    size_t begin;
    size_t end;
} inbox;

/* A line's bytes, in memory that is kept. */
typedef struct line_buffer {
    char *bytes;
    size_t capacity;
} line_buffer;

static ssize_t receive(int fd, void *bytes, size_t size)
{
    ssize_t got;
    do {
        got = recv(fd, bytes, size, 0);
    } while (got < 0 && errno == EINTR);
    return got;
}

static bool take_bytes(inbox *in, char *bytes, size_t size)
{
    size_t ready = in->end - in->begin;
    size_t taken = ready < size ? ready : size;
    memcpy(bytes, in->bytes + in->begin, taken);
    in->begin += taken;
    while (taken < size) {
        ssize_t got = receive(in->fd, bytes + taken, size - taken);
        if (got <= 0) {
            return false;
        }
        taken += (size_t)got;
    }
    return true;
}

/* Many small tasks come with one system call. */
static bool take_task(inbox *in, task *next)
{
    while (in->end - in->begin < sizeof *next) {
        if (in->begin) {
            memmove(in->bytes, in->bytes + in->begin, in->end - in->begin);
            in->end -= in->begin;
            in->begin = 0;
        }
        ssize_t got = receive(in->fd, in->bytes + in->end, sizeof in->bytes - in->end);
        if (got <= 0) {
            return false;
        }
        in->end += (size_t)got;
    }
    memcpy(next, in->bytes + in->begin, sizeof *next);
    in->begin += sizeof *next;
    return true;
}

/* Nothing more to do at once: what is decoded should not wait for the next line. */
static bool is_idle(const inbox *in)
{
    struct pollfd poller = {.fd = in->fd, .events = POLLIN};
    return in->end - in->begin < sizeof(task) && poll(&poller, 1, 0) == 0;
}

static bool make_room(line_buffer *line, uint64_t size)
{
    if (size <= line->capacity) {
        return true;
    }
    char *grown = realloc(line->bytes, (size_t)size);
    if (grown) {
        line->bytes = grown;
        line->capacity = (size_t)size;
    }
    return grown != NULL;
}

/* An rst_code with its error. */
static int read_line(const ingest_settings *settings, const task *next, char *bytes,
                     rst_error *error)
{
    memset(error, 0, sizeof *error);
    error->offset = -1;
    uint64_t done = 0;
    while (done < next->size) {
        ssize_t got = pread(settings->sources[next->source].fd, bytes + done,
                            (size_t)(next->size - done), (off_t)(next->offset + done));
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got <= 0) {
            error->code = RST_ERR_IO;
            error->system = got < 0 ? errno : 0;
            snprintf(error->message, sizeof error->message, "reading the line: %s",
                     got < 0 ? strerror(errno) : "the file has become shorter");
            return error->code;
        }
        done += (uint64_t)got;
    }
    return RST_OK;
}

static bool refuse_large(batch *b, const task *next)
{
    rst_error error = {.code = RST_ERR_MEMORY, .offset = -1, .index = -1};
    snprintf(error.message, sizeof error.message, "no memory for a line of %llu bytes",
             (unsigned long long)next->size);
    return batch_refuse(b, next, &error);
}

/* False when the worker has to end. */
static bool take_line(batch *b, inbox *in, const task *next, line_buffer *line)
{
    if (!make_room(line, next->size)) {
        /* Of a stream the bytes are on their way and cannot be passed over without memory. */
        return next->kind == TASK_LINE_OF_FILE && refuse_large(b, next);
    }
    if (next->kind == TASK_LINE) {
        if (take_bytes(in, line->bytes, (size_t)next->size)) {
            return batch_add(b, next, line->bytes);
        }
        batch_flush(b); /* cut off: the parent has stopped, or is dead */
        return false;
    }
    rst_error error;
    if (read_line(b->settings, next, line->bytes, &error)) {
        return batch_refuse(b, next, &error);
    }
    return batch_add(b, next, line->bytes);
}

static bool work(batch *b, inbox *in, line_buffer *line, const atomic_int *stop)
{
    for (;;) {
        task next;
        if (b->count && is_idle(in) && !batch_flush(b)) {
            return false;
        }
        if (!take_task(in, &next) || next.kind == TASK_FINISH || atomic_load(stop)) {
            return batch_flush(b);
        }
        if (!take_line(b, in, &next, line)) {
            return false;
        }
    }
}

int worker_main(const ingest_settings *settings, int socket, const atomic_int *stop)
{
    static batch lines; /* large, and one to a process */
    static inbox in;
    line_buffer line = {0};
    in.fd = socket;
    bool good = batch_begin(&lines, settings, socket) && work(&lines, &in, &line, stop);
    if (good) {
        report finished = {.kind = REPORT_FINISHED};
        good = send(socket, &finished, sizeof finished, MSG_NOSIGNAL) == (ssize_t)sizeof finished;
    }
    batch_end(&lines);
    free(line.bytes);
    return good ? STATUS_OK : STATUS_FAILED;
}
