/* test_flash_cuda.c - attention/flash_cuda.cu: out, lse and gradients by the rule of attention.h, at every
 * length to 260 and odd ones to 4,097, for each head size, with each choice of tiles (TRAIN_GPT_SHARED_KB: the
 * shared memory that a block has on other GPUs) and both ways to dQ; rotary positions within the kernels, against
 * those as operations of their own; generation with a cache; many heads; more than
 * 2^32 numbers; bit-equal repeats. Outputs hold NaN beforehand, and around every tensor lie guard bytes that
 * are NaN as numbers: one read too far shows in a result, one write in the guard.
 *
 * The rule: for out, dq, dk, dv, max|ours - ref| <= 2 max|plain - ref| + 2 max|(ref + 0.3 - 0.3) - ref|, where ref
 * is attention in float64 and plain the same in bf16: inputs of products, S, P, dP and dS rounded, sums in fp32.
 * plain sums over channels upwards and downwards, and the worse of both counts, since the largest error of a
 * small tensor is often one row's luck. Beyond T = 1,025 both are the GPU's naive attention, in fp32 and in bf16,
 * and float64 has a few rows. lse: |ours - ref| <= 1e-3 + 4 last places of the largest number it is made of:
 * the row's largest sum of |q k|, times scale.
 *
 * Where the build or the machine has no GPU, the same kernels run on the CPU (emulated/emulated.h), at fewer and
 * smaller shapes; what only a GPU can do is skipped. TRAIN_GPT_EMULATED=1 does that where there is one, too. */
#include "emulated/emulated.h"
#include "reference_attention.h"
#include "reference_random.h"
#include "test.h"

#include "../model/ops.h"

#include <sys/mman.h>

static Ops ops;             /* of the GPU, or of the emulated one those functions that are used here */
static Stream *gpu, *gpu32; /* of `ops`, and of ops_cuda_fp32 for the naive reference */
static bool emulated;
static const Attention *flash, *naive, *naive32;
static char no_gpu[sizeof(Error)];
#define NEED_FLASH() \
    if (!gpu) SKIP("%s", no_gpu)
#define NEED_GPU() \
    if (!gpu || emulated) SKIP("%s", no_gpu)

static const size_t head_sizes[] = {32, 64, 96, 128};
enum { HEAD_SIZES = 4, GUARD = 256, EMULATED_HEADER = 64 };

static void fill_normal(uint16_t *x, size_t n, double spread, uint64_t stream) {
    for (size_t i = 0; i < n; i++) x[i] = bf16_bits((float)(spread * reference_normal(stream, i)));
}

/* ---- guarded memory on the GPU ---- */
typedef struct Tensor {
    uint8_t *memory; /* GUARD bytes, the tensor, GUARD bytes */
    size_t bytes;
} Tensor;

/* With these bytes, or with NaNs. */
static Tensor tensor_new(const void *bytes, size_t size) {
    Error err = {0};
    uint8_t *all = xmalloc(size + 2 * GUARD), *memory = ops.allocate(gpu, size + 2 * GUARD, &err);
    if (!memory) printf("test_flash_cuda: %s\n", err.text), exit(1);
    memset(all, 0xff, size + 2 * GUARD);
    if (bytes) memcpy(all + GUARD, bytes, size);
    ops.upload(gpu, memory, all, size + 2 * GUARD);
    ops.synchronize(gpu); /* the other stream may read it */
    free(all);
    return (Tensor){memory, size};
}
static void *tensor_data(Tensor tensor) {
    return tensor.memory + GUARD;
}
/* What it holds now, to be freed; its guards are checked. */
static void *tensor_take(Tensor tensor, const char *what) {
    uint8_t *all = xmalloc(tensor.bytes + 2 * GUARD);
    ops.download(gpu, all, tensor.memory, tensor.bytes + 2 * GUARD);
    const uint8_t *end = all + GUARD + tensor.bytes;
    bool whole = true;
    for (size_t i = 0; i < GUARD; i++) whole = whole && all[i] == 0xff && end[i] == 0xff;
    CHECK_MSG(whole, "%s was written beyond its ends", what);
    memmove(all, all + GUARD, tensor.bytes);
    return all;
}
static void tensor_free(Tensor tensor) {
    ops.release(gpu, tensor.memory);
}

/* ---- a case, and what attention makes of it ---- */
typedef struct Case {
    size_t B, T, H, D;
    double spread;
    uint16_t *qkv, *d_out; /* (B, T, 3, H, D), (B, T, H, D) */
} Case;

static Case case_new(size_t B, size_t T, size_t H, size_t D, double spread) {
    const size_t n = B * T * H * D;
    Case c = {B, T, H, D, spread, xmalloc(3 * n * sizeof *c.qkv), xmalloc(n * sizeof *c.d_out)};
    const uint64_t stream = 2 * (((T * 1000 + D) * 100 + H) * 100 + (uint64_t)spread);
    fill_normal(c.qkv, 3 * n, spread, stream), fill_normal(c.d_out, n, 1, stream + 1);
    return c;
}
static void case_free(Case *c) {
    free(c->qkv), free(c->d_out);
}

/* Where number d of row t of a head is in (B, T, H, D), and of q, k, v (0, 1, 2) in (B, T, 3, H, D). */
static size_t in_out(const Case *c, size_t head, size_t t, size_t d) {
    return ((head / c->H * c->T + t) * c->H + head % c->H) * c->D + d;
}
static size_t in_qkv(const Case *c, size_t head, size_t t, size_t which, size_t d) {
    return (((head / c->H * c->T + t) * 3 + which) * c->H + head % c->H) * c->D + d;
}

