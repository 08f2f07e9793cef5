/* ranks_cuda.cu - see ranks_cuda.h. Sums run on a stream of their own: a bucket waits for an event that stands
 * behind its gradients on the compute stream, and the compute stream, once a step, for the last bucket's. So
 * communication and the rest of the backward pass share the GPU, and the host waits for neither.
 *
 * NCCL's calls do not block (ncclConfig_t.blocking = 0): where one is under way, a call that is not finished says
 * so, and whoever started it asks again. */
#ifdef USE_NCCL
#include "ranks_cuda.h"

#include "../cuda_stream.h"

#include <nccl.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

static_assert(sizeof(ncclUniqueId) == RANKS_GPU_ID_BYTES, "NCCL's id has another size");

enum {
    /* Multiprocessors that a sum may take from the kernels beside it; enough for most of NVLink's rate.
     * NCCL_MAX_CTAS in the environment goes before this. */
    MOST_CTAS = 16,
    CLOSE_SECONDS = 10
};

struct RanksGpu {
    Stream *compute;
    ncclComm_t comm;
    cudaStream_t stream;
    cudaEvent_t ready, summed;         /* a bucket's gradients; all sums of a step */
    cudaEvent_t waits, goes_on;        /* the compute stream, for the last bucket */
    int32_t *stop;                     /* on the device */
    int32_t *given_stop, *agreed_stop; /* pinned */
    bool measured;                     /* waits and goes_on are of a step */
};

static bool nccl_error(const RanksGpu *gpu, ncclResult_t result, const char *what, Error *err) {
    const char *last = gpu && gpu->comm ? ncclGetLastError(gpu->comm) : "";
    return error_set(err, "NCCL: %s: %s%s%.300s", what, ncclGetErrorString(result), last && *last ? "; " : "",
                     last ? last : "");
}

void ranks_gpu_name(Stream *stream, char *text, size_t size) {
    const unsigned char *uuid = (const unsigned char *)stream->device.uuid.bytes;
    size_t at = (size_t)snprintf(text, size, "GPU-");
    for (int i = 0; i < 16 && at + 3 < size; i++)
        at += (size_t)snprintf(text + at, size - at, "%02x", uuid[i]);
}

bool ranks_gpu_id(char id[RANKS_GPU_ID_BYTES], Error *err) {
    ncclUniqueId made;
    const ncclResult_t result = ncclGetUniqueId(&made);
    if (result != ncclSuccess) return nccl_error(NULL, result, "ncclGetUniqueId", err);
    memcpy(id, &made, sizeof made);
    return true;
}

