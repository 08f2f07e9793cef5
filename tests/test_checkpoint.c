/* test_checkpoint.c - checkpoints: what is written is read back bit by bit, everything damaged or hostile is
 * found and named, a good checkpoint is never lost, and other programs' files and ours fit together. */
#include "test.h"

#include "../model/checkpoint.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static char root[64];  /* of this run's temporary files */
static Stream *stream; /* of ops_cpu, for all tests */
static Error err;

/* ---- paths and files ---- */

/* A path, valid until the sixteenth call after it. */
PRINTF_LIKE(1, 2) static const char *at(const char *format, ...) {
    static char paths[16][512];
    static size_t next;
    char *path = paths[next++ % 16];
    const int used = snprintf(path, sizeof paths[0], "%s/", root);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(path + used, sizeof paths[0] - (size_t)used, format, arguments);
    va_end(arguments);
    return path;
}

static void write_plain(const char *path, const void *bytes, size_t size) {
    FILE *file = fopen(path, "wb");
    CHECK(file && fwrite(bytes, 1, size, file) == size);
    if (file) fclose(file);
}

static Buffer read_plain(const char *path) {
    Buffer buffer = {0};
    CHECK(file_read(path, (size_t)1 << 30, &buffer, NULL));
    return buffer;
}

static ino_t inode_of(const char *path) {
    struct stat status;
    return stat(path, &status) == 0 ? status.st_ino : 0;
}

static bool says(const char *part) {
    return strstr(err.text, part) != NULL;
}

/* ---- models ---- */

static const GptConfig small = {.layers = 2,
                                .heads = 2,
                                .channels = 16,
                                .ctx = 12,
                                .vocab = 37,
                                .position = POSITION_ROTARY,
                                .dropout = 0.1f};

static GptConfig with_learned(GptConfig config) {
    config.position = POSITION_LEARNED;
    return config;
}

static Gpt *model_new(GptConfig config) {
    const AttentionShape shape = {
        .B = 1, .T = config.ctx, .H = config.heads, .D = config.channels / config.heads};
    const GptSetup setup = {.config = config,
                            .ops = &ops_cpu,
                            .attention = attention_find("naive", "cpu", &shape, &err),
                            .stream = stream,
                            .B = 1,
                            .training = true};
    Gpt *gpt = gpt_new(&setup, &err);
    if (!gpt) printf("no model: %s\n", err.text), exit(1);
    return gpt;
}

static const GptBuffer saved_buffers[] = {GPT_WEIGHTS, GPT_ADAM_M, GPT_ADAM_V};
enum { SAVED_BUFFERS = 3 };

/* A number that float holds exactly and that names its place; as in tests/peers/check_safetensors.py. */
static float number_at(size_t buffer, size_t parameter, size_t i) {
    return (float)((buffer * 7919 + parameter * 131 + i) % 4093) / 256.0f - 8.0f;
}

static void fill(Gpt *gpt) {
    size_t count;
    const Parameter *table = gpt_table(gpt, &count);
    for (size_t b = 0; b < SAVED_BUFFERS; b++) {
        for (size_t p = 0; p < count; p++) {
            float *host = xmalloc(table[p].size * sizeof *host);
            for (size_t i = 0; i < table[p].size; i++) host[i] = number_at(b, p, i);
            gpt_set(gpt, saved_buffers[b], p, host);
            free(host);
        }
    }
}

/* Whether the first `buffers` buffers hold the same bits. */
static bool same_numbers(Gpt *a, Gpt *b, size_t buffers) {
    size_t count, bad = 0;
    const Parameter *table = gpt_table(a, &count);
    for (size_t k = 0; k < buffers; k++) {
        for (size_t p = 0; p < count; p++) {
            const size_t bytes = table[p].size * sizeof(float);
            float *x = xmalloc(bytes), *y = xmalloc(bytes);
            gpt_get(a, saved_buffers[k], p, x);
            gpt_get(b, saved_buffers[k], p, y);
            bad += memcmp(x, y, bytes) != 0;
            free(x);
            free(y);
        }
    }
    return bad == 0;
}

static TrainState state_at(uint64_t step, double eval_loss) {
    return (TrainState){.step = step,
                        .updates = step,
                        .tokens = step * 96,
                        .total_steps = 1000,
                        .seconds = 1.25,
                        .eval_loss = eval_loss,
                        .best_loss = NAN,
                        .best_step = 0};
}

static bool same_double(double a, double b) {
    return a == b || (isnan(a) && isnan(b));
}

static const CheckpointFile tokenizer_files[] = {{"tokenizer.json", "{}\n", 3},
                                                 {"merges.txt", "#version: 0.2\n", 14}};

static bool save(const char *checkpoints, Gpt *gpt, uint64_t step, double eval_loss) {
    const TrainState state = state_at(step, eval_loss);
    const bool done = checkpoint_save(checkpoints, gpt, &state, tokenizer_files, 2, &err);
    CHECK_MSG(done, "%s", err.text);
    return done;
}

/* Whether a path that checkpoint_newest or _best gave, which is freed here, ends in `name`; NULL: none. */
static bool is_named(char *path, const char *name) {
    const bool same = path && name ? strcmp(strrchr(path, '/') + 1, name) == 0 : !path && !name;
    if (!same) printf("  found %s, expected %s\n", path ? path : "nothing", name ? name : "nothing");
    free(path);
    return same;
}

/* ---- round trips ---- */

static void round_trip(GptConfig config, const char *name) {
    Gpt *gpt = model_new(config), *other = model_new(config);
    fill(gpt);
    /* Numbers that text or arithmetic would change. */
    float *bias = xmalloc(config.channels * sizeof *bias);
    const float special[] = {-0.0f, 1e-45f, -3.4028235e38f, 3.4028235e38f, 0.1f, 1.1754942e-38f};
    size_t count;
    const Parameter *table = gpt_table(gpt, &count);
    for (size_t i = 0; i < config.channels; i++) bias[i] = special[i % 6];
    CHECK(table[count - 1].size == config.channels);
    gpt_set(gpt, GPT_WEIGHTS, count - 1, bias);
    free(bias);

    TrainState state = {.step = 123456789,
                        .updates = 123456780,
                        .tokens = INT64_MAX,
                        .total_steps = (uint64_t)1 << 53,
                        .seconds = 0.1 + 0.2,
                        .eval_loss = NAN,
                        .best_loss = 1.0 / 3,
                        .best_step = ((uint64_t)1 << 53) + 1,
                        .bad_steps = 2,
                        .cut_short = 1,
                        .stories = 8},
               read;
    const char *folder = at("%s", name);
    CHECK_MSG(checkpoint_save(folder, gpt, &state, tokenizer_files, 2, &err), "%s", err.text);
    const char *path = at("%s/step-123456789", name);
    GptConfig config_read;
    CHECK_MSG(checkpoint_config(path, &config_read, &err), "%s", err.text);
    CHECK(config_read.layers == config.layers && config_read.heads == config.heads);
    CHECK(config_read.channels == config.channels && config_read.ctx == config.ctx);
    CHECK(config_read.vocab == config.vocab && config_read.position == config.position);
    CHECK(config_read.dropout == config.dropout);

    CHECK_MSG(checkpoint_load(path, other, &read, &err), "%s", err.text);
    CHECK(same_numbers(gpt, other, SAVED_BUFFERS));
    CHECK(gpt_step_state(other).updates == state.updates);
    CHECK(read.step == state.step && read.updates == state.updates && read.tokens == state.tokens);
    CHECK(read.total_steps == state.total_steps && read.best_step == state.best_step);
    CHECK(read.bad_steps == 2 && read.cut_short == 1 && read.stories == 8);
    CHECK(read.seconds == state.seconds && isnan(read.eval_loss) && read.best_loss == state.best_loss);

    /* Without a state the weights alone move. */
    Gpt *third = model_new(config);
    CHECK(checkpoint_load(path, third, NULL, &err));
    CHECK(same_numbers(gpt, third, 1) && !same_numbers(gpt, third, SAVED_BUFFERS));
    CHECK(gpt_step_state(third).updates == 0);

    Buffer merges = read_plain(at("%s/step-123456789/merges.txt", name));
    CHECK(merges.size == tokenizer_files[1].size &&
          memcmp(merges.data, tokenizer_files[1].bytes, merges.size) == 0);
    buffer_free(&merges);
    gpt_free(gpt);
    gpt_free(other);
    gpt_free(third);
}

TEST(round_trip_rotary) {
    round_trip(small, "rotary");
}
TEST(round_trip_learned) {
    round_trip(with_learned(small), "learned");
}

