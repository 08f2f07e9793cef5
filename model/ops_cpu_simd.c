/* ops_cpu_simd.c - see ops_cpu_simd.h. Plain loops that the compiler turns into the vector instructions of
 * the level this file is compiled for. Sums keep their partial sums in a vector: fast without -ffast-math, in
 * an order that is fixed for the level. */
#include "ops_cpu_simd.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "../simd_math.h"

/* A vector of the machine's own width: gcc and clang know this type. */
#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
typedef float Lanes __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t Ints __attribute__((vector_size(LANES * sizeof(int32_t))));
typedef double Doubles __attribute__((vector_size(LANES * sizeof(float))));

/* A vector from anywhere. A macro: a function that returns vectors has an ABI that differs by level. */
#define LOAD(to, from) memcpy(&(to), (from), sizeof(Lanes))

/* The partial sums, added pairwise. */
static inline float lanes_sum(const Lanes *lanes) {
    float lane[LANES];
    memcpy(lane, lanes, sizeof lane);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lane[i] += lane[i + width];
    return lane[0];
}

static void dropout_mask(float *mask, size_t C, float rate, uint64_t key, uint64_t group, uint64_t step) {
    const uint32_t threshold = (uint32_t)((double)rate * 4294967296.0);
    const float keep = 1.0f / (1.0f - rate);
    for (size_t c = 0; c < C; c += 4, group++) {
        const Philox random = philox(key, group, step);
        const size_t n = C - c < 4 ? C - c : 4;
        for (size_t i = 0; i < n; i++) mask[c + i] = random.word[i] >= threshold ? keep : 0.0f;
    }
}

static void add(float *restrict y, const float *restrict x, size_t n) {
    for (size_t i = 0; i < n; i++) y[i] += x[i];
}

static void multiply_to(float *y, const float *x, const float *scale, size_t n) {
    for (size_t i = 0; i < n; i++) y[i] = x[i] * scale[i];
}

/* Two passes over a row that sits in the first-level cache: the mean, then the variance about it. */
static void norm_forward(float *sum, float *normed, float *mean_out, float *rstd_out, const float *residual,
                         const float *branch, const float *restrict gain, const float *restrict bias,
                         size_t C) {
    const float *x = residual;
    if (branch) {
        for (size_t c = 0; c < C; c++) sum[c] = residual[c] + branch[c];
        x = sum;
    }
    const size_t whole = C / LANES * LANES;
    Lanes sums = {0}, squares = {0}, v;
    for (size_t c = 0; c < whole; c += LANES) {
        LOAD(v, x + c);
        sums += v;
    }
    for (size_t c = whole; c < C; c++) sums[c - whole] += x[c];
    const float mean = lanes_sum(&sums) / (float)C;
    for (size_t c = 0; c < whole; c += LANES) {
        LOAD(v, x + c);
        squares += (v - mean) * (v - mean);
    }
    for (size_t c = whole; c < C; c++) squares[c - whole] += (x[c] - mean) * (x[c] - mean);
    const float rstd = 1.0f / sqrtf(lanes_sum(&squares) / (float)C + 1e-5f);
    for (size_t c = 0; c < C; c++) normed[c] = (x[c] - mean) * rstd * gain[c] + bias[c];
    if (mean_out) *mean_out = mean;
    if (rstd_out) *rstd_out = rstd;
}

/* With xhat = (x - mean) rstd and g = d_normed gain:
 * dx = rstd (g - average(g) - xhat average(g xhat)). */
