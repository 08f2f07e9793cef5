/* test_shards.c - token files: the format byte by byte, hostile ones, very large and very many ones, ones that
 * change under the reader; and the way from text to shards, whose result must not depend on threads or
 * reads. */
#include "test.h"

#include "../data/shards.h"

#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zlib.h>

#define END "<|endoftext|>"
enum { BLOCK = 1 << 20 };

static char folder[] = "/tmp/test_shards_XXXXXX";

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

static Buffer read_whole(const char *path) {
    Buffer bytes = {0};
    Error err = {0};
    CHECK_MSG(file_read(path, 1 << 28, &bytes, &err), "%s", err.text);
    return bytes;
}

/* A tokenizer of 260 ids, and another of as many. */
static Bpe *small_tokenizer(int which) {
    static const char *const merges[] = {"#version: 0.2\nt h\nth e\n\xC4\xA0 the\n",
                                         "#version: 0.2\na n\nan d\n\xC4\xA0 and\n"};
    Error err = {0};
    Bpe *bpe = bpe_from_merges_text((const uint8_t *)merges[which], strlen(merges[which]), "test", &err);
    if (!bpe) printf("  %s\n", err.text), abort();
    return bpe;
}

static void put(uint8_t *to, uint64_t value, int size) {
    for (int i = 0; i < size; i++) to[i] = (uint8_t)(value >> (8 * i));
}

static uint64_t get(const uint8_t *from, int size) {
    uint64_t value = 0;
    for (int i = 0; i < size; i++) value |= (uint64_t)from[i] << (8 * i);
    return value;
}

static void seal_header(uint8_t *header) {
    put(header + 1020, checksum_crc32(0, header, 1020), 4);
}

/* A shard as shards.h describes it, written without the code under test. */
static Buffer make_shard(const uint32_t *ids, size_t count, int token_size, uint32_t vocab) {
    Buffer file = {0};
    uint8_t header[1024] = {0};
    memcpy(header, "GPTSHARD", 8);
    put(header + 8, 1, 4);
    put(header + 12, (uint64_t)token_size, 4);
    put(header + 16, count, 8);
    put(header + 24, vocab, 4);
    put(header + 28, 0x12345678, 4);
    put(header + 32, 999, 8);
    put(header + 40, BLOCK, 4);
    seal_header(header);
    buffer_append(&file, header, sizeof header);
    for (size_t i = 0; i < count; i++) {
        uint8_t token[4];
        put(token, ids[i], 4);
        buffer_append(&file, token, (size_t)token_size);
    }
    const size_t data = count * (size_t)token_size;
    for (size_t at = 0; at < data; at += BLOCK) {
        uint8_t crc[4];
        put(crc, checksum_crc32(0, file.data + 1024 + at, data - at < BLOCK ? data - at : BLOCK), 4);
        buffer_append(&file, crc, 4);
    }
    return file;
}

static uint32_t *random_ids(size_t count, uint32_t vocab, uint64_t seed) {
    uint32_t *ids = (uint32_t *)xmalloc(count * sizeof *ids);
    Rng rng = rng_start(seed, 0);
    for (size_t i = 0; i < count; i++) ids[i] = (uint32_t)rng_below(&rng, vocab);
    return ids;
}

static void check_refused(const char *pattern, const Bpe *bpe, const char *part) {
    Error err = {0};
    Shards *shards = shards_open(pattern, bpe, &err);
    CHECK_MSG(!shards, "'%s' was opened, expected: %s", pattern, part);
    CHECK_MSG(shards || strstr(err.text, part), "'%s' is not in '%s'", part, err.text);
    CHECK(!strchr(err.text, '\n'));
    shards_close(shards);
}

static void check_tokens(Shards *shards, uint64_t first, const uint32_t *expected, size_t count) {
    Error err = {0};
    uint32_t *ids = (uint32_t *)xmalloc(count * sizeof *ids + 4);
    CHECK_MSG(shards_read(shards, first, count, ids, &err), "%s", err.text);
    CHECK(memcmp(ids, expected, count * sizeof *ids) == 0);
    free(ids);
}

static void check_read_fails(Shards *shards, uint64_t first, size_t count, const char *part) {
    Error err = {0};
    uint32_t *ids = (uint32_t *)xmalloc(count * sizeof *ids + 4);
    CHECK(!shards_read(shards, first, count, ids, &err));
    CHECK_MSG(strstr(err.text, part), "'%s' is not in '%s'", part, err.text);
    free(ids);
}

/* Writes ids as shards <folder>/<name>-*.bin, in appends of uneven length. */
static void write_shards(const char *name, const Bpe *bpe, const uint32_t *ids, size_t count,
                         uint64_t per_shard) {
    Error err = {0};
    ShardWriter *writer = shard_writer_open(folder, name, bpe, per_shard, &err);
    CHECK_MSG(writer != NULL, "%s", err.text);
    if (!writer) return;
    Rng rng = rng_start(5, 5);
    for (size_t i = 0; i < count;) {
        size_t n = rng_below(&rng, 3 * per_shard);
        if (n > count - i) n = count - i;
        CHECK(shard_writer_append(writer, ids + i, n, &err));
        i += n;
    }
    uint64_t tokens = 0;
    CHECK_MSG(shard_writer_close(writer, &tokens, &err), "%s", err.text);
    CHECK(tokens == count);
}

static int count_files(const char *path, const char *part) {
    char **names;
    size_t count;
    int found = 0;
    Error err = {0};
    if (!folder_names(path, &names, &count, &err)) return -1;
    for (size_t i = 0; i < count; i++) {
        found += strstr(names[i], part) != NULL;
        free(names[i]);
    }
    free(names);
    return found;
}

/* ---- the format ---- */

TEST(format) {
    Bpe *bpe = small_tokenizer(0);
    static const uint32_t ids[5] = {0, 1, 258, 259, 255};
    write_shards("format", bpe, ids, 5, 100);
    Buffer file = read_whole(in_folder("format-00000.bin"));
    CHECK(file.size == 1024 + 10 + 4);
    if (file.size == 1038) {
        CHECK(memcmp(file.data, "GPTSHARD", 8) == 0);
        CHECK(get(file.data + 8, 4) == 1 && get(file.data + 12, 4) == 2 && get(file.data + 16, 8) == 5);
        CHECK(get(file.data + 24, 4) == 260 && get(file.data + 28, 4) == bpe_fingerprint(bpe).crc32);
        CHECK(get(file.data + 32, 8) == bpe_fingerprint(bpe).length && get(file.data + 40, 4) == BLOCK);
        for (int i = 44; i < 1020; i++) CHECK(file.data[i] == 0);
        CHECK(get(file.data + 1020, 4) == checksum_crc32(0, file.data, 1020));
        for (int i = 0; i < 5; i++) CHECK(get(file.data + 1024 + 2 * i, 2) == ids[i]);
        CHECK(get(file.data + 1034, 4) == checksum_crc32(0, file.data + 1024, 10));
    }
    CHECK(count_files(folder, ".tmp") == 0);
    buffer_free(&file);
    bpe_free(bpe);
}