RanksGpu *ranks_gpu_join(Stream *stream, const char id[RANKS_GPU_ID_BYTES], int rank, int count, Error *err) {
    RanksGpu *gpu = (RanksGpu *)xcalloc(1, sizeof *gpu);
    gpu->compute = stream;
    CUDA_CHECK(cudaStreamCreateWithFlags(&gpu->stream, cudaStreamNonBlocking));
    CUDA_CHECK(cudaEventCreateWithFlags(&gpu->ready, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventCreateWithFlags(&gpu->summed, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventCreate(&gpu->waits));
    CUDA_CHECK(cudaEventCreate(&gpu->goes_on));
    CUDA_CHECK(cudaMalloc(&gpu->stop, sizeof *gpu->stop));
    CUDA_CHECK(cudaMallocHost(&gpu->given_stop, 2 * sizeof *gpu->given_stop));
    gpu->agreed_stop = gpu->given_stop + 1;
    *gpu->given_stop = *gpu->agreed_stop = 0;

    ncclUniqueId same;
    memcpy(&same, id, sizeof same);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    config.maxCTAs = MOST_CTAS;
    const ncclResult_t result = ncclCommInitRankConfig(&gpu->comm, count, same, rank, &config);
    if (result == ncclSuccess || result == ncclInProgress) return gpu;
    nccl_error(gpu, result, "ncclCommInitRankConfig", err);
    ranks_gpu_close(gpu, true);
    return NULL;
}

RanksGpuState ranks_gpu_poll(RanksGpu *gpu, bool stream, Error *err) {
    ncclResult_t state = ncclSuccess;
    const ncclResult_t result = ncclCommGetAsyncError(gpu->comm, &state);
    if (result == ncclSuccess && state == ncclInProgress) return RANKS_GPU_BUSY;
    if (result != ncclSuccess || state != ncclSuccess) {
        nccl_error(gpu, result != ncclSuccess ? result : state, "another rank or its GPU is gone", err);
        return RANKS_GPU_FAILED;
    }
    const cudaError_t done = stream ? cudaStreamQuery(gpu->compute->stream) : cudaSuccess;
    if (done == cudaErrorNotReady) return RANKS_GPU_BUSY;
    if (done == cudaSuccess) return RANKS_GPU_READY;
    error_set(err, "GPU: %s", cudaGetErrorString(done));
    return RANKS_GPU_FAILED;
}

/* A call that was begun, until it is on the stream: what is queued next must stand behind it. Only the first ones
 * take time, while they connect; a peer that does not answer then is what the other ranks' clocks are for. */
static bool launched(RanksGpu *gpu, ncclResult_t result, const char *what, Error *err) {
    while (result == ncclInProgress) {
        const ncclResult_t asked = ncclCommGetAsyncError(gpu->comm, &result);
        if (asked != ncclSuccess) result = asked;
        if (result == ncclInProgress) sched_yield();
    }
    return result == ncclSuccess || nccl_error(gpu, result, what, err);
}

bool ranks_gpu_sum(RanksGpu *gpu, float *floats, size_t n, double *loss_sum, int stop, Error *err) {
    CUDA_CHECK(cudaEventRecord(gpu->ready, gpu->compute->stream));
    CUDA_CHECK(cudaStreamWaitEvent(gpu->stream, gpu->ready, 0));
    if (!loss_sum)
        return launched(gpu, ncclAllReduce(floats, floats, n, ncclFloat, ncclSum, gpu->comm, gpu->stream),
                        "ncclAllReduce", err);
    *gpu->given_stop = stop;
    CUDA_CHECK(
        cudaMemcpyAsync(gpu->stop, gpu->given_stop, sizeof *gpu->stop, cudaMemcpyHostToDevice, gpu->stream));
    ncclGroupStart(); /* what fails within a group, its end tells */
    ncclAllReduce(floats, floats, n, ncclFloat, ncclSum, gpu->comm, gpu->stream);
    ncclAllReduce(loss_sum, loss_sum, 1, ncclDouble, ncclSum, gpu->comm, gpu->stream);
    ncclAllReduce(gpu->stop, gpu->stop, 1, ncclInt32, ncclMax, gpu->comm, gpu->stream);
    if (!launched(gpu, ncclGroupEnd(), "ncclAllReduce of the last bucket", err)) return false;
    CUDA_CHECK(
        cudaMemcpyAsync(gpu->agreed_stop, gpu->stop, sizeof *gpu->stop, cudaMemcpyDeviceToHost, gpu->stream));
    CUDA_CHECK(cudaEventRecord(gpu->summed, gpu->stream));
    CUDA_CHECK(cudaEventRecord(gpu->waits, gpu->compute->stream));
    CUDA_CHECK(cudaStreamWaitEvent(gpu->compute->stream, gpu->summed, 0));
    CUDA_CHECK(cudaEventRecord(gpu->goes_on, gpu->compute->stream));
    gpu->measured = true;
    return true;
}

int ranks_gpu_stop(const RanksGpu *gpu) {
    return *gpu->agreed_stop;
}

double ranks_gpu_exposed(RanksGpu *gpu) {
    float ms = 0;
    if (gpu->measured) CUDA_CHECK(cudaEventElapsedTime(&ms, gpu->waits, gpu->goes_on));
    gpu->measured = false;
    return 1e-3 * ms;
}

void ranks_gpu_close(RanksGpu *gpu, bool abort) {
    const double begun = seconds_now();
    ncclResult_t state = ncclSuccess;
    if (gpu->comm && !abort) {
        state = ncclCommFinalize(gpu->comm);
        while (state == ncclInProgress && seconds_now() - begun < CLOSE_SECONDS)
            if (ncclCommGetAsyncError(gpu->comm, &state) != ncclSuccess) state = ncclInternalError;
    }
    if (gpu->comm && (abort || state != ncclSuccess)) ncclCommAbort(gpu->comm);
    else if (gpu->comm) ncclCommDestroy(gpu->comm);
    if (abort) return; /* the process ends; CUDA might wait for kernels that wait for others */
    cudaFree(gpu->stop), cudaFreeHost(gpu->given_stop);
    cudaEventDestroy(gpu->ready), cudaEventDestroy(gpu->summed);
    cudaEventDestroy(gpu->waits), cudaEventDestroy(gpu->goes_on);
    cudaStreamDestroy(gpu->stream);
    free(gpu);
}
#endif
