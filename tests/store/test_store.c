/* The store: life of sessions, what stands in the map, opening, capacity. */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support.h"

typedef struct fixture {
    char *folder;
    const char *path;
    rst_store *store;
    rst_record *record;
    rst_error error;
} fixture;

static rst_store *open_store(const char *path, unsigned flags, uint64_t capacity)
{
    rst_create_options options = {.capacity_size = capacity};
    rst_store *store;
    rst_error error;
    assert_ok(rst_store_open(path, flags, &options, &store, &error), error);
    return store;
}

static int setup(void **state)
{
    fixture *f = calloc(1, sizeof *f);
    f->folder = support_make_folder();
    char path[512];
    snprintf(path, sizeof path, "%s/store", f->folder);
    f->path = strdup(path);
    f->store = open_store(f->path, RST_OPEN_CREATE, 8 << 20);
    f->record = rst_record_new();
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    fixture *f = *state;
    rst_record_free(f->record);
    int code = rst_store_close(f->store, &f->error);
    support_remove_folder(f->folder);
    free((void *)(uintptr_t)f->path);
    free(f);
    return code;
}

static const rst_outcome done = {RST_STATUS_COMPLETED, 0.5, 3, 7};

static int put(fixture *f, const char *id, uint32_t turn, uint64_t seed, unsigned flags)
{
    support_fill(f->record, 5, 4, seed, NULL, 0, "1");
    return rst_put(f->store, id, strlen(id), turn, f->record, flags, 0, &f->error);
}

static int seal(fixture *f, const char *id)
{
    return rst_seal(f->store, id, strlen(id), &done, 0, &f->error);
}

static rst_session session(fixture *f, const char *id)
{
    rst_snapshot *now;
    rst_session s;
    assert_ok(rst_snapshot_open(f->store, &now, &f->error), f->error);
    assert_ok(rst_session_get(now, id, strlen(id), &s, &f->error), f->error);
    rst_snapshot_close(now);
    s.id = NULL;
    return s;
}

/* ---------------------------------------------------------------- life of a session */

static void a_session_is_open_then_sealed_then_released(void **state)
{
    fixture *f = *state;
    assert_ok(put(f, "a", 0, 1, 0), f->error);
    assert_ok(put(f, "a", 1, 2, 0), f->error);
    rst_session s = session(f, "a");
    assert_int_equal(s.state, RST_STATE_OPEN);
    assert_int_equal(s.turn_count, 2);
    assert_int_equal(s.generated_count, 10);
    assert_int_equal(s.sequence, 0);
    assert_int_equal(s.outcome.status, RST_STATUS_NONE);
    assert_ok(seal(f, "a"), f->error);
    s = session(f, "a");
    assert_int_equal(s.state, RST_STATE_SEALED);
    assert_int_equal(s.sequence, 1);
    assert_true(s.outcome.reward == 0.5);
    assert_int_equal(s.outcome.group_index, 3);
    assert_int_equal(s.outcome.index, 7);
    assert_code(RST_ERR_SEALED, put(f, "a", 2, 3, 0), f->error);
    assert_code(RST_ERR_SEALED, rst_restart(f->store, "a", 1, 0, &f->error), f->error);
    support_assert_sound(f->store);
    assert_ok(rst_release(f->store, "a", 1, 0, &f->error), f->error);
    assert_code(RST_ERR_NOT_FOUND, rst_release(f->store, "a", 1, 0, &f->error), f->error);
    rst_stat stat;
    assert_ok(rst_store_stat(f->store, &stat, &f->error), f->error);
    assert_int_equal(stat.totals.turn_count, 0);
    assert_int_equal(stat.totals.value_size, 0);
    assert_int_equal(stat.totals.released_count, 1);
    support_assert_sound(f->store);
}

