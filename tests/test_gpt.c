/* test_gpt.c - model/gpt.c on the CPU's operations, with each of its attention backends, held to a second
 * GPT in double precision (reference_gpt.h), which is itself held to finite differences; then the promises
 * of gpt.h: splits of a step, padding, evaluation, the cache, skipped steps, memory plans, initial weights.
 *
 * The bound of a comparison. Let u be fp32's unit roundoff, ref the double result, plain the same formulas
 * evaluated in fp32 by plain loops, ours the program's. plain - ref and ours - ref are both sums of one
 * rounding (at most u, relative) for each of the same operations, carried to the result by the same
 * derivatives; only the order of sums and the way exp and tanh are evaluated differ. Their largest
 * magnitudes over a tensor are therefore of one size, and, as attention.h does, twice the plain one is
 * allowed:
 *     max|ours - ref| <= 2 max|plain - ref| + FLOOR u max|ref|.
 * The floor is for tensors where the plain evaluation has next to no rounding to show (T = 1, a sum of two
 * terms): FLOOR = 8 is two roundings each for the exponential, its product, the sum and the scaling. */
#include "test.h"

#include "reference_problem.h"

static const double FLOOR = 8;
static Stream *stream; /* of ops_cpu, for all tests */
/* beta1, beta2, epsilon, weight decay, clip; the reference's AdamW has the first three by itself. */
static const AdamW settings = {0.9f, 0.95f, 1e-8f, 0.1f, 1};

/* ---- what the two references say of it ---- */
typedef struct Answer {
    double *gradients64;
    float *gradients32;
    double loss;       /* mean */
    double loss_bound; /* a mean is off by at most the largest error of its terms */
} Answer;

static double bound_of(const double *ref, const float *plain, size_t n) {
    return 2 * largest_error(ref, plain, n) + FLOOR * UNIT_ROUNDOFF * largest_of(ref, n);
}

static Answer answer_new(const Problem *problem, uint64_t step) {
    const RefShape *shape = &problem->shape;
    const size_t rows = shape->B * shape->T;
    Answer answer = {.gradients64 = reference64_numbers(problem->table.total),
                     .gradients32 = reference32_numbers(problem->table.total)};
    double *losses64 = reference64_numbers(rows);
    float *losses32 = reference32_numbers(rows);
    answer.loss = reference64_gpt(shape, &problem->table, problem->parameters64, step, problem->tokens,
                                  problem->targets, losses64, NULL, answer.gradients64);
    reference32_gpt(shape, &problem->table, problem->parameters32, step, problem->tokens, problem->targets,
                    losses32, NULL, answer.gradients32);
    answer.loss_bound = bound_of(losses64, losses32, rows);
    free(losses64), free(losses32);
    return answer;
}

static void answer_free(Answer *answer) {
    free(answer->gradients64), free(answer->gradients32);
}

/* ---- the program's model of it ---- */
static GptSetup setup_of(const RefShape *shape, const Attention *attention, size_t B, bool training,
                         size_t cache_B) {
    GptSetup setup = {.ops = &ops_cpu, .attention = attention, .stream = stream, .B = B, .cache_B = cache_B};
    setup.config = (GptConfig){.layers = shape->L, .heads = shape->H, .channels = shape->C, .ctx = shape->T};
    setup.config.vocab = shape->V, setup.config.dropout = (float)shape->rate;
    setup.config.position = shape->rotary ? POSITION_ROTARY : POSITION_LEARNED;
    setup.training = training, setup.seed = shape->seed;
    return setup;
}

/* A new Gpt with the problem's weights; NULL (and a failed check) where it cannot be made. */
static Gpt *model_new(const Problem *problem, const Attention *attention, size_t B, bool training,
                      size_t cache_B) {
    Error err = {0};
    const GptSetup setup = setup_of(&problem->shape, attention, B, training, cache_B);
    Gpt *gpt = gpt_new(&setup, &err);
    CHECK_MSG(gpt != NULL, "gpt_new: %s", err.text);
    if (!gpt) return NULL;
    size_t count = 0;
    gpt_table(gpt, &count);
    for (size_t k = 0; k < problem->table.count; k++) {
        const size_t row = find_row(gpt, problem->table.tensor[k].name);
        CHECK_MSG(row < count, "no parameter named %s", problem->table.tensor[k].name);
        if (row < count)
            gpt_set(gpt, GPT_WEIGHTS, row, problem->parameters32 + problem->table.tensor[k].offset);
    }
    return gpt;
}

/* Gradients of the whole problem, taken `micro` sequences at once. Loss and gradients against the answer. */
static void check_gradients(const Problem *problem, const Answer *answer, Gpt *gpt, size_t micro,
                            uint64_t step, const char *what) {
    const RefShape *shape = &problem->shape;
    const size_t rows = shape->B * shape->T;
    gpt_step_begin(gpt, step, 0);
    for (size_t b = 0; b < shape->B; b += micro) {
        gpt_forward_backward(gpt, problem->tokens + b * shape->T, problem->targets + b * shape->T, micro, b,
                             rows);
    }
    const StepState state = gpt_step_state(gpt);
    const double loss = state.loss_sum / (double)rows;
    CHECK_MSG(fabs(loss - answer->loss) <= answer->loss_bound, "%s: loss %.9g, not %.9g (+-%.2g)", what, loss,
              answer->loss, answer->loss_bound);
    float *ours = buffer_new(gpt, &problem->table, GPT_GRADIENTS);
    for (size_t k = 0; k < problem->table.count; k++) {
        const RefTensor *tensor = &problem->table.tensor[k];
        const double *ref = answer->gradients64 + tensor->offset;
        const double error = largest_error(ref, ours + tensor->offset, tensor->size);
        const double bound = bound_of(ref, answer->gradients32 + tensor->offset, tensor->size);
        CHECK_MSG(error <= bound, "%s: gradient of %s is off by %.3g, allowed are %.3g", what, tensor->name,
                  error, bound);
    }
    free(ours);
}

