/* test_common.c - errors, files, folders that appear whole, signals, checksums and random numbers. */
#include "test.h"

#include "../common.h"

#include <errno.h>
#include <math.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static char folder[64]; /* of this run's temporary files */

/* The path of a file in it; valid until the eighth call after it. */
static const char *in_folder(const char *name) {
    static char paths[8][512];
    static size_t next;
    char *path = paths[next++ % 8];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

static void write_plain(const char *path, const void *bytes, size_t size) {
    FILE *file = fopen(path, "wb");
    CHECK(file && fwrite(bytes, 1, size, file) == size);
    if (file) fclose(file);
}

static bool file_holds(const char *path, const void *bytes, size_t size) {
    Buffer buffer = {0};
    const bool same = file_read(path, (size_t)1 << 30, &buffer, NULL) && buffer.size == size &&
                      (size == 0 || memcmp(buffer.data, bytes, size) == 0);
    buffer_free(&buffer);
    return same;
}

static size_t entries_in(const char *path) {
    char **names = NULL;
    size_t count = 0;
    CHECK(folder_names(path, &names, &count, NULL));
    for (size_t i = 0; i < count; i++) free(names[i]);
    free(names);
    return count;
}

/* ---- errors ---- */

TEST(error_is_one_printable_line) {
    static const struct {
        const char *in, *out;
    } cases[] = {
        {"plain", "plain"},
        {"a\nb\tc\x1b[31m\x7f", "a?b?c?[31m?"},
        {"caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80", "caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80"},
        {"\xc2\x9b" /* C1 control */
         "x",
         "?x"},
        {"\xc0\xaf|", "??|"},           /* overlong */
        {"\xe0\x9f\xbf|", "???|"},      /* overlong */
        {"\xed\xa0\x80|", "???|"},      /* a surrogate */
        {"\xf4\x90\x80\x80|", "????|"}, /* above U+10FFFF */
        {"\xf0\x8f\xbf\xbf|", "????|"}, /* overlong */
        {"\x80\xff|\xe2\x82", "??|??"}, /* no lead byte; cut */
        {"\xe2\x28\xa1", "?(?"},        /* no continuation */
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Error err;
        CHECK(!error_set(&err, "%s", cases[i].in));
        CHECK_MSG(strcmp(err.text, cases[i].out) == 0, "case %zu gives \"%s\"", i, err.text);
    }
}

TEST(error_is_cut_at_a_character) {
    for (size_t shift = 0; shift < 4; shift++) {
        char text[1500];
        size_t size = shift;
        memset(text, 'x', shift);
        while (size + 4 < sizeof text) memcpy(text + size, "\xe2\x82\xac", 3), size += 3;
        text[size] = 0;
        Error err, again;
        error_set(&err, "%s", text);
        const size_t length = strlen(err.text);
        CHECK(length < sizeof err.text && length > sizeof err.text - 8);
        CHECK(strstr(err.text, "...") != NULL);
        CHECK(strchr(err.text, '?') == NULL);
        error_set(&again, "%s", err.text); /* fits as it is, so it stays as it is */
        CHECK(strcmp(again.text, err.text) == 0);
    }
    /* Of long paths the middle goes, and the reason stays. */
    char path[5000];
    memset(path, 'p', sizeof path - 1);
    path[sizeof path - 1] = 0;
    Error long_path;
    error_set(&long_path, "cannot write %s: no room; free some", path);
    error_prefix(&long_path, "side %s", path);
    CHECK(strlen(long_path.text) < sizeof long_path.text && strncmp(long_path.text, "side ppp", 8) == 0);
    CHECK(strcmp(long_path.text + strlen(long_path.text) - 20, ": no room; free some") == 0);
    char fits[sizeof long_path.text];
    memset(fits, 'y', sizeof fits - 1);
    fits[sizeof fits - 1] = 0;
    Error err;
    error_set(&err, "%s", fits);
    CHECK(strcmp(err.text, fits) == 0);
}

TEST(error_prefix_and_aliases) {
    Error err;
    CHECK(!error_set(&err, "no %s", "file"));
    CHECK(!error_prefix(&err, "%s %d", "step", 3));
    CHECK(strcmp(err.text, "step 3: no file") == 0);
    error_set(&err, "again: %s", err.text); /* the text is an argument of itself */
    CHECK(strcmp(err.text, "again: step 3: no file") == 0);
    CHECK(!error_set(NULL, "nobody reads this") && !error_prefix(NULL, "nor this"));
}

/* ---- memory ---- */

TEST(sizes_that_overflow) {
    size_t r = 0;
    CHECK(size_mul(0, SIZE_MAX, &r) && r == 0);
    CHECK(size_mul(SIZE_MAX, 0, &r) && r == 0);
    CHECK(size_mul(SIZE_MAX, 1, &r) && r == SIZE_MAX);
    CHECK(size_mul(SIZE_MAX / 2, 2, &r) && r == SIZE_MAX - 1);
    CHECK(!size_mul(SIZE_MAX / 2 + 1, 2, &r) && r == SIZE_MAX);
    CHECK(size_add(SIZE_MAX, 0, &r) && r == SIZE_MAX);
    CHECK(size_add(1, SIZE_MAX - 1, &r) && r == SIZE_MAX);
    r = 0;
    CHECK(!size_add(SIZE_MAX, 1, &r) && r == SIZE_MAX);
}

TEST(buffer_grows_and_holds_any_bytes) {
    Buffer buffer = {0};
    buffer_append(&buffer, NULL, 0);
    CHECK(buffer.size == 0);
    for (unsigned i = 0; i < 100000; i++) {
        const uint8_t byte = (uint8_t)i;
        buffer_append(&buffer, &byte, 1);
    }
    buffer_append_text(&buffer, "end");
    CHECK(buffer.size == 100003 && buffer.capacity >= buffer.size);
    size_t wrong = 0;
    for (unsigned i = 0; i < 100000; i++) wrong += buffer.data[i] != (uint8_t)i;
    CHECK(wrong == 0 && memcmp(buffer.data + 100000, "end", 3) == 0);
    buffer_free(&buffer);
    CHECK(buffer.data == NULL && buffer.size == 0 && buffer.capacity == 0);
    char *text = xformat("%s-%05d", "x", 42);
    CHECK(strcmp(text, "x-00042") == 0);
    free(text);
}

/* Runs a function in a child, with stderr closed unless it is wanted; returns waitpid's status. */
static int in_child(void (*function)(void)) {
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0) {
        if (!freopen("/dev/null", "w", stderr)) _exit(99);
        function();
        _exit(98);
    }
    int status = -1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    return status;
}

