/* run.c - the run folder: making, locking, moving aside; run.json; the log (run.h).
 *
 * The lock is flock's on RUN/lock: the kernel drops it when the process ends, however it ends, so no stale
 * lock is ever left. The file itself stays: removing it would let two processes hold locks on two files of
 * one name (but for a comparison that has ended: its folder is no longer to be had anyway). A file system without
 * locks (some network ones) is used unlocked. */
#include "run.h"

#include "shards.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#ifdef __APPLE__
#define st_mtim st_mtimespec
#endif

/* All that a run folder holds at its top, in the order in which it is taken away. */
static const char *const entries[] = {"checkpoints", "report.html", "log.jsonl",
                                      "run.json",    "tokens",      "lock"};
enum { ENTRIES = sizeof entries / sizeof entries[0] };

struct Run {
    char *path;
    bool had[ENTRIES]; /* there before run_open */
    bool made;         /* the folder was not */
    char *moved_aside; /* where RUN_FORCE put the old run; NULL: there was none */
    int folder;        /* kept open, so that no other folder gets its inode */
    int lock;
    int log; /* -1: not open yet */
    bool log_failing;
};

enum { MAX_SETTINGS = 16 << 20, MAX_LINE = 64 << 20 }; /* bytes; more is damage */

static const char runs_folder[] = "runs";

static char *join(const char *folder, const char *name) {
    return xformat("%s/%s", folder, name);
}

static bool holds(const char *folder, const char *name) {
    char *path = join(folder, name);
    struct stat info;
    const bool there = lstat(path, &info) == 0;
    free(path);
    return there;
}

/* Whether it may be there: also where that cannot be told. */
static bool may_hold(const char *folder, const char *name) {
    char *path = join(folder, name);
    struct stat info;
    const bool may = lstat(path, &info) == 0 || errno != ENOENT;
    free(path);
    return may;
}

/* ---- opening ---- */

/* What a folder holds; EMPTY, too, where there is nothing but what a start of ours that did not get far has left. */
typedef enum Content { NO_FOLDER, EMPTY, A_RUN, OTHER } Content;

enum {
    LOCK_BYTES = 32, /* at most: a process number and a newline */
    LOCK_TRIES = 100
};

/* What a lock of ours holds: nothing yet, or a process number on a line. False for any other file. */
static bool read_lock(int fd, char text[LOCK_BYTES + 1]) {
    struct stat info;
    memset(text, 0, LOCK_BYTES + 1);
    if (fstat(fd, &info) || !S_ISREG(info.st_mode) || info.st_size > LOCK_BYTES ||
        pread(fd, text, LOCK_BYTES, 0) < 0)
        return false;
    const size_t digits = strspn(text, "0123456789");
    return digits == 0 ? !*text : strcmp(text + digits, "\n") == 0;
}

