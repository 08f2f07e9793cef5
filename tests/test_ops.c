/* test_ops.c - each operation of ops_cpu alone, at every SIMD level of the machine, against plain loops in
 * double. Sizes are odd, outputs hold NaN beforehand, sums that are added to hold numbers beforehand, and
 * guard words stand around every buffer.
 *
 * Bounds. u is fp32's unit roundoff. A sum of n rounded terms, in any order, is off by a random walk of n
 * steps of at most u times the sum of the terms' magnitudes: lambda sqrt(n) u sum|terms| holds for each sum
 * but for a chance of 2 exp(-lambda^2 / 2) (Higham and Mary 2019). sum_rounding takes lambda = 4, a chance
 * of one in 1,500 if every rounding were as bad as can be, which they are not (a typical one is u/3), and
 * eight roundings for what happens to a term before and to the sum after. Where an operation is a chain, the
 * second link's reference is computed from the first one's fp32 result, so that each link has a bound of its
 * own. */
#include "test.h"

#include "../model/ops.h"
#include "../simd.h"
#include "reference_random.h"

static const Ops *const ops = &ops_cpu;
static Stream *stream;
static StepState *state; /* on the device */
static const double u = UNIT_ROUNDOFF;
static const uint64_t STEP = UINT64_C(0x700000009), SEED = 31;

static double sum_rounding(size_t n) {
    return (4 * sqrt((double)n) + 8) * u;
}

/* ---- guarded buffers of one test ---- */
enum { GUARD = 16, GUARD_WORD = 0x5ca1ab1e, MAX_BUFFERS = 64 };
static struct {
    uint32_t *memory; /* GUARD words, n floats, GUARD words */
    size_t n;
} buffer[MAX_BUFFERS];
static size_t n_buffers;

/* n floats, all NaN. */
static float *nans(size_t n) {
    uint32_t *memory = (uint32_t *)malloc((n + 2 * GUARD) * sizeof *memory);
    if (!memory || n_buffers == MAX_BUFFERS) {
        printf("test_ops: no room for %zu floats\n", n);
        exit(1);
    }
    buffer[n_buffers].memory = memory, buffer[n_buffers++].n = n;
    for (size_t i = 0; i < GUARD; i++) memory[i] = memory[GUARD + n + i] = GUARD_WORD;
    float *x = (float *)(memory + GUARD);
    for (size_t i = 0; i < n; i++) x[i] = NAN;
    return x;
}

/* n normal numbers; each call has numbers of its own. */
static float *normals(size_t n, double mean, double spread) {
    static uint64_t calls;
    float *x = nans(n);
    calls++;
    for (size_t i = 0; i < n; i++) x[i] = (float)(mean + spread * reference_normal(calls, i));
    return x;
}

static float *copy_of(const float *x, size_t n) {
    float *copy = nans(n);
    memcpy(copy, x, n * sizeof *x);
    return copy;
}

/* Ends a case: the guards must stand. */
static void end_case(const char *what) {
    for (size_t b = 0; b < n_buffers; b++) {
        const uint32_t *memory = buffer[b].memory;
        bool whole = true;
        for (size_t i = 0; i < GUARD; i++)
            whole = whole && memory[i] == GUARD_WORD && memory[GUARD + buffer[b].n + i] == GUARD_WORD;
        CHECK_MSG(whole, "%s, %s: written outside buffer %zu", what, simd_name(simd_level()), b);
        free(buffer[b].memory);
    }
    n_buffers = 0;
}

static void check_near(const char *what, size_t i, float ours, double ref, double bound) {
    CHECK_MSG(isfinite(ours) && fabs((double)ours - ref) <= bound, "%s[%zu], %s: %.9g, not %.9g (+-%.2g)",
              what, i, simd_name(simd_level()), (double)ours, ref, bound);
}

/* ---- dropout ---- */
static Dropout dropout(float rate, uint32_t site, uint64_t first_row) {
    return (Dropout){.rate = rate, .seed = SEED, .site = site, .first_row = first_row, .state = state};
}

/* What dropout multiplies element (row, c) by. */
static double mask_at(const Dropout *drop, size_t row, size_t C, size_t c) {
    const double rate = (double)drop->rate;
    return reference_keeps(rate, drop->seed, drop->site, STEP, drop->first_row + row, C, c) ? 1 / (1 - rate)
                                                                                            : 0;
}

/* ---- the device ---- */
TEST(memory_and_state) {
    Error err = {0};
    char text[128] = "";
    ops->describe(stream, text, sizeof text);
    CHECK(strlen(text) > 0);
    enum { N = 1000003 };
    uint8_t *device = (uint8_t *)ops->allocate(stream, N, &err);
    uint8_t *host = (uint8_t *)malloc(N), *back = (uint8_t *)ops->host_allocate(stream, N, &err);
    CHECK_MSG(device != NULL && back != NULL, "%s", err.text);
    if (device && host && back) {
        size_t wrong = 0;
        for (size_t i = 0; i < N; i++) wrong += back[i] != 0;
        memset(back, 1, N);
        ops->download(stream, back, device, N);
        for (size_t i = 0; i < N; i++) wrong += back[i] != 0;
        for (size_t i = 0; i < N; i++) host[i] = (uint8_t)(i * 7 + 1);
        ops->upload(stream, device, host, N);
        ops->zero(stream, device + 1, N - 2);
        ops->download(stream, back, device, N);
        for (size_t i = 1; i + 1 < N; i++) wrong += back[i] != 0;
        CHECK_MSG(wrong == 0, "%zu bytes are not zero", wrong);
        CHECK(back[0] == host[0] && back[N - 1] == host[N - 1]);
        ops->release(stream, device);
        ops->host_release(stream, back);
    }
    free(host);

    StepState seen = {.updates = 5, .loss_sum = 3, .grad_norm = 2, .skip = 1, .bad_tensor = 4};
    ops->upload(stream, state, &seen, sizeof seen);
    ops->begin_step(stream, state, STEP, 0.25f);
    ops->read_state(stream, &seen, state);
    CHECK(seen.step == STEP && seen.lr == 0.25f && seen.loss_sum == 0 && seen.updates == 5);
}

