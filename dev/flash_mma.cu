/* flash_mma.cu - the attention kernels of attention/flash_cuda.cu for other programs: a shared library
 * (make build/release/libflash_mma.so) with plain C functions, which dev/bench_attention.py calls on PyTorch's
 * tensors and stream. All pointers are to memory of the current GPU; tensors are bf16, lse fp32, in the layouts
 * of attention.h: qkv and d_qkv (B, T, 3, H, D), out and d_out (B, T, H, D), lse (B, H, T). Work is queued on
 * `stream` (a cudaStream_t). Each function returns NULL, or in words why it did nothing; the text is valid
 * until the thread's next call. */
#include "../attention/attention.h"
#include "../cuda_stream.h"

#include <math.h>

extern "C" {
extern const Attention attention_flash_mma;
}

static thread_local Error error;

static const char *prepare(Stream *stream, AttentionCall *call, const AttentionShape *shape, void *queue) {
    int device = 0;
    if (!attention_flash_mma.can_run(shape, &error)) return error.text;
    cudaError_t status = cudaGetDevice(&device);
    if (status == cudaSuccess) status = cudaGetDeviceProperties(&stream->device, device);
    if (status != cudaSuccess) return cudaGetErrorString(status);
    stream->stream = (cudaStream_t)queue, stream->shared_bytes = stream->device.sharedMemPerBlockOptin;
    call->B = shape->B, call->T = shape->T, call->H = shape->H, call->D = shape->D, call->stream = stream;
    call->training = shape->training, call->deterministic = shape->deterministic;
    call->scale = 1.0f / sqrtf((float)shape->D);
    return NULL;
}

extern "C" size_t flash_mma_scratch_bytes(size_t B, size_t T, size_t H, size_t D, int deterministic) {
    const AttentionShape shape = {B, T, H, D, true, deterministic != 0};
    return attention_flash_mma.scratch_bytes(&shape);
}

extern "C" const char *flash_mma_forward(const void *qkv, void *out, float *lse, size_t B, size_t T, size_t H,
                                         size_t D, void *stream) {
    const AttentionShape shape = {B, T, H, D, true, false};
    static thread_local Stream here;
    AttentionCall call = {};
    const char *reason = prepare(&here, &call, &shape, stream);
    if (reason) return reason;
    call.qkv = (void *)qkv, call.out = out, call.lse = lse;
    attention_flash_mma.forward(&call);
    return NULL;
}

/* scratch: flash_mma_scratch_bytes; all of d_qkv is written. */
extern "C" const char *flash_mma_backward(const void *qkv, const void *out, const float *lse,
                                          const void *d_out, void *d_qkv, void *scratch, size_t B, size_t T,
                                          size_t H, size_t D, int deterministic, void *stream) {
    const AttentionShape shape = {B, T, H, D, true, deterministic != 0};
    static thread_local Stream here;
    AttentionCall call = {};
    const char *reason = prepare(&here, &call, &shape, stream);
    if (reason) return reason;
    call.qkv = (void *)qkv, call.out = (void *)out, call.lse = (float *)lse;
    call.d_out = d_out, call.d_qkv = d_qkv, call.scratch = scratch;
    attention_flash_mma.backward(&call);
    return NULL;
}
