#include "pages.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "tree.h"

_Static_assert(sizeof(size_t) == 8, "LMDB's files differ between word sizes; this reads 64-bit");
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the store's files are little-endian"
#endif

/* ---------------------------------------------------------------- meta pages */

#define META_SIZE 136u
_Static_assert(RST_PAGE_HEADER_SIZE + META_SIZE == RST_PAGES_META_SIZE, "a meta page");
#define META_MAGIC UINT32_C(0xBEEFC0DE)
#define META_VERSION 1u
#define FLAGS_FREE 0x08u    /* keys are integers */
#define FLAGS_SAVED 0x4001u /* LMDB keeps two flags of opening beside them, and ignores them */
#define MAP_SIZE_MAX (UINT64_C(1) << 47)

typedef struct meta {
    uint16_t page_flags;
    uint32_t magic;
    uint32_t version;
    uint64_t map_size;
    uint32_t page_size;
    rst_tree free;
    rst_tree main;
    uint64_t last_page;
    uint64_t txn_id;
} meta;

static meta parse_meta(const unsigned char *page)
{
    const unsigned char *body = page + RST_PAGE_HEADER_SIZE;
    meta m;
    memcpy(&m.page_flags, page + 10, sizeof m.page_flags);
    memcpy(&m.magic, body, sizeof m.magic);
    memcpy(&m.version, body + 4, sizeof m.version);
    memcpy(&m.map_size, body + 16, sizeof m.map_size);
    memcpy(&m.page_size, body + 24, sizeof m.page_size);
    rst_tree_parse(body + 24, &m.free);
    rst_tree_parse(body + 24 + RST_TREE_SIZE, &m.main);
    memcpy(&m.last_page, body + 120, sizeof m.last_page);
    memcpy(&m.txn_id, body + 128, sizeof m.txn_id);
    return m;
}

static int read_meta(const rst_pages *pages, uint64_t number, meta *out, rst_error *error)
{
    unsigned char bytes[RST_PAGE_HEADER_SIZE + META_SIZE];
    int code = rst_pages_read(pages, number * pages->page_size, bytes, sizeof bytes, error);
    if (!code) {
        *out = parse_meta(bytes);
    }
    return code;
}

static int bad_meta(uint64_t number, const char *what, rst_error *error)
{
    return rst_fail(error, RST_ERR_CORRUPT, "pages", "meta page %llu: %s",
                    (unsigned long long)number, what);
}

static bool page_size_possible(uint32_t size)
{
    return size >= 512 && size <= 32768 && (size & (size - 1)) == 0;
}

static int check_meta(const meta *m, uint64_t number, uint64_t file_size, rst_error *error)
{
    if (m->page_flags != RST_PAGE_META || m->magic != META_MAGIC) {
        return bad_meta(number, "not one", error);
    }
    if (m->version != META_VERSION) {
        return rst_fail(error, RST_ERR_VERSION, "pages",
                        "the data file has version %u of LMDB's format, not %u", m->version,
                        META_VERSION);
    }
    if ((m->free.flags & ~FLAGS_SAVED) != FLAGS_FREE) {
        return bad_meta(number, "flags", error);
    }
    /* A transaction writes the meta page of its number's parity, and looks for it there. */
    if (m->txn_id > INT64_MAX || (m->txn_id && m->txn_id % 2 != number)) {
        return bad_meta(number, "the transaction's number", error);
    }
    if (m->last_page == 0 || m->last_page >= file_size / m->page_size) {
        return rst_fail(error, RST_ERR_CORRUPT, "pages",
                        "the data file was cut: it has %llu bytes, and pages of %u up to %llu",
                        (unsigned long long)file_size, m->page_size,
                        (unsigned long long)m->last_page);
    }
    if (m->map_size / m->page_size <= m->last_page || m->map_size > MAP_SIZE_MAX) {
        return bad_meta(number, "the size of the map", error);
    }
    return RST_OK;
}

/* A file whose first page is no meta page may still be a store that was damaged there. */
static int say_what_it_is(rst_pages *pages, rst_error *error)
{
    meta m;
    for (uint32_t size = 512; size <= 32768; size *= 2) {
        pages->page_size = size;
        if (read_meta(pages, 1, &m, NULL) == RST_OK && m.magic == META_MAGIC &&
            m.page_size == size) {
            return bad_meta(0, "not one", error);
        }
    }
    return rst_fail(error, RST_ERR_NOT_STORE, "path", "not an LMDB environment");
}

