/* The store's folder: where it may stand, how its files are made, and that they are what they seem.
 */
#include "files.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/falloc.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

int rst_path_join(char out[PATH_MAX], const char *folder, const char *name, rst_error *error)
{
    int length = snprintf(out, PATH_MAX, "%s/%s", folder, name);
    if (length < 0 || length >= PATH_MAX) {
        return rst_fail(error, RST_ERR_ARGUMENT, "path", "the path is longer than %d bytes",
                        PATH_MAX);
    }
    return RST_OK;
}

int rst_fail_errno(rst_error *error, const char *doing, const char *path)
{
    int system = errno;
    int code = RST_ERR_IO;
    switch (system) {
    case ENOENT:
    case ENOTDIR:
        code = RST_ERR_NOT_STORE;
        break;
    case EACCES:
    case EPERM:
    case EROFS:
        code = RST_ERR_PERMISSION;
        break;
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
        code = RST_ERR_NO_SPACE;
        break;
    case EEXIST:
    case ENOTEMPTY:
        code = RST_ERR_EXISTS;
        break;
    case ENOMEM:
        code = RST_ERR_MEMORY;
        break;
    default:
        break;
    }
    return rst_fail_system(error, code, system, "%s %s", doing, path);
}

/* Names of file systems whose mappings are not shared between hosts, or lock only by courtesy of a
 * daemon.  The numbers are Linux's (linux/magic.h and the file systems' own sources). */
static const char *remote_file_system(unsigned long type)
{
    switch (type) {
    case 0x6969:
        return "NFS";
    case 0x517B:
    case 0xFE534D42:
    case 0xFF534D42:
        return "SMB";
    case 0x01021997:
        return "9P";
    case 0x00C36400:
        return "Ceph";
    case 0x0BD00BD0:
        return "Lustre";
    case 0x47504653:
        return "GPFS";
    case 0x5346414F:
        return "AFS";
    case 0x65735546:
        return "FUSE";
    default:
        return NULL;
    }
}

int rst_check_file_system(const char *folder, rst_error *error)
{
    struct statfs info;
    if (statfs(folder, &info) != 0) {
        return rst_fail_errno(error, "looking at the file system of", folder);
    }
    const char *remote = remote_file_system((unsigned long)info.f_type & 0xFFFFFFFFul);
    if (remote) {
        return rst_fail(
            error, RST_ERR_FILESYSTEM, "path",
            "%s is on a %s file system, whose mappings and locks processes do not share "
            "reliably: use /dev/shm or a local disk",
            folder, remote);
    }
    return RST_OK;
}

/* In a folder that everybody can write to, anybody could have put the link there. */
int rst_check_no_planted_link(const char *path, rst_error *error)
{
    struct stat info;
    if (lstat(path, &info) != 0 || !S_ISLNK(info.st_mode)) {
        return RST_OK; /* absence is reported by whoever opens it */
    }
    char parent[PATH_MAX];
    snprintf(parent, sizeof parent, "%s", path);
    size_t end = strlen(parent);
    while (end > 1 && parent[end - 1] == '/') {
        parent[--end] = '\0';
    }
    char *slash = strrchr(parent, '/');
    if (!slash) {
        strcpy(parent, ".");
    } else {
        slash[slash == parent ? 1 : 0] = '\0';
    }
    struct stat folder;
    if (stat(parent, &folder) == 0 && (folder.st_mode & S_IWOTH)) {
        return rst_fail(error, RST_ERR_PERMISSION, "path",
                        "%s is a symbolic link in a folder that everybody can write to: name the "
                        "store itself",
                        path);
    }
    return RST_OK;
}

int rst_check_data_file(const char *data, struct stat *info, rst_error *error)
{
    if (lstat(data, info) != 0) {
        if (errno == ENOENT || errno == ENOTDIR) {
            return rst_fail(error, RST_ERR_NOT_STORE, "path",
                            "there is no store here: %s is missing", data);
        }
        return rst_fail_errno(error, "looking at", data);
    }
    if (!S_ISREG(info->st_mode)) {
        return rst_fail(error, RST_ERR_NOT_STORE, "path", "%s is not a regular file", data);
    }
    if (info->st_size < 8192) {
        return rst_fail(error, RST_ERR_NOT_STORE, "path", "%s is no LMDB file: %lld bytes", data,
                        (long long)info->st_size);
    }
    return RST_OK;
}

int rst_sync_folder(const char *folder, rst_error *error)
{
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) {
        return rst_fail_errno(error, "opening", folder);
    }
    /* Some file systems have nothing to do for a folder, and say so. */
    int code =
        fsync(fd) == 0 || errno == EINVAL ? RST_OK : rst_fail_errno(error, "syncing", folder);
    close(fd);
    return code;
}

/* A process over its file-size limit is not told by an error but killed by SIGXFSZ: look first. */
static int check_size_limit(uint64_t size, rst_error *error)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
        limit.rlim_cur < size) {
        return rst_fail(error, RST_ERR_NO_SPACE, "capacity",
                        "the store needs a file of %llu bytes, and this process may write files of "
                        "%llu (ulimit -f)",
                        (unsigned long long)size, (unsigned long long)limit.rlim_cur);
    }
    return RST_OK;
}

