/* train_gpt.c - the program: from what a user typed to a trained model, and what can be done with one.
 *
 * A training run, in the order of its life, which is also the order of this file:
 *   settings    the command line; with -resume what the run was started with; what is left to choose
 *   model       a device, the tokenizer, the configuration, a kernel, a memory plan that fits
 *   data        tokens: made from text into RUN/tokens, or shards used where they lie
 *   tables      what is about to happen, in numbers, before it happens
 *   watching    held-out loss, stories
 *   training    steps; after some of them an evaluation, stories, a checkpoint; the end
 * then what is done instead of training (-generate, -evaluate, -compare, -encode, -decode), and main.
 *
 * Under a launcher every rank runs this same code. Rank 0 leads: it reads text, opens the run, prints and writes;
 * what it found out it tells the others, which follow (follow_start), and what it decides by the clock it shares
 * (share_schedule). A failure that all ranks know of (app->told) ends each of them in order; any other one ends
 * the job.
 *
 * Everything lives in one App. A function that can fail returns false with app->err set; main prints that one
 * line and ends with app->code. */
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__)
#include <sched.h>
#endif

#include "attention/attention.h"
#include "common.h"
#include "compare.h"
#include "data/batches.h"
#include "data/report.h"
#include "data/run.h"
#include "data/shards.h"
#include "measure.h"
#include "model/checkpoint.h"
#include "model/generate.h"
#include "model/gpt.h"
#include "model/ranks.h"
#include "options.h"
#include "sgemm.h"
#include "simd.h"
#include "tokenizer/bpe.h"

enum {
    DEFAULT_WARMUP = 50,          /* steps */
    DEFAULT_EVAL_TOKENS = 131072, /* of the held-out side, in training */
    MIN_HELDOUT_STORIES = 1000,   /* built-in ones: enough tokens for two digits behind the point */
    MICRO_TOKENS = 4096,          /* a CPU's micro-batch: more tokens gain nothing and leave the caches */
    STORIES_AT_ONCE = 64,  /* sequences that are sampled together, on a GPU that does nothing else; ... */
    STORIES_ASIDE = 8,     /* ... and elsewhere, where more gain little and take memory */
    DIRECT_STEPS = 8,      /* a device that can replays what it has recorded from about then on */
    UNTIMED_STEPS = 2,     /* -minutes: caches and threads warm up; ... */
    UNTIMED_DIRECT = 10,   /* ... on a device that replays, until it does */
    TIMED_STEPS = 20,      /* ... then at most so many are timed */
    TIMED_EVALUATIONS = 3, /* micro-batches that are timed before the first evaluation */
    ENOUGH_EVAL_TOKENS = 100000, /* rather fewer evaluations than fewer tokens */
    EVALUATIONS = 10,
    SAMPLES = 4,
    CHECKPOINTS = 10,      /* of a run, where not said how often */
    MAX_BAD_STEPS = 3,     /* steps in a row that are not finite end a run */
    STDIN_BYTES = 1 << 16, /* read at once by -encode and -decode */
    ENCODER_CACHE_WORDS = 1 << 16
};

static const double DEFAULT_MINUTES = 2.5;
static const double RATE_TIMES_CHANNELS = 0.768; /* 0.006 for 128 channels, 0.001 for 768 */
static const double EVALUATION_SHARE = 0.2;      /* of -minutes */

/* The measurements of this process, for speed and time left; the first step is in none of them. */
typedef struct Pace {
    uint64_t steps;           /* taken by this process, the first included */
    double seconds;           /* of the steps after the first */
    AttentionTimes attention; /* of them in attention, while that is timed ... */
    uint64_t attention_steps; /* ... which so many were */
    double timed;             /* of the steps after untimed_steps */
    double eval_seconds;      /* of the newest evaluation */
    double last_line;         /* when a step's line was last kept */
    uint64_t last_kept;       /* and after which step */
} Pace;

typedef struct App {
    int argc; /* the command line */
    char **argv;
    const char *program; /* as it was called */
    double started;      /* seconds_now() */
    Options options;
    json_t *settings; /* of the run that is gone on with; owns text in options */
    char *newest_run; /* likewise */
    json_t *chosen;   /* keys of settings that the program chose for this number of steps */
    Error err;
    int code;                 /* the exit code if something fails */
    int stopped;              /* 128 + signal where one ended a run after it was saved */
    FILE *report;             /* where tables go: stdout in training, else stderr */
    bool in_place, line_open; /* lines are rewritten on a terminal; one stands unfinished */
    Ranks ranks;
    bool told;    /* of several ranks all know of the failure in err */
    int stop;     /* of several: the signal to stop that they have agreed on */
    json_t *lead; /* what rank 0 has told this one; owns text in options */
    Run *run;     /* rank 0's */
    char *folder; /* the run's, on every rank */

    /* data */
    Bpe *bpe;
    uint32_t *token_bytes; /* (V) of text; 0 for the end of a story */
    char *merges_of;       /* where the tokenizer came from; NULL: trained here */
    Shards *train, *heldout;
    Batches *batches, *windows;
    DataFacts facts; /* of the run's own tokens */
    bool has_facts;
    uint64_t eval_windows;

    /* model */
    const Ops *ops;
    Stream *stream;
    GptSetup setup;
    MemoryPlan plan;
    Gpt *gpt;
    Buffer merges, tokenizer_json; /* the files that go with each checkpoint */

    /* training */
    char *resume_from; /* the checkpoint to go on with; NULL: none */
    char *model;       /* that of -load, to start from or to use; NULL: none */
    TrainState state;
    Pace pace;
    int32_t *inputs, *targets; /* (B, T) of a micro-batch */
    uint64_t saved_step;
    bool saved;    /* saved_step is the newest checkpoint's */
    char *scratch; /* a temporary folder, removed at the end */
} App;

/* A stop signal now waits for the end of a step. */
static atomic_bool taking_steps;

/* Wrong usage: exit code 2. */
#define USAGE(app, ...) ((app)->code = EXIT_USAGE, error_set(&(app)->err, __VA_ARGS__))

/* ---- text for people ---- */

/* A short text by value, so that it can be made within an argument list. */
typedef struct Short {
    char text[48];
} Short;

static Short commas(uint64_t number) {
    char digits[24];
    const int size = snprintf(digits, sizeof digits, "%" PRIu64, number);
    Short out;
    char *to = out.text;
    for (int i = 0; i < size; i++) {
        if (i > 0 && (size - i) % 3 == 0) *to++ = ',';
        *to++ = digits[i];
    }
    *to = 0;
    return out;
}

/* 1234567 with unit "B" is "1.23 MB". */
static Short metric(double value, const char *unit) {
    static const char *const prefix[] = {"", "k", "M", "G", "T", "P", "E"};
    size_t i = 0;
    while (value >= 999.5 && i + 1 < sizeof prefix / sizeof prefix[0]) value /= 1000, i++;
    Short out;
    const int decimals = i == 0 || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
    snprintf(out.text, sizeof out.text, "%.*f%s%s%s", decimals, value, *prefix[i] || *unit ? " " : "",
             prefix[i], unit);
    return out;
}

/* "1 story", "1,024 stories" */
static Short counted(uint64_t number, const char *one, const char *many) {
    Short out;
    snprintf(out.text, sizeof out.text, "%.30s %s", commas(number).text, number == 1 ? one : many);
    return out;
}

static Short duration(double seconds) {
    Short out = {"?"};
    if (!isfinite(seconds)) return out;
    const uint64_t s = seconds > 0 && seconds < 1e15 ? (uint64_t)(seconds + 0.5) : 0;
    if (s < 60) snprintf(out.text, sizeof out.text, "%" PRIu64 " s", s);
    else if (s < 3600) snprintf(out.text, sizeof out.text, "%" PRIu64 " min %02" PRIu64 " s", s / 60, s % 60);
    else snprintf(out.text, sizeof out.text, "%" PRIu64 " h %02" PRIu64 " min", s / 3600, s / 60 % 60);
    return out;
}

/* Ends a line that is being rewritten, so that something else can be said. */
static void finish_line(App *app) {
    if (app->line_open) fprintf(app->report, "\r\033[K");
    app->line_open = false;
}

static void say(App *app, const char *format, ...) PRINTF_LIKE(2, 3);
static void say(App *app, const char *format, ...) {
    finish_line(app);
    va_list arguments;
    va_start(arguments, format);
    vfprintf(app->report, format, arguments);
    va_end(arguments);
    fputc('\n', app->report);
    fflush(app->report);
}

/* Whether this rank prints and writes. */
static bool leads(const App *app) {
    return app->ranks.rank == 0;
}

/* Something that went wrong and does not end the run. */
static void warn(App *app, const char *format, ...) PRINTF_LIKE(2, 3);
static void warn(App *app, const char *format, ...) {
    if (!leads(app)) return;
    finish_line(app);
    fflush(app->report);
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "train_gpt: note: ");
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
}

static void row(App *app, const char *name, const char *format, ...) PRINTF_LIKE(3, 4);
static void row(App *app, const char *name, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(app->report, "  %-14s", name);
    vfprintf(app->report, format, arguments);
    va_end(arguments);
    fputc('\n', app->report);
}

