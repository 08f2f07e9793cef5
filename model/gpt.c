/* gpt.c - the GPT, whole: its table of parameters, the memory it lives in, and each layer's forward and
 * backward side by side, in network order. It is written in the operations of ops.h and knows no device.
 *
 * Letters: B sequences, T tokens of each, C channels, H heads, D = C / H, V vocabulary, L layers; rows are
 * the B * T tokens. d_x is the gradient of the loss with respect to x. */
#include "gpt.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ==== the one table of parameters ====
 * A row: field, Hugging Face's name, rows, columns (0: a vector), initial value. Everything else (memory,
 * initialisation, optimizer, averaging, checkpoints, tests) follows from it; adding a tensor is one row.
 * normal(s): standard deviation s; constant(c). Residual projections start smaller, by 1/sqrt(2 L). */
#define PARAMETERS_BEFORE(X)                  \
    X(wte, "wte.weight", V, C, normal(0.02f)) \
    X(wpe, "wpe.weight", learned_T, C, normal(0.02f))

#define PARAMETERS_OF_LAYER(X)                                 \
    X(norm1_gain, "ln_1.weight", C, 0, constant(1.0f))         \
    X(norm1_bias, "ln_1.bias", C, 0, constant(0.0f))           \
    X(qkv_w, "attn.c_attn.weight", C, 3 * C, normal(0.02f))    \
    X(qkv_b, "attn.c_attn.bias", 3 * C, 0, constant(0.0f))     \
    X(proj_w, "attn.c_proj.weight", C, C, normal(residual))    \
    X(proj_b, "attn.c_proj.bias", C, 0, constant(0.0f))        \
    X(norm2_gain, "ln_2.weight", C, 0, constant(1.0f))         \
    X(norm2_bias, "ln_2.bias", C, 0, constant(0.0f))           \
    X(up_w, "mlp.c_fc.weight", C, 4 * C, normal(0.02f))        \
    X(up_b, "mlp.c_fc.bias", 4 * C, 0, constant(0.0f))         \
    X(down_w, "mlp.c_proj.weight", 4 * C, C, normal(residual)) \
    X(down_b, "mlp.c_proj.bias", C, 0, constant(0.0f))

#define PARAMETERS_AFTER(X)                           \
    X(norm_gain, "ln_f.weight", C, 0, constant(1.0f)) \
    X(norm_bias, "ln_f.bias", C, 0, constant(0.0f))

/* The same rows as fields: each holds its tensor's row in the table. */
#define AS_FIELD(field, name, rows, columns, initial) size_t field;
typedef struct LayerParameters {
    PARAMETERS_OF_LAYER(AS_FIELD)
} LayerParameters;
typedef struct ModelParameters {
    PARAMETERS_BEFORE(AS_FIELD)
    PARAMETERS_AFTER(AS_FIELD)
} ModelParameters;
#undef AS_FIELD

#define COUNT_ONE(field, name, rows, columns, initial) +1
enum {
    BEFORE_COUNT = PARAMETERS_BEFORE(COUNT_ONE),
    LAYER_COUNT = PARAMETERS_OF_LAYER(COUNT_ONE),
    AFTER_COUNT = PARAMETERS_AFTER(COUNT_ONE)
};
#undef COUNT_ONE

enum {
    ALIGN_FLOATS = 64, /* tensors start on 256 bytes in fp32, 128 in bf16 */
    ALIGN_BYTES = 256, /* buffers within a purpose's memory */
    CACHE_CHUNK = 64,  /* tokens a sequence that gpt_cache_extend takes through the layers at once */
    LOGIT_ROWS = 16,   /* rows that gpt_logits asks of head_logits at once */
    MAX_LAYERS = 1024
};

typedef struct Initial {
    float spread, constant;
} Initial;
static Initial normal(float spread) {
    return (Initial){.spread = spread};
}
static Initial constant(float value) {
    return (Initial){.constant = value};
}

bool gpt_check_config(const GptConfig *config, Error *err) {
    const size_t L = config->layers, H = config->heads, C = config->channels;
    if (L < 1 || L > MAX_LAYERS)
        return error_set(err, "%zu layers: from 1 to %d are possible; change -layers", L, MAX_LAYERS);
    if (H < 1 || C < 1 || C % H != 0)
        return error_set(
            err, "%zu channels do not divide into %zu heads: -channels must be a multiple of -heads", C, H);
    if (config->position == POSITION_ROTARY && (C / H) % 2 != 0)
        return error_set(err,
                         "a head of %zu channels is odd, rotary positions need an even number: change "
                         "-channels or -heads, or use -position learned",
                         C / H);
    if (config->ctx < 1) return error_set(err, "a context of 0 tokens: -ctx must be at least 1");
    if (config->ctx > INT32_MAX || C > INT32_MAX)
        return error_set(err,
                         "a context of %zu tokens and %zu channels: neither -ctx nor -channels can pass %d",
                         config->ctx, C, INT32_MAX);
    if (config->vocab < 2 || config->vocab > 1u << 24)
        return error_set(err, "a vocabulary of %zu: from 2 to %u are possible; change -vocab", config->vocab,
                         1u << 24);
    if (!(config->dropout >= 0.0f && config->dropout < 1.0f))
        return error_set(err, "dropout %g: -dropout must be at least 0 and below 1", (double)config->dropout);
    return true;
}

static void table_add(Parameter *row, const char *prefix, const char *name, size_t rows, size_t columns,
                      Initial initial) {
    *row = (Parameter){.dims = columns ? 2 : 1,
                       .shape = {rows, columns ? columns : 1},
                       .spread = initial.spread,
                       .constant = initial.constant,
                       .decay = columns != 0};
    snprintf(row->name, sizeof row->name, "%s%s", prefix, name);
}

/* Sizes and offsets; false where they pass size_t. wte's rows are padded, so that a GPU's matrix products
 * over the vocabulary stay aligned; the padding is zero, takes part in nothing, and is never saved. */
static bool table_place(Parameter *table, size_t count, size_t wte, size_t *total) {
    size_t offset = 0;
    bool fits = true;
    for (size_t i = 0; i < count; i++) {
        Parameter *row = &table[i];
        size_t rows = row->shape[0], space = 0;
        if (i == wte) rows = (rows + GPT_VOCAB_PADDING - 1) / GPT_VOCAB_PADDING * GPT_VOCAB_PADDING;
        fits = size_mul(row->shape[0], row->shape[1], &row->size) && fits;
        fits = size_mul(rows, row->shape[1], &row->count) && fits;
        fits = size_add(row->count, ALIGN_FLOATS - 1, &space) && fits;
        row->offset = offset;
        fits = size_add(offset, space / ALIGN_FLOATS * ALIGN_FLOATS, &offset) && fits;
    }
    *total = offset;
    return fits;
}

