/* test_sgemm.c - the matrix product against a loop in double, for whichever library the build found.
 *
 * Bound. A sum of k products in fp32, in any order and with or without fused multiply-add, is off by at
 * most g(k) * sum|a||b| with g(k) = k u / (1 - k u), u = 2^-24 (Higham, Accuracy and Stability, section
 * 3.5). Scaling by alpha, by beta and adding the two are three roundings more, of which each acts on at most
 * |alpha| sum|a||b| + |beta c|. So |ours - exact| <= g(k + 3) (|alpha| sum|a||b| + |beta c|). */
#include "test.h"

#include "../common.h"
#include "../sgemm.h"
#include "../simd.h"

#include <math.h>
#ifdef _OPENMP
#include <omp.h>
#endif

typedef struct Product {
    bool transpose_a, transpose_b;
    size_t m, n, k, lda, ldb, ldc;
    float alpha, beta;
} Product;

enum { GUARD = 64 }; /* floats before and after C */

static float guard_value(size_t i) {
    return (float)(1000 + i % 7);
}

static float *random_floats(Rng *rng, size_t count) {
    float *values = xmalloc(count * sizeof *values);
    for (size_t i = 0; i < count; i++) values[i] = (float)rng_normal(rng);
    return values;
}

/* Fills C's matrix with `inside` (NULL: NaN); guards and the gaps between its rows get guard_value. */
static void fill_c(const Product *x, float *memory, const float *inside) {
    const size_t floats = x->m * x->ldc + 2 * GUARD;
    for (size_t i = 0; i < floats; i++) memory[i] = guard_value(i);
    for (size_t i = 0; i < x->m; i++)
        for (size_t j = 0; j < x->n; j++)
            memory[GUARD + i * x->ldc + j] = inside ? inside[i * x->n + j] : NAN;
}

static void check_product(const Product *x, Rng *rng) {
    const size_t rows_a = x->transpose_a ? x->k : x->m, rows_b = x->transpose_b ? x->n : x->k;
    float *a = random_floats(rng, rows_a * x->lda), *b = random_floats(rng, rows_b * x->ldb);
    float *c_before = random_floats(rng, x->m * x->n);
    const size_t floats = x->m * x->ldc + 2 * GUARD;
    float *memory = xmalloc(floats * sizeof *memory), *c = memory + GUARD;
    fill_c(x, memory, x->beta == 0 ? NULL : c_before);
    sgemm(x->transpose_a, x->transpose_b, x->m, x->n, x->k, x->alpha, a, x->lda, b, x->ldb, x->beta, c,
          x->ldc);

    const double u = 0x1p-24, terms = (double)(x->k + 3), bound = terms * u / (1 - terms * u);
    double worst = 0; /* error over what is allowed */
    for (size_t i = 0; i < x->m; i++)
        for (size_t j = 0; j < x->n; j++) {
            double exact = 0, magnitude = 0;
            for (size_t p = 0; p < x->k; p++) {
                const double product = (double)a[x->transpose_a ? p * x->lda + i : i * x->lda + p] *
                                       (double)b[x->transpose_b ? j * x->ldb + p : p * x->ldb + j];
                exact += product, magnitude += fabs(product);
            }
            const double old = x->beta == 0 ? 0 : (double)x->beta * (double)c_before[i * x->n + j];
            const double alpha = (double)x->alpha,
                         error = fabs((double)c[i * x->ldc + j] - (alpha * exact + old));
            const double allowed = bound * (fabs(alpha) * magnitude + fabs(old));
            const double ratio = error == 0 ? 0 : error / allowed;
            if (!(ratio <= worst)) worst = ratio; /* NaN is kept, too */
        }
    size_t overwritten = 0;
    for (size_t i = 0; i < floats; i++) {
        const size_t at = i - GUARD; /* wraps around before C, which is then no element of it either */
        const bool inside = i >= GUARD && i < floats - GUARD && at % x->ldc < x->n;
        overwritten += !inside && memory[i] != guard_value(i);
    }
    CHECK_MSG(
        worst <= 1 && overwritten == 0,
        "%c%c m %zu n %zu k %zu lda %zu ldb %zu ldc %zu alpha %g beta %g: %.3g of the bound, %zu guards "
        "overwritten",
        x->transpose_a ? 'T' : 'N', x->transpose_b ? 'T' : 'N', x->m, x->n, x->k, x->lda, x->ldb, x->ldc,
        (double)x->alpha, (double)x->beta, worst, overwritten);
    free(a), free(b), free(c_before), free(memory);
}

/* All four transposes of a shape, with rows `gap` floats apart. */
static void check_shape(size_t m, size_t n, size_t k, size_t gap, float alpha, float beta, Rng *rng) {
    for (int t = 0; t < 4; t++) {
        const bool transpose_a = t & 1, transpose_b = t & 2;
        const Product product = {
            transpose_a, transpose_b, m,   n, k, (transpose_a ? m : k) + gap, (transpose_b ? k : n) + gap,
            n + gap,     alpha,       beta};
        check_product(&product, rng);
    }
}

