/* The NEON kernel against the portable one: every length, with every byte damaged in turn. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base64/base64_kernel.h"

enum { LONGEST = 512, NEON_BLOCK = 64 };

static int faults;

static void fail(const char *what, size_t size, size_t at)
{
    printf("%s: %zu characters, damaged at %zu\n", what, size, at);
    faults++;
}

/* In blocks of its exact size; behind a vector kernel comes the portable one, as in the library. */
static size_t decode(rst_base64_kernel kernel, const char *text, size_t size,
                     unsigned char *decoded)
{
    uint8_t *exact = malloc(size + 1);
    if (!exact) {
        abort();
    }
    memcpy(exact, text, size);
    size_t done = kernel(exact, size, decoded);
    if (done % 4 || done > size) {
        fail("an impossible count", size, done);
        abort();
    }
    done += rst_base64_kernel_portable(exact + done, size - done, decoded + done / 4 * 3);
    free(exact);
    return done;
}

static void compare(const char *text, size_t size, size_t damaged)
{
    unsigned char wanted[LONGEST];
    unsigned char got[LONGEST];
    memset(got, 0xAA, sizeof got);
    size_t portable = decode(rst_base64_kernel_portable, text, size, wanted);
    size_t neon = decode(rst_base64_kernel_neon, text, size, got);
    if (portable != neon || memcmp(wanted, got, portable / 4 * 3) != 0) {
        fail("other bytes", size, damaged);
    }
    if (got[size / 4 * 3] != 0xAA) {
        fail("written past the end", size, damaged);
    }
}

int main(void)
{
    static const char alphabet[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    char text[LONGEST] = "";
    unsigned decoded_by_neon = 0;
    for (size_t size = 0; size <= LONGEST; size += 4) {
        for (size_t i = 0; i < size; i++) {
            text[i] = alphabet[rand() % 64];
        }
        compare(text, size, size);
        for (size_t i = 0; i < size; i++) {
            char before = text[i];
            text[i] = (char)rand();
            compare(text, size, i);
            text[i] = before;
        }
        unsigned char out[LONGEST];
        decoded_by_neon += rst_base64_kernel_neon((const uint8_t *)text, size, out) > 0;
    }
    for (int byte = 0; byte < 256; byte++) { /* each in each lane */
        for (size_t i = 0; i < NEON_BLOCK; i++) {
            memset(text, 'A', NEON_BLOCK);
            text[i] = (char)byte;
            compare(text, NEON_BLOCK, i);
        }
    }
    if (decoded_by_neon != (LONGEST - NEON_BLOCK) / 4 + 1) {
        printf("the NEON kernel decoded %u texts only\n", decoded_by_neon);
        faults++;
    }
    printf("neon: %d faults\n", faults);
    return faults != 0;
}
