/* The core in memory: numbers, checksums, batches, columns, index entries. */
#include "batch.h"
#include "check.h"
#include "columns.h"
#include "crc32c.h"
#include "index.h"
#include "murmur2.h"
#include "sample.h"

/* ---- varints ---- */

static size_t encode(uint8_t *data, uint64_t zigzag)
{
    size_t size = (size_t)(ls_varint_store(data, zigzag) - data);
    CHECK(size == ls_varint_size(zigzag));
    return size;
}

static void check_varint64(int64_t value)
{
    uint8_t data[10];
    size_t size = encode(data, ls_zigzag64(value));
    int64_t back = ~value;
    CHECK(ls_varint64_load(data, data + size, &back) == size && back == value);
    for (size_t cut = 0; cut < size; cut++) {
        CHECK(ls_varint64_load(data, data + cut, &back) == 0);
    }
}

static void check_varint32(int32_t value)
{
    uint8_t data[10];
    size_t size = encode(data, ls_zigzag32(value));
    CHECK(size <= 5);
    int32_t back = ~value;
    CHECK(ls_varint32_load(data, data + size, &back) == size && back == value);
    for (size_t cut = 0; cut < size; cut++) {
        CHECK(ls_varint32_load(data, data + cut, &back) == 0);
    }
}

static void varints_round_trip_at_every_edge(void)
{
    for (int bit = 0; bit < 63; bit++) {
        int64_t edge = INT64_C(1) << bit;
        for (int64_t value = edge - 2; value <= edge + 2; value++) {
            check_varint64(value);
            check_varint64(-value);
            if (value >= INT32_MIN && value <= INT32_MAX) {
                check_varint32((int32_t)value);
                check_varint32((int32_t)-value);
            }
        }
    }
    check_varint64(INT64_MAX);
    check_varint64(INT64_MIN);
    check_varint32(INT32_MAX);
    check_varint32(INT32_MIN);
}

static void varints_that_do_not_fit_are_refused(void)
{
    int32_t narrow;
    int64_t wide;
    const uint8_t bits33[] = {0xff, 0xff, 0xff, 0xff, 0x1f};
    const uint8_t six[] = {0x80, 0x80, 0x80, 0x80, 0x80, 0x00};
    const uint8_t bits65[] = {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x03};
    const uint8_t eleven[] = {0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x00};
    CHECK(ls_varint32_load(bits33, bits33 + sizeof bits33, &narrow) == 0);
    CHECK(ls_varint32_load(six, six + sizeof six, &narrow) == 0);
    CHECK(ls_varint64_load(bits65, bits65 + sizeof bits65, &wide) == 0);
    CHECK(ls_varint64_load(eleven, eleven + sizeof eleven, &wide) == 0);
}

/* ---- crc32c ---- */

static uint32_t crc_bitwise(const uint8_t *data, size_t size)
{
    uint32_t crc = ~0u;
    for (size_t i = 0; i < size; i++) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; bit++) {
            crc = (crc >> 1) ^ (0x82f63b78u & (0u - (crc & 1)));
        }
    }
    return ~crc;
}

static void crc_has_the_published_check_value(void)
{
    CHECK(ls_crc32c(0, "123456789", 9) == 0xe3069283u);
    CHECK(ls_crc32c_table(0, "123456789", 9) == 0xe3069283u);
    CHECK(ls_crc32c(0, "", 0) == 0);
}

static void crc_equals_the_bitwise_sum_at_any_size_and_alignment(void)
{
    enum { BYTES = 3 * 8192 * 2 + 3 * 256 + 100 };
    static uint8_t data[BYTES];
    sample_fill(data, sizeof data, 1);
    for (size_t size = 0; size < 1700; size += size < 100 ? 1 : 37) {
        for (size_t at = 0; at < 9; at++) {
            uint32_t expected = crc_bitwise(data + at, size);
            CHECK(ls_crc32c(0, data + at, size) == expected);
            CHECK(ls_crc32c_table(0, data + at, size) == expected);
        }
    }
    /* around the stretches that are summed three at a time */
    const size_t edges[] = {3 * 256, 6 * 256, 3 * 8192, 3 * 8192 + 3 * 256, 6 * 8192};
    for (size_t i = 0; i < sizeof edges / sizeof *edges; i++) {
        for (size_t size = edges[i] - 9; size <= edges[i] + 9; size += 3) {
            CHECK(ls_crc32c(0, data + 5, size) == crc_bitwise(data + 5, size));
        }
    }
}

static void crc_of_two_parts_is_the_crc_of_the_whole(void)
{
    static uint8_t data[3 * 8192 + 500];
    sample_fill(data, sizeof data, 2);
    uint32_t whole = crc_bitwise(data, sizeof data);
    for (size_t cut = 0; cut <= sizeof data; cut += 171) {
        uint32_t crc = ls_crc32c(0, data, cut);
        CHECK(ls_crc32c(crc, data + cut, sizeof data - cut) == whole);
        crc = ls_crc32c_table(0, data, cut);
        CHECK(ls_crc32c_table(crc, data + cut, sizeof data - cut) == whole);
    }
}

/* ---- batches ---- */

static bool same(const uint8_t *data, int32_t size, const char *text)
{
    return text == NULL ? size == -1
                        : size == (int32_t)strlen(text) && memcmp(data, text, strlen(text)) == 0;
}

