/* reference_random.h - the tests' own random numbers and dropout masks, written from the definitions and
 * sharing no code with the program: Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2,
 * 3", SC 2011, section 3.2), splitmix64's finaliser, and the rule of which elements dropout keeps. Also the
 * unit roundoff that every bound of these tests is a multiple of. */
#ifndef REFERENCE_RANDOM_H
#define REFERENCE_RANDOM_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define UNIT_ROUNDOFF 0x1p-24 /* of fp32, round to nearest: |fl(x) - x| <= u |x| */

/* Ten rounds on the counter x (four words): each multiplies words 0 and 2, and crosses the halves of the
 * products over with words 1 and 3 and the key, which grows by a Weyl constant from round to round. */
static inline void reference_philox(uint32_t x[4], uint32_t key_0, uint32_t key_1) {
    for (int round = 0; round < 10; round++) {
        const uint64_t product_0 = UINT64_C(0xD2511F53) * x[0];
        const uint64_t product_1 = UINT64_C(0xCD9E8D57) * x[2];
        const uint32_t old_1 = x[1], old_3 = x[3];
        x[0] = (uint32_t)(product_1 >> 32) ^ old_1 ^ key_0;
        x[1] = (uint32_t)product_1;
        x[2] = (uint32_t)(product_0 >> 32) ^ old_3 ^ key_1;
        x[3] = (uint32_t)product_0;
        key_0 += UINT32_C(0x9E3779B9);
        key_1 += UINT32_C(0xBB67AE85);
    }
}

/* splitmix64 started at a, its (b + 1)th output. */
static inline uint64_t reference_mix(uint64_t a, uint64_t b) {
    uint64_t z = a + (b + 1) * UINT64_C(0x9E3779B97F4A7C15);
    z ^= z >> 30;
    z *= UINT64_C(0xBF58476D1CE4E5B9);
    z ^= z >> 27;
    z *= UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

/* Whether dropout keeps element (row, c) of a (rows, C) tensor; row counts from the step's first token. */
static inline bool reference_keeps(double rate, uint64_t seed, uint32_t site, uint64_t step, uint64_t row,
                                   size_t C, size_t c) {
    if (rate == 0) return true;
    const uint64_t key = reference_mix(seed, site);
    const uint64_t counter = row * ((C + 3) / 4) + c / 4;
    uint32_t x[4] = {(uint32_t)counter, (uint32_t)(counter >> 32), (uint32_t)step, (uint32_t)(step >> 32)};
    reference_philox(x, (uint32_t)key, (uint32_t)(key >> 32));
    return (double)x[c % 4] >= rate * 0x1p32;
}

/* Test data: number `index` of stream `stream`, uniform in (0, 1), and normal (Box and Muller). */
static inline double reference_uniform(uint64_t stream, uint64_t index) {
    uint32_t x[4] = {(uint32_t)index, (uint32_t)(index >> 32), 0, 0};
    reference_philox(x, (uint32_t)stream, (uint32_t)(stream >> 32));
    return ((double)x[0] + 0.5) * 0x1p-32;
}
static inline double reference_normal(uint64_t stream, uint64_t index) {
    const double radius = sqrt(-2 * log(reference_uniform(stream, 2 * index)));
    return radius * cos(6.283185307179586 * reference_uniform(stream, 2 * index + 1));
}

#endif
