/* test_options.c - the table of flags: parsing, the refusals, -help, JSON, resuming (options.h). */
#include "../options.h"

#include <math.h>

#include "test.h"

enum { MAX_ARGUMENTS = 16 };

static Options options;
static Error err;

/* Parses a line of arguments separated by spaces. Options' text points into the line kept here. */
static bool parse(const char *line) {
    static char copy[8192];
    char *argv[MAX_ARGUMENTS] = {(char *)"train_gpt"};
    int argc = 1;
    snprintf(copy, sizeof copy, "%s", line);
    for (char *word = strtok(copy, " "); word && argc < MAX_ARGUMENTS; word = strtok(NULL, " "))
        argv[argc++] = word;
    err.text[0] = 0;
    return options_parse(&options, argc, argv, &err);
}

/* Parses two arguments that may hold anything. */
static bool parse_pair(const char *flag, const char *value) {
    char *argv[] = {(char *)"train_gpt", (char *)flag, (char *)value};
    err.text[0] = 0;
    return options_parse(&options, value ? 3 : 2, argv, &err);
}

/* One printable line that holds all the words of a refusal. */
static bool says(const char *what) {
    return err.text[0] && !strchr(err.text, '\n') && strstr(err.text, what);
}

TEST(defaults) {
    CHECK(parse(""));
    CHECK(options.data == NULL && options.run == NULL && options.load == NULL && options.prompt == NULL);
    CHECK(options.layers > 0 && options.channels % options.heads == 0 && options.vocab >= 257);
    CHECK(strcmp(options.position, "rotary") == 0 && strcmp(options.attention, "flash") == 0);
    CHECK(options.steps == OPTION_AUTO && options.micro == OPTION_AUTO && options.minutes == OPTION_AUTO);
    CHECK(!options.help && !options.resume && !options.generate);
    CHECK(!options_given("lr") && !options_given("no-such-flag"));
}

TEST(spellings) {
    CHECK(parse("-steps 7") && options.steps == 7);
    CHECK(parse("--steps 7") && options.steps == 7);
    CHECK(parse("--steps=7") && options.steps == 7);
    CHECK(parse("-steps=7") && options.steps == 7);
    CHECK(parse("-steps 7 -steps 8 --steps=9") && options.steps == 9);
    CHECK(parse("-eval-every 3") && options.eval_every == 3 && options_given("eval-every"));
    CHECK(!options_given("steps"));
    CHECK(parse("-resume") && options.resume);
    CHECK(parse("-resume=true -resume=false") && !options.resume && options_given("resume"));
    CHECK(parse_pair("-prompt", "-a dash, and\nlines") && strcmp(options.prompt, "-a dash, and\nlines") == 0);
    CHECK(parse_pair("-prompt=-steps", NULL) && strcmp(options.prompt, "-steps") == 0);
    CHECK(parse_pair("-prompt=a=b", NULL) && strcmp(options.prompt, "a=b") == 0);
    CHECK(parse_pair("-prompt", "") && options.prompt == NULL && !parse_pair("-data", ""));
}

TEST(whole_numbers) {
    static const char *const bad[] = {"12x",
                                      "1e9",
                                      "",
                                      " 5",
                                      "5 ",
                                      "0x10",
                                      "1.0",
                                      "--5",
                                      "+",
                                      "-",
                                      "nan",
                                      "inf",
                                      "0",
                                      "-1",
                                      "1_000",
                                      "1,000",
                                      "\xD9\xA3",
                                      "9223372036854775808",
                                      "99999999999999999999999999"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        CHECK_MSG(!parse_pair("-steps", bad[i]), "\"%s\" was taken", bad[i]);
        CHECK_MSG(says("-steps"), "%s", err.text);
    }
    CHECK(parse("-steps +5") && options.steps == 5);
    CHECK(parse("-steps 007") && options.steps == 7);
    CHECK(parse("-vocab 257") && parse("-vocab 65536"));
    CHECK(!parse("-vocab 256") && says("257 to 65536") && says("\"256\""));
    CHECK(!parse("-vocab 65537") && says("65537"));
    CHECK(parse("-seed 9007199254740992") && options.seed == 9007199254740992);
    CHECK(!parse("-seed 9007199254740994"));
}