TEST(stream_across_files) {
    Bpe *bpe = small_tokenizer(0);
    enum { COUNT = 10007 };
    uint32_t *ids = random_ids(COUNT, 260, 1);
    write_shards("many", bpe, ids, COUNT, 333);
    Error err = {0};
    Shards *shards = shards_open(in_folder("many-*.bin"), bpe, &err);
    CHECK_MSG(shards != NULL, "%s", err.text);
    if (shards) {
        BpeFingerprint fingerprint;
        CHECK(shards_tokens(shards) == COUNT && shards_vocab(shards) == 260);
        CHECK(shards_fingerprint(shards, &fingerprint) && bpe_same(fingerprint, bpe_fingerprint(bpe)));
        check_tokens(shards, 0, ids, COUNT);
        Rng rng = rng_start(3, 3);
        for (int i = 0; i < 300; i++) {
            const uint64_t first = rng_below(&rng, COUNT), count = rng_below(&rng, COUNT - first + 1);
            check_tokens(shards, first, ids + first, count);
        }
        check_tokens(shards, COUNT, ids, 0);
        check_read_fails(shards, COUNT, 1, "there are 10007");
        check_read_fails(shards, UINT64_MAX, 1, "there are 10007");
        check_read_fails(shards, 1, COUNT, "there are 10007");
    }
    shards_close(shards);
    /* The same tokens in one file are the same stream. */
    write_shards("whole", bpe, ids, COUNT, COUNT);
    shards = shards_open(in_folder("whole-00000.bin"), NULL, &err);
    if (shards) check_tokens(shards, 17, ids + 17, 5000);
    shards_close(shards);
    free(ids);
    bpe_free(bpe);
}

TEST(writer_keeps_sets_apart) {
    Bpe *bpe = small_tokenizer(0);
    static const uint32_t ids[3] = {1, 2, 3};
    Error err = {0};
    write_shards("twice", bpe, ids, 3, 2);
    CHECK(!shard_writer_open(folder, "twice", bpe, 2, &err));
    CHECK_MSG(strstr(err.text, "already"), "%s", err.text);
    CHECK(!shard_writer_open(in_folder("nowhere"), "x", bpe, 2, &err));
    ShardWriter *writer = shard_writer_open(folder, "aborted", bpe, 2, &err);
    CHECK(writer && shard_writer_append(writer, ids, 3, &err));
    CHECK(count_files(folder, "aborted") == 2);
    shard_writer_abort(writer);
    CHECK(count_files(folder, "aborted") == 0);
    /* The disk is full: the error says so, nothing is left. */
    struct rlimit old, limit;
    getrlimit(RLIMIT_FSIZE, &old);
    signal(SIGXFSZ, SIG_IGN);
    limit = old, limit.rlim_cur = 4096;
    setrlimit(RLIMIT_FSIZE, &limit);
    uint32_t *many = random_ids(1 << 20, 260, 3);
    uint64_t tokens;
    writer = shard_writer_open(folder, "full", bpe, 1 << 20, &err);
    CHECK(writer && !shard_writer_append(writer, many, 1 << 20, &err));
    CHECK_MSG(strstr(err.text, "cannot write"), "%s", err.text);
    CHECK(!shard_writer_close(writer, &tokens, &err));
    CHECK(count_files(folder, "full") == 0);
    setrlimit(RLIMIT_FSIZE, &old);
    signal(SIGXFSZ, SIG_DFL);
    free(many);
    bpe_free(bpe);
}

TEST(four_byte_tokens) {
    uint32_t *ids = random_ids(3000, 200000, 9);
    Buffer file = make_shard(ids, 3000, 4, 200000);
    const char *path = in_folder("wide.bin");
    write_file(path, file.data, file.size);
    Error err = {0};
    Shards *shards = shards_open(path, NULL, &err);
    CHECK_MSG(shards && shards_vocab(shards) == 200000, "%s", err.text);
    if (shards) check_tokens(shards, 0, ids, 3000), check_tokens(shards, 2999, ids + 2999, 1);
    shards_close(shards);
    buffer_free(&file);
    free(ids);
}

/* ---- hostile files ---- */

TEST(hostile_headers) {
    static const uint32_t ids[100] = {1, 2, 3};
    static const struct {
        int offset, size;
        uint64_t value;
        bool sealed; /* the header's CRC is made right again, so that the field itself must be caught */
        const char *part;
    } cases[] = {
        {0, 8, 0, true, "no token shard"},
        {7, 1, 'X', true, "no token shard"},
        {8, 4, 2, true, "version 2"},
        {12, 4, 3, true, "3 bytes per token"},
        {12, 4, 0, true, "0 bytes per token"},
        {12, 4, 4, true, "cut short or damaged"},
        {16, 8, 0, true, "0 tokens"},
        {16, 8, 99, true, "99 tokens"},
        {16, 8, 101, true, "101 tokens"},
        {16, 8, UINT64_MAX, true, "18446744073709551615 tokens"},
        {16, 8, (UINT64_MAX >> 1) + 101, true, "tokens"}, /* twice this is 200 in 64 bits */
        {16, 8, UINT64_MAX / 4, true, "tokens"},
        {24, 4, 0, true, "vocabulary of 0"},
        {24, 4, 65537, true, "vocabulary of 65537"},
        {40, 4, 4096, true, "blocks of 4096"},
        {40, 4, 0, true, "blocks of 0"},
        {24, 4, 301, false, "header is damaged"},
        {32, 8, 5, false, "header is damaged"},
        {500, 1, 1, false, "header is damaged"},
        {1020, 4, 0, false, "header is damaged"},
    };
    const char *path = in_folder("hostile.bin");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Buffer file = make_shard(ids, 100, 2, 300);
        put(file.data + cases[i].offset, cases[i].value, cases[i].size);
        if (cases[i].sealed) seal_header(file.data);
        write_file(path, file.data, file.size);
        check_refused(path, NULL, cases[i].part);
        buffer_free(&file);
    }
    Buffer file = make_shard(ids, 100, 2, 300);
    for (size_t size = 0; size < file.size; size += size < 1000 || size > 1030 ? 37 : 1) {
        write_file(path, file.data, size);
        check_refused(path, NULL, size < 1024 ? "expected a header of 1024" : "cut short or damaged");
    }
    buffer_append(&file, "", 1);
    write_file(path, file.data, file.size);
    check_refused(path, NULL, "found 1229 bytes");
    buffer_free(&file);
    char text[3000];
    memset(text, 't', sizeof text);
    write_file(path, text, sizeof text);
    check_refused(path, NULL, "text is given as .txt");
    write_file(path, text, 10);
    check_refused(path, NULL, "found 10 bytes");
}

