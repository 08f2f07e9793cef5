/* ops_cuda.cu - the operations of ops.h on an NVIDIA GPU: cuBLASLt for matrix products, kernels of our own
 * for the rest. Twice from one text: `ops_cuda`, whose activations are bf16, and `ops_cuda_fp32`, the same
 * in fp32 (no TF32), against which the first is checked and which is checked against the CPU. A is the
 * activation's type everywhere; all arithmetic between a load and a store is fp32.
 *
 * Kernels read and write 16 bytes at a time, W = wide<A> activations, where the channels divide by it, and
 * else one activation (W = 1). Rows are blocks, of a norm warps where they fit: one or a few vectors a thread.
 *
 * Order of sums. Nothing is added by atomics. A sum over rows has two stages: each of a fixed number of
 * blocks adds the rows that are its own, in their order, then add_columns adds the blocks' sums in theirs; so
 * two runs on one kind of GPU are bit-equal. */
#include "../cuda_stream.h"

#include <cub/device/device_radix_sort.cuh>
#include <float.h>
#include <stdlib.h>
#include <string.h>

#include "ops.h"

enum {
    MOST_THREADS = 512,     /* of a block that works on a row */
    BLOCKS_PER_SM = 16,     /* of sums over rows: enough to hide the latency of a row after the other */
    HEAD_ROWS = 8192,       /* rows of logits that exist at once, at most ... */
    HEAD_BYTES = 1 << 30,   /* ... and bytes of them, for large vocabularies */
    CHUNK_FLOATS = 1 << 14, /* parameters of one tensor that a block takes */
    TOKEN_BITS = 24         /* of a token's id: gpt_check_config's limit */
};

/* A part of one tensor: the unit of the gradient norm and of the update. */
struct SpanChunk {
    size_t offset;
    int32_t count, span;
    bool decay;
};

/* ==== shapes of launches ==== */
static unsigned blocks_for(size_t items, size_t per_block) {
    return (unsigned)((items + per_block - 1) / per_block);
}

/* Threads of a block that shares a row of `items`. */
static unsigned row_threads(size_t items) {
    const size_t whole = (items + 31) / 32 * 32, most = MOST_THREADS;
    return (unsigned)(whole < most ? whole : most);
}

template <typename A> static bool is_wide(size_t C) {
    return C % wide<A> == 0;
}

/* Calls launch<W>(...) for the width that the channels allow. */
#define FOR_WIDTH(A, C, launch, ...)                        \
    do {                                                    \
        if (is_wide<A>(C)) launch<A, wide<A>>(__VA_ARGS__); \
        else launch<A, 1>(__VA_ARGS__);                     \
    } while (0)

/* A kernel with dynamic shared memory may have to ask for more than the usual 48 KB. */
template <typename Kernel> static void allow_shared(Kernel *kernel, size_t bytes) {
    if (bytes > 48 * 1024)
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
}

/* ==== sums over a block ==== */

/* N sums at once; every thread gets them. Ends with all threads past their reads of what is shared. */
template <int N> __device__ void block_sum(float (&x)[N]) {
    __shared__ float part[N][32];
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = warp_sum(x[i]);
    if (warps == 1) return;
#pragma unroll
    for (int i = 0; i < N; i++)
        if (lane == 0) part[i][warp] = x[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = warp_sum(lane < warps ? part[i][lane] : 0.0f);
    __syncthreads();
}

__device__ static float block_max(float x) {
    __shared__ float part[32];
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    x = warp_max(x);
    if (lane == 0) part[warp] = x;
    __syncthreads();
    x = warp_max(part[lane < warps ? lane : 0]);
    __syncthreads();
    return x;
}

/* Thread 0 gets it. */
__device__ static double block_sum_double(double x) {
    __shared__ double part[32];
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    for (int step = 16; step > 0; step /= 2) x += __shfl_down_sync(0xffffffffu, x, step);
    if (lane == 0) part[warp] = x;
    __syncthreads();
    if (threadIdx.x == 0)
        for (unsigned w = 1; w < warps; w++) x += part[w];
    return x;
}

/* first[c], c < split, and second[c - split] += the sum of `parts` (parts, columns) over its rows. Blocks of
 * 32 columns x 32 strands of rows. */
__global__ static void __launch_bounds__(1024)
    add_columns_kernel(float *first, float *second, size_t split, const float *parts, size_t rows,
                       size_t columns) {
    __shared__ float strand[32][33];
    const size_t c = (size_t)blockIdx.x * 32 + threadIdx.x;
    float sum = 0;
    if (c < columns) {
#pragma unroll 8
        for (size_t row = threadIdx.y; row < rows; row += 32) sum += parts[row * columns + c];
    }
    strand[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    sum = warp_sum(strand[threadIdx.x][threadIdx.y]); /* warp y adds column y's strands */
    const size_t column = (size_t)blockIdx.x * 32 + threadIdx.y;
    if (threadIdx.x != 0 || column >= columns) return;
    if (column < split) first[column] += sum;
    else second[column - split] += sum;
}

static void add_columns(Stream *stream, float *first, float *second, size_t split, const float *parts,
                        size_t rows, size_t columns) {
    add_columns_kernel<<<blocks_for(columns, 32), dim3(32, 32), 0, stream->stream>>>(first, second, split,
                                                                                     parts, rows, columns);
    cuda_launched(stream, "add_columns");
}

/* ==== dropout ==== */
typedef struct Mask {
    const StepState *state;          /* NULL: nothing is dropped */
    uint64_t key, first_row, groups; /* groups of four channels, a row */
    uint32_t threshold;
    float keep;
} Mask;

static Mask mask_of(const Dropout *dropout, size_t C) {
    Mask mask = {NULL, 0, 0, 0, 0, 1};
    if (!(dropout->rate > 0)) return mask;
    mask.state = dropout->state;
    mask.key = mix64(dropout->seed, dropout->site), mask.first_row = dropout->first_row,
    mask.groups = (C + 3) / 4;
    mask.threshold = (uint32_t)((double)dropout->rate * 4294967296.0);
    mask.keep = 1.0f / (1.0f - dropout->rate);
    return mask;
}

/* x, channels c .. c + W - 1 of a row, times the mask. W is 1, 4 or 8, c a multiple of it. */
template <int W> __device__ static void apply_mask(const Mask &mask, float (&x)[W], size_t row, size_t c) {
    if (!mask.state) return;
    const uint64_t group = (mask.first_row + row) * mask.groups + c / 4, step = mask.state->step;
#pragma unroll
    for (int i = 0; i < W; i += 4) {
        const Philox random = philox(mask.key, group + (uint64_t)(i / 4), step);
        if (W == 1) {
            const unsigned k = (unsigned)c % 4;
            const uint32_t low = k == 0 ? random.word[0] : random.word[1];
            const uint32_t word = k < 2 ? low : k == 2 ? random.word[2] : random.word[3];
            x[0] = word >= mask.threshold ? x[0] * mask.keep : 0.0f;
        } else {
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (i + j < W) x[i + j] = random.word[j] >= mask.threshold ? x[i + j] * mask.keep : 0.0f;
        }
    }
}

/* ==== the device ==== */
static Stream *gpu_open(int index, int threads, Error *err) {
    (void)threads;
    return cuda_stream_open(index, err);
}

static void gpu_synchronize(Stream *stream) {
    CUDA_CHECK(cudaStreamSynchronize(stream->stream));
}

static void gpu_describe(Stream *stream, char *text, size_t size) {
    int driver = 0;
    CUDA_CHECK(cudaDriverGetVersion(&driver));
    snprintf(text, size, "%s, sm_%d%d, %d SMs, %zu GB, driver for CUDA %d.%d, cuBLASLt %zu",
             stream->device.name, stream->device.major, stream->device.minor,
             stream->device.multiProcessorCount, stream->device.totalGlobalMem >> 30, driver / 1000,
             driver % 1000 / 10, cublasLtGetVersion());
}

static void gpu_memory(Stream *stream, size_t *free_bytes, size_t *total_bytes) {
    (void)stream;
    CUDA_CHECK(cudaMemGetInfo(free_bytes, total_bytes));
}

/* bf16 with fp32 sums, without sparsity, by NVIDIA's data sheets; of the longest name that fits. fp32 runs
 * outside of the matrix units, and nobody asks for its peak. */
template <typename A> static double gpu_peak_flops(Stream *stream) {
    static const struct {
        const char *name;
        double tera;
    } peaks[] = {{"A100", 312},       {"A800", 312},        {"A10", 125},
                 {"A30", 165},        {"A40", 149.7},       {"L4", 121},
                 {"L40", 181},        {"L40S", 362},        {"H100 PCIe", 756},
                 {"H100", 989.4},     {"H800", 989.4},      {"H200", 989.4},
                 {"GH200", 989.4},    {"B200", 2250},       {"RTX 3090", 71},
                 {"RTX 4090", 165.2}, {"RTX A6000", 154.8}, {"RTX 6000 Ada", 364.2},
                 {"RTX 5090", 209.5}};
    double peak = 0;
    size_t longest = 0;
    for (size_t i = 0; sizeof(A) == 2 && i < sizeof peaks / sizeof peaks[0]; i++) {
        const char *found = strstr(stream->device.name, peaks[i].name);
        const size_t length = strlen(peaks[i].name);
        const char next = found ? found[length] : 0, before = found > stream->device.name ? found[-1] : ' ';
        if (!found || before != ' ' || (next && next != ' ' && next != '-') || length < longest) continue;
        peak = peaks[i].tera * 1e12, longest = length;
    }
    return peak;
}

static void *gpu_allocate(Stream *stream, size_t bytes, Error *err) {
    void *memory = NULL;
    size_t free_bytes = 0, total = 0;
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total));
    const cudaError_t error = cudaMalloc(&memory, bytes);
    if (error != cudaSuccess) {
        (void)cudaGetLastError(); /* it was answered: the next check shall not find it */
        error_set(err,
                  "%zu MB of GPU memory are wanted, %zu of %zu MB are free (%s): lower -micro, -ctx, -layers "
                  "or -channels",
                  bytes >> 20, free_bytes >> 20, total >> 20, cudaGetErrorString(error));
        return NULL;
    }
    CUDA_CHECK(cudaMemsetAsync(memory, 0, bytes, stream->stream));
    return memory;
}

