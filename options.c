/* options.c - the one table of flags, and all that comes from it: parsing, -help, JSON, resuming.
 *
 * Adding a flag is a field of Options and a row of the table. A row says where the value lives (offsetof),
 * what values are allowed, the default, and what may happen to the setting when a run goes on. */
#include "options.h"

#include <ctype.h>
#include <errno.h>
#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef enum Type { TYPE_INT, TYPE_REAL, TYPE_TEXT, TYPE_CHOICE, TYPE_SWITCH } Type;

typedef enum Group { DATA, MODEL, ATTENTION, TRAINING, WATCHING, RUN, MACHINE, MODE, GROUPS } Group;
static const char *const group_title[GROUPS] = {"data",     "model", "attention", "training",
                                                "watching", "run",   "machine",   "instead of training"};

typedef enum Keep {
    FIXED,  /* belongs to the run: the same as long as it lives */
    UPWARD, /* may only be raised when a run goes on */
    FREE,   /* may be changed when a run goes on: what is watched and kept, and what the machine decides */
    CALL    /* says what this one call does: no setting, not saved */
} Keep;

typedef struct Option {
    const char *name; /* of the flag; the JSON key has _ for - */
    Type type;
    Group group;
    Keep keep;
    size_t offset;         /* of the field in Options */
    const char *value;     /* what -help shows for the value; of a choice, "a|b": the values allowed */
    double min, max;       /* of a number; of a text: its bytes, where none is as if it were not given */
    double number;         /* the default of a number */
    const char *text;      /* the default of a text or choice */
    const char *automatic; /* in words: what the program does where the default is none of these */
    const char *help;
} Option;

#define ROW(flag, kind, field, section, kept, ...)                                                      \
    {                                                                                                   \
        .name = flag, .type = kind, .offset = offsetof(Options, field), .group = section, .keep = kept, \
        __VA_ARGS__                                                                                     \
    }
#define INT(flag, field, section, kept, standard, low, high, words)                                      \
    ROW(flag, TYPE_INT, field, section, kept, .value = "N", .number = standard, .min = low, .max = high, \
        .help = words)
#define REAL(flag, field, section, kept, standard, low, high, words)                                      \
    ROW(flag, TYPE_REAL, field, section, kept, .value = "X", .number = standard, .min = low, .max = high, \
        .help = words)
#define INT_AUTO(flag, field, section, kept, low, high, otherwise, words)                                   \
    ROW(flag, TYPE_INT, field, section, kept, .value = "N", .number = OPTION_AUTO, .min = low, .max = high, \
        .automatic = otherwise, .help = words)
#define REAL_AUTO(flag, field, section, kept, low, high, otherwise, words)                                   \
    ROW(flag, TYPE_REAL, field, section, kept, .value = "X", .number = OPTION_AUTO, .min = low, .max = high, \
        .automatic = otherwise, .help = words)
#define TEXT(flag, field, section, kept, shown, bytes, otherwise, words)               \
    ROW(flag, TYPE_TEXT, field, section, kept, .value = shown, .min = 1, .max = bytes, \
        .automatic = otherwise, .help = words)
#define CHOICE(flag, field, section, kept, standard, choices, words) \
    ROW(flag, TYPE_CHOICE, field, section, kept, .value = choices, .text = standard, .help = words)
#define SWITCH(flag, field, section, kept, words) ROW(flag, TYPE_SWITCH, field, section, kept, .help = words)

/* Limits that only keep arithmetic safe: 2^40 for counts, 2^53 where every value must survive a double. */
#define MANY 1099511627776.0
#define MOST 9007199254740992.0
enum { NAME_BYTES = 64, PATH_BYTES = 4095, PROMPT_BYTES = 1 << 20 };

