/* fuzz_manifest.c - a MANIFEST beside three files, a link out of the folder, a pipe and a folder: it is
 * accepted only if each of its lines is true of one of the three files.
 *
 * The first byte of the input chooses: even, the rest is the MANIFEST; odd, its last line is put in. */
#include "fuzz.h"

#include <inttypes.h>
#include <sys/stat.h>

enum { FILES = 3 };
static const char *const names[FILES] = {"a", "config.json", "empty"};
static const char *const contents[FILES] = {"five\n", "{}", ""};
static char *lines[FILES];

static char *make_folder(void) {
    for (size_t i = 0; i < FILES; i++) {
        const size_t size = strlen(contents[i]);
        char *path = fuzz_path(names[i]);
        fuzz_write(path, contents[i], size);
        free(path);
        lines[i] = xformat("%zu %08" PRIx32 " %s\n", size, checksum_crc32(0, contents[i], size), names[i]);
    }
    char *outside = fuzz_path("link"), *pipe = fuzz_path("pipe"), *folder = fuzz_path("folder");
    MUST(symlink("/proc/self/exe", outside) == 0 && mkfifo(pipe, 0600) == 0 && mkdir(folder, 0700) == 0);
    free(outside);
    free(pipe);
    free(folder);
    return fuzz_path("MANIFEST");
}

/* Every line is one of those that are true, and the last one ends the text. */
static bool is_true(const char *text, size_t size) {
    while (size > 0 && strncmp(text, "end ", 4) != 0) {
        size_t i = 0;
        while (i < FILES && (size < strlen(lines[i]) || memcmp(text, lines[i], strlen(lines[i])) != 0)) i++;
        if (i == FILES) return false;
        text += strlen(lines[i]), size -= strlen(lines[i]);
    }
    return size == sizeof "end 00000000\n" - 1 && text[size - 1] == '\n';
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size) {
    static char *path;
    if (!path) path = make_folder();
    if (size == 0) return 0;
    Buffer manifest = {0};
    buffer_append(&manifest, input + 1, size - 1);
    if (input[0] % 2) {
        char *end = xformat("end %08" PRIx32 "\n", checksum_crc32(0, input + 1, size - 1));
        buffer_append_text(&manifest, end);
        free(end);
    }
    fuzz_write(path, manifest.data, manifest.size);
    Error err = {0};
    const bool good = folder_check_manifest(fuzz_folder(), &err);
    buffer_append(&manifest, "", 1);
    if (good) MUST(is_true((const char *)manifest.data, manifest.size - 1));
    else fuzz_check_error(&err, fuzz_folder());
    buffer_free(&manifest);
    return 0;
}
