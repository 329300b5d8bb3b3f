/* The on-disk picture: record batch version 2, and the two index entries.
 *
 *   0               8            12           16    17       21           23                27
 *   +---------------+------------+------------+-----+--------+------------+-----------------+
 *   | base offset   | length     | leader     |magic| crc    | attributes | last offset     |
 *   | i64           | i32        | epoch i32  | 2   | u32    | i16        | delta i32       |
 *   +---------------+------------+------------+-----+--------+------------+-----------------+
 *   27              35             43            51          53            57              61
 *   +---------------+--------------+-------------+-----------+-------------+---------------+
 *   | base          | max          | producer id | producer  | base        | record count  |
 *   | timestamp i64 | timestamp i64| i64         | epoch i16 | sequence i32| i32           |
 *   +---------------+--------------+-------------+-----------+-------------+---------------+
 *   61: records, or one compressed stream of them.
 *
 * Big-endian throughout.  `length` counts the bytes after itself.  The CRC-32C covers everything
 * from `attributes` to the end, so that offset and epoch can be set without a new checksum.
 * No other file of the core knows a field's place.
 */
#ifndef LS_FORMAT_H
#define LS_FORMAT_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* The greatest base offset of a batch: last_offset + 1 of such a batch is still an int64_t. */
#define LS_BASE_OFFSET_MAX (INT64_MAX - INT32_MAX - 1)

enum {
    LS_AT_BASE_OFFSET = 0,
    LS_AT_LENGTH = 8,
    LS_AT_LEADER_EPOCH = 12,
    LS_AT_MAGIC = 16,
    LS_AT_CRC = 17,
    LS_AT_ATTRIBUTES = 21,
    LS_AT_LAST_OFFSET_DELTA = 23,
    LS_AT_BASE_TIMESTAMP = 27,
    LS_AT_MAX_TIMESTAMP = 35,
    LS_AT_PRODUCER_ID = 43,
    LS_AT_PRODUCER_EPOCH = 51,
    LS_AT_BASE_SEQUENCE = 53,
    LS_AT_RECORD_COUNT = 57,
    LS_BATCH_HEADER_BYTES = 61,

    LS_LOG_OVERHEAD_BYTES = 12,        /* base offset + length */
    LS_MAGIC_BYTES = 17,               /* enough to see the magic of any version */
    LS_LENGTH_MIN = LS_BATCH_HEADER_BYTES - LS_LOG_OVERHEAD_BYTES,

    LS_OFFSET_ENTRY_BYTES = 8,         /* i32 relative offset, i32 position */
    LS_TIME_ENTRY_BYTES = 12,          /* i64 timestamp, i32 relative offset */
    LS_RECORD_BYTES_MIN = 7,           /* length, attributes, two deltas, two lengths, header count */
};

_Static_assert(LS_AT_RECORD_COUNT + 4 == LS_BATCH_HEADER_BYTES, "batch header is 61 bytes");
_Static_assert(LS_LENGTH_MIN == 49, "smallest legal length of a version 2 batch");

enum {
    LS_ATTR_CODEC = 0x07,
    LS_ATTR_LOG_APPEND_TIME = 0x08,
    LS_ATTR_TRANSACTIONAL = 0x10,
    LS_ATTR_CONTROL = 0x20,
    LS_ATTR_DELETE_HORIZON = 0x40,
};
enum { LS_CODEC_NONE = 0, LS_CODEC_GZIP, LS_CODEC_SNAPPY, LS_CODEC_LZ4, LS_CODEC_ZSTD, LS_CODEC_MAX = 4 };

static inline uint16_t ls_load_u16(const uint8_t *p)
{
    uint16_t x;
    memcpy(&x, p, 2);
    return __builtin_bswap16(x);
}
static inline uint32_t ls_load_u32(const uint8_t *p)
{
    uint32_t x;
    memcpy(&x, p, 4);
    return __builtin_bswap32(x);
}
static inline uint64_t ls_load_u64(const uint8_t *p)
{
    uint64_t x;
    memcpy(&x, p, 8);
    return __builtin_bswap64(x);
}
static inline int16_t ls_load_i16(const uint8_t *p) { return (int16_t)ls_load_u16(p); }
static inline int32_t ls_load_i32(const uint8_t *p) { return (int32_t)ls_load_u32(p); }
static inline int64_t ls_load_i64(const uint8_t *p) { return (int64_t)ls_load_u64(p); }