static const Option table[] = {
    TEXT("data", data, DATA, FIXED, "PATH", PATH_BYTES, "the built-in stories",
         "text to learn from: a file, a .gz of one, a folder whose .txt and .txt.gz files are read (not "
         "deeper), or token shards: a .bin file or a quoted glob of them, which are used where they lie"),
    TEXT("heldout", heldout, DATA, FIXED, "PATH", PATH_BYTES,
         "built-in stories, 1,000 or a 20th of -stories if that is more; of text every 20th story, under 20 "
         "stories the last 5 %",
         "text to evaluate on; with -data of shards it is needed, and shards too"),
    TEXT("tokenizer", tokenizer, DATA, FIXED, "PATH", PATH_BYTES,
         "trained on the training side; with shards, merges.txt beside them",
         "a run, or a merges file such as GPT-2's vocab.bpe"),
    INT("vocab", vocab, DATA, FIXED, 1024, 257, 65536,
        "tokens of the tokenizer to train; fewer if the text cannot give as many"),
    INT("stories", stories, DATA, FIXED, 20000, 1, 1e9, "built-in stories to make for training"),

    INT("layers", layers, MODEL, FIXED, 3, 1, MANY, "transformer blocks"),
    INT("heads", heads, MODEL, FIXED, 4, 1, MANY, "attention heads; they divide the channels"),
    INT("channels", channels, MODEL, FIXED, 128, 1, MANY, "width of the model"),
    INT("ctx", ctx, MODEL, FIXED, 512, 1, MANY, "tokens that a sequence holds and attention sees"),
    CHOICE("position", position, MODEL, FIXED, "rotary", "rotary|learned",
           "how positions are told; learned is exactly GPT-2"),
    REAL("dropout", dropout, MODEL, FIXED, 0, 0, 0.9, "share of activations dropped in training"),
    TEXT("load", load, MODEL, FIXED, "RUN", PATH_BYTES, "new weights",
         "start from a run's best model, from RUN/checkpoints/step-N, or from a folder with GPT-2's weights; "
         "it brings its shape and tokenizer"),

    ROW("attention", TYPE_TEXT, attention, ATTENTION, FREE, .value = "flash|naive", .min = 1,
        .max = NAME_BYTES, .text = "flash",
        .help = "flash never stores the T x T table, naive does. Not given, -generate and -evaluate take "
                "naive for a shape that flash cannot run"),
    SWITCH("deterministic", deterministic, ATTENTION, FREE, "only kernels whose result never varies"),

    INT("batch", batch, TRAINING, FIXED, 4, 1, 1e9, "sequences a step, over all ranks"),
    INT_AUTO("micro", micro, TRAINING, FREE, 1, 1e9, "what fits", "sequences a rank takes at once"),
    INT_AUTO("steps", steps, TRAINING, UPWARD, 1, MANY, "as many as -minutes allows", "steps to train"),
    REAL_AUTO(
        "minutes", minutes, TRAINING, FIXED, 0.001, 1e7, "2.5, or no limit with -steps",
        "time for the whole call, evaluations and samples included: the first steps are timed, then the "
        "number of steps is fixed (so a machine that gets slower later takes longer)"),
    REAL_AUTO("lr", lr, TRAINING, FIXED, 0, 1e9, "0.768 over the channels: 0.006 for 128 of them",
              "learning rate, reached after the warm-up"),
    REAL_AUTO("min-lr", min_lr, TRAINING, FIXED, 0, 1e9, "a tenth of -lr",
              "learning rate at the end: a cosine leads there"),
    INT_AUTO("warmup", warmup, TRAINING, FIXED, 0, MANY,
             "50, or a fifth of the steps if that is less (with -minutes at least 10 after it is known)",
             "steps in which the learning rate rises from 0"),
    REAL("weight-decay", weight_decay, TRAINING, FIXED, 0.1, 0, 100, "of matrices and embeddings"),
    REAL("beta1", beta1, TRAINING, FIXED, 0.9, 0, 0.99999, "AdamW's mean of the gradient"),
    REAL("beta2", beta2, TRAINING, FIXED, 0.95, 0, 0.99999, "AdamW's mean of its square"),
    REAL("clip", clip, TRAINING, FIXED, 1, 0, 1e9, "largest norm of the gradient; 0: no clipping"),
    INT("seed", seed, TRAINING, FIXED, 1, 0, MOST, "of weights, order, dropout, samples, built-in stories"),

    INT_AUTO("eval-every", eval_every, WATCHING, FREE, 0, MANY,
             "a tenth of the steps, with -minutes more where evaluations would take too long",
             "steps between evaluations; 0: at the start and the end only"),
    INT_AUTO("eval-tokens", eval_tokens, WATCHING, FIXED, 1, MOST,
             "131,072, with -minutes fewer where they would take too long; with -evaluate all",
             "held-out tokens to evaluate on, from the first, in whole windows of -ctx"),
    INT_AUTO("sample-every", sample_every, WATCHING, FREE, 0, MANY, "a quarter of the steps",
             "steps between samples; 0: at the end only"),
    INT("samples", samples, WATCHING, FREE, 1, 0, 1e6, "stories to write each time"),
    ROW("prompt", TYPE_TEXT, prompt, WATCHING, FREE, .value = "TEXT", .min = 0, .max = PROMPT_BYTES,
        .automatic = "none: a story from its start", .help = "how the stories begin, as ordinary text"),
    INT("sample-tokens", sample_tokens, WATCHING, FREE, 400, 1, 1e9, "longest story, in new tokens"),
    REAL("temperature", temperature, WATCHING, FREE, 0.8, 0, 1000, "of sampling; 0: the likeliest token"),
    INT("top-k", top_k, WATCHING, FREE, 0, 0, 65536, "sample from the N likeliest tokens; 0: from all"),
    REAL("top-p", top_p, WATCHING, FREE, 1, 0, 1,
         "sample from the likeliest tokens whose probabilities reach X; 1: from all"),

    TEXT("run", run, RUN, CALL, "DIR", PATH_BYTES, "a new folder under runs/",
         "the run's folder; one that holds a run is refused without -resume or -force"),
    INT_AUTO(
        "checkpoint-every", checkpoint_every, RUN, FREE, 0, MANY, "a tenth of the steps",
        "steps between checkpoints; an evaluation that finds a new best is also saved; 0: only at the end"),
    INT("keep", keep, RUN, FREE, 2, 1, 1e6, "newest checkpoints to keep; the best is kept besides"),
    SWITCH("resume", resume, RUN, CALL,
           "go on where DIR (without -run: the newest run) stopped, or start it; settings come from the run"),
    SWITCH("force", force, RUN, CALL, "start over: an old run is moved aside to DIR.old-N"),

    CHOICE("device", device, MACHINE, FREE, "auto", "auto|cpu|cuda", "where to compute"),
    CHOICE("precision", precision, MACHINE, FREE, "auto", "auto|bf16|fp32",
           "of activations; on a GPU bf16, on a CPU fp32"),
    INT_AUTO("threads", threads, MACHINE, FREE, 1, 4096, "OMP_NUM_THREADS, else the CPUs it may use",
             "CPU threads, at most four for each processor"),
    REAL("timeout", timeout, MACHINE, CALL, 120, 1, 1e6,
         "with several ranks: seconds of a step in which one may be silent (five times as many outside of "
         "steps) "
         "before the run ends"),

    SWITCH(
        "generate", generate, MODE, CALL,
        "write -samples stories to stdout, with the model of -load (else of -run, else of the newest run)"),
    SWITCH("evaluate", evaluate, MODE, CALL,
           "print that model's loss on its run's held-out side, or on -heldout PATH (text or shards)"),
    TEXT("compare", compare, MODE, CALL, "A,B", PATH_BYTES, NULL,
         "train with each attention backend named (naive,flash): the same seed, data and -steps (or -minutes "
         "for each); show them side by side; the runs and compare.json go into -run DIR (default: a new "
         "runs/compare-...)"),
    SWITCH(
        "tokenize", tokenize, MODE, CALL,
        "make the run's tokenizer and shards in DIR/tokens and stop; -resume -run DIR then trains on them"),
    SWITCH("encode", encode, MODE, CALL, "text on stdin to ids on stdout, with -tokenizer"),
    SWITCH("decode", decode, MODE, CALL, "ids on stdin to text on stdout, with -tokenizer"),
    SWITCH("special", special, MODE, CALL, "with -encode: <|endoftext|> in the text is the special token"),
    SWITCH("print-config", print_config, MODE, CALL, "print all settings as JSON and stop"),
    SWITCH("dry-run", dry_run, MODE, CALL,
           "print the start-up tables and stop; no text is read and no folder made"),
    SWITCH("version", version, MODE, CALL, "print the version and stop"),
    SWITCH("help", help, MODE, CALL, "print this and stop"),
};
enum { OPTIONS = sizeof table / sizeof table[0] };