/* The CPU's attention backends that can run a shape, one after the other: NULL after the last. */
static const Attention *next_backend(size_t *i, const RefShape *shape, size_t B) {
    const AttentionShape wanted = {
        .B = B, .T = shape->T, .H = shape->H, .D = shape->C / shape->H, .training = true};
    while (attention_backends[*i]) {
        const Attention *attention = attention_backends[(*i)++];
        if (strcmp(attention->device, "cpu") == 0 && attention->can_run(&wanted, NULL)) return attention;
    }
    return NULL;
}

/* ---- the reference itself ---- */

/* Salmon et al.'s known answers for Philox4x32-10, from the tests of their Random123. */
TEST(reference_philox) {
    uint32_t zeros[4] = {0, 0, 0, 0}, ones[4] = {~0u, ~0u, ~0u, ~0u};
    reference_philox(zeros, 0, 0);
    reference_philox(ones, ~0u, ~0u);
    CHECK(zeros[0] == 0x6627e8d5 && zeros[1] == 0xe169c58d && zeros[2] == 0xbc57ac4c &&
          zeros[3] == 0x9b00dbd8);
    CHECK(ones[0] == 0x408f276d && ones[1] == 0x41c83b0e && ones[2] == 0xa20bc7c6 && ones[3] == 0x6d5451fd);
}

static double slope(const Problem *problem, double *losses, size_t i, double h) {
    double *x = &problem->parameters64[i], old = *x, loss[2];
    for (int side = 0; side < 2; side++) {
        *x = old + (side ? -h : h);
        loss[side] = reference64_gpt(&problem->shape, &problem->table, problem->parameters64, 3,
                                     problem->tokens, problem->targets, losses, NULL, NULL);
    }
    *x = old;
    return (loss[0] - loss[1]) / (2 * h);
}

/* A central difference of step h is off by h^2/6 |f'''| and by the rounding of two losses, about 1e-16 loss
 * / h = 1e-11. The difference between steps 2h and h is h^2/2 |f'''|, three times the first: that and 1e-9
 * are allowed. Every parameter of a small model, both kinds of positions, dropout on. */
TEST(reference_gradients_are_finite_differences) {
    for (int rotary = 0; rotary < 2; rotary++) {
        Problem problem = problem_new((RefShape){2, 4, 8, 2, 11, 2, rotary, 0.25, 7});
        double *gradients = reference64_numbers(problem.table.total), *losses = reference64_numbers(8);
        reference64_gpt(&problem.shape, &problem.table, problem.parameters64, 3, problem.tokens,
                        problem.targets, losses, NULL, gradients);
        for (size_t k = 0; k < problem.table.count; k++) {
            const RefTensor *tensor = &problem.table.tensor[k];
            for (size_t i = tensor->offset; i < tensor->offset + tensor->size; i++) {
                const double h = 1e-5, fine = slope(&problem, losses, i, h);
                const double coarse = slope(&problem, losses, i, 2 * h);
                CHECK_MSG(fabs(fine - gradients[i]) <= fabs(coarse - fine) + 1e-9,
                          "%s[%zu]: gradient %.12g, difference %.12g", tensor->name, i - tensor->offset,
                          gradients[i], fine);
            }
        }
        free(gradients), free(losses);
        problem_free(&problem);
    }
}

/* ---- the table of parameters ---- */
TEST(table_of_parameters) {
    for (int rotary = 0; rotary < 2; rotary++) {
        const RefShape shape = {1, 7, 96, 3, 257, 3, rotary, 0, 0};
        RefTable wanted = reference_table(&shape);
        const GptConfig config = setup_of(&shape, NULL, 1, true, 0).config;
        Error err = {0};
        size_t count = 0, total = 0, end = 0;
        Parameter *table = gpt_parameters(&config, &count, &total, &err);
        CHECK_MSG(table != NULL, "%s", err.text);
        CHECK(count == wanted.count);
        for (size_t i = 0; table && i < count && i < wanted.count; i++) {
            const Parameter *row = &table[i];
            CHECK_MSG(strcmp(row->name, wanted.tensor[i].name) == 0, "row %zu is %s, not %s", i, row->name,
                      wanted.tensor[i].name);
            CHECK_MSG(row->size == wanted.tensor[i].size && row->size == row->shape[0] * row->shape[1],
                      "%s holds %zu", row->name, row->size);
            CHECK_MSG(row->decay == wanted.tensor[i].decay && row->decay == (row->dims == 2), "%s",
                      row->name);
            CHECK_MSG(row->offset >= end && row->count >= row->size, "%s overlaps the row before", row->name);
            end = row->offset + row->count;
            const bool residual = strstr(row->name, "c_proj.weight") != NULL;
            const double spread = !row->decay ? 0 : residual ? 0.02 / sqrt(6) : 0.02;
            CHECK_MSG(fabs((double)row->spread - spread) < 1e-8, "%s: spread %g", row->name,
                      (double)row->spread);
            CHECK_MSG(row->decay || row->constant == (wanted.tensor[i].gain ? 1.0f : 0.0f), "%s", row->name);
        }
        CHECK(end <= total);
        CHECK(table && table[0].count == 384 * shape.C); /* 257 rows padded to a multiple of 128 */
        CHECK(gpt_parameter_count(&config) == wanted.total);
        CHECK(gpt_flops_per_token(&config) == 6.0 * (double)wanted.total + 6.0 * 3 * 7 * 96);
        free(table), free(wanted.tensor);
    }
}