static void ask_for_too_much(void) {
    xcalloc(SIZE_MAX / 2, 4);
}

static void grow_too_much(void) {
    Buffer buffer = {0};
    buffer_append(&buffer, "x", 1);
    buffer_reserve(&buffer, SIZE_MAX);
}

TEST(out_of_memory_exits_1) {
    const int status = in_child(ask_for_too_much);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == EXIT_FAILED);
    const int grown = in_child(grow_too_much);
    CHECK(WIFEXITED(grown) && WEXITSTATUS(grown) == EXIT_FAILED);
}

/* ---- files ---- */

TEST(file_read_checks) {
    Error err;
    Buffer out = {0};
    write_plain(in_folder("five"), "a\0b\nc", 5);
    CHECK(file_read(in_folder("five"), 5, &out, &err) && out.size == 5 &&
          memcmp(out.data, "a\0b\nc", 5) == 0);
    CHECK(!file_read(in_folder("five"), 4, &out, &err) && strstr(err.text, "too large"));
    CHECK(!file_read(in_folder("absent"), 5, &out, &err) && strstr(err.text, "absent"));
    CHECK(!file_read(folder, 5, &out, &err) && strstr(err.text, "folder"));
    write_plain(in_folder("empty"), "", 0);
    CHECK(file_read(in_folder("empty"), 0, &out, &err) && out.size == 0);
    CHECK(mkfifo(in_folder("pipe"), 0600) == 0);
    CHECK(!file_read(in_folder("pipe"), 5, &out, &err)); /* and does not wait for a writer */
    buffer_free(&out);
    CHECK(file_exists(in_folder("five")) && !file_exists(folder) && !file_exists(in_folder("absent")));
    CHECK(folder_exists(folder) && !folder_exists(in_folder("five")));
}

