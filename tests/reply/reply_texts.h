/* One reply, in every form: two tokens of two candidates. */
#ifndef RST_TESTS_REPLY_TEXTS_H
#define RST_TESTS_REPLY_TEXTS_H

#include "reply_support.h"

#define TOKENS "\"output_token_logprobs\":[[-0.5,11,null],[-0.25,12,\"x\"]]"
#define IDS_B64 "\"output_top_logprobs_idx_flat_b64\":\"AQAAAAIAAAADAAAABAAAAA==\""
#define VALS_B64 "\"output_top_logprobs_val_flat_b64\":\"AACAvwAAAMAAAEDAAACAwA==\""
#define DTYPES                                                                                     \
    "\"output_top_logprobs_idx_flat_b64_dtype\":\"int32\","                                        \
    "\"output_top_logprobs_val_flat_b64_dtype\":\"float32\""
#define SHAPE "\"output_top_logprobs_shape\":[2,2]"
#define PREFIX "\"output_top_logprobs_null_prefix\":0"
#define IDS_PLAIN "\"output_top_logprobs_idx_flat\":[1,2,3,4]"
#define VALS_PLAIN "\"output_top_logprobs_val_flat\":[-1,-2,-3.0,-4e0]"
#define NESTED                                                                                     \
    "\"output_top_logprobs\":[[[-1,1,null],[-2.0,2,\"b\"]],[[-3.0,3,null],[-4.0,4,null]]]"
#define MASK "\"output_token_sampling_mask\":[[1,2],[3,4]]"
#define MASK_LOGPROBS "\"output_token_sampling_logprobs\":[[-1.0,-2.0],[-3.0,-4.0]]"

#define BASE64 TOKENS "," IDS_B64 "," VALS_B64 "," DTYPES "," SHAPE "," PREFIX
#define PLAIN TOKENS "," IDS_PLAIN "," VALS_PLAIN "," SHAPE "," PREFIX

__attribute__((unused)) static const rst_decode_options flat = {.topk = 2};
__attribute__((unused)) static const rst_decode_options nested = {.request = RST_REQUEST_NESTED,
                                                                  .topk = 2};
__attribute__((unused)) static const rst_decode_options support = {.mode = RST_MODE_SUPPORT,
                                                                   .topk = 2};

__attribute__((unused)) static char *chat(const char *meta)
{
    return text_of("{\"choices\":[{\"index\":0,\"finish_reason\":\"stop\",\"meta_info\":{%s}}]}",
                   meta);
}

#endif
