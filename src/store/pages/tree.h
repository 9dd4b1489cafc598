/* LMDB's B-trees, page by page, without LMDB.  Internal; pages.c and tree.c.
 *
 * LMDB 0.9 trusts its pages: a page that is not what it should be makes it read outside the map,
 * write outside a page, loop or abort.  What is checked here is what it relies on. */
#ifndef RST_SRC_STORE_TREE_H
#define RST_SRC_STORE_TREE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../../error.h"

#define RST_PAGE_HEADER_SIZE 16u
#define RST_PAGE_BRANCH 0x01u
#define RST_PAGE_LEAF 0x02u
#define RST_PAGE_OVERFLOW 0x04u
#define RST_PAGE_META 0x08u
#define RST_PAGE_DIRTY 0x10u /* of the transaction that is writing it, never of a committed one */

#define RST_NODE_BIG 0x01u  /* the value has pages of its own */
#define RST_NODE_TREE 0x02u /* the value is a named database's rst_tree */

#define RST_NO_PAGE UINT64_MAX /* root of an empty tree */
#define RST_LMDB_KEY_SIZE_MAX 511u

/* The pages of one data file that a check has met. */
typedef struct rst_pages {
    int fd;
    uint32_t page_size; /* bytes */
    uint64_t page_count;
    uint64_t *used; /* a bit for each page: nothing is part of two things */
    bool ahead;     /* pages come from a disk: ask for them before they are needed */
} rst_pages;

/* What LMDB keeps of each tree. */
typedef struct rst_tree {
    uint16_t flags;
    uint16_t depth;
    uint64_t branch_pages;
    uint64_t leaf_pages;
    uint64_t overflow_pages;
    uint64_t entry_count;
    uint64_t root;
} rst_tree;

#define RST_TREE_SIZE 48u /* bytes of it in the file */

typedef struct rst_node {
    const unsigned char *key;
    size_t key_size;
    unsigned flags;
    const unsigned char *data; /* not aligned; with RST_NODE_BIG the u64 number of the first page */
    uint32_t data_size;        /* of the value */
} rst_node;

/* What is expected of a tree. */
typedef struct rst_tree_rules {
    const char *name;    /* for messages */
    size_t key_size;     /* bytes of each key; 0: 1 to RST_LMDB_KEY_SIZE_MAX */
    bool numbers;        /* keys are native u64, not bytes */
    unsigned node_flags; /* RST_NODE_* that its leaves may have */
    bool all_big;        /* each value has pages of its own */
    bool headers;        /* read the first page of such values too */
    int (*visit)(void *context, const rst_node *node, rst_error *error); /* NULL: none */
    void *context;
} rst_tree_rules;

/* Read `size` bytes at `offset`.  RST_ERR_CORRUPT when the file ends before. */
int rst_pages_read(const rst_pages *pages, uint64_t offset, void *out, size_t size,
                   rst_error *error);

/* Pages [first, first + count) belong to what is looked at, and to nothing met before. */
int rst_pages_claim(rst_pages *pages, const char *name, uint64_t first, uint64_t count,
                    rst_error *error);

void rst_tree_parse(const unsigned char bytes[RST_TREE_SIZE], rst_tree *tree);

/* Walk the whole tree.  RST_ERR_CORRUPT at the first thing that LMDB would not have left so. */
int rst_tree_check(rst_pages *pages, const rst_tree_rules *rules, const rst_tree *tree,
                   rst_error *error);

#endif
