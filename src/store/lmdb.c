/* LMDB: its results as errors, its transactions begun, and its environments opened and closed
 * safely. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <unistd.h>

#include "durability/guard.h"
#include "files.h"
#include "internal.h"
#include "pages/pages.h"

int rst_fail_lmdb(rst_error *error, int result, const char *what)
{
    switch (result) {
    case MDB_MAP_FULL:
    case MDB_TXN_FULL:
        return rst_fail(error, RST_ERR_FULL, NULL, "%s: the store is at capacity", what);
    case MDB_READERS_FULL:
        return rst_fail(error, RST_ERR_READERS, NULL,
                        "%s: every reader slot is taken: close snapshots, or create the store with "
                        "more (reader_count, rollstore create --readers)",
                        what);
    case MDB_VERSION_MISMATCH:
        return rst_fail(error, RST_ERR_VERSION, NULL, "%s: the files were written by another LMDB",
                        what);
    case MDB_INVALID:
        return rst_fail(error, RST_ERR_NOT_STORE, NULL, "%s: not an LMDB environment", what);
    case MDB_NOTFOUND: /* these two where the caller did not look for them: entries that belong */
    case MDB_KEYEXIST: /* together do not agree */
    case MDB_CORRUPTED:
    case MDB_PAGE_NOTFOUND:
    case MDB_PANIC:
    case MDB_BAD_TXN:
    case MDB_BAD_VALSIZE:
    case MDB_INCOMPATIBLE:
        return rst_fail(error, RST_ERR_CORRUPT, NULL, "%s: %s", what, mdb_strerror(result));
    case EACCES:
    case EPERM:
    case EROFS:
        return rst_fail_system(error, RST_ERR_PERMISSION, result, "%s", what);
    case ENOSPC:
    case EDQUOT:
        return rst_fail_system(error, RST_ERR_NO_SPACE, result, "%s", what);
    case ENOMEM:
        return rst_fail_system(error, RST_ERR_MEMORY, result, "%s", what);
    default:
        if (result > 0) {
            return rst_fail_system(error, RST_ERR_IO, result, "%s", what);
        }
        return rst_fail(error, RST_ERR_IO, NULL, "%s: %s", what, mdb_strerror(result));
    }
}

int rst_begin_writing(rst_env *env, MDB_txn **txn)
{
    *txn = NULL;
    int result = rst_guard_lock_writing(env->guard);
    if (!result) {
        result = mdb_txn_begin(env->lmdb, NULL, 0, txn);
        if (result) {
            rst_guard_unlock_writing(env->guard);
        }
    }
    return result;
}

/* With the lock of rst_guard_lock_slots. */
static int take_slot(MDB_env *lmdb, MDB_txn **txn)
{
    int result = mdb_txn_begin(lmdb, NULL, MDB_RDONLY, txn);
    if (result == MDB_READERS_FULL) {
        int dead;
        mdb_reader_check(lmdb, &dead);
        result = mdb_txn_begin(lmdb, NULL, MDB_RDONLY, txn);
    }
    return result;
}

int rst_begin_reading(rst_env *env, MDB_txn **txn)
{
    *txn = NULL;
    int result = rst_guard_lock_slots(env->guard);
    if (!result) {
        result = take_slot(env->lmdb, txn);
        rst_guard_unlock_slots(env->guard);
    }
    return result;
}

int rst_clear_dead_readers(rst_env *env, int *dead)
{
    *dead = 0;
    int result = rst_guard_lock_slots(env->guard);
    if (!result) {
        result = mdb_reader_check(env->lmdb, dead);
        rst_guard_unlock_slots(env->guard);
    }
    return result;
}

enum { DATABASE_COUNT = 6 };

/* LMDB's opening and closing are not safe against each other: since 0.9.30 the last one to close
 * destroys the locks in the lock file, also when somebody who opens at that moment has found them
 * good.  Both are therefore done under this lock on the data file, which ends with its descriptor,
 * and so with its process. */