/* ---- embedding ---- */
TEST(embedding) {
    static const size_t sizes[][3] = {{1, 1, 1}, {2, 3, 5}, {3, 7, 33}, {2, 5, 96}, {1, 9, 1103}};
    enum { V = 11, FIRST = 4 };
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        const size_t B = sizes[s][0], T = sizes[s][1], C = sizes[s][2], rows = B * T;
        for (int variant = 0; variant < 4; variant++) {
            const bool learned = variant & 1;
            const Dropout drop = dropout(variant & 2 ? 0.3f : 0.0f, 0, 1000);
            const float *wte = normals(V * C, 0, 1), *wpe = learned ? normals((FIRST + T) * C, 0, 1) : NULL;
            const float *dx = normals(rows * C, 0, 1);
            float *x = nans(rows * C), *d_wte = normals(V * C, 0, 1),
                  *d_wpe = learned ? normals(T * C, 0, 1) : NULL;
            const float *old_wte = copy_of(d_wte, V * C), *old_wpe = learned ? copy_of(d_wpe, T * C) : NULL;
            int32_t tokens[64];
            /* The ids 0 .. 4 and the last one: of any more than six tokens some repeat, and some rows get
             * none. */
            for (size_t r = 0; r < rows; r++) tokens[r] = r == 0 ? V - 1 : (int32_t)(r * r % 5);

            ops->embedding_forward(stream, x, tokens, wte, wpe, B, T, C, FIRST, drop);
            for (size_t r = 0; r < rows; r++) {
                for (size_t c = 0; c < C; c++) {
                    const double a = (double)wte[(size_t)tokens[r] * C + c];
                    const double p = wpe ? (double)wpe[(FIRST + r % T) * C + c] : 0;
                    const double mask = mask_at(&drop, r, C, c);
                    check_near("embedding", r * C + c, x[r * C + c], (a + p) * mask,
                               4 * u * fabs(a + p) * mask);
                }
            }

            ops->embedding_backward(stream, d_wte, d_wpe, dx, tokens, B, T, C, drop);
            for (size_t v = 0; v < V; v++) {
                for (size_t c = 0; c < C; c++) {
                    double sum = (double)old_wte[v * C + c], size = fabs(sum);
                    size_t terms = 0;
                    for (size_t r = 0; r < rows; r++) {
                        if ((size_t)tokens[r] != v) continue;
                        const double term = (double)dx[r * C + c] * mask_at(&drop, r, C, c);
                        sum += term, size += fabs(term), terms++;
                    }
                    check_near("d_wte", v * C + c, d_wte[v * C + c], sum,
                               terms ? sum_rounding(terms) * size : 0);
                }
            }
            for (size_t i = 0; learned && i < T * C; i++) {
                double sum = (double)old_wpe[i], size = fabs(sum);
                for (size_t b = 0; b < B; b++) {
                    const double term = (double)dx[b * T * C + i] * mask_at(&drop, b * T + i / C, C, i % C);
                    sum += term, size += fabs(term);
                }
                check_near("d_wpe", i, d_wpe[i], sum, sum_rounding(B) * size);
            }
            end_case("embedding");
        }
    }
}

/* ---- residual add and norm ---- */
static const size_t norm_sizes[][2] = {{1, 1},  {3, 4},    {5, 7},   {2, 33},
                                       {7, 97}, {150, 31}, {3, 384}, {2, 1031}};
enum { NORM_SIZES = sizeof norm_sizes / sizeof norm_sizes[0] };

typedef struct Moments {
    double mean, rstd, size; /* size: mean |x| */
} Moments;
static Moments moments_of(const float *x, size_t C) {
    Moments m = {0, 0, 0};
    double squares = 0;
    for (size_t c = 0; c < C; c++)
        m.mean += (double)x[c] / (double)C, m.size += fabs((double)x[c]) / (double)C;
    for (size_t c = 0; c < C; c++) squares += ((double)x[c] - m.mean) * ((double)x[c] - m.mean);
    m.rstd = 1 / sqrt(squares / (double)C + 1e-5);
    return m;
}

/* mean is off by e = sum_rounding(C) mean|x|; the variance about it by e^2 and a sum's rounding; and n = (x -
 * mean) rstd by both. Rows of mean 1,000 and spread 1 tell this from mean(x^2) - mean(x)^2, which is off by
 * 1e6 u = 6 %. */
