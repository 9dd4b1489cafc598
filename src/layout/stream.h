/* Copying past the caches.  Internal. */
#ifndef RST_SRC_LAYOUT_STREAM_H
#define RST_SRC_LAYOUT_STREAM_H

#include <stddef.h>

/* memcpy, for what is not read again soon: lines of `to` are written whole, without being read
 * first and without pushing other memory out of the caches.  Other processors may see the bytes
 * late, so rst_stream_done comes before anything that tells them that they are there.  Where the
 * processor has no such stores it is memcpy. */
void rst_stream_copy(void *to, const void *from, size_t size);

void rst_stream_done(void);

#endif
