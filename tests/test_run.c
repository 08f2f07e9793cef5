/* test_run.c - the run folder: who may open what, the lock, moving aside; run.json and the log, hostile ones
 * too; the cut after a resume; the report. */
#include "test.h"

#include "../data/report.h"
#include "../data/run.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static char folder[] = "/tmp/test_run_XXXXXX";

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

/* A whole file as a string, to be freed. */
static char *read_text(const char *path) {
    Buffer text = {0};
    Error err = {0};
    CHECK_MSG(file_read(path, 1 << 28, &text, &err), "%s", err.text);
    buffer_append(&text, "", 1);
    return (char *)text.data;
}

static void check_file(const char *path, const char *expected) {
    char *text = read_text(path);
    CHECK_MSG(strcmp(text, expected) == 0, "'%s' holds '%s', expected '%s'", path, text, expected);
    free(text);
}

static Run *open_run(const char *path, RunOpen how, bool resumed_expected) {
    Error err = {0};
    bool resumed;
    Run *run = run_open(path, how, &resumed, &err);
    CHECK_MSG(run != NULL, "%s", err.text);
    CHECK(resumed == resumed_expected);
    if (!run) abort();
    return run;
}

static void check_refused(const char *path, RunOpen how, const char *part) {
    Error err = {0};
    bool resumed;
    Run *run = run_open(path, how, &resumed, &err);
    CHECK_MSG(!run, "'%s' was opened", path);
    CHECK_MSG(run || strstr(err.text, part), "'%s' is not in '%s'", part, err.text);
    run_close(run);
}

static void settle(Run *run) {
    Error err = {0};
    json_t *settings = json_pack("{s:s, s:i}", "version", TRAIN_GPT_VERSION, "layers", 4);
    CHECK_MSG(run_write_settings(run, settings, &err), "%s", err.text);
    json_decref(settings);
}

/* ---- the folder ---- */

#if defined(__linux__)
/* The end of the paths that cannot be looked at; NULL: all can. */
static const char *failing_look;

int lstat(const char *path, struct stat *info) {
    const size_t size = strlen(path), end = failing_look ? strlen(failing_look) : 0;
    if (failing_look && size >= end && strcmp(path + size - end, failing_look) == 0) {
        errno = EIO;
        return -1;
    }
    return fstatat(AT_FDCWD, path, info, AT_SYMLINK_NOFOLLOW);
}
#endif

/* A start that fails takes away what it has made, and not what it did not see. */
TEST(undo_keeps_what_could_not_be_seen) {
#if defined(__linux__)
    static const char *const names[] = {"/checkpoints", "/run.json", "/tokens"};
    const char *path = in_folder("unseen");
    Error err;
    Run *run = open_run(path, RUN_NEW, false);
    settle(run);
    run_close(run);
    CHECK(folder_make(in_folder("unseen/checkpoints/step-00000001"), &err) &&
          folder_make(in_folder("unseen/tokens"), &err));
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        failing_look = names[i];
        run = open_run(path, RUN_RESUME, true);
        failing_look = NULL;
        run_undo(run);
        run_close(run);
        CHECK_MSG(folder_exists(in_folder("unseen/checkpoints/step-00000001")) &&
                      file_exists(in_folder("unseen/run.json")) && folder_exists(in_folder("unseen/tokens")),
                  "%s was removed", names[i]);
    }
#endif
}

TEST(new_resume_force) {
    const char *path = in_folder("a/run/");
    Run *run = open_run(path, RUN_NEW, false);
    char *file = run_file(run, "run.json");
    CHECK(strcmp(run_path(run), in_folder("a/run")) == 0 && strcmp(file, in_folder("a/run/run.json")) == 0);
    free(file);
    run_close(run);
    run_close(open_run(path, RUN_NEW, false)); /* nothing of a run yet: only a lock */
    run = open_run(path, RUN_RESUME, false);
    settle(run);
    run_close(run);
    check_refused(path, RUN_NEW, "holds a run");
    run_close(open_run(path, RUN_RESUME, true));
    run_close(open_run(path, RUN_FORCE, false));
    CHECK(file_exists(in_folder("a/run.old-1/run.json")) && !file_exists(in_folder("a/run/run.json")));
    run = open_run(path, RUN_FORCE, false); /* what is no run yet need not be moved */
    CHECK(!folder_exists(in_folder("a/run.old-2")));
    settle(run);
    run_close(run);
    run_close(open_run(path, RUN_FORCE, false));
    CHECK(file_exists(in_folder("a/run.old-2/run.json")) && file_exists(in_folder("a/run.old-1/run.json")));
}

