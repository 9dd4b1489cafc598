#include "pool.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../base/fail.h"
#include "worker.h"

static void say_failed(pool *p, const char *kind, const char *message)
{
    p->result->failed = true;
    p->events->failed(p->events->context, kind, message);
}

/* ---------------------------------------------------------------- starting */

/* The child's side of the fork; never returns. */
static void be_worker(pool *p, size_t index, int fd)
{
    /* A worker that kept another one's socket would keep it from seeing its end. */
    for (size_t i = 0; i < index; i++) {
        close(p->workers[i].fd);
    }
    /* Ctrl-C reaches the whole process group; what is to be done about it the parent says. */
    signal(SIGINT, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    signal(SIGTERM, SIG_DFL);
    _exit(worker_main(p->settings, fd, p->stop));
}

static bool start_worker(pool *p, size_t index)
{
    int fds[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0) {
        return false;
    }
    pid_t pid = fork();
    if (pid == 0) {
        close(fds[0]);
        be_worker(p, index, fds[1]);
    }
    close(fds[1]);
    if (pid < 0 || fcntl(fds[0], F_SETFL, O_NONBLOCK) != 0) {
        int number = errno;
        close(fds[0]);
        errno = number;
        return false;
    }
    p->workers[index].pid = pid;
    p->workers[index].fd = fds[0];
    p->alive++;
    return true;
}

bool pool_begin(pool *p, const ingest_settings *settings, const ingest_events *events,
                ingest_result *result)
{
    memset(p, 0, sizeof *p);
    p->settings = settings;
    p->events = events;
    p->result = result;
    p->workers = calloc(settings->jobs, sizeof *p->workers);
    void *shared =
        mmap(NULL, sizeof *p->stop, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    p->stop = shared == MAP_FAILED ? NULL : shared;
    if (!p->workers || !p->stop) {
        say_failed(p, "memory", "no memory for the workers");
        return false;
    }
    for (size_t i = 0; i < settings->jobs; i++) {
        if (!start_worker(p, i)) {
            char message[160];
            snprintf(message, sizeof message, "starting worker %zu: %s", i, strerror(errno));
            say_failed(p, "io", message);
            return false;
        }
        p->count++;
    }
    return true;
}

void pool_end(pool *p)
{
    for (size_t i = 0; i < p->count; i++) {
        free(p->workers[i].queue);
    }
    free(p->workers);
    if (p->stop) {
        munmap(p->stop, sizeof *p->stop);
    }
}

/* ---------------------------------------------------------------- giving */

static bool queue_room(pool_worker *w, size_t size)
{
    if (w->queue_begin == w->queue_end) {
        w->queue_begin = 0;
        w->queue_end = 0;
    }
    if (w->queue_capacity - w->queue_end >= size) {
        return true;
    }
    if (w->queue_begin) {
        memmove(w->queue, w->queue + w->queue_begin, w->queue_end - w->queue_begin);
        w->queue_end -= w->queue_begin;
        w->queue_begin = 0;
    }
    size_t wanted = w->queue_capacity ? w->queue_capacity : 4096;
    while (wanted - w->queue_end < size) {
        wanted *= 2;
    }
    if (wanted == w->queue_capacity) {
        return true;
    }
    char *grown = realloc(w->queue, wanted);
    if (grown) {
        w->queue = grown;
        w->queue_capacity = wanted;
    }
    return grown != NULL;
}

static void queue_bytes(pool_worker *w, const void *bytes, size_t size)
{
    if (size) {
        memcpy(w->queue + w->queue_end, bytes, size);
        w->queue_end += size;
    }
}

static pool_worker *worker_of(pool *p, const uint8_t key[RST_KEY_SIZE])
{
    uint64_t number;
    memcpy(&number, key, sizeof number);
    return &p->workers[number % p->count];
}

void pool_give(pool *p, const task *given, const char *bytes)
{
    pool_worker *w = worker_of(p, given->key);
    size_t size = given->kind == TASK_LINE ? (size_t)given->size : 0;
    if (w->fd < 0) {
        p->result->lost++; /* its sessions' lines cannot go to another one: they would be short */
        return;
    }
    if (!queue_room(w, sizeof *given + size)) {
        say_failed(p, "memory", "no memory to hand a line to its worker");
        p->result->lost++;
        pool_stop(p);
        return;
    }
    queue_bytes(w, given, sizeof *given);
    queue_bytes(w, bytes, size);
    w->lines++;
    w->bytes += given->size;
}

void pool_finish(pool *p)
{
    task finish = {.kind = TASK_FINISH};
    for (size_t i = 0; i < p->count; i++) {
        pool_worker *w = &p->workers[i];
        if (w->fd < 0) {
            continue;
        }
        if (queue_room(w, sizeof finish)) {
            queue_bytes(w, &finish, sizeof finish);
        } else {
            say_failed(p, "memory", "no memory for the last word to a worker");
            pool_stop(p);
        }
    }
}

void pool_stop(pool *p)
{
    if (p->stop) {
        atomic_store(p->stop, 1);
    }
    for (size_t i = 0; i < p->count; i++) {
        pool_worker *w = &p->workers[i];
        w->queue_begin = w->queue_end;
        if (w->fd >= 0) {
            shutdown(w->fd, SHUT_WR); /* wakes one that waits for a task */
        }
    }
}

void pool_kill(pool *p, int signal_number)
{
    for (size_t i = 0; i < p->count; i++) {
        if (p->workers[i].fd >= 0) {
            kill(p->workers[i].pid, signal_number);
        }
    }
}

uint64_t pool_pending(const pool *p)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < p->count; i++) {
        bytes += p->workers[i].bytes;
    }
    return bytes;
}

