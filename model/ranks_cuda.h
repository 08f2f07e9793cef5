/* ranks_cuda.h - what ranks.c needs of GPUs: who is on which, and sums over all of them by NCCL on a stream of
 * its own. No call waits: what takes time is asked for with ranks_gpu_poll. */
#ifndef RANKS_CUDA_H
#define RANKS_CUDA_H

#include "ops.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { RANKS_GPU_ID_BYTES = 128 };

typedef struct RanksGpu RanksGpu;
typedef enum RanksGpuState { RANKS_GPU_BUSY, RANKS_GPU_READY, RANKS_GPU_FAILED } RanksGpuState;

/* "GPU-5f3c...": no other GPU on any host has the same. */
void ranks_gpu_name(Stream *stream, char *text, size_t size);
/* What rank 0 tells all before they join. */
bool ranks_gpu_id(char id[RANKS_GPU_ID_BYTES], Error *err);
/* Begins to join `count` ranks; to be polled until it is ready. */
RanksGpu *ranks_gpu_join(Stream *stream, const char id[RANKS_GPU_ID_BYTES], int rank, int count, Error *err);
/* NCCL's own state, which tells of a peer that is gone too, and with `stream` whether all that was queued on the
 * compute stream is done. FAILED: the reason is in *err. */
RanksGpuState ranks_gpu_poll(RanksGpu *gpu, bool stream, Error *err);
/* Sums floats (n, on the device) over all ranks in place, after what is queued on the compute stream by now. With
 * loss_sum (on the device) not NULL, in the same launch also the sum of it and the largest of `stop`; that is
 * the step's last, and the compute stream goes on after it. */
bool ranks_gpu_sum(RanksGpu *gpu, float *floats, size_t n, double *loss_sum, int stop, Error *err);
/* Once the stream is done: the largest stop; seconds that the compute stream waited. */
int ranks_gpu_stop(const RanksGpu *gpu);
double ranks_gpu_exposed(RanksGpu *gpu);
void ranks_gpu_close(RanksGpu *gpu, bool abort); /* abort: without the other ranks */

#ifdef __cplusplus
}
#endif
#endif
