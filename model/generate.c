/* generate.c - sampling one token exactly, and writing many sequences with a key/value cache.
 *
 * The cuts (top_k, top_p) need the likeliest tokens in order, but rarely many of the V there are: a heap
 * gives them one after another, V + m log V steps for m tokens, where a sort would take V log V for each
 * token written. */
#include "generate.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ops_cpu_simd.h"

/* ---- one token ---- */

typedef struct Candidate {
    float logit;
    uint32_t token;
    double weight; /* its probability relative to the likeliest one's */
} Candidate;

/* The order that cuts and ties go by: larger logit first, then lower id. */
static bool likelier(const Candidate *a, const Candidate *b) {
    return a->logit > b->logit || (a->logit == b->logit && a->token < b->token);
}

/* Moves heap[root] down until no child is likelier. */
static void heap_sift(Candidate *heap, size_t size, size_t root) {
    const Candidate moving = heap[root];
    for (size_t child; (child = 2 * root + 1) < size; root = child) {
        if (child + 1 < size && likelier(&heap[child + 1], &heap[child])) child++;
        if (!likelier(&heap[child], &moving)) break;
        heap[root] = heap[child];
    }
    heap[root] = moving;
}

static double total_weight(const Candidate *candidates, size_t count) {
    double total = 0;
    for (size_t i = 0; i < count; i++) total += candidates[i].weight;
    return total;
}

/* Moves the likeliest of the first `left` candidates to place left - 1, as heapsort does. */
static void heap_pop(Candidate *heap, size_t left) {
    const Candidate likeliest = heap[0];
    heap[0] = heap[left - 1];
    heap_sift(heap, left - 1, 0);
    heap[left - 1] = likeliest;
}

/* Reorders the candidates so that those which both cuts leave stand last, the likeliest at the very end;
 * returns how many they are. */
static size_t cut(Candidate *candidates, size_t count, size_t top_k, float top_p) {
    for (size_t root = count / 2; root-- > 0;) heap_sift(candidates, count, root);
    /* top_p is a share of what top_k leaves, so that those are popped first; else one by one, as needed. */
    size_t popped = 0;
    if (top_k < count)
        while (popped < top_k) heap_pop(candidates, count - popped++);
    const size_t most = popped ? popped : count;
    if (!(top_p < 1)) return most;

    const double total = total_weight(candidates + count - most, most);
    double sum = 0;
    for (size_t kept = 0; kept < most;) {
        if (kept == popped) heap_pop(candidates, count - popped++);
        sum += candidates[count - 1 - kept++].weight;
        /* Compared in float, the precision in which top_p comes: one of ten equal tokens does reach 0.1. */
        if ((float)(sum / total) >= top_p) return kept;
    }
    return most;
}

/* The sum of weights at which a token is picked. A uniform of 0 stands for all from there to 2^-53: its middle is
 * taken, else it would give the first token, however unlikely. */
static double share_of(double uniform, double total) {
    return fmax(uniform, 0x1p-54) * total;
}

/* The first token at which the sum of weights passes its share `uniform` of the total; so never one of
 * weight 0. */
static uint32_t pick_candidate(const Candidate *candidates, size_t count, double uniform) {
    const double share = share_of(uniform, total_weight(candidates, count));
    uint32_t picked = candidates[0].token;
    double sum = 0;
    for (size_t i = 0; i < count && sum <= share; i++) {
        sum += candidates[i].weight;
        picked = candidates[i].token;
    }
    return picked;
}

/* The same over all tokens, first by the blocks' sums, then within the block that passes the share. What
 * rounding loses between the two is made up by the block's last token that has a weight. */
static uint32_t pick_token(const float *weights, const float *sums, size_t V, double uniform) {
    const size_t blocks = (V + SAMPLE_BLOCK - 1) / SAMPLE_BLOCK;
    double total = 0, sum = 0;
    for (size_t b = 0; b < blocks; b++) total += (double)sums[b];
    const double share = share_of(uniform, total);
    size_t picked = 0, block = 0, last = 0;
    for (; block < blocks; block++) {
        if (!(sums[block] > 0)) continue;
        last = block;
        if (sum + (double)sums[block] > share) break;
        sum += (double)sums[block];
    }
    const size_t start = last * SAMPLE_BLOCK, end = V - start < SAMPLE_BLOCK ? V : start + SAMPLE_BLOCK;
    if (block == blocks) sum -= (double)sums[last];
    for (size_t i = start; i < end; i++) {
        if (!(weights[i] > 0)) continue;
        picked = i, sum += (double)weights[i];
        if (sum > share) break;
    }
    return (uint32_t)picked;
}

/* work: weights (V), then sums of blocks. */
static size_t work_floats(size_t V) {
    return V + (V + SAMPLE_BLOCK - 1) / SAMPLE_BLOCK;
}

