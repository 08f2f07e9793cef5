/* ranks.c - see ranks.h. Three layers: what launchers say and a watch over this process; small talk by MPI, in
 * which each wait has a clock; the averaging of gradients, by MPI between CPUs and by NCCL between GPUs.
 *
 * Who hears whom. Every rank tells rank 0 that it lives, rank 0 tells every rank: a Beat, at most one under way
 * to each. What is counted is the time a rank waits without hearing from the other, so that ranks which were all
 * stopped together (Ctrl-Z) and go on have lost nothing. Beyond that a thread, which calls no MPI, ends this
 * process where its own main thread shows no life: then nobody else might (mpirun's start, a file system that
 * hangs).
 *
 * Averaging on CPUs. The gradients are cut from the end of the buffer, where backward finishes first, into
 * buckets. Of each bucket rank k owns the k-th part: it gets that part from every rank, adds them in the order of
 * the ranks, and gives the sum to all. Two passes over the wire like any all-reduce, but the order of the
 * sum is ours: MPI promises none. Nothing moves while nobody calls MPI, so the backward pass calls in after
 * every operation that ends a gradient. */
#include "ranks.h"

#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#ifdef USE_MPI
#include <mpi.h>
#endif
#ifdef USE_NCCL
#include "ranks_cuda.h"
#endif

/* ==== launchers ==== */

/* What launchers tell each process about how many there are. The first that is set counts: mpirun within a Slurm job
 * is started by srun itself. (SLURM_NTASKS would also be set in a job's script, which runs alone.) */
static const char *const launcher_variables[] = {
    "OMPI_COMM_WORLD_SIZE", /* Open MPI */
    "PMI_SIZE",             /* MPICH and its relatives */
    "SLURM_STEP_NUM_TASKS", /* srun */
};
enum { LAUNCHERS = sizeof launcher_variables / sizeof launcher_variables[0] };

/* How many processes were started together, and which variable says so; 1 where none does. */
static long launched(const char **variable) {
    for (size_t i = 0; i < LAUNCHERS; i++) {
        const char *text = getenv(launcher_variables[i]);
        if (!text || !*text) continue;
        char *end;
        const long count = strtol(text, &end, 10);
        *variable = launcher_variables[i];
        return *end || count < 1 ? 1 : count;
    }
    return 1;
}

#ifdef USE_MPI

enum {
    CPU_BUCKET = 1 << 20, /* floats; a part of it is far larger than what a message costs besides */
    GPU_BUCKET = 8 << 20, /* floats; NVLink reaches its rate, and the first is full after a layer or two */
    IN_FLIGHT = 4,        /* CPU buckets whose parts wait for being added */
    SUM_FLOATS = 4096,    /* are added at a time, in the nearest cache */
    HOST_BYTES = 64,
    UNTIMED_WAIT = 2, /* ms in which a wait gives its core away but does not sleep */
    NAP = 50          /* us, afterwards */
};

static const double ATTEND_SECONDS = 0.02; /* between looks at what others say */
static const double MOST_GAP = 1;          /* seconds that a look counts at most: the rest was not ours */

/* What a rank says of itself. */
typedef struct Beat {
    float allowed; /* seconds that it may be silent from now on */
    float waiting; /* seconds that it has waited for others; 0: it works */
    int32_t stop;  /* the signal to stop that it knows of */
} Beat;

typedef struct Peer {
    char host[HOST_BYTES];
    Beat arriving, heard, said;
    double silent; /* seconds of our waiting without a beat */
    MPI_Request incoming, outgoing;
} Peer;

/* Goes with the last bucket: no collective of its own for loss and stop. */
typedef struct Tail {
    double loss_sum;
    int64_t stop;
} Tail;

typedef enum BucketState { EXCHANGING, SUMMED, SUMS_WANTED, DONE } BucketState;
typedef struct Bucket {
    size_t start, count; /* floats of the gradient buffer */
    BucketState state;
    float *parts;                                   /* (count of ranks, floats of our part) */
    MPI_Request *give, *take, *give_sum, *take_sum; /* a rank each */
} Bucket;

struct RankLink {
    int rank, count;
    bool mpi; /* false: alone, averaging for the sake of it */
    double timeout;
    bool in_steps;
    pthread_t main;
    Peer *peers; /* (count) */
    double last_look, last_beat, waiting;

    Gpt *gpt;
    const Parameter *table;
    float *gradients;
    Bucket *buckets;
    size_t n_buckets, started, oldest; /* buckets begun, and the first that is not done, in this step */
    size_t final_from;                 /* floats of the buffer, from here on they are final */
    int stop, agreed_stop;
    double exposed;
    float *parts; /* IN_FLIGHT times the parts of a bucket */
    Tail tail, *tails;
    MPI_Comm comm, beats;
    MPI_Request *tail_requests, *requests; /* two a rank; the buckets' */
#ifdef USE_NCCL
    RanksGpu *gpu;
#endif
};

/* Of the one link that a process has. */
static RankLink *open_link;

