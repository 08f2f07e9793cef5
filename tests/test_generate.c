/* test_generate.c - sampling: exact about cuts, ties and odd logits, and with the right frequencies; writing
 * text: a plain forward pass over the tokens that the sliding rule says, the same for any batch. */
#include "test.h"

#include "../model/generate.h"

#include <math.h>
#include <signal.h>

static Stream *stream; /* of ops_cpu, for all tests */

/* ---- one token ---- */

static const double largest_uniform = 1 - 0x1p-53;

static SampleSettings settings_of(float temperature, int top_k, float top_p) {
    return (SampleSettings){.temperature = temperature, .top_k = top_k, .top_p = top_p, .seed = 1};
}

/* Whether the same token comes for numbers all over [0, 1). */
static bool always(const float *logits, size_t V, SampleSettings settings, uint32_t token) {
    for (int i = 0; i <= 100; i++)
        if (sample_token(logits, V, &settings, i < 100 ? i / 100.0 : largest_uniform) != token) return false;
    return true;
}

TEST(certain_tokens) {
    static const float logits[] = {-3, 2, 7, 7, -100, 7, 100, 100, 1};
    static const float extreme[] = {-3.4e38f, -100, 3.4e38f, 100, 3.3e38f};
    CHECK(always(logits, 9, settings_of(0, 0, 1), 6));      /* the likeliest, of two the lower */
    CHECK(always(logits, 6, settings_of(0, 5, 0.9f), 2));   /* without the cuts */
    CHECK(always(logits, 9, settings_of(1, 1, 1), 6));      /* top_k 1 */
    CHECK(always(logits, 9, settings_of(50, 1, 0.5f), 6));  /* at any temperature */
    CHECK(always(logits, 9, settings_of(50, 0, 1e-6f), 6)); /* top_p tiny */
    CHECK(always(logits, 9, settings_of(50, 0, 0), 6));
    CHECK(always(logits, 9, settings_of(50, 4, 1e-30f), 6));
    CHECK(always(logits, 7, settings_of(1, 0, 1), 6));  /* e^-93 and less of the rest */
    CHECK(always(extreme, 5, settings_of(1, 0, 1), 2)); /* exp would overflow */
    CHECK(always(extreme, 5, settings_of(1e-30f, 3, 0.9f), 2));
    CHECK(always(logits, 1, settings_of(1, 0, 1), 0));
    CHECK(always(logits, 9, settings_of(-1, 0, 1), 6)); /* no temperature at all is temperature 0 */
    CHECK(always(logits, 9, settings_of(NAN, 0, 1), 6));
}

TEST(logits_that_are_no_numbers) {
    static const float odd[] = {NAN, -INFINITY, 1, NAN, 5, -INFINITY};
    static const float none[] = {NAN, -INFINITY, NAN};
    static const float infinite[] = {1, INFINITY, NAN, 3, -INFINITY};
    const SampleSettings all[] = {settings_of(0, 0, 1), settings_of(1e6f, 0, 1), settings_of(1e6f, 4, 1),
                                  settings_of(1e6f, 0, 0.99f), settings_of(1e6f, 6, 0.99f)};
    for (size_t s = 0; s < sizeof all / sizeof all[0]; s++) {
        bool found[6] = {false};
        for (int i = 0; i <= 1000; i++)
            found[sample_token(odd, 6, &all[s], i < 1000 ? i / 1000.0 : largest_uniform)] = true;
        CHECK(!found[0] && !found[1] && !found[3] && !found[5] && found[4]);
        CHECK(found[2] == (s > 0));
        CHECK(always(none, 3, all[s], 0));
        CHECK(always(infinite, 5, all[s], 1));
    }
}

/* The definition, at its plainest: sort, cut, softmax. probability (V). */
typedef struct Ranked {
    float logit;
    uint32_t token;
} Ranked;

static int compare_ranked(const void *a, const void *b) {
    const Ranked *x = a, *y = b;
    if (x->logit != y->logit) return x->logit > y->logit ? -1 : 1;
    return (x->token > y->token) - (x->token < y->token);
}

