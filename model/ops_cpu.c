/* ops_cpu.c - the operations of ops.h on a CPU: OpenMP over rows, the matrix product of sgemm.h, and the
 * inner loops of ops_cpu_simd.c.
 *
 * Order of sums. Rows are cut into at most ROW_BLOCKS blocks, whose number depends on the rows alone; what
 * is summed over rows is summed within a block first, then over the blocks in their order. So nothing here
 * depends on how many threads there are (the library's matrix product may, see sgemm.h). */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#if defined(_OPENMP)
#include <omp.h>
#endif

#include "../sgemm.h"
#include "ops.h"
#include "ops_cpu_simd.h"

enum {
    ROW_BLOCKS = 128,     /* most parts that rows are cut into */
    HEAD_ROWS = 256,      /* rows of logits that exist at once: enough for the matrix product's speed */
    FLAT_CHUNK = 1 << 15, /* parameters a thread takes at a time */
    COLUMN_CHUNK = 64,    /* channels a thread takes at a time in sums over rows: whole cache lines */
    MASK_CHANNELS = 1024  /* a dropout mask is made in stretches of this many channels, on the stack */
};

struct Stream {
    int threads, asked; /* asked: more than that, where OpenMP gives fewer */
    /* Room for the blocks' partial sums and the rotary angles; grows in the first step, then stays. */
    float *partial;
    size_t partial_floats;
    float *angles; /* cos, then sin: (positions, half) each */
    size_t angle_positions, angle_half;
    double *marks;
    size_t n_marks;
};

static const CpuKernels *kernels(void) {
    return SIMD_PICK(cpu_kernels);
}

/* ==== the device ==== */
static Stream *cpu_open(int index, int threads, Error *err) {
    (void)index, (void)err;
    Stream *stream = (Stream *)xcalloc(1, sizeof *stream);
#if defined(_OPENMP)
    /* The order of sums hangs on the number of threads: it must not vary, and be the one that is told. */
    omp_set_dynamic(0);
    if (threads > 0) omp_set_num_threads(threads);
    stream->asked = omp_get_max_threads();
#pragma omp parallel
#pragma omp single
    stream->threads = omp_get_num_threads();
    /* oneDNN shares work out among as many as OpenMP names, and leaves undone what those that never come would do. */
    omp_set_num_threads(stream->threads);
#else
    (void)threads;
    stream->threads = stream->asked = 1;
#endif
    return stream;
}

static void cpu_close(Stream *stream) {
    free(stream->partial), free(stream->angles), free(stream->marks);
    free(stream);
}

static void cpu_synchronize(Stream *stream) {
    (void)stream;
}

static void cpu_describe(Stream *stream, char *text, size_t size) {
    char fewer[64] = "";
    if (stream->threads < stream->asked)
        snprintf(fewer, sizeof fewer, " (OpenMP gives no more; asked for: %d)", stream->asked);
    snprintf(text, size, "%d thread%s%s, %s, %s", stream->threads, stream->threads == 1 ? "" : "s", fewer,
             simd_name(simd_level()), sgemm_library());
}

static void cpu_mark(Stream *stream, size_t index) {
    if (index >= stream->n_marks) {
        stream->n_marks = 2 * index + 64;
        stream->marks = (double *)xrealloc(stream->marks, stream->n_marks * sizeof *stream->marks);
    }
    stream->marks[index] = seconds_now();
}
static double cpu_seconds_between(Stream *stream, size_t from, size_t to) {
    return stream->marks[to] - stream->marks[from];
}

static void *cpu_allocate(Stream *stream, size_t bytes, Error *err) {
    (void)stream;
    void *memory = NULL;
    if (posix_memalign(&memory, 256, bytes) != 0) {
        error_set(err, "%zu MB of memory are not to be had: lower -micro, -ctx, -layers or -channels",
                  bytes >> 20);
        return NULL;
    }
    memset(memory, 0, bytes);
    return memory;
}

