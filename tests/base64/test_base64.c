/* Base64: every path gives the same bytes or the same fault, and stays within its buffers. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base64/base64.h"
#include "base64/base64_kernel.h"
#include "base64_plain.h"

/* ---- The paths under test ---- */

struct path_case {
    enum rst_base64_path id;
    const char *name;
    rst_base64_kernel kernel;
    size_t block; /* most characters that a turn of the kernel's loop takes */
    size_t left;  /* most characters that it leaves to the portable kernel */
};

static const struct path_case path_cases[] = {
    {RST_BASE64_PORTABLE, "portable", rst_base64_kernel_portable, 4, 0},
#ifdef RST_BASE64_HAVE_X86
    {RST_BASE64_AVX2, "avx2", rst_base64_kernel_avx2, 128, 28},
    {RST_BASE64_AVX512, "avx512", rst_base64_kernel_avx512, 256, 0},
#endif
#ifdef RST_BASE64_HAVE_NEON
    {RST_BASE64_NEON, "neon", rst_base64_kernel_neon, 64, 60},
#endif
};

/* Makes decoding take the path that a test was registered for, and sees that it does. */
static const struct path_case *take_path(void **state)
{
    const struct path_case *path = *state;
    if (!(rst_base64_paths_available() >> path->id & 1))
        skip();
    assert_int_equal(rst_base64_force(path->id), 0);
    assert_int_equal(rst_base64_active_path(), path->id);
    assert_ptr_equal(rst_base64_active_entry()->kernel, path->kernel);
    return path;
}

/* ---- Both directions, on good texts ---- */

static void assert_decodes(const char *text, size_t text_size, const uint8_t *bytes, size_t size)
{
    size_t decoded_size = SIZE_MAX;
    assert_int_equal(rst_base64_decoded_size(text, text_size, &decoded_size, NULL), RST_BASE64_OK);
    assert_int_equal(decoded_size, size);
    uint8_t *out = exact(size);
    memset(out, 0xEE, size);
    assert_int_equal(rst_base64_decode(text, text_size, out, size, NULL), RST_BASE64_OK);
    if (size > 0)
        assert_memory_equal(out, bytes, size);
    free(out);
}

static void test_rfc_4648_vectors(void **state)
{
    take_path(state);
    static const char *const vectors[][2] = {{"", ""},
                                             {"f", "Zg=="},
                                             {"fo", "Zm8="},
                                             {"foo", "Zm9v"},
                                             {"foob", "Zm9vYg=="},
                                             {"fooba", "Zm9vYmE="},
                                             {"foobar", "Zm9vYmFy"}};
    for (size_t i = 0; i < COUNT(vectors); i++) {
        const char *bytes = vectors[i][0];
        const char *text = vectors[i][1];
        assert_decodes(text, strlen(text), (const uint8_t *)bytes, strlen(bytes));
        char out[9] = "????????";
        rst_base64_encode(bytes, strlen(bytes), out);
        assert_memory_equal(out, text, strlen(text));
        assert_int_equal(out[strlen(text)], strlen(text) == 8 ? 0 : '?');
    }
}

static void test_every_length(void **state)
{
    take_path(state);
    for (size_t size = 0; size <= 1000; size++) {
        uint8_t *bytes = random_bytes(size);
        size_t text_size;
        char *text = encoded(bytes, size, &text_size);
        assert_decodes(text, text_size, bytes, size);

        char *other = exact(size + 1);
        assert_int_equal(libb64_decode(text, text_size, other), size);
        assert_memory_equal(other, bytes, size);

        free(other);
        free(text);
        free(bytes);
    }
}