static void what_the_builder_writes_the_walker_reads(void)
{
    uint8_t headers[64];
    uint8_t *at = ls_header_store(headers, (const uint8_t *)"trace", 5, (const uint8_t *)"42", 2);
    CHECK((size_t)(at - headers) == ls_header_size(5, 2));
    at = ls_header_store(at, (const uint8_t *)"", 0, NULL, -1);

    ls_builder builder;
    ls_builder_init(&builder, 1 << 16, 1 << 20);
    ls_new_record first = sample_record("alice", "12 EUR", 1000);
    first.headers = headers;
    first.headers_size = (size_t)(at - headers);
    first.header_count = 2;
    ls_new_record second = sample_record("bob", NULL, 900);
    ls_new_record third = sample_record(NULL, "", 1700000000000);
    CHECK(ls_builder_add(&builder, &first) == LS_OK);
    CHECK(ls_builder_add(&builder, &second) == LS_OK);
    CHECK(ls_builder_add(&builder, &third) == LS_OK);
    ls_builder_seal(&builder, LS_CODEC_NONE);
    CHECK(builder.records == 3 && builder.arena_max_timestamp == 1700000000000);
    CHECK(ls_batches_finish(builder.data, builder.size, 50, 7, -1) == 53);

    ls_batch batch;
    CHECK(ls_batch_parse(builder.data, builder.size, &batch).code == LS_OK);
    CHECK(batch.base_offset == 50 && batch.last_offset == 52 && batch.record_count == 3);
    CHECK(batch.leader_epoch == 7 && batch.producer_id == -1 && batch.producer_epoch == -1);
    CHECK(batch.base_sequence == -1 && batch.attributes == 0);
    CHECK(batch.base_timestamp == 1000 && batch.max_timestamp == 1700000000000);
    CHECK(batch.size == (int64_t)builder.size && ls_batch_verify(builder.data, &batch));

    ls_records records;
    ls_record record;
    ls_records_open(&records, &batch, builder.data + LS_BATCH_HEADER_BYTES,
                    builder.size - LS_BATCH_HEADER_BYTES);
    CHECK(ls_records_next(&records, &record) == LS_OK);
    CHECK(record.offset == 50 && record.timestamp == 1000 && record.header_count == 2);
    CHECK(same(record.key, record.key_size, "alice"));
    CHECK(same(record.value, record.value_size, "12 EUR"));
    const uint8_t *header_at = record.headers;
    ls_header header;
    ls_header_next(&header_at, record.headers + record.headers_size, &header);
    CHECK(same(header.name, header.name_size, "trace"));
    CHECK(same(header.value, header.value_size, "42"));
    ls_header_next(&header_at, record.headers + record.headers_size, &header);
    CHECK(same(header.name, header.name_size, "") && header.value_size == -1);
    CHECK(header_at == record.headers + record.headers_size);

    CHECK(ls_records_next(&records, &record) == LS_OK);
    CHECK(record.offset == 51 && record.timestamp == 900 && record.header_count == 0);
    CHECK(same(record.key, record.key_size, "bob"));
    CHECK(same(record.value, record.value_size, NULL));
    CHECK(ls_records_next(&records, &record) == LS_OK);
    CHECK(record.offset == 52 && record.timestamp == 1700000000000);
    CHECK(same(record.key, record.key_size, NULL) && same(record.value, record.value_size, ""));
    CHECK(ls_records_next(&records, &record) == LS_END);
    CHECK(ls_records_next(&records, &record) == LS_END);
    ls_builder_free(&builder);
}

static void values_of_every_size_are_copied_whole(void)
{
    for (size_t size = 0; size < 600; size++) {
        uint8_t *value = malloc(size == 0 ? 1 : size); /* exact: ASan guards both ends */
        CHECK(value != NULL);
        sample_fill(value, size, size);
        ls_builder builder;
        ls_builder_init(&builder, 1 << 16, 1 << 16);
        ls_new_record new_record = {
            .key = value,
            .key_size = (int32_t)size,
            .value = value,
            .value_size = (int32_t)size,
        };
        CHECK(ls_builder_add(&builder, &new_record) == LS_OK);
        ls_builder_seal(&builder, LS_CODEC_NONE);
        ls_batches_finish(builder.data, builder.size, 0, 0, -1);
        ls_batch batch;
        CHECK(ls_batch_parse(builder.data, builder.size, &batch).code == LS_OK);
        ls_records records;
        ls_record record;
        ls_records_open(&records, &batch, builder.data + LS_BATCH_HEADER_BYTES,
                        builder.size - LS_BATCH_HEADER_BYTES);
        CHECK(ls_records_next(&records, &record) == LS_OK);
        CHECK(record.key_size == (int32_t)size && record.value_size == (int32_t)size);
        CHECK(memcmp(record.key, value, size) == 0 && memcmp(record.value, value, size) == 0);
        ls_builder_free(&builder);
        free(value);
    }
}

