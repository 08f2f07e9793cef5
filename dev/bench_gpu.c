/* bench_gpu.c - how fast a model trains on a GPU, where the time goes, and what the GPU could do at best.
 *
 *     bench_gpu [--device cuda|cuda-fp32|cpu] [--attention flash|naive] [--layers 12] [--heads 12]
 *               [--channels 768] [--ctx 1024] [--vocab 50257] [--batch 64] [--micro 0] [--steps 20]
 *               [--threads 0] [--position learned|rotary] [--deterministic 0] [--brief 0]
 *
 * The default is GPT-2's 124M, as the program trains without -deterministic. --micro: sequences at once (0: the
 * whole batch). Random tokens; three steps warm up, then --steps are timed as they run in training: nothing waits
 * until the last. Three more are profiled: an event before and after each operation, for which nobody waits,
 * tells the time of each kind.
 *
 * Beside it stands the kind's floor, measured in the same call after the model is gone: for matrix products the
 * same ones through the library alone (forward, gradients of inputs, gradients of weights in fp32; the head's in
 * 8,192 rows), each repeated until it has run for a quarter of a second after as long a start, so that clocks
 * are those of steady work; for attention its FLOPs, of causal attention half the table, at the rate of the
 * forward products; for the others the bytes that they cannot do without at the rate of a copy.
 *
 * Then evaluation (forward alone), and generation of one story and of 64 at once: all of it, with sampling on
 * the CPU, and the network alone. The first line is for scripts: "tokens/s N"; with --brief 1 only the
 * kinds' times follow.
 *
 *     mpirun -n 2 bench_gpu ...
 *
 * trains on a GPU a rank, --batch sequences each, and also tells the time of a step in which the GPU waits for the
 * sums of gradients. TRAIN_GPT_AVERAGE_ALONE=1 takes one GPU through all of that too; what it then costs is what
 * NCCL's launches and events cost, and that such steps are not replayed from a recording. */
#include "../common.h"
#include "../model/generate.h"
#include "../model/gpt.h"
#include "../model/ranks.h"
#include "../sgemm.h"
#include "profile_ops.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#ifdef USE_CUDA
#include "../cuda_stream.h"
#endif

enum { WARM_UP = 3, PROFILED_STEPS = 3, STORIES = 64, HEAD_ROWS = 8192 };

typedef struct Settings {
    const char *device, *attention, *position;
    size_t layers, heads, channels, ctx, vocab, batch, micro, steps, threads, deterministic, brief;
} Settings;

/* ---- the command line ---- */
static bool parse(int argc, char **argv, Settings *s, Error *err) {
    const struct {
        const char *flag;
        size_t *number;
        const char **text;
    } flags[] = {{"--device", NULL, &s->device},
                 {"--attention", NULL, &s->attention},
                 {"--position", NULL, &s->position},
                 {"--layers", &s->layers, NULL},
                 {"--heads", &s->heads, NULL},
                 {"--channels", &s->channels, NULL},
                 {"--ctx", &s->ctx, NULL},
                 {"--vocab", &s->vocab, NULL},
                 {"--batch", &s->batch, NULL},
                 {"--micro", &s->micro, NULL},
                 {"--steps", &s->steps, NULL},
                 {"--threads", &s->threads, NULL},
                 {"--deterministic", &s->deterministic, NULL},
                 {"--brief", &s->brief, NULL}};
    for (int i = 1; i < argc; i += 2) {
        size_t f = 0;
        while (f < sizeof flags / sizeof flags[0] && strcmp(argv[i], flags[f].flag) != 0) f++;
        if (f == sizeof flags / sizeof flags[0])
            return error_set(err, "unknown flag %s; the file's head lists them", argv[i]);
        if (i + 1 == argc) return error_set(err, "%s: its value is missing", argv[i]);
        if (flags[f].text) {
            *flags[f].text = argv[i + 1];
            continue;
        }
        char *rest;
        const long long number = strtoll(argv[i + 1], &rest, 10);
        if (rest == argv[i + 1] || *rest || number < 0 || number > 1 << 24)
            return error_set(err, "%s takes an integer from 0 to %d, not \"%s\"", argv[i], 1 << 24,
                             argv[i + 1]);
        *flags[f].number = (size_t)number;
    }
    if (s->batch < 1 || s->steps < 1) return error_set(err, "--batch and --steps must be at least 1");
    if (s->micro == 0 || s->micro > s->batch) s->micro = s->batch;
    if (strcmp(s->position, "learned") != 0 && strcmp(s->position, "rotary") != 0)
        return error_set(err, "--position is learned or rotary, not \"%s\"", s->position);
    return true;
}

