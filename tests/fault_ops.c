/* fault_ops.c - the program with faults planted into it: linked in front of ops_cpu (-Wl,--wrap=NAME) into
 * a train_gpt of its own, build/release/tests/faulty_train_gpt, by which the tests put numbers that are not
 * finite into a step of the real training loop, and signals into the middle of one of its phases, without
 * depending on time. The environment says what and where, one fault after the other:
 *
 *   FAULTS="PLACE:STEP:WHAT ..."
 *     PLACE  merging     before the tokenizer's first merge (STEP is 0)
 *            rehearsal   within the pass that measures memory before the first step (STEP is 0)
 *            step        within the forward and backward pass of that step (counted from 1, as in the log)
 *            loss        the step's loss                 } WHAT is a number: nan, inf, -inf; of a gradient or
 *            gradient    one of the step's gradients     } weight nan/3: of tensor number 3 (from 0)
 *            weight      a weight, after the step's update
 *            evaluation  within the evaluation after that step (0: before the first)
 *            sampling    at the first token of the stories after that step
 *            saving      within the saving after that step
 *     WHAT   INT, TERM, USR1, HUP, KILL: this signal, taken before the phase goes on; INT*2: twice, with a pause
 *
 * Each fault happens once in a process. After a resume, "after that step" needs a step taken by the process. */
#include <math.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../model/ops.h"
#include "../tokenizer/bpe.h"

/* By these names --wrap finds them. */
Bpe *__real_bpe_trainer_train(BpeTrainer *trainer, uint32_t vocab, Error *err);
Bpe *__wrap_bpe_trainer_train(BpeTrainer *trainer, uint32_t vocab, Error *err);
extern const Ops __real_ops_cpu;
extern Ops __wrap_ops_cpu;
Ops __wrap_ops_cpu;

enum { MAX_FAULTS = 16 };
static struct Fault {
    char place[16], what[16];
    unsigned long step;
    bool done;
} faults[MAX_FAULTS];
static size_t fault_count;
static uint64_t steps_done;
static bool logits_are_next; /* what is downloaded then is no part of a model */

/* What is to happen here, once; NULL: nothing. */
static const char *fault_at(const char *place, uint64_t step) {
    for (size_t i = 0; i < fault_count; i++) {
        if (faults[i].done || faults[i].step != step || strcmp(faults[i].place, place) != 0) continue;
        faults[i].done = true;
        return faults[i].what;
    }
    return NULL;
}

/* Signals are taken by another thread; this one waits for that. */
static void raise_at(const char *place, uint64_t step) {
    static const struct {
        const char *name;
        int number;
    } signals[] = {{"INT", SIGINT}, {"TERM", SIGTERM}, {"USR1", SIGUSR1}, {"HUP", SIGHUP}, {"KILL", SIGKILL}};
    const char *what = fault_at(place, step);
    for (size_t i = 0; what && i < sizeof signals / sizeof signals[0]; i++) {
        const size_t size = strlen(signals[i].name);
        if (strncmp(what, signals[i].name, size) != 0) continue;
        for (int times = strcmp(what + size, "*2") == 0 ? 2 : 1; times > 0; times--) {
            if (stop_requested()) usleep(600 * 1000); /* later, so that it is no part of the first */
            kill(getpid(), signals[i].number);
            while (signals[i].number != SIGHUP && !stop_requested()) sched_yield();
        }
        if (strcmp(what + size, "*2") == 0) pause(); /* the second one ends the process */
    }
}

Bpe *__wrap_bpe_trainer_train(BpeTrainer *trainer, uint32_t vocab, Error *err) {
    raise_at("merging", 0);
    return __real_bpe_trainer_train(trainer, vocab, err);
}

static void faulty_head_loss(Stream *stream, StepState *state, act_t *d_hidden, float *d_wte,
                             const act_t *hidden, const act_t *wte, const int32_t *targets, size_t rows,
                             size_t C, size_t V, float grad_scale, void *scratch) {
    /* Only a step has a learning rate, as long as the tests do not give one of 0. */
    if (!d_hidden) raise_at("evaluation", steps_done);
    else if (state->lr > 0) raise_at("step", state->step + 1);
    else raise_at("rehearsal", 0);
    __real_ops_cpu.head_loss(stream, state, d_hidden, d_wte, hidden, wte, targets, rows, C, V, grad_scale,
                             scratch);
    const char *what = d_hidden && state->lr > 0 ? fault_at("loss", state->step + 1) : NULL;
    if (what) state->loss_sum = strtod(what, NULL);
}

static void faulty_head_logits(Stream *stream, float *logits, const act_t *hidden, size_t stride,
                               const act_t *wte, size_t rows, size_t C, size_t V) {
    raise_at("sampling", steps_done);
    logits_are_next = true;
    __real_ops_cpu.head_logits(stream, logits, hidden, stride, wte, rows, C, V);
}

static void faulty_download(Stream *stream, void *host, const void *device, size_t bytes) {
    if (!logits_are_next) raise_at("saving", steps_done);
    logits_are_next = false;
    __real_ops_cpu.download(stream, host, device, bytes);
}

/* Puts what is due now at the begin of a tensor of a parameter buffer. */
static void plant(const char *place, float *buffer, const ParamSpan *spans, size_t n_spans) {
    for (const char *what; (what = fault_at(place, steps_done));) {
        char *end;
        const float number = strtof(what, &end);
        const size_t tensor = *end == '/' ? strtoul(end + 1, NULL, 10) : 0;
        buffer[spans[tensor < n_spans ? tensor : 0].offset] = number;
    }
}

static void faulty_gradient_norm(Stream *stream, StepState *state, const float *gradients,
                                 const ParamSpan *spans, size_t n_spans, float clip) {
    steps_done = state->step + 1;
    /* The gradients' buffer is the CPU's memory: as if the backward pass had left it there. */
    plant("gradient", (float *)(uintptr_t)gradients, spans, n_spans);
    __real_ops_cpu.gradient_norm(stream, state, gradients, spans, n_spans, clip);
}

static void faulty_adamw(Stream *stream, StepState *state, float *weights, act_t *work,
                         const float *gradients, float *m, float *v, const ParamSpan *spans, size_t n_spans,
                         AdamW settings) {
    __real_ops_cpu.adamw(stream, state, weights, work, gradients, m, v, spans, n_spans, settings);
    plant("weight", weights, spans, n_spans);
}

__attribute__((constructor)) static void start(void) {
    __wrap_ops_cpu = __real_ops_cpu;
    __wrap_ops_cpu.head_loss = faulty_head_loss;
    __wrap_ops_cpu.head_logits = faulty_head_logits;
    __wrap_ops_cpu.download = faulty_download;
    __wrap_ops_cpu.gradient_norm = faulty_gradient_norm;
    __wrap_ops_cpu.adamw = faulty_adamw;
    char *text = getenv("FAULTS"), *next = NULL;
    if (!text) return;
    text = xstrdup(text);
    for (char *word = strtok_r(text, " ", &next); word; word = strtok_r(NULL, " ", &next)) {
        struct Fault *fault = &faults[fault_count++];
        if (fault_count > MAX_FAULTS ||
            sscanf(word, "%15[^:]:%lu:%15s", fault->place, &fault->step, fault->what) != 3) {
            fprintf(stderr, "FAULTS: cannot read \"%s\"\n", word);
            _exit(99);
        }
    }
    free(text);
}
