/* bench_attention.c - how fast the attention backends are, and what memory they take.
 *
 *     bench_attention [--batch 1] [--heads 12] [--dim 64] [--min 1024] [--max 8192] [--threads N]
 *                     [--backends flash,naive] [--json FILE]
 *
 * For lengths doubling from --min to --max, each backend: forward, and forward with backward, in a process of
 * its own, so that peak memory is its own too. Causal FLOPs are counted once: 4 B H D T^2 / 2 forward, 2.5
 * times that backward, whatever a backend computes besides. "of sgemm" is the share of the rate of a
 * 2048^3 matrix product of sgemm.h on the same threads, timed just before. Inputs are random, outputs hold
 * NaN before the first call and are checked after it; one call warms up, the median of the others counts. */
#include "../attention/attention.h"
#include "../common.h"
#include "../sgemm.h"
#include "../simd.h"

#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#endif

typedef struct Settings {
    size_t batch, heads, dim, threads, min, max;
    const char *backends, *json;
    const char *one; /* set in the process of one measurement: the backend; then min is T, and */
    size_t training; /* whether backward is timed too */
} Settings;

typedef struct Result {
    double ms;
    size_t attention_bytes; /* saved and scratch */
    size_t peak_bytes;      /* of the process */
} Result;

/* ---- the command line ---- */

enum { MAX_NAME = 32, MAX_THREADS = 1024 };

static bool parse_size(const char *flag, const char *text, size_t *value, Error *err) {
    char *end;
    errno = 0;
    const unsigned long long n = strtoull(text, &end, 10);
    if (errno || end == text || *end || text[0] < '0' || text[0] > '9' || n > 1u << 24)
        return error_set(err, "%s takes an integer from 0 to %u, not \"%s\"", flag, 1u << 24, text);
    *value = (size_t)n;
    return true;
}

static bool parse(int argc, char **argv, Settings *s, Error *err) {
    const struct {
        const char *flag;
        size_t *number;
        const char **text;
    } flags[] = {{"--batch", &s->batch, NULL},       {"--heads", &s->heads, NULL},
                 {"--dim", &s->dim, NULL},           {"--threads", &s->threads, NULL},
                 {"--min", &s->min, NULL},           {"--max", &s->max, NULL},
                 {"--training", &s->training, NULL}, {"--backends", NULL, &s->backends},
                 {"--json", NULL, &s->json},         {"--one", NULL, &s->one}};
    for (int i = 1; i < argc; i += 2) {
        size_t f = 0;
        while (f < sizeof flags / sizeof *flags && strcmp(argv[i], flags[f].flag) != 0) f++;
        if (f == sizeof flags / sizeof *flags)
            return error_set(err,
                             "unknown flag \"%s\"; there are --batch --heads --dim --threads --min --max "
                             "--backends --json",
                             argv[i]);
        if (i + 1 == argc) return error_set(err, "%s takes a value", argv[i]);
        if (flags[f].text) *flags[f].text = argv[i + 1];
        else if (!parse_size(argv[i], argv[i + 1], flags[f].number, err)) return false;
    }
    for (const char *at = s->backends;; at++) {
        const size_t length = strcspn(at, ",");
        if (length == 0 || length >= MAX_NAME)
            return error_set(err, "--backends takes names with commas between, not \"%s\"", s->backends);
        at += length;
        if (!*at) break;
    }
    if (s->threads > MAX_THREADS)
        return error_set(err, "--threads takes at most %d, not %zu", MAX_THREADS, s->threads);
    if (s->batch == 0 || s->heads == 0 || s->dim == 0 || s->min == 0 || s->max < s->min)
        return error_set(err,
                         "--batch, --heads, --dim and --min must be at least 1, and --max at least --min");
    return true;
}

/* ---- one measurement ---- */

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

enum { MAX_TIMES = 50 };

/* The median of `n` times. */
static double median(double *times, size_t n) {
    qsort(times, n, sizeof *times, by_value);
    return n % 2 ? times[n / 2] : 0.5 * (times[n / 2 - 1] + times[n / 2]);
}

/* At least 3 calls are timed, then more until a second is over. */
static bool more_times(size_t n, double start) {
    return n < 3 || (n < MAX_TIMES && seconds_now() - start < 1.0);
}

static double sgemm_flops(void) {
    enum { N = 2048 };
    float *a = xmalloc(3 * (size_t)N * N * sizeof *a), *b = a + (size_t)N * N, *c = b + (size_t)N * N;
    double times[MAX_TIMES];
    size_t n = 0;
    Rng rng = rng_start(1, 0);
    for (size_t i = 0; i < 2 * (size_t)N * N; i++) a[i] = (float)rng_uniform(&rng) - 0.5f;
    sgemm(false, false, N, N, N, 1.0f, a, N, b, N, 0.0f, c, N);
    for (const double start = seconds_now(); more_times(n, start); n++) {
        const double t = seconds_now();
        sgemm(false, false, N, N, N, 1.0f, a, N, b, N, 0.0f, c, N);
        times[n] = seconds_now() - t;
    }
    free(a);
    return 2.0 * N * N * N / median(times, n);
}