static bool given[OPTIONS];

/* The field of an option, as its type. */
static int64_t *int_field(Options *options, const Option *option) {
    return (int64_t *)(void *)((char *)options + option->offset);
}
static double *real_field(Options *options, const Option *option) {
    return (double *)(void *)((char *)options + option->offset);
}
static const char **text_field(Options *options, const Option *option) {
    return (const char **)(void *)((char *)options + option->offset);
}
static bool *switch_field(Options *options, const Option *option) {
    return (bool *)(void *)((char *)options + option->offset);
}

static void set_defaults(Options *options) {
    memset(options, 0, sizeof *options);
    for (size_t i = 0; i < OPTIONS; i++) {
        const Option *option = &table[i];
        given[i] = false;
        switch (option->type) {
        case TYPE_INT:
            *int_field(options, option) = (int64_t)option->number;
            break;
        case TYPE_REAL:
            *real_field(options, option) = option->number;
            break;
        case TYPE_TEXT:
        case TYPE_CHOICE:
            *text_field(options, option) = option->text;
            break;
        case TYPE_SWITCH:
            *switch_field(options, option) = false;
            break;
        }
    }
}

/* ---- finding a flag ---- */

static const Option *find_option(const char *name, size_t length) {
    for (size_t i = 0; i < OPTIONS; i++)
        if (strlen(table[i].name) == length && memcmp(table[i].name, name, length) == 0) return &table[i];
    return NULL;
}