static void sealed_sessions_are_read_in_the_order_of_sealing(void **state)
{
    fixture *f = *state;
    const char *ids[] = {"z", "m", "a", "q"};
    for (int i = 0; i < 4; i++) {
        assert_ok(put(f, ids[i], 0, (uint64_t)i, 0), f->error);
    }
    for (int i = 0; i < 4; i++) {
        assert_ok(seal(f, ids[i]), f->error);
    }
    assert_ok(rst_release(f->store, "m", 1, 0, &f->error), f->error);
    rst_snapshot *now;
    assert_ok(rst_snapshot_open(f->store, &now, &f->error), f->error);
    rst_session s;
    char order[8] = "";
    uint64_t sequence = 0;
    while (rst_ready_next(now, sequence, &s, &f->error) == RST_OK) {
        strncat(order, s.id, 1);
        assert_true(s.sequence > sequence);
        sequence = s.sequence;
    }
    assert_string_equal(order, "zaq");
    assert_int_equal(sequence, 4);
    unsigned met = 0;
    uint8_t key[RST_KEY_SIZE];
    const uint8_t *after = NULL;
    while (rst_session_next(now, after, &s, &f->error) == RST_OK) {
        memcpy(key, s.key, sizeof key);
        after = key;
        met++;
    }
    assert_int_equal(met, 3);
    rst_snapshot_close(now);
    /* A number is never given twice, also when the newest one was released. */
    assert_ok(rst_release(f->store, "q", 1, 0, &f->error), f->error);
    assert_ok(put(f, "n", 0, 9, 0), f->error);
    assert_ok(seal(f, "n"), f->error);
    assert_int_equal(session(f, "n").sequence, 5);
}

static void the_same_bytes_again_change_nothing(void **state)
{
    fixture *f = *state;
    assert_ok(put(f, "a", 0, 1, 0), f->error);
    rst_stat before;
    rst_stat after;
    assert_ok(rst_store_stat(f->store, &before, &f->error), f->error);
    assert_ok(put(f, "a", 0, 1, 0), f->error);
    assert_ok(rst_store_stat(f->store, &after, &f->error), f->error);
    assert_int_equal(before.last_transaction, after.last_transaction);
    assert_code(RST_ERR_CONFLICT, put(f, "a", 0, 2, 0), f->error);
    assert_ok(seal(f, "a"), f->error);
    assert_ok(seal(f, "a"), f->error);
    assert_ok(put(f, "a", 0, 1, 0), f->error);
    rst_outcome other = done;
    other.reward = 1;
    assert_code(RST_ERR_CONFLICT, rst_seal(f->store, "a", 1, &other, 0, &f->error), f->error);
    assert_ok(rst_seal(f->store, "a", 1, &other, RST_CHANGE_REPLACE, &f->error), f->error);
    assert_true(session(f, "a").outcome.reward == 1);
    assert_int_equal(session(f, "a").sequence, 1);
}

static void turns_come_in_order(void **state)
{
    fixture *f = *state;
    assert_code(RST_ERR_ORDER, put(f, "a", 1, 1, 0), f->error);
    assert_ok(put(f, "a", 0, 1, 0), f->error);
    assert_code(RST_ERR_ORDER, put(f, "a", 2, 1, 0), f->error);
    assert_code(RST_ERR_NOT_FOUND, seal(f, "b"), f->error);
    support_assert_sound(f->store);
}

static void a_turn_is_replaced_only_where_later_ones_do_not_build_on_it(void **state)
{
    fixture *f = *state;
    assert_ok(put(f, "a", 0, 1, 0), f->error);
    assert_ok(put(f, "a", 0, 2, RST_CHANGE_REPLACE), f->error);
    assert_ok(put(f, "a", 1, 3, 0), f->error);
    assert_code(RST_ERR_CONFLICT, put(f, "a", 0, 4, RST_CHANGE_REPLACE), f->error);
    assert_non_null(strstr(f->error.message, "restart"));
    assert_ok(put(f, "a", 1, 5, RST_CHANGE_REPLACE), f->error);
    /* The same tokens with other candidates may take the first one's place. */
    support_fill(f->record, 5, 4, 2, NULL, 0, "9");
    assert_ok(rst_put(f->store, "a", 1, 0, f->record, RST_CHANGE_REPLACE, 0, &f->error), f->error);
    assert_int_equal(session(f, "a").weight_version_max, 9);
    assert_int_equal(session(f, "a").weight_version_min, 1);
    support_assert_sound(f->store);
    assert_ok(rst_restart(f->store, "a", 1, 1, &f->error), f->error);
    assert_int_equal(session(f, "a").turn_count, 1);
    support_assert_sound(f->store);
    assert_ok(rst_restart(f->store, "a", 1, 0, &f->error), f->error);
    rst_snapshot *now;
    rst_session s;
    assert_ok(rst_snapshot_open(f->store, &now, &f->error), f->error);
    assert_code(RST_ERR_NOT_FOUND, rst_session_get(now, "a", 1, &s, &f->error), f->error);
    rst_snapshot_close(now);
    assert_ok(rst_restart(f->store, "a", 1, 0, &f->error), f->error);
    support_assert_sound(f->store);
}

/* ---------------------------------------------------------------- prompts */