/* With model and layers not NULL, also notes which row each field is. wpe is there only where it is used. */
static Parameter *make_table(const GptConfig *config, ModelParameters *model, LayerParameters *layers,
                             size_t *count, size_t *total, Error *err) {
    if (!gpt_check_config(config, err)) return NULL;
    const size_t L = config->layers, C = config->channels, V = config->vocab;
    const size_t learned_T = config->position == POSITION_LEARNED ? config->ctx : 0;
    const float residual = 0.02f / sqrtf(2.0f * (float)L);
    Parameter *table = (Parameter *)xcalloc(BEFORE_COUNT + L * LAYER_COUNT + AFTER_COUNT, sizeof *table);
    size_t n = 0;

#define ADD_TO(target, prefix, field, name, rows, columns, initial)   \
    if ((rows) > 0) {                                                 \
        if (target) (target)->field = n;                              \
        table_add(&table[n++], prefix, name, rows, columns, initial); \
    }
#define ADD_TO_MODEL(field, name, rows, columns, initial) \
    ADD_TO(model, "", field, name, rows, columns, initial)
#define ADD_TO_LAYER(field, name, rows, columns, initial) \
    ADD_TO(layer, prefix, field, name, rows, columns, initial)
    PARAMETERS_BEFORE(ADD_TO_MODEL)
    for (size_t l = 0; l < L; l++) {
        LayerParameters *layer = layers ? &layers[l] : NULL;
        char prefix[32];
        snprintf(prefix, sizeof prefix, "h.%zu.", l);
        PARAMETERS_OF_LAYER(ADD_TO_LAYER)
    }
    PARAMETERS_AFTER(ADD_TO_MODEL)
#undef ADD_TO_LAYER
#undef ADD_TO_MODEL
#undef ADD_TO

    *count = n;
    if (!table_place(table, n, 0, total)) {
        free(table);
        error_set(err,
                  "a model of %zu layers, %zu channels, vocabulary %zu and context %zu has more parameters "
                  "than memory can be addressed: lower -layers or -channels",
                  L, C, V, config->ctx);
        return NULL;
    }
    return table;
}

Parameter *gpt_parameters(const GptConfig *config, size_t *count, size_t *total, Error *err) {
    return make_table(config, NULL, NULL, count, total, err);
}

size_t gpt_parameter_count(const GptConfig *config) {
    size_t count = 0, total = 0, sum = 0;
    Parameter *table = gpt_parameters(config, &count, &total, NULL);
    if (!table) return 0;
    for (size_t i = 0; i < count; i++) sum += table[i].size;
    free(table);
    return sum;
}

double gpt_flops_per_token(const GptConfig *config) {
    return 6.0 * (double)gpt_parameter_count(config) +
           6.0 * (double)config->layers * (double)config->ctx * (double)config->channels;
}

/* ==== memory ==== */
/* What forward leaves for backward, of one layer. Where no backward follows, all layers share one. */
typedef struct LayerActivations {
    act_t *x1;             /* (B, T, C) the residual stream as it enters the attention block */
    act_t *normed1;        /* (B, T, C) */
    float *mean1, *rstd1;  /* (B, T) */
    act_t *qkv;            /* (B, T, 3, H, D) */
    act_t *attended;       /* (B, T, H, D) */
    float *lse;            /* (B, H, T) */
    void *attention_saved; /* what the attention backend keeps */
    act_t *x2;             /* (B, T, C) the residual stream as it enters the MLP block */
    act_t *normed2;        /* (B, T, C) */
    float *mean2, *rstd2;  /* (B, T) */
    act_t *pre;            /* (B, T, 4C) before GELU */
    act_t *gelu;           /* (B, T, 4C) after it */
} LayerActivations;

typedef enum Purpose {
    FOR_WEIGHTS,
    FOR_WORK,
    FOR_GRADIENTS,
    FOR_ADAM,
    FOR_ACTIVATIONS,
    FOR_ATTENTION_SAVED,
    FOR_ATTENTION_SCRATCH,
    FOR_ACTIVATION_GRADIENTS,
    FOR_HEAD,
    FOR_CACHE,
    FOR_GENERATION,
    FOR_HOST_LOGITS, /* the one that is in the host's memory */
    FOR_TOKENS,
    PURPOSES
} Purpose;

static const char *const purpose_names[PURPOSES] = {
    [FOR_WEIGHTS] = "weights (fp32)",
    [FOR_WORK] = "weights (working copy)",
    [FOR_GRADIENTS] = "gradients",
    [FOR_ADAM] = "AdamW moments",
    [FOR_ACTIVATIONS] = "activations",
    [FOR_ATTENTION_SAVED] = "attention, kept for backward",
    [FOR_ATTENTION_SCRATCH] = "attention, scratch",
    [FOR_ACTIVATION_GRADIENTS] = "gradients of activations",
    [FOR_HEAD] = "head: a chunk of logits",
    [FOR_CACHE] = "generation: key/value cache",
    [FOR_GENERATION] = "generation: activations",
    [FOR_HOST_LOGITS] = "generation: logits to sample from",
    [FOR_TOKENS] = "tokens and step state",
};

/* One allocation a purpose. Laid out twice by the same code: with base NULL to measure, then for real. */
typedef struct Arena {
    uint8_t *base;
    size_t used; /* SIZE_MAX: more than can be addressed */
} Arena;

/* One pass over a micro-batch. */
typedef struct Pass {
    size_t B, rows;     /* rows = B * T */
    bool training;      /* keep what backward needs; dropout on */
    uint64_t first_row; /* its first token's place within the step, for the dropout masks */
    float grad_scale;   /* of the loss: one over the tokens of the step */
} Pass;

/* A pass as the device has recorded it (Ops.record_begin), to be replayed for the same arguments. A run has one for
 * each of a step's micro-batches, and two for evaluations; of more, the rest is queued as ever. */
enum { MOST_RECORDINGS = 8 };
typedef struct Recording {
    Pass pass;
    void *made; /* NULL: it has come only once, or it could not be recorded */
    bool tried;
} Recording;

struct Gpt {
    GptSetup setup;
    size_t L, H, C, D, T, V; /* of setup.config */
    Parameter *table;
    size_t table_count, table_floats;
    ParamSpan *spans; /* the table as the optimizer sees it */
    ModelParameters model;
    LayerParameters *layers;

