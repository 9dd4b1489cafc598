/* Sessions, turns and samples as JSON and as .npz. */
#ifndef TOOL_FORMATS_H
#define TOOL_FORMATS_H

#include <stdbool.h>

#include <rollstore/rollstore.h>

#include "base/npz.h"
#include "base/output.h"

/* What the engine said: "stop", ..., or a text of its own; false when it said nothing. */
bool finish_text(const rst_turn *turn, const char **text, size_t *size);

const char *status_name(rst_outcome_status status); /* "open" for none */
const char *mode_name(rst_mode mode);
const char *durability_name(uint32_t durability);

/* ---------------------------------------------------------------- JSON: members of an open object
 */

void json_session(output *out, const rst_session *session); /* id, state, counts, outcome, times */
void json_outcome(output *out, const rst_outcome *outcome); /* status, reward, group_index, index */
void json_turn_head(output *out, const rst_turn *turn);     /* everything but the arrays */
void json_turn_arrays(output *out, const rst_turn *turn);   /* n, k, width, arrays, what was said */
void json_consumer(output *out, const rst_consumer *consumer);

/* ---------------------------------------------------------------- samples */

typedef struct loaded_sample {
    rst_sample measured;
    rst_sample_arrays arrays; /* malloc'd */
} loaded_sample;

/* An rst_code; sample_free afterwards in any case. */
int sample_load(rst_snapshot *snapshot, const rst_session *session,
                const rst_sample_options *options, loaded_sample *sample, rst_error *error);
void sample_free(loaded_sample *sample);

/* The whole object; an rst_code, since the weight versions are read from the turns. */
int json_sample(output *out, rst_snapshot *snapshot, const loaded_sample *sample, rst_error *error);

/* ---------------------------------------------------------------- .npz */

void npz_turn(npz_file *npz, const rst_turn *turn);
void npz_sample(npz_file *npz, const loaded_sample *sample);

#endif
