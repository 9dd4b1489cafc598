/* Files that are no store, or not all of one; and damage that was thought out rather than met. */
#include <fcntl.h>
#include <lmdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "damage_support.h"

static rst_store *no_store;

static void refuse(const char *path, int code)
{
    rst_error error;
    const unsigned flags[] = {RST_OPEN_READ_ONLY, 0, RST_OPEN_READ_ONLY | RST_OPEN_TRUST,
                              RST_OPEN_CREATE};
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) {
        assert_code(code, rst_store_open(path, flags[i], NULL, &no_store, &error), error);
        assert_null(no_store);
    }
}

/* ---------------------------------------------------------------- cut */

static void cut_everywhere(damage_worker *w)
{
    uint64_t random = 21;
    for (uint64_t page = 0; page <= w->f->size / DAMAGE_PAGE; page++) {
        uint64_t sizes[] = {page * DAMAGE_PAGE,
                            page * DAMAGE_PAGE + support_random(&random) % DAMAGE_PAGE};
        for (int i = 0; i < 2; i++) {
            if (!damage_mine(w) || sizes[i] > w->f->size) {
                continue;
            }
            damage_say(w, "cut to %llu bytes", (unsigned long long)sizes[i]);
            if (truncate(w->data, (off_t)sizes[i]) != 0) {
                exit(3);
            }
            uint64_t refused = w->progress->refused;
            damage_read(w, 0);
            bool whole = sizes[i] >= w->f->pages * DAMAGE_PAGE;
            if ((w->progress->refused == refused) != whole) {
                exit(5);
            }
            damage_restore(w);
        }
    }
}

static void files_cut_at_every_page(void **state)
{
    damage_fixture *f = *state;
    damage_progress p = damage_run(f, cut_everywhere);
    assert_true(p.trials > f->size / DAMAGE_PAGE);
    assert_int_equal(p.reported, 0);
}

static void cut_and_write(damage_worker *w)
{
    for (uint64_t page = 0; page < w->f->pages; page += 7) {
        if (damage_mine(w)) {
            damage_say(w, "cut to %llu pages, written to", (unsigned long long)page);
            if (truncate(w->data, (off_t)(page * DAMAGE_PAGE)) != 0) {
                exit(3);
            }
            damage_write(w, page);
            damage_restore(w);
        }
    }
}

static void cut_files_are_not_written_to(void **state)
{
    damage_progress p = damage_run(*state, cut_and_write);
    assert_int_equal(p.refused, p.trials);
}

/* ---------------------------------------------------------------- something else */

/* A folder with these bytes as its data file. */
static const char *make_other(const damage_fixture *f, const char *name, const void *bytes,
                              size_t size)
{
    const char *path = support_path(f->folder, name);
    char data[600];
    assert_int_equal(mkdir(path, 0700), 0);
    snprintf(data, sizeof data, "%s/data.mdb", path);
    FILE *file = fopen(data, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, size, file), size);
    assert_int_equal(fclose(file), 0);
    return path;
}

static void files_of_nothing_and_of_anything(void **state)
{
    damage_fixture *f = *state;
    size_t size = 1 << 20;
    unsigned char *bytes = calloc(1, size);
    uint64_t random = 22;
    refuse(make_other(f, "zeros", bytes, size), RST_ERR_NOT_STORE);
    refuse(make_other(f, "empty", bytes, 0), RST_ERR_NOT_STORE);
    refuse(make_other(f, "short", bytes, 100), RST_ERR_NOT_STORE);
    for (size_t i = 0; i < size; i++) {
        bytes[i] = (unsigned char)support_random(&random);
    }
    refuse(make_other(f, "noise", bytes, size), RST_ERR_NOT_STORE);
    memset(bytes, 'a', size);
    refuse(make_other(f, "text", bytes, size), RST_ERR_NOT_STORE);
    free(bytes);
}

