/* test_cuda.c - the GPU's operations and its naive attention: in fp32 against the CPU's, in bf16 against the
 * GPU's fp32; each alone, then the whole model. Sizes are odd, outputs hold NaN beforehand, and around every
 * buffer lie guard bytes that are NaN as numbers: one read too far shows in a result, one write in the guard.
 * Skipped where the build or the machine has no GPU.
 *
 * Bounds. u is a type's unit roundoff: 2^-24 of fp32, 2^-8 of bf16. What is compared has seen the same
 * inputs, which are bf16 numbers, so that both types hold them exactly.
 *  - A sum of n terms. In fp32 one is off by at most lambda sqrt(n) u sum|terms| but for a chance of
 *    2 exp(-lambda^2 / 2) (Higham and Mary 2019, theorem 2.4); lambda = 4, and eight roundings for what
 *    happens to a term before and to the sum after. The bf16 matrix units cut off instead of rounding, which
 *    adds up: each of n additions may lose 2 u of fp32. Two devices' sums differ by both's bounds.
 *  - A result stored as an activation is rounded: u of its type, and as much again for what the result is
 *    made of within the operation.
 *  - The whole model, attention.h's rule: ref is the more exact result, plain the same network computed
 *    plainly in the precision in question, ours the GPU's. plain - ref and ours - ref are sums of one
 *    rounding for each of the same operations, carried to the result by the same derivatives, so of one size:
 *        max|ours - ref| <= 2 max|plain - ref| + FLOOR u max|ref|;
 *    the floor is for tensors where plain has next to no rounding to show. For fp32 ref and plain are the two
 *    precisions of reference_gpt.h; for bf16 ref is the GPU's fp32 and plain the CPU's operations with every
 *    stored activation, weight and logit rounded to bf16. */
#include "test.h"

#include "reference_attention.h"
#include "reference_problem.h"

#include "../sgemm.h"

#ifdef USE_CUDA
#define GPU_BF16 (&ops_cuda)
#define GPU_FP32 (&ops_cuda_fp32)
#else
#define GPU_BF16 NULL
#define GPU_FP32 NULL
#endif

static const double FLOOR = 8, U32 = 0x1p-24, U16 = 0x1p-8;
static const uint64_t STEP = UINT64_C(0x700000009), SEED = 31;

typedef struct Device {
    const Ops *ops;
    Stream *stream;
    StepState *state;           /* on the device */
    double u;                   /* of its activations */
    const Attention *attention; /* of whole models; NULL: naive */
    bool fast;                  /* they need not be bit-equal from run to run */
} Device;
static Device cpu, gpu32, gpu16;
static char no_gpu[sizeof(Error)] = "this build has no CUDA";
#define NEED_GPU() \
    if (!gpu16.stream) SKIP("%s", no_gpu)

static double sum_rounding(const Device *device, size_t n) {
    if (device == &gpu16) return ((double)n + 8) * 2 * U32;
    return (4 * sqrt((double)n) + 8) * U32;
}
/* Of the difference between a device and the one it is compared with. */
static double sums_differ(const Device *device, size_t n) {
    return sum_rounding(device, n) + sum_rounding(&cpu, n);
}

static void round_all(float *x, size_t n) {
    for (size_t i = 0; i < n; i++) x[i] = bf16_rounded(x[i]);
}

/* ---- memory of a case: on the host, and guarded on a device ---- */
enum { GUARD = 256, MOST_HELD = 256 };
static void *host_held[MOST_HELD];
static size_t n_host;
static struct {
    const Device *device;
    uint8_t *memory;
    size_t bytes;
} held[MOST_HELD];
static size_t n_held;

static void *host_new(size_t bytes) {
    if (n_host == MOST_HELD) printf("test_cuda: too many buffers\n"), exit(1);
    return host_held[n_host++] = reference_allocate(bytes, 1);
}

/* n normal numbers that bf16 can hold; each call has numbers of its own. */
static float *normals(size_t n, double mean, double spread) {
    static uint64_t calls;
    float *x = (float *)host_new(n * sizeof *x);
    calls++;
    for (size_t i = 0; i < n; i++) x[i] = bf16_rounded((float)(mean + spread * reference_normal(calls, i)));
    return x;
}

/* Device memory with these bytes, or with NaNs. */
static void *device_new(const Device *device, const void *bytes, size_t size) {
    Error err = {0};
    uint8_t *all = (uint8_t *)xmalloc(size + 2 * GUARD);
    memset(all, 0xff, size + 2 * GUARD);
    if (bytes) memcpy(all + GUARD, bytes, size);
    uint8_t *memory = (uint8_t *)device->ops->allocate(device->stream, size + 2 * GUARD, &err);
    if (!memory || n_held == MOST_HELD) printf("test_cuda: no memory: %s\n", err.text), exit(1);
    device->ops->upload(device->stream, memory, all, size + 2 * GUARD);
    free(all);
    held[n_held].device = device, held[n_held].memory = memory, held[n_held++].bytes = size;
    return memory + GUARD;
}
static float *floats_on(const Device *device, const float *x, size_t n) {
    return (float *)device_new(device, x, n * sizeof *x);
}
static act_t *acts_on(const Device *device, const float *x, size_t n) {
    if (device->ops->act_size == sizeof(float) || !x) return device_new(device, x, n * device->ops->act_size);
    uint16_t *half = (uint16_t *)xmalloc(n * sizeof *half);
    for (size_t i = 0; i < n; i++) half[i] = bf16_bits(x[i]);
    act_t *memory = device_new(device, half, n * sizeof *half);
    free(half);
    return memory;
}
static float *floats_from(const Device *device, const float *memory, size_t n) {
    float *x = (float *)host_new(n * sizeof *x);
    device->ops->download(device->stream, x, memory, n * sizeof *x);
    return x;
}
static float *acts_from(const Device *device, const act_t *memory, size_t n) {
    if (device->ops->act_size == sizeof(float)) return floats_from(device, (const float *)memory, n);
    uint16_t *half = (uint16_t *)xmalloc(n * sizeof *half);
    float *x = (float *)host_new(n * sizeof *x);
    device->ops->download(device->stream, half, memory, n * sizeof *half);
    for (size_t i = 0; i < n; i++) x[i] = bf16_value(half[i]);
    free(half);
    return x;
}

/* Ends a case: the guards must stand. */
static void end_case(const char *what) {
    for (size_t i = 0; i < n_held; i++) {
        uint8_t guard[2 * GUARD];
        const Device *device = held[i].device;
        device->ops->download(device->stream, guard, held[i].memory, GUARD);
        device->ops->download(device->stream, guard + GUARD, held[i].memory + GUARD + held[i].bytes, GUARD);
        bool whole = true;
        for (size_t k = 0; k < sizeof guard; k++) whole = whole && guard[k] == 0xff;
        CHECK_MSG(whole, "%s on %s: written outside buffer %zu", what, device->ops->name, i);
        device->ops->release(device->stream, held[i].memory);
    }
    for (size_t i = 0; i < n_host; i++) free(host_held[i]);
    n_held = n_host = 0;
}

static void near(const char *what, const Device *device, size_t i, float ours, double ref, double bound) {
    CHECK_MSG(isfinite(ours) && fabs((double)ours - ref) <= bound, "%s[%zu] on %s: %.9g, not %.9g (+-%.2g)",
              what, i, device->ops->name, (double)ours, ref, bound);
}

/* The device, and what it is compared with. */
#define FOR_DEVICES(device, other)                             \
    for (const Device *device = &gpu32, *other = &cpu; device; \
         device = device == &gpu32 ? &gpu16 : NULL, other = &gpu32)

static Dropout dropout_on(const Device *device, float rate, uint32_t site, uint64_t first_row) {
    return (Dropout){
        .rate = rate, .seed = SEED, .site = site, .first_row = first_row, .state = device->state};
}
static double mask_at(float rate, uint32_t site, uint64_t row, size_t C, size_t c) {
    return reference_keeps((double)rate, SEED, site, STEP, row, C, c) ? 1 / (1 - (double)rate) : 0;
}

/* ---- the device ---- */
TEST(memory_and_state) {
    NEED_GPU();
    enum { N = 5000001 }; /* more than a staging slot */
    char text[256] = "";
    gpu16.ops->describe(gpu16.stream, text, sizeof text);
    CHECK(strstr(text, "sm_") != NULL);
    uint8_t *host = (uint8_t *)host_new(N), *back = (uint8_t *)host_new(N);
    for (size_t i = 0; i < N; i++) host[i] = (uint8_t)(i * 7 + i / 1000 + 1);
    uint8_t *device = (uint8_t *)device_new(&gpu16, NULL, N);
    for (int repeat = 0; repeat < 12; repeat++) { /* more than there are slots */
        gpu16.ops->upload(gpu16.stream, device, host, N);
        memset(back, 0, N); /* upload has let go of its source */
    }
    gpu16.ops->zero(gpu16.stream, device + 1, 1000);
    gpu16.ops->download(gpu16.stream, back, device, N);
    CHECK(back[0] == host[0] && memcmp(back + 1001, host + 1001, N - 1001) == 0);
    for (size_t i = 1; i <= 1000; i++) CHECK(back[i] == 0);

    /* Into host memory of the device's kind, too. */
    Error err = {0};
    uint8_t *pinned = (uint8_t *)gpu16.ops->host_allocate(gpu16.stream, N, &err);
    CHECK_MSG(pinned != NULL, "%s", err.text);
    if (pinned) {
        for (size_t i = 0; i < N; i++) CHECK(pinned[i] == 0);
        gpu16.ops->download(gpu16.stream, pinned, device, N);
        CHECK(memcmp(pinned, back, N) == 0);
        gpu16.ops->host_release(gpu16.stream, pinned);
    }
    end_case("memory");

    /* More than there is is an answer in words, and nothing is broken by it. */
    err.text[0] = 0;
    CHECK(gpu16.ops->host_allocate(gpu16.stream, SIZE_MAX / 2, &err) == NULL && strlen(err.text) > 20);
    err.text[0] = 0;
    CHECK(gpu16.ops->allocate(gpu16.stream, (size_t)1 << 46, &err) == NULL && strlen(err.text) > 20);
    StepState seen = {.updates = 5, .loss_sum = 3, .grad_norm = 2, .skip = 1, .bad_tensor = 4};
    gpu16.ops->upload(gpu16.stream, gpu16.state, &seen, sizeof seen);
    gpu16.ops->begin_step(gpu16.stream, gpu16.state, STEP, 0.25f);
    gpu16.ops->read_state(gpu16.stream, &seen, gpu16.state);
    CHECK(seen.step == STEP && seen.lr == 0.25f && seen.loss_sum == 0 && seen.updates == 5);
    CHECK(seen.skip == 0 && seen.bad_tensor == -1 && seen.clip_scale == 1 && seen.grad_norm == 0);
}

