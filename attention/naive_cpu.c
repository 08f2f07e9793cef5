/* naive_cpu.c - attention as the paper writes it (Vaswani et al. 2017, equation 1), on a CPU: the table
 * P (T, T) of every head is computed whole with the matrix product of sgemm.h, and kept for the backward
 * pass. The plain yardstick that flash_cpu.c is held against, in results and in speed; so it is written to be
 * fast where that costs no clarity.
 *
 * Where there are at least as many heads as threads, each thread takes heads of its own and sgemm runs on
 * it alone; else the heads come one after the other and sgemm uses the whole team. */
#include "cpu.h"

#include "../sgemm.h"
#include "../simd_math.h"

#include <math.h>
#include <string.h>

static bool heads_in_parallel(size_t B, size_t H) {
    return B * H >= max_threads();
}

/* Bytes of `count` (T, T) tables. */
static size_t table_bytes(size_t count, size_t T) {
    size_t bytes;
    if (!size_mul(T, T, &bytes) || !size_mul(bytes, count, &bytes) || !size_mul(bytes, sizeof(float), &bytes))
        return SIZE_MAX;
    return bytes;
}

static bool naive_can_run(const AttentionShape *shape, Error *reason) {
    (void)shape, (void)reason;
    return true;
}

static size_t naive_saved_bytes(const AttentionShape *shape) {
    size_t heads;
    if (!shape->training) return 0;
    return size_mul(shape->B, shape->H, &heads) ? table_bytes(heads, shape->T) : SIZE_MAX;
}

/* One table for each head in work: S and P without training, dP and dS in the backward pass. */
static size_t naive_scratch_bytes(const AttentionShape *shape) {
    return table_bytes(heads_in_parallel(shape->B, shape->H) ? max_threads() : 1, shape->T);
}

/* Sums and maxima are taken in this many interleaved strands, joined at the end: a fixed order that the
 * compiler can turn into vectors. */
enum { STRANDS = 16 };

static float dot(const float *x, const float *y, size_t n) {
    float strand[STRANDS] = {0}, sum = 0.0f;
    size_t i = 0;
    for (; i + STRANDS <= n; i += STRANDS) {
        for (size_t s = 0; s < STRANDS; s++) strand[s] += x[i + s] * y[i + s];
    }
    for (; i < n; i++) sum += x[i] * y[i];
    for (size_t s = 0; s < STRANDS; s++) sum += strand[s];
    return sum;
}

static float row_max(const float *row, size_t n) {
    float strand[STRANDS], max = -INFINITY;
    for (size_t s = 0; s < STRANDS; s++) strand[s] = -INFINITY;
    size_t i = 0;
    for (; i + STRANDS <= n; i += STRANDS) {
        for (size_t s = 0; s < STRANDS; s++) strand[s] = row[i + s] > strand[s] ? row[i + s] : strand[s];
    }
    for (; i < n; i++) max = row[i] > max ? row[i] : max;
    for (size_t s = 0; s < STRANDS; s++) max = strand[s] > max ? strand[s] : max;
    return max;
}

static float row_sum(const float *row, size_t n) {
    float strand[STRANDS] = {0}, sum = 0.0f;
    size_t i = 0;
    for (; i + STRANDS <= n; i += STRANDS) {
        for (size_t s = 0; s < STRANDS; s++) strand[s] += row[i + s];
    }
    for (; i < n; i++) sum += row[i];
    for (size_t s = 0; s < STRANDS; s++) sum += strand[s];
    return sum;
}

/* Row i of S becomes row i of P: softmax over columns 0 .. i, zeros after them. Returns the row's lse. */
static float softmax_row(float *row, size_t i, size_t T) {
    const float max = row_max(row, i + 1);
    for (size_t j = 0; j <= i; j++) row[j] = simd_expf(row[j] - max);
    const float sum = row_sum(row, i + 1), inverse = 1.0f / sum;
    for (size_t j = 0; j <= i; j++) row[j] *= inverse;
    memset(row + i + 1, 0, (T - i - 1) * sizeof *row);
    return max + logf(sum);
}