/* ---- loss and every gradient ---- */
TEST(loss_and_gradients) {
    /* B, T, C, H, V, L, rotary, dropout, seed */
    static const RefShape shapes[] = {
        {3, 1, 96, 3, 257, 2, true, (double)0.1f, 1},    {2, 5, 96, 4, 50257, 1, false, (double)0.1f, 2},
        {2, 5, 384, 6, 257, 1, true, (double)0.3f, 3},   {1, 63, 96, 2, 257, 2, false, 0, 4},
        {3, 37, 96, 2, 257, 2, true, (double)0.1f, 5},   {1, 127, 160, 5, 257, 1, true, 0, 6},
        {1, 200, 96, 1, 257, 2, false, (double)0.1f, 7},
    };
    /* Both halves of the counter that the dropout masks are drawn with. */
    const uint64_t step = UINT64_C(0x500000003);
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        const RefShape *shape = &shapes[i];
        Problem problem = problem_new(*shape);
        Answer answer = answer_new(&problem, step);
        size_t backends = 0;
        for (const Attention *attention; (attention = next_backend(&backends, shape, shape->B)) != NULL;) {
            char what[96];
            snprintf(what, sizeof what, "%s, B %zu T %zu C %zu V %zu", attention->name, shape->B, shape->T,
                     shape->C, shape->V);
            Gpt *gpt = model_new(&problem, attention, shape->B, true, 0);
            if (gpt) check_gradients(&problem, &answer, gpt, shape->B, step, what);
            gpt_free(gpt);
        }
        answer_free(&answer);
        problem_free(&problem);
    }
}

TEST(splits_of_a_step) {
    Problem problem = problem_new((RefShape){16, 13, 96, 3, 257, 2, true, (double)0.2f, 11});
    Answer answer = answer_new(&problem, 1);
    size_t backends = 0;
    for (const Attention *attention; (attention = next_backend(&backends, &problem.shape, 16)) != NULL;) {
        for (size_t micro = 16; micro > 0; micro = micro == 16 ? 8 : micro == 8 ? 1 : 0) {
            char what[64];
            snprintf(what, sizeof what, "%s, %zu sequences at once", attention->name, micro);
            Gpt *gpt = model_new(&problem, attention, micro, true, 0);
            if (gpt) check_gradients(&problem, &answer, gpt, micro, 1, what);
            gpt_free(gpt);
        }
        Gpt *roomy = model_new(&problem, attention, 16, true, 0); /* room for 16, given 4 */
        if (roomy) check_gradients(&problem, &answer, roomy, 4, 1, "4 sequences where 16 fit");
        gpt_free(roomy);
    }
    answer_free(&answer);
    problem_free(&problem);
}

/* ---- the update ---- */
static double distance(const double *ref, const float *a, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += ((double)a[i] - ref[i]) * ((double)a[i] - ref[i]);
    return sqrt(sum);
}

/* Twenty steps, each on tokens of its own. Adam divides a gradient g by its own size, so that g's rounding d
 * moves the weight by up to lr min(1, d / |g|). That is lr itself for the few elements whose g happens to be
 * about d, for the plain evaluation as for ours: the largest error, and the 2-norm with it, is one lucky or
 * unlucky element's. The mean of min(1, d / |g|) over gradients of size s spread evenly around 0 is d/s (1 +
 * ln(s/d)): every element has its share in that, so two evaluations that round alike have it alike. The mean
 * error over each tensor is therefore held to twice the plain evaluation's, and FLOOR roundings of the
 * tensor's mean size. The keys' biases are left out: the softmax cancels them, their gradients are nothing
 * but rounding, and no later number depends on them. The losses on the way are held by the same rule to the
 * largest error so far of a token's loss. */
