/* report.c - RUN/report.html (report.h): reads the log once, keeps what the page shows in bounded memory,
 * draws the curves as inline SVG.
 *
 * Everything from the run's files is text on this page, never markup: it passes through put_text, which
 * escapes it; and a content policy in the page's head forbids scripts and anything from elsewhere. */
#include "report.h"
#include "run.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- what the page shows ---- */

enum { MAX_BINS = 600, NEWEST_SAMPLES = 6 };

/* A curve of any number of points in at most MAX_BINS bins of as many consecutive points each: where they
 * run out, neighbours are merged. */
typedef struct Bin {
    double x_sum, y_sum;
    uint64_t count;
} Bin;

typedef struct Curve {
    Bin bins[MAX_BINS];
    size_t used;
    uint64_t per_bin;
    double first, last;
} Curve;

typedef struct Facts {
    Curve loss, lr, grad_norm, tokens_per_s; /* of the steps */
    Curve heldout;
    double last_step;
    double tokens, mfu;
    double timed_tokens, timed_ms; /* of the steps after the first, which is slower */
    double heldout_loss;           /* of the last evaluation; NAN: none, or it was not finite */
    bool evaluated;
    double best_loss, best_step;       /* the lowest held-out loss */
    double bits_per_byte, eval_tokens; /* of the last evaluation */
    double floor;                      /* NAN: not known */
    json_t *start, *end;               /* the last rows of these types, or NULL */
    json_t *samples[NEWEST_SAMPLES];   /* the newest is samples[(sample_count - 1) % NEWEST_SAMPLES] */
    size_t sample_count;
} Facts;

static void curve_add(Curve *curve, double x, double y) {
    if (!(fabs(x) < 1e15 && fabs(y) < 1e30)) return; /* nor NaN: what cannot be drawn is left out */
    if (curve->per_bin == 0) curve->per_bin = 1;
    if (curve->used == MAX_BINS && curve->bins[MAX_BINS - 1].count == curve->per_bin) {
        for (size_t i = 0; i < MAX_BINS / 2; i++) {
            const Bin a = curve->bins[2 * i], b = curve->bins[2 * i + 1];
            curve->bins[i] = (Bin){a.x_sum + b.x_sum, a.y_sum + b.y_sum, a.count + b.count};
        }
        curve->used = MAX_BINS / 2, curve->per_bin *= 2;
    }
    if (curve->used == 0) curve->first = y;
    if (curve->used == 0 || curve->bins[curve->used - 1].count == curve->per_bin)
        curve->bins[curve->used++] = (Bin){0};
    Bin *bin = &curve->bins[curve->used - 1];
    bin->x_sum += x, bin->y_sum += y, bin->count++;
    curve->last = y;
}

static double bin_x(const Curve *curve, size_t i) {
    return curve->bins[i].x_sum / (double)curve->bins[i].count;
}

static double bin_y(const Curve *curve, size_t i) {
    return curve->bins[i].y_sum / (double)curve->bins[i].count;
}

/* The mean of bins i - reach .. i + reach; fewer, but as many on both sides, near the ends. */
static double smooth_y(const Curve *curve, size_t i, size_t reach) {
    if (reach > i) reach = i;
    if (reach > curve->used - 1 - i) reach = curve->used - 1 - i;
    double sum = 0;
    uint64_t count = 0;
    for (size_t j = i - reach; j <= i + reach; j++)
        sum += curve->bins[j].y_sum, count += curve->bins[j].count;
    return sum / (double)count;
}

static double number(const json_t *object, const char *name) {
    const json_t *value = json_object_get(object, name);
    return json_is_number(value) ? json_number_value(value) : (double)NAN;
}

static void keep(json_t **slot, const json_t *row) {
    json_decref(*slot);
    *slot = json_deep_copy(row);
}

