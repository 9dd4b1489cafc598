/* RST_DURABILITY_INTERVAL: syncing at intervals, so that a power cut loses the last interval and
 * nothing else.
 *
 * LMDB reuses the pages of all but its last transactions, and commits by one of two meta pages.
 * The kernel writes both to the disk whenever it likes, so after a cut the file can have the newest
 * meta page without its tree, and none of an older tree.  Therefore:
 *
 *   - A process that writes keeps a read transaction, its pin, on a transaction that is on the
 *     disk: none of the pages of that one, or of a later one, is reused meanwhile.
 *   - A sync takes the newest transaction N, opens a read transaction on it, writes the file to the
 *     disk, and saves N's meta page in guard.bin.  Only then the old pin is given up, for N.
 *   - After a cut both meta pages are set to the saved one, see recover.c.
 *
 * Every process has a pin of its own, so it does not matter which of them is killed.  What must
 * hold is: no process writes without a pin on the saved transaction or on an older one.  A new one
 * therefore syncs, saves and pins before it writes.
 *
 * One sync an interval is enough for all.  Whoever comes first does it; the others had opened a
 * read transaction at the interval's beginning, which that sync covers, and move their pin there.
 */
#include "sync.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "guard.h"

typedef struct rst_syncer {
    pthread_t thread;
    pthread_mutex_t lock; /* held for a round; stop is the thread's alone */
    atomic_bool stop;
    _Atomic(uint32_t) seen; /* of the guard's `wanted`: until then all that was wanted is done */
    MDB_txn *pin;           /* reads `pinned`, which is on the disk */
    uint64_t pinned;        /* 0 at the very beginning */
    MDB_txn *follower;      /* reads `following`, which the next sync will cover */
    uint64_t following;     /* 0: reads nothing */
    unsigned char meta[RST_PAGES_META_SIZE]; /* of `following` */
} rst_syncer;

static int64_t interval_ns(const rst_env *env)
{
    return (int64_t)env->format.interval_ms * 1000000;
}

/* ---------------------------------------------------------------- a round, with the lock */

/* Read the newest transaction with `follower`, and copy its meta page.  The write lock keeps the
 * two together; nothing is waited for while it is held. */
static int follow(rst_env *env)
{
    rst_syncer *s = env->syncer;
    if (s->following) {
        mdb_txn_reset(s->follower);
        s->following = 0;
    }
    MDB_txn *write;
    int result = rst_begin_writing(env, &write);
    if (result) {
        return result;
    }
    result = mdb_txn_renew(s->follower);
    if (!result) {
        s->following = mdb_txn_id(s->follower);
        memcpy(s->meta, env->map + (s->following & 1) * env->format.page_size, sizeof s->meta);
    }
    mdb_txn_abort(write);
    rst_guard_unlock_writing(env->guard);
    return result;
}

/* When `following` is on the disk, by whomever, it becomes the pin. */
static void move_pin(rst_env *env)
{
    rst_syncer *s = env->syncer;
    if (!s->following || s->following > atomic_load(&env->guard->shared->transaction)) {
        return;
    }
    MDB_txn *old = s->pin;
    s->pin = s->follower;
    s->pinned = s->following;
    s->follower = old;
    s->following = 0;
    mdb_txn_reset(old);
}

static int sync_and_save(rst_env *env)
{
    rst_syncer *s = env->syncer;
    int result = rst_guard_lock_sync(env->guard);
    if (result) {
        return result;
    }
    /* Another process may have done it meanwhile. */
    if (s->following > atomic_load(&env->guard->shared->transaction)) {
        int64_t started_ns = rst_clock_ns(CLOCK_MONOTONIC);
        result = follow(env); /* what was committed since is covered too */
        if (!result) {
            result = mdb_env_sync(env->lmdb, 1);
        }
        if (!result) {
            result = rst_guard_save(env->guard, s->following, s->meta, started_ns);
        }
    }
    rst_guard_unlock_sync(env->guard);
    return result;
}

/* How long until an interval has passed since the last sync of any process; at most one, also when
 * the clocks of two containers differ. */
static int64_t due_in(const rst_env *env)
{
    int64_t interval = interval_ns(env);
    int64_t started = atomic_load(&env->guard->shared->started_ns);
    int64_t left = started + interval - rst_clock_ns(CLOCK_MONOTONIC);
    return left > interval ? 0 : left;
}

/* 0 or LMDB's result. */
static int make_round(rst_env *env, bool now)
{
    rst_syncer *s = env->syncer;
    int result = (int)atomic_load(&env->guard->shared->failed);
    if (result) {
        return result;
    }
    move_pin(env);
    uint64_t last = rst_last_transaction(env);
    if (last == s->pinned) {
        return 0;
    }
    if (!s->following || (now && s->following != last)) {
        result = follow(env);
    }
    if (!result && (now || due_in(env) <= 0)) {
        result = sync_and_save(env);
    }
    if (result) {
        /* After a failed sync the kernel takes the pages for written: another one that succeeds
         * would prove nothing. */
        atomic_store(&env->guard->shared->failed, (uint32_t)(result > 0 ? result : EIO));
        return result;
    }
    move_pin(env);
    if (!s->following && rst_last_transaction(env) != s->pinned) {
        result = follow(env);
    }
    return result;
}