    Arena arena[PURPOSES];
    float *weights, *gradients, *adam_m, *adam_v; /* (table_floats) each, in the table's order */
    act_t *work;                                  /* the weights that forward and backward read */
    StepState *state, *eval_state;
    bool recording_on; /* gpt_record */
    Recording recordings[MOST_RECORDINGS];
    size_t n_recordings;
    int32_t *inputs, *targets; /* (B, T) */
    GptFinal *final_from;      /* for the next pass only; NULL: nobody wants to know */
    void *final_user;

    LayerActivations *acts;       /* L of them */
    act_t *branch;                /* (B, T, C) what a block is about to add to the residual stream */
    act_t *x_last;                /* (B, T, C) the residual stream after the last block */
    act_t *hidden;                /* (B, T, C) its norm: what the head reads */
    float *mean_last, *rstd_last; /* (B, T) */
    void *attention_scratch, *head_scratch;
    float *logits; /* (LOGIT_ROWS or cache_B, V) */

    act_t *d_x;        /* (B, T, C) gradient of the residual stream, from the last block to the first */
    act_t *d_branch;   /* (B, T, C) the same after a dropout mask; unused without dropout */
    act_t *d_normed;   /* (B, T, C) */
    act_t *d_qkv;      /* (B, T, 3, H, D) */
    act_t *d_attended; /* (B, T, H, D) */
    act_t *d_pre;      /* (B, T, 4C) */

    act_t **kv_cache;            /* L times (cache_B, T, 2, H, D) */
    size_t cache_used;           /* positions of it that hold something */
    LayerActivations cache_acts; /* rows: cache_B * CACHE_CHUNK at most */
    act_t *cache_branch, *cache_hidden;
    int32_t *cache_tokens;
    float *host_logits; /* (cache_B, V), in host memory: what gpt_cache_extend returns */
};

static void *take(Gpt *gpt, Purpose purpose, size_t count, size_t element) {
    Arena *arena = &gpt->arena[purpose];
    size_t bytes = 0, end = 0;
    if (!size_mul(count, element, &bytes) || !size_add(arena->used, bytes, &end) ||
        !size_add(end, ALIGN_BYTES - 1, &end)) {
        arena->used = SIZE_MAX;
        return NULL;
    }
    void *memory = arena->base ? arena->base + arena->used : NULL;
    arena->used = end / ALIGN_BYTES * ALIGN_BYTES;
    return memory;
}

/* rows * columns act_t; a product that overflows makes the arena's size SIZE_MAX. */
static act_t *take_acts(Gpt *gpt, Purpose purpose, size_t rows, size_t columns) {
    size_t count = 0;
    size_mul(rows, columns, &count);
    return take(gpt, purpose, count, gpt->setup.ops->act_size);
}
static float *take_floats(Gpt *gpt, Purpose purpose, size_t count) {
    return (float *)take(gpt, purpose, count, sizeof(float));
}

static AttentionShape attention_shape(const Gpt *gpt) {
    return (AttentionShape){.B = gpt->setup.B,
                            .T = gpt->T,
                            .H = gpt->H,
                            .D = gpt->D,
                            .training = gpt->setup.training,
                            .deterministic = gpt->setup.deterministic};
}

static void lay_out_parameters(Gpt *gpt) {
    const size_t n = gpt->table_floats;
    gpt->weights = take_floats(gpt, FOR_WEIGHTS, n);
    gpt->work = gpt->setup.ops->act_size == sizeof(float) ? (act_t *)gpt->weights
                                                          : take_acts(gpt, FOR_WORK, n, 1);
    if (!gpt->setup.training) return;
    gpt->gradients = take_floats(gpt, FOR_GRADIENTS, n);
    gpt->adam_m = take_floats(gpt, FOR_ADAM, n);
    gpt->adam_v = take_floats(gpt, FOR_ADAM, n);
}

static void lay_out_activations(Gpt *gpt) {
    const size_t C = gpt->C, H = gpt->H;
    size_t rows = 0, lse = 0;
    size_mul(gpt->setup.B, gpt->T, &rows);
    size_mul(rows, H, &lse);
    const AttentionShape shape = attention_shape(gpt);
    const Attention *attention = gpt->setup.attention;
    for (size_t l = 0; l < gpt->L; l++) {
        LayerActivations *a = &gpt->acts[l];
        if (l > 0 && !gpt->setup.training) {
            *a = gpt->acts[0];
            continue;
        }
        a->x1 = take_acts(gpt, FOR_ACTIVATIONS, rows, C);
        a->normed1 = take_acts(gpt, FOR_ACTIVATIONS, rows, C);
        a->mean1 = take_floats(gpt, FOR_ACTIVATIONS, rows),
        a->rstd1 = take_floats(gpt, FOR_ACTIVATIONS, rows);
        a->qkv = take_acts(gpt, FOR_ACTIVATIONS, rows, 3 * C);
        a->attended = take_acts(gpt, FOR_ACTIVATIONS, rows, C);
        a->lse = take_floats(gpt, FOR_ACTIVATIONS, lse);
        a->attention_saved = take(gpt, FOR_ATTENTION_SAVED, attention->saved_bytes(&shape), 1);
        a->x2 = take_acts(gpt, FOR_ACTIVATIONS, rows, C);
        a->normed2 = take_acts(gpt, FOR_ACTIVATIONS, rows, C);
        a->mean2 = take_floats(gpt, FOR_ACTIVATIONS, rows),
        a->rstd2 = take_floats(gpt, FOR_ACTIVATIONS, rows);
        a->pre = take_acts(gpt, FOR_ACTIVATIONS, rows, 4 * C);
        a->gelu = take_acts(gpt, FOR_ACTIVATIONS, rows, 4 * C);
    }
    gpt->branch = take_acts(gpt, FOR_ACTIVATIONS, rows, C);
    gpt->x_last = take_acts(gpt, FOR_ACTIVATIONS, rows, C);
    gpt->hidden = take_acts(gpt, FOR_ACTIVATIONS, rows, C);
    gpt->mean_last = take_floats(gpt, FOR_ACTIVATIONS, rows),
    gpt->rstd_last = take_floats(gpt, FOR_ACTIVATIONS, rows);

    gpt->attention_scratch = take(gpt, FOR_ATTENTION_SCRATCH, attention->scratch_bytes(&shape), 1);
    gpt->head_scratch = take(gpt, FOR_HEAD, gpt->setup.ops->head_scratch_bytes(rows, C, gpt->V), 1);
    const size_t logit_rows = gpt->setup.cache_B > LOGIT_ROWS ? gpt->setup.cache_B : LOGIT_ROWS;
    size_t logits = 0;
    size_mul(logit_rows, gpt->V, &logits);
    gpt->logits = take_floats(gpt, FOR_HEAD, logits);
    if (!gpt->setup.training) return;

    gpt->d_x = take_acts(gpt, FOR_ACTIVATION_GRADIENTS, rows, C);
    gpt->d_branch = gpt->setup.config.dropout > 0 ? take_acts(gpt, FOR_ACTIVATION_GRADIENTS, rows, C) : NULL;
    gpt->d_normed = take_acts(gpt, FOR_ACTIVATION_GRADIENTS, rows, C);
    gpt->d_qkv = take_acts(gpt, FOR_ACTIVATION_GRADIENTS, rows, 3 * C);
    gpt->d_attended = take_acts(gpt, FOR_ACTIVATION_GRADIENTS, rows, C);
    gpt->d_pre = take_acts(gpt, FOR_ACTIVATION_GRADIENTS, rows, 4 * C);
}

