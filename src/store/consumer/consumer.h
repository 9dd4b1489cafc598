/* What the consumers' files share.  Internal. */
#ifndef RST_SRC_STORE_CONSUMER_INTERNAL_H
#define RST_SRC_STORE_CONSUMER_INTERNAL_H

#include <rollstore/consumer.h>

#include "../internal.h"

/* ---------------------------------------------------------------- a consumer's entry */

/* A consumer's name as a call gave it, and its key. */
typedef struct rst_consumer_name {
    const void *bytes;
    size_t size;
    uint8_t key[RST_KEY_SIZE];
} rst_consumer_name;

/* RST_ERR_ARGUMENT for a name that is empty or over RST_CONSUMER_NAME_SIZE_MAX. */
int rst_consumer_name_of(const void *bytes, size_t size, rst_consumer_name *name, rst_error *error);

/* Check the stored bytes of an entry; *name points into them.  RST_ERR_CORRUPT, RST_ERR_VERSION. */
int rst_parse_consumer(const MDB_val *value, rst_consumer_entry *consumer, const char **name,
                       rst_error *error);

/* RST_ERR_NOT_FOUND, and what rst_parse_consumer returns. */
int rst_read_consumer(MDB_txn *txn, const rst_env *env, const rst_consumer_name *name,
                      rst_consumer_entry *consumer, rst_error *error);

/* Store the entry; marks the transaction as changed, so every change to leases ends with it. */
int rst_write_consumer(rst_write *write, const rst_consumer_name *name,
                       const rst_consumer_entry *consumer, rst_error *error);

/* A number that no consumer of before had, for rst_consumer_entry.epoch. */
int rst_random_epoch(uint64_t *epoch, rst_error *error);

/* Raise `settled` over what is committed or released, removing the entries it passes: at most
 * `limit` steps.  *done tells whether it went as far as it can.  The entry is not stored. */
int rst_advance_settled(rst_write *write, const rst_consumer_name *name,
                        rst_consumer_entry *consumer, size_t limit, bool *done, rst_error *error);

/* ---------------------------------------------------------------- cursors
 * Both stand on an element, or past the last one, where sequence is RST_SEQUENCE_END.  Close them
 * before the transaction ends. */

#define RST_SEQUENCE_END UINT64_MAX

typedef struct rst_lease_cursor {
    MDB_cursor *cursor;
    uint8_t consumer_key[RST_KEY_SIZE];
    uint64_t sequence;
    rst_lease_entry entry;
} rst_lease_cursor;

/* Stand on the consumer's first lease entry at or after `from`. */
int rst_lease_open(MDB_txn *txn, const rst_env *env, const uint8_t consumer_key[RST_KEY_SIZE],
                   uint64_t from, rst_lease_cursor *cursor, rst_error *error);
int rst_lease_seek(rst_lease_cursor *cursor, uint64_t from, rst_error *error);
int rst_lease_step(rst_lease_cursor *cursor, rst_error *error);
/* Step until sequence is at least `to`. */
int rst_lease_reach(rst_lease_cursor *cursor, uint64_t to, rst_error *error);
/* Store the cursor's entry where it stands. */
int rst_lease_store(rst_lease_cursor *cursor, rst_error *error);
/* Remove the element; the cursor must be moved by a seek before it is used again. */
int rst_lease_remove(rst_lease_cursor *cursor, rst_error *error);
void rst_lease_close(rst_lease_cursor *cursor);

/* Store a lease entry that no cursor stands on. */
int rst_lease_insert(rst_write *write, const uint8_t consumer_key[RST_KEY_SIZE], uint64_t sequence,
                     const rst_lease_entry *entry, rst_error *error);

typedef struct rst_ready_cursor {
    MDB_cursor *cursor;
    uint64_t sequence;
    uint8_t session_key[RST_KEY_SIZE];
} rst_ready_cursor;

/* Stand on the first sealed session at or after `from`. */
int rst_ready_open(MDB_txn *txn, const rst_env *env, uint64_t from, rst_ready_cursor *cursor,
                   rst_error *error);