static void cpu_release(Stream *stream, void *memory) {
    (void)stream;
    free(memory);
}

static void cpu_copy_in(Stream *stream, void *device, const void *host, size_t bytes) {
    (void)stream;
    memcpy(device, host, bytes);
}

static void cpu_zero(Stream *stream, void *device, size_t bytes) {
    (void)stream;
    uint8_t *start = (uint8_t *)device;
    const size_t chunk = (size_t)FLAT_CHUNK * sizeof(float);
#pragma omp parallel for schedule(static)
    for (size_t at = 0; at < bytes; at += chunk)
        memset(start + at, 0, bytes - at < chunk ? bytes - at : chunk);
}

/* Room for `floats` partial sums, zeroed. */
static float *partial_sums(Stream *stream, size_t floats) {
    if (floats > stream->partial_floats) {
        free(stream->partial);
        stream->partial = (float *)xmalloc(floats * sizeof(float));
        stream->partial_floats = floats;
    }
    memset(stream->partial, 0, floats * sizeof(float));
    return stream->partial;
}

/* ==== the step's state ==== */
static void cpu_begin_step(Stream *stream, StepState *state, uint64_t step, float lr) {
    (void)stream;
    state->step = step, state->lr = lr;
    state->loss_sum = 0, state->grad_norm = 0, state->clip_scale = 1, state->skip = 0, state->bad_tensor = -1;
}

static void cpu_read_state(Stream *stream, StepState *host, const StepState *state) {
    (void)stream;
    *host = *state;
}

/* ==== rows ==== */
/* The block of rows number `block`, of row_blocks(rows) in all: from *first to before *end. */
static size_t row_blocks(size_t rows) {
    return rows < ROW_BLOCKS ? rows : ROW_BLOCKS;
}
static void block_rows(size_t rows, size_t block, size_t *first, size_t *end) {
    const size_t blocks = row_blocks(rows);
    *first = rows / blocks * block + (block < rows % blocks ? block : rows % blocks);
    *end = *first + rows / blocks + (block < rows % blocks ? 1 : 0);
}

/* to (columns) += the sum of `count` rows of from, in their order; threads share the columns. */
static void add_rows(float *to, const float *from, size_t count, size_t columns) {
    const CpuKernels *k = kernels();
#pragma omp parallel for schedule(static)
    for (size_t c = 0; c < columns; c += COLUMN_CHUNK) {
        const size_t n = columns - c < COLUMN_CHUNK ? columns - c : COLUMN_CHUNK;
        for (size_t row = 0; row < count; row++) k->add(to + c, from + row * columns + c, n);
    }
}

/* A dropout mask as the inner loops want it. */
typedef struct Mask {
    bool on;
    float rate;
    uint64_t key, step, first_row;
    size_t groups; /* of four channels, a row */
} Mask;

static Mask mask_of(const Dropout *dropout, size_t C) {
    Mask mask = {.on = dropout->rate > 0};
    if (!mask.on) return mask;
    mask.rate = dropout->rate, mask.key = mix64(dropout->seed, dropout->site);
    mask.step = dropout->state->step, mask.first_row = dropout->first_row, mask.groups = (C + 3) / 4;
    return mask;
}

static void mask_row(const Mask *mask, float *values, size_t row, size_t c, size_t n) {
    kernels()->dropout_mask(values, n, mask->rate, mask->key, (mask->first_row + row) * mask->groups + c / 4,
                            mask->step);
}

/* y = x times the row's mask. */
static void apply_mask(const Mask *mask, float *y, const float *x, size_t row, size_t C) {
    float values[MASK_CHANNELS];
    for (size_t c = 0; c < C; c += MASK_CHANNELS) {
        const size_t n = C - c < MASK_CHANNELS ? C - c : MASK_CHANNELS;
        mask_row(mask, values, row, c, n);
        kernels()->multiply_to(y + c, x + c, values, n);
    }
}

