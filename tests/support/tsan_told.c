/*
 * What the thread sanitizer does not see by itself.
 *
 * What LMDB promises between threads, told to the thread sanitizer, which does not see inside it:
 * a transaction sees all that was written before a commit it follows, and pages are written again
 * only after the readers that could see them have ended.  And the taking of a lock by
 * pthread_mutex_clocklock, which GCC 12's does not know.  Linked with --wrap in that build alone.
 */
#include <lmdb.h>
#include <pthread.h>
#include <time.h>

int __real_mdb_txn_begin(MDB_env *env, MDB_txn *parent, unsigned flags, MDB_txn **txn);
int __real_mdb_txn_commit(MDB_txn *txn);
void __real_mdb_txn_abort(MDB_txn *txn);
int __wrap_mdb_txn_begin(MDB_env *env, MDB_txn *parent, unsigned flags, MDB_txn **txn);
int __wrap_mdb_txn_commit(MDB_txn *txn);
void __wrap_mdb_txn_abort(MDB_txn *txn);
void __tsan_acquire(void *address);
void __tsan_release(void *address);

/* Two points in an environment: what is committed, and which readers have ended. */
static void *committed(MDB_env *env)
{
    return env;
}

static void *readers_ended(MDB_env *env)
{
    return (char *)env + 1;
}

int __wrap_mdb_txn_begin(MDB_env *env, MDB_txn *parent, unsigned flags, MDB_txn **txn)
{
    int result = __real_mdb_txn_begin(env, parent, flags, txn);
    if (result == 0) {
        __tsan_acquire(committed(env));
        if (!(flags & MDB_RDONLY)) {
            __tsan_acquire(readers_ended(env));
        }
    }
    return result;
}

int __wrap_mdb_txn_commit(MDB_txn *txn)
{
    __tsan_release(committed(mdb_txn_env(txn)));
    return __real_mdb_txn_commit(txn);
}

void __wrap_mdb_txn_abort(MDB_txn *txn)
{
    if (txn) {
        __tsan_release(readers_ended(mdb_txn_env(txn)));
    }
    __real_mdb_txn_abort(txn);
}

int __wrap_pthread_mutex_clocklock(pthread_mutex_t *mutex, clockid_t clock,
                                   const struct timespec *until);
int __wrap_pthread_mutex_clocklock(pthread_mutex_t *mutex, clockid_t clock,
                                   const struct timespec *until)
{
    struct timespec now;
    struct timespec at;
    clock_gettime(clock, &now);
    clock_gettime(CLOCK_REALTIME, &at);
    at.tv_sec += until->tv_sec - now.tv_sec;
    at.tv_nsec += until->tv_nsec - now.tv_nsec;
    if (at.tv_nsec < 0) {
        at.tv_nsec += 1000000000;
        at.tv_sec--;
    } else if (at.tv_nsec >= 1000000000) {
        at.tv_nsec -= 1000000000;
        at.tv_sec++;
    }
    return pthread_mutex_timedlock(mutex, &at);
}