static void test_every_alignment(void **state)
{
    take_path(state);
    static const size_t sizes[] = {49, 244, 490};
    for (size_t i = 0; i < COUNT(sizes); i++) {
        size_t size = sizes[i];
        uint8_t *bytes = random_bytes(size);
        size_t text_size;
        char *text = encoded(bytes, size, &text_size);
        for (size_t in_shift = 0; in_shift < 64; in_shift++) {
            void *in;
            assert_int_equal(posix_memalign(&in, 64, in_shift + text_size), 0);
            char *shifted = (char *)in + in_shift;
            memcpy(shifted, text, text_size);
            for (size_t out_shift = 0; out_shift < 64; out_shift++) {
                void *out;
                assert_int_equal(posix_memalign(&out, 64, out_shift + size), 0);
                memset(out, 0xEE, out_shift + size);
                uint8_t *to = (uint8_t *)out + out_shift;
                assert_int_equal(rst_base64_decode(shifted, text_size, to, size, NULL), 0);
                assert_memory_equal(to, bytes, size);
                for (size_t j = 0; j < out_shift; j++)
                    assert_int_equal(((uint8_t *)out)[j], 0xEE);
                free(out);
            }
            free(in);
        }
        free(text);
        free(bytes);
    }
}

/* `pages` pages, with one before and one after that may not be touched. */
static uint8_t *guarded(size_t pages, size_t *size)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    uint8_t *map = mmap(NULL, (pages + 2) * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(map, MAP_FAILED);
    assert_int_equal(mprotect(map + page, pages * page, PROT_READ | PROT_WRITE), 0);
    *size = pages * page;
    return map + page;
}

/* The address sanitizer does not see masked loads and stores; the processor does.  What it does not
 * see, single bytes within a page, the bytes around the output show. */
static void test_nothing_outside_the_buffers_is_touched(void **state)
{
    take_path(state);
    size_t in_size;
    size_t out_size;
    uint8_t *in = guarded(1, &in_size);
    uint8_t *out = guarded(1, &out_size);
    for (size_t size = 1; size <= 800; size++) {
        uint8_t *bytes = random_bytes(size);
        size_t text_size;
        char *text = encoded(bytes, size, &text_size);
        for (int at_end = 0; at_end < 2; at_end++) {
            char *from = (char *)(at_end ? in + in_size - text_size : in);
            uint8_t *to = at_end ? out + out_size - size : out;
            memcpy(from, text, text_size);
            memset(out, 0xEE, out_size);
            assert_int_equal(rst_base64_decode(from, text_size, to, size, NULL), RST_BASE64_OK);
            assert_memory_equal(to, bytes, size);
            for (uint8_t *p = out; p < out + out_size; p++) {
                if (p < to || p >= to + size)
                    assert_int_equal(*p, 0xEE);
            }
        }
        free(text);
        free(bytes);
    }
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    assert_int_equal(munmap(in - page, in_size + 2 * page), 0);
    assert_int_equal(munmap(out - page, out_size + 2 * page), 0);
}

static void test_big_texts(void **state)
{
    take_path(state);
    static const size_t sizes[] = {65536, 262145, 1000001, 4194304};
    for (size_t i = 0; i < COUNT(sizes); i++) {
        size_t size = sizes[i];
        uint8_t *bytes = random_bytes(size);
        size_t text_size;
        char *text = encoded(bytes, size, &text_size);
        assert_decodes(text, text_size, bytes, size);

        char *other = exact(size + 1);
        assert_int_equal(libb64_decode(text, text_size, other), size);
        assert_memory_equal(other, bytes, size);
        free(other);

        uint8_t *out = exact(size);
        for (int j = 0; j < 8; j++) {
            size_t at = random_32() % (text_size - 4);
            char was = text[at];
            text[at] = '\n';
            size_t bad_offset = SIZE_MAX;
            assert_int_equal(rst_base64_decode(text, text_size, out, size, &bad_offset),
                             RST_BASE64_BAD_BYTE);
            assert_int_equal(bad_offset, at);
            text[at] = was;
        }
        free(out);
        free(text);
        free(bytes);
    }
}

/* ---- Faults ---- */