/* All results as floats; to be freed. */
typedef struct Result {
    float *of[RESULTS]; /* (B, H, T, D) */
    float *lse;         /* (B, H, T) */
} Result;

static void result_free(Result *result) {
    for (int r = 0; r < RESULTS; r++) free(result->of[r]);
    free(result->lse);
}

static AttentionCall call_of(const Case *c, Stream *stream, bool deterministic) {
    return (AttentionCall){.B = c->B,
                           .T = c->T,
                           .H = c->H,
                           .D = c->D,
                           .scale = 1.0f / sqrtf((float)c->D),
                           .training = true,
                           .deterministic = deterministic,
                           .stream = stream};
}

/* Forward and backward; half: activations are bf16 (else fp32). */
static Result attention_on(const Attention *backend, Stream *stream, bool half, const Case *c,
                           bool deterministic) {
    const size_t n = c->B * c->T * c->H * c->D, rows = c->B * c->H * c->T, size = half ? 2 : 4;
    const AttentionShape shape = {c->B, c->T, c->H, c->D, true, deterministic};
    float *wide = NULL;
    Tensor qkv, d_out;
    if (half) {
        qkv = tensor_new(c->qkv, 3 * n * size), d_out = tensor_new(c->d_out, n * size);
    } else {
        wide = xmalloc(4 * n * sizeof *wide);
        for (size_t i = 0; i < 3 * n; i++) wide[i] = bf16_value(c->qkv[i]);
        for (size_t i = 0; i < n; i++) wide[3 * n + i] = bf16_value(c->d_out[i]);
        qkv = tensor_new(wide, 3 * n * size), d_out = tensor_new(wide + 3 * n, n * size);
    }
    const Tensor out = tensor_new(NULL, n * size), lse = tensor_new(NULL, rows * sizeof(float));
    const Tensor d_qkv = tensor_new(NULL, 3 * n * size),
                 saved = tensor_new(NULL, backend->saved_bytes(&shape));
    const Tensor scratch = tensor_new(NULL, backend->scratch_bytes(&shape));
    AttentionCall call = call_of(c, stream, deterministic);
    call.qkv = tensor_data(qkv), call.out = tensor_data(out), call.lse = tensor_data(lse);
    call.saved = tensor_data(saved), call.scratch = tensor_data(scratch), call.d_out = tensor_data(d_out);
    call.d_qkv = tensor_data(d_qkv);
    backend->forward(&call);
    backend->backward(&call);
    ops.synchronize(stream);

    Result result = {.lse = tensor_take(lse, "lse")};
    void *out_bytes = tensor_take(out, "out"), *d_qkv_bytes = tensor_take(d_qkv, "d_qkv");
    free(tensor_take(scratch, "scratch memory")), free(tensor_take(saved, "saved memory"));
    for (int r = 0; r < RESULTS; r++) result.of[r] = xmalloc(n * sizeof(float));
    for (size_t head = 0, i = 0; head < c->B * c->H; head++)
        for (size_t t = 0; t < c->T; t++)
            for (size_t d = 0; d < c->D; d++, i++)
                for (size_t r = 0; r < RESULTS; r++) {
                    const void *from = r == OUT ? out_bytes : d_qkv_bytes;
                    const size_t at = r == OUT ? in_out(c, head, t, d) : in_qkv(c, head, t, r - DQ, d);
                    result.of[r][i] = half ? bf16_value(((const uint16_t *)from)[at])
                                           : ((const float *)from)[at];
                }
    free(out_bytes), free(d_qkv_bytes), free(wide);
    const Tensor all[] = {qkv, d_out, out, lse, d_qkv, saved, scratch};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) tensor_free(all[i]);
    return result;
}

/* ---- the reference on the CPU ---- */
typedef struct Reference {
    double *of[RESULTS];      /* (B, H, T, D) */
    double *lse, *last_place; /* (B, H, T) */
    double allowed[RESULTS];
} Reference;

static void reference_of_head(const Case *c, size_t head, Reference *ref, double plain_error[RESULTS]) {
    const size_t T = c->T, D = c->D, n = T * D;
    float *in[4], *plain[RESULTS], *plain_lse = xmalloc(T * sizeof *plain_lse);
    double *exact[RESULTS];
    for (size_t w = 0; w < 4; w++) {
        in[w] = xmalloc(n * sizeof(float)), plain[w] = xmalloc(n * sizeof(float));
        exact[w] = ref->of[w] + head * n;
        for (size_t i = 0; i < n; i++)
            in[w][i] = bf16_value(w < 3 ? c->qkv[in_qkv(c, head, i / D, w, i % D)]
                                        : c->d_out[in_out(c, head, i / D, i % D)]);
    }
    plain_double(false, T, D, in[0], in[1], in[2], in[3], exact, ref->lse + head * T);
    for (int down = 0; down < 2; down++) {
        plain_bf16(down, T, D, in[0], in[1], in[2], in[3], plain, plain_lse);
        for (int r = 0; r < RESULTS; r++)
            for (size_t i = 0; i < n; i++)
                plain_error[r] = fmax(plain_error[r], fabs((double)plain[r][i] - exact[r][i]));
    }
    for (size_t t = 0; t < T; t++)
        ref->last_place[head * T + t] = lse_last_place(ref->lse[head * T + t], t, D, in[0], in[1],
                                                       c->spread > 1);
    for (int w = 0; w < 4; w++) free(in[w]), free(plain[w]);
    free(plain_lse);
}

