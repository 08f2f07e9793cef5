/* simd_math.h - e^x and tanh for float, written so that a plain loop over an array is turned into vector
 * instructions: no branch, no call, no table, no errno.
 *
 *     for (size_t i = 0; i < n; i++) y[i] = simd_expf(x[i] - max);      (at -O3, without -ffast-math)
 *
 * Meant for the *_simd.c files, which are compiled once for each level; usable everywhere. The same code
 * gives the same bits at every level that has fused multiply-add; plain SSE2, which has none, differs in the
 * last place. The errors below, in units in the last place of the true value, were measured over every 37th
 * float, with and without it; tests/test_attention.c holds them for the flags that the tests are built
 * with. */
#ifndef SIMD_MATH_H
#define SIMD_MATH_H

#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

/* a * b + c, fused where that is one instruction (elsewhere fmaf would be a slow call). */
static inline float simd_fmaf(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

static inline float simd_float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t simd_bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* bits where the mask is all ones, 0 where it is 0; comparisons as integers, since compilers turn ?: on
 * floats into branches that keep a loop from being vectorised. */
static inline uint32_t simd_mask(int condition) {
    return 0u - (uint32_t)condition;
}

/* Splits x = n ln 2 + r with |r| <= ln(2) / 2. Returns r; *half_power = 2^(n-1), the largest power that
 * n = 128 still needs and a float still has; *q so that 2 (e^r - 1) = r (2 + r q).
 * n: adding 1.5 * 2^23 leaves x / ln 2, rounded to an integer, in the low bits of the sum. ln 2 is taken in
 * two parts, the first of 16 bits, so that n times it is exact without fused multiply-add too. q is a
 * polynomial of degree 4 in r, minimax for the error relative to e^r, which is 2^-28.2 (Lawson's weights, in
 * 40 digits). */
static inline float simd_exp_split(float x, float *half_power, float *q) {
    const float shift = 12582912.0f;
    const float shifted = simd_fmaf(x, 1.44269504f, shift);
    const float n = shifted - shift;
    const float r = simd_fmaf(n, -1.42860682e-6f, simd_fmaf(n, -0.693145752f, x));
    *half_power = simd_float_of_bits((simd_bits_of_float(shifted) - simd_bits_of_float(shift) + 126u) << 23);
    float p = 0.00276291965f;
    p = simd_fmaf(p, r, 0.0167374338f);
    p = simd_fmaf(p, r, 0.0833367761f);
    p = simd_fmaf(p, r, 0.333330413f);
    *q = simd_fmaf(p, r, 0.999999869f);
    return r;
}

/* e^x, error below 0.9 ulp (1.2 without fused multiply-add). Results below 2^-125 are 0, so that no subnormal
 * number slows a loop down; above the largest float infinity; NaN gives NaN. */
static inline float simd_expf(float x) {
    float half_power, q;
    const float r = simd_exp_split(x, &half_power, &q);
    const uint32_t y = simd_bits_of_float(simd_fmaf(r, simd_fmaf(r, q, 2.0f), 2.0f) * half_power);
    const uint32_t under = simd_mask(x < -86.6433945f); /* -125 ln 2 */
    const uint32_t over = simd_mask(x > 88.7228317f);
    return simd_float_of_bits((y & ~(under | over)) | (0x7f800000u & over));
}

/* tanh x, error below 2.8 ulp, the sign of zero kept; NaN gives NaN. With E = e^(2|x|) - 1, which the split
 * gives without cancellation: tanh |x| = E / (E + 2). From 10 on tanh is 1 to the last place. */
static inline float simd_tanhf(float x) {
    const uint32_t sign = simd_bits_of_float(x) & 0x80000000u, magnitude = simd_bits_of_float(x) ^ sign;
    const uint32_t large = simd_mask(magnitude > 0x41200000u && magnitude <= 0x7f800000u);
    const float twice = 2.0f * simd_float_of_bits((magnitude & ~large) | (0x41200000u & large));
    float half_power, q;
    const float r = simd_exp_split(twice, &half_power, &q);
    const float e = simd_fmaf(simd_fmaf(r * q, r, 2.0f * r), half_power, 2.0f * half_power - 1.0f);
    return simd_float_of_bits(simd_bits_of_float(e / (e + 2.0f)) | sign);
}

#ifdef __cplusplus
}
#endif
#endif