/* ---------------------------------------------------------------- the thread */

static void *sync_at_intervals(void *argument)
{
    rst_env *env = argument;
    rst_syncer *s = env->syncer;
    int64_t pause_ns = interval_ns(env);
    while (!atomic_load(&s->stop)) {
        rst_guard_wait(env->guard, atomic_load(&s->seen), pause_ns);
        pthread_mutex_lock(&s->lock);
        uint32_t wanted = atomic_load(&env->guard->shared->wanted);
        bool now = wanted != atomic_load(&s->seen);
        int result = make_round(env, now); /* a failure is told to whoever writes next */
        bool behind = !result && rst_last_transaction(env) != s->pinned;
        atomic_store(&s->seen, wanted);
        pthread_mutex_unlock(&s->lock);
        pause_ns = due_in(env);
        if (pause_ns <= 0) { /* a sync took longer than the interval, or nothing was to be done */
            pause_ns = behind ? 1000000 : interval_ns(env);
        }
    }
    return NULL;
}

static int start_thread(rst_env *env)
{
    /* The application's signals are not for this thread. */
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int result = pthread_create(&env->syncer->thread, NULL, sync_at_intervals, env);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return result;
}

static void syncer_free(rst_env *env)
{
    rst_syncer *s = env->syncer;
    mdb_txn_abort(s->pin);
    mdb_txn_abort(s->follower);
    pthread_mutex_destroy(&s->lock);
    free(s);
    env->syncer = NULL;
}

/* An idle read transaction: its slot is kept, so that a full table of readers is met at opening and
 * not later. */
static int begin_idle(rst_env *env, MDB_txn **txn)
{
    int result = rst_begin_reading(env, txn);
    if (!result) {
        mdb_txn_reset(*txn);
    }
    return result;
}

int rst_syncer_start(rst_env *env, rst_error *error)
{
    rst_syncer *s = calloc(1, sizeof *s);
    if (!s) {
        return rst_fail(error, RST_ERR_MEMORY, NULL, "no memory");
    }
    pthread_mutex_init(&s->lock, NULL);
    env->syncer = s;
    int result = begin_idle(env, &s->pin);
    if (!result) {
        result = begin_idle(env, &s->follower);
    }
    if (!result) {
        result = make_round(env, true);
    }
    if (!result) {
        atomic_store(&s->seen, atomic_load(&env->guard->shared->wanted));
        result = start_thread(env);
    }
    if (result) {
        syncer_free(env);
        return rst_fail_lmdb(error, result, "making the store durable");
    }
    return RST_OK;
}

int rst_syncer_stop(rst_env *env, rst_error *error)
{
    rst_syncer *s = env->syncer;
    if (!s) {
        return RST_OK;
    }
    atomic_store(&s->stop, true);
    rst_guard_want(env->guard);
    pthread_join(s->thread, NULL);
    int result = make_round(env, true);
    syncer_free(env);
    return result ? rst_fail_lmdb(error, result, "the last sync before closing") : RST_OK;
}

/* ---------------------------------------------------------------- for those who write */

int rst_syncer_check(const rst_env *env, rst_error *error)
{
    int failed = env->syncer ? (int)atomic_load(&env->guard->shared->failed) : 0;
    if (!failed) {
        return RST_OK;
    }
    return rst_fail_system(error, RST_ERR_IO, failed,
                           "a sync failed: what was written since the last one is not safe; close "
                           "the store in every process, then open it again, and it goes back to "
                           "that one");
}

int rst_syncer_now(rst_env *env, rst_error *error)
{
    bool made = false;
    return rst_syncer_give_back(env, &made, error);
}

int rst_syncer_give_back(rst_env *env, bool *made, rst_error *error)
{
    rst_syncer *s = env->syncer;
    if (!s) {
        return RST_OK;
    }
    /* First: this sync will do for those who are quick. */
    uint32_t wanted = rst_guard_want(env->guard);
    pthread_mutex_lock(&s->lock);
    uint64_t before = s->pinned;
    int result = make_round(env, true);
    atomic_store(&s->seen, wanted); /* the thread need not do it again */
    *made |= s->pinned != before;
    pthread_mutex_unlock(&s->lock);
    return result ? rst_fail_lmdb(error, result, "syncing") : RST_OK;
}

int rst_store_sync(rst_store *store, rst_error *error)
{
    rst_error_clear(error);
    int code = rst_store_usable(store, true, error);
    if (code) {
        return code;
    }
    if (store->env->syncer) {
        return rst_syncer_now(store->env, error);
    }
    int result = mdb_env_sync(store->env->lmdb, 1);
    return result ? rst_fail_lmdb(error, result, "syncing") : RST_OK;
}
