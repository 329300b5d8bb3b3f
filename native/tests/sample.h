/* Batches to test with, and a generator of numbers that is the same on every machine. */
#ifndef LS_TESTS_SAMPLE_H
#define LS_TESTS_SAMPLE_H

#include "batch.h"
#include "check.h"

static inline uint64_t sample_random(uint64_t *state)
{
    *state += UINT64_C(0x9e3779b97f4a7c15);            /* splitmix64 */
    uint64_t z = *state;
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

static inline void sample_fill(uint8_t *data, size_t size, uint64_t seed)
{
    for (size_t i = 0; i < size; i++) {
        data[i] = (uint8_t)sample_random(&seed);
    }
}

static inline ls_new_record sample_record(const char *key, const char *value, int64_t timestamp)
{
    return (ls_new_record){
        .timestamp = timestamp,
        .key = (const uint8_t *)key,
        .key_size = key == NULL ? -1 : (int32_t)strlen(key),
        .value = (const uint8_t *)value,
        .value_size = value == NULL ? -1 : (int32_t)strlen(value),
    };
}

/* Adds a sealed batch of `count` records, each with a value of `value_bytes` bytes. */
static inline void sample_batch(ls_builder *builder, int32_t count, size_t value_bytes,
                                int64_t timestamp)
{
    uint8_t *value = malloc(value_bytes + 1);
    CHECK(value != NULL);
    for (int32_t i = 0; i < count; i++) {
        memset(value, 'a' + i % 26, value_bytes);
        ls_new_record record = {
            .timestamp = timestamp,
            .key_size = -1,
            .value = value,
            .value_size = (int32_t)value_bytes,
        };
        CHECK(ls_builder_add(builder, &record) == LS_OK);
    }
    ls_builder_seal(builder, LS_CODEC_NONE);
    free(value);
}

#endif
