/* stories.h - text in: where stories come from, one after another, in pieces that fit in memory.
 *
 * A source is a text file, a .gz of one, a folder whose .txt and .txt.gz files are read in the order of
 * their names (not deeper), or the built-in stories (grammar.c). In text, `<|endoftext|>` separates
 * stories, and one newline (the byte \n) before and one after it belong to the separator; an empty story
 * between two separators is no story. A file without it is one story; in a folder each file begins a new
 * one. Bytes are kept as they are: CRLF, NUL, invalid UTF-8. Nothing of the text is held but the piece
 * being read, so a story may be larger than memory. A file is read up to the size it has when it is
 * opened; gzip is known by its first bytes. What is no regular file (a pipe, a device) is refused, since
 * the text is read more than once. */
#ifndef STORIES_H
#define STORIES_H

#include "../common.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- a source of stories ---- */
typedef struct Stories Stories;

/* A piece of the current story: bytes until the next call only. `ends_story` is set on the last piece of
 * each story (which may be empty only where the story already had bytes). */
typedef struct StoryPiece {
    const uint8_t *bytes;
    size_t size;
    bool ends_story;
    uint64_t story; /* 0, 1, 2 ...: which story of the source */
} StoryPiece;

/* read_size: bytes asked of the file at a time (0: 1 MiB); the stories do not depend on it. */
Stories *stories_open(const char *path, size_t read_size, Error *err);
/* Built-in stories number first .. first + count - 1 of a seed. */
Stories *stories_open_builtin(uint64_t seed, bool heldout, uint64_t first, uint64_t count);
void stories_close(Stories *stories);
/* 1: a piece; 0: the end; -1: an error (damage in a .gz is reported with the byte offset). */
int stories_next(Stories *stories, StoryPiece *piece, Error *err);
/* A file that both sources read, whatever the paths, as the first one names it; NULL: none. */
const char *stories_shared_file(const Stories *a, const Stories *b);
/* A file of the source that lies in the folder, as files_within; NULL: none. */
const char *stories_file_within(const Stories *stories, const char *folder);
/* For progress: bytes of the files (or of built-in stories) so far, and in all (0: unknown). */
uint64_t stories_bytes_read(const Stories *stories);
uint64_t stories_bytes_total(const Stories *stories);

/* ---- the built-in stories: grammar.c ----
 * Story `number` of `seed`, as text (no end-of-text), appended to out. Each is a chain of weighted
 * choices that can be read back from the text. A fixed hash of the text puts one text in twenty on the
 * held-out side, and a story is drawn again until it falls on the side asked for: so no held-out story
 * occurs in training, and no pattern a model could learn tells the sides apart. Returns the natural
 * logarithm of the probability with which the grammar tells the text, whatever its side: who could compute
 * the hash would know a factor of 20 more of each held-out story, but that is no way of telling stories.
 * The same on every machine. */
double grammar_story(uint64_t seed, bool heldout, uint64_t number, Buffer *out);
/* The natural logarithm of the probability that a story the grammar tells begins with these bytes; exact, and
 * -infinity where none does. Less than 2^-1022 (708 nats, where a whole story has about 200) is out of reach. */
double grammar_beginning(const uint8_t *text, size_t size);
/* Which side a text falls on. */
bool grammar_is_heldout(const uint8_t *text, size_t size);

#ifdef __cplusplus
}
#endif
#endif
