/* The decoder: which path it takes, what surrounds a path's whole groups, and its faults. */
#include "base64/base64.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base64/base64_kernel.h"

/* ---- Paths ---- */

/* Slowest first.  Those that the compiler's target cannot have are not here. */
static const struct rst_base64_path_entry paths[] = {
    {RST_BASE64_PORTABLE, "portable", rst_base64_kernel_portable},
#ifdef RST_BASE64_HAVE_X86
    {RST_BASE64_AVX2, "avx2", rst_base64_kernel_avx2},
    {RST_BASE64_AVX512, "avx512", rst_base64_kernel_avx512},
#endif
#ifdef RST_BASE64_HAVE_NEON
    {RST_BASE64_NEON, "neon", rst_base64_kernel_neon},
#endif
};
#define PATH_COUNT (sizeof paths / sizeof paths[0])

/* What the processor and the environment say, found once; and what decoding uses.  Both are NULL
 * until then.  They point at constants, so no order between the two or with other data matters, and
 * threads that come first at once all find the same. */
static _Atomic(const struct rst_base64_path_entry *) first_choice;
static _Atomic(const struct rst_base64_path_entry *) active;

static int processor_can_run(enum rst_base64_path id)
{
#ifdef RST_BASE64_HAVE_X86
    /* These ask the operating system too, whether it saves the wide registers. */
    __builtin_cpu_init();
    if (id == RST_BASE64_AVX2)
        return __builtin_cpu_supports("avx2") != 0;
    if (id == RST_BASE64_AVX512)
        return __builtin_cpu_supports("avx512bw") != 0 && __builtin_cpu_supports("avx512vbmi") != 0;
#endif
    (void)id;
    return 1;
}

static const struct rst_base64_path_entry *choose(void)
{
    const struct rst_base64_path_entry *chosen =
        atomic_load_explicit(&first_choice, memory_order_relaxed);
    if (chosen)
        return chosen;
    const char *setting = getenv(RST_BASE64_SETTING);
    for (size_t i = 0; i < PATH_COUNT; i++) {
        if (!processor_can_run(paths[i].id))
            continue;
        chosen = &paths[i];
        if (setting && strcmp(setting, chosen->name) == 0)
            break;
    }
    const struct rst_base64_path_entry *expected = NULL;
    if (!atomic_compare_exchange_strong(&first_choice, &expected, chosen))
        chosen = expected;
    return chosen;
}

const struct rst_base64_path_entry *rst_base64_active_entry(void)
{
    const struct rst_base64_path_entry *path = atomic_load_explicit(&active, memory_order_relaxed);
    if (path)
        return path;
    const struct rst_base64_path_entry *chosen = choose();
    /* A path that another thread has forced meanwhile stays. */
    if (atomic_compare_exchange_strong(&active, &path, chosen))
        return chosen;
    return path;
}

void rst_base64_use_entry(const struct rst_base64_path_entry *entry)
{
    atomic_store(&active, entry);
}

unsigned rst_base64_paths_available(void)
{
    unsigned available = 1U << RST_BASE64_AUTO;
    for (size_t i = 0; i < PATH_COUNT; i++) {
        if (processor_can_run(paths[i].id))
            available |= 1U << paths[i].id;
    }
    return available;
}

int rst_base64_force(enum rst_base64_path path)
{
    if (path == RST_BASE64_AUTO) {
        rst_base64_use_entry(choose());
        return 0;
    }
    for (size_t i = 0; i < PATH_COUNT; i++) {
        if (paths[i].id == path && processor_can_run(path)) {
            rst_base64_use_entry(&paths[i]);
            return 0;
        }
    }
    return -1;
}

enum rst_base64_path rst_base64_active_path(void)
{
    return rst_base64_active_entry()->id;
}

const char *rst_base64_path_name(enum rst_base64_path path)
{
    /* Not from `paths`: a name is a name on every processor. */
    switch (path) {
    case RST_BASE64_AUTO:
        return "auto";
    case RST_BASE64_PORTABLE:
        return "portable";
    case RST_BASE64_AVX2:
        return "avx2";
    case RST_BASE64_AVX512:
        return "avx512";
    case RST_BASE64_NEON:
        return "neon";
    }
    return NULL;
}