/* Linux keeps in ru_maxrss what the process was before exec, too; VmHWM is this program's own. */
static size_t peak_memory(void) {
    FILE *file = fopen("/proc/self/status", "r");
    char line[256];
    size_t kib = 0;
    while (file && fgets(line, sizeof line, file)) {
        if (sscanf(line, "VmHWM: %zu", &kib) == 1) break;
    }
    if (file) fclose(file);
    if (kib) return kib * 1024;
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (size_t)usage.ru_maxrss * 1024;
}

static float *filled(size_t n, bool random, Rng *rng) {
    float *x = xmalloc(n * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = random ? 2.0f * (float)rng_uniform(rng) - 1.0f : NAN;
    return x;
}

static bool all_finite(const float *x, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (!isfinite(x[i])) return false;
    }
    return true;
}

static bool measure(const Settings *s, Result *result, Error *err) {
    const size_t B = s->batch, T = s->min, H = s->heads, D = s->dim;
    const bool training = s->training != 0;
    const AttentionShape shape = {.B = B, .T = T, .H = H, .D = D, .training = training};
    const Attention *attention = attention_find(s->one, "cpu", &shape, err);
    if (!attention) return false;

    const size_t saved = attention->saved_bytes(&shape), scratch = attention->scratch_bytes(&shape);
    const double bytes = 8.0 * sizeof(float) * (double)B * (double)T * (double)H * (double)D + (double)saved +
                         (double)scratch; /* qkv, d_qkv, out, d_out: 3 + 3 + 1 + 1 */
    const double memory = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
    if (bytes > 0.9 * memory)
        return error_set(err, "does not fit: needs %.1f GiB, the machine has %.1f", bytes / 0x1p30,
                         memory / 0x1p30);

    const size_t n = B * T * H * D;
    Rng rng = rng_start(2, T);
    float *qkv = filled(3 * n, true, &rng), *out = filled(n, false, NULL),
          *lse = filled(B * H * T, false, NULL);
    float *d_out = training ? filled(n, true, &rng) : NULL,
          *d_qkv = training ? filled(3 * n, false, NULL) : NULL;
    const AttentionCall call = {.B = B,
                                .T = T,
                                .H = H,
                                .D = D,
                                .scale = 1.0f / sqrtf((float)D),
                                .training = training,
                                .qkv = qkv,
                                .out = out,
                                .lse = lse,
                                .saved = saved ? xmalloc(saved) : NULL,
                                .scratch = scratch ? xmalloc(scratch) : NULL,
                                .d_out = d_out,
                                .d_qkv = d_qkv};
    double times[MAX_TIMES];
    size_t count = 0;
    attention->forward(&call);
    if (training) attention->backward(&call);
    if (!all_finite(out, n) || !all_finite(lse, B * H * T) || (training && !all_finite(d_qkv, 3 * n)))
        return error_set(err, "a result is not finite");
    for (const double start = seconds_now(); more_times(count, start); count++) {
        const double t = seconds_now();
        attention->forward(&call);
        if (training) attention->backward(&call);
        times[count] = seconds_now() - t;
    }
    *result = (Result){1e3 * median(times, count), saved + scratch, peak_memory()};
    free(qkv), free(out), free(lse), free(d_out), free(d_qkv), free(call.saved), free(call.scratch);
    return true;
}

/* The same in a process of its own, which prints the result, or the reason why there is none. */
static bool measure_apart(const char *program, const Settings *s, const char *backend, size_t T,
                          bool training, Result *result, Error *err) {
    char numbers[5][32];
    const size_t values[5] = {s->batch, s->heads, s->dim, s->threads, T};
    for (int i = 0; i < 5; i++) snprintf(numbers[i], sizeof numbers[i], "%zu", values[i]);
    const char *const arguments[] = {
        program,    "--batch",   numbers[0], "--heads",    numbers[1],           "--dim",
        numbers[2], "--threads", numbers[3], "--min",      numbers[4],           "--max",
        numbers[4], "--one",     backend,    "--training", training ? "1" : "0", NULL};
    int ends[2];
    if (pipe(ends) != 0) return error_set(err, "cannot make a pipe: %s", strerror(errno));
    const pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], STDOUT_FILENO);
        close(ends[0]), close(ends[1]);
        execv("/proc/self/exe", (char *const *)arguments);
        execvp(program, (char *const *)arguments);
        _exit(127);
    }
    close(ends[1]);
    if (child < 0) {
        close(ends[0]);
        return error_set(err, "cannot start a process: %s", strerror(errno));
    }
    char text[1024];
    size_t size = 0;
    ssize_t got;
    while (size < sizeof text - 1 && (got = read(ends[0], text + size, sizeof text - 1 - size)) != 0) {
        if (got > 0) size += (size_t)got;
        else if (errno != EINTR) break;
    }
    text[size] = '\0';
    close(ends[0]);
    int status = 0;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {}
    if (WIFSIGNALED(status)) return error_set(err, "ended by signal %d", WTERMSIG(status));
    if (sscanf(text, "%lf %zu %zu", &result->ms, &result->attention_bytes, &result->peak_bytes) == 3)
        return true;
    return error_set(err, "%s", text[0] ? text : "no result");
}

