/* bench_train.c - how fast a whole training step is, what memory it takes, and where its time goes.
 *
 *     bench_train [--layers 6] [--heads 6] [--channels 384] [--vocab 4096] [--ctx 256] [--batch 8]
 *                 [--attention flash] [--threads N] [--steps 20] [--json FILE]
 *
 * Steps of model/gpt.c on random tokens, one micro-batch each: forward, backward, clipping, AdamW. Two steps
 * warm up, the median of the others counts. MFU is model FLOPs, (6 N + 6 L T C) a token, against the rate of a
 * 2048^3 matrix product of sgemm.h on the same threads: the mean of its medians just before and just after.
 *
 * Then as many steps again with a clock around every operation, which gives the table of times: of an operation
 * that is matrix products above all, also the rate, counting only the products (of causal attention, those
 * below the diagonal, backward 2.5 times forward). "lost" is the time beyond what the products would take at
 * sgemm's rate. The clocked step may be slower; speed is that of the plain one. Memory is planned as in
 * train_gpt's start-up table; "held" is VmRSS after the plain steps.
 *
 *     mpirun -n 2 bench_train --threads 1 ...
 *
 * shares the batch among ranks, as training does. "averaging" is then what a step's communication costs: the
 * time in which computing stands still for it, mean of the plain steps; on CPUs also what is done on the way,
 * since nobody else can do it. Figures are rank 0's; sgemm's rate is that of one rank while all measure it, times
 * their number. */
#include "../common.h"
#include "../measure.h"
#include "../model/gpt.h"
#include "../model/ranks.h"
#include "../sgemm.h"
#include "../simd.h"
#include "profile_ops.h"

#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

typedef struct Settings {
    size_t layers, heads, channels, vocab, ctx, batch, threads, steps;
    const char *attention, *json;
} Settings;

/* ---- the command line ---- */

static bool parse_size(const char *flag, const char *text, size_t *value, Error *err) {
    char *end;
    errno = 0;
    const unsigned long long n = strtoull(text, &end, 10);
    if (errno || end == text || *end || text[0] < '0' || text[0] > '9' || n < 1 || n > 1u << 24)
        return error_set(err, "%s takes an integer from 1 to %u, not \"%s\"", flag, 1u << 24, text);
    *value = (size_t)n;
    return true;
}

static bool parse(int argc, char **argv, Settings *s, Error *err) {
    const struct {
        const char *flag;
        size_t *number;
        const char **text;
    } flags[] = {
        {"--layers", &s->layers, NULL},   {"--heads", &s->heads, NULL}, {"--channels", &s->channels, NULL},
        {"--vocab", &s->vocab, NULL},     {"--ctx", &s->ctx, NULL},     {"--batch", &s->batch, NULL},
        {"--threads", &s->threads, NULL}, {"--steps", &s->steps, NULL}, {"--attention", NULL, &s->attention},
        {"--json", NULL, &s->json}};
    for (int i = 1; i < argc; i += 2) {
        size_t f = 0;
        while (f < sizeof flags / sizeof *flags && strcmp(argv[i], flags[f].flag) != 0) f++;
        if (f == sizeof flags / sizeof *flags)
            return error_set(
                err,
                "unknown flag \"%s\"; there are --layers --heads --channels --vocab --ctx --batch "
                "--attention --threads --steps --json",
                argv[i]);
        if (i + 1 == argc) return error_set(err, "%s takes a value", argv[i]);
        if (flags[f].text) *flags[f].text = argv[i + 1];
        else if (!parse_size(argv[i], argv[i + 1], flags[f].number, err)) return false;
    }
    return true;
}

/* ---- measuring ---- */

enum { WARM_UP = 2 };

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *times, size_t n) {
    qsort(times, n, sizeof *times, by_value);
    return n % 2 ? times[n / 2] : 0.5 * (times[n / 2 - 1] + times[n / 2]);
}

