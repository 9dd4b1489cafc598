/* Work on a store, and its contents as one number, for the tests of power cuts and of killed
 * processes. */
#ifndef RST_TESTS_POWER_WORK_H
#define RST_TESTS_POWER_WORK_H

#include <rollstore/rollstore.h>

typedef struct power_worker {
    uint64_t seed;
    rst_record *record;
    rst_lease leases[4];
    size_t lease_count;
} power_worker;

void power_worker_init(power_worker *worker, uint64_t seed);
void power_worker_free(power_worker *worker);

/* One random change in one transaction: put, put several, replace, seal, restart, release, or a
 * step of a consumer.  What a store may answer to that is no error (it is full, the session is
 * sealed). */
int power_work(power_worker *worker, rst_store *store, rst_error *error);

/* Everything that is stored, and LMDB's number of the transaction it is stored as of. */
int power_digest(rst_store *store, uint64_t *digest, uint64_t *transaction, rst_error *error);

#endif
