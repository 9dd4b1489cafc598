#include "power_disk.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "support.h"

enum {
    BLOCK = 4096,
    SECTOR = 512, /* written whole, or not at all */
    FINE = 64,    /* guard.bin does not even rely on that */
    FILES = 2,
    BLOCKS_MAX = 4096,   /* of one file */
    VERSIONS_MAX = 32768 /* not on the disk yet, of all blocks */
};

static const char *const names[FILES] = {"data.mdb", "guard.bin"};

typedef struct version {
    uint32_t next; /* the block's next newer one, or the next unused one; 0 for none */
    uint64_t number;
    unsigned char bytes[BLOCK];
} version;

typedef struct block {
    uint32_t oldest; /* versions that may be on the disk, besides what is; 0 for none */
    uint32_t newest;
} block;

typedef struct file {
    dev_t device;
    ino_t inode;
    uint32_t count; /* blocks */
    unsigned char written[BLOCKS_MAX][BLOCK];
    unsigned char seen[BLOCKS_MAX][BLOCK];
    block blocks[BLOCKS_MAX];
} file;

typedef struct disk {
    pthread_mutex_t lock;
    file files[FILES];
    uint64_t number; /* of the newest version */
    uint64_t pending;
    uint64_t syncs;
    uint32_t unused; /* the first of the versions that were given back */
    uint32_t fresh;  /* the first of those that never were used; 0 stands for none */
    version versions[VERSIONS_MAX];
} disk;

static disk *the_disk;
static char the_folder[512];
static const unsigned char *maps[FILES];
static void (*on_event)(disk_event what);
static _Atomic(int) failing;

/* A thread may be in the middle of a sync while another ends the watch. */
static pthread_rwlock_t watch = PTHREAD_RWLOCK_INITIALIZER;

/* Assertions of cmocka do not work in children and threads. */
static void must(bool holds, const char *what)
{
    if (!holds) {
        fprintf(stderr, "disk: %s: %s\n", what, strerror(errno));
        abort();
    }
}

void disk_lock(void)
{
    int result = pthread_mutex_lock(&the_disk->lock);
    if (result == EOWNERDEAD) { /* by disk_die */
        result = pthread_mutex_consistent(&the_disk->lock);
    }
    must(result == 0, "lock");
}

void disk_unlock(void)
{
    pthread_mutex_unlock(&the_disk->lock);
}

void disk_die(void)
{
    disk_lock();
    raise(SIGKILL);
}

/* ---------------------------------------------------------------- versions */

static void add_version(file *f, uint32_t at, const unsigned char *bytes)
{
    uint32_t index = the_disk->unused ? the_disk->unused : the_disk->fresh++;
    must(index < VERSIONS_MAX, "too many versions: sync more often");
    version *v = &the_disk->versions[index];
    the_disk->unused = the_disk->unused ? v->next : 0;
    v->next = 0;
    v->number = ++the_disk->number;
    memcpy(v->bytes, bytes, BLOCK);
    block *b = &f->blocks[at];
    if (b->newest) {
        the_disk->versions[b->newest].next = index;
    } else {
        b->oldest = index;
        the_disk->pending++;
    }
    b->newest = index;
    memcpy(f->seen[at], v->bytes, BLOCK); /* the block itself may have changed again */
}

static void look_at(file *f, const unsigned char *now)
{
    for (uint32_t at = 0; at < f->count; at++) {
        if (memcmp(f->seen[at], now + (size_t)at * BLOCK, BLOCK) != 0) {
            add_version(f, at, now + (size_t)at * BLOCK);
        }
    }
}

static void look_at_all(void)
{
    for (int i = 0; i < FILES; i++) {
        look_at(&the_disk->files[i], maps[i]);
    }
}

/* The versions up to `number` are on the disk. */
static void write_block(file *f, uint32_t at, uint64_t number)
{
    block *b = &f->blocks[at];
    while (b->oldest && the_disk->versions[b->oldest].number <= number) {
        uint32_t index = b->oldest;
        version *v = &the_disk->versions[index];
        memcpy(f->written[at], v->bytes, BLOCK);
        b->oldest = v->next;
        v->next = the_disk->unused;
        the_disk->unused = index;
        if (!b->oldest) {
            b->newest = 0;
            the_disk->pending--;
        }
    }
}

void disk_look(void)
{
    disk_lock();
    look_at_all();
    disk_unlock();
}

uint64_t disk_pending(void)
{
    return the_disk->pending;
}

uint64_t disk_syncs(void)
{
    return the_disk->syncs;
}

/* ---------------------------------------------------------------- what the program does */

static file *file_of_inode(dev_t device, ino_t inode)
{
    for (int i = 0; the_disk && i < FILES; i++) {
        file *f = &the_disk->files[i];
        if (f->device == device && f->inode == inode) {
            return f;
        }
    }
    return NULL;
}