static Reference reference_new(const Case *c) {
    const size_t heads = c->B * c->H, n = heads * c->T * c->D;
    Reference ref = {.lse = xmalloc(heads * c->T * sizeof(double)),
                     .last_place = xmalloc(heads * c->T * sizeof(double))};
    double plain_error[RESULTS] = {0};
    for (int r = 0; r < RESULTS; r++) ref.of[r] = xmalloc(n * sizeof(double));
    for (size_t head = 0; head < heads; head++) reference_of_head(c, head, &ref, plain_error);
    for (int r = 0; r < RESULTS; r++) {
        double loss = 0;
        for (size_t i = 0; i < n; i++) loss = fmax(loss, shift_loss(ref.of[r][i], true));
        ref.allowed[r] = 2 * plain_error[r] + 2 * loss;
    }
    return ref;
}
static void reference_free(Reference *ref) {
    for (int r = 0; r < RESULTS; r++) free(ref->of[r]);
    free(ref->lse), free(ref->last_place);
}

/* ---- the rule ---- */
/* The shared memory of this GPU and of lesser ones, with dQ made in either way. */
typedef struct Variant {
    const char *kilobytes; /* NULL: all there is */
    bool deterministic;
} Variant;
static const Variant variants[] = {{NULL, false}, {NULL, true}, {"163", false}, {"99", false}};

/* From here on the kernels find a GPU with so much shared memory; the emulated one is also built for the older GPUs
 * that have less. */
static void choose(const Variant *variant) {
    if (variant->kilobytes) setenv("TRAIN_GPT_SHARED_KB", variant->kilobytes, 1);
    else unsetenv("TRAIN_GPT_SHARED_KB");
#ifdef USE_EMULATED
    if (emulated) flash = variant->kilobytes ? &emulated_flash_80 : &emulated_flash_90;
#endif
}

static void check_result(const Case *c, const Reference *ref, const Result *result, const Variant *variant) {
    const size_t rows = c->B * c->H * c->T;
    char what[128];
    snprintf(what, sizeof what, "B %zu T %zu H %zu D %zu inputs x %g%s%s%s", c->B, c->T, c->H, c->D,
             c->spread, variant->kilobytes ? ", KB " : "", variant->kilobytes ? variant->kilobytes : "",
             variant->deterministic ? ", deterministic" : "");
    for (int r = 0; r < RESULTS; r++) {
        double error = 0;
        for (size_t i = 0; i < rows * c->D && !isnan(error); i++) {
            const double e = fabs((double)result->of[r][i] - ref->of[r][i]);
            if (!(e <= error)) error = e;
        }
        CHECK_MSG(error <= ref->allowed[r], "%s: %s is off by %.3g, allowed %.3g", what, result_names[r],
                  error, ref->allowed[r]);
    }
    for (size_t i = 0; i < rows; i++) {
        const double error = fabs((double)result->lse[i] - ref->lse[i]);
        CHECK_MSG(error <= 1e-3 + 4 * ref->last_place[i], "%s: lse of row %zu is off by %.3g", what, i,
                  error);
    }
}

static void check_case(const Case *c, const Reference *ref) {
    for (size_t i = 0; i < sizeof variants / sizeof variants[0]; i++) {
        choose(&variants[i]);
        Result result = attention_on(flash, gpu, true, c, variants[i].deterministic);
        choose(&variants[0]);
        check_result(c, ref, &result, &variants[i]);
        result_free(&result);
    }
}

/* References are made side by side on all cores, the longest first, then the GPU has its turn. */
enum { MOST_CASES = 300 };
static Case cases[MOST_CASES];
static Reference references[MOST_CASES];
static size_t n_cases;

static void add_case(size_t B, size_t T, size_t H, size_t D, double spread) {
    cases[n_cases++] = (Case){.B = B, .T = T, .H = H, .D = D, .spread = spread};
}
static void check_cases(void) {
#pragma omp parallel for schedule(dynamic, 1)
    for (size_t i = n_cases; i > 0; i--) {
        Case *c = &cases[i - 1];
        *c = case_new(c->B, c->T, c->H, c->D, c->spread);
        references[i - 1] = reference_new(c);
    }
    for (size_t i = 0; i < n_cases; i++) {
        check_case(&cases[i], &references[i]);
        case_free(&cases[i]), reference_free(&references[i]);
    }
    n_cases = 0;
}

TEST(every_length_to_260) {
    NEED_FLASH();
    for (size_t i = 0; i < HEAD_SIZES; i++) {
        for (size_t T = 1; T <= 260; T++) /* emulated: those around tiles' ends, and some others */
            if (!emulated || (T + 1) % 64 < 3 || T % 31 == 5) add_case(1, T, 1 + T % 2, head_sizes[i], 1);
        check_cases();
    }
}

TEST(longer_ones) {
    NEED_FLASH();
    static const size_t lengths[] = {300, 511, 512, 513, 777, 1023, 1024, 1025};
    for (size_t t = 0; t < (emulated ? 1 : sizeof lengths / sizeof lengths[0]); t++)
        for (size_t i = 0; i < HEAD_SIZES; i++) add_case(1, lengths[t], 1, head_sizes[i], 1);
    check_cases();
}

