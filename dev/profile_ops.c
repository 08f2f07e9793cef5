/* profile_ops.c - what profile_ops.h promises. */
#include "profile_ops.h"

#include <stdlib.h>
#include <string.h>

const char *const kind_names[KINDS] = {"embedding",
                                       "residual and norm, forward",
                                       "residual and norm, backward",
                                       "linear, forward",
                                       "linear, backward",
                                       "rotary",
                                       "attention, forward",
                                       "attention, backward",
                                       "head and loss",
                                       "gradient norm",
                                       "AdamW",
                                       "zero, copies"};

typedef struct Note {
    Kind kind;
    double flops, bytes;
} Note; /* note i lies between marks 2 i and 2 i + 1 */

static struct {
    const Ops *ops;
    const Attention *attention;
    Stream *stream; /* of the calls */
    bool on;
    Note *notes;
    size_t count, capacity;
} profile;

/* ---- notes ---- */
static void begin(Stream *stream) {
    if (profile.on) profile.ops->mark(stream, 2 * profile.count);
}
static void end(Stream *stream, Kind kind, double flops, double bytes) {
    if (!profile.on) return;
    profile.ops->mark(stream, 2 * profile.count + 1);
    profile.stream = stream;
    if (profile.count == profile.capacity) {
        profile.capacity = 2 * profile.capacity + 64;
        profile.notes = (Note *)xrealloc(profile.notes, profile.capacity * sizeof *profile.notes);
    }
    profile.notes[profile.count++] = (Note){kind, flops, bytes};
}

void profile_start(void) {
    profile.on = true, profile.count = 0;
}

double profile_stop(Spent spent[KINDS]) {
    memset(spent, 0, KINDS * sizeof *spent);
    for (size_t i = 0; i < profile.count; i++) {
        Spent *to = &spent[profile.notes[i].kind];
        to->seconds += profile.ops->seconds_between(profile.stream, 2 * i, 2 * i + 1);
        to->flops += profile.notes[i].flops, to->bytes += profile.notes[i].bytes;
    }
    profile.on = false;
    return profile.count ? profile.ops->seconds_between(profile.stream, 0, 2 * profile.count - 1) : 0;
}

/* ---- what a call computes and moves ---- */
static double product(size_t a, size_t b, size_t c) {
    return 2.0 * (double)a * (double)b * (double)c;
}
static double acts(size_t rows, size_t columns) {
    return (double)rows * (double)columns * (double)profile.ops->act_size;
}
static double floats_of(const ParamSpan *spans, size_t n_spans) {
    double floats = 0;
    for (size_t i = 0; i < n_spans; i++) floats += (double)spans[i].count;
    return floats;
}

/* An operation of ops.h between two marks: its parameters, the same as arguments, its FLOPs and its bytes. */
#define PROFILED(operation, kind, parameters, arguments, flops, bytes) \
    static void profiled_##operation parameters {                      \
        begin(stream);                                                 \
        profile.ops->operation arguments;                              \
        end(stream, kind, flops, bytes);                               \
    }

PROFILED(upload, OTHER, (Stream * stream, void *device, const void *host, size_t size),
         (stream, device, host, size), 0, (double)size)
PROFILED(zero, OTHER, (Stream * stream, void *device, size_t size), (stream, device, size), 0, (double)size)
PROFILED(embedding_forward, EMBEDDING,
         (Stream * stream, act_t *x, const int32_t *tokens, const act_t *wte, const act_t *wpe, size_t B,
          size_t T, size_t C, size_t first_position, Dropout dropout),
         (stream, x, tokens, wte, wpe, B, T, C, first_position, dropout), 0, 2 * acts(B * T, C))
PROFILED(embedding_backward, EMBEDDING,
         (Stream * stream, float *d_wte, float *d_wpe, const act_t *dx, const int32_t *tokens, size_t B,
          size_t T, size_t C, Dropout dropout),
         (stream, d_wte, d_wpe, dx, tokens, B, T, C, dropout), 0, acts(B *T, C))
PROFILED(residual_norm_forward, NORM_FORWARD,
         (Stream * stream, act_t *sum, act_t *normed, float *mean, float *rstd, const act_t *residual,
          const act_t *branch, const act_t *gain, const act_t *bias, size_t rows, size_t C, Dropout dropout),
         (stream, sum, normed, mean, rstd, residual, branch, gain, bias, rows, C, dropout), 0,
         (branch ? 4 : 2) * acts(rows, C))