TEST(real_numbers) {
    static const char *const bad[] = {"nan", "inf", "-inf", "infinity", "1e999", "0x1p3", "",     " 1", "1 ",
                                      "1,5", "1e",  "e1",   ".",        "1.2.3", "-1",    "1e10", "1f"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        CHECK_MSG(!parse_pair("-lr", bad[i]), "\"%s\" was taken", bad[i]);
        CHECK_MSG(says("-lr"), "%s", err.text);
    }
    CHECK(parse("-lr 3e-4") && options.lr == 3e-4);
    CHECK(parse("-lr .5") && options.lr == 0.5);
    CHECK(parse("-lr 0") && options.lr == 0);
    /* What would be used as 0 is refused; 0 itself has a meaning. */
    static const char *const tiny[] = {"-clip",         "-lr",    "-min-lr", "-temperature",
                                       "-weight-decay", "-beta1", "-top-p"};
    for (size_t i = 0; i < sizeof tiny / sizeof tiny[0]; i++) {
        CHECK_MSG(!parse_pair(tiny[i], "1e-50") && says("0 or 1.17549e-38 to"), "%s 1e-50: %s", tiny[i],
                  err.text);
        CHECK(!parse_pair(tiny[i], "1e-400") && parse_pair(tiny[i], "0.0"));
    }
    CHECK(!parse("-beta2 1") && !parse("-dropout 1") && !parse("-top-p 1.01") && !parse("-minutes 0"));
}

TEST(text_and_choices) {
    CHECK(!parse_pair("-data", "") && says("-data"));
    CHECK(!parse_pair("-data", "\xFF\xFE") && says("UTF-8"));
    char *path = (char *)malloc(100001);
    memset(path, 'x', 100000);
    path[100000] = 0;
    CHECK(!parse_pair("-data", path) && says("4095"));
    CHECK(strlen(err.text) < 400);
    CHECK(parse_pair("-prompt", path));
    CHECK(!parse_pair(path, NULL) && says("unexpected"));
    path[0] = '-';
    CHECK(!parse_pair(path, NULL) && says("no flag") && strlen(err.text) < 400);
    free(path);
    CHECK(!parse("-position absolute") && says("rotary|learned") && says("absolute"));
    CHECK(!parse("-position rotary|learned") && !parse("-position rot") && !parse("-position Rotary"));
    CHECK(parse("-position learned") && strcmp(options.position, "learned") == 0);
    CHECK(parse("-attention flash_mma") && strcmp(options.attention, "flash_mma") == 0);
    CHECK(!parse("-resume=yes") && says("true or false"));
}

TEST(unknown_flags_name_the_nearest) {
    static const char *const pairs[][2] = {{"-stesp", "-steps"},           {"-attension", "-attention"},
                                           {"-eval_every", "-eval-every"}, {"-minlr", "-min-lr"},
                                           {"-Generate", "-generate"},     {"--chanels=3", "-channels"},
                                           {"-temp", "-temperature"},      {"-sample-t", "-sample-tokens"}};
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++) {
        char wanted[64];
        snprintf(wanted, sizeof wanted, "did you mean %s?", pairs[i][1]);
        CHECK(!parse_pair(pairs[i][0], "1"));
        CHECK_MSG(says(wanted), "%s", err.text);
    }
    CHECK(!parse("-colour 3") && !says("did you mean") && !parse("-q 3") && !says("did you mean"));
    /* No flag is short for another: -b is not -batch. */
    CHECK(!parse("-b 4") && !parse("-step 4") && !parse("-l 4"));
}

TEST(missing_values_and_strays) {
    CHECK(!parse("-steps") && says("-steps needs a value"));
    CHECK(!parse("-data -steps 5") && says("-data needs a value") && says("-data=-steps"));
    CHECK(!parse("stories.txt") && says("unexpected"));
    CHECK(!parse("-resume true") && says("unexpected"));
    CHECK(!parse("-") && !parse("--") && !parse("-=3") && !parse("---steps 4"));
    CHECK(!parse_pair("", NULL) && says("unexpected"));
    CHECK(!parse_pair("\xFF\n\033[2J", NULL) && says("unexpected"));
    CHECK(!strchr(err.text, '\033'));
}

/* -help as text; each flag of the settings must be in it. */
static char *help_text(void) {
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    options_print_help(out);
    fclose(out);
    return text;
}