/* The text, good or not, gives on this path what plain_check says.  out has room for it. */
static void assert_same_verdict(const char *text, size_t size, uint8_t *out, size_t out_room)
{
    size_t expected_offset;
    int expected = plain_check(text, size, &expected_offset);
    size_t decoded_size = 0;
    size_t bad_offset = SIZE_MAX;
    int status = rst_base64_decoded_size(text, size, &decoded_size, &bad_offset);
    if (size % 4 == 0) {
        assert_int_equal(status, RST_BASE64_OK);
        assert_true(decoded_size <= out_room);
        /* The end of the block is the end of the output. */
        status =
            rst_base64_decode(text, size, out + out_room - decoded_size, decoded_size, &bad_offset);
    } else {
        assert_int_equal(rst_base64_decode(text, size, out, out_room, NULL), status);
    }
    if (status != expected || (expected != RST_BASE64_OK && bad_offset != expected_offset))
        fail_msg("%zu characters: status %d at %zu, not %d at %zu", size, status, bad_offset,
                 expected, expected_offset);
}

static void test_every_byte_value_at_every_position(void **state)
{
    take_path(state);
    /* Around the blocks of 32, 64, 128 and 256 characters, with and without padding. */
    static const size_t sizes[] = {3,  2,  1,  6,   21,  24,  27,  26,  45,  48,  51,
                                   52, 95, 96, 108, 190, 192, 195, 240, 241, 289, 384};
    for (size_t i = 0; i < COUNT(sizes); i++) {
        uint8_t *bytes = random_bytes(sizes[i]);
        size_t text_size;
        char *text = encoded(bytes, sizes[i], &text_size);
        uint8_t *out = exact(text_size / 4 * 3);
        for (size_t at = 0; at < text_size; at++) {
            char was = text[at];
            for (int value = 0; value < 256; value++) {
                text[at] = (char)value;
                assert_same_verdict(text, text_size, out, text_size / 4 * 3);
            }
            text[at] = was;
        }
        free(out);
        free(text);
        free(bytes);
    }
}

static void test_every_last_group(void **state)
{
    take_path(state);
    uint8_t out[9];
    char text[12] = "QUJDREVG";
    for (int first = 0; first < 256; first++) {
        for (int second = 0; second < 256; second++) {
            memcpy(text + 8, "xxx=", 4);
            text[9] = (char)first;
            text[10] = (char)second;
            assert_same_verdict(text, 12, out, 9);
            memcpy(text + 8, "xx==", 4);
            text[8] = (char)first;
            text[9] = (char)second;
            assert_same_verdict(text, 12, out, 9);
        }
    }
}

static void test_padding_anywhere(void **state)
{
    take_path(state);
    uint8_t *bytes = random_bytes(228);
    size_t text_size;
    char *text = encoded(bytes, 228, &text_size);
    uint8_t *out = exact(228);
    for (size_t run = 1; run <= 5; run++) {
        for (size_t at = 0; at + run <= text_size; at++) {
            char was[5];
            memcpy(was, text + at, run);
            memset(text + at, '=', run);
            assert_same_verdict(text, text_size, out, 228);
            memcpy(text + at, was, run);
        }
    }
    memset(text, '=', text_size);
    assert_same_verdict(text, text_size, out, 228);
    free(out);
    free(text);
    free(bytes);
}

/* Cut at every length: where the cut text has no other fault, its end is the fault. */
static void test_cut_texts(void **state)
{
    take_path(state);
    uint8_t *bytes = random_bytes(196);
    size_t text_size;
    char *text = encoded(bytes, 196, &text_size);
    for (size_t size = 0; size <= text_size; size++) {
        char *cut = exact(size);
        memcpy(cut, text, size);
        uint8_t *out = exact(size / 4 * 3);
        assert_same_verdict(cut, size, out, size / 4 * 3);
        if (size > 90) {
            cut[76] = '\n'; /* named before the missing end */
            assert_same_verdict(cut, size, out, size / 4 * 3);
        }
        free(out);
        free(cut);
    }
    free(text);
    free(bytes);
}

