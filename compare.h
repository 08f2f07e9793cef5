/* compare.h - the same training with each of several attention backends, side by side: -compare naive,flash.
 *
 *     Comparison comparison;
 *     compare_list(&comparison, "naive,flash", &err);   then note in `refusal` what cannot run here, and why
 *     open the folder by run_open(path, RUN_COMPARISON ...) and make the tokens in it, if there are none
 *     compare_train(&comparison, folder, argc, argv, more, &err);
 *     compare_show(&comparison, stdout);  compare_write(&comparison, folder, &err);
 *
 * Each backend trains in a process of its own, this program again with the user's own flags, one after the
 * other: so its peak memory is its own, and a crash ends it alone. What is compared is read from the runs'
 * logs. FOLDER holds
 *     tokens/           shared by the runs; none where the user's -data names shards
 *     naive/, flash/    the runs, like any others
 *     compare.json      what is shown, for programs
 *     lock              held while the comparison goes on (data/run.h) */
#ifndef COMPARE_H
#define COMPARE_H

#include "common.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { COMPARE_BACKENDS = 8, COMPARE_NAME_BYTES = 32 };

/* A held-out loss. */
typedef struct CompareEval {
    uint64_t step;
    double loss;  /* nats per token; not a number where that is what the run found */
    double floor; /* of it; not a number where not known */
} CompareEval;

typedef struct CompareBackend {
    char name[COMPARE_NAME_BYTES]; /* as the user named it, and of its run's folder */
    Error refusal;                 /* why it did not run or not to its end; "" where it did */
    bool ran, failed;              /* there is a log; it began and failed */
    CompareEval *evals;            /* (n_evals) */
    size_t n_evals;
    /* Of the run, not a number where not known. Times are means over the steps after the first. */
    double steps, micro, tokens_per_s, ms, forward_ms, backward_ms;
    double saved_bytes; /* by attention for backward, in all layers; besides qkv, out and lse */
    double planned_bytes, peak_bytes;
} CompareBackend;

typedef struct Comparison {
    CompareBackend backend[COMPARE_BACKENDS];
    size_t count;
    int stopped; /* the signal that ended it early, or 0 */
} Comparison;

/* From names with commas between. They name folders: letters, digits and _ only. */
bool compare_list(Comparison *comparison, const char *names, Error *err);
/* Trains with each that is not refused. argc, argv: the user's own; `more`: flags that count instead of the
 * user's, NULL at the end. A signal that asks for a stop is handed on to the run, which saves; those that had
 * not begun are refused then. What a backend's failure was is in its `refusal`; only a failure to start
 * processes at all is one of this call. */
bool compare_train(Comparison *comparison, const char *folder, int argc, char **argv, char *const *more,
                   Error *err);
/* First thing in main: where this process is one that compare_train started, it is told to stop (SIGTERM) when that
 * one ends, however that comes. */
void compare_follow_parent(void);
void compare_show(const Comparison *comparison, FILE *out);
bool compare_write(const Comparison *comparison, const char *folder, Error *err);
void compare_free(Comparison *comparison);

#ifdef __cplusplus
}
#endif
#endif