TEST(folders_that_are_no_runs) {
    Error err = {0};
    CHECK(folder_make(in_folder("photos"), &err));
    run_close(open_run(in_folder("photos"), RUN_FORCE, false)); /* empty: welcome */
    CHECK(folder_make(in_folder("letters"), &err));
    write_file(in_folder("letters/one"), "x", 1);
    for (RunOpen how = RUN_NEW; how <= RUN_FORCE; how++)
        check_refused(in_folder("letters"), how, "is no run");
    CHECK(!file_exists(in_folder("letters/lock")));
    for (RunOpen how = RUN_NEW; how <= RUN_FORCE; how++)
        check_refused(in_folder("letters/one"), how, "is a file");
    check_refused(in_folder("letters/one/run"), RUN_NEW, "letters/one");
    check_refused("", RUN_NEW, "empty");
    CHECK(symlink("nowhere", in_folder("dangling")) == 0);
    check_refused(in_folder("dangling"), RUN_NEW, "is a link to something that is not there");
    if (geteuid() == 0) return; /* root writes anywhere */
    CHECK(folder_make(in_folder("locked"), &err) && chmod(in_folder("locked"), 0555) == 0);
    check_refused(in_folder("locked/run"), RUN_NEW, "locked");
    check_refused(in_folder("locked"), RUN_NEW, "cannot write");
    chmod(in_folder("locked"), 0755);
}

TEST(lock) {
    const char *path = in_folder("locked-run");
    Run *run = open_run(path, RUN_NEW, false);
    settle(run);
    char number[64];
    snprintf(number, sizeof number, "in use by another process, number %ld;", (long)getpid());
    check_refused(path, RUN_RESUME, number);
    check_refused(path, RUN_FORCE, number);
    CHECK(!folder_exists(in_folder("locked-run.old-1")));
    run_close(run);
    run_close(open_run(path, RUN_RESUME, true));
    /* A process that is killed leaves no lock. */
    fflush(stdout);
    int ready[2];
    CHECK(pipe(ready) == 0);
    const pid_t child = fork();
    if (child == 0) {
        Error err;
        bool resumed;
        if (!run_open(path, RUN_RESUME, &resumed, &err)) _exit(1);
        if (write(ready[1], "r", 1) != 1) _exit(1);
        for (;;) pause();
    }
    char byte;
    CHECK(read(ready[0], &byte, 1) == 1);
    check_refused(path, RUN_RESUME, "in use");
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    run_close(open_run(path, RUN_RESUME, true));
    close(ready[0]);
    close(ready[1]);
}

/* What another process does in the moment before the lock is ours, once. */
static void (*before_lock)(void);

#if defined(__linux__)
int flock(int fd, int operation) {
    void (*const other)(void) = before_lock;
    before_lock = NULL;
    if (other) other();
    int (*real)(int, int);
    *(void **)&real = dlsym(RTLD_NEXT, "flock");
    return real(fd, operation);
}

static Run *begun;
static void begin_a_run(void) {
    begun = open_run(in_folder("slow"), RUN_NEW, false);
    settle(begun);
}

static void finish_a_run(void) {
    Run *run = open_run(in_folder("slow"), RUN_NEW, false);
    settle(run);
    run_close(run);
}

static void move_it_aside(void) {
    CHECK(rename(in_folder("slow"), in_folder("slow.elsewhere")) == 0);
}

static void remove_it(void) {
    CHECK(unlink(in_folder("slow/lock")) == 0 && rmdir(in_folder("slow")) == 0);
}
#endif

/* What a folder holds is asked under its lock. */
TEST(another_process_is_faster) {
#if defined(__linux__)
    before_lock = begin_a_run;
    check_refused(in_folder("slow"), RUN_NEW, "in use");
    CHECK(file_exists(in_folder("slow/run.json")));
    run_close(begun);
    Error err;
    CHECK(folder_remove(in_folder("slow"), &err));
    before_lock = finish_a_run;
    check_refused(in_folder("slow"), RUN_NEW, "holds a run");
    CHECK(file_exists(in_folder("slow/run.json")));
    before_lock = move_it_aside;
    Run *run = open_run(in_folder("slow"), RUN_RESUME, false);
    CHECK(run_is_in_place(run, &err) && file_exists(in_folder("slow/lock")));
    check_refused(in_folder("slow"), RUN_NEW, "in use");
    run_close(run);
    before_lock = remove_it;
    run = open_run(in_folder("slow"), RUN_NEW, false);
    check_refused(in_folder("slow"), RUN_NEW, "in use");
    run_close(run);
#endif
}