/* ---- the device: its libraries' products and copies alone ---- */
typedef struct Bench {
    const Settings *settings;
    const Ops *ops;
    Stream *stream;
    Ranks *ranks;
    size_t buffer_bytes;
    void *a, *b, *c; /* of the products and copies, on the device */
} Bench;

static bool on_cpu(const Bench *bench) {
    return bench->ops == &ops_cpu;
}

/* C = op(A) op(B): (m, n) from (m, k) and (k, n), as activations; with `sums` in fp32, added to what is there. */
typedef struct Product {
    bool transpose_a, transpose_b, sums;
    size_t m, n, k;
} Product;

static void multiply(const Bench *bench, const Product *p) {
    const size_t lda = p->transpose_a ? p->m : p->k, ldb = p->transpose_b ? p->k : p->n;
    if (on_cpu(bench)) {
        sgemm(p->transpose_a, p->transpose_b, p->m, p->n, p->k, 1, (const float *)bench->a, lda,
              (const float *)bench->b, ldb, p->sums ? 1 : 0, (float *)bench->c, p->n);
        return;
    }
#ifdef USE_CUDA
    const cudaDataType_t type = bench->ops->act_size == sizeof(float) ? CUDA_R_32F : CUDA_R_16BF;
    const Matmul matmul = {.transpose_a = p->transpose_a,
                           .transpose_b = p->transpose_b,
                           .m = p->m,
                           .n = p->n,
                           .k = p->k,
                           .alpha = 1,
                           .beta = p->sums ? 1 : 0,
                           .in = type,
                           .out = p->sums ? CUDA_R_32F : type,
                           .a = bench->a,
                           .b = bench->b,
                           .c = bench->c,
                           .lda = lda,
                           .ldb = ldb,
                           .ldc = p->n,
                           .batch = 1};
    cuda_matmul(bench->stream, &matmul);
#endif
}

static void copy(const Bench *bench) {
    if (on_cpu(bench)) memcpy(bench->c, bench->a, bench->buffer_bytes);
#ifdef USE_CUDA
    else
        CUDA_CHECK(cudaMemcpyAsync(bench->c, bench->a, bench->buffer_bytes, cudaMemcpyDeviceToDevice,
                                   bench->stream->stream));
#endif
}

/* Seconds of one product, or with NULL of one copy. */
static double sustained(const Bench *bench, const Product *product) {
    for (size_t times = 1;; times *= 2) {
        bench->ops->mark(bench->stream, 0);
        for (size_t i = 0; i < times; i++) {
            if (product) multiply(bench, product);
            else copy(bench);
        }
        bench->ops->mark(bench->stream, 1);
        const double seconds = bench->ops->seconds_between(bench->stream, 0, 1);
        if (seconds > 0.25) return seconds / (double)times;
    }
}

/* Random numbers, since a GPU takes less power, and so a higher clock, over zeros. */
static void fill(const Bench *bench, void *memory) {
    enum { COUNT = 1 << 20 };
    const size_t size = bench->ops->act_size, block = COUNT * size;
    float *numbers = (float *)xmalloc(COUNT * sizeof *numbers);
    uint8_t *bytes = (uint8_t *)xmalloc(block);
    Rng rng = rng_start(3, 0);
    for (size_t i = 0; i < COUNT; i++) {
        numbers[i] = (float)rng_normal(&rng);
        memcpy(bytes + i * size, (uint8_t *)&numbers[i] + sizeof(float) - size,
               size); /* bf16: the upper half */
    }
    for (size_t at = 0; at < bench->buffer_bytes; at += block)
        bench->ops->upload(bench->stream, (uint8_t *)memory + at, bytes,
                           bench->buffer_bytes - at < block ? bench->buffer_bytes - at : block);
    free(bytes), free(numbers);
}

typedef struct Floors {
    double seconds[KINDS]; /* of a step: LINEAR_FORWARD, LINEAR_BACKWARD, HEAD */
    double input_gradients, weight_gradients, forward_flops, copy_rate; /* seconds; FLOP/s; bytes/s */
} Floors;

