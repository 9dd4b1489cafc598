#include "npz.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fail.h"
#include "output.h"

/* A size or an offset from here on stands in a zip64 field. */
#ifndef NPZ_ZIP64_FROM
#define NPZ_ZIP64_FROM UINT64_C(0xFFFFFFFF)
#endif

#define NAME_SIZE_MAX 64

typedef struct zip_entry {
    char name[NAME_SIZE_MAX];
    uint32_t crc;
    uint64_t size;
    uint64_t offset; /* of its local header */
} zip_entry;

struct npz_file {
    int fd;
    char *path;
    char *temporary; /* NULL where the path itself is written: a device, a pipe */
    bool nameless;   /* the file has no name yet */
    uint64_t offset; /* bytes written */
    int error;       /* errno of the first failure */
    size_t count;
    zip_entry entries[NPZ_ARRAY_COUNT_MAX];
};

/* ---------------------------------------------------------------- CRC-32 (IEEE 802.3) */

/* Eight tables, for eight bytes a step: table[t][b] is b's CRC followed by t zero bytes. */
static uint32_t crc_table[8][256];

static void crc_init(void)
{
    if (crc_table[0][1]) {
        return;
    }
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++) {
            crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
        }
        crc_table[0][byte] = crc;
    }
    for (size_t byte = 0; byte < 256; byte++) {
        for (size_t t = 1; t < 8; t++) {
            uint32_t before = crc_table[t - 1][byte];
            crc_table[t][byte] = before >> 8 ^ crc_table[0][before & 0xFF];
        }
    }
}

