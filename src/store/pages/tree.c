#include "tree.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "pages.h"

#define NODE_HEADER_SIZE 8u
#define PAGE_SIZE_MAX 32768u
/* LMDB's cursors hold 32 pages; each level at least doubles the tree, so none comes near. */
#define DEPTH_MAX 31u

static uint16_t get_u16(const unsigned char *in)
{
    uint16_t value;
    memcpy(&value, in, sizeof value);
    return value;
}

static uint64_t get_u64(const unsigned char *in)
{
    uint64_t value;
    memcpy(&value, in, sizeof value);
    return value;
}

/* ---------------------------------------------------------------- pages */

int rst_pages_read(const rst_pages *pages, uint64_t offset, void *out, size_t size,
                   rst_error *error)
{
    unsigned char *at = out;
    while (size > 0) {
        ssize_t got = pread(pages->fd, at, size, (off_t)offset);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) {
            return rst_fail_system(error, RST_ERR_IO, errno, "reading the data file");
        }
        if (got == 0) {
            return rst_fail(error, RST_ERR_CORRUPT, "pages",
                            "the data file was cut: it ends before byte %llu",
                            (unsigned long long)(offset + size));
        }
        at += got;
        offset += (uint64_t)got;
        size -= (size_t)got;
    }
    return RST_OK;
}

static int bad_page(const rst_tree_rules *rules, uint64_t number, const char *what,
                    rst_error *error)
{
    return rst_fail(error, RST_ERR_CORRUPT, "pages", "database \"%s\", page %llu: %s", rules->name,
                    (unsigned long long)number, what);
}

int rst_pages_claim(rst_pages *pages, const char *name, uint64_t first, uint64_t count,
                    rst_error *error)
{
    const rst_tree_rules named = {.name = name};
    if (first < 2 || first >= pages->page_count || count > pages->page_count - first) {
        return bad_page(&named, first, "outside the file's pages", error);
    }
    uint64_t end = first + count;
    for (uint64_t at = first; at < end;) {
        uint64_t bit = at % 64;
        uint64_t bits = end - at < 64 - bit ? end - at : 64 - bit;
        uint64_t mask = (bits == 64 ? UINT64_MAX : (UINT64_C(1) << bits) - 1) << bit;
        uint64_t *word = &pages->used[at / 64];
        if (*word & mask) {
            return bad_page(&named, first, "part of something else too", error);
        }
        *word |= mask;
        at += bits;
    }
    return RST_OK;
}

uint64_t rst_pages_of_value(uint32_t page_size, uint64_t value_size)
{
    return (RST_PAGE_HEADER_SIZE + value_size + page_size - 1) / page_size;
}

/* ---------------------------------------------------------------- one page */

typedef struct walk {
    rst_pages *pages;
    const rst_tree_rules *rules;
    const rst_tree *tree;
    unsigned char *levels;     /* a page for each level of the tree */
    rst_tree met;              /* counts */
    const unsigned char *last; /* key, NULL before the first; in a page of `levels` or in `kept` */
    size_t last_size;
    bool last_is_leaf; /* the next key must be over it; else it may be the same */
    unsigned char kept[RST_LMDB_KEY_SIZE_MAX];
} walk;

/* A node's parts; returns the bytes it takes, which may lead outside the page. */
static size_t parse_node(const unsigned char *at, bool branch, rst_node *node)
{
    node->flags = branch ? 0 : get_u16(at + 4);
    node->key = at + NODE_HEADER_SIZE;
    node->key_size = get_u16(at + 6);
    node->data = node->key + node->key_size;
    node->data_size = (uint32_t)get_u16(at) | (uint32_t)get_u16(at + 2) << 16;
    size_t data_size = node->flags & RST_NODE_BIG ? sizeof(uint64_t) : node->data_size;
    size_t size = NODE_HEADER_SIZE + node->key_size + (branch ? 0 : data_size);
    return (size + 1) / 2 * 2; /* LMDB keeps nodes at even places */
}

static uint64_t child_of(const unsigned char *node)
{
    return (uint64_t)get_u16(node) | (uint64_t)get_u16(node + 2) << 16 |
           (uint64_t)get_u16(node + 4) << 32;
}

static const unsigned char *node_at(const unsigned char *page, unsigned index)
{
    return page + get_u16(page + RST_PAGE_HEADER_SIZE + 2 * index);
}

static bool node_fits_rules(const rst_tree_rules *rules, const rst_node *node)
{
    if (node->flags & ~rules->node_flags ||
        (node->flags & RST_NODE_TREE &&
         (node->flags & RST_NODE_BIG || node->data_size != RST_TREE_SIZE))) {
        return false;
    }
    return !rules->all_big || node->flags & RST_NODE_BIG;
}

/* Two nodes fit into every page: LMDB gives a larger value pages of its own, and splits pages
 * relying on that. */
static size_t node_size_max(size_t page_size)
{
    return (page_size - RST_PAGE_HEADER_SIZE) / 2 / 2 * 2 - sizeof(uint16_t);
}

