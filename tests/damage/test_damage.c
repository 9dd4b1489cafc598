/* Damage to a store's pages: whatever stands in them, opening refuses, or reading, writing and
 * verify end with ordinary errors, and no turn is another one than was stored. */
#include <string.h>

#include "damage_support.h"

/* ---------------------------------------------------------------- every byte */

/* What a byte becomes, by round; the first rounds are the likeliest to matter. */
static unsigned char other_byte(unsigned char byte, uint64_t at, unsigned round, uint64_t *random)
{
    switch (round) {
    case 0:
        return (unsigned char)(byte ^ 1u << at % 8);
    case 1:
        return 0xFF;
    case 2:
        return 0;
    case 3:
        return (unsigned char)(byte + 1);
    case 4:
        return (unsigned char)(byte - 1);
    case 5:
        return (unsigned char)(byte ^ 0x80);
    default:
        return (unsigned char)support_random(random);
    }
}

static void damage_bytes(damage_worker *w)
{
    uint64_t random = 11;
    for (unsigned round = 0; round < damage_rounds(); round++) {
        for (uint64_t page = 0; page < w->f->pages; page++) {
            for (unsigned at = 0; at < DAMAGE_PAGE; at++) {
                uint64_t offset = page * DAMAGE_PAGE + at;
                unsigned char byte = other_byte(w->f->bytes[offset], offset, round, &random);
                if (damage_matters(w->f, page, at) && damage_mine(w)) {
                    damage_try(w, offset, &byte, 1);
                }
            }
        }
    }
}

static void each_byte_of_each_tree_page(void **state)
{
    damage_progress p = damage_run(*state, damage_bytes);
    assert_true(p.trials > 10000);
    assert_true(p.refused > p.trials / 4);
}

/* ---------------------------------------------------------------- every word */

static uint64_t other_word(uint64_t word, unsigned round, uint64_t pages, uint64_t *random)
{
    switch (round) {
    case 0:
        return support_random(random) % pages;
    case 1:
        return 0;
    case 2:
        return UINT64_MAX;
    case 3:
        return word + 1;
    case 4:
        return word - 1;
    case 5:
        return pages;
    case 6:
        return pages - 1;
    case 7:
        return word + 2;
    case 8:
        return word ^ UINT64_C(1) << support_random(random) % 64;
    case 9:
        return UINT64_C(1) << support_random(random) % 64;
    default:
        return support_random(random);
    }
}

static void damage_words(damage_worker *w)
{
    uint64_t random = 12;
    uint64_t pages = w->f->pages;
    for (unsigned round = 0; round < damage_rounds() + 1; round++) {
        for (uint64_t page = 0; page < pages; page++) {
            for (unsigned at = 0; at + 8 <= DAMAGE_PAGE; at += 2) {
                uint64_t word;
                memcpy(&word, w->f->bytes + page * DAMAGE_PAGE + at, sizeof word);
                size_t size = at % 8 == 0 ? 8 : at % 4 == 0 ? 4 : 2;
                word = other_word(word, round, pages, &random);
                if (damage_matters(w->f, page, at) && damage_mine(w)) {
                    damage_try(w, page * DAMAGE_PAGE + at, &word, size);
                }
            }
        }
    }
}

static void each_word_of_each_tree_page(void **state)
{
    damage_progress p = damage_run(*state, damage_words);
    assert_true(p.trials > 10000);
    assert_true(p.refused > p.trials / 4);
}

/* ---------------------------------------------------------------- whole pages */

static void copy_pages(damage_worker *w)
{
    uint64_t random = 14;
    unsigned char *file = w->file;
    for (uint64_t to = 0; to < w->f->pages; to++) {
        for (uint64_t from = 0; from < w->f->pages; from++) {
            bool wanted = to < 2 ? from < 2 : damage_is_tree_page(w->f, to);
            if (!wanted || from == to ||
                (!damage_is_tree_page(w->f, from) && from >= 2 && support_random(&random) % 64) ||
                !damage_mine(w)) {
                continue;
            }
            const unsigned char *page = w->f->bytes + from * DAMAGE_PAGE;
            damage_say(w, "page %u is page %u", (unsigned)to, (unsigned)from);
            memcpy(file + to * DAMAGE_PAGE, page, DAMAGE_PAGE);
            damage_read(w, 0);
            damage_say(w, "page %u is page %u, renumbered", (unsigned)to, (unsigned)from);
            memcpy(file + to * DAMAGE_PAGE, &to, sizeof to);
            damage_read(w, 0);
            damage_say(w, "pages %u and %u are exchanged", (unsigned)to, (unsigned)from);
            memcpy(file + to * DAMAGE_PAGE, page, DAMAGE_PAGE);
            memcpy(file + from * DAMAGE_PAGE, w->f->bytes + to * DAMAGE_PAGE, DAMAGE_PAGE);
            damage_read(w, 0);
            damage_restore(w);
        }
    }
}

static void pages_in_the_place_of_others(void **state)
{
    damage_progress p = damage_run(*state, copy_pages);
    assert_true(p.trials > 500);
    assert_int_equal(p.refused + p.reported, p.trials);
}

