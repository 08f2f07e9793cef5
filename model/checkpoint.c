/* checkpoint.c - what checkpoint.h promises, in this order: writing safetensors, reading them, config.json,
 * state.json, a whole checkpoint, and the folders of a run.
 *
 * safetensors: 8 bytes little-endian N; N bytes of JSON, {"name": {"dtype", "shape", "data_offsets": [begin,
 * end]}, ...}, padded with spaces; then the tensors' bytes, back to back, offsets counted from there. Tensors
 * go between disk and model one at a time, so that a model is never in memory twice. */
#include "checkpoint.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "safetensors hold little-endian numbers");

enum {
    HEADER_ALIGN = 64,             /* tensors' bytes begin on a multiple of this, for readers that map them */
    HEADER_MAX = 100000000,        /* the format's own limit */
    HEADER_ENTRY_BYTES = 256,      /* a tensor's entry in the header at most: the name has 64 */
    SMALL_FILES_BYTES = 64 * 1024, /* config.json, state.json, MANIFEST, and what file systems round up */
    JSON_FILE_MAX = 1 << 20,
    BLOCK_ELEMENTS = 64 * 1024, /* read at a time */
    FIND_TRIES = 20             /* while checkpoints come and go */
};

static const char weights_name[] = "model.safetensors", optimizer_name[] = "optimizer.safetensors";
static const char config_name[] = "config.json", state_name[] = "state.json";

/* A file holds one or more of a model's buffers, each tensor under its name with the buffer's prefix. */
typedef struct FilePart {
    const char *prefix;
    GptBuffer buffer;
} FilePart;

static const FilePart weights_parts[] = {{"", GPT_WEIGHTS}};
static const FilePart optimizer_parts[] = {{"m.", GPT_ADAM_M}, {"v.", GPT_ADAM_V}};
enum { WEIGHTS_PARTS = 1, OPTIMIZER_PARTS = 2 };

/* A value as JSON, for messages; to be freed. */
static char *json_text(const json_t *value) {
    char *text = value ? json_dumps(value, JSON_COMPACT | JSON_ENCODE_ANY) : NULL;
    return text ? text : xstrdup("missing");
}

/* ==== writing safetensors ==== */

/* The 8 bytes of length and the header, as they stand in the file. */
static void build_header(const Parameter *table, size_t count, const FilePart *parts, size_t n_parts,
                         Buffer *out) {
    json_t *header = json_pack("{s:{s:s}}", "__metadata__", "format", "pt"); /* some readers insist on it */
    json_int_t offset = 0;
    for (size_t part = 0; part < n_parts; part++) {
        for (size_t i = 0; i < count; i++) {
            json_t *shape = json_array();
            for (size_t d = 0; d < table[i].dims; d++)
                json_array_append_new(shape, json_integer((json_int_t)table[i].shape[d]));
            const json_int_t end = offset + (json_int_t)(table[i].size * sizeof(float));
            char *name = xformat("%s%s", parts[part].prefix, table[i].name);
            json_object_set_new(header, name,
                                json_pack("{s:s, s:o, s:[I, I]}", "dtype", "F32", "shape", shape,
                                          "data_offsets", offset, end));
            free(name);
            offset = end;
        }
    }
    char *text = json_dumps(header, JSON_COMPACT);
    const size_t length = strlen(text), all = sizeof(uint64_t) + length;
    const size_t padded = (all + HEADER_ALIGN - 1) / HEADER_ALIGN * HEADER_ALIGN;
    const uint64_t n = padded - sizeof(uint64_t);
    buffer_append(out, &n, sizeof n);
    buffer_append(out, text, length);
    for (size_t i = all; i < padded; i++) buffer_append(out, " ", 1);
    free(text);
    json_decref(header);
}

/* Floats of the largest tensor: what one at a time needs. */
static size_t largest_tensor(const Parameter *table, size_t count) {
    size_t largest = 1;
    for (size_t i = 0; i < count; i++)
        if (table[i].size > largest) largest = table[i].size;
    return largest;
}

/* The first number that is not finite; count: none. */
static size_t first_not_finite(const float *host, size_t count) {
    size_t i = 0;
    while (i < count && isfinite(host[i])) i++;
    return i;
}

static bool write_tensors(FolderWrite *folder, const char *name, Gpt *gpt, const FilePart *parts,
                          size_t n_parts, Error *err) {
    size_t count;
    const Parameter *table = gpt_table(gpt, &count);
    Buffer header = {0};
    build_header(table, count, parts, n_parts, &header);
    float *host = xmalloc(largest_tensor(table, count) * sizeof *host);
    bool done = folder_write_open(folder, name, err) &&
                folder_write_bytes(folder, header.data, header.size, err);
    for (size_t part = 0; part < n_parts; part++) {
        for (size_t i = 0; i < count && done; i++) {
            gpt_get(gpt, parts[part].buffer, i, host);
            const size_t bad = first_not_finite(host, table[i].size);
            done = bad == table[i].size
                       ? folder_write_bytes(folder, host, table[i].size * sizeof *host, err)
                       : error_set(err, "the model is not saved: number %zu of tensor %s%s is %f, not finite",
                                   bad, parts[part].prefix, table[i].name, (double)host[bad]);
        }
    }
    free(host);
    buffer_free(&header);
    return done && folder_write_close(folder, err);
}

/* ==== reading safetensors ==== */

typedef struct Dtype {
    const char *name;
    size_t bytes;
} Dtype;

/* The format's types. Numbers are taken from the first three; of the others, which GPT-2's unused buffers
 * may have, only the size matters. */
enum { DTYPE_F32, DTYPE_F16, DTYPE_BF16, DTYPES_READ };
static const Dtype dtypes[] = {
    [DTYPE_F32] = {"F32", 4},
    [DTYPE_F16] = {"F16", 2},
    [DTYPE_BF16] = {"BF16", 2},
    {"F64", 8},
    {"I64", 8},
    {"U64", 8},
    {"I32", 4},
    {"U32", 4},
    {"I16", 2},
    {"U16", 2},
    {"I8", 1},
    {"U8", 1},
    {"BOOL", 1},
    {"F8_E4M3", 1},
    {"F8_E5M2", 1},
};