TEST(folders_made_listed_removed) {
    Error err;
    CHECK(folder_make(in_folder("a/b/c/"), &err) && folder_exists(in_folder("a/b/c")));
    CHECK(folder_make(in_folder("a/b/c"), &err));
    CHECK(folder_make("/", &err) && folder_make(".", &err) && !folder_make("", &err));
    write_plain(in_folder("a/file"), "x", 1);
    CHECK(!folder_make(in_folder("a/file"), &err) && strstr(err.text, "a file of that name"));
    CHECK(!folder_make(in_folder("a/file/deeper"), &err));
    write_plain(in_folder("a/B"), "x", 1);
    write_plain(in_folder("a/.hidden"), "x", 1);

    char **names;
    size_t count;
    CHECK(folder_names(in_folder("a"), &names, &count, &err) && count == 4);
    static const char *const expected[] = {".hidden", "B", "b", "file"};
    for (size_t i = 0; i < count; i++) {
        CHECK(i < 4 && strcmp(names[i], expected[i]) == 0);
        free(names[i]);
    }
    free(names);
    CHECK(!folder_names(in_folder("absent"), &names, &count, &err) && count == 0 && names == NULL);

    /* A link inside goes; what it points to stays. */
    CHECK(folder_make(in_folder("outside"), &err));
    write_plain(in_folder("outside/kept"), "k", 1);
    CHECK(symlink("../outside", in_folder("a/link")) == 0);
    CHECK(folder_remove(in_folder("a"), &err) && !folder_exists(in_folder("a")));
    CHECK(file_exists(in_folder("outside/kept")));
    CHECK(folder_remove(in_folder("a"), &err));

    uint64_t bytes = 0;
    CHECK(disk_free_bytes(folder, &bytes, &err) && bytes > 0);
    CHECK(!disk_free_bytes(in_folder("absent"), &bytes, &err));
    CHECK(path_fsync(folder, &err) && path_fsync(in_folder("outside/kept"), &err));
    CHECK(!path_fsync(in_folder("absent"), &err));
}

TEST(file_replace_is_atomic) {
    Error err;
    CHECK(folder_make(in_folder("replace"), &err));
    const char *path = in_folder("replace/file");
    CHECK(file_replace(path, "old", 3, &err) && file_holds(path, "old", 3));
    CHECK(file_replace(path, "newer", 5, &err) && file_holds(path, "newer", 5));
    CHECK(file_replace(path, NULL, 0, &err) && file_holds(path, "", 0));
    /* What a crashed writer left is removed; names that only look like it are not. */
    write_plain(in_folder("replace/file.tmp-123"), "x", 1);
    write_plain(in_folder("replace/file.tmp-mine"), "x", 1);
    CHECK(file_replace(path, "last", 4, &err) && file_holds(path, "last", 4));
    CHECK(!file_exists(in_folder("replace/file.tmp-123")) && file_exists(in_folder("replace/file.tmp-mine")));
    CHECK(entries_in(in_folder("replace")) == 2);
    CHECK(!file_replace(in_folder("absent/file"), "x", 1, &err));
    CHECK(!file_replace(in_folder("replace/"), "x", 1, &err)); /* a folder is not replaced by a file */
    CHECK(folder_exists(in_folder("replace")) && entries_in(in_folder("replace")) == 2);
}

/* ---- folders that appear whole ---- */

static bool write_sample(const char *path, Error *err) {
    FolderWrite *writing = folder_write_begin(path, err);
    if (!writing) return false;
    if (folder_write_file(writing, "zebra.json", "{}\n", 3, err) &&
        folder_write_open(writing, "apple.bin", err) && folder_write_bytes(writing, "123", 3, err) &&
        folder_write_bytes(writing, NULL, 0, err) && folder_write_bytes(writing, "456789", 6, err) &&
        folder_write_close(writing, err) && folder_write_file(writing, "empty", NULL, 0, err) &&
        folder_write_commit(writing, err))
        return true;
    folder_write_abort(writing);
    return false;
}

/* The CRC-32 of "123456789" is the check value that its definition gives: cbf43926. */
static const char sample_lines[] = "9 cbf43926 apple.bin\n0 00000000 empty\n3 dda1b006 zebra.json\n";

