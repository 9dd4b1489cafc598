#include "formats.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "command.h"

/* ---------------------------------------------------------------- words */

static const char *word_of(const arg_choice *choices, int value, const char *otherwise)
{
    for (const arg_choice *c = choices; c->word; c++) {
        if (c->value == value) {
            return c->word;
        }
    }
    return otherwise;
}

const char *status_name(rst_outcome_status status)
{
    return word_of(status_choices, (int)status, "open");
}

const char *durability_name(uint32_t durability)
{
    return word_of(durability_choices, (int)durability, "unknown");
}

const char *mode_name(rst_mode mode)
{
    return word_of(mode_choices, (int)mode, "unknown");
}

bool finish_text(const rst_turn *turn, const char **text, size_t *size)
{
    static const char *const words[] = {[RST_FINISH_STOP] = "stop",
                                        [RST_FINISH_LENGTH] = "length",
                                        [RST_FINISH_ABORT] = "abort",
                                        [RST_FINISH_TOOL_CALLS] = "tool_calls"};
    if (turn->finish == RST_FINISH_NONE) {
        return false;
    }
    if (turn->finish == RST_FINISH_OTHER) {
        *text = turn->finish_reason;
        *size = turn->finish_reason_size;
        return true;
    }
    *text = words[turn->finish];
    *size = strlen(*text);
    return true;
}

/* ---------------------------------------------------------------- sessions */

static void json_index(output *out, int64_t index)
{
    if (index == RST_NO_INDEX) {
        json_null(out);
    } else {
        json_i64(out, index);
    }
}

static void json_version(output *out, const char *key, int64_t version)
{
    json_key(out, key);
    if (version == RST_NO_VERSION) {
        json_null(out);
    } else {
        json_i64(out, version);
    }
}

void json_outcome(output *out, const rst_outcome *outcome)
{
    bool none = outcome->status == RST_STATUS_NONE;
    json_key(out, "status");
    json_text(out, none ? NULL : status_name(outcome->status));
    json_key(out, "reward");
    json_double(out, none ? NAN : outcome->reward);
    json_key(out, "group_index");
    json_index(out, none ? RST_NO_INDEX : outcome->group_index);
    json_key(out, "index");
    json_index(out, none ? RST_NO_INDEX : outcome->index);
}

void json_session(output *out, const rst_session *session)
{
    json_session_id(out, session->id, session->id_size);
    json_key(out, "key");
    json_open(out, '"');
    output_hex(out, session->key, RST_KEY_SIZE);
    json_close(out, '"');
    json_key(out, "state");
    json_text(out, session->state == RST_STATE_OPEN ? "open" : "sealed");
    json_key(out, "sequence");
    if (session->state == RST_STATE_OPEN) {
        json_null(out);
    } else {
        json_u64(out, session->sequence);
    }
    json_outcome(out, &session->outcome);
    json_key(out, "turn_count");
    json_u64(out, session->turn_count);
    json_key(out, "topk");
    json_u64(out, session->topk);
    json_key(out, "generated_count");
    json_u64(out, session->generated_count);
    json_key(out, "sequence_count");
    json_u64(out, session->sequence_count);
    json_key(out, "value_size");
    json_u64(out, session->value_size);
    json_version(out, "weight_version_min", session->weight_version_min);
    json_version(out, "weight_version_max", session->weight_version_max);
    json_key(out, "created_ns");
    json_i64(out, session->created_ns);
    json_key(out, "changed_ns");
    json_i64(out, session->changed_ns);
}

/* ---------------------------------------------------------------- turns */

static void json_widths(output *out, const rst_turn *turn)
{
    json_key(out, "width");
    if (turn->widths) {
        json_i32_list(out, turn->widths, turn->token_count);
        return;
    }
    json_open(out, '[');
    for (uint32_t i = 0; i < turn->token_count; i++) {
        json_u64(out, turn->topk);
    }
    json_close(out, ']');
}

static void json_weight_version(output *out, const rst_turn *turn)
{
    if (turn->weight_version) {
        json_string(out, turn->weight_version, turn->weight_version_size);
    } else {
        json_null(out);
    }
}

static void json_scaled(output *out, rst_scaled scaled)
{
    json_key(out, "temperature_scaled");
    if (scaled == RST_SCALED_NOT_SAID) {
        json_null(out);
    } else {
        json_bool(out, scaled == RST_SCALED_YES);
    }
}

/* What the engine said beside the arrays. */
static void json_texts(output *out, const rst_turn *turn)
{
    json_key(out, "weight_version");
    json_weight_version(out, turn);
    json_key(out, "finish_reason");
    const char *text;
    size_t size;
    if (finish_text(turn, &text, &size)) {
        json_string(out, text, size);
    } else {
        json_null(out);
    }
    json_key(out, "mode");
    json_text(out, mode_name(turn->mode));
    json_key(out, "null_prefix");
    json_u64(out, turn->null_prefix);
    json_scaled(out, turn->temperature_scaled);
}

