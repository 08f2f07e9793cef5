/* test_attention.c - both attention backends of the CPU against attention in float64, by the rule in
 * attention.h; and simd_math.h, which they stand on.
 *
 * Every buffer a backend sees lies between guard words that are NaN as floats: one read beyond an input
 * makes a result NaN, one write beyond an output changes a guard word. Outputs hold NaN beforehand. */
#include "test.h"

#include "../attention/attention.h"
#include "../common.h"
#include "../simd.h"
#include "../simd_math.h"

#include <math.h>
#include <stdint.h>
#ifdef _OPENMP
#include <omp.h>
#endif

static void set_threads(int threads) {
#ifdef _OPENMP
    omp_set_num_threads(threads);
#else
    (void)threads;
#endif
}

static int default_threads(void) {
#ifdef _OPENMP
    return omp_get_num_procs();
#else
    return 1;
#endif
}

/* ---- guarded memory ---- */

enum { GUARD = 64 };
static const uint32_t guard_word = 0x7fc5a5a5u; /* a NaN */

typedef struct Guarded {
    float *data; /* n floats */
    size_t n;
} Guarded;

static Guarded guarded(size_t n) {
    Guarded g = {(float *)xmalloc((n + 2 * GUARD) * sizeof(float)) + GUARD, n};
    for (size_t i = 0; i < n + 2 * GUARD; i++) memcpy(g.data - GUARD + i, &guard_word, sizeof guard_word);
    return g;
}

static bool still_guard(const float *word) {
    return memcmp(word, &guard_word, sizeof guard_word) == 0;
}

static void refill(Guarded g) {
    for (size_t i = 0; i < g.n; i++) memcpy(g.data + i, &guard_word, sizeof guard_word);
}

static bool guards_hold(Guarded g) {
    for (size_t i = 0; i < GUARD; i++) {
        if (!still_guard(g.data - 1 - i) || !still_guard(g.data + g.n + i)) return false;
    }
    return true;
}

static void release(Guarded g) {
    free(g.data - GUARD);
}

/* ---- attention, plainly: in float64 it is the reference, in float what plain fp32 costs ----
 * For one head. All arrays (T, D) with rows `stride` elements apart, the lse (T). The sums run over rows, so
 * that the compiler can vectorise them; those over channels go in one of N_ORDERS orders. delta goes in
 * another than dP: for the first token dP - delta is all rounding, and would cancel to 0. */
enum { N_ORDERS = 4 };

/* Channel number n: up or down, from an end or from the middle. */
static size_t channel(int order, size_t n, size_t D) {
    const size_t up = order & 2 ? (n + D / 2) % D : n;
    return order & 1 ? D - 1 - up : up;
}

#define DEFINE_PLAIN(name, real, real_exp, real_log)                                                      \
    static void name(int order, size_t T, size_t D, real scale, const float *q, const float *k,           \
                     const float *v, const float *d_out, size_t qkv_stride, size_t out_stride, real *out, \
                     real *lse, real *dq, real *dk, real *dv) {                                           \
        real *kt = xmalloc(T * D * sizeof(real)), *vt = xmalloc(T * D * sizeof(real)); /* (D, T) */       \
        real *p = xmalloc(T * sizeof(real)), *ds = xmalloc(T * sizeof(real));                             \
        for (size_t j = 0; j < T; j++) {                                                                  \
            for (size_t d = 0; d < D; d++) {                                                              \
                kt[d * T + j] = k[j * qkv_stride + d], vt[d * T + j] = v[j * qkv_stride + d];             \
                out[j * D + d] = dq[j * D + d] = dk[j * D + d] = dv[j * D + d] = 0;                       \
            }                                                                                             \
        }                                                                                                 \
        for (size_t i = 0; i < T; i++) {                                                                  \
            const float *qi = q + i * qkv_stride, *d_out_i = d_out + i * out_stride;                      \
            real max = -INFINITY, sum = 0, delta = 0;                                                     \
            for (size_t j = 0; j <= i; j++) p[j] = ds[j] = 0;                                             \
            for (size_t n = 0; n < D; n++) {                                                              \
                const size_t d = channel(order, n, D);                                                    \
                for (size_t j = 0; j <= i; j++) p[j] += (real)qi[d] * kt[d * T + j];                      \
                for (size_t j = 0; j <= i; j++) ds[j] += (real)d_out_i[d] * vt[d * T + j];                \
            }                                                                                             \
            for (size_t j = 0; j <= i; j++) p[j] *= scale, max = p[j] > max ? p[j] : max;                 \
            for (size_t j = 0; j <= i; j++) p[j] = real_exp(p[j] - max), sum += p[j];                     \
            lse[i] = max + real_log(sum);                                                                 \
            for (size_t j = 0; j <= i; j++) {                                                             \
                p[j] /= sum;                                                                              \
                for (size_t d = 0; d < D; d++) out[i * D + d] += p[j] * (real)v[j * qkv_stride + d];      \
            }                                                                                             \
            for (size_t n = 0; n < D; n++) {                                                              \
                const size_t d = channel(order ^ 1, n, D);                                                \
                delta += (real)d_out_i[d] * out[i * D + d];                                               \
            }                                                                                             \
            for (size_t j = 0; j <= i; j++) {                                                             \
                ds[j] = p[j] * (ds[j] - delta);                                                           \
                for (size_t d = 0; d < D; d++) {                                                          \
                    dv[j * D + d] += p[j] * (real)d_out_i[d];                                             \
                    dk[j * D + d] += scale * ds[j] * (real)qi[d];                                         \
                    dq[i * D + d] += scale * ds[j] * (real)k[j * qkv_stride + d];                         \
                }                                                                                         \
            }                                                                                             \
        }                                                                                                 \
        free(kt), free(vt), free(p), free(ds);                                                            \
    }