static void reference(const float *logits, size_t V, SampleSettings settings, double *probability) {
    Ranked *ranked = xmalloc(V * sizeof *ranked);
    for (size_t i = 0; i < V; i++) ranked[i] = (Ranked){logits[i], (uint32_t)i}, probability[i] = 0;
    qsort(ranked, V, sizeof *ranked, compare_ranked);
    size_t count = settings.top_k > 0 && (size_t)settings.top_k < V ? (size_t)settings.top_k : V;
    double total = 0, kept = 0;
    for (size_t i = 0; i < count; i++)
        total += exp(((double)ranked[i].logit - (double)ranked[0].logit) / (double)settings.temperature);
    for (size_t i = 0; i < count; i++) {
        const double weight = exp(((double)ranked[i].logit - (double)ranked[0].logit) /
                                  (double)settings.temperature);
        probability[ranked[i].token] = weight;
        kept += weight;
        if (settings.top_p < 1 && (float)(kept / total) >= settings.top_p) break;
    }
    for (size_t i = 0; i < V; i++) probability[i] /= kept;
    free(ranked);
}

/* Each token has one stretch of [0, 1) as long as its probability. Of a grid of G points spread evenly, a
 * stretch of length p holds between G p - 1 and G p + 1: counts are exact to one, and a token that was cut
 * has none. Logits are few different ones, so that ties fall on the cuts. */
TEST(cuts_are_exact) {
    enum { V = 12, G = 2000 };
    static const float top_ps[] = {1, 0.1f, 0.25f, 0.3f, 0.5f, 0.6f, 0.75f, 0.9f, 0.999f};
    static const float temperatures[] = {0.5f, 1, 2};
    Rng rng = rng_start(1, 1);
    for (int round = 0; round < 300; round++) {
        float logits[V];
        const uint64_t levels = 1 + rng_below(&rng, 5);
        for (size_t i = 0; i < V; i++) logits[i] = (float)rng_below(&rng, levels) * 0.6931472f;
        const SampleSettings settings = settings_of(temperatures[rng_below(&rng, 3)],
                                                    (int)rng_below(&rng, V + 2), top_ps[rng_below(&rng, 9)]);
        double probability[V];
        size_t count[V] = {0};
        reference(logits, V, settings, probability);
        for (int i = 0; i < G; i++) count[sample_token(logits, V, &settings, (i + 0.5) / G)]++;
        for (size_t i = 0; i < V; i++) {
            const double expected = probability[i] * G;
            CHECK_MSG(probability[i] > 0 ? fabs((double)count[i] - expected) <= 1 + 1e-6 : count[i] == 0,
                      "round %d (top_k %d, top_p %g): token %zu came %zu times, expected %.2f", round,
                      settings.top_k, (double)settings.top_p, i, count[i], expected);
        }
    }
}

/* Cuts are exact where they fall on equal tokens: ten of them, top_p 0.1 to 0.9. */
TEST(equal_tokens_are_cut_by_id) {
    static const float logits[10];
    static const float shares[] = {0.1f, 0.2f, 0.3f, 0.4f, 0.5f, 0.6f, 0.7f, 0.8f, 0.9f};
    for (size_t s = 0; s < 9; s++) {
        const SampleSettings settings = settings_of(1, 0, shares[s]);
        uint32_t largest = 0;
        for (int i = 0; i < 1000; i++) {
            const uint32_t token = sample_token(logits, 10, &settings, i / 1000.0);
            if (token > largest) largest = token;
        }
        CHECK_MSG(largest == s, "top_p %g keeps %u", (double)shares[s], largest + 1);
    }
}

/* A bound on chi-square with k degrees of freedom that chance passes once in 10^6: the cube root of chi2 / k
 * is close to normal with mean 1 - 2/(9k) and variance 2/(9k) (Wilson and Hilferty 1931), and a normal number
 * is above 4.75 standard deviations once in 10^6. */
static double chi_square_bound(double k) {
    const double variance = 2 / (9 * k), root = 1 - variance + 4.75 * sqrt(variance);
    return k * root * root * root;
}