/* The nodes lie without gaps from mp_upper to the page's end, and each has one pointer.  (LMDB
 * moves them about relying on that.)  *count gets their number. */
static const char *check_nodes(const walk *w, const unsigned char *page, bool branch,
                               unsigned *count)
{
    size_t page_size = w->pages->page_size;
    size_t lower = get_u16(page + 12);
    size_t upper = get_u16(page + 14);
    if (lower < RST_PAGE_HEADER_SIZE || lower % 2 || upper % 2 || lower > upper ||
        upper > page_size) {
        return "the bounds of its free space";
    }
    uint64_t starts[PAGE_SIZE_MAX / 2 / 64];
    memset(starts, 0, page_size / 2 / 8);
    unsigned nodes = 0;
    for (size_t at = upper, size; at < page_size; at += size, nodes++) {
        rst_node node;
        size_t room = page_size - at;
        if (room < NODE_HEADER_SIZE || (size = parse_node(page + at, branch, &node)) > room) {
            return "an entry that leaves the page";
        }
        if (size > node_size_max(page_size)) {
            return "an entry that is too large for a page";
        }
        if (!branch && !node_fits_rules(w->rules, &node)) {
            return "an entry of a kind that this database has not";
        }
        starts[at / 128] |= UINT64_C(1) << at / 2 % 64;
    }
    *count = (unsigned)(lower - RST_PAGE_HEADER_SIZE) / 2;
    if (nodes != *count || nodes < (branch ? 2 : 1)) {
        return "the number of its entries";
    }
    for (unsigned i = 0; i < nodes; i++) {
        size_t at = get_u16(page + RST_PAGE_HEADER_SIZE + 2 * i);
        uint64_t bit = UINT64_C(1) << at / 2 % 64;
        if (at % 2 || at >= page_size || !(starts[at / 128] & bit)) {
            return "a pointer to no entry, or two to one";
        }
        starts[at / 128] &= ~bit;
    }
    return NULL;
}

static int read_page(walk *w, uint64_t number, unsigned level, unsigned char **page, bool *branch,
                     rst_error *error)
{
    int code = rst_pages_claim(w->pages, w->rules->name, number, 1, error);
    if (code) {
        return code;
    }
    size_t size = w->pages->page_size;
    *page = w->levels + level * size;
    code = rst_pages_read(w->pages, number * size, *page, size, error);
    if (code) {
        return code;
    }
    *branch = level + 1 < w->tree->depth;
    if (get_u64(*page) != number) {
        return bad_page(w->rules, number, "has another page's number", error);
    }
    if (get_u16(*page + 10) != (*branch ? RST_PAGE_BRANCH : RST_PAGE_LEAF)) {
        return bad_page(w->rules, number, *branch ? "no branch page" : "no leaf page", error);
    }
    return RST_OK;
}

/* ---------------------------------------------------------------- order */

/* As LMDB compares: bytes, then length. */
static int compare_keys(const walk *w, const unsigned char *key, size_t size)
{
    if (w->rules->numbers) {
        uint64_t a = get_u64(key);
        uint64_t b = get_u64(w->last);
        return (a > b) - (a < b);
    }
    size_t common = size < w->last_size ? size : w->last_size;
    size_t at = 0;
    for (; at + 8 <= common; at += 8) { /* neighbours mostly differ in the first or last word */
        uint64_t a = __builtin_bswap64(get_u64(key + at));
        uint64_t b = __builtin_bswap64(get_u64(w->last + at));
        if (a != b) {
            return a > b ? 1 : -1;
        }
    }
    int order = memcmp(key + at, w->last + at, common - at);
    return order ? order : (size > w->last_size) - (size < w->last_size);
}

/* Keys and separators are met in the tree's order: a leaf's key must be over the leaf's key before
 * it and not under the separator before it; a separator over every key before it. */
static const char *next_key(walk *w, const unsigned char *key, size_t size, bool leaf)
{
    size_t wanted = w->rules->key_size;
    if (wanted ? size != wanted : size == 0 || size > RST_LMDB_KEY_SIZE_MAX) {
        return "a key's size";
    }
    if (w->last) {
        int order = compare_keys(w, key, size);
        if (order < 0 || (order == 0 && (w->last_is_leaf || !leaf))) {
            return "its keys are not in order";
        }
    }
    w->last = key;
    w->last_size = size;
    w->last_is_leaf = leaf;
    return NULL;
}

/* ---------------------------------------------------------------- the tree */

static int check_value_pages(walk *w, const rst_node *node, rst_error *error)
{
    uint64_t first = get_u64(node->data);
    uint64_t count = rst_pages_of_value(w->pages->page_size, node->data_size);
    int code = rst_pages_claim(w->pages, w->rules->name, first, count, error);
    w->met.overflow_pages += count;
    if (code || !w->rules->headers) {
        return code;
    }
    unsigned char header[RST_PAGE_HEADER_SIZE] = {0};
    code = rst_pages_read(w->pages, first * w->pages->page_size, header, sizeof header, error);
    uint32_t said;
    memcpy(&said, header + 12, sizeof said);
    if (!code &&
        (get_u64(header) != first || get_u16(header + 10) != RST_PAGE_OVERFLOW || said != count)) {
        code = bad_page(w->rules, first, "not the first page of a value of that size", error);
    }
    return code;
}