static bool take_row(void *context, const RunRow *row, Error *err) {
    Facts *facts = (Facts *)context;
    const json_t *json = row->json;
    const double step = number(json, "step"), loss = number(json, "loss");
    (void)err; /* a row without a number only leaves its point out */
    if (strcmp(row->type, "step") == 0) {
        curve_add(&facts->loss, step, loss);
        curve_add(&facts->lr, step, number(json, "lr"));
        curve_add(&facts->grad_norm, step, number(json, "grad_norm"));
        curve_add(&facts->tokens_per_s, step, number(json, "tokens_per_s"));
        facts->last_step = step, facts->tokens = number(json, "tokens"), facts->mfu = number(json, "mfu");
        const double ms = number(json, "ms"), tokens = number(json, "tokens_per_s") * ms / 1e3;
        if (step > 1 && ms > 0 && ms < 1e15 && tokens < 1e15)
            facts->timed_ms += ms, facts->timed_tokens += tokens;
    } else if (strcmp(row->type, "eval") == 0) {
        curve_add(&facts->heldout, step, loss);
        facts->heldout_loss = fabs(loss) < 1e30 ? loss : (double)NAN, facts->evaluated = true;
        if (isfinite(loss) && !(loss >= facts->best_loss)) facts->best_loss = loss, facts->best_step = step;
        facts->bits_per_byte = number(json, "bits_per_byte"), facts->eval_tokens = number(json, "tokens");
        facts->floor = number(json, "floor");
    } else if (strcmp(row->type, "sample") == 0) {
        keep(&facts->samples[facts->sample_count++ % NEWEST_SAMPLES], json);
    } else if (strcmp(row->type, "start") == 0) {
        keep(&facts->start, json);
        keep(&facts->end, NULL);
    } else if (strcmp(row->type, "end") == 0) {
        keep(&facts->end, json);
    }
    return true;
}

/* ---- writing HTML ---- */

static void put(Buffer *page, const char *format, ...) PRINTF_LIKE(2, 3);
static void put(Buffer *page, const char *format, ...) {
    va_list arguments, again;
    va_start(arguments, format);
    va_copy(again, arguments);
    const int size = vsnprintf(NULL, 0, format, arguments);
    va_end(arguments);
    buffer_reserve(page, (size_t)size + 1);
    vsnprintf((char *)page->data + page->size, (size_t)size + 1, format, again);
    va_end(again);
    page->size += (size_t)size;
}

/* Text as text, whatever it holds; control bytes that no page may hold are shown as U+FFFD. */
static void put_text(Buffer *page, const char *text, size_t size) {
    for (size_t i = 0; i < size; i++) {
        const uint8_t byte = (uint8_t)text[i];
        switch (byte) {
        case '&':
            buffer_append_text(page, "&amp;");
            break;
        case '<':
            buffer_append_text(page, "&lt;");
            break;
        case '>':
            buffer_append_text(page, "&gt;");
            break;
        case '"':
            buffer_append_text(page, "&quot;");
            break;
        case '\'':
            buffer_append_text(page, "&#39;");
            break;
        default:
            if ((byte < ' ' && byte != '\n' && byte != '\t') || byte == 0x7F)
                buffer_append_text(page, "\xEF\xBF\xBD");
            else buffer_append(page, &byte, 1);
        }
    }
}

static void put_json_text(Buffer *page, const json_t *string) {
    put_text(page, json_string_value(string), json_string_length(string));
}

/* 12,345,678; numbers too large for that are given in short. */
static void put_whole(Buffer *page, double x) {
    char digits[32];
    if (!(x >= 0 && x < 1e15)) {
        put(page, "%g", x);
        return;
    }
    const int size = snprintf(digits, sizeof digits, "%.0f", x);
    for (int i = 0; i < size; i++) put(page, "%s%c", i > 0 && (size - i) % 3 == 0 ? "," : "", digits[i]);
}

