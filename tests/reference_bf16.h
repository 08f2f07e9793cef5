/* reference_bf16.h - bf16 and fp16 on the host: bits and values, rounded to nearest, ties to even. */
#ifndef REFERENCE_BF16_H
#define REFERENCE_BF16_H

#include <math.h>
#include <stdint.h>
#include <string.h>

static inline uint16_t bf16_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (isnan(x)) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static inline float bf16_value(uint16_t half) {
    const uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
static inline float bf16_rounded(float x) {
    return bf16_value(bf16_bits(x));
}

/* fp16 of numbers up to 65,504 in magnitude: a multiple of 2^-24, or of 2^-10 of the power of two below it. */
static inline uint16_t half_bits(float x) {
    int exponent = 0;
    const float magnitude = fabsf(x);
    frexpf(magnitude, &exponent);             /* magnitude < 2^exponent */
    if (magnitude < 0x1p-14f) exponent = -13; /* also of zero, which has none */
    const unsigned units = (unsigned)lrintf(
        ldexpf(magnitude, 11 - exponent)); /* 1024 to 2048, less near zero */
    return (uint16_t)((signbit(x) ? 0x8000u : 0) + ((unsigned)(exponent + 13) << 10) + units);
}
static inline float half_value(uint16_t half) {
    const int exponent = half >> 10 & 31, units = half & 1023;
    const float magnitude = exponent == 0 ? ldexpf((float)units, -24)
                                          : ldexpf((float)(units + 1024), exponent - 25);
    return half & 0x8000 ? -magnitude : magnitude;
}

#endif
