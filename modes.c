/* modes.c - what is done instead of training: -compare, -generate, -evaluate, -encode, -decode, -print-config.
 *
 * Each runs in one process and has its result on stdout; what else there is to say goes to stderr. */
#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "app.h"
#include "compare.h"

enum {
    STDIN_BYTES = 1 << 16, /* read at once by -encode and -decode */
    ENCODER_CACHE_WORDS = 1 << 16
};

/* ---- attention backends side by side ---- */

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
bool compare_backends(App *app) {
    const Options *o = &app->options;
    Comparison comparison;
    if (!compare_list(&comparison, o->compare, &app->err)) return app->code = EXIT_USAGE, false;
    app->report = stdout;
    app->in_place = isatty(STDOUT_FILENO);
    bool done = settle_settings(app) && find_inputs(app) && plan_backends(app, &comparison);
    bool resumed; /* which no comparison is */
    app->run = done ? run_open(o->run, RUN_COMPARISON, &resumed, &app->err) : NULL;
    const char *folder = app->run ? run_path(app->run) : NULL;
    char *tokens = folder && !names_shards(o->data) ? run_file(app->run, "tokens") : NULL;
    done = folder && (!tokens || make_tokens(app, tokens));
    if (!done && stop_requested()) app->code = 128 + stop_requested();
    if (!done) undo_start(app); /* text that cannot be used leaves nothing behind */
    if (done) {
        app->begun = true;
        finish_line(app);
        fflush(app->report); /* before others write there */
        char *data = tokens ? xformat("%s/train-*.bin", tokens) : NULL;
        char *heldout = tokens ? xformat("%s/heldout-*.bin", tokens) : NULL;
        char *eval_tokens = xformat("%d", DEFAULT_EVAL_TOKENS);
        char *vocab = xformat("%u", bpe_vocab_size(app->bpe));
        char *more[9] = {NULL};
        size_t n = 0;
        if (tokens) more[n++] = "-data", more[n++] = data, more[n++] = "-heldout", more[n++] = heldout;
        /* The text may have given fewer than were asked for. */
        if (options_given("vocab")) more[n++] = "-vocab", more[n++] = vocab;
        /* With -minutes each would choose for itself, and losses of different tokens do not compare. */
        if (!options_given("eval-tokens")) more[n++] = "-eval-tokens", more[n++] = eval_tokens;
        done = compare_train(&comparison, folder, app->argc, app->argv, more, &app->err);
        run_end_comparison(app->run);
        free(vocab);
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
    return done;
}

/* ---- with a model ---- */

/* A model to use, not to train: that of -load, of -run, or of the newest run; *from is which of them. rows:
 * sequences to take at once at most; 0: as many as the loss is taken of at once. */
static bool load_model(App *app, size_t rows, const char **from) {
    const Options *o = &app->options;
    if (!settle_settings(app)) return false;
    *from = o->load ? o->load : o->run;
    if (!*from) *from = app->newest_run = run_newest(true, &app->err);
    if (*from) app->model = find_model(app, *from);
    int tries = 0;
    if (!app->model) return false;
    while (!take_model(app))
        if (!pick_again(app, *from, &tries)) return false;
    if (!open_device(app)) return false;
    if (rows == 0) rows = o->ctx < MICRO_TOKENS ? MICRO_TOKENS / (size_t)o->ctx : 1;
    if (!plan_model(app, false, rows) || !make_model(app)) return false;
    while (!checkpoint_load(app->model, app->gpt, NULL, &app->err))
        if (!pick_again(app, *from, &tries)) return false;
    say(app, "model %s: %s parameters", app->model, commas(gpt_parameter_count(&app->setup.config)).text);
    return true;
}

static bool not_finite(App *app, const char *what) {
    return error_set(&app->err,
                     "the model %s is of no use: its %s not finite; take another checkpoint by -load, or "
                     "train anew with a lower -lr",
                     app->model, what);
}

/* Stories on stdout, and nothing else there. */
bool generate_stories(App *app) {
    const Options *o = &app->options;
    const char *from;
    if (!load_model(app, 1, &from)) return false;
    Tokens prompt = {0};
    encode_prompt(app, &prompt);
    if (prompt.count >= app->setup.config.ctx && app->setup.config.ctx > 1)
        note(app, "the prompt has %zu tokens; of them the model sees the last %zu (-ctx %zu)", prompt.count,
             app->setup.config.ctx - 1, app->setup.config.ctx);
    tokens_free(&prompt);
    const bool whole = write_stories(app, 0, (uint64_t)o->samples, (size_t)o->sample_tokens, stdout, NULL);
    if (stop_requested()) app->stopped = 128 + stop_requested();
    return whole || stop_requested() || not_finite(app, "logits are");
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
        app->scratch = xstrdup(folder);
        done = data_write_shards(&source, app->bpe, tokens, &facts, &app->err);
        if (done) app->heldout = shards_open(pattern, app->bpe, &app->err);
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
    char *file = xformat("%s/run.json", run);
    json_t *settings = NULL;
    if (!file_exists(file))
        error_set(&app->err,
                  "%s is in no run that would say what its held-out side is; name one with -heldout", from);
    else if (!(settings = run_read_settings(run, &app->err)))
        error_prefix(&app->err, "the held-out side of %s is not known; name one with -heldout", from);
    const char *elsewhere = json_string_value(json_object_get(settings, "heldout"));
    if (settings)
        app->heldout = shards_open(names_shards(elsewhere) ? elsewhere : pattern, app->bpe, &app->err);
    free(file);
    app->has_facts = app->heldout && !names_shards(elsewhere) && data_read_facts(tokens, &app->facts, NULL);
    json_decref(settings);
    free(pattern);
    free(tokens);
    free(run);
    free(checkpoints);
    return app->heldout != NULL;
}

/* One line on stdout. */
bool evaluate_model(App *app) {
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
    if (!isfinite(result.loss)) return not_finite(app, "held-out loss is");
    printf("held-out loss %.4f nats/token  %.4f bits/byte  over %s tokens", result.loss, result.bits_per_byte,
           commas(result.tokens).text);
    if (isfinite(result.floor)) printf("  floor %.4f", result.floor);
    printf("\n");
    if (stop_requested()) app->stopped = 128 + stop_requested(); /* it came with the last windows */
    return true;
}

/* ---- with a tokenizer ---- */

/* The tokenizer that -encode and -decode need. */
static bool need_tokenizer(App *app, const char *mode) {
    const char *path = app->options.tokenizer;
    if (!path) return USAGE(app, "%s needs -tokenizer: a run or a merges file", mode);
    return check_path(app, "tokenizer", path) && load_tokenizer(app, path);
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

bool encode_stdin(App *app) {
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

bool decode_stdin(App *app) {
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

/* ---- with the settings alone ---- */

bool print_config(App *app) {
    /* A model that is loaded would bring its width: no file is read here, and what hangs on it stays open. */
    if (!take_run_settings(app, false) || !settle_settings(app) || (!app->options.load && !settle_rates(app)))
        return false;
    json_t *settings = options_to_json(&app->options);
    json_dumpf(settings, stdout, JSON_INDENT(2));
    printf("\n");
    json_decref(settings);
    return true;
}
