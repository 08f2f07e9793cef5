/* test_ranks.c - alone it is rank 0 of 1; several processes of a launcher, which this build cannot join into
 * one run, are refused. */
#include "test.h"

#include "../model/ranks.h"

static const char *const variables[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"};
enum { VARIABLES = sizeof variables / sizeof variables[0] };

TEST(alone) {
    static const char *const values[] = {"1", "", "0", "-4", "many", "4x"};
    for (size_t i = 0; i < VARIABLES; i++) unsetenv(variables[i]);
    Ranks ranks = {-1, -1, -1};
    Error err;
    CHECK(ranks_start(&ranks, &err));
    CHECK(ranks.rank == 0 && ranks.count == 1 && ranks.local_rank == 0);
    CHECK(ranks_agree(&ranks, 15) == 15 && ranks_agree(&ranks, 0) == 0);
    CHECK(ranks_sum_gradients(&ranks, NULL, &err));
    ranks_end(&ranks);
    for (size_t i = 0; i < VARIABLES; i++) {
        for (size_t k = 0; k < sizeof values / sizeof values[0]; k++) {
            setenv(variables[i], values[k], 1);
            CHECK_MSG(ranks_start(&ranks, &err), "%s=%s: %s", variables[i], values[k], err.text);
        }
        unsetenv(variables[i]);
    }
}

TEST(one_of_several_is_refused) {
    for (size_t i = 0; i < VARIABLES; i++) {
        setenv(variables[i], "4", 1);
        Ranks ranks;
        Error err = {{0}};
        CHECK(!ranks_start(&ranks, &err));
        CHECK_MSG(strstr(err.text, "4 processes") && strstr(err.text, variables[i]), "%s", err.text);
        unsetenv(variables[i]);
    }
}

int main(int argc, char **argv) {
    test_start(argc, argv, "ranks");
    RUN(alone);
    RUN(one_of_several_is_refused);
    return test_finish();
}
