#include "args.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fail.h"
#include <rollstore/store.h>

bool parse_count(const char *text, uint64_t *value)
{
    if (text[0] < '0' || text[0] > '9') {
        return false; /* strtoull takes signs and spaces */
    }
    char *end;
    errno = 0;
    unsigned long long number = strtoull(text, &end, 10);
    if (*end != '\0' || errno != 0) {
        return false;
    }
    *value = number;
    return true;
}

static bool parse_int(const char *text, int64_t *value)
{
    const char *digits = text[0] == '-' ? text + 1 : text;
    if (digits[0] < '0' || digits[0] > '9') {
        return false;
    }
    char *end;
    errno = 0;
    long long number = strtoll(text, &end, 10);
    if (*end != '\0' || errno != 0) {
        return false;
    }
    *value = number;
    return true;
}

static bool parse_number(const char *text, double *value)
{
    char *end;
    errno = 0;
    *value = strtod(text, &end);
    return end != text && *end == '\0' && isfinite(*value);
}

/* A decimal number and where its unit begins. */
static bool parse_amount(const char *text, double *amount, const char **unit)
{
    size_t length = strspn(text, "0123456789.");
    char digits[32];
    if (length == 0 || length >= sizeof digits) {
        return false;
    }
    memcpy(digits, text, length);
    digits[length] = '\0';
    *unit = text + length;
    return parse_number(digits, amount);
}

/* As in coreutils: K and KiB are 1024, KB is 1000. */
bool parse_size(const char *text, uint64_t *bytes)
{
    double amount;
    const char *unit;
    if (!parse_amount(text, &amount, &unit)) {
        return false;
    }
    double scale = 1;
    const char *letters = "kMGT";
    const char *letter = *unit == 'K' ? letters : *unit ? strchr(letters, *unit) : NULL;
    if (letter) {
        double base = unit[1] == 'B' && unit[2] == '\0' ? 1000 : 1024;
        scale = pow(base, (double)(letter - letters + 1));
        unit++;
        unit += unit[0] == 'i' && unit[1] == 'B' ? 1 : 0;
    }
    unit += unit[0] == 'B' ? 1 : 0;
    amount *= scale;
    if (*unit != '\0' || amount > 9e18) {
        return false;
    }
    *bytes = (uint64_t)amount;
    return true;
}

static bool parse_time(const char *text, int64_t *milliseconds)
{
    if (strcmp(text, "forever") == 0) {
        *milliseconds = RST_FOREVER;
        return true;
    }
    static const struct {
        const char *unit;
        double scale;
    } units[] = {{"", 1e3}, {"s", 1e3}, {"ms", 1}, {"m", 6e4}, {"h", 3.6e6}, {"d", 8.64e7}};
    double amount;
    const char *unit;
    if (!parse_amount(text, &amount, &unit)) {
        return false;
    }
    for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
        if (strcmp(unit, units[i].unit) == 0 && amount * units[i].scale < 1e15) {
            *milliseconds = (int64_t)(amount * units[i].scale);
            return true;
        }
    }
    return false;
}

static bool parse_choice(const char *text, const arg_choice *choices, int *value)
{
    for (const arg_choice *c = choices; c->word; c++) {
        if (strcmp(text, c->word) == 0) {
            *value = c->value;
            return true;
        }
    }
    return false;
}

static void list_choices(const arg_choice *choices, char *text, size_t size)
{
    text[0] = '\0';
    for (const arg_choice *c = choices; c->word; c++) {
        if (c != choices) {
            strncat(text, ", ", size - strlen(text) - 1);
        }
        strncat(text, c->word, size - strlen(text) - 1);
    }
}

