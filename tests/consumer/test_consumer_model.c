/*
 * Long random histories of consumers, against a model that is nothing but arrays.
 *
 * Every step does the same to both and compares all that can be seen.  Besides the model, each
 * history keeps what really counts: which sessions the model under training has learnt from.  None
 * may be given while it has learnt from it, and at the end it has learnt from every stored one,
 * whatever was killed, resumed, expired or released on the way.
 */
#include "consumer_support.h"

enum { SEQUENCES = 1024, CONSUMERS = 2, PLACES = 8, HISTORY = 4096, STEPS = 500, TAKE_MAX = 12 };

static const char *const names[CONSUMERS] = {"trainer", "critic"};

typedef enum entry_state { NEVER, FREE, HELD, TRAINED, COMMITTED } entry_state;

typedef struct entry {
    bool there; /* the consumer has a lease entry */
    entry_state state;
    bool ended; /* HELD, but may be given again */
    uint64_t lease_id;
    uint32_t given_count;
} entry;

typedef struct consumer {
    bool there;
    uint64_t epoch; /* of the model: differs with every creation and resume */
    uint64_t next;
    uint64_t settled;
    uint64_t given_total;
    uint64_t again_total;
    uint64_t trained_total;
    entry entries[SEQUENCES];
    bool learnt[SEQUENCES]; /* by the model in training */
} consumer;

typedef struct taken_place {
    void *bytes;
    size_t size;
    int of;
    uint64_t epoch;
    uint64_t settled;
    uint64_t next;
    uint64_t limit;
    bool in[SEQUENCES];
    bool learnt[SEQUENCES];
} taken_place;

typedef struct given {
    rst_lease lease;
    uint64_t epoch;
} given;

typedef struct history {
    fixture f;
    uint64_t random;
    uint64_t next_epoch;
    uint64_t next_sequence;
    bool stored[SEQUENCES];
    consumer consumers[CONSUMERS];
    taken_place places[PLACES];
    size_t place_count;
    given leases[CONSUMERS][HISTORY];
    size_t lease_count[CONSUMERS];
} history;

static uint64_t roll(history *h, uint64_t sides)
{
    return support_random(&h->random) % sides;
}

/* ---------------------------------------------------------------- the model's rules */

static bool is_committed(const consumer *c, uint64_t s)
{
    return s < c->settled || (s < c->next && c->entries[s].state == COMMITTED);
}

static void advance(history *h, consumer *c)
{
    while (c->settled < c->next) {
        entry *e = &c->entries[c->settled];
        if (h->stored[c->settled] && !(e->there && e->state == COMMITTED)) {
            return;
        }
        e->there = false;
        c->settled++;
    }
}

static bool can_be_released(const history *h, uint64_t s)
{
    for (int i = 0; i < CONSUMERS; i++) {
        if (h->consumers[i].there && !is_committed(&h->consumers[i], s)) {
            return false;
        }
    }
    return true;
}

/* What a take of at most `max` gives, in order. */
static size_t expected_take(const history *h, const consumer *c, size_t max, uint64_t *sequences)
{
    size_t count = 0;
    for (uint64_t s = c->settled; s < c->next && count < max; s++) {
        const entry *e = &c->entries[s];
        if (h->stored[s] && e->there && (e->state == FREE || (e->state == HELD && e->ended))) {
            sequences[count++] = s;
        }
    }
    for (uint64_t s = c->next; s < h->next_sequence && count < max; s++) {
        if (h->stored[s]) {
            sequences[count++] = s;
        }
    }
    return count;
}

static void note_given(history *h, int i, const rst_lease *leases, size_t count, bool ended)
{
    consumer *c = &h->consumers[i];
    for (size_t j = 0; j < count; j++) {
        uint64_t s = leases[j].sequence;
        entry *e = &c->entries[s];
        bool again = s < c->next;
        assert_false(c->learnt[s]);
        uint32_t given_count = again ? e->given_count + 1 : 1;
        assert_int_equal(leases[j].given_count, given_count);
        *e = (entry){true, HELD, ended, leases[j].lease_id, given_count};
        c->given_total++;
        c->again_total += again;
        if (!again) {
            c->next = s + 1;
        }
        assert_true(h->lease_count[i] < HISTORY);
        h->leases[i][h->lease_count[i]++] = (given){leases[j], c->epoch};
    }
    if (count > 0) {
        advance(h, c);
    }
}

