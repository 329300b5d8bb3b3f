/* Runs a fuzz target over every file of the given folders, without libFuzzer: any compiler will do.
 *
 *     replay_batch native/tests/corpus/batch
 */
#include <dirent.h>
#include <stdint.h>
#include <string.h>

#include "check.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void replay_file(const char *path)
{
    FILE *file = fopen(path, "rb");
    CHECK(file != NULL);
    CHECK(fseek(file, 0, SEEK_END) == 0);
    long size = ftell(file);
    CHECK(size >= 0);
    rewind(file);
    /* Exactly as large as the input, so that ASan sees a read of one byte too many. */
    uint8_t *data = malloc(size > 0 ? (size_t)size : 1);
    CHECK(data != NULL);
    CHECK(fread(data, 1, (size_t)size, file) == (size_t)size);
    fclose(file);
    LLVMFuzzerTestOneInput(data, (size_t)size);
    free(data);
}

static int replay_folder(const char *folder)
{
    DIR *entries = opendir(folder);
    if (entries == NULL) {
        fprintf(stderr, "%s: no such folder\n", folder);
        exit(2);
    }
    int files = 0;
    struct dirent *entry;
    while ((entry = readdir(entries)) != NULL) {
        if (entry->d_name[0] == '.') {
            continue;
        }
        char path[4096];
        CHECK((size_t)snprintf(path, sizeof path, "%s/%s", folder, entry->d_name) < sizeof path);
        replay_file(path);
        files++;
    }
    closedir(entries);
    return files;
}

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        int files = replay_folder(argv[i]);
        printf("        %s: %d inputs\n", argv[i], files);
        CHECK(files > 0);
    }
    return 0;
}
