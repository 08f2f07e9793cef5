/* flash_cuda.cu - `flash_mma`: attention without the T x T table on NVIDIA GPUs from compute capability 8.0
 * on, by the warp-wide matrix instruction mma.m16n8k16 (bf16 in, fp32 sums). The schedule is that of Dao
 * 2023, "FlashAttention-2"; the online softmax that of Milakov and Gimelshein 2018; D = 32, 64, 96, 128.
 *
 * FORWARD. A block takes ROWS = 128 queries of one head, a warp of its four 32 of them (two strips of 16, so
 * that each fragment of K and V read from shared memory serves two products); O (32, D), the row maxima and
 * sums stay in the warp's registers, and Q too where it fits. The block walks over the keys 64 at a time,
 * from key 0 to its diagonal: all threads copy K and V of the next 64 (cp.async, zeros beyond T) while S = Q
 * K^T, P = exp2(S * c - max * c), c = scale * log2(e), and O += P V are computed from this 64. S in fp32
 * accumulators becomes P as bf16 operands in the same registers, without a shuffle. A new maximum is taken
 * over, and O rescaled, only where one of the warp's rows has outgrown the old one by 2^8: P then stays below
 * 2^8, the sums far below fp32's largest, and the result is the same function, since O and sum are relative
 * to the same maximum. Keys above the diagonal are never touched: a loop without any mask up to the block's
 * first row, then one of at most ROWS / 64 steps in which each warp masks, and stops at its own diagonal.
 *
 * BACKWARD, three kernels. (1) lse in base 2 and delta = rowsum(dO * O), which wait where dQ will stand; zeros
 * for dQ's sums. (2) A block takes ROWS = 128 keys of one head, a warp of its eight 16 of them, whose dK and dV
 * (16, D) stay in its registers; K and V stay in shared memory, and the queries come 64 at a time, from the
 * diagonal down, Q, dO, lse and delta of the next 64 being copied meanwhile. Computed transposed, S^T = K Q^T and
 * dP^T = V dO^T, so that P^T and dS^T are in registers what dV += P^T dO and dK += dS^T Q need as left operands;
 * only dS^T goes through shared memory, for dQ = dS K, in which each warp takes 16 queries and half the channels,
 * and adds to dQ's fp32 sums in memory, in the order of the accumulators' registers: whole lines at once. (3) dQ *
 * scale to bf16 and to its place.
 * These additions come in no fixed order. With `deterministic` the second kernel leaves dQ out and another
 * takes the third's place: 64 queries a block, keys as in the forward pass, S and dP made once more (7
 * products instead of 5): bit-equal from run to run.
 *
 * ROTARY POSITIONS, where the call asks for them: the forward kernel turns its block's queries in shared memory
 * before the first product, and writes them back for the backward pass; where that writes rows of dK and dQ, it
 * turns them back on the way. The keys have been turned before, since each is read by all later blocks. Numbers
 * are rounded to bf16 where the separate operation rounds them, so that the results are the same bits.
 *
 * GENERATION. A block for each new query: groups of lanes take keys in turns, each with an online softmax of
 * its own in fp32, and are merged once at the end.
 *
 * SHARED MEMORY holds rows of D channels as chunks of 16 bytes, whose number is XORed with bits of the row's
 * so that the eight rows of an ldmatrix lie in different banks. Which tiles are taken depends on how much of
 * it a block may have (227 KB: compute capability 9.0, 163: 8.0 and 8.7, 99: 8.6 and 8.9):
 *     forward     copies ahead: 64 keys, where two blocks fit beside each other, else K and V in turns, and
 *                 at 99 KB and D 128 with 64 queries a block (a strip a warp)
 *     backward    D <= 64: 81 KB at most; D 96: 113 KB, D 128: 145 KB, at 99 KB one tile of queries instead of
 *                 two, and at D 128 64 keys and four warps
 *
 * ORDER. The block that has most to do first, so that the last ones are short; heads in groups whose keys and
 * values (or queries and gradients) stay in the GPU's cache together.
 *
 * LIMITS. Two (forward) and five (backward) products of T T D / 2 multiply-adds a head. mma.sync reaches
 * about 0.62 of a Hopper's dense peak, all of an Ampere's; per element of S there is one exp2 at 16 a clock
 * and multiprocessor, which at D 64 costs 0.6 of what the products cost. Shared memory: forward 128 bytes a
 * product instruction (160 with Q read again), backward 290, of 128 a clock. Memory and cache are far away:
 * 16 KB for each 128 x 64 scores at D 64. */
#include "attention.h"
#include "mma.h"

#include "../cuda_stream.h"

#include <float.h>
#include <limits.h>
#include <stdlib.h>

/* ==== tiles in shared memory ==== */
enum {
    KEYS = 64,    /* of a step of the forward pass */
    QUERIES = 64, /* of a step of the backward pass; dQ's sums are padded to whole ones */
    WARP = 32,    /* threads */
    STRIP = 16,   /* rows of a product instruction */
    CHUNK = 8     /* bf16 in 16 bytes */
};
static constexpr float LOG2_E = 1.4426950408889634f;

/* A tile is rows of W bf16 without gaps, from an address that is a multiple of 128. Chunks trade places within
 * groups of SWAPPED, the largest power of two up to 8 that divides a row's chunks: their number is XORed with
 * swap(row), which differs between rows that start in the same bank, among any eight that follow each other. */