typedef enum saying { ACKNOWLEDGE, RETURN, RENEW } saying;

/* What becomes of one lease; false: refused. */
static bool expected_say(consumer *c, const given *g, saying verb, bool ended)
{
    uint64_t s = g->lease.sequence;
    entry *e = &c->entries[s];
    if (g->epoch != c->epoch || s >= c->next) {
        return false;
    }
    if (!e->there) {
        return g->lease.expires_ns > rst_clock_ns(CLOCK_BOOTTIME);
    }
    if (e->lease_id != g->lease.lease_id) {
        return false;
    }
    bool done = e->state == TRAINED || e->state == COMMITTED;
    if (verb == RETURN) {
        e->state = done ? e->state : FREE;
        return !done;
    }
    if (e->state == FREE) {
        return false;
    }
    if (verb == RENEW) {
        e->ended = ended;
    } else if (!done) {
        e->state = TRAINED;
        c->trained_total++;
        c->learnt[s] = true;
    }
    return true;
}

/* ---------------------------------------------------------------- steps */

static void seal_some(history *h)
{
    uint64_t count = roll(h, 6);
    for (uint64_t i = 0; i < count && h->next_sequence < SEQUENCES - 1; i++) {
        assert_ok(seal_one(h->f.store, h->f.record, h->next_sequence, 0, &h->f.error), h->f.error);
        h->stored[h->next_sequence++] = true;
    }
}

static void check_given(const rst_lease *leases, size_t got, const uint64_t *want, size_t count)
{
    assert_int_equal(got, count);
    for (size_t i = 0; i < count; i++) {
        assert_int_equal(leases[i].sequence, want[i]);
    }
}

static void take_some(history *h, int i)
{
    consumer *c = &h->consumers[i];
    size_t max = 1 + roll(h, TAKE_MAX);
    bool brief = roll(h, 5) == 0;
    uint64_t want[TAKE_MAX];
    rst_lease leases[TAKE_MAX];
    size_t got;
    size_t count = expected_take(h, c, max, want);
    int code = rst_consumer_take(h->f.store, names[i], strlen(names[i]), max, brief ? 1 : 0, 0,
                                 leases, &got, &h->f.error);
    if (count == 0) {
        assert_code(RST_ERR_TIMEOUT, code, h->f.error);
    } else {
        assert_ok(code, h->f.error);
    }
    check_given(leases, got, want, count);
    note_given(h, i, leases, got, brief);
    if (brief) {
        sleep_ms(2);
    }
}

typedef struct killed {
    const char *path;
    const char *name;
    size_t max;
    int pipe[2];
    bool by_signal;
} killed;

/* Take, tell the parent, and die with the leases. */
static int take_and_die(void *context)
{
    killed *k = context;
    rst_store *store;
    rst_error error;
    rst_lease leases[TAKE_MAX];
    size_t got = 0;
    if (rst_store_open(k->path, 0, NULL, &store, &error)) {
        return 1;
    }
    int code =
        rst_consumer_take(store, k->name, strlen(k->name), k->max, 0, 0, leases, &got, &error);
    if (code && code != RST_ERR_TIMEOUT) {
        return 2;
    }
    if (write(k->pipe[1], &got, sizeof got) != (ssize_t)sizeof got ||
        write(k->pipe[1], leases, got * sizeof *leases) != (ssize_t)(got * sizeof *leases)) {
        return 3;
    }
    if (k->by_signal) {
        kill(getpid(), SIGKILL);
    }
    return 0;
}

static void lose_a_process(history *h, int i)
{
    consumer *c = &h->consumers[i];
    killed k = {h->f.path, names[i], 1 + roll(h, TAKE_MAX), {-1, -1}, roll(h, 2) == 0};
    uint64_t want[TAKE_MAX];
    rst_lease leases[TAKE_MAX];
    size_t got = 0;
    size_t count = expected_take(h, c, k.max, want);
    assert_int_equal(pipe(k.pipe), 0);
    pid_t pid = start_child(take_and_die, &k);
    close(k.pipe[1]);
    bool read = read_all(k.pipe[0], &got, sizeof got) && got <= TAKE_MAX &&
                read_all(k.pipe[0], leases, got * sizeof *leases);
    close(k.pipe[0]);
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(k.by_signal ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL
                            : WIFEXITED(status) && WEXITSTATUS(status) == 0);
    assert_true(read);
    check_given(leases, got, want, count);
    note_given(h, i, leases, got, true);
}