TEST(twenty_updates) {
    enum { STEPS = 20 };
    const double lr = (double)1e-3f, clip = (double)settings.clip;
    const double weight_decay = (double)settings.weight_decay;
    for (int rotary = 0; rotary < 2; rotary++) {
        const RefShape shape = {2, 13, 96, 3, 257, 1, rotary, (double)0.1f, 21};
        const RefShape all = {2 * STEPS, 13, 96, 3, 257, 1, rotary, 0, 21};
        Problem problem = problem_new(all); /* the tokens of all steps */
        const RefTable *table = &problem.table;
        const size_t n = table->total, rows = shape.B * shape.T;
        size_t backends = 0;
        const Attention *attention[4];
        Gpt *gpt[4];
        size_t models = 0, clipped = 0;
        problem.shape = shape;
        while (models < 4 && (attention[models] = next_backend(&backends, &shape, shape.B)) != NULL) {
            gpt[models] = model_new(&problem, attention[models], shape.B, true, 0);
            if (gpt[models]) models++;
        }

        double *g64 = reference64_numbers(n), *m64 = reference64_numbers(n), *v64 = reference64_numbers(n);
        float *g32 = reference32_numbers(n), *m32 = reference32_numbers(n), *v32 = reference32_numbers(n);
        double *losses64 = reference64_numbers(rows), loss_bound = 0;
        float *losses32 = reference32_numbers(rows);
        for (uint64_t step = 0; step < STEPS; step++) {
            const int32_t *tokens = problem.tokens + step * rows, *targets = problem.targets + step * rows;
            const double loss = reference64_gpt(&shape, table, problem.parameters64, step, tokens, targets,
                                                losses64, NULL, g64);
            reference32_gpt(&shape, table, problem.parameters32, step, tokens, targets, losses32, NULL, g32);
            const double norm = reference64_adamw(table, problem.parameters64, m64, v64, g64, step + 1, lr,
                                                  weight_decay, clip);
            const double plain_norm = reference32_adamw(table, problem.parameters32, m32, v32, g32, step + 1,
                                                        lr, weight_decay, clip);
            loss_bound = fmax(loss_bound, bound_of(losses64, losses32, rows));
            clipped += norm > clip;
            for (size_t i = 0; i < models; i++) {
                gpt_step_begin(gpt[i], step, (float)lr);
                gpt_forward_backward(gpt[i], tokens, targets, shape.B, 0, rows);
                gpt_step_end(gpt[i], settings);
                const StepState state = gpt_step_state(gpt[i]);
                const double ours = state.loss_sum / (double)rows;
                CHECK_MSG(fabs(ours - loss) <= loss_bound, "%s: loss %.9g at step %d, not %.9g (+-%.2g)",
                          attention[i]->name, ours, (int)step, loss, loss_bound);
                /* The norm moves by at most the norm of the gradients' difference. */
                const double norm_bound = 2 * distance(g64, g32, n) + 2 * fabs(plain_norm - norm) +
                                          FLOOR * UNIT_ROUNDOFF * norm;
                CHECK_MSG(fabs((double)state.grad_norm - norm) <= norm_bound,
                          "%s: gradient norm %.9g at step %d, not %.9g (+-%.2g)", attention[i]->name,
                          (double)state.grad_norm, (int)step, norm, norm_bound);
                CHECK(state.updates == step + 1 && state.skip == 0);
            }
        }
        CHECK(clipped > 0); /* else clipping has not been seen */
        for (size_t i = 0; i < models; i++) {
            float *ours = buffer_new(gpt[i], table, GPT_WEIGHTS);
            for (size_t c = 0; c < shape.C; c++) { /* the keys' biases: nothing to compare */
                const size_t at = reference_at(table, 0, QKV_BIAS) + shape.C + c;
                ours[at] = problem.parameters32[at] = (float)problem.parameters64[at];
            }
            for (size_t k = 0; k < table->count; k++) {
                const size_t at = table->tensor[k].offset, size = table->tensor[k].size;
                const double *ref = problem.parameters64 + at;
                double size_sum = 0;
                for (size_t j = 0; j < size; j++) size_sum += fabs(ref[j]);
                const double bound = 2 * mean_error(ref, problem.parameters32 + at, size) +
                                     FLOOR * UNIT_ROUNDOFF * size_sum / (double)size;
                const double error = mean_error(ref, ours + at, size);
                CHECK_MSG(error <= bound,
                          "%s: %s is off by %.3g in the mean after %d steps, allowed are %.3g",
                          attention[i]->name, table->tensor[k].name, error, STEPS, bound);
            }
            free(ours);
            gpt_free(gpt[i]);
        }
        free(g64), free(m64), free(v64), free(g32), free(m32), free(v32), free(losses64), free(losses32);
        problem_free(&problem);
    }
}

TEST(one_batch_overfits) {
    Problem problem = problem_new((RefShape){4, 16, 96, 3, 257, 2, true, 0, 0});
    size_t backends = 0;
    for (const Attention *attention; (attention = next_backend(&backends, &problem.shape, 4)) != NULL;) {
        Gpt *gpt = model_new(&problem, attention, 4, true, 0);
        if (!gpt) continue;
        gpt_init_weights(gpt, 1);
        double first = 0, loss = 0;
        for (uint64_t step = 0; step < 60; step++) {
            gpt_step_begin(gpt, step, 3e-3f);
            gpt_forward_backward(gpt, problem.tokens, problem.targets, 4, 0, 64);
            gpt_step_end(gpt, settings);
            loss = gpt_step_state(gpt).loss_sum / 64;
            if (step == 0) first = loss;
        }
        CHECK_MSG(fabs(first - log(257)) < 0.5, "the first loss is %g, a uniform guess has %g", first,
                  log(257));
        CHECK_MSG(loss < 0.05, "%s: loss %g after 60 steps on one batch", attention->name, loss);
        gpt_free(gpt);
    }
    problem_free(&problem);
}

/* Three steps; the losses, then all weights, to be freed. */
static float *three_steps(const Problem *problem, Gpt *gpt, double losses[3]) {
    const size_t rows = problem->shape.B * problem->shape.T;
    for (uint64_t step = 0; step < 3; step++) {
        gpt_step_begin(gpt, step, 1e-2f);
        gpt_forward_backward(gpt, problem->tokens, problem->targets, problem->shape.B, 0, rows);
        gpt_step_end(gpt, settings);
        losses[step] = gpt_step_state(gpt).loss_sum;
    }
    return buffer_new(gpt, &problem->table, GPT_WEIGHTS);
}

