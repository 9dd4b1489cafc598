/* Base64: the path that decoding takes is the one that was set, asked for, or fastest. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base64/base64.h"
#include "base64/base64_kernel.h"

/* Slowest first. */
static const enum rst_base64_path built[] = {
    RST_BASE64_PORTABLE,
#ifdef RST_BASE64_HAVE_X86
    RST_BASE64_AVX2,
    RST_BASE64_AVX512,
#endif
#ifdef RST_BASE64_HAVE_NEON
    RST_BASE64_NEON,
#endif
};
#define BUILT_COUNT (sizeof built / sizeof built[0])

static int is_available(int path)
{
    return rst_base64_paths_available() >> path & 1;
}

/* The path that a process takes which starts with this setting (NULL: none).  A child of a process
 * that has not decoded yet is such a one. */
static int path_with_setting(const char *setting)
{
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        int failed =
            setting ? setenv(RST_BASE64_SETTING, setting, 1) : unsetenv(RST_BASE64_SETTING);
        if (failed)
            _exit(255);
        int before = (int)rst_base64_active_path();
        setenv(RST_BASE64_SETTING, "portable", 1); /* too late: it was read */
        if (rst_base64_force(RST_BASE64_PORTABLE) || rst_base64_force(RST_BASE64_AUTO))
            _exit(254);
        _exit((int)rst_base64_active_path() == before ? before : 253);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static void test_the_setting_chooses_the_path(void **state)
{
    (void)state;
    int fastest = RST_BASE64_PORTABLE;
    for (size_t i = 0; i < BUILT_COUNT; i++) {
        if (is_available((int)built[i]))
            fastest = (int)built[i];
    }
    for (int path = RST_BASE64_PORTABLE; path <= RST_BASE64_NEON; path++) {
        const char *name = rst_base64_path_name((enum rst_base64_path)path);
        assert_int_equal(path_with_setting(name), is_available(path) ? path : fastest);
    }
    assert_int_equal(path_with_setting(NULL), fastest);
    assert_int_equal(path_with_setting(""), fastest);
    assert_int_equal(path_with_setting("auto"), fastest);
    assert_int_equal(path_with_setting("Portable"), fastest);
}

static void *decode_in_a_thread(void *start)
{
    pthread_barrier_wait(start);
    uint8_t out[300];
    char text[400];
    memset(text, 'Q', sizeof text);
    int status = rst_base64_decode(text, sizeof text, out, sizeof out, NULL);
    return status == RST_BASE64_OK && out[299] == 0x10 ? start : NULL;
}

static void test_threads_may_come_first_at_once(void **state)
{
    (void)state;
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        enum { THREADS = 8 };
        pthread_t threads[THREADS];
        pthread_barrier_t start;
        pthread_barrier_init(&start, NULL, THREADS);
        for (int i = 0; i < THREADS; i++) {
            if (pthread_create(&threads[i], NULL, decode_in_a_thread, &start))
                _exit(2);
        }
        for (int i = 0; i < THREADS; i++) {
            void *result;
            if (pthread_join(threads[i], &result) || result != &start)
                _exit(3);
        }
        _exit(0);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

static void test_a_path_that_is_not_there_is_refused(void **state)
{
    (void)state;
    assert_int_equal(rst_base64_force(RST_BASE64_PORTABLE), 0);
    unsigned built_paths = 1U << RST_BASE64_AUTO;
    for (size_t i = 0; i < BUILT_COUNT; i++)
        built_paths |= 1U << built[i];
    assert_int_equal(rst_base64_paths_available() & ~built_paths, 0);
    assert_true(is_available(RST_BASE64_AUTO) && is_available(RST_BASE64_PORTABLE));
    for (int path = 0; path < 32; path++) {
        if (is_available(path))
            continue;
        assert_int_equal(rst_base64_force((enum rst_base64_path)path), -1);
        assert_int_equal(rst_base64_active_path(), RST_BASE64_PORTABLE);
    }
}

static void test_every_path_has_its_name(void **state)
{
    (void)state;
    static const char *const names[] = {"auto", "portable", "avx2", "avx512", "neon"};
    for (int path = 0; path < 5; path++)
        assert_string_equal(rst_base64_path_name((enum rst_base64_path)path), names[path]);
    assert_null(rst_base64_path_name((enum rst_base64_path)5));
}

static size_t counted;

static size_t counting_kernel(const uint8_t *text, size_t size, uint8_t *out)
{
    counted += size;
    return rst_base64_kernel_portable(text, size, out);
}

static void test_decoding_runs_the_active_kernel(void **state)
{
    (void)state;
    for (size_t i = 0; i < BUILT_COUNT; i++) {
        if (!is_available((int)built[i]))
            continue;
        assert_int_equal(rst_base64_force(built[i]), 0);
        assert_int_equal(rst_base64_active_path(), built[i]);
        assert_int_equal(rst_base64_active_entry()->id, built[i]);
    }
    const struct rst_base64_path_entry entry = {RST_BASE64_PORTABLE, "counting", counting_kernel};
    rst_base64_use_entry(&entry);
    counted = 0;
    uint8_t out[6];
    assert_int_equal(rst_base64_decode("QUJDREVG", 8, out, 6, NULL), RST_BASE64_OK);
    assert_int_equal(counted, 8);
    assert_int_equal(rst_base64_decode("QUJDREU=", 8, out, 5, NULL), RST_BASE64_OK);
    assert_int_equal(counted, 12);
    assert_int_equal(rst_base64_force(RST_BASE64_AUTO), 0);
    assert_int_equal(rst_base64_decode("QUJDREVG", 8, out, 6, NULL), RST_BASE64_OK);
    assert_int_equal(counted, 12);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        /* These two first: they need a process that has not decoded yet. */
        cmocka_unit_test(test_the_setting_chooses_the_path),
        cmocka_unit_test(test_threads_may_come_first_at_once),
        cmocka_unit_test(test_a_path_that_is_not_there_is_refused),
        cmocka_unit_test(test_every_path_has_its_name),
        cmocka_unit_test(test_decoding_runs_the_active_kernel),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