template <int W> struct Tile {
    static constexpr int CHUNKS = W / CHUNK, PITCH = W * 2;
    static constexpr int SWAPPED = CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : 2;
    static constexpr unsigned GROUP = SWAPPED * 16; /* bytes */
    static_assert(W % 16 == 0, "rows of whole product steps");

    __device__ static unsigned swap(unsigned row) {
        return row / (8 / SWAPPED) % SWAPPED;
    }
    __device__ static unsigned place(unsigned row, unsigned chunk) {
        return row * PITCH + (chunk ^ swap(row)) * 16;
    }
    /* What this lane adds to a tile's start for the two orders in which four matrices make 16 x 16 numbers:
     * DOWN: rows 0-7, rows 8-15, then the next chunk; ACROSS: both chunks of rows 0-7, then of rows 8-15. */
    __device__ static unsigned down() {
        const unsigned lane = threadIdx.x % WARP;
        return place(lane % 16, lane / 16);
    }
    __device__ static unsigned across() {
        const unsigned lane = threadIdx.x % WARP;
        return place(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    }
    /* The same for the 16 x 16 numbers from `row` and `column` on, multiples of 16: the rows' swap is that of the
     * first ones, and the column's bits are XORed in within a group (so columns of two calls, one upon the
     * other, add up only where they have no bit in common). */
    __device__ static unsigned at(unsigned start, unsigned row, unsigned column) {
        const unsigned bytes = column * 2;
        return (start ^ (bytes & (GROUP - 1))) + (bytes & ~(GROUP - 1)) + row * PITCH;
    }
};

/* ROWS rows of D from memory, `stride` elements apart; those from `there` on become zeros. Each thread keeps to
 * its columns, so that all its addresses are one and steps. */
template <int D, int ROWS, int THREADS>
__device__ static inline void copy_tile(unsigned tile, const bf16 *from, unsigned stride, int there) {
    constexpr int LANES = Tile<D>::CHUNKS % 8 == 0 ? 8 : 4, STEP = THREADS / LANES; /* of a row; rows */
    static_assert(ROWS % STEP == 0 && STEP % 8 == 0, "no thread is idle; a row's swap is that of the first");
    const unsigned row = threadIdx.x / LANES, chunk = threadIdx.x % LANES;
    const bf16 *at = from + (size_t)row * stride + chunk * CHUNK;
#pragma unroll
    for (int i = 0; i < ROWS; i += STEP, at += STEP * stride)
#pragma unroll
        for (int k = 0; k < Tile<D>::CHUNKS; k += LANES)
            copy_async(tile + Tile<D>::place(row + i, chunk + k), at + k * CHUNK, (int)row + i < there);
}

/* ROWS rows of D to memory, as copy_tile reads them; those from `there` on are not written. `thread` of THREADS. */
template <int D, int ROWS, int THREADS>
__device__ static inline void write_tile(bf16 *to, size_t stride, int there, unsigned tile, unsigned thread) {
    constexpr unsigned CHUNKS = Tile<D>::CHUNKS;
#pragma unroll
    for (unsigned i = thread; i < ROWS * CHUNKS; i += THREADS) {
        const unsigned row = i / CHUNKS, chunk = i % CHUNKS;
        const uint4 x = load_shared(tile + Tile<D>::place(row, chunk));
        if ((int)row < there) *reinterpret_cast<uint4 *>(to + row * stride + chunk * CHUNK) = x;
    }
}

__device__ static inline uint4 packed(const float (&x)[8]) {
    return make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
}

/* A thread's share of the rotation of ROWS rows of D: it keeps to its columns, chunks of the row's low half and the same
 * ones of its high half. A row's angles, D / 2 pairs of fp16, are as many bytes as itself. */
template <int D, int ROWS, int THREADS> struct Rotation {
    static constexpr unsigned CHUNKS = D / 2 / CHUNK, LANES = CHUNKS % 4 == 0 ? 4 : 2, STEP = THREADS / LANES;
    static constexpr unsigned TURNS = (ROWS + STEP - 1) / STEP, EACH = CHUNKS / LANES, PITCH = Tile<D>::PITCH;
    static_assert(STEP % 8 == 0, "a row's swap is that of the first");
    static_assert(ROWS % STEP == 0 || ROWS < STEP, "the same rows for all turns");
    uint4 angles[TURNS][EACH][2];
    unsigned row, chunk;

    /* Rows that are neighbours have, of 64 channels, the same half in the same banks; of two that are four apart one
     * has its low half where the other has its high one. */
    __device__ Rotation(unsigned thread) : chunk(thread % LANES) {
        const unsigned i = thread / LANES;
        row = (i & ~7u) | (i & 1) << 2 | (i >> 1 & 3);
    }
    __device__ bool idle() const {
        return ROWS < STEP && row >= ROWS;
    }
    /* The angles of the rows' positions. Before the rows are there, since they come from far. */
    __device__ void read(const bf16 *from) {
        if (idle()) return;
        const uint4 *at = reinterpret_cast<const uint4 *>(from + (size_t)row * D) + 2 * chunk;
#pragma unroll
        for (unsigned k = 0; k < TURNS; k++)
#pragma unroll
            for (unsigned e = 0; e < 2 * EACH; e++)
                angles[k][e / 2][e % 2] = at[k * STEP * (D / CHUNK) + e / 2 * 2 * LANES + e % 2];
    }
    /* Turns a tile's rows (sign -1: back), and writes the `there` first ones to `to`, if that is not NULL, `stride`
     * elements apart. Barriers before and after are the caller's. */
    __device__ void turn(unsigned tile, float sign, bf16 *to = NULL, unsigned stride = 0,
                         int there = 0) const {
        if (idle()) return;
#pragma unroll
        for (unsigned e = 0; e < EACH; e++) {
            const unsigned first = chunk + e * LANES;
            const unsigned low_at = tile + Tile<D>::place(row, first);
            const unsigned high_at = tile + Tile<D>::place(row, first + CHUNKS);
#pragma unroll
            for (unsigned k = 0; k < TURNS; k++) {
                const unsigned below = k * STEP * PITCH;
                uint4 low = load_shared(low_at + below), high = load_shared(high_at + below);
                float a[CHUNK], b[CHUNK], cosine[CHUNK], sine[CHUNK];
                __half2 both[CHUNK];
                memcpy(both, angles[k][e], sizeof both);
                load(a, reinterpret_cast<const bf16 *>(&low));
                load(b, reinterpret_cast<const bf16 *>(&high));
                unpack_angles(cosine, sine, both);
                rotate(a, b, cosine, sine, sign);
                low = packed(a), high = packed(b);
                store_shared(low_at + below, low);
                store_shared(high_at + below, high);
                if (!to || (int)(row + k * STEP) >= there) continue;
                uint4 *at = reinterpret_cast<uint4 *>(to + (size_t)(row + k * STEP) * stride + first * CHUNK);
                at[0] = low, at[CHUNKS] = high;
            }
        }
    }
};

/* Waits for the queries whose copies are under way, turns them and writes them back. A call, that the forward pass's
 * loops keep the registers that they have without it. */
template <int D, int ROWS, int THREADS>
__device__ static __noinline__ void rotate_queries(unsigned tile, bf16 *queries, unsigned stride, int there,
                                                   const bf16 *angles) {
    Rotation<D, ROWS, THREADS> rotation(threadIdx.x);
    rotation.read(angles);
    __syncwarp(); /* for the compiler alone, which else moves the loads behind the wait */
    wait_for_copies();
    __syncthreads();
    rotation.turn(tile, 1, queries, stride, there);
}

/* Turns a warp's strip of gradients back. A call for the same reason. */
template <int D> __device__ static __noinline__ void turn_back(unsigned rows, const bf16 *angles) {
    Rotation<D, STRIP, WARP> rotation(threadIdx.x % WARP);
    rotation.read(angles);
    rotation.turn(rows, -1);
    __syncwarp();
}

/* ==== products ==== */
/* C += A B^T. A: M strips of 16 rows and K columns, which left(m, k, fragment) gives 16 x 16 at a time; B: 8 N
 * rows of K in a tile, `b` the tile's start + across(). */
template <int K, int M, int N, typename Left>
__device__ static inline void multiply_rows(float (&c)[M][N][4], Left left, unsigned b) {
#pragma unroll
    for (int k = 0; k < K / 16; k++) {
        unsigned a[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) left(m, k, a[m]);
#pragma unroll
        for (int n = 0; n < N / 2; n++) {
            unsigned x[4];
            load_matrices(x, Tile<K>::at(b, 16 * n, 16 * k));
#pragma unroll
            for (int m = 0; m < M; m++) {
                multiply(c[m][2 * n], a[m], x[0], x[1]);
                multiply(c[m][2 * n + 1], a[m], x[2], x[3]);
            }
        }
    }
}

/* C += A B. B: K rows of W in a tile, `b` the tile's start + down(); of its columns 8 N, 16 of every
 * 16 * EVERY. */
template <int W, int K, int EVERY = 1, int M, int N, typename Left>
__device__ static inline void multiply_columns(float (&c)[M][N][4], Left left, unsigned b) {
#pragma unroll
    for (int k = 0; k < K / 16; k++) {
        unsigned a[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) left(m, k, a[m]);
#pragma unroll
        for (int n = 0; n < N / 2; n++) {
            unsigned x[4];
            load_transposed(x, Tile<W>::at(b, 16 * k, 16 * EVERY * n));
#pragma unroll
            for (int m = 0; m < M; m++) {
                multiply(c[m][2 * n], a[m], x[0], x[1]);
                multiply(c[m][2 * n + 1], a[m], x[2], x[3]);
            }
        }
    }
}

/* The warp's M strips of a tile as left operands: in registers (KEPT), or read again at each use. */
template <int D, int M, bool KEPT> struct Operand {
    unsigned start; /* the strips' + down() */
    unsigned kept[KEPT ? M : 1][KEPT ? D / 16 : 1][4];

    __device__ Operand(unsigned strips) : start(strips + Tile<D>::down()) {
    }
    /* Once the tile is there. */
    __device__ void keep() {
        if constexpr (KEPT) {
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int k = 0; k < D / 16; k++)
                    load_matrices(kept[m][k], Tile<D>::at(start, STRIP * m, 16 * k));
        }
    }
    __device__ void get(int m, int k, unsigned (&a)[4]) const {
        if constexpr (KEPT) {
#pragma unroll
            for (int i = 0; i < 4; i++) a[i] = kept[m][k][i];
        } else {
            load_matrices(a, Tile<D>::at(start, STRIP * m, 16 * k));
        }
    }
};

