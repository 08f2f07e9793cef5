/* emulated.c - see emulated.h; and what cuda_stream.h promises, as far as an attention kernel asks for it. */
#include "cuda_runtime.h"

#include "../../cuda_stream.h"

#include "../reference_bf16.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    MOST_WARPS = 8,
    MOST_THREADS = MOST_WARPS * LANES,
    STACK_BYTES = 256 << 10,
    SHARED_START = 1024, /* so that 0 is no address */
    SHARED_BYTES = 227 << 10
};

typedef struct Copy {
    unsigned to;
    const void *from;
} Copy;

typedef struct Thread {
    void *stack; /* where it stands, while another one runs */
    Copy *copies;
    size_t n_copies, most_copies;
} Thread;

/* Lanes as bits. */
typedef struct Warp {
    uint32_t runnable, alive, waiting; /* waiting: for the others of the warp, at `together` */
    void (*together)(void *const operands[LANES]);
    void *operands[LANES];
} Warp;

EmulatedIndex emulated_thread, emulated_block;

static struct {
    const char *name;
    void (*run)(const void *job);
    const void *job;
    unsigned warps, alive, at_barrier; /* threads */
    size_t shared_bytes;
    bool late; /* copies */
    uint64_t random;
    size_t launches, parts;
} grid = {.parts = 1};

static Thread threads[MOST_THREADS];
static Warp warps[MOST_WARPS];
static uint8_t *stacks, *shared;
static void *launcher; /* the stack of emulated_launch */

static void fail(const char *what) {
    printf("emulated: %s, block %u, thread %u: %s\n", grid.name, emulated_block.x, emulated_thread.x, what);
    exit(1);
}

/* ---- contexts ---- */
/* Keeps on this stack what a function must leave as it was, notes in *from where, and goes on where `to` stands. */
void emulated_switch(void **from, void *to);
#if defined(__linux__) && defined(__x86_64__)
enum { KEPT_WORDS = 6, RETURN_WORD = 6, FRAME_WORDS = 8 };
__asm__(".text\n"
        ".globl emulated_switch\n"
        ".type emulated_switch, @function\n"
        "emulated_switch:\n"
        "    pushq %rbp\n    pushq %rbx\n    pushq %r12\n    pushq %r13\n    pushq %r14\n    pushq %r15\n"
        "    movq %rsp, (%rdi)\n"
        "    movq %rsi, %rsp\n"
        "    popq %r15\n    popq %r14\n    popq %r13\n    popq %r12\n    popq %rbx\n    popq %rbp\n"
        "    ret\n"
        ".size emulated_switch, . - emulated_switch\n");
bool emulated_is_possible(void) {
    return true;
}
#elif defined(__linux__) && defined(__aarch64__)
enum { RETURN_WORD = 1, FRAME_WORDS = 20 };
__asm__(".text\n"
        ".globl emulated_switch\n"
        ".type emulated_switch, %function\n"
        "emulated_switch:\n"
        "    sub sp, sp, #160\n"
        "    stp x29, x30, [sp]\n    stp x19, x20, [sp, #16]\n    stp x21, x22, [sp, #32]\n"
        "    stp x23, x24, [sp, #48]\n    stp x25, x26, [sp, #64]\n    stp x27, x28, [sp, #80]\n"
        "    stp d8, d9, [sp, #96]\n    stp d10, d11, [sp, #112]\n    stp d12, d13, [sp, #128]\n"
        "    stp d14, d15, [sp, #144]\n"
        "    mov x9, sp\n    str x9, [x0]\n    mov sp, x1\n"
        "    ldp x29, x30, [sp]\n    ldp x19, x20, [sp, #16]\n    ldp x21, x22, [sp, #32]\n"
        "    ldp x23, x24, [sp, #48]\n    ldp x25, x26, [sp, #64]\n    ldp x27, x28, [sp, #80]\n"
        "    ldp d8, d9, [sp, #96]\n    ldp d10, d11, [sp, #112]\n    ldp d12, d13, [sp, #128]\n"
        "    ldp d14, d15, [sp, #144]\n"
        "    add sp, sp, #160\n"
        "    ret\n"
        ".size emulated_switch, . - emulated_switch\n");
