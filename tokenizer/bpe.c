/* bpe.c - the tokenizer itself: how it is laid out, its files, encode and decode.
 *
 * Encoding goes piece by piece (pretokenize.c), and what a piece becomes depends on the piece alone:
 *   - A piece of up to 15 bytes is looked up in the encoder's word cache first. Stories repeat their words,
 *     so nearly all pieces end here, in one cache line.
 *   - Else a short piece is merged by looking through its pairs for the lowest rank, again and again:
 *     quadratic, but a few dozen bytes fit in a few registers and lines.
 *   - A long piece (a run of a million letters, say) is merged with its pairs in lists by rank: each merge
 *     makes pairs of higher rank only, since a merge's parts are older than it, so one pass over the
 *     ranks does it, in time linear in the piece. */
#include "bpe.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "bpe_internal.h"
#include "pretokenize.h"

static const char end_of_text_name[] = "<|endoftext|>";
enum { END_OF_TEXT_NAME_SIZE = sizeof(end_of_text_name) - 1 };

#define NO_MERGE UINT32_MAX

enum { DECODE_STEP = 16 }; /* nearly all tokens are this long at most, and are copied in one go */

/* ---- GPT-2's alphabet ----
 * Its files write a byte as a character that can be seen: bytes 33-126, 161-172 and 174-255 as themselves
 * (in Latin-1), the other 68, in order, as U+0100 to U+0143. The bytes' ids follow that order too. */
enum { HIDDEN_BYTES = 68, FIRST_HIDDEN_ID = 256 - HIDDEN_BYTES };

