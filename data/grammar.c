/* grammar.c - the built-in stories: tells stories from the tables of grammar_rules.h.
 *
 * A story is told by walking the rule "story": a draw picks one row of a rule by integer weights and tells
 * it, and adds ln(weight / total) to the story's log-probability. The tables are written so that a text can
 * have come about in one way only; the sum is then the logarithm of the text's own probability, and its mean
 * over held-out stories is a loss that no model can beat.
 *
 * The tables are read once, on first use, into rows of parts; after that, telling a story only follows
 * pointers. Choices are made of integers alone, so that every machine tells the same stories. */
#include "grammar_rules.h"
#include "stories.h"

#include <math.h>
#include <pthread.h>
#include <string.h>

enum { COLUMNS_MAX = 10, NAMES_MAX = 64, RULE_COUNT = sizeof grammar_rules / sizeof grammar_rules[0] };
enum { HELDOUT_ONE_IN = 20 };

/* ---- the tables as the teller wants them ---- */
typedef struct Rule Rule;

typedef enum PartKind {
    PART_END,
    PART_TEXT,    /* bytes as they are */
    PART_ARTICLE, /* {a} and the space after it: "a " or "an ", by the letter that follows */
    PART_DRAW,    /* {rule}, {x|y}: a row is told and forgotten */
    PART_KEEP,    /* {name=rule}, {name=x|y}, {let name=rule}: a row is kept, and told unless silent */
    PART_RECALL,  /* {name}, {name.column}, {column}: a column of a row that was kept */
} PartKind;

typedef struct Part {
    PartKind kind;
    bool capital, silent;
    char *text; /* TEXT */
    size_t size;
    const Rule *rule; /* DRAW, KEEP; NULL in a KEEP that draws from the rule that `like`'s row came from */
    int like;         /* KEEP */
    int name;         /* KEEP, RECALL: a number in Grammar.names */
    int column;       /* RECALL: a number in Grammar.columns, or FIRST_COLUMN */
} Part;

typedef struct Row {
    uint64_t weight;
    const Part *columns[COLUMNS_MAX]; /* each closed by a PART_END; the first is what a draw tells */
} Row;

struct Rule {
    Row *rows;
    size_t count;
    uint64_t total;           /* of the rows' weights */
    int columns[COLUMNS_MAX]; /* what the second, third ... column is called, closed by -1 */
};

typedef struct Names {
    const char *text[NAMES_MAX];
    size_t size[NAMES_MAX];
    int count;
} Names;

typedef struct Grammar {
    Rule rules[RULE_COUNT]; /* in the order of grammar_rules; the first is "story" */
    Names names, columns;   /* what rows are kept under, and what columns are called */
} Grammar;

enum { HERO = 0, FIRST_COLUMN = -1, UNKNOWN = -1 }; /* "hero" is the first of the names */

static Grammar grammar;

/* ---- reading the tables ---- */

/* A slot written with a capital names the same thing. */
static bool same_name(const char *a, size_t a_size, const char *b, size_t b_size) {
    if (a_size != b_size || a_size == 0) return false;
    return (a[0] | 0x20) == (b[0] | 0x20) && memcmp(a + 1, b + 1, a_size - 1) == 0;
}

static int names_find(const Names *names, const char *text, size_t size) {
    for (int i = 0; i < names->count; i++)
        if (same_name(names->text[i], names->size[i], text, size)) return i;
    return UNKNOWN;
}

static int names_add(Names *names, const char *text, size_t size) {
    const int found = names_find(names, text, size);
    if (found != UNKNOWN || names->count == NAMES_MAX) return found;
    names->text[names->count] = text, names->size[names->count] = size;
    return names->count++;
}

static const Rule *rule_find(const char *text, size_t size) {
    for (size_t i = 0; i < RULE_COUNT; i++) {
        const char *const name = grammar_rules[i].name;
        if (same_name(name, strlen(name), text, size)) return &grammar.rules[i];
    }
    return NULL;
}

/* The first of the bytes `stops` outside of braces, or `end`. */
static const char *find_outside(const char *text, const char *end, const char *stops) {
    int depth = 0;
    for (; text < end; text++) {
        if (depth == 0 && strchr(stops, *text)) return text;
        depth += (*text == '{') - (*text == '}');
    }
    return end;
}

static void rule_read(Rule *rule, const char *text, const char *end);