static void write_text(const char *path, const char *text) {
    write_file(path, text, strlen(text));
}

/* What an interrupted start leaves: a lock with a number, settings and tokens that are not whole. */
static void leave_over(void) {
    Error err;
    CHECK(folder_make(in_folder("left/tokens"), &err));
    write_text(in_folder("left/lock"), "4711\n");
    write_text(in_folder("left/run.json.tmp-4711"), "{\"lay");
    write_text(in_folder("left/tokens/merges.txt"), "#version: 0.2\n");
    write_text(in_folder("left/tokens/data.json"), "{}\n");
    write_text(in_folder("left/tokens/train-00000.bin"), "GPTSHARDxx");
    write_file(in_folder("left/tokens/heldout-00000.bin.tmp"), "\0\0\0\0\0\0\0\0\0", 9);
}

TEST(leftovers_and_what_looks_like_them) {
    Error err;
    bool found;
    leave_over();
    CHECK(run_look(in_folder("left"), RUN_NEW, &found, &err) && !found);
    CHECK(file_exists(in_folder("left/tokens/data.json"))); /* a look changes nothing */
    for (RunOpen how = RUN_NEW; how <= RUN_FORCE; how++) {
        leave_over();
        Run *run = open_run(in_folder("left"), how, false);
        CHECK(!folder_exists(in_folder("left/tokens")) && !file_exists(in_folder("left/run.json.tmp-4711")));
        settle(run);
        run_undo(run); /* the lock was there before */
        run_close(run);
        CHECK(folder_exists(in_folder("left")) && !file_exists(in_folder("left/run.json")));
    }
    static const struct {
        const char *name, *text;
    } foreign[] = {{"left/thesis.txt", "x"},
                   {"left/lock", ""}, /* ours may be empty, but then nothing was made yet */
                   {"left/lock", "mine\n"},
                   {"left/lock", "4711 and more, longer than a number\n"},
                   {"left/run.json.tmp-", "x"},
                   {"left/run.json.tmp-12x", "x"},
                   {"left/tokens/train-00000.bin", "mine"},
                   {"left/tokens/train-00001.bin.tmp", "mine, too"},
                   {"left/tokens/merges.txt", "to merge"},
                   {"left/tokens/data.json", "mine"},
                   {"left/tokens/notes", "x"}};
    for (size_t i = 0; i < sizeof foreign / sizeof *foreign; i++) {
        CHECK(folder_remove(in_folder("left"), &err));
        leave_over();
        write_text(in_folder(foreign[i].name), foreign[i].text);
        for (RunOpen how = RUN_NEW; how <= RUN_FORCE; how++)
            check_refused(in_folder("left"), how, "is no run");
        check_file(in_folder(foreign[i].name), foreign[i].text);
        CHECK(file_exists(in_folder("left/tokens/heldout-00000.bin.tmp")));
    }
}

/* A lock is no way into another file. */
TEST(lock_that_is_another_file) {
    write_text(in_folder("precious"), "precious");
    for (int hard = 0; hard < 2; hard++) {
        const char *path = in_folder(hard ? "hard" : "soft"),
                   *lock = in_folder(hard ? "hard/lock" : "soft/lock");
        Run *run = open_run(path, RUN_NEW, false);
        settle(run);
        run_close(run);
        CHECK(unlink(lock) == 0);
        CHECK((hard ? link(in_folder("precious"), lock) : symlink("../precious", lock)) == 0);
        check_refused(path, RUN_RESUME, "lock' is not what a run puts there");
        check_file(in_folder("precious"), "precious");
    }
}

TEST(folder_that_is_moved_in_use) {
    Error err;
    Run *run = open_run(in_folder("moving"), RUN_NEW, false);
    settle(run);
    CHECK(run_is_in_place(run, &err));
    CHECK(rename(in_folder("moving"), in_folder("moved")) == 0);
    for (int another = 0; another < 2; another++) {
        if (another) CHECK(folder_make(in_folder("moving"), &err));
        CHECK(!run_is_in_place(run, &err));
        CHECK_MSG(strstr(err.text, "moved or removed"), "%s", err.text);
        json_t *settings = json_pack("{s:i}", "layers", 5);
        CHECK(!run_write_settings(run, settings, &err) && !file_exists(in_folder("moving/run.json")));
        json_decref(settings);
        run_undo(run);
        CHECK(folder_exists(in_folder("moving")) == (another == 1));
    }
    CHECK(rmdir(in_folder("moving")) == 0 && rename(in_folder("moved"), in_folder("moving")) == 0);
    CHECK(run_is_in_place(run, &err));
    run_close(run);
}