TEST(size_is_foretold) {
    Gpt *gpt = model_new(small);
    save(at("size"), gpt, 1, NAN);
    char **names;
    size_t count, bytes = 0;
    CHECK(folder_names(at("size/step-00000001"), &names, &count, &err));
    CHECK(count == 7);
    for (size_t i = 0; i < count; i++) {
        struct stat status;
        CHECK(stat(at("size/step-00000001/%s", names[i]), &status) == 0);
        bytes += (size_t)status.st_size;
        free(names[i]);
    }
    free(names);
    /* An upper bound, off by less than its allowances: 64 KiB, and 256 bytes a tensor and file. */
    size_t tensors;
    (void)gpt_table(gpt, &tensors);
    const size_t foretold = checkpoint_bytes(&small);
    CHECK(bytes <= foretold && foretold <= bytes + 64 * 1024 + 3 * tensors * 256);
    GptConfig absurd = small;
    absurd.channels = (size_t)1 << 30, absurd.layers = 1000, absurd.heads = 1;
    CHECK(checkpoint_bytes(&absurd) == SIZE_MAX || checkpoint_bytes(&absurd) > (size_t)1 << 60);
    gpt_free(gpt);
}

TEST(data_begin_aligned) {
    Gpt *gpt = model_new(small);
    save(at("aligned"), gpt, 1, NAN);
    static const char *const files[] = {"model.safetensors", "optimizer.safetensors"};
    for (size_t i = 0; i < 2; i++) {
        Buffer file = read_plain(at("aligned/step-00000001/%s", files[i]));
        uint64_t n = 0;
        CHECK(file.size > sizeof n);
        memcpy(&n, file.data, sizeof n);
        CHECK((sizeof n + n) % 64 == 0 && file.data[sizeof n] == '{');
        buffer_free(&file);
    }
    gpt_free(gpt);
}

TEST(config_as_hugging_face_writes_it) {
    static const char *const gpt2[] = {"\"model_type\": \"gpt2\"",
                                       "\"architectures\": [\n    \"GPT2LMHeadModel\"",
                                       "\"n_positions\": 12",
                                       "\"n_ctx\": 12",
                                       "\"n_embd\": 16",
                                       "\"n_layer\": 2",
                                       "\"n_head\": 2",
                                       "\"vocab_size\": 37",
                                       "\"activation_function\": \"gelu_new\"",
                                       "\"layer_norm_epsilon\": 1e-5",
                                       "\"resid_pdrop\": 0.1",
                                       "\"embd_pdrop\": 0.1",
                                       "\"attn_pdrop\": 0.0",
                                       "\"bos_token_id\": 36",
                                       "\"eos_token_id\": 36",
                                       "\"tie_word_embeddings\": true"};
    Gpt *learned = model_new(with_learned(small)), *rotary = model_new(small);
    save(at("hf"), learned, 1, NAN);
    save(at("hf"), rotary, 2, NAN);
    Buffer text = read_plain(at("hf/step-00000001/config.json"));
    buffer_append(&text, "", 1);
    for (size_t i = 0; i < sizeof gpt2 / sizeof gpt2[0]; i++)
        CHECK_MSG(strstr((char *)text.data, gpt2[i]), "config.json lacks %s", gpt2[i]);
    buffer_free(&text);
    text = read_plain(at("hf/step-00000002/config.json"));
    buffer_append(&text, "", 1);
    CHECK(strstr((char *)text.data, "\"model_type\": \"train_gpt_rotary\""));
    CHECK(!strstr((char *)text.data, "GPT2"));
    buffer_free(&text);
    /* Another kind of positions than the model's is refused, though only learned ones have a tensor. */
    CHECK(!checkpoint_load(at("hf/step-00000001"), rotary, NULL, &err) && says("learned positions"));
    CHECK(!checkpoint_load(at("hf/step-00000002"), learned, NULL, &err) && says("rotary positions"));
    GptConfig heads = small;
    heads.heads = 4;
    Gpt *other = model_new(heads);
    CHECK(!checkpoint_load(at("hf/step-00000002"), other, NULL, &err) && says("2 heads"));
    gpt_free(other);
    gpt_free(learned);
    gpt_free(rotary);
}

/* ---- damage ---- */

static const char *const checkpoint_files[] = {"MANIFEST",          "config.json",           "merges.txt",
                                               "model.safetensors", "optimizer.safetensors", "state.json",
                                               "tokenizer.json"};

/* Step 3 is damaged now: it is passed over, named with its file, and step 2 is taken. */
static void expect_passed_over(const char *file, const char *what) {
    Buffer passed_over = {0};
    char *newest = checkpoint_newest(at("damage"), &passed_over, &err);
    buffer_append(&passed_over, "", 1);
    const char *text = (const char *)passed_over.data;
    CHECK_MSG(is_named(newest, "step-00000002"), "%s, %s: step 3 was taken", file, what);
    CHECK_MSG(strstr(text, "step-00000003") && strstr(text, file), "%s, %s: said %s", file, what, text);
    CHECK(strlen(text) > 0 && strchr(text, '\n') == text + strlen(text) - 1);
    buffer_free(&passed_over);
    /* Its loss is the lowest; the best is another all the same. */
    CHECK(is_named(checkpoint_best(at("damage"), NULL, &err), "step-00000001"));
    Gpt *gpt = model_new(small);
    TrainState state;
    CHECK(!checkpoint_load(at("damage/step-00000003"), gpt, &state, &err) && says(file));
    gpt_free(gpt);
}

TEST(damage_is_found) {
    Gpt *gpt = model_new(small);
    fill(gpt);
    save(at("damage"), gpt, 1, 1.5);
    save(at("damage"), gpt, 2, 2.5);
    save(at("damage"), gpt, 3, 1.0);
    CHECK(is_named(checkpoint_newest(at("damage"), NULL, &err), "step-00000003"));
    Rng rng = rng_start(1, 1);
    for (size_t f = 0; f < sizeof checkpoint_files / sizeof checkpoint_files[0]; f++) {
        const char *file = checkpoint_files[f];
        char *path = xstrdup(at("damage/step-00000003/%s", file));
        Buffer good = read_plain(path);
        for (int round = 0; round < 100; round++) {
            const size_t byte = (size_t)rng_below(&rng, good.size), bit = (size_t)rng_below(&rng, 8);
            good.data[byte] ^= (uint8_t)(1u << bit);
            write_plain(path, good.data, good.size);
            good.data[byte] ^= (uint8_t)(1u << bit);
            expect_passed_over(file, "a flipped bit");
        }
        for (int round = 0; round < 20; round++) {
            write_plain(path, good.data, round ? (size_t)rng_below(&rng, good.size) : 0);
            expect_passed_over(file, "cut");
        }
        CHECK(remove(path) == 0);
        expect_passed_over(file, "gone");
        write_plain(path, good.data, good.size);
        buffer_free(&good);
        free(path);
    }
    CHECK(is_named(checkpoint_newest(at("damage"), NULL, &err), "step-00000003"));
    gpt_free(gpt);
}

TEST(nothing_good_is_said) {
    CHECK(folder_make(at("none"), &err));
    CHECK(!checkpoint_newest(at("none"), NULL, &err) && says("no checkpoint in"));
    CHECK(!checkpoint_best(at("none/such"), NULL, &err) && says("none/such"));
    Gpt *gpt = model_new(small);
    save(at("none"), gpt, 1, NAN);
    save(at("none"), gpt, 2, NAN);
    write_plain(at("none/step-00000001/state.json"), "{", 1);
    write_plain(at("none/step-00000002/state.json"), "{", 1);
    Buffer passed_over = {0};
    CHECK(!checkpoint_newest(at("none"), &passed_over, &err) && says("all 2") && says("state.json"));
    size_t lines = 0;
    for (size_t i = 0; i < passed_over.size; i++) lines += passed_over.data[i] == '\n';
    CHECK(lines == 2);
    buffer_free(&passed_over);
    gpt_free(gpt);
}

/* ---- which one ---- */

TEST(best_and_newest) {
    Gpt *gpt = model_new(small);
    save(at("choice"), gpt, 1, NAN);
    save(at("choice"), gpt, 2, NAN);
    CHECK(is_named(checkpoint_best(at("choice"), NULL, &err), "step-00000002")); /* none evaluated */
    save(at("choice"), gpt, 3, 2.0);
    save(at("choice"), gpt, 4, 1.0);
    save(at("choice"), gpt, 5, 1.0);
    save(at("choice"), gpt, 6, 3.0);
    save(at("choice"), gpt, 100000000, NAN); /* nine digits: newer, though it sorts before by its name */
    CHECK(is_named(checkpoint_best(at("choice"), NULL, &err), "step-00000005"));
    CHECK(is_named(checkpoint_newest(at("choice"), NULL, &err), "step-100000000"));
    /* What is not a checkpoint's name is not looked at. */
    static const char *const others[] = {"step-00000099.tmp-1", "step-99",
                                         "step-00000099x",      "notes",
                                         "step-099999999999",   "step-99999999999999999999"};
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++)
        CHECK(folder_make(at("choice/%s", others[i]), &err));
    write_plain(at("choice/step-200000000"), "a file", 6);
    Buffer passed_over = {0};
    CHECK(is_named(checkpoint_newest(at("choice"), &passed_over, &err), "step-100000000"));
    CHECK(passed_over.size == 0);
    buffer_free(&passed_over);
    gpt_free(gpt);
}

