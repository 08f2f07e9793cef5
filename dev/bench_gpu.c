/* bench_gpu.c - how fast a model trains on a GPU, and where the time goes.
 *
 *     bench_gpu [--device cuda|cuda-fp32|cpu] [--attention flash|naive] [--layers 12] [--heads 12]
 *               [--channels 768] [--ctx 1024] [--vocab 50257] [--batch 64] [--steps 20] [--threads 0]
 *               [--position learned|rotary]
 *
 * The default is GPT-2's 124M. Random tokens; three steps warm up, then --steps are timed as they run in
 * training: nothing waits until the last. Three more are taken with a wait after each operation, which
 * tells the time of each kind and the rate it reaches: FLOPs of its matrix products, or the bytes that it
 * cannot do without, over its time. Causal attention is counted once (half the table), whatever a backend
 * computes besides. The first line is for scripts: "tokens/s N".
 *
 *     mpirun -n 2 bench_gpu ...
 *
 * trains on a GPU a rank, --batch sequences each, and also tells the time of a step in which the GPU waits for the
 * sums of gradients. TRAIN_GPT_AVERAGE_ALONE=1 takes one GPU through all of that too; what it then costs is what
 * NCCL's launches and events cost. */
#include "../common.h"
#include "../model/gpt.h"
#include "../model/ranks.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { WARM_UP = 3, PROFILED = 3 };

typedef struct Settings {
    const char *device, *attention, *position;
    size_t layers, heads, channels, ctx, vocab, batch, steps, threads;
} Settings;

/* ---- time by kind of operation ---- */
typedef enum Kind {
    EMBEDDING,
    NORM_FORWARD,
    NORM_BACKWARD,
    LINEAR_FORWARD,
    LINEAR_BACKWARD,
    ROTARY,
    ATTENTION_FORWARD,
    ATTENTION_BACKWARD,
    HEAD,
    UPDATE,
    KINDS
} Kind;
static const char *const kind_names[KINDS] = {"embedding, both ways", "residual and norm, forward",
                                              "... backward",         "linear, forward",
                                              "... backward",         "rotary, both ways",
                                              "attention, forward",   "... backward",
                                              "head, both ways",      "norm and AdamW"};

static const Ops *base;
static const Attention *base_attention;
static bool profiling;
static struct { double seconds, flops, bytes; } spent[KINDS];

static double begin(Stream *stream) {
    if (profiling) base->synchronize(stream);
    return seconds_now();
}
static void end(Stream *stream, double start, Kind kind, double flops, double bytes) {
    if (!profiling) return;
    base->synchronize(stream);
    spent[kind].seconds += seconds_now() - start, spent[kind].flops += flops, spent[kind].bytes += bytes;
}
static double acts(size_t rows, size_t columns) {
    return (double)rows * (double)columns * (double)base->act_size;
}

