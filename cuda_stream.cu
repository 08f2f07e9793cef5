/* cuda_stream.cu - see cuda_stream.h. */
#include "cuda_stream.h"

#include <stdlib.h>
#include <string.h>

enum {
    WORKSPACE_BYTES = 32 << 20, /* what cuBLAS asks for on Hopper */
    SCRATCH_START = 16 << 20,   /* enough for common shapes: then it never grows */
    STAGING_BYTES = 2 << 20,    /* of a slot; larger copies take several */
    MOST_PLANS = 512,           /* a model has about 40 shapes; a test of many begins anew */
    OLDEST_MAJOR = 8            /* bf16 matrix units begin with compute capability 8.0 */
};

void cuda_fail(const char *what, const char *reason) {
    fprintf(stderr, "train_gpt: GPU: %s: %s%s\n", what, reason,
            getenv("TRAIN_GPT_SYNC") ? "" : "; TRAIN_GPT_SYNC=1 names the operation");
    exit(EXIT_FAILED);
}

void cuda_launched(Stream *stream, const char *kernel) {
    cudaError_t error = cudaGetLastError();
    if (error == cudaSuccess && stream->wait_each) error = cudaStreamSynchronize(stream->stream);
    if (error != cudaSuccess) cuda_fail(kernel, cudaGetErrorString(error));
}

static void blas_check(cublasStatus_t status, const char *what) {
    if (status != CUBLAS_STATUS_SUCCESS) cuda_fail(what, cublasLtGetStatusString(status));
}
#define BLAS_CHECK(call) blas_check((call), #call)

/* ==== the stream ==== */
static bool find_device(Stream *stream, int index, Error *err) {
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error == cudaErrorNoDevice || (error == cudaSuccess && count == 0))
        return error_set(err, "no NVIDIA GPU is visible here; use -device cpu");
    if (error != cudaSuccess)
        return error_set(err, "the NVIDIA driver does not answer: %s; use -device cpu",
                         cudaGetErrorString(error));
    index %= count;
    if ((error = cudaSetDevice(index)) != cudaSuccess ||
        (error = cudaGetDeviceProperties(&stream->device, index)) != cudaSuccess)
        return error_set(err, "GPU %d cannot be used: %s", index, cudaGetErrorString(error));
    if (stream->device.major < OLDEST_MAJOR)
        return error_set(err, "%s has compute capability %d.%d; bf16 needs %d.0 or later: use -device cpu",
                         stream->device.name, stream->device.major, stream->device.minor, OLDEST_MAJOR);
    return true;
}

static bool open_parts(Stream *stream, Error *err) {
    cudaError_t error = cudaStreamCreateWithFlags(&stream->stream, cudaStreamNonBlocking);
    if (error == cudaSuccess) error = cudaMalloc(&stream->workspace, WORKSPACE_BYTES);
    for (int i = 0; i < STAGING_SLOTS && error == cudaSuccess; i++) {
        error = cudaMallocHost(&stream->slot[i].pinned, STAGING_BYTES);
        if (error == cudaSuccess)
            error = cudaEventCreateWithFlags(&stream->slot[i].sent, cudaEventDisableTiming);
    }
    if (error == cudaSuccess) error = cudaMalloc(&stream->scratch, SCRATCH_START);
    if (error != cudaSuccess)
        return error_set(err, "%s has no room to start: %s", stream->device.name, cudaGetErrorString(error));
    stream->scratch_bytes = SCRATCH_START;
    const cublasStatus_t status = cublasLtCreate(&stream->blas);
    if (status != CUBLAS_STATUS_SUCCESS)
        return error_set(err, "cuBLASLt does not start: %s", cublasLtGetStatusString(status));
    return true;
}

Stream *cuda_stream_open(int index, Error *err) {
    Stream *stream = (Stream *)xcalloc(1, sizeof *stream);
    const char *wait = getenv("TRAIN_GPT_SYNC");
    stream->wait_each = wait && strcmp(wait, "1") == 0;
    if (!find_device(stream, index, err) || !open_parts(stream, err)) {
        cuda_stream_close(stream);
        return NULL;
    }
    stream->shared_bytes = stream->device.sharedMemPerBlockOptin;
    return stream;
}

