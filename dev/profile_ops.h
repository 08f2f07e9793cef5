/* profile_ops.h - where the time of a training step goes: the operations of ops.h and attention between two
 * marks each, for bench_train.c and bench_gpu.c.
 *
 *     Ops ops;  Attention attention;
 *     profile_wrap(&ops_cuda, backend, &ops, &attention);     a Gpt is made with these
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

typedef struct Spent {
    double seconds;
    double flops; /* of its matrix products: of causal attention those below the diagonal, backward 2.5
                     times forward, whatever a backend computes besides */
    double bytes; /* that have to be read or written, where it is no matrix product */
} Spent;

void profile_wrap(const Ops *ops, const Attention *attention, Ops *outer_ops, Attention *outer_attention);
void profile_start(void);
/* Returns the seconds from the first call's begin to the last one's end. */
double profile_stop(Spent spent[KINDS]);

#endif
