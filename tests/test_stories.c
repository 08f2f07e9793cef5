/* test_stories.c - text in: separators wherever a read cuts them, gzip whole and damaged, folders, files that
 * are none, files that change, and the built-in stories as a source. */
#include "test.h"

#include "../data/stories.h"

#include <math.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#define END "<|endoftext|>"

static char folder[] = "/tmp/test_stories_XXXXXX";

/* ---- helpers ---- */

/* folder/name; the string stays as it is for the next 500 calls. */
static const char *in_folder(const char *name) {
    static char paths[500][128];
    static int next;
    char *path = paths[next++ % 500];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

static void write_file(const char *path, const void *bytes, size_t size) {
    unlink(path); /* a new file: some file systems write one that is cut and filled again through to disk */
    FILE *file = fopen(path, "wb");
    if (!file || fwrite(bytes, 1, size, file) != size || fclose(file)) abort();
}

/* Appends one gzip member. */
static void gzip_append(Buffer *out, const void *bytes, size_t size) {
    z_stream z = {0};
    deflateInit2(&z, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY);
    const size_t room = deflateBound(&z, size) + 64;
    buffer_reserve(out, room);
    z.next_in = (Bytef *)bytes, z.avail_in = (uInt)size;
    z.next_out = out->data + out->size, z.avail_out = (uInt)room;
    CHECK(deflate(&z, Z_FINISH) == Z_STREAM_END);
    out->size += room - z.avail_out;
    deflateEnd(&z);
}

/* All stories in canonical form: each as "<number>:<bytes>\1". -1 where reading fails. */
static int read_all(const char *path, size_t read_size, Buffer *out, Error *err) {
    Stories *stories = stories_open(path, read_size, err);
    if (!stories) return -1;
    StoryPiece piece;
    int status, count = 0;
    bool open = false;
    while ((status = stories_next(stories, &piece, err)) == 1) {
        char number[32];
        snprintf(number, sizeof number, "%d:", (int)piece.story);
        if (!open) buffer_append_text(out, number);
        CHECK(piece.story == (uint64_t)count);
        CHECK(piece.size > 0 || (open && piece.ends_story));
        buffer_append(out, piece.bytes, piece.size);
        open = !piece.ends_story;
        if (piece.ends_story) buffer_append(out, "\1", 1), count++;
    }
    if (status == 0) {
        CHECK(!open);
        CHECK(stories_bytes_read(stories) == stories_bytes_total(stories));
        CHECK(stories_next(stories, &piece, err) == 0);
    }
    stories_close(stories);
    return status == 0 ? count : -1;
}

static const size_t read_sizes[] = {1, 2, 7, 13, 14, 4096, 0};
enum { READ_SIZES = sizeof read_sizes / sizeof *read_sizes };

/* The file gives `expected` for every read size. */
static void check_stories(const char *path, const char *expected, size_t expected_size) {
    for (int i = 0; i < READ_SIZES; i++) {
        Buffer got = {0};
        Error err = {0};
        const int count = read_all(path, read_sizes[i], &got, &err);
        CHECK_MSG(count >= 0, "%s", err.text);
        CHECK_MSG(got.size == expected_size && (got.size == 0 || memcmp(got.data, expected, got.size) == 0),
                  "read size %zu: got '%.*s', expected '%s'", read_sizes[i], (int)got.size, (char *)got.data,
                  expected);
        buffer_free(&got);
    }
}

static void check_error(const char *path, size_t read_size, const char *part) {
    Buffer got = {0};
    Error err = {0};
    CHECK_MSG(read_all(path, read_size, &got, &err) == -1, "'%s' was read", path);
    CHECK_MSG(strstr(err.text, part), "'%s' is not in '%s'", part, err.text);
    CHECK_MSG(!strchr(err.text, '\n'), "more than a line: '%s'", err.text);
    buffer_free(&got);
}

/* ---- separators ---- */

TEST(separators) {
    static const struct {
        const char *text, *stories;
    } cases[] = {
        {"", ""},
        {"one", "0:one\1"},
        {"one\n", "0:one\n\1"},
        {"\n", "0:\n\1"},
        {"one" END "two", "0:one\1"
                          "1:two\1"},
        {"one\n" END "\ntwo\n" END "\n", "0:one\1"
                                         "1:two\1"},
        {"one\n\n" END "\n\ntwo", "0:one\n\1"
                                  "1:\ntwo\1"},
        {END, ""},
        {END END "\n" END "\n\n" END, ""},
        {END "\n\n\n" END "x", "0:\n\1"
                               "1:x\1"},
        {"\n" END "\n", ""},
        {"a<|endoftext|", "0:a<|endoftext|\1"},
        {"a\n<|endoftext|", "0:a\n<|endoftext|\1"},
        {"a\n<|endoftext\n" END "b", "0:a\n<|endoftext\1"
                                     "1:b\1"},
        {"a<<|endoftext|>b<|<|endoftext|>c", "0:a<\1"
                                             "1:b<|\1"
                                             "2:c\1"},
        {"<|endof<|endoftext|>text|>", "0:<|endof\1"
                                       "1:text|>\1"},
        {"a\r\n" END "\r\nb", "0:a\r\1"
                              "1:\r\nb\1"},
        {"\n\n\n\n", "0:\n\n\n\n\1"},
    };
    const char *path = in_folder("cases.txt");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_file(path, cases[i].text, strlen(cases[i].text));
        check_stories(path, cases[i].stories, strlen(cases[i].stories));
    }
}

