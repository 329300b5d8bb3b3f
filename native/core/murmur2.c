#include "murmur2.h"

enum { WORD = 4, SHIFT = 24 };

static const uint32_t SEED = 0x9747b28cu;
static const uint32_t MIX = 0x5bd1e995u;

static uint32_t word_at(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

uint32_t ls_murmur2(const void *data, size_t size)
{
    const uint8_t *p = data;
    uint32_t hash = SEED ^ (uint32_t)size;
    for (; size >= WORD; p += WORD, size -= WORD) {
        uint32_t word = word_at(p) * MIX;
        word = (word ^ word >> SHIFT) * MIX;
        hash = hash * MIX ^ word;
    }
    if (size > 0) {
        for (size_t i = 0; i < size; i++) {
            hash ^= (uint32_t)p[i] << (8 * i);
        }
        hash *= MIX;
    }
    hash = (hash ^ hash >> 13) * MIX;
    return hash ^ hash >> 15;
}