/* FLOP/s of a 2048^3 product, from at least 3 of them and a second. */
static double sgemm_flops(void) {
    enum { N = 2048, MAX_TIMES = 50 };
    float *a = xmalloc(3 * (size_t)N * N * sizeof *a), *b = a + (size_t)N * N, *c = b + (size_t)N * N;
    double times[MAX_TIMES];
    size_t n = 0;
    Rng rng = rng_start(1, 0);
    for (size_t i = 0; i < 2 * (size_t)N * N; i++) a[i] = (float)rng_uniform(&rng) - 0.5f;
    sgemm(false, false, N, N, N, 1.0f, a, N, b, N, 0.0f, c, N);
    for (const double start = seconds_now(); n < 3 || (n < MAX_TIMES && seconds_now() - start < 1.0); n++) {
        const double t = seconds_now();
        sgemm(false, false, N, N, N, 1.0f, a, N, b, N, 0.0f, c, N);
        times[n] = seconds_now() - t;
    }
    free(a);
    return 2.0 * N * N * N / median(times, n);
}

typedef struct Result {
    double seconds;    /* of a step, the median */
    double averaging;  /* of it, in which computing waited for other ranks; a mean */
    double loss;       /* of the last step, nats per token */
    size_t held, peak; /* VmRSS and VmHWM after the steps, bytes */
} Result;

/* `steps` steps after the warm-up, on the same random tokens, with whatever ops and attention `setup` has; these
 * are profiled ones where `spent` is not NULL. */
static bool take_steps(const GptSetup *setup, Ranks *ranks, size_t steps, Result *result, Spent *spent,
                       Error *err) {
    const size_t rows = setup->B * setup->config.ctx, of_step = rows * (size_t)ranks->count,
                 first = setup->B * (size_t)ranks->rank;
    Gpt *gpt = gpt_new(setup, err);
    if (!gpt) return false;
    int32_t *tokens = xmalloc(2 * rows * sizeof *tokens); /* inputs, targets: (B, T) each */
    double *times = xmalloc(steps * sizeof *times);
    const AdamW adamw = {.beta1 = 0.9f, .beta2 = 0.95f, .epsilon = 1e-8f, .weight_decay = 0.1f, .clip = 1.0f};
    Rng rng = rng_start(2, (uint64_t)ranks->rank);
    for (size_t i = 0; i < 2 * rows; i++) tokens[i] = (int32_t)rng_below(&rng, setup->config.vocab);
    gpt_init_weights(gpt, 1);
    StepState state = {0};
    ranks_attach(ranks, gpt);
    for (size_t step = 0; step < WARM_UP + steps; step++) {
        if (step == WARM_UP && spent) profile_start();
        if (step == WARM_UP) ranks_take_exposed(ranks);
        const double begun = seconds_now();
        gpt_step_begin(gpt, step, 1e-4f);
        ranks_average_begin(ranks, 0);
        gpt_forward_backward(gpt, tokens, tokens + rows, setup->B, first, of_step);
        ranks_average_end(ranks);
        gpt_step_end(gpt, adamw);
        ranks_step_done(ranks);
        state = gpt_step_state(gpt);
        if (step >= WARM_UP) times[step - WARM_UP] = seconds_now() - begun;
    }
    *result = (Result){.seconds = median(times, steps),
                       .averaging = ranks_take_exposed(ranks) / (double)steps,
                       .loss = state.loss_sum / (double)of_step,
                       .held = memory_now(),
                       .peak = memory_peak()};
    if (spent) profile_stop(spent);
    const bool finite = !state.skip;
    free(times);
    free(tokens);
    ranks_detach(ranks);
    gpt_free(gpt);
    return finite || error_set(err, "the loss or a gradient is not finite");
}

/* ---- the tables ---- */

typedef struct Report {
    const Settings *settings;
    int ranks;
    GptConfig config;
    MemoryPlan plan;
    double sgemm_before, sgemm_after; /* FLOP/s */
    Result plain, clocked;
    Spent spent[KINDS];
} Report;

static double sgemm_rate(const Report *report) {
    return 0.5 * (report->sgemm_before + report->sgemm_after);
}

/* Of all ranks together. */
static double peak_rate(const Report *report) {
    return report->ranks * sgemm_rate(report);
}

static double tokens_of_step(const Report *report) {
    return (double)report->settings->batch * (double)report->config.ctx;
}

static double model_flops(const Report *report) {
    return gpt_flops_per_token(&report->config) * tokens_of_step(report) / report->plain.seconds;
}

