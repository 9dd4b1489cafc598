/*
 * A disk that forgets: the files of a store as they may be found after a power cut.
 *
 * The pages of data.mdb and guard.bin are compared with what they were each time the disk is
 * looked at, and each change is kept as a version of its block.  msync, fdatasync, fsync and pwrite
 * of this program (and so of LMDB) are seen: after a sync of a block its newest version is on the
 * disk; before, any of its versions may be, or for each sector another one.
 *
 * Everything lies in memory that children share, so that several processes write to one disk.
 */
#ifndef RST_TESTS_POWER_DISK_H
#define RST_TESTS_POWER_DISK_H

#include <stdbool.h>
#include <stdint.h>

/* Begin to watch the store in `folder`, all of which counts as written, as of now. */
void disk_begin(const char *folder);
void disk_end(void);

typedef enum disk_event { DISK_BEFORE_SYNC, DISK_AFTER_SYNC, DISK_AFTER_WRITE } disk_event;

/* Called in whichever process syncs a watched file or calls pwrite for it; the disk has been looked
 * at just before. */
void disk_on_event(void (*event)(disk_event what));

void disk_look(void);

/* Make `folder` with the files as a cut at this moment may leave them. */
void disk_make_image(const char *folder, uint64_t *seed);

/* Blocks that differ from what is on the disk for certain. */
uint64_t disk_pending(void);

/* The next syncs of data.mdb in this process fail with this errno, 0 for none. */
void disk_fail(int system);

/* Syncs of data.mdb that were seen since disk_begin, in all processes. */
uint64_t disk_syncs(void);

/* Nobody is inside the disk while this is held: a process may be killed. */
void disk_lock(void);
void disk_unlock(void);

/* Kill this process, while none of its threads is inside the disk. */
void disk_die(void);

#endif