bool options_given(const char *name) {
    const Option *option = find_option(name, strlen(name));
    return option && given[option - table];
}

/* Edit distance of Damerau and Levenshtein (letters put in, left out, replaced, or two neighbours swapped),
 * both at most NAME_BYTES long. */
static size_t edit_distance(const char *a, size_t a_size, const char *b, size_t b_size) {
    size_t rows[3][NAME_BYTES + 1];
    size_t *before = rows[0], *last = rows[1], *now = rows[2];
    for (size_t j = 0; j <= b_size; j++) last[j] = before[j] = j;
    for (size_t i = 1; i <= a_size; i++) {
        now[0] = i;
        for (size_t j = 1; j <= b_size; j++) {
            size_t best = last[j - 1] + (a[i - 1] != b[j - 1]);
            if (last[j] + 1 < best) best = last[j] + 1;
            if (now[j - 1] + 1 < best) best = now[j - 1] + 1;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] && before[j - 2] + 1 < best)
                best = before[j - 2] + 1;
            now[j] = best;
        }
        size_t *reused = before;
        before = last, last = now, now = reused;
    }
    return last[b_size];
}

/* The flag that was probably meant: the shortest that begins so, else one of which at most a third of the letters are
 * wrong. NULL: none is near. */
static const char *nearest_name(const char *name, size_t length) {
    if (length > NAME_BYTES) length = NAME_BYTES;
    const char *nearest = NULL;
    for (size_t i = 0; i < OPTIONS && length >= 3; i++)
        if (strncmp(table[i].name, name, length) == 0 &&
            (!nearest || strlen(table[i].name) < strlen(nearest)))
            nearest = table[i].name;
    if (nearest) return nearest;
    size_t best = 1 + (length < 4 ? 1 : length < 6 ? 2 : length / 3); /* one more than may be wrong */
    for (size_t i = 0; i < OPTIONS; i++) {
        const size_t distance = edit_distance(name, length, table[i].name, strlen(table[i].name));
        if (distance < best) best = distance, nearest = table[i].name;
    }
    return nearest;
}

