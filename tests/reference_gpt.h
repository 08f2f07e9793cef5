/* reference_gpt.h - a second GPT, written as plainly as it can be: loops over b, t and c, every table
 * stored, no library and no code of the program. The tests hold the program to it, and it to finite
 * differences.
 *
 * It is included once for each precision, with
 *     REAL        the type of every number in it: double (the reference), or float
 *     REF(name)   the name of a function in that precision
 *     MATH(name)  <math.h>'s function for that type: exp, or expf
 * The float one is no reference: it measures how far the rounding of a plain fp32 evaluation of the very
 * same formulas carries from the double one, which is what the program's error is measured against.
 *
 * The model: pre-norm GPT-2 (Radford et al. 2019) with tied head; LayerNorm epsilon 1e-5 with gain and bias;
 * GELU in the tanh form; positions learned, or rotary with halves rotated; dropout of the embedding sum and
 * of each branch before it is added to the residual. Loss: mean over the tokens.
 * Matrices are stored [in, out]. Letters: B sequences, T tokens, C channels, H heads, D = C / H, V
 * vocabulary, L layers; rows = B * T. */
#ifndef REFERENCE_GPT_H
#define REFERENCE_GPT_H

#include "reference_random.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* In this order, as the tests write it: {B, T, C, H, V, L, rotary, rate, seed}. */
typedef struct RefShape {
    size_t B, T, C, H, V, L;
    bool rotary;
    double rate;   /* of dropout */
    uint64_t seed; /* of its masks */
} RefShape;

/* A layer's tensors, in network order. */
/* clang-format off */
enum {
    LN1_GAIN, LN1_BIAS, QKV_WEIGHT, QKV_BIAS, PROJ_WEIGHT, PROJ_BIAS,
    LN2_GAIN, LN2_BIAS, FC_WEIGHT, FC_BIAS, OUT_WEIGHT, OUT_BIAS, LAYER_TENSORS
};
/* clang-format on */

typedef struct RefTensor {
    char name[64];
    size_t offset, size; /* in the flat array of all parameters */
    bool decay;          /* weight decay applies */
    bool gain;           /* starts around 1 */
} RefTensor;

typedef struct RefTable {
    RefTensor *tensor; /* wte, wpe (learned positions only), L * LAYER_TENSORS, final gain and bias */
    size_t count, total, first_layer;
} RefTable;

static inline void *reference_allocate(size_t count, size_t size) {
    void *memory = calloc(count ? count : 1, size);
    if (!memory) {
        fprintf(stderr, "reference_gpt: no memory for %zu numbers\n", count);
        exit(1);
    }
    return memory;
}

static inline void reference_add_tensor(RefTable *table, const char *prefix, const char *name, size_t rows,
                                        size_t columns, bool gain) {
    RefTensor *tensor = &table->tensor[table->count++];
    snprintf(tensor->name, sizeof tensor->name, "%s%s", prefix, name);
    tensor->offset = table->total, tensor->size = rows * columns;
    tensor->decay = rows > 1, tensor->gain = gain;
    table->total += tensor->size;
}

/* The parameters of a shape; free(table.tensor). */
static inline RefTable reference_table(const RefShape *shape) {
    const size_t C = shape->C;
    RefTable table = {NULL, 0, 0, 0};
    table.tensor = (RefTensor *)reference_allocate(4 + shape->L * LAYER_TENSORS, sizeof(RefTensor));
    reference_add_tensor(&table, "", "wte.weight", shape->V, C, false);
    if (!shape->rotary) {
        reference_add_tensor(&table, "", "wpe.weight", shape->T, C, false);
        table.tensor[1].decay = true; /* a matrix, even where ctx is 1 */
    }
    table.first_layer = table.count;
    for (size_t l = 0; l < shape->L; l++) {
        char prefix[32];
        snprintf(prefix, sizeof prefix, "h.%zu.", l);
        reference_add_tensor(&table, prefix, "ln_1.weight", 1, C, true);
        reference_add_tensor(&table, prefix, "ln_1.bias", 1, C, false);
        reference_add_tensor(&table, prefix, "attn.c_attn.weight", C, 3 * C, false);
        reference_add_tensor(&table, prefix, "attn.c_attn.bias", 1, 3 * C, false);
        reference_add_tensor(&table, prefix, "attn.c_proj.weight", C, C, false);
        reference_add_tensor(&table, prefix, "attn.c_proj.bias", 1, C, false);
        reference_add_tensor(&table, prefix, "ln_2.weight", 1, C, true);
        reference_add_tensor(&table, prefix, "ln_2.bias", 1, C, false);
        reference_add_tensor(&table, prefix, "mlp.c_fc.weight", C, 4 * C, false);
        reference_add_tensor(&table, prefix, "mlp.c_fc.bias", 1, 4 * C, false);
        reference_add_tensor(&table, prefix, "mlp.c_proj.weight", 4 * C, C, false);
        reference_add_tensor(&table, prefix, "mlp.c_proj.bias", 1, C, false);
    }
    reference_add_tensor(&table, "", "ln_f.weight", 1, C, true);
    reference_add_tensor(&table, "", "ln_f.bias", 1, C, false);
    return table;
}

