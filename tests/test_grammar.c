/* test_grammar.c - the built-in stories, read back.
 *
 * The log-probability that grammar_story returns is worth something only if a text can have come about in
 * one way, and with that probability. So a parser here shares the tables with the teller and nothing else:
 * it reads the rules in its own way, finds every chain of choices that ends in exactly the text it is
 * given, and adds up the logarithms. It goes on after the first chain, so that a second one would be seen.
 *
 * STORIES stories are told and read once, on first need; the tests look at what was learned from them. */
#include "../data/grammar_rules.h"
#include "../data/stories.h"
#include "test.h"

#include <ctype.h>
#include <math.h>

enum { STORIES = 100000, HELDOUT_STORIES = 5000, NAMES = 64, COLUMNS = 10, ROWS = 64 };
enum { RULES = sizeof grammar_rules / sizeof grammar_rules[0], UNNAMED = 4096, CHAIN = 4096 };
static const uint64_t seed = 20;

/* ---- the tables, read for parsing ---- */
typedef struct Rule Rule;

typedef struct Item {
    enum { END, LITERAL, ARTICLE, DRAW, AGAIN } kind;
    const char *literal; /* LITERAL */
    Rule *rule;          /* DRAW; NULL: the rule of the row that is kept as `like` */
    int like;
    int name;           /* DRAW: keep the row as this name, or -1; AGAIN: the row that is kept so */
    bool quiet;         /* DRAW: kept, not told */
    bool capital;       /* DRAW, AGAIN */
    const char *column; /* AGAIN: what it is called, "" for the first */
} Item;

typedef struct Row {
    double weight;
    Item *columns[COLUMNS];
    int column_count;
    long drawn; /* how often, in draws in which every row could have been */
} Row;

struct Rule {
    Row rows[ROWS];
    int count;
    double total;
    bool used;
    const char *columns;
};

static Rule named[RULES], *unnamed[UNNAMED];
static int unnamed_count;
static char *names[NAMES];
static int name_count;
static char *unreadable; /* the first thing in the tables that made no sense */

static void cannot_read(const char *text) {
    if (!unreadable) unreadable = xstrdup(text);
}

static int name_number(const char *name) {
    for (int i = 0; i < name_count; i++)
        if (strcmp(names[i], name) == 0) return i;
    if (name_count == NAMES) {
        cannot_read(name);
        return 0;
    }
    names[name_count] = xstrdup(name);
    return name_count++;
}

static Rule *rule_named(const char *name) {
    for (size_t i = 0; i < RULES; i++)
        if (strcmp(grammar_rules[i].name, name) == 0) return &named[i];
    return NULL;
}

/* Which column of a rule is called `name`: 1, 2 ...; 0 for "", -1 for none. */
static int column_number(const char *columns, const char *name) {
    if (!*name) return 0;
    char list[256], *rest = list;
    snprintf(list, sizeof list, "%s", columns);
    int number = 1;
    for (char *word; (word = strtok_r(rest, " ", &rest)) != NULL; number++)
        if (strcmp(word, name) == 0) return number;
    return -1;
}

static bool is_column(const char *name) {
    for (size_t i = 0; i < RULES; i++)
        if (column_number(grammar_rules[i].columns, name) > 0) return true;
    return false;
}

/* The first of `marks` outside of braces; NULL where there is none. */
static char *outside(char *text, const char *marks) {
    int open = 0;
    for (; *text; text++) {
        if (open == 0 && strchr(marks, *text)) return text;
        if (*text == '{') open++;
        if (*text == '}') open--;
        if (open < 0) cannot_read(text);
    }
    if (open != 0) cannot_read(text);
    return NULL;
}

static void read_rows(Rule *rule, char *text);

