/* A consumer's place, as it comes back from a checkpoint.  The first byte: bit 0, the checksum is
 * set right first; bit 1, header fields that only this store can know are too; bit 2, resume
 * instead of commit. */
#include <unistd.h>

#include "folder.h"
#include "fuzz.h"
#include "store/consumer/consumer.h"

static rst_store *store;
static void *sound_place;
static size_t sound_size;

/* Twenty sessions: some settled, trained, held, given back, never given. */
static void fill_store(void)
{
    rst_error error;
    rst_record *record = rst_record_new();
    rst_lease leases[16];
    size_t count;
    const rst_turn turn = {.temperature = 1.0f};
    const rst_outcome outcome = {.status = RST_STATUS_COMPLETED, .reward = 1.0};
    must(rst_record_set(record, &turn, &error) == RST_OK);
    for (int i = 0; i < 20; i++) {
        char id[16];
        size_t size = (size_t)snprintf(id, sizeof id, "s%d", i);
        must(rst_put(store, id, size, 0, record, 0, 0, &error) == RST_OK);
        must(rst_seal(store, id, size, &outcome, 0, &error) == RST_OK);
    }
    rst_record_free(record);
    must(rst_consumer_create(store, "c", 1, RST_START_OLDEST, NULL, &error) == RST_OK);
    must(rst_consumer_take(store, "c", 1, 16, 0, 0, leases, &count, &error) == RST_OK);
    must(rst_consumer_acknowledge(store, "c", 1, leases, 4, &error) == RST_OK);
    must(rst_consumer_acknowledge(store, "c", 1, leases + 8, 3, &error) == RST_OK);
    must(rst_consumer_return(store, "c", 1, leases + 12, 2, &error) == RST_OK);
    must(rst_consumer_place(store, "c", 1, &sound_place, &sound_size, &error) == RST_OK);
}

/* At the first input: AFL++ forks before it, and a handle of before a fork is refused. */
static void begin(void)
{
    rst_error error;
    char path[320];
    make_folder();
    snprintf(path, sizeof path, "%s/store", folder);
    const rst_create_options options = {.capacity_size = RST_CAPACITY_MIN};
    must(rst_store_open(path, RST_OPEN_CREATE, &options, &store, &error) == RST_OK);
    fill_store();
}

static void set_right(unsigned char *place, size_t size, uint8_t what)
{
    rst_place_header h;
    if (size < sizeof h) {
        return;
    }
    memcpy(&h, place, sizeof h);
    if (what & 2) {
        rst_place_header own;
        memcpy(&own, sound_place, sizeof own);
        h.magic = own.magic;
        h.version = own.version;
        h.header_size = own.header_size;
        h.epoch = own.epoch;
        memcpy(h.store_id, own.store_id, sizeof h.store_id);
        memcpy(h.consumer_key, own.consumer_key, sizeof h.consumer_key);
        h.run_count = (size - sizeof h) / sizeof(rst_place_run);
        memcpy(place, &h, sizeof h);
    }
    if (what & 1) {
        h.checksum = rst_hash(place + 16, size - 16);
        memcpy(place, &h, sizeof h);
    }
}

static void must_be_sound(void)
{
    rst_error error;
    rst_verify_result result;
    must(rst_store_verify(store, NULL, &result, &error) == RST_OK && result.fault_count == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0) {
        return 0;
    }
    if (!store) {
        begin();
    }
    rst_error error;
    unsigned char *place = exact_copy(data + 1, size - 1);
    set_right(place, size - 1, data[0]);
    uint64_t lost;
    int code = data[0] & 4 ? rst_consumer_resume(store, "c", 1, place, size - 1, &lost, &error)
                           : rst_consumer_commit(store, "c", 1, place, size - 1, &error);
    free(place);
    if (code) {
        must(code == RST_ERR_ARGUMENT);
        must_be_told(code, &error, size);
        return 0;
    }
    must_be_sound();
    /* Back to where it was, for the next input. */
    must(rst_consumer_drop(store, "c", 1, &error) == RST_OK);
    must(rst_consumer_resume(store, "c", 1, sound_place, sound_size, NULL, &error) == RST_OK);
    free(sound_place);
    must(rst_consumer_place(store, "c", 1, &sound_place, &sound_size, &error) == RST_OK);
    return 0;
}
