/* bpe_train.c - learns the merges from text.
 *
 * 1. Counting. Text is cut into blocks at places where a piece is known to begin, and threads split the
 *    blocks and count words, each in a table of its own; the caller's thread takes blocks too when the
 *    others cannot keep up. What is remembered is each distinct word and its count.
 * 2. Merging. The words stand one after another in one array of symbols, and every pair of neighbours has
 *    its count (each word's occurrences times the word's count) and a list of its places. A heap gives the
 *    pair with the highest count. Merging it touches only its places and their neighbours: counts of old
 *    pairs go down, and all pairs that appear hold the new symbol. So a pair's count only ever falls
 *    after the merge that made it: an entry of the heap may be too high, never too low, and it is enough
 *    to look at the true count when it comes up, and put it back if it was too high. For the same reason
 *    a list of places is complete once made. Some may be stale, which the symbols there tell.
 *
 * The result is a function of the words and their counts alone, since the order of pairs (count, then
 * bytes) has no ties: two pairs never have the same bytes on both sides, for no two tokens have the same
 * bytes. (Where a token's bytes stand between two boundaries, no merge so far has crossed these, so they
 * were merged as they are everywhere else.) Hence threads, blocks and pieces cannot change it. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "bpe.h"
#include "bpe_internal.h"
#include "pretokenize.h"

/* ---- word counts ---- */

/* A word and its count. A word too long for its key is in the table's long_words instead, its length (a
 * uint64_t) before it: then key.low is a hash of it, and key.high is LONG_WORD with its offset there. */
typedef struct WordSlot {
    WordKey key;
    uint64_t count; /* 0: free */
} WordSlot;

#define LONG_WORD ((uint64_t)0xFF << 56)

typedef struct WordTable {
    WordSlot *slots; /* (1 << log_slots), open addressing, at most half full */
    unsigned log_slots;
    size_t words;
    Buffer long_words;
} WordTable;

static void table_begin(WordTable *table) {
    *table = (WordTable){.log_slots = 12};
    table->slots = xcalloc((size_t)1 << table->log_slots, sizeof(*table->slots));
}

static void table_free(WordTable *table) {
    free(table->slots);
    buffer_free(&table->long_words);
}

static bool is_long(WordKey key) {
    return key.high >= LONG_WORD;
}

static uint64_t key_hash(WordKey key) {
    return is_long(key) ? key.low : word_hash(key);
}

/* A word's bytes, from its slot. */
static const uint8_t *word_bytes(const WordTable *table, const WordSlot *slot, size_t *size) {
    if (!is_long(slot->key)) {
        *size = (size_t)(slot->key.high >> 56);
        return (const uint8_t *)&slot->key;
    }
    const uint8_t *stored = table->long_words.data + (slot->key.high & ~LONG_WORD);
    uint64_t length;
    memcpy(&length, stored, sizeof(length));
    *size = (size_t)length;
    return stored + sizeof(length);
}

static void table_grow(WordTable *table) {
    WordSlot *old = table->slots;
    const size_t old_slots = (size_t)1 << table->log_slots++, mask = 2 * old_slots - 1;
    table->slots = xcalloc(2 * old_slots, sizeof(*table->slots));
    for (size_t i = 0; i < old_slots; i++) {
        if (old[i].count == 0) continue;
        size_t to = key_hash(old[i].key) >> (64 - table->log_slots);
        while (table->slots[to].count != 0) to = (to + 1) & mask;
        table->slots[to] = old[i];
    }
    free(old);
}

static void new_word(WordTable *table, WordSlot *slot, WordKey key, uint64_t count) {
    slot->key = key;
    slot->count = count;
    if (++table->words > (size_t)1 << (table->log_slots - 1)) table_grow(table);
}

