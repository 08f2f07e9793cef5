/* generate.c - sampling one token exactly, and writing many sequences with a key/value cache.
 *
 * The cuts (top_k, top_p) need the likeliest tokens in order, but rarely many of the V there are: a heap
 * gives them one after another, V + m log V steps for m tokens, where a sort would take V log V for each
 * token written. */
#include "generate.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

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

/* The first token at which the sum of weights passes its share `uniform` of the total; so never one of
 * weight 0. A uniform of 0 stands for all from there to 2^-53: its middle is taken, else it would give the
 * first token, however unlikely. */
static uint32_t pick(const Candidate *candidates, size_t count, double uniform) {
    const double share = fmax(uniform, 0x1p-54) * total_weight(candidates, count);
    uint32_t picked = candidates[0].token;
    double sum = 0;
    for (size_t i = 0; i < count && sum <= share; i++) {
        sum += candidates[i].weight;
        picked = candidates[i].token;
    }
    return picked;
}

uint32_t sample_token(const float *logits, size_t V, const SampleSettings *settings, double uniform) {
    size_t likeliest = V;
    for (size_t i = 0; i < V; i++)
        if (logits[i] > -INFINITY && (likeliest == V || logits[i] > logits[likeliest])) likeliest = i;
    if (likeliest == V) return 0;
    if (!(settings->temperature > 0)) return (uint32_t)likeliest;

    const float largest = logits[likeliest];
    const double temperature = (double)settings->temperature;
    Candidate *candidates = xmalloc(V * sizeof *candidates);
    size_t count = 0;
    for (size_t i = 0; i < V; i++) {
        if (!(logits[i] > -INFINITY)) continue; /* NaN compares false, too */
        /* The likeliest have weight 1 also where their logit is +inf, and inf - inf no number. */
        const double weight = logits[i] == largest ? 1
                                                   : exp(((double)logits[i] - (double)largest) / temperature);
        candidates[count++] = (Candidate){.logit = logits[i], .token = (uint32_t)i, .weight = weight};
    }
    const size_t top_k = settings->top_k > 0 ? (size_t)settings->top_k : count;
    size_t kept = count;
    if (top_k < count || settings->top_p < 1) kept = cut(candidates, count, top_k, settings->top_p);
    const uint32_t token = pick(candidates + count - kept, kept, uniform);
    free(candidates);
    return token;
}

/* ---- many sequences ---- */

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
    float *logits = xmalloc(n * V * sizeof *logits); /* (n, V) */
    bool *ended = xcalloc(n, sizeof *ended);
    for (size_t i = 0; i < n; i++)
        for (size_t t = 0; t < length; t++)
            window[i * (T + 1) + t] = (int32_t)prompt[prompt_tokens - length + t];

    size_t unread = length, writing = n;
    gpt_cache_reset(gpt);
    for (size_t position = 0; position < max_tokens && writing > 0 && !stop_requested(); position++) {
        copy_newest(fresh, window, n, T + 1, length, unread);
        gpt_cache_extend(gpt, fresh, n, unread, logits);
        for (size_t i = 0; i < n; i++) {
            /* A sequence that has ended keeps its place in the batch; what it is fed reaches no other. */
            uint32_t next = end_token;
            if (!ended[i]) {
                next = sample_token(logits + i * V, V, settings,
                                    uniform_at(settings->seed, first_sequence + i, position));
                token(user, i, next);
                ended[i] = next == end_token;
                writing -= ended[i];
            }
            window[i * (T + 1) + length] = (int32_t)next;
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
    free(logits);
    free(fresh);
    free(window);
    return !stop_requested();
}