static const char page_head[] =
    "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
    "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src "
    "'unsafe-inline'\">\n"
    "<style>\n"
    ":root { color-scheme: light dark; --back: #fbfaf7; --card: #ffffff; --text: #1d2129; --dim: #68707d;\n"
    "  --line: #e4e2dc; --train: #2f6fd0; --heldout: #d2571f; --floor: #2f8f5b; }\n"
    "@media (prefers-color-scheme: dark) { :root { --back: #14161a; --card: #1c1f25; --text: #e7e9ed;\n"
    "  --dim: #979eab; --line: #30343c; --train: #6ea3f5; --heldout: #f08a55; --floor: #63c08d; } }\n"
    "* { box-sizing: border-box; }\n"
    "body { margin: 0 auto; max-width: 1040px; padding: 32px 20px 64px; background: var(--back);\n"
    "  color: var(--text); font: 15px/1.5 system-ui, sans-serif; }\n"
    "h1 { font-size: 24px; margin: 0; overflow-wrap: anywhere; }\n"
    "h2 { font-size: 16px; margin: 36px 0 10px; }\n"
    "p.sub { margin: 4px 0 20px; color: var(--dim); }\n"
    ".tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 10px; }\n"
    ".tile, .card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }\n"
    ".tile { padding: 10px 14px; } .tile b { display: block; font-size: 20px; font-weight: 600; }\n"
    ".tile span { color: var(--dim); font-size: 13px; }\n"
    ".card { padding: 14px; margin-top: 10px; }\n"
    ".row { display: grid; grid-template-columns: repeat(auto-fit, minmax(260px, 1fr)); gap: 10px; }\n"
    "svg { display: block; width: 100%; height: auto; }\n"
    "svg text { fill: var(--dim); font: 12px system-ui, sans-serif; }\n"
    ".grid { stroke: var(--line); stroke-width: 1; } path { fill: none; stroke-linejoin: round; }\n"
    ".raw { stroke: var(--train); stroke-width: 1; opacity: 0.3; }\n"
    ".train { stroke: var(--train); stroke-width: 2; }\n"
    ".heldout { stroke: var(--heldout); stroke-width: 2; } circle { fill: var(--heldout); }\n"
    ".floor { stroke: var(--floor); stroke-width: 1.5; stroke-dasharray: 6 5; }\n"
    "svg text.train-label { fill: var(--train); } svg text.heldout-label { fill: var(--heldout); }\n"
    "svg text.floor-label { fill: var(--floor); }\n"
    ".sample { white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; }\n"
    ".sample b { font-weight: 600; } .sample + .dim, .dim { color: var(--dim); font-size: 13px; }\n"
    "table { border-collapse: collapse; width: 100%; } td { padding: 3px 8px; vertical-align: top;\n"
    "  border-bottom: 1px solid var(--line); overflow-wrap: anywhere; } tr:last-child td { border: 0; }\n"
    "td:first-child { color: var(--dim); width: 34%; }\n"
    "</style>\n";

/* ---- charts ---- */

/* A box of the drawing and the range of values it stands for. */
typedef struct Frame {
    double left, top, width, height;
    double x_high, y_low, y_high; /* x begins at 0 */
} Frame;

static double frame_x(const Frame *f, double x) {
    return f->left + x / f->x_high * f->width;
}

static double frame_y(const Frame *f, double y) {
    return f->top + (f->y_high - y) / (f->y_high - f->y_low) * f->height;
}

/* The distance of ticks, 1, 2 or 5 times a power of ten, that gives at most `most` of them. */
static double tick_step(double range, double most) {
    const double power = pow(10, floor(log10(range / most)));
    const double ratio = range / most / power;
    return power * (ratio <= 1 ? 1 : ratio <= 2 ? 2 : ratio <= 5 ? 5 : 10);
}

/* The frame must have a range: a curve of one value gets some room around it. */
static void frame_fit(Frame *f) {
    if (!(f->x_high > 0)) f->x_high = 1;
    double room = (f->y_high - f->y_low) * 0.06;
    if (!(room > 0)) room = f->y_low != 0 ? fabs(f->y_low) * 0.1 : 1;
    f->y_low -= room, f->y_high += room;
}

static void put_axes(Buffer *page, const Frame *f, double x_ticks, double y_ticks) {
    const double y_step = tick_step(f->y_high - f->y_low, y_ticks);
    const int decimals = y_step < 1 ? (int)ceil(-log10(y_step) - 1e-9) : 0;
    /* Counted by i: where the values are huge and close together, k + 1 may be no more than k. */
    for (int i = 0; i < 20 && (ceil(f->y_low / y_step) + i) * y_step <= f->y_high; i++) {
        const double value = (ceil(f->y_low / y_step) + i) * y_step, at = frame_y(f, value);
        put(page, "<line class=\"grid\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" y2=\"%.1f\"/>", f->left,
            f->left + f->width, at, at);
        put(page, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"end\">", f->left - 8, at + 4);
        if (decimals > 4 || y_step >= 1e5) put(page, "%.2g", value);
        else put(page, "%.*f", decimals, value + 0.0); /* + 0.0: no "-0" */
        put(page, "</text>\n");
    }
    double x_step = tick_step(f->x_high, x_ticks);
    if (x_step < 1) x_step = 1; /* steps are whole */
    for (int i = 0; i < 20 && i * x_step <= f->x_high; i++) {
        put(page, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">", frame_x(f, i * x_step),
            f->top + f->height + 20);
        put_whole(page, i * x_step);
        put(page, "</text>\n");
    }
}

