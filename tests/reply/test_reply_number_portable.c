/* The same as processors without SSE2 have it. */
#define RST_JSON_PORTABLE
#include "test_reply_number.c"