/* Averaging in one process changes nothing; for tests and measurements of what it costs. */
static bool averaging_alone(void) {
    const char *asked = getenv("TRAIN_GPT_AVERAGE_ALONE");
    return asked && strcmp(asked, "1") == 0;
}

/* ==== the watch over this process ==== */
static struct {
    char name[HOST_BYTES + 32];  /* "rank 2 on HOST" */
    _Atomic(const char *) where; /* what a line should say besides */
    atomic_uint life;            /* counted up whenever the main thread shows some */
    atomic_int allowed_ms;
    atomic_bool on;
} watched;

static double phase_seconds(const RankLink *link) {
    return link->in_steps ? link->timeout : SLOW_PHASE * link->timeout;
}

/* Others give up on a rank first, and can name what it did last; so a little later. */
static void *watch_process(void *unused) {
    (void)unused;
    double idle = 0, last = seconds_now();
    for (unsigned before = atomic_load(&watched.life); atomic_load(&watched.on);) {
        nanosleep(&(struct timespec){.tv_nsec = 250000000}, NULL);
        const unsigned life = atomic_load(&watched.life);
        const double now = seconds_now();
        idle = life == before ? idle + fmin(now - last, MOST_GAP) : 0;
        before = life, last = now;
        const double allowed = 1e-3 * atomic_load(&watched.allowed_ms);
        if (idle <= 1.25 * allowed + 2 || !atomic_load(&watched.on)) continue;
        dprintf(STDERR_FILENO,
                "train_gpt: error: %s shows no life for %.0f s (-timeout)%s; the run ends, go on with "
                "-resume\n",
                watched.name, idle, atomic_load(&watched.where));
        _exit(EXIT_FAILED);
    }
    return NULL;
}

/* ==== small talk ==== */

enum { TAG_BEAT = 1, TAG_TAIL = 2, TAG_BUCKETS = 16, TAG_CYCLE = 8192 }; /* a bucket takes two tags */

static void leave_now(RankLink *link, int code) {
    atomic_store(&watched.allowed_ms, 5000); /* and if even that hangs */
    open_link = NULL;
    set_life_hook(NULL);
#ifdef USE_NCCL
    if (link->gpu) ranks_gpu_close(link->gpu, true);
#else
    (void)link;
#endif
    MPI_Abort(MPI_COMM_WORLD, code);
    _exit(code);
}

static void give_up(RankLink *link, const char *format, ...) PRINTF_LIKE(2, 3);
static void give_up(RankLink *link, const char *format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fflush(stdout);
    fprintf(stderr, "train_gpt: error: %s\n", text);
    leave_now(link, EXIT_FAILED);
}

static void check(RankLink *link, int status, const char *call) {
    if (status == MPI_SUCCESS) return;
    char text[MPI_MAX_ERROR_STRING] = "";
    int size = 0;
    MPI_Error_string(status, text, &size);
    give_up(link, "%s: %s: %s; the run ends, go on with -resume", watched.name, call, text);
}
#define CHECK_MPI(link, call) check((link), (call), #call)

static bool tested(RankLink *link, MPI_Request *request) {
    int done = 0;
    CHECK_MPI(link, MPI_Test(request, &done, MPI_STATUS_IGNORE));
    return done;
}
static bool tested_all(RankLink *link, MPI_Request *requests, int n) {
    bool all = true;
    for (int i = 0; i < n && all; i++) all = requests[i] == MPI_REQUEST_NULL || tested(link, &requests[i]);
    return all;
}

/* Whether this rank and that one tell each other that they live. */
static bool hears(const RankLink *link, int peer) {
    return peer != link->rank && (link->rank == 0 || peer == 0);
}

static void listen_to(RankLink *link, int peer) {
    CHECK_MPI(link, MPI_Irecv(&link->peers[peer].arriving, sizeof(Beat), MPI_BYTE, peer, TAG_BEAT,
                              link->beats, &link->peers[peer].incoming));
}

/* Hears what has come, says what is due. Often called: most calls only look at the clock. */
static void attend(RankLink *link) {
    atomic_fetch_add_explicit(&watched.life, 1, memory_order_relaxed);
    const double now = seconds_now();
    if (!link->mpi || now - link->last_look < ATTEND_SECONDS) return;
    link->last_look = now;
    for (int k = 0; k < link->count; k++) {
        Peer *peer = &link->peers[k];
        while (hears(link, k) && tested(link, &peer->incoming)) {
            peer->heard = peer->arriving, peer->silent = 0;
            if (peer->heard.stop) stop_request(peer->heard.stop);
            listen_to(link, k);
        }
    }
    const Beat beat = {
        .allowed = (float)phase_seconds(link), .waiting = (float)link->waiting, .stop = stop_requested()};
    const bool due = now - link->last_beat >= fmin(1, link->timeout / 8);
    for (int k = 0; k < link->count; k++) {
        Peer *peer = &link->peers[k];
        const bool news = beat.stop != peer->said.stop || beat.allowed != peer->said.allowed;
        if (!hears(link, k) || (!due && !news) || !tested(link, &peer->outgoing)) continue;
        peer->said = beat;
        CHECK_MPI(link,
                  MPI_Isend(&peer->said, sizeof(Beat), MPI_BYTE, k, TAG_BEAT, link->beats, &peer->outgoing));
    }
    if (due) link->last_beat = now;
}