static void say_something(history *h, int i)
{
    if (h->lease_count[i] == 0) {
        return;
    }
    consumer *c = &h->consumers[i];
    static consumer before;
    before = *c;
    saying verb = (saying)(roll(h, 8) < 6 ? ACKNOWLEDGE : 1 + roll(h, 2));
    bool brief = verb == RENEW && roll(h, 2) == 0;
    size_t count = 1 + roll(h, 4);
    rst_lease leases[4];
    size_t picked[4];
    int64_t refused = -1;
    for (size_t j = 0; j < count; j++) {
        size_t recent = h->lease_count[i] < 40 ? h->lease_count[i] : 40;
        picked[j] = h->lease_count[i] - 1 - roll(h, recent);
        leases[j] = h->leases[i][picked[j]].lease;
        if (refused < 0 && !expected_say(c, &h->leases[i][picked[j]], verb, brief)) {
            refused = (int64_t)j;
        }
    }
    const char *name = names[i];
    size_t size = strlen(name);
    rst_store *store = h->f.store;
    rst_error *error = &h->f.error;
    int code = verb == ACKNOWLEDGE
                   ? rst_consumer_acknowledge(store, name, size, leases, count, error)
               : verb == RETURN
                   ? rst_consumer_return(store, name, size, leases, count, error)
                   : rst_consumer_renew(store, name, size, leases, count, brief ? 1 : 0, error);
    if (refused >= 0) {
        assert_code(RST_ERR_LEASE, code, h->f.error);
        assert_int_equal(error->index, refused);
        *c = before; /* all or none */
        return;
    }
    assert_ok(code, h->f.error);
    for (size_t j = 0; j < count; j++) {
        h->leases[i][picked[j]].lease.expires_ns = leases[j].expires_ns;
    }
    if (brief) {
        sleep_ms(2);
    }
}

static void take_place(history *h, int i)
{
    const consumer *c = &h->consumers[i];
    taken_place *p = &h->places[h->place_count++ % PLACES];
    free(p->bytes);
    assert_ok(rst_consumer_place(h->f.store, names[i], strlen(names[i]), &p->bytes, &p->size,
                                 &h->f.error),
              h->f.error);
    p->of = i;
    p->epoch = c->epoch;
    p->settled = c->settled;
    p->next = c->next;
    p->limit = h->next_sequence;
    for (uint64_t s = 0; s < SEQUENCES; s++) {
        const entry *e = &c->entries[s];
        bool trained = e->there && (e->state == TRAINED || e->state == COMMITTED);
        p->in[s] = s < c->settled || (s < p->limit && (!h->stored[s] || trained));
        p->learnt[s] = c->learnt[s];
    }
}

static bool expected_commit(history *h, consumer *c, const taken_place *p)
{
    if (p->epoch != c->epoch) {
        for (uint64_t s = c->settled; s < p->limit; s++) {
            if (h->stored[s] && p->in[s] &&
                !(c->entries[s].there && c->entries[s].state == COMMITTED)) {
                return false;
            }
        }
        return true;
    }
    for (uint64_t s = c->settled; s < p->limit; s++) {
        if (p->in[s] && c->entries[s].there && c->entries[s].state == TRAINED) {
            c->entries[s].state = COMMITTED;
        }
    }
    advance(h, c);
    return true;
}

static taken_place *pick_place(history *h)
{
    size_t count = h->place_count < PLACES ? h->place_count : PLACES;
    if (count == 0) {
        return NULL;
    }
    /* Mostly the newest. */
    size_t back = roll(h, 3) ? 0 : roll(h, count);
    return &h->places[(h->place_count - 1 - back) % PLACES];
}

static void commit_place(history *h)
{
    taken_place *p = pick_place(h);
    if (!p) {
        return;
    }
    consumer *c = &h->consumers[p->of];
    int code = rst_consumer_commit(h->f.store, names[p->of], strlen(names[p->of]), p->bytes,
                                   p->size, &h->f.error);
    if (!c->there) {
        assert_code(RST_ERR_NOT_FOUND, code, h->f.error);
    } else if (expected_commit(h, c, p)) {
        assert_ok(code, h->f.error);
    } else {
        assert_code(RST_ERR_ARGUMENT, code, h->f.error);
    }
}

