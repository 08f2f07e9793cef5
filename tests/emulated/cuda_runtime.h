/* cuda_runtime.h - in the place of CUDA's, and of attention/mma.h: what a kernel that is written with these needs, as
 * plain C++ upon emulated.h. The names that the program has for a real GPU get others, so that both can be in one
 * program. */
#ifndef EMULATED_CUDA_RUNTIME_H
#define EMULATED_CUDA_RUNTIME_H
#define MMA_H /* attention/mma.h is not read */

#include "emulated.h"

#include <math.h>
#include <string.h>

#define cuda_fail emulated_fail
#define cuda_angles emulated_angles

/* ---- the types that cuda_stream.h names ---- */
typedef void *cudaStream_t;
typedef void *cudaEvent_t;
typedef void *cublasLtHandle_t;
typedef int cudaDataType_t;
enum { CUDA_R_32F, CUDA_R_16BF };
struct cudaDeviceProp {
    int l2CacheSize;
};
typedef struct __nv_bfloat16 {
    uint16_t bits;
} __nv_bfloat16;
struct __half2 {
    uint16_t x, y; /* bits */
};
typedef struct float2 {
    float x, y;
} float2;

#ifdef __cplusplus
#include "../reference_bf16.h"

#include <type_traits>

/* ---- the language ---- */
#define __host__
#define __device__
#define __global__
#define __noinline__
#define __shared__ static /* blocks run one after the other */
#define __launch_bounds__(...)
#define threadIdx emulated_thread
#define blockIdx emulated_block

struct uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
    return {x, y, z, w};
}
static inline int min(int a, int b) {
    return a < b ? a : b;
}
static inline unsigned min(unsigned a, unsigned b) {
    return a < b ? a : b;
}

static inline float __bfloat162float(__nv_bfloat16 x) {
    return bf16_value(x.bits);
}
static inline __nv_bfloat16 __float2bfloat16_rn(float x) {
    return {bf16_bits(x)};
}
static inline float __low2float(__half2 x) {
    return half_value(x.x);
}
static inline float __high2float(__half2 x) {
    return half_value(x.y);
}
static inline float atomicAdd(float *sum, float x) {
    const float before = *sum;
    *sum += x;
    return before;
}

/* ---- threads together ---- */
/* What a warp does at once is most of the time, and no code of the kernels, which sanitizers are to watch. */
#define UNWATCHED __attribute__((no_sanitize("address", "undefined")))

static inline void __syncthreads() {
    emulated_barrier();
}
UNWATCHED static inline void warp_does_nothing(void *const[LANES]) {
}
static inline void __syncwarp() {
    emulated_meet(warp_does_nothing, NULL);
}
struct Shuffle {
    float x;
    unsigned with;
};
UNWATCHED static inline void warp_shuffles(void *const all[LANES]) {
    float x[LANES];
    for (unsigned i = 0; i < LANES; i++) x[i] = ((Shuffle *)all[i])->x;
    for (unsigned i = 0; i < LANES; i++) ((Shuffle *)all[i])->x = x[i ^ ((Shuffle *)all[i])->with];
}
static inline float __shfl_xor_sync(unsigned, float x, unsigned with) {
    Shuffle mine = {x, with};
    emulated_meet(warp_shuffles, &mine);
    return mine.x;
}
UNWATCHED static inline void warp_has_any(void *const all[LANES]) {
    bool any = false;
    for (unsigned i = 0; i < LANES; i++) any = any || *(bool *)all[i];
    for (unsigned i = 0; i < LANES; i++) *(bool *)all[i] = any;
}
static inline bool __any_sync(unsigned, bool mine) {
    emulated_meet(warp_has_any, &mine);
    return mine;
}

/* ---- attention/mma.h ---- */
static inline unsigned shared_start() {
    return emulated_shared_start();
}
static inline void copy_async(unsigned to, const void *from, bool there) {
    emulated_copy(to, there ? from : NULL);
}
static inline void wait_for_copies() {
    emulated_wait();
}

