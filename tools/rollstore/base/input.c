#include "input.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fail.h"

#define READ_SIZE_FIRST 65536

/* Room for one byte more than was read, so that the end of the file can be met. */
static bool grow(input_bytes *input, size_t *capacity, size_t max)
{
    if (input->size < *capacity) {
        return true;
    }
    size_t wanted = *capacity > max / 2 ? max + 1 : *capacity * 2;
    char *grown = realloc(input->bytes, wanted);
    if (!grown) {
        fail_system(ENOMEM, "reading");
        return false;
    }
    input->bytes = grown;
    *capacity = wanted;
    return true;
}

static bool read_all(input_bytes *input, int fd, const char *name, size_t max)
{
    struct stat status;
    size_t capacity = READ_SIZE_FIRST;
    if (fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && (uint64_t)status.st_size < max) {
        capacity = (size_t)status.st_size + 1;
    }
    input->bytes = malloc(capacity);
    if (!input->bytes) {
        fail_system(ENOMEM, name);
        return false;
    }
    for (;;) {
        if (!grow(input, &capacity, max)) {
            return false;
        }
        ssize_t got = read(fd, input->bytes + input->size, capacity - input->size);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) {
            fail_system(errno, name);
            return false;
        }
        if (got == 0) {
            return true;
        }
        input->size += (size_t)got;
        if (input->size > max) {
            fail("limit", "%s: more than %zu bytes", name, max);
            return false;
        }
    }
}

bool input_read(input_bytes *input, const char *path, size_t max)
{
    memset(input, 0, sizeof *input);
    if (!path || strcmp(path, "-") == 0) {
        return read_all(input, STDIN_FILENO, "standard input", max);
    }
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        fail_system(errno, path);
        return false;
    }
    bool good = read_all(input, fd, path, max);
    close(fd);
    return good;
}

void input_free(input_bytes *input)
{
    free(input->bytes);
    memset(input, 0, sizeof *input);
}
