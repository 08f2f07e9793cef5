/* sgemm.c - the matrix product behind sgemm.h.
 *
 * The build chooses the library: USE_ONEDNN, or USE_CBLAS (with USE_OPENBLAS where it is OpenBLAS), or
 * neither. The loops of our own are always here, since each library leaves something to them: oneDNN may
 * fail for want of memory; a CBLAS would start threads of its own when called from inside a parallel
 * region, and its 32-bit integers do not hold every size.
 *
 * Those loops are Goto and van de Geijn's ("Anatomy of High-Performance Matrix Multiplication", ACM TOMS
 * 2008): op(A) and op(B) are copied in blocks that a cache holds, in the order in which the innermost loop
 * reads them, and that loop keeps a small tile of C in registers over the whole block. One thread computes
 * a tile of C, in one order, so the result does not even depend on the number of threads. */
#include "sgemm.h"

#include "common.h"
#include "simd.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(USE_ONEDNN)
#include <oneapi/dnnl/dnnl.h>
#elif defined(USE_CBLAS) && defined(__APPLE__)
#include <Accelerate/Accelerate.h>
#elif defined(USE_CBLAS)
#include <cblas.h>
#endif

/* ---- the tile in registers ---- */

/* c (rows, columns) = alpha * a b + beta * c for one tile. a is packed (depth, kernel rows), b is packed
 * (depth, kernel columns), both filled up with zeros; rows and columns say how much of the tile is in C. */
typedef void TileFunction(size_t depth, const float *a, const float *b, float alpha, float beta, float *c,
                          size_t ldc, size_t rows, size_t columns);

typedef struct Kernel {
    size_t rows, columns; /* of a full tile */
    TileFunction *tile;
} Kernel;

/* One kernel: `target` compiles it for an instruction set, `lanes` floats make a vector, a tile is
 * tile_rows x 2 vectors. Sizes are chosen so that the sums, two vectors of b and an element of a fill the
 * registers of that instruction set. The sums go through memory once at the end, which lets full tiles and
 * those at the edge of C share one way out. */
#define DEFINE_TILE(function, target, lanes, tile_rows)                                                \
    target static void function(size_t depth, const float *a, const float *b, float alpha, float beta, \
                                float *c, size_t ldc, size_t rows, size_t columns) {                   \
        typedef float Vector __attribute__((vector_size((lanes) * sizeof(float))));                    \
        union {                                                                                        \
            Vector vector[tile_rows][2];                                                               \
            float value[tile_rows][2 * (lanes)];                                                       \
        } out;                                                                                         \
        Vector sum[tile_rows][2] = {{{0}}};                                                            \
        for (size_t p = 0; p < depth; p++) {                                                           \
            const Vector b0 = *(const Vector *)b, b1 = *(const Vector *)(b + (lanes));                 \
            for (size_t i = 0; i < (tile_rows); i++) sum[i][0] += a[i] * b0, sum[i][1] += a[i] * b1;   \
            a += (tile_rows), b += 2 * (lanes);                                                        \
        }                                                                                              \
        for (size_t i = 0; i < (tile_rows); i++)                                                       \
            out.vector[i][0] = alpha * sum[i][0], out.vector[i][1] = alpha * sum[i][1];                \
        for (size_t i = 0; i < rows; i++, c += ldc) {                                                  \
            const float *row = out.value[i];                                                           \
            if (beta == 0)                                                                             \
                for (size_t j = 0; j < columns; j++) c[j] = row[j];                                    \
            else                                                                                       \
                for (size_t j = 0; j < columns; j++) c[j] = row[j] + beta * c[j];                      \
        }                                                                                              \
    }

#if defined(__x86_64__)
DEFINE_TILE(tile_avx512, __attribute__((target("avx512f"))), 16, 12) /* 24 + 2 of 32 registers */
DEFINE_TILE(tile_avx2, __attribute__((target("avx2,fma"))), 8, 6)    /* 12 + 2 + 1 of 16 */
DEFINE_TILE(tile_plain, , 4, 6)                                      /* SSE2: 12 + 2 + 1 of 16 */
static const Kernel kernels[] = {
    [SIMD_PLAIN] = {6, 8, tile_plain},
    [SIMD_AVX2] = {6, 16, tile_avx2},
    [SIMD_AVX512] = {12, 32, tile_avx512},
};
#else
DEFINE_TILE(tile_plain, , 4, 12) /* ARM64: 24 + 2 of 32 registers */
static const Kernel kernels[] = {[SIMD_PLAIN] = {12, 8, tile_plain}};
#endif

/* ---- packing and the loops around the tile ---- */

/* Block sizes. A panel of b (DEPTH x 32 floats) and one of a (DEPTH x 12) pass through the first-level
 * cache, a task's panels of a (96 rows: 96 KiB) stay in the second, the blocks (1.5 and 2 MiB) in the third.
 * Multiples of every kernel's rows and columns. */