static void put_prompt(fixture *f, uint32_t turn, const int32_t *prompt, size_t count)
{
    support_fill(f->record, 3, 2, turn + 100, prompt, count, NULL);
    assert_ok(rst_put(f->store, "p", 1, turn, f->record, 0, 0, &f->error), f->error);
}

static void a_prompt_is_stored_as_what_it_adds(void **state)
{
    fixture *f = *state;
    int32_t prompt[64] = {11, 12, 13, 14};
    put_prompt(f, 0, prompt, 4);
    rst_turn view;
    rst_record_view(f->record, &view);
    memcpy(prompt + 4, view.token_ids, 12);
    prompt[7] = 77;
    put_prompt(f, 1, prompt, 8); /* all of before, and one more */
    rst_record_view(f->record, &view);
    memcpy(prompt + 8, view.token_ids, 8);
    prompt[10] = 78; /* in place of the output's last token */
    prompt[11] = 79;
    put_prompt(f, 2, prompt, 12);
    prompt[1] = 99; /* contradicts the first prompt */
    put_prompt(f, 3, prompt, 12);
    rst_snapshot *now;
    assert_ok(rst_snapshot_open(f->store, &now, &f->error), f->error);
    const struct {
        uint32_t prefix, trimmed, count;
    } want[] = {{0, 0, 4}, {7, 0, 1}, {10, 1, 2}, {1, 14, 11}};
    for (uint32_t i = 0; i < 4; i++) {
        rst_turn turn;
        assert_ok(rst_turn_get(now, "p", 1, i, &turn, &f->error), f->error);
        assert_int_equal(turn.prefix_count, want[i].prefix);
        assert_int_equal(turn.trimmed_count, want[i].trimmed);
        assert_int_equal(turn.prompt_count, want[i].count);
    }
    rst_snapshot_close(now);
    support_assert_sound(f->store);
}

static void a_turn_is_replaced_in_the_transaction_that_wrote_it(void **state)
{
    fixture *f = *state;
    rst_record *second = rst_record_new();
    support_fill(f->record, 800, 32, 1, NULL, 0, NULL);
    support_fill(second, 10, 4, 2, NULL, 0, NULL);
    rst_change changes[2] = {
        {.kind = RST_CHANGE_PUT, .session = "a", .session_size = 1, .record = f->record},
        {.kind = RST_CHANGE_PUT,
         .flags = RST_CHANGE_REPLACE,
         .session = "a",
         .session_size = 1,
         .record = second},
    };
    assert_ok(rst_apply(f->store, changes, 2, 0, &f->error), f->error);
    rst_snapshot *now;
    rst_turn turn;
    assert_ok(rst_snapshot_open(f->store, &now, &f->error), f->error);
    assert_ok(rst_turn_get(now, "a", 1, 0, &turn, &f->error), f->error);
    assert_int_equal(turn.token_count, 10);
    rst_snapshot_close(now);
    support_assert_sound(f->store);
    rst_record_free(second);
}

static void many_changes_are_one_transaction(void **state)
{
    fixture *f = *state;
    rst_record *records[4];
    rst_change changes[6];
    int32_t prompt[16] = {1, 2};
    size_t count = 2;
    memset(changes, 0, sizeof changes);
    for (uint32_t i = 0; i < 4; i++) {
        records[i] = rst_record_new();
        support_fill(records[i], 2, 3, i, prompt, count, "1");
        rst_turn view;
        rst_record_view(records[i], &view);
        memcpy(prompt + count, view.token_ids, 8);
        count += 2;
        changes[i] = (rst_change){.kind = RST_CHANGE_PUT,
                                  .session = "s",
                                  .session_size = 1,
                                  .turn = i,
                                  .record = records[i]};
    }
    changes[4] =
        (rst_change){.kind = RST_CHANGE_SEAL, .session = "s", .session_size = 1, .outcome = done};
    changes[5] = (rst_change){
        .kind = RST_CHANGE_PUT, .session = "s", .session_size = 1, .turn = 3, .record = f->record};
    support_fill(f->record, 2, 3, 77, prompt, 2, "1"); /* not the bytes of turn 3 */
    assert_code(RST_ERR_CONFLICT, rst_apply(f->store, changes, 6, 0, &f->error), f->error);
    assert_int_equal(f->error.index, 5);
    rst_stat stat;
    assert_ok(rst_store_stat(f->store, &stat, &f->error), f->error);
    assert_int_equal(stat.session_count, 0);
    changes[1].record = records[0];
    assert_code(RST_ERR_ARGUMENT, rst_apply(f->store, changes, 5, 0, &f->error), f->error);
    changes[1].record = records[1];
    assert_ok(rst_apply(f->store, changes, 5, 0, &f->error), f->error);
    assert_int_equal(session(f, "s").sequence_count, 2 + 8);
    assert_int_equal(session(f, "s").state, RST_STATE_SEALED);
    assert_ok(rst_apply(f->store, changes, 5, 0, &f->error), f->error);
    assert_int_equal(changes[3].unchanged, 1);
    assert_int_equal(changes[4].unchanged, 1);
    support_assert_sound(f->store);
    /* Restarting and writing anew in one call is worked out under the lock. */
    changes[0] = (rst_change){.kind = RST_CHANGE_RELEASE, .session = "s", .session_size = 1};
    changes[1] = (rst_change){
        .kind = RST_CHANGE_PUT, .session = "s", .session_size = 1, .turn = 0, .record = f->record};
    assert_ok(rst_apply(f->store, changes, 2, 0, &f->error), f->error);
    assert_int_equal(session(f, "s").turn_count, 1);
    support_assert_sound(f->store);
    for (int i = 0; i < 4; i++) {
        rst_record_free(records[i]);
    }
}