/* Where layer l's tensor `which` begins; l = L: the final norm, as LN1_GAIN and LN1_BIAS. */
static inline size_t reference_at(const RefTable *table, size_t l, size_t which) {
    return table->tensor[table->first_layer + l * LAYER_TENSORS + which].offset;
}

#endif

/* ---- from here on once for each precision ---- */

static inline REAL *REF(numbers)(size_t count) {
    return (REAL *)reference_allocate(count, sizeof(REAL));
}

/* y (rows, out) = x (rows, in) W [in, out] + b. */
static inline void REF(linear)(REAL *y, const REAL *x, const REAL *w, const REAL *b, size_t rows, size_t in,
                               size_t out) {
    for (size_t r = 0; r < rows; r++) {
        for (size_t o = 0; o < out; o++) y[r * out + o] = b[o];
        for (size_t i = 0; i < in; i++) {
            for (size_t o = 0; o < out; o++) y[r * out + o] += x[r * in + i] * w[i * out + o];
        }
    }
}

/* dx = dy W^T; dw += x^T dy; db += column sums of dy. */
static inline void REF(linear_backward)(REAL *dx, REAL *dw, REAL *db, const REAL *dy, const REAL *x,
                                        const REAL *w, size_t rows, size_t in, size_t out) {
    for (size_t r = 0; r < rows; r++) {
        for (size_t o = 0; o < out; o++) db[o] += dy[r * out + o];
        for (size_t i = 0; i < in; i++) {
            REAL sum = 0;
            for (size_t o = 0; o < out; o++) {
                sum += dy[r * out + o] * w[i * out + o];
                dw[i * out + o] += x[r * in + i] * dy[r * out + o];
            }
            dx[r * in + i] = sum;
        }
    }
}

static inline void REF(statistics)(const REAL *x, size_t C, REAL *mean, REAL *rstd) {
    REAL sum = 0, squares = 0;
    for (size_t c = 0; c < C; c++) sum += x[c];
    *mean = sum / (REAL)C;
    for (size_t c = 0; c < C; c++) squares += (x[c] - *mean) * (x[c] - *mean);
    *rstd = 1 / MATH(sqrt)(squares / (REAL)C + (REAL)1e-5);
}

/* y = (x - mean) * rstd * gain + bias. */
static inline void REF(norm)(REAL *y, const REAL *x, const REAL *gain, const REAL *bias, size_t rows,
                             size_t C) {
    for (size_t r = 0; r < rows; r++) {
        REAL mean, rstd;
        REF(statistics)(x + r * C, C, &mean, &rstd);
        for (size_t c = 0; c < C; c++) y[r * C + c] = (x[r * C + c] - mean) * rstd * gain[c] + bias[c];
    }
}

/* dx += the norm's part; d_gain, d_bias are added to. With n = (x - mean) rstd and g = dy gain:
 * dx = rstd (g - mean(g) - n mean(g n)). */