TEST(hostile_patterns) {
    check_refused(in_folder("nothing-*.bin"), NULL, "no file matches");
    check_refused(in_folder("nowhere/x.bin"), NULL, "no file matches");
    check_refused(folder, NULL, "is a folder");
    CHECK(mkfifo(in_folder("pipe.bin"), 0666) == 0);
    check_refused(in_folder("pipe.bin"), NULL, "not a regular file");
    check_refused("", NULL, "no file matches");
    check_refused("/dev/zero", NULL, "not a regular file");
}

TEST(patterns) {
    static const uint32_t ids[4] = {1, 2, 3, 4};
    Error err = {0};
    CHECK(folder_make(in_folder("odd[name]*"), &err) && folder_make(in_folder("odd-b"), &err));
    for (int i = 0; i < 4; i++) {
        Buffer file = make_shard(ids + i, 1, 2, 300);
        char name[64];
        snprintf(name, sizeof name, "odd[name]*/train-%d.bin", 3 - i); /* not in the order of their names */
        write_file(in_folder(name), file.data, file.size);
        write_file(in_folder("odd-b/train-x.bin"), file.data, file.size);
        buffer_free(&file);
    }
    static const uint32_t in_order[4] = {4, 3, 2, 1};
    Shards *shards = shards_open(in_folder("odd[name]*/train-*.bin"), NULL, &err);
    CHECK_MSG(shards && shards_tokens(shards) == 4, "%s", err.text);
    if (shards) check_tokens(shards, 0, in_order, 4);
    shards_close(shards);
    shards = shards_open(in_folder("odd*/train-?.bin"), NULL, &err); /* wildcards in the folder */
    CHECK_MSG(shards && shards_tokens(shards) == 5, "%s", err.text);
    shards_close(shards);
}

TEST(id_out_of_range) {
    uint32_t ids[1000] = {0};
    ids[777] = 300;
    Buffer file = make_shard(ids, 1000, 2, 300);
    const char *path = in_folder("range.bin");
    write_file(path, file.data, file.size);
    Error err = {0};
    Shards *shards = shards_open(path, NULL, &err);
    CHECK(shards != NULL);
    if (shards) {
        check_tokens(shards, 0, ids, 777);
        check_read_fails(shards, 700, 100, "token 777 is id 300");
        check_read_fails(shards, 777, 1, "vocabulary has 300 ids");
        check_tokens(shards, 778, ids + 778, 222);
    }
    shards_close(shards);
    buffer_free(&file);
}

TEST(damaged_block) {
    enum { COUNT = 1300000 }; /* three blocks, the last short */
    uint32_t *ids = random_ids(COUNT, 300, 4);
    Buffer file = make_shard(ids, COUNT, 2, 300);
    const char *path = in_folder("blocks.bin");
    file.data[1024 + BLOCK + 1000] ^= 1;
    write_file(path, file.data, file.size);
    Error err = {0};
    Shards *shards = shards_open(path, NULL, &err);
    CHECK(shards != NULL);
    if (shards) {
        check_tokens(shards, 0, ids, BLOCK / 2);
        check_tokens(shards, BLOCK, ids + BLOCK, COUNT - BLOCK);
        check_read_fails(shards, BLOCK / 2 - 1, 2, "the block at byte 1049600");
        check_read_fails(shards, BLOCK - 1, 1, "is damaged");
        check_tokens(shards, 5, ids + 5, 5);
    }
    shards_close(shards);
    /* A damaged CRC of an intact block is caught as well. */
    file.data[1024 + BLOCK + 1000] ^= 1;
    file.data[file.size - 1] ^= 0x80;
    write_file(path, file.data, file.size);
    shards = shards_open(path, NULL, &err);
    CHECK(shards != NULL);
    if (shards) {
        check_tokens(shards, 0, ids, BLOCK);
        check_read_fails(shards, COUNT - 1, 1, "is damaged");
    }
    shards_close(shards);
    buffer_free(&file);
    free(ids);
}

TEST(changed_while_in_use) {
    enum { COUNT = 2 * BLOCK };
    uint32_t *ids = random_ids(COUNT, 300, 6);
    Buffer file = make_shard(ids, COUNT, 2, 300);
    const char *path = in_folder("changing.bin");
    write_file(path, file.data, file.size);
    Error err = {0};
    Shards *shards = shards_open(path, NULL, &err);
    CHECK(shards != NULL);
    if (shards) {
        check_tokens(shards, 0, ids, 100);
        CHECK(truncate(path, 500000) == 0);
        check_read_fails(shards, 0, 100, "changed or replaced while in use");
        check_read_fails(shards, COUNT - 1, 1, "changed or replaced while in use");
    }
    shards_close(shards);
    /* Other tokens in the place of those whose block was checked. */
    write_file(path, file.data, file.size);
    const struct timespec old[2] = {{1000, 0}, {1000, 0}};
    CHECK(utimensat(AT_FDCWD, path, old, 0) == 0);
    shards = shards_open(path, NULL, &err);
    CHECK(shards != NULL);
    if (shards) {
        check_tokens(shards, 0, ids, 100);
        const int fd = open(path, O_WRONLY | O_CLOEXEC);
        CHECK(fd >= 0 && pwrite(fd, "\1\0\1\0", 4, 1024) == 4 && close(fd) == 0);
        check_read_fails(shards, 0, 100, "changed or replaced while in use");
    }
    shards_close(shards);
    buffer_free(&file);
    free(ids);
}

/* ---- tokenizers ---- */

