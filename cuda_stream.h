/* cuda_stream.h - what everything on the GPU stands on: the stream with its libraries and scratch memory, the
 * check of every CUDA and cuBLAS return, the angles of rotary positions, the one matrix product, and loads and stores
 * of 16 bytes. Read by model/ops_cuda.cu and the attention backends for the GPU; it lies beside common because both
 * rooms need it.
 *
 * Errors. Operations return nothing, so a CUDA call that fails in one prints a line and ends the process with
 * exit 1. Kernels run later than they are launched: with the environment variable TRAIN_GPT_SYNC=1 the
 * program waits after each one, and the line names the one that failed. */
#ifndef CUDA_STREAM_H
#define CUDA_STREAM_H

#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "common.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { STAGING_SLOTS = 8 };

typedef struct MatmulPlan MatmulPlan;
typedef struct SpanChunk SpanChunk;

/* A GPU, and the order in which things happen on it. */
struct Stream {
    cudaStream_t stream;
    cublasLtHandle_t blas;
    struct cudaDeviceProp device; /* "struct": C wants it */
    size_t shared_bytes;          /* shared memory a block may ask for */
    bool wait_each;               /* TRAIN_GPT_SYNC=1 */

    void *workspace; /* of cuBLASLt */
    MatmulPlan *plans;
    size_t n_plans;
    void *scratch; /* of one operation, see cuda_scratch */
    size_t scratch_bytes;

    /* Copies to the GPU leave from here, so that the caller's memory is free again when upload returns and
     * nothing waits for the GPU, unless all slots are still on their way. */
    struct {
        void *pinned;
        cudaEvent_t sent;
    } slot[STAGING_SLOTS];
    size_t next_slot;

    cudaEvent_t *marks;
    size_t n_marks;

    bool has_recordings; /* of operations (Ops.record_begin): they hold addresses of scratch memory */
    void **outgrown;     /* ... which is kept to the end then */
    size_t n_outgrown;

    void *angles; /* see cuda_angles */
    size_t angle_positions, angle_half;

    /* model/ops_cuda.cu's own: the optimizer's chunks. */
    SpanChunk *chunks;
    size_t n_chunks;
    void *chunk_spans; /* a copy of the spans that they were cut from, and how many */
    size_t n_chunk_spans;
};
typedef struct Stream Stream;

/* GPU `index` of those that are visible, counted round where it is past them. NULL with a reason: no driver, no
 * GPU, one that is too old. */
Stream *cuda_stream_open(int index, Error *err);
void cuda_stream_close(Stream *stream);

/* Prints "train_gpt: GPU: what: reason" and ends the process with exit 1. */
void cuda_fail(const char *what, const char *reason);
#define CUDA_CHECK(call)                                                                   \
    do {                                                                                   \
        const cudaError_t cuda_error_ = (call);                                            \
        if (cuda_error_ != cudaSuccess) cuda_fail(#call, cudaGetErrorString(cuda_error_)); \
    } while (0)
/* Follows each kernel launch. */
void cuda_launched(Stream *stream, const char *kernel);

/* Returns when `host` may be written again; the copy happens in the stream's order. */
void cuda_upload(Stream *stream, void *device, const void *host, size_t bytes);

/* See ops.h. */
void cuda_mark(Stream *stream, size_t index);
double cuda_seconds_between(Stream *stream, size_t from, size_t to);

/* Frees memory of the stream's own that the operations queued so far may use; while there are recordings, when
 * the stream is closed. */
void cuda_release(Stream *stream, void *memory);

/* Memory of the running operation: the next one may use it again. Grows in the first step, then stays. */
void *cuda_scratch(Stream *stream, size_t bytes);

/* Of rotary positions: cos and sin of position * 10000^(-i / half), (positions, half), for at least so many positions
 * and all of the last ANGLE_ROWS that these touch. Made when first asked for. In fp32, and, for bf16 activations, in
 * half the bytes: fp16 errs by 2^-12 at most, bf16's own rounding of what is turned by 2^-8 of it. */
enum { ANGLE_ROWS = 256 };
typedef struct Angles {
    const float2 *full;
    const struct __half2 *half; /* "struct": C wants it */
} Angles;
Angles cuda_angles(Stream *stream, size_t positions, size_t half);

/* ---- the matrix product ---- */
typedef enum MatmulEpilogue {
    MATMUL_PLAIN,
    MATMUL_BIAS,           /* + bias (n) */
    MATMUL_BIAS_GELU,      /* aux = product + bias; c = GELU(aux) */
    MATMUL_BIAS_GELU_ONLY, /* c = GELU(product + bias) */
    MATMUL_GELU_BACKWARD   /* c = product * GELU'(aux) */
} MatmulEpilogue;

/* C = alpha * op(A) op(B) + beta * C, row-major, op(X) = X or its transpose; op(A) is (m, k), op(B) (k, n),
 * C (m, n), lda, ldb, ldc the row strides in elements; sums in fp32 (never TF32). `batch` products whose
 * matrices lie a_step, b_step, c_step elements apart. beta 0 overwrites C, whatever it held. */
typedef struct Matmul {
    bool transpose_a, transpose_b;
    size_t m, n, k;
    float alpha, beta;
    cudaDataType_t in, out; /* of A and B; of C, bias and aux */
    const void *a, *b;
    void *c;
    size_t lda, ldb, ldc;
    size_t batch, a_step, b_step, c_step;
    MatmulEpilogue epilogue;
    const void *bias;
    void *aux; /* laid out like C */
} Matmul;

/* The library's algorithm is its first proposal for the shape, asked for once and kept: the same in every
 * run, which one chosen by timing would not be. False, and nothing done: the library has no such epilogue
 * for this shape (never with MATMUL_PLAIN). */
bool cuda_matmul(Stream *stream, const Matmul *matmul);

#ifdef __cplusplus
}
#endif

