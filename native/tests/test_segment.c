/* The core over files: appends that fail, windows, the valid prefix, the search behind damage. */
#define _GNU_SOURCE                    /* mkdtemp, symlinkat, O_DIRECTORY under -std=c11 */
#include <fcntl.h>
#include <unistd.h>

#include "check.h"
#include "memory_io.h"
#include "sample.h"
#include "segment.h"

enum { FD = 3 };                       /* memory_io looks at no descriptor */

/* A log of five batches with 1, 2, 3, 4 and 5 records; `ends[i]` is where batch i ends. */
static void five_batches(ls_builder *builder, int64_t ends[5])
{
    ls_builder_init(builder, 1 << 20, 1 << 20);
    for (int32_t i = 0; i < 5; i++) {
        sample_batch(builder, i + 1, 50, 1000 + i);
        ends[i] = (int64_t)builder->size;
    }
    CHECK(ls_batches_finish(builder->data, builder->size, 0, 0, -1) == 15);
}

/* ---- reads and writes ---- */

static void short_and_interrupted_calls_are_completed(void)
{
    static uint8_t data[5000], back[6000];
    sample_fill(data, sizeof data, 1);
    memory_file file;
    memory_open(&file, NULL, 0);
    file.call_bytes_max = 7;
    file.interrupt_every = 3;
    CHECK(ls_write_at(&file.io, FD, data, sizeof data, 100).code == LS_OK);
    CHECK(file.size == 100 + sizeof data);
    size_t got;
    CHECK(ls_read_at(&file.io, FD, back, sizeof back, 100, &got).code == LS_OK);
    CHECK(got == sizeof data && memcmp(data, back, got) == 0);
    CHECK(ls_read_at(&file.io, FD, back, 10, 1 << 20, &got).code == LS_OK && got == 0);
    memory_close(&file);
}

static void a_failed_append_leaves_nothing_behind(void)
{
    ls_builder builder;
    int64_t ends[5];
    five_batches(&builder, ends);
    size_t first = (size_t)ends[0], rest = builder.size - first;
    for (int call = 1; call <= 4; call++) {
        for (size_t torn = 0; torn < 80; torn += 13) {
            memory_file file;
            memory_open(&file, builder.data, first);
            file.call_bytes_max = 100;
            file.fail_at[CALL_WRITE] = call;
            file.fail_errno[CALL_WRITE] = ENOSPC;
            file.torn_bytes = torn;
            ls_status status = ls_append(&file.io, FD, builder.data + first, rest, ends[0]);
            CHECK(status.code == LS_E_IO && status.os_errno == ENOSPC);
            CHECK(status.position == ends[0] + 100 * (call - 1));
            CHECK(file.size == first && memcmp(file.data, builder.data, first) == 0);
            memory_close(&file);
        }
    }
    ls_builder_free(&builder);
}

static void two_parts_are_appended_like_one(void)
{
    enum { HEAD = 16 };
    static uint8_t data[3000];
    sample_fill(data, sizeof data, 2);
    for (size_t part = 1; part < 3100; part += part < 40 ? 1 : 511) {
        memory_file file;
        memory_open(&file, data, 10);
        file.call_bytes_max = part;
        file.interrupt_every = 3;
        CHECK(ls_append_parts(&file.io, FD, data + 10, HEAD, data + 10 + HEAD,
                              sizeof data - 10 - HEAD, 10).code == LS_OK);
        CHECK(file.size == sizeof data && memcmp(file.data, data, sizeof data) == 0);
        memory_close(&file);
    }
    for (int call = 1; call <= 3; call++) {
        memory_file file;
        memory_open(&file, data, 10);
        file.call_bytes_max = 12;
        file.fail_at[CALL_WRITE] = call;
        file.fail_errno[CALL_WRITE] = ENOSPC;
        file.torn_bytes = 5;
        ls_status status = ls_append_parts(&file.io, FD, data + 10, HEAD, data + 10 + HEAD, 500, 10);
        CHECK(status.code == LS_E_IO && status.os_errno == ENOSPC && file.size == 10);
        memory_close(&file);
    }
}