static void gpu_release(Stream *stream, void *memory) {
    gpu_synchronize(stream);
    CUDA_CHECK(cudaFree(memory));
}

static void *gpu_host_allocate(Stream *stream, size_t bytes, Error *err) {
    (void)stream;
    void *memory = NULL;
    const cudaError_t error = cudaMallocHost(&memory, bytes);
    if (error != cudaSuccess) {
        (void)cudaGetLastError(); /* answered by the line */
        error_set(err,
                  "%zu MB of the host's memory cannot be pinned for the GPU (%s): lower -samples, or free "
                  "memory of the host",
                  bytes >> 20, cudaGetErrorString(error));
        return NULL;
    }
    memset(memory, 0, bytes);
    return memory;
}

static void gpu_host_release(Stream *stream, void *memory) {
    gpu_synchronize(stream);
    CUDA_CHECK(cudaFreeHost(memory));
}

static void gpu_download(Stream *stream, void *host, const void *device, size_t bytes) {
    CUDA_CHECK(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream->stream));
    gpu_synchronize(stream);
}

static void gpu_zero(Stream *stream, void *device, size_t bytes) {
    CUDA_CHECK(cudaMemsetAsync(device, 0, bytes, stream->stream));
}

/* ==== recordings: CUDA graphs ==== */
static bool gpu_record_begin(Stream *stream) {
    if (stream->wait_each) return false; /* each operation is to be waited for by itself */
    CUDA_CHECK(cudaStreamBeginCapture(stream->stream, cudaStreamCaptureModeThreadLocal));
    return true;
}

static void *gpu_record_end(Stream *stream) {
    cudaGraph_t graph = NULL;
    cudaGraphExec_t recording = NULL;
    cudaError_t error = cudaStreamEndCapture(stream->stream, &graph);
    if (error == cudaSuccess) error = cudaGraphInstantiate(&recording, graph, 0);
    if (graph) cudaGraphDestroy(graph);
    if (error != cudaSuccess) {
        (void)cudaGetLastError(); /* answered by NULL */
        return NULL;
    }
    stream->has_recordings = true;
    return recording;
}

static void gpu_replay(Stream *stream, void *recording) {
    CUDA_CHECK(cudaGraphLaunch((cudaGraphExec_t)recording, stream->stream));
    cuda_launched(stream, "a recorded pass");
}

static void gpu_release_recording(Stream *stream, void *recording) {
    gpu_synchronize(stream);
    CUDA_CHECK(cudaGraphExecDestroy((cudaGraphExec_t)recording));
}

/* ==== the step's state ==== */
__global__ static void begin_step_kernel(StepState *state, uint64_t step, float lr) {
    state->step = step, state->lr = lr;
    state->loss_sum = 0, state->grad_norm = 0, state->clip_scale = 1, state->skip = 0, state->bad_tensor = -1;
}

static void gpu_begin_step(Stream *stream, StepState *state, uint64_t step, float lr) {
    begin_step_kernel<<<1, 1, 0, stream->stream>>>(state, step, lr);
    cuda_launched(stream, "begin_step");
}

static void gpu_read_state(Stream *stream, StepState *host, const StepState *state) {
    gpu_download(stream, host, state, sizeof *host);
}

/* ==== embedding ==== */
template <typename A, int W>
__global__ static void embedding_forward_kernel(A *x, const int32_t *tokens, const A *wte, const A *wpe,
                                                size_t T, size_t C, size_t first_position, Mask mask) {
    const size_t row = blockIdx.x, token = (size_t)tokens[row], position = first_position + row % T;
    for (size_t c = threadIdx.x * W; c < C; c += blockDim.x * W) {
        float sum[W];
        load(sum, wte + token * C + c);
        if (wpe) {
            float p[W];
            load(p, wpe + position * C + c);
#pragma unroll
            for (int i = 0; i < W; i++) sum[i] += p[i];
        }
        apply_mask(mask, sum, row, c);
        store(x + row * C + c, sum);
    }
}
template <typename A, int W>
static void launch_embedding_forward(Stream *stream, A *x, const int32_t *tokens, const A *wte, const A *wpe,
                                     size_t B, size_t T, size_t C, size_t first_position, Mask mask) {
    embedding_forward_kernel<A, W><<<(unsigned)(B * T), row_threads(C / W), 0, stream->stream>>>(
        x, tokens, wte, wpe, T, C, first_position, mask);
    cuda_launched(stream, "embedding_forward");
}
template <typename A>
static void gpu_embedding_forward(Stream *stream, act_t *x, const int32_t *tokens, const act_t *wte,
                                  const act_t *wpe, size_t B, size_t T, size_t C, size_t first_position,
                                  Dropout dropout) {
    FOR_WIDTH(A, C, launch_embedding_forward, stream, (A *)x, tokens, (const A *)wte, (const A *)wpe, B, T, C,
              first_position, mask_of(&dropout, C));
}

/* d_wte. The rows, sorted by token (stably: a token's rows stay in order), fall into one run for each token.
 * A block has 8 warps and 64 places of the sorted rows, and adds the runs that begin there: each warp the
 * short ones that begin at its places, then all warps together the long ones (a frequent word has thousands
 * of rows), each every eighth row. A lane has W channels. */
enum { EMBED_WARPS = 8, EMBED_PLACES = 64, EMBED_LONG = 32, EMBED_AHEAD = 4 };

/* sum += the rows of the run of `token` at places first, first + step, ... */
template <typename A, int W>
__device__ static void add_run(float (&sum)[W], const A *dx, const uint32_t *sorted_tokens,
                               const uint32_t *sorted_rows, size_t rows, size_t first, size_t step,
                               uint32_t token, size_t C, size_t c, const Mask &mask) {
    bool in_run = true;
    for (size_t place = first; in_run; place += step * EMBED_AHEAD) {
        float x[EMBED_AHEAD][W];
        size_t row[EMBED_AHEAD];
        bool has[EMBED_AHEAD];
#pragma unroll
        for (int k = 0; k < EMBED_AHEAD; k++) {
            const size_t at = place + step * (size_t)k;
            has[k] = at < rows && sorted_tokens[at] == token;
            row[k] = has[k] ? sorted_rows[at] : 0;
        }
#pragma unroll
        for (int k = 0; k < EMBED_AHEAD; k++)
            if (has[k] && c < C) load(x[k], dx + row[k] * C + c);
#pragma unroll
        for (int k = 0; k < EMBED_AHEAD; k++) {
            if (!has[k] || c >= C) continue;
            apply_mask(mask, x[k], row[k], c);
#pragma unroll
            for (int i = 0; i < W; i++) sum[i] += x[k][i];
        }
        in_run = has[EMBED_AHEAD - 1];
    }
}

