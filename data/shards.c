/* shards.c - token files: the writer, the reader, and the way from stories to shards (shards.h).
 *
 * The reader uses pread, not mmap: a mapped file that is cut short under the program kills it with SIGBUS,
 * while a short pread is an error that can be told. The price, one copy of a few kilobytes a sequence, is
 * nothing beside a step.
 *
 * From stories to shards: the calling thread reads stories and fills jobs of about half a mebibyte of text,
 * encoder threads turn jobs into tokens, and the calling thread again writes them in the order in which it
 * sent them. The number of jobs is fixed, so memory does not grow with the text. */
#include "shards.h"

#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <glob.h>
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#ifdef __APPLE__
#define st_mtim st_mtimespec
#endif

enum { HEADER_SIZE = 1024, VERSION = 1, BLOCK_SIZE = 1 << 20, CRC_SIZE = 4 };
static const char magic[8] = {'G', 'P', 'T', 'S', 'H', 'A', 'R', 'D'};
enum { LLMC_MAGIC = 20240520, LLMC_VERSION = 1 };

/* Offsets in the header; shards.h says what they hold. */
enum {
    AT_VERSION = 8,
    AT_TOKEN_SIZE = 12,
    AT_TOKENS = 16,
    AT_VOCAB = 24,
    AT_TOKENIZER_CRC = 28,
    AT_TOKENIZER_LENGTH = 32,
    AT_BLOCK_SIZE = 40,
    AT_HEADER_CRC = 1020
};

static void put_u32(uint8_t *bytes, uint32_t value) {
    for (int i = 0; i < 4; i++) bytes[i] = (uint8_t)(value >> (8 * i));
}

static void put_u64(uint8_t *bytes, uint64_t value) {
    for (int i = 0; i < 8; i++) bytes[i] = (uint8_t)(value >> (8 * i));
}

static uint32_t get_u32(const uint8_t *bytes) {
    return bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 | (uint32_t)bytes[3] << 24;
}

static uint64_t get_u64(const uint8_t *bytes) {
    return get_u32(bytes) | (uint64_t)get_u32(bytes + 4) << 32;
}

/* ---- writing ---- */

/* The writer's tokens take 2 bytes; a tokenizer with more ids would need 4, which the reader takes. */
enum { WRITTEN_TOKEN_SIZE = 2 };
_Static_assert(BPE_MAX_VOCAB <= 65536, "an id fits in two bytes");

enum { MAX_SHARDS = 100000 }; /* five digits: past them the order of the names would not be the files' */

struct ShardWriter {
    char *folder, *name;
    uint32_t vocab;
    BpeFingerprint tokenizer;
    uint64_t tokens_per_shard;
    uint64_t total; /* tokens in all files */

    /* The file being written, <folder>/<name>-NNNNN.bin.tmp until it is whole; fd -1: none. */
    int fd;
    uint32_t shard_count; /* files begun */
    uint64_t tokens;      /* in this file */
    uint8_t *block;       /* (BLOCK_SIZE): the block being filled */
    size_t block_used;
    Buffer crcs; /* of the blocks written, as they will be stored */
    bool failed;
};

static char *shard_path(const ShardWriter *w, uint32_t shard, const char *end) {
    return xformat("%s/%s-%05u.bin%s", w->folder, w->name, shard, end);
}

/* Is file_name "<name>-<five digits>.bin", or that and ".tmp"? */
static bool is_shard_name(const char *file_name, const char *name, bool temporary) {
    const size_t size = strlen(name);
    if (strncmp(file_name, name, size) || file_name[size] != '-') return false;
    const char *digits = file_name + size + 1;
    if (strspn(digits, "0123456789") != 5) return false;
    return strcmp(digits + 5, temporary ? ".bin.tmp" : ".bin") == 0;
}

ShardWriter *shard_writer_open(const char *folder, const char *name, const Bpe *bpe,
                               uint64_t tokens_per_shard, Error *err) {
    char **names;
    size_t count;
    if (!folder_names(folder, &names, &count, err)) return NULL;
    bool taken = false;
    for (size_t i = 0; i < count; i++) {
        taken = taken || is_shard_name(names[i], name, false);
        free(names[i]);
    }
    free(names);
    if (taken) {
        error_set(err, "folder '%s' holds shards %s-*.bin already; name another folder or remove them first",
                  folder, name);
        return NULL;
    }
    ShardWriter *w = (ShardWriter *)xcalloc(1, sizeof *w);
    w->folder = xstrdup(folder), w->name = xstrdup(name);
    w->vocab = bpe_vocab_size(bpe), w->tokenizer = bpe_fingerprint(bpe);
    w->tokens_per_shard = tokens_per_shard ? tokens_per_shard : 1;
    w->fd = -1;
    w->block = (uint8_t *)xmalloc(BLOCK_SIZE);
    return w;
}

static bool writer_fail(ShardWriter *w, const char *what, Error *err) {
    const int code = errno;
    char *path = shard_path(w, w->shard_count - 1, ".tmp");
    w->failed = true;
    error_set(err, "cannot %s '%s': %s%s", what, path, strerror(code),
              code == ENOSPC ? "; make room on the disk or name another folder" : "");
    free(path);
    return false;
}

static bool write_all(ShardWriter *w, const void *bytes, size_t size, Error *err) {
    const uint8_t *next = (const uint8_t *)bytes;
    while (size > 0) {
        const ssize_t n = write(w->fd, next, size);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return writer_fail(w, "write", err);
        next += n, size -= (size_t)n;
    }
    return true;
}

static bool write_block(ShardWriter *w, Error *err) {
    uint8_t crc[CRC_SIZE];
    put_u32(crc, checksum_crc32(0, w->block, w->block_used));
    buffer_append(&w->crcs, crc, sizeof crc);
    const size_t size = w->block_used;
    w->block_used = 0;
    return write_all(w, w->block, size, err);
}

static bool shard_begin(ShardWriter *w, Error *err) {
    if (w->shard_count == MAX_SHARDS) {
        w->failed = true;
        return error_set(err, "'%s/%s-*.bin' would be more than %d files; put more tokens into each",
                         w->folder, w->name, MAX_SHARDS);
    }
    char *path = shard_path(w, w->shard_count++, ".tmp");
    w->fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    free(path);
    if (w->fd < 0) return writer_fail(w, "create", err);
    w->tokens = 0, w->block_used = 0, w->crcs.size = 0;
    static const uint8_t room[HEADER_SIZE];
    return write_all(w, room, HEADER_SIZE, err);
}

/* The header is written last, then the file gets its name: a crash before leaves only a .tmp. */
static bool shard_end(ShardWriter *w, Error *err) {
    if (w->block_used > 0 && !write_block(w, err)) return false;
    if (!write_all(w, w->crcs.data, w->crcs.size, err)) return false;

    uint8_t header[HEADER_SIZE] = {0};
    memcpy(header, magic, sizeof magic);
    put_u32(header + AT_VERSION, VERSION);
    put_u32(header + AT_TOKEN_SIZE, WRITTEN_TOKEN_SIZE);
    put_u64(header + AT_TOKENS, w->tokens);
    put_u32(header + AT_VOCAB, w->vocab);
    put_u32(header + AT_TOKENIZER_CRC, w->tokenizer.crc32);
    put_u64(header + AT_TOKENIZER_LENGTH, w->tokenizer.length);
    put_u32(header + AT_BLOCK_SIZE, BLOCK_SIZE);
    put_u32(header + AT_HEADER_CRC, checksum_crc32(0, header, AT_HEADER_CRC));
    if (lseek(w->fd, 0, SEEK_SET) < 0) return writer_fail(w, "write", err);
    if (!write_all(w, header, sizeof header, err)) return false;
    if (fsync(w->fd)) return writer_fail(w, "write", err);
    const int fd = w->fd;
    w->fd = -1;
    if (close(fd)) return writer_fail(w, "write", err);

    char *temporary = shard_path(w, w->shard_count - 1, ".tmp"),
         *path = shard_path(w, w->shard_count - 1, "");
    bool ok = rename(temporary, path) == 0 || writer_fail(w, "rename", err);
    free(temporary);
    free(path);
    if (ok && !path_fsync(w->folder, err)) {
        w->failed = true;
        ok = false;
    }
    return ok;
}