static inline void ls_store_i16(uint8_t *p, int16_t v)
{
    uint16_t x = __builtin_bswap16((uint16_t)v);
    memcpy(p, &x, 2);
}
static inline void ls_store_u32(uint8_t *p, uint32_t v)
{
    uint32_t x = __builtin_bswap32(v);
    memcpy(p, &x, 4);
}
static inline void ls_store_i32(uint8_t *p, int32_t v) { ls_store_u32(p, (uint32_t)v); }
static inline void ls_store_i64(uint8_t *p, int64_t v)
{
    uint64_t x = __builtin_bswap64((uint64_t)v);
    memcpy(p, &x, 8);
}
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the loads above swap bytes: port them before building on a big-endian machine"
#endif

/* Zig-zag varints: at most 5 bytes for 32 bits, 10 for 64.  A decoder returns the number of bytes
 * read, or 0 when the input ends early or the number does not fit. */
static inline uint32_t ls_zigzag32(int32_t v) { return ((uint32_t)v << 1) ^ (uint32_t)(v >> 31); }
static inline uint64_t ls_zigzag64(int64_t v) { return ((uint64_t)v << 1) ^ (uint64_t)(v >> 63); }

static inline size_t ls_varint_size(uint64_t zigzag)
{
    if (zigzag < 0x80) {
        return 1;                      /* nearly always this or the next: cheaper than counting */
    }
    if (zigzag < 0x4000) {
        return 2;
    }
    unsigned bits = 64u - (unsigned)__builtin_clzll(zigzag | 1);
    return (bits * 9 + 64) / 64;       /* ceil(bits / 7) for 1..64 */
}

static inline uint8_t *ls_varint_store(uint8_t *p, uint64_t zigzag)
{
    if (zigzag < 0x80) {
        *p = (uint8_t)zigzag;
        return p + 1;
    }
    if (zigzag < 0x4000) {
        p[0] = (uint8_t)(zigzag | 0x80);
        p[1] = (uint8_t)(zigzag >> 7);
        return p + 2;
    }
    while (zigzag >= 0x80) {
        *p++ = (uint8_t)(zigzag | 0x80);
        zigzag >>= 7;
    }
    *p++ = (uint8_t)zigzag;
    return p;
}

static inline int32_t ls_unzigzag32(uint32_t v) { return (int32_t)((v >> 1) ^ (0u - (v & 1))); }
static inline int64_t ls_unzigzag64(uint64_t v)
{
    return (int64_t)((v >> 1) ^ (UINT64_C(0) - (v & 1)));
}

static inline size_t ls_varint32_load(const uint8_t *p, const uint8_t *end, int32_t *out)
{
    uint32_t zigzag = 0;
    for (unsigned i = 0; i < 5; i++) {
        if (p + i >= end) {
            return 0;
        }
        uint32_t byte = p[i];
        zigzag |= (byte & 0x7f) << (7 * i);
        if (byte < 0x80) {
            if (i == 4 && byte > 0x0f) {
                return 0;              /* more than 32 bits */
            }
            *out = ls_unzigzag32(zigzag);
            return i + 1;
        }
    }
    return 0;
}

/* The same where at least 8 bytes can be read: one to three bytes are taken without a loop, which is
 * nearly all there is; NULL for anything longer, which the careful way then reads. */
static inline const uint8_t *ls_varint_quick(const uint8_t *p, uint32_t *zigzag)
{
    uint32_t byte = p[0];
    uint32_t value = byte & 0x7f;
    if (byte < 0x80) {
        *zigzag = value;
        return p + 1;
    }
    byte = p[1];
    value |= (byte & 0x7f) << 7;
    if (byte < 0x80) {
        *zigzag = value;
        return p + 2;
    }
    byte = p[2];
    value |= (byte & 0x7f) << 14;
    *zigzag = value;
    return byte < 0x80 ? p + 3 : NULL;
}

static inline size_t ls_varint64_load(const uint8_t *p, const uint8_t *end, int64_t *out)
{
    uint64_t zigzag = 0;
    for (unsigned i = 0; i < 10; i++) {
        if (p + i >= end) {
            return 0;
        }
        uint64_t byte = p[i];
        zigzag |= (byte & 0x7f) << (7 * i);
        if (byte < 0x80) {
            if (i == 9 && byte > 0x01) {
                return 0;              /* more than 64 bits */
            }
            *out = ls_unzigzag64(zigzag);
            return i + 1;
        }
    }
    return 0;
}

#endif