static void fill_pages(damage_worker *w)
{
    uint64_t random = 15;
    for (uint64_t page = 0; page < w->f->pages; page++) {
        if (page >= 2 && !damage_is_tree_page(w->f, page)) {
            continue;
        }
        for (unsigned i = 0; i < 4 * damage_rounds(); i++) {
            unsigned char *bytes = w->file + page * DAMAGE_PAGE;
            /* With and without a header that is in order. */
            unsigned from = i % 2 ? 16 : 0;
            for (unsigned at = from; at < DAMAGE_PAGE; at++) {
                bytes[at] = i < 2 ? 0 : (unsigned char)support_random(&random);
            }
            if (damage_mine(w)) {
                damage_say(w, "page %u is filled, from byte %u", (unsigned)page, from);
                damage_read(w, 0);
            }
            memcpy(bytes, w->f->bytes + page * DAMAGE_PAGE, DAMAGE_PAGE);
        }
    }
}

static void pages_of_nothing_and_of_anything(void **state)
{
    damage_progress p = damage_run(*state, fill_pages);
    assert_true(p.trials > 30);
    assert_int_equal(p.refused, p.trials);
}

/* ---------------------------------------------------------------- records */

/* A checksum is over the record, the rest of a value is zero, and its page says what it is: verify
 * notices whatever changes. */
static void damage_records(damage_worker *w)
{
    uint64_t random = 13;
    for (size_t i = 0; i < w->f->value_count; i++) {
        const damage_value *v = &w->f->values[i];
        unsigned some = i < 2 ? (unsigned)v->size + 16 : 48 * damage_rounds();
        for (unsigned j = 0; j < some; j++) {
            uint64_t at = i < 2 ? j : support_random(&random) % (v->size + 16);
            at = at == 8 || at == 9 ? 10 : at; /* two bytes of the page's header that say nothing */
            uint64_t offset = v->offset - 16 + at;
            unsigned char byte = (unsigned char)(w->file[offset] ^ 1u << j % 8);
            if (damage_mine(w)) {
                damage_try(w, offset, &byte, 1);
            }
        }
    }
}

static void each_record(void **state)
{
    damage_progress p = damage_run(*state, damage_records);
    assert_true(p.trials > 5000);
    assert_int_equal(p.reported, p.trials);
}

/* Who trusts a store gets whatever numbers it holds, but nothing from outside the map. */
static void damage_trusted(damage_worker *w)
{
    uint64_t random = 16;
    for (size_t i = 0; i < w->f->value_count; i++) {
        const damage_value *v = &w->f->values[i];
        for (unsigned j = 0; j < 24 * damage_rounds(); j++) {
            uint64_t offset = v->offset - 16 + support_random(&random) % (16 + 112 + 16);
            unsigned char *at = w->file + offset;
            unsigned char before = *at;
            *at = (unsigned char)support_random(&random);
            if (*at != before && damage_mine(w)) {
                damage_say(w, "byte %llu, trusted", (unsigned long long)offset);
                damage_read(w, RST_OPEN_TRUST);
            }
            *at = before;
        }
    }
}

static void records_that_are_trusted(void **state)
{
    damage_progress p = damage_run(*state, damage_trusted);
    assert_true(p.trials > 2000);
}

/* ---------------------------------------------------------------- writing */

static void write_damaged(damage_worker *w)
{
    uint64_t random = 17;
    for (unsigned i = 0; i < 3000 * damage_rounds(); i++) {
        uint64_t page;
        unsigned at;
        do {
            page = support_random(&random) % w->f->pages;
            at = (unsigned)(support_random(&random) % DAMAGE_PAGE);
        } while (!damage_matters(w->f, page, at) && (at >= 256 || support_random(&random) % 4));
        uint64_t offset = page * DAMAGE_PAGE + at;
        unsigned char byte = (unsigned char)support_random(&random);
        unsigned count = 1 + (unsigned)(support_random(&random) % 3);
        if (!damage_mine(w)) {
            continue;
        }
        for (unsigned j = 0; j < count && at + j < DAMAGE_PAGE; j++) {
            w->file[offset + j] = (unsigned char)(byte + j);
        }
        damage_say(w, "page %u, byte %u: %u bytes from 0x%x, written to", (unsigned)page, at, count,
                   byte);
        damage_write(w, i);
        damage_restore(w);
    }
}

static void damaged_stores_are_not_written_to(void **state)
{
    damage_progress p = damage_run(*state, write_damaged);
    assert_true(p.trials > 2000);
    assert_true(p.refused > p.trials / 8);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_byte_of_each_tree_page),
        cmocka_unit_test(each_word_of_each_tree_page),
        cmocka_unit_test(pages_in_the_place_of_others),
        cmocka_unit_test(pages_of_nothing_and_of_anything),
        cmocka_unit_test(each_record),
        cmocka_unit_test(records_that_are_trusted),
        cmocka_unit_test(damaged_stores_are_not_written_to),
    };
    return cmocka_run_group_tests(tests, damage_set_up, damage_tear_down);
}