bool shard_writer_append(ShardWriter *w, const uint32_t *ids, size_t count, Error *err) {
    for (size_t i = 0; i < count;) {
        if (w->fd < 0 && !shard_begin(w, err)) return false;
        size_t n = (BLOCK_SIZE - w->block_used) / WRITTEN_TOKEN_SIZE;
        if (n > count - i) n = count - i;
        if (n > w->tokens_per_shard - w->tokens) n = (size_t)(w->tokens_per_shard - w->tokens);
        uint8_t *to = w->block + w->block_used;
        for (size_t j = 0; j < n; j++) {
            to[2 * j] = (uint8_t)ids[i + j];
            to[2 * j + 1] = (uint8_t)(ids[i + j] >> 8);
        }
        i += n;
        w->block_used += n * WRITTEN_TOKEN_SIZE, w->tokens += n, w->total += n;
        if (w->block_used == BLOCK_SIZE && !write_block(w, err)) return false;
        if (w->tokens == w->tokens_per_shard && !shard_end(w, err)) return false;
    }
    return true;
}

static void writer_free(ShardWriter *w) {
    buffer_free(&w->crcs);
    free(w->block);
    free(w->folder);
    free(w->name);
    free(w);
}

void shard_writer_abort(ShardWriter *w) {
    if (!w) return;
    if (w->fd >= 0) close(w->fd);
    for (uint32_t i = 0; i < w->shard_count; i++) {
        char *temporary = shard_path(w, i, ".tmp"), *path = shard_path(w, i, "");
        unlink(temporary);
        unlink(path);
        free(temporary);
        free(path);
    }
    writer_free(w);
}

bool shard_writer_close(ShardWriter *w, uint64_t *tokens, Error *err) {
    if (w->failed || (w->fd >= 0 && !shard_end(w, err))) {
        shard_writer_abort(w);
        return false;
    }
    *tokens = w->total;
    writer_free(w);
    return true;
}

/* ---- reading ---- */

typedef struct Shard {
    char *path;
    int fd; /* kept open, or -1: opened for each read */
    dev_t device;
    ino_t inode;
    struct timespec modified; /* with device, inode and size: the same file is opened again */
    uint64_t file_size;

    uint64_t first, tokens; /* its place in the stream, its length */
    size_t token_size;      /* 2 or 4 bytes */
    bool llmc;
    uint32_t vocab;
    BpeFingerprint tokenizer; /* not for llm.c's */

    uint32_t *crcs;            /* (blocks); NULL for llm.c's */
    _Atomic uint32_t *checked; /* (blocks / 32, rounded up): a bit for each block whose CRC was right */
} Shard;

struct Shards {
    Shard *list;
    size_t count;
    uint64_t tokens;
    uint32_t vocab, identity;
    bool all_named; /* each file names its tokenizer, and it is `tokenizer` */
    BpeFingerprint tokenizer;
};

/* Exactly size bytes; a file that ends before them was cut since its size was checked. */
static bool read_at(const Shard *shard, int fd, uint64_t offset, void *bytes, size_t size, Error *err) {
    uint8_t *next = (uint8_t *)bytes;
    while (size > 0) {
        const ssize_t n = pread(fd, next, size, (off_t)offset);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0)
            return error_set(err, "cannot read '%s' at byte %" PRIu64 ": %s", shard->path, offset,
                             strerror(errno));
        if (n == 0)
            return error_set(err,
                             "shard '%s' was cut short while in use: it ends at byte %" PRIu64
                             ", expected %" PRIu64 " bytes; write it again",
                             shard->path, offset, shard->file_size);
        next += n, offset += (uint64_t)n, size -= (size_t)n;
    }
    return true;
}

/* Holds the file's size against what a header of so many tokens implies, to the byte; *blocks is the number
 * of CRCs behind the tokens. */
static bool check_size(const Shard *shard, uint64_t count, uint64_t *blocks, Error *err) {
    *blocks = 0;
    if (count == 0) return error_set(err, "shard '%s' holds 0 tokens; expected at least 1", shard->path);
    uint64_t expected = UINT64_MAX;
    if (count < UINT64_MAX / 8) { /* so that 4 bytes a token and a CRC a block stay in 64 bits */
        const uint64_t data = count * shard->token_size;
        if (!shard->llmc) *blocks = data / BLOCK_SIZE + (data % BLOCK_SIZE != 0);
        expected = HEADER_SIZE + data + *blocks * CRC_SIZE;
    }
    if (expected == shard->file_size) return true;
    return error_set(err,
                     "shard '%s' is cut short or damaged: found %" PRIu64 " bytes, but %" PRIu64
                     " tokens of %zu bytes, as its header says, make %" PRIu64 "; write it again",
                     shard->path, shard->file_size, count, shard->token_size, expected);
}

static bool parse_llmc(Shard *shard, const uint8_t *header, const Bpe *bpe, Error *err) {
    const uint32_t version = get_u32(header + 4);
    const int32_t count = (int32_t)get_u32(header + 8);
    uint64_t blocks;
    if (version != LLMC_VERSION)
        return error_set(err, "llm.c shard '%s' has version %u; expected %d", shard->path, version,
                         LLMC_VERSION);
    if (count < 0)
        return error_set(err, "llm.c shard '%s' is damaged: its header says %d tokens", shard->path, count);
    shard->llmc = true;
    shard->token_size = 2;
    shard->tokens = (uint64_t)count;
    if (!check_size(shard, shard->tokens, &blocks, err)) return false;
    if (!bpe)
        return error_set(
            err,
            "llm.c shard '%s' does not say which tokenizer made it; name it with -tokenizer (for "
            "llm.c's own data, GPT-2's merges file)",
            shard->path);
    shard->vocab = bpe_vocab_size(bpe);
    return true;
}