DEFINE_PLAIN(plain_double, double, exp, log)
DEFINE_PLAIN(plain_float, float, expf, logf)

/* ---- a case: inputs, the reference, and how far a backend may be from it ---- */

enum { OUT, DQ, DK, DV, N_RESULTS };
static const char *const result_names[N_RESULTS] = {"out", "dq", "dk", "dv"};

typedef struct Case {
    size_t B, T, H, D;
    float scale;
    Guarded qkv, d_out;           /* (B, T, 3, H, D), (B, T, H, D) */
    double *reference[N_RESULTS]; /* (B, H, T, D) each */
    double *lse;                  /* (B, H, T) */
    double allowed[N_RESULTS];
    double *lse_allowed; /* (B, H, T) */
} Case;

static double ulp(double magnitude) {
    const float x = (float)magnitude;
    return (double)(nextafterf(x, INFINITY) - x);
}

/* The rule's fp32 error is the largest of several runs of the plain computation, which sum over channels in
 * different orders: the maximum over a small tensor is often one row's luck, and by luck one order can be far
 * better than what fp32 costs.
 *
 * The rule for lse takes the last place of lse, which is that of the scores unless they cancel. With inputs
 * times 30 they do: a score of 1 is there the sum of products in the thousands, and no fp32 sum of them is
 * exact to the last place of 1. `large`: the last place is then that of the largest sum of |q k| in the
 * row. */
static Case case_make(size_t B, size_t T, size_t H, size_t D, bool large, bool with_reference) {
    Case c = {.B = B, .T = T, .H = H, .D = D, .scale = 1.0f / sqrtf((float)D)};
    const size_t n = B * T * H * D;
    c.qkv = guarded(3 * n), c.d_out = guarded(n);
    Rng rng = rng_start(7, B + 10 * H + 100 * D + 100000 * T);
    for (size_t i = 0; i < 3 * n; i++) c.qkv.data[i] = (large ? 30.0f : 1.0f) * (float)rng_normal(&rng);
    for (size_t i = 0; i < n; i++) c.d_out.data[i] = (float)rng_normal(&rng);
    if (!with_reference) return c;

    float *plain[N_ORDERS][N_RESULTS], *plain_lse = xmalloc(B * H * T * sizeof(float));
    c.lse = xmalloc(B * H * T * sizeof(double)), c.lse_allowed = xmalloc(B * H * T * sizeof(double));
    for (int r = 0; r < N_RESULTS; r++) {
        c.reference[r] = xmalloc(n * sizeof(double));
        for (int order = 0; order < N_ORDERS; order++) plain[order][r] = xmalloc(n * sizeof(float));
    }
#pragma omp parallel for
    for (size_t bh = 0; bh < B * H; bh++) {
        const float *q = c.qkv.data + (bh / H * T * 3 * H + bh % H) * D, *k = q + H * D, *v = k + H * D;
        const float *d_out = c.d_out.data + (bh / H * T * H + bh % H) * D;
        const size_t at = bh * T * D, stride = 3 * H * D;
        plain_double(0, T, D, 1.0 / sqrt((double)D), q, k, v, d_out, stride, H * D, c.reference[OUT] + at,
                     c.lse + bh * T, c.reference[DQ] + at, c.reference[DK] + at, c.reference[DV] + at);
        for (int order = 0; order < N_ORDERS; order++) {
            float **to = plain[order];
            plain_float(order, T, D, c.scale, q, k, v, d_out, stride, H * D, to[OUT] + at, plain_lse + bh * T,
                        to[DQ] + at, to[DK] + at, to[DV] + at);
        }
        for (size_t i = 0; i < T; i++) {
            double magnitude = fabs(c.lse[bh * T + i]);
            for (size_t j = 0; large && j <= i; j++) {
                double terms = 0;
                for (size_t d = 0; d < D; d++)
                    terms += fabs((double)q[i * stride + d] * (double)k[j * stride + d]);
                magnitude = fmax(magnitude, (double)c.scale * terms);
            }
            c.lse_allowed[bh * T + i] = 1e-5 + 4 * ulp(magnitude);
        }
    }
    for (int r = 0; r < N_RESULTS; r++) {
        double plain_error = 0, rounding = 0;
        for (size_t i = 0; i < n; i++) {
            const double reference = c.reference[r][i];
            volatile float shifted = (float)reference + 0.3f;
            shifted = shifted - 0.3f;
            for (int order = 0; order < N_ORDERS; order++)
                plain_error = fmax(plain_error, fabs((double)plain[order][r][i] - reference));
            rounding = fmax(rounding, fabs((double)shifted - reference));
        }
        c.allowed[r] = 2 * plain_error + 2 * rounding;
        for (int order = 0; order < N_ORDERS; order++) free(plain[order][r]);
    }
    free(plain_lse);
    return c;
}