/* What happens once a folder has been listed, before what is in it is read. */
static void (*after_list)(void);

#if defined(__linux__)
int closedir(DIR *listed) {
    int (*real)(DIR *);
    *(void **)&real = dlsym(RTLD_NEXT, "closedir");
    const int status = real(listed);
    void (*const then)(void) = after_list;
    after_list = NULL;
    if (then) then();
    return status;
}

/* The reason for which the next folder cannot be listed; 0: it can. */
static int failing_list;

DIR *opendir(const char *path) {
    DIR *(*real)(const char *);
    *(void **)&real = dlsym(RTLD_NEXT, "opendir");
    errno = failing_list;
    failing_list = 0;
    return errno ? NULL : real(path);
}

static void train_on(void) {
    CHECK(rename(at("passing/step-00000001"), at("passing/step-00000002")) == 0);
}
#endif

/* A run that is being trained keeps its newest one: the one that was listed is gone, and not damaged. */
TEST(found_while_they_come_and_go) {
#if defined(__linux__)
    Gpt *gpt = model_new(small);
    for (int lowest = 0; lowest < 2; lowest++) {
        CHECK(folder_remove(at("passing"), &err));
        save(at("passing"), gpt, 1, NAN);
        Buffer damaged = {0};
        after_list = train_on;
        char *found = (lowest ? checkpoint_best : checkpoint_newest)(at("passing"), &damaged, &err);
        CHECK_MSG(found, "%s", err.text);
        CHECK(is_named(found, "step-00000002") && damaged.size == 0);
        buffer_free(&damaged);
    }
    gpt_free(gpt);
#endif
}

/* Training goes on with the ctx and the dropout that it had; who only uses a model may have others. */
TEST(what_a_run_goes_on_with) {
    Gpt *gpt = model_new(small);
    save(at("on"), gpt, 1, NAN);
    GptConfig longer = small, wetter = small;
    longer.ctx = 2 * small.ctx, wetter.dropout = 0.5f;
    const GptConfig others[] = {longer, wetter};
    for (size_t i = 0; i < 2; i++) {
        Gpt *other = model_new(others[i]);
        TrainState state;
        CHECK(!checkpoint_load(at("on/step-00000001"), other, &state, &err));
        CHECK_MSG(says("ctx of 12 and a dropout of 0.1") && says("run.json"), "%s", err.text);
        CHECK(checkpoint_load(at("on/step-00000001"), other, NULL, &err));
        gpt_free(other);
    }
    gpt_free(gpt);
}

TEST(prune_keeps_what_matters) {
    Gpt *gpt = model_new(small);
    for (uint64_t step = 1; step <= 6; step++) save(at("prune"), gpt, step, NAN);
    CHECK(folder_make(at("prune/step-00000007.tmp-12"), &err));
    CHECK(folder_make(at("prune/notes.tmp-12"), &err));
    CHECK_MSG(checkpoint_prune(at("prune"), 2, 2, &err), "%s", err.text);
    CHECK(folder_exists(at("prune/step-00000006")) && folder_exists(at("prune/step-00000005")));
    CHECK(!folder_exists(at("prune/step-00000004")) && !folder_exists(at("prune/step-00000003")));
    CHECK(folder_exists(at("prune/step-00000002")) && !folder_exists(at("prune/step-00000001")));
    CHECK(!folder_exists(at("prune/step-00000007.tmp-12")) && folder_exists(at("prune/notes.tmp-12")));

    /* The newest is damaged: it cannot push out the newest good one. */
    write_plain(at("prune/step-00000006/config.json"), "{}", 2);
    CHECK(checkpoint_prune(at("prune"), 1, 2, &err));
    CHECK(folder_exists(at("prune/step-00000005")) && !folder_exists(at("prune/step-00000006")));
    CHECK(is_named(checkpoint_newest(at("prune"), NULL, &err), "step-00000005"));

    /* Even to keep none leaves the only good one. */
    CHECK(checkpoint_prune(at("prune"), 0, 0, &err));
    CHECK(is_named(checkpoint_newest(at("prune"), NULL, &err), "step-00000005"));
    CHECK(!folder_exists(at("prune/step-00000002")));

    /* Where none is good, nothing goes. */
    write_plain(at("prune/step-00000005/config.json"), "{}", 2);
    CHECK(checkpoint_prune(at("prune"), 0, 0, &err));
    CHECK(folder_exists(at("prune/step-00000005")));
    CHECK(!checkpoint_prune(at("prune/nowhere"), 1, 0, &err) && says("nowhere"));
    gpt_free(gpt);
}

/* ---- what cannot be read ---- */

/* Puts a link to a file of a checkpoint in its place: it is not followed, so that the file cannot be read, and is as
 * good as before. */
static void link_away(const char *checkpoints, uint64_t step, const char *file) {
    char *path = xstrdup(at("%s/step-%08d/%s", checkpoints, (int)step, file)), *away = xstrdup(at("away"));
    CHECK(rename(path, away) == 0 && symlink(away, path) == 0);
    free(away);
    free(path);
}

static void link_back(const char *checkpoints, uint64_t step, const char *file) {
    CHECK(rename(at("away"), at("%s/step-%08d/%s", checkpoints, (int)step, file)) == 0);
}

/* It is neither passed over nor counted among the damaged: who went on from another one would remove it. */
TEST(unreadable_is_not_damaged) {
    Gpt *gpt = model_new(small);
    for (uint64_t step = 1; step <= 4; step++) save(at("unread"), gpt, step, (double)step);
    for (size_t f = 1; f < sizeof checkpoint_files / sizeof checkpoint_files[0]; f++) {
        const char *file = checkpoint_files[f];
        link_away("unread", 4, file);
        char *expected = xformat("step-00000004/%s: it is a symbolic link, which is not followed; ", file);
        Buffer passed_over = {0};
        CHECK_MSG(!checkpoint_newest(at("unread"), &passed_over, &err) && says(expected), "%s", err.text);
        CHECK(says(", or move that checkpoint away to go on without it") && passed_over.size == 0);
        /* Who only reads takes another one. */
        CHECK(is_named(checkpoint_best(at("unread"), &passed_over, &err), "step-00000001"));
        CHECK(memmem(passed_over.data, passed_over.size, expected, strlen(expected)) != NULL);
        buffer_free(&passed_over);
        CHECK_MSG(!checkpoint_prune(at("unread"), 4, 0, &err) && says(expected), "%s", err.text);
        CHECK(says("; that checkpoint stays as it is"));
        free(expected);
        for (uint64_t step = 1; step <= 4; step++) CHECK(folder_exists(at("unread/step-%08d", (int)step)));
        link_back("unread", 4, file);
        CHECK(is_named(checkpoint_newest(at("unread"), NULL, &err), "step-00000004"));
    }
    /* Step 3 is the newest that is known to be good; what is older goes as ever. */
    link_away("unread", 4, "model.safetensors");
    CHECK(!checkpoint_prune(at("unread"), 1, 1, &err));
    CHECK(!folder_exists(at("unread/step-00000002")) && folder_exists(at("unread/step-00000001")));
    CHECK(folder_exists(at("unread/step-00000003")) && folder_exists(at("unread/step-00000004")));
    /* The newest good one decides; what is older need not be read. */
    save(at("unread"), gpt, 5, NAN);
    CHECK(is_named(checkpoint_newest(at("unread"), NULL, &err), "step-00000005"));
    link_back("unread", 4, "model.safetensors");

    /* A checkpoint that lies elsewhere, on a disk that is not there. */
    CHECK(rename(at("unread/step-00000005"), at("elsewhere")) == 0);
    CHECK(symlink("../elsewhere", at("unread/step-00000005")) == 0);
    CHECK(is_named(checkpoint_newest(at("unread"), NULL, &err), "step-00000005"));
    CHECK(rename(at("elsewhere"), at("gone")) == 0);
    CHECK(!checkpoint_newest(at("unread"), NULL, &err) && says("step-00000005: it is a link to something"));
    CHECK(!checkpoint_prune(at("unread"), 1, 0, &err) && inode_of(at("unread/step-00000004")) != 0);
    gpt_free(gpt);
}

