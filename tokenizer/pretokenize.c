/* pretokenize.c - GPT-2's splitting pattern by hand: a state machine over three questions (is it a
 * letter, a number, white space?) instead of a regular expression.
 *
 *     's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
 *
 * Read from left to right, the alternatives come down to this:
 *   - An apostrophe that begins a piece and has one of seven endings behind it takes the ending along.
 *   - Otherwise a piece is a run of one class: letters, numbers, or others; one ' ' before it belongs to
 *     it. So white space right after something that is not white space always begins a piece.
 *   - A run of white space with something behind it leaves its last character for the next piece, since
 *     \s+(?!\S) has to give it back. Where that last character is no ' ' it stands alone: the other
 *     alternatives cannot take it, and \s+ does. At the end of the text the run is one piece.
 *
 * Text is UTF-8 but need not be valid: a byte that is not part of a well-formed sequence is a character
 * of its own, of the class "other". Nearly all text that this program meets is ASCII words, so these are
 * found eight bytes at a time. */
#include "pretokenize.h"

#include <string.h>

#include "unicode_tables.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the tokenizer reads eight bytes of text as one little-endian number"
#endif

/* Beside the four classes of unicode_tables.h. */
enum {
    CLASS_NOT_ASCII = 4, /* only in ascii_class: decode to know */
    CLASS_UNKNOWN = 5    /* the text ends inside a sequence that more text may complete */
};

/* clang-format off */
/* By first byte. */
#define N4 CLASS_NOT_ASCII, CLASS_NOT_ASCII, CLASS_NOT_ASCII, CLASS_NOT_ASCII
#define N32 N4, N4, N4, N4, N4, N4, N4, N4
static const uint8_t ascii_class[256] = {
    0, 0, 0, 0, 0, 0, 0, 0, 0, 3, 3, 3, 3, 3, 0, 0, /* \t \n \v \f \r */
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, /**/
    3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, /* space */
    2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 0, 0, 0, 0, 0, 0, /* 0 to 9 */
    0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, /* A to O */
    1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, /* P to Z */
    0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, /* a to o */
    1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, /* p to z */
    N32, N32, N32, N32,
};
#undef N32
#undef N4
/* clang-format on */

static unsigned code_point_class(uint32_t code) {
    if (code >= UNICODE_LIMIT) return UNICODE_OTHER;
    const uint64_t word = unicode_blocks[unicode_index[code >> 8]][(code & 255) / 32];
    return (unsigned)(word >> (2 * (code % 32))) & 3;
}

/* The class of the character that begins at text[0], where text[0] >= 0x80, and its length in *length.
 * The second byte's range shuts out overlong forms, surrogates and what is past U+10FFFF (the Unicode
 * Standard, table 3-7). */
static unsigned multibyte_class(const uint8_t *text, size_t size, bool more, size_t *length) {
    const uint8_t first = text[0];
    const size_t need = first < 0xC2 ? 1 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : first < 0xF5 ? 4 : 1;
    *length = 1;
    if (need == 1) return UNICODE_OTHER;
    const uint8_t low = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
    const uint8_t high = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
    uint32_t code = first & (0x7Fu >> need);
    for (size_t i = 1; i < need; i++) {
        if (i == size) return more ? CLASS_UNKNOWN : UNICODE_OTHER;
        if (text[i] < (i == 1 ? low : 0x80) || text[i] > (i == 1 ? high : 0xBF)) return UNICODE_OTHER;
        code = code << 6 | (text[i] & 0x3Fu);
    }
    *length = need;
    return code_point_class(code);
}

static inline unsigned class_at(const uint8_t *text, size_t size, bool more, size_t *length) {
    const unsigned class = ascii_class[text[0]];
    *length = 1;
    return class == CLASS_NOT_ASCII ? multibyte_class(text, size, more, length) : class;
}

/* From `at`, past the ASCII letters: to the first byte that is none, or to within eight bytes of the end.
 * In each byte of `word` the top bit of `letters` says whether it is a letter: with bit 0x20 set and the
 * top bit clear, adding 0x1F carries into the top bit from 'a' on and adding 5 does so past 'z'. */
static inline size_t skip_ascii_letters(const uint8_t *text, size_t size, size_t at) {
    const uint64_t ones = 0x0101010101010101u;
    for (; size - at >= 8; at += 8) {
        uint64_t word;
        memcpy(&word, text + at, 8);
        const uint64_t lower = (word | ones * 0x20) & ones * 0x7F;
        const uint64_t letters = (lower + ones * 0x1F) & ~(lower + ones * 5) & ~word & ones * 0x80;
        if (letters != ones * 0x80) return at + (size_t)__builtin_ctzll(~letters & ones * 0x80) / 8;
    }
    return at;
}

/* The end of the run of `class` that goes on at text[at]; 0 if that is not known yet. */
static size_t run_end(const uint8_t *text, size_t size, bool more, size_t at, unsigned class) {
    while (at < size) {
        size_t length;
        const unsigned next = class_at(text + at, size - at, more, &length);
        if (next == CLASS_UNKNOWN) return 0;
        if (next != class) return at;
        at += length;
    }
    return more ? 0 : size;
}

/* The length of the apostrophe and its ending at text[0]: 2 or 3; 1 if it has none, 0 if not known yet. */
static size_t contraction(const uint8_t *text, size_t size, bool more) {
    if (size == 1) return more ? 0 : 1;
    switch (text[1]) {
    case 's':
    case 't':
    case 'm':
    case 'd':
        return 2;
    case 'r':
    case 'v':
    case 'l':
        if (size == 2) return more ? 0 : 1;
        return text[2] == (text[1] == 'l' ? 'l' : 'e') ? 3 : 1;
    default:
        return 1;
    }
}

/* The piece that begins with white space which no other alternative takes; `last` = where the last
 * character seen so far begins, `at` = where it ends. */
static size_t white_space(const uint8_t *text, size_t size, bool more) {
    size_t last = 0, at = 0;
    while (at < size) {
        size_t length;
        const unsigned class = class_at(text + at, size - at, more, &length);
        if (class == CLASS_UNKNOWN) return 0;
        if (class != UNICODE_SPACE) return last > 0 ? last : at;
        last = at, at += length;
    }
    return more ? 0 : size;
}

size_t pretokenize_next(const uint8_t *text, size_t size, bool more) {
    const size_t begin = text[0] == ' ';
    if (begin == size) return more ? 0 : size;
    size_t length;
    const unsigned class = class_at(text + begin, size - begin, more, &length);
    if (class == UNICODE_LETTER) {
        const size_t end = skip_ascii_letters(text, size, begin + length);
        if (end < size && text[end] < 0x80 && ascii_class[text[end]] != UNICODE_LETTER) return end;
        return run_end(text, size, more, end, UNICODE_LETTER);
    }
    if (class == UNICODE_SPACE) return white_space(text, size, more);
    if (class == CLASS_UNKNOWN) return 0;
    if (text[0] == '\'') {
        const size_t end = contraction(text, size, more);
        if (end != 1) return end;
    }
    return run_end(text, size, more, begin + length, class);
}
