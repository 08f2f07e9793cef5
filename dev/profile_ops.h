/* profile_ops.h - where the time of a training step goes: the operations of ops.h and attention with a clock
 * around each, for bench_train.c and bench_gpu.c.
 *
 *     Ops ops;  Attention attention;
 *     profile_wrap(&ops_cuda, backend, &clock, &ops, &attention);     a Gpt is made with these
 *     profile_start();  steps;  wait for the device;  profile_stop(spent);
 * Between start and stop each call is noted; otherwise it is passed on as it is. One pair at a time. */
#ifndef PROFILE_OPS_H
#define PROFILE_OPS_H

#include "../model/ops.h"

typedef enum Kind {
    EMBEDDING,
    NORM_FORWARD,
    NORM_BACKWARD,
    LINEAR_FORWARD,
    LINEAR_BACKWARD,
    ROTARY,
    ATTENTION_FORWARD,
    ATTENTION_BACKWARD,
    HEAD,
    CLIP,
    UPDATE,
    OTHER,
    KINDS
} Kind;
extern const char *const kind_names[KINDS];

/* How time is read: marks are set in the stream's order, on a GPU as events, for which nobody waits. */
typedef struct ProfileClock {
    void (*mark)(Stream *stream, size_t index); /* from 0 on; one that is set again counts anew */
    double (*seconds)(size_t from, size_t to);  /* between two marks that the stream has passed */
} ProfileClock;
extern const ProfileClock profile_host_clock; /* for a device that is done when a call returns */

typedef struct Spent {
    double seconds;
    double flops; /* of its matrix products: of causal attention those below the diagonal, backward 2.5
                     times forward, whatever a backend computes besides */
    double bytes; /* that have to be read or written, where it is no matrix product */
} Spent;

void profile_wrap(const Ops *ops, const Attention *attention, const ProfileClock *clock, Ops *outer_ops,
                  Attention *outer_attention);
void profile_start(void);
/* Returns the seconds from the first call's begin to the last one's end. */
double profile_stop(Spent spent[KINDS]);

#endif
