/* app.h - what the files of the program share: the one App, and what each file has for those after it.
 *
 * The files, in the order of a run's life; each calls only those before it:
 *   say.c        text for people
 *   settings.c   from the command line and the run to settings, the same on all ranks
 *   start.c      from settings to a planned model and open tokens, and what is said of them
 *   training.c   watching and training, to the end of the run
 *   modes.c      what is done instead of training
 *   train_gpt.c  main
 *
 * Everything lives in one App. A function that can fail returns false with app->err set; main prints that one
 * line and ends with app->code.
 *
 * Valid C17 and C++. */
#ifndef APP_H
#define APP_H

#include <jansson.h>

#include "attention/attention.h"
#include "common.h"
#include "data/batches.h"
#include "data/run.h"
#include "data/shards.h"
#include "measure.h"
#include "model/checkpoint.h"
#include "model/gpt.h"
#include "model/ops.h"
#include "model/ranks.h"
#include "options.h"
#include "tokenizer/bpe.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    DEFAULT_EVAL_TOKENS = 131072, /* of the held-out side, in training */
    MICRO_TOKENS = 4096,          /* a CPU's micro-batch: more tokens gain nothing and leave the caches */
    STORIES_AT_ONCE = 64,         /* sequences that are sampled together, on a GPU that does nothing else */
    EVALUATIONS = 10              /* of a run, where not said how often */
};

/* The measurements of this process, for speed and time left; the first step is in none of them. */
typedef struct Pace {
    uint64_t steps;           /* taken by this process, the first included */
    double seconds;           /* of the steps after the first */
    AttentionTimes attention; /* of them in attention, while that is timed ... */
    uint64_t attention_steps; /* ... which so many were */
    double timed;             /* of the steps after untimed_steps, with what is written of each */
    double eval_seconds;      /* of the newest evaluation */
    double last_line;         /* when a step's line was last kept */
    uint64_t last_kept;       /* and after which step */
} Pace;

/* What may fail again and again while the training goes on. */
typedef enum Trouble { SAVING, SYNCING_LOG, REMOVING_OLD, REPORTING, TROUBLES } Trouble;

typedef struct App {
    int argc; /* the command line */
    char **argv;
    const char *program; /* as it was called */
    double started;      /* seconds_now() */
    Options options;
    json_t *settings; /* of the run that is gone on with; owns text in options */
    char *newest_run; /* likewise */
    json_t *chosen;   /* keys of settings that the program chose for this number of steps */
    Error err;
    int code;                 /* the exit code if something fails */
    int stopped;              /* 128 + signal where one ended a run after it was saved */
    FILE *report;             /* where tables go: stdout in training, else stderr */
    bool in_place, line_open; /* lines are rewritten on a terminal; one stands unfinished */
    Ranks ranks;
    bool told;                     /* of several ranks all know of the failure in err */
    int stop;                      /* of several: the signal to stop that they have agreed on */
    json_t *lead;                  /* what rank 0 has told this one; owns text in options */
    Run *run;                      /* rank 0's; of a comparison the folder that its runs are in */
    bool made_tokens, made_merges; /* by this start, in the run's folder; see undo_start */
    bool begun;                    /* a comparison's runs have: what they share stays */
    char *folder;                  /* the run's, on every rank */

    /* data */
    Bpe *bpe;
    uint32_t *token_bytes; /* (V) of text; 0 for the end of a story */
    char *merges_of;       /* where the tokenizer came from; NULL: trained here */
    Shards *train, *heldout;
    Batches *batches, *windows;
    DataFacts facts; /* of the run's own tokens */
    bool has_facts;
    uint64_t eval_windows;
    double floor; /* of an evaluation of floor_tokens */
    uint64_t floor_tokens;

    /* model */
    const Ops *ops;
    Stream *stream;
    GptSetup setup;
    MemoryPlan plan;
    Gpt *gpt;
    Buffer merges, tokenizer_json; /* the files that go with each checkpoint */

    /* training */
    char *resume_from; /* the checkpoint to go on with; NULL: none */
    char *model;       /* that of -load, to start from or to use; NULL: none */
    TrainState state;
    Pace pace;
    int32_t *inputs, *targets; /* (B, T) of a micro-batch */
    bool bad_loss;             /* the held-out loss after this step was not finite */
    uint64_t saved_step;
    bool saved;                 /* saved_step is the newest checkpoint's */
    Error trouble[TROUBLES];    /* what was told last of each; empty where it works */
    double reported, reporting; /* when the report was last written, and how long that took: seconds */
    char *scratch;              /* a temporary folder, removed at the end */
} App;

/* Wrong usage: exit code 2. */
#define USAGE(app, ...) ((app)->code = EXIT_USAGE, error_set(&(app)->err, __VA_ARGS__))

/* ---- say.c: text for people ---- */

/* A short text by value, so that it can be made within an argument list. */
typedef struct Short {
    char text[48];
} Short;