TEST(paths_that_cannot_be) {
    char path[PATH_MAX];
    memset(path, 'x', sizeof path);
    for (size_t i = 0; i < sizeof path; i += 100) path[i] = '/';
    memcpy(path, "/nowhere", 8);
    path[4020] = 0; /* a short file's name fits, not that of a checkpoint */
    bool found;
    Error err;
    CHECK(run_look(path, RUN_NEW, &found, &err));
    path[4020] = 'x', path[4040] = 0;
    check_refused(path, RUN_NEW, "a shorter one with -run");
    CHECK(!run_look(path, RUN_NEW, &found, &err));
    Run *run = open_run(in_folder("dotted"), RUN_NEW, false);
    settle(run);
    run_close(run);
    check_refused(in_folder("dotted/."), RUN_FORCE, "from outside");
    CHECK(file_exists(in_folder("dotted/run.json")));
}

TEST(dated_and_newest) {
    char before[512];
    if (!getcwd(before, sizeof before)) abort();
    Error err = {0};
    CHECK(folder_make(in_folder("home"), &err) && chdir(in_folder("home")) == 0);
    CHECK(run_newest(false, &err) == NULL);
    CHECK_MSG(strstr(err.text, "no run"), "%s", err.text);
    Run *one = open_run(NULL, RUN_NEW, false), *two = open_run(NULL, RUN_NEW, false);
    CHECK(strcmp(run_path(one), run_path(two)) != 0);
    int year, rest;
    CHECK(sscanf(run_path(one), "runs/%4d%4d-%6d", &year, &rest, &rest) == 3 && year > 2000);
    CHECK(run_newest(false, &err) == NULL); /* nothing in them yet */
    settle(one);
    settle(two);
    const struct timespec old[2] = {{1000, 0}, {1000, 0}}, older[2] = {{500, 5}, {500, 5}};
    char *one_file = run_file(one, "run.json"), *two_file = run_file(two, "run.json");
    CHECK(utimensat(AT_FDCWD, one_file, old, 0) == 0 && utimensat(AT_FDCWD, two_file, older, 0) == 0);
    char *newest = run_newest(false, &err);
    CHECK(newest && strcmp(newest, run_path(one)) == 0);
    free(newest);
    CHECK(run_log(two, json_pack("{s:s}", "type", "start"), &err));
    newest = run_newest(false, &err);
    CHECK(newest && strcmp(newest, run_path(two)) == 0);
    free(newest);
    /* A model is in the older one alone; what a killed writer left is none. */
    CHECK(run_newest(true, &err) == NULL && strstr(err.text, "holds a model"));
    char *whole = run_file(one, "checkpoints/step-00000001"),
         *cut = run_file(two, "checkpoints/step-00000001.tmp-5");
    CHECK(folder_make(whole, &err) && folder_make(cut, &err));
    newest = run_newest(true, &err);
    CHECK(newest && strcmp(newest, run_path(one)) == 0);
    free(newest);
    free(whole);
    free(cut);
    free(one_file);
    free(two_file);
    run_close(one);
    run_close(two);
    CHECK(chdir(before) == 0);
}

/* ---- run.json ---- */

