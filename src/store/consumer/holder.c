/* Which process holds a lease, and whether it still runs. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "consumer.h"

/* The first bytes of a small file, with a NUL; 0 when it cannot be read. */
static size_t read_text(const char *path, char *out, size_t size)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return 0;
    }
    ssize_t got;
    do {
        got = read(fd, out, size - 1);
    } while (got < 0 && errno == EINTR);
    close(fd);
    size_t count = got > 0 ? (size_t)got : 0;
    out[count] = '\0';
    return count;
}

typedef struct process {
    long pid;
    char state;
    unsigned long long threads;
    unsigned long long start;
} process;

/* Fields 1, 3, 20 and 22 of /proc/PID/stat, see proc(5).  The name in field 2 may hold spaces and
 * parentheses, so what follows is counted from the last one. */
static bool read_process(const char *path, process *out)
{
    char text[1024];
    size_t size = read_text(path, text, sizeof text);
    char *at = size ? strrchr(text, ')') : NULL;
    if (!at || at[1] != ' ' || at[2] == '\0') {
        return false;
    }
    out->pid = strtol(text, NULL, 10);
    out->state = at[2];
    at += 2;
    for (int field = 3; field < 22; field++) {
        at = strchr(at, ' ');
        if (!at) {
            return false;
        }
        at++;
        if (field + 1 == 20) {
            out->threads = strtoull(at, NULL, 10);
        }
    }
    out->start = strtoull(at, NULL, 10);
    return true;
}

void rst_holder_self(rst_holder *self)
{
    *self = (rst_holder){.pid = (uint32_t)getpid()};
    char boot[64];
    size_t size = read_text("/proc/sys/kernel/random/boot_id", boot, sizeof boot);
    self->boot = size ? rst_hash(boot, size) : 0;
    process seen;
    struct stat space;
    /* A /proc that was mounted for another PID namespace gives us another number; looking there for
     * a holder would find a stranger. */
    if (read_process("/proc/self/stat", &seen) && seen.pid == (long)getpid() &&
        stat("/proc/self/ns/pid", &space) == 0) {
        self->pid_start = seen.start;
        self->pid_namespace = space.st_ino;
    }
}

static bool process_lives(uint32_t pid, uint64_t pid_start)
{
    if (kill((pid_t)pid, 0) != 0 && errno == ESRCH) {
        return false;
    }
    char path[32];
    snprintf(path, sizeof path, "/proc/%u/stat", pid);
    process seen;
    if (!read_process(path, &seen)) {
        return true; /* it exists, and /proc hides other users' processes */
    }
    /* A zombie is dead; with threads left, only its first one has ended. */
    bool ended = (seen.state == 'Z' || seen.state == 'X') && seen.threads <= 1;
    return seen.start == pid_start && !ended;
}

static bool holder_lives(const rst_lease_entry *lease, rst_holder_cache *cache, int64_t now_ns)
{
    if (now_ns - cache->looked_ns > RST_LIVENESS_NS) {
        memset(cache, 0, sizeof *cache);
        cache->looked_ns = now_ns;
    }
    size_t slot = lease->pid % RST_HOLDER_CACHE_COUNT;
    if (cache->seen[slot].pid != lease->pid || cache->seen[slot].pid_start != lease->pid_start) {
        cache->seen[slot].pid = lease->pid;
        cache->seen[slot].pid_start = lease->pid_start;
        cache->seen[slot].alive = process_lives(lease->pid, lease->pid_start);
    }
    return cache->seen[slot].alive;
}

bool rst_lease_ended(const rst_lease_entry *lease, const rst_holder *self, rst_holder_cache *cache,
                     int64_t now_ns)
{
    if (lease->boot && self->boot && lease->boot != self->boot) {
        return true; /* expires_ns counts from another boot */
    }
    if (lease->expires_ns <= now_ns) {
        return true;
    }
    if (lease->pid_namespace == 0 || lease->pid_namespace != self->pid_namespace ||
        lease->pid == 0) {
        return false;
    }
    return !holder_lives(lease, cache, now_ns);
}
