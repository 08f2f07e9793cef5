/* measure.c - time in attention, memory of the process (measure.h). */
#include "measure.h"

#include <math.h>
#include <string.h>
#include <sys/resource.h>

/* ---- time in attention ---- */

/* A backend's functions get no context of their own, so that what stands behind them is kept here. */
static struct {
    const Attention *inner;
    Attention outer;
    AttentionTimes times;
} timed;

static void timed_forward(const AttentionCall *call) {
    const double begun = seconds_now();
    timed.inner->forward(call);
    if (call->training) timed.times.forward += seconds_now() - begun;
}

static void timed_backward(const AttentionCall *call) {
    const double begun = seconds_now();
    timed.inner->backward(call);
    timed.times.backward += seconds_now() - begun;
}

const Attention *attention_timed(const Attention *attention) {
    timed.inner = NULL;
    if (strcmp(attention->device, "cpu") != 0) return attention;
    timed.inner = attention;
    timed.outer = *attention;
    timed.outer.forward = timed_forward, timed.outer.backward = timed_backward;
    timed.times = (AttentionTimes){0};
    return &timed.outer;
}

AttentionTimes attention_take_times(void) {
    if (!timed.inner) return (AttentionTimes){NAN, NAN};
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