TEST(several_sequences_and_heads) {
    NEED_FLASH();
    static const size_t shapes[][3] = {{3, 1, 5}, {5, 65, 3}, {2, 129, 7}, {1, 192, 40}, {33, 70, 1}};
    for (size_t s = 0; s < (emulated ? 3 : sizeof shapes / sizeof shapes[0]); s++)
        for (size_t i = 0; i < HEAD_SIZES; i++)
            add_case(shapes[s][0], shapes[s][1], shapes[s][2], head_sizes[i], 1);
    check_cases();
}

TEST(scores_in_the_thousands) {
    NEED_FLASH();
    static const size_t lengths[] = {2, 33, 64, 100, 261, 513};
    for (size_t t = 0; t < (emulated ? 5 : sizeof lengths / sizeof lengths[0]); t++)
        for (size_t i = 0; i < HEAD_SIZES; i++) add_case(1, lengths[t], 1, head_sizes[i], 30);
    check_cases();
}

/* Against the GPU's naive attention, whose fp32 stands for float64; then its rows against float64. */
TEST(long_ones) {
    NEED_GPU();
    static const size_t lengths[] = {2047, 4097};
    for (size_t t = 0; t < 2; t++) {
        for (size_t i = 0; i < HEAD_SIZES; i++) {
            Case c = case_new(1, lengths[t], 2, head_sizes[i], 1);
            const size_t n = c.H * c.T * c.D, rows = c.H * c.T;
            Result exact = attention_on(naive32, gpu32, false, &c, false);
            Result plain = attention_on(naive, gpu, true, &c, false);
            Reference ref = {.lse = xmalloc(rows * sizeof(double)),
                             .last_place = xmalloc(rows * sizeof(double))};
            for (int r = 0; r < RESULTS; r++) {
                double plain_error = 0, loss = 0;
                ref.of[r] = xmalloc(n * sizeof(double));
                for (size_t e = 0; e < n; e++) {
                    ref.of[r][e] = exact.of[r][e];
                    plain_error = fmax(plain_error, fabs((double)plain.of[r][e] - ref.of[r][e]));
                    loss = fmax(loss, shift_loss(ref.of[r][e], true));
                }
                ref.allowed[r] = 2 * plain_error + 2 * loss;
            }
            for (size_t row = 0; row < rows; row++)
                ref.lse[row] = exact.lse[row], ref.last_place[row] = last_place(exact.lse[row]);
            for (size_t k = 0; k < 6; k++) { /* rows of the second head */
                const size_t row = (size_t[]){0, 63, 1024, c.T / 2 + 1, c.T - 2, c.T - 1}[k];
                double *p = xmalloc((row + 1) * sizeof *p), max = -INFINITY, sum = 0;
                for (size_t j = 0; j <= row; j++) {
                    p[j] = 0;
                    for (size_t d = 0; d < c.D; d++)
                        p[j] += (double)bf16_value(c.qkv[in_qkv(&c, 1, row, 0, d)]) *
                                (double)bf16_value(c.qkv[in_qkv(&c, 1, j, 1, d)]);
                    p[j] /= sqrt((double)c.D), max = fmax(max, p[j]);
                }
                for (size_t j = 0; j <= row; j++) sum += exp(p[j] - max);
                ref.lse[c.T + row] = max + log(sum);
                for (size_t d = 0; d < c.D; d++) {
                    double o = 0;
                    for (size_t j = 0; j <= row; j++)
                        o += exp(p[j] - max) / sum * (double)bf16_value(c.qkv[in_qkv(&c, 1, j, 2, d)]);
                    ref.of[OUT][(c.T + row) * c.D + d] = o;
                }
                free(p);
            }
            check_case(&c, &ref);
            result_free(&exact), result_free(&plain), reference_free(&ref), case_free(&c);
        }
    }
}

/* Generation in steps of these sizes must give what forward gives. */
TEST(generation_with_the_cache) {
    NEED_FLASH();
    static const size_t steps[][4] = {{1, 1, 1, 1}, {70, 1, 63, 2}, {600, 600, 600, 600}};
    for (size_t k = 0; k < 3 * HEAD_SIZES; k++) {
        Case c = case_new(2,
                          k % 3      ? emulated ? 150 : 401
                          : emulated ? 30
                                     : 90,
                          3, head_sizes[k / 3], k % 2 ? 30 : 1);
        Reference ref = reference_new(&c);
        const size_t C = c.H * c.D, length = c.T + 3;
        const Tensor cache = tensor_new(NULL, c.B * length * 2 * C * 2);
        double error = 0;
        for (size_t offset = 0, n, step = 0; offset < c.T; offset += n, step++) {
            n = steps[k % 3][step % 4] < c.T - offset ? steps[k % 3][step % 4] : c.T - offset;
            uint16_t *some = xmalloc(c.B * n * 3 * C * 2);
            for (size_t b = 0; b < c.B; b++)
                memcpy(some + b * n * 3 * C, c.qkv + (b * c.T + offset) * 3 * C, n * 3 * C * 2);
            const Tensor qkv = tensor_new(some, c.B * n * 3 * C * 2), out = tensor_new(NULL, c.B * n * C * 2);
            AttentionCall call = call_of(&c, gpu, false);
            call.T = n, call.training = false, call.offset = offset, call.cache_length = length;
            call.qkv = tensor_data(qkv), call.out = tensor_data(out), call.kv_cache = tensor_data(cache);
            flash->cached(&call);
            uint16_t *got = tensor_take(out, "out");
            for (size_t i = 0; i < c.B * n * C; i++) {
                const size_t b = i / (n * C), t = offset + i / C % n, h = i / c.D % c.H, d = i % c.D;
                const double exact = ref.of[OUT][((b * c.H + h) * c.T + t) * c.D + d];
                const double e = fabs((double)bf16_value(got[i]) - exact);
                if (!(e <= error)) error = e;
            }
            free(got), free(some), tensor_free(qkv), tensor_free(out);
        }
        CHECK_MSG(error <= ref.allowed[OUT], "D %zu, inputs x %g, steps %zu: off by %.3g, allowed %.3g", c.D,
                  c.spread, k % 3, error, ref.allowed[OUT]);
        uint16_t *kept = tensor_take(cache, "the cache");
        bool same = true;
        for (size_t b = 0; b < c.B; b++)
            for (size_t t = 0; t < c.T; t++)
                same = same && memcmp(kept + (b * length + t) * 2 * C, c.qkv + ((b * c.T + t) * 3 + 1) * C,
                                      2 * C * sizeof *kept) == 0;
        CHECK_MSG(same, "the cache does not hold what was given");
        free(kept), tensor_free(cache), reference_free(&ref), case_free(&c);
    }
}