/* A slot, without its braces. */
static Part slot_read(const char *text, const char *end) {
    Part part = {.kind = PART_DRAW, .capital = *text >= 'A' && *text <= 'Z'};
    const char *const equals = find_outside(text, end, "=|");
    if (equals < end && *equals == '=') {
        part.kind = PART_KEEP;
        part.silent = strncmp(text, "let ", 4) == 0;
        text += part.silent ? 4 : 0;
        part.name = names_add(&grammar.names, text, (size_t)(equals - text));
        text = equals + 1;
    }
    const size_t size = (size_t)(end - text);
    if (find_outside(text, end, "|") < end) {
        if (part.kind == PART_DRAW) part.capital = false; /* that was the first letter of its first row */
        Rule *const rule = (Rule *)xcalloc(1, sizeof *rule);
        rule->columns[0] = -1;
        rule_read(rule, text, end);
        part.rule = rule;
    } else if ((part.rule = rule_find(text, size)) != NULL) {
        return part;
    } else if (part.kind == PART_KEEP) {
        part.like = names_add(&grammar.names, text, size);
    } else if (same_name(text, size, "a", 1)) {
        part.kind = PART_ARTICLE;
    } else {
        const char *const dot = find_outside(text, end, ".");
        part.kind = PART_RECALL;
        part.column = dot < end ? names_find(&grammar.columns, dot + 1, (size_t)(end - dot - 1))
                                : names_find(&grammar.columns, text, size);
        const bool of_hero = dot == end && part.column != UNKNOWN;
        part.name = of_hero ? HERO : names_add(&grammar.names, text, (size_t)(dot - text));
    }
    return part;
}

/* Text, with its quotation marks. */
static Part text_read(const char *text, const char *end) {
    Part part = {.kind = PART_TEXT, .size = (size_t)(end - text)};
    part.text = (char *)xmalloc(part.size);
    for (size_t i = 0; i < part.size; i++) part.text[i] = text[i] == '<' || text[i] == '>' ? '"' : text[i];
    return part;
}

/* One column of a row: text and slots. */
static const Part *parts_read(const char *text, const char *end) {
    size_t count = 0;
    Part *parts = (Part *)xmalloc(sizeof *parts);
    while (text < end) {
        parts = (Part *)xrealloc(parts, (count + 2) * sizeof *parts);
        const char *const brace = find_outside(text, end, "{");
        if (brace > text) {
            parts[count++] = text_read(text, brace);
            text = brace;
            continue;
        }
        const char *const closing = find_outside(text + 1, end, "}");
        parts[count] = slot_read(text + 1, closing);
        text = closing < end ? closing + 1 : end;
        if (parts[count++].kind == PART_ARTICLE && text < end && *text == ' ') text++;
    }
    parts[count] = (Part){.kind = PART_END};
    return parts;
}

/* Rows are separated by |, their columns by /, and a row may begin with its weight and a space. */
static void rule_read(Rule *rule, const char *text, const char *end) {
    for (;;) {
        const char *const row_end = find_outside(text, end, "|");
        Row row = {.weight = 0};
        for (; text < row_end && *text >= '0' && *text <= '9'; text++)
            row.weight = 10 * row.weight + (uint64_t)(*text - '0');
        if (row.weight > 0 && text < row_end) text++; /* the space */
        if (row.weight == 0) row.weight = 1;
        for (size_t i = 0; i < COLUMNS_MAX; i++) {
            const char *const column_end = find_outside(text, row_end, "/");
            row.columns[i] = parts_read(text, column_end);
            if (column_end == row_end) break;
            text = column_end + 1;
        }
        rule->rows = (Row *)xrealloc(rule->rows, (rule->count + 1) * sizeof *rule->rows);
        rule->rows[rule->count++] = row;
        rule->total += row.weight;
        if (row_end == end) return;
        text = row_end + 1;
    }
}

static void tables_read(void) {
    names_add(&grammar.names, "hero", 4);
    for (size_t i = 0; i < RULE_COUNT; i++) { /* what columns are called comes first, since slots name them */
        const char *text = grammar_rules[i].columns;
        const char *const end = text + strlen(text);
        size_t count = 0;
        while (text < end && count + 1 < COLUMNS_MAX) {
            const char *const space = find_outside(text, end, " ");
            grammar.rules[i].columns[count++] = names_add(&grammar.columns, text, (size_t)(space - text));
            text = space < end ? space + 1 : end;
        }
        grammar.rules[i].columns[count] = -1;
    }
    for (size_t i = 0; i < RULE_COUNT; i++) {
        const char *const rows = grammar_rules[i].rows;
        rule_read(&grammar.rules[i], rows, rows + strlen(rows));
    }
}

