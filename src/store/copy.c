/* A consistent, compacted copy of a live store. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "files.h"
#include "internal.h"
#include "pages/pages.h"

typedef struct copy_job {
    rst_store *source;
} copy_job;

static int set_format(const char *folder, mode_t mode, const rst_format_entry *format,
                      rst_error *error)
{
    rst_env env = {0};
    int code = rst_lmdb_open(folder, MDB_WRITEMAP, format->reader_count, mode, format->map_size,
                             &env.lmdb, error);
    if (!code) {
        code = rst_allocate_data(env.lmdb, format->map_size, folder, error);
    }
    MDB_txn *txn = NULL;
    int result = code ? 0 : mdb_txn_begin(env.lmdb, NULL, 0, &txn);
    if (!code && !result) {
        code = rst_open_databases(&env, txn, 0, error);
        MDB_val key = {sizeof RST_META_KEY_FORMAT - 1, (void *)(uintptr_t)RST_META_KEY_FORMAT};
        MDB_val value = {sizeof *format, (void *)(uintptr_t)format};
        result = code ? 0 : mdb_put(txn, env.meta, &key, &value, 0);
    }
    if (txn && (code || result)) {
        mdb_txn_abort(txn);
    } else if (txn) {
        result = mdb_txn_commit(txn);
    }
    if (!code && !result) {
        result = mdb_env_sync(env.lmdb, 1);
    }
    if (result && !code) {
        code = rst_fail_lmdb(error, result, "writing the copy");
    }
    if (env.lmdb) {
        rst_lmdb_close(env.lmdb);
    }
    return code;
}

/* LMDB copies as many pages as the first page of a value says. */
static int check_source(rst_store *store, rst_error *error)
{
    rst_snapshot *snapshot;
    int code = rst_snapshot_open(store, &snapshot, error);
    if (!code) {
        code = rst_pages_check(store->env->lmdb, snapshot->txn, RST_PAGES_ALL, error);
        rst_snapshot_close(snapshot);
    }
    return code;
}

static int fill_copy(const char *folder, mode_t mode, const rst_format_entry *format,
                     rst_error *error, void *context)
{
    copy_job *job = context;
    /* Its reader takes LMDB's lock without rst_guard_lock_slots: only copies wait for it. */
    int result = mdb_env_copy2(job->source->env->lmdb, folder, MDB_CP_COMPACT);
    if (result) {
        return rst_fail_lmdb(error, result, "copying");
    }
    return set_format(folder, mode, format, error);
}

int rst_store_copy(rst_store *store, const char *path, uint64_t capacity_size, rst_error *error)
{
    rst_error_clear(error);
    int code = rst_store_usable(store, false, error);
    if (code) {
        return code;
    }
    if (!path || !*path) {
        return rst_fail(error, RST_ERR_ARGUMENT, "path", "no path was given");
    }
    if (access(path, F_OK) == 0) {
        return rst_fail(error, RST_ERR_EXISTS, "path", "there is something at %s already", path);
    }
    rst_stat stat;
    code = check_source(store, error);
    if (!code) {
        code = rst_store_stat(store, &stat, error);
    }
    if (code) {
        return code;
    }
    rst_format_entry format = store->env->format;
    if (capacity_size) {
        rst_create_options options = {.capacity_size = capacity_size,
                                      .durability = (rst_durability)format.durability,
                                      .interval_ms = format.interval_ms,
                                      .reader_count = format.reader_count};
        rst_format_entry sized;
        code = rst_make_format(&options, &sized, error);
        if (code) {
            return code;
        }
        if (sized.capacity_size < stat.used_size) {
            return rst_fail(error, RST_ERR_ARGUMENT, "capacity",
                            "a capacity of %llu bytes: the store's contents need %llu",
                            (unsigned long long)capacity_size, (unsigned long long)stat.used_size);
        }
        format.capacity_size = sized.capacity_size;
        format.map_size = sized.map_size;
    }
    struct stat data;
    char data_path[PATH_MAX];
    code = rst_path_join(data_path, store->path, RST_DATA_FILE, error);
    unsigned flags =
        !code && lstat(data_path, &data) == 0 && (data.st_mode & S_IWGRP) ? RST_OPEN_GROUP : 0;
    copy_job job = {.source = store};
    return code ? code : rst_create_folder(path, flags, &format, fill_copy, &job, error);
}