static inline void add_short_word(WordTable *table, WordKey key, uint64_t count) {
    const size_t mask = ((size_t)1 << table->log_slots) - 1;
    for (size_t i = word_hash(key) >> (64 - table->log_slots);; i = (i + 1) & mask) {
        WordSlot *slot = &table->slots[i];
        if (slot->key.low == key.low && slot->key.high == key.high) {
            slot->count += count;
            return;
        }
        if (slot->count == 0) {
            new_word(table, slot, key, count);
            return;
        }
    }
}

static void add_long_word(WordTable *table, const uint8_t *word, size_t size, uint64_t count) {
    const uint64_t hash = bytes_hash(word, size);
    const size_t mask = ((size_t)1 << table->log_slots) - 1;
    size_t i = hash >> (64 - table->log_slots);
    for (; table->slots[i].count != 0; i = (i + 1) & mask) {
        WordSlot *slot = &table->slots[i];
        if (!is_long(slot->key) || slot->key.low != hash) continue;
        size_t stored_size;
        const uint8_t *stored = word_bytes(table, slot, &stored_size);
        if (stored_size != size || memcmp(stored, word, size) != 0) continue;
        slot->count += count;
        return;
    }
    const WordKey key = {hash, LONG_WORD | table->long_words.size};
    const uint64_t length = size;
    buffer_append(&table->long_words, &length, sizeof(length));
    buffer_append(&table->long_words, word, size);
    new_word(table, &table->slots[i], key, count);
}

/* Counts the words of a text that begins and ends where pieces do. */
static void count_words(WordTable *table, const uint8_t *text, size_t size) {
    for (size_t at = 0, length; at < size; at += length) {
        length = pretokenize_next(text + at, size - at, false);
        if (length <= WORD_KEY_BYTES) add_short_word(table, word_key(text + at, length, size - at), 1);
        else add_long_word(table, text + at, length, 1);
    }
}

/* ---- threads ---- */

enum { BLOCK_BYTES = 1 << 18 };

/* A stretch of text that begins and ends where pieces do, and where stories end in it. */
typedef struct Block {
    struct Block *next;
    Buffer text;
    size_t *ends, end_count, end_capacity;
} Block;

typedef struct Worker {
    BpeTrainer *trainer;
    pthread_t thread;
    WordTable table;
} Worker;

struct BpeTrainer {
    WordTable table; /* of the caller's thread; the workers' are added to it in the end */
    Worker *workers; /* beside the caller's thread */
    size_t worker_count;
    Block *current;    /* being filled */
    size_t block_size; /* when it is full */
    /* Shared, under the lock. */
    pthread_mutex_t lock;
    pthread_cond_t ready_changed, idle_changed;
    Block *ready, *idle; /* full blocks; empty ones */
    size_t counting;     /* blocks that workers have in hand */
    bool closing;
};

static void count_block(WordTable *table, Block *block) {
    size_t begin = 0;
    for (size_t i = 0; i < block->end_count; i++) {
        count_words(table, block->text.data + begin, block->ends[i] - begin);
        begin = block->ends[i];
    }
    count_words(table, block->text.data + begin, block->text.size - begin);
    block->text.size = block->end_count = 0;
}

static Block *pop_block(Block **list) {
    Block *block = *list;
    if (block) *list = block->next;
    return block;
}

static void push_block(Block **list, Block *block) {
    block->next = *list;
    *list = block;
}

static void *work(void *argument) {
    Worker *worker = argument;
    BpeTrainer *trainer = worker->trainer;
    pthread_mutex_lock(&trainer->lock);
    for (;;) {
        while (!trainer->ready && !trainer->closing)
            pthread_cond_wait(&trainer->ready_changed, &trainer->lock);
        if (trainer->closing) break;
        Block *block = pop_block(&trainer->ready);
        trainer->counting++;
        pthread_mutex_unlock(&trainer->lock);
        count_block(&worker->table, block);
        pthread_mutex_lock(&trainer->lock);
        trainer->counting--;
        push_block(&trainer->idle, block);
        pthread_cond_signal(&trainer->idle_changed);
    }
    pthread_mutex_unlock(&trainer->lock);
    return NULL;
}