/* Whether RUN/lock is a file that this program has written; *named: with the number of a process in it. */
static bool is_our_lock(const char *path, bool *named) {
    char *name = join(path, "lock"), text[LOCK_BYTES + 1];
    const int fd = open(name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    const bool ours = fd >= 0 && read_lock(fd, text);
    *named = ours && *text;
    if (fd >= 0) close(fd);
    free(name);
    return ours;
}

/* "run.json.tmp-123": what file_replace left that was killed. */
static bool is_settings_leftover(const char *name) {
    static const char begin[] = "run.json.tmp-";
    const char *number = strncmp(name, begin, sizeof begin - 1) == 0 ? name + sizeof begin - 1 : "";
    return *number && !number[strspn(number, "0123456789")];
}

/* Whether run_undo, or a start before it has written run.json, may have left this in a folder with a lock. */
static bool is_leftover(const char *path, const char *name) {
    char *entry = join(path, name);
    struct stat info;
    const bool there = lstat(entry, &info) == 0;
    const bool ours = there &&
                      (strcmp(name, "tokens") == 0 ? S_ISDIR(info.st_mode) && data_folder_is_ours(entry)
                                                   : S_ISREG(info.st_mode) && is_settings_leftover(name));
    free(entry);
    return ours;
}

static bool folder_content(const char *path, Content *content, Error *err) {
    char **names;
    size_t count, others = 0;
    if (!folder_names(path, &names, &count, err)) return false;
    bool named = false;
    const bool locked = is_our_lock(path, &named);
    for (size_t i = 0; i < count; i++) {
        const bool ours = strcmp(names[i], "lock") == 0 ? locked : named && is_leftover(path, names[i]);
        if (!ours) others++;
        free(names[i]);
    }
    free(names);
    if (holds(path, "run.json") || holds(path, "log.jsonl") || holds(path, "checkpoints")) *content = A_RUN;
    else *content = others == 0 ? EMPTY : OTHER;
    return true;
}

/* Of a folder that holds no run and counts as empty. */
static bool remove_leftovers(const char *path, Error *err) {
    char **names;
    size_t count;
    if (!folder_names(path, &names, &count, err)) return false;
    bool ok = true;
    for (size_t i = 0; i < count; i++) {
        char *name = join(path, names[i]);
        if (ok && is_leftover(path, names[i])) ok = folder_remove(name, err); /* a file, too */
        free(name);
        free(names[i]);
    }
    free(names);
    return ok;
}

/* Of the longest name within a run, with the 0 at its end: what is written there must fit into a path. */
enum { INSIDE_BYTES = sizeof "/checkpoints/step-1099511627776.tmp-2147483647/optimizer.safetensors" };

/* What `path` holds, and whether a run may be begun or gone on with there. Changes nothing. */
static bool look(const char *path, RunOpen how, Content *content, Error *err) {
    PathKind kind;
    *content = NO_FOLDER;
    if (!*path) return error_set(err, "the run folder's name is empty; name one with -run");
    if (strlen(path) + INSIDE_BYTES > PATH_MAX)
        return error_set(err,
                         "the run folder's path '%s' has %zu bytes, with which the files in it could not be "
                         "written: expected at most %d; name a shorter one with -run",
                         path, strlen(path), PATH_MAX - (int)INSIDE_BYTES);
    if (!path_look(path, &kind, err)) return false;
    if (kind == PATH_FILE) return error_set(err, "run folder '%s' is a file; name another -run", path);
    if (kind == PATH_NONE) return true;
    if (!folder_content(path, content, err)) return false;
    if (how == RUN_COMPARISON && *content != EMPTY)
        return error_set(err, "folder '%s' is not empty; name a new one for the comparison with -run", path);
    if (*content == OTHER)
        return error_set(
            err,
            "folder '%s' is not empty and is no run (it has no run.json); name a new or an empty "
            "folder with -run",
            path);
    if (*content == A_RUN && how == RUN_NEW)
        return error_set(
            err,
            "folder '%s' holds a run; go on with it by -resume, start over by -force (it is then "
            "moved aside), or name another -run",
            path);
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    if (*content == A_RUN && how == RUN_FORCE && (strcmp(name, ".") == 0 || strcmp(name, "..") == 0))
        return error_set(err,
                         "run folder '%s' cannot be moved aside under that name; name the folder itself with "
                         "-run, from outside of it",
                         path);
    return true;
}

static void let_go(Run *run) {
    if (run->lock >= 0) close(run->lock);
    if (run->folder >= 0) close(run->folder);
    run->lock = run->folder = -1;
}

/* Whether a path (no link followed, if `itself`) still leads to what the descriptor is open on. */
static bool is_same_file(int fd, const char *path, bool itself) {
    struct stat open_one, named;
    return fstat(fd, &open_one) == 0 && (itself ? lstat(path, &named) : stat(path, &named)) == 0 &&
           open_one.st_dev == named.st_dev && open_one.st_ino == named.st_ino;
}

/* Opens and locks the folder. A file that is not our lock is not taken for it, through a link least of all. */
static bool take_lock(Run *run, Error *err) {
    char *name = join(run->path, "lock"), text[LOCK_BYTES + 1];
    run->folder = open(run->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (run->folder >= 0)
        run->lock = open(name, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666);
    bool ok = true;
    if (run->lock < 0 && errno != ELOOP) {
        ok = error_set(err, "cannot write into run folder '%s': %s; check its permissions", run->path,
                       strerror(errno));
    } else if (run->lock < 0 || !read_lock(run->lock, text)) {
        ok = error_set(err, "'%s' is not what a run puts there (a process number); move it away", name);
    } else if (flock(run->lock, LOCK_EX | LOCK_NB) && errno == EWOULDBLOCK) {
        text[strspn(text, "0123456789")] = 0;
        ok = error_set(err,
                       "run folder '%s' is in use by another process%s%s; wait for it or name another -run",
                       run->path, *text ? ", number " : "", text);
    }
    if (!ok) let_go(run);
    free(name);
    return ok;
}

/* For the message that names it, and so that left-overs are known for ours; it need not get there. */
static void write_process_number(const Run *run) {
    char pid[LOCK_BYTES];
    const int size = snprintf(pid, sizeof pid, "%ld\n", (long)getpid());
    if (ftruncate(run->lock, 0) == 0 && pwrite(run->lock, pid, (size_t)size, 0) != size)
        (void)!ftruncate(run->lock, 0);
}

/* Renames the run, which is locked, to PATH.old-1, or -2 ...; and leaves it unlocked. */
static bool move_aside(Run *run, Error *err) {
    bool ok = true;
    for (unsigned i = 1; ok && !run->moved_aside; i++) {
        char *old = xformat("%s.old-%u", run->path, i);
        struct stat info;
        if (lstat(old, &info)) {
            if (rename(run->path, old))
                ok = error_set(err,
                               "cannot move the old run '%s' aside to '%s': %s; check the permissions of "
                               "the folder that it is in, or name another -run",
                               run->path, old, strerror(errno));
            else run->moved_aside = old;
        }
        if (!run->moved_aside) free(old);
    }
    let_go(run);
    return ok;
}

/* A new folder runs/YYYYMMDD-HHMMSS or runs/compare-YYYYMMDD-HHMMSS, with -2, -3 ... behind it where that exists; NULL
 * on failure. */
static char *make_dated_folder(RunOpen how, Error *err) {
    if (!folder_make(runs_folder, err)) return NULL;
    const time_t now = time(NULL);
    struct tm parts;
    char date[32];
    strftime(date, sizeof date, how == RUN_COMPARISON ? "compare-%Y%m%d-%H%M%S" : "%Y%m%d-%H%M%S",
             localtime_r(&now, &parts));
    for (unsigned i = 1;; i++) {
        char *path = i == 1 ? xformat("%s/%s", runs_folder, date) : xformat("%s/%s-%u", runs_folder, date, i);
        if (mkdir(path, 0777) == 0) return path;
        if (errno != EEXIST) {
            error_set(err, "cannot make run folder '%s': %s", path, strerror(errno));
            free(path);
            return NULL;
        }
        free(path);
    }
}

/* Takes back that the folder was made, and an old run moved aside. rmdir leaves a folder that someone else has
 * put something into. */
static void unmake_folder(const Run *run) {
    if (run->made) rmdir(run->path);
    struct stat info;
    if (run->moved_aside && lstat(run->path, &info)) rename(run->moved_aside, run->path);
}

/* Locks the folder, which is made where there is none, and finds out under the lock what it holds: what another
 * process did before we had the lock counts. */
static bool enter_folder(Run *run, RunOpen how, bool *resumed, Error *err) {
    char *lock = join(run->path, "lock");
    Content content = NO_FOLDER;
    bool ok = true, had_lock = false;
    for (int tries = 0; ok && run->lock < 0; tries++) {
        if (tries == LOCK_TRIES) {
            ok = error_set(err, "run folder '%s' is moved or removed again and again; name another -run",
                           run->path);
            break;
        }
        ok = look(run->path, how, &content, err);
        had_lock = ok && may_hold(run->path, "lock");
        if (ok && content == NO_FOLDER) run->made = ok = folder_make(run->path, err);
        ok = ok && take_lock(run, err);
        /* Moved aside or removed before it was locked: it is another one now, or none. */
        if (ok && !(is_same_file(run->folder, run->path, false) && is_same_file(run->lock, lock, true)))
            let_go(run);
    }
    if (ok && !look(run->path, how, &content, err)) {
        if (!had_lock) unlink(lock);
        ok = false;
    }
    free(lock);
    if (!ok) return false;
    if (content == A_RUN && how == RUN_FORCE)
        return move_aside(run, err) && enter_folder(run, RUN_NEW, resumed, err);
    write_process_number(run);
    if (content == EMPTY && !remove_leftovers(run->path, err)) return false;
    for (size_t i = 0; i < ENTRIES; i++)
        run->had[i] = strcmp(entries[i], "lock") == 0 ? had_lock : may_hold(run->path, entries[i]);
    *resumed = content == A_RUN;
    return true;
}

/* As it is used: so that .old-1 is put behind the name. To be freed. */
static char *without_slashes(const char *path) {
    size_t size = strlen(path);
    while (size > 1 && path[size - 1] == '/') size--;
    return xformat("%.*s", (int)size, path);
}

bool run_look(const char *path, RunOpen how, bool *found, Error *err) {
    char *trimmed = without_slashes(path);
    Content content;
    const bool ok = look(trimmed, how, &content, err);
    *found = ok && content == A_RUN;
    free(trimmed);
    return ok;
}

Run *run_open(const char *path, RunOpen how, bool *resumed, Error *err) {
    *resumed = false;
    Run *run = (Run *)xcalloc(1, sizeof *run);
    run->folder = run->lock = run->log = -1;
    run->path = path ? without_slashes(path) : make_dated_folder(how, err);
    if (!path) run->made = run->path != NULL;
    if (run->path && enter_folder(run, how, resumed, err)) return run;
    if (run->path) unmake_folder(run);
    run_close(run);
    return NULL;
}

/* run.json goes before the tokens, which are then known for left-overs, and the lock last, by which they are. */
void run_undo(Run *run) {
    if (!run_is_in_place(run, NULL)) return;
    for (size_t i = 0; i < ENTRIES; i++) {
        char *name = join(run->path, entries[i]);
        if (!run->had[i]) folder_remove(name, NULL); /* a file, too */
        free(name);
    }
    unmake_folder(run);
}

void run_end_comparison(Run *run) {
    char *lock = join(run->path, "lock");
    if (run_is_in_place(run, NULL)) unlink(lock);
    free(lock);
}

bool run_is_in_place(const Run *run, Error *err) {
    return is_same_file(run->folder, run->path, false) ||
           error_set(
               err,
               "the run folder that was at '%s' was moved or removed while in use: nothing is saved; its "
               "checkpoints are where it was moved to; move it back, or go on with -resume -run and its "
               "new path",
               run->path);
}

void run_close(Run *run) {
    if (!run) return;
    if (run->log >= 0) close(run->log);
    let_go(run);
    free(run->moved_aside);
    free(run->path);
    free(run);
}

const char *run_path(const Run *run) {
    return run->path;
}

const char *run_moved_aside(const Run *run) {
    return run->moved_aside;
}

char *run_file(const Run *run, const char *name) {
    return join(run->path, name);
}

/* When a run was last written to; false where the folder holds none. */
static bool last_written(const char *path, struct timespec *when) {
    static const char *const names[] = {"log.jsonl", "run.json"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char *file = join(path, names[i]);
        struct stat info;
        const bool there = stat(file, &info) == 0;
        free(file);
        if (there) {
            *when = info.st_mtim;
            return holds(path, "run.json");
        }
    }
    return false;
}

/* A checkpoint, or what was moved aside while it is written again; not what a killed writer left. */
static bool holds_model(const char *path) {
    char *checkpoints = join(path, "checkpoints");
    char **names = NULL;
    size_t count = 0;
    bool found = false;
    if (folder_exists(checkpoints)) (void)folder_names(checkpoints, &names, &count, NULL);
    for (size_t i = 0; i < count; i++) {
        found = found || (strncmp(names[i], "step-", 5) == 0 && !strstr(names[i], ".tmp-"));
        free(names[i]);
    }
    free(names);
    free(checkpoints);
    return found;
}

char *run_newest(bool with_model, Error *err) {
    char **names = NULL;
    size_t count = 0;
    if (folder_exists(runs_folder) && !folder_names(runs_folder, &names, &count, err)) return NULL;
    char *newest = NULL;
    struct timespec newest_time = {0};
    for (size_t i = 0; i < count; i++) {
        char *path = join(runs_folder, names[i]);
        struct timespec when;
        /* Of two at the same time, the later name. */
        if (last_written(path, &when) && (!with_model || holds_model(path)) &&
            (!newest || when.tv_sec > newest_time.tv_sec ||
             (when.tv_sec == newest_time.tv_sec && when.tv_nsec >= newest_time.tv_nsec))) {
            free(newest);
            newest = path, newest_time = when;
        } else {
            free(path);
        }
        free(names[i]);
    }
    free(names);
    if (!newest)
        error_set(err, "there is no run under '%s/'%s; train one, or name a run with %s", runs_folder,
                  with_model ? " that holds a model" : "", with_model ? "-load" : "-run");
    return newest;
}

/* ---- run.json ---- */

bool run_write_settings(Run *run, const json_t *settings, Error *err) {
    if (!run_is_in_place(run, err)) return false;
    char *text = json_dumps(settings, JSON_INDENT(2));
    if (!text) return error_set(err, "cannot write the settings of '%s' as JSON", run->path);
    char *path = run_file(run, "run.json"), *lines = xformat("%s\n", text);
    const bool ok = file_replace(path, lines, strlen(lines), err);
    free(lines);
    free(path);
    free(text);
    return ok;
}

json_t *run_read_settings(const char *path, Error *err) {
    char *file = join(path, "run.json");
    Buffer text = {0};
    json_t *settings = NULL;
    if (file_read(file, MAX_SETTINGS, &text, err)) {
        json_error_t problem;
        settings = json_loadb((const char *)text.data, text.size, JSON_REJECT_DUPLICATES, &problem);
        static const char advice[] = "put a copy back, or start over with -force";
        if (text.size == 0) { /* for which jansson has no words */
            error_set(err, "'%s' is empty: expected the run's settings as JSON; %s", file, advice);
        } else if (!settings) {
            error_set(err, "'%s' is damaged at line %d: %s; %s", file, problem.line, problem.text, advice);
        } else if (!json_is_object(settings)) {
            error_set(err, "'%s' is damaged: expected a JSON object; %s", file, advice);
            json_decref(settings);
            settings = NULL;
        }
    }
    buffer_free(&text);
    free(file);
    return settings;
}

/* ---- the log ---- */

json_t *run_number(double x) {
    return isfinite(x) ? json_real(x) : json_null();
}

/* The length of the UTF-8 character at text[0], 0 where the bytes are none (Unicode 15, table 3-7). */
static size_t utf8_length(const uint8_t *text, size_t size) {
    const uint8_t lead = text[0];
    if (lead < 0x80) return 1;
    const size_t length = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
    if (lead < 0xC2 || lead > 0xF4 || size < length) return 0;
    for (size_t i = 1; i < length; i++)
        if ((text[i] & 0xC0) != 0x80) return 0;
    /* Overlong forms, surrogates and what lies past U+10FFFF show in the second byte. */
    if ((lead == 0xE0 && text[1] < 0xA0) || (lead == 0xED && text[1] > 0x9F)) return 0;
    if ((lead == 0xF0 && text[1] < 0x90) || (lead == 0xF4 && text[1] > 0x8F)) return 0;
    return length;
}

json_t *run_text(const void *bytes, size_t size) {
    const uint8_t *text = (const uint8_t *)bytes;
    Buffer clean = {0};
    buffer_reserve(&clean, size + 1);
    for (size_t i = 0; i < size;) {
        const size_t length = utf8_length(text + i, size - i);
        if (length) buffer_append(&clean, text + i, length);
        else buffer_append_text(&clean, "\xEF\xBF\xBD");
        i += length ? length : 1;
    }
    json_t *string = json_stringn((const char *)clean.data, clean.size);
    buffer_free(&clean);
    return string;
}

static bool log_write(Run *run, const Buffer *line, Error *err) {
    char *path = run_file(run, "log.jsonl");
    bool ok = run->log >= 0 || run_is_in_place(run, err);
    if (ok && run->log < 0) {
        /* O_NONBLOCK: a pipe is not waited for here, either. */
        run->log = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0666);
        if (run->log < 0) ok = error_set(err, "cannot open '%s': %s", path, strerror(errno));
    }
    if (ok) {
        const off_t end = lseek(run->log, 0, SEEK_END);
        ssize_t n;
        do n = write(run->log, line->data, line->size);
        while (n < 0 && errno == EINTR);
        if (n != (ssize_t)line->size) {
            ok = error_set(err, "cannot write '%s': %s; rows are missing until there is room", path,
                           n < 0 ? strerror(errno) : "no space left");
            /* Half a row must not stand before the next one. */
            if (n > 0 && ftruncate(run->log, end))
                error_set(err, "cannot write '%s': half a row stands at its end (%s); remove it", path,
                          strerror(errno));
        }
    }
    free(path);
    return ok;
}

bool run_log(Run *run, json_t *row, Error *err) {
    char *text = row ? json_dumps(row, JSON_COMPACT) : NULL;
    json_decref(row);
    if (!text) return error_set(err, "cannot write a row of the log of '%s' as JSON", run->path);
    Buffer line = {0};
    buffer_append_text(&line, text);
    buffer_append(&line, "\n", 1);
    free(text);
    const bool ok = log_write(run, &line, err);
    buffer_free(&line);
    const bool reported = run->log_failing;
    run->log_failing = !ok;
    return ok || reported;
}

bool run_log_sync(Run *run, Error *err) {
    if (run->log < 0 || fsync(run->log) == 0) return true;
    return error_set(err, "cannot bring the log of '%s' to the disk: %s", run->path, strerror(errno));
}

/* A line of a file without its newline; *whole tells whether the newline was there. False at the end and
 * on failure, which error and the stream tell apart. */
static bool next_line(FILE *file, Buffer *line, bool *whole) {
    line->size = 0;
    *whole = false;
    int c;
    while ((c = getc_unlocked(file)) != EOF && line->size <= MAX_LINE) {
        if (c == '\n') {
            *whole = true;
            return true;
        }
        const uint8_t byte = (uint8_t)c;
        buffer_append(line, &byte, 1);
    }
    return line->size > 0;
}

/* What is there but cannot be read is not for whoever begins anew where there is no log. */
static bool log_unreadable(Error *err) {
    if (err) err->unreadable = true;
    return false;
}

bool run_log_each(const char *path, bool (*each)(void *context, const RunRow *row, Error *err), void *context,
                  Error *err) {
    char *name = join(path, "log.jsonl");
    PathKind kind;
    bool ok = path_look(name, &kind, err);
    FILE *file = ok && kind != PATH_NONE ? file_open(name, err) : NULL;
    if (ok && kind != PATH_NONE && !file) ok = log_unreadable(err);
    Buffer line = {0};
    bool whole;
    for (uint64_t number = 1; ok && file && next_line(file, &line, &whole); number++) {
        json_error_t problem;
        json_t *json = json_loadb((const char *)line.data, line.size, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL,
                                  &problem);
        const RunRow row = {json, json_string_value(json_object_get(json, "type")), (const char *)line.data,
                            line.size, number};
        if (row.type) ok = each(context, &row, err);
        else if (line.size > MAX_LINE)
            ok = error_set(err, "'%s' is damaged at line %" PRIu64 ": longer than %d bytes; remove that line",
                           name, number, MAX_LINE);
        else if (whole) /* a crash leaves a last line without its newline, and nothing else */
            ok = error_set(err, "'%s' is damaged at line %" PRIu64 ": %s; remove that line", name, number,
                           json ? "not an object with a \"type\"" : problem.text);
        json_decref(json);
    }
    if (ok && file && ferror(file)) {
        error_set(err, "cannot read '%s': %s; check its permissions and the disk", name, strerror(errno));
        ok = log_unreadable(err);
    }
    if (file) fclose(file);
    buffer_free(&line);
    free(name);
    return ok;
}

typedef struct Cut {
    FILE *out;
    const char *path; /* of the log; the file being written is beside it */
    uint64_t step;
    const RunWatched *watched; /* NULL: all of it stays */
    uint64_t stories;          /* of `step`, so far */
} Cut;

static bool cut_row(void *context, const RunRow *row, Error *err) {
    Cut *cut = (Cut *)context;
    const bool eval = strcmp(row->type, "eval") == 0, sample = strcmp(row->type, "sample") == 0;
    if (strcmp(row->type, "end") == 0) return true;
    if (eval || sample || strcmp(row->type, "step") == 0) {
        const json_t *step = json_object_get(row->json, "step");
        if (!json_is_integer(step) || json_integer_value(step) < 0)
            return error_set(err,
                             "'%s' is damaged at line %" PRIu64 ": \"step\" is not a whole number; remove "
                             "that line",
                             cut->path, row->number);
        const uint64_t at = (uint64_t)json_integer_value(step);
        if (at > cut->step) return true;
        if (at == cut->step && cut->watched) {
            if (eval && !cut->watched->evaluation) return true;
            if (sample && cut->stories++ >= cut->watched->stories) return true;
        }
    }
    if (fwrite(row->line, 1, row->size, cut->out) != row->size || putc('\n', cut->out) == EOF)
        return error_set(err, "cannot write '%s.tmp': %s", cut->path, strerror(errno));
    return true;
}

bool run_log_cut(Run *run, uint64_t step, const RunWatched *watched, Error *err) {
    char *path = run_file(run, "log.jsonl"), *temporary = run_file(run, "log.jsonl.tmp");
    Cut cut = {.out = fopen(temporary, "wbe"), .path = path, .step = step, .watched = watched};
    bool ok = cut.out || error_set(err, "cannot create '%s': %s", temporary, strerror(errno));
    ok = ok && run_log_each(run->path, cut_row, &cut, err);
    if (ok && (fflush(cut.out) || fsync(fileno(cut.out))))
        ok = error_set(err, "cannot write '%s': %s", temporary, strerror(errno));
    if (cut.out && fclose(cut.out) && ok)
        ok = error_set(err, "cannot write '%s': %s", temporary, strerror(errno));
    if (ok && rename(temporary, path))
        ok = error_set(err, "cannot rename '%s': %s", temporary, strerror(errno));
    if (!ok) unlink(temporary);
    ok = ok && path_fsync(run->path, err);
    if (run->log >= 0) close(run->log); /* the file by that name is another one now */
    run->log = -1;
    free(temporary);
    free(path);
    return ok;
}