/* Accumulators of 16 rows and 8 N columns, times factor[0] (rows g) and factor[1] (rows g + 8), as bf16 to this warp's
 * own `strip` of shared memory (16 rows of 8 N), from where they are written as whole rows. */
template <int N>
__device__ static inline void put_rows(unsigned strip, const float (&c)[N][4], const float (&factor)[2]) {
    const unsigned lane = threadIdx.x % WARP, g = lane / 4, q = lane % 4;
    __syncwarp(); /* what the warp's lanes had to read in the strip is read */
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            store_shared(strip + Tile<8 * N>::place(g + 8 * half, n) + 4 * q,
                         pack(c[n][2 * half] * factor[half], c[n][2 * half + 1] * factor[half]));
    __syncwarp();
}

/* One accumulator added to fp32 sums in memory that a block of THREADS reads back with sum_at, in whatever
 * order is whole lines: four numbers at once on Hopper, one on what came before. */
template <int THREADS> __device__ static inline void add_sum(float *sums, int tile, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
    add_four(sums + ((size_t)tile * THREADS + threadIdx.x) * 4, x);
#else
    for (int i = 0; i < 4; i++) atomicAdd(sums + (size_t)(4 * tile + i) * THREADS + threadIdx.x, x[i]);
#endif
}
template <int THREADS> __device__ static inline void sum_at(float (&x)[4], const float *sums, int tile) {
#if __CUDA_ARCH__ >= 900
    load(x, sums + ((size_t)tile * THREADS + threadIdx.x) * 4);
#else
    for (int i = 0; i < 4; i++) x[i] = sums[(size_t)(4 * tile + i) * THREADS + threadIdx.x];
#endif
}

/* ==== what the kernels share ==== */
typedef struct Job {
    bf16 *qkv;         /* (B, T, 3, H, D) */
    bf16 *out;         /* (B, T, H, D) */
    float *lse;        /* (B, H, T) */
    const bf16 *d_out; /* (B, T, H, D) */
    bf16 *d_qkv;       /* (B, T, 3, H, D) */
    float *dq; /* (B, H, padded / QUERIES) tiles of QUERIES x D sums; NULL: dQ is made by its own kernel */
    const bf16 *angles; /* of rotary positions: (T, D / 2) pairs of fp16; NULL: not this backend's business */
    unsigned heads, T, H, C, padded; /* C = H D */
    unsigned tiles, group;           /* blocks a head, heads whose data the cache holds */
    float scale;
} Job;

/* Block i's head, and how many of that head's tiles come before its own. */
typedef struct Turn {
    unsigned head, tile;
} Turn;
__device__ static inline Turn turn_of(const Job &job, unsigned i) {
    const unsigned first = i / (job.group * job.tiles) * job.group, rest = i % (job.group * job.tiles);
    const unsigned heads = min(job.group, job.heads - first);
    return {first + rest % heads, rest / heads};
}

/* Elements before row 0 of q, k or v (which = 0, 1, 2) of a head in (B, T, 3, H, D), and before row 0 of a
 * head in (B, T, H, D). */
template <int D> __device__ static inline size_t in_qkv(const Job &job, unsigned head, unsigned which) {
    return ((size_t)(head / job.H) * job.T * 3 + which) * job.C + head % job.H * D;
}
template <int D> __device__ static inline size_t in_out(const Job &job, unsigned head) {
    return (size_t)(head / job.H) * job.T * job.C + head % job.H * D;
}

/* The terms of QUERIES rows, lse in base 2 (which = 0) and delta (1), wait in the place of dQ's `rows` until those are
 * written: 16 bytes of lse of four rows, 16 of delta, and so on along the rows. Fours of rows none of which is there have
 * none, so that the terms of the last, shorter tile fit into what it has. */
enum { TERMS_BYTES = 2 * QUERIES * (int)sizeof(float) };
template <int D>
__device__ static inline float *term_of(bf16 *rows, unsigned stride, unsigned row, unsigned which) {
    constexpr unsigned CHUNKS = D / CHUNK;
    const unsigned chunk = row / 4 * 2 + which;
    return reinterpret_cast<float *>(rows + chunk / CHUNKS * stride + chunk % CHUNKS * CHUNK) + row % 4;
}

/* The largest, or the sum, of the four lanes that share a row of accumulators. */
__device__ static inline float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ static inline float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

/* ==== forward ==== */
template <int D, int M, int STAGES> struct Forward {
    static constexpr int WARPS = 4, THREADS = WARPS * WARP, ROWS = WARPS * M * STRIP;
    static constexpr int Q_BYTES = ROWS * D * 2, TILE_BYTES = KEYS * D * 2;
    static constexpr size_t BYTES = Q_BYTES + STAGES * 2 * TILE_BYTES;
    static constexpr bool Q_IN_REGISTERS = M * D <= 128; /* 32 of them at most */
    static_assert(ANGLE_ROWS % ROWS == 0, "angles for all of the last block's rows");
};

/* O, maxima and sums of a warp's M strips; a thread has rows g and g + 8 of each. */
template <int D, int M> struct Softmax {
    float o[M][D / 8][4], max[M][2], sum[M][2]; /* sum: of this thread's columns alone */
};

/* Before P of these scores: new maxima where they have grown by more than 2^8. */
template <int D, int M>
__device__ static inline void take_maxima(Softmax<D, M> &state, const float (&s)[M][KEYS / 8][4], float c) {
    constexpr float MOST = 8; /* log2 */
    float high[M][2];
    bool grown = false;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float x = s[m][0][2 * half];
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) x = fmaxf(x, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
            high[m][half] = quad_max(x);
            grown = grown || (high[m][half] - state.max[m][half]) * c > MOST;
        }
    if (!__any_sync(0xffffffffu, grown)) return;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float now = fmaxf(state.max[m][half], high[m][half]);
            const float factor = exp_2((state.max[m][half] - now) * c);
            state.max[m][half] = now;
            state.sum[m][half] *= factor;
#pragma unroll
            for (int n = 0; n < D / 8; n++)
                state.o[m][n][2 * half] *= factor, state.o[m][n][2 * half + 1] *= factor;
        }
}

