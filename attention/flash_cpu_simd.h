/* flash_cpu_simd.h - the block kernels of flash_cpu.c, compiled once for each level of vector instructions
 * (simd.h). A kernel does one block of work of one head on the calling thread, in an order of sums that
 * depends on the shape alone; which thread does which block is flash_cpu.c's business. */
#ifndef FLASH_CPU_SIMD_H
#define FLASH_CPU_SIMD_H

#include "../simd.h"

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    FLASH_TILE = 64,  /* keys of a block, and queries of a panel: a (64, 64) tile of S is 16 KiB */
    FLASH_PANELS = 4, /* panels of a block of queries: keys and values are packed once for all of them */
    FLASH_BLOCK = FLASH_TILE * FLASH_PANELS, /* queries of a block */
    FLASH_MAX_D = 256
};

/* One head: q, k, v, dq, dk, dv are (T, D) with rows qkv_stride floats apart; out, d_out are (T, D) with
 * rows out_stride apart; lse is (T). */
typedef struct FlashHead {
    size_t T, D;
    float scale;
    size_t qkv_stride, out_stride;
    const float *q, *k, *v;
    float *out, *lse; /* the backward pass only reads them */
    const float *d_out;
    float *dq, *dk, *dv;
    float *delta, *correction; /* (T): written by the pass that makes dq, read by the one that does not */
} FlashHead;

typedef struct FlashKernels {
    /* out and lse for the queries first .. first + FLASH_BLOCK - 1 (cut at T). */
    void (*forward)(const FlashHead *head, size_t first, float *work);
    /* What these queries and the keys key_begin .. key_end - 1 (multiples of FLASH_TILE, cut at the last
     * query) give to the gradients. With want_dq dq of these queries is written, which takes all keys up to
     * them. With want_dkv dk and dv of these keys are added to, or overwritten where the keys lie in this
     * block of queries: the first that sees them. So the blocks of a head go in ascending order. */
    void (*backward)(const FlashHead *head, size_t first, size_t key_begin, size_t key_end, bool want_dq,
                     bool want_dkv, float *work);
    /* out (D) of one query against n >= 1 keys and values, rows `stride` floats apart. */
    void (*query)(float *out, const float *q, const float *k, const float *v, size_t stride, size_t n,
                  size_t D, float scale);
} FlashKernels;

/* Floats of `work` that a thread needs for either pass, a multiple of 16: per channel (rounded up to 16, the
 * widest vector) the five packed forms of a block's queries and four of a tile's keys; two tiles; three
 * numbers for each query. Best aligned to 64 bytes. */
static inline size_t flash_work_floats(size_t D) {
    return (D + 15) / 16 * 16 * (5 * FLASH_BLOCK + 4 * FLASH_TILE) + 2 * FLASH_TILE * FLASH_TILE +
           3 * FLASH_BLOCK;
}

SIMD_DECLARE(FlashKernels, flash_kernels);

#ifdef __cplusplus
}
#endif
#endif
