/* test_ranks.c - alone a process is rank 0 of 1 and calls no MPI; averaging that one process does for nothing
 * (TRAIN_GPT_AVERAGE_ALONE) changes no bit; in which order gradients become final. What several processes do is
 * in test_ranks.sh. */
#include "test.h"

#include <math.h>
#ifdef USE_MPI
#include <mpi.h>
#endif

#include "../model/ranks.h"

static const char *const variables[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"};
enum { VARIABLES = sizeof variables / sizeof variables[0] };

static void check_alone(const char *how) {
    Ranks ranks = {.rank = -1, .count = -1};
    Error err = {0};
    int code = 7;
    CHECK_MSG(ranks_start(&ranks, 1, &err), "%s: %s", how, err.text);
    CHECK(ranks.rank == 0 && ranks.count == 1 && ranks.local_rank == 0 && ranks.local_count == 1);
    CHECK(ranks.cpu_sharers == 1 && ranks.hosts == 1 && !ranks.link);
    CHECK(ranks_all(&ranks, true, &code, &err) && !ranks_all(&ranks, false, &code, &err) && code == 7);
    CHECK(ranks_same(&ranks, "this", "one", "", &err));
    const double ours[2] = {1.5, -2};
    double all[2] = {0, 0};
    ranks_gather(&ranks, ours, 2, all);
    CHECK(all[0] == 1.5 && all[1] == -2);
    Buffer bytes = {0};
    buffer_append_text(&bytes, "text");
    ranks_tell(&ranks, &bytes);
    CHECK(bytes.size == 4 && memcmp(bytes.data, "text", 4) == 0);
    buffer_free(&bytes);
    ranks_average_begin(&ranks, 15);
    ranks_average_end(&ranks);
    CHECK(ranks_step_done(&ranks) == 0 && ranks_take_exposed(&ranks) == 0 &&
          ranks_bytes(&ranks, &ops_cpu) == 0);
    ranks_abort(&ranks, 3); /* nobody to end */
    ranks_end(&ranks);
    ranks_end(&ranks);
#ifdef USE_MPI
    int called = -1;
    MPI_Initialized(&called);
    CHECK_MSG(called == 0, "%s: MPI was started", how);
#endif
}

TEST(alone) {
    static const char *const values[] = {"1", "", "0", "-4", "many", "4x"};
    for (size_t i = 0; i < VARIABLES; i++) unsetenv(variables[i]);
    check_alone("no launcher");
    setenv("SLURM_NTASKS", "4", 1); /* of a job's script, which is one process */
    check_alone("SLURM_NTASKS=4");
    unsetenv("SLURM_NTASKS");
    for (size_t i = 0; i < VARIABLES; i++) {
        for (size_t k = 0; k < sizeof values / sizeof values[0]; k++) {
            setenv(variables[i], values[k], 1);
            check_alone(values[k]);
        }
        unsetenv(variables[i]);
    }
    /* mpirun -n 1 within a Slurm job of four tasks: what mpirun says counts. */
    setenv("OMPI_COMM_WORLD_SIZE", "1", 1), setenv("SLURM_STEP_NUM_TASKS", "4", 1);
    check_alone("mpirun within srun");
    unsetenv("OMPI_COMM_WORLD_SIZE"), unsetenv("SLURM_STEP_NUM_TASKS");
}

#ifndef USE_MPI
TEST(one_of_several_is_refused) {
    for (size_t i = 0; i < VARIABLES; i++) {
        setenv(variables[i], "4", 1);
        Ranks ranks;
        Error err = {0};
        CHECK(!ranks_start(&ranks, 1, &err));
        CHECK_MSG(strstr(err.text, "4 processes") && strstr(err.text, variables[i]), "%s", err.text);
        unsetenv(variables[i]);
    }
}
#endif

/* ---- a small model ---- */

enum { B = 2, T = 8, L = 3 };

static Gpt *small_model(Stream *stream, Position position) {
    const AttentionShape shape = {.B = B, .T = T, .H = 2, .D = 8, .training = true};
    Error err = {0};
    const GptSetup setup = {.config = {.layers = L,
                                       .heads = 2,
                                       .channels = 16,
                                       .ctx = T,
                                       .vocab = 50,
                                       .position = position,
                                       .dropout = 0.1f},
                            .ops = &ops_cpu,
                            .attention = attention_find("flash", "cpu", &shape, &err),
                            .stream = stream,
                            .B = B,
                            .training = true,
                            .seed = 5};
    Gpt *gpt = gpt_new(&setup, &err);
    CHECK_MSG(gpt, "%s", err.text);
    if (gpt) gpt_init_weights(gpt, 1);
    return gpt;
}

static void fill_tokens(int32_t *tokens, size_t n) {
    Rng rng = rng_start(2, 0);
    for (size_t i = 0; i < n; i++) tokens[i] = (int32_t)rng_below(&rng, 50);
}

/* What has been called final, with the gradients as they were then. */
typedef struct Finals {
    Gpt *gpt;
    size_t calls, last;
    float *copy; /* the whole buffer */
    size_t floats;
    const Parameter *table;
} Finals;

static void on_final(void *user, size_t first) {
    Finals *finals = user;
    const float *now = gpt_buffer(finals->gpt, GPT_GRADIENTS, &finals->floats);
    CHECK_MSG(first < finals->last, "row %zu after row %zu", first, finals->last);
    const size_t from = finals->table[first].offset,
                 end = finals->calls ? finals->table[finals->last].offset : finals->floats;
    memcpy(finals->copy + from, now + from, (end - from) * sizeof *now);
    finals->last = first, finals->calls++;
}

/* The plain twin: the gradients after the whole pass. None may have changed since it was called final, every row
 * must have been, and only in the pass that was asked for. */
TEST(final_is_final) {
    Error err;
    Stream *stream = ops_cpu.open(0, 1, &err);
    int32_t tokens[2 * B * T];
    fill_tokens(tokens, 2 * B * T);
    for (int position = 0; position < 2; position++) {
        Gpt *gpt = small_model(stream, position ? POSITION_LEARNED : POSITION_ROTARY);
        if (!gpt) continue;
        size_t rows, floats;
        Finals finals = {.gpt = gpt, .table = gpt_table(gpt, &rows)};
        const float *gradients = gpt_buffer(gpt, GPT_GRADIENTS, &floats);
        finals.last = rows;
        finals.copy = xmalloc(floats * sizeof *finals.copy);
        for (size_t i = 0; i < floats; i++) finals.copy[i] = NAN;
        gpt_step_begin(gpt, 0, 1e-3f);
        gpt_forward_backward(gpt, tokens, tokens + B * T, B, 0, 2 * B * T);
        CHECK(finals.calls == 0);
        gpt_tell_final(gpt, on_final, &finals);
        gpt_forward_backward(gpt, tokens, tokens + B * T, B, B, 2 * B * T);
        CHECK(finals.last == 0 && finals.calls == 2 + 6 * L);
        CHECK(memcmp(finals.copy, gradients, floats * sizeof *gradients) == 0);
        gpt_forward_backward(gpt, tokens, tokens + B * T, B, 0, 2 * B * T);
        CHECK(finals.calls == 2 + 6 * L);
        free(finals.copy);
        gpt_free(gpt);
    }
    ops_cpu.close(stream);
}

/* Three steps with and without. */
TEST(averaging_alone_changes_nothing) {
#ifndef USE_MPI
    SKIP("this build has no MPI");
#else
    Error err;
    Stream *stream = ops_cpu.open(0, 1, &err);
    const AdamW adamw = {.beta1 = 0.9f, .beta2 = 0.95f, .epsilon = 1e-8f, .weight_decay = 0.1f, .clip = 1.0f};
    int32_t tokens[2 * B * T];
    fill_tokens(tokens, 2 * B * T);
    Gpt *gpt[2] = {small_model(stream, POSITION_ROTARY), small_model(stream, POSITION_ROTARY)};
    StepState state[2];
    for (int with = 0; with < 2 && gpt[0] && gpt[1]; with++) {
        Ranks ranks;
        if (with) setenv("TRAIN_GPT_AVERAGE_ALONE", "1", 1);
        CHECK(ranks_start(&ranks, 1, &err) && ranks.count == 1 && !ranks.link == !with);
        unsetenv("TRAIN_GPT_AVERAGE_ALONE");
        CHECK(ranks_join_devices(&ranks, &ops_cpu, stream, &err));
        ranks_attach(&ranks, gpt[with]);
        for (uint64_t step = 0; step < 3; step++) {
            gpt_step_begin(gpt[with], step, 1e-2f);
            ranks_average_begin(&ranks, 12);
            gpt_forward_backward(gpt[with], tokens, tokens + B * T, B, 0, B * T);
            ranks_average_end(&ranks);
            gpt_step_end(gpt[with], adamw);
            CHECK(ranks_step_done(&ranks) == (with ? 12 : 0));
            state[with] = gpt_step_state(gpt[with]);
        }
        ranks_detach(&ranks);
        ranks_end(&ranks);
    }
    if (gpt[0] && gpt[1]) {
        size_t n;
        const float *without = gpt_buffer(gpt[0], GPT_WEIGHTS, &n),
                    *with = gpt_buffer(gpt[1], GPT_WEIGHTS, &n);
        CHECK(memcmp(without, with, n * sizeof *with) == 0);
        CHECK(state[0].loss_sum == state[1].loss_sum && state[0].grad_norm == state[1].grad_norm);
    }
    gpt_free(gpt[0]), gpt_free(gpt[1]);
    ops_cpu.close(stream);
#endif
}

int main(int argc, char **argv) {
    test_start(argc, argv, "ranks");
    RUN(alone);
#ifndef USE_MPI
    RUN(one_of_several_is_refused);
#endif
    RUN(final_is_final);
    RUN(averaging_alone_changes_nothing);
    return test_finish();
}