static void embedding_forward(Stream *stream, act_t *x, const int32_t *tokens, const act_t *wte,
                              const act_t *wpe, size_t B, size_t T, size_t C, size_t first_position,
                              Dropout dropout) {
    const double start = begin(stream);
    base->embedding_forward(stream, x, tokens, wte, wpe, B, T, C, first_position, dropout);
    end(stream, start, EMBEDDING, 0, 2 * acts(B * T, C));
}
static void embedding_backward(Stream *stream, float *d_wte, float *d_wpe, const act_t *dx,
                               const int32_t *tokens, size_t B, size_t T, size_t C, Dropout dropout) {
    const double start = begin(stream);
    base->embedding_backward(stream, d_wte, d_wpe, dx, tokens, B, T, C, dropout);
    end(stream, start, EMBEDDING, 0, acts(B * T, C));
}
static void residual_norm_forward(Stream *stream, act_t *sum, act_t *normed, float *mean, float *rstd,
                                  const act_t *residual, const act_t *branch, const act_t *gain,
                                  const act_t *bias, size_t rows, size_t C, Dropout dropout) {
    const double start = begin(stream);
    base->residual_norm_forward(stream, sum, normed, mean, rstd, residual, branch, gain, bias, rows, C,
                                dropout);
    end(stream, start, NORM_FORWARD, 0, (branch ? 4 : 2) * acts(rows, C));
}
static void residual_norm_backward(Stream *stream, act_t *d_sum, bool overwrite, act_t *d_branch,
                                   float *d_gain, float *d_bias, const act_t *d_normed, const act_t *sum,
                                   const float *mean, const float *rstd, const act_t *gain, size_t rows,
                                   size_t C, Dropout dropout) {
    const double start = begin(stream);
    base->residual_norm_backward(stream, d_sum, overwrite, d_branch, d_gain, d_bias, d_normed, sum, mean,
                                 rstd, gain, rows, C, dropout);
    end(stream, start, NORM_BACKWARD, 0, ((overwrite ? 3 : 4) + (d_branch ? 1 : 0)) * acts(rows, C));
}
static void linear_forward(Stream *stream, act_t *y, act_t *gelu_y, const act_t *x, const act_t *w,
                           const act_t *b, size_t rows, size_t in, size_t out) {
    const double start = begin(stream);
    base->linear_forward(stream, y, gelu_y, x, w, b, rows, in, out);
    end(stream, start, LINEAR_FORWARD, 2.0 * (double)rows * (double)in * (double)out, 0);
}
static void linear_backward(Stream *stream, act_t *dx, float *dw, float *db, const act_t *dy, const act_t *x,
                            const act_t *w, const act_t *pre, size_t rows, size_t in, size_t out) {
    const double start = begin(stream);
    base->linear_backward(stream, dx, dw, db, dy, x, w, pre, rows, in, out);
    end(stream, start, LINEAR_BACKWARD, 4.0 * (double)rows * (double)in * (double)out, 0);
}
static void rotary(Stream *stream, act_t *qkv, size_t B, size_t T, size_t H, size_t D, size_t first_position,
                   bool inverse) {
    const double start = begin(stream);
    base->rotary(stream, qkv, B, T, H, D, first_position, inverse);
    end(stream, start, ROTARY, 0, 4 * acts(B * T, H * D));
}
static void head_loss(Stream *stream, StepState *state, act_t *d_hidden, float *d_wte, const act_t *hidden,
                      const act_t *wte, const int32_t *targets, size_t rows, size_t C, size_t V,
                      float grad_scale, void *scratch) {
    const double start = begin(stream);
    base->head_loss(stream, state, d_hidden, d_wte, hidden, wte, targets, rows, C, V, grad_scale, scratch);
    end(stream, start, HEAD, 6.0 * (double)rows * (double)C * (double)V, 0);
}
static void gradient_norm(Stream *stream, StepState *state, const float *gradients, const ParamSpan *spans,
                          size_t n_spans, float clip) {
    const double start = begin(stream);
    base->gradient_norm(stream, state, gradients, spans, n_spans, clip);
    double floats = 0;
    for (size_t i = 0; i < n_spans; i++) floats += (double)spans[i].count;
    end(stream, start, UPDATE, 0, 4 * floats);
}
static void adamw(Stream *stream, StepState *state, float *weights, act_t *work, const float *gradients,
                  float *m, float *v, const ParamSpan *spans, size_t n_spans, AdamW settings) {
    const double start = begin(stream);
    base->adamw(stream, state, weights, work, gradients, m, v, spans, n_spans, settings);
    double floats = 0;
    for (size_t i = 0; i < n_spans; i++) floats += (double)spans[i].count;
    end(stream, start, UPDATE, 0, (28 + (work ? (double)base->act_size : 0)) * floats);
}
static double attention_flops(const AttentionCall *call) {
    return 2.0 * (double)(call->B * call->H * call->D) * (double)call->T * (double)call->T;
}
static void attention_forward(const AttentionCall *call) {
    const double start = begin(call->stream);
    base_attention->forward(call);
    end(call->stream, start, ATTENTION_FORWARD, attention_flops(call), 0);
}
static void attention_backward(const AttentionCall *call) {
    const double start = begin(call->stream);
    base_attention->backward(call);
    end(call->stream, start, ATTENTION_BACKWARD, 2.5 * attention_flops(call), 0);
}