static void an_append_that_cannot_be_taken_back_says_so(void)
{
    memory_file file;
    memory_open(&file, "before", 6);
    file.fail_at[CALL_WRITE] = 1;
    file.fail_errno[CALL_WRITE] = EIO;
    file.fail_at[CALL_TRUNCATE] = 1;
    file.fail_errno[CALL_TRUNCATE] = EROFS;
    file.torn_bytes = 3;
    ls_status status = ls_append(&file.io, FD, "behind", 6, 6);
    CHECK(status.code == LS_E_UNDONE && status.os_errno == EIO);
    CHECK(file.size == 9);
    memory_close(&file);
}

static void the_posix_functions_do_what_their_names_say(void)
{
    char folder[] = "/tmp/logstore-core-XXXXXX";
    CHECK(mkdtemp(folder) != NULL);
    int directory = open(folder, O_RDONLY | O_DIRECTORY);
    CHECK(directory >= 0);
    const ls_io *io = &ls_io_posix;
    int fd = io->open(io, directory, "a.log", O_RDWR | O_CREAT | O_EXCL, 0644);
    CHECK(fd > STDERR_FILENO);
    CHECK(io->open(io, directory, "a.log", O_RDWR | O_CREAT | O_EXCL, 0644) == -EEXIST);
    CHECK(ls_append(io, fd, "0123456789", 10, 0).code == LS_OK);
    CHECK(io->size(io, fd) == 10 && io->truncate(io, fd, 4) == 0 && io->size(io, fd) == 4);
    CHECK(io->datasync(io, fd) == 0 && io->sync(io, fd) == 0 && io->sync(io, directory) == 0);
    uint8_t back[10];
    size_t got;
    CHECK(ls_read_at(io, fd, back, 10, 1, &got).code == LS_OK);
    CHECK(got == 3 && memcmp(back, "123", 3) == 0);
    CHECK(io->rename(io, directory, "a.log", "b.log") == 0);
    CHECK(io->open(io, directory, "a.log", O_RDWR, 0) == -ENOENT);
    CHECK(symlinkat("b.log", directory, "link.log") == 0);
    CHECK(io->open(io, directory, "link.log", O_RDWR, 0) == -ELOOP);
    CHECK(io->unlink(io, directory, "link.log") == 0 && io->unlink(io, directory, "b.log") == 0);
    CHECK(io->close(io, fd) == 0);
    ls_status status = ls_append(io, fd, "x", 1, 0);   /* closed: neither write nor cut works */
    CHECK(status.code == LS_E_UNDONE && status.os_errno == EBADF);
    close(directory);
    CHECK(rmdir(folder) == 0);
}

/* ---- windows ---- */

static void a_window_yields_every_batch_however_reads_are_cut(void)
{
    ls_builder builder;
    int64_t ends[5];
    five_batches(&builder, ends);
    for (size_t piece = 0; piece < 70; piece += 23) {
        memory_file file;
        memory_open(&file, builder.data, builder.size);
        file.call_bytes_max = piece;
        ls_window window;
        ls_window_init(&window, &file.io, FD, LS_WINDOW_BYTES);
        int64_t position = 0, limit = (int64_t)builder.size;
        ls_batch batch;
        const uint8_t *data;
        for (int i = 0; i < 5; i++) {
            CHECK(ls_window_batch(&window, position, limit, &batch, &data).code == LS_OK);
            CHECK(batch.record_count == i + 1 && position + batch.size == ends[i]);
            CHECK(memcmp(data, builder.data + position, (size_t)batch.size) == 0);
            position = ends[i];
        }
        CHECK(ls_window_batch(&window, position, limit, &batch, &data).code == LS_END);
        for (int i = 4; i >= 0; i--) { /* and backwards */
            position = i == 0 ? 0 : ends[i - 1];
            CHECK(ls_window_batch(&window, position, limit, &batch, &data).code == LS_OK);
            CHECK(batch.record_count == i + 1);
        }
        ls_window_free(&window);
        memory_close(&file);
    }
    ls_builder_free(&builder);
}