static uint32_t crc_update(uint32_t crc, const void *bytes, size_t size)
{
    const unsigned char *at = bytes;
    crc = ~crc;
    for (; size >= 8; size -= 8, at += 8) {
        uint32_t low = crc ^ ((uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 |
                              (uint32_t)at[3] << 24);
        crc = crc_table[7][low & 0xFF] ^ crc_table[6][low >> 8 & 0xFF] ^
              crc_table[5][low >> 16 & 0xFF] ^ crc_table[4][low >> 24] ^ crc_table[3][at[4]] ^
              crc_table[2][at[5]] ^ crc_table[1][at[6]] ^ crc_table[0][at[7]];
    }
    for (; size; size--, at++) {
        crc = crc >> 8 ^ crc_table[0][(crc ^ *at) & 0xFF];
    }
    return ~crc;
}

/* ---------------------------------------------------------------- little-endian fields */

typedef struct zip_fields {
    unsigned char bytes[256];
    size_t size;
} zip_fields;

static void put(zip_fields *fields, uint64_t value, size_t size)
{
    for (size_t i = 0; i < size; i++) {
        fields->bytes[fields->size++] = (unsigned char)(value >> (8 * i));
    }
}

static void put_name(zip_fields *fields, const char *name)
{
    size_t size = strlen(name);
    memcpy(fields->bytes + fields->size, name, size);
    fields->size += size;
}

static void write_bytes(npz_file *npz, const void *bytes, uint64_t size)
{
    if (!npz->error && !write_fully(npz->fd, bytes, (size_t)size)) {
        npz->error = errno;
    }
    npz->offset += size;
}

#define SIGNATURE_LOCAL 0x04034B50u
#define SIGNATURE_CENTRAL 0x02014B50u
#define SIGNATURE_END64 0x06064B50u
#define SIGNATURE_END64_LOCATOR 0x07064B50u
#define SIGNATURE_END 0x06054B50u
#define VERSION_STORED 20
#define VERSION_ZIP64 45
#define EXTRA_ZIP64 1
#define DATE_1980 0x21 /* the earliest a zip knows: the same arrays give the same bytes */

static uint32_t field32(uint64_t value)
{
    return value >= NPZ_ZIP64_FROM ? UINT32_MAX : (uint32_t)value;
}

/* What the local and the central header have in common, from the version needed to extract. */
static void put_header(zip_fields *fields, const zip_entry *entry, bool zip64)
{
    put(fields, zip64 ? VERSION_ZIP64 : VERSION_STORED, 2);
    put(fields, 0, 2); /* flags */
    put(fields, 0, 2); /* stored */
    put(fields, 0, 2); /* time */
    put(fields, DATE_1980, 2);
    put(fields, entry->crc, 4);
    put(fields, field32(entry->size), 4); /* compressed */
    put(fields, field32(entry->size), 4); /* uncompressed */
    put(fields, strlen(entry->name), 2);
}

static void write_local(npz_file *npz, const zip_entry *entry)
{
    zip_fields header = {.size = 0};
    bool zip64 = entry->size >= NPZ_ZIP64_FROM;
    put(&header, SIGNATURE_LOCAL, 4);
    put_header(&header, entry, zip64);
    put(&header, zip64 ? 20 : 0, 2);
    put_name(&header, entry->name);
    if (zip64) {
        put(&header, EXTRA_ZIP64, 2);
        put(&header, 16, 2);
        put(&header, entry->size, 8);
        put(&header, entry->size, 8);
    }
    write_bytes(npz, header.bytes, header.size);
}

static void write_central(npz_file *npz, const zip_entry *entry)
{
    zip_fields header = {.size = 0};
    bool large = entry->size >= NPZ_ZIP64_FROM;
    bool far = entry->offset >= NPZ_ZIP64_FROM;
    size_t extra = (large ? 16u : 0u) + (far ? 8u : 0u);
    put(&header, SIGNATURE_CENTRAL, 4);
    put(&header, VERSION_ZIP64, 2); /* made by */
    put_header(&header, entry, large || far);
    put(&header, extra ? extra + 4 : 0, 2);
    put(&header, 0, 2); /* comment */
    put(&header, 0, 2); /* disk */
    put(&header, 0, 2); /* internal attributes */
    put(&header, 0, 4); /* external attributes */
    put(&header, field32(entry->offset), 4);
    put_name(&header, entry->name);
    if (extra) {
        put(&header, EXTRA_ZIP64, 2);
        put(&header, extra, 2);
        if (large) {
            put(&header, entry->size, 8);
            put(&header, entry->size, 8);
        }
        if (far) {
            put(&header, entry->offset, 8);
        }
    }
    write_bytes(npz, header.bytes, header.size);
}

static void write_end(npz_file *npz, uint64_t directory)
{
    zip_fields end = {.size = 0};
    uint64_t size = npz->offset - directory;
    if (directory >= NPZ_ZIP64_FROM) {
        uint64_t here = npz->offset;
        put(&end, SIGNATURE_END64, 4);
        put(&end, 44, 8); /* bytes that follow */
        put(&end, VERSION_ZIP64, 2);
        put(&end, VERSION_ZIP64, 2);
        put(&end, 0, 4); /* this disk */
        put(&end, 0, 4); /* the directory's disk */
        put(&end, npz->count, 8);
        put(&end, npz->count, 8);
        put(&end, size, 8);
        put(&end, directory, 8);
        put(&end, SIGNATURE_END64_LOCATOR, 4);
        put(&end, 0, 4);
        put(&end, here, 8);
        put(&end, 1, 4); /* disks */
    }
    put(&end, SIGNATURE_END, 4);
    put(&end, 0, 2);
    put(&end, 0, 2);
    put(&end, npz->count, 2);
    put(&end, npz->count, 2);
    put(&end, size, 4);
    put(&end, field32(directory), 4);
    put(&end, 0, 2); /* comment */
    write_bytes(npz, end.bytes, end.size);
}

/* ---------------------------------------------------------------- .npy */

#define NPY_HEADER_SIZE                                                                            \
    192 /* a multiple of 64, as the format asks, that holds every shape here                       \
         */

/* The .npy header, version 1.0: magic, length, a Python dict padded with spaces to a newline. */
static void npy_header(char header[NPY_HEADER_SIZE], const char *dtype, const uint64_t *shape,
                       size_t dimension_count)
{
    char dict[NPY_HEADER_SIZE];
    int size =
        snprintf(dict, sizeof dict, "{'descr': '%s', 'fortran_order': False, 'shape': (", dtype);
    for (size_t i = 0; i < dimension_count; i++) {
        size += snprintf(dict + size, sizeof dict - (size_t)size, "%llu,%s",
                         (unsigned long long)shape[i], i + 1 < dimension_count ? " " : "");
    }
    size += snprintf(dict + size, sizeof dict - (size_t)size, "), }");
    const size_t length = NPY_HEADER_SIZE - 10;
    memset(header, ' ', NPY_HEADER_SIZE);
    memcpy(header, "\x93NUMPY\x01\x00", 8);
    header[8] = (char)(unsigned char)length;
    header[9] = 0;
    memcpy(header + 10, dict, (size_t)size);
    header[NPY_HEADER_SIZE - 1] = '\n';
}

void npz_add(npz_file *npz, const char *name, const char *dtype, const uint64_t *shape,
             size_t dimension_count, const void *bytes, uint64_t size)
{
    if (npz->error) {
        return;
    }
    if (npz->count == NPZ_ARRAY_COUNT_MAX) {
        npz->error = E2BIG;
        return;
    }
    char header[NPY_HEADER_SIZE];
    npy_header(header, dtype, shape, dimension_count);
    zip_entry *added = &npz->entries[npz->count++];
    snprintf(added->name, sizeof added->name, "%s.npy", name);
    added->crc = crc_update(crc_update(0, header, sizeof header), bytes, (size_t)size);
    added->size = sizeof header + size;
    added->offset = npz->offset;
    write_local(npz, added);
    write_bytes(npz, header, sizeof header);
    write_bytes(npz, bytes, size);
}

void npz_add_i64(npz_file *npz, const char *name, int64_t value)
{
    npz_add(npz, name, "<i8", NULL, 0, &value, sizeof value);
}

void npz_add_f64(npz_file *npz, const char *name, double value)
{
    npz_add(npz, name, "<f8", NULL, 0, &value, sizeof value);
}

void npz_add_text(npz_file *npz, const char *name, const char *text, size_t size)
{
    uint32_t *codes = calloc(size + 1, sizeof *codes);
    if (!codes) {
        npz->error = ENOMEM;
        return;
    }
    size_t count = 0;
    for (size_t at = 0; at < size;) {
        size_t length = utf8_decode((const unsigned char *)text + at, size - at, &codes[count]);
        if (length == 0) {
            codes[count] = 0xFFFD;
        }
        count++;
        at += length ? length : 1;
    }
    count += count == 0; /* NumPy's text types hold at least one character, NUL for none */
    char dtype[32];
    snprintf(dtype, sizeof dtype, "<U%zu", count);
    npz_add(npz, name, dtype, NULL, 0, codes, count * sizeof *codes);
    free(codes);
}

/* ---------------------------------------------------------------- the file */

static void npz_free(npz_file *npz)
{
    if (npz->fd >= 0) {
        close(npz->fd);
    }
    free(npz->path);
    free(npz->temporary);
    free(npz);
}

/* A file without a name, which the system removes if we are killed; -1 where the file system has
 * none. */
static int open_nameless(const char *path)
{
    char *folder = strdup(path);
    if (!folder) {
        return -1;
    }
    char *slash = strrchr(folder, '/');
    if (slash) {
        slash[slash == folder ? 1 : 0] = '\0';
    }
    int fd = open(slash ? folder : ".", O_TMPFILE | O_WRONLY | O_CLOEXEC, 0666);
    free(folder);
    return fd;
}

/* A file of its own beside the path; a path that is there and no regular file is written as it is.
 */
static bool open_beside(npz_file *npz)
{
    struct stat status;
    if (stat(npz->path, &status) == 0 && !S_ISREG(status.st_mode)) {
        npz->fd = open(npz->path, O_WRONLY | O_CLOEXEC);
        return npz->fd >= 0;
    }
    if (asprintf(&npz->temporary, "%s.%ld.part", npz->path, (long)getpid()) < 0) {
        npz->temporary = NULL;
        errno = ENOMEM;
        return false;
    }
    npz->fd = open_nameless(npz->path);
    npz->nameless = npz->fd >= 0;
    if (!npz->nameless) {
        npz->fd = open(npz->temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    }
    if (npz->fd < 0) {
        free(npz->temporary); /* not ours to remove */
        npz->temporary = NULL;
    }
    return npz->fd >= 0;
}

/* A new name cannot take an old one's place at once: first a temporary name, then rename. */
static bool name_file(npz_file *npz)
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", npz->fd);
    if (linkat(AT_FDCWD, link, AT_FDCWD, npz->temporary, AT_SYMLINK_FOLLOW) != 0) {
        return false;
    }
    npz->nameless = false;
    return true;
}

npz_file *npz_begin(const char *path)
{
    crc_init();
    npz_file *begun = calloc(1, sizeof *begun);
    if (!begun || !(begun->path = strdup(path))) {
        free(begun);
        fail_system(ENOMEM, path);
        return NULL;
    }
    begun->fd = -1;
    if (!open_beside(begun)) {
        fail_system(errno, path);
        npz_free(begun);
        return NULL;
    }
    return begun;
}

void npz_abandon(npz_file *npz)
{
    if (npz->temporary && !npz->nameless) {
        unlink(npz->temporary);
    }
    npz_free(npz);
}

bool npz_end(npz_file *npz)
{
    uint64_t directory = npz->offset;
    for (size_t i = 0; i < npz->count; i++) {
        write_central(npz, &npz->entries[i]);
    }
    write_end(npz, directory);
    if (!npz->error && npz->nameless && !name_file(npz)) {
        npz->error = errno;
    }
    if (close(npz->fd) != 0 && !npz->error) {
        npz->error = errno;
    }
    npz->fd = -1;
    if (!npz->error && npz->temporary && rename(npz->temporary, npz->path) != 0) {
        npz->error = errno;
    }
    if (npz->error) {
        fail_system(npz->error, npz->path);
        npz_abandon(npz);
        return false;
    }
    npz_free(npz);
    return true;
}