/* ---------------------------------------------------------------- ids */

static void any_bytes_of_up_to_4096_are_an_id(void **state)
{
    fixture *f = *state;
    char longest[4097];
    memset(longest, 'x', sizeof longest);
    longest[4095] = '/';
    const struct {
        const char *id;
        size_t size;
    } ids[] = {{"a/b/../c", 8}, {" ", 1},        {"\xF0\x9F\x98\x80", 4}, {"\0nul", 4},
               {longest, 4096}, {longest, 4095}, {"\n\t\x1b[31m", 7}};
    for (size_t i = 0; i < 7; i++) {
        support_fill(f->record, 1, 1, i, NULL, 0, NULL);
        assert_ok(rst_put(f->store, ids[i].id, ids[i].size, 0, f->record, 0, 0, &f->error),
                  f->error);
        rst_snapshot *now;
        rst_session s;
        assert_ok(rst_snapshot_open(f->store, &now, &f->error), f->error);
        assert_ok(rst_session_get(now, ids[i].id, ids[i].size, &s, &f->error), f->error);
        assert_int_equal(s.id_size, ids[i].size);
        assert_memory_equal(s.id, ids[i].id, ids[i].size);
        rst_snapshot_close(now);
    }
    assert_code(RST_ERR_ARGUMENT, rst_put(f->store, longest, 4097, 0, f->record, 0, 0, &f->error),
                f->error);
    assert_code(RST_ERR_ARGUMENT, rst_put(f->store, "", 0, 0, f->record, 0, 0, &f->error),
                f->error);
    support_assert_sound(f->store);
}

/* ---------------------------------------------------------------- in the map */

static void every_array_lies_aligned_in_the_map(void **state)
{
    fixture *f = *state;
    rst_store *big = open_store(support_path(f->folder, "big"), RST_OPEN_CREATE, 256u << 20);
    static const uint32_t counts[] = {0, 1, 2, 15, 16, 17, 100, 511, 1000, 40000};
    static const uint32_t topks[] = {1, 2, 3, 31, 32, 33, 64, 100, 127, 128};
    const void *map;
    size_t map_size;
    assert_ok(rst_store_map(big, &map, &map_size, &f->error), f->error);
    for (size_t i = 0; i < 10; i++) {
        for (size_t j = 0; j < 10; j++) {
            char id[32];
            snprintf(id, sizeof id, "%u-%u", counts[i], topks[j]);
            int32_t prompt[3] = {1, 2, 3};
            support_fill(f->record, counts[i], topks[j], i * 10 + j, prompt, i % 4, "12");
            assert_ok(rst_put(big, id, strlen(id), 0, f->record, 0, 0, &f->error), f->error);
            rst_turn given;
            rst_record_view(f->record, &given);
            rst_snapshot *now;
            rst_turn turn;
            assert_ok(rst_snapshot_open(big, &now, &f->error), f->error);
            assert_ok(rst_turn_get(now, id, strlen(id), 0, &turn, &f->error), f->error);
            const void *arrays[] = {turn.token_ids,     turn.token_logprobs, turn.topk_ids,
                                    turn.topk_logprobs, turn.prompt_ids,     turn.weight_version};
            for (int a = 0; a < 6; a++) {
                assert_int_equal((uintptr_t)arrays[a] % RST_ALIGNMENT, 0);
                assert_in_range((uintptr_t)arrays[a], (uintptr_t)map, (uintptr_t)map + map_size);
            }
            size_t slots = (size_t)counts[i] * topks[j];
            assert_memory_equal(turn.token_logprobs, given.token_logprobs, 4 * counts[i]);
            assert_memory_equal(turn.topk_ids, given.topk_ids, 4 * slots);
            assert_memory_equal(turn.topk_logprobs, given.topk_logprobs, 4 * slots);
            rst_snapshot_close(now);
            /* Keeps the test's store small, and lets values land among freed pages. */
            if ((i + j) % 3 == 0) {
                assert_ok(rst_release(big, id, strlen(id), 0, &f->error), f->error);
            }
        }
    }
    support_assert_sound(big);
    assert_ok(rst_store_close(big, &f->error), f->error);
}