TEST(tokenizers_must_agree) {
    Bpe *one = small_tokenizer(0), *other = small_tokenizer(1);
    static const uint32_t ids[3] = {1, 2, 3};
    char a[32], b[32];
    snprintf(a, sizeof a, "CRC-32 %08x", bpe_fingerprint(one).crc32);
    snprintf(b, sizeof b, "CRC-32 %08x", bpe_fingerprint(other).crc32);
    write_shards("agree-a", one, ids, 3, 10);
    write_shards("agree-b", other, ids, 3, 10);
    check_refused(in_folder("agree-a-*.bin"), other, a);
    check_refused(in_folder("agree-a-*.bin"), other, b);
    check_refused(in_folder("agree-*.bin"), NULL, a);
    check_refused(in_folder("agree-*.bin"), NULL, b);
    check_refused(in_folder("agree-*.bin"), one, "another tokenizer");
    bpe_free(one);
    bpe_free(other);
}

TEST(identity) {
    Bpe *bpe = small_tokenizer(0);
    uint32_t *ids = random_ids(1000, 260, 8);
    uint32_t identities[3];
    Error err = {0};
    static const char *const names[3] = {"same-1", "same-2", "differs"};
    for (int i = 0; i < 3; i++) {
        if (i == 2) ids[500] ^= 1;
        write_shards(names[i], bpe, ids, 1000, 400);
        char *pattern = xformat("%s/%s-*.bin", folder, names[i]);
        Shards *shards = shards_open(pattern, bpe, &err);
        CHECK_MSG(shards != NULL, "%s", err.text);
        identities[i] = shards ? shards_identity(shards) : 0;
        shards_close(shards);
        free(pattern);
    }
    CHECK(identities[0] == identities[1] && identities[0] != identities[2]);
    free(ids);
    bpe_free(bpe);
}

/* ---- llm.c's shards ---- */

static Buffer make_llmc(const uint32_t *ids, size_t count) {
    Buffer file = {0};
    uint8_t header[1024] = {0};
    put(header, 20240520, 4);
    put(header + 4, 1, 4);
    put(header + 8, count, 4);
    buffer_append(&file, header, sizeof header);
    for (size_t i = 0; i < count; i++) {
        uint8_t token[2];
        put(token, ids[i], 2);
        buffer_append(&file, token, 2);
    }
    return file;
}