static inline void REF(norm_backward)(REAL *dx, REAL *d_gain, REAL *d_bias, const REAL *dy, const REAL *x,
                                      const REAL *gain, size_t rows, size_t C) {
    for (size_t r = 0; r < rows; r++) {
        REAL mean, rstd, mean_g = 0, mean_gn = 0;
        REF(statistics)(x + r * C, C, &mean, &rstd);
        for (size_t c = 0; c < C; c++) {
            const REAL n = (x[r * C + c] - mean) * rstd, g = dy[r * C + c] * gain[c];
            mean_g += g / (REAL)C;
            mean_gn += g * n / (REAL)C;
            d_gain[c] += dy[r * C + c] * n;
            d_bias[c] += dy[r * C + c];
        }
        for (size_t c = 0; c < C; c++) {
            const REAL n = (x[r * C + c] - mean) * rstd, g = dy[r * C + c] * gain[c];
            dx[r * C + c] += rstd * (g - mean_g - n * mean_gn);
        }
    }
}

/* GELU(x) = x/2 (1 + tanh(k (x + 0.044715 x^3))), k = sqrt(2 / pi), and its derivative. */
static inline REAL REF(gelu)(REAL x) {
    const REAL k = (REAL)0.7978845608028654, a = (REAL)0.044715;
    return x / 2 * (1 + MATH(tanh)(k * (x + a * x * x * x)));
}
static inline REAL REF(gelu_slope)(REAL x) {
    const REAL k = (REAL)0.7978845608028654, a = (REAL)0.044715;
    const REAL t = MATH(tanh)(k * (x + a * x * x * x));
    return (1 + t) / 2 + x / 2 * (1 - t * t) * k * (1 + 3 * a * x * x);
}

/* Zeroes what dropout drops and scales what it keeps; its own gradient. x (rows, C). */
static inline void REF(dropout)(REAL *x, const RefShape *shape, uint32_t site, uint64_t step) {
    if (shape->rate == 0) return;
    const size_t rows = shape->B * shape->T, C = shape->C;
    const REAL scale = (REAL)(1 / (1 - shape->rate));
    for (size_t r = 0; r < rows; r++) {
        for (size_t c = 0; c < C; c++) {
            const bool keeps = reference_keeps(shape->rate, shape->seed, site, step, r, C, c);
            x[r * C + c] = keeps ? x[r * C + c] * scale : 0;
        }
    }
}

/* Rotates q and k of qkv (B, T, 3, H, D) by the position's angles; direction -1: back. */
static inline void REF(rotary)(REAL *qkv, const RefShape *shape, int direction) {
    const size_t C = shape->C, D = C / shape->H;
    for (size_t r = 0; r < shape->B * shape->T; r++) {
        for (size_t head = 0; head < 2 * shape->H; head++) { /* H heads of q, then H of k */
            REAL *x = qkv + r * 3 * C + head * D;
            for (size_t i = 0; i < D / 2; i++) {
                const double position = (double)(r % shape->T);
                const double angle = direction * position * pow(10000, -2.0 * (double)i / (double)D);
                const REAL cosine = (REAL)cos(angle), sine = (REAL)sin(angle);
                const REAL a = x[i], b = x[i + D / 2];
                x[i] = a * cosine - b * sine;
                x[i + D / 2] = a * sine + b * cosine;
            }
        }
    }
}

/* Causal attention: probabilities p (B, H, T, T), out (B, T, H, D) from qkv (B, T, 3, H, D). */
static inline void REF(attention)(REAL *out, REAL *p, const REAL *qkv, const RefShape *shape) {
    const size_t T = shape->T, C = shape->C, D = C / shape->H;
    const REAL scale = (REAL)(1 / sqrt((double)D));
    for (size_t b = 0; b < shape->B; b++) {
        for (size_t h = 0; h < shape->H; h++) {
            for (size_t t = 0; t < T; t++) {
                const REAL *q = qkv + (b * T + t) * 3 * C + h * D;
                REAL *row = p + ((b * shape->H + h) * T + t) * T, *o = out + (b * T + t) * C + h * D;
                REAL largest = -INFINITY, sum = 0;
                for (size_t s = 0; s <= t; s++) {
                    const REAL *k = qkv + (b * T + s) * 3 * C + C + h * D;
                    REAL dot = 0;
                    for (size_t d = 0; d < D; d++) dot += q[d] * k[d];
                    row[s] = dot * scale;
                    if (row[s] > largest) largest = row[s];
                }
                for (size_t s = 0; s <= t; s++) sum += row[s] = MATH(exp)(row[s] - largest);
                for (size_t d = 0; d < D; d++) o[d] = 0;
                for (size_t s = 0; s <= t; s++) {
                    const REAL *v = qkv + (b * T + s) * 3 * C + 2 * C + h * D;
                    row[s] /= sum;
                    for (size_t d = 0; d < D; d++) o[d] += row[s] * v[d];
                }
            }
        }
    }
}

