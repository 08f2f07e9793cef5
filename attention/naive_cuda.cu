/* naive_cuda.cu - attention as the paper writes it (Vaswani et al. 2017, equation 1), on an NVIDIA GPU: the
 * table P (T, T) of every head is computed whole by batched matrix products that read q, k and v where they
 * lie, and is kept for the backward pass. What the flash kernels are held against, so it is written to be
 * fast where that costs no clarity. Twice from one text: with bf16 tables for ops_cuda, with fp32 ones for
 * ops_cuda_fp32 (A is the activation's type).
 *
 * The heads of all sequences are taken in parts, so that S = Q K^T in fp32 (lse needs it) and dP come and go
 * within the GPU's cache, and scratch memory stays small: only P goes to memory and comes back. Rows of a
 * table are padded to Tp, a multiple of 8, so that products over any T read whole vectors; what lies in the
 * padding is read by nobody. */
#include "attention.h"

#include "../cuda_stream.h"

#include <float.h>

enum {
    PART_BYTES = 48 << 20, /* of S in fp32, unless one head has more: about what stays in the cache */
    ROWS_PER_BLOCK = 8     /* of the softmax kernels: a warp a row */
};

static size_t padded(size_t T) {
    return (T + 7) / 8 * 8;
}

/* Bytes of `count` tables with elements of that size; SIZE_MAX where they overflow. */
static size_t table_bytes(size_t count, size_t T, size_t element) {
    size_t bytes = 0;
    if (T > SIZE_MAX - 8 || !size_mul(T, padded(T), &bytes) || !size_mul(bytes, count, &bytes) ||
        !size_mul(bytes, element, &bytes))
        return SIZE_MAX;
    return bytes;
}

/* Sequences and heads of each that are worked on at once: whole sequences where one fits, else heads of one.
 * So a part's tables lie one after the other in (B, H, T, T). */
typedef struct Part {
    size_t sequences, heads;
} Part;
static Part part_of(size_t B, size_t T, size_t H) {
    const size_t head = table_bytes(1, T, sizeof(float)), fit = head > PART_BYTES ? 1 : PART_BYTES / head;
    if (fit >= H) return {fit / H < B ? fit / H : B, H};
    const size_t parts = (H + fit - 1) / fit; /* of equal size, or nearly */
    return {1, (H + parts - 1) / parts};
}

template <typename A> static bool naive_can_run(const AttentionShape *shape, Error *reason) {
    (void)shape, (void)reason;
    return true;
}

template <typename A> static size_t naive_saved_bytes(const AttentionShape *shape) {
    size_t heads = 0;
    if (!shape->training) return 0;
    return size_mul(shape->B, shape->H, &heads) ? table_bytes(heads, shape->T, sizeof(A)) : SIZE_MAX;
}

/* A part's S in fp32 (in the backward pass its dP), and its P where that is not kept. */
template <typename A> static size_t naive_scratch_bytes(const AttentionShape *shape) {
    if (table_bytes(1, shape->T, 1) == SIZE_MAX) return SIZE_MAX;
    const Part part = part_of(shape->B, shape->T, shape->H);
    return table_bytes(part.sequences * part.heads, shape->T, sizeof(float) + sizeof(A));
}

/* ==== matrix products over a part ==== */

/* Where a part's matrices lie: the first one, and how many elements further the next head's and the next
 * sequence's are. */
typedef struct Place {
    const void *first;
    size_t head_step, sequence_step, stride; /* stride: from row to row */
} Place;

static const void *at(const Place *place, size_t sequence, size_t head, size_t element) {
    return (const uint8_t *)place->first +
           (sequence * place->sequence_step + head * place->head_step) * element;
}

static size_t element_size(cudaDataType_t type) {
    return type == CUDA_R_32F ? sizeof(float) : sizeof(bf16);
}

/* m, n, k, alpha, types and transposes come in `matmul`. The library takes one step from matrix to matrix,
 * so the longer of sequences and heads is its batch and the other one a loop. */
static void multiply(Stream *stream, const Part *part, Matmul matmul, Place a, Place b, Place c) {
    const bool over_heads = part->heads >= part->sequences;
    const size_t in = element_size(matmul.in), out = element_size(matmul.out);
    matmul.lda = a.stride, matmul.ldb = b.stride, matmul.ldc = c.stride;
    matmul.batch = over_heads ? part->heads : part->sequences;
    matmul.a_step = over_heads ? a.head_step : a.sequence_step;
    matmul.b_step = over_heads ? b.head_step : b.sequence_step;
    matmul.c_step = over_heads ? c.head_step : c.sequence_step;
    for (size_t i = 0; i < (over_heads ? part->sequences : part->heads); i++) {
        const size_t sequence = over_heads ? i : 0, head = over_heads ? 0 : i;
        matmul.a = at(&a, sequence, head, in), matmul.b = at(&b, sequence, head, in);
        matmul.c = (void *)at(&c, sequence, head, out);
        cuda_matmul(stream, &matmul);
    }
}