static bool is_printable_byte(unsigned byte) {
    return (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
}

static void set_byte_ids(uint8_t byte_to_id[256], uint8_t id_to_byte[256]) {
    unsigned id = 0;
    for (int printable = 1; printable >= 0; printable--) {
        for (unsigned byte = 0; byte < 256; byte++) {
            if (is_printable_byte(byte) != (printable == 1)) continue;
            byte_to_id[byte] = (uint8_t)id;
            id_to_byte[id] = (uint8_t)byte;
            id++;
        }
    }
}

/* Writes one byte of a token as its character, in UTF-8; returns where the next one goes. */
static uint8_t *write_character(uint8_t *to, uint8_t byte, const uint8_t byte_to_id[256]) {
    const unsigned code = is_printable_byte(byte) ? byte : 0x100u + byte_to_id[byte] - FIRST_HIDDEN_ID;
    if (code < 0x80) {
        *to++ = byte;
    } else {
        *to++ = (uint8_t)(0xC0 | code >> 6);
        *to++ = (uint8_t)(0x80 | (code & 0x3F));
    }
    return to;
}

/* Appends the bytes that text[0 .. size) spells; false where it has a character not of the alphabet. */
static bool append_spelled(Buffer *out, const uint8_t *text, size_t size, const uint8_t id_to_byte[256]) {
    buffer_reserve(out, size);
    for (size_t i = 0; i < size; i++) {
        unsigned code = text[i];
        if (code >= 0x80) {
            if (code < 0xC2 || code > 0xC5 || i + 1 == size || (text[i + 1] & 0xC0) != 0x80) return false;
            code = (code & 0x1F) << 6 | (text[++i] & 0x3F);
        }
        const bool hidden = code >= 0x100;
        if (hidden ? code >= 0x100 + HIDDEN_BYTES : !is_printable_byte(code)) return false;
        out->data[out->size++] = hidden ? id_to_byte[FIRST_HIDDEN_ID + code - 0x100] : (uint8_t)code;
    }
    return true;
}

/* ---- building ---- */

Bpe *bpe_build_begin(void) {
    Bpe *bpe = xcalloc(1, sizeof(*bpe));
    bpe->parts = xmalloc(sizeof(*bpe->parts) * BPE_MAX_MERGES);
    bpe->start = xmalloc(sizeof(*bpe->start) * (BPE_MAX_VOCAB + 1));
    set_byte_ids(bpe->byte_to_id, bpe->id_to_byte);
    buffer_append(&bpe->bytes, bpe->id_to_byte, BPE_BYTES);
    for (size_t id = 0; id <= BPE_BYTES; id++) bpe->start[id] = id;
    return bpe;
}

void bpe_build_add(Bpe *bpe, uint32_t left, uint32_t right) {
    const uint32_t id = BPE_BYTES + bpe->merges;
    bpe->parts[bpe->merges][0] = (uint16_t)left;
    bpe->parts[bpe->merges][1] = (uint16_t)right;
    bpe->merges++;
    const size_t left_size = bpe->start[left + 1] - bpe->start[left];
    const size_t right_size = bpe->start[right + 1] - bpe->start[right];
    buffer_reserve(&bpe->bytes, left_size + right_size); /* so that the tokens' bytes stay where they are */
    buffer_append(&bpe->bytes, bpe->bytes.data + bpe->start[left], left_size);
    buffer_append(&bpe->bytes, bpe->bytes.data + bpe->start[right], right_size);
    bpe->start[id + 1] = bpe->bytes.size;
}

static uint32_t pair_slot(const Bpe *bpe, uint32_t pair) {
    return (pair * 0x9E3779B1u) >> bpe->slot_shift;
}

/* The id that a pair merges to, or NO_MERGE. Lower ids are lower ranks. */
static inline uint32_t merged_id(const Bpe *bpe, uint32_t left, uint32_t right) {
    const uint32_t pair = left << 16 | right, mask = UINT32_MAX >> bpe->slot_shift;
    for (uint32_t i = pair_slot(bpe, pair);; i = (i + 1) & mask) {
        const uint64_t slot = bpe->slots[i];
        if (slot == 0) return NO_MERGE;
        if (slot >> 32 == pair) return (uint32_t)slot;
    }
}

void bpe_build_finish(Bpe *bpe) {
    buffer_append(&bpe->bytes, end_of_text_name, END_OF_TEXT_NAME_SIZE);
    bpe->start[bpe_vocab_size(bpe)] = bpe->bytes.size;
    /* What decode may read behind the last token. */
    buffer_append(&bpe->bytes, (const uint8_t[DECODE_STEP]){0}, DECODE_STEP);

    unsigned log_slots = 4;
    while (((size_t)1 << log_slots) < 2 * (size_t)bpe->merges) log_slots++;
    bpe->slots = xcalloc((size_t)1 << log_slots, sizeof(*bpe->slots));
    bpe->slot_shift = 32 - log_slots;
    const uint32_t mask = UINT32_MAX >> bpe->slot_shift;
    for (uint32_t rank = 0; rank < bpe->merges; rank++) {
        const uint32_t pair = (uint32_t)bpe->parts[rank][0] << 16 | bpe->parts[rank][1];
        uint32_t i = pair_slot(bpe, pair);
        while (bpe->slots[i] != 0) i = (i + 1) & mask;
        bpe->slots[i] = (uint64_t)pair << 32 | (BPE_BYTES + rank);
    }

    Buffer text = {0};
    bpe_merges_text(bpe, &text);
    bpe->fingerprint.length = text.size;
    bpe->fingerprint.crc32 = checksum_crc32(0, text.data, text.size);
    buffer_free(&text);
}

void bpe_free(Bpe *bpe) {
    if (!bpe) return;
    free(bpe->parts);
    free(bpe->start);
    free(bpe->slots);
    buffer_free(&bpe->bytes);
    free(bpe);
}

BpeFingerprint bpe_fingerprint(const Bpe *bpe) {
    return bpe->fingerprint;
}

bool bpe_same(BpeFingerprint a, BpeFingerprint b) {
    return a.length == b.length && a.crc32 == b.crc32;
}

uint32_t bpe_vocab_size(const Bpe *bpe) {
    return BPE_BYTES + bpe->merges + 1;
}

uint32_t bpe_end_of_text(const Bpe *bpe) {
    return BPE_BYTES + bpe->merges;
}

const uint8_t *bpe_token_bytes(const Bpe *bpe, uint32_t id, size_t *size) {
    *size = bpe->start[id + 1] - bpe->start[id];
    return bpe->bytes.data + bpe->start[id];
}

/* ---- merges text ---- */

/* Finds a token by its bytes while a file is read: open addressing, at most half full. */
enum { LOG_NAME_SLOTS = 17 };

typedef struct Loader {
    Bpe *bpe;
    uint32_t *slots; /* (1 << LOG_NAME_SLOTS): id + 1, or 0 where free */
    Buffer spelled;  /* bytes of the part or token looked up last */
    const char *name;
    size_t line;
} Loader;

/* The slot that holds the token loader->spelled, or the free one where it belongs. */
static uint32_t *find_name(const Loader *loader) {
    const Buffer *wanted = &loader->spelled;
    size_t i = bytes_hash(wanted->data, wanted->size) >> (64 - LOG_NAME_SLOTS);
    for (;; i = (i + 1) & (((size_t)1 << LOG_NAME_SLOTS) - 1)) {
        uint32_t *slot = &loader->slots[i];
        if (*slot == 0) return slot;
        size_t size;
        const uint8_t *bytes = bpe_token_bytes(loader->bpe, *slot - 1, &size);
        if (size == wanted->size && memcmp(bytes, wanted->data, size) == 0) return slot;
    }
}

static void set_spelled(Loader *loader, uint32_t id) {
    size_t size;
    const uint8_t *bytes = bpe_token_bytes(loader->bpe, id, &size);
    loader->spelled.size = 0;
    buffer_append(&loader->spelled, bytes, size);
}

/* The beginning of a text, for a message. */
enum { SHOWN_BYTES = 40 };
typedef struct Shown {
    char text[SHOWN_BYTES + 4];
} Shown;

static Shown shown(const uint8_t *text, size_t size) {
    Shown result = {""};
    const size_t count = size < SHOWN_BYTES ? size : SHOWN_BYTES;
    for (size_t i = 0; i < count; i++) result.text[i] = text[i] ? (char)text[i] : '?';
    if (size > SHOWN_BYTES) memcpy(result.text + count, "...", 4);
    return result;
}

static bool find_part(Loader *loader, const uint8_t *text, size_t size, uint32_t *id, Error *err) {
    loader->spelled.size = 0;
    if (!append_spelled(&loader->spelled, text, size, loader->bpe->id_to_byte))
        return error_set(err,
                         "%s: line %zu: \"%s\" has a character outside GPT-2's alphabet of 256; expected a "
                         "merges file (merges.txt or vocab.bpe) with \"left right\" on each line",
                         loader->name, loader->line, shown(text, size).text);
    const uint32_t found = *find_name(loader);
    if (found == 0)
        return error_set(err,
                         "%s: line %zu: \"%s\" is no token yet; expected one character or the result of an "
                         "earlier line (are lines missing or out of order?)",
                         loader->name, loader->line, shown(text, size).text);
    *id = found - 1;
    return true;
}

static bool load_line(Loader *loader, const uint8_t *line, size_t size, Error *err) {
    Bpe *bpe = loader->bpe;
    const uint8_t *space = size ? memchr(line, ' ', size) : NULL;
    const size_t left_size = space ? (size_t)(space - line) : 0;
    const size_t right_size = space ? size - left_size - 1 : 0;
    if (left_size == 0 || right_size == 0 || memchr(space + 1, ' ', right_size))
        return error_set(err, "%s: line %zu: found \"%s\", expected two tokens with one space between them",
                         loader->name, loader->line, shown(line, size).text);
    uint32_t left, right;
    if (!find_part(loader, line, left_size, &left, err)) return false;
    if (!find_part(loader, space + 1, right_size, &right, err)) return false;
    if (bpe->merges == BPE_MAX_MERGES)
        return error_set(err, "%s: line %zu: more than %d merges; a vocabulary has at most %d ids",
                         loader->name, loader->line, BPE_MAX_MERGES, BPE_MAX_VOCAB);
    const size_t joined = bpe->start[left + 1] - bpe->start[left] + bpe->start[right + 1] - bpe->start[right];
    if (joined > BPE_MAX_TOKEN_BYTES - bpe->bytes.size)
        return error_set(err,
                         "%s: line %zu: the tokens up to here hold %zu bytes or more, expected %zu at most "
                         "(is this a tokenizer's file?)",
                         loader->name, loader->line, bpe->bytes.size + joined, BPE_MAX_TOKEN_BYTES);
    bpe_build_add(bpe, left, right);
    const uint32_t id = BPE_BYTES + bpe->merges - 1;
    set_spelled(loader, id);
    uint32_t *slot = find_name(loader);
    if (*slot != 0)
        return error_set(err,
                         "%s: line %zu: \"%s\" makes a token that exists already (id %u); expected each "
                         "merge to make a new one (is a line there twice?)",
                         loader->name, loader->line, shown(line, size).text, *slot - 1);
    *slot = id + 1;
    return true;
}

static bool load_lines(Loader *loader, const uint8_t *text, size_t size, Error *err) {
    /* Only a first line that says so is the version: a merge may begin with '#' too. */
    static const char version[] = "#version";
    const size_t version_size = sizeof(version) - 1;
    for (size_t at = 0; at < size;) {
        loader->line++;
        const uint8_t *line = text + at, *newline = memchr(line, '\n', size - at);
        if (!newline)
            return error_set(err,
                             "%s: line %zu: the last line does not end with a newline; is the file cut off?",
                             loader->name, loader->line);
        size_t line_size = (size_t)(newline - line);
        at += line_size + 1;
        /* "\r\n": the alphabet has no '\r', so it can only be part of the line's end. */
        if (line_size > 0 && line[line_size - 1] == '\r') line_size--;
        if (loader->line == 1 && line_size >= version_size && memcmp(line, version, version_size) == 0)
            continue;
        if (!load_line(loader, line, line_size, err)) return false;
    }
    return true;
}

Bpe *bpe_from_merges_text(const uint8_t *text, size_t size, const char *name, Error *err) {
    Loader loader = {.bpe = bpe_build_begin(), .name = name};
    loader.slots = xcalloc((size_t)1 << LOG_NAME_SLOTS, sizeof(*loader.slots));
    for (uint32_t id = 0; id < BPE_BYTES; id++) {
        set_spelled(&loader, id);
        *find_name(&loader) = id + 1;
    }
    const bool good = load_lines(&loader, text, size, err);
    free(loader.slots);
    buffer_free(&loader.spelled);
    if (!good) {
        bpe_free(loader.bpe);
        return NULL;
    }
    bpe_build_finish(loader.bpe);
    return loader.bpe;
}

Bpe *bpe_load(const char *path, Error *err) {
    Buffer text = {0};
    /* A byte is at most two in the file, and each merge's line adds a space and a newline. */
    const size_t limit = 2 * BPE_MAX_TOKEN_BYTES + ((size_t)1 << 20);
    Bpe *bpe = file_read(path, limit, &text, err) ? bpe_from_merges_text(text.data, text.size, path, err)
                                                  : NULL;
    buffer_free(&text);
    return bpe;
}

/* Appends a token as GPT-2's files spell it. */
static void append_spelling(const Bpe *bpe, uint32_t id, Buffer *out) {
    const size_t begin = bpe->start[id], end = bpe->start[id + 1];
    buffer_reserve(out, 2 * (end - begin));
    uint8_t *to = out->data + out->size;
    for (size_t i = begin; i < end; i++) to = write_character(to, bpe->bytes.data[i], bpe->byte_to_id);
    out->size = (size_t)(to - out->data);
}

void bpe_merges_text(const Bpe *bpe, Buffer *out) {
    buffer_append_text(out, "#version: 0.2\n");
    for (uint32_t rank = 0; rank < bpe->merges; rank++) {
        append_spelling(bpe, bpe->parts[rank][0], out);
        buffer_append(out, " ", 1);
        append_spelling(bpe, bpe->parts[rank][1], out);
        buffer_append(out, "\n", 1);
    }
}

/* ---- tokenizer.json ---- */

static int append_json(const char *text, size_t size, void *out) {
    buffer_append(out, text, size);
    return 0;
}

/* jansson fails only where memory has run out: all of this is ordinary, valid UTF-8. */
static void json_must(bool good) {
    if (good) return;
    fprintf(stderr, "out of memory while writing tokenizer.json\n");
    exit(EXIT_FAILED);
}

static json_t *spelling_json(const Bpe *bpe, uint32_t id, Buffer *scratch) {
    scratch->size = 0;
    append_spelling(bpe, id, scratch);
    return json_stringn((const char *)scratch->data, scratch->size);
}

void bpe_tokenizer_json(const Bpe *bpe, Buffer *out) {
    Buffer scratch = {0};
    json_t *vocab = json_object(), *merges = json_array();
    for (uint32_t id = 0; id < BPE_BYTES + bpe->merges; id++) {
        scratch.size = 0;
        append_spelling(bpe, id, &scratch);
        buffer_append(&scratch, "", 1);
        json_must(json_object_set_new(vocab, (const char *)scratch.data, json_integer(id)) == 0);
    }
    json_must(json_object_set_new(vocab, end_of_text_name, json_integer(bpe_end_of_text(bpe))) == 0);
    for (uint32_t rank = 0; rank < bpe->merges; rank++) {
        json_t *pair = json_array();
        for (int side = 0; side < 2; side++) {
            json_t *part = spelling_json(bpe, bpe->parts[rank][side], &scratch);
            json_must(json_array_append_new(pair, part) == 0);
        }
        json_must(json_array_append_new(merges, pair) == 0);
    }
    buffer_free(&scratch);

    json_t *special = json_pack("{s:i, s:s, s:b, s:b, s:b, s:b, s:b}", "id", (int)bpe_end_of_text(bpe),
                                "content", end_of_text_name, "single_word", 0, "lstrip", 0, "rstrip", 0,
                                "normalized", 0, "special", 1);
    json_t *splitter = json_pack("{s:s, s:b, s:b, s:b}", "type", "ByteLevel", "add_prefix_space", 0,
                                 "trim_offsets", 1, "use_regex", 1);
    json_t *decoder = json_pack("{s:s, s:b, s:b, s:b}", "type", "ByteLevel", "add_prefix_space", 1,
                                "trim_offsets", 1, "use_regex", 1);
    json_t *model = json_pack("{s:s, s:n, s:n, s:n, s:n, s:b, s:b, s:b, s:o, s:o}", "type", "BPE", "dropout",
                              "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", 0,
                              "byte_fallback", 0, "ignore_merges", 0, "vocab", vocab, "merges", merges);
    json_t *root = json_pack("{s:s, s:n, s:n, s:[o], s:n, s:o, s:n, s:o, s:o}", "version", "1.0",
                             "truncation", "padding", "added_tokens", special, "normalizer", "pre_tokenizer",
                             splitter, "post_processor", "decoder", decoder, "model", model);
    json_must(root && json_dump_callback(root, append_json, out, JSON_COMPACT) == 0);
    json_decref(root);
}

/* ---- encoding ---- */

void tokens_reserve(Tokens *tokens, size_t extra) {
    if (tokens->capacity - tokens->count >= extra) return;
    size_t capacity, bytes;
    const bool fits = size_add(tokens->count, extra, &capacity);
    if (fits && capacity < 2 * tokens->capacity) capacity = 2 * tokens->capacity;
    if (capacity < 256) capacity = 256;
    if (!size_mul(capacity, sizeof(*tokens->ids), &bytes)) bytes = SIZE_MAX; /* which xrealloc refuses */
    tokens->ids = xrealloc(tokens->ids, bytes);
    tokens->capacity = capacity;
}

void tokens_free(Tokens *tokens) {
    free(tokens->ids);
    *tokens = (Tokens){0};
}

enum {
    SHORT_PIECE = 64,      /* bytes up to which looking through all pairs is the faster way */
    CACHED_IDS = 7,        /* with their number eight, which is half of a cache entry */
    NO_SYMBOL = UINT16_MAX /* not the id of a merge: these end at 65,534 */
};

/* One remembered word. Two of them are a set, and a set is a cache line: the newer word is first. */
typedef struct CacheEntry {
    WordKey key;                  /* high is 0 where free */
    uint16_t ids[CACHED_IDS + 1]; /* the last is the number of ids */
} CacheEntry;

/* A pair of a long piece that waits for its rank's turn. */
typedef struct Waiting {
    size_t at, next; /* where its left symbol begins; the next in the list, 0 at its end */
} Waiting;

/* A long piece on its way. A symbol that covers bytes [at, at + n) has its id in symbol[at] and n both in
 * length[at] and in length[at + n - 1], so that its neighbours on both sides are found without links. */
typedef struct LongPiece {
    uint16_t *symbol; /* NO_SYMBOL where no symbol begins */
    uint32_t *length; /* a token's length is below BPE_MAX_TOKEN_BYTES */
    size_t capacity;
    Waiting *waiting; /* [0] is not used */
    size_t waiting_count, waiting_capacity, waiting_free;
    size_t first[BPE_MAX_MERGES];               /* of the list of each rank; 0: empty */
    uint64_t occupied[BPE_MAX_MERGES / 64 + 1]; /* a bit a rank: its list is not empty */
} LongPiece;

struct BpeEncoder {
    const Bpe *bpe;
    void *cache_memory;
    CacheEntry (*cache)[2]; /* (sets, 2), each on a cache line of its own; NULL: off */
    unsigned cache_shift;
    Buffer held;            /* text whose pieces are not known yet */
    size_t held_enough;     /* look at it again when it is this long */
    size_t special_matched; /* bytes of <|endoftext|> at the end of the text so far; see feed_special */
    LongPiece *long_piece;  /* made when the first one comes */
};

BpeEncoder *bpe_encoder_new(const Bpe *bpe, size_t cache_words) {
    BpeEncoder *encoder = xcalloc(1, sizeof(*encoder));
    encoder->bpe = bpe;
    if (cache_words > 0) {
        const size_t most = (size_t)1 << 26; /* 4 GiB */
        unsigned log_sets = 1;
        while (((size_t)2 << log_sets) < cache_words && ((size_t)2 << log_sets) < most) log_sets++;
        const size_t line = sizeof(*encoder->cache);
        encoder->cache_memory = xcalloc(((size_t)1 << log_sets) + 1, line);
        encoder->cache = (CacheEntry(*)[2])(void *)(((uintptr_t)encoder->cache_memory + line - 1) &
                                                    ~(line - 1));
        encoder->cache_shift = 64 - log_sets;
    }
    return encoder;
}

void bpe_encoder_free(BpeEncoder *encoder) {
    if (!encoder) return;
    if (encoder->long_piece) {
        free(encoder->long_piece->symbol);
        free(encoder->long_piece->length);
        free(encoder->long_piece->waiting);
        free(encoder->long_piece);
    }
    free(encoder->cache_memory);
    buffer_free(&encoder->held);
    free(encoder);
}

/* Merges a piece of at most SHORT_PIECE bytes; ids[size] gets the result, whose length is returned. */
static size_t merge_short(const Bpe *bpe, const uint8_t *piece, size_t size, uint16_t *ids) {
    uint32_t merged[SHORT_PIECE]; /* merged[i] = what ids[i] and ids[i + 1] make */
    for (size_t i = 0; i < size; i++) ids[i] = bpe->byte_to_id[piece[i]];
    for (size_t i = 0; i + 1 < size; i++) merged[i] = merged_id(bpe, ids[i], ids[i + 1]);
    for (size_t count = size;; count--) {
        uint32_t best = NO_MERGE;
        size_t at = 0;
        for (size_t i = 0; i + 1 < count; i++)
            if (merged[i] < best) best = merged[i], at = i;
        if (best == NO_MERGE) return count;
        ids[at] = (uint16_t)best;
        for (size_t i = at + 1; i + 1 < count; i++) ids[i] = ids[i + 1], merged[i - 1] = merged[i];
        if (at > 0) merged[at - 1] = merged_id(bpe, ids[at - 1], best);
        if (at + 2 < count) merged[at] = merged_id(bpe, best, ids[at + 1]);
    }
}

/* Puts the pair of symbols left and right, left at `at`, in its rank's list if it has one. */
static void wait_for_rank(const Bpe *bpe, LongPiece *piece, uint32_t left, uint32_t right, size_t at) {
    const uint32_t id = merged_id(bpe, left, right);
    if (id == NO_MERGE) return;
    size_t entry = piece->waiting_free;
    if (entry) {
        piece->waiting_free = piece->waiting[entry].next;
    } else {
        if (piece->waiting_count == piece->waiting_capacity) {
            piece->waiting_capacity *= 2;
            piece->waiting = xrealloc(piece->waiting, piece->waiting_capacity * sizeof(*piece->waiting));
        }
        entry = piece->waiting_count++;
    }
    const uint32_t rank = id - BPE_BYTES;
    piece->waiting[entry] = (Waiting){at, piece->first[rank]};
    piece->first[rank] = entry;
    piece->occupied[rank / 64] |= (uint64_t)1 << (rank % 64);
}

/* Merges each pair of a rank's list from left to right, since in "aaa" the pairs overlap. That is the order
 * in which they came: a list is filled either at the start or while the newer of its two symbols is being
 * made, by one pass from left to right over the list of that one. */
static void merge_rank(const Bpe *bpe, LongPiece *piece, size_t size, uint32_t rank) {
    const uint32_t left = bpe->parts[rank][0], right = bpe->parts[rank][1], id = BPE_BYTES + rank;
    uint16_t *symbol = piece->symbol;
    uint32_t *length = piece->length;
    size_t list = 0, next;
    for (size_t entry = piece->first[rank]; entry; entry = next) { /* the newest is first: turn it round */
        next = piece->waiting[entry].next;
        piece->waiting[entry].next = list;
        list = entry;
    }
    piece->first[rank] = 0;
    piece->occupied[rank / 64] &= ~((uint64_t)1 << (rank % 64));
    for (size_t entry = list; entry; entry = next) {
        const size_t at = piece->waiting[entry].at;
        next = piece->waiting[entry].next;
        piece->waiting[entry].next = piece->waiting_free;
        piece->waiting_free = entry;
        /* Either may have been merged with something else meanwhile. While the left one has not been, there
         * still is a symbol to its right. */
        if (symbol[at] != left) continue;
        const size_t middle = at + length[at];
        if (symbol[middle] != right) continue;
        const size_t end = middle + length[middle];
        symbol[middle] = NO_SYMBOL;
        symbol[at] = (uint16_t)id;
        length[at] = length[end - 1] = (uint32_t)(end - at);
        if (at > 0) {
            const size_t before = at - length[at - 1];
            wait_for_rank(bpe, piece, symbol[before], id, before);
        }
        if (end < size) wait_for_rank(bpe, piece, id, symbol[end], at);
    }
}

static void encode_long(BpeEncoder *encoder, const uint8_t *text, size_t size, Tokens *out) {
    const Bpe *bpe = encoder->bpe;
    if (!encoder->long_piece) encoder->long_piece = xcalloc(1, sizeof(*encoder->long_piece));
    LongPiece *piece = encoder->long_piece;
    if (size > piece->capacity) {
        free(piece->symbol), free(piece->length), free(piece->waiting);
        piece->capacity = piece->waiting_capacity = size + size / 2;
        piece->symbol = xmalloc(piece->capacity * sizeof(*piece->symbol));
        piece->length = xmalloc(piece->capacity * sizeof(*piece->length));
        piece->waiting = xmalloc(piece->waiting_capacity * sizeof(*piece->waiting));
    }
    piece->waiting_count = 1, piece->waiting_free = 0;
    for (size_t i = 0; i < size; i++) piece->symbol[i] = bpe->byte_to_id[text[i]], piece->length[i] = 1;
    for (size_t i = 0; i + 1 < size; i++)
        wait_for_rank(bpe, piece, piece->symbol[i], piece->symbol[i + 1], i);

    /* A rank fills only lists of higher ranks, some perhaps in the same word of bits. */
    for (uint32_t word = 0; word * 64 < bpe->merges; word++)
        while (piece->occupied[word])
            merge_rank(bpe, piece, size, word * 64 + (uint32_t)__builtin_ctzll(piece->occupied[word]));

    for (size_t at = 0; at < size; at += piece->length[at]) {
        tokens_reserve(out, 1);
        out->ids[out->count++] = piece->symbol[at];
    }
}

static void append_ids(Tokens *out, const uint16_t *ids, size_t count) {
    tokens_reserve(out, count);
    for (size_t i = 0; i < count; i++) out->ids[out->count + i] = ids[i];
    out->count += count;
}

/* Appends a cached word; all eight numbers whatever they are, which is one wide copy without a branch. */
static inline void append_cached(Tokens *out, const CacheEntry *entry) {
    tokens_reserve(out, CACHED_IDS + 1);
    uint32_t *to = out->ids + out->count;
    for (size_t i = 0; i < CACHED_IDS + 1; i++) to[i] = entry->ids[i];
    out->count += entry->ids[CACHED_IDS];
}

static inline bool same_key(WordKey a, WordKey b) {
    return a.low == b.low && a.high == b.high;
}

/* One piece; `readable` >= size bytes may be read at it. */
static inline void encode_piece(BpeEncoder *encoder, const uint8_t *piece, size_t size, size_t readable,
                                Tokens *out) {
    if (size > SHORT_PIECE) {
        encode_long(encoder, piece, size, out);
        return;
    }
    CacheEntry *set = NULL;
    WordKey key;
    if (encoder->cache && size <= WORD_KEY_BYTES) {
        key = word_key(piece, size, readable);
        set = encoder->cache[word_hash(key) >> encoder->cache_shift];
        for (int way = 0; way < 2; way++) {
            if (same_key(set[way].key, key)) {
                append_cached(out, &set[way]);
                return;
            }
        }
    }
    uint16_t ids[SHORT_PIECE];
    const size_t count = merge_short(encoder->bpe, piece, size, ids);
    append_ids(out, ids, count);
    if (set && count <= CACHED_IDS) {
        set[1] = set[0];
        set[0].key = key;
        memcpy(set[0].ids, ids, sizeof(set[0].ids));
        set[0].ids[CACHED_IDS] = (uint16_t)count;
    }
}

/* Encodes the pieces whose end is known; returns how many bytes they have. */
static size_t encode_pieces(BpeEncoder *encoder, const uint8_t *text, size_t size, bool more, Tokens *out) {
    size_t at = 0;
    while (at < size) {
        const size_t length = pretokenize_next(text + at, size - at, more);
        if (length == 0) break;
        encode_piece(encoder, text + at, length, size - at, out);
        at += length;
    }
    return at;
}

/* Text that cannot be split yet is held. It is looked at again when it has doubled, so that a long run in
 * small pieces costs linear time; and as soon as its pieces reach into the new text, the rest of that is
 * encoded where it lies. */
void bpe_encoder_feed(BpeEncoder *encoder, const uint8_t *bytes, size_t size, Tokens *out) {
    Buffer *held = &encoder->held;
    while (size > 0 && held->size > 0) {
        const size_t old = held->size, step = old < 256 ? 256 : old, take = size < step ? size : step;
        buffer_append(held, bytes, take);
        size_t done = 0;
        if (held->size >= encoder->held_enough) {
            done = encode_pieces(encoder, held->data, held->size, true, out);
            encoder->held_enough = 2 * (held->size - done);
        }
        if (done >= old) {
            held->size = 0;
            bytes += done - old, size -= done - old;
        } else {
            held->size -= done;
            memmove(held->data, held->data + done, held->size);
            bytes += take, size -= take;
        }
    }
    if (size == 0) return;
    const size_t done = encode_pieces(encoder, bytes, size, true, out);
    buffer_append(held, bytes + done, size - done);
    encoder->held_enough = 2 * held->size;
}

static void flush_held(BpeEncoder *encoder, Tokens *out) {
    encode_pieces(encoder, encoder->held.data, encoder->held.size, false, out);
    encoder->held.size = 0;
}

void bpe_encoder_end(BpeEncoder *encoder, Tokens *out) {
    const size_t matched = encoder->special_matched;
    encoder->special_matched = 0;
    bpe_encoder_feed(encoder, (const uint8_t *)end_of_text_name, matched, out);
    flush_held(encoder, out);
}

void bpe_encode(BpeEncoder *encoder, const uint8_t *bytes, size_t size, Tokens *out) {
    bpe_encoder_feed(encoder, bytes, size, out);
    bpe_encoder_end(encoder, out);
}

/* special_matched bytes of the name have been seen and not been fed: the name's beginning, which is text
 * after all if it does not go on. Its '<' occurs nowhere else in it, so a match that fails can begin anew
 * only at the byte where it failed. */
void bpe_encoder_feed_special(BpeEncoder *encoder, const uint8_t *bytes, size_t size, Tokens *out) {
    const uint8_t *name = (const uint8_t *)end_of_text_name;
    for (size_t at = 0; at < size;) {
        if (encoder->special_matched == 0) {
            const uint8_t *begin = memchr(bytes + at, name[0], size - at);
            const size_t text = begin ? (size_t)(begin - bytes) - at : size - at;
            bpe_encoder_feed(encoder, bytes + at, text, out);
            at += text;
            if (!begin) return;
        }
        while (at < size && encoder->special_matched < END_OF_TEXT_NAME_SIZE &&
               bytes[at] == name[encoder->special_matched])
            at++, encoder->special_matched++;
        if (encoder->special_matched == END_OF_TEXT_NAME_SIZE) {
            flush_held(encoder, out);
            const uint32_t id = bpe_end_of_text(encoder->bpe);
            tokens_reserve(out, 1);
            out->ids[out->count++] = id;
            encoder->special_matched = 0;
        } else if (at < size) {
            bpe_encoder_feed(encoder, name, encoder->special_matched, out);
            encoder->special_matched = 0;
        }
    }
}

void bpe_encode_special(BpeEncoder *encoder, const uint8_t *bytes, size_t size, Tokens *out) {
    bpe_encoder_feed_special(encoder, bytes, size, out);
    bpe_encoder_end(encoder, out);
}

bool bpe_decode(const Bpe *bpe, const uint32_t *ids, size_t count, Buffer *out, Error *err) {
    const uint32_t vocab = bpe_vocab_size(bpe);
    size_t total = 0;
    for (size_t i = 0; i < count; i++) {
        if (ids[i] >= vocab)
            return error_set(err, "token %zu is %u; expected 0 to %u, the ids of this tokenizer", i, ids[i],
                             vocab - 1);
        total += bpe->start[ids[i] + 1] - bpe->start[ids[i]];
    }
    buffer_reserve(out, total + DECODE_STEP);
    uint8_t *to = out->data + out->size;
    for (size_t i = 0; i < count; i++) {
        size_t size;
        const uint8_t *bytes = bpe_token_bytes(bpe, ids[i], &size);
        if (size <= DECODE_STEP)
            memcpy(to, bytes, DECODE_STEP); /* of known size; what is too much is written over */
        else memcpy(to, bytes, size);
        to += size;
    }
    out->size += total;
    return true;
}
