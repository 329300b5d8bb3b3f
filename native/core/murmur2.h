/* MurmurHash2, 32 bits, as Kafka's clients hash a key: little-endian words, their fixed seed. */
#ifndef LS_MURMUR2_H
#define LS_MURMUR2_H

#include <stddef.h>
#include <stdint.h>

/* The hash of `size` bytes.  A Java int is the same bits, signed. */
uint32_t ls_murmur2(const void *data, size_t size);

#endif