/* ---- embedding ---- */
TEST(embedding) {
    NEED_GPU();
    static const size_t sizes[][3] = {{1, 1, 1},     {2, 3, 5},    {3, 37, 96},
                                      {4, 127, 160}, {2, 200, 33}, {1, 5, 2056}};
    enum { V = 257, FIRST = 4 };
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        const size_t B = sizes[s][0], T = sizes[s][1], C = sizes[s][2], rows = B * T;
        for (int variant = 0; variant < 4; variant++) {
            const bool learned = variant & 1;
            const float rate = variant & 2 ? 0.3f : 0.0f;
            int32_t *tokens = (int32_t *)host_new(rows * sizeof *tokens);
            /* Three in four are one token: a run of hundreds of rows; the others are up to V - 1. */
            for (size_t r = 0; r < rows; r++) tokens[r] = r % 4 ? 7 : (int32_t)(V - 1 - r * r % (V - 7));
            const float *wte = normals(V * C, 0, 1), *wpe = normals((FIRST + T) * C, 0, 1);
            const float *dx = normals(rows * C, 0, 1), *d_wte = normals(V * C, 0, 1),
                        *d_wpe = normals(T * C, 0, 1);
            float *sizes_wte = (float *)host_new(V * C * sizeof(float)); /* sums of magnitudes */
            float *sizes_wpe = (float *)host_new(T * C * sizeof(float));
            for (size_t i = 0; i < V * C; i++) sizes_wte[i] = fabsf(d_wte[i]);
            for (size_t i = 0; i < T * C; i++) sizes_wpe[i] = fabsf(d_wpe[i]);
            for (size_t k = 0; k < rows * C; k++) {
                const float term = fabsf(dx[k]) * (float)mask_at(rate, 0, 1000 + k / C, C, k % C);
                sizes_wte[(size_t)tokens[k / C] * C + k % C] += term,
                    sizes_wpe[k / C % T * C + k % C] += term;
            }
            float *x[3], *wte_out[3], *wpe_out[3];
            const Device *devices[3] = {&cpu, &gpu32, &gpu16};
            for (int i = 0; i < 3; i++) {
                const Device *d = devices[i];
                const Dropout drop = dropout_on(d, rate, 0, 1000);
                const int32_t *ids = (const int32_t *)device_new(d, tokens, rows * sizeof *tokens);
                act_t *to = acts_on(d, NULL, rows * C);
                float *token_sums = floats_on(d, d_wte, V * C), *position_sums = floats_on(d, d_wpe, T * C);
                d->ops->embedding_forward(d->stream, to, ids, acts_on(d, wte, V * C),
                                          learned ? acts_on(d, wpe, (FIRST + T) * C) : NULL, B, T, C, FIRST,
                                          drop);
                d->ops->embedding_backward(d->stream, token_sums, learned ? position_sums : NULL,
                                           acts_on(d, dx, rows * C), ids, B, T, C, drop);
                x[i] = acts_from(d, to, rows * C);
                wte_out[i] = floats_from(d, token_sums, V * C),
                wpe_out[i] = floats_from(d, position_sums, T * C);
                if (i == 0) continue;
                for (size_t k = 0; k < rows * C; k++)
                    near("embedding", d, k, x[i][k], (double)x[i - 1][k],
                         4 * d->u * fabs((double)x[i - 1][k]));
                for (size_t k = 0; k < V * C; k++)
                    near("d_wte", d, k, wte_out[i][k], (double)wte_out[i - 1][k],
                         2 * sum_rounding(&cpu, rows) * (double)sizes_wte[k]);
                for (size_t k = 0; k < T * C; k++)
                    near("d_wpe", d, k, wpe_out[i][k], (double)wpe_out[i - 1][k],
                         learned ? 2 * sum_rounding(&cpu, B) * (double)sizes_wpe[k] : 0);
            }
            end_case("embedding");
        }
    }
}

/* ---- residual add and norm ---- */
static const size_t norm_sizes[][2] = {{1, 1},   {3, 4},    {5, 7},    {111, 96}, {7, 97},   {3, 384},
                                       {9, 768}, {6, 1000}, {2, 1031}, {2, 2056}, {4000, 32}};
enum { NORM_SIZES = sizeof norm_sizes / sizeof norm_sizes[0] };

/* The sum first; then the norm of what the device itself stored as the sum, so that each link has a bound of
 * its own. With e = sum_rounding mean|x| the mean is off by e, the variance by e^2 and a sum's rounding, and
 * n = (x - mean) rstd by both. Rows of mean 1,000 and spread 8 tell this from mean(x^2) - mean(x)^2. */
TEST(residual_norm_forward) {
    NEED_GPU();
    for (size_t s = 0; s < NORM_SIZES; s++) {
        const size_t rows = norm_sizes[s][0], C = norm_sizes[s][1], n = rows * C;
        static const struct {
            bool branch, drop, in_place, statistics;
            double mean;
        } cases[] = {
            {true, true, false, true, 0}, {true, false, true, false, 0}, {false, false, false, true, 1000}};
        for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
            const float rate = cases[i].drop ? 0.2f : 0.0f;
            const float *residual = normals(n, cases[i].mean, 8), *branch = normals(n, 0, 1);
            const float *gain = normals(C, 1, 0.5), *bias = normals(C, 0, 0.5);
            FOR_DEVICES(d, other) {
                const bool stats = cases[i].statistics;
                act_t *in = acts_on(d, residual, n), *sum = cases[i].in_place ? in : acts_on(d, NULL, n);
                act_t *normed = acts_on(d, NULL, n);
                float *mean = floats_on(d, NULL, rows), *rstd = floats_on(d, NULL, rows);
                d->ops->residual_norm_forward(
                    d->stream, sum, normed, stats ? mean : NULL, stats ? rstd : NULL, in,
                    cases[i].branch ? acts_on(d, branch, n) : NULL, acts_on(d, gain, C), acts_on(d, bias, C),
                    rows, C, dropout_on(d, rate, 3, 77));
                const float *x = cases[i].branch ? acts_from(d, sum, n) : residual;
                for (size_t k = 0; k < n && cases[i].branch; k++) {
                    const double added = (double)branch[k] * mask_at(rate, 3, 77 + k / C, C, k % C);
                    const double exact = (double)residual[k] + added;
                    near("sum", d, k, x[k], exact, 2 * d->u * fabs(exact) + 3 * U32 * fabs(added));
                }
                act_t *ref_in = acts_on(other, x, n), *ref_normed = acts_on(other, NULL, n);
                float *ref_mean = floats_on(other, NULL, rows), *ref_rstd = floats_on(other, NULL, rows);
                other->ops->residual_norm_forward(
                    other->stream, ref_in, ref_normed, ref_mean, ref_rstd, ref_in, NULL,
                    acts_on(other, gain, C), acts_on(other, bias, C), rows, C, dropout_on(other, 0, 0, 0));
                const float *y = acts_from(d, normed, n), *ref = acts_from(other, ref_normed, n);
                const float *m = floats_from(d, mean, rows), *r = floats_from(d, rstd, rows);
                const float *mr = floats_from(other, ref_mean, rows),
                            *rr = floats_from(other, ref_rstd, rows);
                for (size_t row = 0; row < rows; row++) {
                    double size = 0;
                    for (size_t c = 0; c < C; c++) size += fabs((double)x[row * C + c]) / (double)C;
                    const double e = sum_rounding(&cpu, C) * size, R = (double)rr[row], M = (double)mr[row];
                    const double relative = e * e * R * R + sum_rounding(&cpu, C);
                    if (stats) near("mean", d, row, m[row], M, 2 * e);
                    if (stats) near("rstd", d, row, r[row], R, 2 * relative * R);
                    for (size_t c = 0; c < C; c++) {
                        const size_t k = row * C + c;
                        const double away = fabs((double)x[k] - M), g = fabs((double)gain[c]);
                        const double n_bound = R * (2 * e + 4 * U32 * away) + away * R * 2 * relative;
                        near("normed", d, k, y[k], (double)ref[k],
                             g * n_bound + 8 * U32 * (g * away * R + fabs((double)bias[c])) +
                                 2 * d->u * fabs((double)ref[k]));
                    }
                }
                end_case("residual_norm_forward");
                residual = normals(n, cases[i].mean, 8), branch = normals(n, 0, 1);
                gain = normals(C, 1, 0.5), bias = normals(C, 0, 0.5);
            }
            end_case("residual_norm_forward");
        }
    }
}

TEST(residual_norm_backward) {
    NEED_GPU();
    for (size_t s = 0; s < NORM_SIZES; s++) {
        const size_t rows = norm_sizes[s][0], C = norm_sizes[s][1], n = rows * C;
        for (int variant = 0; variant < 4; variant++) {
            const bool overwrite = variant & 1, wants_branch = variant & 2;
            const float rate = variant & 2 ? 0.2f : 0.0f;
            const float *gain = normals(C, 1, 0.5), *x = normals(n, 2, 1), *dy = normals(n, 0, 1);
            const float *past = normals(n, 0, 1), *old_gain = normals(C, 0, 1), *old_bias = normals(C, 0, 1);
            float *mean = normals(rows, 2, 0.1), *rstd = normals(rows, 1, 0.1);
            const Device *devices[3] = {&cpu, &gpu32, &gpu16};
            float *dx[3], *dg[3], *db[3];
            for (int i = 0; i < 3; i++) {
                const Device *d = devices[i];
                act_t *d_sum = acts_on(d, overwrite ? NULL : past, n), *d_branch = acts_on(d, NULL, n);
                float *d_gain = floats_on(d, old_gain, C), *d_bias = floats_on(d, old_bias, C);
                d->ops->residual_norm_backward(d->stream, d_sum, overwrite, wants_branch ? d_branch : NULL,
                                               d_gain, d_bias, acts_on(d, dy, n), acts_on(d, x, n),
                                               floats_on(d, mean, rows), floats_on(d, rstd, rows),
                                               acts_on(d, gain, C), rows, C, dropout_on(d, rate, 2, 5));
                dx[i] = acts_from(d, d_sum, n), dg[i] = floats_from(d, d_gain, C),
                db[i] = floats_from(d, d_bias, C);
                if (i == 0) continue;
                const float *branch = acts_from(d, d_branch, n);
                for (size_t row = 0; row < rows; row++) {
                    const double m = (double)mean[row], r = (double)rstd[row];
                    double g_size = 0, gn_size = 0;
                    for (size_t c = 0; c < C; c++) {
                        const double g = fabs((double)dy[row * C + c] * (double)gain[c]) / (double)C;
                        g_size += g, gn_size += g * fabs((double)x[row * C + c] - m) * r;
                    }
                    for (size_t c = 0; c < C; c++) {
                        const size_t k = row * C + c;
                        const double away = fabs((double)x[k] - m) * r, ref = (double)dx[i - 1][k];
                        const double g = fabs((double)dy[k] * (double)gain[c]),
                                     before = overwrite ? 0 : (double)past[k];
                        const double bound = r * (8 * U32 * g +
                                                  sum_rounding(&cpu, C) * (g_size + away * gn_size)) +
                                             2 * U32 * (fabs(before) + fabs(ref));
                        near("d_sum", d, k, dx[i][k], ref, 2 * bound + 2 * d->u * fabs(ref));
                        const double masked = (double)dx[i][k] * mask_at(rate, 2, 5 + row, C, c);
                        if (wants_branch) near("d_branch", d, k, branch[k], masked, 3 * d->u * fabs(masked));
                    }
                }
                for (size_t c = 0; c < C; c++) {
                    double gain_size = fabs((double)old_gain[c]), bias_size = fabs((double)old_bias[c]);
                    for (size_t row = 0; row < rows; row++) {
                        const double term = fabs((double)dy[row * C + c]);
                        bias_size += term;
                        gain_size += term * fabs((double)x[row * C + c] - (double)mean[row]) *
                                     (double)rstd[row];
                    }
                    near("d_gain", d, c, dg[i][c], (double)dg[i - 1][c],
                         2 * sum_rounding(&cpu, rows) * gain_size);
                    near("d_bias", d, c, db[i][c], (double)db[i - 1][c],
                         2 * sum_rounding(&cpu, rows) * bias_size);
                }
            }
            end_case("residual_norm_backward");
        }
    }
}

/* ---- linear ---- */
static const double gelu_k = 0.7978845608028654;
static double gelu_slope(double x) {
    const double t = tanh(gelu_k * (x + 0.044715 * x * x * x));
    return (1 + t) / 2 + x / 2 * (1 - t * t) * gelu_k * (1 + 3 * 0.044715 * x * x);
}

