/* reference_problem.h - what the tests of whole models share: the reference in both precisions, a problem (weights and
 * tokens) for it and for the program, and how far results are apart. */
#ifndef REFERENCE_PROBLEM_H
#define REFERENCE_PROBLEM_H

#define REAL double
#define REF(name) reference64_##name
#define MATH(name) name
#include "reference_gpt.h"
#define REAL float
#define REF(name) reference32_##name
#define MATH(name) name##f
#include "reference_gpt.h"

#include "reference_bf16.h"

#include "../model/gpt.h"

/* Weights and tokens, in both precisions. */
typedef struct Problem {
    RefShape shape;
    RefTable table;
    double *parameters64;      /* the float ones, exactly */
    float *parameters32;       /* numbers that bf16 has, so that all devices start from the same ones */
    int32_t *tokens, *targets; /* (B, T) */
} Problem;

static inline Problem problem_new(RefShape shape) {
    Problem problem = {.shape = shape, .table = reference_table(&shape)};
    const RefTable *table = &problem.table;
    problem.parameters64 = reference64_numbers(table->total);
    problem.parameters32 = reference32_numbers(table->total);
    /* Far from the small initial weights: every part of the network then carries a gradient of its own size.
     * Matrices keep their input's size (spread 1/sqrt(in)), the head's logits spread over about +-5. */
    for (size_t k = 0; k < table->count; k++) {
        const RefTensor *tensor = &table->tensor[k];
        const bool fc_out = strstr(tensor->name, "mlp.c_proj.weight") != NULL;
        double spread = tensor->decay ? 1 / sqrt((double)(fc_out ? 4 * shape.C : shape.C)) : 0.1;
        if (k == 0 || (k == 1 && !shape.rotary)) spread = 2 / sqrt((double)shape.C);
        for (size_t i = tensor->offset; i < tensor->offset + tensor->size; i++) {
            const double number = (tensor->gain ? 1 : 0) + spread * reference_normal(1, i);
            problem.parameters32[i] = bf16_rounded((float)number);
            problem.parameters64[i] = (double)problem.parameters32[i];
        }
    }
    const size_t rows = shape.B * shape.T;
    problem.tokens = (int32_t *)reference_allocate(rows, sizeof(int32_t));
    problem.targets = (int32_t *)reference_allocate(rows, sizeof(int32_t));
    for (size_t r = 0; r < rows; r++) {
        problem.tokens[r] = (int32_t)(reference_uniform(2, r) * (double)shape.V);
        problem.targets[r] = (int32_t)(reference_uniform(3, r) * (double)shape.V);
    }
    /* The last id of the vocabulary, beside the padding, and the same token again. */
    problem.tokens[0] = problem.targets[rows - 1] = (int32_t)shape.V - 1;
    problem.tokens[rows - 1] = problem.tokens[0];
    return problem;
}

static inline void problem_free(Problem *problem) {
    free(problem->table.tensor), free(problem->parameters64), free(problem->parameters32);
    free(problem->tokens), free(problem->targets);
}

/* The row of the program's table with a name; the table's length where there is none. */
static inline size_t find_row(const Gpt *gpt, const char *name) {
    size_t count = 0, i = 0;
    const Parameter *table = gpt_table(gpt, &count);
    while (i < count && strcmp(table[i].name, name) != 0) i++;
    return i;
}

/* The whole of a buffer in the reference's order, padding left out; to be freed. */
static inline float *buffer_new(Gpt *gpt, const RefTable *table, GptBuffer buffer) {
    float *all = reference32_numbers(table->total);
    for (size_t k = 0; k < table->count; k++)
        gpt_get(gpt, buffer, find_row(gpt, table->tensor[k].name), all + table->tensor[k].offset);
    return all;
}

/* The largest |a - ref|; infinity where a is not finite. */
static inline double largest_error(const double *ref, const float *a, size_t n) {
    double largest = 0;
    for (size_t i = 0; i < n; i++) {
        if (!isfinite(a[i])) return INFINITY;
        largest = fmax(largest, fabs((double)a[i] - ref[i]));
    }
    return largest;
}
static inline double largest_of(const double *x, size_t n) {
    double largest = 0;
    for (size_t i = 0; i < n; i++) largest = fmax(largest, fabs(x[i]));
    return largest;
}
/* NaN where an element is not a number, and then no bound holds. */
static inline double mean_error(const double *ref, const float *a, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += fabs((double)a[i] - ref[i]) / (double)n;
    return sum;
}

#endif