static void write_manifest_with(const char *path, const char *lines, size_t size) {
    Buffer text = {0};
    buffer_append(&text, lines, size);
    char *last = xformat("end %08x\n", (unsigned)checksum_crc32(0, lines, size));
    buffer_append_text(&text, last);
    write_plain(path, text.data, text.size);
    free(last);
    buffer_free(&text);
}

TEST(folder_write_appears_whole) {
    Error err;
    const char *path = in_folder("runs/checkpoint");
    CHECK(folder_make(in_folder("runs/checkpoint.tmp-77/deep"), &err)); /* a crashed writer's */
    CHECK_MSG(write_sample(path, &err), "%s", err.text);
    CHECK(entries_in(in_folder("runs")) == 1 && entries_in(path) == 4);
    CHECK(file_holds(in_folder("runs/checkpoint/apple.bin"), "123456789", 9));
    CHECK_MSG(folder_check_manifest(path, &err), "%s", err.text);
    char *expected = xformat("%send %08x\n", sample_lines,
                             (unsigned)checksum_crc32(0, sample_lines, sizeof sample_lines - 1));
    CHECK(file_holds(in_folder("runs/checkpoint/MANIFEST"), expected, strlen(expected)));
    free(expected);
    CHECK(!write_sample(path, &err) && strstr(err.text, "already")); /* never over an older one */
    CHECK_MSG(folder_check_manifest(path, &err), "%s", err.text);
    CHECK(entries_in(in_folder("runs")) == 1);
    write_plain(in_folder("runs/checkpoint/extra"), "x", 1);
    CHECK(folder_check_manifest(path, &err));
}

TEST(folder_write_before_commit_is_invisible) {
    Error err;
    const char *path = in_folder("unseen");
    FolderWrite *writing = folder_write_begin(path, &err);
    CHECK(writing && folder_write_file(writing, "a", "a", 1, &err));
    CHECK(!folder_exists(path));
    if (!writing) return;
    static const char *const unsafe[] = {"", ".", "..", "../a", "/a", "b/c", "a\nb", "MANIFEST"};
    for (size_t i = 0; i < sizeof unsafe / sizeof unsafe[0]; i++)
        CHECK_MSG(!folder_write_open(writing, unsafe[i], &err), "name %zu", i);
    CHECK(!folder_write_open(writing, "a", &err)); /* twice */
    CHECK(!folder_write_bytes(writing, "x", 1, &err) && !folder_write_close(writing, &err));
    CHECK(folder_write_open(writing, "b", &err) && !folder_write_open(writing, "c", &err));
    CHECK(!folder_write_commit(writing, &err)); /* b is not ended */
    char *temporary = xformat("%s.tmp-%ld", path, (long)getpid());
    CHECK(folder_exists(temporary));
    folder_write_abort(writing);
    CHECK(!folder_exists(temporary) && !folder_exists(path));
    free(temporary);
    folder_write_abort(NULL);
}

TEST(folder_write_taken_meanwhile) {
    Error err;
    const char *path = in_folder("taken");
    FolderWrite *writing = folder_write_begin(path, &err);
    CHECK(writing && folder_write_file(writing, "a", "a", 1, &err));
    if (!writing) return;
    CHECK(folder_make(path, &err)); /* even an empty folder, which rename would replace */
    CHECK(!folder_write_commit(writing, &err) && strstr(err.text, "already"));
    folder_write_abort(writing);
    CHECK(folder_exists(path) && entries_in(path) == 0);
}

