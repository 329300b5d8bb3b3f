#include "produce_frame.h"

#include <string.h>

#include "frame_cursor.h"

/* Whether the bytes can be written as they are: one batch, as far as its header shows. */
static bool is_plain_batch(const uint8_t *records, size_t size)
{
    return size >= LS_BATCH_HEADER_BYTES && records[LS_AT_MAGIC] == 2 &&
           (int64_t)ls_load_i32(records + LS_AT_LENGTH) + LS_LOG_OVERHEAD_BYTES == (int64_t)size &&
           (ls_load_u16(records + LS_AT_ATTRIBUTES) & (LS_ATTR_CODEC | LS_ATTR_TRANSACTIONAL)) == 0;
}

bool ls_produce_frame_parse(const uint8_t *frame, size_t size, ls_produce_frame *out)
{
    ls_cursor from = {frame, frame + size, false};
    ls_require(&from, ls_take_i16(&from) == 0);              /* the key of Produce */
    out->version = ls_take_i16(&from);
    ls_require(&from, out->version >= LS_PRODUCE_VERSION_MIN &&
                       out->version <= LS_PRODUCE_VERSION_MAX);
    bool flexible = out->version >= LS_PRODUCE_VERSION_FLEXIBLE;
    out->correlation_id = ls_take_i32(&from);
    int16_t length = ls_take_i16(&from);
    out->client_id_size = length > 0 ? (size_t)length : 0;
    out->client_id = ls_take(&from, out->client_id_size);
    ls_require_no_tags(&from, flexible);
    ls_require(&from, flexible ? ls_take_uvarint(&from) == 0 : ls_take_i16(&from) == -1);
    int16_t acks = ls_take_i16(&from);
    ls_require(&from, acks == 1 || acks == -1);
    (void)ls_take_i32(&from);                             /* the time-out: nothing is waited for */
    ls_require_one(&from, flexible);
    if (out->version >= LS_PRODUCE_VERSION_BY_ID) {
        out->topic_size = LS_TOPIC_ID_BYTES;
        out->topic = ls_take(&from, LS_TOPIC_ID_BYTES);
    } else {
        out->topic = ls_take_sized(&from, flexible, false, &out->topic_size);
        ls_require(&from, out->topic_size <= LS_TOPIC_NAME_BYTES_MAX);
    }
    ls_require_one(&from, flexible);
    out->partition = ls_take_i32(&from);
    out->records = ls_take_sized(&from, flexible, true, &out->records_size);
    for (int structs = 0; structs < 3; structs++) {    /* partition, topic, request */
        ls_require_no_tags(&from, flexible);
    }
    ls_require(&from, from.at == from.end);
    return !from.refused && is_plain_batch(out->records, out->records_size);
}

static uint8_t *put_topic(uint8_t *at, const ls_produce_frame *frame, bool flexible)
{
    if (frame->version < LS_PRODUCE_VERSION_BY_ID) {
        return ls_put_string(at, frame->topic, frame->topic_size, flexible);
    }
    memcpy(at, frame->topic, LS_TOPIC_ID_BYTES);
    return at + LS_TOPIC_ID_BYTES;
}

size_t ls_produce_frame_answer(const ls_produce_frame *frame, int64_t base_offset,
                               int64_t append_time, int64_t start_offset, uint8_t *out)
{
    bool flexible = frame->version >= LS_PRODUCE_VERSION_FLEXIBLE;
    uint8_t *at = ls_put_i32(out + 4, frame->correlation_id);
    at = ls_put_no_tags(at, flexible);                    /* of the header */
    at = ls_put_one(at, flexible);
    at = put_topic(at, frame, flexible);
    at = ls_put_one(at, flexible);
    at = ls_put_i32(at, frame->partition);
    at = ls_put_i16(at, 0);                               /* no error */
    at = ls_put_i64(at, base_offset);
    at = ls_put_i64(at, append_time);
    if (frame->version >= 5) {
        at = ls_put_i64(at, start_offset);
    }
    if (flexible) {
        *at++ = 1;                                     /* no record has an error */
        *at++ = 0;                                     /* and no message: null */
    } else if (frame->version >= 8) {
        at = ls_put_i32(at, 0);
        at = ls_put_i16(at, -1);
    }
    at = ls_put_no_tags(at, flexible);                    /* of the partition */
    at = ls_put_no_tags(at, flexible);                    /* of the topic */
    at = ls_put_i32(at, 0);                               /* not throttled */
    at = ls_put_no_tags(at, flexible);
    ls_store_i32(out, (int32_t)(at - out - 4));
    return (size_t)(at - out);
}