static void free_blocks(Block *block) {
    while (block) {
        Block *next = block->next;
        buffer_free(&block->text);
        free(block->ends);
        free(block);
        block = next;
    }
}

BpeTrainer *bpe_trainer_new(int threads) {
    BpeTrainer *trainer = xcalloc(1, sizeof(*trainer));
    pthread_mutex_init(&trainer->lock, NULL);
    pthread_cond_init(&trainer->ready_changed, NULL);
    pthread_cond_init(&trainer->idle_changed, NULL);
    table_begin(&trainer->table);
    trainer->block_size = BLOCK_BYTES;
    trainer->current = xcalloc(1, sizeof(Block));
    const size_t wanted = threads > 1 ? (size_t)threads - 1 : 0;
    trainer->workers = xcalloc(wanted + 1, sizeof(*trainer->workers));
    for (size_t i = 0; i < 2 * wanted + 1; i++) push_block(&trainer->idle, xcalloc(1, sizeof(Block)));
    for (size_t i = 0; i < wanted; i++) {
        Worker *worker = &trainer->workers[i];
        worker->trainer = trainer;
        table_begin(&worker->table);
        /* Where the system gives no more threads, those that there are do. */
        if (pthread_create(&worker->thread, NULL, work, worker) != 0) {
            table_free(&worker->table);
            break;
        }
        trainer->worker_count++;
    }
    return trainer;
}

void bpe_trainer_free(BpeTrainer *trainer) {
    if (!trainer) return;
    pthread_mutex_lock(&trainer->lock);
    trainer->closing = true;
    pthread_cond_broadcast(&trainer->ready_changed);
    pthread_mutex_unlock(&trainer->lock);
    for (size_t i = 0; i < trainer->worker_count; i++) {
        pthread_join(trainer->workers[i].thread, NULL);
        table_free(&trainer->workers[i].table);
    }
    free(trainer->workers);
    push_block(&trainer->idle, trainer->current);
    free_blocks(trainer->ready);
    free_blocks(trainer->idle);
    table_free(&trainer->table);
    pthread_mutex_destroy(&trainer->lock);
    pthread_cond_destroy(&trainer->ready_changed);
    pthread_cond_destroy(&trainer->idle_changed);
    free(trainer);
}

/* Takes a block from the full ones and counts it, or waits for a worker to finish one. With the lock held. */
static void help_or_wait(BpeTrainer *trainer) {
    Block *block = pop_block(&trainer->ready);
    if (!block) {
        pthread_cond_wait(&trainer->idle_changed, &trainer->lock);
        return;
    }
    pthread_mutex_unlock(&trainer->lock);
    count_block(&trainer->table, block);
    pthread_mutex_lock(&trainer->lock);
    push_block(&trainer->idle, block);
}

/* Gives the current block to whoever counts it next and goes on in an empty one, which begins with what
 * stands behind `cut`. */
static void hand_out(BpeTrainer *trainer, size_t cut) {
    Block *full = trainer->current;
    pthread_mutex_lock(&trainer->lock);
    while (!trainer->idle) help_or_wait(trainer);
    Block *next = trainer->current = pop_block(&trainer->idle);
    buffer_append(&next->text, full->text.data + cut, full->text.size - cut);
    full->text.size = cut;
    push_block(&trainer->ready, full);
    pthread_cond_signal(&trainer->ready_changed);
    pthread_mutex_unlock(&trainer->lock);
    trainer->block_size = BLOCK_BYTES + 2 * next->text.size;
}

/* Where to cut a block whose last story, from `begin` on, goes on behind it: the last place where a piece
 * is known to begin, or `begin`. White space after a character that is none always begins a piece, and
 * for ASCII two bytes show it. Text without such a place is split from the beginning. */