TEST(damaged_manifests) {
    Error err;
    const char *path = in_folder("damaged");
    CHECK_MSG(write_sample(path, &err), "%s", err.text);
    char manifest[512], apple[512];
    snprintf(manifest, sizeof manifest, "%s/MANIFEST", path);
    snprintf(apple, sizeof apple, "%s/apple.bin", path);
    write_plain(in_folder("secret"), "123456789", 9);

    /* Cut after any byte, and any one byte changed. */
    Buffer good = {0};
    CHECK(file_read(manifest, 4096, &good, &err));
    for (size_t size = 0; size < good.size; size++) {
        write_plain(manifest, good.data, size);
        CHECK_MSG(!folder_check_manifest(path, &err), "cut to %zu bytes", size);
    }
    for (size_t i = 0; i < good.size; i++) {
        good.data[i] ^= 1;
        write_plain(manifest, good.data, good.size);
        CHECK_MSG(!folder_check_manifest(path, &err), "byte %zu changed", i);
        good.data[i] ^= 1;
    }
    buffer_free(&good);

    /* Made on purpose, with a last line that fits. */
#define LINES(text) \
    { text, sizeof(text) - 1 }
    static const struct {
        const char *text;
        size_t size;
    } hostile[] = {
        LINES("9 cbf43926 ../secret\n"),
        LINES("9 cbf43926 /etc/passwd\n"),
        LINES("9 cbf43926 ..\n"),
        LINES("9 cbf43926 .\n"),
        LINES("9 cbf43926 \n"),
        LINES("9 cbf43926\n"),
        LINES("\n"),
        LINES("9  cbf43926 apple.bin\n"),
        LINES(" 9 cbf43926 apple.bin\n"),
        LINES("-9 cbf43926 apple.bin\n"),
        LINES("9 CBF43926 apple.bin\n"),
        LINES("9 cbf4392 apple.bin\n"),
        LINES("9 cbf439260 apple.bin\n"),
        LINES("9 cbf43926 apple.bin"),
        LINES("9 cbf43926 apple.bin\r\n"),
        LINES("9 cbf43926 apple.bin\0hidden\n"),
        LINES("9 cbf43926 apple.bin\n9 cbf43926 apple.bin\n"),
        LINES("3 dda1b006 zebra.json\n9 cbf43926 apple.bin\n"),
        LINES("9 cbf43926 absent\n"),
        LINES("8 cbf43926 apple.bin\n"),
        LINES("10 cbf43926 apple.bin\n"),
        LINES("9 cbf43927 apple.bin\n"),
        LINES("18446744073709551625 cbf43926 apple.bin\n"), /* 2^64 + 9 */
        LINES("99999999999999999999999999999999 cbf43926 apple.bin\n"),
        LINES("0 00000000 link\n"),
        LINES("0 00000000 subfolder\n"),
        LINES("0 00000000 MANIFEST\n"),
    };
#undef LINES
    char inside[512];
    snprintf(inside, sizeof inside, "%s/link", path);
    CHECK(symlink("empty", inside) == 0);
    snprintf(inside, sizeof inside, "%s/subfolder", path);
    CHECK(folder_make(inside, &err));
    for (size_t i = 0; i < sizeof hostile / sizeof hostile[0]; i++) {
        write_manifest_with(manifest, hostile[i].text, hostile[i].size);
        err.text[0] = 0;
        CHECK_MSG(!folder_check_manifest(path, &err) && err.text[0], "hostile manifest %zu passed", i);
    }

    /* A sound MANIFEST over damaged files. */
    write_manifest_with(manifest, sample_lines, sizeof sample_lines - 1);
    CHECK_MSG(folder_check_manifest(path, &err), "%s", err.text);
    write_plain(apple, "123456788", 9);
    CHECK(!folder_check_manifest(path, &err) && strstr(err.text, "apple.bin") && strstr(err.text, "CRC"));
    write_plain(apple, "12345678", 8);
    CHECK(!folder_check_manifest(path, &err) && strstr(err.text, "apple.bin"));
    CHECK(!err.unreadable);
    unlink(apple);
    CHECK(!folder_check_manifest(path, &err) && strstr(err.text, "apple.bin") && !err.unreadable);
    /* What is there and cannot be read may be good: a link is not followed. */
    CHECK(symlink("banana.bin", apple) == 0);
    CHECK(!folder_check_manifest(path, &err) && strstr(err.text, "apple.bin: it is a symbolic link"));
    CHECK(err.unreadable && !error_prefix(&err, "prefix") && err.unreadable);
    unlink(manifest);
    CHECK(!folder_check_manifest(path, &err) && strstr(err.text, "MANIFEST") && !err.unreadable);
    CHECK(symlink("nowhere", manifest) == 0);
    CHECK(!folder_check_manifest(path, &err) && strstr(err.text, "MANIFEST: it is a link to something"));
    CHECK(err.unreadable);
    CHECK(!folder_check_manifest(in_folder("absent"), &err) && !err.unreadable);
}