void cuda_upload(Stream *stream, void *device, const void *host, size_t bytes) {
    for (size_t at = 0, part; at < bytes; at += part) {
        part = bytes - at < STAGING_BYTES ? bytes - at : (size_t)STAGING_BYTES;
        const size_t slot = stream->next_slot;
        stream->next_slot = (slot + 1) % STAGING_SLOTS;
        CUDA_CHECK(cudaEventSynchronize(stream->slot[slot].sent));
        memcpy(stream->slot[slot].pinned, (const uint8_t *)host + at, part);
        CUDA_CHECK(cudaMemcpyAsync((uint8_t *)device + at, stream->slot[slot].pinned, part,
                                   cudaMemcpyHostToDevice, stream->stream));
        CUDA_CHECK(cudaEventRecord(stream->slot[slot].sent, stream->stream));
    }
}

void cuda_mark(Stream *stream, size_t index) {
    if (index >= stream->n_marks) {
        const size_t count = 2 * index + 64;
        stream->marks = (cudaEvent_t *)xrealloc(stream->marks, count * sizeof *stream->marks);
        for (; stream->n_marks < count; stream->n_marks++)
            CUDA_CHECK(cudaEventCreate(&stream->marks[stream->n_marks]));
    }
    CUDA_CHECK(cudaEventRecord(stream->marks[index], stream->stream));
}

double cuda_seconds_between(Stream *stream, size_t from, size_t to) {
    float milliseconds = 0;
    CUDA_CHECK(cudaEventSynchronize(stream->marks[to]));
    CUDA_CHECK(cudaEventElapsedTime(&milliseconds, stream->marks[from], stream->marks[to]));
    return (double)milliseconds / 1e3;
}

void cuda_release(Stream *stream, void *memory) {
    CUDA_CHECK(cudaStreamSynchronize(stream->stream));
    if (!stream->has_recordings) {
        CUDA_CHECK(cudaFree(memory));
        return;
    }
    stream->outgrown = (void **)xrealloc(stream->outgrown, (stream->n_outgrown + 1) * sizeof(void *));
    stream->outgrown[stream->n_outgrown++] = memory;
}

void *cuda_scratch(Stream *stream, size_t bytes) {
    if (bytes > stream->scratch_bytes) {
        cuda_release(stream, stream->scratch);
        CUDA_CHECK(cudaMalloc(&stream->scratch, bytes));
        stream->scratch_bytes = bytes;
    }
    return stream->scratch;
}

/* ==== rotary angles ==== */
/* Computed in double. */
__global__ static void angles_kernel(float2 *full, __half2 *halved, size_t positions, size_t half) {
    const size_t at = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= positions * half) return;
    const double frequency = pow(10000.0, -(double)(at % half) / (double)half);
    const double angle = (double)(at / half) * frequency;
    full[at] = make_float2((float)cos(angle), (float)sin(angle));
    halved[at] = __float22half2_rn(full[at]);
}

/* Generation asks for one position more each time: growing by halves keeps that rare. */
Angles cuda_angles(Stream *stream, size_t positions, size_t half) {
    if (stream->angle_half != half || stream->angle_positions < positions) {
        const size_t grown = stream->angle_half == half ? stream->angle_positions * 3 / 2 : 0;
        const size_t least = grown > positions ? grown : positions, threads = 256;
        const size_t count = (least + ANGLE_ROWS - 1) / ANGLE_ROWS * ANGLE_ROWS;
        cuda_release(stream, stream->angles);
        CUDA_CHECK(cudaMalloc(&stream->angles, count * half * (sizeof(float2) + sizeof(__half2))));
        stream->angle_positions = count, stream->angle_half = half;
        float2 *full = (float2 *)stream->angles;
        angles_kernel<<<(unsigned)((count * half + threads - 1) / threads), (unsigned)threads, 0,
                        stream->stream>>>(full, (__half2 *)(full + count * half), count, half);
        cuda_launched(stream, "angles");
    }
    const float2 *full = (const float2 *)stream->angles;
    const Angles angles = {full, (const __half2 *)(full + stream->angle_positions * half)};
    return angles;
}

/* ==== the matrix product ==== */

/* What an algorithm depends on. Compared as bytes: zeroed before it is filled. */
typedef struct MatmulKey {
    size_t m, n, k, lda, ldb, ldc, batch, a_step, b_step, c_step;
    uint32_t alignment[4]; /* bytes, of a, b, c and aux */
    int in, out, epilogue;
    bool transpose_a, transpose_b, adds;
} MatmulKey;