/* 70,002 heads of few tokens: all the same, and the first one right. */
TEST(very_many_heads) {
    NEED_GPU();
    for (size_t i = 0; i < HEAD_SIZES; i++) {
        Case one = case_new(1, i % 2 ? 3 : 17, 3, head_sizes[i], 1), all = one;
        const size_t n = one.T * one.H * one.D;
        all.B = 23334;
        all.qkv = xmalloc(3 * all.B * n * 2), all.d_out = xmalloc(all.B * n * 2);
        for (size_t b = 0; b < all.B; b++) {
            memcpy(all.qkv + b * 3 * n, one.qkv, 3 * n * 2);
            memcpy(all.d_out + b * n, one.d_out, n * 2);
        }
        Result many = attention_on(flash, gpu, true, &all, false);
        bool same = true;
        for (size_t b = 1; b < all.B; b++) {
            for (int r = 0; r < RESULTS; r++)
                same = same && memcmp(many.of[r], many.of[r] + b * n, n * sizeof(float)) == 0;
            same = same && memcmp(many.lse, many.lse + b * one.H * one.T, one.H * one.T * sizeof(float)) == 0;
        }
        CHECK_MSG(same, "D %zu: equal sequences came out differently", one.D);
        Reference ref = reference_new(&one);
        check_result(&one, &ref, &many, &variants[0]); /* reads the first sequence only */
        result_free(&many), reference_free(&ref), case_free(&one), case_free(&all);
    }
}

/* B sequences, all one but the last: that one must come out as it does alone. Emulated: only the last is there and is
 * looked at. */
static void check_last_sequence(size_t B, size_t T, size_t H, size_t D, bool deterministic) {
    Case some = case_new(1, T, H, D, 1), last = case_new(1, T, H, D, 2);
    const size_t n = T * H * D;
    const AttentionShape shape = {B, T, H, D, true, deterministic};
    const size_t sizes[] = {3 * n * 2, n * 2, n * 2, 3 * n * 2, H * T * 4}; /* qkv, d_out, out, d_qkv, lse */
    const size_t scratch_bytes = flash->scratch_bytes(&shape) + 1;
    if (ops.memory) {
        size_t free_bytes = 0, total = 0, need = scratch_bytes;
        ops.memory(gpu, &free_bytes, &total);
        for (size_t i = 0; i < 5; i++) need += B * sizes[i];
        if (need + ((size_t)1 << 30) > free_bytes) {
            case_free(&some), case_free(&last);
            SKIP("%zu sequences take %zu MiB of GPU memory, %zu are free", B, need >> 20, free_bytes >> 20);
        }
    }
    uint8_t *memory[6];
    Error err = {0};
    for (int i = 0; i < 6; i++) {
        memory[i] = ops.allocate(gpu, i < 5 ? B * sizes[i] : scratch_bytes, &err);
        if (!memory[i] && !emulated) printf("test_flash_cuda: %s\n", err.text), exit(1);
        if (memory[i]) continue;
        while (i-- > 0) ops.release(gpu, memory[i]);
        case_free(&some), case_free(&last);
        SKIP("%s", err.text); /* the system lends no memory that it does not have */
    }
    for (size_t b = emulated ? B - 1 : 0; b < B; b++) {
        ops.upload(gpu, memory[0] + b * sizes[0], b + 1 < B ? some.qkv : last.qkv, sizes[0]);
        ops.upload(gpu, memory[1] + b * sizes[1], b + 1 < B ? some.d_out : last.d_out, sizes[1]);
    }
    AttentionCall call = call_of(&some, gpu, deterministic);
    call.B = B, call.qkv = memory[0], call.d_out = memory[1], call.out = (act_t *)memory[2];
    call.d_qkv = (act_t *)memory[3], call.lse = (float *)memory[4], call.scratch = memory[5];
#ifdef USE_EMULATED
    if (emulated) emulated_run_last(B);
#endif
    flash->forward(&call);
    flash->backward(&call);
    uint8_t *got[3], *alone[3]; /* out, d_qkv, lse */
    for (int i = 0; i < 3; i++) {
        got[i] = xmalloc(sizes[2 + i]), alone[i] = xmalloc(sizes[2 + i]);
        ops.download(gpu, got[i], memory[2 + i] + (B - 1) * sizes[2 + i], sizes[2 + i]);
    }
    ops.upload(gpu, memory[0], last.qkv, sizes[0]);
    ops.upload(gpu, memory[1], last.d_out, sizes[1]);
    call.B = 1;
#ifdef USE_EMULATED
    if (emulated) emulated_run_last(1);
#endif
    flash->forward(&call);
    flash->backward(&call);
    for (int i = 0; i < 3; i++) {
        ops.download(gpu, alone[i], memory[2 + i], sizes[2 + i]);
        CHECK_MSG(memcmp(got[i], alone[i], sizes[2 + i]) == 0,
                  "B %zu D %zu: %s of the last sequence is not as alone", B, D,
                  (const char *[]){"out", "d_qkv", "lse"}[i]);
        free(got[i]), free(alone[i]);
    }
    for (int i = 0; i < 6; i++) ops.release(gpu, memory[i]);
    case_free(&some), case_free(&last);
}