/* A path as a shell takes it: in quotes only where it must be. To be freed. */
static char *shell_quoted(const char *path) {
    if (!path[strspn(path, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_./+,@%-")])
        return xstrdup(path);
    Buffer quoted = {0};
    buffer_append_text(&quoted, "'");
    for (; *path; path++) {
        if (*path == '\'') buffer_append_text(&quoted, "'\\''");
        else buffer_append(&quoted, path, 1);
    }
    buffer_append(&quoted, "'", 2);
    return (char *)quoted.data;
}

/* How many bytes of the text can be shown: all but a UTF-8 character at the end that is not whole yet. Bytes
 * that are no UTF-8 at all are shown as they are. */
static size_t utf8_whole(const uint8_t *text, size_t size) {
    for (size_t back = 1; back <= 3 && back <= size; back++) {
        const uint8_t byte = text[size - back];
        if ((byte & 0xC0) == 0x80) continue; /* a following byte: its first one stands further left */
        const size_t length = byte >= 0xF0 && byte < 0xF8 ? 4 : byte >= 0xE0 ? 3 : byte >= 0xC0 ? 2 : 1;
        return byte < 0xF8 && length > back ? size - back : size;
    }
    return size;
}

/* ---- ranks ---- */

/* Whether all ranks have come this far well; alone, whether this one has. */
static bool all_ranks(App *app, bool done) {
    if (ranks_all(&app->ranks, done, &app->code, &app->err)) return true;
    app->told = true;
    return false;
}

/* As ranks_same: the lines of these are on all ranks alike. */
static bool same_on_ranks(App *app, const char *what, const char *ours, const char *advice) {
    if (ranks_same(&app->ranks, what, ours, advice, &app->err)) return true;
    app->told = true;
    return false;
}

/* What rank 0 found out, an object, as app->lead on every rank; ours (of rank 0; elsewhere NULL) is stolen. */
static bool tell_ranks(App *app, json_t *ours) {
    Buffer text = {0};
    char *dumped = leads(app) ? json_dumps(ours, 0) : NULL;
    if (dumped) buffer_append_text(&text, dumped);
    free(dumped);
    ranks_tell(&app->ranks, &text);
    if (!leads(app)) ours = json_loadb((const char *)text.data, text.size, 0, NULL);
    buffer_free(&text);
    json_decref(app->lead);
    app->lead = ours;
    return all_ranks(app, json_is_object(ours) ||
                              error_set(&app->err,
                                        "a path of the run is no UTF-8, so that rank 0 cannot tell it to "
                                        "the others; use another -run"));
}

/* Only training is for several ranks. */
static bool check_ranks(App *app) {
    const Options *o = &app->options;
    const struct {
        const char *name;
        bool asked;
    } alone[] = {{"generate", o->generate}, {"evaluate", o->evaluate}, {"compare", o->compare != NULL},
                 {"tokenize", o->tokenize}, {"encode", o->encode},     {"decode", o->decode}};
    for (size_t i = 0; i < sizeof alone / sizeof alone[0] && app->ranks.count > 1; i++)
        if (alone[i].asked)
            return app->told = true,
                   USAGE(app,
                         "-%s runs in one process, and a launcher started %d; start it without the launcher",
                         alone[i].name, app->ranks.count);
    return true;
}

/* Every rank was started with the same program and flags; what differs is named. */
static bool check_same_start(App *app) {
    if (app->ranks.count == 1) return true;
    const Options *o = &app->options;
    /* Updates are the same bits on every rank only where the same instructions compute them. */
    char program[160];
    snprintf(program, sizeof program, "train_gpt %s with %s", TRAIN_GPT_VERSION, simd_name(simd_level()));
    if (!same_on_ranks(
            app, "the program", program,
            "start the same one on every host, with TRAIN_GPT_SIMD=avx2 or plain where CPUs differ"))
        return false;
    json_t *ours = options_to_json(o);
    json_object_set_new(ours, "run", o->run ? json_string(o->run) : json_null());
    json_object_set_new(ours, "resume", json_boolean(o->resume));
    json_object_set_new(ours, "force", json_boolean(o->force));
    json_object_set_new(ours, "dry_run", json_boolean(o->dry_run));
    json_t *value;
    const char *key;
    bool same = tell_ranks(app, leads(app) ? json_incref(ours) : NULL);
    if (app->told) return json_decref(ours), false;
    json_object_foreach(ours, key, value) {
        json_t *other = json_object_get(app->lead, key);
        if (!same || (other && json_equal(value, other))) continue;
        char *found = json_dumps(value, JSON_ENCODE_ANY), *expected = json_dumps(other, JSON_ENCODE_ANY);
        app->code = EXIT_USAGE;
        same = error_set(&app->err, "%s is %s here and %s on rank 0; give all ranks the same flags", key,
                         found, expected ? expected : "no flag");
        free(found);
        free(expected);
    }
    json_decref(ours);
    return all_ranks(app, same);
}

/* The nearest batches that the ranks can share, and the ranks that can share this one. */
static bool check_share(App *app) {
    const int64_t batch = app->options.batch, count = app->ranks.count, below = batch / count * count;
    if (below == batch) return true;
    int64_t fewer = count;
    while (batch % fewer != 0) fewer--;
    char nearest[80];
    if (below > 0) snprintf(nearest, sizeof nearest, "%" PRId64 " or %" PRId64, below, below + count);
    else snprintf(nearest, sizeof nearest, "%" PRId64, count);
    return USAGE(app,
                 "-batch %" PRId64 " does not divide among %" PRId64 " ranks; use -batch %s, or %" PRId64
                 " rank%s",
                 batch, count, nearest, fewer, fewer == 1 ? "" : "s");
}

/* Sequences of a step that each rank takes. */
static uint64_t share_of_batch(const App *app) {
    return (uint64_t)(app->options.batch / app->ranks.count);
}

/* What a rank holds: the same weights as rank 0, or it has been computing something else. */
static bool check_same_weights(App *app) {
    if (app->ranks.count == 1) return true;
    size_t tensors, most = 0;
    const Parameter *table = gpt_table(app->gpt, &tensors);
    for (size_t i = 0; i < tensors; i++)
        if (table[i].size > most) most = table[i].size;
    float *floats = xmalloc(most * sizeof *floats);
    uint32_t crc = 0;
    for (size_t i = 0; i < tensors; i++) {
        sign_of_life();
        gpt_get(app->gpt, GPT_WEIGHTS, i, floats);
        crc = checksum_crc32(crc, floats, table[i].size * sizeof *floats);
    }
    free(floats);
    char text[32];
    snprintf(text, sizeof text, "CRC-32 %08" PRIx32, crc);
    return same_on_ranks(app, "the model's weights", text,
                         "a host may compute wrongly: go on from an earlier checkpoint without it");
}

/* The signal that ends the training: several ranks must all have the same. */
static int agreed_stop(const App *app) {
    return app->ranks.count > 1 ? app->stop : stop_requested();
}

/* All ranks learn of a stop that was asked for of one. */
static void agree_on_stop(App *app) {
    const size_t count = (size_t)app->ranks.count;
    if (count == 1) return;
    const double ours = stop_requested();
    double *all = xmalloc(count * sizeof *all);
    ranks_gather(&app->ranks, &ours, 1, all);
    for (size_t k = 0; k < count; k++)
        if (all[k] > app->stop) app->stop = (int)all[k];
    free(all);
}

/* ---- settings ---- */

static bool is_auto(int64_t value) {
    return value == OPTION_AUTO;
}

/* Says what checkpoint_newest or checkpoint_best has passed over, a line each. */
static void warn_passed_over(App *app, Buffer *damaged) {
    for (size_t at = 0; at < damaged->size;) {
        const char *line = (const char *)damaged->data + at;
        const char *end = memchr(line, '\n', damaged->size - at);
        const size_t length = end ? (size_t)(end - line) : damaged->size - at;
        warn(app, "passed over a damaged checkpoint: %.*s", (int)length, line);
        at += length + 1;
    }
    buffer_free(damaged);
}

/* "tokens/train-*.bin": shards, not text. */
static bool names_shards(const char *path) {
    const size_t size = path ? strlen(path) : 0;
    return size >= 4 && strcmp(path + size - 4, ".bin") == 0;
}

/* -resume: takes the run's settings where there is a run, and finds the checkpoint to go on with. */
static bool take_run_settings(App *app) {
    Options *o = &app->options;
    if (!o->resume) return true;
    if (!o->run) {
        app->newest_run = run_newest(&app->err);
        if (!app->newest_run) return false;
        o->run = app->newest_run;
    }
    char *file = xformat("%s/run.json", o->run), *checkpoints = xformat("%s/checkpoints", o->run);
    bool done = true;
    if (file_exists(file)) {
        app->settings = run_read_settings(o->run, &app->err);
        done = app->settings != NULL;
        if (done && !options_resume(o, app->settings, &app->err)) app->code = EXIT_USAGE, done = false;
    }
    if (done && app->settings && folder_exists(checkpoints)) {
        Buffer damaged = {0};
        app->resume_from = checkpoint_newest(checkpoints, &damaged, &app->err);
        /* None yet is no failure: the run stopped before its first. None that is good is one. */
        done = app->resume_from || damaged.size == 0;
        if (app->resume_from) warn_passed_over(app, &damaged);
        else buffer_free(&damaged);
    }
    free(checkpoints);
    free(file);
    return done;
}

/* The same on every rank: rank 0 reads. */
static bool share_run_settings(App *app) {
    Options *o = &app->options;
    if (!all_ranks(app, !leads(app) || take_run_settings(app))) return false;
    if (app->ranks.count == 1) return true;
    json_t *ours = leads(app) ? json_pack("{s:s?, s:s?, s:O?}", "run", o->run, "resume_from",
                                          app->resume_from, "settings", app->settings)
                              : NULL;
    if (!tell_ranks(app, ours)) return false;
    if (leads(app)) return all_ranks(app, true);
    const char *run = json_string_value(json_object_get(app->lead, "run")),
               *from = json_string_value(json_object_get(app->lead, "resume_from"));
    json_t *settings = json_object_get(app->lead, "settings");
    bool done = true;
    if (run) o->run = app->newest_run = xstrdup(run);
    if (from) app->resume_from = xstrdup(from);
    if (json_is_object(settings)) {
        app->settings = json_incref(settings);
        done = options_resume(o, settings, &app->err);
    }
    return all_ranks(app, done);
}

/* The settings that are chosen once the number of steps is known, if the user has not. */
typedef struct Chosen {
    const char *flag, *key;
    int64_t *value;
    int64_t most; /* times in a run; 0: of the warm-up, which happens once */
} Chosen;
enum { CHOSEN = 4 };

static void list_chosen(Options *o, Chosen list[CHOSEN]) {
    list[0] = (Chosen){"eval-every", "eval_every", &o->eval_every, EVALUATIONS};
    list[1] = (Chosen){"sample-every", "sample_every", &o->sample_every, SAMPLES};
    list[2] = (Chosen){"checkpoint-every", "checkpoint_every", &o->checkpoint_every, CHECKPOINTS};
    list[3] = (Chosen){"warmup", "warmup", &o->warmup, 0};
}

/* -steps and -minutes, one of them. More steps when a run goes on begin a new schedule: what the program had
 * chosen for the old one is chosen again. The same command again goes on with the old schedule, whose number of
 * steps is in the run's settings once it is known. */
static bool settle_length(App *app) {
    Options *o = &app->options;
    const bool steps = options_given("steps"), minutes = options_given("minutes");
    if (steps && minutes) return USAGE(app, "-steps and -minutes were both given; give one of them");
    const json_t *old_steps = json_object_get(app->settings, "steps");
    bool same = true;
    if (steps) {
        same = json_is_integer(old_steps) && json_integer_value(old_steps) == o->steps;
        if (!same) o->minutes = OPTION_AUTO;
    } else if (is_auto(o->steps) && o->minutes == OPTION_AUTO) {
        o->minutes = DEFAULT_MINUTES;
    }
    json_t *before = json_object_get(app->settings, "chosen");
    Chosen list[CHOSEN];
    list_chosen(o, list);
    app->chosen = json_array();
    for (size_t i = 0; i < CHOSEN; i++) {
        bool chosen = false;
        size_t at;
        json_t *key;
        json_array_foreach(before, at,
                           key) if (json_is_string(key) && strcmp(json_string_value(key), list[i].key) == 0)
            chosen = true;
        if (!chosen || options_given(list[i].flag)) continue;
        if (same) json_array_append_new(app->chosen, json_string(list[i].key));
        else *list[i].value = OPTION_AUTO;
    }
    return true;
}

/* What OpenMP would take: OMP_NUM_THREADS, else the CPUs that this process may run on, divided by the ranks that
 * may run on the same ones. */
static int64_t default_threads(const App *app) {
    const char *asked = getenv("OMP_NUM_THREADS");
    const long number = asked ? strtol(asked, NULL, 10) : 0;
    if (number > 0 && number <= 4096) return number;
#if defined(__linux__)
    cpu_set_t cpus;
    long online = sched_getaffinity(0, sizeof cpus, &cpus) == 0 ? CPU_COUNT(&cpus) : 0;
#else
    long online = sysconf(_SC_NPROCESSORS_ONLN);
#endif
    online /= app->ranks.cpu_sharers;
    return online > 0 ? online : 1;
}

static bool check_modes(App *app) {
    const Options *o = &app->options;
    const int modes = o->generate + o->evaluate + (o->compare != NULL) + o->tokenize + o->encode + o->decode;
    if (modes > 1)
        return USAGE(app, "-generate, -evaluate, -compare, -tokenize, -encode and -decode: give one of them");
    if (o->compare && (o->resume || o->force))
        return USAGE(app, "-compare trains anew in a new folder: leave -resume and -force out");
    if (o->special && !o->encode) return USAGE(app, "-special belongs to -encode; leave it out");
    if (o->resume && o->force)
        return USAGE(app, "-resume goes on with a run, -force starts over: give one of them");
    if (o->tokenize && names_shards(o->data))
        return USAGE(app, "-tokenize needs text, but -data names shards");
    if (o->dry_run && (modes > 0))
        return USAGE(app, "-dry-run shows what training would be; leave the other mode out");
    return true;
}

/* What the flags say together, and what is left to choose that needs no look at the data. */
static bool settle_settings(App *app) {
    Options *o = &app->options;
    if (!settle_length(app)) return false;
    /* A run that goes on with several ranks may have been started with another number of them. */
    if (is_auto(o->threads) || (app->ranks.count > 1 && !options_given("threads")))
        o->threads = default_threads(app);
    if (strcmp(o->device, "cpu") == 0 && strcmp(o->precision, "bf16") == 0)
        return USAGE(app, "-precision bf16 is for a GPU; leave it out, or use -device cuda");
#ifndef USE_CUDA
    if (strcmp(o->device, "cuda") == 0)
        return USAGE(app, "-device cuda: this build has no CUDA part; use -device cpu");
#endif
    if (!o->evaluate && o->micro > o->batch)
        return USAGE(app, "-micro %" PRId64 " is more than -batch %" PRId64 "; lower it", o->micro, o->batch);
    if (names_shards(o->data) && !names_shards(o->heldout))
        return USAGE(
            app, "-data names shards, so that -heldout must name shards too (a .bin file or a quoted glob)");
    if (!o->evaluate && !names_shards(o->data) && names_shards(o->heldout))
        return USAGE(app, "-heldout names shards, but -data is text; give two of a kind");
    return true;
}

/* Once the model's width is known: where not said, the learning rate falls as the width grows, as the best one
 * does (Yang et al. 2022, Tensor Programs V); the constant is from runs of this program's default model. */
static bool settle_rates(App *app) {
    Options *o = &app->options;
    if (o->lr == OPTION_AUTO) o->lr = RATE_TIMES_CHANNELS / (double)o->channels;
    if (o->min_lr == OPTION_AUTO) o->min_lr = o->lr / 10;
    return o->min_lr <= o->lr || USAGE(app, "-min-lr %g is above -lr %g; lower it", o->min_lr, o->lr);
}

/* A path that the user gave and that is about to be read. A glob is left to what opens it. */
static bool check_path(App *app, const char *flag, const char *path) {
    if (!path || names_shards(path) || file_exists(path) || folder_exists(path)) return true;
    return error_set(&app->err, "-%s: there is no file or folder %s; check the path", flag, path);
}

/* ---- model: device, tokenizer, configuration ---- */

/* -device auto: the GPU where there is one that works, else the CPU. From here on device and precision are
 * what the run uses. */
static bool open_device(App *app) {
    Options *o = &app->options;
#ifdef USE_CUDA
    if (strcmp(o->device, "cpu") != 0) {
        const bool fp32 = strcmp(o->precision, "fp32") == 0;
        app->ops = fp32 ? &ops_cuda_fp32 : &ops_cuda;
        app->stream = app->ops->open(app->ranks.local_rank, (int)o->threads, &app->err);
        if (app->stream) o->device = "cuda", o->precision = fp32 ? "fp32" : "bf16";
        if (app->stream || strcmp(o->device, "cuda") == 0) return app->stream != NULL;
    }
#endif
    if (strcmp(o->precision, "bf16") == 0)
        return USAGE(app, "-precision bf16 needs a GPU, and none was found; leave it out");
    o->device = "cpu", o->precision = "fp32";
    app->ops = &ops_cpu;
    app->stream = app->ops->open(app->ranks.local_rank, (int)o->threads, &app->err);
    return app->stream != NULL;
}

/* One for each rank. */
static bool open_devices(App *app) {
    if (!all_ranks(app, open_device(app))) return false;
    if (ranks_join_devices(&app->ranks, app->ops, app->stream, &app->err)) return true;
    app->told = true;
    return false;
}

/* The merges file that a path means: a run, a folder with merges.txt (a checkpoint), or the file itself. */
static char *merges_path(const char *path) {
    char *of_run = xformat("%s/tokens/merges.txt", path), *of_folder = xformat("%s/merges.txt", path);
    char *found = file_exists(of_run) ? of_run : folder_exists(path) ? of_folder : xstrdup(path);
    if (found != of_run) free(of_run);
    if (found != of_folder) free(of_folder);
    return found;
}

static void use_tokenizer(App *app, Bpe *bpe, char *from) {
    app->bpe = bpe, app->merges_of = from;
    const uint32_t V = bpe_vocab_size(bpe);
    app->token_bytes = xmalloc(V * sizeof *app->token_bytes);
    for (uint32_t id = 0; id < V; id++) {
        size_t size;
        bpe_token_bytes(bpe, id, &size);
        app->token_bytes[id] = id == bpe_end_of_text(bpe) ? 0 : (uint32_t)size;
    }
    bpe_merges_text(bpe, &app->merges);
    bpe_tokenizer_json(bpe, &app->tokenizer_json);
}

static bool load_tokenizer(App *app, const char *path) {
    char *from = merges_path(path);
    Bpe *bpe = bpe_load(from, &app->err);
    if (bpe) use_tokenizer(app, bpe, from);
    else free(from);
    return bpe != NULL;
}

/* The checkpoint that -load means: the best of a run, or the folder itself. To be freed. */
static char *find_model(App *app, const char *path) {
    char *checkpoints = xformat("%s/checkpoints", path), *config = xformat("%s/config.json", path),
         *found = NULL;
    if (folder_exists(checkpoints)) {
        Buffer damaged = {0};
        found = checkpoint_best(checkpoints, &damaged, &app->err);
        if (found) warn_passed_over(app, &damaged);
        else buffer_free(&damaged);
    } else if (file_exists(config)) {
        found = xstrdup(path);
    } else {
        error_set(&app->err,
                  "%s holds no model: expected a run (checkpoints/) or a checkpoint (config.json); %s", path,
                  folder_exists(path) ? "train for longer or name another" : "check the path");
    }
    free(config);
    free(checkpoints);
    return found;
}

/* A loaded model brings its shape; a flag that says otherwise is refused. */
static bool take_shape(App *app, const GptConfig *config) {
    Options *o = &app->options;
    const struct {
        const char *name;
        int64_t *ours;
        size_t theirs;
    } sizes[] = {{"layers", &o->layers, config->layers},
                 {"heads", &o->heads, config->heads},
                 {"channels", &o->channels, config->channels},
                 {"ctx", &o->ctx, config->ctx},
                 {"vocab", &o->vocab, config->vocab}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        if (options_given(sizes[i].name) && *sizes[i].ours != (int64_t)sizes[i].theirs)
            return USAGE(app, "-%s %" PRId64 ": the loaded model has %zu; leave the flag out", sizes[i].name,
                         *sizes[i].ours, sizes[i].theirs);
        *sizes[i].ours = (int64_t)sizes[i].theirs;
    }
    const char *position = config->position == POSITION_LEARNED ? "learned" : "rotary";
    if (options_given("position") && strcmp(o->position, position) != 0)
        return USAGE(app, "-position %s: the loaded model has %s ones; leave the flag out", o->position,
                     position);
    o->position = position;
    return true;
}

/* Shape and tokenizer of a model folder. A tokenizer that was named otherwise must be the same. */
static bool take_model(App *app) {
    const char *folder = app->model;
    GptConfig config;
    if (!checkpoint_config(folder, &config, &app->err) || !take_shape(app, &config)) return false;
    if (!app->bpe && app->options.tokenizer && !load_tokenizer(app, app->options.tokenizer)) return false;
    char *own = xformat("%s/merges.txt", folder);
    bool done = true;
    if (!app->bpe) {
        done = load_tokenizer(app, folder);
    } else if (file_exists(own)) {
        Bpe *bpe = bpe_load(own, &app->err);
        done = bpe &&
               (bpe_same(bpe_fingerprint(bpe), bpe_fingerprint(app->bpe)) ||
                error_set(&app->err, "the model's tokenizer %s is not that of %s; use one of them throughout",
                          own, app->merges_of));
        bpe_free(bpe);
    }
    free(own);
    if (!done || bpe_vocab_size(app->bpe) == config.vocab) return done;
    return error_set(
        &app->err,
        "the model in %s has %zu tokens, the tokenizer %s has %u; give the one it was trained with", folder,
        config.vocab, app->merges_of, bpe_vocab_size(app->bpe));
}

static GptConfig model_config(const App *app) {
    const Options *o = &app->options;
    return (GptConfig){.layers = (size_t)o->layers,
                       .heads = (size_t)o->heads,
                       .channels = (size_t)o->channels,
                       .ctx = (size_t)o->ctx,
                       .vocab = app->bpe ? bpe_vocab_size(app->bpe) : (size_t)o->vocab,
                       .position = strcmp(o->position, "learned") == 0 ? POSITION_LEARNED : POSITION_ROTARY,
                       .dropout = (float)o->dropout};
}

static AttentionShape attention_shape(const GptSetup *setup) {
    const GptConfig *config = &setup->config;
    return (AttentionShape){.B = setup->B,
                            .T = config->ctx,
                            .H = config->heads,
                            .D = config->channels / config->heads,
                            .training = setup->training,
                            .deterministic = setup->deterministic};
}

/* Bytes of the device's memory that can be had (on a CPU: without swapping); 0 where the system does not say. */
static size_t memory_available(const App *app) {
    const size_t sharers = (size_t)app->ranks.local_count; /* ranks of this host, which take as much each */
    if (app->ops->memory) {
        size_t free_bytes, total_bytes;
        app->ops->memory(app->stream, &free_bytes, &total_bytes);
        return free_bytes;
    }
    FILE *file = fopen("/proc/meminfo", "re");
    char line[256];
    size_t kilobytes = 0;
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "MemAvailable: %zu kB", &kilobytes) == 1) break;
    if (file) fclose(file);
    return kilobytes <= SIZE_MAX / 1024 ? kilobytes * 1024 / sharers : 0;
}

/* The plan's total for other sizes of micro-batch, model or attention: what lowering a flag would give. */
static size_t planned_bytes(const GptSetup *setup) {
    MemoryPlan plan;
    return gpt_plan(setup, &plan, NULL) ? plan.total : SIZE_MAX;
}

/* -micro left open: the largest divisor of the batch that fits: on a CPU one that takes few tokens (more gain
 * nothing and leave the caches) and whose activations take less than a quarter of the free memory; on a GPU,
 * which more tokens fill better, one that leaves it a little for the libraries. */
static size_t choose_micro(const GptSetup *setup, size_t rows, size_t free_bytes) {
    const bool own_memory = setup->ops->memory != NULL;
    GptSetup smaller = *setup;
    smaller.B = 1;
    const size_t least = own_memory ? 0 : planned_bytes(&smaller);
    const size_t most = own_memory ? rows : MICRO_TOKENS / setup->config.ctx;
    const size_t room = own_memory ? free_bytes / 32 * 31 : free_bytes / 4;
    for (size_t micro = rows < most ? rows : most; micro > 1; micro--) {
        if (rows % micro != 0) continue;
        smaller.B = micro;
        const size_t bytes = planned_bytes(&smaller);
        if (bytes < SIZE_MAX && (free_bytes == 0 || bytes - least < room)) return micro;
    }
    return 1;
}

/* The answer to a plan that does not fit: which flag to lower, and to what. */
static bool too_large(App *app, size_t free_bytes) {
    const Options *o = &app->options;
    char advice[256] = "lower -layers, -channels or -ctx";
    GptSetup smaller = app->setup;
    while (smaller.B > 1 && planned_bytes(&smaller) > free_bytes) smaller.B /= 2;
    size_t bytes = planned_bytes(&smaller);
    if (bytes <= free_bytes) {
        snprintf(advice, sizeof advice, "lower -micro from %zu to %zu (then %s)", app->setup.B, smaller.B,
                 metric((double)bytes, "B").text);
    } else {
        while (smaller.config.layers > 1 && planned_bytes(&smaller) > free_bytes) smaller.config.layers /= 2;
        bytes = planned_bytes(&smaller);
        if (bytes <= free_bytes)
            snprintf(advice, sizeof advice,
                     "lower -layers from %" PRId64 " to %zu with -micro 1 (then %s), or -channels", o->layers,
                     smaller.config.layers, metric((double)bytes, "B").text);
    }
    char flash_advice[128] = "";
    GptSetup flash = app->setup;
    const AttentionShape shape = attention_shape(&flash);
    flash.attention = attention_find("flash", app->ops->name, &shape, NULL);
    if (flash.attention && flash.attention != app->setup.attention)
        snprintf(flash_advice, sizeof flash_advice, "; with -attention flash it would need %s",
                 metric((double)planned_bytes(&flash), "B").text);
    return error_set(&app->err, "not enough memory: the run needs %s, free are %s; %s%s",
                     metric((double)app->plan.total, "B").text, metric((double)free_bytes, "B").text, advice,
                     flash_advice);
}

/* Configuration, kernel, micro-batch and memory; nothing is allocated yet. rows: sequences that a rank takes
 * at most. */
static bool plan_model(App *app, bool training, size_t rows) {
    Options *o = &app->options;
    const size_t most = app->ops->memory && !training ? STORIES_AT_ONCE : STORIES_ASIDE;
    const size_t samples = (size_t)o->samples < most ? (size_t)o->samples : most;
    app->setup = (GptSetup){.config = model_config(app),
                            .ops = app->ops,
                            .stream = app->stream,
                            .training = training,
                            .deterministic = o->deterministic,
                            .B = rows,
                            .seed = (uint64_t)o->seed,
                            .cache_B = o->evaluate ? 0 : samples};
    GptSetup *setup = &app->setup;
    const GptConfig *config = &setup->config;
    if (!gpt_check_config(config, &app->err)) return app->code = EXIT_USAGE, false;
    const AttentionShape shape = attention_shape(setup);
    setup->attention = attention_find(o->attention, app->ops->name, &shape, &app->err);
    if (!setup->attention) return app->code = EXIT_USAGE, false;

    const size_t free_bytes = memory_available(app);
    setup->B = is_auto(o->micro)         ? choose_micro(setup, rows, free_bytes)
               : (size_t)o->micro < rows ? (size_t)o->micro
                                         : rows;
    if (!gpt_plan(setup, &app->plan, &app->err)) return app->code = EXIT_USAGE, false;
    const size_t of_others = ranks_bytes(&app->ranks, app->ops);
    if (of_others > 0 && app->plan.rows < MEMORY_PLAN_ROWS) {
        app->plan.row[app->plan.rows].purpose = "gradients of other ranks";
        app->plan.row[app->plan.rows++].bytes = of_others;
        app->plan.total += of_others;
    }
    return free_bytes == 0 || app->plan.total <= free_bytes || too_large(app, free_bytes);
}

/* What was planned, and host memory for the tokens of a micro-batch. */
static bool make_model(App *app) {
    const size_t tokens = app->setup.B * app->setup.config.ctx;
    app->gpt = gpt_new(&app->setup, &app->err);
    if (!app->gpt) return false;
    app->inputs = xmalloc(tokens * sizeof *app->inputs);
    app->targets = xmalloc(tokens * sizeof *app->targets);
    return true;
}

/* ---- data ---- */

/* All settings as they now are, what was found in the data, and the version. A run that only holds tokens so
 * far keeps what belongs to those, so that everything else is still open when it is trained. */
static bool write_settings(App *app) {
    if (!leads(app)) return true;
    static const char *const of_tokens[] = {"data", "heldout", "tokenizer", "vocab", "stories", "seed"};
    json_t *all = options_to_json(&app->options), *settings = all;
    if (app->options.tokenize) {
        settings = json_object();
        for (size_t i = 0; i < sizeof of_tokens / sizeof of_tokens[0]; i++)
            json_object_set(settings, of_tokens[i], json_object_get(all, of_tokens[i]));
        json_decref(all);
    }
    if (app->train) {
        json_object_set_new(settings, "train_identity", json_integer(shards_identity(app->train)));
        json_object_set_new(settings, "heldout_identity", json_integer(shards_identity(app->heldout)));
    }
    json_object_set(settings, "chosen",
                    app->chosen); /* here, not by the user: chosen again when -steps changes */
    json_object_set_new(settings, "version", json_string(TRAIN_GPT_VERSION));
    const bool done = run_write_settings(app->run, settings, &app->err);
    json_decref(settings);
    return done;
}

/* A run that goes on must find the tokens it was started with. */
static bool check_identity(App *app, const char *key, const Shards *shards, const char *side) {
    const json_t *before = json_object_get(app->settings, key);
    const uint32_t now = shards_identity(shards);
    if (!before || (json_is_integer(before) && json_integer_value(before) == (json_int_t)now)) return true;
    return error_set(
        &app->err,
        "the %s shards are not those the run was started with: found identity %u, the run has %" PRId64
        "; put the old ones back or start a new run",
        side, now, (int64_t)json_integer_value(before));
}

static bool open_shards(App *app, const char *train, const char *heldout) {
    app->train = shards_open(train, app->bpe, &app->err);
    app->heldout = app->train ? shards_open(heldout, app->bpe, &app->err) : NULL;
    return app->heldout && check_identity(app, "train_identity", app->train, "training") &&
           check_identity(app, "heldout_identity", app->heldout, "held-out");
}

/* The tokenizer where it is known before the text is read: the run's own, -tokenizer, that of -load, or with
 * shards the merges.txt beside them. */
static bool find_tokenizer(App *app) {
    const Options *o = &app->options;
    char *of_run = xformat("%s/tokens/merges.txt", o->run ? o->run : ".");
    char *facts = xformat("%s/tokens/data.json", o->run ? o->run : ".");
    bool done = true;
    if (app->settings && file_exists(of_run)) {
        done = load_tokenizer(app, of_run);
    } else if (app->settings && file_exists(facts)) { /* tokens without their tokenizer: a copy will do */
        done = app->resume_from
                   ? load_tokenizer(app, app->resume_from)
                   : error_set(&app->err,
                               "there is no %s, which the tokens beside it were made with; put it "
                               "back or start over with -force",
                               of_run);
    } else if (o->tokenizer) {
        done = load_tokenizer(app, o->tokenizer);
    } else if (!o->load && names_shards(o->data)) {
        const char *slash = strrchr(o->data, '/');
        char *beside = slash ? xformat("%.*s/merges.txt", (int)(slash - o->data), o->data)
                             : xstrdup("merges.txt");
        done = file_exists(beside) ? load_tokenizer(app, beside)
                                   : USAGE(app,
                                           "-data names shards, and there is no %s beside them: name their "
                                           "tokenizer with -tokenizer",
                                           beside);
        free(beside);
    }
    free(facts);
    free(of_run);
    if (done && app->bpe && !o->load && options_given("vocab") &&
        o->vocab != (int64_t)bpe_vocab_size(app->bpe) && o->tokenizer)
        return USAGE(app, "-vocab %" PRId64 ": the tokenizer %s has %u tokens; leave the flag out", o->vocab,
                     app->merges_of, bpe_vocab_size(app->bpe));
    return done;
}

/* Whether there is a story to begin with; what is wrong otherwise, reading it all will say. */
static bool holds_text(const char *path) {
    Error unused;
    StoryPiece piece;
    Stories *stories = path ? stories_open(path, 0, &unused) : NULL;
    const bool found = !path || (stories && stories_next(stories, &piece, &unused) == 1);
    stories_close(stories);
    return found;
}

/* RUN/tokens: made from the text unless an earlier start of the run has. */
static bool make_tokens(App *app, const char *folder) {
    const Options *o = &app->options;
    const uint64_t stories = (uint64_t)o->stories;
    const DataSource source = {.data = o->data,
                               .heldout = o->heldout,
                               .seed = (uint64_t)o->seed,
                               .stories = stories,
                               .heldout_stories = stories / 20 > MIN_HELDOUT_STORIES ? stories / 20
                                                                                     : MIN_HELDOUT_STORIES,
                               .threads = (int)o->threads};
    if (!app->bpe) {
        if (holds_text(o->data))
            say(app, "training a tokenizer of %s tokens", commas((uint64_t)o->vocab).text);
        Bpe *bpe = data_train_tokenizer(&source, (uint32_t)o->vocab, &app->err);
        if (!bpe) return false;
        use_tokenizer(app, bpe, NULL);
    }
    char *merges = xformat("%s/merges.txt", folder);
    const bool done = folder_make(folder, &app->err) &&
                      file_replace(merges, app->merges.data, app->merges.size, &app->err) &&
                      data_write_shards(&source, app->bpe, folder, &app->facts, &app->err);
    free(merges);
    return done;
}

/* Tokens of both sides, open for reading, and the run's copy of the tokenizer. */
static bool open_data(App *app) {
    const Options *o = &app->options;
    char *folder = run_file(app->run, "tokens"), *facts = xformat("%s/data.json", folder);
    char *train = xformat("%s/train-*.bin", folder), *heldout = xformat("%s/heldout-*.bin", folder);
    char *merges = xformat("%s/merges.txt", folder);
    bool done;
    if (names_shards(o->data)) done = folder_make(folder, &app->err);
    else done = file_exists(facts) || make_tokens(app, folder);
    done = done &&
           (file_exists(merges) || file_replace(merges, app->merges.data, app->merges.size, &app->err));
    if (!names_shards(o->data)) {
        done = done && data_read_facts(folder, &app->facts, &app->err) && open_shards(app, train, heldout);
        app->has_facts = done;
    }
    free(merges);
    free(heldout);
    free(train);
    free(facts);
    free(folder);
    return done && write_settings(app);
}

/* Windows to train on and to evaluate on; eval_tokens OPTION_AUTO: `otherwise` (0: all). */
static bool open_windows(App *app, uint64_t otherwise) {
    const Options *o = &app->options;
    const size_t T = (size_t)o->ctx;
    if (app->train) {
        app->batches = batches_open(app->train, T, (uint64_t)o->seed, true, &app->err);
        if (!app->batches) return error_prefix(&app->err, "training side");
        const uint64_t epoch = batches_windows(app->batches);
        if ((uint64_t)o->batch > epoch)
            return error_set(&app->err,
                             "-batch %" PRId64
                             ": the training side has only %s of %zu tokens; lower -batch to "
                             "%" PRIu64 " or less, or give more text",
                             o->batch, counted(epoch, "window", "windows").text, T, epoch);
    }
    app->windows = batches_open(app->heldout, T, 0, false, &app->err);
    if (!app->windows)
        return error_prefix(&app->err,
                            o->heldout || !o->data
                                ? "held-out side"
                                : "held-out side (every 20th story; of fewer than 20 stories the last "
                                  "5 %% of the text; -heldout names another)");
    const uint64_t all = batches_windows(app->windows);
    const uint64_t tokens = is_auto(o->eval_tokens) ? otherwise : (uint64_t)o->eval_tokens;
    const uint64_t wanted = tokens < T ? 1 : tokens / T;
    app->eval_windows = (tokens == 0 && is_auto(o->eval_tokens)) || wanted > all ? all : wanted;
    return true;
}

/* ---- tables ---- */

static void print_side(App *app, const char *name, const Shards *shards, uint64_t stories, uint64_t bytes) {
    if (app->has_facts)
        row(app, name, "%s, %s, %s", counted(stories, "story", "stories").text,
            metric((double)bytes, "B").text, counted(shards_tokens(shards), "token", "tokens").text);
    else row(app, name, "%s", counted(shards_tokens(shards), "token", "tokens").text);
}

static void print_data(App *app) {
    const Options *o = &app->options;
    say(app, "\ndata");
    if (o->data) row(app, "from", "%s", o->data);
    else row(app, "from", "built-in stories, seed %" PRId64, o->seed);
    if (app->train) {
        print_side(app, "training", app->train, app->facts.train_stories, app->facts.train_bytes);
        print_side(app, "held-out", app->heldout, app->facts.heldout_stories, app->facts.heldout_bytes);
    } else {
        row(app, "", "not read in a dry run");
    }
    if (app->batches) {
        const uint64_t W = batches_windows(app->batches), batch = (uint64_t)o->batch;
        row(app, "an epoch", "%s of %" PRId64 " tokens: %s", counted(W, "window", "windows").text, o->ctx,
            counted((W + batch - 1) / batch, "step", "steps").text);
        row(app, "evaluation", "%s tokens in %s", commas(app->eval_windows * (uint64_t)o->ctx).text,
            counted(app->eval_windows, "window", "windows").text);
    }
    const size_t V = app->bpe ? bpe_vocab_size(app->bpe) : (size_t)o->vocab;
    if (app->merges_of) row(app, "tokenizer", "%s tokens, from %s", commas(V).text, app->merges_of);
    else if (app->bpe && V < (size_t)o->vocab)
        row(app, "tokenizer", "%s tokens, trained here: the text cannot give %s", commas(V).text,
            commas((uint64_t)o->vocab).text);
    else row(app, "tokenizer", "%s tokens, %s", commas(V).text, app->bpe ? "trained here" : "to be trained");
}

static void print_memory(App *app) {
    say(app, "\nmemory");
    for (size_t i = 0; i < app->plan.rows; i++)
        fprintf(app->report, "  %10s  %s\n", metric((double)app->plan.row[i].bytes, "B").text,
                app->plan.row[i].purpose);
    if (app->ops->memory) {
        size_t free_now, total;
        app->ops->memory(app->stream, &free_now, &total);
        fprintf(app->report, "  %10s  in use already: driver, kernels, libraries, other programs\n",
                metric((double)(total - free_now), "B").text);
    }
    const size_t free_bytes = memory_available(app);
    fprintf(app->report, "  %10s  in all; free: %s\n", metric((double)app->plan.total, "B").text,
            free_bytes ? metric((double)free_bytes, "B").text : "not known");
}

/* A run keeps the newest ones, the best, and the one that is being written. */
static void print_disk(App *app) {
    const Options *o = &app->options;
    const double each = (double)checkpoint_bytes(&app->setup.config), most = each * (double)(o->keep + 2);
    /* Before the folder is made, the nearest one above it tells. */
    char *path = xstrdup(app->run ? run_path(app->run) : o->run ? o->run : "runs");
    while (!folder_exists(path)) {
        char *slash = strrchr(path, '/');
        if (slash && slash != path) *slash = 0;
        else strcpy(path, slash ? "/" : "."); /* path has a character at least */
    }
    uint64_t free_bytes = 0;
    const bool known = disk_free_bytes(path, &free_bytes, NULL);
    free(path);
    say(app, "\ndisk");
    row(app, "checkpoints", "%s each, %s at most; free: %s", metric(each, "B").text, metric(most, "B").text,
        known ? metric((double)free_bytes, "B").text : "not known");
    if (known && (double)free_bytes < most)
        warn(app, "the disk has room for %s, checkpoints may take %s; lower -keep or free some",
             metric((double)free_bytes, "B").text, metric(most, "B").text);
}

static void print_tables(App *app) {
    const Options *o = &app->options;
    const GptSetup *setup = &app->setup;
    const GptConfig *config = &setup->config;
    print_data(app);

    say(app, "\nmodel");
    row(app, "shape", "%s of %zu channels, %s of %zu, ctx %zu, %s positions",
        counted(config->layers, "layer", "layers").text, config->channels,
        counted(config->heads, "head", "heads").text, config->channels / config->heads, config->ctx,
        o->position);
    row(app, "parameters", "%s", commas(gpt_parameter_count(config)).text);
    row(app, "weights", "%s", app->resume_from ? app->resume_from : app->model ? app->model : "new");

    const double flops = gpt_flops_per_token(config), tokens = (double)o->batch * (double)config->ctx;
    say(app, "\na step");
    row(app, "tokens", "%s: %s, %zu at once", commas((uint64_t)tokens).text,
        counted((uint64_t)o->batch, "sequence", "sequences").text, setup->B);
    row(app, "cost", "%s (6 N + 6 L T C = %s a token)", metric(flops * tokens, "FLOP").text,
        metric(flops, "FLOP").text);
    if (is_auto(o->steps))
        row(app, "length", "as many steps as fit into %g minutes: known after the first", o->minutes);
    else
        row(app, "length", "%s, %s tokens in all", counted((uint64_t)o->steps, "step", "steps").text,
            metric((double)o->steps * tokens, "").text);

    char device[128];
    app->ops->describe(app->stream, device, sizeof device);
    say(app, "\nkernels");
    row(app, "device", "%s, %s: %s", app->ops->name, o->precision, device);
    if (app->ranks.count > 1)
        row(app, "ranks", "%d on %s, %s of each step each", app->ranks.count,
            counted((uint64_t)app->ranks.hosts, "host", "hosts").text,
            counted(share_of_batch(app), "sequence", "sequences").text);
    row(app, "attention", "%s: %s", setup->attention->name, setup->attention->about);
    if (sgemm_warning()) row(app, "note", "%s", sgemm_warning());
    print_memory(app);
    print_disk(app);
    fputc('\n', app->report);
    fflush(app->report);
}

/* ---- watching: held-out loss ---- */

typedef struct Evaluation {
    double loss, bits_per_byte; /* nats a token; NAN where no target has a byte */
    uint64_t tokens;
} Evaluation;

/* The loss of the first eval_windows held-out windows. The same for any micro-batch and any number of ranks, since
 * it is a sum over tokens: the ranks take micro-batches in turn. Bits per byte: an end of a story costs bits and
 * has no bytes. False without an error where a stop was asked for of this rank or another (app->stop). */
static bool evaluate(App *app, Evaluation *result) {
    const size_t T = app->setup.config.ctx, B = app->setup.B, count = (size_t)app->ranks.count;
    const double begun = seconds_now();
    uint64_t bytes = 0, window = (uint64_t)app->ranks.rank * B;
    bool done = true;
    gpt_evaluate_begin(app->gpt);
    while (window < app->eval_windows && done && !stop_requested()) {
        const uint64_t left = app->eval_windows - window;
        const size_t rows = left < B ? (size_t)left : B;
        done = batches_get(app->windows, window, rows, app->inputs, app->targets, &app->err);
        if (!done) break;
        gpt_evaluate(app->gpt, app->inputs, app->targets, rows);
        for (size_t i = 0; i < rows * T; i++) bytes += app->token_bytes[app->targets[i]];
        window += count * B;
    }
    if (!all_ranks(app, done)) return false;
    const double ours[3] = {gpt_evaluate_sum(app->gpt), (double)bytes,
                            window < app->eval_windows ? stop_requested() : 0};
    double *all = xmalloc(3 * count * sizeof *all), sum = 0, all_bytes = 0;
    ranks_gather(&app->ranks, ours, 3, all);
    for (size_t k = 0; k < count; k++) {
        sum += all[3 * k], all_bytes += all[3 * k + 1];
        if (all[3 * k + 2] > app->stop) app->stop = (int)all[3 * k + 2];
    }
    free(all);
    if (app->stop) return false;
    result->tokens = app->eval_windows * T;
    result->loss = sum / (double)result->tokens;
    result->bits_per_byte = all_bytes > 0 ? sum / log(2) / all_bytes : NAN;
    app->pace.eval_seconds = seconds_now() - begun;
    return true;
}

/* ---- watching: stories ---- */

/* Stories as they are written, up to STORIES_AT_ONCE side by side. */
typedef struct Writer {
    App *app;
    FILE *out;                    /* shows the text as it comes, one story after the other; NULL: nowhere */
    size_t count, current, shown; /* of the stories side by side: how many, the one being shown, its bytes */
    uint64_t first;               /* the number of the first of them */
    bool ended[STORIES_AT_ONCE];
    Buffer text[STORIES_AT_ONCE];
} Writer;

/* Shows what is new of the current story, and once that has ended goes on to the next. Where nobody reads any
 * more, there is nothing left to do. */
static void show_stories(Writer *writer) {
    for (; writer->current < writer->count; writer->current++, writer->shown = 0) {
        const Buffer *text = &writer->text[writer->current];
        const bool ended = writer->ended[writer->current];
        const size_t ready = ended ? text->size : utf8_whole(text->data, text->size);
        if (writer->shown == 0 && ready > 0 && writer->first + writer->current > 0) fputc('\n', writer->out);
        if (ready > writer->shown) fwrite(text->data + writer->shown, 1, ready - writer->shown, writer->out);
        writer->shown = ready;
        if (ended) fputc('\n', writer->out);
        if (fflush(writer->out) != 0) {
            if (errno != EPIPE)
                fprintf(stderr, "train_gpt: error: cannot write to stdout: %s\n", strerror(errno));
            exit(EXIT_FAILED);
        }
        if (!ended) return;
    }
}

static void on_token(void *user, size_t sequence, uint32_t token) {
    Writer *writer = user;
    const Bpe *bpe = writer->app->bpe;
    if (token == bpe_end_of_text(bpe)) {
        writer->ended[sequence] = true;
    } else if (token < bpe_vocab_size(bpe)) {
        size_t size;
        const uint8_t *bytes = bpe_token_bytes(bpe, token, &size);
        buffer_append(&writer->text[sequence], bytes, size);
    }
    if (writer->out) show_stories(writer);
}

/* A story begins after the end of another: <|endoftext|>, then the prompt. */
static void encode_prompt(const App *app, Tokens *ids) {
    tokens_reserve(ids, 1);
    ids->ids[ids->count++] = bpe_end_of_text(app->bpe);
    const char *prompt = app->options.prompt;
    if (!prompt) return;
    BpeEncoder *encoder = bpe_encoder_new(app->bpe, 0);
    bpe_encode(encoder, (const uint8_t *)prompt, strlen(prompt), ids);
    bpe_encoder_free(encoder);
}

typedef void OnStory(App *app, const Buffer *text);

/* Writes the stories from number `first` up to `stories`, of at most max_tokens new tokens, each the prompt and
 * what follows; on_story (or NULL) gets them whole. False where a stop was asked for. */
static bool write_stories(App *app, uint64_t first, uint64_t stories, size_t max_tokens, FILE *out,
                          OnStory *on_story) {
    const Options *o = &app->options;
    const SampleSettings sampling = {.temperature = (float)o->temperature,
                                     .top_k = (int)o->top_k,
                                     .top_p = (float)o->top_p,
                                     .seed = (uint64_t)o->seed};
    Tokens prompt = {0};
    encode_prompt(app, &prompt);
    bool done = true;
    Writer writer = {.app = app, .out = out, .first = first};
    while (writer.first < stories && done) {
        const uint64_t left = stories - writer.first;
        writer.count = left < app->setup.cache_B ? (size_t)left : app->setup.cache_B;
        writer.current = writer.shown = 0;
        for (size_t i = 0; i < writer.count; i++) {
            writer.ended[i] = false, writer.text[i].size = 0;
            if (o->prompt) buffer_append_text(&writer.text[i], o->prompt);
        }
        done = generate(app->gpt, prompt.ids, prompt.count, writer.count, writer.first, max_tokens,
                        bpe_end_of_text(app->bpe), &sampling, on_token, &writer);
        for (size_t i = 0; i < writer.count; i++) writer.ended[i] = true; /* or cut at max_tokens */
        if (out) show_stories(&writer);
        for (size_t i = 0; i < writer.count && done && on_story; i++) on_story(app, &writer.text[i]);
        writer.first += writer.count;
    }
    for (size_t i = 0; i < STORIES_AT_ONCE; i++) buffer_free(&writer.text[i]);
    tokens_free(&prompt);
    return done;
}

/* ---- training: the run and its log ---- */

static void log_row(App *app, json_t *json) {
    if (!leads(app)) {
        json_decref(json);
        return;
    }
    if (!run_log(app->run, json, &app->err)) warn(app, "%s", app->err.text);
}

static void log_start(App *app) {
    const GptSetup *setup = &app->setup;
    const AttentionShape shape = attention_shape(setup);
    json_t *memory = json_object();
    for (size_t i = 0; i < app->plan.rows; i++)
        json_object_set_new(memory, app->plan.row[i].purpose,
                            json_integer((json_int_t)app->plan.row[i].bytes));
    json_object_set_new(memory, "total", json_integer((json_int_t)app->plan.total));
    log_row(app,
            json_pack("{s:s, s:I, s:s, s:i, s:o, s:{s:s, s:I, s:I}, s:o}", "type", "start", "time",
                      (json_int_t)time(NULL), "version", TRAIN_GPT_VERSION, "ranks", app->ranks.count,
                      "config", options_to_json(&app->options), "attention", "kernel", setup->attention->name,
                      "saved_bytes", (json_int_t)setup->attention->saved_bytes(&shape), "scratch_bytes",
                      (json_int_t)setup->attention->scratch_bytes(&shape), "memory_bytes", memory));
}

/* The most memory that the run held; on a GPU what is in use of it, by other programs too: ours only grows. */
static size_t peak_memory(const App *app) {
    if (!app->ops->memory) return memory_peak();
    size_t free_bytes, total_bytes;
    app->ops->memory(app->stream, &free_bytes, &total_bytes);
    return total_bytes - free_bytes;
}

/* Times in attention are means over the steps after the first that were timed. */
static void log_end(App *app, const char *reason) {
    const Pace *pace = &app->pace;
    const double steps = pace->attention_steps > 0 ? (double)pace->attention_steps : NAN;
    log_row(app, json_pack("{s:s, s:I, s:s, s:I, s:{s:o, s:o}}", "type", "end", "step",
                           (json_int_t)app->state.step, "reason", reason, "peak_memory_bytes",
                           (json_int_t)peak_memory(app), "attention", "forward_ms",
                           run_number(1e3 * pace->attention.forward / steps), "backward_ms",
                           run_number(1e3 * pace->attention.backward / steps)));
}

static void write_report(App *app) {
    if (leads(app) && !report_write(run_path(app->run), &app->err)) warn(app, "%s", app->err.text);
}

static bool open_run(App *app) {
    const Options *o = &app->options;
    bool resumed;
    app->run = run_open(o->run, o->resume ? RUN_RESUME : o->force ? RUN_FORCE : RUN_NEW, &resumed, &app->err);
    if (!app->run) return false;
    if (resumed && !app->settings)
        return error_set(&app->err,
                         "%s holds a run without run.json, which cannot go on; start over with -force",
                         run_path(app->run));
    return app->settings || write_settings(app);
}

/* A start that failed before it trained leaves what was there before, so that the corrected one is not refused
 * for a folder or for settings that only the failed one has made. */
static void undo_start(App *app) {
    if (!app->run || app->state.step > 0 || app->saved) return;
    if (app->settings) run_write_settings(app->run, app->settings, NULL);
    else run_undo(app->run);
}

/* ---- training: the schedule ---- */

/* Once the number of steps is known, so is what hangs on it; written into the run, so that a resume finds it.
 * times: how often in the run what was left open is done, in the order of list_chosen; NULL: as often as is
 * usual. */
static bool set_steps(App *app, int64_t steps, const double *times) {
    Options *o = &app->options;
    o->steps = steps;
    Chosen list[CHOSEN];
    list_chosen(o, list);
    for (size_t i = 0; i < CHOSEN; i++) {
        if (!is_auto(*list[i].value)) continue;
        json_array_append_new(app->chosen, json_string(list[i].key));
        /* With -minutes the first steps were taken before the number was known: in the usual warm-up. */
        const bool short_run = o->minutes == OPTION_AUTO && steps / 5 < DEFAULT_WARMUP;
        if (list[i].most == 0) *list[i].value = short_run ? steps / 5 : DEFAULT_WARMUP;
        else if (times) *list[i].value = (int64_t)ceil((double)steps / times[i]);
        else *list[i].value = (steps + list[i].most - 1) / list[i].most;
    }
    app->state.total_steps = (uint64_t)steps;
    return write_settings(app);
}

/* Linear to -lr, then a cosine to -min-lr (Loshchilov and Hutter 2017): a function of step, -steps and -warmup
 * alone. With -minutes the cosine begins only after the steps that are timed to find -steps, whatever the
 * warm-up, so that the rate does not jump when they are found. */
static double learning_rate(const Options *o, uint64_t step) {
    const double warmup = is_auto(o->warmup) ? DEFAULT_WARMUP : (double)o->warmup, at = (double)step;
    if (at < warmup) return o->lr * (at + 1) / warmup;
    const double timed = o->minutes == OPTION_AUTO ? 0 : UNTIMED_DIRECT + TIMED_STEPS;
    const double flat = warmup < timed ? timed : warmup; /* the step up to which -lr is kept */
    if (at < flat || is_auto(o->steps)) return o->lr;
    const double share = (at - flat) / ((double)o->steps - flat);
    return o->min_lr + 0.5 * (o->lr - o->min_lr) * (1 + cos(acos(-1) * (share < 1 ? share : 1)));
}

/* How long writing one set of stories takes, from a few tokens that nobody sees. */
static double time_stories(App *app) {
    const Options *o = &app->options;
    if (o->samples == 0) return 0;
    const size_t few = 8, tokens = (size_t)o->sample_tokens;
    const double begun = seconds_now();
    const uint64_t once = app->setup.cache_B;
    write_stories(app, 0, once, few, NULL, NULL);
    const double each = (seconds_now() - begun) / (double)(few * once);
    return each * (double)tokens * (double)o->samples;
}

static double mean_step_seconds(const App *app) {
    return app->pace.steps > 1 ? app->pace.seconds / (double)(app->pace.steps - 1) : NAN;
}

/* What rank 0 has settled by the clock, so that no rank settles it otherwise. */
static bool share_schedule(App *app, bool done) {
    Options *o = &app->options;
    if (!all_ranks(app, done)) return false;
    int64_t *const shared[] = {&o->steps,  &o->eval_every, &o->sample_every, &o->checkpoint_every,
                               &o->warmup, &o->eval_tokens};
    enum { SHARED = sizeof shared / sizeof shared[0] };
    int64_t values[SHARED + 1];
    for (size_t i = 0; i < SHARED; i++) values[i] = *shared[i];
    values[SHARED] = (int64_t)app->eval_windows;
    Buffer bytes = {0};
    buffer_append(&bytes, values, sizeof values);
    ranks_tell(&app->ranks, &bytes);
    memcpy(values, bytes.data, sizeof values);
    buffer_free(&bytes);
    for (size_t i = 0; i < SHARED; i++) *shared[i] = values[i];
    app->eval_windows = (uint64_t)values[SHARED];
    if (!is_auto(o->steps)) app->state.total_steps = (uint64_t)o->steps;
    return true;
}

/* -minutes, before the first evaluation: how many windows it may take, so that all evaluations together take at
 * most their share of the time. It stays so for the run, since losses of different tokens do not compare. */
static bool fit_evaluation(App *app) {
    Options *o = &app->options;
    const size_t T = app->setup.config.ctx, B = app->setup.B;
    const uint64_t all = app->eval_windows;
    const size_t rows = all < B ? (size_t)all : B;
    double begun = 0;
    gpt_evaluate_begin(app->gpt);
    for (int i = 0; i <= TIMED_EVALUATIONS; i++) { /* the first warms up */
        if (!batches_get(app->windows, 0, rows, app->inputs, app->targets, &app->err)) return false;
        gpt_evaluate(app->gpt, app->inputs, app->targets, rows);
        if (i == 0) gpt_evaluate_sum(app->gpt), begun = seconds_now();
    }
    gpt_evaluate_sum(app->gpt); /* waits for a device that runs ahead */
    const double each = (seconds_now() - begun) / (double)(TIMED_EVALUATIONS * rows) / app->ranks.count;
    /* One at the start, then as usual; at least one at the start and one at the end. */
    const double fit = EVALUATION_SHARE * 60 * o->minutes / each;
    const double usual = fit / (1 + (o->eval_every == 0 ? 1 : EVALUATIONS));
    const double enough = ceil((double)ENOUGH_EVAL_TOKENS / (double)T),
                 most = fmax(usual, fmin(enough, fit / 2));
    if (most >= (double)all) return true;
    app->eval_windows = most < 1 ? 1 : (uint64_t)most;
    o->eval_tokens = (int64_t)(app->eval_windows * T);
    say(app, "evaluations take %s held-out tokens each, so that they fit into a fifth of %g minutes",
        commas((uint64_t)o->eval_tokens).text, o->minutes);
    return write_settings(app);
}

static uint64_t untimed_steps(const App *app) {
    return app->ops->replay ? UNTIMED_DIRECT : UNTIMED_STEPS;
}

/* -minutes: after some steps have been timed, how many fit. What comes between steps is counted in, and at
 * the end: an evaluation, stories, a checkpoint (for a disk of 200 MB/s). */
static bool fit_steps(App *app) {
    Options *o = &app->options;
    const Pace *pace = &app->pace;
    if (stop_requested()) return true; /* a stop would cut short what is timed here */
    const double timed = (double)pace->steps - (double)untimed_steps(app), budget = 60 * o->minutes;
    const bool enough = timed >= 3 && (timed >= TIMED_STEPS || pace->timed >= 0.02 * budget);
    const double late = timed > 0 ? 0.4 : pace->steps > 1 ? 0.6 : 1;
    if (!enough && seconds_now() - app->started < late * budget) return true;

    /* Where even the first steps have taken most of the time, they must do. */
    double step = timed > 0         ? pace->timed / timed
                  : pace->steps > 1 ? mean_step_seconds(app)
                                    : app->state.seconds / (double)app->state.step;
    const double stories = time_stories(app);
    /* Forward is a third of a step, where no evaluation has been timed yet. */
    const double evaluation = pace->eval_seconds > 0
                                  ? pace->eval_seconds
                                  : step / 3 * (double)app->eval_windows / (double)o->batch;
    const double checkpoint = (double)checkpoint_bytes(&app->setup.config) / 2e8;
    const double seconds[] = {evaluation, stories,
                              checkpoint}; /* of one of them; in the order of list_chosen */
    enum { EVENTS = sizeof seconds / sizeof seconds[0] };
    Chosen list[CHOSEN];
    list_chosen(o, list);
    double left = 0.98 * budget - (seconds_now() - app->started), times[EVENTS];
    for (size_t i = 0; i < EVENTS; i++) {
        const int64_t every = *list[i].value, most = list[i].most;
        double fit = floor(0.2 * left / seconds[i]); /* a fifth of the time, not more */
        if (i == 0) fit = floor(EVALUATION_SHARE * budget / seconds[i]) - 1; /* one is done */
        times[i] = !is_auto(every) || fit < 1 ? 1 : fit < (double)most ? fit : (double)most;
        if (every > 0) step += seconds[i] / (double)every;
    }
    for (size_t i = 0; i < EVENTS; i++) left -= seconds[i] * times[i];
    if (!set_steps(app, (int64_t)app->state.step + (left > 0 ? (int64_t)(left / step) : 0), times))
        return false;
    say(app, "%s into %g minutes", counted((uint64_t)o->steps, "step fits", "steps fit").text, o->minutes);
    return true;
}

/* ---- training: a step ---- */

static double step_tokens(const App *app) {
    return (double)app->options.batch * (double)app->setup.config.ctx;
}

/* The steps that are left, and the evaluations between them; NaN where it is not known yet. */
static double seconds_left(const App *app) {
    const Options *o = &app->options;
    if (is_auto(o->steps)) return NAN;
    const double steps = (double)o->steps - (double)app->state.step;
    const double evaluations = o->eval_every > 0 ? steps / (double)o->eval_every : 1;
    return steps * mean_step_seconds(app) + evaluations * app->pace.eval_seconds;
}

/* The share of the devices' peak that a step of so many seconds reaches; NaN where the peak is not known. */
static double mfu(const App *app, double seconds) {
    const double one = app->ops->peak_flops ? app->ops->peak_flops(app->stream) : 0,
                 peak = one * app->ranks.count;
    return peak > 0 ? gpt_flops_per_token(&app->setup.config) * step_tokens(app) / seconds / peak : NAN;
}

/* On a terminal each step's line takes the place of the one before, unless that is kept: one a second, or
 * every ten steps, whichever is rarer. In a file or pipe only those are printed. */
static void print_step(App *app, const StepState *step, double loss, double seconds) {
    const Options *o = &app->options;
    Pace *pace = &app->pace;
    const double now = seconds_now();
    const bool last = (int64_t)app->state.step == o->steps;
    const bool keep = pace->steps == 1 || last ||
                      (now - pace->last_line >= 1 && app->state.step - pace->last_kept >= 10);
    if (keep) pace->last_line = now, pace->last_kept = app->state.step;
    if (!keep && !app->in_place) return;
    char total[32] = "?", share[24] = "", left[64] = ""; /* what is not known is left out */
    if (!is_auto(o->steps)) snprintf(total, sizeof total, "%" PRId64, o->steps);
    if (isfinite(mfu(app, seconds))) snprintf(share, sizeof share, "  MFU %.1f %%", 100 * mfu(app, seconds));
    if (isfinite(seconds_left(app)))
        snprintf(left, sizeof left, "  %s left", duration(seconds_left(app)).text);
    fprintf(app->report, "%sstep %" PRIu64 "/%s  loss %.4f  lr %.2e  norm %.3f  %.1f ms  %s tokens/s%s%s%s",
            app->in_place ? "\r\033[K" : "", app->state.step, total, loss, (double)step->lr,
            (double)step->grad_norm, 1e3 * seconds, commas((uint64_t)(step_tokens(app) / seconds)).text,
            share, left, keep ? "\n" : "");
    app->line_open = !keep;
    fflush(app->report);
}

/* The device left an update out that was not finite. Once is bad luck; again and again the weights are. */
static bool check_finite(App *app, const StepState *step) {
    if (!step->skip) {
        app->state.bad_steps = 0;
        return true;
    }
    size_t tensors;
    const Parameter *table = gpt_table(app->gpt, &tensors);
    const bool known = step->bad_tensor >= 0 && (size_t)step->bad_tensor < tensors;
    char what[128] = "the loss";
    if (known) snprintf(what, sizeof what, "the gradient of %s", table[step->bad_tensor].name);
    if (++app->state.bad_steps < MAX_BAD_STEPS) {
        warn(app, "step %" PRIu64 ": %s is not finite; the step's update was left out", app->state.step,
             what);
        return true;
    }
    app->told = true; /* their sums are the same */
    return error_set(&app->err,
                     "step %" PRIu64
                     ": %s is not finite, as in the %d before; start a new run with a lower -lr (%g), from "
                     "this one's best model by -load or from none",
                     app->state.step, what, MAX_BAD_STEPS - 1, app->options.lr);
}

static bool take_step(App *app) {
    const Options *o = &app->options;
    const size_t T = app->setup.config.ctx, B = app->setup.B;
    const uint64_t batch = (uint64_t)o->batch;
    const uint64_t rows = share_of_batch(app),
                   first = (uint64_t)app->ranks.rank * rows; /* of this rank, within the step */
    const AdamW adamw = {.beta1 = (float)o->beta1,
                         .beta2 = (float)o->beta2,
                         .epsilon = 1e-8f,
                         .weight_decay = (float)o->weight_decay,
                         .clip = (float)o->clip};
    const double begun = seconds_now();

    ranks_in_steps(&app->ranks, true);
    gpt_step_begin(app->gpt, app->state.step, (float)learning_rate(o, app->state.step));
    for (uint64_t at = first; at < first + rows; at += B) {
        const size_t micro = first + rows - at < B ? (size_t)(first + rows - at) : B;
        if (!batches_get(app->batches, app->state.step * batch + at, micro, app->inputs, app->targets,
                         &app->err))
            return false;
        if (at + micro == first + rows) ranks_average_begin(&app->ranks, stop_requested());
        gpt_forward_backward(app->gpt, app->inputs, app->targets, micro, at, batch * T);
    }
    ranks_average_end(&app->ranks);
    gpt_step_end(app->gpt, adamw);
    app->stop = ranks_step_done(&app->ranks);
    const StepState step = gpt_step_state(app->gpt);
    const AttentionTimes attention = attention_take_times();

    const double seconds = seconds_now() - begun, loss = step.loss_sum / (double)(batch * T);
    app->state.step++;
    app->state.updates = step.updates;
    app->state.tokens += batch * T;
    app->state.seconds += seconds;
    app->state.eval_loss = NAN;
    app->state.cut_short = app->state.stories = 0;
    if (++app->pace.steps > 1) {
        app->pace.seconds += seconds;
        if (app->pace.steps <= DIRECT_STEPS || !app->ops->replay) {
            app->pace.attention.forward += attention.forward;
            app->pace.attention.backward += attention.backward;
            app->pace.attention_steps++;
        }
    }
    if (app->pace.steps == DIRECT_STEPS && app->ops->replay) {
        attention_stop_timing();
        gpt_record(app->gpt, true);
    }
    if (app->pace.steps > untimed_steps(app)) app->pace.timed += seconds;
    log_row(app, json_pack("{s:s, s:I, s:o, s:f, s:o, s:f, s:f, s:o, s:I}", "type", "step", "step",
                           (json_int_t)app->state.step, "loss", run_number(loss), "lr", (double)step.lr,
                           "grad_norm", run_number((double)step.grad_norm), "ms", 1e3 * seconds,
                           "tokens_per_s", (double)(batch * T) / seconds, "mfu",
                           run_number(mfu(app, seconds)), "tokens", (json_int_t)app->state.tokens));
    print_step(app, &step, loss, seconds);
    return check_finite(app, &step);
}

/* ---- training: what happens between steps ---- */

static bool is_due(const App *app, int64_t every) {
    const int64_t step = (int64_t)app->state.step;
    return step == app->options.steps || (every > 0 && step % every == 0);
}

/* False only for an error; an evaluation that a signal broke off has no result. */
static bool watch_loss(App *app) {
    Evaluation result;
    ranks_in_steps(&app->ranks, false);
    if (!evaluate(app, &result)) return app->stop != 0;
    app->state.eval_loss = result.loss;
    const double floor = app->has_facts ? app->facts.heldout_floor : NAN;
    log_row(app,
            json_pack("{s:s, s:I, s:o, s:o, s:I, s:o}", "type", "eval", "step", (json_int_t)app->state.step,
                      "loss", run_number(result.loss), "bits_per_byte", run_number(result.bits_per_byte),
                      "tokens", (json_int_t)result.tokens, "floor", run_number(floor)));
    char beside[64] = "";
    if (isfinite(floor)) snprintf(beside, sizeof beside, "  floor %.4f", floor);
    say(app, "step %" PRIu64 "  held-out loss %.4f nats/token  %.3f bits/byte  over %s tokens%s",
        app->state.step, result.loss, result.bits_per_byte, commas(result.tokens).text, beside);
    write_report(app);
    return true;
}

/* Text as a terminal may see it: a control character of a story (below U+0020, U+007F to U+009F) does not
 * control the terminal, and what is no UTF-8 is no text; U+FFFD stands for both. */
static void watch_story(App *app, const Buffer *text) {
    static const char replacement[] = "\xEF\xBF\xBD";
    finish_line(app);
    fputc('\n', app->report);
    json_t *valid = run_text(text->data, text->size);
    const uint8_t *bytes = (const uint8_t *)json_string_value(valid);
    for (size_t i = 0, size = json_string_length(valid); i < size; i++) {
        const bool c1 = bytes[i] == 0xC2 && bytes[i + 1] < 0xA0; /* of two bytes */
        if (c1) i++;
        if (c1 || (bytes[i] < 0x20 && bytes[i] != '\n' && bytes[i] != '\t') || bytes[i] == 0x7F)
            fputs(replacement, app->report);
        else fputc(bytes[i], app->report);
    }
    json_decref(valid);
    say(app, "\n");
    const char *prompt = app->options.prompt ? app->options.prompt : "";
    log_row(app, json_pack("{s:s, s:I, s:s, s:o}", "type", "sample", "step", (json_int_t)app->state.step,
                           "prompt", prompt, "text", run_text(text->data, text->size)));
    app->state.stories++;
}

/* The lowest held-out loss so far, or the first. */
static bool is_best(const TrainState *state) {
    return state->eval_loss < state->best_loss || (isnan(state->best_loss) && isfinite(state->eval_loss));
}

/* Saves where the run stands. On failure the old checkpoints are as they were, and so is the state. */
static bool save(App *app) {
    const Options *o = &app->options;
    if (!leads(app)) return true;
    ranks_in_steps(&app->ranks, false);
    if (app->saved && app->saved_step == app->state.step) return true;
    if (app->state.bad_steps >= MAX_BAD_STEPS)
        return error_set(&app->err, "step %" PRIu64 " was not finite, so that its model is not saved",
                         app->state.step);
    TrainState state = app->state;
    if (is_best(&state)) state.best_loss = state.eval_loss, state.best_step = state.step;
    const CheckpointFile files[] = {{"merges.txt", app->merges.data, app->merges.size},
                                    {"tokenizer.json", app->tokenizer_json.data, app->tokenizer_json.size}};
    char *checkpoints = run_file(app->run, "checkpoints");
    if (!run_log_sync(app->run, &app->err)) warn(app, "%s", app->err.text);
    const bool done = folder_make(checkpoints, &app->err) &&
                      checkpoint_save(checkpoints, app->gpt, &state, files, 2, &app->err);
    if (done) {
        app->state = state;
        app->saved = true, app->saved_step = state.step;
        Error err;
        if (!checkpoint_prune(checkpoints, (size_t)o->keep, state.best_step, &err)) warn(app, "%s", err.text);
    }
    free(checkpoints);
    return done;
}

/* After a step, or after a resume what a stop has left of it: an evaluation, stories, a checkpoint, as they are
 * due. The checkpoint comes last, so that it knows its own loss; a new best is saved whenever it is found. Not
 * while steps are left out: their models are the one before, and would push older ones out. */
static bool watch(App *app) {
    const Options *o = &app->options;
    TrainState *state = &app->state;
    const bool evaluate_now = is_due(app, o->eval_every) && isnan(state->eval_loss);
    const bool write_now = is_due(app, o->sample_every) && state->stories < (uint64_t)o->samples;
    const bool resumed = state->cut_short;
    state->cut_short = evaluate_now || write_now; /* until it is done */
    if (evaluate_now) {
        if (!watch_loss(app)) return false;
        if (agreed_stop(app)) return true; /* the end saves */
    }
    if (write_now) {
        ranks_in_steps(&app->ranks, false);
        const bool whole = !leads(app) || write_stories(app, state->stories, (uint64_t)o->samples,
                                                        (size_t)o->sample_tokens, NULL, watch_story);
        agree_on_stop(app);
        if (!whole) return true;
    }
    state->cut_short = state->stories = 0;
    const bool last = (int64_t)state->step == o->steps;
    const bool best = o->checkpoint_every > 0 && is_best(state);
    const bool due = is_due(app, o->checkpoint_every) || best;
    /* The last save is the end's, which fails if it does. */
    if (!last && (resumed || (due && state->bad_steps == 0)) && !save(app))
        warn(app, "%s; the training goes on", app->err.text);
    return true;
}

/* Steps, until the last, a stop, or an error. */
static bool train_loop(App *app) {
    const Options *o = &app->options;
    if (app->state.step == 0) {
        if (is_auto(o->steps) && is_auto(o->eval_tokens) &&
            !share_schedule(app, !leads(app) || fit_evaluation(app)))
            return false;
        if (!watch_loss(app)) return false;
    }
    if (app->state.cut_short) {
        app->saved = false; /* with what is done now, it is another state of that step */
        if (!watch(app)) return false;
    }
    atomic_store(&taking_steps, leads(app));
    while (is_auto(o->steps) || (int64_t)app->state.step < o->steps) {
        if (agreed_stop(app)) return true;
        if (!take_step(app)) return false;
        if (is_auto(o->steps) && !share_schedule(app, !leads(app) || fit_steps(app))) return false;
        if (!watch(app)) return false;
    }
    return true;
}

/* ---- training: a run from start to end ---- */

/* Weights: of the checkpoint to go on with, of -load, or new ones. */
static bool start_state(App *app) {
    const Options *o = &app->options;
    app->state = (TrainState){.eval_loss = NAN, .best_loss = NAN};
    if (app->resume_from) {
        TrainState state;
        if (!checkpoint_load(app->resume_from, app->gpt, &state, &app->err)) return false;
        app->state = state;
        app->saved = true, app->saved_step = app->state.step;
        say(app, "going on after step %s of %s", commas(app->state.step).text, app->resume_from);
    } else if (app->model) {
        if (!checkpoint_load(app->model, app->gpt, NULL, &app->err)) return false;
    } else {
        gpt_init_weights(app->gpt, (uint64_t)o->seed);
    }
    if (!leads(app)) return true;
    if (app->resume_from) {
        const RunWatched watched = {!isnan(app->state.eval_loss), app->state.stories};
        return run_log_cut(app->run, app->state.step, app->state.cut_short ? &watched : NULL, &app->err);
    }
    /* A start that did not get to a checkpoint left nothing in the log that is not done again. */
    char *log = run_file(app->run, "log.jsonl");
    remove(log);
    free(log);
    return true;
}

static const char *signal_name(int number) {
    return number == SIGINT ? "SIGINT" : number == SIGTERM ? "SIGTERM" : "SIGUSR1";
}

/* Where the run is, and what to type next. */
static void print_next(App *app) {
    if (!leads(app)) return;
    char *run = shell_quoted(run_path(app->run)), *program = shell_quoted(app->program);
    say(app, "run      %s", run);
    if (app->saved) {
        say(app, "report   %s/report.html", run);
        say(app, "stories  %s -generate -load %s", program, run);
        say(app, "loss     %s -evaluate -load %s", program, run);
    }
    char more[48] = ""; /* a run that is done goes on only for more steps */
    if (app->saved && (int64_t)app->state.step == app->options.steps)
        snprintf(more, sizeof more, " -steps %" PRId64, 2 * app->options.steps);
    say(app, "go on    %s -resume -run %s%s", program, run, more);
    free(program);
    free(run);
}

/* The end: what is not saved is, the log gets its last row, the user what to do next. */
static bool finish(App *app, bool trained) {
    ranks_in_steps(&app->ranks, false);
    const bool same = !trained || check_same_weights(app);
    trained = trained && same;
    const Error cause = app->err;
    bool saved = app->state.step == 0 || (same && save(app));
    if (trained) saved = all_ranks(app, saved);
    const int signal_number = agreed_stop(app); /* alone, also one that came while it was saved */
    if (!trained) app->err = cause; /* what ended the run, whether or not it could be saved */
    const Error error = app->err;
    char *reason = !trained || !saved ? xformat("failed: %s", error.text)
                   : signal_number    ? xstrdup(signal_name(signal_number))
                                      : xstrdup("done");
    log_end(app, reason);
    write_report(app);
    free(reason);
    app->err = error;
    if (!trained || !saved) return false;

    if (signal_number) {
        say(app, "stopped by %s after step %s%s", signal_name(signal_number), commas(app->state.step).text,
            app->state.step > 0 ? ", which is saved" : "");
        app->stopped = 128 + signal_number;
    } else {
        const double step = mean_step_seconds(app);
        say(app, "done in %s, %s%s%s%s", duration(seconds_now() - app->started).text,
            counted(app->pace.steps, "step", "steps").text, isfinite(step) ? ", " : "",
            isfinite(step) ? commas((uint64_t)(step_tokens(app) / step)).text : "",
            isfinite(step) ? " tokens/s after the first" : "");
    }
    print_next(app);
    return true;
}

/* From a plan that fits to the end of the run; the run and its data are open. */
static bool train_model(App *app) {
    Options *o = &app->options;
    app->setup.attention = attention_timed(app->setup.attention, app->ops);
    if (!all_ranks(app, make_model(app) && start_state(app)) || !check_same_weights(app)) return false;
    if (!(is_auto(o->steps) ? write_settings(app) : set_steps(app, o->steps, NULL))) return false;
    if (!is_auto(o->steps) && (int64_t)app->state.step >= o->steps && !app->state.cut_short) {
        say(app, "nothing is left to do: the run has taken its %s steps", commas(app->state.step).text);
        /* The log was cut back to the last checkpoint, and a crash may have come before these two. */
        log_end(app, "done");
        write_report(app);
        print_next(app);
        return true;
    }
    log_start(app);
    ranks_attach(&app->ranks, app->gpt);
    const uint64_t batch = (uint64_t)o->batch, share = share_of_batch(app), B = app->setup.B,
                   first = app->state.step * batch + (uint64_t)app->ranks.rank * share;
    /* Alone all sequences follow one another, and no more need to lie ready than are taken at once. */
    if (app->ranks.count == 1) batches_read_ahead(app->batches, first, B, B);
    else batches_read_ahead(app->batches, first, share, batch);
    return finish(app, train_loop(app));
}

/* What training starts from, checked as far as it can be without reading text or making a folder. */
static bool find_inputs(App *app) {
    const Options *o = &app->options;
    /* A run that goes on has its tokens already, and can be moved away from the text. */
    const bool found = app->settings ||
                       (check_path(app, "data", o->data) && check_path(app, "heldout", o->heldout) &&
                        check_path(app, "tokenizer", o->tokenizer));
    if (!found || (!app->stream && !open_devices(app)) || !find_tokenizer(app)) return false;
    if (o->load && !app->resume_from) {
        app->model = find_model(app, o->load);
        if (!app->model || !take_model(app)) return false;
    }
    if (!settle_rates(app)) return false;
    return !names_shards(o->data) || open_shards(app, o->data, o->heldout);
}

/* Windows to train on, the plan, and memory that the process needs besides. Once more after a first plan: the text
 * may not have given as large a vocabulary as was asked for. */
static bool plan_training(App *app) {
    Options *o = &app->options;
    if (!open_windows(app, DEFAULT_EVAL_TOKENS) || !plan_model(app, true, share_of_batch(app)) ||
        !memory_plan_process(&app->setup, &app->plan, &app->err))
        return false;
    o->micro = (int64_t)app->setup.B, o->attention = app->setup.attention->name;
    return true;
}

/* Rank 0's way to the first step. What needs no folder comes before one is made, so that a mistake leaves none
 * behind. */
static bool lead_start(App *app) {
    const Options *o = &app->options;
    if (!find_inputs(app) || (!o->tokenize && !plan_model(app, true, share_of_batch(app)))) return false;
    if (o->dry_run)
        return (!app->train || open_windows(app, DEFAULT_EVAL_TOKENS)) &&
               memory_plan_process(&app->setup, &app->plan, &app->err);
    const bool done = open_run(app) && open_data(app);
    if (!done && stop_requested()) app->code = 128 + stop_requested();
    if (done) app->folder = xstrdup(run_path(app->run));
    return done && (o->tokenize || plan_training(app));
}

/* The other ranks' way there: with rank 0's settings, on the tokens that it made or found. */
static bool follow(App *app) {
    Options *o = &app->options;
    const int64_t threads = o->threads;
    if (!options_resume(o, json_object_get(app->lead, "settings"), &app->err)) return false;
    o->threads = threads;
    app->folder = xstrdup(json_string_value(json_object_get(app->lead, "folder")));
    const char *model = json_string_value(json_object_get(app->lead, "model"));
    if (model) app->model = xstrdup(model);
    char *tokens = xformat("%s/tokens", app->folder), *train = xformat("%s/train-*.bin", tokens),
         *heldout = xformat("%s/heldout-*.bin", tokens), *merges = xformat("%s/merges.txt", tokens);
    const bool own = names_shards(o->data);
    bool done = load_tokenizer(app, merges) &&
                open_shards(app, own ? o->data : train, own ? o->heldout : heldout);
    if (!done) {
        const Error cause = app->err;
        error_set(&app->err, "%s; -run and -data must lie on a file system that all hosts share", cause.text);
    }
    free(merges);
    free(heldout);
    free(train);
    free(tokens);
    return done && plan_training(app);
}

/* Every rank to where it can make its model, on the same tokens. */
static bool follow_start(App *app) {
    if (app->ranks.count == 1) return true;
    json_t *ours = leads(app) ? json_pack("{s:o, s:s, s:s?}", "settings", options_to_json(&app->options),
                                          "folder", app->folder, "model", app->model)
                              : NULL;
    if (!tell_ranks(app, ours) || !all_ranks(app, leads(app) || follow(app))) return false;
    const BpeFingerprint tokenizer = bpe_fingerprint(app->bpe);
    char text[160];
    snprintf(text, sizeof text, "%" PRIu64 " bytes, CRC-32 %08" PRIx32, (uint64_t)tokenizer.length,
             tokenizer.crc32);
    if (!same_on_ranks(app, "the tokenizer", text, "use one run folder on a shared file system"))
        return false;
    snprintf(text, sizeof text, "training %08" PRIx32 ", held-out %08" PRIx32 ", %" PRIu64 " windows of it",
             shards_identity(app->train), shards_identity(app->heldout), app->eval_windows);
    return same_on_ranks(app, "the tokens", text,
                         "use the same -data and one run folder on a shared file system");
}

static bool train(App *app) {
    const Options *o = &app->options;
    app->report = leads(app) ? stdout : app->report;
    /* mpirun gives its processes a terminal even where its own output goes into a file. */
    app->in_place = app->ranks.count == 1 && isatty(STDOUT_FILENO);
    if (!check_same_start(app) || !share_run_settings(app) ||
        !all_ranks(app, settle_settings(app) && check_share(app)) ||
        (app->ranks.count > 1 && !open_devices(app)))
        return false;
    bool done = all_ranks(app, !leads(app) || lead_start(app));
    if (done && o->dry_run) {
        if (leads(app)) print_tables(app);
    } else if (done && o->tokenize) {
        print_data(app);
        print_next(app);
    } else if (done) {
        done = follow_start(app);
        if (done && leads(app)) print_tables(app);
        done = done && train_model(app);
    }
    if (!done) undo_start(app);
    return done;
}

/* ---- instead of training: attention backends side by side ---- */

/* Notes which of them cannot run here, and why: nothing is allocated yet. That none can is an error. */
static bool plan_backends(App *app, Comparison *comparison) {
    const GptConfig config = model_config(app);
    const AttentionShape usual = {.B = 1, .T = 1, .H = 1, .D = 64, .training = true};
    size_t can_run = 0;
    if (!gpt_check_config(&config, &app->err)) return app->code = EXIT_USAGE, false;
    for (size_t i = 0; i < comparison->count; i++) {
        CompareBackend *backend = &comparison->backend[i];
        app->options.attention = backend->name;
        if (!attention_find(backend->name, app->ops->name, &usual, &app->err))
            return app->code = EXIT_USAGE, error_prefix(&app->err, "-compare");
        if (plan_model(app, true, (size_t)app->options.batch)) can_run++;
        else backend->refusal = app->err;
    }
    if (can_run == 0)
        return error_prefix(&app->err, "-compare: none of the backends can run; %s",
                            comparison->backend[comparison->count - 1].name);
    app->code = EXIT_FAILED; /* that one could not is no wrong usage */
    for (size_t i = 0; i < comparison->count; i++)
        if (comparison->backend[i].refusal.text[0])
            say(app, "%s: %s", comparison->backend[i].name, comparison->backend[i].refusal.text);
    return true;
}

/* The shards that the runs share are made here, unless -data names some. What one of them can be refused for
 * is found out before. */
static bool compare_backends(App *app) {
    const Options *o = &app->options;
    Comparison comparison;
    if (!compare_list(&comparison, o->compare, &app->err)) return app->code = EXIT_USAGE, false;
    app->report = stdout;
    app->in_place = isatty(STDOUT_FILENO);
    bool done = settle_settings(app) && find_inputs(app) && plan_backends(app, &comparison);
    char *folder = done ? compare_folder(o->run, &app->err) : NULL;
    char *tokens = folder && !names_shards(o->data) ? xformat("%s/tokens", folder) : NULL;
    done = folder && (!tokens || make_tokens(app, tokens));
    if (!done && stop_requested()) app->code = 128 + stop_requested();
    if (folder && !done) { /* text that cannot be used leaves nothing behind */
        folder_remove(tokens, NULL);
        rmdir(folder);
    }
    if (done) {
        finish_line(app);
        fflush(app->report); /* before others write there */
        char *data = tokens ? xformat("%s/train-*.bin", tokens) : NULL;
        char *heldout = tokens ? xformat("%s/heldout-*.bin", tokens) : NULL;
        char *eval_tokens = xformat("%d", DEFAULT_EVAL_TOKENS);
        char *more[7] = {NULL};
        size_t n = 0;
        if (tokens) more[n++] = "-data", more[n++] = data, more[n++] = "-heldout", more[n++] = heldout;
        /* With -minutes each would choose for itself, and losses of different tokens do not compare. */
        if (!options_given("eval-tokens")) more[n++] = "-eval-tokens", more[n++] = eval_tokens;
        if (tokens) comparison.floor = app->facts.heldout_floor;
        done = compare_train(&comparison, folder, app->argc, app->argv, more, &app->err);
        free(eval_tokens);
        free(heldout);
        free(data);
    }
    if (done) {
        compare_show(&comparison, app->report);
        done = compare_write(&comparison, folder, &app->err);
    }
    if (done) {
        say(app, "all of it in %s/compare.json", folder);
        if (comparison.stopped) app->stopped = 128 + comparison.stopped;
        for (size_t i = 0; i < comparison.count && done; i++)
            if (comparison.backend[i].failed)
                done = error_set(&app->err, "-compare: %s %s", comparison.backend[i].name,
                                 comparison.backend[i].refusal.text);
    }
    compare_free(&comparison);
    free(tokens);
    free(folder);
    return done;
}

/* ---- instead of training: with a model ---- */

/* A model to use, not to train: that of -load, of -run, or of the newest run; *from is which of them. rows:
 * sequences to take at once at most; 0: as many as the loss is taken of at once. */
static bool load_model(App *app, size_t rows, const char **from) {
    const Options *o = &app->options;
    if (!settle_settings(app)) return false;
    *from = o->load ? o->load : o->run;
    if (!*from) *from = app->newest_run = run_newest(&app->err);
    if (*from) app->model = find_model(app, *from);
    if (!app->model || !take_model(app) || !open_device(app)) return false;
    if (rows == 0) rows = o->ctx < MICRO_TOKENS ? MICRO_TOKENS / (size_t)o->ctx : 1;
    if (!plan_model(app, false, rows) || !make_model(app)) return false;
    if (!checkpoint_load(app->model, app->gpt, NULL, &app->err)) return false;
    say(app, "model %s: %s parameters", app->model, commas(gpt_parameter_count(&app->setup.config)).text);
    return true;
}

/* Stories on stdout, and nothing else there. */
static bool generate_stories(App *app) {
    const Options *o = &app->options;
    const char *from;
    if (!load_model(app, 1, &from)) return false;
    Tokens prompt = {0};
    encode_prompt(app, &prompt);
    if (prompt.count >= app->setup.config.ctx && app->setup.config.ctx > 1)
        warn(app, "the prompt has %zu tokens; of them the model sees the last %zu (-ctx %zu)", prompt.count,
             app->setup.config.ctx - 1, app->setup.config.ctx);
    tokens_free(&prompt);
    write_stories(app, 0, (uint64_t)o->samples, (size_t)o->sample_tokens, stdout, NULL);
    if (stop_requested()) app->stopped = 128 + stop_requested();
    return true;
}

/* -evaluate -heldout TEXT: into shards in a folder of their own, which is removed once they are open. */
static bool open_heldout_text(App *app, const char *path) {
    const char *temporary = getenv("TMPDIR");
    char *folder = xformat("%s/train_gpt-XXXXXX", temporary && *temporary ? temporary : "/tmp");
    bool done = check_path(app, "heldout", path);
    if (done && !mkdtemp(folder))
        done = error_set(&app->err,
                         "cannot make a temporary folder %s: set TMPDIR to one that can be written", folder);
    if (done) {
        char *tokens = xformat("%s/tokens", folder), *pattern = xformat("%s/heldout-*.bin", tokens);
        const DataSource source = {.data = path, .heldout = path, .threads = (int)app->options.threads};
        DataFacts facts;
        done = data_write_shards(&source, app->bpe, tokens, &facts, &app->err);
        if (done) app->heldout = shards_open(pattern, app->bpe, &app->err);
        app->scratch = xstrdup(folder);
        free(pattern);
        free(tokens);
    }
    free(folder);
    return done && app->heldout;
}

/* The held-out side of the run that a model belongs to. */
static bool open_heldout_of_run(App *app, const char *from) {
    char *checkpoints = xformat("%s/checkpoints", from);
    char *run = folder_exists(checkpoints) ? xstrdup(from)
                                           : xformat("%s/../..", from); /* RUN/checkpoints/step-N */
    char *tokens = xformat("%s/tokens", run), *pattern = xformat("%s/heldout-*.bin", tokens);
    json_t *settings = run_read_settings(run, &app->err);
    const char *elsewhere = json_string_value(json_object_get(settings, "heldout"));
    if (settings)
        app->heldout = shards_open(names_shards(elsewhere) ? elsewhere : pattern, app->bpe, &app->err);
    else error_prefix(&app->err, "no held-out side is known; name one with -heldout");
    app->has_facts = app->heldout && !names_shards(elsewhere) && data_read_facts(tokens, &app->facts, NULL);
    json_decref(settings);
    free(pattern);
    free(tokens);
    free(run);
    free(checkpoints);
    return app->heldout != NULL;
}

/* One line on stdout. */
static bool evaluate_model(App *app) {
    const Options *o = &app->options;
    const char *from;
    if (!load_model(app, 0, &from)) return false;
    bool done;
    if (!o->heldout) done = open_heldout_of_run(app, from);
    else if (!names_shards(o->heldout)) done = open_heldout_text(app, o->heldout);
    else done = (app->heldout = shards_open(o->heldout, app->bpe, &app->err)) != NULL;

    Evaluation result;
    done = done && open_windows(app, 0) && evaluate(app, &result);
    if (!done && stop_requested()) {
        error_set(&app->err, "stopped by %s before the evaluation was done", signal_name(stop_requested()));
        app->code = 128 + stop_requested();
    }
    if (!done) return false;
    printf("held-out loss %.4f nats/token  %.4f bits/byte  over %s tokens", result.loss, result.bits_per_byte,
           commas(result.tokens).text);
    if (app->has_facts && isfinite(app->facts.heldout_floor))
        printf("  floor %.4f", app->facts.heldout_floor);
    printf("\n");
    if (stop_requested()) app->stopped = 128 + stop_requested(); /* it came with the last windows */
    return true;
}

/* ---- instead of training: with a tokenizer ---- */

/* The tokenizer that -encode and -decode need. */
static bool need_tokenizer(App *app, const char *mode) {
    const char *path = app->options.tokenizer;
    if (!path) return USAGE(app, "%s needs -tokenizer: a run or a merges file", mode);
    return check_path(app, "tokenizer", path) && load_tokenizer(app, path);
}

/* What could not be written is an error, except that the reader of a pipe went away: then there is nobody to
 * tell, and the exit code alone says it. */
static bool flush_output(App *app, FILE *out) {
    if (fflush(out) == 0 && !ferror(out)) return true;
    if (errno == EPIPE) app->err.text[0] = 0;
    else error_set(&app->err, "cannot write to stdout: %s; make room or send it elsewhere", strerror(errno));
    app->code = EXIT_FAILED;
    return false;
}

/* Ids in decimal with a space between them; *any: some were written before. */
static bool write_ids(App *app, const Tokens *ids, bool *any) {
    for (size_t i = 0; i < ids->count; i++) {
        char digits[12], *at = digits + sizeof digits;
        uint32_t id = ids->ids[i];
        do *--at = (char)('0' + id % 10);
        while (id /= 10);
        if (*any) *--at = ' ';
        *any = true;
        fwrite(at, 1, (size_t)(digits + sizeof digits - at), stdout);
    }
    return !ferror(stdout) || flush_output(app, stdout);
}

static bool encode_stdin(App *app) {
    if (!need_tokenizer(app, "-encode")) return false;
    BpeEncoder *encoder = bpe_encoder_new(app->bpe, ENCODER_CACHE_WORDS);
    uint8_t *bytes = xmalloc(STDIN_BYTES);
    Tokens ids = {0};
    bool done = true, any = false;
    for (size_t size; done && (size = fread(bytes, 1, STDIN_BYTES, stdin)) > 0; ids.count = 0) {
        if (app->options.special) bpe_encoder_feed_special(encoder, bytes, size, &ids);
        else bpe_encoder_feed(encoder, bytes, size, &ids);
        done = write_ids(app, &ids, &any);
    }
    if (done && ferror(stdin)) done = error_set(&app->err, "cannot read stdin: %s", strerror(errno));
    bpe_encoder_end(encoder, &ids);
    done = done && write_ids(app, &ids, &any);
    if (done && any) putchar('\n');
    tokens_free(&ids);
    free(bytes);
    bpe_encoder_free(encoder);
    return done;
}

/* Adds a character of stdin to the id that is being read; a space ends one. */
typedef struct IdReader {
    uint64_t id, index; /* index: of the id among all, from 0 */
    bool reading;
} IdReader;

static const uint64_t LARGEST_READ = UINT64_MAX / 10; /* what an id is read up to: far past any tokenizer's */

static bool read_id(App *app, IdReader *reader, int c, Tokens *ids) {
    const uint32_t V = bpe_vocab_size(app->bpe);
    if (c >= '0' && c <= '9') {
        reader->reading = true;
        if (reader->id < LARGEST_READ / 10) reader->id = 10 * reader->id + (uint64_t)(c - '0');
        else reader->id = LARGEST_READ;
        return true;
    }
    if (!isspace(c))
        return error_set(&app->err,
                         "stdin: id number %" PRIu64
                         " holds the byte 0x%02x; expected ids in decimal separated "
                         "by spaces",
                         reader->index + 1, (unsigned)c);
    if (!reader->reading) return true;
    if (reader->id >= V)
        return error_set(&app->err,
                         "stdin: id number %" PRIu64 " is %" PRIu64 "%s, this tokenizer (%s) has ids 0 to %u",
                         reader->index + 1, reader->id, reader->id == LARGEST_READ ? " or more" : "",
                         app->merges_of, V - 1);
    tokens_reserve(ids, 1);
    ids->ids[ids->count++] = (uint32_t)reader->id;
    *reader = (IdReader){.index = reader->index + 1};
    return true;
}

static bool decode_stdin(App *app) {
    if (!need_tokenizer(app, "-decode")) return false;
    uint8_t *bytes = xmalloc(STDIN_BYTES);
    IdReader reader = {0};
    Tokens ids = {0};
    Buffer text = {0};
    uint8_t last = '\n'; /* byte written */
    bool done = true, more = true;
    while (done && more) {
        size_t size = fread(bytes, 1, STDIN_BYTES - 1, stdin);
        more = size > 0;
        if (!more) bytes[size++] = ' '; /* the end of the text ends the last id */
        for (size_t i = 0; i < size && done; i++) done = read_id(app, &reader, bytes[i], &ids);
        /* What was well-formed before a mistake is written, too. */
        const Error mistake = app->err;
        text.size = 0;
        done = bpe_decode(app->bpe, ids.ids, ids.count, &text, &app->err) && done;
        app->err = mistake;
        if (text.size > 0) fwrite(text.data, 1, text.size, stdout), last = text.data[text.size - 1];
        if (!done && last != '\n') putchar('\n'); /* so that the error has a line of its own */
        if (ferror(stdout)) done = flush_output(app, stdout);
        ids.count = 0;
    }
    if (done && ferror(stdin)) done = error_set(&app->err, "cannot read stdin: %s", strerror(errno));
    buffer_free(&text);
    tokens_free(&ids);
    free(bytes);
    return done;
}

/* ---- main ---- */

static bool print_config(App *app) {
    /* A model that is loaded would bring its width: no file is read here, and what hangs on it stays open. */
    if (!take_run_settings(app) || !settle_settings(app) || (!app->options.load && !settle_rates(app)))
        return false;
    json_t *settings = options_to_json(&app->options);
    json_dumpf(settings, stdout, JSON_INDENT(2));
    printf("\n");
    json_decref(settings);
    return true;
}

static void free_app(App *app) {
    ranks_end(&app->ranks);
    gpt_free(app->gpt);
    batches_close(app->windows);
    batches_close(app->batches);
    shards_close(app->heldout);
    shards_close(app->train);
    if (app->scratch) folder_remove(app->scratch, NULL);
    if (app->stream) app->ops->close(app->stream);
    bpe_free(app->bpe);
    run_close(app->run);
    json_decref(app->settings);
    json_decref(app->chosen);
    json_decref(app->lead);
    buffer_free(&app->merges);
    buffer_free(&app->tokenizer_json);
    free(app->scratch);
    free(app->token_bytes);
    free(app->merges_of);
    free(app->resume_from);
    free(app->model);
    free(app->newest_run);
    free(app->inputs);
    free(app->targets);
    free(app->folder);
}

/* Waits for signals, so that no other thread takes one. The first asks for a stop, which a long step delays;
 * the handler ends the process at the second. */
static void *take_signals(void *signals) {
    pthread_sigmask(SIG_UNBLOCK, (const sigset_t *)signals, NULL);
    while (!stop_requested()) pause();
    if (atomic_load(&taking_steps))
        fputs("train_gpt: note: finishing the step; once more to stop at once\n", stderr);
    for (;;) pause();
    return NULL;
}

/* A signal must not interrupt a thread that computes: a handler's frame is put below the stack pointer, where
 * AVX-512 kernels of oneDNN 2.6 keep data of their own; the heap was seen to be overwritten. So a thread that
 * does nothing else takes them. Before any other thread is made, since those inherit what is blocked. */
static void start_signals(void) {
    static sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &signals, NULL);
    signals_install();
    pthread_t thread;
    if (pthread_create(&thread, NULL, take_signals, &signals) == 0) pthread_detach(thread);
    else pthread_sigmask(SIG_UNBLOCK, &signals, NULL); /* then this one takes them, as is usual */
}