static size_t last_cut(const Block *block, size_t begin) {
    const uint8_t *text = block->text.data;
    for (size_t at = block->text.size; at > begin + 1; at--) {
        const uint8_t here = text[at - 1], before = text[at - 2];
        if ((here == ' ' || here == '\n') && before > ' ' && before < 0x7F) return at - 1;
    }
    size_t at = begin, length = 0;
    do {
        at += length;
        length = at < block->text.size ? pretokenize_next(text + at, block->text.size - at, true) : 0;
    } while (length > 0);
    return at;
}

void bpe_trainer_feed(BpeTrainer *trainer, const uint8_t *bytes, size_t size) {
    while (size > 0) {
        Block *block = trainer->current;
        const size_t room = trainer->block_size - block->text.size, take = size < room ? size : room;
        buffer_append(&block->text, bytes, take);
        bytes += take, size -= take;
        if (block->text.size < trainer->block_size) continue;
        const size_t cut = last_cut(block, block->end_count ? block->ends[block->end_count - 1] : 0);
        if (cut > 0) hand_out(trainer, cut);
        else trainer->block_size *= 2; /* one piece, as far as can be seen */
    }
}

void bpe_trainer_end_story(BpeTrainer *trainer) {
    Block *block = trainer->current;
    const size_t end = block->text.size;
    if (end == (block->end_count ? block->ends[block->end_count - 1] : 0)) return;
    if (block->end_count == block->end_capacity) {
        block->end_capacity = block->end_capacity ? 2 * block->end_capacity : 256;
        block->ends = xrealloc(block->ends, block->end_capacity * sizeof(*block->ends));
    }
    block->ends[block->end_count++] = end;
}

/* Counts what is left and adds all tables to the trainer's. */
static void finish_counting(BpeTrainer *trainer) {
    if (trainer->current->text.size > 0) hand_out(trainer, trainer->current->text.size);
    pthread_mutex_lock(&trainer->lock);
    while (trainer->ready || trainer->counting > 0) help_or_wait(trainer);
    pthread_mutex_unlock(&trainer->lock);
    for (size_t i = 0; i < trainer->worker_count; i++) {
        WordTable *from = &trainer->workers[i].table;
        /* Its slots are in the order of hashes: a smaller table would fill up at one end. */
        while (trainer->table.log_slots < from->log_slots) table_grow(&trainer->table);
        for (size_t slot = 0; slot < (size_t)1 << from->log_slots; slot++) {
            const WordSlot *word = &from->slots[slot];
            if (word->count == 0) continue;
            size_t size;
            const uint8_t *bytes = word_bytes(from, word, &size);
            if (is_long(word->key)) add_long_word(&trainer->table, bytes, size, word->count);
            else add_short_word(&trainer->table, word->key, word->count);
        }
        table_free(from);
        table_begin(from);
    }
}

/* ---- merging ---- */

enum { NO_SYMBOL = UINT16_MAX }; /* where no symbol begins; ids of merges end at 65,534 */
#define NO_PAIR UINT32_MAX

typedef struct Pair {
    int64_t count;
    uint32_t first, end; /* its places: places[first .. end), ascending */
    uint16_t left, right;
} Pair;

/* A byte of a word. A symbol that covers cells [at, at + n) has its id in the first of them, and n in the
 * first and the last, so that its neighbours on both sides are found without links. */
typedef struct Cell {
    uint32_t word; /* which word it is in */
    uint32_t length;
    uint16_t symbol;
} Cell;

typedef struct NewPlace {
    uint32_t pair, at;
} NewPlace;

typedef struct HeapEntry {
    int64_t count; /* of the pair when it was put in: now it may be less */
    uint32_t pair;
} HeapEntry;