static void a_snapshot_does_not_change(void **state)
{
    fixture *f = *state;
    assert_ok(put(f, "a", 0, 1, 0), f->error);
    rst_snapshot *before;
    rst_turn turn;
    assert_ok(rst_snapshot_open(f->store, &before, &f->error), f->error);
    assert_ok(rst_turn_get(before, "a", 1, 0, &turn, &f->error), f->error);
    int32_t ids[20];
    memcpy(ids, turn.topk_ids, sizeof ids);
    assert_ok(put(f, "a", 0, 2, RST_CHANGE_REPLACE), f->error);
    assert_ok(rst_release(f->store, "a", 1, 0, &f->error), f->error);
    for (uint64_t i = 0; i < 50; i++) {
        assert_ok(put(f, "b", 0, i, RST_CHANGE_REPLACE), f->error);
    }
    assert_memory_equal(turn.topk_ids, ids, sizeof ids);
    rst_session s;
    assert_ok(rst_session_get(before, "a", 1, &s, &f->error), f->error);
    assert_code(RST_ERR_NOT_FOUND, rst_session_get(before, "b", 1, &s, &f->error), f->error);
    rst_stat stat;
    assert_ok(rst_store_stat(f->store, &stat, &f->error), f->error);
    assert_int_equal(stat.reader_pid, getpid());
    assert_int_equal(stat.reader_age, 52);
    assert_true(stat.pinned_size > 0);
    assert_code(RST_ERR_BUSY, rst_store_close(f->store, &f->error), f->error);
    rst_snapshot_close(before);
    assert_ok(rst_store_stat(f->store, &stat, &f->error), f->error);
    assert_int_equal(stat.reader_pid, 0);
    assert_int_equal(stat.pinned_size, 0);
}

/* ---------------------------------------------------------------- opening */

static void what_was_committed_is_there_after_reopening(void **state)
{
    fixture *f = *state;
    assert_ok(put(f, "a", 0, 1, 0), f->error);
    assert_ok(seal(f, "a"), f->error);
    assert_ok(rst_store_close(f->store, &f->error), f->error);
    rst_store *reader = open_store(f->path, RST_OPEN_READ_ONLY, 0);
    rst_snapshot *now;
    rst_session s;
    assert_ok(rst_snapshot_open(reader, &now, &f->error), f->error);
    assert_ok(rst_ready_next(now, 0, &s, &f->error), f->error);
    assert_memory_equal(s.id, "a", 1);
    rst_snapshot_close(now);
    support_assert_sound(reader);
    support_fill(f->record, 1, 1, 1, NULL, 0, NULL);
    assert_code(RST_ERR_READ_ONLY, rst_put(reader, "b", 1, 0, f->record, 0, 0, &f->error),
                f->error);
    rst_store *writer;
    assert_code(RST_ERR_BUSY, rst_store_open(f->path, 0, NULL, &writer, &f->error), f->error);
    assert_ok(rst_store_close(reader, &f->error), f->error);
    f->store = open_store(f->path, 0, 0);
    assert_ok(put(f, "b", 0, 1, 0), f->error);
}

static void several_opens_share_one_environment(void **state)
{
    fixture *f = *state;
    assert_int_equal(symlink(f->path, support_path(f->folder, "link")), 0);
    char roundabout[600];
    snprintf(roundabout, sizeof roundabout, "%s/../store/.", f->path);
    rst_store *second = open_store(roundabout, 0, 0);
    rst_store *third = open_store(support_path(f->folder, "link"), RST_OPEN_READ_ONLY, 0);
    const void *maps[3];
    size_t size;
    assert_ok(rst_store_map(f->store, &maps[0], &size, &f->error), f->error);
    assert_ok(rst_store_map(second, &maps[1], &size, &f->error), f->error);
    assert_ok(rst_store_map(third, &maps[2], &size, &f->error), f->error);
    assert_ptr_equal(maps[0], maps[1]);
    assert_ptr_equal(maps[0], maps[2]);
    assert_ok(rst_store_close(third, &f->error), f->error);
    assert_ok(rst_store_close(second, &f->error), f->error);
    assert_ok(put(f, "a", 0, 1, 0), f->error);
}

