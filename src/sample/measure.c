/* The sizes of samples, from the turns' headers alone. */
#include "internal.h"

#include <stdio.h>

#include "../error.h"

int rst_sample_options_of(const rst_sample_options *options, rst_sample_options *out,
                          rst_error *error)
{
    *out = options ? *options : (rst_sample_options)RST_SAMPLE_OPTIONS_DEFAULT;
    if (out->topk > RST_TOPK_MAX) {
        return rst_fail(error, RST_ERR_ARGUMENT, "topk", "topk %u, at most %u", out->topk,
                        RST_TOPK_MAX);
    }
    return RST_OK;
}

/* ---------------------------------------------------------------- walking */

static const char *shown(const rst_walk *walk, char buffer[RST_SHOWN_ID_SIZE])
{
    return rst_shown_id(walk->session->id, walk->session->id_size, buffer);
}

/* A turn could not be read: say which one, in front of what the store said. */
static int unreadable(const rst_walk *walk, int code, rst_error *error)
{
    char id[RST_SHOWN_ID_SIZE];
    if (code == RST_ERR_NOT_FOUND) {
        return rst_fail(error, RST_ERR_CORRUPT, "turns",
                        "session \"%s\" has %u turns, but turn %u is missing", shown(walk, id),
                        walk->session->turn_count, walk->turn);
    }
    if (error) {
        char said[RST_ERROR_MESSAGE_SIZE];
        char field[RST_ERROR_FIELD_SIZE];
        int system = error->system;
        snprintf(said, sizeof said, "%s", error->message);
        snprintf(field, sizeof field, "%s", error->field);
        rst_fail(error, code, field, "session \"%s\", turn %u: %s", shown(walk, id), walk->turn,
                 said);
        error->system = system;
    }
    return code;
}

static int check_continues(const rst_walk *walk, const rst_turn *turn, rst_error *error)
{
    char id[RST_SHOWN_ID_SIZE];
    /* Both are 32 bits: the sum cannot overflow. */
    if ((uint64_t)turn->prefix_count + turn->trimmed_count != walk->sequence_count) {
        return rst_fail(error, RST_ERR_CORRUPT, "prefix_count",
                        "session \"%s\", turn %u: its prompt counts %u tokens before it as kept "
                        "and %u as left out, but there are %llu",
                        shown(walk, id), walk->turn, turn->prefix_count, turn->trimmed_count,
                        (unsigned long long)walk->sequence_count);
    }
    if (turn->trimmed_count > walk->output_count) {
        return rst_fail(error, RST_ERR_ALIGNMENT, "prompt_ids",
                        "session \"%s\", turn %u: its prompt agrees with the %llu tokens before it "
                        "only in the first %u, and turn %u generated no more than the last %u",
                        shown(walk, id), walk->turn, (unsigned long long)walk->sequence_count,
                        turn->prefix_count, walk->turn - 1, walk->output_count);
    }
    return RST_OK;
}

int rst_walk_next(rst_walk *walk, rst_turn *turn, rst_error *error)
{
    int code = rst_turn_get_by_key(walk->snapshot, walk->session->key, walk->turn, turn, error);
    if (code) {
        return unreadable(walk, code, error);
    }
    code = check_continues(walk, turn, error);
    if (code) {
        return code;
    }
    walk->sequence_count = (uint64_t)turn->prefix_count + turn->prompt_count + turn->token_count;
    walk->output_count = turn->token_count;
    walk->turn++;
    return RST_OK;
}

/* ---------------------------------------------------------------- one sample */

/* What the first turns of a session give as a sample. */
typedef struct measuring {
    rst_sample sample;
    uint32_t widest_turn;
} measuring;

static void add_version(rst_sample *sample, int64_t version)
{
    if (version == RST_NO_VERSION) {
        return;
    }
    if (sample->weight_version_min == RST_NO_VERSION || version < sample->weight_version_min) {
        sample->weight_version_min = version;
    }
    if (sample->weight_version_max == RST_NO_VERSION || version > sample->weight_version_max) {
        sample->weight_version_max = version;
    }
}

static void add_turn(measuring *m, const rst_walk *walk, const rst_turn *turn)
{
    rst_sample *s = &m->sample;
    if (s->turn_count == 0) {
        s->prompt_count = turn->prompt_count;
    }
    if (turn->topk > s->topk) {
        s->topk = turn->topk;
        m->widest_turn = s->turn_count;
    }
    s->turn_count++;
    s->trimmed_count += turn->trimmed_count;
    s->generated_count += turn->token_count;
    s->generated_count -= turn->trimmed_count;
    s->token_count = walk->sequence_count;
    s->response_count = s->token_count - s->prompt_count;
    add_version(s, turn->weight_version_number);
}

static int check_trimmed(const measuring *m, const rst_walk *walk, const rst_turn *turn,
                         uint32_t trim_max, rst_error *error)
{
    char id[RST_SHOWN_ID_SIZE];
    uint32_t number = walk->turn - 1; /* the walk is past it */
    if (turn->trimmed_count > trim_max) {
        return rst_fail(error, RST_ERR_ALIGNMENT, "prompt_ids",
                        "session \"%s\", turn %u: its prompt leaves out the last %u tokens that "
                        "turn %u generated, at most %u may be trimmed",
                        shown(walk, id), number, turn->trimmed_count, number - 1, trim_max);
    }
    if (turn->trimmed_count > UINT32_MAX - m->sample.trimmed_count) {
        return rst_fail(error, RST_ERR_LIMIT, "trimmed_count",
                        "session \"%s\": over %u tokens are trimmed", shown(walk, id), UINT32_MAX);
    }
    return RST_OK;
}

