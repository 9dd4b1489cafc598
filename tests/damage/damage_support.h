/* A store with a bit of everything, and trials that damage its data file: each is read in a child
 * process, so that a crash is seen, and told with the damage that made it. */
#ifndef RST_TESTS_DAMAGE_SUPPORT_H
#define RST_TESTS_DAMAGE_SUPPORT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "support.h"
#include "walk.h"

enum { DAMAGE_PAGE = 4096, DAMAGE_WORKERS = 2, DAMAGE_GUARD_SIZE = 12288 };

typedef struct damage_value {
    uint64_t offset; /* in the data file */
    size_t size;     /* bytes */
} damage_value;

typedef struct damage_fixture {
    char *folder;
    unsigned char *bytes; /* of the sound data file */
    size_t size;
    unsigned char guard[DAMAGE_GUARD_SIZE]; /* the bytes of guard.bin */
    uint64_t pages;                         /* that are in use or were */
    bool *in_tree;                          /* [pages] */
    damage_value *values;                   /* of its turns */
    size_t value_count;
    walk_result sound;
} damage_fixture;

/* For cmocka. */
int damage_set_up(void **state);
int damage_tear_down(void **state);

/* What a worker shares with the test. */
typedef struct damage_progress {
    uint64_t dealt;   /* trials of all workers */
    char damage[128]; /* of the trial now, in words */
    uint64_t trials;
    uint64_t refused;   /* at opening */
    uint64_t reported;  /* by verify */
    uint64_t unnoticed; /* of no consequence to any turn */
} damage_progress;

typedef struct damage_worker {
    const damage_fixture *f;
    unsigned index;
    damage_progress *progress;
    unsigned char *file; /* its own copy of the data file, mapped */
    int fd;
    unsigned char *guard; /* guard.bin, likewise */
    char path[512];       /* of its store */
    char data[600];       /* of the data file */
} damage_worker;

/* Run body in each worker, a process of its own.  Fails the test when one ends otherwise than by
 * returning. */
damage_progress damage_run(const damage_fixture *f, void (*body)(damage_worker *w));

/* Is the next trial this worker's? */
bool damage_mine(damage_worker *w);

/* Say what is wrong with the file now, for the message of a crash. */
void damage_say(damage_worker *w, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Read the file as it is.  flags: RST_OPEN_TRUST.  Without it, where verify finds nothing, the
 * turns must be those that were stored. */
void damage_read(damage_worker *w, unsigned flags);

/* Open it for writing and use it. */
void damage_write(damage_worker *w, uint64_t seed);

/* Read it with bytes replaced; no trial when they are the same. */
void damage_try(damage_worker *w, uint64_t offset, const void *bytes, size_t size);

/* Make the files sound again. */
void damage_restore(damage_worker *w);

/* ROLLSTORE_DAMAGE_ROUNDS: how often each place is damaged (1). */
unsigned damage_rounds(void);

/* A page of a tree that is in use. */
bool damage_is_tree_page(const damage_fixture *f, uint64_t page);

/* Whether LMDB looks at this byte of a meta page or a tree page. */
bool damage_matters(const damage_fixture *f, uint64_t page, unsigned at);

#endif
