#include "lz4_frame.h"

#include <string.h>

enum { BLOCK_BYTES = 64 << 10, HEADER_BYTES = 7, WORD_BYTES = 4 };
/* By how many bytes the library may make a block longer; with a smaller target it fails for some
 * blocks that it can make shorter. */
enum { BLOCK_GROWTH = BLOCK_BYTES / 255 + 16 };
#define STORED 0x80000000u

/* Magic, version 1 with independent blocks, block size 64 KiB, checksum of these two. */
static const uint8_t header[HEADER_BYTES] = {0x04, 0x22, 0x4d, 0x18, 0x60, 0x40, 0x82};

static uint32_t load_le32(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static void store_le32(uint8_t *p, uint32_t word)
{
    for (int i = 0; i < WORD_BYTES; i++) {
        p[i] = (uint8_t)(word >> (8 * i));
    }
}

size_t ls_lz4_frame_room(size_t size)
{
    size_t blocks = size / BLOCK_BYTES + 1;
    return HEADER_BYTES + blocks * WORD_BYTES + size + WORD_BYTES + BLOCK_GROWTH;
}

size_t ls_lz4_frame_make(const uint8_t *source, size_t size, ls_lz4_encode encode, uint8_t *frame)
{
    memcpy(frame, header, HEADER_BYTES);
    size_t at = HEADER_BYTES;
    for (size_t done = 0; done < size;) {
        uint32_t part = size - done < BLOCK_BYTES ? (uint32_t)(size - done) : BLOCK_BYTES;
        uint8_t *block = frame + at + WORD_BYTES;
        int packed = encode((const char *)source + done, (char *)block, (int)part,
                            (int)part + BLOCK_GROWTH);
        if (packed > 0 && (uint32_t)packed < part) {
            store_le32(frame + at, (uint32_t)packed);
            at += WORD_BYTES + (size_t)packed;
        } else {
            memcpy(block, source + done, part);
            store_le32(frame + at, part | STORED);
            at += WORD_BYTES + part;
        }
        done += part;
    }
    store_le32(frame + at, 0);
    return at + WORD_BYTES;
}

int64_t ls_lz4_frame_bound(const uint8_t *frame, size_t size)
{
    if (size < HEADER_BYTES || memcmp(frame, header, HEADER_BYTES) != 0) {
        return -1;
    }
    int64_t bound = 0;
    for (size_t at = HEADER_BYTES; size - at >= WORD_BYTES;) {
        uint32_t word = load_le32(frame + at);
        uint32_t length = word & ~STORED;
        at += WORD_BYTES;
        if (word == 0) {
            return bound;              /* the end mark; Kafka ignores what may follow */
        }
        if (length == 0 || length > BLOCK_BYTES || length > size - at) {
            return -1;
        }
        bound += (word & STORED) ? (int64_t)length : BLOCK_BYTES;
        at += length;
    }
    return -1;
}

int64_t ls_lz4_frame_content(const uint8_t *frame, size_t size, ls_lz4_decode decode,
                             uint8_t *target, size_t capacity)
{
    (void)size;                        /* the bound was found: every length is good */
    size_t made = 0;
    for (size_t at = HEADER_BYTES;;) {
        uint32_t word = load_le32(frame + at);
        uint32_t length = word & ~STORED;
        at += WORD_BYTES;
        if (word == 0) {
            return (int64_t)made;
        }
        size_t room = capacity - made < BLOCK_BYTES ? capacity - made : BLOCK_BYTES;
        if (word & STORED) {
            if (length > room) {
                return -1;
            }
            memcpy(target + made, frame + at, length);
            made += length;
        } else {
            int content = decode((const char *)frame + at, (char *)target + made, (int)length,
                                 (int)room);
            if (content < 0 || (size_t)content > room) {
                return -1;
            }
            made += (size_t)content;
        }
        at += length;
    }
}
