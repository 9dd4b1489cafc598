/* A line of a recorded session; the first byte chooses what k must be. */
#include "fuzz.h"

static rst_record *record;

/* The quick look for the session id finds what the whole reading does. */
static void must_find_session(const char *text, size_t size, const rst_line *line)
{
    char id[RST_SESSION_ID_SIZE_MAX];
    size_t id_size = 0;
    rst_error error;
    int code = rst_line_session(text, size, id, &id_size, &error);
    if (code) {
        must_be_told(code, &error, size);
        must(!line);
    } else {
        must(id_size > 0 && id_size <= sizeof id);
        must(!line || (id_size == line->session_size && same_bytes(id, line->session, id_size)));
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0) {
        return 0;
    }
    if (!record) {
        record = rst_record_new();
    }
    static const uint32_t topks[] = {0, 1, 8, RST_TOPK_MAX};
    char *text = exact_copy(data + 1, size - 1);
    rst_error error;
    rst_line line;
    int code = rst_line_decode(record, text, size - 1, topks[data[0] & 3], &line, &error);
    if (code) {
        must_be_told(code, &error, size - 1);
    } else {
        must(line.kind == RST_LINE_TURN || line.kind == RST_LINE_END);
        must(line.session_size > 0 && line.session_size <= RST_SESSION_ID_SIZE_MAX);
        rst_change change;
        rst_line_change(&line, record, 0, &change);
        must(change.session_size == line.session_size);
    }
    must_find_session(text, size - 1, code ? NULL : &line);
    free(text);
    return 0;
}