static void test_random_texts(void **state)
{
    take_path(state);
    static const char odd[] = "=-_ \n\r\t\0.,\x7f\x80\xab\xff@[`{";
    for (int i = 0; i < 30000; i++) {
        size_t size = random_32() % 300;
        uint32_t odd_in = 2 + random_32() % 1000; /* from nearly all odd to hardly any */
        char *text = exact(size);
        for (size_t j = 0; j < size; j++)
            text[j] = random_32() % odd_in == 0 ? odd[random_32() % (sizeof odd - 1)]
                                                : alphabet[random_32() >> 26];
        uint8_t *out = exact(size / 4 * 3);
        assert_same_verdict(text, size, out, size / 4 * 3);
        free(out);
        free(text);
    }
}

static void test_the_fault_is_named(void **state)
{
    take_path(state);
    static const struct {
        const char *text;
        int status;
        size_t bad_offset;
    } cases[] = {{"QUJD\nREVG", RST_BASE64_BAD_BYTE, 4},  {"QUJDREVG\n", RST_BASE64_BAD_BYTE, 8},
                 {" QUJD", RST_BASE64_BAD_BYTE, 0},       {"QU-D", RST_BASE64_BAD_BYTE, 2},
                 {"QU_D", RST_BASE64_BAD_BYTE, 2},        {"QUJ\xC3", RST_BASE64_BAD_BYTE, 3},
                 {"Q", RST_BASE64_BAD_PADDING, 1},        {"QU", RST_BASE64_BAD_PADDING, 2},
                 {"QUI", RST_BASE64_BAD_PADDING, 3},      {"QQ=", RST_BASE64_BAD_PADDING, 2},
                 {"QQ=Q", RST_BASE64_BAD_PADDING, 2},     {"Q===", RST_BASE64_BAD_PADDING, 1},
                 {"====", RST_BASE64_BAD_PADDING, 0},     {"=", RST_BASE64_BAD_PADDING, 0},
                 {"QQ==QQ==", RST_BASE64_BAD_PADDING, 2}, {"QUJD=", RST_BASE64_BAD_PADDING, 4},
                 {"QUJD====", RST_BASE64_BAD_PADDING, 4}, {"QR==", RST_BASE64_BAD_BITS, 1},
                 {"QUJDQUJ=", RST_BASE64_BAD_BITS, 6},    {"Q\n==", RST_BASE64_BAD_BYTE, 1}};
    for (size_t i = 0; i < COUNT(cases); i++) {
        size_t size = strlen(cases[i].text);
        size_t bad_offset = SIZE_MAX;
        size_t decoded_size;
        uint8_t out[12];
        int status = rst_base64_decoded_size(cases[i].text, size, &decoded_size, &bad_offset);
        if (status == RST_BASE64_OK)
            status = rst_base64_decode(cases[i].text, size, out, decoded_size, &bad_offset);
        assert_int_equal(status, cases[i].status);
        assert_int_equal(bad_offset, cases[i].bad_offset);
        assert_true(strlen(rst_base64_status_text(status)) > 0);
    }
}

static void test_another_out_size_is_refused(void **state)
{
    take_path(state);
    static const size_t wrong[] = {0, 5, 7, SIZE_MAX};
    for (size_t i = 0; i < COUNT(wrong); i++) {
        uint8_t out[7];
        memset(out, 0xEE, sizeof out);
        size_t bad_offset = 0;
        assert_int_equal(rst_base64_decode("QUJDREVG", 8, out, wrong[i], &bad_offset),
                         RST_BASE64_OUT_SIZE);
        assert_int_equal(bad_offset, 8);
        for (size_t j = 0; j < sizeof out; j++)
            assert_int_equal(out[j], 0xEE);
    }
    assert_int_equal(rst_base64_decode(NULL, 0, NULL, 1, NULL), RST_BASE64_OUT_SIZE);
    assert_int_equal(rst_base64_decode(NULL, 0, NULL, 0, NULL), RST_BASE64_OK);
}