/* tanh is off by a few u in fp32; the GPU's own, which the library uses for bf16, by 2^-10. It is multiplied
 * by x/2 in GELU, and in its slope by x/2 times the argument's slope, twice. GELU's slope is at most 1.13. */
TEST(linear) {
    NEED_GPU();
    static const size_t sizes[][3] = {{1, 1, 1},      {3, 5, 7},     {111, 96, 384},
                                      {127, 160, 96}, {300, 20, 17}, {1000, 384, 1536}};
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        const size_t rows = sizes[s][0], in = sizes[s][1], out = sizes[s][2];
        for (int activated = 0; activated < 2; activated++) {
            const float *x = normals(rows * in, 0, 1), *w = normals(in * out, 0, 1 / sqrt((double)in));
            const float *b = normals(out, 0, 1), *dy = normals(rows * out, 0, 1),
                        *pre = normals(rows * in, 0, 2);
            const float *old_w = normals(in * out, 0, 1), *old_b = normals(out, 0, 1);
            const Device *devices[3] = {&cpu, &gpu32, &gpu16};
            float *y[3], *gelu[3], *dx[3], *dw[3], *db[3];
            for (int i = 0; i < 3; i++) {
                const Device *d = devices[i];
                act_t *to = acts_on(d, NULL, rows * out), *to_gelu = acts_on(d, NULL, rows * out);
                act_t *d_in = acts_on(d, NULL, rows * in);
                const act_t *x_on = acts_on(d, x, rows * in), *w_on = acts_on(d, w, in * out);
                float *dw_on = floats_on(d, old_w, in * out), *db_on = floats_on(d, old_b, out);
                d->ops->linear_forward(d->stream, to, activated ? to_gelu : NULL, x_on, w_on,
                                       acts_on(d, b, out), rows, in, out);
                d->ops->linear_backward(d->stream, d_in, dw_on, db_on, acts_on(d, dy, rows * out), x_on, w_on,
                                        activated ? acts_on(d, pre, rows * in) : NULL, rows, in, out);
                y[i] = acts_from(d, to, rows * out), gelu[i] = acts_from(d, to_gelu, rows * out);
                if (activated) { /* without y, too; the library may take its sums in another order then */
                    d->ops->linear_forward(d->stream, NULL, to_gelu, x_on, w_on, acts_on(d, b, out), rows, in,
                                           out);
                    const float *alone = acts_from(d, to_gelu, rows * out);
                    for (size_t k = 0; k < rows * out; k++) {
                        double size = fabs((double)b[k % out]);
                        for (size_t j = 0; j < in && rows * in * out <= 20000000; j++)
                            size += fabs((double)x[k / out * in + j] * (double)w[j * out + k % out]);
                        if (rows * in * out > 20000000)
                            size = 64 * sqrt((double)in); /* no sum of so many is larger */
                        near("gelu alone", d, k, alone[k], (double)gelu[i][k],
                             1.13 * sums_differ(d, in) * size + 4 * d->u * (1 + fabs((double)y[i][k])));
                    }
                }
                dx[i] = acts_from(d, d_in, rows * in);
                dw[i] = floats_from(d, dw_on, in * out), db[i] = floats_from(d, db_on, out);
                if (i == 0) continue;
                /* Sizes are checked whole where that is quick, else at places spread over the matrices. */
                const size_t skip = rows * in * out > 20000000 ? 97 : 1;
                const double tanh_error = d == &gpu16 ? 0x1p-10 : 8 * U32;
                for (size_t k = 0; k < rows * out; k += skip) {
                    double size = fabs((double)b[k % out]);
                    for (size_t j = 0; j < in; j++)
                        size += fabs((double)x[k / out * in + j] * (double)w[j * out + k % out]);
                    const double ref = (double)y[i - 1][k], off = sums_differ(d, in) * size;
                    /* Where the library has no bias epilogue the product alone, |ref| + |b| at most, is
                     * rounded too. */
                    const double stored_off = d->u * (2 * fabs(ref) + fabs((double)b[k % out]));
                    near("y", d, k, y[i][k], ref, off + stored_off + d->u * fabs(ref));
                    if (activated)
                        near("gelu", d, k, gelu[i][k], (double)gelu[i - 1][k],
                             1.13 * (off + stored_off) + fabs(ref) / 2 * tanh_error +
                                 2 * d->u * fabs((double)gelu[i - 1][k]));
                }
                for (size_t k = 0; k < rows * in; k += skip) {
                    double size = 0, slope = 1, slope_off = 0;
                    for (size_t o = 0; o < out; o++)
                        size += fabs((double)dy[k / in * out + o] * (double)w[k % in * out + o]);
                    if (activated) {
                        const double p = (double)pre[k];
                        slope = fabs(gelu_slope(p));
                        slope_off = tanh_error * (1 + fabs(p) * gelu_k * (1 + 3 * 0.044715 * p * p));
                    }
                    near("dx", d, k, dx[i][k], (double)dx[i - 1][k],
                         sums_differ(d, out) * size * slope + size * slope_off +
                             3 * d->u * fabs((double)dx[i - 1][k]));
                }
                for (size_t k = 0; k < in * out; k += skip) {
                    double size = fabs((double)old_w[k]);
                    for (size_t r = 0; r < rows; r++)
                        size += fabs((double)x[r * in + k / out] * (double)dy[r * out + k % out]);
                    near("dw", d, k, dw[i][k], (double)dw[i - 1][k], sums_differ(d, rows) * size);
                }
                for (size_t o = 0; o < out; o++) {
                    double size = fabs((double)old_b[o]);
                    for (size_t r = 0; r < rows; r++) size += fabs((double)dy[r * out + o]);
                    near("db", d, o, db[i][o], (double)db[i - 1][o], 2 * sum_rounding(&cpu, rows) * size);
                }
            }
            end_case("linear");
        }
    }
}

/* ---- rotary positions ---- */
TEST(rotary) {
    NEED_GPU();
    /* B, T, H, D, first position; the last ones ask for fewer and then more angles than before */
    static const size_t sizes[][5] = {{1, 1, 1, 2, 0},     {3, 37, 3, 32, 0}, {2, 5, 3, 6, 0},
                                      {1, 9, 2, 64, 3000}, {1, 3, 1, 64, 7},  {2, 3, 12, 64, 5000}};
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        const size_t B = sizes[s][0], T = sizes[s][1], H = sizes[s][2], D = sizes[s][3],
                     n = B * T * 3 * H * D;
        for (int way = 0; way < 4; way++) {
            const bool inverse = way % 2, keys_only = way / 2;
            const float *qkv = normals(n, 0, 1);
            const Device *devices[3] = {&cpu, &gpu32, &gpu16};
            float *turned[3];
            for (int i = 0; i < 3; i++) {
                const Device *d = devices[i];
                /* fp32's roundings; or the error of an angle in fp16, 2^-12 at most, beside them */
                const double angle = 8 * U32 + (d == &gpu16 ? 0x1p-12 : 0);
                act_t *on = acts_on(d, qkv, n);
                d->ops->rotary(d->stream, on, B, T, H, D, sizes[s][4], keys_only, inverse);
                turned[i] = acts_from(d, on, n);
                for (size_t k = 0; i > 0 && k < n; k++) {
                    const size_t c = k % D, pair = c < D / 2 ? k + D / 2 : k - D / 2;
                    const size_t which = k / (H * D) % 3;
                    const bool stays = which == 2 || (which == 0 && keys_only);
                    near("rotary", d, k, turned[i][k], (double)turned[i - 1][k],
                         stays ? 0
                               : angle * (fabs((double)qkv[k]) + fabs((double)qkv[pair])) +
                                     2 * d->u * fabs((double)turned[i - 1][k]));
                }
            }
            end_case("rotary");
        }
    }
}

/* ---- the head ---- */

/* Against plain loops in double. A logit is off by its sum's rounding and, stored as an activation, by u of
 * itself: e at most in a row; so a probability by the factor exp(2 e) and its own roundings (the exponential
 * of bf16 has an argument rounded to 2 u of fp32), and the loss by 2 e. The last V % 8 columns' part of
 * d_hidden is rounded once more. wte's padding is NaN and d_wte's must stay as it is. */
TEST(head_loss) {
    NEED_GPU();
    static const size_t sizes[][3] = {
        {1, 5, 3}, {111, 96, 257}, {300, 40, 136}, {9, 33, 131}, {5, 24, 50257}};
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        const size_t rows = sizes[s][0], C = sizes[s][1], V = sizes[s][2], Vp = (V + 127) / 128 * 128;
        const float scale = 0.375f;
        FOR_DEVICES(d, other) {
            (void)other;
            const float *hidden = normals(rows * C, 0, 1), *old = normals(Vp * C, 0, 0.1);
            float *wte = normals(Vp * C, 0, 6 / sqrt((double)C));
            for (size_t i = V * C; i < Vp * C; i++) wte[i] = NAN;
            int32_t *targets = (int32_t *)host_new(rows * sizeof *targets);
            for (size_t r = 0; r < rows; r++) targets[r] = (int32_t)(r % 3 == 0 ? V - 1 : r * r % V);
            const int32_t *ids = (const int32_t *)device_new(d, targets, rows * sizeof *targets);
            const act_t *hidden_on = acts_on(d, hidden, rows * C), *wte_on = acts_on(d, wte, Vp * C);
            void *scratch = device_new(d, NULL, d->ops->head_scratch_bytes(rows, C, V));
            act_t *d_hidden = acts_on(d, NULL, rows * C);
            float *d_wte = floats_on(d, old, Vp * C);
            StepState forward, both;
            d->ops->begin_step(d->stream, d->state, STEP, 0);
            d->ops->head_loss(d->stream, d->state, NULL, NULL, hidden_on, wte_on, ids, rows, C, V, scale,
                              scratch);
            d->ops->read_state(d->stream, &forward, d->state);
            d->ops->head_loss(d->stream, d->state, d_hidden, d_wte, hidden_on, wte_on, ids, rows, C, V, scale,
                              scratch);
            d->ops->read_state(d->stream, &both, d->state);
            CHECK(both.loss_sum == 2 * forward.loss_sum);
            const float *dx = acts_from(d, d_hidden, rows * C), *dw = floats_from(d, d_wte, Vp * C);

            double *p = reference64_numbers(V), *sums = reference64_numbers(V * C),
                   *bounds = reference64_numbers(V * C);
            double loss = 0, loss_bound = 0;
            for (size_t i = 0; i < V * C; i++)
                sums[i] = (double)old[i], bounds[i] = sum_rounding(d, rows) * fabs(sums[i]);
            for (size_t r = 0; r < rows; r++) {
                double e = 0, largest = -INFINITY, total = 0;
                for (size_t v = 0; v < V; v++) {
                    double size = 0;
                    p[v] = 0;
                    for (size_t c = 0; c < C; c++) {
                        const double term = (double)hidden[r * C + c] * (double)wte[v * C + c];
                        p[v] += term, size += fabs(term);
                    }
                    e = fmax(e, sum_rounding(d, C) * size + d->u * fabs(p[v])), largest = fmax(largest, p[v]);
                }
                const double target = p[targets[r]], e_exp = 4 * U32 * (fabs(largest) + 50);
                for (size_t v = 0; v < V; v++) total += p[v] = exp(p[v] - largest);
                loss += log(total) + largest - target, loss_bound += 2 * e + e_exp + sum_rounding(&cpu, V);
                double *want = reference64_numbers(2 * C), *bound = want + C;
                for (size_t v = 0; v < V; v++) {
                    const double g = (double)scale, soft = p[v] / total,
                                 d_logit = g * (soft - (v == (size_t)targets[r]));
                    const double off = g * soft * (exp(2 * e + e_exp + sum_rounding(&cpu, V)) - 1) +
                                       2 * d->u * fabs(d_logit);
                    for (size_t c = 0; c < C; c++) {
                        const double w = (double)wte[v * C + c], h = (double)hidden[r * C + c];
                        want[c] += d_logit * w;
                        bound[c] += (off +
                                     (sum_rounding(d, V) + (v >= V / 8 * 8 ? d->u : 0)) * fabs(d_logit)) *
                                    fabs(w);
                        sums[v * C + c] += d_logit * h;
                        bounds[v * C + c] += (off + sum_rounding(d, rows) * fabs(d_logit)) * fabs(h);
                    }
                }
                for (size_t c = 0; c < C; c++)
                    near("d_hidden", d, r * C + c, dx[r * C + c], want[c],
                         bound[c] + 2 * d->u * fabs(want[c]));
                free(want);
            }
            for (size_t i = 0; i < V * C; i++) near("d_wte", d, i, dw[i], sums[i], bounds[i]);
            CHECK(memcmp(dw + V * C, old + V * C, (Vp - V) * C * sizeof *old) == 0);
            CHECK_MSG(fabs(forward.loss_sum - loss) <= loss_bound, "%s: loss %.12g, not %.12g (+-%.2g)",
                      d->ops->name, forward.loss_sum, loss, loss_bound);
            free(p), free(sums), free(bounds);

            /* A logit that is no number must reach the loss; -inf alone is a probability of 0. */
            static const float sick[] = {NAN, INFINITY};
            for (size_t i = 0; i < 2; i++) {
                const float well = wte[(V - 1) * C];
                wte[(V - 1) * C] = sick[i];
                d->ops->begin_step(d->stream, d->state, STEP, 0);
                d->ops->head_loss(d->stream, d->state, NULL, NULL, hidden_on, acts_on(d, wte, Vp * C), ids,
                                  rows, C, V, scale, scratch);
                d->ops->read_state(d->stream, &forward, d->state);
                /* An infinite weight is -inf for a negative hidden: only rows of both signs are sure to show
                 * it. */
                if (i == 0 || rows > 8) CHECK(!isfinite(forward.loss_sum));
                wte[(V - 1) * C] = well;
            }
            end_case("head_loss");
        }
    }
    gpu16.ops->begin_step(gpu16.stream, gpu16.state, STEP, 0),
        gpu32.ops->begin_step(gpu32.stream, gpu32.state, STEP, 0);
}

