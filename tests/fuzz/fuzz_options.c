/* fuzz_options.c - a command line: what is accepted can be written as a run's settings and comes back as it
 * was.
 *
 * The input is the arguments, each ended by a NUL; the last one may be without. */
#include "fuzz.h"

#include "../../options.h"

enum { MAX_ARGUMENTS = 64 };

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size) {
    char *text = xmalloc(size + 1), *argv[MAX_ARGUMENTS + 2] = {"train_gpt"};
    if (size) memcpy(text, input, size);
    text[size] = 0;
    int argc = 1;
    for (size_t at = 0; at < size && argc <= MAX_ARGUMENTS; at += strlen(text + at) + 1)
        argv[argc++] = text + at;

    Options options, again;
    Error err = {0};
    if (!options_parse(&options, argc, argv, &err)) {
        fuzz_check_error(&err, NULL);
    } else {
        json_t *written = options_to_json(&options);
        char *lines = json_dumps(written, JSON_INDENT(2));
        MUST(lines);
        json_t *read = json_loads(lines, JSON_REJECT_DUPLICATES, NULL);
        MUST(read && options_parse(&again, 1, argv, &err) && options_resume(&again, read, &err));
        json_t *same = options_to_json(&again);
        MUST(json_equal(written, same));
        /* With the same flags on the command line, nothing is seen as changed. */
        MUST(options_parse(&again, argc, argv, &err) && options_resume(&again, read, &err));
        json_decref(same);
        same = options_to_json(&again);
        MUST(json_equal(written, same));
        json_decref(same);
        json_decref(read);
        free(lines);
        json_decref(written);
    }
    free(text);
    return 0;
}
