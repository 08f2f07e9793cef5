/* checkpoint.h - a model on disk: a folder that Hugging Face's GPT-2 loads, and what a run needs to go on.
 *
 *   step-00001000/model.safetensors       fp32 master weights, GPT-2's names, [in, out], without padding
 *                 config.json             GPT-2's with learned positions; with rotary ones "model_type" is
 *                                         "train_gpt_rotary", so that nothing takes it for GPT-2
 *                 tokenizer.json, merges.txt   given by the caller
 *                 optimizer.safetensors   "m.<name>", "v.<name>"
 *                 state.json              step, updates, best loss ...
 *                 MANIFEST                size and CRC-32 of every file, written last
 * A folder appears whole or not at all (folder_write_...). Everything read is checked first: MANIFEST,
 * then every size, offset, shape and name.
 *
 * A step that is saved again is kept as it is where the old folder is good and says the same state, but for
 * seconds; else the old one is moved to step-NNNNNNNN.old, which still counts as a checkpoint of its step,
 * until the new one is there. One process at a time writes into <checkpoints>: the run is locked. */
#ifndef CHECKPOINT_H
#define CHECKPOINT_H

#include "gpt.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Where a run stands after `step` steps. */
typedef struct TrainState {
    uint64_t step;        /* steps done: the next one has this number */
    uint64_t updates;     /* of them applied by AdamW */
    uint64_t tokens;      /* trained on so far */
    uint64_t total_steps; /* the schedule's end, once known (with -minutes it is measured); 0: not yet */
    double seconds;       /* spent in training so far */
    double eval_loss;     /* held-out loss at this step, NAN if not evaluated here */
    double best_loss;     /* NAN: none yet */
    uint64_t best_step;
    uint64_t bad_steps; /* the newest ones in a row that were not finite and so not applied */
    /* 1: a stop came before all that was due after this step was done; the run goes on with the rest. */
    uint64_t cut_short;
    uint64_t stories; /* then: written after this step before the stop */
} TrainState;

typedef struct CheckpointFile {
    const char *name;
    const void *bytes;
    size_t size;
} CheckpointFile;

/* Bytes a checkpoint of this configuration takes on disk at most (without the caller's files); SIZE_MAX
 * where it cannot be one. */
size_t checkpoint_bytes(const GptConfig *config);
/* Writes <checkpoints>/step-NNNNNNNN whole or not at all; free space is checked first. gpt was made for
 * training. A weight or moment that is not finite is an error that names its tensor: such a model is never
 * saved. */
bool checkpoint_save(const char *checkpoints, Gpt *gpt, const TrainState *state, const CheckpointFile *files,
                     size_t n_files, Error *err);
/* MANIFEST and config.json of a checkpoint folder, or of a plain GPT-2 folder from elsewhere (no MANIFEST:
 * then there is none to check). dropout is what the file says, GPT-2's own 0.1 too. A model that cannot be
 * computed here (another activation, another epsilon ...) is refused in words. */
bool checkpoint_config(const char *path, GptConfig *config, Error *err);
/* Weights into gpt; with state not NULL also optimizer state and state.json (a run goes on). Names may have
 * a "transformer." prefix; dtypes F32, F16, BF16; a missing, extra (but known buffers) or misshapen tensor
 * is an error that names it, and so is one that holds a number that is not finite. On failure gpt may hold
 * part of the weights only in the latter case and where the disk failed. */
bool checkpoint_load(const char *path, Gpt *gpt, TrainState *state, Error *err);
bool checkpoint_read_state(const char *path, TrainState *state, Error *err);

/* Whether there is any checkpoint, good or not; no folder <checkpoints> holds none. False where that cannot be told. */
bool checkpoint_any(const char *checkpoints, bool *any, Error *err);
/* The newest checkpoint folder under <checkpoints> whose MANIFEST holds, to be freed. `passed_over` (may be
 * NULL) gets a line a damaged one: what is wrong with it. NULL and *err where there is none, and where one that may
 * be the answer cannot be read: that is not damage, and is not passed over. */
char *checkpoint_newest(const char *checkpoints, Buffer *passed_over, Error *err);
/* The good one with the lowest eval_loss; the newest where none was evaluated. For who only reads: one that cannot be
 * read is passed over, too. */
char *checkpoint_best(const char *checkpoints, Buffer *passed_over, Error *err);
/* Removes all but the `keep` newest and step `best_step`, and what a killed writer left. Counting starts at
 * the newest good one, which is read back first and stays in any case; damaged ones that are newer go. Where
 * none is good, none is removed. A folder stays, and does not count, in which anything is that no checkpoint has; and
 * one that is newer and cannot be read, which is an error once all else is done. */
bool checkpoint_prune(const char *checkpoints, size_t keep, uint64_t best_step, Error *err);

#ifdef __cplusplus
}
#endif
#endif