TEST(any_bytes) {
    static const char text[] = "a\0b\xff\xfe\n" END "\n\xed\xa0\x80\0" END "\0";
    static const char expected[] = "0:a\0b\xff\xfe\1"
                                   "1:\xed\xa0\x80\0\1"
                                   "2:\0\1";
    const char *path = in_folder("bytes.txt");
    write_file(path, text, sizeof text - 1);
    check_stories(path, expected, sizeof expected - 1);
}

/* Text of fragments of the separator, where every read cuts something: held against a second splitter,
 * which has the whole text at hand. */
TEST(random_fragments) {
    static const char *const parts[] = {"\n", "<",      "<|",     "<|endof", "text|>",
                                        END,  "\n" END, END "\n", "a",       "\n\n"};
    const char *path = in_folder("random.txt");
    Rng rng = rng_start(1, 2);
    for (int round = 0; round < 200; round++) {
        Buffer text = {0}, expected = {0};
        for (uint64_t n = rng_below(&rng, 40); n > 0; n--)
            buffer_append_text(&text, parts[rng_below(&rng, sizeof parts / sizeof *parts)]);
        buffer_append(&text, "", 1);
        int count = 0;
        for (char *begin = (char *)text.data; begin;) {
            char *next = strstr(begin, END), *end = next ? next : begin + strlen(begin);
            char *after = next ? next + strlen(END) : NULL;
            if (begin != (char *)text.data && begin < end && *begin == '\n') begin++;
            /* A newline between two separators belongs to the first of them. */
            if (next && end > begin && end[-1] == '\n') end--;
            if (end > begin) {
                char number[32];
                snprintf(number, sizeof number, "%d:", count++);
                buffer_append_text(&expected, number);
                buffer_append(&expected, begin, (size_t)(end - begin));
                buffer_append(&expected, "\1", 1);
            }
            begin = after;
        }
        write_file(path, text.data, text.size - 1);
        buffer_append(&expected, "", 1);
        check_stories(path, (char *)expected.data, expected.size - 1);
        buffer_free(&text);
        buffer_free(&expected);
    }
}

TEST(story_larger_than_a_read) {
    const size_t size = 300000;
    char *text = (char *)xmalloc(size);
    for (size_t i = 0; i < size; i++) text[i] = (char)('a' + i % 26);
    const char *path = in_folder("large.txt");
    write_file(path, text, size);
    Error err = {0};
    Stories *stories = stories_open(path, 1000, &err);
    CHECK(stories != NULL);
    StoryPiece piece;
    size_t at = 0;
    int ends = 0;
    while (stories && stories_next(stories, &piece, &err) == 1) {
        CHECK(piece.size <= 1013 && piece.story == 0 && at + piece.size <= size);
        CHECK(memcmp(piece.bytes, text + at, piece.size) == 0);
        at += piece.size, ends += piece.ends_story;
    }
    CHECK(at == size && ends == 1);
    stories_close(stories);
    free(text);
}

/* ---- gzip ---- */

static const char gzip_text[] = "Once there was a fox.\n" END
                                "\nThe fox had a hat, and the hat had a fox.\n" END "\nThe end of the fox.";