bool emulated_is_possible(void) {
    return true;
}
#else
enum { RETURN_WORD = 0, FRAME_WORDS = 2 };
void emulated_switch(void **from, void *to) {
    (void)from, (void)to;
}
bool emulated_is_possible(void) {
    return false;
}
#endif

static unsigned random_below(unsigned n) {
    grid.random = grid.random * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)((grid.random >> 33) % n);
}

/* The next in turn: of the same warp where one can run, else of another one; where none can and all that are alive
 * stand at the barrier, they may go on. NULL: all have ended. */
static Thread *next_thread(void) {
    const unsigned own = emulated_thread.x / LANES, lane = emulated_thread.x % LANES;
    if (grid.alive == 0) return NULL;
    if (grid.at_barrier == grid.alive) {
        for (unsigned w = 0; w < grid.warps; w++) warps[w].runnable = warps[w].alive;
        grid.at_barrier = 0;
    }
    unsigned warp = own;
    if (!warps[own].runnable) {
        const unsigned first = random_below(grid.warps);
        unsigned i = 0;
        while (i < grid.warps && !warps[(first + i) % grid.warps].runnable) i++;
        if (i == grid.warps) fail("a warp waits for lanes that have ended or stand at a barrier");
        warp = (first + i) % grid.warps;
    }
    const uint32_t runnable = warps[warp].runnable;
    const uint32_t after = lane + 1 < LANES ? runnable & ~(uint32_t)0 << (lane + 1) : 0;
    emulated_thread.x = warp * LANES + (unsigned)__builtin_ctz(after ? after : runnable);
    return &threads[emulated_thread.x];
}

/* This thread cannot go on now, or has ended. */
static void let_others_run(void) {
    Thread *self = &threads[emulated_thread.x], *next = next_thread();
    if (next != self) emulated_switch(&self->stack, next ? next->stack : launcher);
}

/* What is at the bottom of each thread's stack. */
static void thread_main(void) {
    grid.run(grid.job);
    Warp *warp = &warps[emulated_thread.x / LANES];
    const uint32_t bit = (uint32_t)1 << emulated_thread.x % LANES;
    if (threads[emulated_thread.x].n_copies > 0) fail("it ended before its copies have");
    warp->alive &= ~bit, warp->runnable &= ~bit;
    grid.alive--;
    let_others_run();
    abort(); /* nobody comes back */
}

static void run_block(unsigned block, unsigned count) {
    emulated_block.x = block;
    grid.alive = count, grid.at_barrier = 0, grid.warps = count / LANES;
    grid.late = (block + grid.launches) % 2 == 0;
    memset(shared, 0xff, grid.shared_bytes);
    for (unsigned i = 0; i < count; i++) {
        void **top = (void **)(void *)(stacks + (size_t)(i + 1) * STACK_BYTES);
        top[RETURN_WORD - FRAME_WORDS] = (void *)(uintptr_t)thread_main;
        threads[i].stack = top - FRAME_WORDS;
    }
    for (unsigned w = 0; w < grid.warps; w++)
        warps[w] = (Warp){.runnable = ~(uint32_t)0, .alive = ~(uint32_t)0};
    emulated_thread.x = random_below(count);
    emulated_switch(&launcher, threads[emulated_thread.x].stack);
}

void emulated_launch(const char *name, void (*run)(const void *job), const void *job, size_t blocks,
                     unsigned count, size_t shared_bytes) {
    if (!stacks) {
        stacks = aligned_alloc(64, (size_t)MOST_THREADS * STACK_BYTES),
        shared = aligned_alloc(1024, SHARED_BYTES);
        if (!stacks || !shared) printf("emulated: out of memory\n"), exit(1);
    }
    grid.name = name, grid.run = run, grid.job = job, grid.shared_bytes = shared_bytes;
    if (count % LANES != 0 || count > MOST_THREADS || shared_bytes > SHARED_BYTES || blocks > INT32_MAX)
        fail("no such launch");
    grid.random = ++grid.launches;
    for (size_t block = blocks - blocks / grid.parts; block < blocks; block++)
        run_block((unsigned)block, count);
}