typedef struct Tensor {
    const char *name;    /* as the model's table has it: without "transformer." */
    const char *in_file; /* as the file has it */
    const json_t *shape; /* an array of integers >= 0 */
    size_t dtype;        /* index into dtypes */
    uint64_t begin, end; /* bytes, from the end of the header */
    bool used;
} Tensor;

typedef struct TensorFile {
    char *path;
    int fd;
    uint64_t data_start;
    json_t *header; /* owns the names and shapes */
    Tensor *tensors;
    size_t count;
} TensorFile;

static void tensor_file_close(TensorFile *file) {
    if (file->fd >= 0) close(file->fd);
    json_decref(file->header);
    free(file->tensors);
    free(file->path);
}

/* False with errno where the bytes cannot be read. The file was long enough when it was opened: one that has
 * become shorter is reported as EIO. */
static bool read_at(int fd, void *bytes, size_t size, uint64_t offset) {
    for (size_t done = 0; done < size;) {
        const ssize_t got = pread(fd, (char *)bytes + done, size - done, (off_t)(offset + done));
        if (got > 0) {
            done += (size_t)got;
        } else if (got == 0 || errno != EINTR) {
            if (got == 0) errno = EIO;
            return false;
        }
    }
    return true;
}

/* One entry of the header, from its JSON: dtype, shape and offsets, and that these agree. */
static bool parse_tensor(const char *path, const char *name, const json_t *entry, Tensor *tensor,
                         Error *err) {
    const char *dtype = json_string_value(json_object_get(entry, "dtype"));
    const json_t *shape = json_object_get(entry, "shape"), *offsets = json_object_get(entry, "data_offsets");
    const json_t *begin = json_array_get(offsets, 0), *end = json_array_get(offsets, 1);
    if (!dtype || !json_is_array(shape) || json_array_size(offsets) != 2 || !json_is_integer(begin) ||
        !json_is_integer(end) || json_integer_value(begin) < 0 ||
        json_integer_value(end) < json_integer_value(begin))
        return error_set(err,
                         "%s: the header's entry for %s is not a tensor's: expected dtype, shape and "
                         "data_offsets [begin, end]; take another copy of the file",
                         path, name);
    *tensor = (Tensor){.name = name,
                       .in_file = name,
                       .shape = shape,
                       .begin = (uint64_t)json_integer_value(begin),
                       .end = (uint64_t)json_integer_value(end)};
    const size_t n_dtypes = sizeof dtypes / sizeof dtypes[0];
    while (tensor->dtype < n_dtypes && strcmp(dtypes[tensor->dtype].name, dtype) != 0) tensor->dtype++;
    if (tensor->dtype == n_dtypes)
        return error_set(err, "%s: tensor %s has the unknown dtype \"%.40s\"; save it as F32, F16 or BF16",
                         path, name, dtype);

    size_t bytes = dtypes[tensor->dtype].bytes; /* SIZE_MAX, which no span reaches, where it overflows */
    for (size_t d = 0; d < json_array_size(shape); d++) {
        const json_t *size = json_array_get(shape, d);
        if (!json_is_integer(size) || json_integer_value(size) < 0)
            return error_set(
                err, "%s: the shape of tensor %s is not a list of sizes; take another copy of the file", path,
                name);
        (void)size_mul(bytes, (size_t)json_integer_value(size), &bytes);
    }
    if (tensor->end - tensor->begin != bytes)
        return error_set(
            err,
            "%s: tensor %s spans %" PRIu64 " bytes, but its shape and dtype need %s%zu; take another "
            "copy of the file",
            path, name, tensor->end - tensor->begin, bytes == SIZE_MAX ? "at least " : "", bytes);
    return true;
}

static int compare_offsets(const void *a, const void *b) {
    const Tensor *x = a, *y = b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return (x->end > y->end) - (x->end < y->end);
}

static int compare_tensor_names(const void *a, const void *b) {
    return strcmp(((const Tensor *)a)->name, ((const Tensor *)b)->name);
}

/* All entries, and that the tensors lie back to back and fill the data exactly. */
static bool parse_tensors(TensorFile *file, uint64_t data_bytes, Error *err) {
    file->tensors = xcalloc(json_object_size(file->header), sizeof *file->tensors);
    const char *name;
    json_t *entry;
    json_object_foreach(file->header, name, entry) {
        if (strcmp(name, "__metadata__") == 0) continue; /* notes: nothing that matters here */
        if (!parse_tensor(file->path, name, entry, &file->tensors[file->count++], err)) return false;
    }
    if (file->count) qsort(file->tensors, file->count, sizeof *file->tensors, compare_offsets);
    uint64_t expected = 0;
    for (size_t i = 0; i < file->count; i++) {
        const Tensor *tensor = &file->tensors[i];
        if (tensor->begin != expected)
            return error_set(err,
                             "%s: tensor %s begins at byte %" PRIu64 " of the data, expected %" PRIu64
                             ", where the one before it ends; take another copy of the file",
                             file->path, tensor->name, tensor->begin, expected);
        expected = tensor->end;
    }
    if (expected != data_bytes)
        return error_set(err,
                         "%s is cut or damaged: its tensors need %" PRIu64 " bytes of data, found %" PRIu64
                         "; take another copy of the file",
                         file->path, expected, data_bytes);
    return true;
}

static bool read_header(TensorFile *file, uint64_t file_bytes, Error *err) {
    uint64_t n = 0;
    if (file_bytes < sizeof n)
        return error_set(err,
                         "%s has %" PRIu64 " bytes: too few for a safetensors file; take another copy of it",
                         file->path, file_bytes);
    if (!read_at(file->fd, &n, sizeof n, 0))
        return error_set(err, "cannot read %s: %s; check the disk", file->path, strerror(errno));
    if (n < 2 || n > HEADER_MAX || n > file_bytes - sizeof n)
        return error_set(err,
                         "%s is no whole safetensors file: its header would have %" PRIu64
                         " bytes, of %" PRIu64 " in the file and %d allowed; take another copy of it",
                         file->path, n, file_bytes, HEADER_MAX);
    char *text = xmalloc((size_t)n);
    bool done = read_at(file->fd, text, (size_t)n, sizeof n);
    if (!done) {
        error_set(err, "cannot read %s: %s; check the disk", file->path, strerror(errno));
    } else {
        json_error_t reason;
        file->header = text[0] == '{' ? json_loadb(text, (size_t)n, JSON_REJECT_DUPLICATES, &reason) : NULL;
        done = file->header != NULL;
        if (!done)
            error_set(err, "%s: its header is not a JSON object (%s); take another copy of the file",
                      file->path, text[0] == '{' ? reason.text : "it does not begin with {");
    }
    free(text);
    file->data_start = sizeof n + n;
    return done && parse_tensors(file, file_bytes - file->data_start, err);
}

