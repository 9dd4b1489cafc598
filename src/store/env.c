/* Opening and closing: one LMDB environment for each store that this process uses. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "durability/guard.h"
#include "durability/sync.h"
#include "files.h"
#include "pages/pages.h"

/* LMDB forbids opening an environment twice in a process: closing one of them would drop the file
 * locks of both.  So every handle of a store shares the environment found in this list. */
static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER;
static rst_env *list;

atomic_uint_fast64_t rst_fork_generation;

static void before_fork(void)
{
    pthread_mutex_lock(&list_lock);
}

static void after_fork_in_parent(void)
{
    pthread_mutex_unlock(&list_lock);
}

/* The child must not touch the parent's environments: reader slots and locks are the parent's. They
 * are forgotten, not closed; their mapping goes with the child. */
static void after_fork_in_child(void)
{
    atomic_fetch_add(&rst_fork_generation, 1);
    for (rst_env *env = list; env; env = env->next) {
        rst_guard_forget(env->guard);
    }
    list = NULL;
    pthread_mutex_unlock(&list_lock);
}

static void watch_forks(void)
{
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

int rst_store_usable(const rst_store *store, bool to_write, rst_error *error)
{
    if (store->env->generation !=
        atomic_load_explicit(&rst_fork_generation, memory_order_relaxed)) {
        return rst_fail(error, RST_ERR_FORKED, NULL,
                        "%s was opened before this process was forked: open it again here",
                        store->path);
    }
    if (to_write && store->flags & RST_OPEN_READ_ONLY) {
        return rst_fail(error, RST_ERR_READ_ONLY, NULL,
                        "%s was opened read-only: to write, open it without RST_OPEN_READ_ONLY (in "
                        "Python with mode \"w\")",
                        store->path);
    }
    return RST_OK;
}

/* ---------------------------------------------------------------- an environment */

/* The file must hold every page that LMDB's meta page speaks of, or reading one is a SIGBUS. */
static int check_file_holds_pages(rst_env *env, uint64_t *file_size, rst_error *error)
{
    MDB_envinfo info;
    MDB_stat stat;
    struct stat file;
    int fd;
    mdb_env_info(env->lmdb, &info);
    mdb_env_stat(env->lmdb, &stat);
    if (mdb_env_get_fd(env->lmdb, &fd) != 0 || fstat(fd, &file) != 0) {
        return rst_fail_errno(error, "looking at", "the data file");
    }
    uint64_t needed = ((uint64_t)info.me_last_pgno + 1) * stat.ms_psize;
    if ((uint64_t)file.st_size < needed || info.me_mapsize < needed) {
        return rst_fail(error, RST_ERR_CORRUPT, "path",
                        "the data file was cut: %lld bytes, its pages need %llu",
                        (long long)file.st_size, (unsigned long long)needed);
    }
    env->device = file.st_dev;
    env->inode = file.st_ino;
    env->map_size = info.me_mapsize;
    *file_size = (uint64_t)file.st_size;
    return RST_OK;
}

/* LMDB does not tell where its map begins.  Each of its pages begins with its own number, so the
 * page that any value lies in tells. */
static int find_map(rst_env *env, MDB_txn *txn, rst_error *error)
{
    MDB_val key = {sizeof RST_META_KEY_FORMAT - 1, (void *)(uintptr_t)RST_META_KEY_FORMAT};
    MDB_val value;
    int result = mdb_get(txn, env->meta, &key, &value);
    if (result) {
        return rst_fail_lmdb(error, result, "opening");
    }
    uintptr_t page = (uintptr_t)value.mv_data / env->format.page_size * env->format.page_size;
    uint64_t number;
    memcpy(&number, (const void *)page, sizeof number);
    if (number > env->map_size / env->format.page_size) {
        return rst_fail(error, RST_ERR_CORRUPT, "path", "a page of the data file has no number");
    }
    env->map = (const unsigned char *)(page - number * env->format.page_size);
    return RST_OK;
}

/* The format entry is no part of the trees: what it says of them must be what LMDB says.  Opening
 * for writing makes the file as long as the entry has it: longer, after it was copied without its
 * end, but never shorter, or whoever has it mapped now is killed. */
static int check_format(const rst_env *env, uint64_t file_size, rst_error *error)
{
    MDB_stat stat;
    mdb_env_stat(env->lmdb, &stat);
    if (env->format.page_size != stat.ms_psize || env->format.map_size > env->map_size ||
        env->format.map_size < file_size) {
        return rst_fail(error, RST_ERR_CORRUPT, "meta",
                        "the store's format entry is damaged: its sizes are not the file's");
    }
    if (stat.ms_psize > sysconf(_SC_PAGESIZE)) {
        return rst_fail(error, RST_ERR_VERSION, "page_size",
                        "the store was created on a machine with memory pages of %u bytes, larger "
                        "than this one's: ingest its sessions here anew",
                        stat.ms_psize);
    }
    return RST_OK;
}

/* Read what an existing store says of itself, when its pages are what LMDB takes them for. */
static int load(rst_env *env, rst_pages_extent check, rst_error *error)
{
    uint64_t file_size = 0;
    int code = check_file_holds_pages(env, &file_size, error);
    if (code) {
        return code;
    }
    MDB_txn *txn;
    int result = rst_begin_reading(env, &txn);
    if (result) {
        return rst_fail_lmdb(error, result, "opening");
    }
    code = check == RST_PAGES_NOT ? RST_OK : rst_pages_check(env->lmdb, txn, check, error);
    if (!code) {
        code = rst_open_databases(env, txn, 0, error);
    }
    if (!code) {
        code = rst_read_format(txn, env->meta, &env->format, error);
    }
    if (!code) {
        code = check_format(env, file_size, error);
    }
    if (!code) {
        code = find_map(env, txn, error);
    }
    if (code) {
        mdb_txn_abort(txn);
        return code;
    }
    mdb_txn_commit(txn); /* keeps the database handles */
    env->capacity_pages = env->format.capacity_size / env->format.page_size;
    return RST_OK;
}

static void env_free(rst_env *env)
{
    if (env->lmdb) {
        rst_lmdb_close(env->lmdb);
    }
    rst_guard_detach(env->guard);
    free((void *)env->checked);
    free(env);
}

/* LMDB stretches a lock file that has fewer slots than it is asked for, when nobody else has it
 * open. Before the store's own number is known, ask for one, unless there is no lock file yet. */
static unsigned slots_to_ask_for(const char *path)
{
    char lock[PATH_MAX];
    struct stat info;
    bool there = rst_path_join(lock, path, RST_LOCK_FILE, NULL) == RST_OK &&
                 stat(lock, &info) == 0 && info.st_size > 0;
    return there ? 1 : RST_READER_COUNT_DEFAULT;
}

/* Opening for writing lets LMDB stretch the file: so a file that is none of ours is found out
 * read-only first. */
static int probe(const char *path, rst_guard *guard, rst_format_entry *format, rst_error *error)
{
    rst_env env = {.guard = guard};
    int code = rst_lmdb_open(path, MDB_RDONLY, slots_to_ask_for(path), 0600, 0, &env.lmdb, error);
    if (!code) {
        code = load(&env, RST_PAGES_FOR_WRITING, error);
        rst_lmdb_close(env.lmdb);
        *format = env.format;
    }
    return code;
}

int rst_allocate_data(MDB_env *lmdb, uint64_t size, const char *path, rst_error *error)
{
    int fd;
    mdb_env_get_fd(lmdb, &fd);
    return rst_allocate_file(fd, size, path, error);
}

static int open_for_writing(const char *path, rst_env *env, rst_error *error)
{
    rst_format_entry format;
    int code = probe(path, env->guard, &format, error);
    if (!code) {
        code = rst_check_limits(format.map_size, error);
    }
    if (!code) {
        code = rst_lmdb_open(path, MDB_WRITEMAP, format.reader_count, 0600, format.map_size,
                             &env->lmdb, error);
    }
    /* A copied or restored file may have holes; a hole met through the map on a full file system is
     * a SIGBUS. */
    if (!code) {
        code = rst_allocate_data(env->lmdb, format.map_size, path, error);
    }
    if (!code) {
        code = load(env, RST_PAGES_NOT, error);
    }
    if (!code && env->format.durability != RST_DURABILITY_FULL) {
        mdb_env_set_flags(env->lmdb, MDB_NOSYNC, 1);
    }
    return code;
}

/* ---------------------------------------------------------------- what the machine left */

/* guard.bin; made anew where it is missing, once it is clear that this is a store. */
static int attach(const char *path, rst_env *env, rst_error *error)
{
    int code = rst_guard_attach(path, env->read_only, &env->guard, error);
    if (code != RST_ERR_NOT_FOUND) {
        return code;
    }
    rst_error_clear(error);
    rst_format_entry format;
    code = probe(path, NULL, &format, error);
    code = code ? code : rst_guard_adopt(path, &format, error);
    return code ? code : rst_guard_attach(path, env->read_only, &env->guard, error);
}

static void keep_first_fault(void *context, const rst_error *fault)
{
    rst_error *first = context;
    if (first->code == RST_OK) {
        *first = *fault;
    }
}

static int verify_all(rst_env *env, const char *path, rst_error *error)
{
    rst_store store = {.env = env, .path = (char *)(uintptr_t)path, .flags = RST_OPEN_TRUST};
    rst_error first = {.code = RST_OK};
    rst_verify_options options = {.fault = keep_first_fault, .context = &first};
    rst_verify_result result;
    int code = rst_store_verify(&store, &options, &result, error);
    return code || result.fault_count == 0
               ? code
               : rst_fail(error, RST_ERR_CORRUPT, first.field, "%s", first.message);
}

static int say_damaged(const char *path, uint16_t durability, rst_error *error)
{
    char why[RST_ERROR_MESSAGE_SIZE];
    snprintf(why, sizeof why, "%s", error ? error->message : "");
    const char *promise =
        durability == RST_DURABILITY_MEMORY ? "; durability memory promises nothing then" : "";
    return rst_fail(error, RST_ERR_CORRUPT, "path",
                    "%s was in use when the machine stopped or its disk failed, and is damaged: "
                    "%s%s",
                    path, why, promise);
}

/* ---------------------------------------------------------------- opening */

static int open_lmdb(const char *path, rst_env *env, rst_error *error)
{
    if (!env->read_only) {
        return open_for_writing(path, env, error);
    }
    int code = rst_lmdb_open(path, MDB_RDONLY, slots_to_ask_for(path), 0600, 0, &env->lmdb, error);
    return code ? code : load(env, RST_PAGES_FOR_READING, error);
}

static int env_open_steps(const char *path, rst_env *env, rst_error *error)
{
    int code = attach(path, env, error);
    if (code) {
        return code;
    }
    bool was_stale = env->guard->stale;
    uint16_t durability = env->guard->slot.durability;
    code = rst_guard_recover(env->guard, path, error);
    code = code ? code : open_lmdb(path, env, error);
    if (!code && env->guard->verify) {
        code = verify_all(env, path, error);
    }
    if (code) {
        bool damaged = code == RST_ERR_CORRUPT || code == RST_ERR_NOT_STORE;
        return damaged && was_stale ? say_damaged(path, durability, error) : code;
    }
    code = rst_guard_settle(env->guard, &env->format, error);
    if (!code && !env->read_only && env->format.durability == RST_DURABILITY_INTERVAL) {
        code = rst_syncer_start(env, error);
    }
    return code;
}

static int env_open(const char *path, bool read_only, rst_env **out, rst_error *error)
{
    rst_env *env = calloc(1, sizeof *env);
    if (!env) {
        return rst_fail(error, RST_ERR_MEMORY, NULL, "no memory");
    }
    env->read_only = read_only;
    env->generation = atomic_load(&rst_fork_generation);
    int code = env_open_steps(path, env, error);
    if (code) {
        env_free(env);
        return code;
    }
    *out = env;
    return RST_OK;
}

/* ---------------------------------------------------------------- handles */

static rst_env *find_env(const struct stat *file)
{
    for (rst_env *env = list; env; env = env->next) {
        if (env->device == file->st_dev && env->inode == file->st_ino) {
            return env;
        }
    }
    return NULL;
}

/* With list_lock held. */
static int acquire(const char *path, unsigned flags, const struct stat *file, rst_env **out,
                   rst_error *error)
{
    bool read_only = flags & RST_OPEN_READ_ONLY;
    rst_env *env = find_env(file);
    if (env && env->read_only && !read_only) {
        return rst_fail(error, RST_ERR_BUSY, NULL,
                        "this process has %s open read-only already: close that first, or open for "
                        "writing before",
                        path);
    }
    if (!env) {
        int code = env_open(path, read_only, &env, error);
        if (code) {
            return code;
        }
        env->next = list;
        list = env;
    }
    env->handles++;
    *out = env;
    return RST_OK;
}

static int find_or_create(const char *path, unsigned flags, const rst_create_options *options,
                          struct stat *file, rst_error *error)
{
    char data[PATH_MAX];
    int code = rst_path_join(data, path, RST_DATA_FILE, error);
    if (!code) {
        code = rst_check_no_planted_link(path, error);
    }
    if (code) {
        return code;
    }
    code = rst_check_data_file(data, file, error);
    if (code == RST_OK && flags & RST_OPEN_EXCLUSIVE) {
        return rst_fail(error, RST_ERR_EXISTS, "path", "there is a store at %s already", path);
    }
    if (code == RST_ERR_NOT_STORE && flags & RST_OPEN_CREATE) {
        /* What has appeared since the first look is another process's new store: look again. */
        bool missing = access(data, F_OK) != 0;
        code = missing ? rst_create(path, flags, options, error) : RST_OK;
        code = code ? code : rst_check_data_file(data, file, error);
    }
    if (!code) {
        code = rst_check_file_system(path, error);
    }
    return code;
}

int rst_store_open(const char *path, unsigned flags, const rst_create_options *options,
                   rst_store **out, rst_error *error)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    rst_error_clear(error);
    *out = NULL;
    const unsigned known =
        RST_OPEN_READ_ONLY | RST_OPEN_CREATE | RST_OPEN_EXCLUSIVE | RST_OPEN_GROUP | RST_OPEN_TRUST;
    if (flags & ~known || (flags & RST_OPEN_READ_ONLY && flags & RST_OPEN_CREATE) ||
        (flags & RST_OPEN_EXCLUSIVE && !(flags & RST_OPEN_CREATE))) {
        return rst_fail(error, RST_ERR_ARGUMENT, "flags", "flags 0x%x do not go together", flags);
    }
    if (!path || !*path) {
        return rst_fail(error, RST_ERR_ARGUMENT, "path", "no path was given");
    }
    rst_store *store = calloc(1, sizeof *store);
    char *copy = strdup(path);
    if (!store || !copy) {
        free(store);
        free(copy);
        return rst_fail(error, RST_ERR_MEMORY, NULL, "no memory");
    }
    store->path = copy;
    store->flags = flags;
    pthread_mutex_lock(&list_lock);
    struct stat file;
    int code = find_or_create(path, flags, options, &file, error);
    if (!code) {
        code = acquire(path, flags, &file, &store->env, error);
    }
    pthread_mutex_unlock(&list_lock);
    if (code) {
        free(copy);
        free(store);
        return code;
    }
    *out = store;
    return RST_OK;
}

