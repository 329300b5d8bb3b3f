/* The newest offset of each key, for compaction, in a block of memory that never grows.
 *
 * The map holds 128 bits of a keyed hash (SipHash-2-4) for each key, not the key.  The hash's key is
 * random for each map, so that keys that collide cannot be constructed; by chance two of 2^40 keys
 * collide with a probability of 2^-49.  Open addressing; full at nine tenths, because a search
 * becomes slow after that.
 *
 * One thread at a time may put; several threads may get while no thread puts.
 */
#ifndef LS_OFFSET_MAP_H
#define LS_OFFSET_MAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "batch.h"
#include "status.h"

typedef struct {
    uint64_t low;
    uint64_t high;
} ls_key_hash;

typedef struct {
    ls_key_hash hash;
    int64_t next;                      /* the offset + 1; 0: the slot is free */
} ls_offset_slot;

_Static_assert(sizeof(ls_offset_slot) == 24, "memory / 24 is the number of slots");

typedef struct {
    ls_offset_slot *slots;
    size_t capacity;                   /* slots */
    size_t limit;                      /* greatest number of keys */
    size_t count;
    int64_t latest_offset;             /* of all that was put, or seen to need no entry; -1: none */
    uint64_t secret[2];
} ls_offset_map;

/* Allocates memory_bytes / 24 slots.  LS_E_INVALID if not one key fits.  `secret` is 16 random bytes.
 * LS_OK, LS_E_INVALID, LS_E_NO_MEMORY. */
ls_code ls_offset_map_init(ls_offset_map *map, size_t memory_bytes, const uint8_t *secret);
void ls_offset_map_free(ls_offset_map *map);
void ls_offset_map_clear(ls_offset_map *map);

/* SipHash-2-4 with 128 bits of output. */
ls_key_hash ls_siphash(const uint64_t secret[2], const uint8_t *data, size_t size);

static inline ls_key_hash ls_offset_map_hash(const ls_offset_map *map, const uint8_t *key,
                                             size_t size)
{
    return ls_siphash(map->secret, key, size);
}

/* Asks the memory for a slot before it is needed: a map is larger than any cache. */
void ls_offset_map_prefetch(const ls_offset_map *map, ls_key_hash hash);

/* Records whose slots are prefetched together, before the first is used. */
enum { LS_OFFSET_MAP_AHEAD = 16 };

/* Keeps the greater offset of a key.  LS_END: the key is new and the map is full; nothing changed. */
ls_code ls_offset_map_put(ls_offset_map *map, ls_key_hash hash, int64_t offset);

/* The offset, or -1. */
int64_t ls_offset_map_get(const ls_offset_map *map, ls_key_hash hash);

/* Puts the keys of a batch's records from `start_offset` on.  LS_END: the map is full, and
 * map->latest_offset is the offset of the last record that was read. */
ls_code ls_offset_map_read(ls_offset_map *map, const ls_batch *batch, const uint8_t *payload,
                           size_t size, int64_t start_offset, const char **reason);

#endif