/* The two meta pages have changed places, or are the same, or one of them is missing. */
static void meta_pages_in_each_others_place(void **state)
{
    damage_fixture *f = *state;
    unsigned char *bytes = malloc(f->size);
    const struct {
        const char *name;
        int first, second; /* which meta page stands there; -1: zeros */
    } cases[] = {{"meta-swapped", 1, 0}, {"meta-first", 0, 0},     {"meta-second", 1, 1},
                 {"meta-none", -1, -1},  {"meta-no-first", -1, 1}, {"meta-no-second", 0, -1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        memcpy(bytes, f->bytes, f->size);
        memset(bytes, 0, 2 * DAMAGE_PAGE);
        if (cases[i].first >= 0) {
            memcpy(bytes, f->bytes + cases[i].first * DAMAGE_PAGE, DAMAGE_PAGE);
        }
        if (cases[i].second >= 0) {
            memcpy(bytes + DAMAGE_PAGE, f->bytes + cases[i].second * DAMAGE_PAGE, DAMAGE_PAGE);
        }
        const char *path = make_other(f, cases[i].name, bytes, f->size);
        bool none = cases[i].first < 0 && cases[i].second < 0;
        refuse(path, none ? RST_ERR_NOT_STORE : RST_ERR_CORRUPT);
    }
    free(bytes);
}

/* ---------------------------------------------------------------- other programs' environments */

typedef struct foreign {
    const char *name;
    const char *database; /* NULL: the main one */
    unsigned flags;
    unsigned entries;
    size_t size; /* of each */
} foreign;

static void make_foreign(const char *path, const foreign *of)
{
    MDB_env *env;
    MDB_txn *txn;
    MDB_dbi dbi;
    assert_int_equal(mkdir(path, 0700), 0);
    assert_int_equal(mdb_env_create(&env), 0);
    assert_int_equal(mdb_env_set_maxdbs(env, 4), 0);
    assert_int_equal(mdb_env_set_mapsize(env, 64 << 20), 0);
    assert_int_equal(mdb_env_open(env, path, 0, 0600), 0);
    assert_int_equal(mdb_txn_begin(env, NULL, 0, &txn), 0);
    assert_int_equal(mdb_dbi_open(txn, of->database, of->flags | MDB_CREATE, &dbi), 0);
    char *bytes = calloc(1, of->size);
    for (uint32_t i = 0; i < of->entries; i++) {
        uint32_t key = of->flags & MDB_DUPSORT ? i / 100 : i;
        memcpy(bytes, &i, sizeof i);
        MDB_val k = {sizeof key, &key};
        MDB_val v = {of->size, bytes};
        assert_int_equal(mdb_put(txn, dbi, &k, &v, 0), 0);
    }
    free(bytes);
    assert_int_equal(mdb_txn_commit(txn), 0);
    mdb_env_close(env);
}

static void environments_of_other_programs(void **state)
{
    damage_fixture *f = *state;
    const foreign all[] = {
        {"foreign-empty", NULL, 0, 0, 4},
        {"foreign-main", NULL, 0, 2000, 40},
        {"foreign-big", NULL, 0, 20, 9000},
        {"foreign-integers", NULL, MDB_INTEGERKEY, 2000, 40},
        {"foreign-reverse", NULL, MDB_REVERSEKEY, 2000, 40},
        {"foreign-duplicates", NULL, MDB_DUPSORT, 5000, 40},
        {"foreign-fixed", NULL, MDB_DUPSORT | MDB_DUPFIXED, 5000, 40},
        {"foreign-named", "data", 0, 2000, 40},
        {"foreign-turns", "turns", 0, 2000, 40},
        {"foreign-named-fixed", "turns", MDB_DUPSORT | MDB_DUPFIXED, 5000, 40},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        const char *path = support_path(f->folder, all[i].name);
        make_foreign(path, &all[i]);
        refuse(path, RST_ERR_NOT_STORE);
        walk_result r = walk_store(path, 0);
        assert_int_equal(r.code, RST_ERR_NOT_STORE);
    }
}

/* The databases are there, but not as this format has them. */
static void stores_with_other_databases(void **state)
{
    damage_fixture *f = *state;
    static const char *const names[] = {"meta",  "sessions",  "turns",
                                        "ready", "consumers", "leases"};
    for (unsigned flags = 0; flags < 3; flags++) {
        MDB_env *env;
        MDB_txn *txn;
        MDB_dbi dbi = 0;
        char name[32];
        snprintf(name, sizeof name, "others-%u", flags);
        const char *path = support_path(f->folder, name);
        assert_int_equal(mkdir(path, 0700), 0);
        assert_int_equal(mdb_env_create(&env), 0);
        assert_int_equal(mdb_env_set_maxdbs(env, 6), 0);
        assert_int_equal(mdb_env_open(env, path, 0, 0600), 0);
        assert_int_equal(mdb_txn_begin(env, NULL, 0, &txn), 0);
        for (int i = 0; i < 6; i++) {
            unsigned kind = flags == 1 ? MDB_DUPSORT : flags == 2 ? MDB_INTEGERKEY : 0;
            assert_int_equal(mdb_dbi_open(txn, names[i], kind | MDB_CREATE, &dbi), 0);
        }
        uint32_t key = 1;
        MDB_val k = {sizeof key, &key};
        char value[] = "value";
        MDB_val v = {5, value};
        assert_int_equal(mdb_put(txn, dbi, &k, &v, 0), 0);
        assert_int_equal(mdb_txn_commit(txn), 0);
        mdb_env_close(env);
        refuse(path, RST_ERR_CORRUPT);
    }
}

/* ---------------------------------------------------------------- thought out */

static uint64_t get_u64(const unsigned char *in)
{
    uint64_t value;
    memcpy(&value, in, sizeof value);
    return value;
}

static unsigned get_u16(const unsigned char *in)
{
    return in[0] | (unsigned)in[1] << 8;
}

/* Every reference of a page to a page is led to every page: cycles, shared pages, values inside
 * trees and trees inside values. */
static void lead_astray(damage_worker *w)
{
    const damage_fixture *f = w->f;
    for (uint64_t page = 2; page < f->pages; page++) {
        if (!damage_is_tree_page(f, page)) {
            continue;
        }
        const unsigned char *bytes = f->bytes + page * DAMAGE_PAGE;
        bool leaf = get_u16(bytes + 10) == 2;
        unsigned step = 0;
        for (unsigned at = 16; at < get_u16(bytes + 12); at += 2) {
            unsigned node = get_u16(bytes + at);
            bool big = leaf && get_u16(bytes + node + 4) & 1;
            if (leaf && !big) {
                continue;
            }
            uint64_t place = page * DAMAGE_PAGE + node + (leaf ? 8 + get_u16(bytes + node + 6) : 0);
            uint64_t beyond = f->pages + 2;
            uint64_t stride = damage_rounds() > 1 ? 1 : 8;
            for (uint64_t to = step++ % 8; to < beyond; to += stride) {
                if (damage_mine(w)) {
                    damage_try(w, place, &to, leaf ? 8 : 6);
                }
            }
        }
    }
}

static void references_to_every_other_page(void **state)
{
    damage_progress p = damage_run(*state, lead_astray);
    assert_true(p.trials > 5000);
    /* A value's own page may be named by another turn's key only where both keep their size: then
     * one page has two users, or none. */
    assert_int_equal(p.refused + p.reported, p.trials);
}

/* Free pages that are in use: nobody may write. */
static void free_used_pages(damage_worker *w)
{
    const damage_fixture *f = w->f;
    const unsigned char *metas[] = {f->bytes + 16, f->bytes + DAMAGE_PAGE + 16};
    const unsigned char *meta = metas[get_u64(metas[0] + 128) < get_u64(metas[1] + 128)];
    uint64_t root = get_u64(meta + 24 + 40);
    const unsigned char *page = f->bytes + root * DAMAGE_PAGE;
    if (get_u16(page + 10) != 2) {
        exit(3);
    }
    for (unsigned at = 16; at < get_u16(page + 12); at += 2) {
        unsigned node = get_u16(page + at);
        uint64_t list = root * DAMAGE_PAGE + node + 16;
        if (get_u16(page + node + 4) & 1) {
            list = get_u64(page + node + 16) * DAMAGE_PAGE + 16;
        }
        uint64_t count = get_u64(f->bytes + list);
        for (uint64_t i = 0; i <= count; i++) {
            const uint64_t values[] = {0, 1, root, f->pages, UINT64_MAX, count + 1};
            for (size_t j = 0; j < sizeof values / sizeof *values; j++) {
                bool smaller = i == 0 && values[j] < count; /* a shorter list is sound */
                if (smaller || !damage_mine(w)) {
                    continue;
                }
                damage_say(w, "free list of %llu: number %llu is %llu", (unsigned long long)count,
                           (unsigned long long)i, (unsigned long long)values[j]);
                if (memcmp(w->file + list + 8 * i, &values[j], 8) != 0) {
                    memcpy(w->file + list + 8 * i, &values[j], 8);
                    damage_write(w, i);
                    damage_read(w, 0);
                    damage_restore(w);
                }
            }
        }
    }
}

static void lists_of_free_pages(void **state)
{
    damage_progress p = damage_run(*state, free_used_pages);
    assert_true(p.trials > 200);
    assert_true(p.refused >= p.trials / 2);
    /* For reading only the lengths count; verify looks at all. */
    assert_int_equal(p.refused + p.reported, p.trials);
}

/* A list of transaction 0, which there never was, sorts first and is never used up. */
static void number_free_list_0(damage_worker *w)
{
    const damage_fixture *f = w->f;
    const unsigned char *metas[] = {f->bytes + 16, f->bytes + DAMAGE_PAGE + 16};
    const unsigned char *meta = metas[get_u64(metas[0] + 128) < get_u64(metas[1] + 128)];
    uint64_t root = get_u64(meta + 24 + 40);
    if (damage_mine(w)) {
        damage_say(w, "the first list of free pages is of transaction 0");
        memset(w->file + root * DAMAGE_PAGE + get_u16(f->bytes + root * DAMAGE_PAGE + 16) + 8, 0,
               8);
        damage_read(w, 0);
        damage_write(w, 0);
        damage_restore(w);
    }
}

static void a_list_of_free_pages_of_no_transaction(void **state)
{
    damage_progress p = damage_run(*state, number_free_list_0);
    assert_int_equal(p.trials, 2);
    assert_int_equal(p.refused, 2);
}

/* The entry that lies lowest in its page gets more than half of it, where LMDB would have given it
 * pages of its own. */
static void stretch_entries(damage_worker *w)
{
    enum { NODE_SIZE = 2040 };
    const damage_fixture *f = w->f;
    for (uint64_t page = 2; page < f->pages; page++) {
        const unsigned char *bytes = f->bytes + page * DAMAGE_PAGE;
        unsigned upper = get_u16(bytes + 14);
        const unsigned char *node = bytes + upper;
        if (!damage_is_tree_page(f, page) || get_u16(bytes + 10) != 2 || get_u16(node + 4) != 0) {
            continue; /* no leaf, or a value in pages of its own */
        }
        size_t key_size = get_u16(node + 6);
        size_t size = (8 + key_size + get_u16(node) + 1) / 2 * 2;
        if (upper - get_u16(bytes + 12) < NODE_SIZE - size || !damage_mine(w)) {
            continue;
        }
        damage_say(w, "an entry of page %llu has %d bytes", (unsigned long long)page, NODE_SIZE);
        unsigned char *made = w->file + page * DAMAGE_PAGE;
        const uint16_t moved = (uint16_t)(upper - (NODE_SIZE - size));
        const uint16_t data_size = (uint16_t)(NODE_SIZE - 8 - key_size);
        memmove(made + moved, node, 8 + key_size);
        memcpy(made + moved, &data_size, sizeof data_size);
        memcpy(made + 14, &moved, sizeof moved);
        for (unsigned at = 16; at < get_u16(bytes + 12); at += 2) {
            if (get_u16(bytes + at) == upper) {
                memcpy(made + at, &moved, sizeof moved);
            }
        }
        damage_read(w, 0);
        damage_write(w, page);
        damage_restore(w);
    }
}

static void entries_that_are_too_large(void **state)
{
    damage_progress p = damage_run(*state, stretch_entries);
    assert_true(p.trials >= 2);
    assert_int_equal(p.refused, p.trials);
}

/* The size that the format entry gives the file must not cut it, or stretch it without end, when it
 * is opened for writing. */
static void say_other_sizes(damage_worker *w)
{
    const damage_fixture *f = w->f;
    const uint32_t magic = RST_FORMAT_MAGIC;
    unsigned entries = 0;
    for (uint64_t at = 2 * DAMAGE_PAGE; at + sizeof(rst_format_entry) < f->pages * DAMAGE_PAGE;
         at += 2) {
        if (!damage_is_tree_page(f, at / DAMAGE_PAGE) || memcmp(f->bytes + at, &magic, 4) != 0) {
            continue;
        }
        entries++;
        rst_format_entry format;
        memcpy(&format, f->bytes + at, sizeof format);
        const uint64_t sizes[] = {
            format.capacity_size, f->pages * DAMAGE_PAGE, f->size - DAMAGE_PAGE, f->size - 1,
            f->size + 1,          f->size + DAMAGE_PAGE,  UINT64_C(1) << 40,     UINT64_MAX};
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            if (!damage_mine(w)) {
                continue;
            }
            damage_say(w, "map_size %llu of a file of %zu", (unsigned long long)sizes[i], f->size);
            memcpy(w->file + at + offsetof(rst_format_entry, map_size), &sizes[i], 8);
            damage_read(w, 0);
            damage_write(w, i);
            struct stat info;
            if (fstat(w->fd, &info) != 0 || (size_t)info.st_size != f->size) {
                exit(5);
            }
            damage_restore(w);
        }
    }
    if (entries != 1) {
        exit(3);
    }
}