/* ---- numbers ---- */
#if defined(__CUDACC__)
typedef __nv_bfloat16 bf16;

template <typename A> struct ActType;
template <> struct ActType<float> { static constexpr cudaDataType_t cuda = CUDA_R_32F; };
template <> struct ActType<bf16> { static constexpr cudaDataType_t cuda = CUDA_R_16BF; };

__device__ inline float to_float(float x) {
    return x;
}
__device__ inline float to_float(bf16 x) {
    return __bfloat162float(x);
}
template <typename A> __device__ inline A from_float(float x);
template <> __device__ inline float from_float<float>(float x) {
    return x;
}
template <> __device__ inline bf16 from_float<bf16>(float x) {
    return __float2bfloat16_rn(x);
}

/* exp to the precision that A deserves: the hardware's for bf16, whose roundings are 2^16 times larger. */
template <typename A> __device__ inline float exp_for(float x) {
    return expf(x);
}
template <> __device__ inline float exp_for<bf16>(float x) {
    return exp2f(x * 1.4426950408889634f);
}

template <int BYTES> struct Bits;
template <> struct Bits<2> { typedef unsigned short type; };
template <> struct Bits<4> { typedef unsigned type; };
template <> struct Bits<8> { typedef uint2 type; };
template <> struct Bits<16> { typedef uint4 type; };
template <> struct Bits<32> {
    struct alignas(16) type {
        uint4 low, high;
    };
};

/* W numbers at once, from an address that is a multiple of their size (16 where they are more). */
template <int W, typename A> __device__ inline void load(float (&x)[W], const A *from) {
    typedef typename Bits<W * sizeof(A)>::type Raw;
    const Raw raw = *reinterpret_cast<const Raw *>(from);
    A values[W];
    memcpy(values, &raw, sizeof raw);
#pragma unroll
    for (int i = 0; i < W; i++) x[i] = to_float(values[i]);
}
template <int W, typename A> __device__ inline void store(A *to, const float (&x)[W]) {
    typedef typename Bits<W * sizeof(A)>::type Raw;
    A values[W];
#pragma unroll
    for (int i = 0; i < W; i++) values[i] = from_float<A>(x[i]);
    Raw raw;
    memcpy(&raw, values, sizeof raw);
    *reinterpret_cast<Raw *>(to) = raw;
}

/* W pairs' angles for activations of type A, from element `at` of the table on. */
template <int W>
__device__ inline void unpack_angles(float (&cosine)[W], float (&sine)[W], const __half2 (&angles)[W]) {
#pragma unroll
    for (int i = 0; i < W; i++) cosine[i] = __low2float(angles[i]), sine[i] = __high2float(angles[i]);
}
template <typename A, int W>
__device__ inline void load_angles(float (&cosine)[W], float (&sine)[W], const Angles &angles, size_t at) {
    if (sizeof(A) == sizeof(float)) {
#pragma unroll
        for (int i = 0; i < W; i++) cosine[i] = angles.full[at + i].x, sine[i] = angles.full[at + i].y;
    } else {
        typedef typename Bits<W * sizeof(__half2)>::type Raw;
        const Raw raw = *reinterpret_cast<const Raw *>(angles.half + at);
        __half2 packed[W];
        memcpy(packed, &raw, sizeof raw);
        unpack_angles(cosine, sine, packed);
    }
}

/* Turns W pairs by their angles; sign -1: back. Written in the operations that are meant, so that it rounds alike
 * wherever it stands. */
template <int W>
__device__ inline void rotate(float (&low)[W], float (&high)[W], const float (&cosine)[W],
                              const float (&sine)[W], float sign) {
#pragma unroll
    for (int i = 0; i < W; i++) {
        const float a = low[i], b = high[i], s = sign * sine[i];
        low[i] = fmaf(a, cosine[i], -(b * s));
        high[i] = fmaf(b, cosine[i], a * s);
    }
}

/* How many activations fit into 16 bytes. */
template <typename A> constexpr int wide = 16 / (int)sizeof(A);

/* Over the 32 lanes of a warp; every lane gets the same bits. */
__device__ inline float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}
__device__ inline float warp_max(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}
#endif

#endif