/* In the order in which a reader wants them: counts, arrays, then what the engine said. */
void json_turn_arrays(output *out, const rst_turn *turn)
{
    size_t slots = (size_t)turn->token_count * turn->topk;
    json_key(out, "n");
    json_u64(out, turn->token_count);
    json_key(out, "k");
    json_u64(out, turn->topk);
    json_widths(out, turn);
    json_key(out, "token_ids");
    json_i32_list(out, turn->token_ids, turn->token_count);
    json_key(out, "token_logprobs");
    json_f32_list(out, turn->token_logprobs, turn->token_count);
    json_key(out, "topk_ids");
    json_i32_list(out, turn->topk_ids, slots);
    json_key(out, "topk_logprobs");
    json_f32_list(out, turn->topk_logprobs, slots);
    json_texts(out, turn);
}

void json_turn_head(output *out, const rst_turn *turn)
{
    json_key(out, "turn");
    json_u64(out, turn->turn);
    json_key(out, "n");
    json_u64(out, turn->token_count);
    json_key(out, "k");
    json_u64(out, turn->topk);
    json_key(out, "prompt_count");
    json_u64(out, (uint64_t)turn->prefix_count + turn->prompt_count);
    json_key(out, "prefix_count");
    json_u64(out, turn->prefix_count);
    json_key(out, "trimmed_count");
    json_u64(out, turn->trimmed_count);
    json_key(out, "temperature");
    json_float(out, turn->temperature);
    json_texts(out, turn);
}

/* ---------------------------------------------------------------- consumers */

void json_consumer(output *out, const rst_consumer *consumer)
{
    const struct {
        const char *key;
        uint64_t value;
    } counts[] = {{"next", consumer->next},
                  {"settled", consumer->settled},
                  {"waiting_count", consumer->waiting_count},
                  {"free_count", consumer->free_count},
                  {"held_count", consumer->held_count},
                  {"trained_count", consumer->trained_count},
                  {"committed_count", consumer->committed_count},
                  {"given_total", consumer->given_total},
                  {"again_total", consumer->again_total},
                  {"trained_total", consumer->trained_total}};
    json_key(out, "name");
    json_string(out, consumer->name, consumer->name_size);
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        json_key(out, counts[i].key);
        json_u64(out, counts[i].value);
    }
    json_key(out, "created_ns");
    json_i64(out, consumer->created_ns);
    json_key(out, "changed_ns");
    json_i64(out, consumer->changed_ns);
}

/* ---------------------------------------------------------------- samples */

/* At least one byte, so that NULL means that there is no memory. */
static void *array_of(uint64_t count, size_t size)
{
    return count >= SIZE_MAX / size ? NULL : malloc((size_t)count * size + 1);
}

int sample_load(rst_snapshot *snapshot, const rst_session *session,
                const rst_sample_options *options, loaded_sample *sample, rst_error *error)
{
    memset(sample, 0, sizeof *sample);
    rst_sample *measured = &sample->measured;
    int code =
        rst_sample_measure(snapshot, session->id, session->id_size, options, measured, error);
    if (code) {
        return code;
    }
    rst_sample_arrays *arrays = &sample->arrays;
    uint64_t slots = measured->response_count * measured->topk;
    arrays->tokens = array_of(measured->token_count, sizeof *arrays->tokens);
    arrays->loss_mask = array_of(measured->response_count, sizeof *arrays->loss_mask);
    arrays->rollout_logprobs = array_of(measured->response_count, sizeof *arrays->rollout_logprobs);
    arrays->topk_ids = array_of(slots, sizeof *arrays->topk_ids);
    arrays->topk_logprobs = array_of(slots, sizeof *arrays->topk_logprobs);
    if (!arrays->tokens || !arrays->loss_mask || !arrays->rollout_logprobs || !arrays->topk_ids ||
        !arrays->topk_logprobs) {
        memset(error, 0, sizeof *error);
        error->code = RST_ERR_MEMORY;
        error->offset = -1;
        snprintf(error->message, sizeof error->message, "no memory for the sample");
        return RST_ERR_MEMORY;
    }
    return rst_sample_fill(snapshot, measured, options, arrays, error);
}

void sample_free(loaded_sample *sample)
{
    free(sample->arrays.tokens);
    free(sample->arrays.loss_mask);
    free(sample->arrays.rollout_logprobs);
    free(sample->arrays.topk_ids);
    free(sample->arrays.topk_logprobs);
    memset(sample, 0, sizeof *sample);
}

static int json_weight_versions(output *out, rst_snapshot *snapshot, const rst_sample *measured,
                                rst_error *error)
{
    json_open_key(out, "weight_versions", '[');
    for (uint32_t i = 0; i < measured->turn_count; i++) {
        rst_turn turn;
        int code = rst_turn_get_by_key(snapshot, measured->session.key, i, &turn, error);
        if (code) {
            return code;
        }
        json_weight_version(out, &turn);
    }
    json_close(out, ']');
    return RST_OK;
}