static uint64_t expected_resume(history *h, consumer *c, const taken_place *p)
{
    uint64_t lost = 0;
    if (!c->there) {
        memset(c, 0, sizeof *c);
        c->there = true;
    }
    c->next = c->next > p->next ? c->next : p->next;
    for (uint64_t s = 0; s < h->next_sequence; s++) {
        entry *e = &c->entries[s];
        uint32_t given_count = e->there ? e->given_count : 1;
        *e = (entry){0};
        lost += !p->in[s] && !h->stored[s];
        if (s >= p->settled && s < c->next && h->stored[s]) {
            *e = (entry){true, p->in[s] ? COMMITTED : FREE, false, 0, given_count};
        }
    }
    memcpy(c->learnt, p->learnt, sizeof c->learnt);
    c->settled = p->settled;
    c->epoch = h->next_epoch++;
    advance(h, c);
    return lost;
}

static void resume_place(history *h)
{
    taken_place *p = pick_place(h);
    if (!p) {
        return;
    }
    uint64_t lost;
    assert_ok(rst_consumer_resume(h->f.store, names[p->of], strlen(names[p->of]), p->bytes, p->size,
                                  &lost, &h->f.error),
              h->f.error);
    assert_int_equal(lost, expected_resume(h, &h->consumers[p->of], p));
}

static void create_or_drop(history *h, int i)
{
    consumer *c = &h->consumers[i];
    if (c->there) {
        assert_ok(rst_consumer_drop(h->f.store, names[i], strlen(names[i]), &h->f.error),
                  h->f.error);
        memset(c, 0, sizeof *c);
        return;
    }
    rst_consumer_start start = (rst_consumer_start)roll(h, 2);
    int created;
    assert_ok(
        rst_consumer_create(h->f.store, names[i], strlen(names[i]), start, &created, &h->f.error),
        h->f.error);
    assert_int_equal(created, 1);
    c->there = true;
    c->epoch = h->next_epoch++;
    c->next = h->next_sequence;
    for (uint64_t s = h->next_sequence; start == RST_START_OLDEST && s > 0; s--) {
        c->next = h->stored[s - 1] ? s - 1 : c->next;
    }
    c->settled = c->next;
}

static void release_some(history *h)
{
    uint64_t s = 1 + roll(h, h->next_sequence);
    bool force = roll(h, 2) == 0;
    int code = release_one_session(&h->f, s, force ? RST_CHANGE_FORCE : 0);
    if (s >= h->next_sequence || !h->stored[s]) {
        assert_code(RST_ERR_NOT_FOUND, code, h->f.error);
    } else if (force || can_be_released(h, s)) {
        assert_ok(code, h->f.error);
        h->stored[s] = false;
    } else {
        assert_code(RST_ERR_HELD, code, h->f.error);
    }
}

static void release_consumed(history *h)
{
    uint64_t max = roll(h, 2) ? 0 : 1 + roll(h, 5);
    uint64_t released;
    assert_ok(rst_release_consumed(h->f.store, max, &released, &h->f.error), h->f.error);
    uint64_t want = 0;
    bool any = h->consumers[0].there || h->consumers[1].there;
    for (uint64_t s = 1; any && s < h->next_sequence && (max == 0 || want < max); s++) {
        if (h->stored[s] && can_be_released(h, s)) {
            h->stored[s] = false;
            want++;
        }
    }
    assert_int_equal(released, want);
}

static void step(history *h)
{
    int i = roll(h, 3) == 0;
    uint64_t die = roll(h, 100);
    bool there = h->consumers[i].there;
    if (die < 18) {
        seal_some(h);
    } else if (die < 40 && there) {
        take_some(h, i);
    } else if (die < 68 && there) {
        say_something(h, i);
    } else if (die < 76 && there) {
        take_place(h, i);
    } else if (die < 84) {
        commit_place(h);
    } else if (die < 87) {
        resume_place(h);
    } else if (die < 92) {
        release_consumed(h);
    } else if (die < 94) {
        release_some(h);
    } else if (die < 97 && there) {
        lose_a_process(h, i);
    } else if (die < 98 || !there) {
        create_or_drop(h, i ? i : !there ? i : 1); /* the trainer is never dropped */
    }
}

/* ---------------------------------------------------------------- comparing */

