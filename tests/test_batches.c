/* test_batches.c - the order of training windows: each once an epoch, a function of seed, epoch and index
 * alone, uniform; targets one further; the same with and without reading ahead. */
#include "test.h"

#include "../data/batches.h"

#include <math.h>
#include <unistd.h>

static char folder[] = "/tmp/test_batches_XXXXXX";

/* ---- helpers ---- */

static Bpe *bpe;

/* A stream of `count` tokens in shards of `per_shard`; token i is (7 i + i / 256) mod 256. */
static uint32_t token_at(uint64_t i) {
    return (uint32_t)((7 * i + i / 256) % 256);
}

static int streams; /* made so far: the newest is stream<streams - 1>-*.bin */

static Shards *make_stream(size_t count, size_t per_shard) {
    char *name = xformat("stream%d", streams++), *pattern = xformat("%s/%s-*.bin", folder, name);
    Error err = {0};
    ShardWriter *writer = shard_writer_open(folder, name, bpe, per_shard, &err);
    for (size_t i = 0; writer && i < count; i++) {
        const uint32_t id = token_at(i);
        CHECK(shard_writer_append(writer, &id, 1, &err));
    }
    uint64_t tokens;
    CHECK_MSG(writer && shard_writer_close(writer, &tokens, &err), "%s", err.text);
    Shards *shards = shards_open(pattern, bpe, &err);
    CHECK_MSG(shards != NULL, "%s", err.text);
    if (!shards) abort();
    free(name);
    free(pattern);
    return shards;
}

static Batches *open_batches(Shards *shards, size_t T, uint64_t seed, bool shuffle) {
    Error err = {0};
    Batches *batches = batches_open(shards, T, seed, shuffle, &err);
    CHECK_MSG(batches != NULL, "%s", err.text);
    if (!batches) abort();
    return batches;
}

/* Rows first .. first + rows - 1 are the windows that batches_window names, targets one further. */
static void check_get(Batches *batches, uint64_t first, size_t rows, size_t T) {
    int32_t *inputs = (int32_t *)xmalloc(rows * T * sizeof *inputs);
    int32_t *targets = (int32_t *)xmalloc(rows * T * sizeof *targets);
    Error err = {0};
    const bool ok = batches_get(batches, first, rows, inputs, targets, &err);
    CHECK_MSG(ok, "%s", err.text);
    for (size_t row = 0; ok && row < rows; row++) {
        const uint64_t begin = batches_window(batches, first + row) * T;
        for (size_t t = 0; t < T; t++) {
            CHECK(inputs[row * T + t] == (int32_t)token_at(begin + t));
            CHECK(targets[row * T + t] == (int32_t)token_at(begin + t + 1));
        }
    }
    free(inputs);
    free(targets);
}

/* ---- tests ---- */

TEST(sizes) {
    enum { T = 16, B = 4 };
    static const struct {
        size_t tokens;
        uint64_t windows; /* 0: refused */
    } cases[] = {{1, 0},     {T, 0},         {T + 1, 1},         {2 * T, 1},        {2 * T + 1, 2},
                 {B * T, 3}, {B * T + 1, 4}, {B * T + T - 1, 4}, {B * T + T + 1, 5}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Shards *shards = make_stream(cases[i].tokens, 1000);
        Error err = {0};
        Batches *batches = batches_open(shards, T, 1, true, &err);
        CHECK_MSG((batches != NULL) == (cases[i].windows > 0), "%zu tokens", cases[i].tokens);
        if (batches) {
            CHECK(batches_windows(batches) == cases[i].windows);
            for (int step = 0; step < 5; step++) check_get(batches, (uint64_t)step * B, B, T);
        } else {
            char part[64];
            snprintf(part, sizeof part, "there are %zu tokens", cases[i].tokens);
            CHECK_MSG(strstr(err.text, part) && strstr(err.text, "needs 17"), "%s", err.text);
        }
        batches_close(batches);
        shards_close(shards);
    }
}

