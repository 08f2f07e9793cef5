/* shards.h - token files on disk: written once, checked as they are first read, shared.
 *
 * A shard is little-endian throughout:
 *
 *   offset  bytes
 *        0      8  magic "GPTSHARD"
 *        8      4  version, 1
 *       12      4  bytes per token, 2 (up to 65,536 ids) or 4
 *       16      8  number of tokens, at least 1
 *       24      4  vocabulary size; every id is below it
 *       28      4  fingerprint of the tokenizer: CRC-32 of its merges in canonical form
 *       32      8  ... and their length in bytes
 *       40      4  block size in bytes, 1,048,576
 *       44    976  zero
 *     1020      4  CRC-32 of the 1,020 bytes before
 *     1024         the tokens, then a CRC-32 (4 bytes) for each block of them; the last block may be short
 *
 * and ends there. Stories follow one another, each ended by the end-of-text id. llm.c's shards (256 int32
 * of header: magic 20240520, version 1, number of tokens; then uint16 tokens) are read too; what they do
 * not say (their tokenizer), the caller must. */
#ifndef SHARDS_H
#define SHARDS_H

#include "../common.h"
#include "../tokenizer/bpe.h"
#include "stories.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- writing ---- */
/* Files <folder>/<name>-00000.bin, -00001.bin ...; each appears whole or not at all. The folder must be
 * there and hold no file of that name yet: two sets of shards must not mix. */
typedef struct ShardWriter ShardWriter;
ShardWriter *shard_writer_open(const char *folder, const char *name, const Bpe *bpe,
                               uint64_t tokens_per_shard, Error *err);
bool shard_writer_append(ShardWriter *writer, const uint32_t *ids, size_t count, Error *err);
/* Ends the last file; *tokens is how many there are in all. Frees the writer. After a failure, here or in
 * append, nothing it wrote is left. */
bool shard_writer_close(ShardWriter *writer, uint64_t *tokens, Error *err);
void shard_writer_abort(ShardWriter *writer); /* removes all it wrote and frees it; NULL is fine */

/* ---- reading ---- */
typedef struct Shards Shards;
/* `pattern` is a file or a quoted glob, such as "<folder>/<name>-*.bin"; files in the order of their names
 * form one stream of tokens. All headers and sizes are checked here; all must name the same tokenizer.
 * `bpe` is the tokenizer the caller means to use, or NULL: where it differs from what the shards name, the
 * error shows both; an llm.c shard needs it (ids are held against its size). Any number of files: most of
 * them are opened only while they are read. */
Shards *shards_open(const char *pattern, const Bpe *bpe, Error *err);
void shards_close(Shards *shards);
/* A file that is among both, whatever the paths, as the first one names it; NULL: none. */
const char *shards_shared_file(const Shards *a, const Shards *b);
/* A file of them that lies in the folder, as files_within; NULL: none. */
const char *shards_file_within(const Shards *shards, const char *folder);
uint64_t shards_tokens(const Shards *shards);
uint32_t shards_vocab(const Shards *shards);
bool shards_fingerprint(const Shards *shards, BpeFingerprint *fingerprint); /* false for llm.c's */
/* CRC-32 over all headers, sizes and the blocks' CRCs: what a resume or another rank compares to be sure of
 * the same data. (An llm.c shard has no CRCs; there it is the header and the size alone.) */
uint32_t shards_identity(const Shards *shards);
/* Tokens first .. first + count - 1 of the stream, across files. A block's CRC is checked when it is first
 * touched, the ids' range always: a file that is damaged, cut short or changed while it is in use is an
 * error, never an id out of range. Safe from several threads. */
bool shards_read(Shards *shards, uint64_t first, size_t count, uint32_t *ids, Error *err);

/* ---- from stories to shards ---- */
/* What was made, also written as <folder>/data.json beside the shards. */
typedef struct DataFacts {
    uint64_t train_stories, heldout_stories, train_bytes, heldout_bytes, train_tokens, heldout_tokens;
    bool builtin; /* both sides are the built-in stories ... */
    int64_t seed; /* ... of this seed; -1: not known, since an earlier version made them */
} DataFacts;

typedef struct DataSource {
    const char *data;    /* path, or NULL for the built-in stories */
    const char *heldout; /* path, or NULL: every 20th story; under 20 stories, the last 5 % of the text */
    uint64_t seed;       /* of the built-in stories */
    uint64_t stories;    /* built-in training stories to make */
    uint64_t heldout_stories; /* built-in held-out ones; 0: a twentieth of stories, at least 1 */
    int threads;              /* that encode; below 1: 1 */
    size_t read_size;         /* 0: 1 MiB */
} DataSource;

/* Trains a tokenizer of at most `vocab` ids on the training side of the source. */
Bpe *data_train_tokenizer(const DataSource *source, uint32_t vocab, Error *err);
/* Makes `folder` and writes train-*.bin, heldout-*.bin and, last, data.json into it: a folder without
 * data.json is not finished, and what it holds of such shards is removed first; one with it is refused.
 * Empty text, and text too short for one token on either side, are errors. Encodes on source->threads
 * threads; the same bytes for any number of them and any read size. */
bool data_write_shards(const DataSource *source, const Bpe *bpe, const char *folder, DataFacts *facts,
                       Error *err);
/* Takes back what data_write_shards has put there, whole or interrupted; the tokenizer's merges.txt stays. */
void data_remove_shards(const char *folder);
/* Whether a folder holds nothing but what data_write_shards puts there, whole or interrupted, and the tokenizer's
 * merges.txt: files of these names that begin as such files do. */
bool data_folder_is_ours(const char *folder);
/* Reads data.json back. */
bool data_read_facts(const char *folder, DataFacts *facts, Error *err);

/* The floor of an evaluation of `tokens` tokens, nats per token: the loss that the grammar itself has, which told
 * the built-in stories, on tokens 1 .. `tokens` of their held-out side (an evaluation's targets; token 0 is given).
 * A story that is cut at either end counts with the probability of just the part that is there, and a story's end is
 * a token like any other. It is no mean over texts but what the true model pays for this very one, so that chance is
 * in it and in a loss alike: that a model lies k nats below, in the sum of all tokens, has a probability of at most
 * e^-k (Markov's inequality, for the ratio of the two likelihoods), if it has not seen these stories and does not
 * compute the hash by which they were held out. It has a disadvantage besides: it sees a story only from where its
 * window begins. Left aside is that the last token of a story that is cut also tells with which bytes the text does
 * not go on; that is less than one token's loss in all.
 * NAN for other data. An error where the held-out side is not what the facts' seed tells in this version. */
bool data_floor(const DataFacts *facts, const Bpe *bpe, Shards *heldout, uint64_t tokens, double *floor,
                Error *err);

#ifdef __cplusplus
}
#endif
#endif