int rst_ready_seek(rst_ready_cursor *cursor, uint64_t from, rst_error *error);
int rst_ready_step(rst_ready_cursor *cursor, rst_error *error);
int rst_ready_reach(rst_ready_cursor *cursor, uint64_t to, rst_error *error);
void rst_ready_close(rst_ready_cursor *cursor);

/* ---------------------------------------------------------------- who holds a lease */

/* This process, as it is written into a lease entry. */
typedef struct rst_holder {
    uint32_t pid;
    uint64_t pid_start;
    uint64_t pid_namespace; /* 0: nobody can look whether it lives, only expiry ends its leases */
    uint64_t boot;          /* 0: not known */
} rst_holder;

void rst_holder_self(rst_holder *self);

#define RST_HOLDER_CACHE_COUNT 256 /* more processes of one consumer only cost more looks */

/* Which processes were alive lately: a scan of many leases looks once at each holder. */
typedef struct rst_holder_cache {
    int64_t looked_ns; /* CLOCK_BOOTTIME; what is older than RST_LIVENESS_NS is looked up again */
    struct {
        uint64_t pid_start;
        uint32_t pid;
        bool alive;
    } seen[RST_HOLDER_CACHE_COUNT];
} rst_holder_cache;

#define RST_LIVENESS_NS INT64_C(250000000)

/* Whether a held lease has ended: it ran out, its machine was booted again, or its process is dead.
 * now_ns: CLOCK_BOOTTIME. */
bool rst_lease_ended(const rst_lease_entry *lease, const rst_holder *self, rst_holder_cache *cache,
                     int64_t now_ns);

/* The end of a lease of lease_ms that begins at now_ns, CLOCK_BOOTTIME. */
int64_t rst_lease_expiry(int64_t now_ns, int64_t lease_ms);

/* Put the default in place of 0.  RST_ERR_ARGUMENT below it. */
int rst_check_lease_ms(int64_t *lease_ms, rst_error *error);

/* ---------------------------------------------------------------- places
 * What they mean stands in consumer_place.c. */

typedef struct rst_place_header {
    uint32_t magic;
    uint16_t version;
    uint16_t header_size; /* bytes: 88 */
    uint64_t checksum;    /* XXH3-64, seed 0, of the bytes from 16 on */
    uint8_t store_id[16];
    uint8_t consumer_key[RST_KEY_SIZE];
    uint64_t epoch;
    uint64_t settled;
    uint64_t next;
    uint64_t limit; /* the sequence number that the next sealed session would get */
    uint64_t run_count;
} rst_place_header;

RST_STATIC_ASSERT(sizeof(rst_place_header) == 88, "layout");
RST_STATIC_ASSERT(offsetof(rst_place_header, store_id) == 16, "layout");

typedef struct rst_place_run {
    uint64_t begin;
    uint64_t end; /* the first number that is not in it */
} rst_place_run;

typedef struct rst_taken_place {
    rst_place_header header;
    const unsigned char *runs; /* not aligned */
} rst_taken_place;

/* Check the bytes of a place as far as that needs no store; out->runs points into them. */
int rst_check_place(const void *bytes, size_t size, const rst_consumer_name *name,
                    rst_taken_place *out, rst_error *error);

/* What only the store can tell: that it is the one, and not an older copy of it. */
int rst_check_place_store(const rst_taken_place *of, const rst_write *write, rst_error *error);

int rst_bad_place(rst_error *error, const char *why); /* RST_ERR_ARGUMENT */

rst_place_run rst_place_run_at(const rst_taken_place *of, uint64_t index);

/* The first number after all that are in the place. */
uint64_t rst_place_end(const rst_taken_place *of);

/* Whether numbers, asked for in ascending order, are in the place. */
typedef struct rst_place_walk {
    const rst_taken_place *of;
    uint64_t index;
} rst_place_walk;

bool rst_in_place(rst_place_walk *walk, uint64_t sequence);

#endif
