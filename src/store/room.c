/* Room for what needs little: at capacity, releases and the like write to pages that turns never
 * get.  Those come back when nothing reads them any more: no snapshot, and no pin of a sync. */
#include "durability/sync.h"

/* LMDB keeps the pages that the last transaction freed for one transaction more.  When that was a
 * release and nobody commits after it, whoever waits for its pages must. */
static int commit_once_more(rst_store *store, bool *made, rst_error *error)
{
    rst_write write;
    int code = rst_write_begin_now(store, &write, error);
    if (code) {
        return code;
    }
    write.changed = write.totals.freed_transaction + 1 == mdb_txn_id(write.txn);
    *made |= write.changed;
    return rst_write_commit(&write, error);
}

int rst_write_make_room(rst_store *store, bool *made, rst_error *error)
{
    int dead;
    rst_clear_dead_readers(store->env, &dead); /* they may hold what was released */
    *made = dead > 0;
    int64_t index = error ? error->index : -1; /* stays that of the change at fault */
    int code = commit_once_more(store, made, error);
    if (!code || code == RST_ERR_FULL) {
        code = rst_syncer_give_back(store->env, made, error);
    }
    if (error) {
        error->index = index;
    }
    return code;
}

/* Whether a quarter of the pages kept for such writes can be written to now.  As long as the file
 * has not grown into them, a look at its length tells. */
static bool has_room(rst_store *store)
{
    const rst_env *env = store->env;
    uint64_t pages = env->map_size / env->format.page_size;
    uint64_t enough = (pages - env->capacity_pages) / 4;
    MDB_envinfo info;
    mdb_env_info(env->lmdb, &info);
    if (pages >= info.me_last_pgno + 1 + enough) {
        return true;
    }
    rst_stat stat;
    return rst_store_stat(store, &stat, NULL) != RST_OK || /* the write will meet it, too */
           stat.free_size / env->format.page_size >= enough;
}

int rst_write_begin(rst_store *store, rst_write *write, rst_error *error)
{
    int code = rst_store_usable(store, true, error);
    if (code) {
        return code;
    }
    rst_deadline deadline = rst_deadline_in(RST_ROOM_PATIENCE_MS);
    while (!has_room(store) && !rst_deadline_passed(&deadline)) {
        uint64_t seen = rst_last_transaction(store->env);
        bool made;
        code = rst_write_make_room(store, &made, error);
        if (code) {
            return code;
        }
        if (!made) {
            rst_deadline look = rst_deadline_in(5);
            rst_wait_for_commit(store->env, seen, &look);
        }
    }
    return rst_write_begin_now(store, write, error);
}