static bool parse_ours(Shard *shard, int fd, const uint8_t *header, Error *err) {
    const uint32_t version = get_u32(header + AT_VERSION), token_size = get_u32(header + AT_TOKEN_SIZE);
    const uint32_t block_size = get_u32(header + AT_BLOCK_SIZE);
    if (version != VERSION)
        return error_set(err, "shard '%s' has version %u, this program reads version %d; write it again",
                         shard->path, version, VERSION);
    if (get_u32(header + AT_HEADER_CRC) != checksum_crc32(0, header, AT_HEADER_CRC))
        return error_set(
            err, "shard '%s': the header is damaged (CRC-32 %08x, expected %08x); write it again",
            shard->path, checksum_crc32(0, header, AT_HEADER_CRC), get_u32(header + AT_HEADER_CRC));
    if (token_size != 2 && token_size != 4)
        return error_set(err, "shard '%s' has %u bytes per token; expected 2 or 4", shard->path, token_size);
    if (block_size != BLOCK_SIZE)
        return error_set(err, "shard '%s' has blocks of %u bytes; expected %d", shard->path, block_size,
                         BLOCK_SIZE);
    shard->token_size = token_size;
    shard->tokens = get_u64(header + AT_TOKENS);
    shard->vocab = get_u32(header + AT_VOCAB);
    shard->tokenizer.crc32 = get_u32(header + AT_TOKENIZER_CRC);
    shard->tokenizer.length = get_u64(header + AT_TOKENIZER_LENGTH);
    const uint32_t max_vocab = token_size == 2 ? 65536 : INT32_MAX;
    if (shard->vocab < 1 || shard->vocab > max_vocab)
        return error_set(err,
                         "shard '%s' has a vocabulary of %u ids; expected 1 to %u for %u bytes per token",
                         shard->path, shard->vocab, max_vocab, token_size);
    uint64_t blocks;
    if (!check_size(shard, shard->tokens, &blocks, err)) return false;

    uint8_t *stored = (uint8_t *)xmalloc((size_t)blocks * CRC_SIZE);
    const bool ok = read_at(shard, fd, HEADER_SIZE + shard->tokens * token_size, stored,
                            (size_t)blocks * CRC_SIZE, err);
    if (ok) {
        shard->crcs = (uint32_t *)xmalloc((size_t)blocks * sizeof *shard->crcs);
        for (size_t i = 0; i < blocks; i++) shard->crcs[i] = get_u32(stored + i * CRC_SIZE);
        shard->checked = (_Atomic uint32_t *)xcalloc((size_t)blocks / 32 + 1, sizeof *shard->checked);
    }
    free(stored);
    return ok;
}