/* More rows than one chunk of the head: against the same rows in two calls, which must add up to the same. */
TEST(head_in_chunks) {
    NEED_GPU();
    const size_t rows = 8192 + 300, C = 16, V = 257, part = 8192;
    const float *hidden = normals(rows * C, 0, 1), *wte = normals(384 * C, 0, 1);
    int32_t *targets = (int32_t *)host_new(rows * sizeof *targets);
    float *zero = (float *)host_new(384 * C * sizeof *zero);
    for (size_t r = 0; r < rows; r++) targets[r] = (int32_t)(r * r % V);
    FOR_DEVICES(d, other) {
        (void)other;
        const int32_t *ids = (const int32_t *)device_new(d, targets, rows * sizeof *targets);
        const uint8_t *x = (const uint8_t *)acts_on(d, hidden, rows * C);
        const act_t *w = acts_on(d, wte, 384 * C);
        void *scratch = device_new(d, NULL, d->ops->head_scratch_bytes(rows, C, V));
        uint8_t *whole = (uint8_t *)acts_on(d, NULL, rows * C),
                *parts = (uint8_t *)acts_on(d, NULL, rows * C);
        float *dw_whole = floats_on(d, zero, 384 * C), *dw_parts = floats_on(d, zero, 384 * C);
        const size_t row_bytes = C * d->ops->act_size;
        StepState one, two;
        d->ops->begin_step(d->stream, d->state, STEP, 0);
        d->ops->head_loss(d->stream, d->state, whole, dw_whole, x, w, ids, rows, C, V, 1, scratch);
        d->ops->read_state(d->stream, &one, d->state);
        d->ops->begin_step(d->stream, d->state, STEP, 0);
        d->ops->head_loss(d->stream, d->state, parts, dw_parts, x, w, ids, part, C, V, 1, scratch);
        d->ops->head_loss(d->stream, d->state, parts + part * row_bytes, dw_parts, x + part * row_bytes, w,
                          ids + part, rows - part, C, V, 1, scratch);
        d->ops->read_state(d->stream, &two, d->state);
        const float *a = acts_from(d, whole, rows * C), *b = acts_from(d, parts, rows * C);
        CHECK(one.loss_sum == two.loss_sum && memcmp(a, b, rows * C * sizeof *a) == 0);
        a = floats_from(d, dw_whole, 384 * C), b = floats_from(d, dw_parts, 384 * C);
        CHECK(memcmp(a, b, 384 * C * sizeof *a) == 0);
    }
    end_case("head_in_chunks");
}

TEST(head_logits) {
    NEED_GPU();
    const size_t rows = 5, C = 40, V = 131, stride = 3 * C;
    const float *hidden = normals(rows * stride, 0, 1), *wte = normals(256 * C, 0, 1);
    FOR_DEVICES(d, other) {
        (void)other;
        float *on = floats_on(d, NULL, rows * V);
        d->ops->head_logits(d->stream, on, acts_on(d, hidden, rows * stride), stride,
                            acts_on(d, wte, 256 * C), rows, C, V);
        const float *logits = floats_from(d, on, rows * V);
        for (size_t k = 0; k < rows * V; k++) {
            double sum = 0, size = 0;
            for (size_t c = 0; c < C; c++) {
                const double term = (double)hidden[k / V * stride + c] * (double)wte[k % V * C + c];
                sum += term, size += fabs(term);
            }
            near("logit", d, k, logits[k], sum, sum_rounding(d, C) * size);
        }
    }
    end_case("head_logits");
}

/* ---- the update ---- */

/* With unused floats between the tensors, which hold NaN: no part of any sum. The second is cut into parts.
 * */
static const ParamSpan spans[] = {{0, 7, true}, {64, 100003, false}, {100096, 1, true}, {100161, 333, true}};
enum { SPANS = sizeof spans / sizeof spans[0], SPAN_FLOATS = 100161 + 333 };

static float *in_spans(double spread) {
    float *x = normals(SPAN_FLOATS, 0, spread), *all = (float *)host_new(SPAN_FLOATS * sizeof *all);
    for (size_t i = 0; i < SPAN_FLOATS; i++) all[i] = NAN;
    for (size_t i = 0; i < SPANS; i++)
        memcpy(all + spans[i].offset, x + spans[i].offset, spans[i].count * sizeof *x);
    return all;
}

static StepState norm_state(const Device *d, const float *gradients, float clip, double loss) {
    StepState seen;
    d->ops->begin_step(d->stream, d->state, STEP, 0.5f);
    d->ops->read_state(d->stream, &seen, d->state);
    seen.loss_sum = loss;
    d->ops->upload(d->stream, d->state, &seen, sizeof seen);
    d->ops->gradient_norm(d->stream, d->state, floats_on(d, gradients, SPAN_FLOATS), spans, SPANS, clip);
    d->ops->read_state(d->stream, &seen, d->state);
    return seen;
}

TEST(gradient_norm) {
    NEED_GPU();
    static const double spreads[] = {1, 1e-4, 1e25, 1e-25}; /* squares past fp32's range, above and below */
    for (size_t i = 0; i < 4; i++) {
        const float *gradients = in_spans(spreads[i]);
        for (int clipped = 0; clipped < 2; clipped++) {
            const float clip = clipped ? (float)spreads[i] : 0;
            const StepState ours = norm_state(&gpu16, gradients, clip, 1),
                            ref = norm_state(&cpu, gradients, clip, 1);
            near("grad_norm", &gpu16, i, ours.grad_norm, (double)ref.grad_norm,
                 2 * U32 * (double)ref.grad_norm);
            near("clip_scale", &gpu16, i, ours.clip_scale, (double)ref.clip_scale,
                 2 * U32 * (double)ref.clip_scale);
            CHECK(ours.skip == 0 && ours.bad_tensor == -1 && (ours.clip_scale < 1) == (clipped == 1));
        }
        end_case("gradient_norm");
    }
    static const float sick[] = {NAN, INFINITY, -INFINITY};
    for (size_t i = 0; i < 3; i++) {
        for (size_t s = 0; s < SPANS; s++) {
            float *gradients = in_spans(1);
            gradients[spans[s].offset + spans[s].count - 1] = sick[i];
            gradients[spans[SPANS - 1].offset] = sick[i];
            const StepState seen = norm_state(&gpu16, gradients, 1, 1);
            CHECK_MSG(seen.skip == 1 && seen.bad_tensor == (int32_t)s, "%g in tensor %zu: skip %d, tensor %d",
                      (double)sick[i], s, (int)seen.skip, (int)seen.bad_tensor);
        }
        const StepState seen = norm_state(&gpu16, in_spans(1), 1, (double)sick[i]);
        CHECK(seen.skip == 1 && seen.bad_tensor == -1);
        end_case("gradient_norm");
    }
}

/* Each of a step's few operations rounds once on either device. The first moment may cancel, so the error of
 * its terms, and the steps' errors of a weight, are carried along from step to step. */
TEST(adamw) {
    NEED_GPU();
    const AdamW settings = {.beta1 = 0.9f, .beta2 = 0.95f, .epsilon = 1e-8f, .weight_decay = 0.1f, .clip = 1};
    const float lr = 0.01f, *start = in_spans(1), *zero = in_spans(0);
    FOR_DEVICES(d, other) {
        (void)other;
        float *w = floats_on(d, start, SPAN_FLOATS), *m = floats_on(d, zero, SPAN_FLOATS);
        float *v = floats_on(d, zero, SPAN_FLOATS), *cpu_w = floats_on(&cpu, start, SPAN_FLOATS);
        float *cpu_m = floats_on(&cpu, zero, SPAN_FLOATS), *cpu_v = floats_on(&cpu, zero, SPAN_FLOATS);
        act_t *work = d == &gpu16 ? acts_on(d, NULL, SPAN_FLOATS) : NULL;
        const Device *both[2] = {&cpu, d};
        double *m_off = (double *)host_new(SPAN_FLOATS * sizeof *m_off);
        double *w_off = (double *)host_new(SPAN_FLOATS * sizeof *w_off);
        for (int i = 0; i < 2; i++) {
            StepState none = {.updates = 0};
            both[i]->ops->upload(both[i]->stream, both[i]->state, &none, sizeof none);
        }
        for (uint64_t t = 1; t <= 3; t++) {
            const float *g = in_spans(t == 3 ? 1e-9 : 1), *old_m = floats_from(&cpu, cpu_m, SPAN_FLOATS);
            StepState seen;
            for (int i = 0; i < 2; i++) {
                const Device *on = both[i];
                on->ops->begin_step(on->stream, on->state, STEP, lr);
                on->ops->read_state(on->stream, &seen, on->state);
                seen.clip_scale = t == 2 ? 0.125f : 1.0f;
                on->ops->upload(on->stream, on->state, &seen, sizeof seen);
                on->ops->adamw(on->stream, on->state, i ? w : cpu_w, i ? work : NULL,
                               floats_on(on, g, SPAN_FLOATS), i ? m : cpu_m, i ? v : cpu_v, spans, SPANS,
                               settings);
                on->ops->read_state(on->stream, &seen, on->state);
                CHECK(seen.updates == t);
            }
            const float *ours = floats_from(d, w, SPAN_FLOATS),
                        *half = work ? acts_from(d, work, SPAN_FLOATS) : NULL;
            const float *m1 = floats_from(d, m, SPAN_FLOATS), *v1 = floats_from(d, v, SPAN_FLOATS);
            const double c1 = 1 - pow((double)settings.beta1, (double)t),
                         c2 = 1 - pow((double)settings.beta2, (double)t);
            for (size_t s = 0; s < SPANS; s++) {
                for (size_t k = spans[s].offset; k < spans[s].offset + spans[s].count; k++) {
                    const double grad = fabs((double)g[k]) * (t == 2 ? 0.125 : 1), M = (double)cpu_m[k];
                    const double V = (double)cpu_v[k], W = (double)cpu_w[k], root = sqrt(V / c2) + 1e-8;
                    const double kept = (double)settings.beta1, taken = 1 - kept;
                    m_off[k] = kept * m_off[k] + 6 * U32 * (kept * fabs((double)old_m[k]) + taken * grad) +
                               0x1p-149;
                    w_off[k] += (double)lr *
                                    (m_off[k] / c1 / root + 20 * (double)t * U32 * fabs(M / c1 / root)) +
                                4 * U32 * fabs(W);
                    near("m", d, k, m1[k], M, m_off[k]);
                    near("v", d, k, v1[k], V, 8 * (double)t * U32 * V + 0x1p-149);
                    near("w", d, k, ours[k], W, w_off[k]);
                    if (half) CHECK(half[k] == bf16_rounded(ours[k]));
                }
            }
            /* Skipped: nothing moves, not even the count. */
            d->ops->read_state(d->stream, &seen, d->state);
            seen.skip = 1;
            d->ops->upload(d->stream, d->state, &seen, sizeof seen);
            d->ops->adamw(d->stream, d->state, w, work, floats_on(d, g, SPAN_FLOATS), m, v, spans, SPANS,
                          settings);
            d->ops->read_state(d->stream, &seen, d->state);
            const float *after = floats_from(d, w, SPAN_FLOATS);
            CHECK(seen.updates == t && memcmp(after, ours, SPAN_FLOATS * sizeof *ours) == 0);
        }
        for (size_t i = 0; i < 2; i++) both[i]->ops->begin_step(both[i]->stream, both[i]->state, STEP, 0);
    }
    end_case("adamw");
}