/* ---- values ---- */

/* "N, 1 to 65536" in words: what a flag allows. */
static void allowed_values(const Option *option, char *text, size_t size) {
    switch (option->type) {
    case TYPE_INT:
        snprintf(text, size, "a whole number in decimal, %.0f to %.0f", option->min, option->max);
        break;
    case TYPE_REAL:
        snprintf(text, size, "a number, %s%g to %g", option->min > 0 ? "" : "0 or ",
                 option->min > 0 ? option->min : (double)FLT_MIN, option->max);
        break;
    case TYPE_TEXT:
        snprintf(text, size, "%.0f to %.0f bytes of UTF-8", option->min, option->max);
        break;
    case TYPE_CHOICE:
        snprintf(text, size, "%s", option->value);
        break;
    case TYPE_SWITCH:
        snprintf(text, size, "true or false, or no value");
        break;
    }
}

/* No hexadecimal, no "nan", no "inf", no space: what strtod takes beyond the numbers that people write; nor one that
 * is not 0 and becomes it in fp32, in which most of them are used. */
static bool parse_real(const char *text, double *value) {
    if (!*text || text[strspn(text, "0123456789.eE+-")]) return false;
    char *end;
    errno = 0;
    *value = strtod(text, &end);
    return *end == 0 && errno != ERANGE && isfinite(*value) && (*value == 0 || fabs(*value) >= FLT_MIN);
}

static bool parse_int(const char *text, int64_t *value) {
    const char *digits = text + (*text == '-' || *text == '+');
    if (!*digits || digits[strspn(digits, "0123456789")]) return false;
    errno = 0;
    const long long parsed = strtoll(text, NULL, 10);
    *value = parsed;
    return errno == 0;
}

/* Whether the name is one of the choices "a|b|c". */
static bool is_among(const char *choices, const char *name) {
    const size_t length = strlen(name);
    for (const char *choice = choices; *choice;) {
        const size_t size = strcspn(choice, "|");
        if (size == length && memcmp(choice, name, size) == 0) return true;
        choice += size + (choice[size] == '|');
    }
    return false;
}

/* JSON, in which settings are kept, holds UTF-8 only. */
static bool is_utf8(const char *text) {
    json_t *string = json_string(text);
    json_decref(string);
    return string != NULL;
}

/* Sets the field from text, if the option allows the value. */
static bool set_from_text(Options *options, const Option *option, const char *text) {
    int64_t whole;
    double real;
    switch (option->type) {
    case TYPE_INT:
        if (!parse_int(text, &whole) || (double)whole < option->min || (double)whole > option->max)
            return false;
        *int_field(options, option) = whole;
        return true;
    case TYPE_REAL:
        if (!parse_real(text, &real) || real < option->min || real > option->max) return false;
        *real_field(options, option) = real;
        return true;
    case TYPE_TEXT:
        real = (double)strlen(text);
        if (real < option->min || real > option->max || !is_utf8(text)) return false;
        *text_field(options, option) = *text ? text : NULL;
        return true;
    case TYPE_CHOICE:
        if (!is_among(option->value, text)) return false;
        *text_field(options, option) = text;
        return true;
    case TYPE_SWITCH:
        if (strcmp(text, "true") != 0 && strcmp(text, "false") != 0) return false;
        *switch_field(options, option) = strcmp(text, "true") == 0;
        return true;
    }
    return false;
}

/* ---- the command line ---- */