static void norm_backward(float *restrict d_sum, bool overwrite, float *restrict d_gain,
                          float *restrict d_bias, const float *restrict d_normed, const float *restrict sum,
                          float mean, float rstd, const float *restrict gain, size_t C) {
    const size_t whole = C / LANES * LANES;
    Lanes sum_g = {0}, sum_gx = {0}, x, dy, scale;
    for (size_t c = 0; c < whole; c += LANES) {
        LOAD(x, sum + c);
        LOAD(dy, d_normed + c);
        LOAD(scale, gain + c);
        sum_g += dy * scale;
        sum_gx += dy * scale * ((x - mean) * rstd);
    }
    for (size_t c = whole; c < C; c++) {
        sum_g[c - whole] += d_normed[c] * gain[c];
        sum_gx[c - whole] += d_normed[c] * gain[c] * ((sum[c] - mean) * rstd);
    }
    const float average_g = lanes_sum(&sum_g) / (float)C, average_gx = lanes_sum(&sum_gx) / (float)C;
    if (overwrite) memset(d_sum, 0, C * sizeof *d_sum);
    for (size_t c = 0; c < C; c++) {
        const float xhat = (sum[c] - mean) * rstd;
        d_sum[c] += rstd * (d_normed[c] * gain[c] - average_g - xhat * average_gx);
        d_gain[c] += d_normed[c] * xhat;
        d_bias[c] += d_normed[c];
    }
}

/* GELU(x) = x/2 (1 + tanh(u)), u = sqrt(2/pi) (x + 0.044715 x^3); GELU' = (1 + tanh u)/2 +
 * x/2 (1 - tanh^2 u) u'. */
static const float gelu_scale = 0.7978845608028654f, gelu_cubic = 0.044715f;

static inline float gelu_of(float x) {
    return 0.5f * x * (1.0f + simd_tanhf(gelu_scale * (x + gelu_cubic * x * x * x)));
}

static void bias_gelu(float *restrict y, float *restrict gelu, const float *restrict bias, size_t n) {
    if (!gelu) {
        add(y, bias, n);
        return;
    }
    if (!y) {
        for (size_t i = 0; i < n; i++) gelu[i] = gelu_of(gelu[i] + bias[i]);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        const float x = y[i] + bias[i];
        y[i] = x;
        gelu[i] = gelu_of(x);
    }
}

static void gelu_backward(float *restrict dx, const float *restrict pre, size_t n) {
    for (size_t i = 0; i < n; i++) {
        const float x = pre[i], t = simd_tanhf(gelu_scale * (x + gelu_cubic * x * x * x));
        const float slope = gelu_scale * (1.0f + 3.0f * gelu_cubic * x * x);
        dx[i] *= 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * slope;
    }
}

static double softmax_loss(float *logits, size_t V, size_t target, float scale, bool gradient) {
    const size_t whole = V / LANES * LANES;
    float high[LANES];
    for (int i = 0; i < LANES; i++) high[i] = -INFINITY;
    for (size_t v = 0; v < whole; v += LANES)
        for (int i = 0; i < LANES; i++)
            high[i] = logits[v + (size_t)i] > high[i] ? logits[v + (size_t)i] : high[i];
    for (size_t v = whole; v < V; v++) high[0] = logits[v] > high[0] ? logits[v] : high[0];
    for (int i = 1; i < LANES; i++) high[0] = high[i] > high[0] ? high[i] : high[0];
    const float max = high[0], at_target = logits[target];
    for (size_t v = 0; v < V; v++) logits[v] = simd_expf(logits[v] - max);
    Lanes sums = {0}, e;
    for (size_t v = 0; v < whole; v += LANES) {
        LOAD(e, logits + v);
        sums += e;
    }
    for (size_t v = whole; v < V; v++) sums[v - whole] += logits[v];
    const float sum = lanes_sum(&sums);
    if (gradient) {
        const float factor = scale / sum;
        for (size_t v = 0; v < V; v++) logits[v] *= factor;
        logits[target] -= scale;
    }
    return (double)max - (double)at_target + log((double)sum);
}

static void rotate(float *restrict x, const float *restrict cosine, const float *restrict sine, size_t half,
                   bool inverse) {
    const float sign = inverse ? -1.0f : 1.0f;
    for (size_t i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half], c = cosine[i], s = sign * sine[i];
        x[i] = a * c - b * s;
        x[i + half] = a * s + b * c;
    }
}

