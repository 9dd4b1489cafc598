#include "terminal.h"

#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>
#include <wchar.h>

static bool coloured;

void terminal_init(void)
{
    /* For the width of characters only: numbers keep their point. */
    if (!setlocale(LC_CTYPE, "C.UTF-8")) {
        setlocale(LC_CTYPE, "");
    }
    const char *no_colour = getenv("NO_COLOR");
    const char *terminal = getenv("TERM");
    coloured = isatty(STDOUT_FILENO) && !(no_colour && *no_colour) &&
               !(terminal && strcmp(terminal, "dumb") == 0);
}

size_t terminal_columns(void)
{
    struct winsize size;
    if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col) {
        return size.ws_col;
    }
    return TERMINAL_COLUMNS;
}

void output_colour(output *out, text_colour colour)
{
    static const char *const codes[] = {"\033[0m", "\033[1m", "\033[2m", "\033[32m", "\033[31m"};
    if (coloured) {
        output_text(out, codes[colour]);
    }
}

/* ---------------------------------------------------------------- names */

/* Characters that move the cursor, reorder text or cannot be seen. */
static bool is_dangerous(uint32_t code)
{
    return code < 0x20 || (code >= 0x7F && code < 0xA0) || code == 0xAD || code == 0x61C ||
           (code >= 0x200B && code <= 0x200F) || (code >= 0x2028 && code <= 0x202E) ||
           (code >= 0x2060 && code <= 0x206F) || code == 0xFEFF ||
           (code >= 0xFFF9 && code <= 0xFFFB) || (code >= 0xE0000 && code <= 0xE0FFF);
}

/* One character as it is shown; returns its columns. */
static size_t show_character(char text[16], const unsigned char *in, size_t length, uint32_t code)
{
    int size;
    if (length == 0) {
        size = snprintf(text, 16, "\\x%02x", *in);
    } else if (code == '\\') {
        size = snprintf(text, 16, "\\\\");
    } else if (code == '\n') {
        size = snprintf(text, 16, "\\n");
    } else if (code == '\t') {
        size = snprintf(text, 16, "\\t");
    } else if (is_dangerous(code)) {
        size = snprintf(text, 16, "\\u{%x}", code);
    } else {
        memcpy(text, in, length);
        text[length] = '\0';
        int columns = wcwidth((wchar_t)code);
        return columns >= 0 ? (size_t)columns : 1;
    }
    return (size_t)size;
}

size_t output_shown(output *out, const void *bytes, size_t size, size_t columns)
{
    const unsigned char *in = bytes;
    size_t used = 0;
    size_t fits = out->size; /* the output's size while there was still room for "…" */
    size_t fits_columns = 0;
    for (size_t at = 0; at < size;) {
        uint32_t code = 0;
        size_t length = utf8_decode(in + at, size - at, &code);
        char text[16];
        size_t width = show_character(text, in + at, length, code);
        if (columns && used + width > columns) {
            out->size = fits;
            output_text(out, "…");
            return fits_columns + 1;
        }
        output_text(out, text);
        used += width;
        if (used < columns) {
            fits = out->size;
            fits_columns = used;
        }
        at += length ? length : 1;
    }
    return used;
}

/* ---------------------------------------------------------------- numbers */

static const char size_units[] = "BKMGTPE";

static double scaled_size(uint64_t bytes, size_t *unit)
{
    double amount = (double)bytes;
    for (*unit = 0; amount >= 999.5; ++*unit) { /* 999.5 would be printed as 1000 */
        amount /= 1024;
    }
    return amount;
}

const char *size_text(uint64_t bytes, char buffer[TEXT_SIZE])
{
    size_t unit;
    double amount = scaled_size(bytes, &unit);
    if (unit == 0) {
        snprintf(buffer, TEXT_SIZE, "%llu B", (unsigned long long)bytes);
    } else {
        snprintf(buffer, TEXT_SIZE, "%.*f %ciB", amount < 9.95 ? 1 : 0, amount, size_units[unit]);
    }
    return buffer;
}

const char *short_size(uint64_t bytes, char buffer[TEXT_SIZE])
{
    size_t unit;
    double amount = scaled_size(bytes, &unit);
    snprintf(buffer, TEXT_SIZE, "%.*f%c", unit && amount < 9.95 ? 1 : 0, amount, size_units[unit]);
    return buffer;
}