/* ---- naive attention, by the rule of attention.h ---- */

typedef struct Case {
    size_t B, T, H, D;
    const float *qkv, *d_out;   /* (B, T, 3, H, D), (B, T, H, D) */
    double *reference[RESULTS]; /* (B, H, T, D) each */
    double *lse;                /* (B, H, T) */
    double *lse_last_place;     /* (B, H, T) */
    double allowed[2][RESULTS]; /* in fp32, in bf16 */
} Case;

/* Rows of one head out of many, made contiguous. */
static void take_head(float *to, const float *from, size_t T, size_t D, size_t stride) {
    for (size_t t = 0; t < T; t++) memcpy(to + t * D, from + t * stride, D * sizeof *to);
}

static Case case_new(size_t B, size_t T, size_t H, size_t D, double times) {
    const size_t C = H * D, n = B * T * C;
    Case c = {.B = B, .T = T, .H = H, .D = D, .qkv = normals(3 * n, 0, times), .d_out = normals(n, 0, 1)};
    float *plain[4][RESULTS]; /* fp32 up and down, bf16 up and down */
    c.lse = (double *)host_new(B * H * T * sizeof(double));
    c.lse_last_place = (double *)host_new(B * H * T * sizeof(double));
    float *plain_lse = (float *)host_new(B * H * T *
                                         sizeof(float)); /* of no interest; all write the same place */
    for (int r = 0; r < RESULTS; r++) {
        c.reference[r] = (double *)host_new(n * sizeof(double));
        for (int i = 0; i < 4; i++) plain[i][r] = (float *)host_new(n * sizeof(float));
    }
#pragma omp parallel for schedule(dynamic)
    for (size_t bh = 0; bh < B * H; bh++) {
        const float *in = c.qkv + bh / H * T * 3 * C + bh % H * D,
                    *d_out = c.d_out + bh / H * T * C + bh % H * D;
        float *q = (float *)xmalloc(4 * T * D * sizeof *q), *k = q + T * D, *v = k + T * D, *d_o = v + T * D;
        take_head(q, in, T, D, 3 * C), take_head(k, in + C, T, D, 3 * C),
            take_head(v, in + 2 * C, T, D, 3 * C);
        take_head(d_o, d_out, T, D, C);
        const size_t at = bh * T * D;
        double *exact[RESULTS];
        for (int r = 0; r < RESULTS; r++) exact[r] = c.reference[r] + at;
        plain_double(false, T, D, q, k, v, d_o, exact, c.lse + bh * T);
        for (int i = 0; i < 4; i++) {
            float *rounded[RESULTS];
            for (int r = 0; r < RESULTS; r++) rounded[r] = plain[i][r] + at;
            (i < 2 ? plain_float : plain_bf16)(i % 2, T, D, q, k, v, d_o, rounded, plain_lse + bh * T);
        }
        for (size_t t = 0; t < T; t++)
            c.lse_last_place[bh * T + t] = lse_last_place(c.lse[bh * T + t], t, D, q, k, times > 1);
        free(q);
    }
    for (int r = 0; r < RESULTS; r++) {
        for (int half = 0; half < 2; half++) {
            double plain_error = 0, rounding = 0;
            for (size_t i = 0; i < n; i++) {
                const double ref = c.reference[r][i];
                for (int down = 0; down < 2; down++)
                    plain_error = fmax(plain_error, fabs((double)plain[2 * half + down][r][i] - ref));
                rounding = fmax(rounding, shift_loss(ref, half));
            }
            c.allowed[half][r] = 2 * plain_error + 2 * rounding;
        }
    }
    return c;
}

static const Attention *naive_of(const Device *device) {
    const AttentionShape shape = {.B = 1, .T = 1, .H = 1, .D = 8};
    return attention_find("naive", device->ops->name, &shape, NULL);
}

/* Forward, and with training backward, on a device; results as floats. */
typedef struct Result {
    float *out, *lse, *d_qkv;
} Result;
static Result attention_on(const Device *d, const Case *c, bool training) {
    const size_t n = c->B * c->T * c->H * c->D;
    const Attention *naive = naive_of(d);
    const AttentionShape shape = {.B = c->B, .T = c->T, .H = c->H, .D = c->D, .training = training};
    AttentionCall call = {.B = c->B,
                          .T = c->T,
                          .H = c->H,
                          .D = c->D,
                          .scale = 1.0f / sqrtf((float)c->D),
                          .training = training,
                          .stream = d->stream,
                          .qkv = acts_on(d, c->qkv, 3 * n),
                          .out = acts_on(d, NULL, n),
                          .lse = floats_on(d, NULL, c->B * c->H * c->T),
                          .saved = training ? device_new(d, NULL, naive->saved_bytes(&shape)) : NULL,
                          .scratch = device_new(d, NULL, naive->scratch_bytes(&shape)),
                          .d_out = acts_on(d, c->d_out, n),
                          .d_qkv = acts_on(d, NULL, 3 * n)};
    naive->forward(&call);
    if (training) naive->backward(&call);
    return (Result){acts_from(d, call.out, n), floats_from(d, call.lse, c->B * c->H * c->T),
                    acts_from(d, call.d_qkv, 3 * n)};
}

static void check_case(const Device *d, const Case *c, const Result *result, int results) {
    const size_t C = c->H * c->D, half = d == &gpu16;
    for (int r = 0; r < results; r++) {
        double error = 0;
        for (size_t i = 0; i < c->B * c->T * C; i++) { /* i counts (B, H, T, D) */
            const size_t bh = i / (c->T * c->D), t = i / c->D % c->T, b = bh / c->H, h = bh % c->H;
            const size_t token = b * c->T + t, at = h * c->D + i % c->D;
            const float ours = r == OUT ? result->out[token * C + at]
                                        : result->d_qkv[token * 3 * C + (size_t)(r - DQ) * C + at];
            const double e = fabs((double)ours - c->reference[r][i]);
            if (!(e <= error)) error = e;
            if (isnan(e)) break;
        }
        CHECK_MSG(error <= c->allowed[half][r],
                  "%s, B %zu T %zu H %zu D %zu: %s is off by %.3g, allowed %.3g", d->ops->name, c->B, c->T,
                  c->H, c->D, result_names[r], error, c->allowed[half][r]);
    }
    for (size_t i = 0; result->lse && i < c->B * c->H * c->T; i++)
        near("lse", d, i, result->lse[i], c->lse[i], (half ? 1e-3 : 1e-5) + 4 * c->lse_last_place[i]);
}

static void check_shape(size_t B, size_t T, size_t H, size_t D, double times) {
    const Case c = case_new(B, T, H, D, times);
    FOR_DEVICES(d, other) {
        (void)other;
        const Result result = attention_on(d, &c, true), forward = attention_on(d, &c, false);
        check_case(d, &c, &result, RESULTS);
        check_case(d, &c, &forward, 1);
    }
    end_case("attention");
}

TEST(attention_of_every_length_to_260) {
    NEED_GPU();
    static const size_t head_sizes[] = {8, 32, 16, 64, 80, 24, 40};
    for (size_t T = 1; T <= 260; T++) check_shape(2, T, 2, head_sizes[T % 7], 1);
}

TEST(attention_of_other_shapes) {
    NEED_GPU();
    static const size_t shapes[][4] = {{1, 300, 2, 33}, {1, 511, 1, 64},  {1, 512, 1, 96},  {1, 513, 2, 128},
                                       {1, 777, 1, 64}, {1, 1023, 2, 32}, {1, 1025, 1, 64}, {1, 2047, 1, 16},
                                       {1, 4097, 1, 8}, {40, 65, 3, 16},  {1, 5, 1, 1}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        check_shape(shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3], 1);
    check_shape(1, 261, 2, 64, 30); /* scores in the thousands */
    check_shape(2, 100, 1, 16, 30);
}

/* Generation in steps of these sizes must give what forward gives. */
TEST(attention_with_the_cache) {
    NEED_GPU();
    static const size_t steps[][4] = {{1, 1, 1, 1}, {70, 1, 63, 2}, {300, 300, 300, 300}},
                        head_sizes[] = {24, 64, 160};
    for (size_t i = 0; i < 9; i++) {
        /* Inputs times 30 at one head size only, as in tests/test_attention.c: there a score's last bits decide
         * between keys, and the plain computation that the rule measures against sums in one order of many. */
        const Case c = case_new(2, 150, 2, head_sizes[i / 3], head_sizes[i / 3] == 64 && i % 2 ? 30 : 1);
        const size_t B = c.B, T = c.T, C = c.H * c.D, length = T + 3;
        FOR_DEVICES(d, other) {
            (void)other;
            act_t *cache = acts_on(d, NULL, B * length * 2 * C);
            Result all = {.out = (float *)host_new(B * T * C * sizeof(float))};
            for (size_t offset = 0, n, step = 0; offset < T; offset += n, step++) {
                n = steps[i % 3][step % 4] < T - offset ? steps[i % 3][step % 4] : T - offset;
                float *qkv = (float *)xmalloc(B * n * 3 * C * sizeof *qkv);
                for (size_t b = 0; b < B; b++)
                    memcpy(qkv + b * n * 3 * C, c.qkv + (b * T + offset) * 3 * C, n * 3 * C * sizeof *qkv);
                const size_t device_before = n_held, host_before = n_host;
                const AttentionCall call = {.B = B,
                                            .T = n,
                                            .H = c.H,
                                            .D = c.D,
                                            .scale = 1.0f / sqrtf((float)c.D),
                                            .stream = d->stream,
                                            .qkv = acts_on(d, qkv, B * n * 3 * C),
                                            .out = acts_on(d, NULL, B * n * C),
                                            .offset = offset,
                                            .kv_cache = cache,
                                            .cache_length = length};
                naive_of(d)->cached(&call);
                const float *out = acts_from(d, call.out, B * n * C);
                for (size_t b = 0; b < B; b++)
                    memcpy(all.out + (b * T + offset) * C, out + b * n * C, n * C * sizeof *out);
                free(qkv);
                while (n_host > host_before) free(host_held[--n_host]);
                while (n_held > device_before) d->ops->release(d->stream, held[--n_held].memory);
            }
            check_case(d, &c, &all, 1);
        }
        end_case("cached attention");
    }
}