/* ==== embedding ==== */
static void cpu_embedding_forward(Stream *stream, act_t *x_, const int32_t *tokens, const act_t *wte_,
                                  const act_t *wpe_, size_t B, size_t T, size_t C, size_t first_position,
                                  Dropout dropout) {
    (void)stream;
    float *x = (float *)x_;
    const float *wte = (const float *)wte_, *wpe = (const float *)wpe_;
    const Mask mask = mask_of(&dropout, C);
    const CpuKernels *k = kernels();
#pragma omp parallel for schedule(static)
    for (size_t row = 0; row < B * T; row++) {
        float *to = x + row * C;
        memcpy(to, wte + (size_t)tokens[row] * C, C * sizeof *to);
        if (wpe) k->add(to, wpe + (first_position + row % T) * C, C);
        if (mask.on) apply_mask(&mask, to, to, row, C);
    }
}

/* Threads share the channels, so that each row of d_wte is summed in the order of the tokens. */
static void cpu_embedding_backward(Stream *stream, float *d_wte, float *d_wpe, const act_t *dx_,
                                   const int32_t *tokens, size_t B, size_t T, size_t C, Dropout dropout) {
    (void)stream;
    const float *dx = (const float *)dx_;
    const Mask mask = mask_of(&dropout, C);
    const CpuKernels *k = kernels();
#pragma omp parallel for schedule(static)
    for (size_t c = 0; c < C; c += COLUMN_CHUNK) {
        const size_t n = C - c < COLUMN_CHUNK ? C - c : COLUMN_CHUNK;
        float values[COLUMN_CHUNK], masked[COLUMN_CHUNK];
        for (size_t row = 0; row < B * T; row++) {
            const float *from = dx + row * C + c;
            if (mask.on) {
                mask_row(&mask, values, row, c, n);
                k->multiply_to(masked, from, values, n);
                from = masked;
            }
            k->add(d_wte + (size_t)tokens[row] * C + c, from, n);
            if (d_wpe) k->add(d_wpe + row % T * C + c, from, n);
        }
    }
}

/* ==== residual add and LayerNorm ==== */
static void cpu_residual_norm_forward(Stream *stream, act_t *sum_, act_t *normed_, float *mean, float *rstd,
                                      const act_t *residual_, const act_t *branch_, const act_t *gain,
                                      const act_t *bias, size_t rows, size_t C, Dropout dropout) {
    (void)stream;
    float *sum = (float *)sum_, *normed = (float *)normed_;
    const float *residual = (const float *)residual_, *branch = (const float *)branch_;
    const Mask mask = mask_of(&dropout, C);
    const CpuKernels *k = kernels();
#pragma omp parallel for schedule(static)
    for (size_t row = 0; row < rows; row++) {
        const float *added = branch ? branch + row * C : NULL;
        if (added && mask.on) { /* normed's row is free until the norm is written */
            apply_mask(&mask, normed + row * C, added, row, C);
            added = normed + row * C;
        }
        k->norm_forward(sum + row * C, normed + row * C, mean ? mean + row : NULL, rstd ? rstd + row : NULL,
                        residual + row * C, added, (const float *)gain, (const float *)bias, C);
    }
}