static void print_report(const Report *report) {
    const Result *plain = &report->plain;
    const double steps = (double)report->settings->steps, rate = sgemm_rate(report);
    printf("  %-28s %10.0f\n", "tokens/s", tokens_of_step(report) / plain->seconds);
    printf("  %-28s %10.1f\n", "ms a step", 1e3 * plain->seconds);
    printf("  %-28s %10.1f\n", "model GFLOP/s", 1e-9 * model_flops(report));
    printf("  %-28s %10.1f  %.1f before, %.1f after\n", "sgemm GFLOP/s", 1e-9 * rate,
           1e-9 * report->sgemm_before, 1e-9 * report->sgemm_after);
    printf("  %-28s %9.1f%%\n", "MFU", 100 * model_flops(report) / peak_rate(report));
    if (report->ranks > 1)
        printf("  %-28s %10.1f  %.1f %% of the step, %d ranks\n", "averaging, ms a step",
               1e3 * plain->averaging, 100 * plain->averaging / plain->seconds, report->ranks);

    printf("\nmemory, MB\n");
    for (size_t i = 0; i < report->plan.rows; i++)
        printf("  %-36s %10.1f\n", report->plan.row[i].purpose, 1e-6 * (double)report->plan.row[i].bytes);
    printf("  %-36s %10.1f\n", "planned", 1e-6 * (double)report->plan.total);
    if (plain->held)
        printf("  %-36s %10.1f  %+.1f%%\n", "held", 1e-6 * (double)plain->held,
               100 * ((double)plain->held / (double)report->plan.total - 1));
    printf("  %-36s %10.1f\n", "held at the peak", 1e-6 * (double)plain->peak);

    printf("\n%-29s %10s %8s %10s %9s %9s\n", "a step with clocks", "ms", "share", "GFLOP/s", "of sgemm",
           "lost ms");
    double sum = 0, lost = 0;
    for (Kind kind = 0; kind < KINDS; kind++) sum += report->spent[kind].seconds / steps;
    for (Kind kind = 0; kind < KINDS; kind++) {
        const double seconds = report->spent[kind].seconds / steps, flops = report->spent[kind].flops / steps;
        char products[32] = "";
        if (flops > 0)
            snprintf(products, sizeof products, "%10.1f %8.1f%%", 1e-9 * flops / seconds,
                     100 * flops / seconds / rate);
        lost += seconds - flops / rate;
        printf("  %-27s %10.2f %7.1f%% %20s %9.2f\n", kind_names[kind], 1e3 * seconds, 100 * seconds / sum,
               products, 1e3 * (seconds - flops / rate));
    }
    printf("  %-27s %10.2f %7.1f%% %20s %9.2f\n", "together", 1e3 * sum, 100.0, "", 1e3 * lost);
}

static bool write_json(const Report *report, Error *err) {
    const Settings *s = report->settings;
    json_t *memory = json_object(), *parts = json_array();
    for (size_t i = 0; i < report->plan.rows; i++)
        json_object_set_new(memory, report->plan.row[i].purpose,
                            json_integer((json_int_t)report->plan.row[i].bytes));
    for (Kind kind = 0; kind < KINDS; kind++)
        json_array_append_new(parts, json_pack("{s:s, s:f, s:f}", "name", kind_names[kind], "ms",
                                               1e3 * report->spent[kind].seconds / (double)s->steps, "gflop",
                                               1e-9 * report->spent[kind].flops / (double)s->steps));
    json_t *all = json_pack(
        "{s:{s:I, s:I, s:I, s:I, s:I, s:I, s:s, s:I, s:I}, s:i, s:f, s:s, s:s, s:I, s:f, s:f, s:f, s:f, s:f, "
        "s:f, s:f, "
        "s:o, s:I, "
        "s:I, s:I, s:o}",
        "settings", "layers", (json_int_t)s->layers, "heads", (json_int_t)s->heads, "channels",
        (json_int_t)s->channels, "vocab", (json_int_t)s->vocab, "ctx", (json_int_t)s->ctx, "batch",
        (json_int_t)s->batch, "attention", s->attention, "threads", (json_int_t)s->threads, "steps",
        (json_int_t)s->steps, "ranks", report->ranks, "averaging_ms", 1e3 * report->plain.averaging, "simd",
        simd_name(simd_level()), "sgemm", sgemm_library(), "parameters",
        (json_int_t)gpt_parameter_count(&report->config), "tokens_per_s",
        tokens_of_step(report) / report->plain.seconds, "ms", 1e3 * report->plain.seconds, "model_gflops",
        1e-9 * model_flops(report), "sgemm_gflops_before", 1e-9 * report->sgemm_before, "sgemm_gflops_after",
        1e-9 * report->sgemm_after, "mfu", model_flops(report) / peak_rate(report), "loss",
        report->plain.loss, "memory_bytes", memory, "planned_bytes", (json_int_t)report->plan.total,
        "held_bytes", (json_int_t)report->plain.held, "peak_bytes", (json_int_t)report->plain.peak, "clocked",
        parts);
    char *text = json_dumps(all, JSON_INDENT(2));
    const bool written = text ? file_replace(s->json, text, strlen(text), err)
                              : error_set(err, "cannot write %s as JSON", s->json);
    free(text);
    json_decref(all);
    return written;
}