/* The flag that an argument names, and what follows its '=' (NULL: none). */
static const Option *argument_option(const char *argument, const char **value) {
    *value = NULL;
    if (argument[0] != '-') return NULL;
    const char *name = argument + 1 + (argument[1] == '-');
    const size_t length = strcspn(name, "=");
    if (name[length]) *value = name + length + 1;
    return length == 1 && *name == 'h' ? find_option("help", 4) : find_option(name, length);
}

static bool unknown_argument(const char *argument, Error *err) {
    const char *name = argument + strspn(argument, "-");
    const size_t length = strcspn(name, "=");
    if (argument[0] != '-' || length == 0)
        return error_set(
            err,
            "unexpected \"%.100s\": flags begin with -, as in -steps 100, and take one value (of several "
            "texts the folder); see -help",
            argument);
    const char *nearest = nearest_name(name, length);
    return error_set(err, "there is no flag -%.*s; %s%s%s -help", length < 100 ? (int)length : 100, name,
                     nearest ? "did you mean -" : "", nearest ? nearest : "", nearest ? "? See" : "see");
}

bool options_parse(Options *options, int argc, char **argv, Error *err) {
    set_defaults(options);
    for (int i = 1; i < argc; i++) {
        const char *value, *unused;
        const Option *option = argument_option(argv[i], &value);
        if (!option) return unknown_argument(argv[i], err);
        char allowed[128];
        allowed_values(option, allowed, sizeof allowed);
        if (!value && option->type == TYPE_SWITCH) value = "true";
        if (!value && i + 1 < argc) {
            value = argv[++i];
            /* "-data -steps 5": the value was forgotten */
            if (argument_option(value, &unused))
                return error_set(err,
                                 "-%s needs a value (%s) but the flag %.100s follows; if that is the value, "
                                 "write -%s=%.100s",
                                 option->name, allowed, value, option->name, value);
        }
        if (!value) return error_set(err, "-%s needs a value: %s", option->name, allowed);
        if (!set_from_text(options, option, value))
            return error_set(err, "-%s: found \"%.100s\"%s, expected %s", option->name, value,
                             strlen(value) > 100 ? "..." : "", allowed);
        given[option - table] = true;
    }
    return true;
}

/* ---- -help ---- */

enum { HELP_COLUMNS = 100, HELP_INDENT = 25 };

/* Words from column HELP_INDENT on, broken before HELP_COLUMNS; *column is where the line stands. */
static void print_wrapped(FILE *out, const char *text, size_t *column) {
    for (const char *word = text + strspn(text, " "); *word; word += strspn(word, " ")) {
        const size_t length = strcspn(word, " ");
        if (*column > HELP_INDENT && *column + 1 + length > HELP_COLUMNS) {
            fprintf(out, "\n%*s", HELP_INDENT, "");
            *column = HELP_INDENT;
        } else if (*column > HELP_INDENT) {
            fputc(' ', out);
            ++*column;
        }
        fprintf(out, "%.*s", (int)length, word);
        *column += length;
        word += length;
    }
}

/* "(1 to 65536; default 1024)" */
static void range_and_default(const Option *option, char *text, size_t size) {
    char standard[128] = "", range[64] = "";
    const bool number = option->type == TYPE_INT || option->type == TYPE_REAL;
    if (option->automatic) snprintf(standard, sizeof standard, "default: %s", option->automatic);
    else if (option->text) snprintf(standard, sizeof standard, "default %s", option->text);
    else if (number) snprintf(standard, sizeof standard, "default %.15g", option->number);
    /* A limit that only keeps arithmetic safe tells a reader nothing. */
    if (number && option->max < 1e6) snprintf(range, sizeof range, "%g to %.15g; ", option->min, option->max);
    else if (number && option->min > 0) snprintf(range, sizeof range, "%g or more; ", option->min);
    if (*standard) snprintf(text, size, "(%s%s)", range, standard);
    else *text = 0;
}

