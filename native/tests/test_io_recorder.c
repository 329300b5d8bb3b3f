/* The I/O recorder: the calls that it records, the faults that it injects, and the calls of other
 * paths, which it passes on unchanged. */
#if defined(__linux__)
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "io_recorder.h"

static char root[64];
static int directory;

typedef struct {
    int count;
    ls_call last;
    uint8_t data[16];
    char path[64];
} seen;

static int look(void *context, const ls_call *call)
{
    seen *all = context;
    all->count++;
    all->last = *call;
    if (call->data != NULL) {
        memcpy(all->data, call->data, (size_t)call->done);
    }
    if (call->path != NULL) {
        snprintf(all->path, sizeof all->path, "%s", call->path + call->below);
    }
    return 0;
}

static int count_names(void *context, const char *name, bool is_directory)
{
    (void)name;
    *(int *)context += is_directory ? 100 : 1;
    return 0;
}

static void every_kind_of_call_is_handed_on_and_written_down(void)
{
    const ls_io *io = &ls_io_process;
    CHECK(ls_io_recorder_start(root, NULL, 0, true, true, true) == 0);
    CHECK(ls_io_recorder_start(root, NULL, 0, true, true, true) == -EALREADY);
    int fd = io->open(io, directory, "a.log", O_RDWR | O_CREAT | O_EXCL, 0600);
    CHECK(fd > STDERR_FILENO);
    CHECK(io->pwrite(io, fd, "0123456789", 10, 0) == 10);
    seen all = {0};
    CHECK(ls_io_recorder_each(0, look, &all) == 0 && all.count == 2);
    CHECK(all.last.kind == LS_CALL_PWRITE && memcmp(all.data, "0123456789", 10) == 0);
    CHECK(strcmp(all.path, "a.log") == 0);
    char back[4];
    CHECK(io->pread(io, fd, back, 4, 3) == 4 && memcmp(back, "3456", 4) == 0);
    CHECK(io->truncate(io, fd, 4) == 0 && io->size(io, fd) == 4);
    CHECK(io->allocate(io, fd, 0, 8) == 0 && io->size(io, fd) == 8);
    CHECK(io->datasync(io, fd) == 0 && io->sync(io, fd) == 0 && io->forget(io, fd, 0, 0) == 0);
    CHECK(io->mkdir(io, directory, "b", 0700) == 0);
    int names = 0;
    CHECK(io->list(io, directory, count_names, &names) == 0 && names == 101);
    CHECK(io->rename(io, directory, "a.log", "c.log") == 0);
    ls_file_status status;
    CHECK(io->set_times(io, directory, "c.log", 1000000001, 2000000002) == 0);
    CHECK(io->stat(io, directory, "c.log", &status) == 0 && status.regular && status.size == 8);
    CHECK(status.accessed_ns == 1000000001 && status.modified_ns == 2000000002);
    CHECK(io->stat(io, directory, "", &status) == 0 && status.directory);
    ls_io_recorder_mark(42);
    all.count = 0;
    CHECK(ls_io_recorder_each(0, look, &all) == 0 && all.count == 17);
    CHECK(all.last.kind == LS_CALL_MARK && all.last.position == 42 && ls_io_recorder_count() == 16);
    CHECK(io->close(io, fd) == 0 && io->unlink(io, directory, "c.log") == 0);
    CHECK(io->rmdir(io, directory, "b") == 0);
    ls_io_recorder_stop();
    int64_t count = ls_io_recorder_count();
    CHECK(io->stat(io, directory, "", &status) == 0 && ls_io_recorder_count() == count);
}

