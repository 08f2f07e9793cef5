/* training.c - from a planned model and open tokens to the end of a run:
 *   watching   held-out loss, stories
 *   training   the log, the schedule, a step, what happens between steps: an evaluation, stories, a checkpoint;
 *              a run from its first state to its last */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "app.h"
#include "data/report.h"
#include "model/generate.h"

enum {
    DEFAULT_WARMUP = 50,         /* steps */
    CUT_RISE = 10,               /* the last ones of a warm-up that is cut, in which the rate catches up */
    DIRECT_STEPS = 8,            /* a device that can replays what it has recorded from about then on */
    UNTIMED_STEPS = 2,           /* -minutes: caches and threads warm up; ... */
    UNTIMED_DIRECT = 10,         /* ... on a device that replays, until it does */
    TIMED_STEPS = 20,            /* ... then at most so many are timed */
    TIMED_EVALUATIONS = 3,       /* micro-batches that are timed before the first evaluation */
    ENOUGH_EVAL_TOKENS = 100000, /* rather fewer evaluations than fewer tokens */
    MAX_BAD_STEPS = 3            /* steps in a row that are not finite end a run */
};

static const double EVALUATION_SHARE = 0.2; /* of -minutes */

static atomic_bool in_steps; /* read by the thread that takes signals */

/* A stop signal now waits for the end of a step. */
bool taking_steps(void) {
    return atomic_load(&in_steps);
}

/* ---- watching: held-out loss ---- */

/* The floor of an evaluation of so many tokens. */
static double floor_of(App *app, uint64_t tokens) {
    if (!leads(app) || !app->has_facts) return NAN;
    if (app->floor_tokens == tokens) return app->floor;
    Error err;
    const bool known = data_floor(&app->facts, app->bpe, app->heldout, tokens, &app->floor, &err);
    if (stop_requested()) return NAN; /* the evaluation has no result either */
    if (!known) note(app, "no floor is known for the held-out loss: %s", err.text);
    app->floor_tokens = tokens;
    return app->floor;
}

/* The loss of the first eval_windows held-out windows. The same for any micro-batch and any number of ranks, since
 * it is a sum over tokens: the ranks take micro-batches in turn. Bits per byte: an end of a story costs bits and
 * has no bytes. False without an error where a stop was asked for of this rank or another (app->stop). */
bool evaluate(App *app, Evaluation *result) {
    const size_t T = app->setup.config.ctx, B = app->setup.B, count = (size_t)app->ranks.count;
    result->tokens = app->eval_windows * T;
    result->floor = floor_of(app, result->tokens);
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
void encode_prompt(const App *app, Tokens *ids) {
    tokens_reserve(ids, 1);
    ids->ids[ids->count++] = bpe_end_of_text(app->bpe);
    const char *prompt = app->options.prompt;
    if (!prompt) return;
    BpeEncoder *encoder = bpe_encoder_new(app->bpe, 0);
    bpe_encode(encoder, (const uint8_t *)prompt, strlen(prompt), ids);
    bpe_encoder_free(encoder);
}

/* Writes the stories from number `first` up to `stories`, of at most max_tokens new tokens, each the prompt and
 * what follows; on_story (or NULL) gets them whole. False as generate. */
bool write_stories(App *app, uint64_t first, uint64_t stories, size_t max_tokens, FILE *out,
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
    if (!run_log(app->run, json, &app->err)) note(app, "%s", app->err.text);
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

static bool same_but_for_digits(const char *a, const char *b) {
    for (;; a++, b++) {
        a += strspn(a, "0123456789"), b += strspn(b, "0123456789");
        if (*a != *b || !*a) return *a == *b;
    }
}

/* Tells of a failure when it begins and when it becomes another one: a full disk is one, however often something is
 * written and whatever is free. text NULL: it works. */
static void tell_trouble(App *app, Trouble kind, const char *text, const char *more) {
    char *told = app->trouble[kind].text;
    if (text && !same_but_for_digits(told, text)) note(app, "%s%s", text, more);
    snprintf(told, sizeof app->trouble[kind].text, "%s", text ? text : "");
}

static void write_report(App *app) {
    if (!leads(app) || !run_is_in_place(app->run, NULL)) return; /* of which save() tells */
    const double begun = seconds_now();
    const bool done = report_write(run_path(app->run), &app->err);
    tell_trouble(app, REPORTING, done ? NULL : app->err.text, "");
    app->reported = seconds_now(), app->reporting = app->reported - begun;
}

/* Between times the report must not cost more than a fiftieth: each is made of all of the log, which grows. */
static void renew_report(App *app) {
    if (seconds_now() - app->reported >= 50 * app->reporting) write_report(app);
}

/* ---- training: the schedule ---- */

/* Whether a setting was chosen for this number of steps, by its key in JSON. */
static bool is_chosen(const App *app, const char *key) {
    for (size_t i = 0; i < json_array_size(app->chosen); i++)
        if (strcmp(json_string_value(json_array_get(app->chosen, i)), key) == 0) return true;
    return false;
}

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
        const int64_t least = o->minutes == OPTION_AUTO ? 0 : (int64_t)app->state.step + CUT_RISE;
        const int64_t fifth = steps / 5 > least ? steps / 5 : least;
        if (list[i].most == 0) *list[i].value = fifth < DEFAULT_WARMUP ? fifth : DEFAULT_WARMUP;
        else if (times) *list[i].value = (int64_t)ceil((double)steps / times[i]);
        else *list[i].value = (steps + list[i].most - 1) / list[i].most;
    }
    app->state.total_steps = (uint64_t)steps;
    return write_settings(app);
}