static void timestamps_may_lie_anywhere_in_64_bits(void)
{
    const int64_t times[] = {-1, INT64_MAX, 0, INT64_MIN, 1700000000000};
    enum { COUNT = sizeof times / sizeof *times };
    ls_builder builder;
    ls_builder_init(&builder, 1 << 16, 1 << 16);
    for (int i = 0; i < COUNT; i++) {
        ls_new_record record = sample_record(NULL, "v", times[i]);
        CHECK(ls_builder_add(&builder, &record) == LS_OK);
    }
    ls_builder_seal(&builder, LS_CODEC_NONE);
    ls_batches_finish(builder.data, builder.size, 0, 0, -1);
    ls_batch batch;
    CHECK(ls_batch_parse(builder.data, builder.size, &batch).code == LS_OK);
    ls_records records;
    ls_record record;
    ls_records_open(&records, &batch, builder.data + LS_BATCH_HEADER_BYTES,
                    builder.size - LS_BATCH_HEADER_BYTES);
    for (int i = 0; i < COUNT; i++) {
        CHECK(ls_records_next(&records, &record) == LS_OK && record.timestamp == times[i]);
    }
    ls_builder_free(&builder);
}

static void log_append_time_is_the_time_of_every_record(void)
{
    ls_builder builder;
    ls_builder_init(&builder, 1 << 16, 1 << 16);
    sample_batch(&builder, 2, 5, 1000);
    ls_batches_finish(builder.data, builder.size, 0, 0, 4711);
    ls_batch batch;
    CHECK(ls_batch_parse(builder.data, builder.size, &batch).code == LS_OK);
    CHECK(ls_batch_verify(builder.data, &batch) && batch.max_timestamp == 4711);
    ls_records records;
    ls_record record;
    ls_records_open(&records, &batch, builder.data + LS_BATCH_HEADER_BYTES,
                    builder.size - LS_BATCH_HEADER_BYTES);
    CHECK(ls_records_next(&records, &record) == LS_OK && record.timestamp == 4711);
    CHECK(ls_records_next(&records, &record) == LS_OK && record.timestamp == 4711);
    ls_builder_free(&builder);
}

static void a_full_batch_asks_to_be_sealed_and_the_arena_stays_as_it_was(void)
{
    ls_builder builder;
    ls_builder_init(&builder, 200, 1000);
    ls_new_record record = sample_record("key", "twenty bytes of text", 5);
    int count = 0;
    while (ls_builder_add(&builder, &record) == LS_OK) {
        count++;
    }
    size_t size = builder.size;
    CHECK(count > 1 && size <= 200);
    CHECK(ls_builder_add(&builder, &record) == LS_END);
    CHECK(builder.size == size && builder.open_count == count && builder.records == count);
    ls_builder_seal(&builder, LS_CODEC_NONE);
    CHECK(builder.open_at == size && builder.open_count == 0);
    CHECK(ls_builder_add(&builder, &record) == LS_OK);
    ls_builder_seal(&builder, LS_CODEC_NONE);
    CHECK(builder.size == size + ls_builder_batch_size(&record));
    CHECK(ls_batches_finish(builder.data, builder.size, 10, 0, -1) == 10 + count + 1);
    CHECK(ls_load_i64(builder.data + size) == 10 + count);
    ls_builder_clear(&builder);
    ls_builder_seal(&builder, LS_CODEC_NONE);
    CHECK(builder.size == 0 && builder.records == 0);
    ls_builder_free(&builder);
}

static void a_record_beyond_the_limit_is_refused_to_the_byte(void)
{
    ls_new_record record = sample_record("k", "0123456789", 5);
    size_t size = ls_builder_batch_size(&record);
    ls_builder builder;
    ls_builder_init(&builder, 10, size);               /* above batch_bytes, but alone: allowed */
    CHECK(ls_builder_add(&builder, &record) == LS_OK && builder.size == size);
    ls_builder_free(&builder);
    ls_builder_init(&builder, 10, size - 1);
    CHECK(ls_builder_add(&builder, &record) == LS_E_TOO_LARGE);
    CHECK(builder.size == 0 && builder.records == 0);
    ls_builder_free(&builder);
}

static void a_stamp_numbers_batches_over_the_end_of_the_numbers(void)
{
    ls_builder builder;
    ls_builder_init(&builder, 1 << 16, 1 << 16);
    for (int i = 0; i < 3; i++) {
        sample_batch(&builder, 4, 40, 1000);
    }
    CHECK(ls_batches_stamp(builder.data, builder.size, 1LL << 48, 7, INT32_MAX - 5, true) == 6);
    CHECK(ls_batches_finish(builder.data, builder.size, 100, 2, -1) == 112);
    const int32_t sequences[] = {INT32_MAX - 5, INT32_MAX - 1, 2};
    size_t at = 0;
    for (int i = 0; i < 3; i++) {
        ls_batch batch;
        CHECK(ls_batch_parse(builder.data + at, builder.size - at, &batch).code == LS_OK);
        CHECK(batch.producer_id == 1LL << 48 && batch.producer_epoch == 7);
        CHECK(batch.base_sequence == sequences[i] && batch.base_offset == 100 + 4 * i);
        CHECK(batch.attributes == LS_ATTR_TRANSACTIONAL);
        CHECK(ls_batch_verify(builder.data + at, &batch));
        at += (size_t)batch.size;
    }
    CHECK(at == builder.size);
    CHECK(ls_batches_stamp(builder.data, builder.size, 5, 0, 0, false) == 12);
    ls_batches_finish(builder.data, builder.size, 0, 0, -1);
    CHECK((builder.data[LS_AT_ATTRIBUTES + 1] & LS_ATTR_TRANSACTIONAL) == 0);
    ls_builder_free(&builder);
}

