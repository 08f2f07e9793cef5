/* report.h - the page one looks at: RUN/report.html, one self-contained file (no scripts or fonts from
 * elsewhere) drawn from run.json and log.jsonl alone: the loss curves, the floor where it is known, the
 * newest samples, the settings. Written anew after each evaluation and at the end of a run. */
#ifndef REPORT_H
#define REPORT_H

#include "../common.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Reads RUN/run.json and RUN/log.jsonl (a torn last line is passed over) and replaces RUN/report.html. */
bool report_write(const char *run_path, Error *err);

#ifdef __cplusplus
}
#endif
#endif
