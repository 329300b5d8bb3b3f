/* Fuzz target: the input is a .log file after the worst of days.
 *
 * Promise: the valid prefix is made of whole, verified batches with increasing offsets; what stands
 * behind it can be searched; nothing outside the file is read, in short pieces or long.
 * Checksums of the leading batches are mended first, or no input would have a prefix.
 */
#include "check.h"
#include "crc32c.h"
#include "memory_io.h"
#include "segment.h"

static void mend(memory_file *file)
{
    size_t at = 0;
    ls_batch batch;
    while (file->size - at >= LS_BATCH_HEADER_BYTES &&
           ls_batch_parse(file->data + at, file->size - at, &batch).code == LS_OK &&
           batch.size <= (int64_t)(file->size - at)) {
        uint8_t *data = file->data + at;
        if (data[LS_AT_CRC] != 0xee) { /* a seed's way to keep a wrong checksum wrong */
            ls_store_u32(data + LS_AT_CRC, ls_crc32c(0, data + LS_AT_ATTRIBUTES,
                                                     (size_t)batch.size - LS_AT_ATTRIBUTES));
        }
        at += (size_t)batch.size;
    }
}

static void check_prefix(memory_file *file, int64_t end, int64_t next_offset)
{
    ls_window window;
    ls_window_init(&window, &file->io, 3, LS_WINDOW_BYTES);
    int64_t position = 0, expected = 0;
    while (position < end) {
        ls_batch batch;
        const uint8_t *data;
        CHECK(ls_window_batch(&window, position, end, &batch, &data).code == LS_OK);
        CHECK(batch.base_offset >= expected);
        CHECK(memcmp(data, file->data + position, (size_t)batch.size) == 0);
        expected = batch.last_offset + 1;
        int64_t found = -1;
        CHECK(ls_window_find(&window, 0, end, batch.base_offset, -1, 0, &found).code == LS_OK);
        CHECK(found == position);
        position += batch.size;
    }
    CHECK(position == end && expected == next_offset);
    ls_window_free(&window);
}

static void check_resync(memory_file *file, int64_t position)
{
    ls_window window;
    ls_window_init(&window, &file->io, 3, LS_WINDOW_BYTES);
    int64_t found = -1, limit = (int64_t)file->size;
    for (int i = 0; i < 100; i++) {
        int64_t reached = position;
        ls_status status = ls_window_resync(&window, position, limit, 0, INT64_MAX, 500, &found,
                                            &reached);
        if (status.code == LS_END) {
            break;
        }
        CHECK(status.code == LS_OK);
        CHECK(found >= 0 || reached > position);
        if (found >= 0) {
            ls_batch batch;
            const uint8_t *data;
            CHECK(found > position);
            CHECK(ls_window_batch(&window, found, limit, &batch, &data).code == LS_OK);
            break;
        }
        position = reached;
    }
    ls_window_free(&window);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 1 || size > 1 << 13) {
        return 0;
    }
    memory_file file;
    memory_open(&file, data + 1, size - 1);
    file.call_bytes_max = data[0];     /* 0: whole transfers */
    mend(&file);

    ls_prefix prefix;
    ls_prefix_init(&prefix, &file.io, 3, 0, 0, (int64_t)file.size, 0, 128);
    ls_status status;
    while ((status = ls_prefix_step(&prefix, 200)).code == LS_OK) {
    }
    CHECK(status.code == LS_END || status.code == LS_E_CORRUPT || status.code == LS_E_LEGACY);
    CHECK(prefix.position <= (int64_t)file.size);
    CHECK(status.code != LS_END || prefix.position == (int64_t)file.size);
    CHECK(ls_index_finish(&prefix.index) == LS_OK);
    check_prefix(&file, prefix.position, prefix.next_offset);
    check_resync(&file, prefix.position);
    ls_prefix_free(&prefix);
    memory_close(&file);
    return 0;
}