static file *file_of_descriptor(int fd)
{
    struct stat info;
    return the_disk && fstat(fd, &info) == 0 ? file_of_inode(info.st_dev, info.st_ino) : NULL;
}

/* The file that is mapped at the address, and the byte of it that lies there. */
static file *file_of_address(const void *address, uint64_t *offset)
{
    FILE *list = the_disk ? fopen("/proc/self/maps", "re") : NULL;
    file *found = NULL;
    char line[1024];
    while (list && !found && fgets(line, sizeof line, list)) {
        unsigned long begin, end, at, inode;
        unsigned major, minor;
        if (sscanf(line, "%lx-%lx %*s %lx %x:%x %lu", &begin, &end, &at, &major, &minor, &inode) ==
                6 &&
            (uintptr_t)address >= begin && (uintptr_t)address < end) {
            for (int i = 0; i < FILES; i++) {
                found = the_disk->files[i].inode == inode ? &the_disk->files[i] : found;
            }
            *offset = at + ((uintptr_t)address - begin);
            break;
        }
    }
    if (list) {
        fclose(list);
    }
    return found;
}

static uint64_t before_sync(void)
{
    disk_lock();
    look_at_all();
    uint64_t number = the_disk->number;
    disk_unlock();
    if (on_event) {
        on_event(DISK_BEFORE_SYNC);
    }
    return number;
}

static void after_sync(file *f, uint64_t from, uint64_t size, uint64_t number)
{
    disk_lock();
    look_at_all();
    for (uint64_t at = from / BLOCK; at < f->count && at * BLOCK < from + size; at++) {
        write_block(f, (uint32_t)at, number);
    }
    the_disk->syncs += f == &the_disk->files[0];
    disk_unlock();
    if (on_event) {
        on_event(DISK_AFTER_SYNC);
    }
}

/* These take the C library's place, for LMDB too: so they are exported. */
#define SEEN __attribute__((visibility("default")))

static int see_msync(void *address, size_t size, int flags)
{
    uint64_t offset = 0;
    file *f = flags & MS_SYNC ? file_of_address(address, &offset) : NULL;
    if (!f) {
        return (int)syscall(SYS_msync, address, size, flags);
    }
    uint64_t number = before_sync();
    if (failing) {
        errno = failing;
        return -1;
    }
    int result = (int)syscall(SYS_msync, address, size, flags);
    if (result == 0) {
        after_sync(f, offset, size, number);
    }
    return result;
}

SEEN int msync(void *address, size_t size, int flags)
{
    pthread_rwlock_rdlock(&watch);
    int result = see_msync(address, size, flags);
    int system = errno;
    pthread_rwlock_unlock(&watch);
    errno = system;
    return result;
}

static int sync_descriptor(int fd, long call)
{
    pthread_rwlock_rdlock(&watch);
    file *f = file_of_descriptor(fd);
    uint64_t number = f ? before_sync() : 0;
    int result = (int)syscall(call, fd);
    if (f && result == 0) {
        after_sync(f, 0, UINT64_MAX / 2, number);
    }
    int system = errno;
    pthread_rwlock_unlock(&watch);
    errno = system;
    return result;
}

SEEN int fdatasync(int fd)
{
    return sync_descriptor(fd, SYS_fdatasync);
}

SEEN int fsync(int fd)
{
    return sync_descriptor(fd, SYS_fsync);
}

SEEN ssize_t pwrite(int fd, const void *bytes, size_t size, off_t offset)
{
    ssize_t result = syscall(SYS_pwrite64, fd, bytes, size, offset);
    int system = errno;
    pthread_rwlock_rdlock(&watch);
    if (file_of_descriptor(fd)) {
        disk_look();
        if (on_event) {
            on_event(DISK_AFTER_WRITE);
        }
    }
    pthread_rwlock_unlock(&watch);
    errno = system;
    return result;
}

void disk_fail(int system)
{
    failing = system;
}

/* ---------------------------------------------------------------- begin, end */

static void begin_file(int i)
{
    char path[600];
    snprintf(path, sizeof path, "%s/%s", the_folder, names[i]);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat info;
    must(fd >= 0 && fstat(fd, &info) == 0, path);
    file *f = &the_disk->files[i];
    f->device = info.st_dev;
    f->inode = info.st_ino;
    f->count = (uint32_t)((info.st_size + BLOCK - 1) / BLOCK);
    must(f->count <= BLOCKS_MAX, "the store is too large");
    maps[i] = mmap(NULL, (size_t)f->count * BLOCK, PROT_READ, MAP_SHARED, fd, 0);
    must(maps[i] != MAP_FAILED, "mmap");
    close(fd);
    memcpy(f->written, maps[i], (size_t)f->count * BLOCK);
    memcpy(f->seen, maps[i], (size_t)f->count * BLOCK);
}

