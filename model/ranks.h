/* ranks.h - who am I among how many; average the gradients; agree. Processes that mpirun or srun started are
 * the ranks of one training run: each takes its share of every step's sequences. Alone a process is rank 0 of
 * 1, no MPI is called, and every call here is a plain return.
 *
 * Use:
 *     ranks_start                              first of all
 *     ranks_all, ranks_same, ranks_tell ...    whatever must be the same everywhere before the first step
 *     ranks_join_devices, ranks_attach         once device and model are there
 *     each step: ranks_average_begin before the last gpt_forward_backward, ranks_average_end after it,
 *     gpt_step_end, ranks_step_done
 *     ranks_end, where all ranks come to an end together; else ranks_abort
 *
 * Every rank makes the same calls in the same order. All are for the thread that called ranks_start.
 *
 * No call waits without an end. Each rank says at least once a second that it lives: from its waits here, and
 * from stop_requested() and sign_of_life(), so that a rank that works alone for hours (text to tokens) keeps
 * the others waiting and one that died or was stopped does not. One that has been silent for `timeout` seconds (outside of steps,
 * SLOW_PHASE times as long) ends the job: a line on stderr names it. A signal to stop that any rank got
 * reaches the others the same way and is agreed on in the step (ranks_step_done). */
#ifndef RANKS_H
#define RANKS_H

#include "gpt.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct RankLink RankLink;

typedef struct Ranks {
    int rank, count;             /* this process among all */
    int local_rank, local_count; /* ... among those on this host: which GPU is ours */
    int cpu_sharers; /* ranks on this host that may run on the same CPUs as this one, itself counted */
    int hosts;       /* of all ranks */
    RankLink *link;  /* NULL: alone */
} Ranks;

enum { SLOW_PHASE = 5 };

/* Joins the other processes that a launcher started, if there are any. False, and then nothing is to be ended:
 * a build without MPI, or a launcher and an MPI that do not know each other. */
bool ranks_start(Ranks *ranks, double timeout, Error *err);
/* Waits for the others, then leaves them. Does nothing alone or a second time. */
void ranks_end(Ranks *ranks);
/* Ends all ranks at once; for a failure that the others do not know of. Alone it does nothing. */
void ranks_abort(Ranks *ranks, int code);
/* In steps a rank is given up on sooner than outside of them: steps take seconds, a checkpoint can take minutes. */
void ranks_in_steps(Ranks *ranks, bool in_steps);

/* ---- small talk ---- */
/* Whether all ranks say `done`; else false on each, with *err and *code of the first that does not, and its rank
 * put before the text where that is not 0. code may be NULL. */
bool ranks_all(Ranks *ranks, bool done, int *code, Error *err);
/* Rank 0's bytes to all: what *bytes held elsewhere is replaced. */
void ranks_tell(Ranks *ranks, Buffer *bytes);
/* ours (n) of each rank, in the order of the ranks: all (count, n), on each. */
void ranks_gather(Ranks *ranks, const double *ours, size_t n, double *all);
/* Whether all ranks have the same text; else false on each: "WHAT differs: rank 2 on HOST has ..., rank 0 has ...;
 * ADVICE". */
bool ranks_same(Ranks *ranks, const char *what, const char *ours, const char *advice, Error *err);

/* ---- averaging ---- */
/* Every rank has opened its device: all of one kind, no GPU twice; joins GPUs through NCCL. */
bool ranks_join_devices(Ranks *ranks, const Ops *ops, Stream *stream, Error *err);
/* Host memory that averaging will hold. */
size_t ranks_bytes(const Ranks *ranks, const Ops *ops);
/* From now on steps of this model are averaged, until it is detached: before it is freed, unless ranks_end came
 * first. */
void ranks_attach(Ranks *ranks, Gpt *gpt);
void ranks_detach(Ranks *ranks);
/* The next gpt_forward_backward is the step's last on this rank: gradients are summed over all ranks as they
 * become final, in buckets, while it goes on. `stop`: the signal to stop that this rank got, or 0. */
void ranks_average_begin(Ranks *ranks, int stop);
/* After it: gradients and the step's loss are now (on a GPU: will be, in the stream's order) the sums over all
 * ranks, of which each has divided its own by the tokens of the whole step. The sum is taken in the order of
 * the ranks on CPUs, and in NCCL's fixed one on GPUs. The same bits on every rank. */
void ranks_average_end(Ranks *ranks);
/* After gpt_step_end: waits for the step. Returns a signal that any rank gave to ranks_average_begin (the
 * largest), the same on all; alone what this one gave. */
int ranks_step_done(Ranks *ranks);
/* Seconds that computing stood still for averaging since the last call of this. */
double ranks_take_exposed(Ranks *ranks);
/* "4 on 2 hosts, gradients averaged by MPI in 12 buckets" */
void ranks_describe(const Ranks *ranks, char *text, size_t size);

#ifdef __cplusplus
}
#endif
#endif
