/* Fuzz target: the input is a request of Kafka's protocol, without its size.
 *
 * Promise: what the parser points at is inside the frame and in the order of the frame; the records
 * of an accepted frame are one plain batch by their header; a frame that lacks its last byte, or has
 * one more, is refused; the answer has the size that it starts with, and fits its buffer.
 */
#include "check.h"
#include "format.h"
#include "produce_frame.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size > 1 << 13) {
        return 0;
    }
    uint8_t *longer = malloc(size + 1);
    CHECK(longer != NULL);
    memcpy(longer, data, size);
    longer[size] = 0;
    ls_produce_frame frame;
    if (ls_produce_frame_parse(data, size, &frame)) {
        CHECK(frame.version >= LS_PRODUCE_VERSION_MIN && frame.version <= LS_PRODUCE_VERSION_MAX);
        CHECK(frame.client_id >= data && frame.client_id + frame.client_id_size <= frame.topic);
        CHECK(frame.topic_size <= LS_TOPIC_NAME_BYTES_MAX);
        CHECK(frame.topic + frame.topic_size <= frame.records);
        CHECK(frame.records + frame.records_size <= data + size);
        CHECK(frame.records_size >= LS_BATCH_HEADER_BYTES && frame.records[LS_AT_MAGIC] == 2);
        CHECK(ls_load_i32(frame.records + LS_AT_LENGTH) + LS_LOG_OVERHEAD_BYTES ==
              (int64_t)frame.records_size);
        ls_produce_frame other;
        CHECK(!ls_produce_frame_parse(data, size - 1, &other));
        CHECK(!ls_produce_frame_parse(longer, size + 1, &other));
        /* Exact, so that ASan sees a write of one byte too many. */
        size_t room = LS_PRODUCE_ANSWER_BYTES + frame.topic_size;
        uint8_t *answer = malloc(room);
        CHECK(answer != NULL);
        size_t written = ls_produce_frame_answer(&frame, INT64_MAX, -1, 7, answer);
        CHECK(written <= room && ls_load_i32(answer) == (int64_t)written - 4);
        CHECK(ls_load_i32(answer + 4) == frame.correlation_id);
        free(answer);
    }
    free(longer);
    return 0;
}