static void a_window_sees_nothing_beyond_its_limit(void)
{
    ls_builder builder;
    int64_t ends[5];
    five_batches(&builder, ends);
    memory_file file;
    memory_open(&file, builder.data, builder.size);
    ls_window window;
    ls_window_init(&window, &file.io, FD, LS_WINDOW_BYTES);
    ls_batch batch;
    const uint8_t *data;
    CHECK(ls_window_batch(&window, ends[0], ends[0], &batch, &data).code == LS_END);
    for (int64_t limit = ends[0] + 1; limit < ends[1]; limit++) {
        ls_status status = ls_window_batch(&window, ends[0], limit, &batch, &data);
        CHECK(status.code == LS_E_CORRUPT && status.position == ends[0]);
    }
    CHECK(ls_window_batch(&window, ends[0], ends[1], &batch, &data).code == LS_OK);
    ls_window_free(&window);
    memory_close(&file);
    ls_builder_free(&builder);
}

static void a_huge_batch_is_read_whole_but_not_on_its_word(void)
{
    ls_builder builder;
    ls_builder_init(&builder, 4 * LS_TRUSTED_BYTES, 4 * LS_TRUSTED_BYTES);
    sample_batch(&builder, 3, LS_TRUSTED_BYTES / 2, 1000);
    sample_batch(&builder, 1, 10, 1001);
    ls_batches_finish(builder.data, builder.size, 0, 0, -1);
    memory_file file;
    memory_open(&file, builder.data, builder.size);
    ls_window window;
    ls_window_init(&window, &file.io, FD, LS_WINDOW_BYTES);
    ls_batch batch;
    const uint8_t *data;
    int64_t limit = (int64_t)builder.size;
    CHECK(ls_window_batch(&window, 0, limit, &batch, &data).code == LS_OK);
    CHECK(batch.record_count == 3 && memcmp(data, builder.data, (size_t)batch.size) == 0);
    CHECK(ls_window_batch(&window, batch.size, limit, &batch, &data).code == LS_OK);
    CHECK(batch.record_count == 1);

    file.data[LS_WINDOW_BYTES + 1000] ^= 1;            /* damage in the middle of the large one */
    ls_window_free(&window);
    ls_window_init(&window, &file.io, FD, LS_WINDOW_BYTES);
    CHECK(ls_window_batch(&window, 0, limit, &batch, &data).code == LS_E_CORRUPT);
    CHECK(window.capacity <= LS_WINDOW_BYTES);         /* no memory was taken on its word */
    ls_window_free(&window);
    memory_close(&file);
    ls_builder_free(&builder);
}

static void a_failed_read_is_an_io_error_and_passes(void)
{
    ls_builder builder;
    int64_t ends[5];
    five_batches(&builder, ends);
    memory_file file;
    memory_open(&file, builder.data, builder.size);
    file.call_bytes_max = 40;
    ls_window window;
    ls_window_init(&window, &file.io, FD, LS_WINDOW_BYTES);
    ls_batch batch;
    const uint8_t *data;
    for (int call = 1; call < 10; call++) {
        file.fail_at[CALL_READ] = file.calls[CALL_READ] + call;
        file.fail_errno[CALL_READ] = EIO;
        ls_status status = {.code = LS_OK};
        for (int64_t at = 0; at < ends[4] && status.code == LS_OK; at += batch.size) {
            status = ls_window_batch(&window, at, ends[4], &batch, &data);
        }
        CHECK(status.code == LS_OK || (status.code == LS_E_IO && status.os_errno == EIO));
        CHECK(ls_window_batch(&window, ends[2], ends[4], &batch, &data).code != LS_E_CORRUPT);
    }
    file.fail_at[CALL_READ] = 0;
    CHECK(ls_window_batch(&window, ends[2], ends[4], &batch, &data).code == LS_OK);
    CHECK(batch.record_count == 4);
    ls_window_free(&window);
    memory_close(&file);
    ls_builder_free(&builder);
}

