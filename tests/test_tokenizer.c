/* test_tokenizer.c - the tokenizer against plain versions of itself (a literal reading of the splitting
 * pattern, a quadratic trainer, a quadratic encoder) on many small random texts, against GPT-2's own ids
 * and a public set of reference merges, and against hostile files. */
#include <jansson.h>
#include <signal.h>
#include <unistd.h>

#include "../common.h"
#include "../tokenizer/bpe.h"
#include "../tokenizer/pretokenize.h"
#include "../tokenizer/unicode_tables.h"
#include "test.h"

#define DATA "../shared/data/"

/* ---- small helpers ---- */

static const uint8_t *bytes_of(const char *text) {
    return (const uint8_t *)text;
}

static bool same_bytes(const Buffer *a, const Buffer *b) {
    return a->size == b->size && (a->size == 0 || memcmp(a->data, b->data, a->size) == 0);
}

static bool same_tokens(const Tokens *a, const Tokens *b) {
    return a->count == b->count && (a->count == 0 || memcmp(a->ids, b->ids, a->count * sizeof(*a->ids)) == 0);
}

static void add_token(Tokens *tokens, uint32_t id) {
    tokens_reserve(tokens, 1);
    tokens->ids[tokens->count++] = id;
}

/* Encodes in pieces of a size; 0: all at once. */
static Tokens encode(const Bpe *bpe, const uint8_t *text, size_t size, size_t cache_words, size_t piece) {
    BpeEncoder *encoder = bpe_encoder_new(bpe, cache_words);
    Tokens tokens = {0};
    if (piece == 0) {
        bpe_encode(encoder, text, size, &tokens);
    } else {
        for (size_t at = 0; at < size; at += piece)
            bpe_encoder_feed(encoder, text + at, size - at < piece ? size - at : piece, &tokens);
        bpe_encoder_end(encoder, &tokens);
    }
    bpe_encoder_free(encoder);
    return tokens;
}

/* Trains on stories: `text` cut at each 0x01, a byte that no test text has otherwise. */
static Bpe *train(const uint8_t *text, size_t size, uint32_t vocab, int threads, size_t piece) {
    Error err;
    BpeTrainer *trainer = bpe_trainer_new(threads);
    for (size_t at = 0; at < size;) {
        const uint8_t *end = memchr(text + at, 1, size - at);
        const size_t story_end = end ? (size_t)(end - text) : size;
        while (at < story_end) {
            const size_t take = piece && piece < story_end - at ? piece : story_end - at;
            bpe_trainer_feed(trainer, text + at, take);
            at += take;
        }
        bpe_trainer_end_story(trainer);
        at++;
    }
    Bpe *bpe = bpe_trainer_train(trainer, vocab, &err);
    CHECK_MSG(bpe, "%s", err.text);
    bpe_trainer_free(trainer);
    return bpe;
}

static Buffer merges_of(const Bpe *bpe) {
    Buffer text = {0};
    bpe_merges_text(bpe, &text);
    return text;
}

static bool read_data(const char *path, Buffer *out) {
    Error err;
    return file_exists(path) && file_read(path, (size_t)1 << 28, out, &err);
}

/* ---- plain versions ---- */

/* One character: a well-formed UTF-8 sequence, or one byte. */
typedef struct Character {
    size_t begin, size;
    unsigned class;
} Character;

static unsigned class_of(uint32_t code) {
    if (code >= UNICODE_LIMIT) return UNICODE_OTHER;
    return (unsigned)(unicode_blocks[unicode_index[code / 256]][code % 256 / 32] >> (code % 32 * 2)) % 4;
}

/* Decodes by encoding: a sequence is well formed if it is what its code point is written as. */
static Character plain_character(const uint8_t *text, size_t size, size_t at) {
    for (size_t length = 1; length <= 4 && at + length <= size; length++) {
        uint32_t code = length == 1 ? text[at] : text[at] & (0x3Fu >> (length - 1));
        for (size_t i = 1; i < length; i++) code = code * 64 + (text[at + i] & 63u);
        uint8_t written[4] = {0};
        const uint32_t first[5] = {0, 0, 0x80, 0x800, 0x10000};
        if (code < first[length] || code > 0x10FFFF || (code >= 0xD800 && code < 0xE000)) continue;
        if (length == 1 && code >= 0x80) continue;
        const uint8_t lead[5] = {0, 0, 0xC0, 0xE0, 0xF0};
        for (size_t i = length; i-- > 0; code >>= 6)
            written[i] = (uint8_t)(i ? 0x80 | (code & 63) : lead[length] | code);
        if (memcmp(written, text + at, length) == 0) {
            code = length == 1 ? text[at] : text[at] & (0x3Fu >> (length - 1));
            for (size_t i = 1; i < length; i++) code = code * 64 + (text[at + i] & 63u);
            return (Character){at, length, class_of(code)};
        }
    }
    return (Character){at, 1, UNICODE_OTHER};
}

/* The pattern, alternative by alternative, as an engine that backtracks would read it. Returns the length
 * of the match at character `at`, in characters. */
