/* common.c - the ground that common.h describes: errors, memory, files, folders that appear whole or
 * not at all, the stop signal, progress, random numbers.
 *
 * What a crash may leave behind is decided here and nowhere else: a file or folder is written under a
 * temporary name ("<name>.tmp-<pid>"), brought to the disk, and only then renamed. A reader therefore
 * meets the old content, the new content, or a left-over that the next writer removes. */
#include "common.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>
#include <zlib.h>

/* ---- errors ---- */

/* Bytes of the UTF-8 sequence at text, 0 where it is not valid (cut, overlong, a surrogate, too big). */
static size_t utf8_sequence(const unsigned char *text, size_t left) {
    const unsigned char lead = text[0];
    if (lead < 0x80) return 1;
    const size_t length = lead >= 0xC2 && lead <= 0xDF   ? 2
                          : lead >= 0xE0 && lead <= 0xEF ? 3
                          : lead >= 0xF0 && lead <= 0xF4 ? 4
                                                         : 0;
    if (length == 0 || length > left) return 0;
    for (size_t i = 1; i < length; i++)
        if ((text[i] & 0xC0) != 0x80) return 0;
    const unsigned char second = text[1];
    if ((lead == 0xE0 && second < 0xA0) || (lead == 0xED && second > 0x9F)) return 0;
    if ((lead == 0xF0 && second < 0x90) || (lead == 0xF4 && second > 0x8F)) return 0;
    return length;
}

/* Makes a text one printable line: an error often quotes a file's content, which may hold anything, and
 * a terminal obeys control bytes (C0, DEL, and C1, which UTF-8 writes as C2 80 .. C2 9F). */
static void make_printable(char *text) {
    unsigned char *bytes = (unsigned char *)text;
    const size_t size = strlen(text);
    size_t length, out = 0;
    for (size_t in = 0; in < size; in += length ? length : 1) {
        length = utf8_sequence(bytes + in, size - in);
        const bool control = bytes[in] < 0x20 || bytes[in] == 0x7F ||
                             (length == 2 && bytes[in] == 0xC2 && bytes[in + 1] < 0xA0);
        if (length == 0 || control) {
            bytes[out++] = '?';
        } else {
            memmove(bytes + out, bytes + in, length);
            out += length;
        }
    }
    bytes[out] = 0;
}

/* Formats into memory of its own first, since the arguments may point into err->text. Of a text that is too long
 * the middle gives way, cut before whole characters: that is where long paths stand, and the reason and what to do
 * come last. */
static void error_format(Error *err, const char *format, va_list arguments) {
    static const char gap[] = "...";
    va_list again;
    va_copy(again, arguments);
    const int length = vsnprintf(NULL, 0, format, arguments);
    char *text = length < 0 ? xformat("an error whose text could not be put together (%.200s)", format)
                            : xmalloc((size_t)length + 1);
    if (length >= 0) vsnprintf(text, (size_t)length + 1, format, again);
    va_end(again);
    make_printable(text);
    const size_t size = strlen(text), most = sizeof err->text - 1;
    size_t begin = size, end = size; /* the bytes between go */
    if (size > most) {
        begin = (most - strlen(gap)) / 2, end = size - begin;
        while (((unsigned char)text[begin] & 0xC0) == 0x80) begin--;
        while (((unsigned char)text[end] & 0xC0) == 0x80) end++;
    }
    snprintf(err->text, sizeof err->text, "%.*s%s%s", (int)begin, text, begin < size ? gap : "", text + end);
    err->unreadable = false;
    free(text);
}

bool error_set(Error *err, const char *format, ...) {
    if (!err) return false;
    va_list arguments;
    va_start(arguments, format);
    error_format(err, format, arguments);
    va_end(arguments);
    return false;
}

bool error_prefix(Error *err, const char *format, ...) {
    if (!err) return false;
    const Error old = *err;
    va_list arguments;
    va_start(arguments, format);
    error_format(err, format, arguments);
    va_end(arguments);
    const Error prefix = *err;
    error_set(err, "%s: %s", prefix.text, old.text);
    err->unreadable = old.unreadable;
    return false;
}

/* ---- memory ---- */

static void (*memory_hook)(void *);
static void *memory_hook_user;

void set_memory_hook(void (*hook)(void *user), void *user) {
    memory_hook = hook, memory_hook_user = user;
}

/* Ends the process, once: another thread that gets here waits for that, and where the hook itself does not get what
 * it needs there is no more to be done. */
