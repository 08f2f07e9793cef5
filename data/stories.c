/* stories.c - text in: files, gzip, folders and the built-in stories as one stream of pieces (stories.h).
 *
 * Bytes go through one window. A read fills its end; stories_next gives out what lies before the next
 * separator, straight from the window, without a copy. Between two reads at most SEPARATOR_SIZE bytes
 * stay in it: a tail that may turn out to be the start of a separator, or the newline before one. So a
 * separator may be cut by a read at any byte, and the pieces change with the read size but the stories
 * do not. */
#include "stories.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

/* With the newline before it; the separator proper begins at the second byte. */
static const char separator_line[] = "\n<|endoftext|>";
enum { SEPARATOR_LINE_SIZE = sizeof separator_line - 1, SEPARATOR_SIZE = SEPARATOR_LINE_SIZE - 1 };
static const char *const separator = separator_line + 1;

enum { DEFAULT_READ_SIZE = 1 << 20 };

struct Stories {
    /* The files, in order, and the one that is open. */
    char **paths;
    size_t path_count, next_path;
    const char *path;
    int fd; /* -1: none is open */
    uint64_t file_size, file_read;
    uint64_t bytes_read, bytes_total; /* over all files, compressed where they are */
    size_t read_size;

    /* gzip: what was read of the file and not inflated yet is z.next_in[0 .. z.avail_in). */
    bool gzip, z_ready, member_open;
    uint64_t members; /* complete ones in this file */
    z_stream z;
    uint8_t *packed; /* (read_size) */

    /* The window: text that was read and not given out is window[begin .. end). */
    uint8_t *window; /* (SEPARATOR_SIZE + read_size) */
    size_t begin, end;
    bool file_end;        /* all text of the open file is in the window */
    bool after_separator; /* a newline that comes next belongs to the separator */
    bool story_open;      /* bytes of story number `story` were given out */
    uint64_t story;

    /* Built-in stories; no file is involved. */
    bool builtin, heldout;
    uint64_t seed, first, count;
    Buffer text;
};

/* ---- files ---- */

static const char *kind_of_file(mode_t mode) {
    if (S_ISDIR(mode)) return "a folder";
    if (S_ISFIFO(mode)) return "a pipe";
    if (S_ISSOCK(mode)) return "a socket";
    return "a device";
}

static bool refuse_kind(const char *path, mode_t mode, Error *err) {
    return error_set(
        err,
        "cannot read stories from '%s': found %s, expected a regular file (the text is read more "
        "than once); write the text to a file first",
        path, kind_of_file(mode));
}

static bool ends_with(const char *name, const char *end) {
    const size_t size = strlen(name), end_size = strlen(end);
    return size > end_size && strcmp(name + size - end_size, end) == 0;
}

static bool add_path(Stories *s, const char *path, Error *err) {
    struct stat info;
    if (stat(path, &info)) return error_set(err, "cannot read '%s': %s", path, strerror(errno));
    if (!S_ISREG(info.st_mode)) return refuse_kind(path, info.st_mode, err);
    s->paths = (char **)xrealloc(s->paths, (s->path_count + 1) * sizeof *s->paths);
    s->paths[s->path_count++] = xstrdup(path);
    s->bytes_total += (uint64_t)info.st_size;
    return true;
}

static bool add_folder(Stories *s, const char *folder, Error *err) {
    char **names;
    size_t count;
    if (!folder_names(folder, &names, &count, err)) return false;
    bool ok = true;
    for (size_t i = 0; i < count; i++) {
        if (ok && (ends_with(names[i], ".txt") || ends_with(names[i], ".txt.gz"))) {
            char *path = xformat("%s/%s", folder, names[i]);
            if (!folder_exists(path)) ok = add_path(s, path, err); /* a folder inside is not looked into */
            free(path);
        }
        free(names[i]);
    }
    free(names);
    if (ok && s->path_count == 0)
        return error_set(err,
                         "folder '%s' holds no text: expected files named .txt or .txt.gz (folders inside it "
                         "are not looked into)",
                         folder);
    return ok;
}

Stories *stories_open(const char *path, size_t read_size, Error *err) {
    Stories *s = (Stories *)xcalloc(1, sizeof *s);
    s->fd = -1;
    s->read_size = read_size ? read_size : DEFAULT_READ_SIZE;
    if (s->read_size > UINT32_MAX) s->read_size = UINT32_MAX; /* zlib counts in 32 bits */
    if (!(folder_exists(path) ? add_folder(s, path, err) : add_path(s, path, err))) {
        stories_close(s);
        return NULL;
    }
    s->window = (uint8_t *)xmalloc(SEPARATOR_SIZE + s->read_size);
    return s;
}

