/*
 * Two thirds of a flat reply are two base64 strings, and nearly all of the rest are two lists.  The
 * base64 decoder looks at each of their bytes anyway, so the JSON parser need not.
 *
 * Why the shortened text can stand for the whole one: a cut stands between two '"'.  If the
 * shortened text is valid and has an empty string exactly there, and the decoder finds nothing but
 * the base64 alphabet in the cut, which has neither '"' nor '\', then the whole text is the same
 * document with that string's contents put back.  In every other case (the quotes were not a
 * string's, the decoder refused it, nobody decoded it) the whole text is parsed.
 *
 * A list that is cut is known to be a valid array (lists.h).  It is enough that the shortened text
 * is valid and has an empty array exactly there: document.c sees to that.
 */
#include "cut.h"

#include <string.h>

#include "lists.h"

/* Every string twice this long is met by a look every STEP bytes, wherever it begins. */
#define STEP 4096
#define LOOK 16 /* bytes: other parts of a reply have a '"', ',' ':' or '-' among as many */
#define CUT_SIZE_MIN 1024

static bool looks_like_base64(const char *text)
{
    for (size_t i = 0; i < LOOK; i++) {
        char c = text[i];
        if (!((c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') ||
              c == '+' || c == '/')) {
            return false;
        }
    }
    return true;
}

/* Prose with one long word is none. */
static bool looks_like_base64_throughout(const char *text, size_t size)
{
    for (size_t part = 0; part < 8; part++) {
        if (!looks_like_base64(text + (size - LOOK) / 8 * part)) {
            return false;
        }
    }
    return true;
}

/* A string that is as long as the one before is not looked through for its end: a reply's two are.
 */
static uint32_t find_strings(const char *text, size_t size, rst_json_cut *cuts, uint32_t room)
{
    uint32_t count = 0;
    size_t from = 0; /* everything before was searched for quotes */
    size_t at = STEP;
    while (count < room && size >= LOOK && at <= size - LOOK) {
        if (!looks_like_base64(text + at)) {
            at += STEP;
            continue;
        }
        const char *quote = memrchr(text + from, '"', at - from);
        size_t same = count > 0 && quote ? (size_t)(quote - text) + 1 + cuts[count - 1].size : 0;
        const char *end = same >= at && same < size && text[same] == '"'
                              ? text + same
                              : memchr(text + at, '"', size - at);
        if (!end) {
            break;
        }
        from = (size_t)(end - text) + 1;
        at = from + STEP;
        size_t cut_size = quote ? (size_t)(end - quote) - 1 : 0;
        if (cut_size >= CUT_SIZE_MIN && looks_like_base64_throughout(quote + 1, cut_size)) {
            cuts[count++] = (rst_json_cut){.text = quote + 1, .size = cut_size};
        }
    }
    return count;
}

uint32_t rst_json_find_cuts(const char *text, size_t size, rst_json_cut *cuts,
                            rst_json_entries *entries)
{
    if (!entries) {
        return find_strings(text, size, cuts, RST_JSON_CUT_MAX);
    }
    rst_json_cut strings[RST_JSON_CUT_MAX / 2];
    uint32_t string_count = find_strings(text, size, strings, RST_JSON_CUT_MAX / 2);
    uint32_t count = 0;
    size_t from = 0;
    for (uint32_t i = 0; i <= string_count; i++) {
        bool last = i == string_count;
        size_t to = last ? size : (size_t)(strings[i].text - text);
        count += rst_json_find_lists(&(rst_json_list_search){
            .text = text,
            .size = size,
            .from = from,
            .to = to,
            .cuts = cuts + count,
            .room = RST_JSON_CUT_MAX - (string_count - i) - count,
            .entries = entries,
        });
        if (!last) {
            cuts[count++] = strings[i];
            from = to + strings[i].size;
        }
    }
    return count;
}

size_t rst_json_shortened_size(size_t size, const rst_json_cut *cuts, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        size -= cuts[i].size;
    }
    return size;
}

void rst_json_shorten(const char *text, size_t size, rst_json_cut *cuts, uint32_t count, char *out)
{
    const char *from = text;
    size_t used = 0;
    for (uint32_t i = 0; i < count; i++) {
        size_t kept = (size_t)(cuts[i].text - from);
        memcpy(out + used, from, kept);
        used += kept;
        cuts[i].place = used - 1;
        from = cuts[i].text + cuts[i].size;
    }
    memcpy(out + used, from, (size_t)(text + size - from));
}