TEST(unreadable_is_not_replaced) {
    Gpt *gpt = model_new(small);
    save(at("unwritten"), gpt, 5, NAN);
    const TrainState other = state_at(5, 1.0);
    link_away("unwritten", 5, "optimizer.safetensors");
    CHECK(!checkpoint_save(at("unwritten"), gpt, &other, tokenizer_files, 2, &err));
    CHECK_MSG(says("optimizer.safetensors: it is a symbolic link"), "%s", err.text);
    link_back("unwritten", 5, "optimizer.safetensors");
    CHECK(folder_check_manifest(at("unwritten/step-00000005"), &err));
    /* Nor where it was moved aside, whatever stands in its place. */
    CHECK(rename(at("unwritten/step-00000005"), at("unwritten/step-00000005.old")) == 0);
    CHECK(folder_make(at("unwritten/step-00000005"), &err));
    link_away("unwritten", 5, "../step-00000005.old/state.json");
    CHECK(!checkpoint_save(at("unwritten"), gpt, &other, tokenizer_files, 2, &err));
    CHECK_MSG(says("state.json: it is a symbolic link"), "%s", err.text);
    link_back("unwritten", 5, "../step-00000005.old/state.json");
    CHECK(is_named(checkpoint_newest(at("unwritten"), NULL, &err), "step-00000005.old"));
    gpt_free(gpt);
}

TEST(any_or_none) {
    bool any;
    Gpt *gpt = model_new(small);
    CHECK(checkpoint_any(at("any"), &any, &err) && !any);
    CHECK(folder_make(at("any/notes"), &err) && checkpoint_any(at("any"), &any, &err) && !any);
    save(at("any"), gpt, 1, NAN);
    CHECK(checkpoint_any(at("any"), &any, &err) && any);
    write_plain(at("any/step-00000001/state.json"), "{", 1);
    CHECK(checkpoint_any(at("any"), &any, &err) && any);
    CHECK(symlink("nowhere", at("dangling")) == 0);
    CHECK(!checkpoint_any(at("dangling"), &any, &err) && says("dangling: it is a link to something"));
    write_plain(at("file"), "a", 1);
    CHECK(!checkpoint_any(at("file"), &any, &err) && says("Not a directory"));
#if defined(__linux__)
    failing_list = EIO;
    CHECK(!checkpoint_any(at("any"), &any, &err) && says("Input/output error"));
    failing_list = EIO;
    CHECK(!checkpoint_newest(at("any"), NULL, &err) && says("Input/output error"));
#endif
    gpt_free(gpt);
}

/* ---- what is not ours ---- */

/* Only what looks like a checkpoint, or a part of one, is removed. */
TEST(others_folders_stay) {
    Gpt *gpt = model_new(small);
    for (uint64_t step = 1; step <= 5; step++) save(at("others"), gpt, step, NAN);
    CHECK(folder_make(at("others/step-00000009/checkpoints/step-00000001"), &err)); /* a whole run */
    write_plain(at("others/step-00000009/run.json"), "{}", 2);
    CHECK(folder_make(at("others/step-00000008/model.safetensors"), &err)); /* a name of ours, but a folder */
    write_plain(at("others/step-00000003/notes"), "mine", 4);
    write_plain(at("others/step-00000001/notes"), "mine", 4);
    CHECK(
        folder_make(at("others/step-00000007"), &err)); /* what is left of a removal that was cut short ... */
    CHECK(folder_make(at("others/step-00000006"), &err));
    write_plain(at("others/step-00000006/config.json"), "{}", 2); /* ... or this */
    CHECK(folder_make(at("others/step-00000010.tmp-1"), &err) &&
          folder_make(at("others/step-00000010.tmp-2"), &err));
    write_plain(at("others/step-00000010.tmp-2/run.json"), "{}", 2);
    CHECK_MSG(checkpoint_prune(at("others"), 2, 0, &err), "%s", err.text);
    CHECK(file_exists(at("others/step-00000009/run.json")) && folder_exists(at("others/step-00000008")));
    CHECK(!folder_exists(at("others/step-00000007")) && !folder_exists(at("others/step-00000006")));
    CHECK(folder_exists(at("others/step-00000005")) && folder_exists(at("others/step-00000004")));
    CHECK(folder_exists(at("others/step-00000003")) && !folder_exists(at("others/step-00000002")));
    CHECK(file_exists(at("others/step-00000001/notes")));
    CHECK(!folder_exists(at("others/step-00000010.tmp-1")) &&
          folder_exists(at("others/step-00000010.tmp-2")));
    /* They do not count among those to keep. */
    save(at("others"), gpt, 2, NAN);
    CHECK(checkpoint_prune(at("others"), 3, 0, &err) && folder_exists(at("others/step-00000002")));

    /* Nor does a checkpoint take the place of one. */
    TrainState state = state_at(9, NAN);
    CHECK(!checkpoint_save(at("others"), gpt, &state, tokenizer_files, 2, &err) && says("is no checkpoint"));
    CHECK(file_exists(at("others/step-00000009/run.json")));
    CHECK(rename(at("others/step-00000009"), at("others/step-00000005.old")) == 0);
    state = state_at(5, 1.0);
    CHECK(!checkpoint_save(at("others"), gpt, &state, tokenizer_files, 2, &err) && says("is no checkpoint"));
    state = state_at(5, NAN); /* is saved */
    CHECK(checkpoint_save(at("others"), gpt, &state, tokenizer_files, 2, &err));
    CHECK(file_exists(at("others/step-00000005.old/run.json")));
    gpt_free(gpt);
}

/* ---- the same step again ---- */

TEST(saved_twice) {
    Gpt *gpt = model_new(small);
    save(at("twice"), gpt, 5, NAN);
    char *weights = xstrdup(at("twice/step-00000005/model.safetensors"));
    const ino_t first = inode_of(weights);
    TrainState state = state_at(5, NAN);
    state.seconds = 99;
    CHECK(checkpoint_save(at("twice"), gpt, &state, tokenizer_files, 2, &err));
    CHECK(first != 0 && inode_of(weights) == first); /* good, and the same: kept */

    state.eval_loss = 1.5; /* it says more now: replaced */
    CHECK_MSG(checkpoint_save(at("twice"), gpt, &state, tokenizer_files, 2, &err), "%s", err.text);
    TrainState read;
    CHECK(checkpoint_read_state(at("twice/step-00000005"), &read, &err) && read.eval_loss == 1.5);
    CHECK(folder_check_manifest(at("twice/step-00000005"), &err) &&
          !folder_exists(at("twice/step-00000005.old")));

    write_plain(weights, "damage", 6);
    CHECK_MSG(checkpoint_save(at("twice"), gpt, &state, tokenizer_files, 2, &err), "%s", err.text);
    CHECK(folder_check_manifest(at("twice/step-00000005"), &err) &&
          !folder_exists(at("twice/step-00000005.old")));
    free(weights);
    gpt_free(gpt);
}

/* The instants at which a crash could come while a step is written again. */
TEST(crash_while_saved_twice) {
    Gpt *gpt = model_new(small);
    save(at("crash"), gpt, 4, NAN);
    save(at("crash"), gpt, 5, NAN);
    char *path = xstrdup(at("crash/step-00000005")), *aside = xformat("%s.old", path);
    /* Moved aside, the new one not there yet: the old one counts. */
    CHECK(rename(path, aside) == 0);
    CHECK(is_named(checkpoint_newest(at("crash"), NULL, &err), "step-00000005.old"));
    TrainState read;
    Gpt *other = model_new(small);
    CHECK_MSG(checkpoint_load(aside, other, &read, &err) && read.step == 5, "%s", err.text);
    gpt_free(other);
    /* Both there and good: the new one counts. */
    CHECK(rename(aside, at("crash/kept")) == 0);
    save(at("crash"), gpt, 5, 1.0);
    CHECK(rename(at("crash/kept"), aside) == 0);
    CHECK(is_named(checkpoint_newest(at("crash"), NULL, &err), "step-00000005"));
    CHECK(folder_remove(path, &err));
    /* Both there, the new one damaged: the old one counts, and survives until there is a good new one. */
    CHECK(folder_make(path, &err));
    CHECK(is_named(checkpoint_newest(at("crash"), NULL, &err), "step-00000005.old"));
    const struct rlimit nothing = {.rlim_cur = 100, .rlim_max = RLIM_INFINITY};
    struct rlimit before;
    CHECK(getrlimit(RLIMIT_FSIZE, &before) == 0 && setrlimit(RLIMIT_FSIZE, &nothing) == 0);
    const TrainState state = state_at(5, 2.0);
    CHECK(!checkpoint_save(at("crash"), gpt, &state, tokenizer_files, 2, &err));
    CHECK(setrlimit(RLIMIT_FSIZE, &before) == 0);
    CHECK(is_named(checkpoint_newest(at("crash"), NULL, &err), "step-00000005.old"));
    save(at("crash"), gpt, 5, 2.0);
    CHECK(is_named(checkpoint_newest(at("crash"), NULL, &err), "step-00000005") && !folder_exists(aside));
    free(aside);
    free(path);
    gpt_free(gpt);
}

/* A process that saves one step after another is killed at some instant: the newest good checkpoint loads, is
 * no older than what was reported saved, and what was left can be cleaned up. */