static bool convert(const char *command_name, const arg_option *option, const char *text)
{
    const char *wants = "";
    char list[128];
    bool good = true;
    switch (option->kind) {
    case OPTION_FLAG:
        *(bool *)option->value = true;
        break;
    case OPTION_TEXT:
        *(const char **)option->value = text;
        break;
    case OPTION_COUNT: {
        uint64_t count = 0;
        uint64_t max = option->max ? option->max : UINT64_MAX;
        good = parse_count(text, &count) && count >= option->min && count <= max;
        *(uint64_t *)option->value = count;
        snprintf(list, sizeof list, "a whole number from %llu to %llu",
                 (unsigned long long)option->min, (unsigned long long)max);
        wants = list;
        break;
    }
    case OPTION_INT:
        good = parse_int(text, option->value);
        wants = "a whole number";
        break;
    case OPTION_SIZE:
        good = parse_size(text, option->value) && *(uint64_t *)option->value >= option->min;
        wants = "a size such as 64M, 2G or 1GiB";
        break;
    case OPTION_TIME:
        good = parse_time(text, option->value);
        wants = "a time such as 10 (seconds), 500ms, 5m or forever";
        break;
    case OPTION_NUMBER:
        good = parse_number(text, option->value);
        wants = "a number";
        break;
    case OPTION_CHOICE:
        good = parse_choice(text, option->choices, option->value);
        list_choices(option->choices, list, sizeof list);
        wants = list;
        break;
    }
    if (!good) {
        fail_usage(command_name, "--%s %s: it takes %s", option->name, text, wants);
    }
    return good;
}

static const arg_option *find_long(const arg_option *options, const char *name, size_t size)
{
    for (const arg_option *o = options; o->name; o++) {
        if (strlen(o->name) == size && memcmp(o->name, name, size) == 0) {
            return o;
        }
    }
    return NULL;
}

static const arg_option *find_short(const arg_option *options, char letter)
{
    for (const arg_option *o = options; o->name; o++) {
        if (o->letter == letter) {
            return o;
        }
    }
    return NULL;
}

/* Take the option argv[*at], and its value where that is the next word. */
static bool take_option(int argc, char **argv, const arg_option *options, int *at)
{
    const char *word = argv[*at];
    bool is_long = word[1] == '-';
    const char *equals = is_long ? strchr(word, '=') : NULL;
    size_t size = equals ? (size_t)(equals - word) : strlen(word);
    const arg_option *found =
        is_long ? find_long(options, word + 2, size - 2) : find_short(options, word[1]);
    if (!found) {
        fail_usage(argv[0], "there is no option %.*s", (int)(is_long ? size : 2), word);
        return false;
    }
    const char *value = equals ? equals + 1 : !is_long && word[2] ? word + 2 : NULL;
    if (found->kind == OPTION_FLAG) {
        if (value) {
            fail_usage(argv[0], "--%s takes no value", found->name);
            return false;
        }
        return convert(argv[0], found, "");
    }
    if (!value) {
        if (*at + 1 >= argc) {
            fail_usage(argv[0], "--%s needs a value", found->name);
            return false;
        }
        value = argv[++*at];
    }
    return convert(argv[0], found, value);
}

bool args_parse(int argc, char **argv, const arg_option *options, int least, int most,
                arg_operands *operands)
{
    operands->count = 0;
    operands->items = argv + 1; /* written over what was read already */
    bool options_end = false;
    for (int at = 1; at < argc; at++) {
        if (options_end || argv[at][0] != '-' || argv[at][1] == '\0') {
            operands->items[operands->count++] = argv[at];
        } else if (strcmp(argv[at], "--") == 0) {
            options_end = true;
        } else if (!take_option(argc, argv, options, &at)) {
            return false;
        }
    }
    if (operands->count < least) {
        fail_usage(argv[0], "something is missing after \"%s\"",
                   operands->count ? operands->items[operands->count - 1] : argv[0]);
        return false;
    }
    if (most >= 0 && operands->count > most) {
        fail_usage(argv[0], "\"%s\" is one argument too many", operands->items[most]);
        return false;
    }
    return true;
}