TEST(llmc) {
    Bpe *bpe = small_tokenizer(0);
    static const uint32_t ids[6] = {259, 1, 2, 3, 260, 4};
    const char *path = in_folder("llmc.bin");
    Buffer file = make_llmc(ids, 6);
    write_file(path, file.data, file.size);
    Error err = {0};
    BpeFingerprint fingerprint;
    check_refused(path, NULL, "-tokenizer");
    Shards *shards = shards_open(path, bpe, &err);
    CHECK_MSG(shards && shards_tokens(shards) == 6 && shards_vocab(shards) == 260, "%s", err.text);
    if (shards) {
        CHECK(!shards_fingerprint(shards, &fingerprint));
        check_tokens(shards, 0, ids, 4);
        check_read_fails(shards, 2, 4, "token 4 is id 260");
    }
    shards_close(shards);
    static const struct {
        int offset;
        uint64_t value;
        const char *part;
    } cases[] = {{0, 20240801, "no token shard"},
                 {4, 2, "version 2"},
                 {8, 0xFFFFFFFF, "says -1 tokens"},
                 {8, 5, "5 tokens"},
                 {8, 7, "7 tokens"},
                 {8, 0, "0 tokens"},
                 {8, 0x7FFFFFFF, "2147483647 tokens"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const uint64_t right = get(file.data + cases[i].offset, 4);
        put(file.data + cases[i].offset, cases[i].value, 4);
        write_file(path, file.data, file.size);
        check_refused(path, bpe, cases[i].part);
        put(file.data + cases[i].offset, right, 4);
    }
    buffer_free(&file);
    bpe_free(bpe);
}

/* ---- large and many ---- */

/* Files of 2.6 GB, almost all of it holes. */
TEST(sparse_shards_over_2_gib) {
    enum { COUNT = 1300000000 };
    static const uint32_t ids[3] = {7, 8, 9};
    const uint64_t data = 2ull * COUNT, blocks = (data + BLOCK - 1) / BLOCK;
    Bpe *bpe = small_tokenizer(0);
    uint8_t *block = (uint8_t *)xcalloc(1, BLOCK);
    for (int llmc = 0; llmc < 2; llmc++) {
        const char *path = in_folder(llmc ? "sparse-llmc.bin" : "sparse.bin");
        Buffer header = llmc ? make_llmc(ids, 0) : make_shard(ids, 0, 2, 300);
        put(header.data + (llmc ? 8 : 16), COUNT, 4);
        if (!llmc) seal_header(header.data);
        FILE *file = fopen(path, "wb");
        if (!file) abort();
        fwrite(header.data, 1, 1024, file);
        uint8_t tokens[6];
        for (int i = 0; i < 3; i++) put(tokens + 2 * i, ids[i], 2);
        fseeko(file, (off_t)(1024 + data - 6), SEEK_SET);
        fwrite(tokens, 1, 6, file);
        memset(block, 0, BLOCK);
        const uint32_t zero_crc = checksum_crc32(0, block, BLOCK);
        const size_t last = data % BLOCK;
        memcpy(block + last - 6, tokens, 6);
        const uint32_t last_crc = checksum_crc32(0, block, last);
        for (uint64_t i = 0; !llmc && i < blocks; i++) {
            uint8_t crc[4];
            put(crc, i + 1 < blocks ? zero_crc : last_crc, 4);
            fwrite(crc, 1, 4, file);
        }
        if (fclose(file)) SKIP("no sparse files here");
        Error err = {0};
        Shards *shards = shards_open(path, llmc ? bpe : NULL, &err);
        CHECK_MSG(shards && shards_tokens(shards) == COUNT, "%s", err.text);
        if (shards) {
            static const uint32_t zeros[5] = {0}, end[5] = {0, 0, 7, 8, 9};
            check_tokens(shards, 0, zeros, 5);
            check_tokens(shards, 1073741822, zeros, 5); /* across byte 2^31 */
            check_tokens(shards, COUNT - 5, end, 5);
        }
        shards_close(shards);
        unlink(path);
        buffer_free(&header);
    }
    free(block);
    bpe_free(bpe);
}

TEST(more_shards_than_open_files) {
    enum { SHARDS = 300, EACH = 50 };
    uint32_t *ids = random_ids(SHARDS * EACH, 260, 11);
    for (int i = 0; i < SHARDS; i++) {
        Buffer file = make_shard(ids + i * EACH, EACH, 2, 260);
        char name[32];
        snprintf(name, sizeof name, "crowd-%05d.bin", i);
        write_file(in_folder(name), file.data, file.size);
        buffer_free(&file);
    }
    struct rlimit old, limit;
    getrlimit(RLIMIT_NOFILE, &old);
    limit = old, limit.rlim_cur = 64;
    setrlimit(RLIMIT_NOFILE, &limit);
    Error err = {0};
    Shards *shards = shards_open(in_folder("crowd-*.bin"), NULL, &err);
    CHECK_MSG(shards && shards_tokens(shards) == SHARDS * EACH, "%s", err.text);
    if (shards) {
        check_tokens(shards, 0, ids, SHARDS * EACH);
        for (uint64_t i = SHARDS * EACH - 100; i > 100; i -= 97) check_tokens(shards, i, ids + i, 60);
        /* A file that is opened for each read must still be the one that was checked. */
        Buffer file = read_whole(in_folder("crowd-00299.bin"));
        unlink(in_folder("crowd-00299.bin"));
        check_read_fails(shards, 299 * EACH, 5, "again");
        write_file(in_folder("crowd-00299.bin"), file.data, file.size);
        check_read_fails(shards, 299 * EACH, 5, "changed or replaced");
        buffer_free(&file);
    }
    shards_close(shards);
    setrlimit(RLIMIT_NOFILE, &old);
    free(ids);
}

typedef struct Reader {
    Shards *shards;
    const uint32_t *ids;
    uint64_t seed, count;
    bool ok;
} Reader;

static void *read_randomly(void *argument) {
    Reader *reader = (Reader *)argument;
    Rng rng = rng_start(reader->seed, 1);
    uint32_t got[3000];
    Error err;
    reader->ok = true;
    for (int i = 0; i < 500; i++) {
        const size_t n = rng_below(&rng, 3000);
        const uint64_t first = rng_below(&rng, reader->count - n);
        reader->ok = reader->ok && shards_read(reader->shards, first, n, got, &err) &&
                     memcmp(got, reader->ids + first, n * sizeof *got) == 0;
    }
    return NULL;
}

TEST(many_threads) {
    enum { COUNT = 2000000, THREADS = 8 };
    uint32_t *ids = random_ids(COUNT, 260, 12);
    Bpe *bpe = small_tokenizer(0);
    write_shards("threads", bpe, ids, COUNT, 700000);
    Error err = {0};
    Shards *shards = shards_open(in_folder("threads-*.bin"), bpe, &err);
    CHECK_MSG(shards != NULL, "%s", err.text);
    pthread_t threads[THREADS];
    Reader readers[THREADS];
    for (int i = 0; shards && i < THREADS; i++) {
        readers[i] = (Reader){.shards = shards, .ids = ids, .seed = (uint64_t)i, .count = COUNT};
        pthread_create(&threads[i], NULL, read_randomly, &readers[i]);
    }
    for (int i = 0; shards && i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        CHECK(readers[i].ok);
    }
    shards_close(shards);
    free(ids);
    bpe_free(bpe);
}

/* ---- from stories to shards ---- */

/* The whole stream of one side of a folder of shards. */
static Tokens side_tokens(const char *tokens_folder, const char *side, const Bpe *bpe) {
    Tokens tokens = {0};
    Error err = {0};
    char *pattern = xformat("%s/%s-*.bin", tokens_folder, side);
    Shards *shards = shards_open(pattern, bpe, &err);
    CHECK_MSG(shards != NULL, "%s", err.text);
    if (shards) {
        tokens_reserve(&tokens, shards_tokens(shards));
        tokens.count = shards_tokens(shards);
        CHECK_MSG(shards_read(shards, 0, tokens.count, tokens.ids, &err), "%s", err.text);
    }
    shards_close(shards);
    free(pattern);
    return tokens;
}

/* Encodes a source and holds both sides against `train` and `heldout`: stories, each closed by a NUL. */
static void check_sides(const DataSource *source, const Bpe *bpe, const Buffer *train,
                        const Buffer *heldout) {
    const char *out = in_folder("sides");
    Error err = {0};
    CHECK(folder_remove(out, &err));
    DataFacts facts = {0}, again = {0};
    const bool made = data_write_shards(source, bpe, out, &facts, &err);
    CHECK_MSG(made, "%s", err.text);
    if (!made) return;
    CHECK_MSG(data_read_facts(out, &again, &err), "%s", err.text);
    CHECK(facts.train_stories == again.train_stories && facts.heldout_bytes == again.heldout_bytes);
    CHECK(facts.train_tokens == again.train_tokens && facts.heldout_tokens == again.heldout_tokens);
    CHECK(!facts.builtin && !again.builtin);
    BpeEncoder *encoder = bpe_encoder_new(bpe, 0);
    for (int side = 0; side < 2; side++) {
        const Buffer *text = side ? heldout : train;
        Tokens expected = {0}, got = side_tokens(out, side ? "heldout" : "train", bpe);
        uint64_t stories = 0;
        for (size_t at = 0; at < text->size; stories++) {
            const size_t size = (size_t)((uint8_t *)memchr(text->data + at, 0, text->size - at) -
                                         text->data) -
                                at;
            bpe_encode(encoder, text->data + at, size, &expected);
            tokens_reserve(&expected, 1);
            expected.ids[expected.count++] = bpe_end_of_text(bpe);
            at += size + 1;
        }
        CHECK_MSG(got.count == expected.count &&
                      memcmp(got.ids, expected.ids, got.count * sizeof *got.ids) == 0,
                  "side %d: %zu tokens, expected %zu", side, got.count, expected.count);
        CHECK((side ? facts.heldout_stories : facts.train_stories) == stories);
        CHECK((side ? facts.heldout_bytes : facts.train_bytes) == text->size - stories);
        CHECK((side ? facts.heldout_tokens : facts.train_tokens) == expected.count);
        tokens_free(&expected);
        tokens_free(&got);
    }
    bpe_encoder_free(encoder);
}

static void add_story(Buffer *stories, const void *text, size_t size) {
    buffer_append(stories, text, size);
    buffer_append(stories, "", 1);
}

/* Some text with words, punctuation, white space of all kinds. */
static void add_words(Buffer *text, Rng *rng, size_t size) {
    static const char *const words[] = {
        "the",      " the", " and", " cat's", ".\n",  "  ",           "\xC3\xA9t\xC3\xA9",
        "\xC2\xA0", " 42",  "\t",   "--",     "\n\n", "\xE3\x80\x80", "\xFF"};
    for (const size_t end = text->size + size; text->size < end;)
        buffer_append_text(text, words[rng_below(rng, sizeof words / sizeof *words)]);
}

TEST(every_twentieth_story_is_held_out) {
    Bpe *bpe = small_tokenizer(0);
    static const int counts[] = {20, 21, 39, 40, 65};
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
        Buffer text = {0}, train = {0}, heldout = {0};
        Rng rng = rng_start(c, 1);
        for (int i = 0; i < counts[c]; i++) {
            Buffer story = {0};
            add_words(&story, &rng, 1 + rng_below(&rng, 200));
            buffer_append_text(&story, "x"); /* no story ends in a newline, which the separator would take */
            add_story(i % 20 == 19 ? &heldout : &train, "x", 0);
            (i % 20 == 19 ? &heldout : &train)->size--;
            add_story(i % 20 == 19 ? &heldout : &train, story.data, story.size);
            buffer_append(&text, story.data, story.size);
            buffer_append_text(&text, i % 3 ? "\n" END "\n" : END);
            if (i % 3 == 0) buffer_append_text(&text, "\n");
            buffer_free(&story);
        }
        write_file(in_folder("twentieth.txt"), text.data, text.size);
        DataSource source = {.data = in_folder("twentieth.txt"), .threads = 2};
        /* A story may begin with a newline: the separator's own comes before it. */
        check_sides(&source, bpe, &train, &heldout);
        buffer_free(&text);
        buffer_free(&train);
        buffer_free(&heldout);
    }
    bpe_free(bpe);
}

