/* What the long runs share: turns that can be told from their number, processes, and the end of it
 * all when something is wrong. */
#ifndef RST_TESTS_SOAK_COMMON_H
#define RST_TESTS_SOAK_COMMON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include <rollstore/rollstore.h>

/* A sanitizer keeps what is freed for a while, and records of everything: that memory grows says
 * nothing then.  The address sanitizer has a leak checker instead. */
#ifndef __has_feature
#define __has_feature(name) 0
#endif
#if defined(__SANITIZE_ADDRESS__) || __has_feature(address_sanitizer)
#define SOAK_LEAK_CHECKER 1
#else
#define SOAK_LEAK_CHECKER 0
#endif
#if SOAK_LEAK_CHECKER || defined(__SANITIZE_THREAD__) || __has_feature(thread_sanitizer)
#define SOAK_OTHER_ALLOCATOR 1
#else
#define SOAK_OTHER_ALLOCATOR 0
#endif

/* Say what is wrong, and end this process with status 1.  Its parent then ends the run. */
#define fail(...) soak_fail(__FILE__, __LINE__, __VA_ARGS__)
void soak_fail(const char *file, int line, const char *format, ...)
    __attribute__((noreturn, format(printf, 3, 4)));

/* The call succeeded, or fail with its error. */
#define must(code, error) soak_must((code), &(error), __FILE__, __LINE__)
void soak_must(int code, const rst_error *error, const char *file, int line);

uint64_t soak_random(uint64_t *seed);

/* A turn of about `size` bytes whose contents are made of `number`. */
void soak_fill(rst_record *record, uint64_t number, size_t size);

/* The turn is that one, to the last id and logprob. */
bool soak_is(const rst_turn *turn, uint64_t number, size_t size);

/* Memory that children share, zeroed. */
void *soak_shared(size_t size);

/* Run body(argument) in a child; it leaves when its parent does. */
pid_t soak_start(void (*body)(int argument), int argument);

/* Kill, and wait for the end.  It must have been running until then. */
void soak_kill(pid_t pid);

/* The child ends within that time, with status 0. */
void soak_join(pid_t pid, int64_t timeout_ms);

/* The child is still running; else fail. */
void soak_check_running(pid_t pid);

/* A new folder under `parent`; and its end, with all in it. */
void soak_make_folder(const char *parent, char folder[256]);
void soak_remove(const char *folder);

rst_store *soak_open(const char *path, unsigned flags);

/* Verify the whole store; fail at the first fault. */
void soak_verify(rst_store *store);

/* "memory", "interval", "full"; RST_DURABILITY_* or fail. */
rst_durability soak_durability(const char *name);

int64_t soak_now_ms(void);
void soak_sleep_us(int64_t us);

#endif
