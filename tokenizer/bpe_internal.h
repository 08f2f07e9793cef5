/* bpe_internal.h - what bpe.c and bpe_train.c share: how a tokenizer is laid out and built, and words as
 * hash keys. Inside tokenizer/ only. */
#ifndef BPE_INTERNAL_H
#define BPE_INTERNAL_H

#include <string.h>

#include "bpe.h"

enum { BPE_MAX_MERGES = BPE_MAX_VOCAB - BPE_MIN_VOCAB };

/* All tokens' bytes together. A text of one endless random word makes each merge's token longer than the
 * one before, so that their sum would grow with the square of the merges; words of a language use some
 * hundred kilobytes. Training stops here, and no file may hold more. */
#define BPE_MAX_TOKEN_BYTES ((size_t)64 << 20)

struct Bpe {
    uint8_t byte_to_id[256], id_to_byte[256]; /* GPT-2's order of the bytes */
    uint32_t merges;
    uint16_t (*parts)[2]; /* (merges, 2): ids of left and right; rank r makes id BPE_BYTES + r */
    size_t *start;        /* token id's bytes are bytes.data[start[id] .. start[id + 1]) */
    Buffer bytes;
    /* (left, right) -> merged id, open addressing with linear probing, at most half full. A slot is
     * (left << 16 | right) << 32 | merged id, or 0 where free (a merged id is never 0). */
    uint64_t *slots;
    unsigned slot_shift;
    BpeFingerprint fingerprint;
};

/* Building one: begin, add merges in rank order, finish (makes what is looked up, and <|endoftext|>). */
Bpe *bpe_build_begin(void);
void bpe_build_add(Bpe *bpe, uint32_t left, uint32_t right);
void bpe_build_finish(Bpe *bpe);

/* ---- words as keys of hash tables ----
 * Nearly every word of a story is shorter than 16 bytes: such a word is its own key, two registers with
 * its bytes from the low end up, zeros, and its length in the top byte. */
enum { WORD_KEY_BYTES = 15 };

typedef struct WordKey {
    uint64_t low, high;
} WordKey;

/* Of the word word[0 .. size), 1 <= size <= WORD_KEY_BYTES; `readable` >= size bytes may be read there.
 * Where it can, it reads sixteen and masks: a copy of known size needs no loop and no branch. */
static inline WordKey word_key(const uint8_t *word, size_t size, size_t readable) {
    static const uint8_t keep[32] = {255, 255, 255, 255, 255, 255, 255, 255,
                                     255, 255, 255, 255, 255, 255, 255, 255};
    WordKey key = {0, 0}, mask;
    if (readable >= sizeof(key)) {
        memcpy(&key, word, sizeof(key));
        memcpy(&mask, keep + 16 - size, sizeof(mask));
        key.low &= mask.low, key.high &= mask.high;
    } else {
        memcpy(&key, word, size);
    }
    key.high |= (uint64_t)size << 56;
    return key;
}

/* 64 bits of which the upper ones are well mixed. */
static inline uint64_t word_hash(WordKey key) {
    const uint64_t mixed = (key.low ^ (key.high * 0x9FB21C651E98DF25u)) * 0xD6E8FEB86659FD93u;
    return (mixed ^ (mixed >> 32)) * 0x9E3779B97F4A7C15u;
}

static inline uint64_t bytes_hash(const uint8_t *bytes, size_t size) {
    uint64_t hash = size;
    for (; size >= 8; bytes += 8, size -= 8) {
        uint64_t word;
        memcpy(&word, bytes, 8);
        hash = (hash ^ word) * 0x9FB21C651E98DF25u;
        hash ^= hash >> 29;
    }
    for (; size > 0; bytes++, size--) hash = (hash ^ *bytes) * 0xD6E8FEB86659FD93u, hash ^= hash >> 29;
    return hash * 0x9E3779B97F4A7C15u;
}

#endif