static void show_life(void) {
    if (open_link && pthread_equal(pthread_self(), open_link->main)) attend(open_link);
}

/* Gives up where it has been silent around us for too long: one rank, or all of them waiting for each other. */
static void judge(RankLink *link, double seconds) {
    bool all_wait = link->rank == 0 && link->waiting > phase_seconds(link);
    for (int k = 0; k < link->count; k++) {
        Peer *peer = &link->peers[k];
        if (!hears(link, k)) continue;
        peer->silent += seconds;
        const double allowed = peer->heard.allowed;
        if (peer->silent > allowed)
            give_up(
                link,
                "rank %d on %s has been silent for %.0f s (-timeout %g); the run ends, go on with -resume", k,
                peer->host, peer->silent, link->timeout);
        all_wait = all_wait && peer->heard.waiting > allowed && peer->silent < MOST_GAP + 1;
    }
    if (all_wait)
        give_up(link, "all ranks have waited for one another for %.0f s; the run ends, go on with -resume",
                link->waiting);
}

/* Until `finished` says so; it is called again and again and moves what it waits for. */
typedef bool Finished(RankLink *link, void *user);
static void wait_until(RankLink *link, Finished *finished, void *user) {
    const double begun = seconds_now();
    double last = begun, judged = begun;
    while (!finished(link, user)) {
        const double now = seconds_now();
        link->waiting += fmin(now - last, MOST_GAP);
        last = now;
        attend(link);
        if (link->mpi && now - judged >= ATTEND_SECONDS) {
            judge(link, fmin(now - judged, MOST_GAP));
            judged = now;
        }
        if (now - begun < 1e-3 * UNTIMED_WAIT) sched_yield();
        else nanosleep(&(struct timespec){.tv_nsec = 1000 * NAP}, NULL);
    }
    link->waiting = 0;
}

static bool request_finished(RankLink *link, void *request) {
    return tested(link, (MPI_Request *)request);
}

static void gather_bytes(RankLink *link, const void *ours, size_t size, void *all) {
    MPI_Request request;
    CHECK_MPI(link,
              MPI_Iallgather(ours, (int)size, MPI_BYTE, all, (int)size, MPI_BYTE, link->comm, &request));
    wait_until(link, request_finished, &request);
}

static void tell_from(RankLink *link, int root, Buffer *bytes) {
    MPI_Request request;
    uint64_t size = bytes->size;
    CHECK_MPI(link, MPI_Ibcast(&size, 1, MPI_UINT64_T, root, link->comm, &request));
    wait_until(link, request_finished, &request);
    if (link->rank != root) bytes->size = 0, buffer_reserve(bytes, size);
    bytes->size = size;
    for (uint64_t at = 0, part; at < size; at += part) {
        part = size - at < 1u << 30 ? size - at : 1u << 30;
        CHECK_MPI(link, MPI_Ibcast(bytes->data + at, (int)part, MPI_BYTE, root, link->comm, &request));
        wait_until(link, request_finished, &request);
    }
}

/* ==== coming and going ==== */

/* What each rank is asked of at the start. */
typedef struct Introduction {
    char host[HOST_BYTES];
    int32_t node; /* the first rank on the same host */
    uint8_t cpus[128];
} Introduction;

static void introduce(RankLink *link, Ranks *ranks) {
    MPI_Comm local;
    Introduction ours = {{0}, ranks->rank, {0}}, *all = xcalloc((size_t)ranks->count, sizeof *all);
    CHECK_MPI(link,
              MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, ranks->rank, MPI_INFO_NULL, &local));
    CHECK_MPI(link, MPI_Comm_rank(local, &ranks->local_rank));
    CHECK_MPI(link, MPI_Comm_size(local, &ranks->local_count));
    CHECK_MPI(link, MPI_Bcast(&ours.node, 1, MPI_INT32_T, 0, local));
    CHECK_MPI(link, MPI_Comm_free(&local));
    gethostname(ours.host, sizeof ours.host - 1);
#if defined(__linux__)
    cpu_set_t cpus;
    if (sched_getaffinity(0, sizeof cpus, &cpus) == 0)
        memcpy(ours.cpus, &cpus, sizeof cpus < sizeof ours.cpus ? sizeof cpus : sizeof ours.cpus);
#endif
    gather_bytes(link, &ours, sizeof ours, all);
    ranks->cpu_sharers = ranks->hosts = 0;
    for (int k = 0; k < ranks->count; k++) {
        memcpy(link->peers[k].host, all[k].host, sizeof all[k].host);
        ranks->hosts += all[k].node == k;
        ranks->cpu_sharers += all[k].node == ours.node &&
                              memcmp(all[k].cpus, ours.cpus, sizeof ours.cpus) == 0;
    }
    free(all);
    snprintf(watched.name, sizeof watched.name, "rank %d on %s", ranks->rank, link->peers[ranks->rank].host);
    atomic_store(&watched.where, "");
}