static void faults_spoil_their_calls_and_no_others(void)
{
    const ls_io *io = &ls_io_process;
    char pattern[] = "*.log";
    ls_fault faults[] = {
        {.kinds = 1u << LS_CALL_PWRITE, .pattern = pattern, .first = 2, .times = 1,
         .action = LS_FAULT_ERROR, .value = ENOSPC},
        {.kinds = 1u << LS_CALL_PWRITE, .pattern = pattern, .first = 3, .times = -1,
         .action = LS_FAULT_SHORT, .value = 2},
        {.kinds = 1u << LS_CALL_TRUNCATE, .first = 1, .times = 1, .action = LS_FAULT_PRETEND},
        {.kinds = 1u << LS_CALL_TRUNCATE, .first = 2, .times = 1, .action = LS_FAULT_LATE_ERROR,
         .value = EIO},
        {.kinds = 1u << LS_CALL_SYNC, .first = 1, .times = 1, .action = LS_FAULT_DELAY, .value = 1},
    };
    size_t count = sizeof faults / sizeof faults[0];
    CHECK(ls_io_recorder_start(root, faults, count, true, true, false) == 0);
    int fd = io->open(io, directory, "a.log", O_RDWR | O_CREAT | O_EXCL, 0600);
    int other = io->open(io, directory, "a.txt", O_RDWR | O_CREAT | O_EXCL, 0600);
    for (int i = 0; i < 4; i++) {
        CHECK(io->pwrite(io, other, "other", 5, 0) == 5);
    }
    CHECK(io->pwrite(io, fd, "first", 5, 0) == 5);
    CHECK(io->pwrite(io, fd, "full", 4, 5) == -ENOSPC && io->size(io, fd) == 5);
    CHECK(io->pwrite(io, fd, "short", 5, 5) == 2 && io->pwrite(io, fd, "short", 5, 5) == 2);
    CHECK(io->size(io, fd) == 7);
    CHECK(io->truncate(io, fd, 0) == 0 && io->size(io, fd) == 7);
    CHECK(io->truncate(io, fd, 0) == -EIO && io->size(io, fd) == 0);
    CHECK(io->sync(io, fd) == 0);
    CHECK(ls_io_recorder_faults(faults, count) == count);
    CHECK(faults[0].matched == 4 && faults[0].fired == 1 && faults[1].fired == 2);
    CHECK(io->close(io, fd) == 0 && io->close(io, other) == 0);
    CHECK(io->unlink(io, directory, "a.log") == 0 && io->unlink(io, directory, "a.txt") == 0);
    ls_io_recorder_stop();
}

static void paths_of_the_user_are_found_below_the_root(void)
{
    const ls_io *io = &ls_io_process;
    char path[96];
    snprintf(path, sizeof path, "%s/./new", root);
    CHECK(ls_io_recorder_start(root, NULL, 0, true, false, true) == 0);
    CHECK(io->mkdir(io, LS_NO_DIRECTORY, path, 0700) == 0);
    seen all = {0};
    CHECK(ls_io_recorder_each(0, look, &all) == 0 && all.count == 1 && strcmp(all.path, "new") == 0);
    ls_file_status status;
    CHECK(io->stat(io, LS_NO_DIRECTORY, "/", &status) == 0 && ls_io_recorder_count() == 1);
    CHECK(io->rmdir(io, directory, "new") == 0);
    ls_io_recorder_stop();
    CHECK(ls_io_recorder_start("/", NULL, 0, true, false, true) == 0);
    CHECK(io->stat(io, LS_NO_DIRECTORY, "/", &status) == 0 && ls_io_recorder_count() == 1);
    ls_io_recorder_stop();
}

int main(void)
{
    char folder[] = "/tmp/logstore-recorder-XXXXXX";
    CHECK(mkdtemp(folder) != NULL);
    char *resolved = realpath(folder, NULL);
    CHECK(resolved != NULL && strlen(resolved) < sizeof root);
    strcpy(root, resolved);
    free(resolved);
    directory = open(root, O_RDONLY | O_DIRECTORY);
    CHECK(directory >= 0);
    every_kind_of_call_is_handed_on_and_written_down();
    faults_spoil_their_calls_and_no_others();
    paths_of_the_user_are_found_below_the_root();
    /* A start frees the calls that the recording before it kept. */
    CHECK(ls_io_recorder_start(root, NULL, 0, false, false, false) == 0);
    ls_io_recorder_stop();
    close(directory);
    CHECK(rmdir(root) == 0);
    printf("        test_io_recorder: 3 tests passed\n");
    return 0;
}
