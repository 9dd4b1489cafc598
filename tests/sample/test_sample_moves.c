/* The moves that fill arrays, one by one and as a plan, against memcpy and loops. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "sample/internal.h"
#include "sample_model.h"
#include "support.h"

static unsigned char *random_bytes(uint64_t *random, size_t size)
{
    unsigned char *bytes = malloc(size ? size : 1);
    assert_non_null(bytes);
    for (size_t i = 0; i < size; i++) {
        bytes[i] = (unsigned char)model_random(random, 256);
    }
    return bytes;
}

/* Around the size from which a run is streamed, and around whole lines. */
static const size_t run_sizes[] = {4, 64, 68, 1984, 2044, 2048, 2052, 2112, 2172, 9004};
#define RUN_COUNT (sizeof run_sizes / sizeof *run_sizes)

static void check_before(const unsigned char *array, size_t shift)
{
    for (size_t j = 0; j < shift; j++) {
        assert_int_equal(array[j], 0x5A);
    }
}

static void copies_are_exact_at_every_alignment(void **state)
{
    (void)state;
    uint64_t random = 1;
    unsigned char *from = random_bytes(&random, 9100);
    for (size_t i = 0; i < 2 * RUN_COUNT; i++) {
        size_t size = run_sizes[i / 2] + model_random(&random, 4);
        for (size_t shift = 0; shift < 64; shift++) {
            unsigned char *to = guarded_new(size + shift);
            const unsigned char *begin = from + model_random(&random, 64);
            rst_move move = {.kind = RST_MOVE_COPY, .to = to + shift, .from = begin, .size = size};
            rst_move_run(&move, 0, size, i % 2);
            rst_moves_done();
            assert_memory_equal(to + shift, begin, size);
            check_before(to, shift);
            guarded_free(to, size + shift);
        }
    }
    free(from);
}

static void fills_are_exact_at_every_alignment(void **state)
{
    (void)state;
    const uint32_t patterns[] = {RST_PATTERN_ZERO, RST_PATTERN_NO_ID, RST_PATTERN_NO_PROB,
                                 0x04030201, RST_PATTERN_MASK};
    for (size_t i = 0; i < 2 * RUN_COUNT * 5; i++) {
        uint32_t pattern = patterns[i / 2 % 5];
        bool bytes = pattern == RST_PATTERN_MASK; /* any address and size */
        size_t size = run_sizes[i / 10] - bytes;
        for (size_t shift = 0; shift < 64; shift += bytes ? 1 : 4) {
            unsigned char *to = guarded_new(size + shift);
            rst_move move = {
                .kind = RST_MOVE_FILL, .to = to + shift, .pattern = pattern, .size = size};
            rst_move_run(&move, 0, size, i % 2);
            rst_moves_done();
            for (size_t j = 0; j < size; j++) {
                assert_int_equal(to[shift + j], pattern >> 8 * (j % 4) & 0xFF);
            }
            check_before(to, shift);
            guarded_free(to, size + shift);
        }
    }
}

/* What a move other than a copy has to write, byte by byte. */
static unsigned char wanted_byte(const rst_move *m, uint64_t at)
{
    unsigned char pattern[4];
    memcpy(pattern, &m->pattern, 4);
    if (m->kind == RST_MOVE_FILL) {
        return pattern[at % 4];
    }
    uint64_t row = at / m->to_row_size;
    uint64_t in_row = at % m->to_row_size;
    return in_row < m->from_row_size ? m->from[row * m->from_row_size + in_row]
                                     : pattern[in_row % 4];
}

static void check_plan(const rst_plan *plan)
{
    uint64_t size = 0;
    for (size_t i = 0; i < plan->count; i++) {
        const rst_move *m = &plan->moves[i];
        assert_int_equal(m->begin, size);
        size += m->size;
        guarded_check(m->to, m->size);
        if (m->kind == RST_MOVE_COPY) {
            assert_memory_equal(m->to, m->from, m->size);
            continue;
        }
        for (uint64_t at = 0; at < m->size; at++) {
            if (m->to[at] != wanted_byte(m, at)) {
                fail_msg("move %zu of kind %d: byte %llu of %llu", i, (int)m->kind,
                         (unsigned long long)at, (unsigned long long)m->size);
            }
        }
    }
    assert_int_equal(plan->size, size);
}

