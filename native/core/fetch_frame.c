#include "fetch_frame.h"

#include "frame_cursor.h"

enum { TOPIC_ID_BYTES = 16, FETCH_KEY = 1 };

bool ls_fetch_frame_parse(const uint8_t *frame, size_t size, ls_fetch_frame *out)
{
    ls_cursor from = {frame, frame + size, false};
    ls_require(&from, ls_take_i16(&from) == FETCH_KEY);
    int16_t version = out->version = ls_take_i16(&from);
    ls_require(&from, version >= LS_FETCH_VERSION_MIN && version <= LS_FETCH_VERSION_MAX);
    bool flexible = version >= LS_FETCH_VERSION_FLEXIBLE;
    out->correlation_id = ls_take_i32(&from);
    int16_t length = ls_take_i16(&from);
    out->client_id_size = length > 0 ? (size_t)length : 0;
    out->client_id = ls_take(&from, out->client_id_size);
    ls_require_no_tags(&from, flexible);
    ls_require(&from, version > 14 || ls_take_i32(&from) == -1);       /* no replica */
    out->wait_ms = ls_take_i32(&from);
    out->bytes_min = ls_take_i32(&from);
    out->bytes_max = ls_take_i32(&from);
    const uint8_t *isolation = ls_take(&from, 1);
    out->isolation = isolation == NULL ? 0 : (int8_t)*isolation;
    ls_require(&from, out->isolation == 0 || out->isolation == 1);
    if (version >= 7) {
        ls_require(&from, ls_take_i32(&from) == 0 && ls_take_i32(&from) == -1);  /* no session */
    }
    ls_require_one(&from, flexible);
    if (version >= LS_FETCH_VERSION_BY_ID) {
        out->topic_size = TOPIC_ID_BYTES;
        out->topic = ls_take(&from, TOPIC_ID_BYTES);
    } else {
        out->topic = ls_take_sized(&from, flexible, false, &out->topic_size);
        ls_require(&from, out->topic_size <= LS_FETCH_TOPIC_BYTES_MAX);
    }
    ls_require_one(&from, flexible);
    out->partition = ls_take_i32(&from);
    out->leader_epoch = version >= 9 ? ls_take_i32(&from) : -1;
    out->offset = ls_take_i64(&from);
    out->fetched_epoch = flexible ? ls_take_i32(&from) : -1;
    (void)ls_take(&from, version >= 5 ? 8 : 0);                       /* of a replica */
    out->partition_bytes_max = ls_take_i32(&from);
    ls_require_no_tags(&from, flexible);
    ls_require_no_tags(&from, flexible);
    if (version >= 7) {
        ls_require(&from, flexible ? ls_take_uvarint(&from) == 1 : ls_take_i32(&from) == 0);
    }
    if (version >= 11) {
        size_t rack_size;
        (void)ls_take_sized(&from, flexible, false, &rack_size);
    }
    ls_require_no_tags(&from, flexible);
    ls_require(&from, from.at == from.end);
    return !from.refused;
}

size_t ls_fetch_frame_head(const ls_fetch_frame *frame, const ls_fetch_offsets *offsets,
                           size_t records_size, uint8_t *out)
{
    if (records_size > INT32_MAX / 2) {
        return 0;
    }
    int16_t version = frame->version;
    bool flexible = version >= LS_FETCH_VERSION_FLEXIBLE;
    uint8_t *at = ls_put_i32(out + 4, frame->correlation_id);
    at = ls_put_no_tags(at, flexible);                 /* of the header */
    at = ls_put_i32(at, 0);                            /* not throttled */
    if (version >= 7) {
        at = ls_put_i16(at, 0);                        /* no error */
        at = ls_put_i32(at, 0);                        /* no session */
    }
    at = ls_put_one(at, flexible);
    if (version >= LS_FETCH_VERSION_BY_ID) {
        memcpy(at, frame->topic, TOPIC_ID_BYTES);
        at += TOPIC_ID_BYTES;
    } else {
        at = ls_put_string(at, frame->topic, frame->topic_size, flexible);
    }
    at = ls_put_one(at, flexible);
    at = ls_put_i32(at, frame->partition);
    at = ls_put_i16(at, 0);                            /* no error */
    at = ls_put_i64(at, offsets->high_watermark);
    at = ls_put_i64(at, offsets->last_stable_offset);
    if (version >= 5) {
        at = ls_put_i64(at, offsets->start_offset);
    }
    /* Aborted transactions: an empty list, or null for a consumer that reads uncommitted records. */
    if (flexible) {
        *at++ = frame->isolation == 1 ? 1 : 0;
    } else {
        at = ls_put_i32(at, frame->isolation == 1 ? 0 : -1);
    }
    if (version >= 11) {
        at = ls_put_i32(at, -1);                       /* no other replica is preferred */
    }
    if (flexible) {
        at = ls_varint_store(at, records_size + 1);
    } else {
        at = ls_put_i32(at, (int32_t)records_size);
    }
    size_t size = (size_t)(at - out) - 4 + records_size + ls_fetch_frame_tail(frame);
    ls_store_i32(out, (int32_t)size);
    return (size_t)(at - out);
}
