/* bench_tokenizer.c - how fast the tokenizer splits, encodes, decodes and trains, as a short table.
 *
 *     bench_tokenizer [FILE] [--threads N] [--mb N] [--merges FILE]
 *
 * FILE (default ../shared/data/tinystories/train.txt) is repeated until it has --mb megabytes (default 57);
 * --merges takes a tokenizer from a file (GPT-2's, say) instead of one trained on FILE. Each figure is the
 * best of three runs, in this process, with the text in memory; training counts the reading too. MB = 10^6
 * bytes. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "../common.h"
#include "../tokenizer/bpe.h"
#include "../tokenizer/pretokenize.h"

enum { RUNS = 3, CACHE_WORDS = 1 << 16, PIECE = 1 << 20, RUN_BYTES = 1000000 };

static void print_rate(const char *what, size_t bytes, double seconds) {
    printf("%-34s %8.1f MB/s\n", what, (double)bytes / seconds * 1e-6);
}

static double split(const uint8_t *text, size_t size) {
    const double start = seconds_now();
    for (size_t at = 0; at < size;) at += pretokenize_next(text + at, size - at, false);
    return seconds_now() - start;
}

/* One thread's part of the text. `tokens` says how many there were. */
typedef struct Job {
    const Bpe *bpe;
    const uint8_t *text;
    size_t size, total, cache_words, tokens; /* text of size bytes, repeated to total */
} Job;

static void *encode(void *argument) {
    Job *job = argument;
    BpeEncoder *encoder = bpe_encoder_new(job->bpe, job->cache_words);
    Tokens tokens = {0};
    job->tokens = 0;
    for (size_t done = 0; done < job->total;) {
        const size_t at = done % job->size;
        size_t take = job->size - at < PIECE ? job->size - at : PIECE;
        if (take > job->total - done) take = job->total - done;
        bpe_encoder_feed(encoder, job->text + at, take, &tokens);
        job->tokens += tokens.count;
        tokens.count = 0; /* as a caller does that writes them away */
        done += take;
    }
    bpe_encoder_end(encoder, &tokens);
    job->tokens += tokens.count;
    tokens_free(&tokens);
    bpe_encoder_free(encoder);
    return NULL;
}

/* Seconds that `threads` threads take to encode `job->total` bytes each. */
static double encode_with(const Job *job, int threads) {
    Job jobs[256];
    pthread_t ids[256];
    const double start = seconds_now();
    for (int i = 0; i < threads; i++) jobs[i] = *job;
    for (int i = 1; i < threads; i++) {
        if (pthread_create(&ids[i], NULL, encode, &jobs[i]) != 0) {
            fprintf(stderr, "bench_tokenizer: cannot start thread %d; try fewer --threads\n", i + 1);
            exit(EXIT_FAILED);
        }
    }
    encode(&jobs[0]);
    for (int i = 1; i < threads; i++) pthread_join(ids[i], NULL);
    return seconds_now() - start;
}

static double best_encode(const Job *job, int threads) {
    double best = 1e30;
    for (int run = 0; run < RUNS; run++) {
        const double seconds = encode_with(job, threads);
        if (seconds < best) best = seconds;
    }
    return best;
}

static Bpe *train(const char *path, int threads, uint32_t vocab, double *seconds) {
    Error err;
    const double start = seconds_now();
    Buffer text = {0};
    BpeTrainer *trainer = bpe_trainer_new(threads);
    Bpe *bpe = NULL;
    if (file_read(path, SIZE_MAX / 2, &text, &err)) {
        bpe_trainer_feed(trainer, text.data, text.size);
        bpe = bpe_trainer_train(trainer, vocab, &err);
    }
    bpe_trainer_free(trainer);
    buffer_free(&text);
    *seconds = seconds_now() - start;
    if (!bpe) {
        fprintf(stderr, "bench_tokenizer: %s\n", err.text);
        exit(EXIT_FAILED);
    }
    return bpe;
}

static void bench_training(const char *path, int threads, uint32_t merges) {
    double best = 1e30;
    uint32_t got = 0;
    for (int run = 0; run < RUNS; run++) {
        double seconds;
        Bpe *bpe = train(path, threads, merges + BPE_MIN_VOCAB, &seconds);
        got = bpe_vocab_size(bpe) - BPE_MIN_VOCAB;
        bpe_free(bpe);
        if (seconds < best) best = seconds;
    }
    char what[64];
    snprintf(what, sizeof(what), "train %u merges, %d thread%s", got, threads, threads == 1 ? "" : "s");
    printf("%-34s %8.1f ms\n", what, best * 1e3);
}

