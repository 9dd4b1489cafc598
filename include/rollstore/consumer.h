/*
 * rollstore/consumer.h: who has trained on what.
 *
 * A consumer is a name in the store with its own place in the ready order.  A session given to it
 * is leased to the process that took it; it is acknowledged when trained on, and given again when
 * its lease runs out, its process is dead or it is handed back.  Several consumers do not disturb
 * each other; the processes (ranks) of one consumer never get the same session.
 *
 * Training and checkpoints: acknowledged sessions are `trained`, and kept.  Before a checkpoint is
 * written, rst_consumer_place gives the consumer's place as bytes to store in it; once the
 * checkpoint is safe, rst_consumer_commit makes what that place holds releasable.  After a crash,
 * rst_consumer_resume with the place from the last checkpoint makes everything that is not in it
 * available again, so that nothing is skipped and nothing repeated.
 *
 * Only what every consumer has committed can be released without force.
 */
#ifndef ROLLSTORE_CONSUMER_H
#define ROLLSTORE_CONSUMER_H

#include <rollstore/store.h>

#ifdef __cplusplus
extern "C" {
#endif

#define RST_LEASE_DEFAULT_MS INT64_C(600000) /* ten minutes: longer than a training step */

/* Where a new consumer begins. */
typedef enum rst_consumer_start {
    RST_START_OLDEST = 0, /* at the oldest session that is stored */
    RST_START_NEWEST = 1  /* at the next session to be sealed */
} rst_consumer_start;

typedef struct rst_consumer {
    const char
        *name; /* name_size bytes; lives as long as the snapshot, or NULL where none was given */
    size_t name_size;
    uint64_t next;            /* the first sequence number never given out */
    uint64_t settled;         /* everything below is committed */
    uint64_t waiting_count;   /* sealed sessions it was never given */
    uint64_t free_count;      /* given and come back: given again first */
    uint64_t held_count;      /* leased now; dead holders are counted here until the next take */
    uint64_t trained_count;   /* acknowledged, not committed */
    uint64_t committed_count; /* committed, or from before its start, and still stored */
    uint64_t given_total;     /* ever */
    uint64_t again_total;     /* of these, given again */
    uint64_t trained_total;   /* acknowledged, ever */
    int64_t created_ns;
    int64_t changed_ns; /* its last take, acknowledgement or commit: an old one with waiting
                           sessions is a stalled consumer */
} rst_consumer;

/* Create the consumer when there is none of that name (1 to RST_CONSUMER_NAME_SIZE_MAX bytes);
 * an existing one is left as it is.  *created (NULL allowed) tells which. */
RST_API int rst_consumer_create(rst_store *store, const void *name, size_t name_size,
                                rst_consumer_start start, int *created, rst_error *error);

/* Forget the consumer and its leases.  RST_ERR_NOT_FOUND. */
RST_API int rst_consumer_drop(rst_store *store, const void *name, size_t name_size,
                              rst_error *error);

typedef struct rst_lease {
    uint64_t sequence;
    uint64_t lease_id;
    uint8_t key[RST_KEY_SIZE]; /* session key */
    uint32_t given_count;      /* 1 the first time */
    int64_t expires_ns;        /* CLOCK_BOOTTIME */
} rst_lease;

/*
 * Lease up to `max` sessions in ready order: first those that came back, then new ones.  Waits up
 * to timeout_ms for the first.  lease_ms: 0 means RST_LEASE_DEFAULT_MS.  leases[max] and *count are
 * written; a session named in them stays stored while the lease lasts, unless its release is
 * forced. The lease is this process's: it ends with it, wherever the leases were handed on to
 * (renew takes them over).  RST_ERR_TIMEOUT (count 0), RST_ERR_NOT_FOUND (no such consumer),
 * RST_ERR_FULL: the store is at capacity and so much is leased that new leases have no room: commit
 * and release.
 */
RST_API int rst_consumer_take(rst_store *store, const void *name, size_t name_size, size_t max,
                              int64_t lease_ms, int64_t timeout_ms, rst_lease *leases,
                              size_t *count, rst_error *error);

/* The sessions were trained on.  All or none; RST_ERR_LEASE names the first whose lease ended and
 * was given to somebody else (error->index), or that is of before a resume.  A lease that ran out
 * may be acknowledged as long as nobody else was given the session; acknowledging twice is a
 * success. */
RST_API int rst_consumer_acknowledge(rst_store *store, const void *name, size_t name_size,
                                     const rst_lease *leases, size_t count, rst_error *error);

/* Hand sessions back untrained: they are given again first.  Same errors, and RST_ERR_LEASE for an
 * acknowledged one. */
RST_API int rst_consumer_return(rst_store *store, const void *name, size_t name_size,
                                const rst_lease *leases, size_t count, rst_error *error);

/* Make leases last lease_ms from now and end with this process; expires_ns is updated.  Same
 * errors, and RST_ERR_LEASE for one that was handed back. */
RST_API int rst_consumer_renew(rst_store *store, const void *name, size_t name_size,
                               rst_lease *leases, size_t count, int64_t lease_ms, rst_error *error);

/* The consumer's place as bytes for a checkpoint: what is trained or committed now.
 * *place: malloc'd, *size bytes; free() it.  The store is not changed; with
 * RST_DURABILITY_INTERVAL it is synced, so that no checkpoint knows more than the disk. */
RST_API int rst_consumer_place(rst_store *store, const void *name, size_t name_size, void **place,
                               size_t *size, rst_error *error);

/* The checkpoint that holds `place` is safe: what it holds as trained becomes committed.
 * Sessions trained after the place was taken stay trained; an older place than one that is
 * committed changes nothing.  RST_ERR_ARGUMENT for bytes that are no place of this consumer in this
 * store, for a place newer than the store (which then was restored from an older copy), and for one
 * of before a resume, when it holds sessions that are not committed: their training was abandoned.
 */
RST_API int rst_consumer_commit(rst_store *store, const void *name, size_t name_size,
                                const void *place, size_t size, rst_error *error);

/*
 * Go back to `place`: what it holds is committed, everything else is available again, leases of
 * before are void, those of other ranks too: one rank resumes, before any of them takes.  The
 * consumer is created when it is not there.  *lost (NULL allowed) gets the
 * number of sessions that are not in the place but were released since, which cannot be trained on
 * again; it is 0 unless somebody forced a release or committed a later place.  RST_ERR_ARGUMENT as
 * in commit, but a place of before a resume may be resumed from.
 */
RST_API int rst_consumer_resume(rst_store *store, const void *name, size_t name_size,
                                const void *place, size_t size, uint64_t *lost, rst_error *error);

/* Look at one consumer; RST_ERR_NOT_FOUND.  name pointers live as long as the snapshot. */
RST_API int rst_consumer_get(rst_snapshot *snapshot, const void *name, size_t name_size,
                             rst_consumer *out, rst_error *error);

/* The first consumer after `key` (NULL: the first of all); key of the found one is written to
 * found_key.  RST_ERR_NOT_FOUND at the end. */
RST_API int rst_consumer_next(rst_snapshot *snapshot, const uint8_t *key, rst_consumer *out,
                              uint8_t found_key[RST_KEY_SIZE], rst_error *error);

/* Release up to `max` sealed sessions (0: all) that every consumer has committed, oldest first;
 * *released gets their number.  With no consumer in the store nothing is released. */
RST_API int rst_release_consumed(rst_store *store, uint64_t max, uint64_t *released,
                                 rst_error *error);

#ifdef __cplusplus
}
#endif
#endif