static Item read_slot(char *text) {
    Item item = {.kind = DRAW, .like = -1, .name = -1, .column = ""};
    const bool capital = isupper((unsigned char)*text);
    char *equals = outside(text, "=|");
    if (equals && *equals == '=') {
        *equals = '\0';
        item.quiet = strncmp(text, "let ", 4) == 0;
        if (item.quiet) text += 4;
        *text = (char)tolower((unsigned char)*text);
        item.name = name_number(text);
        text = equals + 1;
    }
    if (outside(text, "|")) {
        if (unnamed_count == UNNAMED) {
            cannot_read(text);
            return item;
        }
        item.rule = unnamed[unnamed_count++] = (Rule *)xcalloc(1, sizeof(Rule));
        item.rule->columns = "";
        read_rows(item.rule, text);
        item.capital = capital && item.name >= 0;
        return item;
    }
    item.capital = capital;
    *text = (char)tolower((unsigned char)*text);
    item.rule = rule_named(text);
    if (item.rule) {
        item.rule->used = true;
    } else if (item.name >= 0) {
        item.like = name_number(text);
    } else if (strcmp(text, "a") == 0) {
        item.kind = ARTICLE;
    } else {
        item.kind = AGAIN;
        char *dot = strchr(text, '.');
        if (dot) *dot = '\0';
        item.column = xstrdup(dot ? dot + 1 : is_column(text) ? text : "");
        item.name = name_number(!dot && is_column(text) ? "hero" : text);
    }
    return item;
}

static Item *read_items(char *text) {
    Item *items = (Item *)xcalloc(strlen(text) + 1, sizeof(Item)); /* never more items than bytes */
    size_t count = 0;
    while (*text) {
        if (*text == '{') {
            char *closing = text + 1;
            for (int open = 1; *closing; closing++) {
                open += (*closing == '{') - (*closing == '}');
                if (open == 0) break;
            }
            if (!*closing) {
                cannot_read(text);
                break;
            }
            *closing = '\0';
            items[count++] = read_slot(text + 1);
            text = closing + 1;
        } else {
            const size_t size = strcspn(text, "{");
            char *literal = xstrdup(text);
            literal[size] = '\0';
            for (char *at = literal; *at; at++)
                if (*at == '<' || *at == '>') *at = '"';
            items[count++] = (Item){.kind = LITERAL, .literal = literal};
            text += size;
        }
    }
    return items;
}

static void read_rows(Rule *rule, char *text) {
    for (char *next; text; text = next) {
        char *bar = outside(text, "|");
        next = bar ? bar + 1 : NULL;
        if (bar) *bar = '\0';
        if (rule->count == ROWS) {
            cannot_read(text);
            return;
        }
        Row *row = &rule->rows[rule->count++];
        row->weight = 1;
        if (isdigit((unsigned char)*text)) {
            row->weight = (double)strtol(text, &text, 10);
            if (*text == ' ') text++;
        }
        rule->total += row->weight;
        for (char *column = text; column && row->column_count < COLUMNS;) {
            char *slash = outside(column, "/");
            if (slash) *slash = '\0';
            row->columns[row->column_count++] = read_items(column);
            column = slash ? slash + 1 : NULL;
        }
    }
}

static void read_tables(void) {
    for (size_t i = 0; i < RULES; i++) {
        named[i].columns = grammar_rules[i].columns;
        char *rows = xstrdup(grammar_rules[i].rows); /* reading cuts it into pieces */
        read_rows(&named[i], rows);
        free(rows);
    }
}

/* ---- every chain of choices that tells a text ---- */
typedef struct Choice {
    Rule *rule;
    int row;
    bool free; /* every row could have been drawn */
} Choice;

typedef struct Rest { /* what is still to be told when the present row is */
    const Item *items;
    const struct Rest *then;
} Rest;

static struct {
    Rule *rule[NAMES]; /* NULL: nothing kept yet */
    int row[NAMES];
    Choice chain[CHAIN], found[CHAIN];
    int length, found_length, chains;
    double log_p;
} parse;

static bool is_vowel(char c) {
    return c && strchr("aeiouAEIOU", c) != NULL;
}

static bool begins(const char *at, const char *literal, bool capital) {
    return *at == (capital ? (char)toupper((unsigned char)*literal) : *literal);
}

static void match(const Item *item, const Rest *rest, const char *at, bool capital, double log_p);

