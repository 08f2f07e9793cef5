/* fuzz_shards.c - token shards, ours and llm.c's: whatever the file holds, no id out of range comes out of
 * it.
 *
 * The first byte of the input chooses how the rest becomes a file, so that what lies behind a checksum or a
 * long header of zeros is reached, too:
 *   bits 0-1   0: the file as it is; 1: the header's first 44 bytes, then tokens: zeros and the CRCs that fit
 *              are put in; 2: the first 12 bytes of an llm.c header, then tokens: zeros are put in
 *   bit 2      a tokenizer is given
 *   bits 3-7   tokens that are read at a time, less one */
#include "fuzz.h"

#include "../../data/batches.h"

enum { HEADER = 1024, OUR_FIELDS = 44, LLMC_FIELDS = 12, BLOCK = 1 << 20 };

static void append_crc(Buffer *file, const uint8_t *bytes, size_t size) {
    const uint32_t crc = checksum_crc32(0, bytes, size);
    buffer_append(file, &crc, sizeof crc);
}

static void make_file(int form, const uint8_t *input, size_t size, Buffer *file) {
    static const uint8_t zeros[HEADER];
    const size_t fields = form == 1 ? OUR_FIELDS : form == 2 ? LLMC_FIELDS : size;
    const size_t given = size < fields ? size : fields;
    buffer_append(file, input, given);
    if (form != 1 && form != 2) return;
    buffer_append(file, zeros, HEADER - (form == 1 ? sizeof(uint32_t) : 0) - given);
    if (form == 1) append_crc(file, file->data, file->size);
    buffer_append(file, input + given, size - given);
    if (form == 1) append_crc(file, input + given, size - given); /* smaller than a block */
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size) {
    static char *path;
    static Bpe *bpe;
    if (!path) {
        static const char merges[] = "#version: 0.2\nh e\nhe l\n";
        path = fuzz_path("input.bin");
        bpe = bpe_from_merges_text((const uint8_t *)merges, sizeof merges - 1, "merges", NULL);
        MUST(bpe);
    }
    if (size == 0 || size > BLOCK) return 0;
    Buffer file = {0};
    make_file(input[0] & 3, input + 1, size - 1, &file);
    fuzz_write(path, file.data, file.size);
    buffer_free(&file);

    Error err = {0};
    Shards *shards = shards_open(path, input[0] & 4 ? bpe : NULL, &err);
    if (!shards) {
        fuzz_check_error(&err, path);
        return 0;
    }
    const uint64_t tokens = shards_tokens(shards);
    const size_t step = 1 + (input[0] >> 3);
    uint32_t ids[32];
    MUST(tokens > 0 && tokens <= size);
    BpeFingerprint fingerprint;
    if (shards_fingerprint(shards, &fingerprint) && input[0] & 4)
        MUST(bpe_same(fingerprint, bpe_fingerprint(bpe)));
    bool good = true;
    for (uint64_t first = 0; first < tokens && good; first += step) {
        const size_t count = tokens - first < step ? (size_t)(tokens - first) : step;
        good = shards_read(shards, first, count, ids, &err);
        for (size_t i = 0; i < count && good; i++) MUST(ids[i] < shards_vocab(shards));
    }
    if (!good) fuzz_check_error(&err, path);
    MUST(!shards_read(shards, tokens, 1, ids, &err) && !shards_read(shards, UINT64_MAX, 1, ids, &err));

    Batches *batches = batches_open(shards, step, 1, true, &err);
    MUST(!batches == (tokens < step + 1));
    if (batches) {
        int32_t inputs[32], targets[32];
        const uint64_t windows = batches_windows(batches);
        MUST(windows == (tokens - 1) / step);
        for (uint64_t g = 0; g < windows && g < 8; g++) {
            if (!batches_get(batches, g, 1, inputs, targets, &err)) {
                MUST(!good);
                continue;
            }
            for (size_t i = 0; i < step; i++) {
                MUST(inputs[i] >= 0 && (uint32_t)inputs[i] < shards_vocab(shards));
                MUST(targets[i] >= 0 && (uint32_t)targets[i] < shards_vocab(shards));
                MUST(i == 0 || inputs[i] == targets[i - 1]);
            }
        }
        batches_close(batches);
    }
    shards_close(shards);
    return 0;
}
