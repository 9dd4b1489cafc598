/* Store one turn made from arrays, read it back from the map. */
#include <stdio.h>
#include <string.h>

#include <rollstore/rollstore.h>

static int fail(const rst_error *error)
{
    fprintf(stderr, "%s: %s\n", rst_code_name(error->code), error->message);
    return 1;
}

int main(int argc, char **argv)
{
    const int32_t token = 42;
    const float logprob = -0.5f;
    const int32_t ids[2] = {42, 7};
    const float logprobs[2] = {-0.5f, -1.5f};
    rst_turn turn = {.token_count = 1,
                     .topk = 2,
                     .token_ids = &token,
                     .token_logprobs = &logprob,
                     .topk_ids = ids,
                     .topk_logprobs = logprobs};
    rst_create_options create = {.capacity_size = RST_CAPACITY_MIN};
    rst_record *record = rst_record_new();
    rst_store *store;
    rst_snapshot *now;
    rst_error error;
    if (argc != 2 || !record) {
        return 2;
    }
    if (rst_store_open(argv[1], RST_OPEN_CREATE, &create, &store, &error) ||
        rst_record_set(record, &turn, &error) ||
        rst_put(store, "a/1", 3, 0, record, 0, 0, &error) ||
        rst_snapshot_open(store, &now, &error) || rst_turn_get(now, "a/1", 3, 0, &turn, &error)) {
        return fail(&error);
    }
    int same = memcmp(turn.topk_logprobs, logprobs, sizeof logprobs) == 0;
    rst_snapshot_close(now);
    rst_record_free(record);
    if (rst_store_close(store, &error)) {
        return fail(&error);
    }
    printf("rollstore %s: %s\n", rst_version(), same ? "read what was stored" : "read other bytes");
    return !same;
}