TEST(each_window_once_an_epoch) {
    static const size_t counts[] = {1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 255, 256, 257, 1000};
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
        const size_t W = counts[c];
        Shards *shards = make_stream(3 * W + 1, 2000);
        for (int shuffle = 0; shuffle < 2; shuffle++) {
            Batches *batches = open_batches(shards, 3, 42 + c, shuffle);
            CHECK(batches_windows(batches) == W);
            char *seen = (char *)xmalloc(W);
            for (uint64_t epoch = 0; epoch < 20; epoch++) {
                memset(seen, 0, W);
                for (uint64_t i = 0; i < W; i++) {
                    const uint64_t window = batches_window(batches, epoch * W + i);
                    CHECK(window < W && !seen[window]);
                    CHECK(shuffle || window == i);
                    if (window < W) seen[window] = 1;
                }
            }
            free(seen);
            batches_close(batches);
        }
        shards_close(shards);
    }
}

/* Every window is as likely as any other at every place, whatever W: counts over epochs and places stay
 * within 5.5 standard deviations of binomial ones (about one in 10^7 would not by chance, and there are
 * some thousands). Two following places are as unrelated. */
TEST(uniform) {
    static const size_t counts[] = {2, 3, 5, 12, 16, 17, 40};
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
        const size_t W = counts[c], epochs = 20000;
        Shards *shards = make_stream(W + 1, 2000);
        Batches *batches = open_batches(shards, 1, 1, true);
        double *at = (double *)xcalloc(W * W, sizeof *at), *pairs = (double *)xcalloc(W * W, sizeof *pairs);
        for (uint64_t epoch = 0; epoch < epochs; epoch++) {
            uint64_t before = 0;
            for (uint64_t i = 0; i < W; i++) {
                const uint64_t window = batches_window(batches, epoch * W + i);
                at[i * W + window]++;
                if (i == 1) pairs[before * W + window]++;
                before = window;
            }
        }
        for (size_t i = 0; i < W * W; i++) {
            const double p = 1 / (double)W, q = 1 / (double)(W * (W - 1)), n = (double)epochs;
            CHECK_MSG(fabs(at[i] - n * p) < 5.5 * sqrt(n * p * (1 - p)), "W %zu: window %zu at %zu: %g of %g",
                      W, i % W, i / W, at[i], n * p);
            if (i / W != i % W)
                CHECK_MSG(fabs(pairs[i] - n * q) < 5.5 * sqrt(n * q * (1 - q)) + 1,
                          "W %zu: pair %zu: %g of %g", W, i, pairs[i], n * q);
        }
        free(at);
        free(pairs);
        batches_close(batches);
        shards_close(shards);
    }
}

TEST(order_is_of_seed_and_epoch) {
    Shards *shards = make_stream(2001, 300);
    Batches *a = open_batches(shards, 2, 5, true), *b = open_batches(shards, 2, 5, true);
    Batches *other = open_batches(shards, 2, 6, true);
    int same_seed = 0, same_epoch = 0, in_place = 0;
    for (uint64_t i = 0; i < 1000; i++) {
        CHECK(batches_window(a, i) == batches_window(b, i));
        same_seed += batches_window(a, i) == batches_window(other, i);
        same_epoch += batches_window(a, i) == batches_window(a, 1000 + i);
        in_place += batches_window(a, i) == i;
    }
    /* Each is expected once, and is Poisson: above 10 once in 10^8. */
    CHECK_MSG(same_seed <= 10 && same_epoch <= 10 && in_place <= 10, "%d %d %d", same_seed, same_epoch,
              in_place);
    batches_close(a);
    batches_close(b);
    batches_close(other);
    shards_close(shards);
}