TEST(help) {
    char *text = help_text();
    size_t longest = 0, lines = 0;
    for (const char *line = text; *line; lines++) {
        const size_t length = strcspn(line, "\n");
        if (length > longest) longest = length;
        CHECK_MSG(length == 0 || line[length - 1] != ' ', "a space at the end of \"%.*s\"", (int)length,
                  line);
        line += length + (line[length] == '\n');
    }
    CHECK_MSG(longest <= 100, "a line of %zu columns", longest);
    CHECK(lines > 60);
    CHECK(parse(""));
    json_t *settings = options_to_json(&options), *value;
    const char *key;
    json_object_foreach(settings, key, value) {
        char flag[80] = "  -";
        for (size_t i = 0; key[i]; i++) flag[i + 3] = key[i] == '_' ? '-' : key[i], flag[i + 4] = 0;
        CHECK_MSG(strstr(text, flag), "%s is not in -help", flag);
    }
    static const char *const calls[] = {"-run",      "-resume",  "-force",  "-generate", "-evaluate",
                                        "-tokenize", "-encode",  "-decode", "-special",  "-print-config",
                                        "-dry-run",  "-version", "-help"};
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++)
        CHECK_MSG(strstr(text, calls[i]), "%s", calls[i]);
    static const char *const groups[] = {
        "\ndata\n",     "\nmodel\n", "\nattention\n", "\ntraining\n",
        "\nwatching\n", "\nrun\n",   "\nmachine\n",   "\ninstead of training\n"};
    for (size_t i = 0; i < sizeof groups / sizeof groups[0]; i++) CHECK(strstr(text, groups[i]));
    CHECK(strstr(text, "default 1024"));
    json_decref(settings);
    free(text);
}

TEST(json) {
    CHECK(parse("-lr 3e-4 -data a.txt -deterministic -eval-every 0 -run somewhere -resume"));
    json_t *settings = options_to_json(&options);
    CHECK(json_real_value(json_object_get(settings, "lr")) == 3e-4);
    CHECK(strcmp(json_string_value(json_object_get(settings, "data")), "a.txt") == 0);
    CHECK(json_is_true(json_object_get(settings, "deterministic")));
    CHECK(json_is_integer(json_object_get(settings, "eval_every")));
    CHECK(json_is_null(json_object_get(settings, "steps")) &&
          json_is_null(json_object_get(settings, "heldout")));
    CHECK(!json_object_get(settings, "run") && !json_object_get(settings, "resume") &&
          !json_object_get(settings, "generate"));

    /* What is written and read again is the same to the last bit. */
    char *text = json_dumps(settings, 0);
    json_t *read = json_loads(text, 0, NULL);
    CHECK(parse(""));
    CHECK(options_resume(&options, read, &err));
    json_t *again = options_to_json(&options);
    CHECK(json_equal(settings, again));
    json_decref(again);
    json_decref(read);
    json_decref(settings);
    free(text);
}

/* Resumes from settings given as JSON after a command line. */
static bool resume(const char *line, const char *json, json_t **settings) {
    if (!parse(line)) return false;
    *settings = json_loads(json, 0, NULL);
    err.text[0] = 0;
    return *settings && options_resume(&options, *settings, &err);
}

TEST(resuming) {
    json_t *settings = NULL;
    CHECK(
        resume("", "{\"layers\": 7, \"lr\": 1, \"data\": \"x\", \"steps\": null, \"new\": [1]}", &settings));
    CHECK(options.layers == 7 && options.lr == 1 && strcmp(options.data, "x") == 0 &&
          options.steps == OPTION_AUTO);
    CHECK(options.heads == 4); /* what is missing stays */
    json_decref(settings);
    /* A given flag counts where it may change ... */
    CHECK(resume("-keep 5 -steps 9", "{\"keep\": 2, \"steps\": 5}", &settings));
    CHECK(options.keep == 5 && options.steps == 9);
    json_decref(settings);
    /* ... or may only be raised ... */
    CHECK(!resume("-steps 4", "{\"steps\": 5}", &settings) && says("-steps") && says("has 5") &&
          says("found 4"));
    json_decref(settings);
    CHECK(resume("-steps 4", "{\"steps\": null}", &settings));
    json_decref(settings);
    CHECK(!resume("-lr 0.5", "{\"lr\": 0.25}", &settings) && says("-lr") && says("0.25") && says("0.5"));
    json_decref(settings);
    CHECK(!resume("-lr 0.3", "{\"lr\": 0.10000000000000001}", &settings) && says("has 0.1, found 0.3;"));
    json_decref(settings);
    CHECK(!resume("-minutes 1", "{\"minutes\": null}", &settings) && says("has none, found 1"));
    json_decref(settings);
    /* ... may repeat what is fixed, but not contradict it. */
    CHECK(resume("-layers 7 -data x", "{\"layers\": 7, \"data\": \"x\"}", &settings));
    json_decref(settings);
    CHECK(!resume("-layers 8", "{\"layers\": 7}", &settings) && says("-layers") && says("7") && says("8"));
    json_decref(settings);
    CHECK(!resume("-data y", "{\"data\": null}", &settings) && says("-data") && says("none") &&
          says("\"y\""));
    json_decref(settings);
}

