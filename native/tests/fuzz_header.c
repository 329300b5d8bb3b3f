/* Fuzz target: the input is the end of a .log file, with nothing mended, and what is asked of it.
 *
 *     byte 0       how many bytes a read returns at most; 0: all
 *     byte 1       where to start
 *     bytes 2-9    an offset to look for
 *     bytes 10-17  the least offset that may come first
 *     byte 18 ...  the file
 *
 * Promise: a header that is accepted holds together; one that is not has a reason; a batch is only
 * handed out whole and with its checksum right; a search ends, and within the file.
 */
#include "batch.h"
#include "check.h"
#include "crc32c.h"
#include "memory_io.h"
#include "segment.h"

enum { PREFIX_BYTES = 18 };

static void check_parsed(const ls_status *status, const ls_batch *batch)
{
    if (status->code != LS_OK) {
        CHECK(status->code == LS_E_CORRUPT || status->code == LS_E_LEGACY);
        CHECK(status->reason[0] != '\0');
        return;
    }
    CHECK(batch->base_offset >= 0 && batch->last_offset >= batch->base_offset);
    CHECK(batch->last_offset - batch->base_offset <= INT32_MAX);
    CHECK(batch->record_count >= 0);
    CHECK(batch->record_count <= batch->last_offset - batch->base_offset + 1);
    CHECK(batch->size >= LS_BATCH_HEADER_BYTES);
    CHECK(batch->size <= (int64_t)INT32_MAX + LS_LOG_OVERHEAD_BYTES);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < PREFIX_BYTES || size > 1 << 13) {
        return 0;
    }
    memory_file file;
    memory_open(&file, data + PREFIX_BYTES, size - PREFIX_BYTES);
    file.call_bytes_max = data[0];
    int64_t limit = (int64_t)file.size, position = data[1] < limit ? data[1] : limit;
    int64_t left = limit - position;
    ls_batch batch;
    ls_window window;
    ls_window_init(&window, &file.io, 3, 128);

    ls_status status = ls_window_header(&window, position, limit, &batch);
    if (left < LS_BATCH_HEADER_BYTES) {
        CHECK(status.code == (left == 0 ? LS_END : LS_E_CORRUPT));
    } else {
        ls_batch parsed;
        ls_status alone = ls_batch_parse(file.data + position, (size_t)left, &parsed);
        check_parsed(&alone, &parsed);
        CHECK((status.code == LS_OK) == (alone.code == LS_OK && parsed.size <= left));
        CHECK(status.code != LS_E_LEGACY || alone.code == LS_E_LEGACY);
        CHECK(status.position == position);
    }
    const uint8_t *whole = NULL;
    ls_status read = ls_window_batch(&window, position, limit, &batch, &whole);
    if (read.code == LS_OK) {
        CHECK(status.code == LS_OK);
        CHECK(memcmp(whole, file.data + position, (size_t)batch.size) == 0);
        CHECK(ls_crc32c(0, whole + LS_AT_ATTRIBUTES, (size_t)batch.size - LS_AT_ATTRIBUTES) ==
              batch.crc);
    } else {
        CHECK(status.code != LS_OK ? read.code == status.code : read.code == LS_E_CORRUPT);
    }

    int64_t wanted = ls_load_i64(data + 2), least = ls_load_i64(data + 10), found = -1;
    status = ls_window_find(&window, position, limit, wanted, -1, least, &found);
    CHECK(status.code == LS_OK || status.code == LS_END || status.code == LS_E_CORRUPT ||
          status.code == LS_E_LEGACY);
    if (status.code == LS_OK) {
        CHECK(found >= position && limit - found >= LS_BATCH_HEADER_BYTES);
        CHECK(ls_window_header(&window, found, limit, &batch).code == LS_OK);
        CHECK(batch.last_offset >= wanted && batch.base_offset >= least);
    }
    ls_window_free(&window);
    memory_close(&file);
    return 0;
}
