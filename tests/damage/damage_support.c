#include "damage_support.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SESSIONS = 40, TURNS = 4, HANG_SECONDS = 60 };

#define CAPACITY (UINT64_C(4) << 20)

/* ---------------------------------------------------------------- a store with everything in it */

static void put_sessions(rst_store *store)
{
    rst_error error;
    rst_record *record = rst_record_new();
    for (unsigned i = 0; i < SESSIONS; i++) {
        char id[2600];
        memset(id, 'x', sizeof id);
        int size = snprintf(id, sizeof id, "session-%u", i);
        if (i % 10 == 3) {
            id[size] = '-';
            size = sizeof id; /* its entry has pages of its own */
        }
        int32_t prompt[64] = {1, 2, 3};
        size_t prompt_count = 3;
        for (uint32_t turn = 0; turn < TURNS; turn++) {
            support_fill(record, 5 + turn, i % 4, 7, prompt, prompt_count, "12");
            rst_turn view;
            rst_record_view(record, &view);
            memcpy(prompt + prompt_count, view.token_ids, 4 * view.token_count);
            prompt_count += view.token_count;
            assert_ok(rst_put(store, id, (size_t)size, turn, record, 0, 0, &error), error);
        }
        const rst_outcome outcome = {
            .status = RST_STATUS_COMPLETED, .reward = 1.0, .group_index = RST_NO_INDEX, .index = 4};
        if (i % 8) {
            assert_ok(rst_seal(store, id, (size_t)size, &outcome, 0, &error), error);
        }
    }
    rst_record_free(record);
}

/* Lists of free pages: short ones, and one that has pages of its own. */
static void release_some(rst_store *store)
{
    rst_error error;
    rst_record *record = rst_record_new();
    support_fill(record, 4000, 40, 9, NULL, 0, NULL);
    assert_ok(rst_put(store, "big", 3, 0, record, 0, 0, &error), error);
    assert_ok(rst_release(store, "big", 3, 0, &error), error);
    assert_ok(rst_release(store, "session-5", 9, 0, &error), error);
    rst_record_free(record);
}

static void use_consumers(rst_store *store)
{
    rst_error error;
    rst_lease leases[8];
    size_t count;
    assert_ok(rst_consumer_create(store, "a", 1, RST_START_OLDEST, NULL, &error), error);
    assert_ok(rst_consumer_create(store, "b", 1, RST_START_OLDEST, NULL, &error), error);
    assert_ok(rst_consumer_take(store, "a", 1, 8, 0, 0, leases, &count, &error), error);
    assert_ok(rst_consumer_acknowledge(store, "a", 1, leases, 4, &error), error);
}

/* The copy has no pages that nobody uses any more: every damage is one of something. */
static void make_store(const char *folder)
{
    rst_error error;
    rst_store *store;
    rst_create_options options = {.capacity_size = CAPACITY};
    const char *first = support_path(folder, "first");
    const char *second = support_path(folder, "store");
    assert_ok(rst_store_open(first, RST_OPEN_CREATE, &options, &store, &error), error);
    put_sessions(store);
    assert_ok(rst_store_copy(store, second, 0, &error), error);
    assert_ok(rst_store_close(store, &error), error);
    assert_ok(rst_store_open(second, 0, NULL, &store, &error), error);
    release_some(store);
    use_consumers(store); /* last: a damaged number can make the version before the newest one */
    support_assert_sound(store);
    assert_ok(rst_store_close(store, &error), error);
}

/* ---------------------------------------------------------------- pages */

static unsigned get_u16(const unsigned char *in)
{
    return in[0] | (unsigned)in[1] << 8;
}

static uint64_t get_u64(const unsigned char *in)
{
    uint64_t value;
    memcpy(&value, in, sizeof value);
    return value;
}

static void note_tree(damage_fixture *f, uint64_t page, bool main_database)
{
    if (page == UINT64_MAX) {
        return; /* an empty tree */
    }
    assert_true(page < f->pages);
    const unsigned char *bytes = f->bytes + page * DAMAGE_PAGE;
    bool leaf = get_u16(bytes + 10) == 2;
    f->in_tree[page] = true;
    for (unsigned at = 16; at < get_u16(bytes + 12); at += 2) {
        const unsigned char *node = bytes + get_u16(bytes + at);
        if (!leaf) {
            note_tree(f, get_u64(node) & UINT64_C(0xFFFFFFFFFFFF), main_database);
        } else if (main_database) {
            note_tree(f, get_u64(node + 8 + get_u16(node + 6) + 40), false);
        }
    }
}

