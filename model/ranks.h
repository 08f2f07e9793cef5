/* ranks.h - who am I among how many, average the gradients, agree on a flag. Alone it is rank 0 of 1 and
 * every call is a plain return; no launcher and no MPI is needed for that. */
#ifndef RANKS_H
#define RANKS_H

#include "gpt.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Ranks {
    int rank, count; /* this process among all */
    int local_rank;  /* among those on this host: which GPU is ours */
} Ranks;

bool ranks_start(Ranks *ranks, Error *err);
void ranks_end(Ranks *ranks);
/* Sums the gradients and the step's loss over all ranks, between the last gpt_forward_backward and
 * gpt_step_end (each rank has already divided by the tokens of the whole step). */
bool ranks_sum_gradients(const Ranks *ranks, Gpt *gpt, Error *err);
/* The largest of a value over all ranks: a stop asked of one stops all at the same step. */
int ranks_agree(const Ranks *ranks, int value);

#ifdef __cplusplus
}
#endif
#endif