static void find_lands_on_the_batch_that_holds_the_offset(void)
{
    ls_builder builder;
    int64_t ends[5], found;
    five_batches(&builder, ends);
    memory_file file;
    memory_open(&file, builder.data, builder.size);
    ls_window window;
    ls_window_init(&window, &file.io, FD, LS_WINDOW_BYTES);
    int64_t offset = 0;
    for (int i = 0; i < 5; i++) {
        for (int k = 0; k <= i; k++, offset++) {
            CHECK(ls_window_find(&window, 0, ends[4], offset, -1, 0, &found).code == LS_OK);
            CHECK(found == (i == 0 ? 0 : ends[i - 1]));
        }
    }
    CHECK(ls_window_find(&window, 0, ends[4], 15, -1, 0, &found).code == LS_END);
    /* an index that promises the wrong batch is found out, whatever is looked for */
    CHECK(ls_window_find(&window, ends[0], ends[4], 5, 2, 0, &found).code == LS_OK);
    CHECK(found == ends[1]);
    CHECK(ls_window_find(&window, ends[0], ends[4], 5, 3, 0, &found).code == LS_E_CORRUPT);
    /* so are offsets that go back */
    CHECK(ls_window_find(&window, 0, ends[4], 5, -1, 1, &found).code == LS_E_CORRUPT);
    ls_window_free(&window);
    memory_close(&file);
    ls_builder_free(&builder);
}

/* ---- the valid prefix ---- */

static ls_status run_prefix(ls_prefix *prefix, memory_file *file, int64_t budget)
{
    ls_prefix_init(prefix, &file->io, FD, 0, 0, (int64_t)file->size, 0, 100);
    ls_status status;
    while ((status = ls_prefix_step(prefix, budget)).code == LS_OK) {
    }
    return status;
}

static void a_span_is_of_whole_batches_below_its_bounds(void)
{
    static const int64_t last[] = {0, 2, 5, 9, 14};    /* of 1, 2, 3, 4 and 5 records */
    ls_builder builder;
    int64_t ends[5];
    five_batches(&builder, ends);
    memory_file file;
    memory_open(&file, builder.data, builder.size);
    for (int64_t end = 0; end <= ends[4]; end++) {
        for (int64_t stop = 0; stop <= 16; stop++) {
            ls_window window;
            ls_window_init(&window, &file.io, FD, 100);
            int64_t reached = -1, next_offset = -1;
            CHECK(ls_window_span(&window, 0, ends[4], end, stop, &reached, &next_offset).code ==
                  LS_OK);
            int count = 0;
            while (count < 5 && ends[count] <= end && last[count] < stop) {
                count++;
            }
            CHECK(reached == (count == 0 ? -1 : ends[count - 1]));
            CHECK(next_offset == (count == 0 ? -1 : last[count - 1] + 1));
            ls_window_free(&window);
        }
    }
    for (int damaged = 0; damaged < 5; damaged++) {
        int64_t at = (damaged == 0 ? 0 : ends[damaged - 1]) + LS_AT_MAGIC;
        file.data[at] = 77;
        ls_window window;
        ls_window_init(&window, &file.io, FD, 100);
        int64_t reached = -1, next_offset = -1;
        ls_status status =
            ls_window_span(&window, 0, ends[4], ends[4], 100, &reached, &next_offset);
        CHECK(status.code == (damaged == 0 ? LS_E_CORRUPT : LS_OK));
        CHECK(reached == (damaged == 0 ? -1 : ends[damaged - 1]));
        ls_window_free(&window);
        file.data[at] = 2;
    }
    memory_close(&file);
    ls_builder_free(&builder);
}

