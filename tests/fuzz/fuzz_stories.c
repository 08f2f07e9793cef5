/* fuzz_stories.c - text of any kind, plain or gzip, on its way to tokens: the stories do not depend on the
 * read size, a tokenizer can be trained on them, and what it encodes comes back byte by byte.
 *
 * The first byte of the input chooses the small read size and what the tokenizer's size is; the rest is the
 * file. */
#include "fuzz.h"

#include "../../data/stories.h"
#include "../../tokenizer/bpe.h"

/* Text that a small .gz can grow to without bound is read up to here only. */
enum { MAX_TEXT = 1 << 16 };

typedef struct Story {
    size_t begin, end; /* in the text */
} Story;

typedef struct Collected {
    Buffer text;
    Story *stories;
    size_t count;
    bool good, cut; /* read to its end without an error; not to its end, because of MAX_TEXT */
} Collected;

static Collected collect(const char *path, size_t read_size) {
    Collected all = {0};
    Error err = {0};
    Stories *stories = stories_open(path, read_size, &err);
    MUST(stories);
    StoryPiece piece;
    bool open = false;
    int code;
    while (!all.cut && (code = stories_next(stories, &piece, &err)) == 1) {
        MUST(piece.size > 0 || (piece.ends_story && open));
        MUST(piece.story == all.count);
        if (!open) {
            all.stories = xrealloc(all.stories, (all.count + 1) * sizeof *all.stories);
            all.stories[all.count].begin = all.text.size;
        }
        buffer_append(&all.text, piece.bytes, piece.size);
        all.stories[all.count].end = all.text.size;
        open = !piece.ends_story;
        all.count += piece.ends_story;
        all.cut = all.text.size > MAX_TEXT;
    }
    all.good = !all.cut && code == 0;
    if (all.good) MUST(!open);
    if (!all.cut && code < 0) fuzz_check_error(&err, path);
    stories_close(stories);
    return all;
}

static void free_collected(Collected *all) {
    buffer_free(&all->text);
    free(all->stories);
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size) {
    static char *path;
    if (!path) path = fuzz_path("input.txt");
    if (size == 0) return 0;
    const size_t small = 1 + input[0] % 32;
    const uint32_t vocab = BPE_MIN_VOCAB + input[0] / 4;
    fuzz_write(path, input + 1, size - 1);

    Collected once = collect(path, 0), parts = collect(path, small);
    if (!once.cut && !parts.cut) MUST(once.good == parts.good);
    if (once.good && parts.good) {
        MUST(once.count == parts.count && once.text.size == parts.text.size);
        if (once.count) {
            MUST(memcmp(once.text.data, parts.text.data, once.text.size) == 0);
            MUST(memcmp(once.stories, parts.stories, once.count * sizeof *once.stories) == 0);
        }

        BpeTrainer *trainer = bpe_trainer_new(1);
        for (size_t i = 0; i < once.count; i++) {
            bpe_trainer_feed(trainer, once.text.data + once.stories[i].begin,
                             once.stories[i].end - once.stories[i].begin);
            bpe_trainer_end_story(trainer);
        }
        Error err = {0};
        Bpe *bpe = bpe_trainer_train(trainer, vocab, &err);
        bpe_trainer_free(trainer);
        MUST(bpe && bpe_vocab_size(bpe) <= vocab);

        /* Story by story in pieces of the small size, and the whole text at once: the same tokens. */
        BpeEncoder *encoder = bpe_encoder_new(bpe, 64), *uncached = bpe_encoder_new(bpe, 0);
        Tokens pieces = {0}, whole = {0};
        Buffer back = {0};
        for (size_t i = 0; i < once.count; i++) {
            const uint8_t *text = once.text.data + once.stories[i].begin;
            const size_t length = once.stories[i].end - once.stories[i].begin;
            for (size_t at = 0; at < length; at += small)
                bpe_encoder_feed(encoder, text + at, length - at < small ? length - at : small, &pieces);
            bpe_encoder_end(encoder, &pieces);
            bpe_encode(uncached, text, length, &whole);
        }
        MUST(pieces.count == whole.count);
        if (whole.count) MUST(memcmp(pieces.ids, whole.ids, whole.count * sizeof *whole.ids) == 0);
        MUST(bpe_decode(bpe, whole.ids, whole.count, &back, &err));
        MUST(back.size == once.text.size);
        if (back.size) MUST(memcmp(back.data, once.text.data, back.size) == 0);
        buffer_free(&back);
        tokens_free(&pieces);
        tokens_free(&whole);
        bpe_encoder_free(encoder);
        bpe_encoder_free(uncached);
        bpe_free(bpe);
    }
    free_collected(&once);
    free_collected(&parts);
    return 0;
}
