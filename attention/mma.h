/* mma.h - what attention/flash_cuda.cu asks of the GPU itself: the instructions of compute capability 8.0 that
 * CUDA has no functions for, as functions, and the launch of a kernel. tests/emulated/cuda_runtime.h has the same
 * ones for a CPU, so that kernels that are written with these are tested where there is no GPU. */
#ifndef MMA_H
#define MMA_H

#include "../cuda_stream.h"

#if defined(__CUDACC__)
/* Shared memory is addressed by its own 32-bit addresses, as these instructions want them. */
__device__ static inline unsigned shared_start() {
    extern __shared__ __align__(128) unsigned char memory[];
    return (unsigned)__cvta_generic_to_shared(memory);
}

/* 16 bytes from global memory, later; zeros, and nothing read whatever the address, where not `there`. */
__device__ static inline void copy_async(unsigned to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0)
                 : "memory");
}
/* Until this thread's copies have arrived; a barrier must follow before others read them. */
__device__ static inline void wait_for_copies() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}

/* Four 8 x 8 matrices of bf16; lane l gives the address of row l % 8 of matrix l / 8, and gets of each
 * matrix, row l / 4, columns 2 (l % 4) and the next. Transposed: column l / 4, rows 2 (l % 4) and the next. */
__device__ static inline void load_matrices(unsigned (&x)[4], unsigned at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at));
}
__device__ static inline void load_transposed(unsigned (&x)[4], unsigned at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at));
}

/* C (16, 8) += A (16, 16) B (16, 8). With g = lane / 4, q = lane % 4, a register of two bf16 holds the lower
 * index in its low half:
 *     a[0] row g, k 2q, 2q + 1    a[1] row g + 8, same k    a[2] row g, k + 8    a[3] row g + 8, k + 8
 *     b0   k 2q, 2q + 1, column g                           b1   k + 8, column g
 *     c[0], c[1] row g, columns 2q, 2q + 1                  c[2], c[3] row g + 8, same columns
 * So the accumulators of two neighbours, 16 columns, hold just what the left operand of a further product
 * over these columns needs. */
__device__ static inline void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ static inline unsigned pack(float low, float high) {
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
__device__ static inline float exp_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ static inline void store_shared(unsigned at, unsigned x) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(x) : "memory");
}
__device__ static inline void store_shared(unsigned at, uint4 x) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}
__device__ static inline uint4 load_shared(unsigned at) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(at));
    return x;
}
__device__ static inline float2 load_shared_pair(unsigned at) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(at));
    return x;
}

/* Four fp32 sums in memory, 16 bytes aligned, at once; from compute capability 9.0 on. */
#if __CUDA_ARCH__ >= 900
__device__ static inline void add_four(float *sums, const float (&x)[4]) {
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(sums), "f"(x[0]), "f"(x[1]), "f"(x[2]),
                 "f"(x[3])
                 : "memory");
}
#endif

template <typename J>
static void launch(Stream *stream, const char *name, void (*kernel)(J), size_t blocks, int threads,
                   size_t shared, const J &job) {
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared));
    kernel<<<(unsigned)blocks, (unsigned)threads, shared, stream->stream>>>(job);
    cuda_launched(stream, name);
}
#endif

#endif
