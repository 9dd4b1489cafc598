/*
 * The decoder's NEON path (AArch64, where every processor has it): 64 characters to 48 bytes a turn
 * of the loop.
 *
 * LD4 and ST3 do the work that takes shuffles elsewhere: they hand over the first, second, third
 * and fourth character of 16 groups in a register each, and take back the first, second and third
 * byte.  They read 64 and write 48 bytes, none ahead.
 *
 * TBL looks up in 64 entries and gives 0 beyond them; TBX leaves the destination beyond them.  So
 * the two halves of ASCII are looked up one after the other.  A character above ASCII is in neither
 * and would pass for 0: its own top bit marks it, as entries outside the alphabet are marked.
 */
#include "base64/base64_kernel.h"

#ifdef RST_BASE64_HAVE_NEON

#include <arm_neon.h>

static const uint8_t values[128] = {RST_BASE64_128(RST_BASE64_VALUE, 0)};

static inline uint8x16_t translate(uint8x16_t text, uint8x16x4_t first, uint8x16x4_t second,
                                   uint8x16_t *bad)
{
    uint8x16_t v = vqtbl4q_u8(first, text);
    v = vqtbx4q_u8(v, second, veorq_u8(text, vdupq_n_u8(64))); /* 64..127 become 0..63 */
    *bad = vorrq_u8(*bad, vorrq_u8(v, text));
    return v;
}

size_t rst_base64_kernel_neon(const uint8_t *text, size_t size, uint8_t *out)
{
    const uint8x16x4_t first = vld1q_u8_x4(values);
    const uint8x16x4_t second = vld1q_u8_x4(values + 64);

    size_t done = 0;
    for (; size - done >= 64; done += 64, out += 48) {
        uint8x16x4_t characters = vld4q_u8(text + done);
        uint8x16_t bad = vdupq_n_u8(0);
        uint8x16_t a = translate(characters.val[0], first, second, &bad);
        uint8x16_t b = translate(characters.val[1], first, second, &bad);
        uint8x16_t c = translate(characters.val[2], first, second, &bad);
        uint8x16_t d = translate(characters.val[3], first, second, &bad);
        if (vmaxvq_u8(bad) >= RST_BASE64_NO_VALUE)
            break;
        uint8x16x3_t bytes;
        bytes.val[0] = vsliq_n_u8(vshrq_n_u8(b, 4), a, 2); /* a << 2 | b >> 4 */
        bytes.val[1] = vsliq_n_u8(vshrq_n_u8(c, 2), b, 4); /* b << 4 | c >> 2 */
        bytes.val[2] = vsliq_n_u8(d, c, 6);                /* c << 6 | d */
        vst3q_u8(out, bytes);
    }
    return done;
}

#else
typedef int rst_base64_neon_is_empty_here; /* ISO C has no empty source files */
#endif