static void a_compressed_payload_takes_the_place_of_the_records(void)
{
    static uint8_t payload[9000];
    sample_fill(payload, sizeof payload, 3);
    ls_builder plain, packed;
    ls_builder_init(&plain, 1 << 16, 1 << 16);
    ls_builder_init(&packed, 1 << 16, 1 << 16);
    sample_batch(&plain, 3, 40, 1000);
    ls_store_i16(plain.data + LS_AT_ATTRIBUTES, LS_CODEC_ZSTD);
    const size_t sizes[] = {1, 30, sizeof payload};
    size_t ends[3];
    for (size_t i = 0; i < 3; i++) {
        CHECK(ls_builder_put_batch(&packed, plain.data, payload, sizes[i]) == LS_OK);
        ends[i] = packed.size;
    }
    CHECK(ls_batches_finish(packed.data, packed.size, 0, 0, -1) == 9);
    for (size_t i = 0, at = 0; i < 3; at = ends[i++]) {
        ls_batch batch;
        const uint8_t *data = packed.data + at;
        CHECK(ls_batch_parse(data, packed.size - at, &batch).code == LS_OK);
        CHECK(ls_batch_codec(&batch) == LS_CODEC_ZSTD && batch.record_count == 3);
        CHECK(batch.base_offset == 3 * (int64_t)i && batch.max_timestamp == 1000);
        CHECK(batch.size == (int64_t)(LS_BATCH_HEADER_BYTES + sizes[i]));
        CHECK(ls_batch_verify(data, &batch));
        CHECK(memcmp(data + LS_BATCH_HEADER_BYTES, payload, sizes[i]) == 0);
    }
    CHECK(ls_builder_put_batch(&packed, plain.data, payload, INT32_MAX) == LS_E_TOO_LARGE);
    CHECK(packed.size == ends[2]);
    ls_builder_free(&plain);
    ls_builder_free(&packed);
}

/* Base offset and leader epoch are outside the checksum, so that a broker can set them. */
static bool outside_the_checksum(size_t at)
{
    return at < LS_AT_LENGTH || (at >= LS_AT_LEADER_EPOCH && at < LS_AT_MAGIC);
}

static void every_flipped_bit_under_the_checksum_is_noticed(void)
{
    ls_builder builder;
    ls_builder_init(&builder, 1 << 16, 1 << 16);
    sample_batch(&builder, 3, 20, 1000);
    ls_batches_finish(builder.data, builder.size, 0, 0, -1);
    for (size_t at = 0; at < builder.size; at++) {
        for (unsigned bit = 0; bit < 8; bit++) {
            builder.data[at] ^= (uint8_t)(1u << bit);
            ls_batch batch;
            bool sound = ls_batch_parse(builder.data, builder.size, &batch).code == LS_OK &&
                         batch.size <= (int64_t)builder.size &&
                         ls_batch_verify(builder.data, &batch);
            CHECK(!sound || outside_the_checksum(at));
            builder.data[at] ^= (uint8_t)(1u << bit);
        }
    }
    ls_builder_free(&builder);
}

static void a_lying_header_is_refused(void)
{
    ls_builder builder;
    ls_builder_init(&builder, 1 << 16, 1 << 16);
    sample_batch(&builder, 3, 20, 1000);
    ls_batches_finish(builder.data, builder.size, 0, 0, -1);
    uint8_t data[LS_BATCH_HEADER_BYTES];
    ls_batch batch;
#define WITH(change, expected)                                                               \
    memcpy(data, builder.data, sizeof data);                                                 \
    change;                                                                                  \
    CHECK(ls_batch_parse(data, sizeof data, &batch).code == (expected))
    WITH((void)0, LS_OK);
    WITH(ls_store_i32(data + LS_AT_LENGTH, LS_LENGTH_MIN - 1), LS_E_CORRUPT);
    WITH(ls_store_i32(data + LS_AT_LENGTH, -1), LS_E_CORRUPT);
    WITH(ls_store_i32(data + LS_AT_LENGTH, INT32_MIN), LS_E_CORRUPT);
    WITH(ls_store_i32(data + LS_AT_LENGTH, INT32_MAX), LS_OK);
    CHECK(batch.size == (int64_t)INT32_MAX + 12);
    WITH(ls_store_i32(data + LS_AT_RECORD_COUNT, -1), LS_E_CORRUPT);
    WITH(ls_store_i32(data + LS_AT_RECORD_COUNT, 4), LS_E_CORRUPT);
    WITH(ls_store_i32(data + LS_AT_RECORD_COUNT, 0), LS_OK);
    WITH(ls_store_i32(data + LS_AT_LAST_OFFSET_DELTA, -1), LS_E_CORRUPT);
    WITH(ls_store_i64(data + LS_AT_BASE_OFFSET, -1), LS_E_CORRUPT);
    WITH(ls_store_i64(data + LS_AT_BASE_OFFSET, INT64_MAX), LS_E_CORRUPT);
    WITH(data[LS_AT_MAGIC] = 0, LS_E_LEGACY);
    WITH(data[LS_AT_MAGIC] = 1, LS_E_LEGACY);
    WITH(data[LS_AT_MAGIC] = 3, LS_E_CORRUPT);
    WITH(memset(data, 0, sizeof data), LS_E_CORRUPT);
#undef WITH
    ls_builder_free(&builder);
}

