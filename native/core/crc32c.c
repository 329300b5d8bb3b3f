/* CRC-32C three streams wide.
 *
 * The instruction has a latency of three cycles and a throughput of one, so a single stream runs at
 * a third of the machine's speed.  Three neighbouring stretches are therefore summed at once and
 * joined afterwards: crc(A|B) = shift(crc(A), |B|) ^ crc(B), where shift is multiplication by
 * x^(8|B|) modulo the polynomial: linear, hence four table look-ups per join.
 */
#include "crc32c.h"

#include <string.h>

#define POLYNOMIAL 0x82f63b78u

/* Long and short stretches: a batch of 64 KiB is a few long ones, a batch of one record none. */
enum { LONG_BYTES = 8192, SHORT_BYTES = 256 };

typedef struct {
    uint32_t by_byte[8][256];          /* slicing-by-8 */
    uint32_t shift_long[4][256];
    uint32_t shift_short[4][256];
} crc_tables;

static crc_tables tables;

/* Multiplication of two polynomials modulo POLYNOMIAL, both reflected. */
static uint32_t multiply(uint32_t a, uint32_t b)
{
    uint32_t product = 0;
    for (uint32_t bit = 0x80000000u; bit != 0; bit >>= 1) {
        if (a & bit) {
            product ^= b;
        }
        b = (b & 1) ? (b >> 1) ^ POLYNOMIAL : b >> 1;
    }
    return product;
}

static void fill_shift(uint32_t table[4][256], size_t bytes)
{
    uint32_t factor = 0x80000000u;     /* 1 */
    uint32_t square = 0x00800000u;     /* x^8 */
    for (size_t n = bytes; n != 0; n >>= 1) {
        if (n & 1) {
            factor = multiply(factor, square);
        }
        square = multiply(square, square);
    }
    for (unsigned k = 0; k < 4; k++) {
        for (uint32_t byte = 0; byte < 256; byte++) {
            table[k][byte] = multiply(factor, byte << (8 * k));
        }
    }
}

static uint32_t shift(const uint32_t table[4][256], uint32_t crc)
{
    return table[0][crc & 0xff] ^ table[1][(crc >> 8) & 0xff] ^ table[2][(crc >> 16) & 0xff] ^
           table[3][crc >> 24];
}

/* Runs before main or at dlopen, hence before any other thread can call in. */
__attribute__((constructor)) static void fill_tables(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++) {
            crc = (crc & 1) ? (crc >> 1) ^ POLYNOMIAL : crc >> 1;
        }
        tables.by_byte[0][byte] = crc;
    }
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = tables.by_byte[0][byte];
        for (int k = 1; k < 8; k++) {
            crc = tables.by_byte[0][crc & 0xff] ^ (crc >> 8);
            tables.by_byte[k][byte] = crc;
        }
    }
    fill_shift(tables.shift_long, LONG_BYTES);
    fill_shift(tables.shift_short, SHORT_BYTES);
}

static uint64_t load_le64(const uint8_t *p)
{
    uint64_t x;
    memcpy(&x, p, 8);
    return x;
}

uint32_t ls_crc32c_table(uint32_t crc, const void *data, size_t size)
{
    const uint8_t *p = data;
    crc = ~crc;
    while (size >= 8) {
        uint64_t x = load_le64(p) ^ crc;
        crc = 0;
        for (int k = 0; k < 8; k++) {
            crc ^= tables.by_byte[7 - k][(x >> (8 * k)) & 0xff];
        }
        p += 8;
        size -= 8;
    }
    while (size-- > 0) {
        crc = tables.by_byte[0][(crc ^ *p++) & 0xff] ^ (crc >> 8);
    }
    return ~crc;
}

#if defined(__x86_64__)
#include <nmmintrin.h>
#define HARDWARE "sse4.2"
#define HARDWARE_TARGET __attribute__((target("sse4.2")))
#define STEP8(crc, x) _mm_crc32_u64((crc), (x))
#define STEP1(crc, x) _mm_crc32_u8((uint32_t)(crc), (x))
static int hardware_present(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("sse4.2");
}
#elif defined(__aarch64__)
#include <arm_acle.h>
#define HARDWARE "armv8"
#define HARDWARE_TARGET __attribute__((target("+crc")))
#define STEP8(crc, x) __crc32cd((uint32_t)(crc), (x))
#define STEP1(crc, x) __crc32cb((uint32_t)(crc), (x))
#if defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
static int hardware_present(void)
{
    return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
}
#else
static int hardware_present(void)
{
    return 1;                          /* every 64-bit Apple processor has it */
}
#endif
#endif

#ifdef HARDWARE
HARDWARE_TARGET static uint64_t sum_three(uint64_t crc, const uint8_t *p, size_t stretch,
                                          const uint32_t table[4][256])
{
    uint64_t a = crc, b = 0, c = 0;
    for (size_t i = 0; i < stretch; i += 8) {
        a = STEP8(a, load_le64(p + i));
        b = STEP8(b, load_le64(p + stretch + i));
        c = STEP8(c, load_le64(p + 2 * stretch + i));
    }
    a = shift(table, (uint32_t)a) ^ b;
    return shift(table, (uint32_t)a) ^ c;
}

HARDWARE_TARGET static uint32_t crc_hardware(uint32_t start, const void *data, size_t size)
{
    const uint8_t *p = data;
    uint64_t crc = (uint32_t)~start;
    while (size >= 3 * LONG_BYTES) {
        crc = sum_three(crc, p, LONG_BYTES, tables.shift_long);
        p += 3 * LONG_BYTES;
        size -= 3 * LONG_BYTES;
    }
    while (size >= 3 * SHORT_BYTES) {
        crc = sum_three(crc, p, SHORT_BYTES, tables.shift_short);
        p += 3 * SHORT_BYTES;
        size -= 3 * SHORT_BYTES;
    }
    while (size >= 8) {
        crc = STEP8(crc, load_le64(p));
        p += 8;
        size -= 8;
    }
    while (size-- > 0) {
        crc = STEP1(crc, *p++);
    }
    return ~(uint32_t)crc;
}
#endif

typedef uint32_t (*crc_function)(uint32_t, const void *, size_t);
static crc_function chosen = ls_crc32c_table;

__attribute__((constructor)) static void choose(void)
{
#ifdef HARDWARE
    if (hardware_present()) {
        chosen = crc_hardware;
    }
#endif
}

uint32_t ls_crc32c(uint32_t crc, const void *data, size_t size)
{
    return chosen(crc, data, size);
}

const char *ls_crc32c_implementation(void)
{
#ifdef HARDWARE
    if (chosen == crc_hardware) {
        return HARDWARE;
    }
#endif
    return "table";
}
