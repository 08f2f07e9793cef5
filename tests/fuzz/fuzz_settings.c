/* fuzz_settings.c - a run.json, as -resume reads it: settings that are accepted are held to the flags' types
 * and ranges, so that they survive being written and read once more. The report shows them, whatever they
 * are.
 *
 * Some flags are given on the command line, too, one of which may not change. */
#include "fuzz.h"

#include "../../data/report.h"
#include "../../data/run.h"
#include "../../options.h"

static void resume(json_t *settings, int argc, char **argv) {
    Options options, again;
    Error err = {0};
    MUST(options_parse(&options, argc, argv, &err));
    if (!options_resume(&options, settings, &err)) {
        fuzz_check_error(&err, NULL);
        return;
    }
    json_t *written = options_to_json(&options);
    char *text = json_dumps(written, JSON_INDENT(2));
    MUST(text);
    json_t *read = json_loads(text, JSON_REJECT_DUPLICATES, NULL);
    MUST(read && options_parse(&again, 1, argv, &err));
    MUST(options_resume(&again, read, &err));
    json_t *same = options_to_json(&again);
    MUST(json_equal(written, same));
    json_decref(same);
    json_decref(read);
    free(text);
    json_decref(written);
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size) {
    static char *path, *argv[] = {"train_gpt", "-steps", "7", "-layers", "3", NULL};
    if (!path) path = fuzz_path("run.json");
    fuzz_write(path, input, size);
    Error err = {0};
    json_t *settings = run_read_settings(fuzz_folder(), &err);
    if (!settings) {
        fuzz_check_error(&err, path);
        return 0;
    }
    MUST(json_is_object(settings));
    resume(settings, 1, argv);
    resume(settings, 5, argv);
    MUST(report_write(fuzz_folder(), &err));
    json_decref(settings);
    return 0;
}