/* d_qkv from d_out; d_qkv holds zeros. */
static inline void REF(attention_backward)(REAL *d_qkv, const REAL *d_out, const REAL *p, const REAL *qkv,
                                           const RefShape *shape) {
    const size_t T = shape->T, C = shape->C, D = C / shape->H;
    const REAL scale = (REAL)(1 / sqrt((double)D));
    REAL *dp = REF(numbers)(T);
    for (size_t b = 0; b < shape->B; b++) {
        for (size_t h = 0; h < shape->H; h++) {
            for (size_t t = 0; t < T; t++) {
                const size_t at_t = (b * T + t) * 3 * C + h * D;
                const REAL *row = p + ((b * shape->H + h) * T + t) * T,
                           *d_o = d_out + (b * T + t) * C + h * D;
                REAL delta = 0;
                for (size_t s = 0; s <= t; s++) {
                    const size_t at_s = (b * T + s) * 3 * C + h * D;
                    dp[s] = 0;
                    for (size_t d = 0; d < D; d++) {
                        dp[s] += d_o[d] * qkv[at_s + 2 * C + d];
                        d_qkv[at_s + 2 * C + d] += row[s] * d_o[d];
                    }
                    delta += row[s] * dp[s];
                }
                for (size_t s = 0; s <= t; s++) {
                    const size_t at_s = (b * T + s) * 3 * C + h * D;
                    const REAL ds = row[s] * (dp[s] - delta) * scale;
                    for (size_t d = 0; d < D; d++) {
                        d_qkv[at_t + d] += ds * qkv[at_s + C + d];
                        d_qkv[at_s + C + d] += ds * qkv[at_t + d];
                    }
                }
            }
        }
    }
    free(dp);
}

/* What the forward pass leaves for the backward pass. */
typedef struct REF(Layer) {
    REAL *x;      /* (B, T, C) the residual stream as it enters */
    REAL *n1;     /* (B, T, C) */
    REAL *qkv;    /* (B, T, 3, H, D), rotated */
    REAL *p;      /* (B, H, T, T) */
    REAL *mixed;  /* (B, T, C) */
    REAL *middle; /* (B, T, C) the residual stream between the two branches */
    REAL *n2;     /* (B, T, C) */
    REAL *pre;    /* (B, T, 4C) */
    REAL *hidden; /* (B, T, 4C) GELU of it */
} REF(Layer);

/* The whole model. tokens, targets (B, T). losses (B, T) gets each token's loss; logits (B, T, V), NULL: not
 * wanted; gradients (the table's total), of the mean loss, overwritten, NULL: forward only. targets and
 * losses may be NULL together. Returns the mean loss. */
