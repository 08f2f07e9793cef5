/* emulated.h - a GPU's way of running a kernel, on one thread of the CPU: blocks one after the other, the threads of
 * a block as contexts of their own that take turns, the lanes of a warp meeting at each instruction of the whole
 * warp. Slow, and made to find faults, not to hide them:
 *     - whose turn it is, hangs on pseudo-random numbers, so that a missing barrier shows;
 *     - asynchronous copies happen in one half of the blocks as early as they may, in the other as late;
 *     - shared memory holds NaN at first, and every access is checked for bounds and alignment;
 *     - lanes that meet at different instructions, or wait for one that has ended, end the process with a line.
 * tests/emulated/cuda_runtime.h puts CUDA's names upon it. */
#ifndef EMULATED_H
#define EMULATED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { LANES = 32 };

typedef struct EmulatedIndex {
    unsigned x;
} EmulatedIndex;
extern EmulatedIndex emulated_thread, emulated_block; /* of the context that runs */

/* Whether contexts can be switched on this processor and system. */
bool emulated_is_possible(void);

/* run(job) by every thread of every block; threads: whole warps; `shared` bytes of dynamic shared memory. */
void emulated_launch(const char *name, void (*run)(const void *job), const void *job, size_t blocks,
                     unsigned threads, size_t shared);
/* From now on only the last 1 / `parts` of a grid's blocks run: for tensors too large to fill. */
void emulated_run_last(size_t parts);

/* For a backend's calls; and attention/flash_cuda.cu as it is compiled for GPUs of 9.0 and for those before. */
struct Stream *emulated_stream(void);
extern const struct Attention emulated_flash_90, emulated_flash_80;

/* ---- within a kernel ---- */
/* All lanes of the warp come together; the last calls together(operands), which has all of them by lane. */
void emulated_meet(void (*together)(void *const operands[LANES]), void *operand);
/* All threads of the block that have not ended. */
void emulated_barrier(void);

/* The first address of shared memory, and what lies at one: `bytes` that begin at a multiple of as many. */
unsigned emulated_shared_start(void);
void *emulated_shared(unsigned at, size_t bytes);
/* 16 bytes from memory, or zeros where there is no `from`, to be there after this thread's next emulated_wait. */
void emulated_copy(unsigned to, const void *from);
void emulated_wait(void);

#ifdef __cplusplus
}
#endif
#endif