static void the_prefix_of_a_torn_log_ends_at_the_last_whole_batch(void)
{
    ls_builder builder;
    int64_t ends[5];
    five_batches(&builder, ends);
    for (int64_t cut = 0; cut <= ends[4]; cut++) {
        memory_file file;
        memory_open(&file, builder.data, (size_t)cut);
        int whole = 0;
        while (whole < 5 && ends[whole] <= cut) {
            whole++;
        }
        int64_t end = whole == 0 ? 0 : ends[whole - 1];
        ls_prefix prefix;
        ls_status status = run_prefix(&prefix, &file, cut % 2 ? 1 : 1 << 20);
        CHECK(status.code == (cut == end ? LS_END : LS_E_CORRUPT));
        CHECK(prefix.position == end && prefix.batches == whole);
        CHECK(prefix.next_offset == whole * (whole + 1) / 2);
        CHECK(prefix.first_timestamp == (whole == 0 ? -1 : 1000));
        ls_prefix_free(&prefix);
        memory_close(&file);
    }
    ls_builder_free(&builder);
}

static void zeroes_and_garbage_behind_the_log_end_its_prefix(void)
{
    ls_builder builder;
    int64_t ends[5];
    five_batches(&builder, ends);
    for (int fill = 0; fill < 256; fill += 51) {
        memory_file file;
        memory_open(&file, builder.data, builder.size);
        memory_resize(&file, builder.size + 4096);
        memset(file.data + builder.size, fill, 4096);
        ls_prefix prefix;
        ls_status status = run_prefix(&prefix, &file, 1 << 20);
        CHECK(status.code == LS_E_CORRUPT && status.position == ends[4]);
        CHECK(prefix.position == ends[4] && prefix.next_offset == 15);
        ls_prefix_free(&prefix);
        memory_close(&file);
    }
    ls_builder_free(&builder);
}

static void a_flipped_byte_cuts_the_prefix_at_its_batch(void)
{
    ls_builder builder;
    int64_t ends[5];
    five_batches(&builder, ends);
    memory_file file;
    memory_open(&file, builder.data, builder.size);
    for (int64_t at = ends[1]; at < ends[2]; at++) {
        file.data[at] ^= 0x80;
        ls_prefix prefix;
        ls_status status = run_prefix(&prefix, &file, 1 << 20);
        int64_t in_batch = at - ends[1];
        bool epoch = in_batch >= LS_AT_LEADER_EPOCH && in_batch < LS_AT_MAGIC;
        bool offset = in_batch < LS_AT_LENGTH;
        /* the epoch is outside the checksum; a larger offset may be a gap left by compaction,
         * and is then contradicted by the batch behind it */
        CHECK(epoch ? status.code == LS_END : status.code == LS_E_CORRUPT);
        CHECK(prefix.position >= ends[1]);
        CHECK(epoch || offset || prefix.position == ends[1]);
        ls_prefix_free(&prefix);
        file.data[at] ^= 0x80;
    }
    memory_close(&file);
    ls_builder_free(&builder);
}

static void an_io_error_is_no_evidence_about_the_data(void)
{
    ls_builder builder;
    int64_t ends[5];
    five_batches(&builder, ends);
    for (int call = 1; call < 20; call++) {
        memory_file file;
        memory_open(&file, builder.data, builder.size);
        file.call_bytes_max = 100;
        file.fail_at[CALL_READ] = call;
        file.fail_errno[CALL_READ] = EIO;
        ls_prefix prefix;
        ls_status status = run_prefix(&prefix, &file, 1 << 20);
        CHECK(status.code == LS_E_IO || (status.code == LS_END && file.calls[CALL_READ] < call));
        /* the same object goes on where it was */
        while ((status = ls_prefix_step(&prefix, 1 << 20)).code == LS_OK) {
        }
        CHECK(status.code == LS_END && prefix.position == ends[4] && prefix.batches == 5);
        ls_prefix_free(&prefix);
        memory_close(&file);
    }
    ls_builder_free(&builder);
}

