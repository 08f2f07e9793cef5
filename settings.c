/* settings.c - from the command line, and with -resume what the run was started with, to settings that say all
 * that can be said before the data is looked at; first how the ranks of a run agree on anything (train_gpt.c says
 * which of them leads). */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#if defined(__linux__)
#include <sched.h>
#endif

#include "app.h"
#include "simd.h"

enum {
    SAMPLES = 4,
    CHECKPOINTS = 10,       /* of a run, where not said how often */
    THREADS_A_PROCESSOR = 4 /* at most: a few may cost little, thousands take seconds to start */
};

static const double DEFAULT_MINUTES = 2.5;
static const double RATE_TIMES_CHANNELS = 0.768; /* 0.006 for 128 channels, 0.001 for 768 */

/* ---- ranks ---- */

/* Whether all ranks have come this far well; alone, whether this one has. */
bool all_ranks(App *app, bool done) {
    if (ranks_all(&app->ranks, done, &app->code, &app->err)) return true;
    app->told = true;
    return false;
}

/* As ranks_same: the lines of these are on all ranks alike. */
bool same_on_ranks(App *app, const char *what, const char *ours, const char *advice) {
    if (ranks_same(&app->ranks, what, ours, advice, &app->err)) return true;
    app->told = true;
    return false;
}

/* What rank 0 found out, an object, as app->lead on every rank; ours (of rank 0; elsewhere NULL) is stolen. */
bool tell_ranks(App *app, json_t *ours) {
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

/* Every rank was started with the same program and flags; what differs is named. */
bool check_same_start(App *app) {
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
        char *found = options_value_text(value), *expected = options_value_text(other);
        app->code = EXIT_USAGE;
        same = error_set(&app->err, "%s is %s here and %s on rank 0; give all ranks the same flags", key,
                         found, expected);
        free(found);
        free(expected);
    }
    json_decref(ours);
    return all_ranks(app, same);
}

