#include "damaged.h"

#include <stdlib.h>
#include <string.h>

#define CAPACITY_FIRST 64

/* Where the key stands, or the empty place where it would. */
static size_t place_of(const damaged_set *set, const uint8_t key[RST_KEY_SIZE])
{
    size_t place;
    memcpy(&place, key, sizeof place); /* the key is a hash already */
    for (place &= set->capacity - 1; set->used[place]; place = (place + 1) & (set->capacity - 1)) {
        if (memcmp(set->keys[place], key, RST_KEY_SIZE) == 0) {
            break;
        }
    }
    return place;
}

static bool grow(damaged_set *set)
{
    damaged_set grown = {.capacity = set->capacity ? set->capacity * 2 : CAPACITY_FIRST};
    grown.keys = malloc(grown.capacity * sizeof *grown.keys);
    grown.used = calloc(grown.capacity, sizeof *grown.used);
    if (!grown.keys || !grown.used) {
        damaged_free(&grown);
        return false;
    }
    for (size_t i = 0; i < set->capacity; i++) {
        if (set->used[i]) {
            size_t place = place_of(&grown, set->keys[i]);
            memcpy(grown.keys[place], set->keys[i], RST_KEY_SIZE);
            grown.used[place] = true;
        }
    }
    grown.count = set->count;
    damaged_free(set);
    *set = grown;
    return true;
}

bool damaged_add(damaged_set *set, const uint8_t key[RST_KEY_SIZE])
{
    if (2 * (set->count + 1) > set->capacity && !grow(set)) {
        return false;
    }
    size_t place = place_of(set, key);
    if (!set->used[place]) {
        memcpy(set->keys[place], key, RST_KEY_SIZE);
        set->used[place] = true;
        set->count++;
    }
    return true;
}

bool damaged_has(const damaged_set *set, const uint8_t key[RST_KEY_SIZE])
{
    return set->count && set->used[place_of(set, key)];
}

void damaged_free(damaged_set *set)
{
    free(set->keys);
    free(set->used);
    memset(set, 0, sizeof *set);
}