static void out_of_memory(size_t size) {
    static atomic_flag ending = ATOMIC_FLAG_INIT;
    static _Thread_local bool ends;
    if (ends) _exit(EXIT_FAILED);
    while (atomic_flag_test_and_set(&ending)) pause();
    ends = true;
    fprintf(
        stderr,
        "train_gpt: error: out of memory: %zu bytes could not be had; end other programs, raise the limit "
        "(ulimit -v, the container's), or take less: smaller stories, a smaller model, -micro 1\n",
        size);
    if (memory_hook) memory_hook(memory_hook_user);
    exit(EXIT_FAILED);
}

void *xmalloc(size_t size) {
    void *pointer = malloc(size ? size : 1);
    if (!pointer) out_of_memory(size);
    return pointer;
}

void *xcalloc(size_t count, size_t size) {
    size_t bytes;
    (void)size_mul(count, size, &bytes); /* SIZE_MAX where it overflows: what calloc then refuses */
    void *pointer = bytes ? calloc(count, size) : calloc(1, 1);
    if (!pointer) out_of_memory(bytes);
    return pointer;
}

void *xrealloc(void *pointer, size_t size) {
    void *grown = realloc(pointer, size ? size : 1);
    if (!grown) out_of_memory(size);
    return grown;
}

char *xstrdup(const char *text) {
    const size_t size = strlen(text) + 1;
    return memcpy(xmalloc(size), text, size);
}

char *xformat(const char *format, ...) {
    va_list arguments, again;
    va_start(arguments, format);
    va_copy(again, arguments);
    const int length = vsnprintf(NULL, 0, format, arguments);
    va_end(arguments);
    if (length < 0) out_of_memory(SIZE_MAX); /* longer than an int can say */
    char *text = xmalloc((size_t)length + 1);
    vsnprintf(text, (size_t)length + 1, format, again);
    va_end(again);
    return text;
}

bool size_mul(size_t a, size_t b, size_t *result) {
    const bool fits = b == 0 || a <= SIZE_MAX / b;
    *result = fits ? a * b : SIZE_MAX;
    return fits;
}

bool size_add(size_t a, size_t b, size_t *result) {
    const bool fits = a <= SIZE_MAX - b;
    *result = fits ? a + b : SIZE_MAX;
    return fits;
}

void buffer_reserve(Buffer *buffer, size_t extra) {
    size_t needed;
    if (!size_add(buffer->size, extra, &needed)) out_of_memory(needed);
    if (needed <= buffer->capacity) return;
    const size_t doubled = buffer->capacity < SIZE_MAX / 2 ? 2 * buffer->capacity : SIZE_MAX;
    const size_t capacity = needed > doubled ? needed : doubled;
    buffer->data = xrealloc(buffer->data, capacity);
    buffer->capacity = capacity;
}

void buffer_append(Buffer *buffer, const void *bytes, size_t size) {
    if (size == 0) return; /* bytes may then be NULL */
    buffer_reserve(buffer, size);
    memcpy(buffer->data + buffer->size, bytes, size);
    buffer->size += size;
}

void buffer_append_text(Buffer *buffer, const char *text) {
    buffer_append(buffer, text, strlen(text));
}

void buffer_free(Buffer *buffer) {
    free(buffer->data);
    *buffer = (Buffer){0};
}

/* ---- files ---- */

/* The folder that holds a path, to be freed; *name is where the last component begins. Needs a path
 * without slashes at its end (path_trimmed). */
static char *path_parent(const char *path, const char **name) {
    const char *slash = strrchr(path, '/');
    *name = slash ? slash + 1 : path;
    if (!slash) return xstrdup(".");
    if (slash == path) return xstrdup("/");
    return xformat("%.*s", (int)(slash - path), path);
}

static char *path_trimmed(const char *path) {
    size_t size = strlen(path);
    while (size > 1 && path[size - 1] == '/') size--;
    return xformat("%.*s", (int)size, path);
}

bool file_exists(const char *path) {
    struct stat status;
    return stat(path, &status) == 0 && !S_ISDIR(status.st_mode);
}

/* What a file is, whatever its path; of one that is not there {0, 0}, which is no file. */
typedef struct FileId {
    uint64_t device, inode;
} FileId;

static FileId file_id(const char *path) {
    struct stat status;
    if (stat(path, &status) != 0) return (FileId){0, 0};
    return (FileId){(uint64_t)status.st_dev, (uint64_t)status.st_ino};
}

static int compare_file_ids(const void *a, const void *b) {
    const FileId *x = a, *y = b;
    return x->device != y->device ? (x->device > y->device) - (x->device < y->device)
                                  : (x->inode > y->inode) - (x->inode < y->inode);
}