typedef struct Merger {
    Bpe *bpe;
    uint64_t prefix[BPE_MAX_VOCAB]; /* a token's first eight bytes, to be compared as one number */

    Cell *cells;     /* (N): all distinct words of two bytes or more, one after another */
    int64_t *weight; /* (words): how often each occurs */
    uint32_t size;   /* N */

    Pair *pairs;
    uint32_t pair_count, pair_capacity;
    uint64_t
        *slots; /* those that are not new, by ids: (left << 16 | right) << 32 | (pair + 1), 0 where free */
    unsigned log_slots;
    HeapEntry *heap;
    size_t heap_count, heap_capacity;

    uint32_t *places; /* of all pairs: where their left symbols begin */
    size_t place_count, place_capacity;

    /* The merge under way. Its pairs hold its new symbol, and are found by the other one. */
    uint32_t new_id, first_new_pair;
    uint32_t before[BPE_MAX_VOCAB], after[BPE_MAX_VOCAB]; /* (x, new_id) and (new_id, x), or NO_PAIR */
    NewPlace *new_places;                                 /* in the order in which they were found */
    size_t new_place_count, new_place_capacity;
} Merger;

/* Order of tokens by their bytes, a beginning before what goes on. */
static int compare_tokens(const Merger *merger, uint32_t a, uint32_t b) {
    if (merger->prefix[a] != merger->prefix[b]) return merger->prefix[a] < merger->prefix[b] ? -1 : 1;
    size_t a_size, b_size;
    const uint8_t *a_bytes = bpe_token_bytes(merger->bpe, a, &a_size);
    const uint8_t *b_bytes = bpe_token_bytes(merger->bpe, b, &b_size);
    const int order = memcmp(a_bytes, b_bytes, a_size < b_size ? a_size : b_size);
    return order ? order : (a_size > b_size) - (a_size < b_size);
}

static void set_prefix(Merger *merger, uint32_t id) {
    size_t size;
    const uint8_t *bytes = bpe_token_bytes(merger->bpe, id, &size);
    uint64_t prefix = 0;
    for (size_t i = 0; i < 8; i++) prefix = prefix << 8 | (i < size ? bytes[i] : 0);
    merger->prefix[id] = prefix;
}

/* Whether a is to be merged before b. */
static bool comes_first(const Merger *merger, HeapEntry a, HeapEntry b) {
    if (a.count != b.count) return a.count > b.count;
    const Pair *x = &merger->pairs[a.pair], *y = &merger->pairs[b.pair];
    if (x->left != y->left) return compare_tokens(merger, x->left, y->left) > 0;
    return x->right != y->right && compare_tokens(merger, x->right, y->right) > 0;
}

static void heap_sink(Merger *merger, size_t at) {
    const HeapEntry entry = merger->heap[at];
    for (size_t child; (child = 2 * at + 1) < merger->heap_count; at = child) {
        if (child + 1 < merger->heap_count &&
            comes_first(merger, merger->heap[child + 1], merger->heap[child]))
            child++;
        if (!comes_first(merger, merger->heap[child], entry)) break;
        merger->heap[at] = merger->heap[child];
    }
    merger->heap[at] = entry;
}

static void heap_push(Merger *merger, uint32_t pair) {
    if (merger->heap_count == merger->heap_capacity) {
        merger->heap_capacity = merger->heap_capacity ? 2 * merger->heap_capacity : 4096;
        merger->heap = xrealloc(merger->heap, merger->heap_capacity * sizeof(*merger->heap));
    }
    const HeapEntry entry = {merger->pairs[pair].count, pair};
    size_t at = merger->heap_count++;
    for (size_t parent; at > 0; at = parent) {
        parent = (at - 1) / 2;
        if (!comes_first(merger, entry, merger->heap[parent])) break;
        merger->heap[at] = merger->heap[parent];
    }
    merger->heap[at] = entry;
}