/* Every single-byte change of a payload: the walk must end, in order and within bounds. */
static void a_damaged_payload_never_leads_outside_of_it(void)
{
    ls_builder builder;
    ls_builder_init(&builder, 1 << 16, 1 << 16);
    sample_batch(&builder, 4, 6, 1000);
    ls_batches_finish(builder.data, builder.size, 0, 0, -1);
    ls_batch batch;
    CHECK(ls_batch_parse(builder.data, builder.size, &batch).code == LS_OK);
    size_t size = builder.size - LS_BATCH_HEADER_BYTES;
    for (size_t at = 0; at < size; at++) {
        for (unsigned byte = 0; byte < 256; byte++) {
            uint8_t *payload = malloc(size);           /* exact: ASan guards both ends */
            CHECK(payload != NULL);
            memcpy(payload, builder.data + LS_BATCH_HEADER_BYTES, size);
            payload[at] = (uint8_t)byte;
            ls_records records;
            ls_record record;
            ls_code code;
            ls_records_open(&records, &batch, payload, size);
            int count = 0;
            while ((code = ls_records_next(&records, &record)) == LS_OK) {
                count++;
            }
            CHECK(count <= 4);
            CHECK(code == LS_END ? count == 4 : code == LS_E_CORRUPT && records.reason[0]);
            free(payload);
        }
    }
    for (size_t cut = 0; cut < size; cut++) {
        uint8_t *payload = malloc(cut + 1);
        CHECK(payload != NULL);
        memcpy(payload, builder.data + LS_BATCH_HEADER_BYTES, cut);
        ls_records records;
        ls_record record;
        ls_code code;
        ls_records_open(&records, &batch, payload, cut);
        while ((code = ls_records_next(&records, &record)) == LS_OK) {
        }
        CHECK(code == LS_E_CORRUPT);
        free(payload);
    }
    ls_builder_free(&builder);
}

static bool same_record(const ls_record *a, const ls_record *b)
{
    return a->offset == b->offset && a->timestamp == b->timestamp && a->key == b->key &&
           a->value == b->value && a->key_size == b->key_size && a->value_size == b->value_size &&
           a->header_count == b->header_count;
}

/* For every single-byte change of a payload: what the quick way takes, the careful way takes too. */
static void the_quick_way_takes_only_what_the_careful_way_would(void)
{
    ls_builder builder;
    ls_builder_init(&builder, 1 << 16, 1 << 16);
    for (int i = 0; i < 6; i++) {
        ls_new_record new_record = sample_record(i % 2 ? "key" : NULL, i % 3 ? "value" : NULL, 50 * i);
        CHECK(ls_builder_add(&builder, &new_record) == LS_OK);
    }
    ls_builder_seal(&builder, LS_CODEC_NONE);
    ls_batches_finish(builder.data, builder.size, 0, 0, -1);
    ls_batch batch;
    CHECK(ls_batch_parse(builder.data, builder.size, &batch).code == LS_OK);
    size_t size = builder.size - LS_BATCH_HEADER_BYTES;
    uint8_t *payload = malloc(size);
    CHECK(payload != NULL);
    memcpy(payload, builder.data + LS_BATCH_HEADER_BYTES, size);
    int taken = 0;
    for (size_t at = 0; at < size; at++) {
        uint8_t original = payload[at];
        for (unsigned byte = 0; byte < 256; byte++) {
            payload[at] = (uint8_t)byte;
            ls_records quick, careful;
            ls_record a, b;
            ls_records_open(&quick, &batch, payload, size);
            careful = quick;
            while (ls_records_quick(&quick, &a)) {
                CHECK(ls_records_next(&careful, &b) == LS_OK && same_record(&a, &b));
                CHECK(quick.at == careful.at && quick.remaining == careful.remaining);
                taken++;
            }
        }
        payload[at] = original;
    }
    CHECK(taken > 0);
    free(payload);
    ls_builder_free(&builder);
}

/* Each lie is named: a user who reads the message knows which field to look at. */
static void the_walker_says_what_is_wrong(void)
{
    static const struct {
        const char *payload;
        size_t size;
        int32_t count;
        const char *reason;
    } cases[] = {
        /* length, attributes, time, offset, key size, value size, header count; zig-zag */
#define CASE(payload, count, reason) {payload, sizeof payload - 1, count, reason}
        CASE("\x0c\0\0\0\1\1\0", 0, "bytes left after"),
        CASE("\x0c\0\0\0\1\1", 1, "length reaches beyond"),
        CASE("\0\0\0\0\1\1\0", 1, "empty record"),
        CASE("\x02\0\x0c\0\0\0", 1, "timestamp"),
        CASE("\x0c\0\0\x0a\1\1\0", 1, "offsets do not increase"),         /* 5 of [0, 4] */
        CASE("\x0c\0\0\1\1\1\0", 1, "offsets do not increase"),           /* -1 */
        CASE("\x0c\0\0\2\1\1\0\x0c\0\0\2\1\1\0", 2, "offsets do not increase"),
        CASE("\x0c\0\0\0\x08\1\0", 1, "key reaches beyond"),
        CASE("\x0c\0\0\0\1\x08\0", 1, "value reaches beyond"),
        CASE("\x0c\0\0\0\1\1\1", 1, "header count"),                    /* -1 */
        CASE("\x0c\0\0\0\1\1\2", 1, "header count"),                    /* 1, but no bytes */
        CASE("\x10\0\0\0\1\1\2\1\1", 1, "headers do not fill"),         /* name size -1 */
        CASE("\x10\0\0\0\1\1\2\0\2", 1, "headers do not fill"),         /* value beyond */
        CASE("\x12\0\0\0\1\1\2\0\0\0", 1, "headers do not fill"),       /* a byte left */
        CASE("\x0e\0\0\0\1\1\0\0", 1, "longer than what it holds"),
#undef CASE
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ls_batch batch = {.last_offset = 4, .record_count = cases[i].count};
        uint8_t *payload = malloc(cases[i].size);
        CHECK(payload != NULL);
        memcpy(payload, cases[i].payload, cases[i].size);
        ls_records records;
        ls_record record;
        ls_code code;
        ls_records_open(&records, &batch, payload, cases[i].size);
        while ((code = ls_records_next(&records, &record)) == LS_OK) {
        }
        CHECK(code == LS_E_CORRUPT && strstr(records.reason, cases[i].reason) != NULL);
        free(payload);
    }
}

