#include "host.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

void rst_boot_id(uint8_t out[RST_BOOT_ID_SIZE])
{
    char text[64] = "";
    memset(out, 0, RST_BOOT_ID_SIZE);
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (!file) {
        return;
    }
    char *line = fgets(text, sizeof text, file);
    fclose(file);
    int digits = 0;
    uint8_t id[RST_BOOT_ID_SIZE] = {0};
    for (const char *c = line; c && *c && digits < 2 * RST_BOOT_ID_SIZE; c++) {
        if (isxdigit((unsigned char)*c)) {
            int value = *c <= '9' ? *c - '0' : (*c | 0x20) - 'a' + 10;
            id[digits / 2] = (uint8_t)(id[digits / 2] << 4 | value);
            digits++;
        }
    }
    if (digits == 2 * RST_BOOT_ID_SIZE) {
        memcpy(out, id, sizeof id);
    }
}

uint64_t rst_pid_namespace(void)
{
    struct stat info;
    return stat("/proc/self/ns/pid", &info) == 0 ? info.st_ino : 0;
}
