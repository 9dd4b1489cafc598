/*
 * rollstore/layout.h: what stands in a store's data file, byte by byte.
 *
 * A reader in any language can be written from this header and LMDB alone.  Everything is
 * little-endian, except the big-endian numbers inside keys, which make LMDB's byte order the
 * numbers' order.  Format version 1.
 *
 * The store is a folder with LMDB's data.mdb and lock.mdb, and guard.bin, in which the library
 * notes what it needs to bring data.mdb back after a power cut; data.mdb alone holds all contents.
 * It has these named databases:
 *
 *   name       key (bytes)                                     value
 *   ---------  ----------------------------------------------  -----------------------------------
 *   meta       16: "rollstore.format", "rollstore.totals"      rst_format_entry, rst_totals_entry
 *   sessions   16: session key                                 rst_session_entry, then the full id
 *   turns      24: session key, u64 turn (big-endian)          a record, see below
 *   ready       8: u64 sequence number (big-endian)            16: session key
 *   consumers  16: XXH3-128 of the consumer's name             rst_consumer_entry, then the name
 *   leases     24: consumer key, u64 sequence (big-endian)     rst_lease_entry
 *
 * Session key: XXH3-128 (seed 0) of the session id's bytes in canonical (big-endian) form.  The
 * full id stands in the session's entry and is compared, so two ids with one key can never mix.
 *
 * A record (the value of a turn):
 *
 *   rst_record_header                          112 bytes
 *   token_ids       i32 [token_count]          the sampled tokens
 *   token_logprobs  f32 [token_count]          natural log, of the distribution sampled from
 *   topk_ids        i32 [token_count, topk]    row-major, the engine's order within a row
 *   topk_logprobs   f32 [token_count, topk]
 *   widths          i32 [token_count]          only with RST_RECORD_RAGGED: slots used of each row
 *   prompt_ids      i32 [prompt_count]         what the prompt adds after prefix_count tokens
 *   weight_version  u8  [weight_version_size]  text, UTF-8, no NUL at the end
 *   finish_reason   u8  [finish_reason_size]   text, follows weight_version without a gap
 *
 * Each array (and weight_version) begins at the first offset o at or after the end of the array
 * before it with (o + 16) % 64 == 0.  LMDB puts a value with its own pages at byte 16 of a page, so
 * every array begins on a 64-byte boundary of the map.  Gaps are zero.  Values shorter than half a
 * page would share a page with others, where nothing is aligned, so the stored value is filled with
 * zeros up to half the page size (rst_format_entry.page_size / 2); record_size tells its real end.
 *
 * An unused slot is id -1 with logprob -inf.  Without RST_RECORD_RAGGED every row uses all topk
 * slots.
 *
 * The prompt of turn t begins with prefix_count tokens of the session's sequence before it (turn
 * 0's prompt, its output, turn 1's prompt_ids, its output, ...; prefix_hash is XXH3-64, seed 0,
 * of those int32), then prompt_ids.  The sequence after turn t is that prompt and the turn's
 * output. trimmed_count tokens at the end of the sequence before are not in the prompt.
 *
 * A reader must refuse: another magic or a higher version; a header_size other than 112; counts
 * over the limits below; unknown flags; non-zero reserved bytes; a record_size that differs from
 * what the counts give, or is larger than the value; a key that is not the header's session and
 * turn.
 */
