/* ops.h - the operations that model/gpt.c is written in: a device is a value of this struct.
 *
 * Rules that every device keeps:
 *  - an operation is queued on a stream and returns at once or when done; none gives a number to the host
 *    (read_state is the one that waits), and none can fail but by a fault of the device, which ends the process
 *    with one line and exit 1;
 *  - sums over tokens are taken in a fixed order: two runs are bit-equal on the same number of threads;
 *  - activations are act_t (float on a CPU, bf16 on a GPU), statistics, losses, gradients of parameters and
 *    optimizer state are fp32, sums of losses are double;
 *  - gradients of parameters are added to what is there (micro-batches add up); gradients of activations
 *    are overwritten, unless the comment says "added";
 *  - rows are tokens, B * T of them, row-major; matrices are stored [in, out]; sizes are size_t;
 *  - what changes from step to step lives in StepState on the device, so that a step is the same sequence
 *    of operations each time.
 * Letters: B sequences, T tokens of each, C channels, H heads, D = C / H, V vocabulary, Vp its rows padded
 * to a multiple of 128, L layers. */
#ifndef OPS_H
#define OPS_H

#include "../attention/attention.h"
#include "../common.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Lives on the device; begin_step writes its upper part, operations the rest. */
typedef struct StepState {
    uint64_t step;      /* the run's step, 0-based: keys the dropout masks */
    uint64_t updates;   /* AdamW updates so far (t of its bias correction), without the skipped ones */
    float lr;           /* of this step */
    float grad_norm;    /* global L2 norm before clipping */
    float clip_scale;   /* min(1, clip / grad_norm) */
    int32_t skip;       /* 1: loss or a gradient is not finite, the update is not applied */
    int32_t bad_tensor; /* then the first such parameter's index in the table, or -1 (the loss alone) */
    int32_t reserved;
    double loss_sum; /* sum of the token losses of the step, nats */
} StepState;

/* Dropout of a (rows, C) tensor: element (row, c) is kept where word c % 4 of
 * philox(key mix64(seed, site), counter (row_of_step * ceil(C / 4) + c / 4, step)) is at least rate * 2^32 (rounded down),
 * and then scaled by 1 / (1 - rate); row_of_step = first_row + row. The same on every device and for every
 * split of a step. rate 0: nothing is dropped and no number drawn. */
typedef struct Dropout {
    float rate;
    uint64_t seed;
    uint32_t site;          /* which place of the network: layer and kind */
    uint64_t first_row;     /* the micro-batch's first token within the step, over all ranks */
    const StepState *state; /* on the device: the step is read there */
} Dropout;

/* A stretch of the parameter buffers that the optimizer treats alike: one tensor of the table. */
typedef struct ParamSpan {
    size_t offset, count; /* floats */
    bool decay;           /* weight decay applies */
} ParamSpan;

typedef struct AdamW {
    float beta1, beta2, epsilon, weight_decay, clip; /* clip 0: no clipping */
} AdamW;