/* Cells with less than 5 expected are put together, as the approximation needs. */
static void check_frequencies(const size_t *count, const double *probability, size_t V, size_t draws) {
    double chi_square = 0, rare_expected = 0, rare_count = 0;
    size_t cells = 0;
    for (size_t i = 0; i < V; i++) {
        const double expected = probability[i] * (double)draws, seen = (double)count[i];
        if (expected < 5) {
            rare_expected += expected, rare_count += seen;
        } else {
            chi_square += (seen - expected) * (seen - expected) / expected;
            cells++;
        }
    }
    if (rare_expected >= 5) {
        chi_square += (rare_count - rare_expected) * (rare_count - rare_expected) / rare_expected;
        cells++;
    }
    CHECK(cells > 2);
    const double bound = chi_square_bound((double)cells - 1);
    CHECK_MSG(chi_square < bound, "chi-square %.1f over %zu cells, bound %.1f", chi_square, cells, bound);
}

TEST(frequencies) {
    enum { V = 200, DRAWS = 40000 };
    const SampleSettings all[] = {settings_of(1, 0, 1), settings_of(0.7f, 0, 1), settings_of(1.5f, 40, 1),
                                  settings_of(1, 0, 0.8f), settings_of(0.9f, 60, 0.9f)};
    float logits[V];
    double probability[V];
    Rng rng = rng_start(2, 2);
    for (size_t i = 0; i < V; i++) logits[i] = (float)(2 * rng_normal(&rng));
    for (size_t s = 0; s < sizeof all / sizeof all[0]; s++) {
        size_t count[V] = {0};
        reference(logits, V, all[s], probability);
        for (int i = 0; i < DRAWS; i++) count[sample_token(logits, V, &all[s], rng_uniform(&rng))]++;
        check_frequencies(count, probability, V, DRAWS);
    }
}

/* Over many blocks of tokens, of which some hold no weight: each number in [0, 1) falls between the sums of the
 * probabilities before and up to its token. Weights are floats, each with two roundings of its own (the argument
 * of e^x, at most 40 here, and its result), and so are the sums of a block: 64 * 2^-24 of the total at most. */
TEST(large_vocabularies) {
    enum { MOST = 50257 };
    const double bound = 64 * 0x1p-24;
    float *logits = xmalloc(MOST * sizeof *logits);
    double *below = xmalloc((MOST + 1) * sizeof *below);
    Rng rng = rng_start(7, 7);
    for (size_t V = 255; V <= MOST; V = V == MOST ? V + 1 : V * 2 < MOST ? V * 2 + 1 : MOST) {
        for (size_t i = 0; i < V; i++) logits[i] = (float)(3 * rng_normal(&rng));
        for (size_t i = 300; i < V && i < 900; i++) logits[i] = i % 2 ? -INFINITY : NAN;
        const SampleSettings settings = settings_of(0.8f, 0, 1);
        double most = -INFINITY;
        for (size_t i = 0; i < V; i++)
            if (logits[i] > most) most = logits[i];
        below[0] = 0;
        for (size_t i = 0; i < V; i++)
            below[i + 1] = below[i] + (logits[i] > -INFINITY ? exp((logits[i] - most) / (double)0.8f) : 0);
        for (int i = 0; i <= 500; i++) {
            const double uniform = i < 500 ? (i + rng_uniform(&rng)) / 500 : largest_uniform;
            const uint32_t token = sample_token(logits, V, &settings, uniform);
            const double low = below[token] / below[V], high = below[token + 1] / below[V];
            CHECK_MSG(token < V && high > low && low - bound <= uniform && uniform <= high + bound,
                      "V %zu: %.9f gave token %u of %.9f to %.9f", V, uniform, token, low, high);
        }
    }
    free(below);
    free(logits);
}

/* ---- text ---- */

enum { MAX_B = 4, MAX_TEXT = 64 };

static Gpt *model_new(Position position, size_t ctx) {
    const GptConfig config = {
        .layers = 2, .heads = 2, .channels = 16, .ctx = ctx, .vocab = 61, .position = position};
    const AttentionShape shape = {.B = MAX_B, .T = ctx, .H = 2, .D = 8};
    Error err;
    const GptSetup setup = {.config = config,
                            .ops = &ops_cpu,
                            .attention = attention_find("naive", "cpu", &shape, &err),
                            .stream = stream,
                            .B = MAX_B,
                            .cache_B = MAX_B};
    Gpt *gpt = gpt_new(&setup, &err);
    if (!gpt) printf("no model: %s\n", err.text), exit(1);
    /* Weights so large that every token of the window moves the logits. */
    size_t count;
    const Parameter *table = gpt_table(gpt, &count);
    Rng rng = rng_start(5, ctx);
    for (size_t p = 0; p < count; p++) {
        float *host = xmalloc(table[p].size * sizeof *host);
        const double spread = table[p].dims == 2 ? 0.5 : 0.1;
        for (size_t i = 0; i < table[p].size; i++)
            host[i] = (float)(spread * rng_normal(&rng)) + (table[p].dims == 1 ? table[p].constant : 0);
        gpt_set(gpt, GPT_WEIGHTS, p, host);
        free(host);
    }
    return gpt;
}