static void case_free(Case *c) {
    CHECK(guards_hold(c->qkv) && guards_hold(c->d_out));
    release(c->qkv), release(c->d_out);
    for (int r = 0; r < N_RESULTS; r++) free(c->reference[r]);
    free(c->lse), free(c->lse_allowed);
}

/* ---- a run of a backend on it ---- */

typedef struct Run {
    Guarded out, lse, d_qkv, saved, scratch;
} Run;

static AttentionShape shape_of(const Case *c, bool training) {
    return (AttentionShape){
        .B = c->B, .T = c->T, .H = c->H, .D = c->D, .training = training, .deterministic = true};
}

static AttentionCall call_of(const Case *c, const Run *run, bool training) {
    return (AttentionCall){.B = c->B,
                           .T = c->T,
                           .H = c->H,
                           .D = c->D,
                           .scale = c->scale,
                           .deterministic = true,
                           .training = training,
                           .qkv = c->qkv.data,
                           .out = run->out.data,
                           .lse = run->lse.data,
                           .saved = run->saved.data,
                           .scratch = run->scratch.data,
                           .d_out = c->d_out.data,
                           .d_qkv = run->d_qkv.data};
}

static Run run_make(const Attention *attention, const Case *c, bool training) {
    const AttentionShape shape = shape_of(c, training);
    Run run = {guarded(c->d_out.n), guarded(c->B * c->H * c->T), guarded(training ? c->qkv.n : 0),
               guarded(attention->saved_bytes(&shape) / sizeof(float)),
               guarded((attention->scratch_bytes(&shape) + sizeof(float) - 1) / sizeof(float))};
    const AttentionCall call = call_of(c, &run, training);
    attention->forward(&call);
    refill(run.scratch); /* nothing may be kept there between the passes */
    if (training) attention->backward(&call);
    return run;
}

static void run_free(Run *run) {
    CHECK(guards_hold(run->out) && guards_hold(run->lse) && guards_hold(run->d_qkv));
    CHECK(guards_hold(run->saved) && guards_hold(run->scratch));
    release(run->out), release(run->lse), release(run->d_qkv), release(run->saved), release(run->scratch);
}

/* Where result r of head (b, h) of a run begins, and its stride from token to token. */
static const float *result_of(const Case *c, const Run *run, int r, size_t bh, size_t *stride) {
    const size_t b = bh / c->H, h = bh % c->H, HD = c->H * c->D;
    *stride = r == OUT ? HD : 3 * HD;
    if (r == OUT) return run->out.data + b * c->T * HD + h * c->D;
    return run->d_qkv.data + b * c->T * 3 * HD + (size_t)(r - DQ) * HD + h * c->D;
}