template <typename A>
static Matmul product(bool transpose_a, bool transpose_b, size_t m, size_t n, size_t k, float alpha) {
    Matmul matmul = {};
    matmul.transpose_a = transpose_a, matmul.transpose_b = transpose_b;
    matmul.m = m, matmul.n = n, matmul.k = k, matmul.alpha = alpha;
    matmul.in = matmul.out = ActType<A>::cuda;
    return matmul;
}

/* ==== softmax ==== */

/* Rows of S (rows, Tp) become rows of P: softmax over columns 0 .. i, zeros after them; lse (rows). Row r of
 * a part is row i = r % T of its table. A warp a row, which it reads twice: for maximum and sum together,
 * then, from the cache, for P. Starting from the least float instead of -inf keeps -inf - -inf away; +inf
 * and NaN give NaN. */
template <typename A>
__global__ static void __launch_bounds__(32 * ROWS_PER_BLOCK)
    softmax_kernel(A *p, float *lse, const float *s, size_t rows, size_t T, size_t Tp) {
    const size_t row = (size_t)blockIdx.x * ROWS_PER_BLOCK + threadIdx.y, i = row % T;
    if (row >= rows) return;
    const float *from = s + row * Tp;
    A *to = p + row * Tp;
    float max = -FLT_MAX, sum = 0;
    for (size_t j = threadIdx.x * 4; j <= i; j += 32 * 4) {
        float x[4], high = max;
        load(x, from + j);
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (j + k <= i) high = fmaxf(high, x[k]);
        sum *= exp_for<A>(max - high);
        max = high;
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (j + k <= i) sum += exp_for<A>(x[k] - max);
    }
    const float all = warp_max(max);
    sum = warp_sum(sum * exp_for<A>(max - all));
    if (threadIdx.x == 0) lse[row] = all + logf(sum);
    const float inverse = 1.0f / sum;
    for (size_t j = threadIdx.x * 4; j < Tp; j += 32 * 4) {
        float x[4] = {0, 0, 0, 0};
        if (j <= i) load(x, from + j);
#pragma unroll
        for (int k = 0; k < 4; k++) x[k] = j + k <= i ? exp_for<A>(x[k] - all) * inverse : 0.0f;
        store(to + j, x);
    }
}

/* dS = P * (dP - delta), delta = rowsum(dO * O), over dP's own memory; 0 above the diagonal, whatever dP is
 * there. d_out and out are (B, T, H, D), rows of them counted from the part's first head. A warp a row. */
template <typename A>
__global__ static void __launch_bounds__(32 * ROWS_PER_BLOCK)
    softmax_backward_kernel(A *ds, const A *p, const A *d_out, const A *out, size_t rows, size_t T, size_t Tp,
                            size_t H, size_t D, size_t first_head) {
    const size_t row = (size_t)blockIdx.x * ROWS_PER_BLOCK + threadIdx.y, i = row % T;
    if (row >= rows) return;
    const size_t head = first_head + row / T, token = head / H * T + i, start = (token * H + head % H) * D;
    float delta = 0;
    for (size_t d = threadIdx.x; d < D; d += 32)
        delta += to_float(d_out[start + d]) * to_float(out[start + d]);
    delta = warp_sum(delta);
    const A *weights = p + row * Tp;
    A *to = ds + row * Tp;
    for (size_t j = threadIdx.x * 4; j < Tp; j += 32 * 4) {
        float x[4] = {0, 0, 0, 0}, w[4] = {0, 0, 0, 0};
        if (j <= i) {
            load(x, to + j);
            load(w, weights + j);
        }
#pragma unroll
        for (int k = 0; k < 4; k++) x[k] = j + k <= i ? w[k] * (x[k] - delta) : 0.0f;
        store(to + j, x);
    }
}

/* ==== both passes ==== */

/* The parts of a call, one after the other: b, h its first sequence and head. */
#define FOR_PARTS(call, part, b, h)                          \
    for (size_t b = 0; b < (call)->B; b += (part).sequences) \
        for (size_t h = 0; h < (call)->H; h += (part).heads)

/* What is left of a part at the end of the sequences or heads. */
static Part part_at(const AttentionCall *call, const Part *part, size_t b, size_t h) {
    Part here = *part;
    if (call->B - b < here.sequences) here.sequences = call->B - b;
    if (call->H - h < here.heads) here.heads = call->H - h;
    return here;
}