static void check_norm(const float *normed, const float *mean, const float *rstd, const float *sum,
                       const float *gain, const float *bias, size_t rows, size_t C) {
    for (size_t r = 0; r < rows; r++) {
        const Moments m = moments_of(sum + r * C, C);
        const double e = sum_rounding(C) * m.size, relative = e * e * m.rstd * m.rstd + sum_rounding(C);
        if (mean) {
            check_near("mean", r, mean[r], m.mean, e);
            check_near("rstd", r, rstd[r], m.rstd, relative * m.rstd);
        }
        for (size_t c = 0; c < C; c++) {
            const double x = (double)sum[r * C + c], n = (x - m.mean) * m.rstd, g = (double)gain[c];
            const double n_bound = m.rstd * (e + u * fabs(x - m.mean)) + fabs(n) * relative;
            check_near("normed", r * C + c, normed[r * C + c], n * g + (double)bias[c],
                       fabs(g) * n_bound + 4 * u * (fabs(n * g) + fabs((double)bias[c])));
        }
    }
}

TEST(residual_norm_forward) {
    for (size_t s = 0; s < NORM_SIZES; s++) {
        const size_t rows = norm_sizes[s][0], C = norm_sizes[s][1];
        const float *gain = normals(C, 1, 0.5), *bias = normals(C, 0, 0.5), *branch = normals(rows * C, 0, 1);
        /* branch, dropout, in place, statistics wanted, mean of the residual */
        static const struct {
            bool branch, drop, in_place, statistics;
            double mean;
        } cases[] = {{true, false, false, true, 0},   {true, true, false, true, 0},
                     {true, true, true, false, 0},    {true, false, true, true, 0},
                     {false, false, false, true, 0},  {false, true, true, false, 0},
                     {true, false, false, true, 1000}};
        for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
            const Dropout drop = dropout(cases[i].drop ? 0.2f : 0.0f, 3, 77);
            float *residual = normals(rows * C, cases[i].mean, 1);
            const float *old = copy_of(residual, rows * C);
            float *sum = cases[i].in_place ? residual : nans(rows * C), *normed = nans(rows * C);
            float *mean = cases[i].statistics ? nans(rows) : NULL,
                  *rstd = cases[i].statistics ? nans(rows) : NULL;
            ops->residual_norm_forward(stream, sum, normed, mean, rstd, residual,
                                       cases[i].branch ? branch : NULL, gain, bias, rows, C, drop);
            for (size_t k = 0; k < rows * C; k++) {
                if (!cases[i].branch) {
                    CHECK(cases[i].in_place ? sum[k] == old[k] : isnan(sum[k]));
                    continue;
                }
                const double added = (double)branch[k] * mask_at(&drop, k / C, C, k % C), a = (double)old[k];
                check_near("sum", k, sum[k], a + added, u * (2.5 * fabs(added) + fabs(a + added)));
            }
            if (!cases[i].in_place) CHECK(memcmp(residual, old, rows * C * sizeof *old) == 0);
            check_norm(normed, mean, rstd, cases[i].branch ? sum : old, gain, bias, rows, C);
        }
        end_case("residual_norm_forward");
    }
}

TEST(residual_norm_backward) {
    for (size_t s = 0; s < NORM_SIZES; s++) {
        const size_t rows = norm_sizes[s][0], C = norm_sizes[s][1];
        for (int variant = 0; variant < 8; variant++) {
            const bool overwrite = variant & 1, wants_branch = variant & 2;
            const Dropout drop = dropout(variant & 4 ? 0.2f : 0.0f, 2, 5);
            const float *gain = normals(C, 1, 0.5), *sum = normals(rows * C, 2, 1),
                        *dy = normals(rows * C, 0, 1);
            float *d_sum = overwrite ? nans(rows * C) : normals(rows * C, 0, 1);
            float *d_branch = wants_branch ? nans(rows * C) : NULL;
            float *d_gain = normals(C, 0, 1), *d_bias = normals(C, 0, 1), *mean = nans(rows),
                  *rstd = nans(rows);
            const float *old = copy_of(d_sum, rows * C), *old_gain = copy_of(d_gain, C),
                        *old_bias = copy_of(d_bias, C);
            for (size_t r = 0; r < rows; r++) {
                const Moments m = moments_of(sum + r * C, C);
                mean[r] = (float)m.mean, rstd[r] = (float)m.rstd;
            }
            ops->residual_norm_backward(stream, d_sum, overwrite, d_branch, d_gain, d_bias, dy, sum, mean,
                                        rstd, gain, rows, C, drop);
            for (size_t r = 0; r < rows; r++) {
                double g_mean = 0, gn_mean = 0, g_size = 0, gn_size = 0;
                for (size_t c = 0; c < C; c++) {
                    const double n = ((double)sum[r * C + c] - (double)mean[r]) * (double)rstd[r];
                    const double g = (double)dy[r * C + c] * (double)gain[c];
                    g_mean += g / (double)C, g_size += fabs(g) / (double)C;
                    gn_mean += g * n / (double)C, gn_size += fabs(g * n) / (double)C;
                }
                for (size_t c = 0; c < C; c++) {
                    const size_t k = r * C + c;
                    const double n = ((double)sum[k] - (double)mean[r]) * (double)rstd[r];
                    const double g = (double)dy[k] * (double)gain[c], past = overwrite ? 0 : (double)old[k];
                    const double dx = past + (double)rstd[r] * (g - g_mean - n * gn_mean);
                    const double bound = (double)rstd[r] * (8 * u * fabs(g) + sum_rounding(C) * g_size +
                                                            sum_rounding(C) * fabs(n) * gn_size) +
                                         2 * u * (fabs(past) + fabs(dx));
                    check_near("d_sum", k, d_sum[k], dx, bound);
                    if (!d_branch) continue;
                    const double masked = (double)d_sum[k] * mask_at(&drop, r, C, c);
                    check_near("d_branch", k, d_branch[k], masked, 3 * u * fabs(masked));
                }
            }
            for (size_t c = 0; c < C; c++) {
                double gains = (double)old_gain[c], biases = (double)old_bias[c];
                double gain_size = fabs(gains), bias_size = fabs(biases);
                for (size_t r = 0; r < rows; r++) {
                    const double d = (double)dy[r * C + c];
                    const double term = d * ((double)sum[r * C + c] - (double)mean[r]) * (double)rstd[r];
                    gains += term, gain_size += fabs(term), biases += d, bias_size += fabs(d);
                }
                check_near("d_gain", c, d_gain[c], gains, sum_rounding(rows) * gain_size);
                check_near("d_bias", c, d_bias[c], biases, sum_rounding(rows) * bias_size);
            }
            end_case("residual_norm_backward");
        }
    }
}