static void bench_run(const Bpe *bpe, const char *what, char letter) {
    uint8_t *text = xmalloc(RUN_BYTES);
    Rng rng = rng_start(1, 1);
    for (size_t i = 0; i < RUN_BYTES; i++)
        text[i] = letter ? (uint8_t)letter : (uint8_t)('a' + rng_below(&rng, 26));
    double best = 1e30;
    for (int run = 0; run < RUNS; run++) {
        BpeEncoder *encoder = bpe_encoder_new(bpe, 0);
        Tokens tokens = {0};
        const double start = seconds_now();
        bpe_encode(encoder, text, RUN_BYTES, &tokens);
        const double seconds = seconds_now() - start;
        if (seconds < best) best = seconds;
        tokens_free(&tokens);
        bpe_encoder_free(encoder);
    }
    printf("encode a million of %-14s %8.1f ms\n", what, best * 1e3);
    free(text);
}

static void bench_decoding(const Bpe *bpe, const Buffer *text) {
    BpeEncoder *encoder = bpe_encoder_new(bpe, CACHE_WORDS);
    Tokens tokens = {0};
    bpe_encode(encoder, text->data, text->size, &tokens);
    double best = 1e30;
    Buffer out = {0};
    Error err;
    for (int run = 0; run < RUNS; run++) {
        out.size = 0;
        const double start = seconds_now();
        if (!bpe_decode(bpe, tokens.ids, tokens.count, &out, &err)) exit(EXIT_FAILED);
        const double seconds = seconds_now() - start;
        if (seconds < best) best = seconds;
    }
    print_rate("decode", text->size, best);
    buffer_free(&out);
    tokens_free(&tokens);
    bpe_encoder_free(encoder);
}

int main(int argc, char **argv) {
    const char *path = "../shared/data/tinystories/train.txt", *merges = NULL;
    int threads = 2;
    size_t megabytes = 57;
    for (int i = 1; i < argc; i++) {
        const bool value = i + 1 < argc;
        if (strcmp(argv[i], "--threads") == 0 && value) threads = atoi(argv[++i]);
        else if (strcmp(argv[i], "--mb") == 0 && value) megabytes = strtoull(argv[++i], NULL, 10);
        else if (strcmp(argv[i], "--merges") == 0 && value) merges = argv[++i];
        else path = argv[i];
    }
    if (threads < 1 || threads > 256 || megabytes < 1) {
        fprintf(stderr, "bench_tokenizer: expected --threads 1 to 256 and --mb 1 or more\n");
        return EXIT_USAGE;
    }
    Error err;
    Buffer text = {0};
    if (!file_read(path, SIZE_MAX / 2, &text, &err)) {
        fprintf(stderr, "bench_tokenizer: %s\n", err.text);
        return EXIT_FAILED;
    }
    if (text.size == 0) {
        fprintf(stderr, "bench_tokenizer: %s is empty\n", path);
        return EXIT_FAILED;
    }
    double unused;
    Bpe *bpe = merges ? bpe_load(merges, &err) : train(path, threads, 10000 + BPE_MIN_VOCAB, &unused);
    if (!bpe) {
        fprintf(stderr, "bench_tokenizer: %s\n", err.text);
        return EXIT_FAILED;
    }

    Job job = {bpe, text.data, text.size, megabytes * 1000000, CACHE_WORDS, 0};
    Job once = job;
    encode(&once);
    printf("%s: %.1f MB, repeated to %zu MB; vocabulary %u; %.3f bytes a token\n", path,
           (double)text.size * 1e-6, megabytes, bpe_vocab_size(bpe),
           (double)once.total / (double)once.tokens);
    double best = 1e30;
    for (int run = 0; run < RUNS; run++) {
        const double seconds = split(text.data, text.size);
        if (seconds < best) best = seconds;
    }
    print_rate("split", text.size, best);
    print_rate("encode", job.total, best_encode(&job, 1));
    char what[64];
    snprintf(what, sizeof(what), "encode, --threads %d", threads);
    print_rate(what, job.total * (size_t)threads, best_encode(&job, threads));
    job.cache_words = 0;
    print_rate("encode, no word cache", job.total, best_encode(&job, 1));
    bench_decoding(bpe, &text);
    bench_training(path, 1, 10000);
    bench_training(path, threads, 4096);
    bench_training(path, threads, 10000);
    bench_run(bpe, "\"a\"", 'a');
    bench_run(bpe, "\"^\"", '^');
    bench_run(bpe, "\" \"", ' ');
    bench_run(bpe, "\"_\"", '_');
    bench_run(bpe, "random letters", 0);
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    printf("%-34s %8.1f MB\n", "peak memory", (double)usage.ru_maxrss * 1024e-6);
    bpe_free(bpe);
    buffer_free(&text);
    return EXIT_DONE;
}
