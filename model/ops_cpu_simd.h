/* ops_cpu_simd.h - the inner loops of ops_cpu.c and of sampling (generate.c), over one row or one stretch each;
 * compiled once for each SIMD level (simd.h) into a table of its own. Inside model/ only. */
#ifndef OPS_CPU_SIMD_H
#define OPS_CPU_SIMD_H

#include "../common.h"
#include "../simd.h"

enum { SAMPLE_BLOCK = 256 };

typedef struct CpuKernels {
    /* mask[c] = 0 or 1 / (1 - rate), c < C, as Dropout in ops.h says; group = row_of_step * ceil(C / 4). */
    void (*dropout_mask)(float *mask, size_t C, float rate, uint64_t key, uint64_t group, uint64_t step);
    /* y += x; y = x * scale, elementwise. y may be x. */
    void (*add)(float *y, const float *x, size_t n);
    void (*multiply_to)(float *y, const float *x, const float *scale, size_t n);
    /* sum = residual + branch (NULL: none, and sum is not written), then LayerNorm of it; normed may be
     * branch's own row. */
    void (*norm_forward)(float *sum, float *normed, float *mean, float *rstd, const float *residual,
                         const float *branch, const float *gain, const float *bias, size_t C);
    /* d_sum (+)= the norm's part; d_gain, d_bias += this row's. */
    void (*norm_backward)(float *d_sum, bool overwrite, float *d_gain, float *d_bias, const float *d_normed,
                          const float *sum, float mean, float rstd, const float *gain, size_t C);
    /* y += bias; with gelu not NULL, gelu = GELU(y); y NULL: gelu = GELU(gelu + bias). */
    void (*bias_gelu)(float *y, float *gelu, const float *bias, size_t n);
    /* dx *= GELU'(pre). */
    void (*gelu_backward)(float *dx, const float *pre, size_t n);
    /* One row of logits: returns -ln softmax(logits)[target]; where the gradient is wanted, logits becomes
     * scale * (softmax - onehot(target)). */
    double (*softmax_loss)(float *logits, size_t V, size_t target, float scale, bool gradient);
    /* One head's vector of 2 * half floats, rotated by the angles whose cos and sin are given. */
    void (*rotate)(float *x, const float *cosine, const float *sine, size_t half, bool inverse);
    double (*sum_of_squares)(const float *x, size_t n);
    /* The gradient is g * scale; correction = 1 / (1 - beta^t). */
    void (*adamw)(float *w, const float *g, float *m, float *v, size_t n, float scale, float lr, float decay,
                  float beta1, float beta2, float epsilon, float correction1, float correction2);
    /* Of those logits (V) that are numbers the largest, -inf where none is. */
    float (*largest)(const float *logits, size_t V);
    /* weights[i] = e^((logits[i] - largest) / temperature), 1 where the logit is the largest, 0 where it is -inf
     * or no number; sums[b] = the sum of weights b * SAMPLE_BLOCK up to the next block. */
    void (*sample_weights)(float *weights, float *sums, const float *logits, size_t V, float largest,
                           float temperature);
} CpuKernels;

SIMD_DECLARE(CpuKernels, cpu_kernels);

#endif
