/* What decoding a line and finding its session id share.  Internal. */
#ifndef RST_SRC_REPLY_LINE_H
#define RST_SRC_REPLY_LINE_H

#include <stddef.h>

#include <rollstore/error.h>

/* RST_ERR_VALUE, RST_ERR_LIMIT for a session id of that many bytes. */
int rst_line_check_id_size(size_t offset, size_t size, rst_error *error);

#endif