template <int D, int M, int STAGES>
__global__ static void __launch_bounds__(Forward<D, M, STAGES>::THREADS, 2) forward_kernel(const Job job) {
    typedef Forward<D, M, STAGES> F;
    const Turn turn = turn_of(job, blockIdx.x);
    const unsigned lane = threadIdx.x % WARP, g = lane / 4, q = lane % 4, C = job.C;
    const int T = (int)job.T, first = (int)(job.tiles - 1 - turn.tile) * F::ROWS;
    const int strip = first + (int)(threadIdx.x / WARP) * M * STRIP; /* the warp's first row */
    const int last = (min(first + F::ROWS, T) - 1) / KEYS;           /* the block's, in steps of keys */
    const float c = job.scale * LOG2_E;

    bf16 *queries = job.qkv + in_qkv<D>(job, turn.head, 0) + (size_t)first * 3 * C;
    const bf16 *keys = job.qkv + in_qkv<D>(job, turn.head, 1); /* and values, C further */
    const unsigned q_tile = shared_start();
    const auto k_tile = [=](int i) { return q_tile + F::Q_BYTES + i % STAGES * 2 * F::TILE_BYTES; };
    const auto v_tile = [=](int i) { return k_tile(i) + F::TILE_BYTES; };
    const auto copy_keys = [=](int i) {
        copy_tile<D, KEYS, F::THREADS>(k_tile(i), keys + (size_t)i * KEYS * 3 * C, 3 * C, T - i * KEYS);
    };
    const auto copy_values = [=](int i) {
        copy_tile<D, KEYS, F::THREADS>(v_tile(i), keys + ((size_t)i * KEYS * 3 + 1) * C, 3 * C, T - i * KEYS);
    };
    copy_tile<D, F::ROWS, F::THREADS>(q_tile, queries, 3 * C, T - first);
    copy_keys(0);
    if (STAGES == 2) copy_values(0);
    if (job.angles)
        rotate_queries<D, F::ROWS, F::THREADS>(q_tile, queries, 3 * C, T - first,
                                               job.angles + (size_t)first * D);

    Softmax<D, M> state = {};
#pragma unroll
    for (int m = 0; m < M; m++) state.max[m][0] = state.max[m][1] = -FLT_MAX; /* no -inf - -inf */
    Operand<D, M, F::Q_IN_REGISTERS> left(q_tile + (strip - first) * D * 2);

    /* Keys i * KEYS and on; one set of tiles is used while the other is filled, or K's while V's is. */
    const auto step = [&](int i, auto is_masked) {
        constexpr bool MASKED = decltype(is_masked)::value;
        const bool active = !MASKED || i * KEYS < strip + M * STRIP; /* not all above the diagonal */
        float s[M][KEYS / 8][4] = {};
        wait_for_copies();
        __syncthreads();
        if (STAGES == 1) copy_values(i);
        if (STAGES == 2 && i < last) copy_keys(i + 1), copy_values(i + 1);
        if (i == 0) left.keep();
        if (active) {
            multiply_rows<D>(
                s, [&](int m, int k, unsigned(&a)[4]) { left.get(m, k, a); }, k_tile(i) + Tile<D>::across());
        }
        if (STAGES == 1) {
            wait_for_copies();
            __syncthreads();
            if (i < last) copy_keys(i + 1);
        }
        if (!active) return;
        if (MASKED) {
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        if (i * KEYS + 8 * n + (int)(2 * q) + e % 2 > strip + STRIP * m + (int)g + e / 2 * 8)
                            s[m][n][e] = -INFINITY;
        }
        take_maxima(state, s, c);
        /* P of 16 keys at a time, just before they are needed */
        multiply_columns<D, KEYS>(
            state.o,
            [&](int m, int k, unsigned(&a)[4]) {
#pragma unroll
                for (int r = 0; r < 4; r++) { /* a[r]: rows g + r % 2 * 8, keys of tile 2k + r / 2 */
                    const float minus_max = -state.max[m][r % 2] * c;
                    const float *scores = &s[m][2 * k + r / 2][r % 2 * 2];
                    const float p0 = exp_2(fmaf(scores[0], c, minus_max));
                    const float p1 = exp_2(fmaf(scores[1], c, minus_max));
                    state.sum[m][r % 2] += p0 + p1;
                    a[r] = pack(p0, p1);
                }
            },
            v_tile(i) + Tile<D>::down());
    };
    int i = 0;
    for (; i < first / KEYS; i++) step(i, std::false_type());
    for (; i <= last; i++) step(i, std::true_type());

        /* The warp's own rows of Q, which no other warp reads, become those of the output. */
#pragma unroll
    for (int m = 0; m < M; m++) {
        float factor[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float sum = quad_sum(state.sum[m][half]);
            const int row = strip + STRIP * m + (int)g + 8 * half;
            factor[half] = 1.0f / sum;
            if (q == 0 && row < T)
                job.lse[(size_t)turn.head * job.T + row] = state.max[m][half] * job.scale + logf(sum);
        }
        const int row = strip + STRIP * m;
        const unsigned rows = q_tile + (row - first) * D * 2;
        put_rows(rows, state.o[m], factor);
        write_tile<D, STRIP, WARP>(job.out + in_out<D>(job, turn.head) + (size_t)row * C, C, T - row, rows,
                                   lane);
    }
}

/* ==== backward ==== */
enum { PREPARE_THREADS = 4 * QUERIES };

/* The terms, and zeros in dQ's sums, of QUERIES rows of a head; four lanes a row. */
template <int D> __global__ static void __launch_bounds__(PREPARE_THREADS) prepare_kernel(const Job job) {
    const unsigned head = blockIdx.x / job.tiles, tile = blockIdx.x % job.tiles;
    const unsigned t = tile * QUERIES + threadIdx.x / 4, part = threadIdx.x % 4;
    float sum = 0;
    if (t < job.T) {
        const size_t row = in_out<D>(job, head) + (size_t)t * job.C;
#pragma unroll
        for (unsigned i = 0; i < D / CHUNK / 4; i++) {
            float x[CHUNK], y[CHUNK];
            load(x, job.d_out + row + (4 * i + part) * CHUNK);
            load(y, job.out + row + (4 * i + part) * CHUNK);
#pragma unroll
            for (int k = 0; k < CHUNK; k++) sum = fmaf(x[k], y[k], sum);
        }
    }
    sum = quad_sum(sum);
    /* Zeros from T on, as they are copied where there is nothing. */
    if (part < 2 && t < (job.T + 3) / 4 * 4) {
        bf16 *rows = job.d_qkv + in_qkv<D>(job, head, 0) + (size_t)tile * QUERIES * 3 * job.C;
        const float lse2 = t < job.T ? job.lse[(size_t)head * job.T + t] * LOG2_E : 0;
        *term_of<D>(rows, 3 * job.C, t % QUERIES, part) = part == 0 ? lse2 : sum;
    }
    if (!job.dq) return;
    float *sums = job.dq + (size_t)blockIdx.x * QUERIES * D;
    const float zeros[4] = {0, 0, 0, 0};
    for (unsigned i = threadIdx.x * 4; i < QUERIES * D; i += PREPARE_THREADS * 4) store(sums + i, zeros);
}

template <int D, int WARPS_, int STAGES> struct Backward {
    static constexpr int WARPS = WARPS_, THREADS = WARPS * WARP, ROWS = WARPS * STRIP; /* keys */
    static constexpr int KV_BYTES = ROWS * D * 2, TILE_BYTES = QUERIES * D * 2;
    static constexpr int STAGE_BYTES = 2 * TILE_BYTES + TERMS_BYTES; /* Q, dO, lse, delta */
    static constexpr int DS_BYTES = ROWS * QUERIES * 2;
    static constexpr size_t BYTES = 2 * KV_BYTES + STAGES * STAGE_BYTES + DS_BYTES;
    static constexpr bool KV_IN_REGISTERS = D <= 64; /* 32 of them */
    /* dQ of a step, (QUERIES, D): each warp has a strip and, of PARTS warps on it, every PARTS-th 16 channels */
    static constexpr int PARTS = WARPS / (QUERIES / STRIP), GROUPS = D / 16 / PARTS;
    static_assert(WARPS % (QUERIES / STRIP) == 0 && D % (16 * PARTS) == 0, "dQ is shared out evenly");
    static_assert(PARTS <= 2, "the part is one bit of the column");
    static_assert(ANGLE_ROWS % ROWS == 0, "angles for all of the last block's rows");
};