TEST(settings) {
    Run *run = open_run(in_folder("settings"), RUN_NEW, false);
    Error err = {0};
    json_t *settings = json_pack("{s:s, s:{s:f, s:n}, s:I}", "zebra", "first", "inner", "lr", 0.003, "none",
                                 "ape", (json_int_t)1 << 60);
    CHECK(run_write_settings(run, settings, &err));
    json_t *again = run_read_settings(in_folder("settings"), &err);
    CHECK_MSG(again && json_equal(settings, again), "%s", err.text);
    json_decref(settings);
    json_decref(again);
    run_close(run);
    char *text = read_text(in_folder("settings/run.json"));
    CHECK(strstr(text, "zebra") < strstr(text, "ape")); /* in the order they were given */
    free(text);
    static const struct {
        const char *text, *part;
    } cases[] = {
        {"", "is empty: expected"},         {"{\"a\":1,", "line"},        {"[1]", "object"},
        {"{\"a\":1,\"a\":2}", "duplicate"}, {"{\"a\":\"\xff\"}", "0xff"}, {"{\"a\":\"x\\u0000y\"}", "u0000"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_file(in_folder("settings/run.json"), cases[i].text, strlen(cases[i].text));
        CHECK(!run_read_settings(in_folder("settings"), &err));
        CHECK_MSG(strstr(err.text, cases[i].part), "'%s' is not in '%s'", cases[i].part, err.text);
    }
    CHECK(!run_read_settings(in_folder("nowhere"), &err));
}

/* ---- the log ---- */

TEST(log_rows) {
    Run *run = open_run(in_folder("log"), RUN_NEW, false);
    Error err = {0};
    CHECK(run_log(run,
                  json_pack("{s:s, s:i, s:o, s:o}", "type", "step", "step", 1, "loss", run_number(2.5), "mfu",
                            run_number(NAN)),
                  &err));
    CHECK(run_log(
        run, json_pack("{s:s, s:o, s:o}", "type", "eval", "a", run_number(INFINITY), "b", run_number(-1e300)),
        &err));
    CHECK(run_log(run,
                  json_pack("{s:s, s:o}", "type", "sample", "text",
                            run_text("a\0\n\"<\xff\xe2\x82\xac\xed\xa0\x80", 12)),
                  &err));
    CHECK(!run_log(run, NULL, &err));
    run_close(run);
    check_file(in_folder("log/log.jsonl"),
               "{\"type\":\"step\",\"step\":1,\"loss\":2.5,\"mfu\":null}\n"
               "{\"type\":\"eval\",\"a\":null,\"b\":-1.0000000000000001e300}\n"
               "{\"type\":\"sample\",\"text\":\"a\\u0000\\n\\\"<\xEF\xBF\xBD\xe2\x82\xac"
               "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\"}\n");
}

TEST(text_of_any_bytes) {
    static const struct {
        const char *bytes;
        size_t size;
        const char *expected;
    } cases[] = {
        {"", 0, ""},
        {"\xC3\xA9", 2, "\xC3\xA9"},
        {"\xC3", 1, "\xEF\xBF\xBD"},
        {"\xC0\x80", 2, "\xEF\xBF\xBD\xEF\xBF\xBD"},
        {"\xE0\x9F\xBF", 3, "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"},
        {"\xEF\xBF\xBF", 3, "\xEF\xBF\xBF"},
        {"\xF0\x8F\xBF\xBF", 4, "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"},
        {"\xF4\x8F\xBF\xBF", 4, "\xF4\x8F\xBF\xBF"},
        {"\xF4\x90\x80\x80", 4, "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"},
        {"\xF0\x9F\x98", 3, "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        json_t *text = run_text(cases[i].bytes, cases[i].size);
        CHECK_MSG(text && strcmp(json_string_value(text), cases[i].expected) == 0, "case %zu", i);
        json_decref(text);
    }
    /* Any three bytes make a string that JSON takes. */
    Rng rng = rng_start(1, 1);
    for (int i = 0; i < 100000; i++) {
        const uint64_t bytes = rng_u64(&rng) | 0x808080;
        json_t *text = run_text(&bytes, 4);
        CHECK(text != NULL);
        json_decref(text);
    }
}

/* A full disk: told once, and half a row never stands before the next one. */
TEST(log_on_a_full_disk) {
    Run *run = open_run(in_folder("full"), RUN_NEW, false);
    Error err = {0};
    CHECK(run_log(run, json_pack("{s:s}", "type", "a"), &err));
    struct rlimit old, limit;
    getrlimit(RLIMIT_FSIZE, &old);
    signal(SIGXFSZ, SIG_IGN);
    limit = old, limit.rlim_cur = 20; /* the next row fits in part */
    setrlimit(RLIMIT_FSIZE, &limit);
    CHECK(!run_log(run, json_pack("{s:s}", "type", "b"), &err));
    CHECK_MSG(strstr(err.text, "cannot write"), "%s", err.text);
    CHECK(run_log(run, json_pack("{s:s}", "type", "c"), &err)); /* silent */
    setrlimit(RLIMIT_FSIZE, &old);
    CHECK(run_log(run, json_pack("{s:s}", "type", "d"), &err));
    limit.rlim_cur = 30;
    setrlimit(RLIMIT_FSIZE, &limit);
    CHECK(!run_log(run, json_pack("{s:s}", "type", "e"), &err)); /* told again, since one succeeded */
    setrlimit(RLIMIT_FSIZE, &old);
    signal(SIGXFSZ, SIG_DFL);
    run_close(run);
    check_file(in_folder("full/log.jsonl"), "{\"type\":\"a\"}\n{\"type\":\"d\"}\n");
}

#define ROW(type, step) "{\"type\":\"" type "\",\"step\":" step "}\n"

TEST(cut) {
    static const char rows[] = "{\"type\":\"start\",\"x\":1.10}\n" ROW("step", "1") ROW("eval", "1")
        ROW("step", "2") ROW("sample", "2") ROW("step", "3") ROW("eval", "3") ROW("sample", "3")
            ROW("end", "3");
    static const struct {
        uint64_t step;
        const char *added, *expected;
    } cases[] = {
        {2, "",
         "{\"type\":\"start\",\"x\":1.10}\n" ROW("step", "1") ROW("eval", "1") ROW("step", "2")
             ROW("sample", "2")},
        {0, "{\"type\":\"st", "{\"type\":\"start\",\"x\":1.10}\n"},
        {3, "\0\0\0\0",
         "{\"type\":\"start\",\"x\":1.10}\n" ROW("step", "1") ROW("eval", "1") ROW("step", "2")
             ROW("sample", "2") ROW("step", "3") ROW("eval", "3") ROW("sample", "3")},
        {4, "{\"type\":\"step\",\"step\":4}",
         "{\"type\":\"start\",\"x\":1.10}\n" ROW("step", "1") ROW("eval", "1") ROW("step", "2")
             ROW("sample", "2") ROW("step", "3") ROW("eval", "3") ROW("sample", "3") ROW("step", "4")},
    };
    Run *run = open_run(in_folder("cut"), RUN_NEW, false);
    const char *path = in_folder("cut/log.jsonl");
    Error err = {0};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Buffer log = {0};
        buffer_append_text(&log, rows);
        buffer_append(&log, cases[i].added, i == 2 ? 4 : strlen(cases[i].added));
        write_file(path, log.data, log.size);
        buffer_free(&log);
        CHECK_MSG(run_log_cut(run, cases[i].step, NULL, &err), "%s", err.text);
        check_file(path, cases[i].expected);
        /* The next row goes behind what is left, though the file is another one. */
        CHECK(run_log(run, json_pack("{s:s}", "type", "next"), &err));
        char *expected = xformat("%s{\"type\":\"next\"}\n", cases[i].expected);
        check_file(path, expected);
        free(expected);
    }
    /* Of the step itself only what was done before a stop came. */
    static const char watched[] = ROW("sample", "2") ROW("step", "3") ROW("eval", "3") ROW("sample", "3")
        ROW("sample", "3") ROW("sample", "3") ROW("step", "4");
    static const char first_two[] = ROW("sample", "2") ROW("step", "3") ROW("eval", "3") ROW("sample", "3")
        ROW("sample", "3"),
                      none[] = ROW("sample", "2") ROW("step", "3");
    write_file(path, watched, strlen(watched));
    CHECK(run_log_cut(run, 3, &(RunWatched){.evaluation = true, .stories = 2}, &err));
    check_file(path, first_two);
    CHECK(run_log_cut(run, 3, &(RunWatched){.evaluation = false, .stories = 0}, &err));
    check_file(path, none);
    CHECK(unlink(path) == 0);
    CHECK(run_log_cut(run, 5, NULL, &err)); /* no log is an empty one */
    run_close(run);
}

TEST(damaged_log) {
    static const struct {
        const char *text, *part;
    } cases[] = {
        {ROW("step", "1") "garbage\n" ROW("step", "2"), "line 2"},
        {ROW("step", "1") ROW("step", "2") "{\"type\":\n", "line 3"},
        {"\n" ROW("step", "1"), "line 1"},
        {ROW("step", "1") "[1]\n", "line 2"},
        {ROW("step", "1") "{\"step\":1}\n", "line 2"},
        {ROW("step", "1") "{\"type\":7}\n", "line 2"},
        {ROW("step", "1") ROW("step", "\"x\""), "line 2"},
        {ROW("step", "1") ROW("eval", "-4"), "line 2"},
        {ROW("step", "1") "{\"type\":\"sample\"}\n", "line 2"},
    };
    Run *run = open_run(in_folder("damaged"), RUN_NEW, false);
    const char *path = in_folder("damaged/log.jsonl");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_file(path, cases[i].text, strlen(cases[i].text));
        Error err = {0};
        CHECK_MSG(!run_log_cut(run, 1, NULL, &err), "case %zu", i);
        CHECK_MSG(strstr(err.text, cases[i].part), "'%s' is not in '%s'", cases[i].part, err.text);
        check_file(path, cases[i].text); /* as it was */
        CHECK(!file_exists(in_folder("damaged/log.jsonl.tmp")));
    }
    Buffer deep = {0};
    for (int i = 0; i < 100000; i++) buffer_append_text(&deep, "{\"a\":");
    buffer_append_text(&deep, "\n");
    write_file(path, deep.data, deep.size);
    Error err = {0};
    CHECK(!run_log_cut(run, 1, NULL, &err));
    CHECK_MSG(strstr(err.text, "line 1"), "%s", err.text);
    buffer_free(&deep);
    run_close(run);
}