/* Opens a file, reads and checks what stands before and behind its tokens, and closes it unless keep. */
static bool shard_open(Shard *shard, bool keep, const Bpe *bpe, uint32_t *identity, Error *err) {
    struct stat info;
    const int fd = open(shard->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return error_set(err, "cannot open shard '%s': %s", shard->path, strerror(errno));
    bool ok = fstat(fd, &info) == 0 || error_set(err, "cannot read '%s': %s", shard->path, strerror(errno));
    if (ok && !S_ISREG(info.st_mode))
        ok = error_set(err,
                       "'%s' is not a regular file; expected a token shard (.bin) or a quoted glob of them",
                       shard->path);
    if (ok) {
        shard->file_size = (uint64_t)info.st_size;
        shard->device = info.st_dev, shard->inode = info.st_ino, shard->modified = info.st_mtim;
        if (shard->file_size < HEADER_SIZE)
            ok = error_set(err, "'%s' is no token shard: found %" PRIu64 " bytes, expected a header of %d",
                           shard->path, shard->file_size, HEADER_SIZE);
    }
    uint8_t header[HEADER_SIZE];
    ok = ok && read_at(shard, fd, 0, header, sizeof header, err);
    if (ok && memcmp(header, magic, sizeof magic) == 0) {
        ok = parse_ours(shard, fd, header, err);
    } else if (ok && get_u32(header) == LLMC_MAGIC) {
        ok = parse_llmc(shard, header, bpe, err);
    } else if (ok) {
        ok = error_set(
            err,
            "'%s' is no token shard: it begins with bytes %02x %02x %02x %02x, expected \"GPTSHARD\" "
            "or llm.c's %d; text is given as .txt or .txt.gz",
            shard->path, header[0], header[1], header[2], header[3], LLMC_MAGIC);
    }
    if (ok) {
        uint8_t size[8];
        put_u64(size, shard->file_size);
        *identity = checksum_crc32(*identity, header, sizeof header);
        *identity = checksum_crc32(*identity, size, sizeof size);
        const uint64_t blocks = (shard->tokens * shard->token_size + BLOCK_SIZE - 1) / BLOCK_SIZE;
        for (size_t i = 0; shard->crcs && i < blocks; i++) {
            uint8_t crc[CRC_SIZE];
            put_u32(crc, shard->crcs[i]);
            *identity = checksum_crc32(*identity, crc, sizeof crc);
        }
    }
    if (ok && keep) shard->fd = fd;
    else close(fd);
    return ok;
}

static bool differ(const char *path, BpeFingerprint a, uint32_t a_vocab, const char *what, BpeFingerprint b,
                   uint32_t b_vocab, Error *err) {
    return error_set(err,
                     "shard '%s' was made with another tokenizer: it names %u ids, merges of %" PRIu64
                     " bytes, CRC-32 %08x; %s has %u ids, merges of %" PRIu64
                     " bytes, CRC-32 %08x; use that tokenizer, or encode the text anew",
                     path, a_vocab, a.length, a.crc32, what, b_vocab, b.length, b.crc32);
}

/* All files must name one tokenizer, and the caller's where there is one. */
static bool check_tokenizers(Shards *s, const Bpe *bpe, Error *err) {
    s->vocab = s->list[0].vocab;
    s->tokenizer = s->list[0].tokenizer;
    s->all_named = true;
    for (size_t i = 0; i < s->count; i++) {
        const Shard *shard = &s->list[i];
        if (shard->llmc) {
            s->all_named = false;
        } else if (bpe) {
            const BpeFingerprint wanted = bpe_fingerprint(bpe);
            if (shard->vocab != bpe_vocab_size(bpe) || !bpe_same(shard->tokenizer, wanted))
                return differ(shard->path, shard->tokenizer, shard->vocab, "the tokenizer in use", wanted,
                              bpe_vocab_size(bpe), err);
        } else if (shard->vocab != s->vocab || !bpe_same(shard->tokenizer, s->tokenizer)) {
            char *what = xformat("'%s'", s->list[0].path);
            differ(shard->path, shard->tokenizer, shard->vocab, what, s->tokenizer, s->vocab, err);
            free(what);
            return false;
        }
    }
    return true;
}

static int compare_paths(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static void add_match(char ***paths, size_t *count, char *path) {
    *paths = (char **)xrealloc(*paths, (*count + 1) * sizeof **paths);
    (*paths)[(*count)++] = path;
}

/* The files that a pattern means, sorted. Wildcards in its last part are held against the names in the
 * folder before it, taken as it is: so a run folder may have a name with [ or * in it. */
static bool find_files(const char *pattern, char ***paths, size_t *count, Error *err) {
    *paths = NULL, *count = 0;
    const char *slash = strrchr(pattern, '/'), *last = slash ? slash + 1 : pattern;
    const size_t folder_size = (size_t)(last - pattern);
    char *folder = xformat("%.*s", folder_size ? (int)folder_size : 1, folder_size ? pattern : ".");
    bool ok = true;
    if (file_exists(pattern)) {
        add_match(paths, count, xstrdup(pattern));
    } else if (folder_exists(pattern)) {
        ok = error_set(err, "'%s' is a folder, expected token shards; name them as '%s/train-*.bin' (quoted)",
                       pattern, pattern);
    } else if (folder_exists(folder)) {
        char **names;
        size_t name_count;
        ok = folder_names(folder, &names, &name_count, err);
        for (size_t i = 0; ok && i < name_count; i++) {
            if (fnmatch(last, names[i], FNM_PERIOD) == 0)
                add_match(paths, count, xformat("%.*s%s", (int)folder_size, pattern, names[i]));
            free(names[i]);
        }
        if (ok) free(names);
    } else {
        glob_t matches = {0};
        if (glob(pattern, GLOB_NOSORT, NULL, &matches) == 0)
            for (size_t i = 0; i < matches.gl_pathc; i++)
                add_match(paths, count, xstrdup(matches.gl_pathv[i]));
        globfree(&matches);
    }
    free(folder);
    if (ok && *count == 0)
        ok = error_set(
            err,
            "no file matches '%s': expected at least one token shard (.bin); put them there, or start the "
            "program in the folder from which that path leads to them",
            pattern);
    if (ok) qsort(*paths, *count, sizeof **paths, compare_paths);
    return ok;
}

Shards *shards_open(const char *pattern, const Bpe *bpe, Error *err) {
    char **paths;
    size_t count;
    const bool found = find_files(pattern, &paths, &count, err);
    Shards *s = (Shards *)xcalloc(1, sizeof *s);
    s->list = (Shard *)xcalloc(count + 1, sizeof *s->list);
    for (; s->count < count; s->count++) s->list[s->count].path = paths[s->count], s->list[s->count].fd = -1;
    free(paths);

    /* An open file costs nothing to read again, but the process may hold only so many: an eighth of them
     * is for these shards (there are usually two sets), the rest are opened for each read. */
    struct rlimit limit;
    size_t keep = getrlimit(RLIMIT_NOFILE, &limit) == 0 ? (size_t)limit.rlim_cur / 8 : 0;
    if (keep > 256) keep = 256;

    bool ok = found;
    for (size_t i = 0; ok && i < s->count; i++) {
        Shard *shard = &s->list[i];
        shard->first = s->tokens;
        ok = shard_open(shard, i < keep, bpe, &s->identity, err);
        s->tokens += shard->tokens;
    }
    if (!ok || !check_tokenizers(s, bpe, err)) {
        shards_close(s);
        return NULL;
    }
    return s;
}

void shards_close(Shards *s) {
    if (!s) return;
    for (size_t i = 0; i < s->count; i++) {
        Shard *shard = &s->list[i];
        if (shard->fd >= 0) close(shard->fd);
        free(shard->path);
        free(shard->crcs);
        free((void *)shard->checked);
    }
    free(s->list);
    free(s);
}

/* The paths of all files, which stay the shards'; the array is to be freed. */
static char **list_paths(const Shards *s) {
    char **paths = (char **)xcalloc(s->count, sizeof *paths);
    for (size_t i = 0; i < s->count; i++) paths[i] = s->list[i].path;
    return paths;
}

const char *shards_shared_file(const Shards *a, const Shards *b) {
    char **of_a = list_paths(a), **of_b = list_paths(b);
    const char *shared = files_shared(of_a, a->count, of_b, b->count);
    free(of_b);
    free(of_a);
    return shared;
}

const char *shards_file_within(const Shards *s, const char *folder) {
    char **paths = list_paths(s);
    const char *within = files_within(paths, s->count, folder);
    free(paths);
    return within;
}

uint64_t shards_tokens(const Shards *s) {
    return s->tokens;
}

uint32_t shards_vocab(const Shards *s) {
    return s->vocab;
}

bool shards_fingerprint(const Shards *s, BpeFingerprint *fingerprint) {
    if (s->all_named) *fingerprint = s->tokenizer;
    return s->all_named;
}

uint32_t shards_identity(const Shards *s) {
    return s->identity;
}

/* The kept descriptor, or a new one, of the same file as it was when its blocks' checks began. */
static int shard_descriptor(const Shard *shard, Error *err) {
    const int fd = shard->fd >= 0 ? shard->fd : open(shard->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        error_set(err, "cannot open shard '%s' again: %s", shard->path, strerror(errno));
        return -1;
    }
    struct stat info;
    if (fstat(fd, &info) || info.st_dev != shard->device || info.st_ino != shard->inode ||
        (uint64_t)info.st_size != shard->file_size || info.st_mtim.tv_sec != shard->modified.tv_sec ||
        info.st_mtim.tv_nsec != shard->modified.tv_nsec) {
        error_set(err, "shard '%s' was changed or replaced while in use; start again", shard->path);
        if (fd != shard->fd) close(fd);
        return -1;
    }
    return fd;
}

/* Checks the CRCs of the blocks that tokens first .. first + count - 1 of the shard lie in. Two threads
 * may check the same block at once: the same answer twice. */
static bool check_blocks(const Shard *shard, int fd, uint64_t first, size_t count, Error *err) {
    const uint64_t data = shard->tokens * shard->token_size;
    const uint64_t begin = first * shard->token_size / BLOCK_SIZE;
    const uint64_t end = ((first + count) * shard->token_size - 1) / BLOCK_SIZE;
    uint8_t *block = NULL;
    bool ok = true;
    for (uint64_t b = begin; ok && b <= end; b++) {
        _Atomic uint32_t *word = &shard->checked[b / 32];
        const uint32_t bit = 1u << (b % 32);
        if (atomic_load_explicit(word, memory_order_relaxed) & bit) continue;
        const uint64_t left = data - b * BLOCK_SIZE;
        const size_t size = left < BLOCK_SIZE ? (size_t)left : BLOCK_SIZE;
        if (!block) block = (uint8_t *)xmalloc(BLOCK_SIZE);
        ok = read_at(shard, fd, HEADER_SIZE + b * BLOCK_SIZE, block, size, err);
        if (!ok) break;
        const uint32_t crc = checksum_crc32(0, block, size);
        if (crc == shard->crcs[b]) atomic_fetch_or_explicit(word, bit, memory_order_relaxed);
        else
            ok = error_set(err,
                           "shard '%s' is damaged: the block at byte %" PRIu64
                           " has CRC-32 %08x, expected %08x; write it again",
                           shard->path, HEADER_SIZE + b * BLOCK_SIZE, crc, shard->crcs[b]);
    }
    free(block);
    return ok;
}

static bool shard_read(const Shard *shard, int fd, uint64_t first, size_t count, uint32_t *ids, Error *err) {
    if (shard->crcs && !check_blocks(shard, fd, first, count, err)) return false;
    /* The stored tokens are read into the end of ids and widened from its front: the id written never
     * reaches a token that was not read yet. */
    const size_t size = shard->token_size;
    uint8_t *stored = (uint8_t *)ids + count * (sizeof *ids - size);
    if (!read_at(shard, fd, HEADER_SIZE + first * size, stored, count * size, err)) return false;
    uint32_t greatest = 0;
    for (size_t i = 0; i < count; i++) {
        const uint32_t id = size == 2 ? stored[2 * i] | (uint32_t)stored[2 * i + 1] << 8
                                      : get_u32(stored + 4 * i);
        ids[i] = id;
        greatest = id > greatest ? id : greatest;
    }
    if (greatest < shard->vocab) return true;
    size_t bad = 0;
    while (ids[bad] < shard->vocab) bad++;
    return error_set(err,
                     "shard '%s': token %" PRIu64
                     " is id %u, but the vocabulary has %u ids; it was made with "
                     "another tokenizer or is damaged",
                     shard->path, first + bad, ids[bad], shard->vocab);
}

bool shards_read(Shards *s, uint64_t first, size_t count, uint32_t *ids, Error *err) {
    if (first > s->tokens || count > s->tokens - first)
        return error_set(err, "cannot read tokens %" PRIu64 " to %" PRIu64 ": there are %" PRIu64, first,
                         first + count, s->tokens);
    if (count == 0) return true;
    size_t low = 0, high = s->count; /* the last shard whose first token is not behind `first` */
    while (high - low > 1) {
        const size_t middle = low + (high - low) / 2;
        if (s->list[middle].first <= first) low = middle;
        else high = middle;
    }
    for (const Shard *shard = &s->list[low]; count > 0; shard++) {
        const uint64_t local = first - shard->first, left = shard->tokens - local;
        const size_t n = left < count ? (size_t)left : count;
        const int fd = shard_descriptor(shard, err);
        const bool ok = fd >= 0 && shard_read(shard, fd, local, n, ids, err);
        if (fd >= 0 && fd != shard->fd) close(fd);
        if (!ok) return false;
        first += n, ids += n, count -= n;
    }
    return true;
}

/* ---- the two sides of a source ---- */

typedef enum Side { TRAIN, HELDOUT, SIDES } Side;
static const char *const side_names[SIDES] = {"train", "heldout"};

enum { HELDOUT_EVERY = 20 }; /* story 19, 39 ... is held out; with fewer stories, 1/20 of the bytes */
enum { CUT_WINDOW = 256 };   /* how far before the last twentieth a good place for the cut is looked for */

/* All pieces of a source, each with the side it falls on. Two sources of stories one after the other, or
 * one that is split. */
typedef struct SidedStories {
    const DataSource *source;
    Stories *stories;
    Side side; /* whose stories these are, where they are not split */
    bool split, by_story;
    uint64_t cut, position; /* not by story: where the held-out bytes begin, and where the next piece does */
    bool train_open;        /* ... the training side's last story has no end yet */
    StoryPiece rest;        /* ... the held-out part of the piece that the cut goes through */
    bool has_rest;
    Progress progress;
    const char *what;
} SidedStories;

/* The place for the cut: the last byte of window (size) is where the last twentieth begins. Of the places
 * there and before it: the last white space, else the story's start (`starts_story`: that is window[0]),
 * else the last byte that begins a UTF-8 character. `may_be_first`: window[0] is not the text's first byte,
 * before which nothing would be left to train on. */
static size_t best_cut(const uint8_t *window, size_t size, bool starts_story, bool may_be_first) {
    const size_t first = may_be_first ? 0 : 1;
    for (size_t i = size; i-- > first;)
        if (window[i] == ' ' || window[i] == '\n' || window[i] == '\r' || window[i] == '\t') return i;
    if (starts_story && may_be_first) return 0;
    for (size_t i = size; i-- > first;)
        if ((window[i] & 0xC0) != 0x80) return i;
    return size - 1;
}

/* With too few stories to hold out a whole one: finds where the last twentieth of the text begins, then
 * a place for the cut there or shortly before it, in the same story. */
static bool find_cut(SidedStories *sided, uint64_t bytes, Error *err) {
    const uint64_t heldout = bytes / HELDOUT_EVERY, target = bytes - (heldout ? heldout : 1);
    Stories *stories = stories_open(sided->source->data, sided->source->read_size, err);
    if (!stories) return false;
    uint8_t window[CUT_WINDOW]; /* the story's bytes up to target, as far as they fit */
    const uint64_t earliest = target + 1 > CUT_WINDOW ? target + 1 - CUT_WINDOW : 0;
    uint64_t position = 0, story_begin = 0;
    size_t filled = 0;
    StoryPiece piece;
    int status;
    while ((status = stories_next(stories, &piece, err)) == 1) {
        const uint64_t end = position + piece.size, from = position > earliest ? position : earliest;
        const uint64_t to = end < target + 1 ? end : target + 1;
        if (from < to) {
            memcpy(window + filled, piece.bytes + (from - position), (size_t)(to - from));
            filled += (size_t)(to - from);
        }
        if (end > target) break;
        position = end;
        if (piece.ends_story) filled = 0, story_begin = end;
    }
    stories_close(stories);
    if (status < 0) return false;
    if (status == 0)
        return error_set(err, "'%s' changed while it was read; start again", sided->source->data);
    const uint64_t begin = target + 1 - filled;
    sided->cut = begin + best_cut(window, filled, begin == story_begin, begin > 0);
    return true;
}

/* How a text that gives both sides is divided. Reads no further than it must: 20 stories are enough to
 * know that whole stories will be held out. */
static bool find_split(SidedStories *sided, Error *err) {
    const char *path = sided->source->data;
    Stories *stories = stories_open(path, sided->source->read_size, err);
    if (!stories) return false;
    uint64_t bytes = 0, count = 0;
    StoryPiece piece;
    int status = 1;
    while (count < HELDOUT_EVERY && (status = stories_next(stories, &piece, err)) == 1) {
        bytes += piece.size, count += piece.ends_story;
        if (stop_requested()) {
            error_set(err, "stopped while reading '%s'", path);
            status = -1;
            break;
        }
    }
    stories_close(stories);
    if (status < 0) return false;
    if (count == 0)
        return error_set(
            err, "'%s' holds no story: it is empty, or nothing but ends of stories; give a text to train on",
            path);
    sided->by_story = count == HELDOUT_EVERY;
    if (!sided->by_story && bytes < 2)
        return error_set(err, "'%s' holds %" PRIu64 " byte of text, expected at least 2 to hold one out",
                         path, bytes);
    return sided->by_story || find_cut(sided, bytes, err);
}

static bool side_begin(SidedStories *sided, Side side, Error *err) {
    const DataSource *source = sided->source;
    const char *path = side == TRAIN ? source->data : source->heldout;
    sided->side = side;
    if (path) {
        sided->stories = stories_open(path, source->read_size, err);
    } else {
        const uint64_t twentieth = source->stories / HELDOUT_EVERY;
        const uint64_t heldout = source->heldout_stories ? source->heldout_stories
                                 : twentieth             ? twentieth
                                                         : 1;
        sided->stories = stories_open_builtin(source->seed, side == HELDOUT, 0,
                                              side == TRAIN ? source->stories : heldout);
    }
    if (!sided->stories) return false;
    progress_begin(&sided->progress, sided->what, stories_bytes_total(sided->stories), PROGRESS_BYTES);
    return true;
}

static bool sided_open(SidedStories *sided, const DataSource *source, const char *what, Error *err) {
    memset(sided, 0, sizeof *sided);
    sided->source = source, sided->what = what;
    sided->split = source->data && !source->heldout;
    if (sided->split && !find_split(sided, err)) return false;
    return side_begin(sided, TRAIN, err);
}

static void side_end(SidedStories *sided) {
    if (!sided->stories) return;
    progress_end(&sided->progress);
    stories_close(sided->stories);
    sided->stories = NULL;
}

/* As stories_next, for the current stories. */
static int sided_next(SidedStories *sided, StoryPiece *piece, Side *side, Error *err) {
    *side = sided->side;
    if (sided->has_rest) {
        *piece = sided->rest, *side = HELDOUT;
        sided->has_rest = false;
        return 1;
    }
    if (stop_requested()) {
        error_set(err, "stopped while %s", sided->what);
        return -1;
    }
    const int status = stories_next(sided->stories, piece, err);
    if (status != 1) return status;
    progress_update(&sided->progress, stories_bytes_read(sided->stories));
    if (!sided->split) return 1;
    if (sided->by_story) {
        *side = piece->story % HELDOUT_EVERY == HELDOUT_EVERY - 1 ? HELDOUT : TRAIN;
        return 1;
    }
    const uint64_t before = sided->position < sided->cut ? sided->cut - sided->position : 0;
    *side = before > 0 || sided->train_open ? TRAIN : HELDOUT;
    sided->position += piece->size;
    if (*side == TRAIN && piece->size > before) { /* the cut: it ends the training side's last story */
        sided->rest = *piece, sided->has_rest = true;
        sided->rest.bytes += before, sided->rest.size -= (size_t)before;
        piece->size = (size_t)before, piece->ends_story = true;
    }
    sided->train_open = *side == TRAIN && !piece->ends_story;
    return 1;
}

Bpe *data_train_tokenizer(const DataSource *source, uint32_t vocab, Error *err) {
    SidedStories sided;
    if (!sided_open(&sided, source, "reading words", err)) return NULL;
    BpeTrainer *trainer = bpe_trainer_new(source->threads < 1 ? 1 : source->threads);
    StoryPiece piece;
    Side side;
    int status;
    while ((status = sided_next(&sided, &piece, &side, err)) == 1) {
        if (side == HELDOUT) continue;
        bpe_trainer_feed(trainer, piece.bytes, piece.size);
        if (piece.ends_story) bpe_trainer_end_story(trainer);
    }
    side_end(&sided);
    Bpe *bpe = status == 0 ? bpe_trainer_train(trainer, vocab, err) : NULL;
    bpe_trainer_free(trainer);
    return bpe;
}

/* ---- from stories to shards ---- */

enum { JOB_SIZE = 512 << 10 };  /* bytes of text after which a job is sent */
enum { MAX_ENCODERS = 64 };     /* the calling thread can feed no more than that */
enum { CACHE_WORDS = 1 << 16 }; /* of each encoder */
enum { TOKENS_PER_SHARD = (256 << 20) / WRITTEN_TOKEN_SIZE };

/* Text of one side: stories and parts of stories, one after another. */
typedef struct Job {
    Side side;
    Buffer text;
    size_t *ends; /* where in text stories end */
    size_t end_count, end_capacity;
    size_t encoded; /* bytes of text whose tokens are in `tokens` already */
    Tokens tokens;
    bool ready; /* under Encoding.lock */
} Job;

typedef struct Encoding {
    const Bpe *bpe;
    pthread_t threads[MAX_ENCODERS];
    int thread_count;
    pthread_mutex_t lock;
    pthread_cond_t sent_one, ready_one;
    /* Job number n is ring[n % ring_size]: n < written were written, < taken given to an encoder, < sent
     * handed over. */
    Job **ring;
    size_t ring_size;
    uint64_t sent, taken, written;
    bool closing;

    /* The calling thread's own. */
    Job *filling[SIDES];
    Job **spare;
    size_t spare_count;
    /* For text without a place to cut it: see stream_start. */
    BpeEncoder *streams[SIDES];
    bool streaming[SIDES];
    ShardWriter *writers[SIDES];
    uint64_t stories[SIDES], bytes[SIDES];
} Encoding;

static void token_append(Tokens *tokens, uint32_t id) {
    tokens_reserve(tokens, 1);
    tokens->ids[tokens->count++] = id;
}

static void job_encode(Job *job, BpeEncoder *encoder, uint32_t end_of_text) {
    size_t at = job->encoded;
    for (size_t i = 0; i < job->end_count; i++) {
        if (job->ends[i] > at) bpe_encode(encoder, job->text.data + at, job->ends[i] - at, &job->tokens);
        token_append(&job->tokens, end_of_text);
        at = job->ends[i];
    }
    if (at < job->text.size) bpe_encode(encoder, job->text.data + at, job->text.size - at, &job->tokens);
    job->encoded = job->text.size;
}

static void *encoder_thread(void *argument) {
    Encoding *e = (Encoding *)argument;
    BpeEncoder *encoder = bpe_encoder_new(e->bpe, CACHE_WORDS);
    pthread_mutex_lock(&e->lock);
    for (;;) {
        while (e->taken == e->sent && !e->closing) pthread_cond_wait(&e->sent_one, &e->lock);
        if (e->taken == e->sent) break;
        Job *job = e->ring[e->taken++ % e->ring_size];
        pthread_mutex_unlock(&e->lock);
        job_encode(job, encoder, bpe_end_of_text(e->bpe));
        pthread_mutex_lock(&e->lock);
        job->ready = true;
        pthread_cond_signal(&e->ready_one);
    }
    pthread_mutex_unlock(&e->lock);
    bpe_encoder_free(encoder);
    return NULL;
}

static Job *job_new(Encoding *e, Side side) {
    Job *job = e->spare_count ? e->spare[--e->spare_count] : (Job *)xcalloc(1, sizeof *job);
    job->side = side;
    job->text.size = job->end_count = job->encoded = job->tokens.count = 0;
    job->ready = false;
    return job;
}

static void job_free(Job *job) {
    if (!job) return;
    buffer_free(&job->text);
    tokens_free(&job->tokens);
    free(job->ends);
    free(job);
}

static bool write_oldest(Encoding *e, Error *err) {
    Job *job = e->ring[e->written % e->ring_size];
    pthread_mutex_lock(&e->lock);
    while (!job->ready) pthread_cond_wait(&e->ready_one, &e->lock);
    pthread_mutex_unlock(&e->lock);
    e->written++;
    e->spare[e->spare_count++] = job;
    e->stories[job->side] += job->end_count;
    e->bytes[job->side] += job->text.size;
    return shard_writer_append(e->writers[job->side], job->tokens.ids, job->tokens.count, err);
}

static bool job_send(Encoding *e, Job *job, Error *err) {
    if (e->sent - e->written == e->ring_size && !write_oldest(e, err)) {
        job_free(job);
        return false;
    }
    pthread_mutex_lock(&e->lock);
    e->ring[e->sent++ % e->ring_size] = job;
    pthread_cond_signal(&e->sent_one);
    pthread_mutex_unlock(&e->lock);
    return true;
}

static bool is_space(uint8_t byte) {
    return byte == ' ' || (byte >= '\t' && byte <= '\r');
}

/* May text be cut before byte i > 0, and its halves encoded apart, with the same tokens? Yes between a
 * character that is no white space and white space: in the splitting pattern only a piece's first
 * character can be white space, or else all of them, so a piece always begins there; and what follows
 * changes the end of no piece but of white space. The UTF-8 forms of all white space outside ASCII end in
 * a byte from 0x80 to 0xAF; any other byte stands for no white space, whatever came before it. */
static bool may_cut(const uint8_t *text, size_t i) {
    const uint8_t before = text[i - 1];
    return is_space(text[i]) && !is_space(before) && (before < 0x80 || before > 0xAF);
}

/* The first and the last place to cut in (from, size); 0: none. */
static size_t first_cut(const uint8_t *text, size_t size) {
    for (size_t i = 1; i < size; i++)
        if (may_cut(text, i)) return i;
    return 0;
}

static size_t last_cut(const uint8_t *text, size_t from, size_t size) {
    for (size_t i = size; i-- > from + 1;)
        if (may_cut(text, i)) return i;
    return 0;
}

/* Half a mebibyte of one story without a place to cut it: such text goes through one encoder, fed by the
 * calling thread, until a place or the story's end comes. */
static void stream_start(Encoding *e, Job *job) {
    BpeEncoder **stream = &e->streams[job->side];
    if (!*stream) *stream = bpe_encoder_new(e->bpe, CACHE_WORDS);
    bpe_encoder_feed(*stream, job->text.data, job->text.size, &job->tokens);
    job->encoded = job->text.size;
    e->streaming[job->side] = true;
}

static void stream_go_on(Encoding *e, Job *job) {
    const size_t limit = job->end_count ? job->ends[0] : job->text.size;
    const size_t cut = first_cut(job->text.data, limit);
    job->encoded = cut ? cut : limit;
    bpe_encoder_feed(e->streams[job->side], job->text.data, job->encoded, &job->tokens);
    if (!cut && !job->end_count) return;
    bpe_encoder_end(e->streams[job->side], &job->tokens);
    e->streaming[job->side] = false;
}

/* Hands over what one side has gathered; text behind the last place to cut goes into the side's next job. */
static bool side_send(Encoding *e, Side side, Error *err) {
    Job *job = e->filling[side];
    if (e->streaming[side]) stream_go_on(e, job);
    size_t size = job->text.size;
    if (!e->streaming[side]) {
        const size_t last_end = job->end_count ? job->ends[job->end_count - 1] : 0;
        const size_t from = last_end > job->encoded ? last_end : job->encoded;
        const size_t cut = from < size ? last_cut(job->text.data, from, size) : 0;
        if (cut || (from > 0 && from < size)) size = cut ? cut : from;
        else if (from < size) stream_start(e, job);
    }
    e->filling[side] = job_new(e, side);
    if (size < job->text.size)
        buffer_append(&e->filling[side]->text, job->text.data + size, job->text.size - size);
    job->text.size = size;
    return job_send(e, job, err);
}

static bool add_piece(Encoding *e, Side side, const StoryPiece *piece, Error *err) {
    Job *job = e->filling[side];
    buffer_append(&job->text, piece->bytes, piece->size);
    if (piece->ends_story) {
        if (job->end_count == job->end_capacity) {
            job->end_capacity = job->end_capacity ? 2 * job->end_capacity : 256;
            job->ends = (size_t *)xrealloc(job->ends, job->end_capacity * sizeof *job->ends);
        }
        job->ends[job->end_count++] = job->text.size;
    }
    return job->text.size < JOB_SIZE || side_send(e, side, err);
}

static bool encoding_start(Encoding *e, const Bpe *bpe, int threads, Error *err) {
    memset(e, 0, sizeof *e);
    e->bpe = bpe;
    pthread_mutex_init(&e->lock, NULL);
    pthread_cond_init(&e->sent_one, NULL);
    pthread_cond_init(&e->ready_one, NULL);
    if (threads < 1) threads = 1;
    if (threads > MAX_ENCODERS) threads = MAX_ENCODERS;
    e->ring_size = (size_t)threads + 2;
    e->ring = (Job **)xcalloc(e->ring_size, sizeof *e->ring);
    e->spare = (Job **)xcalloc(e->ring_size + SIDES, sizeof *e->spare);
    for (Side side = TRAIN; side < SIDES; side++) e->filling[side] = job_new(e, side);
    for (; e->thread_count < threads; e->thread_count++) {
        const int code = pthread_create(&e->threads[e->thread_count], NULL, encoder_thread, e);
        if (code == 0) continue;
        /* Fewer threads than asked for are slower, not wrong. */
        return e->thread_count > 0 || error_set(err, "cannot start a thread to encode: %s", strerror(code));
    }
    return true;
}

/* Ends the threads, whatever is left to do. */
static void encoding_end(Encoding *e) {
    pthread_mutex_lock(&e->lock);
    e->closing = true;
    for (; e->taken < e->sent; e->sent--) job_free(e->ring[(e->sent - 1) % e->ring_size]);
    pthread_cond_broadcast(&e->sent_one);
    pthread_mutex_unlock(&e->lock);
    for (int i = 0; i < e->thread_count; i++) pthread_join(e->threads[i], NULL);
    for (; e->written < e->sent; e->written++) job_free(e->ring[e->written % e->ring_size]);
    for (size_t i = 0; i < e->spare_count; i++) job_free(e->spare[i]);
    for (Side side = TRAIN; side < SIDES; side++) {
        job_free(e->filling[side]);
        bpe_encoder_free(e->streams[side]);
    }
    free(e->spare);
    free(e->ring);
    pthread_cond_destroy(&e->ready_one);
    pthread_cond_destroy(&e->sent_one);
    pthread_mutex_destroy(&e->lock);
}

/* All stories of the source through the encoders. */
static bool encode_source(Encoding *e, SidedStories *sided, Error *err) {
    for (;;) {
        StoryPiece piece;
        Side side;
        int status;
        while ((status = sided_next(sided, &piece, &side, err)) == 1)
            if (!add_piece(e, side, &piece, err)) return false;
        if (status < 0) return false;
        if (sided->split || sided->side == HELDOUT) break;
        side_end(sided);
        if (!side_begin(sided, HELDOUT, err)) return false;
    }
    for (Side side = TRAIN; side < SIDES; side++)
        if (e->filling[side]->end_count > 0 && !side_send(e, side, err)) return false;
    while (e->written < e->sent)
        if (!write_oldest(e, err)) return false;
    return true;
}

static const char facts_name[] = "data.json";

static bool write_facts(const char *folder, const DataFacts *facts, Error *err) {
    json_t *json = json_pack(
        "{s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:o}", "version", TRAIN_GPT_VERSION, "train_stories",
        (json_int_t)facts->train_stories, "heldout_stories", (json_int_t)facts->heldout_stories,
        "train_bytes", (json_int_t)facts->train_bytes, "heldout_bytes", (json_int_t)facts->heldout_bytes,
        "train_tokens", (json_int_t)facts->train_tokens, "heldout_tokens", (json_int_t)facts->heldout_tokens,
        "builtin_seed", facts->builtin ? json_integer(facts->seed) : json_null());
    char *text = json_dumps(json, JSON_INDENT(2));
    json_decref(json);
    char *path = xformat("%s/%s", folder, facts_name), *line = xformat("%s\n", text ? text : "");
    const bool ok = text ? file_replace(path, line, strlen(line), err) : error_set(err, "out of memory");
    free(text);
    free(line);
    free(path);
    return ok;
}

bool data_read_facts(const char *folder, DataFacts *facts, Error *err) {
    char *path = xformat("%s/%s", folder, facts_name);
    Buffer text = {0};
    bool ok = file_read(path, 1 << 20, &text, err);
    json_error_t problem;
    json_t *json = ok ? json_loadb((const char *)text.data, text.size, JSON_REJECT_DUPLICATES, &problem)
                      : NULL;
    static const char advice[] = "remove it, and a run makes its shards anew when it goes on";
    if (ok && text.size == 0) /* for which jansson has no words */
        ok = error_set(err, "'%s' is empty: expected a JSON object; %s", path, advice);
    else if (ok && !json)
        ok = error_set(err, "'%s' line %d: %s; %s", path, problem.line, problem.text, advice);
    const struct {
        const char *name;
        uint64_t *value;
    } counts[] = {{"train_stories", &facts->train_stories}, {"heldout_stories", &facts->heldout_stories},
                  {"train_bytes", &facts->train_bytes},     {"heldout_bytes", &facts->heldout_bytes},
                  {"train_tokens", &facts->train_tokens},   {"heldout_tokens", &facts->heldout_tokens}};
    for (size_t i = 0; ok && i < sizeof counts / sizeof *counts; i++) {
        const json_t *value = json_object_get(json, counts[i].name);
        if (json_is_integer(value) && json_integer_value(value) >= 0)
            *counts[i].value = (uint64_t)json_integer_value(value);
        else
            ok = error_set(err, "'%s': \"%s\" is not a whole number from 0; make the shards anew", path,
                           counts[i].name);
    }
    if (ok) {
        const json_t *seed = json_object_get(json, "builtin_seed");
        facts->builtin = seed ? json_is_integer(seed)
                              : json_is_number(json_object_get(json, "heldout_floor"));
        facts->seed = seed ? json_integer_value(seed)
                           : -1; /* an earlier version wrote a floor here, of the whole side */
        if (seed && !json_is_null(seed) && !(facts->builtin && facts->seed >= 0))
            ok = error_set(
                err,
                "'%s': \"builtin_seed\" is neither a whole number from 0 nor null; make the shards "
                "anew",
                path);
    }
    json_decref(json);
    buffer_free(&text);
    free(path);
    return ok;
}

/* A regular file that begins so; one that is being written may be empty yet. */
static bool begins_with(const char *path, const char *text, size_t size) {
    char begin[sizeof magic];
    struct stat info;
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW);
    const bool plain = fd >= 0 && fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
    const ssize_t got = plain ? pread(fd, begin, size, 0) : -1;
    if (fd >= 0) close(fd);
    return got == 0 || (got == (ssize_t)size && memcmp(begin, text, size) == 0);
}

static bool is_our_file(const char *path, const char *name) {
    static const char unfinished[sizeof magic] = {0}; /* the header is written last */
    for (Side side = TRAIN; side < SIDES; side++) {
        if (is_shard_name(name, side_names[side], false)) return begins_with(path, magic, sizeof magic);
        if (is_shard_name(name, side_names[side], true))
            return begins_with(path, magic, sizeof magic) || begins_with(path, unfinished, sizeof magic);
    }
    /* Written by file_replace: a name of its own until it is whole. */
    const char *temporary = strstr(name, ".tmp-");
    const size_t size = temporary ? (size_t)(temporary - name) : strlen(name);
    if (temporary && (!temporary[5] || temporary[5 + strspn(temporary + 5, "0123456789")])) return false;
    if (size == strlen(facts_name) && strncmp(name, facts_name, size) == 0) return begins_with(path, "{", 1);
    static const char merges_name[] = "merges.txt", version[] = "#version";
    return size == sizeof merges_name - 1 && strncmp(name, merges_name, size) == 0 &&
           begins_with(path, version, sizeof version - 1);
}

bool data_folder_is_ours(const char *folder) {
    char **names;
    size_t count;
    if (!folder_names(folder, &names, &count, NULL)) return false;
    bool ours = true;
    for (size_t i = 0; i < count; i++) {
        char *path = xformat("%s/%s", folder, names[i]);
        ours = ours && is_our_file(path, names[i]);
        free(path);
        free(names[i]);
    }
    free(names);
    return ours;
}

static bool remove_shards(const char *folder, Error *err) {
    char **names;
    size_t count;
    if (!folder_names(folder, &names, &count, err)) return false;
    bool ok = true;
    for (size_t i = 0; i < count; i++) {
        for (Side side = TRAIN; ok && side < SIDES; side++) {
            if (!is_shard_name(names[i], side_names[side], false) &&
                !is_shard_name(names[i], side_names[side], true))
                continue;
            char *path = xformat("%s/%s", folder, names[i]);
            if (unlink(path)) ok = error_set(err, "cannot remove left-over '%s': %s", path, strerror(errno));
            free(path);
        }
        free(names[i]);
    }
    free(names);
    return ok;
}

void data_remove_shards(const char *folder) {
    char *facts_path = xformat("%s/%s", folder, facts_name);
    unlink(facts_path); /* first: they are not finished then */
    remove_shards(folder, NULL);
    free(facts_path);
}

/* Makes the folder, refuses one that is finished, removes what an interrupted process left. */
static bool prepare_folder(const char *folder, Error *err) {
    if (!folder_make(folder, err)) return false;
    char *facts_path = xformat("%s/%s", folder, facts_name);
    PathKind kind;
    const bool looked = path_look(facts_path, &kind, err);
    free(facts_path);
    if (!looked) return false;
    if (kind != PATH_NONE)
        return error_set(
            err, "folder '%s' holds finished token shards; use them with -data, or name another one", folder);
    return remove_shards(folder, err);
}

static bool check_side(const Encoding *e, const DataSource *source, Side side, Error *err) {
    if (e->stories[side] > 0) return true;
    const char *path = side == TRAIN || !source->heldout ? source->data : source->heldout;
    if (!path)
        return error_set(err, "0 built-in stories were asked for, expected at least 1; raise -stories");
    if (source->data && source->heldout && strcmp(source->data, source->heldout) == 0)
        return error_set(err, "'%s' holds no story; give more text", path); /* there are no sides */
    return error_set(err, "'%s' holds no story for the %s side; give more text%s", path,
                     side == TRAIN ? "training" : "held-out",
                     side == HELDOUT && !source->heldout ? ", or a held-out side of its own with -heldout"
                                                         : "");
}

bool data_write_shards(const DataSource *source, const Bpe *bpe, const char *folder, DataFacts *facts,
                       Error *err) {
    SidedStories sided;
    if (!prepare_folder(folder, err) || !sided_open(&sided, source, "encoding", err)) return false;
    Encoding e;
    bool ok = encoding_start(&e, bpe, source->threads, err);
    for (Side side = TRAIN; ok && side < SIDES; side++) {
        e.writers[side] = shard_writer_open(folder, side_names[side], bpe, TOKENS_PER_SHARD, err);
        ok = e.writers[side] != NULL;
    }
    ok = ok && encode_source(&e, &sided, err);
    side_end(&sided);
    encoding_end(&e);
    for (Side side = TRAIN; ok && side < SIDES; side++) ok = check_side(&e, source, side, err);
    uint64_t tokens[SIDES];
    for (Side side = TRAIN; side < SIDES; side++) {
        if (ok) ok = shard_writer_close(e.writers[side], &tokens[side], err);
        else shard_writer_abort(e.writers[side]);
    }
    if (!ok) return false;
    *facts = (DataFacts){.train_stories = e.stories[TRAIN],
                         .heldout_stories = e.stories[HELDOUT],
                         .train_bytes = e.bytes[TRAIN],
                         .heldout_bytes = e.bytes[HELDOUT],
                         .train_tokens = tokens[TRAIN],
                         .heldout_tokens = tokens[HELDOUT],
                         .builtin = !source->data && !source->heldout,
                         .seed = (int64_t)source->seed};
    return write_facts(folder, facts, err);
}

/* ---- the floor ---- */

static size_t text_size(const Bpe *bpe, const uint32_t *ids, size_t count) {
    size_t size = 0, bytes;
    for (size_t i = 0; i < count; i++, size += bytes) bpe_token_bytes(bpe, ids[i], &bytes);
    return size;
}

/* The stories are told once more, rather than kept with what is known of each: that holds for any number of
 * tokens, and the tokens say whether they are the same stories. */
bool data_floor(const DataFacts *facts, const Bpe *bpe, Shards *heldout, uint64_t tokens, double *floor,
                Error *err) {
    *floor = NAN;
    if (!facts->builtin) return true;
    if (facts->seed < 0)
        return error_set(err,
                         "an earlier version made the tokens, and did not write down their stories' seed");
    BpeEncoder *encoder = bpe_encoder_new(bpe, CACHE_WORDS);
    Buffer text = {0};
    Tokens told = {0}, read = {0};
    double log_p = 0;
    bool ok = true;
    for (uint64_t at = 0, story = 0; ok && at < tokens + 1; story++) {
        text.size = told.count = read.count = 0;
        const double whole = grammar_story((uint64_t)facts->seed, true, story, &text);
        bpe_encode(encoder, text.data, text.size, &told);
        token_append(&told, bpe_end_of_text(bpe));
        const uint64_t left = tokens + 1 - at;
        const size_t count = left < told.count ? (size_t)left : told.count;
        tokens_reserve(&read, count);
        if (stop_requested()) ok = error_set(err, "stopped while computing the floor");
        else ok = shards_read(heldout, at, count, read.ids, err);
        if (ok && memcmp(read.ids, told.ids, count * sizeof *read.ids) != 0)
            ok = error_set(err,
                           "held-out story %" PRIu64 " is not what this version tells for seed %" PRId64
                           "; another version made the tokens",
                           story, facts->seed);
        if (!ok) break;
        log_p += count == told.count ? whole : grammar_beginning(text.data, text_size(bpe, told.ids, count));
        if (at == 0) log_p -= grammar_beginning(text.data, text_size(bpe, told.ids, 1));
        at += count;
    }
    if (ok) *floor = -log_p / (double)tokens;
    tokens_free(&read);
    tokens_free(&told);
    buffer_free(&text);
    bpe_encoder_free(encoder);
    return ok;
}
