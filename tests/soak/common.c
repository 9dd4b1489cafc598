#include "common.h"

#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#if SOAK_LEAK_CHECKER
#include <sanitizer/lsan_interface.h>
#endif

void soak_fail(const char *file, int line, const char *format, ...)
{
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fprintf(stderr, "%s:%d: %s\n", file, line, text);
    fflush(NULL);
    _exit(1);
}

void soak_must(int code, const rst_error *error, const char *file, int line)
{
    if (code) {
        soak_fail(file, line, "%s: %s", rst_code_name(code), error->message);
    }
}

uint64_t soak_random(uint64_t *seed)
{
    uint64_t x = *seed += UINT64_C(0x9E3779B97F4A7C15);
    x = (x ^ x >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ x >> 27) * UINT64_C(0x94D049BB133111EB);
    return x ^ x >> 31;
}

/* ---------------------------------------------------------------- turns */

enum { TOPK = 16, BYTES_A_TOKEN = 8 * TOPK + 8 };

static uint32_t tokens_of(size_t size)
{
    return 1 + (uint32_t)(size / BYTES_A_TOKEN);
}

static int32_t token_id(uint64_t number, uint32_t i)
{
    uint64_t seed = number * 1000003 + i;
    return (int32_t)(soak_random(&seed) % 151936);
}

static float logprob(uint64_t number, uint32_t i)
{
    return -(float)((number * 31 + i) % 4096) / 256.0f;
}

static int32_t candidate(uint64_t number, uint32_t i, uint32_t slot)
{
    return (int32_t)((number * 7 + i) % 100000 + slot * 5);
}

void soak_fill(rst_record *record, uint64_t number, size_t size)
{
    uint32_t n = tokens_of(size);
    int32_t *ids = malloc(4 * (size_t)n);
    float *logprobs = malloc(4 * (size_t)n);
    int32_t *top_ids = malloc(4 * (size_t)n * TOPK);
    float *top_logprobs = malloc(4 * (size_t)n * TOPK);
    if (!ids || !logprobs || !top_ids || !top_logprobs) {
        fail("no memory");
    }
    for (uint32_t i = 0; i < n; i++) {
        ids[i] = token_id(number, i);
        logprobs[i] = logprob(number, i);
        for (uint32_t j = 0; j < TOPK; j++) {
            top_ids[i * TOPK + j] = candidate(number, i, j);
            top_logprobs[i * TOPK + j] = logprob(number, i + j);
        }
    }
    rst_turn turn = {.token_count = n,
                     .topk = TOPK,
                     .token_ids = ids,
                     .token_logprobs = logprobs,
                     .topk_ids = top_ids,
                     .topk_logprobs = top_logprobs,
                     .temperature = 1.0f,
                     .finish = RST_FINISH_STOP};
    rst_error error;
    must(rst_record_set(record, &turn, &error), error);
    free(ids);
    free(logprobs);
    free(top_ids);
    free(top_logprobs);
}

bool soak_is(const rst_turn *turn, uint64_t number, size_t size)
{
    if (turn->token_count != tokens_of(size) || turn->topk != TOPK) {
        return false;
    }
    for (uint32_t i = 0; i < turn->token_count; i++) {
        if (turn->token_ids[i] != token_id(number, i) ||
            turn->token_logprobs[i] < logprob(number, i) ||
            turn->token_logprobs[i] > logprob(number, i)) {
            return false;
        }
        for (uint32_t j = 0; j < TOPK; j++) {
            float want = logprob(number, i + j);
            if (turn->topk_ids[i * TOPK + j] != candidate(number, i, j) ||
                memcmp(&turn->topk_logprobs[i * TOPK + j], &want, sizeof want) != 0) {
                return false;
            }
        }
    }
    return true;
}

/* ---------------------------------------------------------------- processes */

void *soak_shared(size_t size)
{
    void *memory =
        mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        fail("no shared memory");
    }
    return memory;
}

/* A child ends without the parent's atexit handlers, and so without the leak checker's. */
static void check_leaks(void)
{
#if SOAK_LEAK_CHECKER
    __lsan_do_leak_check(); /* ends the process when there are some */
#endif
}

pid_t soak_start(void (*body)(int argument), int argument)
{
    fflush(NULL);
    pid_t parent = getpid();
    pid_t pid = fork();
    if (pid < 0) {
        fail("fork: %s", strerror(errno));
    }
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) {
            _exit(1);
        }
        body(argument);
        check_leaks();
        _exit(0);
    }
    return pid;
}

void soak_check_running(pid_t pid)
{
    int status;
    if (waitpid(pid, &status, WNOHANG) != 0) {
        fail("process %ld ended by itself (status 0x%x)", (long)pid, (unsigned)status);
    }
}

void soak_join(pid_t pid, int64_t timeout_ms)
{
    int status;
    int64_t until = soak_now_ms() + timeout_ms;
    while (waitpid(pid, &status, WNOHANG) == 0) {
        if (soak_now_ms() > until) {
            fail("process %ld does not end", (long)pid);
        }
        soak_sleep_us(1000);
    }
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
        fail("process %ld ended with status 0x%x", (long)pid, (unsigned)status);
    }
}

void soak_kill(pid_t pid)
{
    int status;
    kill(pid, SIGKILL);
    if (waitpid(pid, &status, 0) != pid || !WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL) {
        fail("process %ld ended by itself (status 0x%x)", (long)pid, (unsigned)status);
    }
}

/* ---------------------------------------------------------------- stores */

void soak_make_folder(const char *parent, char folder[256])
{
    int length = snprintf(folder, 256, "%s/rollstore-soak-XXXXXX", parent);
    if (length >= 256 || !mkdtemp(folder)) {
        fail("no folder can be made in %s: %s", parent, strerror(errno));
    }
}

void soak_remove(const char *folder)
{
    char command[600];
    snprintf(command, sizeof command, "rm -rf -- '%s'", folder);
    if (system(command) != 0) {
        fail("%s cannot be removed", folder);
    }
}

rst_store *soak_open(const char *path, unsigned flags)
{
    rst_store *store;
    rst_error error;
    must(rst_store_open(path, flags, NULL, &store, &error), error);
    return store;
}

static void on_fault(void *context, const rst_error *fault)
{
    (void)context;
    fail("fault: %s", fault->message);
}

void soak_verify(rst_store *store)
{
    rst_verify_options options = {.fault = on_fault};
    rst_verify_result result;
    rst_error error;
    must(rst_store_verify(store, &options, &result, &error), error);
}

rst_durability soak_durability(const char *name)
{
    static const char *const names[] = {"memory", "interval", "full"};
    for (int i = 0; i < 3; i++) {
        if (strcmp(name, names[i]) == 0) {
            return (rst_durability)(RST_DURABILITY_MEMORY + i);
        }
    }
    fail("durability \"%s\": memory, interval or full", name);
}

int64_t soak_now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

void soak_sleep_us(int64_t us)
{
    struct timespec pause = {.tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000};
    while (nanosleep(&pause, &pause) != 0) {
    }
}
