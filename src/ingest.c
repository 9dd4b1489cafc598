/* A reply straight into the store. */
#include <rollstore/ingest.h>

#include "error.h"

static int decode(rst_record *record, const void *reply, size_t reply_size,
                  const rst_put_options *options, rst_error *error)
{
    int code = rst_record_decode(record, reply, reply_size, &options->decode, error);
    if (!code) {
        code = rst_record_set_prompt(record, options->prompt_ids, options->prompt_count, error);
    }
    if (!code) {
        rst_record_set_temperature(record, options->temperature);
    }
    return code;
}

int rst_put_reply(rst_store *store, const void *session, size_t session_size, uint32_t turn,
                  const void *reply, size_t reply_size, const rst_put_options *options,
                  rst_record *record, rst_error *error)
{
    rst_error_clear(error);
    if (!options || (!options->prompt_ids && options->prompt_count)) {
        return rst_fail(error, RST_ERR_ARGUMENT, options ? "prompt_ids" : "options", "%s is NULL",
                        options ? "prompt_ids" : "options");
    }
    rst_record *own = record ? NULL : rst_record_new();
    if (!record && !own) {
        return rst_fail(error, RST_ERR_MEMORY, NULL, "no memory for a record");
    }
    rst_record *used = record ? record : own;
    int code = decode(used, reply, reply_size, options, error);
    if (!code) {
        code = rst_put(store, session, session_size, turn, used, options->flags,
                       options->timeout_ms, error);
    }
    rst_record_free(own);
    return code;
}
