#include "offset_map.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* ---- the hash ---- */

static inline uint64_t rotate(uint64_t x, unsigned bits)
{
    return (x << bits) | (x >> (64 - bits));
}

static inline uint64_t load_little(const uint8_t *p)
{
    uint64_t x;
    memcpy(&x, p, 8);                  /* little-endian machines only: format.h refuses others */
    return x;
}

typedef struct {
    uint64_t v0, v1, v2, v3;
} sip_state;

static inline void sip_rounds(sip_state *s, int rounds)
{
    for (int i = 0; i < rounds; i++) {
        s->v0 += s->v1;
        s->v1 = rotate(s->v1, 13) ^ s->v0;
        s->v0 = rotate(s->v0, 32);
        s->v2 += s->v3;
        s->v3 = rotate(s->v3, 16) ^ s->v2;
        s->v0 += s->v3;
        s->v3 = rotate(s->v3, 21) ^ s->v0;
        s->v2 += s->v1;
        s->v1 = rotate(s->v1, 17) ^ s->v2;
        s->v2 = rotate(s->v2, 32);
    }
}

ls_key_hash ls_siphash(const uint64_t secret[2], const uint8_t *data, size_t size)
{
    sip_state s = {
        secret[0] ^ UINT64_C(0x736f6d6570736575),
        secret[1] ^ UINT64_C(0x646f72616e646f6d) ^ 0xee,
        secret[0] ^ UINT64_C(0x6c7967656e657261),
        secret[1] ^ UINT64_C(0x7465646279746573),
    };
    size_t words = size / 8;
    for (size_t i = 0; i < words; i++) {
        uint64_t word = load_little(data + 8 * i);
        s.v3 ^= word;
        sip_rounds(&s, 2);
        s.v0 ^= word;
    }
    uint64_t last = (uint64_t)size << 56;
    for (size_t i = 8 * words; i < size; i++) {
        last |= (uint64_t)data[i] << (8 * (i % 8));
    }
    s.v3 ^= last;
    sip_rounds(&s, 2);
    s.v0 ^= last;
    s.v2 ^= 0xee;
    sip_rounds(&s, 4);
    ls_key_hash hash;
    hash.low = s.v0 ^ s.v1 ^ s.v2 ^ s.v3;
    s.v1 ^= 0xdd;
    sip_rounds(&s, 4);
    hash.high = s.v0 ^ s.v1 ^ s.v2 ^ s.v3;
    return hash;
}

/* ---- the map ---- */

ls_code ls_offset_map_init(ls_offset_map *map, size_t memory_bytes, const uint8_t *secret)
{
    memset(map, 0, sizeof *map);
    map->capacity = memory_bytes / sizeof(ls_offset_slot);
    /* One slot always stays free: that is what ends a search. */
    map->limit = map->capacity / 10 * 9 + map->capacity % 10 * 9 / 10;
    map->latest_offset = -1;
    if (map->limit == 0) {
        return LS_E_INVALID;
    }
    map->secret[0] = load_little(secret);
    map->secret[1] = load_little(secret + 8);
    map->slots = calloc(map->capacity, sizeof(ls_offset_slot));
    return map->slots == NULL ? LS_E_NO_MEMORY : LS_OK;
}

void ls_offset_map_free(ls_offset_map *map)
{
    free(map->slots);
    map->slots = NULL;
    map->capacity = map->limit = map->count = 0;
}

void ls_offset_map_clear(ls_offset_map *map)
{
    memset(map->slots, 0, map->capacity * sizeof(ls_offset_slot));
    map->count = 0;
    map->latest_offset = -1;
}

static inline size_t slot_of(const ls_offset_map *map, ls_key_hash hash)
{
    /* The upper half of a 128-bit product: as even as a remainder, and no division. */
    return (size_t)(((unsigned __int128)hash.low * map->capacity) >> 64);
}

void ls_offset_map_prefetch(const ls_offset_map *map, ls_key_hash hash)
{
    __builtin_prefetch(&map->slots[slot_of(map, hash)]);
}

/* Returns the slot of a key, or the free slot for it if the key is new. */
static inline ls_offset_slot *find(const ls_offset_map *map, ls_key_hash hash)
{
    size_t at = slot_of(map, hash);
    for (;;) {
        ls_offset_slot *slot = &map->slots[at];
        if (slot->next == 0 || (slot->hash.low == hash.low && slot->hash.high == hash.high)) {
            return slot;
        }
        at = at + 1 == map->capacity ? 0 : at + 1;
    }
}

ls_code ls_offset_map_put(ls_offset_map *map, ls_key_hash hash, int64_t offset)
{
    assert(offset >= 0 && offset < INT64_MAX);
    ls_offset_slot *slot = find(map, hash);
    if (slot->next == 0) {
        if (map->count >= map->limit) {
            return LS_END;
        }
        slot->hash = hash;
        map->count++;
    }
    if (slot->next < offset + 1) {
        slot->next = offset + 1;
    }
    if (map->latest_offset < offset) {
        map->latest_offset = offset;
    }
    return LS_OK;
}

int64_t ls_offset_map_get(const ls_offset_map *map, ls_key_hash hash)
{
    return find(map, hash)->next - 1;
}

/* ---- reading keys into a map ---- */

ls_code ls_offset_map_read(ls_offset_map *map, const ls_batch *batch, const uint8_t *payload,
                           size_t size, int64_t start_offset, const char **reason)
{
    ls_records records;
    ls_records_open(&records, batch, payload, size);
    for (;;) {
        struct {
            ls_key_hash hash;
            int64_t offset;
        } ahead[LS_OFFSET_MAP_AHEAD];
        size_t count = 0;
        ls_code code = LS_OK;
        ls_record record;
        while (count < LS_OFFSET_MAP_AHEAD && (code = ls_records_step(&records, &record)) == LS_OK) {
            if (record.key_size >= 0 && record.offset >= start_offset) {
                ahead[count].hash = ls_offset_map_hash(map, record.key, (size_t)record.key_size);
                ahead[count].offset = record.offset;
                ls_offset_map_prefetch(map, ahead[count].hash);
                count++;
            }
        }
        for (size_t i = 0; i < count; i++) {
            if (ls_offset_map_put(map, ahead[i].hash, ahead[i].offset) != LS_OK) {
                return LS_END;
            }
        }
        if (code != LS_OK) {
            *reason = records.reason;
            return code == LS_END ? LS_OK : code;
        }
    }
}