/* ---- the table ---- */

static void run_all(const char *program, const Settings *s, json_t *rows) {
    printf("B %zu, H %zu, D %zu, %zu threads, %s, %s\n\n", s->batch, s->heads, s->dim, s->threads,
           simd_name(simd_level()), sgemm_library());
    printf("%-8s %7s %-8s %10s %9s %9s %14s %9s\n", "backend", "T", "pass", "ms", "GFLOP/s", "of sgemm",
           "attention MiB", "peak MiB");
    for (size_t T = s->min; T <= s->max; T *= 2) {
        for (const char *at = s->backends; *at;) {
            char backend[MAX_NAME];
            const size_t length = strcspn(at, ",");
            memcpy(backend, at, length), backend[length] = '\0';
            at += length + (at[length] == ',');
            for (int training = 0; training < 2; training++) {
                const char *pass = training ? "both" : "forward";
                const double sgemm_rate = sgemm_flops();
                const double flops = (training ? 3.5 : 1.0) * 2.0 * (double)(s->batch * s->heads * s->dim) *
                                     (double)T * (double)T;
                Result result;
                Error reason;
                json_t *row = json_pack("{s:s, s:I, s:s, s:f}", "backend", backend, "T", (json_int_t)T,
                                        "pass", pass, "sgemm_gflops", 1e-9 * sgemm_rate);
                json_array_append_new(rows, row);
                if (measure_apart(program, s, backend, T, training, &result, &reason)) {
                    const double rate = flops / (1e-3 * result.ms);
                    printf("%-8s %7zu %-8s %10.2f %9.1f %8.1f%% %14.1f %9.1f\n", backend, T, pass, result.ms,
                           1e-9 * rate, 100.0 * rate / sgemm_rate, (double)result.attention_bytes / 0x1p20,
                           (double)result.peak_bytes / 0x1p20);
                    json_object_set_new(row, "ms", json_real(result.ms));
                    json_object_set_new(row, "gflops", json_real(1e-9 * rate));
                    json_object_set_new(row, "of_sgemm", json_real(rate / sgemm_rate));
                    json_object_set_new(row, "attention_bytes",
                                        json_integer((json_int_t)result.attention_bytes));
                    json_object_set_new(row, "peak_bytes", json_integer((json_int_t)result.peak_bytes));
                } else {
                    printf("%-8s %7zu %-8s %s\n", backend, T, pass, reason.text);
                    json_object_set_new(row, "error", json_string(reason.text));
                }
                fflush(stdout);
            }
        }
    }
}

static bool write_json(const Settings *s, json_t *rows, Error *err) {
    json_t *all = json_pack("{s:I, s:I, s:I, s:I, s:s, s:s, s:O}", "B", (json_int_t)s->batch, "H",
                            (json_int_t)s->heads, "D", (json_int_t)s->dim, "threads", (json_int_t)s->threads,
                            "simd", simd_name(simd_level()), "sgemm", sgemm_library(), "rows", rows);
    char *text = json_dumps(all, JSON_INDENT(2));
    const bool written = text && file_replace(s->json, text, strlen(text), err);
    free(text);
    json_decref(all);
    return written;
}

int main(int argc, char **argv) {
    Settings s = {.batch = 1, .heads = 12, .dim = 64, .min = 1024, .max = 8192, .backends = "flash,naive"};
    Error err;
    if (!parse(argc, argv, &s, &err)) {
        fprintf(stderr, "bench_attention: %s\n", err.text);
        return EXIT_USAGE;
    }
#ifdef _OPENMP
    if (s.threads) omp_set_num_threads((int)s.threads);
    s.threads = (size_t)omp_get_max_threads();
#else
    s.threads = 1;
#endif
    if (s.one) {
        Result result = {0};
        if (measure(&s, &result, &err))
            printf("%.6f %zu %zu\n", result.ms, result.attention_bytes, result.peak_bytes);
        else printf("%s", err.text);
        return EXIT_DONE;
    }
    json_t *rows = json_array();
    run_all(argv[0], &s, rows);
    const bool done = !s.json || write_json(&s, rows, &err);
    json_decref(rows);
    if (!done) fprintf(stderr, "bench_attention: %s\n", err.text);
    return done ? EXIT_DONE : EXIT_FAILED;
}
