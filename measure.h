/* measure.h - what a run takes, measured while it runs: the time that attention takes, the memory of the
 * process. For the log, the comparison of backends and the benchmark. */
#ifndef MEASURE_H
#define MEASURE_H

#include "model/gpt.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- time in attention ---- */
typedef struct AttentionTimes {
    double forward, backward; /* seconds, in training */
} AttentionTimes;

/* The same backend with marks of the device's clock around forward and backward; one is timed at a time, the
 * last that was asked for. It takes the stream's marks for itself. */
const Attention *attention_timed(const Attention *attention, const Ops *ops);
/* From here on that backend sets no marks. */
void attention_stop_timing(void);
/* The times since the call before of this function; waits for what is queued. Calls without `training`
 * (evaluations) are in none of them. */
AttentionTimes attention_take_times(void);

/* ---- memory of this process ---- */
/* Bytes that it holds in memory now, and the most that it ever held; 0 where the system does not say. */
size_t memory_now(void);
size_t memory_peak(void);

/* Adds to a plan of training that fits what the process holds besides the model: what it holds now, before
 * the model is made; what libraries and threads come to hold once they work; and the copy of a tensor that
 * saving and loading take. What libraries hold only work can tell, so one layer of the model takes a few
 * passes over some tokens, in memory that is then given back. Where the system does not say, or the model lives in a
 * device's own memory, nothing is added. */
bool memory_plan_process(const GptSetup *setup, MemoryPlan *plan, Error *err);

#ifdef __cplusplus
}
#endif
#endif