TEST(looking_at_paths) {
    static const struct {
        const char *name;
        PathKind kind;
    } there[] = {{"look", PATH_FOLDER},       {"look/file", PATH_FILE},    {"look/to-folder", PATH_FOLDER},
                 {"look/to-file", PATH_FILE}, {"look/nothing", PATH_NONE}, {"look/file/under", PATH_NONE},
                 {"look/no/such", PATH_NONE}};
    Error err;
    PathKind kind;
    CHECK(folder_make(in_folder("look"), &err));
    write_plain(in_folder("look/file"), "a", 1);
    CHECK(symlink(".", in_folder("look/to-folder")) == 0 && symlink("file", in_folder("look/to-file")) == 0);
    for (size_t i = 0; i < sizeof there / sizeof there[0]; i++)
        CHECK_MSG(path_look(in_folder(there[i].name), &kind, &err) && kind == there[i].kind, "%s",
                  there[i].name);
    CHECK(symlink("nowhere", in_folder("look/dangling")) == 0 &&
          symlink("round", in_folder("look/round")) == 0);
    CHECK(!path_look(in_folder("look/dangling"), &kind, &err) && err.unreadable && kind == PATH_NONE);
    CHECK(strstr(err.text, "look/dangling: it is a link to something that is not there; ") != NULL);
    CHECK(!path_look(in_folder("look/round"), &kind, &err) && err.unreadable);
    CHECK(!path_look(in_folder("look/round/under"), &kind, &err) && err.unreadable);
}

/* A disk that fills up, played by a limit on the size of a file: write then fails with EFBIG. */
TEST(full_disk_keeps_the_old) {
    Error err;
    const char *path = in_folder("full/file");
    CHECK(folder_make(in_folder("full"), &err) && file_replace(path, "old", 3, &err));
    struct rlimit old;
    CHECK(getrlimit(RLIMIT_FSIZE, &old) == 0);
    void (*const handler)(int) = signal(SIGXFSZ, SIG_IGN);
    const struct rlimit small = {.rlim_cur = 1000, .rlim_max = old.rlim_max};
    const size_t size = 100000;
    char *bytes = xcalloc(1, size);
    CHECK(setrlimit(RLIMIT_FSIZE, &small) == 0);

    const bool replaced = file_replace(path, bytes, size, &err);
    const bool told = strstr(err.text, "free some space") != NULL;
    /* In one piece the write itself fails; in small ones they are buffered and the close fails. */
    bool wrote[2], committed[2];
    for (size_t pieces = 0; pieces < 2; pieces++) {
        Error folder_err = {0};
        FolderWrite *writing = folder_write_begin(in_folder("full/folder"), &folder_err);
        wrote[pieces] = writing && folder_write_open(writing, "a", &folder_err);
        if (pieces == 0)
            wrote[pieces] = wrote[pieces] && folder_write_bytes(writing, bytes, size, &folder_err);
        for (size_t i = 0; pieces && i < 1001; i++)
            wrote[pieces] = wrote[pieces] && folder_write_bytes(writing, bytes, 1, &folder_err);
        committed[pieces] = wrote[pieces] && folder_write_close(writing, &folder_err) &&
                            folder_write_commit(writing, &folder_err);
        if (!committed[pieces]) folder_write_abort(writing);
    }
    setrlimit(RLIMIT_FSIZE, &old);
    signal(SIGXFSZ, handler);
    free(bytes);
    CHECK(!replaced && told && file_holds(path, "old", 3));
    CHECK(!wrote[0] && wrote[1] && !committed[0] && !committed[1]);
    CHECK(entries_in(in_folder("full")) == 1); /* nothing is left of what failed */
}

/* A writer killed in the middle leaves no folder of the name, and the next one removes its left-over. */
static void write_and_die(void) {
    FolderWrite *writing = folder_write_begin(in_folder("killed/folder"), NULL);
    if (writing && folder_write_file(writing, "a", "a", 1, NULL) && folder_write_open(writing, "b", NULL) &&
        folder_write_bytes(writing, "b", 1, NULL))
        raise(SIGKILL);
}

TEST(killed_writer) {
    Error err;
    CHECK(folder_make(in_folder("killed"), &err));
    const int status = in_child(write_and_die);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    CHECK(!folder_exists(in_folder("killed/folder")) && entries_in(in_folder("killed")) == 1);
    CHECK_MSG(write_sample(in_folder("killed/folder"), &err), "%s", err.text);
    CHECK(entries_in(in_folder("killed")) == 1 && folder_check_manifest(in_folder("killed/folder"), &err));
}