static size_t padded(size_t V) {
    return (V + GPT_VOCAB_PADDING - 1) / GPT_VOCAB_PADDING * GPT_VOCAB_PADDING;
}

static bool find_floors(Bench *bench, Floors *floors, Error *err) {
    const Settings *s = bench->settings;
    const size_t rows = s->micro * s->ctx, C = s->channels, V = padded(s->vocab);
    const size_t head_rows = rows < HEAD_ROWS ? rows : HEAD_ROWS;
    const size_t sizes[] = {rows * 4 * C, head_rows * V, 2 * V * C, 8 * C * C}; /* 2, 8: weights in fp32 */
    size_t elements = 0;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        elements = sizes[i] > elements ? sizes[i] : elements;
    bench->buffer_bytes = elements * bench->ops->act_size;
    const size_t least = on_cpu(bench) ? (size_t)64 << 20 : (size_t)256 << 20; /* more than a cache holds */
    if (bench->buffer_bytes < least) bench->buffer_bytes = least;
    void **const buffers[] = {&bench->a, &bench->b, &bench->c};
    bool done = true;
    for (int i = 0; i < 3 && done; i++) {
        *buffers[i] = bench->ops->allocate(bench->stream, bench->buffer_bytes, err);
        done = *buffers[i] != NULL;
    }
    if (done) {
        fill(bench, bench->a), fill(bench, bench->b);
        /* A step takes each of them this often. */
        const double layers = (double)s->layers * (double)s->batch / (double)s->micro;
        const double chunks = (double)(s->batch * s->ctx) / (double)head_rows;
        const size_t shapes[][2] = {{C, 3 * C}, {C, C}, {C, 4 * C}, {4 * C, C}}; /* in, out */
        double flops = 0;
        for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
            const size_t in = shapes[i][0], out = shapes[i][1];
            const Product forward = {.m = rows, .n = out, .k = in};
            const Product inputs = {.transpose_b = true, .m = rows, .n = in, .k = out};
            const Product weights = {.transpose_a = true, .m = in, .n = out, .k = rows, .sums = true};
            floors->seconds[LINEAR_FORWARD] += layers * sustained(bench, &forward);
            floors->input_gradients += layers * sustained(bench, &inputs);
            floors->weight_gradients += layers * sustained(bench, &weights);
            flops += layers * 2 * (double)rows * (double)in * (double)out;
        }
        floors->seconds[LINEAR_BACKWARD] = floors->input_gradients + floors->weight_gradients;
        floors->forward_flops = flops / floors->seconds[LINEAR_FORWARD];
        const Product head[] = {{.transpose_b = true, .m = head_rows, .n = V, .k = C},
                                {.m = head_rows, .n = C, .k = V},
                                {.transpose_a = true, .m = V, .n = C, .k = head_rows, .sums = true}};
        for (int i = 0; i < 3; i++) floors->seconds[HEAD] += chunks * sustained(bench, &head[i]);
        floors->copy_rate = 2 * (double)bench->buffer_bytes / sustained(bench, NULL);
    }
    for (int i = 0; i < 3; i++)
        if (*buffers[i]) bench->ops->release(bench->stream, *buffers[i]);
    return done;
}

/* ---- training ---- */
/* Waits for its end where there are several ranks, as training does. */
static void step(Gpt *gpt, const Bench *bench, const int32_t *ids, uint64_t number) {
    const Settings *s = bench->settings;
    const size_t first = s->batch * (size_t)bench->ranks->rank, all = s->batch * (size_t)bench->ranks->count;
    gpt_step_begin(gpt, number, 1e-4f);
    for (size_t b = 0; b < s->batch; b += s->micro) {
        const size_t micro = s->batch - b < s->micro ? s->batch - b : s->micro;
        if (b + micro == s->batch) ranks_average_begin(bench->ranks, 0);
        gpt_forward_backward(gpt, ids + b * s->ctx, ids + b * s->ctx + 1, micro, first + b, all * s->ctx);
    }
    ranks_average_end(bench->ranks);
    gpt_step_end(gpt,
                 (AdamW){.beta1 = 0.9f, .beta2 = 0.95f, .epsilon = 1e-8f, .weight_decay = 0.1f, .clip = 1});
    ranks_step_done(bench->ranks);
}