static void a_dense_prefix_takes_no_gap(void)
{
    ls_builder builder;
    int64_t ends[5];
    five_batches(&builder, ends);
    ls_store_i64(builder.data + ends[3], 12);          /* was 10 */
    memory_file file;
    memory_open(&file, builder.data, builder.size);
    for (int dense = 0; dense < 2; dense++) {
        ls_prefix prefix;
        ls_prefix_init(&prefix, &file.io, FD, 0, 0, ends[4], 0, 100);
        prefix.dense = dense;
        ls_status status;
        while ((status = ls_prefix_step(&prefix, 1 << 20)).code == LS_OK) {
        }
        CHECK(status.code == (dense ? LS_E_CORRUPT : LS_END));
        CHECK(prefix.position == (dense ? ends[3] : ends[4]));
        ls_prefix_free(&prefix);
    }
    memory_close(&file);
    ls_builder_free(&builder);
}

static void the_prefix_tells_where_the_leader_epoch_changes(void)
{
    ls_builder builder;
    int64_t ends[5];
    five_batches(&builder, ends);
    const int32_t epochs[5] = {0, 3, 3, 1, 1};         /* outside the checksum: even going back */
    for (int i = 1; i < 5; i++) {
        ls_store_i32(builder.data + ends[i - 1] + 12, epochs[i]);
    }
    memory_file file;
    memory_open(&file, builder.data, builder.size);
    ls_prefix prefix;
    CHECK(run_prefix(&prefix, &file, 1).code == LS_END);
    CHECK(prefix.epochs.size == 3 * LS_EPOCH_ENTRY_BYTES);
    const int64_t expected[3][2] = {{0, 0}, {3, 1}, {1, 6}};
    for (int i = 0; i < 3; i++) {
        const uint8_t *entry = prefix.epochs.data + i * LS_EPOCH_ENTRY_BYTES;
        CHECK(ls_load_i32(entry) == expected[i][0] && ls_load_i64(entry + 4) == expected[i][1]);
    }
    ls_prefix_free(&prefix);
    memory_close(&file);
    ls_builder_free(&builder);
}

static void a_rebuilt_index_equals_the_one_of_live_appends(void)
{
    ls_builder builder;
    int64_t ends[5];
    five_batches(&builder, ends);
    ls_index_tracker live;
    ls_index_tracker_init(&live, 0, 100);
    for (int i = 0; i < 5; i++) {
        int64_t at = i == 0 ? 0 : ends[i - 1];
        ls_batch batch;
        CHECK(ls_batch_parse(builder.data + at, (size_t)(ends[4] - at), &batch).code == LS_OK);
        CHECK(ls_index_track(&live, &batch, at) == LS_OK);
    }
    memory_file file;
    memory_open(&file, builder.data, builder.size);
    ls_prefix prefix;
    CHECK(run_prefix(&prefix, &file, 1).code == LS_END);
    CHECK(live.offsets.size > 0 && live.offsets.size == prefix.index.offsets.size);
    CHECK(memcmp(live.offsets.data, prefix.index.offsets.data, live.offsets.size) == 0);
    CHECK(live.times.size > 0 && live.times.size == prefix.index.times.size);
    CHECK(memcmp(live.times.data, prefix.index.times.data, live.times.size) == 0);
    ls_index_tracker_free(&live);
    ls_prefix_free(&prefix);
    memory_close(&file);
    ls_builder_free(&builder);
}

/* ---- behind damage ---- */