typedef struct Ops {
    const char *name; /* "cpu", "cuda" */
    size_t act_size;  /* bytes of an act_t */

    /* ---- the device ---- */
    /* index: which of the visible GPUs, counted round where it is past them (a launcher may show each process its own
     * one only); threads: of the OpenMP team (0: as many as there are cores). NULL with a reason. */
    Stream *(*open)(int index, int threads, Error *err);
    void (*close)(Stream *stream);
    void (*synchronize)(Stream *stream);
    /* "2 threads, AVX-512, oneDNN 2.6.3", for the start-up table. */
    void (*describe)(Stream *stream, char *text, size_t size);
    /* Bytes of device memory that are free now, of how many. NULL: the device's memory is the host's. */
    void (*memory)(Stream *stream, size_t *free_bytes, size_t *total_bytes);
    /* Dense FLOP/s at best of matrix products of act_t; 0: not known. NULL: likewise. */
    double (*peak_flops)(Stream *stream);
    /* Device memory, zeroed; NULL with numbers where there is not enough. Never called within a step. */
    void *(*allocate)(Stream *stream, size_t bytes, Error *err);
    void (*release)(Stream *stream, void *memory);
    /* Host memory, zeroed, that download fills at the device's full speed: a GPU's is pinned, which it writes by itself
     * (into any other it copies at a fraction of that, by way of the driver's own). NULL with numbers where it is not
     * to be had. Taking it is slow, and it can never be swapped out: for what is downloaded again and again. */
    void *(*host_allocate)(Stream *stream, size_t bytes, Error *err);
    void (*host_release)(Stream *stream, void *memory);
    void (*upload)(Stream *stream, void *device, const void *host, size_t bytes);
    void (*download)(Stream *stream, void *host, const void *device, size_t bytes); /* waits */
    void (*zero)(Stream *stream, void *device, size_t bytes);
    /* What is queued between record_begin and record_end is not run but recorded, to be run by replay as often as one
     * likes, with the same arguments, at a fraction of the host's time. All of it must have run once before, the same
     * way, since nothing can be allocated meanwhile. record_begin gives false where nothing shall be recorded now, and
     * record_end NULL where it could not be. The four of a device that has nothing to gain are NULL. */
    bool (*record_begin)(Stream *stream);
    void *(*record_end)(Stream *stream);
    void (*replay)(Stream *stream, void *recording);
    void (*release_recording)(Stream *stream, void *recording);
    /* Notes the time at which the stream has come this far, under a number (marks are kept up to the largest one
     * used); waits for nothing. */
    void (*mark)(Stream *stream, size_t index);
    /* Seconds from one mark to a later one, by the device's own clock; waits for the later one. */
    double (*seconds_between)(Stream *stream, size_t from, size_t to);

    /* ---- the step's state ---- */
    void (*begin_step)(Stream *stream, StepState *state, uint64_t step, float lr); /* loss_sum = 0 too */
    void (*read_state)(Stream *stream, StepState *host, const StepState *state);   /* waits */

    /* ---- embedding ---- */
    /* x[b,t] = dropout(wte[tokens[b,t]] + wpe[first_position + t]); wpe NULL: without. x (B*T, C). */
    void (*embedding_forward)(Stream *stream, act_t *x, const int32_t *tokens, const act_t *wte,
                              const act_t *wpe, size_t B, size_t T, size_t C, size_t first_position,
                              Dropout dropout);
    void (*embedding_backward)(Stream *stream, float *d_wte, float *d_wpe, const act_t *dx,
                               const int32_t *tokens, size_t B, size_t T, size_t C, Dropout dropout);

    /* ---- residual add and LayerNorm (Ba et al. 2016), epsilon 1e-5 ----
     * sum = residual + dropout(branch); normed = (sum - mean) * rstd * gain + bias. branch NULL: sum is
     * residual and is not written. sum may be residual's own memory. mean, rstd (rows), NULL in generation. */
    void (*residual_norm_forward)(Stream *stream, act_t *sum, act_t *normed, float *mean, float *rstd,
                                  const act_t *residual, const act_t *branch, const act_t *gain,
                                  const act_t *bias, size_t rows, size_t C, Dropout dropout);
    /* d_sum, already holding what reaches sum past the norm (overwrite: holding nothing), is added the
     * norm's part: it is then residual's gradient. d_branch = dropout(d_sum); NULL: not wanted (no branch,
     * or no dropout: then it is d_sum itself). d_gain, d_bias are added to. */
    void (*residual_norm_backward)(Stream *stream, act_t *d_sum, bool overwrite, act_t *d_branch,
                                   float *d_gain, float *d_bias, const act_t *d_normed, const act_t *sum,
                                   const float *mean, const float *rstd, const act_t *gain, size_t rows,
                                   size_t C, Dropout dropout);

    /* ---- linear, with GELU (Hendrycks and Gimpel 2016, tanh form) where asked ----
     * y = x W + b; gelu_y, if not NULL, = GELU(y), and y may then be NULL: not wanted. x (rows, in), W [in, out],
     * b (out), y (rows, out). */
    void (*linear_forward)(Stream *stream, act_t *y, act_t *gelu_y, const act_t *x, const act_t *w,
                           const act_t *b, size_t rows, size_t in, size_t out);
    /* dw += x^T dy; db += column sums of dy; dx = dy W^T, times GELU'(pre) where x = GELU(pre) and pre is
     * not NULL (dx is then pre's gradient). */
    void (*linear_backward)(Stream *stream, act_t *dx, float *dw, float *db, const act_t *dy, const act_t *x,
                            const act_t *w, const act_t *pre, size_t rows, size_t in, size_t out);

    /* ---- rotary positions (Su et al. 2021), halves rotated, base 10,000 ----
     * In place on q and k of qkv (B, T, 3, H, D), or on k alone; D even. inverse: the transpose, for gradients. */
    void (*rotary)(Stream *stream, act_t *qkv, size_t B, size_t T, size_t H, size_t D, size_t first_position,
                   bool keys_only, bool inverse);

    /* ---- the head: tied to wte; loss and both gradients from hidden states, in chunks of rows ----
     * logits = hidden wte^T over the first V rows of wte (Vp, C); state->loss_sum += sum of
     * -ln softmax(logits)[target]; with d_hidden not NULL also d_hidden = dlogits wte and
     * d_wte += dlogits^T hidden, dlogits = grad_scale * (softmax - onehot). Whole logits never exist. */
    size_t (*head_scratch_bytes)(size_t rows, size_t C, size_t V);
    void (*head_loss)(Stream *stream, StepState *state, act_t *d_hidden, float *d_wte, const act_t *hidden,
                      const act_t *wte, const int32_t *targets, size_t rows, size_t C, size_t V,
                      float grad_scale, void *scratch);
    /* logits (rows, V) in fp32; hidden's rows lie `stride` elements apart. */
    void (*head_logits)(Stream *stream, float *logits, const act_t *hidden, size_t stride, const act_t *wte,
                        size_t rows, size_t C, size_t V);

    /* ---- the update ---- */
    /* grad_norm, clip_scale, skip and bad_tensor of state from all gradients and the loss. */
    void (*gradient_norm)(Stream *stream, StepState *state, const float *gradients, const ParamSpan *spans,
                          size_t n_spans, float clip);
    /* AdamW (Loshchilov and Hutter 2019) over all parameters; the gradients are scaled by clip_scale; with
     * state->skip nothing moves, else state->updates grows by one. work: the act_t copy that forward and
     * backward read, NULL where it is the weights themselves. spans: host memory, the same at every call. */
    void (*adamw)(Stream *stream, StepState *state, float *weights, act_t *work, const float *gradients,
                  float *m, float *v, const ParamSpan *spans, size_t n_spans, AdamW settings);
    /* work = weights, where they are two. */
    void (*weights_to_work)(Stream *stream, act_t *work, const float *weights, size_t count);
} Ops;

extern const Ops ops_cpu;
#ifdef USE_CUDA
extern const Ops ops_cuda, ops_cuda_fp32; /* bf16 activations; fp32 ones, for checking */
#endif
/* The device of that name; NULL: this build has none. */
const Ops *ops_find(const char *name);

#ifdef __cplusplus
}
#endif
#endif