/* ---- linear ---- */
static const double gelu_k = 0.7978845608028654;
static double gelu(double x) {
    return x / 2 * (1 + tanh(gelu_k * (x + 0.044715 * x * x * x)));
}
static double gelu_slope(double x) {
    const double t = tanh(gelu_k * (x + 0.044715 * x * x * x));
    return (1 + t) / 2 + x / 2 * (1 - t * t) * gelu_k * (1 + 3 * 0.044715 * x * x);
}

TEST(linear) {
    static const size_t sizes[][3] = {{1, 1, 1}, {3, 5, 7}, {37, 33, 65}, {129, 96, 100}, {300, 20, 17}};
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        const size_t rows = sizes[s][0], in = sizes[s][1], out = sizes[s][2];
        for (int activated = 0; activated < 2; activated++) {
            const float *x = normals(rows * in, 0, 1), *w = normals(in * out, 0, 1 / sqrt((double)in));
            const float *dy = normals(rows * out, 0, 1);
            float *pre = normals(rows * in, 0, 2), *b = normals(out, 0, 1);
            float *y = nans(rows * out), *gelu_y = activated ? nans(rows * out) : NULL;
            /* Far out in both tails, where tanh is flat and a polynomial in its place would not be. */
            for (size_t o = 0; o < out; o += 3) b[o] = (float)(o % 2 ? 25 : -25) / (float)(1 + o % 5);
            for (size_t i = 0; i < rows * in; i += 5) pre[i] *= 8;
            ops->linear_forward(stream, y, gelu_y, x, w, b, rows, in, out);
            for (size_t k = 0; k < rows * out; k++) {
                double sum = (double)b[k % out], size = fabs(sum);
                for (size_t i = 0; i < in; i++) {
                    const double term = (double)x[k / out * in + i] * (double)w[i * out + k % out];
                    sum += term, size += fabs(term);
                }
                check_near("y", k, y[k], sum, sum_rounding(in) * size);
                /* tanh and its argument are off by a few u each, times x/2. */
                if (gelu_y) check_near("gelu", k, gelu_y[k], gelu((double)y[k]), 8 * u * fabs((double)y[k]));
            }

            if (gelu_y) { /* y is not wanted */
                float *alone = nans(rows * out);
                ops->linear_forward(stream, NULL, alone, x, w, b, rows, in, out);
                CHECK(memcmp(alone, gelu_y, rows * out * sizeof *alone) == 0);
            }

            float *dx = nans(rows * in), *dw = normals(in * out, 0, 1), *db = normals(out, 0, 1);
            const float *old_w = copy_of(dw, in * out), *old_b = copy_of(db, out);
            ops->linear_backward(stream, dx, dw, db, dy, x, w, activated ? pre : NULL, rows, in, out);
            for (size_t k = 0; k < rows * in; k++) {
                double sum = 0, size = 0, slope = 1, slope_bound = 0;
                for (size_t o = 0; o < out; o++) {
                    const double term = (double)dy[k / in * out + o] * (double)w[k % in * out + o];
                    sum += term, size += fabs(term);
                }
                if (activated) { /* 1 - tanh^2 is off by a few u, times x/2 and the argument's slope */
                    const double p = (double)pre[k];
                    slope = gelu_slope(p);
                    slope_bound = 8 * u * (1 + fabs(p) / 2 * gelu_k * (1 + 3 * 0.044715 * p * p));
                }
                check_near("dx", k, dx[k], sum * slope,
                           sum_rounding(out) * size * fabs(slope) + size * slope_bound);
            }
            for (size_t k = 0; k < in * out; k++) {
                double sum = (double)old_w[k], size = fabs(sum);
                for (size_t r = 0; r < rows; r++) {
                    const double term = (double)x[r * in + k / out] * (double)dy[r * out + k % out];
                    sum += term, size += fabs(term);
                }
                check_near("dw", k, dw[k], sum, sum_rounding(rows) * size);
            }
            for (size_t o = 0; o < out; o++) {
                double sum = (double)old_b[o], size = fabs(sum);
                for (size_t r = 0; r < rows; r++) {
                    sum += (double)dy[r * out + o];
                    size += fabs((double)dy[r * out + o]);
                }
                check_near("db", o, db[o], sum, sum_rounding(rows) * size);
            }
            end_case("linear");
        }
    }
}

