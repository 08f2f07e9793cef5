/* fuzz.h - what the fuzz targets share. A target is one file fuzz_<name>.c with LLVMFuzzerTestOneInput
 * (libFuzzer); its seeds lie in seeds/<name>/ and are made by dev/make_fuzz_seeds.py. `make fuzz` builds
 * them; tests/test_fuzz.sh runs each for a while; one of them alone, for as long as one likes:
 *     build/fuzz/tests/fuzz/fuzz_stories -max_len=4096 CORPUS tests/fuzz/seeds/stories
 *
 * A target finds more than crashes: what must hold for every input is said by MUST, which ends the process
 * with a line, and libFuzzer then keeps the input. */
#ifndef FUZZ_H
#define FUZZ_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../../common.h"

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size);

#define MUST(condition)                                                             \
    do {                                                                            \
        if (!(condition)) {                                                         \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
            abort();                                                                \
        }                                                                           \
    } while (0)

static char fuzz_root[512];

static inline void fuzz_remove_folder(void) {
    folder_remove(fuzz_root, NULL);
}

/* A folder of this process, in TMPDIR, else in memory where there is such a place; removed at the end. */
static inline const char *fuzz_folder(void) {
    if (!fuzz_root[0]) {
        const char *folder = getenv("TMPDIR");
        if (!folder) folder = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
        snprintf(fuzz_root, sizeof fuzz_root, "%s/fuzz.XXXXXX", folder);
        MUST(mkdtemp(fuzz_root));
        atexit(fuzz_remove_folder);
    }
    return fuzz_root;
}

/* A path in that folder; valid as long as the process. */
static inline char *fuzz_path(const char *name) {
    return xformat("%s/%s", fuzz_folder(), name);
}

static inline void fuzz_write(const char *path, const void *bytes, size_t size) {
    FILE *file = fopen(path, "wb");
    MUST(file && fwrite(bytes, 1, size, file) == size && fclose(file) == 0);
}

/* An error is one line of text that can be printed, and says where: `name` (NULL: no matter) is in it. */
static inline void fuzz_check_error(const Error *err, const char *name) {
    MUST(err->text[0]);
    MUST(strlen(err->text) < sizeof err->text);
    for (const char *c = err->text; *c; c++) MUST((unsigned char)*c >= 0x20 && *c != 0x7F);
    MUST(!name || strstr(err->text, name));
}

#endif
