/* The decoder's path for any processor, and the one that finds the byte at fault for all others. */
#include "base64/base64_kernel.h"

#include <string.h>

/* A group's 24 bits are the or of one entry from each table: a character's six bits, in its place
 * in the group.  BAD lies above the 24 bits, so one test a group sees a bad character anywhere in
 * it.  Four tables of 1 KB take four loads and no shifts, and leave most of a first-level cache to
 * the text. */
#define BAD 0x80000000U
#define ENTRY(c, shift)                                                                            \
    (RST_BASE64_VALUE(c) == RST_BASE64_NO_VALUE ? BAD : (uint32_t)RST_BASE64_VALUE(c) << (shift))
#define ENTRY_0(c) ENTRY(c, 18)
#define ENTRY_1(c) ENTRY(c, 12)
#define ENTRY_2(c) ENTRY(c, 6)
#define ENTRY_3(c) ENTRY(c, 0)

static const uint32_t place_0[256] = {RST_BASE64_128(ENTRY_0, 0), RST_BASE64_128(ENTRY_0, 128)};
static const uint32_t place_1[256] = {RST_BASE64_128(ENTRY_1, 0), RST_BASE64_128(ENTRY_1, 128)};
static const uint32_t place_2[256] = {RST_BASE64_128(ENTRY_2, 0), RST_BASE64_128(ENTRY_2, 128)};
static const uint32_t place_3[256] = {RST_BASE64_128(ENTRY_3, 0), RST_BASE64_128(ENTRY_3, 128)};

uint8_t rst_base64_value(uint8_t character)
{
    uint32_t entry = place_3[character];
    return entry == BAD ? RST_BASE64_NO_VALUE : (uint8_t)entry;
}

static inline uint32_t group(const uint8_t *text)
{
    return place_0[text[0]] | place_1[text[1]] | place_2[text[2]] | place_3[text[3]];
}

/* The 48 bits of two groups, most significant byte first.  Compilers make this one swap and one
 * store of eight bytes: two more than the groups have. */
static inline void store_48_of_64(uint8_t *out, uint32_t first, uint32_t second)
{
    uint64_t bits = ((uint64_t)first << 24 | second) << 16;
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    bits = __builtin_bswap64(bits);
    memcpy(out, &bits, sizeof bits);
#else
    for (int i = 0; i < 6; i++)
        out[i] = (uint8_t)(bits >> (56 - 8 * i));
#endif
}

size_t rst_base64_kernel_portable(const uint8_t *text, size_t size, uint8_t *out)
{
    size_t done = 0;
    /* Eight bytes are stored for six: the third group must be there to own the other two. */
    for (; size - done >= 12; done += 8, out += 6) {
        uint32_t first = group(text + done);
        uint32_t second = group(text + done + 4);
        if ((first | second) & BAD)
            break;
        store_48_of_64(out, first, second);
    }
    for (; done < size; done += 4, out += 3) {
        uint32_t bits = group(text + done);
        if (bits & BAD)
            break;
        out[0] = (uint8_t)(bits >> 16);
        out[1] = (uint8_t)(bits >> 8);
        out[2] = (uint8_t)bits;
    }
    return done;
}