/* The same sequences for any number of ranks and rows at a time, with an epoch's end inside a step. */
TEST(split_over_ranks) {
    enum { T = 5, W = 7, BATCH = 6, STEPS = 9 };
    Shards *shards = make_stream(W * T + 3, 10);
    static int32_t expected[STEPS * BATCH * T], inputs[BATCH * T], targets[BATCH * T];
    Batches *batches = open_batches(shards, T, 3, true);
    CHECK(batches_windows(batches) == W);
    Error err = {0};
    for (int step = 0; step < STEPS; step++) {
        CHECK(batches_get(batches, (uint64_t)step * BATCH, BATCH, inputs, targets, &err));
        memcpy(expected + step * BATCH * T, inputs, sizeof inputs);
        check_get(batches, (uint64_t)step * BATCH, BATCH, T);
    }
    batches_close(batches);
    for (size_t ranks = 1; ranks <= 3; ranks++) {
        const size_t share = BATCH / ranks;
        for (size_t rank = 0; rank < ranks; rank++) {
            for (size_t micro = 1; micro <= share; micro++) { /* does not always divide the share */
                Batches *own = open_batches(shards, T, 3, true);
                batches_read_ahead(own, rank * share, share, BATCH);
                for (size_t step = 0; step < STEPS; step++) {
                    for (size_t at = 0; at < share; at += micro) {
                        const size_t g = step * BATCH + rank * share + at;
                        const size_t rows = micro < share - at ? micro : share - at;
                        CHECK(batches_get(own, g, rows, inputs, targets, &err));
                        CHECK(memcmp(inputs, expected + g * T, rows * T * sizeof *inputs) == 0);
                    }
                }
                batches_close(own);
            }
        }
    }
    shards_close(shards);
}

TEST(reading_ahead) {
    enum { T = 9, ROWS = 3 };
    Shards *shards = make_stream(5000, 777);
    Batches *batches = open_batches(shards, T, 8, true);
    batches_read_ahead(batches, 30, ROWS, 12);
    uint64_t next = 30;
    for (int i = 0; i < 200; i++) {
        /* Calls out of order, and of another size, between the expected ones. */
        if (i % 7 == 3) check_get(batches, 5, ROWS, T);
        if (i % 11 == 5) check_get(batches, next, ROWS + 1, T);
        check_get(batches, next, ROWS, T);
        next += 12;
    }
    batches_read_ahead(batches, 0, 1, 1); /* anew, in the middle of things */
    for (uint64_t g = 0; g < 20; g++) check_get(batches, g, 1, T);
    batches_read_ahead(batches, 100, ROWS, 3);
    batches_close(batches); /* while the thread waits or reads */
    shards_close(shards);
}

/* The last file loses its end after it was opened: whoever reads that is told, others are not. */
TEST(errors_come_through) {
    enum { T = 10 };
    Shards *shards = make_stream(2001, 500);
    char *last = xformat("%s/stream%d-00003.bin", folder, streams - 1);
    CHECK(truncate(last, 1024 + 500) == 0);
    free(last);
    int32_t inputs[T], targets[T];
    for (int ahead = 0; ahead < 2; ahead++) {
        Batches *batches = open_batches(shards, T, 8, false);
        if (ahead) batches_read_ahead(batches, 145, 1, 1);
        for (uint64_t g = 145; g < 155; g++) {
            Error err = {0};
            const bool ok = batches_get(batches, g, 1, inputs, targets, &err);
            CHECK_MSG(ok == (g < 149), "sequence %d: %s", (int)g, err.text);
            CHECK(ok || strstr(err.text, "changed or replaced while in use"));
        }
        check_get(batches, 3, 1, T);
        batches_close(batches);
    }
    shards_close(shards);
}

int main(int argc, char **argv) {
    test_start(argc, argv, "batches");
    if (!mkdtemp(folder)) return 1;
    Error err = {0};
    bpe = bpe_from_merges_text((const uint8_t *)"t h\n", 4, "test", &err);
    if (!bpe) return 1;
    RUN(sizes);
    RUN(each_window_once_an_epoch);
    RUN(uniform);
    RUN(order_is_of_seed_and_epoch);
    RUN(split_over_ranks);
    RUN(reading_ahead);
    RUN(errors_come_through);
    bpe_free(bpe);
    if (!folder_remove(folder, &err)) printf("  %s\n", err.text);
    return test_finish();
}
