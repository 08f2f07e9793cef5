/* grammar.c - the built-in stories: tells stories from the tables of grammar_rules.h.
 *
 * A story is told by walking the rule "story": a draw picks one row of a rule by integer weights and tells
 * it, and adds ln(weight / total) to the story's log-probability. The tables are written so that a text can
 * have come about in one way only; the sum is then the logarithm of the text's own probability. How probable a
 * story's beginning is, is a sum over all stories that begin so: the same tables, read along the text.
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

static void tables_need(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, tables_read);
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

/* The rows that a row to be kept under `name` cannot be: those of the rule that are kept under other names. */
typedef struct Taken {
    const Row *rows[NAMES_MAX];
    size_t count;
    uint64_t left; /* the other rows' weights */
} Taken;

static Taken taken_rows(const Kept *kept, const Rule *rule, int name) {
    Taken taken;
    taken.count = 0, taken.left = rule->total;
    for (int i = 0; name != UNKNOWN && i < grammar.names.count; i++) {
        if (i == name || kept[i].rule != rule) continue;
        taken.rows[taken.count++] = kept[i].row;
        taken.left -= kept[i].row->weight;
    }
    return taken;
}

static bool is_taken(const Taken *taken, const Row *row) {
    for (size_t i = 0; i < taken->count; i++)
        if (taken->rows[i] == row) return true;
    return false;
}

/* A row of the rule, to be kept under `name`, if any. */
static const Row *draw(Teller *teller, const Rule *rule, int name) {
    const Taken taken = taken_rows(teller->kept, rule, name);
    uint64_t at = rng_below(&teller->rng, taken.left);
    const Row *row = rule->rows;
    for (;; row++) {
        if (is_taken(&taken, row)) continue;
        if (at < row->weight) break;
        at -= row->weight;
    }
    teller->log_p += log((double)row->weight / (double)taken.left);
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

/* ---- reading along ---- */
typedef struct Reader {
    const char *text;
    size_t size;
    Kept kept[NAMES_MAX];
} Reader;

/* What is told when the present column is. */
typedef struct Rest {
    const Part *part;
    const struct Rest *then;
} Rest;

/* Whether the text goes on at *at with what `say` would say, as far as it goes on at all; *at moves behind it. */
static bool goes_on(const Reader *reader, size_t *at, const char *said, size_t size, bool capital) {
    for (size_t i = 0; i < size && *at < reader->size; i++, ++*at) {
        const bool raised = capital && i == 0 && said[0] >= 'a' && said[0] <= 'z';
        if (reader->text[*at] != (raised ? said[0] - 'a' + 'A' : said[i])) return false;
    }
    return true;
}

/* The probability that what is told from `part` on begins with the text from `at` on. A row that the text does not
 * go on with is left at once, so that this takes little longer than telling. */
static double probability(Reader *reader, const Part *part, const Rest *rest, size_t at, bool capital,
                          bool article) {
    for (;; part++) {
        if (at == reader->size) return 1;
        while (part->kind == PART_END) {
            if (!rest) return 0; /* the story ends before the text does */
            part = rest->part, rest = rest->then;
        }
        capital = capital || part->capital;
        const Rest after = {part + 1, rest};
        switch (part->kind) {
        case PART_TEXT:
            if (article) {
                const bool an = strchr("aeiou", part->text[0]) != NULL;
                if (!goes_on(reader, &at, an ? "an " : "a ", an ? 3 : 2, capital)) return 0;
                article = capital = false;
            }
            if (!goes_on(reader, &at, part->text, part->size, capital)) return 0;
            capital = false;
            break;
        case PART_ARTICLE:
            article = true;
            break;
        case PART_DRAW:
        case PART_KEEP: {
            const int name = part->kind == PART_KEEP ? part->name : UNKNOWN;
            const Rule *const rule = part->rule ? part->rule : reader->kept[part->like].rule;
            const Taken taken = taken_rows(reader->kept, rule, name);
            const Kept before = reader->kept[name == UNKNOWN ? HERO : name];
            double sum = 0;
            for (const Row *row = rule->rows; row < rule->rows + rule->count; row++) {
                if (is_taken(&taken, row)) continue;
                if (name != UNKNOWN) reader->kept[name] = (Kept){rule, row};
                const double goes = part->silent
                                        ? probability(reader, part + 1, rest, at, capital, article)
                                        : probability(reader, row->columns[0], &after, at, capital, article);
                sum += (double)row->weight / (double)taken.left * goes;
            }
            if (name != UNKNOWN) reader->kept[name] = before;
            return sum;
        }
        case PART_RECALL: {
            const Part *const again = column_of(&reader->kept[part->name], part->column);
            return probability(reader, again, &after, at, capital, article);
        }
        case PART_END:
            break;
        }
    }
}

double grammar_beginning(const uint8_t *text, size_t size) {
    tables_need();
    Reader reader = {.text = (const char *)text, .size = size};
    const Part end = {.kind = PART_END}, story[] = {{.kind = PART_DRAW, .rule = &grammar.rules[0]}, end};
    return log(probability(&reader, story, NULL, 0, false, false));
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
    tables_need();
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