static int release_env(rst_env *env, rst_error *error)
{
    if (--env->handles > 0) {
        return RST_OK;
    }
    rst_env **at = &list;
    while (*at != env) {
        at = &(*at)->next;
    }
    *at = env->next;
    int code = rst_syncer_stop(env, error);
    env_free(env);
    return code;
}

int rst_store_close(rst_store *store, rst_error *error)
{
    rst_error_clear(error);
    if (!store) {
        return RST_OK;
    }
    bool inherited = rst_store_usable(store, false, NULL) != RST_OK;
    unsigned open = atomic_load(&store->snapshots);
    if (open > 0 && !inherited) {
        return rst_fail(error, RST_ERR_BUSY, NULL, "%s has %u open snapshot%s: close %s first",
                        store->path, open, open == 1 ? "" : "s", open == 1 ? "it" : "them");
    }
    int code = RST_OK;
    if (!inherited) {
        pthread_mutex_lock(&list_lock);
        code = release_env(store->env, error);
        pthread_mutex_unlock(&list_lock);
    }
    free(store->path);
    free(store);
    return code;
}

const char *rst_store_path(const rst_store *store)
{
    return store->path;
}

int rst_store_map(rst_store *store, const void **map, size_t *map_size, rst_error *error)
{
    rst_error_clear(error);
    int code = rst_store_usable(store, false, error);
    if (!code) {
        *map = store->env->map;
        *map_size = store->env->map_size;
    }
    return code;
}
