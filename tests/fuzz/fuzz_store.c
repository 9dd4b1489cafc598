/* A data file: opened, read as its users would, verified, and sometimes written to.
 *
 * The first byte says how the rest is meant.  Bit 0: as the file's bytes from its beginning; else
 * as changes to a sound file, each a page's number, an offset in it (16 bits each), a count and so
 * many bytes.  Bit 1: the store is opened for writing and used.  Bit 2: records are trusted. */
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "folder.h"
#include "fuzz.h"
#include "walk.h"

enum { PAGE = 4096, GUARD_SIZE = 12288 };

static char path[320];
static unsigned char *sound; /* the sound file's bytes */
static size_t sound_size;
static unsigned char guard_bytes[GUARD_SIZE];
static unsigned char *file; /* data.mdb, mapped */
static unsigned char *guard;
static uint64_t page_count; /* of the sound file that are in use */

/* ---------------------------------------------------------------- a sound store */

static void put_turns(rst_store *store)
{
    rst_error error;
    rst_record *record = rst_record_new();
    static const int32_t ids[] = {5, 6, 7, 8};
    static const float logprobs[] = {-0.5f, -1.0f, -2.0f, -3.0f};
    for (int i = 0; i < 24; i++) {
        char id[2600];
        memset(id, 'x', sizeof id);
        int size = snprintf(id, sizeof id, "session-%d", i);
        size = i % 8 == 5 ? (int)sizeof id : size; /* an entry with pages of its own */
        for (uint32_t turn = 0; turn < 5; turn++) {
            const rst_turn t = {.token_count = 2,
                                .topk = turn % 3,
                                .token_ids = ids,
                                .token_logprobs = logprobs,
                                .topk_ids = ids,
                                .topk_logprobs = logprobs,
                                .temperature = 1.0f};
            must(rst_record_set(record, &t, &error) == RST_OK);
            must(rst_put(store, id, (size_t)size, turn, record, 0, 0, &error) == RST_OK);
        }
        const rst_outcome outcome = {.status = RST_STATUS_COMPLETED, .reward = 1.0};
        if (i % 6) {
            must(rst_seal(store, id, (size_t)size, &outcome, 0, &error) == RST_OK);
        }
    }
    rst_record_free(record);
}

static void make_store(void)
{
    rst_error error;
    rst_store *store;
    char first[320];
    rst_lease leases[5];
    size_t count;
    snprintf(first, sizeof first, "%s/first", folder);
    const rst_create_options options = {.capacity_size = RST_CAPACITY_MIN};
    must(rst_store_open(first, RST_OPEN_CREATE, &options, &store, &error) == RST_OK);
    put_turns(store);
    must(rst_store_copy(store, path, 0, &error) == RST_OK); /* without pages nobody uses */
    must(rst_store_close(store, &error) == RST_OK);
    must(rst_store_open(path, 0, NULL, &store, &error) == RST_OK);
    must(rst_release(store, "session-3", 9, 0, &error) == RST_OK);
    must(rst_consumer_create(store, "c", 1, RST_START_OLDEST, NULL, &error) == RST_OK);
    must(rst_consumer_take(store, "c", 1, 5, 0, 0, leases, &count, &error) == RST_OK);
    must(rst_store_close(store, &error) == RST_OK);
}

static unsigned char *map_file(const char *name, size_t *size)
{
    char full[400];
    struct stat info;
    snprintf(full, sizeof full, "%s/%s", path, name);
    int fd = open(full, O_RDWR);
    must(fd >= 0 && fstat(fd, &info) == 0);
    *size = (size_t)info.st_size;
    void *map = mmap(NULL, *size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    must(map != MAP_FAILED);
    close(fd);
    return map;
}

/* At the first input: AFL++ forks before it, and a handle of before a fork is refused. */
static void begin(void)
{
    size_t guard_size;
    make_folder();
    snprintf(path, sizeof path, "%s/store", folder);
    make_store();
    file = map_file("data.mdb", &sound_size);
    guard = map_file("guard.bin", &guard_size);
    must(guard_size == GUARD_SIZE);
    sound = exact_copy(file, sound_size);
    memcpy(guard_bytes, guard, GUARD_SIZE);
    memcpy(&page_count, sound + 16 + 120, sizeof page_count);
    page_count++;
    must((page_count + 1) * PAGE < sound_size);
    must(walk_store(path, 0).fault_count == 0);
}

/* ---------------------------------------------------------------- an input */

/* Returns how many bytes of the file, from its beginning, may be others than before. */
static size_t change_pages(const uint8_t *data, size_t size)
{
    size_t end = 0;
    while (size > 5) {
        uint16_t page;
        uint16_t offset;
        memcpy(&page, data, sizeof page);
        memcpy(&offset, data + 2, sizeof offset);
        size_t at = (size_t)(page % page_count) * PAGE + offset % PAGE;
        size_t count = data[4] % 64 + 1u;
        data += 5;
        size -= 5;
        count = count < size ? count : size;
        memcpy(file + at, data, count); /* the pages in use are not the file's last ones */
        end = at + count > end ? at + count : end;
        data += count;
        size -= count;
    }
    return end;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (!sound) {
        begin();
    }
    if (size == 0 || size > sound_size) {
        return 0;
    }
    size_t end = size - 1;
    if (data[0] & 1) {
        memcpy(file, data + 1, size - 1);
    } else {
        end = change_pages(data + 1, size - 1);
    }
    if (data[0] & 2) {
        walk_and_write(path, size);
        end = sound_size;
    } else {
        walk_store(path, data[0] & 4 ? RST_OPEN_TRUST : 0);
    }
    memcpy(file, sound, end);
    memcpy(guard, guard_bytes, GUARD_SIZE);
    return 0;
}