/* Opens folder/name and checks its header as such; what the model needs is compared later. */
static bool tensor_file_open(TensorFile *file, const char *folder, const char *name, Error *err) {
    *file = (TensorFile){.path = xformat("%s/%s", folder, name)};
    /* O_NONBLOCK: opening a pipe would otherwise wait for a writer. */
    file->fd = open(file->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat status;
    if (file->fd < 0 || fstat(file->fd, &status) != 0)
        return error_set(err, "cannot open %s: %s; a model folder holds %s and %s", file->path,
                         strerror(errno), config_name, weights_name);
    if (!S_ISREG(status.st_mode)) return error_set(err, "%s is not a regular file", file->path);
    return read_header(file, (uint64_t)status.st_size, err);
}

/* Tensors that GPT-2 files hold besides the parameters: the causal mask, as old ones have it, and a copy of
 * wte, to which the head is tied. */
static bool is_known_buffer(const char *name) {
    if (strcmp(name, "lm_head.weight") == 0) return true;
    if (strncmp(name, "h.", 2) != 0) return false;
    const size_t digits = strspn(name + 2, "0123456789");
    const char *rest = name + 2 + digits;
    return digits > 0 && (strcmp(rest, ".attn.bias") == 0 || strcmp(rest, ".attn.masked_bias") == 0);
}

static bool same_shape(const json_t *shape, const Parameter *parameter) {
    if (json_array_size(shape) != parameter->dims) return false;
    for (size_t d = 0; d < parameter->dims; d++)
        if ((size_t)json_integer_value(json_array_get(shape, d)) != parameter->shape[d]) return false;
    return true;
}

static bool misshapen(const TensorFile *file, const Tensor *tensor, const Parameter *parameter, Error *err) {
    char *found = json_text(tensor->shape), expected[64];
    snprintf(expected, sizeof expected, parameter->dims == 2 ? "[%zu,%zu]" : "[%zu]", parameter->shape[0],
             parameter->shape[1]);
    error_set(err,
              "%s: tensor %s has shape %.60s, expected %s; its config.json or the run's settings are another "
              "model's",
              file->path, tensor->in_file, found, expected);
    free(found);
    return false;
}

/* Every parameter of every part is there once, in a type and shape that can be read, and nothing else is.
 * found: (n_parts, count), the tensor of each. */
static bool match_tensors(TensorFile *file, const Parameter *table, size_t count, const FilePart *parts,
                          size_t n_parts, const Tensor **found, Error *err) {
    static const char prefix[] = "transformer."; /* what saving GPT-2 with its head puts before the names */
    for (size_t i = 0; i < file->count; i++)
        if (strncmp(file->tensors[i].name, prefix, sizeof prefix - 1) == 0)
            file->tensors[i].name += sizeof prefix - 1;
    if (file->count) qsort(file->tensors, file->count, sizeof *file->tensors, compare_tensor_names);
    for (size_t i = 1; i < file->count; i++)
        if (strcmp(file->tensors[i - 1].name, file->tensors[i].name) == 0)
            return error_set(err, "%s: tensor %s is there twice, once as %s; remove one", file->path,
                             file->tensors[i].name, file->tensors[i].in_file);
    for (size_t part = 0; part < n_parts; part++) {
        for (size_t i = 0; i < count; i++) {
            char *name = xformat("%s%s", parts[part].prefix, table[i].name);
            const Tensor key = {.name = name};
            Tensor *tensor = NULL;
            if (file->count)
                tensor = bsearch(&key, file->tensors, file->count, sizeof key, compare_tensor_names);
            bool fits = tensor != NULL;
            if (!fits)
                error_set(
                    err,
                    "%s: tensor %s is missing; its config.json or the run's settings are another model's",
                    file->path, name);
            free(name);
            if (fits && !same_shape(tensor->shape, &table[i])) fits = misshapen(file, tensor, &table[i], err);
            if (fits && tensor->dtype >= DTYPES_READ)
                fits = error_set(err,
                                 "%s: tensor %s has dtype %s, expected F32, F16 or BF16; convert the file",
                                 file->path, tensor->in_file, dtypes[tensor->dtype].name);
            if (!fits) return false;
            tensor->used = true;
            found[part * count + i] = tensor;
        }
    }
    for (size_t i = 0; i < file->count; i++)
        if (!file->tensors[i].used && !is_known_buffer(file->tensors[i].name))
            return error_set(
                err,
                "%s: tensor %s is no part of this model; its config.json or the run's settings are "
                "another model's",
                file->path, file->tensors[i].in_file);
    return true;
}

static float float_from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* IEEE 754 binary16: 1 bit sign, 5 exponent (bias 15), 10 fraction. Exact: every one of them is a float. */
static float float_from_f16(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000u) << 16, exponent = (half >> 10) & 0x1Fu;
    const uint32_t fraction = half & 0x3FFu;
    if (exponent == 0) { /* zero and subnormals: fraction * 2^-24 */
        const float value = (float)fraction * 0x1p-24f;
        return sign ? -value : value;
    }
    const uint32_t wide = exponent == 31 ? 255 : exponent + (127 - 15); /* inf and NaN stay so */
    return float_from_bits(sign | wide << 23 | fraction << 13);
}

static void convert(float *to, const void *from, size_t count, size_t dtype) {
    if (dtype == DTYPE_F32) {
        memcpy(to, from, count * sizeof *to);
        return;
    }
    const uint16_t *bits = from;
    for (size_t i = 0; i < count; i++)
        to[i] = dtype == DTYPE_F16 ? float_from_f16(bits[i]) : float_from_bits((uint32_t)bits[i] << 16);
}