/* Takes the pair that is to be merged next, or NO_PAIR. */
static uint32_t heap_take(Merger *merger) {
    while (merger->heap_count > 0) {
        HeapEntry *top = &merger->heap[0];
        const uint32_t pair = top->pair;
        const int64_t count = merger->pairs[pair].count;
        const bool exact = top->count == count;
        if (exact || count == 0) *top = merger->heap[--merger->heap_count];
        else top->count = count;
        if (merger->heap_count > 0) heap_sink(merger, 0);
        if (exact) return pair;
    }
    return NO_PAIR;
}

/* The slot of a pair, or the free one where it belongs. */
static uint64_t *find_slot(const Merger *merger, uint32_t key) {
    const size_t mask = ((size_t)1 << merger->log_slots) - 1;
    size_t i = (key * 0x9E3779B97F4A7C15u) >> (64 - merger->log_slots);
    while (merger->slots[i] != 0 && merger->slots[i] >> 32 != key) i = (i + 1) & mask;
    return &merger->slots[i];
}

static uint32_t pair_key(const Pair *pair) {
    return (uint32_t)pair->left << 16 | pair->right;
}

static void remember_pair(Merger *merger, uint32_t pair) {
    if (pair >= (size_t)1 << (merger->log_slots - 1)) { /* more than half full: make it twice as large */
        free(merger->slots);
        merger->log_slots++;
        merger->slots = xcalloc((size_t)1 << merger->log_slots, sizeof(*merger->slots));
        for (uint32_t i = 0; i < pair; i++) {
            const uint32_t key = pair_key(&merger->pairs[i]);
            *find_slot(merger, key) = (uint64_t)key << 32 | (i + 1);
        }
    }
    const uint32_t key = pair_key(&merger->pairs[pair]);
    *find_slot(merger, key) = (uint64_t)key << 32 | (pair + 1);
}

static uint32_t new_pair(Merger *merger, uint32_t left, uint32_t right) {
    if (merger->pair_count == merger->pair_capacity) {
        merger->pair_capacity = merger->pair_capacity ? 2 * merger->pair_capacity : 4096;
        merger->pairs = xrealloc(merger->pairs, merger->pair_capacity * sizeof(*merger->pairs));
    }
    merger->pairs[merger->pair_count] = (Pair){.left = (uint16_t)left, .right = (uint16_t)right};
    return merger->pair_count++;
}

/* The pair (left, right), of which one is new_id. */
static uint32_t find_new_pair(Merger *merger, uint32_t left, uint32_t right) {
    uint32_t *entry = left == merger->new_id ? &merger->after[right] : &merger->before[left];
    if (*entry == NO_PAIR) *entry = new_pair(merger, left, right);
    return *entry;
}

/* The pair, which is new, has one more place, `at`, in a word of that weight. */
static void gain(Merger *merger, uint32_t pair, uint32_t at, int64_t weight) {
    if (merger->new_place_count == merger->new_place_capacity) {
        merger->new_place_capacity = merger->new_place_capacity ? 2 * merger->new_place_capacity : 4096;
        merger->new_places = xrealloc(merger->new_places,
                                      merger->new_place_capacity * sizeof(*merger->new_places));
    }
    merger->new_places[merger->new_place_count++] = (NewPlace){pair, at};
    merger->pairs[pair].end++; /* their number, until they are filed */
    merger->pairs[pair].count += weight;
}

/* A pair has one place less. Its list keeps it: there is no need to search for it now. */
static void lose(Merger *merger, uint32_t left, uint32_t right, int64_t weight) {
    const bool is_new = left == merger->new_id || right == merger->new_id;
    const uint32_t key = left << 16 | right;
    const uint32_t pair = is_new ? find_new_pair(merger, left, right) : (uint32_t)*find_slot(merger, key) - 1;
    merger->pairs[pair].count -= weight;
}