template <typename A, int W>
__global__ static void __launch_bounds__(32 * EMBED_WARPS)
    token_gradient_kernel(float *d_wte, const A *dx, const uint32_t *sorted_tokens,
                          const uint32_t *sorted_rows, size_t rows, size_t C, Mask mask) {
    __shared__ float part[EMBED_WARPS][32][W];
    const size_t c = ((size_t)blockIdx.y * 32 + threadIdx.x) * W, begin = (size_t)blockIdx.x * EMBED_PLACES;
    const size_t end = begin + EMBED_PLACES < rows ? begin + EMBED_PLACES : rows, warp = threadIdx.y;
    for (size_t place = begin + warp; place < end; place += EMBED_WARPS) {
        const uint32_t token = sorted_tokens[place];
        if (place > 0 && sorted_tokens[place - 1] == token) continue;
        if (place + EMBED_LONG <= rows && sorted_tokens[place + EMBED_LONG - 1] == token) continue;
        float sum[W] = {0}, old[W];
        add_run<A, W>(sum, dx, sorted_tokens, sorted_rows, rows, place, 1, token, C, c, mask);
        if (c >= C) continue;
        load(old, d_wte + (size_t)token * C + c);
#pragma unroll
        for (int i = 0; i < W; i++) sum[i] += old[i];
        store(d_wte + (size_t)token * C + c, sum);
    }
    for (size_t place = begin; place < end; place++) {
        const uint32_t token = sorted_tokens[place];
        if (place > 0 && sorted_tokens[place - 1] == token) continue;
        if (place + EMBED_LONG > rows || sorted_tokens[place + EMBED_LONG - 1] != token) continue;
        float sum[W] = {0};
        add_run<A, W>(sum, dx, sorted_tokens, sorted_rows, rows, place + warp, EMBED_WARPS, token, C, c,
                      mask);
#pragma unroll
        for (int i = 0; i < W; i++) part[warp][threadIdx.x][i] = sum[i];
        __syncthreads();
        if (warp == 0 && c < C) {
            load(sum, d_wte + (size_t)token * C + c);
            for (int w = 0; w < EMBED_WARPS; w++)
#pragma unroll
                for (int i = 0; i < W; i++) sum[i] += part[w][threadIdx.x][i];
            store(d_wte + (size_t)token * C + c, sum);
        }
        __syncthreads();
    }
}
template <typename A, int W>
static void launch_token_gradient(Stream *stream, float *d_wte, const A *dx, const uint32_t *sorted_tokens,
                                  const uint32_t *sorted_rows, size_t rows, size_t C, Mask mask) {
    const dim3 blocks(blocks_for(rows, EMBED_PLACES), blocks_for(C, 32 * W));
    token_gradient_kernel<A, W><<<blocks, dim3(32, EMBED_WARPS), 0, stream->stream>>>(
        d_wte, dx, sorted_tokens, sorted_rows, rows, C, mask);
    cuda_launched(stream, "token_gradient");
}

/* d_wpe: block t adds position t of the sequences, in their order. */
template <typename A, int W>
__global__ static void position_gradient_kernel(float *d_wpe, const A *dx, size_t B, size_t T, size_t C,
                                                Mask mask) {
    const size_t t = blockIdx.x;
    for (size_t c = threadIdx.x * W; c < C; c += blockDim.x * W) {
        float sum[W];
        load(sum, d_wpe + t * C + c);
#pragma unroll 4
        for (size_t b = 0; b < B; b++) {
            const size_t row = b * T + t;
            float x[W];
            load(x, dx + row * C + c);
            apply_mask(mask, x, row, c);
#pragma unroll
            for (int i = 0; i < W; i++) sum[i] += x[i];
        }
        store(d_wpe + t * C + c, sum);
    }
}
template <typename A, int W>
static void launch_position_gradient(Stream *stream, float *d_wpe, const A *dx, size_t B, size_t T, size_t C,
                                     Mask mask) {
    position_gradient_kernel<A, W>
        <<<(unsigned)T, row_threads(C / W), 0, stream->stream>>>(d_wpe, dx, B, T, C, mask);
    cuda_launched(stream, "position_gradient");
}

__global__ static void count_kernel(uint32_t *numbers, size_t n) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) numbers[i] = (uint32_t)i;
}

static size_t round_up(size_t n, size_t to) {
    return (n + to - 1) / to * to;
}

template <typename A>
static void gpu_embedding_backward(Stream *stream, float *d_wte, float *d_wpe, const act_t *dx,
                                   const int32_t *tokens, size_t B, size_t T, size_t C, Dropout dropout) {
    const size_t rows = B * T, list = round_up(rows * sizeof(uint32_t), 256);
    const uint32_t *keys = (const uint32_t *)tokens;
    uint32_t *none = NULL;
    size_t sort_bytes = 0;
    CUDA_CHECK(cub::DeviceRadixSort::SortPairs(NULL, sort_bytes, keys, none, none, none, rows, 0, TOKEN_BITS,
                                               stream->stream));
    uint8_t *scratch = (uint8_t *)cuda_scratch(stream, 3 * list + sort_bytes);
    uint32_t *row_numbers = (uint32_t *)scratch, *sorted_tokens = (uint32_t *)(scratch + list);
    uint32_t *sorted_rows = (uint32_t *)(scratch + 2 * list);
    count_kernel<<<blocks_for(rows, 256), 256, 0, stream->stream>>>(row_numbers, rows);
    cuda_launched(stream, "count");
    CUDA_CHECK(cub::DeviceRadixSort::SortPairs(scratch + 3 * list, sort_bytes, keys, sorted_tokens,
                                               row_numbers, sorted_rows, rows, 0, TOKEN_BITS,
                                               stream->stream));
    cuda_launched(stream, "sort of the tokens");
    const Mask mask = mask_of(&dropout, C);
    FOR_WIDTH(A, C, launch_token_gradient, stream, d_wte, (const A *)dx, sorted_tokens, sorted_rows, rows, C,
              mask);
    if (d_wpe) FOR_WIDTH(A, C, launch_position_gradient, stream, d_wpe, (const A *)dx, B, T, C, mask);
}

/* ==== residual add and LayerNorm ==== */

/* Where a row fits into the registers of a warp, V vectors a lane, a warp takes it alone: all of its loads are on
 * their way at once, and nothing waits for other warps. Longer rows, and those that are no whole vectors, are
 * blocks' (the kernels further down). */
enum { NORM_WARPS = 4, MOST_VECTORS = 4 };

/* Blocks of the backward kernel on an SM: as many as the registers of W activations in V vectors a lane allow. */
static constexpr int norm_blocks(int vectors, int W) {
    return vectors * W > 24 ? 2 : 3;
}

/* Vectors of a lane; 0: the row does not fit. */
template <typename A> static int vectors_of_row(size_t C) {
    const size_t vectors = blocks_for(C, 32 * wide<A>);
    return is_wide<A>(C) && vectors <= MOST_VECTORS ? (int)vectors : 0;
}

/* The lane's vector v of a row that begins at `from`; zeros past the row's end. */
template <typename A>
__device__ static void load_of_row(float (&x)[wide<A>], const A *from, int v, size_t C) {
    const size_t c = (size_t)(v * 32 + threadIdx.x % 32) * wide<A>;
#pragma unroll
    for (int i = 0; i < wide<A>; i++) x[i] = 0;
    if (c < C) load(x, from + c);
}
template <typename A> __device__ static void store_of_row(A *to, const float (&x)[wide<A>], int v, size_t C) {
    const size_t c = (size_t)(v * 32 + threadIdx.x % 32) * wide<A>;
    if (c < C) store(to + c, x);
}

/* Bytes: residual and branch in, sum and normed out. */
template <typename A, int V>
__global__ static void __launch_bounds__(32 * NORM_WARPS)
    row_norm_forward_kernel(A *sum, A *normed, float *mean_out, float *rstd_out, const A *residual,
                            const A *branch, const A *gain, const A *bias, size_t rows, size_t C, Mask mask) {
    constexpr int W = wide<A>;
    const size_t row = (size_t)blockIdx.x * NORM_WARPS + threadIdx.x / 32, start = row * C;
    const unsigned lane = threadIdx.x % 32;
    if (row >= rows) return;
    float x[V][W], added[V][W];
#pragma unroll
    for (int v = 0; v < V; v++) load_of_row(x[v], residual + start, v, C);
    if (branch) {
#pragma unroll
        for (int v = 0; v < V; v++) load_of_row(added[v], branch + start, v, C);
#pragma unroll
        for (int v = 0; v < V; v++) {
            apply_mask(mask, added[v], row, (size_t)(v * 32 + lane) * W);
#pragma unroll
            for (int i = 0; i < W; i++)
                x[v][i] = to_float(from_float<A>(x[v][i] + added[v][i])); /* as backward reads it */
            store_of_row(sum + start, x[v], v, C);
        }
    }
    float total = 0, squares = 0;
#pragma unroll
    for (int v = 0; v < V; v++)
#pragma unroll
        for (int i = 0; i < W; i++) total += x[v][i];
    const float mean = warp_sum(total) / (float)C;
#pragma unroll
    for (int v = 0; v < V; v++)
#pragma unroll
        for (int i = 0; i < W; i++)
            if ((size_t)(v * 32 + lane) * W < C) squares += (x[v][i] - mean) * (x[v][i] - mean);
    const float rstd = 1.0f / sqrtf(warp_sum(squares) / (float)C + 1e-5f);
#pragma unroll
    for (int v = 0; v < V; v++) {
        float g[W], b[W];
        load_of_row(g, gain, v, C);
        load_of_row(b, bias, v, C);
#pragma unroll
        for (int i = 0; i < W; i++) x[v][i] = (x[v][i] - mean) * rstd * g[i] + b[i];
        store_of_row(normed + start, x[v], v, C);
    }
    if (lane != 0) return;
    if (mean_out) mean_out[row] = mean;
    if (rstd_out) rstd_out[row] = rstd;
}