static void lay_out_generation(Gpt *gpt) {
    if (gpt->setup.cache_B == 0) return;
    const size_t C = gpt->C, chunk = gpt->T < CACHE_CHUNK ? gpt->T : CACHE_CHUNK;
    size_t positions = 0, rows = 0;
    size_mul(gpt->setup.cache_B, gpt->T, &positions);
    size_mul(gpt->setup.cache_B, chunk, &rows);
    for (size_t l = 0; l < gpt->L; l++) gpt->kv_cache[l] = take_acts(gpt, FOR_CACHE, positions, 2 * C);
    LayerActivations *a = &gpt->cache_acts;
    a->x1 = take_acts(gpt, FOR_GENERATION, rows, C);
    a->normed1 = take_acts(gpt, FOR_GENERATION, rows, C);
    a->qkv = take_acts(gpt, FOR_GENERATION, rows, 3 * C);
    a->attended = take_acts(gpt, FOR_GENERATION, rows, C);
    a->gelu = take_acts(gpt, FOR_GENERATION, rows, 4 * C);
    gpt->cache_branch = take_acts(gpt, FOR_GENERATION, rows, C);
    gpt->cache_hidden = take_acts(gpt, FOR_GENERATION, rows, C);
    gpt->cache_tokens = (int32_t *)take(gpt, FOR_GENERATION, rows, sizeof(int32_t));
    size_t logits = 0;
    size_mul(gpt->setup.cache_B, gpt->V, &logits);
    gpt->host_logits = take_floats(gpt, FOR_HOST_LOGITS, logits);
}

static void lay_out(Gpt *gpt) {
    for (int p = 0; p < PURPOSES; p++) gpt->arena[p].used = 0;
    lay_out_parameters(gpt);
    lay_out_activations(gpt);
    lay_out_generation(gpt);
    size_t rows = 0;
    size_mul(gpt->setup.B, gpt->T, &rows);
    gpt->inputs = (int32_t *)take(gpt, FOR_TOKENS, rows, sizeof(int32_t));
    gpt->targets = (int32_t *)take(gpt, FOR_TOKENS, rows, sizeof(int32_t));
    gpt->state = (StepState *)take(gpt, FOR_TOKENS, 1, sizeof(StepState));
    gpt->eval_state = (StepState *)take(gpt, FOR_TOKENS, 1, sizeof(StepState));
}

/* A Gpt with its table and its arenas measured, but no device memory yet. */
static Gpt *gpt_measure(const GptSetup *setup, Error *err) {
    Gpt *gpt = (Gpt *)xcalloc(1, sizeof *gpt);
    const GptConfig *config = &setup->config;
    gpt->setup = *setup;
    if (!gpt_check_config(config, err)) return free(gpt), NULL;
    gpt->L = config->layers, gpt->H = config->heads, gpt->C = config->channels, gpt->D = gpt->C / gpt->H;
    gpt->T = config->ctx, gpt->V = config->vocab;
    gpt->layers = (LayerParameters *)xcalloc(gpt->L, sizeof *gpt->layers);
    gpt->acts = (LayerActivations *)xcalloc(gpt->L, sizeof *gpt->acts);
    gpt->kv_cache = (act_t **)xcalloc(gpt->L, sizeof *gpt->kv_cache);
    gpt->table = make_table(config, &gpt->model, gpt->layers, &gpt->table_count, &gpt->table_floats, err);
    const AttentionShape shape = attention_shape(gpt);
    if (!gpt->table || !setup->attention->can_run(&shape, err)) return gpt_free(gpt), NULL;
    gpt->spans = (ParamSpan *)xcalloc(gpt->table_count, sizeof *gpt->spans);
    for (size_t i = 0; i < gpt->table_count; i++)
        gpt->spans[i] = (ParamSpan){gpt->table[i].offset, gpt->table[i].count, gpt->table[i].decay};
    lay_out(gpt);
    return gpt;
}

static bool read_plan(const Gpt *gpt, MemoryPlan *plan, Error *err) {
    *plan = (MemoryPlan){0};
    bool fits = true;
    for (int p = 0; p < PURPOSES; p++) {
        const size_t bytes = gpt->arena[p].used;
        if (bytes == 0) continue;
        const bool on_host = p == FOR_HOST_LOGITS && gpt->setup.ops->memory != NULL;
        plan->row[plan->rows].purpose = purpose_names[p];
        plan->row[plan->rows].on_host = on_host;
        plan->row[plan->rows++].bytes = bytes;
        fits = bytes < SIZE_MAX && size_add(plan->total, on_host ? 0 : bytes, &plan->total) && fits;
    }
    return fits ||
           error_set(err,
                     "a micro-batch of %zu sequences of %zu tokens through %zu layers of %zu channels needs "
                     "more memory than can be addressed: lower -micro, -ctx, -layers or -channels",
                     gpt->setup.B, gpt->T, gpt->L, gpt->C);
}

bool gpt_plan(const GptSetup *setup, MemoryPlan *plan, Error *err) {
    Gpt *gpt = gpt_measure(setup, err);
    if (!gpt) return false;
    const bool fits = read_plan(gpt, plan, err);
    gpt_free(gpt);
    return fits;
}

