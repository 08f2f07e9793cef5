/* measure.c - time in attention, memory of the process (measure.h). */
#include "measure.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#if defined(__GLIBC__)
#include <malloc.h>
#endif

/* ---- time in attention ---- */

/* A backend's functions get no context of their own, so that what stands behind them is kept here. Each call
 * sets two marks of the stream; they are read when somebody asks, or when all are in use. */
enum { TIMED_CALLS = 512 };
static struct {
    const Ops *ops;
    const Attention *inner;
    Attention outer;
    Stream *stream;
    size_t calls; /* since the marks were read */
    bool backward[TIMED_CALLS];
    AttentionTimes times;
} timed;

static void read_marks(void) {
    for (size_t i = 0; i < timed.calls; i++) {
        const double seconds = timed.ops->seconds_between(timed.stream, 2 * i, 2 * i + 1);
        *(timed.backward[i] ? &timed.times.backward : &timed.times.forward) += seconds;
    }
    timed.calls = 0;
}

static void timed_call(const AttentionCall *call, void (*function)(const AttentionCall *), bool backward) {
    if (timed.calls == TIMED_CALLS) read_marks();
    const size_t i = timed.calls++;
    timed.stream = call->stream, timed.backward[i] = backward;
    timed.ops->mark(call->stream, 2 * i);
    function(call);
    timed.ops->mark(call->stream, 2 * i + 1);
}

static void timed_forward(const AttentionCall *call) {
    if (call->training) timed_call(call, timed.inner->forward, false);
    else timed.inner->forward(call);
}

static void timed_backward(const AttentionCall *call) {
    timed_call(call, timed.inner->backward, true);
}

const Attention *attention_timed(const Attention *attention, const Ops *ops) {
    timed.ops = ops, timed.inner = attention;
    timed.outer = *attention;
    timed.outer.forward = timed_forward, timed.outer.backward = timed_backward;
    timed.calls = 0, timed.times = (AttentionTimes){0};
    return &timed.outer;
}

void attention_stop_timing(void) {
    timed.outer.forward = timed.inner->forward, timed.outer.backward = timed.inner->backward;
}

AttentionTimes attention_take_times(void) {
    read_marks();
    const AttentionTimes times = timed.times;
    timed.times = (AttentionTimes){0};
    return times;
}

/* ---- memory of this process ---- */

/* A line of /proc/self/status, "VmRSS: 1234 kB", in bytes; 0 where there is none. */
static size_t status_bytes(const char *key) {
    FILE *file = fopen("/proc/self/status", "re");
    char line[256];
    size_t kilobytes = 0;
    while (file && fgets(line, sizeof line, file)) {
        const size_t length = strlen(key);
        if (strncmp(line, key, length) == 0 && sscanf(line + length, ": %zu kB", &kilobytes) == 1) break;
    }
    if (file) fclose(file);
    return kilobytes <= SIZE_MAX / 1024 ? kilobytes * 1024 : 0;
}

size_t memory_now(void) {
    return status_bytes("VmRSS");
}

/* Linux hands ru_maxrss on to what is executed in a process's place, so that it may be another program's. */
size_t memory_peak(void) {
    const size_t peak = status_bytes("VmHWM");
    if (peak > 0) return peak;
    struct rusage usage;
    if (getrusage(RUSAGE_SELF, &usage) != 0) return 0;
#if defined(__APPLE__)
    return (size_t)usage.ru_maxrss;
#else
    return (size_t)usage.ru_maxrss * 1024;
#endif
}

static void plan_row(MemoryPlan *plan, const char *purpose, size_t bytes) {
    if (bytes == 0 || plan->rows == MEMORY_PLAN_ROWS) return;
    plan->row[plan->rows].purpose = purpose;
    plan->row[plan->rows++].bytes = bytes;
    plan->total += bytes; /* both are in memory, or about to be */
}

/* Memory that was freed goes back to the system, where malloc can be asked for that. */
static void give_back_free_memory(void) {
#if defined(__GLIBC__)
    malloc_trim(0);
#endif
}

/* Of a tensor on its way to or from the disk there is a copy on the host. */
static size_t largest_tensor(const GptConfig *config) {
    size_t count, total, largest = 0;
    Parameter *table = gpt_parameters(config, &count, &total, NULL);
    for (size_t i = 0; table && i < count; i++)
        if (table[i].size > largest) largest = table[i].size;
    free(table);
    return largest * sizeof(float);
}

enum { REHEARSED_TOKENS = 1024, REHEARSALS = 3 }; /* with more of them, libraries keep no more */

bool memory_plan_process(const GptSetup *setup, MemoryPlan *plan, Error *err) {
    if (strcmp(setup->ops->name, "cpu") != 0) return true; /* the model is not in the process's memory */
    give_back_free_memory(); /* what earlier work, a tokenizer's training, left is no part of the run */
    const size_t T = setup->config.ctx, rows = (REHEARSED_TOKENS + T - 1) / T, before = memory_now();
    GptSetup layer = *setup;
    layer.config.layers = 1, layer.cache_B = 0, layer.B = setup->B < rows ? setup->B : rows;
    MemoryPlan known;
    Gpt *gpt = before > 0 && gpt_plan(&layer, &known, err) ? gpt_new(&layer, err) : NULL;
    if (!gpt) return before == 0;
    const size_t tokens = layer.B * T, explained = before + known.total + tokens * sizeof(int32_t);
    int32_t *ids = xcalloc(tokens, sizeof *ids); /* (B, T), inputs and targets alike */
    gpt_step_begin(gpt, 0, 0);
    /* malloc keeps what it was given back once, in each thread, so that later passes find it as all steps do. */
    for (int pass = 0; pass < REHEARSALS; pass++) gpt_forward_backward(gpt, ids, ids, layer.B, 0, tokens);
    const size_t after = memory_now();
    free(ids);
    gpt_free(gpt);
    give_back_free_memory(); /* else the run's own buffers would be laid around what is left of these */
    plan_row(plan, "program, libraries, data", before);
    plan_row(plan, "work space of libraries and threads", after > explained ? after - explained : 0);
    plan_row(plan, "a tensor on its way to or from disk", largest_tensor(&setup->config));
    return true;
}