static void put_curve(Buffer *page, const Frame *f, const Curve *curve, const char *css_class, size_t reach) {
    put(page, "<path class=\"%s\" d=\"", css_class);
    for (size_t i = 0; i < curve->used; i++)
        put(page, "%s%.1f %.1f", i ? "L" : "M", frame_x(f, bin_x(curve, i)),
            frame_y(f, reach ? smooth_y(curve, i, reach) : bin_y(curve, i)));
    put(page, "\"/>\n");
}

static void widen(double *low, double *high, double y) {
    if (!(*low <= y)) *low = y;
    if (!(*high >= y)) *high = y;
}

static void put_label(Buffer *page, const Frame *f, const Curve *curve, const char *css_class,
                      const char *name, double x) {
    put(page, "<text class=\"%s-label\" x=\"%.0f\" y=\"16\">%s", css_class, x, name);
    if (curve->used && curve->first > f->y_high) put(page, " (begins at %.2f, above)", curve->first);
    put(page, "</text>\n");
}

/* Training loss, held-out loss and the floor in one frame. A loss falls most of its way in the first steps;
 * so that the rest can be read, the frame's top is the highest loss after the first twentieth. */
static void put_loss_chart(Buffer *page, const Facts *facts) {
    const Curve *loss = &facts->loss, *heldout = &facts->heldout;
    const size_t reach = loss->used / 60;
    Frame f = {.left = 52, .top = 30, .width = 932, .height = 336, .y_low = NAN, .y_high = NAN};
    f.x_high = loss->used ? bin_x(loss, loss->used - 1) : 0;
    if (heldout->used) f.x_high = fmax(f.x_high, bin_x(heldout, heldout->used - 1));
    const double early = f.x_high / 20;
    for (size_t i = 0; i < loss->used; i++)
        if (bin_x(loss, i) >= early) widen(&f.y_low, &f.y_high, smooth_y(loss, i, reach));
    for (size_t i = 0; i < heldout->used; i++)
        if (bin_x(heldout, i) >= early) widen(&f.y_low, &f.y_high, bin_y(heldout, i));
    if (isfinite(facts->floor)) widen(&f.y_low, &f.y_high, facts->floor);
    frame_fit(&f);

    put(page, "<svg viewBox=\"0 0 1000 400\" role=\"img\" aria-label=\"loss by step\">\n");
    put(page,
        "<clipPath id=\"loss\"><rect x=\"%.0f\" y=\"%.0f\" width=\"%.0f\" height=\"%.0f\"/></clipPath>\n",
        f.left - 4, f.top, f.width + 10, f.height);
    put_axes(page, &f, 10, 8);
    put_label(page, &f, loss, "train", "training", f.left);
    put_label(page, &f, heldout, "heldout", "held-out", f.left + 230);
    if (isfinite(facts->floor))
        put(page, "<text class=\"floor-label\" x=\"%.0f\" y=\"16\">floor of this text, %.4f</text>\n",
            f.left + 470, facts->floor);
    put(page, "<text x=\"%.0f\" y=\"16\" text-anchor=\"end\">loss in nats per token, by step</text>\n",
        f.left + f.width);
    put(page, "<g clip-path=\"url(#loss)\">\n");
    put_curve(page, &f, loss, "raw", 0);
    put_curve(page, &f, loss, "train", reach);
    if (isfinite(facts->floor))
        put(page, "<line class=\"floor\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" y2=\"%.1f\"/>\n", f.left,
            f.left + f.width, frame_y(&f, facts->floor), frame_y(&f, facts->floor));
    put_curve(page, &f, heldout, "heldout", 0);
    for (size_t i = 0; i < heldout->used; i++)
        put(page, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"%s\"><title>step %.0f: %.4f</title></circle>\n",
            frame_x(&f, bin_x(heldout, i)), frame_y(&f, bin_y(heldout, i)), heldout->used > 80 ? "2" : "3.5",
            bin_x(heldout, i), bin_y(heldout, i));
    put(page, "</g>\n</svg>\n");
}