int rst_pages_check_metas(int fd, rst_error *error)
{
    struct stat file;
    if (fstat(fd, &file) != 0) {
        return rst_fail_system(error, RST_ERR_IO, errno, "looking at the data file");
    }
    rst_pages pages = {.fd = fd};
    meta first;
    meta second;
    int code = read_meta(&pages, 0, &first, error);
    if (code) {
        return rst_fail(error, RST_ERR_NOT_STORE, "path", "not an LMDB environment");
    }
    if (first.magic != META_MAGIC) {
        return say_what_it_is(&pages, error);
    }
    if (!page_size_possible(first.page_size)) {
        return bad_meta(0, "the size of a page", error);
    }
    pages.page_size = first.page_size;
    code = check_meta(&first, 0, (uint64_t)file.st_size, error);
    if (!code) {
        code = read_meta(&pages, 1, &second, error);
    }
    if (!code && second.page_size != first.page_size) {
        code = bad_meta(1, "the size of a page", error);
    }
    return code ? code : check_meta(&second, 1, (uint64_t)file.st_size, error);
}

/* ---------------------------------------------------------------- the transaction's version */

/* Read what the transaction began with.  Each commit writes the meta page that is not the newest,
 * so a page stays as it is until the commit after the next begins: it can be relied on when, after
 * it was read, the other one is still the older. */
static int read_seen(const rst_pages *pages, MDB_txn *txn, meta *seen, rst_error *error)
{
    const struct timespec pause = {.tv_nsec = 100000};
    for (int tries = 0; tries < 1000; tries++) {
        uint64_t id = mdb_txn_id(txn);
        meta other;
        int code = read_meta(pages, id % 2, seen, error);
        if (!code) {
            code = read_meta(pages, (id + 1) % 2, &other, error);
        }
        if (code || (seen->txn_id == id && (other.txn_id < id || id == 0))) {
            return code;
        }
        if (tries >= 10) {
            nanosleep(&pause, NULL);
        }
        mdb_txn_reset(txn);
        int result = mdb_txn_renew(txn);
        if (result) {
            return rst_fail_lmdb(error, result, "reading");
        }
    }
    return rst_fail(error, RST_ERR_CORRUPT, "pages",
                    "the data file is not the one that the lock file belongs to: close the store "
                    "in every process, then remove lock.mdb");
}

/* ---------------------------------------------------------------- the trees */

typedef struct check {
    rst_pages pages;
    rst_pages_extent extent;
    meta seen;
    rst_tree trees[6]; /* in the order of `databases` */
    unsigned found;    /* a bit for each of them */
    uint64_t free;     /* pages that the lists of free ones have */
} check;

static const struct {
    const char *name;
    size_t key_size;
} databases[] = {
    {"meta", sizeof RST_META_KEY_FORMAT - 1},
    {"sessions", RST_KEY_SIZE},
    {"turns", RST_TURN_KEY_SIZE},
    {"ready", RST_READY_KEY_SIZE},
    {"consumers", RST_KEY_SIZE},
    {"leases", RST_TURN_KEY_SIZE},
};
enum { DATABASES = sizeof databases / sizeof *databases, TURNS = 2 };

/* An entry of the main database names another one. */
static int note_database(void *context, const rst_node *node, rst_error *error)
{
    check *c = context;
    for (unsigned i = 0; i < DATABASES; i++) {
        if (node->key_size == strlen(databases[i].name) &&
            memcmp(node->key, databases[i].name, node->key_size) == 0) {
            if (!(node->flags & RST_NODE_TREE)) {
                break;
            }
            rst_tree_parse(node->data, &c->trees[i]);
            c->found |= 1u << i;
            return RST_OK;
        }
    }
    return rst_fail(error, RST_ERR_NOT_STORE, "path",
                    "an LMDB environment, but not a rollstore: there are entries of another "
                    "program");
}

/* A list of free pages: how many, then their numbers, highest first.  `at` is its offset in the
 * file, or it lies in `bytes`. */