/* ---- rotary positions ---- */
TEST(rotary) {
    /* B, T, H, D, first position; the last ones ask for fewer and then more angles than before */
    static const size_t sizes[][5] = {
        {1, 1, 1, 2, 0}, {2, 5, 3, 6, 0}, {1, 9, 2, 34, 3000}, {1, 3, 1, 34, 7}, {2, 3, 1, 64, 5000}};
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        const size_t B = sizes[s][0], T = sizes[s][1], H = sizes[s][2], D = sizes[s][3], first = sizes[s][4];
        const size_t n = B * T * 3 * H * D;
        float *qkv = normals(n, 0, 1);
        const float *old = copy_of(qkv, n);
        for (int way = 0; way < 4; way++) {
            const bool inverse = way % 2, keys_only = way / 2;
            memcpy(qkv, old, n * sizeof *old);
            ops->rotary(stream, qkv, B, T, H, D, first, keys_only, inverse);
            for (size_t k = 0; k < n; k++) {
                const size_t d = k % D, which = k / (H * D) % 3, position = first + k / (3 * H * D) % T;
                if (which == 2 || (which == 0 && keys_only)) {
                    CHECK(qkv[k] == old[k]);
                    continue;
                }
                const bool low = d < D / 2;
                const size_t i = low ? d : d - D / 2;
                const double angle = (double)position * pow(10000, -2.0 * (double)i / (double)D);
                const double own = (double)old[k], other = (double)old[low ? k + D / 2 : k - D / 2];
                const double sine = sin(angle) * (low ? -1 : 1) * (inverse ? -1 : 1);
                check_near("rotated", k, qkv[k], own * cos(angle) + other * sine,
                           4 * u * (fabs(own) + fabs(other)));
            }
        }
        /* The inverse is the inverse: there and back. */
        memcpy(qkv, old, n * sizeof *old);
        ops->rotary(stream, qkv, B, T, H, D, first, false, false);
        ops->rotary(stream, qkv, B, T, H, D, first, false, true);
        for (size_t k = 0; k < n; k++) check_near("there and back", k, qkv[k], (double)old[k], 24 * u * 4);
        end_case("rotary");
    }
}

/* ---- the head ---- */