typedef struct Result {
    MemoryPlan plan;
    size_t held, in_use, total; /* bytes of the device: by the model, by all, that it has; 0: not known */
    double seconds, loss;       /* of a step */
    double exposed;             /* seconds of it in which the device waits for averaging */
    Spent spent[KINDS];         /* of PROFILED_STEPS */
    double profiled;            /* seconds from the begin of these to their end */
    double evaluation;          /* tokens/s */
    struct {
        double all, network;
    } generation[2]; /* tokens/s of one story, of STORIES */
} Result;

static void memory_of(const Bench *bench, size_t *in_use, size_t *total) {
    size_t free_bytes = 0;
    *total = 0;
    if (bench->ops->memory) bench->ops->memory(bench->stream, &free_bytes, total);
    *in_use = *total - free_bytes;
}

static bool train(const Bench *bench, const GptSetup *setup, const int32_t *ids, Result *result, Error *err) {
    const Settings *s = bench->settings;
    size_t before = 0;
    memory_of(bench, &before, &result->total);
    Gpt *gpt = gpt_plan(setup, &result->plan, err) ? gpt_new(setup, err) : NULL;
    if (!gpt) return false;
    gpt_init_weights(gpt, 1);
    ranks_attach(bench->ranks, gpt);
    uint64_t number = 0;
    for (int i = 0; i < WARM_UP; i++) step(gpt, bench, ids, number++);
    gpt_step_state(gpt); /* waits */
    memory_of(bench, &result->in_use, &result->total);
    result->held = result->in_use - before;

    for (int pass = 0; pass < 2; pass++) { /* the first makes the marks */
        profile_start();
        for (int i = 0; i < PROFILED_STEPS; i++) step(gpt, bench, ids, number++);
        result->profiled = profile_stop(result->spent);
    }

    gpt_record(gpt, true); /* as in training, once its first steps are over */
    for (int i = 0; i < WARM_UP; i++) step(gpt, bench, ids, number++);
    gpt_step_state(gpt);
    ranks_take_exposed(bench->ranks);
    const double start = seconds_now();
    for (size_t i = 0; i < s->steps; i++) step(gpt, bench, ids, number++);
    const StepState state = gpt_step_state(gpt);
    result->seconds = (seconds_now() - start) / (double)s->steps;
    result->exposed = ranks_take_exposed(bench->ranks) / (double)s->steps;
    result->loss = state.loss_sum / ((double)(s->batch * s->ctx) * bench->ranks->count);

    double evaluated = 0;
    for (int pass = 0; pass < 2; pass++) { /* the first warms up */
        const size_t times = pass ? s->steps : WARM_UP;
        const double begun = seconds_now();
        gpt_evaluate_begin(gpt);
        for (size_t i = 0; i < times; i++) gpt_evaluate(gpt, ids, ids + 1, s->micro);
        evaluated = gpt_evaluate_sum(gpt);
        result->evaluation = (double)(times * s->micro * s->ctx) / (seconds_now() - begun);
    }
    ranks_detach(bench->ranks);
    gpt_free(gpt);
    return (isfinite(state.loss_sum) && isfinite(evaluated)) || error_set(err, "the loss is not finite");
}

/* ---- generation ---- */
static void take_token(void *user, size_t sequence, uint32_t token) {
    size_t *count = (size_t *)user;
    (void)sequence, (void)token;
    *count += 1;
}

static bool write_stories(const Bench *bench, GptSetup setup, Result *result, Error *err) {
    const size_t V = setup.config.vocab, T = setup.config.ctx, tokens = T < 257 ? T - 1 : 256;
    setup.training = false, setup.B = 1, setup.cache_B = STORIES;
    Gpt *gpt = gpt_new(&setup, err);
    if (!gpt) return false;
    gpt_init_weights(gpt, 1);
    int32_t next[STORIES] = {0};
    const uint32_t prompt = 0, never = (uint32_t)V;
    const SampleSettings sampling = {.temperature = 0.8f, .top_p = 1, .seed = 1};
    for (int i = 0; i < 2; i++) {
        const size_t n = i ? STORIES : 1;
        for (int pass = 0; pass < 2; pass++) { /* the first warms up */
            const size_t times = pass ? tokens : (tokens < 8 ? tokens : 8);
            size_t count = 0;
            double start = seconds_now();
            generate(gpt, &prompt, 1, n, 0, times, never, &sampling, take_token, &count);
            result->generation[i].all = (double)count / (seconds_now() - start);
            gpt_cache_reset(gpt);
            start = seconds_now();
            for (size_t t = 0; t < times; t++) gpt_cache_extend(gpt, next, n, 1);
            result->generation[i].network = (double)(n * times) / (seconds_now() - start);
        }
    }
    bench->ops->synchronize(bench->stream);
    gpt_free(gpt);
    return true;
}

