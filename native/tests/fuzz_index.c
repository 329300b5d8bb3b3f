/* Fuzz target: the input is an index file, sound or not, behind eight bytes to look for.
 *
 * Promise: the search stays within the entries whatever their order, and finds the right one when
 * they are sorted.
 */
#include "check.h"
#include "index.h"

enum { TARGET_BYTES = 8 };

static int64_t first_field(const uint8_t *entry, size_t width)
{
    return width == LS_OFFSET_ENTRY_BYTES ? ls_load_i32(entry) : ls_load_i64(entry);
}

static void check_search(const uint8_t *entries, size_t count, size_t width, int64_t target,
                         int64_t found)
{
    CHECK(found >= -1 && found < (int64_t)count);
    CHECK(found < 0 || first_field(entries + (size_t)found * width, width) <= target);
    int64_t expected = -1;
    for (size_t i = 0; i < count; i++) {
        int64_t field = first_field(entries + i * width, width);
        if (i > 0 && field < first_field(entries + (i - 1) * width, width)) {
            return;                    /* unsorted: only the bounds are promised */
        }
        expected = field <= target ? (int64_t)i : expected;
    }
    CHECK(found == expected);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < TARGET_BYTES) {
        return 0;
    }
    int64_t timestamp = ls_load_i64(data);
    int32_t offset = ls_load_i32(data + 4);
    const uint8_t *entries = data + TARGET_BYTES;
    size_t bytes = size - TARGET_BYTES;

    size_t count = bytes / LS_OFFSET_ENTRY_BYTES;
    check_search(entries, count, LS_OFFSET_ENTRY_BYTES, offset,
                 ls_offset_index_search(entries, count, offset));
    count = bytes / LS_TIME_ENTRY_BYTES;
    check_search(entries, count, LS_TIME_ENTRY_BYTES, timestamp,
                 ls_time_index_search(entries, count, timestamp));
    return 0;
}