/* exit() was called somewhere below: out of memory, a fault of the GPU. */
static void on_exit_early(void) {
    if (!open_link) return;
    dprintf(STDERR_FILENO, "train_gpt: error: %s ends before the others are done\n", watched.name);
    if (pthread_equal(pthread_self(), open_link->main)) leave_now(open_link, EXIT_FAILED);
    _exit(EXIT_FAILED);
}

static bool join(RankLink *link, Ranks *ranks, long expected, const char *variable, Error *err) {
    int provided, initialised = 0, size = 0;
    MPI_Initialized(&initialised);
    if (initialised) return error_set(err, "the ranks were joined before; a process can join them once");
    pthread_t thread;
    atomic_store(&watched.on, true);
    if (pthread_create(&thread, NULL, watch_process, NULL) == 0) pthread_detach(thread);
    atomic_store(&watched.where, ", waiting for all ranks to start");
    if (MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided) != MPI_SUCCESS)
        return error_set(err, "MPI does not start; see what it says above, or start without the launcher");
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Comm_rank(MPI_COMM_WORLD, &ranks->rank);
    if (size != expected || provided < MPI_THREAD_FUNNELED) {
        MPI_Finalize();
        atomic_store(&watched.on, false);
        return size != expected
                   ? error_set(
                         err,
                         "a launcher started %ld processes (%s=%ld), MPI sees %d: the two do not know each "
                         "other; "
                         "use the mpirun of the MPI that this was built with, or srun --mpi=pmix (or pmi2)",
                         expected, variable, expected, size)
                   : error_set(err, "this MPI allows no threads (MPI_THREAD_FUNNELED); use another one");
    }
    ranks->count = link->count = size, link->rank = ranks->rank, link->mpi = true;
    link->peers = xcalloc((size_t)size, sizeof *link->peers);
    CHECK_MPI(link, MPI_Comm_dup(MPI_COMM_WORLD, &link->comm));
    CHECK_MPI(link, MPI_Comm_dup(MPI_COMM_WORLD, &link->beats));
    MPI_Comm_set_errhandler(link->comm, MPI_ERRORS_RETURN);
    MPI_Comm_set_errhandler(link->beats, MPI_ERRORS_RETURN);
    for (int k = 0; k < size; k++) {
        link->peers[k].incoming = link->peers[k].outgoing = MPI_REQUEST_NULL;
        link->peers[k].heard.allowed = (float)phase_seconds(link);
        if (hears(link, k)) listen_to(link, k);
    }
    introduce(link, ranks);
    open_link = link;
    set_life_hook(show_life);
    atexit(on_exit_early);
    return true;
}

static void leave(RankLink *link) {
    double ours = 0, *all = xmalloc((size_t)link->count * sizeof *all);
    gather_bytes(link, &ours, sizeof ours, all); /* nobody waits for anybody any more */
    free(all);
    set_life_hook(NULL);
    open_link = NULL;
    atomic_store(&watched.where, ", waiting for all ranks to end");
    for (int k = 0; k < link->count; k++) {
        if (!hears(link, k)) continue;
        MPI_Cancel(&link->peers[k].incoming);
        MPI_Wait(&link->peers[k].incoming, MPI_STATUS_IGNORE);
        if (link->peers[k].outgoing != MPI_REQUEST_NULL) MPI_Request_free(&link->peers[k].outgoing);
    }
    MPI_Comm_free(&link->beats);
    MPI_Comm_free(&link->comm);
    MPI_Finalize();
    atomic_store(&watched.on, false);
}

/* ==== averaging between CPUs ==== */

/* The part of a bucket that rank k owns: from *first, *floats many. */
static float *part_of(const RankLink *link, const Bucket *bucket, int k, int *floats) {
    const size_t n = (size_t)link->count, first = bucket->count * (size_t)k / n,
                 end = bucket->count * (size_t)(k + 1) / n;
    *floats = (int)(end - first);
    return link->gradients + bucket->start + first;
}

static int tag_of(const RankLink *link, const Bucket *bucket, int pass) {
    return TAG_BUCKETS + 2 * (int)((size_t)(bucket - link->buckets) % TAG_CYCLE) + pass;
}

static void send_part(RankLink *link, const float *floats, int n, int to, int tag, MPI_Request *request) {
    CHECK_MPI(link, MPI_Isend(floats, n, MPI_FLOAT, to, tag, link->comm, request));
}
static void receive_part(RankLink *link, float *floats, int n, int from, int tag, MPI_Request *request) {
    CHECK_MPI(link, MPI_Irecv(floats, n, MPI_FLOAT, from, tag, link->comm, request));
}

