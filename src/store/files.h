/* The store's folder on the file system.  Internal. */
#ifndef RST_SRC_STORE_FILES_H
#define RST_SRC_STORE_FILES_H

#include <limits.h>
#include <stdint.h>
#include <sys/stat.h>

#include "../error.h"

#define RST_DATA_FILE "data.mdb"
#define RST_LOCK_FILE "lock.mdb"
#define RST_GUARD_FILE "guard.bin"

int rst_path_join(char out[PATH_MAX], const char *folder, const char *name, rst_error *error);

/* errno as an rst_code, with `doing path` as message. */
int rst_fail_errno(rst_error *error, const char *doing, const char *path);

/* RST_ERR_FILESYSTEM for a network file system. */
int rst_check_file_system(const char *folder, rst_error *error);

/* RST_ERR_PERMISSION for a symbolic link in a world-writable folder. */
int rst_check_no_planted_link(const char *path, rst_error *error);

/* RST_ERR_NOT_STORE unless `data` is a regular file of at least two pages. */
int rst_check_data_file(const char *data, struct stat *info, rst_error *error);

/* RST_ERR_NO_SPACE, RST_ERR_MEMORY when this process may not have a file or mapping of that size.
 */
int rst_check_limits(uint64_t size, rst_error *error);

/* The names in the folder are on the disk. */
int rst_sync_folder(const char *folder, rst_error *error);

/* Give every byte of the file its place on the file system now, so that writing through the map can
 * never meet a full one (which would be a SIGBUS). */
int rst_allocate_file(int fd, uint64_t size, const char *path, rst_error *error);

/* The same for LMDB's lock file, which every reader writes to through its map: for at least
 * reader_count slots; it is made when it is not there.  To be called before LMDB opens it, since
 * closing any descriptor of it ends this process's locks. */
int rst_reserve_lock_file(const char *path, unsigned reader_count, mode_t mode, rst_error *error);

#endif
