/* common.h - what every room of the program stands on: errors as values, checked memory and files,
 * counter-based random numbers, folders that appear whole or not at all, the stop signal, progress.
 *
 * Errors. A function that can fail returns bool (or a pointer) and takes an `Error *` last. On failure
 * it returns false (or NULL) and the text says what, where, found, expected, and what to do, on one
 * line without a trailing newline. Nothing below the files of app.h prints an error or ends the process;
 * the one exception is running out of ordinary heap memory (x... functions), which ends with exit 1.
 *
 * Valid C17 and C++, since nvcc reads it too. */
#ifndef COMMON_H
#define COMMON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TRAIN_GPT_VERSION "0.1.0"

/* Exit codes; a run stopped by a signal after saving ends with 128 + signal. */
enum { EXIT_DONE = 0, EXIT_FAILED = 1, EXIT_USAGE = 2 };

#if defined(__GNUC__)
#define PRINTF_LIKE(format_index, first_arg) __attribute__((format(printf, format_index, first_arg)))
#else
#define PRINTF_LIKE(format_index, first_arg)
#endif

/* ---- errors ---- */
typedef struct Error {
    char text[1024];
    /* It is about something that is there and could not be read: a disk that does not answer, no permission, a link
     * that leads nowhere or is not followed. What that holds is not known; it may well be good. */
    bool unreadable;
} Error;

/* Writes the text (its middle cut to fit; err may be NULL) and returns false, so that a caller can
 * `return error_set(err, "...")`. Control bytes and invalid UTF-8 that come in through %s are
 * shown as ?, so that an error is always one printable line. */
bool error_set(Error *err, const char *format, ...) PRINTF_LIKE(2, 3);

/* Puts "prefix: " before a text already set; returns false. */
bool error_prefix(Error *err, const char *format, ...) PRINTF_LIKE(2, 3);

/* ---- memory ---- */
/* Called once where memory is not to be had, after that was said and before the process ends; in any thread. */
void set_memory_hook(void (*hook)(void *user), void *user);
/* Like malloc, calloc, realloc; never NULL for size > 0: out of memory prints one line, exits 1. */
void *xmalloc(size_t size);
void *xcalloc(size_t count, size_t size);
void *xrealloc(void *pointer, size_t size);
char *xstrdup(const char *text);
char *xformat(const char *format, ...) PRINTF_LIKE(1, 2); /* a new string, to be freed */

/* a * b and a + b; false (and *result = SIZE_MAX) where it does not fit. */
bool size_mul(size_t a, size_t b, size_t *result);
bool size_add(size_t a, size_t b, size_t *result);

/* A growing run of bytes. Zero-initialised is empty. May hold NUL. */
typedef struct Buffer {
    uint8_t *data;
    size_t size, capacity;
} Buffer;
void buffer_reserve(Buffer *buffer, size_t extra);
void buffer_append(Buffer *buffer, const void *bytes, size_t size);
void buffer_append_text(Buffer *buffer, const char *text);
void buffer_free(Buffer *buffer); /* and empties it */

/* ---- files ---- */
/* Reads a whole regular file of at most max_size bytes; what `out` held before is dropped. */
bool file_read(const char *path, size_t max_size, Buffer *out, Error *err);
/* A regular file, to be read as a stream; NULL: an error, and so for a pipe, which is not waited for. */
FILE *file_open(const char *path, Error *err);
/* Replaces a file so that a crash at any instant leaves the old or the new one: a temporary file
 * beside it, fsync, rename, fsync of the folder. */
bool file_replace(const char *path, const void *bytes, size_t size, Error *err);
bool file_exists(const char *path);
bool folder_exists(const char *path);
/* What a path leads to. False, with an error that is `unreadable`, where that cannot be told: for whoever would take
 * "nothing" for leave to begin anew. */
typedef enum PathKind { PATH_NONE, PATH_FILE, PATH_FOLDER } PathKind;
bool path_look(const char *path, PathKind *kind, Error *err);
bool folder_make(const char *path, Error *err);   /* with its parents; there already is fine */
bool folder_remove(const char *path, Error *err); /* with all in it; not there is fine */
/* The names in a folder, sorted by bytes, without . and ..; free each and the array. */
bool folder_names(const char *path, char ***names, size_t *count, Error *err);
/* The first of the files `a` that is one of `b` too, whatever their paths; NULL: none. */
const char *files_shared(char *const *a, size_t a_count, char *const *b, size_t b_count);
/* The first of the paths that leads into the folder: as it is spelled, or where links on it lead to; NULL: none. */
const char *files_within(char *const *paths, size_t count, const char *folder);
bool disk_free_bytes(const char *path, uint64_t *bytes, Error *err);
bool path_fsync(const char *path, Error *err); /* a file or a folder */