/* One tensor's numbers as floats. block: BLOCK_ELEMENTS of the widest type. */
static bool read_tensor(const TensorFile *file, const Tensor *tensor, float *host, size_t count, void *block,
                        Error *err) {
    const size_t bytes = dtypes[tensor->dtype].bytes;
    for (size_t first = 0, n; first < count; first += n) {
        n = count - first < BLOCK_ELEMENTS ? count - first : BLOCK_ELEMENTS;
        if (!read_at(file->fd, block, n * bytes, file->data_start + tensor->begin + first * bytes))
            return error_set(err, "cannot read tensor %s of %s: %s; check the disk", tensor->in_file,
                             file->path, strerror(errno));
        convert(host + first, block, n, tensor->dtype);
    }
    const size_t bad = first_not_finite(host, count);
    if (bad == count) return true;
    return error_set(err,
                     "number %zu of tensor %s of %s is %f, expected a finite one; take another checkpoint, "
                     "or remove this one so that the one before it is taken",
                     bad, tensor->in_file, file->path, (double)host[bad]);
}

/* A file that has passed every check, ready to be read. */
typedef struct TensorSource {
    TensorFile file;
    const FilePart *parts;
    size_t n_parts;
    const Tensor **found; /* (n_parts, parameters) */
} TensorSource;

static void source_close(TensorSource *source) {
    tensor_file_close(&source->file);
    free(source->found);
}

static bool source_open(TensorSource *source, const char *folder, const char *name, Gpt *gpt,
                        const FilePart *parts, size_t n_parts, Error *err) {
    size_t count;
    const Parameter *table = gpt_table(gpt, &count);
    *source = (TensorSource){
        .parts = parts, .n_parts = n_parts, .found = xcalloc(n_parts * count, sizeof(Tensor *))};
    return tensor_file_open(&source->file, folder, name, err) &&
           match_tensors(&source->file, table, count, parts, n_parts, source->found, err);
}

static bool source_read(const TensorSource *source, Gpt *gpt, Error *err) {
    size_t count;
    const Parameter *table = gpt_table(gpt, &count);
    float *host = xmalloc(largest_tensor(table, count) * sizeof *host);
    void *block = xmalloc(BLOCK_ELEMENTS * sizeof(float));
    bool done = true;
    for (size_t part = 0; part < source->n_parts; part++) {
        for (size_t i = 0; i < count && done; i++) {
            done = read_tensor(&source->file, source->found[part * count + i], host, table[i].size, block,
                               err);
            if (done) gpt_set(gpt, source->parts[part].buffer, i, host);
        }
    }
    free(block);
    free(host);
    return done;
}

/* ==== JSON files ==== */

/* Reads folder/name, which must hold an object; a new reference. */
static json_t *read_object(const char *folder, const char *name, Error *err) {
    char *path = xformat("%s/%s", folder, name);
    Buffer text = {0};
    json_t *object = NULL;
    if (file_read(path, JSON_FILE_MAX, &text, err)) {
        json_error_t reason;
        object = json_loadb((const char *)text.data, text.size, JSON_REJECT_DUPLICATES, &reason);
        if (text.size == 0) { /* for which jansson has no words */
            error_set(err, "%s is empty: expected a JSON object; take another copy of the file", path);
        } else if (!object) {
            error_set(err, "%s, line %d: %s; take another copy of the file", path, reason.line, reason.text);
        } else if (!json_is_object(object)) {
            error_set(err, "%s does not hold a JSON object; take another copy of the file", path);
            json_decref(object);
            object = NULL;
        }
    }
    buffer_free(&text);
    free(path);
    return object;
}

/* Writes an object, its real numbers with so many digits, and drops the reference. */
static bool write_object(FolderWrite *folder, const char *name, json_t *object, size_t digits, Error *err) {
    char *text = json_dumps(object, JSON_INDENT(2) | JSON_REAL_PRECISION(digits));
    json_decref(object);
    if (!text) return error_set(err, "cannot write %s: it does not go into JSON", name);
    char *line = xformat("%s\n", text);
    const bool done = folder_write_file(folder, name, line, strlen(line), err);
    free(line);
    free(text);
    return done;
}

/* What a field is and what was expected, with what to do; false. */
static bool field_error(const char *folder, const char *file, const char *key, const json_t *value,
                        const char *expected, Error *err) {
    char *found = json_text(value);
    error_set(err, "%s/%s: %s is %.60s, expected %s", folder, file, key, found, expected);
    free(found);
    return false;
}

/* A required whole number: of 0 or more, or of 1 or more where it must be positive. */
static bool get_count(const json_t *object, const char *folder, const char *file, const char *key,
                      bool positive, uint64_t *value, Error *err) {
    const json_t *number = json_object_get(object, key);
    if (!json_is_integer(number) || json_integer_value(number) < positive)
        return field_error(folder, file, key, number,
                           positive ? "a whole number of at least 1; take another copy of the file"
                                    : "a whole number of at least 0; take another copy of the file",
                           err);
    *value = (uint64_t)json_integer_value(number);
    return true;
}

/* ==== config.json ==== */

static const char model_type_gpt2[] = "gpt2", model_type_rotary[] = "train_gpt_rotary";
static const double norm_epsilon = 1e-5;

/* The shortest decimal that is the same float: 0.1, where the float as a double is 0.10000000149. */
static double shortest_decimal(float value) {
    char text[32];
    for (int digits = 1; digits <= 9; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, (double)value);
        if (strtof(text, NULL) == value) break;
    }
    return strtod(text, NULL);
}

static json_t *config_to_json(const GptConfig *config) {
    const bool gpt2 = config->position == POSITION_LEARNED;
    json_t *object = json_object();
    json_object_set_new(object, "architectures",
                        json_pack("[s]", gpt2 ? "GPT2LMHeadModel" : "TrainGptRotary"));
    json_object_set_new(object, "model_type", json_string(gpt2 ? model_type_gpt2 : model_type_rotary));
    json_object_set_new(object, "n_layer", json_integer((json_int_t)config->layers));
    json_object_set_new(object, "n_head", json_integer((json_int_t)config->heads));
    json_object_set_new(object, "n_embd", json_integer((json_int_t)config->channels));
    json_object_set_new(object, "n_inner", json_null()); /* 4 n_embd */
    json_object_set_new(object, "n_positions", json_integer((json_int_t)config->ctx));
    json_object_set_new(object, "n_ctx", json_integer((json_int_t)config->ctx));
    json_object_set_new(object, "vocab_size", json_integer((json_int_t)config->vocab));
    json_object_set_new(object, "bos_token_id", json_integer((json_int_t)config->vocab - 1));
    json_object_set_new(object, "eos_token_id", json_integer((json_int_t)config->vocab - 1));
    json_object_set_new(object, "activation_function", json_string("gelu_new"));
    json_object_set_new(object, "layer_norm_epsilon", json_real(norm_epsilon));
    json_object_set_new(object, "tie_word_embeddings", json_true());
    json_object_set_new(object, "embd_pdrop", json_real(shortest_decimal(config->dropout)));
    json_object_set_new(object, "resid_pdrop", json_real(shortest_decimal(config->dropout)));
    json_object_set_new(object, "attn_pdrop", json_real(0)); /* attention's probabilities are never dropped */
    json_object_set_new(object, "torch_dtype", json_string("float32"));
    return object;
}