static void sizes_that_are_not_the_files(void **state)
{
    damage_progress p = damage_run(*state, say_other_sizes);
    assert_int_equal(p.trials, 16);
    assert_int_equal(p.refused, p.trials);
}

/* ---------------------------------------------------------------- the files beside */

static void damage_guard(damage_worker *w)
{
    uint64_t random = 23;
    for (unsigned at = 0; at < DAMAGE_GUARD_SIZE; at++) {
        bool slot = at % 4096 < 512 && at < 8192;
        if ((!slot && at % 4096 >= 64) || !damage_mine(w)) {
            continue;
        }
        damage_say(w, "guard.bin, byte %u", at);
        w->guard[at] = (unsigned char)support_random(&random);
        damage_read(w, 0);
        damage_restore(w);
        w->guard[at] = (unsigned char)support_random(&random);
        damage_write(w, at);
        damage_restore(w);
    }
}

static void the_guard_file(void **state)
{
    damage_progress p = damage_run(*state, damage_guard);
    assert_true(p.trials > 2000);
}

/* Nobody has it open: LMDB makes it anew, whatever stands there. */
static void damage_lock(damage_worker *w)
{
    uint64_t random = 24;
    char path[600];
    snprintf(path, sizeof path, "%s/lock.mdb", w->path);
    for (unsigned i = 0; i < 200; i++) {
        if (!damage_mine(w)) {
            continue;
        }
        unsigned char bytes[8192];
        size_t size = support_random(&random) % sizeof bytes;
        for (size_t j = 0; j < size; j++) {
            bytes[j] = i % 2 ? 0xFF : (unsigned char)support_random(&random);
        }
        FILE *file = fopen(path, "wb");
        if (!file || fwrite(bytes, 1, size, file) != size || fclose(file) != 0) {
            exit(3);
        }
        damage_say(w, "lock.mdb of %zu bytes", size);
        uint64_t refused = w->progress->refused;
        damage_read(w, 0);
        damage_write(w, i);
        if (w->progress->refused != refused) {
            exit(5);
        }
        damage_restore(w);
    }
}

static void the_lock_file(void **state)
{
    damage_progress p = damage_run(*state, damage_lock);
    assert_int_equal(p.trials, 400);
    assert_int_equal(p.refused, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(files_cut_at_every_page),
        cmocka_unit_test(cut_files_are_not_written_to),
        cmocka_unit_test(files_of_nothing_and_of_anything),
        cmocka_unit_test(meta_pages_in_each_others_place),
        cmocka_unit_test(environments_of_other_programs),
        cmocka_unit_test(stores_with_other_databases),
        cmocka_unit_test(references_to_every_other_page),
        cmocka_unit_test(lists_of_free_pages),
        cmocka_unit_test(a_list_of_free_pages_of_no_transaction),
        cmocka_unit_test(entries_that_are_too_large),
        cmocka_unit_test(sizes_that_are_not_the_files),
        cmocka_unit_test(the_guard_file),
        cmocka_unit_test(the_lock_file),
    };
    return cmocka_run_group_tests(tests, damage_set_up, damage_tear_down);
}