/* More than 2^31 elements in the table: the last sequence must come out as it does alone. */
TEST(attention_of_a_large_table) {
    NEED_GPU();
    const size_t B = 521, T = 2048, D = 16, one = T * D;
    Error err = {0};
    void *probe = gpu16.ops->allocate(gpu16.stream, (size_t)6 << 30, &err);
    if (!probe) SKIP("not 6 GiB of GPU memory to be had");
    gpu16.ops->release(gpu16.stream, probe);
    float *qkv = (float *)host_new(3 * B * one * sizeof *qkv),
          *d_out = (float *)host_new(B * one * sizeof *d_out);
    const float *some = normals(3 * one, 0, 1), *last = normals(3 * one, 0, 1), *d_some = normals(one, 0, 1);
    for (size_t b = 0; b < B; b++) {
        memcpy(qkv + b * 3 * one, b + 1 < B ? some : last, 3 * one * sizeof *qkv);
        memcpy(d_out + b * one, d_some, one * sizeof *d_out);
    }
    const Case all = {.B = B, .T = T, .H = 1, .D = D, .qkv = qkv, .d_out = d_out};
    const Case alone = {.B = 1, .T = T, .H = 1, .D = D, .qkv = last, .d_out = d_some};
    const Result many = attention_on(&gpu16, &all, true), single = attention_on(&gpu16, &alone, true);
    CHECK(memcmp(many.out + (B - 1) * one, single.out, one * sizeof(float)) == 0);
    CHECK(memcmp(many.lse + (B - 1) * T, single.lse, T * sizeof(float)) == 0);
    CHECK(memcmp(many.d_qkv + 3 * (B - 1) * one, single.d_qkv, 3 * one * sizeof(float)) == 0);
    CHECK(memcmp(many.out, many.out + (B - 2) * one, one * sizeof(float)) ==
          0); /* all but the last are equal */
    end_case("large attention");
}

TEST(attention_sizes) {
    NEED_GPU();
    const Attention *naive = naive_of(&gpu16);
    AttentionShape shape = {.B = 64, .T = 1023, .H = 12, .D = 64, .training = true};
    CHECK(naive->saved_bytes(&shape) == (size_t)64 * 12 * 1023 * 1024 * 2);
    CHECK(naive->scratch_bytes(&shape) <= (size_t)80 << 20);
    shape.T = (size_t)1 << 31;
    CHECK(naive->saved_bytes(&shape) == SIZE_MAX && naive->scratch_bytes(&shape) == SIZE_MAX);
    shape.T = SIZE_MAX;
    CHECK(naive->saved_bytes(&shape) == SIZE_MAX && naive->scratch_bytes(&shape) == SIZE_MAX);
    shape.T = 64, shape.B = SIZE_MAX / 4;
    CHECK(naive->saved_bytes(&shape) == SIZE_MAX);
    Error err = {0};
    shape = (AttentionShape){.B = 1, .T = 64, .H = 1, .D = 64};
    CHECK(attention_find("flash", "cuda-fp32", &shape, &err) == NULL && strstr(err.text, "naive") != NULL);
}

/* ---- the CPU's operations with bf16's roundings: what "plain" is for the model in bf16 ---- */

static bool rounding; /* off: they are the CPU's */
static double *token_losses;
static size_t n_token_losses;

static void stored(act_t *x, size_t n) {
    if (rounding && x) round_all((float *)x, n);
}
/* A parameter as bf16 holds it, in memory of its own, to be freed. */
static float *worked(const act_t *parameter, size_t n) {
    if (!parameter) return NULL;
    float *copy = (float *)xmalloc(n * sizeof *copy);
    memcpy(copy, parameter, n * sizeof *copy);
    stored(copy, n);
    return copy;
}

static void plain_embedding_forward(Stream *stream, act_t *x, const int32_t *tokens, const act_t *wte,
                                    const act_t *wpe, size_t B, size_t T, size_t C, size_t first,
                                    Dropout dropout) {
    size_t vocabulary = 0;
    for (size_t r = 0; r < B * T; r++)
        if ((size_t)tokens[r] >= vocabulary) vocabulary = (size_t)tokens[r] + 1;
    float *token = worked(wte, vocabulary * C), *position = worked(wpe, (first + T) * C);
    ops_cpu.embedding_forward(stream, x, tokens, token, position, B, T, C, first, dropout);
    stored(x, B * T * C);
    free(token), free(position);
}
static void plain_norm_forward(Stream *stream, act_t *sum, act_t *normed, float *mean, float *rstd,
                               const act_t *residual, const act_t *branch, const act_t *gain,
                               const act_t *bias, size_t rows, size_t C, Dropout dropout) {
    float *g = worked(gain, C), *b = worked(bias, C);
    ops_cpu.residual_norm_forward(stream, sum, normed, mean, rstd, residual, branch, g, b, rows, C, dropout);
    if (branch) { /* the norm of what was stored */
        const Dropout off = {.rate = 0};
        stored(sum, rows * C);
        ops_cpu.residual_norm_forward(stream, sum, normed, mean, rstd, sum, NULL, g, b, rows, C, off);
    }
    stored(normed, rows * C);
    free(g), free(b);
}
static void plain_norm_backward(Stream *stream, act_t *d_sum, bool overwrite, act_t *d_branch, float *d_gain,
                                float *d_bias, const act_t *d_normed, const act_t *sum, const float *mean,
                                const float *rstd, const act_t *gain, size_t rows, size_t C,
                                Dropout dropout) {
    float *g = worked(gain, C);
    ops_cpu.residual_norm_backward(stream, d_sum, overwrite, d_branch, d_gain, d_bias, d_normed, sum, mean,
                                   rstd, g, rows, C, dropout);
    stored(d_sum, rows * C), stored(d_branch, rows * C);
    free(g);
}
static void plain_linear_forward(Stream *stream, act_t *y, act_t *gelu_y, const act_t *x, const act_t *w,
                                 const act_t *b, size_t rows, size_t in, size_t out) {
    float *weights = worked(w, in * out), *bias = worked(b, out);
    ops_cpu.linear_forward(stream, y, gelu_y, x, weights, bias, rows, in, out);
    if (y) stored(y, rows * out);
    stored(gelu_y, rows * out);
    free(weights), free(bias);
}
static void plain_linear_backward(Stream *stream, act_t *dx, float *dw, float *db, const act_t *dy,
                                  const act_t *x, const act_t *w, const act_t *pre, size_t rows, size_t in,
                                  size_t out) {
    float *weights = worked(w, in * out);
    ops_cpu.linear_backward(stream, dx, dw, db, dy, x, weights, pre, rows, in, out);
    stored(dx, rows * in);
    free(weights);
}
static void plain_rotary(Stream *stream, act_t *qkv, size_t B, size_t T, size_t H, size_t D, size_t first,
                         bool keys_only, bool inverse) {
    ops_cpu.rotary(stream, qkv, B, T, H, D, first, keys_only, inverse);
    stored(qkv, B * T * 3 * H * D);
}
/* Written out, since the logits and their gradients are rounded within. Notes each token's loss. */
static void plain_head_loss(Stream *stream, StepState *state, act_t *d_hidden, float *d_wte,
                            const act_t *hidden, const act_t *wte, const int32_t *targets, size_t rows,
                            size_t C, size_t V, float grad_scale, void *scratch) {
    (void)stream, (void)scratch;
    float *w = worked(wte, V * C), *logits = (float *)xmalloc(rows * V * sizeof *logits);
    sgemm(false, true, rows, V, C, 1, (const float *)hidden, C, w, C, 0, logits, V);
    stored(logits, rows * V);
    token_losses = (double *)realloc(token_losses, rows * sizeof *token_losses), n_token_losses = rows;
    for (size_t r = 0; r < rows; r++) {
        float *row = logits + r * V, max = row[0];
        double sum = 0;
        for (size_t v = 1; v < V; v++) max = row[v] > max ? row[v] : max;
        for (size_t v = 0; v < V; v++) sum += exp((double)(row[v] - max));
        token_losses[r] = log(sum) + (double)max - (double)row[targets[r]];
        state->loss_sum += token_losses[r];
        for (size_t v = 0; v < V; v++)
            row[v] = grad_scale * (float)(exp((double)(row[v] - max)) / sum - (v == (size_t)targets[r]));
    }
    stored(logits, rows * V);
    if (d_hidden) {
        sgemm(false, false, rows, C, V, 1, logits, V, w, C, 0, (float *)d_hidden, C);
        sgemm(true, false, V, C, rows, 1, logits, V, (const float *)hidden, C, 1, d_wte, C);
        stored(d_hidden, rows * C);
    }
    free(w), free(logits);
}
static void plain_head_logits(Stream *stream, float *logits, const act_t *hidden, size_t stride,
                              const act_t *wte, size_t rows, size_t C, size_t V) {
    float *w = worked(wte, V * C);
    ops_cpu.head_logits(stream, logits, hidden, stride, w, rows, C, V);
    free(w);
}
static void plain_attention_forward(const AttentionCall *call) {
    naive_of(&cpu)->forward(call);
    stored(call->out, call->B * call->T * call->H * call->D);
    if (call->training) stored(call->saved, call->B * call->H * call->T * call->T);
}
static void plain_attention_backward(const AttentionCall *call) {
    naive_of(&cpu)->backward(call);
    stored(call->d_qkv, call->B * call->T * 3 * call->H * call->D);
}

/* A model on the CPU like the one whose `ops` and `attention` these are, and how it rounds. */
static Ops plain_ops;
static Attention plain_attention;
static void make_plain(void) {
    plain_ops = ops_cpu;
    plain_ops.embedding_forward = plain_embedding_forward;
    plain_ops.residual_norm_forward = plain_norm_forward,
    plain_ops.residual_norm_backward = plain_norm_backward;
    plain_ops.linear_forward = plain_linear_forward, plain_ops.linear_backward = plain_linear_backward;
    plain_ops.rotary = plain_rotary;
    plain_ops.head_loss = plain_head_loss, plain_ops.head_logits = plain_head_logits;
    plain_attention = *naive_of(&cpu);
    plain_attention.forward = plain_attention_forward, plain_attention.backward = plain_attention_backward;
}

/* ---- the whole model ---- */
/* device NULL: the plain one. */
static Gpt *model_new(const Problem *problem, const Device *device, size_t B, bool training, size_t cache_B) {
    const RefShape *shape = &problem->shape;
    Error err = {0};
    const Attention *attention = device && device->attention ? device->attention : NULL;
    if (!attention) attention = device ? naive_of(device) : &plain_attention;
    const GptSetup setup = {.config = {.layers = shape->L,
                                       .heads = shape->H,
                                       .channels = shape->C,
                                       .ctx = shape->T,
                                       .vocab = shape->V,
                                       .position = shape->rotary ? POSITION_ROTARY : POSITION_LEARNED,
                                       .dropout = (float)shape->rate},
                            .ops = device ? device->ops : &plain_ops,
                            .attention = attention,
                            .stream = device ? device->stream : cpu.stream,
                            .B = B,
                            .training = training,
                            .deterministic = !(device && device->fast),
                            .seed = shape->seed,
                            .cache_B = cache_B};
    Gpt *gpt = gpt_new(&setup, &err);
    if (!gpt) printf("test_cuda: gpt_new: %s\n", err.text), exit(1);
    for (size_t k = 0; k < problem->table.count; k++)
        gpt_set(gpt, GPT_WEIGHTS, find_row(gpt, problem->table.tensor[k].name),
                problem->parameters32 + problem->table.tensor[k].offset);
    return gpt;
}