/* ---- the command line ---- */
static bool parse(int argc, char **argv, Settings *s, Error *err) {
    const struct {
        const char *flag;
        size_t *number;
        const char **text;
    } flags[] = {{"--device", NULL, &s->device},     {"--attention", NULL, &s->attention},
                 {"--position", NULL, &s->position}, {"--layers", &s->layers, NULL},
                 {"--heads", &s->heads, NULL},       {"--channels", &s->channels, NULL},
                 {"--ctx", &s->ctx, NULL},           {"--vocab", &s->vocab, NULL},
                 {"--batch", &s->batch, NULL},       {"--steps", &s->steps, NULL},
                 {"--threads", &s->threads, NULL}};
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
    if (strcmp(s->position, "learned") != 0 && strcmp(s->position, "rotary") != 0)
        return error_set(err, "--position is learned or rotary, not \"%s\"", s->position);
    return true;
}

static const Ops *find_ops(const char *device) {
    const Ops *const all[] = {&ops_cpu,
#ifdef USE_CUDA
                              &ops_cuda, &ops_cuda_fp32
#endif
    };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        if (strcmp(all[i]->name, device) == 0) return all[i];
    return NULL;
}

/* Waits for its end where there are several ranks, as training does. */
static void step(Gpt *gpt, Ranks *ranks, const Settings *s, const int32_t *tokens, uint64_t number) {
    gpt_step_begin(gpt, number, 1e-4f);
    ranks_average_begin(ranks, 0);
    gpt_forward_backward(gpt, tokens, tokens + 1, s->batch, s->batch * (size_t)ranks->rank,
                         s->batch * s->ctx * (size_t)ranks->count);
    ranks_average_end(ranks);
    gpt_step_end(gpt,
                 (AdamW){.beta1 = 0.9f, .beta2 = 0.95f, .epsilon = 1e-8f, .weight_decay = 0.1f, .clip = 1});
    ranks_step_done(ranks);
}

static void print_kinds(double step_seconds) {
    double all = 0;
    for (int k = 0; k < KINDS; k++) all += spent[k].seconds / PROFILED;
    printf("\n%10s %7s  %s\n", "ms a step", "share", "kind (one at a time)");
    for (int k = 0; k < KINDS; k++) {
        if (spent[k].seconds <= 0) continue;
        const double seconds = spent[k].seconds / PROFILED;
        printf("%10.2f %6.1f%%  %-28s", 1e3 * seconds, 100 * seconds / all, kind_names[k]);
        if (spent[k].flops > 0) printf("%9.1f TFLOP/s", spent[k].flops / spent[k].seconds / 1e12);
        else printf("%9.0f GB/s", spent[k].bytes / spent[k].seconds / 1e9);
        printf("\n");
    }
    printf("%10.2f          sum; a step in training takes %.2f ms\n", 1e3 * all, 1e3 * step_seconds);
}