/* What generate writes. */
typedef struct Texts {
    size_t length[MAX_B];
    uint32_t token[MAX_B][MAX_TEXT];
    size_t stop_after; /* tokens after which a stop is asked for; 0: never */
    size_t tokens;
} Texts;

static void collect(void *user, size_t sequence, uint32_t token) {
    Texts *texts = user;
    if (texts->length[sequence] < MAX_TEXT) texts->token[sequence][texts->length[sequence]++] = token;
    if (++texts->tokens == texts->stop_after) raise(SIGUSR1);
}

static const uint32_t no_end = UINT32_MAX; /* no token: texts go on to their full length */

/* Holds one text to the rule of generate.h, written here a second time: a window that grows to ctx tokens,
 * then begins again with the newest ctx / 2. At temperature 0 each token is the likeliest after a plain
 * forward pass over its window. The two passes round differently: sums of up to 64 terms in some ten stages
 * of two layers, 640 u = 4e-5 of the logits' size at most; twice that is allowed. Returns in how many places
 * a window one shorter would have given another token. */
static size_t check_windows(Gpt *gpt, const uint32_t *prompt, size_t prompt_tokens, const uint32_t *text,
                            size_t text_tokens) {
    const GptConfig *config = &gpt_setup(gpt)->config;
    const size_t T = config->ctx, V = config->vocab, half = T > 1 ? T / 2 : 1;
    uint32_t *all = xmalloc((prompt_tokens + text_tokens) * sizeof *all);
    memcpy(all, prompt, prompt_tokens * sizeof *all);
    memcpy(all + prompt_tokens, text, text_tokens * sizeof *all);
    int32_t *inputs = xcalloc(2 * T, sizeof *inputs);
    float *logits = xmalloc(2 * T * V * sizeof *logits);
    size_t window = prompt_tokens, told = 0;
    if (window > T - 1) window = T > 1 ? T - 1 : 1;
    for (size_t k = 0; k < text_tokens; k++) {
        const size_t end = prompt_tokens + k;
        /* The second sequence: one token less, from the next position. */
        for (size_t t = 0; t < window; t++) inputs[t] = (int32_t)all[end - window + t];
        for (size_t t = 0; t + 1 < window; t++) inputs[T + t] = (int32_t)all[end - window + 1 + t];
        gpt_logits(gpt, inputs, 2, logits);
        const float *last = logits + (window - 1) * V;
        size_t likeliest = 0, other = 0;
        float size = 0;
        const float *shorter = logits + (T + (window > 1 ? window - 2 : 0)) * V;
        for (size_t v = 0; v < V; v++) {
            size = fmaxf(size, fabsf(last[v]));
            if (last[v] > last[likeliest]) likeliest = v;
            if (shorter[v] > shorter[other]) other = v;
        }
        CHECK_MSG(last[text[k]] >= last[likeliest] - 8e-5f * size,
                  "ctx %zu, token %zu (window %zu): %u with %g, likeliest %zu with %g", T, k, window, text[k],
                  (double)last[text[k]], likeliest, (double)last[likeliest]);
        told += other != likeliest;
        window = window == T ? half : window + 1;
    }
    free(logits);
    free(inputs);
    free(all);
    return told;
}