TEST(last_twentieth_of_the_bytes) {
    static const struct {
        const char *text, *train, *heldout; /* of the sides: stories separated by | */
    } cases[] = {
        {"ab", "a", "b"},
        {"one two three four five six", "one two three four five", " six"},
        {"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "aa"},
        {"a story" END "another one" END "z", "a story|another one", "z"},
        {"1234567890123456789 1234567890123456789" END "y", "1234567890123456789", " 1234567890123456789|y"},
        {"0123456789" END "0123456789012345678901234", "0123456789", "0123456789012345678901234"},
        {"0123456789012345678\xE6\x97\xA5\xE6\x97\xA5", "0123456789012345678\xE6\x97\xA5", "\xE6\x97\xA5"},
    };
    Bpe *bpe = small_tokenizer(0);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_file(in_folder("last.txt"), cases[i].text, strlen(cases[i].text));
        Buffer sides[2] = {{0}, {0}};
        for (int side = 0; side < 2; side++) {
            const char *stories = side ? cases[i].heldout : cases[i].train;
            buffer_append(&sides[side], stories, strlen(stories) + 1);
            for (size_t j = 0; j < sides[side].size; j++)
                if (sides[side].data[j] == '|') sides[side].data[j] = 0;
        }
        static const size_t read_sizes[] = {0, 1, 5};
        for (int r = 0; r < 3; r++) {
            DataSource source = {.data = in_folder("last.txt"), .threads = 1, .read_size = read_sizes[r]};
            check_sides(&source, bpe, &sides[0], &sides[1]);
        }
        buffer_free(&sides[0]);
        buffer_free(&sides[1]);
    }
    bpe_free(bpe);
}

/* Stories of all sizes, some over a job's and a read's, with many and with no places to cut: the shards are
 * those of one encoder that gets each story whole. */