static int check_leaf(walk *w, const unsigned char *page, uint64_t number, unsigned count,
                      rst_error *error)
{
    w->met.leaf_pages++;
    w->met.entry_count += count;
    for (unsigned i = 0; i < count; i++) {
        rst_node node = {0};
        parse_node(node_at(page, i), false, &node);
        const char *fault = next_key(w, node.key, node.key_size, true);
        if (fault) {
            return bad_page(w->rules, number, fault, error);
        }
        int code = node.flags & RST_NODE_BIG ? check_value_pages(w, &node, error) : RST_OK;
        if (!code && w->rules->visit) {
            code = w->rules->visit(w->rules->context, &node, error);
        }
        if (code) {
            return code;
        }
    }
    /* The next leaf is read into this one's place. */
    memcpy(w->kept, w->last, w->last_size);
    w->last = w->kept;
    return RST_OK;
}

/* The pages of a branch are read one after the other; a disk can look for all of them at once. */
static void ask_for_children(const walk *w, const unsigned char *page, unsigned count)
{
    off_t size = w->pages->page_size;
    for (unsigned i = 0; i < count; i++) {
        uint64_t child = child_of(node_at(page, i));
        if (child < w->pages->page_count) {
            posix_fadvise(w->pages->fd, (off_t)child * size, size, POSIX_FADV_WILLNEED);
        }
    }
}

static int check_page(walk *w, uint64_t number, unsigned level, rst_error *error)
{
    unsigned char *page;
    bool branch;
    unsigned count;
    int code = read_page(w, number, level, &page, &branch, error);
    if (code) {
        return code;
    }
    const char *fault = check_nodes(w, page, branch, &count);
    if (fault) {
        return bad_page(w->rules, number, fault, error);
    }
    if (!branch) {
        return check_leaf(w, page, number, count, error);
    }
    w->met.branch_pages++;
    if (w->pages->ahead) {
        ask_for_children(w, page, count);
    }
    for (unsigned i = 0; i < count && !code; i++) {
        const unsigned char *node = node_at(page, i);
        /* The first child's key says nothing: it holds all that is under the second's. */
        fault = i == 0 ? NULL : next_key(w, node + NODE_HEADER_SIZE, get_u16(node + 6), false);
        code = fault ? bad_page(w->rules, number, fault, error)
                     : check_page(w, child_of(node), level + 1, error);
    }
    return code;
}

void rst_tree_parse(const unsigned char bytes[RST_TREE_SIZE], rst_tree *tree)
{
    *tree = (rst_tree){
        .flags = get_u16(bytes + 4),
        .depth = get_u16(bytes + 6),
        .branch_pages = get_u64(bytes + 8),
        .leaf_pages = get_u64(bytes + 16),
        .overflow_pages = get_u64(bytes + 24),
        .entry_count = get_u64(bytes + 32),
        .root = get_u64(bytes + 40),
    };
}

static int check_counts(const walk *w, rst_error *error)
{
    const rst_tree *said = w->tree;
    const rst_tree *met = &w->met;
    if (said->branch_pages != met->branch_pages || said->leaf_pages != met->leaf_pages ||
        said->overflow_pages != met->overflow_pages || said->entry_count != met->entry_count) {
        return rst_fail(
            error, RST_ERR_CORRUPT, "pages",
            "database \"%s\" counts %llu entries and %llu pages, but has %llu and %llu",
            w->rules->name, (unsigned long long)said->entry_count,
            (unsigned long long)(said->branch_pages + said->leaf_pages + said->overflow_pages),
            (unsigned long long)met->entry_count,
            (unsigned long long)(met->branch_pages + met->leaf_pages + met->overflow_pages));
    }
    return RST_OK;
}

int rst_tree_check(rst_pages *pages, const rst_tree_rules *rules, const rst_tree *tree,
                   rst_error *error)
{
    walk w = {.pages = pages, .rules = rules, .tree = tree};
    if (tree->depth > DEPTH_MAX || (tree->depth == 0) != (tree->root == RST_NO_PAGE)) {
        return rst_fail(error, RST_ERR_CORRUPT, "pages", "database \"%s\" has %u levels",
                        rules->name, tree->depth);
    }
    int code = RST_OK;
    if (tree->depth > 0) {
        w.levels = malloc((size_t)tree->depth * pages->page_size);
        if (!w.levels) {
            return rst_fail(error, RST_ERR_MEMORY, NULL, "no memory to check the pages");
        }
        code = check_page(&w, tree->root, 0, error);
        free(w.levels);
    }
    return code ? code : check_counts(&w, error);
}