static uint32_t sample_with(float *work, const float *logits, size_t V, const SampleSettings *settings,
                            double uniform) {
    const CpuKernels *kernels = SIMD_PICK(cpu_kernels);
    const float largest = kernels->largest(logits, V);
    if (!(largest > -INFINITY)) return 0;
    if (!(settings->temperature > 0)) {
        size_t likeliest = 0;
        while (!(logits[likeliest] == largest)) likeliest++;
        return (uint32_t)likeliest;
    }
    float *weights = work, *sums = work + V;
    kernels->sample_weights(weights, sums, logits, V, largest, settings->temperature);
    const bool cut_k = settings->top_k > 0 && (size_t)settings->top_k < V, cut_p = settings->top_p < 1;
    if (!cut_k && !cut_p) return pick_token(weights, sums, V, uniform);

    Candidate *candidates = xmalloc(V * sizeof *candidates);
    size_t count = 0;
    for (size_t i = 0; i < V; i++)
        if (logits[i] > -INFINITY) /* NaN compares false, too */
            candidates[count++] = (Candidate){logits[i], (uint32_t)i, (double)weights[i]};
    const size_t top_k = cut_k ? (size_t)settings->top_k : count;
    const size_t kept = cut(candidates, count, top_k, settings->top_p);
    const uint32_t token = pick_candidate(candidates + count - kept, kept, uniform);
    free(candidates);
    return token;
}

uint32_t sample_token(const float *logits, size_t V, const SampleSettings *settings, double uniform) {
    float *work = xmalloc(work_floats(V) * sizeof *work);
    const uint32_t token = sample_with(work, logits, V, settings, uniform);
    free(work);
    return token;
}

/* ---- many sequences ---- */

static bool all_finite(const float *logits, size_t V) {
    uint32_t wrong = 0; /* as wide as a logit: with a bool, vector instructions mostly pack and unpack */
    for (size_t i = 0; i < V; i++) wrong |= !(fabsf(logits[i]) <= FLT_MAX); /* true for NaN */
    return !wrong;
}

/* 53 bits of a random block, in [0, 1), of which sequence and position are the address. */
static double uniform_at(uint64_t seed, uint64_t sequence, uint64_t position) {
    const Philox block = philox(mix64(seed, sequence), position, 0);
    const uint64_t bits = block.word[0] | (uint64_t)block.word[1] << 32;
    return (double)(bits >> 11) * 0x1p-53;
}

/* Copies the newest `count` of each sequence's `length` tokens: from (n, stride) to (n, count). */
static void copy_newest(int32_t *to, const int32_t *from, size_t n, size_t stride, size_t length,
                        size_t count) {
    for (size_t i = 0; i < n; i++)
        memcpy(to + i * count, from + i * stride + length - count, count * sizeof *to);
}

bool generate(Gpt *gpt, const uint32_t *prompt, size_t prompt_tokens, size_t n, uint64_t first_sequence,
              size_t max_tokens, uint32_t end_token, const SampleSettings *settings, GenerateToken *token,
              void *user) {
    const GptConfig *config = &gpt_setup(gpt)->config;
    const size_t T = config->ctx, V = config->vocab;
    const size_t most = T > 1 ? T - 1 : 1, half = T > 1 ? T / 2 : 1;
    size_t length = prompt_tokens < most ? prompt_tokens : most; /* tokens a sequence's next logits see */

    int32_t *window = xmalloc(n * (T + 1) * sizeof *window); /* (n, T + 1): those tokens and the new one */
    int32_t *fresh = xmalloc(n * T * sizeof *fresh); /* (n, 1 .. T): what the cache does not hold yet */
    float *work = xmalloc(n * work_floats(V) *
                          sizeof *work); /* of each sequence, as they are sampled at once */
    uint32_t *next = xmalloc(n * sizeof *next);
    bool *ended = xcalloc(n, sizeof *ended);
    for (size_t i = 0; i < n; i++)
        for (size_t t = 0; t < length; t++)
            window[i * (T + 1) + t] = (int32_t)prompt[prompt_tokens - length + t];

    size_t unread = length, writing = n;
    bool finite = true;
    gpt_cache_reset(gpt);
    for (size_t position = 0; position < max_tokens && writing > 0 && !stop_requested(); position++) {
        copy_newest(fresh, window, n, T + 1, length, unread);
        const float *logits = gpt_cache_extend(gpt, fresh, n, unread); /* (n, V) */
#pragma omp parallel for schedule(dynamic) reduction(&& : finite) if (n > 1)
        for (size_t i = 0; i < n; i++) {
            const float *of_sequence = logits + i * V;
            /* A sequence that has ended keeps its place in the batch; what it is fed reaches no other. */
            next[i] = end_token;
            if (ended[i]) continue;
            finite = finite && all_finite(of_sequence, V);
            if (finite)
                next[i] = sample_with(work + i * work_floats(V), of_sequence, V, settings,
                                      uniform_at(settings->seed, first_sequence + i, position));
        }
        if (!finite) break;
        for (size_t i = 0; i < n; i++) {
            window[i * (T + 1) + length] = (int32_t)next[i];
            if (ended[i]) continue;
            token(user, i, next[i]);
            ended[i] = next[i] == end_token;
            writing -= ended[i];
        }
        length++, unread = 1;
        if (length > T) {
            for (size_t i = 0; i < n; i++)
                memmove(window + i * (T + 1), window + i * (T + 1) + length - half, half * sizeof *window);
            length = unread = half;
            gpt_cache_reset(gpt);
        }
    }
    free(ended);
    free(next);
    free(work);
    free(fresh);
    free(window);
    return finite && !stop_requested();
}
