/* Whether a data file is what LMDB takes it for.  Internal. */
#ifndef RST_SRC_STORE_PAGES_H
#define RST_SRC_STORE_PAGES_H

#include "../internal.h"

typedef enum rst_pages_extent {
    RST_PAGES_NOT,         /* checked before */
    RST_PAGES_FOR_READING, /* every page of every tree, and that no page is part of two things */
    RST_PAGES_FOR_WRITING, /* and the lists of free pages */
    RST_PAGES_ALL          /* and the page header of each turn's value, which only copying and
                              deleting rely on: one page read for each turn */
} rst_pages_extent;

/* The two meta pages, before LMDB maps what they say.  RST_ERR_NOT_STORE for what is no LMDB file,
 * RST_ERR_CORRUPT, RST_ERR_VERSION. */
int rst_pages_check_metas(int fd, rst_error *error);

/* Check the version of the store that the read transaction sees, which keeps its pages as they are
 * meanwhile; *txn may be renewed.  Nothing else may have been done with the transaction: before
 * this, LMDB is safe only for beginning one.  RST_ERR_NOT_STORE for another program's environment,
 * RST_ERR_CORRUPT. */
int rst_pages_check(MDB_env *lmdb, MDB_txn *txn, rst_pages_extent extent, rst_error *error);

#define RST_PAGES_META_SIZE 152u        /* bytes of a meta page that mean something */
#define RST_PAGES_META_PAGE_SIZE 40u    /* byte of it at which the size of a page stands */
#define RST_PAGES_META_TRANSACTION 144u /* byte of it at which its transaction's number stands */

/* Check the version that a meta page describes, of which this is the beginning; it need not be the
 * file's newest.  As RST_PAGES_FOR_WRITING, without LMDB; nobody may be writing. */
int rst_pages_check_saved(int fd, const unsigned char meta[RST_PAGES_META_SIZE], rst_error *error);

/* The beginning of the meta page that LMDB would take.  Errors of rst_pages_check_metas. */
int rst_pages_newest(int fd, unsigned char meta[RST_PAGES_META_SIZE], rst_error *error);

/* Pages that a value of that size has when it has pages of its own. */
uint64_t rst_pages_of_value(uint32_t page_size, uint64_t value_size);

/* Does the value begin in a page of its own whose header says so?  dirty: it may have been written
 * in this transaction. */
bool rst_pages_value_sound(const rst_env *env, const MDB_val *value, bool dirty);

#endif