TEST(two_runs_are_bit_equal) {
    Problem problem = problem_new((RefShape){3, 37, 96, 3, 257, 2, true, (double)0.1f, 5});
    const size_t n = problem.table.total;
    size_t backends = 0;
    for (const Attention *attention; (attention = next_backend(&backends, &problem.shape, 3)) != NULL;) {
        float *weights[2] = {NULL, NULL};
        double losses[2][3] = {{0}};
        for (int run = 0; run < 2; run++) {
            Gpt *gpt = model_new(&problem, attention, 3, true, 0);
            if (gpt) weights[run] = three_steps(&problem, gpt, losses[run]);
            gpt_free(gpt);
        }
        CHECK_MSG(memcmp(losses[0], losses[1], sizeof losses[0]) == 0, "%s: losses differ", attention->name);
        CHECK_MSG(weights[0] && weights[1] && memcmp(weights[0], weights[1], n * sizeof(float)) == 0,
                  "%s: weights differ", attention->name);
        CHECK(weights[0] && memcmp(weights[0], problem.parameters32, n * sizeof(float)) != 0);
        free(weights[0]), free(weights[1]);
    }
    problem_free(&problem);
}

TEST(padding_has_no_effect) {
    Problem problem = problem_new((RefShape){2, 9, 96, 3, 257, 1, false, (double)0.1f, 5});
    const RefShape *shape = &problem.shape;
    const size_t n = problem.table.total, n_logits = shape->B * shape->T * shape->V;
    size_t backends = 0;
    const Attention *attention = next_backend(&backends, shape, shape->B);
    float *weights[2] = {NULL, NULL}, *gradients[2] = {NULL, NULL}, *logits[2];
    double losses[2][3] = {{0}};
    for (int poisoned = 0; poisoned < 2; poisoned++) {
        logits[poisoned] = reference32_numbers(n_logits);
        Gpt *gpt = model_new(&problem, attention, shape->B, true, 0);
        if (!gpt) continue;
        size_t count = 0;
        const Parameter *wte = &gpt_table(gpt, &count)[find_row(gpt, "wte.weight")];
        const size_t padding = wte->count - wte->size;
        CHECK(padding == (384 - 257) * shape->C);
        float *nans = reference32_numbers(padding);
        for (size_t i = 0; i < padding; i++) nans[i] = NAN;
        float *start = gpt_buffer(gpt, GPT_WEIGHTS, &count) + wte->offset + wte->size;
        if (poisoned) ops_cpu.upload(stream, start, nans, padding * sizeof *nans);
        free(nans);
        weights[poisoned] = three_steps(&problem, gpt, losses[poisoned]);
        gradients[poisoned] = buffer_new(gpt, &problem.table, GPT_GRADIENTS);
        gpt_logits(gpt, problem.tokens, shape->B, logits[poisoned]);
        gpt_free(gpt);
    }
    CHECK(memcmp(losses[0], losses[1], sizeof losses[0]) == 0);
    CHECK(weights[0] && weights[1] && memcmp(weights[0], weights[1], n * sizeof(float)) == 0);
    CHECK(gradients[0] && gradients[1] && memcmp(gradients[0], gradients[1], n * sizeof(float)) == 0);
    CHECK(memcmp(logits[0], logits[1], n_logits * sizeof(float)) == 0);
    for (size_t i = 0; i < n_logits && test_state.bad == 0; i++) CHECK(isfinite(logits[1][i]));
    for (int i = 0; i < 2; i++) free(weights[i]), free(gradients[i]), free(logits[i]);
    problem_free(&problem);
}

/* ---- steps that are not finite ---- */

/* Weights and both moments must be what they were, bit for bit, and the count of updates too. */
static void check_skipped(const Problem *problem, Gpt *gpt, size_t bad_row, const char *what) {
    const RefTable *table = &problem->table;
    static const GptBuffer buffers[] = {GPT_WEIGHTS, GPT_ADAM_M, GPT_ADAM_V};
    const uint64_t updates = gpt_step_state(gpt).updates;
    float *before[3];
    for (int i = 0; i < 3; i++) before[i] = buffer_new(gpt, table, buffers[i]);
    gpt_step_end(gpt, settings);
    const StepState state = gpt_step_state(gpt);
    CHECK_MSG(state.skip == 1, "%s: the step is not skipped", what);
    CHECK_MSG(state.bad_tensor == (int32_t)bad_row, "%s: names tensor %d, not %zu", what,
              (int)state.bad_tensor, bad_row);
    CHECK_MSG(state.updates == updates, "%s: counts as an update", what);
    for (int i = 0; i < 3; i++) {
        float *after = buffer_new(gpt, table, buffers[i]);
        CHECK_MSG(memcmp(before[i], after, table->total * sizeof(float)) == 0, "%s: buffer %d moved", what,
                  i);
        free(before[i]), free(after);
    }
}

static void begin_and_backward(const Problem *problem, Gpt *gpt, uint64_t step) {
    gpt_step_begin(gpt, step, 1e-3f);
    gpt_forward_backward(gpt, problem->tokens, problem->targets, problem->shape.B, 0,
                         problem->shape.B * problem->shape.T);
}