/* ---- telling ---- */
typedef struct Kept {
    const Rule *rule; /* NULL: nothing yet */
    const Row *row;
} Kept;

typedef struct Teller {
    Rng rng;
    double log_p;
    Kept kept[NAMES_MAX];  /* by name */
    bool capital, article; /* what the next text begins with, or comes after */
    Buffer *out;
} Teller;

static void say(Teller *teller, const char *text, size_t size) {
    if (teller->article) {
        teller->article = false;
        if (strchr("aeiou", text[0])) say(teller, "an ", 3);
        else say(teller, "a ", 2);
    }
    buffer_append(teller->out, text, size);
    if (teller->capital) {
        uint8_t *const first = teller->out->data + teller->out->size - size;
        if (*first >= 'a' && *first <= 'z') *first = (uint8_t)(*first - 'a' + 'A');
        teller->capital = false;
    }
}

/* A row of the rule, to be kept under `name`, if any: then none of those that are kept under other names. */
static const Row *draw(Teller *teller, const Rule *rule, int name) {
    const Row *taken[NAMES_MAX];
    size_t taken_count = 0;
    uint64_t total = rule->total;
    for (int i = 0; name != UNKNOWN && i < grammar.names.count; i++) {
        if (i == name || teller->kept[i].rule != rule) continue;
        taken[taken_count++] = teller->kept[i].row;
        total -= teller->kept[i].row->weight;
    }
    uint64_t at = rng_below(&teller->rng, total);
    const Row *row = rule->rows;
    for (;; row++) {
        bool is_taken = false;
        for (size_t i = 0; i < taken_count; i++) is_taken = is_taken || taken[i] == row;
        if (is_taken) continue;
        if (at < row->weight) break;
        at -= row->weight;
    }
    teller->log_p += log((double)row->weight / (double)total);
    return row;
}

static const Part *column_of(const Kept *kept, int column) {
    size_t i = 0;
    if (column != FIRST_COLUMN)
        while (kept->rule->columns[i++] != column) {}
    return kept->row->columns[i];
}

static void tell(Teller *teller, const Part *part) {
    for (; part->kind != PART_END; part++) {
        teller->capital = teller->capital || part->capital;
        switch (part->kind) {
        case PART_TEXT:
            say(teller, part->text, part->size);
            break;
        case PART_ARTICLE:
            teller->article = true;
            break;
        case PART_DRAW:
            tell(teller, draw(teller, part->rule, UNKNOWN)->columns[0]);
            break;
        case PART_KEEP: {
            const Rule *const rule = part->rule ? part->rule : teller->kept[part->like].rule;
            const Row *const row = draw(teller, rule, part->name);
            teller->kept[part->name] = (Kept){rule, row};
            if (!part->silent) tell(teller, row->columns[0]);
            break;
        }
        case PART_RECALL:
            tell(teller, column_of(&teller->kept[part->name], part->column));
            break;
        case PART_END:
            break;
        }
    }
}

/* ---- the two sides ---- */
bool grammar_is_heldout(const uint8_t *text, size_t size) {
    uint64_t hash = size;
    for (size_t i = 0; i < size; i += 8) { /* eight bytes at a time, put together the same way everywhere */
        uint64_t word = 0;
        for (size_t j = 0; j < 8 && i + j < size; j++) word |= (uint64_t)text[i + j] << (8 * j);
        hash = mix64(hash, word);
    }
    return hash % HELDOUT_ONE_IN == 0;
}

double grammar_story(uint64_t seed, bool heldout, uint64_t number, Buffer *out) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, tables_read);

    const size_t start = out->size;
    Teller teller = {.rng = rng_start(seed, number), .out = out};
    do { /* all draws of one number come from one stream: each side takes the first that falls on it */
        out->size = start;
        teller.log_p = 0;
        memset(teller.kept, 0, sizeof teller.kept);
        tell(&teller, draw(&teller, &grammar.rules[0], UNKNOWN)->columns[0]);
    } while (grammar_is_heldout(out->data + start, out->size - start) != heldout);
    return teller.log_p;
}