/* What this program computes in one way only: a model that was trained in another is refused. */
static bool check_fixed(const json_t *object, const char *folder, size_t channels, Error *err) {
    /* What Hugging Face assumes where a field is missing is what is computed here. */
    static const struct {
        const char *key;
        bool value;
    } switches[] = {
        {"tie_word_embeddings", true},
        {"scale_attn_weights", true},
        {"scale_attn_by_inverse_layer_idx", false},
        {"add_cross_attention", false},
    };
    for (size_t i = 0; i < sizeof switches / sizeof switches[0]; i++) {
        const json_t *value = json_object_get(object, switches[i].key);
        if (value && (!json_is_boolean(value) || json_is_true(value) != switches[i].value))
            return field_error(
                folder, config_name, switches[i].key, value,
                switches[i].value ? "true; choose another model" : "false; choose another model", err);
    }
    const json_t *activation = json_object_get(object, "activation_function");
    const char *name = json_string_value(activation);
    /* Two names of GELU's tanh form. */
    if (activation && (!name || (strcmp(name, "gelu_new") != 0 && strcmp(name, "gelu_pytorch_tanh") != 0)))
        return field_error(folder, config_name, "activation_function", activation,
                           "gelu_new, the only one computed here; choose another model", err);
    const json_t *epsilon = json_object_get(object, "layer_norm_epsilon");
    if (epsilon && !(fabs(json_number_value(epsilon) - norm_epsilon) <= 1e-6 * norm_epsilon))
        return field_error(folder, config_name, "layer_norm_epsilon", epsilon,
                           "1e-5, the only one computed here; choose another model", err);
    const json_t *inner = json_object_get(object, "n_inner");
    if (inner && !json_is_null(inner) &&
        (!json_is_integer(inner) || (uint64_t)json_integer_value(inner) != 4 * (uint64_t)channels))
        return field_error(folder, config_name, "n_inner", inner,
                           "4 n_embd or null, the only width computed here; choose another model", err);
    return true;
}

static bool config_from_json(const json_t *object, const char *folder, GptConfig *config, Error *err) {
    const json_t *model_type = json_object_get(object, "model_type");
    const char *type = json_string_value(model_type);
    if (!type || (strcmp(type, model_type_gpt2) != 0 && strcmp(type, model_type_rotary) != 0))
        return field_error(folder, config_name, "model_type", model_type,
                           "gpt2 or train_gpt_rotary; choose another model", err);
    const struct {
        const char *key;
        size_t *value;
    } sizes[] = {
        {"n_layer", &config->layers},  {"n_head", &config->heads},     {"n_embd", &config->channels},
        {"n_positions", &config->ctx}, {"vocab_size", &config->vocab},
    };
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        uint64_t value;
        if (!get_count(object, folder, config_name, sizes[i].key, true, &value, err)) return false;
        *sizes[i].value = (size_t)value;
    }
    config->position = strcmp(type, model_type_rotary) == 0 ? POSITION_ROTARY : POSITION_LEARNED;
    config->dropout = (float)json_number_value(json_object_get(object, "resid_pdrop")); /* 0 if missing */
    if (!gpt_check_config(config, err)) return error_prefix(err, "%s/%s", folder, config_name);
    return check_fixed(object, folder, config->channels, err);
}

static bool read_config(const char *path, GptConfig *config, Error *err) {
    json_t *object = read_object(path, config_name, err);
    *config = (GptConfig){0};
    const bool done = object && config_from_json(object, path, config, err);
    json_decref(object);
    return done;
}

/* A folder of ours names its files in MANIFEST; one from elsewhere has none. */
static bool check_folder(const char *path, bool ours, Error *err) {
    if (!folder_exists(path))
        return error_set(
            err, "no folder %s: expected a checkpoint, or a GPT-2 folder with %s and %s; check the path",
            path, config_name, weights_name);
    char *manifest = xformat("%s/MANIFEST", path);
    PathKind kind;
    const bool known = path_look(manifest, &kind, err);
    free(manifest);
    return known && ((!ours && kind != PATH_FILE) || folder_check_manifest(path, err));
}

bool checkpoint_config(const char *path, GptConfig *config, Error *err) {
    return check_folder(path, false, err) && read_config(path, config, err);
}

/* ==== state.json ==== */

/* The fields that are 64-bit counters, and those that are real numbers; a loss that is not a number (not
 * evaluated, none yet) stands there as null. */
static const struct {
    const char *key;
    size_t offset;
    bool may_be_missing; /* in a checkpoint of an earlier version: 0 */
} state_counters[] = {
    {"step", offsetof(TrainState, step), false},
    {"updates", offsetof(TrainState, updates), false},
    {"tokens", offsetof(TrainState, tokens), false},
    {"total_steps", offsetof(TrainState, total_steps), false},
    {"best_step", offsetof(TrainState, best_step), false},
    {"bad_steps", offsetof(TrainState, bad_steps), true},
    {"cut_short", offsetof(TrainState, cut_short), true},
    {"stories", offsetof(TrainState, stories), true},
};
static const struct {
    const char *key;
    size_t offset;
    bool may_be_null;
} state_numbers[] = {
    {"seconds", offsetof(TrainState, seconds), false},
    {"eval_loss", offsetof(TrainState, eval_loss), true},
    {"best_loss", offsetof(TrainState, best_loss), true},
};
enum {
    STATE_COUNTERS = sizeof state_counters / sizeof state_counters[0],
    STATE_NUMBERS = sizeof state_numbers / sizeof state_numbers[0]
};