int rst_check_limits(uint64_t size, rst_error *error)
{
    int code = check_size_limit(size, error);
    if (code) {
        return code;
    }
    struct rlimit limit;
    if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
        limit.rlim_cur < size) {
        return rst_fail(error, RST_ERR_MEMORY, "capacity",
                        "the store maps %llu bytes, and this process may have an address space of "
                        "%llu (ulimit -v)",
                        (unsigned long long)size, (unsigned long long)limit.rlim_cur);
    }
    return RST_OK;
}

/* One number that follows `label` in a small file; false when it cannot be had. */
static bool read_number(const char *path, const char *label, uint64_t *number)
{
    char text[4096];
    FILE *file = fopen(path, "re");
    if (!file) {
        return false;
    }
    size_t size = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[size] = '\0';
    const char *at = strstr(text, label);
    char *end = NULL;
    if (at) {
        at += strlen(label);
        *number = strtoull(at, &end, 10);
    }
    return at && end != at;
}

static bool is_tmpfs(int fd)
{
    struct statfs space;
    return fstatfs(fd, &space) == 0 && (unsigned long)space.f_type == 0x01021994; /* TMPFS_MAGIC */
}

/* Bytes that may still be allocated.  A tmpfs gives away memory that the machine or the container
 * does not have, and the process that touches it is killed: so its own limit is not the only one.
 */
static uint64_t room_of(int fd, uint64_t *total)
{
    struct statfs space;
    if (fstatfs(fd, &space) != 0) {
        *total = 0;
        return UINT64_MAX;
    }
    uint64_t block = (uint64_t)space.f_bsize;
    uint64_t room = (uint64_t)space.f_bavail * block;
    *total = (uint64_t)space.f_blocks * block;
    if (!is_tmpfs(fd)) {
        return room;
    }
    uint64_t kilobytes;
    if (read_number("/proc/meminfo", "MemAvailable:", &kilobytes) && kilobytes * 1024 < room) {
        room = kilobytes * 1024;
    }
    uint64_t most;
    uint64_t used;
    if (read_number("/sys/fs/cgroup/memory.max", "", &most) &&
        read_number("/sys/fs/cgroup/memory.current", "", &used)) {
        uint64_t left = most > used ? most - used : 0;
        room = left < room ? left : room;
    }
    return room;
}

static int say_no_space(int fd, uint64_t size, const char *path, int system, rst_error *error)
{
    uint64_t total;
    uint64_t room = room_of(fd, &total);
    return rst_fail_system(error, RST_ERR_NO_SPACE, system,
                           "%s needs %llu bytes, its file system of %llu can give %llu: choose a "
                           "smaller capacity or a "
                           "larger file system (containers often have a /dev/shm of 64 MB)",
                           path, (unsigned long long)size, (unsigned long long)total,
                           (unsigned long long)room);
}

int rst_allocate_file(int fd, uint64_t size, const char *path, rst_error *error)
{
    struct stat info;
    if (fstat(fd, &info) != 0) {
        return rst_fail_errno(error, "looking at", path);
    }
    /* Elsewhere blocks of the file system's own count too, and may hide a hole; but a tmpfs looks
     * at every page of a file to find that it is there. */
    uint64_t has = (uint64_t)info.st_blocks * 512;
    if ((uint64_t)info.st_size >= size && has >= size && is_tmpfs(fd)) {
        return RST_OK;
    }
    int code = check_size_limit(size, error);
    if (code) {
        return code;
    }
    /* Asked before, since filling a file system up to the brim harms everybody else on it. */
    uint64_t total;
    if (has < size && size - has > room_of(fd, &total)) {
        return say_no_space(fd, size, path, ENOSPC, error);
    }
    /* In pieces, so that a signal is answered soon; what is allocated already costs nothing again.
     */
    const uint64_t piece = UINT64_C(256) << 20;
    for (uint64_t at = 0; at < size;) {
        uint64_t length = size - at < piece ? size - at : piece;
        if (fallocate(fd, 0, (off_t)at, (off_t)length) == 0) {
            at += length;
        } else if (errno == ENOSPC || errno == EDQUOT) {
            return say_no_space(fd, size, path, errno, error);
        } else if (errno != EINTR) {
            return rst_fail_errno(error, "allocating the space of", path);
        }
    }
    return RST_OK;
}

int rst_reserve_lock_file(const char *path, unsigned reader_count, mode_t mode, rst_error *error)
{
    char lock[PATH_MAX];
    int code = rst_path_join(lock, path, RST_LOCK_FILE, error);
    if (code) {
        return code;
    }
    int fd = open(lock, O_RDWR | O_CREAT | O_CLOEXEC, mode);
    if (fd < 0) {
        return RST_OK; /* LMDB meets the same error, and says it or does without */
    }
    struct stat info;
    uint64_t size = ((uint64_t)reader_count + 2) * 128; /* a slot is a cache line */
    if (fstat(fd, &info) == 0 && (uint64_t)info.st_size > size) {
        size = (uint64_t)info.st_size;
    } else if ((code = check_size_limit(size, error)) != RST_OK) {
        close(fd);
        return code;
    }
    int result;
    do {
        /* The size stays as it is: LMDB counts the slots of a file by it. */
        result = fallocate(fd, FALLOC_FL_KEEP_SIZE, 0, (off_t)size);
    } while (result != 0 && errno == EINTR);
    if (result != 0 && (errno == ENOSPC || errno == EDQUOT)) {
        code = say_no_space(fd, size, lock, errno, error);
    } else if (result != 0 && errno != EOPNOTSUPP) {
        code = rst_fail_errno(error, "allocating the space of", lock);
    }
    close(fd);
    return code;
}