static void a_file_that_is_no_store_is_refused_and_left_alone(void **state)
{
    fixture *f = *state;
    rst_store *store;
    const char *none = support_path(f->folder, "none");
    assert_code(RST_ERR_NOT_STORE, rst_store_open(none, 0, NULL, &store, &f->error), f->error);
    assert_null(store);
    assert_int_equal(access(none, F_OK), -1);
    const char *junk = support_path(f->folder, "junk");
    const char *data = support_path(f->folder, "junk/data.mdb");
    assert_int_equal(mkdir(junk, 0700), 0);
    char bytes[20000];
    memset(bytes, 'j', sizeof bytes);
    for (int i = 0; i < 3; i++) {
        FILE *file = fopen(data, "wb");
        size_t size = i == 0 ? 0 : i == 1 ? 100 : sizeof bytes;
        assert_int_equal(fwrite(bytes, 1, size, file), size);
        fclose(file);
        for (unsigned flags = 0; flags < 3; flags++) { /* for writing, read-only, creating */
            int code = rst_store_open(junk, flags, NULL, &store, &f->error);
            assert_code(RST_ERR_NOT_STORE, code, f->error);
        }
        struct stat info;
        assert_int_equal(stat(data, &info), 0);
        assert_int_equal(info.st_size, size);
    }
    assert_code(RST_ERR_NOT_STORE, rst_store_open(data, 0, NULL, &store, &f->error), f->error);
}

static void creating_twice_is_told_only_when_asked(void **state)
{
    fixture *f = *state;
    rst_store *again = open_store(f->path, RST_OPEN_CREATE, 1 << 30);
    rst_stat stat;
    assert_ok(rst_store_stat(again, &stat, &f->error), f->error);
    assert_int_equal(stat.format.capacity_size, 8 << 20);
    assert_ok(rst_store_close(again, &f->error), f->error);
    assert_code(
        RST_ERR_EXISTS,
        rst_store_open(f->path, RST_OPEN_CREATE | RST_OPEN_EXCLUSIVE, NULL, &again, &f->error),
        f->error);
}

static mode_t mode_of(const char *path)
{
    struct stat info;
    assert_int_equal(stat(path, &info), 0);
    return info.st_mode & 0777;
}

static void files_belong_to_their_owner(void **state)
{
    fixture *f = *state;
    assert_int_equal(mode_of(f->path), 0700);
    assert_int_equal(mode_of(support_path(f->folder, "store/data.mdb")), 0600);
    assert_int_equal(mode_of(support_path(f->folder, "store/lock.mdb")), 0600);
    mode_t mask = umask(077);
    const char *shared = support_path(f->folder, "shared");
    rst_store *store = open_store(shared, RST_OPEN_CREATE | RST_OPEN_GROUP, 1 << 20);
    umask(mask);
    assert_int_equal(mode_of(shared), 0770);
    assert_int_equal(mode_of(support_path(f->folder, "shared/data.mdb")), 0660);
    assert_int_equal(mode_of(support_path(f->folder, "shared/lock.mdb")), 0660);
    assert_ok(rst_store_close(store, &f->error), f->error);
}

static void the_lock_file_has_room_for_every_reader(void **state)
{
    fixture *f = *state;
    const char *lock = support_path(f->folder, "store/lock.mdb");
    struct stat info;
    assert_int_equal(stat(lock, &info), 0);
    assert_true(info.st_blocks * 512 >= info.st_size);
    assert_true(info.st_size >= RST_READER_COUNT_DEFAULT * 64);
    /* Also the one that is made anew. */
    assert_ok(rst_store_close(f->store, &f->error), f->error);
    assert_int_equal(unlink(lock), 0);
    f->store = open_store(f->path, 0, 0);
    assert_int_equal(stat(lock, &info), 0);
    assert_true(info.st_blocks * 512 >= info.st_size);
}

/* LMDB's own number, 126, is fewer than the processes of one large training run. */
static void a_store_of_defaults_takes_a_thousand_snapshots(void **state)
{
    fixture *f = *state;
    enum { COUNT = 1024 };
    static rst_snapshot *held[COUNT];
    for (int i = 0; i < COUNT; i++) {
        assert_ok(rst_snapshot_open(f->store, &held[i], &f->error), f->error);
    }
    for (int i = 0; i < COUNT; i++) {
        rst_snapshot_close(held[i]);
    }
}

