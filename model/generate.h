/* generate.h - writing text: sampling with a key/value cache, many sequences at once.
 *
 * When the cache is full (ctx tokens), it slides: the newest half of the tokens is read again from position
 * 0, for both kinds of positions, so that what a token sees is always a plain forward pass over the newest
 * ctx/2 .. ctx tokens. Knows no tokenizer: ids in, ids out. */
#ifndef GENERATE_H
#define GENERATE_H

#include "gpt.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct SampleSettings {
    float temperature; /* 0: the likeliest token */
    int top_k;         /* 0: off */
    float top_p;       /* 1: off */
    uint64_t seed;
} SampleSettings;

/* One token from logits (V): softmax of logits / temperature with the maximum subtracted, cut to the top_k
 * likeliest, then to the smallest set whose probability reaches top_p; ties to the lower id. `uniform` in
 * [0, 1) picks. Logits that are not finite: -inf is never picked, NaN neither; all of them so: id 0. */
uint32_t sample_token(const float *logits, size_t V, const SampleSettings *settings, double uniform);

/* Called for each token of each sequence as it is made (so that text can be shown as it comes); the last of
 * a sequence that ends is end_token. */
typedef void GenerateToken(void *user, size_t sequence, uint32_t token);

/* Writes n <= cache_B sequences at once, each after the same prompt (at least 1 token; of more than ctx - 1
 * tokens the newest are used), until end_token or max_tokens new ones. Sequence i's random numbers come
 * from (seed, first_sequence + i, position) alone: the same whatever n. Returns false where a stop was
 * asked for, or where a sequence's logits are not finite, so that there is nothing to choose from. */
bool generate(Gpt *gpt, const uint32_t *prompt, size_t prompt_tokens, size_t n, uint64_t first_sequence,
              size_t max_tokens, uint32_t end_token, const SampleSettings *settings, GenerateToken *token,
              void *user);

#ifdef __cplusplus
}
#endif
#endif
