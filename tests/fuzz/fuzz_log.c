/* fuzz_log.c - a log.jsonl: cut back to a step it holds no row past it, and cutting again changes nothing;
 * the report is drawn from any log that can be read.
 *
 * The first byte of the input is the step, the rest the log. */
#include "fuzz.h"

#include "../../data/report.h"
#include "../../data/run.h"

static const char run_json[] = "{\"layers\": 1, \"lr\": 0.003, \"data\": null, \"chosen\": [\"warmup\"]}\n";

static bool not_past(void *step, const RunRow *row, Error *err) {
    (void)err;
    MUST(strcmp(row->type, "end") != 0);
    const json_t *of_row = json_object_get(row->json, "step");
    if (strcmp(row->type, "step") == 0 || strcmp(row->type, "eval") == 0 || strcmp(row->type, "sample") == 0)
        MUST(json_integer_value(of_row) >= 0 && (uint64_t)json_integer_value(of_row) <= *(uint64_t *)step);
    return true;
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size) {
    static char *path, *page;
    static Run *run;
    Error err = {0};
    if (!path) {
        bool resumed;
        run = run_open(fuzz_folder(), RUN_NEW, &resumed, &err);
        MUST(run);
        char *settings = fuzz_path("run.json");
        fuzz_write(settings, run_json, sizeof run_json - 1);
        free(settings);
        path = fuzz_path("log.jsonl"), page = fuzz_path("report.html");
    }
    if (size == 0) return 0;
    uint64_t step = input[0];
    fuzz_write(path, input + 1, size - 1);
    unlink(page);
    if (report_write(fuzz_folder(), &err)) MUST(file_exists(page));
    else fuzz_check_error(&err, path);

    Buffer before = {0}, once = {0}, twice = {0};
    if (!run_log_cut(run, step, NULL, &err)) {
        fuzz_check_error(&err, path);
        MUST(file_read(path, SIZE_MAX, &before, &err)); /* what could not be cut is left as it was */
        MUST(before.size == size - 1 && (size == 1 || memcmp(before.data, input + 1, size - 1) == 0));
    } else {
        MUST(run_log_each(fuzz_folder(), not_past, &step, &err));
        MUST(file_read(path, SIZE_MAX, &once, &err) && once.size <= size);
        MUST(run_log_cut(run, step, NULL, &err) && file_read(path, SIZE_MAX, &twice, &err));
        MUST(once.size == twice.size && (once.size == 0 || memcmp(once.data, twice.data, once.size) == 0));
        MUST(report_write(fuzz_folder(), &err));
    }
    buffer_free(&before);
    buffer_free(&once);
    buffer_free(&twice);
    return 0;
}