static int claim_free_pages(check *c, const unsigned char *bytes, uint64_t at, uint64_t count,
                            rst_error *error)
{
    uint64_t numbers[512];
    uint64_t last = UINT64_MAX;
    for (uint64_t done = 0, part; done < count; done += part) {
        part = count - done < 512 ? count - done : 512;
        if (bytes) {
            memcpy(numbers, bytes + 8 * done, 8 * part);
        } else {
            int code = rst_pages_read(&c->pages, at + 8 * done, numbers, 8 * part, error);
            if (code) {
                return code;
            }
        }
        for (uint64_t i = 0; i < part; i++) {
            if (numbers[i] >= last) {
                return rst_fail(error, RST_ERR_CORRUPT, "pages",
                                "a list of free pages is not in order");
            }
            last = numbers[i];
            int code = rst_pages_claim(&c->pages, "free pages", last, 1, error);
            if (code) {
                return code;
            }
        }
    }
    return RST_OK;
}

static int check_free_list(void *context, const rst_node *node, rst_error *error)
{
    check *c = context;
    const unsigned char *bytes = NULL;
    uint64_t at = 0;
    uint64_t count = 0;
    int code = RST_OK;
    if (node->data_size >= sizeof count && node->flags & RST_NODE_BIG) {
        memcpy(&at, node->data, sizeof at);
        at = at * c->pages.page_size + RST_PAGE_HEADER_SIZE;
        code = rst_pages_read(&c->pages, at, &count, sizeof count, error);
    } else if (node->data_size >= sizeof count) {
        bytes = node->data;
        memcpy(&count, bytes, sizeof count);
    }
    uint64_t txn_id;
    memcpy(&txn_id, node->key, sizeof txn_id);
    /* LMDB takes a list of transaction 0 for one it has not come to yet, again and again. */
    if (!code && (node->data_size < sizeof count || count > node->data_size / 8 - 1 ||
                  txn_id == 0 || txn_id > c->seen.txn_id)) {
        code =
            rst_fail(error, RST_ERR_CORRUPT, "pages", "a list of free pages: its length or number");
    }
    c->free += code ? 0 : count;
    if (!code && c->free > c->pages.page_count) {
        code = rst_fail(error, RST_ERR_CORRUPT, "pages", "more pages are free than there are");
    }
    if (code || c->extent == RST_PAGES_FOR_READING) {
        return code;
    }
    return claim_free_pages(c, bytes ? bytes + 8 : NULL, at + 8, count, error);
}

static int check_main(check *c, rst_error *error)
{
    const rst_tree_rules rules = {
        .name = "main",
        .node_flags = RST_NODE_BIG | RST_NODE_TREE,
        .headers = true,
        .visit = note_database,
        .context = c,
    };
    if (c->seen.main.flags) {
        return rst_fail(error, RST_ERR_NOT_STORE, "path",
                        "an LMDB environment, but not a rollstore: its main database has flags");
    }
    int code = rst_tree_check(&c->pages, &rules, &c->seen.main, error);
    if (code) {
        return code;
    }
    for (unsigned i = 0; i < DATABASES; i++) {
        if (!(c->found & 1u << i)) {
            return rst_fail(error, RST_ERR_NOT_STORE, "path",
                            "an LMDB environment, but not a rollstore: it has no database \"%s\"",
                            databases[i].name);
        }
    }
    return RST_OK;
}

static int check_database(check *c, unsigned i, rst_error *error)
{
    const rst_tree_rules rules = {
        .name = databases[i].name,
        .key_size = databases[i].key_size,
        .node_flags = RST_NODE_BIG,
        .all_big = i == TURNS,
        .headers = i != TURNS || c->extent == RST_PAGES_ALL,
    };
    if (c->trees[i].flags) {
        return rst_fail(error, RST_ERR_CORRUPT, "pages", "database \"%s\" has flags",
                        databases[i].name);
    }
    return rst_tree_check(&c->pages, &rules, &c->trees[i], error);
}

static int check_free(check *c, rst_error *error)
{
    const rst_tree_rules rules = {
        .name = "free pages",
        .key_size = sizeof(uint64_t),
        .numbers = true,
        .node_flags = RST_NODE_BIG,
        .headers = true,
        .visit = check_free_list,
        .context = c,
    };
    return rst_tree_check(&c->pages, &rules, &c->seen.free, error);
}