TEST(steps_that_are_not_finite_are_skipped) {
    Problem problem = problem_new((RefShape){2, 7, 96, 3, 257, 2, true, 0, 0});
    size_t backends = 0, count = 0;
    Gpt *gpt = model_new(&problem, next_backend(&backends, &problem.shape, 2), 2, true, 0);
    if (gpt) {
        begin_and_backward(&problem, gpt, 0);
        gpt_step_end(gpt, settings);
        CHECK(gpt_step_state(gpt).updates == 1 && gpt_step_state(gpt).skip == 0);

        /* A weight that is no number: which gradients it spoils is the network's to say, the first of them is
         * to be named. */
        const Parameter *table = gpt_table(gpt, &count);
        const size_t sick = find_row(gpt, "h.1.mlp.c_fc.weight");
        float *good = reference32_numbers(table[sick].size), *bad = reference32_numbers(table[sick].size);
        gpt_get(gpt, GPT_WEIGHTS, sick, good);
        memcpy(bad, good, table[sick].size * sizeof *bad);
        bad[table[sick].size / 2] = NAN;
        gpt_set(gpt, GPT_WEIGHTS, sick, bad);
        begin_and_backward(&problem, gpt, 1);
        CHECK(isnan(gpt_step_state(gpt).loss_sum));
        size_t first = count;
        for (size_t i = count; i-- > 0;) {
            float *gradient = reference32_numbers(table[i].size);
            gpt_get(gpt, GPT_GRADIENTS, i, gradient);
            for (size_t j = 0; j < table[i].size; j++) first = isfinite(gradient[j]) ? first : i;
            free(gradient);
        }
        CHECK(first < count);
        check_skipped(&problem, gpt, first, "a weight is NaN");
        gpt_set(gpt, GPT_WEIGHTS, sick, good);
        free(good), free(bad);

        /* Infinite gradients in two tensors, of either sign: the first is named. */
        static const char *const rows[2] = {"h.0.attn.c_proj.bias", "ln_f.weight"};
        for (int sign = -1; sign <= 1; sign += 2) {
            begin_and_backward(&problem, gpt, 2);
            for (int i = 0; i < 2; i++) {
                const Parameter *row = &table[find_row(gpt, rows[i])];
                const float infinite = (float)sign * INFINITY;
                float *gradients = gpt_buffer(gpt, GPT_GRADIENTS, &count);
                ops_cpu.upload(stream, gradients + row->offset + row->size - 1, &infinite, sizeof infinite);
            }
            check_skipped(&problem, gpt, find_row(gpt, rows[0]), "a gradient is infinite");
        }

        begin_and_backward(&problem, gpt, 3);
        gpt_step_end(gpt, settings);
        const StepState state = gpt_step_state(gpt);
        CHECK(state.updates == 2 && state.skip == 0 && isfinite(state.loss_sum) && isfinite(state.grad_norm));
        gpt_set_updates(gpt, 1000);
        CHECK(gpt_step_state(gpt).updates == 1000);
    }
    gpt_free(gpt);
    problem_free(&problem);
}

/* ---- evaluation, logits, cache: forward only, and no dropout though the configuration has some ---- */
TEST(evaluation) {
    Problem problem = problem_new((RefShape){10, 11, 96, 3, 257, 2, true, 0, 0});
    const Answer answer = answer_new(&problem, 0);
    const RefShape *shape = &problem.shape;
    const double tokens = (double)(shape->B * shape->T);
    problem.shape.rate = 0.5;
    size_t backends = 0;
    for (const Attention *attention; (attention = next_backend(&backends, shape, 5)) != NULL;) {
        for (int training = 0; training < 2; training++) {
            static const size_t sizes[] = {1, 2, 5};
            for (size_t i = 0; i < 3; i++) {
                Gpt *gpt = model_new(&problem, attention, sizes[i], training, 0);
                if (!gpt) continue;
                for (int repeat = 0; repeat < 2; repeat++) {
                    gpt_evaluate_begin(gpt);
                    for (size_t b = 0; b < shape->B; b += sizes[i])
                        gpt_evaluate(gpt, problem.tokens + b * shape->T, problem.targets + b * shape->T,
                                     sizes[i]);
                    const double loss = gpt_evaluate_sum(gpt) / tokens;
                    CHECK_MSG(fabs(loss - answer.loss) <= answer.loss_bound,
                              "%s, %zu at once: loss %.9g, not %.9g (+-%.2g)", attention->name, sizes[i],
                              loss, answer.loss, answer.loss_bound);
                }
                gpt_free(gpt);
            }
        }
    }
    free(answer.gradients64), free(answer.gradients32);
    problem_free(&problem);
}

TEST(logits_and_cache) {
    for (int rotary = 0; rotary < 2; rotary++) {
        Problem problem = problem_new((RefShape){2, 90, 96, 3, 257, 2, rotary, 0, 0});
        const size_t B = problem.shape.B, T = problem.shape.T, V = problem.shape.V, n = B * T * V;
        double *ref = reference64_numbers(n);
        float *plain = reference32_numbers(n), *full = reference32_numbers(n);
        int32_t *part = (int32_t *)reference_allocate(B * T, sizeof *part);
        reference64_gpt(&problem.shape, &problem.table, problem.parameters64, 0, problem.tokens, NULL, NULL,
                        ref, NULL);
        reference32_gpt(&problem.shape, &problem.table, problem.parameters32, 0, problem.tokens, NULL, NULL,
                        plain, NULL);
        const double bound = bound_of(ref, plain, n);
        problem.shape.rate = 0.5;
        size_t backends = 0;
        for (const Attention *attention; (attention = next_backend(&backends, &problem.shape, B)) != NULL;) {
            /* Room for three sequences, two of them used: a stride that mixes the two up shows. */
            Gpt *gpt = model_new(&problem, attention, B, false, 3);
            if (!gpt) continue;
            gpt_logits(gpt, problem.tokens, B, full);
            const double error = largest_error(ref, full, n);
            CHECK_MSG(error <= bound, "%s: logits are off by %.3g, allowed are %.3g", attention->name, error,
                      bound);
            /* Chunks of one size as long as they fit, then token by token until the context is full; 70 is
             * more than one pass through the layers takes. */
            static const size_t chunks[] = {1, 3, 17, 70};
            for (size_t i = 0; i < sizeof chunks / sizeof chunks[0]; i++) {
                gpt_cache_reset(gpt);
                for (size_t done = 0, m; done < T; done += m) {
                    m = T - done >= chunks[i] ? chunks[i] : 1;
                    for (size_t b = 0; b < B; b++)
                        memcpy(part + b * m, problem.tokens + b * T + done, m * sizeof *part);
                    CHECK(gpt_cache_length(gpt) == done);
                    const float *last = gpt_cache_extend(gpt, part, B, m);
                    for (size_t b = 0; b < B; b++) {
                        const double off = largest_error(ref + (b * T + done + m - 1) * V, last + b * V, V);
                        CHECK_MSG(off <= bound,
                                  "%s, chunks of %zu, sequence %zu, token %zu: off by %.3g, allowed %.3g",
                                  attention->name, chunks[i], b, done + m - 1, off, bound);
                    }
                }
                CHECK(gpt_cache_length(gpt) == T);
            }
            gpt_free(gpt);
        }
        free(ref), free(plain), free(full), free(part);
        problem_free(&problem);
    }
}