/* The flags that may change when a run goes on, in the table's order. */
static void print_changeable(FILE *out) {
    fprintf(out, "\nwhen a run goes on\n%*s", HELP_INDENT, "");
    size_t column = HELP_INDENT;
    print_wrapped(out, "its settings are taken from it. These can be changed:", &column);
    for (const Option *option = table; option < table + OPTIONS; option++) {
        const bool of_machine = option->keep == CALL && option->group == MACHINE;
        if (option->keep != FREE && option->keep != UPWARD && !of_machine) continue;
        char name[NAME_BYTES + 16];
        snprintf(name, sizeof name, "-%s%s", option->name, option->keep == UPWARD ? " (upward)" : "");
        print_wrapped(out, name, &column);
    }
    print_wrapped(out, "and no others: a flag that differs from what the run has is refused.", &column);
    fputc('\n', out);
}

void options_print_help(FILE *out) {
    fprintf(out,
            "train_gpt turns a pile of stories into a small GPT: without flags it makes stories of its own,\n"
            "trains a tokenizer and a model on them for two and a half minutes, and writes a story.\n\n"
            "usage: train_gpt [-flag value ...]     also --flag value, --flag=value; the last one counts\n");
    for (Group group = 0; group < GROUPS; group++) {
        fprintf(out, "\n%s\n", group_title[group]);
        for (const Option *option = table; option < table + OPTIONS; option++) {
            if (option->group != group) continue;
            size_t column = (size_t)fprintf(out, "  -%s%s%s", option->name, option->value ? " " : "",
                                            option->value ? option->value : "");
            if (column >= HELP_INDENT) fputc('\n', out), column = 0;
            fprintf(out, "%*s", (int)(HELP_INDENT - column), "");
            column = HELP_INDENT;
            char range[256];
            range_and_default(option, range, sizeof range);
            print_wrapped(out, option->help, &column);
            print_wrapped(out, range, &column);
            fputc('\n', out);
        }
    }
    print_changeable(out);
    fprintf(out,
            "\nIn text, <|endoftext|> separates stories. One SIGINT, SIGTERM or SIGUSR1 finishes the step, "
            "saves\n"
            "and stops; a second, half a second later, stops at once. Exit codes: 0 done, 1 failed, 2 wrong\n"
            "usage, 130, 143, 138 stopped by such a signal.\n");
}

/* ---- JSON ---- */

static void json_key(const Option *option, char key[NAME_BYTES]) {
    snprintf(key, NAME_BYTES, "%s", option->name);
    for (char *c = key; *c; c++)
        if (*c == '-') *c = '_';
}

static json_t *value_to_json(Options *options, const Option *option) {
    switch (option->type) {
    case TYPE_INT: {
        const int64_t whole = *int_field(options, option);
        return option->automatic && whole == OPTION_AUTO ? json_null() : json_integer(whole);
    }
    case TYPE_REAL: {
        const double real = *real_field(options, option);
        return option->automatic && real == OPTION_AUTO ? json_null() : json_real(real);
    }
    case TYPE_TEXT:
    case TYPE_CHOICE: {
        const char *text = *text_field(options, option);
        return text ? json_string(text) : json_null();
    }
    case TYPE_SWITCH:
        return json_boolean(*switch_field(options, option));
    }
    return json_null();
}

json_t *options_to_json(const Options *options) {
    Options copy = *options; /* the fields are found through a pointer that could write */
    json_t *object = json_object();
    for (const Option *option = table; option < table + OPTIONS; option++) {
        if (option->keep == CALL) continue;
        char key[NAME_BYTES];
        json_key(option, key);
        json_object_set_new(object, key, value_to_json(&copy, option));
    }
    return object;
}

