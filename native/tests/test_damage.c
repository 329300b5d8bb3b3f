/* Every byte of a segment of 16 KiB, changed to every other value: seen, or harmless.
 *
 * What a reader and recovery go by is the walk over batches: ls_window_batch, and that offsets follow
 * one another.  The walk over the batches before a changed byte is the walk of an undamaged file, so
 * each case starts at the batch that the byte belongs to, and goes on to the end if it gets past.
 *
 * The CRC-32C of a batch covers everything from its attributes on.  In front of it lie 21 bytes:
 *
 *     base offset   8   in a log without gaps: it must follow the batch before.  With gaps (after a
 *                       compaction) an offset that stays within its gap cannot be told by the walk:
 *                       a digest of the whole file tells
 *     length        4   another length means other bytes under the checksum
 *     leader epoch  4   no record depends on it; the list of epochs that recovery makes shows it, and
 *                       the digest of the whole file
 *     magic         1   only 2 is read here; an old format has a checksum of its own
 *     checksum      4   is compared
 */
#include "check.h"
#include "crc32c.h"
#include "memory_io.h"
#include "sample.h"
#include "segment.h"

enum { SEGMENT_BYTES = 16 << 10, BATCHES_MAX = 64, EPOCHS_MAX = 8 * LS_EPOCH_ENTRY_BYTES };

typedef struct {
    memory_file file;
    int64_t step;                      /* offsets from one batch's base to the next one's; 0: dense */
    int64_t end;                       /* the offset behind the last batch */
    size_t batches;
    size_t positions[BATCHES_MAX + 1];
    ls_batch headers[BATCHES_MAX];
    uint8_t epochs[BATCHES_MAX][EPOCHS_MAX];           /* as seen from each batch on */
    size_t epochs_size[BATCHES_MAX];
} segment;

static ls_code walk(segment *s, size_t from, ls_prefix *prefix)
{
    ls_prefix_init(prefix, &s->file.io, 3, 0, (int64_t)s->positions[from], (int64_t)s->file.size,
                   s->headers[from].base_offset, 4096);
    prefix->dense = s->step == 0;
    prefix->window.ahead = LS_BATCH_HEADER_BYTES;      /* read no more than is looked at */
    ls_status status;
    while ((status = ls_prefix_step(prefix, 1 << 20)).code == LS_OK) {
    }
    return status.code;
}

/* Batches of every kind that the core makes or is given: plain and keyed, with headers, of a
 * producer, transactional, a marker, packed, and of several epochs. */
static void build(segment *s, int64_t step)
{
    memset(s, 0, sizeof *s);
    s->step = step;
    memory_open(&s->file, NULL, 0);
    ls_builder builder;
    ls_builder_init(&builder, 1 << 20, 1 << 20);
    uint8_t noise[400];
    sample_fill(noise, sizeof noise, 7);
    int64_t base = 0;
    while (s->file.size < SEGMENT_BYTES) {
        size_t number = s->batches++;
        uint8_t headers[64];
        uint8_t *headers_end = ls_header_store(headers, (const uint8_t *)"trace", 5, noise, 9);
        headers_end = ls_header_store(headers_end, (const uint8_t *)"none", 4, NULL, -1);
        for (size_t i = 0; i < 1 + number % 7; i++) {
            bool with_headers = number % 3 == 1;
            ls_new_record record = {
                .timestamp = 1000 + (int64_t)(number * 10 + i),
                .key = (const uint8_t *)"key",
                .key_size = number % 2 ? 3 : -1,
                .value = noise + i,
                .value_size = i % 3 == 2 ? -1 : (int32_t)(100 + 31 * i),
                .headers = headers,
                .headers_size = with_headers ? (size_t)(headers_end - headers) : 0,
                .header_count = with_headers ? 2 : 0,
            };
            CHECK(ls_builder_add(&builder, &record) == LS_OK);
        }
        ls_builder_seal(&builder, number % 5 == 4 ? LS_CODEC_ZSTD : LS_CODEC_NONE);
        if (number % 4 >= 2) {
            ls_store_i64(builder.data + LS_AT_PRODUCER_ID, 4000);
            ls_store_i16(builder.data + LS_AT_PRODUCER_EPOCH, 3);
            ls_store_i32(builder.data + LS_AT_BASE_SEQUENCE, (int32_t)number);
            builder.data[LS_AT_ATTRIBUTES + 1] |= number % 4 == 3 ? LS_ATTR_TRANSACTIONAL : 0;
            builder.data[LS_AT_ATTRIBUTES + 1] |= number % 8 == 7 ? LS_ATTR_CONTROL : 0;
        }
        int64_t next = ls_batches_finish(builder.data, builder.size, base, (int32_t)(number / 6),
                                         number % 6 == 5 ? 5000 + (int64_t)number : -1);
        s->positions[number] = s->file.size;
        CHECK(ls_batch_parse(builder.data, builder.size, &s->headers[number]).code == LS_OK);
        memory_put(&s->file, builder.data, builder.size, (int64_t)s->file.size);
        ls_builder_clear(&builder);
        s->end = next;
        base = step == 0 ? next : base + step;
        CHECK(s->batches < BATCHES_MAX && next <= base);
    }
    s->positions[s->batches] = s->file.size;
    for (size_t i = 0; i < s->batches; i++) {
        ls_prefix prefix;
        CHECK(walk(s, i, &prefix) == LS_END);
        CHECK(prefix.position == (int64_t)s->file.size && prefix.next_offset == s->end);
        CHECK(prefix.epochs.size <= EPOCHS_MAX);
        memcpy(s->epochs[i], prefix.epochs.data, prefix.epochs.size);
        s->epochs_size[i] = prefix.epochs.size;
        ls_prefix_free(&prefix);
    }
    ls_builder_free(&builder);
}