const char *files_shared(char *const *a, size_t a_count, char *const *b, size_t b_count) {
    FileId *ids = xcalloc(b_count, sizeof *ids);
    for (size_t i = 0; i < b_count; i++) ids[i] = file_id(b[i]);
    qsort(ids, b_count, sizeof *ids, compare_file_ids);
    const char *shared = NULL;
    for (size_t i = 0; i < a_count && !shared; i++) {
        const FileId id = file_id(a[i]);
        if (id.inode != 0 && bsearch(&id, ids, b_count, sizeof id, compare_file_ids)) shared = a[i];
    }
    free(ids);
    return shared;
}

/* Whether a path, as it is spelled, names this folder or goes through it for good: what ".." comes after is left to
 * where all of it leads. */
static bool goes_through(const char *path, const FileId *folder) {
    char *part = xstrdup(path);
    size_t size = strlen(part);
    bool through = false;
    while (size > 0 && !through && !strstr(path + size, "..")) {
        part[size] = 0;
        const FileId id = file_id(part);
        through = id.inode != 0 && compare_file_ids(&id, folder) == 0;
        do size--;
        while (size > 0 && part[size] != '/');
    }
    free(part);
    return through;
}

const char *files_within(char *const *paths, size_t count, const char *folder) {
    const FileId id = file_id(folder);
    const char *within = NULL;
    for (size_t i = 0; i < count && !within; i++) {
        char *resolved = realpath(paths[i], NULL);
        if (goes_through(paths[i], &id) || (resolved && goes_through(resolved, &id))) within = paths[i];
        free(resolved);
    }
    return within;
}

bool folder_exists(const char *path) {
    struct stat status;
    return stat(path, &status) == 0 && S_ISDIR(status.st_mode);
}

static bool unreadable(Error *err) {
    if (err) err->unreadable = true;
    return false;
}

/* What was to be done with a path ("open file") failed for that reason, errno's. Of a link the system's words would
 * mislead: "No such file" for one that is there and leads nowhere, "Too many levels" for one not to be followed. */
static bool cannot(const char *what, const char *path, int reason, const char *advice, Error *err) {
    struct stat status;
    const bool there = lstat(path, &status) == 0, link = there && S_ISLNK(status.st_mode);
    if (link && reason == ENOENT)
        error_set(err, "cannot %s %s: it is a link to something that is not there; put that back or mount it",
                  what, path);
    else if (link && reason == ELOOP)
        error_set(
            err, "cannot %s %s: it is a symbolic link, which is not followed; put in its place what it names",
            what, path);
    else error_set(err, "cannot %s %s: %s; %s", what, path, strerror(reason), advice);
    const bool missing = !there && (reason == ENOENT || reason == ENOTDIR);
    return missing ? false : unreadable(err);
}

bool path_look(const char *path, PathKind *kind, Error *err) {
    struct stat status;
    *kind = PATH_NONE;
    if (stat(path, &status) == 0) {
        *kind = S_ISDIR(status.st_mode) ? PATH_FOLDER : PATH_FILE;
        return true;
    }
    Error why;
    cannot("look at", path, errno, "check its permissions and the disk", &why);
    if (why.unreadable && err) *err = why;
    return !why.unreadable;
}

/* Opens a regular file for reading. O_NONBLOCK, because opening a pipe would otherwise wait for a writer. */
static int open_regular(const char *path, int flags, uint64_t *size, Error *err) {
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | flags);
    struct stat status;
    if (fd < 0 || fstat(fd, &status) != 0) {
        cannot("open file", path, errno, "check the path and its permissions", err);
    } else if (!S_ISREG(status.st_mode)) {
        error_set(err, "%s is not a regular file: found a %s; give a file", path,
                  S_ISDIR(status.st_mode) ? "folder" : "pipe or device");
    } else {
        *size = (uint64_t)status.st_size;
        return fd;
    }
    if (fd >= 0) close(fd);
    return -1;
}

FILE *file_open(const char *path, Error *err) {
    uint64_t size;
    const int fd = open_regular(path, 0, &size, err);
    FILE *file = fd >= 0 ? fdopen(fd, "rb") : NULL;
    if (fd >= 0 && !file) {
        cannot("open file", path, errno, "close other programs", err);
        close(fd);
    }
    return file;
}

/* Reads until size bytes are there or the file ends; returns the bytes read, SIZE_MAX on failure. */
static size_t read_fully(int fd, void *bytes, size_t size) {
    size_t done = 0;
    while (done < size) {
        const size_t piece = size - done < (1u << 30) ? size - done
                                                      : 1u << 30; /* the kernel's limit is 2 GiB */
        const ssize_t got = read(fd, (char *)bytes + done, piece);
        if (got == 0) break;
        if (got > 0) {
            done += (size_t)got;
        } else if (errno != EINTR) {
            return SIZE_MAX;
        }
    }
    return done;
}

