/* A take looks for sessions in a snapshot, and gives them under the lock of writers.  Here
 * something happens to them in between, every time: the taker is stopped where it waits for the
 * lock, and goes on when somebody else is done. */
#include <linux/futex.h>

#include "consumer_support.h"

#include "store/durability/guard.h"

enum { FAILED = 100 };

static int setup(void **state)
{
    consumer_setup(state);
    create(*state, NAME, RST_START_OLDEST);
    return 0;
}

#define LATE_TEST(name) cmocka_unit_test_setup_teardown(name, setup, consumer_teardown)

/* The sequence number of what it was given; 0 for nothing. */
static int take_one(void *context)
{
    const fixture *f = context;
    rst_store *store;
    rst_lease lease;
    rst_error error;
    rst_error closing;
    size_t got;
    if (rst_store_open(f->path, 0, NULL, &store, &error)) {
        return FAILED;
    }
    int code = rst_consumer_take(store, NAME, SIZE, 1, 0, 0, &lease, &got, &error);
    if (rst_store_close(store, &closing)) {
        return FAILED + 1;
    }
    if (code) {
        return code == RST_ERR_TIMEOUT && got == 0 ? 0 : FAILED + 2;
    }
    return lease.sequence < FAILED ? (int)lease.sequence : FAILED + 3;
}

/* Whether the child has come to wait for the lock; false when it has ended, or is not seen to. */
static bool comes_to_wait(const rst_guard *guard, pid_t pid)
{
    const int *word = &guard->shared->writing.__data.__lock;
    siginfo_t ended = {.si_pid = 0};
    for (int i = 0; i < PATIENCE_MS && ended.si_pid == 0; i++) {
        if ((unsigned)__atomic_load_n(word, __ATOMIC_ACQUIRE) & FUTEX_WAITERS) {
            return true;
        }
        sleep_ms(1);
        waitid(P_PID, (id_t)pid, &ended, WEXITED | WNOHANG | WNOWAIT);
    }
    return false;
}

/* A taker that has looked, and is stopped before it gives. */
static pid_t start_late_taker(fixture *f)
{
    rst_guard *guard = f->store->env->guard;
    assert_int_equal(rst_guard_lock_writing(guard), 0);
    pid_t pid = start_child(take_one, f);
    bool waits = comes_to_wait(guard, pid);
    kill(pid, SIGSTOP);
    int status;
    pid_t seen = waitpid(pid, &status, WUNTRACED);
    rst_guard_unlock_writing(guard);
    assert_true(waits);
    assert_int_equal(seen, pid);
    assert_true(WIFSTOPPED(status));
    return pid;
}

static void go_on_and_get(pid_t pid, int sequence)
{
    int status;
    assert_int_equal(kill(pid, SIGCONT), 0);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), sequence);
}

/* A lease that has run out. */
static void let_one_run_out(fixture *f, rst_lease *lease)
{
    size_t got;
    assert_ok(rst_consumer_take(f->store, NAME, SIZE, 1, 1, 0, lease, &got, &f->error), f->error);
    assert_int_equal(got, 1);
    sleep_ms(5);
}

static void a_new_session_is_given_to_one_of_two(void **state)
{
    fixture *f = *state;
    rst_lease lease;
    seal_range(f, 1, 1);
    pid_t late = start_late_taker(f);
    take_expecting(f, NAME, 1, 1, &lease);
    go_on_and_get(late, 0);
    settle(f, NAME, &lease, 1);
}

static void what_was_handed_back_is_given_to_one_of_two(void **state)
{
    fixture *f = *state;
    rst_lease lease;
    seal_range(f, 1, 1);
    take_expecting(f, NAME, 1, 1, &lease);
    assert_ok(rst_consumer_return(f->store, NAME, SIZE, &lease, 1, &f->error), f->error);
    pid_t late = start_late_taker(f);
    take_expecting(f, NAME, 1, 1, &lease);
    go_on_and_get(late, 0);
    settle(f, NAME, &lease, 1);
}

static void what_ran_out_is_given_to_one_of_two(void **state)
{
    fixture *f = *state;
    rst_lease old;
    rst_lease lease;
    seal_range(f, 1, 1);
    let_one_run_out(f, &old);
    pid_t late = start_late_taker(f);
    take_expecting(f, NAME, 1, 1, &lease);
    go_on_and_get(late, 0);
    settle(f, NAME, &lease, 1);
}

static void whoever_is_late_gets_the_next_one(void **state)
{
    fixture *f = *state;
    rst_lease old;
    rst_lease lease;
    seal_range(f, 1, 2);
    let_one_run_out(f, &old);
    pid_t late = start_late_taker(f);
    take_expecting(f, NAME, 1, 1, &lease);
    go_on_and_get(late, 2);
    settle(f, NAME, &lease, 1);
}

static void what_its_holder_renews_stays_its_holders(void **state)
{
    fixture *f = *state;
    rst_lease lease;
    seal_range(f, 1, 1);
    let_one_run_out(f, &lease);
    pid_t late = start_late_taker(f);
    assert_ok(rst_consumer_renew(f->store, NAME, SIZE, &lease, 1, 0, &f->error), f->error);
    go_on_and_get(late, 0);
    settle(f, NAME, &lease, 1);
}

static void what_its_holder_has_trained_on_is_not_given_again(void **state)
{
    fixture *f = *state;
    rst_lease lease;
    seal_range(f, 1, 1);
    let_one_run_out(f, &lease);
    pid_t late = start_late_taker(f);
    acknowledge(f, NAME, &lease, 1);
    go_on_and_get(late, 0);
    settle(f, NAME, &lease, 1);
}

static void what_was_released_is_not_given_again(void **state)
{
    fixture *f = *state;
    rst_lease lease;
    seal_range(f, 1, 1);
    let_one_run_out(f, &lease);
    pid_t late = start_late_taker(f);
    assert_ok(release_one_session(f, 1, RST_CHANGE_FORCE), f->error);
    go_on_and_get(late, 0);
    take_nothing(f, NAME);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        LATE_TEST(a_new_session_is_given_to_one_of_two),
        LATE_TEST(what_was_handed_back_is_given_to_one_of_two),
        LATE_TEST(what_ran_out_is_given_to_one_of_two),
        LATE_TEST(whoever_is_late_gets_the_next_one),
        LATE_TEST(what_its_holder_renews_stays_its_holders),
        LATE_TEST(what_its_holder_has_trained_on_is_not_given_again),
        LATE_TEST(what_was_released_is_not_given_again),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