/* Logits reach about +-100, where exp would overflow without the maximum subtracted. */
TEST(head_loss) {
    static const size_t sizes[][3] = {{1, 5, 3}, {37, 33, 257}, {300, 17, 131}};
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        const size_t rows = sizes[s][0], C = sizes[s][1], V = sizes[s][2], Vp = (V + 127) / 128 * 128;
        const float scale = 0.37f;
        const float *hidden = normals(rows * C, 0, 1);
        float *wte = normals(Vp * C, 0, 30 / sqrt((double)C)), *d_hidden = nans(rows * C);
        float *d_wte = normals(Vp * C, 0, 0.1);
        void *scratch = nans(ops->head_scratch_bytes(rows, C, V) / sizeof(float) + 1);
        for (size_t i = V * C; i < Vp * C; i++) wte[i] = d_wte[i] = NAN; /* padding */
        const float *old = copy_of(d_wte, Vp * C);
        int32_t *targets = (int32_t *)(void *)nans(rows);
        for (size_t r = 0; r < rows; r++) targets[r] = (int32_t)(r == 0 ? V - 1 : r * r % V);

        StepState forward = {.loss_sum = 0}, both = {.loss_sum = 0};
        ops->begin_step(stream, state, STEP, 0);
        ops->head_loss(stream, state, NULL, NULL, hidden, wte, targets, rows, C, V, scale, scratch);
        ops->read_state(stream, &forward, state);
        CHECK(memcmp(d_wte, old, Vp * C * sizeof *old) == 0);
        ops->head_loss(stream, state, d_hidden, d_wte, hidden, wte, targets, rows, C, V, scale, scratch);
        ops->read_state(stream, &both, state);

        /* A logit is off by at most e, so a probability by the factor exp(2 e) and its own roundings; the
         * loss by 2 e. */
        double *p = (double *)malloc(V * sizeof *p), *sums = (double *)malloc(V * C * sizeof *sums);
        double *bounds = (double *)malloc(V * C * sizeof *bounds), loss = 0, loss_bound = 0,
               largest_logit = 0;
        for (size_t i = 0; i < V * C; i++)
            sums[i] = (double)old[i], bounds[i] = sum_rounding(rows) * fabs(sums[i]);
        for (size_t r = 0; r < rows; r++) {
            double e = 0, largest = -INFINITY, sum = 0;
            for (size_t v = 0; v < V; v++) {
                double size = 0;
                p[v] = 0;
                for (size_t c = 0; c < C; c++) {
                    const double term = (double)hidden[r * C + c] * (double)wte[v * C + c];
                    p[v] += term, size += fabs(term);
                }
                e = fmax(e, sum_rounding(C) * size), largest = fmax(largest, p[v]);
                largest_logit = fmax(largest_logit, fabs(p[v]));
            }
            const double target = p[targets[r]];
            for (size_t v = 0; v < V; v++) sum += p[v] = exp(p[v] - largest);
            loss += log(sum) + largest - target, loss_bound += 2 * e + sum_rounding(V);
            double *d = (double *)malloc(2 * C * sizeof *d), *d_bound = d + C;
            for (size_t c = 0; c < 2 * C; c++) d[c] = 0;
            for (size_t v = 0; v < V; v++) {
                const double g = (double)scale, soft = p[v] / sum;
                const double logit = g * (soft - (v == (size_t)targets[r]));
                const double logit_bound = g * (soft * (2 * e + sum_rounding(V)) + 4 * u * fabs(logit / g));
                for (size_t c = 0; c < C; c++) {
                    const double w = (double)wte[v * C + c], h = (double)hidden[r * C + c];
                    d[c] += logit * w, d_bound[c] += (logit_bound + sum_rounding(V) * fabs(logit)) * fabs(w);
                    sums[v * C + c] += logit * h;
                    bounds[v * C + c] += (logit_bound + sum_rounding(rows) * fabs(logit)) * fabs(h);
                }
            }
            for (size_t c = 0; c < C; c++)
                check_near("d_hidden", r * C + c, d_hidden[r * C + c], d[c], d_bound[c]);
            free(d);
        }
        for (size_t i = 0; i < V * C; i++) check_near("d_wte", i, d_wte[i], sums[i], bounds[i]);
        CHECK(memcmp(d_wte + V * C, old + V * C, (Vp - V) * C * sizeof *old) == 0);
        CHECK_MSG(fabs(forward.loss_sum - loss) <= loss_bound, "loss %.12g, not %.12g (+-%.2g)",
                  forward.loss_sum, loss, loss_bound);
        CHECK_MSG(fabs(both.loss_sum - 2 * forward.loss_sum) <= 1e-12 * loss,
                  "losses do not add up: %.17g, twice %.17g", both.loss_sum, forward.loss_sum);
        if (rows > 1) CHECK_MSG(largest_logit > 90, "the largest logit is only %g", largest_logit);

        /* A hidden state or a logit that is no number must reach the loss, whichever it is. */
        static const float sick[] = {NAN, INFINITY, -INFINITY};
        for (size_t i = 0; i < 3; i++) {
            for (size_t v = 0; v < V; v += 1 + V / 7) {
                const float well = wte[v * C + C / 2];
                wte[v * C + C / 2] = sick[i];
                ops->begin_step(stream, state, STEP, 0);
                ops->head_loss(stream, state, NULL, NULL, hidden, wte, targets, rows, C, V, scale, scratch);
                ops->read_state(stream, &forward, state);
                /* -inf alone is a probability of 0, no fault: rows are needed where hidden has both signs. */
                if (rows > 1)
                    CHECK_MSG(!isfinite(forward.loss_sum), "wte[%zu] = %g gives a loss of %g", v * C + C / 2,
                              (double)sick[i], forward.loss_sum);
                wte[v * C + C / 2] = well;
            }
        }
        free(p), free(sums), free(bounds);
        end_case("head_loss");
    }
}

TEST(head_logits) {
    const size_t rows = 5, C = 33, V = 130, stride = 3 * C;
    const float *hidden = normals(rows * stride, 0, 1), *wte = normals(256 * C, 0, 1);
    float *logits = nans(rows * V);
    ops->head_logits(stream, logits, hidden, stride, wte, rows, C, V);
    for (size_t k = 0; k < rows * V; k++) {
        double sum = 0, size = 0;
        for (size_t c = 0; c < C; c++) {
            const double term = (double)hidden[k / V * stride + c] * (double)wte[k % V * C + c];
            sum += term, size += fabs(term);
        }
        check_near("logit", k, logits[k], sum, sum_rounding(C) * size);
    }
    end_case("head_logits");
}

/* ---- the update ---- */

/* Four tensors with unused floats between them, which hold NaN: no part of any sum. The second is longer than
 * one thread takes at a time. */
static const ParamSpan spans[] = {{0, 7, true}, {64, 100003, false}, {100096, 1, true}, {100160, 333, true}};
enum { SPANS = sizeof spans / sizeof spans[0], SPAN_FLOATS = 100160 + 333 };

static float *in_spans(double spread) {
    float *x = nans(SPAN_FLOATS);
    const float *numbers = normals(SPAN_FLOATS, 0, spread);
    for (size_t i = 0; i < SPANS; i++)
        memcpy(x + spans[i].offset, numbers + spans[i].offset, spans[i].count * sizeof *x);
    return x;
}

static StepState norm_state(const float *gradients, float clip, double loss) {
    StepState seen;
    ops->begin_step(stream, state, STEP, 0.5f);
    ops->read_state(stream, &seen, state);
    seen.loss_sum = loss;
    ops->upload(stream, state, &seen, sizeof seen);
    ops->gradient_norm(stream, state, gradients, spans, SPANS, clip);
    ops->read_state(stream, &seen, state);
    return seen;
}