static void cpu_residual_norm_backward(Stream *stream, act_t *d_sum_, bool overwrite, act_t *d_branch_,
                                       float *d_gain, float *d_bias, const act_t *d_normed_,
                                       const act_t *sum_, const float *mean, const float *rstd,
                                       const act_t *gain, size_t rows, size_t C, Dropout dropout) {
    float *d_sum = (float *)d_sum_, *d_branch = (float *)d_branch_;
    const float *d_normed = (const float *)d_normed_, *sum = (const float *)sum_;
    const Mask mask = mask_of(&dropout, C);
    const CpuKernels *k = kernels();
    const size_t blocks = row_blocks(rows);
    float *gains = partial_sums(stream, 2 * blocks * C), *biases = gains + blocks * C;
#pragma omp parallel for schedule(static)
    for (size_t block = 0; block < blocks; block++) {
        size_t first, end;
        block_rows(rows, block, &first, &end);
        for (size_t row = first; row < end; row++) {
            k->norm_backward(d_sum + row * C, overwrite, gains + block * C, biases + block * C,
                             d_normed + row * C, sum + row * C, mean[row], rstd[row], (const float *)gain, C);
            if (!d_branch) continue;
            if (mask.on) apply_mask(&mask, d_branch + row * C, d_sum + row * C, row, C);
            else memcpy(d_branch + row * C, d_sum + row * C, C * sizeof *d_sum);
        }
    }
    add_rows(d_gain, gains, blocks, C);
    add_rows(d_bias, biases, blocks, C);
}

/* ==== linear ==== */
static void cpu_linear_forward(Stream *stream, act_t *y_, act_t *gelu_, const act_t *x, const act_t *w,
                               const act_t *b, size_t rows, size_t in, size_t out) {
    (void)stream;
    float *y = (float *)y_, *gelu = (float *)gelu_;
    const CpuKernels *k = kernels();
    sgemm(false, false, rows, out, in, 1.0f, (const float *)x, in, (const float *)w, out, 0.0f, y ? y : gelu,
          out);
#pragma omp parallel for schedule(static)
    for (size_t row = 0; row < rows; row++)
        k->bias_gelu(y ? y + row * out : NULL, gelu ? gelu + row * out : NULL, (const float *)b, out);
}

static void cpu_linear_backward(Stream *stream, act_t *dx_, float *dw, float *db, const act_t *dy_,
                                const act_t *x, const act_t *w, const act_t *pre_, size_t rows, size_t in,
                                size_t out) {
    float *dx = (float *)dx_;
    const float *dy = (const float *)dy_, *pre = (const float *)pre_;
    const CpuKernels *k = kernels();
    sgemm(true, false, in, out, rows, 1.0f, (const float *)x, in, dy, out, 1.0f, dw, out);
    sgemm(false, true, rows, in, out, 1.0f, dy, out, (const float *)w, out, 0.0f, dx, in);
    if (pre) {
#pragma omp parallel for schedule(static)
        for (size_t row = 0; row < rows; row++) k->gelu_backward(dx + row * in, pre + row * in, in);
    }
    const size_t blocks = row_blocks(rows);
    float *sums = partial_sums(stream, blocks * out);
#pragma omp parallel for schedule(static)
    for (size_t block = 0; block < blocks; block++) {
        size_t first, end;
        block_rows(rows, block, &first, &end);
        for (size_t row = first; row < end; row++) k->add(sums + block * out, dy + row * out, out);
    }
    add_rows(db, sums, blocks, out);
}

/* ==== rotary positions ==== */
/* cos and sin of position * 10000^(-i / half), i < half, for positions below `positions`, in double. */
static void fill_angles(Stream *stream, size_t positions, size_t half) {
    if (stream->angle_half == half && stream->angle_positions >= positions) return;
    free(stream->angles);
    stream->angles = (float *)xmalloc(2 * positions * half * sizeof(float));
    stream->angle_positions = positions, stream->angle_half = half;
    float *cosine = stream->angles, *sine = cosine + positions * half;
    for (size_t i = 0; i < half; i++) {
        const double frequency = pow(10000.0, -(double)i / (double)half);
        for (size_t t = 0; t < positions; t++) {
            cosine[t * half + i] = (float)cos((double)t * frequency);
            sine[t * half + i] = (float)sin((double)t * frequency);
        }
    }
}