bool file_read(const char *path, size_t max_size, Buffer *out, Error *err) {
    uint64_t size = 0;
    out->size = 0;
    const int fd = open_regular(path, 0, &size, err);
    if (fd < 0) return false;
    if (size > max_size) {
        close(fd);
        return error_set(
            err, "file %s is too large: found %" PRIu64 " bytes, at most %zu expected; is it the right file?",
            path, size, max_size);
    }
    buffer_reserve(out, (size_t)size);
    const size_t got = size ? read_fully(fd, out->data, (size_t)size) : 0;
    const int reason = errno;
    close(fd);
    if (got == SIZE_MAX) return cannot("read file", path, reason, "check the disk", err);
    if (got < size) {
        error_set(
            err, "file %s became shorter while it was read: found %zu bytes, expected %" PRIu64 "; try again",
            path, got, size);
        return unreadable(err);
    }
    out->size = got;
    return true;
}

/* Brings an open file or folder to the disk itself: macOS's fsync stops at the drive's cache. Some network
 * file systems cannot sync a folder and say EINVAL, which is no failure of the data. */
static bool fsync_open(int fd) {
#ifdef F_FULLFSYNC
    if (fcntl(fd, F_FULLFSYNC) == 0) return true;
#endif
    if (fsync(fd) == 0) return true;
    const int reason = errno;
    struct stat status;
    const bool folder = fstat(fd, &status) == 0 && S_ISDIR(status.st_mode);
    errno = reason;
    return folder && (reason == EINVAL || reason == ENOTSUP);
}

bool path_fsync(const char *path, Error *err) {
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    const bool done = fd >= 0 && fsync_open(fd);
    const int reason = errno;
    if (fd >= 0) close(fd);
    return done || error_set(err, "cannot bring %s to the disk: %s; check the disk", path, strerror(reason));
}

bool folder_make(const char *path, Error *err) {
    if (folder_exists(path)) return true;
    char *trimmed = path_trimmed(path);
    const char *name;
    char *parent = path_parent(trimmed, &name);
    /* The parents first; "." and "/" exist, so this ends. */
    bool done = strcmp(parent, trimmed) == 0 || folder_make(parent, err);
    const bool made = done && mkdir(trimmed, 0777) == 0;
    const int reason = errno;
    if (made) {
        done = path_fsync(parent, err);
    } else if (done && !folder_exists(trimmed)) { /* another process may have made it meanwhile */
        done = error_set(err, "cannot make folder %s: %s; check the path and its permissions", path,
                         reason == EEXIST ? "there is a file of that name" : strerror(reason));
    }
    free(parent);
    free(trimmed);
    return done;
}

static int remove_entry(const char *path, const struct stat *status, int kind, struct FTW *position) {
    (void)status, (void)kind, (void)position;
    return remove(path);
}

bool folder_remove(const char *path, Error *err) {
    /* FTW_DEPTH: a folder's content before it. FTW_PHYS: a symbolic link goes, what it names stays. */
    if (nftw(path, remove_entry, 16, FTW_DEPTH | FTW_PHYS) == 0 || errno == ENOENT) return true;
    return error_set(err, "cannot remove folder %s: %s; check its permissions", path, strerror(errno));
}

static int compare_names(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

bool folder_names(const char *path, char ***names, size_t *count, Error *err) {
    *names = NULL, *count = 0;
    DIR *folder = opendir(path);
    if (!folder) return cannot("list folder", path, errno, "check the path", err);
    size_t capacity = 0;
    errno = 0;
    for (struct dirent *entry; (entry = readdir(folder)) != NULL; errno = 0) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        if (*count == capacity) {
            capacity = capacity ? 2 * capacity : 16;
            *names = xrealloc(*names, capacity * sizeof **names);
        }
        (*names)[(*count)++] = xstrdup(entry->d_name);
    }
    const int reason = errno;
    closedir(folder);
    if (reason) {
        for (size_t i = 0; i < *count; i++) free((*names)[i]);
        free(*names);
        *names = NULL, *count = 0;
        return cannot("list folder", path, reason, "check the disk", err);
    }
    if (*count) qsort(*names, *count, sizeof **names, compare_names);
    return true;
}

bool disk_free_bytes(const char *path, uint64_t *bytes, Error *err) {
    struct statvfs status;
    if (statvfs(path, &status) != 0)
        return error_set(err, "cannot ask for the free space at %s: %s; check the path", path,
                         strerror(errno));
    *bytes = (uint64_t)status.f_bavail * status.f_frsize;
    return true;
}