static void compare_consumer(history *h, int i)
{
    const consumer *c = &h->consumers[i];
    rst_consumer real = look_at(h->f.store, names[i]);
    uint64_t waiting = 0;
    uint64_t states[5] = {0};
    for (uint64_t s = 1; s < h->next_sequence; s++) {
        const entry *e = &c->entries[s];
        waiting += h->stored[s] && s >= c->next;
        if (s < c->settled) {
            states[COMMITTED] += h->stored[s];
        } else if (e->there) {
            states[e->state] += h->stored[s] || e->state == HELD || e->state == TRAINED;
        }
    }
    assert_int_equal(real.next, c->next);
    assert_int_equal(real.settled, c->settled);
    assert_int_equal(real.waiting_count, waiting);
    assert_int_equal(real.free_count, states[FREE]);
    assert_int_equal(real.held_count, states[HELD]);
    assert_int_equal(real.trained_count, states[TRAINED]);
    assert_int_equal(real.committed_count, states[COMMITTED]);
    assert_int_equal(real.given_total, c->given_total);
    assert_int_equal(real.again_total, c->again_total);
    assert_int_equal(real.trained_total, c->trained_total);
}

/* Train on everything that can be had; then nothing that is stored may be left out. */
static void train_to_the_end(history *h, int i)
{
    consumer *c = &h->consumers[i];
    rst_lease leases[TAKE_MAX];
    size_t got;
    for (uint64_t s = c->settled; s < c->next; s++) {
        entry *e = &c->entries[s];
        if (e->there && e->state == HELD && !e->ended) {
            given g = {{.sequence = s, .lease_id = e->lease_id, .expires_ns = INT64_MAX}, c->epoch};
            assert_ok(rst_consumer_acknowledge(h->f.store, names[i], strlen(names[i]), &g.lease, 1,
                                               &h->f.error),
                      h->f.error);
            assert_true(expected_say(c, &g, ACKNOWLEDGE, false));
        }
    }
    while (rst_consumer_take(h->f.store, names[i], strlen(names[i]), TAKE_MAX, 0, 0, leases, &got,
                             &h->f.error) == RST_OK) {
        note_given(h, i, leases, got, false);
        assert_ok(rst_consumer_acknowledge(h->f.store, names[i], strlen(names[i]), leases, got,
                                           &h->f.error),
                  h->f.error);
        for (size_t j = 0; j < got; j++) {
            given g = {leases[j], c->epoch};
            assert_true(expected_say(c, &g, ACKNOWLEDGE, false));
        }
    }
    assert_int_equal(h->f.error.code, RST_ERR_TIMEOUT);
    for (uint64_t s = 1; s < h->next_sequence && i == 0; s++) {
        if (h->stored[s] && !c->learnt[s]) {
            fail_msg("session %llu was skipped", (unsigned long long)s);
        }
    }
}

static void run_history(uint64_t seed)
{
    print_message("seed %llu\n", (unsigned long long)seed);
    history *h = calloc(1, sizeof *h);
    fixture_open(&h->f, UINT64_C(8) << 20);
    h->random = seed;
    h->next_epoch = 1;
    h->next_sequence = 1;
    create_or_drop(h, 0); /* the store is empty, so the start makes no difference */
    for (int n = 0; n < STEPS; n++) {
        step(h);
        if (n % 25 == 0) {
            support_assert_sound(h->f.store);
        }
        for (int i = 0; i < CONSUMERS; i++) {
            if (h->consumers[i].there) {
                compare_consumer(h, i);
            }
        }
    }
    for (int i = 0; i < CONSUMERS; i++) {
        if (h->consumers[i].there) {
            train_to_the_end(h, i);
            compare_consumer(h, i);
        }
    }
    for (int i = 0; i < PLACES; i++) {
        free(h->places[i].bytes);
    }
    fixture_close(&h->f);
    free(h);
}

static void histories_that_are_always_the_same(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 12; seed++) {
        run_history(seed);
    }
}

static void a_history_that_nobody_has_seen(void **state)
{
    (void)state;
    const char *given_seed = getenv("ROLLSTORE_TEST_SEED");
    run_history(given_seed ? strtoull(given_seed, NULL, 10)
                           : (uint64_t)rst_clock_ns(CLOCK_REALTIME));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(histories_that_are_always_the_same),
        cmocka_unit_test(a_history_that_nobody_has_seen),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