Gpt *gpt_new(const GptSetup *setup, Error *err) {
    Gpt *gpt = gpt_measure(setup, err);
    MemoryPlan plan;
    if (!gpt) return NULL;
    if (!read_plan(gpt, &plan, err)) return gpt_free(gpt), NULL;
    for (int p = 0; p < PURPOSES; p++) {
        if (gpt->arena[p].used == 0) continue;
        void *(*const allocate)(Stream *, size_t, Error *) = p == FOR_HOST_LOGITS ? setup->ops->host_allocate
                                                                                  : setup->ops->allocate;
        gpt->arena[p].base = (uint8_t *)allocate(setup->stream, gpt->arena[p].used, err);
        if (!gpt->arena[p].base) {
            error_prefix(err, "no memory for %s", purpose_names[p]);
            return gpt_free(gpt), NULL;
        }
    }
    lay_out(gpt);
    return gpt;
}

void gpt_free(Gpt *gpt) {
    if (!gpt) return;
    for (size_t i = 0; i < gpt->n_recordings; i++)
        if (gpt->recordings[i].made)
            gpt->setup.ops->release_recording(gpt->setup.stream, gpt->recordings[i].made);
    for (int p = 0; p < PURPOSES; p++) {
        void (*const release)(Stream *, void *) = p == FOR_HOST_LOGITS ? gpt->setup.ops->host_release
                                                                       : gpt->setup.ops->release;
        if (gpt->arena[p].base) release(gpt->setup.stream, gpt->arena[p].base);
    }
    free(gpt->table), free(gpt->spans), free(gpt->layers), free(gpt->acts), free(gpt->kv_cache);
    free(gpt);
}

const GptSetup *gpt_setup(const Gpt *gpt) {
    return &gpt->setup;
}
const Parameter *gpt_table(const Gpt *gpt, size_t *count) {
    *count = gpt->table_count;
    return gpt->table;
}

/* ==== tensors by row of the table ==== */
static float *buffer_start(Gpt *gpt, GptBuffer buffer) {
    float *const starts[] = {[GPT_WEIGHTS] = gpt->weights,
                             [GPT_GRADIENTS] = gpt->gradients,
                             [GPT_ADAM_M] = gpt->adam_m,
                             [GPT_ADAM_V] = gpt->adam_v};
    return starts[buffer];
}

float *gpt_buffer(Gpt *gpt, GptBuffer buffer, size_t *count) {
    *count = gpt->table_floats;
    return buffer_start(gpt, buffer);
}

void gpt_get(Gpt *gpt, GptBuffer buffer, size_t parameter, float *host) {
    const Parameter *row = &gpt->table[parameter];
    gpt->setup.ops->download(gpt->setup.stream, host, buffer_start(gpt, buffer) + row->offset,
                             row->size * sizeof(float));
}

static act_t *weight(const Gpt *gpt, size_t parameter) {
    return (uint8_t *)gpt->work + gpt->table[parameter].offset * gpt->setup.ops->act_size;
}
static float *gradient(const Gpt *gpt, size_t parameter) {
    return gpt->gradients + gpt->table[parameter].offset;
}

void gpt_set(Gpt *gpt, GptBuffer buffer, size_t parameter, const float *host) {
    const Ops *ops = gpt->setup.ops;
    const Parameter *row = &gpt->table[parameter];
    float *device = buffer_start(gpt, buffer) + row->offset;
    ops->upload(gpt->setup.stream, device, host, row->size * sizeof(float));
    if (buffer == GPT_WEIGHTS && gpt->work != gpt->weights)
        ops->weights_to_work(gpt->setup.stream, weight(gpt, parameter), device, row->size);
}

void gpt_init_weights(Gpt *gpt, uint64_t seed) {
    for (size_t i = 0; i < gpt->table_count; i++) {
        const Parameter *row = &gpt->table[i];
        float *host = (float *)xmalloc(row->size * sizeof *host);
        Rng rng = rng_start(seed, i);
        for (size_t k = 0; k < row->size; k++)
            host[k] = row->spread > 0 ? row->spread * (float)rng_normal(&rng) : row->constant;
        gpt_set(gpt, GPT_WEIGHTS, i, host);
        free(host);
    }
}

/* ==== the network, layer by layer: forward, and beside it backward ==== */

/* The places that draw dropout masks, counted in network order. */
static uint32_t embedding_site(void) {
    return 0;
}
static uint32_t attention_site(size_t layer) {
    return (uint32_t)(1 + 2 * layer);
}
static uint32_t mlp_site(size_t layer) {
    return (uint32_t)(2 + 2 * layer);
}

static Dropout dropout_at(const Gpt *gpt, const Pass *pass, uint32_t site) {
    return (Dropout){.rate = pass->training ? gpt->setup.config.dropout : 0.0f,
                     .seed = gpt->setup.seed,
                     .site = site,
                     .first_row = pass->first_row,
                     .state = gpt->state};
}
/* The gradient of what a block added: d_x itself where nothing was dropped. */
static const act_t *branch_gradient(const Gpt *gpt) {
    return gpt->d_branch ? gpt->d_branch : gpt->d_x;
}

/* In backward order: from this row of the table on, gradients are final (gpt_tell_final). */
static void final_from(Gpt *gpt, size_t row) {
    if (gpt->final_from) gpt->final_from(gpt->final_user, row);
}

/* -- tokens to vectors -- */
static void embedding_forward(Gpt *gpt, const Pass *pass) {
    const act_t *wpe = gpt->setup.config.position == POSITION_LEARNED ? weight(gpt, gpt->model.wpe) : NULL;
    gpt->setup.ops->embedding_forward(gpt->setup.stream, gpt->acts[0].x1, gpt->inputs,
                                      weight(gpt, gpt->model.wte), wpe, pass->B, gpt->T, gpt->C, 0,
                                      dropout_at(gpt, pass, embedding_site()));
}
static void embedding_backward(Gpt *gpt, const Pass *pass) {
    float *d_wpe = gpt->setup.config.position == POSITION_LEARNED ? gradient(gpt, gpt->model.wpe) : NULL;
    gpt->setup.ops->embedding_backward(gpt->setup.stream, gradient(gpt, gpt->model.wte), d_wpe, gpt->d_x,
                                       gpt->inputs, pass->B, gpt->T, gpt->C,
                                       dropout_at(gpt, pass, embedding_site()));
    final_from(gpt, 0);
}