static int lock_data_file(const char *path)
{
    char data[PATH_MAX];
    if (rst_path_join(data, path, RST_DATA_FILE, NULL) != RST_OK) {
        return -1;
    }
    int fd = open(data, O_RDONLY | O_CLOEXEC);
    while (fd >= 0 && flock(fd, LOCK_EX) != 0 && errno == EINTR) {
    }
    return fd; /* -1 where there is no file yet: nobody else can be opening it */
}

/* The same file under a descriptor of its own.  One that was merely duplicated would be one with
 * those that children have inherited, and the lock would last as long as they do. */
static int lock_again(MDB_env *lmdb)
{
    int fd;
    char name[40];
    if (mdb_env_get_fd(lmdb, &fd) != 0) {
        return -1;
    }
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    int own = open(name, O_RDONLY | O_CLOEXEC);
    if (own < 0) { /* no /proc */
        own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    }
    while (own >= 0 && flock(own, LOCK_EX) != 0 && errno == EINTR) {
    }
    return own;
}

static void unlock_data_file(int fd)
{
    if (fd >= 0) {
        flock(fd, LOCK_UN); /* said, in case a child has the descriptor, too */
        close(fd);
    }
}

void rst_lmdb_close(MDB_env *lmdb)
{
    int lock = lock_again(lmdb);
    mdb_env_close(lmdb);
    unlock_data_file(lock);
}

int rst_lmdb_open(const char *path, unsigned flags, unsigned reader_count, mode_t mode,
                  uint64_t map_size, MDB_env **out, rst_error *error)
{
    MDB_env *lmdb;
    int result = mdb_env_create(&lmdb);
    if (result) {
        return rst_fail_lmdb(error, result, "opening");
    }
    mdb_env_set_maxdbs(lmdb, DATABASE_COUNT);
    mdb_env_set_maxreaders(lmdb, reader_count);
    if (map_size) {
        mdb_env_set_mapsize(lmdb, (size_t)map_size);
    }
    int lock = lock_data_file(path);
    int code = lock < 0 && errno != ENOENT ? rst_fail_errno(error, "opening", path) : RST_OK;
    if (lock >= 0) {
        code = rst_pages_check_metas(lock, error); /* what LMDB is about to believe */
    }
    if (!code) {
        code = rst_reserve_lock_file(path, reader_count, mode, error);
    }
    if (code) {
        mdb_env_close(lmdb);
        unlock_data_file(lock);
        return code;
    }
    /* Snapshots move between threads: no thread-local reader slots. */
    result = mdb_env_open(lmdb, path, flags | MDB_NOTLS, mode);
    int fd;
    if (!result && mdb_env_get_fd(lmdb, &fd) == 0) {
        fcntl(fd, F_SETFD, FD_CLOEXEC);
    }
    if (result) {
        mdb_env_close(lmdb); /* before the lock ends */
    }
    unlock_data_file(lock);
    if (result) {
        char what[PATH_MAX + 16];
        snprintf(what, sizeof what, "opening %s", path);
        return rst_fail_lmdb(error, result, what);
    }
    *out = lmdb;
    return RST_OK;
}

int rst_open_databases(rst_env *env, MDB_txn *txn, unsigned flags, rst_error *error)
{
    const struct {
        const char *name;
        MDB_dbi *dbi;
    } databases[DATABASE_COUNT] = {
        {"meta", &env->meta},   {"sessions", &env->sessions},   {"turns", &env->turns},
        {"ready", &env->ready}, {"consumers", &env->consumers}, {"leases", &env->leases},
    };
    for (int i = 0; i < DATABASE_COUNT; i++) {
        int result = mdb_dbi_open(txn, databases[i].name, flags, databases[i].dbi);
        if (result == MDB_NOTFOUND || result == MDB_INCOMPATIBLE) {
            return rst_fail(error, RST_ERR_NOT_STORE, "path",
                            "an LMDB environment, but not a rollstore: it has no database \"%s\"",
                            databases[i].name);
        }
        if (result) {
            return rst_fail_lmdb(error, result, "opening the databases");
        }
    }
    return RST_OK;
}