/* ---- folders that appear whole or not at all ----
 * begin makes a temporary folder beside `path` (left-overs of an earlier crash are removed), file_*
 * write into it, note size and CRC-32, and fsync each file as it is closed; commit writes MANIFEST last,
 * fsyncs the folder, renames it to `path` (which must not exist) and fsyncs the parent. After a failure of any
 * of them call folder_write_abort, which removes what was written. */
typedef struct FolderWrite FolderWrite;
FolderWrite *folder_write_begin(const char *path, Error *err);
bool folder_write_open(FolderWrite *folder, const char *name, Error *err);                /* start a file */
bool folder_write_bytes(FolderWrite *folder, const void *bytes, size_t size, Error *err); /* ... more */
bool folder_write_close(FolderWrite *folder, Error *err);                                 /* end the file */
bool folder_write_file(FolderWrite *folder, const char *name, const void *bytes, size_t size, Error *err);
bool folder_write_commit(FolderWrite *folder, Error *err); /* frees it on success */
void folder_write_abort(FolderWrite *folder);              /* frees it; NULL is fine */
/* Reads MANIFEST and checks every file it names, size and CRC-32, and that no name leaves the folder. An error that
 * is not `unreadable` says that the bytes are wrong, or gone. */
bool folder_check_manifest(const char *path, Error *err);

/* ---- time, signals, progress ---- */
double seconds_now(void); /* monotonic */

/* SIGINT, SIGTERM and SIGUSR1 ask for a stop; a second one ends the process at once with 128 + signal, of the same
 * kind only half a second later (`timeout` sends one to a process and again to its group). SIGPIPE is ignored (a
 * write then fails with EPIPE), and so is SIGHUP: a closed terminal does not end a run. */
void signals_install(void);
int stop_requested(void); /* 0, or the signal's number; every long loop polls it */
/* As if the signal had come, asked for by someone else (another rank): no second one for the handler. */
void stop_request(int number);
/* A function that each stop_requested() and each sign_of_life() calls first, in the thread that calls them;
 * NULL: none. For whoever must know that this process is alive. */
void set_life_hook(void (*hook)(void));
void sign_of_life(void); /* in work that is long and cannot stop halfway, such as writing a checkpoint */

/* A line "what  45 %  12.3 MB/s  3 s left" on stderr, rewritten in place, after the first second, and
 * only where stderr is a terminal; total 0 means unknown. */
typedef enum ProgressUnit { PROGRESS_BYTES, PROGRESS_COUNT } ProgressUnit; /* a rate in MB/s, or none */
typedef struct Progress {
    const char *what;
    uint64_t total;
    ProgressUnit unit;
    double start, last;
    bool shown;
} Progress;
void progress_begin(Progress *progress, const char *what, uint64_t total, ProgressUnit unit);
void progress_update(Progress *progress, uint64_t done);
void progress_end(Progress *progress); /* clears the line */

/* ---- checksums, random numbers ---- */
uint32_t checksum_crc32(uint32_t crc, const void *bytes, size_t size); /* zlib's CRC-32; start with 0 */

#if defined(__CUDACC__)
#define COMMON_DEVICE __host__ __device__
#else
#define COMMON_DEVICE
#endif

/* Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011): four random
 * words as a function of a 128-bit counter and a 64-bit key alone, the same on every device. */
typedef struct Philox {
    uint32_t word[4];
} Philox;

COMMON_DEVICE static inline Philox philox(uint64_t key, uint64_t counter_low, uint64_t counter_high) {
    uint32_t c0 = (uint32_t)counter_low, c1 = (uint32_t)(counter_low >> 32);
    uint32_t c2 = (uint32_t)counter_high, c3 = (uint32_t)(counter_high >> 32);
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        const uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        const uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1, c3 = (uint32_t)p0, c0 = n0, c2 = n2;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    Philox out;
    out.word[0] = c0, out.word[1] = c1, out.word[2] = c2, out.word[3] = c3;
    return out;
}

/* A good 64-bit mix of two values, to derive one key from another (splitmix64's finaliser). */
COMMON_DEVICE static inline uint64_t mix64(uint64_t a, uint64_t b) {
    uint64_t z = a + 0x9E3779B97F4A7C15u * (b + 1);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* A stream of numbers from one key; two streams with different keys are independent. */
typedef struct Rng {
    uint64_t key, counter;
} Rng;
static inline Rng rng_start(uint64_t seed, uint64_t stream) {
    Rng rng;
    rng.key = mix64(seed, stream), rng.counter = 0;
    return rng;
}
uint64_t rng_u64(Rng *rng);
uint64_t rng_below(Rng *rng, uint64_t n); /* uniform in 0 .. n-1, n > 0, without bias */
double rng_uniform(Rng *rng);             /* [0, 1), 53 bits */
double rng_normal(Rng *rng);              /* mean 0, variance 1 (Box and Muller) */

#ifdef __cplusplus
}
#endif
#endif