/* With xhat = (x - mean) rstd and g = d_normed gain: dx = rstd (g - average(g) - xhat average(g xhat)). A warp has
 * every so many rows, and its own sums for d_gain and d_bias in registers, which the block's warps add up, in
 * their order, into (2, C) of `parts`. Bytes: d_normed, sum and d_sum in, d_sum out, and d_branch with dropout. */
template <typename A, int V>
__global__ static void __launch_bounds__(32 * NORM_WARPS, norm_blocks(V, wide<A>))
    row_norm_backward_kernel(A *d_sum, bool overwrite, A *d_branch, float *parts, const A *d_normed,
                             const A *sum, const float *mean, const float *rstd, const A *gain, size_t rows,
                             size_t C, Mask mask) {
    constexpr int W = wide<A>;
    __shared__ float4 shared[2 * MOST_VECTORS * 32 * W / 4];
    float *sums = (float *)shared; /* (2, C) */
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float d_gain[V][W] = {}, d_bias[V][W] = {};
    for (size_t row = (size_t)blockIdx.x * NORM_WARPS + warp; row < rows;
         row += (size_t)gridDim.x * NORM_WARPS) {
        const size_t start = row * C;
        float dy[V][W], x[V][W], d[V][W];
#pragma unroll
        for (int v = 0; v < V; v++) load_of_row(dy[v], d_normed + start, v, C);
#pragma unroll
        for (int v = 0; v < V; v++) load_of_row(x[v], sum + start, v, C);
#pragma unroll
        for (int v = 0; v < V; v++)
#pragma unroll
            for (int i = 0; i < W; i++) d[v][i] = 0;
        if (!overwrite)
#pragma unroll
            for (int v = 0; v < V; v++) load_of_row(d[v], d_sum + start, v, C);
        const float m = mean[row], r = rstd[row];
        float g_average = 0, gx_average = 0;
#pragma unroll
        for (int v = 0; v < V; v++) {
            float w[W];
            load_of_row(w, gain, v, C);
#pragma unroll
            for (int i = 0; i < W; i++) {
                const float xhat = (x[v][i] - m) * r, g = dy[v][i] * w[i];
                d_gain[v][i] += dy[v][i] * xhat, d_bias[v][i] += dy[v][i];
                g_average += g, gx_average += g * xhat;
                x[v][i] = xhat, dy[v][i] = g;
            }
        }
        g_average = warp_sum(g_average) / (float)C, gx_average = warp_sum(gx_average) / (float)C;
#pragma unroll
        for (int v = 0; v < V; v++) {
#pragma unroll
            for (int i = 0; i < W; i++) d[v][i] += r * (dy[v][i] - g_average - x[v][i] * gx_average);
            store_of_row(d_sum + start, d[v], v, C);
            if (!d_branch) continue;
#pragma unroll
            for (int i = 0; i < W; i++)
                d[v][i] = to_float(from_float<A>(d[v][i])); /* d_branch is d_sum's mask */
            apply_mask(mask, d[v], row, (size_t)(v * 32 + lane) * W);
            store_of_row(d_branch + start, d[v], v, C);
        }
    }
    for (unsigned turn = 0; turn < NORM_WARPS; turn++) {
        if (warp == turn)
#pragma unroll
            for (int v = 0; v < V; v++) {
                const size_t c = (size_t)(v * 32 + lane) * W;
                if (c >= C) continue;
                float gains[W] = {0}, biases[W] = {0};
                if (turn > 0) load(gains, sums + c), load(biases, sums + C + c);
#pragma unroll
                for (int i = 0; i < W; i++) gains[i] += d_gain[v][i], biases[i] += d_bias[v][i];
                store(sums + c, gains);
                store(sums + C + c, biases);
            }
        __syncthreads();
    }
    for (size_t c = threadIdx.x; c < 2 * C; c += blockDim.x) parts[(size_t)blockIdx.x * 2 * C + c] = sums[c];
}

/* A block a row. Bytes as above. `cached`: the row stays in shared memory
 * between the three passes (mean, variance about it, result), each thread reading what it wrote; else it is
 * read again from where it lies. */
template <typename A, int W>
__global__ static void residual_norm_forward_kernel(A *sum, A *normed, float *mean_out, float *rstd_out,
                                                    const A *residual, const A *branch, const A *gain,
                                                    const A *bias, size_t C, bool cached, Mask mask) {
    extern __shared__ float4 shared[];
    float *cache = (float *)shared; /* (C) */
    const size_t row = blockIdx.x, start = row * C, step = blockDim.x * W;
    const A *source = branch ? sum : residual;
    float total[1] = {0};
    for (size_t c = threadIdx.x * W; c < C; c += step) {
        float x[W];
        load(x, residual + start + c);
        if (branch) {
            float added[W];
            load(added, branch + start + c);
            apply_mask(mask, added, row, c);
#pragma unroll
            for (int i = 0; i < W; i++)
                x[i] = to_float(from_float<A>(x[i] + added[i])); /* as backward reads it */
            store(sum + start + c, x);
        }
        if (cached) store(cache + c, x);
#pragma unroll
        for (int i = 0; i < W; i++) total[0] += x[i];
    }
    block_sum(total);
    const float mean = total[0] / (float)C;

    float squares[1] = {0};
    for (size_t c = threadIdx.x * W; c < C; c += step) {
        float x[W];
        if (cached) load(x, cache + c);
        else load(x, source + start + c);
#pragma unroll
        for (int i = 0; i < W; i++) squares[0] += (x[i] - mean) * (x[i] - mean);
    }
    block_sum(squares);
    const float rstd = 1.0f / sqrtf(squares[0] / (float)C + 1e-5f);

    for (size_t c = threadIdx.x * W; c < C; c += step) {
        float x[W], g[W], b[W];
        if (cached) load(x, cache + c);
        else load(x, source + start + c);
        load(g, gain + c);
        load(b, bias + c);
#pragma unroll
        for (int i = 0; i < W; i++) x[i] = (x[i] - mean) * rstd * g[i] + b[i];
        store(normed + start + c, x);
    }
    if (threadIdx.x != 0) return;
    if (mean_out) mean_out[row] = mean;
    if (rstd_out) rstd_out[row] = rstd;
}
template <typename A, int W>
static void launch_residual_norm_forward(Stream *stream, A *sum, A *normed, float *mean, float *rstd,
                                         const A *residual, const A *branch, const A *gain, const A *bias,
                                         size_t rows, size_t C, Mask mask) {
    typedef void Kernel(A *, A *, float *, float *, const A *, const A *, const A *, const A *, size_t,
                        size_t, Mask);
    static Kernel *const of_a_row[] = {row_norm_forward_kernel<A, 1>, row_norm_forward_kernel<A, 2>,
                                       row_norm_forward_kernel<A, 3>, row_norm_forward_kernel<A, 4>};
    const int vectors = vectors_of_row<A>(C);
    if (vectors > 0) {
        of_a_row[vectors - 1]<<<blocks_for(rows, NORM_WARPS), 32 * NORM_WARPS, 0, stream->stream>>>(
            sum, normed, mean, rstd, residual, branch, gain, bias, rows, C, mask);
        cuda_launched(stream, "row_norm_forward");
        return;
    }
    const size_t bytes = round_up(C * sizeof(float), 16);
    const bool cached = bytes <= stream->shared_bytes - 1024; /* block_sum has some too */
    if (cached) allow_shared(residual_norm_forward_kernel<A, W>, bytes);
    residual_norm_forward_kernel<A, W>
        <<<(unsigned)rows, row_threads(C / W), cached ? bytes : 0, stream->stream>>>(
            sum, normed, mean, rstd, residual, branch, gain, bias, C, cached, mask);
    cuda_launched(stream, "residual_norm_forward");
}
template <typename A>
static void gpu_residual_norm_forward(Stream *stream, act_t *sum, act_t *normed, float *mean, float *rstd,
                                      const act_t *residual, const act_t *branch, const act_t *gain,
                                      const act_t *bias, size_t rows, size_t C, Dropout dropout) {
    FOR_WIDTH(A, C, launch_residual_norm_forward, stream, (A *)sum, (A *)normed, mean, rstd,
              (const A *)residual, (const A *)branch, (const A *)gain, (const A *)bias, rows, C,
              mask_of(&dropout, C));
}

