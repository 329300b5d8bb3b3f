/* Fuzz target: the input is a stretch of a damaged .log file, in which sound batches are to be found.
 *
 *     byte 0      how many bytes a read returns at most; 0: all
 *     byte 1      where the damage starts
 *     byte 2      the least base offset that may be found
 *     byte 3      the greatest offset, 255: any
 *     byte 4      bytes to look at in one call, at least 1
 *     byte 5 ...  the file
 *
 * Promise: what is found is the first sound batch behind the damage, however the search is cut into
 * calls and reads; nothing is found where there is none.  Checksums that start with 0xaa are mended,
 * so that a search can have more than one end.
 */
#include "check.h"
#include "crc32c.h"
#include "memory_io.h"
#include "segment.h"

enum { PREFIX_BYTES = 5 };

static bool sound(const memory_file *file, size_t at, int64_t offset_min, int64_t offset_max)
{
    ls_batch batch;
    return file->size - at >= LS_BATCH_HEADER_BYTES &&
           ls_batch_parse(file->data + at, file->size - at, &batch).code == LS_OK &&
           batch.size <= (int64_t)(file->size - at) && batch.base_offset >= offset_min &&
           batch.last_offset <= offset_max && ls_batch_verify(file->data + at, &batch);
}

static void mend(memory_file *file)
{
    for (size_t at = 0; file->size - at >= LS_BATCH_HEADER_BYTES; at++) {
        uint8_t *data = file->data + at;
        ls_batch batch;
        if (data[LS_AT_CRC] == 0xaa &&
            ls_batch_parse(data, file->size - at, &batch).code == LS_OK &&
            batch.size <= (int64_t)(file->size - at)) {
            ls_store_u32(data + LS_AT_CRC, ls_crc32c(0, data + LS_AT_ATTRIBUTES,
                                                     (size_t)batch.size - LS_AT_ATTRIBUTES));
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < PREFIX_BYTES || size > 1 << 12) {
        return 0;
    }
    memory_file file;
    memory_open(&file, data + PREFIX_BYTES, size - PREFIX_BYTES);
    file.call_bytes_max = data[0];
    mend(&file);
    int64_t position = data[1], limit = (int64_t)file.size;
    int64_t offset_min = data[2], offset_max = data[3] == 255 ? INT64_MAX : data[3];
    int64_t budget = data[4] == 0 ? 1 : data[4];

    int64_t expected = -1;
    for (size_t at = (size_t)position + 1; at < file.size; at++) {
        if (sound(&file, at, offset_min, offset_max)) {
            expected = (int64_t)at;
            break;
        }
    }
    ls_window window;
    ls_window_init(&window, &file.io, 3, LS_WINDOW_BYTES);
    int64_t found = -1;
    for (int64_t calls = 0;; calls++) {
        CHECK(calls <= 2 * limit + 1); /* it ends */
        int64_t reached = -1;
        ls_status status = ls_window_resync(&window, position, limit, offset_min, offset_max, budget,
                                            &found, &reached);
        if (status.code == LS_END || found >= 0) {
            CHECK(status.code == LS_END || status.code == LS_OK);
            break;
        }
        CHECK(status.code == LS_OK && reached > position);
        position = reached;
    }
    CHECK(found == expected);
    ls_window_free(&window);
    memory_close(&file);
    return 0;
}