Short commas(uint64_t number);                                     /* "1,234,567" */
Short metric(double value, const char *unit);                      /* 1234567, "B": "1.23 MB" */
Short counted(uint64_t number, const char *one, const char *many); /* "1 story", "1,024 stories" */
Short duration(double seconds);                                    /* "2 min 03 s" */
const char *signal_name(int number);                               /* "SIGINT" */
char *shell_quoted(const char *path);                              /* as a shell takes it; to be freed */
size_t utf8_whole(const uint8_t *text, size_t size);               /* bytes that can be shown already */

bool leads(const App *app);                                    /* whether this rank prints and writes */
void finish_line(App *app);                                    /* ends a line that is being rewritten */
void say(App *app, const char *format, ...) PRINTF_LIKE(2, 3); /* a line of the report */
void row(App *app, const char *name, const char *format, ...) PRINTF_LIKE(3, 4); /* a row of a table */
void note(App *app, const char *format, ...) PRINTF_LIKE(2, 3); /* on stderr: what ends nothing */
bool flush_output(App *app, FILE *out);                         /* whether all that was written has arrived */

/* ---- settings.c: what the run is, the same on all ranks ---- */

bool all_ranks(App *app, bool done); /* whether all ranks have come this far well */
bool same_on_ranks(App *app, const char *what, const char *ours, const char *advice); /* as ranks_same */
bool tell_ranks(App *app, json_t *ours); /* rank 0's object (stolen), as app->lead on every rank */
bool check_same_start(App *app);         /* every rank was started with the same program and flags */
bool check_share(App *app);              /* the ranks can share a batch ... */
uint64_t share_of_batch(const App *app); /* ... of which each takes so many sequences */

/* The settings that are chosen once the number of steps is known, if the user has not. */
typedef struct Chosen {
    const char *flag, *key;
    int64_t *value;
    int64_t most; /* times in a run; 0: of the warm-up, which happens once */
} Chosen;
enum { CHOSEN = 4 };
void list_chosen(Options *o, Chosen list[CHOSEN]); /* evaluations, stories, checkpoints, warm-up */

bool is_auto(int64_t value);                                   /* a setting that is left open */
bool names_shards(const char *path);                           /* "tokens/train-*.bin": shards, not text */
bool check_path(App *app, const char *flag, const char *path); /* there is what the user named */
void note_passed_over(App *app, Buffer *damaged);              /* checkpoints, a line each; emptied */
bool take_run_settings(App *app, bool to_train); /* -resume: the run's settings and its checkpoint */
bool share_run_settings(App *app);               /* the same on every rank */
bool settle_settings(App *app);                  /* what is left to choose and needs no look at the data */
bool settle_rates(App *app);                     /* the learning rates, once the model's width is known */

/* ---- start.c: device, tokenizer, model, data; tables of them ---- */

bool open_device(App *app);                      /* this process's */
bool open_devices(App *app);                     /* one for each rank */
bool load_tokenizer(App *app, const char *path); /* of a run, a checkpoint or a merges file */
char *find_model(App *app, const char *path);    /* the checkpoint that -load means; to be freed */
/* Picks another app->model for `path` where that one went meanwhile; false: there is no other, or enough were. */
bool pick_again(App *app, const char *path, int *tries);
bool take_model(App *app);              /* shape and tokenizer of app->model */
GptConfig model_config(const App *app); /* what the settings say */
AttentionShape attention_shape(const GptSetup *setup);
bool plan_model(App *app, bool training, size_t rows); /* a kernel and a memory plan; rows at once at most */
bool make_model(App *app);                             /* what was planned */

bool write_settings(App *app);                   /* into the run */
bool make_tokens(App *app, const char *folder);  /* shards and a tokenizer from text */
bool open_windows(App *app, uint64_t otherwise); /* of both sides; `otherwise`: tokens to evaluate on */

void print_data(App *app);   /* the table of the data */
void print_tables(App *app); /* all tables */

bool find_inputs(App *app);  /* what training starts from, checked before a folder is made */
bool lead_start(App *app);   /* rank 0's way to the first step ... */
bool follow_start(App *app); /* ... and that of the others */
void undo_start(App *app);   /* a start that failed leaves what was there before */

/* ---- training.c: watching and training ---- */

typedef struct Evaluation {
    double loss, bits_per_byte; /* nats a token; NAN where no target has a byte */
    double floor;               /* of the loss, on the rank that leads; NAN where none is known */
    uint64_t tokens;
} Evaluation;

bool evaluate(App *app, Evaluation *result);     /* false without an error: a stop was asked for */
void encode_prompt(const App *app, Tokens *ids); /* with the token that every story begins after */

typedef void OnStory(App *app, const Buffer *text);
bool write_stories(App *app, uint64_t first, uint64_t stories, size_t max_tokens, FILE *out,
                   OnStory *on_story); /* false: a stop was asked for, or the logits are not finite */

bool train_model(App *app); /* from a plan that fits to the end of the run */
void print_next(App *app);  /* where the run is, and what to type next */
bool taking_steps(void);    /* a stop signal now waits for the end of a step */

/* ---- modes.c: instead of training ---- */

bool compare_backends(App *app);
bool generate_stories(App *app);
bool evaluate_model(App *app);
bool encode_stdin(App *app);
bool decode_stdin(App *app);
bool print_config(App *app);

#ifdef __cplusplus
}
#endif
#endif
