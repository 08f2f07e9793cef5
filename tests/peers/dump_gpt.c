/* dump_gpt.c - a small GPT's figures, for tests/peers/check_gpt.py to hold against PyTorch's.
 *
 *     dump_gpt DEVICE ATTENTION POSITION LAYERS HEADS CHANNELS CTX VOCAB BATCH STEPS FOLDER
 *
 * DEVICE cpu, cuda (bf16) or cuda-fp32; POSITION learned or rotary. Into FOLDER, which must not be there:
 *     step-00000000/   the program's own checkpoint of the weights that it begins with
 *     tokens.i32       (1 + STEPS, 2, BATCH, CTX): inputs, then targets, of what follows
 *     logits.f32       (BATCH, CTX, VOCAB), of the first inputs
 *     gradients.f32    of the first mean loss: all tensors, in the order of model.safetensors
 *     losses.f64       (1 + STEPS): the mean loss of each step, the first of which only takes the gradients
 *     step-NNNNNNNN/   the checkpoint after the STEPS updates: weights, m, v
 * AdamW's settings and the learning rate stand below and in the script. Exit status 2: this device, or
 * attention at this shape, is not there, with the reason on stdout. */
#include "../../model/checkpoint.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const AdamW settings = {
    .beta1 = 0.9f, .beta2 = 0.95f, .epsilon = 1e-8f, .weight_decay = 0.1f, .clip = 1};
static const float lr = 1e-3f;

/* Far from the small weights that training begins with, so that every part of the network carries a gradient
 * of its own size; cut to the 8 bits of bf16, so that every device begins with the same. */
static void set_weights(Gpt *gpt) {
    size_t count;
    const Parameter *table = gpt_table(gpt, &count);
    for (size_t i = 0; i < count; i++) {
        const size_t in = strncmp(table[i].name, "w", 1) == 0 ? table[i].shape[1] : table[i].shape[0];
        const double spread = table[i].dims == 2 ? 1 / sqrt((double)in) : 0.1;
        float *numbers = xmalloc(table[i].size * sizeof *numbers);
        Rng rng = rng_start(1, i);
        for (size_t k = 0; k < table[i].size; k++) {
            numbers[k] = table[i].constant + (float)(spread * rng_normal(&rng));
            uint32_t bits;
            memcpy(&bits, &numbers[k], sizeof bits);
            bits &= 0xffff0000u;
            memcpy(&numbers[k], &bits, sizeof bits);
        }
        gpt_set(gpt, GPT_WEIGHTS, i, numbers);
        free(numbers);
    }
}

static bool write_gradients(Gpt *gpt, const char *path, Error *err) {
    size_t count;
    const Parameter *table = gpt_table(gpt, &count);
    Buffer all = {0};
    for (size_t i = 0; i < count; i++) {
        buffer_reserve(&all, table[i].size * sizeof(float));
        gpt_get(gpt, GPT_GRADIENTS, i, (float *)(void *)(all.data + all.size));
        all.size += table[i].size * sizeof(float);
    }
    const bool done = file_replace(path, all.data, all.size, err);
    buffer_free(&all);
    return done;
}

static bool write_file(const char *folder, const char *name, const void *bytes, size_t size, Error *err) {
    char *path = xformat("%s/%s", folder, name);
    const bool done = file_replace(path, bytes, size, err);
    free(path);
    return done;
}