void emulated_run_last(size_t parts) {
    grid.parts = parts;
}

/* ---- within a kernel ---- */
void emulated_meet(void (*together)(void *const operands[LANES]), void *operand) {
    Warp *warp = &warps[emulated_thread.x / LANES];
    const unsigned lane = emulated_thread.x % LANES;
    if (warp->waiting && warp->together != together)
        fail("the lanes of its warp are at different instructions");
    warp->together = together;
    warp->operands[lane] = operand;
    warp->waiting |= (uint32_t)1 << lane, warp->runnable &= ~((uint32_t)1 << lane);
    if (warp->waiting != ~(uint32_t)0) {
        let_others_run();
        return;
    }
    together(warp->operands);
    warp->runnable = warp->waiting, warp->waiting = 0;
}

void emulated_barrier(void) {
    Warp *warp = &warps[emulated_thread.x / LANES];
    warp->runnable &= ~((uint32_t)1 << emulated_thread.x % LANES);
    grid.at_barrier++;
    let_others_run();
}

unsigned emulated_shared_start(void) {
    return SHARED_START;
}

void *emulated_shared(unsigned at, size_t bytes) {
    if (at < SHARED_START || at - SHARED_START + bytes > grid.shared_bytes)
        fail("beyond the ends of shared memory");
    if (at % bytes != 0) fail("an address in shared memory that is no multiple of the access");
    return shared + (at - SHARED_START);
}

static void copy_now(unsigned to, const void *from) {
    uint8_t *at = emulated_shared(to, 16);
    if (from) memcpy(at, from, 16);
    else memset(at, 0, 16);
}

void emulated_copy(unsigned to, const void *from) {
    if ((uintptr_t)from % 16 != 0) fail("a copy from an address that is no multiple of 16");
    if (!grid.late) {
        copy_now(to, from);
        return;
    }
    Thread *self = &threads[emulated_thread.x];
    if (self->n_copies == self->most_copies) {
        self->most_copies = 2 * self->most_copies + 16;
        self->copies = xrealloc(self->copies, self->most_copies * sizeof *self->copies);
    }
    self->copies[self->n_copies++] = (Copy){to, from};
}

void emulated_wait(void) {
    Thread *self = &threads[emulated_thread.x];
    for (size_t i = 0; i < self->n_copies; i++) copy_now(self->copies[i].to, self->copies[i].from);
    self->n_copies = 0;
}

/* ---- cuda_stream.h ---- */
void cuda_fail(const char *what, const char *reason) {
    printf("emulated: %s: %s\n", what, reason);
    exit(1);
}

/* The table in fp16 alone; made anew for another head size, and for more positions than it has. */
Angles cuda_angles(Stream *stream, size_t positions, size_t half) {
    if (stream->angle_half != half || stream->angle_positions < positions) {
        const size_t count = (positions + ANGLE_ROWS - 1) / ANGLE_ROWS * ANGLE_ROWS;
        struct __half2 *table = xrealloc(stream->angles, count * half * sizeof *table);
        for (size_t i = 0; i < count * half; i++) {
            const double angle = (double)(i / half) * pow(10000.0, -(double)(i % half) / (double)half);
            table[i] = (struct __half2){half_bits((float)cos(angle)), half_bits((float)sin(angle))};
        }
        stream->angles = table, stream->angle_positions = count, stream->angle_half = half;
    }
    return (Angles){NULL, stream->angles};
}

/* A cache of one byte: blocks then come in the order of their heads, as emulated_run_last wants them. */
Stream *emulated_stream(void) {
    static Stream stream;
    stream.device.l2CacheSize = 1;
    stream.shared_bytes = SHARED_BYTES;
    return &stream;
}