/* Linear to -lr, then a cosine to -min-lr (Loshchilov and Hutter 2017): a function of step, -steps and -warmup
 * alone, and of who chose that. With -minutes the cosine begins only after the steps that are timed to find -steps,
 * whatever the warm-up, and one that is cut then has risen as the usual one does until its last steps, which come
 * after those: a resume from before gives the same. */
static double learning_rate(const App *app, uint64_t step) {
    const Options *o = &app->options;
    const double warmup = is_auto(o->warmup) ? DEFAULT_WARMUP : (double)o->warmup, at = (double)step;
    const bool cut = o->minutes != OPTION_AUTO && is_chosen(app, "warmup") && warmup < DEFAULT_WARMUP;
    const double bend = warmup - CUT_RISE,
                 there = bend / DEFAULT_WARMUP; /* steps; the share of -lr by then */
    if (cut && at < bend) return o->lr * (at + 1) / DEFAULT_WARMUP;
    if (cut && at < warmup) return o->lr * (there + (1 - there) * (at + 1 - bend) / CUT_RISE);
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
    const bool open = is_auto(o->warmup);
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
    if (open && !is_auto(o->warmup) && !is_chosen(app, "warmup")) /* by rank 0, which has noted it */
        json_array_append_new(app->chosen, json_string("warmup"));
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
    say(app, "evaluations take %s held-out tokens each, so that they fit into a fifth of %g min",
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
    char warmup[48] = "";
    if (is_chosen(app, "warmup") && o->warmup < DEFAULT_WARMUP)
        snprintf(warmup, sizeof warmup, ", %" PRId64 " of them of warm-up",
                 o->warmup < o->steps ? o->warmup : o->steps);
    say(app, "%s into %g min%s", counted((uint64_t)o->steps, "step fits", "steps fit").text, o->minutes,
        warmup);
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

/* The loss of the first evaluation, which the log knows. */
static bool find_first_loss(void *first, const RunRow *row, Error *err) {
    (void)err;
    if (strcmp(row->type, "eval") == 0 && isnan(*(double *)first))
        *(double *)first = json_number_value(json_object_get(row->json, "loss"));
    return true;
}

/* The run ends: its numbers are no longer finite. Its best model is of use where it has learned something. */
static bool end_not_finite(App *app, const char *what) {
    double first = NAN;
    if (app->run) run_log_each(run_path(app->run), find_first_loss, &first, NULL);
    app->told = true; /* their sums are the same */
    return error_set(&app->err, "step %" PRIu64 ": %s; start a new run with a lower -lr (%g), from %s",
                     app->state.step, what, app->options.lr,
                     app->state.best_loss < first
                         ? "this one's best model by -load or from none"
                         : "new weights: this one's best model is no better than they");
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
        note(app, "step %" PRIu64 ": %s is not finite; the step's update was left out", app->state.step,
             what);
        return true;
    }
    char more[192];
    snprintf(more, sizeof more, "%s is not finite, as in the %d before", what, MAX_BAD_STEPS - 1);
    return end_not_finite(app, more);
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
    gpt_step_begin(app->gpt, app->state.step, (float)learning_rate(app, app->state.step));
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
    app->bad_loss = false;
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
    log_row(app, json_pack("{s:s, s:I, s:o, s:f, s:o, s:f, s:f, s:o, s:I}", "type", "step", "step",
                           (json_int_t)app->state.step, "loss", run_number(loss), "lr", (double)step.lr,
                           "grad_norm", run_number((double)step.grad_norm), "ms", 1e3 * seconds,
                           "tokens_per_s", (double)(batch * T) / seconds, "mfu",
                           run_number(mfu(app, seconds)), "tokens", (json_int_t)app->state.tokens));
    print_step(app, &step, loss, seconds);
    /* Its row and its line are part of what a step takes. */
    if (app->pace.steps > untimed_steps(app)) app->pace.timed += seconds_now() - begun;
    return check_finite(app, &step);
}

/* ---- training: what happens between steps ---- */

static bool is_due(const App *app, int64_t every) {
    const int64_t step = (int64_t)app->state.step;
    return step == app->options.steps || (every > 0 && step % every == 0);
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

/* False only for an error; an evaluation that a signal broke off has no result. A loss that is not finite is that of
 * a step that was not: the model is not saved, and no result of a run. */
static bool watch_loss(App *app) {
    Evaluation result;
    ranks_in_steps(&app->ranks, false);
    if (!evaluate(app, &result)) return app->stop != 0;
    app->bad_loss = !isfinite(result.loss);
    app->state.eval_loss = app->bad_loss ? NAN : result.loss;
    log_row(app,
            json_pack("{s:s, s:I, s:o, s:o, s:I, s:o}", "type", "eval", "step", (json_int_t)app->state.step,
                      "loss", run_number(result.loss), "bits_per_byte", run_number(result.bits_per_byte),
                      "tokens", (json_int_t)result.tokens, "floor", run_number(result.floor)));
    if (app->bad_loss) {
        write_report(app);
        if (app->state.step > 0 && (int64_t)app->state.step == app->options.steps)
            return end_not_finite(app, "the held-out loss is not finite");
        note(app, "step %" PRIu64 ": the held-out loss is not finite", app->state.step);
        return true;
    }
    char beside[64] = "";
    if (isfinite(result.floor)) snprintf(beside, sizeof beside, "  floor %.4f", result.floor);
    say(app, "step %" PRIu64 "  held-out loss %.4f nats/token  %.3f bits/byte  over %s tokens%s",
        app->state.step, result.loss, result.bits_per_byte, commas(result.tokens).text, beside);
    renew_report(app);
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
    if (!run_is_in_place(app->run, &app->err)) return false;
    if (app->bad_loss)
        return error_set(&app->err,
                         "the held-out loss after step %" PRIu64
                         " is not finite, so that its model is not saved",
                         app->state.step);
    TrainState state = app->state;
    if (is_best(&state)) state.best_loss = state.eval_loss, state.best_step = state.step;
    const CheckpointFile files[] = {{"merges.txt", app->merges.data, app->merges.size},
                                    {"tokenizer.json", app->tokenizer_json.data, app->tokenizer_json.size}};
    char *checkpoints = run_file(app->run, "checkpoints");
    const bool synced = run_log_sync(app->run, &app->err);
    tell_trouble(app, SYNCING_LOG, synced ? NULL : app->err.text, "");
    const bool done = folder_make(checkpoints, &app->err) &&
                      checkpoint_save(checkpoints, app->gpt, &state, files, 2, &app->err);
    if (done) {
        app->state = state;
        app->saved = true, app->saved_step = state.step;
        if (app->trouble[SAVING].text[0])
            note(app, "step %" PRIu64 " is saved: checkpoints can be written again", state.step);
        tell_trouble(app, SAVING, NULL, "");
        Error err;
        const bool pruned = checkpoint_prune(checkpoints, (size_t)o->keep, state.best_step, &err);
        tell_trouble(app, REMOVING_OLD, pruned ? NULL : err.text, "");
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
        if (!whole && !stop_requested())
            note(app, "step %" PRIu64 ": the logits are not finite, so that no story is written",
                 state->step);
        agree_on_stop(app);
        if (!whole && agreed_stop(app)) return true;
    }
    state->cut_short = state->stories = 0;
    const bool last = (int64_t)state->step == o->steps;
    const bool best = o->checkpoint_every > 0 && is_best(state);
    const bool due = is_due(app, o->checkpoint_every) || best;
    /* The last save is the end's, which fails if it does. */
    if (!last && (resumed || (due && state->bad_steps == 0 && !app->bad_loss)) && !save(app))
        tell_trouble(app, SAVING, app->err.text, "; the training goes on");
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
    atomic_store(&in_steps, leads(app));
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
        int tries = 0;
        while (!checkpoint_load(app->model, app->gpt, NULL, &app->err))
            if (app->ranks.count > 1 || !pick_again(app, o->load, &tries)) return false;
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
    const bool done = remove(log) == 0 || errno == ENOENT ||
                      error_set(&app->err, "cannot remove %s, which begins anew: %s; check its permissions",
                                log, strerror(errno));
    free(log);
    return done;
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

/* Where the run is, and what to type next. */
void print_next(App *app) {
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
    char launcher[32] = "";
    if (app->ranks.count > 1) snprintf(launcher, sizeof launcher, "mpirun -n %d ", app->ranks.count);
    say(app, "go on    %s%s -resume -run %s%s", launcher, program, run, more);
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
    if (!trained) app->err = cause;             /* what ended the run, whether or not it could be saved */
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
bool train_model(App *app) {
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
