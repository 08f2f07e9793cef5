#!/usr/bin/env python3
"""Makes tokenizer/unicode_tables.h: for every code point whether GPT-2's splitting pattern takes it for a
letter (general category L*), a number (N*), white space (the property White_Space) or something else.

    pip install unicodedata2==16.0.0
    python3 dev/make_unicode_tables.py > tokenizer/unicode_tables.h

Unicode 16.0 is what Hugging Face's tokenizers (0.23) split by. Letters that a later version adds would be
split unlike there. Without unicodedata2 it is the version that Python has; the header says which.

The table has two levels, because most of Unicode is made of long runs of one class: blocks of 256 code
points at 2 bits each, equal blocks stored once, and an index from (code point >> 8) to its block."""
try:
    import unicodedata2 as unicodedata
except ImportError:
    import unicodedata

OTHER, LETTER, NUMBER, SPACE = range(4)
BLOCK = 256  # code points a block; 2 bits each, 32 to a 64-bit word
LIMIT = 0x40000  # nothing but "other" is assigned from here on; checked below

# White_Space of PropList.txt: it has been these 25 code points since Unicode 6.3. Python's str.isspace()
# is another set (it has U+001C to U+001F).
WHITE_SPACE = {0x20, 0x85, 0xA0, 0x1680, 0x2028, 0x2029, 0x202F, 0x205F, 0x3000}
WHITE_SPACE |= set(range(0x09, 0x0E)) | set(range(0x2000, 0x200B))


def class_of(code):
    if code in WHITE_SPACE:
        return SPACE
    return {"L": LETTER, "N": NUMBER}.get(unicodedata.category(chr(code))[0], OTHER)


def rows(values, per_row, form):
    for i in range(0, len(values), per_row):
        yield "    " + " ".join(form % value + "," for value in values[i : i + per_row])


def main():
    assert all(class_of(code) == OTHER for code in range(LIMIT, 0x110000))
    index, blocks = [], {}
    for first in range(0, LIMIT, BLOCK):
        words = [0] * (BLOCK // 32)
        for i in range(BLOCK):
            words[i // 32] |= class_of(first + i) << (2 * (i % 32))
        index.append(blocks.setdefault(tuple(words), len(blocks)))
    assert len(blocks) <= 256

    print(f"""\
/* unicode_tables.h - the classes of code points that GPT-2's splitting pattern tells apart; for
 * pretokenize.c. Made by dev/make_unicode_tables.py from Unicode {unicodedata.unidata_version}: do not edit.
 *
 * The class of code point c below UNICODE_LIMIT (all others are UNICODE_OTHER) is
 * unicode_blocks[unicode_index[c >> 8]][(c & 255) / 32] >> (2 * (c % 32)) & 3. */
#ifndef UNICODE_TABLES_H
#define UNICODE_TABLES_H

#include <stdint.h>

/* clang-format off */
enum {{
    UNICODE_OTHER = {OTHER},
    UNICODE_LETTER = {LETTER},
    UNICODE_NUMBER = {NUMBER},
    UNICODE_SPACE = {SPACE}
}};
enum {{ UNICODE_LIMIT = 0x{LIMIT:x} }};

static const uint8_t unicode_index[UNICODE_LIMIT / 256] = {{""")
    print("\n".join(rows(index, 20, "%d")))
    print(f"""\
}};

static const uint64_t unicode_blocks[{len(blocks)}][8] = {{""")
    for block in blocks:
        first, second = (" ".join("0x%016x," % word for word in block[i : i + 4]) for i in (0, 4))
        print("    {" + first + "\n     " + second[:-1] + "},")
    print("""\
};

#endif""")


if __name__ == "__main__":
    main()