static int check_trees(check *c, rst_error *error)
{
    c->pages.used = calloc(c->pages.page_count / 64 + 1, sizeof *c->pages.used);
    if (!c->pages.used) {
        return rst_fail(error, RST_ERR_MEMORY, NULL, "no memory to check %llu pages",
                        (unsigned long long)c->pages.page_count);
    }
    int code = check_main(c, error);
    for (unsigned i = 0; i < DATABASES && !code; i++) {
        code = check_database(c, i, error);
    }
    if (!code) {
        code = check_free(c, error);
    }
    free(c->pages.used);
    return code;
}

int rst_pages_check_saved(int fd, const unsigned char bytes[RST_PAGES_META_SIZE], rst_error *error)
{
    check c = {.extent = RST_PAGES_FOR_WRITING, .pages = {.fd = fd, .ahead = true}};
    struct stat file;
    if (fstat(fd, &file) != 0) {
        return rst_fail_system(error, RST_ERR_IO, errno, "looking at the data file");
    }
    c.seen = parse_meta(bytes);
    c.pages.page_size = c.seen.page_size;
    int code = page_size_possible(c.seen.page_size)
                   ? check_meta(&c.seen, c.seen.txn_id % 2, (uint64_t)file.st_size, error)
                   : bad_meta(c.seen.txn_id % 2, "the size of a page", error);
    if (code) {
        return code;
    }
    c.pages.page_count = c.seen.last_page + 1;
    return check_trees(&c, error);
}

int rst_pages_newest(int fd, unsigned char bytes[RST_PAGES_META_SIZE], rst_error *error)
{
    int code = rst_pages_check_metas(fd, error);
    rst_pages pages = {.fd = fd};
    unsigned char second[RST_PAGES_META_SIZE];
    if (!code) {
        code = rst_pages_read(&pages, 0, bytes, RST_PAGES_META_SIZE, error);
    }
    if (!code) {
        uint64_t at = parse_meta(bytes).page_size;
        code = rst_pages_read(&pages, at, second, sizeof second, error);
    }
    if (!code && parse_meta(second).txn_id > parse_meta(bytes).txn_id) {
        memcpy(bytes, second, sizeof second);
    }
    return code;
}

int rst_pages_check(MDB_env *lmdb, MDB_txn *txn, rst_pages_extent extent, rst_error *error)
{
    check c = {.extent = extent};
    MDB_stat stat;
    struct stat file;
    struct statfs system;
    if (mdb_env_get_fd(lmdb, &c.pages.fd) != 0 || mdb_env_stat(lmdb, &stat) != 0 ||
        fstat(c.pages.fd, &file) != 0 || fstatfs(c.pages.fd, &system) != 0) {
        return rst_fail_system(error, RST_ERR_IO, errno, "looking at the data file");
    }
    c.pages.page_size = stat.ms_psize;
    c.pages.ahead = (unsigned long)system.f_type != 0x01021994; /* TMPFS_MAGIC */
    int code = read_seen(&c.pages, txn, &c.seen, error);
    if (!code) {
        /* Once more: it may have changed since the file was opened. */
        code = check_meta(&c.seen, c.seen.txn_id % 2, (uint64_t)file.st_size, error);
    }
    if (code) {
        return code;
    }
    c.pages.page_count = c.seen.last_page + 1;
    return check_trees(&c, error);
}

/* ---------------------------------------------------------------- values */

bool rst_pages_value_sound(const rst_env *env, const MDB_val *value, bool dirty)
{
    const unsigned char *begin = value->mv_data;
    size_t page_size = env->format.page_size;
    /* LMDB does not look at a value's size; a damaged one must not lead outside the map. */
    if (begin < env->map || value->mv_size > env->map_size ||
        (size_t)(begin - env->map) > env->map_size - value->mv_size) {
        return false;
    }
    size_t offset = (size_t)(begin - env->map);
    if (offset % page_size != RST_PAGE_HEADER_SIZE) {
        return false;
    }
    uint64_t number;
    uint16_t flags;
    uint32_t count;
    const unsigned char *page = begin - RST_PAGE_HEADER_SIZE;
    memcpy(&number, page, sizeof number);
    memcpy(&flags, page + 10, sizeof flags);
    memcpy(&count, page + 12, sizeof count);
    if (dirty) {
        flags &= (uint16_t)~RST_PAGE_DIRTY;
    }
    return number == offset / page_size && flags == RST_PAGE_OVERFLOW &&
           count == rst_pages_of_value(env->format.page_size, value->mv_size);
}
