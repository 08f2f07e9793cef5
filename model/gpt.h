/* gpt.h - the GPT: configuration, the table of parameters, memory, forward, backward, update.
 *
 * Use:
 *     GptSetup setup = {.config = ..., .ops = &ops_cpu, .attention = ..., .B = micro-batch, .training = true};
 *     MemoryPlan plan;  gpt_plan(&setup, &plan, &err);      what it would hold, by purpose; nothing allocated
 *     Gpt *gpt = gpt_new(&setup, &err);  gpt_init_weights(gpt, seed);
 *     each step: gpt_step_begin, gpt_forward_backward (once a micro-batch), gpt_step_end, gpt_step_state
 *
 * Pre-norm GPT with tied head: LayerNorm with bias, GELU (tanh form), biases as in GPT-2 (Radford et al.
 * 2019). Positions learned (then it is exactly GPT-2) or rotary. */
#ifndef GPT_H
#define GPT_H

#include "../attention/attention.h"
#include "ops.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum Position { POSITION_ROTARY, POSITION_LEARNED } Position;

typedef struct GptConfig {
    size_t layers, heads, channels; /* L, H, C; C a multiple of H; with rotary positions C / H even */
    size_t ctx, vocab;              /* T, V */
    Position position;
    float dropout; /* of the embedding's output and of what each block adds to the residual stream */
} GptConfig;

/* ---- the one table of parameters ---- */
enum { GPT_VOCAB_PADDING = 128 };

typedef struct Parameter {
    char name[64];        /* Hugging Face GPT-2's: "h.0.attn.c_attn.weight" */
    size_t dims;          /* 1 or 2 */
    size_t shape[2];      /* as in a checkpoint: without padding; matrices [in, out] */
    float spread;         /* initial standard deviation; 0: constant */
    float constant;       /* the initial value where spread is 0 */
    bool decay;           /* weight decay applies: matrices and embeddings */
    size_t size;          /* floats in a checkpoint: the product of shape */
    size_t offset, count; /* floats in the buffers; count >= size: rows of wte are padded */
} Parameter;

/* The table for a configuration, in network order: *count rows, to be freed; *total the buffers' floats.
 * NULL where the sizes do not fit in memory's range. */
Parameter *gpt_parameters(const GptConfig *config, size_t *count, size_t *total, Error *err);
/* Trainable numbers without padding: N of the model FLOPs. */
size_t gpt_parameter_count(const GptConfig *config);
/* Model FLOPs of training on one token: 6 N + 6 L T C (causal attention counted once). */
double gpt_flops_per_token(const GptConfig *config);
/* What a configuration must keep to (heads divide channels ...), in words. */
bool gpt_check_config(const GptConfig *config, Error *err);

/* ---- memory, by purpose ---- */
enum { MEMORY_PLAN_ROWS = 24 };
typedef struct MemoryPlan {
    struct {
        const char *purpose;
        size_t bytes;
        bool on_host; /* in the host's memory, and the device has its own: not in the total */
    } row[MEMORY_PLAN_ROWS];
    size_t rows, total; /* total: bytes of the device's memory */
} MemoryPlan;

typedef struct GptSetup {
    GptConfig config;
    const Ops *ops;
    const Attention *attention;
    Stream *stream;     /* from ops->open; outlives the Gpt */
    size_t B;           /* sequences a micro-batch holds at most */
    bool training;      /* false: no gradients, no optimizer state */
    bool deterministic; /* see AttentionShape */
    uint64_t seed;      /* of the dropout masks */
    size_t cache_B;     /* sequences that generation writes at once; 0: no generation */
} GptSetup;

/* What gpt_new will allocate. False: the shape cannot run, in words, or sizes overflow. */
bool gpt_plan(const GptSetup *setup, MemoryPlan *plan, Error *err);

