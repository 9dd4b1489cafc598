/* The sessions that have refused lines: what comes after those lines must not complete them. */
#ifndef TOOL_INGEST_DAMAGED_H
#define TOOL_INGEST_DAMAGED_H

#include <stdbool.h>
#include <stddef.h>

#include <rollstore/rollstore.h>

/* A set of session keys: a table of twice as many places as keys, searched from the key's own
 * place on. */
typedef struct damaged_set {
    uint8_t (*keys)[RST_KEY_SIZE];
    bool *used;
    size_t count;
    size_t capacity; /* a power of two, or 0 */
} damaged_set;

/* False when there is no memory. */
bool damaged_add(damaged_set *set, const uint8_t key[RST_KEY_SIZE]);
bool damaged_has(const damaged_set *set, const uint8_t key[RST_KEY_SIZE]);
void damaged_free(damaged_set *set);

#endif