/* Sorts the new places by pair, and puts the new pairs into the heap. */
static void file_new_pairs(Merger *merger) {
    if (merger->place_capacity - merger->place_count < merger->new_place_count) {
        merger->place_capacity = 2 * merger->place_capacity + merger->new_place_count;
        merger->places = xrealloc(merger->places, merger->place_capacity * sizeof(*merger->places));
    }
    for (uint32_t i = merger->first_new_pair; i < merger->pair_count; i++) {
        Pair *pair = &merger->pairs[i];
        const uint32_t places = pair->end;
        pair->first = pair->end = (uint32_t)merger->place_count;
        merger->place_count += places;
        if (pair->count > 0) heap_push(merger, i);
    }
    for (size_t i = 0; i < merger->new_place_count; i++) {
        const NewPlace place = merger->new_places[i];
        merger->places[merger->pairs[place.pair].end++] = place.at;
    }
    merger->new_place_count = 0;
    merger->first_new_pair = merger->pair_count;
}

/* Merges (left, right) at one place, if it still is there. While the left symbol has not been merged with
 * another, its word still has a symbol to its right. */
static void merge_place(Merger *merger, uint32_t left, uint32_t right, uint32_t at) {
    Cell *cells = merger->cells;
    if (cells[at].symbol != left) return;
    const uint32_t middle = at + cells[at].length;
    if (cells[middle].symbol != right) return;
    const uint32_t end = middle + cells[middle].length, id = merger->new_id, word = cells[at].word;
    const int64_t weight = merger->weight[word];
    cells[middle].symbol = NO_SYMBOL;
    cells[at].symbol = (uint16_t)id;
    cells[at].length = cells[end - 1].length = end - at;
    if (at > 0 && cells[at - 1].word == word) {
        const uint32_t before = at - cells[at - 1].length, symbol = cells[before].symbol;
        lose(merger, symbol, left, weight);
        gain(merger, find_new_pair(merger, symbol, id), before, weight);
    }
    if (end < merger->size && cells[end].word == word) {
        const uint32_t symbol = cells[end].symbol;
        lose(merger, right, symbol, weight);
        gain(merger, find_new_pair(merger, id, symbol), at, weight);
    }
}

/* Merges a pair everywhere. */
static void merge_pair(Merger *merger, uint32_t index) {
    const Pair pair = merger->pairs[index];
    bpe_build_add(merger->bpe, pair.left, pair.right);
    merger->new_id = BPE_BYTES + merger->bpe->merges - 1;
    set_prefix(merger, merger->new_id);

    /* From left to right, since in "aaa" the places overlap; and so the new places are ascending too. They
     * are far apart in memory where there are many words, so they are asked for ahead of time. */
    const uint32_t ahead = 16;
    for (uint32_t i = pair.first; i < pair.end; i++) {
        if (i + ahead < pair.end) __builtin_prefetch(&merger->cells[merger->places[i + ahead]], 1);
        merge_place(merger, pair.left, pair.right, merger->places[i]);
    }
    for (uint32_t i = merger->first_new_pair; i < merger->pair_count; i++) {
        merger->after[merger->pairs[i].right] = merger->before[merger->pairs[i].left] = NO_PAIR;
        remember_pair(merger, i);
    }
    file_new_pairs(merger);
}

/* Distinct words' bytes, so that 32 bits number all places: fewer than N at first, and each time that two
 * symbols become one, of fewer than N times, two more. */
enum { MAX_WORD_BYTES = 1 << 30 };