/* Floats of the longest part of a bucket, and of one such from each rank. */
static size_t longest_part(const RankLink *link) {
    return CPU_BUCKET / (size_t)link->count + 1;
}
static size_t parts_of_bucket(const RankLink *link) {
    return longest_part(link) * (size_t)link->count;
}

static void start_exchange(RankLink *link, Bucket *bucket) {
    const size_t slot = (size_t)(bucket - link->buckets) % IN_FLIGHT, most = longest_part(link);
    int ours, n;
    bucket->state = EXCHANGING;
    part_of(link, bucket, link->rank, &ours);
    bucket->parts = link->parts + slot * parts_of_bucket(link);
    for (int k = 0; k < link->count; k++) {
        if (k == link->rank) continue;
        receive_part(link, bucket->parts + most * (size_t)k, ours, k, tag_of(link, bucket, 0),
                     &bucket->take[k]);
        const float *theirs = part_of(link, bucket, k, &n);
        send_part(link, theirs, n, k, tag_of(link, bucket, 0), &bucket->give[k]);
    }
}

/* Our part of the gradient becomes the sum of all ranks', in their order. */
static void add_parts(RankLink *link, Bucket *bucket) {
    int floats;
    float *ours = part_of(link, bucket, link->rank, &floats);
    const size_t most = longest_part(link);
    float sum[SUM_FLOATS];
    for (size_t at = 0, n; at < (size_t)floats; at += n) {
        n = (size_t)floats - at < SUM_FLOATS ? (size_t)floats - at : SUM_FLOATS;
        for (int k = 0; k < link->count; k++) {
            const float *part = (k == link->rank ? ours : bucket->parts + most * (size_t)k) + at;
            if (k == 0) memcpy(sum, part, n * sizeof *sum);
            else
                for (size_t i = 0; i < n; i++) sum[i] += part[i];
        }
        memcpy(ours + at, sum, n * sizeof *sum);
    }
}

/* Moves a bucket on as far as what has come allows. */
static void move_bucket(RankLink *link, Bucket *bucket) {
    int n;
    if (bucket->state == EXCHANGING) {
        if (!tested_all(link, bucket->take, link->count)) return;
        add_parts(link, bucket);
        const float *ours = part_of(link, bucket, link->rank, &n);
        for (int k = 0; k < link->count; k++)
            if (k != link->rank) send_part(link, ours, n, k, tag_of(link, bucket, 1), &bucket->give_sum[k]);
        bucket->state = SUMMED;
    }
    if (bucket->state == SUMMED) {
        /* The sums of the others' parts take the place of what they were sent. */
        if (!tested_all(link, bucket->give, link->count)) return;
        for (int k = 0; k < link->count; k++) {
            if (k == link->rank) continue;
            float *theirs = part_of(link, bucket, k, &n);
            receive_part(link, theirs, n, k, tag_of(link, bucket, 1), &bucket->take_sum[k]);
        }
        bucket->state = SUMS_WANTED;
    }
    if (bucket->state == SUMS_WANTED && tested_all(link, bucket->give_sum, link->count) &&
        tested_all(link, bucket->take_sum, link->count))
        bucket->state = DONE;
}

/* Starts what is final, in the same order everywhere, and moves what is under way. */
static void move_buckets(RankLink *link) {
    for (; link->started < link->n_buckets; link->started++) {
        const size_t next = link->started;
        if (link->buckets[next].start < link->final_from) break;
        if (next >= IN_FLIGHT && link->buckets[next - IN_FLIGHT].state == EXCHANGING) break;
        start_exchange(link, &link->buckets[next]);
    }
    for (size_t i = link->oldest; i < link->started; i++)
        if (link->buckets[i].state != DONE) move_bucket(link, &link->buckets[i]);
    while (link->oldest < link->started && link->buckets[link->oldest].state == DONE) link->oldest++;
}

static bool exchange_finished(RankLink *link, void *unused) {
    (void)unused;
    move_buckets(link);
    return link->oldest == link->n_buckets && tested_all(link, link->tail_requests, 2 * link->count);
}

/* Loss and stop of this rank to every other. */
static void start_tails(RankLink *link) {
    link->tail = (Tail){.loss_sum = gpt_step_state(link->gpt).loss_sum, .stop = link->stop};
    link->tails[link->rank] = link->tail;
    for (int k = 0; k < link->count; k++) {
        if (k == link->rank) continue;
        CHECK_MPI(link, MPI_Irecv(&link->tails[k], sizeof(Tail), MPI_BYTE, k, TAG_TAIL, link->comm,
                                  &link->tail_requests[2 * k]));
        CHECK_MPI(link, MPI_Isend(&link->tail, sizeof(Tail), MPI_BYTE, k, TAG_TAIL, link->comm,
                                  &link->tail_requests[2 * k + 1]));
    }
}

