/* Creating a store. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "durability/guard.h"
#include "files.h"
#include "internal.h"

static int write_format(rst_env *env, const rst_format_entry *format, rst_error *error)
{
    MDB_txn *txn;
    int result = mdb_txn_begin(env->lmdb, NULL, 0, &txn);
    if (result) {
        return rst_fail_lmdb(error, result, "creating");
    }
    int code = rst_open_databases(env, txn, MDB_CREATE, error);
    if (code) {
        mdb_txn_abort(txn);
        return code;
    }
    rst_totals_entry totals = {.next_sequence = 1};
    MDB_val keys[] = {{sizeof RST_META_KEY_FORMAT - 1, (void *)(uintptr_t)RST_META_KEY_FORMAT},
                      {sizeof RST_META_KEY_TOTALS - 1, (void *)(uintptr_t)RST_META_KEY_TOTALS}};
    MDB_val values[] = {{sizeof *format, (void *)(uintptr_t)format}, {sizeof totals, &totals}};
    for (int i = 0; i < 2; i++) {
        result = mdb_put(txn, env->meta, &keys[i], &values[i], 0);
        if (result) {
            mdb_txn_abort(txn);
            return rst_fail_lmdb(error, result, "creating");
        }
    }
    result = mdb_txn_commit(txn);
    return result ? rst_fail_lmdb(error, result, "creating") : RST_OK;
}

static int random_bytes(void *out, size_t size, rst_error *error)
{
    int fd = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
    ssize_t got = fd < 0 ? -1 : read(fd, out, size);
    if (fd >= 0) {
        close(fd);
    }
    return got == (ssize_t)size ? RST_OK : rst_fail_errno(error, "reading", "/dev/urandom");
}

int rst_make_format(const rst_create_options *options, rst_format_entry *format, rst_error *error)
{
    static const rst_create_options defaults;
    const rst_create_options *o = options ? options : &defaults;
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    page = page > 32768 ? 32768 : page; /* LMDB's own limit */
    uint64_t capacity = o->capacity_size ? o->capacity_size : RST_CAPACITY_DEFAULT;
    if (capacity < RST_CAPACITY_MIN || capacity > UINT64_C(1) << 46) {
        return rst_fail(error, RST_ERR_ARGUMENT, "capacity",
                        "a capacity of %llu bytes: it must be at least %llu and at most 64 TiB",
                        (unsigned long long)capacity, (unsigned long long)RST_CAPACITY_MIN);
    }
    if (o->durability &&
        (o->durability < RST_DURABILITY_MEMORY || o->durability > RST_DURABILITY_FULL)) {
        return rst_fail(error, RST_ERR_ARGUMENT, "durability", "durability %d is none",
                        (int)o->durability);
    }
    if (o->reader_count > RST_READER_COUNT_MAX) {
        return rst_fail(error, RST_ERR_ARGUMENT, "reader_count",
                        "%u reader slots: at most %u, every commit looks at all of them",
                        o->reader_count, RST_READER_COUNT_MAX);
    }
    capacity = (capacity + page - 1) / page * page;
    /* Releasing writes too: copies of tree pages, and lists of the freed ones.  Turns never get
     * these pages, so a full store can always be emptied. */
    uint64_t reserve = (UINT64_C(1) << 20) + capacity / 64 / page * page;
    *format = (rst_format_entry){
        .magic = RST_FORMAT_MAGIC,
        .version = RST_FORMAT_VERSION,
        .capacity_size = capacity,
        .map_size = capacity + reserve,
        .page_size = (uint32_t)page,
        .durability = o->durability ? o->durability : RST_DURABILITY_MEMORY,
        .reader_count = o->reader_count ? o->reader_count : RST_READER_COUNT_DEFAULT,
        .created_ns = rst_clock_ns(CLOCK_REALTIME),
    };
    if (format->durability == RST_DURABILITY_INTERVAL) {
        format->interval_ms = o->interval_ms ? o->interval_ms : RST_INTERVAL_DEFAULT_MS;
    }
    return random_bytes(format->store_id, sizeof format->store_id, error);
}

static const char *const files[] = {RST_DATA_FILE, RST_LOCK_FILE, RST_GUARD_FILE};
enum { FILE_COUNT = sizeof files / sizeof *files };

static void remove_store(const char *folder)
{
    char path[PATH_MAX];
    for (int i = 0; i < FILE_COUNT; i++) {
        if (rst_path_join(path, folder, files[i], NULL) == RST_OK) {
            unlink(path);
        }
    }
    rmdir(folder);
}

