/* attention.h - the contract of causal self-attention, and the list of backends.
 *
 *     S = scale * Q K^T, masked above the diagonal;  P = softmax(S);  O = P V      (Vaswani et al. 2017)
 *     lse[i] = ln sum_j exp(S[i][j])
 *     backward: delta[i] = rowsum(dO * O);  dV = P^T dO;  dP = dO V^T;  dS = P * (dP - delta);
 *               dQ = scale * dS K;  dK = scale * dS^T Q
 *
 * A backend is a value. It reads `qkv` as the projection writes it, (B, T, 3, H, D), rotary already
 * applied, and writes `out` (B, T, H, D): no permutes. One that keeps no table makes P again in the
 * backward pass from qkv and lse (Dao 2023, "FlashAttention-2"). One that `fuses_rotary` spares most of the
 * passes over q, k and their gradients that rotary positions cost as operations of their own.
 *
 * Accuracy (held by tests/test_attention.c), after FlashAttention's own tests: ref = attention in float64,
 * pt = the plain computation in the backend's precision; for out, dq, dk, dv
 *     max|ours - ref| <= 2 max|pt - ref| + 2 max|(ref + 0.3 - 0.3) - ref|
 * and lse within 1e-5 + 4 ulp on a CPU, 1e-3 + 4 ulp on a GPU. */
#ifndef ATTENTION_H
#define ATTENTION_H

#include "../common.h"

#ifdef __cplusplus
extern "C" {
#endif

/* An activation: float on a CPU, bf16 on a GPU (Ops.act_size bytes each). */
typedef void act_t;

/* Where operations are queued, with the workspace of the libraries used there; made by Ops.open. On a CPU
 * operations run at once, on the OpenMP team. */
typedef struct Stream Stream;

typedef struct AttentionShape {
    size_t B, T, H, D; /* sequences, tokens of each, heads, channels of a head */
    bool training;     /* false: no backward will be asked for */
    bool deterministic;
} AttentionShape;

typedef struct AttentionCall {
    size_t B, T, H, D;
    float scale; /* 1 / sqrt(D) */
    bool deterministic;
    bool training; /* forward: a backward will follow, so `saved` is there to be filled */
    Stream *stream;

    act_t *qkv;    /* (B, T, 3, H, D); only read, but for the queries where `rotary` is set */
    act_t *out;    /* (B, T, H, D) */
    float *lse;    /* (B, H, T) */
    void *saved;   /* saved_bytes: from this layer's forward to its backward */
    void *scratch; /* scratch_bytes: within one call */

    const act_t *d_out; /* (B, T, H, D); backward only */
    act_t *d_qkv;       /* (B, T, 3, H, D), overwritten; never qkv's own memory */

    /* Only where the backend fuses_rotary, and not in generation. Of qkv the keys have been rotated, since all
     * later queries read them, but not the queries: forward rotates them as it reads them, and writes them back
     * for the backward pass. The latter turns d_qkv's queries and keys back. The results are, to the bit, those
     * of Ops.rotary before and after. */
    bool rotary;

    /* Generation only. The T new tokens stand at positions offset .. offset + T - 1; their keys and values
     * are first written to the cache, then each new query attends to all positions up to its own. */
    size_t offset;
    act_t *kv_cache;     /* (B, cache_length, 2, H, D) */
    size_t cache_length; /* offset + T at most */
} AttentionCall;

typedef struct Attention {
    const char *name;   /* "naive", "flash" ...: what -attention takes */
    const char *device; /* "cpu" or "cuda" */
    const char *about;  /* one line for the start-up table */
    bool fuses_rotary;
    /* Whether it can run the shape; else false and a reason in words. */
    bool (*can_run)(const AttentionShape *shape, Error *reason);
    size_t (*saved_bytes)(const AttentionShape *shape);   /* kept for each layer; SIZE_MAX: overflow */
    size_t (*scratch_bytes)(const AttentionShape *shape); /* once, shared by all layers and both passes */
    void (*forward)(const AttentionCall *call);
    void (*backward)(const AttentionCall *call);
    /* out for T new queries; uses qkv, out, offset, kv_cache, cache_length, and no scratch. */
    void (*cached)(const AttentionCall *call);
} Attention;

/* All backends of this build, the best of each device first, NULL at the end. */
extern const Attention *const attention_backends[];
/* The best backend of the device whose name is `name` or begins with `name` and '_' ("flash" finds
 * flash_sm90 before flash_mma) and that can run the shape; NULL with the reason, or with the names there
 * are. */
const Attention *attention_find(const char *name, const char *device, const AttentionShape *shape,
                                Error *err);

#ifdef __cplusplus
}
#endif
#endif
