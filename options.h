/* options.h - one table of flags: name, type, range, default, group, help. Parsing, -help, -print-config,
 * run.json and what may change on resume all come from it (options.c). */
#ifndef OPTIONS_H
#define OPTIONS_H

#include <jansson.h>

#include "common.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A number that was left for the program to choose ("default: what fits"); no user can type it, and in JSON
 * it is null. */
enum { OPTION_AUTO = -1 };

/* Every setting, a field a flag: -eval-every is eval_every here and in JSON. Text is NULL where not given. */
typedef struct Options {
    /* data */
    const char *data, *heldout, *tokenizer;
    int64_t vocab, stories;
    /* model */
    int64_t layers, heads, channels, ctx;
    const char *position;
    double dropout;
    const char *load;
    /* attention */
    const char *attention;
    bool deterministic;
    /* training */
    int64_t batch, micro, steps;
    double minutes, lr, min_lr;
    int64_t warmup;
    double weight_decay, beta1, beta2, clip;
    int64_t seed;
    /* watching */
    int64_t eval_every, eval_tokens, sample_every, samples;
    const char *prompt;
    int64_t sample_tokens;
    double temperature;
    int64_t top_k;
    double top_p;
    /* run */
    const char *run;
    int64_t checkpoint_every, keep;
    bool resume, force;
    /* machine */
    const char *device, *precision;
    int64_t threads;
    double timeout;
    /* instead of training */
    bool generate, evaluate;
    const char *compare;
    bool tokenize, encode, decode, special, print_config, dry_run, version, help;
} Options;

/* Fills *options with the defaults, then from the command line. False with a line (exit code 2): an unknown
 * flag (names the nearest), a missing or bad value (what was given, what is allowed). Text points into argv.
 * `-flag value`, `--flag value`, `--flag=value` and `-flag=value`; a switch takes no value but =true/=false;
 * of a repeated flag the last counts; numbers are parsed whole, integers in decimal. */
bool options_parse(Options *options, int argc, char **argv, Error *err);
/* Whether a flag was given on the command line ("eval-every"). */
bool options_given(const char *name);
void options_print_help(FILE *out);
/* All settings as a JSON object, in the table's order: -print-config and run.json. Flags that say what this
 * one call does (-run, -resume, -generate ...) are no settings and left out. */
json_t *options_to_json(const Options *options);
/* A value of it for people, to be freed: a number by the fewest digits that read back as it, null (or NULL) "none". */
char *options_value_text(const json_t *value);
/* On resume: takes every setting that was not given on the command line from a run's settings (text is then
 * owned by `settings`, which must live on); a given flag that differs from the run's and may not change (or
 * that may only be raised, and is lower) is refused with both values. Settings are held to the same types and ranges as flags; a key that is missing
 * leaves the option as it is, and a key that is no option is passed over. */
bool options_resume(Options *options, json_t *settings, Error *err);
/* Whether the settings of a run, from the file `path`, hold all that belongs to it as long as it lives: that of
 * its tokens, and where anything of a model is in them all of that. */
bool options_complete(const json_t *settings, const char *path, Error *err);

#ifdef __cplusplus
}
#endif
#endif