typedef struct {
    int64_t changes;
    int64_t seen;                      /* the walk stopped at the batch */
    int64_t epochs;                    /* passed: the leader epoch, shown by the list of epochs */
    int64_t offsets;                   /* passed: a base offset within its gap */
} outcome;

/* The walk got past a changed byte: the place tells what that may be. */
static void judge(const segment *s, size_t number, size_t place, const ls_prefix *prefix,
                  uint32_t digest, outcome *out)
{
    CHECK(prefix->position == (int64_t)s->file.size);
    CHECK(prefix->next_offset == s->end || (s->step != 0 && number + 1 == s->batches));
    CHECK(ls_crc32c(0, s->file.data, s->file.size) != digest);
    if (place >= LS_AT_LEADER_EPOCH && place < LS_AT_LEADER_EPOCH + 4) {
        /* Nothing else changed, so the records are the same. */
        CHECK(prefix->epochs.size != s->epochs_size[number] ||
              memcmp(prefix->epochs.data, s->epochs[number], prefix->epochs.size) != 0);
        out->epochs++;
        return;
    }
    CHECK(s->step != 0 && place < LS_AT_BASE_OFFSET + 8);
    ls_batch moved;
    const uint8_t *data = s->file.data + s->positions[number];
    CHECK(ls_batch_parse(data, LS_BATCH_HEADER_BYTES, &moved).code == LS_OK);
    CHECK(moved.base_offset > s->headers[number].base_offset);
    CHECK(number + 1 == s->batches || moved.last_offset < s->headers[number + 1].base_offset);
    out->offsets++;
}

/* The first `places` bytes of every batch, and no more: 0 for all. */
static outcome change_bytes(segment *s, size_t places)
{
    outcome out = {0};
    uint32_t digest = ls_crc32c(0, s->file.data, s->file.size);
    size_t number = 0;
    for (size_t at = 0; at < s->file.size; at++) {
        if (at == s->positions[number + 1]) {
            number++;
        }
        if (places != 0 && at - s->positions[number] >= places) {
            continue;
        }
        uint8_t *byte = s->file.data + at, before = *byte;
        for (unsigned value = 0; value < 256; value++) {
            if (value == before) {
                continue;
            }
            *byte = (uint8_t)value;
            out.changes++;
            ls_prefix prefix;
            ls_code code = walk(s, number, &prefix);
            if (code == LS_E_CORRUPT && prefix.position == (int64_t)s->positions[number]) {
                out.seen++;
            } else if (code == LS_E_CORRUPT && s->step != 0 && number + 1 < s->batches) {
                /* An offset raised beyond its gap: the next batch does not follow it. */
                CHECK(prefix.position == (int64_t)s->positions[number + 1]);
                CHECK(at - s->positions[number] < LS_AT_BASE_OFFSET + 8);
                out.seen++;
            } else {
                CHECK(code == LS_END);
                judge(s, number, at - s->positions[number], &prefix, digest, &out);
            }
            ls_prefix_free(&prefix);
        }
        *byte = before;
    }
    CHECK(out.seen + out.epochs + out.offsets == out.changes);
    CHECK(ls_crc32c(0, s->file.data, s->file.size) == digest);
    return out;
}

int main(void)
{
    segment *s = malloc(sizeof *s);
    CHECK(s != NULL);
    build(s, 0);
    outcome dense = change_bytes(s, 0);
    CHECK(dense.changes == 255 * (int64_t)s->file.size && dense.changes >= 255 * SEGMENT_BYTES);
    CHECK(dense.offsets == 0);
    CHECK(dense.epochs == 255 * 4 * (int64_t)s->batches);
    printf("        test_damage: %lld changes of a byte in %zu batches, %lld seen, %lld of a leader "
           "epoch\n", (long long)dense.changes, s->batches, (long long)dense.seen,
           (long long)dense.epochs);
    memory_close(&s->file);

    /* With gaps between the batches, only what lies in front of the checksum can make a difference. */
    build(s, 1000);
    outcome sparse = change_bytes(s, LS_AT_ATTRIBUTES);
    CHECK(sparse.epochs == 255 * 4 * (int64_t)s->batches && sparse.offsets > 0);
    printf("        test_damage: with gaps, %lld changes before the checksum: %lld are offsets within "
           "their gap, told by the file's digest alone\n",
           (long long)sparse.changes, (long long)sparse.offsets);
    memory_close(&s->file);
    free(s);
    return 0;
}