/* Removes what a crashed writer of parent/name left there. */
static bool remove_leftovers(const char *parent, const char *name, Error *err) {
    char **names;
    size_t count;
    if (!folder_names(parent, &names, &count, err)) return false;
    char *prefix = xformat("%s.tmp-", name);
    bool done = true;
    for (size_t i = 0; i < count; i++) {
        const char *pid = strncmp(names[i], prefix, strlen(prefix)) == 0 ? names[i] + strlen(prefix) : "";
        if (done && pid[0] && pid[strspn(pid, "0123456789")] == 0) {
            char *path = xformat("%s/%s", parent, names[i]);
            done = folder_remove(path, err);
            free(path);
        }
        free(names[i]);
    }
    free(names);
    free(prefix);
    return done;
}

/* ---- a file or folder that appears whole: names, and the file being written ---- */

typedef struct ManifestEntry {
    char *name;
    uint64_t size;
    uint32_t crc;
} ManifestEntry;

struct FolderWrite {
    char *path, *parent, *temporary;
    ManifestEntry *entries; /* the files closed so far */
    size_t count, capacity;
    FILE *file; /* the file being written, or NULL */
    char *file_path;
    ManifestEntry entry; /* of that file */
};

static const char *const manifest_name = "MANIFEST";

static bool write_failed(const char *path, Error *err) {
    const int reason = errno;
    const bool full = reason == ENOSPC || reason == EDQUOT || reason == EFBIG;
    return error_set(err, "cannot write %s: %s; %s", path, strerror(reason),
                     full ? "free some space or choose another disk"
                          : "check the path, its permissions and the disk");
}

static FILE *open_for_writing(const char *path, Error *err) {
    /* O_EXCL: never through a link or into a file that somebody put there. */
    const int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    FILE *file = fd >= 0 ? fdopen(fd, "wb") : NULL;
    if (file) return file;
    write_failed(path, err);
    if (fd >= 0) close(fd);
    return NULL;
}

/* Ends a file so that its bytes are on the disk. Closes it in any case. */
static bool close_to_disk(FILE *file, const char *path, Error *err) {
    const bool done = (fflush(file) == 0 && fsync_open(fileno(file))) || write_failed(path, err);
    if (fclose(file) != 0 && done) return write_failed(path, err);
    return done;
}

bool file_replace(const char *path, const void *bytes, size_t size, Error *err) {
    const char *name;
    char *target = path_trimmed(path), *parent = path_parent(target, &name);
    char *temporary = xformat("%s.tmp-%ld", target, (long)getpid());
    FILE *file = remove_leftovers(parent, name, err) ? open_for_writing(temporary, err) : NULL;
    bool done = file != NULL;
    if (file) {
        done = size == 0 || fwrite(bytes, 1, size, file) == size || write_failed(path, err);
        /* A file that already failed is closed all the same; its first error is the one to tell. */
        done = close_to_disk(file, path, done ? err : NULL) && done;
        if (done && rename(temporary, target) != 0) done = write_failed(path, err);
        if (!done) unlink(temporary);
        done = done && path_fsync(parent, err);
    }
    free(temporary);
    free(parent);
    free(target);
    return done;
}

/* A name that stays inside its folder and on its line of MANIFEST. */
static bool entry_name_is_safe(const char *name) {
    if (name[0] == 0 || strcmp(name, ".") == 0 || strcmp(name, "..") == 0) return false;
    for (const char *c = name; *c; c++)
        if (*c == '/' || (unsigned char)*c < 0x20 || *c == 0x7F) return false;
    return strcmp(name, manifest_name) != 0;
}

static bool must_not_exist(const char *path, Error *err) {
    struct stat status;
    if (lstat(path, &status) != 0) return true;
    return error_set(err, "cannot write folder %s: there is already something of that name; move it away",
                     path);
}

FolderWrite *folder_write_begin(const char *path, Error *err) {
    FolderWrite *folder = xcalloc(1, sizeof *folder);
    const char *name;
    folder->path = path_trimmed(path);
    folder->parent = path_parent(folder->path, &name);
    folder->temporary = xformat("%s.tmp-%ld", folder->path, (long)getpid());
    bool done = must_not_exist(folder->path, err) && folder_make(folder->parent, err) &&
                remove_leftovers(folder->parent, name, err);
    if (done && mkdir(folder->temporary, 0777) != 0) done = write_failed(folder->temporary, err);
    if (done) return folder;
    folder_write_abort(folder);
    return NULL;
}

static bool open_entry(FolderWrite *folder, const char *name, Error *err) {
    char *path = xformat("%s/%s", folder->temporary, name);
    folder->file = open_for_writing(path, err);
    if (!folder->file) {
        free(path);
        return false;
    }
    folder->file_path = path;
    folder->entry = (ManifestEntry){xstrdup(name), 0, 0};
    return true;
}