static const char gzip_stories[] = "0:Once there was a fox.\1"
                                   "1:The fox had a hat, and the hat had a fox.\1"
                                   "2:The end of the fox.\1";
enum { GZIP_TEXT = sizeof gzip_text - 1, GZIP_STORIES = sizeof gzip_stories - 1 };

TEST(gzip) {
    Buffer packed = {0};
    gzip_append(&packed, gzip_text, GZIP_TEXT);
    write_file(in_folder("one.txt.gz"), packed.data, packed.size);
    check_stories(in_folder("one.txt.gz"), gzip_stories, GZIP_STORIES);
    /* By its bytes, not its name. */
    write_file(in_folder("plain.txt"), packed.data, packed.size);
    check_stories(in_folder("plain.txt"), gzip_stories, GZIP_STORIES);
    buffer_free(&packed);
    /* Members that end anywhere, in the middle of a separator too; some are empty. */
    for (size_t cut = 0; cut <= GZIP_TEXT; cut++) {
        packed.size = 0;
        gzip_append(&packed, gzip_text, cut);
        gzip_append(&packed, "", 0);
        gzip_append(&packed, gzip_text + cut, GZIP_TEXT - cut);
        write_file(in_folder("many.gz"), packed.data, packed.size);
        Buffer got = {0};
        Error err = {0};
        CHECK_MSG(read_all(in_folder("many.gz"), 1 + cut % 9, &got, &err) == 3, "%s", err.text);
        CHECK(got.size == GZIP_STORIES && memcmp(got.data, gzip_stories, got.size) == 0);
        buffer_free(&got);
    }
    buffer_free(&packed);
}

TEST(gzip_damaged) {
    Buffer packed = {0};
    gzip_append(&packed, gzip_text, 60);
    const size_t second = packed.size;
    gzip_append(&packed, gzip_text + 60, GZIP_TEXT - 60);
    const char *path = in_folder("damaged.txt.gz");
    for (size_t size = 0; size < packed.size; size++) {
        write_file(path, packed.data, size);
        Buffer got = {0};
        Error err = {0};
        const int count = read_all(path, 1 + size % 11, &got, &err);
        /* Cut between its members, it is a shorter file that nothing is wrong with. */
        CHECK_MSG(size == second ? count >= 0 : count < 0, "cut to %zu of %zu bytes", size, packed.size);
        CHECK_MSG(count >= 0 || size < 2 || strstr(err.text, "byte"), "%s", err.text);
        buffer_free(&got);
    }
    for (size_t bit = 0; bit < 8 * packed.size; bit++) {
        packed.data[bit / 8] ^= (uint8_t)(1u << bit % 8);
        write_file(path, packed.data, packed.size);
        packed.data[bit / 8] ^= (uint8_t)(1u << bit % 8);
        Buffer got = {0};
        Error err = {0};
        /* A bit that says nothing of the text (a time stamp, a name) may change; else it is an error. */
        if (read_all(path, 64, &got, &err) >= 0)
            CHECK_MSG(got.size == GZIP_STORIES && memcmp(got.data, gzip_stories, got.size) == 0, "bit %zu",
                      bit);
        buffer_free(&got);
    }
    buffer_append_text(&packed, "garbage");
    write_file(path, packed.data, packed.size);
    char offset[64];
    check_error(path, 5, "follow the end of the gzip data");
    snprintf(offset, sizeof offset, "of %zu (compressed)", packed.size);
    check_error(path, 0, offset);
    write_file(path, "just text", 9);
    check_error(path, 0, "1f 8b");
    write_file(path, "", 0);
    check_error(path, 0, "1f 8b");
    buffer_free(&packed);
}

/* ---- files ---- */