/* Do all turns together give what the session's entry says?  Damage to the last turn's counts would
 * not show otherwise: no turn follows that they have to fit. */
static int check_totals(const measuring *m, const rst_walk *walk, rst_error *error)
{
    const rst_session *s = walk->session;
    uint64_t generated_count = m->sample.generated_count + m->sample.trimmed_count;
    if (walk->sequence_count != s->sequence_count || generated_count != s->generated_count ||
        m->sample.topk != s->topk) {
        char id[RST_SHOWN_ID_SIZE];
        return rst_fail(error, RST_ERR_CORRUPT, "sessions",
                        "session \"%s\": its turns make %llu tokens, of which %llu generated, with "
                        "%u candidates; its entry says %llu, %llu and %u",
                        shown(walk, id), (unsigned long long)walk->sequence_count,
                        (unsigned long long)generated_count, m->sample.topk,
                        (unsigned long long)s->sequence_count,
                        (unsigned long long)s->generated_count, s->topk);
    }
    return RST_OK;
}

/* Walk all of the session's turns and keep the longest sample of its first ones that fits: with
 * turn_count 0 when none does.  Those left out are checked too, so that whether a session is sound
 * does not depend on token_max. */
static int measure_turns(rst_snapshot *snapshot, const rst_session *session,
                         const rst_sample_options *options, measuring *fits, rst_error *error)
{
    rst_walk walk = {.snapshot = snapshot, .session = session};
    measuring m = {
        .sample = {.weight_version_min = RST_NO_VERSION, .weight_version_max = RST_NO_VERSION}};
    while (walk.turn < session->turn_count) {
        rst_turn turn;
        int code = rst_walk_next(&walk, &turn, error);
        if (!code) {
            code = check_trimmed(&m, &walk, &turn, options->trim_max, error);
        }
        if (code) {
            return code;
        }
        add_turn(&m, &walk, &turn);
        if (options->token_max == 0 || m.sample.token_count <= options->token_max) {
            *fits = m;
        }
    }
    return check_totals(&m, &walk, error);
}

static int check_fits(const measuring *fits, const rst_session *session,
                      const rst_sample_options *options, rst_error *error)
{
    char id[RST_SHOWN_ID_SIZE];
    if (fits->sample.turn_count == 0) {
        return rst_fail(error, RST_ERR_LIMIT, "token_max",
                        "session \"%s\": not even its first turn alone has at most %llu tokens",
                        rst_shown_id(session->id, session->id_size, id),
                        (unsigned long long)options->token_max);
    }
    if (options->topk && fits->sample.topk > options->topk) {
        return rst_fail(error, RST_ERR_LIMIT, "topk",
                        "session \"%s\", turn %u: it has %u candidates a token, at most %u are "
                        "wanted",
                        rst_shown_id(session->id, session->id_size, id), fits->widest_turn,
                        fits->sample.topk, options->topk);
    }
    return RST_OK;
}

int rst_sample_measure(rst_snapshot *snapshot, const void *session, size_t session_size,
                       const rst_sample_options *options, rst_sample *sample, rst_error *error)
{
    rst_error_clear(error);
    rst_sample_options wanted;
    rst_session found;
    int code = rst_sample_options_of(options, &wanted, error);
    if (!code) {
        code = rst_session_get(snapshot, session, session_size, &found, error);
    }
    measuring fits = {.sample = {.turn_count = 0}};
    if (!code) {
        code = measure_turns(snapshot, &found, &wanted, &fits, error);
    }
    if (!code) {
        code = check_fits(&fits, &found, &wanted, error);
    }
    if (code) {
        return code;
    }
    *sample = fits.sample;
    sample->topk = wanted.topk ? wanted.topk : sample->topk;
    sample->turns_left_out = found.turn_count - sample->turn_count;
    sample->session = found;
    return RST_OK;
}

/* ---------------------------------------------------------------- a batch of them */

int rst_batch_measure(rst_snapshot *snapshot, const rst_id *sessions, size_t count,
                      const rst_sample_options *options, rst_sample *samples, rst_batch_size *size,
                      rst_error *error)
{
    rst_error_clear(error);
    rst_sample_options wanted;
    int code = rst_sample_options_of(options, &wanted, error);
    if (code) {
        return code;
    }
    rst_batch_size sum = {.topk = wanted.topk};
    for (size_t i = 0; i < count; i++) {
        rst_sample *s = &samples[i];
        code = rst_sample_measure(snapshot, sessions[i].session, sessions[i].session_size, &wanted,
                                  s, error);
        if (code) {
            if (error) {
                error->index = (int64_t)i;
            }
            return code;
        }
        sum.token_count += s->token_count;
        sum.response_count += s->response_count;
        sum.token_max = s->token_count > sum.token_max ? s->token_count : sum.token_max;
        sum.response_max =
            s->response_count > sum.response_max ? s->response_count : sum.response_max;
        sum.topk = s->topk > sum.topk ? s->topk : sum.topk;
    }
    *size = sum;
    return RST_OK;
}