#ifndef ROLLSTORE_LAYOUT_H
#define ROLLSTORE_LAYOUT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#define RST_STATIC_ASSERT(condition, message) static_assert(condition, message)
extern "C" {
#else
#define RST_STATIC_ASSERT(condition, message) _Static_assert(condition, message)
#endif

#define RST_FORMAT_VERSION 1

/* ---------------------------------------------------------------- limits */

#define RST_KEY_SIZE 16                /* bytes of a session or consumer key */
#define RST_ALIGNMENT 64               /* bytes; a cache line, an AVX-512 register */
#define RST_VALUE_OFFSET 16            /* bytes of LMDB's page header before a large value */
#define RST_SESSION_ID_SIZE_MAX 4096   /* bytes of UTF-8 */
#define RST_TOKEN_COUNT_MAX (1u << 24) /* tokens of one turn; ids of one prompt */
#define RST_TOPK_MAX 4096u             /* candidates a token */
#define RST_RECORD_SIZE_MAX                                                                        \
    UINT64_C(0xC0000000)              /* 3 GiB; LMDB's own limit for a value is 4 GiB              \
                                       */
#define RST_TEXT_SIZE_MAX 1024        /* bytes of weight_version, of finish_reason */
#define RST_TURN_COUNT_MAX (1u << 20) /* turns of one session */
#define RST_LOGPROB_MAX 1e-4f         /* rounding may lift a logprob of 0 this far */

/* ---------------------------------------------------------------- values of bytes */

typedef enum rst_mode {
    RST_MODE_SELECTED = 0, /* the engine's top-k of the full distribution */
    RST_MODE_SUPPORT = 1   /* the support of a filtered distribution (top-p, top-k) */
} rst_mode;

typedef enum rst_finish {
    RST_FINISH_NONE = 0, /* the reply did not say */
    RST_FINISH_STOP = 1,
    RST_FINISH_LENGTH = 2,
    RST_FINISH_ABORT = 3,
    RST_FINISH_TOOL_CALLS = 4,
    RST_FINISH_OTHER = 5 /* the text finish_reason says which */
} rst_finish;

typedef enum rst_scaled {
    RST_SCALED_NOT_SAID = 0,
    RST_SCALED_NO = 1,
    RST_SCALED_YES = 2 /* logprobs are of softmax(logits / temperature) */
} rst_scaled;

typedef enum rst_state { RST_STATE_OPEN = 1, RST_STATE_SEALED = 2 } rst_state;

typedef enum rst_outcome_status {
    RST_STATUS_NONE = 0, /* the session is open */
    RST_STATUS_COMPLETED = 1,
    RST_STATUS_TRUNCATED = 2,
    RST_STATUS_ABORTED = 3,
    RST_STATUS_FAILED = 4
} rst_outcome_status;

/*
 * What a power cut, or a crash of the kernel, leaves.  A process that is killed loses nothing that
 * was acknowledged, whatever the durability.
 *
 * MEMORY promises nothing.  The first opening after a restart of the machine reads everything once;
 * it succeeds when all is there, as after an orderly shutdown, and else is RST_ERR_CORRUPT.
 *
 * INTERVAL: the store is there as of the beginning of the last completed sync, exactly: everything
 * acknowledged before is in it, nothing later.  Syncs begin interval_ms apart, or back to back
 * where one takes longer, as long as some process has the store open for writing.  Closing the last
 * handle of a process syncs.  (When every such process is killed, what was acknowledged since the
 * last sync is still there, and is safe from the next opening for writing on.)  Pages that were
 * freed since the last sync are not used again before the next one.
 *
 * FULL: everything acknowledged is there; of a commit that was under way, all or nothing.
 *
 * That holds for a disk that keeps what it has acknowledged, and writes sectors of 512 bytes whole.
 */
typedef enum rst_durability {
    RST_DURABILITY_MEMORY = 1,   /* never synced */
    RST_DURABILITY_INTERVAL = 2, /* synced every interval_ms */
    RST_DURABILITY_FULL = 3      /* synced at each commit */
} rst_durability;

/* A group_index or index that the outcome did not have. */
#define RST_NO_INDEX INT64_MIN
/* A weight version that was not given, or is not a decimal number. */
#define RST_NO_VERSION INT64_C(-1)

/* ---------------------------------------------------------------- turns: the record */

#define RST_RECORD_MAGIC UINT32_C(0x54545352) /* "RSTT" */
#define RST_RECORD_RAGGED 0x01u               /* the widths array is there */
#define RST_RECORD_FLAGS RST_RECORD_RAGGED    /* every flag of this version */

typedef struct rst_record_header {
    uint32_t magic;
    uint16_t version;
    uint16_t header_size;          /* bytes: 112 */
    uint64_t checksum;             /* XXH3-64, seed 0, of bytes 16 to record_size */
    uint64_t record_size;          /* bytes, from the magic to the end of the last text */
    uint32_t turn;                 /* 0, 1, ... */
    uint32_t token_count;          /* n, generated tokens */
    uint32_t topk;                 /* k, slots a token */
    uint32_t null_prefix;          /* leading tokens without candidates */
    uint32_t prompt_count;         /* ids in prompt_ids */
    uint32_t prefix_count;         /* tokens of the sequence before that the prompt begins with */
    uint32_t trimmed_count;        /* tokens of the sequence before that the prompt leaves out */
    float temperature;             /* NaN when not known */
    uint64_t prefix_hash;          /* XXH3-64, seed 0, of the prefix_count int32 */
    int64_t weight_version_number; /* the text as a decimal number, or RST_NO_VERSION */
    uint8_t session_key[RST_KEY_SIZE];
    uint16_t weight_version_size; /* bytes */
    uint16_t finish_reason_size;  /* bytes; 0 unless finish is RST_FINISH_OTHER */
    uint8_t mode;                 /* rst_mode */
    uint8_t finish;               /* rst_finish */
    uint8_t temperature_scaled;   /* rst_scaled */
    uint8_t flags;                /* RST_RECORD_* */
    uint8_t reserved[16];         /* zero */
} rst_record_header;

RST_STATIC_ASSERT(sizeof(rst_record_header) == 112, "the header fills up to the first boundary");
RST_STATIC_ASSERT((sizeof(rst_record_header) + RST_VALUE_OFFSET) % RST_ALIGNMENT == 0,
                  "the first array begins on a boundary");
RST_STATIC_ASSERT(offsetof(rst_record_header, checksum) == 8, "layout");
RST_STATIC_ASSERT(offsetof(rst_record_header, record_size) == 16, "layout");
RST_STATIC_ASSERT(offsetof(rst_record_header, turn) == 24, "layout");
RST_STATIC_ASSERT(offsetof(rst_record_header, token_count) == 28, "layout");
RST_STATIC_ASSERT(offsetof(rst_record_header, topk) == 32, "layout");
RST_STATIC_ASSERT(offsetof(rst_record_header, null_prefix) == 36, "layout");
RST_STATIC_ASSERT(offsetof(rst_record_header, prompt_count) == 40, "layout");
RST_STATIC_ASSERT(offsetof(rst_record_header, prefix_count) == 44, "layout");
RST_STATIC_ASSERT(offsetof(rst_record_header, trimmed_count) == 48, "layout");
RST_STATIC_ASSERT(offsetof(rst_record_header, temperature) == 52, "layout");
RST_STATIC_ASSERT(offsetof(rst_record_header, prefix_hash) == 56, "layout");
RST_STATIC_ASSERT(offsetof(rst_record_header, weight_version_number) == 64, "layout");
RST_STATIC_ASSERT(offsetof(rst_record_header, session_key) == 72, "layout");
RST_STATIC_ASSERT(offsetof(rst_record_header, weight_version_size) == 88, "layout");
RST_STATIC_ASSERT(offsetof(rst_record_header, finish_reason_size) == 90, "layout");
RST_STATIC_ASSERT(offsetof(rst_record_header, mode) == 92, "layout");
RST_STATIC_ASSERT(offsetof(rst_record_header, finish) == 93, "layout");
RST_STATIC_ASSERT(offsetof(rst_record_header, temperature_scaled) == 94, "layout");
RST_STATIC_ASSERT(offsetof(rst_record_header, flags) == 95, "layout");
RST_STATIC_ASSERT(offsetof(rst_record_header, reserved) == 96, "layout");

/* ---------------------------------------------------------------- sessions */

#define RST_SESSION_MAGIC UINT32_C(0x53545352) /* "RSTS" */

typedef struct rst_session_entry {
    uint32_t magic;
    uint16_t version;
    uint8_t state;    /* rst_state */
    uint8_t status;   /* rst_outcome_status */
    uint32_t id_size; /* bytes of the id that follows this entry */
    uint32_t turn_count;
    uint32_t topk;              /* the largest k of its turns */
    uint32_t reserved;          /* zero */
    uint64_t sequence;          /* place in the ready order, from 1; 0 while open */
    double reward;              /* NaN when none was given */
    int64_t group_index;        /* or RST_NO_INDEX */
    int64_t index;              /* or RST_NO_INDEX */
    uint64_t generated_count;   /* sum of the turns' token_count */
    uint64_t sequence_count;    /* tokens of the sequence after the last turn */
    uint64_t value_size;        /* bytes of its turns' values */
    int64_t weight_version_min; /* over the turns that have a number, or RST_NO_VERSION */
    int64_t weight_version_max;
    int64_t created_ns; /* Unix time of the first turn */
    int64_t changed_ns; /* Unix time of the last change */
    uint64_t revision;  /* LMDB's id of the transaction that changed it last */
} rst_session_entry;

RST_STATIC_ASSERT(sizeof(rst_session_entry) == 120, "layout");
RST_STATIC_ASSERT(offsetof(rst_session_entry, id_size) == 8, "layout");
RST_STATIC_ASSERT(offsetof(rst_session_entry, sequence) == 24, "layout");
RST_STATIC_ASSERT(offsetof(rst_session_entry, reward) == 32, "layout");
RST_STATIC_ASSERT(offsetof(rst_session_entry, generated_count) == 56, "layout");
RST_STATIC_ASSERT(offsetof(rst_session_entry, weight_version_min) == 80, "layout");
RST_STATIC_ASSERT(offsetof(rst_session_entry, revision) == 112, "layout");

/* ---------------------------------------------------------------- meta */

#define RST_META_KEY_FORMAT "rollstore.format" /* 16 bytes, without the NUL */
#define RST_META_KEY_TOTALS "rollstore.totals"
#define RST_FORMAT_MAGIC UINT32_C(0x46545352) /* "RSTF" */

typedef struct rst_format_entry {
    uint32_t magic;
    uint16_t version;       /* RST_FORMAT_VERSION of the creator */
    uint16_t reserved0;     /* zero */
    uint64_t capacity_size; /* bytes of the map that turns may use */
    uint64_t map_size;      /* bytes of the map: capacity and what a release needs at capacity */
    uint32_t page_size;     /* bytes of an LMDB page */
    uint32_t durability;    /* rst_durability */
    uint32_t interval_ms;   /* of RST_DURABILITY_INTERVAL, else 0 */
    uint32_t reader_count;  /* reader slots */
    int64_t created_ns;     /* Unix time */
    uint8_t store_id[16];   /* random, to tell two stores apart */
    uint64_t reserved[8];   /* zero */
} rst_format_entry;

RST_STATIC_ASSERT(sizeof(rst_format_entry) == 128, "layout");
RST_STATIC_ASSERT(offsetof(rst_format_entry, page_size) == 24, "layout");
RST_STATIC_ASSERT(offsetof(rst_format_entry, created_ns) == 40, "layout");
RST_STATIC_ASSERT(offsetof(rst_format_entry, store_id) == 48, "layout");

/* What stat shows without reading the data; updated in each transaction that changes it. */
typedef struct rst_totals_entry {
    uint64_t next_sequence;     /* what the next sealed session gets; from 1 */
    uint64_t open_count;        /* sessions */
    uint64_t sealed_count;      /* sessions, not released */
    uint64_t released_count;    /* sessions, ever */
    uint64_t turn_count;        /* turns stored now */
    uint64_t generated_count;   /* tokens stored now */
    uint64_t value_size;        /* bytes of values stored now */
    uint64_t freed_transaction; /* LMDB's number of the last one that deleted turns; 0 for none */
    uint64_t reserved[8];       /* zero */
} rst_totals_entry;

RST_STATIC_ASSERT(sizeof(rst_totals_entry) == 128, "layout");

/* ---------------------------------------------------------------- consumers */

#define RST_CONSUMER_MAGIC UINT32_C(0x43545352) /* "RSTC" */
#define RST_CONSUMER_NAME_SIZE_MAX 256          /* bytes of UTF-8 */

/* Everything below `settled` is committed and has no lease entry; everything from `next` on was
 * never given out; between them stand lease entries, except where the sequence was released. */
typedef struct rst_consumer_entry {
    uint32_t magic;
    uint16_t version;
    uint16_t name_size;     /* bytes of the name that follows this entry */
    uint64_t next;          /* the first sequence number never given out */
    uint64_t settled;       /* the first sequence number that may not be committed */
    uint64_t given_count;   /* sessions given, again included */
    uint64_t again_count;   /* of these, given again after a lease ended without acknowledgement */
    uint64_t trained_count; /* acknowledged */
    uint64_t epoch;         /* random at creation, raised by each resume; its low half is the high
                               half of each lease_id, so that leases of before are void */
    int64_t created_ns;     /* Unix time */
    int64_t changed_ns;     /* Unix time of its last take, acknowledgement or commit */
    uint64_t first_open;    /* no stored session below it is FREE or HELD; may lag behind */
    uint64_t reserved[2];   /* zero */
} rst_consumer_entry;

RST_STATIC_ASSERT(sizeof(rst_consumer_entry) == 96, "layout");

typedef enum rst_lease_state {
    RST_LEASE_FREE = 1,     /* was given and came back: given again first */
    RST_LEASE_HELD = 2,     /* given, not acknowledged */
    RST_LEASE_TRAINED = 3,  /* acknowledged, not yet in a committed checkpoint */
    RST_LEASE_COMMITTED = 4 /* acknowledged and in a committed checkpoint */
} rst_lease_state;

typedef struct rst_lease_entry {
    uint32_t state;         /* rst_lease_state */
    uint32_t given_count;   /* how often the session was given */
    int64_t expires_ns;     /* CLOCK_BOOTTIME, while held */
    uint64_t lease_id;      /* names this giving, so that a late acknowledgement is told apart */
    uint32_t pid;           /* holder, in its own PID namespace */
    uint32_t reserved;      /* zero */
    uint64_t pid_start;     /* the holder's start time, /proc/PID/stat field 22: pids are reused */
    uint64_t pid_namespace; /* inode of the holder's PID namespace; 0 when it cannot be known */
    uint64_t boot;      /* XXH3-64 of the kernel's boot_id: CLOCK_BOOTTIME begins again with it */
    uint64_t reserved2; /* zero */
} rst_lease_entry;

RST_STATIC_ASSERT(sizeof(rst_lease_entry) == 64, "layout");

#ifdef __cplusplus
}
#endif
#endif