bool folder_write_open(FolderWrite *folder, const char *name, Error *err) {
    if (folder->file)
        return error_set(err, "cannot start %s in %s: %s is not ended yet", name, folder->path,
                         folder->entry.name);
    if (!entry_name_is_safe(name))
        return error_set(err, "cannot write \"%s\" into %s: not the name of a file in a folder", name,
                         folder->path);
    return open_entry(folder, name, err);
}

bool folder_write_bytes(FolderWrite *folder, const void *bytes, size_t size, Error *err) {
    if (!folder->file) return error_set(err, "cannot write into %s: no file of it is started", folder->path);
    if (size == 0) return true; /* bytes may then be NULL */
    sign_of_life();
    if (fwrite(bytes, 1, size, folder->file) != size) return write_failed(folder->file_path, err);
    folder->entry.size += size;
    folder->entry.crc = checksum_crc32(folder->entry.crc, bytes, size);
    return true;
}

bool folder_write_close(FolderWrite *folder, Error *err) {
    if (!folder->file) return error_set(err, "cannot end a file of %s: none is started", folder->path);
    const bool done = close_to_disk(folder->file, folder->file_path, err);
    free(folder->file_path);
    folder->file = NULL, folder->file_path = NULL;
    if (folder->count == folder->capacity) {
        folder->capacity = folder->capacity ? 2 * folder->capacity : 8;
        folder->entries = xrealloc(folder->entries, folder->capacity * sizeof *folder->entries);
    }
    folder->entries[folder->count++] = folder->entry;
    return done;
}

bool folder_write_file(FolderWrite *folder, const char *name, const void *bytes, size_t size, Error *err) {
    return folder_write_open(folder, name, err) && folder_write_bytes(folder, bytes, size, err) &&
           folder_write_close(folder, err);
}

static int compare_entries(const void *a, const void *b) {
    return strcmp(((const ManifestEntry *)a)->name, ((const ManifestEntry *)b)->name);
}

/* MANIFEST: a line "size crc32 name" for each file, sorted by name; then "end crc32" over those lines, so
 * that a MANIFEST which was cut is not taken for one that names fewer files. */
static bool write_manifest(FolderWrite *folder, Error *err) {
    if (folder->count) qsort(folder->entries, folder->count, sizeof *folder->entries, compare_entries);
    Buffer lines = {0};
    for (size_t i = 0; i < folder->count; i++) {
        const ManifestEntry *entry = &folder->entries[i];
        char *line = xformat("%" PRIu64 " %08" PRIx32 " %s\n", entry->size, entry->crc, entry->name);
        buffer_append_text(&lines, line);
        free(line);
    }
    char *last = xformat("end %08" PRIx32 "\n", checksum_crc32(0, lines.data, lines.size));
    buffer_append_text(&lines, last);
    free(last);
    const bool done = open_entry(folder, manifest_name, err) &&
                      folder_write_bytes(folder, lines.data, lines.size, err) &&
                      folder_write_close(folder, err);
    buffer_free(&lines);
    return done;
}

bool folder_write_commit(FolderWrite *folder, Error *err) {
    if (folder->file)
        return error_set(err, "cannot finish folder %s: %s is not ended yet", folder->path,
                         folder->entry.name);
    /* The order is the guarantee: every file is on the disk already (folder_write_close), then MANIFEST,
     * then the names in the folder, then the folder's own name. */
    if (!write_manifest(folder, err) || !path_fsync(folder->temporary, err)) return false;
    if (!must_not_exist(folder->path, err)) return false;
    if (rename(folder->temporary, folder->path) != 0) return write_failed(folder->path, err);
    free(folder->temporary);
    folder->temporary = xstrdup(folder->path); /* what abort has to remove if the next line fails */
    if (!path_fsync(folder->parent, err)) return false;
    free(folder->temporary);
    folder->temporary = NULL; /* nothing to remove any more */
    folder_write_abort(folder);
    return true;
}

void folder_write_abort(FolderWrite *folder) {
    if (!folder) return;
    if (folder->file) {
        fclose(folder->file);
        free(folder->file_path);
        free(folder->entry.name);
    }
    if (folder->temporary) folder_remove(folder->temporary, NULL); /* else the next begin removes it */
    for (size_t i = 0; i < folder->count; i++) free(folder->entries[i].name);
    free(folder->entries);
    free(folder->temporary);
    free(folder->parent);
    free(folder->path);
    free(folder);
}

/* ---- checking a MANIFEST ---- */