static bool dump(Gpt *gpt, size_t steps, const char *folder, Error *err) {
    const GptConfig *config = &gpt_setup(gpt)->config;
    const size_t B = gpt_setup(gpt)->B, rows = B * config->ctx, V = config->vocab;
    const size_t n_tokens = (1 + steps) * 2 * rows, n_logits = rows * V;
    int32_t *tokens = xmalloc(n_tokens * sizeof *tokens);
    float *logits = xmalloc(n_logits * sizeof *logits);
    double *losses = xcalloc(1 + steps, sizeof *losses);
    Rng rng = rng_start(2, 0);
    for (size_t i = 0; i < n_tokens; i++) tokens[i] = (int32_t)rng_below(&rng, V);
    tokens[0] = tokens[2 * rows - 1] = (int32_t)V - 1; /* the row beside wte's padding, as input and target */
    set_weights(gpt);
    gpt_logits(gpt, tokens, B, logits);

    TrainState state = {.total_steps = steps, .eval_loss = NAN, .best_loss = NAN};
    bool done = folder_make(folder, err) && checkpoint_save(folder, gpt, &state, NULL, 0, err);
    char *gradients = xformat("%s/gradients.f32", folder);
    for (size_t i = 0; i <= steps && done; i++) {
        const int32_t *inputs = tokens + 2 * i * rows;
        gpt_step_begin(gpt, i, lr);
        gpt_forward_backward(gpt, inputs, inputs + rows, B, 0, rows);
        if (i == 0) done = write_gradients(gpt, gradients, err);
        else gpt_step_end(gpt, settings);
        state = (TrainState){.step = i, .updates = i, .eval_loss = NAN, .best_loss = NAN};
        losses[i] = gpt_step_state(gpt).loss_sum / (double)rows;
    }
    done = done && checkpoint_save(folder, gpt, &state, NULL, 0, err) &&
           write_file(folder, "tokens.i32", tokens, n_tokens * sizeof *tokens, err) &&
           write_file(folder, "logits.f32", logits, n_logits * sizeof *logits, err) &&
           write_file(folder, "losses.f64", losses, (1 + steps) * sizeof *losses, err);
    free(gradients), free(losses), free(logits), free(tokens);
    return done;
}

static int run(char **argument, Error *err) {
    enum { LAYERS, HEADS, CHANNELS, CTX, VOCAB, BATCH, STEPS, NUMBERS };
    size_t n[NUMBERS];
    for (int i = 0; i < NUMBERS; i++) {
        char *rest;
        const long number = strtol(argument[3 + i], &rest, 10);
        if (rest == argument[3 + i] || *rest || number < 1 || number > 1 << 20) {
            error_set(err, "\"%s\": an integer from 1 to %d is expected", argument[3 + i], 1 << 20);
            return EXIT_FAILED;
        }
        n[i] = (size_t)number;
    }
    const Ops *ops = ops_find(argument[0]);
    Stream *stream = ops ? ops->open(0, 0, err) : NULL;
    if (!stream) {
        printf("%s\n", ops ? err->text : "this build has no such device");
        return EXIT_USAGE;
    }
    GptSetup setup = {
        .config = {.layers = n[LAYERS],
                   .heads = n[HEADS],
                   .channels = n[CHANNELS],
                   .ctx = n[CTX],
                   .vocab = n[VOCAB],
                   .position = strcmp(argument[2], "rotary") == 0 ? POSITION_ROTARY : POSITION_LEARNED},
        .ops = ops,
        .stream = stream,
        .B = n[BATCH],
        .training = true};
    const AttentionShape shape = {
        .B = n[BATCH], .T = n[CTX], .H = n[HEADS], .D = n[CHANNELS] / n[HEADS], .training = true};
    int status = EXIT_FAILED;
    if (gpt_check_config(&setup.config, err)) {
        setup.attention = attention_find(argument[1], ops->name, &shape, err);
        if (!setup.attention) {
            printf("%s\n", err->text);
            status = EXIT_USAGE;
        } else {
            Gpt *gpt = gpt_new(&setup, err);
            if (gpt && dump(gpt, n[STEPS], argument[3 + NUMBERS], err)) status = EXIT_DONE;
            gpt_free(gpt);
        }
    }
    ops->close(stream);
    return status;
}

int main(int argc, char **argv) {
    Error err = {
        .text = "DEVICE ATTENTION POSITION LAYERS HEADS CHANNELS CTX VOCAB BATCH STEPS FOLDER are expected"};
    const int status = argc == 12 ? run(argv + 1, &err) : EXIT_FAILED;
    if (status == EXIT_FAILED) fprintf(stderr, "dump_gpt: %s\n", err.text);
    return status;
}
