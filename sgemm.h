/* sgemm.h - the one matrix product of the CPU side, behind whichever library the build found: oneDNN
 * (dnnl_sgemm), a CBLAS, or a tiled loop of our own that needs nothing. Used by model/ops_cpu.c and by
 * the attention backends for the CPU; it lies beside common because both rooms stand on it. */
#ifndef SGEMM_H
#define SGEMM_H

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* C = alpha * op(A) op(B) + beta * C, row-major, op(X) = X or its transpose.
 * op(A) is (m, k), op(B) is (k, n), C is (m, n); lda, ldb, ldc are the row strides in memory of A, B, C
 * as stored. beta 0 overwrites C, whatever it held (NaN too). Any size may be 0. All threads of the
 * OpenMP team take part; called inside a parallel region it runs on the calling thread alone. The
 * result is the same from run to run for the same number of threads. */
void sgemm(bool transpose_a, bool transpose_b, size_t m, size_t n, size_t k, float alpha, const float *a,
           size_t lda, const float *b, size_t ldb, float beta, float *c, size_t ldc);

/* "oneDNN 2.6.3", "OpenBLAS 0.3.21 (Zen)", "built-in loops": for the start-up table. */
const char *sgemm_library(void);
/* A sentence where an environment variable holds the library back (OPENBLAS_CORETYPE,
 * OMP_NUM_THREADS=1 ...), else NULL. */
const char *sgemm_warning(void);

#ifdef __cplusplus
}
#endif
#endif