static void add_random_move(rst_plan *plan, uint64_t *random, const unsigned char *from)
{
    const uint32_t patterns[] = {RST_PATTERN_ZERO, RST_PATTERN_NO_ID, RST_PATTERN_NO_PROB, 12345};
    uint32_t pattern = patterns[model_random(random, 4)];
    uint64_t count = 1 + model_random(random, model_random(random, 8) ? 3000 : 300000);
    switch (model_random(random, 4)) {
    case 0:
        rst_plan_copy(plan, guarded_new(4 * count), from, 4 * count);
        break;
    case 1:
        rst_plan_fill(plan, guarded_new(4 * count), pattern, 4 * count);
        break;
    case 2: /* a loss mask: any number of bytes */
        rst_plan_fill(plan, guarded_new(count), RST_PATTERN_MASK, count);
        break;
    default: {
        uint32_t width = 1 + model_random(random, 40);
        uint64_t rows = 1 + count / width;
        void *to = guarded_new(4 * rows * width);
        rst_plan_rows(plan, to, width, from, model_random(random, width + 1), rows, pattern);
    }
    }
}

static void free_plan(rst_plan *plan)
{
    for (size_t i = 0; i < plan->count; i++) {
        guarded_free(plan->moves[i].to, plan->moves[i].size);
    }
    rst_plan_free(plan);
}

static void a_plan_is_carried_out_whole_by_any_number_of_threads(void **state)
{
    (void)state;
    uint64_t random = 7;
    unsigned char *from = random_bytes(&random, 4 * 300100);
    const unsigned threads[] = {1, 2, 3, 8, 64};
    for (unsigned round = 0; round < 20; round++) {
        rst_plan plan = {.moves = NULL};
        unsigned moves = 1 + model_random(&random, 200);
        for (unsigned i = 0; i < moves; i++) {
            add_random_move(&plan, &random, from);
        }
        assert_int_equal(plan.count, moves);
        rst_plan_run(&plan, threads[round % 5]);
        check_plan(&plan);
        free_plan(&plan);
    }
    free(from);
}

static void a_plan_that_streams_is_carried_out_whole(void **state)
{
    (void)state;
    uint64_t random = 11;
    size_t size = (UINT64_C(24) << 20) + 100;
    unsigned char *from = random_bytes(&random, size);
    for (unsigned threads = 1; threads <= 3; threads += 2) {
        rst_plan plan = {.moves = NULL};
        rst_plan_copy(&plan, guarded_new(100), from, 100);
        rst_plan_copy(&plan, guarded_new(size), from, size);
        rst_plan_rows(&plan, guarded_new(65536 * 4 * 33), 33, from, 32, 65536, RST_PATTERN_NO_PROB);
        rst_plan_fill(&plan, guarded_new(5000000), RST_PATTERN_NO_PROB, 5000000);
        assert_true(plan.size > UINT64_C(32) << 20);
        rst_plan_run(&plan, threads);
        check_plan(&plan);
        free_plan(&plan);
    }
    free(from);
}

static void *do_nothing(void *argument)
{
    return argument;
}

/* With stacks that no address space holds no thread can be started. */
static void threads_that_cannot_start_are_done_without(void **state)
{
    (void)state;
    pthread_attr_t before;
    pthread_attr_t huge;
    pthread_t thread;
    assert_int_equal(pthread_getattr_default_np(&before), 0);
    assert_int_equal(pthread_attr_init(&huge), 0);
    assert_int_equal(pthread_attr_setstacksize(&huge, (size_t)1 << 50), 0);
    assert_int_equal(pthread_setattr_default_np(&huge), 0);
    assert_int_not_equal(pthread_create(&thread, NULL, do_nothing, NULL), 0);
    uint64_t random = 13;
    size_t size = (size_t)9 << 20;
    unsigned char *from = random_bytes(&random, size);
    rst_plan plan = {.moves = NULL};
    rst_plan_copy(&plan, guarded_new(size), from, size);
    rst_plan_run(&plan, 4);
    assert_int_equal(pthread_setattr_default_np(&before), 0);
    pthread_attr_destroy(&before);
    pthread_attr_destroy(&huge);
    check_plan(&plan);
    free_plan(&plan);
    free(from);
}

static void an_empty_plan_does_nothing(void **state)
{
    (void)state;
    rst_plan plan = {.moves = NULL};
    int32_t element = 7;
    rst_plan_copy(&plan, NULL, &element, 4);
    rst_plan_fill(&plan, &element, RST_PATTERN_ZERO, 0);
    rst_plan_rows(&plan, &element, 4, NULL, 4, 0, RST_PATTERN_ZERO);
    assert_int_equal(plan.count, 0);
    rst_plan_run(&plan, 8);
    assert_int_equal(element, 7);
    rst_plan_free(&plan);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(copies_are_exact_at_every_alignment),
        cmocka_unit_test(fills_are_exact_at_every_alignment),
        cmocka_unit_test(a_plan_is_carried_out_whole_by_any_number_of_threads),
        cmocka_unit_test(a_plan_that_streams_is_carried_out_whole),
        cmocka_unit_test(threads_that_cannot_start_are_done_without),
        cmocka_unit_test(an_empty_plan_does_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