/* A block has the rows blockIdx.x, blockIdx.x + gridDim.x, ... and its own sums for d_gain and d_bias, (2, C)
 * of `parts`; where they fit (`cached`) they are kept in shared memory until the end. Each thread has
 * channels of its own throughout, so that only the two averages need the whole block. Bytes: d_normed, sum
 * and d_sum in (the second reads of the first two hit the cache), d_sum out, and d_branch with dropout. */
template <typename A, int W>
__global__ static void residual_norm_backward_kernel(A *d_sum, bool overwrite, A *d_branch, float *parts,
                                                     const A *d_normed, const A *sum, const float *mean,
                                                     const float *rstd, const A *gain, size_t rows, size_t C,
                                                     bool cached, Mask mask) {
    extern __shared__ float4 shared[];
    float *own = parts + (size_t)blockIdx.x * 2 * C;
    float *gains = cached ? (float *)shared : own, *biases = gains + C;
    const size_t step = blockDim.x * W;
    for (size_t c = threadIdx.x * W; c < C; c += step) {
        const float zero[W] = {0};
        store(gains + c, zero);
        store(biases + c, zero);
    }
    for (size_t row = blockIdx.x; row < rows; row += gridDim.x) {
        const size_t start = row * C;
        const float m = mean[row], r = rstd[row];
        float average[2] = {0, 0};
        for (size_t c = threadIdx.x * W; c < C; c += step) {
            float dy[W], x[W], w[W], dg[W], db[W];
            load(dy, d_normed + start + c);
            load(x, sum + start + c);
            load(w, gain + c);
            load(dg, gains + c);
            load(db, biases + c);
#pragma unroll
            for (int i = 0; i < W; i++) {
                const float xhat = (x[i] - m) * r, g = dy[i] * w[i];
                average[0] += g, average[1] += g * xhat;
                dg[i] += dy[i] * xhat, db[i] += dy[i];
            }
            store(gains + c, dg);
            store(biases + c, db);
        }
        block_sum(average);
        average[0] /= (float)C, average[1] /= (float)C;
        for (size_t c = threadIdx.x * W; c < C; c += step) {
            float dy[W], x[W], w[W], d[W] = {0};
            load(dy, d_normed + start + c);
            load(x, sum + start + c);
            load(w, gain + c);
            if (!overwrite) load(d, d_sum + start + c);
#pragma unroll
            for (int i = 0; i < W; i++) d[i] += r * (dy[i] * w[i] - average[0] - (x[i] - m) * r * average[1]);
            store(d_sum + start + c, d);
            if (!d_branch) continue;
#pragma unroll
            for (int i = 0; i < W; i++) d[i] = to_float(from_float<A>(d[i])); /* d_branch is d_sum's mask */
            apply_mask(mask, d, row, c);
            store(d_branch + start + c, d);
        }
    }
    if (!cached) return;
    for (size_t c = threadIdx.x * W; c < C; c += step) {
        float x[W];
        load(x, gains + c);
        store(own + c, x);
        load(x, biases + c);
        store(own + C + c, x);
    }
}
template <typename A, int W>
static void launch_residual_norm_backward(Stream *stream, A *d_sum, bool overwrite, A *d_branch,
                                          float *d_gain, float *d_bias, const A *d_normed, const A *sum,
                                          const float *mean, const float *rstd, const A *gain, size_t rows,
                                          size_t C, Mask mask) {
    typedef void Kernel(A *, bool, A *, float *, const A *, const A *, const float *, const float *,
                        const A *, size_t, size_t, Mask);
    static Kernel *const of_rows[] = {row_norm_backward_kernel<A, 1>, row_norm_backward_kernel<A, 2>,
                                      row_norm_backward_kernel<A, 3>, row_norm_backward_kernel<A, 4>};
    const int vectors = vectors_of_row<A>(C);
    const size_t SMs = (size_t)stream->device.multiProcessorCount;
    const size_t most = SMs * (size_t)(vectors > 0 ? norm_blocks(vectors, wide<A>) : BLOCKS_PER_SM);
    const size_t wanted = vectors > 0 ? blocks_for(rows, NORM_WARPS) : rows;
    const size_t blocks = wanted < most ? wanted : most;
    float *parts = (float *)cuda_scratch(stream, blocks * 2 * C * sizeof *parts);
    if (vectors > 0) {
        of_rows[vectors - 1]<<<(unsigned)blocks, 32 * NORM_WARPS, 0, stream->stream>>>(
            d_sum, overwrite, d_branch, parts, d_normed, sum, mean, rstd, gain, rows, C, mask);
        cuda_launched(stream, "row_norm_backward");
        add_columns(stream, d_gain, d_bias, C, parts, blocks, 2 * C);
        return;
    }
    const size_t bytes = round_up(2 * C * sizeof(float), 16);
    const bool cached = bytes <= stream->shared_bytes - 1024;
    if (cached) allow_shared(residual_norm_backward_kernel<A, W>, bytes);
    residual_norm_backward_kernel<A, W>
        <<<(unsigned)blocks, row_threads(C / W), cached ? bytes : 0, stream->stream>>>(
            d_sum, overwrite, d_branch, parts, d_normed, sum, mean, rstd, gain, rows, C, cached, mask);
    cuda_launched(stream, "residual_norm_backward");
    add_columns(stream, d_gain, d_bias, C, parts, blocks, 2 * C);
}
template <typename A>
static void gpu_residual_norm_backward(Stream *stream, act_t *d_sum, bool overwrite, act_t *d_branch,
                                       float *d_gain, float *d_bias, const act_t *d_normed, const act_t *sum,
                                       const float *mean, const float *rstd, const act_t *gain, size_t rows,
                                       size_t C, Dropout dropout) {
    FOR_WIDTH(A, C, launch_residual_norm_backward, stream, (A *)d_sum, overwrite, (A *)d_branch, d_gain,
              d_bias, (const A *)d_normed, (const A *)sum, mean, rstd, (const A *)gain, rows, C,
              mask_of(&dropout, C));
}

/* ==== linear ==== */
/* GELU(x) = x/2 (1 + tanh(u)), u = sqrt(2/pi) (x + 0.044715 x^3); GELU' = (1 + tanh u)/2 +
 * x/2 (1 - tanh^2 u) u'. The library's epilogues do the same for bf16; these are for fp32, and for shapes
 * that it has no epilogue for. */
static constexpr float GELU_SCALE = 0.7978845608028654f, GELU_CUBIC = 0.044715f;

__device__ static float gelu(float x) {
    return 0.5f * x * (1.0f + tanhf(GELU_SCALE * (x + GELU_CUBIC * x * x * x)));
}
__device__ static float gelu_slope(float x) {
    const float t = tanhf(GELU_SCALE * (x + GELU_CUBIC * x * x * x));
    return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * GELU_SCALE * (1.0f + 3.0f * GELU_CUBIC * x * x);
}

/* The product lies in y, or where that is NULL in gelu_y. */
template <typename A, int W>
__global__ static void bias_gelu_kernel(A *y, A *gelu_y, const A *bias, size_t out) {
    const size_t start = (size_t)blockIdx.x * out;
    for (size_t c = threadIdx.x * W; c < out; c += blockDim.x * W) {
        float x[W], b[W];
        load(x, (y ? y : gelu_y) + start + c);
        load(b, bias + c);
#pragma unroll
        for (int i = 0; i < W; i++) x[i] += b[i];
        if (y) store(y + start + c, x);
        if (!gelu_y) continue;
#pragma unroll
        for (int i = 0; i < W; i++) x[i] = gelu(to_float(from_float<A>(x[i]))); /* of what is stored in y */
        store(gelu_y + start + c, x);
    }
}
template <typename A, int W>
static void launch_bias_gelu(Stream *stream, A *y, A *gelu_y, const A *bias, size_t rows, size_t out) {
    bias_gelu_kernel<A, W><<<(unsigned)rows, row_threads(out / W), 0, stream->stream>>>(y, gelu_y, bias, out);
    cuda_launched(stream, "bias_gelu");
}

