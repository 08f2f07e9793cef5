/* test_emulated.c - the emulated GPU (emulated/emulated.h) finds what it is there to find: kernels with a fault do not
 * come out right, or end the process with a line; the same ones without it do. And fp16, which its tables have. */
#include "emulated/emulated.h"
#include "reference_bf16.h"
#include "test.h"

#include <sys/wait.h>
#include <unistd.h>

enum { BLOCKS = 16, THREADS = 2 * LANES, WORDS = 4 /* of 16 bytes */ };

/* What a kernel is given and leaves; faulty: without what it needs to be right. */
typedef struct Job {
    bool faulty;
    uint32_t (*result)[THREADS]; /* of each block */
    const uint32_t *source;      /* THREADS * WORDS */
} Job;

static unsigned word_at(unsigned index) {
    return emulated_shared_start() + 4 * index;
}
static uint32_t *word(unsigned index) {
    return emulated_shared(word_at(index), 4);
}

/* Blocks and threads whose result is not `expected(thread)`. */
static size_t count_wrong(void (*run)(const void *job), bool faulty, uint32_t (*expected)(unsigned thread),
                          size_t wrong_in_block[BLOCKS]) {
    static uint32_t result[BLOCKS][THREADS];
    static _Alignas(16) uint32_t source[THREADS * WORDS];
    for (unsigned i = 0; i < THREADS * WORDS; i++) source[i] = 7 * i;
    memset(result, 0xee, sizeof result);
    const Job job = {faulty, result, source};
    emulated_launch("a test's kernel", run, &job, BLOCKS, THREADS, 16 * THREADS);
    size_t wrong = 0;
    for (unsigned b = 0; b < BLOCKS; b++) {
        wrong_in_block[b] = 0;
        for (unsigned t = 0; t < THREADS; t++) wrong_in_block[b] += result[b][t] != expected(t);
        wrong += wrong_in_block[b];
    }
    return wrong;
}
static void leave(const Job *job, uint32_t result) {
    job->result[emulated_block.x][emulated_thread.x] = result;
}

/* Each thread reads what one of the other warp has written: before a barrier, or after it. */
static void exchange(const void *given) {
    const Job *job = given;
    const unsigned own = emulated_thread.x, other = (own + LANES) % THREADS;
    *word(own) = own;
    if (!job->faulty) emulated_barrier();
    leave(job, *word(other));
}
static uint32_t of_other(unsigned thread) {
    return (thread + LANES) % THREADS;
}
TEST(a_missing_barrier_shows) {
    size_t wrong[BLOCKS];
    CHECK(count_wrong(exchange, false, of_other, wrong) == 0);
    CHECK(count_wrong(exchange, true, of_other, wrong) > 0);
    for (unsigned b = 0; b < BLOCKS; b++) CHECK_MSG(wrong[b] > 0, "block %u is right", b);
}

/* Each thread copies 16 bytes and reads them: before they have to be there, or after. */
static void copy(const void *given) {
    const Job *job = given;
    const unsigned own = emulated_thread.x;
    emulated_copy(word_at(own * WORDS), own == 3 ? NULL : job->source + own * WORDS);
    if (!job->faulty) emulated_wait();
    leave(job, *word(own * WORDS + 1));
    emulated_wait();
}
static uint32_t of_source(unsigned thread) {
    return thread == 3 ? 0 : 7 * (thread * WORDS + 1);
}
TEST(a_missing_wait_shows) {
    size_t wrong[BLOCKS], early = 0, late = 0;
    CHECK(count_wrong(copy, false, of_source, wrong) == 0);
    count_wrong(copy, true, of_source, wrong);
    for (unsigned b = 0; b < BLOCKS; b++) early += wrong[b] == 0, late += wrong[b] == THREADS;
    CHECK_MSG(early == BLOCKS / 2 && late == BLOCKS / 2, "copies were early in %zu blocks, late in %zu",
              early, late);
}