TEST(killed_at_any_instant) {
    Gpt *gpt = model_new(small), *other = model_new(small);
    fill(gpt);
    save(at("killed"), gpt, 1, NAN);
    Rng rng = rng_start(3, 3);
    for (int round = 0; round < 12; round++) {
        int ends[2];
        CHECK(pipe(ends) == 0);
        const pid_t child = fork();
        if (child == 0) {
            for (uint64_t step = 2;; step++) {
                const TrainState state = state_at(step, NAN);
                const bool done = checkpoint_save(at("killed"), gpt, &state, tokenizer_files, 2, NULL) &&
                                  checkpoint_prune(at("killed"), 2, 0, NULL) &&
                                  write(ends[1], &step, sizeof step) == sizeof step;
                if (!done) _exit(1);
            }
        }
        close(ends[1]);
        uint64_t step, saved = 1;
        if (round > 0 && read(ends[0], &step, sizeof step) == sizeof step) saved = step; /* it is under way */
        usleep((useconds_t)rng_below(&rng, 10000));
        kill(child, SIGKILL);
        int status = 0;
        CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status));
        while (read(ends[0], &step, sizeof step) == sizeof step) saved = step;
        close(ends[0]);
        char *newest = checkpoint_newest(at("killed"), NULL, &err);
        TrainState state = {0};
        CHECK_MSG(newest && checkpoint_load(newest, other, &state, &err), "round %d: %s", round, err.text);
        CHECK_MSG(state.step >= saved, "round %d: step %zu of %zu", round, (size_t)state.step, (size_t)saved);
        CHECK(same_numbers(gpt, other, SAVED_BUFFERS));
        free(newest);
        CHECK(checkpoint_prune(at("killed"), 1, 0, &err));
        char **names;
        size_t count;
        CHECK(folder_names(at("killed"), &names, &count, &err));
        CHECK_MSG(count == 1, "round %d: %zu entries left", round, count);
        for (size_t i = 0; i < count; i++) free(names[i]);
        free(names);
    }
    gpt_free(gpt);
    gpt_free(other);
}

/* A disk that fills up at any point of the writing: an error, the old checkpoint, and no left-over. */
TEST(failed_write_loses_nothing) {
    Gpt *gpt = model_new(small);
    save(at("full"), gpt, 1, NAN);
    struct rlimit before;
    CHECK(getrlimit(RLIMIT_FSIZE, &before) == 0);
    static const rlim_t limits[] = {0, 10, 1000, 5000, 20000, 30000, 50000};
    const TrainState state = state_at(2, NAN);
    for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++) {
        const struct rlimit limit = {.rlim_cur = limits[i], .rlim_max = before.rlim_max};
        CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
        const bool done = checkpoint_save(at("full"), gpt, &state, tokenizer_files, 2, &err);
        CHECK(setrlimit(RLIMIT_FSIZE, &before) == 0);
        CHECK_MSG(!done && says("cannot write"), "limit %zu: %s", (size_t)limits[i],
                  done ? "saved" : err.text);
        char **names;
        size_t count;
        CHECK(folder_names(at("full"), &names, &count, &err));
        CHECK(count == 1);
        for (size_t k = 0; k < count; k++) free(names[k]);
        free(names);
    }
    CHECK(is_named(checkpoint_newest(at("full"), NULL, &err), "step-00000001"));
    save(at("full"), gpt, 2, NAN);
    gpt_free(gpt);
}

TEST(counters_that_do_not_fit) {
    Gpt *gpt = model_new(small);
    TrainState state = state_at(1, NAN);
    state.tokens = (uint64_t)1 << 63;
    CHECK(!checkpoint_save(at("counters"), gpt, &state, NULL, 0, &err) && says("tokens"));
    CHECK(!checkpoint_newest(at("counters"), NULL, &err));
    gpt_free(gpt);
}

/* A weight or a moment that is not finite is not saved, and says where it is; the old checkpoints stay. */
TEST(not_finite_is_not_saved) {
    static const char *const names[] = {"h.1.mlp.c_fc.bias", "m.h.1.mlp.c_fc.bias", "v.h.1.mlp.c_fc.bias"};
    static const float numbers[] = {NAN, INFINITY, -INFINITY};
    Gpt *gpt = model_new(small);
    save(at("poisoned"), gpt, 1, NAN);
    size_t count, p = 0;
    const Parameter *table = gpt_table(gpt, &count);
    while (p + 1 < count && strcmp(table[p].name, names[0]) != 0) p++;
    float *host = xmalloc(table[p].size * sizeof *host);
    for (size_t k = 0; k < SAVED_BUFFERS; k++) {
        gpt_get(gpt, saved_buffers[k], p, host);
        const size_t at_number = table[p].size - 1 - k;
        const float before = host[at_number];
        host[at_number] = numbers[k];
        gpt_set(gpt, saved_buffers[k], p, host);
        const TrainState state = state_at(2, NAN);
        char *expected = xformat("number %zu of tensor %s is ", at_number, names[k]);
        CHECK(!checkpoint_save(at("poisoned"), gpt, &state, tokenizer_files, 2, &err));
        CHECK_MSG(says(expected), "%s", err.text);
        free(expected);
        CHECK(is_named(checkpoint_newest(at("poisoned"), NULL, &err), "step-00000001"));
        host[at_number] = before;
        gpt_set(gpt, saved_buffers[k], p, host);
    }
    save(at("poisoned"), gpt, 2, NAN);
    free(host);
    gpt_free(gpt);
}

/* ---- files from elsewhere ---- */

/* A safetensors file under construction. */
typedef struct Maker {
    Buffer header, data;
} Maker;

static void maker_add(Maker *maker, const char *name, const char *dtype, const char *shape, const void *bytes,
                      size_t size) {
    char *entry = xformat("%s\"%s\":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[%zu,%zu]}",
                          maker->header.size ? "," : "{", name, dtype, shape, maker->data.size,
                          maker->data.size + size);
    buffer_append_text(&maker->header, entry);
    buffer_append(&maker->data, bytes, size);
    free(entry);
}

/* Header text and data as they are, the length before them as given. */
static void write_safetensors(const char *path, uint64_t length, const void *header, size_t header_size,
                              const void *data, size_t data_size) {
    Buffer file = {0};
    buffer_append(&file, &length, sizeof length);
    buffer_append(&file, header, header_size);
    buffer_append(&file, data, data_size);
    write_plain(path, file.data, file.size);
    buffer_free(&file);
}

static void maker_end(Maker *maker, const char *path) {
    buffer_append_text(&maker->header, "}");
    write_safetensors(path, maker->header.size, maker->header.data, maker->header.size, maker->data.data,
                      maker->data.size);
    buffer_free(&maker->header);
    buffer_free(&maker->data);
}

/* All tensors of a model, under names with the prefix; `except`: one that is left out, NULL: none. */
static void add_model(Maker *maker, Gpt *gpt, const char *prefix, const char *except) {
    size_t count;
    const Parameter *table = gpt_table(gpt, &count);
    for (size_t p = 0; p < count; p++) {
        if (except && strcmp(table[p].name, except) == 0) continue;
        char *name = xformat("%s%s", prefix, table[p].name);
        char *shape = table[p].dims == 2 ? xformat("[%zu,%zu]", table[p].shape[0], table[p].shape[1])
                                         : xformat("[%zu]", table[p].shape[0]);
        float *host = xmalloc(table[p].size * sizeof *host);
        gpt_get(gpt, GPT_WEIGHTS, p, host);
        maker_add(maker, name, "F32", shape, host, table[p].size * sizeof *host);
        free(host);
        free(shape);
        free(name);
    }
}

/* The fields of gpt2's config.json for `small` and learned positions; %s: more fields, or nothing. */
static const char gpt2_config[] =
    "{\"model_type\": \"gpt2\", \"n_layer\": 2, \"n_head\": 2, \"n_embd\": 16, \"n_positions\": 12, "
    "\"vocab_size\": 37, \"something_new\": {\"a\": [1, null]}%s}";

static void write_config(const char *path, const char *more) {
    char *text = xformat(gpt2_config, more);
    write_plain(path, text, strlen(text));
    free(text);
}