/* Lays out the words and counts their pairs. */
static bool merger_begin(Merger *merger, const WordTable *table, Error *err) {
    const size_t slots = (size_t)1 << table->log_slots;
    size_t total = 0, words = 0, size;
    for (size_t i = 0; i < slots; i++) {
        if (table->slots[i].count == 0) continue;
        word_bytes(table, &table->slots[i], &size);
        if (size >= 2) total += size, words++;
    }
    if (total > MAX_WORD_BYTES)
        return error_set(err,
                         "training the tokenizer: the distinct words of the text hold %zu bytes; expected at "
                         "most %d (train on a part of the text)",
                         total, MAX_WORD_BYTES);

    merger->size = (uint32_t)total;
    merger->cells = xmalloc(total * sizeof(*merger->cells));
    merger->weight = xmalloc(words * sizeof(*merger->weight));
    merger->log_slots = 12;
    merger->slots = xcalloc((size_t)1 << merger->log_slots, sizeof(*merger->slots));
    for (uint32_t id = 0; id < BPE_MAX_VOCAB; id++) merger->before[id] = merger->after[id] = NO_PAIR;
    for (uint32_t id = 0; id < BPE_BYTES; id++) set_prefix(merger, id);

    uint32_t at = 0, word = 0;
    for (size_t i = 0; i < slots; i++) {
        if (table->slots[i].count == 0) continue;
        const uint8_t *bytes = word_bytes(table, &table->slots[i], &size);
        if (size < 2) continue;
        const int64_t weight = merger->weight[word] = (int64_t)table->slots[i].count;
        for (size_t k = 0; k < size; k++, at++) {
            merger->cells[at] = (Cell){word, 1, merger->bpe->byte_to_id[bytes[k]]};
            if (k == 0) continue;
            const uint32_t left = merger->cells[at - 1].symbol, right = merger->cells[at].symbol;
            const uint64_t slot = *find_slot(merger, left << 16 | right);
            uint32_t pair = (uint32_t)slot - 1;
            if (slot == 0) {
                pair = new_pair(merger, left, right);
                remember_pair(merger, pair);
            }
            gain(merger, pair, at - 1, weight);
        }
        word++;
    }
    file_new_pairs(merger);
    free(merger->new_places); /* these were all places; no merge has as many */
    merger->new_places = NULL;
    merger->new_place_capacity = 0;
    return true;
}

static void merger_free(Merger *merger) {
    free(merger->cells);
    free(merger->weight);
    free(merger->pairs);
    free(merger->slots);
    free(merger->heap);
    free(merger->places);
    free(merger->new_places);
    free(merger);
}

static bool merge_all(Merger *merger, uint32_t vocab, Error *err) {
    Progress progress;
    progress_begin(&progress, "training the tokenizer", vocab - BPE_MIN_VOCAB, PROGRESS_COUNT);
    while (merger->bpe->merges < vocab - BPE_MIN_VOCAB) {
        if (stop_requested()) {
            progress_end(&progress);
            return error_set(err, "training the tokenizer: stopped after %u of %u merges by a signal",
                             merger->bpe->merges, vocab - BPE_MIN_VOCAB);
        }
        const uint32_t pair = heap_take(merger);
        if (pair == NO_PAIR) break;
        size_t left_size, right_size;
        bpe_token_bytes(merger->bpe, merger->pairs[pair].left, &left_size);
        bpe_token_bytes(merger->bpe, merger->pairs[pair].right, &right_size);
        if (left_size + right_size > BPE_MAX_TOKEN_BYTES - merger->bpe->bytes.size) break;
        merge_pair(merger, pair);
        progress_update(&progress, merger->bpe->merges);
    }
    progress_end(&progress);
    return true;
}

Bpe *bpe_trainer_train(BpeTrainer *trainer, uint32_t vocab, Error *err) {
    if (vocab < BPE_MIN_VOCAB || vocab > BPE_MAX_VOCAB) {
        error_set(err, "training the tokenizer: a vocabulary of %u; expected %d to %d", vocab, BPE_MIN_VOCAB,
                  BPE_MAX_VOCAB);
        return NULL;
    }
    finish_counting(trainer);
    Merger *merger = xcalloc(1, sizeof(*merger));
    merger->bpe = bpe_build_begin();
    Bpe *bpe = NULL;
    if (merger_begin(merger, &trainer->table, err) && merge_all(merger, vocab, err)) {
        bpe = merger->bpe;
        bpe_build_finish(bpe);
    } else {
        bpe_free(merger->bpe);
    }
    merger_free(merger);
    return bpe;
}