/* ---- memory ---- */
static size_t bytes_held, bytes_given_back;
static size_t host_bytes_held, host_bytes_given_back; /* of these, those on the host */
static struct {
    void *memory;
    size_t bytes;
} held[64];

static void *counting_allocate(Stream *where, size_t bytes, Error *err) {
    void *memory = ops_cpu.allocate(where, bytes, err);
    for (size_t i = 0; memory && i < sizeof held / sizeof held[0]; i++) {
        if (held[i].memory) continue;
        held[i].memory = memory, held[i].bytes = bytes;
        bytes_held += bytes;
        return memory;
    }
    return memory;
}
static void counting_release(Stream *where, void *memory) {
    for (size_t i = 0; memory && i < sizeof held / sizeof held[0]; i++) {
        if (held[i].memory != memory) continue;
        bytes_given_back += held[i].bytes;
        held[i].memory = NULL;
    }
    ops_cpu.release(where, memory);
}

static void *counting_host_allocate(Stream *where, size_t bytes, Error *err) {
    host_bytes_held += bytes;
    return counting_allocate(where, bytes, err);
}
static void counting_host_release(Stream *where, void *memory) {
    const size_t before = bytes_given_back;
    counting_release(where, memory);
    host_bytes_given_back += bytes_given_back - before;
}
static void own_memory(Stream *where, size_t *free_bytes, size_t *total_bytes) {
    (void)where;
    *free_bytes = *total_bytes = SIZE_MAX;
}

/* A device with memory of its own must have room for all but what is on the host. */
TEST(plan_is_what_is_allocated) {
    Ops counting = ops_cpu;
    counting.allocate = counting_allocate, counting.release = counting_release;
    counting.host_allocate = counting_host_allocate, counting.host_release = counting_host_release;
    const RefShape shape = {3, 37, 96, 3, 257, 2, true, 0.1, 0};
    for (int variant = 0; variant < 8; variant++) {
        counting.memory = variant & 4 ? own_memory : NULL;
        size_t backends = 0;
        for (const Attention *attention; (attention = next_backend(&backends, &shape, 3)) != NULL;) {
            GptSetup setup = setup_of(&shape, attention, 3, variant & 1, variant & 2 ? 2 : 0);
            setup.ops = &counting;
            if (variant & 2) setup.config.position = POSITION_LEARNED;
            Error err = {0};
            MemoryPlan plan;
            bytes_held = bytes_given_back = host_bytes_held = host_bytes_given_back = 0;
            CHECK_MSG(gpt_plan(&setup, &plan, &err), "%s", err.text);
            CHECK(bytes_held == 0);
            size_t sum = 0, on_host = 0;
            for (size_t i = 0; i < plan.rows; i++) {
                sum += plan.row[i].bytes;
                on_host += plan.row[i].on_host ? plan.row[i].bytes : 0;
            }
            Gpt *gpt = gpt_new(&setup, &err);
            CHECK_MSG(gpt != NULL, "%s", err.text);
            CHECK_MSG(sum == bytes_held && plan.total == sum - on_host && plan.total > 0,
                      "%s: planned %zu bytes, rows %zu, allocated %zu", attention->name, plan.total, sum,
                      bytes_held);
            CHECK(on_host == (variant & 4 ? host_bytes_held : 0));
            CHECK((host_bytes_held > 0) == (setup.cache_B > 0));
            gpt_free(gpt);
            CHECK_MSG(bytes_given_back == bytes_held && host_bytes_given_back == host_bytes_held,
                      "%zu of %zu bytes given back, %zu of %zu on the host", bytes_given_back, bytes_held,
                      host_bytes_given_back, host_bytes_held);
        }
    }
}