static void put_small_chart(Buffer *page, const char *title, const Curve *curve) {
    if (curve->used == 0) return;
    Frame f = {.left = 62, .top = 28, .width = 264, .height = 100}; /* from y = 0 */
    f.x_high = bin_x(curve, curve->used - 1);
    for (size_t i = 0; i < curve->used; i++) widen(&f.y_low, &f.y_high, bin_y(curve, i));
    frame_fit(&f);
    put(page, "<div class=\"card\"><svg viewBox=\"0 0 340 156\" role=\"img\" aria-label=\"%s by step\">\n",
        title);
    put_axes(page, &f, 4, 4);
    put(page, "<text x=\"8\" y=\"14\">%s</text>\n", title);
    put_curve(page, &f, curve, "train", 0);
    put(page, "</svg></div>\n");
}

/* ---- the page's parts ---- */

static void put_tile(Buffer *page, const char *label, double value, int decimals, const char *unit) {
    if (!isfinite(value)) return;
    put(page, "<div class=\"tile\"><b>");
    if (decimals > 0) put(page, "%.*f", decimals, value);
    else put_whole(page, value);
    put(page, "%s</b><span>%s</span></div>\n", unit, label);
}

static void put_tiles(Buffer *page, const Facts *facts) {
    put(page, "<div class=\"tiles\">\n");
    put_tile(page, "held-out loss", facts->heldout_loss, 4, "");
    if (facts->evaluated && !isfinite(facts->heldout_loss))
        put(page, "<div class=\"tile\"><b>not finite</b><span>held-out loss</span></div>\n");
    put_tile(page, "... above the floor", facts->heldout_loss - facts->floor, 4, "");
    put_tile(page, "lowest held-out loss", facts->best_loss, 4, "");
    put_tile(page, "... at step", facts->best_step, 0, "");
    put_tile(page, "held-out bits per byte", facts->bits_per_byte, 4, "");
    put_tile(page, "held-out tokens", facts->eval_tokens, 0, "");
    put_tile(page, "training loss, last step", facts->loss.used ? facts->loss.last : (double)NAN, 4, "");
    put_tile(page, "steps", facts->last_step, 0, "");
    put_tile(page, "tokens seen", facts->tokens, 0, "");
    put_tile(page, "tokens/s after the first step", facts->timed_tokens / facts->timed_ms * 1e3, 0, "");
    put_tile(page, "MFU", facts->mfu * 100, 1, " %");
    put_tile(page, "peak memory", number(facts->end, "peak_memory_bytes") / 1e6, 0, " MB");
    put(page, "</div>\n");
}

static void put_heading(Buffer *page, const char *run_path, const Facts *facts) {
    char *name = xstrdup(run_path);
    for (size_t size = strlen(name); size > 1 && name[size - 1] == '/'; size--) name[size - 1] = 0;
    const char *slash = strrchr(name, '/'), *last = slash && slash[1] ? slash + 1 : name;
    json_t *shown = run_text(last, strlen(last)); /* a file name may be any bytes */
    put(page, "<title>");
    put_json_text(page, shown);
    put(page, "</title>\n</head>\n<body>\n<h1>");
    put_json_text(page, shown);
    put(page, "</h1>\n<p class=\"sub\">train_gpt");
    json_decref(shown);
    free(name);

    const json_t *version = json_object_get(facts->start, "version");
    const json_t *kernel = json_object_get(json_object_get(facts->start, "attention"), "kernel");
    const json_t *reason = json_object_get(facts->end, "reason");
    const double started = number(facts->start, "time");
    if (json_is_string(version)) {
        put(page, " ");
        put_json_text(page, version);
    }
    if (json_is_string(kernel)) {
        put(page, " &middot; attention ");
        put_json_text(page, kernel);
    }
    if (started >= 0 && started < 1e11) { /* seconds since 1970; past the year 5000 it is no date */
        const time_t seconds = (time_t)started;
        struct tm parts;
        char date[64];
        strftime(date, sizeof date, "%Y-%m-%d %H:%M", localtime_r(&seconds, &parts));
        put(page, " &middot; started %s", date);
    }
    if (json_is_string(reason)) {
        put(page, " &middot; ended: ");
        put_json_text(page, reason);
    }
    put(page, "</p>\n");
}

