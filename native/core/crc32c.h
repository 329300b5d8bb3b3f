/* CRC-32C (Castagnoli), as Kafka uses it: reflected, initial value and final xor all ones. */
#ifndef LS_CRC32C_H
#define LS_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* Continues `crc` (0 at the start) over `size` bytes.  Uses the processor's instruction where it
 * has one, three streams at a time; a table otherwise.  Thread-safe. */
uint32_t ls_crc32c(uint32_t crc, const void *data, size_t size);

/* The table version alone: the fallback, and what the tests compare with. */
uint32_t ls_crc32c_table(uint32_t crc, const void *data, size_t size);

/* "sse4.2", "armv8" or "table": what ls_crc32c uses on this machine. */
const char *ls_crc32c_implementation(void);

#endif