/* -- attention block: x1 = x + dropout(MLP branch of the layer before); branch = proj(attention(norm(x1))) -- */
/* Whether rotary positions are attention's business, but for the rotation of the keys. */
static bool attention_rotates(const Gpt *gpt) {
    return gpt->setup.config.position == POSITION_ROTARY && gpt->setup.attention->fuses_rotary;
}
static AttentionCall attention_call(const Gpt *gpt, const Pass *pass, const LayerActivations *a) {
    return (AttentionCall){.B = pass->B,
                           .T = gpt->T,
                           .H = gpt->H,
                           .D = gpt->D,
                           .scale = 1.0f / sqrtf((float)gpt->D),
                           .deterministic = gpt->setup.deterministic,
                           .training = pass->training,
                           .stream = gpt->setup.stream,
                           .qkv = a->qkv,
                           .out = a->attended,
                           .lse = a->lse,
                           .saved = a->attention_saved,
                           .scratch = gpt->attention_scratch,
                           .rotary = attention_rotates(gpt)};
}
static void attention_block_forward(Gpt *gpt, const Pass *pass, size_t l) {
    const Ops *ops = gpt->setup.ops;
    Stream *stream = gpt->setup.stream;
    const LayerParameters *p = &gpt->layers[l];
    LayerActivations *a = &gpt->acts[l];
    const size_t rows = pass->rows, C = gpt->C;
    const bool first = l == 0; /* the embedding has written x1 already, and no branch waits to be added */
    ops->residual_norm_forward(stream, a->x1, a->normed1, a->mean1, a->rstd1,
                               first ? a->x1 : gpt->acts[l - 1].x2, first ? NULL : gpt->branch,
                               weight(gpt, p->norm1_gain), weight(gpt, p->norm1_bias), rows, C,
                               dropout_at(gpt, pass, first ? 0 : mlp_site(l - 1)));
    ops->linear_forward(stream, a->qkv, NULL, a->normed1, weight(gpt, p->qkv_w), weight(gpt, p->qkv_b), rows,
                        C, 3 * C);
    if (gpt->setup.config.position == POSITION_ROTARY)
        ops->rotary(stream, a->qkv, pass->B, gpt->T, gpt->H, gpt->D, 0, attention_rotates(gpt), false);
    const AttentionCall call = attention_call(gpt, pass, a);
    gpt->setup.attention->forward(&call);
    ops->linear_forward(stream, gpt->branch, NULL, a->attended, weight(gpt, p->proj_w),
                        weight(gpt, p->proj_b), rows, C, C);
}
static void attention_block_backward(Gpt *gpt, const Pass *pass, size_t l) {
    const Ops *ops = gpt->setup.ops;
    Stream *stream = gpt->setup.stream;
    const LayerParameters *p = &gpt->layers[l];
    const LayerActivations *a = &gpt->acts[l];
    const size_t rows = pass->rows, C = gpt->C;
    const bool first = l == 0;
    ops->linear_backward(stream, gpt->d_attended, gradient(gpt, p->proj_w), gradient(gpt, p->proj_b),
                         branch_gradient(gpt), a->attended, weight(gpt, p->proj_w), NULL, rows, C, C);
    final_from(gpt, p->proj_w);
    AttentionCall call = attention_call(gpt, pass, a);
    call.d_out = gpt->d_attended, call.d_qkv = gpt->d_qkv;
    gpt->setup.attention->backward(&call);
    if (gpt->setup.config.position == POSITION_ROTARY && !call.rotary)
        ops->rotary(stream, gpt->d_qkv, pass->B, gpt->T, gpt->H, gpt->D, 0, false, true);
    ops->linear_backward(stream, gpt->d_normed, gradient(gpt, p->qkv_w), gradient(gpt, p->qkv_b), gpt->d_qkv,
                         a->normed1, weight(gpt, p->qkv_w), NULL, rows, C, 3 * C);
    final_from(gpt, p->qkv_w);
    ops->residual_norm_backward(stream, gpt->d_x, false, first ? NULL : gpt->d_branch,
                                gradient(gpt, p->norm1_gain), gradient(gpt, p->norm1_bias), gpt->d_normed,
                                a->x1, a->mean1, a->rstd1, weight(gpt, p->norm1_gain), rows, C,
                                dropout_at(gpt, pass, first ? 0 : mlp_site(l - 1)));
    final_from(gpt, p->norm1_gain);
}

/* -- MLP block: x2 = x1 + dropout(attention branch); branch = down(GELU(up(norm(x2)))) -- */
static void mlp_block_forward(Gpt *gpt, const Pass *pass, size_t l) {
    const Ops *ops = gpt->setup.ops;
    Stream *stream = gpt->setup.stream;
    const LayerParameters *p = &gpt->layers[l];
    LayerActivations *a = &gpt->acts[l];
    const size_t rows = pass->rows, C = gpt->C;
    ops->residual_norm_forward(stream, a->x2, a->normed2, a->mean2, a->rstd2, a->x1, gpt->branch,
                               weight(gpt, p->norm2_gain), weight(gpt, p->norm2_bias), rows, C,
                               dropout_at(gpt, pass, attention_site(l)));
    act_t *pre = pass->training ? a->pre : NULL; /* backward reads it */
    ops->linear_forward(stream, pre, a->gelu, a->normed2, weight(gpt, p->up_w), weight(gpt, p->up_b), rows, C,
                        4 * C);
    ops->linear_forward(stream, gpt->branch, NULL, a->gelu, weight(gpt, p->down_w), weight(gpt, p->down_b),
                        rows, 4 * C, C);
}
static void mlp_block_backward(Gpt *gpt, const Pass *pass, size_t l) {
    const Ops *ops = gpt->setup.ops;
    Stream *stream = gpt->setup.stream;
    const LayerParameters *p = &gpt->layers[l];
    const LayerActivations *a = &gpt->acts[l];
    const size_t rows = pass->rows, C = gpt->C;
    ops->linear_backward(stream, gpt->d_pre, gradient(gpt, p->down_w), gradient(gpt, p->down_b),
                         branch_gradient(gpt), a->gelu, weight(gpt, p->down_w), a->pre, rows, 4 * C, C);
    final_from(gpt, p->down_w);
    ops->linear_backward(stream, gpt->d_normed, gradient(gpt, p->up_w), gradient(gpt, p->up_b), gpt->d_pre,
                         a->normed2, weight(gpt, p->up_w), NULL, rows, C, 4 * C);
    final_from(gpt, p->up_w);
    ops->residual_norm_backward(stream, gpt->d_x, false, gpt->d_branch, gradient(gpt, p->norm2_gain),
                                gradient(gpt, p->norm2_bias), gpt->d_normed, a->x2, a->mean2, a->rstd2,
                                weight(gpt, p->norm2_gain), rows, C,
                                dropout_at(gpt, pass, attention_site(l)));
    final_from(gpt, p->norm2_gain);
}