/* which: 0 q, 1 k, 2 v of a (B, T, 3, H, D). */
template <typename A>
static Place in_qkv(const AttentionCall *call, const act_t *qkv, size_t which, size_t b, size_t h) {
    const size_t C = call->H * call->D;
    return {(const A *)qkv + b * call->T * 3 * C + which * C + h * call->D, call->D, call->T * 3 * C, 3 * C};
}
template <typename A> static Place in_out(const AttentionCall *call, const act_t *out, size_t b, size_t h) {
    const size_t C = call->H * call->D;
    return {(const A *)out + b * call->T * C + h * call->D, call->D, call->T * C, C};
}
/* A part's own tables, one after the other. */
static Place in_tables(const AttentionCall *call, const Part *here, const void *tables) {
    const size_t Tp = padded(call->T);
    return {tables, call->T * Tp, here->heads * call->T * Tp, Tp};
}

static unsigned row_blocks(size_t rows) {
    return (unsigned)((rows + ROWS_PER_BLOCK - 1) / ROWS_PER_BLOCK);
}

template <typename A> static void naive_forward(const AttentionCall *call) {
    const size_t T = call->T, H = call->H, D = call->D, Tp = padded(T);
    Stream *stream = call->stream;
    const Part part = part_of(call->B, T, H);
    float *s = (float *)call->scratch;
    FOR_PARTS(call, part, b, h) {
        const Part here = part_at(call, &part, b, h);
        const size_t first = b * H + h, rows = here.sequences * here.heads * T;
        A *p = call->training ? (A *)call->saved + first * T * Tp
                              : (A *)(s + part.sequences * part.heads * T * Tp);
        const Place q = in_qkv<A>(call, call->qkv, 0, b, h), k = in_qkv<A>(call, call->qkv, 1, b, h);
        const Place v = in_qkv<A>(call, call->qkv, 2, b, h);
        /* S = scale * Q K^T */
        Matmul scores = product<A>(false, true, T, T, D, call->scale);
        scores.out = CUDA_R_32F;
        multiply(stream, &here, scores, q, k, in_tables(call, &here, s));
        /* P = softmax(S) */
        softmax_kernel<A><<<row_blocks(rows), dim3(32, ROWS_PER_BLOCK), 0, stream->stream>>>(
            p, call->lse + first * T, s, rows, T, Tp);
        cuda_launched(stream, "softmax");
        /* O = P V */
        multiply(stream, &here, product<A>(false, false, T, D, T, 1), in_tables(call, &here, p), v,
                 in_out<A>(call, call->out, b, h));
    }
}

template <typename A> static void naive_backward(const AttentionCall *call) {
    const size_t T = call->T, H = call->H, D = call->D, Tp = padded(T);
    Stream *stream = call->stream;
    const Part part = part_of(call->B, T, H);
    A *ds = (A *)call->scratch;
    FOR_PARTS(call, part, b, h) {
        const Part here = part_at(call, &part, b, h);
        const size_t first = b * H + h, rows = here.sequences * here.heads * T;
        const A *p = (const A *)call->saved + first * T * Tp;
        const Place table = in_tables(call, &here, ds), weights = in_tables(call, &here, p);
        const Place q = in_qkv<A>(call, call->qkv, 0, b, h), k = in_qkv<A>(call, call->qkv, 1, b, h);
        const Place v = in_qkv<A>(call, call->qkv, 2, b, h), d_out = in_out<A>(call, call->d_out, b, h);
        /* dV = P^T dO */
        multiply(stream, &here, product<A>(true, false, T, D, T, 1), weights, d_out,
                 in_qkv<A>(call, call->d_qkv, 2, b, h));
        /* dP = dO V^T */
        multiply(stream, &here, product<A>(false, true, T, T, D, 1), d_out, v, table);
        /* dS = P * (dP - delta) */
        softmax_backward_kernel<A><<<row_blocks(rows), dim3(32, ROWS_PER_BLOCK), 0, stream->stream>>>(
            ds, p, (const A *)call->d_out, (const A *)call->out, rows, T, Tp, H, D, first);
        cuda_launched(stream, "softmax_backward");
        /* dQ = scale * dS K;  dK = scale * dS^T Q */
        multiply(stream, &here, product<A>(false, false, T, D, T, call->scale), table, k,
                 in_qkv<A>(call, call->d_qkv, 0, b, h));
        multiply(stream, &here, product<A>(true, false, T, D, T, call->scale), table, q,
                 in_qkv<A>(call, call->d_qkv, 1, b, h));
    }
}

/* ==== generation ==== */
enum { CACHED_THREADS = 128 };

/* k and v of the new tokens to their places: qkv (B, T, 3, H, D), kv_cache (B, cache_length, 2, H, D). A
 * block a token; C = H * D. */
