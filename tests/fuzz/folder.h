/* A folder of a target's own process, for a store. */
#ifndef RST_TESTS_FUZZ_FOLDER_H
#define RST_TESTS_FUZZ_FOLDER_H

#include <unistd.h>

#include "fuzz.h"

static char folder[256];

static void remove_folder(void)
{
    char command[300];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    if (system(command) != 0) {
        fprintf(stderr, "%s is left behind\n", folder);
    }
}

/* In ROLLSTORE_TEST_DIR, else in /dev/shm. */
static void make_folder(void)
{
    const char *parent = getenv("ROLLSTORE_TEST_DIR");
    int length =
        snprintf(folder, sizeof folder, "%s/rollstore-fuzz-XXXXXX", parent ? parent : "/dev/shm");
    must(length > 0 && (size_t)length < sizeof folder && mkdtemp(folder) != NULL);
    atexit(remove_folder);
}

#endif