enum {
    BLOCK_DEPTH = 256,
    BLOCK_ROWS = 1536,
    BLOCK_COLUMNS = 2048,
    TASK_ROWS = 96,
    TASK_COLUMNS = 256,
    CACHE_LINE = 64
};

static size_t smaller(size_t a, size_t b) {
    return a < b ? a : b;
}

static bool in_parallel(void) {
#ifdef _OPENMP
    return omp_in_parallel();
#else
    return false;
#endif
}

/* Copies a panel: out (depth, width) gets x[p * step_p + i * step_i], zeros for i from `used` to width. */
static void pack_panel(float *restrict out, const float *restrict x, size_t step_p, size_t step_i,
                       size_t depth, size_t used, size_t width) {
    if (step_i == 1 && used == width) {
        for (size_t p = 0; p < depth; p++) memcpy(out + p * width, x + p * step_p, width * sizeof *out);
        return;
    }
    /* In strips of 16: of each cache line of x all is used while the strip of `out` is in the cache. */
    for (size_t p0 = 0; p0 < depth; p0 += 16)
        for (size_t i = 0; i < used; i++)
            for (size_t p = p0; p < smaller(depth, p0 + 16); p++)
                out[p * width + i] = x[p * step_p + i * step_i];
    for (size_t p = 0; p < depth; p++)
        for (size_t i = used; i < width; i++) out[p * width + i] = 0;
}

/* The packed blocks, one pair for each thread that calls, kept for its next call. Memory that a small
 * product does not touch is never backed by the system. */
static float *packed_blocks(void) {
    static _Thread_local float *blocks;
    if (!blocks) {
        const size_t floats = (size_t)BLOCK_DEPTH * (BLOCK_ROWS + BLOCK_COLUMNS);
        char *memory = xmalloc(floats * sizeof(float) + CACHE_LINE);
        blocks = (float *)(memory + (CACHE_LINE - (uintptr_t)memory % CACHE_LINE));
    }
    return blocks;
}

static void sgemm_loops(bool transpose_a, bool transpose_b, size_t m, size_t n, size_t k, float alpha,
                        const float *a, size_t lda, const float *b, size_t ldb, float beta, float *c,
                        size_t ldc) {
    const Kernel *kernel = &kernels[simd_level()];
    const size_t rows = kernel->rows, columns = kernel->columns;
    const size_t a_step_i = transpose_a ? 1 : lda, a_step_p = transpose_a ? lda : 1;
    const size_t b_step_j = transpose_b ? ldb : 1, b_step_p = transpose_b ? 1 : ldb;
    float *packed_a = packed_blocks(), *packed_b = packed_a + (size_t)BLOCK_DEPTH * BLOCK_ROWS;
    /* Waking the team costs some microseconds, about the time of this many multiplications. */
    const bool worth_a_team = (double)m * (double)n * (double)k > 100e3 && !in_parallel();
    (void)worth_a_team; /* read by OpenMP alone */
#pragma omp parallel if (worth_a_team)
    for (size_t j0 = 0; j0 < n; j0 += BLOCK_COLUMNS) {
        const size_t block_n = smaller(n - j0, BLOCK_COLUMNS);
        for (size_t p0 = 0; p0 < k; p0 += BLOCK_DEPTH) {
            const size_t depth = smaller(k - p0, BLOCK_DEPTH);
            const float block_beta = p0 == 0 ? beta : 1; /* later blocks add to the first one's sums */
#pragma omp for schedule(static)
            for (size_t j = 0; j < block_n; j += columns)
                pack_panel(packed_b + j * depth, b + (j0 + j) * b_step_j + p0 * b_step_p, b_step_p, b_step_j,
                           depth, smaller(block_n - j, columns), columns);
            for (size_t i0 = 0; i0 < m; i0 += BLOCK_ROWS) {
                const size_t block_m = smaller(m - i0, BLOCK_ROWS);
#pragma omp for schedule(static)
                for (size_t i = 0; i < block_m; i += rows)
                    pack_panel(packed_a + i * depth, a + (i0 + i) * a_step_i + p0 * a_step_p, a_step_p,
                               a_step_i, depth, smaller(block_m - i, rows), rows);
#pragma omp for schedule(dynamic) collapse(2)
                for (size_t task_j = 0; task_j < block_n; task_j += TASK_COLUMNS)
                    for (size_t task_i = 0; task_i < block_m; task_i += TASK_ROWS) {
                        const size_t end_j = smaller(block_n, task_j + TASK_COLUMNS);
                        const size_t end_i = smaller(block_m, task_i + TASK_ROWS);
                        for (size_t j = task_j; j < end_j; j += columns)
                            for (size_t i = task_i; i < end_i; i += rows)
                                kernel->tile(depth, packed_a + i * depth, packed_b + j * depth, alpha,
                                             block_beta, c + (i0 + i) * ldc + j0 + j, ldc,
                                             smaller(block_m - i, rows), smaller(block_n - j, columns));
                    }
            }
        }
    }
}

