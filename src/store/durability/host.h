/* What tells this run of the machine, and this container, from others.  Internal. */
#ifndef RST_SRC_STORE_HOST_H
#define RST_SRC_STORE_HOST_H

#include <stdint.h>

#define RST_BOOT_ID_SIZE 16

/* The kernel's boot_id; all zeros when it cannot be read, which is like no other boot. */
void rst_boot_id(uint8_t out[RST_BOOT_ID_SIZE]);

/* The number of this process's PID namespace; 0 when it cannot be known. */
uint64_t rst_pid_namespace(void);

#endif
