/* ranks.c - a process that trains alone: rank 0 of 1, with nothing to sum and nobody to agree with. What it
 * does guard against is a launcher that starts several of it: each would train the whole run by itself and
 * all would write into one folder. */
#include "ranks.h"

#include <stdlib.h>

/* What launchers tell each process about how many there are. */
static const char *const launcher_variables[] = {
    "OMPI_COMM_WORLD_SIZE", /* Open MPI */
    "PMI_SIZE",             /* MPICH and its relatives */
    "SLURM_NTASKS",         /* srun */
};

/* A whole decimal number; 1 where the variable is not set or says something else. */
static long processes_of(const char *variable) {
    const char *text = getenv(variable);
    if (!text || !*text) return 1;
    char *end;
    const long count = strtol(text, &end, 10);
    return *end ? 1 : count;
}

bool ranks_start(Ranks *ranks, Error *err) {
    *ranks = (Ranks){.rank = 0, .count = 1, .local_rank = 0};
    for (size_t i = 0; i < sizeof launcher_variables / sizeof launcher_variables[0]; i++) {
        const char *variable = launcher_variables[i];
        const long count = processes_of(variable);
        if (count > 1)
            return error_set(
                err,
                "a launcher started %ld processes (%s=%ld), but this build trains in one process "
                "only; start it without the launcher, or, where it is the only one, with %s unset",
                count, variable, count, variable);
    }
    return true;
}

void ranks_end(Ranks *ranks) {
    (void)ranks;
}

bool ranks_sum_gradients(const Ranks *ranks, Gpt *gpt, Error *err) {
    (void)ranks, (void)gpt, (void)err;
    return true;
}

int ranks_agree(const Ranks *ranks, int value) {
    (void)ranks;
    return value;
}
