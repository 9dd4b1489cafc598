/* Reading everything once, and saying what does not fit. */
#include <stdio.h>
#include <string.h>

#include "pages/pages.h"
#include "sequence.h"

typedef struct verifier {
    rst_snapshot *snapshot;
    const rst_env *env;
    const rst_verify_options *options;
    rst_verify_result *result;
    rst_totals_entry counted;
    uint64_t total;
    rst_sequence sequence;
    bool stopped;
    bool unreadable; /* LMDB cannot be asked for anything */
} verifier;

/* A fault is reported and the scan goes on; only a failing call ends it. */
static void report(verifier *v, const rst_error *fault)
{
    v->result->fault_count++;
    if (v->options && v->options->fault) {
        v->options->fault(v->options->context, fault);
    }
}

static void report_text(verifier *v, const char *field, const char *format, const char *session,
                        uint64_t number)
{
    rst_error fault;
    rst_error_clear(&fault);
    char text[RST_ERROR_MESSAGE_SIZE];
    snprintf(text, sizeof text, format, session, (unsigned long long)number);
    rst_fail(&fault, RST_ERR_CORRUPT, field, "%s", text);
    report(v, &fault);
}

static void progress(verifier *v)
{
    if (v->options && v->options->progress &&
        v->options->progress(v->options->context, v->result->turn_count, v->total) != 0) {
        v->stopped = true;
    }
}

/* ---------------------------------------------------------------- one session */

/* The turn's prompt against the tokens before it. */
static void verify_prefix(verifier *v, const rst_turn *turn, const rst_record_header *header,
                          const char *shown)
{
    const rst_sequence *s = &v->sequence;
    if (turn->prefix_count > s->count || turn->trimmed_count != s->count - turn->prefix_count) {
        report_text(v, "prefix_count",
                    "session \"%s\" turn %llu: prefix_count and trimmed_count do "
                    "not fit the turns before",
                    shown, turn->turn);
    } else if (rst_hash(s->tokens, sizeof(int32_t) * turn->prefix_count) != header->prefix_hash) {
        report_text(v, "prefix_hash",
                    "session \"%s\" turn %llu: prefix_hash: not the tokens before "
                    "it",
                    shown, turn->turn);
    }
}

static int verify_turn(verifier *v, const uint8_t key[RST_KEY_SIZE], uint32_t number,
                       const char *shown, rst_session_entry *sum, bool *sound, rst_error *error)
{
    rst_turn turn;
    MDB_val value;
    rst_error fault;
    rst_error_clear(&fault);
    int code = rst_read_turn(v->snapshot->txn, v->env, key, number, &turn, &value, &fault);
    if (!code) {
        code = rst_record_check(value.mv_data, value.mv_size, key, number, &fault);
    }
    v->result->turn_count++;
    if (code) {
        char text[RST_ERROR_MESSAGE_SIZE];
        snprintf(text, sizeof text, "%s", fault.message);
        char field[RST_ERROR_FIELD_SIZE];
        memcpy(field, fault.field, sizeof field);
        rst_fail(&fault, fault.code, field, "session \"%s\" turn %u: %s", shown, number, text);
        report(v, &fault);
        *sound = false;
        return RST_OK;
    }
    v->result->value_size += value.mv_size;
    sum->generated_count += turn.token_count;
    sum->value_size += value.mv_size;
    sum->topk = turn.topk > sum->topk ? turn.topk : sum->topk;
    if (*sound) {
        verify_prefix(v, &turn, value.mv_data, shown);
        code = rst_sequence_add(&v->sequence, turn.prefix_count, turn.prompt_ids, turn.prompt_count,
                                turn.token_ids, turn.token_count, error);
        *sound = code != RST_ERR_CORRUPT; /* told by verify_prefix already */
        code = code == RST_ERR_CORRUPT ? RST_OK : code;
    }
    return code;
}

static void verify_ready(verifier *v, const rst_session *s, const char *shown)
{
    if (s->state != RST_STATE_SEALED) {
        return;
    }
    unsigned char key[RST_READY_KEY_SIZE];
    rst_put_be64(key, s->sequence);
    MDB_val k = {sizeof key, key};
    MDB_val value;
    if (mdb_get(v->snapshot->txn, v->env->ready, &k, &value) != 0 ||
        value.mv_size != RST_KEY_SIZE || memcmp(value.mv_data, s->key, RST_KEY_SIZE) != 0) {
        report_text(v, "ready", "session \"%s\": sealed, but not in the ready order as number %llu",
                    shown, s->sequence);
    }
}

