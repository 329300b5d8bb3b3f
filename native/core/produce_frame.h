/* The most common request of Kafka's protocol: a Produce of one batch to one partition.
 *
 *   versions 3 to 8                              versions 9 to 13 (flexible)
 *   api key i16, version i16, correlation id i32, client id (i16 length)
 *                                                header tags
 *   transactional id, null (i16 -1)              transactional id, null (0)
 *   acks i16, time-out i32                       acks i16, time-out i32
 *   topics i32 1                                 topics 1 + 1
 *     name (i16 length)                            name (varint length + 1); 13: id, 16 bytes
 *     partitions i32 1                             partitions 1 + 1
 *       index i32                                    index i32
 *       records (i32 length)                         records (varint length + 1), tags
 *                                                  tags
 *                                                tags
 *
 * The parser takes this shape only, with acks 1 or -1, no tag, no byte left over, and records that
 * start as one batch of format 2: not compressed, not transactional, and exactly as long as its
 * header says.  Any other request, right or wrong, is refused here and decoded from the schemas.  So
 * a refusal is never an error.  The records themselves are not looked at.
 */
#ifndef LS_PRODUCE_FRAME_H
#define LS_PRODUCE_FRAME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    LS_PRODUCE_VERSION_MIN = 3,
    LS_PRODUCE_VERSION_FLEXIBLE = 9,
    LS_PRODUCE_VERSION_BY_ID = 13,
    LS_PRODUCE_VERSION_MAX = 13,
    LS_TOPIC_ID_BYTES = 16,
    LS_TOPIC_NAME_BYTES_MAX = 249,
    /* Size, correlation id, counts, and the row of the partition, without the topic. */
    LS_PRODUCE_ANSWER_BYTES = 80,
};

/* Pointers are into the frame. */
typedef struct {
    const uint8_t *client_id;
    const uint8_t *topic;              /* its name; from version 13 on its id */
    const uint8_t *records;
    size_t client_id_size;             /* 0 for a null id, too */
    size_t topic_size;
    size_t records_size;
    int32_t correlation_id;
    int32_t partition;
    int16_t version;
} ls_produce_frame;

/* Parses a frame, without its size.  Returns false if it does not have the shape above. */
bool ls_produce_frame_parse(const uint8_t *frame, size_t size, ls_produce_frame *out);

/* Writes the whole answer, its size included, for a batch that was appended.  `out` has room for
 * LS_PRODUCE_ANSWER_BYTES and the topic.  Returns the bytes written. */
size_t ls_produce_frame_answer(const ls_produce_frame *frame, int64_t base_offset,
                               int64_t append_time, int64_t start_offset, uint8_t *out);

#endif