template <int D, int WARPS, int STAGES>
__global__ static void __launch_bounds__(Backward<D, WARPS, STAGES>::THREADS, 1)
    backward_kernel(const Job job) {
    typedef Backward<D, WARPS, STAGES> F;
    const Turn turn = turn_of(job, blockIdx.x);
    const unsigned lane = threadIdx.x % WARP, g = lane / 4, q = lane % 4, warp = threadIdx.x / WARP;
    const unsigned C = job.C;
    const int T = (int)job.T, first = (int)turn.tile * F::ROWS; /* key */
    const int strip = first + (int)warp * STRIP;                /* the warp's first */
    const int last = (T - 1) / QUERIES;                         /* tile of queries */
    const float c = job.scale * LOG2_E;

    const bf16 *queries = job.qkv + in_qkv<D>(job, turn.head, 0);
    const bf16 *keys = queries + C + (size_t)first * 3 * C, *values = keys + C;
    const bf16 *d_out = job.d_out + in_out<D>(job, turn.head);
    const unsigned k_tile = shared_start(), v_tile = k_tile + F::KV_BYTES, stages = v_tile + F::KV_BYTES;
    const unsigned ds_tile = stages + STAGES * F::STAGE_BYTES;
    const auto q_tile = [=](int i) { return stages + i % STAGES * F::STAGE_BYTES; };
    /* Rows from T on are zeros, their terms too: P = 1, which adds P dO = 0 to dV and P (0 - 0) Q = 0 to dK. */
    const auto copy_queries = [=](int i) {
        const unsigned tile = q_tile(i);
        const int row = i * QUERIES;
        copy_tile<D, QUERIES, F::THREADS>(tile, queries + (size_t)row * 3 * C, 3 * C, T - row);
        copy_tile<D, QUERIES, F::THREADS>(tile + F::TILE_BYTES, d_out + (size_t)row * C, C, T - row);
        if (threadIdx.x < TERMS_BYTES / 16) {
            const int t = threadIdx.x % (QUERIES / 4) * 4, which = threadIdx.x / (QUERIES / 4);
            copy_async(tile + 2 * F::TILE_BYTES + (which * QUERIES + t) * 4,
                       term_of<D>(job.d_qkv + (queries + (size_t)row * 3 * C - job.qkv), 3 * C, t, which),
                       row + t < T);
        }
    };
    copy_tile<D, F::ROWS, F::THREADS>(k_tile, keys, 3 * C, T - first);
    copy_tile<D, F::ROWS, F::THREADS>(v_tile, values, 3 * C, T - first);
    copy_queries(first / QUERIES);

    float dk[1][D / 8][4] = {}, dv[1][D / 8][4] = {};
    Operand<D, 1, F::KV_IN_REGISTERS> k_left(k_tile + warp * STRIP * D * 2),
        v_left(v_tile + warp * STRIP * D * 2);

    /* Queries i * QUERIES and on. A thread's accumulators of S^T and dP^T: keys g and g + 8 of the strip,
     * queries 8 n + 2q and the next. */
    const auto step = [&](int i, auto is_masked) {
        constexpr bool MASKED = decltype(is_masked)::value;
        const bool active = !MASKED || strip < (i + 1) * QUERIES; /* not all above the diagonal */
        wait_for_copies();
        __syncthreads(); /* the tiles are there; those of the last step and dS are no longer read */
        if (STAGES == 2 && i < last) copy_queries(i + 1);
        if (i == first / QUERIES) k_left.keep(), v_left.keep();
        const unsigned tile = q_tile(i), row_terms = tile + 2 * F::TILE_BYTES;
        float p[1][QUERIES / 8][4] = {};
        unsigned ds[QUERIES / 8][2] = {}; /* keys g and g + 8: two queries each */
        if (active) {
            multiply_rows<D>(
                p, [&](int m, int k, unsigned(&a)[4]) { k_left.get(m, k, a); }, tile + Tile<D>::across());
#pragma unroll
            for (int n = 0; n < QUERIES / 8; n++) {
                const float2 x = load_shared_pair(row_terms + (8 * n + 2 * q) * 4);
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    p[0][n][e] = exp_2(fmaf(p[0][n][e], c, e % 2 ? -x.y : -x.x));
                    if (MASKED && strip + (int)g + e / 2 * 8 > i * QUERIES + 8 * n + (int)(2 * q) + e % 2)
                        p[0][n][e] = 0;
                }
            }
            multiply_columns<D, QUERIES>(
                dv,
                [&](int, int k, unsigned(&a)[4]) {
#pragma unroll
                    for (int r = 0; r < 4; r++) {
                        const float *weights = &p[0][2 * k + r / 2][r % 2 * 2];
                        a[r] = pack(weights[0], weights[1]);
                    }
                },
                tile + F::TILE_BYTES + Tile<D>::down());
            float dp[1][QUERIES / 8][4] = {};
            multiply_rows<D>(
                dp, [&](int m, int k, unsigned(&a)[4]) { v_left.get(m, k, a); },
                tile + F::TILE_BYTES + Tile<D>::across());
#pragma unroll
            for (int n = 0; n < QUERIES / 8; n++) {
                const float2 x = load_shared_pair(row_terms + (QUERIES + 8 * n + 2 * q) * 4);
#pragma unroll
                for (int half = 0; half < 2; half++)
                    ds[n][half] = pack(p[0][n][2 * half] * (dp[0][n][2 * half] - x.x),
                                       p[0][n][2 * half + 1] * (dp[0][n][2 * half + 1] - x.y));
            }
        }
        if (job.dq) {
#pragma unroll
            for (int n = 0; n < QUERIES / 8; n++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    store_shared(ds_tile + Tile<QUERIES>::place(warp * STRIP + g + 8 * half, n) + 4 * q,
                                 ds[n][half]);
        }
        if (active) {
            multiply_columns<D, QUERIES>(
                dk,
                [&](int, int k, unsigned(&a)[4]) {
#pragma unroll
                    for (int r = 0; r < 4; r++) a[r] = ds[2 * k + r / 2][r % 2];
                },
                tile + Tile<D>::down());
        }
        if (STAGES == 2 && !job.dq) return;
        __syncthreads(); /* dS is there; with one stage, Q and dO are no longer read */
        if (STAGES == 1 && i < last) copy_queries(i + 1);
        if (!job.dq) return;
        /* dQ of 16 queries and the warp's channels over all keys of the block: dS^T lies in rows of keys */
        const unsigned rows = warp % (QUERIES / STRIP), part = warp / (QUERIES / STRIP);
        const unsigned ds_start = Tile<QUERIES>::at(ds_tile + Tile<QUERIES>::across(), 0, rows * STRIP);
        float dq[1][2 * F::GROUPS][4] = {};
        multiply_columns<D, F::ROWS, F::PARTS>(
            dq, [&](int, int k, unsigned(&a)[4]) { load_transposed(a, ds_start + 16 * k * QUERIES * 2); },
            Tile<D>::at(k_tile + Tile<D>::down(), 0, 16 * part));
        float *sums = job.dq + ((size_t)turn.head * (job.padded / QUERIES) + i) * QUERIES * D;
#pragma unroll
        for (int n = 0; n < 2 * F::GROUPS; n++) add_sum<F::THREADS>(sums, n, dq[0][n]);
    };
    int i = first / QUERIES;
    for (; i <= last && i * QUERIES < first + F::ROWS; i++) step(i, std::true_type());
    for (; i <= last; i++) step(i, std::false_type());

    __syncthreads(); /* K is no longer read for dQ; V's rows were the warp's own all the time */
    const float one[2] = {1, 1}, scales[2] = {job.scale, job.scale};
    const unsigned dk_rows = k_tile + warp * STRIP * D * 2, dv_rows = v_tile + warp * STRIP * D * 2;
    bf16 *to = job.d_qkv + in_qkv<D>(job, turn.head, 1) + (size_t)strip * 3 * C;
    put_rows(dk_rows, dk[0], scales);
    put_rows(dv_rows, dv[0], one);
    if (job.angles) turn_back<D>(dk_rows, job.angles + (size_t)strip * D);
    write_tile<D, STRIP, WARP>(to + C, 3 * C, T - strip, dv_rows, lane);
    write_tile<D, STRIP, WARP>(to, 3 * C, T - strip, dk_rows, lane);
}