static bool run(const Settings *s, Ranks *ranks, Error *err) {
    base = find_ops(s->device);
    if (!base) return error_set(err, "this build has no device %s", s->device);
    Stream *stream = base->open(ranks->local_rank, (int)s->threads, err);
    if (!ranks_all(ranks, stream != NULL, NULL, err) || !ranks_join_devices(ranks, base, stream, err))
        return false;
    GptSetup setup = {
        .config = {.layers = s->layers,
                   .heads = s->heads,
                   .channels = s->channels,
                   .ctx = s->ctx,
                   .vocab = s->vocab,
                   .position = strcmp(s->position, "rotary") == 0 ? POSITION_ROTARY : POSITION_LEARNED},
        .stream = stream,
        .B = s->batch,
        .training = true,
        .deterministic = true,
        .seed = 1};
    if (!gpt_check_config(&setup.config, err)) return false;
    const AttentionShape shape = {
        .B = s->batch, .T = s->ctx, .H = s->heads, .D = s->channels / s->heads, .training = true};
    base_attention = attention_find(s->attention, base->name, &shape, err);
    if (!base_attention) return false;
    Ops ops = *base;
    ops.embedding_forward = embedding_forward, ops.embedding_backward = embedding_backward;
    ops.residual_norm_forward = residual_norm_forward, ops.residual_norm_backward = residual_norm_backward;
    ops.linear_forward = linear_forward, ops.linear_backward = linear_backward, ops.rotary = rotary;
    ops.head_loss = head_loss, ops.gradient_norm = gradient_norm, ops.adamw = adamw;
    Attention attention = *base_attention;
    attention.forward = attention_forward, attention.backward = attention_backward;
    setup.ops = &ops, setup.attention = &attention;

    MemoryPlan plan;
    Gpt *gpt = gpt_plan(&setup, &plan, err) ? gpt_new(&setup, err) : NULL;
    if (!gpt) return false;
    gpt_init_weights(gpt, 1);
    const size_t tokens = s->batch * s->ctx;
    int32_t *ids = (int32_t *)xmalloc((tokens + 1) * sizeof *ids);
    Rng rng = rng_start(1, 1 + (uint64_t)ranks->rank);
    for (size_t i = 0; i <= tokens; i++) ids[i] = (int32_t)rng_below(&rng, s->vocab);

    uint64_t number = 0;
    ranks_attach(ranks, gpt);
    for (int i = 0; i < WARM_UP; i++) step(gpt, ranks, s, ids, number++);
    gpt_step_state(gpt); /* waits */
    ranks_take_exposed(ranks);
    const double start = seconds_now(), count = ranks->count;
    for (size_t i = 0; i < s->steps; i++) step(gpt, ranks, s, ids, number++);
    const StepState state = gpt_step_state(gpt);
    const double seconds = (seconds_now() - start) / (double)s->steps,
                 rate = count * (double)tokens / seconds;
    const double exposed = ranks_take_exposed(ranks) / (double)s->steps;
    profiling = true;
    for (int i = 0; i < PROFILED; i++) step(gpt, ranks, s, ids, number++);
    gpt_step_state(gpt);

    char device[160];
    base->describe(stream, device, sizeof device);
    printf("tokens/s %.0f\n", rate);
    printf("%s: %s; attention %s\n", base->name, device, base_attention->name);
    printf("%zu x %zu, %zu heads, V %zu, %s positions; B %zu, T %zu; %.1fM parameters\n", s->layers,
           s->channels, s->heads, s->vocab, s->position, s->batch, s->ctx,
           (double)gpt_parameter_count(&setup.config) / 1e6);
    const double flops = rate * gpt_flops_per_token(&setup.config),
                 peak = base->peak_flops ? count * base->peak_flops(stream) : 0;
    printf("%.2f ms a step, %.1f model TFLOP/s", 1e3 * seconds, flops / 1e12);
    if (peak > 0) printf(" (MFU %.1f %%)", 100 * flops / peak);
    printf(", loss %.4f\n", state.loss_sum / (double)tokens / count);
    if (ranks->link) {
        char text[160];
        ranks_describe(ranks, text, sizeof text);
        printf("ranks: %s; %.3f ms a step exposed (%.2f %%)\n", text, 1e3 * exposed, 100 * exposed / seconds);
    }
    printf("memory planned: %.2f GiB", (double)plan.total / 0x1p30);
    if (base->memory) {
        size_t free_bytes = 0, total = 0;
        base->memory(stream, &free_bytes, &total);
        printf(", in use on the device: %.2f GiB", (double)(total - free_bytes) / 0x1p30);
    }
    printf("\n");
    for (size_t i = 0; i < plan.rows; i++)
        printf("%10.2f GiB  %s\n", (double)plan.row[i].bytes / 0x1p30, plan.row[i].purpose);
    print_kinds(seconds);
    free(ids);
    ranks_detach(ranks);
    gpt_free(gpt);
    base->close(stream);
    return isfinite(state.loss_sum) || error_set(err, "the loss is not finite");
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
    Error err = {""};
    Ranks ranks;
    bool done = ranks_start(&ranks, 120, &err) && parse(argc, argv, &s, &err);
    /* Only rank 0 prints its figures. */
    done = done && (ranks.rank == 0 || freopen("/dev/null", "w", stdout)) && run(&s, &ranks, &err);
    if (!done) fprintf(stderr, "bench_gpu: %s\n", err.text);
    if (!done) ranks_abort(&ranks, EXIT_FAILED);
    ranks_end(&ranks);
    return done ? EXIT_DONE : EXIT_FAILED;
}
