/* Compaction's core: the map of keys, batches with fewer records, transactions, verdicts. */
#include "cleaner.h"
#include "batch_keep.h"
#include "check.h"
#include "crc32c.h"
#include "offset_map.h"
#include "sample.h"

static const uint8_t SECRET[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* ---- the map ---- */

static void the_hash_is_siphash_with_128_bits(void)
{
    /* Of the published vectors: the messages "", 00, 00 01 with the key 00 .. 0f. */
    static const uint8_t expected[3][16] = {
        {0xa3, 0x81, 0x7f, 0x04, 0xba, 0x25, 0xa8, 0xe6, 0x6d, 0xf6, 0x72, 0x14, 0xc7, 0x55, 0x02,
         0x93},
        {0xda, 0x87, 0xc1, 0xd8, 0x6b, 0x99, 0xaf, 0x44, 0x34, 0x76, 0x59, 0x11, 0x9b, 0x22, 0xfc,
         0x45},
        {0x81, 0x77, 0x22, 0x8d, 0xa4, 0xa4, 0x5d, 0xc7, 0xfc, 0xa3, 0x8b, 0xde, 0xf6, 0x0a, 0xff,
         0xe4},
    };
    uint64_t secret[2];
    memcpy(secret, SECRET, 16);
    for (size_t size = 0; size < 3; size++) {
        ls_key_hash hash = ls_siphash(secret, SECRET, size);
        CHECK(memcmp(&hash, expected[size], 16) == 0);
    }
}

static ls_key_hash hash_of(const ls_offset_map *map, uint64_t key)
{
    return ls_offset_map_hash(map, (const uint8_t *)&key, sizeof key);
}

static void the_map_holds_what_was_put_up_to_nine_tenths(void)
{
    ls_offset_map map;
    CHECK(ls_offset_map_init(&map, 1000 * sizeof(ls_offset_slot) + 23, SECRET) == LS_OK);
    CHECK(map.capacity == 1000 && map.limit == 900 && map.latest_offset == -1);
    for (uint64_t key = 0; key < 900; key++) {
        CHECK(ls_offset_map_get(&map, hash_of(&map, key)) == -1);
        CHECK(ls_offset_map_put(&map, hash_of(&map, key), (int64_t)key * 3) == LS_OK);
    }
    CHECK(ls_offset_map_put(&map, hash_of(&map, 900), 5000) == LS_END);
    CHECK(map.count == 900 && map.latest_offset == 899 * 3);
    CHECK(ls_offset_map_put(&map, hash_of(&map, 7), 6000) == LS_OK);       /* known: there is room */
    CHECK(ls_offset_map_put(&map, hash_of(&map, 7), 10) == LS_OK);         /* an older one */
    CHECK(map.latest_offset == 6000);
    for (uint64_t key = 0; key < 900; key++) {
        CHECK(ls_offset_map_get(&map, hash_of(&map, key)) == (key == 7 ? 6000 : (int64_t)key * 3));
    }
    CHECK(ls_offset_map_get(&map, hash_of(&map, 900)) == -1);
    ls_offset_map_clear(&map);
    CHECK(map.count == 0 && map.latest_offset == -1);
    CHECK(ls_offset_map_get(&map, hash_of(&map, 7)) == -1);
    ls_offset_map_free(&map);
}

static void a_map_without_room_is_refused(void)
{
    ls_offset_map map;
    CHECK(ls_offset_map_init(&map, 0, SECRET) == LS_E_INVALID);
    CHECK(ls_offset_map_init(&map, 47, SECRET) == LS_E_INVALID);
    CHECK(ls_offset_map_init(&map, 48, SECRET) == LS_OK && map.limit == 1);
    CHECK(ls_offset_map_put(&map, hash_of(&map, 1), 0) == LS_OK);
    CHECK(ls_offset_map_put(&map, hash_of(&map, 2), 1) == LS_END);
    CHECK(ls_offset_map_get(&map, hash_of(&map, 2)) == -1);
    ls_offset_map_free(&map);
}

/* ---- batches ---- */

typedef struct {
    ls_builder builder;
    ls_batch batch;
    const uint8_t *data;
    const uint8_t *payload;
    size_t size;
} sample;

/* A batch of records k0..k(n-1) at offsets 100.., with the given times; a NULL value for `dead`. */
static void sample_open(sample *s, const int64_t *times, int32_t count, int32_t dead,
                        unsigned attributes)
{
    ls_builder_init(&s->builder, 1 << 20, 1 << 20);
    for (int32_t i = 0; i < count; i++) {
        char key[16];
        snprintf(key, sizeof key, "k%d", (int)i);
        ls_new_record record = sample_record(key, i == dead ? NULL : "value", times[i]);
        uint8_t header[32];
        uint8_t *end = ls_header_store(header, (const uint8_t *)"h", 1, (const uint8_t *)"x", 1);
        record.headers = header;
        record.headers_size = (size_t)(end - header);
        record.header_count = 1;
        CHECK(ls_builder_add(&s->builder, &record) == LS_OK);
    }
    ls_builder_seal(&s->builder, 0);
    uint8_t *data = s->builder.data;
    ls_batches_finish(data, s->builder.size, 100, 5, -1);
    data[LS_AT_ATTRIBUTES + 1] = (uint8_t)attributes;
    ls_store_i64(data + LS_AT_PRODUCER_ID, 77);
    ls_store_i16(data + LS_AT_PRODUCER_EPOCH, 3);
    ls_store_i32(data + LS_AT_BASE_SEQUENCE, 900);
    if (attributes & LS_ATTR_LOG_APPEND_TIME) {
        ls_store_i64(data + LS_AT_MAX_TIMESTAMP, 12345);
    }
    ls_store_u32(data + LS_AT_CRC,
                 ls_crc32c(0, data + LS_AT_ATTRIBUTES, s->builder.size - LS_AT_ATTRIBUTES));
    CHECK(ls_batch_parse(data, s->builder.size, &s->batch).code == LS_OK);
    CHECK(ls_batch_verify(data, &s->batch));
    s->data = data;
    s->payload = data + LS_BATCH_HEADER_BYTES;
    s->size = s->builder.size - LS_BATCH_HEADER_BYTES;
}

static void sample_close(sample *s)
{
    ls_builder_free(&s->builder);
}

static void fewer_records_keep_everything_else(void)
{
    const int64_t times[] = {50, -1, 70, INT64_MAX, 60};
    for (unsigned mask = 1; mask < 32; mask++) {
        for (int variant = 0; variant < 4; variant++) {
            bool by_log = variant & 1, horizon = variant & 2;
            unsigned attributes = LS_ATTR_TRANSACTIONAL | (by_log ? LS_ATTR_LOG_APPEND_TIME : 0);
            sample s;
            sample_open(&s, times, 5, 2, attributes);
            uint8_t keep[5];
            for (unsigned i = 0; i < 5; i++) {
                keep[i] = (uint8_t)(mask >> i & 1);
            }
            ls_bytes out = {0};
            CHECK(ls_batch_keep(&out, s.data, &s.batch, s.payload, s.size, keep,
                                s.batch.last_offset, horizon ? 4000 : LS_NO_HORIZON) == LS_OK);
            CHECK(ls_batch_seal(&out, 0) == LS_OK);
            ls_batch batch;
            CHECK(ls_batch_parse(out.data, out.size, &batch).code == LS_OK);
            CHECK(ls_batch_verify(out.data, &batch) && batch.size == (int64_t)out.size);
            CHECK(batch.base_offset == 100 && batch.last_offset == 104 && batch.leader_epoch == 5);
            CHECK(batch.producer_id == 77 && batch.producer_epoch == 3);
            CHECK(batch.base_sequence == 900);
            CHECK(batch.attributes == (attributes | (horizon ? LS_ATTR_DELETE_HORIZON : 0)));
            CHECK(!horizon || batch.base_timestamp == 4000);
            ls_records old, new;
            ls_record a, b;
            ls_records_open(&old, &s.batch, s.payload, s.size);
            ls_records_open(&new, &batch, out.data + LS_BATCH_HEADER_BYTES,
                            out.size - LS_BATCH_HEADER_BYTES);
            int64_t newest = INT64_MIN;
            for (unsigned i = 0; i < 5; i++) {
                CHECK(ls_records_next(&old, &a) == LS_OK);
                if (!keep[i]) {
                    continue;
                }
                CHECK(ls_records_next(&new, &b) == LS_OK);
                CHECK(a.offset == b.offset && a.timestamp == b.timestamp);
                CHECK(a.key_size == b.key_size && memcmp(a.key, b.key, (size_t)a.key_size) == 0);
                CHECK(a.value_size == b.value_size && a.header_count == b.header_count);
                CHECK(a.headers_size == b.headers_size &&
                      memcmp(a.headers, b.headers, (size_t)a.headers_size) == 0);
                newest = b.timestamp > newest ? b.timestamp : newest;
            }
            CHECK(ls_records_next(&new, &b) == LS_END);
            CHECK(batch.max_timestamp == (by_log ? 12345 : newest));
            ls_bytes_free(&out);
            sample_close(&s);
        }
    }
}

static void a_batch_of_no_records_is_its_header(void)
{
    /* The empty batch of the format's examples: offsets 20 to 24, producer 7/2, sequence 100. */
    static const uint8_t expected[] = {
        0, 0, 0, 0, 0, 0, 0, 0x14, 0, 0, 0, 0x31, 0, 0, 0, 3, 2, 0x4f, 0x30, 0x74, 0xbf, 0, 0x10,
        0, 0, 0, 4, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0x1e, 0x61,
        0, 0, 0, 0, 0, 0, 0, 7, 0, 2, 0, 0, 0, 0x64, 0, 0, 0, 0};
    uint8_t header[LS_BATCH_HEADER_BYTES];
    memcpy(header, expected, sizeof header);
    ls_store_i64(header + LS_AT_BASE_TIMESTAMP, 5000);
    ls_store_i32(header + LS_AT_RECORD_COUNT, 5);
    ls_store_i32(header + LS_AT_LENGTH, 1000);
    header[LS_AT_ATTRIBUTES + 1] |= LS_ATTR_DELETE_HORIZON | LS_CODEC_ZSTD;
    ls_bytes out = {0};
    CHECK(ls_batch_keep_header(&out, header) == LS_OK && ls_batch_seal(&out, 0) == LS_OK);
    CHECK(out.size == sizeof expected && memcmp(out.data, expected, out.size) == 0);
    ls_bytes_free(&out);
}

static void a_payload_that_lies_is_never_followed_outside(void)
{
    const int64_t times[] = {1, 2, 3};
    sample s;
    sample_open(&s, times, 3, -1, 0);
    uint8_t keep[3] = {1, 0, 1};
    for (size_t at = 0; at < s.size; at++) {
        for (unsigned bit = 0; bit < 8; bit++) {
            uint8_t *copy = malloc(s.size);
            CHECK(copy != NULL);
            memcpy(copy, s.payload, s.size);
            copy[at] ^= (uint8_t)(1u << bit);
            ls_bytes out = {0};
            ls_code code = ls_batch_keep(&out, s.data, &s.batch, copy, s.size, keep,
                                         s.batch.last_offset, LS_NO_HORIZON);
            CHECK(code == LS_OK || code == LS_E_CORRUPT);
            ls_bytes_free(&out);
            free(copy);
        }
    }
    sample_close(&s);
}

/* ---- verdicts ---- */

static ls_code clean(ls_cleaner *cleaner, const sample *s)
{
    bool pack;
    size_t at;
    const char *reason = "";
    ls_code code = ls_cleaner_batch(cleaner, s->data, &s->batch, s->payload, s->size, &pack, &at,
                                    &reason);
    CHECK(code != LS_OK || !pack);
    return code;
}

static void a_forged_count_takes_no_memory(void)
{
    const int64_t times[] = {1, 2, 3};
    sample s;
    sample_open(&s, times, 3, -1, 0);
    uint8_t forged[LS_BATCH_HEADER_BYTES];
    memcpy(forged, s.data, sizeof forged);
    ls_store_i32(forged + LS_AT_LAST_OFFSET_DELTA, INT32_MAX - 1);
    ls_store_i32(forged + LS_AT_RECORD_COUNT, INT32_MAX);
    ls_batch parsed;
    ls_status status = ls_batch_parse(forged, sizeof forged, &parsed);
    CHECK(status.code == LS_E_CORRUPT && status.reason == ls_too_many_records);
    forged[LS_AT_ATTRIBUTES + 1] |= LS_CODEC_LZ4;      /* then only the payload tells */
    CHECK(ls_batch_parse(forged, sizeof forged, &parsed).code == LS_OK);
    ls_offset_map map;
    CHECK(ls_offset_map_init(&map, 100 * sizeof(ls_offset_slot), SECRET) == LS_OK);
    s.batch.record_count = INT32_MAX;
    for (int control = 0; control < 2; control++) {
        s.batch.attributes = control ? LS_ATTR_CONTROL : 0;
        ls_clean_rules rules = {.map = control ? NULL : &map, .end_offset = INT64_MAX};
        ls_cleaner cleaner;
        ls_cleaner_init(&cleaner, &rules, 0, 4096);
        ls_code code = clean(&cleaner, &s);
        CHECK(code == (control ? LS_OK : LS_E_CORRUPT));       /* a marker that stays is copied */
        CHECK(cleaner.keep.capacity == 0);
        ls_cleaner_free(&cleaner);
    }
    ls_offset_map_free(&map);
    sample_close(&s);
}

static void newer_offsets_of_a_key_take_its_place(void)
{
    const int64_t times[] = {1, 2, 3};
    sample s;
    sample_open(&s, times, 3, -1, 0);
    ls_offset_map map;
    CHECK(ls_offset_map_init(&map, 4800, SECRET) == LS_OK);
    CHECK(ls_offset_map_put(&map, ls_offset_map_hash(&map, (const uint8_t *)"k1", 2), 500) == LS_OK);
    ls_clean_rules rules = {.map = &map, .end_offset = -1};
    ls_cleaner cleaner;
    ls_cleaner_init(&cleaner, &rules, 100, 0);
    CHECK(clean(&cleaner, &s) == LS_OK);
    CHECK(cleaner.counts.records_kept == 2 && cleaner.counts.superseded == 1);
    CHECK(cleaner.counts.batches_rewritten == 1);
    /* What lies above the map's reach is not judged. */
    map.latest_offset = 100;
    cleaner.out.size = 0;
    CHECK(clean(&cleaner, &s) == LS_OK);
    CHECK(cleaner.counts.records_kept == 5);
    CHECK(cleaner.out.size == s.builder.size && memcmp(cleaner.out.data, s.data, s.builder.size) == 0);
    ls_cleaner_free(&cleaner);
    ls_offset_map_free(&map);
    sample_close(&s);
}

static void an_emptied_batch_stays_as_header_only_where_it_must(void)
{
    const int64_t times[] = {1, 2};
    sample s;
    sample_open(&s, times, 2, -1, 0);
    ls_offset_map map;
    CHECK(ls_offset_map_init(&map, 4800, SECRET) == LS_OK);
    CHECK(ls_offset_map_put(&map, ls_offset_map_hash(&map, (const uint8_t *)"k0", 2), 500) == LS_OK);
    CHECK(ls_offset_map_put(&map, ls_offset_map_hash(&map, (const uint8_t *)"k1", 2), 501) == LS_OK);
    const ls_producer_end here = {77, 101, 3}, elsewhere = {77, 900, 3}, other = {76, 101, 3};
    struct {
        int64_t end_offset;
        const ls_producer_end *producer;
        bool stays;
    } cases[] = {
        {-1, NULL, false},        {102, NULL, true},    {101, NULL, false},
        {-1, &here, true},        {-1, &elsewhere, false}, {-1, &other, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ls_clean_rules rules = {
            .map = &map,
            .end_offset = cases[i].end_offset,
            .producers = cases[i].producer,
            .producer_count = cases[i].producer != NULL,
        };
        ls_cleaner cleaner;
        ls_cleaner_init(&cleaner, &rules, 100, 0);
        CHECK(clean(&cleaner, &s) == LS_OK);
        CHECK(cleaner.out.size == (cases[i].stays ? (size_t)LS_BATCH_HEADER_BYTES : 0));
        ls_cleaner_free(&cleaner);
    }
    ls_offset_map_free(&map);
    sample_close(&s);
}

static void a_tombstone_goes_in_the_second_round_at_the_earliest(void)
{
    const int64_t times[] = {1, 2};
    sample s;
    sample_open(&s, times, 2, 1, 0);
    ls_offset_map map;
    CHECK(ls_offset_map_init(&map, 4800, SECRET) == LS_OK);
    map.latest_offset = 1000;
    ls_clean_rules rules = {
        .map = &map, .end_offset = -1, .now_ms = 10000, .delete_retention_ms = 500};
    ls_cleaner first, early, second;
    ls_cleaner_init(&first, &rules, 100, 0);
    CHECK(clean(&first, &s) == LS_OK);
    CHECK(first.counts.records_kept == 2 && first.counts.tombstones == 0);
    sample again = s;
    again.data = first.out.data;
    CHECK(ls_batch_parse(again.data, first.out.size, &again.batch).code == LS_OK);
    CHECK(again.batch.attributes & LS_ATTR_DELETE_HORIZON && again.batch.base_timestamp == 10500);
    again.payload = again.data + LS_BATCH_HEADER_BYTES;
    again.size = first.out.size - LS_BATCH_HEADER_BYTES;
    rules.now_ms = 10499;
    ls_cleaner_init(&early, &rules, 100, 0);
    CHECK(clean(&early, &again) == LS_OK && early.counts.records_kept == 2);
    CHECK(early.out.size == first.out.size);
    rules.now_ms = 10500;
    ls_cleaner_init(&second, &rules, 100, 0);
    CHECK(clean(&second, &again) == LS_OK && second.counts.records_kept == 1);
    CHECK(second.counts.tombstones == 1);
    ls_cleaner_free(&first);
    ls_cleaner_free(&early);
    ls_cleaner_free(&second);
    ls_offset_map_free(&map);
    sample_close(&s);
}

static void a_purge_takes_one_key_and_nothing_else(void)
{
    const int64_t times[] = {1, 2, 3};
    sample s;
    sample_open(&s, times, 3, 2, 0);
    ls_clean_rules rules = {.key = (const uint8_t *)"k1", .key_size = 2, .end_offset = -1};
    ls_cleaner cleaner;
    ls_cleaner_init(&cleaner, &rules, 100, 0);
    CHECK(clean(&cleaner, &s) == LS_OK);
    CHECK(cleaner.counts.purged == 1 && cleaner.counts.last_purged_offset == 101);
    CHECK(cleaner.counts.records_kept == 2);
    ls_batch batch;
    CHECK(ls_batch_parse(cleaner.out.data, cleaner.out.size, &batch).code == LS_OK);
    CHECK(!(batch.attributes & LS_ATTR_DELETE_HORIZON));
    ls_cleaner_free(&cleaner);
    rules.start_offset = 102;          /* it lies below what may be touched */
    ls_cleaner_init(&cleaner, &rules, 100, 0);
    CHECK(clean(&cleaner, &s) == LS_OK && cleaner.counts.purged == 0);
    CHECK(cleaner.out.size == s.builder.size);
    ls_cleaner_free(&cleaner);
    sample_close(&s);
}

static void a_full_map_says_how_far_it_got(void)
{
    const int64_t times[] = {1, 2, 3, 4};
    sample s;
    sample_open(&s, times, 4, -1, 0);
    ls_offset_map map;
    const char *reason;
    CHECK(ls_offset_map_init(&map, 3 * sizeof(ls_offset_slot), SECRET) == LS_OK);
    CHECK(map.limit == 2);
    CHECK(ls_offset_map_read(&map, &s.batch, s.payload, s.size, 0, &reason) == LS_END);
    CHECK(map.latest_offset == 101 && map.count == 2);
    ls_offset_map_clear(&map);
    CHECK(ls_offset_map_read(&map, &s.batch, s.payload, s.size, 102, &reason) == LS_OK);
    CHECK(map.latest_offset == 103 && map.count == 2);
    ls_offset_map_free(&map);
    sample_close(&s);
}

/* ---- transactions ---- */

static void put_entry(uint8_t *at, int64_t producer, int64_t first, int64_t last)
{
    memset(at, 0, LS_ABORTED_BYTES);
    ls_store_i64(at + 2, producer);
    ls_store_i64(at + 10, first);
    ls_store_i64(at + 18, last);
    ls_store_i64(at + 26, last + 1);
}

static ls_batch data_of(int64_t producer, int64_t first, int64_t last)
{
    return (ls_batch){.producer_id = producer, .base_offset = first, .last_offset = last,
                      .record_count = 1, .attributes = LS_ATTR_TRANSACTIONAL};
}

static bool is_aborted(ls_transactions *t, int64_t producer, int64_t first, int64_t last)
{
    ls_batch batch = data_of(producer, first, last);
    bool aborted;
    CHECK(ls_transactions_data(t, &batch, &aborted) == LS_OK);
    return aborted;
}

static bool is_useless(ls_transactions *t, int64_t producer, int64_t offset, uint8_t type,
                       bool *entry)
{
    ls_batch batch = data_of(producer, offset, offset);
    batch.attributes |= LS_ATTR_CONTROL;
    uint8_t record[] = {0x20, 0, 0, 0, 8, 0, 0, 0, type, 12, 0, 0, 0, 0, 0, 9, 0};
    bool useless;
    const ls_aborted *kept;
    CHECK(ls_transactions_marker(t, &batch, record, sizeof record, &useless, &kept) == LS_OK);
    *entry = kept != NULL;
    CHECK(kept == NULL || (kept->producer_id == producer && kept->last_offset == offset));
    return useless;
}

static void markers_outlive_their_data(void)
{
    enum { ABORT = 0, COMMIT = 1 };
    uint8_t entries[3 * LS_ABORTED_BYTES];
    put_entry(entries, 2, 12, 30);     /* not in order: two transactions, interleaved */
    put_entry(entries + LS_ABORTED_BYTES, 1, 10, 20);
    put_entry(entries + 2 * LS_ABORTED_BYTES, 1, 40, 41);
    ls_transactions t;
    bool entry;
    CHECK(ls_transactions_init(&t, entries, sizeof entries) == LS_OK);
    CHECK(!is_aborted(&t, 1, 0, 4));
    CHECK(!is_useless(&t, 1, 5, COMMIT, &entry) && !entry);
    CHECK(is_useless(&t, 1, 6, COMMIT, &entry));                /* nothing of it is left */
    CHECK(is_aborted(&t, 1, 10, 11) && is_aborted(&t, 2, 12, 15));
    CHECK(!is_aborted(&t, 3, 16, 17));
    CHECK(!is_useless(&t, 1, 20, ABORT, &entry) && entry);
    CHECK(!is_aborted(&t, 1, 21, 22));                          /* the next one goes on */
    CHECK(!is_useless(&t, 1, 23, COMMIT, &entry));
    CHECK(!is_useless(&t, 2, 30, ABORT, &entry) && entry);
    CHECK(!is_useless(&t, 3, 31, COMMIT, &entry));
    CHECK(is_useless(&t, 1, 41, ABORT, &entry) && !entry);      /* its data went before */
    CHECK(!is_useless(&t, 9, 50, 3, &entry));                   /* a marker of another kind */
    ls_transactions_free(&t);
}

static void a_tracker_that_starts_late_forgets_what_ended_before(void)
{
    uint8_t entries[LS_ABORTED_BYTES + 5];
    put_entry(entries, 1, 10, 20);
    ls_transactions t;
    CHECK(ls_transactions_init(&t, entries, sizeof entries) == LS_OK && t.count == 1);
    CHECK(!is_aborted(&t, 1, 25, 26));
    ls_transactions_free(&t);
    CHECK(ls_transactions_init(&t, entries, sizeof entries) == LS_OK);
    CHECK(is_aborted(&t, 1, 15, 16));
    CHECK(!is_aborted(&t, 1, 25, 26));
    ls_transactions_free(&t);
}

int main(void)
{
    void (*tests[])(void) = {
        the_hash_is_siphash_with_128_bits,
        the_map_holds_what_was_put_up_to_nine_tenths,
        a_map_without_room_is_refused,
        fewer_records_keep_everything_else,
        a_batch_of_no_records_is_its_header,
        a_payload_that_lies_is_never_followed_outside,
        a_forged_count_takes_no_memory,
        newer_offsets_of_a_key_take_its_place,
        an_emptied_batch_stays_as_header_only_where_it_must,
        a_tombstone_goes_in_the_second_round_at_the_earliest,
        a_purge_takes_one_key_and_nothing_else,
        a_full_map_says_how_far_it_got,
        markers_outlive_their_data,
        a_tracker_that_starts_late_forgets_what_ended_before,
    };
    size_t count = sizeof tests / sizeof *tests;
    for (size_t i = 0; i < count; i++) {
        tests[i]();
    }
    printf("        test_cleaner: %zu tests passed\n", count);
    return 0;
}
