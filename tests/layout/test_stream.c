/* Copying past the caches writes what memcpy writes, and nothing beside it. */
#include "support.h"

#include <string.h>

#include "layout/stream.h"

#define ROOM 1024

static void test_every_place_and_size(void **state)
{
    (void)state;
    unsigned char from[ROOM];
    unsigned char to[ROOM];
    unsigned char want[ROOM];
    for (size_t i = 0; i < ROOM; i++) {
        from[i] = (unsigned char)(i * 7 + i / 256);
    }
    for (size_t begin = 0; begin < 80; begin++) {
        for (size_t size = 0; size <= 400; size++) {
            memset(to, 0xA5, ROOM);
            memset(want, 0xA5, ROOM);
            memcpy(want + begin, from + size % 67, size);
            rst_stream_copy(to + begin, from + size % 67, size);
            rst_stream_done();
            assert_memory_equal(to, want, ROOM);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_every_place_and_size)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
