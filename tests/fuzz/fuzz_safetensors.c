/* fuzz_safetensors.c - a model.safetensors from anywhere (a folder without MANIFEST) into a model of fixed
 * shape.
 *
 * The first byte of the input chooses: even, the rest is the file; odd, two bytes of little-endian size and
 * the header's text follow, from which the harness makes the length before it and as many bytes of data
 * behind it. So the checks of the header are reached although its length and the file's would have to be
 * right. */
#include "fuzz.h"

#include "../../model/checkpoint.h"

static const char config_json[] = "{\"model_type\": \"gpt2\", \"n_layer\": 1, \"n_head\": 1, \"n_embd\": 2, "
                                  "\"n_positions\": 1, \"vocab_size\": 2}";

static Gpt *make_model(void) {
    const GptConfig config = {
        .layers = 1, .heads = 1, .channels = 2, .ctx = 1, .vocab = 2, .position = POSITION_LEARNED};
    const AttentionShape shape = {.B = 1, .T = 1, .H = 1, .D = 2};
    Error err;
    const GptSetup setup = {.config = config,
                            .ops = &ops_cpu,
                            .attention = attention_find("naive", "cpu", &shape, &err),
                            .stream = ops_cpu.open(0, 1, &err),
                            .B = 1};
    Gpt *gpt = gpt_new(&setup, &err);
    MUST(gpt);
    return gpt;
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size) {
    static char *path;
    static Gpt *gpt;
    if (!path) {
        char *config = fuzz_path("config.json");
        fuzz_write(config, config_json, sizeof config_json - 1);
        free(config);
        path = fuzz_path("model.safetensors");
        gpt = make_model();
    }
    if (size == 0) return 0;
    if (input[0] % 2 == 0) {
        fuzz_write(path, input + 1, size - 1);
    } else if (size >= 3) {
        const uint64_t header = size - 3;
        const size_t data = input[1] + 256u * input[2];
        Buffer file = {0};
        buffer_append(&file, &header, sizeof header);
        buffer_append(&file, input + 3, size - 3);
        for (size_t i = 0; i < data; i++) buffer_append(&file, &input[i % size], 1);
        fuzz_write(path, file.data, file.size);
        buffer_free(&file);
    }
    Error err = {0};
    if (!checkpoint_load(fuzz_folder(), gpt, NULL, &err)) fuzz_check_error(&err, path);
    return 0;
}
