/*
 * guard.bin: what a store's processes tell one another, and the next boot.  Internal.
 *
 *   byte 0, 4096   rst_guard_slot, the one with the higher serial counts; they are written by
 *                  turns, so that a write that is cut leaves the other
 *   byte 8192      rst_guard_shared, mapped by every process; worth nothing after a restart
 *
 * Locks (of open file descriptions, so that they end with the process, and no other opening and
 * closing of the file in this process ends them):
 *
 *   byte 0         shared: somebody has the store open; exclusive: nobody else has, and what the
 *                  machine left is looked at
 *   byte 1         exclusive: the one that syncs
 *   byte 2         shared: somebody reads through a read-only mount, without LMDB's lock file
 */
#ifndef RST_SRC_STORE_GUARD_H
#define RST_SRC_STORE_GUARD_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>

#include <rollstore/layout.h>

#include "../../error.h"
#include "../pages/pages.h"
#include "host.h"

#define RST_GUARD_MAGIC UINT32_C(0x42545352) /* "RSTB" */

typedef struct rst_guard_slot {
    uint32_t magic;
    uint16_t version;
    uint16_t durability;               /* rst_durability */
    uint64_t checksum;                 /* XXH3-64 of bytes 16 to the end */
    uint64_t serial;                   /* from 1 */
    uint64_t transaction;              /* RST_DURABILITY_INTERVAL: the last one that is synced */
    uint8_t boot_id[RST_BOOT_ID_SIZE]; /* the boot in which the store was last written */
    uint8_t store_id[16];
    uint32_t has_meta; /* 1: meta is that transaction's */
    uint32_t reserved0;
    uint64_t reserved[23];
    uint8_t meta[RST_PAGES_META_SIZE]; /* the beginning of its meta page */
    uint8_t unused[256 - RST_PAGES_META_SIZE];
} rst_guard_slot;

RST_STATIC_ASSERT(sizeof(rst_guard_slot) == 512, "a slot is one sector of a disk");

typedef struct rst_guard_shared {
    _Atomic(uint32_t) wanted;      /* raised, and a futex: somebody needs the pinned pages */
    _Atomic(uint32_t) failed;      /* errno of a sync that failed: nothing after it is safe */
    _Atomic(uint64_t) serial;      /* of the newest slot that is on the disk */
    _Atomic(uint64_t) transaction; /* of that slot */
    _Atomic(int64_t) started_ns;   /* CLOCK_MONOTONIC at the beginning of the last sync */
    uint64_t pid_namespace;        /* of every process that has the store open */
    pthread_mutex_t writing;       /* robust; see rst_guard_lock_writing */
    pthread_mutex_t slots;         /* robust; see rst_guard_lock_slots */
} rst_guard_shared;

typedef enum rst_guard_access {
    RST_GUARD_WRITABLE,
    RST_GUARD_READABLE, /* this user may not write the file: others must have noted this boot */
    RST_GUARD_FROZEN    /* a read-only mount: nobody may have the store open through another one */
} rst_guard_access;

typedef struct rst_guard {
    int fd;
    rst_guard_access access;
    bool alone;  /* nobody else has the store open, until rst_guard_settle */
    bool stale;  /* alone, and the machine has stopped, or a sync has failed, since the last use */
    bool verify; /* everything has to be read before it can be trusted */
    rst_guard_slot slot; /* the newest one when this process came; serial 0 when none is whole */
    uint8_t boot_id[RST_BOOT_ID_SIZE];
    rst_guard_shared *shared;
} rst_guard;

/* Write the file of a store that is being made. */
int rst_guard_create(const char *folder, mode_t mode, const rst_format_entry *format,
                     rst_error *error);

/* Make the file for a store that has none, as after copying data.mdb alone. */
int rst_guard_adopt(const char *folder, const rst_format_entry *format, rst_error *error);

/*
 * Join the processes that have the store open, or become the first: then alone and stale are set,
 * and nobody else comes in before rst_guard_settle or rst_guard_detach.  RST_ERR_NOT_FOUND when
 * there is no file; RST_ERR_BUSY when processes of another PID namespace or kernel have it open, or
 * when some have it open through a read-only mount and others do not.
 */
int rst_guard_attach(const char *path, bool read_only, rst_guard **out, rst_error *error);

/* When alone: note this boot and let others in. */
int rst_guard_settle(rst_guard *guard, const rst_format_entry *format, rst_error *error);

void rst_guard_detach(rst_guard *guard); /* takes NULL */

/* In the child of a fork: the file, and with it the locks, are the parent's. */
void rst_guard_forget(rst_guard *guard);

/* When stale: bring the data file back to the state that its durability promises, and set verify
 * where that promises nothing.  RST_ERR_CORRUPT when it cannot be. */
int rst_guard_recover(rst_guard *guard, const char *path, rst_error *error);

/* One process at a time: hold byte 1.  0 or errno. */
int rst_guard_lock_sync(rst_guard *guard);
void rst_guard_unlock_sync(rst_guard *guard);

/*
 * One writer at a time, in any process.  LMDB has a lock for that, too, but one that can be slept
 * on for ever: when who was woken to take it is killed before it does, and a third process is
 * faster, nobody knows any more that others wait (seen in one of ten runs of tests/soak/kills).
 * With this lock around it LMDB's is always free; and who waits for this one looks again by itself.
 * 0 or errno.
 */
int rst_guard_lock_writing(rst_guard *guard);
void rst_guard_unlock_writing(rst_guard *guard);

/*
 * The same around LMDB's lock of its table of readers, which every new reader takes.  Does nothing
 * where this process is alone, or may not write to guard.bin, or for NULL.  0 or errno.
 */
int rst_guard_lock_slots(rst_guard *guard);
void rst_guard_unlock_slots(rst_guard *guard);

/* The transaction is on the disk: note it, with the beginning of its meta page, and tell everybody.
 * With the sync lock.  0 or errno. */
int rst_guard_save(rst_guard *guard, uint64_t transaction, const unsigned char *meta,
                   int64_t started_ns);

/* Wait up to ns for `wanted` to be another number than `seen`; raise it, wake all who wait, and
 * return what it is now. */
void rst_guard_wait(rst_guard *guard, uint32_t seen, int64_t ns);
uint32_t rst_guard_want(rst_guard *guard);

#endif