TEST(windows_slide_by_the_rule) {
    static const size_t ctxs[] = {1, 2, 7, 8};
    static const size_t prompts[] = {1, 5, 7, 8, 20};
    uint32_t prompt[20];
    Rng rng = rng_start(3, 3);
    size_t told = 0;
    for (size_t p = 0; p < 2; p++) {
        for (size_t c = 0; c < sizeof ctxs / sizeof ctxs[0]; c++) {
            Gpt *gpt = model_new(p ? POSITION_LEARNED : POSITION_ROTARY, ctxs[c]);
            for (size_t k = 0; k < sizeof prompts / sizeof prompts[0]; k++) {
                for (size_t i = 0; i < prompts[k]; i++) prompt[i] = (uint32_t)rng_below(&rng, 61);
                const SampleSettings settings = settings_of(0, 0, 1);
                Texts texts = {0};
                CHECK(generate(gpt, prompt, prompts[k], 2, 0, 3 * ctxs[c] + 2, no_end, &settings, collect,
                               &texts));
                CHECK(texts.length[0] == 3 * ctxs[c] + 2 && texts.length[1] == texts.length[0]);
                CHECK(memcmp(texts.token[0], texts.token[1], texts.length[0] * sizeof(uint32_t)) == 0);
                told += check_windows(gpt, prompt, prompts[k], texts.token[0], texts.length[0]);
            }
            gpt_free(gpt);
        }
    }
    CHECK_MSG(told > 100, "only %zu tokens could tell a window from one that is shorter", told);
}

TEST(same_text_in_any_batch) {
    static const uint32_t prompt[] = {3, 1, 4};
    for (size_t p = 0; p < 2; p++) {
        Gpt *gpt = model_new(p ? POSITION_LEARNED : POSITION_ROTARY, 16);
        SampleSettings settings = settings_of(1, 30, 0.95f);
        Texts together = {0}, again = {0}, pair = {0}, reseeded = {0};
        CHECK(generate(gpt, prompt, 3, 4, 10, 40, no_end, &settings, collect, &together));
        CHECK(generate(gpt, prompt, 3, 4, 10, 40, no_end, &settings, collect, &again));
        CHECK(memcmp(&together, &again, sizeof together) == 0);
        CHECK(generate(gpt, prompt, 3, 2, 11, 40, no_end, &settings, collect, &pair));
        CHECK(memcmp(pair.token[0], together.token[1], sizeof pair.token[0]) == 0);
        CHECK(memcmp(pair.token[1], together.token[2], sizeof pair.token[0]) == 0);
        for (size_t i = 0; i < 4; i++) {
            Texts alone = {0};
            CHECK(generate(gpt, prompt, 3, 1, 10 + i, 40, no_end, &settings, collect, &alone));
            CHECK(memcmp(alone.token[0], together.token[i], sizeof alone.token[0]) == 0);
            for (size_t k = 0; k < i; k++)
                CHECK(memcmp(together.token[k], together.token[i], sizeof alone.token[0]) != 0);
        }
        settings.seed++;
        CHECK(generate(gpt, prompt, 3, 4, 10, 40, no_end, &settings, collect, &reseeded));
        for (size_t i = 0; i < 4; i++)
            CHECK(memcmp(reseeded.token[i], together.token[i], sizeof together.token[i]) != 0);
        gpt_free(gpt);
    }
}

/* Each text goes on as it would without an end, up to the end token, which is its last. */
TEST(texts_end) {
    static const uint32_t prompt[] = {7};
    Gpt *gpt = model_new(POSITION_ROTARY, 8);
    const SampleSettings settings = settings_of(1.5f, 0, 1);
    size_t ended = 0;
    for (uint32_t end = 0; end < 8; end++) {
        Texts whole = {0}, cut = {0};
        CHECK(generate(gpt, prompt, 1, 4, 0, 50, no_end, &settings, collect, &whole));
        CHECK(generate(gpt, prompt, 1, 4, 0, 50, end, &settings, collect, &cut));
        for (size_t i = 0; i < 4; i++) {
            size_t expected = 0;
            while (expected < 50 && whole.token[i][expected] != end) expected++;
            ended += expected < 50;
            if (expected < 50) expected++;
            CHECK(whole.length[i] == 50 && cut.length[i] == expected);
            CHECK(memcmp(cut.token[i], whole.token[i], expected * sizeof(uint32_t)) == 0);
        }
    }
    CHECK(ended > 4);
    Texts none = {0};
    CHECK(generate(gpt, prompt, 1, 4, 0, 0, no_end, &settings, collect, &none) && none.tokens == 0);
    gpt_free(gpt);
}