static size_t plain_match(const uint8_t *text, const Character *chars, size_t count, size_t at) {
    static const char *const endings[] = {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"};
    for (size_t i = 0; i < 7; i++) {
        const size_t length = strlen(endings[i]);
        if (at + length <= count && memcmp(text + chars[at].begin, endings[i], length) == 0) return length;
    }
    const unsigned classes[3] = {UNICODE_LETTER, UNICODE_NUMBER, UNICODE_OTHER};
    for (size_t i = 0; i < 3; i++) { /* " ?" takes the space first, then tries without it */
        for (int space = text[chars[at].begin] == ' '; space >= 0; space--) {
            size_t end = at + (size_t)space;
            while (end < count && chars[end].class == classes[i]) end++;
            if (end > at + (size_t)space) return end - at;
        }
    }
    size_t end = at;
    while (end < count && chars[end].class == UNICODE_SPACE) end++;
    for (size_t back = end; back > at; back--) /* \s+(?!\S), giving back from the end */
        if (back == count || chars[back].class == UNICODE_SPACE) return back - at;
    return end - at; /* \s+ */
}

/* Lengths of the pieces, in bytes. */
static size_t plain_split(const uint8_t *text, size_t size, size_t *pieces) {
    Character *chars = xmalloc((size + 1) * sizeof(*chars));
    size_t count = 0, piece_count = 0;
    for (size_t at = 0; at < size; at += chars[count++].size) chars[count] = plain_character(text, size, at);
    for (size_t at = 0; at < count;) {
        const size_t end = at + plain_match(text, chars, count, at);
        const size_t end_byte = end < count ? chars[end].begin : size;
        pieces[piece_count++] = end_byte - chars[at].begin;
        at = end;
    }
    free(chars);
    return piece_count;
}

/* Merges in rank order, by the ids of their parts. */
typedef struct PlainMerge {
    uint32_t left, right;
} PlainMerge;

typedef struct PlainBpe {
    PlainMerge merges[BPE_MAX_VOCAB];
    uint32_t count;
} PlainBpe;

/* Replaces (left, right) by id, from left to right; returns the new count. */
static size_t plain_replace(uint32_t *ids, size_t count, PlainMerge merge, uint32_t id) {
    size_t to = 0;
    for (size_t from = 0; from < count; to++) {
        const bool here = from + 1 < count && ids[from] == merge.left && ids[from + 1] == merge.right;
        ids[to] = here ? id : ids[from];
        from += here ? 2 : 1;
    }
    return to;
}

/* GPT-2's order of the bytes, written out on its own here. */
static uint32_t plain_byte_id(uint8_t byte) {
    uint32_t id = 0;
    const bool seen = (byte > 32 && byte < 127) || (byte > 160 && byte != 173);
    for (unsigned other = 0; other < 256; other++) {
        const bool other_seen = (other > 32 && other < 127) || (other > 160 && other != 173);
        if (other_seen == seen ? other < byte : other_seen) id++;
    }
    return id;
}

/* Each piece: for each merge in order of rank, everywhere. */
static Tokens plain_encode(const PlainBpe *bpe, const uint8_t *text, size_t size) {
    Tokens tokens = {0};
    size_t *pieces = xmalloc((size + 1) * sizeof(*pieces));
    const size_t count = plain_split(text, size, pieces);
    uint32_t *ids = xmalloc((size + 1) * sizeof(*ids));
    for (size_t piece = 0, at = 0; piece < count; at += pieces[piece++]) {
        size_t n = pieces[piece];
        for (size_t i = 0; i < n; i++) ids[i] = plain_byte_id(text[at + i]);
        for (uint32_t rank = 0; rank < bpe->count; rank++)
            n = plain_replace(ids, n, bpe->merges[rank], 256 + rank);
        for (size_t i = 0; i < n; i++) add_token(&tokens, ids[i]);
    }
    free(ids);
    free(pieces);
    return tokens;
}

/* Compares tokens as Python compares bytes. */
static int plain_compare(const Buffer *a, const Buffer *b) {
    for (size_t i = 0; i < a->size && i < b->size; i++)
        if (a->data[i] != b->data[i]) return a->data[i] < b->data[i] ? -1 : 1;
    return a->size < b->size ? -1 : a->size > b->size;
}

/* Counts all pairs anew for each merge. Texts are small: each piece stays apart, with itself as a word. */
static void plain_train(PlainBpe *bpe, const uint8_t *text, size_t size, uint32_t vocab) {
    size_t *pieces = xmalloc((size + 1) * sizeof(*pieces)), piece_count = 0;
    for (size_t at = 0; at < size;) {
        const uint8_t *end = memchr(text + at, 1, size - at);
        const size_t story = end ? (size_t)(end - text) - at : size - at;
        piece_count += plain_split(text + at, story, pieces + piece_count);
        at += story + 1;
        if (end) pieces[piece_count++] = SIZE_MAX; /* skip the separator */
    }
    uint32_t *ids = xmalloc((size + 1) * sizeof(*ids));
    for (size_t i = 0; i < size; i++) ids[i] = plain_byte_id(text[i]);
    Buffer *names = xcalloc(vocab, sizeof(*names));
    for (unsigned byte = 0; byte < 256; byte++) {
        const uint8_t one = (uint8_t)byte;
        buffer_append(&names[plain_byte_id(one)], &one, 1);
    }
    bpe->count = 0;
    size_t *counts = xmalloc((size + 1) * sizeof(*counts)); /* how many ids each piece has now */
    memcpy(counts, pieces, piece_count * sizeof(*counts));
    while (256 + bpe->count + 1 < vocab) {
        size_t best_count = 0;
        PlainMerge best = {0, 0};
        int64_t *table = xcalloc((size_t)vocab * vocab, sizeof(*table));
        for (int pass = 0; pass < 2; pass++) {
            for (size_t piece = 0, at = 0; piece < piece_count; piece++) {
                if (pieces[piece] == SIZE_MAX) {
                    at++;
                    continue;
                }
                for (size_t i = 0; i + 1 < counts[piece]; i++) {
                    const PlainMerge pair = {ids[at + i], ids[at + i + 1]};
                    int64_t *entry = &table[(size_t)pair.left * vocab + pair.right];
                    if (pass == 0) {
                        ++*entry;
                        continue;
                    }
                    const int left = plain_compare(&names[pair.left], &names[best.left]);
                    const int right = plain_compare(&names[pair.right], &names[best.right]);
                    if ((size_t)*entry > best_count ||
                        ((size_t)*entry == best_count && (left > 0 || (left == 0 && right > 0))))
                        best_count = (size_t)*entry, best = pair;
                }
                at += pieces[piece];
            }
        }
        free(table);
        if (best_count == 0) break;
        const uint32_t id = 256 + bpe->count;
        bpe->merges[bpe->count++] = best;
        buffer_append(&names[id], names[best.left].data, names[best.left].size);
        buffer_append(&names[id], names[best.right].data, names[best.right].size);
        for (size_t piece = 0, at = 0; piece < piece_count; piece++) {
            if (pieces[piece] == SIZE_MAX) {
                at++;
                continue;
            }
            counts[piece] = plain_replace(ids + at, counts[piece], best, id);
            at += pieces[piece];
        }
    }
    for (uint32_t id = 0; id < vocab; id++) buffer_free(&names[id]);
    free(names);
    free(counts);
    free(ids);
    free(pieces);
}

/* The merges of a tokenizer as text, spelled by this file's own reading of GPT-2's alphabet. */
static Buffer plain_merges_text(const PlainBpe *bpe, const Bpe *names) {
    Buffer text = {0};
    buffer_append_text(&text, "#version: 0.2\n");
    for (uint32_t rank = 0; rank < bpe->count; rank++) {
        const uint32_t parts[2] = {bpe->merges[rank].left, bpe->merges[rank].right};
        for (int side = 0; side < 2; side++) {
            size_t size;
            const uint8_t *token = bpe_token_bytes(names, parts[side], &size);
            for (size_t i = 0; i < size; i++) {
                const uint32_t id = plain_byte_id(token[i]);
                const uint32_t code = id >= 188 ? 256 + id - 188 : token[i];
                const uint8_t two[2] = {(uint8_t)(0xC0 + code / 64), (uint8_t)(0x80 + code % 64)};
                const uint8_t one = (uint8_t)code;
                buffer_append(&text, code < 128 ? &one : two, code < 128 ? 1 : 2);
            }
            buffer_append_text(&text, side == 0 ? " " : "\n");
        }
    }
    return text;
}

/* ---- random texts ---- */

/* Everything that splits in a way of its own: white space of one, two and three bytes, what only looks
 * like it, letters, numbers that are no digits, apostrophes, combining marks, characters of four bytes,
 * and parts of sequences that may or may not come together. */
static const char *const nasty[] = {" ",
                                    " ",
                                    " ",
                                    " ",
                                    "\t",
                                    "\n",
                                    "\n",
                                    "\r",
                                    "\r\n",
                                    "\v",
                                    "\f",
                                    "\xC2\x85",
                                    "\xC2\xA0",
                                    "\xE2\x80\x83",
                                    "\xE3\x80\x80",
                                    "\xE1\x9A\x80",
                                    "\xE2\x80\xA8",
                                    "\xE2\x80\x8B",
                                    "\xEF\xBB\xBF",
                                    "\x1C",
                                    "\x7F",
                                    "a",
                                    "b",
                                    "Z",
                                    "word",
                                    "ninelette",
                                    "eightlet",
                                    "'",
                                    "'",
                                    "'s",
                                    "'t",
                                    "'re",
                                    "'ve",
                                    "'m",
                                    "'ll",
                                    "'d",
                                    "'S",
                                    "'r",
                                    "'l",
                                    "s",
                                    "l",
                                    "e",
                                    "v",
                                    "0",
                                    "7",
                                    "12345",
                                    "\xC2\xB2",
                                    "\xC2\xBD",
                                    "\xE2\x91\xA0",
                                    "\xE2\x85\xA7",
                                    "\xD9\xA3",
                                    ".",
                                    "!",
                                    "\"",
                                    "--",
                                    "@",
                                    "[",
                                    "`",
                                    "{",
                                    "_",
                                    "^",
                                    "\xE2\x80\x99",
                                    "\xE2\x80\xA6",
                                    "\xC3\xA9",
                                    "\xC4\xB0",
                                    "\xD0\xB6",
                                    "e\xCC\x81",
                                    "\xE0\xA4\xA8\xE0\xA5\x8D",
                                    "\xE4\xB8\xAD",
                                    "\xE6\x96\x87",
                                    "\xE3\x80\x82",
                                    "\xF0\x9F\x99\x83",
                                    "\xF0\x9F\x87\xBA",
                                    "\xF0\xA0\x80\x80",
                                    "\xF0\x9D\x90\x80",
                                    "\x80",
                                    "\xBF",
                                    "\xC0",
                                    "\xC2",
                                    "\xC3",
                                    "\xE0",
                                    "\xE2",
                                    "\xE2\x80",
                                    "\xE3\x80",
                                    "\xED\xA0\x80",
                                    "\xF0",
                                    "\xF0\x9F",
                                    "\xF0\x9F\x99",
                                    "\xF4\x90\x80\x80",
                                    "\xF5",
                                    "\xFF",
                                    "\x85",
                                    "\xA0"};

enum { NASTY = sizeof(nasty) / sizeof(nasty[0]), NASTY_WHITE = 24 }; /* the first 24 are white, or nearly */

static void append_some(Rng *rng, Buffer *out, size_t units, size_t kinds) {
    for (size_t i = 0; i < units; i++) {
        const char *unit = nasty[rng_below(rng, kinds)];
        /* Now and then a run, since runs are what the splitter is about. */
        for (uint64_t n = rng_below(rng, 8) == 0 ? 1 + rng_below(rng, 12) : 1; n > 0; n--)
            buffer_append_text(out, unit);
    }
}

static void append_nasty(Rng *rng, Buffer *out, size_t units) {
    append_some(rng, out, units, NASTY);
}

/* A text of few letters, so that pairs repeat and overlap. */
static void append_few_letters(Rng *rng, Buffer *out, size_t size) {
    const char *const sets[] = {"a",
                                "ab",
                                "abc",
                                "abcd",
                                "aaaaaab",
                                "a ",
                                "ab  ",
                                "abc \n",
                                "ab \x01",
                                "a\xC3\xA9 ",
                                "\xE4\xB8\xAD\xE6\x96",
                                "01a",
                                "..a",
                                "' s"};
    const char *set = sets[rng_below(rng, sizeof(sets) / sizeof(sets[0]))];
    const size_t letters = strlen(set);
    for (size_t i = 0; i < size; i++) buffer_append(out, &set[rng_below(rng, letters)], 1);
}

/* A megabyte with everything in it that blocks and pieces could cut wrong: words, runs of
 * spaces, text without white space, a long run of one class, stories' ends. */
static Buffer large_text(void) {
    Rng rng = rng_start(7, 1);
    Buffer text = {0};
    for (int part = 0; part < 3; part++) {
        for (int word = 0; word < 20000; word++) {
            for (uint64_t n = 1 + rng_below(&rng, 8); n > 0; n--) {
                const uint8_t letter = (uint8_t)('a' + rng_below(&rng, 5));
                buffer_append(&text, &letter, 1);
            }
            buffer_append_text(&text, &"    "[rng_below(&rng, 4)]);
            if (rng_below(&rng, 9) == 0) buffer_append_text(&text, rng_below(&rng, 3) ? ".\n" : "\x01");
        }
        for (int i = 0; i < 30000; i++)
            buffer_append_text(&text, part == 1 ? "a" : rng_below(&rng, 9) ? "\xE4\xB8\xAD" : "\xE3\x80\x82");
        append_nasty(&rng, &text, 20000);
    }
    return text;
}

/* ---- the splitter ---- */

/* Each code point beside a letter, a digit and a mark: it joins the one of its own class. The totals are
 * those of Unicode 16.0, of which the table is made. */
TEST(classes_of_all_code_points) {
    size_t letters = 0, numbers = 0, spaces = 0;
    for (uint32_t code = 1; code < 0x110000; code++) {
        if (code >= 0xD800 && code < 0xE000) continue;
        uint8_t text[5];
        size_t size = 0;
        if (code < 0x80) {
            text[size++] = (uint8_t)code;
        } else {
            const unsigned more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
            text[size++] = (uint8_t)((0xFF00u >> (more + 1) & 0xFF) | code >> (6 * more));
            for (unsigned i = more; i-- > 0;) text[size++] = (uint8_t)(0x80 | (code >> (6 * i) & 63));
        }
        const char beside[3] = {'a', '1', '!'};
        bool joins[3];
        for (int i = 0; i < 3; i++) {
            text[size] = (uint8_t)beside[i];
            joins[i] = pretokenize_next(text, size + 1, false) == size + 1;
        }
        if (code == ' ') { /* it joins any */
            CHECK(joins[0] && joins[1] && joins[2]);
            spaces++;
            continue;
        }
        CHECK_MSG(joins[0] + joins[1] + joins[2] <= 1, "U+%04X is of two classes", code);
        letters += joins[0], numbers += joins[1], spaces += !joins[0] && !joins[1] && !joins[2];
    }
    CHECK_MSG(letters == 141028, "%zu letters", letters);
    CHECK_MSG(numbers == 1911, "%zu numbers", numbers);
    CHECK_MSG(spaces == 25, "%zu of white space", spaces);
}

TEST(splits_as_the_pattern_reads) {
    Rng rng = rng_start(1, 1);
    for (int round = 0; round < 6000; round++) {
        Buffer text = {0};
        append_nasty(&rng, &text, 1 + rng_below(&rng, round % 2 ? 6 : 40));
        size_t *pieces = xmalloc(text.size * sizeof(*pieces));
        const size_t count = plain_split(text.data, text.size, pieces);
        size_t at = 0;
        for (size_t i = 0; i < count; at += pieces[i++]) {
            const size_t length = pretokenize_next(text.data + at, text.size - at, false);
            CHECK_MSG(length == pieces[i], "round %d, byte %zu: %zu bytes, expected %zu", round, at, length,
                      pieces[i]);
            /* With less of the text in view: the same or "not known", and known once the next character
             * (two after white space) is in view. */
            for (size_t view = 1; view <= text.size - at; view++) {
                const size_t early = pretokenize_next(text.data + at, view, true);
                CHECK_MSG(early == pieces[i] || (early == 0 && view < pieces[i] + 7),
                          "round %d, byte %zu, %zu bytes in view: %zu, expected %zu", round, at, view, early,
                          pieces[i]);
                if (view > pieces[i] + 7) break;
            }
        }
        free(pieces);
        buffer_free(&text);
    }
}

/* ---- GPT-2 and the reference ---- */

TEST(encodes_as_gpt2) {
    Buffer cases = {0};
    if (!read_data(DATA "gpt2/golden_cases.jsonl", &cases)) SKIP("no " DATA "gpt2/golden_cases.jsonl");
    Error err;
    Bpe *bpe = bpe_load(DATA "gpt2/vocab.bpe", &err);
    CHECK_MSG(bpe, "%s", err.text);
    if (!bpe) return;
    BpeEncoder *encoder = bpe_encoder_new(bpe, 1000);
    size_t lines = 0;
    for (size_t at = 0; at < cases.size; lines++) {
        const uint8_t *end = memchr(cases.data + at, '\n', cases.size - at);
        const size_t size = end ? (size_t)(end - cases.data) - at : cases.size - at;
        json_t *line = json_loadb((const char *)cases.data + at, size, JSON_ALLOW_NUL, NULL);
        at += size + 1;
        const char *const fields[2] = {"gpt2", "gpt2_special"};
        for (int special = 0; special < 2; special++) {
            const json_t *expected = json_object_get(line, fields[special]);
            CHECK(json_is_array(expected));
            const json_t *text = json_object_get(line, "text");
            Tokens tokens = {0};
            (special ? bpe_encode_special : bpe_encode)(encoder, bytes_of(json_string_value(text)),
                                                        json_string_length(text), &tokens);
            bool same = tokens.count == json_array_size(expected);
            for (size_t i = 0; same && i < tokens.count; i++)
                same = json_integer_value(json_array_get(expected, i)) == (json_int_t)tokens.ids[i];
            CHECK_MSG(same, "line %zu, %s", lines + 1, fields[special]);
            tokens_free(&tokens);
        }
        json_decref(line);
    }
    CHECK_MSG(lines == 37, "%zu cases", lines);
    bpe_encoder_free(encoder);
    bpe_free(bpe);
    buffer_free(&cases);
}

TEST(numbers_tokens_as_gpt2) {
    Buffer text = {0};
    if (!read_data(DATA "gpt2/vocab.bpe", &text)) SKIP("no " DATA "gpt2/vocab.bpe");
    Error err;
    Bpe *bpe = bpe_from_merges_text(text.data, text.size, "vocab.bpe", &err);
    CHECK_MSG(bpe, "%s", err.text);
    if (!bpe) return;
    CHECK(bpe_vocab_size(bpe) == 50257 && bpe_end_of_text(bpe) == 50256);
    Buffer canonical = merges_of(bpe);
    CHECK(same_bytes(&canonical, &text));

    /* Our tokenizer.json has the vocabulary that GPT-2's encoder.json has. */
    json_t *expected = json_load_file(DATA "gpt2/encoder.json", 0, NULL);
    CHECK(expected);
    Buffer written = {0};
    bpe_tokenizer_json(bpe, &written);
    json_t *ours = json_loadb((const char *)written.data, written.size, JSON_REJECT_DUPLICATES, NULL);
    CHECK(ours);
    CHECK(json_equal(json_object_get(json_object_get(ours, "model"), "vocab"), expected));
    json_decref(ours);
    json_decref(expected);
    buffer_free(&written);
    buffer_free(&canonical);
    buffer_free(&text);
    bpe_free(bpe);
}

TEST(trains_the_reference_merges) {
    Buffer corpus = {0}, expected = {0};
    if (!read_data(DATA "bpe/corpus.en", &corpus)) SKIP("no " DATA "bpe/corpus.en");
    CHECK(read_data(DATA "bpe/train-bpe-reference-merges.txt", &expected));
    Bpe *bpe = train(corpus.data, corpus.size, 500, 2, 0);
    CHECK(bpe_vocab_size(bpe) == 500);
    Buffer ours = merges_of(bpe);
    const size_t head = strlen("#version: 0.2\n"), size = expected.size;
    CHECK(ours.size == head + size && memcmp(ours.data + head, expected.data, size) == 0);
    buffer_free(&corpus);
    buffer_free(&expected);
    buffer_free(&ours);
    bpe_free(bpe);
}

/* ---- against the plain versions ---- */

TEST(trains_and_encodes_as_the_plain_versions) {
    Rng rng = rng_start(2, 1);
    PlainBpe *plain = xmalloc(sizeof(*plain));
    for (int round = 0; round < 400; round++) {
        Buffer text = {0}, other = {0};
        if (round % 4 == 3) append_nasty(&rng, &text, 1 + rng_below(&rng, 200));
        else append_few_letters(&rng, &text, 1 + rng_below(&rng, round % 4 == 2 ? 400 : 60));
        const uint32_t vocab = BPE_MIN_VOCAB + (uint32_t)rng_below(&rng, 60);
        plain_train(plain, text.data, text.size, vocab);
        Bpe *bpe = train(text.data, text.size, vocab, 1 + round % 3, rng_below(&rng, 9));
        Buffer expected = plain_merges_text(plain, bpe), merges = merges_of(bpe);
        CHECK_MSG(bpe_vocab_size(bpe) == 257 + plain->count, "round %d: %u ids, expected %u", round,
                  bpe_vocab_size(bpe), 257 + plain->count);
        CHECK_MSG(same_bytes(&merges, &expected), "round %d: other merges", round);

        /* Its own text, and another of the same kind with long pieces. */
        append_few_letters(&rng, &other, 500);
        buffer_append(&other, text.data, text.size);
        Tokens ids = plain_encode(plain, other.data, other.size);
        for (size_t cache = 0; cache < 2; cache++) {
            for (size_t piece = 0; piece < 3; piece++) {
                Tokens ours = encode(bpe, other.data, other.size, cache * 64, piece * 3);
                CHECK_MSG(same_tokens(&ours, &ids), "round %d, cache %zu, piece %zu: other ids", round, cache,
                          piece);
                tokens_free(&ours);
            }
        }
        tokens_free(&ids);
        buffer_free(&expected);
        buffer_free(&merges);
        buffer_free(&text);
        buffer_free(&other);
        bpe_free(bpe);
    }
    free(plain);
}

/* Merges that no training gives: random pairs of earlier tokens, so that ranks and lengths disagree. */
TEST(encodes_any_merges_as_the_plain_version) {
    Rng rng = rng_start(3, 1);
    PlainBpe *plain = xmalloc(sizeof(*plain));
    for (int round = 0; round < 150; round++) {
        Buffer merges = {0};
        char tokens[40][16] = {"a", "b", "c"};
        uint32_t ids[40] = {plain_byte_id('a'), plain_byte_id('b'), plain_byte_id('c')};
        size_t count = 3;
        plain->count = 0;
        for (int attempt = 0; attempt < 200 && count < 40; attempt++) {
            const size_t left = rng_below(&rng, count), right = rng_below(&rng, count);
            char joined[32];
            snprintf(joined, sizeof(joined), "%s%s", tokens[left], tokens[right]);
            bool fresh = strlen(joined) < 16;
            for (size_t i = 0; i < count; i++) fresh = fresh && strcmp(tokens[i], joined) != 0;
            if (!fresh) continue;
            char *line = xformat("%s %s\n", tokens[left], tokens[right]);
            buffer_append_text(&merges, line);
            free(line);
            plain->merges[plain->count] = (PlainMerge){ids[left], ids[right]};
            ids[count] = 256 + plain->count++;
            memcpy(tokens[count++], joined, strlen(joined) + 1);
        }
        Error err;
        Bpe *bpe = bpe_from_merges_text(merges.data, merges.size, "random", &err);
        CHECK_MSG(bpe, "%s", err.text);
        for (int kind = 0; bpe && kind < 12; kind++) {
            uint8_t text[600];
            const size_t size = kind < 4 ? 1 + rng_below(&rng, 20) : 1 + rng_below(&rng, sizeof(text));
            const uint64_t letters = 1 + rng_below(&rng, 3);
            for (size_t i = 0; i < size; i++) text[i] = (uint8_t)('a' + rng_below(&rng, letters));
            Tokens expected = plain_encode(plain, text, size), ours = encode(bpe, text, size, 16, 0);
            CHECK_MSG(same_tokens(&ours, &expected), "round %d, kind %d, %zu bytes", round, kind, size);
            tokens_free(&expected);
            tokens_free(&ours);
        }
        bpe_free(bpe);
        buffer_free(&merges);
    }
    free(plain);
}

/* ---- pieces, threads, round trips ---- */

TEST(pieces_and_threads_change_nothing) {
    Buffer text = large_text();
    const size_t pieces[] = {0, 1, 7, 4096, 1 << 20};
    const int threads[] = {1, 2, 7};
    Bpe *bpe = train(text.data, text.size, 1200, 1, 0);
    for (size_t p = 0; p < 5; p++) {
        for (size_t t = 0; t < 3; t++) {
            Bpe *other = train(text.data, text.size, 1200, threads[t], pieces[p]);
            CHECK_MSG(bpe_same(bpe_fingerprint(other), bpe_fingerprint(bpe)),
                      "pieces of %zu, %d threads: other merges", pieces[p], threads[t]);
            bpe_free(other);
        }
    }
    Tokens expected = encode(bpe, text.data, text.size, 0, 0);
    for (size_t p = 0; p < 5; p++) {
        Tokens ids = encode(bpe, text.data, text.size, 1 << 12, pieces[p]);
        CHECK_MSG(same_tokens(&ids, &expected), "pieces of %zu: other ids", pieces[p]);
        tokens_free(&ids);
    }
    Error err;
    Buffer back = {0};
    CHECK(bpe_decode(bpe, expected.ids, expected.count, &back, &err));
    CHECK(same_bytes(&back, &text));
    buffer_free(&back);
    tokens_free(&expected);
    bpe_free(bpe);
    buffer_free(&text);
}

/* The trainer cuts its text every 2^18 bytes or so, where it thinks a piece begins. Around these places the
 * text has pieces that occur nowhere else, and merging goes on until all pieces are whole: so one that was
 * cut shows. The other trainer gets each piece (by the plain splitter) as a story of its own. */
TEST(blocks_end_where_pieces_do) {
    Rng rng = rng_start(10, 1);
    for (int round = 0; round < 18; round++) {
        const bool spaced = round % 3 != 0; /* else: no place where two bytes show it */
        Buffer text = {0};
        for (size_t block = 1; block <= 3; block++) {
            while (text.size < (block << 18) - 600) buffer_append_text(&text, spaced ? "a " : "a.");
            while (text.size < (block << 18) + 3000) {
                Buffer unit = {0};
                append_some(&rng, &unit, 1, round % 3 == 1 ? NASTY_WHITE : NASTY);
                if (spaced || (!memchr(unit.data, ' ', unit.size) && !memchr(unit.data, '\n', unit.size)))
                    buffer_append(&text, unit.data, unit.size);
                buffer_free(&unit);
            }
        }
        size_t *pieces = xmalloc(text.size * sizeof(*pieces));
        const size_t count = plain_split(text.data, text.size, pieces);
        BpeTrainer *whole = bpe_trainer_new(1), *apart = bpe_trainer_new(1);
        bpe_trainer_feed(whole, text.data, text.size);
        for (size_t piece = 0, at = 0; piece < count; at += pieces[piece++]) {
            bpe_trainer_feed(apart, text.data + at, pieces[piece]);
            bpe_trainer_end_story(apart);
        }
        Error err;
        Bpe *a = bpe_trainer_train(whole, BPE_MAX_VOCAB, &err),
            *b = bpe_trainer_train(apart, BPE_MAX_VOCAB, &err);
        CHECK_MSG(bpe_same(bpe_fingerprint(a), bpe_fingerprint(b)), "round %d", round);
        bpe_free(a);
        bpe_free(b);
        bpe_trainer_free(whole);
        bpe_trainer_free(apart);
        free(pieces);
        buffer_free(&text);
    }
}

TEST(a_story_ends_a_word) {
    /* "ab" across stories is no pair, and neither is "a b"'s space that would join. */
    Bpe *bpe = train(bytes_of("a\x01"
                              "b\x01\x01"
                              "a\x01 \x01"
                              "b"),
                     9, 300, 1, 0);
    CHECK(bpe_vocab_size(bpe) == BPE_MIN_VOCAB);
    bpe_free(bpe);
}

TEST(round_trip_of_any_bytes) {
    Buffer sample = large_text();
    Bpe *bpe = train(sample.data, sample.size, 2000, 2, 0);
    Rng rng = rng_start(4, 1);
    for (int round = 0; round < 60; round++) {
        Buffer text = {0}, back = {0};
        if (round % 3 == 0) append_nasty(&rng, &text, 300);
        else if (round == 1) buffer_append(&text, "one\r\ntwo\r\n\0\0three\0\xFF\xC3\r\n", 23);
        else
            for (int i = 0; i < 3000; i++) {
                const uint8_t byte = (uint8_t)rng_below(&rng, round % 2 ? 256 : 4);
                buffer_append(&text, &byte, 1);
            }
        Tokens ids = encode(bpe, text.data, text.size, 100, rng_below(&rng, 50));
        Error err;
        CHECK(bpe_decode(bpe, ids.ids, ids.count, &back, &err));
        CHECK_MSG(same_bytes(&back, &text), "round %d", round);
        tokens_free(&ids);
        buffer_free(&back);
        buffer_free(&text);
    }
    Tokens none = encode(bpe, NULL, 0, 100, 0);
    CHECK(none.count == 0);
    bpe_free(bpe);
    buffer_free(&sample);
}

/* A million of the same, and a million random letters: in pieces too, where looking again at all that is
 * held for each piece would take hours. */
TEST(long_runs) {
    Buffer sample = large_text();
    Bpe *bpe = train(sample.data, sample.size, 2000, 2, 0);
    const size_t size = 1000000;
    uint8_t *text = xmalloc(size);
    Rng rng = rng_start(5, 1);
    const char kinds[] = {'a', '^', ' ', '_', '?'};
    for (size_t k = 0; k < sizeof(kinds); k++) {
        for (size_t i = 0; i < size; i++)
            text[i] = kinds[k] == '?' ? (uint8_t)('a' + rng_below(&rng, 26)) : (uint8_t)kinds[k];
        Tokens once = encode(bpe, text, size, 100, 0), pieces = encode(bpe, text, size, 100, 13);
        CHECK_MSG(same_tokens(&once, &pieces), "'%c'", kinds[k]);
        Buffer back = {0};
        Error err;
        CHECK(bpe_decode(bpe, once.ids, once.count, &back, &err));
        CHECK(back.size == size && memcmp(back.data, text, size) == 0);
        buffer_free(&back);
        tokens_free(&once);
        tokens_free(&pieces);
    }
    free(text);
    bpe_free(bpe);
    buffer_free(&sample);
}

TEST(end_of_text_in_the_text) {
    Bpe *bpe = train(bytes_of("the end of the text <|endoftext|> <|end <|end"), 45, 290, 1, 0);
    const uint32_t special = bpe_end_of_text(bpe);
    const char *const parts[] = {"",   "a",      "<",  "<|", "<|endoftext|", "<|endoftext|<",
                                 "|>", " text ", "<<", "\n"};
    Rng rng = rng_start(6, 1);
    BpeEncoder *encoder = bpe_encoder_new(bpe, 100), *plain = bpe_encoder_new(bpe, 0);
    for (int round = 0; round < 500; round++) {
        Buffer text = {0};
        Tokens expected = {0}, ours = {0};
        for (uint64_t n = rng_below(&rng, 5); n > 0; n--) {
            buffer_append_text(&text, parts[rng_below(&rng, 10)]);
            if (rng_below(&rng, 2)) buffer_append_text(&text, "<|endoftext|>");
        }
        buffer_append(&text, "", 1);
        for (const char *at = (const char *)text.data; at;) { /* split with strstr, encode the parts */
            const char *found = strstr(at, "<|endoftext|>");
            bpe_encode(plain, bytes_of(at), found ? (size_t)(found - at) : strlen(at), &expected);
            if (found) add_token(&expected, special);
            at = found ? found + strlen("<|endoftext|>") : NULL;
        }
        text.size--;
        const size_t piece = rng_below(&rng, 20);
        if (piece == 0) {
            bpe_encode_special(encoder, text.data, text.size, &ours);
        } else {
            for (size_t at = 0; at < text.size; at += piece)
                bpe_encoder_feed_special(encoder, text.data + at,
                                         text.size - at < piece ? text.size - at : piece, &ours);
            bpe_encoder_end(encoder, &ours);
        }
        CHECK_MSG(same_tokens(&ours, &expected), "round %d: %s", round, (const char *)text.data);
        Tokens ordinary = encode(bpe, text.data, text.size, 0, 0);
        for (size_t i = 0; i < ordinary.count; i++) CHECK(ordinary.ids[i] != special);
        Buffer back = {0};
        Error err;
        CHECK(bpe_decode(bpe, ours.ids, ours.count, &back, &err));
        CHECK(same_bytes(&back, &text));
        buffer_free(&back);
        buffer_free(&text);
        tokens_free(&expected);
        tokens_free(&ordinary);
        tokens_free(&ours);
    }
    bpe_encoder_free(encoder);
    bpe_encoder_free(plain);
    bpe_free(bpe);
}

TEST(decode_refuses_ids_out_of_range) {
    Bpe *bpe = train(bytes_of("aaaa"), 4, 300, 1, 0);
    const uint32_t ids[] = {1, 2, bpe_vocab_size(bpe) - 1, bpe_vocab_size(bpe)};
    Buffer out = {0};
    Error err;
    CHECK(bpe_decode(bpe, ids, 3, &out, &err));
    const size_t before = out.size;
    CHECK(!bpe_decode(bpe, ids, 4, &out, &err));
    CHECK(out.size == before);
    char *expected = xformat("token 3 is %u", bpe_vocab_size(bpe));
    CHECK_MSG(strstr(err.text, expected), "%s", err.text);
    free(expected);
    buffer_free(&out);
    bpe_free(bpe);
}

/* ---- training on what is hardly text ---- */

TEST(training_on_little) {
    const char *const texts[] = {"", " ", "\n\n", "a", "a b c", "\x01\x01"};
    const uint32_t vocab[] = {257, 257, 258, 257, 259, 257}; /* "\n\n"; " b" and " c" */
    for (size_t i = 0; i < 6; i++) {
        Bpe *bpe = train(bytes_of(texts[i]), strlen(texts[i]), BPE_MAX_VOCAB, 2, 1);
        CHECK_MSG(bpe_vocab_size(bpe) == vocab[i], "text %zu: %u ids", i, bpe_vocab_size(bpe));
        bpe_free(bpe);
    }
    Error err;
    BpeTrainer *trainer = bpe_trainer_new(0);
    const uint32_t wrong[] = {0, 256, 65537};
    for (size_t i = 0; i < 3; i++)
        CHECK(!bpe_trainer_train(trainer, wrong[i], &err) && strstr(err.text, "257 to 65536"));

    /* A trainer can be fed on after it has trained. */
    bpe_trainer_feed(trainer, bytes_of("ab"), 2);
    Bpe *first = bpe_trainer_train(trainer, 300, &err);
    bpe_trainer_feed(trainer, bytes_of("cd cd"), 5);
    Bpe *second = bpe_trainer_train(trainer, 300, &err);
    CHECK(bpe_vocab_size(first) == 258 && bpe_vocab_size(second) == 260);
    bpe_free(first);
    bpe_free(second);
    bpe_trainer_free(trainer);
}

/* Past the point where every pair occurs once, each merge makes the longest token longer. */
TEST(training_on_one_endless_word) {
    Rng rng = rng_start(8, 1);
    Buffer text = {0};
    for (int i = 0; i < 60000; i++) {
        const uint8_t letter = (uint8_t)('a' + rng_below(&rng, 26));
        buffer_append(&text, &letter, 1);
    }
    Bpe *bpe = train(text.data, text.size, BPE_MAX_VOCAB, 1, 0);
    size_t total = 0;
    for (uint32_t id = 0, last = bpe_end_of_text(bpe); id < last; id++) {
        size_t size;
        bpe_token_bytes(bpe, id, &size);
        total += size;
    }
    CHECK_MSG(total <= (size_t)64 << 20, "%zu bytes of tokens", total);
    Buffer merges = merges_of(bpe);
    Error err;
    Bpe *again = bpe_from_merges_text(merges.data, merges.size, "again", &err);
    CHECK_MSG(again, "%s", err.text);
    CHECK(again && bpe_same(bpe_fingerprint(again), bpe_fingerprint(bpe)));
    bpe_free(again);
    bpe_free(bpe);
    buffer_free(&merges);
    buffer_free(&text);
}

/* ---- files ---- */

/* Loads a text; NULL expected: it must load and give `merges` merges. Otherwise the error must name the
 * file and say that. */
static void check_load(const char *what, const void *text, size_t size, const char *expected,
                       uint32_t merges) {
    Error err = {0};
    Bpe *bpe = bpe_from_merges_text(text, size, "the-file", &err);
    if (expected) {
        CHECK_MSG(!bpe, "%s: loaded", what);
        CHECK_MSG(strstr(err.text, "the-file: ") == err.text && strstr(err.text, expected), "%s: %s", what,
                  err.text);
        CHECK_MSG(!strchr(err.text, '\n') && strlen(err.text) < 400, "%s: %s", what, err.text);
    } else {
        CHECK_MSG(bpe && bpe_vocab_size(bpe) == merges + 257, "%s: %s", what, err.text);
    }
    bpe_free(bpe);
}

TEST(merges_files_good_and_hostile) {
    const struct {
        const char *text, *expected;
        uint32_t merges;
    } cases[] = {
        {"", NULL, 0},
        {"#version: 0.2\n", NULL, 0},
        {"#version: 0.2\r\na b\r\nab c\r\n", NULL, 2},
        {"a b\nab ab\n", NULL, 2},
        {"# v\n", NULL, 1},
        {"#version: 0.2\n# #\n## a\n", NULL, 2},
        {"\xC4\xA0 t\n\xC4\xA0t h\n\xC4\x8A \xC4\x8A\n\xC5\x83 \xC2\xA1\n", NULL, 4},
        {"#version: 0.2", "line 1: the last line does not end with a newline", 0},
        {"a b\nab c", "line 2: the last line does not end with a newline", 0},
        {"a b\n\nab c\n", "line 2: found \"\"", 0},
        {"a b\nc\n", "line 2: found \"c\"", 0},
        {"a  b\n", "line 1: found \"a  b\"", 0},
        {" a\n", "line 1: found \" a\"", 0},
        {"a \n", "line 1: found \"a \"", 0},
        {"a b c\n", "line 1: found \"a b c\"", 0},
        {"a b\n#version: 0.2\n", "line 2: \"#version:\" is no token yet", 0},
        {"ab c\na b\n", "line 1: \"ab\" is no token yet", 0},
        {"a b\na bc\n", "line 2: \"bc\" is no token yet", 0},
        {"a b\nb c\na b\n", "line 3: \"a b\" makes a token that exists already (id 256)", 0},
        {"a b\nb c\nab c\na bc\n", "line 4: \"a bc\" makes a token that exists already (id 258)", 0},
        {"a\tb c\n", "outside GPT-2's alphabet", 0},
        {"a \xC5\x84\n", "outside GPT-2's alphabet", 0}, /* U+0144, one past its end */
        {"a \xC2\xAD\n", "outside GPT-2's alphabet", 0}, /* U+00AD stands for no byte */
        {"a \xC4\n", "outside GPT-2's alphabet", 0},     /* cut */
        {"a \xC1\x81\n", "outside GPT-2's alphabet", 0}, /* overlong */
        {"a \xE4\xB8\xAD\n", "outside GPT-2's alphabet", 0},
        {"\xEF\xBB\xBF"
         "a b\n",
         "outside GPT-2's alphabet", 0}, /* a byte order mark */
        {"\x89PNG\r\n\x1A\n", "line 1: found", 0},
        {"{\"model\": {}}\n", "line 1: \"{\"model\":\" is no token yet", 0},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        check_load(cases[i].text, cases[i].text, strlen(cases[i].text), cases[i].expected, cases[i].merges);
    check_load("NUL", "a b\n\0 c\n", 8, "line 2: \"?\" has a character outside", 0);

    /* A line of a megabyte is shown in part. */
    Buffer text = {0};
    for (int i = 0; i < 1 << 20; i++) buffer_append_text(&text, "x");
    buffer_append_text(&text, " y\n");
    check_load("long line", text.data, text.size, "xxx...\" is no token yet", 0);

    /* As many merges as there may be, then one more: all pairs of the first 256 characters. */
    text.size = 0;
    Bpe *bytes = bpe_from_merges_text(NULL, 0, "none", NULL);
    PlainBpe *plain = xmalloc(sizeof(*plain));
    plain->count = 0;
    for (uint32_t i = 0; i < 65280; i++) plain->merges[plain->count++] = (PlainMerge){i / 256, i % 256};
    Buffer many = plain_merges_text(plain, bytes);
    check_load("too many", many.data, many.size, "line 65281: more than 65279 merges", 0);
    size_t last = many.size - 1;
    while (many.data[last - 1] != '\n') last--;
    check_load("just enough", many.data, last, NULL, 65279);
    free(plain);
    buffer_free(&many);
    bpe_free(bytes);

    /* Random damage to a good file: any answer but a crash; a good answer's canonical form loads again. */
    Buffer sample = large_text();
    Bpe *bpe = train(sample.data, sample.size, 400, 1, 0);
    Buffer good = merges_of(bpe);
    Rng rng = rng_start(9, 1);
    for (int round = 0; round < 400; round++) {
        text.size = 0;
        buffer_append(&text, good.data, round % 2 ? good.size : rng_below(&rng, good.size + 1));
        for (uint64_t n = rng_below(&rng, 4); n > 0 && text.size > 0; n--)
            text.data[rng_below(&rng, text.size)] = (uint8_t)rng_below(&rng, 256);
        Error err;
        Bpe *loaded = bpe_from_merges_text(text.data, text.size, "damaged", &err);
        if (!loaded) continue;
        Buffer canonical = merges_of(loaded);
        Bpe *again = bpe_from_merges_text(canonical.data, canonical.size, "again", &err);
        CHECK(again && bpe_same(bpe_fingerprint(again), bpe_fingerprint(loaded)));
        buffer_free(&canonical);
        bpe_free(again);
        bpe_free(loaded);
    }
    bpe_free(bpe);
    buffer_free(&good);
    buffer_free(&sample);
    buffer_free(&text);
}

TEST(saves_and_loads) {
    char folder[] = "/tmp/test_tokenizer.XXXXXX";
    CHECK(mkdtemp(folder));
    Buffer sample = large_text();
    Bpe *bpe = train(sample.data, sample.size, 900, 2, 0);
    Buffer text = merges_of(bpe);
    const BpeFingerprint print = bpe_fingerprint(bpe);
    CHECK(print.length == text.size && print.crc32 == checksum_crc32(0, text.data, text.size));
    char *path = xformat("%s/merges.txt", folder);
    Error err;
    CHECK_MSG(file_replace(path, text.data, text.size, &err), "%s", err.text);
    Bpe *loaded = bpe_load(path, &err);
    CHECK_MSG(loaded, "%s", err.text);
    CHECK(loaded && bpe_same(bpe_fingerprint(loaded), print));
    for (uint32_t id = 0; loaded && id < bpe_vocab_size(bpe); id++) {
        size_t a_size, b_size;
        const uint8_t *a = bpe_token_bytes(bpe, id, &a_size), *b = bpe_token_bytes(loaded, id, &b_size);
        CHECK(a_size == b_size && memcmp(a, b, a_size) == 0);
    }
    bpe_free(loaded);
    CHECK(!bpe_load(folder, &err));
    CHECK(folder_remove(folder, &err));
    CHECK(!bpe_load(path, &err) && strstr(err.text, path));

    /* tokenizer.json: what other tools need of it. */
    Buffer written = {0};
    bpe_tokenizer_json(bpe, &written);
    json_t *root = json_loadb((const char *)written.data, written.size, JSON_REJECT_DUPLICATES, NULL);
    CHECK(root);
    const char *type = NULL, *decoder = NULL, *content = NULL;
    int regex = 0, prefix = 1, special = 0, id = 0;
    json_t *vocab = NULL, *merges = NULL;
    CHECK(json_unpack(root, "{s:{s:s, s:b, s:b}, s:{s:s}, s:[{s:i, s:s, s:b}], s:{s:o, s:o}}",
                      "pre_tokenizer", "type", &type, "use_regex", &regex, "add_prefix_space", &prefix,
                      "decoder", "type", &decoder, "added_tokens", "id", &id, "content", &content, "special",
                      &special, "model", "vocab", &vocab, "merges", &merges) == 0);
    CHECK(type && strcmp(type, "ByteLevel") == 0 && decoder && strcmp(decoder, "ByteLevel") == 0);
    CHECK(regex == 1 && prefix == 0 && special == 1 && id == (int)bpe_end_of_text(bpe));
    CHECK(content && strcmp(content, "<|endoftext|>") == 0);
    CHECK(json_object_size(vocab) == bpe_vocab_size(bpe));
    CHECK(json_array_size(merges) == bpe_vocab_size(bpe) - 257);
    for (size_t rank = 0; rank < json_array_size(merges);
         rank++) { /* parts are older, the result has its id */
        const json_t *pair = json_array_get(merges, rank);
        CHECK(json_array_size(pair) == 2);
        const char *left = json_string_value(json_array_get(pair, 0)),
                   *right = json_string_value(json_array_get(pair, 1));
        char *joined = xformat("%s%s", left, right);
        CHECK(json_integer_value(json_object_get(vocab, joined)) == (json_int_t)(256 + rank));
        const json_t *left_id = json_object_get(vocab, left), *right_id = json_object_get(vocab, right);
        CHECK(left_id && json_integer_value(left_id) < (json_int_t)(256 + rank));
        CHECK(right_id && json_integer_value(right_id) < (json_int_t)(256 + rank));
        free(joined);
    }
    json_decref(root);
    buffer_free(&written);
    free(path);
    buffer_free(&text);
    buffer_free(&sample);
    bpe_free(bpe);
}

/* Last, since a stop stays asked for. */
TEST(training_stops_when_asked) {
    signals_install();
    raise(SIGUSR1);
    Error err = {0};
    BpeTrainer *trainer = bpe_trainer_new(2);
    bpe_trainer_feed(trainer, bytes_of("some text"), 9);
    CHECK(!bpe_trainer_train(trainer, 300, &err));
    CHECK_MSG(strstr(err.text, "stopped after 0 of 43 merges"), "%s", err.text);
    bpe_trainer_free(trainer);
}

int main(int argc, char **argv) {
    test_start(argc, argv, "tokenizer");
    RUN(classes_of_all_code_points);
    RUN(splits_as_the_pattern_reads);
    RUN(encodes_as_gpt2);
    RUN(numbers_tokens_as_gpt2);
    RUN(trains_the_reference_merges);
    RUN(trains_and_encodes_as_the_plain_versions);
    RUN(encodes_any_merges_as_the_plain_version);
    RUN(pieces_and_threads_change_nothing);
    RUN(blocks_end_where_pieces_do);
    RUN(a_story_ends_a_word);
    RUN(round_trip_of_any_bytes);
    RUN(long_runs);
    RUN(end_of_text_in_the_text);
    RUN(decode_refuses_ids_out_of_range);
    RUN(training_on_little);
    RUN(training_on_one_endless_word);
    RUN(merges_files_good_and_hostile);
    RUN(saves_and_loads);
    RUN(training_stops_when_asked);
    return test_finish();
}
