/* Fuzz target: the input is a request of Kafka's protocol, without its size.
 *
 * Promise: what the parser points at is inside the frame; a frame that lacks its last byte, or has one
 * more, is refused; the head of the answer fits its buffer, and starts with the size of the whole.
 */
#include "check.h"
#include "fetch_frame.h"
#include "format.h"

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
    ls_fetch_frame frame;
    if (ls_fetch_frame_parse(data, size, &frame)) {
        CHECK(frame.version >= LS_FETCH_VERSION_MIN && frame.version <= LS_FETCH_VERSION_MAX);
        CHECK(frame.client_id >= data && frame.client_id + frame.client_id_size <= frame.topic);
        CHECK(frame.topic_size <= LS_FETCH_TOPIC_BYTES_MAX);
        CHECK(frame.topic + frame.topic_size <= data + size);
        CHECK(frame.isolation == 0 || frame.isolation == 1);
        ls_fetch_frame other;
        CHECK(!ls_fetch_frame_parse(data, size - 1, &other));
        CHECK(!ls_fetch_frame_parse(longer, size + 1, &other));
        const ls_fetch_offsets offsets = {INT64_MAX, INT64_MAX, 7};
        size_t sizes[] = {0, 126, 127, 16383, 1 << 20, INT32_MAX / 2};
        /* Exact, so that ASan sees a write of one byte too many. */
        size_t room = LS_FETCH_HEAD_BYTES + frame.topic_size;
        uint8_t *head = malloc(room);
        CHECK(head != NULL);
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            size_t written = ls_fetch_frame_head(&frame, &offsets, sizes[i], head);
            CHECK(written > 0 && written <= room);
            CHECK((size_t)ls_load_i32(head) ==
                  written - 4 + sizes[i] + ls_fetch_frame_tail(&frame));
            CHECK(ls_load_i32(head + 4) == frame.correlation_id);
        }
        CHECK(ls_fetch_frame_head(&frame, &offsets, (size_t)INT32_MAX / 2 + 1, head) == 0);
        free(head);
    }
    free(longer);
    return 0;
}