/* ---- the entry ---- */

/* C = beta * C: what is left of the product where k or alpha is 0. */
static void scale(size_t m, size_t n, float beta, float *c, size_t ldc) {
    for (size_t i = 0; i < m; i++)
        for (size_t j = 0; j < n; j++) c[i * ldc + j] = beta == 0 ? 0 : beta * c[i * ldc + j];
}

void sgemm(bool transpose_a, bool transpose_b, size_t m, size_t n, size_t k, float alpha, const float *a,
           size_t lda, const float *b, size_t ldb, float beta, float *c, size_t ldc) {
    if (m == 0 || n == 0) return;
    if (k == 0 || alpha == 0) {
        if (beta != 1) scale(m, n, beta, c, ldc);
        return;
    }
    /* The stride of a matrix with one row means nothing, but libraries refuse one shorter than the row. */
    if ((transpose_a ? k : m) == 1) lda = transpose_a ? m : k;
    if ((transpose_b ? n : k) == 1) ldb = transpose_b ? k : n;
    if (m == 1) ldc = n;
#if defined(USE_ONEDNN)
    const dnnl_status_t status = dnnl_sgemm(transpose_a ? 'T' : 'N', transpose_b ? 'T' : 'N', (dnnl_dim_t)m,
                                            (dnnl_dim_t)n, (dnnl_dim_t)k, alpha, a, (dnnl_dim_t)lda, b,
                                            (dnnl_dim_t)ldb, beta, c, (dnnl_dim_t)ldc);
    if (status == dnnl_success) return;
#elif defined(USE_CBLAS)
    const size_t limit = INT_MAX;
    if (!in_parallel() && m <= limit && n <= limit && k <= limit && lda <= limit && ldb <= limit &&
        ldc <= limit) {
#if defined(USE_OPENBLAS) && defined(_OPENMP)
        /* OpenBLAS counts its threads by itself; -threads is told to OpenMP. */
        const int threads = omp_get_max_threads();
        if (openblas_get_num_threads() != threads) openblas_set_num_threads(threads);
#endif
        cblas_sgemm(CblasRowMajor, transpose_a ? CblasTrans : CblasNoTrans,
                    transpose_b ? CblasTrans : CblasNoTrans, (int)m, (int)n, (int)k, alpha, a, (int)lda, b,
                    (int)ldb, beta, c, (int)ldc);
        return;
    }
#endif
    sgemm_loops(transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

/* ---- for the start-up table ---- */

const char *sgemm_library(void) {
#if defined(USE_ONEDNN)
    static char name[64];
    const dnnl_version_t *version = dnnl_version();
    snprintf(name, sizeof name, "oneDNN %d.%d.%d", version->major, version->minor, version->patch);
    return name;
#elif defined(USE_OPENBLAS)
    static char name[64];
    /* "OpenBLAS 0.3.21 NO_LAPACKE DYNAMIC_ARCH ...": the first two words are the version. */
    const char *config = openblas_get_config(), *end = strchr(config, ' ');
    const char *second = end ? strchr(end + 1, ' ') : NULL;
    const size_t length = second ? (size_t)(second - config) : strlen(config);
    snprintf(name, sizeof name, "%.*s (%s)", (int)smaller(length, 32), config, openblas_get_corename());
    return name;
#elif defined(USE_CBLAS) && defined(__APPLE__)
    return "Accelerate";
#elif defined(USE_CBLAS)
    return "CBLAS";
#else
    static char name[64];
    snprintf(name, sizeof name, "built-in loops (%s)", simd_name(simd_level()));
    return name;
#endif
}

const char *sgemm_warning(void) {
    static char text[256];
#if defined(USE_ONEDNN)
    static const char *const variables[] = {"DNNL_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA"};
#elif defined(USE_OPENBLAS)
    static const char *const variables[] = {"OPENBLAS_CORETYPE"};
#else
    static const char *const variables[] = {NULL};
#endif
    for (size_t i = 0; i < sizeof variables / sizeof variables[0]; i++) {
        const char *value = variables[i] ? getenv(variables[i]) : NULL;
        if (!value || !*value) continue;
        snprintf(text, sizeof text,
                 "%s=%.40s limits the instructions that the matrix library uses; unset it for full speed",
                 variables[i], value);
        return text;
    }
#ifdef _OPENMP
    const char *value = getenv("OMP_NUM_THREADS");
    const long threads = value ? strtol(value, NULL, 10) : 0;
    const int cores = omp_get_num_procs();
    if (threads > 0 && threads < cores) {
        snprintf(text, sizeof text,
                 "OMP_NUM_THREADS=%ld leaves some of the %d cores idle; right for several processes on one "
                 "machine, else unset it",
                 threads, cores);
        return text;
    }
#endif
    return NULL;
}
