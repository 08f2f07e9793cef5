/* run.h - the run folder and its log.
 *
 *   RUN/run.json       all settings as resolved, version
 *   RUN/log.jsonl      one compact JSON object a line, "type" first; every step has a row
 *   RUN/tokens/        train-*.bin, heldout-*.bin, merges.txt, data.json
 *   RUN/checkpoints/   step-00001000/ ...
 *   RUN/report.html    the page one looks at
 *   RUN/lock           held (flock) while a process uses the run
 * A run folder can be moved while no process uses it: nothing in it names its own place. Numbers are written by
 * jansson; a number that is not finite becomes null. Knows no model: what it logs comes as plain values. */
#ifndef RUN_H
#define RUN_H

#include <jansson.h>

#include "../common.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Run Run;

typedef enum RunOpen {
    RUN_NEW,       /* the folder must not hold a run */
    RUN_RESUME,    /* goes on with the run in it; starts one where there is none */
    RUN_FORCE,     /* an old run is moved aside to DIR.old-N */
    RUN_COMPARISON /* as RUN_NEW, of a folder in which several runs are to be, with tokens/ that they share */
} RunOpen;

/* Opens or makes the folder and locks it. path NULL: a new folder runs/YYYYMMDD-HHMMSS, of a comparison
 * runs/compare-YYYYMMDD-HHMMSS (with -2, -3 ... behind it where that exists). Refused, with a line that says
 * what to do: a folder that holds a run
 * (RUN_NEW), one in use by another process, one that is not empty and is no run, one that cannot be
 * written. What it holds is found out under the lock; what an interrupted start has left counts as nothing and
 * is removed. *resumed tells whether a run was there (RUN_RESUME). */
Run *run_open(const char *path, RunOpen how, bool *resumed, Error *err);
/* Whether run_open would take the path, by what is there now; changes nothing. *found: a run is there. */
bool run_look(const char *path, RunOpen how, bool *found, Error *err);
void run_close(Run *run); /* unlocks; NULL is fine */
/* For a start that failed: removes what was put into the folder since run_open, and the folder if run_open
 * made it; a run that RUN_FORCE moved aside is moved back. What was there before stays. Then run_close. */
void run_undo(Run *run);
/* Its runs have ended: without the lock, nothing in the folder is taken for what a start has left that failed. */
void run_end_comparison(Run *run);
const char *run_path(const Run *run);
char *run_file(const Run *run, const char *name); /* RUN/name, to be freed */
const char *run_moved_aside(const Run *run);      /* where RUN_FORCE put the old run; NULL: there was none */
/* Whether the folder that was opened is still the one at run_path: it may be moved or removed meanwhile, and
 * what is then written there would be lost. */
bool run_is_in_place(const Run *run, Error *err);
/* The newest run under runs/ (with_model: of those with a checkpoint), to be freed; NULL with a line where
 * there is none. */
char *run_newest(bool with_model, Error *err);

/* run.json, written atomically; `settings` (an object) is borrowed. */
bool run_write_settings(Run *run, const json_t *settings, Error *err);
/* Reads RUN/run.json of any run folder (hostile until checked): a new reference. */
json_t *run_read_settings(const char *path, Error *err);

/* ---- the log ---- */
/* Appends one row and flushes it; `row` is a JSON object whose first key is "type"; the reference is
 * stolen. A failed write is reported once (false, err) and then kept silent until one succeeds. */
bool run_log(Run *run, json_t *row, Error *err);
/* Brings the rows to the disk, before a checkpoint that stands behind them. */
bool run_log_sync(Run *run, Error *err);
/* A JSON number, or null where x is not finite. */
json_t *run_number(double x);
/* A JSON string of any bytes: what is not valid UTF-8 becomes U+FFFD, NUL is kept. */
json_t *run_text(const void *bytes, size_t size);
/* One row of a log, as run_log_each gives it; valid during the call only. */
typedef struct RunRow {
    const json_t *json; /* an object */
    const char *type;   /* its "type" */
    const char *line;   /* as it stands in the file, without the newline */
    size_t size;
    uint64_t number; /* of the line, from 1 */
} RunRow;
/* Calls `each` for every row of PATH/log.jsonl in order; a false from it ends the reading and is returned.
 * Hostile until checked: each line must be a JSON object with a "type", else the error names the line; a
 * torn last line is passed over, and a log that is not there has no rows; one that cannot be read is an `unreadable`
 * error. Memory does not grow with it. */
bool run_log_each(const char *path, bool (*each)(void *context, const RunRow *row, Error *err), void *context,
                  Error *err);
/* Of the rows that watched a step: those that stay when a log is cut back to it. */
typedef struct RunWatched {
    bool evaluation;
    uint64_t stories; /* the first so many samples */
} RunWatched;
/* Cuts the log back to what was known at `step`: rows of type step, eval and sample past it, an "end" row
 * and a torn last line go, and of those that watched the step itself what `watched` leaves out (NULL: all
 * stay); the file is replaced atomically. */
bool run_log_cut(Run *run, uint64_t step, const RunWatched *watched, Error *err);

#ifdef __cplusplus
}
#endif
#endif
