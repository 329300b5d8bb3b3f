/* The most common Fetch request: one partition, by a consumer, without a fetch session.
 *
 *   versions 4 to 11                              versions 12 to 18 (flexible)
 *   api key i16, version i16, correlation id i32, client id (i16 length)
 *                                                 header tags
 *   replica id i32 -1                             until version 14
 *   longest wait i32, least bytes i32, most bytes i32, isolation level i8
 *   7: session id i32 0, session epoch i32 -1     the same
 *   topics i32 1                                  topics 1 + 1
 *     name (i16 length)                             name (varint length + 1); 13: id, 16 bytes
 *     partitions i32 1                              partitions 1 + 1
 *       index i32
 *       9: leader epoch i32
 *       offset i64
 *                                                     last fetched epoch i32
 *       5: start of the log i64
 *       most bytes i32                                tags
 *                                                   tags
 *   7: forgotten topics i32 0                     forgotten topics 0 + 1
 *   11: rack (i16 length)                         rack (varint length + 1)
 *                                                 tags
 *
 * The parser takes this shape only, without a tag or a byte left over.  Any other request, right or
 * wrong, is refused here and decoded from the schemas.  So a refusal is never an error.
 */
#ifndef LS_FETCH_FRAME_H
#define LS_FETCH_FRAME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    LS_FETCH_VERSION_MIN = 4,
    LS_FETCH_VERSION_FLEXIBLE = 12,
    LS_FETCH_VERSION_BY_ID = 13,
    LS_FETCH_VERSION_MAX = 18,
    LS_FETCH_TOPIC_BYTES_MAX = 249,
    /* What precedes the records in an answer, without the topic. */
    LS_FETCH_HEAD_BYTES = 96,
    /* What follows them: the tags of a partition, a topic and the answer. */
    LS_FETCH_TAIL_BYTES = 3,
};

/* Pointers are into the frame. */
typedef struct {
    const uint8_t *client_id;
    const uint8_t *topic;              /* its name; from version 13 on its id */
    size_t client_id_size;             /* 0 for a null id, too */
    size_t topic_size;
    int64_t offset;
    int32_t correlation_id;
    int32_t wait_ms;
    int32_t bytes_min;
    int32_t bytes_max;                 /* of the answer */
    int32_t partition;
    int32_t partition_bytes_max;
    int32_t leader_epoch;              /* -1: not known to the client */
    int32_t fetched_epoch;             /* of the last record that the client has; -1: not sent */
    int16_t version;
    int8_t isolation;
} ls_fetch_frame;

/* Parses a frame, without its size.  Returns false if it does not have the shape above. */
bool ls_fetch_frame_parse(const uint8_t *frame, size_t size, ls_fetch_frame *out);

/* Offsets of the partition at the time of the answer. */
typedef struct {
    int64_t high_watermark;
    int64_t last_stable_offset;
    int64_t start_offset;
} ls_fetch_offsets;

/* Writes what precedes `records_size` bytes of records in the answer, the size of the whole included.
 * No transaction among them was aborted.  `out` has room for LS_FETCH_HEAD_BYTES and the topic.  Returns
 * the bytes written; 0 if the answer would be larger than a frame. */
size_t ls_fetch_frame_head(const ls_fetch_frame *frame, const ls_fetch_offsets *offsets,
                           size_t records_size, uint8_t *out);

/* The bytes after the records: all of them are 0. */
static inline size_t ls_fetch_frame_tail(const ls_fetch_frame *frame)
{
    return frame->version >= LS_FETCH_VERSION_FLEXIBLE ? LS_FETCH_TAIL_BYTES : 0;
}

#endif
