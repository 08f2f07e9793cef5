/* start.c - from settings to where training can begin, in this order:
 *   model    a device, the tokenizer, the configuration, a kernel, a memory plan that fits
 *   data     the run's folder; tokens: made from text into RUN/tokens, or shards used where they lie
 *   tables   what is about to happen, in numbers, before it happens
 *   the way  of rank 0, which reads text and opens the run (lead_start), and of the others, which follow
 *            (follow_start) */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "app.h"
#include "sgemm.h"

enum {
    MIN_HELDOUT_STORIES = 1000, /* built-in ones: enough tokens for two digits behind the point */
    STORIES_ASIDE = 8,          /* STORIES_AT_ONCE elsewhere, where more gain little and take memory */
    PICKS = 10                  /* of a model that is there to be read, while its run goes on */
};

/* ---- model: device, tokenizer, configuration ---- */

/* -device auto: the GPU where there is one that works, else the CPU. From here on device and precision are
 * what the run uses. */
bool open_device(App *app) {
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
bool open_devices(App *app) {
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

bool load_tokenizer(App *app, const char *path) {
    const size_t size = strlen(path);
    if (size > 5 && strcmp(path + size - 5, ".json") == 0 && file_exists(path))
        return error_set(
            &app->err, "-tokenizer %s: a file of merges is wanted, as merges.txt beside it, or a run", path);
    char *from = merges_path(path);
    Bpe *bpe = bpe_load(from, &app->err);
    if (bpe) use_tokenizer(app, bpe, from);
    else free(from);
    return bpe != NULL;
}

/* The checkpoint that -load means: the best of a run, or the folder itself. To be freed. */
char *find_model(App *app, const char *path) {
    char *checkpoints = xformat("%s/checkpoints", path), *config = xformat("%s/config.json", path),
         *found = NULL;
    PathKind kind;
    if (!path_look(checkpoints, &kind, &app->err)) {
        /* there may be models */
    } else if (kind == PATH_FOLDER) {
        Buffer damaged = {0};
        found = checkpoint_best(checkpoints, &damaged, &app->err);
        if (found) note_passed_over(app, &damaged);
        else buffer_free(&damaged);
    } else if (file_exists(config)) {
        found = xstrdup(path);
    } else {
        char *compared = xformat("%s/compare.json", path), *run = xformat("%s/run.json", path);
        error_set(&app->err,
                  "%s holds no model: expected a run (checkpoints/) or a checkpoint (config.json); %s", path,
                  file_exists(compared) ? "of a comparison, name one of its runs (its folders)"
                  : file_exists(run) ? "this run has not saved one: train it by -resume -run with that path"
                  : folder_exists(path) ? "name the folder of one of these"
                                        : "check the path");
        free(run);
        free(compared);
    }
    free(config);
    free(checkpoints);
    return found;
}

/* A checkpoint of a run that is being trained may go as soon as there is a newer one. Of one that is still what
 * `path` means, the failure is told as it is. */
bool pick_again(App *app, const char *path, int *tries) {
    const Error cause = app->err;
    char *other = ++*tries < PICKS ? find_model(app, path) : NULL;
    const bool another = other && strcmp(other, app->model) != 0;
    if (another) {
        free(app->model);
        app->model = other;
    } else {
        free(other);
        app->err = cause;
    }
    return another;
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

/* Whether a merges file is, if it is there, that of the tokenizer that is used. */
static bool check_same_tokenizer(App *app, const char *path, const char *whose, const char *advice) {
    if (!file_exists(path)) return true;
    Bpe *bpe = bpe_load(path, &app->err);
    const bool same = bpe && (bpe_same(bpe_fingerprint(bpe), bpe_fingerprint(app->bpe)) ||
                              error_set(&app->err, "%s tokenizer %s is not that of %s; %s", whose, path,
                                        app->merges_of, advice));
    bpe_free(bpe);
    return same;
}

/* Shape and tokenizer of a model folder. A tokenizer that was named otherwise must be the same. */
bool take_model(App *app) {
    const char *folder = app->model;
    GptConfig config;
    if (!checkpoint_config(folder, &config, &app->err) || !take_shape(app, &config)) return false;
    if (!app->bpe && app->options.tokenizer && !load_tokenizer(app, app->options.tokenizer)) return false;
    char *own = xformat("%s/merges.txt", folder);
    const bool done = !app->bpe ? load_tokenizer(app, folder)
                                : check_same_tokenizer(app, own, "the model's", "use one of them throughout");
    free(own);
    if (!done || bpe_vocab_size(app->bpe) == config.vocab) return done;
    return error_set(
        &app->err,
        "the model in %s has %zu tokens, the tokenizer %s has %u; give the one it was trained with", folder,
        config.vocab, app->merges_of, bpe_vocab_size(app->bpe));
}

GptConfig model_config(const App *app) {
    const Options *o = &app->options;
    return (GptConfig){.layers = (size_t)o->layers,
                       .heads = (size_t)o->heads,
                       .channels = (size_t)o->channels,
                       .ctx = (size_t)o->ctx,
                       .vocab = app->bpe ? bpe_vocab_size(app->bpe) : (size_t)o->vocab,
                       .position = strcmp(o->position, "learned") == 0 ? POSITION_LEARNED : POSITION_ROTARY,
                       .dropout = (float)o->dropout};
}

AttentionShape attention_shape(const GptSetup *setup) {
    const GptConfig *config = &setup->config;
    return (AttentionShape){.B = setup->B,
                            .T = config->ctx,
                            .H = config->heads,
                            .D = config->channels / config->heads,
                            .training = setup->training,
                            .deterministic = setup->deterministic};
}

/* The number after `key` in a file of the system; `otherwise` where there is none. */
static size_t number_in(const char *path, const char *key, size_t otherwise) {
    FILE *file = fopen(path, "re");
    char line[256];
    size_t number = otherwise;
    while (file && fgets(line, sizeof line, file))
        if (strncmp(line, key, strlen(key)) == 0 && sscanf(line + strlen(key), "%zu", &number) == 1) break;
    if (file) fclose(file);
    return number;
}

/* What this host has left; SIZE_MAX: not known, and of those below: there is no such limit. */
static size_t memory_of_host(void) {
    const size_t kilobytes = number_in("/proc/meminfo", "MemAvailable:", SIZE_MAX);
    return kilobytes <= SIZE_MAX / 1024 ? kilobytes * 1024 : SIZE_MAX;
}

/* ... and this process until `ulimit -v`. */
static size_t memory_of_process(void) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return SIZE_MAX;
    const size_t mapped = number_in("/proc/self/status", "VmSize:", 0) * 1024;
    return limit.rlim_cur > mapped ? (size_t)limit.rlim_cur - mapped : 0;
}

/* ... and the container or service, a control group of version 2 or 1 that sees itself as the root; of what it uses,
 * pages of files that were read are given back when needed. */
static size_t memory_of_group(void) {
    static const char *const files[][4] = {{"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current",
                                            "/sys/fs/cgroup/memory.stat", "inactive_file "},
                                           {"/sys/fs/cgroup/memory/memory.limit_in_bytes",
                                            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
                                            "/sys/fs/cgroup/memory/memory.stat", "total_inactive_file "}};
    size_t least = SIZE_MAX;
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        const size_t most = number_in(files[i][0], "", SIZE_MAX); /* "max": none */
        const size_t used = number_in(files[i][1], "", 0), idle = number_in(files[i][2], files[i][3], 0);
        const size_t taken = used > idle ? used - idle : 0, left = most > taken ? most - taken : 0;
        if (most != SIZE_MAX && left < least) least = left;
    }
    return least;
}

/* Bytes of the device's memory that can be had (on a CPU: without swapping); 0 where the system does not say. */
static size_t memory_available(const App *app) {
    const size_t sharers = (size_t)app->ranks.local_count; /* ranks of this host, which take as much each */
    if (app->ops->memory) {
        size_t free_bytes, total_bytes;
        app->ops->memory(app->stream, &free_bytes, &total_bytes);
        return free_bytes;
    }
    const size_t host = memory_of_host(), group = memory_of_group(), process = memory_of_process();
    const size_t share = (host < group ? host : group) / sharers, least = process < share ? process : share;
    return least == SIZE_MAX ? 0 : least > 0 ? least : 1;
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

/* The kernel that -attention names. Where a model is only used and the user names none, another one will do for what
 * the usual one cannot run: a run that was trained with naive need not say so again. */
static const Attention *choose_attention(App *app, const AttentionShape *shape) {
    const char *device = app->ops->name;
    const bool any = !shape->training && !options_given("attention");
    const Attention *found = attention_find(app->options.attention, device, shape, &app->err);
    for (size_t i = 0; any && !found && attention_backends[i]; i++)
        found = attention_find(attention_backends[i]->name, device, shape, NULL);
    return found;
}

/* Configuration, kernel, micro-batch and memory; nothing is allocated yet. rows: sequences that a rank takes
 * at most. */
bool plan_model(App *app, bool training, size_t rows) {
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
    setup->attention = choose_attention(app, &shape);
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
bool make_model(App *app) {
    const size_t tokens = app->setup.B * app->setup.config.ctx;
    app->gpt = gpt_new(&app->setup, &app->err);
    if (!app->gpt) return false;
    app->inputs = xmalloc(tokens * sizeof *app->inputs);
    app->targets = xmalloc(tokens * sizeof *app->targets);
    return true;
}

/* ---- data: the run's folder, tokens, windows ---- */

/* All settings as they now are, what was found in the data, and the version. A run that only holds tokens so
 * far keeps what belongs to those, so that everything else is still open when it is trained. */
bool write_settings(App *app) {
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

static RunOpen way_to_open(const Options *o) {
    return o->resume ? RUN_RESUME : o->force ? RUN_FORCE : RUN_NEW;
}

/* The run that begins; one that goes on is open since its settings were read. */
static bool open_run(App *app) {
    const Options *o = &app->options;
    bool resumed = false;
    if (app->settings) return true;
    if (!app->run) app->run = run_open(o->run, way_to_open(o), &resumed, &app->err);
    if (!app->run) return false;
    if (resumed)
        return error_set(&app->err, "another process has begun a run in %s meanwhile; start again",
                         run_path(app->run));
    if (o->resume) note(app, "there is no run in %s to go on with; a new one starts", run_path(app->run));
    return write_settings(app);
}

/* What open_run would refuse the folder for, without a change to it. */
static bool look_at_run(App *app) {
    const Options *o = &app->options;
    bool found;
    return app->settings || !o->run || run_look(o->run, way_to_open(o), &found, &app->err);
}

/* A start that failed before it trained leaves what was there before, so that the corrected one is not refused
 * for a folder, for settings or for tokens that only the failed one has made. */
void undo_start(App *app) {
    if (!app->run || app->state.step > 0 || app->saved || app->begun) return;
    if (app->settings) {
        json_t *now = run_read_settings(run_path(app->run), NULL);
        if (!json_equal(now, app->settings)) run_write_settings(app->run, app->settings, NULL);
        json_decref(now);
    }
    if (app->made_tokens && run_is_in_place(app->run, NULL)) { /* into a folder that may have been there */
        char *tokens = run_file(app->run, "tokens"), *merges = xformat("%s/merges.txt", tokens);
        data_remove_shards(tokens);
        if (app->made_merges) remove(merges);
        free(merges);
        free(tokens);
    }
    run_undo(app->run);
}

static const char put_back[] = "put the old ones back",
                  put_text_back[] = "they are made anew, of a text that has changed: put the old text back";

/* A run that goes on must find the tokens it was started with. */
static bool check_identity(App *app, const char *key, const Shards *shards, const char *side,
                           const char *advice) {
    const json_t *before = json_object_get(app->settings, key);
    const uint32_t now = shards_identity(shards);
    if (!before || (json_is_integer(before) && json_integer_value(before) == (json_int_t)now)) return true;
    return error_set(
        &app->err,
        "the %s shards are not those the run was started with: found identity %u, the run has %" PRId64
        "; %s or start a new run",
        side, now, (int64_t)json_integer_value(before), advice);
}

/* advice: what to do about those of another run. */
static bool open_shards(App *app, const char *train, const char *heldout, const char *advice) {
    app->train = shards_open(train, app->bpe, &app->err);
    app->heldout = app->train ? shards_open(heldout, app->bpe, &app->err) : NULL;
    return app->heldout && check_identity(app, "train_identity", app->train, "training", advice) &&
           check_identity(app, "heldout_identity", app->heldout, "held-out", advice);
}

/* A file that is trained on is no held-out text; shared: what is on both sides, NULL: nothing. */
static bool refuse_shared(App *app, const char *shared) {
    return !shared ||
           USAGE(app,
                 "-data and -heldout both hold the file %s, so that the held-out loss would be that "
                 "of text trained on; name other %s",
                 shared,
                 names_shards(app->options.data)
                     ? "shards"
                     : "text, or leave -heldout out: then every 20th story is held out");
}

/* Of text; what cannot be read, reading it all will say. */
static bool check_apart(App *app) {
    const Options *o = &app->options;
    if (!o->data || !o->heldout || names_shards(o->data)) return true;
    Stories *train = stories_open(o->data, 0, NULL), *heldout = stories_open(o->heldout, 0, NULL);
    const bool apart = !train || !heldout || refuse_shared(app, stories_shared_file(train, heldout));
    stories_close(heldout);
    stories_close(train);
    return apart;
}

/* The tokenizer where it is known before the text is read: the run's own, which its checkpoints have, too, -tokenizer,
 * that of -load, or with shards the merges.txt beside them. */
static bool find_tokenizer(App *app) {
    const Options *o = &app->options;
    char *of_run = xformat("%s/tokens/merges.txt", o->run ? o->run : ".");
    char *facts = xformat("%s/tokens/data.json", o->run ? o->run : ".");
    bool done = true;
    if (app->resume_from) {
        done = load_tokenizer(app, app->resume_from) &&
               check_same_tokenizer(app, of_run, "the run's", "put that one back");
    } else if (app->settings && file_exists(of_run)) {
        done = load_tokenizer(app, of_run);
    } else if (app->settings && file_exists(facts)) {
        done = error_set(&app->err,
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
    /* A run that goes on keeps what was asked for when it began, which the text need not have given. */
    if (done && app->bpe && !app->settings && !o->load && options_given("vocab") &&
        o->vocab != (int64_t)bpe_vocab_size(app->bpe))
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
bool make_tokens(App *app, const char *folder) {
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

/* Shards that are all of a folder which data_write_shards made (as those of -compare are): what it says of them. */
static bool facts_beside(App *app) {
    static const char train[] = "/train-*.bin", heldout[] = "/heldout-*.bin";
    const char *data = app->options.data, *other = app->options.heldout;
    if (!other || strlen(data) < sizeof train || strlen(other) < sizeof heldout) return false;
    const size_t length = strlen(data) - (sizeof train - 1);
    char *folder = xformat("%.*s", (int)length, data);
    const bool known = strcmp(data + length, train) == 0 && strncmp(other, folder, length) == 0 &&
                       strcmp(other + length, heldout) == 0 && data_read_facts(folder, &app->facts, NULL) &&
                       app->facts.train_tokens == shards_tokens(app->train) &&
                       app->facts.heldout_tokens == shards_tokens(app->heldout);
    free(folder);
    return known;
}

/* Tokens of both sides, open for reading, and the run's copy of the tokenizer. */
static bool open_data(App *app) {
    const Options *o = &app->options;
    char *folder = run_file(app->run, "tokens"), *facts = xformat("%s/data.json", folder);
    char *train = xformat("%s/train-*.bin", folder), *heldout = xformat("%s/heldout-*.bin", folder);
    char *merges = xformat("%s/merges.txt", folder);
    bool done;
    if (names_shards(o->data)) {
        done = folder_make(folder, &app->err);
        app->has_facts = done && facts_beside(app);
    } else {
        PathKind kind = PATH_NONE; /* what is there but cannot be looked at is no reason to make tokens */
        const bool looked = !app->settings || path_look(facts, &kind, &app->err), make = kind == PATH_NONE;
        app->made_tokens = looked && make, app->made_merges = app->made_tokens && !file_exists(merges);
        done = looked && (!make || make_tokens(app, folder)) &&
               data_read_facts(folder, &app->facts, &app->err) &&
               open_shards(app, train, heldout, make ? put_text_back : put_back);
        app->has_facts = done;
    }
    /* After what could say that the tokens are not those of this tokenizer. */
    done = done &&
           (file_exists(merges) || file_replace(merges, app->merges.data, app->merges.size, &app->err));
    free(merges);
    free(heldout);
    free(train);
    free(facts);
    free(folder);
    return done && write_settings(app);
}

/* Windows to train on and to evaluate on; eval_tokens OPTION_AUTO: `otherwise` (0: all). */
bool open_windows(App *app, uint64_t otherwise) {
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
    const uint64_t tokens_held = shards_tokens(app->heldout);
    if (o->evaluate && tokens_held <= T) /* a loaded model's window is as it is */
        return error_set(&app->err,
                         "held-out side: there are %" PRIu64
                         " tokens, and a window of the model needs %zu; give "
                         "more text by -heldout",
                         tokens_held, T + 1);
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

void print_data(App *app) {
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

static void print_rows(App *app, bool on_host, const char *where) {
    for (size_t i = 0; i < app->plan.rows; i++)
        if (app->plan.row[i].on_host == on_host)
            fprintf(app->report, "  %10s  %s%s\n", metric((double)app->plan.row[i].bytes, "B").text,
                    app->plan.row[i].purpose, where);
}

static void print_memory(App *app) {
    say(app, "\nmemory");
    print_rows(app, false, "");
    if (app->ops->memory) {
        size_t free_now, total;
        app->ops->memory(app->stream, &free_now, &total);
        fprintf(app->report, "  %10s  in use already: driver, kernels, libraries, other programs\n",
                metric((double)(total - free_now), "B").text);
    }
    const size_t free_bytes = memory_available(app);
    fprintf(app->report, "  %10s  in all; free: %s\n", metric((double)app->plan.total, "B").text,
            free_bytes ? metric((double)free_bytes, "B").text : "not known");
    print_rows(app, true, " (the host's memory)");
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
        note(app, "the disk has room for %s, checkpoints may take %s; lower -keep or free some",
             metric((double)free_bytes, "B").text, metric(most, "B").text);
}

void print_tables(App *app) {
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
        row(app, "length", "as many steps as fit into %g min: known once some are timed", o->minutes);
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

/* ---- the way to the first step ---- */

/* A file that the text or the shards of -data or -heldout have in the folder, to be freed; NULL: none. */
static char *input_within(const char *path, const Shards *shards, const char *folder) {
    Stories *stories = path && !shards ? stories_open(path, 0, NULL) : NULL;
    const char *within = shards    ? shards_file_within(shards, folder)
                         : stories ? stories_file_within(stories, folder)
                                   : NULL;
    char *found = within ? xstrdup(within) : NULL;
    stories_close(stories);
    return found;
}

/* What a new run needs, now or when it goes on, must not be in the folder that is moved aside or tidied up for it: not the
 * tokenizer, of which it has a copy. A folder that cannot be taken at all is refused when it is opened. */
static bool check_stays(App *app) {
    const Options *o = &app->options;
    const RunOpen how = o->compare ? RUN_COMPARISON : way_to_open(o);
    bool moves;
    if (app->settings || !o->run || !folder_exists(o->run) || !run_look(o->run, how, &moves, NULL))
        return true;
    char *data = input_within(o->data, app->train, o->run),
         *heldout = input_within(o->heldout, app->heldout, o->run);
    const struct {
        const char *flag, *path;
    } inputs[] = {{"data", data},
                  {"heldout", heldout},
                  {"load", app->model ? files_within(&app->model, 1, o->run) : NULL}};
    bool stays = true;
    for (size_t i = 0; i < sizeof inputs / sizeof inputs[0] && stays; i++)
        if (inputs[i].path)
            stays = USAGE(app, "-%s needs %s, which is in the run folder %s, and %s; name another -run",
                          inputs[i].flag, inputs[i].path, o->run,
                          moves ? "-force would move that aside"
                                : "what an earlier start has left there would be removed");
    free(heldout);
    free(data);
    return stays;
}

/* What training starts from, checked as far as it can be without reading text or making a folder. */
bool find_inputs(App *app) {
    const Options *o = &app->options;
    /* A run that goes on has its tokens already, and can be moved away from the text. */
    const bool found = app->settings ||
                       (check_path(app, "data", o->data) && check_path(app, "heldout", o->heldout) &&
                        check_path(app, "tokenizer", o->tokenizer) && check_apart(app));
    if (!found || (!app->stream && !open_devices(app)) || !find_tokenizer(app)) return false;
    if (o->load && !app->resume_from) {
        int tries = 0;
        app->model = find_model(app, o->load);
        if (!app->model) return false;
        while (!take_model(app))
            if (!pick_again(app, o->load, &tries)) return false;
    }
    if (!settle_rates(app)) return false;
    if (names_shards(o->data) &&
        !(open_shards(app, o->data, o->heldout, put_back) &&
          (app->settings || refuse_shared(app, shards_shared_file(app->train, app->heldout)))))
        return false;
    return check_stays(app);
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
bool lead_start(App *app) {
    const Options *o = &app->options;
    if (!find_inputs(app)) return false;
    const bool planned = o->tokenize || plan_model(app, true, share_of_batch(app));
    if (!planned && o->dry_run && app->code == EXIT_FAILED && app->plan.total > 0)
        print_tables(app); /* what it is that does not fit */
    if (!planned) return false;
    if (o->dry_run)
        return look_at_run(app) && (!app->train || open_windows(app, DEFAULT_EVAL_TOKENS)) &&
               memory_plan_process(&app->setup, &app->plan, &app->err);
    const bool done = open_run(app) && open_data(app);
    if (!done && stop_requested()) app->code = 128 + stop_requested();
    if (done) app->folder = xstrdup(run_path(app->run));
    if (!done || (!o->tokenize && !plan_training(app))) return false;
    if (run_moved_aside(app->run))
        say(app, "the old run %s is now %s", run_path(app->run), run_moved_aside(app->run));
    return true;
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
                open_shards(app, own ? o->data : train, own ? o->heldout : heldout, put_back);
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
bool follow_start(App *app) {
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
