/* batches.c - the order of training windows, and a thread that reads them ahead (batches.h).
 *
 * The order is a keyed permutation of 0 .. W - 1 that is computed one element at a time: a Feistel network
 * over the smallest even number of bits that holds W, applied again while its result is not below W
 * ("cycle walking": Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). A Feistel network is
 * a bijection whatever its round function, and walking along a bijection's cycle until it is back below W
 * is one again; the domain is at most 4 W (64 for the smallest W), so the walk is short. No table of W entries is kept, saved
 * with a checkpoint or sent to other ranks: any rank finds any step's windows from the seed alone. */
#include "batches.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { ROUNDS = 8 };           /* more than the 4 that theory asks for, since small W have few bits */
enum { MIN_HALF_BITS = 3 };    /* a half of fewer bits mixes too little */
enum { READ_AHEAD_CALLS = 2 }; /* so many calls' sequences are held ready */

/* One sequence, read ahead. */
typedef struct Slot {
    uint32_t *ids; /* (T + 1), inside Batches.ring */
    bool ok;
    Error error;
} Slot;

struct Batches {
    Shards *shards;
    size_t T;
    uint64_t seed, windows;
    bool shuffle;
    unsigned half_bits; /* of the permutation's domain of 2^(2 half_bits) */
    uint32_t *row;      /* (T + 1): for direct reads */

    /* Reading ahead: sequence number n of those that will be asked for (ahead_sequence) is slots[n %
     * slot_count]; n < used were handed out, n < filled are ready. Under lock, but a slot's contents belong
     * to the thread while filled <= n and to the caller afterwards. */
    bool reading_ahead;
    uint64_t first, stride;
    size_t rows;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t filled_one, used_one;
    uint64_t filled, used;
    bool closing;
    Slot *slots; /* (slot_count) */
    size_t slot_count;
    uint32_t *ring; /* (slot_count, T + 1) */
};

Batches *batches_open(Shards *shards, size_t T, uint64_t seed, bool shuffle, Error *err) {
    const uint64_t tokens = shards_tokens(shards);
    if (T < 1 || tokens <= T) {
        error_set(err,
                  "there are %" PRIu64 " tokens, but one sequence of %zu needs %zu (its targets are one "
                  "further); give more text or lower -ctx",
                  tokens, T, T + 1);
        return NULL;
    }
    Batches *b = (Batches *)xcalloc(1, sizeof *b);
    b->shards = shards, b->T = T, b->seed = seed, b->shuffle = shuffle;
    b->windows = (tokens - 1) / T;
    b->half_bits = MIN_HALF_BITS;
    while (b->half_bits < 32 && (b->windows - 1) >> (2 * b->half_bits)) b->half_bits++;
    b->row = (uint32_t *)xmalloc((T + 1) * sizeof *b->row);
    return b;
}

uint64_t batches_windows(const Batches *b) {
    return b->windows;
}

uint64_t batches_window(const Batches *b, uint64_t g) {
    const uint64_t index = g % b->windows;
    if (!b->shuffle) return index;
    const uint64_t key = mix64(b->seed, g / b->windows), mask = (1ull << b->half_bits) - 1;
    uint64_t x = index;
    do {
        uint64_t left = x >> b->half_bits, right = x & mask;
        for (uint64_t round = 0; round < ROUNDS; round++) {
            const uint64_t next = left ^ (mix64(mix64(key, round), right) & mask);
            left = right, right = next;
        }
        x = left << b->half_bits | right;
    } while (x >= b->windows);
    return x;
}

static bool read_sequence(const Batches *b, uint64_t g, uint32_t *ids, Error *err) {
    return shards_read(b->shards, batches_window(b, g) * b->T, b->T + 1, ids, err);
}

/* ---- reading ahead ---- */

static uint64_t ahead_sequence(const Batches *b, uint64_t n) {
    return b->first + n / b->rows * b->stride + n % b->rows;
}

