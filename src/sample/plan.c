/* The list of moves, and the threads that carry them out. */
#include "internal.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>

/* ---------------------------------------------------------------- the list */

static rst_move *add(rst_plan *plan, void *to, uint64_t size)
{
    if (!to || size == 0 || plan->out_of_memory) {
        return NULL;
    }
    if (plan->count == plan->capacity) {
        size_t capacity = plan->capacity ? 2 * plan->capacity : 64;
        rst_move *moves = reallocarray(plan->moves, capacity, sizeof *moves);
        if (!moves) {
            plan->out_of_memory = true;
            return NULL;
        }
        plan->moves = moves;
        plan->capacity = capacity;
    }
    rst_move *move = &plan->moves[plan->count++];
    *move = (rst_move){.to = to, .begin = plan->size, .size = size};
    plan->size += size;
    return move;
}

void rst_plan_copy(rst_plan *plan, void *to, const void *from, uint64_t size)
{
    rst_move *move = add(plan, to, size);
    if (move) {
        move->kind = RST_MOVE_COPY;
        move->from = from;
    }
}

void rst_plan_fill(rst_plan *plan, void *to, uint32_t pattern, uint64_t size)
{
    rst_move *move = add(plan, to, size);
    if (move) {
        move->kind = RST_MOVE_FILL;
        move->pattern = pattern;
    }
}

void rst_plan_rows(rst_plan *plan, void *to, uint32_t to_width, const void *from,
                   uint32_t from_width, uint64_t count, uint32_t pattern)
{
    uint64_t size = count * to_width * 4;
    if (from_width == to_width) {
        rst_plan_copy(plan, to, from, size);
        return;
    }
    if (from_width == 0) {
        rst_plan_fill(plan, to, pattern, size);
        return;
    }
    rst_move *move = add(plan, to, size);
    if (move) {
        move->kind = RST_MOVE_ROWS;
        move->pattern = pattern;
        move->from = from;
        move->from_row_size = from_width * 4;
        move->to_row_size = to_width * 4;
    }
}

void rst_plan_free(rst_plan *plan)
{
    free(plan->moves);
    *plan = (rst_plan){.moves = NULL};
}

/* ---------------------------------------------------------------- carrying them out */

/* What a thread takes at a time: 0.2 ms of copying, several times what starting a thread costs. */
#define CHUNK_SIZE (UINT64_C(2) << 20)

/* From here on a plan is written around the caches.  It is about a last-level cache: what is
 * larger would not stay there, and a plain store reads each line before it writes it, which costs a
 * third of the time. */
#define STREAM_SIZE (UINT64_C(32) << 20)

typedef struct running {
    const rst_plan *plan;
    bool stream;
    atomic_uint_fast64_t next; /* the first byte that nobody has taken */
} running;

/* The move that writes the plan's byte `at`. */
static size_t find_move(const rst_plan *plan, uint64_t at)
{
    size_t low = 0;
    size_t high = plan->count - 1;
    while (low < high) {
        size_t middle = high - (high - low) / 2;
        if (plan->moves[middle].begin <= at) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

/* Where a move is cut that the plan's byte `at` falls in: two neighbouring chunks get the same. */
static uint64_t cut(const rst_move *move, uint64_t at)
{
    if (at <= move->begin) {
        return 0;
    }
    if (at - move->begin >= move->size) {
        return move->size;
    }
    uint64_t offset = at - move->begin;
    return offset - offset % rst_move_unit(move);
}

static void run_chunk(const running *r, uint64_t begin, uint64_t end)
{
    const rst_plan *plan = r->plan;
    for (size_t i = find_move(plan, begin); i < plan->count && plan->moves[i].begin < end; i++) {
        const rst_move *move = &plan->moves[i];
        rst_move_run(move, cut(move, begin), cut(move, end), r->stream);
    }
}

static void *work(void *argument)
{
    running *r = argument;
    uint64_t size = r->plan->size;
    uint64_t begin;
    while ((begin = atomic_fetch_add_explicit(&r->next, CHUNK_SIZE, memory_order_relaxed)) < size) {
        run_chunk(r, begin, size - begin < CHUNK_SIZE ? size : begin + CHUNK_SIZE);
    }
    rst_moves_done();
    return NULL;
}

/* Start up to `count` helpers with the process's signals blocked, so that its handlers keep running
 * on its own threads; faults cannot be blocked.  How many were started is returned: the chunks of
 * those that were not go to the others. */
static unsigned start(running *r, pthread_t *helpers, unsigned count)
{
    sigset_t blocked;
    sigset_t before;
    sigfillset(&blocked);
    sigdelset(&blocked, SIGSEGV);
    sigdelset(&blocked, SIGBUS);
    sigdelset(&blocked, SIGILL);
    sigdelset(&blocked, SIGFPE);
    if (pthread_sigmask(SIG_SETMASK, &blocked, &before)) {
        return 0;
    }
    unsigned started = 0;
    while (started < count && pthread_create(&helpers[started], NULL, work, r) == 0) {
        started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return started;
}

void rst_plan_run(const rst_plan *plan, unsigned threads)
{
    if (plan->count == 0) {
        return;
    }
    running r = {.plan = plan, .stream = plan->size >= STREAM_SIZE};
    atomic_init(&r.next, 0);
    uint64_t useful = plan->size / CHUNK_SIZE;
    uint64_t wanted = threads < useful ? threads : useful;
    pthread_t helpers[RST_THREADS_MAX];
    unsigned started = wanted > 1 ? start(&r, helpers, (unsigned)wanted - 1) : 0;
    work(&r);
    for (unsigned i = 0; i < started; i++) {
        pthread_join(helpers[i], NULL);
    }
}