/* ---- Decoding ---- */

const char *rst_base64_status_text(int status)
{
    switch (status) {
    case RST_BASE64_BAD_BYTE:
        return "a byte outside the base64 alphabet";
    case RST_BASE64_BAD_PADDING:
        return "misplaced or absent base64 padding";
    case RST_BASE64_BAD_BITS:
        return "base64 with bits after its last byte";
    case RST_BASE64_OUT_SIZE:
        return "a buffer of another size than the base64 text decodes to";
    default:
        return "";
    }
}

static size_t padding_size(const uint8_t *text, size_t size)
{
    if (size == 0 || size % 4 != 0 || text[size - 1] != '=')
        return 0;
    return text[size - 2] == '=' ? 2 : 1;
}

/* The fault of a text that has one, and whose first `good` bytes are all in the alphabet. */
static int find_fault(const uint8_t *text, size_t size, size_t good, size_t *bad_offset)
{
    size_t end = size - padding_size(text, size);
    size_t at = good;
    while (at < end && rst_base64_value(text[at]) != RST_BASE64_NO_VALUE)
        at++;

    int status = RST_BASE64_BAD_BITS;
    if (at < end) {
        status = text[at] == '=' ? RST_BASE64_BAD_PADDING : RST_BASE64_BAD_BYTE;
    } else if (size % 4 != 0) {
        status = RST_BASE64_BAD_PADDING;
    } else {
        at = end - 1;
    }
    if (bad_offset)
        *bad_offset = at;
    return status;
}

/* The last group, with `padding` (1 or 2) of its four characters.  Returns 0 where it is bad. */
static int decode_padded(const uint8_t *text, size_t padding, uint8_t *out)
{
    uint8_t a = rst_base64_value(text[0]);
    uint8_t b = rst_base64_value(text[1]);
    uint8_t c = padding == 1 ? rst_base64_value(text[2]) : 0;
    /* 18 bits: 16 are two bytes' and two spare, or 8 are one byte's and ten spare. */
    unsigned bits = (unsigned)a << 12 | (unsigned)b << 6 | c;
    unsigned spare = padding == 1 ? 0x003 : 0x3FF;
    if ((a | b | c) & RST_BASE64_NO_VALUE || bits & spare)
        return 0;
    out[0] = (uint8_t)(bits >> 10);
    if (padding == 1)
        out[1] = (uint8_t)(bits >> 2);
    return 1;
}

int rst_base64_decoded_size(const char *text, size_t size, size_t *decoded_size, size_t *bad_offset)
{
    const uint8_t *bytes = (const uint8_t *)text;
    if (size % 4 != 0)
        return find_fault(bytes, size, 0, bad_offset);
    *decoded_size = size / 4 * 3 - padding_size(bytes, size);
    return RST_BASE64_OK;
}

int rst_base64_decode(const char *text, size_t size, void *out, size_t out_size, size_t *bad_offset)
{
    size_t decoded_size = 0;
    int status = rst_base64_decoded_size(text, size, &decoded_size, bad_offset);
    if (status != RST_BASE64_OK)
        return status;
    if (out_size != decoded_size) {
        if (bad_offset)
            *bad_offset = size;
        return RST_BASE64_OUT_SIZE;
    }
    if (size == 0) /* text and out may be NULL then */
        return RST_BASE64_OK;

    const uint8_t *from = (const uint8_t *)text;
    uint8_t *to = out;
    size_t padding = padding_size(from, size);
    size_t whole = padding == 0 ? size : size - 4;
    size_t done = rst_base64_active_entry()->kernel(from, whole, to);
    done += rst_base64_kernel_portable(from + done, whole - done, to + done / 4 * 3);
    if (done < whole || (padding != 0 && !decode_padded(from + done, padding, to + done / 4 * 3)))
        return find_fault(from, size, done, bad_offset);
    return RST_BASE64_OK;
}
