#include "guard.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "../../layout/record.h"
#include "../files.h"
#include "../internal.h"

enum {
    SLOT_DISTANCE = 4096, /* no two slots in one block, which a disk may write as a whole */
    SHARED_AT = 8192,
    FILE_SIZE = 12288,
};

enum { LOCK_USERS = 0, LOCK_SYNC = 1, LOCK_FROZEN = 2 };

/* ---------------------------------------------------------------- slots */

static uint64_t checksum_of(const rst_guard_slot *slot)
{
    return rst_hash((const unsigned char *)slot + 16, sizeof *slot - 16);
}

static bool read_slot(int fd, int number, rst_guard_slot *slot)
{
    return pread(fd, slot, sizeof *slot, number * SLOT_DISTANCE) == (ssize_t)sizeof *slot &&
           slot->magic == RST_GUARD_MAGIC && slot->version == RST_FORMAT_VERSION &&
           slot->serial != 0 && slot->checksum == checksum_of(slot);
}

static void read_newest_slot(int fd, rst_guard_slot *newest)
{
    newest->serial = 0;
    for (int i = 0; i < 2; i++) {
        rst_guard_slot slot;
        if (read_slot(fd, i, &slot) && slot.serial > newest->serial) {
            *newest = slot;
        }
    }
}

/* Onto the disk.  0 or errno. */
static int write_slot(int fd, rst_guard_slot *slot)
{
    slot->checksum = checksum_of(slot);
    off_t at = (off_t)(slot->serial & 1) * SLOT_DISTANCE;
    ssize_t written = pwrite(fd, slot, sizeof *slot, at);
    if (written != (ssize_t)sizeof *slot) {
        return written < 0 ? errno : EIO;
    }
    return fdatasync(fd) == 0 ? 0 : errno;
}

static rst_guard_slot first_slot(const rst_format_entry *format)
{
    rst_guard_slot slot = {.magic = RST_GUARD_MAGIC,
                           .version = RST_FORMAT_VERSION,
                           .durability = (uint16_t)format->durability,
                           .serial = 1};
    memcpy(slot.store_id, format->store_id, sizeof slot.store_id);
    return slot;
}

/* ---------------------------------------------------------------- making the file */

static int write_file(const char *path, mode_t mode, rst_guard_slot *slot, rst_error *error)
{
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, mode);
    if (fd < 0) {
        return rst_fail_errno(error, "creating", path);
    }
    int code = RST_OK;
    if (posix_fallocate(fd, 0, FILE_SIZE) != 0) {
        errno = ENOSPC;
        code = rst_fail_errno(error, "creating", path);
    }
    if (!code && ((errno = write_slot(fd, slot)) != 0 || fsync(fd) != 0)) {
        code = rst_fail_errno(error, "writing", path);
    }
    close(fd);
    return code;
}

int rst_guard_create(const char *folder, mode_t mode, const rst_format_entry *format,
                     rst_error *error)
{
    char path[PATH_MAX];
    int code = rst_path_join(path, folder, RST_GUARD_FILE, error);
    rst_guard_slot slot = first_slot(format);
    rst_boot_id(slot.boot_id);
    return code ? code : write_file(path, mode, &slot, error);
}

int rst_guard_adopt(const char *folder, const rst_format_entry *format, rst_error *error)
{
    char path[PATH_MAX];
    char made[PATH_MAX];
    char data[PATH_MAX];
    char name[64];
    snprintf(name, sizeof name, RST_GUARD_FILE ".new-%ld", (long)getpid());
    int code = rst_path_join(path, folder, RST_GUARD_FILE, error);
    code = code ? code : rst_path_join(made, folder, name, error);
    code = code ? code : rst_path_join(data, folder, RST_DATA_FILE, error);
    if (code) {
        return code;
    }
    struct stat info;
    if (stat(data, &info) != 0) {
        return rst_fail_errno(error, "looking at", data);
    }
    unlink(made);
    rst_guard_slot slot = first_slot(format);
    slot.serial = 0; /* which does not count: whoever comes first reads everything */
    code = write_file(made, info.st_mode & 0777, &slot, error);
    /* Somebody else may have been faster. */
    if (!code && link(made, path) != 0 && errno != EEXIST) {
        code = rst_fail_errno(error, "creating", path);
    }
    unlink(made);
    return code;
}

/* ---------------------------------------------------------------- locks */