/* In double: the square of a gradient of 1e20 is still a number, and only a real inf or NaN is not. */
static double sum_of_squares(const float *x, size_t n) {
    enum { DOUBLES = LANES / 2 };
    Doubles sums = {0};
    const size_t whole = n / DOUBLES * DOUBLES;
    for (size_t k = 0; k < whole; k += DOUBLES) {
        Doubles v;
        for (size_t i = 0; i < DOUBLES; i++) v[i] = (double)x[k + i];
        sums += v * v;
    }
    for (size_t k = whole; k < n; k++) sums[k - whole] += (double)x[k] * (double)x[k];
    double total = 0;
    for (int i = 0; i < DOUBLES; i++) total += sums[i];
    return total;
}

static void adamw(float *restrict w, const float *restrict g, float *restrict m, float *restrict v, size_t n,
                  float scale, float lr, float decay, float beta1, float beta2, float epsilon,
                  float correction1, float correction2) {
    for (size_t i = 0; i < n; i++) {
        const float gradient = g[i] * scale;
        const float first = beta1 * m[i] + (1.0f - beta1) * gradient;
        const float second = beta2 * v[i] + (1.0f - beta2) * gradient * gradient;
        /* Of a weight that gets no more gradient both shrink for ever, and below FLT_MIN every operation on them is
         * slow; 0.9 of the smallest numbers even rounds to themselves. */
        m[i] = fabsf(first) < FLT_MIN ? 0.0f : first;
        v[i] = second < FLT_MIN ? 0.0f : second;
        const float step = (m[i] * correction1) / (sqrtf(v[i] * correction2) + epsilon);
        w[i] -= lr * (step + decay * w[i]);
    }
}

static float largest(const float *logits, size_t V) {
    /* As masks of bits, since compilers turn ?: on floats into branches. */
    Lanes most = {0}, x;
    most -= INFINITY;
    const size_t whole = V / LANES * LANES;
    for (size_t i = 0; i < whole; i += LANES) {
        LOAD(x, logits + i);
        const Ints larger = x > most; /* never for NaN */
        most = (Lanes)(((Ints)x & larger) | ((Ints)most & ~larger));
    }
    float found = -INFINITY, lane[LANES];
    memcpy(lane, &most, sizeof lane);
    for (size_t i = 0; i < LANES; i++)
        if (lane[i] > found) found = lane[i];
    for (size_t i = whole; i < V; i++)
        if (logits[i] > found) found = logits[i];
    return found;
}

static void sample_weights(float *restrict weights, float *restrict sums, const float *restrict logits,
                           size_t V, float most, float temperature) {
    for (size_t start = 0; start < V; start += SAMPLE_BLOCK) {
        const size_t n = V - start < SAMPLE_BLOCK ? V - start : SAMPLE_BLOCK;
        for (size_t i = start; i < start + n; i++) {
            const uint32_t one = simd_mask(logits[i] == most), any = simd_mask(logits[i] > -INFINITY);
            const uint32_t weight = simd_bits_of_float(simd_expf((logits[i] - most) / temperature));
            weights[i] = simd_float_of_bits((weight & any & ~one) | (0x3f800000u & one));
        }
        const size_t whole = n / LANES * LANES;
        Lanes sum = {0}, x;
        for (size_t i = 0; i < whole; i += LANES) {
            LOAD(x, weights + start + i);
            sum += x;
        }
        for (size_t i = whole; i < n; i++) sum[i - whole] += weights[start + i];
        sums[start / SAMPLE_BLOCK] = lanes_sum(&sum);
    }
}

const CpuKernels SIMD_TABLE(cpu_kernels) = {
    .dropout_mask = dropout_mask,
    .add = add,
    .multiply_to = multiply_to,
    .norm_forward = norm_forward,
    .norm_backward = norm_backward,
    .bias_gelu = bias_gelu,
    .gelu_backward = gelu_backward,
    .softmax_loss = softmax_loss,
    .rotate = rotate,
    .sum_of_squares = sum_of_squares,
    .adamw = adamw,
    .largest = largest,
    .sample_weights = sample_weights,
};
