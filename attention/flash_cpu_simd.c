/* flash_cpu_simd.c - the block kernels of flash attention on a CPU; compiled once for each SIMD_LEVEL.
 *
 * Plan. The unit is a tile of 64 keys by 64 queries, held as S^T: rows are keys, vector lanes are queries.
 *
 *     forward, for a block of 4 panels of 64 queries       backward, for the same block
 *       Q^T of the panels packed, times scale                Q^T, dO^T, Q, dO packed; delta = rowsum(dO * O)
 *       for 64 keys: K, V packed                             for 64 keys: K, V packed; dK, dV loaded
 *         for each panel that sees them:                       for each panel that sees them:
 *           S^T = K Q^T                                          S^T = K Q^T,  dP^T = V dO^T
 *           max, exp, sum: down the lanes                        P = exp(S - lse),  dS = P * (dP - delta)
 *           O = O * correction + P V                             dV += P^T dO,  dK += dS^T Q,  dQ += dS K
 *       out = O / sum,  lse = max + ln(sum)                    dK, dV stored
 *
 * With queries in the lanes the softmax needs no sum across lanes, and K, V, P, dS enter every product as
 * broadcast scalars, so none of them is transposed. Only Q and dO are, once for a block. Every product is
 * C (rows, lanes) += A B with B's rows in lanes: 4 rows by up to MAX_VECTORS vectors of C stay in registers
 * over the whole depth of 64 (or D). A panel's Q^T, a tile of S and the four rows being broadcast stay in L1
 * and L2; packing also frees the reads from the large power-of-two strides of qkv, which fight over a few
 * sets of the cache.
 *
 * The causal cut: tiles above the diagonal are never made; in a tile on it each group of 4 rows starts at its
 * first vector that is not masked (S), or stops at its last key or starts at its first query (the products
 * over keys or queries). Rows and lanes past T are computed from zeros where a group of 4 or a vector is not
 * full: keys there lie above the diagonal of every query, and what queries there get is neither summed over
 * nor stored.
 *
 * Limit: 4 D FLOPs for each score forward, 10 D backward, on the FMA units; an exp is about 18 instructions,
 * as many as 9 more channels forward, or 4 backward, would take. */
#include "flash_cpu_simd.h"

#include "../simd_math.h"

#include <math.h>
#include <string.h>
#if defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

/* MAX_VECTORS: 4 rows of that many sums, the vectors of B and one broadcast fill the registers. */
#if defined(__AVX512F__)
enum { LANES = 16, MAX_VECTORS = 4 };
#elif defined(__AVX2__)
enum { LANES = 8, MAX_VECTORS = 3 };
#elif defined(__aarch64__)
enum { LANES = 4, MAX_VECTORS = 4 };
#else
enum { LANES = 4, MAX_VECTORS = 3 };
#endif

typedef float Vector __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))

enum {
    TILE = FLASH_TILE,
    ROWS = 4,  /* of C in registers */
    CHUNK = 16 /* products in one chain of additions */
};

/* D rounded up to the widest vector: the row length of everything packed by rows. */
static size_t padded(size_t D) {
    return (D + 15) / 16 * 16;
}

static size_t at_most(size_t a, size_t b) {
    return a < b ? a : b;
}