/* ---- columns ---- */

static void columns_hold_the_records_of_a_range(void)
{
    ls_builder builder;
    ls_builder_init(&builder, 1 << 16, 1 << 16);
    uint8_t headers[16];
    uint8_t *headers_end = ls_header_store(headers, (const uint8_t *)"h", 1, NULL, -1);
    for (int i = 0; i < 20; i++) {
        ls_new_record record = sample_record(i % 3 ? "key" : NULL, i % 4 ? "value" : NULL, 100 + i);
        if (i % 5 == 0) {
            record.headers = headers;
            record.headers_size = (size_t)(headers_end - headers);
            record.header_count = 1;
        }
        CHECK(ls_builder_add(&builder, &record) == LS_OK);
    }
    ls_builder_seal(&builder, LS_CODEC_NONE);
    ls_batches_finish(builder.data, builder.size, 1000, 0, -1);
    ls_batch batch;
    CHECK(ls_batch_parse(builder.data, builder.size, &batch).code == LS_OK);
    ls_records records;
    ls_records_open(&records, &batch, builder.data + LS_BATCH_HEADER_BYTES,
                    builder.size - LS_BATCH_HEADER_BYTES);

    int64_t expected = 1003;           /* 1003 .. 1017, in chunks of 4 rows */
    bool stopped = false;
    while (!stopped) {
        ls_columns columns;
        CHECK(ls_columns_init(&columns, LS_COLUMN_ALL | LS_COLUMN_TOMBSTONE, 4, 1 << 20, 10) ==
              LS_OK);
        CHECK(ls_columns_fill(&columns, &records, 1003, 1018, &stopped) == LS_OK);
        CHECK(columns.rows == 4 || stopped);
        for (size_t row = 0; row < columns.rows; row++, expected++) {
            int64_t i = expected - 1000;
            CHECK(columns.offsets[row] == expected && columns.timestamps[row] == 100 + i);
            bool has_key = columns.keys.valid[0] & (1u << row);
            bool has_value = columns.values.valid[0] & (1u << row);
            CHECK(has_key == (i % 3 != 0) && has_value == (i % 4 != 0));
            CHECK(columns.tombstones[row] == !has_value);
            int32_t at = columns.values.ends[row];
            CHECK(columns.values.ends[row + 1] - at == (has_value ? 5 : 0));
            CHECK(!has_value || memcmp(columns.values.data + at, "value", 5) == 0);
            CHECK(columns.header_ends[row + 1] - columns.header_ends[row] == (i % 5 == 0));
        }
        ls_columns_free(&columns);
    }
    CHECK(expected == 1018);
    ls_record record;                  /* the one that stopped the scan is still to come */
    CHECK(ls_records_next(&records, &record) == LS_OK && record.offset == 1018);
    CHECK(ls_records_next(&records, &record) == LS_OK && record.offset == 1019);
    CHECK(ls_records_next(&records, &record) == LS_END);
    ls_builder_free(&builder);
}

/* More rows than a block, keys and values missing in patterns: every row as the walker sees it. */
static void columns_of_many_rows_equal_the_walk(void)
{
    enum { ROWS = 1000 };
    ls_builder builder;
    ls_builder_init(&builder, 1 << 20, 1 << 20);
    char value[301];
    uint64_t seed = 5;
    for (int i = 0; i < ROWS; i++) {
        uint64_t random = sample_random(&seed);
        size_t size = random % 8 == 0 ? random >> 8 & 0xff : random >> 8 & 0x1f;
        memset(value, 'a' + i % 26, size);
        value[size] = '\0';
        bool keyless = i < 400 || random >> 20 & 1, null = i % 300 < 150 && random >> 21 & 1;
        ls_new_record record = sample_record(keyless ? NULL : "key", null ? NULL : value, 1000 + i);
        CHECK(ls_builder_add(&builder, &record) == LS_OK);
    }
    ls_builder_seal(&builder, LS_CODEC_NONE);
    ls_batches_finish(builder.data, builder.size, 70, 0, -1);
    ls_batch batch;
    CHECK(ls_batch_parse(builder.data, builder.size, &batch).code == LS_OK);
    const size_t chunks[] = {1, 7, 128, 129, 500, 2000};
    for (size_t chunk = 0; chunk < sizeof chunks / sizeof *chunks; chunk++) {
        ls_records records, walk;
        ls_records_open(&records, &batch, builder.data + LS_BATCH_HEADER_BYTES,
                        builder.size - LS_BATCH_HEADER_BYTES);
        walk = records;
        size_t rows = 0;
        ls_code code;
        do {
            ls_columns columns;
            bool stopped;
            CHECK(ls_columns_init(&columns, LS_COLUMN_ALL | LS_COLUMN_TOMBSTONE, chunks[chunk],
                                  4000, 0) == LS_OK);
            code = ls_columns_fill(&columns, &records, 0, INT64_MAX, &stopped);
            CHECK((code == LS_OK || code == LS_END) && !stopped);
            CHECK(columns.values.size <= 2 * 4000);
            for (size_t row = 0; row < columns.rows; row++, rows++) {
                ls_record record;
                CHECK(ls_records_next(&walk, &record) == LS_OK);
                CHECK(columns.offsets[row] == record.offset);
                CHECK(columns.timestamps[row] == record.timestamp);
                CHECK(columns.tombstones[row] == (record.value_size < 0));
                const ls_bytes_column *both[] = {&columns.keys, &columns.values};
                const uint8_t *data[] = {record.key, record.value};
                const int32_t sizes[] = {record.key_size, record.value_size};
                for (int k = 0; k < 2; k++) {
                    int32_t at = both[k]->ends[row], end = both[k]->ends[row + 1];
                    bool valid = both[k]->valid[row / 8] & (1u << (row % 8));
                    CHECK(valid == (sizes[k] >= 0));
                    CHECK(end - at == (sizes[k] < 0 ? 0 : sizes[k]));
                    CHECK(end == at || memcmp(both[k]->data + at, data[k], (size_t)(end - at)) == 0);
                }
                CHECK(columns.header_ends[row + 1] == 0);
            }
            ls_columns_free(&columns);
        } while (code == LS_OK);
        CHECK(rows == ROWS);
    }
    ls_builder_free(&builder);
}