const char *count_text(uint64_t count, char buffer[TEXT_SIZE])
{
    char digits[TEXT_SIZE];
    int size = snprintf(digits, sizeof digits, "%llu", (unsigned long long)count);
    char *at = buffer;
    for (int i = 0; i < size; i++) {
        if (i && (size - i) % 3 == 0) {
            *at++ = ',';
        }
        *at++ = digits[i];
    }
    *at = '\0';
    return buffer;
}

void output_count(output *out, uint64_t count, const char *thing)
{
    char text[TEXT_SIZE];
    output_format(out, "%s %s%s", count_text(count, text), thing, count == 1 ? "" : "s");
}

int64_t clock_ns(int clock)
{
    struct timespec now;
    clock_gettime((clockid_t)clock, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

const char *age_text(int64_t unix_ns, char buffer[TEXT_SIZE])
{
    int64_t seconds = (clock_ns(CLOCK_REALTIME) - unix_ns) / 1000000000;
    if (seconds < 0) {
        seconds = 0; /* another machine's clock, or one that was set back */
    }
    static const struct {
        int64_t seconds;
        char unit;
    } units[] = {{86400, 'd'}, {3600, 'h'}, {60, 'm'}, {1, 's'}};
    size_t unit = 0;
    while (unit < 3 && seconds < 2 * units[unit].seconds) {
        unit++;
    }
    snprintf(buffer, TEXT_SIZE, "%lld%c", (long long)(seconds / units[unit].seconds),
             units[unit].unit);
    return buffer;
}

const char *time_text(int64_t unix_ns, char buffer[TEXT_SIZE])
{
    time_t seconds = (time_t)(unix_ns / 1000000000);
    struct tm parts;
    if (!gmtime_r(&seconds, &parts) ||
        !strftime(buffer, TEXT_SIZE, "%Y-%m-%d %H:%M:%S UTC", &parts)) {
        snprintf(buffer, TEXT_SIZE, "?");
    }
    return buffer;
}

const char *number_text(double value, char buffer[TEXT_SIZE])
{
    if (isnan(value)) {
        return "-";
    }
    snprintf(buffer, TEXT_SIZE, "%.4g", value);
    return buffer;
}

/* ---------------------------------------------------------------- progress */

#define BAR_COLUMNS 30
#define REDRAW_NS 100000000

void progress_begin(progress_bar *progress, const char *what, uint64_t total)
{
    memset(progress, 0, sizeof *progress);
    progress->what = what;
    progress->total = total;
    progress->shown = isatty(STDERR_FILENO);
    progress->begun_ns = clock_ns(CLOCK_MONOTONIC);
}

static void draw_bar(const progress_bar *progress, uint64_t done, char *bar)
{
    double part = (double)done / (double)progress->total;
    part = part > 1 ? 1 : part; /* a file that grew */
    int filled = (int)(part * BAR_COLUMNS);
    memset(bar, ' ', BAR_COLUMNS);
    memset(bar, '#', (size_t)filled);
    snprintf(bar + BAR_COLUMNS, 16, "] %3d%%", (int)(part * 100));
}

void progress_draw(progress_bar *progress, uint64_t done, bool bytes)
{
    int64_t now = clock_ns(CLOCK_MONOTONIC);
    if (!progress->shown || now - progress->drawn_ns < REDRAW_NS) {
        return;
    }
    progress->drawn_ns = now;
    progress->drawn = true;
    char bar[BAR_COLUMNS + 16] = "";
    if (progress->total) {
        draw_bar(progress, done, bar);
    }
    char amount[TEXT_SIZE];
    char rate[TEXT_SIZE] = "";
    double seconds = (double)(now - progress->begun_ns) / 1e9;
    if (bytes) {
        size_text(done, amount);
        snprintf(rate, sizeof rate, " %.1f MB/s", (double)done / 1e6 / (seconds + 1e-9));
    } else {
        count_text(done, amount);
    }
    fprintf(stderr, "\r%s %s%s %s%s\033[K", progress->what, progress->total ? "[" : "", bar, amount,
            rate);
}

void progress_clear(progress_bar *progress)
{
    if (progress->drawn) {
        fputs("\r\033[K", stderr);
        progress->drawn = false;
        progress->drawn_ns = 0; /* the next one is drawn at once */
    }
}