/* Gradients of the problem's mean loss, taken `micro` sequences at once; *loss the mean. To be freed. */
static float *gradients_new(const Problem *problem, const Device *device, size_t micro, double *loss) {
    const RefShape *shape = &problem->shape;
    const size_t rows = shape->B * shape->T;
    Gpt *gpt = model_new(problem, device, micro, true, 0);
    gpt_step_begin(gpt, STEP, 0);
    for (size_t b = 0; b < shape->B; b += micro)
        gpt_forward_backward(gpt, problem->tokens + b * shape->T, problem->targets + b * shape->T, micro, b,
                             rows);
    *loss = gpt_step_state(gpt).loss_sum / (double)rows;
    float *all = buffer_new(gpt, &problem->table, GPT_GRADIENTS);
    gpt_free(gpt);
    return all;
}

static double *doubles_of(const float *x, size_t n) {
    double *copy = reference64_numbers(n);
    for (size_t i = 0; i < n; i++) copy[i] = (double)x[i];
    return copy;
}

static void check_tensors(const Problem *problem, const double *ref, const float *plain, const float *ours,
                          double u, const char *what) {
    for (size_t k = 0; k < problem->table.count; k++) {
        const RefTensor *tensor = &problem->table.tensor[k];
        const size_t at = tensor->offset, n = tensor->size;
        const double bound = 2 * largest_error(ref + at, plain + at, n) + FLOOR * u * largest_of(ref + at, n);
        const double error = largest_error(ref + at, ours + at, n);
        CHECK_MSG(error <= bound, "%s, B %zu T %zu C %zu V %zu: gradient of %s is off by %.3g, allowed %.3g",
                  what, problem->shape.B, problem->shape.T, problem->shape.C, problem->shape.V, tensor->name,
                  error, bound);
    }
}

/* The GPU's loss and gradients in both precisions, in bf16 with naive attention and, where it takes the shape,
 * with both ways of flash. The mean loss is off by at most what the worst token's is. */
static void check_gradients(const Problem *problem, size_t micro) {
    const RefShape *shape = &problem->shape;
    const size_t rows = shape->B * shape->T, n = problem->table.total;
    double *ref64 = reference64_numbers(n), *losses64 = reference64_numbers(rows), loss32, unused;
    float *plain32 = reference32_numbers(n), *losses32 = reference32_numbers(rows);
    const double loss = reference64_gpt(shape, &problem->table, problem->parameters64, STEP, problem->tokens,
                                        problem->targets, losses64, NULL, ref64);
    reference32_gpt(shape, &problem->table, problem->parameters32, STEP, problem->tokens, problem->targets,
                    losses32, NULL, plain32);
    float *ours32 = gradients_new(problem, &gpu32, micro, &loss32);
    const double bound32 = 2 * largest_error(losses64, losses32, rows) +
                           FLOOR * U32 * largest_of(losses64, rows);
    CHECK_MSG(fabs(loss32 - loss) <= bound32, "fp32: loss %.9g, not %.9g (+-%.2g)", loss32, loss, bound32);
    check_tensors(problem, ref64, plain32, ours32, U32, "fp32");

    rounding = true;
    float *plain16 = gradients_new(problem, NULL, shape->B, &unused);
    rounding = false;
    double worst = 0;
    for (size_t r = 0; r < rows && r < n_token_losses; r++)
        worst = fmax(worst, fabs(token_losses[r] - losses64[r]));
    double *ref32 = doubles_of(ours32, n);
    const double bound16 = 2 * worst + FLOOR * U16 * largest_of(losses64, rows);
    static const char *const ways[] = {"bf16", "bf16, flash, deterministic", "bf16, flash"};
    const AttentionShape heads = {
        .B = micro, .T = shape->T, .H = shape->H, .D = shape->C / shape->H, .training = true};
    Error reason;
    const Attention *flash = attention_find("flash", gpu16.ops->name, &heads, &reason);
    for (int way = 0; way < (flash ? 3 : 1); way++) {
        Device device = gpu16;
        device.attention = way ? flash : NULL, device.fast = way == 2;
        double loss16;
        float *ours16 = gradients_new(problem, &device, micro, &loss16);
        CHECK_MSG(fabs(loss16 - loss32) <= bound16, "%s: loss %.9g, not %.9g (+-%.2g)", ways[way], loss16,
                  loss32, bound16);
        check_tensors(problem, ref32, plain16, ours16, U16, ways[way]);
        free(ours16);
    }
    free(ref64), free(losses64), free(plain32), free(losses32), free(ours32), free(plain16), free(ref32);
}

TEST(loss_and_gradients) {
    NEED_GPU();
    static const RefShape shapes[] = {
        {.B = 3, .T = 1, .C = 96, .H = 3, .V = 257, .L = 2, .rotary = true, .rate = (double)0.1f, .seed = 1},
        {.B = 2, .T = 5, .C = 96, .H = 4, .V = 257, .L = 2, .rotary = false, .rate = (double)0.1f, .seed = 2},
        {.B = 1, .T = 63, .C = 96, .H = 2, .V = 50257, .L = 1, .rotary = false, .rate = 0, .seed = 3},
        {.B = 3,
         .T = 37,
         .C = 384,
         .H = 6,
         .V = 257,
         .L = 1,
         .rotary = true,
         .rate = (double)0.3f,
         .seed = 4},
        {.B = 1, .T = 127, .C = 160, .H = 5, .V = 257, .L = 2, .rotary = true, .rate = 0, .seed = 5},
        {.B = 1,
         .T = 200,
         .C = 96,
         .H = 1,
         .V = 257,
         .L = 2,
         .rotary = false,
         .rate = (double)0.1f,
         .seed = 6},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        Problem problem = problem_new(shapes[i]);
        check_gradients(&problem, shapes[i].B);
        problem_free(&problem);
    }
}

TEST(splits_of_a_step) {
    NEED_GPU();
    Problem problem = problem_new((RefShape){.B = 8,
                                             .T = 13,
                                             .C = 96,
                                             .H = 3,
                                             .V = 257,
                                             .L = 2,
                                             .rotary = true,
                                             .rate = (double)0.2f,
                                             .seed = 11});
    check_gradients(&problem, 2);
    problem_free(&problem);
}

/* Twenty steps. Adam divides a gradient by its own size, so that one that is nothing but rounding moves its
 * weight by lr for every evaluation alike: the mean over a tensor of the differences, in which every element
 * has its share, is held to twice the plain evaluation's, not the largest. */
static void check_updates(const Problem *problem, const double *ref, const float *plain, const float *ours,
                          double u, const char *what) {
    for (size_t k = 0; k < problem->table.count; k++) {
        const size_t at = problem->table.tensor[k].offset, n = problem->table.tensor[k].size;
        double size = 0;
        for (size_t i = at; i < at + n; i++) size += fabs(ref[i]) / (double)n;
        const double bound = 2 * mean_error(ref + at, plain + at, n) + FLOOR * u * size;
        const double error = mean_error(ref + at, ours + at, n);
        CHECK_MSG(error <= bound, "%s: %s is off by %.3g in the mean after 20 steps, allowed %.3g", what,
                  problem->table.tensor[k].name, error, bound);
    }
}

TEST(twenty_updates) {
    NEED_GPU();
    enum { STEPS = 20 };
    const float lr = 1e-3f;
    const AdamW settings = {.beta1 = 0.9f, .beta2 = 0.95f, .epsilon = 1e-8f, .weight_decay = 0.1f, .clip = 1};
    for (int rotary = 0; rotary < 2; rotary++) {
        const RefShape all = {.B = 2 * STEPS,
                              .T = 13,
                              .C = 96,
                              .H = 3,
                              .V = 257,
                              .L = 1,
                              .rotary = rotary,
                              .rate = (double)0.1f,
                              .seed = 21};
        Problem problem = problem_new(all); /* the tokens of all steps */
        problem.shape.B = 2;
        const RefShape *shape = &problem.shape;
        const RefTable *table = &problem.table;
        const size_t n = table->total, rows = shape->B * shape->T;
        Gpt *gpt[3] = {model_new(&problem, &gpu32, 2, true, 0), model_new(&problem, &gpu16, 2, true, 0),
                       model_new(&problem, NULL, 2, true, 0)};
        double *g64 = reference64_numbers(n), *m64 = reference64_numbers(n), *v64 = reference64_numbers(n);
        float *g32 = reference32_numbers(n), *m32 = reference32_numbers(n), *v32 = reference32_numbers(n);
        double *losses64 = reference64_numbers(rows);
        float *losses32 = reference32_numbers(rows), *plain32 = reference32_numbers(n);
        memcpy(plain32, problem.parameters32, n * sizeof *plain32);
        rounding = true;
        for (uint64_t step = 0; step < STEPS; step++) {
            const int32_t *tokens = problem.tokens + step * rows, *targets = problem.targets + step * rows;
            reference64_gpt(shape, table, problem.parameters64, step, tokens, targets, losses64, NULL, g64);
            reference32_gpt(shape, table, plain32, step, tokens, targets, losses32, NULL, g32);
            reference64_adamw(table, problem.parameters64, m64, v64, g64, step + 1, (double)lr, (double)0.1f,
                              1);
            reference32_adamw(table, plain32, m32, v32, g32, step + 1, (double)lr, (double)0.1f, 1);
            for (int i = 0; i < 3; i++) {
                gpt_step_begin(gpt[i], step, lr);
                gpt_forward_backward(gpt[i], tokens, targets, 2, 0, rows);
                gpt_step_end(gpt[i], settings);
                CHECK(gpt_step_state(gpt[i]).updates == step + 1);
            }
        }
        rounding = false;
        float *weights[3];
        for (int i = 0; i < 3; i++) weights[i] = buffer_new(gpt[i], table, GPT_WEIGHTS), gpt_free(gpt[i]);
        double *ref32 = doubles_of(weights[0], n);
        check_updates(&problem, problem.parameters64, plain32, weights[0], U32, "fp32");
        check_updates(&problem, ref32, weights[2], weights[1], U16, "bf16");
        for (int i = 0; i < 3; i++) free(weights[i]);
        free(g64), free(m64), free(v64), free(g32), free(m32), free(v32), free(losses64), free(losses32);
        free(plain32), free(ref32);
        problem_free(&problem);
    }
}

/* Three steps at a size that fills many blocks; then all weights, to be freed. */
static float *three_steps(const Problem *problem, double losses[3]) {
    const size_t rows = problem->shape.B * problem->shape.T;
    Gpt *gpt = model_new(problem, &gpu16, problem->shape.B, true, 0);
    for (uint64_t step = 0; step < 3; step++) {
        gpt_step_begin(gpt, step, 1e-2f);
        gpt_forward_backward(gpt, problem->tokens, problem->targets, problem->shape.B, 0, rows);
        gpt_step_end(gpt, (AdamW){.beta1 = 0.9f, .beta2 = 0.95f, .epsilon = 1e-8f, .clip = 1});
        losses[step] = gpt_step_state(gpt).loss_sum;
    }
    float *weights = buffer_new(gpt, &problem->table, GPT_WEIGHTS);
    gpt_free(gpt);
    return weights;
}

