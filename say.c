/* say.c - text for people: numbers, paths and names as they are read, lines and tables of the report, notes.
 *
 * What a run says goes to app->report, what went wrong to stderr. On a terminal a step's line stands unfinished
 * until the next one; whoever says anything else finishes it first. */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <string.h>

#include "app.h"

Short commas(uint64_t number) {
    char digits[24];
    const int size = snprintf(digits, sizeof digits, "%" PRIu64, number);
    Short out;
    char *to = out.text;
    for (int i = 0; i < size; i++) {
        if (i > 0 && (size - i) % 3 == 0) *to++ = ',';
        *to++ = digits[i];
    }
    *to = 0;
    return out;
}

/* 1234567 with unit "B" is "1.23 MB". */
Short metric(double value, const char *unit) {
    static const char *const prefix[] = {"", "k", "M", "G", "T", "P", "E"};
    size_t i = 0;
    while (value >= 999.5 && i + 1 < sizeof prefix / sizeof prefix[0]) value /= 1000, i++;
    Short out;
    const int decimals = i == 0 || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
    snprintf(out.text, sizeof out.text, "%.*f%s%s%s", decimals, value, *prefix[i] || *unit ? " " : "",
             prefix[i], unit);
    return out;
}

/* "1 story", "1,024 stories" */
Short counted(uint64_t number, const char *one, const char *many) {
    Short out;
    snprintf(out.text, sizeof out.text, "%.30s %s", commas(number).text, number == 1 ? one : many);
    return out;
}

Short duration(double seconds) {
    Short out = {"?"};
    if (!isfinite(seconds)) return out;
    const uint64_t s = seconds > 0 && seconds < 1e15 ? (uint64_t)(seconds + 0.5) : 0;
    if (s < 60) snprintf(out.text, sizeof out.text, "%" PRIu64 " s", s);
    else if (s < 3600) snprintf(out.text, sizeof out.text, "%" PRIu64 " min %02" PRIu64 " s", s / 60, s % 60);
    else snprintf(out.text, sizeof out.text, "%" PRIu64 " h %02" PRIu64 " min", s / 3600, s / 60 % 60);
    return out;
}

const char *signal_name(int number) {
    return number == SIGINT ? "SIGINT" : number == SIGTERM ? "SIGTERM" : "SIGUSR1";
}

/* A path as a shell takes it: in quotes only where it must be. To be freed. */
char *shell_quoted(const char *path) {
    if (!path[strspn(path, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_./+,@%-")])
        return xstrdup(path);
    Buffer quoted = {0};
    buffer_append_text(&quoted, "'");
    for (; *path; path++) {
        if (*path == '\'') buffer_append_text(&quoted, "'\\''");
        else buffer_append(&quoted, path, 1);
    }
    buffer_append(&quoted, "'", 2);
    return (char *)quoted.data;
}

/* How many bytes of the text can be shown: all but a UTF-8 character at the end that is not whole yet. Bytes
 * that are no UTF-8 at all are shown as they are. */
size_t utf8_whole(const uint8_t *text, size_t size) {
    for (size_t back = 1; back <= 3 && back <= size; back++) {
        const uint8_t byte = text[size - back];
        if ((byte & 0xC0) == 0x80) continue; /* a following byte: its first one stands further left */
        const size_t length = byte >= 0xF0 && byte < 0xF8 ? 4 : byte >= 0xE0 ? 3 : byte >= 0xC0 ? 2 : 1;
        return byte < 0xF8 && length > back ? size - back : size;
    }
    return size;
}

/* Whether this rank prints and writes. */
bool leads(const App *app) {
    return app->ranks.rank == 0;
}

/* Ends a line that is being rewritten, so that something else can be said. */
void finish_line(App *app) {
    if (app->line_open) fprintf(app->report, "\r\033[K");
    app->line_open = false;
}

void say(App *app, const char *format, ...) {
    finish_line(app);
    va_list arguments;
    va_start(arguments, format);
    vfprintf(app->report, format, arguments);
    va_end(arguments);
    fputc('\n', app->report);
    fflush(app->report);
}

/* Something that went wrong and does not end the run. */
void note(App *app, const char *format, ...) {
    if (!leads(app)) return;
    finish_line(app);
    fflush(app->report);
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "train_gpt: note: ");
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
}

void row(App *app, const char *name, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(app->report, "  %-14s", name);
    vfprintf(app->report, format, arguments);
    va_end(arguments);
    fputc('\n', app->report);
}

/* What could not be written is an error, except that the reader of a pipe went away: then there is nobody to
 * tell, and the exit code alone says it. */
bool flush_output(App *app, FILE *out) {
    if (fflush(out) == 0 && !ferror(out)) return true;
    if (errno == EPIPE) app->err.text[0] = 0;
    else error_set(&app->err, "cannot write to stdout: %s; make room or send it elsewhere", strerror(errno));
    app->code = EXIT_FAILED;
    return false;
}