/* ---- the report ---- */
static double floor_of(Kind kind, const Spent *spent, const Floors *floors) {
    if (floors->seconds[kind] > 0) return floors->seconds[kind];
    return spent->flops / PROFILED_STEPS / floors->forward_flops +
           spent->bytes / PROFILED_STEPS / floors->copy_rate;
}

static void print_kinds(const Result *result, const Floors *floors) {
    double all = 0, all_floors = 0;
    printf("\n%10s %10s %7s %7s  %s\n", "ms a step", "floor ms", "ratio", "share", "kind");
    for (Kind k = 0; k < KINDS; k++) all += result->spent[k].seconds / PROFILED_STEPS;
    for (Kind k = 0; k < KINDS; k++) {
        const Spent *spent = &result->spent[k];
        if (spent->seconds <= 0) continue;
        const double seconds = spent->seconds / PROFILED_STEPS, least = floor_of(k, spent, floors);
        all_floors += least;
        printf("%10.2f %10.2f %7.2f %6.1f%%  %-28s", 1e3 * seconds, 1e3 * least, seconds / least,
               100 * seconds / all, kind_names[k]);
        if (spent->flops > 0) printf("%9.1f TFLOP/s\n", spent->flops / spent->seconds / 1e12);
        else printf("%9.0f GB/s\n", spent->bytes / spent->seconds / 1e9);
    }
    const double profiled = result->profiled / PROFILED_STEPS;
    printf("%10.2f %10.2f %7.2f          sum\n", 1e3 * all, 1e3 * all_floors, all / all_floors);
    printf("%10.2f                             between them, of a profiled step's %.2f\n",
           1e3 * (profiled - all), 1e3 * profiled);
    printf("%10.2f %10.2f %7.2f          a step in training\n", 1e3 * result->seconds, 1e3 * all_floors,
           result->seconds / all_floors);
    printf("floors: forward products %.1f TFLOP/s; backward %.2f ms for inputs, %.2f ms for weights; copy "
           "%.0f GB/s\n",
           floors->forward_flops / 1e12, 1e3 * floors->input_gradients, 1e3 * floors->weight_gradients,
           floors->copy_rate / 1e9);
}

/* The first line; returns its number. */
static double print_speed(const Bench *bench, const Result *result) {
    const double tokens = (double)bench->ranks->count *
                          (double)(bench->settings->batch * bench->settings->ctx);
    printf("tokens/s %.0f\n", tokens / result->seconds);
    return tokens / result->seconds;
}

static void print_report(const Bench *bench, const GptConfig *config, const char *attention,
                         const Result *result, const Floors *floors) {
    const Settings *s = bench->settings;
    const double ranks = bench->ranks->count, rate = print_speed(bench, result);
    char device[160];
    bench->ops->describe(bench->stream, device, sizeof device);
    printf("%s: %s; attention %s\n", bench->ops->name, device, attention);
    printf("%zu x %zu, %zu heads, V %zu, %s positions; B %zu, %zu at once, T %zu; %.1fM parameters\n",
           s->layers, s->channels, s->heads, s->vocab, s->position, s->batch, s->micro, s->ctx,
           (double)gpt_parameter_count(config) / 1e6);
    const double flops = rate * gpt_flops_per_token(config),
                 peak = bench->ops->peak_flops ? ranks * bench->ops->peak_flops(bench->stream) : 0;
    printf("%.2f ms a step, %.1f model TFLOP/s", 1e3 * result->seconds, flops / 1e12);
    if (peak > 0) printf(", MFU %.1f %% of %.1f", 100 * flops / peak, peak / 1e12);
    printf("; loss %.4f\n", result->loss);
    if (bench->ranks->link) {
        char text[160];
        ranks_describe(bench->ranks, text, sizeof text);
        printf("ranks: %s; %.3f ms a step exposed (%.2f %%)\n", text, 1e3 * result->exposed,
               100 * result->exposed / result->seconds);
    }
    printf("evaluation %.0f tokens/s\n", result->evaluation);
    for (int i = 0; i < 2; i++)
        printf("generation, %2d at once: %.0f tokens/s; the network alone %.0f\n", i ? STORIES : 1,
               result->generation[i].all, result->generation[i].network);
    printf("\nmemory planned: %.2f GiB", (double)result->plan.total / 0x1p30);
    if (result->total)
        printf("; after the warm-up the device has given %.2f (%+.1f %%), and %.2f of %.2f are in use",
               (double)result->held / 0x1p30, 100 * ((double)result->held / (double)result->plan.total - 1),
               (double)result->in_use / 0x1p30, (double)result->total / 0x1p30);
    printf("\n");
    for (size_t i = 0; i < result->plan.rows; i++)
        printf("%10.2f GiB  %s\n", (double)result->plan.row[i].bytes / 0x1p30, result->plan.row[i].purpose);
    print_kinds(result, floors);
}

