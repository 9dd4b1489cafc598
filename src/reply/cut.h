/* Leaving long base64 strings and lists of tokens out of a JSON text before it is looked through.
 * Internal. */
#ifndef RST_SRC_REPLY_CUT_H
#define RST_SRC_REPLY_CUT_H

#include "json.h"

/*
 * Find strings of the text that are long and look like base64, and, with entries (NULL allowed),
 * lists of tokens; at most RST_JSON_CUT_MAX together, in the text's order.  Strings are guesses: of
 * such a cut's text it is only known that it stands between two '"'.
 * Returns their number.
 */
uint32_t rst_json_find_cuts(const char *text, size_t size, rst_json_cut *cuts,
                            rst_json_entries *entries);

/* The length of the text without the cuts. */
size_t rst_json_shortened_size(size_t size, const rst_json_cut *cuts, uint32_t count);

/* Write the text without the cuts, an empty string or array in place of each, and note their
 * places. */
void rst_json_shorten(const char *text, size_t size, rst_json_cut *cuts, uint32_t count, char *out);

#endif