static int verify_session(verifier *v, const rst_session *s, rst_error *error)
{
    char shown[RST_SHOWN_ID_SIZE];
    rst_shown_id(s->id, s->id_size, shown);
    uint8_t key[RST_KEY_SIZE];
    rst_session_key(s->id, s->id_size, key);
    if (memcmp(key, s->key, RST_KEY_SIZE) != 0) {
        report_text(v, "sessions", "session \"%s\": stored under another id's key", shown, 0);
    }
    rst_session_entry sum = {0};
    bool sound = true;
    v->sequence.count = 0;
    for (uint32_t turn = 0; turn < s->turn_count && !v->stopped; turn++) {
        int code = verify_turn(v, s->key, turn, shown, &sum, &sound, error);
        if (code) {
            return code;
        }
        progress(v);
    }
    if (v->stopped) {
        return RST_OK;
    }
    verify_ready(v, s, shown);
    if (sound && (sum.generated_count != s->generated_count || sum.value_size != s->value_size ||
                  sum.topk != s->topk || v->sequence.count != s->sequence_count)) {
        report_text(v, "sessions", "session \"%s\": its figures are not those of its %llu turns",
                    shown, s->turn_count);
    }
    v->counted.turn_count += s->turn_count;
    v->counted.generated_count += s->generated_count;
    v->counted.value_size += s->value_size;
    v->counted.open_count += s->state == RST_STATE_OPEN;
    v->counted.sealed_count += s->state == RST_STATE_SEALED;
    return RST_OK;
}

static int verify_sessions(verifier *v, rst_error *error)
{
    rst_session s;
    uint8_t key[RST_KEY_SIZE];
    const uint8_t *after = NULL;
    int code;
    while (!v->stopped && (code = rst_session_next(v->snapshot, after, &s, error)) == RST_OK) {
        v->result->session_count++;
        code = verify_session(v, &s, error);
        if (code) {
            return code;
        }
        memcpy(key, s.key, sizeof key);
        after = key;
    }
    if (v->stopped || code == RST_ERR_NOT_FOUND) {
        rst_error_clear(error);
        return RST_OK;
    }
    if (code == RST_ERR_CORRUPT || code == RST_ERR_VERSION) {
        report(v, error); /* an entry that cannot be stepped over */
        rst_error_clear(error);
        return RST_OK;
    }
    return code;
}

/* ---------------------------------------------------------------- what no session owns */

static int verify_counts(verifier *v, rst_error *error)
{
    MDB_stat turns;
    MDB_stat ready;
    if (mdb_stat(v->snapshot->txn, v->env->turns, &turns) != 0 ||
        mdb_stat(v->snapshot->txn, v->env->ready, &ready) != 0) {
        return rst_fail(error, RST_ERR_IO, NULL, "counting entries failed");
    }
    const rst_totals_entry *c = &v->counted;
    if (turns.ms_entries != c->turn_count) {
        report_text(v, "turns", "%s%llu turns are stored that belong to no session", "",
                    turns.ms_entries - c->turn_count);
    }
    if (ready.ms_entries != c->sealed_count) {
        report_text(v, "ready",
                    "%sthe ready order has %llu entries, not as many as there are sealed "
                    "sessions",
                    "", ready.ms_entries);
    }
    rst_totals_entry said;
    int code = rst_read_totals(v->snapshot->txn, v->env, &said, error);
    if (code) {
        return code;
    }
    if (said.turn_count != c->turn_count || said.generated_count != c->generated_count ||
        said.value_size != c->value_size || said.open_count != c->open_count ||
        said.sealed_count != c->sealed_count) {
        report_text(v, "meta", "%sthe totals are not those of the sessions: %llu turns are counted",
                    "", said.turn_count);
    }
    return RST_OK;
}

/* LMDB's own pages.  What is found here was damaged while the store was open: opening looked, too.
 */
static int verify_pages(verifier *v, rst_error *error)
{
    rst_error own; /* a fault needs its text, also when the caller wants none */
    rst_error_clear(&own);
    int code = rst_pages_check(v->env->lmdb, v->snapshot->txn, RST_PAGES_ALL, &own);
    if (code == RST_ERR_CORRUPT || code == RST_ERR_NOT_STORE || code == RST_ERR_VERSION) {
        report(v, &own);
        v->unreadable = v->stopped = true;
        return RST_OK;
    }
    if (code && error) {
        *error = own;
    }
    return code;
}

static void report_consumer(void *context, const rst_error *fault)
{
    report(context, fault);
}

int rst_store_verify(rst_store *store, const rst_verify_options *options, rst_verify_result *result,
                     rst_error *error)
{
    rst_error_clear(error);
    memset(result, 0, sizeof *result);
    verifier v = {.env = store->env, .options = options, .result = result};
    int code = rst_snapshot_open(store, &v.snapshot, error);
    if (code) {
        return code;
    }
    rst_totals_entry totals = {0};
    code = verify_pages(&v, error);
    if (!code && !v.stopped) {
        code = rst_read_totals(v.snapshot->txn, v.env, &totals, error);
        v.total = totals.turn_count;
    }
    if (!code && !v.stopped) {
        code = verify_sessions(&v, error);
    }
    if (!code && !v.stopped) {
        code = verify_counts(&v, error);
    }
    if (!code && !v.stopped) {
        code = rst_verify_consumers(v.snapshot, totals.next_sequence, report_consumer, &v, error);
    }
    rst_sequence_free(&v.sequence);
    rst_snapshot_close(v.snapshot);
    if (!code && v.stopped && !v.unreadable) {
        return rst_fail(error, RST_ERR_TIMEOUT, NULL, "stopped after %llu of %llu turns",
                        (unsigned long long)result->turn_count, (unsigned long long)v.total);
    }
    return code;
}