/* NaN where something was not written: then it compares as too far. */
static double error_of(const Case *c, const Run *run, int r) {
    double error = 0;
    for (size_t bh = 0; bh < c->B * c->H; bh++) {
        size_t stride;
        const float *ours = result_of(c, run, r, bh, &stride);
        for (size_t i = 0; i < c->T * c->D; i++) {
            const double e = fabs((double)ours[i / c->D * stride + i % c->D] -
                                  c->reference[r][bh * c->T * c->D + i]);
            if (!(e <= error)) error = e;
            if (isnan(e)) return e;
        }
    }
    return error;
}

static bool lse_fits(const Case *c, const Run *run) {
    for (size_t i = 0; i < c->B * c->H * c->T; i++) {
        if (!(fabs((double)run->lse.data[i] - c->lse[i]) <= c->lse_allowed[i])) return false;
    }
    return true;
}

static void check_against_reference(const Attention *attention, const Case *c, bool training) {
    Run run = run_make(attention, c, training);
    for (int r = 0; r < (training ? N_RESULTS : 1); r++) {
        const double error = error_of(c, &run, r);
        CHECK_MSG(error <= c->allowed[r], "%s (%s), B %zu T %zu H %zu D %zu: %s is off by %g, allowed %g",
                  attention->name, simd_name(simd_level()), c->B, c->T, c->H, c->D, result_names[r], error,
                  c->allowed[r]);
    }
    CHECK_MSG(lse_fits(c, &run), "%s (%s), B %zu T %zu H %zu D %zu: lse", attention->name,
              simd_name(simd_level()), c->B, c->T, c->H, c->D);
    run_free(&run);
}

static const Attention *backend(const char *name) {
    const AttentionShape shape = {.B = 1, .T = 1, .H = 1, .D = 8};
    Error err;
    const Attention *attention = attention_find(name, "cpu", &shape, &err);
    if (!attention) printf("  %s\n", err.text), exit(1);
    return attention;
}

/* Both backends, flash at every level that the machine has. */
static void check_case(size_t B, size_t T, size_t H, size_t D, bool large) {
    const SimdLevel best = simd_level();
    Case c = case_make(B, T, H, D, large, true);
    check_against_reference(backend("naive"), &c, true);
    for (int level = SIMD_PLAIN; level <= SIMD_AVX512; level++) {
        if (simd_force((SimdLevel)level)) check_against_reference(backend("flash"), &c, true);
    }
    simd_force(best);
    case_free(&c);
}

static const size_t channels[] = {8, 16, 24, 32, 64, 80, 96, 128, 256};
enum { N_CHANNELS = sizeof channels / sizeof *channels };

TEST(every_length_to_260) {
    for (size_t T = 1; T <= 260; T++) check_case(1 + T % 2, T, 1 + T / 2 % 2, channels[T % 5], false);
}

TEST(every_head_size) {
    static const size_t lengths[] = {1, 16, 63, 64, 65, 128, 300};
    for (size_t i = 0; i < N_CHANNELS; i++) {
        for (size_t j = 0; j < sizeof lengths / sizeof *lengths; j++)
            check_case(1, lengths[j], 3, channels[i], false);
    }
}

TEST(long_sequences) {
    static const struct {
        size_t T, D;
    } cases[] = {{511, 64},  {512, 32},  {513, 128}, {777, 64}, {1023, 16},
                 {1024, 64}, {1025, 24}, {2047, 32}, {4097, 8}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) check_case(1, cases[i].T, 1, cases[i].D, false);
}

/* Scores in the thousands: without the maximum subtracted exp would overflow. */
TEST(inputs_times_30) {
    for (size_t i = 0; i < N_CHANNELS; i++) check_case(1, 261, 6, channels[i], true);
    check_case(1, 1023, 1, 64, true);
}

/* Without training out and lse are the same bits, and `saved` is not asked for. */
TEST(without_training) {
    static const char *const names[] = {"naive", "flash"};
    Case c = case_make(2, 100, 3, 32, false, true);
    for (int i = 0; i < 2; i++) {
        check_against_reference(backend(names[i]), &c, false);
        Run training = run_make(backend(names[i]), &c, true), other = run_make(backend(names[i]), &c, false);
        CHECK(memcmp(training.out.data, other.out.data, other.out.n * sizeof(float)) == 0);
        CHECK(memcmp(training.lse.data, other.lse.data, other.lse.n * sizeof(float)) == 0);
        run_free(&training), run_free(&other);
    }
    case_free(&c);
}