template <typename A, int W> __global__ static void gelu_backward_kernel(A *dx, const A *pre, size_t in) {
    const size_t start = (size_t)blockIdx.x * in;
    for (size_t c = threadIdx.x * W; c < in; c += blockDim.x * W) {
        float d[W], x[W];
        load(d, dx + start + c);
        load(x, pre + start + c);
#pragma unroll
        for (int i = 0; i < W; i++) d[i] *= gelu_slope(x[i]);
        store(dx + start + c, d);
    }
}
template <typename A, int W>
static void launch_gelu_backward(Stream *stream, A *dx, const A *pre, size_t rows, size_t in) {
    gelu_backward_kernel<A, W><<<(unsigned)rows, row_threads(in / W), 0, stream->stream>>>(dx, pre, in);
    cuda_launched(stream, "gelu_backward");
}

/* parts (blocks of rows, columns): sums over the block's rows. A block is 32 lanes of W columns x 8 strands
 * of rows, added in their order at the end. */
enum { STRANDS = 8 };
template <typename A, int W>
__global__ static void __launch_bounds__(32 * STRANDS)
    column_sum_kernel(float *parts, const A *x, size_t rows, size_t columns, size_t rows_per_block) {
    __shared__ float strand[STRANDS][32][W + 1];
    const size_t c = ((size_t)blockIdx.x * 32 + threadIdx.x) * W, first = (size_t)blockIdx.y * rows_per_block;
    const size_t end = first + rows_per_block < rows ? first + rows_per_block : rows;
    float sum[W] = {0};
    if (c < columns) {
#pragma unroll 4
        for (size_t row = first + threadIdx.y; row < end; row += STRANDS) {
            float v[W];
            load(v, x + row * columns + c);
#pragma unroll
            for (int i = 0; i < W; i++) sum[i] += v[i];
        }
    }
#pragma unroll
    for (int i = 0; i < W; i++) strand[threadIdx.y][threadIdx.x][i] = sum[i];
    __syncthreads();
    if (threadIdx.y != 0 || c >= columns) return;
    for (int s = 1; s < STRANDS; s++)
#pragma unroll
        for (int i = 0; i < W; i++) sum[i] += strand[s][threadIdx.x][i];
    store(parts + (size_t)blockIdx.y * columns + c, sum);
}
template <typename A, int W>
static void launch_column_sum(Stream *stream, float *to, const A *x, size_t rows, size_t columns) {
    const size_t across = blocks_for(columns, 32 * W),
                 wanted = (size_t)stream->device.multiProcessorCount * 8;
    const size_t most = blocks_for(rows, 4 * STRANDS), down = wanted / across < 1 ? 1 : wanted / across;
    const size_t rows_per_block = blocks_for(rows, down < most ? down : most);
    const size_t blocks = blocks_for(rows, rows_per_block);
    float *parts = (float *)cuda_scratch(stream, blocks * columns * sizeof *parts);
    column_sum_kernel<A, W>
        <<<dim3((unsigned)across, (unsigned)blocks), dim3(32, STRANDS), 0, stream->stream>>>(
            parts, x, rows, columns, rows_per_block);
    cuda_launched(stream, "column_sum");
    add_columns(stream, to, NULL, columns, parts, blocks, columns);
}

/* The library's epilogues are for bf16: its GELU's tanh is the hardware's. */
template <typename A> constexpr bool has_epilogues = sizeof(A) == 2;

template <typename A>
static void gpu_linear_forward(Stream *stream, act_t *y, act_t *gelu_y, const act_t *x, const act_t *w,
                               const act_t *b, size_t rows, size_t in, size_t out) {
    Matmul matmul = {};
    matmul.m = rows, matmul.n = out, matmul.k = in, matmul.alpha = 1, matmul.batch = 1;
    matmul.in = matmul.out = ActType<A>::cuda;
    matmul.a = x, matmul.lda = in, matmul.b = w, matmul.ldb = out, matmul.c = y, matmul.ldc = out;
    if (has_epilogues<A>) {
        Matmul fused = matmul;
        fused.epilogue = !gelu_y ? MATMUL_BIAS : y ? MATMUL_BIAS_GELU : MATMUL_BIAS_GELU_ONLY, fused.bias = b;
        if (gelu_y) fused.aux = y, fused.c = gelu_y;
        if (is_wide<A>(out) && cuda_matmul(stream, &fused)) return;
    }
    if (!y) matmul.c = gelu_y;
    cuda_matmul(stream, &matmul);
    FOR_WIDTH(A, out, launch_bias_gelu, stream, (A *)y, (A *)gelu_y, (const A *)b, rows, out);
}

template <typename A>
static void gpu_linear_backward(Stream *stream, act_t *dx, float *dw, float *db, const act_t *dy,
                                const act_t *x, const act_t *w, const act_t *pre, size_t rows, size_t in,
                                size_t out) {
    Matmul weights = {};
    weights.transpose_a = true, weights.m = in, weights.n = out, weights.k = rows,
    weights.alpha = weights.beta = 1;
    weights.in = ActType<A>::cuda, weights.out = CUDA_R_32F, weights.batch = 1;
    weights.a = x, weights.lda = in, weights.b = dy, weights.ldb = out, weights.c = dw, weights.ldc = out;
    cuda_matmul(stream, &weights);
    FOR_WIDTH(A, out, launch_column_sum, stream, db, (const A *)dy, rows, out);

    Matmul input = {};
    input.transpose_b = true, input.m = rows, input.n = in, input.k = out, input.alpha = 1, input.batch = 1;
    input.in = input.out = ActType<A>::cuda;
    input.a = dy, input.lda = out, input.b = w, input.ldb = out, input.c = dx, input.ldc = in;
    if (pre && has_epilogues<A> && is_wide<A>(in)) {
        Matmul fused = input;
        fused.epilogue = MATMUL_GELU_BACKWARD, fused.aux = (void *)pre;
        if (cuda_matmul(stream, &fused)) return;
    }
    cuda_matmul(stream, &input);
    if (pre) FOR_WIDTH(A, in, launch_gelu_backward, stream, (A *)dx, (const A *)pre, rows, in);
}

/* ==== rotary positions ==== */
/* A thread has W pairs of one head: q's heads, then k's, lie one after the other in a row. Blocks of several rows, the
 * last rows first: the product that wrote them has left its latest in the cache. */