static void a_link_planted_in_a_shared_folder_is_not_followed(void **state)
{
    fixture *f = *state;
    const char *shared = support_path(f->folder, "tmp");
    assert_int_equal(mkdir(shared, 0700), 0);
    const char *link = support_path(f->folder, "tmp/store");
    assert_int_equal(symlink(f->path, link), 0);
    rst_store *store;
    assert_int_equal(chmod(shared, 01777), 0);
    assert_code(RST_ERR_PERMISSION, rst_store_open(link, 0, NULL, &store, &f->error), f->error);
    assert_int_equal(chmod(shared, 0700), 0);
    assert_ok(rst_store_open(link, 0, NULL, &store, &f->error), f->error);
    assert_ok(rst_store_close(store, &f->error), f->error);
}

static void every_page_has_its_place_on_the_file_system(void **state)
{
    fixture *f = *state;
    struct stat info;
    assert_int_equal(stat(support_path(f->folder, "store/data.mdb"), &info), 0);
    assert_true(info.st_size >= 8 << 20);
    assert_true(info.st_blocks * 512 >= info.st_size);
}

static void a_deleted_store_takes_nothing_more(void **state)
{
    fixture *f = *state;
    assert_ok(put(f, "a", 0, 1, 0), f->error);
    assert_int_equal(unlink(support_path(f->folder, "store/data.mdb")), 0);
    assert_code(RST_ERR_GONE, put(f, "a", 1, 2, 0), f->error);
    assert_code(RST_ERR_GONE, rst_ready_wait(f->store, 0, 60000, NULL, &f->error), f->error);
}