struct MatmulPlan {
    MatmulKey key;
    bool possible;
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, c;
    cublasLtMatmulAlgo_t algorithm;
};

static void free_plans(Stream *stream) {
    for (size_t i = 0; i < stream->n_plans; i++) {
        MatmulPlan *plan = &stream->plans[i];
        cublasLtMatrixLayoutDestroy(plan->a), cublasLtMatrixLayoutDestroy(plan->b);
        cublasLtMatrixLayoutDestroy(plan->c), cublasLtMatmulDescDestroy(plan->operation);
    }
    stream->n_plans = 0;
}

/* The largest power of two that divides the address, 256 at most. */
static uint32_t alignment_of(const void *address) {
    const uintptr_t bits = (uintptr_t)address | 256;
    return (uint32_t)(bits & (~bits + 1));
}

/* A row-major (rows, columns) matrix: the library, which counts by columns, sees its transpose. */
static cublasLtMatrixLayout_t layout_of(cudaDataType_t type, size_t rows, size_t columns, size_t stride,
                                        size_t batch, size_t step) {
    cublasLtMatrixLayout_t layout = NULL;
    BLAS_CHECK(cublasLtMatrixLayoutCreate(&layout, type, columns, rows, (int64_t)stride));
    const int32_t count = (int32_t)batch;
    const int64_t distance = (int64_t)step;
    if (count > 1) {
        BLAS_CHECK(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count,
                                                    sizeof count));
        BLAS_CHECK(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                                    &distance, sizeof distance));
    }
    return layout;
}

#define SET_OPERATION(plan, attribute, value) \
    BLAS_CHECK(cublasLtMatmulDescSetAttribute((plan)->operation, (attribute), &(value), sizeof(value)))
#define PREFER(preference, attribute, value) \
    BLAS_CHECK(cublasLtMatmulPreferenceSetAttribute((preference), (attribute), &(value), sizeof(value)))

/* bias and aux change from call to call, and are no part of the algorithm. */
static void set_pointers(MatmulPlan *plan, const Matmul *matmul) {
    if (matmul->bias) SET_OPERATION(plan, CUBLASLT_MATMUL_DESC_BIAS_POINTER, matmul->bias);
    if (matmul->aux) SET_OPERATION(plan, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, matmul->aux);
}