/* ---------------------------------------------------------------- reports */

static void add_counts(pool *p, pool_worker *w, const report *r)
{
    ingest_counts *counts = &p->result->counts;
    counts->turns_stored += r->counts.turns_stored;
    counts->sessions_sealed += r->counts.sessions_sealed;
    counts->unchanged += r->counts.unchanged;
    counts->refused += r->counts.refused;
    counts->bytes += r->counts.bytes;
    w->lines -= r->line_count;
    w->bytes -= r->counts.bytes;
}

static void take_report(pool *p, pool_worker *w, const report *r, const char *text)
{
    add_counts(p, w, r);
    switch ((report_kind)r->kind) {
    case REPORT_DONE:
        break;
    case REPORT_REFUSED:
        p->result->refused_by_code[r->code % INGEST_CODE_COUNT]++;
        p->events->refused(p->events->context, p->settings->sources[r->source].name, r->line,
                           r->code, text);
        break;
    case REPORT_FATAL:
        w->finished = true; /* it says itself why it ends */
        if (!atomic_load(p->stop)) {
            say_failed(p, rst_code_name(r->code), text);
            pool_stop(p); /* the others would meet the same */
        }
        break;
    case REPORT_FINISHED:
        w->finished = true;
        break;
    }
}

static void take_reports(pool *p, pool_worker *w)
{
    size_t at = 0;
    report r;
    while (w->inbox_size - at >= sizeof r) {
        memcpy(&r, w->inbox + at, sizeof r);
        if (w->inbox_size - at - sizeof r < r.text_size) {
            break;
        }
        char text[ERROR_TEXT_SIZE + 1];
        memcpy(text, w->inbox + at + sizeof r, r.text_size);
        text[r.text_size] = '\0';
        at += sizeof r + r.text_size;
        take_report(p, w, &r, text);
    }
    memmove(w->inbox, w->inbox + at, w->inbox_size - at);
    w->inbox_size -= at;
}

/* How it ended, and what that means. */
static void end_worker(pool *p, pool_worker *w)
{
    int status = 0;
    close(w->fd);
    w->fd = -1;
    p->alive--;
    while (waitpid(w->pid, &status, 0) < 0 && errno == EINTR) {
    }
    p->result->lost += w->lines;
    char how[64];
    if (WIFSIGNALED(status)) {
        snprintf(how, sizeof how, "was killed by signal %d (%s)", WTERMSIG(status),
                 strsignal(WTERMSIG(status)));
    } else {
        snprintf(how, sizeof how, "ended with status %d", WEXITSTATUS(status));
    }
    if (!w->finished && !atomic_load(p->stop)) {
        char message[256];
        snprintf(message, sizeof message,
                 "worker %ld %s: %llu lines given to it, and all later ones of its sessions, are "
                 "not stored; ingest the same input again",
                 (long)w->pid, how, (unsigned long long)w->lines);
        say_failed(p, "io", message);
    }
    w->lines = 0;
    w->bytes = 0;
    w->queue_begin = w->queue_end;
}

static void receive_reports(pool *p, pool_worker *w)
{
    ssize_t got = recv(w->fd, w->inbox + w->inbox_size, sizeof w->inbox - w->inbox_size, 0);
    if (got > 0) {
        w->inbox_size += (size_t)got;
        take_reports(p, w);
    } else if (got == 0 || (errno != EINTR && errno != EAGAIN)) {
        end_worker(p, w);
    }
}

static void send_queue(pool_worker *w)
{
    ssize_t sent =
        send(w->fd, w->queue + w->queue_begin, w->queue_end - w->queue_begin, MSG_NOSIGNAL);
    if (sent > 0) {
        w->queue_begin += (size_t)sent;
    } else if (sent < 0 && errno != EINTR && errno != EAGAIN) {
        w->queue_begin = w->queue_end; /* it has ended; the next receive says so */
    }
}

bool pool_poll(pool *p, int input, int timeout_ms)
{
    struct pollfd pollers[INGEST_JOBS_MAX + 1];
    for (size_t i = 0; i < p->count; i++) {
        const pool_worker *w = &p->workers[i];
        pollers[i].fd = w->fd; /* a negative one is passed over */
        pollers[i].events = (short)(POLLIN | (w->queue_end > w->queue_begin ? POLLOUT : 0));
        pollers[i].revents = 0;
    }
    pollers[p->count].fd = input;
    pollers[p->count].events = POLLIN;
    pollers[p->count].revents = 0;
    if (poll(pollers, (nfds_t)(p->count + 1), timeout_ms) <= 0) {
        return false;
    }
    for (size_t i = 0; i < p->count; i++) {
        pool_worker *w = &p->workers[i];
        if (w->fd >= 0 && (pollers[i].revents & POLLOUT)) {
            send_queue(w);
        }
        if (w->fd >= 0 && (pollers[i].revents & (POLLIN | POLLHUP | POLLERR))) {
            receive_reports(p, w);
        }
    }
    return pollers[p->count].revents != 0;
}