/* 8 lower-case hexadecimal digits. */
static bool parse_crc(const char *text, uint32_t *crc) {
    *crc = 0;
    for (int i = 0; i < 8; i++) {
        const char c = text[i];
        const bool digit = c >= '0' && c <= '9';
        if (!digit && !(c >= 'a' && c <= 'f')) return false; /* the text's end included */
        *crc = *crc << 4 | (uint32_t)(digit ? c - '0' : c - 'a' + 10);
    }
    return true;
}

/* "size crc32 name", no more and no less; entry->name points into the line. */
static bool parse_manifest_line(char *line, ManifestEntry *entry) {
    const char *c = line;
    entry->size = 0;
    for (; *c >= '0' && *c <= '9'; c++) {
        if (c - line == 18) return false; /* more digits than a file can have, and than 63 bits hold */
        entry->size = 10 * entry->size + (uint64_t)(*c - '0');
    }
    if (c == line || (*line == '0' && c > line + 1)) return false; /* as written: no zeros in front */
    if (*c != ' ' || !parse_crc(c + 1, &entry->crc) || c[9] != ' ') return false;
    entry->name = line + (c - line) + 10;
    return entry_name_is_safe(entry->name);
}

/* Size and CRC-32 of one file. O_NOFOLLOW: a link could lead out of the folder. */
static bool check_entry(const char *folder, const ManifestEntry *entry, Error *err) {
    char *path = xformat("%s/%s", folder, entry->name);
    uint64_t size = 0, left;
    bool done = false;
    const int fd = open_regular(path, O_NOFOLLOW, &size, err);
    if (fd >= 0 && size != entry->size) {
        error_set(err, "file %s is damaged: found %" PRIu64 " bytes, its MANIFEST says %" PRIu64, path, size,
                  entry->size);
    } else if (fd >= 0) {
        const size_t block = (size_t)1 << 20;
        void *bytes = xmalloc(block);
        uint32_t crc = 0;
        for (left = size; left > 0;) {
            const size_t wanted = left < block ? (size_t)left : block, got = read_fully(fd, bytes, wanted);
            if (got != wanted) { /* where it ended early, it became shorter just now */
                cannot("read file", path, got == SIZE_MAX ? errno : EIO, "check the disk", err);
                break;
            }
            crc = checksum_crc32(crc, bytes, got);
            left -= got;
        }
        done = left == 0 && crc == entry->crc;
        if (left == 0 && !done)
            error_set(err,
                      "file %s is damaged: its bytes have CRC-32 %08" PRIx32 ", its MANIFEST says %08" PRIx32,
                      path, crc, entry->crc);
        free(bytes);
    }
    if (fd >= 0) close(fd);
    free(path);
    return done;
}

/* Goes through the lines in [text, end). Names must rise strictly, which also rules out a name twice. */
static bool check_entries(const char *folder, char *text, char *end, Error *err) {
    const char *before = "";
    for (size_t number = 1; text < end; number++) {
        char *newline = memchr(text, '\n', (size_t)(end - text));
        *newline = 0; /* there is one: the text before `end` ends with it */
        ManifestEntry entry;
        if (strlen(text) != (size_t)(newline - text) || !parse_manifest_line(text, &entry) ||
            strcmp(before, entry.name) >= 0)
            return error_set(err,
                             "%s/MANIFEST is damaged: line %zu is \"%.100s\", expected \"size crc32 name\" "
                             "with names in order",
                             folder, number, text);
        if (!check_entry(folder, &entry, err)) return false;
        before = entry.name;
        text = newline + 1;
    }
    return true;
}

bool folder_check_manifest(const char *path, Error *err) {
    Buffer manifest = {0};
    char *name = xformat("%s/%s", path, manifest_name);
    const size_t last = sizeof "end 00000000\n" - 1; /* bytes of the last line */
    bool done = file_read(name, (size_t)16 << 20, &manifest, err);
    if (done) {
        uint32_t crc;
        bool whole = manifest.size >= last;
        if (whole) {
            const size_t lines = manifest.size - last;
            char *text = (char *)manifest.data, *end = text + lines;
            whole = memcmp(end, "end ", 4) == 0 && parse_crc(end + 4, &crc) && end[last - 1] == '\n' &&
                    (lines == 0 || end[-1] == '\n') && crc == checksum_crc32(0, text, lines);
            done = whole && check_entries(path, text, end, err);
        }
        if (!whole)
            done = error_set(
                err, "%s is cut or damaged: it does not end in \"end\" and the CRC-32 of its lines", name);
    }
    buffer_free(&manifest);
    free(name);
    return done;
}

/* ---- time, signals, progress ---- */

double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static const double SECOND_SIGNAL_AFTER = 0.5; /* seconds */