static inline double REF(gpt)(const RefShape *shape, const RefTable *table, const REAL *parameters,
                              uint64_t step, const int32_t *tokens, const int32_t *targets, REAL *losses,
                              REAL *logits, REAL *gradients) {
    const size_t B = shape->B, T = shape->T, C = shape->C, V = shape->V, L = shape->L, rows = B * T;
    const REAL *wte = parameters, *wpe = shape->rotary ? NULL : parameters + V * C;
#define P(l, which) (parameters + reference_at(table, l, which))
#define G(l, which) (gradients + reference_at(table, l, which))

    REF(Layer) *layers = (REF(Layer) *)reference_allocate(L, sizeof *layers);
    REAL *x = REF(numbers)(rows * C), *branch = REF(numbers)(rows * C);
    for (size_t r = 0; r < rows; r++) {
        for (size_t c = 0; c < C; c++) {
            x[r * C + c] = wte[(size_t)tokens[r] * C + c] + (wpe ? wpe[r % T * C + c] : 0);
        }
    }
    REF(dropout)(x, shape, 0, step);

    for (size_t l = 0; l < L; l++) {
        REF(Layer) *layer = &layers[l];
        layer->x = REF(numbers)(rows * C), layer->n1 = REF(numbers)(rows * C);
        layer->qkv = REF(numbers)(rows * 3 * C), layer->p = REF(numbers)(B * shape->H * T * T);
        layer->mixed = REF(numbers)(rows * C), layer->middle = REF(numbers)(rows * C);
        layer->n2 = REF(numbers)(rows * C);
        layer->pre = REF(numbers)(rows * 4 * C), layer->hidden = REF(numbers)(rows * 4 * C);

        memcpy(layer->x, x, rows * C * sizeof *x);
        REF(norm)(layer->n1, x, P(l, LN1_GAIN), P(l, LN1_BIAS), rows, C);
        REF(linear)(layer->qkv, layer->n1, P(l, QKV_WEIGHT), P(l, QKV_BIAS), rows, C, 3 * C);
        if (shape->rotary) REF(rotary)(layer->qkv, shape, 1);
        REF(attention)(layer->mixed, layer->p, layer->qkv, shape);
        REF(linear)(branch, layer->mixed, P(l, PROJ_WEIGHT), P(l, PROJ_BIAS), rows, C, C);
        REF(dropout)(branch, shape, (uint32_t)(1 + 2 * l), step);
        for (size_t i = 0; i < rows * C; i++) x[i] += branch[i];

        memcpy(layer->middle, x, rows * C * sizeof *x);
        REF(norm)(layer->n2, x, P(l, LN2_GAIN), P(l, LN2_BIAS), rows, C);
        REF(linear)(layer->pre, layer->n2, P(l, FC_WEIGHT), P(l, FC_BIAS), rows, C, 4 * C);
        for (size_t i = 0; i < rows * 4 * C; i++) layer->hidden[i] = REF(gelu)(layer->pre[i]);
        REF(linear)(branch, layer->hidden, P(l, OUT_WEIGHT), P(l, OUT_BIAS), rows, 4 * C, C);
        REF(dropout)(branch, shape, (uint32_t)(2 + 2 * l), step);
        for (size_t i = 0; i < rows * C; i++) x[i] += branch[i];
    }

    /* The head, a row at a time: logits, loss, and both of its gradients. */
    REAL *normed = REF(numbers)(rows * C), *d_normed = REF(numbers)(rows * C), *row = REF(numbers)(V);
    if (gradients) memset(gradients, 0, table->total * sizeof *gradients);
    REF(norm)(normed, x, P(L, LN1_GAIN), P(L, LN1_BIAS), rows, C);
    double loss = 0;
    for (size_t r = 0; r < rows; r++) {
        const REAL *hidden = normed + r * C;
        REAL largest = -INFINITY, sum = 0;
        for (size_t v = 0; v < V; v++) {
            row[v] = 0;
            for (size_t c = 0; c < C; c++) row[v] += hidden[c] * wte[v * C + c];
            if (row[v] > largest) largest = row[v];
        }
        if (logits) memcpy(logits + r * V, row, V * sizeof *row);
        if (!targets) continue;
        for (size_t v = 0; v < V; v++) sum += MATH(exp)(row[v] - largest);
        losses[r] = MATH(log)(sum) - (row[targets[r]] - largest);
        loss += (double)losses[r];
        if (!gradients) continue;
        for (size_t v = 0; v < V; v++) {
            const REAL p = MATH(exp)(row[v] - largest) / sum;
            const REAL d_logit = (p - (REAL)(v == (size_t)targets[r])) / (REAL)rows;
            for (size_t c = 0; c < C; c++) {
                d_normed[r * C + c] += d_logit * wte[v * C + c];
                gradients[v * C + c] += d_logit * hidden[c];
            }
        }
    }

    if (gradients) {
        REAL *dx = REF(numbers)(rows * C); /* dx: the residual stream's gradient */
        REAL *d_wide = REF(numbers)(rows * 4 * C), *d_mixed = REF(numbers)(rows * C);
        REF(norm_backward)(dx, G(L, LN1_GAIN), G(L, LN1_BIAS), d_normed, x, P(L, LN1_GAIN), rows, C);
        /* clang-format off */
        for (size_t l = L; l-- > 0;) {
            const REF(Layer) *layer = &layers[l];
            memcpy(branch, dx, rows * C * sizeof *dx);
            REF(dropout)(branch, shape, (uint32_t)(2 + 2 * l), step);
            REF(linear_backward)(d_wide, G(l, OUT_WEIGHT), G(l, OUT_BIAS), branch, layer->hidden,
                                 P(l, OUT_WEIGHT), rows, 4 * C, C);
            for (size_t i = 0; i < rows * 4 * C; i++) d_wide[i] *= REF(gelu_slope)(layer->pre[i]);
            REF(linear_backward)(d_normed, G(l, FC_WEIGHT), G(l, FC_BIAS), d_wide, layer->n2,
                                 P(l, FC_WEIGHT), rows, C, 4 * C);
            REF(norm_backward)(dx, G(l, LN2_GAIN), G(l, LN2_BIAS), d_normed, layer->middle,
                               P(l, LN2_GAIN), rows, C);

            memcpy(branch, dx, rows * C * sizeof *dx);
            REF(dropout)(branch, shape, (uint32_t)(1 + 2 * l), step);
            REF(linear_backward)(d_mixed, G(l, PROJ_WEIGHT), G(l, PROJ_BIAS), branch, layer->mixed,
                                 P(l, PROJ_WEIGHT), rows, C, C);
            memset(d_wide, 0, rows * 3 * C * sizeof *d_wide);
            REF(attention_backward)(d_wide, d_mixed, layer->p, layer->qkv, shape);
            if (shape->rotary) REF(rotary)(d_wide, shape, -1);
            REF(linear_backward)(d_normed, G(l, QKV_WEIGHT), G(l, QKV_BIAS), d_wide, layer->n1,
                                 P(l, QKV_WEIGHT), rows, C, 3 * C);
            REF(norm_backward)(dx, G(l, LN1_GAIN), G(l, LN1_BIAS), d_normed, layer->x, P(l, LN1_GAIN),
                               rows, C);
        }
        /* clang-format on */
        REF(dropout)(dx, shape, 0, step);
        for (size_t r = 0; r < rows; r++) {
            for (size_t c = 0; c < C; c++) {
                gradients[(size_t)tokens[r] * C + c] += dx[r * C + c];
                if (wpe) gradients[V * C + r % T * C + c] += dx[r * C + c];
            }
        }
        free(dx), free(d_wide), free(d_mixed);
    }
#undef P
#undef G
    for (size_t l = 0; l < L; l++) {
        REF(Layer) *layer = &layers[l];
        free(layer->x), free(layer->n1), free(layer->qkv), free(layer->p), free(layer->mixed);
        free(layer->middle), free(layer->n2), free(layer->pre), free(layer->hidden);
    }
    free(layers), free(x), free(branch), free(normed), free(d_normed), free(row);
    return loss / (double)rows;
}