/* A kernel that left everything to the portable one would pass all of the above. */
static void test_the_kernel_does_the_work(void **state)
{
    const struct path_case *path = take_path(state);
    for (size_t size = 0; size <= 2048; size += 4) {
        char *text = exact(size);
        for (size_t i = 0; i < size; i++)
            text[i] = alphabet[random_32() >> 26];
        uint8_t *out = exact(size / 4 * 3);
        size_t done = path->kernel((uint8_t *)text, size, out);
        assert_int_equal(done % 4, 0);
        assert_true(done <= size && size - done <= path->left);
        if (size > 0) {
            size_t bad = random_32() % (uint32_t)size;
            text[bad] = '=';
            done = path->kernel((uint8_t *)text, size, out);
            assert_int_equal(done % 4, 0);
            assert_true(done <= bad && bad - done < path->block + path->left);
        }
        free(out);
        free(text);
    }
}

/* ---- Encoding ---- */

static void test_encoding(void **state)
{
    (void)state;
    for (size_t size = 0; size <= 1000; size++) {
        uint8_t *bytes = random_bytes(size);
        size_t text_size;
        char *text = encoded(bytes, size, &text_size);
        assert_int_equal(rst_base64_encoded_size(size), text_size);
        char *out = exact(text_size);
        rst_base64_encode(bytes, size, out);
        if (size > 0)
            assert_memory_equal(out, text, text_size);
        free(out);
        free(text);
        free(bytes);
    }
}

static void test_encoding_what_is_big(void **state)
{
    (void)state;
    size_t size = 3000001;
    uint8_t *bytes = random_bytes(size);
    size_t text_size;
    char *text = encoded(bytes, size, &text_size);
    char *out = exact(text_size);
    rst_base64_encode(bytes, size, out);
    assert_memory_equal(out, text, text_size);
    free(out);
    free(text);
    free(bytes);
}

static void test_encoded_size_does_not_overflow(void **state)
{
    (void)state;
    assert_int_equal(rst_base64_encoded_size(0), 0);
    assert_int_equal(rst_base64_encoded_size(1), 4);
    assert_true(rst_base64_encoded_size(SIZE_MAX / 4 * 3) == SIZE_MAX / 4 * 4);
    assert_int_equal(rst_base64_encoded_size(SIZE_MAX / 4 * 3 + 1), 0);
    assert_int_equal(rst_base64_encoded_size(SIZE_MAX), 0);
}

/* ---- */

/* clang-format off */
#define ON_PATH(index, name, test)                                                                 \
    {name ": " #test, test, NULL, NULL, (void *)(uintptr_t)&path_cases[index]}
/* clang-format on */
#define ON_PATH_ALL(index, name)                                                                   \
    ON_PATH(index, name, test_rfc_4648_vectors), ON_PATH(index, name, test_every_length),          \
        ON_PATH(index, name, test_every_alignment),                                                \
        ON_PATH(index, name, test_nothing_outside_the_buffers_is_touched),                         \
        ON_PATH(index, name, test_big_texts),                                                      \
        ON_PATH(index, name, test_every_byte_value_at_every_position),                             \
        ON_PATH(index, name, test_every_last_group), ON_PATH(index, name, test_padding_anywhere),  \
        ON_PATH(index, name, test_cut_texts), ON_PATH(index, name, test_random_texts),             \
        ON_PATH(index, name, test_the_fault_is_named),                                             \
        ON_PATH(index, name, test_another_out_size_is_refused),                                    \
        ON_PATH(index, name, test_the_kernel_does_the_work)

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_encoding),
        cmocka_unit_test(test_encoding_what_is_big),
        cmocka_unit_test(test_encoded_size_does_not_overflow),
        ON_PATH_ALL(0, "portable"),
#ifdef RST_BASE64_HAVE_X86
        ON_PATH_ALL(1, "avx2"),
        ON_PATH_ALL(2, "avx512"),
#endif
#ifdef RST_BASE64_HAVE_NEON
        ON_PATH_ALL(1, "neon"),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
