/* batches.h - which tokens are read at each step: windows of T + 1 tokens, in an order that is a function
 * of (seed, epoch, index) alone, so that it is the same on any number of ranks and after a resume.
 *
 * A stream of N tokens has W = (N - 1) / T full windows; window w has inputs w*T .. w*T + T - 1 and
 * targets one further; the tail shorter than a window is left out. Sequence number g of the whole run
 * (g = step * batch + row) is window permute(seed, g / W)(g % W): each full window once an epoch. */
#ifndef BATCHES_H
#define BATCHES_H

#include "shards.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Batches Batches;

/* T + 1 tokens at least, else an error that says how many there are and how many are needed.
 * shuffle false keeps the stream's order (evaluation). Does not own shards. Starts no thread until
 * batches_read_ahead is called. For one thread at a time. */
Batches *batches_open(Shards *shards, size_t T, uint64_t seed, bool shuffle, Error *err);
void batches_close(Batches *batches);
uint64_t batches_windows(const Batches *batches); /* W, at least 1 */

/* From now on a thread prepares sequences ahead: first .. first + rows - 1, then first + stride .. first +
 * stride + rows - 1, and so on, as one rank's share of each step. Calls of batches_get that ask for them in
 * this order, some or all of a share at a time, find them ready. Any other call is read directly and
 * changes nothing for these; calling this again begins anew. */
void batches_read_ahead(Batches *batches, uint64_t first, size_t rows, uint64_t stride);

/* Sequences g = first .. first + rows - 1: inputs and targets (rows, T). */
bool batches_get(Batches *batches, uint64_t first, size_t rows, int32_t *inputs, int32_t *targets,
                 Error *err);

/* The window that sequence g reads (for tests and for a human's questions). */
uint64_t batches_window(const Batches *batches, uint64_t g);

#ifdef __cplusplus
}
#endif
#endif