/* The nearest batches that the ranks can share, and the ranks that can share this one. */
bool check_share(App *app) {
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
uint64_t share_of_batch(const App *app) {
    return (uint64_t)(app->options.batch / app->ranks.count);
}

/* ---- settings ---- */

bool is_auto(int64_t value) {
    return value == OPTION_AUTO;
}

/* Says what checkpoint_newest or checkpoint_best has passed over, a line each. */
void note_passed_over(App *app, Buffer *damaged) {
    for (size_t at = 0; at < damaged->size;) {
        const char *line = (const char *)damaged->data + at;
        const char *end = memchr(line, '\n', damaged->size - at);
        const size_t length = end ? (size_t)(end - line) : damaged->size - at;
        note(app, "passed over a damaged checkpoint: %.*s", (int)length, line);
        at += length + 1;
    }
    buffer_free(damaged);
}

/* "tokens/train-*.bin": shards, not text. */
bool names_shards(const char *path) {
    const size_t size = path ? strlen(path) : 0;
    return size >= 4 && strcmp(path + size - 4, ".bin") == 0;
}

/* What a log tells of checkpoints: it has no rows of their own. */
typedef struct LoggedSteps {
    uint64_t steps;  /* the last one's number */
    uint64_t starts; /* of processes */
    bool saved;
} LoggedSteps;

static bool follow_log(void *context, const RunRow *row, Error *err) {
    (void)err;
    LoggedSteps *logged = context;
    const json_int_t step = json_integer_value(json_object_get(row->json, "step"));
    const char *reason = json_string_value(json_object_get(row->json, "reason"));
    if (strcmp(row->type, "start") == 0) logged->starts++;
    if (strcmp(row->type, "step") == 0 && step > 0) logged->steps = (uint64_t)step;
    if (strcmp(row->type, "end") == 0)
        logged->saved = step > 0 && reason && strncmp(reason, "failed", strlen("failed")) != 0;
    return true;
}

/* A run without any checkpoint begins anew, and its log with it: right where it was stopped before its first, or where
 * none could be saved. Not where the log tells of one, which then was moved away, or lies on a disk that is not there
 * now. Told by: an end without a failure, which comes after a save; and a second start, since only who goes on from a
 * checkpoint leaves the first in the log. */
static bool check_never_saved(App *app, const char *checkpoints) {
    LoggedSteps logged = {0};
    Error err;
    /* A line that is no row ends what is known, as what a power cut leaves does; it is not kept either way. */
    if (!run_log_each(app->options.run, follow_log, &logged, &err) && err.unreadable)
        return app->err = err, false;
    if (!logged.saved && logged.starts < 2) return true;
    return error_set(
        &app->err,
        "the log of %s tells of %s and of a checkpoint, but there is none in %s; put them back (or mount "
        "the disk that they are on), or start over with -force",
        app->options.run, counted(logged.steps, "step", "steps").text, checkpoints);
}

/* The checkpoint that the run goes on from. None yet is no failure; none that is good is one. */
static bool find_newest(App *app) {
    char *checkpoints = xformat("%s/checkpoints", app->options.run);
    bool any, done = checkpoint_any(checkpoints, &any, &app->err);
    if (done && any) {
        Buffer damaged = {0};
        app->resume_from = checkpoint_newest(checkpoints, &damaged, &app->err);
        done = app->resume_from != NULL;
        if (done) note_passed_over(app, &damaged);
        else buffer_free(&damaged);
    } else if (done) {
        done = check_never_saved(app, checkpoints);
    }
    free(checkpoints);
    return done;
}

/* -resume: takes the run's settings where there is a run, and finds the checkpoint to go on with. To train, under
 * the run's lock, so that no other process goes on with it meanwhile. */
bool take_run_settings(App *app, bool to_train) {
    Options *o = &app->options;
    bool there, done = true;
    if (!o->resume) return true;
    if (!o->run) {
        app->newest_run = run_newest(false, &app->err);
        if (!app->newest_run) return false;
        o->run = app->newest_run;
    }
    if (!run_look(o->run, RUN_RESUME, &there, &app->err)) return false;
    if (!there) return true;
    if (to_train) {
        app->run = run_open(o->run, RUN_RESUME, &there, &app->err);
        if (!app->run || !there) return app->run != NULL; /* it went meanwhile, and a new one begins */
    }
    char *file = xformat("%s/run.json", o->run);
    PathKind kind;
    done = path_look(file, &kind, &app->err);
    if (done && kind != PATH_FILE) {
        done = error_set(
            &app->err, "%s holds a run without run.json, which cannot go on; start over with -force", o->run);
    } else if (done) {
        app->settings = run_read_settings(o->run, &app->err);
        done = app->settings && options_complete(app->settings, file, &app->err);
        if (done && !options_resume(o, app->settings, &app->err)) app->code = EXIT_USAGE, done = false;
    }
    free(file);
    return done && find_newest(app);
}

/* The same on every rank: rank 0 reads. */
bool share_run_settings(App *app) {
    Options *o = &app->options;
    if (!all_ranks(app, !leads(app) || take_run_settings(app, !app->options.dry_run))) return false;
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

void list_chosen(Options *o, Chosen list[CHOSEN]) {
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

/* More than these are a mistake. Of all processors, whether or not this process may run on them: it may have been
 * bound to one of them by a launcher. */
static int64_t most_threads(void) {
    const long processors = sysconf(_SC_NPROCESSORS_ONLN);
    return THREADS_A_PROCESSOR * (int64_t)(processors > 0 ? processors : 1);
}

/* What OpenMP would take: OMP_NUM_THREADS, else the CPUs that this process may run on, divided by the ranks that
 * may run on the same ones. */
static int64_t default_threads(App *app) {
    const char *asked = getenv("OMP_NUM_THREADS");
    const long number = asked ? strtol(asked, NULL, 10) : 0;
    if (number > 0 && number <= most_threads()) return number;
    if (number > 0)
        note(app, "OMP_NUM_THREADS is %ld, more than %d for each processor here; it is not taken", number,
             THREADS_A_PROCESSOR);
#if defined(__linux__)
    cpu_set_t cpus;
    long online = sched_getaffinity(0, sizeof cpus, &cpus) == 0 ? CPU_COUNT(&cpus) : 0;
#else
    long online = sysconf(_SC_NPROCESSORS_ONLN);
#endif
    online /= app->ranks.cpu_sharers;
    return online > 0 ? online : 1;
}

/* What the flags say together, and what is left to choose that needs no look at the data. */
bool settle_settings(App *app) {
    Options *o = &app->options;
    if (!settle_length(app)) return false;
    const bool given = options_given("threads"), too_many = o->threads > most_threads();
    if (given && too_many)
        return USAGE(app,
                     "-threads %" PRId64 " is more than %d for each processor here; use %" PRId64 " or fewer",
                     o->threads, THREADS_A_PROCESSOR, most_threads());
    /* A run that goes on may have been started with another number of ranks, or on a larger machine. */
    if (is_auto(o->threads) || (!given && (app->ranks.count > 1 || too_many)))
        o->threads = default_threads(app);
    if (strcmp(o->device, "cpu") == 0 && strcmp(o->precision, "bf16") == 0)
        return USAGE(app, "-precision bf16 is for a GPU; leave it out, or use -device cuda");
#ifndef USE_CUDA
    if (strcmp(o->device, "cuda") == 0)
        return USAGE(app, "-device cuda: this build has no CUDA part; use -device cpu");
#endif
    /* Its settings would be cut down to those of the tokens; and missing tokens are made anyway when it goes on. */
    if (o->tokenize && json_object_get(app->settings, "layers"))
        return USAGE(app,
                     "-tokenize makes tokens for a run to begin with, and %s has begun; leave -tokenize out",
                     o->run);
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
bool settle_rates(App *app) {
    Options *o = &app->options;
    if (o->lr == OPTION_AUTO) o->lr = RATE_TIMES_CHANNELS / (double)o->channels;
    if (o->min_lr == OPTION_AUTO) o->min_lr = o->lr / 10;
    return o->min_lr <= o->lr || USAGE(app, "-min-lr %g is above -lr %g; lower it", o->min_lr, o->lr);
}

/* A path that the user gave and that is about to be read. A glob is left to what opens it. A folder of shards is no
 * text: the merges beside them would be taken for a story. */
bool check_path(App *app, const char *flag, const char *path) {
    char *facts = path && folder_exists(path) ? xformat("%s/data.json", path) : NULL;
    const bool shards = facts && strcmp(flag, "tokenizer") != 0 && file_exists(facts);
    free(facts);
    if (shards)
        return USAGE(app,
                     "-%s: the folder %s holds shards, not text; name them: -data '%s/train-*.bin' -heldout "
                     "'%s/heldout-*.bin'",
                     flag, path, path, path);
    if (!path || names_shards(path) || file_exists(path) || folder_exists(path)) return true;
    return error_set(&app->err, "-%s: there is no file or folder %s; check the path%s", flag, path,
                     strpbrk(path, "*?[") ? " (several texts: give the folder that they are in)" : "");
}