TEST(every_small_size) {
    Rng rng = rng_start(1, 0);
    for (size_t m = 1; m <= 5; m++)
        for (size_t n = 1; n <= 5; n++)
            for (size_t k = 1; k <= 5; k++) check_shape(m, n, k, (m + n + k) % 3, 1, 0, &rng);
}

static void check_odd_sizes(void) {
    /* Around multiples of a tile's rows and columns, of a task's, and of a block's depth. */
    static const size_t shapes[][3] = {{1, 127, 64},   {127, 1, 64},  {13, 33, 257},  {12, 32, 256},
                                       {25, 31, 255},  {97, 65, 31},  {95, 257, 17},  {64, 64, 513},
                                       {193, 300, 70}, {7, 520, 300}, {130, 11, 129}, {1, 1, 1000}};
    static const float scales[][2] = {{1, 0}, {1, 1}, {0.125f, 0}, {-1.7f, 0.3f}};
    Rng rng = rng_start(2, 0);
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        for (size_t s = 0; s < sizeof scales / sizeof scales[0]; s++)
            check_shape(shapes[i][0], shapes[i][1], shapes[i][2], (i + s) % 2 ? 5 : 0, scales[s][0],
                        scales[s][1], &rng);
}

TEST(odd_sizes) {
    check_odd_sizes();
}

TEST(odd_sizes_at_lower_levels) {
    if (!strstr(sgemm_library(), "built-in")) SKIP("%s chooses its instructions by itself", sgemm_library());
    const SimdLevel best = simd_level();
    for (SimdLevel level = SIMD_PLAIN; level < best; level++) {
        simd_force(level);
        check_odd_sizes();
    }
    simd_force(best);
}

TEST(beyond_one_block) {
    Rng rng = rng_start(3, 0);
    check_shape(1550, 9, 300, 3, 1, 0.5f, &rng);
    check_shape(9, 2070, 300, 0, 1, 0, &rng);
}

TEST(random_shapes) {
    Rng rng = rng_start(4, 0);
    for (int i = 0; i < 60; i++) {
        const size_t m = 1 + rng_below(&rng, 80), n = 1 + rng_below(&rng, 80), k = 1 + rng_below(&rng, 80);
        check_shape(m, n, k, rng_below(&rng, 9), (float)rng_normal(&rng), i % 3 ? (float)rng_normal(&rng) : 0,
                    &rng);
    }
}

TEST(nothing_to_add_up) {
    const float nothing[4] = {NAN, NAN, NAN, NAN};
    for (int t = 0; t < 4; t++) {
        float c[6] = {1, 2, 9, 3, 4, 9};
        const bool transpose_a = t & 1, transpose_b = t & 2;
        sgemm(transpose_a, transpose_b, 0, 2, 2, 1, NULL, 0, nothing, 2, 0, c, 3);
        sgemm(transpose_a, transpose_b, 2, 0, 2, 1, nothing, 2, NULL, 0, 0, c, 3);
        sgemm(transpose_a, transpose_b, 2, 2, 0, 1, NULL, 0, NULL, 0, 1, c, 3);
        sgemm(transpose_a, transpose_b, 0, 0, 0, 1, NULL, 0, NULL, 0, 0, NULL, 0);
        CHECK(c[0] == 1 && c[1] == 2 && c[3] == 3 && c[4] == 4);
        sgemm(transpose_a, transpose_b, 2, 2, 0, 1, NULL, 0, NULL, 0, 0.5f, c, 3);
        CHECK(c[0] == 0.5f && c[1] == 1 && c[3] == 1.5f && c[4] == 2);
        c[0] = NAN;
        sgemm(transpose_a, transpose_b, 2, 2, 2, 0, nothing, 2, nothing, 2, 0, c, 3);
        CHECK(c[0] == 0 && c[1] == 0 && c[3] == 0 && c[4] == 0);
        CHECK(c[2] == 9 && c[5] == 9);
    }
}

TEST(stride_of_a_single_row) {
    /* Row vectors whose stride says nothing, as a caller with one token passes them. */
    const float a[2] = {2, 3}, b[4] = {1, 10, 100, 1000};
    float c[2] = {NAN, NAN};
    sgemm(false, false, 1, 2, 2, 1, a, 0, b, 2, 0, c, 0);
    CHECK(c[0] == 302 && c[1] == 3020);
    sgemm(false, true, 1, 2, 2, 1, a, 1, b, 2, 0, c, 1);
    CHECK(c[0] == 32 && c[1] == 3200);
    sgemm(true, false, 2, 2, 1, 1, a, 0, a, 0, 0, (float[4]){0}, 2);
}