static void columns_grow_with_values_and_with_headers(void)
{
    enum { HEADERS = 300 };
    static uint8_t headers[HEADERS * 8], value[100000];
    uint8_t *at = headers;
    for (int i = 0; i < HEADERS; i++) {
        at = ls_header_store(at, (const uint8_t *)"name", 4, (const uint8_t *)"v", 1);
    }
    sample_fill(value, sizeof value, 4);
    ls_builder builder;
    ls_builder_init(&builder, 1 << 20, 1 << 20);
    for (int i = 0; i < 3; i++) {
        ls_new_record record = {
            .timestamp = 1,
            .key_size = -1,
            .value = value,
            .value_size = sizeof value,
            .headers = headers,
            .headers_size = (size_t)(at - headers),
            .header_count = HEADERS,
        };
        CHECK(ls_builder_add(&builder, &record) == LS_OK);
    }
    ls_builder_seal(&builder, LS_CODEC_NONE);
    ls_batches_finish(builder.data, builder.size, 0, 0, -1);
    ls_batch batch;
    CHECK(ls_batch_parse(builder.data, builder.size, &batch).code == LS_OK);
    ls_records records;
    ls_records_open(&records, &batch, builder.data + LS_BATCH_HEADER_BYTES,
                    builder.size - LS_BATCH_HEADER_BYTES);
    ls_columns columns;
    bool stopped;
    CHECK(ls_columns_init(&columns, LS_COLUMN_ALL, 10, 1 << 20, 0) == LS_OK);
    CHECK(ls_columns_fill(&columns, &records, 0, INT64_MAX, &stopped) == LS_END);
    CHECK(columns.rows == 3 && columns.header_ends[3] == 3 * HEADERS);
    CHECK(columns.values.size == 3 * sizeof value);
    CHECK(memcmp(columns.values.data + 2 * sizeof value, value, sizeof value) == 0);
    CHECK(memcmp(columns.header_names.data + 4 * (3 * HEADERS - 1), "name", 4) == 0);
    for (size_t i = 0; i < 3 * HEADERS; i++) {
        CHECK(columns.header_values.valid[i / 8] & (1u << (i % 8)));
    }
    ls_columns_free(&columns);
    CHECK(ls_columns_init(&columns, LS_COLUMN_ALL, 0, 1, 0) == LS_E_INVALID);
    ls_builder_free(&builder);
}

/* ---- index ---- */

static void the_search_lands_on_the_last_entry_at_or_before(void)
{
    enum { COUNT = 50 };
    uint8_t offsets[COUNT * LS_OFFSET_ENTRY_BYTES], times[COUNT * LS_TIME_ENTRY_BYTES];
    for (int i = 0; i < COUNT; i++) {
        ls_store_i32(offsets + i * LS_OFFSET_ENTRY_BYTES, 10 * i);
        ls_store_i32(offsets + i * LS_OFFSET_ENTRY_BYTES + 4, 100 * i);
        ls_store_i64(times + i * LS_TIME_ENTRY_BYTES, 10 * i);
        ls_store_i32(times + i * LS_TIME_ENTRY_BYTES + 8, i);
    }
    for (size_t count = 0; count <= COUNT; count++) {
        for (int32_t target = -5; target < 10 * COUNT + 5; target++) {
            int64_t expected = target < 0 ? -1 : target / 10;
            expected = expected < (int64_t)count ? expected : (int64_t)count - 1;
            CHECK(ls_offset_index_search(offsets, count, target) == expected);
            CHECK(ls_time_index_search(times, count, target) == expected);
        }
    }
    CHECK(ls_offset_index_search(offsets, COUNT, INT32_MAX) == COUNT - 1);
    CHECK(ls_time_index_search(times, COUNT, INT64_MIN) == -1);
}