/* ---- the report ---- */

TEST(report_shows_the_run) {
    Run *run = open_run(in_folder("shown"), RUN_NEW, false);
    settle(run);
    Error err = {0};
    CHECK_MSG(report_write(in_folder("shown"), &err), "%s", err.text); /* before there is a log */
    run_log(run,
            json_pack("{s:s, s:I, s:s, s:{s:s}}", "type", "start", "time", (json_int_t)1700000000, "version",
                      "0.1.0", "attention", "kernel", "flash_cpu"),
            &err);
    for (int step = 1; step <= 2000; step++) {
        const double loss = 1.5 + 6 * exp(-step / 150.0);
        run_log(run,
                json_pack("{s:s, s:i, s:f, s:f, s:f, s:f, s:f, s:i}", "type", "step", "step", step, "loss",
                          loss, "lr", 1e-3, "grad_norm", 0.5, "ms",
                          step == 1  ? 1e6
                          : step % 2 ? 100.0
                                     : 400.0,
                          "tokens_per_s",
                          step == 1  ? 1.0
                          : step % 2 ? 10000.0
                                     : 2500.0,
                          "tokens", step * 1000),
                &err);
        if (step % 200 == 0)
            run_log(run,
                    json_pack("{s:s, s:i, s:f, s:f, s:i, s:f}", "type", "eval", "step", step, "loss",
                              loss + 0.1, "bits_per_byte", 0.5, "tokens", 20000, "floor", 1.125),
                    &err);
    }
    run_log(run,
            json_pack("{s:s, s:i, s:s, s:s}", "type", "sample", "step", 2000, "prompt", "Once", "text",
                      "Once there"),
            &err);
    run_log(run,
            json_pack("{s:s, s:i, s:s, s:i}", "type", "end", "step", 2000, "reason", "all steps done",
                      "peak_memory_bytes", 512 << 20),
            &err);
    run_close(run);
    CHECK_MSG(report_write(in_folder("shown/"), &err), "%s", err.text);
    char *page = read_text(in_folder("shown/report.html"));
    static const char *const parts[] = {"<title>shown</title>",
                                        "<svg",
                                        "class=\"train\"",
                                        "class=\"heldout\"",
                                        "class=\"floor\"",
                                        "1.1250",
                                        "1.6000",
                                        "2,000,000",
                                        "<b>1.5000</b><span>training loss, last step",
                                        "training (begins at 7.46, above)",
                                        "<b>3,999</b><span>tokens/s after the first step",
                                        "537 MB",
                                        "layers",
                                        "flash_cpu",
                                        "<b>Once</b> there",
                                        "all steps done",
                                        "step 400",
                                        "prefers-color-scheme"};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        CHECK_MSG(strstr(page, parts[i]), "'%s' is not on the page", parts[i]);
    /* Self-contained, and drawn in bounded size: 2,000 steps are at most 600 places of each curve. */
    CHECK(!strstr(page, "http:") && !strstr(page, "https:") && !strstr(page, "<script"));
    CHECK_MSG(strlen(page) < 100000, "%zu bytes", strlen(page));
    CHECK(!strstr(page, "nan") && !strstr(page, "inf\"") && !strstr(page, "-nan"));
    free(page);
}