/* ---- signals ---- */

static void stop_once(void) {
    signals_install();
    if (stop_requested() != 0) _exit(1);
    raise(SIGHUP);
    raise(SIGPIPE);
    if (stop_requested() != 0) _exit(2);
    raise(SIGUSR1);
    _exit(stop_requested() == SIGUSR1 ? 0 : 3);
}

static void stop_twice(void) {
    signals_install();
    raise(SIGTERM);
    if (stop_requested() != SIGTERM) _exit(1);
    raise(SIGINT);
}

/* The same twice within a moment is one, however often it comes; later it is a second one. */
static void stop_in_a_burst(void) {
    signals_install();
    for (int i = 0; i < 3; i++) raise(SIGTERM);
    if (stop_requested() != SIGTERM) _exit(1);
    nanosleep(&(struct timespec){.tv_nsec = 600 * 1000 * 1000}, NULL);
    raise(SIGTERM);
    _exit(2);
}

static void write_to_closed_pipe(void) {
    signals_install();
    int ends[2];
    if (pipe(ends) != 0 || close(ends[0]) != 0) _exit(1);
    _exit(write(ends[1], "x", 1) == -1 && errno == EPIPE ? 0 : 2);
}

TEST(signals_ask_then_insist) {
    const int once = in_child(stop_once);
    CHECK_MSG(WIFEXITED(once) && WEXITSTATUS(once) == 0, "status %d", once);
    const int twice = in_child(stop_twice);
    CHECK_MSG(WIFEXITED(twice) && WEXITSTATUS(twice) == 128 + SIGINT, "status %d", twice);
    const int burst = in_child(stop_in_a_burst);
    CHECK_MSG(WIFEXITED(burst) && WEXITSTATUS(burst) == 128 + SIGTERM, "status %d", burst);
    const int closed = in_child(write_to_closed_pipe);
    CHECK_MSG(WIFEXITED(closed) && WEXITSTATUS(closed) == 0, "status %d", closed);
    CHECK(stop_requested() == 0);
}

/* ---- checksums, random numbers ---- */

TEST(crc32_check_value) {
    CHECK(checksum_crc32(0, "123456789", 9) == 0xCBF43926u);
    CHECK(checksum_crc32(checksum_crc32(0, "1234", 4), "56789", 5) == 0xCBF43926u);
    CHECK(checksum_crc32(0, NULL, 0) == 0 && checksum_crc32(0x12345678u, NULL, 0) == 0x12345678u);
}

