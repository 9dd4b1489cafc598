/* What several tests need: a folder of their own, and turns with plausible contents. */
#ifndef RST_TESTS_SUPPORT_H
#define RST_TESTS_SUPPORT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <rollstore/rollstore.h>

/* A new folder under /dev/shm (ROLLSTORE_TEST_DIR when set); free() the path after
 * support_remove_folder. */
char *support_make_folder(void);
void support_remove_folder(char *folder);

/* folder/name in a static buffer of its own for each of the last 8 calls. */
const char *support_path(const char *folder, const char *name);

/* xorshift; the same seed gives the same numbers. */
uint64_t support_random(uint64_t *state);

/* Fill the record with n tokens of k candidates made from `seed`, a prompt of prompt_count ids, and
 * a weight version. */
void support_fill(rst_record *record, uint32_t n, uint32_t k, uint64_t seed, const int32_t *prompt,
                  size_t prompt_count, const char *weight_version);

/* Fails the test with the error's message unless code is RST_OK. */
#define assert_ok(code, error) support_assert_ok((code), &(error), __FILE__, __LINE__)
void support_assert_ok(int code, const rst_error *error, const char *file, int line);

/* The call gave this code, and an error that says so in words. */
#define assert_code(want, code, error)                                                             \
    support_assert_code((want), (code), &(error), __FILE__, __LINE__)
void support_assert_code(int want, int code, const rst_error *error, const char *file, int line);

/* rst_store_verify finds nothing; faults are printed. */
void support_assert_sound(rst_store *store);

#endif
