/* The lz4 frame as Kafka writes it: independent blocks of at most 64 KiB, no checksums, no sizes.
 *
 * Only the frame is known here; the function that decodes a block is the lz4 library's and is
 * brought by the caller.  Frames of any other kind are somebody else's.
 */
#ifndef LS_LZ4_FRAME_H
#define LS_LZ4_FRAME_H

#include <stddef.h>
#include <stdint.h>

/* LZ4_decompress_safe: bytes written, or negative. */
typedef int (*ls_lz4_decode)(const char *source, char *target, int size, int capacity);

/* LZ4_compress_default: bytes written, or 0 when they do not fit. */
typedef int (*ls_lz4_encode)(const char *source, char *target, int size, int capacity);

/* The room that ls_lz4_frame_make needs for `size` bytes. */
size_t ls_lz4_frame_room(size_t size);

/* Puts `size` bytes into a frame, blocks that do not get smaller as they are; the frame's size. */
size_t ls_lz4_frame_make(const uint8_t *source, size_t size, ls_lz4_encode encode, uint8_t *frame);

/* The most that the blocks can hold, every length checked; -1 for another kind of frame. */
int64_t ls_lz4_frame_bound(const uint8_t *frame, size_t size);

/* Decodes a frame that has a bound into a target of at least that many bytes.  The content's size,
 * or -1 when a block is damaged. */
int64_t ls_lz4_frame_content(const uint8_t *frame, size_t size, ls_lz4_decode decode,
                             uint8_t *target, size_t capacity);

#endif
