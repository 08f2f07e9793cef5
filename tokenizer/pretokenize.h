/* pretokenize.h - GPT-2's splitting pattern, written by hand; inside tokenizer/ and its tests only. */
#ifndef PRETOKENIZE_H
#define PRETOKENIZE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The length of the next piece of text[0 .. size), size > 0. `more` says that text may follow: then 0
 * means that the piece's end cannot be known yet. Never looks before text[0]: pieces do not depend on
 * what came before. No recursion; time linear in the piece's length. */
size_t pretokenize_next(const uint8_t *text, size_t size, bool more);

#ifdef __cplusplus
}
#endif
#endif