static void entries_follow_kafkas_interval_rule(void)
{
    ls_index_tracker tracker;
    ls_index_tracker_init(&tracker, 1000, 4096);
    const int64_t times[] = {50, 40, 70, 70, 60, 90};  /* of batches of 2,000 bytes, 10 records */
    for (int i = 0; i < 6; i++) {
        ls_batch batch = {
            .base_offset = 1000 + 10 * i,
            .last_offset = 1009 + 10 * i,
            .max_timestamp = times[i],
            .size = 2000,
        };
        CHECK(ls_index_track(&tracker, &batch, 2000 * i) == LS_OK);
    }
    /* More than 4,096 bytes after position 0: at 6,000; the next would be beyond 10,096. */
    CHECK(tracker.offsets.size == LS_OFFSET_ENTRY_BYTES);
    CHECK(ls_load_i32(tracker.offsets.data) == 39 && ls_load_i32(tracker.offsets.data + 4) == 6000);
    CHECK(tracker.times.size == LS_TIME_ENTRY_BYTES);
    CHECK(ls_load_i64(tracker.times.data) == 70);
    CHECK(ls_load_i32(tracker.times.data + 8) == 29);  /* the earliest batch that has it */
    CHECK(ls_index_finish(&tracker) == LS_OK && ls_index_finish(&tracker) == LS_OK);
    CHECK(tracker.times.size == 2 * LS_TIME_ENTRY_BYTES);
    CHECK(ls_load_i64(tracker.times.data + LS_TIME_ENTRY_BYTES) == 90);
    ls_index_tracker_free(&tracker);

    for (int64_t position = 4096; position <= 4097; position++) {
        ls_index_tracker_init(&tracker, 0, 4096);
        ls_batch batch = {.last_offset = 9, .max_timestamp = 1};
        CHECK(ls_index_track(&tracker, &batch, position) == LS_OK);
        CHECK((tracker.offsets.size > 0) == (position > 4096));        /* more than, not at least */
        ls_index_tracker_free(&tracker);
    }
}

static void entries_grow_and_can_be_replaced(void)
{
    ls_index_tracker tracker;
    ls_index_tracker_init(&tracker, 0, 10);
    enum { COUNT = 1000 };
    for (int i = 0; i < COUNT; i++) {
        ls_batch batch = {.base_offset = i, .last_offset = i, .max_timestamp = 100 + i};
        CHECK(ls_index_track(&tracker, &batch, 11 * (i + 1)) == LS_OK);
    }
    CHECK(tracker.offsets.size == COUNT * LS_OFFSET_ENTRY_BYTES);
    CHECK(tracker.times.size == COUNT * LS_TIME_ENTRY_BYTES);
    CHECK(ls_offset_index_search(tracker.offsets.data, COUNT, 777) == 777);
    CHECK(ls_time_index_search(tracker.times.data, COUNT, 100 + 777) == 777);
    CHECK(ls_entries_copy(&tracker.offsets, "12345678", 8) && tracker.offsets.size == 8);
    CHECK(memcmp(tracker.offsets.data, "12345678", 8) == 0);
    CHECK(ls_entries_copy(&tracker.offsets, "", 0) && tracker.offsets.size == 0);
    ls_index_tracker_free(&tracker);
}

/* ---- murmur2 ---- */

static void murmur2_gives_the_values_of_kafkas_own_tests(void)
{
    struct {
        const char *key;
        int32_t hash;
    } known[] = {
        {"21", -973932308},
        {"foobar", -790332482},
        {"a-little-bit-long-string", -985981536},
        {"a-little-bit-longer-string", -1486304829},
        {"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971},
        {"abc", 479470107},
        {"", 275646681},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        CHECK(ls_murmur2(known[i].key, strlen(known[i].key)) == (uint32_t)known[i].hash);
    }
}

int main(void)
{
    void (*tests[])(void) = {
        varints_round_trip_at_every_edge,
        varints_that_do_not_fit_are_refused,
        crc_has_the_published_check_value,
        crc_equals_the_bitwise_sum_at_any_size_and_alignment,
        crc_of_two_parts_is_the_crc_of_the_whole,
        murmur2_gives_the_values_of_kafkas_own_tests,
        what_the_builder_writes_the_walker_reads,
        values_of_every_size_are_copied_whole,
        timestamps_may_lie_anywhere_in_64_bits,
        log_append_time_is_the_time_of_every_record,
        a_full_batch_asks_to_be_sealed_and_the_arena_stays_as_it_was,
        a_record_beyond_the_limit_is_refused_to_the_byte,
        a_stamp_numbers_batches_over_the_end_of_the_numbers,
        a_compressed_payload_takes_the_place_of_the_records,
        every_flipped_bit_under_the_checksum_is_noticed,
        a_lying_header_is_refused,
        a_damaged_payload_never_leads_outside_of_it,
        the_quick_way_takes_only_what_the_careful_way_would,
        the_walker_says_what_is_wrong,
        columns_hold_the_records_of_a_range,
        columns_of_many_rows_equal_the_walk,
        columns_grow_with_values_and_with_headers,
        the_search_lands_on_the_last_entry_at_or_before,
        entries_follow_kafkas_interval_rule,
        entries_grow_and_can_be_replaced,
    };
    size_t count = sizeof tests / sizeof *tests;
    for (size_t i = 0; i < count; i++) {
        tests[i]();
    }
    printf("        test_core: %zu tests passed (crc32c: %s)\n", count,
           ls_crc32c_implementation());
    return 0;
}
