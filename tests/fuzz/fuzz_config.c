/* fuzz_config.c - the two small JSON files of a checkpoint, config.json and state.json; the input is both. A
 * configuration that is accepted can be planned: no product of its sizes overflows, however large. */
#include "fuzz.h"

#include "../../model/checkpoint.h"

static void plan(const GptConfig *config, const char *attention, bool training) {
    const AttentionShape shape = {.B = 1,
                                  .T = config->ctx,
                                  .H = config->heads,
                                  .D = config->channels / config->heads,
                                  .training = training};
    Error err = {0};
    GptSetup setup = {
        .config = *config, .ops = &ops_cpu, .B = 1, .training = training, .cache_B = training ? 0 : 1};
    setup.attention = attention_find(attention, "cpu", &shape, &err);
    MemoryPlan found;
    if (!setup.attention || !gpt_plan(&setup, &found, &err)) {
        fuzz_check_error(&err, NULL);
        return;
    }
    size_t total = 0;
    for (size_t i = 0; i < found.rows; i++) MUST(size_add(total, found.row[i].bytes, &total));
    MUST(total == found.total);
    MUST(found.total / sizeof(float) >= gpt_parameter_count(config));
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size) {
    static char *config_path, *state_path;
    if (!config_path) config_path = fuzz_path("config.json"), state_path = fuzz_path("state.json");
    fuzz_write(config_path, input, size);
    fuzz_write(state_path, input, size);

    Error err = {0};
    GptConfig config;
    if (!checkpoint_config(fuzz_folder(), &config, &err)) {
        fuzz_check_error(&err, config_path);
    } else {
        MUST(config.heads > 0 && config.channels % config.heads == 0);
        MUST(config.dropout >= 0 && config.dropout < 1);
        if (config.layers <= 64) { /* the table of parameters grows with the layers: each takes its time */
            (void)checkpoint_bytes(&config);
            MUST(gpt_flops_per_token(&config) > 0);
            plan(&config, "naive", true);
            plan(&config, "flash", true);
            plan(&config, "flash", false);
        }
    }

    TrainState state;
    if (!checkpoint_read_state(fuzz_folder(), &state, &err)) fuzz_check_error(&err, state_path);
    else MUST(state.step <= INT64_MAX && state.tokens <= INT64_MAX && state.total_steps <= INT64_MAX);
    return 0;
}