TEST(report_of_hostile_text) {
    Run *run = open_run(in_folder("<b>&\"x"), RUN_NEW, false);
    Error err = {0};
    static const char evil[] = "</div><script>alert('1')</script>\0&amp;\"\x1b\x7f";
    json_t *settings = json_pack("{s:s, s:{s:s}}", "<i>key", evil, "deep", "er", "<u>");
    CHECK(run_write_settings(run, settings, &err));
    json_decref(settings);
    run_log(run,
            json_pack("{s:s, s:o, s:{s:s}}", "type", "start", "version", run_text(evil, sizeof evil - 1),
                      "attention", "kernel", "<u>"),
            &err);
    run_log(run,
            json_pack("{s:s, s:i, s:o, s:o}", "type", "sample", "step", 1, "prompt",
                      run_text(evil, sizeof evil - 1), "text", run_text(evil, sizeof evil - 1)),
            &err);
    run_log(run, json_pack("{s:s, s:s, s:s}", "type", "sample", "step", "<u>", "text", "ok"), &err);
    run_log(run, json_pack("{s:s, s:o}", "type", "end", "reason", run_text(evil, sizeof evil - 1)), &err);
    char *name = xstrdup(run_path(run));
    run_close(run);
    CHECK_MSG(report_write(name, &err), "%s", err.text);
    char *path = xformat("%s/report.html", name), *page = read_text(path);
    CHECK(!strstr(page, "<script") && !strstr(page, "<u>") && !strstr(page, "<i>") && !strstr(page, "\x1b"));
    CHECK(strstr(page, "&lt;script&gt;alert(&#39;1&#39;)&lt;/script&gt;\xEF\xBF\xBD&amp;amp;&quot;"));
    CHECK(strstr(page, "<h1>&lt;b&gt;&amp;&quot;x</h1>") && strstr(page, "deep.er"));
    free(page);
    free(path);
    free(name);
}