/* Lane l of each warp gets what lane l + 1 has. */
static void turn(void *const all[LANES]) {
    const uint32_t first = *(uint32_t *)all[0];
    for (unsigned i = 0; i + 1 < LANES; i++) *(uint32_t *)all[i] = *(uint32_t *)all[i + 1];
    *(uint32_t *)all[LANES - 1] = first;
}
static void meet(const void *given) {
    uint32_t mine = 100 + emulated_thread.x;
    emulated_meet(turn, &mine);
    emulated_meet(turn, &mine);
    leave(given, mine);
}
static uint32_t of_the_second_next(unsigned thread) {
    return 100 + thread / LANES * LANES + (thread + 2) % LANES;
}
TEST(lanes_meet) {
    size_t wrong[BLOCKS];
    CHECK(count_wrong(meet, false, of_the_second_next, wrong) == 0);
}

/* ---- faults that end the process ---- */
static void nothing(void *const all[LANES]) {
    (void)all;
}
static void meet_apart(const void *job) {
    (void)job;
    emulated_meet(emulated_thread.x == 5 ? nothing : turn, &(uint32_t){0});
}
static void end_early(const void *job) {
    (void)job;
    if (emulated_thread.x != 5) emulated_meet(nothing, NULL);
}
static void barrier_apart(const void *job) {
    (void)job;
    if (emulated_thread.x == 5) emulated_barrier();
    else emulated_meet(nothing, NULL);
}
static void beyond(const void *job) {
    (void)job;
    emulated_shared(word_at(THREADS * WORDS), 4);
}
static void across(const void *job) {
    (void)job;
    emulated_shared(word_at(1), 16);
}
static void copy_across(const void *job) {
    emulated_copy(word_at(0), ((const Job *)job)->source + 1);
}
static void never_waited(const void *job) {
    emulated_copy(word_at(emulated_thread.x * WORDS), ((const Job *)job)->source);
}
static uint32_t of_nothing(unsigned thread) {
    return thread;
}

TEST(what_cannot_go_on_ends_with_a_line) {
    static const struct {
        void (*run)(const void *job);
        const char *line;
    } faults[] = {{meet_apart, "different instructions"}, {end_early, "waits for lanes"},
                  {barrier_apart, "waits for lanes"},     {beyond, "beyond the ends"},
                  {across, "no multiple of the access"},  {copy_across, "no multiple of 16"},
                  {never_waited, "before its copies"}};
    for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++) {
        int ends[2], status = 0;
        char said[512] = "";
        if (pipe(ends) != 0) SKIP("no pipe");
        fflush(stdout);
        const pid_t child = fork();
        if (child == 0) {
            size_t wrong[BLOCKS];
            dup2(ends[1], STDOUT_FILENO);
            count_wrong(faults[i].run, true, of_nothing, wrong);
            _exit(0);
        }
        close(ends[1]);
        for (ssize_t got, at = 0; (got = read(ends[0], said + at, sizeof said - 1 - (size_t)at)) > 0;)
            at += got;
        close(ends[0]);
        waitpid(child, &status, 0);
        CHECK_MSG(WIFEXITED(status) && WEXITSTATUS(status) == 1 && strstr(said, faults[i].line),
                  "fault %zu: status %d, \"%s\"", i, status, said);
    }
}

TEST(half_precision) {
    size_t wrong = 0;
    for (unsigned h = 0; h < 0x7c00; h++) {
        const float x = half_value((uint16_t)h), next = half_value((uint16_t)(h + 1));
        wrong += half_bits(x) != h || half_bits(-x) != (h | 0x8000);
        if (h + 1 == 0x7c00) continue;
        const float middle = x + (next - x) / 2; /* exact; a tie goes to the even one */
        wrong += half_bits(middle) != h + (h & 1) || half_bits(nextafterf(middle, 0)) != h ||
                 half_bits(nextafterf(middle, next)) != h + 1;
    }
    CHECK(wrong == 0);
    CHECK(half_bits(1) == 0x3c00 && half_bits(-2) == 0xc000 && half_bits(65504) == 0x7bff);
    CHECK(half_bits(0x1p-14f) == 0x0400 && half_bits(0x1p-24f) == 1);
}

int main(int argc, char **argv) {
    test_start(argc, argv, "emulated");
    if (emulated_is_possible()) {
        RUN(a_missing_barrier_shows);
        RUN(a_missing_wait_shows);
        RUN(lanes_meet);
        RUN(what_cannot_go_on_ends_with_a_line);
    }
    RUN(half_precision);
    return test_finish();
}