/* ---- the whole of it ---- */

static bool bench(Settings *s, Ranks *ranks, Error *err) {
    const Ops *ops = &ops_cpu;
    if (s->batch % (size_t)ranks->count != 0)
        return error_set(err, "--batch %zu does not divide among %d ranks", s->batch, ranks->count);
    Stream *stream = ops->open(0, (int)s->threads, err);
    if (!stream) return false;
    const size_t B = s->batch / (size_t)ranks->count;
    Report report = {.settings = s,
                     .ranks = ranks->count,
                     .config = {.layers = s->layers,
                                .heads = s->heads,
                                .channels = s->channels,
                                .ctx = s->ctx,
                                .vocab = s->vocab,
                                .position = POSITION_ROTARY}};
    GptSetup setup = {.config = report.config, .ops = ops, .stream = stream, .B = B, .training = true};
    bool done = gpt_check_config(&report.config, err);
    const AttentionShape shape = {
        .B = B, .T = s->ctx, .H = s->heads, .D = s->channels / s->heads, .training = true};
    setup.attention = done ? attention_find(s->attention, ops->name, &shape, err) : NULL;
    done = setup.attention && gpt_plan(&setup, &report.plan, err);
    if (done) {
        report.sgemm_before = sgemm_flops();
        done = memory_plan_process(&setup, &report.plan, err); /* now: without what those products held */
    }
    if (done) {
        char device[128];
        ops->describe(stream, device, sizeof device);
        printf("%zu layers, %zu heads, %zu channels, V %zu, ctx %zu, batch %zu: %.1fM parameters; %s; "
               "attention %s\n",
               s->layers, s->heads, s->channels, s->vocab, s->ctx, s->batch,
               1e-6 * (double)gpt_parameter_count(&report.config), device, setup.attention->name);
        if (sgemm_warning()) printf("note: %s\n", sgemm_warning());
        printf("\n");
        done = take_steps(&setup, ranks, s->steps, &report.plain, NULL, err);
    }
    if (done) {
        report.sgemm_after = sgemm_flops();
        Ops outer_ops;
        Attention outer_attention;
        profile_wrap(ops, setup.attention, &outer_ops, &outer_attention);
        GptSetup with_clock = setup;
        with_clock.ops = &outer_ops, with_clock.attention = &outer_attention;
        done = take_steps(&with_clock, ranks, s->steps, &report.clocked, report.spent, err);
    }
    if (done && report.clocked.loss != report.plain.loss)
        done = error_set(err, "the same steps with clocks gave another loss: %.9g, not %.9g",
                         report.clocked.loss, report.plain.loss);
    if (done) print_report(&report);
    done = done && (ranks->rank > 0 || !s->json || write_json(&report, err));
    ops->close(stream);
    return done;
}

int main(int argc, char **argv) {
    Settings s = {.layers = 6,
                  .heads = 6,
                  .channels = 384,
                  .vocab = 4096,
                  .ctx = 256,
                  .batch = 8,
                  .steps = 20,
                  .attention = "flash"};
    Error err;
    if (!parse(argc, argv, &s, &err)) {
        fprintf(stderr, "bench_train: %s\n", err.text);
        return EXIT_USAGE;
    }
    Ranks ranks;
    bool done = ranks_start(&ranks, 120, &err);
#ifdef _OPENMP
    if (s.threads == 0) s.threads = (size_t)omp_get_max_threads();
#else
    s.threads = 1;
#endif
    /* Only rank 0 prints its figures. */
    done = done && (ranks.rank == 0 || freopen("/dev/null", "w", stdout)) && bench(&s, &ranks, &err);
    if (!done) fprintf(stderr, "bench_train: %s\n", err.text);
    if (!done) ranks_abort(&ranks, EXIT_FAILED);
    ranks_end(&ranks);
    return done ? EXIT_DONE : EXIT_FAILED;
}
