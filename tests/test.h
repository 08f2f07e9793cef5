/* test.h - the whole of the test harness. A test program defines tests with TEST(name) { ... }, lists
 * them in main, and ends with `return test_finish();`, which prints "name: N passed, N failed, N skipped".
 *
 *     TEST(adds_up) { CHECK(1 + 1 == 2); CHECK_MSG(x < 3, "x is %d", x); }
 *     int main(int argc, char **argv) { test_start(argc, argv, "arithmetic"); RUN(adds_up); return test_finish(); }
 *
 * With an argument, only tests whose name contains it are run. A failed check is printed with file and
 * line, and the test goes on; SKIP("reason") ends a test as skipped. */
#ifndef TEST_H
#define TEST_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct TestState {
    const char *suite, *only, *name, *skipped;
    int passed, failed, skips, bad;
} TestState;
static TestState test_state;

#define TEST(test_name) static void test_##test_name(void)
#define CHECK(condition) CHECK_MSG(condition, "%s", #condition)
#define CHECK_MSG(condition, ...)                                                \
    do {                                                                         \
        if (!(condition)) {                                                      \
            test_state.bad++;                                                    \
            if (test_state.bad <= 10) {                                          \
                printf("  %s:%d: in %s: ", __FILE__, __LINE__, test_state.name); \
                printf(__VA_ARGS__);                                             \
                printf("\n");                                                    \
            }                                                                    \
        }                                                                        \
    } while (0)
#define SKIP(...)                                  \
    do {                                           \
        printf("  skipped %s: ", test_state.name); \
        printf(__VA_ARGS__);                       \
        printf("\n");                              \
        test_state.skipped = "yes";                \
        return;                                    \
    } while (0)
#define RUN(test_name) test_run(#test_name, test_##test_name)

static inline void test_start(int argc, char **argv, const char *suite) {
    test_state.suite = suite;
    test_state.only = argc > 1 ? argv[1] : NULL;
    setvbuf(stdout, NULL, _IOLBF, 0);
}

static inline void test_run(const char *name, void (*function)(void)) {
    if (test_state.only && !strstr(name, test_state.only)) return;
    test_state.name = name, test_state.bad = 0, test_state.skipped = NULL;
    function();
    if (test_state.bad) {
        test_state.failed++;
        printf("  FAILED %s (%d checks)\n", name, test_state.bad);
    } else if (test_state.skipped) {
        test_state.skips++;
    } else {
        test_state.passed++;
    }
}

static inline int test_finish(void) {
    printf("%s: %d passed, %d failed, %d skipped\n", test_state.suite, test_state.passed, test_state.failed,
           test_state.skips);
    return test_state.failed != 0;
}

#endif