Stories *stories_open_builtin(uint64_t seed, bool heldout, uint64_t first, uint64_t count) {
    Stories *s = (Stories *)xcalloc(1, sizeof *s);
    s->fd = -1;
    s->builtin = true, s->seed = seed, s->heldout = heldout, s->first = first, s->count = count;
    return s;
}

static void file_close(Stories *s) {
    if (s->fd >= 0) close(s->fd);
    s->fd = -1;
}

void stories_close(Stories *s) {
    if (!s) return;
    file_close(s);
    for (size_t i = 0; i < s->path_count; i++) free(s->paths[i]);
    free(s->paths);
    if (s->z_ready) inflateEnd(&s->z);
    free(s->packed);
    free(s->window);
    buffer_free(&s->text);
    free(s);
}

const char *stories_shared_file(const Stories *a, const Stories *b) {
    return files_shared(a->paths, a->path_count, b->paths, b->path_count);
}

const char *stories_file_within(const Stories *s, const char *folder) {
    return files_within(s->paths, s->path_count, folder);
}

uint64_t stories_bytes_read(const Stories *s) {
    return s->bytes_read;
}

uint64_t stories_bytes_total(const Stories *s) {
    return s->bytes_total;
}

static bool file_open_next(Stories *s, Error *err) {
    s->path = s->paths[s->next_path];
    /* O_NONBLOCK: should the name lead to a pipe by now, the open must not wait for a writer. */
    s->fd = open(s->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (s->fd < 0) return error_set(err, "cannot open '%s': %s", s->path, strerror(errno));
    struct stat info;
    if (fstat(s->fd, &info)) return error_set(err, "cannot read '%s': %s", s->path, strerror(errno));
    if (!S_ISREG(info.st_mode)) return refuse_kind(s->path, info.st_mode, err);
    s->file_size = (uint64_t)info.st_size, s->file_read = 0;
    s->file_end = s->after_separator = s->member_open = false;
    s->members = 0;
    s->begin = s->end = 0;

    uint8_t magic[2];
    s->gzip = pread(s->fd, magic, 2, 0) == 2 && magic[0] == 0x1f && magic[1] == 0x8b;
    if (!s->gzip && ends_with(s->path, ".gz"))
        return error_set(
            err,
            "'%s' is named .gz but does not begin with gzip's bytes 1f 8b; rename it if it is plain "
            "text, else fetch it again",
            s->path);
    if (s->gzip && !s->z_ready) {
        if (inflateInit2(&s->z, 15 + 16) != Z_OK) return error_set(err, "cannot start zlib: out of memory");
        s->z_ready = true;
        s->packed = (uint8_t *)xmalloc(s->read_size);
    }
    s->z.avail_in = 0;
    s->next_path++;
    return true;
}

/* At most read_size bytes of the open file; *got is 0 only at its end. */
static bool file_read_some(Stories *s, uint8_t *bytes, size_t *got, Error *err) {
    const uint64_t left = s->file_size - s->file_read;
    const size_t want = left < s->read_size ? (size_t)left : s->read_size;
    *got = 0;
    if (want == 0) return true;
    ssize_t n;
    do n = read(s->fd, bytes, want);
    while (n < 0 && errno == EINTR);
    if (n < 0)
        return error_set(err, "cannot read '%s' at byte %" PRIu64 ": %s", s->path, s->file_read,
                         strerror(errno));
    if (n == 0)
        return error_set(err,
                         "'%s' shrank from %" PRIu64 " to %" PRIu64 " bytes while it was read; start again",
                         s->path, s->file_size, s->file_read);
    *got = (size_t)n;
    s->file_read += (uint64_t)n, s->bytes_read += (uint64_t)n;
    return true;
}

static bool gzip_error(const Stories *s, const char *what, Error *err) {
    return error_set(err,
                     "'%s' is damaged at byte %" PRIu64 " of %" PRIu64
                     " (compressed): %s; check it with gzip -t and fetch it again",
                     s->path, s->file_read - s->z.avail_in, s->file_size, what);
}

/* Inflates at most read_size bytes to the window's end; a file is one gzip member after another. */
static bool gzip_read_some(Stories *s, size_t *got, Error *err) {
    for (*got = 0; *got == 0;) {
        if (s->z.avail_in == 0) {
            size_t packed;
            if (!file_read_some(s, s->packed, &packed, err)) return false;
            s->z.next_in = s->packed, s->z.avail_in = (uInt)packed;
        }
        if (!s->member_open) {
            if (s->z.avail_in == 0) return true;
            inflateReset(&s->z);
            s->member_open = true;
        }
        s->z.next_out = s->window + s->end, s->z.avail_out = (uInt)s->read_size;
        const int code = inflate(&s->z, Z_NO_FLUSH);
        *got = s->read_size - s->z.avail_out;
        if (code == Z_STREAM_END) {
            s->member_open = false;
            s->members++;
        } else if (code == Z_BUF_ERROR && s->z.avail_in == 0 && s->file_read == s->file_size) {
            /* Only now: with the input used up, inflate may still have had text to give. */
            return gzip_error(s, "the file ends before its gzip data does", err);
        } else if (code == Z_MEM_ERROR) {
            return error_set(err, "cannot decompress '%s': out of memory", s->path);
        } else if (code != Z_OK && code != Z_BUF_ERROR) {
            const bool trailing = s->members > 0 && s->z.total_out == 0;
            return gzip_error(s,
                              trailing ? "bytes that are not gzip follow the end of the gzip data"
                                       : (s->z.msg ? s->z.msg : "not gzip data"),
                              err);
        }
    }
    return true;
}

/* Moves what is left to the window's start and reads more behind it; at the file's end sets file_end. */
static bool window_fill(Stories *s, Error *err) {
    memmove(s->window, s->window + s->begin, s->end - s->begin);
    s->end -= s->begin, s->begin = 0;
    size_t got;
    if (!(s->gzip ? gzip_read_some(s, &got, err) : file_read_some(s, s->window + s->end, &got, err)))
        return false;
    s->end += got;
    s->file_end = got == 0;
    return true;
}

/* ---- stories ---- */

/* How many bytes at the end of text may be the start of a separator, or the newline before one. */
static size_t separator_start(const uint8_t *text, size_t size) {
    for (size_t n = size < SEPARATOR_SIZE ? size : SEPARATOR_SIZE; n > 0; n--) {
        const uint8_t *tail = text + size - n;
        if (memcmp(tail, separator_line, n) == 0) return n;
        if (n < SEPARATOR_SIZE && memcmp(tail, separator, n) == 0) return n;
    }
    return 0;
}

static int give(Stories *s, StoryPiece *piece, const uint8_t *bytes, size_t size, bool ends_story) {
    piece->bytes = bytes, piece->size = size, piece->ends_story = ends_story, piece->story = s->story;
    s->story_open = !ends_story;
    if (ends_story) s->story++;
    return 1;
}

static int builtin_next(Stories *s, StoryPiece *piece) {
    if (s->story == s->count) return 0;
    s->text.size = 0;
    grammar_story(s->seed, s->heldout, s->first + s->story, &s->text);
    s->bytes_read += s->text.size;
    return give(s, piece, s->text.data, s->text.size, true);
}

int stories_next(Stories *s, StoryPiece *piece, Error *err) {
    if (s->builtin) return builtin_next(s, piece);
    for (;;) {
        if (s->fd < 0) {
            if (s->next_path == s->path_count) return 0;
            if (!file_open_next(s, err)) {
                file_close(s);
                return -1;
            }
        }
        if (s->after_separator && s->begin < s->end) {
            if (s->window[s->begin] == '\n') s->begin++;
            s->after_separator = false;
        }
        const uint8_t *text = s->window + s->begin;
        const size_t size = s->end - s->begin;
        const uint8_t *found = (const uint8_t *)memmem(text, size, separator, SEPARATOR_SIZE);
        if (found) {
            size_t before = (size_t)(found - text);
            s->begin += before + SEPARATOR_SIZE;
            s->after_separator = true;
            if (before > 0 && text[before - 1] == '\n') before--;
            if (before > 0 || s->story_open) return give(s, piece, text, before, true);
        } else if (s->file_end) {
            s->begin = s->end;
            file_close(s); /* the window stays as it is until the next call */
            if (size > 0 || s->story_open) return give(s, piece, text, size, true);
        } else {
            const size_t ready = size - separator_start(text, size);
            s->begin += ready;
            if (ready > 0) return give(s, piece, text, ready, false);
            if (!window_fill(s, err)) return -1;
        }
    }
}