TEST(gpt2_folders_load) {
    Gpt *gpt = model_new(with_learned(small));
    fill(gpt);
    CHECK(folder_make(at("gpt2"), &err));
    write_config(at("gpt2/config.json"), ", \"resid_pdrop\": 0.25, \"activation_function\": \"gelu_new\"");
    GptConfig config;
    CHECK_MSG(checkpoint_config(at("gpt2"), &config, &err), "%s", err.text);
    CHECK(config.position == POSITION_LEARNED && config.layers == 2 && config.vocab == 37);
    CHECK(config.dropout == 0.25f);
    static const char *const prefixes[] = {"", "transformer."};
    static const uint8_t mask[144];
    for (size_t i = 0; i < 2; i++) {
        Maker maker = {0};
        char *names[4] = {xformat("%sh.0.attn.bias", prefixes[i]), xformat("%sh.1.attn.bias", prefixes[i]),
                          xformat("%sh.1.attn.masked_bias", prefixes[i]), xstrdup("lm_head.weight")};
        maker_add(&maker, names[0], "BOOL", "[1,1,12,12]", mask, 144);
        add_model(&maker, gpt, prefixes[i], NULL);
        maker_add(&maker, names[1], "U8", "[1,1,12,12]", mask, 144);
        maker_add(&maker, names[2], "F32", "[]", mask, 4);
        maker_add(&maker, names[3], "F16", "[2,3]", mask, 12);
        maker_add(&maker, "h.0.attn.masked_bias", "F64", "[4294967296,4294967296,0]", mask, 0);
        maker_end(&maker, at("gpt2/model.safetensors"));
        Gpt *other = model_new(with_learned(small));
        CHECK_MSG(checkpoint_load(at("gpt2"), other, NULL, &err), "%s", err.text);
        CHECK(same_numbers(gpt, other, 1));
        for (size_t k = 0; k < 4; k++) free(names[k]);
        gpt_free(other);
    }
    /* To go on from it as from a run is refused: it has no MANIFEST. */
    TrainState state;
    CHECK(!checkpoint_load(at("gpt2"), gpt, &state, &err) && says("MANIFEST"));
    CHECK(!checkpoint_config(at("gpt2/nowhere"), &config, &err) && says("nowhere"));
    gpt_free(gpt);
}

TEST(wrong_tensors_are_named) {
    Gpt *gpt = model_new(with_learned(small));
    CHECK(folder_make(at("wrong"), &err));
    write_config(at("wrong/config.json"), "");
    CHECK(!checkpoint_load(at("wrong"), gpt, NULL, &err) && says("model.safetensors"));
    static const float zeros[37 * 16];
    static const struct {
        const char *except, *name, *dtype, *shape, *said;
        size_t size;
    } cases[] = {
        {"h.1.ln_2.bias", NULL, NULL, NULL, "h.1.ln_2.bias is missing", 0},
        {"wte.weight", "wte.weight", "F32", "[37,15]", "wte.weight has shape [37,15], expected [37,16]",
         37 * 15 * 4},
        {"wte.weight", "wte.weight", "F32", "[592]", "wte.weight has shape [592], expected [37,16]",
         37 * 16 * 4},
        {"ln_f.bias", "ln_f.bias", "F32", "[1,16]", "ln_f.bias has shape [1,16], expected [16]", 64},
        {"ln_f.bias", "ln_f.bias", "F64", "[16]", "ln_f.bias has dtype F64", 128},
        {"ln_f.bias", "ln_f.bias", "I32", "[16]", "ln_f.bias has dtype I32", 64},
        {NULL, "h.2.ln_1.weight", "F32", "[16]", "h.2.ln_1.weight is no part", 64},
        {NULL, "transformer.h.2.ln_1.weight", "F32", "[16]", "transformer.h.2.ln_1.weight is no part", 64},
        {NULL, "h.x.attn.bias", "F32", "[16]", "h.x.attn.bias is no part", 64},
        {NULL, "transformer.ln_f.bias", "F32", "[16]", "ln_f.bias is there twice", 64},
        {"ln_f.bias", "ln_f.bias", "F4", "[16]", "unknown dtype \"F4\"", 64},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Maker maker = {0};
        add_model(&maker, gpt, "", cases[i].except);
        if (cases[i].name)
            maker_add(&maker, cases[i].name, cases[i].dtype, cases[i].shape, zeros, cases[i].size);
        maker_end(&maker, at("wrong/model.safetensors"));
        const bool loaded = checkpoint_load(at("wrong"), gpt, NULL, &err);
        CHECK_MSG(!loaded && says(cases[i].said), "case %zu: %s", i, loaded ? "loaded" : err.text);
    }
    gpt_free(gpt);
}

TEST(hostile_headers_are_refused) {
#define ENTRY(rest) "{\"wte.weight\":{" rest "}}"
#define SHAPED(shape, begin, end) \
    ENTRY("\"dtype\":\"F32\",\"shape\":" shape ",\"data_offsets\":[" begin "," end "]")
    static const struct {
        const char *header;
        size_t data;
        const char *said;
    } cases[] = {
        {"", 0, "no whole safetensors file"},
        {"{", 0, "no whole safetensors file"},
        {"[]", 0, "not a JSON object"},
        {" {}", 0, "not a JSON object"},
        {"{}x", 0, "not a JSON object"},
        {"{\"a\":}", 0, "not a JSON object"},
        {"{\"\\u0000\":1}", 0, "not a JSON object"},
        {"{\"\xff\":1}", 0, "not a JSON object"},
        {"{}", 0, "wte.weight is missing"}, /* a whole file, of no tensors */
        {"{}", 4, "need 0 bytes of data, found 4"},
        {"{\"wte.weight\":1}", 0, "is not a tensor's"},
        {"{\"wte.weight\":null}", 0, "is not a tensor's"},
        {"{\"wte.weight\":[]}", 0, "is not a tensor's"},
        {"{\"wte.weight\":{}}", 0, "is not a tensor's"},
        {ENTRY("\"dtype\":4,\"shape\":[1],\"data_offsets\":[0,4]"), 4, "is not a tensor's"},
        {ENTRY("\"dtype\":\"F32\",\"shape\":1,\"data_offsets\":[0,4]"), 4, "is not a tensor's"},
        {ENTRY("\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]"), 4, "is not a tensor's"},
        {ENTRY("\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4,8]"), 4, "is not a tensor's"},
        {ENTRY("\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":{\"0\":0,\"1\":4}"), 4, "is not a tensor's"},
        {ENTRY("\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]"), 4,
         "not a JSON object"},
        {SHAPED("[1]", "0", "4.0"), 4, "is not a tensor's"},
        {SHAPED("[1]", "-4", "0"), 4, "is not a tensor's"},
        {SHAPED("[1]", "4", "0"), 4, "is not a tensor's"},
        {SHAPED("[1]", "0", "99999999999999999999"), 4, "not a JSON object"},
        {SHAPED("[1.5]", "0", "4"), 4, "not a list of sizes"},
        {SHAPED("[-1]", "0", "4"), 4, "not a list of sizes"},
        {SHAPED("[\"1\"]", "0", "4"), 4, "not a list of sizes"},
        {SHAPED("[-1,-1]", "0", "4"), 4, "not a list of sizes"},
        {SHAPED("[2]", "0", "4"), 4, "spans 4 bytes, but its shape and dtype need 8"},
        {SHAPED("[1]", "0", "8"), 8, "spans 8 bytes, but its shape and dtype need 4"},
        {SHAPED("[]", "0", "8"), 8, "need 4"},
        /* 2^32 * 2^32 * 4 and 2^62 * 4 + 4: 0 and 4 if they wrapped. */
        {SHAPED("[4294967296,4294967296]", "0", "0"), 0, "need at least"},
        {SHAPED("[4611686018427387905]", "0", "4"), 4, "need at least"},
        {SHAPED("[0,9223372036854775807]", "0", "4"), 4, "need 0"},
        {SHAPED("[1]", "0", "4"), 0, "need 4 bytes of data, found 0"},
        {SHAPED("[1]", "0", "4"), 8, "need 4 bytes of data, found 8"},
        {SHAPED("[1]", "4", "8"), 8, "begins at byte 4 of the data, expected 0"},
        {SHAPED("[1]", "9223372036854775803", "9223372036854775807"), 8, "expected 0"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
         "\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}",
         4, "expected 4"}, /* overlap */
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
         "\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[8,12]}}",
         12, "expected 4"}, /* a hole */
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
         "\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}",
         4, "not a JSON object"}, /* a name twice */
        {"{\"transformer.\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4,
         "wte.weight is missing"},
    };