TEST(last_of_64_sequences) {
    NEED_GPU();
    check_last_sequence(64, 2048, 12, 64, true);
}

/* 1,000 * 2,048 * 3 * 12 * 64 in qkv; emulated, with fewer tokens for the last one to take less time, as many in all, and
 * dQ's sums as well, which come in a fixed order there. */
TEST(more_than_two_to_the_32_numbers) {
    NEED_FLASH();
    if (!emulated) {
        check_last_sequence(1000, 2048, 12, 64, true);
        return;
    }
    for (size_t i = 0; i < HEAD_SIZES; i++)
        for (size_t v = 0; v < sizeof variants / sizeof variants[0] && !test_state.skipped; v++) {
            choose(&variants[v]);
            check_last_sequence(((size_t)1 << 32) / (17 * 3 * 3 * head_sizes[i]) + 1, 17, 3, head_sizes[i],
                                variants[v].deterministic);
            choose(&variants[0]);
        }
}

/* out, lse, dk and dv always, dq with `deterministic`. */
TEST(repeats_are_bit_equal) {
    NEED_FLASH();
    for (size_t i = 0; i < HEAD_SIZES; i++) {
        Case c = emulated ? case_new(1, 321, 2, head_sizes[i], 1) : case_new(3, 513, 5, head_sizes[i], 1);
        const size_t n = c.B * c.T * c.H * c.D, repeats = emulated ? 4 : c.D == 64 ? 1000 : 100;
        const AttentionShape shape = {c.B, c.T, c.H, c.D, true, false};
        const Tensor qkv = tensor_new(c.qkv, 3 * n * 2), d_out = tensor_new(c.d_out, n * 2);
        const Tensor out = tensor_new(NULL, n * 2), d_qkv = tensor_new(NULL, 3 * n * 2);
        const Tensor lse = tensor_new(NULL, c.B * c.H * c.T * sizeof(float));
        const Tensor scratch = tensor_new(NULL, flash->scratch_bytes(&shape));
        uint16_t *first_out = NULL, *first_d_qkv = NULL;
        float *first_lse = NULL;
        size_t different = 0;
        for (size_t k = 0; k < repeats; k++) {
            const bool deterministic = k % 2 == 0;
            AttentionCall call = call_of(&c, gpu, deterministic);
            call.qkv = tensor_data(qkv), call.out = tensor_data(out), call.lse = tensor_data(lse);
            call.scratch = tensor_data(scratch), call.d_out = tensor_data(d_out);
            call.d_qkv = tensor_data(d_qkv);
            flash->forward(&call);
            flash->backward(&call);
            uint16_t *o = tensor_take(out, "out"), *g = tensor_take(d_qkv, "d_qkv");
            float *l = tensor_take(lse, "lse");
            if (k == 0) {
                first_out = o, first_d_qkv = g, first_lse = l;
                continue;
            }
            bool same = memcmp(o, first_out, n * 2) == 0 && memcmp(l, first_lse, lse.bytes) == 0;
            for (size_t row = 0; row < c.B * c.T && same; row++) {
                const size_t C = c.H * c.D, skipped = deterministic ? 0 : C; /* dq */
                same = memcmp(g + row * 3 * C + skipped, first_d_qkv + row * 3 * C + skipped,
                              (3 * C - skipped) * 2) == 0;
            }
            different += !same;
            free(o), free(g), free(l);
        }
        CHECK_MSG(different == 0, "D %zu: %zu of %zu repeats differ", c.D, different, repeats);
        const Tensor all[] = {qkv, d_out, out, d_qkv, lse, scratch};
        for (size_t k = 0; k < sizeof all / sizeof all[0]; k++) tensor_free(all[k]);
        free(first_out), free(first_d_qkv), free(first_lse), case_free(&c);
    }
}

/* ---- rotary positions within the kernels ---- */
/* What is left of a training step's attention, as raw bf16: qkv after forward, out, d_qkv; and lse. */
enum { ROTATED, ATTENDED, GRADIENTS, KEPT };
typedef struct Kept {
    uint16_t *of[KEPT];
    float *lse;
} Kept;