/* Clipping by the global norm, then AdamW (Loshchilov and Hutter 2019, algorithm 2, decay scaled by the
 * learning rate) with update number `update` counted from 1. Returns the norm before clipping. */
static inline double REF(adamw)(const RefTable *table, REAL *parameters, REAL *m, REAL *v,
                                const REAL *gradients, uint64_t update, double lr, double weight_decay,
                                double clip) {
    const double beta1 = (double)0.9f, beta2 = (double)0.95f; /* as a caller's floats hold them */
    REAL squares = 0;
    for (size_t i = 0; i < table->total; i++) squares += gradients[i] * gradients[i];
    const REAL norm = MATH(sqrt)(squares);
    const REAL scale = clip > 0 && norm > (REAL)clip ? (REAL)clip / norm : 1;
    const REAL correction1 = (REAL)(1 - pow(beta1, (double)update));
    const REAL correction2 = (REAL)(1 - pow(beta2, (double)update));
    for (size_t k = 0; k < table->count; k++) {
        const RefTensor *tensor = &table->tensor[k];
        const REAL decay = tensor->decay ? (REAL)weight_decay : 0;
        for (size_t i = tensor->offset; i < tensor->offset + tensor->size; i++) {
            const REAL g = gradients[i] * scale;
            m[i] = (REAL)beta1 * m[i] + (REAL)(1 - beta1) * g;
            v[i] = (REAL)beta2 * v[i] + (REAL)(1 - beta2) * g * g;
            const REAL direction = m[i] / correction1 / (MATH(sqrt)(v[i] / correction2) + (REAL)1e-8f);
            parameters[i] -= (REAL)lr * (direction + decay * parameters[i]);
        }
    }
    return (double)norm;
}

#undef REAL
#undef REF
#undef MATH