int json_sample(output *out, rst_snapshot *snapshot, const loaded_sample *sample, rst_error *error)
{
    const rst_sample *measured = &sample->measured;
    const rst_sample_arrays *arrays = &sample->arrays;
    size_t slots = (size_t)(measured->response_count * measured->topk);
    json_open(out, '{');
    json_session_id(out, measured->session.id, measured->session.id_size);
    json_key(out, "k");
    json_u64(out, measured->topk);
    json_key(out, "tokens");
    json_i32_list(out, arrays->tokens, (size_t)measured->token_count);
    json_open_key(out, "loss_mask", '[');
    for (uint64_t i = 0; i < measured->response_count; i++) {
        json_u64(out, arrays->loss_mask[i]);
    }
    json_close(out, ']');
    json_key(out, "rollout_logprobs");
    json_f32_list(out, arrays->rollout_logprobs, (size_t)measured->response_count);
    json_key(out, "topk_ids");
    json_i32_list(out, arrays->topk_ids, slots);
    json_key(out, "topk_logprobs");
    json_f32_list(out, arrays->topk_logprobs, slots);
    json_key(out, "prompt_length");
    json_u64(out, measured->prompt_count);
    json_key(out, "response_length");
    json_u64(out, measured->response_count);
    json_outcome(out, &measured->session.outcome);
    int code = json_weight_versions(out, snapshot, measured, error);
    json_close(out, '}');
    output_text(out, "\n");
    return code;
}

/* ---------------------------------------------------------------- .npz */

/* Only here: the arrays stand in memory as they do in the file, little-endian. */
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the arrays are written as they are");

static void add_rows(npz_file *npz, const char *name, const char *dtype, const void *values,
                     uint64_t count)
{
    npz_add(npz, name, dtype, &count, 1, values, count * (dtype[2] == '1' ? 1 : 4));
}

static void add_table(npz_file *npz, const char *name, const char *dtype, const void *values,
                      uint64_t rows, uint64_t columns)
{
    const uint64_t shape[2] = {rows, columns};
    npz_add(npz, name, dtype, shape, 2, values, rows * columns * 4);
}

void npz_turn(npz_file *npz, const rst_turn *turn)
{
    add_rows(npz, "token_ids", "<i4", turn->token_ids, turn->token_count);
    add_rows(npz, "token_logprobs", "<f4", turn->token_logprobs, turn->token_count);
    add_table(npz, "topk_ids", "<i4", turn->topk_ids, turn->token_count, turn->topk);
    add_table(npz, "topk_logprobs", "<f4", turn->topk_logprobs, turn->token_count, turn->topk);
    if (turn->widths) {
        add_rows(npz, "widths", "<i4", turn->widths, turn->token_count);
    }
    add_rows(npz, "prompt_ids", "<i4", turn->prompt_ids, turn->prompt_count);
    npz_add_i64(npz, "prefix_count", turn->prefix_count);
    npz_add_i64(npz, "null_prefix", turn->null_prefix);
    npz_add_f64(npz, "temperature", (double)turn->temperature);
    npz_add_text(npz, "weight_version", turn->weight_version, turn->weight_version_size);
    const char *finish = "";
    size_t finish_size = 0;
    finish_text(turn, &finish, &finish_size);
    npz_add_text(npz, "finish_reason", finish, finish_size);
}

void npz_sample(npz_file *npz, const loaded_sample *sample)
{
    const rst_sample *measured = &sample->measured;
    const rst_sample_arrays *arrays = &sample->arrays;
    const rst_session *session = &measured->session;
    uint64_t count = measured->response_count;
    add_rows(npz, "tokens", "<i4", arrays->tokens, measured->token_count);
    add_rows(npz, "loss_mask", "|u1", arrays->loss_mask, count);
    add_rows(npz, "rollout_logprobs", "<f4", arrays->rollout_logprobs, count);
    add_table(npz, "topk_ids", "<i4", arrays->topk_ids, count, measured->topk);
    add_table(npz, "topk_logprobs", "<f4", arrays->topk_logprobs, count, measured->topk);
    npz_add_text(npz, "session_id", session->id, session->id_size);
    const char *status = status_name(session->outcome.status);
    npz_add_text(npz, "status", status, strlen(status));
    if (session->state == RST_STATE_OPEN) {
        return;
    }
    npz_add_f64(npz, "reward", session->outcome.reward);
    if (session->outcome.group_index != RST_NO_INDEX) {
        npz_add_i64(npz, "group_index", session->outcome.group_index);
    }
    if (session->outcome.index != RST_NO_INDEX) {
        npz_add_i64(npz, "index", session->outcome.index);
    }
}