static void *read_ahead_thread(void *argument) {
    Batches *b = (Batches *)argument;
    pthread_mutex_lock(&b->lock);
    while (!b->closing) {
        if (b->filled - b->used == b->slot_count) {
            pthread_cond_wait(&b->used_one, &b->lock);
            continue;
        }
        Slot *slot = &b->slots[b->filled % b->slot_count];
        const uint64_t g = ahead_sequence(b, b->filled);
        pthread_mutex_unlock(&b->lock);
        slot->ok = read_sequence(b, g, slot->ids, &slot->error);
        pthread_mutex_lock(&b->lock);
        b->filled++;
        pthread_cond_signal(&b->filled_one);
    }
    pthread_mutex_unlock(&b->lock);
    return NULL;
}

static void ring_free(Batches *b) {
    free(b->ring);
    free(b->slots);
    b->ring = NULL, b->slots = NULL;
}

static void read_ahead_stop(Batches *b) {
    if (!b->reading_ahead) return;
    pthread_mutex_lock(&b->lock);
    b->closing = true;
    pthread_cond_signal(&b->used_one);
    pthread_mutex_unlock(&b->lock);
    pthread_join(b->thread, NULL);
    pthread_cond_destroy(&b->used_one);
    pthread_cond_destroy(&b->filled_one);
    pthread_mutex_destroy(&b->lock);
    ring_free(b);
    b->reading_ahead = false;
}

void batches_read_ahead(Batches *b, uint64_t first, size_t rows, uint64_t stride) {
    read_ahead_stop(b);
    size_t slots, ids, size;
    /* A size past all memory, or no thread to be had: batches_get then reads directly, only slower. */
    if (rows == 0 || !size_mul(rows, READ_AHEAD_CALLS, &slots) || !size_mul(slots, b->T + 1, &ids) ||
        !size_mul(ids, sizeof(uint32_t), &size))
        return;
    b->first = first, b->rows = rows, b->stride = stride;
    b->filled = b->used = 0;
    b->closing = false;
    b->slot_count = slots;
    b->slots = (Slot *)xcalloc(slots, sizeof *b->slots);
    b->ring = (uint32_t *)xmalloc(size);
    for (size_t i = 0; i < slots; i++) b->slots[i].ids = b->ring + i * (b->T + 1);
    pthread_mutex_init(&b->lock, NULL);
    pthread_cond_init(&b->filled_one, NULL);
    pthread_cond_init(&b->used_one, NULL);
    b->reading_ahead = pthread_create(&b->thread, NULL, read_ahead_thread, b) == 0;
    if (!b->reading_ahead) ring_free(b);
}

/* Are sequences first .. first + rows - 1 the next ones of those that are read ahead? */
static bool is_read_ahead(const Batches *b, uint64_t first, size_t rows) {
    return b->reading_ahead && rows > 0 && rows <= b->slot_count && first == ahead_sequence(b, b->used) &&
           first + rows - 1 == ahead_sequence(b, b->used + rows - 1);
}

void batches_close(Batches *b) {
    if (!b) return;
    read_ahead_stop(b);
    free(b->row);
    free(b);
}

/* ids (T + 1) to inputs (T) and targets (T), one further. */
static void split_sequence(const uint32_t *ids, size_t T, int32_t *inputs, int32_t *targets) {
    for (size_t t = 0; t < T; t++) inputs[t] = (int32_t)ids[t], targets[t] = (int32_t)ids[t + 1];
}

bool batches_get(Batches *b, uint64_t first, size_t rows, int32_t *inputs, int32_t *targets, Error *err) {
    const size_t T = b->T;
    const bool ahead = is_read_ahead(b, first, rows);
    bool ok = true;
    for (size_t row = 0; row < rows; row++, inputs += T, targets += T) {
        if (ahead) {
            pthread_mutex_lock(&b->lock);
            while (b->filled == b->used) pthread_cond_wait(&b->filled_one, &b->lock);
            pthread_mutex_unlock(&b->lock);
            const Slot *slot = &b->slots[b->used % b->slot_count];
            if (ok && !slot->ok) ok = error_set(err, "%s", slot->error.text);
            if (ok) split_sequence(slot->ids, T, inputs, targets);
            pthread_mutex_lock(&b->lock);
            b->used++; /* after an error too: the next call finds the next sequences */
            pthread_cond_signal(&b->used_one);
            pthread_mutex_unlock(&b->lock);
        } else {
            ok = ok && read_sequence(b, first + row, b->row, err);
            if (ok) split_sequence(b->row, T, inputs, targets);
        }
    }
    return ok;
}