static void add_tails(RankLink *link) {
    const GptSetup *setup = gpt_setup(link->gpt);
    double loss_sum = 0;
    int64_t stop = 0;
    for (int k = 0; k < link->count; k++) {
        loss_sum += link->tails[k].loss_sum;
        if (link->tails[k].stop > stop) stop = link->tails[k].stop;
    }
    setup->ops->upload(setup->stream, &gpt_device_state(link->gpt)->loss_sum, &loss_sum, sizeof loss_sum);
    link->agreed_stop = (int)stop;
}

static MPI_Request *new_requests(size_t n) {
    MPI_Request *requests = xmalloc(n * sizeof *requests);
    for (size_t i = 0; i < n; i++) requests[i] = MPI_REQUEST_NULL;
    return requests;
}

static void attach_cpus(RankLink *link) {
    const size_t n = (size_t)link->count;
    link->parts = xmalloc(IN_FLIGHT * parts_of_bucket(link) * sizeof *link->parts);
    link->tails = xcalloc(n, sizeof *link->tails);
    link->tail_requests = new_requests(2 * n);
    link->requests = new_requests(4 * n * link->n_buckets);
    for (size_t i = 0; i < link->n_buckets; i++) {
        Bucket *bucket = &link->buckets[i];
        MPI_Request *requests = link->requests + 4 * n * i;
        bucket->give = requests, bucket->take = requests + n;
        bucket->give_sum = requests + 2 * n, bucket->take_sum = requests + 3 * n;
    }
}

/* ==== averaging on GPUs ==== */
#ifdef USE_NCCL
typedef struct GpuWait {
    bool stream;
    Error err;
    bool failed;
} GpuWait;

static bool gpu_finished(RankLink *link, void *user) {
    GpuWait *wait = user;
    const RanksGpuState state = ranks_gpu_poll(link->gpu, wait->stream, &wait->err);
    wait->failed = state == RANKS_GPU_FAILED;
    return state != RANKS_GPU_BUSY;
}

static void gpu_check(RankLink *link, bool done, const Error *err) {
    if (!done) give_up(link, "%s: %s; the run ends, go on with -resume", watched.name, err->text);
}

/* Starts every bucket that is final; the last, with loss and stop, is told apart by its start. */
static void sum_on_gpu(RankLink *link) {
    for (; link->started < link->n_buckets; link->started++) {
        const Bucket *bucket = &link->buckets[link->started];
        if (bucket->start < link->final_from) return;
        double *loss_sum = bucket->start == 0 ? &gpt_device_state(link->gpt)->loss_sum : NULL;
        Error err;
        gpu_check(link,
                  ranks_gpu_sum(link->gpu, link->gradients + bucket->start, bucket->count, loss_sum,
                                link->stop, &err),
                  &err);
    }
}

static bool join_gpus(RankLink *link, Stream *stream, Error *err) {
    const size_t n = (size_t)link->count;
    char ours[HOST_BYTES] = "", *all = xcalloc(n, sizeof ours);
    ranks_gpu_name(stream, ours, sizeof ours);
    if (link->mpi) gather_bytes(link, ours, sizeof ours, all);
    else memcpy(all, ours, sizeof ours);
    bool done = true;
    for (size_t k = 1; k < n && done; k++)
        for (size_t j = 0; j < k && done; j++)
            if (strcmp(all + k * sizeof ours, all + j * sizeof ours) == 0)
                done = error_set(
                    err,
                    "ranks %zu and %zu are both on %s of %s: there are fewer GPUs than ranks; start one "
                    "rank a GPU (mpirun -n), or use -device cpu",
                    j, k, all + k * sizeof ours, link->peers[k].host);
    free(all);
    if (!done) return false;
    Buffer id = {0};
    char text[RANKS_GPU_ID_BYTES] = {0};
    done = link->rank > 0 || ranks_gpu_id(text, err);
    buffer_append(&id, text, sizeof text);
    if (link->mpi) tell_from(link, 0, &id);
    memcpy(text, id.data, sizeof text);
    buffer_free(&id);
    if (done) link->gpu = ranks_gpu_join(stream, text, link->rank, link->count, err);
    GpuWait wait = {.stream = false};
    if (link->gpu) wait_until(link, gpu_finished, &wait);
    if (wait.failed) *err = wait.err;
    return link->gpu && !wait.failed;
}
#endif

/* ==== the calls of ranks.h ==== */

bool ranks_start(Ranks *ranks, double timeout, Error *err) {
    *ranks = (Ranks){.count = 1, .local_count = 1, .cpu_sharers = 1, .hosts = 1};
    const char *variable = NULL;
    const long count = launched(&variable);
    if (count == 1 && !averaging_alone()) return true;
    RankLink *link = xcalloc(1, sizeof *link);
    link->count = 1, link->timeout = timeout, link->main = pthread_self();
    atomic_store(&watched.allowed_ms, (int)(1e3 * phase_seconds(link)));
    char host[HOST_BYTES] = "";
    gethostname(host, sizeof host - 1);
    snprintf(watched.name, sizeof watched.name, "process %ld on %s", (long)getpid(), host);
    if (count > 1 && !join(link, ranks, count, variable, err)) {
        free(link);
        return false;
    }
    ranks->link = link;
    return true;
}