TEST(gradient_norm) {
    /* 1e25 squared is past fp32's range, 1e-25 squared below it. */
    static const double spreads[] = {1, 1e-4, 1e25, 1e-25};
    for (size_t i = 0; i < 4; i++) {
        const float *gradients = in_spans(spreads[i]);
        double squares = 0;
        for (size_t s = 0; s < SPANS; s++) {
            const float *x = gradients + spans[s].offset;
            for (size_t k = 0; k < spans[s].count; k++) squares += (double)x[k] * (double)x[k];
        }
        const double norm = sqrt(squares);
        const float clips[] = {(float)(norm / 3), (float)(norm * 3), 0};
        for (size_t c = 0; c < 3; c++) {
            const StepState seen = norm_state(gradients, clips[c], 1);
            const double scale = c == 0 ? (double)clips[c] / norm : 1;
            check_near("grad_norm", i, seen.grad_norm, norm, sum_rounding(1) * norm);
            check_near("clip_scale", i, seen.clip_scale, scale, c == 0 ? sum_rounding(1) * scale : 0);
            CHECK(seen.skip == 0 && seen.bad_tensor == -1 && seen.lr == 0.5f && seen.loss_sum == 1);
        }
        end_case("gradient_norm");
    }
    const StepState none = norm_state(in_spans(0), 1, 1); /* no gradient at all: nothing to divide by */
    CHECK(none.grad_norm == 0 && none.clip_scale == 1 && none.skip == 0);
    end_case("gradient_norm");

    static const float sick[] = {NAN, INFINITY, -INFINITY};
    for (size_t i = 0; i < 3; i++) {
        for (size_t s = 0; s < SPANS; s++) {
            float *gradients = in_spans(1);
            gradients[spans[s].offset + spans[s].count - 1] = sick[i];
            gradients[spans[SPANS - 1].offset] = sick[i];
            const StepState seen = norm_state(gradients, 1, 1);
            CHECK_MSG(seen.skip == 1 && seen.bad_tensor == (int32_t)s, "%g in tensor %zu: skip %d, tensor %d",
                      (double)sick[i], s, (int)seen.skip, (int)seen.bad_tensor);
            end_case("gradient_norm");
        }
        const StepState seen = norm_state(in_spans(1), 1, (double)sick[i]);
        CHECK_MSG(seen.skip == 1 && seen.bad_tensor == -1, "loss %g: skip %d, tensor %d", (double)sick[i],
                  (int)seen.skip, (int)seen.bad_tensor);
        end_case("gradient_norm");
    }
}

TEST(adamw) {
    const AdamW settings = {.beta1 = 0.9f, .beta2 = 0.95f, .epsilon = 1e-8f, .weight_decay = 0.1f, .clip = 1};
    const double b1 = (double)settings.beta1, b2 = (double)settings.beta2, lr = (double)0.01f;
    float *w = in_spans(1), *m = in_spans(0), *v = in_spans(0);
    ops->begin_step(stream, state, STEP, 0.01f);
    StepState now;
    ops->read_state(stream, &now, state);
    now.updates = 0;
    for (uint64_t t = 1; t <= 4; t++) {
        float *g = in_spans(t == 3 ? 1e-9 : 1); /* gradients of epsilon's size too */
        for (size_t i = 0; i < spans[1].count; i += 9) g[spans[1].offset + i] = 0;
        const float *old_w = copy_of(w, SPAN_FLOATS), *old_m = copy_of(m, SPAN_FLOATS),
                    *old_v = copy_of(v, SPAN_FLOATS);
        now.clip_scale = t == 2 ? 0.125f : 1.0f, now.skip = 0;
        ops->upload(stream, state, &now, sizeof now);
        ops->adamw(stream, state, w, NULL, g, m, v, spans, SPANS, settings);
        ops->read_state(stream, &now, state);
        CHECK(now.updates == t);
        const double c1 = 1 - pow(b1, (double)t), c2 = 1 - pow(b2, (double)t);
        for (size_t s = 0; s < SPANS; s++) {
            const double decay = spans[s].decay ? (double)settings.weight_decay : 0;
            for (size_t k = spans[s].offset; k < spans[s].offset + spans[s].count; k++) {
                const double grad = (double)g[k] * (double)now.clip_scale, weight = (double)old_w[k];
                const double new_m = b1 * (double)old_m[k] + (1 - b1) * grad;
                const double new_v = b2 * (double)old_v[k] + (1 - b2) * grad * grad;
                const double m_bound = 3 * u * (fabs(b1 * (double)old_m[k]) + fabs((1 - b1) * grad));
                /* The first moment may cancel; the square root halves the second's error. */
                const double root = sqrt(new_v / c2) + (double)settings.epsilon, step = new_m / c1 / root;
                const double step_bound = m_bound / c1 / root + 10 * u * fabs(step);
                check_near("m", k, m[k], new_m, m_bound + 0x1p-126);
                check_near("v", k, v[k], new_v, 4 * u * new_v + 0x1p-126);
                check_near("w", k, w[k], weight - lr * (step + decay * weight),
                           2 * u * fabs(weight) + lr * (step_bound + 4 * u * fabs(decay * weight)));
            }
        }
        /* Skipped: nothing moves, not even the count. */
        const float *new_w = copy_of(w, SPAN_FLOATS), *new_m = copy_of(m, SPAN_FLOATS),
                    *new_v = copy_of(v, SPAN_FLOATS);
        now.skip = 1;
        ops->upload(stream, state, &now, sizeof now);
        ops->adamw(stream, state, w, NULL, g, m, v, spans, SPANS, settings);
        ops->read_state(stream, &now, state);
        CHECK(now.updates == t);
        CHECK(memcmp(w, new_w, SPAN_FLOATS * sizeof *w) == 0 &&
              memcmp(m, new_m, SPAN_FLOATS * sizeof *m) == 0 &&
              memcmp(v, new_v, SPAN_FLOATS * sizeof *v) == 0);
    }
    end_case("adamw");
}