/* Over many sequences, first tokens come as often as the softmax of a plain forward pass says. */
TEST(sequences_have_the_right_frequencies) {
    enum { CALLS = 500, T = 8, V = 61 };
    static const uint32_t prompt[] = {5, 9};
    Gpt *gpt = model_new(POSITION_ROTARY, T);
    const SampleSettings settings = settings_of(2, 0, 1);
    size_t count[V] = {0};
    for (uint64_t call = 0; call < CALLS; call++) {
        Texts texts = {0};
        CHECK(generate(gpt, prompt, 2, MAX_B, call * MAX_B, 1, no_end, &settings, collect, &texts));
        for (size_t i = 0; i < MAX_B; i++) count[texts.token[i][0]]++;
    }
    static const int32_t inputs[T] = {5, 9};
    static float logits[T * V];
    double probability[V];
    gpt_logits(gpt, inputs, 1, logits);
    reference(logits + V, V, settings, probability);
    check_frequencies(count, probability, V, CALLS * MAX_B);
    gpt_free(gpt);
}

/* With all weights 0 all logits are equal, and tokens show the random numbers of their places: neighbours,
 * in a text and between texts, are independent. Pairs of quarters of the vocabulary are counted. */
TEST(places_have_independent_numbers) {
    enum { CALLS = 50, LENGTH = 40, V = 61 };
    static const uint32_t prompt[] = {0};
    Gpt *gpt = model_new(POSITION_ROTARY, 8);
    size_t tensors;
    const Parameter *table = gpt_table(gpt, &tensors);
    for (size_t p = 0; p < tensors; p++) {
        float *zeros = xcalloc(table[p].size, sizeof *zeros);
        gpt_set(gpt, GPT_WEIGHTS, p, zeros);
        free(zeros);
    }
    double quarter[4] = {0}, probability[16];
    for (size_t v = 0; v < V; v++) quarter[v / 16] += 1.0 / V;
    for (size_t i = 0; i < 16; i++) probability[i] = quarter[i / 4] * quarter[i % 4];
    const SampleSettings settings = settings_of(1, 0, 1);
    size_t in_text[16] = {0}, between[16] = {0};
    for (uint64_t call = 0; call < CALLS; call++) {
        Texts texts = {0};
        CHECK(generate(gpt, prompt, 1, 2, call * 2, LENGTH, no_end, &settings, collect, &texts));
        for (size_t t = 0; t < LENGTH; t++) {
            const uint32_t first = texts.token[0][t] / 16, second = texts.token[1][t] / 16;
            between[4 * first + second]++;
            if (t % 2) in_text[4 * (texts.token[0][t - 1] / 16) + first]++;
        }
    }
    check_frequencies(between, probability, 16, CALLS * LENGTH);
    check_frequencies(in_text, probability, 16, CALLS * LENGTH / 2);
    gpt_free(gpt);
}

/* The last test: a stop that was asked for stays asked for. */
TEST(stops_when_asked) {
    static const uint32_t prompt[] = {1};
    Gpt *gpt = model_new(POSITION_ROTARY, 8);
    const SampleSettings settings = settings_of(1, 0, 1);
    signals_install();
    Texts texts = {.stop_after = 6};
    CHECK(!generate(gpt, prompt, 1, 4, 0, 50, no_end, &settings, collect, &texts));
    CHECK_MSG(texts.tokens == 8, "%zu tokens", texts.tokens); /* the round of four under way is finished */
    gpt_free(gpt);
}

int main(int argc, char **argv) {
    test_start(argc, argv, "generate");
    Error err;
    stream = ops_cpu.open(0, 1, &err);
    if (!stream) {
        printf("%s\n", err.text);
        return 1;
    }
    RUN(certain_tokens);
    RUN(logits_that_are_no_numbers);
    RUN(cuts_are_exact);
    RUN(equal_tokens_are_cut_by_id);
    RUN(frequencies);
    RUN(large_vocabularies);
    RUN(windows_slide_by_the_rule);
    RUN(same_text_in_any_batch);
    RUN(texts_end);
    RUN(sequences_have_the_right_frequencies);
    RUN(places_have_independent_numbers);
    RUN(stops_when_asked);
    ops_cpu.close(stream);
    return test_finish();
}