/* Sets the field from a setting of a run, if the option allows it. null is the default of what has no other. */
static bool set_from_json(Options *options, const Option *option, json_t *value) {
    const double real = json_number_value(value);
    const bool in_range = real >= option->min && real <= option->max;
    switch (option->type) {
    case TYPE_INT:
        if (json_is_null(value) && option->automatic) *int_field(options, option) = OPTION_AUTO;
        else if (json_is_integer(value) && in_range) *int_field(options, option) = json_integer_value(value);
        else return false;
        return true;
    case TYPE_REAL:
        if (json_is_null(value) && option->automatic) *real_field(options, option) = OPTION_AUTO;
        else if (json_is_number(value) && in_range) *real_field(options, option) = real;
        else return false;
        return true;
    case TYPE_TEXT:
    case TYPE_CHOICE:
        if (json_is_null(value) && option->automatic) {
            *text_field(options, option) = NULL;
            return true;
        }
        /* A NUL within would cut the text short. */
        if (!json_is_string(value) || strlen(json_string_value(value)) != json_string_length(value))
            return false;
        return set_from_text(options, option, json_string_value(value));
    case TYPE_SWITCH:
        if (!json_is_boolean(value)) return false;
        *switch_field(options, option) = json_is_true(value);
        return true;
    }
    return false;
}

char *options_value_text(const json_t *value) {
    if (!value || json_is_null(value)) return xstrdup("none");
    if (!json_is_real(value)) return json_dumps(value, JSON_ENCODE_ANY);
    char text[40];
    int digits = 1;
    do snprintf(text, sizeof text, "%.*g", digits, json_real_value(value));
    while (strtod(text, NULL) != json_real_value(value) && ++digits <= 17);
    return xstrdup(text);
}

/* A flag that differs from the run's setting. */
static bool refuse_change(const Option *option, json_t *theirs, json_t *ours, Error *err) {
    char *run = options_value_text(theirs), *found = options_value_text(ours);
    error_set(
        err,
        "-%s cannot %s when a run goes on: the run has %.100s, found %.100s; leave the flag out or start "
        "a new run",
        option->name, option->keep == UPWARD ? "go down" : "change", run, found);
    free(found);
    free(run);
    return false;
}

/* One setting of a run against the command line's. */
static bool resume_option(Options *options, const Option *option, const char *key, json_t *setting,
                          Error *err) {
    Options of_run = *options;
    if (!set_from_json(&of_run, option, setting)) {
        char *found = json_dumps(setting, JSON_ENCODE_ANY), allowed[128];
        allowed_values(option, allowed, sizeof allowed);
        error_set(err, "a run's settings: \"%s\" is %.100s, expected %s", key, found ? found : "damaged",
                  allowed);
        free(found);
        return false;
    }
    if (!given[option - table]) {
        *options = of_run;
        return true;
    }
    json_t *theirs = value_to_json(&of_run, option), *ours = value_to_json(options, option);
    bool done = true;
    if (option->keep == FIXED) done = json_equal(theirs, ours);
    if (option->keep == UPWARD) done = *int_field(options, option) >= *int_field(&of_run, option);
    if (!done) refuse_change(option, theirs, ours, err);
    json_decref(theirs);
    json_decref(ours);
    return done;
}

bool options_complete(const json_t *settings, const char *path, Error *err) {
    bool model = false;
    for (int pass = 0; pass < 2; pass++)
        for (const Option *option = table; option < table + OPTIONS; option++) {
            char key[NAME_BYTES];
            json_key(option, key);
            const bool of_tokens = option->group == DATA || strcmp(key, "seed") == 0;
            if (option->keep != FIXED && option->keep != UPWARD) continue;
            if (json_object_get(settings, key)) model = model || !of_tokens;
            else if (pass == 1 && (model || of_tokens))
                return error_set(
                    err,
                    "%s lacks \"%s\", which belongs to the run as long as it lives; put it back, "
                    "or start a new run",
                    path, key);
        }
    return true;
}

bool options_resume(Options *options, json_t *settings, Error *err) {
    if (!json_is_object(settings)) return error_set(err, "a run's settings: expected a JSON object");
    for (const Option *option = table; option < table + OPTIONS; option++) {
        char key[NAME_BYTES];
        json_key(option, key);
        json_t *setting = option->keep == CALL ? NULL : json_object_get(settings, key);
        if (setting && !resume_option(options, option, key, setting, err)) return false;
    }
    return true;
}