TEST(two_runs_are_bit_equal) {
    NEED_GPU();
    for (int rotary = 0; rotary < 2; rotary++) {
        Problem problem = problem_new((RefShape){.B = 16,
                                                 .T = 256,
                                                 .C = 384,
                                                 .H = 6,
                                                 .V = 1000,
                                                 .L = 2,
                                                 .rotary = rotary,
                                                 .rate = (double)0.1f,
                                                 .seed = 5});
        const size_t bytes = problem.table.total * sizeof(float);
        double losses[2][3];
        float *first = three_steps(&problem, losses[0]), *second = three_steps(&problem, losses[1]);
        CHECK(memcmp(losses[0], losses[1], sizeof losses[0]) == 0 && isfinite(losses[0][2]));
        CHECK(memcmp(first, second, bytes) == 0 && memcmp(first, problem.parameters32, bytes) != 0);
        free(first), free(second);
        problem_free(&problem);
    }
}

/* The GPU's recordings, counted. */
static size_t recordings_made, replays;
static void *counting_record_end(Stream *stream) {
    void *recording = gpu16.ops->record_end(stream);
    recordings_made += recording != NULL;
    return recording;
}
static void counting_replay(Stream *stream, void *recording) {
    replays++;
    gpu16.ops->replay(stream, recording);
}

/* Seven steps of two micro-batches with an evaluation after each, as queued or as recorded; midway another model,
 * whose operations outgrow the scratch memory that the recordings have seen. Then all weights, to be freed. */
static float *recorded_steps(const Problem *problem, const Problem *larger, bool record, double losses[14]) {
    const size_t B = problem->shape.B, T = problem->shape.T, V = problem->shape.V;
    Ops counting = *gpu16.ops;
    counting.record_end = counting_record_end, counting.replay = counting_replay;
    Device device = gpu16;
    device.ops = &counting;
    recordings_made = replays = 0;
    Gpt *gpt = model_new(problem, &device, B, true, 0);
    gpt_record(gpt, record);
    for (uint64_t step = 0; step < 7; step++) {
        if (step == 4) free(gradients_new(larger, &gpu16, larger->shape.B, &(double){0}));
        int32_t *tokens = (int32_t *)reference_allocate(B * T, sizeof *tokens); /* others in each step */
        for (size_t i = 0; i < B * T; i++) tokens[i] = (int32_t)((problem->tokens[i] + 31 * step) % V);
        gpt_step_begin(gpt, step, 1e-2f);
        for (size_t half = 0; half < 2; half++)
            gpt_forward_backward(gpt, tokens + half * B / 2 * T, problem->targets + half * B / 2 * T, B / 2,
                                 half * B / 2, B * T);
        gpt_step_end(gpt, (AdamW){.beta1 = 0.9f, .beta2 = 0.95f, .epsilon = 1e-8f, .clip = 1});
        losses[2 * step] = gpt_step_state(gpt).loss_sum;
        gpt_evaluate_begin(gpt);
        gpt_evaluate(gpt, tokens, problem->targets, B);
        losses[2 * step + 1] = gpt_evaluate_sum(gpt);
        free(tokens);
    }
    float *weights = buffer_new(gpt, &problem->table, GPT_WEIGHTS);
    gpt_free(gpt);
    return weights;
}

/* Three passes come seven times each, a step's two micro-batches and its evaluation: each is queued the first
 * time, recorded the second and replayed from then on, that one included. */
TEST(recorded_passes_are_bit_equal) {
    NEED_GPU();
    const char *wait = getenv("TRAIN_GPT_SYNC");
    if (wait && strcmp(wait, "1") == 0) SKIP("with TRAIN_GPT_SYNC=1 nothing is recorded");
    Problem problem = problem_new((RefShape){
        .B = 4, .T = 64, .C = 96, .H = 3, .V = 257, .L = 2, .rotary = true, .rate = (double)0.1f, .seed = 6});
    /* The gradients of norms alone take (blocks, 2 C) floats, more than the 16 MB that a stream begins with. */
    Problem larger = problem_new((RefShape){
        .B = 8, .T = 512, .C = 1056, .H = 3, .V = 257, .L = 1, .rotary = true, .rate = 0, .seed = 6});
    double losses[2][14];
    float *queued = recorded_steps(&problem, &larger, false, losses[0]);
    CHECK_MSG(recordings_made == 0 && replays == 0, "unasked, %zu recordings and %zu replays",
              recordings_made, replays);
    float *recorded = recorded_steps(&problem, &larger, true, losses[1]);
    CHECK_MSG(recordings_made == 3 && replays == 3 * 6, "%zu recordings and %zu replays, not 3 and 18",
              recordings_made, replays);
    CHECK(memcmp(losses[0], losses[1], sizeof losses[0]) == 0 && isfinite(losses[0][13]));
    CHECK(memcmp(queued, recorded, problem.table.total * sizeof(float)) == 0);
    free(queued), free(recorded);
    problem_free(&larger), problem_free(&problem);
}

/* A weight that is no number spoils the step; nothing moves, and the next good step goes on. */
TEST(steps_that_are_not_finite_are_skipped) {
    NEED_GPU();
    Problem problem = problem_new(
        (RefShape){.B = 2, .T = 7, .C = 96, .H = 3, .V = 257, .L = 2, .rotary = true, .rate = 0});
    const AdamW settings = {.beta1 = 0.9f, .beta2 = 0.95f, .epsilon = 1e-8f, .weight_decay = 0.1f, .clip = 1};
    Gpt *gpt = model_new(&problem, &gpu16, 2, true, 0);
    size_t count = 0;
    const Parameter *table = gpt_table(gpt, &count);
    const size_t sick = find_row(gpt, "h.1.mlp.c_fc.weight");
    float *good = reference32_numbers(table[sick].size), *bad = reference32_numbers(table[sick].size);
    gpt_get(gpt, GPT_WEIGHTS, sick, good);
    memcpy(bad, good, table[sick].size * sizeof *bad);
    bad[5] = NAN;
    for (uint64_t step = 0; step < 3; step++) {
        gpt_set(gpt, GPT_WEIGHTS, sick, step == 1 ? bad : good);
        float *before = buffer_new(gpt, &problem.table, GPT_WEIGHTS);
        gpt_step_begin(gpt, step, 1e-3f);
        gpt_forward_backward(gpt, problem.tokens, problem.targets, 2, 0, 14);
        gpt_step_end(gpt, settings);
        const StepState state = gpt_step_state(gpt);
        float *after = buffer_new(gpt, &problem.table, GPT_WEIGHTS);
        CHECK(state.skip == (step == 1) && (state.bad_tensor >= 0) == (step == 1) &&
              state.updates == (step + 2) / 2);
        CHECK((memcmp(before, after, problem.table.total * sizeof(float)) == 0) == (step == 1));
        free(before), free(after);
    }
    free(good), free(bad);
    gpt_free(gpt);
    problem_free(&problem);
}

/* Logits of the full forward pass in bf16 against fp32, then with the cache against the same: by the model's
 * rule. Evaluation sums the same losses whatever the batch, but for the rounding of other matrix shapes. */
TEST(logits_cache_and_evaluation) {
    NEED_GPU();
    for (int rotary = 0; rotary < 2; rotary++) {
        Problem problem = problem_new((RefShape){
            .B = 2, .T = 90, .C = 96, .H = 3, .V = 257, .L = 2, .rotary = rotary, .rate = 0.5, .seed = 2});
        const size_t B = problem.shape.B, T = problem.shape.T, V = problem.shape.V, n = B * T * V;
        float *exact = reference32_numbers(n), *plain = reference32_numbers(n),
              *full = reference32_numbers(n);
        int32_t *part = (int32_t *)reference_allocate(B * T, sizeof *part);
        Gpt *gpt = model_new(&problem, &gpu32, B, false, 0);
        gpt_logits(gpt, problem.tokens, B, exact);
        gpt_free(gpt);
        rounding = true;
        gpt = model_new(&problem, NULL, B, false, 0);
        gpt_logits(gpt, problem.tokens, B, plain);
        gpt_free(gpt);
        rounding = false;
        double *ref = doubles_of(exact, n);
        const double bound = 2 * largest_error(ref, plain, n) + FLOOR * U16 * largest_of(ref, n);

        gpt = model_new(&problem, &gpu16, B, false, 3);
        gpt_logits(gpt, problem.tokens, B, full);
        double error = largest_error(ref, full, n);
        CHECK_MSG(error <= bound, "logits are off by %.3g, allowed %.3g", error, bound);
        static const size_t chunks[] = {1, 17, 70};
        for (size_t i = 0; i < sizeof chunks / sizeof chunks[0]; i++) {
            gpt_cache_reset(gpt);
            for (size_t done = 0, m; done < T; done += m) {
                m = T - done >= chunks[i] ? chunks[i] : 1;
                for (size_t b = 0; b < B; b++)
                    memcpy(part + b * m, problem.tokens + b * T + done, m * sizeof *part);
                const float *last = gpt_cache_extend(gpt, part, B, m);
                for (size_t b = 0; b < B; b++) {
                    error = largest_error(ref + (b * T + done + m - 1) * V, last + b * V, V);
                    CHECK_MSG(error <= bound, "chunks of %zu, token %zu: off by %.3g, allowed %.3g",
                              chunks[i], done + m - 1, error, bound);
                }
            }
        }
        double sums[2];
        for (size_t size = 1; size <= 2; size++) {
            gpt_evaluate_begin(gpt);
            for (size_t b = 0; b < B; b += size)
                gpt_evaluate(gpt, problem.tokens + b * T, problem.targets + b * T, size);
            sums[size - 1] = gpt_evaluate_sum(gpt);
        }
        CHECK_MSG(fabs(sums[0] - sums[1]) <= 2 * bound * (double)(B * T),
                  "evaluated one by one %.9g, together %.9g", sums[0], sums[1]);
        gpt_free(gpt);
        free(exact), free(plain), free(full), free(part), free(ref);
        problem_free(&problem);
    }
}

static bool open_device(Device *device, const Ops *ops, double u, Error *err) {
    device->ops = ops, device->u = u;
    device->stream = ops ? ops->open(0, 0, err) : NULL;
    if (!device->stream) return false;
    device->state = (StepState *)ops->allocate(device->stream, sizeof *device->state, err);
    if (!device->state) return false;
    ops->begin_step(device->stream, device->state, STEP, 0);
    return true;
}
static void close_device(Device *device) {
    if (!device->stream) return;
    device->ops->release(device->stream, device->state);
    device->ops->close(device->stream);
}

int main(int argc, char **argv) {
    test_start(argc, argv, "cuda");
    Error err = {0};
    const bool opened = open_device(&cpu, &ops_cpu, U32, &err);
    if (!opened || (open_device(&gpu32, GPU_FP32, U32, &err) && !open_device(&gpu16, GPU_BF16, U16, &err))) {
        printf("test_cuda: %s\n", err.text);
        return 1;
    }
    if (err.text[0]) memcpy(no_gpu, err.text, sizeof no_gpu);
    make_plain();
    RUN(memory_and_state);
    RUN(embedding);
    RUN(residual_norm_forward);
    RUN(residual_norm_backward);
    RUN(linear);
    RUN(rotary);
    RUN(head_loss);
    RUN(head_in_chunks);
    RUN(head_logits);
    RUN(gradient_norm);
    RUN(adamw);
    RUN(attention_of_every_length_to_260);
    RUN(attention_of_other_shapes);
    RUN(attention_with_the_cache);
    RUN(attention_of_a_large_table);
    RUN(attention_sizes);
    RUN(loss_and_gradients);
    RUN(splits_of_a_step);
    RUN(twenty_updates);
    RUN(two_runs_are_bit_equal);
    RUN(recorded_passes_are_bit_equal);
    RUN(steps_that_are_not_finite_are_skipped);
    RUN(logits_cache_and_evaluation);
    free(token_losses);
    close_device(&gpu16), close_device(&gpu32), close_device(&cpu);
    return test_finish();
}
