/* compare.c - training with each of several attention backends, in processes of their own (compare.h). */
#include "compare.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "data/run.h"

/* ---- before ---- */

bool compare_list(Comparison *comparison, const char *names, Error *err) {
    *comparison = (Comparison){.count = 0};
    for (const char *at = names;; at++) {
        const size_t length = strcspn(at, ",");
        const size_t letters = strspn(at, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_");
        if (length == 0 || letters < length || length >= COMPARE_NAME_BYTES)
            return error_set(err,
                             "-compare: found \"%.100s\", expected names of backends with commas between, as "
                             "in naive,flash",
                             names);
        if (comparison->count == COMPARE_BACKENDS)
            return error_set(err, "-compare: more than %d backends; compare fewer at once", COMPARE_BACKENDS);
        CompareBackend *backend = &comparison->backend[comparison->count++];
        *backend = (CompareBackend){.steps = NAN,
                                    .micro = NAN,
                                    .tokens_per_s = NAN,
                                    .ms = NAN,
                                    .forward_ms = NAN,
                                    .backward_ms = NAN,
                                    .saved_bytes = NAN,
                                    .planned_bytes = NAN,
                                    .peak_bytes = NAN};
        memcpy(backend->name, at, length);
        for (size_t i = 0; i + 1 < comparison->count; i++)
            if (strcmp(comparison->backend[i].name, backend->name) == 0)
                return error_set(err, "-compare: %s is there twice; name each backend once", backend->name);
        at += length;
        if (!*at) return true;
    }
}

void compare_free(Comparison *comparison) {
    for (size_t i = 0; i < comparison->count; i++) free(comparison->backend[i].evals);
    comparison->count = 0;
}

/* ---- what a run's log says ---- */

static double number_of(const json_t *value) {
    return json_is_number(value) ? json_number_value(value) : NAN;
}

static double number_at(const json_t *object, const char *key) {
    return number_of(json_object_get(object, key));
}

typedef struct Reading {
    CompareBackend *backend;
    double timed_ms, timed_steps, step_tokens;
    char *end; /* why the run ended; NULL: it did not get there */
} Reading;

static bool read_row(void *context, const RunRow *row, Error *err) {
    (void)err;
    Reading *reading = context;
    CompareBackend *backend = reading->backend;
    const json_t *json = row->json;
    if (strcmp(row->type, "start") == 0) {
        const json_t *config = json_object_get(json, "config");
        backend->micro = number_at(config, "micro");
        backend->saved_bytes = number_at(json_object_get(json, "attention"), "saved_bytes") *
                               number_at(config, "layers");
        backend->planned_bytes = number_at(json_object_get(json, "memory_bytes"), "total");
    } else if (strcmp(row->type, "step") == 0) {
        backend->steps = number_at(json, "step");
        reading->step_tokens = number_at(json, "tokens") / backend->steps;
        if (backend->steps > 1) reading->timed_ms += number_at(json, "ms"), reading->timed_steps++;
    } else if (strcmp(row->type, "eval") == 0) {
        backend->evals = xrealloc(backend->evals, (backend->n_evals + 1) * sizeof *backend->evals);
        const json_int_t step = json_integer_value(json_object_get(json, "step"));
        backend->evals[backend->n_evals++] = (CompareEval){step > 0 ? (uint64_t)step : 0,
                                                           number_at(json, "loss"), number_at(json, "floor")};
    } else if (strcmp(row->type, "end") == 0) {
        const json_t *attention = json_object_get(json, "attention");
        backend->peak_bytes = number_at(json, "peak_memory_bytes");
        backend->forward_ms = number_at(attention, "forward_ms");
        backend->backward_ms = number_at(attention, "backward_ms");
        const char *reason = json_string_value(json_object_get(json, "reason"));
        free(reading->end);
        reading->end = reason ? xstrdup(reason) : NULL;
    }
    return true;
}

/* Fills in what the run found; *end, to be freed, is why it ended, or NULL. */
static bool read_log(CompareBackend *backend, const char *run, char **end, Error *err) {
    Reading reading = {.backend = backend};
    const bool done = run_log_each(run, read_row, &reading, err);
    if (reading.timed_steps > 0) {
        backend->ms = reading.timed_ms / reading.timed_steps;
        backend->tokens_per_s = 1e3 * reading.step_tokens / backend->ms;
    }
    *end = reading.end;
    return done;
}

/* ---- a run in a process of its own ---- */

/* This program with the user's flags, but for -compare, and with more behind them, since of a repeated flag the
 * last counts. Ends with NULL; the array is to be freed. */
static char **run_arguments(int argc, char **argv, char *const *more, char *backend, char *run) {
    char *const last[] = {(char *)"-attention", backend, (char *)"-run", run};
    enum { LAST = sizeof last / sizeof last[0] };
    size_t n_more = 0, count = 0;
    while (more[n_more]) n_more++;
    char **arguments = xcalloc((size_t)argc + n_more + LAST + 1, sizeof *arguments);
    for (int i = 0; i < argc; i++) {
        /* No value can look like that: a flag in a value's place is refused. */
        const bool is_flag = i > 0 && argv[i][0] == '-';
        const char *name = argv[i] + (is_flag ? 1 + (argv[i][1] == '-') : 0);
        const bool is_compare = is_flag && strncmp(name, "compare", 7) == 0;
        if (is_compare && name[7] == '\0') i++;
        else if (!is_compare || name[7] != '=') arguments[count++] = argv[i];
    }
    for (size_t i = 0; i < n_more; i++) arguments[count++] = more[i];
    for (size_t i = 0; i < LAST; i++) arguments[count++] = last[i];
    return arguments;
}

/* In the environment of a process that is started here: the end of a pipe, the other end of which closes with this
 * process, however it ends. */
static const char follow_variable[] = "TRAIN_GPT_COMPARE_PIPE";

static void *follow(void *pipe_end) {
    char byte;
    while (read(*(int *)pipe_end, &byte, 1) < 0 && errno == EINTR) continue;
    kill(getpid(), SIGTERM);
    return NULL;
}

void compare_follow_parent(void) {
    static int pipe_end;
    const char *text = getenv(follow_variable);
    if (!text) return;
    /* No standard stream, which somebody else could have meant: that would end us with what is typed. */
    char *end;
    struct stat status;
    const long number = strtol(text, &end, 10);
    const bool is_pipe = *end == 0 && number > STDERR_FILENO && number <= INT_MAX &&
                         fstat((int)number, &status) == 0 && S_ISFIFO(status.st_mode);
    unsetenv(follow_variable);
    if (!is_pipe) return;
    pipe_end = (int)number;
    /* Signals are for the other threads. */
    sigset_t all, before;
    pthread_t thread;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (pthread_create(&thread, NULL, follow, &pipe_end) == 0) pthread_detach(thread);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* In a process group of its own, so that a terminal's Ctrl-C reaches it once: from us. A terminal may stop such a group
 * when it writes (stty tostop), but not one that ignores SIGTTOU, which it does from its first instruction on. It runs as
 * long as *follows is open, which is to be closed once it has ended. */
static bool start(char **arguments, pid_t *child, int *follows, Error *err) {
    int ends[2];
    char text[24];
    if (pipe(ends) != 0) return error_set(err, "cannot make a pipe: %s", strerror(errno));
    fcntl(ends[1], F_SETFD, FD_CLOEXEC);
    snprintf(text, sizeof text, "%d", ends[0]);
    setenv(follow_variable, text, 1);
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
    struct sigaction ignored = {0}, before;
    ignored.sa_handler = SIG_IGN;
    sigaction(SIGTTOU, &ignored, &before);
    int problem = posix_spawn(child, "/proc/self/exe", NULL, &attributes, arguments, environ);
    if (problem != 0) problem = posix_spawnp(child, arguments[0], NULL, &attributes, arguments, environ);
    sigaction(SIGTTOU, &before, NULL);
    posix_spawnattr_destroy(&attributes);
    close(ends[0]);
    *follows = ends[1];
    if (problem != 0) close(ends[1]);
    return problem == 0 || error_set(err, "cannot start %s: %s", arguments[0], strerror(problem));
}

/* Waits for the end; a signal that asks us to stop is handed on, once, to a child that is stopped as well. */
static int wait_for(pid_t child) {
    const struct timespec pause_time = {.tv_nsec = 50 * 1000 * 1000};
    int status = 0, told = 0;
    for (pid_t ended; (ended = waitpid(child, &status, WNOHANG)) != child;) {
        if (ended < 0 && errno != EINTR) break;
        if (stop_requested() && !told) kill(child, told = stop_requested()), kill(child, SIGCONT);
        nanosleep(&pause_time, NULL);
    }
    return status;
}

static bool train_one(CompareBackend *backend, const char *folder, int argc, char **argv, char *const *more,
                      Error *err) {
    char *run = xformat("%s/%s", folder, backend->name);
    char **arguments = run_arguments(argc, argv, more, backend->name, run);
    pid_t child;
    int follows = -1;
    const bool started = start(arguments, &child, &follows, err);
    if (started) {
        const int status = wait_for(child);
        close(follows);
        char *end = NULL;
        Error problem = {0};
        backend->ran = read_log(backend, run, &end, &problem) && backend->n_evals > 0;
        if (WIFSIGNALED(status))
            error_set(&backend->refusal, "was ended by signal %d, %s", WTERMSIG(status),
                      strsignal(WTERMSIG(status)));
        else if (WEXITSTATUS(status) != 0)
            error_set(&backend->refusal, "ended with exit code %d: %s", WEXITSTATUS(status),
                      end ? end : "its message stands above");
        else if (problem.text[0]) backend->refusal = problem;
        /* Who was asked to stop, and did, has not failed. */
        backend->failed = backend->refusal.text[0] && !(stop_requested() && WIFEXITED(status) &&
                                                        WEXITSTATUS(status) == 128 + stop_requested());
        free(end);
    }
    free(arguments);
    free(run);
    return started;
}

bool compare_train(Comparison *comparison, const char *folder, int argc, char **argv, char *const *more,
                   Error *err) {
    for (size_t i = 0; i < comparison->count; i++) {
        CompareBackend *backend = &comparison->backend[i];
        if (backend->refusal.text[0]) continue;
        if (stop_requested()) error_set(&backend->refusal, "did not begin before the signal to stop");
        else if (!train_one(backend, folder, argc, argv, more, err)) return false;
    }
    comparison->stopped = stop_requested();
    return true;
}

/* ---- side by side ---- */

/* What is shown of each run besides its losses, in this order, in the table and in compare.json. */
typedef struct Figure {
    const char *key, *label;
    size_t offset; /* of the double in CompareBackend */
    double unit;   /* in which the table shows it */
    int decimals;  /* there */
    bool whole;    /* an integer in JSON */
} Figure;

static const Figure figures[] = {
    {"steps", "steps", offsetof(CompareBackend, steps), 1, 0, true},
    {"tokens_per_s", "tokens/s", offsetof(CompareBackend, tokens_per_s), 1, 0, false},
    {"ms", "ms a step", offsetof(CompareBackend, ms), 1, 1, false},
    {"attention_forward_ms", "ms in attention, forward", offsetof(CompareBackend, forward_ms), 1, 1, false},
    {"attention_backward_ms", "ms in attention, backward", offsetof(CompareBackend, backward_ms), 1, 1,
     false},
    {"attention_saved_bytes", "MB that attention keeps", offsetof(CompareBackend, saved_bytes), 1e6, 1, true},
    {"memory_bytes", "MB planned", offsetof(CompareBackend, planned_bytes), 1e6, 1, true},
    {"peak_memory_bytes", "MB at the peak", offsetof(CompareBackend, peak_bytes), 1e6, 1, true},
    {"micro", "sequences at once", offsetof(CompareBackend, micro), 1, 0, true},
};
enum { FIGURES = sizeof figures / sizeof figures[0] };

static double figure_of(const CompareBackend *backend, const Figure *figure) {
    return *(const double *)(const void *)((const char *)backend + figure->offset);
}

/* The backend that the others are held against: the first that ran. count: none did. */
static size_t reference_of(const Comparison *comparison) {
    size_t i = 0;
    while (i < comparison->count && !comparison->backend[i].ran) i++;
    return i;
}

static size_t most_evals(const Comparison *comparison) {
    size_t most = 0;
    for (size_t i = 0; i < comparison->count; i++)
        if (comparison->backend[i].n_evals > most) most = comparison->backend[i].n_evals;
    return most;
}

/* Evaluation number n of a run; NULL: it has none. The n-th evaluations are held against each other: with
 * -steps they are at the same step, with -minutes at about the same share of the time; a difference is that of a
 * step. */
static const CompareEval *eval_of(const CompareBackend *backend, size_t n) {
    return n < backend->n_evals ? &backend->evals[n] : NULL;
}

/* The runs are evaluated on the same tokens: one floor holds for all. */
static double floor_of(const Comparison *comparison) {
    const size_t reference = reference_of(comparison);
    return reference < comparison->count ? comparison->backend[reference].evals[0].floor : NAN;
}

static double difference(const Comparison *comparison, size_t i, size_t n) {
    const size_t reference = reference_of(comparison);
    const CompareEval *ours = eval_of(&comparison->backend[i], n),
                      *theirs = reference < comparison->count ? eval_of(&comparison->backend[reference], n)
                                                              : NULL;
    return ours && theirs && ours->step == theirs->step ? ours->loss - theirs->loss : NAN;
}

enum { LABEL_COLUMNS = 28, COLUMNS = 13 };

static void show_value(FILE *out, const char *format, int decimals, double value) {
    char text[64] = "-";
    if (isfinite(value)) snprintf(text, sizeof text, format, decimals, value);
    fprintf(out, " %*s", COLUMNS, text);
}

/* "step 40", or with -minutes "step 40, 52". */
static void show_steps(const Comparison *comparison, size_t n, FILE *out) {
    char label[256] = "step";
    uint64_t last = UINT64_MAX;
    for (size_t i = 0; i < comparison->count; i++) {
        const CompareEval *eval = eval_of(&comparison->backend[i], n);
        if (!eval || eval->step == last) continue;
        const size_t used = strlen(label);
        snprintf(label + used, sizeof label - used, "%s %" PRIu64, last == UINT64_MAX ? "" : ",", eval->step);
        last = eval->step;
    }
    fprintf(out, "  %-*s", LABEL_COLUMNS, label);
}

void compare_show(const Comparison *comparison, FILE *out) {
    const size_t reference = reference_of(comparison);
    fprintf(out, "\n%-*s", LABEL_COLUMNS + 2, "held-out loss, nats/token");
    for (size_t i = 0; i < comparison->count; i++)
        fprintf(out, " %*s%s", COLUMNS, comparison->backend[i].name, i > reference ? "    difference" : "");
    for (size_t n = 0; n < most_evals(comparison); n++) {
        fputc('\n', out);
        show_steps(comparison, n, out);
        for (size_t i = 0; i < comparison->count; i++) {
            const CompareEval *eval = eval_of(&comparison->backend[i], n);
            show_value(out, "%.*f", 6, eval ? eval->loss : NAN);
            if (i > reference) show_value(out, "%+.*e", 1, difference(comparison, i, n));
        }
    }
    const double floor = floor_of(comparison);
    if (isfinite(floor)) {
        fprintf(out, "\n  %-*s", LABEL_COLUMNS, "floor");
        show_value(out, "%.*f", 6, floor);
    }
    fprintf(out, "\n\n%-*s", LABEL_COLUMNS + 2, "what it takes");
    for (size_t i = 0; i < comparison->count; i++) fprintf(out, " %*s", COLUMNS, comparison->backend[i].name);
    for (const Figure *figure = figures; figure < figures + FIGURES; figure++) {
        fprintf(out, "\n  %-*s", LABEL_COLUMNS, figure->label);
        for (size_t i = 0; i < comparison->count; i++)
            show_value(out, "%.*f", figure->decimals,
                       figure_of(&comparison->backend[i], figure) / figure->unit);
    }
    fputs("\n\n", out);
    for (size_t i = 0; i < comparison->count; i++)
        if (comparison->backend[i].refusal.text[0])
            fprintf(out, "%s: %s\n", comparison->backend[i].name, comparison->backend[i].refusal.text);
}

/* ---- compare.json ---- */

static json_t *backend_json(const Comparison *comparison, size_t i) {
    const CompareBackend *backend = &comparison->backend[i];
    json_t *json = json_object(), *evals = json_array();
    json_object_set_new(json, "name", json_string(backend->name));
    json_object_set_new(json, "run", backend->ran ? json_string(backend->name) : json_null());
    json_object_set_new(json, "problem",
                        backend->refusal.text[0] ? json_string(backend->refusal.text) : json_null());
    for (const Figure *figure = figures; figure < figures + FIGURES; figure++) {
        const double value = figure_of(backend, figure);
        json_object_set_new(json, figure->key,
                            figure->whole && fabs(value) < 0x1p53 ? json_integer((json_int_t)value)
                                                                  : run_number(value));
    }
    for (size_t n = 0; n < backend->n_evals; n++)
        json_array_append_new(evals, json_pack("{s:I, s:o, s:o}", "step", (json_int_t)backend->evals[n].step,
                                               "loss", run_number(backend->evals[n].loss), "difference",
                                               run_number(difference(comparison, i, n))));
    json_object_set_new(json, "evals", evals);
    return json;
}

bool compare_write(const Comparison *comparison, const char *folder, Error *err) {
    json_t *backends = json_array();
    for (size_t i = 0; i < comparison->count; i++)
        json_array_append_new(backends, backend_json(comparison, i));
    json_t *all = json_pack("{s:s, s:I, s:o, s:o}", "version", TRAIN_GPT_VERSION, "time",
                            (json_int_t)time(NULL), "floor", run_number(floor_of(comparison)), "backends",
                            backends);
    char *text = json_dumps(all, JSON_INDENT(2)), *path = xformat("%s/compare.json", folder);
    const bool done = text ? file_replace(path, text, strlen(text), err)
                           : error_set(err, "cannot write %s as JSON", path);
    free(path);
    free(text);
    json_decref(all);
    return done;
}