template <typename A, int W>
__global__ static void rotary_kernel(A *qkv, Angles angles, size_t rows, size_t T, size_t H, size_t half,
                                     size_t first_position, size_t first_head, float sign) {
    const size_t row = (size_t)(gridDim.x - 1 - blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    const size_t position = first_position + row % T;
    A *x = qkv + (row * 3 * H + first_head) * 2 * half;
    const unsigned groups = (unsigned)(half / W), items = (unsigned)(2 * H - first_head) * groups;
    for (unsigned item = threadIdx.x; item < items; item += blockDim.x) {
        const size_t i = (size_t)(item % groups) * W, at = (size_t)(item / groups) * 2 * half + i;
        float low[W], high[W], cosine[W], sine[W];
        load(low, x + at);
        load(high, x + at + half);
        load_angles<A>(cosine, sine, angles, position * half + i);
        rotate(low, high, cosine, sine, sign);
        store(x + at, low);
        store(x + at + half, high);
    }
}
template <typename A, int W>
static void launch_rotary(Stream *stream, A *qkv, Angles angles, size_t rows, size_t T, size_t H, size_t half,
                          size_t first_position, size_t first_head, bool inverse) {
    const unsigned items = (unsigned)((2 * H - first_head) * (half / W)), threads = 128;
    const dim3 block(items < threads ? items : threads, items < threads ? threads / items : 1);
    rotary_kernel<A, W><<<blocks_for(rows, block.y), block, 0, stream->stream>>>(
        qkv, angles, rows, T, H, half, first_position, first_head, inverse ? -1.0f : 1.0f);
    cuda_launched(stream, "rotary");
}
template <typename A>
static void gpu_rotary(Stream *stream, act_t *qkv, size_t B, size_t T, size_t H, size_t D,
                       size_t first_position, bool keys_only, bool inverse) {
    const size_t half = D / 2;
    const Angles angles = cuda_angles(stream, first_position + T, half);
    FOR_WIDTH(A, half, launch_rotary, stream, (A *)qkv, angles, B * T, T, H, half, first_position,
              keys_only ? H : 0, inverse);
}

/* ==== the head ==== */
static size_t padded(size_t V) {
    return round_up(V, 128);
}

/* Rows of a chunk: a multiple of 128 unless there are fewer. */
static size_t head_rows(size_t rows, size_t V, size_t act_size) {
    const size_t fit = HEAD_BYTES / (padded(V) * act_size) / 128 * 128, limit = HEAD_ROWS;
    const size_t most = fit < 128 ? 128 : fit < limit ? fit : limit;
    return rows < most ? rows : most;
}

/* A chunk's losses in double, then its logits (rows, Vp). */
template <typename A> static size_t gpu_head_scratch_bytes(size_t rows, size_t C, size_t V) {
    (void)C;
    size_t logits = 0, bytes = 0;
    if (V > SIZE_MAX / 2 - 128 || !size_mul(padded(V), sizeof(A), &logits)) return SIZE_MAX;
    size_mul(head_rows(rows, V, sizeof(A)), logits, &bytes);
    size_add(bytes, HEAD_ROWS * sizeof(double), &bytes);
    return bytes;
}

/* A block a row of logits, which it reads twice: once for maximum and sum together (the sum is scaled down
 * whenever the maximum grows), once, from the cache, to put d_logit = scale * (softmax - onehot) in its
 * place. Columns from V on are no part of it; what lies there in the row's last vector becomes 0. Starting
 * from the least float instead of -inf lets a logit of -inf be a probability of 0, while +inf and NaN reach
 * the loss. */
template <typename A>
__global__ static void __launch_bounds__(MOST_THREADS)
    softmax_loss_kernel(double *losses, A *logits, const int32_t *targets, size_t V, float scale,
                        bool gradient) {
    constexpr int W = wide<A>;
    A *row = logits + (size_t)blockIdx.x * ((V + 127) / 128 * 128);
    const size_t target = (size_t)targets[blockIdx.x], step = blockDim.x * W;
    const float at_target = to_float(
        row[target]); /* read before anyone overwrites it: block_max waits for all */
    float max = -FLT_MAX, sum[1] = {0};
    for (size_t v = threadIdx.x * W; v < V; v += step) {
        float x[W], high = max;
        load(x, row + v);
#pragma unroll
        for (int i = 0; i < W; i++)
            if (v + i < V) high = fmaxf(high, x[i]);
        sum[0] *= exp_for<A>(max - high);
        max = high;
#pragma unroll
        for (int i = 0; i < W; i++)
            if (v + i < V) sum[0] += exp_for<A>(x[i] - max);
    }
    const float all = block_max(max);
    sum[0] *= exp_for<A>(max - all);
    block_sum(sum);
    if (threadIdx.x == 0) losses[blockIdx.x] = (double)all - (double)at_target + log((double)sum[0]);
    if (!gradient) return;
    const float factor = scale / sum[0];
    for (size_t v = threadIdx.x * W; v < V; v += step) {
        float x[W];
        load(x, row + v);
#pragma unroll
        for (int i = 0; i < W; i++) {
            x[i] = v + i < V ? exp_for<A>(x[i] - all) * factor : 0.0f;
            if (v + i == target) x[i] -= scale;
        }
        store(row + v, x);
    }
}

__global__ static void __launch_bounds__(1024)
    add_losses_kernel(StepState *state, const double *losses, size_t n) {
    double sum = 0;
    for (size_t i = threadIdx.x; i < n; i += blockDim.x) sum += losses[i];
    sum = block_sum_double(sum);
    if (threadIdx.x == 0) state->loss_sum += sum;
}

/* d_hidden = d_logits wte, d_wte += d_logits^T hidden over the vocabulary's columns [first, first + count).
 * */
template <typename A>
static void head_gradients(Stream *stream, A *d_hidden, float *d_wte, const A *d_logits, const A *hidden,
                           const A *wte, size_t rows, size_t C, size_t Vp, size_t first, size_t count,
                           float beta) {
    Matmul matmul = {};
    matmul.m = rows, matmul.n = C, matmul.k = count, matmul.alpha = 1, matmul.beta = beta, matmul.batch = 1;
    matmul.in = matmul.out = ActType<A>::cuda;
    matmul.a = d_logits + first, matmul.lda = Vp, matmul.b = wte + first * C, matmul.ldb = C;
    matmul.c = d_hidden, matmul.ldc = C;
    cuda_matmul(stream, &matmul);
    matmul.transpose_a = true, matmul.m = count, matmul.k = rows, matmul.beta = 1, matmul.out = CUDA_R_32F;
    matmul.b = hidden, matmul.c = d_wte + first * C;
    cuda_matmul(stream, &matmul);
}

template <typename A>
static void gpu_head_loss(Stream *stream, StepState *state, act_t *d_hidden, float *d_wte,
                          const act_t *hidden, const act_t *wte, const int32_t *targets, size_t rows,
                          size_t C, size_t V, float grad_scale, void *scratch) {
    const size_t chunk = head_rows(rows, V, sizeof(A)), Vp = padded(V);
    double *losses = (double *)scratch;
    A *logits = (A *)(losses + HEAD_ROWS);
    /* Matrix products are fast where sizes are whole vectors. So the logits of the columns up to the next
     * whole one are computed too, and read by nobody; and in the gradients the V % W last columns come apart
     * (first, so that what is rounded twice is small). No row of wte from V on has any effect. */
    const size_t W = wide<A>, whole = V / W * W;
    for (size_t start = 0; start < rows; start += chunk) {
        const size_t n = rows - start < chunk ? rows - start : chunk;
        const A *x = (const A *)hidden + start * C;
        Matmul matmul = {};
        matmul.transpose_b = true, matmul.m = n, matmul.n = round_up(V, W), matmul.k = C, matmul.alpha = 1;
        matmul.batch = 1, matmul.in = matmul.out = ActType<A>::cuda;
        matmul.a = x, matmul.lda = C, matmul.b = wte, matmul.ldb = C, matmul.c = logits, matmul.ldc = Vp;
        cuda_matmul(stream, &matmul);
        softmax_loss_kernel<A><<<(unsigned)n, row_threads(V / W + 1), 0, stream->stream>>>(
            losses, logits, targets + start, V, grad_scale, d_hidden != NULL);
        cuda_launched(stream, "softmax_loss");
        add_losses_kernel<<<1, 1024, 0, stream->stream>>>(state, losses, n);
        cuda_launched(stream, "add_losses");
        if (!d_hidden) continue;
        A *dx = (A *)d_hidden + start * C;
        if (whole < V)
            head_gradients<A>(stream, dx, d_wte, logits, x, (const A *)wte, n, C, Vp, whole, V - whole, 0);
        if (whole > 0)
            head_gradients<A>(stream, dx, d_wte, logits, x, (const A *)wte, n, C, Vp, 0, whole,
                              whole < V ? 1.0f : 0.0f);
    }
}

template <typename A>
static void gpu_head_logits(Stream *stream, float *logits, const act_t *hidden, size_t stride,
                            const act_t *wte, size_t rows, size_t C, size_t V) {
    Matmul matmul = {};
    matmul.transpose_b = true, matmul.m = rows, matmul.n = V, matmul.k = C, matmul.alpha = 1,
    matmul.batch = 1;
    matmul.in = ActType<A>::cuda, matmul.out = CUDA_R_32F;
    matmul.a = hidden, matmul.lda = stride, matmul.b = wte, matmul.ldb = C, matmul.c = logits, matmul.ldc = V;
    cuda_matmul(stream, &matmul);
}

/* ==== the update ==== */
static bool same_spans(const Stream *stream, const ParamSpan *spans, size_t n_spans) {
    const ParamSpan *old = (const ParamSpan *)stream->chunk_spans;
    if (!old || stream->n_chunk_spans != n_spans) return false;
    for (size_t i = 0; i < n_spans; i++)
        if (old[i].offset != spans[i].offset || old[i].count != spans[i].count ||
            old[i].decay != spans[i].decay)
            return false;
    return true;
}

/* The chunks lie on the GPU from the first update on: another model's spans replace them. */
static void cut_spans(Stream *stream, const ParamSpan *spans, size_t n_spans) {
    if (same_spans(stream, spans, n_spans)) return;
    size_t count = 0;
    for (size_t i = 0; i < n_spans; i++) count += (spans[i].count + CHUNK_FLOATS - 1) / CHUNK_FLOATS;
    SpanChunk *host = (SpanChunk *)xcalloc(count, sizeof *host), *next = host;
    for (size_t i = 0; i < n_spans; i++) {
        for (size_t at = 0; at < spans[i].count; at += CHUNK_FLOATS, next++) {
            const size_t left = spans[i].count - at, most = CHUNK_FLOATS;
            next->offset = spans[i].offset + at, next->span = (int32_t)i, next->decay = spans[i].decay;
            next->count = (int32_t)(left < most ? left : most);
        }
    }
    gpu_synchronize(stream);
    CUDA_CHECK(cudaFree(stream->chunks));
    CUDA_CHECK(cudaMalloc(&stream->chunks, count * sizeof *host));
    cuda_upload(stream, stream->chunks, host, count * sizeof *host);
    free(host);
    free(stream->chunk_spans);
    stream->chunk_spans = xmalloc(n_spans * sizeof *spans);
    memcpy(stream->chunk_spans, spans, n_spans * sizeof *spans);
    stream->n_chunks = count, stream->n_chunk_spans = n_spans;
}

/* A block a chunk. In double: the square of a gradient of 1e20 is still a number, and only a real inf or NaN
 * is not. */
__global__ static void squares_kernel(double *squares, const float *gradients, const SpanChunk *chunks) {
    const SpanChunk chunk = chunks[blockIdx.x];
    const float *g = gradients + chunk.offset;
    const int whole = chunk.offset % 4 == 0 ? chunk.count / 4 * 4 : 0;
    double sum = 0;
    for (int i = (int)threadIdx.x * 4; i < whole; i += (int)blockDim.x * 4) {
        float x[4];
        load(x, g + i);
#pragma unroll
        for (int k = 0; k < 4; k++) sum += (double)x[k] * (double)x[k];
    }
    for (int i = whole + (int)threadIdx.x; i < chunk.count; i += (int)blockDim.x)
        sum += (double)g[i] * (double)g[i];
    sum = block_sum_double(sum);
    if (threadIdx.x == 0) squares[blockIdx.x] = sum;
}

__global__ static void __launch_bounds__(1024)
    gradient_norm_kernel(StepState *state, const double *squares, const SpanChunk *chunks, size_t n,
                         float clip) {
    __shared__ int first_bad;
    if (threadIdx.x == 0) first_bad = INT32_MAX;
    __syncthreads();
    double sum = 0;
    for (size_t i = threadIdx.x; i < n; i += blockDim.x) {
        sum += squares[i];
        if (!isfinite(squares[i])) atomicMin(&first_bad, chunks[i].span);
    }
    sum = block_sum_double(sum); /* waits for all: first_bad is whole */
    if (threadIdx.x != 0) return;
    const double norm = sqrt(sum);
    state->bad_tensor = first_bad == INT32_MAX ? -1 : first_bad;
    state->skip = !isfinite(norm) || !isfinite(state->loss_sum);
    state->grad_norm = (float)norm;
    state->clip_scale = clip > 0 && norm > (double)clip ? (float)((double)clip / norm) : 1.0f;
}

static void gpu_gradient_norm(Stream *stream, StepState *state, const float *gradients,
                              const ParamSpan *spans, size_t n_spans, float clip) {
    cut_spans(stream, spans, n_spans);
    double *squares = (double *)cuda_scratch(stream, stream->n_chunks * sizeof *squares);
    squares_kernel<<<(unsigned)stream->n_chunks, 256, 0, stream->stream>>>(squares, gradients,
                                                                           stream->chunks);
    cuda_launched(stream, "squares");
    gradient_norm_kernel<<<1, 1024, 0, stream->stream>>>(state, squares, stream->chunks, stream->n_chunks,
                                                         clip);
    cuda_launched(stream, "gradient_norm");
}

/* What all of an update's blocks need, computed once: the count moves, unless the step is skipped. */
typedef struct Corrections {
    float first, second; /* 1 / (1 - beta^t) */
} Corrections;
__global__ static void corrections_kernel(Corrections *corrections, StepState *state, float beta1,
                                          float beta2) {
    if (state->skip) return;
    const double t = (double)++state->updates;
    corrections->first = (float)(1.0 / (1.0 - pow((double)beta1, t)));
    corrections->second = (float)(1.0 / (1.0 - pow((double)beta2, t)));
}

/* Parameters i .. i + W - 1 of a chunk. */
template <typename A, int W>
__device__ static void adamw_at(float *weights, A *work, const float *gradients, float *m, float *v, size_t i,
                                float scale, float lr, float decay, const AdamW &settings,
                                const Corrections &corrections) {
    float w[W], g[W], m1[W], v1[W];
    load(w, weights + i);
    load(g, gradients + i);
    load(m1, m + i);
    load(v1, v + i);
#pragma unroll
    for (int k = 0; k < W; k++) {
        const float gradient = g[k] * scale;
        m1[k] = settings.beta1 * m1[k] + (1.0f - settings.beta1) * gradient;
        v1[k] = settings.beta2 * v1[k] + (1.0f - settings.beta2) * gradient * gradient;
        const float step = (m1[k] * corrections.first) /
                           (sqrtf(v1[k] * corrections.second) + settings.epsilon);
        w[k] -= lr * (step + decay * w[k]);
    }
    store(weights + i, w);
    store(m + i, m1);
    store(v + i, v1);
    if (work) store(work + i, w);
}

template <typename A>
__global__ static void adamw_kernel(float *weights, A *work, const float *gradients, float *m, float *v,
                                    const SpanChunk *chunks, const StepState *state,
                                    const Corrections *corrections, AdamW settings) {
    if (state->skip) return;
    const SpanChunk chunk = chunks[blockIdx.x];
    const Corrections correction = *corrections;
    const float scale = state->clip_scale, lr = state->lr, decay = chunk.decay ? settings.weight_decay : 0.0f;
    const int whole = chunk.offset % 4 == 0 ? chunk.count / 4 * 4 : 0;
    for (int i = (int)threadIdx.x * 4; i < whole; i += (int)blockDim.x * 4)
        adamw_at<A, 4>(weights, work, gradients, m, v, chunk.offset + (size_t)i, scale, lr, decay, settings,
                       correction);
    for (int i = whole + (int)threadIdx.x; i < chunk.count; i += (int)blockDim.x)
        adamw_at<A, 1>(weights, work, gradients, m, v, chunk.offset + (size_t)i, scale, lr, decay, settings,
                       correction);
}

template <typename A>
static void gpu_adamw(Stream *stream, StepState *state, float *weights, act_t *work, const float *gradients,
                      float *m, float *v, const ParamSpan *spans, size_t n_spans, AdamW settings) {
    cut_spans(stream, spans, n_spans);
    Corrections *corrections = (Corrections *)cuda_scratch(stream, sizeof *corrections);
    corrections_kernel<<<1, 1, 0, stream->stream>>>(corrections, state, settings.beta1, settings.beta2);
    cuda_launched(stream, "corrections");
    adamw_kernel<A><<<(unsigned)stream->n_chunks, 256, 0, stream->stream>>>(
        weights, (A *)work, gradients, m, v, stream->chunks, state, corrections, settings);
    cuda_launched(stream, "adamw");
}

template <typename A> __global__ static void convert_kernel(A *to, const float *from, size_t n) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) to[i] = from_float<A>(from[i]);
}
template <typename A>
static void gpu_weights_to_work(Stream *stream, act_t *work, const float *weights, size_t count) {
    convert_kernel<A><<<blocks_for(count, 256), 256, 0, stream->stream>>>((A *)work, weights, count);
    cuda_launched(stream, "weights_to_work");
}