/* dQ's sums, in the order in which backward_kernel added them, to d_qkv: QUERIES rows of TOGETHER heads, which
 * are turned back by the same angles. */
enum { TOGETHER = 2 };
template <int D, int WARPS, int STAGES>
__global__ static void __launch_bounds__(Backward<D, WARPS, STAGES>::THREADS) finish_kernel(const Job job) {
    typedef Backward<D, WARPS, STAGES> F;
    const unsigned group = blockIdx.x / job.tiles, groups = (job.H + TOGETHER - 1) / TOGETHER;
    const unsigned b = group / groups, h = group % groups * TOGETHER,
                   first = blockIdx.x % job.tiles * QUERIES;
    const unsigned lane = threadIdx.x % WARP, g = lane / 4, q = lane % 4, warp = threadIdx.x / WARP;
    const unsigned rows = warp % (QUERIES / STRIP), part = warp / (QUERIES / STRIP), tile = shared_start();
    const int there = (int)(job.T - first);
    Rotation<D, QUERIES, F::THREADS> rotation(threadIdx.x);
    if (job.angles) rotation.read(job.angles + (size_t)first * D);
    for (unsigned head = b * job.H + h; head < b * job.H + min(h + TOGETHER, job.H); head++) {
        const float *sums = job.dq + ((size_t)head * job.tiles + first / QUERIES) * QUERIES * D;
#pragma unroll
        for (int n = 0; n < 2 * F::GROUPS; n++) {
            const unsigned chunk = (n / 2 * F::PARTS + part) * 2 + n % 2;
            float x[4];
            sum_at<F::THREADS>(x, sums, n);
#pragma unroll
            for (int half = 0; half < 2; half++)
                store_shared(tile + Tile<D>::place(rows * STRIP + g + 8 * half, chunk) + 4 * q,
                             pack(x[2 * half] * job.scale, x[2 * half + 1] * job.scale));
        }
        __syncthreads();
        if (job.angles) {
            rotation.turn(tile, -1);
            __syncthreads();
        }
        bf16 *to = job.d_qkv + in_qkv<D>(job, head, 0) + (size_t)first * 3 * job.C;
        write_tile<D, QUERIES, F::THREADS>(to, 3 * job.C, there, tile, threadIdx.x);
        __syncthreads(); /* before the next head's come into the tile */
    }
}

/* dQ without sums in memory: the walk of the forward pass, with dP beside S. */
template <int D> struct QueryGradient {
    static constexpr int WARPS = QUERIES / STRIP, THREADS = WARPS * WARP, STAGES = 2;
    static constexpr int TILE_BYTES = QUERIES * D * 2; /* KEYS are as many */
    static constexpr size_t BYTES = (2 + STAGES * 2) * TILE_BYTES;
    static constexpr bool IN_REGISTERS = D <= 64;
    static_assert(KEYS == QUERIES, "one tile size");
};

template <int D>
__global__ static void __launch_bounds__(QueryGradient<D>::THREADS, 2) query_gradient_kernel(const Job job) {
    typedef QueryGradient<D> F;
    const Turn turn = turn_of(job, blockIdx.x);
    const unsigned lane = threadIdx.x % WARP, g = lane / 4, q = lane % 4, warp = threadIdx.x / WARP;
    const unsigned C = job.C, tile = job.tiles - 1 - turn.tile;
    const int T = (int)job.T, first = (int)tile * QUERIES, strip = first + (int)warp * STRIP;
    const float c = job.scale * LOG2_E;

    const bf16 *queries = job.qkv + in_qkv<D>(job, turn.head, 0), *keys = queries + C;
    const bf16 *d_out = job.d_out + in_out<D>(job, turn.head);
    const unsigned q_tile = shared_start(), o_tile = q_tile + F::TILE_BYTES;
    const auto k_tile = [=](int i) { return o_tile + (1 + i % F::STAGES * 2) * F::TILE_BYTES; };
    const auto copy_keys_and_values = [=](int i) {
        const bf16 *from = keys + (size_t)i * KEYS * 3 * C;
        copy_tile<D, KEYS, F::THREADS>(k_tile(i), from, 3 * C, T - i * KEYS);
        copy_tile<D, KEYS, F::THREADS>(k_tile(i) + F::TILE_BYTES, from + C, 3 * C, T - i * KEYS);
    };
    copy_tile<D, QUERIES, F::THREADS>(q_tile, queries + (size_t)first * 3 * C, 3 * C, T - first);
    copy_tile<D, QUERIES, F::THREADS>(o_tile, d_out + (size_t)first * C, C, T - first);
    copy_keys_and_values(0);

    bf16 *d_queries = job.d_qkv + in_qkv<D>(job, turn.head, 0) + (size_t)first * 3 * C;
    float dq[1][D / 8][4] = {}, lse2[2], delta[2]; /* of rows g, g + 8 */
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const unsigned row = warp * STRIP + g + 8 * half;
        const bool there = first + (int)row < T;
        lse2[half] = there ? *term_of<D>(d_queries, 3 * C, row, 0) : 0;
        delta[half] = there ? *term_of<D>(d_queries, 3 * C, row, 1) : 0;
    }
    Operand<D, 1, F::IN_REGISTERS> q_left(q_tile + warp * STRIP * D * 2),
        o_left(o_tile + warp * STRIP * D * 2);

    const auto step = [&](int i, auto is_masked) {
        constexpr bool MASKED = decltype(is_masked)::value;
        wait_for_copies();
        __syncthreads();
        if (i < (int)tile) copy_keys_and_values(i + 1);
        if (i == 0) q_left.keep(), o_left.keep();
        float p[1][KEYS / 8][4] = {}, dp[1][KEYS / 8][4] = {};
        multiply_rows<D>(
            p, [&](int m, int k, unsigned(&a)[4]) { q_left.get(m, k, a); }, k_tile(i) + Tile<D>::across());
        multiply_rows<D>(
            dp, [&](int m, int k, unsigned(&a)[4]) { o_left.get(m, k, a); },
            k_tile(i) + F::TILE_BYTES + Tile<D>::across());
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float weight = exp_2(fmaf(p[0][n][e], c, -lse2[e / 2]));
                if (MASKED && i * KEYS + 8 * n + (int)(2 * q) + e % 2 > strip + (int)g + e / 2 * 8)
                    weight = 0;
                dp[0][n][e] = weight * (dp[0][n][e] - delta[e / 2]);
            }
        multiply_columns<D, KEYS>(
            dq,
            [&](int, int k, unsigned(&a)[4]) {
#pragma unroll
                for (int r = 0; r < 4; r++) {
                    const float *x = &dp[0][2 * k + r / 2][r % 2 * 2];
                    a[r] = pack(x[0], x[1]);
                }
            },
            k_tile(i) + Tile<D>::down());
    };
    for (int i = 0; i < (int)tile; i++) step(i, std::false_type());
    step((int)tile, std::true_type());

    const float scales[2] = {job.scale, job.scale};
    const unsigned dq_rows = q_tile + warp * STRIP * D * 2;
    put_rows(dq_rows, dq[0], scales);
    if (job.angles) turn_back<D>(dq_rows, job.angles + (size_t)strip * D);
    write_tile<D, STRIP, WARP>(d_queries + (size_t)warp * STRIP * 3 * C, 3 * C, T - strip, dq_rows, lane);
}