static void make_plan(Stream *stream, MatmulPlan *plan, const Matmul *matmul) {
    /* C^T = op(B)^T op(A)^T: the library's A is our B, and its B our A. */
    plan->a = layout_of(matmul->in, matmul->transpose_b ? matmul->n : matmul->k,
                        matmul->transpose_b ? matmul->k : matmul->n, matmul->ldb, matmul->batch,
                        matmul->b_step);
    plan->b = layout_of(matmul->in, matmul->transpose_a ? matmul->k : matmul->m,
                        matmul->transpose_a ? matmul->m : matmul->k, matmul->lda, matmul->batch,
                        matmul->a_step);
    plan->c = layout_of(matmul->out, matmul->m, matmul->n, matmul->ldc, matmul->batch, matmul->c_step);

    BLAS_CHECK(cublasLtMatmulDescCreate(&plan->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    const cublasOperation_t op_a = matmul->transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t op_b = matmul->transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    SET_OPERATION(plan, CUBLASLT_MATMUL_DESC_TRANSA, op_a);
    SET_OPERATION(plan, CUBLASLT_MATMUL_DESC_TRANSB, op_b);
    static const cublasLtEpilogue_t epilogues[] = {CUBLASLT_EPILOGUE_DEFAULT, CUBLASLT_EPILOGUE_BIAS,
                                                   CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
                                                   CUBLASLT_EPILOGUE_GELU_BIAS, CUBLASLT_EPILOGUE_DGELU};
    const cublasLtEpilogue_t epilogue = epilogues[matmul->epilogue];
    SET_OPERATION(plan, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
    const int64_t aux_stride = (int64_t)matmul->ldc;
    if (matmul->aux) SET_OPERATION(plan, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, aux_stride);
    set_pointers(plan, matmul);

    cublasLtMatmulPreference_t preference = NULL;
    BLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    const uint64_t workspace = WORKSPACE_BYTES;
    /* Where a sum over k is split, its parts are added in fp32. */
    const uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    PREFER(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace);
    PREFER(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reductions);
    PREFER(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, plan->key.alignment[1]);
    PREFER(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, plan->key.alignment[0]);
    PREFER(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, plan->key.alignment[2]);
    PREFER(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, plan->key.alignment[2]);
    cublasLtMatmulHeuristicResult_t result;
    int found = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        stream->blas, plan->operation, plan->a, plan->b, plan->c, plan->c, preference, 1, &result, &found);
    cublasLtMatmulPreferenceDestroy(preference);
    plan->possible = status == CUBLAS_STATUS_SUCCESS && found > 0 && result.state == CUBLAS_STATUS_SUCCESS;
    if (plan->possible) {
        plan->algorithm = result.algo;
    } else if (matmul->epilogue == MATMUL_PLAIN) {
        char what[160];
        snprintf(what, sizeof what, "matrix product of %zu x %zu x %zu, %zu of them", matmul->m, matmul->n,
                 matmul->k, matmul->batch);
        cuda_fail(what, status == CUBLAS_STATUS_SUCCESS ? "cuBLASLt has no algorithm for it"
                                                        : cublasLtGetStatusString(status));
    }
}

static MatmulPlan *find_plan(Stream *stream, const Matmul *matmul) {
    MatmulKey key;
    memset(&key, 0, sizeof key);
    key.m = matmul->m, key.n = matmul->n, key.k = matmul->k;
    key.lda = matmul->lda, key.ldb = matmul->ldb, key.ldc = matmul->ldc;
    key.batch = matmul->batch, key.a_step = matmul->a_step, key.b_step = matmul->b_step,
    key.c_step = matmul->c_step;
    key.alignment[0] = alignment_of(matmul->a), key.alignment[1] = alignment_of(matmul->b);
    key.alignment[2] = alignment_of(matmul->c), key.alignment[3] = alignment_of(matmul->aux);
    key.in = matmul->in, key.out = matmul->out, key.epilogue = matmul->epilogue;
    key.transpose_a = matmul->transpose_a, key.transpose_b = matmul->transpose_b,
    key.adds = matmul->beta != 0;
    for (size_t i = 0; i < stream->n_plans; i++)
        if (memcmp(&stream->plans[i].key, &key, sizeof key) == 0) return &stream->plans[i];

    if (!stream->plans) stream->plans = (MatmulPlan *)xcalloc(MOST_PLANS, sizeof *stream->plans);
    if (stream->n_plans == MOST_PLANS) free_plans(stream);
    MatmulPlan *plan = &stream->plans[stream->n_plans++];
    memset(plan, 0, sizeof *plan);
    plan->key = key;
    make_plan(stream, plan, matmul);
    return plan;
}

bool cuda_matmul(Stream *stream, const Matmul *matmul) {
    MatmulPlan *plan = find_plan(stream, matmul);
    if (!plan->possible) return false;
    set_pointers(plan, matmul);
    BLAS_CHECK(cublasLtMatmul(stream->blas, plan->operation, &matmul->alpha, matmul->b, plan->a, matmul->a,
                              plan->b, &matmul->beta, matmul->c, plan->c, matmul->c, plan->c,
                              &plan->algorithm, stream->workspace, WORKSPACE_BYTES, stream->stream));
    if (stream->wait_each) {
        char what[160];
        snprintf(what, sizeof what, "matrix product of %zu x %zu x %zu, %zu of them, epilogue %d", matmul->m,
                 matmul->n, matmul->k, matmul->batch, (int)matmul->epilogue);
        cuda_launched(stream, what);
    }
    return true;
}

void cuda_stream_close(Stream *stream) {
    if (!stream) return;
    if (stream->stream) cudaStreamSynchronize(stream->stream);
    free_plans(stream);
    free(stream->plans), free(stream->chunk_spans);
    if (stream->blas) cublasLtDestroy(stream->blas);
    cudaFree(stream->workspace), cudaFree(stream->scratch), cudaFree(stream->angles),
        cudaFree(stream->chunks);
    for (int i = 0; i < STAGING_SLOTS; i++) {
        if (stream->slot[i].sent) cudaEventDestroy(stream->slot[i].sent);
        cudaFreeHost(stream->slot[i].pinned);
    }
    for (size_t i = 0; i < stream->n_outgrown; i++) cudaFree(stream->outgrown[i]);
    free(stream->outgrown);
    for (size_t i = 0; i < stream->n_marks; i++) cudaEventDestroy(stream->marks[i]);
    free(stream->marks);
    if (stream->stream) cudaStreamDestroy(stream->stream);
    free(stream);
}
