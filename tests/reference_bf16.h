/* reference_bf16.h - bf16 on the host: bits and values, rounded to nearest, ties to even. */
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

#endif
