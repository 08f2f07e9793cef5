/* cpu.h - what both CPU backends need: the OpenMP team (which is one thread in a build without OpenMP), and
 * the cache of generation. */
#ifndef ATTENTION_CPU_H
#define ATTENTION_CPU_H

#include "attention.h"

#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

static inline size_t max_threads(void) {
#ifdef _OPENMP
    return (size_t)omp_get_max_threads();
#else
    return 1;
#endif
}

static inline size_t this_thread(void) {
#ifdef _OPENMP
    return (size_t)omp_get_thread_num();
#else
    return 0;
#endif
}

/* Keys and values of the new tokens to their places in kv_cache: (2, H, D) each, as they lie in qkv. */
static inline void append_to_cache(const AttentionCall *call) {
    const size_t T = call->T, size = 2 * call->H * call->D;
    for (size_t bt = 0; bt < call->B * T; bt++) {
        const size_t slot = bt / T * call->cache_length + call->offset + bt % T;
        const float *token = (const float *)call->qkv + bt * 3 * call->H * call->D;
        memcpy((float *)call->kv_cache + slot * size, token + call->H * call->D, size * sizeof(float));
    }
}

#endif