static void put_samples(Buffer *page, const Facts *facts) {
    if (facts->sample_count == 0) return;
    put(page, "<h2>Newest samples</h2>\n");
    const size_t shown = facts->sample_count < NEWEST_SAMPLES ? facts->sample_count : NEWEST_SAMPLES;
    for (size_t i = 0; i < shown; i++) {
        const json_t *sample = facts->samples[(facts->sample_count - 1 - i) % NEWEST_SAMPLES];
        const json_t *prompt = json_object_get(sample, "prompt"), *text = json_object_get(sample, "text");
        put(page, "<div class=\"card\"><div class=\"dim\">step ");
        put_whole(page, number(sample, "step"));
        put(page, "</div><div class=\"sample\">");
        const size_t prompt_size = json_is_string(prompt) ? json_string_length(prompt) : 0;
        const char *bytes = json_is_string(text) ? json_string_value(text) : "";
        size_t size = json_is_string(text) ? json_string_length(text) : 0;
        if (prompt_size > 0) {
            put(page, "<b>");
            put_json_text(page, prompt);
            put(page, "</b>");
            /* A sample's text begins with its prompt, unless someone else wrote the log. */
            if (size >= prompt_size && memcmp(bytes, json_string_value(prompt), prompt_size) == 0)
                bytes += prompt_size, size -= prompt_size;
        }
        put_text(page, bytes, size);
        put(page, "</div></div>\n");
    }
}

/* What run.json holds for the program alone: which data it was, what it chose itself. */
static bool is_internal(const char *name) {
    static const char *const internal[] = {"train_identity", "heldout_identity", "chosen"};
    for (size_t i = 0; i < sizeof internal / sizeof internal[0]; i++)
        if (strcmp(name, internal[i]) == 0) return true;
    return false;
}

/* One row for each setting that has a value; those inside another are named outer.inner. */
static void put_settings(Buffer *page, const char *prefix, const json_t *settings) {
    const char *name;
    json_t *value;
    json_object_foreach((json_t *)settings, name, value) {
        if (json_is_null(value) || is_internal(name)) continue;
        char *full = xformat("%s%s%s", prefix, *prefix ? "." : "", name);
        if (json_is_object(value) && json_object_size(value) > 0) {
            put_settings(page, full, value);
        } else {
            put(page, "<tr><td>");
            put_text(page, full, strlen(full));
            put(page, "</td><td>");
            if (json_is_string(value)) {
                put_json_text(page, value);
            } else {
                char *text = json_dumps(value, JSON_COMPACT | JSON_ENCODE_ANY | JSON_REAL_PRECISION(6));
                put_text(page, text ? text : "", text ? strlen(text) : 0);
                free(text);
            }
            put(page, "</td></tr>\n");
        }
        free(full);
    }
}

bool report_write(const char *run_path, Error *err) {
    json_t *settings = run_read_settings(run_path, err);
    if (!settings) return false;
    Facts *facts = (Facts *)xcalloc(1, sizeof *facts);
    facts->last_step = facts->tokens = facts->mfu = facts->best_loss = facts->best_step = NAN;
    facts->bits_per_byte = facts->eval_tokens = facts->floor = facts->heldout_loss = NAN;
    bool ok = run_log_each(run_path, take_row, facts, err);
    if (ok) {
        Buffer page = {0};
        buffer_append_text(&page, page_head);
        put_heading(&page, run_path, facts);
        put_tiles(&page, facts);
        if (facts->loss.used || facts->heldout.used) {
            put(&page, "<h2>Loss</h2>\n<div class=\"card\">");
            put_loss_chart(&page, facts);
            put(&page, "</div>\n<div class=\"row\">\n");
            put_small_chart(&page, "learning rate", &facts->lr);
            put_small_chart(&page, "gradient norm", &facts->grad_norm);
            put_small_chart(&page, "tokens per second", &facts->tokens_per_s);
            put(&page, "</div>\n");
        }
        put_samples(&page, facts);
        put(&page, "<h2>Settings</h2>\n<div class=\"card\"><table>\n");
        put_settings(&page, "", settings);
        put(&page, "</table></div>\n</body>\n</html>\n");
        char *path = xformat("%s/report.html", run_path);
        ok = file_replace(path, page.data, page.size, err);
        free(path);
        buffer_free(&page);
    }
    for (size_t i = 0; i < NEWEST_SAMPLES; i++) json_decref(facts->samples[i]);
    json_decref(facts->start);
    json_decref(facts->end);
    free(facts);
    json_decref(settings);
    return ok;
}