/* Rotary by the kernels, or by operations before and after them. */
static Kept rotary_attention(const Case *c, bool fused, bool deterministic) {
    const size_t n = c->B * c->T * c->H * c->D;
    const AttentionShape shape = {c->B, c->T, c->H, c->D, true, deterministic};
    const Tensor qkv = tensor_new(c->qkv, 3 * n * 2), d_out = tensor_new(c->d_out, n * 2);
    const Tensor out = tensor_new(NULL, n * 2), d_qkv = tensor_new(NULL, 3 * n * 2);
    const Tensor lse = tensor_new(NULL, c->B * c->H * c->T * sizeof(float));
    const Tensor scratch = tensor_new(NULL, flash->scratch_bytes(&shape));
    AttentionCall call = call_of(c, gpu, deterministic);
    call.qkv = tensor_data(qkv), call.out = tensor_data(out), call.lse = tensor_data(lse);
    call.scratch = tensor_data(scratch), call.d_out = tensor_data(d_out), call.d_qkv = tensor_data(d_qkv);
    call.rotary = fused;
    ops.rotary(gpu, call.qkv, c->B, c->T, c->H, c->D, 0, fused, false);
    flash->forward(&call);
    flash->backward(&call);
    if (!fused) ops.rotary(gpu, call.d_qkv, c->B, c->T, c->H, c->D, 0, false, true);
    Kept kept = {{tensor_take(qkv, "qkv"), tensor_take(out, "out"), tensor_take(d_qkv, "d_qkv")},
                 tensor_take(lse, "lse")};
    const Tensor all[] = {qkv, d_out, out, d_qkv, lse, scratch};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) tensor_free(all[i]);
    return kept;
}
static void kept_free(Kept *kept) {
    for (int i = 0; i < KEPT; i++) free(kept->of[i]);
    free(kept->lse);
}

/* Equal to the bit, but for dq where its sums come in no fixed order. A sum may then round to the neighbouring bf16,
 * 2^-7 of itself at most, in both numbers of a pair: turned, 2^-7 of their magnitudes' sum, which is at most sqrt(2)
 * times that of the turned ones, x and other; and what was turned may round to its neighbour once more, 2^-7 of x.
 * Together less than 2.5 * 2^-7 (|x| + |other|). Numbers near 0 differ by the order itself: sums of nine blocks' parts,
 * of about 1 each, by 9 * 2^-24 and less, doubled for the pair: 1e-6 and a little. */
static void check_rotary(const Case *c, const Variant *variant) {
    const size_t C = c->H * c->D, n = c->B * c->T * C;
    Kept apart = rotary_attention(c, false, variant->deterministic);
    Kept fused = rotary_attention(c, true, variant->deterministic);
    const bool same = memcmp(apart.of[ROTATED], fused.of[ROTATED], 3 * n * 2) == 0 &&
                      memcmp(apart.of[ATTENDED], fused.of[ATTENDED], n * 2) == 0 &&
                      memcmp(apart.lse, fused.lse, c->B * c->H * c->T * sizeof(float)) == 0;
    size_t turned = 0, different = 0;
    for (size_t i = 0; i < 3 * n; i++) {
        const size_t which = i / C % 3, pair = i % c->D < c->D / 2 ? i + c->D / 2 : i - c->D / 2;
        turned += which < 2 && fused.of[ROTATED][i] != c->qkv[i];
        const float x = bf16_value(apart.of[GRADIENTS][i]), y = bf16_value(fused.of[GRADIENTS][i]);
        const float other = bf16_value(apart.of[GRADIENTS][pair]);
        const bool exact = which > 0 || variant->deterministic;
        different += exact ? apart.of[GRADIENTS][i] != fused.of[GRADIENTS][i]
                           : !(fabsf(x - y) <= 0x1.4p-6f * (fabsf(x) + fabsf(other)) + 1.1e-6f);
    }
    CHECK_MSG(same && different == 0 && (c->T == 1 || turned > n / 2),
              "T %zu D %zu%s%s: forward %s, %zu gradients differ, %zu numbers were turned", c->T, c->D,
              variant->kilobytes ? ", KB " : "", variant->kilobytes ? variant->kilobytes : "",
              same ? "equal" : "not equal", different, turned);
    kept_free(&apart), kept_free(&fused);
}

static void check_rotary_at(const size_t (*shapes)[3], size_t n) {
    for (size_t s = 0; s < n; s++)
        for (size_t i = 0; i < HEAD_SIZES; i++) {
            Case c = case_new(shapes[s][0], shapes[s][1], shapes[s][2], head_sizes[i], 1);
            for (size_t v = 0; v < sizeof variants / sizeof variants[0]; v++) {
                choose(&variants[v]);
                check_rotary(&c, &variants[v]);
                choose(&variants[0]);
            }
            case_free(&c);
        }
}
TEST(rotary_within) {
    NEED_FLASH();
    static const size_t shapes[][3] = {{2, 1, 3}, {3, 63, 2}, {1, 64, 5}, {2, 65, 3}, {2, 129, 7}};
    check_rotary_at(shapes, emulated ? 4 : sizeof shapes / sizeof shapes[0]);
}
TEST(longer_rotary) {
    NEED_FLASH();
    static const size_t shapes[][3] = {{1, 300, 3}, {1, 513, 2}, {1, 1030, 1}};
    check_rotary_at(shapes, emulated ? 1 : sizeof shapes / sizeof shapes[0]);
}

