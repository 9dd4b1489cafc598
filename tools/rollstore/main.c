/* The rollstore tool: a table of commands. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/terminal.h"
#include "command.h"

static const tool_command *const commands[] = {
    &command_create,  &command_decode,    &command_put,   &command_ingest, &command_ls,
    &command_show,    &command_dump,      &command_stat,  &command_verify, &command_copy,
    &command_release, &command_consumers, &command_bench,
};
#define COMMAND_COUNT (sizeof commands / sizeof *commands)

static const char *const exit_help =
    "Exit status: 0 done; 1 something failed, was refused or is faulty; 2 the command\n"
    "line makes no sense.  Errors are lines \"rollstore: KIND: message\" on standard\n"
    "error.\n";

static const tool_command *find_command(const char *name)
{
    for (size_t i = 0; i < COMMAND_COUNT; i++) {
        if (strcmp(commands[i]->name, name) == 0) {
            return commands[i];
        }
    }
    return NULL;
}

static int print_help(void)
{
    output out = {0};
    output_text(&out,
                "rollstore: engine replies of agent sessions, with their top-k candidates, in\n"
                "shared memory: looked at, filled, checked and emptied.\n"
                "\n"
                "usage: rollstore COMMAND [OPTION...] ARGUMENT...\n"
                "\n");
    for (size_t i = 0; i < COMMAND_COUNT; i++) {
        output_format(&out, "  %-10s %s\n", commands[i]->name, commands[i]->summary);
    }
    output_text(&out,
                "\nrollstore COMMAND --help tells more and gives an example.\n"
                "STORE is the store's folder, such as /dev/shm/run1.  SESSION is a session's id;\n"
                "SESSION:TURN one of its turns (0, 1, ...).  A session whose own id ends in a\n"
                "colon and digits comes first; --turn N is never mistaken.  Before an id that\n"
                "begins with a dash, write --.\n\n");
    output_text(&out, exit_help);
    return output_finish(&out);
}

static int print_command_help(const tool_command *command)
{
    output out = {0};
    output_text(&out, command->help);
    output_text(&out, "\n");
    output_text(&out, exit_help);
    return output_finish(&out);
}

static int print_version(void)
{
    output out = {0};
    output_format(&out, "rollstore %s (format %d, base64 %s)\n", rst_version(), RST_FORMAT_VERSION,
                  rst_base64_path());
    return output_finish(&out);
}

/* --help or -h before any "--". */
static bool wants_help(int argc, char **argv)
{
    for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            return true;
        }
    }
    return false;
}

static int run(int argc, char **argv)
{
    if (argc < 2) {
        fail("usage", "a command is missing (rollstore --help lists them)");
        return STATUS_USAGE;
    }
    const char *name = argv[1];
    if (strcmp(name, "--version") == 0) {
        return print_version();
    }
    bool help = strcmp(name, "help") == 0 || strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0;
    if (help && argc < 3) {
        return print_help();
    }
    name = help ? argv[2] : name;
    const tool_command *found = find_command(name);
    if (!found) {
        fail("usage", "there is no command %s (rollstore --help lists them)", name);
        return STATUS_USAGE;
    }
    if (help || wants_help(argc - 1, argv + 1)) {
        return print_command_help(found);
    }
    return found->run(argc - 1, argv + 1);
}

/* Without this the store's data file could be opened as descriptor 1 or 2 and be printed into. */
static void occupy_standard_descriptors(void)
{
    for (int fd = 0; fd < 3; fd++) {
        if (fcntl(fd, F_GETFD) < 0) {
            /* The wrong way round, so that using it is an error as it would have been. */
            int opened = open("/dev/null", fd == 0 ? O_WRONLY : O_RDONLY);
            if (opened < 0) {
                _exit(STATUS_FAILED);
            }
        }
    }
}

int main(int argc, char **argv)
{
    occupy_standard_descriptors();
    /* A reader that went away is an error of writing, with a message and a status. */
    signal(SIGPIPE, SIG_IGN);
    terminal_init();
    int status = run(argc, argv);
    if (close(STDOUT_FILENO) != 0 && status == STATUS_OK) {
        status = fail_system(errno, "writing standard output");
    }
    return status;
}
