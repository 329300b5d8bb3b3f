/* The lz4 frame as Kafka writes it: independent blocks of at most 64 KiB, no checksums, no sizes.
 *
 * This file reads and writes frames only.  The caller passes the lz4 library's function for a block.
 * Frames of any other kind are refused; the caller decodes them with a codec.
 */
#ifndef LS_LZ4_FRAME_H
#define LS_LZ4_FRAME_H

#include <stddef.h>
#include <stdint.h>

/* LZ4_decompress_safe: bytes written, or negative. */
typedef int (*ls_lz4_decode)(const char *source, char *target, int size, int capacity);

/* LZ4_compress_default: bytes written, or 0 when they do not fit. */
typedef int (*ls_lz4_encode)(const char *source, char *target, int size, int capacity);

/* Returns the greatest size of the frame that ls_lz4_frame_make writes for `size` bytes. */
size_t ls_lz4_frame_room(size_t size);

/* Writes `size` bytes as a frame.  A block that compression does not shorten is stored uncompressed.
 * Returns the size of the frame. */
size_t ls_lz4_frame_make(const uint8_t *source, size_t size, ls_lz4_encode encode, uint8_t *frame);

/* The most that the blocks can hold, every length checked; -1 for another kind of frame. */
int64_t ls_lz4_frame_bound(const uint8_t *frame, size_t size);

/* Decodes a frame that has a bound into a target of at least that many bytes.  The content's size,
 * or -1 when a block is damaged. */
int64_t ls_lz4_frame_content(const uint8_t *frame, size_t size, ls_lz4_decode decode,
                             uint8_t *target, size_t capacity);

#endif