TEST(not_a_number_comes_through) {
    float a[64], b[64], c[64];
    for (size_t i = 0; i < 64; i++) a[i] = b[i] = 1;
    a[8 * 3 + 5] = NAN, b[8 * 2 + 6] = INFINITY;
    sgemm(false, false, 8, 8, 8, 1, a, 8, b, 8, 0, c, 8);
    size_t wrong = 0;
    for (size_t i = 0; i < 8; i++)
        for (size_t j = 0; j < 8; j++)
            wrong += i == 3 ? !isnan(c[i * 8 + j]) : j == 6 ? !isinf(c[i * 8 + j]) : c[i * 8 + j] != 8;
    CHECK_MSG(wrong == 0, "%zu elements are wrong", wrong);
}

TEST(same_bits_from_run_to_run) {
    static const size_t shapes[][3] = {{200, 300, 500}, {33, 17, 2000}, {1, 700, 300}, {700, 64, 64}};
    Rng rng = rng_start(5, 0);
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
        const size_t m = shapes[s][0], n = shapes[s][1], k = shapes[s][2];
        float *a = random_floats(&rng, m * k), *b = random_floats(&rng, k * n);
        float *c = xmalloc(m * n * sizeof *c), *again = xmalloc(m * n * sizeof *again);
        sgemm(false, false, m, n, k, 1, a, k, b, n, 0, c, n);
        for (int i = 0; i < 10; i++) {
            sgemm(false, false, m, n, k, 1, a, k, b, n, 0, again, n);
            CHECK(memcmp(c, again, m * n * sizeof *c) == 0);
        }
        free(a), free(b), free(c), free(again);
    }
}

TEST(inside_a_parallel_region) {
#ifdef _OPENMP
    enum { CALLS = 16, SIZE = 70 };
    Rng rng = rng_start(6, 0);
    float *a = random_floats(&rng, CALLS * SIZE * SIZE), *b = random_floats(&rng, SIZE * SIZE);
    float *c = xmalloc(CALLS * SIZE * SIZE * sizeof *c);
    size_t wrong = 0, teams = 0;
#pragma omp parallel for num_threads(4) reduction(+ : teams)
    for (size_t i = 0; i < CALLS; i++) {
        sgemm(false, true, SIZE, SIZE, SIZE, 1, a + i * SIZE * SIZE, SIZE, b, SIZE, 0, c + i * SIZE * SIZE,
              SIZE);
        teams += omp_get_num_threads() > 1;
    }
    for (size_t i = 0; i < CALLS; i++)
        for (size_t row = 0; row < SIZE; row++)
            for (size_t column = 0; column < SIZE; column++) {
                double exact = 0, magnitude = 0;
                for (size_t p = 0; p < SIZE; p++) {
                    const double product = (double)a[(i * SIZE + row) * SIZE + p] *
                                           (double)b[column * SIZE + p];
                    exact += product, magnitude += fabs(product);
                }
                const double error = fabs((double)c[(i * SIZE + row) * SIZE + column] - exact);
                wrong += !(error <= (SIZE + 3) * 0x1.00002p-24 * magnitude);
            }
    CHECK_MSG(wrong == 0, "%zu elements are wrong", wrong);
    if (omp_get_thread_limit() > 1) CHECK(teams == CALLS); /* so the calls did come from a team */
    free(a), free(b), free(c);
#else
    SKIP("built without OpenMP");
#endif
}

TEST(library_and_warnings) {
    CHECK(strlen(sgemm_library()) > 5);
#ifdef _OPENMP
    unsetenv("OPENBLAS_CORETYPE"), unsetenv("DNNL_MAX_CPU_ISA"), unsetenv("ONEDNN_MAX_CPU_ISA");
    unsetenv("OMP_NUM_THREADS");
    CHECK(sgemm_warning() == NULL);
    if (omp_get_num_procs() < 2) SKIP("a machine with one core leaves none idle");
    setenv("OMP_NUM_THREADS", "1", 1);
    CHECK(sgemm_warning() && strstr(sgemm_warning(), "OMP_NUM_THREADS=1"));
    unsetenv("OMP_NUM_THREADS");
#endif
    setenv("DNNL_MAX_CPU_ISA", "SSE41", 1), setenv("OPENBLAS_CORETYPE", "Prescott", 1);
    const bool limited = strstr(sgemm_library(), "oneDNN") || strstr(sgemm_library(), "OpenBLAS");
    CHECK((sgemm_warning() != NULL) == limited);
    unsetenv("DNNL_MAX_CPU_ISA"), unsetenv("OPENBLAS_CORETYPE");
}

int main(int argc, char **argv) {
    test_start(argc, argv, "sgemm");
    RUN(every_small_size);
    RUN(odd_sizes);
    RUN(odd_sizes_at_lower_levels);
    RUN(beyond_one_block);
    RUN(random_shapes);
    RUN(nothing_to_add_up);
    RUN(stride_of_a_single_row);
    RUN(not_a_number_comes_through);
    RUN(same_bits_from_run_to_run);
    RUN(inside_a_parallel_region);
    RUN(library_and_warnings);
    return test_finish();
}
