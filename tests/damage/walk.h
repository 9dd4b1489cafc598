/* Reading all of a store that may be damaged, as its users would: whatever the file holds, each
 * call ends with an ordinary error or with data inside the map.  What must not be ends in abort():
 * this is used by fuzz targets and by children of tests.  Public headers only. */
#ifndef RST_TESTS_WALK_H
#define RST_TESTS_WALK_H

#include <stdint.h>

#include <rollstore/rollstore.h>

typedef struct walk_result {
    int code;              /* of opening; the rest is 0 unless it is RST_OK */
    uint64_t fault_count;  /* that verify reports */
    uint64_t failed_count; /* calls that ended with an error while reading */
    uint64_t turn_count;   /* turns read */
    uint64_t digest;       /* of every turn read: session id, number, arrays */
} walk_result;

/* flags: RST_OPEN_READ_ONLY, RST_OPEN_TRUST. */
walk_result walk_store(const char *path, unsigned flags);

/* Open the store for writing and use it: put, seal, release, take, acknowledge.  Returns the code
 * of opening. */
int walk_and_write(const char *path, uint64_t seed);

#endif
