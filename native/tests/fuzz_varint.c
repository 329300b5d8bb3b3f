/* Fuzz target: the input is a varint, or what stands where one was expected.
 *
 * Promise: the loops, the quick way and a plain reading of the rule agree on the number, on the
 * bytes it takes and on what is none; what is stored is read back, in the size that was foretold.
 */
#include "check.h"
#include "format.h"

/* Base 128, least significant first, at most `bits` of payload: bytes taken, or 0. */
static size_t plain(const uint8_t *data, size_t size, unsigned bits, uint64_t *out)
{
    uint64_t value = 0;
    for (size_t i = 0; i < size && i * 7 < bits; i++) {
        for (unsigned bit = 0; bit < 7; bit++) {
            if (data[i] >> bit & 1) {
                if (i * 7 + bit >= bits) {
                    return 0;          /* if it ends here it does not fit; else it is too long */
                }
                value |= UINT64_C(1) << (i * 7 + bit);
            }
        }
        if (data[i] < 0x80) {
            *out = value;
            return i + 1;
        }
    }
    return 0;
}

static void check_stored(uint64_t zigzag)
{
    uint8_t stored[16];
    size_t size = (size_t)(ls_varint_store(stored, zigzag) - stored);
    CHECK(size == ls_varint_size(zigzag) && size <= 10);
    uint64_t again = ~zigzag;
    CHECK(plain(stored, size, 64, &again) == size && again == zigzag);
    int64_t loaded;
    CHECK(ls_varint64_load(stored, stored + size, &loaded) == size);
    CHECK(ls_zigzag64(loaded) == zigzag && ls_unzigzag64(zigzag) == loaded);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const uint8_t *end = data + size;
    for (size_t at = 0; at < size; at++) {
        uint64_t expected = 0;
        int32_t narrow = 0;
        size_t taken = ls_varint32_load(data + at, end, &narrow);
        CHECK(taken == plain(data + at, size - at, 32, &expected));
        CHECK(taken == 0 || ls_zigzag32(narrow) == expected);
        CHECK(taken == 0 || ls_unzigzag32((uint32_t)expected) == narrow);
        if (size - at >= 8) {
            uint32_t zigzag = 0;
            const uint8_t *behind = ls_varint_quick(data + at, &zigzag);
            CHECK(behind == NULL || (behind == data + at + taken && zigzag == expected));
            CHECK(behind != NULL || taken == 0 || taken > 3);
        }
        int64_t wide = 0;
        taken = ls_varint64_load(data + at, end, &wide);
        CHECK(taken == plain(data + at, size - at, 64, &expected));
        if (taken != 0) {
            CHECK(ls_zigzag64(wide) == expected);
            check_stored(expected);
        }
    }
    return 0;
}