static volatile sig_atomic_t stop_signal;
static double stop_time; /* of the first, in seconds_now's seconds; the handler's own */

/* Ends the process at a second signal: one that is sent on purpose. Who stops a process and then its group, as GNU
 * timeout does, sends the same one twice within microseconds. The signals block one another. */
static void on_stop_signal(int number) {
    if (!stop_signal) stop_time = seconds_now(); /* clock_gettime may be called in a handler */
    else if (number != stop_signal || seconds_now() - stop_time >= SECOND_SIGNAL_AFTER) _exit(128 + number);
    if (!stop_signal) stop_signal = number;
}

void signals_install(void) {
    struct sigaction action = {0};
    sigemptyset(&action.sa_mask);
    sigaddset(&action.sa_mask, SIGINT);
    sigaddset(&action.sa_mask, SIGTERM);
    sigaddset(&action.sa_mask, SIGUSR1);
    action.sa_flags = SA_RESTART; /* reads and writes under way go on; the loops poll */
    action.sa_handler = on_stop_signal;
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGUSR1, &action, NULL);
    action.sa_handler = SIG_IGN;
    sigaction(SIGPIPE, &action, NULL);
    sigaction(SIGHUP, &action, NULL);
    sigaction(SIGXFSZ, &action, NULL); /* then the write fails, with EFBIG, and is told of */
}

static _Atomic int asked_stop;
static void (*_Atomic life_hook)(void);

void stop_request(int number) {
    atomic_store(&asked_stop, number);
}

void set_life_hook(void (*hook)(void)) {
    atomic_store(&life_hook, hook);
}

void sign_of_life(void) {
    void (*const hook)(void) = atomic_load_explicit(&life_hook, memory_order_relaxed);
    if (hook) hook();
}

int stop_requested(void) {
    sign_of_life();
    return stop_signal ? (int)stop_signal : atomic_load_explicit(&asked_stop, memory_order_relaxed);
}

void progress_begin(Progress *progress, const char *what, uint64_t total, ProgressUnit unit) {
    const double now = seconds_now();
    *progress = (Progress){.what = what, .total = total, .unit = unit, .start = now, .last = now};
}

void progress_update(Progress *progress, uint64_t done) {
    const double now = seconds_now(), spent = now - progress->start;
    if (spent < 1 || now - progress->last < 0.2 || !isatty(STDERR_FILENO)) return;
    const double rate = (double)done / spent;
    fprintf(stderr, "\r\033[K%s", progress->what);
    if (progress->total) fprintf(stderr, "  %.0f %%", 100.0 * (double)done / (double)progress->total);
    if (progress->unit == PROGRESS_BYTES) fprintf(stderr, "  %.1f MB/s", rate * 1e-6);
    if (progress->total >= done && done > 0)
        fprintf(stderr, "  %.0f s left", (double)(progress->total - done) / rate);
    fflush(stderr);
    progress->last = now;
    progress->shown = true;
}

void progress_end(Progress *progress) {
    if (progress->shown) fprintf(stderr, "\r\033[K");
    progress->shown = false;
}

/* ---- checksums, random numbers ---- */

uint32_t checksum_crc32(uint32_t crc, const void *bytes, size_t size) {
    if (size == 0) return crc; /* zlib would start again at NULL */
    return (uint32_t)crc32_z(crc, bytes, size);
}

/* The next block of a stream, as two words of 64 bits. */
static void rng_block(Rng *rng, uint64_t word[2]) {
    const Philox block = philox(rng->key, rng->counter++, 0);
    word[0] = block.word[0] | (uint64_t)block.word[1] << 32;
    word[1] = block.word[2] | (uint64_t)block.word[3] << 32;
}

static const double two_to_minus_53 = 0x1p-53;

uint64_t rng_u64(Rng *rng) {
    uint64_t word[2];
    rng_block(rng, word);
    return word[0];
}

uint64_t rng_below(Rng *rng, uint64_t n) {
    /* The first 2^64 mod n values are drawn again: what is left divides evenly among the n remainders. */
    const uint64_t uneven = (UINT64_MAX - n + 1) % n;
    uint64_t value;
    do value = rng_u64(rng);
    while (value < uneven);
    return value % n;
}

double rng_uniform(Rng *rng) {
    return (double)(rng_u64(rng) >> 11) * two_to_minus_53;
}

double rng_normal(Rng *rng) {
    uint64_t word[2];
    rng_block(rng, word);
    const double u = (double)((word[0] >> 11) + 1) * two_to_minus_53; /* (0, 1]: its logarithm is finite */
    const double v = (double)(word[1] >> 11) * two_to_minus_53;
    return sqrt(-2 * log(u)) * cos(6.283185307179586477 * v);
}