void ranks_end(Ranks *ranks) {
    RankLink *link = ranks->link;
    if (!link) return;
#ifdef USE_NCCL
    if (link->gpu) ranks_gpu_close(link->gpu, false);
#endif
    if (link->mpi) leave(link);
    ranks_detach(ranks);
    free(link->peers);
    free(link);
    ranks->link = NULL;
}

void ranks_abort(Ranks *ranks, int code) {
    if (ranks->link && ranks->link->mpi) leave_now(ranks->link, code);
}

void ranks_in_steps(Ranks *ranks, bool in_steps) {
    RankLink *link = ranks->link;
    if (!link || link->in_steps == in_steps) return;
    link->in_steps = in_steps;
    atomic_store(&watched.allowed_ms, (int)(1e3 * phase_seconds(link)));
    link->last_look = 0;
    attend(link); /* tells the others */
}

bool ranks_all(Ranks *ranks, bool done, int *code, Error *err) {
    RankLink *link = ranks->link;
    if (!link || !link->mpi) return done;
    const size_t n = (size_t)link->count;
    double ours = done ? -1 : code ? *code : EXIT_FAILED, *all = xmalloc(n * sizeof *all);
    gather_bytes(link, &ours, sizeof ours, all);
    size_t first = 0;
    while (first < n && all[first] < 0) first++;
    if (first < n) {
        Buffer text = {0};
        buffer_append(&text, err->text, sizeof err->text);
        tell_from(link, (int)first, &text);
        if (first == 0) error_set(err, "%s", (const char *)text.data);
        else error_set(err, "rank %zu on %s: %s", first, link->peers[first].host, (const char *)text.data);
        if (code) *code = (int)all[first];
        buffer_free(&text);
    }
    free(all);
    return first == n;
}

void ranks_tell(Ranks *ranks, Buffer *bytes) {
    if (ranks->link && ranks->link->mpi) tell_from(ranks->link, 0, bytes);
}

void ranks_gather(Ranks *ranks, const double *ours, size_t n, double *all) {
    if (ranks->link && ranks->link->mpi) gather_bytes(ranks->link, ours, n * sizeof *ours, all);
    else memcpy(all, ours, n * sizeof *ours);
}

bool ranks_same(Ranks *ranks, const char *what, const char *ours, const char *advice, Error *err) {
    if (!ranks->link || !ranks->link->mpi) return true;
    Buffer theirs = {0};
    buffer_append(&theirs, ours, strlen(ours) + 1);
    tell_from(ranks->link, 0, &theirs);
    const bool same = strcmp((const char *)theirs.data, ours) == 0;
    if (!same)
        error_set(err, "%s: found %.200s, rank 0 has %.200s; %s", what, ours, (const char *)theirs.data,
                  advice);
    buffer_free(&theirs);
    return ranks_all(ranks, same, NULL, err);
}

bool ranks_join_devices(Ranks *ranks, const Ops *ops, Stream *stream, Error *err) {
    RankLink *link = ranks->link;
    if (!link) return true;
    if (!ranks_same(ranks, "the device", ops->name, "name one with -device that all hosts have", err))
        return false;
    if (strcmp(ops->name, "cpu") == 0) return true;
#ifdef USE_NCCL
    return ranks_all(ranks, join_gpus(link, stream, err), NULL, err);
#else
    (void)stream;
    return error_set(err,
                     "this build has no NCCL, which ranks on GPUs need; build with it (make says whether it "
                     "finds it), or use -device cpu");
#endif
}

/* On GPUs NCCL has memory of its own, on the device. */
size_t ranks_bytes(const Ranks *ranks, const Ops *ops) {
    const RankLink *link = ranks->link;
    return link && link->mpi && strcmp(ops->name, "cpu") == 0
               ? IN_FLIGHT * parts_of_bucket(link) * sizeof(float)
               : 0;
}

void ranks_attach(Ranks *ranks, Gpt *gpt) {
    RankLink *link = ranks->link;
    if (!link) return;
    const bool on_gpu = strcmp(gpt_setup(gpt)->ops->name, "cpu") != 0;
    const size_t size = on_gpu ? GPU_BUCKET : CPU_BUCKET;
    size_t total, rows;
    link->gpt = gpt;
    link->table = gpt_table(gpt, &rows);
    link->gradients = gpt_buffer(gpt, GPT_GRADIENTS, &total);
    link->n_buckets = (total + size - 1) / size;
    link->buckets = xcalloc(link->n_buckets, sizeof *link->buckets);
    for (size_t i = 0; i < link->n_buckets; i++) {
        const size_t end = total - i * size;
        link->buckets[i].start = end > size ? end - size : 0;
        link->buckets[i].count = end - link->buckets[i].start;
    }
    if (!on_gpu && link->mpi) attach_cpus(link);
}