#undef SHAPED
#undef ENTRY
    static const uint8_t data[16];
    const GptConfig config = with_learned(small);
    Gpt *gpt = model_new(config);
    fill(gpt);
    Gpt *untouched = model_new(config);
    fill(untouched);
    CHECK(folder_make(at("hostile"), &err));
    write_config(at("hostile/config.json"), "");
    char *path = xstrdup(at("hostile/model.safetensors"));
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const size_t n = strlen(cases[i].header);
        write_safetensors(path, n, cases[i].header, n, data, cases[i].data);
        const bool loaded = checkpoint_load(at("hostile"), gpt, NULL, &err);
        CHECK_MSG(!loaded && says(cases[i].said) && says("model.safetensors"), "case %zu (%s): %s", i,
                  cases[i].header, loaded ? "loaded" : err.text);
    }
    /* Lengths that lie, and files too short for one. */
    static const uint64_t lengths[] = {3,          100,           100000000, 100000001, (uint64_t)1 << 63,
                                       UINT64_MAX, UINT64_MAX - 7};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        write_safetensors(path, lengths[i], "{}", 2, NULL, 0);
        CHECK(!checkpoint_load(at("hostile"), gpt, NULL, &err) && says("no whole safetensors file"));
    }
    for (size_t size = 0; size < 8; size++) {
        write_plain(path, data, size);
        CHECK(!checkpoint_load(at("hostile"), gpt, NULL, &err) && says("too few"));
    }
    /* A header longer than the format allows, in a file that has the room (and takes none on the disk). */
    write_safetensors(path, 100000001, "{}", 2, NULL, 0);
    CHECK(truncate(path, 200000000) == 0);
    CHECK(!checkpoint_load(at("hostile"), gpt, NULL, &err) && says("no whole safetensors file"));
    /* Nesting deeper than any stack would take. */
    Buffer deep = {0};
    buffer_append_text(&deep, "{\"a\":");
    for (int i = 0; i < 100000; i++) buffer_append(&deep, "[", 1);
    write_safetensors(path, deep.size, deep.data, deep.size, NULL, 0);
    CHECK(!checkpoint_load(at("hostile"), gpt, NULL, &err) && says("not a JSON object"));
    buffer_free(&deep);
    /* Not a file at all. */
    CHECK(remove(path) == 0 && mkfifo(path, 0600) == 0);
    CHECK(!checkpoint_load(at("hostile"), gpt, NULL, &err) && says("not a regular file"));
    CHECK(same_numbers(gpt, untouched, 1));
    free(path);
    gpt_free(untouched);
    gpt_free(gpt);
}

/* A good file with a byte of its header changed: read or refused, but never a crash; where the tensors'
 * order or names are not touched, the numbers are the right ones. */
TEST(changed_headers_do_no_harm) {
    Gpt *gpt = model_new(with_learned(small)), *other = model_new(with_learned(small));
    fill(gpt);
    CHECK(folder_make(at("fuzz"), &err));
    write_config(at("fuzz/config.json"), "");
    Maker maker = {0};
    add_model(&maker, gpt, "", NULL);
    char *path = xstrdup(at("fuzz/model.safetensors"));
    maker_end(&maker, path);
    Buffer file = read_plain(path);
    uint64_t n;
    memcpy(&n, file.data, sizeof n);
    Rng rng = rng_start(2, 2);
    size_t refused = 0;
    enum { ROUNDS = 500 };
    for (int round = 0; round < ROUNDS; round++) {
        const size_t i = (size_t)rng_below(&rng, sizeof n + n);
        const uint8_t old = file.data[i];
        static const uint8_t common[] = "0123456789[]{},:\"- ";
        file.data[i] = round % 2 ? (uint8_t)rng_below(&rng, 256) : common[rng_below(&rng, sizeof common - 1)];
        write_plain(path, file.data, file.size);
        file.data[i] = old;
        if (!checkpoint_load(at("fuzz"), other, NULL, &err)) refused++;
    }
    CHECK_MSG(refused > ROUNDS / 2 && refused < ROUNDS, "%zu of %d refused", refused, ROUNDS);
    free(path);
    buffer_free(&file);
    gpt_free(gpt);
    gpt_free(other);
}

TEST(golden_file_is_read) {
    static const char golden[] = "../shared/data/formats/golden.safetensors";
    if (!file_exists(golden)) SKIP("no %s", golden);
    Buffer file = read_plain(golden);
    CHECK(folder_make(at("golden"), &err));
    write_plain(at("golden/model.safetensors"), file.data, file.size);
    static const char config[] =
        "{\"model_type\": \"train_gpt_rotary\", \"n_layer\": 1, \"n_head\": 1, \"n_embd\": 2, "
        "\"n_positions\": 4, \"vocab_size\": 3}";
    write_plain(at("golden/config.json"), config, sizeof config - 1);
    GptConfig read;
    CHECK_MSG(checkpoint_config(at("golden"), &read, &err), "%s", err.text);
    Gpt *gpt = model_new(read);
    /* It holds wte and the first norm only: these pass, and the next of the table is missed. */
    CHECK(!checkpoint_load(at("golden"), gpt, NULL, &err));
    CHECK_MSG(says("h.0.attn.c_attn.weight is missing"), "%s", err.text);

    /* With the rest appended, its numbers arrive. */
    Maker maker = {0};
    uint64_t n = 0;
    memcpy(&n, file.data, sizeof n);
    size_t end = sizeof n + n;
    while (file.data[end - 1] != '}') end--;
    buffer_append(&maker.header, file.data + sizeof n, end - sizeof n - 1);
    buffer_append(&maker.data, file.data + sizeof n + n, file.size - sizeof n - n);
    size_t count;
    const Parameter *table = gpt_table(gpt, &count);
    static const float ones[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    for (size_t p = 3; p < count; p++) {
        char *shape = table[p].dims == 2 ? xformat("[%zu,%zu]", table[p].shape[0], table[p].shape[1])
                                         : xformat("[%zu]", table[p].shape[0]);
        CHECK(table[p].size <= 16);
        maker_add(&maker, table[p].name, "F32", shape, ones, table[p].size * sizeof(float));
        free(shape);
    }
    maker_end(&maker, at("golden/model.safetensors"));
    CHECK_MSG(checkpoint_load(at("golden"), gpt, NULL, &err), "%s", err.text);
    float wte[6];
    gpt_get(gpt, GPT_WEIGHTS, 0, wte);
    for (size_t i = 0; i < 6; i++) CHECK(wte[i] == (float)i);
    gpt_free(gpt);
    buffer_free(&file);
}

/* ---- 16-bit numbers ---- */

enum { HALVES = 2 * 65536 }; /* more than are read at a time */

static int half_at(int i) {
    return (i ^ i >> 16) & 65535; /* all of them, then all in another order */
}

/* Reads every finite number of a 16-bit type, as wte (8192, 16), and compares each with its definition. The
 * others must be refused; a 1 stands in their place. */
static void check_16_bit(const char *dtype, int fraction_bits) {
    const GptConfig config = {
        .layers = 1, .heads = 1, .channels = 16, .ctx = 4, .vocab = HALVES / 16, .position = POSITION_ROTARY};
    Gpt *gpt = model_new(config);
    uint16_t *bits = xmalloc(HALVES * sizeof *bits);
    float *values = xmalloc(HALVES * sizeof *values);
    const int one = 1 << fraction_bits, top = (1 << (15 - fraction_bits)) - 1, bias = top / 2;
    for (int i = 0; i < HALVES; i++) {
        const bool finite = (half_at(i) >> fraction_bits & top) != top;
        bits[i] = (uint16_t)(finite ? half_at(i) : bias << fraction_bits);
    }
    CHECK(folder_make(at("half"), &err));
    static const char text[] =
        "{\"model_type\": \"train_gpt_rotary\", \"n_layer\": 1, \"n_head\": 1, \"n_embd\": 16, "
        "\"n_positions\": 4, \"vocab_size\": 8192}";
    write_plain(at("half/config.json"), text, sizeof text - 1);
    Maker maker = {0};
    add_model(&maker, gpt, "", "wte.weight");
    maker_add(&maker, "wte.weight", dtype, "[8192,16]", bits, HALVES * sizeof *bits);
    maker_end(&maker, at("half/model.safetensors"));
    CHECK_MSG(checkpoint_load(at("half"), gpt, NULL, &err), "%s", err.text);
    gpt_get(gpt, GPT_WEIGHTS, 0, values);

    /* IEEE 754's definition: 1.fraction * 2^(exponent - bias), the smallest exponent's without the 1. */
    size_t bad = 0;
    for (int i = 0; i < HALVES; i++) {
        const int half = bits[i], exponent = half >> fraction_bits & top, fraction = half & (one - 1);
        double expected = exponent ? ldexp(one + fraction, exponent - bias - fraction_bits)
                                   : ldexp(fraction, 1 - bias - fraction_bits);
        if (half >> 15) expected = -expected;
        const double value = (double)values[i];
        bad += value != expected || signbit(value) != signbit(expected);
    }
    CHECK_MSG(bad == 0, "%zu of %d are wrong", bad, HALVES);
    /* Infinite, and not a number: named by its place. */
    for (int fraction = 0; fraction < 2; fraction++) {
        bits[70001] = (uint16_t)(top << fraction_bits | fraction);
        add_model(&maker, gpt, "", "wte.weight");
        maker_add(&maker, "wte.weight", dtype, "[8192,16]", bits, HALVES * sizeof *bits);
        maker_end(&maker, at("half/model.safetensors"));
        CHECK(!checkpoint_load(at("half"), gpt, NULL, &err) && says("number 70001 of tensor wte.weight") &&
              says(fraction ? "is nan" : "is inf"));
    }
    free(values);
    free(bits);
    gpt_free(gpt);
}

TEST(f16_is_converted_exactly) {
    check_16_bit("F16", 10);
}
TEST(bf16_is_converted_exactly) {
    check_16_bit("BF16", 7);
}

/* ---- config.json and state.json ---- */

TEST(other_models_are_refused) {
    CHECK(folder_make(at("config"), &err));
    static const char *const refused[][2] = {
        {", \"activation_function\": \"relu\"", "activation_function is \"relu\", expected gelu_new"},
        {", \"activation_function\": \"gelu\"", "activation_function is \"gelu\", expected"},
        {", \"activation_function\": 3", "activation_function is 3,"},
        {", \"layer_norm_epsilon\": 1e-6", "layer_norm_epsilon is 9.99"},
        {", \"layer_norm_epsilon\": \"1e-5\"", "layer_norm_epsilon"},
        {", \"n_inner\": 32", "n_inner"},
        {", \"n_inner\": \"64\"", "n_inner"},
        {", \"tie_word_embeddings\": false", "tie_word_embeddings is false, expected true"},
        {", \"tie_word_embeddings\": 1", "tie_word_embeddings is 1, expected true"},
        {", \"scale_attn_weights\": false", "scale_attn_weights is false, expected true"},
        {", \"scale_attn_by_inverse_layer_idx\": true",
         "scale_attn_by_inverse_layer_idx is true, expected false"},
        {", \"add_cross_attention\": true", "add_cross_attention is true, expected false"},
        {", \"resid_pdrop\": 1.0", "dropout"},
        {", \"resid_pdrop\": -0.1", "dropout"},
        {", \"n_head\": 2", "duplicate"},
        {"}", "config.json, line 1"},
    };
    GptConfig config;
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
        write_config(at("config/config.json"), refused[i][0]);
        const bool read = checkpoint_config(at("config"), &config, &err);
        CHECK_MSG(!read && says(refused[i][1]) && says("config.json"), "%s: %s", refused[i][0],
                  read ? "read" : err.text);
    }
    static const char *const taken[] = {
        "",
        ", \"n_inner\": null",
        ", \"n_inner\": 64",
        ", \"layer_norm_epsilon\": 1e-05",
        ", \"activation_function\": \"gelu_pytorch_tanh\"",
        ", \"tie_word_embeddings\": true",
        ", \"attn_pdrop\": 0.1, \"n_ctx\": 1024",
    };
    for (size_t i = 0; i < sizeof taken / sizeof taken[0]; i++) {
        write_config(at("config/config.json"), taken[i]);
        CHECK_MSG(checkpoint_config(at("config"), &config, &err), "%s: %s", taken[i], err.text);
    }
    static const char *const broken[][2] = {
        {"", "config.json"},
        {"[]", "JSON object"},
        {"{}", "model_type is missing"},
        {"{\"model_type\": \"llama\"}", "model_type is \"llama\""},
        {"{\"model_type\": \"gpt2\"}", "n_layer is missing"},
        {"{\"model_type\": \"gpt2\", \"n_layer\": \"2\"}",
         "n_layer is \"2\", expected a whole number of at least 1"},
        {"{\"model_type\": \"gpt2\", \"n_layer\": 0}", "n_layer is 0,"},
        {"{\"model_type\": \"gpt2\", \"n_layer\": -2}", "n_layer is -2,"},
        {"{\"model_type\": \"gpt2\", \"n_layer\": 2.0}", "n_layer is 2.0,"},
        {"{\"model_type\": \"gpt2\", \"n_layer\": 9223372036854775807, \"n_head\": 1, \"n_embd\": 1, "
         "\"n_positions\": 1, \"vocab_size\": 3}",
         "layers"},
        {"{\"model_type\": \"gpt2\", \"n_layer\": 1, \"n_head\": 3, \"n_embd\": 16, \"n_positions\": 1, "
         "\"vocab_size\": 3}",
         "heads"},
    };
    for (size_t i = 0; i < sizeof broken / sizeof broken[0]; i++) {
        write_plain(at("config/config.json"), broken[i][0], strlen(broken[i][0]));
        const bool read = checkpoint_config(at("config"), &config, &err);
        CHECK_MSG(!read && says(broken[i][1]), "%s: %s", broken[i][0], read ? "read" : err.text);
    }
}