/* A run that ended so is not shown with the last loss that was finite. */
TEST(report_of_a_loss_that_is_not_finite) {
    static const char log[] = "{\"type\":\"eval\",\"step\":0,\"loss\":6.5}\n"
                              "{\"type\":\"eval\",\"step\":3,\"loss\":null}\n";
    Run *run = open_run(in_folder("diverged"), RUN_NEW, false);
    settle(run);
    run_close(run);
    write_file(in_folder("diverged/log.jsonl"), log, sizeof log - 1);
    Error err = {0};
    CHECK_MSG(report_write(in_folder("diverged"), &err), "%s", err.text);
    char *page = read_text(in_folder("diverged/report.html"));
    CHECK(strstr(page, "<b>not finite</b><span>held-out loss"));
    CHECK(!strstr(page, "<b>6.5000</b><span>held-out loss") && strstr(page, "<b>6.5000</b><span>lowest"));
    free(page);
}

/* Numbers that no drawing can hold, alone and together, must neither hang nor spoil the page. */
TEST(report_of_hostile_numbers) {
    static const char *const numbers[] = {"1e308", "-1e308", "1e15",  "10000000000000002",   "1e-320",
                                          "0",     "null",   "\"x\"", "9223372036854775807", "-5",
                                          "1e29",  "3"};
    enum { COUNT = sizeof numbers / sizeof *numbers };
    Run *run = open_run(in_folder("numbers"), RUN_NEW, false);
    settle(run);
    run_close(run);
    Error err = {0};
    for (size_t i = 0; i < COUNT * COUNT; i++) {
        char *log = xformat("{\"type\":\"start\",\"time\":%s}\n"
                            "{\"type\":\"step\",\"step\":%s,\"loss\":%s,\"lr\":%s,\"tokens\":%s,\"mfu\":%s}\n"
                            "{\"type\":\"eval\",\"step\":%s,\"loss\":%s,\"floor\":%s,\"bits_per_byte\":%s}\n"
                            "{\"type\":\"step\",\"step\":%s,\"loss\":%s,\"lr\":%s}\n{\"type\":\"step\",\"ste",
                            numbers[i / COUNT], numbers[i / COUNT], numbers[i % COUNT], numbers[i / COUNT],
                            numbers[i % COUNT], numbers[i / COUNT], numbers[i % COUNT], numbers[i / COUNT],
                            numbers[i % COUNT], numbers[i / COUNT], numbers[i / COUNT], numbers[i / COUNT],
                            numbers[i % COUNT]);
        write_file(in_folder("numbers/log.jsonl"), log, strlen(log));
        CHECK_MSG(report_write(in_folder("numbers"), &err), "%s", err.text);
        free(log);
        char *page = read_text(in_folder("numbers/report.html"));
        char *chart = strstr(page, "<svg");
        CHECK_MSG(!chart || (!strstr(chart, "\"nan") && !strstr(chart, "\"-nan") && !strstr(chart, "\"inf")),
                  "case %zu", i);
        CHECK(strlen(page) < 40000);
        free(page);
    }
}

int main(int argc, char **argv) {
    test_start(argc, argv, "run");
    if (!mkdtemp(folder)) return 1;
    RUN(new_resume_force);
    RUN(undo_keeps_what_could_not_be_seen);
    RUN(folders_that_are_no_runs);
    RUN(lock);
    RUN(another_process_is_faster);
    RUN(leftovers_and_what_looks_like_them);
    RUN(lock_that_is_another_file);
    RUN(folder_that_is_moved_in_use);
    RUN(paths_that_cannot_be);
    RUN(dated_and_newest);
    RUN(settings);
    RUN(log_rows);
    RUN(text_of_any_bytes);
    RUN(log_on_a_full_disk);
    RUN(cut);
    RUN(damaged_log);
    RUN(report_shows_the_run);
    RUN(report_of_hostile_text);
    RUN(report_of_a_loss_that_is_not_finite);
    RUN(report_of_hostile_numbers);
    Error err = {0};
    if (!folder_remove(folder, &err)) printf("  %s\n", err.text);
    return test_finish();
}