static int fill_folder(const char *folder, mode_t mode, const rst_format_entry *format,
                       rst_error *error)
{
    rst_env env = {0};
    int code = rst_lmdb_open(folder, MDB_WRITEMAP, format->reader_count, mode, format->map_size,
                             &env.lmdb, error);
    if (!code) {
        code = rst_allocate_data(env.lmdb, format->map_size, folder, error);
    }
    if (!code) {
        code = write_format(&env, format, error);
    }
    if (!code) {
        int result = mdb_env_sync(env.lmdb, 1);
        code = result ? rst_fail_lmdb(error, result, "creating") : RST_OK;
    }
    if (env.lmdb) {
        rst_lmdb_close(env.lmdb);
    }
    return code;
}

/* The umask may have taken the group's permission away, which was asked for. */
static int set_permissions(const char *folder, mode_t mode, rst_error *error)
{
    char path[PATH_MAX];
    for (int i = 0; i < FILE_COUNT; i++) {
        int code = rst_path_join(path, folder, files[i], error);
        if (!code && chmod(path, mode) != 0) {
            code = rst_fail_errno(error, "setting permissions of", path);
        }
        if (code) {
            return code;
        }
    }
    mode_t search = (mode & 0444) >> 2;
    return chmod(folder, mode | search) == 0
               ? RST_OK
               : rst_fail_errno(error, "setting permissions of", folder);
}

static int sync_parent(const char *path, rst_error *error)
{
    char parent[PATH_MAX];
    snprintf(parent, sizeof parent, "%s", path);
    char *end = parent + strlen(parent);
    while (end > parent + 1 && end[-1] == '/') {
        *--end = '\0';
    }
    char *slash = strrchr(parent, '/');
    if (slash == parent) {
        slash++;
    }
    if (slash) {
        *slash = '\0';
    }
    return rst_sync_folder(slash ? parent : ".", error);
}

int rst_create_folder(const char *path, unsigned flags, const rst_format_entry *format,
                      int (*fill)(const char *folder, mode_t mode, const rst_format_entry *format,
                                  rst_error *error, void *context),
                      void *context, rst_error *error)
{
    char folder[PATH_MAX];
    int length = snprintf(folder, sizeof folder, "%s.new-XXXXXX", path);
    if (length < 0 || (size_t)length >= sizeof folder) {
        return rst_fail(error, RST_ERR_ARGUMENT, "path", "the path is too long");
    }
    if (!mkdtemp(folder)) {
        return rst_fail_errno(error, "creating", path);
    }
    mode_t mode = flags & RST_OPEN_GROUP ? 0660 : 0600;
    int code = rst_check_file_system(folder, error);
    if (!code) {
        code = rst_check_limits(format->map_size, error);
    }
    if (!code) {
        code = fill(folder, mode, format, error, context);
    }
    if (!code) {
        code = rst_guard_create(folder, mode, format, error);
    }
    if (!code) {
        code = set_permissions(folder, mode, error);
    }
    bool durable = format->durability != RST_DURABILITY_MEMORY;
    if (!code && durable) {
        code = rst_sync_folder(folder, error);
    }
    /* The store appears whole or not at all, also when this process is killed or another one
     * creates the same store at this moment: rename replaces nothing but an empty folder. */
    if (!code && rename(folder, path) != 0) {
        code = errno == ENOTDIR ? rst_fail(error, RST_ERR_EXISTS, "path",
                                           "%s is there already and is no folder", path)
                                : rst_fail_errno(error, "creating", path);
    }
    if (code) {
        remove_store(folder);
        return code;
    }
    return durable ? sync_parent(path, error) : RST_OK;
}

static int fill_new(const char *folder, mode_t mode, const rst_format_entry *format,
                    rst_error *error, void *context)
{
    (void)context;
    return fill_folder(folder, mode, format, error);
}

int rst_create(const char *path, unsigned flags, const rst_create_options *options,
               rst_error *error)
{
    rst_format_entry format;
    int code = rst_make_format(options, &format, error);
    if (!code) {
        code = rst_create_folder(path, flags, &format, fill_new, NULL, error);
    }
    if (code == RST_ERR_EXISTS && !(flags & RST_OPEN_EXCLUSIVE)) {
        rst_error_clear(error);
        return RST_OK; /* somebody else was faster */
    }
    return code;
}