TEST(broken_states_are_refused) {
#define STATE(step, seconds, loss)                                                                 \
    "{\"step\": " step                                                                             \
    ", \"updates\": 1, \"tokens\": 1, \"total_steps\": 0, \"best_step\": 0, \"seconds\": " seconds \
    ", \"eval_loss\": " loss ", \"best_loss\": null}"
    static const char *const broken[][2] = {
        {"{}", "step is missing"},
        {STATE("-1", "1.0", "null"), "step is -1, expected a whole number of at least 0"},
        {STATE("1.0", "1.0", "null"), "step is 1.0,"},
        {STATE("null", "1.0", "null"), "step is null,"},
        {STATE("9223372036854775808", "1.0", "null"), "state.json, line 1"},
        {STATE("1", "null", "null"), "seconds is null, expected a number"},
        {STATE("1", "1.0", "\"2\""), "eval_loss is \"2\", expected a number"},
        {STATE("1", "1.0", "NaN"), "state.json, line 1"},
    };
    CHECK(folder_make(at("state"), &err));
    TrainState state;
    for (size_t i = 0; i < sizeof broken / sizeof broken[0]; i++) {
        write_plain(at("state/state.json"), broken[i][0], strlen(broken[i][0]));
        const bool read = checkpoint_read_state(at("state"), &state, &err);
        CHECK_MSG(!read && says(broken[i][1]), "%s: %s", broken[i][0], read ? "read" : err.text);
    }
    static const char good[] = STATE("9223372036854775807", "1", "2");
#undef STATE
    write_plain(at("state/state.json"), good, sizeof good - 1);
    CHECK_MSG(checkpoint_read_state(at("state"), &state, &err), "%s", err.text);
    CHECK(state.bad_steps == 0 && state.cut_short == 0 && state.stories == 0); /* those came later */
    CHECK(state.step == INT64_MAX && same_double(state.eval_loss, 2) && same_double(state.best_loss, NAN));
}

/* ---- another program's view ---- */

/* tests/peers/check_safetensors.py reads our files with the safetensors package, compares every number with
 * number_at, and writes the weights again, as GPT-2 with its head would be saved, for us to read. */
TEST(safetensors_package_agrees) {
    Gpt *gpt = model_new(with_learned(small)), *other = model_new(with_learned(small));
    fill(gpt);
    save(at("peer"), gpt, 1, NAN);
    char *command = xformat("python3 tests/peers/check_safetensors.py '%s' '%s'", at("peer/step-00000001"),
                            at("peer/theirs"));
    const int status = system(command);
    free(command);
    const int code = status != -1 && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    if (code == 0) {
        write_config(at("peer/theirs/config.json"), "");
        CHECK_MSG(checkpoint_load(at("peer/theirs"), other, NULL, &err), "%s", err.text);
        CHECK(same_numbers(gpt, other, 1));
    }
    gpt_free(gpt);
    gpt_free(other);
    if (code == 77 || code == 127) SKIP("python3 with the packages numpy and safetensors is not here");
    CHECK_MSG(code == 0, "check_safetensors.py ended with status %d", code);
}

int main(int argc, char **argv) {
    test_start(argc, argv, "checkpoint");
    signal(SIGXFSZ, SIG_IGN); /* a file at its size limit is then a failed write */
    /* In memory where there is such a folder: a checkpoint waits for the disk nine times. */
    snprintf(root, sizeof root, "%s/test_checkpoint.XXXXXX",
             access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
    if (!mkdtemp(root)) {
        perror(root);
        return 1;
    }
    stream = ops_cpu.open(0, 1, &err);
    if (!stream) {
        printf("%s\n", err.text);
        return 1;
    }
    RUN(round_trip_rotary);
    RUN(round_trip_learned);
    RUN(size_is_foretold);
    RUN(data_begin_aligned);
    RUN(config_as_hugging_face_writes_it);
    RUN(damage_is_found);
    RUN(nothing_good_is_said);
    RUN(best_and_newest);
    RUN(found_while_they_come_and_go);
    RUN(what_a_run_goes_on_with);
    RUN(prune_keeps_what_matters);
    RUN(unreadable_is_not_damaged);
    RUN(unreadable_is_not_replaced);
    RUN(any_or_none);
    RUN(others_folders_stay);
    RUN(saved_twice);
    RUN(crash_while_saved_twice);
    RUN(killed_at_any_instant);
    RUN(failed_write_loses_nothing);
    RUN(counters_that_do_not_fit);
    RUN(not_finite_is_not_saved);
    RUN(gpt2_folders_load);
    RUN(wrong_tensors_are_named);
    RUN(hostile_headers_are_refused);
    RUN(changed_headers_do_no_harm);
    RUN(golden_file_is_read);
    RUN(f16_is_converted_exactly);
    RUN(bf16_is_converted_exactly);
    RUN(other_models_are_refused);
    RUN(broken_states_are_refused);
    RUN(safetensors_package_agrees);
    ops_cpu.close(stream);
    if (!folder_remove(root, &err)) printf("%s\n", err.text);
    return test_finish();
}
