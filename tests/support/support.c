#include "support.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

char *support_make_folder(void)
{
    const char *parent = getenv("ROLLSTORE_TEST_DIR");
    char path[256];
    snprintf(path, sizeof path, "%s/rollstore-test-XXXXXX", parent ? parent : "/dev/shm");
    if (!mkdtemp(path)) {
        fail_msg("no folder for the test at %s", path);
    }
    return strdup(path);
}

void support_remove_folder(char *folder)
{
    char command[512];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    assert_int_equal(system(command), 0);
    free(folder);
}

const char *support_path(const char *folder, const char *name)
{
    static char paths[8][512];
    static unsigned next;
    char *path = paths[next++ % 8];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

uint64_t support_random(uint64_t *state)
{
    uint64_t x = *state + UINT64_C(0x9E3779B97F4A7C15);
    *state = x;
    x = (x ^ x >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ x >> 27) * UINT64_C(0x94D049BB133111EB);
    return x ^ x >> 31;
}

void support_fill(rst_record *record, uint32_t n, uint32_t k, uint64_t seed, const int32_t *prompt,
                  size_t prompt_count, const char *weight_version)
{
    size_t slots = (size_t)n * k;
    int32_t *token_ids = malloc(4 * (n + 1));
    float *token_logprobs = malloc(4 * (n + 1));
    int32_t *topk_ids = malloc(4 * (slots + 1));
    float *topk_logprobs = malloc(4 * (slots + 1));
    uint64_t state = seed;
    for (uint32_t i = 0; i < n; i++) {
        token_ids[i] = (int32_t)(support_random(&state) % 151936);
        token_logprobs[i] = -(float)(support_random(&state) % 1000) / 100.0f;
        int32_t first = (int32_t)(support_random(&state) % 100000);
        for (uint32_t j = 0; j < k; j++) {
            topk_ids[(size_t)i * k + j] = first + (int32_t)j * 7;
            topk_logprobs[(size_t)i * k + j] = -(float)j * 0.25f;
        }
    }
    rst_turn turn = {.token_count = n,
                     .topk = k,
                     .token_ids = token_ids,
                     .token_logprobs = token_logprobs,
                     .topk_ids = topk_ids,
                     .topk_logprobs = topk_logprobs,
                     .prompt_ids = prompt,
                     .prompt_count = (uint32_t)prompt_count,
                     .temperature = 1.0f,
                     .finish = RST_FINISH_STOP,
                     .weight_version = weight_version,
                     .weight_version_size = weight_version ? (uint32_t)strlen(weight_version) : 0};
    rst_error error;
    assert_ok(rst_record_set(record, &turn, &error), error);
    free(token_ids);
    free(token_logprobs);
    free(topk_ids);
    free(topk_logprobs);
}

void support_assert_ok(int code, const rst_error *error, const char *file, int line)
{
    if (code) {
        print_error("%s: %s\n", rst_code_name(code), error->message);
        _fail(file, line);
    }
}

void support_assert_code(int want, int code, const rst_error *error, const char *file, int line)
{
    if (code != want || error->code != want || error->message[0] == '\0') {
        print_error("wanted %s, got %s: %s\n", rst_code_name(want), rst_code_name(code),
                    code ? error->message : "");
        _fail(file, line);
    }
}

static void print_fault(void *context, const rst_error *fault)
{
    (void)context;
    print_error("fault: %s\n", fault->message);
}

void support_assert_sound(rst_store *store)
{
    rst_error error;
    rst_verify_options options = {.fault = print_fault};
    rst_verify_result result;
    assert_ok(rst_store_verify(store, &options, &result, &error), error);
    assert_int_equal(result.fault_count, 0);
}