struct Matrices {
    unsigned at, x[4];
};
/* Row l of matrix i is at lane 8 i + l's address. */
template <bool TRANSPOSED> UNWATCHED static inline void warp_loads(void *const all[LANES]) {
    for (unsigned i = 0; i < 4; i++) {
        uint16_t matrix[8][8];
        for (unsigned l = 0; l < 8; l++)
            memcpy(matrix[l], emulated_shared(((Matrices *)all[8 * i + l])->at, 16), 16);
        for (unsigned lane = 0; lane < LANES; lane++) {
            const unsigned g = lane / 4, q = lane % 4 * 2;
            const uint16_t low = TRANSPOSED ? matrix[q][g] : matrix[g][q];
            const uint16_t high = TRANSPOSED ? matrix[q + 1][g] : matrix[g][q + 1];
            ((Matrices *)all[lane])->x[i] = low | (unsigned)high << 16;
        }
    }
}
template <bool TRANSPOSED> static inline void load_four(unsigned (&x)[4], unsigned at) {
    Matrices mine = {at, {}};
    emulated_meet(warp_loads<TRANSPOSED>, &mine);
    memcpy(x, mine.x, sizeof x);
}
static inline void load_matrices(unsigned (&x)[4], unsigned at) {
    load_four<false>(x, at);
}
static inline void load_transposed(unsigned (&x)[4], unsigned at) {
    load_four<true>(x, at);
}

struct Product {
    float *c;
    const unsigned *a;
    unsigned b[2];
};
UNWATCHED static inline float upper_half(unsigned bits) {
    float x;
    bits &= 0xffff0000u;
    memcpy(&x, &bits, sizeof x);
    return x;
}
UNWATCHED static inline void warp_multiplies(void *const all[LANES]) {
    float a[16][16], b[16][8], c[16][8];
    for (unsigned lane = 0; lane < LANES; lane++) {
        const Product *mine = (Product *)all[lane];
        const unsigned g = lane / 4, q = lane % 4 * 2;
        for (unsigned e = 0; e < 2; e++) { /* the lower index, the higher one */
            for (unsigned r = 0; r < 4; r++)
                a[g + r % 2 * 8][q + r / 2 * 8 + e] = upper_half(mine->a[r] << (16 - 16 * e));
            for (unsigned r = 0; r < 2; r++) {
                b[q + r * 8 + e][g] = upper_half(mine->b[r] << (16 - 16 * e));
                c[g + r * 8][q + e] = mine->c[2 * r + e];
            }
        }
    }
    for (unsigned i = 0; i < 16; i++)
        for (unsigned k = 0; k < 16; k++)
            for (unsigned j = 0; j < 8; j++) c[i][j] += a[i][k] * b[k][j];
    for (unsigned lane = 0; lane < LANES; lane++)
        for (unsigned e = 0; e < 4; e++)
            ((Product *)all[lane])->c[e] = c[lane / 4 + e / 2 * 8][lane % 4 * 2 + e % 2];
}
static inline void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    Product mine = {c, a, {b0, b1}};
    emulated_meet(warp_multiplies, &mine);
}

static inline unsigned pack(float low, float high) {
    return bf16_bits(low) | (unsigned)bf16_bits(high) << 16;
}
static inline float exp_2(float x) {
    const float y = exp2f(x);
    return y < 0x1p-126f ? 0 : y; /* .ftz; NaN stays */
}
static inline void store_shared(unsigned at, unsigned x) {
    memcpy(emulated_shared(at, sizeof x), &x, sizeof x);
}
static inline void store_shared(unsigned at, uint4 x) {
    memcpy(emulated_shared(at, sizeof x), &x, sizeof x);
}
static inline uint4 load_shared(unsigned at) {
    uint4 x;
    memcpy(&x, emulated_shared(at, sizeof x), sizeof x);
    return x;
}
static inline float2 load_shared_pair(unsigned at) {
    float2 x;
    memcpy(&x, emulated_shared(at, sizeof x), sizeof x);
    return x;
}
static inline void add_four(float *sums, const float (&x)[4]) {
    for (int i = 0; i < 4; i++) sums[i] += x[i];
}

template <typename J> struct Launch {
    void (*kernel)(J);
    const J *job;
};
template <typename J> static void run_kernel(const void *launch) {
    ((const Launch<J> *)launch)->kernel(*((const Launch<J> *)launch)->job);
}
template <typename S, typename J>
static void launch(S *, const char *name, void (*kernel)(J), size_t blocks, int threads, size_t shared,
                   const J &job) {
    const Launch<J> all = {kernel, &job};
    emulated_launch(name, run_kernel<J>, &all, blocks, (unsigned)threads, shared);
}
#endif

#endif