TEST(long_stories) {
    Bpe *bpe = small_tokenizer(0);
    Buffer text = {0}, train = {0}, heldout = {0};
    Rng rng = rng_start(21, 1);
    for (int i = 0; i < 22; i++) {
        Buffer story = {0};
        switch (i) {
        case 3:
            add_words(&story, &rng, 1500000);
            break;
        case 5: /* one long word with marks in it, no white space before its end */
            for (int j = 0; j < 700000; j++) buffer_append_text(&story, j % 5 ? "the" : "!");
            buffer_append_text(&story, " the end");
            break;
        case 6: /* white space only outside ASCII, where no cut is made */
            for (int j = 0; j < 300000; j++)
                buffer_append_text(&story, j % 9 ? "\xE6\x97\xA5" : "\xE3\x80\x80");
            break;
        case 19:
            add_words(&story, &rng, 600000);
            break;
        default:
            add_words(&story, &rng, 1000);
        }
        buffer_append_text(&story, "x");
        add_story(i % 20 == 19 ? &heldout : &train, story.data, story.size);
        buffer_append(&text, story.data, story.size);
        buffer_append_text(&text, "\n" END "\n");
        buffer_free(&story);
    }
    write_file(in_folder("long.txt"), text.data, text.size);
    Buffer packed = {0};
    gzFile file = gzopen(in_folder("long.txt.gz"), "wb1");
    CHECK(gzwrite(file, text.data, (unsigned)text.size) == (int)text.size);
    gzclose(file);
    static const struct {
        int threads;
        size_t read_size;
        const char *name;
    } cases[] = {{1, 0, "long.txt"}, {2, 0, "long.txt"}, {5, 4096, "long.txt"}, {3, 70001, "long.txt.gz"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        DataSource source = {
            .data = in_folder(cases[i].name), .threads = cases[i].threads, .read_size = cases[i].read_size};
        check_sides(&source, bpe, &train, &heldout);
    }
    buffer_free(&packed);
    buffer_free(&text);
    buffer_free(&train);
    buffer_free(&heldout);
    bpe_free(bpe);
}

/* A real shard of llm.c's, made by other programs from the same stories, holds what we make of them; only
 * that it has one story more, "The End.", four tokens from 510,116 on. */
TEST(llmc_sample) {
    enum { COUNT = 609755, ONLY_THERE = 510116, ONLY_THERE_SIZE = 4 };
    const char *path = "../shared/data/formats/ts_heldout_gpt2.llmc.bin";
    const char *merges = "../shared/data/gpt2/vocab.bpe", *text = "../shared/data/tinystories/heldout.txt";
    if (access(path, R_OK) || access(merges, R_OK) || access(text, R_OK))
        SKIP("%s or its like is not there", path);
    Error err = {0};
    Bpe *bpe = bpe_load(merges, &err);
    CHECK_MSG(bpe != NULL, "%s", err.text);
    Shards *shards = bpe ? shards_open(path, bpe, &err) : NULL;
    CHECK_MSG(shards != NULL && shards_tokens(shards) == COUNT, "%s", err.text);
    if (shards) {
        uint32_t *ids = (uint32_t *)xmalloc(COUNT * sizeof *ids);
        CHECK_MSG(shards_read(shards, 0, COUNT, ids, &err), "%s", err.text);
        const DataSource source = {.data = text, .heldout = text, .threads = 2};
        DataFacts facts;
        CHECK_MSG(data_write_shards(&source, bpe, in_folder("sample"), &facts, &err), "%s", err.text);
        Tokens ours = side_tokens(in_folder("sample"), "heldout", bpe);
        CHECK(facts.heldout_stories == 3117 && ours.count == COUNT - ONLY_THERE_SIZE);
        const size_t after = ONLY_THERE + ONLY_THERE_SIZE;
        CHECK(ours.count + ONLY_THERE_SIZE == COUNT && memcmp(ours.ids, ids, ONLY_THERE * sizeof *ids) == 0 &&
              memcmp(ours.ids + ONLY_THERE, ids + after, (COUNT - after) * sizeof *ids) == 0);
        tokens_free(&ours);
        free(ids);
    }
    shards_close(shards);
    bpe_free(bpe);
}

TEST(heldout_of_its_own) {
    Bpe *bpe = small_tokenizer(0);
    write_file(in_folder("own-train.txt"), "the cat\n" END "\nthe dog", 29);
    write_file(in_folder("own-heldout.txt"), "the mouse" END, 22);
    Buffer train = {0}, heldout = {0};
    add_story(&train, "the cat", 7);
    add_story(&train, "the dog", 7);
    add_story(&heldout, "the mouse", 9);
    DataSource source = {
        .data = in_folder("own-train.txt"), .heldout = in_folder("own-heldout.txt"), .threads = 2};
    check_sides(&source, bpe, &train, &heldout);
    buffer_free(&train);
    buffer_free(&heldout);
    bpe_free(bpe);
}

TEST(builtin_stories_and_their_floor) {
    Bpe *bpe = small_tokenizer(0);
    Error err = {0};
    const char *out = in_folder("builtin");
    DataSource source = {.seed = 3, .stories = 100, .threads = 2};
    DataFacts facts, again;
    CHECK_MSG(data_write_shards(&source, bpe, out, &facts, &err), "%s", err.text);
    CHECK(facts.train_stories == 100 && facts.heldout_stories == 5);
    CHECK(facts.builtin && facts.seed == 3);
    CHECK(data_read_facts(out, &again, &err) && again.builtin && again.seed == 3);
    Tokens heldout = side_tokens(out, "heldout", bpe);
    CHECK(heldout.count == facts.heldout_tokens);
    Shards *shards = shards_open(in_folder("builtin/heldout-*.bin"), bpe, &err);
    CHECK_MSG(shards != NULL, "%s", err.text);
    /* Token by token: none costs less than nothing, and at each story's end, where the grammar has told all of it,
     * the sum is that of the stories' probabilities without the first token's. */
    double floor, before = 0, stories = 0;
    uint64_t ended = 0;
    for (uint64_t n = 1; shards && n < heldout.count; n++) {
        CHECK_MSG(data_floor(&again, bpe, shards, n, &floor, &err), "%s", err.text);
        CHECK_MSG(floor * (double)n > before - 1e-9, "token %d: %.12f, before it %.12f", (int)n,
                  floor * (double)n, before);
        before = floor * (double)n;
        if (heldout.ids[n] != bpe_end_of_text(bpe)) continue;
        Buffer story = {0};
        stories -= grammar_story(3, true, ended++, &story);
        size_t first;
        const uint8_t *const bytes = bpe_token_bytes(bpe, heldout.ids[0], &first);
        const double expected = stories + grammar_beginning(bytes, first);
        CHECK_MSG(fabs(before - expected) < 1e-9 * expected, "after %d stories %.12f, expected %.12f",
                  (int)ended, before, expected);
        buffer_free(&story);
    }
    CHECK(ended == 5);
    /* Other stories, or such whose seed is not known, have no floor that could be wrong. */
    again.seed = 4;
    CHECK(!data_floor(&again, bpe, shards, 500, &floor, &err) && isnan(floor));
    CHECK_MSG(strstr(err.text, "another version"), "%s", err.text);
    again.seed = -1;
    CHECK(!data_floor(&again, bpe, shards, 500, &floor, &err) && isnan(floor));
    CHECK_MSG(strstr(err.text, "earlier version"), "%s", err.text);
    again.builtin = false;
    CHECK(data_floor(&again, bpe, shards, 500, &floor, &err) && isnan(floor));
    shards_close(shards);
    tokens_free(&heldout);
    CHECK(folder_remove(out, &err));
    source.heldout_stories = 17;
    CHECK(data_write_shards(&source, bpe, out, &facts, &err) && facts.heldout_stories == 17);
    CHECK(folder_remove(out, &err));
    source.stories = 0;
    CHECK(!data_write_shards(&source, bpe, out, &facts, &err));
    CHECK_MSG(strstr(err.text, "-stories"), "%s", err.text);
    bpe_free(bpe);
}

TEST(too_little_text) {
    Bpe *bpe = small_tokenizer(0);
    static const struct {
        const char *train, *heldout, *part;
    } cases[] = {{"", NULL, "holds no story"},
                 {END "\n" END, NULL, "holds no story"},
                 {"a", NULL, "expected at least 2"},
                 {"", "text", "training side"},
                 {"text", "", "held-out side"}};
    const char *out = in_folder("little");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        DataSource source = {.data = in_folder("little.txt"), .threads = 1};
        write_file(source.data, cases[i].train, strlen(cases[i].train));
        if (cases[i].heldout) {
            source.heldout = in_folder("little-heldout.txt");
            write_file(source.heldout, cases[i].heldout, strlen(cases[i].heldout));
        }
        Error err = {0};
        DataFacts facts;
        CHECK(!data_write_shards(&source, bpe, out, &facts, &err));
        CHECK_MSG(strstr(err.text, cases[i].part), "'%s' is not in '%s'", cases[i].part, err.text);
        CHECK(count_files(out, "") == 0);
    }
    bpe_free(bpe);
}