PROFILED(residual_norm_backward, NORM_BACKWARD,
         (Stream * stream, act_t *d_sum, bool overwrite, act_t *d_branch, float *d_gain, float *d_bias,
          const act_t *d_normed, const act_t *sum, const float *mean, const float *rstd, const act_t *gain,
          size_t rows, size_t C, Dropout dropout),
         (stream, d_sum, overwrite, d_branch, d_gain, d_bias, d_normed, sum, mean, rstd, gain, rows, C,
          dropout),
         0, ((overwrite ? 3 : 4) + (d_branch ? 1 : 0)) * acts(rows, C))
PROFILED(linear_forward, LINEAR_FORWARD,
         (Stream * stream, act_t *y, act_t *gelu_y, const act_t *x, const act_t *w, const act_t *b,
          size_t rows, size_t in, size_t out),
         (stream, y, gelu_y, x, w, b, rows, in, out), product(rows, in, out), 0)
PROFILED(linear_backward, LINEAR_BACKWARD,
         (Stream * stream, act_t *dx, float *dw, float *db, const act_t *dy, const act_t *x, const act_t *w,
          const act_t *pre, size_t rows, size_t in, size_t out),
         (stream, dx, dw, db, dy, x, w, pre, rows, in, out), 2 * product(rows, in, out), 0)
PROFILED(rotary, ROTARY,
         (Stream * stream, act_t *qkv, size_t B, size_t T, size_t H, size_t D, size_t first_position,
          bool keys_only, bool inverse),
         (stream, qkv, B, T, H, D, first_position, keys_only, inverse), 0,
         (keys_only ? 2 : 4) * acts(B * T, H *D))
PROFILED(head_loss, HEAD,
         (Stream * stream, StepState *state, act_t *d_hidden, float *d_wte, const act_t *hidden,
          const act_t *wte, const int32_t *targets, size_t rows, size_t C, size_t V, float grad_scale,
          void *scratch),
         (stream, state, d_hidden, d_wte, hidden, wte, targets, rows, C, V, grad_scale, scratch),
         (d_hidden ? 3 : 1) * product(rows, C, V), 0)
PROFILED(gradient_norm, CLIP,
         (Stream * stream, StepState *state, const float *gradients, const ParamSpan *spans, size_t n_spans,
          float clip),
         (stream, state, gradients, spans, n_spans, clip), 0, 4 * floats_of(spans, n_spans))
/* Reads weights, gradients, m and v, writes weights, m, v and the working copy. */
PROFILED(adamw, UPDATE,
         (Stream * stream, StepState *state, float *weights, act_t *work, const float *gradients, float *m,
          float *v, const ParamSpan *spans, size_t n_spans, AdamW settings),
         (stream, state, weights, work, gradients, m, v, spans, n_spans, settings), 0,
         (28 + (work ? (double)profile.ops->act_size : 0)) * floats_of(spans, n_spans))

/* Q K^T and P V, half of each. */
static double attention_flops(const AttentionCall *call) {
    return product(call->B * call->H * call->T, call->T, call->D);
}
static void profiled_forward(const AttentionCall *call) {
    begin(call->stream);
    profile.attention->forward(call);
    end(call->stream, ATTENTION_FORWARD, attention_flops(call), 0);
}
static void profiled_backward(const AttentionCall *call) {
    begin(call->stream);
    profile.attention->backward(call);
    end(call->stream, ATTENTION_BACKWARD, 2.5 * attention_flops(call), 0);
}

void profile_wrap(const Ops *ops, const Attention *attention, Ops *outer_ops, Attention *outer_attention) {
    profile.ops = ops, profile.attention = attention;
    *outer_ops = *ops;
    outer_ops->upload = profiled_upload, outer_ops->zero = profiled_zero;
    outer_ops->embedding_forward = profiled_embedding_forward;
    outer_ops->embedding_backward = profiled_embedding_backward;
    outer_ops->residual_norm_forward = profiled_residual_norm_forward;
    outer_ops->residual_norm_backward = profiled_residual_norm_backward;
    outer_ops->linear_forward = profiled_linear_forward;
    outer_ops->linear_backward = profiled_linear_backward;
    outer_ops->rotary = profiled_rotary, outer_ops->head_loss = profiled_head_loss;
    outer_ops->gradient_norm = profiled_gradient_norm, outer_ops->adamw = profiled_adamw;
    *outer_attention = *attention;
    outer_attention->forward = profiled_forward, outer_attention->backward = profiled_backward;
}