TEST(shapes_and_sizes) {
    NEED_FLASH();
    Error err = {0};
    AttentionShape shape = {1, 64, 1, 64, true, false};
    if (!emulated) CHECK(strcmp(attention_find("flash", "cuda", &shape, &err)->name, "flash_mma") == 0);
    CHECK(flash->saved_bytes(&shape) == 0);
    CHECK(flash->scratch_bytes(&shape) == 64 * 64 * sizeof(float));
    shape.deterministic = true;
    CHECK(flash->scratch_bytes(&shape) == 0);
    shape.training = false;
    CHECK(flash->scratch_bytes(&shape) == 0);
    shape.training = true, shape.deterministic = false, shape.T = SIZE_MAX;
    CHECK(flash->scratch_bytes(&shape) == SIZE_MAX && !flash->can_run(&shape, &err));
    shape.T = 1024, shape.B = SIZE_MAX / 4;
    CHECK(flash->scratch_bytes(&shape) == SIZE_MAX && !flash->can_run(&shape, &err));
    shape.B = 1, shape.D = 80;
    CHECK(!flash->can_run(&shape, &err) && strstr(err.text, "80 channels") &&
          strstr(err.text, "32, 64, 96 and 128"));
}

/* ---- the GPU, or what stands for it ---- */
#ifdef USE_EMULATED
/* Memory that is taken only where it is touched. */
static void *emulated_allocate(Stream *stream, size_t bytes, Error *err) {
    (void)stream;
    size_t *memory = mmap(NULL, bytes + EMULATED_HEADER, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return error_set(err, "no %zu bytes of address space", bytes), NULL;
    *memory = bytes + EMULATED_HEADER;
    return (uint8_t *)memory + EMULATED_HEADER;
}
static void emulated_release(Stream *stream, void *memory) {
    (void)stream;
    size_t *start = (size_t *)(void *)((uint8_t *)memory - EMULATED_HEADER);
    munmap(start, *start);
}
static void emulated_copy_memory(Stream *stream, void *to, const void *from, size_t bytes) {
    (void)stream;
    memcpy(to, from, bytes);
}
static void emulated_synchronize(Stream *stream) {
    (void)stream;
}
/* Ops.rotary, plainly: angles in fp16, the numbers in fp32, rounded to bf16. */
static void emulated_rotary(Stream *stream, act_t *qkv, size_t B, size_t T, size_t H, size_t D,
                            size_t first_position, bool keys_only, bool inverse) {
    (void)stream;
    const size_t half = D / 2;
    for (size_t i = 0; i < B * T * 3 * H * half; i++) {
        const size_t pair = i % half, row = i / half, which = row / H % 3,
                     t = first_position + row / H / 3 % T;
        if (which == 2 || (keys_only && which == 0)) continue;
        const double angle = (double)t * pow(10000.0, -(double)pair / (double)half);
        const float c = half_value(half_bits((float)cos(angle)));
        const float s = half_value(half_bits((float)sin(angle))) * (inverse ? -1.0f : 1.0f);
        uint16_t *at = (uint16_t *)qkv + row * D + pair;
        const float a = bf16_value(at[0]), b = bf16_value(at[half]);
        at[0] = bf16_bits(fmaf(a, c, -(b * s)));
        at[half] = bf16_bits(fmaf(b, c, a * s));
    }
}

static void open_emulated(void) {
    if (!emulated_is_possible()) return;
    ops = (Ops){.allocate = emulated_allocate,
                .release = emulated_release,
                .upload = emulated_copy_memory,
                .download = emulated_copy_memory,
                .synchronize = emulated_synchronize,
                .rotary = emulated_rotary};
    emulated = true, gpu = emulated_stream();
    choose(&variants[0]);
}
#endif

#ifdef USE_CUDA
static void open_gpus(void) {
    Error err = {0};
    const AttentionShape shape = {1, 1, 1, 64, true, false};
    const char *wanted = getenv("TRAIN_GPT_EMULATED");
    if (wanted && strcmp(wanted, "1") == 0) {
        snprintf(no_gpu, sizeof no_gpu, "TRAIN_GPT_EMULATED=1");
        return;
    }
    ops = ops_cuda;
    gpu = ops.open(0, 0, &err);
    if (gpu) gpu32 = ops_cuda_fp32.open(0, 0, &err);
    if (!gpu || !gpu32) {
        snprintf(no_gpu, sizeof no_gpu, "%s", err.text);
        gpu = NULL;
        return;
    }
    flash = attention_find("flash_mma", "cuda", &shape, &err);
    naive = attention_find("naive", "cuda", &shape, &err);
    naive32 = attention_find("naive", "cuda-fp32", &shape, &err);
    if (!flash || !naive || !naive32) printf("test_flash_cuda: %s\n", err.text), exit(1);
}
static void close_gpus(void) {
    if (gpu32) ops_cuda_fp32.close(gpu32), ops.close(gpu);
}
#else
static void open_gpus(void) {
    snprintf(no_gpu, sizeof no_gpu, "this build has no CUDA");
}
static void close_gpus(void) {
}
#endif

int main(int argc, char **argv) {
    test_start(argc, argv, "flash_cuda");
    open_gpus();
#ifdef USE_EMULATED
    if (!gpu) open_emulated();
#endif
    RUN(shapes_and_sizes);
    RUN(every_length_to_260);
    RUN(longer_ones);
    RUN(several_sequences_and_heads);
    RUN(scores_in_the_thousands);
    RUN(long_ones);
    RUN(generation_with_the_cache);
    RUN(very_many_heads);
    RUN(last_of_64_sequences);
    RUN(more_than_two_to_the_32_numbers);
    RUN(repeats_are_bit_equal);
    RUN(rotary_within);
    RUN(longer_rotary);
    close_gpus();
    return test_finish();
}
