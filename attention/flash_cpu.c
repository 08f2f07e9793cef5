/* flash_cpu.c - attention without the T x T table, on a CPU (Dao et al. 2022, "FlashAttention"; Dao 2023,
 * "FlashAttention-2"): blocks of queries against blocks of keys, softmax made online, each row's log-sum-exp
 * kept, and the probabilities made again from it in the backward pass. Nothing is kept but lse, and scratch
 * is a few blocks a thread, whatever T is.
 *
 * Here the work is dealt out to threads; flash_cpu_simd.c does a block of it. The result is bit-equal for any
 * number of threads: a block's sums run in one order, and where dK, dV or dQ are summed over several blocks
 * these go in ascending order. */
#include "cpu.h"

#include "flash_cpu_simd.h"

#include <string.h>

static bool flash_can_run(const AttentionShape *shape, Error *reason) {
    if (shape->D == 0 || shape->D % 8 != 0 || shape->D > FLASH_MAX_D)
        return error_set(
            reason,
            "flash on a CPU takes heads of 8, 16, 24 ... %d channels, not %zu; change -channels or "
            "-heads, or use -attention naive",
            FLASH_MAX_D, shape->D);
    return true;
}

static size_t flash_saved_bytes(const AttentionShape *shape) {
    (void)shape;
    return 0;
}

enum { CACHE_LINE = 64 }; /* bytes: where each thread's work begins */

/* Each thread's work, then two numbers for each row. */
static size_t flash_scratch_bytes(const AttentionShape *shape) {
    size_t rows;
    if (!size_mul(shape->B, shape->H, &rows) || !size_mul(rows, shape->T, &rows) ||
        !size_mul(rows, 2 * sizeof(float), &rows))
        return SIZE_MAX;
    size_add(rows, max_threads() * flash_work_floats(shape->D) * sizeof(float) + CACHE_LINE, &rows);
    return rows;
}

/* The work of thread number `thread`; that of the first number past the team is where the rows begin. */
static float *work_of(const AttentionCall *call, size_t thread) {
    const uintptr_t aligned = ((uintptr_t)call->scratch + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
    return (float *)aligned + thread * flash_work_floats(call->D);
}

/* Head bh = b * H + h; rows (B, H, 2, T) in scratch, NULL in the forward pass. */
static FlashHead head_of(const AttentionCall *call, float *rows, size_t bh) {
    const size_t T = call->T, H = call->H, D = call->D, b = bh / H, h = bh % H;
    const size_t qkv = b * T * 3 * H * D + h * D, out = b * T * H * D + h * D;
    FlashHead head = {
        .T = T,
        .D = D,
        .scale = call->scale,
        .qkv_stride = 3 * H * D,
        .out_stride = H * D,
        .q = (const float *)call->qkv + qkv,
        .out = (float *)call->out + out,
        .lse = call->lse + bh * T,
    };
    head.k = head.q + H * D, head.v = head.k + H * D;
    if (rows) {
        head.d_out = (const float *)call->d_out + out;
        head.dq = (float *)call->d_qkv + qkv;
        head.dk = head.dq + H * D, head.dv = head.dk + H * D;
        head.delta = rows + bh * 2 * T, head.correction = head.delta + T;
    }
    return head;
}

/* Later blocks of queries see more keys: they are dealt out first, so that the threads end together. */
static void flash_forward(const AttentionCall *call) {
    const FlashKernels *kernels = SIMD_PICK(flash_kernels);
    const size_t heads = call->B * call->H, blocks = (call->T + FLASH_BLOCK - 1) / FLASH_BLOCK;
#pragma omp parallel for schedule(dynamic, 1)
    for (size_t unit = 0; unit < heads * blocks; unit++) {
        const FlashHead head = head_of(call, NULL, unit % heads);
        kernels->forward(&head, (blocks - 1 - unit / heads) * FLASH_BLOCK, work_of(call, this_thread()));
    }
}

/* Two ways to the same bits. With a head for each thread, each S and P is made once: 5 products. Where that
 * would leave too many threads without work, blocks are dealt out instead, and dQ, and dK with dV, each make
 * S and dP for themselves: 7 products, better as soon as less than 5/7 of the threads would be busy. */
static void flash_backward(const AttentionCall *call) {
    const FlashKernels *kernels = SIMD_PICK(flash_kernels);
    const size_t T = call->T, heads = call->B * call->H, blocks = (T + FLASH_BLOCK - 1) / FLASH_BLOCK;
    const size_t threads = max_threads(), rounds = (heads + threads - 1) / threads;
    float *rows = work_of(call, threads);

    if (blocks == 1 || 7 * heads >= 5 * rounds * threads) {
#pragma omp parallel for schedule(dynamic, 1)
        for (size_t bh = 0; bh < heads; bh++) {
            const FlashHead head = head_of(call, rows, bh);
            for (size_t first = 0; first < T; first += FLASH_BLOCK)
                kernels->backward(&head, first, 0, T, true, true, work_of(call, this_thread()));
        }
        return;
    }
#pragma omp parallel for schedule(dynamic, 1)
    for (size_t unit = 0; unit < heads * blocks; unit++) {
        const FlashHead head = head_of(call, rows, unit % heads);
        kernels->backward(&head, (blocks - 1 - unit / heads) * FLASH_BLOCK, 0, T, true, false,
                          work_of(call, this_thread()));
    }
#pragma omp parallel for schedule(dynamic, 1)
    for (size_t unit = 0; unit < heads * blocks; unit++) {
        const FlashHead head = head_of(call, rows, unit % heads);
        const size_t keys = unit / heads * FLASH_BLOCK;
        for (size_t first = keys; first < T; first += FLASH_BLOCK)
            kernels->backward(&head, first, keys, keys + FLASH_BLOCK, false, true,
                              work_of(call, this_thread()));
    }
}

static void flash_cached(const AttentionCall *call) {
    const FlashKernels *kernels = SIMD_PICK(flash_kernels);
    const size_t B = call->B, T = call->T, H = call->H, D = call->D, kv_stride = 2 * H * D;
    const float *qkv = call->qkv; /* (B, T, 3, H, D) */

    append_to_cache(call);
#pragma omp parallel for schedule(dynamic, 1)
    for (size_t unit = 0; unit < B * H * T; unit++) {
        const size_t t = unit % T, h = unit / T % H, b = unit / T / H;
        const float *k = (const float *)call->kv_cache + b * call->cache_length * kv_stride + h * D;
        kernels->query((float *)call->out + ((b * T + t) * H + h) * D, qkv + (b * T + t) * 3 * H * D + h * D,
                       k, k + H * D, kv_stride, call->offset + t + 1, D, call->scale);
    }
}

extern const Attention attention_flash_cpu;
const Attention attention_flash_cpu = {
    .name = "flash",
    .device = "cpu",
    .about = "blocks with an online softmax; no table is kept",
    .can_run = flash_can_run,
    .saved_bytes = flash_saved_bytes,
    .scratch_bytes = flash_scratch_bytes,
    .forward = flash_forward,
    .backward = flash_backward,
    .cached = flash_cached,
};