/* The pages of the trees, from the newer meta page on. */
static void note_trees(damage_fixture *f)
{
    const unsigned char *metas[] = {f->bytes + 16, f->bytes + DAMAGE_PAGE + 16};
    const unsigned char *meta = metas[get_u64(metas[0] + 128) < get_u64(metas[1] + 128)];
    f->pages = get_u64(meta + 120) + 1;
    f->in_tree = calloc(f->pages, sizeof *f->in_tree);
    note_tree(f, get_u64(meta + 24 + 40), false);
    note_tree(f, get_u64(meta + 72 + 40), true);
}

bool damage_is_tree_page(const damage_fixture *f, uint64_t page)
{
    return f->in_tree[page];
}

bool damage_matters(const damage_fixture *f, uint64_t page, unsigned at)
{
    if (page < 2) {
        return at < 16 + 136;
    }
    const unsigned char *bytes = f->bytes + page * DAMAGE_PAGE;
    return damage_is_tree_page(f, page) && (at < get_u16(bytes + 12) || at >= get_u16(bytes + 14));
}

/* ---------------------------------------------------------------- the fixture */

static void find_values(damage_fixture *f)
{
    rst_error error;
    rst_store *store;
    rst_snapshot *snapshot;
    rst_session s;
    const void *map;
    size_t map_size;
    const uint8_t *after = NULL;
    uint8_t key[RST_KEY_SIZE];
    f->values = calloc((size_t)SESSIONS * TURNS, sizeof *f->values);
    assert_ok(
        rst_store_open(support_path(f->folder, "store"), RST_OPEN_READ_ONLY, NULL, &store, &error),
        error);
    assert_ok(rst_store_map(store, &map, &map_size, &error), error);
    assert_ok(rst_snapshot_open(store, &snapshot, &error), error);
    while (rst_session_next(snapshot, after, &s, &error) == RST_OK) {
        for (uint32_t turn = 0; turn < s.turn_count; turn++) {
            const void *value;
            damage_value *v = &f->values[f->value_count++];
            assert_ok(rst_turn_value(snapshot, s.key, turn, &value, &v->size, &error), error);
            v->offset = (uint64_t)((const char *)value - (const char *)map);
        }
        memcpy(key, s.key, sizeof key);
        after = key;
    }
    rst_snapshot_close(snapshot);
    assert_ok(rst_store_close(store, &error), error);
}

static unsigned char *read_file(const char *path, size_t *size)
{
    int fd = open(path, O_RDONLY);
    struct stat info;
    assert_int_equal(fstat(fd, &info), 0);
    *size = (size_t)info.st_size;
    unsigned char *bytes = malloc(*size);
    assert_int_equal(read(fd, bytes, *size), info.st_size);
    close(fd);
    return bytes;
}

int damage_set_up(void **state)
{
    damage_fixture *f = calloc(1, sizeof *f);
    f->folder = support_make_folder();
    make_store(f->folder);
    f->bytes = read_file(support_path(f->folder, "store/data.mdb"), &f->size);
    size_t guard_size;
    unsigned char *guard = read_file(support_path(f->folder, "store/guard.bin"), &guard_size);
    assert_int_equal(guard_size, sizeof f->guard);
    memcpy(f->guard, guard, sizeof f->guard);
    free(guard);
    note_trees(f);
    find_values(f);
    f->sound = walk_store(support_path(f->folder, "store"), 0);
    assert_int_equal(f->sound.code, RST_OK);
    assert_int_equal(f->sound.fault_count, 0);
    assert_int_equal(f->sound.failed_count, 0);
    assert_int_equal(f->sound.turn_count, (SESSIONS - 1) * TURNS);
    *state = f;
    return 0;
}

int damage_tear_down(void **state)
{
    damage_fixture *f = *state;
    support_remove_folder(f->folder);
    free(f->values);
    free(f->in_tree);
    free(f->bytes);
    free(f);
    return 0;
}

/* ---------------------------------------------------------------- trials */

/* A file with these bytes, mapped. */
static unsigned char *make_file(const char *path, const unsigned char *bytes, size_t size, int *fd)
{
    *fd = open(path, O_RDWR | O_CREAT, 0600);
    if (*fd < 0 || ftruncate(*fd, (off_t)size) != 0) {
        exit(3);
    }
    void *map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
    if (map == MAP_FAILED) {
        exit(3);
    }
    return memcpy(map, bytes, size);
}

static void open_worker(damage_worker *w)
{
    char path[600];
    int fd;
    snprintf(w->path, sizeof w->path, "%s/worker-%u", w->f->folder, w->index);
    if (mkdir(w->path, 0700) != 0) {
        exit(3);
    }
    snprintf(w->data, sizeof w->data, "%s/data.mdb", w->path);
    w->file = make_file(w->data, w->f->bytes, w->f->size, &w->fd);
    snprintf(path, sizeof path, "%s/guard.bin", w->path);
    w->guard = make_file(path, w->f->guard, sizeof w->f->guard, &fd);
}

