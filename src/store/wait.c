/* Waiting for other processes. */
#include <time.h>

#include "internal.h"

int64_t rst_clock_ns(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

rst_deadline rst_deadline_in(int64_t timeout_ms)
{
    const int64_t most_ms = INT64_C(1000) * 86400 * 36500; /* a century; keeps the sum below 2^63 */
    rst_deadline deadline = {.forever = timeout_ms < 0};
    int64_t ms = timeout_ms > most_ms ? most_ms : timeout_ms;
    deadline.at_ns = deadline.forever ? INT64_MAX : rst_clock_ns(CLOCK_MONOTONIC) + ms * 1000000;
    return deadline;
}

bool rst_deadline_passed(const rst_deadline *deadline)
{
    return !deadline->forever && rst_clock_ns(CLOCK_MONOTONIC) >= deadline->at_ns;
}

uint64_t rst_last_transaction(rst_env *env)
{
    MDB_envinfo info;
    mdb_env_info(env->lmdb, &info); /* reads the meta pages in the map, takes no lock */
    return info.me_last_txnid;
}

bool rst_wait_for_commit(rst_env *env, uint64_t seen, const rst_deadline *deadline)
{
    /* Short pauses at first, for a busy store; then up to 5 ms, which costs an idle host nothing
     * that can be measured and a trainer nothing it would notice. */
    int64_t pause_ns = 20000;
    const int64_t longest_ns = 5000000;
    while (rst_last_transaction(env) == seen) {
        int64_t left_ns = deadline->at_ns - rst_clock_ns(CLOCK_MONOTONIC);
        if (!deadline->forever && left_ns <= 0) {
            return false;
        }
        int64_t ns = deadline->forever || pause_ns < left_ns ? pause_ns : left_ns;
        struct timespec pause = {.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};
        nanosleep(&pause, NULL);
        pause_ns = pause_ns * 2 > longest_ns ? longest_ns : pause_ns * 2;
    }
    return true;
}

int rst_ready_wait(rst_store *store, uint64_t after, int64_t timeout_ms, uint64_t *newest,
                   rst_error *error)
{
    rst_error_clear(error);
    int code = rst_store_usable(store, false, error);
    rst_deadline deadline = rst_deadline_in(timeout_ms);
    while (!code) {
        /* Before the snapshot, so that a commit between the two is not slept through. */
        uint64_t seen = rst_last_transaction(store->env);
        rst_snapshot *snapshot;
        rst_totals_entry totals;
        code = rst_snapshot_open(store, &snapshot, error);
        if (code) {
            break;
        }
        code = rst_read_totals(snapshot->txn, store->env, &totals, error);
        rst_snapshot_close(snapshot);
        if (code) {
            break;
        }
        if (newest) {
            *newest = totals.next_sequence - 1;
        }
        if (totals.next_sequence - 1 > after) {
            break;
        }
        code = rst_check_not_deleted(store, error);
        if (code) {
            break;
        }
        /* Bounded, so that a deleted store is noticed. */
        rst_deadline look = rst_deadline_in(250);
        if (!deadline.forever && deadline.at_ns < look.at_ns) {
            look = deadline;
        }
        if (!rst_wait_for_commit(store->env, seen, &look) && rst_deadline_passed(&deadline)) {
            return rst_fail(error, RST_ERR_TIMEOUT, NULL,
                            "no session after sequence number %llu was sealed within %lld ms",
                            (unsigned long long)after, (long long)timeout_ms);
        }
    }
    return code;
}
