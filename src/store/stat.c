/* What a store says of itself without its data being read. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "internal.h"

typedef struct readers {
    uint32_t used;
    uint32_t oldest_pid;
    uint64_t oldest_transaction; /* UINT64_MAX when no snapshot is open */
} readers;

/* LMDB gives its readers only as lines of text: "pid thread transaction", "-" for none. */
static int read_line(const char *line, void *context)
{
    readers *r = context;
    unsigned pid;
    char thread[64];
    char transaction[64];
    if (sscanf(line, "%u %63s %63s", &pid, thread, transaction) != 3) {
        return 0; /* the heading */
    }
    r->used++;
    char *end;
    unsigned long long number = strtoull(transaction, &end, 10);
    if (end != transaction && *end == '\0' && number < r->oldest_transaction) {
        r->oldest_transaction = number;
        r->oldest_pid = pid;
    }
    return 0;
}

/* Free pages stand in LMDB's database 0: transaction that freed them -> count, page numbers. */
static int count_free_pages(MDB_txn *txn, uint64_t oldest, uint64_t *free_pages, uint64_t *pinned,
                            rst_error *error)
{
    MDB_cursor *cursor;
    int result = mdb_cursor_open(txn, 0, &cursor);
    if (result) {
        return rst_fail_lmdb(error, result, "counting free pages");
    }
    MDB_val key;
    MDB_val value;
    while ((result = mdb_cursor_get(cursor, &key, &value, MDB_NEXT)) == 0) {
        if (key.mv_size != sizeof(size_t) || value.mv_size < sizeof(size_t)) {
            result = MDB_CORRUPTED;
            break;
        }
        size_t transaction;
        size_t pages;
        memcpy(&transaction, key.mv_data, sizeof transaction);
        memcpy(&pages, value.mv_data, sizeof pages);
        *(transaction < oldest ? free_pages : pinned) += pages;
    }
    mdb_cursor_close(cursor);
    return result == MDB_NOTFOUND ? RST_OK : rst_fail_lmdb(error, result, "counting free pages");
}

int rst_store_stat(rst_store *store, rst_stat *out, rst_error *error)
{
    rst_error_clear(error);
    memset(out, 0, sizeof *out);
    rst_env *env = store->env;
    int code = rst_store_usable(store, false, error);
    if (code) {
        return code;
    }
    readers r = {.oldest_transaction = UINT64_MAX};
    mdb_reader_list(env->lmdb, read_line, &r); /* before the snapshot below becomes one */
    rst_snapshot *snapshot;
    code = rst_snapshot_open(store, &snapshot, error);
    if (code) {
        return code;
    }
    MDB_envinfo info;
    MDB_stat sessions = {0};
    mdb_env_info(env->lmdb, &info);
    mdb_stat(snapshot->txn, env->sessions, &sessions);
    uint64_t last = rst_snapshot_id(snapshot);
    /* What the last commit freed is free too: it only has to wait for the next one. */
    uint64_t oldest = r.oldest_transaction < last ? r.oldest_transaction : last + 1;
    uint64_t free_pages = 0;
    uint64_t pinned = 0;
    code = rst_read_totals(snapshot->txn, env, &out->totals, error);
    if (!code) {
        code = count_free_pages(snapshot->txn, oldest, &free_pages, &pinned, error);
    }
    rst_snapshot_close(snapshot);
    if (code) {
        return code;
    }
    uint64_t page = env->format.page_size;
    uint64_t written = (uint64_t)info.me_last_pgno + 1;
    uint64_t never = env->map_size / page > written ? env->map_size / page - written : 0;
    out->format = env->format;
    out->session_count = sessions.ms_entries;
    out->used_size = (written - free_pages - pinned) * page;
    out->free_size = (free_pages + never) * page;
    out->pinned_size = pinned * page;
    out->last_transaction = last;
    out->readers_used = r.used;
    if (r.oldest_transaction != UINT64_MAX) {
        out->reader_pid = r.oldest_pid;
        out->reader_age = last > r.oldest_transaction ? last - r.oldest_transaction : 0;
    }
    char data[4096];
    snprintf(data, sizeof data, "%s/data.mdb", store->path);
    out->read_only_files = access(data, W_OK) != 0;
    return RST_OK;
}

int rst_store_clear_readers(rst_store *store, uint32_t *cleared, rst_error *error)
{
    rst_error_clear(error);
    int code = rst_store_usable(store, false, error);
    if (code) {
        return code;
    }
    int dead;
    int result = rst_clear_dead_readers(store->env, &dead);
    if (result) {
        return rst_fail_lmdb(error, result, "clearing dead readers");
    }
    if (cleared) {
        *cleared = (uint32_t)dead;
    }
    return RST_OK;
}