void ranks_detach(Ranks *ranks) {
    RankLink *link = ranks->link;
    if (!link) return;
    free(link->parts), free(link->tails), free(link->tail_requests), free(link->requests),
        free(link->buckets);
    link->parts = NULL, link->tails = NULL, link->tail_requests = link->requests = NULL, link->buckets = NULL;
}

/* Called by the backward pass. */
static void on_final(void *user, size_t row) {
    RankLink *link = user;
    const double begun = seconds_now();
    link->final_from = link->table[row].offset;
#ifdef USE_NCCL
    if (link->gpu) sum_on_gpu(link);
#endif
    if (link->tails) {
        if (row == 0) start_tails(link);
        move_buckets(link);
    }
    attend(link);
    if (link->tails) link->exposed += seconds_now() - begun; /* on a GPU the host's time costs nothing */
}

void ranks_average_begin(Ranks *ranks, int stop) {
    RankLink *link = ranks->link;
    if (!link) return;
    link->stop = link->agreed_stop = stop;
    link->started = link->oldest = 0;
    gpt_tell_final(link->gpt, on_final, link);
}

void ranks_average_end(Ranks *ranks) {
    RankLink *link = ranks->link;
    if (!link || !link->tails) return;
    const double begun = seconds_now();
    wait_until(link, exchange_finished, NULL);
    add_tails(link);
    link->exposed += seconds_now() - begun;
}

int ranks_step_done(Ranks *ranks) {
    RankLink *link = ranks->link;
    if (!link) return 0;
#ifdef USE_NCCL
    if (link->gpu) {
        GpuWait wait = {.stream = true};
        wait_until(link, gpu_finished, &wait);
        gpu_check(link, !wait.failed, &wait.err);
        link->exposed += ranks_gpu_exposed(link->gpu);
        link->agreed_stop = ranks_gpu_stop(link->gpu);
    }
#endif
    return link->agreed_stop;
}

double ranks_take_exposed(Ranks *ranks) {
    RankLink *link = ranks->link;
    const double seconds = link ? link->exposed : 0;
    if (link) link->exposed = 0;
    return seconds;
}

void ranks_describe(const Ranks *ranks, char *text, size_t size) {
    const RankLink *link = ranks->link;
    if (!link) snprintf(text, size, "alone");
    else
        snprintf(text, size, "%d on %d host%s: gradients summed by %s in %zu buckets", ranks->count,
                 ranks->hosts, ranks->hosts == 1 ? "" : "s", link->tails ? "MPI" : "NCCL", link->n_buckets);
}

#else /* a build without MPI: always alone */

bool ranks_start(Ranks *ranks, double timeout, Error *err) {
    (void)timeout;
    *ranks = (Ranks){.count = 1, .local_count = 1, .cpu_sharers = 1, .hosts = 1};
    const char *variable = NULL;
    const long count = launched(&variable);
    return count == 1 ||
           error_set(err,
                     "a launcher started %ld processes (%s=%ld), but this build has no MPI and trains in one "
                     "process "
                     "only; build with MPI (make says whether it finds it), or start it without the launcher",
                     count, variable, count);
}
bool ranks_all(Ranks *ranks, bool done, int *code, Error *err) {
    (void)ranks, (void)code, (void)err;
    return done;
}
void ranks_gather(Ranks *ranks, const double *ours, size_t n, double *all) {
    (void)ranks;
    memcpy(all, ours, n * sizeof *ours);
}
bool ranks_same(Ranks *ranks, const char *what, const char *ours, const char *advice, Error *err) {
    (void)ranks, (void)what, (void)ours, (void)advice, (void)err;
    return true;
}
bool ranks_join_devices(Ranks *ranks, const Ops *ops, Stream *stream, Error *err) {
    (void)ranks, (void)ops, (void)stream, (void)err;
    return true;
}
size_t ranks_bytes(const Ranks *ranks, const Ops *ops) {
    (void)ranks, (void)ops;
    return 0;
}
int ranks_step_done(Ranks *ranks) {
    (void)ranks;
    return 0;
}
double ranks_take_exposed(Ranks *ranks) {
    (void)ranks;
    return 0;
}
void ranks_describe(const Ranks *ranks, char *text, size_t size) {
    (void)ranks;
    snprintf(text, size, "alone");
}
void ranks_tell(Ranks *ranks, Buffer *bytes) {
    (void)ranks, (void)bytes;
}
void ranks_end(Ranks *ranks) {
    (void)ranks;
}
void ranks_abort(Ranks *ranks, int code) {
    (void)ranks, (void)code;
}
void ranks_in_steps(Ranks *ranks, bool in_steps) {
    (void)ranks, (void)in_steps;
}
void ranks_attach(Ranks *ranks, Gpt *gpt) {
    (void)ranks, (void)gpt;
}
void ranks_detach(Ranks *ranks) {
    (void)ranks;
}
void ranks_average_begin(Ranks *ranks, int stop) {
    (void)ranks, (void)stop;
}
void ranks_average_end(Ranks *ranks) {
    (void)ranks;
}

#endif