static void too_large_a_store_is_refused_before_it_is_made(void **state)
{
    fixture *f = *state;
    rst_create_options huge = {.capacity_size = UINT64_C(1) << 45};
    rst_store *store;
    const char *path = support_path(f->folder, "huge");
    assert_code(RST_ERR_NO_SPACE, rst_store_open(path, RST_OPEN_CREATE, &huge, &store, &f->error),
                f->error);
    assert_int_equal(access(path, F_OK), -1);
    struct rlimit before;
    getrlimit(RLIMIT_FSIZE, &before);
    struct rlimit limit = {.rlim_cur = 2 << 20, .rlim_max = before.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
    rst_create_options options = {.capacity_size = 4 << 20};
    int code = rst_store_open(path, RST_OPEN_CREATE, &options, &store, &f->error);
    setrlimit(RLIMIT_FSIZE, &before);
    assert_code(RST_ERR_NO_SPACE, code, f->error);
    assert_non_null(strstr(f->error.message, "ulimit"));
}

/* ---------------------------------------------------------------- capacity */

/* 200 KB each: about 40 fit into 8 MB. */
static int put_large(fixture *f, unsigned number, int64_t timeout_ms)
{
    char id[16];
    snprintf(id, sizeof id, "%u", number);
    support_fill(f->record, 800, 32, number, NULL, 0, NULL);
    return rst_put(f->store, id, strlen(id), 0, f->record, 0, timeout_ms, &f->error);
}

static unsigned fill_up(fixture *f)
{
    unsigned number = 0;
    int code;
    while ((code = put_large(f, number, 0)) == RST_OK) {
        number++;
        assert_true(number < 100);
    }
    assert_code(RST_ERR_FULL, code, f->error);
    return number;
}

static void a_full_store_says_so_and_goes_on_after_a_release(void **state)
{
    fixture *f = *state;
    unsigned count = fill_up(f);
    assert_in_range(count, 35, 41);
    unsigned stored = count;
    support_assert_sound(f->store);
    for (int round = 0; round < 20; round++) {
        assert_code(RST_ERR_FULL, put_large(f, 1000, 0), f->error);
        for (unsigned i = 0; i < stored; i++) {
            char id[16];
            snprintf(id, sizeof id, "%u", i);
            assert_ok(rst_release(f->store, id, strlen(id), 0, &f->error), f->error);
        }
        support_assert_sound(f->store);
        /* The pages between are a little scattered now, but it must not get worse. */
        stored = fill_up(f);
        assert_in_range(stored, count - 3, count);
    }
    support_assert_sound(f->store);
}

static void a_turn_over_the_whole_capacity_is_refused_at_once(void **state)
{
    fixture *f = *state;
    support_fill(f->record, 40000, 32, 1, NULL, 0, NULL);
    assert_code(RST_ERR_LIMIT, rst_put(f->store, "a", 1, 0, f->record, 0, RST_FOREVER, &f->error),
                f->error);
}

static void a_put_waits_for_a_release_of_another_process(void **state)
{
    fixture *f = *state;
    fill_up(f);
    pid_t child = fork();
    if (child == 0) {
        rst_store *store;
        rst_error error;
        usleep(100000);
        int code = rst_store_open(f->path, 0, NULL, &store, &error);
        for (int i = 0; !code && i < 3; i++) {
            char id = (char)('0' + i);
            code = rst_release(store, &id, 1, 0, &error);
        }
        _exit(code);
    }
    assert_ok(put_large(f, 999, 60000), f->error);
    int status;
    waitpid(child, &status, 0);
    assert_int_equal(status, 0);
    support_assert_sound(f->store);
}

static void pages_pinned_by_a_snapshot_come_back_when_it_closes(void **state)
{
    fixture *f = *state;
    unsigned count = fill_up(f);
    rst_snapshot *now;
    assert_ok(rst_snapshot_open(f->store, &now, &f->error), f->error);
    for (unsigned i = 0; i < count; i++) {
        char id[16];
        snprintf(id, sizeof id, "%u", i);
        assert_ok(rst_release(f->store, id, strlen(id), 0, &f->error), f->error);
    }
    assert_code(RST_ERR_FULL, put_large(f, 0, 0), f->error);
    char pid[16];
    snprintf(pid, sizeof pid, "%d", getpid());
    assert_non_null(strstr(f->error.message, pid));
    rst_snapshot_close(now);
    assert_ok(put_large(f, 0, 0), f->error);
}

static void a_copy_is_a_store_of_its_own(void **state)
{
    fixture *f = *state;
    for (unsigned i = 0; i < 10; i++) {
        assert_ok(put_large(f, i, 0), f->error);
    }
    assert_ok(seal(f, "3"), f->error);
    const char *path = support_path(f->folder, "copy");
    assert_code(RST_ERR_ARGUMENT, rst_store_copy(f->store, path, 1 << 20, &f->error), f->error);
    assert_int_equal(access(path, F_OK), -1);
    assert_ok(rst_store_copy(f->store, path, 4 << 20, &f->error), f->error);
    assert_code(RST_ERR_EXISTS, rst_store_copy(f->store, path, 0, &f->error), f->error);
    rst_store *copy = open_store(path, 0, 0);
    support_assert_sound(copy);
    rst_stat stat;
    assert_ok(rst_store_stat(copy, &stat, &f->error), f->error);
    assert_int_equal(stat.session_count, 10);
    assert_int_equal(stat.totals.sealed_count, 1);
    assert_int_equal(stat.format.capacity_size, 4 << 20);
    support_fill(f->record, 100, 8, 1, NULL, 0, NULL);
    assert_ok(rst_put(copy, "new", 3, 0, f->record, 0, 0, &f->error), f->error);
    support_assert_sound(copy);
    assert_ok(rst_store_close(copy, &f->error), f->error);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(a_session_is_open_then_sealed_then_released),
        TEST(sealed_sessions_are_read_in_the_order_of_sealing),
        TEST(the_same_bytes_again_change_nothing),
        TEST(turns_come_in_order),
        TEST(a_turn_is_replaced_only_where_later_ones_do_not_build_on_it),
        TEST(a_prompt_is_stored_as_what_it_adds),
        TEST(a_turn_is_replaced_in_the_transaction_that_wrote_it),
        TEST(many_changes_are_one_transaction),
        TEST(any_bytes_of_up_to_4096_are_an_id),
        TEST(every_array_lies_aligned_in_the_map),
        TEST(a_snapshot_does_not_change),
        TEST(what_was_committed_is_there_after_reopening),
        TEST(several_opens_share_one_environment),
        TEST(a_file_that_is_no_store_is_refused_and_left_alone),
        TEST(creating_twice_is_told_only_when_asked),
        TEST(files_belong_to_their_owner),
        TEST(the_lock_file_has_room_for_every_reader),
        TEST(a_store_of_defaults_takes_a_thousand_snapshots),
        TEST(a_link_planted_in_a_shared_folder_is_not_followed),
        TEST(every_page_has_its_place_on_the_file_system),
        TEST(a_deleted_store_takes_nothing_more),
        TEST(too_large_a_store_is_refused_before_it_is_made),
        TEST(a_full_store_says_so_and_goes_on_after_a_release),
        TEST(a_turn_over_the_whole_capacity_is_refused_at_once),
        TEST(a_put_waits_for_a_release_of_another_process),
        TEST(pages_pinned_by_a_snapshot_come_back_when_it_closes),
        TEST(a_copy_is_a_store_of_its_own),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