/* a * b + c in one instruction where there is one, whatever the compiler's flags say about contraction. */
INLINE Vector fma_vector(Vector a, Vector b, Vector c) {
#if defined(__AVX512F__)
    return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (Vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (Vector)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

/* ---- products: 4 rows of C at a time ---- */

typedef enum Start { FROM_ZERO, FROM_C, FROM_SCALED_C } Start;

/* c[r][n] = start + sum over i < depth of a[r * a_row + i * a_step] * b[i][n], for 4 rows and n_vectors
 * vectors; FROM_SCALED_C: row r of c is first multiplied by factor[r]. The sum is taken over CHUNK products
 * at a time: its rounding errors grow with the length of a chain of additions, and a chain of D, or of all
 * keys of a long sequence, would show. */
INLINE void rows_by_vectors(Start start, const float *factor, float *c, size_t c_stride, const float *a,
                            size_t a_row, size_t a_step, const float *b, size_t b_stride, size_t depth,
                            const int n_vectors) {
    for (size_t chunk; depth > 0; depth -= chunk) {
        Vector sum[ROWS][MAX_VECTORS];
        chunk = at_most(depth, CHUNK);
        for (int r = 0; r < ROWS; r++) {
            for (int v = 0; v < n_vectors; v++) sum[r][v] = (Vector){0};
        }
        for (size_t i = 0; i < chunk; i++, a += a_step, b += b_stride) {
            Vector row[MAX_VECTORS];
            for (int v = 0; v < n_vectors; v++) row[v] = *(const Vector *)(b + v * LANES);
            for (int r = 0; r < ROWS; r++) {
                const Vector x = a[r * a_row] - (Vector){0};
                for (int v = 0; v < n_vectors; v++) sum[r][v] = fma_vector(x, row[v], sum[r][v]);
            }
        }
        for (int r = 0; r < ROWS; r++) {
            for (int v = 0; v < n_vectors; v++) {
                Vector *to = (Vector *)(c + r * c_stride + v * LANES);
                if (start == FROM_ZERO) *to = sum[r][v];
                else if (start == FROM_C) *to += sum[r][v];
                else *to = fma_vector(*to, factor[r] - (Vector){0}, sum[r][v]);
            }
        }
        start = FROM_C;
    }
}

/* The same for n lanes, a multiple of LANES. */
INLINE void rows_by_lanes(Start start, const float *factor, float *c, size_t c_stride, const float *a,
                          size_t a_row, size_t a_step, const float *b, size_t b_stride, size_t depth,
                          size_t n) {
    for (; n >= MAX_VECTORS * LANES;
         n -= MAX_VECTORS * LANES, b += MAX_VECTORS * LANES, c += MAX_VECTORS * LANES)
        rows_by_vectors(start, factor, c, c_stride, a, a_row, a_step, b, b_stride, depth, MAX_VECTORS);
    switch (n / LANES) {
    case 3:
        rows_by_vectors(start, factor, c, c_stride, a, a_row, a_step, b, b_stride, depth, 3);
        break;
    case 2:
        rows_by_vectors(start, factor, c, c_stride, a, a_row, a_step, b, b_stride, depth, 2);
        break;
    case 1:
        rows_by_vectors(start, factor, c, c_stride, a, a_row, a_step, b, b_stride, depth, 1);
        break;
    }
}

/* s (keys, 64 queries) = k (keys, D) qt (D, 64 queries): S^T from K and Q^T, dP^T from V and dO^T. On the
 * diagonal lanes of earlier queries than the key may be left as they were. */
static void scores(float *s, const float *k, const float *qt, size_t keys, size_t D, size_t stride,
                   bool diagonal) {
    for (size_t m = 0; m < keys; m += ROWS) {
        const size_t n = diagonal ? m / LANES * LANES : 0;
        rows_by_lanes(FROM_ZERO, NULL, s + m * TILE + n, TILE, k + m * stride, stride, 1, qt + n, TILE, D,
                      TILE - n);
    }
}

/* x (queries, D) += p (queries, keys) v (keys, D), p stored as (keys, 64 queries); factor, if not NULL:
 * row r of x is first multiplied by factor[r]. */
static void add_over_keys(const float *factor, float *x, const float *p, const float *v, size_t queries,
                          size_t keys, size_t stride, bool diagonal) {
    for (size_t m = 0; m < queries; m += ROWS) {
        const size_t depth = diagonal ? at_most(m + ROWS, keys) : keys;
        float *rows = x + m * stride;
        if (factor)
            rows_by_lanes(FROM_SCALED_C, factor + m, rows, stride, p + m, 1, TILE, v, stride, depth, stride);
        else rows_by_lanes(FROM_C, NULL, rows, stride, p + m, 1, TILE, v, stride, depth, stride);
    }
}

/* x (keys, D) += p^T (keys, queries) y (queries, D), p stored as (keys, 64 queries). */
static void add_over_queries(float *x, const float *p, const float *y, size_t queries, size_t keys,
                             size_t stride, bool diagonal) {
    for (size_t m = 0; m < keys; m += ROWS) {
        const size_t first = diagonal ? m : 0;
        rows_by_lanes(FROM_C, NULL, x + m * stride, stride, p + m * TILE + first, TILE, 1, y + first * stride,
                      stride, queries - first, stride);
    }
}

/* ---- packing ---- */

/* packed (TILE, stride) = rows (n, D), zeros around them; only as many rows as the products read, which
 * take them by fours. */
static void pack_rows(float *packed, const float *rows, size_t row_stride, size_t n, size_t D, size_t stride,
                      float factor) {
    const size_t n_padded = (n + ROWS - 1) / ROWS * ROWS;
    for (size_t i = 0; i < n; i++) {
        for (size_t d = 0; d < D; d++) packed[i * stride + d] = factor * rows[i * row_stride + d];
        for (size_t d = D; d < stride; d++) packed[i * stride + d] = 0.0f;
    }
    memset(packed + n * stride, 0, (n_padded - n) * stride * sizeof *packed);
}

/* packed (D, TILE) = the transpose of rows (n, stride), zeros in the lanes from n on. */
static void transpose(float *packed, const float *rows, size_t n, size_t D, size_t stride) {
    for (size_t d = 0; d < D; d++) {
        for (size_t i = 0; i < n; i++) packed[d * TILE + i] = rows[i * stride + d];
        for (size_t i = n; i < TILE; i++) packed[d * TILE + i] = 0.0f;
    }
}

/* Scores of keys after the query, on the diagonal. */
static void mask(float *s, size_t keys, float value) {
    for (size_t j = 0; j < keys; j++) {
        for (size_t i = 0; i < j; i++) s[j * TILE + i] = value;
    }
}

/* ---- forward ---- */

/* The online softmax (Milakov and Gimelshein 2018): takes a tile of scores s (keys, 64 queries) into the
 * running max and sum of each query, turns s into exp(s - max), and tells by what factor everything summed
 * before must be multiplied. */
static void online_softmax(float *restrict s, size_t keys, float *restrict max, float *restrict sum,
                           float *restrict correction) {
    float new_max[TILE], new_sum[TILE];
    for (size_t i = 0; i < TILE; i++) new_max[i] = max[i];
    for (size_t j = 0; j < keys; j++) {
        for (size_t i = 0; i < TILE; i++)
            new_max[i] = s[j * TILE + i] > new_max[i] ? s[j * TILE + i] : new_max[i];
    }
    for (size_t i = 0; i < TILE; i++) {
        correction[i] = simd_expf(max[i] - new_max[i]);
        new_sum[i] = sum[i] * correction[i];
        max[i] = new_max[i];
    }
    for (size_t j = 0; j < keys; j++) {
        for (size_t i = 0; i < TILE; i++) {
            const float p = simd_expf(s[j * TILE + i] - new_max[i]);
            s[j * TILE + i] = p;
            new_sum[i] += p;
        }
    }
    for (size_t i = 0; i < TILE; i++) sum[i] = new_sum[i];
}

static void forward(const FlashHead *head, size_t first, float *work) {
    const size_t T = head->T, D = head->D, stride = padded(D);
    const size_t last = at_most(first + FLASH_BLOCK, T), panels = (last - first + TILE - 1) / TILE;
    float *qt = work;                      /* (panels, D, TILE) in steps of stride * TILE, times scale */
    float *o = qt + FLASH_BLOCK * stride;  /* (panels * TILE, stride) */
    float *k = o + FLASH_BLOCK * stride;   /* (TILE, stride) */
    float *v = k + TILE * stride;          /* (TILE, stride) */
    float *s = v + TILE * stride;          /* (TILE keys, TILE queries) */
    float *max = s + TILE * TILE;          /* (panels * TILE) */
    float *sum = max + FLASH_BLOCK;        /* (panels * TILE) */
    float *correction = sum + FLASH_BLOCK; /* (TILE) */

    for (size_t p = 0; p < panels; p++) {
        const size_t q0 = first + p * TILE, queries = at_most(TILE, last - q0);
        /* k is free yet: a panel's Q stays there on its way to qt. */
        pack_rows(k, head->q + q0 * head->qkv_stride, head->qkv_stride, queries, D, stride, head->scale);
        transpose(qt + p * TILE * stride, k, queries, D, stride);
    }
    memset(o, 0, panels * TILE * stride * sizeof *o);
    for (size_t i = 0; i < panels * TILE; i++) max[i] = -INFINITY, sum[i] = 0.0f;

    for (size_t k0 = 0; k0 < last; k0 += TILE) {
        const size_t keys = at_most(TILE, T - k0);
        pack_rows(k, head->k + k0 * head->qkv_stride, head->qkv_stride, keys, D, stride, 1.0f);
        pack_rows(v, head->v + k0 * head->qkv_stride, head->qkv_stride, keys, D, stride, 1.0f);
        for (size_t p = k0 > first ? (k0 - first) / TILE : 0; p < panels; p++) {
            const size_t q0 = first + p * TILE, queries = at_most(TILE, last - q0);
            const bool diagonal = k0 == q0;
            scores(s, k, qt + p * TILE * stride, keys, D, stride, diagonal);
            if (diagonal) mask(s, keys, -INFINITY);
            online_softmax(s, keys, max + p * TILE, sum + p * TILE, correction);
            add_over_keys(correction, o + p * TILE * stride, s, v, queries, keys, stride, diagonal);
        }
    }

    for (size_t i = 0; i < last - first; i++) {
        const float inverse = 1.0f / sum[i];
        float *out = head->out + (first + i) * head->out_stride;
        for (size_t d = 0; d < D; d++) out[d] = o[i * stride + d] * inverse;
        head->lse[first + i] = max[i] + logf(sum[i]);
    }
}

/* ---- backward ---- */

/* rowsum(dO * O) in the very order in which rows_by_vectors sums dP: for the first token, which attends to
 * itself alone, dP - delta is then exactly 0. */
static float dot(const float *x, const float *y, size_t n) {
    float sum = 0.0f;
    for (size_t i = 0; i < n; i += CHUNK) {
        float chunk = 0.0f;
        for (size_t j = i; j < at_most(i + CHUNK, n); j++) chunk = simd_fmaf(x[j], y[j], chunk);
        sum += chunk;
    }
    return sum;
}

/* lse is rounded to its own last place, and P = exp(s - lse) of a whole row is off by that much: nothing
 * where lse is ordinary, but 3e-5 at 1,000. From here on the rows are made to sum to 1 again. */
static const float large_lse = 64.0f;

/* correction[i] = 1 / sum over the keys of exp(s - lse) for a block of queries; qt and k as in backward. */
static void correct_rows(const FlashHead *head, size_t first, size_t last, const float *qt, const float *lse,
                         float *k, float *s, float *correction) {
    const size_t D = head->D, stride = padded(D), panels = (last - first + TILE - 1) / TILE;
    for (size_t i = 0; i < panels * TILE; i++) correction[i] = 0.0f;
    for (size_t k0 = 0; k0 < last; k0 += TILE) {
        const size_t keys = at_most(TILE, head->T - k0);
        pack_rows(k, head->k + k0 * head->qkv_stride, head->qkv_stride, keys, D, stride, 1.0f);
        for (size_t p = k0 > first ? (k0 - first) / TILE : 0; p < panels; p++) {
            const bool diagonal = k0 == first + p * TILE;
            scores(s, k, qt + p * TILE * stride, keys, D, stride, diagonal);
            if (diagonal) mask(s, keys, -INFINITY);
            for (size_t j = 0; j < keys; j++) {
                for (size_t i = 0; i < TILE; i++)
                    correction[p * TILE + i] += simd_expf(s[j * TILE + i] - lse[p * TILE + i]);
            }
        }
    }
    for (size_t i = 0; i < panels * TILE; i++) correction[i] = 1.0f / correction[i];
}

/* s and dp (keys, 64 queries) become P and dS. */
static void softmax_backward(float *restrict s, float *restrict dp, size_t keys, const float *restrict lse,
                             const float *restrict correction, const float *restrict delta) {
    for (size_t j = 0; j < keys; j++) {
        for (size_t i = 0; i < TILE; i++) {
            const float p = correction[i] * simd_expf(s[j * TILE + i] - lse[i]);
            dp[j * TILE + i] = p * (dp[j * TILE + i] - delta[i]);
            s[j * TILE + i] = p;
        }
    }
}

static void backward(const FlashHead *head, size_t first, size_t key_begin, size_t key_end, bool want_dq,
                     bool want_dkv, float *work) {
    const size_t T = head->T, D = head->D, stride = padded(D);
    const size_t last = at_most(first + FLASH_BLOCK, T), panels = (last - first + TILE - 1) / TILE;
    float *qt = work;                           /* (panels, D, TILE) in steps of stride * TILE, times scale */
    float *d_out_t = qt + FLASH_BLOCK * stride; /* the same of dO */
    float *q = d_out_t + FLASH_BLOCK * stride;  /* (panels * TILE, stride), times scale */
    float *d_out = q + FLASH_BLOCK * stride;    /* (panels * TILE, stride) */
    float *dq = d_out + FLASH_BLOCK * stride;   /* (panels * TILE, stride), without the scale */
    float *k = dq + FLASH_BLOCK * stride;       /* (TILE, stride), and so the next three */
    float *v = k + TILE * stride, *dk = v + TILE * stride, *dv = dk + TILE * stride;
    float *s = dv + TILE * stride;           /* (TILE keys, TILE queries) */
    float *dp = s + TILE * TILE;             /* (TILE keys, TILE queries) */
    float *lse = dp + TILE * TILE;           /* (panels * TILE) */
    float *delta = lse + FLASH_BLOCK;        /* (panels * TILE) */
    float *correction = delta + FLASH_BLOCK; /* (panels * TILE) */

    for (size_t p = 0; p < panels; p++) {
        const size_t q0 = first + p * TILE, queries = at_most(TILE, last - q0), at = p * TILE * stride;
        pack_rows(q + at, head->q + q0 * head->qkv_stride, head->qkv_stride, queries, D, stride, head->scale);
        pack_rows(d_out + at, head->d_out + q0 * head->out_stride, head->out_stride, queries, D, stride,
                  1.0f);
        transpose(qt + at, q + at, queries, D, stride);
        transpose(d_out_t + at, d_out + at, queries, D, stride);
    }
    bool large = false;
    for (size_t i = 0; i < panels * TILE; i++) {
        const bool inside = first + i < last;
        lse[i] = inside ? head->lse[first + i] : 0.0f;
        delta[i] = 0.0f, correction[i] = 1.0f;
        if (inside && want_dq) {
            delta[i] = dot(d_out + i * stride, head->out + (first + i) * head->out_stride, D);
            large = large || fabsf(lse[i]) >= large_lse;
        } else if (inside) {
            delta[i] = head->delta[first + i], correction[i] = head->correction[first + i];
        }
    }
    if (large) correct_rows(head, first, last, qt, lse, k, s, correction);
    for (size_t i = 0; want_dq && i < last - first; i++)
        head->delta[first + i] = delta[i], head->correction[first + i] = correction[i];
    if (want_dq) memset(dq, 0, panels * TILE * stride * sizeof *dq);

    for (size_t k0 = key_begin; k0 < at_most(key_end, last); k0 += TILE) {
        const size_t keys = at_most(TILE, T - k0), row = k0 * head->qkv_stride;
        pack_rows(k, head->k + row, head->qkv_stride, keys, D, stride, 1.0f);
        pack_rows(v, head->v + row, head->qkv_stride, keys, D, stride, 1.0f);
        if (want_dkv && k0 >= first) {
            memset(dk, 0, TILE * stride * sizeof *dk);
            memset(dv, 0, TILE * stride * sizeof *dv);
        } else if (want_dkv) {
            pack_rows(dk, head->dk + row, head->qkv_stride, keys, D, stride, 1.0f);
            pack_rows(dv, head->dv + row, head->qkv_stride, keys, D, stride, 1.0f);
        }
        for (size_t p = k0 > first ? (k0 - first) / TILE : 0; p < panels; p++) {
            const size_t q0 = first + p * TILE, queries = at_most(TILE, last - q0), at = p * TILE * stride;
            const bool diagonal = k0 == q0;
            scores(s, k, qt + at, keys, D, stride, diagonal);
            scores(dp, v, d_out_t + at, keys, D, stride, diagonal);
            if (diagonal) mask(s, keys, -INFINITY), mask(dp, keys, 0.0f);
            softmax_backward(s, dp, keys, lse + p * TILE, correction + p * TILE, delta + p * TILE);
            if (want_dkv) {
                add_over_queries(dv, s, d_out + at, queries, keys, stride, diagonal);
                add_over_queries(dk, dp, q + at, queries, keys, stride, diagonal);
            }
            if (want_dq) add_over_keys(NULL, dq + at, dp, k, queries, keys, stride, diagonal);
        }
        for (size_t j = 0; want_dkv && j < keys; j++) {
            memcpy(head->dk + row + j * head->qkv_stride, dk + j * stride, D * sizeof *dk);
            memcpy(head->dv + row + j * head->qkv_stride, dv + j * stride, D * sizeof *dv);
        }
    }
    for (size_t i = 0; want_dq && i < last - first; i++) {
        float *row = head->dq + (first + i) * head->qkv_stride;
        for (size_t d = 0; d < D; d++) row[d] = head->scale * dq[i * stride + d];
    }
}

/* ---- one query, for generation ---- */

/* Takes the keys as they lie, in lanes of eight channels: each is read once, so nothing is packed. */
typedef float Eight __attribute__((vector_size(8 * sizeof(float)), aligned(4), may_alias));

static void query(float *out, const float *q, const float *k, const float *v, size_t stride, size_t n,
                  size_t D, float scale) {
    float o[FLASH_MAX_D] = {0}, s[TILE], max = -INFINITY, sum = 0.0f;
    for (size_t j0 = 0; j0 < n; j0 += TILE) {
        const size_t keys = at_most(TILE, n - j0);
        float new_max = max;
        for (size_t j = 0; j < keys; j++) {
            const float *key = k + (j0 + j) * stride;
            Eight product = {0};
            for (size_t d = 0; d < D; d += 8) product += *(const Eight *)(q + d) * *(const Eight *)(key + d);
            s[j] = scale * (((product[0] + product[4]) + (product[2] + product[6])) +
                            ((product[1] + product[5]) + (product[3] + product[7])));
            new_max = s[j] > new_max ? s[j] : new_max;
        }
        for (size_t j = keys; j < TILE; j++) s[j] = -INFINITY;
        for (size_t j = 0; j < TILE; j++) s[j] = simd_expf(s[j] - new_max);

        const float correction = simd_expf(max - new_max);
        max = new_max;
        sum *= correction;
        for (size_t d = 0; d < D; d++) o[d] *= correction;
        for (size_t j = 0; j < keys; j++) {
            const float *value = v + (j0 + j) * stride;
            sum += s[j];
            for (size_t d = 0; d < D; d += 8) *(Eight *)(o + d) += s[j] * *(const Eight *)(value + d);
        }
    }
    for (size_t d = 0; d < D; d++) out[d] = o[d] / sum;
}

const FlashKernels SIMD_TABLE(flash_kernels) = {.forward = forward, .backward = backward, .query = query};