template <typename A>
__global__ static void append_kernel(A *kv_cache, const A *qkv, size_t T, size_t C, size_t offset,
                                     size_t cache_length) {
    const size_t token = blockIdx.x, slot = token / T * cache_length + offset + token % T;
    for (size_t c = threadIdx.x; c < 2 * C; c += blockDim.x)
        kv_cache[slot * 2 * C + c] = qkv[token * 3 * C + C + c];
}

/* scale * q.k of a warp's lanes together. */
template <typename A> __device__ static float score(const A *q, const A *k, size_t D, float scale) {
    float sum = 0;
    for (size_t d = threadIdx.x % 32; d < D; d += 32) sum += to_float(q[d]) * to_float(k[d]);
    return scale * warp_sum(sum);
}

/* A block for each (b, t, h): a query against the cache's positions 0 .. offset + t. Each warp scores every
 * fourth key, first for maximum and sum, then again for the weights of CACHED_THREADS keys at a time, with
 * which each thread adds up one channel of v (D > CACHED_THREADS: the channels in turns). No length or D is
 * too large. */
template <typename A>
__global__ static void __launch_bounds__(CACHED_THREADS, 8)
    cached_kernel(A *out, const A *qkv, const A *kv_cache, size_t T, size_t H, size_t D, size_t offset,
                  size_t cache_length, float scale) {
    constexpr unsigned warps = CACHED_THREADS / 32;
    __shared__ float weight[CACHED_THREADS], warp_highest[warps], warp_total[warps];
    const size_t h = blockIdx.x % H, token = blockIdx.x / H, b = token / T, length = offset + token % T + 1;
    const size_t stride = 2 * H * D;
    const A *q = qkv + token * 3 * H * D + h * D;
    const A *k = kv_cache + b * cache_length * stride + h * D, *v = k + H * D;
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    float max = -FLT_MAX, sum = 0;
    for (size_t j = warp; j < length; j += warps) {
        const float s = score(q, k + j * stride, D, scale), high = fmaxf(max, s);
        sum = sum * exp_for<A>(max - high) + exp_for<A>(s - high);
        max = high;
    }
    if (lane == 0) warp_highest[warp] = max, warp_total[warp] = sum;
    __syncthreads();
    float all = -FLT_MAX, total = 0;
    for (unsigned w = 0; w < warps; w++) all = fmaxf(all, warp_highest[w]);
    for (unsigned w = 0; w < warps; w++) total += warp_total[w] * exp_for<A>(warp_highest[w] - all);

    for (size_t first = 0; first < D; first += CACHED_THREADS) {
        const size_t d = first + threadIdx.x;
        float mixed = 0;
        for (size_t start = 0; start < length; start += CACHED_THREADS) {
            const size_t count = length - start < CACHED_THREADS ? length - start : (size_t)CACHED_THREADS;
            for (size_t j = warp; j < count; j += warps) {
                const float s = score(q, k + (start + j) * stride, D, scale);
                if (lane == 0) weight[j] = exp_for<A>(s - all);
            }
            __syncthreads();
            if (d < D)
                for (size_t j = 0; j < count; j++) mixed += weight[j] * to_float(v[(start + j) * stride + d]);
            __syncthreads();
        }
        if (d < D) out[(token * H + h) * D + d] = from_float<A>(mixed / total);
    }
}

template <typename A> static void naive_cached(const AttentionCall *call) {
    const size_t tokens = call->B * call->T, H = call->H, D = call->D;
    Stream *stream = call->stream;
    append_kernel<A><<<(unsigned)tokens, 256, 0, stream->stream>>>(
        (A *)call->kv_cache, (const A *)call->qkv, call->T, H * D, call->offset, call->cache_length);
    cuda_launched(stream, "append to the cache");
    cached_kernel<A><<<(unsigned)(tokens * H), CACHED_THREADS, 0, stream->stream>>>(
        (A *)call->out, (const A *)call->qkv, (const A *)call->kv_cache, call->T, H, D, call->offset,
        call->cache_length, call->scale);
    cuda_launched(stream, "attention with the cache");
}

template <typename A> static constexpr Attention naive_for(const char *device) {
    return {"naive",
            device,
            "the paper's T x T table, kept for the backward pass, by cuBLAS",
            false,
            naive_can_run<A>,
            naive_saved_bytes<A>,
            naive_scratch_bytes<A>,
            naive_forward<A>,
            naive_backward<A>,
            naive_cached<A>};
}

extern "C" {
extern const Attention attention_naive_cuda, attention_naive_cuda_fp32;
}
const Attention attention_naive_cuda = naive_for<bf16>("cuda");
const Attention attention_naive_cuda_fp32 = naive_for<float>("cuda-fp32");
