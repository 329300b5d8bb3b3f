/* Reading and writing the fields of Kafka's requests and answers, for the few that C handles.
 *
 * In flexible versions a length or count is an unsigned varint with one added, and 0 is null; in the
 * others it is an i16 (strings) or an i32.
 */
#ifndef LS_FRAME_CURSOR_H
#define LS_FRAME_CURSOR_H

#include <stdbool.h>

#include "format.h"

/* What is left of a frame.  A read beyond the end sets `refused` and returns 0. */
typedef struct {
    const uint8_t *at;
    const uint8_t *end;
    bool refused;
} ls_cursor;

static inline const uint8_t *ls_take(ls_cursor *from, size_t size)
{
    if (from->refused || (size_t)(from->end - from->at) < size) {
        from->refused = true;
        return NULL;
    }
    const uint8_t *taken = from->at;
    from->at += size;
    return taken;
}

static inline int16_t ls_take_i16(ls_cursor *from)
{
    const uint8_t *taken = ls_take(from, 2);
    return taken == NULL ? 0 : ls_load_i16(taken);
}

static inline int64_t ls_take_i64(ls_cursor *from)
{
    const uint8_t *taken = ls_take(from, 8);
    return taken == NULL ? 0 : ls_load_i64(taken);
}

static inline int32_t ls_take_i32(ls_cursor *from)
{
    const uint8_t *taken = ls_take(from, 4);
    return taken == NULL ? 0 : ls_load_i32(taken);
}

/* An unsigned varint of at most four bytes: less than 256 MiB, which is more than any frame. */
static inline uint32_t ls_take_uvarint(ls_cursor *from)
{
    uint32_t number = 0;
    for (unsigned shift = 0; shift < 28; shift += 7) {
        const uint8_t *taken = ls_take(from, 1);
        if (taken == NULL) {
            return 0;
        }
        number |= (uint32_t)(*taken & 0x7f) << shift;
        if (*taken < 0x80) {
            return number;
        }
    }
    from->refused = true;
    return 0;
}

static inline void ls_require(ls_cursor *from, bool right)
{
    from->refused = from->refused || !right;
}

/* Bytes after their length.  Null is refused. */
static inline const uint8_t *ls_take_sized(ls_cursor *from, bool flexible, bool wide, size_t *size)
{
    int64_t length = flexible ? (int64_t)ls_take_uvarint(from) - 1
                     : wide   ? ls_take_i32(from)
                              : ls_take_i16(from);
    ls_require(from, length >= 0);
    *size = length >= 0 ? (size_t)length : 0;
    return ls_take(from, *size);
}

static inline void ls_require_one(ls_cursor *from, bool flexible)
{
    ls_require(from, flexible ? ls_take_uvarint(from) == 2 : ls_take_i32(from) == 1);
}

static inline void ls_require_no_tags(ls_cursor *from, bool flexible)
{
    ls_require(from, !flexible || ls_take_uvarint(from) == 0);
}

static inline uint8_t *ls_put_i16(uint8_t *at, int16_t number)
{
    ls_store_i16(at, number);
    return at + 2;
}

static inline uint8_t *ls_put_i32(uint8_t *at, int32_t number)
{
    ls_store_i32(at, number);
    return at + 4;
}

static inline uint8_t *ls_put_i64(uint8_t *at, int64_t number)
{
    ls_store_i64(at, number);
    return at + 8;
}

/* A count of one. */
static inline uint8_t *ls_put_one(uint8_t *at, bool flexible)
{
    if (flexible) {
        *at = 2;
        return at + 1;
    }
    return ls_put_i32(at, 1);
}

static inline uint8_t *ls_put_no_tags(uint8_t *at, bool flexible)
{
    if (flexible) {
        *at++ = 0;
    }
    return at;
}

/* A string after its length. */
static inline uint8_t *ls_put_string(uint8_t *at, const uint8_t *data, size_t size, bool flexible)
{
    at = flexible ? ls_varint_store(at, size + 1) : ls_put_i16(at, (int16_t)size);
    memcpy(at, data, size);
    return at + size;
}

#endif
