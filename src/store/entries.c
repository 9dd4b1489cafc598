/* Keys, and the entries that are not records. */
#include <string.h>

#include <xxhash.h>

#include "internal.h"

void rst_put_be64(unsigned char *out, uint64_t value)
{
    for (int i = 0; i < 8; i++) {
        out[i] = (unsigned char)(value >> (56 - 8 * i));
    }
}

uint64_t rst_get_be64(const unsigned char *in)
{
    uint64_t value = 0;
    for (int i = 0; i < 8; i++) {
        value = value << 8 | in[i];
    }
    return value;
}

void rst_session_key(const void *session, size_t session_size, uint8_t key[RST_KEY_SIZE])
{
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits(session, session_size));
    memcpy(key, canonical.digest, RST_KEY_SIZE);
}

void rst_turn_key(unsigned char out[RST_TURN_KEY_SIZE], const uint8_t key[RST_KEY_SIZE],
                  uint64_t number)
{
    memcpy(out, key, RST_KEY_SIZE);
    rst_put_be64(out + RST_KEY_SIZE, number);
}

int rst_check_session_id(const void *session, size_t session_size, rst_error *error)
{
    if (!session || session_size == 0 || session_size > RST_SESSION_ID_SIZE_MAX) {
        return rst_fail(error, RST_ERR_ARGUMENT, "session",
                        "a session id of %zu bytes: it must have 1 to %d", session_size,
                        RST_SESSION_ID_SIZE_MAX);
    }
    return RST_OK;
}

static int corrupt_session(rst_error *error, const char *what)
{
    return rst_fail(error, RST_ERR_CORRUPT, "sessions", "a session's entry: %s", what);
}

int rst_parse_session(const MDB_val *value, rst_session_entry *entry, const char **id,
                      rst_error *error)
{
    if (value->mv_size < sizeof *entry) {
        return corrupt_session(error, "too short");
    }
    memcpy(entry, value->mv_data, sizeof *entry);
    if (entry->magic != RST_SESSION_MAGIC) {
        return corrupt_session(error, "magic");
    }
    if (entry->version == 0 || entry->version > RST_FORMAT_VERSION) {
        return rst_fail(error, RST_ERR_VERSION, "sessions",
                        "a session's entry has version %u, this library knows up to %d",
                        entry->version, RST_FORMAT_VERSION);
    }
    if (entry->id_size == 0 || entry->id_size > RST_SESSION_ID_SIZE_MAX ||
        value->mv_size != sizeof *entry + entry->id_size) {
        return corrupt_session(error, "id_size");
    }
    bool sealed = entry->state == RST_STATE_SEALED;
    if ((entry->state != RST_STATE_OPEN && !sealed) || entry->status > RST_STATUS_FAILED ||
        sealed != (entry->status != RST_STATUS_NONE) || sealed != (entry->sequence != 0)) {
        return corrupt_session(error, "state");
    }
    if (entry->turn_count == 0 || entry->turn_count > RST_TURN_COUNT_MAX) {
        return corrupt_session(error, "turn_count");
    }
    *id = (const char *)value->mv_data + sizeof *entry;
    return RST_OK;
}

int rst_read_session(MDB_txn *txn, const rst_env *env, const uint8_t key[RST_KEY_SIZE],
                     rst_session_entry *entry, const char **id, rst_error *error)
{
    MDB_val k = {RST_KEY_SIZE, (void *)(uintptr_t)key};
    MDB_val value;
    int result = mdb_get(txn, env->sessions, &k, &value);
    if (result == MDB_NOTFOUND) {
        return rst_fail(error, RST_ERR_NOT_FOUND, "session", "there is no such session");
    }
    if (result) {
        return rst_fail_lmdb(error, result, "reading a session");
    }
    return rst_parse_session(&value, entry, id, error);
}

static bool is_zero(const void *bytes, size_t size)
{
    const unsigned char *at = bytes;
    while (size > 0 && at[size - 1] == 0) {
        size--;
    }
    return size == 0;
}

int rst_read_totals(MDB_txn *txn, const rst_env *env, rst_totals_entry *totals, rst_error *error)
{
    MDB_val key = {sizeof RST_META_KEY_TOTALS - 1, (void *)(uintptr_t)RST_META_KEY_TOTALS};
    MDB_val value;
    int result = mdb_get(txn, env->meta, &key, &value);
    if (result || value.mv_size != sizeof *totals) {
        return result && result != MDB_NOTFOUND
                   ? rst_fail_lmdb(error, result, "reading the totals")
                   : rst_fail(error, RST_ERR_CORRUPT, "meta", "the store's totals are missing");
    }
    memcpy(totals, value.mv_data, sizeof *totals);
    if (totals->next_sequence == 0 || totals->next_sequence == UINT64_MAX ||
        !is_zero(totals->reserved, sizeof totals->reserved)) {
        return rst_fail(error, RST_ERR_CORRUPT, "meta", "the store's totals are damaged");
    }
    return RST_OK;
}

int rst_read_format(MDB_txn *txn, MDB_dbi meta, rst_format_entry *format, rst_error *error)
{
    MDB_val key = {sizeof RST_META_KEY_FORMAT - 1, (void *)(uintptr_t)RST_META_KEY_FORMAT};
    MDB_val value;
    int result = mdb_get(txn, meta, &key, &value);
    if (result && result != MDB_NOTFOUND) {
        return rst_fail_lmdb(error, result, "reading the format");
    }
    if (result || value.mv_size < 8) {
        return rst_fail(error, RST_ERR_NOT_STORE, "path",
                        "an LMDB environment, but not a rollstore");
    }
    memset(format, 0, sizeof *format);
    memcpy(format, value.mv_data, value.mv_size < sizeof *format ? value.mv_size : sizeof *format);
    if (format->magic != RST_FORMAT_MAGIC) {
        return rst_fail(error, RST_ERR_NOT_STORE, "path",
                        "an LMDB environment, but not a rollstore");
    }
    if (format->version == 0 || format->version > RST_FORMAT_VERSION) {
        return rst_fail(error, RST_ERR_VERSION, "version",
                        "the store has format version %u, this library (%s) knows up to %d: use a "
                        "newer rollstore",
                        format->version, rst_version(), RST_FORMAT_VERSION);
    }
    bool sound =
        value.mv_size == sizeof *format && format->page_size >= 512 && format->page_size <= 65536 &&
        format->capacity_size >= RST_CAPACITY_MIN && format->capacity_size <= format->map_size &&
        format->durability >= RST_DURABILITY_MEMORY && format->durability <= RST_DURABILITY_FULL &&
        (format->durability == RST_DURABILITY_INTERVAL) == (format->interval_ms > 0) &&
        format->reader_count > 0 && format->reader_count <= RST_READER_COUNT_MAX &&
        is_zero(&format->reserved0, sizeof format->reserved0) &&
        is_zero(format->reserved, sizeof format->reserved);
    return sound ? RST_OK
                 : rst_fail(error, RST_ERR_CORRUPT, "meta", "the store's format entry is damaged");
}