static void match_draw(const Item *item, const Rest *rest, const char *at, bool capital, double log_p) {
    Rule *rule = item->rule ? item->rule : parse.rule[item->like];
    if (!rule || parse.length == CHAIN) return;
    bool taken[ROWS] = {false};
    double total = rule->total;
    for (int i = 0; item->name >= 0 && i < name_count; i++)
        if (i != item->name && parse.rule[i] == rule && !taken[parse.row[i]]) {
            taken[parse.row[i]] = true;
            total -= rule->rows[parse.row[i]].weight;
        }
    Rule *const old_rule = item->name >= 0 ? parse.rule[item->name] : NULL;
    const int old_row = item->name >= 0 ? parse.row[item->name] : 0;
    const Rest here = {item + 1, rest};
    const bool capital_row = capital || item->capital;
    for (int i = 0; i < rule->count; i++) {
        const Item *const first = rule->rows[i].columns[0];
        if (taken[i]) continue;
        if (!item->quiet && first->kind == LITERAL && !begins(at, first->literal, capital_row)) continue;
        if (item->name >= 0) parse.rule[item->name] = rule, parse.row[item->name] = i;
        parse.chain[parse.length++] = (Choice){rule, i, total == rule->total};
        const double log_row = log_p + log(rule->rows[i].weight / total);
        if (item->quiet) match(item + 1, rest, at, capital, log_row);
        else match(first, &here, at, capital_row, log_row);
        parse.length--;
    }
    if (item->name >= 0) parse.rule[item->name] = old_rule, parse.row[item->name] = old_row;
}

static void match(const Item *item, const Rest *rest, const char *at, bool capital, double log_p) {
    for (;; item++) {
        while (item->kind == END && rest) item = rest->items, rest = rest->then;
        if (item->kind == END) {
            if (*at) return;
            if (parse.chains++ == 0) {
                memcpy(parse.found, parse.chain, (size_t)parse.length * sizeof(Choice));
                parse.found_length = parse.length, parse.log_p = log_p;
            }
            return;
        }
        if (item->kind == LITERAL) {
            const char *literal = item->literal;
            if (!begins(at, literal, capital)) return;
            for (at++, literal++; *literal; at++, literal++)
                if (*at != *literal) return;
            capital = false;
        } else if (item->kind == ARTICLE) { /* the space after it is the next literal's */
            if (!begins(at++, "a", capital || item->capital)) return;
            const bool an = *at == 'n';
            if (an) at++;
            if (*at != ' ' || is_vowel(at[1]) != an) return;
            capital = false;
        } else if (item->kind == DRAW) {
            match_draw(item, rest, at, capital, log_p);
            return;
        } else {
            const Rule *const rule = parse.rule[item->name];
            const int column = rule ? column_number(rule->columns, item->column) : -1;
            if (column < 0) return;
            const Item *const again = rule->rows[parse.row[item->name]].columns[column];
            const Rest here = {item + 1, rest};
            match(again, &here, at, capital || item->capital, log_p);
            return;
        }
    }
}

/* The number of chains that tell the text; the first is left in parse.found. */
static int parse_story(const char *text) {
    memset(parse.rule, 0, sizeof parse.rule);
    parse.length = parse.chains = 0;
    const Item story[] = {{.kind = DRAW, .rule = rule_named("story"), .like = -1, .name = -1}, {.kind = END}};
    match(story, NULL, text, false, 0);
    return parse.chains;
}

/* ---- is it English, as far as a program can say? ---- */
static const char *complaint(const char *text) {
    int quotes = 0;
    if (strpbrk(text, "{}|<>=/_")) return "a slot that was not filled";
    if (!isupper((unsigned char)*text)) return "a story that begins without a capital";
    for (const char *at = text; *at; at++) {
        const char before = at == text ? '\n' : at[-1], next = at[1];
        if ((unsigned char)*at >= 0x80 || (*at < ' ' && *at != '\n')) return "a byte that is no plain letter";
        if (*at == '"') quotes++;
        if (*at == ' ' && (next == ' ' || next == '\n' || next == '\0')) return "a space too many";
        if (strchr(",.!?", *at) &&
            (before == ' ' || !(next == ' ' || next == '\n' || next == '"' || next == '\0')))
            return "punctuation in the wrong place";
        if (*at == '\n' || next == '\0') {
            if (quotes % 2) return "quotation marks that do not close";
            if (!strchr(".!?\"", *at == '\n' ? before : *at)) return "a paragraph that does not end";
            if (*at == '\n' && !isupper((unsigned char)(next == '"' ? at[2] : next)))
                return "a paragraph without a capital";
        }
        if (strchr(".!?", *at) && next == ' ' && at[2] != '"' && !isupper((unsigned char)at[2]))
            return "a sentence without a capital";
        if (!isalpha((unsigned char)before) && tolower((unsigned char)*at) == 'a') {
            if (next == ' ' && is_vowel(at[2])) return "a before a vowel";
            if (next == 'n' && at[2] == ' ' && !is_vowel(at[3])) return "an before a consonant";
        }
        /* the same word twice, apart from sounds: "Knock, knock" has a comma between */
        if (*at == ' ' && at > text) {
            size_t size = 0;
            while (size < (size_t)(at - text) && isalpha((unsigned char)at[-1 - (int)size])) size++;
            if (size > 1 && strncmp(at + 1, at - size, size) == 0 && !isalpha((unsigned char)at[1 + size]))
                return "a word told twice";
        }
    }
    return NULL;
}