/* What belongs to a run is there, or it does not go on; what may change may be missing. */
TEST(settings_that_lack_something) {
    CHECK(parse("-steps 5"));
    json_t *all = options_to_json(&options), *value;
    const char *key;
    CHECK(options_complete(all, "r/run.json", &err));
    static const char *const fixed[] = {"data", "vocab",   "seed",  "layers",
                                        "ctx",  "dropout", "steps", "beta2"};
    for (size_t i = 0; i < sizeof fixed / sizeof fixed[0]; i++) {
        json_t *fewer = json_copy(all);
        json_object_del(fewer, fixed[i]);
        CHECK_MSG(!options_complete(fewer, "r/run.json", &err), "without %s", fixed[i]);
        CHECK_MSG(says("r/run.json lacks") && says(fixed[i]), "%s", err.text);
        json_decref(fewer);
    }
    json_t *fewer = json_copy(all), *tokens = json_object();
    json_object_del(fewer, "keep");
    json_object_del(fewer, "threads");
    CHECK(options_complete(fewer, "r/run.json", &err));
    static const char *const of_tokens[] = {"data", "heldout", "tokenizer", "vocab", "stories", "seed"};
    for (size_t i = 0; i < sizeof of_tokens / sizeof of_tokens[0]; i++)
        json_object_set(tokens, of_tokens[i], json_object_get(all, of_tokens[i]));
    CHECK(options_complete(tokens, "r/run.json", &err));
    json_object_foreach(all, key, value) if (!json_object_get(tokens, key)) {
        json_object_set(tokens, key, value);
        break;
    }
    CHECK(!options_complete(tokens, "r/run.json", &err)); /* tokens, and one setting of a model */
    json_decref(tokens);
    json_decref(fewer);
    json_decref(all);
}

TEST(hostile_settings) {
    static const char *const bad[] = {"[]",
                                      "3",
                                      "\"layers\"",
                                      "{\"layers\": 0}",
                                      "{\"layers\": 1.5}",
                                      "{\"layers\": \"4\"}",
                                      "{\"layers\": null}",
                                      "{\"layers\": -1}",
                                      "{\"steps\": -1}",
                                      "{\"steps\": 0}",
                                      "{\"lr\": \"x\"}",
                                      "{\"lr\": 1e300}",
                                      "{\"beta1\": null}",
                                      "{\"position\": \"absolute\"}",
                                      "{\"position\": null}",
                                      "{\"data\": 3}",
                                      "{\"data\": \"\"}",
                                      "{\"deterministic\": 1}",
                                      "{\"vocab\": 9223372036854775807}",
                                      "{\"min_lr\": -1}"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        CHECK(parse(""));
        json_t *settings = json_loads(bad[i], JSON_DECODE_ANY, NULL);
        CHECK(settings != NULL);
        CHECK_MSG(!options_resume(&options, settings, &err), "%s was taken", bad[i]);
        CHECK_MSG(says("settings"), "%s", err.text);
        json_decref(settings);
    }
    CHECK(parse(""));
    json_t *settings = json_pack("{s:s%}", "data", "a\0b", (size_t)3);
    CHECK(!options_resume(&options, settings, &err));
    json_decref(settings);
}

int main(int argc, char **argv) {
    test_start(argc, argv, "options");
    RUN(defaults);
    RUN(spellings);
    RUN(whole_numbers);
    RUN(real_numbers);
    RUN(text_and_choices);
    RUN(unknown_flags_name_the_nearest);
    RUN(missing_values_and_strays);
    RUN(help);
    RUN(json);
    RUN(resuming);
    RUN(settings_that_lack_something);
    RUN(hostile_settings);
    return test_finish();
}