static uint64_t *counter_of(TrainState *state, size_t i) {
    return (uint64_t *)(void *)((char *)state + state_counters[i].offset);
}
static double *number_of(TrainState *state, size_t i) {
    return (double *)(void *)((char *)state + state_numbers[i].offset);
}

static bool write_state(FolderWrite *folder, TrainState state, Error *err) {
    json_t *object = json_object();
    for (size_t i = 0; i < STATE_COUNTERS; i++) {
        const uint64_t value = *counter_of(&state, i);
        if (value > INT64_MAX) {
            json_decref(object);
            return error_set(err, "cannot save %s %" PRIu64 ": it does not fit into 63 bits",
                             state_counters[i].key, value);
        }
        json_object_set_new(object, state_counters[i].key, json_integer((json_int_t)value));
    }
    for (size_t i = 0; i < STATE_NUMBERS; i++) {
        const double value = *number_of(&state, i);
        json_object_set_new(object, state_numbers[i].key, isfinite(value) ? json_real(value) : json_null());
    }
    return write_object(folder, state_name, object, 17, err); /* 17 digits give back the same double */
}

static bool state_from_json(const json_t *object, const char *folder, TrainState *state, Error *err) {
    for (size_t i = 0; i < STATE_COUNTERS; i++) {
        const char *key = state_counters[i].key;
        if (state_counters[i].may_be_missing && !json_object_get(object, key)) *counter_of(state, i) = 0;
        else if (!get_count(object, folder, state_name, key, false, counter_of(state, i), err)) return false;
    }
    for (size_t i = 0; i < STATE_NUMBERS; i++) {
        const json_t *value = json_object_get(object, state_numbers[i].key);
        const bool null = state_numbers[i].may_be_null && json_is_null(value);
        if (!null && !json_is_number(value))
            return field_error(folder, state_name, state_numbers[i].key, value,
                               "a number; take another checkpoint", err);
        *number_of(state, i) = null ? NAN : json_number_value(value);
    }
    return true;
}

bool checkpoint_read_state(const char *path, TrainState *state, Error *err) {
    json_t *object = read_object(path, state_name, err);
    *state = (TrainState){0};
    const bool done = object && state_from_json(object, path, state, err);
    json_decref(object);
    return done;
}

static bool same_loss(double a, double b) {
    return a == b || (isnan(a) && isnan(b));
}

/* The same point of the same run, knowing the same; the seconds it took may differ. */
static bool same_state(const TrainState *a, const TrainState *b) {
    return a->step == b->step && a->updates == b->updates && a->tokens == b->tokens &&
           a->total_steps == b->total_steps && a->best_step == b->best_step && a->bad_steps == b->bad_steps &&
           a->cut_short == b->cut_short && a->stories == b->stories &&
           same_loss(a->eval_loss, b->eval_loss) && same_loss(a->best_loss, b->best_loss);
}

/* ==== a whole checkpoint ==== */

size_t checkpoint_bytes(const GptConfig *config) {
    const size_t copies = WEIGHTS_PARTS + OPTIMIZER_PARTS;
    size_t count, total, bytes = SMALL_FILES_BYTES;
    Parameter *table = gpt_parameters(config, &count, &total, NULL);
    bool fits = table != NULL;
    for (size_t i = 0; fits && i < count; i++) {
        size_t tensor;
        fits = size_mul(table[i].size, copies * sizeof(float), &tensor) &&
               size_add(tensor, copies * HEADER_ENTRY_BYTES, &tensor) && size_add(bytes, tensor, &bytes);
    }
    free(table);
    return fits ? bytes : SIZE_MAX;
}

static bool check_space(const char *checkpoints, const GptConfig *config, const CheckpointFile *files,
                        size_t n_files, Error *err) {
    size_t needed = checkpoint_bytes(config);
    for (size_t i = 0; i < n_files; i++) size_add(needed, files[i].size, &needed);
    uint64_t free_bytes;
    if (!disk_free_bytes(checkpoints, &free_bytes, err)) return false;
    if (free_bytes >= needed) return true;
    return error_set(
        err,
        "no room for a checkpoint in %s: found %.1f MB free, expected %.1f MB; free some space or "
        "choose another disk with -run",
        checkpoints, (double)free_bytes * 1e-6, (double)needed * 1e-6);
}

static bool write_checkpoint(const char *path, Gpt *gpt, const TrainState *state, const CheckpointFile *files,
                             size_t n_files, Error *err) {
    FolderWrite *folder = folder_write_begin(path, err);
    if (!folder) return false;
    bool done = write_tensors(folder, weights_name, gpt, weights_parts, WEIGHTS_PARTS, err) &&
                write_object(folder, config_name, config_to_json(&gpt_setup(gpt)->config), 15, err) &&
                write_tensors(folder, optimizer_name, gpt, optimizer_parts, OPTIMIZER_PARTS, err) &&
                write_state(folder, *state, err);
    for (size_t i = 0; i < n_files && done; i++)
        done = folder_write_file(folder, files[i].name, files[i].bytes, files[i].size, err);
    done = done && folder_write_commit(folder, err);
    if (!done) folder_write_abort(folder);
    return done;
}

/* What is known of a checkpoint. Of one that cannot be read nothing is: it may be good. */
typedef enum Health { GOOD, DAMAGED, UNREADABLE } Health;

/* Good: MANIFEST holds, and the state can be read. err is not NULL. */
static Health check_health(const char *path, TrainState *state, Error *err) {
    PathKind kind;
    if (path_look(path, &kind, err) && folder_check_manifest(path, err) &&
        checkpoint_read_state(path, state, err))
        return GOOD;
    return err->unreadable ? UNREADABLE : DAMAGED;
}

/* Whether a folder holds files of a checkpoint and nothing else: all of them, or some where a removal was cut short.
 * Only then is it removed. */
static bool is_ours(const char *path) {
    static const char *const ours[] = {weights_name, optimizer_name, config_name,     state_name,
                                       "MANIFEST",   "merges.txt",   "tokenizer.json"};
    char **names;
    size_t count;
    if (!folder_names(path, &names, &count, NULL)) return false;
    bool all = true;
    for (size_t i = 0; i < count; i++) {
        size_t k = 0;
        while (k < sizeof ours / sizeof ours[0] && strcmp(names[i], ours[k]) != 0) k++;
        char *entry = xformat("%s/%s", path, names[i]);
        all = all && k < sizeof ours / sizeof ours[0] && !folder_exists(entry);
        free(entry);
        free(names[i]);
    }
    free(names);
    return all;
}

