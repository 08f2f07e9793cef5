/* reference_attention.h - causal self-attention and its gradients, plainly, for one head: in float64 the reference, in
 * fp32 and bf16 what these precisions cost (inputs of products, S, P, dP and dS rounded, sums in fp32); and the two
 * small terms of attention.h's rule. Shares no code with the program. */
#ifndef REFERENCE_ATTENTION_H
#define REFERENCE_ATTENTION_H

#include "reference_bf16.h"

#include "../common.h"

#include <stdlib.h>

enum { OUT, DQ, DK, DV, RESULTS };
static const char *const result_names[RESULTS] = {"out", "dq", "dk", "dv"};

/* q, k, v, d_out and all results (T, D), lse (T). The sums over channels go up or down, delta's the other way than
 * dP's: the maximum error over a small tensor is often one row's luck, so the rule takes that of both orders (and for
 * the first token dP - delta is all rounding, which one order would cancel). */
#define DEFINE_PLAIN(name, real, ROUND)                                                                      \
    static inline void name(bool down, size_t T, size_t D, const float *q, const float *k, const float *v,   \
                            const float *d_out, real *const result[RESULTS], real *lse) {                    \
        const real scale = (real)(1 / sqrt((double)D));                                                      \
        real *out = result[OUT], *dq = result[DQ], *dk = result[DK], *dv = result[DV];                       \
        real *p = xmalloc(2 * T * sizeof *p), *dp = p + T;                                                   \
        for (size_t i = 0; i < T * D; i++) out[i] = dq[i] = dk[i] = dv[i] = 0;                               \
        for (size_t i = 0; i < T; i++) {                                                                     \
            real max = -INFINITY, sum = 0, delta = 0;                                                        \
            for (size_t j = 0; j <= i; j++) {                                                                \
                real s = 0, d_p = 0;                                                                         \
                for (size_t n = 0; n < D; n++) {                                                             \
                    const size_t d = down ? D - 1 - n : n;                                                   \
                    s += (real)q[i * D + d] * (real)k[j * D + d];                                            \
                    d_p += (real)d_out[i * D + d] * (real)v[j * D + d];                                      \
                }                                                                                            \
                p[j] = ROUND(s * scale), dp[j] = ROUND(d_p);                                                 \
                max = p[j] > max ? p[j] : max;                                                               \
            }                                                                                                \
            for (size_t j = 0; j <= i; j++) sum += p[j] = (real)exp((double)(p[j] - max));                   \
            lse[i] = max + (real)log((double)sum);                                                           \
            for (size_t j = 0; j <= i; j++) {                                                                \
                p[j] = ROUND(p[j] / sum);                                                                    \
                for (size_t d = 0; d < D; d++) out[i * D + d] += p[j] * (real)v[j * D + d];                  \
            }                                                                                                \
            for (size_t d = 0; d < D; d++) out[i * D + d] = ROUND(out[i * D + d]);                           \
            for (size_t n = 0; n < D; n++) {                                                                 \
                const size_t d = down ? n : D - 1 - n;                                                       \
                delta += (real)d_out[i * D + d] * out[i * D + d];                                            \
            }                                                                                                \
            for (size_t j = 0; j <= i; j++) {                                                                \
                const real ds = ROUND(p[j] * (dp[j] - delta));                                               \
                for (size_t d = 0; d < D; d++) {                                                             \
                    dv[j * D + d] += p[j] * (real)d_out[i * D + d];                                          \
                    dk[j * D + d] += scale * ds * (real)q[i * D + d];                                        \
                    dq[i * D + d] += scale * ds * (real)k[j * D + d];                                        \
                }                                                                                            \
            }                                                                                                \
        }                                                                                                    \
        for (size_t i = 0; i < T * D; i++) dq[i] = ROUND(dq[i]), dk[i] = ROUND(dk[i]), dv[i] = ROUND(dv[i]); \
        free(p);                                                                                             \
    }
#define AS_IT_IS(x) (x)
DEFINE_PLAIN(plain_double, double, AS_IT_IS)
DEFINE_PLAIN(plain_float, float, AS_IT_IS)
DEFINE_PLAIN(plain_bf16, float, bf16_rounded)

/* What a precision loses where ref is shifted by 0.3 and back. */
static inline double shift_loss(double ref, bool half) {
    volatile float shifted = (float)ref + 0.3f;
    if (half) shifted = bf16_rounded(shifted);
    shifted = shifted - 0.3f;
    if (half) shifted = bf16_rounded(shifted);
    return fabs((double)shifted - ref);
}

static inline double last_place(double x) { /* in fp32 */
    const float magnitude = fabsf((float)x);
    return (double)(nextafterf(magnitude, INFINITY) - magnitude);
}
/* That of the largest number that lse of row t is made of: lse itself, as a rule, and where the scores may cancel
 * (`cancels`: large inputs) the row's largest sum of |q k|, times scale. */
static inline double lse_last_place(double lse, size_t t, size_t D, const float *q, const float *k,
                                    bool cancels) {
    double largest = fabs(lse);
    for (size_t j = 0; cancels && j <= t; j++) {
        double sum = 0;
        for (size_t d = 0; d < D; d++) sum += fabs((double)q[t * D + d] * (double)k[j * D + d]);
        largest = fmax(largest, sum / sqrt((double)D));
    }
    return last_place(largest);
}

#endif