static void naive_forward(const AttentionCall *call) {
    const size_t B = call->B, T = call->T, H = call->H, D = call->D;
    const size_t qkv_stride = 3 * H * D, out_stride = H * D; /* from token to token */

#pragma omp parallel for schedule(static) if (heads_in_parallel(B, H))
    for (size_t bh = 0; bh < B * H; bh++) {
        const size_t b = bh / H, h = bh % H;
        const float *q = (const float *)call->qkv + b * T * qkv_stride + h * D; /* (T, D) */
        const float *k = q + H * D, *v = k + H * D;                             /* (T, D) */
        float *out = (float *)call->out + b * T * out_stride + h * D;           /* (T, D) */
        float *p = call->training ? (float *)call->saved + bh * T * T           /* (T, T) */
                                  : (float *)call->scratch + this_thread() * T * T;
        float *lse = call->lse + bh * T; /* (T) */

        /* S = scale * Q K^T */
        sgemm(false, true, T, T, D, call->scale, q, qkv_stride, k, qkv_stride, 0.0f, p, T);
        /* P = softmax(S) */
#pragma omp parallel for schedule(static, 16)
        for (size_t i = 0; i < T; i++) lse[i] = softmax_row(p + i * T, i, T);
        /* O = P V */
        sgemm(false, false, T, D, T, 1.0f, p, T, v, qkv_stride, 0.0f, out, out_stride);
    }
}

static void naive_backward(const AttentionCall *call) {
    const size_t B = call->B, T = call->T, H = call->H, D = call->D;
    const size_t qkv_stride = 3 * H * D, out_stride = H * D;

#pragma omp parallel for schedule(static) if (heads_in_parallel(B, H))
    for (size_t bh = 0; bh < B * H; bh++) {
        const size_t b = bh / H, h = bh % H;
        const float *q = (const float *)call->qkv + b * T * qkv_stride + h * D;
        const float *k = q + H * D, *v = k + H * D;
        const float *d_out = (const float *)call->d_out + b * T * out_stride + h * D;
        float *dq = (float *)call->d_qkv + b * T * qkv_stride + h * D;
        float *dk = dq + H * D, *dv = dk + H * D;
        const float *p = (const float *)call->saved + bh * T * T;
        float *ds = (float *)call->scratch + this_thread() * T * T;

        /* dV = P^T dO */
        sgemm(true, false, T, D, T, 1.0f, p, T, d_out, out_stride, 0.0f, dv, qkv_stride);
        /* dP = dO V^T */
        sgemm(false, true, T, T, D, 1.0f, d_out, out_stride, v, qkv_stride, 0.0f, ds, T);
        /* dS = P * (dP - delta), delta = rowsum(P * dP), which is rowsum(dO * O); 0 above the diagonal,
         * whatever dP is there */
#pragma omp parallel for schedule(static, 16)
        for (size_t i = 0; i < T; i++) {
            const float *p_row = p + i * T;
            float *ds_row = ds + i * T;
            const float delta = dot(p_row, ds_row, i + 1);
            for (size_t j = 0; j <= i; j++) ds_row[j] = p_row[j] * (ds_row[j] - delta);
            memset(ds_row + i + 1, 0, (T - i - 1) * sizeof *ds_row);
        }
        /* dQ = scale * dS K;  dK = scale * dS^T Q */
        sgemm(false, false, T, D, T, call->scale, ds, T, k, qkv_stride, 0.0f, dq, qkv_stride);
        sgemm(true, false, T, D, T, call->scale, ds, T, q, qkv_stride, 0.0f, dk, qkv_stride);
    }
}

/* There is no room for a row of the table here, so each score is computed twice: once for the maximum, once
 * for its weight. */
static void naive_cached(const AttentionCall *call) {
    const size_t B = call->B, T = call->T, H = call->H, D = call->D;
    const size_t kv_stride = 2 * H * D;

    append_to_cache(call);
#pragma omp parallel for schedule(static)
    for (size_t bth = 0; bth < B * T * H; bth++) {
        const size_t bt = bth / H, h = bth % H, b = bt / T, last = call->offset + bt % T;
        const float *q = (const float *)call->qkv + bt * 3 * H * D + h * D;
        const float *k = (const float *)call->kv_cache + b * call->cache_length * kv_stride + h * D;
        const float *v = k + H * D;
        float *out = (float *)call->out + bth * D;
        float max = -INFINITY, sum = 0.0f;
        for (size_t j = 0; j <= last; j++) max = fmaxf(max, call->scale * dot(q, k + j * kv_stride, D));
        for (size_t d = 0; d < D; d++) out[d] = 0.0f;
        for (size_t j = 0; j <= last; j++) {
            const float weight = simd_expf(call->scale * dot(q, k + j * kv_stride, D) - max);
            sum += weight;
            for (size_t d = 0; d < D; d++) out[d] += weight * v[j * kv_stride + d];
        }
        for (size_t d = 0; d < D; d++) out[d] /= sum;
    }
}

extern const Attention attention_naive_cpu;
const Attention attention_naive_cpu = {
    .name = "naive",
    .device = "cpu",
    .about = "the paper's T x T table, kept for the backward pass",
    .can_run = naive_can_run,
    .saved_bytes = naive_saved_bytes,
    .scratch_bytes = naive_scratch_bytes,
    .forward = naive_forward,
    .backward = naive_backward,
    .cached = naive_cached,
};