/* ---- stories, told and read once ---- */
typedef struct Side {
    uint64_t *hashes; /* of the texts */
    size_t count, misplaced, unread, ambiguous, improbable, unenglish;
    size_t shortest, longest, bytes;
    double log_p;
    char example[2048]; /* the first that was wrong, with what was */
} Side;

static Side training, heldout;

/* FNV-1a: not the hash that divides the sides. */
static uint64_t text_hash(const char *text) {
    uint64_t hash = 0xCBF29CE484222325u;
    for (; *text; text++) hash = (hash ^ (unsigned char)*text) * 0x100000001B3u;
    return hash;
}

static int by_value(const void *a, const void *b) {
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static void note(Side *side, const char *what, const char *text) {
    if (!*side->example) snprintf(side->example, sizeof side->example, "%s: %s", what, text);
}

static void read_side(Side *side, bool is_heldout, size_t count) {
    Buffer text = {0};
    side->hashes = (uint64_t *)xcalloc(count, sizeof(uint64_t));
    side->shortest = SIZE_MAX;
    for (side->count = 0; side->count < count; side->count++) {
        text.size = 0;
        const double log_p = grammar_story(seed, is_heldout, side->count, &text);
        const size_t size = text.size;
        if (grammar_is_heldout(text.data, size) != is_heldout) side->misplaced++;
        buffer_append(&text, "", 1);
        const char *const story = (const char *)text.data;

        side->hashes[side->count] = text_hash(story);
        side->bytes += size, side->log_p += log_p;
        if (size < side->shortest) side->shortest = size;
        if (size > side->longest) side->longest = size;
        const char *const wrong = complaint(story);
        if (wrong) side->unenglish++, note(side, wrong, story);

        const int chains = parse_story(story);
        if (chains == 0) side->unread++, note(side, "told in no way", story);
        if (chains > 1) side->ambiguous++, note(side, "told in more ways than one", story);
        if (chains != 1) continue;
        if (!(fabs(log_p - parse.log_p) <= 1e-9 * fabs(parse.log_p)))
            side->improbable++, note(side, "another probability", story);
        for (int i = 0; i < parse.found_length; i++)
            if (parse.found[i].free) parse.found[i].rule->rows[parse.found[i].row].drawn++;
    }
    qsort(side->hashes, count, sizeof(uint64_t), by_value);
    buffer_free(&text);
}

static void read_stories(void) {
    if (training.count) return;
    read_side(&training, false, STORIES);
    read_side(&heldout, true, HELDOUT_STORIES);
}

/* ---- tests ---- */
TEST(tables_are_sound) {
    CHECK_MSG(!unreadable, "cannot be read: %.60s", unreadable);
    for (size_t i = 0; i < RULES; i++) {
        const char *const name = grammar_rules[i].name;
        CHECK_MSG(i == 0 || named[i].used, "rule %s is not used", name);
        CHECK_MSG(rule_named(name) == &named[i], "two rules are called %s", name);
        CHECK_MSG(!is_column(name), "%s is a rule and a column", name);
        int columns = 1;
        if (*grammar_rules[i].columns) columns++;
        for (const char *at = grammar_rules[i].columns; *at; at++) columns += *at == ' ';
        for (int row = 0; row < named[i].count; row++)
            CHECK_MSG(named[i].rows[row].column_count == columns, "row %d of %s has %d columns, not %d", row,
                      name, named[i].rows[row].column_count, columns);
    }
    for (int i = 0; i < name_count; i++) {
        CHECK_MSG(!rule_named(names[i]), "%s is a rule and a name that a row is kept under", names[i]);
        CHECK_MSG(!is_column(names[i]), "%s is a column and a name that a row is kept under", names[i]);
    }
}

TEST(same_again) {
    Buffer once = {0}, again = {0};
    const double first = grammar_story(1, false, 7, &once);
    grammar_story(1, true, 8, &again); /* another story in between changes nothing */
    const size_t start = again.size;
    const double second = grammar_story(1, false, 7, &again);
    CHECK(first == second);
    CHECK(again.size - start == once.size && memcmp(again.data + start, once.data, once.size) == 0);

    again.size = 0;
    grammar_story(1, false, 8, &again);
    CHECK(again.size != once.size || memcmp(again.data, once.data, once.size) != 0);
    again.size = 0;
    grammar_story(2, false, 7, &again);
    CHECK(again.size != once.size || memcmp(again.data, once.data, once.size) != 0);
    buffer_free(&once);
    buffer_free(&again);
}

TEST(choices_are_read_back) {
    read_stories();
    for (int i = 0; i < 2; i++) {
        const Side *const side = i ? &heldout : &training;
        CHECK_MSG(
            side->unread + side->ambiguous + side->improbable == 0,
            "of %zu stories %zu were not read, %zu read in two ways, %zu had another probability\n    %s",
            side->count, side->unread, side->ambiguous, side->improbable, side->example);
    }
}

TEST(english) {
    read_stories();
    CHECK_MSG(training.unenglish == 0, "%zu of %zu stories: %s", training.unenglish, training.count,
              training.example);
    CHECK_MSG(heldout.unenglish == 0, "%zu of %zu stories: %s", heldout.unenglish, heldout.count,
              heldout.example);
    CHECK_MSG(training.shortest >= 400 && training.longest <= 1200, "%zu to %zu bytes a story",
              training.shortest, training.longest);
}

/* The sides share no story, and the stories of one side are as good as all different. */
TEST(sides_are_apart) {
    read_stories();
    CHECK(training.misplaced == 0 && heldout.misplaced == 0);
    size_t shared = 0, twice = 0;
    for (size_t i = 0; i < heldout.count; i++)
        shared += bsearch(&heldout.hashes[i], training.hashes, training.count, sizeof(uint64_t), by_value) !=
                  NULL;
    for (size_t i = 1; i < training.count; i++) twice += training.hashes[i] == training.hashes[i - 1];
    CHECK_MSG(shared == 0, "%zu held-out stories occur in training", shared);
    CHECK_MSG(twice == 0, "%zu of %zu stories are told twice", twice, training.count);
}

/* One text in twenty, whatever the text: n p = 5,000 of 100,000, and five standard deviations either way. */
TEST(one_in_twenty_is_held_out) {
    size_t held = 0;
    for (uint32_t i = 0; i < 100000; i++) {
        uint8_t text[12];
        for (size_t j = 0; j < sizeof text; j++) text[j] = (uint8_t)('a' + (i >> (2 * j)) % 4);
        held += grammar_is_heldout(text, 4 + i % 9);
    }
    CHECK_MSG(fabs((double)held - 5000) <= 5 * sqrt(100000 * 0.05 * 0.95), "%zu of 100,000", held);
}

/* A story's beginning is as probable as all its ways to go on together; at its end, as the story. */
TEST(beginnings_add_up) {
    Buffer text = {0};
    for (uint64_t number = 0; number < 40; number++) {
        text.size = 0;
        const double whole = grammar_story(3, number % 2, number, &text);
        const double end = grammar_beginning(text.data, text.size);
        CHECK_MSG(fabs(end - whole) < 1e-9 * fabs(whole), "story %d: %.12f at its end, %.12f as a whole",
                  (int)number, end, whole);
        const size_t size = text.size * (size_t)number / 40;
        const double begun = grammar_beginning(text.data, size);
        double sum = 0;
        for (int next = 0; next < 256; next++) {
            text.data[size] = (uint8_t)next;
            sum += exp(grammar_beginning(text.data, size + 1) - begun);
        }
        CHECK_MSG(fabs(sum - 1) < 1e-9, "story %d after %zu bytes: the next ones add up to %.12f",
                  (int)number, size, sum);
    }
    CHECK(grammar_beginning(text.data, 0) == 0);
    CHECK(grammar_beginning((const uint8_t *)"Once, an sad", 12) == -INFINITY);
    buffer_free(&text);
}

/* ... and is told as often as that: n p of n stories, and five standard deviations either way. */
TEST(beginnings_are_as_frequent) {
    enum { COUNT = 20000 };
    static const char *const beginnings[] = {"O",
                                             "Once, a ",
                                             "Once, an ",
                                             "Long ago, ",
                                             "This is the story of ",
                                             "Once upon a time, a kind boy named Tom"};
    size_t begun[sizeof beginnings / sizeof *beginnings] = {0};
    Buffer text = {0};
    for (uint64_t number = 0; number < COUNT; number++) {
        text.size = 0;
        grammar_story(4, false, number, &text);
        for (size_t i = 0; i < sizeof beginnings / sizeof *beginnings; i++)
            begun[i] += memcmp(text.data, beginnings[i], strlen(beginnings[i])) == 0;
    }
    for (size_t i = 0; i < sizeof beginnings / sizeof *beginnings; i++) {
        const double p = exp(grammar_beginning((const uint8_t *)beginnings[i], strlen(beginnings[i])));
        CHECK_MSG(fabs((double)begun[i] - COUNT * p) <= 5 * sqrt(COUNT * p * (1 - p)) && begun[i] > 0,
                  "%zu of %d stories begin with \"%s\", expected %.1f", begun[i], (int)COUNT, beginnings[i],
                  COUNT * p);
    }
    buffer_free(&text);
}

/* Pearson's statistic of each rule's draws against its weights. Under the weights it follows chi-square with
 * k - 1 degrees of freedom, of which Wilson and Hilferty's cube root is normal: below 6 with a probability
 * of 1 - 1e-9 a rule, of which there are some hundreds. A rule is judged where each row is expected at least
 * five times; every plot must have occurred, at least 150 times in 10,000 stories. */
TEST(weights_are_kept) {
    read_stories();
    size_t judged = 0;
    for (size_t i = 0; i < RULES + (size_t)unnamed_count; i++) {
        const Rule *const rule = i < RULES ? &named[i] : unnamed[i - RULES];
        double draws = 0, statistic = 0, least = INFINITY;
        for (int row = 0; row < rule->count; row++) draws += (double)rule->rows[row].drawn;
        for (int row = 0; row < rule->count; row++) {
            const double expected = draws * rule->rows[row].weight / rule->total;
            const double difference = (double)rule->rows[row].drawn - expected;
            statistic += expected > 0 ? difference * difference / expected : 0;
            if (expected < least) least = expected;
        }
        const char *const name = i < RULES ? grammar_rules[i].name : "a choice on the spot";
        const char *const first = rule->rows[0].columns[0]->literal;
        CHECK_MSG(draws > 0, "%s (%s) was never drawn", name, first ? first : "");
        if (rule->count < 2 || least < 5) continue;
        const double df = rule->count - 1;
        const double z = (cbrt(statistic / df) - (1 - 2 / (9 * df))) / sqrt(2 / (9 * df));
        CHECK_MSG(z < 6, "%s: chi-square %.1f with %.0f degrees of freedom", name, statistic, df);
        judged++;
    }
    CHECK_MSG(judged > 300, "only %zu rules were drawn often enough", judged);

    static const char *const plot_rules[] = {"plot", "child_plot", "animal_plot"};
    int plots = 0;
    for (size_t i = 0; i < 3; i++) {
        const Rule *const rule = rule_named(plot_rules[i]);
        for (int row = 0; row < rule->count; row++, plots++)
            CHECK_MSG(rule->rows[row].drawn >= (STORIES + HELDOUT_STORIES) / 10000 * 150,
                      "row %d of %s was told %ld times", row, plot_rules[i], rule->rows[row].drawn);
    }
    CHECK(plots >= 36);
}

int main(int argc, char **argv) {
    test_start(argc, argv, "grammar");
    read_tables();
    RUN(tables_are_sound);
    RUN(same_again);
    RUN(choices_are_read_back);
    RUN(english);
    RUN(sides_are_apart);
    RUN(one_in_twenty_is_held_out);
    RUN(beginnings_add_up);
    RUN(beginnings_are_as_frequent);
    RUN(weights_are_kept);
    return test_finish();
}
