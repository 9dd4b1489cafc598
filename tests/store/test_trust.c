/* A record is checked when a process is given it for the first time, unless the store was opened
 * with RST_OPEN_TRUST; verify looks at every byte. */
#include <fcntl.h>
#include <math.h>
#include <unistd.h>

#include "support.h"

static const char *path;

static rst_store *open_store(unsigned flags)
{
    rst_store *store;
    rst_error error;
    assert_ok(rst_store_open(path, flags, NULL, &store, &error), error);
    return store;
}

/* Where the turn's array stands in the data file. */
static off_t place_of(rst_store *store, const void *array)
{
    const void *map;
    size_t size;
    rst_error error;
    assert_ok(rst_store_map(store, &map, &size, &error), error);
    return (const unsigned char *)array - (const unsigned char *)map;
}

static void write_at(off_t at, const void *bytes, size_t size)
{
    int fd = open(support_path(path, "data.mdb"), O_WRONLY | O_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, bytes, size, at), size);
    close(fd);
}

static int look(unsigned flags, rst_error *error)
{
    rst_store *store = open_store(RST_OPEN_READ_ONLY | flags);
    rst_snapshot *snapshot;
    rst_turn turn;
    rst_error other;
    assert_ok(rst_snapshot_open(store, &snapshot, &other), other);
    int code = rst_turn_get(snapshot, "s", 1, 0, &turn, error);
    rst_snapshot_close(snapshot);
    assert_ok(rst_store_close(store, &other), other);
    return code;
}

static uint64_t faults(void)
{
    rst_store *store = open_store(RST_OPEN_READ_ONLY);
    rst_verify_result result;
    rst_error error;
    assert_ok(rst_store_verify(store, NULL, &result, &error), error);
    assert_ok(rst_store_close(store, &error), error);
    return result.fault_count;
}

static void a_record_is_checked_when_it_is_first_read(void **state)
{
    (void)state;
    char *folder = support_make_folder();
    path = support_path(folder, "store");
    const rst_create_options options = {.capacity_size = RST_CAPACITY_MIN};
    rst_store *store;
    rst_snapshot *snapshot;
    rst_turn turn;
    rst_error error;
    rst_record *record = rst_record_new();
    support_fill(record, 5, 4, 1, NULL, 0, "1");
    assert_ok(rst_store_open(path, RST_OPEN_CREATE, &options, &store, &error), error);
    assert_ok(rst_put(store, "s", 1, 0, record, 0, 0, &error), error);
    assert_ok(rst_snapshot_open(store, &snapshot, &error), error);
    assert_ok(rst_turn_get(snapshot, "s", 1, 0, &turn, &error), error);
    const off_t token = place_of(store, turn.token_ids);
    const off_t candidate = place_of(store, turn.topk_ids);
    const off_t logprob = place_of(store, turn.topk_logprobs);
    const int32_t token_id = turn.token_ids[0];
    const int32_t candidate_id = turn.topk_ids[0];
    const float candidate_logprob = turn.topk_logprobs[0];
    rst_snapshot_close(snapshot);
    assert_ok(rst_store_close(store, &error), error);
    rst_record_free(record);

    static const int32_t below = -5;
    static const float nan = NAN;
    const struct {
        off_t at;
        const void *bad, *good;
        const char *field;
    } damages[] = {{token, &below, &token_id, "token_ids"},
                   {candidate, &below, &candidate_id, "topk_ids"},
                   {logprob, &nan, &candidate_logprob, "topk_logprobs"}};
    for (size_t i = 0; i < sizeof damages / sizeof *damages; i++) {
        write_at(damages[i].at, damages[i].bad, 4);
        assert_code(RST_ERR_CORRUPT, look(0, &error), error);
        assert_string_equal(error.field, damages[i].field);
        assert_ok(look(RST_OPEN_TRUST, &error), error);
        assert_int_equal(faults(), 1);
        write_at(damages[i].at, damages[i].good, 4);
        assert_ok(look(0, &error), error);
        assert_int_equal(faults(), 0);
    }
    support_remove_folder(folder);
}

/* LMDB uses a released record's pages again: what was found sound there is no word for what is
 * there now.  The other record is told by its checksum, as a damaged one of its own would not be.
 */
static void another_record_in_the_same_place_is_checked_too(void **state)
{
    (void)state;
    char *folder = support_make_folder();
    path = support_path(folder, "store");
    const rst_create_options options = {.capacity_size = RST_CAPACITY_MIN};
    rst_store *store;
    rst_snapshot *snapshot;
    rst_turn turn;
    rst_error error;
    const void *value;
    size_t size;
    uint8_t key[RST_KEY_SIZE];
    rst_record *record = rst_record_new();
    support_fill(record, 5, 4, 1, NULL, 0, "1");
    rst_session_key("s", 1, key);
    assert_ok(rst_store_open(path, RST_OPEN_CREATE, &options, &store, &error), error);
    assert_ok(rst_put(store, "s", 1, 0, record, 0, 0, &error), error);
    assert_ok(rst_snapshot_open(store, &snapshot, &error), error);
    assert_ok(rst_turn_get(snapshot, "s", 1, 0, &turn, &error), error);
    assert_ok(rst_turn_value(snapshot, key, 0, &value, &size, &error), error);

    static const int32_t below = -5;
    const uint64_t other = ((const rst_record_header *)value)->checksum + 1;
    write_at(place_of(store, value) + (off_t)offsetof(rst_record_header, checksum), &other,
             sizeof other);
    write_at(place_of(store, turn.token_ids), &below, sizeof below);
    assert_code(RST_ERR_CORRUPT, rst_turn_get(snapshot, "s", 1, 0, &turn, &error), error);
    assert_string_equal(error.field, "token_ids");
    rst_snapshot_close(snapshot);
    assert_ok(rst_store_close(store, &error), error);
    rst_record_free(record);
    support_remove_folder(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_record_is_checked_when_it_is_first_read),
        cmocka_unit_test(another_record_in_the_same_place_is_checked_too),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
