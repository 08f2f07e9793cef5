/* bpe.h - byte-level BPE (Sennrich et al. 2016, over bytes as in GPT-2): encode, decode, train.
 *
 * Ids as GPT-2 numbers them: 0..255 the bytes in GPT-2's order ('!' is 0), then one per merge in rank
 * order, then <|endoftext|> last. Text is split by GPT-2's pattern
 *     's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
 * (pretokenize.c) and each piece is merged on its own, lowest rank first. Any bytes encode and decode
 * back exactly, NUL and invalid UTF-8 included: an invalid byte counts as "neither space, letter nor
 * number". Knows no file of data/; text comes as bytes, stories' ends as calls. */
#ifndef BPE_H
#define BPE_H

#include "../common.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { BPE_BYTES = 256, BPE_MIN_VOCAB = 257, BPE_MAX_VOCAB = 65536 };

/* A tokenizer. Does not change once made, so any number of threads may use one. */
typedef struct Bpe Bpe;

/* What tells two tokenizers apart: length and CRC-32 of the merges in canonical form (the text that
 * bpe_merges_text gives). */
typedef struct BpeFingerprint {
    uint64_t length;
    uint32_t crc32;
} BpeFingerprint;

/* Ids that grow. Zero-initialised is empty. */
typedef struct Tokens {
    uint32_t *ids;
    size_t count, capacity;
} Tokens;
void tokens_reserve(Tokens *tokens, size_t extra);
void tokens_free(Tokens *tokens);

/* ---- loading and saving ---- */
/* From the text of a merges file: lines "left right" in GPT-2's byte-to-unicode alphabet, an optional
 * first line starting "#version". `name` is for messages. Hostile input is an error, not a crash:
 * a part that is no token yet, a merge that makes a token that exists, more than 65,279 merges ... */
Bpe *bpe_from_merges_text(const uint8_t *text, size_t size, const char *name, Error *err);
/* From a file: merges.txt or GPT-2's vocab.bpe. */
Bpe *bpe_load(const char *path, Error *err);
void bpe_free(Bpe *bpe);
/* The canonical form: "#version: 0.2\n", then a line a merge. */
void bpe_merges_text(const Bpe *bpe, Buffer *out);
/* Hugging Face's tokenizer.json for the same tokenizer (merges as pairs). */
void bpe_tokenizer_json(const Bpe *bpe, Buffer *out);
BpeFingerprint bpe_fingerprint(const Bpe *bpe);
bool bpe_same(BpeFingerprint a, BpeFingerprint b);

uint32_t bpe_vocab_size(const Bpe *bpe);  /* 256 + merges + 1 */
uint32_t bpe_end_of_text(const Bpe *bpe); /* bpe_vocab_size - 1 */
/* A token's bytes (of <|endoftext|>: its name); valid as long as bpe. id must be below the vocab size. */
const uint8_t *bpe_token_bytes(const Bpe *bpe, uint32_t id, size_t *size);

/* ---- encoding ----
 * One encoder per thread. Text is fed in pieces of any size; a piece boundary never changes the result:
 * what cannot be split yet is held back until more text or the end comes. */
typedef struct BpeEncoder BpeEncoder;
/* cache_words: how many distinct words' ids are remembered, at 32 bytes each (65,536 suits stories); 0
 * turns the cache off. */
BpeEncoder *bpe_encoder_new(const Bpe *bpe, size_t cache_words);
void bpe_encoder_free(BpeEncoder *encoder);
void bpe_encoder_feed(BpeEncoder *encoder, const uint8_t *bytes, size_t size, Tokens *out);
void bpe_encoder_end(BpeEncoder *encoder, Tokens *out); /* the text ends here; ready for another */
/* A whole text at once; <|endoftext|> in it is ordinary text. */
void bpe_encode(BpeEncoder *encoder, const uint8_t *bytes, size_t size, Tokens *out);
/* The same two, but <|endoftext|> in the text becomes its id and ends a piece; also where it comes in
 * several pieces. For text that is trusted to mean it: a prompt is not. */
void bpe_encoder_feed_special(BpeEncoder *encoder, const uint8_t *bytes, size_t size, Tokens *out);
void bpe_encode_special(BpeEncoder *encoder, const uint8_t *bytes, size_t size, Tokens *out);

/* Appends the bytes of the tokens; an id out of range is an error that names it and its index. */
bool bpe_decode(const Bpe *bpe, const uint32_t *ids, size_t count, Buffer *out, Error *err);

/* ---- training ----
 * feed text, mark where a story ends (no word crosses it), then train. Highest count first, ties to the
 * lexicographically greater (left bytes, right bytes); pairs merge down to a count of 1; overlapping
 * pairs are counted ("aaaa" has three); 64-bit counts. The same result for any number of threads and
 * any piece size. Memory grows with the distinct words, not with the text. */
typedef struct BpeTrainer BpeTrainer;
BpeTrainer *bpe_trainer_new(int threads);
void bpe_trainer_feed(BpeTrainer *trainer, const uint8_t *bytes, size_t size);
void bpe_trainer_end_story(BpeTrainer *trainer);
/* A tokenizer of at most `vocab` ids (BPE_MIN_VOCAB .. BPE_MAX_VOCAB); fewer if the text cannot give as
 * many, or if all tokens together would have more than 64 MiB (one endless random word does that). The
 * story ends here; more can be fed afterwards, and trained again with what was there. NULL where a stop
 * was asked for, vocab is out of range or the distinct words have more than 1 GiB (err says which). */
Bpe *bpe_trainer_train(BpeTrainer *trainer, uint32_t vocab, Error *err);
void bpe_trainer_free(BpeTrainer *trainer);

#ifdef __cplusplus
}
#endif
#endif
