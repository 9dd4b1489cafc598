/* The command line, declared by each command as a list of options. */
#ifndef TOOL_ARGS_H
#define TOOL_ARGS_H

#include <stdbool.h>
#include <stdint.h>

/* A word and the number it stands for; a list ends with a NULL word. */
typedef struct arg_choice {
    const char *word;
    int value;
} arg_choice;

typedef enum option_kind {
    OPTION_FLAG,   /* bool: takes no value */
    OPTION_TEXT,   /* const char * */
    OPTION_COUNT,  /* uint64_t from min to max */
    OPTION_INT,    /* int64_t */
    OPTION_SIZE,   /* uint64_t bytes: 64M, 2G, 1GiB, 5MB */
    OPTION_TIME,   /* int64_t milliseconds: 10 (seconds), 500ms, 5m, forever (-1) */
    OPTION_NUMBER, /* double */
    OPTION_CHOICE  /* int, one of choices */
} option_kind;

/* A list ends with a NULL name.  `value` keeps what the caller set where the option is not given.
 */
typedef struct arg_option {
    const char *name; /* without the dashes */
    char letter;      /* short form, or 0 */
    option_kind kind;
    void *value;
    const arg_choice *choices;
    uint64_t min; /* OPTION_COUNT, OPTION_SIZE */
    uint64_t max; /* OPTION_COUNT; 0 means no limit */
} arg_option;

/* What is left when the options are taken out; points into argv. */
typedef struct arg_operands {
    int count;
    char **items;
} arg_operands;

/* Read argv (argv[0] is the command's name); options and operands in any order, "--" ends the
 * options.  Between least and most operands (most < 0: no limit).  False after an error message. */
bool args_parse(int argc, char **argv, const arg_option *options, int least, int most,
                arg_operands *operands);

/* The same conversions for operands.  False when the text is none. */
bool parse_count(const char *text, uint64_t *value);
bool parse_size(const char *text, uint64_t *bytes);

#endif