static bool remove_ours(const char *path, Error *err) {
    if (is_ours(path)) return folder_remove(path, err);
    return error_set(
        err, "%s is not removed: it holds something that is no part of a checkpoint; move it away", path);
}

/* What stands at a path where a checkpoint is to be written: nothing, or one of which is known whether it is good.
 * Anything else is an error, since it would have to give way. */
typedef struct Old {
    bool there;
    Health health;
    TrainState state; /* of a good one */
} Old;

static bool look_at_old(const char *path, Old *old, Error *err) {
    PathKind kind;
    *old = (Old){.health = DAMAGED};
    if (!path_look(path, &kind, err)) return false;
    old->there = kind != PATH_NONE;
    if (!old->there) return true;
    Error reason;
    old->health = check_health(path, &old->state, &reason);
    if (old->health == UNREADABLE) return error_set(err, "%s is not written again: %s", path, reason.text);
    return old->health == GOOD || is_ours(path) ||
           error_set(err, "cannot write folder %s: what is there is no checkpoint; move it away", path);
}

/* Makes room for a new checkpoint at `path`, where there is an old one, without ever losing a good one: the old is
 * renamed to `aside`, where it still counts as a checkpoint of its step. If both are there (a crash came between
 * writing the new and removing the old), the better of the two stays. */
static bool move_aside(const char *path, Health health, const char *aside, Error *err) {
    Old second;
    if (!look_at_old(aside, &second, err)) return false;
    if (second.there) {
        if (health == DAMAGED && second.health == GOOD) return remove_ours(path, err);
        if (!remove_ours(aside, err)) return false;
    }
    if (rename(path, aside) == 0) return true;
    return error_set(err, "cannot rename %s to %s: %s; check their permissions", path, aside,
                     strerror(errno));
}

bool checkpoint_save(const char *checkpoints, Gpt *gpt, const TrainState *state, const CheckpointFile *files,
                     size_t n_files, Error *err) {
    char *path = xformat("%s/step-%08" PRIu64, checkpoints, state->step), *aside = xformat("%s.old", path);
    Old old;
    bool done = folder_make(checkpoints, err) && look_at_old(path, &old, err);
    if (done && !(old.there && old.health == GOOD && same_state(&old.state, state))) {
        done = check_space(checkpoints, &gpt_setup(gpt)->config, files, n_files, err) &&
               (!old.there || move_aside(path, old.health, aside, err)) &&
               write_checkpoint(path, gpt, state, files, n_files, err);
    }
    if (done) (void)remove_ours(aside, NULL); /* one that cannot be removed now does no harm */
    free(aside);
    free(path);
    return done;
}

bool checkpoint_load(const char *path, Gpt *gpt, TrainState *state, Error *err) {
    const GptConfig *ours = &gpt_setup(gpt)->config;
    GptConfig config;
    if (!check_folder(path, state != NULL, err) || !read_config(path, &config, err)) return false;
    /* Shapes, which are compared below, do not tell these. */
    if (config.heads != ours->heads || config.position != ours->position)
        return error_set(
            err,
            "%s/%s says %zu heads and %s positions, the model to be filled has %zu and %s; use the "
            "checkpoint's -heads and -position",
            path, config_name, config.heads, config.position == POSITION_ROTARY ? "rotary" : "learned",
            ours->heads, ours->position == POSITION_ROTARY ? "rotary" : "learned");
    /* Training that goes on does so with these. */
    if (state && (config.ctx != ours->ctx || config.dropout != ours->dropout))
        return error_set(
            err,
            "%s/%s says a ctx of %zu and a dropout of %g, the run's settings say %zu and %g; put "
            "into its run.json what it was trained with",
            path, config_name, config.ctx, (double)config.dropout, ours->ctx, (double)ours->dropout);
    if (state && !checkpoint_read_state(path, state, err)) return false;

    /* Both files pass every check before the first number moves. */
    TensorSource weights, optimizer;
    bool done = source_open(&weights, path, weights_name, gpt, weights_parts, WEIGHTS_PARTS, err);
    if (done && state) {
        done = source_open(&optimizer, path, optimizer_name, gpt, optimizer_parts, OPTIMIZER_PARTS, err) &&
               source_read(&optimizer, gpt, err);
        source_close(&optimizer);
    }
    done = done && source_read(&weights, gpt, err);
    source_close(&weights);
    if (done && state) gpt_set_updates(gpt, state->updates);
    return done;
}

/* ==== the folders of a run ==== */

typedef struct StepFolder {
    char *path;
    uint64_t step;
    bool aside; /* step-N.old: what was moved aside while step-N was written again */
} StepFolder;

/* "step-" and at least 8 digits, as checkpoint_save writes them; everything else is not ours to touch. */
static bool parse_step(const char *name, StepFolder *folder) {
    if (strncmp(name, "step-", 5) != 0) return false;
    const char *digits = name + 5;
    const size_t n = strspn(digits, "0123456789");
    folder->aside = strcmp(digits + n, ".old") == 0;
    if (n < 8 || n > 19 || (n > 8 && digits[0] == '0') || (digits[n] && !folder->aside)) return false;
    folder->step = strtoull(digits, NULL, 10);
    return true;
}

/* Newest first; of one step, what was moved aside comes last. */
static int compare_steps(const void *a, const void *b) {
    const StepFolder *x = a, *y = b;
    if (x->step != y->step) return x->step > y->step ? -1 : 1;
    return (int)x->aside - (int)y->aside;
}

static bool list_steps(const char *checkpoints, StepFolder **steps, size_t *count, Error *err) {
    char **names;
    size_t n_names;
    *steps = NULL, *count = 0;
    if (!folder_names(checkpoints, &names, &n_names, err)) return false;
    *steps = xcalloc(n_names, sizeof **steps);
    for (size_t i = 0; i < n_names; i++) {
        StepFolder *folder = &(*steps)[*count];
        PathKind kind;
        folder->path = xformat("%s/%s", checkpoints, names[i]);
        /* One that cannot be looked at is not left out: it is there. */
        if (parse_step(names[i], folder) && (!path_look(folder->path, &kind, NULL) || kind == PATH_FOLDER))
            (*count)++;
        else free(folder->path);
        free(names[i]);
    }
    free(names);
    if (*count) qsort(*steps, *count, sizeof **steps, compare_steps);
    return true;
}

