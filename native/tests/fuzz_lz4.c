/* Fuzz target: the input is an lz4 frame, or claims to be one.
 *
 *     byte 0      bit 0: put a frame header in front; bit 1: also pack the bytes and unpack them
 *     byte 1 ...  the frame
 *
 * Promise: a frame with a bound can be decoded into a target of that size, and nothing is written
 * behind it; a frame that was made gives back what went in.  The block decoder is the caller's; this
 * one is made for the test, and as strict as the library's.
 */
#include <string.h>

#include "check.h"
#include "lz4_frame.h"

/* A length that goes on in further bytes while they are 255; SIZE_MAX when it leaves the block. */
static size_t length_of(const uint8_t **at, const uint8_t *end, size_t length)
{
    if (length == 15) {
        uint8_t byte;
        do {
            if (*at == end) {
                return SIZE_MAX;
            }
            byte = *(*at)++;
            length += byte;
        } while (byte == 255);
    }
    return length;
}

static int decode(const char *source, char *target, int size, int capacity)
{
    const uint8_t *at = (const uint8_t *)source, *end = at + size;
    size_t made = 0, room = (size_t)capacity;
    while (at < end) {
        uint8_t token = *at++;
        size_t literals = length_of(&at, end, token >> 4);
        if (literals > (size_t)(end - at) || literals > room - made) {
            return -1;
        }
        memcpy(target + made, at, literals);
        made += literals;
        at += literals;
        if (at == end) {
            return (int)made;          /* the last sequence has no match */
        }
        if (end - at < 2) {
            return -1;
        }
        size_t distance = (size_t)(at[0] | at[1] << 8);
        at += 2;
        size_t match = length_of(&at, end, token & 15);
        if (match == SIZE_MAX || distance == 0 || distance > made || match + 4 > room - made) {
            return -1;
        }
        for (size_t i = 0; i < match + 4; i++, made++) {
            target[made] = target[made - distance];
        }
    }
    return -1;
}

/* Bytes that are all the same become literals and one match; everything else does not fit. */
static int encode(const char *source, char *target, int size, int capacity)
{
    if (size < 32 || capacity < size) {
        return 0;
    }
    for (int i = 1; i < size; i++) {
        if (source[i] != source[0]) {
            return 0;
        }
    }
    uint8_t *at = (uint8_t *)target;
    size_t match = (size_t)size - 1 - 5 - 4;
    *at++ = 0x1f;
    *at++ = (uint8_t)source[0];
    *at++ = 1;
    *at++ = 0;
    for (match -= 15; match >= 255; match -= 255) {
        *at++ = 255;
    }
    *at++ = (uint8_t)match;
    *at++ = 0x50;
    memset(at, source[0], 5);
    return (int)(at + 5 - (uint8_t *)target);
}

static void check_frame(const uint8_t *frame, size_t size, const uint8_t *content, size_t length)
{
    int64_t bound = ls_lz4_frame_bound(frame, size);
    CHECK(bound >= -1);
    CHECK(content == NULL || bound >= (int64_t)length);
    if (bound < 0 || bound > 1 << 24) {
        return;
    }
    uint8_t *target = malloc((size_t)bound + 1);
    CHECK(target != NULL);
    target[bound] = 0x5a;
    int64_t made = ls_lz4_frame_content(frame, size, decode, target, (size_t)bound);
    CHECK(made >= -1 && made <= bound && target[bound] == 0x5a);
    CHECK(content == NULL || made == (int64_t)length);
    CHECK(content == NULL || length == 0 || memcmp(target, content, length) == 0);
    if (made > 0) {                    /* less room than that is noticed, not overrun */
        uint8_t *tight = malloc((size_t)made);
        CHECK(tight != NULL);
        int64_t less = ls_lz4_frame_content(frame, size, decode, tight, (size_t)made - 1);
        CHECK(less < made);
        CHECK(ls_lz4_frame_content(frame, size, decode, tight, (size_t)made) == made);
        CHECK(memcmp(tight, target, (size_t)made) == 0);
        free(tight);
    }
    free(target);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const uint8_t header[7] = {0x04, 0x22, 0x4d, 0x18, 0x60, 0x40, 0x82};
    if (size < 1 || size > 1 << 13) {
        return 0;
    }
    size_t length = size - 1, head = data[0] & 1 ? sizeof header : 0;
    uint8_t *frame = malloc(head + length > 0 ? head + length : 1);
    CHECK(frame != NULL);
    memcpy(frame, header, head);
    memcpy(frame + head, data + 1, length);
    check_frame(frame, head + length, NULL, 0);
    free(frame);
    if (data[0] & 2) {
        size_t room = ls_lz4_frame_room(length);
        frame = malloc(room);
        CHECK(frame != NULL);
        size_t made = ls_lz4_frame_make(data + 1, length, encode, frame);
        CHECK(made <= room);
        check_frame(frame, made, data + 1, length);
        free(frame);
    }
    return 0;
}