static void cpu_rotary(Stream *stream, act_t *qkv_, size_t B, size_t T, size_t H, size_t D,
                       size_t first_position, bool keys_only, bool inverse) {
    float *qkv = (float *)qkv_;
    const size_t half = D / 2;
    fill_angles(stream, first_position + T, half);
    const float *cosine = stream->angles, *sine = cosine + stream->angle_positions * half;
    const CpuKernels *k = kernels();
#pragma omp parallel for schedule(static)
    for (size_t row = 0; row < B * T; row++) {
        const size_t position = first_position + row % T;
        for (size_t head = keys_only ? H : 0; head < 2 * H;
             head++) /* q's heads, then k's: they lie one after the other */
            k->rotate(qkv + row * 3 * H * D + head * D, cosine + position * half, sine + position * half,
                      half, inverse);
    }
}

/* ==== the head ==== */
static size_t head_rows(size_t rows) {
    return rows < HEAD_ROWS ? rows : HEAD_ROWS;
}

/* A chunk's logits, and its rows' losses in double. */
static size_t cpu_head_scratch_bytes(size_t rows, size_t C, size_t V) {
    (void)C;
    size_t logits = 0, bytes = 0;
    size_mul(head_rows(rows), V, &logits);
    size_mul(logits, sizeof(float), &bytes);
    size_add(bytes, HEAD_ROWS * sizeof(double), &bytes);
    return bytes;
}

static void cpu_head_loss(Stream *stream, StepState *state, act_t *d_hidden_, float *d_wte,
                          const act_t *hidden_, const act_t *wte_, const int32_t *targets, size_t rows,
                          size_t C, size_t V, float grad_scale, void *scratch) {
    (void)stream;
    float *d_hidden = (float *)d_hidden_;
    const float *hidden = (const float *)hidden_, *wte = (const float *)wte_;
    double *losses = (double *)scratch;
    float *logits = (float *)(losses + HEAD_ROWS);
    const CpuKernels *k = kernels();
    for (size_t start = 0; start < rows; start += HEAD_ROWS) {
        const size_t n = head_rows(rows - start);
        sgemm(false, true, n, V, C, 1.0f, hidden + start * C, C, wte, C, 0.0f, logits, V);
#pragma omp parallel for schedule(static)
        for (size_t row = 0; row < n; row++)
            losses[row] = k->softmax_loss(logits + row * V, V, (size_t)targets[start + row], grad_scale,
                                          d_hidden != NULL);
        for (size_t row = 0; row < n; row++) state->loss_sum += losses[row];
        if (!d_hidden) continue;
        sgemm(false, false, n, C, V, 1.0f, logits, V, wte, C, 0.0f, d_hidden + start * C, C);
        sgemm(true, false, V, C, n, 1.0f, logits, V, hidden + start * C, C, 1.0f, d_wte, C);
    }
}

static void cpu_head_logits(Stream *stream, float *logits, const act_t *hidden, size_t stride,
                            const act_t *wte, size_t rows, size_t C, size_t V) {
    (void)stream;
    sgemm(false, true, rows, V, C, 1.0f, (const float *)hidden, stride, (const float *)wte, C, 0.0f, logits,
          V);
}

/* ==== the update ==== */
/* A parameter tensor's chunks of FLAT_CHUNK floats are the units that threads share and sums are made of. */
static size_t chunks_of(const ParamSpan *span) {
    return (span->count + FLAT_CHUNK - 1) / FLAT_CHUNK;
}
static size_t chunk_size(const ParamSpan *span, size_t chunk) {
    const size_t left = span->count - chunk * FLAT_CHUNK;
    return left < FLAT_CHUNK ? left : FLAT_CHUNK;
}