static void free_steps(StepFolder *steps, size_t count) {
    for (size_t i = 0; i < count; i++) free(steps[i].path);
    free(steps);
}

/* Newest to oldest, passing over the damaged ones; the first good one, or with `lowest` that with the lowest
 * held-out loss (of equal ones the newest). Only the latter, which is for reading, passes over one that cannot be read:
 * who went on from an older one would write the newer steps again, and remove it. */
static char *find_among(const StepFolder *steps, size_t count, const char *checkpoints, bool lowest,
                        Buffer *passed_over, Error *err) {
    size_t found = SIZE_MAX;
    double best = INFINITY;
    Error reason = {0};
    for (size_t i = 0; i < count && (lowest || found == SIZE_MAX); i++) {
        TrainState state;
        const Health health = check_health(steps[i].path, &state, &reason);
        if (health == UNREADABLE && !lowest)
            return error_set(err, "%s, or move that checkpoint away to go on without it", reason.text), NULL;
        if (health != GOOD) {
            buffer_append_text(passed_over, reason.text);
            buffer_append_text(passed_over, "\n");
        } else if (found == SIZE_MAX || state.eval_loss < best) { /* NaN is below nothing */
            found = i;
            best = isnan(state.eval_loss) ? INFINITY : state.eval_loss;
        }
    }
    char *path = found == SIZE_MAX ? NULL : xstrdup(steps[found].path);
    if (!path && count == 0)
        error_set(err, "no checkpoint in %s; train for longer, or give another run", checkpoints);
    else if (!path)
        error_set(err, "all %zu checkpoints in %s are damaged, the oldest so: %s; give another run", count,
                  checkpoints, reason.text);
    return path;
}

static bool same_steps(const StepFolder *a, size_t a_count, const StepFolder *b, size_t b_count) {
    bool same = a_count == b_count;
    for (size_t i = 0; i < a_count && same; i++) same = strcmp(a[i].path, b[i].path) == 0;
    return same;
}

/* Where the run is being trained, what was listed may be gone or half removed when it is read: then there are
 * newer ones, and those are listed anew. */
static char *find_checkpoint(const char *checkpoints, bool lowest, Buffer *passed_over, Error *err) {
    StepFolder *steps, *now;
    size_t count, now_count;
    char *found = NULL;
    if (!list_steps(checkpoints, &steps, &count, err)) return NULL;
    for (int tries = 0; tries < FIND_TRIES; tries++) {
        Buffer damaged = {0};
        found = find_among(steps, count, checkpoints, lowest, &damaged, err);
        bool settled = (found && damaged.size == 0) || tries + 1 == FIND_TRIES;
        if (!settled && list_steps(checkpoints, &now, &now_count, NULL)) {
            settled = same_steps(steps, count, now, now_count);
            free_steps(steps, count);
            steps = now, count = now_count;
        }
        if (settled && passed_over) buffer_append(passed_over, damaged.data, damaged.size);
        buffer_free(&damaged);
        if (settled) break;
        free(found);
        found = NULL;
    }
    free_steps(steps, count);
    return found;
}

bool checkpoint_any(const char *checkpoints, bool *any, Error *err) {
    PathKind kind;
    StepFolder *steps = NULL;
    size_t count = 0;
    const bool done = path_look(checkpoints, &kind, err) &&
                      (kind == PATH_NONE || list_steps(checkpoints, &steps, &count, err));
    *any = count > 0;
    free_steps(steps, count);
    return done;
}

char *checkpoint_newest(const char *checkpoints, Buffer *passed_over, Error *err) {
    return find_checkpoint(checkpoints, false, passed_over, err);
}

char *checkpoint_best(const char *checkpoints, Buffer *passed_over, Error *err) {
    return find_checkpoint(checkpoints, true, passed_over, err);
}

/* "step-00001000.tmp-123": what a writer left that was killed. */
static bool is_leftover(const char *name) {
    if (strncmp(name, "step-", 5) != 0) return false;
    const char *rest = name + 5 + strspn(name + 5, "0123456789");
    return rest > name + 5 && strncmp(rest, ".tmp-", 5) == 0 && rest[5] &&
           !rest[5 + strspn(rest + 5, "0123456789")];
}

static bool remove_leftovers(const char *checkpoints, Error *err) {
    char **names;
    size_t count;
    if (!folder_names(checkpoints, &names, &count, err)) return false;
    bool done = true;
    for (size_t i = 0; i < count; i++) {
        char *path = xformat("%s/%s", checkpoints, names[i]);
        if (done && is_leftover(names[i]) && is_ours(path)) done = folder_remove(path, err);
        free(path);
        free(names[i]);
    }
    free(names);
    return done;
}

bool checkpoint_prune(const char *checkpoints, size_t keep, uint64_t best_step, Error *err) {
    StepFolder *steps;
    size_t count, newest_good = 0, kept = 0;
    if (!list_steps(checkpoints, &steps, &count, err)) return false;
    bool *unread = xcalloc(count, sizeof *unread), readable = true, done = true;
    for (; newest_good < count; newest_good++) {
        TrainState state;
        Error reason;
        const Health health = check_health(steps[newest_good].path, &state, &reason);
        if (health == GOOD) break;
        unread[newest_good] = health == UNREADABLE;
        if (health == UNREADABLE)
            readable = error_set(err, "%s; that checkpoint stays as it is", reason.text);
    }
    /* Where none is good, nothing can be said to be worth less than another. Damaged ones newer than the
     * newest good one are not counted, so that they cannot push it out. */
    for (size_t i = 0; newest_good < count && i < count && done; i++) {
        if (i != newest_good && !is_ours(steps[i].path)) continue;
        const bool among_newest = i >= newest_good && kept++ < keep;
        if (i != newest_good && !among_newest && !unread[i] && steps[i].step != best_step)
            done = folder_remove(steps[i].path, err);
    }
    free(unread);
    free_steps(steps, count);
    return done && remove_leftovers(checkpoints, err) && readable;
}
