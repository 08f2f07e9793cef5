/* train_gpt.c - the program: from what a user typed to a trained model, and what can be done with one. This is
 * main, which finds out what was asked for, and a training run as a whole. Its parts, in the order of its life:
 *   settings    settings.c: the command line; with -resume what the run was started with; what is left to choose
 *   model       start.c: a device, the tokenizer, the configuration, a kernel, a memory plan that fits
 *   data        start.c: tokens, made from text into RUN/tokens, or shards used where they lie
 *   tables      start.c: what is about to happen, in numbers, before it happens
 *   watching    training.c: held-out loss, stories
 *   training    training.c: steps; after some of them an evaluation, stories, a checkpoint; the end
 * What is done instead of training is in modes.c, how all of them speak in say.c, and what they share in app.h.
 *
 * Under a launcher every rank runs this same code. Rank 0 leads: it reads text, opens the run, prints and writes;
 * what it found out it tells the others, which follow (follow_start), and what it decides by the clock it shares
 * (share_schedule). A failure that all ranks know of (app->told) ends each of them in order; any other one ends
 * the job. */
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include "app.h"
#include "compare.h"
#include "sgemm.h"
#include "simd.h"

/* ---- what was asked for ---- */

/* Whether none of these flags (a NULL ends them) was given, which are of no use to a mode. */
static bool check_unused(App *app, const char *mode, const char *const *flags) {
    for (; *flags; flags++)
        if (options_given(*flags))
            return USAGE(app, "-%s is for training, and %s does not train; leave it out", *flags, mode);
    return true;
}

static bool check_modes(App *app) {
    const Options *o = &app->options;
    const int modes = o->generate + o->evaluate + (o->compare != NULL) + o->tokenize + o->encode + o->decode;
    if (modes > 1)
        return USAGE(app, "-generate, -evaluate, -compare, -tokenize, -encode and -decode: give one of them");
    if (o->compare && options_given("attention"))
        return USAGE(app, "-compare names the kinds of attention itself; leave -attention out");
    if (o->compare && (o->resume || o->force))
        return USAGE(app, "-compare trains anew in a new folder: leave -resume and -force out");
    if (o->special && !o->encode) return USAGE(app, "-special belongs to -encode; leave it out");
    if (o->resume && o->force)
        return USAGE(app, "-resume goes on with a run, -force starts over: give one of them");
    if (o->tokenize && names_shards(o->data))
        return USAGE(app, "-tokenize needs text, but -data names shards");
    if (o->dry_run && (modes > 0))
        return USAGE(app, "-dry-run shows what training would be; leave the other mode out");
    if (o->evaluate && options_given("data"))
        return USAGE(app, "-evaluate takes the text to evaluate on by -heldout, not by -data");
    static const char *const of_training[] = {
        "dropout",      "steps", "minutes", "lr",   "min-lr",     "warmup",
        "weight-decay", "beta1", "beta2",   "clip", "eval-every", "checkpoint-every",
        "sample-every", "keep",  NULL};
    static const char *const of_start[] = {"data", "vocab", "stories", "resume", "force", NULL};
    static const char *const of_model[] = {
        "layers",        "heads",       "channels", "ctx",         "position", "attention",
        "deterministic", "batch",       "micro",    "eval-tokens", "samples",  "prompt",
        "sample-tokens", "temperature", "top-k",    "top-p",       "timeout",  NULL};
    if (o->tokenize && o->load)
        return USAGE(
            app,
            "-tokenize makes no model, so that -load has nothing to bring but its tokenizer; name that by "
            "-tokenizer %s, and the model when training begins",
            o->load);
    if (o->tokenize)
        return check_unused(app, "-tokenize", of_training) && check_unused(app, "-tokenize", of_model);
    const char *mode = o->evaluate ? "-evaluate" : "-generate";
    return !(o->evaluate || o->generate) ||
           (check_unused(app, mode, of_training) && check_unused(app, mode, of_start));
}

/* What main is to do: the flag that asks for it, in the order in which main looks; NULL: training. */
static const char *asked_mode(const Options *o) {
    const struct {
        const char *name;
        bool asked;
    } modes[] = {
        {"help", o->help},         {"version", o->version},         {"print-config", o->print_config},
        {"encode", o->encode},     {"decode", o->decode},           {"generate", o->generate},
        {"evaluate", o->evaluate}, {"compare", o->compare != NULL}, {"tokenize", o->tokenize}};
    for (size_t i = 0; i < sizeof modes / sizeof modes[0]; i++)
        if (modes[i].asked) return modes[i].name;
    return NULL;
}

/* All ranks do the same, since they wait for one another; and only training is for several. */
static bool check_ranks(App *app) {
    const Options *o = &app->options;
    const char *mode = asked_mode(o);
    if (!same_on_ranks(app, "the mode", mode ? mode : "training", "give all ranks the same flags"))
        return app->code = EXIT_USAGE, false;
    if (app->ranks.count == 1 || !mode || o->help || o->version || o->print_config) return true;
    return app->told = true,
           USAGE(app, "-%s runs in one process, and a launcher started %d; start it without the launcher",
                 mode, app->ranks.count);
}

/* ---- a training run ---- */

static bool start_and_train(App *app) {
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
        if (stop_requested()) app->stopped = 128 + stop_requested();
    } else if (done && o->tokenize) {
        print_data(app);
        print_next(app);
    } else if (done) {
        done = follow_start(app);
        if (done && leads(app)) print_tables(app);
        done = done && train_model(app);
    }
    return done;
}

static bool train(App *app) {
    const bool done = start_and_train(app);
    if (!done) undo_start(app);
    return done;
}

/* ---- signals, streams ---- */

/* Waits for signals, so that no other thread takes one. The first asks for a stop, which a long step delays;
 * the handler ends the process at the second. */
static void *take_signals(void *signals) {
    pthread_sigmask(SIG_UNBLOCK, (const sigset_t *)signals, NULL);
    while (!stop_requested()) pause();
    if (taking_steps()) fputs("train_gpt: note: finishing the step; once more to stop at once\n", stderr);
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

/* ---- main ---- */

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

/* The process ends for want of memory: what a start or a mode has begun does not stay. */
static void clean_up(void *user) {
    App *app = user;
    finish_line(app);
    undo_start(app);
    if (app->scratch) folder_remove(app->scratch, NULL);
}

int main(int argc, char **argv) {
    compare_follow_parent();
    if (!open_standard_streams()) return EXIT_FAILED; /* nowhere to say why */
    App app = {.argc = argc,
               .argv = argv,
               .program = argc > 0 ? argv[0] : "train_gpt",
               .started = seconds_now(),
               .code = EXIT_FAILED,
               .report = stderr};
    set_memory_hook(clean_up, &app);
    const Options *o = &app.options;
    bool done = options_parse(&app.options, argc, argv, &app.err), training = false;
    if (!done) app.code = EXIT_USAGE;
    done = done && check_modes(&app);
    /* Who encodes or decodes has nothing to save: a signal ends that at once, as it does other filters. */
    if (!o->encode && !o->decode) start_signals();
    else signal(SIGPIPE, SIG_IGN);
    Error err;
    if (!ranks_start(&app.ranks, o->timeout, &err)) {
        if (done) app.code = EXIT_FAILED, app.err = err;
        done = false;
    }
    done = all_ranks(&app, done) && check_ranks(&app);
    if (done && simd_note())
        note(&app, "TRAIN_GPT_SIMD=%s: %s; using %s", getenv("TRAIN_GPT_SIMD"), simd_note(),
             simd_name(simd_level()));
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
    if (done && (!training || o->dry_run)) done = flush_output(&app, stdout);
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