static bool same_bits(const Run *a, const Run *b) {
    return memcmp(a->out.data, b->out.data, a->out.n * sizeof(float)) == 0 &&
           memcmp(a->lse.data, b->lse.data, a->lse.n * sizeof(float)) == 0 &&
           memcmp(a->d_qkv.data, b->d_qkv.data, a->d_qkv.n * sizeof(float)) == 0;
}

/* Flash: for any number of threads; 7 threads on 2 heads deal out blocks where 1 deals out heads. */
TEST(flash_is_bit_equal_for_any_number_of_threads) {
    static const size_t lengths[] = {64, 257, 777, 1024};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        Case c = case_make(1, lengths[i], 2, 40, false, false);
        set_threads(1);
        Run one = run_make(backend("flash"), &c, true);
        for (int threads = 1; threads <= 7; threads += threads < 3 ? 1 : 4) {
            set_threads(threads);
            Run other = run_make(backend("flash"), &c, true);
            CHECK_MSG(same_bits(&one, &other), "T %zu, %d threads", lengths[i], threads);
            run_free(&other);
        }
        set_threads(default_threads());
        run_free(&one);
        case_free(&c);
    }
}

TEST(naive_is_bit_equal_from_run_to_run) {
    static const size_t heads[] = {1, 2, 5};
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++) {
        Case c = case_make(1, 300, heads[i], 64, false, false);
        for (int threads = 1; threads <= 3; threads++) {
            set_threads(threads);
            Run one = run_make(backend("naive"), &c, true), other = run_make(backend("naive"), &c, true);
            CHECK_MSG(same_bits(&one, &other), "%zu heads, %d threads", heads[i], threads);
            run_free(&one), run_free(&other);
        }
        set_threads(default_threads());
        case_free(&c);
    }
}

/* Generation in steps of the given sizes (the last one repeated) must give what forward gives. */
static void check_cached(const Attention *attention, const Case *c, const size_t *steps, size_t n_steps) {
    const size_t B = c->B, T = c->T, HD = c->H * c->D, cache_length = T + 3;
    Guarded cache = guarded(B * cache_length * 2 * HD);
    Run run = {.out = guarded(c->d_out.n)};
    size_t offset = 0;
    for (size_t step = 0; offset < T; step++) {
        const size_t wanted = steps[step < n_steps ? step : n_steps - 1];
        const size_t n = wanted < T - offset ? wanted : T - offset;
        Guarded qkv = guarded(B * n * 3 * HD), out = guarded(B * n * HD);
        for (size_t b = 0; b < B; b++)
            memcpy(qkv.data + b * n * 3 * HD, c->qkv.data + (b * T + offset) * 3 * HD,
                   n * 3 * HD * sizeof(float));
        const AttentionCall call = {.B = B,
                                    .T = n,
                                    .H = c->H,
                                    .D = c->D,
                                    .scale = c->scale,
                                    .qkv = qkv.data,
                                    .out = out.data,
                                    .offset = offset,
                                    .kv_cache = cache.data,
                                    .cache_length = cache_length};
        attention->cached(&call);
        for (size_t b = 0; b < B; b++)
            memcpy(run.out.data + (b * T + offset) * HD, out.data + b * n * HD, n * HD * sizeof(float));
        CHECK(guards_hold(qkv) && guards_hold(out) && guards_hold(cache));
        release(qkv), release(out);
        offset += n;
        for (size_t b = 0; b < B; b++) CHECK(still_guard(cache.data + (b * cache_length + offset) * 2 * HD));
    }
    const double error = error_of(c, &run, OUT);
    CHECK_MSG(error <= c->allowed[OUT], "%s (%s) cached, T %zu D %zu: out is off by %g, allowed %g",
              attention->name, simd_name(simd_level()), T, c->D, error, c->allowed[OUT]);
    release(run.out), release(cache);
}

TEST(cached_gives_what_forward_gives) {
    static const size_t one[] = {1}, chunks[] = {70, 1, 1, 63, 2, 5}, all[] = {1000};
    const SimdLevel best = simd_level();
    for (size_t i = 0; i < N_CHANNELS; i++) {
        Case c = case_make(2, 150, 2, channels[i], channels[i] == 64, true);
        for (int level = SIMD_PLAIN; level <= SIMD_AVX512; level++) {
            if (!simd_force((SimdLevel)level)) continue;
            check_cached(backend("flash"), &c, one, 1);
            check_cached(backend("flash"), &c, chunks, 6);
            check_cached(backend("flash"), &c, all, 1);
        }
        simd_force(best);
        check_cached(backend("naive"), &c, one, 1);
        check_cached(backend("naive"), &c, chunks, 6);
        case_free(&c);
    }
}