TEST(philox_known_answers) {
    /* The test vectors published with Random123. */
    static const struct {
        uint64_t key, low, high;
        uint32_t word[4];
    } cases[] = {
        {0, 0, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {UINT64_MAX, UINT64_MAX, UINT64_MAX, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {0x299f31d0a4093822,
         0x85a308d3243f6a88,
         0x0370734413198a2e,
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const Philox got = philox(cases[i].key, cases[i].low, cases[i].high);
        CHECK_MSG(memcmp(got.word, cases[i].word, sizeof got.word) == 0, "vector %zu", i);
    }
}

/* Bounds below are 5 standard errors: a right generator passes one of them with probability 1 - 6e-7, and
 * the seeds are fixed, so the outcome is too. */
TEST(rng_normal_moments) {
    Rng rng = rng_start(1, 2);
    const size_t n = 1000000;
    double sum = 0, sum2 = 0, sum3 = 0, sum4 = 0, lagged = 0, before = 0;
    size_t beyond_2 = 0;
    for (size_t i = 0; i < n; i++) {
        const double x = rng_normal(&rng);
        CHECK(isfinite(x));
        sum += x, sum2 += x * x, sum3 += x * x * x, sum4 += x * x * x * x;
        lagged += x * before, before = x;
        beyond_2 += fabs(x) > 2;
    }
    const double d = (double)n, error = 5 / sqrt(d);
    CHECK_MSG(fabs(sum / d) < error, "mean %g", sum / d);
    CHECK_MSG(fabs(sum2 / d - 1) < error * sqrt(2), "variance %g", sum2 / d);  /* var x^2 = 3 - 1 */
    CHECK_MSG(fabs(sum3 / d) < error * sqrt(15), "third moment %g", sum3 / d); /* var x^3 = 15 */
    CHECK_MSG(fabs(sum4 / d - 3) < error * sqrt(96), "fourth %g", sum4 / d);   /* var x^4 = 105 - 9 */
    CHECK_MSG(fabs(lagged / d) < error, "correlation %g", lagged / d);
    const double p = erfc(sqrt(2)); /* P(|x| > 2) */
    CHECK_MSG(fabs((double)beyond_2 / d - p) < error * sqrt(p * (1 - p)), "tail %zu", beyond_2);
}

TEST(rng_below_is_uniform) {
    Rng rng = rng_start(3, 4);
    for (int i = 0; i < 100; i++) CHECK(rng_below(&rng, 1) == 0);
    /* n = 3 * 2^62: without rejection the low quarter of 2^64 would fall twice on the low third. */
    const uint64_t n = (uint64_t)3 << 62;
    const size_t draws = 300000;
    size_t counts[3] = {0}, small[10] = {0};
    for (size_t i = 0; i < draws; i++) {
        const uint64_t value = rng_below(&rng, n);
        CHECK(value < n);
        counts[value >> 62 < 2 ? value >> 62 : 2]++;
        small[rng_below(&rng, 10)]++;
    }
    const double d = (double)draws;
    for (size_t i = 0; i < 3; i++)
        CHECK_MSG(fabs((double)counts[i] - d / 3) < 5 * sqrt(d * 2 / 9), "third %zu: %zu", i, counts[i]);
    for (size_t i = 0; i < 10; i++)
        CHECK_MSG(fabs((double)small[i] - d / 10) < 5 * sqrt(d * 0.09), "tenth %zu: %zu", i, small[i]);
}

TEST(rng_streams) {
    Rng a = rng_start(7, 0), b = rng_start(7, 0), c = rng_start(7, 1), d = rng_start(8, 0);
    size_t same_c = 0, same_d = 0;
    for (int i = 0; i < 1000; i++) {
        const uint64_t x = rng_u64(&a);
        CHECK(x == rng_u64(&b));
        same_c += x == rng_u64(&c), same_d += x == rng_u64(&d);
    }
    CHECK(same_c == 0 && same_d == 0);
    double sum = 0;
    for (int i = 0; i < 100000; i++) {
        const double u = rng_uniform(&a);
        CHECK(u >= 0 && u < 1);
        sum += u;
    }
    CHECK_MSG(fabs(sum / 1e5 - 0.5) < 5 / sqrt(12e5), "mean %g", sum / 1e5);
}

TEST(progress_is_silent_without_a_terminal) {
    Progress progress;
    progress_begin(&progress, "reading", 100, PROGRESS_BYTES);
    progress.start -= 10, progress.last -= 10; /* as if ten seconds had gone by */
    if (isatty(STDERR_FILENO)) SKIP("stderr is a terminal");
    progress_update(&progress, 50);
    CHECK(!progress.shown);
    progress_end(&progress);
}

int main(int argc, char **argv) {
    test_start(argc, argv, "common");
    const char *root = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%.40s/test_common_XXXXXX", root && *root ? root : "/tmp");
    if (!mkdtemp(folder)) {
        printf("common: no folder for temporary files (TMPDIR): %s\n", strerror(errno));
        return 1;
    }
    RUN(error_is_one_printable_line);
    RUN(error_is_cut_at_a_character);
    RUN(error_prefix_and_aliases);
    RUN(sizes_that_overflow);
    RUN(buffer_grows_and_holds_any_bytes);
    RUN(out_of_memory_exits_1);
    RUN(file_read_checks);
    RUN(folders_made_listed_removed);
    RUN(file_replace_is_atomic);
    RUN(folder_write_appears_whole);
    RUN(folder_write_before_commit_is_invisible);
    RUN(folder_write_taken_meanwhile);
    RUN(damaged_manifests);
    RUN(looking_at_paths);
    RUN(full_disk_keeps_the_old);
    RUN(killed_writer);
    RUN(signals_ask_then_insist);
    RUN(crc32_check_value);
    RUN(philox_known_answers);
    RUN(rng_normal_moments);
    RUN(rng_below_is_uniform);
    RUN(rng_streams);
    RUN(progress_is_silent_without_a_terminal);
    folder_remove(folder, NULL);
    return test_finish();
}