TEST(interrupted_and_finished_folders) {
    Bpe *bpe = small_tokenizer(0);
    Error err = {0};
    DataFacts facts;
    const char *out = in_folder("finished");
    CHECK(folder_make(out, &err));
    write_file(in_folder("finished/train-00000.bin"), "half", 4);
    write_file(in_folder("finished/train-00007.bin"), "old", 3);
    write_file(in_folder("finished/heldout-00001.bin.tmp"), "old", 3);
    write_file(in_folder("finished/train-me.bin"), "mine", 4);
    write_file(in_folder("finished.txt"), "the cat and the dog", 19);
    DataSource source = {.data = in_folder("finished.txt"), .threads = 1};
    CHECK_MSG(data_write_shards(&source, bpe, out, &facts, &err), "%s", err.text);
    CHECK(count_files(out, "train-0") == 1 && count_files(out, "heldout-0") == 1 &&
          count_files(out, "me") == 1);
    CHECK(!data_write_shards(&source, bpe, out, &facts, &err));
    CHECK_MSG(strstr(err.text, "finished"), "%s", err.text);
    /* A source that turns out to be damaged leaves no shards. */
    Buffer text = {0};
    for (int i = 0; i < 200000; i++) buffer_append_text(&text, "a story of the cat\n" END "\n");
    gzFile file = gzopen(in_folder("cut.txt.gz"), "wb");
    gzwrite(file, text.data, (unsigned)text.size);
    gzclose(file);
    struct stat info;
    stat(in_folder("cut.txt.gz"), &info);
    CHECK(truncate(in_folder("cut.txt.gz"), info.st_size - 9) == 0);
    source.data = in_folder("cut.txt.gz");
    CHECK(!data_write_shards(&source, bpe, in_folder("cut"), &facts, &err));
    CHECK_MSG(strstr(err.text, "ends before its gzip data"), "%s", err.text);
    CHECK(count_files(in_folder("cut"), "") == 0);
    buffer_free(&text);
    bpe_free(bpe);
}

#define COUNTS                                                                          \
    "{\"train_stories\":1,\"heldout_stories\":2,\"train_bytes\":3,\"heldout_bytes\":4," \
    "\"train_tokens\":5,\"heldout_tokens\":6,"
TEST(hostile_facts) {
    static const struct {
        const char *text, *part;
    } cases[] = {{"", "data.json"},
                 {"{", "line 1"},
                 {"[]", "train_stories"},
                 {"{\"train_stories\":-1}", "train_stories"},
                 {"{\"train_stories\":1.5}", "train_stories"},
                 {"{\"train_stories\":99999999999999999999}", "line 1"},
                 {"{\"train_stories\":\"1\"}", "train_stories"},
                 {COUNTS "\"builtin_seed\":\"1\"}", "builtin_seed"},
                 {COUNTS "\"builtin_seed\":1.5}", "builtin_seed"},
                 {COUNTS "\"builtin_seed\":-4}", "builtin_seed"}};
    static const struct { /* and what earlier versions wrote */
        const char *text;
        bool builtin;
        int64_t seed;
    } good[] = {{COUNTS "\"builtin_seed\":15}", true, 15},
                {COUNTS "\"builtin_seed\":null}", false, 0},
                {COUNTS "\"heldout_floor\":0.87}", true, -1},
                {COUNTS "\"heldout_floor\":null}", false, -1}};
    CHECK(mkdir(in_folder("facts"), 0777) == 0);
    const char *path = in_folder("facts/data.json");
    Error err = {0};
    DataFacts facts;
    CHECK(!data_read_facts(in_folder("facts"), &facts, &err));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_file(path, cases[i].text, strlen(cases[i].text));
        CHECK(!data_read_facts(in_folder("facts"), &facts, &err));
        CHECK_MSG(strstr(err.text, cases[i].part), "'%s' is not in '%s'", cases[i].part, err.text);
    }
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        write_file(path, good[i].text, strlen(good[i].text));
        CHECK_MSG(data_read_facts(in_folder("facts"), &facts, &err), "%s", err.text);
        CHECK(facts.heldout_tokens == 6 && facts.builtin == good[i].builtin && facts.seed == good[i].seed);
    }
}

TEST(trained_tokenizer_sees_the_training_side) {
    Buffer text = {0};
    for (int i = 0; i < 20; i++) buffer_append_text(&text, i == 19 ? "zqzqzqzqzqzq zqzq" END : "the cat" END);
    write_file(in_folder("vocab.txt"), text.data, text.size);
    Error err = {0};
    static const size_t read_sizes[] = {0, 1, 3};
    for (int i = 0; i < 3; i++) {
        DataSource source = {.data = in_folder("vocab.txt"), .threads = 1 + i, .read_size = read_sizes[i]};
        Bpe *bpe = data_train_tokenizer(&source, 300, &err);
        CHECK_MSG(bpe != NULL, "%s", err.text);
        if (!bpe) continue;
        Buffer merges = {0};
        bpe_merges_text(bpe, &merges);
        buffer_append(&merges, "", 1);
        CHECK_MSG(strstr((char *)merges.data, "\nth e\n"), "%s", (char *)merges.data);
        CHECK(!strchr((char *)merges.data, 'q'));
        CHECK(bpe_vocab_size(bpe) == 256 + 5 + 1); /* "the" and " cat" take five merges and no more */
        buffer_free(&merges);
        bpe_free(bpe);
    }
    buffer_free(&text);
}

/* A stop asked for while encoding; in a process of its own, since a stop stays. */
TEST(stop) {
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        signals_install();
        raise(SIGUSR1);
        Bpe *bpe = small_tokenizer(0);
        Error err = {0};
        DataFacts facts;
        DataSource source = {.seed = 1, .stories = 1000000000, .threads = 2};
        const bool stopped = !data_write_shards(&source, bpe, in_folder("stopped"), &facts, &err) &&
                             strstr(err.text, "stopped") && count_files(in_folder("stopped"), "") == 0;
        bpe_free(bpe);
        _exit(stopped ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK(status == 0);
}

int main(int argc, char **argv) {
    test_start(argc, argv, "shards");
    if (!mkdtemp(folder)) return 1;
    RUN(format);
    RUN(stream_across_files);
    RUN(writer_keeps_sets_apart);
    RUN(four_byte_tokens);
    RUN(hostile_headers);
    RUN(hostile_patterns);
    RUN(patterns);
    RUN(id_out_of_range);
    RUN(damaged_block);
    RUN(changed_while_in_use);
    RUN(tokenizers_must_agree);
    RUN(identity);
    RUN(llmc);
    RUN(sparse_shards_over_2_gib);
    RUN(more_shards_than_open_files);
    RUN(many_threads);
    RUN(every_twentieth_story_is_held_out);
    RUN(last_twentieth_of_the_bytes);
    RUN(long_stories);
    RUN(heldout_of_its_own);
    RUN(llmc_sample);
    RUN(builtin_stories_and_their_floor);
    RUN(too_little_text);
    RUN(interrupted_and_finished_folders);
    RUN(hostile_facts);
    RUN(trained_tokenizer_sees_the_training_side);
    RUN(stop);
    Error err = {0};
    if (!folder_remove(folder, &err)) printf("  %s\n", err.text);
    return test_finish();
}
