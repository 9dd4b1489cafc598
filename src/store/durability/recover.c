/* The first opening after the machine stopped: what its durability promises is brought back.
 *
 * RST_DURABILITY_FULL      LMDB's own order of writing holds: nothing to do.
 * RST_DURABILITY_INTERVAL  The kernel wrote what it had come to of what followed the last sync, in
 *                          any order.  The pages of the synced transaction were kept from being
 *                          reused, see sync.c; the meta pages are set back to it.
 * RST_DURABILITY_MEMORY    Nothing was promised.  It may all be there, after an orderly shutdown:
 *                          that is found out by reading it. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "../files.h"
#include "../pages/pages.h"
#include "guard.h"

static uint64_t transaction_of(const unsigned char meta[RST_PAGES_META_SIZE])
{
    uint64_t transaction;
    memcpy(&transaction, meta + RST_PAGES_META_TRANSACTION, sizeof transaction);
    return transaction;
}

static uint32_t page_size_of(const unsigned char meta[RST_PAGES_META_SIZE])
{
    uint32_t page_size;
    memcpy(&page_size, meta + RST_PAGES_META_PAGE_SIZE, sizeof page_size);
    return page_size;
}

/* LMDB looks for a transaction's meta page under its number's parity.  The other page gets the same
 * contents under the number before, so that nothing refers to what came later. */
static int write_metas(int fd, const unsigned char meta[RST_PAGES_META_SIZE], rst_error *error)
{
    for (uint64_t back = 0; back < 2; back++) {
        uint64_t transaction = transaction_of(meta) - back;
        uint64_t page = transaction & 1;
        unsigned char bytes[RST_PAGES_META_SIZE];
        memcpy(bytes, meta, sizeof bytes);
        memcpy(bytes, &page, sizeof page);
        memcpy(bytes + RST_PAGES_META_TRANSACTION, &transaction, sizeof transaction);
        ssize_t written = pwrite(fd, bytes, sizeof bytes, (off_t)(page * page_size_of(meta)));
        if (written != (ssize_t)sizeof bytes) {
            errno = written < 0 ? errno : EIO;
            return rst_fail_errno(error, "writing", RST_DATA_FILE);
        }
    }
    return fdatasync(fd) == 0 ? RST_OK : rst_fail_errno(error, "syncing", RST_DATA_FILE);
}

static int go_back(const rst_guard *guard, int fd, const char *path, rst_error *error)
{
    const unsigned char *saved = guard->slot.meta;
    unsigned char newest[RST_PAGES_META_SIZE];
    int code = rst_pages_check_saved(fd, saved, error);
    if (code) {
        return code;
    }
    if (rst_pages_newest(fd, newest, NULL) == RST_OK &&
        transaction_of(newest) == transaction_of(saved)) {
        return RST_OK; /* nothing was written after the last sync */
    }
    if (guard->access != RST_GUARD_WRITABLE) {
        return rst_fail(error, RST_ERR_PERMISSION, NULL,
                        "the machine stopped while %s was in use, and its file system is read-only "
                        "now: open it once where it can be written",
                        path);
    }
    return write_metas(fd, saved, error);
}

int rst_guard_recover(rst_guard *guard, const char *path, rst_error *error)
{
    const rst_guard_slot *slot = &guard->slot;
    if (!guard->stale || (slot->serial != 0 && slot->durability == RST_DURABILITY_FULL)) {
        return RST_OK;
    }
    if (slot->serial == 0 || !slot->has_meta || slot->durability != RST_DURABILITY_INTERVAL) {
        guard->verify = true;
        return RST_OK;
    }
    char file[PATH_MAX];
    int code = rst_path_join(file, path, RST_DATA_FILE, error);
    if (code) {
        return code;
    }
    int fd = open(file, (guard->access == RST_GUARD_WRITABLE ? O_RDWR : O_RDONLY) | O_CLOEXEC |
                            O_NOFOLLOW);
    if (fd < 0) {
        return rst_fail_errno(error, "opening", file);
    }
    code = go_back(guard, fd, path, error);
    close(fd);
    return code;
}