/* -- the last norm: hidden = norm(x2 + dropout(last MLP branch)) -- */
static void last_norm_forward(Gpt *gpt, const Pass *pass) {
    const size_t last = gpt->L - 1;
    gpt->setup.ops->residual_norm_forward(
        gpt->setup.stream, gpt->x_last, gpt->hidden, gpt->mean_last, gpt->rstd_last, gpt->acts[last].x2,
        gpt->branch, weight(gpt, gpt->model.norm_gain), weight(gpt, gpt->model.norm_bias), pass->rows, gpt->C,
        dropout_at(gpt, pass, mlp_site(last)));
}
static void last_norm_backward(Gpt *gpt, const Pass *pass) {
    gpt->setup.ops->residual_norm_backward(
        gpt->setup.stream, gpt->d_x, true, gpt->d_branch, gradient(gpt, gpt->model.norm_gain),
        gradient(gpt, gpt->model.norm_bias), gpt->d_normed, gpt->x_last, gpt->mean_last, gpt->rstd_last,
        weight(gpt, gpt->model.norm_gain), pass->rows, gpt->C, dropout_at(gpt, pass, mlp_site(gpt->L - 1)));
    final_from(gpt, gpt->model.norm_gain);
}

/* -- the head, tied to wte: the loss, and on the way d_normed (of hidden) and wte's gradient -- */
static void head_forward_backward(Gpt *gpt, const Pass *pass) {
    gpt->setup.ops->head_loss(gpt->setup.stream, gpt->state, gpt->d_normed, gradient(gpt, gpt->model.wte),
                              gpt->hidden, weight(gpt, gpt->model.wte), gpt->targets, pass->rows, gpt->C,
                              gpt->V, pass->grad_scale, gpt->head_scratch);
}
static void head_forward(Gpt *gpt, const Pass *pass) {
    gpt->setup.ops->head_loss(gpt->setup.stream, gpt->eval_state, NULL, NULL, gpt->hidden,
                              weight(gpt, gpt->model.wte), gpt->targets, pass->rows, gpt->C, gpt->V, 0.0f,
                              gpt->head_scratch);
}

/* -- all of it, up to the hidden states -- */
static void network_forward(Gpt *gpt, const Pass *pass) {
    embedding_forward(gpt, pass);
    for (size_t l = 0; l < gpt->L; l++) {
        attention_block_forward(gpt, pass, l);
        mlp_block_forward(gpt, pass, l);
    }
    last_norm_forward(gpt, pass);
}
static void network_backward(Gpt *gpt, const Pass *pass) {
    last_norm_backward(gpt, pass);
    for (size_t l = gpt->L; l-- > 0;) {
        mlp_block_backward(gpt, pass, l);
        attention_block_backward(gpt, pass, l);
    }
    embedding_backward(gpt, pass);
}

/* ==== a whole pass, and its recording ==== */
static void forward_backward(Gpt *gpt, const Pass *pass) {
    network_forward(gpt, pass);
    head_forward_backward(gpt, pass);
    network_backward(gpt, pass);
}
static void forward_only(Gpt *gpt, const Pass *pass) {
    network_forward(gpt, pass);
    head_forward(gpt, pass);
}

static bool same_pass(const Pass *a, const Pass *b) {
    return a->B == b->B && a->training == b->training && a->first_row == b->first_row &&
           a->grad_scale == b->grad_scale;
}

/* The recording of a pass, made when the pass comes for the second time; NULL where there is none. */
static void *recording_of(Gpt *gpt, const Pass *pass, void (*run)(Gpt *, const Pass *)) {
    const Ops *ops = gpt->setup.ops;
    /* Whom final_from tells, must hear it each time. */
    if (!gpt->recording_on || !ops->replay || gpt->final_from) return NULL;
    size_t i = 0;
    while (i < gpt->n_recordings && !same_pass(&gpt->recordings[i].pass, pass)) i++;
    if (i == gpt->n_recordings) {
        if (i < MOST_RECORDINGS) gpt->recordings[gpt->n_recordings++] = (Recording){.pass = *pass};
        return NULL;
    }
    Recording *recording = &gpt->recordings[i];
    if (!recording->tried && ops->record_begin(gpt->setup.stream)) {
        run(gpt, pass);
        recording->made = ops->record_end(gpt->setup.stream);
    }
    recording->tried = true;
    return recording->made;
}

static void run_pass(Gpt *gpt, const Pass *pass) {
    void (*const run)(Gpt *, const Pass *) = pass->training ? forward_backward : forward_only;
    void *recording = recording_of(gpt, pass, run);
    if (recording) gpt->setup.ops->replay(gpt->setup.stream, recording);
    else run(gpt, pass);
}

void gpt_record(Gpt *gpt, bool on) {
    gpt->recording_on = on;
}

/* ==== a training step ==== */
static void upload_tokens(Gpt *gpt, int32_t *device, const int32_t *host, size_t rows) {
    gpt->setup.ops->upload(gpt->setup.stream, device, host, rows * sizeof *host);
}

void gpt_step_begin(Gpt *gpt, uint64_t step, float lr) {
    gpt->setup.ops->begin_step(gpt->setup.stream, gpt->state, step, lr);
    gpt->setup.ops->zero(gpt->setup.stream, gpt->gradients, gpt->table_floats * sizeof(float));
}

void gpt_forward_backward(Gpt *gpt, const int32_t *inputs, const int32_t *targets, size_t B,
                          uint64_t first_sequence, uint64_t tokens_in_step) {
    const Pass pass = {.B = B,
                       .rows = B * gpt->T,
                       .training = true,
                       .first_row = first_sequence * gpt->T,
                       .grad_scale = (float)(1.0 / (double)tokens_in_step)};
    upload_tokens(gpt, gpt->inputs, inputs, pass.rows);
    upload_tokens(gpt, gpt->targets, targets, pass.rows);
    run_pass(gpt, &pass);
    gpt->final_from = NULL;
}

void gpt_tell_final(Gpt *gpt, GptFinal *call, void *user) {
    gpt->final_from = call, gpt->final_user = user;
}

StepState *gpt_device_state(Gpt *gpt) {
    return gpt->state;
}

void gpt_step_end(Gpt *gpt, AdamW settings) {
    const Ops *ops = gpt->setup.ops;
    Stream *stream = gpt->setup.stream;
    ops->gradient_norm(stream, gpt->state, gpt->gradients, gpt->spans, gpt->table_count, settings.clip);
    ops->adamw(stream, gpt->state, gpt->weights, gpt->work == gpt->weights ? NULL : gpt->work, gpt->gradients,
               gpt->adam_m, gpt->adam_v, gpt->spans, gpt->table_count, settings);
}

StepState gpt_step_state(Gpt *gpt) {
    StepState host;
    gpt->setup.ops->read_state(gpt->setup.stream, &host, gpt->state);
    return host;
}