/* A standard stream that is closed is opened the wrong way round, so that using it fails as before; else the
 * next file to be opened would get its number, and what is printed would go into a checkpoint. */
static bool open_standard_streams(void) {
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY) != fd)
            return false;
    return true;
}

int main(int argc, char **argv) {
    if (!open_standard_streams()) return EXIT_FAILED; /* nowhere to say why */
    App app = {.argc = argc,
               .argv = argv,
               .program = argc > 0 ? argv[0] : "train_gpt",
               .started = seconds_now(),
               .code = EXIT_FAILED,
               .report = stderr};
    const Options *o = &app.options;
    bool done = options_parse(&app.options, argc, argv, &app.err), training = false;
    if (!done) app.code = EXIT_USAGE;
    done = done && check_modes(&app);
    if (done && simd_note())
        warn(&app, "TRAIN_GPT_SIMD=%s: %s; using %s", getenv("TRAIN_GPT_SIMD"), simd_note(),
             simd_name(simd_level()));
    /* Who encodes or decodes has nothing to save: a signal ends that at once, as it does other filters. */
    if (!o->encode && !o->decode) start_signals();
    else signal(SIGPIPE, SIG_IGN);
    Error err;
    if (!ranks_start(&app.ranks, o->timeout, &err)) {
        if (done) app.code = EXIT_FAILED, app.err = err;
        done = false;
    }
    done = all_ranks(&app, done) && check_ranks(&app);
    FILE *nowhere = leads(&app) ? NULL : fopen("/dev/null", "w");
    if (nowhere) app.report = nowhere;
    if (!done || (!leads(&app) && (o->help || o->version || o->print_config))) {
        /* what was typed makes no sense, or rank 0 answers it */
    } else if (o->help) {
        options_print_help(stdout);
    } else if (o->version) {
        printf("train_gpt %s (%s, %s)\n", TRAIN_GPT_VERSION, simd_name(simd_level()), sgemm_library());
    } else if (o->print_config) {
        done = print_config(&app);
    } else if (o->encode) {
        done = encode_stdin(&app);
    } else if (o->decode) {
        done = decode_stdin(&app);
    } else if (o->generate) {
        done = generate_stories(&app);
    } else if (o->evaluate) {
        done = evaluate_model(&app);
    } else if (o->compare) {
        done = compare_backends(&app);
    } else {
        training = true;
        done = train(&app);
    }
    /* A run goes on without its terminal; of everything else what it prints is the result. */
    if (done && !training) done = flush_output(&app, stdout);
    finish_line(&app);
    fflush(app.report);
    const int code = done ? app.stopped : app.code;
    if (!done && !app.told && !leads(&app)) error_prefix(&app.err, "rank %d", app.ranks.rank);
    if (!done && app.err.text[0] && (leads(&app) || !app.told))
        fprintf(stderr, "train_gpt: error: %s\n", app.err.text);
    if (!done && !app.told) ranks_abort(&app.ranks, code); /* the others wait for this one */
    free_app(&app);
    if (nowhere) fclose(nowhere);
    return code;
}