static bool run(const Settings *s, Ranks *ranks, Error *err) {
    Bench bench = {.settings = s, .ops = ops_find(s->device), .ranks = ranks};
    if (!bench.ops) return error_set(err, "this build has no device %s", s->device);
    bench.stream = bench.ops->open(ranks->local_rank, (int)s->threads, err);
    if (!ranks_all(ranks, bench.stream != NULL, NULL, err) ||
        !ranks_join_devices(ranks, bench.ops, bench.stream, err))
        return false;
    GptSetup setup = {
        .config = {.layers = s->layers,
                   .heads = s->heads,
                   .channels = s->channels,
                   .ctx = s->ctx,
                   .vocab = s->vocab,
                   .position = strcmp(s->position, "rotary") == 0 ? POSITION_ROTARY : POSITION_LEARNED},
        .ops = bench.ops,
        .stream = bench.stream,
        .B = s->micro,
        .training = true,
        .deterministic = s->deterministic > 0,
        .seed = 1};
    bool done = gpt_check_config(&setup.config, err);
    if (done && s->ctx < 2) done = error_set(err, "--ctx must be at least 2");
    const AttentionShape shape = {
        .B = s->micro, .T = s->ctx, .H = s->heads, .D = done ? s->channels / s->heads : 0, .training = true};
    setup.attention = done ? attention_find(s->attention, bench.ops->name, &shape, err) : NULL;
    done = setup.attention != NULL;

    const size_t tokens = s->batch * s->ctx;
    int32_t *ids = (int32_t *)xmalloc((tokens + 1) * sizeof *ids);
    Rng rng = rng_start(1, 1 + (uint64_t)ranks->rank);
    for (size_t i = 0; i <= tokens && done; i++) ids[i] = (int32_t)rng_below(&rng, s->vocab);
    Result result = {.seconds = 0};
    Floors floors = {.copy_rate = 0};
    if (done) {
        Ops ops;
        Attention attention;
        GptSetup profiled = setup;
        profile_wrap(setup.ops, setup.attention, &ops, &attention);
        profiled.ops = &ops, profiled.attention = &attention;
        done = train(&bench, &profiled, ids, &result, err);
    }
    if (s->brief) {
        if (done) print_speed(&bench, &result);
        for (Kind k = 0; k < KINDS && done; k++)
            printf("%10.3f ms a step  %s\n", 1e3 * result.spent[k].seconds / PROFILED_STEPS, kind_names[k]);
    } else {
        done = done && write_stories(&bench, setup, &result, err) && find_floors(&bench, &floors, err);
        if (done) print_report(&bench, &setup.config, setup.attention->name, &result, &floors);
    }
    free(ids);
    bench.ops->close(bench.stream);
    return done;
}

int main(int argc, char **argv) {
    Settings s = {.device = "cuda",
                  .attention = "flash",
                  .position = "learned",
                  .layers = 12,
                  .heads = 12,
                  .channels = 768,
                  .ctx = 1024,
                  .vocab = 50257,
                  .batch = 64,
                  .steps = 20};
    Error err = {0};
    Ranks ranks;
    bool done = ranks_start(&ranks, 120, &err) && parse(argc, argv, &s, &err);
    /* Only rank 0 prints its figures. */
    done = done && (ranks.rank == 0 || freopen("/dev/null", "w", stdout)) && run(&s, &ranks, &err);
    if (!done) fprintf(stderr, "bench_gpu: %s\n", err.text);
    if (!done) ranks_abort(&ranks, EXIT_FAILED);
    ranks_end(&ranks);
    return done ? EXIT_DONE : EXIT_FAILED;
}