void gpt_set_updates(Gpt *gpt, uint64_t updates) {
    StepState host = gpt_step_state(gpt);
    host.updates = updates;
    gpt->setup.ops->upload(gpt->setup.stream, gpt->state, &host, sizeof host);
}

/* ==== held-out loss ==== */
void gpt_evaluate_begin(Gpt *gpt) {
    gpt->setup.ops->begin_step(gpt->setup.stream, gpt->eval_state, 0, 0.0f);
}

void gpt_evaluate(Gpt *gpt, const int32_t *inputs, const int32_t *targets, size_t B) {
    const Pass pass = {.B = B, .rows = B * gpt->T};
    upload_tokens(gpt, gpt->inputs, inputs, pass.rows);
    upload_tokens(gpt, gpt->targets, targets, pass.rows);
    run_pass(gpt, &pass);
}

double gpt_evaluate_sum(Gpt *gpt) {
    StepState host;
    gpt->setup.ops->read_state(gpt->setup.stream, &host, gpt->eval_state);
    return host.loss_sum;
}

/* ==== logits ==== */
static const act_t *row_of(const Gpt *gpt, const act_t *x, size_t row) {
    return (const uint8_t *)x + row * gpt->C * gpt->setup.ops->act_size;
}

void gpt_logits(Gpt *gpt, const int32_t *inputs, size_t B, float *logits) {
    const Ops *ops = gpt->setup.ops;
    const Pass pass = {.B = B, .rows = B * gpt->T};
    upload_tokens(gpt, gpt->inputs, inputs, pass.rows);
    network_forward(gpt, &pass);
    for (size_t row = 0; row < pass.rows; row += LOGIT_ROWS) {
        const size_t rows = pass.rows - row < LOGIT_ROWS ? pass.rows - row : LOGIT_ROWS;
        ops->head_logits(gpt->setup.stream, gpt->logits, row_of(gpt, gpt->hidden, row), gpt->C,
                         weight(gpt, gpt->model.wte), rows, gpt->C, gpt->V);
        ops->download(gpt->setup.stream, logits + row * gpt->V, gpt->logits, rows * gpt->V * sizeof(float));
    }
}

void gpt_cache_reset(Gpt *gpt) {
    gpt->cache_used = 0;
}
size_t gpt_cache_length(const Gpt *gpt) {
    return gpt->cache_used;
}

/* The network for n new tokens of each of B sequences, at positions cache_used and on. The residual stream
 * is updated in place: nothing is kept for a backward pass. */
static void cached_forward(Gpt *gpt, size_t B, size_t n) {
    const Ops *ops = gpt->setup.ops;
    Stream *stream = gpt->setup.stream;
    const bool rotary = gpt->setup.config.position == POSITION_ROTARY;
    LayerActivations *a = &gpt->cache_acts;
    const size_t rows = B * n, C = gpt->C, offset = gpt->cache_used;
    const Dropout off = {.rate = 0};
    act_t *x = a->x1;
    ops->embedding_forward(stream, x, gpt->cache_tokens, weight(gpt, gpt->model.wte),
                           rotary ? NULL : weight(gpt, gpt->model.wpe), B, n, C, offset, off);
    for (size_t l = 0; l < gpt->L; l++) {
        const LayerParameters *p = &gpt->layers[l];
        ops->residual_norm_forward(stream, x, a->normed1, NULL, NULL, x, l == 0 ? NULL : gpt->cache_branch,
                                   weight(gpt, p->norm1_gain), weight(gpt, p->norm1_bias), rows, C, off);
        ops->linear_forward(stream, a->qkv, NULL, a->normed1, weight(gpt, p->qkv_w), weight(gpt, p->qkv_b),
                            rows, C, 3 * C);
        if (rotary) ops->rotary(stream, a->qkv, B, n, gpt->H, gpt->D, offset, false, false);
        const AttentionCall call = {.B = B,
                                    .T = n,
                                    .H = gpt->H,
                                    .D = gpt->D,
                                    .scale = 1.0f / sqrtf((float)gpt->D),
                                    .deterministic = gpt->setup.deterministic,
                                    .stream = stream,
                                    .qkv = a->qkv,
                                    .out = a->attended,
                                    .offset = offset,
                                    .kv_cache = gpt->kv_cache[l],
                                    .cache_length = gpt->T};
        gpt->setup.attention->cached(&call);
        ops->linear_forward(stream, gpt->cache_branch, NULL, a->attended, weight(gpt, p->proj_w),
                            weight(gpt, p->proj_b), rows, C, C);
        ops->residual_norm_forward(stream, x, a->normed1, NULL, NULL, x, gpt->cache_branch,
                                   weight(gpt, p->norm2_gain), weight(gpt, p->norm2_bias), rows, C, off);
        ops->linear_forward(stream, NULL, a->gelu, a->normed1, weight(gpt, p->up_w), weight(gpt, p->up_b),
                            rows, C, 4 * C);
        ops->linear_forward(stream, gpt->cache_branch, NULL, a->gelu, weight(gpt, p->down_w),
                            weight(gpt, p->down_b), rows, 4 * C, C);
    }
    ops->residual_norm_forward(stream, x, gpt->cache_hidden, NULL, NULL, x, gpt->cache_branch,
                               weight(gpt, gpt->model.norm_gain), weight(gpt, gpt->model.norm_bias), rows, C,
                               off);
}

const float *gpt_cache_extend(Gpt *gpt, const int32_t *tokens, size_t B, size_t n) {
    const Ops *ops = gpt->setup.ops;
    const size_t chunk = gpt->T < CACHE_CHUNK ? gpt->T : CACHE_CHUNK;
    int32_t *part = (int32_t *)xmalloc(B * chunk * sizeof *part);
    for (size_t start = 0, m; start < n; start += m) {
        m = n - start < chunk ? n - start : chunk;
        for (size_t b = 0; b < B; b++) memcpy(part + b * m, tokens + b * n + start, m * sizeof *part);
        upload_tokens(gpt, gpt->cache_tokens, part, B * m);
        cached_forward(gpt, B, m);
        gpt->cache_used += m;
        if (start + m < n) continue;
        /* The head reads only the last token of each sequence. */
        ops->head_logits(gpt->setup.stream, gpt->logits, row_of(gpt, gpt->cache_hidden, m - 1), m * gpt->C,
                         weight(gpt, gpt->model.wte), B, gpt->C, gpt->V);
        ops->download(gpt->setup.stream, gpt->host_logits, gpt->logits, B * gpt->V * sizeof(float));
    }
    free(part);
    return gpt->host_logits;
}
