/* Which set of functions is used, and the portable one. */
#include "simd.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#include <rollstore/layout.h>

static bool suspicious(const int32_t *ids, const float *logprobs, uint32_t count)
{
    int32_t bits = 0;
    int bad = 0;
    for (uint32_t i = 0; i < count; i++) {
        bits |= ids[i];
        /* NaN compares false: "not at most the largest" finds NaN, +inf and positive ones at once.
         */
        bad |= !(logprobs[i] <= RST_LOGPROB_MAX);
    }
    return bits < 0 || bad;
}

static uint64_t hash(const void *bytes, size_t size)
{
    return XXH3_64bits(bytes, size);
}

const rst_simd rst_simd_portable = {"portable", suspicious, NULL, hash};

/* Slowest first. */
static const rst_simd *const sets[] = {
    &rst_simd_portable,
#if defined(__x86_64__)
    &rst_simd_avx2,
    &rst_simd_avx512,
#endif
};

static bool processor_can_run(const rst_simd *set)
{
#if defined(__x86_64__)
    __builtin_cpu_init(); /* asks the operating system too, whether it saves the wide registers */
    if (set == &rst_simd_avx2) {
        return __builtin_cpu_supports("avx2");
    }
    if (set == &rst_simd_avx512) {
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq");
    }
#endif
    return set == &rst_simd_portable;
}

/* Points at constants: whichever thread comes first, all find the same. */
static _Atomic(const rst_simd *) active;

static const rst_simd *choose(void)
{
    const char *setting = getenv("ROLLSTORE_SIMD");
    const rst_simd *chosen = &rst_simd_portable;
    for (size_t i = 0; i < sizeof sets / sizeof *sets; i++) {
        if (processor_can_run(sets[i])) {
            chosen = sets[i];
            if (setting && strcmp(setting, chosen->name) == 0) {
                break;
            }
        }
    }
    return chosen;
}

const rst_simd *rst_simd_active(void)
{
    const rst_simd *set = atomic_load_explicit(&active, memory_order_relaxed);
    if (!set) {
        const rst_simd *chosen = choose();
        /* A set that another thread has forced meanwhile stays. */
        set = atomic_compare_exchange_strong(&active, &set, chosen) ? chosen : set;
    }
    return set;
}

bool rst_simd_force(const char *name)
{
    for (size_t i = 0; i < sizeof sets / sizeof *sets; i++) {
        if (strcmp(sets[i]->name, name) == 0 && processor_can_run(sets[i])) {
            atomic_store(&active, sets[i]);
            return true;
        }
    }
    return false;
}