template <typename A> static constexpr Ops ops_of(const char *name) {
    Ops ops = {};
    ops.name = name, ops.act_size = sizeof(A);
    ops.open = gpu_open, ops.close = cuda_stream_close, ops.synchronize = gpu_synchronize;
    ops.describe = gpu_describe, ops.memory = gpu_memory, ops.peak_flops = gpu_peak_flops<A>;
    ops.allocate = gpu_allocate, ops.release = gpu_release;
    ops.host_allocate = gpu_host_allocate, ops.host_release = gpu_host_release;
    ops.upload = cuda_upload, ops.download = gpu_download, ops.zero = gpu_zero;
    ops.record_begin = gpu_record_begin, ops.record_end = gpu_record_end;
    ops.replay = gpu_replay, ops.release_recording = gpu_release_recording;
    ops.mark = cuda_mark, ops.seconds_between = cuda_seconds_between;
    ops.begin_step = gpu_begin_step, ops.read_state = gpu_read_state;
    ops.embedding_forward = gpu_embedding_forward<A>, ops.embedding_backward = gpu_embedding_backward<A>;
    ops.residual_norm_forward = gpu_residual_norm_forward<A>;
    ops.residual_norm_backward = gpu_residual_norm_backward<A>;
    ops.linear_forward = gpu_linear_forward<A>, ops.linear_backward = gpu_linear_backward<A>;
    ops.rotary = gpu_rotary<A>;
    ops.head_scratch_bytes = gpu_head_scratch_bytes<A>, ops.head_loss = gpu_head_loss<A>;
    ops.head_logits = gpu_head_logits<A>;
    ops.gradient_norm = gpu_gradient_norm, ops.adamw = gpu_adamw<A>,
    ops.weights_to_work = gpu_weights_to_work<A>;
    return ops;
}

const Ops ops_cuda = ops_of<bf16>("cuda");
const Ops ops_cuda_fp32 = ops_of<float>("cuda-fp32");