static int64_t resync(memory_file *file, int64_t position, int64_t min, int64_t max,
                      int64_t budget)
{
    ls_window window;
    ls_window_init(&window, &file->io, FD, LS_WINDOW_BYTES);
    int64_t found = -1, reached = -1;
    ls_status status;
    do {
        status = ls_window_resync(&window, position, (int64_t)file->size, min, max, budget, &found,
                                  &reached);
        CHECK(status.code == LS_OK || status.code == LS_END);
        CHECK(status.code == LS_END || found >= 0 || reached > position);
        position = reached;
    } while (status.code == LS_OK && found < 0);
    ls_window_free(&window);
    return found;
}

static void resync_finds_the_next_sound_batch(void)
{
    ls_builder builder;
    int64_t ends[5];
    five_batches(&builder, ends);
    memory_file file;
    memory_open(&file, builder.data, builder.size);
    const int64_t budgets[] = {1, 100, 1 << 20};
    for (int i = 0; i < 3; i++) {
        CHECK(resync(&file, 0, 0, 1000, budgets[i]) == ends[0]);
        CHECK(resync(&file, ends[1], 0, 1000, budgets[i]) == ends[2]);
        CHECK(resync(&file, ends[3], 0, 1000, budgets[i]) == -1);
        CHECK(resync(&file, 0, 6, 1000, budgets[i]) == ends[2]);       /* offsets from 6 on */
        CHECK(resync(&file, 0, 0, 0, budgets[i]) == -1);
    }
    file.data[ends[1] + 70] ^= 1;
    CHECK(resync(&file, ends[0], 0, 1000, 100) == ends[2]);
    memory_close(&file);
    ls_builder_free(&builder);
}

static void resync_crosses_windows_of_garbage(void)
{
    ls_builder builder;
    int64_t ends[5];
    five_batches(&builder, ends);
    for (size_t visible = 1; visible < LS_BATCH_HEADER_BYTES; visible += 10) {
        /* the search starts at 1: so many bytes of the header are in the first window */
        size_t garbage = LS_WINDOW_BYTES + 1 - visible;
        memory_file file;
        memory_open(&file, NULL, 0);
        memory_resize(&file, garbage + builder.size);
        memset(file.data, 2, garbage);                 /* every byte a plausible magic */
        memcpy(file.data + garbage, builder.data, builder.size);
        CHECK(resync(&file, 0, 0, 1000, 1 << 16) == (int64_t)garbage);
        memory_close(&file);
    }
    ls_builder_free(&builder);
}

int main(void)
{
    void (*tests[])(void) = {
        short_and_interrupted_calls_are_completed,
        a_failed_append_leaves_nothing_behind,
        two_parts_are_appended_like_one,
        an_append_that_cannot_be_taken_back_says_so,
        the_posix_functions_do_what_their_names_say,
        a_window_yields_every_batch_however_reads_are_cut,
        a_window_sees_nothing_beyond_its_limit,
        a_huge_batch_is_read_whole_but_not_on_its_word,
        a_failed_read_is_an_io_error_and_passes,
        find_lands_on_the_batch_that_holds_the_offset,
        a_span_is_of_whole_batches_below_its_bounds,
        the_prefix_of_a_torn_log_ends_at_the_last_whole_batch,
        zeroes_and_garbage_behind_the_log_end_its_prefix,
        a_flipped_byte_cuts_the_prefix_at_its_batch,
        an_io_error_is_no_evidence_about_the_data,
        a_dense_prefix_takes_no_gap,
        the_prefix_tells_where_the_leader_epoch_changes,
        a_rebuilt_index_equals_the_one_of_live_appends,
        resync_finds_the_next_sound_batch,
        resync_crosses_windows_of_garbage,
    };
    size_t count = sizeof tests / sizeof *tests;
    for (size_t i = 0; i < count; i++) {
        tests[i]();
    }
    printf("        test_segment: %zu tests passed\n", count);
    return 0;
}