static double tensor_squares(const float *gradients, const ParamSpan *span) {
    const CpuKernels *k = kernels();
    const size_t chunks = chunks_of(span);
    double total = 0;
    enum { AT_ONCE = 256 };
    double sums[AT_ONCE];
    for (size_t start = 0; start < chunks; start += AT_ONCE) {
        const size_t n = chunks - start < AT_ONCE ? chunks - start : AT_ONCE;
#pragma omp parallel for schedule(static) if (n > 1)
        for (size_t i = 0; i < n; i++)
            sums[i] = k->sum_of_squares(gradients + span->offset + (start + i) * FLAT_CHUNK,
                                        chunk_size(span, start + i));
        for (size_t i = 0; i < n; i++) total += sums[i];
    }
    return total;
}

static void cpu_gradient_norm(Stream *stream, StepState *state, const float *gradients,
                              const ParamSpan *spans, size_t n_spans, float clip) {
    (void)stream;
    double total = 0;
    state->bad_tensor = -1;
    for (size_t i = 0; i < n_spans; i++) {
        const double squares = tensor_squares(gradients, &spans[i]);
        if (!isfinite(squares) && state->bad_tensor < 0) state->bad_tensor = (int32_t)i;
        total += squares;
    }
    const double norm = sqrt(total);
    state->skip = !isfinite(norm) || !isfinite(state->loss_sum);
    state->grad_norm = (float)norm;
    state->clip_scale = clip > 0 && norm > (double)clip ? (float)((double)clip / norm) : 1.0f;
}

static void cpu_adamw(Stream *stream, StepState *state, float *weights, act_t *work, const float *gradients,
                      float *m, float *v, const ParamSpan *spans, size_t n_spans, AdamW settings) {
    (void)stream, (void)work; /* the weights are the working copy */
    if (state->skip) return;
    state->updates++;
    const float correction1 = (float)(1.0 / (1.0 - pow((double)settings.beta1, (double)state->updates)));
    const float correction2 = (float)(1.0 / (1.0 - pow((double)settings.beta2, (double)state->updates)));
    const CpuKernels *k = kernels();
#pragma omp parallel
    for (size_t i = 0; i < n_spans; i++) {
        const ParamSpan *span = &spans[i];
        const float decay = span->decay ? settings.weight_decay : 0.0f;
#pragma omp for schedule(static) nowait
        for (size_t chunk = 0; chunk < chunks_of(span); chunk++) {
            const size_t at = span->offset + chunk * FLAT_CHUNK;
            k->adamw(weights + at, gradients + at, m + at, v + at, chunk_size(span, chunk), state->clip_scale,
                     state->lr, decay, settings.beta1, settings.beta2, settings.epsilon, correction1,
                     correction2);
        }
    }
}

static void cpu_weights_to_work(Stream *stream, act_t *work, const float *weights, size_t count) {
    (void)stream;
    memcpy(work, weights, count * sizeof *weights);
}

const Ops ops_cpu = {
    .name = "cpu",
    .act_size = sizeof(float),
    .open = cpu_open,
    .close = cpu_close,
    .synchronize = cpu_synchronize,
    .describe = cpu_describe,
    .allocate = cpu_allocate,
    .release = cpu_release,
    .host_allocate = cpu_allocate,
    .host_release = cpu_release,
    .upload = cpu_copy_in,
    .download = cpu_copy_in,
    .zero = cpu_zero,
    .mark = cpu_mark,
    .seconds_between = cpu_seconds_between,
    .begin_step = cpu_begin_step,
    .read_state = cpu_read_state,
    .embedding_forward = cpu_embedding_forward,
    .embedding_backward = cpu_embedding_backward,
    .residual_norm_forward = cpu_residual_norm_forward,
    .residual_norm_backward = cpu_residual_norm_backward,
    .linear_forward = cpu_linear_forward,
    .linear_backward = cpu_linear_backward,
    .rotary = cpu_rotary,
    .head_scratch_bytes = cpu_head_scratch_bytes,
    .head_loss = cpu_head_loss,
    .head_logits = cpu_head_logits,
    .gradient_norm = cpu_gradient_norm,
    .adamw = cpu_adamw,
    .weights_to_work = cpu_weights_to_work,
};