TEST(folders) {
    char sub[256];
    snprintf(sub, sizeof sub, "%s/texts", folder);
    CHECK(mkdir(sub, 0777) == 0);
    check_error(sub, 0, "holds no text");
    Buffer packed = {0};
    gzip_append(&packed, "second" END, 19);
    write_file(in_folder("texts/b.txt.gz"), packed.data, packed.size);
    write_file(in_folder("texts/c.txt"), "third\n", 6);
    write_file(in_folder("texts/a.txt"), "first\n" END "\nmore<|endof", 31);
    write_file(in_folder("texts/d.txt"), "text|>last", 10); /* no separator across files */
    write_file(in_folder("texts/e.txt"), "", 0);
    write_file(in_folder("texts/notes.md"), "not read", 8);
    write_file(in_folder("texts/.txt"), "a name without a stem", 20);
    CHECK(mkdir(in_folder("texts/deeper.txt"), 0777) == 0);
    write_file(in_folder("texts/deeper.txt/x.txt"), "not read", 8);
    static const char expected[] = "0:first\1"
                                   "1:more<|endof\1"
                                   "2:second\1"
                                   "3:third\n\1"
                                   "4:text|>last\1";
    check_stories(sub, expected, sizeof expected - 1);
    /* One damaged file fails the whole, by its own name. */
    write_file(in_folder("texts/b.txt.gz"), packed.data, packed.size - 3);
    check_error(sub, 0, "b.txt.gz");
    buffer_free(&packed);
}

TEST(no_regular_file) {
    check_error(in_folder("missing.txt"), 0, "No such file");
    CHECK(mkfifo(in_folder("pipe.txt"), 0666) == 0);
    check_error(in_folder("pipe.txt"), 0, "a pipe");
    check_error("/dev/null", 0, "a device");
    CHECK(symlink("missing.txt", in_folder("dangling.txt")) == 0);
    check_error(in_folder("dangling.txt"), 0, "No such file");
    write_file(in_folder("target"), "linked", 6);
    CHECK(symlink("target", in_folder("link.txt")) == 0);
    check_stories(in_folder("link.txt"), "0:linked\1", 9);
}

TEST(file_changes_while_read) {
    const char *path = in_folder("changing.txt");
    char text[1000];
    memset(text, 'x', sizeof text);
    for (int grow = 0; grow < 2; grow++) {
        write_file(path, text, sizeof text);
        Error err = {0};
        StoryPiece piece;
        Stories *stories = stories_open(path, 100, &err);
        CHECK(stories && stories_next(stories, &piece, &err) == 1);
        CHECK(truncate(path, grow ? 2000 : 500) == 0);
        size_t total = piece.size;
        int status;
        while ((status = stories_next(stories, &piece, &err)) == 1) total += piece.size;
        if (grow) {
            CHECK(status == 0 && total == 1000); /* what comes later is not read */
        } else {
            CHECK(status == -1);
            CHECK_MSG(strstr(err.text, "shrank from 1000 to 500 bytes"), "%s", err.text);
        }
        stories_close(stories);
    }
}

/* ---- built-in ---- */

TEST(builtin) {
    for (int heldout = 0; heldout < 2; heldout++) {
        Stories *stories = stories_open_builtin(7, heldout, 3, 20);
        Error err = {0};
        StoryPiece piece;
        uint64_t count = 0;
        while (stories_next(stories, &piece, &err) == 1) {
            Buffer text = {0};
            grammar_story(7, heldout, 3 + count, &text);
            CHECK(piece.ends_story && piece.story == count && piece.size == text.size && piece.size > 0);
            CHECK(memcmp(piece.bytes, text.data, text.size) == 0);
            CHECK(grammar_is_heldout(piece.bytes, piece.size) == heldout);
            buffer_free(&text);
            count++;
        }
        CHECK(count == 20);
        stories_close(stories);
    }
}

TEST(real_stories) {
    const char *path = "../shared/data/tinystories/train.txt";
    if (access(path, R_OK)) SKIP("%s is not there", path);
    Buffer first = {0}, again = {0};
    Error err = {0};
    CHECK_MSG(read_all(path, 0, &first, &err) == 6676, "%s", err.text);
    CHECK_MSG(read_all(path, 7, &again, &err) == 6676, "%s", err.text);
    CHECK(first.size == again.size && memcmp(first.data, again.data, first.size) == 0);
    buffer_free(&first);
    buffer_free(&again);
}

int main(int argc, char **argv) {
    test_start(argc, argv, "stories");
    if (!mkdtemp(folder)) return 1;
    RUN(separators);
    RUN(any_bytes);
    RUN(random_fragments);
    RUN(story_larger_than_a_read);
    RUN(gzip);
    RUN(gzip_damaged);
    RUN(folders);
    RUN(no_regular_file);
    RUN(file_changes_while_read);
    RUN(builtin);
    RUN(real_stories);
    Error err = {0};
    if (!folder_remove(folder, &err)) printf("  %s\n", err.text);
    return test_finish();
}
