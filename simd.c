/* simd.c - see simd.h. */
#include "simd.h"

#include <stdlib.h>
#include <string.h>

static SimdLevel machine_level(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    /* x86-64-v4 and -v3 as the compiler's -march means them; older compilers do not know those names here. */
    const int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                     __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
    const int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                       __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                       __builtin_cpu_supports("avx512vl");
    return avx512 ? SIMD_AVX512 : avx2 ? SIMD_AVX2 : SIMD_PLAIN;
#else
    return SIMD_PLAIN;
#endif
}

static int chosen = -1;
static const char *note;

SimdLevel simd_level(void) {
    if (chosen < 0) {
        const SimdLevel best = machine_level();
        SimdLevel level = best;
        const char *wanted = getenv("TRAIN_GPT_SIMD");
        if (wanted && *wanted) {
            if (strcmp(wanted, "plain") == 0) level = SIMD_PLAIN;
            else if (strcmp(wanted, "avx2") == 0) level = SIMD_AVX2;
            else if (strcmp(wanted, "avx512") == 0) level = SIMD_AVX512;
            else note = "expected plain, avx2 or avx512";
        }
        if (level > best) note = "this machine lacks it", level = best;
        chosen = (int)level;
    }
    return (SimdLevel)chosen;
}

const char *simd_note(void) {
    simd_level();
    return note;
}

int simd_force(SimdLevel level) {
    if (level > machine_level()) return 0;
    chosen = (int)level;
    return 1;
}

const char *simd_name(SimdLevel level) {
    return level == SIMD_AVX512 ? "AVX-512" : level == SIMD_AVX2 ? "AVX2" : "plain";
}