/* ==== generation ==== */
typedef struct CachedJob {
    const bf16 *qkv;      /* (B, T, 3, H, D) */
    bf16 *out, *kv_cache; /* (B, T, H, D), (B, cache_length, 2, H, D) */
    size_t T, H, offset, cache_length;
    float scale;
} CachedJob;

/* A block for each (b, t, h). A key is a group of LANES lanes' for a time, eight channels each; the group has
 * every GROUPS-th key, AHEAD of them loaded at once. The block writes its own token's key and value to the
 * cache, and finds those of this call in qkv, so that no block waits for another. */
template <int D> struct Cached {
    static constexpr int THREADS = 256, LANES = D == 96 ? 16 : D / CHUNK, GROUPS = THREADS / LANES, AHEAD = 4;
};
template <int D>
__global__ static void __launch_bounds__(Cached<D>::THREADS) cached_kernel(const CachedJob job) {
    typedef Cached<D> F;
    __shared__ float group_max[F::GROUPS], group_sum[F::GROUPS], group_out[F::GROUPS][D];
    const size_t token = blockIdx.x / job.H, h = blockIdx.x % job.H, b = token / job.T, t = token % job.T;
    const size_t C = job.H * D, length = job.offset + t + 1;
    const unsigned group = threadIdx.x / F::LANES, channel = threadIdx.x % F::LANES * CHUNK;
    const bool active = channel < D; /* D 96: twelve lanes of sixteen */
    const bf16 *fresh = job.qkv + b * job.T * 3 * C + h * D +
                        channel; /* the call's tokens, from its first on */
    bf16 *cache = job.kv_cache + b * job.cache_length * 2 * C + h * D + channel;

    float query[CHUNK] = {}, out[CHUNK] = {}, max = -FLT_MAX, sum = 0;
    if (active) {
        load(query, fresh + t * 3 * C);
        if (group < 2) /* its key, its value */
            *reinterpret_cast<uint4 *>(
                cache + ((job.offset + t) * 2 + group) *
                            C) = *reinterpret_cast<const uint4 *>(fresh + (t * 3 + 1 + group) * C);
    }
    for (size_t start = group; start - group < length; start += F::AHEAD * F::GROUPS) {
        float key[F::AHEAD][CHUNK] = {}, value[F::AHEAD][CHUNK] = {}, s[F::AHEAD];
#pragma unroll
        for (int i = 0; i < F::AHEAD; i++) {
            const size_t j = start + (size_t)i * F::GROUPS;
            if (!active || j >= length) continue;
            const bf16 *from = j < job.offset ? cache + j * 2 * C : fresh + ((j - job.offset) * 3 + 1) * C;
            load(key[i], from);
            load(value[i], from + C);
        }
        float high = max;
#pragma unroll
        for (int i = 0; i < F::AHEAD; i++) {
            s[i] = 0;
#pragma unroll
            for (int k = 0; k < CHUNK; k++) s[i] = fmaf(query[k], key[i][k], s[i]);
#pragma unroll
            for (int lanes = F::LANES / 2; lanes > 0; lanes /= 2)
                s[i] += __shfl_xor_sync(0xffffffffu, s[i], lanes);
            s[i] = start + (size_t)i * F::GROUPS < length ? s[i] * job.scale * LOG2_E : -INFINITY;
            high = fmaxf(high, s[i]);
        }
        const float factor = exp_2(max - high);
        max = high, sum *= factor;
#pragma unroll
        for (int k = 0; k < CHUNK; k++) out[k] *= factor;
#pragma unroll
        for (int i = 0; i < F::AHEAD; i++) {
            const float p = exp_2(s[i] - max);
            sum += p;
#pragma unroll
            for (int k = 0; k < CHUNK; k++) out[k] = fmaf(p, value[i][k], out[k]);
        }
    }
    if (active) store(&group_out[group][channel], out);
    if (channel == 0) group_max[group] = max, group_sum[group] = sum;
    __syncthreads();

    const unsigned d = threadIdx.x;
    if (d >= D) return;
    float all = -FLT_MAX, total = 0, mixed = 0;
    for (int i = 0; i < F::GROUPS; i++) all = fmaxf(all, group_max[i]);
    for (int i = 0; i < F::GROUPS; i++) {
        const float factor = exp_2(group_max[i] - all);
        total = fmaf(group_sum[i], factor, total);
        mixed = fmaf(group_out[i][d], factor, mixed);
    }
    job.out[(token * job.H + h) * D + d] = from_float<bf16>(mixed / total);
}

/* ==== the backend ==== */
/* Runs `template <D>` code for a D that can_run let through. */
#define FOR_D(value, code)                                               \
    do {                                                                 \
        switch (value) {                                                 \
        case 32: {                                                       \
            constexpr int D = 32;                                        \
            code;                                                        \
        } break;                                                         \
        case 64: {                                                       \
            constexpr int D = 64;                                        \
            code;                                                        \
        } break;                                                         \
        case 96: {                                                       \
            constexpr int D = 96;                                        \
            code;                                                        \
        } break;                                                         \
        case 128: {                                                      \
            constexpr int D = 128;                                       \
            code;                                                        \
        } break;                                                         \
        default:                                                         \
            cuda_fail("flash_mma", "a head size that it does not have"); \
        }                                                                \
    } while (0)

static size_t padded(size_t T) {
    return (T + QUERIES - 1) / QUERIES * QUERIES;
}

/* Blocks are numbered in 31 bits, rows of a head and elements from token to token in 32. */
static bool flash_can_run(const AttentionShape *shape, Error *reason) {
    size_t channels = 0, rows = 0;
    if (shape->D != 32 && shape->D != 64 && shape->D != 96 && shape->D != 128)
        return error_set(reason, "heads of %zu channels; flash_mma has 32, 64, 96 and 128", shape->D);
    if (shape->T > INT_MAX - 2 * QUERIES || !size_mul(shape->H, 3 * shape->D, &channels) ||
        channels > INT_MAX)
        return error_set(reason,
                         "%zu heads and %zu tokens a sequence; flash_mma counts 3 H D and T in 31 bits",
                         shape->H, shape->T);
    if (!size_mul(shape->B, shape->H, &rows) || !size_mul(rows, padded(shape->T) / QUERIES, &rows) ||
        rows > INT_MAX)
        return error_set(reason,
                         "%zu sequences of %zu tokens and %zu heads are more than the 2^31 tiles of 64 "
                         "tokens that flash_mma can number",
                         shape->B, shape->T, shape->H);
    return true;
}