void disk_begin(const char *folder)
{
    disk *d = mmap(NULL, sizeof *d, PROT_READ | PROT_WRITE,
                   MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    must(d != MAP_FAILED, "mmap");
    pthread_mutexattr_t shared;
    pthread_mutexattr_init(&shared);
    pthread_mutexattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&shared, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&d->lock, &shared);
    d->fresh = 1;
    snprintf(the_folder, sizeof the_folder, "%s", folder);
    pthread_rwlock_wrlock(&watch);
    the_disk = d;
    for (int i = 0; i < FILES; i++) {
        begin_file(i);
    }
    pthread_rwlock_unlock(&watch);
}

void disk_end(void)
{
    pthread_rwlock_wrlock(&watch);
    for (int i = 0; i < FILES; i++) {
        munmap((void *)(uintptr_t)maps[i], (size_t)the_disk->files[i].count * BLOCK);
    }
    munmap(the_disk, sizeof *the_disk);
    the_disk = NULL;
    on_event = NULL;
    failing = 0;
    pthread_rwlock_unlock(&watch);
}

void disk_on_event(void (*event)(disk_event what))
{
    on_event = event;
}

/* ---------------------------------------------------------------- images */

/* What the cut did to a file. */
typedef enum style {
    NOTHING_WRITTEN,
    ALL_WRITTEN,
    HALF_WRITTEN,      /* each block, in its newest version, or not */
    ANY_VERSION,       /* each block, in any version */
    ANY_SECTOR,        /* each sector, in any version */
    FIRST_TWO_WRITTEN, /* meta pages without their trees */
    FIRST_TWO_MISSING,
    ONE_MISSING,
    STYLES
} style;

/* The block's n-th version from the disk's own, which is 0. */
static const unsigned char *version_of(const file *f, uint32_t at, uint64_t n)
{
    const unsigned char *bytes = f->written[at];
    for (uint32_t v = f->blocks[at].oldest; v && n > 0; v = the_disk->versions[v].next, n--) {
        bytes = the_disk->versions[v].bytes;
    }
    return bytes;
}

static uint64_t version_count(const file *f, uint32_t at)
{
    uint64_t count = 0;
    for (uint32_t v = f->blocks[at].oldest; v; v = the_disk->versions[v].next) {
        count++;
    }
    return count;
}

static void cut_block(const file *f, uint32_t at, style how, uint32_t odd, uint64_t *seed,
                      unsigned char out[BLOCK])
{
    size_t grain = f == &the_disk->files[0] ? SECTOR : FINE;
    uint64_t count = version_count(f, at);
    uint64_t n = 0;
    switch (how) {
    case ALL_WRITTEN:
        n = count;
        break;
    case HALF_WRITTEN:
        n = support_random(seed) % 2 ? count : 0;
        break;
    case ANY_VERSION:
        n = support_random(seed) % (count + 1);
        break;
    case FIRST_TWO_WRITTEN:
        n = at < 2 ? count : 0;
        break;
    case FIRST_TWO_MISSING:
        n = at < 2 ? 0 : count;
        break;
    case ONE_MISSING:
        n = at == odd ? 0 : count;
        break;
    case ANY_SECTOR:
        for (size_t s = 0; s < BLOCK; s += grain) {
            n = count ? support_random(seed) % (count + 1) : 0;
            memcpy(out + s, version_of(f, at, n) + s, grain);
        }
        return;
    case NOTHING_WRITTEN:
    case STYLES:
        break;
    }
    memcpy(out, version_of(f, at, n), BLOCK);
}

/* One of the blocks that are not on the disk yet. */
static uint32_t pick_pending(const file *f, uint64_t *seed)
{
    uint32_t picked = 0;
    uint64_t seen = 0;
    for (uint32_t at = 0; at < f->count; at++) {
        if (f->blocks[at].oldest && support_random(seed) % ++seen == 0) {
            picked = at;
        }
    }
    return picked;
}

static void write_image(const char *folder, int i, uint64_t *seed)
{
    const file *f = &the_disk->files[i];
    char path[600];
    snprintf(path, sizeof path, "%s/%s", folder, names[i]);
    FILE *out = fopen(path, "we");
    must(out != NULL, path);
    style how = (style)(support_random(seed) % STYLES);
    uint32_t odd = pick_pending(f, seed);
    unsigned char bytes[BLOCK];
    for (uint32_t at = 0; at < f->count; at++) {
        cut_block(f, at, how, odd, seed, bytes);
        must(fwrite(bytes, BLOCK, 1, out) == 1, "write");
    }
    must(fclose(out) == 0, "write");
}

void disk_make_image(const char *folder, uint64_t *seed)
{
    must(mkdir(folder, 0700) == 0, folder);
    disk_lock();
    for (int i = 0; i < FILES; i++) {
        write_image(folder, i, seed);
    }
    disk_unlock();
}