TEST(impossible_configurations_are_errors_in_words) {
    const RefShape shape = {1, 64, 96, 3, 257, 2, true, 0, 0};
    size_t backends = 0;
    const GptSetup good = setup_of(&shape, next_backend(&backends, &shape, 1), 1, true, 1);
    GptSetup bad[16];
    size_t n = 0;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) bad[i] = good;
    bad[n++].config.layers = 1000000;
    bad[n++].config.channels = 3 * ((size_t)1 << 40);
    bad[n++].config.ctx = (size_t)1 << 40;
    bad[n++].config.ctx = SIZE_MAX;
    bad[n++].config.channels = SIZE_MAX - SIZE_MAX % 6;
    bad[n++].config.vocab = SIZE_MAX;
    bad[n++].config.heads = 0;
    bad[n++].config.layers = 0;
    bad[n++].config.channels = 97;
    bad[n++].config.heads = 32; /* 3 channels a head, which rotary cannot halve */
    bad[n++].config.dropout = 1;
    bad[n++].config.dropout = NAN;
    bad[n++].config.vocab = 0;
    bad[n++].config.ctx = 0;
    bad[n++].B = SIZE_MAX / 64;
    bad[n++].cache_B = SIZE_MAX / 64;
    CHECK(n == sizeof bad / sizeof bad[0]);
    MemoryPlan plan;
    Error err = {0};
    CHECK_MSG(gpt_plan(&good, &plan, &err), "%s", err.text);
    for (size_t i = 0; i < n; i++) {
        Error plan_err = {0}, new_err = {0};
        CHECK_MSG(!gpt_plan(&bad[i], &plan, &plan_err), "configuration %zu is planned", i);
        CHECK_MSG(strlen(plan_err.text) > 20, "configuration %zu: \"%s\"", i, plan_err.text);
        Gpt *gpt = gpt_new(&bad[i], &new_err);
        CHECK_MSG(gpt == NULL && strlen(new_err.text) > 20, "configuration %zu: \"%s\"", i, new_err.text);
        gpt_free(gpt);
    }
    /* The largest sizes that a configuration may name, together: their product must not wrap round. */
    GptSetup huge = good;
    huge.config.channels = huge.config.heads = 1 << 30, huge.config.ctx = INT32_MAX;
    huge.config.position = POSITION_LEARNED, huge.config.layers = 1000;
    CHECK(!gpt_plan(&huge, &plan, &err) && strlen(err.text) > 20);
}

/* ---- initial weights ---- */

/* The mean of n normal numbers of spread s has the standard deviation s / sqrt(n), their measured spread
 * s / sqrt(2 n): five of those are allowed, which one tensor in a million passes by chance. */
TEST(initial_weights) {
    const RefShape shape = {1, 50, 96, 3, 257, 2, false, 0, 0};
    Problem problem = problem_new(shape);
    size_t backends = 0, count = 0;
    Gpt *gpt = model_new(&problem, next_backend(&backends, &shape, 1), 1, false, 0);
    if (gpt) {
        const Parameter *table = gpt_table(gpt, &count);
        gpt_init_weights(gpt, 1);
        float *one = buffer_new(gpt, &problem.table, GPT_WEIGHTS);
        gpt_init_weights(gpt, 2);
        float *two = buffer_new(gpt, &problem.table, GPT_WEIGHTS);
        gpt_init_weights(gpt, 1);
        float *again = buffer_new(gpt, &problem.table, GPT_WEIGHTS);
        CHECK(memcmp(one, again, problem.table.total * sizeof(float)) == 0);
        for (size_t i = 0; i < count; i++) {
            const float *w = one + problem.table.tensor[i].offset,
                        *other = two + problem.table.tensor[i].offset;
            const double n = (double)table[i].size, spread = (double)table[i].spread;
            double mean = 0, squares = 0;
            size_t equal = 0, constant = 0;
            for (size_t j = 0; j < table[i].size; j++) {
                mean += (double)w[j] / n;
                equal += w[j] == other[j], constant += w[j] == table[i].constant;
            }
            for (size_t j = 0; j < table[i].size; j++)
                squares += ((double)w[j] - mean) * ((double)w[j] - mean);
            if (spread == 0) {
                CHECK_MSG(constant == table[i].size, "%s is not %g", table[i].name,
                          (double)table[i].constant);
                continue;
            }
            CHECK_MSG(fabs(mean) <= 5 * spread / sqrt(n), "%s: mean %g", table[i].name, mean);
            CHECK_MSG(fabs(sqrt(squares / n) - spread) <= 5 * spread / sqrt(2 * n), "%s: spread %g, not %g",
                      table[i].name, sqrt(squares / n), spread);
            CHECK_MSG(equal < table[i].size / 100, "%s: %zu numbers are the same for two seeds",
                      table[i].name, equal);
            /* Two tensors of one size hold different numbers. */
            for (size_t k = 0; k < i; k++) {
                if (table[k].size != table[i].size || table[k].spread == 0) continue;
                CHECK_MSG(one[problem.table.tensor[k].offset] / table[k].spread != w[0] / table[i].spread,
                          "%s begins like %s", table[i].name, table[k].name);
            }
        }
        free(one), free(two), free(again);
    }
    gpt_free(gpt);
    problem_free(&problem);
}

int main(int argc, char **argv) {
    test_start(argc, argv, "gpt");
    Error err = {0};
    stream = ops_cpu.open(0, 0, &err);
    if (!stream) {
        printf("  ops_cpu.open: %s\n", err.text);
        return 1;
    }
    RUN(reference_philox);
    RUN(reference_gradients_are_finite_differences);
    RUN(table_of_parameters);
    RUN(loss_and_gradients);
    RUN(splits_of_a_step);
    RUN(twenty_updates);
    RUN(one_batch_overfits);
    RUN(two_runs_are_bit_equal);
    RUN(padding_has_no_effect);
    RUN(steps_that_are_not_finite_are_skipped);
    RUN(evaluation);
    RUN(logits_and_cache);
    RUN(plan_is_what_is_allocated);
    RUN(impossible_configurations_are_errors_in_words);
    RUN(initial_weights);
    ops_cpu.close(stream);
    return test_finish();
}
