/* A network file system is refused, and the message says which: creating there, opening what was
 * copied there.  The kernel's answer is replaced; everything else is as it is. */
#include <dirent.h>
#include <string.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "support.h"

static unsigned long type_to_say; /* 0: the truth */

int __real_statfs(const char *path, struct statfs *out);
int __wrap_statfs(const char *path, struct statfs *out);

int __wrap_statfs(const char *path, struct statfs *out)
{
    int result = __real_statfs(path, out);
    if (result == 0 && type_to_say) {
        out->f_type = (__typeof__(out->f_type))type_to_say;
    }
    return result;
}

static const struct {
    unsigned long type;
    const char *name;
} remote[] = {{0x6969, "NFS"},        {0x517B, "SMB"},      {0xFE534D42, "SMB"},
              {0xFF534D42, "SMB"},    {0x01021997, "9P"},   {0x00C36400, "Ceph"},
              {0x0BD00BD0, "Lustre"}, {0x47504653, "GPFS"}, {0x5346414F, "AFS"},
              {0x65735546, "FUSE"}};
enum { REMOTE_COUNT = sizeof remote / sizeof *remote };

static unsigned files_in(const char *folder)
{
    unsigned count = 0;
    DIR *all = opendir(folder);
    assert_non_null(all);
    while (readdir(all)) {
        count++;
    }
    closedir(all);
    return count - 2;
}

static void network_file_systems_are_refused_by_name(void **state)
{
    (void)state;
    char *folder = support_make_folder();
    const char *local = support_path(folder, "local");
    const char *there = support_path(folder, "there");
    const rst_create_options options = {.capacity_size = RST_CAPACITY_MIN};
    rst_store *store;
    rst_error error;
    assert_ok(rst_store_open(local, RST_OPEN_CREATE, &options, &store, &error), error);
    assert_ok(rst_store_close(store, &error), error);
    const unsigned flags[] = {0, RST_OPEN_READ_ONLY, RST_OPEN_CREATE};
    for (size_t i = 0; i < REMOTE_COUNT; i++) {
        type_to_say = remote[i].type;
        assert_code(RST_ERR_FILESYSTEM,
                    rst_store_open(there, RST_OPEN_CREATE, &options, &store, &error), error);
        assert_non_null(strstr(error.message, remote[i].name));
        assert_non_null(strstr(error.message, "/dev/shm"));
        assert_int_equal(files_in(folder), 1);
        for (size_t f = 0; f < sizeof flags / sizeof *flags; f++) {
            assert_code(RST_ERR_FILESYSTEM,
                        rst_store_open(local, flags[f], &options, &store, &error), error);
            assert_non_null(strstr(error.message, remote[i].name));
        }
    }
    type_to_say = 0;
    assert_ok(rst_store_open(local, 0, NULL, &store, &error), error);
    type_to_say = remote[0].type;
    assert_code(RST_ERR_FILESYSTEM, rst_store_copy(store, there, 0, &error), error);
    type_to_say = 0;
    assert_int_equal(files_in(folder), 1);
    assert_ok(rst_store_close(store, &error), error);
    support_remove_folder(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(network_file_systems_are_refused_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