typedef struct Gpt Gpt;
Gpt *gpt_new(const GptSetup *setup, Error *err);
void gpt_free(Gpt *gpt);
const GptSetup *gpt_setup(const Gpt *gpt);
const Parameter *gpt_table(const Gpt *gpt, size_t *count);

/* Normal numbers from (seed, tensor, index) alone: equal on every device. */
void gpt_init_weights(Gpt *gpt, uint64_t seed);

/* ---- tensors by row of the table, for checkpoints, ranks and tests ---- */
typedef enum GptBuffer { GPT_WEIGHTS, GPT_GRADIENTS, GPT_ADAM_M, GPT_ADAM_V } GptBuffer;
/* host: parameter.size floats (padding left out). set of GPT_WEIGHTS takes effect on the working copy too. */
void gpt_get(Gpt *gpt, GptBuffer buffer, size_t parameter, float *host);
void gpt_set(Gpt *gpt, GptBuffer buffer, size_t parameter, const float *host);
/* The whole buffer, padding and all, on the device; *count its floats. For averaging over ranks. */
float *gpt_buffer(Gpt *gpt, GptBuffer buffer, size_t *count);

/* ---- a training step ---- */
void gpt_step_begin(Gpt *gpt, uint64_t step, float lr); /* gradients and loss to zero */
/* inputs, targets (B, T) in host memory, ids below V, B at most setup's; first_sequence: index of the first
 * of them within the step, over all ranks; tokens_in_step: tokens of the whole step, by which the loss's
 * gradient is divided, so that micro-batches and ranks add up. */
void gpt_forward_backward(Gpt *gpt, const int32_t *inputs, const int32_t *targets, size_t B,
                          uint64_t first_sequence, uint64_t tokens_in_step);
/* For averaging over ranks: while the next gpt_forward_backward runs, the step's last on this rank, final_from is
 * told rows of the table, each less than the one before and at last 0: the gradients of row `first` and of all
 * after it will not change any more (on a GPU: once what is queued so far is done). */
typedef void GptFinal(void *user, size_t first);
void gpt_tell_final(Gpt *gpt, GptFinal *final_from, void *user);
/* The step's state, on the device. */
StepState *gpt_device_state(Gpt *gpt);
void gpt_step_end(Gpt *gpt, AdamW settings); /* norm, clip, skip if not finite, update */
/* From now on the passes of gpt_forward_backward and gpt_evaluate are recorded, each when it comes for the second
 * time with the same arguments, and replayed from then on, on devices that can (Ops.record_begin): the same
 * operations with less work for the host. Nothing in the setup may put marks on the stream then. */
void gpt_record(Gpt *gpt, bool on);
/* Waits; loss_sum is the step's sum of token losses on this rank. */
StepState gpt_step_state(Gpt *gpt);
/* AdamW's own count, for checkpoints. */
void gpt_set_updates(Gpt *gpt, uint64_t updates);

/* ---- held-out loss: forward only, no dropout ---- */
void gpt_evaluate_begin(Gpt *gpt);
void gpt_evaluate(Gpt *gpt, const int32_t *inputs, const int32_t *targets, size_t B);
double gpt_evaluate_sum(Gpt *gpt); /* waits; the sum of token losses since begin, nats */

/* ---- logits ---- */
/* The full forward pass: logits (B, T, V) to host memory; B at most setup's. */
void gpt_logits(Gpt *gpt, const int32_t *inputs, size_t B, float *logits);
/* With the key/value cache (setup.cache_B > 0). Appends n tokens to each of B sequences, tokens (B, n), and
 * gives the logits (B, V) after the last, in host memory of the Gpt's own: they hold until the next call of it or
 * gpt_free. n at least 1; gpt_cache_length + n must not pass ctx. */
void gpt_cache_reset(Gpt *gpt);
size_t gpt_cache_length(const Gpt *gpt);
const float *gpt_cache_extend(Gpt *gpt, const int32_t *tokens, size_t B, size_t n);

#ifdef __cplusplus
}
#endif
#endif