/* 0 or errno. */
static int lock(int fd, int command, short type, off_t byte)
{
    struct flock what = {.l_type = type, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
    while (fcntl(fd, command, &what) != 0) {
        if (errno != EINTR) {
            return errno;
        }
    }
    return 0;
}

/* By another open file. */
static bool is_locked(int fd, off_t byte)
{
    struct flock what = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
    return fcntl(fd, F_OFD_GETLK, &what) != 0 || what.l_type != F_UNLCK;
}

int rst_guard_lock_sync(rst_guard *guard)
{
    return lock(guard->fd, F_OFD_SETLKW, F_WRLCK, LOCK_SYNC);
}

void rst_guard_unlock_sync(rst_guard *guard)
{
    lock(guard->fd, F_OFD_SETLK, F_UNLCK, LOCK_SYNC);
}

/* 0 or errno. */
static int make_robust_lock(pthread_mutex_t *mutex)
{
    pthread_mutexattr_t attributes;
    int result = pthread_mutexattr_init(&attributes);
    if (result) {
        return result;
    }
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    result = pthread_mutex_init(mutex, &attributes);
    pthread_mutexattr_destroy(&attributes);
    return result;
}

static int take_robust_lock(pthread_mutex_t *mutex)
{
    const int64_t longest_ns = 20000000; /* a wake-up that got lost costs no more than this */
    int result;
    do {
        int64_t until = rst_clock_ns(CLOCK_MONOTONIC) + longest_ns;
        struct timespec at = {.tv_sec = until / 1000000000, .tv_nsec = until % 1000000000};
        result = pthread_mutex_clocklock(mutex, CLOCK_MONOTONIC, &at);
    } while (result == ETIMEDOUT);
    /* Its owner was killed.  What that one had begun to write is LMDB's to forget. */
    return result == EOWNERDEAD ? pthread_mutex_consistent(mutex) : result;
}

int rst_guard_lock_writing(rst_guard *guard)
{
    return take_robust_lock(&guard->shared->writing);
}

void rst_guard_unlock_writing(rst_guard *guard)
{
    pthread_mutex_unlock(&guard->shared->writing);
}

static bool has_slots_lock(const rst_guard *guard)
{
    return guard && guard->access == RST_GUARD_WRITABLE && !guard->alone;
}

int rst_guard_lock_slots(rst_guard *guard)
{
    return has_slots_lock(guard) ? take_robust_lock(&guard->shared->slots) : 0;
}

void rst_guard_unlock_slots(rst_guard *guard)
{
    if (has_slots_lock(guard)) {
        pthread_mutex_unlock(&guard->shared->slots);
    }
}

/* ---------------------------------------------------------------- coming and going */

static int open_file(const char *path, bool read_only, rst_guard *guard, rst_error *error)
{
    char file[PATH_MAX];
    int code = rst_path_join(file, path, RST_GUARD_FILE, error);
    if (code) {
        return code;
    }
    guard->access = RST_GUARD_WRITABLE;
    guard->fd = open(file, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (guard->fd < 0 && read_only && (errno == EROFS || errno == EACCES)) {
        guard->access = errno == EROFS ? RST_GUARD_FROZEN : RST_GUARD_READABLE;
        guard->fd = open(file, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    }
    if (guard->fd < 0) {
        return errno == ENOENT ? rst_fail(error, RST_ERR_NOT_FOUND, "path", "%s is missing", file)
                               : rst_fail_errno(error, "opening", file);
    }
    struct stat info;
    if (fstat(guard->fd, &info) != 0 || !S_ISREG(info.st_mode) || info.st_size < FILE_SIZE) {
        return rst_fail(error, RST_ERR_CORRUPT, "path", "%s is not what a store has there", file);
    }
    /* A sparse copy's holes would be met through the map. */
    if (guard->access == RST_GUARD_WRITABLE) {
        code = rst_allocate_file(guard->fd, FILE_SIZE, file, error);
        if (code) {
            return code;
        }
    }
    int protection = guard->access == RST_GUARD_WRITABLE ? PROT_READ | PROT_WRITE : PROT_READ;
    void *map = mmap(NULL, FILE_SIZE, protection, MAP_SHARED, guard->fd, 0);
    if (map == MAP_FAILED) {
        return rst_fail_errno(error, "mapping", file);
    }
    guard->shared = (rst_guard_shared *)((unsigned char *)map + SHARED_AT);
    return RST_OK;
}

/* What the ones who have the store open have said of themselves fits this process. */
static bool fits(rst_guard *guard)
{
    read_newest_slot(guard->fd, &guard->slot);
    return guard->slot.serial != 0 &&
           memcmp(guard->slot.boot_id, guard->boot_id, sizeof guard->boot_id) == 0 &&
           guard->shared->pid_namespace == rst_pid_namespace() &&
           atomic_load(&guard->shared->failed) == 0;
}

static bool same_boot(const rst_guard *guard)
{
    return memcmp(guard->slot.boot_id, guard->boot_id, sizeof guard->boot_id) == 0;
}

static int say_why_not(const rst_guard *guard, const char *path, rst_error *error)
{
    int failed = (int)atomic_load(&guard->shared->failed);
    if (failed) {
        return rst_fail_system(error, RST_ERR_IO, failed,
                               "%s could not be synced: close it in every process, then open it "
                               "again, and it goes back to its last sync",
                               path);
    }
    if (!same_boot(guard) && guard->access == RST_GUARD_READABLE) {
        return rst_fail(error, RST_ERR_PERMISSION, NULL,
                        "%s was last open before the machine was restarted: it must be opened once "
                        "by somebody who may write to it",
                        path);
    }
    if (!same_boot(guard)) {
        return rst_fail(error, RST_ERR_BUSY, NULL,
                        "%s is open under another kernel: its processes must run on one", path);
    }
    /* LMDB tells processes apart by their numbers, and its locks hold thread numbers. */
    return rst_fail(error, RST_ERR_BUSY, NULL,
                    "%s is open in another PID namespace (container), where process numbers mean "
                    "other processes: run the containers in one PID namespace (docker "
                    "--pid=container:NAME or --pid=host, Kubernetes shareProcessNamespace)",
                    path);
}

static int say_frozen(const char *path, rst_error *error)
{
    return rst_fail(
        error, RST_ERR_BUSY, NULL,
        "%s is open for reading through a read-only mount by one process, and otherwise "
        "by another: pages would be reused while they are read, so mount it writable "
        "for all",
        path);
}

/* LMDB has no lock file on a read-only mount, so writers would not see this reader. */
static int join_frozen(const rst_guard *guard, const char *path, rst_error *error)
{
    int system = lock(guard->fd, F_OFD_SETLK, F_RDLCK, LOCK_FROZEN);
    if (system) {
        return rst_fail_system(error, RST_ERR_IO, system, "locking %s", path);
    }
    return is_locked(guard->fd, LOCK_USERS) ? say_frozen(path, error) : RST_OK;
}

static int join(rst_guard *guard, const char *path, rst_error *error)
{
    /* Whoever is alone may be just looking at what the machine left, or about to give up. */
    for (int attempt = 0; attempt < 50; attempt++) {
        if (guard->access == RST_GUARD_WRITABLE &&
            lock(guard->fd, F_OFD_SETLK, F_WRLCK, LOCK_USERS) == 0) {
            guard->alone = true;
            return RST_OK;
        }
        int system = lock(guard->fd, F_OFD_SETLKW, F_RDLCK, LOCK_USERS);
        if (system) {
            return rst_fail_system(error, RST_ERR_IO, system, "locking %s", path);
        }
        if (fits(guard)) {
            return RST_OK;
        }
        lock(guard->fd, F_OFD_SETLK, F_UNLCK, LOCK_USERS);
        struct timespec pause = {.tv_nsec = 2000000};
        nanosleep(&pause, NULL);
    }
    return say_why_not(guard, path, error);
}

/* With nobody else there: does the last use date from before a restart, or end with a failed sync?
 */
static bool is_stale(rst_guard *guard)
{
    static const uint8_t unknown[RST_BOOT_ID_SIZE];
    read_newest_slot(guard->fd, &guard->slot);
    return guard->slot.serial == 0 || !same_boot(guard) ||
           memcmp(guard->boot_id, unknown, sizeof unknown) == 0 ||
           atomic_load(&guard->shared->failed) != 0;
}

int rst_guard_attach(const char *path, bool read_only, rst_guard **out, rst_error *error)
{
    rst_guard *guard = calloc(1, sizeof *guard);
    if (!guard) {
        return rst_fail(error, RST_ERR_MEMORY, NULL, "no memory");
    }
    guard->fd = -1;
    rst_boot_id(guard->boot_id);
    int code = open_file(path, read_only, guard, error);
    if (!code && guard->access == RST_GUARD_FROZEN) {
        code = join_frozen(guard, path, error);
    } else if (!code) {
        code = join(guard, path, error);
        if (!code && is_locked(guard->fd, LOCK_FROZEN)) {
            code = say_frozen(path, error);
        }
    }
    if (code) {
        rst_guard_detach(guard);
        return code;
    }
    guard->stale = (guard->alone || guard->access == RST_GUARD_FROZEN) && is_stale(guard);
    *out = guard;
    return RST_OK;
}

int rst_guard_settle(rst_guard *guard, const rst_format_entry *format, rst_error *error)
{
    rst_guard_slot *slot = &guard->slot;
    if (!guard->alone) {
        return RST_OK;
    }
    if (slot->serial == 0) {
        *slot = first_slot(format);
        slot->serial = 0;
    }
    if (memcmp(slot->store_id, format->store_id, sizeof slot->store_id) != 0) {
        return rst_fail(error, RST_ERR_CORRUPT, "path",
                        RST_GUARD_FILE " belongs to another store than " RST_DATA_FILE);
    }
    int system = 0;
    if (guard->stale) {
        slot->durability = (uint16_t)format->durability;
        slot->serial++;
        memcpy(slot->boot_id, guard->boot_id, sizeof slot->boot_id);
        system = write_slot(guard->fd, slot);
    } else if (fdatasync(guard->fd) != 0) { /* its writer may have been killed before it could */
        system = errno;
    }
    if (system) {
        return rst_fail_system(error, RST_ERR_IO, system, "writing " RST_GUARD_FILE);
    }
    atomic_store(&guard->shared->failed, 0);
    atomic_store(&guard->shared->serial, slot->serial);
    atomic_store(&guard->shared->transaction, slot->has_meta ? slot->transaction : 0);
    atomic_store(&guard->shared->started_ns, 0);
    guard->shared->pid_namespace = rst_pid_namespace();
    system = make_robust_lock(&guard->shared->writing);
    system = system ? system : make_robust_lock(&guard->shared->slots);
    guard->alone = guard->stale = false;
    system = system ? system : lock(guard->fd, F_OFD_SETLK, F_RDLCK, LOCK_USERS);
    return system ? rst_fail_system(error, RST_ERR_IO, system, "locking " RST_GUARD_FILE) : RST_OK;
}

void rst_guard_detach(rst_guard *guard)
{
    if (!guard) {
        return;
    }
    if (guard->shared) {
        munmap((unsigned char *)guard->shared - SHARED_AT, FILE_SIZE);
    }
    if (guard->fd >= 0) {
        /* Said, and not left to close: a child of a fork may have the same open file. */
        lock(guard->fd, F_OFD_SETLK, F_UNLCK, LOCK_USERS);
        lock(guard->fd, F_OFD_SETLK, F_UNLCK, LOCK_FROZEN);
        close(guard->fd);
    }
    free(guard);
}

void rst_guard_forget(rst_guard *guard)
{
    if (guard && guard->fd >= 0) {
        close(guard->fd);
        guard->fd = -1;
    }
}

/* ---------------------------------------------------------------- while it is open */

int rst_guard_save(rst_guard *guard, uint64_t transaction, const unsigned char *meta,
                   int64_t started_ns)
{
    rst_guard_shared *shared = guard->shared;
    rst_guard_slot slot = guard->slot;
    /* Never over the slot that is known to be on the disk: a saver that was killed may have left
     * another one, of which nobody knows. */
    slot.serial = atomic_load(&shared->serial) + 1;
    slot.transaction = transaction;
    slot.has_meta = 1;
    memcpy(slot.boot_id, guard->boot_id, sizeof slot.boot_id);
    memcpy(slot.meta, meta, sizeof slot.meta);
    int system = write_slot(guard->fd, &slot);
    if (system) {
        return system;
    }
    /* In this order: a reader of `transaction` gives up pages that older slots need. */
    atomic_store(&shared->started_ns, started_ns);
    atomic_store(&shared->serial, slot.serial);
    atomic_store(&shared->transaction, transaction);
    return 0;
}

void rst_guard_wait(rst_guard *guard, uint32_t seen, int64_t ns)
{
    struct timespec most = {.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};
    syscall(SYS_futex, &guard->shared->wanted, FUTEX_WAIT, seen, &most, NULL, 0);
}

uint32_t rst_guard_want(rst_guard *guard)
{
    uint32_t wanted = atomic_fetch_add(&guard->shared->wanted, 1) + 1;
    syscall(SYS_futex, &guard->shared->wanted, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    return wanted;
}