/* Moments of a weight that gets no more gradient end at 0, not at numbers so small that they are slow. */
TEST(adamw_at_rest) {
    const AdamW settings = {.beta1 = 0.9f, .beta2 = 0.95f, .epsilon = 1e-8f, .weight_decay = 0, .clip = 1};
    float *w = in_spans(1), *g = in_spans(0), *m = in_spans(0), *v = in_spans(0);
    for (size_t i = 0; i < SPAN_FLOATS; i++) m[i] = i % 2 ? 1e-36f : -1e-36f, v[i] = 1e-36f;
    ops->begin_step(stream, state, STEP, 0.01f);
    for (int i = 0; i < 200; i++) ops->adamw(stream, state, w, NULL, g, m, v, spans, SPANS, settings);
    for (size_t s = 0; s < SPANS; s++)
        for (size_t k = spans[s].offset; k < spans[s].offset + spans[s].count; k++)
            CHECK(m[k] == 0 && v[k] == 0 && isfinite(w[k]));
    end_case("adamw_at_rest");
}

/* ---- masks ---- */

/* Of n elements n (1 - rate) are kept, with a standard deviation of sqrt(n rate (1 - rate)): five are
 * allowed. Two independent masks agree on a share a = rate^2 + (1 - rate)^2 of them, counted by the same
 * rule. */
TEST(dropout_masks) {
    const size_t rows = 101, C = 1001, n = rows * C;
    static const float rates[] = {0.1f, 0.5f, 0.9f};
    for (size_t i = 0; i < 3; i++) {
        const double rate = (double)rates[i], kept_value = 1 / (1 - rate);
        /* The first mask; then another site, another seed, rows further on, and another step. */
        Dropout drops[5];
        for (size_t k = 0; k < 5; k++) drops[k] = dropout(rates[i], 4, 0);
        drops[1].site = 5, drops[2].seed = SEED + 1, drops[3].first_row = rows;
        float *mask[5], *zeros = nans(n), *ones = nans(n), *normed = nans(n), *gain = normals(C, 1, 0);
        for (size_t k = 0; k < n; k++) zeros[k] = 0, ones[k] = 1;
        for (size_t k = 0; k < 5; k++) {
            ops->begin_step(stream, state, k == 4 ? STEP + 1 : STEP, 0);
            mask[k] = nans(n);
            ops->residual_norm_forward(stream, mask[k], normed, NULL, NULL, zeros, ones, gain, gain, rows, C,
                                       drops[k]);
            double kept = 0, agree = 0;
            for (size_t j = 0; j < n; j++) {
                CHECK(mask[k][j] == 0 || fabs((double)mask[k][j] - kept_value) <= 3 * u * kept_value);
                kept += mask[k][j] != 0;
                agree += (mask[k][j] != 0) == (mask[0][j] != 0);
            }
            const double wanted = (1 - rate) * (double)n, spread = sqrt(wanted * rate);
            CHECK_MSG(fabs(kept - wanted) <= 5 * spread, "rate %g keeps %g of %zu", rate, kept, n);
            const double a = rate * rate + (1 - rate) * (1 - rate),
                         agree_spread = sqrt((double)n * a * (1 - a));
            CHECK_MSG(k == 0 || fabs(agree - a * (double)n) <= 5 * agree_spread,
                      "masks 0 and %zu agree on %g of %zu", k, agree, n);
        }
        end_case("dropout");
    }
    ops->begin_step(stream, state, STEP, 0);
}

static SimdLevel wanted_level;
TEST(simd_level) {
    if (!simd_force(wanted_level)) SKIP("this machine has no %s", simd_name(wanted_level));
    CHECK(simd_level() == wanted_level);
}

int main(int argc, char **argv) {
    test_start(argc, argv, "ops");
    Error err = {0};
    for (int level = SIMD_PLAIN; level <= SIMD_AVX512; level++) {
        wanted_level = (SimdLevel)level;
        RUN(simd_level);
        if (!simd_force(wanted_level)) continue;
        stream = ops->open(0, 0, &err);
        state = stream ? (StepState *)ops->allocate(stream, sizeof *state, &err) : NULL;
        if (!state) {
            printf("  ops_cpu: %s\n", err.text);
            return 1;
        }
        ops->begin_step(stream, state, STEP, 0);
        RUN(memory_and_state);
        RUN(embedding);
        RUN(residual_norm_forward);
        RUN(residual_norm_backward);
        RUN(linear);
        RUN(rotary);
        RUN(head_loss);
        RUN(head_logits);
        RUN(gradient_norm);
        RUN(adamw);
        RUN(adamw_at_rest);
        RUN(dropout_masks);
        ops->release(stream, state);
        ops->close(stream);
    }
    return test_finish();
}