static size_t flash_saved_bytes(const AttentionShape *shape) {
    (void)shape;
    return 0;
}

/* dQ's sums, where they are used: floats for each padded row of each head. */
static size_t flash_scratch_bytes(const AttentionShape *shape) {
    size_t bytes = 0;
    if (!shape->training || shape->deterministic) return 0;
    if (shape->T > SIZE_MAX - QUERIES || !size_mul(shape->B, shape->H, &bytes) ||
        !size_mul(bytes, padded(shape->T), &bytes) || !size_mul(bytes, shape->D * sizeof(float), &bytes))
        return SIZE_MAX;
    return bytes;
}

static Job job_of(const AttentionCall *call) {
    Job job = {};
    job.qkv = (bf16 *)call->qkv, job.out = (bf16 *)call->out, job.lse = call->lse;
    job.d_out = (const bf16 *)call->d_out, job.d_qkv = (bf16 *)call->d_qkv;
    job.heads = (unsigned)(call->B * call->H), job.T = (unsigned)call->T, job.H = (unsigned)call->H;
    job.C = (unsigned)(call->H * call->D);
    job.padded = (unsigned)padded(call->T), job.scale = call->scale;
    if (call->rotary)
        job.angles = reinterpret_cast<const bf16 *>(cuda_angles(call->stream, call->T, call->D / 2).half);
    return job;
}

/* Tiles a head, of `rows` rows; heads whose `row_bytes` a token fill half of the cache, at least one. */
static void plan_order(Job *job, const Stream *stream, size_t rows, size_t row_bytes) {
    const size_t heads = (size_t)stream->device.l2CacheSize / 2 / (row_bytes * job->T);
    job->tiles = (unsigned)((job->T + rows - 1) / rows);
    job->group = heads < 1 ? 1 : heads < job->heads ? (unsigned)heads : job->heads;
}

/* Whether `blocks` blocks that ask for `bytes` fit on a multiprocessor, of whose memory a single one may have
 * `most`, all but the 1 KB that the system takes of each. LEAST is what every GPU of the kind has: where tiles
 * fit there, no others are compiled. */
static constexpr size_t LEAST = 99 << 10;
static constexpr bool fits(size_t most, size_t blocks, size_t bytes) {
    return blocks * (bytes + 1024) <= most + 1024;
}

/* What a block may have here, or less: TRAIN_GPT_SHARED_KB=99 makes a GPU take the tiles of a smaller one. */
static size_t shared_limit(const Stream *stream) {
    const char *text = getenv("TRAIN_GPT_SHARED_KB");
    const size_t wanted = text ? (size_t)strtoul(text, NULL, 10) << 10 : 0;
    return wanted > 0 && wanted < stream->shared_bytes ? wanted : stream->shared_bytes;
}

template <int D, int M, int STAGES> static void forward_with(const AttentionCall *call) {
    typedef Forward<D, M, STAGES> F;
    Job job = job_of(call);
    plan_order(&job, call->stream, F::ROWS, 2 * D * sizeof(bf16));
    launch(call->stream, "flash_mma forward", forward_kernel<D, M, STAGES>, (size_t)job.heads * job.tiles,
           F::THREADS, F::BYTES, job);
}

template <int D> static void forward_of(const AttentionCall *call) {
    constexpr size_t ahead = Forward<D, 2, 2>::BYTES, in_turns = Forward<D, 2, 1>::BYTES;
    const size_t limit = shared_limit(call->stream);
    if constexpr (fits(LEAST, 2, ahead)) {
        forward_with<D, 2, 2>(call);
    } else if (fits(limit, 2, ahead)) {
        forward_with<D, 2, 2>(call);
    } else if constexpr (fits(LEAST, 2, in_turns)) {
        forward_with<D, 2, 1>(call);
    } else if (fits(limit, 2, in_turns)) {
        forward_with<D, 2, 1>(call);
    } else {
        forward_with<D, 1, 1>(call);
    }
}

static void flash_forward(const AttentionCall *call) {
    FOR_D(call->D, forward_of<D>(call));
}

template <int D, int WARPS, int STAGES> static void backward_with(const AttentionCall *call) {
    typedef Backward<D, WARPS, STAGES> F;
    Stream *stream = call->stream;
    Job job = job_of(call);
    const size_t rows = (size_t)job.heads * job.padded, tiles = rows / QUERIES;
    job.dq = call->deterministic ? NULL : (float *)call->scratch;

    job.tiles = job.padded / QUERIES;
    launch(stream, "flash_mma backward, rows", prepare_kernel<D>, tiles, PREPARE_THREADS, 0, job);
    plan_order(&job, stream, F::ROWS, 2 * D * sizeof(bf16) + (job.dq ? D * sizeof(float) : 0));
    launch(stream, "flash_mma backward", backward_kernel<D, WARPS, STAGES>, (size_t)job.heads * job.tiles,
           F::THREADS, F::BYTES, job);
    if (job.dq) {
        job.tiles = job.padded / QUERIES;
        const size_t groups = call->B * ((call->H + TOGETHER - 1) / TOGETHER);
        launch(stream, "flash_mma backward, dQ", finish_kernel<D, WARPS, STAGES>, groups * job.tiles,
               F::THREADS, QUERIES * D * sizeof(bf16), job);
    } else {
        typedef QueryGradient<D> G;
        plan_order(&job, stream, QUERIES, 2 * D * sizeof(bf16));
        launch(stream, "flash_mma backward, dQ again", query_gradient_kernel<D>, tiles, G::THREADS, G::BYTES,
               job);
    }
}

template <int D> static void backward_of(const AttentionCall *call) {
    constexpr size_t ahead = Backward<D, 8, 2>::BYTES, single = Backward<D, 8, 1>::BYTES;
    const size_t limit = shared_limit(call->stream);
    if constexpr (fits(LEAST, 1, ahead)) {
        backward_with<D, 8, 2>(call);
    } else if (fits(limit, 1, ahead)) {
        backward_with<D, 8, 2>(call);
    } else if constexpr (fits(LEAST, 1, single)) {
        backward_with<D, 8, 1>(call);
    } else {
        backward_with<D, 4, 1>(call);
    }
}

static void flash_backward(const AttentionCall *call) {
    FOR_D(call->D, backward_of<D>(call));
}

template <int D> static void cached_of(const AttentionCall *call) {
    const CachedJob job = {
        (const bf16 *)call->qkv, (bf16 *)call->out, (bf16 *)call->kv_cache, call->T, call->H, call->offset,
        call->cache_length,      call->scale};
    launch(call->stream, "flash_mma with the cache", cached_kernel<D>, call->B * call->T * call->H,
           Cached<D>::THREADS, 0, job);
}

static void flash_cached(const AttentionCall *call) {
    FOR_D(call->D, cached_of<D>(call));
}

extern "C" {
extern const Attention attention_flash_mma;
}
const Attention attention_flash_mma = {"flash_mma",
                                       "cuda",
                                       "no table: log-sum-exp kept, P made again; mma.sync",
                                       true,
                                       flash_can_run,
                                       flash_saved_bytes,
                                       flash_scratch_bytes,
                                       flash_forward,
                                       flash_backward,
                                       flash_cached};