void damage_say(damage_worker *w, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(w->progress->damage, sizeof w->progress->damage, format, arguments);
    va_end(arguments);
}

void damage_read(damage_worker *w, unsigned flags)
{
    alarm(HANG_SECONDS);
    walk_result r = walk_store(w->path, flags);
    alarm(0);
    damage_progress *p = w->progress;
    p->trials++;
    if (r.code) {
        p->refused++;
    } else if (r.fault_count > 0) {
        p->reported++;
    } else {
        p->unnoticed++;
        if (r.turn_count != w->f->sound.turn_count || r.digest != w->f->sound.digest) {
            fprintf(stderr, "verify finds nothing, but the turns are others\n");
            exit(4);
        }
    }
}

void damage_write(damage_worker *w, uint64_t seed)
{
    alarm(HANG_SECONDS);
    int code = walk_and_write(w->path, seed);
    alarm(0);
    w->progress->trials++;
    w->progress->refused += code != RST_OK;
}

void damage_try(damage_worker *w, uint64_t offset, const void *bytes, size_t size)
{
    if (memcmp(w->file + offset, bytes, size) == 0) {
        return;
    }
    uint64_t value = 0;
    memcpy(&value, bytes, size < sizeof value ? size : sizeof value);
    damage_say(w, "page %llu, byte %llu: %zu bytes 0x%llx",
               (unsigned long long)(offset / DAMAGE_PAGE),
               (unsigned long long)(offset % DAMAGE_PAGE), size, (unsigned long long)value);
    unsigned char before[8];
    if (size > sizeof before) {
        exit(3);
    }
    memcpy(before, w->file + offset, size);
    memcpy(w->file + offset, bytes, size);
    damage_read(w, 0);
    memcpy(w->file + offset, before, size);
}

void damage_restore(damage_worker *w)
{
    if (ftruncate(w->fd, (off_t)w->f->size) != 0) {
        exit(3);
    }
    memcpy(w->file, w->f->bytes, w->f->size);
    memcpy(w->guard, w->f->guard, sizeof w->f->guard);
}

static void run_worker(damage_worker w, void (*body)(damage_worker *w))
{
    /* cmocka would take a crash here for one of the test, and go on in this process. */
    const int crashes[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGSYS};
    for (size_t i = 0; i < sizeof crashes / sizeof *crashes; i++) {
        signal(crashes[i], SIG_DFL);
    }
    open_worker(&w);
    body(&w);
    exit(0);
}

/* How the worker ended, when not by returning. */
static bool ended_badly(pid_t pid, const damage_progress *p, char message[256])
{
    int status;
    if (waitpid(pid, &status, 0) != pid || status == 0) {
        return false;
    }
    snprintf(message, 256, "%s %d after %llu trials: %s",
             WIFSIGNALED(status) ? "killed by signal" : "ended with status",
             WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status),
             (unsigned long long)p->trials, p->damage);
    return true;
}

damage_progress damage_run(const damage_fixture *f, void (*body)(damage_worker *w))
{
    size_t size = DAMAGE_WORKERS * sizeof(damage_progress);
    damage_progress *shared =
        mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(shared != MAP_FAILED);
    pid_t pids[DAMAGE_WORKERS];
    for (unsigned i = 0; i < DAMAGE_WORKERS; i++) {
        fflush(NULL);
        pids[i] = fork();
        assert_true(pids[i] >= 0);
        if (pids[i] == 0) {
            run_worker((damage_worker){.f = f, .index = i, .progress = &shared[i]}, body);
        }
    }
    damage_progress all = {0};
    char message[256] = "";
    bool bad = false;
    for (unsigned i = 0; i < DAMAGE_WORKERS; i++) {
        bad |= ended_badly(pids[i], &shared[i], message);
        all.trials += shared[i].trials;
        all.refused += shared[i].refused;
        all.reported += shared[i].reported;
        all.unnoticed += shared[i].unnoticed;
        char command[512];
        snprintf(command, sizeof command, "rm -rf '%s/worker-%u'", f->folder, i);
        assert_int_equal(system(command), 0);
    }
    munmap(shared, size);
    if (bad) {
        fail_msg("%s", message);
    }
    print_message("%llu trials: %llu refused at opening, %llu reported by verify, %llu harmless\n",
                  (unsigned long long)all.trials, (unsigned long long)all.refused,
                  (unsigned long long)all.reported, (unsigned long long)all.unnoticed);
    return all;
}

bool damage_mine(damage_worker *w)
{
    return w->progress->dealt++ % DAMAGE_WORKERS == w->index;
}

unsigned damage_rounds(void)
{
    const char *text = getenv("ROLLSTORE_DAMAGE_ROUNDS");
    int n = text ? atoi(text) : 1;
    return n > 0 ? (unsigned)n : 1;
}