/* ---- what a backend says of itself ---- */

TEST(shapes_and_sizes) {
    const Attention *naive = backend("naive"), *flash = backend("flash");
    const AttentionShape usual = {.B = 1, .T = 8192, .H = 12, .D = 64, .training = true};
    CHECK(naive->saved_bytes(&usual) == (size_t)12 * 8192 * 8192 * 4);
    CHECK(flash->saved_bytes(&usual) == 0);
    set_threads(8);
    CHECK(flash->scratch_bytes(&usual) <= (size_t)8 << 20);
    set_threads(default_threads());

    AttentionShape large = usual;
    large.T = (size_t)1 << 31;
    CHECK(naive->saved_bytes(&large) == SIZE_MAX);
    CHECK(naive->scratch_bytes(&large) == SIZE_MAX);
    large.training = false;
    CHECK(naive->saved_bytes(&large) == 0);
    large = usual, large.B = SIZE_MAX / 4;
    CHECK(naive->saved_bytes(&large) == SIZE_MAX);

    static const size_t refused[] = {0, 1, 4, 12, 65, 264, 512, SIZE_MAX - 7};
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        AttentionShape shape = usual;
        Error err = {0};
        shape.D = refused[i];
        CHECK(!flash->can_run(&shape, &err) && strstr(err.text, "channels"));
        CHECK(!attention_find("flash", "cpu", &shape, &err) && strstr(err.text, "flash"));
    }
    for (size_t i = 0; i < N_CHANNELS; i++) {
        AttentionShape shape = usual;
        Error err;
        shape.D = channels[i];
        CHECK(flash->can_run(&shape, &err) && naive->can_run(&shape, &err));
        CHECK(attention_find("flash", "cpu", &shape, &err) == flash);
    }
    Error err = {0};
    CHECK(!attention_find("flush", "cpu", &usual, &err));
    CHECK(strstr(err.text, "flush") && strstr(err.text, "flash") && strstr(err.text, "naive"));
}

/* ---- simd_math.h ---- */

static double ulp_of(double value) {
    int exponent;
    frexp(value, &exponent);
    return ldexp(1.0, (exponent < -125 ? -125 : exponent) - 24);
}

/* Over all floats with a stride that is odd, so that every exponent and every low bit is met. */
TEST(exp_and_tanh) {
    double exp_error = 0, tanh_error = 0;
    int bad_limits = 0;
    for (uint64_t bits = 0; bits <= UINT32_MAX; bits += 1499) {
        const float x = simd_float_of_bits((uint32_t)bits), e = simd_expf(x), t = simd_tanhf(x);
        if (isnan(x)) {
            bad_limits += !isnan(e) || !isnan(t);
            continue;
        }
        const double true_exp = exp((double)x), true_tanh = tanh((double)x);
        if (true_exp < 0x1p-125) bad_limits += e != 0.0f;
        else if (true_exp > 0x1.fffffep127) bad_limits += !isinf(e);
        else exp_error = fmax(exp_error, fabs((double)e - true_exp) / ulp_of(true_exp));
        tanh_error = fmax(tanh_error, fabs((double)t - true_tanh) / ulp_of(true_tanh));
        bad_limits += signbit(t) != signbit(x);
    }
    CHECK_MSG(exp_error < 1.2, "simd_expf is off by %g ulp", exp_error);
    CHECK_MSG(tanh_error < 2.8, "simd_tanhf is off by %g ulp", tanh_error);
    CHECK_MSG(bad_limits == 0, "%d results outside the range of exp, or of the wrong sign", bad_limits);
    CHECK(simd_expf(0.0f) == 1.0f && simd_expf(-INFINITY) == 0.0f && isinf(simd_expf(INFINITY)));
    CHECK(simd_tanhf(INFINITY) == 1.0f && simd_tanhf(-INFINITY) == -1.0f && signbit(simd_tanhf(-0.0f)));
}

int main(int argc, char **argv) {
    test_start(argc, argv, "attention");
    RUN(every_length_to_260);
    RUN(every_head_size);
    RUN(long_sequences);
    RUN(inputs_times_30);
    RUN(without_training);
    RUN(flash_is_bit_equal_for_any_number_of_threads);
    RUN(naive_is_bit_equal_from_run_to_run);
    RUN(cached_gives_what_forward_gives);
    RUN(shapes_and_sizes);
    RUN(exp_and_tanh);
    return test_finish();
}
